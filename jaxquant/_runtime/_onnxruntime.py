# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's kernels for a CPU."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._base import _numerics as num
from ._kernels import Grid, Kernels, Limits, apart, divide, multiplier, requantized


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """`a + b` in float32, and its error."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def fused(factor: Array, integers: Array, addend: Array) -> Array:
    """`factor * integers + addend` with one rounding, of float32 numbers and float32 integers of at most 9 bits.

    Both parts of the product are exact, so that no compiler changes them; what both sums lose is added at the end.
    """
    high, low = apart(factor)
    of_product, lost = two_sum(integers * high, integers * low)
    total, error = two_sum(of_product, addend)
    return total + (error + lost)


class OnnxRuntime(Kernels):
    """ONNX Runtime 1.32 on x86 with AVX2 and FMA: QLinearConv, QGemm, QLinearAdd, QLinearGlobalAveragePool.

    Tested with 8-bit integers over all of their range, scales at random and near ties. Without VNNI products of
    unsigned with signed bytes saturate, unless the session option `session.x64quantprecision` is "1".
    """

    name = "onnxruntime"
    regrids = True
    tied = frozenset({"max_pool", "concatenate"})

    def layer(
        self, acc: Array, scales: tuple[Array, Array], grid: Grid, limits: Limits | None, is_dense: bool
    ) -> Array:
        return requantized(acc, multiplier(*scales, grid.scale), grid, limits)

    def add(self, a: Array, a_grid: Grid, b: Array, b_grid: Grid, grid: Grid, limits: Limits | None) -> Array:
        """`rint(a_scale / scale * a + (b_scale / scale * b + c))` of uint8, by two fused multiply-adds."""
        unsigned = lambda v: (v - grid.qmin).astype(jnp.float32)
        of_a, of_b = (divide(of.scale, grid.scale) for of in (a_grid, b_grid))
        zeros = fused(of_a, unsigned(a_grid.zero_point), num.guard(of_b * unsigned(b_grid.zero_point)))
        fixed = unsigned(grid.zero_point) - zeros
        total = num.round_half_even(fused(of_a, unsigned(a), fused(of_b, unsigned(b), fixed)))
        return grid._replace(zero_point=jnp.int32(grid.qmin)).at(total, limits)

    def mean(self, x: Array, axes: tuple[int, ...], x_grid: Grid, grid: Grid) -> Array:
        return self.average(jnp.sum(x, axes), math.prod(x.shape[i] for i in axes), x_grid, grid)

    def average(self, sums: Array, count: int, x_grid: Grid, grid: Grid) -> Array:
        """`rint(float32(sum) * float32(x_scale / float32(scale * count)))`."""
        factor = divide(x_grid.scale, num.guard(grid.scale * np.float32(count)))
        return requantized(sums - count * x_grid.zero_point, factor, grid)
