# SPDX-License-Identifier: Apache-2.0
"""Quantized contractions as one would write them into a model by hand: NumPy, int64, no jaxquant.

The numbers are made on the host, where no compiler rewrites a division, one IEEE operation at a time. So a model that
uses them can be compiled, and what stands around them is compiled as in the model that is quantized.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

F = np.float32


class Grid(NamedTuple):
    """Integers of so many bits; one scale for all values, or one for those along the contracted axes alone."""

    bits: int = 8
    affine: bool = False
    whole: bool = False


def levels(v, grid, contracted):
    """Of the values: integers less their zero point, the scale of each group, and whether they are not clipped."""
    v = np.asarray(v).astype(F)
    over = None if grid.whole else contracted
    finite = np.isfinite(v)
    low = np.min(v, over, keepdims=True, initial=0, where=finite)
    high = np.max(v, over, keepdims=True, initial=0, where=finite)
    qmax = 2 ** (grid.bits - 1) - 1
    qmin = -qmax - grid.affine
    scale = (high - low) / F(qmax - qmin) if grid.affine else np.maximum(-low, high) / F(qmax)
    scale = np.where(scale > 0, scale, F(1))
    zero = F(qmin) - np.rint(low / scale) if grid.affine else F(0)
    level = np.rint(np.where(np.isnan(v), F(0), v) / scale) + zero
    return (np.clip(level, qmin, qmax) - zero).astype(np.int64), scale, (qmin <= level) & (level <= qmax) & ~np.isnan(v)


def contracted_axes(equation):
    """Of each operand of an einsum, the axes that the result does not have."""
    operands, result = equation.split("->")
    return [tuple(i for i, axis in enumerate(names) if axis not in result) for names in operands.split(",")]


def exact(equation, grids, *operands):
    """The contraction in int64, scaled once, NaN where NaN or infinity enters; then the real values and the masks."""
    qs = [levels(v, grid, axes) for v, grid, axes in zip(operands, grids, contracted_axes(equation), strict=True)]
    (a, a_scale, _), (b, b_scale, _) = qs
    y = np.einsum(equation, a, b).astype(F) * np.einsum(equation, a_scale, b_scale)
    hit = [(~np.isfinite(np.asarray(v).astype(F))).astype(int) for v in operands]
    reached = np.einsum(equation, hit[0], np.ones_like(b)) + np.einsum(equation, np.ones_like(a), hit[1])
    y = np.where(reached, F(np.nan), y)
    return y, *(q.astype(F) * scale for q, scale, _ in qs), *(mask for *_, mask in qs)


WHOLE, CHANNEL = Grid(affine=True, whole=True), Grid()


def exactly(x, w, grids=(WHOLE, CHANNEL)):
    """The product of rows and a kernel (in, out), alone."""
    return exact("bi,io->bo", grids, x, w)[0]


def _on_host(equation, grids, x, w):
    struct = jax.ShapeDtypeStruct
    y = jax.eval_shape(functools.partial(jnp.einsum, equation), x, w)
    shapes = struct(y.shape, F), *(struct(v.shape, F) for v in (x, w)), *(struct(v.shape, bool) for v in (x, w))
    y32, xq, wq, *masks = jax.pure_callback(
        functools.partial(exact, equation, grids), shapes, x, w, vmap_method="sequential"
    )
    return y32.astype(y.dtype), (xq.astype(x.dtype), wq.astype(w.dtype), masks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def einsum(equation, grids, x, w):
    """`jnp.einsum` of two operands on their grids, in integers; its gradient is that of the real values."""
    return _on_host(equation, grids, x, w)[0]


def _backward(equation, grids, residuals, g):
    *real, masks = residuals
    gradients = jax.vjp(functools.partial(jnp.einsum, equation, precision="highest"), *real)[1](g)
    return tuple(jnp.where(mask, d, 0) for mask, d in zip(masks, gradients, strict=True))


einsum.defvjp(_on_host, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def real(grid, contracted, v):
    """The real values alone, straight through: what is quantized beside an operand in float."""
    host = lambda v: (lambda q, scale, _: q.astype(F) * scale)(*levels(v, grid, contracted))
    return jax.pure_callback(host, jax.ShapeDtypeStruct(v.shape, F), v, vmap_method="sequential").astype(v.dtype)


real.defvjp(lambda grid, contracted, v: (real(grid, contracted, v), None), lambda grid, contracted, _, g: (g,))


def patches(x, height, width):
    """(n, h, w, i) -> (n, h, w, height * width * i): what a window sees that is centred on each pixel, 0 outside."""
    h, w = x.shape[1:3]
    pad = lambda size: ((size - 1) // 2, size // 2)
    x = jnp.pad(x, ((0, 0), pad(height), pad(width), (0, 0)))
    return jnp.concatenate([x[:, i : i + h, j : j + w] for i in range(height) for j in range(width)], -1)


def conv(grids, x, kernel):
    """A convolution with stride 1 and "SAME" padding, NHWC and HWIO, as an einsum of windows."""
    height, width, _, out = kernel.shape
    return einsum("nhwk,ko->nhwo", grids, patches(x, height, width), kernel.reshape(-1, out))
