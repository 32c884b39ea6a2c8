# SPDX-License-Identifier: Apache-2.0
"""Which leaf of a params pytree gets which spec, and the transforms of whole pytrees that follow from it."""

import contextlib
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, KeyPath, keystr, tree_flatten_with_path

from . import _checks as checks
from . import _numerics as num
from ._affine import checked_qparams, dequantize, fake_quant, quantize, scale_gradient
from ._qarray import QArray
from ._qparams import QParams
from ._ranges._fit import fit_qparams
from ._spec import QuantSpec, limits_of, qparams_shape

KINDS = ("weight", "act_act", "derived", "captured", "gradient", "value")
OF_QUANTIZE_FN = ("kind", "op", "scope", "custom", "everywhere", "gradient")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What the parameters whose path matches a pattern are quantized to. Static.

    Attributes:
      pattern: a path glob, in which `*` stands for anything within a segment and `**` for any number of segments, also
        none: "**/kernel" matches "kernel" and "a/b/kernel". Or a compiled regex, of the whole path. Or a function
        (path, leaf) -> bool.
      weight: QuantSpec of the parameter; None leaves it in float.
      activation: QuantSpec of the other operand of the op that uses the parameter; None leaves it in float. Functions
        that see the parameters alone cannot quantize it, and `fake_quant_params` refuses it.
      optional: static bool; True lets the rule match nothing, or nothing that an earlier rule left.
      min_size: static int; parameters of fewer values are not matched.
      dtype: parameters of another dtype are not matched; None takes any.

    Of `quantize_fn` alone; functions that see the parameters alone refuse what is not the default:

      kind: which ops the rule is for, and what its pattern matches. "weight": a parameter with something else, by the
        path of the parameter. "act_act": two operands that depend on data; the pattern is matched with the name of the
        op in the plan, or with what `quant_point` calls an operand, and `activation` is the spec for both. "derived":
        an operand computed from parameters alone, by the name of the op or the path of one of them. "captured": an
        operand that the function closes over, by the name of the op. "gradient": the backward pass of a function that
        differentiates, by the name of the op. "value": a value that `quant_point` names, by the name; `activation` is
        its spec, and the dots that take it, moved perhaps, take its integers.
      op: "dot_general", "conv_general_dilated" or "ragged_dot_general"; None takes all.
      scope: a path glob of the op's scope, which `jax.named_scope` and the modules of flax and haiku make.
      custom: what to do where the op is inside a function with a custom derivative (custom_jvp, custom_vjp).
        "keep": the derivative that its author wrote, at the unquantized values. "inline": the derivative of the
        quantized ops. None raises.
      everywhere: static bool. True lets every use of the parameter see its quantized value: a gather, such as of the
        rows of an embedding, and whatever computes with it in float. Needed to freeze what is tied. A spec whose axis
        is None means the output channels of the parameter's dot; without a dot name the axis.
      gradient: the precision of the products of the backward pass, where both operands are quantized. None: float32.
        "bfloat16": the incoming gradient g rounded to bfloat16, products added in float32. A QuantSpec: g on its grid,
        the products as exact as those of the forward pass. A pair of these: towards the input and towards the weight;
        where kind="act_act", towards each operand. A QuantSpec is PerTensor(); PerBlock(None, size) along what is
        summed; PerToken() towards an input alone; PerChannel(None) towards a weight alone. The value of the function
        does not change. A scale of the other operand that varies along what is summed, as a weight's channels towards
        the input, is multiplied into g before g is rounded. What is not finite in g is NaN in what it enters.

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

    def __post_init__(self):
        text = self.pattern.pattern if isinstance(self.pattern, re.Pattern) else self.pattern
        if not isinstance(text, str) and not callable(text):
            raise TypeError(
                f"`pattern` of a Rule must be a path glob, a compiled regex of str or a function (path, leaf) -> bool, "
                f"got {checks.kind(text)}. A glob of every path is '**'."
            )
        for name in ("pattern", "scope"):
            glob = getattr(self, name)
            if isinstance(glob, str) and any("**" in s and s != "**" for s in glob.split("/")):
                raise ValueError(
                    f"`{name}` must have `**` as a whole segment, got {glob!r}. Within a segment write `*`; "
                    "a regex, as the pattern, is re.compile(...)."
                )
        for name in ("weight", "activation"):
            if not isinstance(getattr(self, name), QuantSpec | None):
                raise TypeError(
                    f"`{name}` of a Rule must be a QuantSpec, or None to leave it in float, got "
                    f"{checks.kind(getattr(self, name))}. Build one by weight_spec(...), activation_spec(...) or "
                    "QuantSpec(...)."
                )
        checks.static_bool("optional", self.optional)
        checks.static_int_between("min_size", self.min_size, 0, 2**63 - 1)
        if self.dtype is not None:
            try:
                object.__setattr__(self, "dtype", np.dtype(self.dtype))
            except TypeError:
                raise TypeError(
                    f"`dtype` of a Rule must be a dtype or None, got {self.dtype!r}. Pass one such as jnp.bfloat16."
                ) from None
        checks.one_of("kind", self.kind, KINDS)
        if self.op is not None:
            checks.one_of("op", self.op, ("dot_general", "conv_general_dilated", "ragged_dot_general"))
        if self.custom is not None:
            checks.one_of("custom", self.custom, ("keep", "inline"))
        if checks.static_bool("everywhere", self.everywhere) and self.kind != "weight":
            raise ValueError(
                f'`everywhere` is of parameters, got it with kind={self.kind!r}. Drop it, or use kind="weight".'
            )
        for precision in self.gradients:
            if not isinstance(precision, QuantSpec | None) and precision != "bfloat16":
                raise TypeError(
                    f'`gradient` of a Rule must be None, "bfloat16", a QuantSpec, or a pair of these, got '
                    f"{self.gradient!r}. A pair is (towards the input, towards the weight)."
                )
        if not isinstance(self.scope, str | None):
            raise TypeError(f"`scope` of a Rule must be a path glob or None, got {checks.kind(self.scope)}.")
        if self.kind in ("act_act", "value") and self.weight:
            raise ValueError(
                f'`weight` of a Rule must be None where kind="{self.kind}", got {self.weight}: no operand is one. Pass '
                "activation=."
            )
        if self.kind == "value" and (self.op, self.gradients) != (None, (None, None)):
            raise ValueError(
                f'`op` and `gradient` are of products, got {self.op!r} and {self.gradient!r} with kind="value". Drop '
                "them, or give them to the rule of the dot."
            )

    @property
    def gradients(self) -> tuple[Any, Any]:
        """The precision of the gradients: towards the input and the weight, or towards the two operands."""
        is_pair = isinstance(self.gradient, tuple) and len(self.gradient) == 2
        return self.gradient if is_pair else (self.gradient, self.gradient)

    def of_quantize_fn(self) -> str:
        """What it says that only `quantize_fn` can do, to be refused elsewhere; or nothing."""
        fields = [f for f in dataclasses.fields(self) if f.name in OF_QUANTIZE_FN]
        return ", ".join(f"{f.name}={v!r}" for f in fields if (v := getattr(self, f.name)) != f.default)

    def in_scope(self, scope: str) -> bool:
        """Whether it is for ops of a scope."""
        return self.scope is None or bool(re.fullmatch(_glob(self.scope), scope and f"{scope}/"))

    def matches(self, path: str, leaf: Any) -> bool:
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


Rules = Sequence[Rule | tuple[str | re.Pattern | Callable[[str, Any], bool], QuantSpec | None]]


def _glob(pattern: str) -> str:
    """A glob as a regex of paths that end in a slash, so that every segment, also none, is followed by one."""
    within = lambda segment: "[^/]*".join(map(re.escape, segment.split("*")))
    segments = pattern.split("/") if pattern else []
    return "".join("(?:[^/]*/)*" if segment == "**" else f"{within(segment)}/" for segment in segments)


def checked_rules(rules: Any) -> list[Rule]:
    """`rules` as Rules."""
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


def _is_qarray(node: Any) -> bool:
    return isinstance(node, QArray)


def unboxed(node: Any) -> list[Any]:
    """What is in a node that is there for its attribute `value` alone, as a parameter of nnx; nothing of others."""
    children, _ = tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    return [child for path, child in children if path == (GetAttrKey("value"),) and len(children) == 1]


def with_paths(tree: Any, path: KeyPath = (), is_leaf: Callable[[Any], bool] = _is_qarray) -> Iterator[tuple[str, Any]]:
    """Each leaf and its path, without the attribute that unpacks a box."""
    for keys, node in tree_flatten_with_path(tree, is_leaf=lambda n: is_leaf(n) or bool(unboxed(n)))[0]:
        if inside := unboxed(node):
            yield from with_paths(inside[0], path + keys, is_leaf)
        else:
            yield keystr(path + keys, simple=True, separator="/"), node


@contextlib.contextmanager
def named_in_errors(*paths: str, rule: Rule | None = None) -> Iterator[None]:
    """An error inside also says which leaf, or operands, it is about, and the rule that chose it."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        by = f", chosen by the rule {rule.pattern!r}" if rule else ""
        raise kind(f"At {' and '.join(map(repr, paths))}{by}: {error}") from error


class _Leaf(NamedTuple):
    path: str
    value: Any
    rule: Rule | None

    @property
    def spec(self) -> QuantSpec | None:
        return self.rule and self.rule.weight

    def named_in_errors(self) -> Any:
        return named_in_errors(self.path, rule=self.rule)


def _leaves(params: Any, rules: Any) -> tuple[list[_Leaf], Any]:
    """The leaves of a pytree, each with its rule, and its structure; every error of a choice is raised here."""
    rules = checked_rules(rules)
    for i, rule in enumerate(rules):
        if said := rule.of_quantize_fn():
            raise ValueError(
                f"`rules[{i}]`, {rule.pattern!r}, has {said}, which a function that sees the parameters alone cannot "
                "know. Drop it, or use quantize_fn(f, rules)."
            )
    found = list(with_paths(params))
    matching = [[i for i, rule in enumerate(rules) if rule.matches(*pair)] for pair in found]
    for i, rule in enumerate(rules):
        first = {path: rules[of[0]] for (path, _), of in zip(found, matching, strict=True) if i in of}
        if not rule.optional and not any(of[:1] == [i] for of in matching):
            raise ValueError(_unused(i, rule, first, [path for path, _ in found]))
    leaves = [_Leaf(*pair, rules[of[0]] if of else None) for pair, of in zip(found, matching, strict=True)]
    paths = set()
    for leaf in leaves:
        if leaf.spec:
            with leaf.named_in_errors():
                _check_choice(leaf, leaf.spec, paths)
            paths.add(leaf.path)
    return leaves, jax.tree.structure(params, is_leaf=_is_qarray)


def _unused(i: int, rule: Rule, first: dict[str, Rule], paths: list[str]) -> str:
    if first:
        path, earlier = next(iter(first.items()))
        return (
            f"`rules[{i}]`, {rule.pattern!r}, is shadowed: all it matches, such as {path!r}, is taken by the earlier "
            f"rule {earlier.pattern!r}. Put the narrower rule first, drop one, or pass Rule(..., optional=True)."
        )
    pattern = rule.pattern if isinstance(rule.pattern, str) else str(getattr(rule.pattern, "pattern", ""))
    nearest = difflib.get_close_matches(pattern.replace("*", ""), paths, 5, 0.0)
    return (
        f"`rules[{i}]`, {rule.pattern!r}, matches no parameter, of {len(paths)}. The nearest paths: "
        f"{', '.join(map(repr, nearest)) or 'none'}. Fix the pattern ('**/' also matches zero segments), or pass "
        "Rule(..., optional=True)."
    )


def _check_choice(leaf: _Leaf, spec: QuantSpec, others: set[str]) -> None:
    value = leaf.value
    known = checks.is_array(value) or isinstance(value, jax.ShapeDtypeStruct)
    if not known or not checks.is_float(value.dtype):
        raise ValueError(
            f"a parameter must be a floating array to be quantized, got {checks.kind(value)}. Leave it in float "
            f"by a rule ({leaf.path!r}, None) before this one."
        )
    qparams_shape(spec, value.shape)
    if leaf.path in others:
        raise ValueError("two parameters have this path, got it twice. Rename one of the keys that make it.")


def _rebuilt(f: Callable[[_Leaf, QuantSpec], Any], leaves: list[_Leaf], structure: Any) -> Any:
    """The pytree with `f(leaf, spec)` where a rule gives a spec; every other leaf is the same object."""
    new = []
    for leaf in leaves:
        with leaf.named_in_errors():
            new.append(f(leaf, leaf.spec) if leaf.spec else leaf.value)
    return jax.tree.unflatten(structure, new)


def _qparams_of(leaves: list[_Leaf], qparams: Any) -> Mapping[str, QParams | None]:
    """The qparams of each quantized leaf, all of them or none."""
    paths = [leaf.path for leaf in leaves if leaf.spec]
    if qparams is None:
        return dict.fromkeys(paths)
    if not isinstance(qparams, Mapping):
        raise TypeError(
            f"`qparams` must be a dict from path to QParams, or None for ranges from the parameters, got "
            f"{checks.kind(qparams)}. Make one by init_qparams(params, rules)."
        )
    missing, unknown = [p for p in paths if qparams.get(p) is None], [p for p in qparams if p not in paths]
    if missing or unknown:
        raise ValueError(
            f"`qparams` must have one entry for each parameter that a rule quantizes, got none for {missing} and "
            f"unknown paths {unknown}. Make them by init_qparams(params, rules) with these rules."
        )
    return qparams


def _keys_of(leaves: list[_Leaf], key: Any) -> dict[str, Any]:
    """A key of its own for each leaf that rounds stochastically."""
    paths = [leaf.path for leaf in leaves if leaf.spec and leaf.spec.rounding == "stochastic"]
    if key is None:
        return {}
    if not paths:
        raise ValueError(
            "`key` is for stochastic rounding alone, got one, and no rule rounds so. Drop it, or give a spec "
            "rounding='stochastic'."
        )
    key = checks.prng_key("key", key)
    return {path: jax.random.fold_in(key, i) for i, path in enumerate(paths)}


def match_rules(params: Any, rules: Rules) -> Any:
    """Which parameter is quantized to what: the plan, to be printed.

    Paths are the keys from the root joined by "/": "encoder/0/kernel". The attribute `value` that unpacks a parameter
    of nnx, or a partitioned one of linen, is left out. The first rule that matches decides; what no rule matches stays
    in float.

    Args:
      params: any pytree of arrays; shapes and dtypes suffice (`jax.eval_shape`).
      rules: list or tuple of pairs (pattern, spec) or Rules, static; a tuple of them is hashable. A pair is short for
        Rule(pattern, spec).

    Returns:
      The pytree of params with a QuantSpec for each leaf that is quantized and None for each other leaf.

    Gradient: none; the plan is static.

    Raises:
      TypeError: for rules of another kind.
      ValueError: for a rule that matches nothing, or nothing that earlier rules left, unless it is optional; and for a
        parameter chosen that is no floating array, that the spec's axis or blocks do not fit, or whose path another
        has too.

    Source: path rules as in the partition rules of large JAX models.

    >>> import jax.numpy as jnp
    >>> from jaxquant import match_rules, weight_spec
    >>> params = {"head": {"kernel": jnp.ones((3, 2))}, "body": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}}
    >>> plan = match_rules(params, [("head/**", None), ("**/kernel", weight_spec(4, channel_axis=-1))])
    >>> plan["body"]
    {'bias': None, 'kernel': QuantSpec(bits=4, granularity=PerChannel(-1))}
    """
    leaves, structure = _leaves(params, rules)
    return jax.tree.unflatten(structure, [leaf.spec for leaf in leaves])


def with_lsq_gradient(qparams: QParams, size: int, spec: QuantSpec, bits: Any) -> QParams:
    """The qparams of a tensor of a size, with their gradient multiplied as LSQ does."""
    sharing = size // max(math.prod(qparams.scale.shape), 1)
    # Guarded, because XLA makes of 1 / sqrt an rsqrt, which differs in the last bit.
    factor = 1 / num.guard(jnp.sqrt(max(sharing, 1) * limits_of(spec, bits)[1]))
    return QParams(scale_gradient(qparams.scale, factor), scale_gradient(qparams.zero_point, factor))


def fake_quant_params(
    params: Any,
    rules: Rules,
    qparams: Mapping[str, QParams] | None = None,
    *,
    key: Any = None,
    bits: Any = None,
    lsq_gradient: bool = False,
) -> Any:
    """Fake-quantizes the parameters that the rules choose: called inside the loss, it is the whole change for QAT.

    Args:
      params: any pytree, real values: dicts, tuples, dataclasses, flax variables, nnx states, equinox modules, haiku
        params. Leaves without a rule may be anything.
      rules: as in `match_rules`, static.
      qparams: dict from path to QParams, for every parameter that is quantized, traced or not: `init_qparams`. None
        fits each to the parameter by min-max.
      key: PRNG key, for stochastic rounding alone; each parameter that rounds so gets a key of its own.
      bits: integer, traced or not, at most the bits of every spec: a schedule of widths without a recompile.
      lsq_gradient: static bool. True multiplies the gradient of each scale and zero point by 1 / sqrt(n * qmax), n
        values sharing it, so that under SGD qparams learn at the rate of the parameters; Adam divides it out again.

    Returns:
      The same pytree; a leaf without a spec is the same object.

    Gradient: as `fake_quant`: to the parameters straight through, to the qparams the LSQ form. None to qparams
    that are fitted here.

    Raises:
      TypeError, ValueError: as `match_rules`, and as `fake_quant` with the path; for qparams whose paths are not those
        of the parameters quantized, a rule with an activation, and lsq_gradient without qparams.

    Source: Jacob et al., 2018; learned qparams: Esser et al., 2020, "Learned Step Size Quantization".

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import fake_quant_params, weight_spec
    >>> rules = [("**/kernel", weight_spec(4, channel_axis=-1))]
    >>> loss = lambda params: fake_quant_params(params, rules)["kernel"].sum()
    >>> jax.grad(loss)({"kernel": jnp.array([[0.5], [7.1]])})["kernel"].tolist()
    [[1.0], [1.0]]
    """
    leaves, structure = _leaves(params, rules)
    for leaf in leaves:
        if leaf.rule and leaf.rule.activation:
            raise ValueError(
                f"`rules` of fake_quant_params must have no activation, got {leaf.rule.pattern!r} with "
                f"{leaf.rule.activation}, which would stay in float. Quantize activations where they are made, by "
                "fake_quant(x, spec, qparams)."
            )
    if checks.static_bool("lsq_gradient", lsq_gradient) and qparams is None:
        raise ValueError("`lsq_gradient` is for qparams that are trained, got qparams=None. Pass init_qparams(...).")
    of_path, keys = _qparams_of(leaves, qparams), _keys_of(leaves, key)

    def one(leaf: _Leaf, spec: QuantSpec) -> Any:
        used = of_path[leaf.path]
        if lsq_gradient:
            used = with_lsq_gradient(checked_qparams(leaf.value, spec, used, bits), leaf.value.size, spec, bits)
        return fake_quant(leaf.value, spec, used, key=keys.get(leaf.path), bits=bits)

    return _rebuilt(one, leaves, structure)


def init_qparams(params: Any, rules: Rules, method: str = "minmax", *, bits: Any = None) -> dict[str, QParams]:
    """Fits qparams to every parameter that the rules choose, to be trained beside the parameters, or kept.

    Args:
      params: any pytree, real values.
      rules: as in `match_rules`, static.
      method: static, as in `fit_qparams`: "minmax", "percentile", "mse" or "lsq".
      bits: integer, traced or not: the grid a schedule starts with.

    Returns:
      A dict from path to QParams, which know their spec: a pytree to differentiate with respect to, update and
      checkpoint. With `bits`, which may be traced, they do not know it.

    Gradient: none, as `fit_qparams`.

    Raises:
      TypeError, ValueError: as `match_rules`, and as `fit_qparams` with the path.

    Source: as `fit_qparams`.

    >>> import jax.numpy as jnp
    >>> from jaxquant import init_qparams, weight_spec
    >>> init_qparams({"w": jnp.array([[1.27, -25.4]])}, [("w", weight_spec(8, channel_axis=-1))])["w"].scale
    Array([[0.01, 0.2 ]], dtype=float32)
    """
    leaves, _ = _leaves(params, rules)
    fitted = {}
    for leaf in leaves:
        if leaf.spec:
            with leaf.named_in_errors():
                found = fit_qparams(leaf.value, leaf.spec, method, bits=bits)
            fitted[leaf.path] = found if bits is not None else found._replace(spec=leaf.spec)
    return fitted


def quantize_params(params: Any, rules: Rules, qparams: Mapping[str, QParams] | None = None, *, key: Any = None) -> Any:
    """Quantizes the parameters that the rules choose to integers, after QAT or without it.

    Args:
      params: any pytree, real values.
      rules: as in `match_rules`, static; after a schedule of `bits` with specs of the last width.
      qparams: dict from path to QParams, as in `fake_quant_params`. None fits each to the parameter by min-max.
      key: PRNG key, for stochastic rounding alone.

    Returns:
      The same pytree with a QArray for each parameter that is quantized; a leaf without a spec is the same
      object.

    Gradient: none to parameters; integers have none.

    Raises:
      TypeError, ValueError: as `match_rules`, and as `quantize` with the path; for qparams whose paths differ from
        the parameters quantized.

    Source: ONNX QuantizeLinear, as `quantize`.

    >>> import jax.numpy as jnp
    >>> from jaxquant import quantize_params, weight_spec
    >>> quantize_params({"w": jnp.array([[1.27, -25.4]])}, [("w", weight_spec(8, channel_axis=0))])["w"].values
    Array([[   6, -127]], dtype=int8)
    """
    leaves, structure = _leaves(params, rules)
    of_path, keys = _qparams_of(leaves, qparams), _keys_of(leaves, key)
    one = lambda leaf, spec: quantize(leaf.value, spec, of_path[leaf.path], key=keys.get(leaf.path))
    return _rebuilt(one, leaves, structure)


def dequantize_params(params: Any) -> Any:
    """Real values again where a pytree has integers: bit for bit what `fake_quant_params` gives, but for NaN.

    Args:
      params: any pytree, such as `quantize_params` returns.

    Returns:
      The same pytree with an array for each QArray, of the dtype that was quantized; other leaves are the
      same objects.

    Gradient: as `dequantize`.

    Raises:
      ValueError: for a QArray whose arrays do not fit its spec, with the path.

    Source: ONNX DequantizeLinear, as `dequantize`.

    >>> import jax.numpy as jnp
    >>> from jaxquant import dequantize_params, fake_quant_params, quantize_params, weight_spec
    >>> params, rules = {"w": jnp.array([[1.27, -25.4]])}, [("w", weight_spec(8, channel_axis=0))]
    >>> bool((dequantize_params(quantize_params(params, rules))["w"] == fake_quant_params(params, rules)["w"]).all())
    True
    """
    new = []
    for path, value in with_paths(params):
        with named_in_errors(path):
            new.append(dequantize(value) if _is_qarray(value) else value)
    return jax.tree.unflatten(jax.tree.structure(params, is_leaf=_is_qarray), new)
