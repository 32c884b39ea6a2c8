# SPDX-License-Identifier: Apache-2.0
"""What is observed of the inputs of a function, and how it is merged over turns, branches and devices."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._gram import Gram, gram, merge_grams
from .._jaxpr._program import Location
from .._jaxpr._walk import Contraction
from .._paths import named_in_errors
from .._qparams import QParams
from .._ranges._histogram import Histogram, histogram, merge_histograms
from .._ranges._range import Range, merge_ranges, observe
from .._spec import QuantSpec
from .._tally import merge_tallies, tally, tally_across
from ._choices import Choice
from ._decide import Decisions
from ._entries import Entry


class Observed(NamedTuple):
    """What is known of an operand where an op takes it.

    Attributes:
      x: its real values.
      spec: QuantSpec, with the axes of x; None where it stays in float.
      qparams: of its entry; None where it is dynamic.
      contracted: the axes of x along which one result of the op sums.
      other: the real values of the other operand, such as the weight; None if there is none, or integers alone.
      contraction: the op.
      side: which operand it is.
      more: the operands behind both, such as the sizes of groups.
    """

    x: Any
    spec: QuantSpec | None
    qparams: QParams | None
    contracted: tuple[int, ...]
    other: Any
    contraction: Contraction
    side: int
    more: Sequence[Any] = ()


class Use(NamedTuple):
    """Where an entry is observed.

    Attributes:
      at: the ops, with the side of the operand.
      stack: the scans whose turns are told apart, with their lengths.
      contracted: of a weight, the axes of its parameter along which these ops sum, in their order.
    """

    at: Mapping[Location, int]
    stack: tuple[tuple[Location, int], ...]
    contracted: tuple[frozenset[int], ...] = ()


class Observer(NamedTuple):
    """How operands are observed.

    Attributes:
      of: Observed -> what is seen of it.
      merge: of what is seen of two.
      neutral: shapes and dtypes of what is seen -> what is seen of nothing.
      across: (what is seen on one device, axes) -> what is seen on all.
      uses: decisions about a function -> of each entry that is observed, where.
    """

    of: Callable[[Observed], Any]
    merge: Callable[[Any, Any], Any]
    neutral: Callable[[Any], Any]
    across: Callable[[Any, Collection[str]], Any]
    uses: Callable[[Decisions], dict[str, Use]]


def has_range(entry: Entry) -> bool:
    """Whether it can have a range that is the same for all batches."""
    return not entry.is_weight and not entry.is_dynamic and entry.is_seen


def uses_of_inputs(decisions: Decisions, sees: Callable[[Entry], bool]) -> dict[str, Use]:
    """Where the inputs are seen that an observer sees: where the first op takes them."""

    def use(entry: Entry) -> Use:
        keys = [choice.keys for choice in decisions.of[entry.location].operands]
        return Use({entry.location: keys.index((entry.key,))}, entry.stack)

    return {key: use(entry) for key, entry in decisions.entries.of.items() if not entry.is_weight and sees(entry)}


def _uses_of_weights(decisions: Decisions) -> dict[str, Use]:
    """Where the inputs are seen that a weight contracts: at each op that takes the whole of it."""
    found: dict[str, Use] = {}
    for location, decision in decisions.of.items():
        for side, choice in () if decision.contraction.in_condition else enumerate(decision.operands):
            for key in choice.keys if choice.is_weight else ():
                with named_in_errors(key, rule=choice.rule):
                    _check_whole(choice, decisions.entries.of[key])
                    origin = choice.operand.origin
                    contracted = tuple(origin.axes[i] for i in sorted(choice.contracted))
                    use = Use({location: 1 - side}, origin.stack, contracted)
                    found[key] = _with(found.get(key, use), use)
    return found


def _with(old: Use, new: Use) -> Use:
    told = lambda use: ([n for _, n in use.stack], use.contracted)
    if told(old) != told(new):
        raise ValueError(
            "the ops that take the parameter sum along different axes of it, or take it in different scans, so that it "
            "has no one Gram. Leave all uses but one in float, or give each use a parameter of its own."
        )
    return old._replace(at={**old.at, **new.at}, stack=tuple(dict.fromkeys((*old.stack, *new.stack))))


def _check_whole(choice: Choice, entry: Entry) -> None:
    """Raises for a weight that is a part of a parameter, whose second moments would be for that part alone."""
    origin, turns = choice.operand.origin, math.prod(n for _, n in choice.operand.origin.stack)
    is_whole = math.prod(choice.operand.shape) * turns == math.prod(entry.shape) and not origin.picked
    if not is_whole or len(origin.parts) > 1:
        raise ValueError(
            f"`gram=True` is for parameters that an op takes whole and alone, got an operand of shape "
            f"{choice.operand.shape} made of {', '.join(origin.parts)}, of shape {entry.shape}. Give each part a "
            "parameter of its own, or leave it out by a rule with None."
        )


def _gram_of(given: Observed) -> Gram:
    op, weight = given.contraction.as_op(), 1 - given.side
    return gram(*op.rows(weight, given.x, given.contraction.operands[weight].shape, *given.more))


def _zeros(like: Any) -> Any:
    return jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), like)


RANGES = Observer(
    lambda given: observe(given.x, given.spec),
    merge_ranges,
    lambda r: Range(jnp.full(r.x_min.shape, jnp.inf), jnp.full(r.x_max.shape, -jnp.inf)),
    lambda r, axes: Range(lax.pmin(r.x_min, tuple(axes)), lax.pmax(r.x_max, tuple(axes))),
    lambda decisions: uses_of_inputs(decisions, has_range),
)
HISTOGRAMS = Observer(
    lambda given: histogram(given.x, given.spec),
    merge_histograms,
    _zeros,
    lambda h, axes: Histogram(lax.psum(h.counts, tuple(axes))),
    lambda decisions: uses_of_inputs(decisions, has_range),
)
TALLIES = Observer(
    lambda given: tally(given.x, given.spec, given.qparams),
    merge_tallies,
    _zeros,
    tally_across,
    lambda decisions: uses_of_inputs(decisions, lambda entry: entry.is_seen),
)
GRAMS = Observer(
    _gram_of,
    merge_grams,
    _zeros,
    lambda g, axes: Gram(*(lax.psum(v, tuple(axes)) for v in g)),
    _uses_of_weights,
)
