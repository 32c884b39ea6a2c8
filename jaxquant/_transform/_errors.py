# SPDX-License-Identifier: Apache-2.0
"""The errors of rules for a function that take more than a look at one operand."""

import dataclasses
from collections.abc import Sequence

from .._base import _checks as checks
from .._program._origin import Origin
from .._runtime._kernels import Kernels
from .._spec._rule import KINDS, Rule, pattern_in_words, shadowed
from ._match import MatchedOp, Matcher, gathered_by_data, is_wanted
from ._plan import Plan


def differentiates(name: str) -> ValueError:
    """An op that is in the backward pass of the function itself, of which no rule speaks."""
    return ValueError(
        f"At {name!r}: the function itself differentiates, and the op is in its backward pass. Differentiate the "
        "quantized function instead: jax.grad(quantize_fn(loss, rules)), not quantize_fn(jax.grad(loss), rules). If "
        'the derivative belongs to the model, say so by a Rule("**", None, kind="gradient"), which leaves it in float, '
        "or by one with specs."
    )


def refuse_dynamic(plan: Plan, kernels: Kernels | None) -> None:
    """Kernels of a runtime have ranges that are known before they run."""
    site = next((site for site in plan if site.kernel and site.state == "dynamic"), None)
    if kernels is not None and site is not None:
        raise ValueError(
            f"At {site.name!r}: {kernels.name!r} computes the value with a range that is known before it runs, got no "
            "qparams for it. Pass qparams=q.init_qparams(params, ..., ranges=q.observe(params, ...))."
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
            ", and contractions are with arrays that the function closes over, as if data were passed as the params of "
            "a model that is itself a function. Pass the weights: for an equinox model, params, static = "
            "eqx.partition(model, eqx.is_array) and quantize_fn(lambda params, x: eqx.combine(params, static)(x), "
            'rules); a lone weight as a dict {"w": w}. If this is intended, say what becomes of the captured arrays by '
            'a Rule("**", None, kind="captured", optional=True).'
        )


def unused_rule(i: int, matcher: Matcher, ops: Sequence[MatchedOp]) -> ValueError:
    """Rule number i, which decided nothing."""
    rule = matcher.rules[i]
    each = ((op, side, earlier) for op in ops for side, earlier in enumerate(op.rules) if earlier is not None)
    if taken := next(
        ((names[0], first) for op, side, first in each if (names := matcher.matched(rule, op, side))), None
    ):
        return ValueError(shadowed(i, rule, *taken))
    pattern = pattern_in_words(rule.pattern)
    names = [
        name for op in ops if op.kind == rule.kind for side in range(len(op.origins)) for name in op.subjects(side)
    ]
    names = matcher.arguments if rule.kind == "cache" else names
    why = _why_unused(rule, names, matcher, ops)
    return ValueError(
        f"`rules[{i}]`, {rule.pattern!r}, matched no site of kind {rule.kind!r}. The nearest of {len(set(names))} "
        f"names: {checks.nearest(pattern, names)}.{why} Fix the rule, or pass Rule(..., optional=True); q.plan(...) "
        "without it prints all sites."
    )


def _why_unused(rule: Rule, names: Sequence[str], matcher: Matcher, ops: Sequence[MatchedOp]) -> str:
    """The reason why a rule matches no site, in words; `names` are those of the sites of its kind."""
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
    of_kinds = {
        op.kind: name for op in ops for side in range(len(op.origins)) for name in op.subjects(side) if matches(name)
    }
    if kind := next((kind for kind in KINDS[1:] if kind in of_kinds), None):
        return f" It matches {of_kinds[kind]!r}, which is of kind {kind!r}: Rule(..., kind={kind!r})."
    if parameters:
        return (
            f" It matches the parameter {parameters[0]!r}, which no dot or convolution uses as it is. "
            "Rule(..., everywhere=True) quantizes it where it is gathered or computed with, too."
        )
    if isinstance(rule.pattern, str):
        bare = dataclasses.replace(bare, pattern=f"**/{rule.pattern}")
        if deeper := set(filter(matches, names)):
            return f" A pattern is for whole paths, and {bare.pattern!r} matches {len(deeper)} of them."
    found, known = (checks.nearest(pattern_in_words(rule.pattern), of) for of in (matcher.leaves, names))
    others = f"; the nearest of {len(matcher.leaves)}: {found}" if found != known else ""
    return f" No parameter has such a path{others}. If these are not the parameters, `{matcher.params}` is wrong."
