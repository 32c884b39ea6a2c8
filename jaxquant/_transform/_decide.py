# SPDX-License-Identifier: Apache-2.0
"""What becomes of the ops of a function, in three passes: choices for operands, entries of qparams, and the plan."""

import collections
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from .._base import _checks as checks
from .._program._jaxpr import NAME, Location
from .._program._walk import Walk
from .._spec._granularity import PerToken
from . import _errors as errors
from ._choices import Choice, Decision, choose
from ._entries import Entries, Entry, entries_of, gradient_entries, keyed, read_entry
from ._match import MatchedOp, Matcher, gathered_by_data, is_wanted, names_of, numbered, ops_of, with_names
from ._plan import Count, Plan, Site


class Decisions(NamedTuple):
    """The plan, and what follows from it for the evaluation."""

    plan: Plan
    of: Mapping[Location, Decision]
    custom: Mapping[Location, str]
    entries: Entries

    def taken_once(self) -> frozenset[str]:
        """The keys of what one op alone quantizes: an input, or a parameter that it takes as it is."""
        choices = [choice for of in self.of.values() for choice in of.operands]
        times = collections.Counter(key for choice in choices for key in choice.keys)
        return frozenset(
            key for choice in choices for key in choice.keys
            if times[key] == 1 and choice.is_taken_whole and not self.entries.of[key].reads
        )  # fmt: skip


def decide(
    walk: Walk, matcher: Matcher, strict: bool, static: Set[str], frozen: Set[str], caches: Sequence[Site]
) -> Decisions:
    """Matches rules and sites; every error of selection is raised here.

    `static` are the entries that have qparams; `frozen` the parameters that are integers already; `caches` the sites of
    what is neither.
    """
    found = ops_of([matcher.with_roles(contraction) for contraction in walk.found()])
    errors.refuse_captured_model(found, matcher)
    found = matcher.with_activations([matcher.with_weight(op) for op in found])
    # A named value without a rule is a name for a site, or for nothing.
    ops = with_names([op for op in found if op.kind != "value" or is_wanted(matcher.first(op, 0))], matcher.leaves)
    decisions = keyed(choose(ops, matcher, strict))
    reads = _reads(decisions, walk.reads)
    used = entries_of(decisions, matcher.leaves)
    entries, everywhere = _with_reads(used, reads, matcher, ops)
    states = {key: "frozen" if key in frozen else "static" if key in static else "dynamic" for key in entries}
    sites = [*caches, *(site for decision in decisions for site in _sites(decision, entries, states, frozen))]
    sites += [_site_of_read(name, reads[path], entries[path], states[path]) for path, name in everywhere.items()]

    quantized = {of.contraction.location: of for of in decisions if any(choice.spec for choice in of.operands)}
    custom = _custom(quantized.values())
    paths = _quantized_parameters(decisions) | {key for key, entry in entries.items() if entry.is_weight}
    left_in_float = next(_left_in_float(decisions, matcher, paths), None)
    _check_gradient(sites, matcher, bool(quantized))
    for i, rule in enumerate(matcher.rules):
        if i not in matcher.used and not rule.optional:
            raise errors.unused_rule(i, matcher, found)
    without = [site.name for site in sites if site.rule is None and not site.spec and site.kind != "closed"]
    if strict and without:
        raise ValueError(
            f"`strict=True` needs a rule for every site, got none for {', '.join(map(repr, without))}. Quantize them, "
            "or leave them in float by a rule with None: q.plan(...) prints their kinds."
        )
    if left_in_float:
        raise left_in_float
    keys = {location: [choice.keys for choice in decision.operands] for location, decision in quantized.items()}
    left = {site.name: site.why for site in sites if site.spec is None}
    plan, gradients = Plan(tuple(sites), _counts(matcher, paths)), gradient_entries(quantized.values())
    if name := next((key for key in gradients if key in matcher.leaves), None):
        raise ValueError(
            f"{name!r} is the path of a parameter and the name of the history of a gradient. Rename the parameter, or "
            "drop `history` from the rule."
        )
    return Decisions(plan, quantized, custom, Entries(entries, keys, left, gradients))


# Entries: what else reads a parameter


def _reads(decisions: Sequence[Decision], of_walk: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """What reads each parameter in float, or otherwise than as what an op contracts in integers."""
    reads = {path: set(by) for path, by in of_walk.items()}
    for decision in decisions:
        for choice in decision.operands:
            if decision.op.kind != "closed" and (choice.spec is None or not choice.is_weight):
                origin = choice.operand.origin
                for path in origin.parts:
                    reads.setdefault(path, set()).add("gather" if origin.gathered else choice.name)
    return reads


def _with_reads(
    used: Mapping[str, Entry], reads: Mapping[str, Set[str]], matcher: Matcher, ops: Sequence[MatchedOp]
) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries with what else reads them, and the names of the sites of parameters that all see quantized."""
    entries, everywhere = dict(used), []
    for path, by in reads.items():
        rule = used[path].rule if path in used else matcher.for_path(path)
        if rule and rule.weight and rule.everywhere and checks.is_float(matcher.leaves[path].dtype):
            matcher.used.add(matcher.rules.index(rule))
            entries[path] = used.get(path) or read_entry(path, rule, matcher.leaves[path])
            everywhere.append(path)
        if by and path in entries and entries[path].is_weight:  # read in float too, it lies as it always did
            entries[path] = entries[path]._replace(reads=tuple(sorted(by)), order=None)
    before = [name for op in ops for name in names_of(op)]
    names = dict(zip(everywhere, numbered([*before, *everywhere], matcher.leaves)[len(before) :], strict=True))
    for path, name in names.items():
        entries[path] = entries[path]._replace(sites=(*entries[path].sites, name))
    return entries, names


# The plan


def _sites(
    decision: Decision, entries: Mapping[str, Entry], states: Mapping[str, str], frozen: Set[str]
) -> Iterator[Site]:
    """The operands of an op; of one that is closed the parameters."""
    op, c = decision.op, decision.contraction
    for choice in decision.operands:
        (_, operand, _, rule, spec, *_), keys = choice, choice.keys
        if op.kind == "closed" and operand.origin.path is None:
            continue
        activation = rule.activation if rule and not choice.is_weight else None
        yield Site(
            choice.name, op.kind, c.op, c.scope, operand.shape, operand.dtype, _length(decision), spec,
            None if rule is None else rule.pattern, "" if spec else _why(op, choice, frozen), ", ".join(keys),
            entries[keys[0]].spec if keys else None, states[keys[0]] if keys else "",
            is_per_token=spec is not None and bool(activation) and activation.granularity == PerToken(),
            scaled_by=entries[keys[0]].scaled_by if keys else "",
            cache=operand.origin.cache or "",
        )  # fmt: skip


def _site_of_read(name: str, by: Collection[str], entry: Entry, state: str) -> Site:
    """The site of a parameter that something else than a contraction reads, and that all see quantized."""
    return Site(
        name, "weight", ", ".join(sorted(by)), "", entry.shape, entry.dtype, 0, entry.spec, entry.rule.pattern, "",
        entry.key, entry.spec, state,
    )  # fmt: skip


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
        return "integers that no rule is for: their real values"
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


def _counts(matcher: Matcher, quantized: Set[str]) -> dict[str, Count]:
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


# What the choices mean together


def _quantized_parameters(decisions: Sequence[Decision]) -> set[str]:
    """The paths of the parameters that some site quantizes, as they are or in what is computed from them."""
    paths = set()
    for decision in decisions:
        for choice in decision.operands:
            if choice.spec is not None and (decision.op.kind != "weight" or choice.is_weight):
                origin = choice.operand.origin
                paths |= {*origin.parts, *(() if origin.data else origin.computed)}
    return paths


def _left_in_float(decisions: Sequence[Decision], matcher: Matcher, quantized: Set[str]) -> Iterator[ValueError]:
    """What is wrong where a rule quantizes a parameter that meets its ops only as something else."""
    for decision in decisions:
        op = decision.op
        for choice in () if op.kind in ("weight", "gradient", "closed") else decision.operands:
            origin, is_gathered = choice.operand.origin, bool(gathered_by_data(choice.operand.origin))
            if not checks.is_float(choice.operand.dtype) or (origin.data and not is_gathered):
                continue
            left = matcher.left_out(op, origin, quantized)
            if left and choice.rule is None:
                yield errors.left_in_float(op, choice.name if is_gathered else op.name, origin, left)


def _check_gradient(sites: Sequence[Site], matcher: Matcher, is_quantized: bool) -> None:
    """Rules for the function do not mean the derivatives that it takes by itself."""
    name = next((site.name for site in sites if site.kind == "gradient" and site.rule is None), None)
    if name is not None and (is_quantized or any(map(is_wanted, matcher.rules))):
        raise errors.differentiates(name)


def _custom(decisions: Iterable[Decision]) -> dict[Location, str]:
    """How the calls with a derivative of their own around quantized ops are treated."""
    custom: dict[Location, str] = {}
    for decision in decisions:
        said = [choice.rule.custom for choice in decision.operands if choice.rule and choice.spec]
        for location in decision.contraction.custom:
            choices = {*said, custom.get(location, said[0])}
            if None in choices or len(choices) > 1:
                of_rules = "nothing" if choices == {None} else " and ".join(sorted(map(repr, choices)))
                raise ValueError(
                    f"At {' and '.join(map(repr, decision.op.names))}: the op is inside a function with a derivative "
                    f"of its own (jax.custom_jvp or custom_vjp), and the rules say {of_rules} about it. Choose one for "
                    'all sites in it: Rule(..., custom="keep") for the derivative that its author wrote, at the '
                    'unquantized values, or Rule(..., custom="inline") for the derivative of the quantized ops, which '
                    "JAX takes only where no while loop is inside. With an ODE solver, quantize the vector field "
                    "instead, before it is solved."
                )
            custom[location] = choices.pop() or ""
    return custom
