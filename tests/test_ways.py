# SPDX-License-Identifier: Apache-2.0
"""The less common ways that parameters go to their ops: served as trained, with the gradients of what is written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from jax import lax
from jax.sharding import PartitionSpec as P
from lanes import cases
from uses import X, normal

from jaxquant import (
    QArray,
    QuantSpec,
    Rule,
    activation_spec,
    dequantize,
    fake_quant,
    quantize_fn,
    quantize_params,
    weight_spec,
)

W, A = weight_spec(8), activation_spec(8)
COLUMNS = weight_spec(8, channel_axis=1)
BOTH = {"w": normal(1, 8, 8), "v": normal(2, 8, 8)}


@jax.custom_vjp
def through(w, h):
    return w, h


through.defvjp(lambda w, h: ((w, h), None), lambda _, g: (g[0], g[1] * 100.0))


def fsdp(axis, vma):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("model",))
    cut = P("model") if axis == 0 else P(None, "model")
    gathered = lambda w, x: x @ lax.all_gather(w, "model", axis=axis, tiled=True)
    f = jax.shard_map(gathered, mesh=mesh, in_specs=(cut, P("model")), out_specs=P("model"), check_vma=vma)
    return lambda p, x: f(p["w"], jnp.concatenate([x, x[:2]]))


WAYS = {
    "barrier of a tree": lambda p, x: (lambda p: (x @ p["w"]) @ p["v"])(lax.optimization_barrier(p)),
    "barrier with data": lambda p, x: (lambda x, w: x @ w)(*lax.optimization_barrier((x, p["w"]))),
    "device_put": lambda p, x: (lambda p: x @ p["w"] @ p["v"])(jax.device_put(p)),
    "through a loop without a dot": lambda p, x: (lambda c: x @ c[0] + c[1])(
        lax.fori_loop(0, 3, lambda i, c: (c[0], c[1] * 0.9), (p["w"], x[0, 0]))
    ),
    "author's, of two": lambda p, x: (lambda w, h: h @ w)(*through(p["w"], jnp.tanh(x @ p["v"]))),
    "fsdp": fsdp(0, True),
    "fsdp of channels": fsdp(1, True),
    "fsdp, unchecked": fsdp(0, False),
    "constants alike in a scan and after": lambda p, x: (
        lax.scan(lambda x, w: (jnp.tanh(x + jnp.ones((6, 8)) @ w), None), x, jnp.stack([p["w"], p["w"]]))[0]
        + jnp.ones((6, 8)) @ p["v"]
    ),
}


@cases("way", WAYS, ["author's, of two"])
def test_what_goes_an_uncommon_way_is_served_as_trained(way):
    q = quantize_fn(WAYS[way], [Rule("w", W, A), Rule("v", W, A, optional=True)])
    s = q.init_qparams(BOTH, X)
    static, dynamic = q.freeze(BOTH, X, qparams=s), q.freeze(BOTH, X)
    assert isinstance(static["w"], QArray)

    @jax.jit
    def each(p, s, static, dynamic):
        of_static = q(static, X, qparams=s), q(p, X, qparams=s)
        return of_static, (q(dynamic, X), q(p, X)), WAYS[way](p, X)

    of_static, of_dynamic, in_float = each(BOTH, s, static, dynamic)
    assert_same_bits(*of_static)
    assert_same_bits(*of_dynamic)
    assert 0 < np.abs(of_static[1] - np.asarray(in_float)).max() < 0.05 * np.abs(in_float).max()


def test_an_author_s_derivative_is_that_of_all_results():
    f = lambda p, x: WAYS["author's, of two"]({"w": p["w"], "v": np.eye(8, dtype=np.float32)}, x * p["s"])
    of_both = [jax.grad(lambda p, f=f: f(p, X).sum()) for f in (quantize_fn(f, [Rule("w", W, A)]), f)]
    got, want = jax.jit(lambda p: [g(p)["s"] for g in of_both])({"w": BOTH["w"], "s": np.float32(1)})
    np.testing.assert_allclose(got, want, rtol=0.02)
    assert abs(float(want)) > 10


@pytest.mark.slow
def test_a_second_derivative_sees_a_weight_whose_input_is_in_float():
    q = quantize_fn(lambda p, x: jnp.tanh(x @ p["w"]), [("w", W)])
    by_hand = lambda p, x: jnp.tanh(x @ fake_quant(p["w"], COLUMNS))
    loss = lambda f: lambda p: (jax.grad(lambda p: f(p, X).sum())(p)["w"] ** 2).sum()
    got, want = (jax.grad(loss(f))({"w": BOTH["w"]})["w"] for f in (q, by_hand))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


PARTS = {"a": normal(1, 8, 3), "b": normal(2, 8, 5)}
joined = lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1)


@cases("b", [QuantSpec(symmetric=False), QuantSpec(bits=16), weight_spec(4, channel_axis=1)], [QuantSpec(bits=16)])
def test_integers_of_several_specs_are_joined_as_their_real_values(b):
    integers = quantize_params(PARTS, [("a", COLUMNS), ("b", b)])
    real = jax.tree.map(dequantize, integers, is_leaf=lambda v: isinstance(v, QArray))
    assert_same_bits(quantize_fn(joined, [])(integers, X), jax.jit(joined)(real, X))


@pytest.mark.slow
def test_parts_may_be_frozen_and_read_one_without_the_other():
    q = quantize_fn(joined, [Rule("*", W, A)])
    want, frozen = q(PARTS, X), q.freeze(PARTS, X)
    gradient = lambda params: jax.grad(lambda b: q(params | {"b": b}, X).sum())(PARTS["b"])
    for one in ("a", "b"):
        assert_same_bits(q(PARTS | {one: frozen[one]}, X), want)
    np.testing.assert_allclose(gradient(frozen), gradient(PARTS), rtol=1e-6)
    assert isinstance(q.freeze(PARTS | {"a": frozen["a"]}, X)["b"], QArray)
    read = quantize_fn(lambda p, x: joined(p, x) + p["a"].sum(), [Rule("*", W, A)])
    np.testing.assert_allclose(read(PARTS, X), want + PARTS["a"].sum(), rtol=1e-6)


def test_a_path_may_have_a_plus():
    f = lambda w, x: (x @ w) @ w.T + w[:1]
    rules = [Rule("*", QuantSpec(bits=4), A)]
    of = lambda path: lambda w: quantize_fn(lambda p, x: f(p[path], x), rules)({path: w}, X)
    assert_same_bits(*jax.jit(lambda w: (of("a+b")(w), of("c")(w)))(BOTH["w"]))


def test_what_is_gathered_as_the_input_of_a_dot_has_the_range_that_is_asked_for():
    rules = [Rule("e", weight_spec(8, channel_axis=0), everywhere=True), Rule("w", W, A)]
    q = quantize_fn(lambda p, t: p["e"][t] @ p["w"], rules)
    params = {"e": normal(1, 16, 8), "w": BOTH["w"]}
    few, more = np.arange(4), np.arange(6)
    s = jax.eval_shape(lambda p: q.init_qparams(p, few), params)
    assert s["w:input"].scale.shape == ()
    serve = lambda p, s: q(q.freeze(p, few, qparams=s), more, qparams=s)
    assert jax.eval_shape(serve, params, s).shape == (6, 8)


def test_integers_have_no_nan():
    q = quantize_fn(lambda p, x: x @ p["w"], [Rule("w", W, A)])
    with_nan, with_infinity = np.array(BOTH["w"]), np.array(BOTH["w"])
    with_nan[2, 3], with_infinity[0, 0] = np.nan, np.inf
    params = {"w": with_nan}
    assert np.isnan(q(params, X)).sum() == 6
    with pytest.raises(ValueError, match=r"At 'w'.*the parameter has 1 NaN"):
        q.freeze(params, X)
    assert np.isnan(q({"w": with_infinity}, X)).sum() == 6
    with pytest.raises(ValueError, match=r"At 'w'.*the parameter has 1 infinite numbers"):
        q.freeze({"w": with_infinity}, X)


@pytest.mark.slow
def test_stochastic_rows_of_a_table():
    spec = weight_spec(8, channel_axis=0, rounding="stochastic")
    q = quantize_fn(lambda p, t: p["e"][t], [Rule("e", spec, everywhere=True)])
    key, tokens = jax.random.key(0), jnp.arange(2)
    frozen = q.freeze({"e": X}, tokens, key=key)
    assert_same_bits(q(frozen, tokens, key=key), q({"e": X}, tokens, key=key))


BLOCKS = weight_spec(8, block_size=4)
BRANCHES = {
    "pieces of blocks": (lambda p, x: x[:, :4] @ pick(x, lambda: p["w"][:4], lambda: p["w"][2:6]), BLOCKS),
    "casts": (lambda p, x: x @ pick(x, lambda: p["w"], lambda: p["w"].astype(jnp.bfloat16).astype(jnp.float32)), W),
}


def pick(x, one, other):
    return lax.cond(x[0, 0] > 0, one, other)


@pytest.mark.parametrize("branches", BRANCHES)
def test_branches_that_differ_in_scales_are_refused_by_name(branches):
    f, spec = BRANCHES[branches]
    with pytest.raises(ValueError, match="At 'w': the branches of a cond"):
        quantize_fn(f, [Rule("w", spec, A)])(BOTH, X)


def test_a_site_is_given_qparams_that_fit_it():
    f = lambda p, x: x[:, :4] @ lax.dynamic_slice(p["w"], (jnp.argmax(x[0]) % 3, 0), (4, 8))
    q = quantize_fn(f, [("w", weight_spec(4, block_size=2))])
    s = q.init_qparams(BOTH, X)
    view = q.at_sites(lambda info, x: fake_quant(x, info.spec, info.qparams))
    assert_same_bits(*jax.jit(lambda p, s: [of(p, X, qparams=s) for of in (view, q)])(BOTH, s))
