# SPDX-License-Identifier: Apache-2.0
"""What was trained is what is served, to the bit: q(q.freeze(params)) == q(params), whatever stands around."""

import dataclasses
import functools
import math

import hand_written as by_hand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from uses import USES, X, normal, together

from jaxquant import QArray, Range, Rule, activation_spec, from_log2, quantize_fn, quantize_params, to_log2, weight_spec

# One program of several uses, which compiles faster than one for each.
SOME = "over layers in blocks", "gathered by data"
ALL = tuple(USES)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
METHOD = {SOME: "minmax", ALL: "mse"}
each = pytest.mark.parametrize("names", [pytest.param(SOME, id="some"), slow(ALL, id="all")])


@functools.cache
def q(names):
    f, _, rules = together(names)
    return quantize_fn(f, rules)


def params_of(names):
    return together(names)[1]


@functools.cache
def qparams(names):
    """Of a range for every input, which clips some."""
    seen = jax.eval_shape(lambda p: q(names).observe(p, X), params_of(names))
    full = lambda v, end: np.full(v.shape, end, np.float32)
    ranges = {key: Range(full(r.x_min, -1), full(r.x_max, 2)) for key, r in seen.items()}
    return q(names).init_qparams(params_of(names), X, ranges=ranges, method=METHOD[names])


@functools.cache
def frozen(names, is_static=True):
    return q(names).freeze(params_of(names), X, qparams=qparams(names) if is_static else None)


def same(got, want):
    assert got.keys() == want.keys()
    for name, y in want.items():
        assert_same_bits(got[name], y, name)


@functools.cache
def trained(names, is_static):
    return q(names)(params_of(names), X, qparams=qparams(names) if is_static else None)


@each
@pytest.mark.parametrize("is_static", [True, slow(False)])
def test_what_was_trained_is_what_is_served(names, is_static):
    s = qparams(names) if is_static else None
    want = trained(names, is_static)
    same(q(names)(frozen(names, is_static), X, qparams=s), want)
    assert all(np.isfinite(np.float32(y)).all() and np.any(y) for y in want.values())


@pytest.mark.slow
@pytest.mark.parametrize("is_static", [True, False])
@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_nor_does_it_change_under_a_transform(transform, is_static):
    f = transform(lambda params, s: q(ALL)(params, X, qparams=s))
    s = qparams(ALL) if is_static else None
    same(f(frozen(ALL, is_static), s), trained(ALL, is_static))
    same(f(params_of(ALL), s), trained(ALL, is_static))


# A gather of two indices, and a convolution, of each example are other ops than of a batch; so are loops.
SIMPLE = "plain", "sliced", "over layers", "kept", "tied embedding", "gathered by data"


@pytest.mark.slow
@pytest.mark.parametrize("is_static", [True, False])
def test_examples_of_a_batch_are_served_alike(is_static):
    f, params, rules = together(SIMPLE)
    q = quantize_fn(f, rules)
    s = q.init_qparams(params, X) if is_static else None
    batch = jnp.stack([X, 2 * X, -X])
    served = jax.vmap(lambda p, x: q(p, x, qparams=s), (None, 0))
    got, want = served(q.freeze(params, X, qparams=s), batch), served(params, batch)
    same(got, want)
    for i, x in enumerate(batch):
        same(jax.tree.map(lambda y, i=i: y[i], got), q(params, x, qparams=s))


def paths(tree):
    named, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda v: isinstance(v, QArray))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): v for path, v in named}


@each
def test_frozen_is_what_quantize_params_makes_with_the_specs_of_the_plan(names):
    plan = q(names).plan(params_of(names), X)
    specs = {key: site.entry_spec for site in plan if site.spec for key in site.entry.split(", ")}
    values, s = paths(params_of(names)), qparams(names)
    for path, got in paths(frozen(names)).items():
        if path not in specs:
            assert got is values[path]
            continue
        one = quantize_params({"w": values[path]}, [("w", specs[path])], {"w": s[path]})["w"]
        assert (got.spec, got.shape, got.dtype) == (one.spec, one.shape, one.dtype)
        for part in ("values", "scale", "zero_point"):
            assert_same_bits(getattr(got, part), getattr(one, part), path)
    in_float = {path for path, v in paths(frozen(names)).items() if not isinstance(v, QArray)}
    assert in_float == {
        path for path in ("derived/w", "derived/a", "derived/b", "activation alone/w") if path in values
    }


@pytest.mark.slow
def test_matrices_of_integer_products_lie_as_those_read_them():
    """Taken whole, or turn by turn of a scan; not where the order would be undone in each call."""

    def orders(names):
        tree = jax.eval_shape(lambda p: q(names).freeze(p, X), params_of(names))
        return {path: v.order for path, v in paths(tree).items() if isinstance(v, QArray)}

    swapped = "plain", "one value in several ops", "over time", "bfloat16", "jit and checkpoint and vmap"
    kept = "sliced", "tied per tensor", "concatenated", "convolution", "index under vmap", "bfloat16 weight-only"
    assert set(orders(swapped).values()) == {(-1, -2)}
    assert set(orders(kept).values()) == {None}
    layers = lambda p, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]
    of_scan = quantize_fn(layers, [Rule("w", weight_spec(8), activation_spec(8))])
    params = {"w": normal(1, 3, 8, 8)}
    stack = of_scan.freeze(params, X)["w"]
    assert (stack.order, stack.shape, stack.stored.shape) == ((-1, -2), (3, 8, 8), (3, 8, 8))
    assert_same_bits(stack.stored, np.swapaxes(stack.values, 1, 2))
    assert_same_bits(*jax.jit(lambda *of: [of_scan({"w": w}, X) for w in of])(stack, params["w"]))


@pytest.mark.parametrize("batch", [(), (3,)], ids=["a matrix", "a batch of matrices"])
def test_no_weight_moves_in_a_served_product(batch):
    """The contraction is of the integers as they lie: XLA would else copy them, in no int8 kernel."""
    f = lambda p, x: x @ p["w"]
    q = quantize_fn(f, [Rule("w", weight_spec(8), activation_spec(8, symmetric=True))])
    params, x = {"w": normal(1, *batch, 64, 48)}, normal(2, *batch, 16, 64)
    s = jax.eval_shape(q.init_qparams, params, x)
    served = jax.eval_shape(lambda p, s: q.freeze(p, x, qparams=s), params, s)
    text = jax.jit(lambda p, x, s: q(p, x, qparams=s)).lower(served, x, s).as_text()
    shape = "x".join(map(str, (*batch, 48, 64)))
    assert served["w"].stored.shape == (*batch, 48, 64)
    (product,) = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert f"tensor<{shape}xi8>) ->" in product


@pytest.mark.slow
def test_weight_only_weights_of_four_bits_lie_two_in_a_byte_and_are_served_alike():
    f, params, rules = together(ALL)
    four = lambda rule: dataclasses.replace(rule, weight=dataclasses.replace(rule.weight, bits=4), activation=None)
    q = quantize_fn(f, [four(rule) if rule.weight else rule for rule in rules])
    served = q.freeze(params, X)
    integers = [v for v in paths(served).values() if isinstance(v, QArray)]
    assert {v.pairs for v in integers} == {(-2, 1), (-1, 2)}
    assert {str(v.values.dtype) for v in integers} == {"int8"}
    assert all(v.nbytes == math.ceil(v.size / 2) + 5 * v.scale.size for v in integers)
    want = q(params, X)
    same(q(served, X), want)
    same(jax.jit(q)(served, X), want)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_a_weight_that_a_product_of_integers_reads_takes_a_byte(order):
    """Whichever use comes first."""
    uses = [jax.named_scope("s")(lambda p, x: x @ p["w"]), lambda p, x: x @ p["w"]]
    rules = [Rule("w", weight_spec(4), scope="s"), Rule("w", weight_spec(4), activation_spec(4))]
    q, params = quantize_fn(lambda p, x: [uses[i](p, x) for i in order], rules), {"w": normal(1, 8, 5)}
    assert jax.eval_shape(lambda p: q.freeze(p, X), params)["w"].stored.dtype == jnp.int8


def test_parameters_that_are_closed_over_are_frozen_under_jit():
    q, params = quantize_fn(lambda p, x: x @ p["w"], [("w", weight_spec(8))]), {"w": normal(1, 8, 5)}
    frozen = jax.jit(lambda x: q.freeze(params, x))(X)
    assert_same_bits(frozen["w"].values, q.freeze(params, X)["w"].values)


@pytest.mark.slow
def test_it_holds_after_training():
    """60 steps of Adam on parameters and the logarithms of scales, of a scan over layers and a tied embedding.

    On the scales themselves this Adam makes 3 of 96 negative.
    """
    f, params, rules = together(("over layers in blocks", "tied embedding"))
    q = quantize_fn(f, rules)
    state = params, to_log2(q.init_qparams(params, X))
    targets = jax.tree.map(lambda y: normal(9, *y.shape), f(params, X))
    loss = lambda state: sum(
        jnp.mean((y - t) ** 2)
        for y, t in zip(
            jax.tree.leaves(q(state[0], X, qparams=from_log2(state[1]))), jax.tree.leaves(targets), strict=True
        )
    )

    @jax.jit
    def step(i, state, m, v):
        value, g = jax.value_and_grad(loss)(state)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, v, g)
        update = lambda w, m, v: w - 3e-3 * (m / (1 - 0.9**i)) / (jnp.sqrt(v / (1 - 0.99**i)) + 1e-8)
        return value, jax.tree.map(update, state, m, v), m, v

    first, moments = loss(state), jax.tree.map(jnp.zeros_like, (state, state))
    for i in range(1, 61):
        _, state, *moments = step(jnp.float32(i), state, *moments)
    params, s = state[0], from_log2(state[1])
    assert loss(state) < 0.8 * first
    before = q.init_qparams(together(("over layers in blocks", "tied embedding"))[1], X)
    assert jnp.any(s["tied embedding/e:input"].scale != before["tied embedding/e:input"].scale)
    same(q(q.freeze(params, X, qparams=s), X, qparams=s), q(params, X, qparams=s))


def test_integers_from_elsewhere_are_used_as_they_are():
    """Under no rule: their real values, weight-only."""
    f = lambda p, x: jnp.tanh(x @ p["v"]) @ p["w"]
    integers, real, rows = {}, {}, weight_spec(8, channel_axis=0)
    for path, v in USES["plain"].params.items():
        values, scale, _ = by_hand.levels(v, by_hand.Grid(), 1)
        real[path] = values.astype(np.float32) * scale
        integers[path] = QArray(np.int8(values), scale, np.zeros_like(scale, np.int8), rows, v.dtype)
    assert_same_bits(*jax.jit(lambda p, real: (quantize_fn(f, [])(p, X), f(real, X)))(integers, real))
    text = str(quantize_fn(f, []).plan(integers, X)["v"].why)
    assert "integers" in text


def test_a_depthwise_kernel_whose_axis_of_size_1_moves():
    """As keras has it: (..., channels, 1), reshaped to (..., 1, channels) for the convolution."""
    numbers = "NHWC", "HWIO", "NHWC"
    f = lambda p, x: jax.lax.conv_general_dilated(
        x, p["w"].reshape(3, 3, 1, 4), (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=4
    )
    q, params = quantize_fn(f, [Rule("w", weight_spec(8), activation_spec(8))]), {"w": normal(1, 3, 3, 4, 1)}
    x = normal(2, 2, 5, 5, 4)
    assert q.plan(params, x)["w"].entry_spec.granularity.axis == 2
    assert_same_bits(*jax.jit(lambda *of: [q(p, x) for p in of])(q.freeze(params, x), params))
