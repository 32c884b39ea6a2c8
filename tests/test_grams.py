# SPDX-License-Identifier: Apache-2.0
"""The moments of what weights contract, against the inputs that NumPy sees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import x64
from jax import lax
from jax.sharding import PartitionSpec as P
from lanes import cases

from jaxquant import QuantSpec, Rule, activation_spec, merge, quantize_fn, weight_spec
from jaxquant.typing import Gram

F = np.float32
W4, A8 = weight_spec(4), activation_spec(8)
RULES = [("*", W4)]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(F)


def moments(rows):
    """Of rows (..., rows, K), in float64: (..., K + 1, K), of the products and below them of the sums."""
    rows = np.asarray(rows, np.float64)
    with_ones = np.concatenate([rows, np.ones((*rows.shape[:-1], 1))], -1)
    return np.einsum("...rk,...rl->...kl", with_ones, rows)


def same(got, expected, count, tolerance=1e-5, dtype=F):
    np.testing.assert_allclose(got.products, expected[..., :-1, :], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(got.sums, expected[..., -1, :], rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(got.rows, np.asarray(count, F))
    assert got.products.dtype == got.sums.dtype == got.rows.dtype == dtype


X, WIDE = normal(0, 6, 4), normal(1, 5, 3, 4)

# The function, its weight, its input, and the rows that meet the weight, as (..., rows, K).
DOTS = {
    "rows": (lambda p, x: x @ p["w"], normal(2, 4, 7), X, X),
    "transposed": (lambda p, x: x @ p["w"].T, normal(2, 7, 4), X, X),
    "the weight first": (lambda p, x: p["w"] @ x.T, normal(2, 7, 4), X, X),
    "three axes": (lambda p, x: x @ p["w"], normal(2, 4, 7), WIDE, WIDE.reshape(15, 4)),
    "heads": (lambda p, x: jnp.einsum("bhd,hdo->bho", x, p["w"]), normal(2, 3, 4, 7), WIDE, WIDE.swapaxes(0, 1)),
    "heads, last": (lambda p, x: jnp.einsum("bhd,doh->bho", x, p["w"]), normal(2, 4, 7, 3), WIDE, WIDE.swapaxes(0, 1)),
    "two axes": (lambda p, x: jnp.einsum("bhd,hdo->bo", x, p["w"]), normal(2, 3, 4, 7), WIDE, WIDE.reshape(5, 12)),
    "two axes, swapped": (
        lambda p, x: jnp.einsum("bhd,dho->bo", x, p["w"]), normal(2, 4, 3, 7), WIDE,
        WIDE.swapaxes(1, 2).reshape(5, 12),
    ),
    "a vector": (lambda p, x: x @ p["w"], normal(2, 4), X, X),
}  # fmt: skip


@cases("name", list(DOTS), ["heads, last", "two axes, swapped"])
@pytest.mark.parametrize("rule", [pytest.param(("w", W4), marks=pytest.mark.slow), Rule("w", W4, A8)])
def test_of_a_dot(name, rule):
    f, w, x, rows = DOTS[name]
    got = quantize_fn(f, [rule]).observe({"w": w}, x, gram=True)
    assert list(got) == ["w"]
    same(got["w"], moments(rows), np.full(rows.shape[:-2], rows.shape[-2]))


CONVOLUTIONS = {
    "plain": ({}, ("NHWC", "HWIO", "NHWC")),
    "groups": ({"feature_group_count": 2}, ("NHWC", "HWIO", "NHWC")),
    "strides and dilations": (
        {"window_strides": (2, 1), "lhs_dilation": (1, 2), "rhs_dilation": (2, 1), "padding": ((1, 2), (0, 1))},
        ("NHWC", "HWIO", "NHWC"),
    ),
    "channels first": ({"feature_group_count": 2}, ("NCHW", "OIHW", "NCHW")),
}


@cases("name", list(CONVOLUTIONS), ["strides and dilations", "channels first"])
def test_of_a_convolution(name):
    """The squared norm and the sum of the result of any kernel are what the Gram says of them, feature by feature."""
    more, numbers = CONVOLUTIONS[name]
    options = {"window_strides": (1, 1), "padding": ((1, 1), (1, 1))} | more
    groups = options.get("feature_group_count", 1)
    last = numbers[0] == "NHWC"
    x = normal(3, 2, 7, 6, 4) if last else normal(3, 2, 4, 7, 6)
    kernel = normal(4, 3, 2, 4 // groups, 6) if last else normal(4, 6, 4 // groups, 3, 2)
    f = lambda p, x: lax.conv_general_dilated(x, p["w"], dimension_numbers=numbers, **options)
    got = quantize_fn(f, RULES).observe({"w": kernel}, x, gram=True)["w"]
    y = np.asarray(f({"w": kernel}, x), np.float64)
    y = y if last else np.moveaxis(y, 1, -1)
    w = (kernel.reshape(-1, 6) if last else kernel.reshape(6, -1).T).astype(np.float64)
    w = w.reshape(len(w), groups, -1).swapaxes(0, 1)
    products = np.asarray(got.products, np.float64).reshape(groups, w.shape[1], w.shape[1])
    norms = np.einsum("gkn,gkl,gln->gn", w, products, w).ravel()
    np.testing.assert_allclose(norms, (y**2).sum((0, 1, 2)), rtol=1e-5)
    sums = np.asarray(got.sums, np.float64).reshape(groups, -1)
    np.testing.assert_allclose(np.einsum("gkn,gk->gn", w, sums).ravel(), y.sum((0, 1, 2)), rtol=1e-4, atol=1e-4)
    assert got.products.shape == (*([groups] if groups > 1 else []), w.shape[1], w.shape[1])
    np.testing.assert_array_equal(got.rows, np.full([groups] if groups > 1 else [], F(y[..., 0].size)))


def test_of_the_experts_of_a_ragged_dot():
    x, sizes = normal(5, 10, 4), np.int32([4, 0, 5])
    q = quantize_fn(lambda p, x: lax.ragged_dot(x, p["w"], sizes), RULES)
    got = q.observe({"w": normal(6, 3, 4, 5)}, x, gram=True)["w"]
    same(got, np.stack([moments(x[a:b]) for a, b in ((0, 4), (4, 4), (4, 9))]), sizes)


def stacked(p, x):
    """Layers in a scan with a shared one after each; the shared one in loops, and after them."""
    h, _ = lax.scan(lambda h, w: (jnp.tanh(jnp.tanh(h @ w) @ p["shared"]), None), x, p["layers"])
    h = lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ p["shared"]), h)
    return jax.checkpoint(lambda h: h @ p["shared"])(h)


LAYERS = {"layers": normal(7, 3, 4, 4), "shared": normal(8, 4, 4)}


@functools.cache
def of_stacked():
    layers, shared, h = [], np.zeros((5, 4)), X.astype(np.float64)
    for w in LAYERS["layers"]:
        layers.append(moments(h))
        h = np.tanh(h @ w)
        shared = shared + moments(h)
        h = np.tanh(h @ LAYERS["shared"])
    for _ in range(3):
        shared = shared + moments(h)
        h = np.tanh(h @ LAYERS["shared"])
    return np.stack(layers), shared


def test_in_loops_turns_of_a_weight_are_apart_and_of_others_together():
    q = quantize_fn(stacked, RULES)
    layers, shared = of_stacked()
    for call in (functools.partial(q.observe, gram=True), jax.jit(functools.partial(q.observe, gram=True))):
        got = call(LAYERS, X)
        same(got["layers"], layers, [6, 6, 6])
        same(got["shared"], shared, 36)


def test_scans_in_scans_have_an_axis_each():
    def f(p, x):
        inner = lambda h, w: (jnp.tanh(h @ w), None)
        return lax.scan(lambda h, ws: (lax.scan(inner, h, ws)[0], None), x, p["w"])[0]

    w, h, expected = normal(9, 2, 3, 4, 4), X.astype(np.float64), []
    for layer in w.reshape(6, 4, 4):
        expected.append(moments(h))
        h = np.tanh(h @ layer)
    got = quantize_fn(f, RULES).observe({"w": w}, X, gram=True)["w"]
    same(got, np.stack(expected).reshape(2, 3, 5, 4), np.full((2, 3), 6))


@pytest.mark.parametrize("taken", [True, False])
def test_a_branch_that_is_not_taken_has_seen_nothing(taken):
    f = lambda p, x, b: lax.cond(b, lambda x: x @ p["a"], lambda x: x @ p["b"], x) @ p["a"]
    params = {"a": normal(10, 4, 4), "b": normal(11, 4, 4)}
    got = quantize_fn(f, RULES).observe(params, X, jnp.bool_(taken), gram=True)
    after = moments(X @ params["a" if taken else "b"])
    same(got["a"], after + taken * moments(X), 6 + 6 * taken)
    same(got["b"], (not taken) * moments(X), 6 * (not taken))


def test_batches_and_devices_add_up():
    q, params = quantize_fn(stacked, RULES), LAYERS
    observe = functools.partial(q.observe, gram=True)
    parts = [observe(params, X[i : i + 2]) for i in (0, 2, 4)]
    merged = merge(*parts)
    layers, shared = of_stacked()
    same(merged["layers"], layers, [6, 6, 6])
    same(merged["shared"], shared, 36)

    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
    inside = jax.shard_map(stacked, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    for f in (stacked, inside):
        got = jax.jit(functools.partial(quantize_fn(f, RULES).observe, gram=True))(params, sharded)
        same(got["layers"], layers, [6, 6, 6])
        same(got["shared"], shared, 36)


@pytest.mark.parametrize("split", [pytest.param(P("data"), marks=pytest.mark.slow), P(None, "data")])
def test_on_a_mesh_with_explicit_axes_they_are_whole(split):
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Explicit,))
    q = quantize_fn(lambda p, x: jnp.dot(x, p["w"], out_sharding=P()), RULES)
    with jax.set_mesh(mesh):
        x, w = jax.sharding.reshard(X, split), jax.sharding.reshard(normal(2, 4, 7), P(*split[1:]))
        got = q.observe({"w": w}, x, gram=True)["w"]
        same(got, moments(X), 6)
        assert all(v.sharding.is_fully_replicated for v in got)


@pytest.mark.slow
def test_beside_the_value_of_the_quantized_function_and_of_frozen_weights():
    f = lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"]
    params = {"a": normal(12, 4, 5), "b": normal(13, 5, 2)}
    q = quantize_fn(f, [Rule("*", weight_spec(8), A8)])
    qparams = q.init_qparams(params, X)
    frozen = q.freeze(params, X, qparams=qparams)
    value, got = q.observe(params, X, qparams=qparams, with_value=True, gram=True)
    assert (value == q(params, X, qparams=qparams)).all()
    same(got["a"], moments(X), 6)
    again = q.observe(frozen, X, qparams=qparams, gram=True)
    np.testing.assert_array_equal(again["b"].products, got["b"].products)


def test_narrow_inputs_are_summed_in_float32():
    x = X.astype(jnp.bfloat16)
    q = quantize_fn(lambda p, x: x @ p["w"].astype(jnp.bfloat16), RULES)
    same(q.observe({"w": normal(2, 4, 7)}, x, gram=True)["w"], moments(x.astype(F)), 6)


def test_with_64_bits_they_are_in_float64():
    with x64(True):
        got = quantize_fn(lambda p, x: x @ p["w"], RULES).observe({"w": normal(2, 4, 7)}, X, gram=True)["w"]
        same(got, moments(X), 6, 1e-14, np.float64)


PARTS = {
    "a slice": lambda p, x: x @ p["w"][:4],
    "a layer": lambda p, x: x @ p["w"].reshape(2, 4, 4)[0],
    "joined": lambda p, x: x @ jnp.concatenate([p["v"], p["v2"]], 1),
    "picked": lambda p, x: x @ p["w"].reshape(2, 4, 4)[x[0, 0].astype(int)],
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_parameter_is_refused(name):
    params = {"w": normal(14, 8, 4), "v": normal(15, 4, 4), "v2": normal(16, 4, 4)}
    rules = [Rule("w", W4, optional=True), Rule("v*", W4, optional=True)]
    with pytest.raises(ValueError, match=r"At '(w|v)'.*parameters that an op takes whole and alone"):
        quantize_fn(PARTS[name], rules).observe(params, X, gram=True)


def test_uses_along_different_axes_have_no_one_gram():
    q = quantize_fn(lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T, [("w", QuantSpec(bits=4))])
    with pytest.raises(ValueError, match=r"At 'w'.*sum along different axes of it"):
        q.observe({"w": normal(2, 4, 4)}, X, gram=True)


def test_bad_input():
    q = quantize_fn(lambda p, x: x @ p["w"], RULES)
    with pytest.raises(ValueError, match="`histogram` and `gram` are of two calls"):
        q.observe({"w": normal(2, 4, 7)}, X, gram=True, histogram=True)
    with pytest.raises(TypeError, match="`gram`"):
        q.observe({"w": normal(2, 4, 7)}, X, gram=1)
    one, other = Gram(np.eye(2, dtype=F), F(3), np.ones(2, F)), Gram(np.eye(3, dtype=F), F(3), np.ones(3, F))
    with pytest.raises(ValueError, match=r"`products` must have one shape, got \(2, 2\) and \(3, 3\)"):
        merge(one, other)
    with pytest.raises(ValueError, match="the same keys in merge"):
        merge({"a": one}, {"b": one})
    for wrong in (([one, one],), ()):
        with pytest.raises(TypeError, match="merge takes Ranges"):
            merge(*wrong)
    with pytest.raises(TypeError, match="must be of type Range, or dicts of it, in merge, got ndarray"):
        merge(np.eye(2))
    f = lambda p, x: lax.conv_general_dilated(x, p["w"], (1,), "SAME", batch_group_count=2)
    with pytest.raises(ValueError, match="batch_group_count=2"):
        quantize_fn(f, RULES).observe({"w": normal(1, 4, 2, 3)}, normal(2, 4, 2, 5), gram=True)


def test_entries_choose_the_weights():
    f = lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"] + p["c"][None]
    params = {"a": normal(12, 4, 5), "b": normal(13, 5, 2), "c": normal(14, 2)}
    q = quantize_fn(f, [("a", W4), ("b", W4)])
    every, one = q.observe(params, X, gram=True), q.observe(params, X, gram=True, entries=["b"])
    assert list(every) == ["a", "b"]
    assert list(one) == ["b"]
    np.testing.assert_array_equal(one["b"].products, every["b"].products)
    for wrong, match in (
        (["d"], "no quantized weight 'd'; the nearest: 'b', 'a'"),
        (["c"], "no quantized weight 'c'"),
        (["a:input"], "no quantized weight 'a:input'"),
        ([], "the entries must be paths"),
        ("a", "the entries must be paths"),
    ):
        with pytest.raises(ValueError, match=match):
            q.observe(params, X, gram=True, entries=wrong)
    with pytest.raises(ValueError, match=r"`entries` is for the second moments of weights.*gram=True"):
        q.observe(params, X, entries=["a"])


@pytest.mark.parametrize("name", PARTS)
def test_entries_leave_parts_of_parameters_out(name):
    params = {"w": normal(14, 8, 4), "v": normal(15, 4, 4), "v2": normal(16, 4, 4), "z": normal(17, 4, 2)}
    rules = [Rule("w", W4, optional=True), Rule("v*", W4, optional=True), ("z", W4)]
    q = quantize_fn(lambda p, x: PARTS[name](p, x)[:, :4] @ p["z"], rules)
    assert list(q.observe(params, X, gram=True, entries={"z"})) == ["z"]


def test_uses_of_one_weight_must_have_its_elements_in_the_same_rows():
    """Reshaped, the columns may be split; the rows may not be in another order."""
    w = normal(2, 4, 6)
    columns = lambda p, x: (x @ p["w"]).sum() + jnp.einsum("bk,khd->bhd", x, p["w"].reshape(4, 2, 3)).sum()
    same(quantize_fn(columns, [("w", QuantSpec(bits=4))]).observe({"w": w}, X, gram=True)["w"], 2 * moments(X), 12)
    turned = lambda p, x: (x @ p["w"]).sum() + (x @ p["w"][::-1]).sum()
    with pytest.raises(ValueError, match=r"At 'w'.*sum along different axes of it"):
        quantize_fn(turned, [("w", QuantSpec(bits=4))]).observe({"w": w}, X, gram=True)


def test_branches_that_put_a_weight_in_different_orders_are_refused():
    def f(p, x, flag):
        w = lax.cond(flag, lambda w: w[::-1], lambda w: w, p["w"])
        return x @ w

    with pytest.raises(ValueError, match=r"At 'w'.*whole and alone"):
        quantize_fn(f, [("w", QuantSpec(bits=4))]).observe({"w": normal(2, 4, 6)}, X, jnp.bool_(True), gram=True)
