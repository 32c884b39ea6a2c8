# SPDX-License-Identifier: Apache-2.0
"""Weight-only dots in groups with execution="native": another sum than the exact product, within a bound."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from lanes import cases

import jaxquant as jq
from jaxquant import PerBlock, QuantSpec, quantize_fn
from jaxquant._arrays._qarray import inside
from jaxquant._contract import _in_groups
from jaxquant._contract._dot import Dot

K, ROWS, SIZE = 128, 3, 32
MATMUL = ((1,), (0,)), ((), ())
FORMS = {
    "a batch": _in_groups.by_batch,
    "a batch of pairs": functools.partial(_in_groups.by_batch, each=2),
    "one by one": _in_groups.one_by_one,
    "spread scales": _in_groups.by_spread_scales,
}
SPECS = {
    "4 bits": lambda axis: QuantSpec(bits=4, granularity=PerBlock(axis, SIZE)),
    "affine": lambda axis: QuantSpec(symmetric=False, granularity=PerBlock(axis, SIZE)),
    "blocks of both axes": lambda axis: QuantSpec(granularity=PerBlock((axis, 1 - axis), (SIZE, 4))),
    "MXFP4": lambda axis: jq.mxfp4_spec(axis=axis),
}
DOTS = {  # of x with a weight, the axis of which is in groups; the order of both, and the shape of the weight
    "x @ w": (MATMUL, 0, False),
    "x @ w.T": ((((1,), (1,)), ((), ())), 1, False),
    "w @ x.T": ((((1,), (1,)), ((), ())), 1, True),
}


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def on_cpu(monkeypatch, form):
    monkeypatch.setattr(_in_groups, "_forms", lambda *_: {"cpu": form})


def test_each_form_is_within_its_bound(monkeypatch):
    """(2 ** -9 + 2 K 2 ** -24) sum |x| |w| of bfloat16, and half a step of the result. One program has all of them."""

    @jax.jit
    def everything(x, weights):
        found = {}
        for (dot, (numbers, axis, is_first)), spec in itertools.product(DOTS.items(), SPECS):
            q, side = jq.quantize(weights[axis], SPECS[spec](axis)), 0 if is_first else 1
            of, pair = Dot(*numbers, dtype=jnp.bfloat16), (q, x) if is_first else (x, q)
            exact = jq.dot_general(*pair, numbers)

            def value(form, of=of, side=side, q=q, exact=exact):
                on_cpu(monkeypatch, form)
                return _in_groups.in_groups(of, side, inside(q), x, lambda: exact).astype(jnp.float32)

            values = {name: value(form) for name, form in FORMS.items()}
            found[dot, spec] = jq.dequantize(q), exact.astype(jnp.float32), values
        return found

    x, weights = normal(ROWS, K).astype(jnp.bfloat16), [normal(K, 8, seed=1), normal(8, K, seed=1)]
    for (dot, spec), (w, exact, values) in jax.device_get(everything(x, weights)).items():
        numbers, _, is_first = DOTS[dot]
        a, b = (np.asarray(v, np.float64) for v in ((w, x) if is_first else (x, w)))
        contract = functools.partial(np.tensordot, axes=numbers[0])
        want, size = contract(a, b), contract(abs(a), abs(b))
        bound = (2**-9 + 2 * K * 2**-24) * size + 2**-9 * abs(want)
        for form, got in values.items():
            assert (abs(got - want) <= bound).all(), (dot, spec, form)
            # It is another sum, but where the values are scaled before, or scaled have few bits.
            assert form == "spread scales" or spec == "MXFP4" or not (got == exact).all(), (dot, spec, form)


@cases("form", list(FORMS), ["a batch"])
def test_it_is_trained_and_served_with_the_gradient_of_the_exact_product(form, monkeypatch):
    f = lambda params, x: jnp.einsum("bsk,bkn->bsn", x, params["w"])
    params, x = {"w": normal(2, K, 8)}, normal(2, ROWS, K)
    rule = "w", jq.weight_spec(4, block_size=SIZE)
    exact, native = (quantize_fn(f, [rule], execution=name) for name in ("auto", "native"))
    both = lambda q, params: jax.vjp(q, params, x)

    @jax.jit
    def values(params):
        on_cpu(monkeypatch, FORMS[form])
        (y, vjp), (wanted, wanted_vjp) = both(native, params), both(exact, params)
        g = jnp.sin(wanted)
        return y, native(exact.freeze(params, x), x), wanted, vjp(g), wanted_vjp(g)

    y, served, wanted, gradients, wanted_gradients = values(params)
    assert_same_bits(y, served)
    jax.tree.map(assert_same_bits, gradients, wanted_gradients)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5)
    params["w"][0, 0, 0] = np.nan
    with_nan = np.asarray(values(params)[0])
    assert np.isnan(with_nan[0, :, 0]).all()
    assert np.isfinite(with_nan[0, :, 1:]).all()


@pytest.mark.bits
def test_a_cpu_has_the_exact_value():
    x, w = normal(ROWS, K), normal(K, 8, seed=1)

    @jax.jit
    def both(x, w):
        q = jq.quantize(w, SPECS["4 bits"](0))
        return [jq.dot_general(x, q, MATMUL, execution=name) for name in ("native", "auto")]

    assert_same_bits(*both(x, w))
    assert {*_in_groups._forms(8, 4, SIZE)} == {"tpu", "cuda"}


def test_the_plan_says_so():
    q = quantize_fn(lambda params, x: x @ params["w"], [("w", jq.weight_spec(4, block_size=SIZE))], execution="native")
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    plan = q.plan({"w": like(K, 8)}, like(ROWS, K))
    assert [site.is_in_groups for site in plan] == [False, True]
    assert "native: 1 by sums of groups on TPUs and GPUs; CPUs have the exact value" in str(plan)
