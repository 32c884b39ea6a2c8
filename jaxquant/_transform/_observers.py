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


class Observer(NamedTuple):
    """How inputs are observed.

    Attributes:
      of: (x, spec, qparams or None) -> what is seen of it.
      merge: of what is seen of two.
      neutral: shapes and dtypes of what is seen -> what is seen of nothing.
      across: (what is seen on one device, axes) -> what is seen on all.
      sees: whether an entry can be observed.
    """

    of: Callable[[Any, QuantSpec, QParams | None], Any]
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
    lambda x, spec, _: observe(x, spec),
    merge_ranges,
    lambda r: Range(jnp.full(r.x_min.shape, jnp.inf), jnp.full(r.x_max.shape, -jnp.inf)),
    lambda r, axes: Range(lax.pmin(r.x_min, tuple(axes)), lax.pmax(r.x_max, tuple(axes))),
    has_range,
)
HISTOGRAMS = Observer(
    lambda x, spec, _: histogram(x, spec),
    merge_histograms,
    _zeros,
    lambda h, axes: Histogram(lax.psum(h.counts, tuple(axes))),
    has_range,
)
TALLIES = Observer(tally, merge_tallies, _zeros, tally_across, lambda entry: not entry.is_weight and entry.is_seen)
