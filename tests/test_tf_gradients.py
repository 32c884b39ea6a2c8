# SPDX-License-Identifier: Apache-2.0
"""Gradients against their definition: at every kind of point, to second order, and where JAX has none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from lanes import cases

from jaxquant import tf

pytestmark = pytest.mark.bits

F = np.float32
LOW, HIGH, BITS = -1.0, 2.0, 2  # nudged: levels at -1, 0, 1, 2
POINTS = np.array([-1.5, np.nextafter(F(-1), F(-2)), -1, -0.5, 0, 0.5, 2, 2.0000002, 9], F)
INSIDE = np.array([0, 0, 1, 1, 1, 1, 1, 0, 0], bool)
X = np.array([-3.0, -0.9, 0.4, 1.3, 5.0, 7.0], F)  # one below, two above the range

ONE = np.full(1, LOW, F), np.full(1, HIGH, F)  # a range of one channel
OPS = {
    "args": lambda x: tf.fake_quant_with_min_max_args(x, LOW, HIGH, BITS),
    "vars": lambda x: tf.fake_quant_with_min_max_vars(x, LOW, HIGH, BITS),
    "per channel": lambda x: tf.fake_quant_with_min_max_vars_per_channel(x[..., None], *ONE, BITS)[..., 0],
    "V4": lambda x: tf.quantize_and_dequantize_v2(x, LOW, HIGH, range_given=True),
    "V1": lambda x: tf.quantize_and_dequantize(x, LOW, HIGH, range_given=True),
    "pass through": tf.grad_pass_through(jnp.round),
}
every_op = pytest.mark.parametrize("name", OPS)


def cotangents(op, inputs, g):
    """Of what `op` gives, and its cotangents, by one program."""

    @jax.jit
    def run(inputs, g):
        y, vjp = jax.vjp(op, *inputs)
        return y, *vjp(g)

    return jax.tree.map(np.asarray, run(inputs, g))


@pytest.mark.slow
@every_op
def test_the_gradient_is_one_inside_with_both_ends_and_zero_outside(name):
    _, dx = cotangents(OPS[name], (POINTS,), np.ones_like(POINTS))
    everywhere = name in ("V1", "pass through")
    assert_same_bits(dx, (INSIDE | everywhere).astype(F))


def test_the_bounds_are_the_nudged_ones_for_fake_quant_and_the_raw_ones_for_v4():
    # [-1.1, 1.9] in 4 levels is nudged to [-1, 2].
    x = np.array([-1.05, 1.95], F)
    grad = lambda op: cotangents(op, (x,), np.ones_like(x))[1].tolist()
    assert grad(lambda x: tf.fake_quant_with_min_max_vars(x, -1.1, 1.9, 2)) == [0.0, 1.0]
    assert grad(lambda x: tf.quantize_and_dequantize_v2(x, -1.1, 1.9, range_given=True)) == [1.0, 0.0]


def test_v4_bounds_the_gradient_by_what_was_passed_also_where_the_range_comes_from_the_data():
    grad = jax.jit(jax.grad(lambda x, a, b: tf.quantize_and_dequantize_v2(x, a, b).sum(), (0, 1, 2)))
    assert grad(X, 0.0, 0.0)[0].tolist() == [0.0] * 6
    dx, *ends = grad(X, -1.0, 2.0)
    assert dx.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert [g.item() for g in ends] == [0.0, 0.0]


vars_gradient = jax.jit(tf.fake_quant_with_min_max_vars_gradient, static_argnums=4)


def test_range_gradients_sum_what_is_clipped():
    g = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], F)
    got = vars_gradient(g, X, LOW, HIGH, BITS)
    assert got.backprops_wrt_input.tolist() == [0.0, 2.0, 4.0, 8.0, 0.0, 0.0]
    assert (got.backprop_wrt_min.item(), got.backprop_wrt_max.item()) == (1.0, 48.0)
    of_op = cotangents(lambda x, a, b: tf.fake_quant_with_min_max_vars(x, a, b, BITS), (X, F(LOW), F(HIGH)), g)
    jax.tree.map(assert_same_bits, tuple(got), of_op[1:])


def test_the_rule_of_each_op_is_its_gradient_function():
    g, low, high = np.arange(6, dtype=F).reshape(2, 3) - 2, np.array([-1.0, 0, 0.5], F), np.array([2.0, 0, 1.5], F)
    x = X.reshape(2, 3)
    of_args = lambda f: functools.partial(f, min=LOW, max=HIGH, num_bits=BITS)
    got = cotangents(of_args(tf.fake_quant_with_min_max_args), (x,), g)[1]
    assert_same_bits(got, jax.jit(of_args(tf.fake_quant_with_min_max_args_gradient))(g, x))
    got = cotangents(tf.fake_quant_with_min_max_vars_per_channel, (x, low, high), g)[1:]
    want = jax.jit(tf.fake_quant_with_min_max_vars_per_channel_gradient)(g, x, low, high)
    jax.tree.map(assert_same_bits, got, tuple(want))


def test_an_unset_range_gives_zero_and_passes_the_gradient():
    x, g = np.array([np.nan, np.inf, -1.0, 2.0], F), np.array([np.nan, 1.0, -2.0, np.inf], F)
    y, dx, dmin, dmax = cotangents(tf.fake_quant_with_min_max_vars, (x, F(0), F(0)), g)
    assert_same_bits(y, np.zeros(4, F))
    assert_same_bits(dx, g)
    assert (dmin, dmax) == (0.0, 0.0)


@cases("name", OPS, ["per channel", "V1"])
def test_second_derivatives_by_reverse_over_reverse(name):
    """Of f(x)^3 where f' is a constant mask: 6 f(x) mask."""
    op, x = OPS[name], X[:-1]

    @jax.jit
    def orders(x):
        y, vjp = jax.vjp(op, x)
        first = jax.grad(lambda x: (op(x) ** 3).sum())
        return y, *vjp(jnp.ones_like(y)), jax.grad(lambda x: first(x).sum())(x), jax.jacrev(first)(x)

    y, mask, summed, whole = map(np.asarray, orders(x))
    np.testing.assert_allclose(summed, 6 * y * mask, rtol=1e-6)
    np.testing.assert_allclose(whole, np.diag(6 * y * mask), rtol=1e-6)


@pytest.mark.slow
def test_second_derivatives_to_the_range():
    """Of (sum f)^2: the sum's derivative to max is the number above the range, here 2."""
    f = lambda x, hi: tf.fake_quant_with_min_max_vars(x, LOW, hi, BITS)
    weighted = lambda hi: (f(X, hi) * np.arange(6, dtype=F)).sum() ** 2
    both = jax.jacrev(jax.grad(lambda x, hi: f(x, hi).sum() ** 2, 1))
    twice, to_x = jax.jit(lambda x, hi: (jax.grad(jax.grad(weighted))(hi), both(x, hi)))(X, HIGH)
    assert twice.item() == 2 * (4 + 5) ** 2
    assert to_x.tolist() == [0.0, 4.0, 4.0, 4.0, 0.0, 0.0]


@every_op
def test_forward_mode_raises_the_error_of_jax(name):
    op = OPS[name]
    for forward in (lambda x: jax.jvp(op, (x,), (x,)), jax.hessian(lambda x: op(x).sum())):
        with pytest.raises(TypeError, match="forward-mode autodiff"):
            jax.jit(forward).lower(X)


def test_a_masked_cotangent_is_a_product():
    g = np.array([-1.0, np.nan, np.inf, 1.0], F)
    dx, dmin, dmax = map(np.asarray, vars_gradient(g, np.full(4, 9.0, F), -1.0, 1.0))
    assert_same_bits(dx, np.array([-0.0, np.nan, np.nan, 0.0], F))
    assert np.isnan(dmin)
    assert np.isnan(dmax)


def test_a_sum_of_one_negative_zero_is_zero():
    """As TensorFlow's, which starts at 0."""
    _, *ends = tf.fake_quant_with_min_max_vars_gradient(F(-1), F(0.5), -1.0, 1.0)
    for end in ends:
        assert_same_bits(end, F(0))


def test_an_infinite_range_has_no_inside_and_no_outside():
    for low, high in (-np.inf, 1.0), (-1.0, np.inf), (-np.inf, np.inf):
        assert [v.any() for v in vars_gradient(np.ones(4, F), np.array([-9, 0, 1, 9], F), low, high)] == [False] * 3


def test_nan_in_x_is_in_no_mask():
    x, g = np.array([np.nan, 0.0, np.nan, np.nan], F), np.array([1, 1, 0, 0], F)
    dx, dmin, dmax = map(np.asarray, vars_gradient(g, x, -1.0, 1.0))
    assert (dx.tolist(), dmin, dmax) == ([0.0, 1.0, 0.0, 0.0], 0.0, 0.0)


def test_pass_through_gives_no_gradient_to_keywords_and_closures():
    f = lambda x, k: tf.grad_pass_through(lambda x, *, s: jnp.round(x * k) * s)(x, s=k).sum()
    dx, dk = jax.jit(jax.grad(f, (0, 1)))(X, 2.0)
    assert (dx.tolist(), dk.item()) == ([1.0] * 6, 0.0)


def test_pass_through_takes_several_arguments_and_trees():
    f = tf.grad_pass_through(lambda a, b: (jnp.round(a["w"]) * 0, {"w": b["w"] * 2}))
    with pytest.raises(TypeError, match="result like its arguments"):
        jax.eval_shape(f, {"w": X}, {"w": X})
    f = tf.grad_pass_through(lambda a, b: ({"w": a["w"] * 0}, b * 2))
    (a, b), da, db = cotangents(f, ({"w": X}, X), ({"w": X + 1}, X + 2))
    assert_same_bits(b, X * 2)
    assert not a["w"].any()
    assert_same_bits(da["w"], X + 1)
    assert_same_bits(db, X + 2)
