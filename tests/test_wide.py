# SPDX-License-Identifier: Apache-2.0
"""Quotients as float64 rounds them, integers of biases and multipliers, against NumPy's float64."""

import functools

import jax
import numpy as np

from jaxquant._runtime._kernels import Grid, bias_integers, limits_of
from jaxquant._runtime._litert import fixed_multiplier
from jaxquant._runtime._runtimes import RUNTIMES

F, D = np.float32, np.float64
RNG = np.random.default_rng(0)
N = 1 << 14


def numbers(low, high):
    """float32 numbers over many magnitudes; a third with few digits, so that quotients are ties."""
    v = F(2 ** RNG.uniform(low, high, N))
    few = F(RNG.integers(1, 64, N) * 2.0 ** RNG.integers(int(low) - 6, int(high) - 5, N))
    return np.where(np.arange(N) % 3 == 0, few, v)


def test_biases_are_rounded_as_float64_rounds_them():
    bias, x, w = numbers(-12, 4) * RNG.choice(F([-1, 1]), N), numbers(-8, 0), numbers(-14, -2)
    ties = np.arange(N) % 5 == 0  # odd multiples of half a step, and their neighbours
    near = F((RNG.integers(-(2**20), 2**20, N) + 0.5) * (D(x) * D(w)))
    bias = np.where(ties, np.nextafter(near, F(RNG.choice([-1, 0, 1], N))), bias)
    bias[:4] = 0, 1e-42, 1e30, -1e30
    want = np.clip(np.rint(D(bias) / (D(x) * D(w))), -(2**30), 2**30)
    want[1] = 0  # a subnormal number counts as 0
    got = np.asarray(jax.jit(bias_integers)(bias, x, w))
    assert got.dtype == np.int32
    assert (np.abs(want) < 2**30).mean() > 0.9
    assert (got != want).sum() == 0


def test_multipliers_are_rounded_as_float64_rounds_them():
    x, w, y = numbers(-8, 0), numbers(-14, -2), numbers(-8, 0)
    q, shift = np.frexp(D(x) * D(w) / D(y))
    q = np.floor(q * 2.0**31 + 0.5).astype(np.int64)
    shift = np.where(q == 2**31, shift + 1, shift)
    q = np.where(q == 2**31, 2**30, q)
    got = jax.jit(lambda x, w, y: fixed_multiplier((x, w), (y,)))(x, w, y)
    assert (np.asarray(got[0]) != np.where(shift < -31, 0, q)).sum() == 0
    assert (np.asarray(got[1]) != np.where(shift < -31, 0, shift)).sum() == 0


# LiteRT's kernels, in integers of 64 bits


def rounded(acc, ratio, is_once=False):
    """acc * ratio by a multiplier of 31 bits and a shift, rounded once, halves up, or twice, the second away from 0."""
    q, shift = np.frexp(ratio)
    q = np.floor(q * 2.0**31 + 0.5).astype(np.int64)
    right = -shift
    if is_once:
        return (acc * q + (np.int64(1) << (30 + right))) >> (31 + right)
    high = (acc * q + 2**30) >> 31
    half = np.int64(1) << (right - 1)
    return np.sign(high) * ((np.abs(high) + half) >> right)


GRIDS = (F(0.037), np.int32(-7)), (F(0.021), np.int32(5)), (F(0.052), np.int32(11))  # of two operands and a result
A, B = RNG.integers(-128, 128, (2, 3, 4, 5), np.int32)
ACC = RNG.integers(-30_000, 30_000, (3, 4, 5), np.int32)


@functools.cache
def all_of(kernels):
    def of(a, b, acc):
        x, y, result = (Grid(*grid) for grid in GRIDS)
        scales, limits = (x.scale, y.scale), limits_of(result, 0.0, None)
        return (
            kernels.layer(acc, scales, result, limits, False),
            kernels.layer(acc, scales, result, None, True),
            kernels.add(a, x, b, y, result, None),
            kernels.mean(a, (1,), x, x),
            kernels.average(a.sum(1), 4, x, x),
            kernels.quantize(a.astype(F) * F(0.1), x, a),
        )

    return jax.jit(of)(A, B, ACC)


def test_the_kernels_of_litert():
    (x, x_zero), (y, y_zero), (z, z_zero) = GRIDS
    at = lambda steps, zero, low=-128: np.clip(steps + zero, low, 127)
    ratio, twice = D(x) * D(y) / D(z), 2 * max(D(x), D(y))
    total = rounded((A.astype(np.int64) - x_zero) << 20, D(x) / twice)
    total = total + rounded((B.astype(np.int64) - y_zero) << 20, D(y) / twice)
    means = A.sum(1, dtype=np.int64)
    average = at(np.sign(means) * ((np.abs(means) + 2) // 4), 0)
    real = A.astype(F) * F(0.1)
    in_fixed_point = [
        at(rounded(ACC.astype(np.int64), ratio), z_zero, z_zero),
        at(rounded(ACC.astype(np.int64), ratio, True), z_zero),
        at(rounded(total, twice / (2**20 * D(z))), z_zero),
        None,
        average,
        at(np.sign(real) * np.floor(np.abs(real / x) + F(0.5)), x_zero),
    ]
    factor = F(F(x * y) / z)
    layer = np.rint(ACC.astype(F) * factor)
    by_xnnpack = [
        at(layer, z_zero, z_zero),
        at(layer, z_zero),
        None,
        at(np.rint(means.astype(F) * F(0.25)), 0),
        average,
        at(np.rint(real * F(1 / x)), x_zero),
    ]
    for name, want in (("litert_reference", in_fixed_point), ("litert", by_xnnpack)):
        for got, of in zip(all_of(RUNTIMES[name]), want, strict=True):
            assert of is None or (np.asarray(got) == of).all()
    near = np.rint((A - x_zero) * (D(x) / D(z)) + (B - y_zero) * (D(y) / D(z))) + z_zero
    assert np.abs(np.asarray(all_of(RUNTIMES["litert"])[2]) - np.clip(near, -128, 127)).max() <= 1
