# SPDX-License-Identifier: Apache-2.0
"""What is observed of the inputs of a function, and how it is merged over turns, branches and devices."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._qparams import QParams
from .._ranges._histogram import Histogram, histogram, merge_histograms
from .._ranges._range import Range, merge_ranges, observe
from .._spec import QuantSpec
from .._tally import merge_tallies, tally, tally_across
from ._entries import Entry


class Observed(NamedTuple):
    """What is known of an input where an op takes it.

    Attributes:
      x: its real values.
      spec: QuantSpec, with the axes of x.
      qparams: of its entry; None where it is dynamic.
      contracted: the axes of x along which one result of the op sums.
      other: the real values of the other operand, such as the weight; None if there is none, or integers alone.
    """

    x: Any
    spec: QuantSpec
    qparams: QParams | None = None
    contracted: tuple[int, ...] = ()
    other: Any = None


class Observer(NamedTuple):
    """How inputs are observed.

    Attributes:
      of: Observed -> what is seen of it.
      merge: of what is seen of two.
      neutral: shapes and dtypes of what is seen -> what is seen of nothing.
      across: (what is seen on one device, axes) -> what is seen on all.
      sees: whether an entry can be observed.
    """

    of: Callable[[Observed], Any]
    merge: Callable[[Any, Any], Any]
    neutral: Callable[[Any], Any]
    across: Callable[[Any, Collection[str]], Any]
    sees: Callable[[Entry], bool]


def has_range(entry: Entry) -> bool:
    """Whether it can have a range that is the same for all batches."""
    return not entry.is_weight and not entry.is_dynamic and entry.is_seen


def _zeros(like: Any) -> Any:
    return jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), like)


RANGES = Observer(
    lambda given: observe(given.x, given.spec),
    merge_ranges,
    lambda r: Range(jnp.full(r.x_min.shape, jnp.inf), jnp.full(r.x_max.shape, -jnp.inf)),
    lambda r, axes: Range(lax.pmin(r.x_min, tuple(axes)), lax.pmax(r.x_max, tuple(axes))),
    has_range,
)
HISTOGRAMS = Observer(
    lambda given: histogram(given.x, given.spec),
    merge_histograms,
    _zeros,
    lambda h, axes: Histogram(lax.psum(h.counts, tuple(axes))),
    has_range,
)
TALLIES = Observer(
    lambda given: tally(given.x, given.spec, given.qparams),
    merge_tallies,
    _zeros,
    tally_across,
    lambda entry: not entry.is_weight and entry.is_seen,
)
