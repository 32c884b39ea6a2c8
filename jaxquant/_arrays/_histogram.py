# SPDX-License-Identifier: Apache-2.0
"""A histogram of fixed bins, for percentiles over many batches."""

import functools
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from .._base import _checks as checks
from .._base import _numerics as num
from .._base._checks import PyTree
from .._spec._spec import QuantSpec, checked_spec, qparams_shape
from ._range import Range, for_each, no_nonfinite, rows_of

_FRACTION_BITS = 5
_BINS = 2 ** (9 + _FRACTION_BITS)


class Histogram(NamedTuple):
    """The counts of values in 16,384 bins, which are the same for all data, so that merging is adding.

    Attributes:
      counts: uint32, of the shape of the scale and then the bins, which are in the order of their values. A bin holds
        the float32 numbers of equal sign, exponent and first five bits of the fraction, and is 2.2 to 3.2 % wide.
    """

    counts: Array

    def merged(self, other: "Histogram") -> "Histogram":
        """The histogram of the values of both."""
        for name, h in (("a", self), ("b", other)):
            _checked_counts(name, h)
        checks.shape("b", other.counts, self.counts.shape, "the shape of `a`")
        return Histogram(*added_counts(self.counts, other.counts))


@functools.partial(jax.jit, static_argnames="spec")
def _histogram(x: Array, spec: QuantSpec) -> Histogram:
    shape = qparams_shape(spec, x.shape)
    rows = rows_of(num.upcast(x, num.compute_dtype(x.dtype)).astype(jnp.float32), shape)
    bits = lax.bitcast_convert_type(rows, jnp.int32)
    size = (bits & 0x7FFFFFFF) >> (23 - _FRACTION_BITS)
    half = _BINS // 2
    first = _BINS * jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    index = jnp.where(bits < 0, half - 1 - size, half + size) + first
    index = jnp.where(jnp.abs(rows) < jnp.inf, index, rows.shape[0] * _BINS)
    counts = jnp.zeros(rows.shape[0] * _BINS, jnp.uint32).at[index.ravel()].add(1, mode="drop")
    return Histogram(counts.reshape(*shape, _BINS))


def histogram(x: ArrayLike, spec: QuantSpec, *, nonfinite: str = "ignore") -> Histogram:
    """Counts real values in bins that are the same for all data, for percentiles over many batches.

    Args:
      x: floating array of any shape.
      spec: QuantSpec, static; its granularity says which values are counted together.
      nonfinite: static. "ignore" leaves NaN and infinities out; "raise" raises for them, and needs a concrete `x`.

    Returns:
      Histogram, 64 KiB for each group, whatever x is. Add batches by `merge`; under `shard_map` add shards by
      `lax.psum`, which holds up to 2 ** 32 - 1 values in a bin.

    Gradient: none; counts are integers.

    Raises:
      TypeError: for an `x` that is no floating array, or traced with nonfinite="raise".
      ValueError: for a granularity that does not fit, or values that are not finite where that was asked for.

    Source: the histogram observers of calibration schemes; here with fixed logarithmic bins, so that merging is exact.

    >>> import jax.numpy as jnp
    >>> from jaxquant import activation_spec, histogram
    >>> histogram(jnp.array([-1.0, 3.0, jnp.nan]), activation_spec()).counts.sum().item()
    2
    """
    x = checks.float_array("x", x)
    no_nonfinite(x, nonfinite)
    return _histogram(x, checked_spec(spec))


@jax.jit
def added_counts(a: Array, b: Array, *others: tuple[Array, Array]) -> tuple[Array, ...]:
    """The sums of pairs of counts, uint32, which are halved where one of the first, along the last axis, has no room.

    Rounded up, so that what was counted is not forgotten.
    """
    half = jnp.maximum(a, b).max(-1, keepdims=True) >> 31
    sizes = [half] + [half[..., 0] if own.ndim < a.ndim else half for own, _ in others]
    halved = lambda v, half: (v >> half) + (v & half)
    total = lambda a, b: jnp.where(a + b < a, np.uint32(2**32 - 1), a + b)
    return tuple(total(halved(a, half), halved(b, half)) for (a, b), half in zip(((a, b), *others), sizes, strict=True))


def _checked_counts(name: str, h: Histogram) -> None:
    counts = h.counts
    if not checks.is_array(counts) or counts.dtype != np.uint32:
        raise TypeError(
            f"`{name}` must be a Histogram of uint32 counts, got {checks.kind(counts)}. Make one by histogram(x, spec)."
        )
    if counts.shape[-1:] != (_BINS,):
        raise ValueError(
            f"`{name}` must be a Histogram of {_BINS} bins, got counts of shape {counts.shape}. "
            "Make one by histogram(x, spec)."
        )


class _Wide(NamedTuple):
    """Counts beyond uint32: `high * 2 ** 16 + low`, with low < 2 ** 16."""

    high: Array
    low: Array

    @staticmethod
    def of(high: Array, low: Array) -> "_Wide":
        return _Wide(high + (low >> 16), low & 0xFFFF)

    @staticmethod
    def cumsum(counts: Array) -> "_Wide":
        return _Wide.of(*(jnp.cumsum(v, axis=-1, dtype=jnp.uint32) for v in (counts >> 16, counts & 0xFFFF)))

    def at(self, i: int) -> "_Wide":
        return _Wide(*(v[..., i, None] for v in self))

    def minus(self, other: "_Wide") -> "_Wide":
        borrows = (self.low < other.low).astype(jnp.uint32)
        return _Wide(self.high - other.high - borrows, self.low + (borrows << 16) - other.low)

    def times(self, share: float) -> "_Wide":
        """As float32 has the product, rounded down; no more than this."""
        product = jnp.floor((self.high.astype(jnp.float32) * 2**16 + self.low.astype(jnp.float32)) * share)
        high = jnp.floor(product / 2**16)
        part = _Wide.of(high.astype(jnp.uint32), (product - high * 2**16).astype(jnp.uint32))
        return _Wide(*(jnp.where(part.is_above(self), whole, v) for v, whole in zip(part, self, strict=True)))

    def is_above(self, other: "_Wide") -> Array:
        return (self.high > other.high) | ((self.high == other.high) & (self.low > other.low))


@functools.partial(jax.jit, static_argnames="outside")
def _range_of_counts(counts: Array, outside: float) -> Range:
    seen = _Wide.cumsum(counts)
    count = seen.at(-1)
    last = count.minus(_Wide(jnp.uint32(0), (count.high | count.low != 0).astype(jnp.uint32)))
    beyond = last.times(outside)
    bin_of = lambda rank: jnp.argmax(seen.is_above(rank), -1).astype(jnp.int32)
    half, rest = _BINS // 2, 23 - _FRACTION_BITS

    def edge(index, upper):
        negative = index < half
        size = jnp.where(negative, half - 1 - index, index - half)
        outer = (negative != upper).astype(jnp.int32) * (2**rest - 1)
        magnitude = lax.bitcast_convert_type((size << rest) + outer, jnp.float32)
        return jnp.where(negative, -magnitude, magnitude)

    empty = (count.high | count.low)[..., 0] == 0
    x_min, x_max = edge(bin_of(beyond), False), edge(bin_of(last.minus(beyond)), True)
    return Range(jnp.where(empty, jnp.inf, x_min), jnp.where(empty, -jnp.inf, x_max))


def range_from_histogram(h: Histogram | Mapping[str, Histogram], percentile: float = 99.9) -> PyTree:
    """The range that holds `percentile` percent of the counted values, as many cut off below as above.

    Args:
      h: Histogram, or dict of them.
      percentile: static number in (0, 100].

    Returns:
      Range of float32 in the shape of the scale, or a dict of them like `h`. The ends are the outer edges of the bins
      of the two values, at most 3.2 % beyond these; (inf, -inf) where nothing was counted.

    Gradient: none.

    Raises:
      TypeError: for anything but a Histogram or dict of them, or a percentile that is no static number.
      ValueError: for a percentile outside (0, 100].

    Warns outside of jit where some values exceed the range more than tenfold.

    Source: as `histogram`.

    >>> import jax.numpy as jnp
    >>> from jaxquant import activation_spec, histogram, range_from_histogram
    >>> range_from_histogram(histogram(jnp.arange(1000.0), activation_spec()), 90.0).x_max.item()
    959.9999389648438
    """
    outside = (100 - checks.percentage("percentile", percentile)) / 200

    def of(h: Histogram) -> Range:
        _checked_counts("h", h)
        return _range_of_counts(h.counts, outside)

    ranges = for_each(of, Histogram, "range_from_histogram", h=h)
    for name, one in h.items() if isinstance(h, Mapping) else [("h", h)]:
        r = ranges[name] if isinstance(h, Mapping) else ranges
        if isinstance(one, Histogram) and not isinstance(one.counts, jax.core.Tracer):
            _warn_of_massive(name, np.maximum(np.abs(r.x_min), np.abs(r.x_max)), np.asarray(one.counts), percentile)
    return ranges


def _warn_of_massive(name: str, end: np.ndarray, counts: np.ndarray, percentile: float) -> None:
    """Warns of a range that counted values exceed more than tenfold: language models live on such."""
    bins = np.abs(np.arange(_BINS) - (_BINS - 1) / 2).astype(np.int32)  # of magnitudes, from 0
    largest = (np.where(counts > 0, bins, 0).max(-1) << (23 - _FRACTION_BITS)).view(np.float32)
    cut = end * 10 < largest
    if cut.any():
        at = np.unravel_index(np.argmax(np.where(cut, largest, 0)), largest.shape)
        warnings.warn(
            f"`percentile` {percentile} cuts {name!r}, which reaches {largest[at]:.4g}, off at {end[at]:.3g}. "
            "A language model lives on massive values: report(q, ...) says what that costs; PerToken() clips none.",
            stacklevel=3,
        )
