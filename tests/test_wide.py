# SPDX-License-Identifier: Apache-2.0
"""Quotients as float64 rounds them, integers of biases and multipliers, against NumPy's float64."""

import jax
import numpy as np

from jaxquant._runtime._kernels import bias_integers
from jaxquant._runtime._litert import fixed_multiplier

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
