# SPDX-License-Identifier: Apache-2.0
"""The provenance of each value of a program, and its contractions."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._contract._contract import ContractionOp
from .._contract._ops import OPS
from ._jaxpr import CLOSED, NAME, POINT, Call, Location, avals, is_contraction, kind, params_of, programs, unread_param
from ._moves import MOVES
from ._origin import CAPTURED, LITERAL, Origin, computed


class Operand(NamedTuple):
    """One of the two operands of a contraction."""

    shape: tuple[int, ...]
    dtype: np.dtype
    origin: Origin


class Contraction(NamedTuple):
    """A dot or convolution of a program, an equation that may hold one and is closed, or a named value."""

    location: Location
    op: str
    scope: str
    operands: tuple[Operand, ...]
    params: Mapping[str, Any]
    custom: tuple[Location, ...]  # the custom_jvp and custom_vjp calls around it
    gradient: str  # "transpose" or "jvp" if the function itself differentiates, and this is in that pass; else ""
    stack: tuple[tuple[Location, int], ...] = ()  # the scans over parameters around it, with their lengths
    in_condition: bool = False  # whether it is in the condition of a loop
    more: tuple[Any, ...] = ()  # the avals of the operands behind both, such as the sizes of groups

    def as_op(self, **attributes: Any) -> ContractionOp:
        """The op that takes its place."""
        return OPS[self.op].of(self.params, **attributes)

    @property
    def is_closed(self) -> bool:
        """Whether it cannot be replaced."""
        return self.op != NAME and not is_contraction(self.op, self.params)


class Place(NamedTuple):
    """The place where a walk is."""

    location: Location = ()
    names: tuple[str, ...] = ()  # that jax.named_scope gave
    passes: frozenset[str] = frozenset()  # the transforms that made the equations here, such as "transpose"
    custom: tuple[Location, ...] = ()
    stack: tuple[tuple[Location, int], ...] = ()
    in_condition: bool = False
    reads: tuple[bool, ...] = ()  # which results of the equation here anything reads

    def of(self, eqn: JaxprEqn, i: int) -> "Place":
        stack = eqn.source_info.name_stack.stack
        is_pass = [type(part).__name__ == "Transform" for part in stack]
        names = (*self.names, *(part.name for part, of in zip(stack, is_pass, strict=True) if not of))
        passes = self.passes.union(part.name for part, of in zip(stack, is_pass, strict=True) if of)
        return self._replace(location=(*self.location, i), names=names, passes=passes)

    def inside(self, k: int) -> "Place":
        """The place of a program in the equation here."""
        return self._replace(location=(*self.location, k))


_START = Place()


def _contracts(jaxpr: Jaxpr) -> bool:
    """Whether there is a dot or convolution anywhere in a program."""
    return any(
        eqn.primitive.name in (*OPS, *CLOSED) or any(_contracts(inner) for inner, _ in programs(eqn))
        for eqn in jaxpr.eqns
    )


def _scope(names: Sequence[str]) -> str:
    """The scope of these names, without those that einsum and remat give."""
    each = (part for name in names for part in name.split("/"))
    return "/".join(s for s in each if s and "->" not in s and s not in ("checkpoint", "rematted_computation"))


class Walk:
    """Follows the origin of every value through a program and its calls, and notes each contraction on the way."""

    def __init__(self, calls: Mapping[str, Call]):
        self.calls = calls
        self.contractions: dict[Location, Contraction] = {}
        self.reads: dict[str, set[str]] = {}  # of each parameter, what computes with it and is no contraction
        self.with_integers: dict[Location, list[bool]] = {}  # which results of a branch have integers

    def found(self) -> list[Contraction]:
        """The contractions, of which those of a forward pass count as of a gradient where that is all there is.

        The name stack does not tell the tangents of `jax.jvp` from the values beside them.
        """
        backward = any(c.gradient == "transpose" for c in self.contractions.values())
        forward = lambda c: c._replace(gradient="") if c.gradient == "jvp" and backward else c
        return [forward(c) for c in self.contractions.values()]

    def program(self, jaxpr: Jaxpr, ins: Sequence[Origin], place: Place = _START) -> list[Origin]:
        """The origins of the results of a program, given those of its arguments."""
        consts = [CAPTURED._replace(value=(place.location, "constant", k)) for k in range(len(jaxpr.constvars))]
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *ins), strict=True))
        read = lambda v: LITERAL._replace(value=(place.location, str(v))) if isinstance(v, Literal) else env[v]
        used = {
            v for of in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars) for v in of if not isinstance(v, Literal)
        }
        for i, eqn in enumerate(jaxpr.eqns):
            here = place.of(eqn, i)._replace(reads=tuple(v in used for v in eqn.outvars))
            operands = [read(v) for v in eqn.invars]
            outs = self._equation(eqn, operands, here)
            env.update(zip(eqn.outvars, self._told_apart(eqn, operands, outs, here), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, ins: list[Origin], place: Place) -> Sequence[Origin]:
        name = kind(eqn)
        if name in self.calls:
            return self.calls[name].walk(self, eqn, ins, place)
        if name in (*OPS, *CLOSED) or any(_contracts(inner) for inner, _ in programs(eqn)):
            both = slice(2 if is_contraction(name, eqn.params) else None)
            of_op = avals(eqn.invars)
            self._note(name, of_op[both], ins[both], eqn.params, place, of_op[2:])
        if name == NAME:
            return [self.named(eqn, ins[0], place)]
        if name in MOVES or is_contraction(name, eqn.params):
            self._refuse_unread(eqn, ins)
        if name in MOVES and (ins[0].cache is not None or MOVES[name].how != "writes"):
            if MOVES[name].has_indices:
                self.read(ins[1:], name)
            return MOVES[name].origins(eqn, ins)
        self.read(ins[2:] if is_contraction(name, eqn.params) else ins, name)
        mixed = computed(ins)
        if name in OPS:
            # What meets a parameter in a contraction is data, also where the function closes over it.
            is_data = mixed.data or (bool(mixed.params) and any(o.role == "captured" for o in ins))
            products = frozenset() if is_data else mixed.products | {place.location}
            mixed = mixed._replace(data=is_data, computed=frozenset(), products=products)
        return [mixed] * len(eqn.outvars)

    def _refuse_unread(self, eqn: JaxprEqn, ins: Sequence[Origin]) -> None:
        """Raises where a parameter of jax goes into an equation with something that no table reads."""
        known = next((origin for origin in ins if origin.has_integers), None)
        if known is not None and (unread := unread_param(eqn)):
            raise NotImplementedError(
                f"jaxquant does not know what {unread}={eqn.params[unread]} of the primitive {kind(eqn)!r} does in "
                f"jax {jax.__version__}, got it for {known.path or known.name!r}. Leave that in float by a rule with "
                "None, and report the program."
            )

    def read(self, origins: Sequence[Origin], by: str) -> None:
        """Notes the parameters that are read in float; of what was gathered that is done by the gather."""
        for origin in origins:
            for path in origin.parts:
                self.reads.setdefault(path, set()).add("gather" if origin.gathered else by)

    def named(self, eqn: JaxprEqn, origin: Origin, place: Place) -> Origin:
        """A value with a name, and where it got it, if that was by `quant_point`."""
        prefix, _, name = str(params_of(eqn).get("name", "")).partition(":")
        if prefix != POINT:
            return origin
        self._note(NAME, avals(eqn.invars)[:1], [origin], {"name": name}, place)
        return origin._replace(name=name, points=(*origin.points, place.location))

    def _note(
        self, op: str, values: Sequence[Any], ins: Sequence[Origin], params: Mapping[str, Any], place: Place,
        more: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        operands = tuple(Operand(aval.shape, aval.dtype, origin) for aval, origin in zip(values, ins, strict=True))
        at, gradient = place.location, next((name for name in ("transpose", "jvp") if name in place.passes), "")
        self.contractions[at] = Contraction(
            at, op, _scope(place.names), operands, params, place.custom, gradient, place.stack, place.in_condition,
            tuple(more),
        )  # fmt: skip

    def _told_apart(
        self, eqn: JaxprEqn, ins: Sequence[Origin], outs: Sequence[Origin], place: Place
    ) -> Sequence[Origin]:
        """The results of an equation, each with what tells its value from others."""
        name, at = kind(eqn), place.location
        if name in self.calls and self.calls[name].is_through:
            return outs
        if name in MOVES and MOVES[name].is_same:
            at = name, tuple(origin.value for origin in ins), str(sorted(params_of(eqn).items(), key=str))
        return [origin._replace(value=(at, k)) for k, origin in enumerate(outs)]
