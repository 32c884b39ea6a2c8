# SPDX-License-Identifier: Apache-2.0
"""Which operand of which dot or convolution is quantized to what, by which rule, and why the others are not."""

import collections
import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _checks as checks
from .._jaxpr import Contraction, Location, Operand, Origin
from .._spec import PerBlock, PerChannel, PerTensor, QuantSpec, qparams_shape
from .._tree import Rule, named_in_errors


class Site(NamedTuple):
    """One operand of a dot or a convolution.

    Attributes:
      name: the path of the parameter; "path:input" of what it is contracted with; else what `quant_point` called it or
        the scope of the op and its number there.
      kind: "weight", "act_act", "derived", "captured", "gradient", as in `Rule`; "params" where both operands are
        parameters; "closed" where the op cannot be entered.
      op: the primitive.
      scope: the scope of the op.
      shape, dtype: of the operand.
      length: how many products are summed for one result: K.
      spec: QuantSpec with the axes of the operand; None if it is left in float.
      rule: the pattern of the rule that decided, None if there was none.
      why: why it is left in float; empty if it is not.
    """

    name: str
    kind: str
    op: str
    scope: str
    shape: tuple[int, ...]
    dtype: Any
    length: int
    spec: QuantSpec | None
    rule: Any
    why: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sites of a function: iterate over it, take one by its name, or print the table."""

    sites: tuple[Site, ...]

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, name: str) -> Site:
        for site in self.sites:
            if site.name == name:
                return site
        raise KeyError(f"{name!r}; the nearest names: {_nearest(name, [site.name for site in self.sites])}")

    def __str__(self) -> str:
        header = ("site", "op", "shape", "K", "quantized to", "rule", "why not")
        rows = [
            (
                site.name or "''",
                site.op,
                f"{site.dtype}[{','.join(map(str, site.shape))}]",
                str(site.length),
                _in_words(site.spec) if site.spec else "-",
                "-" if site.rule is None else _pattern_in_words(site.rule),
                site.why,
            )
            for site in self.sites
        ]
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        line = lambda row: "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        quantized = sum(site.spec is not None for site in self.sites)
        return "\n".join([line(header), *map(line, rows), f"{quantized} of {len(rows)} sites are quantized"])


def _pattern_in_words(pattern: Any) -> str:
    if isinstance(pattern, str):
        return pattern
    return getattr(pattern, "pattern", None) or getattr(pattern, "__name__", type(pattern).__name__)


def _in_words(spec: QuantSpec) -> str:
    kind = spec.granularity
    per = "tensor" if isinstance(kind, PerTensor) else f"channel {kind.axis}"
    if isinstance(kind, PerBlock):
        per = f"block of {kind.size} on {kind.axis}"
    sign = "" if spec.signed else "unsigned "
    return f"{spec.bits} bits {sign}{'symmetric' if spec.symmetric else 'affine'} per {per}"


class Decision(NamedTuple):
    """What happens to one contraction: a spec, or None, and a name for each of its two operands."""

    contraction: Contraction
    specs: Sequence[QuantSpec | None]
    names: Sequence[str]
    rules: Sequence[Rule | None]
    contracted: tuple[tuple[int, ...], tuple[int, ...]]


class Decisions(NamedTuple):
    """The plan, and what follows from it for the evaluation."""

    plan: Plan
    of: Mapping[Location, Decision]
    custom: Mapping[Location, str]

    def rounds_stochastically(self) -> bool:
        """Whether a key is needed."""
        return any(site.spec is not None and site.spec.rounding == "stochastic" for site in self.plan)


def _nearest(text: str, names: Sequence[str], n: int = 5) -> str:
    found = difflib.get_close_matches(text.replace("*", ""), list(dict.fromkeys(names)), n, 0.0)
    return ", ".join(map(repr, found)) or "none"


# What an op sums over


def contracted_axes(contraction: Contraction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each operand, the axes along which one result sums, or which share a scale all the same."""
    shapes = [operand.shape for operand in contraction.operands]
    numbers = contraction.params["dimension_numbers"]
    if contraction.op == "dot_general":
        return tuple(numbers[0][0]), tuple(numbers[0][1])
    batched = contraction.params["batch_group_count"] == 1
    kept = (numbers.lhs_spec[0],) if batched else (), (numbers.rhs_spec[0],)
    lhs, rhs = (tuple(i for i in range(len(shape)) if i not in of) for shape, of in zip(shapes, kept, strict=True))
    return lhs, rhs


def _length(contraction: Contraction) -> int:
    """K, the number of products in a sum."""
    axes, shape = contracted_axes(contraction)[1], contraction.operands[1].shape
    return math.prod(shape[i] for i in axes)


def _on_operand(spec: QuantSpec, operand: Operand, contracted: tuple[int, ...], leaf: Any) -> QuantSpec:
    """The spec with its axes counted on the operand; those of a parameter are counted on the parameter."""
    kind, ndim = spec.granularity, len(operand.shape)
    if isinstance(kind, PerTensor):
        return spec
    with_ = lambda granularity: dataclasses.replace(spec, granularity=granularity)
    per_channel = lambda axes: with_(PerChannel(tuple(axes)) if axes else PerTensor())
    if kind.axis is None:
        if isinstance(kind, PerChannel):
            return per_channel([i for i in range(ndim) if i not in contracted])
        if len(contracted) != 1:
            raise ValueError(
                f"{spec} has blocks along the contracted axis, and this op contracts {len(contracted)} of shape "
                f"{operand.shape}: {contracted}. Name one: QuantSpec(granularity=PerBlock(axis, {kind.size}))."
            )
        return with_(PerBlock(contracted[0], kind.size))
    if operand.origin.path is None:
        return spec
    qparams_shape(with_(PerChannel(kind.axis)), leaf.shape)
    of_leaf = {a % len(leaf.shape) for a in (kind.axis if isinstance(kind.axis, tuple) else (kind.axis,))}
    axes = [i for i, along in enumerate(operand.origin.axes) if along & of_leaf]
    split = isinstance(kind, PerBlock) and len(axes) != 1
    if split or any(not operand.origin.axes[i] <= of_leaf for i in axes):
        raise ValueError(
            f"{kind} of a parameter of shape {leaf.shape} is no axis of the operand of shape {operand.shape} that the "
            f"function makes of it, whose axes run along {[sorted(along) for along in operand.origin.axes]}. Name axes "
            "that stay apart from the others, or leave the axis None for the output channels of the op."
        )
    return with_(PerBlock(axes[0], kind.size)) if isinstance(kind, PerBlock) else per_channel(axes)


def _check_shared(spec: QuantSpec, shape: tuple[int, ...], contracted: tuple[int, ...], op: str) -> None:
    """A scale that is applied after the contraction is shared along it, or by the blocks of a dot."""
    kind, groups = spec.granularity, qparams_shape(spec, shape) or (1,) * len(shape)
    blocked = kind.axis % len(shape) if isinstance(kind, PerBlock) and kind.axis is not None else None
    separate = [i for i in contracted if groups[i] > 1 and (i != blocked or op != "dot_general")]
    if separate:
        raise ValueError(
            f"along the contracted axes {separate} of an operand of shape {shape}, {spec} has a scale of its own for "
            "each element, which cannot be applied after the contraction. Share the scale along them: PerTensor, "
            "PerChannel on other axes, or, in a dot, PerBlock along a contracted one. With one operand in float any "
            "does."
        )


# Which rule is for what


class _Op(NamedTuple):
    """A contraction with its kind, its name, and which of its operands is the weight."""

    contraction: Contraction
    kind: str
    name: str
    weight: int | None

    @property
    def origins(self) -> list[Origin]:
        """Those of the operands."""
        return [operand.origin for operand in self.contraction.operands]

    def subjects(self, side: int) -> list[str]:
        """What the pattern of a rule for an operand is matched with."""
        of_weight = self.origins[self.weight or 0]
        if self.kind == "weight":
            return [of_weight.path or ""]
        if self.kind in ("derived", "captured"):
            return [self.name, *filter(None, [of_weight.name]), *sorted(of_weight.params)]
        return list(dict.fromkeys([self.name, _names(self)[side]]))


def _kind(contraction: Contraction) -> str:
    if contraction.is_closed:
        return "closed"
    roles = {operand.origin.role for operand in contraction.operands}
    if contraction.gradient:
        return "gradient"
    if roles <= {"weight", "derived"}:
        return "params"
    return next((role for role in ("weight", "derived", "captured") if role in roles), "act_act")


def _ops(contractions: Sequence[Contraction]) -> list[_Op]:
    """The contractions with names, without those of constants alone."""
    counts, ops = collections.Counter(), []
    for c in contractions:
        roles = [operand.origin.role for operand in c.operands]
        if all(role == "captured" for role in roles):
            continue
        kind = _kind(c)
        base = "/".join(filter(None, (c.scope, c.op)))
        name = f"{base}_{counts[base]}"
        counts[base] += 1
        weight = roles.index(kind) if kind in ("weight", "derived", "captured") else None
        ops.append(_Op(c, kind, name, weight))
    return ops


def _names(op: _Op) -> list[str]:
    """The names of the operands, before equal ones are numbered."""
    origins = [operand.origin for operand in op.contraction.operands]
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


class _Matcher:
    """The rules, and which of them have decided something."""

    def __init__(self, rules: Sequence[Rule], leaves: Mapping[str, Any], params: str):
        self.rules, self.leaves, self.params = rules, leaves, params
        self.used, self.shadowed = set(), {}

    def first(self, op: _Op, side: int) -> Rule | None:
        """The rule for an operand."""
        operand, found = op.contraction.operands[op.weight or 0 if op.kind == "weight" else side], None
        for i, rule in enumerate(self.rules):
            if rule.kind != op.kind or not _is_for(rule, op):
                continue
            leaf = jax.ShapeDtypeStruct(operand.shape, operand.dtype)
            matched = [name for name in op.subjects(side) if rule.matches(name, self.leaves.get(name, leaf))]
            if matched and found is None:
                self.used.add(i)
                found = rule
            elif matched:
                self.shadowed.setdefault(i, (matched[0], found))
        return found

    def of_parameter(self, op: _Op, path: Any) -> Rule | None:
        """The rule for a parameter where it is no operand that a rule of kind "weight" is for."""
        rules = enumerate(self.rules) if path in self.leaves else ()
        for i, rule in rules:
            if rule.kind == "weight" and _is_for(rule, op) and rule.matches(path, self.leaves[path]):
                self.used.add(i)
                return rule
        return None

    def resolved(self, op: _Op) -> _Op:
        """Of two parameters the one that a rule quantizes is the weight, and the other its input."""
        rules = [self.of_parameter(op, origin.path) for origin in op.origins]
        wanted = [side for side, rule in enumerate(rules) if _wanted(rule)]
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


def _is_for(rule: Rule, op: _Op) -> bool:
    return rule.op in (None, op.contraction.op) and rule.in_scope(op.contraction.scope)


def _wanted(rule: Rule | None) -> bool:
    return rule is not None and (rule.weight or rule.activation) is not None


def decide(
    contractions: Sequence[Contraction], rules: Sequence[Rule], leaves: Mapping[str, Any], params: str, strict: bool
) -> Decisions:
    """Matches rules and sites; every error of selection is raised here."""
    matcher, ops = _Matcher(rules, leaves, params), _ops(contractions)
    seen, sites, decisions, custom = collections.Counter(), [], {}, {}
    for i, op in enumerate(ops):
        if op.kind == "params":
            ops[i] = op = matcher.resolved(op)
        names = [_numbered(name, seen) for name in _names(op)]
        if op.kind == "closed":
            sites += _closed(op, names, matcher)
            continue
        decision = _decision(op, names, matcher)
        sites += _sites(op, decision)
        if any(decision.specs):
            decisions[op.contraction.location] = decision
            _note_custom(op, decision, custom)
    _refuse_gradient([site for site in sites if site.kind == "gradient" and site.rule is None], decisions, rules)
    for i, rule in enumerate(rules):
        if i not in matcher.used and not rule.optional:
            raise ValueError(_unused(i, rule, matcher, ops))
    open_ = [site.name for site in sites if site.rule is None and not site.spec and site.kind != "closed"]
    if strict and open_:
        raise ValueError(
            f"`strict=True` wants a rule for every site, got none for {', '.join(map(repr, open_))}. Quantize them, or "
            "leave them in float by a rule with None: q.plan(...) prints their kinds."
        )
    return Decisions(Plan(tuple(sites)), decisions, custom)


def _numbered(name: str, seen: collections.Counter) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"


def _decision(op: _Op, names: list[str], matcher: _Matcher) -> Decision:
    contraction = op.contraction
    contracted = contracted_axes(contraction)
    rules, specs = [], []
    for side, operand in enumerate(contraction.operands):
        rule = matcher.first(op, side)
        is_weight = side == op.weight or (op.kind == "gradient" and operand.origin.role != "data")
        if op.kind == "weight" and not is_weight:  # a parameter as the input of another may have a rule of its own
            own = matcher.of_parameter(op, operand.origin.path)
            rule = rule if own is None or _wanted(own) else own
        spec = rule and (rule.weight if is_weight else rule.activation)
        if spec is not None:
            with named_in_errors(names[side], rule=rule):
                if not checks.is_float(operand.dtype):
                    raise ValueError(
                        f"an operand must be floating to be quantized, got {operand.dtype}. Leave it in float by a "
                        "rule with None before this one."
                    )
                spec = _on_operand(spec, operand, contracted[side], matcher.leaves.get(operand.origin.path or ""))
                qparams_shape(spec, operand.shape)
        rules.append(rule)
        specs.append(spec)
    if None not in specs:
        for name, rule, spec, operand, axes in zip(names, rules, specs, contraction.operands, contracted, strict=True):
            with named_in_errors(name, rule=rule):
                _check_shared(spec, operand.shape, axes, contraction.op)
    return Decision(contraction, tuple(specs), tuple(names), tuple(rules), contracted)


def _sites(op: _Op, decision: Decision) -> Iterator[Site]:
    c = op.contraction
    for name, operand, spec, rule in zip(decision.names, c.operands, decision.specs, decision.rules, strict=True):
        why = "" if spec else _why(op, operand.origin, rule)
        yield Site(
            name, op.kind, c.op, c.scope, operand.shape, np.dtype(operand.dtype), _length(c), spec,
            None if rule is None else rule.pattern, why,
        )  # fmt: skip


def _why(op: _Op, origin: Origin, rule: Rule | None) -> str:
    """Why a site is left in float."""
    if rule is not None:
        return "the rule says None" if not _wanted(rule) else "the rule has no spec for this operand"
    made = ", ".join(sorted(origin.params)) if origin.role == "derived" else ""
    return {
        "weight": "no rule matches",
        "act_act": 'no parameter; Rule(..., kind="act_act")',
        "derived": f'computed from {made}; Rule(..., kind="derived")' if made else 'Rule(..., kind="derived")',
        "captured": 'closed over; Rule(..., kind="captured")',
        "params": "both operands are parameters",
        "gradient": 'in a backward pass; Rule(..., kind="gradient")',
    }[op.kind]


def _closed(op: _Op, names: list[str], matcher: _Matcher) -> Iterator[Site]:
    """Those parameters that go where nothing can be replaced; an error if a rule wants one quantized."""
    for name, operand in zip(names, op.contraction.operands, strict=True):
        path = operand.origin.path
        if path is None:
            continue
        rule = matcher.of_parameter(op, path)
        if rule is not None and _wanted(rule):
            with named_in_errors(path, rule=rule):
                raise ValueError(
                    f"the parameter goes into {op.contraction.op!r}, at {op.name!r}, where quantize_fn cannot replace "
                    f"anything. Leave it in float by a rule ({path!r}, None) before this one, or quantize it by "
                    "fake_quant_params."
                )
        yield Site(
            name, "closed", op.contraction.op, op.contraction.scope, operand.shape, operand.dtype, 0, None,
            None if rule is None else rule.pattern, f"{op.contraction.op} cannot be entered",
        )  # fmt: skip


def _refuse_gradient(sites: list[Site], decisions: Mapping[Location, Decision], rules: Sequence[Rule]) -> None:
    """Rules for the function do not mean the derivatives that it takes by itself."""
    meant = decisions or any(_wanted(rule) for rule in rules)
    if sites and meant:
        raise ValueError(
            f"At {sites[0].name!r}: the function differentiates by itself, and the op is in that pass. Differentiate "
            "the quantized function instead: jax.grad(quantize_fn(loss, rules)), not quantize_fn(jax.grad(loss), "
            "rules). If the derivative belongs to the model, say what is meant by a "
            'Rule("**", None, kind="gradient"), which leaves it in float, or by one with specs.'
        )


def _note_custom(op: _Op, decision: Decision, custom: dict[Location, str]) -> None:
    """How the calls with a derivative of their own around an op are treated."""
    said = [rule.custom for rule, spec in zip(decision.rules, decision.specs, strict=True) if rule and spec]
    for location in op.contraction.custom:
        choices = {*said, custom.get(location, said[0])}
        if None in choices or len(choices) > 1:
            of_rules = "nothing" if choices == {None} else " and ".join(sorted(repr(c) for c in choices))
            raise ValueError(
                f"At {decision.names[0]!r} and {decision.names[1]!r}: the op is inside a function with a derivative of "
                f"its own (jax.custom_jvp or custom_vjp), of which the rules say {of_rules}. Say one for all sites in "
                'it: Rule(..., custom="keep") for the derivative that its author wrote, at the unquantized values, or '
                'Rule(..., custom="inline") for that of the quantized ops.'
            )
        custom[location] = choices.pop() or ""


def _unused(i: int, rule: Rule, matcher: _Matcher, ops: list[_Op]) -> str:
    """What is wrong with a rule that decided nothing."""
    if i in matcher.shadowed:
        name, earlier = matcher.shadowed[i]
        return (
            f"`rules[{i}]`, {rule.pattern!r}, is shadowed: all it matches, such as {name!r}, is taken by the earlier "
            f"rule {earlier.pattern!r}. Put the narrower rule first, drop one, or pass Rule(..., optional=True)."
        )
    pattern = rule.pattern if isinstance(rule.pattern, str) else str(getattr(rule.pattern, "pattern", ""))
    of_kind = [name for op in ops if op.kind == rule.kind for side in range(2) for name in op.subjects(side)]
    message = (
        f"`rules[{i}]`, {rule.pattern!r}, matched no site of kind {rule.kind!r}. The nearest of "
        f"{len(set(of_kind))} names: {_nearest(pattern, of_kind)}."
    )
    bare = dataclasses.replace(rule, min_size=0, dtype=None)
    matches = lambda name: bare.matches(name, matcher.leaves.get(name))
    excluded = [name for name in of_kind if matches(name)]
    parameters = [path for path in matcher.leaves if matches(path)]
    elsewhere = [
        (path, op.kind) for path in parameters for op in ops if op.kind != rule.kind
        for origin in op.origins if path in origin.params and (origin.role in ("weight", "derived"))
    ]  # fmt: skip
    if excluded:
        fields = {name: getattr(rule, name) for name in ("op", "scope", "min_size", "dtype") if getattr(rule, name)}
        said = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        message += f" The pattern matches {excluded[0]!r}, which {said} excludes."
    elif elsewhere:
        message += f" It matches the parameter {elsewhere[0][0]!r}, which is in an op of kind {elsewhere[0][1]!r}."
    elif parameters and rule.kind == "weight":
        message += f" It matches the parameter {parameters[0]!r}, which no dot or convolution uses as it is."
    elif rule.kind == "weight":
        message += (
            f" No parameter has such a path: is `{matcher.params}` right? It has {len(matcher.leaves)} arrays, the "
            f"nearest of them {_nearest(pattern, list(matcher.leaves))}."
        )
    return f"{message} Repair the rule, or pass Rule(..., optional=True); q.plan(...) without it prints all sites."
