# SPDX-License-Identifier: Apache-2.0
"""What kernels of integers compute at once: a layer with its bias and activation, a sum, a mean, a pool.

A program is made one level of calls first (`flattened`). Then its regions are found (`Level.regions`), and what they
take and give gets a name (`rebuilt`), so that rules quantize it there.
"""

import collections
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._contract._ops import OPS
from ._jaxpr import (
    NAME,
    POINT,
    Location,
    avals,
    evaluated,
    is_contraction,
    kind,
    opened,
    param,
    params_of,
    programs,
    read_equations,
    traced,
)
from ._moves import MOVES

_INLINED = ("jit", "pjit", "closed_call")
_ENTERED = ("scan", "checkpoint", "remat2")
_MOVED = ("reshape", "transpose", "squeeze", "rev", "slice", "copy", "stop_gradient", "sharding_constraint")
_RESHAPED = ("reshape", "transpose", "squeeze")
_CUSTOM = ("custom_jvp_call", "custom_vjp_call")

Var = Any  # a variable of a program, or a literal


class Region(NamedTuple):
    """What one kernel computes, from operands on grids to a value on a grid.

    Attributes:
      kind: "layer", "add", "mean", "average_pool", "max_pool" or "concatenate".
      eqn: the contraction, the sum, the reduction, the pool or the concatenation; of a mean its sum.
      at: where the equation is in its program.
      operands: the values that it takes; of a layer the input and the weight, in the order of the contraction.
      bias: of a layer, the value that is added; None if there is none.
      bias_axes: the axes of the output that the axes of the bias are.
      moves: the equations that move the output of a layer, before its bias.
      behind: the equations that move it behind its bias, before its activation.
      low, high: the limits of an activation; None where there is none.
    """

    kind: str
    eqn: JaxprEqn
    at: int
    operands: tuple[Var, ...]
    bias: Var = None
    bias_axes: tuple[int, ...] = ()
    moves: tuple[JaxprEqn, ...] = ()
    behind: tuple[JaxprEqn, ...] = ()
    low: float | None = None
    high: float | None = None

    @property
    def words(self) -> str:
        """The region in words."""
        of = {(None, None): "", (0.0, None): " + relu", (0.0, 6.0): " + relu6"}
        clip = of.get((self.low, self.high), f" + clip({self.low}, {self.high})")
        bias = "" if self.bias is None else " + bias"
        return f"{self.eqn.primitive.name if self.kind == 'layer' else self.kind}{bias}{clip}"

    @property
    def values(self) -> tuple[Var, ...]:
        """The values that it is computed from."""
        return self.operands if self.bias is None else (*self.operands, self.bias)


def moved(v: Array, moves: Sequence[JaxprEqn]) -> Array:
    """An array moved by equations."""
    for eqn in moves:
        v = eqn.primitive.bind(v, **eqn.params)
    return v


class Found(NamedTuple):
    """A region, with the values between its operands and its result."""

    region: Region
    inside: tuple[Var, ...]


# Programs, rebuilt.


def flattened(jaxpr: Jaxpr, consts: Sequence[Any]) -> tuple[Jaxpr, Sequence[Any]]:
    """The program with its calls of functions inlined, those with a derivative of their own excepted."""
    return rebuilt(jaxpr, consts, {})


def rebuilt(jaxpr: Jaxpr, consts: Sequence[Any], names: Mapping[Var, str]) -> tuple[Jaxpr, Sequence[Any]]:
    """The program with names for some of its values, and its calls of functions inlined."""
    return traced(lambda args: _outs(jaxpr, consts, args, names), avals(jaxpr.invars))


def _outs(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], names: Mapping[Var, str]) -> list[Any]:
    named = lambda v, value: checkpoint_name(value, f"{POINT}:{names[v]}") if v in names else value
    of = (*jaxpr.constvars, *jaxpr.invars)
    env = {v: named(v, value) for v, value in zip(of, (*consts, *args), strict=True)}
    read = lambda v: v.val if isinstance(v, Literal) else env[v]
    for eqn in read_equations(jaxpr):
        ins = list(map(read, eqn.invars))
        if kind(eqn) in _INLINED:
            with jax.named_scope(str(eqn.source_info.name_stack)):
                outs = _outs(*programs(eqn)[0], ins, names)
        else:
            outs = evaluated(_entered(eqn, names), ins, jaxpr)
        env.update({v: named(v, value) for v, value in zip(eqn.outvars, outs, strict=True)})
    return list(map(read, jaxpr.outvars))


def _entered(eqn: JaxprEqn, names: Mapping[Var, str]) -> JaxprEqn:
    """The equation of a loop over layers, or of a checkpoint, with its program rebuilt."""
    if kind(eqn) not in _ENTERED:
        return eqn
    ((name, old),) = ((name, v) for name, v in eqn.params.items() if isinstance(getattr(v, "jaxpr", v), Jaxpr))
    inner, consts = opened(old)
    new, consts = rebuilt(inner, consts, names)
    if hasattr(old, "consts"):
        new = ClosedJaxpr(new, consts)
    return eqn.replace(params={**eqn.params, name: new})


# Regions.

_Behind = tuple[int, JaxprEqn, tuple[JaxprEqn, ...], tuple[Var, ...]]  # a contraction, the moves behind it, the values


def levels(
    jaxpr: Jaxpr, data: Collection[Var], loops: bool, location: Location = ()
) -> Iterator[tuple[Location, "Level"]]:
    """The programs in which regions are found, each with its location.

    `data` are the arguments that are data; `loops` says whether those in loops are among them.
    """
    level = Level(jaxpr, data)
    yield location, level
    for i, eqn in enumerate(jaxpr.eqns):
        if kind(eqn) in _ENTERED and (loops or kind(eqn) != "scan"):
            ((inner, _),) = programs(eqn)
            of_data = [
                v
                for v, w in zip(inner.invars, eqn.invars, strict=True)
                if not isinstance(w, Literal) and w in level.data
            ]
            yield from levels(inner, of_data, loops, (*location, i, 0))


class Level:
    """The equations of one program, without the programs inside.

    Attributes:
      jaxpr: the program.
      data: the values in it that depend on data.
    """

    def __init__(self, jaxpr: Jaxpr, data: Collection[Var] = ()):
        self.jaxpr, self.data = jaxpr, set(data)
        self._made = {v: (i, eqn) for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        read = (*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars)
        self._uses = collections.Counter(v for v in read if not isinstance(v, Literal))
        for eqn in jaxpr.eqns:
            if any(v in self.data for v in eqn.invars if not isinstance(v, Literal)):
                self.data.update(eqn.outvars)

    def made(self, v: Var) -> tuple[int, JaxprEqn] | None:
        """Where and by which equation a value is made; None of an argument."""
        return None if isinstance(v, Literal) else self._made.get(v)

    def named(self, v: Var) -> tuple[int, str] | None:
        """Where a value got its name, if that was by `quant_point`, and the name."""
        made = self.made(v)
        if made is None or made[1].primitive.name != NAME:
            return None
        prefix, _, name = str(params_of(made[1])["name"]).partition(":")
        return (made[0], name) if prefix == POINT else None

    def before_moves(self, v: Var) -> Var:
        """The value that another one is, before moves that leave it on its grid."""
        while (made := self.made(v)) and (made[1].primitive.name in _MOVED or _is_reshaped(made[1])):
            v = made[1].invars[0]
        return v

    def name_behind(self, v: Var) -> str | None:
        """The name that a value gets by `quant_point`, if nothing else uses it."""
        users = [eqn for eqn in self.jaxpr.eqns if any(v is of for of in eqn.invars)]
        of = self.named(users[0].outvars[0]) if len(users) == 1 == self._uses[v] else None
        return of and of[1]

    def made_by(self, v: Var) -> str | None:
        """What makes a value, in words; None of an argument."""
        made = self.made(v)
        return made and str(made[1].params.get("name", made[1].primitive.name))

    def regions(self) -> dict[Var, Region]:
        """The largest regions, by their results, in the order of the program."""
        found, inside = {}, set()
        for eqn in reversed(self.jaxpr.eqns):
            for v in eqn.outvars:
                if v not in inside and (of := self.found(v)) is not None:
                    found[v] = of.region
                    inside.update(of.inside)
        return dict(reversed(found.items()))

    def found(self, v: Var) -> Found | None:
        """The region whose result a value is."""
        source, low, high, inside = self._clipped(v)
        made = self.made(source)
        if made is None or avals([v])[0].dtype != np.float32:
            return None
        i, eqn = made
        if behind := self._contraction(source):
            return self._layer(behind, None, low, high, inside)
        if eqn.primitive.name == "add":
            return self._sum(i, eqn, low, high, inside)
        if source is not v and _is_reshaped(eqn):
            return self._before_activation(source, low, high, inside)
        if source is not v:
            return None
        if eqn.primitive.name in ("div", "mul"):
            return self._mean(eqn)
        kinds = {"reduce_window_max": "max_pool", "concatenate": "concatenate"}
        is_of_data = eqn.primitive.name in kinds and all(of in self.data for of in eqn.invars)
        return Found(Region(kinds[eqn.primitive.name], eqn, i, tuple(eqn.invars)), ()) if is_of_data else None

    def _before_activation(
        self, v: Var, low: float | None, high: float | None, inside: tuple[Var, ...]
    ) -> Found | None:
        """A layer with its bias, whose result is moved before it is clipped."""
        behind, within = [], [*inside]
        while (made := self.made(v)) and _is_reshaped(made[1]) and self._is_alone(made[1].invars[0]):
            behind.append(made[1])
            v = made[1].invars[0]
            within.append(v)
        found = self._sum(*made, low, high, tuple(within)) if made and made[1].primitive.name == "add" else None
        if found is None or found.region.kind != "layer":
            return None
        return found._replace(region=found.region._replace(behind=tuple(reversed(behind))))

    def _is_alone(self, v: Var) -> bool:
        return self._uses[v] == 1

    def _clipped(self, v: Var) -> tuple[Any, float | None, float | None, tuple[Var, ...]]:
        """What a value is before it is clipped, the limits, and the values between."""
        low = high = None
        inside = ()
        while (clip := self.clip(v)) and self.made(clip[0]) and self._is_alone(clip[0]):
            v, *limits = clip
            low, high = _clipped_again(limits, (low, high))
            inside = *inside, v
        return v, low, high, inside

    def clip(self, v: Var) -> tuple[Var, float | None, float | None] | None:
        """If a value is another one clipped, that one, and the limits."""
        made = self.made(v)
        if made is None:
            return None
        eqn, name = made[1], kind(made[1])
        if name in ("max", "min"):
            for x, limit in (eqn.invars, eqn.invars[::-1]):
                if (n := self._constant(limit)) is not None and not isinstance(x, Literal):
                    return (x, n, None) if name == "max" else (x, None, n)
        if name == "clamp":
            low, high = (self._constant(eqn.invars[i]) for i in (0, 2))
            return None if low is None or high is None else (eqn.invars[1], low, high)
        return self._clip_of_call(eqn) if name in (*_INLINED, *_CUSTOM) else None

    def _clip_of_call(self, eqn: JaxprEqn) -> tuple[Var, float | None, float | None] | None:
        inner = Level(programs(eqn)[0][0])
        if len(inner.jaxpr.outvars) > 1:
            return None
        v, low, high = inner.jaxpr.outvars[0], None, None
        while clip := inner.clip(v):
            v, *limits = clip
            low, high = _clipped_again(limits, (low, high))
        if (low, high) == (None, None):
            return None
        return next(((x, low, high) for x, of in zip(eqn.invars, inner.jaxpr.invars, strict=True) if of is v), None)

    def _constant(self, v: Var) -> float | None:
        """The number that a value is; None if it is none."""
        while (made := self.made(v)) and made[1].primitive.name in ("convert_element_type", "broadcast_in_dim"):
            v = made[1].invars[0]
        return float(v.val) if isinstance(v, Literal) and np.size(v.val) == 1 else None

    def _contraction(self, v: Var) -> _Behind | None:
        """The contraction whose output a value is, perhaps moved, with the moves and the values between."""
        moves, inside = [], []
        while made := self.made(v):
            i, eqn = made
            if is_contraction(kind(eqn), eqn.params) and kind(eqn) != "ragged_dot_general":
                return i, eqn, tuple(reversed(moves)), tuple(inside)
            if not _is_reshaped(eqn) or not self._is_alone(eqn.invars[0]):
                return None
            moves.append(eqn)
            v = eqn.invars[0]
            inside.append(v)
        return None

    def _layer(
        self, behind: _Behind, bias: tuple[Var, tuple[int, ...]] | None, low: float | None, high: float | None,
        inside: tuple[Var, ...],
    ) -> Found | None:  # fmt: skip
        i, eqn, moves, between = behind
        if sum(v in self.data for v in eqn.invars[:2]) != 1:
            return None
        added, axes = bias or (None, ())
        region = Region("layer", eqn, i, tuple(eqn.invars[:2]), added, axes, moves, low=low, high=high)
        return Found(region, (*inside, *between))

    def _sum(
        self, i: int, eqn: JaxprEqn, low: float | None, high: float | None, inside: tuple[Var, ...]
    ) -> Found | None:
        pair, shape = list[Var](eqn.invars), avals(eqn.outvars)[0].shape
        if any(isinstance(v, Literal) for v in pair):
            return None
        for y, bias in (pair, pair[::-1]):
            behind = self._contraction(y) if self._uses[y] == 1 and bias not in self.data else None
            if behind is not None and (found := self._bias(bias, len(shape), behind)):
                return self._layer(behind, found, low, high, (*inside, y))
        is_of_data = all(v in self.data and v.aval.shape == shape for v in pair)
        return Found(Region("add", eqn, i, tuple(pair), low=low, high=high), inside) if is_of_data else None

    def _bias(self, v: Var, ndim: int, behind: _Behind) -> tuple[Var, tuple[int, ...]] | None:
        """A bias before it is broadcast, and the axes of the output that its axes are; one number for each channel."""
        made, axes = self.made(v), tuple(range(ndim))
        if made and made[1].primitive.name == "broadcast_in_dim":
            v, axes = made[1].invars[0], tuple(param(made[1], "broadcast_dimensions"))
        if isinstance(v, Literal):
            return None
        (shape, size), (channels, n) = (avals([v])[0].shape, avals([v])[0].size), self._channels(behind)
        varies = {axis for axis, length in zip(axes, shape, strict=True) if length != 1}
        return (v, axes) if size == 1 or (size == n and varies <= channels) else None

    def _channels(self, behind: _Behind) -> tuple[set[int], int]:
        """The axes of a moved output along which the channels of the weight are, and how many channels there are."""
        _, eqn, moves, _ = behind
        side, shapes = int(eqn.invars[0] in self.data), [v.shape for v in avals(eqn.invars[:2])]
        axes = OPS[kind(eqn)].of(eqn.params).axes([len(shape) for shape in shapes])
        free = [i for i, name in enumerate(axes.operands[side]) if name in axes.out and name not in axes.met]
        channels = {axes.out.index(axes.operands[side][i]) for i in free}
        for move in moves:
            of_move = MOVES[move.primitive.name].runs
            assert of_move is not None
            (runs,) = of_move(move)
            channels = {axis for run in runs if channels.intersection(run.old) for axis in run.new}
        return channels, math.prod(shapes[side][i] for i in free)

    def _mean(self, eqn: JaxprEqn) -> Found | None:
        """A sum divided by the number of its terms: a mean over axes, or in windows."""
        is_turned = eqn.primitive.name == "mul" and isinstance(eqn.invars[0], Literal)
        v, by = eqn.invars[::-1] if is_turned else eqn.invars
        n = self._constant(by)
        inside = []
        while (made := self.made(v)) and _is_reshaped(made[1]) and self._is_alone(v):
            inside.append(v)
            v = made[1].invars[0]
        if n is None or made is None or not self._is_alone(v) or made[1].invars[0] not in self.data:
            return None
        (i, of), is_div = made, eqn.primitive.name == "div"
        name, shape = of.primitive.name, avals(of.invars)[0].shape
        if name == "reduce_sum":
            count, kind = math.prod(shape[axis] for axis in param(of, "axes")), "mean"
        elif name == "reduce_window_sum" and _is_plain(of) and not inside:
            count, kind = math.prod(param(of, "window_dimensions")), "average_pool"
        else:
            return None
        is_count = n == count if is_div else np.float32(n) == np.float32(1 / count)
        return Found(Region(kind, of, i, tuple(of.invars)), (*inside, v)) if is_count else None


def _clipped_again(inner: Sequence[float | None], outer: Sequence[float | None]) -> tuple[float | None, float | None]:
    """The limits of a value that is clipped to `inner`, and then to `outer`."""
    (low, high), (least, most) = inner, outer
    within = lambda v: (
        v if v is None else min(max(v, -math.inf if least is None else least), math.inf if most is None else most)
    )
    return (least if low is None else within(low)), (most if high is None else within(high))


def _is_reshaped(eqn: JaxprEqn) -> bool:
    """Whether an equation only puts values into another shape or order."""
    name, (old, *_), (new, *_) = eqn.primitive.name, avals(eqn.invars), avals(eqn.outvars)
    is_same = name in ("broadcast_in_dim", "slice") and math.prod(old.shape) == math.prod(new.shape)
    return (name in _RESHAPED or is_same) and not isinstance(eqn.invars[0], Literal)


def _is_plain(eqn: JaxprEqn) -> bool:
    """Whether windows are neither padded nor dilated."""
    is_padded = any(n for pads in param(eqn, "padding") for n in pads)
    return not is_padded and all(n == 1 for name in ("base_dilation", "window_dilation") for n in param(eqn, name))
