# SPDX-License-Identifier: Apache-2.0
"""What the kernels of a runtime compute between integers of 8 bits, as functions of integers and grids."""

import abc
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._base import _numerics as num
from .._platform import _division

# Accumulators wrap, so that a bias near the limits of int32 would change its sign. As litert-converter limits it.
BIAS_LIMIT = 2**30


def divide(a: Array | np.floating, b: Array | np.floating) -> Array:
    """The correctly rounded quotient of float32 numbers that broadcast."""
    return _division.divide(*jnp.broadcast_arrays(jnp.asarray(a), jnp.asarray(b)))


class Grid(NamedTuple):
    """The grid of integers of 8 bits: they stand for `(integer - zero_point) * scale`.

    Attributes:
      scale: positive normal float32, of size 1; of a weight one for each channel, as it broadcasts in the output.
      zero_point: int32, of the shape of the scale.
      qmin, qmax: static ints, -128 and 127, or 0 and 255.
    """

    scale: Array
    zero_point: Array
    qmin: int = -128
    qmax: int = 127

    def at(self, steps: Array, limits: "Limits | None" = None) -> Array:
        """The integer so many steps from the zero point, within the grid, and within the limits of an activation.

        Steps are int32, or float32 and whole.
        """
        low, high = (jnp.asarray(v, steps.dtype) for v in limits or (self.qmin, self.qmax))
        return lax.min(
            *jnp.broadcast_arrays(jnp.maximum(steps + self.zero_point.astype(steps.dtype), low), high)
        ).astype(jnp.int32)


class Limits(NamedTuple):
    """The least and the largest integer of a relu or relu6."""

    low: Array | int
    high: Array | int


def limits_of(grid: Grid, low: float | None, high: float | None) -> Limits:
    """The limits of an activation that clips real values to `low` and `high`; None is no limit.

    Integers of the limits are rounded with halves up, as LiteRT does; limits beyond the grid are its ends.
    """
    of = lambda v: grid.at(num.round_half_up(divide(np.float32(v), grid.scale)))
    return Limits(grid.qmin if low is None else of(low), grid.qmax if high is None else of(high))


def bias_integers(bias: Array, x_scale: Array, w_scale: Array) -> Array:
    """The int32 that runtimes add to an accumulator: `rint(bias / (x_scale * w_scale))`, in 48 bits.

    At most 2**30 in magnitude: an accumulator that is larger wraps. The three broadcast; scales are normal float32.
    These are the integers of float64 but where a quotient lies within 2**-40 of it beside a tie.

    Source: litert-converter, which computes them in float64.
    """
    bias = jnp.asarray(bias, jnp.float32)
    unit, lost = two_product(x_scale, w_scale)
    quotient = jnp.clip(divide(bias, unit), -BIAS_LIMIT, BIAS_LIMIT)
    nearly, error = two_product(quotient, unit)
    rest = divide((bias - nearly) - error - num.guard(quotient * lost), unit)
    whole = num.round_half_even(quotient)
    steps = whole.astype(jnp.int32) + num.round_half_even((quotient - whole) + rest).astype(jnp.int32)
    return jnp.where(lax.abs(quotient) < BIAS_LIMIT, steps, quotient.astype(jnp.int32))


def apart(v: Array) -> tuple[Array, Array]:
    """A float32 as the sum of two numbers of 12 bits: products of such are exact, whatever a compiler makes of them."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(v, jnp.uint32) & np.uint32(0xFFFFF000), jnp.float32)
    return high, v - high


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """`a * b` in float32, and its error."""
    (a_high, a_low), (b_high, b_low) = apart(a), apart(b)
    product = num.guard(a * b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def least_scale(bias: Array, x_scale: Array) -> Array:
    """The least scale of a weight beside which the bias of its channel, as an int32, is not clipped.

    A channel that is dead has weights near 0, and its scale would be near 1e-11.
    """
    return num.guard(divide(lax.abs(bias), x_scale)) * np.float32((1 + 2**-20) / BIAS_LIMIT)


def multiplier(x_scale: Array, w_scale: Array, y_scale: Array) -> Array:
    """The float32 factor from an accumulator to the result: a product and a quotient, each rounded, in this order."""
    return divide(num.guard(x_scale * w_scale), y_scale)


def requantized(acc: Array, factor: Array, grid: Grid, limits: Limits | None = None) -> Array:
    """`clip(rint(float32(acc) * factor) + zero_point)`: one rounding of a product."""
    return grid.at(num.round_half_even(acc.astype(jnp.float32) * factor), limits)


class Kernels(abc.ABC):
    """The kernels of one runtime. All integers are int32, and all scales may be traced.

    Attributes:
      name: that `quantize_fn(runtime=)` takes.
      tied: the ops whose result must have the grid of their operand.
      regrids: whether a value on one grid may be put on another, as what one turn of a scan hands to the next.
    """

    name: str
    tied: frozenset[str]
    regrids: bool = False

    def quantize(self, x: Array, grid: Grid, levels: Array) -> Array:
        """The integers of float32 values; `levels` are from `jaxquant.quantize`, `rint(x / scale) + zero_point`."""
        return levels

    @abc.abstractmethod
    def layer(
        self, acc: Array, scales: tuple[Array, Array], grid: Grid, limits: Limits | None, is_dense: bool
    ) -> Array:
        """The result of a convolution or a dense layer, from the sum of products and bias, and both scales."""

    @abc.abstractmethod
    def add(self, a: Array, a_grid: Grid, b: Array, b_grid: Grid, grid: Grid, limits: Limits | None) -> Array:
        """The sum of two arrays."""

    @abc.abstractmethod
    def mean(self, x: Array, axes: tuple[int, ...], x_grid: Grid, grid: Grid) -> Array:
        """The mean over some axes, which are not kept."""

    @abc.abstractmethod
    def average(self, sums: Array, count: int, x_grid: Grid, grid: Grid) -> Array:
        """The averages of windows of `count` values, from the sums of their integers."""
