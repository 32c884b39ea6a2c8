# SPDX-License-Identifier: Apache-2.0
"""One site at a time under the modes of jax: 64 bits, looks for NaN, strict promotion of ranks, checks, leaks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits, x64
from jax import lax
from lanes import cases

from jaxquant import (
    PerBlock,
    PerChannel,
    PerToken,
    QParams,
    QuantSpec,
    Rule,
    activation_spec,
    fake_quant,
    fit_qparams,
    float8_spec,
    mxfp4_spec,
    nvfp4_spec,
    quantize_fn,
    solve,
    weight_spec,
)
from jaxquant.cache import update_slice, zeros
from jaxquant.delayed import delayed_qparams, split_histories, update_histories

F = np.float32
MODES = {
    "64 bits": x64,
    "NaN": lambda: jax.debug_nans(True),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "checks": lambda: jax.enable_checks(True),
    "leaks": jax.checking_leaks,
}


def normal(seed, *shape):
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(F))


W8, A8, X = weight_spec(8), activation_spec(8), normal(0, 4, 8)
NHWC = ("NHWC", "HWIO", "NHWC")
SCANNED = Rule("", QuantSpec(), A8)
SITES = {  # function, rule, parameter, other arguments
    "8 bits": (lambda w, x: x @ w, Rule("", W8, A8), normal(1, 8, 6), (X,)),
    "weight-only": (lambda w, x: x @ w, Rule("", W8), normal(1, 8, 6), (X,)),
    "groups": (lambda w, x: x @ w, Rule("", weight_spec(4, block_size=4), QuantSpec()), normal(1, 8, 6), (X,)),
    "tokens": (lambda w, x: x @ w, Rule("", W8, activation_spec(8, granularity=PerToken())), normal(1, 8, 6), (X,)),
    "float8": (lambda w, x: x @ w, Rule("", float8_spec(), float8_spec()), normal(1, 8, 6), (X,)),
    "gradient": (lambda w, x: x @ w, Rule("", W8, A8, gradient=QuantSpec()), normal(1, 8, 6), (X,)),
    "history": (
        lambda w, x: x @ w, Rule("", QuantSpec(), QuantSpec(), gradient=QuantSpec(), history=2), normal(1, 8, 6), (X,),
    ),
    "rotated": (solve.with_rotation(lambda w, x: x @ w, ""), Rule("", W8, A8), normal(1, 8, 6), (X,)),
    "experts": (
        lambda w, x, n: lax.ragged_dot(x, w, n), Rule("", W8, A8), normal(1, 3, 8, 6), (X, jnp.array([2, 0, 2])),
    ),
    "a scan": (lambda w, x: lax.scan(lambda x, w: (x @ w, None), x, w)[0], SCANNED, normal(1, 2, 8, 8), (X,)),
    "a convolution": (
        lambda w, x: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC), Rule("", W8, A8),
        normal(1, 3, 3, 4, 6), (normal(0, 2, 5, 5, 4),),
    ),
    "a tied embedding": (
        lambda w, x: w[jnp.argmax(x, -1)] @ w.T, Rule("", W8, A8, everywhere=True), normal(1, 8, 6), (X,),
    ),
}  # fmt: skip
EVERY = list(itertools.product(MODES, SITES))


@cases("mode, site", EVERY, [("NaN", "8 bits")])
def test_a_site(mode, site):
    """Trained, with the gradient of scales, frozen, and in a program that closes over what is frozen."""
    f, rule, w, args = SITES[site]
    q = quantize_fn(f, [rule])
    want = jax.jit(q)(w, *args)
    with MODES[mode]():
        qparams = q.init_qparams(w, *args)
        trained, delayed = qparams, {}
        if rule.history:
            trained, histories = split_histories(qparams)
            delayed = delayed_qparams(histories)
        loss = lambda w, qparams: jnp.square(q(w, *args, qparams=qparams)).sum()
        _, seen = jax.jit(jax.grad(loss, (0, 1)))(w, {**trained, **delayed})
        if delayed:
            update_histories(histories, {key: seen[key] for key in histories})
        frozen = q.freeze(w, *args, qparams=trained)
        for value in (q(w, *args), jax.jit(q)(w, *args)):
            assert_same_bits(value, want)
        static = jax.jit(q)(w, *args, qparams=trained)
        assert_same_bits(q(frozen, *args, qparams=trained), static)
        assert_same_bits(jax.jit(lambda: q(frozen, *args, qparams=trained))(), static)
        q.observe(w, *args, histogram=True)


SPECS = {
    "tensor": A8, "channel": QuantSpec(granularity=PerChannel(-1)), "float8": float8_spec(), "mxfp4": mxfp4_spec(-1),
    "nvfp4": nvfp4_spec(-1), "blocks": QuantSpec(bits=4, granularity=PerBlock(-1, 32)),
}  # fmt: skip


@cases("mode, spec", list(itertools.product(MODES, SPECS)))
def test_the_gradient_of_a_scale(mode, spec):
    """Eagerly, where each op is looked at."""
    x, spec = normal(0, 4, 64), SPECS[spec]
    with MODES[mode]():
        qparams = fit_qparams(x, spec)
        of = lambda scale: fake_quant(x, spec, QParams(scale, qparams.zero_point)).sum()
        assert np.isfinite(jax.grad(of)(qparams.scale)).all()
        for method in ("percentile", "mse", "lsq"):
            fit_qparams(x, spec, method)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["64 bits", pytest.param("leaks", marks=pytest.mark.slow)])
def test_a_cache_at_traced_positions(mode):
    cache, new = zeros((4, 6), QuantSpec(granularity=PerChannel(0))), jnp.ones((1, 6), F)
    with MODES[mode]():
        step = lambda cache, t: (update_slice(cache, new, (t, 0)), cache[t])
        last, _ = lax.scan(step, cache, jnp.arange(4))
        assert (np.asarray(last.values) == 127).all()
        for t in (jnp.int32(1), jnp.asarray(1), 1):
            assert np.asarray(update_slice(cache, new, (t, 0))[t].values).tolist() == [127] * 6


@cases("mode", MODES, [])
def test_solvers(mode):
    f = lambda p, x: jax.nn.relu((x * p["g"]) @ p["a"] + p["b"]) @ p["w"]
    params = {"g": jnp.ones((1, 8), F), "a": normal(1, 8, 8), "b": normal(2, 1, 8), "w": normal(3, 8, 6)}
    q, x = quantize_fn(f, [Rule(name, W8, A8) for name in ("a", "w")]), normal(4, 32, 8)
    with MODES[mode]():
        grams = q.observe(params, x, gram=True)
        qparams = solve.ranges(params, q, grams, x)
        solved = [solve.gptq(params, q, grams, x, qparams=qparams), solve.smooth(params, q, grams, x)]
        solved += [solve.adaround(params, q, grams, x, qparams=qparams, steps=3), solve.equalize(params, q, x)]
        solved += [
            solve.bias_correct(params, q, grams, x, qparams=qparams, progress=lambda *of: None),
            solve.rotate(params, q, x),
        ]
        solved += [solve.low_rank(params, q, grams, x, qparams=qparams, rank=2)]
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(solved))


def test_modes_are_what_jax_calls_so():
    """Each changes something: else the tests above would see nothing."""
    with MODES["NaN"](), pytest.raises(FloatingPointError):
        jnp.zeros(()) / 0
    with MODES["ranks"](), pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones(3)
    with MODES["64 bits"]():
        assert jnp.arange(2).dtype == jnp.int64
