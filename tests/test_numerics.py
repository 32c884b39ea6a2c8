# SPDX-License-Identifier: Apache-2.0
"""The shared arithmetic, and that each guard is needed: without it XLA gives other bits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from exact import assert_same_bits, differing
from inputs import hard_ranges, hard_values
from lanes import cases

from jaxquant._base import _numerics as num
from jaxquant._platform._division import undisturbed
from jaxquant.tf._nudge import along_axis, masked_product, nudge

pytestmark = pytest.mark.bits

RNG = np.random.default_rng(0)
TIES = np.concatenate([np.arange(-9, 10) + 0.5, [0.49999997, -0.49999997, 8388608.5, 8388609, 0, -0.0, 1e30]])
NEAR = np.nextafter(TIES.astype(np.float32), np.float32(np.inf))
V = np.concatenate([TIES.astype(np.float32), NEAR, -NEAR, [np.nan, np.inf, -np.inf]]).astype(np.float32)


@pytest.mark.parametrize(
    ("got", "want"),
    [(num.round_half_even, np.rint), (num.round_half_away, oracle.half_away), (num.round_half_up, oracle.half_up)],
)
def test_rounding_modes(got, want):
    with np.errstate(invalid="ignore"):
        assert_same_bits(jax.jit(got)(V), want(V).astype(np.float32))


def test_rounding_modes_differ_where_they_should():
    v = np.float32([2.5, -2.5, 0.49999997])
    assert num.round_half_even(v).tolist() == [2.0, -2.0, 0.0]
    assert num.round_half_away(v).tolist() == [3.0, -3.0, 0.0]
    assert num.round_half_up(v).tolist() == [3.0, -2.0, 1.0]


def test_stochastic_rounding_goes_up_for_noise_below_the_fraction():
    v, noise = np.float32([2, -3, 0, 2.25, 2.25, -2.25]), np.float32([0, 0, 0.75, 0.125, 0.25, 0.5])
    assert num.round_stochastic(v, noise).tolist() == [2.0, -3.0, 0.0, 3.0, 2.0, -2.0]


def test_guard_is_the_identity_and_its_own_derivative():
    for guard in num.guard, jax.jit(num.guard):
        assert_same_bits(guard(V), V)
    two, three = np.float32([2, 3])
    assert float(jax.grad(num.guard)(two)) == 1
    assert tuple(map(float, jax.jvp(num.guard, (two,), (three,)))) == (2, 3)


@pytest.mark.parametrize("guarded", [True, False])
def test_guard_keeps_a_product_and_a_sum_apart(guarded):
    a, b, c = RNG.normal(size=(3, 4096)).astype(np.float32)
    keep = num.guard if guarded else lambda v: v
    count = differing(jax.jit(lambda a, b, c: keep(a * b) + c)(a, b, c), a * b + c)
    assert (count == 0) == guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_divide_by_a_constant_and_by_a_broadcast_value(guarded):
    a, s = RNG.normal(size=(512, 64)).astype(np.float32), np.exp(RNG.normal(size=64)).astype(np.float32)
    divide = undisturbed if guarded else lambda a, b: a / b
    by_constant = differing(jax.jit(lambda a: divide(a, 255.0))(a), a / np.float32(255))
    by_vector = differing(jax.jit(lambda a, s: jnp.floor(divide(a, s[None])))(a, s), np.floor(a / s))
    assert (by_constant == 0) == guarded
    if guarded:
        assert by_vector == 0


def test_clip_keeps_nan_and_the_sign_of_zero():
    x, clip = np.float32([np.nan, -0.0, 0.0, -2.0, 2.0]), jax.jit(num.clip)
    assert_same_bits(clip(x, np.float32(0), np.float32(1)), np.float32([np.nan, -0.0, 0.0, 0.0, 1.0]))
    assert_same_bits(clip(x, np.float32(-1), np.float32(0)), np.float32([np.nan, -0.0, 0.0, -1.0, 0.0]))


@cases(
    ("narrow", "num_bits", "road"),
    itertools.product([False, True], [2, 8, 16], ["eager", "jit", "constants"]),
    [(True, 8, "jit"), (True, 8, "constants")],
)
def test_nudge_is_the_oracle(num_bits, narrow, road):
    low, high = hard_ranges(np.random.default_rng(num_bits), 400, 2**num_bits - 1 - narrow)
    of_range = lambda a, b: nudge(a, b, float(narrow), 2.0**num_bits - 1)
    every = jax.vmap(of_range)
    if road == "constants":
        got = jax.jit(lambda: every(low, high))()  # folded, were it not for the barrier
    else:
        got = (every if road == "eager" else jax.jit(every))(low, high)
    got = jax.tree.map(np.asarray, got)
    for i in range(400):
        *want, zero = oracle.nudged(low[i], high[i], num_bits, narrow)
        zero = -1 if low[i] == high[i] == 0 else zero  # not set
        for value, wanted in zip(got, (*want, zero), strict=True):
            assert_same_bits(value[i], np.float32(wanted))


def test_product_has_the_signs_of_a_product():
    g, mask = np.float32([-1.0, np.nan, np.inf, -2.0]), np.array([False, False, False, True])
    assert_same_bits(jax.jit(masked_product)(g, mask), np.array([-0.0, np.nan, np.nan, -2.0], np.float32))


def test_along_axis():
    shape_of = lambda shape, axis: jax.eval_shape(lambda v: along_axis(v, axis, 3), np.zeros(shape)).shape
    assert shape_of(3, 1) == (1, 3, 1)
    assert shape_of((), 1) == ()
    assert shape_of((), None) == ()


def test_hard_values_reach_the_ties():
    """The inputs of these tests are what they claim: a rounding off by one ulp is seen."""
    x = hard_values(np.random.default_rng(0), 4096, -1.0, 1.0, 255)
    y = oracle.fake_quant(x, np.float32(-1), np.float32(1))
    assert (y != oracle.fake_quant(np.nextafter(x, np.float32(9)), np.float32(-1), np.float32(1))).sum() > 50


def test_a_select_of_two_numbers():
    condition = jnp.array([True, False])
    assert num.select(condition, 1, 0).tolist() == [1, 0]
    assert num.select(condition, jnp.float16(2), 0.5).dtype == jnp.float16
