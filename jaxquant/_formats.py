# SPDX-License-Identifier: Apache-2.0
"""What the levels of a grid are: integers of some bits, or the finite values of a narrow float. Static; no arrays."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import _numerics as num


@dataclasses.dataclass(frozen=True)
class Integers:
    """The integers of some bits; `narrow` without the lowest."""

    bits: int
    signed: bool
    narrow: bool

    @property
    def qmin(self) -> int:
        """The lowest level."""
        return -int(self.signed) * 2 ** (self.bits - 1) + int(self.narrow)

    @property
    def qmax(self) -> int:
        """The highest level."""
        return 2 ** (self.bits - self.signed) - 1

    @property
    def dtype(self) -> np.dtype:
        """The dtype that holds the levels."""
        return np.dtype(f"{'' if self.signed else 'u'}int{8 if self.bits <= 8 else 16}")

    @property
    def number(self) -> int:
        """How many levels there are."""
        return self.qmax - self.qmin + 1

    @property
    def unit(self) -> float:
        """What all levels are integer multiples of."""
        return 1.0

    @property
    def last_step(self) -> float:
        """From the highest level but one to the highest."""
        return 1.0

    def nearest(self, v: Array, rounding: str, noise: Array | None) -> Array:
        """The level next to each value, as if there were no ends."""
        return _rounded(v, rounding, noise)

    def beyond(self, rounding: str) -> float | None:
        """How far beyond the last level on either side values begin to round outwards; None if that is not all."""
        return 0.5 if self.narrow and self.signed and rounding in ("half_even", "half_away") else None

    def held(self, level: Array, qmin: Array, qmax: Array) -> Array:
        """Levels, clipped, in what holds them; NaN, which compares with nothing, becomes qmin."""
        return lax.min(num.select(level >= qmin, level, qmin), qmax).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Float:
    """The finite values of a narrow float: a sign, `mantissa` bits, exponents from `least`, values up to `qmax`.

    Each is an integer multiple of the smallest, 2 ** (least - mantissa).
    """

    name: str
    bits: int
    mantissa: int
    least: int
    qmax: float

    @property
    def qmin(self) -> float:
        """The lowest level."""
        return -self.qmax

    @property
    def dtype(self) -> np.dtype:
        """The dtype that holds the levels. XLA has no float6, whose levels are all levels of float8_e4m3fn."""
        return np.dtype(jnp.dtype("float8_e4m3fn" if self.bits == 6 else self.name))

    @property
    def number(self) -> int:
        """How many levels there are, one zero among them."""
        octaves = math.frexp(self.qmax)[1] - 1 - self.least  # whole ones, each of 2 ** mantissa levels
        highest = self.qmax / 2.0 ** (octaves + self.least) - 1
        return 2 * (2**self.mantissa * (1 + octaves) + round(highest * 2**self.mantissa)) + 1

    @property
    def unit(self) -> float:
        """What all levels are integer multiples of."""
        return 2.0 ** (self.least - self.mantissa)

    @property
    def last_step(self) -> float:
        """From the highest level but one to the highest."""
        return 2.0 ** (math.frexp(self.qmax)[1] - 1 - self.mantissa)

    def nearest(self, v: Array, rounding: str, noise: Array | None) -> Array:
        """The level next to each value, as if there were no ends.

        By the bits of `v`, and not by a cast there and back, which XLA may drop. Both products are with powers of two,
        so that no contraction changes them.
        """
        most = jnp.finfo(v.dtype).maxexp - 1  # of infinities too
        exponent = jnp.clip(num.exponent(v), self.least, most) - self.mantissa
        rounded = _rounded(v * num.power_of_two(-exponent, v.dtype), rounding, noise)
        return rounded * num.power_of_two(exponent, v.dtype)

    def beyond(self, rounding: str) -> float | None:
        """How far beyond the last level on either side values begin to round outwards; None if that is not all."""
        is_odd = self.qmax / self.last_step % 2 == 1
        return self.last_step / 2 if rounding == "half_away" or (rounding == "half_even" and is_odd) else None

    def held(self, level: Array, qmin: Array, qmax: Array) -> Array:
        """Levels, clipped, in what holds them; NaN stays, and becomes qmin in float4, which has none."""
        level = lax.min(lax.max(level, qmin), qmax)
        return (num.select(level == level, level, qmin) if self.bits == 4 else level).astype(self.dtype)


def power_of_two_above(scale: Array) -> Array:
    """The least power of two that is not below a positive scale, of those from 2 ** -126 to 2 ** 127; NaN stays."""
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    above = lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return num.select(scale == scale, lax.min(above, np.float32(2.0**127)), jnp.nan)


def power_of_two_below(largest: Array, last: Any) -> Array:
    """2 ** (floor(log2(largest)) - floor(log2(last))): OCP's scale for values up to `largest` and a level `last`."""
    below = lax.max(highest_bit(largest) / highest_bit(last), np.float32(2.0**-126))
    return num.select(largest == largest, below, jnp.nan)


def highest_bit(v: Any) -> Array:
    """2 ** floor(log2(v)) of positive normal float32."""
    bits = lax.bitcast_convert_type(jnp.asarray(v, jnp.float32), jnp.int32) & 0x7F800000
    return lax.bitcast_convert_type(bits, jnp.float32)


def _rounded(v: Array, rounding: str, noise: Array | None) -> Array:
    return num.ROUND[rounding](v) if noise is None else num.round_stochastic(v, noise)


FLOATS = {
    levels.name: levels
    for levels in (
        Float("float8_e4m3fn", 8, 3, -6, 448.0),
        Float("float8_e5m2", 8, 2, -14, 57344.0),
        Float("float8_e3m4", 8, 4, -2, 15.5),
        Float("float8_e4m3b11fnuz", 8, 3, -10, 30.0),
        Float("float6_e2m3fn", 6, 3, 0, 7.5),
        Float("float6_e3m2fn", 6, 2, -2, 28.0),
        Float("float4_e2m1fn", 4, 1, 0, 6.0),
    )
}
SCALES = {  # what holds scales; None for float32 itself, and for powers of two
    "float32": None,
    "float16": Float("float16", 16, 10, -14, 65504.0),
    "bfloat16": Float("bfloat16", 16, 7, -126, float(jnp.finfo(jnp.bfloat16).max)),
    "float8_e8m0fnu": None,
    "float8_e4m3fn": FLOATS["float8_e4m3fn"],
}
