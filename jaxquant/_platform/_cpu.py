# SPDX-License-Identifier: Apache-2.0
"""Variants of element-wise arithmetic and of ranges for XLA:CPU; other platforms take the plain program.

Each function is the plain program elsewhere, by `lax.platform_dependent` or as a primitive: so is a program that is
exported for several platforms, or compiled for one that is not there. All give the same bits on every platform.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from .._base import _numerics as num
from .._base._checks import PyTree
from .._base._groups import reduce_groups
from .._base._sharding import is_explicit, shard_like, vary_together
from ._primitive import apart, elementwise, several


def unknown(*values: Array) -> tuple[Array, ...]:
    """The values, of which the compiler does not know that they are constants.

    Of a constant `x` XLA:CPU folds the select on which the divisor of `undisturbed` hangs, and multiplies by the
    reciprocal. On TPUs and GPUs it leaves the division; there a barrier would keep the quantizer out of the epilogue of
    the product before it.
    """
    return tuple(map(_unknown, values))


_unknown = elementwise("unknown", lax.optimization_barrier, lambda v: v)


# For a transpose that a program returns: XLA:CPU copies 4 bits wrongly between two layouts in jaxlib 0.7.2 and 0.8.0.
_WIDE = {"int4": "int8", "uint4": "uint8", "float4_e2m1fn": "float8_e4m3fn"} if jax.__version_info__ < (0, 8, 3) else {}


def transposed(v: Array, axes: Sequence[int]) -> Array:
    """`v` with its axes in another order; 4 bits are moved in 8 where XLA:CPU moves them wrongly."""
    wide = _WIDE.get(str(v.dtype))
    if wide is None:
        return lax.transpose(v, axes)
    return lax.optimization_barrier(lax.transpose(v.astype(wide), axes)).astype(v.dtype)


@functools.partial(jax.jit, static_argnames=("axis", "distance", "dtype"), inline=True)
def apart_of_pairs(v: Array, axis: int, distance: int, dtype: DTypeLike) -> Array:
    """The values of 4 bits that lie two in a byte: of two at this distance along an axis the first in the lower half.

    By a select of a broadcast, of which XLA:CPU vectorizes what lies side by side; of a stack it does not.
    """
    sizes = lambda n: (*v.shape[:axis], v.shape[axis] // distance, n, distance, *v.shape[axis + 1 :])
    wide = jnp.broadcast_to(lax.reshape(v, sizes(1)), sizes(2))
    is_second = shard_like(lax.broadcasted_iota(jnp.uint8, wide.shape, axis + 1) == 1, wide)
    values = lax.bitcast_convert_type(lax.select(is_second, wide, wide << 4), jnp.dtype(dtype)) >> 4
    return lax.reshape(values, (*v.shape[:axis], 2 * v.shape[axis], *v.shape[axis + 1 :]))


def extremes(
    x: Array, groups: tuple[int, ...], of_magnitude: bool, nothing: float = 0, contracted: Sequence[int] | None = None
) -> tuple[Array | None, Array, Array | None]:
    """The lowest and the highest of the finite values of each group, in the shape `groups`; and NaN flags.

    For magnitudes the lowest is None, and for no contracted axes so are the flags, which are as `nan_where` gives them.
    The reduction starts from the range (nothing, -nothing): 0 makes every range contain 0, and infinity is the empty
    range, which remains where no value is finite.

    XLA:CPU reduces a plain array at the speed of memory, and what else it computes first through a copy, several times
    slower. A reduction of several values at once takes what is computed into its loop: one pass for all.

    What is on a mesh with explicit axes takes the plain program: JAX does not know what becomes of their shardings.
    """
    x = num.upcast(x, num.compute_dtype(x.dtype))
    contracted = None if contracted is None else tuple(contracted)
    of = _in_passes if is_explicit(x) else _extremes
    found = list(of(x, groups=groups, of_magnitude=of_magnitude, nothing=nothing, contracted=contracted))
    low = None if of_magnitude else found.pop(0)
    return low, found[0], None if contracted is None else found[1]


def _in_passes(
    x: Array, groups: tuple[int, ...], of_magnitude: bool, nothing: float, contracted: tuple[int, ...] | None
) -> list[Array]:
    # The lowest by a maximum, too: over devices it travels with the other end.
    largest = lambda x, axes: lax.reduce_max(num.select(lax.abs(x) < np.inf, x, -np.inf), axes)
    highest = lambda x: lax.max(reduce_groups(largest, x, groups), np.asarray(-nothing, x.dtype))
    ends = [highest(lax.abs(x))] if of_magnitude else [-highest(-x), highest(x)]
    return ends if contracted is None else [*ends, _nan_by_maximum(x, contracted)]


def _in_one_pass(
    x: Array, groups: tuple[int, ...], of_magnitude: bool, nothing: float, contracted: tuple[int, ...] | None
) -> list[Array]:
    # By the largest number instead of infinity, of which the masks take ten times as long.
    end = np.asarray(min(nothing, float(jnp.finfo(x.dtype).max)), x.dtype)
    is_finite = lax.lt(lax.abs(x), np.asarray(np.inf, x.dtype))
    highest = num.select(is_finite, x, -end)
    lowest = num.select(is_finite, x, end) if end else highest
    if of_magnitude and contracted is not None:
        parts = [_Part(lax.abs(highest), end, lax.max)]
    else:  # of a single value, too: XLA:CPU copies what it computes for a plain reduction
        parts = [_Part(lowest, end, lax.min), _Part(highest, -end, lax.max)]
    # The axes of x, of which those in blocks are split in two: (block, element).
    sizes, of_ends, of_flags = [], [], []
    for i, (g, n) in enumerate(zip((1,) * (x.ndim - len(groups)) + tuple(groups), x.shape, strict=True)):
        axes = [len(sizes) + j for j in range(1 if g in (1, n) else 2)]
        sizes += [n] if len(axes) == 1 else [g, n // g]
        of_ends += axes[-1:] if g != n or n == 1 else []
        of_flags += axes if contracted is not None and i in contracted else []
    if not of_ends:  # then nothing below joins the values with what they start from
        parts = [part._replace(values=part.join(part.values, part.start)) for part in parts]
    first = [axis for axis in of_ends if axis in of_flags]
    if contracted is not None:
        parts.append(_Part(lax.bitwise_not(is_finite), np.False_, lax.bitwise_or))
    else:  # rows before what is left of them, which is the quicker way
        first = of_ends[-1:] if of_ends[-1:] == [len(sizes) - 1] else of_ends
    parts = _reduced([part._replace(values=lax.reshape(part.values, sizes)) for part in parts], first)
    rest = lambda axes: [axis for axis in axes if axis not in first]
    ends = _reduced(parts if contracted is None else parts[:-1], rest(of_ends))
    *low, high = (lax.reshape(part.values, groups) for part in ends)
    if of_magnitude:
        found = [lax.max(-low[0], high) if low else high]
    else:
        found = [low[0], high]
        if end:
            is_empty = low[0] > high
            found = [num.select(is_empty, nothing, low[0]), num.select(is_empty, -nothing, high)]
    if contracted is None:
        return found
    (is_nan,) = _reduced(parts[-1:], rest(of_flags))
    is_nan = lax.reshape(is_nan.values, [1 if i in contracted else n for i, n in enumerate(x.shape)])
    return [*found, num.select(is_nan, np.float32(np.nan), np.float32(0))]


def _shapes_of_extremes(x, groups, of_magnitude, nothing, contracted):
    flags = [] if contracted is None else [([1 if i in contracted else n for i, n in enumerate(x.shape)], np.float32)]
    return [(groups, x.dtype)] * (2 - of_magnitude) + flags


_OF_EXTREMES = "groups", "of_magnitude", "nothing", "contracted"
_extremes = several("extremes", _shapes_of_extremes, _in_passes, _OF_EXTREMES, cpu=_in_one_pass)


class _Part(NamedTuple):
    """One array of a reduction of several, all of one shape, with its initial value and how two values are joined."""

    values: Array
    start: Any
    join: Callable[[Array, Array], Array]


_LARGE, _PIECE = 2**15, 16  # values that are in no cache, and rows


def _reduced(parts: Sequence[_Part], axes: Sequence[int]) -> list[_Part]:
    """All parts reduced in one pass, with size 1 along the axes.

    Leading axes of large arrays in pieces, of which LLVM unrolls the rows: along a whole column it would go through
    memory in strides.
    """
    if not axes:
        return list(parts)
    shape, values = parts[0].values.shape, [part.values for part in parts]
    reduced, ends = axes, (axes[0], axes[-1] + 1)
    before, rows, columns = (shape[i:j] for i, j in ((0, ends[0]), ends, (ends[1], None)))
    is_known = all(isinstance(n, int) for n in shape)  # else the sizes are those of an exported program
    if len(axes) == len(rows) and is_known and math.prod(columns) > 1 and math.prod(shape) > _LARGE:
        values = [lax.reshape(v, (*before, math.prod(rows), *columns)) for v in values]
        while (n := values[0].shape[ends[0]]) > _PIECE:
            values = _of_pieces(parts, values, ends[0], n)
        axes = ends[:1]
    new = [1 if i in reduced else n for i, n in enumerate(shape)]
    return [
        part._replace(values=lax.reshape(v, new)) for part, v in zip(parts, _at_once(parts, values, axes), strict=True)
    ]


def _of_pieces(parts: Sequence[_Part], values: Sequence[Array], axis: int, n: int) -> list[Array]:
    """The results of pieces along an axis, one after the other."""
    whole, shape = n - n % _PIECE, values[0].shape
    sizes = (*shape[:axis], whole // _PIECE, _PIECE, *shape[axis + 1 :])
    pieces = [lax.reshape(lax.slice_in_dim(v, 0, whole, axis=axis), sizes) for v in values]
    found = _at_once(parts, pieces, [axis + 1])
    if whole == n:
        return found
    rest = [lax.expand_dims(lax.slice_in_dim(v, whole, n, axis=axis), [axis]) for v in values]
    return [lax.concatenate(both, axis) for both in zip(found, _at_once(parts, rest, [axis + 1]), strict=True)]


def _at_once(parts: Sequence[_Part], values: Sequence[Array], axes: Sequence[int]) -> list[Array]:
    joins = [part.join for part in parts]  # what JAX keeps of the reduction must hold no value
    join = lambda a, b: tuple(f(v, w) for f, v, w in zip(joins, a, b, strict=True))
    values = vary_together(*values, *(jnp.asarray(part.start) for part in parts))
    return list(lax.reduce(tuple(values[: len(parts)]), tuple(values[len(parts) :]), join, tuple(axes)))


def nan_where(x: Array, axes: Sequence[int]) -> Array:
    """NaN where the values along axes, of size 1 here, hold a NaN or an infinity, 0 elsewhere; float32.

    An infinity has no level either: as the largest one it would hide an overflow from whoever looks at the result.
    `any` is a pass of its own on a TPU, where a maximum of floats is part of the product before it, and over devices
    travels with the maximum that a range is. That takes XLA:CPU up to seven times as long to run.
    """
    axes = tuple(axes)
    return lax.platform_dependent(x, cpu=lambda x: _any_nan(x, axes), default=lambda x: _nan_by_maximum(x, axes))


def _any_nan(x: Array, axes: tuple[int, ...]) -> Array:
    found = lax.expand_dims(lax.reduce_and(lax.is_finite(x), axes), axes)
    return num.select(found, np.float32(0), np.float32(np.nan))


def _nan_by_maximum(x: Array, axes: tuple[int, ...]) -> Array:
    found = lax.reduce_max(num.select(lax.is_finite(x), np.float32(0), np.float32(1)), axes)
    return lax.expand_dims(num.select(found > 0, np.float32(np.nan), np.float32(0)), axes)


def computed_apart(f: Callable, x: Array, *others: Any) -> PyTree:
    """`f(x, *others)`, whose results are arrays in memory of their own, computed once.

    XLA:CPU fuses cheap arithmetic into every pass that reads its result, and computes it again for each element: the
    arithmetic of a channel with its divisions, or the values that integers were rounded from. A call that is not
    inlined is a wall between fusions. What lies on a mesh with explicit axes takes the plain program.
    """
    if is_explicit(x):
        return f(x, *others)
    leaves, structure = jax.tree.flatten(others)
    return apart(lambda x, *leaves: f(x, *jax.tree.unflatten(structure, leaves)), x, *leaves)


def computed_once(f: Callable, x: Array, *others: Any) -> PyTree:
    """`computed_apart` of one number each a channel; a scalar needs none."""
    return computed_apart(f, x, *others) if jnp.ndim(x) else f(x, *others)


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

    XLA:CPU lowers a select of a plain load to a masked load, which is twice as slow; the guard prevents it and is free
    elsewhere.
    """
    return num.guard(g)
