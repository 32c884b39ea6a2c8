# SPDX-License-Identifier: Apache-2.0
"""Quantization errors of an array, in sums that merge over batches, layers and devices."""

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._base._groups import broadcast_groups
from .._base._sharding import replicated
from .._spec._spec import QuantSpec
from ._affine import quantize
from ._histogram import added_counts
from ._qarray import QArray, outside, real_values
from ._qparams import QParams
from ._straight_through import OfTensor, quantize_straight_through

_COUNTED_BITS = 8  # levels are counted up to here


class Tally(NamedTuple):
    """Quantization errors of an array. Values that are not finite are left out.

    Attributes:
      size: uint32, how many values there are.
      signal: float32, the sum of their squares.
      noise: float32, the sum of the squares of their errors.
      max_error: float32, the largest error.
      clipped: uint32, the values that lie more than half a step beyond the last level.
      levels: uint32[2 ** bits], how many values have each level, 2 ** 8 for floats; of no size above 8 bits.
      largest: float32, the largest magnitude.
      place: uint32, where it is in the array, counted over all axes; over devices, in its part of the array.
    """

    size: Array
    signal: Array
    noise: Array
    max_error: Array
    clipped: Array
    levels: Array
    largest: Array
    place: Array

    def merged(self, other: "Tally") -> "Tally":
        """The tally of the values of both; counts are halved together where there are more than 2 ** 31."""
        counts = zip(*((t.size[..., None], t.clipped, t.levels) for t in (self, other)), strict=True)
        size, clipped, levels = added_counts(*next(counts), *counts)
        sums = self.signal + other.signal, self.noise + other.noise, jnp.maximum(self.max_error, other.max_error)
        place = jnp.where(other.largest > self.largest, other.place, self.place)
        return Tally(size[..., 0], *sums, clipped, levels, jnp.maximum(self.largest, other.largest), place)


def to_nearest(spec: QuantSpec) -> QuantSpec:
    """The spec itself, or to nearest in place of stochastic rounding, whose error is another one in each step."""
    return dataclasses.replace(spec, rounding="half_even") if spec.rounding == "stochastic" else spec


@functools.partial(jax.jit, static_argnames=("spec",))
def tally(x: Array, spec: QuantSpec, qparams: QParams | OfTensor | None = None) -> Tally:
    """The tally of one array, rounded to nearest."""
    spec, (x, qparams) = to_nearest(spec), jax.tree.map(replicated, (x, qparams))
    if isinstance(qparams, OfTensor):
        q = outside(quantize_straight_through(x, spec, None, None, qparams)[1])
    else:
        q = quantize(x, spec, qparams)
    x, real = x.astype(jnp.float32), real_values(q, jnp.dtype(jnp.float32))
    finite = jnp.isfinite(x)
    count = lambda mask: jnp.sum(mask, dtype=jnp.uint32)
    error, size = jnp.where(finite, jnp.abs(real - x), 0), jnp.where(finite, jnp.abs(x), 0)
    last = (q.values == spec.qmin) | (q.values == spec.qmax)
    half = broadcast_groups(q.step, q.shape) * (spec.levels.last_step / 2)
    width = _COUNTED_BITS if spec.format else spec.bits
    levels = jnp.zeros(2**width if width <= _COUNTED_BITS else 0, jnp.uint32)
    if levels.size:
        levels = levels.at[_level_number(q)].add(finite.astype(jnp.uint32))
    return Tally(
        count(finite),
        jnp.sum(jnp.where(finite, x * x, 0)),
        jnp.sum(error * error),
        jnp.max(error, initial=0.0),
        count(finite & last & (error > half * (1 + 1e-5))),
        levels,
        jnp.max(size, initial=0.0),
        jnp.argmax(size).astype(jnp.uint32) if x.size else jnp.uint32(0),
    )


def _level_number(q: QArray) -> Array:
    """The number of the level of each value, from 0; of floats by their bits, one zero alone."""
    if not q.spec.format:
        return q.values.astype(jnp.int32) + (2 ** (q.spec.bits - 1) if q.spec.signed else 0)
    # XLA bitcasts whole bytes alone, and float4 is half of one.
    values = q.values.astype(jnp.float8_e4m3fn if jnp.finfo(q.spec.dtype).bits < 8 else q.spec.dtype)
    return jnp.where(values == 0, 0, lax.bitcast_convert_type(values, jnp.uint8)).astype(jnp.int32)


def tally_across(t: Tally, axes: Collection[str]) -> Tally:
    """The tally of the devices along axes of a mesh."""
    axes = tuple(axes)
    max_error, largest = (lax.pmax(v, axes) for v in (t.max_error, t.largest))
    place = lax.pmax(jnp.where(t.largest == largest, t.place, 0), axes)
    summed = Tally(*(lax.psum(v, axes) for v in t))
    return summed._replace(max_error=max_error, largest=largest, place=place)


def sqnr(t: Tally) -> float:
    """The signal-to-quantization-noise ratio in decibels; inf without noise, NaN without a signal."""
    return decibels(float(t.signal), float(t.noise))


def decibels(signal: float, noise: float) -> float:
    """The ratio of two sums of squares in decibels; inf without noise, NaN without a signal."""
    if not signal:
        return math.nan
    return 10 * math.log10(signal / noise) if noise else math.inf
