# SPDX-License-Identifier: Apache-2.0
"""The entries of qparams: each parameter that is quantized, and each input of the ops that use one."""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from .._arrays._affine import qparams_of_shape
from .._arrays._codes import takes_sums
from .._arrays._qarray import QArray
from .._arrays._qparams import QParams
from .._arrays._straight_through import OfTensor, range_spec
from .._base import _checks as checks
from .._base._checks import PyTree
from .._history import BINS, DelayedQParams, GradientHistory, empty_history
from .._paths import named_in_errors
from .._program._jaxpr import Location
from .._program._walk import Contraction
from .._spec._rule import Rule
from .._spec._spec import QuantSpec, qparams_shape
from ._axes import along, on_parameter, shared_axes
from ._choose import Choice, Decision
from ._match import MatchedOp, Matcher, names_of, numbered


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A parameter, or an input of ops that use it alike: what has one scale, or one for each of its groups.

    Attributes:
      key: the path of the parameter, or the name of the first site.
      spec: QuantSpec with the axes of the parameter, or of the operand.
      shape, dtype: of the parameter, or of the operand.
      is_weight: whether it is a parameter.
      rule: that chose it.
      sites: the names of those that use it.
      contracted: of a parameter, the axes along which all of its ops sum.
      layers: of a parameter, the axes that no op has: along these it is a stack.
      reads: of a parameter, what else reads it, in float.
      order: of a parameter's last axes in memory, once it is frozen, as in QArray; None where it is read in float.
      is_multiplied: of a parameter, whether a product of integers reads it.
      summed: of a parameter, the axes along which products of integers take its sums; None where none does, or where
        its ops differ.
      is_dynamic: whether its range is always taken from the values at hand: the batch is in the shape of its scale, or
        scales of a cache are multiplied into it.
      scaled_by: the path of the cache whose scales are multiplied into it before it is quantized; else empty.
      location: of the first op that uses it.
      stack: the scans over parameters around an input, and their lengths: each turn has a scale of its own.
      is_seen: whether it can be observed: not in the condition of a loop.
    """

    key: str
    spec: QuantSpec
    shape: tuple[int, ...]
    dtype: np.dtype
    is_weight: bool
    rule: Rule
    sites: tuple[str, ...]
    contracted: frozenset[int] = frozenset()
    layers: frozenset[int] = frozenset()
    reads: tuple[str, ...] = ()
    order: tuple[int, ...] | None = None
    is_multiplied: bool = False
    summed: frozenset[int] | None = None
    is_dynamic: bool = False
    scaled_by: str = ""
    location: Location = ()
    stack: tuple[tuple[Location, int], ...] = ()
    is_seen: bool = True

    @property
    def groups(self) -> tuple[int, ...]:
        """The shape of its qparams."""
        return *(n for _, n in self.stack), *qparams_shape(range_spec(self.spec, self.is_weight), self.shape)

    @property
    def size(self) -> int:
        """The number of its values, in all scan iterations."""
        return math.prod((*(n for _, n in self.stack), *self.shape))


class GradientEntry(NamedTuple):
    """A gradient whose range is of its history.

    Attributes:
      spec: QuantSpec of the gradient.
      steps: how many steps the history has.
      stack: the scans over parameters around it, and their lengths: each turn has a history of its own.
      rule: that says so.
    """

    spec: QuantSpec
    steps: int
    stack: tuple[tuple[Location, int], ...]
    rule: Rule | None

    def empty(self) -> GradientHistory:
        """The history before the first step."""
        return empty_history(self.spec, tuple(n for _, n in self.stack), self.steps)

    def checked(self, qparams: object) -> DelayedQParams | None:
        """The value that a caller has passed for it."""
        if qparams is None:
            return None
        if isinstance(qparams, GradientHistory):
            raise TypeError(
                "a GradientHistory is state of the train step, and no qparams. Split them, trained, histories = "
                "split_histories(qparams); and pass qparams={**trained, **delayed_qparams(histories)}, or without a "
                "gradient qparams=trained."
            )
        expected = (*(n for _, n in self.stack), BINS)
        if not isinstance(qparams, DelayedQParams) or qparams.seen.shape != expected or qparams.spec != self.spec:
            of = f"seen of shape {qparams.seen.shape} and {qparams.spec}" if isinstance(qparams, DelayedQParams) else ""
            raise TypeError(
                f"the entry takes DelayedQParams with seen of shape {expected} and {self.spec}, got "
                f"{of or checks.kind(qparams)}. Make it by delayed_qparams(histories), of q.init_qparams(params, ...)."
            )
        return qparams


def gradient_entries(decisions: Iterable[Decision]) -> dict[str, GradientEntry]:
    """The gradients that have a history, by their keys."""
    found = {}
    for decision in decisions:
        each = zip(decision.gradient_keys, decision.gradient, decision.steps, decision.operands, strict=False)
        for key, spec, steps, choice in each:
            if key and isinstance(spec, QuantSpec):
                found[key] = GradientEntry(spec, steps, decision.contraction.stack, choice.rule)
    return found


def keyed(decisions: Sequence[Decision], ties: Mapping[Location, Location]) -> list[Decision]:
    """The decisions with the keys of what is quantized; inputs of one value that are quantized alike have one key.

    `ties` says of values that have the grid of another where that was named, which is before.
    """
    first: dict[Any, str] = {}
    values: dict[Location, tuple[str, ...]] = {}

    def of(choice: Choice, decision: Decision) -> tuple[str, ...]:
        contraction = decision.contraction
        if choice.spec is None or choice.cache is not None:
            return ()
        if (point := ties.get(contraction.location, choice.point)) is not None:
            return values[point]
        origin = choice.operand.origin
        if choice.is_weight:
            return origin.parts
        how = choice.spec, decision.scaled_by if decision.is_folded else None
        known_by = origin.value, str(choice.operand.dtype), contraction.stack, how
        return (choice.name if origin.value is None else first.setdefault(known_by, choice.name),)

    found = []
    for decision in decisions:
        contraction = decision.contraction
        operands = tuple(dataclasses.replace(choice, keys=of(choice, decision)) for choice in decision.operands)
        found.append(dataclasses.replace(decision, operands=operands))
        if decision.op.kind == "value":
            values[contraction.location] = operands[0].keys
    return found


def entries_of(decisions: Sequence[Decision], leaves: Mapping[str, Any]) -> dict[str, Entry]:
    """The entries of all quantized operands, each with the sites that use it."""
    entries: dict[str, Entry] = {}
    for decision in decisions:
        for side, choice in enumerate(decision.operands):
            for key in choice.keys:
                with named_in_errors(choice.name, rule=choice.rule):
                    one = _entry(key, decision, side, leaves)
                    entries[key] = _merged(entries[key], one) if key in entries else one
    return entries


def _entry(key: str, decision: Decision, side: int, leaves: Mapping[str, Any]) -> Entry:
    """The entry of an operand, or of a parameter in it, as one op uses it."""
    choice, contraction = decision.operands[side], decision.contraction
    operand, rule, spec = choice.operand, choice.rule, choice.spec
    assert rule is not None
    assert spec is not None
    entry = functools.partial(Entry, key=key, rule=rule, sites=(choice.name,), is_weight=choice.is_weight)
    if not choice.is_weight:
        _check_name(key, leaves)
        kind = rule.activation.granularity if rule.activation else spec.granularity
        return entry(
            spec=spec,
            shape=operand.shape,
            dtype=operand.dtype,
            is_dynamic=decision.is_folded
            or (not spec.has_tensor_scale and (spec.granularity.is_dynamic or kind.is_dynamic)),
            scaled_by=decision.scaled_by,
            location=contraction.location,
            stack=contraction.stack,
            is_seen=not contraction.in_condition,
        )
    leaf = leaves[key]
    spec = on_parameter(spec, operand, key, leaf.shape)
    kept = along(operand, [i for i in range(len(operand.shape)) if i not in choice.contracted])
    return entry(
        spec=spec,
        shape=leaf.shape,
        dtype=leaf.dtype,
        contracted=frozenset(along(operand, choice.contracted) - kept) or shared_axes(spec, leaf.shape),
        layers=frozenset(range(len(leaf.shape))).difference(*operand.origin.axes),
        order=_at_rest(contraction, side, spec, rule, leaf.shape),
        is_multiplied=rule.activation is not None,
        summed=_summed(decision, side, leaf.shape),
    )


def _check_name(key: str, paths: Collection[str]) -> None:
    if key in paths:
        raise ValueError(f"{key!r} is the path of a parameter and the name of an input. Rename the quant_point.")


def _summed(decision: Decision, side: int, shape: tuple[int, ...]) -> frozenset[int] | None:
    """The axes of a parameter of this shape along which an op takes sums of it, if it takes all that lies along them.

    What is concatenated has sums of its own, and loses those of its parts.
    """
    choice, other = decision.operands[side], decision.operands[1 - side].spec
    operand = choice.operand
    if choice.spec is None or other is None or not takes_sums(choice.spec, other) or len(operand.origin.parts) > 1:
        return None
    summed = along(operand, choice.contracted)
    kept = along(operand, [i for i in range(len(operand.shape)) if i not in choice.contracted])
    is_whole = math.prod(operand.shape[i] for i in choice.contracted) == math.prod(shape[a] for a in summed)
    return frozenset(summed) if summed and is_whole and kept.isdisjoint(summed) else None


def _merged(old: Entry, new: Entry) -> Entry:
    """The entry of one thing that is used in two ways."""
    sites = *old.sites, *new.sites
    if not old.is_weight:
        return dataclasses.replace(old, sites=sites)
    if old.spec != new.spec:
        raise ValueError(
            f"the parameter {old.key!r} of shape {old.shape} is quantized in two ways: as {old.spec} at "
            f"{old.sites[0]!r}, and as {new.spec} at {new.sites[0]!r}. One parameter has one scale for each of its "
            "groups, whatever uses it. Name them by weight_spec(bits, channel_axis=...), counted on the parameter and "
            "kept by every op, or by granularity=PerTensor(); or leave one of the uses in float by a rule with None."
        )
    same = lambda name: getattr(old, name) if getattr(old, name) == getattr(new, name) else None
    return dataclasses.replace(
        old,
        sites=sites,
        contracted=same("contracted") or shared_axes(old.spec, old.shape),  # a flag is for all that share a scale
        layers=old.layers & new.layers,
        order=same("order"),
        summed=same("summed"),
        is_multiplied=old.is_multiplied or new.is_multiplied,
    )


def _read_entry(path: str, rule: Rule, leaf: PyTree) -> Entry:
    """The entry of a parameter that no op uses; what reads it has no axes to say which share a scale."""
    spec = rule.weight
    assert spec is not None
    with named_in_errors(path, rule=rule):
        if getattr(spec.granularity, "axis", ()) is None:
            raise ValueError(
                f"{spec} is per output channel of the parameter's dot, and no dot uses it. Name the axis: "
                "weight_spec(bits, channel_axis=...), counted on the parameter."
            )
        return Entry(
            key=path,
            spec=spec,
            shape=leaf.shape,
            dtype=leaf.dtype,
            is_weight=True,
            rule=rule,
            sites=(),
            contracted=shared_axes(spec, leaf.shape),
        )


def reads_of(decisions: Sequence[Decision], of_walk: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """The readers of each parameter, by path, but for ops that contract it in integers."""
    reads = {path: set(by) for path, by in of_walk.items()}
    for decision in decisions:
        for choice in decision.operands:
            if decision.op.kind != "closed" and (choice.spec is None or not choice.is_weight):
                origin = choice.operand.origin
                for path in origin.parts:
                    reads.setdefault(path, set()).add("gather" if origin.gathered else choice.name)
    return reads


def with_reads(
    used: Mapping[str, Entry], reads: Mapping[str, Set[str]], matcher: Matcher, ops: Sequence[MatchedOp]
) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries with what else reads them, and the names of the sites of parameters that all see quantized."""
    entries, everywhere = dict(used), []
    for path, by in reads.items():
        rule = used[path].rule if path in used else matcher.for_path(path)
        if rule and rule.weight and rule.everywhere and checks.is_float(matcher.leaves[path].dtype):
            entries[path] = used.get(path) or _read_entry(path, rule, matcher.leaves[path])
            everywhere.append(path)
        if by and path in entries and entries[path].is_weight:  # read in float too, it lies as it always did
            entries[path] = dataclasses.replace(entries[path], reads=tuple(sorted(by)), order=None)
    before = [name for op in ops for name in names_of(op)]
    names = dict(zip(everywhere, numbered([*before, *everywhere], matcher.leaves)[len(before) :], strict=True))
    for path, name in names.items():
        entries[path] = dataclasses.replace(entries[path], sites=(*entries[path].sites, name))
    return entries, names


@dataclasses.dataclass(frozen=True)
class Entries:
    """The entries of a function.

    Attributes:
      of: each by its key, in the order of the program.
      keys: of the operands of each op that is quantized, by where it is.
      left: why sites are left in float, by their names.
      gradients: those that have a history, by their keys.
    """

    of: Mapping[str, Entry]
    keys: Mapping[Location, Sequence[tuple[str, ...]]]
    left: Mapping[str, str]
    gradients: Mapping[str, GradientEntry]

    @functools.cached_property
    def _streams(self) -> dict[Any, int]:
        parameters = (key for key, entry in self.of.items() if entry.is_weight)
        ops = ((location, of) for location in self.keys for of in (0, 1, "gradient"))
        return {of: i for i, of in enumerate((*parameters, *ops))}

    def noise_key(self, key: Array, of: str | tuple[Location, int | str]) -> Array:
        """The PRNG key with which a parameter, by its path, or an operand or "gradient" at a location is rounded."""
        return jax.random.fold_in(key, self._streams[of])

    def inputs_of(self, path: str) -> set[str]:
        """The keys of what a parameter is contracted with."""
        found = {key for own in self.keys.values() if path in sum(own, ()) for keys in own for key in keys}
        return {key for key in found if not self.of[key].is_weight}

    def checked_qparams(
        self, qparams: Any, frozen: Mapping[str, QArray]
    ) -> tuple[dict[str, QParams | None], dict[str, DelayedQParams]]:
        """The qparams of each entry, in float32 and of full rank, as a caller has passed them; None is dynamic.

        And what the caller has passed of histories of gradients.
        """
        if qparams is None or (isinstance(qparams, Mapping) and not qparams):
            return dict.fromkeys(self.of), {}
        self.same_keys("qparams", "q.init_qparams(params, ...)", qparams, {*frozen, *self.gradients})
        delayed = {}
        for key, gradient in self.gradients.items():
            with named_in_errors(key, rule=gradient.rule):
                delayed[key] = gradient.checked(qparams.get(key))
        return {key: self.checked(key, qparams.get(key)) for key in self.of}, {k: v for k, v in delayed.items() if v}

    def are_of_qparams(self, argument: object) -> bool:
        """Whether an argument is a dict of qparams that were made for this function."""
        is_ours = lambda v: v is None or (isinstance(v, QParams | DelayedQParams) and v.spec is not None)
        return isinstance(argument, Mapping) and bool(argument) and all(
            (key in self.of or key in self.gradients) and is_ours(v) for key, v in argument.items()
        )  # fmt: skip

    def same_keys(self, name: str, made_by: str, given: Any, optional: Collection[str]) -> None:
        """Raises for entries that are missing, but of the optional ones, or unknown."""
        fix = f"Make it by {made_by} of this call and these rules; None as the value of an entry makes it dynamic."
        checks.same_keys(name, given, self.of, fix, optional, self.left)

    def checked(self, key: str, qparams: object) -> Any:
        """The qparams of an entry, as `checked_qparams` gives them."""
        entry = self.of[key]
        if qparams is None:
            return None
        with named_in_errors(key, rule=entry.rule):
            if entry.scaled_by:
                raise ValueError(
                    f"the scales of the cache {entry.scaled_by!r}, which change along what is contracted, are "
                    "multiplied into it before it is quantized, so that its range is not that of what is rounded: it "
                    "is always dynamic, got qparams. Pass None for it."
                )
            if entry.is_dynamic:
                raise ValueError(
                    f"{entry.spec} has a scale of its own for each part of the batch, so it is always dynamic, got "
                    "qparams. Pass None for it."
                )
            why = f"one for each group of {entry.spec} in {'a parameter' if entry.is_weight else 'an input'} of shape "
            turns = f", in each of {math.prod(n for _, n in entry.stack)} turns of a scan" if entry.stack else ""
            ndim = len(entry.groups) if entry.stack else len(entry.shape)
            scale, zero_point = qparams_of_shape(qparams, entry.spec, entry.groups, ndim, f"{why}{entry.shape}{turns}")
            if entry.spec.has_tensor_scale and not entry.is_weight:
                return OfTensor(scale.reshape(entry.groups))
            return QParams(scale.reshape(entry.groups), zero_point.reshape(entry.groups))

    def check_frozen(
        self, frozen: Mapping[str, QArray], qparams: Mapping[str, Any] | None, operands: Collection[str]
    ) -> None:
        """A QArray under a rule must be what the rule makes of the parameter, and served as it was frozen for.

        `operands` are the parameters that some op contracts.
        """
        for path, q in frozen.items():
            entry = self.of.get(path)
            if entry is not None:
                with named_in_errors(path, rule=entry.rule):
                    _check_frozen_by(entry, q, (qparams or {}).get(path))
            elif path in operands and q.frozen and q.frozen.activation:
                raise ValueError(
                    f"At {path!r}: the parameter was frozen by a rule that quantizes its inputs to "
                    f"{q.frozen.activation}, and no rule quantizes it now. Serve it with the rules that it was frozen "
                    "with; dequantize(params[...]) is for use in float."
                )


def _check_frozen_by(entry: Entry, q: QArray, qparams: QParams | None) -> None:
    plain = lambda spec: vars(spec) | {"granularity": None}
    expected = entry.groups or (1,) * q.ndim
    if plain(q.spec) != plain(entry.spec) or q.groups != expected:
        raise ValueError(
            f"the parameter is a QArray with {q.spec} and a scale of shape {q.scale.shape}, and the rule "
            f"makes {entry.spec} of it, with a scale of shape {entry.groups}. Freeze it with the rules it "
            "is served with; or leave it out of the rules, and it is used as it is, with inputs in float."
        )
    check_reads(entry, "given as a QArray")
    if q.frozen is None:
        return
    if not _equal_but_for_rounding(q.frozen.activation, entry.rule.activation):
        raise ValueError(
            f"the parameter was frozen by a rule whose inputs are {q.frozen.activation or 'in float'}, and they are "
            f"{entry.rule.activation or 'in float'} by this one. Serve it with the rules that it was frozen with, or "
            "freeze the float parameters again."
        )
    if qparams is not None and not q.frozen.from_qparams:
        raise ValueError(
            "the parameter was frozen without qparams, by the range of its values, and `qparams` has an entry for it, "
            "whose scale it does not have. Freeze it with them, q.freeze(params, ..., qparams=qparams); or serve it "
            f"without that entry: qparams with the inputs alone, or with qparams[{entry.key!r}] = None."
        )


def _equal_but_for_rounding(spec: QuantSpec | None, other: QuantSpec | None) -> bool:
    """Whether they are equal but for how to round, which training and serving may do differently."""
    if spec is None or other is None:
        return spec is other
    return dataclasses.replace(spec, rounding=other.rounding) == other


def check_reads(entry: Entry, done: str) -> None:
    """Raises for integers of a parameter that ops also read in float."""
    if entry.reads and not entry.rule.everywhere:
        raise ValueError(
            f"the parameter is quantized at {', '.join(map(repr, entry.sites))} and also read in float, by "
            f"{', '.join(map(repr, entry.reads))}, so that it cannot be {done}: what was trained would not be what is "
            "served. Let every use see the quantized value, in training too, by Rule(..., everywhere=True)."
        )


def _at_rest(
    contraction: Contraction, side: int, spec: QuantSpec, rule: Rule, shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The order in memory in which an integer product reads a matrix, or a stack of them, fastest: the sum runs last.

    Of what the product takes whole, or a scan turn by turn: a slice would be moved in each call. Blocks are summed one
    after the other; convolutions, and products of more axes, gain nothing.
    """
    if rule.activation is None or spec.granularity.sizes:
        return None
    operand, ndim = contraction.operands[side], len(shape)
    before = ndim - len(operand.shape)
    runs = [a for along in operand.origin.axes for a in sorted(along)]
    is_whole = sorted(runs) == list(range(before, ndim)) and operand.shape == tuple(shape[a] for a in runs)
    is_scanned = all(n in [turns for _, turns in contraction.stack] for n in shape[:before])
    if not is_whole or not is_scanned or len(operand.origin.parts) > 1:
        return None
    *_, before_last, last = [0, 0, *(runs[i] for i in contraction.as_op().order_at_rest(side, len(operand.shape)))]
    return (-1, -2) if (before_last, last) == (ndim - 1, ndim - 2) else None
