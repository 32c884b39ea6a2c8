# SPDX-License-Identifier: Apache-2.0
"""Params pytrees whole: which leaf gets which spec, and what is made of the leaves that have one."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ._arrays._affine import checked_qparams, dequantize, fake_quant, quantize, scale_gradient
from ._arrays._fit import fit_qparams
from ._arrays._grid import limits_of
from ._arrays._qarray import QArray
from ._arrays._qparams import QParams
from ._arrays._range import observe
from ._base import _checks as checks
from ._base import _numerics as num
from ._base._checks import PyTree
from ._paths import is_qarray, named_in_errors, with_leaves, with_paths
from ._spec._rule import Rule, Rules, checked_rules, first_rule, pattern_in_words, shadowed
from ._spec._scale_formats import TINY
from ._spec._spec import QuantSpec, qparams_shape


class _Leaf(NamedTuple):
    path: str
    value: Any
    rule: Rule | None

    @property
    def spec(self) -> QuantSpec | None:
        return self.rule and self.rule.weight


def _leaves(params: PyTree, rules: object) -> list[_Leaf]:
    """The leaves of a pytree, each with its rule; every error of a choice is raised here."""
    rules = checked_rules(rules)
    for i, rule in enumerate(rules):
        if said := rule.of_quantize_fn():
            raise ValueError(
                f"`rules[{i}]`, {rule.pattern!r}, has {said}, which a function that sees the parameters alone cannot "
                "know. Drop it, or use quantize_fn(f, rules)."
            )
    found = list(with_paths(params))
    leaves = [_Leaf(*pair, first_rule(rules, *pair)) for pair in found]
    for i, rule in enumerate(rules):
        is_again = any(rule is earlier for earlier in rules[:i])
        if not rule.optional and (is_again or not any(leaf.rule is rule for leaf in leaves)):
            taken = next((leaf for leaf in leaves if leaf.rule and rule.matches(leaf.path, leaf.value)), None)
            raise ValueError(_unused(i, rule, taken, [path for path, _ in found]))
    paths = set()
    for leaf in leaves:
        if leaf.spec:
            with named_in_errors(leaf.path, rule=leaf.rule):
                _check_choice(leaf, leaf.spec, paths)
            paths.add(leaf.path)
    return leaves


def _unused(i: int, rule: Rule, taken: _Leaf | None, paths: list[str]) -> str:
    """The error for rule number i, which no leaf has; `taken` is one that it matches."""
    if taken and taken.rule:
        return shadowed(i, rule, taken.path, taken.rule)
    return (
        f"`rules[{i}]`, {rule.pattern!r}, matches no parameter, of {len(paths)}. The nearest paths: "
        f"{checks.nearest(pattern_in_words(rule.pattern), paths)}. Fix the pattern ('**/' also matches zero segments), "
        "or pass Rule(..., optional=True)."
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


def _rebuilt(f: Callable[[_Leaf, QuantSpec], Any], params: PyTree, leaves: list[_Leaf]) -> PyTree:
    """The pytree with `f(leaf, spec)` where a rule gives a spec; every other leaf is the same object."""
    new = []
    for leaf in leaves:
        with named_in_errors(leaf.path, rule=leaf.rule):
            new.append(f(leaf, leaf.spec) if leaf.spec else leaf.value)
    return with_leaves(params, new)


def _qparams_of(leaves: list[_Leaf], qparams: Mapping[str, QParams] | None) -> Mapping[str, QParams | None]:
    """The qparams of each quantized leaf, all of them or none."""
    paths = [leaf.path for leaf in leaves if leaf.spec]
    if qparams is None:
        return dict.fromkeys(paths)
    is_dict = isinstance(qparams, Mapping)
    given = {path: v for path, v in qparams.items() if v is not None} if is_dict else qparams
    checks.same_keys("qparams", given, paths, "Make it by init_qparams(params, rules), with these rules.")
    return qparams


def _keys_of(leaves: list[_Leaf], key: Array | None) -> dict[str, Any]:
    """A key of its own for each leaf that rounds stochastically."""
    paths = [leaf.path for leaf in leaves if leaf.spec and leaf.spec.rounding == "stochastic"]
    key = checks.rounding_key(key, bool(paths), "no rule that rounds so")
    return {} if key is None else {path: jax.random.fold_in(key, i) for i, path in enumerate(paths)}


def match_rules(params: PyTree, rules: Rules) -> PyTree:
    """The plan of a params pytree, to be printed: the spec of each parameter.

    Paths are the keys from the root joined by "/": "encoder/0/kernel". The attribute `value` that unpacks a parameter
    of nnx, or a partitioned one of linen, is left out. The first rule that matches decides; parameters that no rule
    matches stay in float.

    Args:
      params: any pytree of arrays; shapes and dtypes suffice (`jax.eval_shape`).
      rules: static, list or tuple of pairs (pattern, spec) or Rules; a tuple is hashable. A pair is short for
        Rule(pattern, spec).

    Returns:
      The pytree of params with a QuantSpec for each leaf that is quantized and None for each other leaf.

    Gradient: none; the plan is static.

    Raises:
      TypeError: for rules of another kind.
      ValueError: for a rule that matches nothing, or nothing that earlier rules left, unless it is optional; and for a
        chosen parameter that is not a floating array, that the spec's axis or blocks do not fit, or whose path another
        parameter has too.

    Source: path rules as in the partition rules of large JAX models.

    >>> import jax.numpy as jnp
    >>> from jaxquant import match_rules, weight_spec
    >>> params = {"head": {"kernel": jnp.ones((3, 2))}, "body": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}}
    >>> plan = match_rules(params, [("head/**", None), ("**/kernel", weight_spec(4, channel_axis=-1))])
    >>> plan["body"]
    {'bias': None, 'kernel': QuantSpec(bits=4, granularity=PerChannel(-1))}
    """
    return with_leaves(params, [leaf.spec for leaf in _leaves(params, rules)])


def checked_lsq_gradient(lsq_gradient: object, qparams: Mapping[str, QParams] | None, made_by: str) -> bool:
    """`lsq_gradient` as a bool; without qparams it would have no effect."""
    if checks.static_bool("lsq_gradient", lsq_gradient) and qparams is None:
        raise ValueError(f"`lsq_gradient` is for qparams that are trained, got qparams=None. Pass {made_by}.")
    return bool(lsq_gradient)


def with_lsq_gradient(qparams: QParams, size: int, spec: QuantSpec, bits: ArrayLike | None) -> QParams:
    """The qparams of a tensor of a size, with their gradient multiplied as LSQ does."""
    sharing = size // max(math.prod(qparams.scale.shape), 1)
    # Guarded, because XLA makes of 1 / sqrt an rsqrt, which differs in the last bit.
    factor = 1 / num.guard(jnp.sqrt(max(sharing, 1) * limits_of(spec, bits)[1]))
    return QParams(scale_gradient(qparams.scale, factor), scale_gradient(qparams.zero_point, factor))


def fake_quant_params(
    params: PyTree,
    rules: Rules,
    qparams: Mapping[str, QParams] | None = None,
    *,
    key: Array | None = None,
    bits: ArrayLike | None = None,
    lsq_gradient: bool = False,
) -> PyTree:
    """Fake-quantizes the parameters that the rules choose: called inside the loss, it is the whole change for QAT.

    Args:
      params: any pytree, real values: dicts, tuples, dataclasses, flax variables, nnx states, equinox modules, haiku
        params. Leaves without a rule may be anything.
      rules: as in `match_rules`, static.
      qparams: dict from path to QParams for every parameter that is quantized, traced or not, from `init_qparams`. None
        fits each to the parameter by min-max.
      key: PRNG key, only for stochastic rounding; each parameter that rounds so gets its own key.
      bits: integer, traced or not, at most the bits of every spec: a schedule of widths without a recompile.
      lsq_gradient: static bool. True multiplies the gradient of each scale and zero point, which n values share, by 1 /
        sqrt(n * qmax), so that under SGD qparams learn at the rate of the parameters; Adam divides the factor out
        again.

    Returns:
      The same pytree; a leaf without a spec is the same object.

    Gradient: as `fake_quant`: straight through for the parameters, the LSQ form for the qparams. None for qparams that
    are fitted here.

    Raises:
      TypeError, ValueError: as `match_rules`, and as `fake_quant` with the path; for qparams whose paths differ from
        the quantized parameters, a rule with an activation, and lsq_gradient without qparams.

    Source: Jacob et al., 2018; learned qparams: Esser et al., 2020, "Learned Step Size Quantization".

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import fake_quant_params, weight_spec
    >>> rules = [("**/kernel", weight_spec(4, channel_axis=-1))]
    >>> loss = lambda params: fake_quant_params(params, rules)["kernel"].sum()
    >>> jax.grad(loss)({"kernel": jnp.array([[0.5], [7.1]])})["kernel"].tolist()
    [[1.0], [1.0]]
    """
    leaves = _leaves(params, rules)
    for leaf in leaves:
        if leaf.rule and leaf.rule.activation:
            raise ValueError(
                f"`rules` of fake_quant_params must have no activation, got {leaf.rule.pattern!r} with "
                f"{leaf.rule.activation}, which would stay in float. Quantize activations where they are made, by "
                "fake_quant(x, spec, qparams)."
            )
    lsq_gradient = checked_lsq_gradient(lsq_gradient, qparams, "init_qparams(params, rules)")
    of_path, keys = _qparams_of(leaves, qparams), _keys_of(leaves, key)

    def one(leaf: _Leaf, spec: QuantSpec) -> Any:
        used = of_path[leaf.path]
        if lsq_gradient:
            used = with_lsq_gradient(checked_qparams(leaf.value, spec, used, bits), leaf.value.size, spec, bits)
        return fake_quant(leaf.value, spec, used, key=keys.get(leaf.path), bits=bits)

    return _rebuilt(one, params, leaves)


def init_qparams(
    params: PyTree, rules: Rules, method: str = "minmax", *, bits: ArrayLike | None = None
) -> dict[str, QParams]:
    """Fits qparams to every parameter that the rules choose, to be trained beside the parameters, or kept.

    Args:
      params: any pytree, real values.
      rules: as in `match_rules`, static.
      method: static, as in `fit_qparams`: "minmax", "percentile", "mse", "lsq" or "absmean".
      bits: integer, traced or not: the grid a schedule starts with.

    Returns:
      A dict from path to QParams: a pytree to differentiate with respect to, update and checkpoint. The QParams know
        their spec, except with `bits`, which may be traced.

    Gradient: none, as `fit_qparams`.

    Raises:
      TypeError, ValueError: as `match_rules`, and as `fit_qparams` with the path.

    Source: as `fit_qparams`.

    >>> import jax.numpy as jnp
    >>> from jaxquant import init_qparams, weight_spec
    >>> init_qparams({"w": jnp.array([[1.27, -25.4]])}, [("w", weight_spec(8, channel_axis=-1))])["w"].scale
    Array([[0.01, 0.2 ]], dtype=float32)
    """
    fitted = {}
    for leaf in _leaves(params, rules):
        if leaf.spec:
            with named_in_errors(leaf.path, rule=leaf.rule):
                if not leaf.spec.signed and leaf.spec.symmetric:
                    refuse_unsigned_below_zero(*observe(leaf.value, leaf.spec), leaf.spec)
                found = fit_qparams(leaf.value, leaf.spec, method, bits=bits)
            fitted[leaf.path] = found if bits is not None else found._replace(spec=leaf.spec)
    return fitted


def quantize_params(
    params: PyTree, rules: Rules, qparams: Mapping[str, QParams] | None = None, *, key: Array | None = None
) -> PyTree:
    """Quantizes the parameters that the rules choose to integers, after QAT or without it.

    Args:
      params: any pytree, real values.
      rules: as in `match_rules`, static; after a schedule of `bits`, with specs of its last width.
      qparams: dict from path to QParams, as in `fake_quant_params`. None fits each to the parameter by min-max.
      key: PRNG key, for stochastic rounding alone.

    Returns:
      The same pytree with a QArray for each parameter that is quantized; a leaf without a spec is the same
      object.

    Gradient: none for parameters; integers have none.

    Raises:
      TypeError, ValueError: as `match_rules`, and as `quantize` with the path; for qparams whose paths differ from the
        quantized parameters. Outside of jit, where values are known, also for a parameter that is not finite, and for a
        scale that training has made 0, negative or NaN, as `q.freeze`.

    Source: ONNX QuantizeLinear, as `quantize`.

    >>> import jax.numpy as jnp
    >>> from jaxquant import quantize_params, weight_spec
    >>> quantize_params({"w": jnp.array([[1.27, -25.4]])}, [("w", weight_spec(8, channel_axis=0))])["w"].values
    Array([[   6, -127]], dtype=int8)
    """
    leaves = _leaves(params, rules)
    of_path, keys = _qparams_of(leaves, qparams), _keys_of(leaves, key)

    def one(leaf: _Leaf, spec: QuantSpec) -> QArray:
        refuse_not_finite(leaf.value)
        return quantize(leaf.value, spec, of_path[leaf.path], key=keys.get(leaf.path))

    new = _rebuilt(one, params, leaves)
    refuse_lost_scales(of_path)
    return new


def dequantize_params(params: PyTree) -> PyTree:
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
            new.append(dequantize(value) if is_qarray(value) else value)
    return with_leaves(params, new)


# What integers cannot hold


def refuse_not_finite(leaf: Array, total: Array | None = None) -> None:
    """Raises for a parameter with NaN or infinities; `total` is its sum, if that is already computed."""
    total = jnp.sum(leaf) if total is None else total  # traced under jit, though the leaf be known
    if isinstance(total, jax.core.Tracer) or np.isfinite(np.asarray(total, np.float64)):
        return
    for what, found in (("NaN", jnp.isnan(leaf)), ("infinite numbers", jnp.isinf(leaf))):
        if count := int(found.sum()):
            raise ValueError(
                f"the parameter has {count} {what}, which integers cannot hold: outputs that are NaN now would be "
                "numbers when it is served. Fix what made them."
            )


def refuse_lost_scales(qparams: Mapping[str, Any]) -> None:
    """Raises for scales that an optimizer has moved to where no scale is."""
    for name, of in qparams.items():
        if not isinstance(of, QParams) or isinstance(of.scale, jax.core.Tracer):
            continue
        scale = np.asarray(of.scale)
        if of.spec and of.spec.scale_rule == "extremum":
            scale = np.abs(scale)
        lost = ~((scale >= TINY) & (scale < np.inf))
        if lost.any():
            raise ValueError(
                f"At {name!r}: {int(lost.sum())} of {scale.size} scales are 0, negative or not finite, got "
                f"{scale[lost].flat[0]} as the first: what they scale is served as zeros or NaN. Train their "
                "logarithms, to_log2(qparams), in which any step keeps a scale positive; or train qparams at a smaller "
                "learning rate."
            )


def refuse_unsigned_below_zero(x_min: ArrayLike, x_max: ArrayLike, spec: QuantSpec) -> None:
    """Raises for a range without positive values, of which a symmetric unsigned spec makes zeros."""
    if spec.signed or not spec.symmetric or any(isinstance(v, jax.core.Tracer) for v in (x_min, x_max)):
        return
    low, high = np.broadcast_arrays(np.asarray(x_min), np.asarray(x_max))
    below = (low < 0) & (high <= 0)
    if below.any():
        raise ValueError(
            f"{int(below.sum())} of {below.size} ranges lie below 0, such as [{low[below].flat[0]}, "
            f"{high[below].flat[0]}], and {spec} has no value there but 0. Make it signed, or symmetric=False."
        )
