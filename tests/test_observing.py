# SPDX-License-Identifier: Apache-2.0
"""q.observe: the ranges of what the operands are, wherever they are, and of several batches at once."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from inputs import ones
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import cases
from uses import X, normal, together

from jaxquant import (
    QParams,
    QuantSpec,
    Range,
    Rule,
    activation_spec,
    dot_general,
    ema_ranges,
    fake_quant,
    histogram,
    merge,
    observe,
    quantize,
    quantize_fn,
    range_from_histogram,
    weight_spec,
)
from jaxquant._transform._observers import Observer, has_range, uses_of_inputs

W, A = weight_spec(8), activation_spec(8)
RULES = [Rule("**", W, A)]


def same(got, want):
    assert got.keys() == want.keys()
    for key, one in want.items():
        assert type(got[key]) is type(one)
        for a, b in zip(got[key], one, strict=True):
            assert_same_bits(a, b, key)


def stack(ranges):
    return jax.tree.map(lambda *ends: jnp.stack(ends), *ranges)


def range_of(*batches):
    """By NumPy."""
    batches = [np.asarray(x) for x in batches]
    return Range(np.min(batches), np.max(batches))


def scanned(p, x):
    layer = lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None)
    return lax.scan(jax.checkpoint(layer), x, p)[0]


P3 = {"up": normal(1, 3, 8, 16), "down": normal(2, 3, 16, 8)}


def layers_by_hand(x):
    seen = {"up:input": [], "down:input": []}
    for i in range(3):
        h = jnp.tanh(x @ P3["up"][i])
        seen["up:input"].append(observe(x, A))
        seen["down:input"].append(observe(h, A))
        x = x + h @ P3["down"][i]
    return {key: stack(ranges) for key, ranges in seen.items()}


def near(got, want):
    """Of loops that are compiled: their dots are not those of eager calls."""
    assert got.keys() == want.keys()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_layers_have_a_range_each():
    near(quantize_fn(scanned, RULES).observe(P3, X), jax.jit(layers_by_hand)(X))


def test_an_operand_has_the_range_that_it_has_by_hand():
    f = lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"]
    p, lacking = {"w": normal(1, 8, 16), "v": normal(2, 16, 4)}, np.array(X)
    lacking[0, 0] = np.nan
    q = quantize_fn(f, [Rule("v", None, A)])

    @jax.jit
    def each(p, x, lacking):
        """Of two batches, and of the operand by hand."""
        seen = [q.observe(p, v) for v in (x, lacking)]
        return seen, q.observe(p, x, histogram=True), [jnp.tanh(v @ p["w"]) for v in (x, lacking)]

    (of_x, of_lacking), counted, (h, h_lacking) = each(p, X, lacking)
    same(of_x, {"v:input": range_of(h)})
    same(counted, {"v:input": histogram(h, A)})
    same(of_lacking, {"v:input": range_of(np.asarray(h_lacking)[1:])})


def test_loops_merge_their_turns_and_a_branch_not_taken_saw_nothing():
    def f(p, x):
        over_time = lax.scan(lambda c, x: (c, x @ p["t"]), 0, x.reshape(2, 3, 8))[1]
        _, y = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, (c[1] @ p["w"]) * 1.5), (0, x))
        return over_time, lax.cond(x[0, 0] > 1e9, lambda y: y @ p["a"], lambda y: y @ p["b"], y)

    p = {name: normal(i, 8, 8) for i, name in enumerate("twab")}
    turn = jax.jit(lambda x: (x @ p["w"]) * 1.5)
    turns = [X]
    for _ in range(3):
        turns.append(turn(turns[-1]))
    q = quantize_fn(f, RULES)
    got, counted = jax.jit(lambda p: (q.observe(p, X), q.observe(p, X, histogram=True)))(p)
    want = {
        "t:input": range_of(X),
        "w:input": range_of(*turns[:3]),
        "a:input": Range(np.float32(np.inf), np.float32(-np.inf)),
        "b:input": range_of(turns[3]),
    }
    near(got, want)
    assert {key: int(np.sum(h.counts)) for key, h in counted.items()} == {
        "t:input": X.size, "w:input": 3 * X.size, "a:input": 0, "b:input": X.size
    }  # fmt: skip
    near(
        range_from_histogram({"t:input": counted["t:input"]}, 90.0),
        {"t:input": range_from_histogram(histogram(X, A), 90.0)},
    )


def test_batches_merge_to_the_range_of_all():
    f, p, rules = together(("plain", "one value in several ops"))
    q = quantize_fn(f, rules)
    whole, *halves = (q.observe(p, x) for x in (X, *np.split(np.asarray(X), 2)))
    merged = merge(*halves)
    near(merged, whole)  # of what a dot makes of fewer rows
    for end in range(2):
        assert_same_bits(merged["plain/v:input"][end], range_of(X)[end])
    assert any(not np.array_equal(half["plain/v:input"], range_of(X)) for half in halves)
    average = ema_ranges(*halves, 0.5)
    want = jax.tree.map(lambda a, b: (np.asarray(a) + np.asarray(b)) / np.float32(2), *halves)
    near(average, want)


@functools.cache
def mlp():
    q = quantize_fn(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], RULES)
    p = {"w": normal(1, 8, 16), "v": normal(2, 16, 4)}
    return q, p, q.init_qparams(p, X)


def test_the_value_comes_with_the_ranges_and_is_differentiated():
    q, p, s = mlp()
    f = q.__wrapped__
    with_ranges = lambda p, s: q.observe(p, X, with_value=True, qparams=s)

    @jax.jit
    def each(p, s):
        results = f(p, X), q(p, X, qparams=s), q.observe(p, X)
        return q.observe(p, X, with_value=True), with_ranges(p, s), *results

    (value, ranges), (trained, seen), in_float, quantized, alone = each(p, s)
    assert_same_bits(value, in_float)
    same(ranges, alone)
    assert_same_bits(trained, quantized)
    assert not np.array_equal(seen["v:input"].x_max, alone["v:input"].x_max)
    loss = lambda f: lambda p, s: (lambda value, seen: (jnp.sum(value**2), seen))(*f(p, s))
    gradient = lambda f: jax.grad(loss(f), (0, 1), has_aux=True)
    of_both = gradient(with_ranges), gradient(lambda p, s: (q(p, X, qparams=s), None))
    (got, seen_beside), (want, _) = jax.jit(lambda p, s: [g(p, s) for g in of_both])(p, s)
    jax.tree.map(assert_same_bits, got, want)
    same(seen_beside, seen)


@pytest.mark.slow
def test_observed_in_a_kept_derivative_and_beside_it():
    f, p, rules = together(("kept", "inlined"))
    q = quantize_fn(f, rules)
    _, ranges = q.observe(p, X, with_value=True, qparams=q.init_qparams(p, X))
    assert set(ranges) == {"kept/w:input", "kept/v:input", "inlined/v:input"}
    gradient = jax.grad(lambda p: sum(map(jnp.sum, jax.tree.leaves(q.observe(p, X, with_value=True)[0]))))(p)
    assert all(np.any(g) for g in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_devices_have_one_range():
    q, p, _ = mlp()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    x = normal(5, 8, 8)
    want = q.observe(p, x)
    near(jax.jit(q.observe)(p, jax.device_put(x, NamedSharding(mesh, P("data")))), want)
    of_rows = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    inside = quantize_fn(of_rows(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"]), RULES)
    near(inside.observe(p, x), want)
    s = inside.init_qparams(p, x)
    frozen = inside.freeze(p, x, qparams=s)
    assert_same_bits(inside(frozen, x, qparams=s), inside(p, x, qparams=s))
    assert_same_bits(inside(p, x, qparams=s), q(p, x, qparams=s))
    assert_same_bits(inside(inside.freeze(p, x), x), inside(p, x))


# What is learned


@pytest.mark.slow
def test_gradients_to_qparams_are_those_of_fake_quant_on_layers_by_hand():
    """Of powers of two they are equal: sums of them are exact."""
    w4, a4 = weight_spec(4), activation_spec(4)
    p, x = P3, X
    q = quantize_fn(scanned, [Rule("*", w4, a4)])
    s = q.init_qparams(p, x, method="mse")
    columns = weight_spec(4, channel_axis=-1)

    def by_hand(p, s, x):
        at = lambda key, i: jax.tree.map(lambda v: v[i], s[key])
        dot = lambda x, w, i: fake_quant(x, a4, at(f"{w}:input", i)) @ fake_quant(p[w][i], columns, at(w, i))
        for i in range(3):
            x = x + dot(jnp.tanh(dot(x, "up", i)), "down", i)
        return x

    weights = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    gradient = lambda f: jax.jit(jax.grad(lambda p, s: (f(p, s) * weights).sum(), (0, 1)))(p, s)
    got, want = gradient(lambda p, s: q(p, x, qparams=s)), gradient(lambda p, s: by_hand(p, s, x))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1e-9), err_msg=str(path))
    assert all(np.any(got[1][key].scale) for key in s)


@pytest.mark.slow
def test_gradients_of_powers_of_two_are_exact():
    a, w = activation_spec(4), weight_spec(4)
    x, p = np.float32([[0.5, -4, 2], [1, 8, -0.5]]), {"w": np.float32([[1, -4], [0.5, 2], [8, 0.25]])}
    q = quantize_fn(lambda p, x: x @ p["w"], [Rule("w", w, a)])
    of_w = QParams(np.float32([[1, 0.5]]), np.float32([[0, 0]]))
    s = {"w:input": QParams(np.float32(0.5), np.float32(1)), "w": of_w}
    hand = lambda p, s: fake_quant(x, a, s["w:input"]) @ fake_quant(p["w"], weight_spec(4, channel_axis=1), s["w"])
    g = np.float32([[1, -2], [0.5, 4]])
    gradient = lambda f: jax.grad(lambda p, s: (f(p, s) * g).sum(), (0, 1))
    of_both = gradient(lambda p, s: q(p, x, qparams=s)), gradient(hand)
    got, want = jax.jit(lambda p, s: [f(p, s) for f in of_both])(p, s)
    jax.tree.map(assert_same_bits, got, want)
    assert all(map(np.any, jax.tree.leaves((want[0], [np.asarray(of.scale) for of in want[1].values()]))))


def test_lsq_gradient_divides_by_what_shares_a_scale():
    q, p, s = mlp()
    gradient = lambda s, **kw: jax.grad(lambda s: jnp.sum(q(p, X, qparams=s, **kw)))(s)
    plain, scaled = jax.jit(lambda s: (gradient(s), gradient(s, lsq_gradient=True)))(s)
    ratio = lambda key: (np.asarray(scaled[key].scale) / np.asarray(plain[key].scale)).ravel()[0]
    np.testing.assert_allclose(ratio("w:input"), 1 / np.sqrt(X.size * 127), rtol=1e-5)
    np.testing.assert_allclose(ratio("w"), 1 / np.sqrt(8 * 127), rtol=1e-5)
    with pytest.raises(ValueError, match=r"`lsq_gradient`.*qparams=None"):
        q(p, X, lsq_gradient=True)


class Products(NamedTuple):
    """What an observer sees of a layer."""

    products: Any

    def merged(self, more):
        return Products(*map(jnp.add, self, more))


@pytest.mark.slow
def test_an_observer_gets_the_op_which_knows_its_contracted_axes():
    """As a solver for the integers of a weight needs them: the products of its inputs, where it meets them."""

    def of(given):
        ndims = [len(operand.shape) for operand in given.contraction.operands]
        contracted = given.contraction.as_op().contracted_axes(ndims)[given.side]
        kept = tuple(i for i in range(given.x.ndim) if i not in contracted)
        return Products(jnp.tensordot(given.x, given.x, (kept, kept)))

    zeros = functools.partial(jax.tree.map, lambda v: jnp.zeros(v.shape, v.dtype))
    across = lambda found, axes: lax.psum(found, tuple(axes))
    q, x = quantize_fn(scanned, RULES), normal(0, 4, 8)
    inputs = {"up:input": [], "down:input": []}
    for up, down in zip(P3["up"], P3["down"], strict=True):
        inputs["up:input"].append(x)
        inputs["down:input"].append(hidden := jnp.tanh(inputs["up:input"][-1] @ up))
        x = x + hidden @ down
    for qparams, tolerance in ((None, 1e-5), (q.init_qparams(P3, inputs["up:input"][0]), 0.1)):
        arguments = (P3, inputs["up:input"][0]), {}
        observer = Observer(of, zeros, across, lambda decisions: uses_of_inputs(decisions, has_range))
        _, found = q._collect(observer, qparams is None, qparams, *arguments)
        for key, (products,) in found.items():
            want = np.stack([x.T @ x for x in inputs[key]])
            np.testing.assert_allclose(products, want, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_integers_that_a_solver_gives_are_served_as_they_are():
    """Rounded down here, where freezing rounds to nearest."""
    rng = np.random.default_rng(3)
    params = {"w": jax.device_put(rng.normal(size=(16, 8)).astype(np.float32))}
    x = jax.device_put(rng.normal(size=(4, 16)).astype(np.float32))
    q = quantize_fn(lambda params, x: x @ params["w"], [Rule("w", weight_spec(4), activation_spec(8))])
    nearest = q.freeze(params, x)["w"]
    given = dataclasses.replace(nearest, values=jnp.floor(params["w"] / nearest.scale).astype(jnp.int8))
    assert (given.order, given.frozen) == (nearest.order, nearest.frozen)
    assert np.any(given.values != nearest.values)
    want = dot_general(quantize(x, activation_spec(8)), given, (((1,), (0,)), ((), ())))
    assert_same_bits(q({"w": given}, x), want)


# Rows that do not count


def padded(shape=(4, 6)):
    """Tokens, of which rows have their own number, and what is beyond is large."""
    rng, lengths = np.random.default_rng(0), np.array([6, 3, 0, 5])
    mask = np.arange(shape[1])[None] < lengths[:, None]
    return jnp.asarray(np.where(mask[..., None], rng.normal(size=(*shape, 8)), 50), jnp.float32), jnp.asarray(mask)


MASKED = {
    "ranges": {}, "histograms": {"histogram": True}, "grams": {"gram": True},
}  # fmt: skip
OF_TOKENS = {
    "a dot": (lambda p, x: x @ p, (8, 5)),
    "a scan": (lambda p, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0], (2, 8, 8)),
    "a cond": (lambda p, x: lax.cond(x[0, 0, 0] > 9, lambda x: x, lambda x: x @ p, x), (8, 8)),
}


@cases("use, what", [(use, what) for use in OF_TOKENS for what in MASKED], [("a scan", "grams")])
def test_a_mask_leaves_rows_out(use, what):
    """Also where it is traced; of nothing but padding it is neutral."""
    f, shape = OF_TOKENS[use]
    (x, mask), w = padded(), jax.device_put(np.random.default_rng(1).normal(size=shape).astype(np.float32))
    q = quantize_fn(f, [Rule("", QuantSpec() if use == "a scan" else W, A)])
    alone = np.asarray(x)[mask][None]
    want = q.observe(w, alone, **MASKED[what])
    observe_masked = jax.jit(lambda w, x, mask: q.observe(w, x, mask=mask, **MASKED[what]))
    for got in (q.observe(w, x, mask=mask, **MASKED[what]), observe_masked(w, x, mask)):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    neutral = jax.tree.leaves(observe_masked(w, x, mask & False))
    assert all(np.isin(leaf, [np.inf, -np.inf, 0]).all() for leaf in neutral)


@pytest.mark.slow
def test_masks_of_windows_experts_and_entries():
    conv = lambda p, x: lax.conv_general_dilated(x, p, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    rng = np.random.default_rng(0)
    w, x, keep = rng.normal(size=(3, 3, 4, 6)), rng.normal(size=(3, 5, 5, 4)), np.array([True, False, True])
    w, x = jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)
    q = quantize_fn(conv, [Rule("", W, A)])
    for a, b in zip(q.observe(w, x, gram=True, mask=keep)[""], q.observe(w, x[keep], gram=True)[""], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    ragged = lambda p, x, sizes: lax.ragged_dot(x, p, sizes)
    w, x, keep = rng.normal(size=(3, 8, 6)), rng.normal(size=(7, 8)), np.array([1, 1, 0, 1, 1, 0, 1], bool)
    w, x = jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)
    q = quantize_fn(ragged, [Rule("", W, A)])
    got = q.observe(w, x, jnp.int32([3, 2, 2]), gram=True, mask={":input": keep})[""]
    for a, b in zip(got, q.observe(w, x[keep], jnp.int32([2, 2, 1]), gram=True)[""], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    two = quantize_fn(lambda p, x, y: (x @ p["a"], y @ p["b"]), [Rule("*", W, A)])
    params, y = {"a": jnp.ones((8, 2)), "b": jnp.ones((8, 2))}, jnp.ones((5, 8)).at[4].set(9.0)
    each = two.observe(params, x, y, mask=(keep, np.arange(5) < 4))
    assert (each["a:input"].x_max, each["b:input"].x_max) == (x[keep].max(), 1)
    whole = two.observe(params, x, y, mask={"b:input": np.arange(5) < 4})
    assert (whole["a:input"].x_max, whole["b:input"].x_max) == (x.max(), 1)


def test_masks_that_fit_nothing():
    (x, mask), w = padded(), ones((8, 5))
    q = quantize_fn(lambda p, x: x @ p, [Rule("", W, A)])
    for wrong, kind, match in (
        (mask[:3], ValueError, r"At ':input'.*shape \(4, 6, 8\), and none of \(3, 6\) fits.*mask=\{':input'"),
        (mask.astype(jnp.int32), TypeError, "must be an array of bools.*int32"),
        ([mask, ~mask], ValueError, "several of"),
        ({":input": mask, "nope": mask}, ValueError, "'nope', which is none"),
        (True, TypeError, "must be an array of bools"),
    ):
        with pytest.raises(kind, match=match):
            q.observe(w, x, mask=wrong)
    own = quantize_fn(lambda p, x, mask=None: x @ p, [Rule("", W, A)])
    assert own.observe(w, x, mask)[":input"].x_max == 50
    passed_on = quantize_fn(lambda p, x, **kw: x @ p, [Rule("", W, A)])
    for f in (own, passed_on):
        with pytest.raises(ValueError, match="has, or may have, an argument of that name"):
            f.observe(w, x, mask=mask)


class Model:
    """As models of flax are: what its method passes on, its call takes."""

    def __call__(self, x):
        return x

    def apply(self, params, *args, **kwargs):
        return args[0] @ params


def test_a_mask_beside_the_method_of_a_model():
    (x, mask), w = padded(), jnp.ones((8, 5))
    q = quantize_fn(Model().apply, [Rule("", W, A)])
    assert q.observe(w, x, mask=mask)[":input"].x_max < 10
