# SPDX-License-Identifier: Apache-2.0
"""Variants of products of integers and of floats by platform: rows, column sums, the order of axes."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from .._base import _numerics as num
from .._base._sharding import is_explicit
from ._primitive import several

# ((contracted axes of x, of w), (batch axes of x, of w)), as `lax.dot_general` takes them.
Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def integer_dot(x: Array, w: Array, numbers: Numbers, with_sums: bool = False) -> tuple[Array, ...]:
    """`lax.dot_general` of integers in int32; with the sums of w along its contracted axes where they are asked for."""
    if not (with_sums or _is_reshaped(x, numbers) or _is_one_row(x, numbers)):
        return _dot_beside_sums(x, w, numbers, with_sums)
    hashable = tuple(tuple(map(tuple, pair)) for pair in numbers)
    return tuple(_integer_dot(x, w, numbers=hashable, with_sums=with_sums))


def integer_sums(w: Array, contracted: Sequence[int], batch: Sequence[int] = ()) -> Array:
    """The sums of integers along axes, int32, with the axes that are left: those of a batch first.

    By a product with a tile of ones, except on XLA:CPU: of a weight a reduction takes a TPU ten times as long.
    """
    reduced, multiplied = (functools.partial(f, tuple(contracted), tuple(batch)) for f in (_reduced, _multiplied))
    return reduced(w) if is_explicit(w) else lax.platform_dependent(w, cpu=reduced, default=multiplied)


def _reduced(contracted: tuple[int, ...], batch: tuple[int, ...], w: Array) -> Array:
    left = [i for i in range(w.ndim) if i not in contracted]
    order = [left.index(i) for i in (*batch, *(i for i in left if i not in batch))]
    return lax.transpose(jnp.sum(w, contracted, dtype=jnp.int32), order)


def _multiplied(contracted: tuple[int, ...], batch: tuple[int, ...], w: Array) -> Array:
    outer, sizes = len(batch), lambda axes: [w.shape[i] for i in axes]
    ones = jnp.ones_like(w, shape=[*sizes(batch), 8, *sizes(contracted)])
    numbers = (tuple(range(outer + 1, ones.ndim)), contracted), (tuple(range(outer)), batch)
    return lax.index_in_dim(_product(ones, w, numbers), 0, outer, keepdims=False)


def _product(x: Array, w: Array, numbers: Numbers) -> Array:
    return lax.dot_general(x, w, numbers, preferred_element_type=jnp.int32)


def _dot_beside_sums(x: Array, w: Array, numbers: Numbers, with_sums: bool) -> tuple[Array, ...]:
    (_, contracted), (_, batch) = numbers
    product = _product(x, w, numbers)
    return (product, integer_sums(w, contracted, batch)) if with_sums else (product,)


def _is_one_row(x: Array, numbers: Numbers) -> bool:
    """Whether x is one row, or one for each index of a batch of one axis."""
    (contracted, _), (batch, _) = numbers
    free = [n for i, n in enumerate(x.shape) if i not in (*contracted, *batch)]
    is_one = lambda n: isinstance(n, int) and n == 1
    return all(map(is_one, free)) and sum(not is_one(x.shape[i]) for i in batch) <= 1


def _dot_of_two_rows(x: Array, w: Array, numbers: Numbers, with_sums: bool) -> tuple[Array, ...]:
    """As XLA wants it on a TPU, where it gives one row to no matrix unit: of that row twice.

    By its estimate that takes a fifth to a tenth of the cycles. Both results are equal; their maximum is part of the
    kernel of the product, which a slice of one of them is not.
    """
    (contracted, contracted_of_w), (batch, batch_of_w) = numbers
    behind = lambda axes: [i + 1 for i in axes]
    of_two = (behind(contracted), contracted_of_w), (behind(batch), batch_of_w)
    product, *sums = _dot_beside_sums(lax.broadcast(x, (2,)), w, of_two, with_sums)
    return lax.reduce_max(product, (len(batch),)), *sums


def _is_reshaped(x: Array, numbers: Numbers) -> bool:
    """Whether a CPU wants x otherwise than as it is: four rows or more, in order."""
    (contracted, _), (batch, _) = numbers
    free = [i for i in range(x.ndim) if i not in (*contracted, *batch)]
    in_order = (*batch, *free, *contracted) == tuple(range(x.ndim))
    return len(free) != 1 or not in_order or not isinstance(x.shape[free[0]], int) or x.shape[free[0]] < 4


def _dot_of_rows(x: Array, w: Array, numbers: Numbers, with_sums: bool) -> tuple[Array, ...]:
    """As XLA:CPU wants it.

    It is fast on rows, and slow on fewer than four; of a symbolic number of rows, of an exported program, nobody
    knows whether they are. It folds a transpose back into the contraction, which is then in no library and up to ten
    times slower than in float32; of one more row it writes a copy. A row of ones sums the columns of w, which a
    reduction does in several times the time of the contraction.
    """
    (contracted, contracted_of_w), (batch, batch_of_w) = numbers
    free, outer = [i for i in range(x.ndim) if i not in (*contracted, *batch)], len(batch)
    batches, kept, summed = ([x.shape[i] for i in axes] for axes in (batch, free, contracted))
    rows, order = math.prod(kept), (*batch, *free, *contracted)
    missing = max(4 - rows, 0) if isinstance(rows, int) else 0
    extra = max(missing, int(order != tuple(range(x.ndim))), int(with_sums))
    x = lax.reshape(lax.transpose(x, order), [*batches, rows, *summed])
    if extra:
        x = lax.concatenate([x, jnp.ones_like(x, shape=[*batches, extra, *summed])], outer)
    inner, leading = tuple(range(outer + 1, x.ndim)), tuple(range(outer))
    product = _product(x, w, ((inner, contracted_of_w), (leading, batch_of_w)))
    acc = lax.slice_in_dim(product, 0, rows, axis=outer)
    acc = lax.reshape(acc, [*batches, *kept, *acc.shape[outer + 1 :]])
    return (acc, lax.index_in_dim(product, rows, outer, keepdims=False)) if with_sums else (acc,)


def _on_tpu(x: Array, w: Array, numbers: Numbers, with_sums: bool) -> tuple[Array, ...]:
    return (_dot_of_two_rows if _is_one_row(x, numbers) else _dot_beside_sums)(x, w, numbers, with_sums)


def _on_cpu(x: Array, w: Array, numbers: Numbers, with_sums: bool) -> tuple[Array, ...]:
    # On an explicit mesh reshaped rows would not have the sharding of the others.
    is_plain = is_explicit(x) or is_explicit(w) or not (with_sums or _is_reshaped(x, numbers))
    return (_dot_beside_sums if is_plain else _dot_of_rows)(x, w, numbers, with_sums)


def _results(x: ArrayLike, w: Any, numbers: Numbers, with_sums: bool) -> list[tuple[list[int], Any]]:
    (cx, cw), (bx, bw) = numbers
    free = lambda v, taken: [n for i, n in enumerate(v.shape) if i not in taken]
    batch = [w.shape[i] for i in bw]
    of_w = free(w, (*cw, *bw))
    shapes = [[*batch, *free(x, (*cx, *bx)), *of_w], [*batch, *of_w]]
    return [(shape, np.dtype(np.int32)) for shape in shapes[: 1 + with_sums]]


_integer_dot = several("integer_dot", _results, _dot_beside_sums, ("numbers", "with_sums"), cpu=_on_cpu, tpu=_on_tpu)


def float_dot(a: Array, b: Array, numbers: Numbers, dtype: DTypeLike) -> Array:
    """`lax.dot_general` in a dtype.

    Of a matrix of rows: XLA:CPU takes up to twice the time for an activation of three axes. On every platform, because
    it is differentiated, and free elsewhere.
    """
    (contracted, contracted_of_b), batch = numbers
    free = [i for i in range(a.ndim) if i not in (*contracted, *batch[0])]
    if any(batch) or len(free) < 2 or any(axis is not None for axis in jax.typeof(a).sharding.spec):
        return lax.dot_general(a, b, numbers, preferred_element_type=dtype)
    rows, summed = ([a.shape[i] for i in axes] for axes in (free, contracted))
    a = lax.reshape(lax.transpose(a, (*free, *contracted)), [math.prod(rows), *summed])
    of_rows = (tuple(range(1, a.ndim)), contracted_of_b), ((), ())
    y = lax.dot_general(a, b, of_rows, preferred_element_type=dtype)
    return lax.reshape(y, [*rows, *y.shape[1:]])


def in_wide_sums(
    product: Callable[[Array, Any], Array], narrow: Callable[[Array, Any], Array], x: Array, w: Any
) -> Array:
    """`product(x, w)`, which adds up in float32; of floats of 16 bits `narrow`, but on a CPU.

    XLA:CPU multiplies bfloat16 into float32 for some orders of axes, and raises an error when the others run.
    """
    wide = lambda x, w: product(num.upcast(x, jnp.float32), w)
    if x.dtype.itemsize > 2 or is_explicit(x):
        return (product if x.dtype.itemsize > 2 else wide)(x, w)
    return lax.platform_dependent(x, w, cpu=wide, default=narrow)


def bfloat16_dot(x: Array, w: Array, numbers: Numbers) -> Array:
    """`lax.dot_general` of bfloat16, added up in float32."""
    plain, on_cpu = (functools.partial(f, numbers) for f in (_in_bfloat16, _of_matrices))
    if is_explicit(x) or is_explicit(w):
        return on_cpu(x, w)
    return lax.platform_dependent(x, w, cpu=on_cpu, default=plain)


def _in_bfloat16(numbers: Numbers, x: Array, w: Array) -> Array:
    return lax.dot_general(x, w, numbers, preferred_element_type=jnp.float32)


def _in_float32(numbers: Numbers, x: Array, w: Array) -> Array:
    return _in_bfloat16(numbers, x.astype(jnp.float32), w.astype(jnp.float32))


def _of_matrices(numbers: Numbers, x: Array, w: Array) -> Array:
    """As XLA:CPU wants it.

    Which products of bfloat16 it has depends on the order of the axes, and for others it raises an error when they run.
    Those of two matrices are there, if no transpose before or behind them is folded in; of a batch none is sure.
    """
    (cx, cw), (batch, _) = numbers
    if batch:
        return _in_float32(numbers, x, w)

    @jax.custom_batching.custom_vmap
    def of_matrices(x: Array, w: Array) -> Array:
        free_of_x, free_of_w = ([i for i in range(v.ndim) if i not in of] for v, of in ((x, cx), (w, cw)))
        leads = cw == tuple(range(len(cw)))  # then w need not be transposed
        rows, columns = _matrix(x, free_of_x, cx), _matrix(w, cw, free_of_w) if leads else _matrix(w, free_of_w, cw)
        of_rows = ((1,), (int(not leads),)), ((), ())
        y = lax.optimization_barrier(_in_bfloat16(of_rows, *lax.optimization_barrier((rows, columns))))
        return lax.reshape(y, [*(x.shape[i] for i in free_of_x), *(w.shape[i] for i in free_of_w)])

    @of_matrices.def_vmap
    def of_batch(size: int, batched: Sequence[bool], x: Array, w: Array) -> tuple[Array, bool]:
        axes = tuple(0 if is_batched else None for is_batched in batched)
        return jax.vmap(functools.partial(_in_float32, numbers), axes)(x, w), True

    return of_matrices(x, w)


def _matrix(v: Array, rows: Sequence[int], columns: Sequence[int]) -> Array:
    sizes = [math.prod(v.shape[i] for i in axes) for axes in (rows, columns)]
    return lax.reshape(lax.transpose(v, (*rows, *columns)), sizes)
