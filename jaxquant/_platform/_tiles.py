# SPDX-License-Identifier: Apache-2.0
"""Weight-only products of a few rows, tile by tile, where a platform would write the whole weight in float first."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .._base._sharding import vary_together

_MOST_ROWS = 128  # with more, the weight is converted once for many
_LEAST = 2**18  # elements of a weight; smaller ones are in the cache anyway, and their products in another kernel
_TILE = 2**19  # elements of a tile, which stays in the cache as floats


def tile_of(rows: Any, size: int, columns: int) -> int:
    """The number of columns in a tile of a weight of this size, for so many rows; 0 where it is converted whole."""
    if not isinstance(rows, int) or not 0 < rows <= _MOST_ROWS or size < _LEAST or not columns:
        return 0
    tile = min(2 ** int(_TILE * columns / size).bit_length() // 2, columns & -columns)
    return tile if 64 <= tile < columns else 0


def in_tiles(
    whole: Callable[..., Array], part: Callable[..., Array], columns: tuple[int, int, int], args: Sequence[Any]
) -> Array:
    """`whole(*args)`; on XLA:CPU put together of `part(start, *args)`.

    `columns` are the axis along which it is put together, its length, and how many columns a part has.

    XLA:CPU writes a weight that is converted, on one thread, and reads it again: many times what a product of a few
    rows takes. One tile stays in the cache. Of columns, because each is then the same sum as before: the bits stay.
    """
    axis, length, tile = columns

    def by_tiles(*args: Any) -> Array:
        first = part(jnp.int32(0), *args)  # for its type alone: XLA drops the value
        shape = [length if i == axis else n for i, n in enumerate(first.shape)]
        start, _ = vary_together(jnp.zeros(shape, first.dtype), first)

        def put(i: Array, y: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(y, part(i * tile, *args), i * tile, axis)

        return lax.fori_loop(0, length // tile, put, start)

    return lax.platform_dependent(*args, cpu=by_tiles, default=whole)


def written(v: Array) -> Array:
    """`v` as an array in memory of its own, to be the operand of a product of floats: the identity.

    Of a constant XLA:CPU chooses another layout, and of a transpose that it sees another kernel; each sums in another
    order. What is trained, served and closed over has one form so.
    """
    return lax.platform_dependent(v, cpu=lax.optimization_barrier, default=lambda v: v)
