# SPDX-License-Identifier: Apache-2.0
"""JAX programs as data: what each value is made of, and evaluation with other contractions in the places of some.

The only file that knows how jax spells a program. What is left as it was is bound again by `jax.core.eval_jaxpr`, one
equation at a time, so that jit, grad, vmap, scan, shard_map of the result are JAX's own affair; only an equation that
holds a program with something to replace is built anew, by the public function that made it.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ._groups import segments

Location = tuple[int, ...]  # the place of an equation in a program; then which program inside it, the place there, ...
CONTRACTIONS = ("dot_general", "conv_general_dilated")
_HIGH = "call_hi_primitive"  # a primitive of jax.experimental.hijax
# Contractions, or kernels that may hold one, which cannot be replaced from outside.
_CLOSED = ("pallas_call", "ffi_call", "ragged_dot", "ragged_dot_general", "scaled_matmul_wrapper", "scaled_dot")


class Origin(NamedTuple):
    """What a value was made of.

    Attributes:
      params: the paths of the parameters that it depends on.
      data: whether it depends on another argument, too.
      captured: whether it depends on an array that the function closes over.
      parts: the paths of the parameters whose values it holds, perhaps some of them in another order; several where
        parameters were concatenated, none if it was computed from them.
      axes: for each axis of the value, the axes of these parameters that it runs along, and JOINED where they stand
        side by side.
      picked: whether data say which part of the parameter it is.
      computed: the parameters of at least two axes that it was computed from, with no contraction between.
      gathered: the parameters whose values it holds in an order that data say.
      name: what `quant_point` called it.
    """

    params: frozenset[str] = frozenset()
    data: bool = False
    captured: bool = False
    parts: tuple[str, ...] = ()
    axes: tuple[frozenset[int], ...] = ()
    picked: bool = False
    computed: frozenset[str] = frozenset()
    gathered: tuple[str, ...] = ()
    name: str | None = None

    @property
    def path(self) -> str | None:
        """That of the parameter it holds, of several joined by "+"; None if it holds none."""
        return "+".join(self.parts) if self.parts else None

    @property
    def role(self) -> str:
        """Of an operand: "weight", "data", "derived" from parameters alone, or "captured" from nothing of both."""
        if self.parts:
            return "weight"
        return "data" if self.data else "derived" if self.params else "captured"


JOINED = -1  # in the place of an axis of a parameter: that along which several were concatenated
DATA, CAPTURED, LITERAL = Origin(data=True), Origin(captured=True), Origin()


def parameter(path: str, ndim: int) -> Origin:
    """A parameter itself."""
    return Origin(frozenset([path]), parts=(path,), axes=tuple(frozenset([i]) for i in range(ndim)))


def computed(origins: Sequence[Origin]) -> Origin:
    """What is computed from several values."""
    # Of one axis are biases and the scales of norms, which are no operands.
    matrices = (o.parts for o in origins if sum(map(bool, o.axes)) >= 2)
    return Origin(
        frozenset().union(*(o.params for o in origins)),
        any(o.data for o in origins),
        any(o.captured for o in origins),
        computed=frozenset().union(*matrices, *(o.computed for o in origins)),
    )


def _joined(eqn: JaxprEqn, origins: Sequence[Origin]) -> Origin:
    """Parameters side by side, if they lie alike."""
    first = origins[0].axes
    if any(not o.parts or o.axes != first for o in origins):
        return computed(origins)
    axis, is_new = _param(eqn, "dimension", "axis"), eqn.primitive.name == "stack"
    along = frozenset() if is_new else first[axis]
    axes = (*first[:axis], along | {JOINED}, *first[axis + (not is_new) :])
    parts = dict.fromkeys(part for o in origins for part in o.parts)
    params, picked = frozenset().union(*(o.params for o in origins)), any(o.picked for o in origins)
    return Origin(params, parts=tuple(parts), axes=axes, picked=picked)


def _either(*origins: Origin) -> Origin:
    """What is one of several values."""
    return origins[0] if all(o == origins[0] for o in origins) else computed(origins)


class Operand(NamedTuple):
    """One of the two operands of a contraction."""

    shape: tuple[int, ...]
    dtype: Any
    origin: Origin


class Contraction(NamedTuple):
    """A dot or convolution of a program, or an equation that may hold one and is closed."""

    location: Location
    op: str
    scope: str
    operands: tuple[Operand, ...]
    params: Mapping[str, Any]
    custom: tuple[Location, ...]  # the custom_jvp and custom_vjp calls around it
    gradient: str  # "transpose(" or "jvp(" if the function itself differentiates, and this is in that pass; else ""

    @property
    def is_closed(self) -> bool:
        """Whether it cannot be replaced."""
        return self.op not in CONTRACTIONS


class _Place(NamedTuple):
    """Where a walk is."""

    location: Location = ()
    scope: str = ""
    custom: tuple[Location, ...] = ()

    def of(self, eqn: JaxprEqn, i: int) -> "_Place":
        """The place of an equation."""
        stack = str(eqn.source_info.name_stack)
        return self._replace(location=(*self.location, i), scope=f"{self.scope}/{stack}" if stack else self.scope)

    def inside(self, k: int) -> "_Place":
        """The place of a program in the equation here."""
        return self._replace(location=(*self.location, k))


_START = _Place()


def traced(f: Callable, args: Sequence[Any]) -> tuple[Jaxpr, Sequence[Any]]:
    """The program of a function of a list of arrays, and its constants."""
    return opened(jax.make_jaxpr(f)(args))


def opened(program: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A program and its constants; jax 0.11 made one type of the closed and the open one."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def programs(eqn: JaxprEqn) -> list[tuple[Jaxpr, Sequence[Any]]]:
    """Those in the parameters of an equation, found by value: `cond` keeps its under `branches`."""
    if eqn.primitive.name == _HIGH:
        return [opened(_expanded(eqn))]
    values = [v for value in eqn.params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    return [opened(v) for v in values if isinstance(getattr(v, "jaxpr", v), Jaxpr)]


def _high(eqn: JaxprEqn) -> Any:
    """The object that an equation of `jax.experimental.hijax` applies: its one parameter, under changing names."""
    (primitive,) = eqn.params.values()
    return primitive


def _expanded(eqn: JaxprEqn) -> Any:
    """The program that such an object stands for, by the method with which its author says so."""
    high = _high(eqn)
    expand = lambda *ins: jax.tree.leaves(high.expand(*jax.tree.unflatten(high.in_tree, ins)))
    return jax.make_jaxpr(expand)(*_avals(eqn.invars))


def _params(eqn: JaxprEqn) -> Mapping[str, Any]:
    return _high(eqn).params if eqn.primitive.name == _HIGH else eqn.params


def _kind(eqn: JaxprEqn) -> str:
    """The name of the primitive; of one of hijax what the public function that made it is called otherwise."""
    is_checkpoint = eqn.primitive.name == _HIGH and {"policy", "prevent_cse"} <= set(_params(eqn))
    return "checkpoint" if is_checkpoint else eqn.primitive.name


def _param(eqn: JaxprEqn, *names: str) -> Any:
    """A parameter of an equation, whose name may have changed between versions of jax."""
    params = _params(eqn)
    for name in names:
        if name in params:
            return params[name]
    raise NotImplementedError(
        f"jaxquant does not know the parameters of the primitive {eqn.primitive.name!r} in jax {jax.__version__}: got "
        f"{sorted(params)}, expected one of {names}. Use a version of jax that the README says was tested, and report "
        "this one."
    )


def _avals(variables: Sequence[Any]) -> list[Any]:
    return [v.aval for v in variables]


def _contracts(jaxpr: Jaxpr) -> bool:
    """Whether there is a dot or convolution anywhere in a program."""
    return any(
        eqn.primitive.name in (*CONTRACTIONS, *_CLOSED) or any(_contracts(inner) for inner, _ in programs(eqn))
        for eqn in jaxpr.eqns
    )


def _clean(scope: str) -> str:
    """A name stack without what transforms and einsum add to it."""
    while (inner := re.sub(r"\b(?:jvp|transpose|vmap)\(([^()]*)\)", r"\1", scope)) != scope:
        scope = inner
    return "/".join(s for s in scope.split("/") if s and not re.search(r"->|\(|^(checkpoint|rematted_computation)$", s))


class Walk:
    """Follows the origin of every value through a program, and notes each contraction on the way."""

    def __init__(self):
        self.contractions: dict[Location, Contraction] = {}

    def found(self) -> list[Contraction]:
        """The contractions, of which those of a forward pass count as of a gradient where that is all there is.

        The name stack does not tell the tangents of `jax.jvp` from the values beside them.
        """
        backward = any(c.gradient == "transpose(" for c in self.contractions.values())
        forward = lambda c: c._replace(gradient="") if c.gradient == "jvp(" and backward else c
        return [forward(c) for c in self.contractions.values()]

    def program(self, jaxpr: Jaxpr, ins: Sequence[Origin], place: _Place = _START) -> list[Origin]:
        """The origins of the results of a program, given those of its arguments."""
        env = dict.fromkeys(jaxpr.constvars, CAPTURED) | dict(zip(jaxpr.invars, ins, strict=True))
        read = lambda v: LITERAL if isinstance(v, Literal) else env[v]
        for i, eqn in enumerate(jaxpr.eqns):
            env.update(
                zip(eqn.outvars, self._equation(eqn, [read(v) for v in eqn.invars], place.of(eqn, i)), strict=True)
            )
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
        name = _kind(eqn)
        if name in _HIGHER_ORDER:
            return _HIGHER_ORDER[name].walk(self, eqn, ins, place)
        if name in CONTRACTIONS or name in _CLOSED or any(_contracts(inner) for inner, _ in programs(eqn)):
            self._note(eqn, ins, place)
        if name in _REARRANGING and ins[0].parts:
            return [ins[0]._replace(axes=_REARRANGING[name](eqn, ins[0].axes))] * len(eqn.outvars)
        if name in _NAMING:
            return [_named(eqn, ins[0])]
        if name == "dynamic_slice":
            return [ins[0]._replace(picked=ins[0].picked or any(index.data for index in ins[1:]))]
        if name in _REARRANGING or name in _PASSING:
            return ins if name in _PASSING_ALL else [ins[0]] * len(eqn.outvars)
        if name in _JOINING:
            return [_joined(eqn, ins)]
        mixed = computed(ins)
        if name == "gather" and ins[1].data:
            mixed = mixed._replace(gathered=ins[0].parts)
        if name in CONTRACTIONS:
            # What meets a parameter in a contraction is data, also where the function closes over it.
            is_data = mixed.data or (bool(mixed.params) and any(o.role == "captured" for o in ins))
            mixed = mixed._replace(data=is_data, computed=frozenset())
        return [mixed] * len(eqn.outvars)

    def _note(self, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> None:
        operands = tuple(
            Operand(aval.shape, aval.dtype, origin) for aval, origin in zip(_avals(eqn.invars), ins, strict=True)
        )
        self.contractions[place.location] = Contraction(
            place.location,
            eqn.primitive.name,
            _clean(place.scope),
            operands,
            eqn.params,
            place.custom,
            next((pass_ for pass_ in ("transpose(", "jvp(") if pass_ in place.scope), ""),
        )


def _named(eqn: JaxprEqn, origin: Origin) -> Origin:
    prefix, _, name = str(_params(eqn).get("name", "")).partition(":")
    return origin._replace(name=name) if prefix == POINT else origin


POINT = "jaxquant"  # what `quant_point` puts before the name of a checkpoint_name

# Primitives whose results hold the values of their operands as they are, perhaps some of them, perhaps cast.
_NAMING = ("name",)
_JOINING = ("concatenate", "stack")
_PASSING_ALL = ("optimization_barrier", "device_put", "pvary", "pcast")
_PASSING = (
    *_PASSING_ALL, "convert_element_type", "reduce_precision", "copy", "sharding_constraint", "stop_gradient",
    "reshard", "ppermute", "mesh_cast", "slice", "split", "rev",
)  # fmt: skip


def _transposed(eqn: JaxprEqn, axes: tuple) -> tuple:
    return tuple(axes[i] for i in _param(eqn, "permutation"))


def _squeezed(eqn: JaxprEqn, axes: tuple) -> tuple:
    return tuple(of for i, of in enumerate(axes) if i not in _param(eqn, "dimensions"))


def _broadcasted(eqn: JaxprEqn, axes: tuple) -> tuple:
    places = _param(eqn, "broadcast_dimensions")
    return tuple(axes[places.index(i)] if i in places else frozenset() for i in range(_avals(eqn.outvars)[0].ndim))


def _reshaped(eqn: JaxprEqn, axes: tuple) -> tuple:
    """Which axes the new ones run along: in groups of equal size, each new axis along all the old ones of its group."""
    old, new = _avals(eqn.invars)[0].shape, _avals(eqn.outvars)[0].shape
    result = [frozenset[int]()] * len(new)
    for of_old, of_new in segments(old, new):
        along = [axes[i] for i in of_old if old[i] > 1] or [axes[i] for i in of_old]  # those of size 1 do not count
        for j in of_new:
            result[j] = frozenset().union(*along)
    return tuple(result)


def _unstacked(eqn: JaxprEqn, axes: tuple) -> tuple:
    return tuple(of for i, of in enumerate(axes) if i != _param(eqn, "axis"))


def _gathered(eqn: JaxprEqn, axes: tuple) -> tuple:
    if _param(eqn, "tiled"):
        return axes
    at = _param(eqn, "all_gather_dimension")
    return (*axes[:at], frozenset(), *axes[at:])


_REARRANGING: dict[str, Callable[[JaxprEqn, tuple], tuple]] = {
    "transpose": _transposed,
    "reshape": _reshaped,
    "squeeze": _squeezed,
    "broadcast_in_dim": _broadcasted,
    "unstack": _unstacked,
    "tile": lambda eqn, axes: axes,
    "all_gather": _gathered,
}


class Replacements:
    """What to compute in the places of contractions, and how calls with a derivative of their own are treated."""

    def __init__(self, contractions: Mapping[Location, Callable], custom: Mapping[Location, str]):
        self.contractions, self.custom = contractions, custom
        self.around = {location[:n] for location in contractions for n in range(1, len(location))}

    def program(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], location: Location = (), shared: Any = None
    ) -> list[Any]:
        """The results of a program; `shared` is what its replacements have computed and may use again."""
        shared = {} if shared is None else shared
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        read = lambda v: v.val if isinstance(v, Literal) else env[v]
        for i, eqn in enumerate(jaxpr.eqns):
            here, ins = (*location, i), [read(v) for v in eqn.invars]
            if here in self.contractions:
                outs = [self.contractions[here](eqn, *ins, shared)]
            elif here in self.around:
                outs = _HIGHER_ORDER[_kind(eqn)].evaluate(self, eqn, ins, here, shared)
            else:
                outs = bound(eqn, ins, jaxpr)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def inner(self, eqn: JaxprEqn, k: int, location: Location) -> Callable[..., list[Any]]:
        """Program `k` of an equation as a function that JAX traces for itself."""
        jaxpr, consts = programs(eqn)[k]
        return lambda *args: self.program(jaxpr, consts, args, (*location, k))


def bound(eqn: JaxprEqn, ins: Sequence[Any], around: Jaxpr) -> list[Any]:
    """The results of one equation as it stands; `around` is a program to take its debug information from."""
    values = {v: value for v, value in zip(eqn.invars, ins, strict=True) if not isinstance(v, Literal)}
    alone = around.replace(
        constvars=[], invars=list(values), outvars=list(eqn.outvars), eqns=[eqn], effects=eqn.effects
    )
    return jax.core.eval_jaxpr(alone, (), *values.values())


class _HigherOrder(NamedTuple):
    """How the origins go through a primitive that holds programs, and how to build it anew."""

    walk: Callable[[Walk, JaxprEqn, list[Origin], _Place], Sequence[Origin]]
    evaluate: Callable[[Replacements, JaxprEqn, list[Any], Location, Any], Sequence[Any]]


def _walk_call(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
    ((jaxpr, _),) = programs(eqn)
    return walk.program(jaxpr, ins, place.inside(0))


def _call(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    (program,) = programs(eqn)
    return replace.program(*program, ins, (*location, 0), shared)


def _jit(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    # Inlined; what its shardings demand, constraints demand too.
    constrained = lambda values, name: [
        lax.with_sharding_constraint(v, s) if isinstance(s, jax.sharding.Sharding) else v
        for v, s in zip(values, _param(eqn, name), strict=True)
    ]
    outs = _call(replace, eqn, constrained(ins, "in_shardings"), location, shared)
    return constrained(outs, "out_shardings")


def _remat(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    policy, prevent_cse = _param(eqn, "policy"), _param(eqn, "prevent_cse")
    return jax.checkpoint(replace.inner(eqn, 0, location), prevent_cse=prevent_cse, policy=policy)(*ins)


def _walk_custom(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
    return _walk_call(walk, eqn, ins, place._replace(custom=(*place.custom, place.location)))


def _walk_high(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
    return [_named(eqn, origin) for origin in _walk_custom(walk, eqn, ins, place)]  # a name is one of them


def _custom(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    if replace.custom[location] == "inline":
        return _call(replace, eqn, ins, location, shared)

    @jax.custom_vjp
    def kept(*ins):
        return replace.inner(eqn, 0, location)(*ins)

    def forward(*ins):
        values, varied = [v.value for v in ins], tuple(i for i, v in enumerate(ins) if v.perturbed)
        return kept(*values), (values, _Varied(varied))

    def backward(residuals, g):
        # With respect to the varied operands alone: rules such as equinox's refuse to differentiate the others.
        values, varied = residuals
        of_varied = {i: values[i] for i in varied.at}

        def original(of_varied):
            ins = [of_varied.get(i, v) for i, v in enumerate(values)]
            return bound(eqn, ins, programs(eqn)[0][0])

        outs, pull = jax.vjp(original, of_varied)
        (found,) = pull([_instantiated(*pair) for pair in zip(g, outs, strict=True)])
        return tuple(found.get(i) for i in range(len(values)))

    kept.defvjp(forward, backward, symbolic_zeros=True)
    return kept(*ins)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Varied:
    """The operands with respect to which a gradient is taken: known while tracing."""

    at: tuple[int, ...]


def _instantiated(cotangent: Any, out: Any) -> Any:
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return cotangent
    is_float = jnp.issubdtype(out.dtype, jnp.inexact)
    return jnp.zeros_like(out) if is_float else np.zeros(out.shape, jax.dtypes.float0)


def _scan_parts(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """The constants, the carry and what is sliced, told by their ranks: a slice has one axis less."""
    ((body, _),) = programs(eqn)
    whole = lambda outside, inside: sum(v.ndim == w.ndim for v, w in zip(outside, inside, strict=True))
    carry = whole(_avals(eqn.outvars), _avals(body.outvars))
    end = whole(_avals(eqn.invars), _avals(body.invars))
    return values[: end - carry], values[end - carry : end], values[end:]


def _walk_scan(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
    consts, carry, xs = _scan_parts(eqn, ins)
    slices = [x._replace(axes=x.axes[1:]) for x in xs]
    body = lambda carry: walk.program(programs(eqn)[0][0], [*consts, *carry, *slices], place.inside(0))
    outs = _settled(body, carry)
    return [*outs[: len(carry)], *(computed([y]) for y in outs[len(carry) :])]  # stacks are followed no further


def _settled(body: Callable[[Sequence[Origin]], list[Origin]], carry: Sequence[Origin]) -> list[Origin]:
    """The origins of what a loop returns, when another round changes those of its carry no more."""
    while True:
        outs = body(carry)
        after = [_either(*pair) for pair in zip(carry, outs[: len(carry)], strict=True)]
        if after == list(carry):
            return [*carry, *outs[len(carry) :]]
        carry = after


def _scan(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    consts, carry, xs = _scan_parts(eqn, ins)
    inner = replace.inner(eqn, 0, location)

    def body(carry, xs):
        outs = inner(*consts, *carry, *xs)
        return outs[: len(carry)], outs[len(carry) :]

    of = lambda name: _param(eqn, name)
    carry, ys = lax.scan(body, list(carry), list(xs), of("length"), of("reverse"), of("unroll"))
    return [*carry, *ys]


def _while_parts(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """The constants of the condition, those of the body, and the carry, which is what a loop returns."""
    condition, _ = _while_programs(eqn)
    start = len(programs(eqn)[condition][0].invars) - len(eqn.outvars)
    end = len(eqn.invars) - len(eqn.outvars)
    return values[:start], values[start:end], values[end:]


def _while_programs(eqn: JaxprEqn) -> tuple[int, int]:
    """Which of the programs of a loop is the condition, and which the body."""
    condition, body = (programs(eqn).index(opened(_param(eqn, name))) for name in ("cond_jaxpr", "body_jaxpr"))
    return condition, body


def _walk_while(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
    condition_consts, consts, carry = _while_parts(eqn, ins)
    condition, body = _while_programs(eqn)
    carry = _settled(lambda carry: walk.program(programs(eqn)[body][0], [*consts, *carry], place.inside(body)), carry)
    walk.program(programs(eqn)[condition][0], [*condition_consts, *carry], place.inside(condition))
    return carry


def _while(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    condition_consts, consts, carry = _while_parts(eqn, ins)
    condition, body = (replace.inner(eqn, k, location) for k in _while_programs(eqn))
    return lax.while_loop(
        lambda carry: condition(*condition_consts, *carry)[0], lambda carry: body(*consts, *carry), list(carry)
    )


def _walk_cond(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
    branches = [walk.program(jaxpr, ins[1:], place.inside(k)) for k, (jaxpr, _) in enumerate(programs(eqn))]
    return [_either(*outs) for outs in zip(*branches, strict=True)]


def _cond(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    branches = [replace.inner(eqn, k, location) for k in range(len(programs(eqn)))]
    return lax.switch(ins[0], branches, *ins[1:])


def _shard_map(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    of = functools.partial(_param, eqn)
    inner = replace.inner(eqn, 0, location)
    return jax.shard_map(
        lambda *args: tuple(inner(*args)), mesh=of("mesh"), in_specs=tuple(of("in_specs")),
        out_specs=tuple(of("out_specs")), check_vma=of("check_vma"),
        axis_names=set(of("manual_axes", "newly_manual_axes")),
    )(*ins)  # fmt: skip


_CALL, _REMAT, _CUSTOM = (
    _HigherOrder(_walk_call, _call),
    _HigherOrder(_walk_call, _remat),
    _HigherOrder(_walk_custom, _custom),
)
_HIGHER_ORDER = {
    "jit": _HigherOrder(_walk_call, _jit),
    "pjit": _HigherOrder(_walk_call, _jit),
    "closed_call": _CALL,
    "eval_jaxpr": _CALL,
    "remat2": _REMAT,
    "checkpoint": _REMAT,
    "custom_jvp_call": _CUSTOM,
    "custom_vjp_call": _CUSTOM,
    _HIGH: _HigherOrder(_walk_high, _custom),
    "scan": _HigherOrder(_walk_scan, _scan),
    "while": _HigherOrder(_walk_while, _while),
    "cond": _HigherOrder(_walk_cond, _cond),
    "shard_map": _HigherOrder(_walk_call, _shard_map),
}
