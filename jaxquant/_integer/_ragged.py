# SPDX-License-Identifier: Apache-2.0
"""The ragged dot of quantized arrays: rows in groups, each of which meets a matrix of its own."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .. import _groups as grouping
from .._qarray import QArray, moved
from ._axes import arranged, dot_axes, dot_numbers
from ._contract import Precision
from ._dot import Dot


class Ragged(NamedTuple):
    """`lax.ragged_dot_general` whose ragged axis of `a` is a free one; static. The groups are an axis of `b`."""

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    ragged: int
    group: int
    execution: str
    gradient: tuple[Precision, Precision] = (None, None)

    def real(self, a: Array, b: Array, sizes: Array) -> Array:
        """The float formulation, which has the gradient of the op."""
        numbers = lax.RaggedDotDimensionNumbers((self.contracted, self.batch), (self.ragged,), (self.group,))
        return lax.ragged_dot_general(a, b, sizes, numbers, preferred_element_type=jnp.float32)

    def exact(self, a: QArray, b: QArray, sizes: Array) -> Array:
        """The scaled integer contraction of each row with the matrix of its group; 0 for rows in no group.

        It is a batch of dots of blocks, of rows of one group. With as many rows as a group has on average there are at
        most twice as many blocks as groups, and no more than rows; the dot of all rows with all matrices would take
        the rows once a group.
        """
        rows, columns = self._free(0, a.ndim), self._free(1, b.ndim)
        sizes_of = lambda q, axes: [q.shape[i] for i in axes]
        kept, inner = sizes_of(a, (*self.batch[0], *rows)), sizes_of(a, self.contracted[0])
        batches, count = math.prod(sizes_of(a, self.batch[0])), b.shape[self.group]
        n = batches * count
        if 0 in (*a.shape, *b.shape):
            return jnp.zeros([*kept, *sizes_of(b, columns)], jnp.float32)
        a = _reshaped(_transposed(a, (*self.batch[0], *rows, *self.contracted[0])), [math.prod(kept), *inner])
        b = _transposed(b, (*self.batch[1], self.group, *self.contracted[1], *columns))
        b = _reshaped(b, [n, *b.shape[len(self.batch[1]) + 1 :]])
        group = self._groups(kept, count, sizes).reshape(batches, -1)
        group = jnp.where(group < count, group + count * jnp.arange(batches)[:, None], n).reshape(-1)
        size, total = -(-a.shape[0] // n), min(2 * n, a.shape[0]) if isinstance(a.shape[0], int) else 2 * n
        turn = jnp.cumsum(group[:, None] == jnp.arange(n)[None], 0)  # of each row in its group, counted from 1
        blocks = -(-turn[-1] // size)
        ends = jnp.cumsum(blocks)
        own = jnp.clip(group, 0, n - 1)
        place = (ends - blocks)[own] * size + jnp.take_along_axis(turn, own[:, None], 1)[:, 0] - 1
        place = jnp.where(group < n, place, total * size)
        row = jnp.zeros(total * size, jnp.int32).at[place].set(jnp.arange(a.shape[0]), mode="drop")
        matrix = jnp.clip(jnp.searchsorted(ends, jnp.arange(total), side="right"), 0, n - 1)
        axes = tuple(range(2, a.ndim + 1)), tuple(range(1, a.ndim))
        y = Dot(axes, ((0,), (0,)), self.execution).exact(_taken(a, row.reshape(total, size)), _taken(b, matrix))
        y = jnp.take(y.reshape(total * size, *y.shape[2:]), place, 0, mode="fill", fill_value=0)
        return y.reshape([*kept, *y.shape[1:]])

    def operand_gradient(self, side: int, g: Array, q: QArray, shape: tuple[int, ...], key: Any, sizes: Array) -> Array:
        """The gradient of the dot of all rows with all matrices: where a row is in another group, its g is 0."""
        shapes = (shape, q.shape) if side == 0 else (q.shape, shape)
        a, b, output = dot_axes(self.contracted, self.batch, [len(of) for of in shapes])
        kept = [n for n in output if n in a]
        length = dict(zip((*a, *b), (*shapes[0], *shapes[1]), strict=True))
        group, at = b[self.group], output.index(b[self.group])
        of_row = arranged(self._groups([length[n] for n in kept], length[group], sizes), kept, output)
        each = [length[n] if n == group else 1 for n in output]
        g = jnp.where(of_row == lax.broadcasted_iota(of_row.dtype, each, at), jnp.expand_dims(g, at), 0)
        own, other = (a, b) if side == 0 else (b, a)
        summed = [n for n in other if n not in own]
        if summed != other[other.index(summed[0]) :][: len(summed)]:  # together then, so that blocks can run along them
            order = *self.batch[1 - side], *self.contracted[1 - side], *map(other.index, summed)
            q, other = _transposed(q, order), [other[i] for i in order]
        shared = ([a[i] for i in axes[0]] for axes in (self.contracted, self.batch))
        numbers = dot_numbers(*((own, other) if side == 0 else (other, own)), *shared)
        of_one_group = math.prod(length[n] for n in summed if n != group) if side == 0 else None
        return Dot(*numbers, self.execution, self.gradient, of_one_group).operand_gradient(side, g, q, shape, key)

    def _free(self, side: int, ndim: int) -> list[int]:
        """The axes that are neither contracted nor of the batch, nor the groups."""
        taken = {*self.contracted[side], *self.batch[side], *((self.group,) if side else ())}
        return [i for i in range(ndim) if i not in taken]

    def _groups(self, kept: list[int], count: int, sizes: Array) -> Array:
        """The group of each row, in the shape of the axes that `a` keeps; `count` for rows in none."""
        at = (*self.batch[0], *self._free(0, len(kept) + len(self.contracted[0]))).index(self.ragged)
        before, length = kept[:at], kept[at]
        ends = jnp.cumsum(jnp.broadcast_to(sizes.astype(jnp.int32), [*before, count]), -1)
        group = (lax.broadcasted_iota(ends.dtype, [*[1] * at, length, 1], at) >= ends[..., None, :]).sum(-1)
        return jnp.broadcast_to(lax.expand_dims(group, range(at + 1, len(kept))), kept)


def _transposed(q: QArray, axes: Sequence[int]) -> QArray:
    return moved(q, lax.transpose(q.values, axes), lambda v: lax.transpose(v, axes))


def _reshaped(q: QArray, shape: Sequence[int]) -> QArray:
    shape = tuple(shape)
    return moved(q, lax.reshape(q.values, shape), lambda v: grouping.reshaped(v, q.shape, shape))


def _taken(q: QArray, index: Array) -> QArray:
    """The parts of q along its first axis that the indices say."""
    new, n = range(index.ndim - 1), q.shape[0]
    part = lambda v: lax.expand_dims(v, new) if v.shape[0] == 1 else grouping.apart(v, 0, n)[index]
    return moved(q, q.values[index], part)
