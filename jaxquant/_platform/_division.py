# SPDX-License-Identifier: Apache-2.0
"""Quotients of IEEE arithmetic, on platforms whose own division may be off in the last places too.

XLA:GPU divides float32 to within 2 units in the last place, and of TPUs nothing is said. Beside a tie one unit is a
whole level. What is here needs a quotient within 3 units, and sums and products that are rounded to nearest. XLA:CPU
divides exactly, and in float64 all do.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._base import _numerics as num
from .._base._sharding import is_explicit
from ._cpu import unknown
from ._primitive import elementwise


def divide(a: Array, b: Array | float) -> Array:
    """Correctly rounded `a / b` with `b` broadcast against `a`, of normal numbers.

    Off the CPU an operand or a quotient that is subnormal is whatever the device makes of it.
    """
    return _divide(a, np.asarray(b, a.dtype) if isinstance(b, float | int) else b.astype(a.dtype))


def _divide(a: Array, b: Any) -> Array:
    return _quotient(a, b) if a.dtype == jnp.float32 else undisturbed(a, b)


def divide_to_level(x: Array, step: Array, with_signed_zero: bool) -> Array:
    """`x / step`, for rounding to the nearest: exact where it lies next to a number of up to 12 bits, as ties are.

    Elsewhere off the CPU it may be a unit off, numbers beyond 2 ** 24 are only large, and -0 is 0 unless signs
    are asked for. `step` is a normal number.
    """
    if x.dtype != jnp.float32:
        return _of_unknown(x, step)
    return _to_level(x, step, with_signed_zero=with_signed_zero)


def undisturbed(a: Array, b: Array | float) -> Array:
    """`a / b` with `b` broadcast against `a`, by the division of the platform.

    XLA rewrites a division by a constant, or by a broadcast value, as a multiplication by the reciprocal, and
    `a / (b / c)` as `(a * c) / b`. A divisor selected element by element is none of these. The select hangs on `a`
    because a condition on `b` alone would be as constant, or as broadcast, as `b` is.
    """
    otherwise = jnp.nan if is_explicit(a) else a  # NaN too, without another constant; where all of one sharding is
    b = b if isinstance(b, float | int) else b.astype(a.dtype)
    return lax.div(a, num.select(lax.eq(a, a), b, otherwise))


# ---- From a quotient that is nearly right. By functions of lax, which are traced in half the time of operators.

_FRACTION, _LEADING, _SIGN = np.int32(0x7FFFFF), np.int32(0x800000), np.int32(-(2**31))


def _bits(v: Array) -> Array:
    return lax.bitcast_convert_type(v, jnp.int32)


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _digits(bits: Array) -> Array:
    """The 24 digits of a normal number as an integer."""
    return lax.bitwise_or(lax.bitwise_and(bits, _FRACTION), _LEADING)


def _exponent(bits: Array) -> Array:
    """Biased: 0 of zeros and subnormal numbers, 255 of what is not finite."""
    return lax.bitwise_and(lax.shift_right_logical(bits, np.int32(23)), np.int32(255))


def _counted(condition: Array) -> Array:
    return lax.convert_element_type(condition, jnp.int32)


@jax.custom_jvp
def _corrected(a: Array, b: Array) -> Array:
    """The quotient in integers: what is left of the dividend is so small that the lowest 32 bits are all of it."""
    b = jnp.broadcast_to(b, a.shape) if b.shape != a.shape else b
    of_a, of_b = _bits(a), _bits(b)
    digits, divisor = _digits(of_a), _digits(of_b)
    less = _counted(digits < divisor)
    digits = lax.shift_left(digits, less)  # the quotient is in [1, 2)
    q = lax.convert_element_type(_nearly(digits, divisor) * np.float32(2**23), jnp.int32)
    left = lax.shift_left(digits, np.int32(23)) - q * divisor
    units = lax.convert_element_type(num.round_half_even(_nearly(left, divisor)), jnp.int32)
    q, twice = q + units, np.int32(2) * (left - units * divisor)
    q = q + _counted(twice > divisor) - _counted(twice < -divisor)
    exponents = _exponent(of_a), _exponent(of_b), _exponent(of_a) - _exponent(of_b) - less + np.int32(127)
    # The leading digit of q, which is 2 ** 24 where it is rounded up to that, adds to the exponent.
    magnitude = q + lax.shift_left(exponents[2] - np.int32(1), np.int32(23))
    value = _float(lax.bitwise_or(magnitude, lax.bitwise_and(lax.bitwise_xor(of_a, of_b), _SIGN)))
    is_normal = functools.reduce(lax.bitwise_and, [(e > 0) & (e < 255) for e in exponents])
    return num.select(is_normal, value, a / b)


@_corrected.defjvp
def _corrected_jvp(operands, tangents):
    (a, b), (da, db) = operands, tangents
    quotient = _corrected(a, b)
    return quotient, da / b - db * (quotient / b)


_corrected_once = jax.jit(_corrected)  # in the trace of a program


def _nearly(a: Array, b: Array) -> Array:
    """The platform's own quotient of integers: within 3 units in the last place."""
    return lax.convert_element_type(a, jnp.float32) / lax.convert_element_type(b, jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def _next_to_short(with_signed_zero: bool, x: Array, step: Array) -> Array:
    """`short + (x - short * step) / step`, for a number of 12 bits next to the quotient.

    In halves of a step of 12 bits each product is exact, and so is each difference, so that contractions change
    nothing. The last quotient is a product with the reciprocal rounded up. Next to a tie its sum with `short` is the
    rounded quotient: nearer than that to the middle of two floats no quotient is, which tests/test_division.py shows
    for all of them. A contraction of this product would be wrong, and cannot be, behind a select.
    """
    unit = num.power_of_two(-lax.min(num.floor_log2(step), np.int32(125)), x.dtype)
    step = step * unit  # from 1 to 2: no product is subnormal
    inverse = _inverse_above(step)
    high = _float(lax.bitwise_and(_bits(step), np.int32(-(2**12))))
    x = x * unit
    q = x * inverse
    short = _float(lax.bitwise_and(_bits(q) + np.int32(2**11), np.int32(-(2**12))))
    rest = ((x - short * high) - short * (step - high)) * inverse
    is_plain = lax.abs(q) < np.float32(2**24)  # what is infinite or NaN remains so
    if with_signed_zero:
        is_plain = is_plain & (q != 0)
    return short + num.select(is_plain, rest, q)


def _inverse_above(v: Array) -> Array:
    """The least float that is not below 1 / v, for v in [1, 8)."""
    nearest = _corrected_once(lax.full_like(v, 1), v)
    # The highest bit of the lowest 32 of the product, which is a power of two and little more or less.
    is_below = _digits(_bits(nearest)) * _digits(_bits(v)) < 0
    return num.select(v == v, _float(_bits(nearest) + _counted(is_below)), jnp.nan)


def _of_unknown(x: Array, step: Array, with_signed_zero: bool = True) -> Array:
    return undisturbed(unknown(x)[0], step)


_quotient = elementwise("exact_quotient", undisturbed, _corrected_once)
_to_level = elementwise(
    "quotient_to_level",
    _of_unknown,
    lambda x, step, with_signed_zero: _next_to_short(with_signed_zero, x, step),
    ("with_signed_zero",),
)
