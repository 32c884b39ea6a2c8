# SPDX-License-Identifier: Apache-2.0
"""What each value of a program is made of, and the contractions that it holds."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .. import _checks as checks
from .._groups import segments
from ._program import (
    CLOSED,
    CONTRACTIONS,
    HIGH,
    NAME,
    Location,
    avals,
    is_contraction,
    kind,
    param,
    params_of,
    programs,
    scan_parts,
    unchanged,
    while_parts,
    while_programs,
)


class Origin(NamedTuple):
    """What a value was made of.

    Attributes:
      params: the paths of the parameters that it depends on.
      data: whether it depends on another argument, too.
      captured: whether it depends on an array that the function closes over.
      parts: the paths of the parameters whose values it holds, perhaps some of them in another order; several where
        parameters were concatenated, none if it was computed from them.
      axes: for each axis of the value, the axes of these parameters that it runs along; JOINED where they stand side by
        side, PICKED where each element is another part of the parameter, which indices say.
      picked: whether data say which part of the parameter it is.
      computed: the parameters of at least two axes that it was computed from, with no contraction between.
      gathered: whether it holds its parts in an order that indices say: what a gather makes of a parameter.
      name: what `quant_point` called it, and
      points: where that was, and where it was named before; it may have been moved since.
      value: what tells it from other values of the program: equal for one that comes through a call, or through equal
        moves. Not compared where values come together.
    """

    params: frozenset[str] = frozenset()
    data: bool = False
    captured: bool = False
    parts: tuple[str, ...] = ()
    axes: tuple[frozenset[int], ...] = ()
    picked: bool = False
    computed: frozenset[str] = frozenset()
    gathered: bool = False
    name: str | None = None
    points: tuple[Location, ...] = ()
    value: Any = None

    @property
    def is_held(self) -> bool:
        """Whether it may travel with its integers: a parameter that is not computed with, or a named value."""
        return bool(self.parts or self.points)

    @property
    def held(self) -> tuple[str, ...]:
        """Its parts; none if they were gathered."""
        return () if self.gathered else self.parts

    @property
    def path(self) -> str | None:
        """Of the parameter it holds, of several joined by "+"; None if it holds none."""
        return "+".join(self.held) if self.held else None

    @property
    def role(self) -> str:
        """Of an operand: "weight", "data", "derived" from parameters alone, or "captured" from nothing of both."""
        if self.held:
            return "weight"
        return "data" if self.data else "derived" if self.params else "captured"


JOINED, PICKED = -1, -2  # instead of an axis of a parameter
DATA, CAPTURED, LITERAL = Origin(data=True), Origin(captured=True), Origin()


def parameter(path: str, ndim: int) -> Origin:
    """A parameter itself."""
    return Origin(frozenset([path]), parts=(path,), axes=tuple(frozenset([i]) for i in range(ndim)))


def computed(origins: Sequence[Origin]) -> Origin:
    """What is computed from several values."""
    # Of one axis are biases and the scales of norms, which are no operands.
    matrices = (o.parts for o in origins if sum(map(bool, o.axes)) >= 2 and not o.gathered)
    return Origin(
        frozenset().union(*(o.params for o in origins)),
        any(o.data for o in origins),
        any(o.captured for o in origins),
        computed=frozenset().union(*matrices, *(o.computed for o in origins)),
    )


def _is_integer(eqn: JaxprEqn) -> bool:
    """Whether it casts to what is not floating."""
    return eqn.primitive.name == "convert_element_type" and not checks.is_float(avals(eqn.outvars)[0].dtype)


def _joined(eqn: JaxprEqn, origins: Sequence[Origin]) -> Origin:
    """Parameters side by side, if they lie alike."""
    first = origins[0].axes
    if any(not o.held or o.axes != first for o in origins):
        return computed(origins)
    axis, is_new = param(eqn, "dimension", "axis"), eqn.primitive.name == "stack"
    along = frozenset() if is_new else first[axis]
    axes = (*first[:axis], along | {JOINED}, *first[axis + (not is_new) :])
    parts = dict.fromkeys(part for o in origins for part in o.parts)
    params, picked = frozenset().union(*(o.params for o in origins)), any(o.picked for o in origins)
    return Origin(params, parts=tuple(parts), axes=axes, picked=picked)


def _either(*origins: Origin) -> Origin:
    """What is one of several values."""
    return origins[0] if all(_alike(o, origins[0]) for o in origins) else computed(origins)


def _alike(a: Origin, b: Origin) -> bool:
    return a._replace(value=None) == b._replace(value=None)


class Operand(NamedTuple):
    """One of the two operands of a contraction."""

    shape: tuple[int, ...]
    dtype: Any
    origin: Origin


class Contraction(NamedTuple):
    """A dot or convolution of a program, an equation that may hold one and is closed, or a named value."""

    location: Location
    op: str
    scope: str
    operands: tuple[Operand, ...]
    params: Mapping[str, Any]
    custom: tuple[Location, ...]  # the custom_jvp and custom_vjp calls around it
    gradient: str  # "transpose(" or "jvp(" if the function itself differentiates, and this is in that pass; else ""
    stack: tuple[tuple[Location, int], ...] = ()  # the scans over parameters around it, with their lengths
    in_condition: bool = False  # whether it is in the condition of a loop

    @property
    def dot(self) -> Any:
        """Of a dot, ragged or not: ((contracted lhs, contracted rhs), (batch lhs, batch rhs))."""
        ragged = self.params.get("ragged_dot_dimension_numbers")
        pairs = ragged.dot_dimension_numbers if ragged else self.params["dimension_numbers"]
        return tuple(tuple(tuple(map(int, axes)) for axes in pair) for pair in pairs)

    @property
    def is_closed(self) -> bool:
        """Whether it cannot be replaced."""
        return self.op != NAME and not is_contraction(self.op, self.params)


class _Place(NamedTuple):
    """Where a walk is."""

    location: Location = ()
    scope: str = ""
    custom: tuple[Location, ...] = ()
    stack: tuple[tuple[Location, int], ...] = ()
    in_condition: bool = False

    def of(self, eqn: JaxprEqn, i: int) -> "_Place":
        """The place of an equation."""
        stack = str(eqn.source_info.name_stack)
        return self._replace(location=(*self.location, i), scope=f"{self.scope}/{stack}" if stack else self.scope)

    def inside(self, k: int) -> "_Place":
        """The place of a program in the equation here."""
        return self._replace(location=(*self.location, k))


_START = _Place()


def _contracts(jaxpr: Jaxpr) -> bool:
    """Whether there is a dot or convolution anywhere in a program."""
    return any(
        eqn.primitive.name in (*CONTRACTIONS, *CLOSED) or any(_contracts(inner) for inner, _ in programs(eqn))
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
        self.reads: dict[str, set[str]] = {}  # of each parameter, what computes with it and is no contraction
        self.holding: dict[Location, list[bool]] = {}  # which results of a branch are a parameter

    def found(self) -> list[Contraction]:
        """The contractions, of which those of a forward pass count as of a gradient where that is all there is.

        The name stack does not tell the tangents of `jax.jvp` from the values beside them.
        """
        backward = any(c.gradient == "transpose(" for c in self.contractions.values())
        forward = lambda c: c._replace(gradient="") if c.gradient == "jvp(" and backward else c
        return [forward(c) for c in self.contractions.values()]

    def program(self, jaxpr: Jaxpr, ins: Sequence[Origin], place: _Place = _START) -> list[Origin]:
        """The origins of the results of a program, given those of its arguments."""
        consts = [CAPTURED._replace(value=(place.location, "constant", k)) for k in range(len(jaxpr.constvars))]
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *ins), strict=True))
        read = lambda v: LITERAL._replace(value=(place.location, str(v))) if isinstance(v, Literal) else env[v]
        for i, eqn in enumerate(jaxpr.eqns):
            operands, here = [read(v) for v in eqn.invars], place.of(eqn, i)
            outs = self._equation(eqn, operands, here)
            env.update(zip(eqn.outvars, _told_apart(eqn, operands, outs, here), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
        name = kind(eqn)
        if name in _WALKS:
            return _WALKS[name](self, eqn, ins, place)
        if name in (*CONTRACTIONS, *CLOSED) or any(_contracts(inner) for inner, _ in programs(eqn)):
            self._note(eqn, ins, place)
        if name in _REARRANGING and ins[0].parts:
            return [ins[0]._replace(axes=_REARRANGING[name](eqn, ins[0].axes))] * len(eqn.outvars)
        if name in _NAMING:
            return [self.named(eqn, ins[0], place)]
        if name == "dynamic_slice":
            return [ins[0]._replace(picked=ins[0].picked or any(index.data for index in ins[1:]))]
        if (name == "all_gather" or _is_integer(eqn)) and not ins[0].parts:
            return [ins[0]._replace(points=())]
        if name in _REARRANGING or name in _PASSING:
            return ins if name in _PASSING_ALL else [ins[0]] * len(eqn.outvars)
        if name in _JOINING:
            return [_joined(eqn, ins)]
        if not is_contraction(name, eqn.params):
            self.read(ins[1:] if name == "gather" else ins, name)
        mixed = computed(ins)
        if name == "gather" and ins[0].parts:
            axes = _gathered_axes(eqn, ins[0].axes)
            mixed = mixed._replace(gathered=True, parts=ins[0].parts, axes=axes, picked=True)
        if name in CONTRACTIONS:
            # What meets a parameter in a contraction is data, also where the function closes over it.
            is_data = mixed.data or (bool(mixed.params) and any(o.role == "captured" for o in ins))
            mixed = mixed._replace(data=is_data, computed=frozenset())
        return [mixed] * len(eqn.outvars)

    def read(self, origins: Sequence[Origin], by: str) -> None:
        """Notes the parameters that are read in float; of what was gathered that is done by the gather."""
        for origin in origins:
            for path in origin.parts:
                self.reads.setdefault(path, set()).add("gather" if origin.gathered else by)

    def _note(self, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> None:
        both = slice(2 if is_contraction(eqn.primitive.name, eqn.params) else None)
        self._note_operands(eqn.primitive.name, avals(eqn.invars)[both], ins[both], eqn.params, place)

    def named(self, eqn: JaxprEqn, origin: Origin, place: _Place) -> Origin:
        """A value with a name, and where it got it, if that was by `quant_point`."""
        prefix, _, name = str(params_of(eqn).get("name", "")).partition(":")
        if prefix != POINT:
            return origin
        self._note_operands(NAME, avals(eqn.invars)[:1], [origin], {"name": name}, place)
        return origin._replace(name=name, points=(*origin.points, place.location))

    def _note_operands(
        self, op: str, values: Sequence[Any], ins: Sequence[Origin], params: Mapping[str, Any], place: _Place
    ) -> None:
        operands = (Operand(aval.shape, aval.dtype, origin) for aval, origin in zip(values, ins, strict=True))
        self.contractions[place.location] = Contraction(
            place.location,
            op,
            _clean(place.scope),
            tuple(operands),
            params,
            place.custom,
            next((pass_ for pass_ in ("transpose(", "jvp(") if pass_ in place.scope), ""),
            place.stack,
            place.in_condition,
        )


# Calls that give what their program gives.
_THROUGH = (
    "jit", "pjit", "closed_call", "eval_jaxpr", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", HIGH
)  # fmt: skip


def _told_apart(eqn: JaxprEqn, ins: Sequence[Origin], outs: Sequence[Origin], place: _Place) -> list[Origin]:
    """The results of an equation, each with what tells its value from others."""
    name = kind(eqn)
    if name in _THROUGH:
        return list(outs)
    at: Any = place.location
    if name in _REARRANGING or name in _PASSING or name in _NAMING:  # equal moves of one value are one value
        at = name, tuple(origin.value for origin in ins), str(sorted(params_of(eqn).items(), key=str))
    return [origin._replace(value=(at, k)) for k, origin in enumerate(outs)]


POINT = "jaxquant"  # what `quant_point` puts before the name of a checkpoint_name

# Primitives whose results hold the values of their operands as they are, perhaps some of them, perhaps cast.
_NAMING = (NAME,)
_JOINING = ("concatenate", "stack")
_PASSING_ALL = ("optimization_barrier", "device_put", "pvary", "pcast")
_PASSING = (
    *_PASSING_ALL, "convert_element_type", "reduce_precision", "copy", "sharding_constraint", "stop_gradient",
    "reshard", "ppermute", "mesh_cast", "slice", "split", "rev",
)  # fmt: skip


def _transposed(eqn: JaxprEqn, axes: tuple) -> tuple:
    return tuple(axes[i] for i in param(eqn, "permutation"))


def _squeezed(eqn: JaxprEqn, axes: tuple) -> tuple:
    return tuple(of for i, of in enumerate(axes) if i not in param(eqn, "dimensions"))


def _broadcasted(eqn: JaxprEqn, axes: tuple) -> tuple:
    places = param(eqn, "broadcast_dimensions")
    return tuple(axes[places.index(i)] if i in places else frozenset() for i in range(avals(eqn.outvars)[0].ndim))


def _reshaped(eqn: JaxprEqn, axes: tuple) -> tuple:
    """Which axes the new ones run along: in runs of equal size, each new axis along all the old ones of its run."""
    old, new = avals(eqn.invars)[0].shape, avals(eqn.outvars)[0].shape
    result = [frozenset[int]()] * len(new)
    for of_old, of_new in segments(old, new):
        along = [axes[i] for i in of_old if old[i] > 1] or [axes[i] for i in of_old]  # those of size 1 do not count
        for j in [j for j in of_new if new[j] > 1] or of_new:
            result[j] = frozenset().union(*along)
    return tuple(result)


def _unstacked(eqn: JaxprEqn, axes: tuple) -> tuple:
    return tuple(of for i, of in enumerate(axes) if i != param(eqn, "axis"))


def _gathered_axes(eqn: JaxprEqn, axes: tuple) -> tuple:
    """Of what a gather makes: windows run along the axes of the parameter, and each index picks a part of it."""
    numbers = param(eqn, "dimension_numbers")
    gone = *numbers.collapsed_slice_dims, *numbers.operand_batching_dims
    windows = iter([of for i, of in enumerate(axes) if i not in gone])
    ndim = avals(eqn.outvars)[0].ndim
    return tuple(next(windows) if i in numbers.offset_dims else frozenset([PICKED]) for i in range(ndim))


def _gathered(eqn: JaxprEqn, axes: tuple) -> tuple:
    if param(eqn, "tiled"):
        return axes
    at = param(eqn, "all_gather_dimension")
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


def _walk_call(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
    ((jaxpr, _),) = programs(eqn)
    return walk.program(jaxpr, ins, place.inside(0))


def _inside(ins: Sequence[Origin], place: _Place) -> list[Origin]:
    """What a loop or a branch takes: values of its own, which no op outside has."""
    return [origin._replace(value=(place.location, "taken", k)) for k, origin in enumerate(ins)]


def _walk_shard_map(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
    outs = _walk_call(walk, eqn, _inside(ins, place), place)
    walk.read(outs, "shard_map")
    return [computed([origin]) if origin.is_held else origin for origin in outs]


def _walk_custom(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
    outs = _walk_call(walk, eqn, ins, place._replace(custom=(*place.custom, place.location)))
    known = {point for origin in ins for point in origin.points}  # what is named inside may leave in float
    return [origin._replace(points=tuple(point for point in origin.points if point in known)) for origin in outs]


def _walk_high(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
    return [walk.named(eqn, origin, place) for origin in _walk_custom(walk, eqn, ins, place)]  # a name is one of them


def _walk_scan(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
    consts, carry, xs = scan_parts(eqn, _inside(ins, place))
    slices = [x._replace(axes=x.axes[1:]) for x in xs]
    within = place.inside(0)
    if any(x.parts for x in xs):
        within = within._replace(stack=(*place.stack, (place.location, param(eqn, "length"))))
    body = lambda carry: walk.program(programs(eqn)[0][0], [*consts, *carry, *slices], within)
    outs = _settled(body, _constant(walk, eqn, programs(eqn)[0][0], len(consts), carry))
    walk.read(outs[len(carry) :], "scan")
    return [*outs[: len(carry)], *(computed([y]) for y in outs[len(carry) :])]  # stacks are followed no further


def _constant(walk: Walk, eqn: JaxprEqn, body: Jaxpr, before: int, carry: Sequence[Origin]) -> list[Origin]:
    """The carry of a loop, in which a parameter that it changes is what is computed from it."""
    same = unchanged(body, before, len(carry))
    changed = [origin for origin, is_same in zip(carry, same, strict=True) if not is_same]
    walk.read(changed, kind(eqn))
    return [
        origin if is_same or not origin.is_held else computed([origin])._replace(value=origin.value)
        for origin, is_same in zip(carry, same, strict=True)
    ]


def _settled(body: Callable[[Sequence[Origin]], list[Origin]], carry: Sequence[Origin]) -> list[Origin]:
    """The origins of what a loop returns, when another round changes those of its carry no more."""
    while True:
        outs = body(carry)
        after = [_either(*pair) for pair in zip(carry, outs[: len(carry)], strict=True)]
        if all(map(_alike, after, carry)):
            return [*carry, *outs[len(carry) :]]
        carry = [new._replace(value=old.value) for new, old in zip(after, carry, strict=True)]


def _walk_while(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
    condition_consts, consts, carry = while_parts(eqn, _inside(ins, place))
    condition, body = while_programs(eqn)
    carry = _constant(walk, eqn, programs(eqn)[body][0], len(consts), carry)
    carry = _settled(lambda carry: walk.program(programs(eqn)[body][0], [*consts, *carry], place.inside(body)), carry)
    within = place.inside(condition)._replace(in_condition=True)
    walk.program(programs(eqn)[condition][0], [*condition_consts, *carry], within)
    return carry


def _walk_cond(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: _Place) -> Sequence[Origin]:
    within = [place.inside(k) for k in range(len(programs(eqn)))]  # an input of one branch is observed in that alone
    branches = [
        walk.program(jaxpr, _inside(ins[1:], at), at) for at, (jaxpr, _) in zip(within, programs(eqn), strict=True)
    ]
    outs = [_either(*outs) for outs in zip(*branches, strict=True)]
    walk.holding[place.location] = [origin.is_held for origin in outs]
    return outs


_WALKS: dict[str, Callable[[Walk, JaxprEqn, list[Origin], _Place], Sequence[Origin]]] = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "eval_jaxpr", "remat2", "checkpoint"), _walk_call),
    "shard_map": _walk_shard_map,
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _walk_custom),
    HIGH: _walk_high,
    "scan": _walk_scan,
    "while": _walk_while,
    "cond": _walk_cond,
}
