# SPDX-License-Identifier: Apache-2.0
"""A function with the dots and convolutions that the rules choose quantized."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.ad_checkpoint
import numpy as np
from jax import Array

from .. import _checks as checks
from .. import _numerics as num
from .._affine import fake_quant, quantize_straight_through
from .._integer._contract import checked_execution, contract
from .._integer._conv import Conv
from .._integer._dot import Dot
from .._jaxpr._evaluate import Replacements
from .._jaxpr._program import traced
from .._jaxpr._walk import DATA, POINT, Contraction, Origin, Walk, parameter
from .._tree import Rules, checked_rules, named_in_errors, with_paths
from ._decide import Decision, Decisions, decide
from ._plan import Plan, pattern_in_words


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """A leaf that is no array, known by its type and value, or of floats their text: 1 == True, 0.0 == -0.0."""

    kind: type
    known_by: Any
    value: Any = dataclasses.field(compare=False)

    @classmethod
    def of(cls, leaf: Any) -> "_Static":
        return cls(type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf, leaf)


def _is_traced(leaf: Any) -> bool:
    """Whether a leaf is an argument of the program: arrays. Numbers of Python stay what they are, as in f itself."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSU"
    return isinstance(leaf, Array | jax.ShapeDtypeStruct)


class _Call(NamedTuple):
    """What is static of the arguments of one call."""

    structure: Any
    leaves: tuple[_Static | None, ...]  # None where an array is
    params: tuple[int, int]  # which of the leaves are those of the params

    def arguments(self, arrays: Sequence[Any]) -> tuple[tuple, dict]:
        """`args` and `kwargs` again."""
        values = iter(arrays)
        return jax.tree.unflatten(self.structure, [next(values) if s is None else s.value for s in self.leaves])


class _Program(NamedTuple):
    """A function as a program, with what it is decided to do with it."""

    jaxpr: Any
    consts: Sequence[Any]
    decisions: Decisions
    structure: Any
    static: tuple[_Static | None, ...]  # of the results; None where an array is


class QuantizedFunction:
    """A quantized function, as `quantize_fn` returns it: call it as the function, with the same arguments.

    `q(params, *args, key=)` computes the function with the chosen dots and convolutions quantized; `key` is for
    stochastic rounding. It can be transformed by jit, grad, vmap, checkpoint, scan, shard_map and jax.export.
    `q.plan(params, *args)` is the table of its sites. The function itself is `q.__wrapped__`.
    """

    def __init__(self, f: Callable, rules: Rules, params_argnum: int, execution: str, strict: bool):
        functools.update_wrapper(self, f, ("__module__", "__name__", "__qualname__"), ())
        self._f, self._rules, self._argnum = f, checked_rules(rules), params_argnum
        self._execution, self._strict = execution, strict
        try:
            names = inspect.signature(f).parameters
        except (TypeError, ValueError):
            names = {}
        self._key_is_mine = "key" not in names
        # Jitted, because without it a call outside of jit would compile every loop in f again.
        self._jitted = jax.jit(self._evaluated, static_argnums=0)

    def __repr__(self):
        name = getattr(self._f, "__qualname__", None) or type(self._f).__name__
        patterns = ", ".join(repr(pattern_in_words(rule.pattern)) for rule in self._rules)
        return (
            f"<quantize_fn of {name} with rules for {patterns or 'nothing'}; params_argnum={self._argnum}, "
            f"execution={self._execution!r}, strict={self._strict}>"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = self._key(kwargs)
        call, arrays = self._call(args, kwargs)
        if any(isinstance(v, jax.ShapeDtypeStruct) for v in arrays):
            raise TypeError("An argument is a ShapeDtypeStruct, expected arrays. Shapes are for q.plan(...).")
        leaves, structure, _ = self._jitted(call, arrays, key)
        return jax.tree.unflatten(
            structure.value, [leaf.value if isinstance(leaf, _Static) else leaf for leaf in leaves]
        )

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The sites of the function for these arguments; raises what a call would raise.

        Args:
          *args, **kwargs: those of the function; `jax.ShapeDtypeStruct`s suffice for arrays.

        Returns:
          Plan, to be printed; iterate over its `Site`s, or take one by its name.
        """
        key = self._key(kwargs)
        if key is None and self._rounds_stochastically():
            key = jax.eval_shape(lambda: jax.random.key(0))  # a plan needs none
        _, _, plan = self._jitted.eval_shape(*self._call(args, kwargs), key)  # traced once for this and the call
        return plan.value

    def _rounds_stochastically(self) -> bool:
        specs = (spec for rule in self._rules for spec in (rule.weight, rule.activation))
        return any(spec is not None and spec.rounding == "stochastic" for spec in specs)

    def _key(self, kwargs: dict[str, Any]) -> Any:
        key = kwargs.pop("key", None) if self._key_is_mine else None
        if key is None:
            return None
        if not self._rounds_stochastically():
            raise ValueError(
                "`key` is for stochastic rounding alone, got one, and no rule rounds so. Drop it, or give a spec "
                "rounding='stochastic'."
            )
        return checks.prng_key("key", key)

    def _call(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[_Call, list[Any]]:
        if len(args) <= self._argnum:
            raise TypeError(
                f"`params_argnum={self._argnum}` must be one of the positional arguments, got {len(args)} of them. "
                "Pass the params by position."
            )
        leaves, structure = jax.tree.flatten((args, dict(kwargs)))
        start = len(jax.tree.leaves(args[: self._argnum]))
        params = start, start + len(jax.tree.leaves(args[self._argnum]))
        static = tuple(None if _is_traced(leaf) else _Static.of(leaf) for leaf in leaves)
        try:
            hash(static)
        except TypeError:
            others = [leaf for leaf in leaves if not _is_traced(leaf)]
            kinds = sorted({type(leaf).__name__ for leaf in others})
            boxed = any(_is_traced(getattr(leaf, "value", None)) for leaf in others)
            fix = "Pass the value of each variable: {v.path: v.value for v in model.variables}. " if boxed else ""
            raise TypeError(
                f"An argument must have leaves that are arrays or have a hash, got leaves of types {kinds}. {fix}"
                "Register the one without a hash as a pytree, or close over it."
            ) from None
        arrays = [leaf for leaf, s in zip(leaves, static, strict=True) if s is None]
        return _Call(structure, static, params), arrays

    def _program(self, call: _Call, arrays: Sequence[Any]) -> _Program:
        results = []

        def flat(arrays):
            args, kwargs = call.arguments(arrays)
            before = _paths_of(arrays, args, kwargs)
            leaves, structure = jax.tree.flatten(self._f(*args, **kwargs))
            _refuse_lost_changes(before, _paths_of(leaves, args, kwargs))
            is_array = [_is_traced(leaf) for leaf in leaves]
            static = (None if a else _Static.of(v) for v, a in zip(leaves, is_array, strict=True))
            results[:] = structure, tuple(static)
            return [leaf for leaf, a in zip(leaves, is_array, strict=True) if a]

        jaxpr, consts = traced(flat, list(arrays))
        params, origins = self._origins(call, jaxpr.invars)
        walk = Walk()
        walk.program(jaxpr, origins)
        name = f"params_argnum={self._argnum}"
        decisions = decide(walk.found(), self._rules, params, name, self._strict)
        return _Program(jaxpr, consts, decisions, *results)

    def _origins(self, call: _Call, variables: Sequence[Any]) -> tuple[dict[str, Any], list[Origin]]:
        """The parameters by their paths, and the origin of each argument of the program."""
        params, origins = {}, []
        values = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
        args, _ = call.arguments(values)
        named = with_paths(args[self._argnum], is_leaf=lambda node: False)
        paths = dict(zip(range(*call.params), (path for path, _ in named), strict=True))
        for i, value in zip([i for i, s in enumerate(call.leaves) if s is None], values, strict=True):
            if i not in paths:
                origins.append(DATA)
                continue
            if paths[i] in params:
                raise ValueError(f"Two parameters have the path {paths[i]!r}. Rename one of the keys that make it.")
            params[paths[i]] = value
            origins.append(parameter(paths[i], value.ndim))
        return params, origins

    def _evaluated(self, call: _Call, arrays: Sequence[Any], key: Any) -> tuple[list[Any], _Static, _Static]:
        """The results, without what is static of them; their structure; and the plan."""
        program = self._program(call, arrays)
        rounds = any(site.spec is not None and site.spec.rounding == "stochastic" for site in program.decisions.plan)
        if rounds and not self._key_is_mine:
            raise ValueError(
                "`key` is an argument of the function itself, and rules round stochastically, which needs a key of "
                "its own. Rename the argument: quantize_fn(lambda params, x, f_key: f(params, x, key=f_key), rules)."
            )
        replaced = {}
        for i, (location, decision) in enumerate(program.decisions.of.items()):
            replaced[location] = functools.partial(_quantized, decision, self._execution, key, i)
        replacements = Replacements(replaced, program.decisions.custom)
        results = iter(replacements.program(program.jaxpr, program.consts, arrays))
        leaves = [next(results) if s is None else s for s in program.static]
        plan = program.decisions.plan
        return leaves, _Static.of(program.structure), _Static(Plan, id(plan), plan)


def _paths_of(known: Sequence[Any], args: tuple, kwargs: Mapping[str, Any]) -> dict[str, tuple[Any, bool]]:
    """Each array in the arguments by where it is, and whether it is one of those that are known."""
    known_ids, found = {id(value) for value in known}, {}
    for name, argument in (*enumerate(args), *kwargs.items()):
        with contextlib.suppress(ValueError):  # a State of equinox is not read again after its update: a new one is
            leaves = [(path, leaf) for path, leaf in with_paths(argument) if _is_traced(leaf)]
            found |= {f"{path!r} of argument {name!r}": (leaf, id(leaf) in known_ids) for path, leaf in leaves}
    return found


def _refuse_lost_changes(before: Mapping[str, tuple[Any, bool]], after: Mapping[str, tuple[Any, bool]]) -> None:
    """What the function has changed of its arguments, as modules of nnx do, is lost unless it is returned."""
    # A pytree that makes its leaves anew whenever it is flattened has not changed.
    kept = {id(leaf) for leaf, is_argument in before.values() if is_argument}
    made = {path for path, (_, is_argument) in before.items() if not is_argument}
    changed = [
        path for path, (leaf, is_returned) in after.items()
        if not is_returned and id(leaf) not in kept and path not in made
    ]  # fmt: skip
    if changed:
        raise ValueError(
            f"The function changes its arguments while it is traced, at {', '.join(changed[:3])}"
            f"{' and others' if len(changed) > 3 else ''}, and the changes would be lost: running statistics and "
            "dropout keys would never move. Return them; or, what is not meant to last, change in a copy. With nnx: "
            "graphdef, params, state = nnx.split(model, nnx.Param, ...), and in the function model = nnx.merge("
            "graphdef, params, state, copy=True); return model(x), nnx.state(model, nnx.Not(nnx.Param)). The page "
            "docs/state.md has the whole recipe."
        )


@functools.partial(jax.jit, static_argnames="op")
def _contracted(op: Any, x: Array, w: Array, a: Any, b: Any, marks: tuple[Array, Array]) -> Array:
    return contract(op, x, w, a, b, marks)


@functools.partial(jax.jit, static_argnames="spec")  # traced, and differentiated, once for each shape
def _fake_quantized(x: Array, spec: Any, key: Any) -> Array:
    return fake_quant(x, spec, key=key)


def _quantized(
    decision: Decision, execution: str, key: Any, i: int, eqn: Any, lhs: Array, rhs: Array, shared: dict
) -> Array:
    """The result of a contraction of the program, with what was decided about its operands."""
    values, specs = [lhs, rhs], decision.specs
    keys: list[Any] = [None, None]
    for side, spec in enumerate(specs):
        if spec is not None and spec.rounding == "stochastic" and key is not None:
            keys[side] = jax.random.fold_in(key, 2 * i + side)
    operands = []
    for side, spec in enumerate(specs):
        with named_in_errors(decision.names[side], rule=decision.rules[side]):
            if None not in specs:
                operands.append(_operand(values[side], spec, decision.contracted[side], keys[side], shared))
            elif spec is not None:
                values[side] = _fake_quantized(values[side], spec, keys[side])
    if not operands:
        return eqn.primitive.bind(*values, **eqn.params)
    if eqn.params.get("out_sharding") is not None:  # contracted axes may be sharded then; gathered as integers
        whole = lambda axes: lambda v: num.replicated(v, axes) if v.ndim else v
        operands = [jax.tree.map(whole(axes), pair) for pair, axes in zip(operands, decision.contracted, strict=True)]
    (x, a, x_marks), (w, b, w_marks) = operands
    with named_in_errors(*decision.names):
        y = _contracted(_op_of(decision.contraction, execution), x, w, a, b, (x_marks, w_marks))
    return _like(y.astype(eqn.outvars[0].aval.dtype), eqn.outvars[0].aval)


def _operand(value: Array, spec: Any, contracted: tuple[int, ...], key: Any, shared: dict) -> Any:
    """An operand in integers; once for all the ops of a program that use it so."""
    at = id(value), spec, contracted
    if key is None and at in shared:
        return shared[at][1]
    result = quantize_straight_through(value, spec, contracted, key)
    shared[at] = value, result  # the value too: no other then gets its id
    return result


def _like(y: Array, out: Any) -> Array:
    """`y` with the sharding that the program says, on a mesh with explicit axes."""
    wanted = out.sharding
    return y if wanted.mesh.empty or jax.typeof(y).sharding == wanted else jax.sharding.reshard(y, wanted)


def _op_of(contraction: Contraction, execution: str) -> Dot | Conv:
    params = contraction.params
    if contraction.op == "dot_general":
        (ca, cb), (ba, bb) = params["dimension_numbers"]
        return Dot((tuple(ca), tuple(cb)), (tuple(ba), tuple(bb)), execution)
    return Conv(
        tuple(params["window_strides"]), tuple((low, high) for low, high in params["padding"]),
        tuple(params["lhs_dilation"]), tuple(params["rhs_dilation"]), params["dimension_numbers"],
        params["feature_group_count"], params["batch_group_count"], execution,
    )  # fmt: skip


def quantize_fn(
    f: Callable, rules: Rules, *, params_argnum: int = 0, execution: str = "auto", strict: bool = False
) -> QuantizedFunction:
    """Quantizes the dots and convolutions of any function that JAX can trace, without a change to it.

    The function is traced, the parameters are followed to the dots and convolutions that use them, and the program is
    evaluated with those quantized that the rules choose. Where both operands are quantized, the value is the exact
    contraction in integers, scaled once, as in `dot_general`; where one is, it is `fake_quant` of it in the op as
    it was. Ranges are those of the values at hand, by min-max.

    Args:
      f: pure function of arrays and anything else, as for `jax.jit`: it is traced once for each kind of arguments. A
        model of flax, nnx, equinox or haiku is applied in it as always.
      rules: static, as in `match_rules`, or with all that `Rule` says; the first that matches an op decides about it. A
        pair (pattern, spec) quantizes the weight alone; Rule(pattern, weight=, activation=) both operands. A spec whose
        axis is None is complete: for a weight it means the output channels of the op; for an activation all axes but
        the contracted, so PerChannel(None) is per token. Axes of a parameter are counted on the parameter.
      params_argnum: static int, the positional argument of f that holds the parameters.
      execution: static, as in `dot_general`; cannot change a bit.
      strict: static bool. True makes sites that no rule matches an error.

    Returns:
      A function with the arguments of f and `key=`, a PRNG key for stochastic rounding alone (where f has an argument
      `key` of its own, it is that). It can be transformed as f can, by jit, grad, vmap, checkpoint, scan, shard_map
      and jax.export. `.plan(*args)` is the table of its sites.

    Gradient: to each operand straight through its quantizer, then that of the op at the quantized values; none through
    ranges. Reverse mode alone: `jax.jvp` raises.

    Raises:
      TypeError: for rules of another kind.
      ValueError: when it is called, or its plan made, for a rule that matches no site, unless it is optional; for a
        spec that does not fit the operand; for a site inside a function with a derivative of its own, if no rule says
        what becomes of that; for a parameter that a rule chooses and that goes where nothing can be replaced
        (pallas_call, ragged_dot, FFI), or into a backward pass that f itself contains.

    Source: Jacob et al., 2018, for the integer contraction; the gradient as `fake_quant`.

    >>> import jax.numpy as jnp
    >>> from jaxquant import Rule, activation_spec, quantize_fn, weight_spec
    >>> f = lambda params, x: jnp.tanh(x @ params["w1"]) @ params["w2"]
    >>> params, x = {"w1": jnp.ones((4, 8)), "w2": jnp.ones((8, 2))}, jnp.ones((3, 4))
    >>> q = quantize_fn(f, [Rule("**", weight_spec(8), activation_spec(8))])
    >>> q(params, x).shape
    (3, 2)
    >>> [site.name for site in q.plan(params, x)]
    ['w1:input', 'w1', 'w2:input', 'w2']
    """
    if not callable(f):
        raise TypeError(f"`f` must be a function, got {checks.kind(f)}. Pass one such as lambda params, x: ....")
    params_argnum = checks.static_int_between("params_argnum", params_argnum, 0, 255)
    execution = checked_execution(execution)
    return QuantizedFunction(f, rules, params_argnum, execution, checks.static_bool("strict", strict))


def quant_point(x: Any, name: str) -> Array:
    """`x` itself, with a name for the site where it becomes an operand: one that has no parameter.

    The name stays with it through reshapes, transposes, slices and casts, and a Rule of kind "act_act" is matched with
    it. Outside of `quantize_fn` it does nothing.

    Args:
      x: array of any shape and dtype.
      name: static str, not empty.

    Returns:
      `x`.

    Gradient: that of the identity.

    Raises:
      TypeError: for anything but an array, or a name that is no str.

    Source: `jax.ad_checkpoint.checkpoint_name`, which it is: a checkpoint policy sees the name "jaxquant:name".

    >>> import jax.numpy as jnp
    >>> from jaxquant import Rule, activation_spec, quant_point, quantize_fn
    >>> scores = lambda params, q, k: quant_point(q, "q") @ quant_point(k, "k").T
    >>> q = quantize_fn(scores, [Rule("q", activation=activation_spec(8), kind="act_act")])
    >>> [site.name for site in q.plan({}, jnp.ones((3, 4)), jnp.ones((5, 4))) if site.spec]
    ['q']
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"`name` must be a str that is not empty, got {name!r}. Pass one such as 'attention/scores'.")
    x = checks.unwrapped(x)
    if not checks.is_array(x):
        raise TypeError(f"`x` must be an array, got {checks.kind(x)}. Convert it by jnp.asarray(...).")
    return jax.ad_checkpoint.checkpoint_name(x, f"{POINT}:{name}")
