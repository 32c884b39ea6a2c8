# SPDX-License-Identifier: Apache-2.0
"""Rotation by a Hadamard matrix: large values of a few channels are spread over all of them."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._base import _numerics as num
from .._base._sharding import replicated


def block_of(length: int) -> int:
    """The number of channels that are rotated together: the largest power of two that divides `length`."""
    return length & -length


def hadamard(x: Array, axes: Sequence[int]) -> Array:
    """The channels along some axes, taken as one, times the Hadamard matrix H of Sylvester, with H @ H = 1.

    In blocks of `block_of(channels)`, and in the dtype in which values are quantized: a narrower one would round again,
    and float16 does not hold what many large values sum to. Sums of two, one after the other, and one product at the
    end: the bits of a dot would depend on what stands next to it.
    """
    axes = [axis % x.ndim for axis in axes]
    x = replicated(x, axes)
    if len(axes) == 1:
        return _butterfly(x, axes[0])
    last = range(x.ndim - len(axes), x.ndim)
    moved = jnp.moveaxis(x, axes, last)
    graph = moved.reshape(*moved.shape[: last.start], -1)
    return jnp.moveaxis(_butterfly(graph, graph.ndim - 1).reshape(moved.shape), last, axes)


@functools.partial(jax.jit, static_argnames="axis")
def _butterfly(x: Array, axis: int) -> Array:
    shape, length = x.shape, x.shape[axis]
    block = block_of(length)
    stages = block.bit_length() - 1

    def parts(v: Array, count: int) -> Sequence[Array]:
        of_parts = *shape[:axis], length // block, block // count, count, *shape[axis + 1 :]
        return lax.split(v.reshape(of_parts), (1,) * count, axis + 2)  # whose gradient is a butterfly, too

    def two_stages(_, v: Array) -> Array:
        a, b, c, d = parts(v, 4)
        left, right = (a + b, a - b), (c + d, c - d)
        both = [*map(jnp.add, left, right), *map(jnp.subtract, left, right)]
        return lax.concatenate(both, axis + 1).reshape(shape)

    v = num.guard(x).astype(num.compute_dtype(x.dtype))
    if stages % 2:
        a, b = parts(v, 2)
        v = lax.concatenate([a + b, a - b], axis + 1).reshape(shape)
    if stages > 1:  # a loop of no turns would be traced all the same
        v = lax.fori_loop(0, stages // 2, two_stages, v)
    return num.guard(v * block**-0.5)
