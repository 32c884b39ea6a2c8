# SPDX-License-Identifier: Apache-2.0
"""Merges of what batches, shards and processes observe: the union of ranges, and their moving average."""

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .._base import _checks as checks
from .._base import _numerics as num
from .._base._checks import PyTree
from ._range import Range, for_each

T = TypeVar("T")  # a Range, or a dict of them


def merge(*observed: Any) -> PyTree:
    """The merge of observations of batches, shards or processes: the union of ranges, the sum of histograms or Grams.

    Associative and commutative, but for the rounding of the float sums of Grams, so that parts merge in any order. For
    ranges also idempotent, and Range(inf, -inf) is neutral. Where a bin of a histogram has 2 ** 31 values, all counts
    of its group are halved first, on both sides, and rounded up, so that shares stay, and the ends of the range.

    Args:
      *observed: one or more of one kind and shape: Range, Histogram or Gram, or dicts of them with the same keys, as
        `q.observe` gives them.

    Returns:
      One of this kind, or a dict like the first.

    Gradient: of ranges as minimum and maximum, of Grams as a sum, as JAX defines them; counts have none.

    Raises:
      TypeError: for anything else, such as a list of them, and for no argument.
      ValueError: for different keys or shapes.

    Source: the observers of every calibration scheme.

    >>> from jaxquant import Range, merge
    >>> [end.item() for end in merge(Range(-1.0, 2.0), Range(-3.0, 1.0), Range(0.0, 5.0))]
    [-3.0, 5.0]
    """
    if not observed or isinstance(observed[0], list):
        got = "a list" if observed else "none"
        raise TypeError(f"merge takes Ranges, Histograms or Grams, or dicts of them, got {got}. Unpack it: (*values).")
    kind = next((kind for v in observed if hasattr(kind := _kind(v), "merged")), Range)
    if kind is Range:  # merged with itself the first is checked, too, and in float32
        observed = observed[0], *observed
    two = lambda a, b: for_each(lambda a, b: a.merged(b), kind, "merge", a=a, b=b)
    return functools.reduce(two, observed[1:], for_each(lambda a: a, kind, "merge", a=observed[0]))


def _kind(v: Any) -> type:
    """The type of what is observed, under whatever keys."""
    while isinstance(v, Mapping) and v:
        v = next(iter(v.values()))
    return type(v)


@jax.jit
def _ema(a: Range, b: Range, decay: Array) -> Range:
    mean = lambda old, new: num.guard(old * decay) + num.guard(new * (1 - decay))
    nothing = lambda r: r.x_min > r.x_max
    pick = lambda old, new: jnp.where(nothing(b), old, jnp.where(nothing(a), new, mean(old, new)))
    return Range(pick(a.x_min, b.x_min), pick(a.x_max, b.x_max))


def ema_ranges(a: T, b: T, decay: ArrayLike) -> T:
    """The exponential moving average of ranges: `decay * a + (1 - decay) * b`, end by end.

    Not associative: the order of the batches matters, and shards are merged by `merge` first. The empty range,
    (inf, -inf), is neutral, so an average can start from it.

    Args:
      a: Range, or dict of them: the average so far.
      b: the same for the new batch.
      decay: number or floating scalar in [0, 1], traced or not.

    Returns:
      A Range of float32, or a dict of them like `a`.

    Gradient: the formula's, as JAX defines it.

    Raises:
      TypeError: for anything but Ranges or dicts of them.
      ValueError: for different keys or shapes, or a concrete decay outside [0, 1].

    Source: Jacob et al., 2018, section 3.1.

    >>> from jaxquant import Range, ema_ranges
    >>> [end.item() for end in ema_ranges(Range(-1.0, 2.0), Range(-2.0, 1.0), 0.5)]
    [-1.5, 1.5]
    """
    decay = _fraction("decay", decay)
    return for_each(lambda a, b: _ema(*a.checked(b), decay), Range, "ema_ranges", a=a, b=b)


def _fraction(name: str, value: Any) -> Array:
    """Returns a number or a scalar, traced or not, as float32; a concrete one must be in [0, 1]."""
    value = checks.unwrapped(value)
    array = checks.real(name, value, jnp.dtype(jnp.float32))
    checks.shape(name, array, (), "one for all ranges")
    if not isinstance(value, jax.core.Tracer) and not 0 <= float(value) <= 1:
        raise ValueError(f"`{name}` must be in [0, 1], got {value}. Pass the weight of the average so far: 0.99.")
    return array
