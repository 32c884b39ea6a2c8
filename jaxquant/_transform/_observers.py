# SPDX-License-Identifier: Apache-2.0
"""Observers of the inputs of a function, whose observations merge over scan iterations, branches and devices."""

import functools
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._arrays._gram import Gram, gram
from .._arrays._histogram import Histogram, histogram
from .._arrays._qparams import QParams
from .._arrays._range import Range, observe
from .._arrays._straight_through import range_spec
from .._arrays._tally import tally, tally_across
from .._base import _checks as checks
from .._base._checks import PyTree
from .._paths import named_in_errors
from .._program._evaluate import Inputs, Scope
from .._program._jaxpr import Location
from .._program._param import QuantizedParam, Unquantized
from .._program._walk import Contraction
from .._spec._spec import QuantSpec
from ._choose import Decision
from ._compiled import value_of
from ._decide import Decisions
from ._entries import Entry
from ._layout import Layout, layout_of
from ._mask import Mask


class Observed(NamedTuple):
    """An operand at the op that takes it, as an observer is given it.

    Attributes:
      x: its real values.
      spec: QuantSpec, with the axes of x; None where it stays in float.
      qparams: of its entry; None where it is dynamic.
      contraction: the op.
      side: which operand it is.
      more: the operands behind both, such as the sizes of groups.
      mask: which elements of x count, of its shape; None if all do.
    """

    x: Array
    spec: QuantSpec | None
    qparams: QParams | None
    contraction: Contraction
    side: int
    more: Sequence[Any] = ()
    mask: Array | None = None

    @property
    def counted(self) -> Array:
        """x with infinities, which nobody counts, for what is left out."""
        return self.x if self.mask is None else jnp.where(self.mask, self.x, jnp.asarray(jnp.inf, self.x.dtype))


class Use(NamedTuple):
    """The places where an entry is observed.

    Attributes:
      at: the ops, with the side of the operand.
      stack: the scans whose turns are told apart, with their lengths.
      layout: of a weight, how its parameter lies in the matrices that these ops contract.
    """

    at: Mapping[Location, int]
    stack: tuple[tuple[Location, int], ...]
    layout: Layout | None = None


class Observer(NamedTuple):
    """A way to observe operands.

    Attributes:
      of: Observed -> what is seen of it.
      neutral: shapes and dtypes of what is seen -> what is seen of nothing.
      across: (what is seen on one device, axes) -> what is seen on all.
      uses: decisions about a function -> of each entry that is observed, where.
    """

    of: Callable[[Observed], Any]
    neutral: Callable[[Any], Any]
    across: Callable[[Any, Collection[str]], Any]
    uses: Callable[[Decisions], dict[str, Use]]


def has_range(entry: Entry) -> bool:
    """Whether it can have a range that is the same for all batches."""
    return not entry.is_weight and not entry.is_dynamic and entry.is_seen


def uses_of_inputs(decisions: Decisions, sees: Callable[[Entry], bool]) -> dict[str, Use]:
    """The places where an observer sees inputs: the first op that takes each."""

    def use(entry: Entry) -> Use:
        keys = [choice.keys for choice in decisions.of[entry.location].operands]
        return Use({entry.location: keys.index((entry.key,))}, entry.stack)

    return {key: use(entry) for key, entry in decisions.entries.of.items() if not entry.is_weight and sees(entry)}


def uses_of_weights(decisions: Decisions, wanted: Collection[str] | None = None) -> dict[str, Use]:
    """The places where the inputs of weights are seen, of all weights or those wanted: each op that takes one."""
    found: dict[str, Use] = {}
    for location, decision in decisions.of.items():
        for side, choice in () if decision.contraction.in_condition else enumerate(decision.operands):
            for key in choice.keys if choice.is_weight else ():
                if wanted is None or key in wanted:
                    with named_in_errors(key, rule=choice.rule):
                        layout = layout_of(decision, side, decisions.entries.of[key].shape)
                        use = Use({location: 1 - side}, choice.operand.origin.stack, layout)
                        found[key] = _with(found.get(key, use), use)
    return found


def check_weights(names: Collection[str], decisions: Decisions) -> None:
    """Raises for names that are not of weights which some op takes."""
    weights = [key for key, entry in decisions.entries.of.items() if entry.is_weight and entry.sites]
    if isinstance(names, str) or not names:
        raise ValueError(f"the entries must be paths of quantized weights, got {names!r}. There are {weights}.")
    for name in names:
        if name not in weights:
            near = checks.nearest(name, weights)
            raise ValueError(
                f"there is no quantized weight {name!r}; the nearest: {near}. q.plan(...) has all entries."
            )


def _with(old: Use, new: Use) -> Use:
    assert old.layout is not None
    assert new.layout is not None
    turns = lambda use: [n for _, n in use.stack]
    if turns(old) != turns(new) or not old.layout.has_rows_of(new.layout):
        raise ValueError(
            "the ops that take the parameter sum along different axes of it, or take it in different scans, so that it "
            "has no one Gram. Leave all uses but one in float, or give each use a parameter of its own."
        )
    return old._replace(at={**old.at, **new.at}, stack=tuple(dict.fromkeys((*old.stack, *new.stack))))


def _gram_of(given: Observed) -> Gram:
    op, weight = given.contraction.as_op(), 1 - given.side
    rows = lambda x: op.rows(weight, x, given.contraction.operands[weight].shape, *given.more)
    if given.mask is None:
        return gram(*rows(given.x))
    counts = (rows(given.mask.astype(given.x.dtype))[0] > 0).any(-1)  # of a convolution where one of a window does
    return gram(*rows(jnp.where(given.mask, given.x, jnp.zeros((), given.x.dtype))), counts)


def _zeros(like: PyTree) -> PyTree:
    return jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), like)


RANGES = Observer(
    lambda given: observe(given.counted, range_spec(given.spec)),
    lambda r: Range(jnp.full(r.x_min.shape, jnp.inf), jnp.full(r.x_max.shape, -jnp.inf)),
    lambda r, axes: Range(lax.pmin(r.x_min, tuple(axes)), lax.pmax(r.x_max, tuple(axes))),
    lambda decisions: uses_of_inputs(decisions, has_range),
)
HISTOGRAMS = Observer(
    lambda given: histogram(given.counted, range_spec(given.spec)),
    _zeros,
    lambda h, axes: Histogram(lax.psum(h.counts, tuple(axes))),
    lambda decisions: uses_of_inputs(decisions, has_range),
)
TALLIES = Observer(
    lambda given: tally(given.counted, given.spec, given.qparams),
    _zeros,
    tally_across,
    lambda decisions: uses_of_inputs(decisions, lambda entry: entry.is_seen),
)


@functools.cache
def grams(wanted: frozenset[str] | None) -> Observer:
    """The observer of moments, of all weights or those wanted; one object, so that jit knows it again."""
    return Observer(
        _gram_of,
        _zeros,
        lambda g, axes: Gram(*(lax.psum(v, tuple(axes)) for v in g)),
        functools.partial(uses_of_weights, wanted=wanted),
    )


class Observation(NamedTuple):
    """The observations of one call: of which operands, by which observer, and where the qparams of inputs are needed.

    Attributes:
      decisions: about the function.
      observer: of operands; None observes nothing.
      mask: which rows count, or None.
      uses: of each entry that is observed, where.
    """

    decisions: Decisions
    observer: Observer | None = None
    mask: Mask | None = None
    uses: Mapping[str, Use] = types.MappingProxyType({})

    @classmethod
    def of(cls, decisions: Decisions, observer: Observer | None = None, mask: Mask | None = None) -> "Observation":
        """The observations of a call of the function that these decisions are about."""
        return cls(decisions, observer, mask, observer.uses(decisions) if observer else {})

    @property
    def inputs(self) -> Inputs:
        """The place of the qparams and observations of inputs in the program."""
        decisions, entries = self.decisions, self.decisions.entries
        of_inputs = {key: entry for key, entry in entries.of.items() if not entry.is_weight}
        stacks = {key: entry.stack for key, entry in (*of_inputs.items(), *entries.gradients.items())}
        stacks |= {key: use.stack for key, use in self.uses.items()}
        return Inputs(
            {at: {*of.input_keys, *of.gradient_keys} for at, of in decisions.of.items()},
            {key: tuple(use.at) for key, use in self.uses.items()},
            {key: [location for location, _ in stack] for key, stack in stacks.items()},
            self._nothing,
            (self.observer or RANGES).across,
        )

    def _nothing(self, key: str, scans: Collection[Location]) -> PyTree:
        """The neutral observation of an entry, stacked for these scans."""
        observer, use = self.observer, self.uses[key]
        assert observer is not None
        location, side = next(iter(use.at.items()))
        contraction, choice = self.decisions.of[location].contraction, self.decisions.of[location].operands[side]
        like = lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype)
        of = lambda x, more: observer.of(Observed(x, choice.spec, None, contraction, side, more))
        one = jax.eval_shape(of, like(contraction.operands[side]), list(map(like, contraction.more)))
        turns = tuple(n for location, n in use.stack if location in scans)
        return observer.neutral(jax.tree.map(lambda v: jax.ShapeDtypeStruct((*turns, *v.shape), v.dtype), one))

    def note(self, decision: Decision, values: Sequence[Any], scope: Scope) -> None:
        """Notes what is seen of the operands of an op, or of a named value, where they are used."""
        contraction = decision.contraction
        for key, use in self.uses.items():
            if self.observer is None or contraction.location not in use.at:
                continue
            side = use.at[contraction.location]
            choice, x, more = decision.operands[side], _real(values[side]), list(map(_real, values[2:]))
            mask = self.mask and self.mask.over(x, [*choice.keys, key], self.decisions.entries.of)
            given = Observed(x, choice.spec, scope.qparams.get(key), contraction, side, more, mask)
            scope.note({key: self.observer.of(given)})


def _real(v: Any) -> Any:
    """The real values of an operand."""
    if not isinstance(v, QuantizedParam):
        return v.quantized().real if isinstance(v, Unquantized) else v
    return value_of(v) if v.is_cache else v.real
