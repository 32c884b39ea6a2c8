# SPDX-License-Identifier: Apache-2.0
"""Products of floats with a weight that is integers alone.

    (x @ (values - zero_point)) * scale

Scales that do not vary along what is summed are multiplied into the result: integers of 8 bits are exact in bfloat16,
scaled ones are not, and no scaled weight is written.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from .._arrays._codes import centred, largest_magnitude
from .._arrays._quantized import Quantized
from .._arrays._straight_through import with_gradient_of
from .._base import _groups as grouping
from .._base import _numerics as num
from .._base._axes import arranged
from .._base._checks import is_float
from .._base._gradients import custom_vjp
from .._base._sharding import is_explicit, shard_like
from .._platform._dots import in_wide_sums
from .._platform._tiles import in_tiles, tile_of, written
from ._contract import ContractionOp, differentiated
from ._operands import QuantizedOperand, flagged


class FloatProduct(Protocol):
    """A product of two floats, which can leave in another dtype. Static."""

    def of_dtype(self, dtype: DTypeLike) -> Self: ...

    def real(self, a: Array, b: Array, *more: Array) -> Array: ...


class ScaledBehind(NamedTuple):
    """How a weight-only product is computed. Static.

    Attributes:
      f: the product of floats.
      op: its axes, and the dtype of its result.
      side: of the weight.
    """

    f: FloatProduct
    op: ContractionOp
    side: int

    def product(self, x: Array, w: Array, *more: Array, dtype: DTypeLike) -> Array:
        return self.f.of_dtype(dtype).real(*((w, x) if self.side == 0 else (x, w)), *more)

    def scale(self, x: Array, q: Quantized, *more: Array) -> Array:
        """The scale of each result."""
        return self.op.in_output(self.side, q.step, self._shapes(x, q), *more)

    def sums_all_of_x(self, x: Array, q: Quantized) -> bool:
        """Whether a result sums a whole row of x, as in a dot, and no window of it."""
        axes = self.op.axes([len(shape) for shape in self._shapes(x, q)])
        return set(axes.operands[1 - self.side]) <= {*axes.out, *axes.summed} and not axes.apart

    def product_with_zeros(self, x: Array, q: Quantized) -> Array:
        """The product of x with the zero points, by the sums of x: a TPU is slow at `values - zero_point`."""
        shapes, side = self._shapes(x, q), 1 - self.side
        axes = self.op.axes([len(shape) for shape in shapes])
        summed = [i for i, name in enumerate(axes.operands[side]) if name in axes.summed]
        sums = arranged(jnp.sum(x, summed, dtype=jnp.float32, keepdims=True), axes.operands[side], axes.out)
        return num.guard(sums * self.op.in_output(self.side, q.zero_point.astype(jnp.float32), shapes))

    def _shapes(self, x: Array, q: Quantized) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (q.shape, x.shape) if self.side == 0 else (x.shape, q.shape)


def is_scaled_behind(op: ContractionOp, side: int, q: Quantized, x: Array) -> bool:
    """Whether no scale of a weight varies along what is summed, and the dtype of x holds its integers."""
    ndims = (q.ndim, x.ndim) if side == 0 else (x.ndim, q.ndim)
    return (
        not q.spec.has_minimum
        and all(q.groups[i] in (0, 1) for i in op.contracted_axes(ndims)[side])
        and holds(x.dtype, q)
    )


def holds(dtype: DTypeLike, q: Quantized) -> bool:
    """Whether a dtype has each value of q exactly."""
    if not is_float(dtype):
        return False
    of = jnp.finfo(dtype)
    if not q.spec.format:
        return largest_magnitude(q.spec) <= 2 ** (of.nmant + 1)
    own = jnp.finfo(q.spec.dtype)
    least = lambda of: of.minexp - of.nmant
    return own.nmant <= of.nmant and own.maxexp <= of.maxexp and least(own) >= least(of)


def _scaled_behind_bwd(how, residuals, g):
    x, weight, more = residuals
    q, real = flagged(weight.integers, weight.nan_flags), differentiated(weight.real, weight.integers)
    product = lambda x, w, more: how.product(x, w, *more, dtype=g.dtype)
    of_x, of_weight, of_more = jax.vjp(product, x, real, more)[1](g)
    values = shard_like(num.upcast(lax.stop_gradient(g), jnp.float32) * how.scale(x, q, *more), g)
    integers = written(centred(q, x.dtype))
    (scaled,) = jax.vjp(lambda x: product(x, integers, more), x)[1](num.rounded(values, g.dtype))
    return with_gradient_of(of_x, scaled), QuantizedOperand(of_weight, None, None), of_more


@functools.partial(custom_vjp, rule=_scaled_behind_bwd, static=(0,))
def scaled_behind(how: ScaledBehind, x: Array, weight: QuantizedOperand, more: tuple[Array, ...] = ()) -> Array:
    """`(x @ integers) * scale`, added up in float32 and rounded once; with the gradients of the product of real values.

    The gradient to x is `(g * scale) @ integers`, of g times the scale in its dtype.
    """
    q, wide = flagged(weight.integers, weight.nan_flags), num.compute_dtype(how.op.dtype)
    product = lambda x, w: how.product(x, w, *more, dtype=wide)
    of_centred = lambda x, q: product(x, written(centred(q, x.dtype)))
    of_values = lambda x, q: product(x, q.values.astype(x.dtype)) - how.product_with_zeros(x, q)
    narrow = of_centred if q.spec.symmetric or not how.sums_all_of_x(x, q) else of_values
    y = in_wide_sums(of_centred, narrow, x, q)
    y = shard_like(y * how.scale(x, q, *more).astype(wide), y)
    return num.guard(y) if wide == how.op.dtype else num.rounded(y, how.op.dtype)


def of_integers(op: ContractionOp, side: int, q: Quantized, x: Array) -> Array:
    """`op` of x and a weight without a parameter in float, in the dtype of x."""
    op, q = op.of_dtype(x.dtype), dataclasses.replace(q, dtype=x.dtype)
    return scaled_behind(ScaledBehind(op, op, side), x, QuantizedOperand(q.real(q.dtype), q))


def by_columns(op: ContractionOp, product: Callable[..., Array], side: int, operands: Sequence[Any]) -> Array:
    """`product(*operands)`, of which operand `side` is a quantized weight: tile by tile, where it pays.

    The gradient is the gradient of the product.
    """
    other, shape = operands[1 - side], operands[side].shape
    ndims = (other.ndim, len(shape)) if side else (len(shape), other.ndim)
    axis, of_result = op.columns(side, ndims) or (None, 0)
    summed = op.contracted_axes(ndims)[1 - side]
    rows = math.prod(n for i, n in enumerate(other.shape) if i not in summed)
    tile = 0 if axis is None else tile_of(rows, math.prod(shape), shape[axis])
    if axis is None or not tile or is_explicit(other):
        return product(*operands)

    def of_tile(start: Array, *operands: Any) -> Array:
        def of_values(v: Array) -> Array:
            pair = shape[axis] // v.shape[axis]  # 2 where neighbours along this axis lie in a byte
            return lax.dynamic_slice_in_dim(v, start // pair, tile // pair, axis)

        weight = operands[side].move(of_values, lambda v: grouping.picked(v, axis, shape[axis], start, tile))
        return product(*(weight if i == side else v for i, v in enumerate(operands)))

    value = in_tiles(product, of_tile, (of_result, shape[axis], tile), lax.stop_gradient(tuple(operands)))
    return with_gradient_of(product(*operands), value)
