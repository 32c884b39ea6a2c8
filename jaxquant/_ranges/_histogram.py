# SPDX-License-Identifier: Apache-2.0
"""A histogram of fixed bins, for percentiles over many batches."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .. import _checks as checks
from .. import _numerics as num
from .._spec import QuantSpec, checked_spec, qparams_shape
from ._range import Range, for_each, no_nonfinite, rows_of

_FRACTION_BITS = 5
_BINS = 2 ** (9 + _FRACTION_BITS)


class Histogram(NamedTuple):
    """How many values fell into each of 16,384 bins that are the same for all data, so that merging is adding.

    Attributes:
      counts: uint32, of the shape of the scale and then the bins, which are in the order of their values. A bin holds
        the float32 numbers of equal sign, exponent and first five bits of the fraction, and is 2.2 to 3.2 % wide.
    """

    counts: Array


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


def histogram(x: Any, spec: QuantSpec, *, nonfinite: str = "ignore") -> Histogram:
    """Counts real values in bins that are the same for all data, for percentiles over many batches.

    Args:
      x: floating array of any shape.
      spec: QuantSpec, static; its granularity says which values are counted together.
      nonfinite: static. "ignore" leaves NaN and infinities out; "raise" raises for them, and needs a concrete `x`.

    Returns:
      Histogram, 64 KiB for each group, whatever x is. Add batches by `merge_histograms`; under `shard_map` add shards
      by `lax.psum`. Exact up to 2 ** 32 - 1 values in a group, and wrong beyond.

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


def merge_histograms(a: Any, b: Any) -> Any:
    """The histogram of the values of two: the sum of the counts, associative and commutative.

    Args:
      a, b: Histogram, of one shape; or dicts of them with the same keys.

    Returns:
      Histogram of that shape, or a dict of them like `a`.

    Gradient: none; counts are integers.

    Raises:
      TypeError: for anything but Histograms or dicts of them.
      ValueError: for different keys or shapes.

    Source: as `histogram`.

    >>> import jax.numpy as jnp
    >>> from jaxquant import activation_spec, histogram, merge_histograms
    >>> h = histogram(jnp.ones(3), activation_spec())
    >>> merge_histograms(h, h).counts.sum().item()
    6
    """

    def merged(a: Histogram, b: Histogram) -> Histogram:
        for name, h in (("a", a), ("b", b)):
            _checked_counts(name, h)
        checks.shape("b", b.counts, a.counts.shape, "the shape of `a`")
        return Histogram(a.counts + b.counts)

    return for_each(merged, Histogram, "merge_histograms", a=a, b=b)


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


@functools.partial(jax.jit, static_argnames="outside")
def _range_of_counts(counts: Array, outside: float) -> Range:
    seen = jnp.cumsum(counts, -1, dtype=jnp.uint32)
    count = seen[..., -1:]
    last = jnp.maximum(count, 1) - 1
    beyond = jnp.minimum(jnp.floor(last.astype(jnp.float32) * outside).astype(jnp.uint32), last)
    bin_of = lambda rank: jnp.argmax(seen > rank, -1).astype(jnp.int32)
    half, rest = _BINS // 2, 23 - _FRACTION_BITS

    def edge(index, upper):
        negative = index < half
        size = jnp.where(negative, half - 1 - index, index - half)
        outer = (negative != upper).astype(jnp.int32) * (2**rest - 1)
        magnitude = lax.bitcast_convert_type((size << rest) + outer, jnp.float32)
        return jnp.where(negative, -magnitude, magnitude)

    empty = count[..., 0] == 0
    x_min, x_max = edge(bin_of(beyond), False), edge(bin_of(last - beyond), True)
    return Range(jnp.where(empty, jnp.inf, x_min), jnp.where(empty, -jnp.inf, x_max))


def range_from_histogram(h: Any, percentile: float = 99.9) -> Any:
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

    return for_each(of, Histogram, "range_from_histogram", h=h)
