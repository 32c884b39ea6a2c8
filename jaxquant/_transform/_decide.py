# SPDX-License-Identifier: Apache-2.0
"""The decisions about a function, from rules and a walk: choices for operands, entries of qparams, and the plan."""

import collections
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from .._program._jaxpr import Location
from .._program._walk import Walk
from .._spec._rule import Rule
from . import _errors as errors
from ._choose import Decision, choose
from ._entries import Entries, entries_of, gradient_entries, keyed, reads_of, with_reads
from ._fused import Fused, Fusing, with_keys
from ._match import Matcher, Matches, gathered_by_data, is_wanted, ops_of
from ._plan import Plan, Site
from ._sites import Sites, counts_of, sites_of


class Decisions(NamedTuple):
    """The plan, and what follows from it for the evaluation.

    Attributes:
      plan: of the function.
      of: each op that is quantized, by where it is.
      left: each op that no rule quantizes, and that takes parameters which are integers already.
      custom: of each call with a custom derivative, around such an op, "keep" or "inline".
      entries: of the function.
      sites: of the ops and of reads, by where they are.
      fused: of each value that is quantized for a runtime, by where it is named.
    """

    plan: Plan
    of: Mapping[Location, Decision]
    left: Mapping[Location, Decision]
    custom: Mapping[Location, str]
    entries: Entries
    sites: Sites
    fused: Mapping[Location, Fused]

    def taken_once(self) -> frozenset[str]:
        """The keys of inputs that one op alone quantizes."""
        choices = [choice for of in self.of.values() for choice in of.operands]
        times = collections.Counter(key for choice in choices for key in choice.keys)
        return frozenset(key for key, n in times.items() if n == 1)


class Given(NamedTuple):
    """What is known about the arguments of a call.

    Attributes:
      static: the entries that have qparams.
      frozen: the parameters that are integers already.
      caches: the sites of what is neither.
    """

    static: Set[str]
    frozen: Set[str]
    caches: Sequence[Site]


def decide(walk: Walk, matcher: Matcher, strict: bool, given: Given, fusing: Fusing | None) -> Decisions:
    """Matches rules and sites; every error of selection is raised here.

    `fusing` is of the runtime that serves the function, if there is one.
    """
    static, frozen, caches = given
    found = ops_of([matcher.with_roles(contraction) for contraction in walk.found()])
    errors.refuse_captured_model(found, matcher)
    matches = matcher.match(found)
    chosen = choose(matches.ops, matcher, strict)
    fused = fusing.fused(chosen) if fusing else {}
    decisions = keyed(chosen, {at: of.tied for at, of in fused.items() if of.tied is not None})
    fused = with_keys(fused, decisions)
    used, reads = entries_of(decisions, matcher.leaves), reads_of(decisions, walk.reads)
    entries, everywhere = with_reads(used, reads, matcher, matches.ops)
    states = {key: "frozen" if key in frozen else "static" if key in static else "dynamic" for key in entries}
    kernels = {at: of.words for at, of in fused.items()} | (fusing.left(decisions, fused) if fusing else {})
    of_sites = sites_of(decisions, entries, everywhere, states, frozen, kernels)
    sites = [*caches, *of_sites.of_ops.values(), *of_sites.of_reads.values()]

    quantized = {of.contraction.location: of for of in decisions if any(choice.spec for choice in of.operands)}
    takes = lambda of: any(not frozen.isdisjoint(choice.operand.origin.weights) for choice in of.operands)
    others = {of.contraction.location: of for of in decisions if not of.contraction.custom and takes(of)}
    others = {location: of for location, of in others.items() if location not in quantized}
    custom, gradients = _custom(quantized.values()), gradient_entries(quantized.values())
    paths = _quantized_parameters(decisions) | {key for key, entry in entries.items() if entry.is_weight}
    _check_gradient(sites, matcher, bool(quantized))
    deciding = [*matches.deciding(), *(entry.rule for entry in entries.values())]
    _check_all_used(deciding, matches, matcher)
    _check_strict(sites, strict)
    _check_left_in_float(decisions, paths)
    if name := next((key for key in gradients if key in matcher.leaves), None):
        raise ValueError(
            f"{name!r} is the path of a parameter and the name of the history of a gradient. Rename the parameter, or "
            "drop `history` from the rule."
        )
    keys = {location: [choice.keys for choice in decision.operands] for location, decision in quantized.items()}
    left = {site.name: site.why for site in sites if site.spec is None}
    plan = Plan(tuple(sites), counts_of(matcher, paths))
    return Decisions(plan, quantized, others, custom, Entries(entries, keys, left, gradients), of_sites, fused)


def _check_all_used(deciding: Iterable[Rule], matches: Matches, matcher: Matcher) -> None:
    """Raises for a rule that decides nothing, unless it is optional."""
    used = set(map(id, (*deciding, *(cache.rule for cache in matcher.caches.values()))))
    for i, rule in enumerate(matcher.rules):
        is_again = any(rule is earlier for earlier in matcher.rules[:i])
        if (is_again or id(rule) not in used) and not rule.optional:
            raise errors.unused_rule(i, matcher, matches.found)


def _check_strict(sites: Sequence[Site], strict: bool) -> None:
    without = [site.name for site in sites if site.rule is None and not site.spec and site.kind != "closed"]
    if strict and (floats := Plan(tuple(sites), {}).in_float):
        raise ValueError(
            f"`strict=True` wants integers between the ops of a runtime, and it would compute {', '.join(floats)}. "
            "Leave these out of the function, write them by ops that the runtime has kernels for, or drop `strict`."
        )
    if strict and without:
        raise ValueError(
            f"`strict=True` needs a rule for every site, got none for {', '.join(map(repr, without))}. Quantize them, "
            "or leave them in float by a rule with None: q.plan(...) prints their kinds."
        )


def _quantized_parameters(decisions: Sequence[Decision]) -> set[str]:
    """The paths of the parameters that some site quantizes, as they are or in what is computed from them."""
    paths = set()
    for decision in decisions:
        for choice in decision.operands:
            if choice.spec is not None and (decision.op.kind != "weight" or choice.is_weight):
                origin = choice.operand.origin
                paths |= {*origin.parts, *(() if origin.data else origin.computed)}
    return paths


def _check_left_in_float(decisions: Sequence[Decision], quantized: Set[str]) -> None:
    """Raises where a rule quantizes a parameter that meets its ops only as something else."""
    for decision in decisions:
        op = decision.op
        for side, choice in () if op.kind == "closed" else enumerate(decision.operands):
            if (left := op.left_out(side, quantized)) and choice.rule is None:
                is_gathered = bool(gathered_by_data(choice.operand.origin))
                raise errors.left_in_float(op, choice.name if is_gathered else op.name, choice.operand.origin, left)


def _check_gradient(sites: Sequence[Site], matcher: Matcher, is_quantized: bool) -> None:
    """Rules for the function do not mean the derivatives that it takes by itself."""
    name = next((site.name for site in sites if site.kind == "gradient" and site.rule is None), None)
    if name is not None and (is_quantized or any(map(is_wanted, matcher.rules))):
        raise errors.differentiates(name)


def _custom(decisions: Iterable[Decision]) -> dict[Location, str]:
    """The treatment of calls with a derivative of their own around quantized ops."""
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
