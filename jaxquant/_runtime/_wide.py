# SPDX-License-Identifier: Apache-2.0
"""Integers of 64 bits as two of 32, and quotients as float64 rounds them: kernels compute with both."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._base import _numerics as num

_STEPS = 54  # of the division: 53 bits of a float64, and the one that rounds


class Wide(NamedTuple):
    """The unsigned integer `high * 2**32 + low`, of uint32; where it is signed, `high` is int32."""

    high: Array
    low: Array

    def shifted_left(self) -> "Wide":
        return Wide((self.high << 1) | (self.low >> 31), self.low << 1)

    def __ge__(self, other: "Wide") -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (self.high > other.high) | ((self.high == other.high) & (self.low >= other.low))

    def less(self, other: "Wide", where: Array) -> "Wide":
        """`self - other` where the condition holds."""
        low = self.low - jnp.where(where, other.low, np.uint32(0))
        borrowed = (low > self.low).astype(jnp.uint32)
        return Wide(self.high - jnp.where(where, other.high, np.uint32(0)) - borrowed, low)

    def plus(self, n: Array) -> "Wide":
        """`self + n`, of a uint32."""
        low = self.low + n
        return Wide(self.high + (low < n).astype(self.high.dtype), low)


def product(a: Array, b: Array) -> Wide:
    """The exact product of two int32, the second of which is not negative; `high` is signed."""
    word = jnp.uint32(0xFFFF)
    b = jnp.asarray(b, jnp.int32)
    a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    low = a_low.astype(jnp.uint32) * b_low.astype(jnp.uint32)
    middle = a_high * b_low + (low >> 16).astype(jnp.int32)
    rest = a_low * b_high + (middle & 0xFFFF)
    return Wide(a_high * b_high + (middle >> 16) + (rest >> 16), (rest.astype(jnp.uint32) << 16) | (low & word))


class Quotient(NamedTuple):
    """A positive float64, `bits * 2**(exponent - 52)`, with 53 bits of which the first is 1."""

    bits: Wide
    exponent: Array


def _mantissa(*factors: Array) -> tuple[Wide, Array]:
    """The product of one or two normal float32 numbers as 48 bits, of which the first is 1, and its exponent."""
    integers = [(lax.bitcast_convert_type(v, jnp.uint32) & 0x7FFFFF) | 0x800000 for v in factors]
    exponent = sum((num.floor_log2(v) for v in factors), jnp.int32(0))
    if len(factors) == 1:
        return Wide(integers[0] >> 8, integers[0] << 24), exponent
    high, low = product(*(v.astype(jnp.int32) for v in integers))
    whole = Wide(high.astype(jnp.uint32), low)
    is_full = whole.high >> 15 == 1  # products of two mantissas lie in [1, 4)
    doubled = whole.shifted_left()
    bits = Wide(*(jnp.where(is_full, v, w) for v, w in zip(whole, doubled, strict=True)))
    return bits, exponent + is_full.astype(jnp.int32)


def quotient(numerator: tuple[Array, ...], denominator: tuple[Array, ...]) -> Quotient:
    """The float64 quotient of two products of one or two float32 numbers, which are normal, and whose sign is ignored.

    The products are exact in float64, so this is what a kernel gets that computes with float64.
    """
    shape = jnp.broadcast_shapes(*(v.shape for v in (*numerator, *denominator)))
    of = lambda factors: _mantissa(*(jnp.broadcast_to(v, shape) for v in factors))
    (rest, above), (divisor, below) = of(numerator), of(denominator)
    is_less = ~(rest >= divisor)
    rest = Wide(*(jnp.where(is_less, w, v) for v, w in zip(rest, rest.shifted_left(), strict=True)))

    def step(_: int, state: tuple[Wide, Wide]) -> tuple[Wide, Wide]:
        rest, found = state
        bit = rest >= divisor
        found = found.shifted_left()
        return rest.less(divisor, bit).shifted_left(), found._replace(low=found.low | bit.astype(jnp.uint32))

    nothing = Wide(*(jnp.zeros_like(v) for v in rest))
    rest, found = lax.fori_loop(0, _STEPS, step, (rest, nothing))
    odd, last = found.low >> 1 & 1, found.low & 1
    up = last & (odd | ((rest.high | rest.low) != 0).astype(jnp.uint32))
    rounded = Wide(found.high >> 1, (found.high << 31) | (found.low >> 1)).plus(up)
    carried = (rounded.high >> 21).astype(jnp.int32)  # to 2**53
    bits = rounded._replace(high=jnp.where(carried == 1, rounded.high >> 1, rounded.high))
    return Quotient(bits, above - below - is_less.astype(jnp.int32) + carried)
