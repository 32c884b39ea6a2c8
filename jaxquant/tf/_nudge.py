# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of ranges that TensorFlow's ops share: nudging, the largest scale, one range for each channel."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._base import _numerics as num
from .._base._sharding import shard_like
from .._platform._cpu import computed_once, loaded
from .._platform._division import divide


def masked_product(g: Array, mask: Array) -> Array:
    """`g * mask` for a boolean mask, with a product's signs: a masked -1 gives -0 and a masked NaN stays NaN.

    Of the product itself XLA makes `select(mask, g, 0)`.
    """
    g = loaded(shard_like(g, mask))
    return jnp.where(mask, g, g * 0)


class Nudged(NamedTuple):
    """A range moved so that real 0 falls on a level; five arrays of one shape.

    `inverse` is not the rounded `1 / scale` but a quotient of its own. `zero` is `-x_min * inverse`, rounded, which is
    never negative: -1 says that the range is not set, `x_min == x_max == 0`.
    """

    scale: Array
    inverse: Array
    x_min: Array
    x_max: Array
    zero: Array


def divide_number(a: float, b: Array) -> Array:
    """`a / b` of a number, as `divide`."""
    return divide(jnp.full_like(b, a), b)


def nudge(x_min: Array, x_max: Array, qmin: float, qmax: float) -> Nudged:
    """Moves the real range of one tensor, two scalars, onto the levels `qmin .. qmax`, static integers.

    Ranges that do not contain 0 are shifted, not extended: `[1, 2]` becomes `[0, 1]`. Nothing is checked: what an
    empty, reversed or non-finite range gives is what the same operations give in TensorFlow's kernels.
    """
    # Constants would be folded before the rewrites that the selects stop, and the selects with them.
    x_min, x_max = lax.optimization_barrier((x_min, x_max))
    steps = qmax - qmin
    width = x_max - x_min
    scale = divide(width, steps)
    inverse = divide_number(steps, width)
    zero_point = qmin - divide(x_min, scale)
    ends = (jnp.asarray(end, scale.dtype) for end in (qmin, qmax))
    zero_point = num.clip(num.round_half_away(zero_point), *ends)
    zero_point = jnp.where(zero_point == zero_point, zero_point, 0)
    # Guarded although x86 contracts no product that is used twice: other processors do.
    low = num.guard((qmin - zero_point) * scale)
    high = num.guard((qmax - zero_point) * scale)
    zero = jnp.where((x_min == 0) & (x_max == 0), -1, num.round_half_up(num.guard(-low * inverse)))
    return Nudged(scale, inverse, low, high, zero)


def largest_scale(x_min: Array, x_max: Array, qmin: float, qmax: float) -> tuple[Array, Array]:
    """The largest scale, levels per real value, that maps a range into `qmin .. qmax`; and whether `x_min` limits it.

    An end of the range on the other side of 0 than its level limits nothing. If neither does, the scale is the largest
    finite number.
    """
    unbounded = jnp.finfo(x_min.dtype).max
    of_min = jnp.where(qmin * x_min > 0, divide_number(qmin, x_min), unbounded)
    of_max = jnp.where(qmax * x_max > 0, divide_number(qmax, x_max), unbounded)
    by_min = of_min < of_max
    return num.guard(jnp.where(by_min, of_min, of_max)), by_min


def along_axis(v: Array, axis: int | None, ndim: int) -> Array:
    """Reshapes a vector so that it broadcasts along `axis` of a rank-`ndim` array; a scalar stays one."""
    return lax.expand_dims(v, [i for i in range(ndim) if i != axis]) if v.ndim else v


def per_channel(f: Callable, axis: int | None) -> Callable:
    """Lifts the arithmetic of one tensor's range, `f(x_min, x_max)`, to one range a channel; None: one range."""
    return f if axis is None else functools.partial(computed_once, jax.vmap(f))
