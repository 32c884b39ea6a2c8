# SPDX-License-Identifier: Apache-2.0
"""The ragged dot of quantized arrays: rows in groups, each of which meets a matrix of its own."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import Array, lax

from .._arrays._quantized import Quantized
from .._base._axes import Axes, Matrix, arranged, dot_axes, dot_numbers, int_pairs
from .._base._groups import broadcast_groups
from ._contract import ContractionOp
from ._dot import Dot
from ._operands import Rounding


@dataclasses.dataclass(frozen=True)
class Ragged(ContractionOp):
    """`lax.ragged_dot_general` whose ragged axis of `a` is a free one. The groups are an axis of `b`."""

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    ragged: int
    group: int

    @classmethod
    def of(cls, params: Mapping[str, Any], **attributes: Any) -> Self:
        numbers = params["ragged_dot_dimension_numbers"]
        (ragged,), (group,) = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
        return cls(*int_pairs(numbers.dot_dimension_numbers), int(ragged), int(group), **attributes)

    @staticmethod
    def can_replace(params: Mapping[str, Any]) -> bool:
        """Whether rows are in groups, each with a matrix of its own."""
        numbers = params["ragged_dot_dimension_numbers"]
        (contracted, _), (batch, _) = numbers.dot_dimension_numbers
        is_free = not {*contracted, *batch}.intersection(numbers.lhs_ragged_dimensions)
        return params["group_offset"] is None and is_free

    def axes(self, ndims: Sequence[int]) -> Axes:
        a, b, output = dot_axes(self.contracted, self.batch, ndims)
        rows, experts = a[self.ragged], b[self.group]
        output.remove(experts)
        return Axes((tuple(a), tuple(b)), tuple(output), frozenset((rows, experts)))

    @property
    def takes_blocks(self) -> bool:
        return True

    @property
    def joins_summed(self) -> bool:
        return True

    def rows(self, side: int, x: Array, shape: tuple[int, ...], *more: Array) -> tuple[Array, Array]:
        """All rows, and for each expert whether they meet it."""
        rows, _ = super().rows(side, x, shape)
        kept = [x.shape[i] for i in range(x.ndim) if i not in self.contracted[0]]
        group = self._groups(kept, shape[self.group], *more).reshape(-1)
        of_group = group[None] == jnp.arange(shape[self.group], dtype=group.dtype)[:, None]
        return rows, of_group

    def matrix(self, side: int, ndims: Sequence[int]) -> Matrix:
        if side == 0 or self.batch[0]:
            raise ValueError(
                "second moments and rotations are for the matrices of the experts of a ragged dot without a batch, got "
                f"the parameter as operand {side} and batch axes {self.batch}. Leave it out by a rule with None."
            )
        return super().matrix(side, ndims)

    def in_output(self, side: int, v: Array, shapes: Sequence[tuple[int, ...]], *more: Array) -> Array:
        """Of the matrices of groups, for each row the value of its group."""
        if side == 0 or v.shape[self.group] == 1:
            return super().in_output(side, v, shapes, *more)
        a, b = shapes
        columns = [b[i] for i in self._free(1, len(b))]
        kept_of_b = *self.batch[1], self.group, *self._free(1, len(b))
        batches = [b[i] for i in self.batch[1]]
        v = lax.squeeze(
            lax.transpose(broadcast_groups(v, b), (*kept_of_b, *self.contracted[1])), range(len(kept_of_b), len(b))
        )
        v = jnp.broadcast_to(v, [b[i] for i in kept_of_b])
        kept = [a[i] for i in (*self.batch[0], *self._free(0, len(a)))]
        group = self._groups(kept, b[self.group], *more).reshape(*batches, -1, 1)
        of_rows = jnp.take_along_axis(v.reshape(*batches, b[self.group], -1), group, len(batches), mode="clip")
        return of_rows.reshape(*kept, *columns)

    def real(self, a: Array, b: Array, *more: Array) -> Array:
        """The float formulation, which has the gradient of the op."""
        numbers = lax.RaggedDotDimensionNumbers((self.contracted, self.batch), (self.ragged,), (self.group,))
        (sizes,) = more
        return lax.ragged_dot_general(a, b, sizes, numbers, preferred_element_type=self.dtype)

    def exact(self, a: Quantized, b: Quantized, *more: Array) -> Array:
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
        a = a.transposed((*self.batch[0], *rows, *self.contracted[0])).reshaped([math.prod(kept), *inner])
        b = b.transposed((*self.batch[1], self.group, *self.contracted[1], *columns))
        b = b.reshaped([n, *b.shape[len(self.batch[1]) + 1 :]])
        group = self._groups(kept, count, *more).reshape(batches, -1)
        group = jnp.where(group < count, group + count * jnp.arange(batches, dtype=jnp.int32)[:, None], n).reshape(-1)
        rows_of_a, is_known = a.shape[0], isinstance(a.shape[0], int)
        blocks = _in_blocks(group, n, -(-rows_of_a // n), min(2 * n, rows_of_a) if is_known else 2 * n)
        axes = tuple(range(2, a.ndim + 1)), tuple(range(1, a.ndim))
        dot = Dot(axes, ((0,), (0,)), execution=self.execution)
        y = dot.exact(a.taken(blocks.rows), b.taken(blocks.groups))
        y = jnp.take(y.reshape(-1, *y.shape[2:]), blocks.places, 0, mode="fill", fill_value=0)
        return y.reshape([*kept, *y.shape[1:]])

    def operand_gradient(
        self, side: int, g: Array, q: Quantized, shape: tuple[int, ...], rounding: Rounding, *more: Array
    ) -> tuple[Array, Array | None]:
        """The gradient of the dot of all rows with all matrices: where a row is in another group, its g is 0."""
        shapes = (shape, q.shape) if side == 0 else (q.shape, shape)
        a, b, output = dot_axes(self.contracted, self.batch, [len(of) for of in shapes])
        kept = [n for n in output if n in a]
        length = dict(zip((*a, *b), (*shapes[0], *shapes[1]), strict=True))
        group, at = b[self.group], output.index(b[self.group])
        of_row = arranged(self._groups([length[n] for n in kept], length[group], *more), kept, output)
        each = [length[n] if n == group else 1 for n in output]
        g = jnp.where(of_row == lax.broadcasted_iota(of_row.dtype, each, at), jnp.expand_dims(g, at), 0)
        own, other = (a, b) if side == 0 else (b, a)
        summed = [n for n in other if n not in own]
        if summed != other[other.index(summed[0]) :][: len(summed)]:  # together then, so that blocks can run along them
            order = *self.batch[1 - side], *self.contracted[1 - side], *map(other.index, summed)
            q, other = q.transposed(order), [other[i] for i in order]
        shared = ([a[i] for i in axes[0]] for axes in (self.contracted, self.batch))
        numbers = dot_numbers(*((own, other) if side == 0 else (other, own)), *shared)
        of_one_group = math.prod(length[n] for n in summed if n != group) if side == 0 else None
        dot = Dot(*numbers, of_one_group, execution=self.execution, gradient=self.gradient)
        return dot.operand_gradient(side, g, q, shape, rounding)

    def _free(self, side: int, ndim: int) -> list[int]:
        """The axes that are neither contracted nor of the batch, nor the groups."""
        taken = {*self.contracted[side], *self.batch[side], *((self.group,) if side else ())}
        return [i for i in range(ndim) if i not in taken]

    def _groups(self, kept: list[int], count: int, sizes: Array) -> Array:
        """The group of each row, in the shape of the axes that `a` keeps; `count` for rows in none."""
        at = (*self.batch[0], *self._free(0, len(kept) + len(self.contracted[0]))).index(self.ragged)
        before, length = kept[:at], kept[at]
        ends = jnp.cumsum(jnp.broadcast_to(sizes.astype(jnp.int32), [*before, count]), axis=-1)
        is_behind = lax.broadcasted_iota(ends.dtype, [*[1] * at, length, 1], at) >= ends[..., None, :]
        group = is_behind.sum(-1, dtype=jnp.int32)
        return jnp.broadcast_to(lax.expand_dims(group, range(at + 1, len(kept))), kept)


class _Blocks(NamedTuple):
    """Rows in blocks of one size, each block of rows of one group.

    Attributes:
      rows: (blocks, size), which row is in each place; 0 in those that stay empty.
      groups: (blocks,), the group of each block.
      places: (rows,), in which place each row is, counted over all blocks; beyond the last for rows in no group.
    """

    rows: Array
    groups: Array
    places: Array


def _in_blocks(group: Array, n: int, size: Any, count: Any) -> _Blocks:
    """The rows of n groups, of each row its `group` or n for none, in `count` blocks of `size`, which hold them all."""
    is_of = group[:, None] == jnp.arange(n, dtype=jnp.int32)[None]
    turn = jnp.cumsum(is_of, axis=0, dtype=jnp.int32)  # of each row in its group, counted from 1
    blocks = -(-turn[-1] // size)
    ends, own = jnp.cumsum(blocks), jnp.clip(group, 0, n - 1)
    places = (ends - blocks)[own] * size + jnp.take_along_axis(turn, own[:, None], 1)[:, 0] - 1
    places = jnp.where(group < n, places, count * size)
    rows = jnp.zeros(count * size, jnp.int32).at[places].set(jnp.arange(group.shape[0], dtype=jnp.int32), mode="drop")
    groups = jnp.clip(jnp.searchsorted(ends, jnp.arange(count, dtype=jnp.int32), side="right"), 0, n - 1)
    return _Blocks(rows.reshape(count, size), groups, places)
