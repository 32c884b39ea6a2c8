# SPDX-License-Identifier: Apache-2.0
"""The affine form in NumPy: one IEEE operation at a time, subnormals flushed as XLA:CPU flushes them, no jax.

An independent reading of the docstrings of `fake_quant`, `quantize` and `qparams_from_range`. A spec is read as its
`bits`, `signed`, `symmetric`, `narrow_range` and `rounding`; what shares a scale is read off the shape of the scale.
"""

import ml_dtypes
import numpy as np
from oracle import add, clip, computed_in, div, flush, half_away, half_up, ieee, mul, sub

TINY = np.finfo(np.float32).tiny
LARGEST = np.finfo(np.float32).max / np.float32(2)
ROUND = {"half_even": np.rint, "half_up": half_up, "half_away": half_away}


def grid(spec, bits=None):
    """qmin, qmax."""
    bits = bits or spec.bits
    low = -(2 ** (bits - 1)) if spec.signed else 0
    return low + spec.narrow_range, low + 2**bits - 1


def integers_of(spec):
    return np.dtype(("int" if spec.signed else "uint") + ("8" if spec.bits <= 8 else "16"))


def spread(v, shape):
    """One value for each group -> one for each element."""
    v = np.asarray(v)
    v = v.reshape((1,) * (len(shape) - v.ndim) + v.shape)
    for axis, n in enumerate(shape):
        v = np.repeat(v, n // max(v.shape[axis], 1), axis)
    return v


def total(terms, groups):
    """The sum of the elements of each group in float64, in the shape `groups`."""
    padded = (1,) * (terms.ndim - len(groups)) + tuple(groups)
    parts = [part for g, n in zip(padded, terms.shape, strict=True) for part in (g, n // max(g, 1))]
    with np.errstate(all="ignore"):
        sums = terms.astype(np.float64).reshape(parts).sum(tuple(range(1, len(parts), 2)), initial=0.0)
    return sums.reshape(groups)


def used(scale, zero_point, spec):
    """The qparams of one group each as they are used, wherever an optimizer left them."""
    scale, zero_point = np.asarray(scale, np.float32), np.asarray(zero_point, np.float32)
    scale = np.where(flush(scale) < TINY, TINY, scale)
    if spec.symmetric:
        return scale, np.zeros_like(scale)
    low, high = (np.float32(q) for q in grid(spec))
    return np.where(np.isnan(zero_point), np.float32("nan"), scale), clip(np.rint(zero_point), low, high)


class Levels:
    """Quotients and unclipped levels of `x`, with everything that they depend on spread over the elements."""

    def __init__(self, x, scale, zero_point, spec, noise=None):
        self.dtype = computed_in(x)
        qparams = used(scale, zero_point, spec)
        self.scale, self.zero_point = (spread(v, x.shape).astype(self.dtype) for v in qparams)
        self.qmin, self.qmax = (self.dtype.type(q) for q in grid(spec))
        self.quotient = div(x.astype(self.dtype), self.scale)
        if noise is None:
            whole = ROUND[spec.rounding](self.quotient)
        else:
            below = np.floor(self.quotient)
            whole = add(below, (noise < sub(self.quotient, below)).astype(self.dtype))
        self.unclipped = add(whole, self.zero_point)

    def clipped(self):
        return clip(self.unclipped, self.qmin, self.qmax)


def quantize(x, scale, zero_point, spec, noise=None):
    """Integers; NaN gives qmin."""
    level = Levels(x, scale, zero_point, spec, noise).clipped()
    return np.where(np.isnan(level), level.dtype.type(grid(spec)[0]), level).astype(integers_of(spec))


def fake_quant(x, scale, zero_point, spec, noise=None):
    """Real values; NaN stays NaN, every zero is +0, and what is beyond a half-precision dtype its largest number."""
    at = Levels(x, scale, zero_point, spec, noise)
    steps = sub(at.clipped(), at.zero_point)
    with np.errstate(all="ignore"):
        y = mul(np.where(steps == 0, steps.dtype.type(0), steps), at.scale)
        largest = float(ml_dtypes.finfo(x.dtype).max)
        return (y if y.dtype == x.dtype else np.clip(y, -largest, largest)).astype(x.dtype)


def gradients(g, x, scale, zero_point, spec, noise=None):
    """dx, dscale, dzero_point, and the sum of the magnitudes that dscale adds, which is what rounding acts on."""
    at = Levels(x, scale, zero_point, spec, noise)
    below, above = at.unclipped < at.qmin, at.unclipped > at.qmax
    inside = (at.qmin <= at.unclipped) & (at.unclipped <= at.qmax)
    with np.errstate(all="ignore"):
        # Exact but for the quotient: more digits than float64 has, where x is of float64.
        left = np.longdouble(at.unclipped - at.zero_point) * at.scale - flush(x.astype(at.dtype))
        error = (left / at.scale).astype(at.dtype)
    steps = np.select(
        [below, above, inside],
        [at.qmin - at.zero_point, at.qmax - at.zero_point, error],
        at.dtype.type(0),
    )
    wide, groups = g.astype(at.dtype), np.shape(scale)
    terms = mul(wide, steps)
    clipped = total(np.where(below | above, wide, at.dtype.type(0)), groups).astype(at.dtype)
    step = used(scale, zero_point, spec)[0].astype(at.dtype)
    dzero_point = np.zeros(groups) if spec.symmetric else mul(-step, clipped)
    float32 = lambda v: ieee(lambda v: v.astype(np.float32), v)
    return (
        np.where(inside, g, g.dtype.type(0)),
        float32(total(terms, groups)),
        float32(dzero_point),
        total(np.abs(terms), groups),
    )


def qparams_from_range(x_min, x_max, spec, bits=None):
    """scale, zero_point."""
    qmin, qmax = (np.float32(q) for q in grid(spec, bits))
    end = lambda v: np.where(np.isnan(v), np.float32(0), np.clip(flush(v), -LARGEST, LARGEST))
    x_min, x_max = np.minimum(end(x_min), np.float32(0)), np.maximum(end(x_max), np.float32(0))
    if not spec.symmetric:
        width, steps = sub(x_max, x_min), qmax - qmin
    else:
        width, steps = np.maximum(-x_min, x_max) if spec.signed else x_max, qmax
    scale = div(width, steps)
    scale = np.where(width > 0, np.maximum(scale, TINY), np.float32(1))
    if spec.symmetric:
        return scale, np.zeros_like(scale)
    return scale, clip(sub(qmin, np.rint(div(x_min, scale))), qmin, qmax)
