# SPDX-License-Identifier: Apache-2.0
"""Formats of scales: the scale of a range, its rounding, and the specs that a format takes."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._base import _numerics as num
from .._platform._cpu import computed_once
from .._platform._division import divide
from ._formats import FLOATS, Float
from ._granularity import PerTensor

TINY = np.float32(jnp.finfo(jnp.float32).tiny)
_SCALES = {  # of the rules for signed symmetric integers
    "half_step": "float32 scales",
    "extremum": "scales in float32, float16 or bfloat16",
}


@dataclasses.dataclass(frozen=True)
class ScaleFormat:
    """A format of scales. The base class is float32, which holds each scale as it is."""

    is_exact = True
    is_coarse = False  # of so few bits that zero points do not fit, and the search tries the scales beside one
    has_tensor_scale = False
    unit, most = 1.0, 1.0  # of what values are multiplied with where a scale of the tensor scales the others

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules of QuantSpec that mean something."""
        return "ceil", "half_step", "extremum"

    def check(self, spec: Any) -> None:
        """Raises for a spec whose scales it cannot hold."""
        if spec.scale_rule == "floor" and "floor" not in self.rules:
            raise ValueError(
                f"`scale_rule` says which power of two a scale becomes, got 'floor' with scale_dtype="
                f"{spec.scale_dtype!r}. Pass scale_dtype='float8_e8m0fnu', or leave the rule out."
            )
        is_of_integers = spec.scale_rule in self.rules and not spec.format and spec.symmetric and spec.signed
        if spec.scale_rule in _SCALES and not is_of_integers:
            raise ValueError(
                f"`scale_rule={spec.scale_rule!r}` is for signed symmetric integers with {_SCALES[spec.scale_rule]}, "
                f"got signed={spec.signed}, symmetric={spec.symmetric}, format={spec.format!r} and "
                f"scale_dtype={spec.scale_dtype!r}. Leave the rule out."
            )
        if self.is_coarse and not spec.symmetric:
            raise ValueError(
                f"`symmetric` must be True with scale_dtype={spec.scale_dtype!r}, got False. Leave it out, or hold "
                "the scale in float32, float16 or bfloat16."
            )
        if self.has_tensor_scale and spec.granularity == PerTensor():
            raise ValueError(
                f"`granularity` must be PerBlock(axis, size) with scale_dtype={spec.scale_dtype!r}, got PerTensor(): "
                "one scale of the tensor scales the scales of blocks. nvfp4_spec(axis) has blocks of 16."
            )

    def of_largest(self, largest: Array, qmax: Array | float, rule: str) -> Array:
        """The scale of values up to a finite magnitude, not yet rounded."""
        return quotient(largest, qmax + np.float32(0.5) if rule == "half_step" else qmax, 1)

    def rounded(self, scale: Array, qmax: Array | float, rule: str) -> tuple[Array, Array | None]:
        """Positive scales as the format holds them, and the scale of the tensor that scales them."""
        return scale, None

    def rounded_minimum(self, minimum: Array) -> Array:
        """Minimums as the format of the scale holds them."""
        return minimum

    def neighbours(self, scale: Array) -> list[Array]:
        """The scales beside those that it holds, which a search tries."""
        raise NotImplementedError  # all others, of an exact format


class PowersOfTwo(ScaleFormat):
    """Powers of two, from 2 ** -126 to 2 ** 127."""

    is_exact, is_coarse = False, True

    @property
    def rules(self) -> tuple[str, ...]:
        return "ceil", "floor"

    def of_largest(self, largest: Array, qmax: Array | float, rule: str) -> Array:
        if rule != "floor":
            return super().of_largest(largest, qmax, rule)
        return num.select(largest > 0, _power_below(largest, qmax), 1)

    def rounded(self, scale: Array, qmax: Array | float, rule: str) -> tuple[Array, Array | None]:
        # The largest value that a scale can represent is `scale * qmax`.
        below = lambda scale: _power_below(scale * (qmax / _highest_bit(qmax)), 1.0)
        return computed_once(below if rule == "floor" else _power_above, scale), None

    def neighbours(self, scale: Array) -> list[Array]:
        return [lax.max(scale * 0.5, TINY)]


@dataclasses.dataclass(frozen=True)
class Rounded(ScaleFormat):
    """The values of a float of fewer bits, to nearest: positive ones, but by the rule "extremum"."""

    float: Float
    is_exact = False

    @property
    def rules(self) -> tuple[str, ...]:
        return ("ceil",) if self.is_coarse else ("ceil", "extremum")

    @property
    def is_coarse(self) -> bool:
        return self.float.bits <= 8

    def rounded(self, scale: Array, qmax: Any, rule: str) -> tuple[Array, Array | None]:
        of_sign = lambda v: num.select(v < 0, -self._nearest(-v), self._nearest(v))
        return computed_once(of_sign if rule == "extremum" else self._nearest, scale), None

    def rounded_minimum(self, minimum: Array) -> Array:
        return num.clip(self.float.nearest(minimum, "half_even", None), -self.float.qmax, self.float.qmax)

    def _nearest(self, scale: Array) -> Array:
        return num.clip(self.float.nearest(scale, "half_even", None), self.float.unit, self.float.qmax)

    def neighbours(self, scale: Array) -> list[Array]:
        # Somewhat more than half a step; below the lowest exponent all are a unit apart.
        step = num.guard(scale * (1.008 * 2.0 ** -(self.float.mantissa + 1)))
        step = lax.max(step, np.float32(self.float.unit))
        return [self._nearest(v) for v in (scale - step, scale + step)]


class RoundedOfTensor(Rounded):
    """Those of blocks, beside one float32 of the tensor: the largest of them is the largest of the float."""

    has_tensor_scale = True

    @property
    def unit(self) -> float:
        return self.float.unit

    @property
    def most(self) -> float:
        return self.float.qmax

    def of_largest(self, largest: Array, qmax: Any, rule: str) -> Array:
        return quotient(largest, qmax, TINY)  # blocks of zeros must not be the largest

    def of_tensor(self, largest: Array) -> Array:
        """The scale of a tensor whose largest block has this scale. No step is below TINY."""
        return lax.max(divide(largest, self.float.qmax), np.float32(TINY / self.float.unit))

    def beside(self, scale: Array, of_tensor: Array) -> Array:
        return computed_once(lambda scale: self._nearest(divide(scale, of_tensor)), scale)

    def rounded(self, scale: Array, qmax: Any, rule: str) -> tuple[Array, Array | None]:
        of_tensor = self.of_tensor(jnp.max(num.select(scale == scale, scale, 0), initial=0.0))
        return self.beside(scale, of_tensor), of_tensor

    def neighbours(self, scale: Array) -> list[Array]:
        # But of the largest, of which the scale of the tensor is derived.
        return [num.select(scale == self.float.qmax, scale, v) for v in super().neighbours(scale)]


def quotient(width: Array, steps: Any, of_zero: Any) -> Array:
    """The scale with which so many steps cover a width; of a width of 0 another one."""
    positive = lax.gt(width, np.float32(0))
    # The divisor is selected element by element, as in `divide`. Not 0, which has no gradient.
    scale = divide(width, num.select(positive, steps, np.float32(1)))
    return num.select(positive, lax.max(scale, TINY), of_zero)


def _power_above(scale: Array) -> Array:
    """The least power of two that is not below a positive scale, of those from 2 ** -126 to 2 ** 127; NaN stays."""
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    above = lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return num.select(scale == scale, lax.min(above, np.float32(2.0**127)), jnp.nan)


def _power_below(largest: Array, last: Any) -> Array:
    """2 ** (floor(log2(largest)) - floor(log2(last))): OCP's scale for values up to `largest` and a level `last`."""
    below = lax.max(divide(_highest_bit(largest), _highest_bit(last)), np.float32(2.0**-126))
    return num.select(largest == largest, below, jnp.nan)


def _highest_bit(v: Any) -> Array:
    """2 ** floor(log2(v)) of positive normal float32."""
    bits = lax.bitcast_convert_type(jnp.asarray(v, jnp.float32), jnp.int32) & 0x7F800000
    return lax.bitcast_convert_type(bits, jnp.float32)


SCALE_FORMATS = {  # by the dtype that holds the scales
    "float32": ScaleFormat(),
    "float16": Rounded(Float("float16", 16, 10, -14, 65504.0)),
    # Below 2 ** -119 in steps of TINY: smaller steps are no normal numbers of float32, which nearest() needs.
    "bfloat16": Rounded(Float("bfloat16", 16, 7, -119, float(jnp.finfo(jnp.bfloat16).max))),
    "float8_e8m0fnu": PowersOfTwo(),
    "float8_e4m3fn": RoundedOfTensor(FLOATS["float8_e4m3fn"]),
}
