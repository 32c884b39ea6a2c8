# SPDX-License-Identifier: Apache-2.0
"""Merges of what batches, shards and processes observe: the union of ranges, and their moving average."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._base import _checks as checks
from .._base import _numerics as num
from ._range import Range, for_each


def merged(merge: Callable, kind: type, function: str, values: Sequence[Any]) -> Any:
    """Merges any number of values of one kind, or of dicts of them, by a `merge` of two."""
    if not values or isinstance(values[0], list):
        raise TypeError(
            f"{function} takes {kind.__name__}s, got {'a list' if values else 'none'}. Unpack it: (*values)."
        )
    two = lambda a, b: for_each(merge, kind, function, a=a, b=b)
    return functools.reduce(two, values[1:], for_each(lambda a: a, kind, function, a=values[0]))


def _of_two_ranges(f: Callable[[Range, Range], Range]) -> Callable[[Range, Range], Range]:
    """`f` of two ranges whose ends have been checked."""

    def of(a: Range, b: Range) -> Range:
        ends = [checks.ends(("x_min", "x_max"), tuple(r), jnp.dtype(jnp.float32)) for r in (a, b)]
        for name, one, other in zip(("x_min", "x_max"), *ends, strict=True):
            checks.shape(f"{name} of b", other, one.shape, "the shape in `a`")
        return f(Range(*ends[0]), Range(*ends[1]))

    return of


def merge_ranges(*ranges: Any) -> Any:
    """The smallest range that contains all of those given, such as one of each batch.

    Associative, commutative and idempotent, so that batches, shards and processes merge in any order; Range(inf, -inf)
    is neutral.

    Args:
      *ranges: one or more: Range of floating arrays of one shape, or dicts of them with the same keys.

    Returns:
      A Range of float32, or a dict of them like the first.

    Gradient: as minimum and maximum, as JAX defines it.

    Raises:
      TypeError: for anything but Ranges or dicts of them, such as a list of them, and for no argument.
      ValueError: for different keys or shapes.

    Source: the min-max observer of every calibration scheme.

    >>> from jaxquant import Range, merge_ranges
    >>> [end.item() for end in merge_ranges(Range(-1.0, 2.0), Range(-3.0, 1.0), Range(0.0, 5.0))]
    [-3.0, 5.0]
    """
    return merged(_of_two_ranges(_widest), Range, "merge_ranges", (*ranges[:1], *ranges))


@jax.jit
def _widest(a: Range, b: Range) -> Range:
    return Range(jnp.minimum(a.x_min, b.x_min), jnp.maximum(a.x_max, b.x_max))


@jax.jit
def _ema(a: Range, b: Range, decay: Array) -> Range:
    mean = lambda old, new: num.guard(old * decay) + num.guard(new * (1 - decay))
    nothing = lambda r: r.x_min > r.x_max
    pick = lambda old, new: jnp.where(nothing(b), old, jnp.where(nothing(a), new, mean(old, new)))
    return Range(pick(a.x_min, b.x_min), pick(a.x_max, b.x_max))


def ema_ranges(a: Any, b: Any, decay: Any) -> Any:
    """The exponential moving average of ranges: `decay * a + (1 - decay) * b`, end by end.

    Not associative: the order of the batches matters, and shards are merged by `merge_ranges` first. The empty range,
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
    decay = checks.fraction("decay", decay)
    return for_each(_of_two_ranges(lambda a, b: _ema(a, b, decay)), Range, "ema_ranges", a=a, b=b)
