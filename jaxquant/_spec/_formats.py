# SPDX-License-Identifier: Apache-2.0
"""The levels of a grid: integers of some bits, or the finite values of a narrow float. Static; no arrays."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._base import _numerics as num


@dataclasses.dataclass(frozen=True)
class Integers:
    """The integers of some bits; `narrow` without the lowest."""

    bits: int
    signed: bool
    narrow: bool
    unit = last_step = 1.0  # as in Float
    has_signed_zero = False

    @property
    def qmin(self) -> int:
        return -int(self.signed) * 2 ** (self.bits - 1) + int(self.narrow)

    @property
    def qmax(self) -> int:
        return 2 ** (self.bits - self.signed) - 1

    @property
    def dtype(self) -> np.dtype:
        """The dtype that holds the levels."""
        return np.dtype(f"{'' if self.signed else 'u'}int{8 if self.bits <= 8 else 16}")

    @property
    def number(self) -> int:
        """The number of levels."""
        return self.qmax - self.qmin + 1

    def nearest(self, v: Array, rounding: str, noise: Array | None) -> Array:
        """The level next to each value, as if there were no ends."""
        return _rounded(v, rounding, noise)

    def beyond(self, rounding: str) -> float | None:
        """The distance beyond the last level at which values begin to round outwards; None if no distance says it."""
        return 0.5 if self.narrow and self.signed and rounding in ("half_even", "half_away") else None

    def in_dtype(self, level: Array, qmin: Array, qmax: Array) -> Array:
        """Levels, clipped, in what holds them; NaN, which compares with nothing, becomes qmin."""
        return lax.min(num.select(lax.ge(level, qmin), level, qmin), qmax).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Float:
    """The finite values of a narrow float: a sign, `mantissa` bits, exponents from `lowest`, values up to `qmax`.

    Each is an integer multiple of the smallest, 2 ** (lowest - mantissa). XLA has not all dtypes: `stored` is another
    one that has all levels.
    """

    name: str
    bits: int
    mantissa: int
    lowest: int
    qmax: float
    stored: str | None = None
    has_nan: bool = True
    has_signed_zero = True

    @property
    def qmin(self) -> float:
        return -self.qmax

    @property
    def dtype(self) -> np.dtype:
        """The dtype that holds the levels."""
        return np.dtype(jnp.dtype(self.stored or self.name))

    @property
    def number(self) -> int:
        """The number of levels, with one zero among them."""
        octaves = math.frexp(self.qmax)[1] - 1 - self.lowest  # whole ones, each of 2 ** mantissa levels
        highest = self.qmax / 2.0 ** (octaves + self.lowest) - 1
        return 2 * (2**self.mantissa * (1 + octaves) + round(highest * 2**self.mantissa)) + 1

    @property
    def unit(self) -> float:
        """The largest number of which all levels are integer multiples."""
        return 2.0 ** (self.lowest - self.mantissa)

    @property
    def last_step(self) -> float:
        """The step from the highest level but one to the highest."""
        return 2.0 ** (math.frexp(self.qmax)[1] - 1 - self.mantissa)

    def nearest(self, v: Array, rounding: str, noise: Array | None) -> Array:
        """The level next to each value, as if there were no ends.

        By the bits of `v`, and not by a cast there and back, which XLA may drop. Both products are with powers of two,
        so that no contraction changes them.
        """
        most = jnp.finfo(v.dtype).maxexp - 1  # of infinities too
        exponent = jnp.clip(num.floor_log2(v), self.lowest, most) - self.mantissa
        rounded = _rounded(v * num.power_of_two(-exponent, v.dtype), rounding, noise)
        return rounded * num.power_of_two(exponent, v.dtype)

    def beyond(self, rounding: str) -> float | None:
        """The distance beyond the last level at which values begin to round outwards; None if no distance says it."""
        is_odd = self.qmax / self.last_step % 2 == 1
        return self.last_step / 2 if rounding == "half_away" or (rounding == "half_even" and is_odd) else None

    def in_dtype(self, level: Array, qmin: Array, qmax: Array) -> Array:
        """Levels, clipped, in what holds them; NaN stays, and becomes qmin where there is none."""
        level = lax.min(lax.max(level, qmin), qmax)
        return (level if self.has_nan else num.select(level == level, level, qmin)).astype(self.dtype)


def _rounded(v: Array, rounding: str, noise: Array | None) -> Array:
    return num.ROUND[rounding](v) if noise is None else num.round_stochastic(v, noise)


FLOATS = {
    levels.name: levels
    for levels in (
        Float("float8_e4m3fn", 8, 3, -6, 448.0),
        Float("float8_e5m2", 8, 2, -14, 57344.0),
        Float("float8_e3m4", 8, 4, -2, 15.5),
        Float("float8_e4m3b11fnuz", 8, 3, -10, 30.0),
        Float("float6_e2m3fn", 6, 3, 0, 7.5, stored="float8_e4m3fn"),
        Float("float6_e3m2fn", 6, 2, -2, 28.0, stored="float8_e4m3fn"),
        Float("float4_e2m1fn", 4, 1, 0, 6.0, has_nan=False),
    )
}
