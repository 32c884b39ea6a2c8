# SPDX-License-Identifier: Apache-2.0
"""Programs written by hand for the arithmetic of jaxquant: what XLA can make of it at best.

The same bits on a CPU, where quotients are correctly rounded; elsewhere they are the platform's. Ties go to even,
ranges are of finite values, and a row that holds a NaN or an infinity gives NaN. Nothing else is here: no plan, no
granularity, no platform. Weights have a scale for each column.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Grid = tuple[Array, Array | None]  # scale, and the zero point of an affine one


class Weight(NamedTuple):
    """A weight at rest: int8 (in, out), with a float32 scale, and where inputs are affine an int32 sum a column."""

    values: Array
    scale: Array
    sums: Array | None = None


def divided(x: Array, scale: Array) -> Array:
    """`x / scale`; by a select, lest XLA multiplies by the reciprocal, which is rounded twice."""
    return x / jnp.where(x == x, scale, x)


def symmetric(x: Array, axis: int | None = None) -> Grid:
    """The grid up to the largest magnitude, of the tensor or, along an axis, of each token."""
    largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), axis, keepdims=axis is not None)
    return jnp.where(largest > 0, largest / jnp.where(largest > 0, np.float32(127), 1), 1), None


def affine(x: Array) -> Grid:
    finite = jnp.isfinite(x)
    low, high = jnp.min(jnp.where(finite, x, 0)), jnp.max(jnp.where(finite, x, 0))
    width = high - low
    scale = jnp.where(width > 0, width / jnp.where(width > 0, np.float32(255), 1), 1)
    return scale, -128 - jnp.round(divided(low, scale))


def codes(x: Array, grid: Grid) -> Array:
    scale, zero_point = grid
    level = jnp.round(divided(x, scale))
    lowest = -127 if zero_point is None else -128
    return jnp.clip(level if zero_point is None else level + zero_point, lowest, 127).astype(jnp.int8)


def product(x: Array, w: Weight, grid: Grid) -> Array:
    """`x @ w` of rows, in their dtype."""
    scale, zero_point = grid
    y = lax.dot(codes(x.astype(jnp.float32), grid), w.values, preferred_element_type=jnp.int32)
    if zero_point is not None and w.sums is not None:
        y = y - zero_point.astype(jnp.int32) * w.sums
    nan = jnp.sum(jnp.where(jnp.isfinite(x), np.float32(0), np.float32(np.nan)), -1, keepdims=True)
    return (y.astype(jnp.float32) * ((scale + nan) * w.scale)).astype(x.dtype)


def in_rows(f: Callable[[Array], Array], x: Array) -> Array:
    """`f` of x as a matrix, whose result has the leading axes of x."""
    return f(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def weight_only(x: Array, w: Weight) -> Array:
    y = lax.dot_general(
        x, w.values.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return (y * w.scale.reshape(*[1] * (x.ndim - 1), -1)).astype(x.dtype)


# What is made of an input without a grid that is given.
GRIDS: dict[str, Callable[[Array], Grid]] = {
    "dynamic": symmetric,
    "per token": functools.partial(symmetric, axis=-1),
    "dynamic affine": affine,
}


def served(kind: str, x: Array, w: Weight, given: Grid) -> Array:
    """A product with a frozen weight, of a kind of GRIDS, or with the grid that is given."""
    if kind == "weight-only":
        return weight_only(x, w)
    return in_rows(lambda x: product(x, w, GRIDS[kind](x.astype(jnp.float32)) if kind in GRIDS else given), x)


# ---- Training: both operands quantized in the step, the gradient of the products at the quantized values.


def trained(x: Array, w: Array, kind: str = "dynamic") -> Array:
    return in_rows(lambda x: _trained(kind, x, w), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _trained(kind: str, x: Array, w: Array) -> Array:
    return _forward(kind, x, w)[0]


def _forward(kind: str, x: Array, w: Array) -> tuple[Array, tuple]:
    real, weight = x.astype(jnp.float32), w.astype(jnp.float32)
    grid, (step, _) = GRIDS[kind](real), symmetric(weight, 0)
    values = codes(weight, (step, None))
    sums = None
    if grid[1] is not None:  # a product with a tile of ones: a reduction takes a TPU ten times as long
        ones = jnp.ones((8, w.shape[0]), jnp.int8)
        sums = lax.dot(ones, values, preferred_element_type=jnp.int32)[:1]
    frozen = Weight(values, step, sums)
    return product(x, frozen, grid), (codes(real, grid), grid, frozen)


def _backward(kind: str, residuals: tuple, g: Array) -> tuple[Array, Array]:
    x, (scale, zero_point), w = residuals
    centred = x.astype(jnp.float32) - (0 if zero_point is None else zero_point)
    to_x = g @ (w.values.astype(jnp.float32) * w.scale).T.astype(g.dtype)
    return to_x, ((centred * scale).T @ g.astype(jnp.float32)).astype(g.dtype)


_trained.defvjp(_forward, _backward)


# ---- Training that keeps the integers of an input, or itself where its range is given, and of a weight nothing.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def remembered(x: Array, w: Array, given: float | None) -> Array:
    """`x @ w` in int8: a scale for each token, or one that is given; scales of the gradient's products multiply g."""
    return _remembered(x, w, given)[0]


def _remembered(x: Array, w: Array, given: float | None) -> tuple[Array, tuple]:
    grid = symmetric(x.astype(jnp.float32), -1) if given is None else (jnp.float32(given), None)
    of_w, of_x = symmetric(w.astype(jnp.float32), 0), codes(x.astype(jnp.float32), grid)
    y = jnp.matmul(of_x, codes(w.astype(jnp.float32), of_w), preferred_element_type=jnp.int32)
    return (y.astype(jnp.float32) * (grid[0] * of_w[0])).astype(x.dtype), (of_x if given is None else x, grid[0], w)


def _remembered_backward(given: float | None, kept: tuple, g: Array) -> tuple[Array, Array]:
    of_x, scale, w = kept
    of_w = symmetric(w.astype(jnp.float32), 0)
    inside = None
    if given is not None:
        inside = jnp.abs(of_x.astype(jnp.float32)) < scale * 127.5
        of_x = codes(of_x.astype(jnp.float32), (scale, None))
    to_x = (g * of_w[0].reshape(-1).astype(g.dtype)) @ codes(w.astype(jnp.float32), of_w).T.astype(g.dtype)
    to_w = jnp.einsum("...k,...n->kn", of_x.astype(g.dtype), g * scale.astype(g.dtype))
    return to_x if inside is None else jnp.where(inside, to_x, 0), to_w.astype(w.dtype)


remembered.defvjp(_remembered, _remembered_backward)
