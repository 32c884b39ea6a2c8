# SPDX-License-Identifier: Apache-2.0
"""Floats in integer units: the digits of their values, and the one rounding of a sum of digits.

Every level of a narrow float is an integer multiple of its smallest. Cut into digits of base 256 from -128 to 127, it
is a few int8 arrays; the contraction of each with each of the other operand is exact in int32, and the sum of those,
which fits 64 bits, is rounded once.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .._arrays._codes import centred, largest_magnitude
from .._arrays._quantized import Quantized
from .._base import _numerics as num
from .._base._groups import broadcast_groups
from .._spec._granularity import PerTensor
from .._spec._spec import QuantSpec
from ._lowering import is_at_most
from ._operands import with_flags

_LARGEST = 2**7  # magnitude of a digit


def in_digits(
    a: Quantized, b: Quantized, axes: tuple[Sequence[int], Sequence[int]], is_short: Callable[[], bool]
) -> tuple[list[Quantized], list[Quantized]]:
    """Two operands as the digits of their values, from the lowest.

    Integers beside integers stay whole, but for those of more than 8 bits whose sums are not short enough for int32.
    Along `axes` a NaN of a float counts for all: the scales of the digits are NaN there.
    """
    if not _is_cut(a.spec, b.spec) and (max(a.spec.bits, b.spec.bits) <= 8 or is_short()):
        return [_in_float32(a)], [_in_float32(b)]
    return _digits(a, axes[0]), _digits(b, axes[1])


def _is_cut(*specs: QuantSpec) -> bool:
    return any(spec.format or spec.has_tensor_scale for spec in specs)


def _in_float32(q: Quantized) -> Quantized:
    return q if q.scale.dtype == jnp.float32 else dataclasses.replace(q, scale=q.scale.astype(jnp.float32))


def _digits(q: Quantized, axes: Sequence[int]) -> list[Quantized]:
    if not _is_cut(q.spec) and q.spec.bits <= 8:
        return [_in_float32(q)]
    scale, rest, granularity = q.scale.astype(jnp.float32), centred(q, jnp.float32), q.spec.granularity
    if q.tensor_scale is not None:  # levels and scales of blocks are integer multiples, and so are their products
        rest = rest * broadcast_groups(scale, q.shape)
        scale, granularity = q.tensor_scale, PerTensor()
    if _is_cut(q.spec):
        nan = rest != rest
        flags = jnp.sum(jnp.where(nan, jnp.nan, 0), tuple(axes), dtype=jnp.float32, keepdims=True)
        scale, rest = with_flags(scale, flags), num.select(nan, 0, rest) * (1 / _unit(q.spec))
    # Exact in float32: numbers below 2 ** 24, and of few digits beyond it.
    spec, most, digits = QuantSpec(narrow_range=False, granularity=granularity), _most(q.spec), []
    while most >= _LARGEST:
        above = jnp.floor((rest + _LARGEST) * (1 / (2 * _LARGEST)))
        digits.append(rest - above * (2 * _LARGEST))
        rest, most = above, (most + _LARGEST) // (2 * _LARGEST)
    return [Quantized(v.astype(jnp.int8), scale, None, spec, q.dtype) for v in (*digits, rest)]


def _unit(spec: QuantSpec) -> float:
    """The unit of the values; where their scales are among them, the unit of the products."""
    return spec.levels.unit * spec.scales.unit


def _most(spec: QuantSpec) -> int:
    """The largest magnitude of a value in units."""
    if not _is_cut(spec):
        return largest_magnitude(spec)
    return round(max(spec.qmax, -spec.qmin) * spec.scales.most / _unit(spec))


def _fit(length: int, a: QuantSpec, b: QuantSpec, digits: int) -> None:
    """Raises for a contraction of `length` products whose sums may not fit: `digits` products of digits in int32."""
    of_digit = math.prod(_LARGEST if _is_cut(spec) or spec.bits > 8 else largest_magnitude(spec) for spec in (a, b))
    limit = min((2**31 - 1) // (of_digit * digits), (2**63 - 1) // (_most(a) * _most(b)))
    if not is_at_most(length, limit):
        blocks = "PerBlock along the contracted axis in a dot product, or " if limit else ""
        fewer = "a format of a smaller range, such as float8_e4m3fn" if _is_cut(a, b) else "fewer bits"
        raise ValueError(
            f"A contraction of {length} products of {a} and {b} does not fit the sums of their digits exactly: no more "
            f"than {limit} of them do. Use {blocks}{fewer}."
        )


def sum_of_digits(
    a: Sequence[Quantized],
    b: Sequence[Quantized],
    specs: tuple[QuantSpec, QuantSpec],
    length: int,
    check: Callable[[Any, QuantSpec, QuantSpec], None],
    contracted: Callable[[Quantized, Quantized], Array],
) -> Array:
    """The contraction of two operands of these specs in digits: int32, or rounded once to float32."""
    unit = math.prod(map(_unit, specs))
    if _is_cut(*specs) or len(a) * len(b) > 1:
        _fit(length, *specs, min(len(a), len(b)))
    else:
        check(length, *specs)
    sums: dict[int, Array] = {}
    for i, x in enumerate(a):
        for j, w in enumerate(b):
            acc = contracted(x, w)
            sums[i + j] = sums[i + j] + acc if i + j in sums else acc
    acc = sums[0] if len(sums) == 1 else _rounded(list(sums.values()))
    return acc if unit == 1 else acc.astype(jnp.float32) * unit


def _rounded(sums: list[Array]) -> Array:
    """`sum(sums[i] * 256 ** i)` of int32, which fits 64 bits, rounded to float32, ties to even."""
    low, high = jnp.zeros_like(sums[0], jnp.uint32), jnp.zeros_like(sums[0])
    for i, v in enumerate(sums):
        if 8 * i < 32:
            part, above = v.astype(jnp.uint32) << (8 * i), v >> min(32 - 8 * i, 31)
        else:
            part, above = jnp.zeros_like(low), v << (8 * i - 32)
        low = low + part
        high = high + above + (low < part).astype(jnp.int32)
    negative = high < 0
    low = num.select(negative, ~low + 1, low)
    high = num.select(negative, ~high + (low == 0).astype(jnp.int32), high).astype(jnp.uint32)
    # The highest 30 bits, the last of which says whether any below is set: one conversion rounds them.
    zeros = num.select(high == 0, lax.clz(low) + 32, lax.clz(high)).astype(jnp.uint32)
    shift = zeros & 31
    carried = num.select(shift == 0, jnp.zeros_like(low), low >> ((32 - shift) & 31))
    top = num.select(zeros < 32, (high << shift) | carried, low << shift)
    left = num.select(zeros < 32, low << shift, jnp.zeros_like(low))
    number = ((top >> 2) | (((top & 3) | left) != 0).astype(jnp.uint32)).astype(jnp.int32)
    value = number.astype(jnp.float32) * num.power_of_two(34 - zeros.astype(jnp.int32), jnp.dtype(jnp.float32))
    return num.select(negative, -value, value)
