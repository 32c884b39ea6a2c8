# SPDX-License-Identifier: Apache-2.0
"""Products of floats with a weight that is integers alone."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array, lax

from .._arrays._straight_through import with_gradient_of
from .._base import _groups as grouping
from .._base._sharding import is_explicit
from .._platform._tiles import in_tiles, tile_of
from ._contract import ContractionOp


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
        of_values = lambda v: lax.dynamic_slice_in_dim(v, start, tile, axis)
        weight = operands[side].move(of_values, lambda v: grouping.picked(v, axis, shape[axis], start, tile))
        return product(*(weight if i == side else v for i, v in enumerate(operands)))

    value = in_tiles(product, of_tile, of_result, shape[axis], tile, *lax.stop_gradient(tuple(operands)))
    return with_gradient_of(product(*operands), value)
