# SPDX-License-Identifier: Apache-2.0
"""Which operand of which dot or convolution is quantized to what, by which rule, and why the others are not."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from .. import _checks as checks
from .._integer._contract import Precision
from .._jaxpr._program import CONV, NAME, RAGGED, Location
from .._jaxpr._walk import JOINED, PICKED, Contraction, Operand, Origin, Walk
from .._paths import named_in_errors
from .._rule import KINDS, Rule, pattern_in_words, shadowed
from .._spec import PerBlock, PerChannel, PerTensor, PerToken, QuantSpec, qparams_shape
from ._backward import precisions
from ._entries import Entries, Entry
from ._match import MatchedOp, Matcher, gathered_by_data, is_exact, is_wanted, names_of, ops_of
from ._plan import Count, Plan, Site


class Decision(NamedTuple):
    """What happens to one contraction: a spec, or None, a name and keys of entries for each of its two operands."""

    contraction: Contraction
    specs: Sequence[QuantSpec | None]
    names: Sequence[str]
    rules: Sequence[Rule | None]
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    weight: int | None
    gradient: tuple[Precision, Precision] = (None, None)
    shared: tuple[bool, ...] = (False, False)  # whether an operand is a value that is quantized where it is named
    keys: Sequence[tuple[str, ...]] = ((), ())


class Decisions(NamedTuple):
    """The plan, and what follows from it for the evaluation."""

    plan: Plan
    of: Mapping[Location, Decision]
    custom: Mapping[Location, str]
    entries: Entries


# What an op sums over


def contracted_axes(contraction: Contraction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each operand, the axes along which one result sums, or which share a scale all the same."""
    shapes = [operand.shape for operand in contraction.operands]
    if contraction.op == NAME:
        return (), ()
    if contraction.op != CONV:
        (lhs, rhs), _ = contraction.dot
        return lhs, rhs
    numbers = contraction.params["dimension_numbers"]
    batched = contraction.params["batch_group_count"] == 1
    kept = (numbers.lhs_spec[0],) if batched else (), (numbers.rhs_spec[0],)
    lhs, rhs = (tuple(i for i in range(len(shape)) if i not in of) for shape, of in zip(shapes, kept, strict=True))
    return lhs, rhs


def _length(contraction: Contraction) -> int:
    """K, the number of products in a sum."""
    if contraction.op == NAME:
        return 0
    axes, shape = contracted_axes(contraction)[1], contraction.operands[1].shape
    return math.prod(shape[i] for i in axes)


def _on_operand(
    spec: QuantSpec, operand: Operand, contracted: tuple[int, ...], leaf: Any, is_weight: bool
) -> QuantSpec:
    """The spec with its axes counted on the operand; those of a parameter are counted on the parameter."""
    kind, ndim = spec.granularity, len(operand.shape)
    with_ = lambda granularity: dataclasses.replace(spec, granularity=granularity)
    per_channel = lambda axes: with_(PerChannel(tuple(axes)) if axes else PerTensor())
    picked = [i for i, along in enumerate(operand.origin.axes) if PICKED in along and is_weight]
    if isinstance(kind, PerTensor):
        return per_channel(picked) if picked else spec
    rows = per_channel([i for i in range(ndim) if i not in contracted])
    if isinstance(kind, PerToken):
        if is_weight:
            raise ValueError(
                f"{spec} is of activations, and this is the weight. Give it PerChannel(None), a scale for each output "
                "channel, as weight_spec(bits) does."
            )
        return rows
    if kind.axis is None:
        if isinstance(kind, PerChannel):
            if not is_weight:
                raise ValueError(
                    f"{spec} is of the output channels of a weight, and this operand of shape {operand.shape} is none. "
                    "Say PerToken() for a scale along each row that is contracted, or name the axes: PerChannel(axis)."
                )
            return rows
        if len(contracted) != 1:
            raise ValueError(
                f"{spec} has blocks along the contracted axis, and this op contracts {len(contracted)} of shape "
                f"{operand.shape}: {contracted}. Name the axes of the blocks, counted on the parameter: "
                f"{with_(_blocks(int(np.prod(kind.size)), operand, contracted))}."
            )
        return with_(PerBlock(contracted[0], kind.size))
    if operand.origin.path is None:
        return spec
    qparams_shape(with_(PerChannel(kind.axis)), leaf.shape)
    named = [a % len(leaf.shape) for a in (kind.axis if isinstance(kind.axis, tuple) else (kind.axis,))]
    axes = [i for i, along in enumerate(operand.origin.axes) if along.intersection(named) or i in picked]
    alone = [[i for i in axes if operand.origin.axes[i] - {JOINED, PICKED} == {a}] for a in named]
    split = isinstance(kind, PerBlock) and (len(axes) != len(named) or any(len(at) != 1 for at in alone))
    if split or any(not operand.origin.axes[i] - {JOINED, PICKED} <= set(named) for i in axes):
        raise ValueError(
            f"{kind} of a parameter of shape {leaf.shape} is no axis of the operand of shape {operand.shape} that the "
            f"function makes of it, whose axes run along {[sorted(along) for along in operand.origin.axes]}. Name axes "
            "that stay apart from the others, or leave the axis None for the output channels of the op."
        )
    if isinstance(kind, PerBlock):
        return with_(PerBlock(tuple(i for at in alone for i in at), tuple(kind.sizes.values())))
    return per_channel(axes)


def _blocks(size: int, operand: Operand, contracted: tuple[int, ...]) -> PerBlock:
    """Blocks of a size along several contracted axes, the last ones first, counted on the parameter if there is one."""
    of = {i: operand.origin.axes[i] - {JOINED, PICKED} for i in contracted}
    is_apart = operand.origin.path is not None and all(len(along) == 1 for along in of.values())
    sizes = {}
    for i in sorted(contracted, reverse=True):
        axis = min(of[i]) if is_apart else i
        sizes[axis] = math.gcd(size, operand.shape[i])
        size //= sizes[axis]
    return PerBlock(tuple(sorted(sizes)), tuple(sizes[axis] for axis in sorted(sizes)))


def _check_joined(spec: QuantSpec, operand: Operand, contracted: tuple[int, ...]) -> None:
    """Parameters that were concatenated do not share a scale: each has the range of its own values."""
    joined = [i for i, along in enumerate(operand.origin.axes) if JOINED in along]
    groups = qparams_shape(spec, operand.shape) or (1,) * len(operand.shape)
    shared = [i for i in joined if groups[i] != operand.shape[i]]
    if shared:
        parts = operand.origin.parts
        is_contracted = shared[0] in contracted
        own = "" if is_contracted else "Give each channel a scale by weight_spec(bits); or leave"
        raise ValueError(
            f"{len(parts)} parameters, {', '.join(map(repr, parts))}, are concatenated along axis {shared[0]} of an "
            f"operand of shape {operand.shape}, {'which is contracted' if is_contracted else 'an output axis'}, and "
            f"{spec} does not keep them apart there. {own or 'Leave'} them in float by a rule ({parts[0]!r}, "
            'None), and one for each of the others, before this one; then Rule(..., kind="derived") quantizes what is '
            "made of them, with one range for all."
        )


def _check_shared(spec: QuantSpec, shape: tuple[int, ...], contracted: tuple[int, ...], op: str) -> None:
    """A scale that is applied after the contraction is shared along it, or by the blocks of a dot."""
    kind, groups = spec.granularity, qparams_shape(spec, shape) or (1,) * len(shape)
    blocked = {axis % len(shape) for axis in kind.sizes} if isinstance(kind, PerBlock) and op != CONV else ()
    separate = [i for i in contracted if groups[i] > 1 and i not in blocked]
    if separate:
        raise ValueError(
            f"along the contracted axes {separate} of an operand of shape {shape}, {spec} has a scale of its own for "
            "each element, which cannot be applied after the contraction. Share the scale along them: PerTensor, "
            "PerChannel on other axes, or, in a dot, PerBlock along a contracted one. With one operand in float any "
            "does."
        )


def decide(
    walk: Walk, rules: Sequence[Rule], leaves: Mapping[str, Any], params: str, strict: bool,
    static: Set[str], frozen: Set[str],
) -> Decisions:  # fmt: skip
    """Matches rules and sites; every error of selection is raised here.

    `static` are the entries that have qparams; `frozen` the parameters that are integers already.
    """
    matcher = Matcher(rules, leaves, params)
    ops = ops_of([matcher.agreed(contraction) for contraction in walk.found()])
    _refuse_captured_model(ops, rules, leaves, params)
    seen, sites, made, decisions, custom = collections.Counter(), [], [], {}, {}
    entries, reads = Entries(leaves), {path: set(by) for path, by in walk.reads.items()}
    values: dict[Location, tuple[str, QuantSpec]] = {}
    for i, op in enumerate(ops):
        if op.kind == "value" and not is_wanted(matcher.first(op, 0)):
            continue  # a name for a site, or for nothing
        if op.kind == "params":
            ops[i] = op = matcher.resolved(op)
        names = [_numbered(name, seen) for name in names_of(op)]
        if op.kind == "closed":
            _refuse_ragged_gradient(op, rules)
            sites += _closed(op, names, matcher)
            continue
        decision = _shared(op, _decision(op, names, matcher, strict), values)
        decision = _with_entries(op, decision, entries, reads, values)
        if op.kind == "value":
            values[op.contraction.location] = _point(decision)
        made.append((op, decision))
        sites += _sites(op, decision, frozen)
        if any(decision.specs):
            decisions[op.contraction.location] = decision
            _note_custom(op, decision, custom)
    sites += _read_everywhere(entries, reads, matcher, seen)
    _refuse_gradient([site for site in sites if site.kind == "gradient" and site.rule is None], decisions, rules)
    quantized = _quantized_parameters(made) | {path for path, entry in entries.of.items() if entry.is_weight}
    left = _left_in_float(made, matcher, quantized)
    for i, rule in enumerate(rules):
        if i not in matcher.used and not rule.optional:
            raise ValueError(_unused(i, rule, matcher, ops))
    open_ = [site.name for site in sites if site.rule is None and not site.spec and site.kind != "closed"]
    if strict and open_:
        raise ValueError(
            f"`strict=True` wants a rule for every site, got none for {', '.join(map(repr, open_))}. Quantize them, or "
            "leave them in float by a rule with None: q.plan(...) prints their kinds."
        )
    if left:
        raise ValueError(left)
    for path, entry in entries.of.items():
        if entry.is_weight:
            read = tuple(sorted(reads.get(path, ())))
            entries.of[path] = entry._replace(reads=read, order=None if read else entry.order)
    entries.left = {site.name: site.why for site in sites if site.spec is None}
    keys = {decision.names[side]: of[0] for _, decision in made for side, of in enumerate(decision.keys) if of}
    stated = (_stated(site, entries.of.get(keys.get(site.name, site.entry)), static, frozen) for site in sites)
    plan = Plan(tuple(stated), _counts(matcher, quantized))
    return Decisions(plan, decisions, custom, entries)


def _shared(op: MatchedOp, decision: Decision, values: Mapping[Location, tuple[str, QuantSpec]]) -> Decision:
    """With the operands noted that are quantized already, where they are named."""
    shared = []
    for side, (operand, spec) in enumerate(zip(op.contraction.operands, decision.specs, strict=True)):
        own = _value_of(operand, values) if spec is not None and side != decision.weight else None
        shared.append(own is not None)
        if own is not None and own[1] != spec:
            with named_in_errors(decision.names[side], rule=decision.rules[side]):
                raise ValueError(
                    f"the operand is the value {own[0]!r}, which is quantized to {own[1]}, and the rule says {spec}. "
                    "Give both rules one spec, or take the rule of the value, or of this operand, away."
                )
    return decision._replace(shared=tuple(shared))


def _value_of(operand: Operand, values: Mapping[Location, tuple[str, QuantSpec]]) -> Any:
    """The entry and the spec of the named value that an operand is; the last of its names that has a rule."""
    return next((values[point] for point in reversed(operand.origin.points) if point in values), None)


def _point(decision: Decision) -> tuple[str, QuantSpec]:
    """The entry and the spec of a named value."""
    (spec,), (key, *_) = decision.specs, decision.keys[0]
    assert spec is not None
    return key, spec


def _with_entries(
    op: MatchedOp, decision: Decision, entries: Entries, reads: dict[str, set[str]],
    values: Mapping[Location, tuple[str, QuantSpec]],
) -> Decision:  # fmt: skip
    """With the keys of its operands, which the entries learn; what reads a parameter in float is noted."""
    for side, (operand, spec) in enumerate(zip(op.contraction.operands, decision.specs, strict=True)):
        name, rule, is_weight = decision.names[side], decision.rules[side], side == decision.weight
        if decision.shared[side]:
            entries.share(op.contraction, side, name, _value_of(operand, values)[0])
        elif spec is not None and rule is not None:
            entries.add(op.contraction, side, name, spec, rule, is_weight, decision.contracted[side])
        if spec is None or not is_weight:
            for path in operand.origin.parts:
                reads.setdefault(path, set()).add("gather" if operand.origin.gathered else name)
    return decision._replace(keys=entries.keys.get(op.contraction.location, ((), ())))


def _read_everywhere(
    entries: Entries, reads: Mapping[str, Set[str]], matcher: Matcher, seen: collections.Counter
) -> Iterator[Site]:
    """The parameters that every use sees quantized, where something else than a contraction uses them."""
    for path, by in reads.items():
        rule = entries.of[path].rule if path in entries.of else matcher.for_path(path)
        leaf = matcher.leaves[path]
        if rule is None or rule.weight is None or not rule.everywhere or not checks.is_float(leaf.dtype):
            continue
        matcher.used.add(matcher.rules.index(rule))
        name = _numbered(path, seen)
        entry = entries.add_read(path, rule, name)
        yield Site(
            name, "weight", ", ".join(sorted(by)), "", leaf.shape, np.dtype(leaf.dtype), 0, entry.spec, rule.pattern,
            "", path,
        )  # fmt: skip


def _stated(site: Site, entry: Entry | None, static: Set[str], frozen: Set[str]) -> Site:
    """With what the plan says of its entry, the first where it has several."""
    if site.spec is None or entry is None:
        return site
    state = "frozen" if entry.key in frozen else "static" if entry.key in static else "dynamic"
    return site._replace(entry_spec=entry.spec, state=state)


def _quantized_parameters(made: Sequence[tuple[MatchedOp, Decision]]) -> set[str]:
    """The paths of the parameters that some site quantizes, as they are or in what is computed from them."""
    paths = set()
    for op, decision in made:
        for side, (operand, spec) in enumerate(zip(op.contraction.operands, decision.specs, strict=True)):
            if spec is not None and (op.kind != "weight" or side == op.weight):
                origin = operand.origin
                paths |= {*origin.parts, *(() if origin.data else origin.computed)}
    return paths


def _counts(matcher: Matcher, quantized: set[str]) -> dict[str, Count]:
    """What becomes of the parameters."""
    counts = {}
    for path, leaf in matcher.leaves.items():
        rule = matcher.for_path(path)
        what = "quantized" if path in quantized else "without a rule"
        if what != "quantized" and rule is not None:
            what = "left in float by a rule" if rule.weight is None else "matched, but no operand"
        old, numbers = counts.get(what, Count()), math.prod(leaf.shape)
        nbytes = numbers * getattr(leaf.dtype, "itemsize", 0)
        counts[what] = Count(old.parameters + 1, old.numbers + numbers, old.nbytes + nbytes)
    order = "quantized", "left in float by a rule", "without a rule", "matched, but no operand"
    return {what: counts[what] for what in order if what in counts}


def _left_in_float(made: Sequence[tuple[MatchedOp, Decision]], matcher: Matcher, quantized: set[str]) -> str:
    """What is wrong where a rule quantizes a parameter that meets its ops only as something else; else nothing."""
    found = []
    for op, decision in made:
        if op.kind in ("weight", "gradient"):
            continue
        for name, rule, operand in zip(decision.names, decision.rules, op.contraction.operands, strict=True):
            origin = operand.origin
            if not checks.is_float(operand.dtype) or (origin.data and not gathered_by_data(origin)):
                continue
            due = matcher.due(op, origin, quantized)
            if due and rule is None:
                found.append(_left(op, name if gathered_by_data(origin) else op.name, origin, due))
    return next(iter(found), "")


def _left(op: MatchedOp, name: str, origin: Origin, due: list[tuple[str, Rule]]) -> str:
    paths, (_, rule) = [path for path, _ in due], due[0]
    gathered = bool(gathered_by_data(origin))
    how, kind = ("gathered by data", "act_act") if gathered else ("computed with", "derived")
    spec = "activation" if gathered else "weight"
    everywhere = "let every use of it see the quantized value by Rule(..., everywhere=True), " if gathered else ""
    return (
        f"At {op.name!r}: the rule {rule.pattern!r} quantizes {', '.join(map(repr, paths))}, which "
        f"{'are' if len(paths) > 1 else 'is'} {how} before the op, and would be left in float. Quantize what the op "
        f'meets by Rule({name!r}, {spec}={rule.weight}, kind="{kind}"), {everywhere}or leave the parameter in float '
        f"by a rule ({paths[0]!r}, None) before that one; q.plan(...) then prints all sites."
    )


def _refuse_captured_model(
    ops: Sequence[MatchedOp], rules: Sequence[Rule], leaves: Mapping[str, Any], params: str
) -> None:
    """A model that is a function, and so closes over its weights, with the data passed as the params."""
    if not any(map(is_wanted, rules)) or any(rule.kind == "captured" for rule in rules):
        return
    roles = [{origin.role for origin in op.origins} for op in ops if op.kind not in ("closed", "value")]
    meets_captured = any("captured" in of for of in roles)
    meets_data = any(of & {"weight", "derived"} and "captured" not in of for of in roles)
    later = {"captured", "data"} in roles
    if meets_captured and not meets_data and (set(leaves) == {""} or (later and {"weight", "captured"} in roles)):
        raise ValueError(
            f"The params (`{params}`) are {'a bare array' if set(leaves) == {''} else 'in the first contraction alone'}"
            ", and contractions are with arrays that the function closes over, as if data were passed as the "
            "params of a model that is a function itself. Pass the weights: of an equinox model, params, static = "
            "eqx.partition(model, eqx.is_array) and quantize_fn(lambda params, x: eqx.combine(params, static)(x), "
            'rules); a lone weight as a dict {"w": w}. If it is meant so, say what becomes of the captured arrays by '
            'a Rule("**", None, kind="captured", optional=True).'
        )


def _numbered(name: str, seen: collections.Counter) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"


def _decision(op: MatchedOp, names: list[str], matcher: Matcher, strict: bool) -> Decision:
    contraction = op.contraction
    contracted = contracted_axes(contraction)
    if op.kind == "value":
        return _decision_of_value(op, names, matcher)
    rules, specs = [], []
    for side, operand in enumerate(contraction.operands):
        rule = matcher.first(op, side)
        is_weight = side == op.weight or (op.kind == "gradient" and operand.origin.role != "data")
        if op.kind == "weight" and not is_weight:  # a parameter as the input of another may have a rule of its own
            own = matcher.of_parameter(op, operand.origin)
            rule = rule if own is None or is_wanted(own) else own
        spec = rule and (rule.weight if is_weight else rule.activation)
        if rule is not None and spec is not None:
            with named_in_errors(names[side], rule=rule):
                raises = strict or is_exact(rule) or _is_input(op, side, rule)
                spec = _of_operand(spec, operand, contracted[side], matcher, raises, is_weight)
        rules.append(rule)
        specs.append(spec)
    if None not in specs:
        for name, rule, spec, operand, axes in zip(names, rules, specs, contraction.operands, contracted, strict=True):
            with named_in_errors(name, rule=rule):
                _check_shared(spec, operand.shape, axes, contraction.op)
    weight = op.weight if op.kind == "weight" else None
    gradient = precisions(op, names, rules, specs)
    return Decision(contraction, tuple(specs), tuple(names), tuple(rules), contracted, weight, gradient)


def _decision_of_value(op: MatchedOp, names: list[str], matcher: Matcher) -> Decision:
    """What is quantized where it is named: whole, by one scale."""
    rule, (operand,) = matcher.first(op, 0), op.contraction.operands
    assert rule is not None
    assert rule.activation is not None
    with named_in_errors(names[0], rule=rule):
        if operand.origin.held:
            raise ValueError(
                f"the value is the parameter {operand.origin.held[0]!r}. Quantize it by a rule for its path, with "
                "everywhere=True if something else than a dot uses it."
            )
        if not checks.is_float(operand.dtype):
            raise ValueError(f"a value must be floating to be quantized, got {operand.dtype}. Take the rule away.")
        if rule.activation.granularity != PerTensor():
            raise ValueError(
                f"a value has one scale, got {rule.activation}. Give the rule PerTensor(), as activation_spec(bits) "
                "does, or quantize the operands of the dots by rules of their own."
            )
    return Decision(op.contraction, (rule.activation,), tuple(names), (rule,), ((), ()), None, shared=(False,))


def _is_input(op: MatchedOp, side: int, rule: Rule) -> bool:
    """Whether an operand is what a parameter that is quantized is contracted with."""
    is_input = op.kind == "weight" and side != op.weight and rule.weight is not None
    return is_input and checks.is_float(op.contraction.operands[1 - side].dtype)


def _of_operand(
    spec: QuantSpec, operand: Operand, contracted: tuple[int, ...], matcher: Matcher, raises: bool, is_weight: bool
) -> QuantSpec | None:
    """The spec with the axes of the operand; None for integers and the like that a glob only happens to match."""
    if not checks.is_float(operand.dtype):
        if not raises:
            return None
        raise ValueError(
            f"an operand must be floating to be quantized, got {operand.dtype}. Cast it, x.astype(jnp.float32); or "
            "leave it as it is by a rule before this one, with None as its spec."
        )
    parts = operand.origin.held
    spec = _on_operand(spec, operand, contracted, matcher.leaves[parts[0]] if parts else None, is_weight)
    qparams_shape(spec, operand.shape)
    if len(parts) > 1:
        _check_joined(spec, operand, contracted)
    return spec


def _sites(op: MatchedOp, decision: Decision, frozen: Set[str]) -> Iterator[Site]:
    c = op.contraction
    for side, (operand, spec) in enumerate(zip(c.operands, decision.specs, strict=True)):
        rule = decision.rules[side]
        why = "" if spec else _why(op, operand, rule)
        if spec is None and not frozen.isdisjoint(operand.origin.held):
            why = "integers that no rule is for: their real values"
        activation = rule.activation if rule and side != decision.weight else None
        yield Site(
            decision.names[side], op.kind, c.op, c.scope, operand.shape, np.dtype(operand.dtype), _length(c), spec,
            None if rule is None else rule.pattern, why, ", ".join(decision.keys[side]),
            is_per_token=spec is not None and bool(activation) and isinstance(activation.granularity, PerToken),
        )  # fmt: skip


def _why(op: MatchedOp, operand: Operand, rule: Rule | None) -> str:
    """Why a site is left as it is."""
    origin = operand.origin
    if rule is not None and not is_wanted(rule):
        return "the rule says None"
    if not checks.is_float(operand.dtype):
        return f"{operand.dtype}: only floating operands are quantized"
    if rule is not None:
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


def _closed(op: MatchedOp, names: list[str], matcher: Matcher) -> Iterator[Site]:
    """Those parameters that go where nothing can be replaced; an error if a rule wants one quantized."""
    for name, operand in zip(names, op.contraction.operands, strict=True):
        path = operand.origin.path
        due = matcher.due(op, operand.origin, frozenset()) if path is None else []
        if due:
            raise ValueError(
                f"At {op.name!r}: the rule {due[0][1].pattern!r} quantizes {due[0][0]!r}, which is computed with and "
                f"goes into {op.contraction.op!r}, where quantize_fn cannot replace anything. Leave it in float by a "
                f"rule ({due[0][0]!r}, None) before this one, or quantize it by fake_quant_params."
            )
        if path is None:
            continue
        rule = matcher.of_parameter(op, operand.origin)
        if rule is not None and is_wanted(rule):
            with named_in_errors(path, rule=rule):
                raise ValueError(
                    f"the parameter goes into {op.contraction.op!r}, at {op.name!r}, where quantize_fn cannot replace "
                    f"anything. Leave it in float by a rule ({operand.origin.parts[0]!r}, None) before this one"
                    f"{', and one for each of the others' if len(operand.origin.parts) > 1 else ''}, or quantize it by "
                    "fake_quant_params."
                )
        yield Site(
            name, "closed", op.contraction.op, op.contraction.scope, operand.shape, operand.dtype, 0, None,
            None if rule is None else rule.pattern, f"{op.contraction.op} cannot be entered",
        )  # fmt: skip


def _refuse_gradient(sites: list[Site], decisions: Mapping[Location, Decision], rules: Sequence[Rule]) -> None:
    """Rules for the function do not mean the derivatives that it takes by itself."""
    meant = decisions or any(is_wanted(rule) for rule in rules)
    if sites and meant:
        raise ValueError(_differentiates(sites[0].name))


def _refuse_ragged_gradient(op: MatchedOp, rules: Sequence[Rule]) -> None:
    """The gradient of a ragged dot with respect to its matrices, which is closed."""
    said = any(rule.kind == "gradient" for rule in rules)
    if op.contraction.op == RAGGED and op.contraction.gradient and any(map(is_wanted, rules)) and not said:
        raise ValueError(_differentiates(op.name))


def _differentiates(name: str) -> str:
    return (
        f"At {name!r}: the function differentiates by itself, and the op is in that pass. Differentiate the quantized "
        "function instead: jax.grad(quantize_fn(loss, rules)), not quantize_fn(jax.grad(loss), rules). If the "
        'derivative belongs to the model, say what is meant by a Rule("**", None, kind="gradient"), which leaves it in '
        "float, or by one with specs."
    )


def _note_custom(op: MatchedOp, decision: Decision, custom: dict[Location, str]) -> None:
    """How the calls with a derivative of their own around an op are treated."""
    said = [rule.custom for rule, spec in zip(decision.rules, decision.specs, strict=True) if rule and spec]
    for location in op.contraction.custom:
        choices = {*said, custom.get(location, said[0])}
        if None in choices or len(choices) > 1:
            of_rules = "nothing" if choices == {None} else " and ".join(sorted(repr(c) for c in choices))
            raise ValueError(
                f"At {' and '.join(map(repr, decision.names))}: the op is inside a function with a derivative of "
                f"its own (jax.custom_jvp or custom_vjp), of which the rules say {of_rules}. Say one for all sites in "
                'it: Rule(..., custom="keep") for the derivative that its author wrote, at the unquantized values, or '
                'Rule(..., custom="inline") for the derivative of the quantized ops, which JAX takes only where no '
                "while loop is inside. With an ODE solver, rather quantize the vector field before it is solved."
            )
        custom[location] = choices.pop() or ""


def _unused(i: int, rule: Rule, matcher: Matcher, ops: list[MatchedOp]) -> str:
    """What is wrong with a rule that decided nothing."""
    if i in matcher.shadowed:
        return shadowed(i, rule, *matcher.shadowed[i])
    pattern = pattern_in_words(rule.pattern)
    of_kind = [name for op in ops if op.kind == rule.kind for side in range(2) for name in op.subjects(side)]
    message = (
        f"`rules[{i}]`, {rule.pattern!r}, matched no site of kind {rule.kind!r}. The nearest of "
        f"{len(set(of_kind))} names: {checks.nearest(pattern, of_kind)}."
    )
    bare, last = dataclasses.replace(rule, min_size=0, dtype=None), ""
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
        path, kind = elsewhere[0]
        said = f": Rule(..., kind={kind!r})" if kind in KINDS else ""
        message += f" It matches the parameter {path!r}, which is in an op of kind {kind!r}{said}."
        if any(path in origin.parts for op in ops for origin in op.origins if origin.gathered):
            message += " Rule(..., everywhere=True) quantizes what is gathered of it."
    elif parameters and rule.kind == "weight":
        message += f" It matches the parameter {parameters[0]!r}, which no dot or convolution uses as it is. "
        message += "Rule(..., everywhere=True) quantizes it where it is gathered or computed with, too."
    elif rule.kind == "weight":
        others = f"; the nearest of {len(matcher.leaves)}: {checks.nearest(pattern, matcher.leaves)}"
        message += f" No parameter has such a path{others if matcher.leaves.keys() - set(of_kind) else ''}."
        last = f" If these are not the parameters, `{matcher.params}` is wrong."
    return f"{message} Fix the rule, or pass Rule(..., optional=True); q.plan(...) without it prints all sites.{last}"
