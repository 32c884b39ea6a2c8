# SPDX-License-Identifier: Apache-2.0
"""Values where a quantizer goes wrong: ties and their neighbours, the ends of the range, specials; and random ones."""

import jax
import numpy as np

SPECIALS = np.array([0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -1e-40, 3e38, -3e38, 0.49999997, -0.49999997], np.float32)


def normal(seed, *shape, scale=1):
    """A float32 array of random numbers, made by NumPy: no program is compiled for it."""
    return jax.device_put((np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32))


def ones(shape, dtype=np.float32):
    return jax.device_put(np.ones(shape, dtype))


def zeros(shape, dtype=np.float32):
    return jax.device_put(np.zeros(shape, dtype))


def dead(v, *channels):
    """`v` with zeros at some places along its first axis."""
    is_dead = np.isin(np.arange(len(v)), channels).reshape(-1, *[1] * (v.ndim - 1))
    return jax.device_put(np.where(is_dead, np.zeros((), v.dtype), v))


def hard_values(rng, n, low, high, steps):
    """`n` float32 values: most on or near the grid of [low, high], the others normal, special or random bits."""
    low, high = np.float64(low), np.float64(high)
    scale = (high - low) / steps or 1.0
    level = rng.integers(-2, steps + 3, n) + np.rint(low / scale)
    x = np.where(rng.random(n) < 0.7, level + 0.5, level) * scale
    x = x * (1 + 2.0**-24 * rng.integers(-6, 7, n))
    x = np.where(rng.random(n) < 0.15, rng.normal((low + high) / 2, abs(high - low), n), x).astype(np.float32)
    x = np.where(rng.random(n) < 0.06, rng.choice(SPECIALS, n), x)
    return np.where(rng.random(n) < 0.06, rng.integers(0, 2**32, n, np.uint32).view(np.float32), x)


def hard_ranges(rng, n, steps):
    """`n` ranges `(low, high)` in float32: plain, with ties in the nudge, one-sided, tiny, huge, and 0, 0 once."""
    width = np.exp(rng.normal(0, 2, n))
    low = -width * rng.random(n)
    high = low + width
    tie, step = rng.integers(0, steps, n), 2.0 ** rng.integers(-6, 4, n)
    kind = np.arange(n) % 8
    low = np.select(
        [kind == 1, kind == 2, kind == 3, kind == 4, kind == 5, kind == 7],
        [-width, -(tie + 0.5) * step, np.abs(low), low * 1e-30, low * 1e25, 0.0],
        low,
    )
    high = np.select(
        [kind == 1, kind == 2, kind == 3, kind == 4, kind == 5, kind == 7],
        [width, (steps - tie - 0.5) * step, np.abs(low) + width, high * 1e-30, high * 1e25, 0.0],
        high,
    )
    return low.astype(np.float32), high.astype(np.float32)


def cast(x, dtype):
    """`x` in `dtype`; what does not fit becomes infinite, as it should here."""
    with np.errstate(all="ignore"):
        return x.astype(dtype)
