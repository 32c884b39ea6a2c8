# SPDX-License-Identifier: Apache-2.0
"""What is wrong with rules for a function, in words: errors made of what was found, and checks that raise them."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from .. import _checks as checks
from .._granularity import PerTensor
from .._jaxpr._origin import JOINED, Origin
from .._jaxpr._walk import Operand
from .._rule import KINDS, Rule, pattern_in_words, shadowed
from .._spec import QuantSpec, qparams_shape
from ._match import MatchedOp, Matcher, gathered_by_data, is_wanted

# Of one operand


def not_floating(dtype: Any) -> ValueError:
    """An operand of integers and the like that a rule means."""
    return ValueError(
        f"an operand must be floating to be quantized, got {dtype}. Cast it, x.astype(jnp.float32); or leave it as it "
        "is by a rule before this one, with None as its spec."
    )


def check_value(operand: Operand, spec: QuantSpec | None) -> None:
    """A value that is quantized where it is named is a floating one, no parameter, and has one scale."""
    if operand.origin.weights:
        raise ValueError(
            f"the value is the parameter {operand.origin.weights[0]!r}. Quantize it by a rule for its path, with "
            "everywhere=True if something else than a dot uses it."
        )
    if not checks.is_float(operand.dtype):
        raise ValueError(f"a value must be floating to be quantized, got {operand.dtype}. Take the rule away.")
    if spec is not None and spec.granularity != PerTensor():
        raise ValueError(
            f"a value has one scale, got {spec}. Give the rule PerTensor(), as activation_spec(bits) does, or quantize "
            "the operands of the dots by rules of their own."
        )


def two_specs_of_value(name: str, of_value: QuantSpec | None, spec: QuantSpec) -> ValueError:
    """An operand that is quantized already where it is named, to something else."""
    return ValueError(
        f"the operand is the value {name!r}, which is quantized to {of_value}, and the rule says {spec}. Give both "
        "rules one spec, or take the rule of the value, or of this operand, away."
    )


def check_joined(spec: QuantSpec, operand: Operand, contracted: tuple[int, ...]) -> None:
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


def check_scales(spec: Any, shape: tuple[int, ...], contracted: tuple[int, ...], takes_blocks: bool) -> None:
    """A scale that is applied after the contraction is shared along it, or by blocks where the op takes them."""
    kind, groups = spec.granularity, qparams_shape(spec, shape) or (1,) * len(shape)
    blocked = {axis % len(shape) for axis in kind.sizes if takes_blocks}
    separate = [i for i in contracted if groups[i] > 1 and i not in blocked]
    if separate:
        raise ValueError(
            f"along the contracted axes {separate} of an operand of shape {shape}, {spec} has a scale of its own for "
            "each element, which cannot be applied after the contraction. Share the scale along them: PerTensor, "
            "PerChannel on other axes, or, in a dot, PerBlock along a contracted one. With one operand in float any "
            "does."
        )


# Of one op


def closed(op: MatchedOp, parts: Sequence[str]) -> ValueError:
    """A parameter that goes where nothing can be replaced."""
    return ValueError(
        f"the parameter goes into {op.contraction.op!r}, at {op.name!r}, where quantize_fn cannot replace anything. "
        f"Leave it in float by a rule ({parts[0]!r}, None) before this one"
        f"{', and one for each of the others' if len(parts) > 1 else ''}, or quantize it by fake_quant_params."
    )


def computed_with_and_closed(op: MatchedOp, path: str, rule: Rule) -> ValueError:
    """What is computed from a parameter and goes where nothing can be replaced."""
    return ValueError(
        f"At {op.name!r}: the rule {rule.pattern!r} quantizes {path!r}, which is computed with and goes into "
        f"{op.contraction.op!r}, where quantize_fn cannot replace anything. Leave it in float by a rule ({path!r}, "
        "None) before this one, or quantize it by fake_quant_params."
    )


def differentiates(name: str) -> ValueError:
    """An op that is in the backward pass of the function itself, of which no rule speaks."""
    return ValueError(
        f"At {name!r}: the function differentiates by itself, and the op is in that pass. Differentiate the quantized "
        "function instead: jax.grad(quantize_fn(loss, rules)), not quantize_fn(jax.grad(loss), rules). If the "
        'derivative belongs to the model, say what is meant by a Rule("**", None, kind="gradient"), which leaves it in '
        "float, or by one with specs."
    )


def custom_derivative(names: Sequence[str], choices: Collection[str | None]) -> ValueError:
    """Ops inside one function with a custom derivative, of which the rules say nothing, or several things."""
    of_rules = "nothing" if set(choices) == {None} else " and ".join(sorted(repr(c) for c in choices))
    return ValueError(
        f"At {' and '.join(map(repr, names))}: the op is inside a function with a derivative of "
        f"its own (jax.custom_jvp or custom_vjp), of which the rules say {of_rules}. Say one for all sites in "
        'it: Rule(..., custom="keep") for the derivative that its author wrote, at the unquantized values, or '
        'Rule(..., custom="inline") for the derivative of the quantized ops, which JAX takes only where no '
        "while loop is inside. With an ODE solver, rather quantize the vector field before it is solved."
    )


def left_in_float(op: MatchedOp, name: str, origin: Origin, left: Sequence[tuple[str, Rule]]) -> ValueError:
    """Parameters that rules quantize, and that meet an op only as something else."""
    paths, (_, rule) = [path for path, _ in left], left[0]
    gathered = bool(gathered_by_data(origin))
    how, kind = ("gathered by data", "act_act") if gathered else ("computed with", "derived")
    spec = "activation" if gathered else "weight"
    everywhere = "let every use of it see the quantized value by Rule(..., everywhere=True), " if gathered else ""
    return ValueError(
        f"At {op.name!r}: the rule {rule.pattern!r} quantizes {', '.join(map(repr, paths))}, which "
        f"{'are' if len(paths) > 1 else 'is'} {how} before the op, and would be left in float. Quantize what the op "
        f'meets by Rule({name!r}, {spec}={rule.weight}, kind="{kind}"), {everywhere}or leave the parameter in float '
        f"by a rule ({paths[0]!r}, None) before that one; q.plan(...) then prints all sites."
    )


# Of all ops


def without_a_rule(names: Sequence[str]) -> ValueError:
    """Sites that no rule matches, where strict=True wants one for each."""
    return ValueError(
        f"`strict=True` wants a rule for every site, got none for {', '.join(map(repr, names))}. Quantize them, or "
        "leave them in float by a rule with None: q.plan(...) prints their kinds."
    )


def refuse_captured_model(ops: Sequence[MatchedOp], matcher: Matcher) -> None:
    """A model that is a function, and so closes over its weights, with the data passed as the params."""
    if not any(map(is_wanted, matcher.rules)) or any(rule.kind == "captured" for rule in matcher.rules):
        return
    roles = [{origin.role for origin in op.origins} for op in ops if op.kind not in ("closed", "value")]
    meets_captured = any("captured" in of for of in roles)
    meets_data = any(of & {"weight", "derived"} and "captured" not in of for of in roles)
    later, is_bare = {"captured", "data"} in roles, set(matcher.leaves) == {""}
    if meets_captured and not meets_data and (is_bare or (later and {"weight", "captured"} in roles)):
        raise ValueError(
            f"The params (`{matcher.params}`) are {'a bare array' if is_bare else 'in the first contraction alone'}"
            ", and contractions are with arrays that the function closes over, as if data were passed as the "
            "params of a model that is a function itself. Pass the weights: of an equinox model, params, static = "
            "eqx.partition(model, eqx.is_array) and quantize_fn(lambda params, x: eqx.combine(params, static)(x), "
            'rules); a lone weight as a dict {"w": w}. If it is meant so, say what becomes of the captured arrays by '
            'a Rule("**", None, kind="captured", optional=True).'
        )


def unused_rule(i: int, matcher: Matcher, ops: Sequence[MatchedOp]) -> ValueError:
    """Rule number i, which decided nothing."""
    rule = matcher.rules[i]
    if i in matcher.shadowed:
        return ValueError(shadowed(i, rule, *matcher.shadowed[i]))
    pattern = pattern_in_words(rule.pattern)
    names = [name for op in ops if op.kind == rule.kind for side in range(2) for name in op.subjects(side)]
    why = _why_unused(rule, names, matcher, ops)
    return ValueError(
        f"`rules[{i}]`, {rule.pattern!r}, matched no site of kind {rule.kind!r}. The nearest of {len(set(names))} "
        f"names: {checks.nearest(pattern, names)}.{why} Fix the rule, or pass Rule(..., optional=True); q.plan(...) "
        "without it prints all sites."
    )


def _why_unused(rule: Rule, names: Sequence[str], matcher: Matcher, ops: Sequence[MatchedOp]) -> str:
    """What the pattern of a rule matches instead of a site; `names` are those of the sites of its kind."""
    bare = dataclasses.replace(rule, min_size=0, dtype=None)
    matches = lambda name: bare.matches(name, matcher.leaves.get(name))
    parameters = list(filter(matches, matcher.leaves))
    excluded = list(filter(matches, names))
    if excluded:
        fields = {name: getattr(rule, name) for name in ("op", "scope", "min_size", "dtype") if getattr(rule, name)}
        said = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        return f" The pattern matches {excluded[0]!r}, which {said} excludes."
    elsewhere = [
        (path, op.kind) for path in parameters for op in ops if op.kind != rule.kind
        for origin in op.origins if path in origin.params and (origin.role in ("weight", "derived"))
    ]  # fmt: skip
    if elsewhere:
        path, kind = elsewhere[0]
        said = f": Rule(..., kind={kind!r})" if kind in KINDS else ""
        is_gathered = any(path in origin.parts for op in ops for origin in op.origins if origin.gathered)
        more = " Rule(..., everywhere=True) quantizes what is gathered of it." if is_gathered else ""
        return f" It matches the parameter {path!r}, which is in an op of kind {kind!r}{said}.{more}"
    if rule.kind != "weight":
        return ""
    if parameters:
        return (
            f" It matches the parameter {parameters[0]!r}, which no dot or convolution uses as it is. "
            "Rule(..., everywhere=True) quantizes it where it is gathered or computed with, too."
        )
    nearest = checks.nearest(pattern_in_words(rule.pattern), matcher.leaves)
    others = f"; the nearest of {len(matcher.leaves)}: {nearest}" if matcher.leaves.keys() - set(names) else ""
    return f" No parameter has such a path{others}. If these are not the parameters, `{matcher.params}` is wrong."
