# SPDX-License-Identifier: Apache-2.0
"""The contractions of a function by kind and name, and which rule is for which of their operands."""

import collections
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .._base._checks import is_float
from .._program._jaxpr import NAME
from .._program._origin import Origin, computed
from .._program._walk import Contraction, Operand
from .._spec._rule import Rule, first_rule
from ._caches import Cache


class MatchedOp(NamedTuple):
    """A contraction, and the rules for it.

    Attributes:
      contraction: as the walk found it, with its operands in the roles in which the rules take them.
      kind: as `Site` lists them.
      name: of the op.
      weight: which operand is the weight; None where none is.
      rules: the rule of this kind for each operand, or None.
      own: for each operand that is a parameter and not the weight, the rule for its path, or None.
      inside: for each operand the parameters that it is computed from or gathered of, with their rules.
      names: of the sites of the operands.
    """

    contraction: Contraction
    kind: str
    name: str
    weight: int | None
    rules: tuple[Rule | None, ...] = ()
    own: tuple[Rule | None, ...] = ()
    inside: tuple[tuple[tuple[str, Rule], ...], ...] = ()
    names: tuple[str, ...] = ()

    @property
    def origins(self) -> list[Origin]:
        return [operand.origin for operand in self.contraction.operands]

    def left_out(self, side: int, quantized: Collection[str] = ()) -> list[tuple[str, Rule]]:
        """The parameters inside an operand that a rule would quantize, and that no site does; with the rule of each."""
        inside = self.inside[side]
        return [(path, rule) for path, rule in inside if rule.weight and not rule.optional and path not in quantized]

    def subjects(self, side: int) -> list[str]:
        """The names with which the pattern of a rule for an operand is matched."""
        of_weight = self.origins[self.weight or 0]
        if self.kind == "weight":
            return list(of_weight.weights)
        if self.kind == "value":
            return names_of(self)
        if self.kind in ("derived", "captured"):
            return [self.name, *filter(None, [of_weight.name]), *sorted(of_weight.params)]
        return list(dict.fromkeys([self.name, names_of(self)[side]]))


def kind_of(contraction: Contraction) -> str:
    """The kind of a contraction, as `Site` lists them."""
    if contraction.op == NAME:
        return "value"
    if contraction.is_closed:
        return "closed"
    roles = {operand.origin.role for operand in contraction.operands}
    if contraction.gradient:
        return "gradient"
    if roles <= {"weight", "derived"}:
        return "params"
    return next((role for role in ("weight", "derived", "captured") if role in roles), "act_act")


def ops_of(contractions: Sequence[Contraction]) -> list[MatchedOp]:
    """The contractions with names, without those of constants alone."""
    counts, ops = collections.Counter(), []
    for c in contractions:
        # Constants alone, but not those that are named; and the names that a backward pass repeats.
        is_constant = all(operand.origin.role == "captured" for operand in c.operands)
        if c.gradient == "transpose" if c.op == NAME else is_constant:
            continue
        base = "/".join(filter(None, (c.scope, c.op)))
        ops.append(_matched(c, f"{base}_{counts[base]}"))
        counts[base] += 1
    return ops


def _matched(contraction: Contraction, name: str) -> MatchedOp:
    """A contraction with its kind, and as its weight what has the role that the kind is called by."""
    kind, roles = kind_of(contraction), [operand.origin.role for operand in contraction.operands]
    return MatchedOp(contraction, kind, name, roles.index(kind) if kind in roles and kind != "data" else None)


def names_of(op: MatchedOp) -> list[str]:
    """The names of the operands, before equal ones are numbered."""
    origins = op.origins
    if op.kind == "value":
        return [op.contraction.params["name"]]
    if op.kind == "closed":
        return [origin.path or f"{op.name}:{i}" for i, origin in enumerate(origins)]
    if op.weight is None:
        return [
            origin.name or origin.path or f"{op.name}:{s}" for origin, s in zip(origins, ("lhs", "rhs"), strict=True)
        ]
    of_weight = origins[op.weight]
    weight = of_weight.path if of_weight.path is not None else of_weight.name or op.name
    other = origins[1 - op.weight].name or f"{weight}:input"
    return [weight, other] if op.weight == 0 else [other, weight]


def numbered(names: Sequence[str], paths: Collection[str]) -> list[str]:
    """Names that are all different: the second of equal ones has "#2" after it, or the next that no other has.

    `paths` are of parameters and caches, which no other name may be.
    """
    seen, taken, found = collections.Counter(), {*names, *paths}, []
    for name in names:
        seen[name] += 1
        numbers = itertools.count(seen[name])
        own = name if seen[name] == 1 else next(new for n in numbers if (new := f"{name}#{n}") not in taken)
        taken.add(own)
        found.append(own)
    return found


def with_names(ops: Sequence[MatchedOp], paths: Collection[str]) -> list[MatchedOp]:
    """The ops with names for their sites."""
    names = iter(numbered([name for op in ops for name in names_of(op)], paths))
    return [op._replace(names=tuple(next(names) for _ in op.contraction.operands)) for op in ops]


class Matches(NamedTuple):
    """The contractions of a function, with the rules for them.

    Attributes:
      found: all, named values too that no rule quantizes.
      ops: those that have sites, with the names of these.
    """

    found: list[MatchedOp]
    ops: list[MatchedOp]

    def deciding(self) -> list[Rule]:
        """The rules that decide about an operand, be it by None about a parameter inside of it."""
        of_operands = [rule for op in self.found for rule in (*op.rules, *op.own) if rule is not None]
        inside = (rule for op in self.ops for of in op.inside for _, rule in of)
        return [*of_operands, *(rule for rule in inside if not is_wanted(rule))]


class Matcher(NamedTuple):
    """The rules, and what they may match.

    Attributes:
      rules: in their order.
      leaves: the parameters, by their paths.
      params: the argument that holds them, in words.
      arguments: the paths of what may be a cache.
      caches: those that rules match, by their paths.
    """

    rules: Sequence[Rule]
    leaves: Mapping[str, Any]
    params: str
    arguments: Sequence[str]
    caches: Mapping[str, Cache]

    def match(self, ops: Sequence[MatchedOp]) -> Matches:
        """The rules for the operands of ops, of `ops_of`."""
        ops = [self._with_rules(op) for op in self._with_activations([self._with_weight(op) for op in ops])]
        # A named value without a rule is a name for a site, or for nothing.
        sites = [op for op in ops if op.kind != "value" or is_wanted(op.rules[0])]
        return Matches(ops, with_names(sites, self.leaves))

    def _with_rules(self, op: MatchedOp) -> MatchedOp:
        operands, is_closed = op.contraction.operands, op.kind == "closed"

        def own(side: int) -> Rule | None:
            is_asked = is_closed or (op.kind == "weight" and side != op.weight)
            return self._of_parameter(op, side) if is_asked else None

        def inside(side: int) -> tuple[tuple[str, Rule], ...]:
            origin, gathered = operands[side].origin, gathered_by_data(operands[side].origin)
            is_of_data = not is_float(operands[side].dtype) or (origin.data and not gathered)
            if op.kind in ("weight", "gradient") or (origin.path is not None if is_closed else is_of_data):
                return ()
            paths = sorted({*origin.computed, *gathered})
            return tuple((path, rule) for path in paths if (rule := self.for_path(path, op.contraction)) is not None)

        sides = range(len(operands))
        rules = () if is_closed else tuple(self.first(op, side) for side in sides)
        return op._replace(rules=rules, own=tuple(map(own, sides)), inside=tuple(map(inside, sides)))

    def first(self, op: MatchedOp, side: int) -> Rule | None:
        """The rule for an operand."""
        return next((rule for rule in self.rules if self.matched(rule, op, side)), None)

    def matched(self, rule: Rule, op: MatchedOp, side: int) -> list[str]:
        """The names of an operand that a rule for its op matches; none if it is for other ops."""
        if rule.kind != op.kind or not is_for(rule, op.contraction):
            return []
        operand = op.contraction.operands[op.weight or 0 if op.kind == "weight" else side]
        leaf = jax.ShapeDtypeStruct(operand.shape, operand.dtype)
        return [name for name in op.subjects(side) if rule.matches(name, self.leaves.get(name, leaf))]

    def for_path(self, path: str, contraction: Contraction | None = None) -> Rule | None:
        """The first rule of kind "weight" that matches a parameter, of those for a contraction, or for any."""
        of_kind = (rule for rule in self.rules if rule.kind == "weight")
        candidates = (rule for rule in of_kind if contraction is None or is_for(rule, contraction))
        return first_rule(candidates, path, self.leaves[path])

    def _of_parameter(self, op: MatchedOp, side: int) -> Rule | None:
        """The rule for the parameter that an operand is, or for the first one in it."""
        weights = op.origins[side].weights
        return self.for_path(weights[0], op.contraction) if weights else None

    def with_roles(self, contraction: Contraction) -> Contraction:
        """The contraction with its operands in the roles in which the rules take them.

        What was concatenated of parameters that no one rule quantizes is computed from them; what was gathered is the
        parameter, where its rule wants every use quantized.
        """

        def of(operand: Operand) -> Operand:
            rules = [self.for_path(part, contraction) for part in operand.origin.parts]
            if all(rule and rule.weight and rule.everywhere for rule in rules):
                operand = operand._replace(origin=operand.origin._replace(gathered=False))
            parts = operand.origin.weights
            ranks = {len(self.leaves[part].shape) for part in parts}  # axes are counted on all of them
            if len(parts) < 2 or (is_wanted(rules[0]) and all(rule is rules[0] for rule in rules) and len(ranks) == 1):
                return operand
            return operand._replace(origin=computed([operand.origin]))

        return contraction._replace(operands=tuple(map(of, contraction.operands)))

    def _with_weight(self, op: MatchedOp) -> MatchedOp:
        """The op; of two parameters the one that a rule quantizes is the weight, and the other its input."""
        if op.kind != "params":
            return op
        rules = [self._of_parameter(op, side) for side in range(len(op.origins))]
        wanted = [side for side, rule in enumerate(rules) if is_wanted(rule)]
        if len(wanted) == 2 and op.origins[0].picked != op.origins[1].picked:
            wanted = [side for side in wanted if not op.origins[side].picked]  # a row of an embedding is an input
        if len(wanted) == 2:
            (a, b), patterns = (origin.path for origin in op.origins), [rule.pattern for rule in rules if rule]
            raise ValueError(
                f"At {a!r} and {b!r}, chosen by the rules {patterns}: two parameters are contracted with each other, "
                f"in {op.name!r}, and one of them must be the input. Name it by a rule with None before these. If all "
                f"operations look so, {self.params} is wrong."
            )
        chosen = wanted or [side for side, rule in enumerate(rules) if rule]
        return op._replace(kind="weight", weight=chosen[0]) if chosen else op

    def _with_activations(self, ops: Sequence[MatchedOp]) -> list[MatchedOp]:
        """The ops; what came out of a quantized one is an activation for the others, be it of parameters alone."""
        is_quantized = lambda op: op.kind == "weight" and is_wanted(self.first(op, op.weight or 0))
        quantized = {op.contraction.location for op in ops if is_quantized(op)}

        def of(operand: Operand) -> Operand:
            origin = operand.origin
            is_activation = not origin.computed and not quantized.isdisjoint(origin.products)
            return operand._replace(origin=origin._replace(data=True)) if is_activation else operand

        def with_roles(op: MatchedOp) -> MatchedOp:
            contraction = op.contraction._replace(operands=tuple(map(of, op.contraction.operands)))
            return op if contraction == op.contraction else _matched(contraction, op.name)

        return list(map(with_roles, ops))


def is_for(rule: Rule, contraction: Contraction) -> bool:
    """Whether the op and the scope of a rule allow a contraction; its pattern is not asked."""
    return rule.op in (None, contraction.op) and rule.in_scope(contraction.scope)


def is_exact(rule: Rule) -> bool:
    """Whether its pattern is the name of a site."""
    return isinstance(rule.pattern, str) and "*" not in rule.pattern


def is_wanted(rule: Rule | None) -> bool:
    """Whether a rule quantizes an operand; None, or a rule without a spec, leaves both in float."""
    return rule is not None and (rule.weight or rule.activation) is not None


def gathered_by_data(origin: Origin) -> tuple[str, ...]:
    """The parameters whose values it holds in an order that data say."""
    return origin.parts if origin.gathered and origin.data else ()
