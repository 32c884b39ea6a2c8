# SPDX-License-Identifier: Apache-2.0
"""What XLA:CPU wants of element-wise arithmetic and of ranges, where other platforms take the plain program.

Each function is the plain program elsewhere, by `lax.platform_dependent`: so is a program that is exported for several
platforms, or compiled for one that is not there. All of them give the same bits on every platform.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .. import _numerics as num
from .._sharding import is_split
from ._primitive import elementwise


def unknown(*values: Array) -> tuple[Array, ...]:
    """The values, of which the compiler does not know that they are constants.

    Of a constant `x` XLA:CPU folds the select on which the divisor of `undisturbed` hangs, and multiplies by the
    reciprocal. On TPUs and GPUs it leaves the division; there a barrier would keep the quantizer out of the epilogue of
    the product before it.
    """
    return tuple(map(_unknown, values))


_unknown = elementwise("unknown", lax.optimization_barrier, lambda v: v)


def written(v: Array) -> Array:
    """`v` as an array in memory of its own, to be the operand of a product of floats: the identity.

    Of a constant XLA:CPU chooses another layout, and of a transpose that it sees another kernel; each sums in another
    order. What is trained, served and closed over has one form so.
    """
    return lax.platform_dependent(v, cpu=lambda v: _barrier(v)[0], default=lambda v: v)


# For a transpose that a program returns: XLA:CPU copies 4 bits wrongly between two layouts in jaxlib 0.7.2 and 0.8.0.
_WIDE = {"int4": "int8", "uint4": "uint8", "float4_e2m1fn": "float8_e4m3fn"} if jax.__version_info__ < (0, 8, 3) else {}


def transposed(v: Array, axes: Sequence[int]) -> Array:
    """`v` with its axes in another order; 4 bits are moved in 8 where XLA:CPU moves them wrongly."""
    wide = _WIDE.get(str(v.dtype))
    if wide is None:
        return lax.transpose(v, axes)
    return lax.optimization_barrier(lax.transpose(v.astype(wide), axes)).astype(v.dtype)


def _barrier(*values: Any) -> Any:
    return lax.optimization_barrier(values)


Reduction = Callable[[Array, tuple[int, ...]], Array]  # of a value and axes


class Masks(NamedTuple):
    """The reductions of a platform where values may not be finite.

    Attributes:
      nan: as `nan_where`.
      maximum: of the finite values, -inf where there is none; without the axes.
    """

    nan: Reduction
    maximum: Reduction


def if_finite(x: Array, then: Callable[[Masks | None], Any]) -> Any:
    """`then(None)` where all of `x` is known to be finite, `then(masks)` where not.

    XLA:CPU reduces what it reads, or its absolute value, at the speed of memory, and what else it computes first
    several times slower, through a copy of the array. So `then` is there on both sides of a condition, whether all is
    finite and its sum does not overflow; and its result stands alone, as in `computed_once`. On TPUs and GPUs masks
    cost nothing, and a condition keeps what is beside it apart, or waits for the host.

    By the sum, because a maximum need not tell: over devices, and on XLA:CPU since jax 0.10 in large arrays, it forgets
    a NaN and what it saw before it.

    What is split over explicit axes takes the plain program: vmap makes a select of a condition, which JAX splits
    otherwise than what it selects, and raises.
    """
    plain, masks = lambda _: then(Masks(_nan_by_maximum, _maximum)), Masks(_any_nan, _maximum_by_bits)
    if is_split(x):
        return plain(x)
    by_condition = lambda x: lax.cond(jnp.abs(jnp.sum(x)) < jnp.inf, lambda: then(None), lambda: then(masks))
    x = num.upcast(x, num.compute_dtype(x.dtype))
    return lax.platform_dependent(x, cpu=by_condition, default=plain)


def nan_where(x: Array, axes: tuple[int, ...]) -> Array:
    """NaN where the values along axes, of size 1 here, hold a NaN or an infinity, 0 elsewhere; float32.

    An infinity has no level either: as the largest one it would hide an overflow from whoever looks at the result.
    `any` is a pass of its own on a TPU, where a maximum of floats is part of the product before it, and over devices
    travels with the maximum that a range is. That takes XLA:CPU up to seven times as long to run.
    """
    return lax.platform_dependent(x, cpu=lambda x: _any_nan(x, axes), default=lambda x: _nan_by_maximum(x, axes))


def _any_nan(x: Array, axes: tuple[int, ...]) -> Array:
    found = lax.expand_dims(lax.reduce_and(lax.is_finite(x), axes), axes)
    return num.select(found, np.float32(0), np.float32(np.nan))


def _nan_by_maximum(x: Array, axes: tuple[int, ...]) -> Array:
    found = lax.reduce_max(num.select(lax.is_finite(x), np.float32(0), np.float32(1)), axes)
    return lax.expand_dims(num.select(found > 0, np.float32(np.nan), np.float32(0)), axes)


def _maximum(x: Array, axes: tuple[int, ...]) -> Array:
    return lax.reduce_max(num.select(jnp.abs(x) < jnp.inf, x, -jnp.inf), axes)


def _maximum_by_bits(x: Array, axes: tuple[int, ...]) -> Array:
    """The same of integers in the order of the floats, which XLA:CPU reduces without a copy of the array.

    The copy is allocated in each call, also where all is finite, and so large that no memory of it is used again.
    """
    dtype = np.dtype(f"int{jnp.finfo(x.dtype).bits}")
    size = np.asarray(np.iinfo(dtype).max, dtype)
    turned = lambda bits: bits ^ (lax.shift_right_arithmetic(bits, np.asarray(dtype.itemsize * 8 - 1, dtype)) & size)
    least = np.asarray(~np.asarray(-np.inf, x.dtype).view(dtype) | ~size, dtype)  # -inf, turned
    ordered = num.select(jnp.abs(x) < jnp.inf, turned(lax.bitcast_convert_type(x, dtype)), least)
    return lax.bitcast_convert_type(turned(lax.max(lax.reduce_max(ordered, axes), least)), x.dtype)


def computed_once(f: Callable, x: Array, *others: Array) -> Any:
    """`f(x, *others)` of one number each a channel, computed once for each channel.

    XLA:CPU fuses the arithmetic of a channel into the element-wise pass that uses it, and so does it again for every
    element: divisions and all, twice the time of the pass. The result of a conditional stands alone. The branches
    are the same; the condition is a sum, of which XLA:CPU makes fewer kernels than of `any`. A scalar needs none, and
    what is split over explicit axes has none, as in `if_finite`.
    """
    if not jnp.ndim(x) or is_split(x):
        return f(x, *others)
    branched = lambda x, *others: lax.cond(jnp.sum(x) < 0, f, f, x, *others)
    return lax.platform_dependent(x, *others, cpu=branched, default=f)


def read_once(v: Array) -> Array:
    """`v`, to be read several times: the identity.

    XLA:CPU writes a quotient that is read twice into memory, as dear to compute, and reads it again, instead of one
    pass. Its bits are read once here, and what is made of them is cheap. LLVM drops both halves.
    """
    return lax.platform_dependent(v, cpu=_in_halves, default=lambda v: v)


def _in_halves(v: Array) -> Array:
    dtype = f"int{jnp.finfo(v.dtype).bits}"
    bits, sign = lax.bitcast_convert_type(v, dtype), np.asarray(np.iinfo(dtype).min, dtype)
    return lax.bitcast_convert_type((bits & ~sign) | (bits & sign), v.dtype)


def loaded(g: Array) -> Array:
    """`g`, to be masked by a select: the identity.

    Of a select of a plain load XLA:CPU makes a masked load, which takes twice the time. The guard costs nothing
    elsewhere, so that it stands on every platform.
    """
    return num.guard(g)
