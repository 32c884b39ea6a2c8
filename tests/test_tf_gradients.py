# SPDX-License-Identifier: Apache-2.0
"""Gradients against their definition: at every kind of point, to second order, and where JAX has none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from lanes import cases

from jaxquant import tf

pytestmark = pytest.mark.bits

LOW, HIGH, BITS = -1.0, 2.0, 2  # nudged: levels at -1, 0, 1, 2
POINTS = np.array([-1.5, np.nextafter(np.float32(-1), np.float32(-2)), -1, -0.5, 0, 0.5, 2, 2.0000002, 9], np.float32)
INSIDE = np.array([0, 0, 1, 1, 1, 1, 1, 0, 0], bool)
X = jnp.asarray([-3.0, -0.9, 0.4, 1.3, 5.0, 7.0])  # one below, two above the range

OPS = {
    "args": lambda x: tf.fake_quant_with_min_max_args(x, LOW, HIGH, BITS),
    "vars": lambda x: tf.fake_quant_with_min_max_vars(x, LOW, HIGH, BITS),
    "per channel": lambda x: tf.fake_quant_with_min_max_vars_per_channel(
        x[..., None], jnp.full(1, LOW), jnp.full(1, HIGH), BITS
    )[..., 0],
    "V4": lambda x: tf.quantize_and_dequantize_v2(x, LOW, HIGH, range_given=True),
    "V1": lambda x: tf.quantize_and_dequantize(x, LOW, HIGH, range_given=True),
    "pass through": tf.grad_pass_through(jnp.round),
}
every_op = pytest.mark.parametrize("name", OPS)


@every_op
def test_the_gradient_is_one_inside_with_both_ends_and_zero_outside(name):
    _, vjp = jax.vjp(OPS[name], jnp.asarray(POINTS))
    everywhere = name in ("V1", "pass through")
    assert_same_bits(vjp(jnp.ones(len(POINTS)))[0], (INSIDE | everywhere).astype(np.float32))


def test_the_bounds_are_the_nudged_ones_for_fake_quant_and_the_raw_ones_for_v4():
    # [-1.1, 1.9] in 4 levels is nudged to [-1, 2].
    x = jnp.asarray([-1.05, 1.95])
    grad = lambda op: jax.grad(lambda x: op(x).sum())(x).tolist()
    assert grad(lambda x: tf.fake_quant_with_min_max_vars(x, -1.1, 1.9, 2)) == [0.0, 1.0]
    assert grad(lambda x: tf.quantize_and_dequantize_v2(x, -1.1, 1.9, range_given=True)) == [1.0, 0.0]


def test_v4_bounds_the_gradient_by_what_was_passed_also_where_the_range_comes_from_the_data():
    grad = jax.grad(lambda x, a, b: tf.quantize_and_dequantize_v2(x, a, b).sum(), (0, 1, 2))
    assert jax.tree.map(np.asarray, grad(X, 0.0, 0.0))[0].tolist() == [0.0] * 6
    assert grad(X, -1.0, 2.0)[0].tolist() == [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert [g.item() for g in grad(X, -1.0, 2.0)[1:]] == [0.0, 0.0]


def test_range_gradients_sum_what_is_clipped():
    g = jnp.asarray([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    got = tf.fake_quant_with_min_max_vars_gradient(g, X, LOW, HIGH, BITS)
    assert got.backprops_wrt_input.tolist() == [0.0, 2.0, 4.0, 8.0, 0.0, 0.0]
    assert (got.backprop_wrt_min, got.backprop_wrt_max) == (1.0, 48.0)
    _, vjp = jax.vjp(lambda x, a, b: tf.fake_quant_with_min_max_vars(x, a, b, BITS), X, LOW, HIGH)
    jax.tree.map(assert_same_bits, tuple(got), vjp(g))


def test_the_rule_of_each_op_is_its_gradient_function():
    g, low, high = jnp.arange(6.0).reshape(2, 3) - 2, jnp.asarray([-1.0, 0, 0.5]), jnp.asarray([2.0, 0, 1.5])
    x = X.reshape(2, 3)
    _, vjp = jax.vjp(lambda x: tf.fake_quant_with_min_max_args(x, LOW, HIGH, BITS), x)
    assert_same_bits(vjp(g)[0], tf.fake_quant_with_min_max_args_gradient(g, x, LOW, HIGH, BITS))
    _, vjp = jax.vjp(tf.fake_quant_with_min_max_vars_per_channel, x, low, high)
    jax.tree.map(assert_same_bits, vjp(g), tuple(tf.fake_quant_with_min_max_vars_per_channel_gradient(g, x, low, high)))


def test_an_unset_range_gives_zero_and_passes_the_gradient():
    x = jnp.asarray([np.nan, np.inf, -1.0, 2.0])
    y, vjp = jax.vjp(tf.fake_quant_with_min_max_vars, x, 0.0, 0.0)
    assert_same_bits(y, np.zeros(4, np.float32))
    g = jnp.asarray([np.nan, 1.0, -2.0, np.inf])
    dx, dmin, dmax = vjp(g)
    assert_same_bits(dx, g)
    assert (dmin, dmax) == (0.0, 0.0)


@cases("name", OPS, ["per channel", "V1"])
def test_second_derivatives_by_reverse_over_reverse(name):
    """Of f(x)^3 where f' is a constant mask: 6 f(x) mask."""
    op, x = OPS[name], jnp.asarray([-3.0, -0.9, 0.4, 1.3, 5.0])
    mask = np.asarray(jax.vjp(op, x)[1](jnp.asarray(np.ones(5, np.float32)))[0])
    want, first = 6 * np.asarray(op(x)) * mask, jax.grad(lambda x: (op(x) ** 3).sum())
    np.testing.assert_allclose(jax.grad(lambda x: first(x).sum())(x), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.jacrev(first))(x), np.diag(want), rtol=1e-6)


def test_second_derivatives_to_the_range():
    """Of (sum f)^2: the sum's derivative to max is the number above the range, here 2."""
    f = lambda hi: (tf.fake_quant_with_min_max_vars(X, LOW, hi, BITS) * jnp.arange(6.0)).sum() ** 2
    assert jax.grad(jax.grad(f))(HIGH) == 2 * (4 + 5) ** 2
    both = jax.jacrev(jax.grad(lambda x, hi: tf.fake_quant_with_min_max_vars(x, LOW, hi, BITS).sum() ** 2, 1))(X, HIGH)
    assert both.tolist() == [0.0, 4.0, 4.0, 4.0, 0.0, 0.0]


@every_op
def test_forward_mode_raises_the_error_of_jax(name):
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(OPS[name], (X,), (X,))
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.hessian(lambda x: OPS[name](x).sum())(X)


def test_a_masked_cotangent_is_a_product():
    g = jnp.asarray([-1.0, np.nan, np.inf, 1.0])
    dx, dmin, dmax = tf.fake_quant_with_min_max_vars_gradient(g, jnp.full(4, 9.0), -1.0, 1.0)
    assert_same_bits(dx, np.array([-0.0, np.nan, np.nan, 0.0], np.float32))
    assert jnp.isnan(dmin)
    assert jnp.isnan(dmax)


def test_nan_in_x_is_in_no_mask():
    dx, dmin, dmax = tf.fake_quant_with_min_max_vars_gradient(jnp.ones(2), jnp.asarray([np.nan, 0.0]), -1.0, 1.0)
    assert (dx.tolist(), dmin, dmax) == ([0.0, 1.0], 0.0, 0.0)


def test_pass_through_gives_no_gradient_to_keywords_and_closures():
    f = lambda x, k: tf.grad_pass_through(lambda x, *, s: jnp.round(x * k) * s)(x, s=k).sum()
    dx, dk = jax.grad(f, (0, 1))(X, 2.0)
    assert (dx.tolist(), dk) == ([1.0] * 6, 0.0)


def test_pass_through_takes_several_arguments_and_trees():
    f = tf.grad_pass_through(lambda a, b: (jnp.round(a["w"]) * 0, {"w": b["w"] * 2}))
    with pytest.raises(TypeError, match="result like its arguments"):
        f({"w": X}, {"w": X})
    f = tf.grad_pass_through(lambda a, b: ({"w": a["w"] * 0}, b * 2))
    (a, b), vjp = jax.vjp(f, {"w": X}, X)
    assert_same_bits(b, X * 2)
    assert not a["w"].any()
    da, db = vjp(({"w": X + 1}, X + 2))
    assert_same_bits(da["w"], X + 1)
    assert_same_bits(db, X + 2)
