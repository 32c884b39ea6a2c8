# SPDX-License-Identifier: Apache-2.0
"""What stands in for IEEE division on TPUs and GPUs has its bits, whatever the quotient of the device is worth.

Here the CPU runs it, with up to three units of error in each quotient that it starts from.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import differing, x64
from jax import lax
from lanes import by_default, cases

from benchmarks import exactness
from jaxquant import QuantSpec, Range, qparams_from_range
from jaxquant._base import _numerics as num
from jaxquant._platform import _division as division
from jaxquant._platform import _primitive

pytestmark = pytest.mark.bits

TINY, LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max
FAMILIES = [f if f == "quantize" else pytest.param(f, marks=pytest.mark.slow) for f in exactness.FAMILIES]
ROUNDINGS = num.round_half_even, num.round_half_away


def off_by(units):
    """The device's own quotient, each with some error of up to so many units in the last place."""

    def nearly(a, b):
        quotient = a.astype(jnp.float32) / b.astype(jnp.float32)
        bits = lax.bitcast_convert_type(quotient, jnp.int32)
        some = (bits * np.int32(-1640531527) ^ jnp.broadcast_to(b, bits.shape).astype(jnp.int32)) >> 13
        moved = bits + (some & 0xFFFF) % (2 * units + 1) - units
        return jnp.where(quotient == 0, quotient, lax.bitcast_convert_type(moved, jnp.float32))

    return nearly


@pytest.fixture
def elsewhere(monkeypatch):
    """The program of other platforms, whose quotients are off by up to so many units."""

    def patched(units):
        monkeypatch.setattr(division, "_nearly", off_by(units))
        monkeypatch.setattr(lax, "platform_dependent", lambda *args, default, **_: default(*args))
        monkeypatch.setattr(_primitive, "is_explicit", lambda _: True)  # where a primitive is lax.platform_dependent
        jax.clear_caches()

    yield patched
    monkeypatch.undo()
    jax.clear_caches()


def to_level(x, step):
    return division.divide_to_level(x, step, with_signed_zero=True)


def check(f, *args):
    """Of numbers as NumPy divides them, where the quotient is not subnormal."""
    with np.errstate(all="ignore"):
        want = args[0] / args[1]
    is_normal = ~((np.abs(want) < TINY) & (want != 0))
    assert differing(np.asarray(jax.jit(f)(*args))[is_normal], want[is_normal]) == 0


@cases("units", range(4), [1, 3])
def test_quotients_are_those_of_ieee_division(elsewhere, units):
    elsewhere(units)
    rng = np.random.default_rng(units)
    digits = rng.integers(2**23, 2**24, (2, 2**20))
    near = 2**23 + rng.integers(0, 9, (2, 2**16)), 2**24 - 1 - rng.integers(0, 9, (2, 2**16))
    digits = np.concatenate([digits, *near, np.stack([near[0][0], near[1][1]]), np.stack([near[1][0], near[0][1]])], 1)
    exponents = rng.integers(-60, 60, digits.shape)
    a, b = np.ldexp(digits, exponents - 23).astype(np.float32) * rng.choice(np.float32([-1, 1]), digits.shape)
    check(division.divide, a, b)
    check(division.divide, a, a)
    check(division.divide, b[: 2**18].reshape(512, 512), a[None, :512])
    largest = np.float32(LARGEST) * np.float32(1 - 2.0**-24 * 4)
    ends = np.float32([largest, LARGEST, 1, TINY, 0, -0.0, np.inf, -np.inf, np.nan])
    pairs = np.float32(list(itertools.product(ends, [1, -1, 0.75, 127, 1.5, np.inf, np.nan, 0])))
    check(division.divide, *pairs.T)


@pytest.mark.slow
def test_quotients_have_their_gradient_and_float64_its_division(elsewhere):
    elsewhere(3)
    a, b = np.float32([3, -5]), np.float32([7, 0.3])
    got = jax.jit(jax.vmap(jax.grad(division.divide, (0, 1))))(a, b)
    np.testing.assert_allclose(got, [1 / b, -a / b**2], 1e-6)
    scale = lambda end: qparams_from_range(Range(-end, end), QuantSpec()).scale
    assert jax.grad(scale)(np.float32(2)) == np.float32(1) / np.float32(127)
    with x64():
        check(division.divide, np.float64(a), np.float64(b))
        check(to_level, np.float64(a), np.float64(b))


def middles():
    """Quotients beside the middle between a number of 12 bits and its neighbours: `(x, step)`, all that there are.

    In integers: a step of 24 digits, `short` of 12, and `rest = x - short * step`, which is next to half a unit in the
    last place of the quotient times the step. Below a power of two the unit is half as large.
    """
    for shift, shorts in ((13, np.arange(2**11, 2**12)), (14, np.array([2**11]))):
        rest = np.arange(2 ** (23 - shift), 2 ** (24 - shift) + 1)[:, None]
        step = (rest << shift) + np.arange(-8, 9)
        is_step = (step >= 2**23) & (step < 2**24)
        rest, step = np.broadcast_to(rest, step.shape)[is_step], step[is_step]
        for short, sign in itertools.product(shorts, [1, -1]):
            x = short * step + sign * rest
            is_float = x % np.where(x < 2**35, 2**11, 2**12) == 0
            yield x[is_float].astype(np.float32), step[is_float].astype(np.float32)


def test_a_zero_has_its_sign_where_levels_have_one(elsewhere):
    elsewhere(3)
    x = np.float32([0, -0.0, -1e-30])
    for with_sign in True, False:
        got = jax.jit(division.divide_to_level, static_argnums=2)(x, np.float32([3, 3, 3]), with_sign)
        assert np.signbit(np.rint(got)).tolist() == [False, with_sign, True]


@pytest.mark.slow
def test_no_quotient_beside_a_short_number_is_nearer_to_a_middle_than_the_sum_can_tell(elsewhere):
    elsewhere(3)
    x, step = map(np.concatenate, zip(*middles(), strict=True))
    assert len(x) > 20_000
    check(to_level, x, step)
    check(to_level, -x * np.float32(2.0**-60), step * np.float32(2.0**-50))


def beside_ties(bits, scales):
    """All ties of a grid, beyond its ends too, and the two floats on either side of each: (distances, scales, ties)."""
    ties = np.arange(-(2 ** (bits - 1)) - 1, 2**bits + 1) + 0.5
    with np.errstate(over="ignore"):
        x = (ties * scales[:, None].astype(np.float64)).astype(np.float32)
    x = np.stack([(x.view(np.int32) + distance).view(np.float32) for distance in range(-2, 3)])
    return np.where(np.isfinite(x) & (np.abs(x) >= TINY), x, np.float32(0))  # none is subnormal


def some_scales(rng, n):
    """Most of them of all exponents, some next to the smallest and the largest, and powers of two."""
    bits = rng.integers(TINY.view(np.int32), np.float32(LARGEST).view(np.int32), n, np.int32)
    ends = np.array([TINY, LARGEST / 127, LARGEST], np.float32).view(np.int32)
    bits[: n // 8] = np.minimum(rng.choice(ends, n // 8) + rng.integers(0, 99, n // 8), ends[-1])
    bits[n // 8 : n // 4] &= 0x7F800000
    return bits.view(np.float32)


@by_default("3-400")
@pytest.mark.parametrize("n", [400, pytest.param(100_000, marks=pytest.mark.slow)])
@cases("bits", [2, 3, 4, 8, 10], [3, 4, 10])
def test_what_lies_beside_a_tie_is_rounded_as_on_a_cpu(elsewhere, bits, n):
    elsewhere(3)
    rounded = jax.jit(lambda x, step: [f(to_level(x, step)) for f in ROUNDINGS])
    for scales in np.split(some_scales(np.random.default_rng(bits), n), n // 400):
        x = beside_ties(bits, scales)
        with np.errstate(all="ignore"):
            quotient = x / scales[:, None]
        for got, want in zip(rounded(x, scales[None, :, None]), ROUNDINGS, strict=True):
            wanted = np.asarray(want(quotient))
            seen = np.clip(got, -1024, 1024)
            assert differing(seen, np.clip(wanted, -1024, 1024)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_exact_case_has_the_bits_of_the_cpu(elsewhere, family):
    elsewhere(3)
    want = exactness.recorded().values
    differ = {
        f"{case.name}: {name}": exactness.difference(np.asarray(value), want[f"{case.name}: {name}"]).differ
        for case in exactness.cases(family)
        if case.exact
        for name, value in jax.jit(case.f)(*case.inputs).items()
    }
    assert differ == dict.fromkeys(differ, 0)


def test_without_jit_it_is_the_same():
    x, step = np.float32([0.3, -1.7, 2.5, np.inf]), np.float32([3])
    want = x / step
    with jax.disable_jit():
        for of in (division.divide, lambda x, step: division.divide_to_level(x, step, True)):
            np.testing.assert_array_equal(np.asarray(of(x, step)).view(np.int32), want.view(np.int32))
