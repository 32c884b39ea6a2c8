# SPDX-License-Identifier: Apache-2.0
"""LiteRT's kernels: XNNPACK's, by which it runs on a CPU, and the reference kernels, as for microcontrollers."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._base import _numerics as num
from . import _wide as wide
from ._kernels import Grid, Kernels, Limits, divide, multiplier, requantized

_TIED = frozenset({"max_pool", "average_pool", "concatenate"})


def _average(sums: Array, count: int, grid: Grid) -> Array:
    """AVERAGE_POOL_2D of all kernels of LiteRT: integer division, halves away from 0; one grid on both sides."""
    half = count // 2
    average = jnp.where(sums > 0, (sums + half) // count, -((half - sums) // count))
    return grid._replace(zero_point=jnp.int32(0)).at(average)


class Xnnpack(Kernels):
    """LiteRT 2.3 with XNNPACK, which is its default on a CPU."""

    name = "litert"
    tied = _TIED | {"mean"}  # of two grids, its float sum has halves that no formula of float32 has

    def quantize(self, x: Array, grid: Grid, levels: Array) -> Array:
        """`rint(x * float32(1 / scale)) + zero_point`."""
        return grid.at(num.round_half_even(x * divide(np.float32(1), grid.scale)))

    def layer(
        self, acc: Array, scales: tuple[Array, Array], grid: Grid, limits: Limits | None, is_dense: bool
    ) -> Array:
        return requantized(acc, multiplier(*scales, grid.scale), grid, limits)

    def add(self, a: Array, a_grid: Grid, b: Array, b_grid: Grid, grid: Grid, limits: Limits | None) -> Array:
        """ADD: multipliers of 20 bits, one shift, halves up."""
        of_a, of_b = (divide(of.scale, grid.scale) for of in (a_grid, b_grid))
        shift = 20 - num.floor_log2(jnp.maximum(of_a, of_b))
        by_a, by_b = (
            num.round_half_even(v * num.power_of_two(shift, jnp.float32)).astype(jnp.int32) for v in (of_a, of_b)
        )
        fixed = (1 << (shift - 1)) - by_a * a_grid.zero_point - by_b * b_grid.zero_point
        return grid.at((fixed + a * by_a + b * by_b) >> shift, limits)

    def mean(self, x: Array, axes: tuple[int, ...], x_grid: Grid, grid: Grid) -> Array:
        """MEAN of one grid: `rint(float32(sum) * float32(1 / count) + 0)`."""
        count = math.prod(x.shape[i] for i in axes)
        factor = divide(x_grid.scale, grid.scale)
        offset = grid.zero_point.astype(jnp.float32) - num.guard(x_grid.zero_point.astype(jnp.float32) * factor)
        total = jnp.sum(x, axes).astype(jnp.float32) * divide(factor, np.float32(count))
        return grid._replace(zero_point=jnp.int32(0)).at(num.round_half_even(num.guard(total) + offset))

    def average(self, sums: Array, count: int, x_grid: Grid, grid: Grid) -> Array:
        return _average(sums, count, grid)


def fixed_multiplier(*ratio: tuple[Array, ...]) -> tuple[Array, Array]:
    """The int32 q in [2**30, 2**31) and the shift with a ratio of products of scales = q * 2**(shift - 31).

    The ratio is a float64. As QuantizeMultiplier in tensorflow/lite/kernels/internal/quantization_util.cc.
    """
    bits, exponent = wide.quotient(*ratio)
    high, low = bits.plus(jnp.uint32(1 << 21))
    q, shift = ((high << 10) | (low >> 22)).astype(jnp.int32), exponent + 1
    q, shift = jnp.where(q < 0, 1 << 30, q), jnp.where(q < 0, shift + 1, shift)  # rounded to 2**31
    return jnp.where(shift < -31, 0, q), jnp.where(shift < -31, 0, shift)


def _high_product(a: Array, q: Array) -> Array:
    """`(a * q + 2**30) >> 31`"""
    high, low = wide.product(a, q).plus(jnp.uint32(1 << 30))
    return (high << 1) | (low >> 31).astype(jnp.int32)


def _halved(x: Array, n: Array) -> Array:
    """`x / 2**n` to the nearest, halves away from 0."""
    rest, half = x & ((1 << n) - 1), 1 << jnp.maximum(n - 1, 0)
    return (x >> n) + ((rest >= half + (x < 0).astype(jnp.int32)) & (n > 0)).astype(jnp.int32)


def rounded_twice(acc: Array, q: Array, shift: Array) -> Array:
    """`acc * q * 2**(shift - 31)`: of the product with halves up, then of the shift, halves away from 0."""
    return _halved(_high_product(acc << jnp.maximum(shift, 0), q), jnp.maximum(-shift, 0))


def rounded_once(acc: Array, q: Array, shift: Array) -> Array:
    """The same rounded once, halves up."""
    right = jnp.maximum(-shift, 0)
    total = wide.product(acc << jnp.maximum(shift, 0), q)
    right = jnp.broadcast_to(right, total.high.shape)
    is_low = right < 2
    total = total.plus(jnp.where(is_low, jnp.uint32(1) << (30 + right).astype(jnp.uint32), 0).astype(jnp.uint32))
    high = total.high + jnp.where(is_low, 0, 1 << jnp.maximum(right - 2, 0))
    once = (high << 1) | (total.low >> 31).astype(jnp.int32)
    return jnp.where(right == 0, once, high >> jnp.maximum(right - 1, 0))


class Reference(Kernels):
    """LiteRT 2.3's reference kernels (OpResolverType.BUILTIN_REF), which microcontrollers have, too."""

    name = "litert_reference"
    tied = _TIED

    def quantize(self, x: Array, grid: Grid, levels: Array) -> Array:
        """`x / scale` rounded with halves away from 0."""
        return grid.at(num.round_half_away(divide(x, grid.scale)))

    def layer(
        self, acc: Array, scales: tuple[Array, Array], grid: Grid, limits: Limits | None, is_dense: bool
    ) -> Array:
        """In fixed point: a convolution is rounded twice, a dense layer once."""
        q, shift = fixed_multiplier(scales, (grid.scale,))
        return grid.at((rounded_once if is_dense else rounded_twice)(acc, q, shift), limits)

    def add(self, a: Array, a_grid: Grid, b: Array, b_grid: Grid, grid: Grid, limits: Limits | None) -> Array:
        """ADD: both operands on a grid of 2**-20 of twice the larger scale."""
        twice = 2 * jnp.maximum(a_grid.scale, b_grid.scale)
        on_it = lambda v, of: rounded_twice((v - of.zero_point) << 20, *fixed_multiplier((of.scale,), (twice,)))
        total = on_it(a, a_grid) + on_it(b, b_grid)
        q, shift = fixed_multiplier((twice * np.float32(2**-20),), (grid.scale,))
        return grid.at(rounded_twice(total, q, shift), limits)

    def mean(self, x: Array, axes: tuple[int, ...], x_grid: Grid, grid: Grid) -> Array:
        """MEAN: the number of values, up to 2**10, is divided into the multiplier; of ratios of scales over 2**-20."""
        count = math.prod(x.shape[i] for i in axes)
        q, shift = fixed_multiplier((x_grid.scale,), (grid.scale,))
        q, rest = q // count, q % count
        bits = count.bit_length() - 1
        for _ in range(bits):  # of (q << bits) // count
            rest = rest * 2
            q, rest = q * 2 + (rest >= count).astype(jnp.int32), jnp.where(rest >= count, rest - count, rest)
        total = jnp.sum(x, axes) - count * x_grid.zero_point
        return grid.at(rounded_twice(total, q, shift - bits))

    def average(self, sums: Array, count: int, x_grid: Grid, grid: Grid) -> Array:
        return _average(sums, count, grid)
