# SPDX-License-Identifier: Apache-2.0
"""A quantized array inside of the package: its scales have its rank, and move with its values."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from .._base import _checks as checks
from .._base import _groups as grouping
from .._base import _numerics as num
from .._platform._cpu import apart_of_pairs, transposed
from .._spec._spec import QuantSpec
from ._grid import Frame, Grid


class Stored:
    """What a QArray and a Quantized are alike in: values that lie in memory in an order and in pairs, with scales."""

    stored: Any
    scale: Any
    spec: QuantSpec
    order: tuple[int, ...] | None
    tensor_scale: Any
    pairs: tuple[int, int] | None

    @property
    def values(self) -> Any:
        """The integers, or floats of a format, in the order of the axes and in the dtype of the spec."""
        values, to = self.stored, self.spec.dtype
        if isinstance(values, jax.ShapeDtypeStruct):
            sharding = None if self.order or self.pairs else values.sharding
            return values.update(shape=self.shape, dtype=to, sharding=sharding)
        if self.pairs and checks.is_array(values):
            values = apart_of_pairs(values, self.ndim + self.pairs[0], self.pairs[1], to)
        values = in_memory(values, lambda ndim: back(self.order, ndim)) if self.order else values
        return values.astype(to) if getattr(values, "dtype", None) in (jnp.int4, jnp.uint4) else values

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        shape, paired = self.stored.shape, self.ndim + self.pairs[0] if self.pairs else None
        return tuple(shape[i] * (2 if i == paired else 1) for i in back(self.order, len(shape)))

    @property
    def ndim(self) -> int:
        """The rank of the values."""
        return self.stored.ndim

    @property
    def groups(self) -> tuple[int, ...]:
        """The number of groups with a scale along each axis."""
        return (1,) * (0 if self.stored is None else self.ndim - self.scale.ndim) + self.scale.shape

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def step(self) -> Array:
        """The real value of one level, float32 in the shape of scale."""
        return num.product_of_scales(self.scale.astype(jnp.float32), self.tensor_scale)


OF_GROUPS = "scale", "zero_point", "tensor_scale"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("stored", *OF_GROUPS, "sums"),
    meta_fields=("spec", "dtype", "order", "summed", "pairs"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Quantized(Stored):
    """`real = (values - zero_point) * scale`; a pytree. QArray is its public face: `inside` and `outside`.

    Attributes:
      stored: the values as they lie in memory, as in QArray; None where no op reads them.
      scale: of the rank of the values, with the number of groups along each axis; None before there are qparams.
      zero_point: of the shape of scale; None for 0. Not read of a symmetric spec.
      spec: static. Of a part the granularity is another one, which the shape of the scale says.
      dtype: static, the dtype of the real values.
      order: static, as in QArray.
      tensor_scale: of the rank of the values, where the spec has one; else None.
      sums, summed, pairs: as in QArray.
    """

    stored: Any
    scale: Any
    zero_point: Any
    spec: QuantSpec
    dtype: np.dtype
    order: tuple[int, ...] | None = None
    tensor_scale: Any = None
    sums: Any = None
    summed: int | None = None
    pairs: tuple[int, int] | None = None

    @property
    def own_sums(self) -> Array | None:
        """The sums of the values, unless these are a part of what was summed, such as a shard."""
        return None if self.sums is None or self.sums.size * self.summed != self.size else self.sums

    def real(self, dtype: DTypeLike, guarded: bool = True) -> Array:
        """`(values - zero_point) * scale`, computed in float32 (float64 for float64) and rounded once to `dtype`."""
        return _real(self, jnp.dtype(dtype), guarded)

    def moves(
        self, of_values: Callable[[Array], Sequence[Array]], of_groups: Callable[[Array], Sequence[Array]], n: int
    ) -> list["Quantized"]:
        """The `n` results of what moves an array: of its values as they lie, and of arrays with a value for a group.

        They have sums where what is summed is still whole.
        """
        of = {name: getattr(self, name) for name in OF_GROUPS} | {"sums": self.own_sums}
        each = {"stored": moved(of_values, self.stored, n)}
        each |= {name: moved(of_groups, v, n) for name, v in of.items()}
        results = (dict(zip(each, arrays, strict=True)) for arrays in zip(*each.values(), strict=True))
        return [dataclasses.replace(self, **arrays)._with_own_sums() for arrays in results]

    def _with_own_sums(self) -> "Quantized":
        return self.without_sums() if self.own_sums is None else self

    def move(self, of_values: Callable[[Array], Array], of_groups: Callable[[Array], Array]) -> "Quantized":
        """The result of what moves it."""
        return self.moves(lambda v: [of_values(v)], lambda v: [of_groups(v)], 1)[0]

    def ordered(self) -> "Quantized":
        """The array with its values stored in the order of its axes, in the dtype of the spec."""
        return self if self.stored is None else dataclasses.replace(self, stored=self.values, order=None, pairs=None)

    def lies_whole(self, axes: Iterable[int]) -> bool:
        """Whether axes lie in memory as they are, before those in another order or in pairs."""
        last = max(len(self.order or ()), -self.pairs[0] if self.pairs else 0)
        return not last or all(axis < self.ndim - last for axis in axes)

    def without_sums(self) -> "Quantized":
        return dataclasses.replace(self, sums=None, summed=None)

    def transposed(self, axes: Sequence[int]) -> "Quantized":
        q = self.ordered()
        return q.move(lambda v: transposed(v, tuple(axes)), lambda v: lax.transpose(v, axes))

    def reshaped(self, shape: Sequence[int]) -> "Quantized":
        q = self.ordered()
        return q.move(lambda v: lax.reshape(v, shape), lambda v: grouping.reshaped(v, q.shape, shape))

    def taken(self, index: Array) -> "Quantized":
        """The parts along the first axis at indices, which are in bounds."""
        q, new, n = self if self.lies_whole([0]) else self.ordered(), range(index.ndim - 1), self.shape[0]
        at = lambda v: v.at[index].get(mode="promise_in_bounds")
        return q.move(at, lambda v: lax.expand_dims(v, new) if v.shape[0] == 1 else at(grouping.apart(v, 0, n)))

    def window(self, windows: grouping.Windows, picked: Sequence[int] = ()) -> "Quantized":
        """A part that cuts no group, without the axes of which one element is picked."""
        cut = lambda v, windows: lax.squeeze(grouping.part(v, windows), picked)
        of_groups = lambda v: cut(v, grouping.windows_of_groups(v.shape, self.shape, windows))
        return (self if self.lies_whole(windows) else self.ordered()).move(lambda v: cut(v, windows), of_groups)


def moved(f: Callable[[Array], Sequence[Any]], v: Any, n: int) -> Sequence[Any]:
    """The `n` results of a move of an array; of None, as many."""
    return [None] * n if v is None else f(v)


@functools.partial(jax.jit, static_argnames=("dtype", "guarded"))
def _real(q: Quantized, dtype: DTypeLike, guarded: bool) -> Array:
    over = lambda v: None if v is None else grouping.broadcast_groups(v.astype(num.compute_dtype(dtype)), q.shape)
    zero_point, frame = None if q.spec.symmetric else over(q.zero_point), Frame(None, None, q.spec)
    grid = Grid(over(q.scale), zero_point, frame, over(q.tensor_scale))
    values = grid.real(q.values.astype(grid.scale.dtype), guarded)
    # Guarded once more: of integers, which are never NaN, LLVM knows that `|steps| * 0` is 0, and drops the sum.
    return num.downcast(num.guard(values) if guarded else values, dtype)


def permutation(order: Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The axes of an array in the order in which they lie, where its last axes lie in `order`."""
    order = order or ()
    if sorted(order) != list(range(-len(order), 0)) or len(order) > ndim:
        raise ValueError(
            f"`order` must be the last axes of the array, counted from the end, got {tuple(order)} for an array of "
            f"rank {ndim}. To scan or vmap along an axis that it moves, dataclasses.replace(q, order=None)."
        )
    return *range(ndim - len(order)), *(ndim + axis for axis in order)


def back(order: Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The places in memory of the axes of an array."""
    there = permutation(order, ndim)
    return tuple(map(there.index, range(ndim)))


def in_memory(v: Any, axes: Callable[[int], tuple[int, ...]]) -> Any:
    """An array, or the shape of one, with its axes in another order; what else is a leaf, as it is."""
    if isinstance(v, jax.ShapeDtypeStruct):
        return v.update(shape=tuple(v.shape[i] for i in axes(v.ndim)), sharding=None)
    return transposed(v, axes(v.ndim)) if checks.is_array(v) else v
