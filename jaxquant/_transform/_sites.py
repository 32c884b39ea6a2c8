# SPDX-License-Identifier: Apache-2.0
"""The sites of a function, each derived from a choice and an entry, and the plan that they make."""

import math
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from .._base import _checks as checks
from .._program._jaxpr import NAME, Location
from .._spec._granularity import PerToken
from ._choose import Choice, Decision
from ._entries import Entry
from ._match import MatchedOp, Matcher, gathered_by_data, is_wanted
from ._plan import Count, Site


class Sites(NamedTuple):
    """The sites of a function.

    Attributes:
      of_ops: each by where its op is, and the side of the operand.
      of_reads: of each parameter that something else than a contraction reads, and that all see quantized, by its path.
    """

    of_ops: Mapping[tuple[Location, int], Site]
    of_reads: Mapping[str, Site]


def sites_of(
    decisions: Sequence[Decision], entries: Mapping[str, Entry], everywhere: Mapping[str, str],
    states: Mapping[str, str], frozen: Set[str], kernels: Mapping[Location, str],
) -> Sites:  # fmt: skip
    """The sites of ops, and of reads, whose names `everywhere` has by path.

    `states` has "static", "dynamic" or "frozen" for each entry; `frozen` are the parameters that came in integers;
    `kernels` says of values that a runtime computes how it does.
    """
    with_kernel = lambda decision, site: site._replace(kernel=kernels.get(decision.contraction.location, ""))
    of_ops = {
        (decision.contraction.location, side): with_kernel(decision, _site(decision, choice, entries, states, frozen))
        for decision in decisions
        for side, choice in enumerate(decision.operands)
        if decision.op.kind != "closed" or choice.operand.origin.path is not None
    }
    return Sites(of_ops, {path: _site_of_read(name, entries[path], states[path]) for path, name in everywhere.items()})


def _site(
    decision: Decision, choice: Choice, entries: Mapping[str, Entry], states: Mapping[str, str], frozen: Set[str]
) -> Site:
    """The site of an operand."""
    (op, c), rule, spec = (decision.op, decision.contraction), choice.rule, choice.spec
    key = next(iter(choice.keys), "")
    activation = rule.activation if rule and not choice.is_weight else None
    return Site(
        name=choice.name,
        kind=op.kind,
        op=c.op,
        scope=c.scope,
        shape=choice.operand.shape,
        dtype=choice.operand.dtype,
        length=_length(decision),
        spec=spec,
        rule=rule and rule.pattern,
        why="" if spec else _why(op, choice, frozen),
        entry=", ".join(choice.keys),
        entry_spec=entries[key].spec if choice.keys else None,
        state=states[key] if choice.keys else "",
        is_per_token=spec is not None and bool(activation) and activation.granularity == PerToken(),
        scaled_by=entries[key].scaled_by if choice.keys else "",
        cache=choice.operand.origin.cache or "",
        is_in_groups=_is_in_groups(decision, choice),
    )


def _is_in_groups(decision: Decision, choice: Choice) -> bool:
    """Whether an operand meets floats, in groups along what is summed."""
    is_alone = sum(operand.spec is not None for operand in decision.operands) == 1
    if choice.spec is None or not is_alone or decision.contraction.op != "dot_general":
        return False
    shape = choice.operand.shape
    sizes = {axis % len(shape): size for axis, size in choice.spec.granularity.sizes.items()}
    return any(shape[axis] > sizes.get(axis, shape[axis]) for axis in choice.contracted)


def _site_of_read(name: str, entry: Entry, state: str) -> Site:
    """The site of a parameter that something else than a contraction reads, and that all see quantized."""
    return Site(
        name=name,
        kind="weight",
        op=", ".join(entry.reads),
        scope="",
        shape=entry.shape,
        dtype=entry.dtype,
        length=0,
        spec=entry.spec,
        rule=entry.rule.pattern,
        why="",
        entry=entry.key,
        entry_spec=entry.spec,
        state=state,
    )


def _length(decision: Decision) -> int:
    """K, the number of products in a sum."""
    if decision.contraction.op == NAME or decision.contraction.is_closed:
        return 0
    choice = decision.operands[1]
    return math.prod(choice.operand.shape[i] for i in choice.contracted)


def _why(op: MatchedOp, choice: Choice, frozen: Set[str]) -> str:
    origin, dtype = choice.operand.origin, choice.operand.dtype
    if op.kind == "closed":
        return f"{op.contraction.op} cannot be entered"
    if origin.cache is not None:
        return f"{origin.cache}, a cache: its real values"
    if not frozen.isdisjoint(origin.weights):
        return "integers that no rule is for: weight-only"
    if choice.rule is not None and not is_wanted(choice.rule):
        return "the rule says None"
    if not checks.is_float(dtype):
        return f"{dtype}: only floating operands are quantized"
    if choice.rule is not None:
        return "the rule has no spec for this operand"
    made = ", ".join(sorted(origin.params)) if origin.role == "derived" else ""
    with_data = f"computed from {', '.join(sorted(origin.computed))} and data" if origin.computed else "no parameter"
    gathered = f"{', '.join(origin.parts)}, gathered by data" if gathered_by_data(origin) else with_data
    return {
        "weight": "no rule matches",
        "act_act": f'{gathered}; Rule(..., kind="act_act")',
        "derived": f'computed from {made}; Rule(..., kind="derived")' if made else 'Rule(..., kind="derived")',
        "captured": 'closed over; Rule(..., kind="captured")',
        "params": "both operands are parameters",
        "gradient": 'in a backward pass; Rule(..., kind="gradient")',
    }[op.kind]


def counts_of(matcher: Matcher, quantized: Set[str]) -> dict[str, Count]:
    """The parameters by what becomes of them."""
    order = "quantized", "left in float by a rule", "without a rule", "matched, but no operand"
    counts = dict.fromkeys(order, Count())
    for path, leaf in matcher.leaves.items():
        rule = matcher.for_path(path)
        what = "quantized" if path in quantized else "without a rule"
        if what != "quantized" and rule is not None:
            what = "left in float by a rule" if rule.weight is None else "matched, but no operand"
        old, numbers = counts[what], math.prod(leaf.shape)
        nbytes = numbers * getattr(leaf.dtype, "itemsize", 0)
        counts[what] = Count(old.parameters + 1, old.numbers + numbers, old.nbytes + nbytes)
    return {what: count for what, count in counts.items() if count.parameters}
