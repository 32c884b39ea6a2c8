# SPDX-License-Identifier: Apache-2.0
"""Groups of elements of a tensor that share a value, such as a scale; and these values after a move of the tensor.

The array of values has the rank of the tensor, unless it is said otherwise. Its size along an axis is 1 if all elements
there share one value, the length of the axis if each has its own, or the number of blocks. `v` is such an array.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def broadcast_groups(v: Array, shape: tuple[int, ...]) -> Array:
    """Values for groups, reshaped to broadcast against the `shape` of the tensor.

    The sizes of `v` are counted from the end, so that its rank may be smaller. Only blocks are repeated.
    """
    if v.ndim == 0:
        return v
    v = of_rank(v, len(shape))
    for axis, (g, n) in enumerate(zip(v.shape, shape, strict=True)):
        v = v if g in (0, 1) else apart(v, axis, n)
    return v


def of_rank(v: Array, ndim: int) -> Array:
    """Values for groups in an array of a higher rank, with leading axes of size 1."""
    return lax.reshape(v, (1,) * (ndim - v.ndim) + v.shape) if v.ndim < ndim else v


def reduce_groups(reduce: Callable, x: Array, groups: tuple[int, ...]) -> Array:
    """Reduces each group of a tensor by `reduce(x, axes)`, to an array of shape `groups`."""
    padded, axes = (1,) * (x.ndim - len(groups)) + tuple(groups), []
    for axis in reversed(range(x.ndim)):
        g, n = padded[axis], x.shape[axis]
        if g == 1:
            axes.append(axis)
        elif g != n:  # blocks; one axis at a time, as explicit meshes want it
            x = lax.reshape(x, (*x.shape[:axis], g, n // g, *x.shape[axis + 1 :]))
            axes = [axis + 1, *(i + 1 for i in axes)]
    return lax.reshape(reduce(x, tuple(sorted(axes))), groups)


def apart(v: Array, axis: int, n: int) -> Array:
    """Repeats values for groups along an axis, to one for each of its `n` elements."""
    if v.shape[axis] == n:
        return v
    parts = [p for i, g in enumerate(v.shape) for p in ((g, n // max(g, 1)) if i == axis else (g,))]
    v = lax.broadcast_in_dim(v, parts, [i for i in range(len(parts)) if i != axis + 1])
    return lax.reshape(v, [*parts[:axis], n, *parts[axis + 2 :]])


def segments(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The shortest runs of axes of equal size in a reshape: (axes of the old shape, axes of the new one)."""
    i = j = 0
    while i < len(old) or j < len(new):
        ends = min(i + 1, len(old)), min(j + 1, len(new))
        while (sizes := (math.prod(old[i : ends[0]]), math.prod(new[j : ends[1]])))[0] != sizes[1]:
            ends = (ends[0] + 1, ends[1]) if sizes[0] < sizes[1] else (ends[0], ends[1] + 1)
            if ends[0] > len(old) or ends[1] > len(new):  # of an empty array
                ends = len(old), len(new)
                break
        if tuple(old[i : i + 1]) == tuple(new[j : j + 1]) == (1,) and len(old) - i != len(new) - j:
            # An axis of size 1 is there, or not, on one side alone.
            ends = (i + 1, j) if len(old) - i > len(new) - j else (i, j + 1)
        yield range(i, ends[0]), range(j, ends[1])
        i, j = ends


def reshaped(
    v: Array, old: Sequence[int], new: Sequence[int], runs: Iterable[tuple[Sequence[int], Sequence[int]]] | None = None
) -> Array:
    """Values for groups after a reshape of the tensor; where blocks are lost, one for each element.

    `runs` are the axes that become others, in their order; by default those of equal size.
    """
    sizes: list[int] = []
    for of_old, of_new in runs or segments(old, new):
        if len(of_old) == len(of_new) == 1 or not of_old:  # one that stays, or is stretched; or copies
            sizes += [v.shape[i] for i in of_old] or [1] * len(of_new)
            continue
        lengths = [new[j] for j in of_new]
        of_blocks = [v.shape[i] for i in of_old], [old[i] for i in of_old]
        fitting = None if 0 in lengths else _blocks_of(*of_blocks, lengths)
        if fitting is None:
            for i in of_old:
                v = apart(v, i, old[i])
            fitting = lengths
        sizes += fitting
    return lax.reshape(v, sizes)


def _blocks_of(groups: Sequence[int], old: Sequence[int], new: Sequence[int]) -> Sequence[int] | None:
    """The numbers of groups along the new axes of a run, if groups are runs of consecutive elements; else None."""
    separate = itertools.takewhile(lambda axis: groups[axis] == old[axis], range(len(old)))
    if any(g != 1 for g in groups[len(list(separate)) + 1 :]):
        return None
    left, sizes = math.prod(groups), []
    for n in new:
        if left % n == 0:
            sizes.append(n)
            left //= n
        elif n % left == 0:
            sizes.append(left)
            left = 1
        else:
            return None
    return sizes


def sliced(v: Array, axis: int, n: int, start: int, stop: int, stride: int = 1) -> Array:
    """Values for groups after a slice of the tensor along an axis of length `n`."""
    if v.shape[axis] in (0, 1) or (start, stop, stride) == (0, n, 1):
        return v
    size = n // v.shape[axis]
    if stride == 1 and start % size == 0 and stop % size == 0:  # whole blocks
        return lax.slice_in_dim(v, start // size, stop // size, axis=axis)
    return lax.slice_in_dim(apart(v, axis, n), start, stop, stride, axis)


def picked(v: Array, axis: int, n: int, start: Array, size: int) -> Array:
    """Values for groups after a dynamic slice of the tensor: `size` of the `n` elements along an axis."""
    if v.shape[axis] == 1 or size == n:
        return v
    return lax.dynamic_slice_in_dim(apart(v, axis, n), start, size, axis)


# A part of a tensor: {axis: (start, size)}, without the axes of which it has all elements.
Windows = Mapping[int, tuple[Any, int]]


def windows_of_groups(groups: Sequence[int], shape: Sequence[int], windows: Windows) -> Windows:
    """The windows of the values of a part, which has whole groups along each axis, or one element."""
    lengths = {i: n // max(g, 1) for i, (g, n) in enumerate(zip(groups, shape, strict=True)) if g != 1}
    of = lambda start, size, n: (start, size) if n == 1 else (start // n, -(-size // n))
    return {i: of(*window, lengths[i]) for i, window in windows.items() if i in lengths}


def part(v: Array, windows: Windows) -> Array:
    """A part of an array."""
    sizes = [windows[i][1] if i in windows else n for i, n in enumerate(v.shape)]
    return lax.dynamic_slice(v, _starts(windows, v.ndim), sizes) if windows else v


def with_part(v: Array, new: Array, windows: Windows) -> Array:
    """An array with new values in a part."""
    return lax.dynamic_update_slice(v, new, _starts(windows, v.ndim))


def _starts(windows: Windows, ndim: int) -> list[Any]:
    """The start of a part along each axis, in int32: JAX wants one dtype, and its default may be int64."""
    start = lambda i: windows[i][0] if i in windows else 0
    return [np.int32(v) if isinstance(v := start(i), int) else v.astype(jnp.int32) for i in range(ndim)]


def joined(parts: Sequence[Array], shapes: Sequence[tuple[int, ...]], axis: int) -> Array:
    """Values for groups after a concatenation of tensors along an axis, where each element has its own."""
    parts = list(parts)
    for i in range(len(shapes[0])):
        sizes = {v.shape[i] for v in parts} - {1}
        if i == axis or len(sizes) > 1:  # blocks beside others have nothing in common
            parts = [apart(v, i, shape[i]) for v, shape in zip(parts, shapes, strict=True)]
        elif sizes:
            parts = [jnp.broadcast_to(v, (*v.shape[:i], *sizes, *v.shape[i + 1 :])) for v in parts]
    return lax.concatenate(parts, axis)
