# SPDX-License-Identifier: Apache-2.0
"""The choice for each operand of each op: a rule, and a spec with the axes of the operand."""

import dataclasses
from collections.abc import Mapping, Sequence

from .._base import _checks as checks
from .._contract._contract import Precision
from .._contract._ops import OPS
from .._paths import named_in_errors
from .._program._jaxpr import Location
from .._program._origin import JOINED, PICKED
from .._program._walk import Contraction, Operand
from .._spec._granularity import PerTensor
from .._spec._rule import Rule
from .._spec._spec import QuantSpec, qparams_shape
from . import _errors as errors
from ._axes import contracted_axes, groups_shape, on_operand
from ._backward import precisions
from ._match import MatchedOp, Matcher, is_exact, is_wanted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The choice for one operand.

    Attributes:
      name: of its site.
      operand: as the walk found it.
      contracted: its axes along which one result sums.
      rule: that decided; None where none did.
      spec: QuantSpec with the axes of the operand; None leaves it in float.
      is_weight: whether it is a parameter that a rule of kind "weight" is for.
      point: where it is quantized already, if it is a value that a rule of kind "value" is for; else None.
      keys: of its entry, or of each of the parameters that were concatenated.
      cache: the path of the cache that it is, whose spec then has the axes of that; else None.
      is_folded: whether its scales, those of a cache, are multiplied into the other operand: they change along what is
        contracted, or may.
    """

    name: str
    operand: Operand
    contracted: tuple[int, ...] = ()
    rule: Rule | None = None
    spec: QuantSpec | None = None
    is_weight: bool = False
    point: Location | None = None
    keys: tuple[str, ...] = ()
    cache: str | None = None
    is_folded: bool = False

    @property
    def arrives_quantized(self) -> bool:
        """Whether the op gets it with its integers, and does not make them."""
        return self.spec is not None and (self.is_weight or self.point is not None or self.cache is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The choices for one op: for its operands, the precision of its two backward products, and their history."""

    op: MatchedOp
    operands: tuple[Choice, ...]
    gradient: tuple[Precision, Precision] = (None, None)
    steps: tuple[int, int] = (0, 0)

    @property
    def contraction(self) -> Contraction:
        return self.op.contraction

    @property
    def is_folded(self) -> bool:
        """Whether the scales of a cache are multiplied into the other operand before it is quantized."""
        return any(choice.is_folded for choice in self.operands)

    @property
    def scaled_by(self) -> str:
        """The path of that cache; empty if there is none."""
        return next((choice.cache or "" for choice in self.operands if choice.is_folded), "")

    @property
    def gradient_keys(self) -> tuple[str, ...]:
        """The keys of the histories of the gradients with respect to the operands; empty where there is none."""
        return tuple(f"{name}:gradient" if n else "" for name, n in zip(self.op.names, self.steps, strict=False))

    @property
    def input_keys(self) -> list[str]:
        """The keys of the operands that are no weight."""
        return [key for choice in self.operands if not choice.is_weight for key in choice.keys]


def choose(ops: Sequence[MatchedOp], matcher: Matcher, strict: bool) -> list[Decision]:
    """The decision about each op, without the keys of entries."""
    values = {op.contraction.location: _of_value(op) for op in ops if op.kind == "value"}
    return [_decision(op, matcher, values, strict) for op in ops]


def _decision(op: MatchedOp, matcher: Matcher, values: Mapping[Location, Choice], strict: bool) -> Decision:
    if op.kind == "closed":
        return _of_closed(op, matcher)
    if op.kind == "value":
        return Decision(op=op, operands=(_as_value(values[op.contraction.location], values),))
    contracted = contracted_axes(op.contraction)
    choices = [_of_operand(op, side, contracted[side], matcher, strict) for side in range(2)]
    specs = [choice.spec for choice in choices]
    if None not in specs:
        for choice in choices:
            _check_scales(choice, op.contraction.as_op().takes_blocks)
    gradient, steps = precisions(op, op.names, [choice.rule for choice in choices], specs)
    choices = [_as_cache(choice, other, op, matcher) for choice, other in zip(choices, choices[::-1], strict=True)]
    operands = tuple(_as_value(choice, values) for choice in choices)
    decision = Decision(op=op, operands=operands, gradient=gradient, steps=steps)
    _check_rounded_once(decision)
    return decision


def _check_rounded_once(decision: Decision) -> None:
    """A named value that is quantized already cannot be quantized again with the scales of a cache."""
    for choice in decision.operands:
        if decision.is_folded and choice.point is not None:
            with named_in_errors(choice.name, rule=choice.rule):
                raise ValueError(
                    f"the operand is a value that is quantized where it is named, and the scales of the cache "
                    f"{decision.scaled_by!r}, which change along what is contracted, would be multiplied into it and "
                    "it would be rounded again. Drop the rule of the value, or that of this operand."
                )


def _is_cache(op: MatchedOp, operand: Operand) -> bool:
    return op.kind == "act_act" and op.contraction.op == "dot_general" and operand.origin.cache is not None


def _as_cache(choice: Choice, other: Choice, op: MatchedOp, matcher: Matcher) -> Choice:
    """The choice, with the cache that the operand is: its integers are taken where the other one has some."""
    if not _is_cache(op, choice.operand) or _is_cache(op, other.operand) or other.spec is None:
        return choice
    cache, rule = choice.operand.origin.cache or "", choice.rule or other.rule
    with named_in_errors(choice.name, rule=rule):
        if other.spec.rounding == "stochastic":
            raise ValueError(f"what meets the cache {cache!r} must round to nearest, got {other.spec}.")
    spec, shape = matcher.caches[cache].spec, matcher.caches[cache].shape
    return dataclasses.replace(choice, spec=spec, rule=rule, cache=cache, is_folded=_changes(choice, spec, shape))


def _changes(choice: Choice, spec: QuantSpec, shape: tuple[int, ...]) -> bool:
    """Whether the scales of a cache of this shape change, or may, along what is contracted of an operand."""
    groups, along = qparams_shape(spec, shape), choice.operand.origin.axes
    changing = {JOINED, PICKED, *(axis for axis, g in enumerate(groups) if g > 1)}
    return bool(groups) and (not along or any(not changing.isdisjoint(along[i]) for i in choice.contracted))


def _check_scales(choice: Choice, takes_blocks: bool) -> None:
    """A scale that is applied after the contraction is shared along it, or by blocks where the op takes them."""
    spec, shape = choice.spec, choice.operand.shape
    assert spec is not None
    groups = groups_shape(spec, shape)
    blocked = {axis % len(shape) for axis in spec.granularity.sizes if takes_blocks}
    separate = [i for i in choice.contracted if groups[i] > 1 and i not in blocked]
    if separate:
        with named_in_errors(choice.name, rule=choice.rule):
            raise ValueError(
                f"along the contracted axes {separate} of an operand of shape {shape}, {spec} has a scale of its own "
                "for each element, which cannot be applied after the contraction. Share the scale along them: "
                "PerTensor, PerChannel on other axes, or, in a dot, PerBlock along a contracted one. With one operand "
                "in float any granularity works."
            )


def _of_closed(op: MatchedOp, matcher: Matcher) -> Decision:
    """Operands that go where nothing can be replaced, which no rule may want quantized."""
    # The gradient of a ragged dot with respect to its matrices is closed, too.
    is_meant = any(rule.kind == "gradient" for rule in matcher.rules) or not any(map(is_wanted, matcher.rules))
    if op.contraction.op in OPS and op.contraction.gradient and not is_meant:
        raise errors.differentiates(op.name)
    choices = []
    for side, (name, operand) in enumerate(zip(op.names, op.contraction.operands, strict=True)):
        if operand.origin.path is None:
            if left := op.left_out(side):
                path, rule = left[0]
                raise ValueError(
                    f"At {op.name!r}: the rule {rule.pattern!r} quantizes {path!r}, which is computed with and goes "
                    f"into {op.contraction.op!r}, where quantize_fn cannot replace anything. Leave it in float by a "
                    f"rule ({path!r}, None) before this one, or quantize it by fake_quant_params."
                )
            choices.append(Choice(name=name, operand=operand))
            continue
        rule = op.own[side]
        if rule is not None and is_wanted(rule):
            with named_in_errors(operand.origin.path, rule=rule):
                first, *others = operand.origin.parts
                raise ValueError(
                    f"the parameter goes into {op.contraction.op!r}, at {op.name!r}, where quantize_fn cannot replace "
                    f"anything. Leave it in float by a rule ({first!r}, None) before this one"
                    f"{', and one for each of the others' if others else ''}, or quantize it by fake_quant_params."
                )
        choices.append(Choice(name=name, operand=operand, rule=rule))
    return Decision(op=op, operands=tuple(choices))


def _of_value(op: MatchedOp) -> Choice:
    """A value that is quantized where it is named: whole, by one scale."""
    (rule,), (operand,), (name,) = op.rules, op.contraction.operands, op.names
    assert rule is not None
    with named_in_errors(name, rule=rule):
        if operand.origin.weights:
            raise ValueError(
                f"the value is the parameter {operand.origin.weights[0]!r}. Quantize it by a rule for its path, with "
                "everywhere=True if anything but a dot uses it."
            )
        if not checks.is_float(operand.dtype):
            raise ValueError(f"a value must be floating to be quantized, got {operand.dtype}. Take the rule away.")
        if rule.activation is not None and rule.activation.granularity != PerTensor():
            raise ValueError(
                f"a value has one scale, got {rule.activation}. Give the rule PerTensor(), as activation_spec(bits) "
                "does, or quantize the operands of the dots by rules of their own."
            )
    return Choice(name=name, operand=operand, rule=rule, spec=rule.activation)


def _as_value(choice: Choice, values: Mapping[Location, Choice]) -> Choice:
    """The choice, with the named value that the operand is: of its names the last that has a rule."""
    point = next((point for point in reversed(choice.operand.origin.points) if point in values), None)
    if point is None or choice.spec is None or choice.is_weight:
        return choice
    if values[point].spec != choice.spec:
        with named_in_errors(choice.name, rule=choice.rule):
            raise ValueError(
                f"the operand is the value {values[point].name!r}, which is quantized to {values[point].spec}, and "
                f"the rule says {choice.spec}. Give both rules one spec, or drop the rule of the value or of this "
                "operand."
            )
    return dataclasses.replace(choice, point=point)


def _of_operand(op: MatchedOp, side: int, contracted: tuple[int, ...], matcher: Matcher, strict: bool) -> Choice:
    operand, rule, own = op.contraction.operands[side], op.rules[side], op.own[side]
    has_weight_spec = side == op.weight or (op.kind == "gradient" and operand.origin.role != "data")
    if own is not None and not is_wanted(own):  # a parameter as the input of another may have a rule of its own
        rule = own
    spec = None if _is_cache(op, operand) else rule and (rule.weight if has_weight_spec else rule.activation)
    if rule is not None and spec is not None:
        with named_in_errors(op.names[side], rule=rule):
            is_meant = strict or is_exact(rule) or _is_input(op, side, rule)
            if checks.is_float(operand.dtype):
                _refuse_blocks(op, rule, spec)
                spec = _checked_spec(spec, operand, contracted, matcher, has_weight_spec)
            elif is_meant:
                raise ValueError(
                    f"an operand must be floating to be quantized, got {operand.dtype}. Cast it, "
                    "x.astype(jnp.float32); or leave it as it is by a rule before this one, with None as its spec."
                )
            else:
                spec = None  # integers and the like that a glob only happens to match
    is_weight, name = op.kind == "weight" and side == op.weight, op.names[side]
    return Choice(name=name, operand=operand, contracted=contracted, rule=rule, spec=spec, is_weight=is_weight)


def _refuse_blocks(op: MatchedOp, rule: Rule, spec: QuantSpec) -> None:
    """Raises for blocks along what is contracted by an op of two quantized operands that scales its result once."""
    is_along_contracted = bool(spec.granularity.sizes) and not spec.granularity.axes
    if is_along_contracted and rule.weight and rule.activation and not op.contraction.as_op().takes_blocks:
        raise ValueError(
            f"{op.contraction.op!r} of two quantized operands has one scale along what it contracts, got {spec}. Give "
            "each output channel a scale, weight_spec(bits); or leave the inputs in float, where blocks are taken."
        )


def _is_input(op: MatchedOp, side: int, rule: Rule) -> bool:
    """Whether an operand is what a parameter that is quantized is contracted with."""
    is_input = op.kind == "weight" and side != op.weight and rule.weight is not None
    return is_input and checks.is_float(op.contraction.operands[1 - side].dtype)


def _checked_spec(
    spec: QuantSpec, operand: Operand, contracted: tuple[int, ...], matcher: Matcher, is_weight: bool
) -> QuantSpec:
    """The spec with the axes of the operand, in which parameters that were concatenated do not share a scale."""
    parts = operand.origin.weights
    spec = on_operand(spec, operand, contracted, matcher.leaves[parts[0]].shape if parts else (), is_weight)
    groups = groups_shape(spec, operand.shape)
    joined = [i for i, along in enumerate(operand.origin.axes) if JOINED in along and groups[i] != operand.shape[i]]
    if len(parts) > 1 and joined:
        is_contracted = joined[0] in contracted
        own = "" if is_contracted else "Give each channel a scale by weight_spec(bits); or leave"
        raise ValueError(
            f"{len(parts)} parameters, {', '.join(map(repr, parts))}, are concatenated along axis {joined[0]} of an "
            f"operand of shape {operand.shape}, {'which is contracted' if is_contracted else 'an output axis'}, and "
            f"{spec} does not keep them apart there. {own or 'Leave'} them in float by a rule ({parts[0]!r}, "
            'None), and one for each of the others, before this one; then Rule(..., kind="derived") quantizes what is '
            "made of them, with one range for all."
        )
    return spec


def is_stochastic(spec: object) -> bool:
    """Whether it is a spec that rounds stochastically."""
    return isinstance(spec, QuantSpec) and spec.rounding == "stochastic"
