# SPDX-License-Identifier: Apache-2.0
"""Rotation by a Hadamard matrix: large values of a few channels are spread over all of them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from . import _numerics as num
from ._sharding import replicated


def block_of(length: int) -> int:
    """How many channels are rotated together: the largest power of two that divides their number."""
    return length & -length


def hadamard(x: Array, axes: Sequence[int]) -> Array:
    """The channels along some axes, taken as one, times the Hadamard matrix H of Sylvester, with H @ H = 1.

    In blocks of `block_of(channels)`. Sums of two, one after the other, and one product at the end: the bits of a dot
    would depend on what stands next to it.
    """
    axes, last = [axis % x.ndim for axis in axes], range(x.ndim - len(axes), x.ndim)
    moved = jnp.moveaxis(replicated(x, axes), axes, last)
    flat = moved.reshape(*moved.shape[: last.start], -1)
    return jnp.moveaxis(_butterfly(flat).reshape(moved.shape), last, axes)


@jax.jit
def _butterfly(x: Array) -> Array:
    shape, block = x.shape, block_of(x.shape[-1])
    of_pairs = *shape[:-1], shape[-1] // block, block // 2, 2

    def stage(_, v: Array) -> Array:
        v = v.reshape(of_pairs)
        a, b = v[..., 0], v[..., 1]
        return lax.concatenate([a + b, a - b], v.ndim - 2).reshape(shape)

    v = num.guard(x).astype(num.compute_dtype(x.dtype))
    v = lax.fori_loop(0, block.bit_length() - 1, stage, v)
    return num.guard(v * block**-0.5).astype(x.dtype)
