# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's quantization arithmetic in NumPy: one IEEE operation at a time, one tensor at a time, no jax.

An independent reading of TensorFlow 2.21's kernels. They run with subnormals flushed to zero, which NumPy does not,
so every operation here flushes what goes in and what comes out.
"""

import ml_dtypes
import numpy as np


def flush(v):
    return np.where(np.abs(v) < np.finfo(v.dtype).tiny, np.copysign(v.dtype.type(0), v), v)


def ieee(f, *operands):
    with np.errstate(all="ignore"):
        return flush(f(*(flush(np.asarray(v)) for v in operands)))


def add(a, b):
    return ieee(np.add, a, b)


def sub(a, b):
    return ieee(np.subtract, a, b)


def mul(a, b):
    return ieee(np.multiply, a, b)


def div(a, b):
    return ieee(np.divide, a, b)


def half_up(v):
    return np.floor(add(v, v.dtype.type(0.5)))


def half_away(v):
    """C's round: exact, where floor(|v| + 0.5) is not."""
    magnitude = np.abs(v)
    with np.errstate(invalid="ignore"):
        whole = np.floor(magnitude)
        return np.copysign(whole + (magnitude - whole >= 0.5).astype(v.dtype), v)


def clip(x, low, high):
    x = np.where(flush(high) < flush(x), high, x)
    return np.where(flush(x) < flush(low), low, x)


def computed_in(x):
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


def nudged(low, high, num_bits, narrow_range):
    """scale, inverse, low, high, zero: five scalars."""
    t = low.dtype.type
    qmin, qmax = t(narrow_range), t(2**num_bits - 1)
    width = sub(high, low)
    scale, inverse = div(width, qmax - qmin), div(qmax - qmin, width)
    point = sub(qmin, div(low, scale))
    point = np.where(
        np.isnan(point), t(0), np.where(point < qmin, qmin, np.where(point > qmax, qmax, half_away(point)))
    )
    point = point.astype(low.dtype)
    low, high = mul(sub(qmin, point), scale), mul(sub(qmax, point), scale)
    return scale, inverse, low, high, half_up(mul(-low, inverse))


def fake_quant(x, low, high, num_bits=8, narrow_range=False, divides=False):
    """One tensor, one range. `divides` is what the `vars` op does; the others multiply by the inverse."""
    out, dtype = x.dtype, computed_in(x)
    x, low, high = x.astype(dtype), np.asarray(low, dtype), np.asarray(high, dtype)
    if flush(low) == 0 and flush(high) == 0:
        return np.zeros(x.shape, out)
    scale, inverse, nudged_low, nudged_high, zero = nudged(low, high, num_bits, narrow_range)
    shifted = sub(clip(x, nudged_low, nudged_high), nudged_low)
    level = div(shifted, scale) if divides else mul(shifted, inverse)
    with np.errstate(all="ignore"):
        return mul(half_up(sub(level, zero)), scale).astype(out)


def fake_quant_masks(x, low, high, num_bits=8, narrow_range=False):
    """Where the cotangent goes: to x, to min, to max."""
    dtype = computed_in(x)
    x, low, high = x.astype(dtype), np.asarray(low, dtype), np.asarray(high, dtype)
    if flush(low) == 0 and flush(high) == 0:
        return np.ones(x.shape, bool), np.zeros(x.shape, bool), np.zeros(x.shape, bool)
    _, _, low, high, _ = nudged(low, high, num_bits, narrow_range)
    x = flush(x)
    return (low <= x) & (x <= high), x < low, x > high


def quantize_and_dequantize(x, low, high, signed=True, num_bits=8, given=True, half_even=True, narrow_range=False):
    """One tensor, one range."""
    out, dtype = x.dtype, computed_in(x)
    t, x = dtype.type, x.astype(dtype)
    qmin, qmax = (-(2 ** (num_bits - 1)) + narrow_range, 2 ** (num_bits - 1) - 1) if signed else (0, 2**num_bits - 1)
    qmin, qmax = t(qmin), t(qmax)
    if not given:
        low, high = np.nanmin(x), np.nanmax(x)
    low, high = np.asarray(low, dtype), np.asarray(high, dtype)
    by_low = div(qmin, low) if mul(qmin, low) > 0 else np.finfo(dtype).max
    by_high = div(qmax, high) if mul(qmax, high) > 0 else np.finfo(dtype).max
    if by_low < by_high:
        scale, inverse = by_low, div(low, qmin)
        high = mul(qmax, inverse)
    else:
        scale, inverse = by_high, div(high, qmax)
        low = mul(qmin, inverse)
    level = mul(clip(x, low, high) if given else x, scale)
    with np.errstate(all="ignore"):
        return mul(np.rint(level) if half_even else half_up(level), inverse).astype(out)


FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}


def larger(a, b):
    """C++'s std::max: a NaN in `b` is dropped, one in `a` stays."""
    return b if a < b else a


def quotient(a, b):
    """In float64, rounded once."""
    with np.errstate(all="ignore"):
        return flush(np.asarray(np.float64(a) / np.float64(flush(b)), b.dtype))


def quantize(x, low, high, T, mode="MIN_COMBINED", half_even=False, narrow_range=False, least=0.01):
    """One tensor, one range -> codes as floats, output_min, output_max. NaN gives the lowest code."""
    dtype = computed_in(x)
    t, info, x = dtype.type, np.iinfo(T), x.astype(dtype)
    low, high = np.asarray(low, dtype), np.asarray(high, dtype)
    magnitude = larger(larger(t(1), abs(flush(low))), abs(flush(high)))
    low = flush(low) if flush(low) < 0 else np.zeros((), dtype)
    high = larger(t(0), larger(flush(high), add(low, mul(magnitude, t(least)))))
    high = np.asarray(high, dtype)
    lowest, highest, count = t(info.min), t(info.max), float(info.max) - info.min
    if mode == "SCALED":
        lowest = lowest + t(narrow_range)
        by_low = div(lowest, low) if mul(lowest, low) > 0 else np.finfo(dtype).max
        by_high = div(highest, high) if mul(highest, high) > 0 else np.finfo(dtype).max
        scale = np.minimum(by_low, by_high)
        low, high = div(lowest, scale), div(highest, scale)
        level = mul(clip(x, low, high), scale)
        codes = np.rint(level) if half_even else half_away(level)
    elif mode == "MIN_COMBINED":
        level = mul(sub(clip(x, low, high), low), quotient(count, sub(high, low)))
        codes = half_away(sub(level, t((count + 1) / 2))) if info.min else np.trunc(add(level, t(0.5)))
    else:
        scale = quotient(count, sub(high, low)) if low != high else t(0)
        codes = sub(half_away(mul(x, scale)), sub(half_away(mul(low, scale)), lowest))
        codes = np.clip(codes, lowest, np.minimum(highest, t(2**31 - 128)))
    return np.where(np.isnan(codes), t(info.min), codes), low, high


def dequantize(q, low, high, mode="MIN_COMBINED", narrow_range=False):
    """One tensor, one range -> float32."""
    t, info = np.float32, np.iinfo(q.dtype)
    low, high, codes = t(low), t(high), q.astype(t)
    count = float(info.max) - info.min
    if mode == "SCALED":
        scale = div(high, t(info.max))
        scale = larger(div(low, t(info.min + narrow_range)), scale) if info.min else scale
        return mul(codes, scale)
    if mode == "MIN_COMBINED":
        scale = div(sub(high, low), t(info.max) - t(info.min))
        half = t((count + 1) / 2) if info.min else t(0)
        return add(mul(add(codes, half), scale), low)
    with np.errstate(all="ignore"):
        scale = flush(t(np.float64(sub(high, low)) / count))
    start = flush(low) if flush(low) == flush(high) else mul(half_away(div(low, scale)), scale)
    return add(sub(start, mul(t(info.min), scale)), mul(codes, scale))
