# SPDX-License-Identifier: Apache-2.0
"""A rule: which parameters or ops it is for, and what they are quantized to."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from .._base import _checks as checks
from .._base._checks import PyTree
from ._granularity import PerTensor
from ._spec import QuantSpec, plain_spec

OPS: dict[str, Any] = {}  # contractions by the names of their primitives; `_contract/_ops` has them
KINDS = ("weight", "act_act", "derived", "captured", "gradient", "value", "cache")
_OF_QUANTIZE_FN = ("kind", "op", "scope", "custom", "everywhere", "gradient", "history")
_OF_PRODUCTS = (
    "`op`, `gradient` and `history` are of products, got {0.op!r}, {0.gradient!r} and {0.history!r} with "
    'kind="{0.kind}". Drop them, or give them to the rule of the dot.'
)
# Of the fields that not every kind has: the kinds that have one, and the error of the others.
_FIELDS_OF_KINDS = {
    "everywhere": (
        ("weight", "cache"),
        '`everywhere` is for parameters and caches, got it with kind={0.kind!r}. Drop it, or use kind="weight".',
    ),
    "weight": (
        ("weight", "derived", "captured", "gradient"),
        '`weight` of a Rule must be None where kind="{0.kind}", got {0.weight}: none is a weight. Pass activation=.',
    ),
    "op": (KINDS[:-2], _OF_PRODUCTS),
    "gradient": (KINDS[:-2], _OF_PRODUCTS),
    "history": (KINDS[:-2], _OF_PRODUCTS),
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """Quantization of the parameters whose path matches a pattern. Static.

    Attributes:
      pattern: a path glob, in which `*` stands for anything within a segment and `**` for any number of segments, also
        none: "**/kernel" matches "kernel" and "a/b/kernel". Or a compiled regex for the whole path, or a function
        (path, leaf) -> bool.
      weight: QuantSpec of the parameter; None leaves it in float.
      activation: QuantSpec of the other operand of the op that uses the parameter; None leaves it in float. Functions
        that see only the parameters cannot quantize it, and `fake_quant_params` refuses it.
      optional: static bool; True lets the rule match nothing, or nothing that an earlier rule left.
      min_size: static int; parameters of fewer values are not matched.
      dtype: parameters of another dtype are not matched; None takes any.

    For `quantize_fn` only; functions that see only the parameters refuse anything but the default:

    - kind: which ops the rule is for, and what its pattern matches. "weight": ops of a parameter with something else;
      matches the path of the parameter. "act_act": ops of two operands that depend on data; matches the name of the
      op in the plan, or the name that `quant_point` gives an operand; `activation` is the spec for both. "derived":
      an operand computed from parameters alone; matches the name of the op or the path of one of the parameters.
      "captured": an operand that the function closes over; matches the name of the op. "gradient": ops in the
      backward pass of a function that differentiates; matches the name of the op. "value": a value named by
      `quant_point`; matches that name. `activation` is its spec, and dots that take the value, even after moves, take
      its integers. "cache": an argument that the function writes a part of, reads and returns, such as the keys of an
      attention; matches its path, which begins with the name of the argument if that does not hold the parameters.
      `activation` is its spec. What the function writes is quantized, and the argument is returned as a QArray.
    - op: "dot_general", "conv_general_dilated" or "ragged_dot_general"; None takes all.
    - scope: a path glob of the op's scope, which `jax.named_scope` and the modules of flax and haiku make.
    - custom: what to do if the op is inside a function with a custom derivative (custom_jvp, custom_vjp). "keep" uses
      the derivative that its author wrote, at the unquantized values; "inline" the derivative of the quantized ops;
      None raises.
    - everywhere: static bool. True lets every use of the parameter see its quantized value: a gather, such as of the
      rows of an embedding, and anything that computes with it in float. Needed to freeze tied parameters. A spec
      whose axis is None means the output channels of the parameter's dot; if there is no dot, name the axis. Of a
      cache: lets what is no dot or convolution read its real values, where it would raise.
    - gradient: the precision of the products of the backward pass, where both operands are quantized. None: float32.
      "bfloat16": the incoming gradient g is rounded to bfloat16, products are added in float32. A QuantSpec: g is
      rounded to its grid, products are as exact as in the forward pass. A pair of these: one towards the input and
      one towards the weight; if kind="act_act", one towards each operand. The QuantSpec is PerTensor(),
      PerBlock(None, size) along what is summed, PerToken() (only towards an input) or PerChannel(None) (only towards
      a weight). The value of the function does not change. A scale of the other operand that varies along what is
      summed, such as a weight's channels towards the input, is multiplied into g before g is rounded. Infinities and
      NaN in g become NaN in what they enter.
    - history: static int, of how many steps the largest magnitudes of g are kept, so that it is rounded with the range
      of these (delayed scaling), and not with its own (just in time), which 0 means. For a `gradient` that is
      PerTensor(). `q.init_qparams` then has a GradientHistory for each gradient, "w:gradient" towards w and
      "w:input:gradient" towards its input; `split_histories` says how a train step uses them.

    Raises:
      TypeError: for anything else.
      ValueError: for `**` beside other characters in a segment, a weight where kind="act_act", and unknown words.

    >>> from jaxquant import Rule, weight_spec
    >>> Rule("decoder/**/kernel", weight_spec(8, channel_axis=-1), optional=True).optional
    True
    """

    def __new__(cls, *args: Any, **kw: Any):
        checks.argument_names("Rule", kw, [field.name for field in dataclasses.fields(cls)])
        return super().__new__(cls)

    pattern: str | re.Pattern | Callable[[str, Any], bool]
    weight: QuantSpec | None = None
    activation: QuantSpec | None = None
    optional: bool = dataclasses.field(default=False, kw_only=True)
    min_size: int = dataclasses.field(default=0, kw_only=True)
    dtype: Any = dataclasses.field(default=None, kw_only=True)
    kind: str = dataclasses.field(default="weight", kw_only=True)
    op: str | None = dataclasses.field(default=None, kw_only=True)
    scope: str | None = dataclasses.field(default=None, kw_only=True)
    custom: str | None = dataclasses.field(default=None, kw_only=True)
    everywhere: bool = dataclasses.field(default=False, kw_only=True)
    gradient: Any = dataclasses.field(default=None, kw_only=True)
    history: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self):
        _check_globs(self)
        _check_specs(self)
        checks.static_bool("optional", self.optional)
        checks.static_int_between("min_size", self.min_size, 0, 2**63 - 1)
        checks.static_int_between("history", self.history, 0, 2**16)
        _check_history(self)
        checks.static_bool("everywhere", self.everywhere)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _checked_dtype(self.dtype))
        words = {"kind": KINDS, "op": tuple(OPS), "custom": ("keep", "inline")}
        for name, choices in words.items():
            if (value := getattr(self, name)) is not None or name == "kind":
                checks.one_of(name, value, choices)
        for name, (kinds, text) in _FIELDS_OF_KINDS.items():
            if self.kind not in kinds and getattr(self, name) not in (None, False, (None, None)):
                raise ValueError(text.format(self))
        if self.kind == "cache" and self.activation is not None:
            _check_of_cache(self.activation)

    @property
    def gradients(self) -> tuple[Any, Any]:
        """The precision of the gradients to the input and the weight, or to the two operands."""
        is_pair = isinstance(self.gradient, tuple) and len(self.gradient) == 2
        return self.gradient if is_pair else (self.gradient, self.gradient)

    def of_quantize_fn(self) -> str:
        """The fields that only `quantize_fn` understands, in words for an error; empty if there are none."""
        fields = [f for f in dataclasses.fields(self) if f.name in _OF_QUANTIZE_FN]
        return ", ".join(f"{f.name}={v!r}" for f in fields if (v := getattr(self, f.name)) != f.default)

    def in_scope(self, scope: str) -> bool:
        """Whether it is for ops of a scope."""
        return self.scope is None or bool(re.fullmatch(_glob(self.scope), scope and f"{scope}/"))

    def matches(self, path: str, leaf: PyTree) -> bool:
        """Whether it matches a leaf at a path, by pattern, size and dtype."""
        if self.min_size and math.prod(getattr(leaf, "shape", ())) < self.min_size:
            return False
        if self.dtype is not None and getattr(leaf, "dtype", None) != self.dtype:
            return False
        if isinstance(self.pattern, str):
            return bool(re.fullmatch(_glob(self.pattern), path and f"{path}/"))
        if isinstance(self.pattern, re.Pattern):
            return bool(self.pattern.fullmatch(path))
        matched = self.pattern(path, leaf)
        if not isinstance(matched, bool | np.bool_):
            raise TypeError(
                f"`pattern` {self.pattern!r} must return a bool, got {checks.kind(matched)} at {path!r}. Decide by the "
                "path, the shape and the dtype: values may be traced."
            )
        return bool(matched)


def _check_globs(rule: Rule) -> None:
    text = rule.pattern.pattern if isinstance(rule.pattern, re.Pattern) else rule.pattern
    if not isinstance(text, str) and not callable(text):
        raise TypeError(
            f"`pattern` of a Rule must be a path glob, a compiled regex of str or a function (path, leaf) -> bool, "
            f"got {checks.kind(text)}. A glob of every path is '**'."
        )
    if not isinstance(rule.scope, str | None):
        raise TypeError(f"`scope` of a Rule must be a path glob or None, got {checks.kind(rule.scope)}.")
    for name in ("pattern", "scope"):
        glob = getattr(rule, name)
        if isinstance(glob, str) and any("**" in s and s != "**" for s in glob.split("/")):
            raise ValueError(
                f"`{name}` must have `**` as a whole segment, got {glob!r}. Within a segment write `*`; "
                "a regex, as the pattern, is re.compile(...)."
            )


def _check_specs(rule: Rule) -> None:
    for name in ("weight", "activation"):
        if not isinstance(getattr(rule, name), QuantSpec | None):
            raise TypeError(
                f"`{name}` of a Rule must be a QuantSpec, or None to leave it in float, got "
                f"{checks.kind(getattr(rule, name))}. Build one by weight_spec(...), activation_spec(...) or "
                "QuantSpec(...)."
            )
    for precision in rule.gradients:
        if not isinstance(precision, QuantSpec | None) and precision != "bfloat16":
            raise TypeError(
                f'`gradient` of a Rule must be None, "bfloat16", a QuantSpec, or a pair of these, got '
                f"{rule.gradient!r}. A pair is (towards the input, towards the weight)."
            )


def _check_history(rule: Rule) -> None:
    specs = [plain_spec("A gradient", spec) for spec in rule.gradients if isinstance(spec, QuantSpec)]
    if rule.history and (not specs or any(spec.granularity != PerTensor() for spec in specs)):
        raise ValueError(
            f"`history` is for a `gradient` that is a QuantSpec with PerTensor(), whose range is one number a step, "
            f"got history={rule.history} with gradient={rule.gradient!r}. Drop it, and the range is of the values at "
            'hand; or pass gradient=QuantSpec() or float8_spec("float8_e5m2").'
        )


def _check_of_cache(spec: QuantSpec) -> None:
    plain_spec("A cache", spec)
    if spec.granularity.is_of_op or spec.rounding == "stochastic" or spec.has_tensor_scale:
        raise ValueError(
            "`activation` of a cache must name its axes, round to nearest and have scales of its groups alone, got "
            f"{spec}. A scale for each token and head of (batch, time, heads, features) is QuantSpec(bits=8, "
            "granularity=PerChannel((0, 1, 2)))."
        )


def _checked_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(
            f"`dtype` of a Rule must be a dtype or None, got {dtype!r}. Pass one such as jnp.bfloat16."
        ) from None


Rules = Sequence[Rule | tuple[str | re.Pattern | Callable[[str, Any], bool], QuantSpec | None]]


def _glob(pattern: str) -> str:
    """A glob as a regex of paths that end in a slash, so that every segment, also none, is followed by one."""
    within = lambda segment: "[^/]*".join(map(re.escape, segment.split("*")))
    segments = pattern.split("/") if pattern else []
    return "".join("(?:[^/]*/)*" if segment == "**" else f"{within(segment)}/" for segment in segments)


def checked_rules(rules: object) -> list[Rule]:
    """Returns rules as a list of Rules; pairs are made into Rules."""
    is_pair = lambda rule: isinstance(rule, tuple | list) and len(rule) == 2
    if not isinstance(rules, tuple | list) or (is_pair(rules) and isinstance(rules[0], str | re.Pattern)):
        raise TypeError(
            f"`rules` must be a list of pairs (pattern, spec) or of Rules, got {rules!r}. One rule is a list of one; "
            "of a dict, which would lose its order through jit, pass list(rules.items())."
        )
    for i, rule in enumerate(rules):
        if not isinstance(rule, Rule) and not is_pair(rule):
            raise TypeError(
                f"`rules[{i}]` must be a pair (pattern, spec) or a Rule, got {rule!r}. None as the spec leaves what "
                "matches in float."
            )
    return [rule if isinstance(rule, Rule) else Rule(*rule) for rule in rules]


def pattern_in_words(pattern: object) -> str:
    """A glob as it is, a regex by its text, a function by its name."""
    if isinstance(pattern, str):
        return pattern
    return getattr(pattern, "pattern", None) or getattr(pattern, "__name__", type(pattern).__name__)


def first_rule(rules: Iterable[Rule], path: str, leaf: Any) -> Rule | None:
    """The first rule that matches a leaf at a path."""
    return next((rule for rule in rules if rule.matches(path, leaf)), None)


def shadowed(i: int, rule: Rule, name: str, earlier: Rule) -> str:
    """The error for rule number i, which matches `name`, but nothing that an earlier rule leaves."""
    return (
        f"`rules[{i}]`, {rule.pattern!r}, is shadowed: all it matches, such as {name!r}, is taken by the earlier "
        f"rule {earlier.pattern!r}. Put the narrower rule first, drop one, or pass Rule(..., optional=True)."
    )
