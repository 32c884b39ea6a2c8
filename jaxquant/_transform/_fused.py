# SPDX-License-Identifier: Apache-2.0
"""The values of a function that a runtime computes in integers: their names and rules, and their integers."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .._arrays._quantized import Quantized
from .._base import _checks as checks
from .._contract._dot import Dot
from .._paths import named_in_errors
from .._program._fusing import Level, Region, Var, levels, moved, rebuilt
from .._program._jaxpr import Jaxpr, JaxprEqn, Location, avals
from .._program._moves import MOVES
from .._program._param import QuantizedParam
from .._runtime._kernels import Grid, Kernels, Limits, bias_integers, least_scale, limits_of
from .._spec._granularity import PerTensor
from .._spec._rule import Rule
from .._spec._spec import QuantSpec, plain_spec
from ._choose import Decision
from ._match import MatchedOp, is_wanted
from ._plan import ARGUMENT, FROM_FLOAT, IN_FLOAT


class Named(NamedTuple):
    """A program in which the values between kernels have names.

    Attributes:
      jaxpr, consts: the program.
      rules: of kind "value", for these names.
    """

    jaxpr: Jaxpr
    consts: Sequence[Any]
    rules: Sequence[Rule]


def named(
    jaxpr: Jaxpr, consts: Sequence[Any], data: Sequence[Var], ops: Sequence[MatchedOp], kernels: Kernels
) -> Named:
    """A program whose ops have rules, with names for what layers, sums, means and pools take and give."""
    layers = {op.contraction.location: _layer(op, kernels.name) for op in ops if op.kind == "weight"}
    naming = _Naming({at: layer for at, layer in layers.items() if layer is not None})
    for location, level in levels(jaxpr, data, kernels.regrids):
        naming.level(location, level)
    rules = [Rule(name, activation=spec, kind="value", optional=True) for name, spec in naming.specs.items()]
    return Named(*rebuilt(jaxpr, consts, naming.names), rules)


class _Layer(NamedTuple):
    """A contraction whose operands rules quantize: the path of its weight, and the spec of its input."""

    path: str
    spec: QuantSpec


def _layer(op: MatchedOp, runtime: str) -> _Layer | None:
    side = op.weight or 0
    rule, path = op.rules[side], op.origins[side].path or op.name
    if not is_wanted(rule) or rule is None or rule.weight is None or rule.activation is None:
        return None
    with named_in_errors(path, rule=rule):
        _check(rule.weight, rule.activation, runtime)
    return _Layer(path, rule.activation)


def _check(weight: QuantSpec, activation: QuantSpec, runtime: str) -> None:
    """Raises for specs that no kernel of integers has."""
    for spec in (weight, activation):
        plain_spec(repr(runtime), spec)
    if not (weight.signed and weight.symmetric) or weight.format or weight.bits > 8 or weight.granularity.sizes:
        raise ValueError(
            f"{runtime!r} multiplies weights of up to 8 bits that are signed and symmetric, with one scale or one for "
            f"each output channel, got {weight}. Take weight_spec(8), or leave the op in float by a rule with None."
        )
    is_whole = activation.bits == 8 and not activation.format and not activation.narrow_range
    if not is_whole or activation.granularity != PerTensor() or activation.rounding != "half_even":
        raise ValueError(
            f"{runtime!r} takes inputs of 8 bits with one scale that is known before it runs, and rounds them itself, "
            f"got {activation}. Take activation_spec(8), or leave the op in float by a rule with None."
        )


class _Naming:
    """The names of values and their specs, level by level."""

    def __init__(self, layers: Mapping[Location, _Layer]):
        self.layers = layers
        self.names: dict[Var, str] = {}
        self.specs: dict[str, QuantSpec] = {}
        self._taken = collections.Counter()

    def level(self, location: Location, level: Level) -> None:
        regions, of_values = level.regions(), dict[Var, QuantSpec]()

        def spec_of(v: Var) -> QuantSpec | None:
            """The spec of an operand that is on a grid, or may be: an argument."""
            return of_values.get(v) or (self.specs.get(of[1]) if (of := level.named(v)) else None)

        for v, region in regions.items():
            layer = self.layers.get((*location, region.at))
            operands = [level.before_moves(of) for of in region.operands if of in level.data]
            is_argument = lambda of: level.made(of) is None and checks.is_float(of.aval.dtype)
            specs = [of for of in map(spec_of, operands) if of is not None]
            is_on_grids = bool(specs) and all(is_argument(of) or spec_of(of) for of in operands)
            if layer is None and (region.kind == "layer" or not is_on_grids):
                continue
            spec = specs[0] if layer is None else layer.spec
            base = region.kind if layer is None else layer.path
            for of in operands:
                if spec_of(of) is None:
                    of_values[of] = spec
                    self._name(of, f"{base}:input", spec)
            of_values[v] = spec
            if (name := level.name_behind(v)) is None:
                self._name(v, base if layer is None else f"{base}:output", spec)
            else:
                self.specs.setdefault(name, spec)

    def _name(self, v: Var, base: str, spec: QuantSpec) -> None:
        self._taken[base] += 1
        self.names[v] = base if self._taken[base] == 1 else f"{base}#{self._taken[base]}"
        self.specs[self.names[v]] = spec


class Fusing(NamedTuple):
    """A program in which values have names, for a runtime.

    Attributes:
      kernels: of the runtime.
      jaxpr: the program.
      data: its arguments that are data.
      paths: of its arguments that are parameters.
    """

    kernels: Kernels
    jaxpr: Jaxpr
    data: Sequence[Var]
    paths: Sequence[str | None]

    def fused(self, decisions: Sequence[Decision]) -> dict[Location, "Fused"]:
        """The way in which the runtime gets each value that rules quantize, by where it is named."""
        of = {decision.contraction.location: decision for decision in decisions}
        found: dict[Location, Fused] = {}
        for location, level in levels(self.jaxpr, self.data, self.kernels.regrids):
            for i, eqn in enumerate(level.jaxpr.eqns):
                at = *location, i
                if at in of and of[at].op.kind == "value":
                    found[at] = self._fused(level, location, eqn, of)
        return _tied(found)

    def left(self, decisions: Sequence[Decision], fused: Mapping[Location, "Fused"]) -> dict[Location, str]:
        """Why no kernel computes an op that rules quantize, by where it is."""
        computed = {of.decision.contraction.location for of in fused.values() if of.decision}
        places = {location: level for location, level in levels(self.jaxpr, self.data, self.kernels.regrids)}
        found = {}
        for decision in decisions:
            at, op = decision.contraction.location, decision.op
            if op.kind in ("value", "closed") or at in computed or not any(of.spec for of in decision.operands):
                continue
            level = places.get(at[:-1])
            if level is None:
                why = "inside a cond, a loop, or a function with a derivative of its own"
            elif op.kind != "weight":
                why = f"no kernel multiplies two values ({op.kind})"
            else:
                dtype = avals(level.jaxpr.eqns[at[-1]].outvars)[0].dtype
                why = str(dtype) if dtype != jnp.float32 else "an operand stays in float"
            found[at] = f"{IN_FLOAT}{why}"
        return found

    def _fused(
        self, level: Level, location: Location, eqn: JaxprEqn, decisions: Mapping[Location, Decision]
    ) -> "Fused":
        (v,) = eqn.invars
        found = level.found(v)
        if found is None:
            return Fused(self.kernels, floats=level.made_by(v) or ARGUMENT)
        region = found.region
        layer = decisions.get((*location, region.at)) if region.kind == "layer" else None
        names = [level.named(level.before_moves(of)) for of in region.operands if of in level.data]
        places = [(*location, name[0]) for name in names if name]
        is_layer = layer is not None and all(choice.spec for choice in layer.operands)
        if region.kind == "layer" and not is_layer:
            return Fused(self.kernels, floats=f"{region.words}, which no rule quantizes")
        if len(places) < len(names) or not all(at in decisions for at in places):
            return Fused(self.kernels, floats=f"{region.words}, of a value without a grid")
        return Fused(self.kernels, region, layer, places=tuple(places), bias=self._path(level, region.bias))

    def _path(self, level: Level, v: Var) -> str | None:
        """The path of a value that is a parameter, perhaps in another shape."""
        paths = dict(zip(self.jaxpr.invars, self.paths, strict=True))
        return None if v is None else paths.get(level.before_moves(v))


class Fused(NamedTuple):
    """The way in which a runtime gets the integers of a named value.

    Attributes:
      kernels: of the runtime.
      region: that one kernel computes; None where it quantizes floats.
      decision: about the contraction of a layer.
      floats: what made the floats, in words.
      places: where the values that it takes were named.
      tied: where the value was named that it has the grid of; None where it has its own.
      bias: the path of the bias of a layer, if it is a parameter.
    """

    kernels: Kernels
    region: Region | None = None
    decision: Decision | None = None
    floats: str = ""
    places: tuple[Location, ...] = ()
    tied: Location | None = None
    bias: str | None = None

    @property
    def values(self) -> Sequence[Any]:
        """The values of the program that its region takes."""
        return self.region.values if self.region else ()

    @property
    def words(self) -> str:
        return self.region.words if self.region else f"{FROM_FLOAT}{self.floats}"

    def integers(self, q: Quantized, v: Array, values: Sequence[Any]) -> Array:
        """The integers of a value, which in float is v, on the grid of q, from those that its region takes."""
        grid = _grid(q)
        if self.region is None:
            return self.kernels.quantize(v, grid, q.values)
        return moved(_KINDS[self.region.kind](self, grid, values), self.region.behind).reshape(v.shape)

    def _layer(self, grid: Grid, values: Sequence[Any]) -> Array:
        region, decision = self.region, self.decision
        assert region is not None
        assert decision is not None
        op, operands = decision.contraction.as_op(), [of.quantized for of in values[:2]]
        side = int(decision.operands[1].is_weight)
        x, w = operands[1 - side], operands[side]
        w_scale = op.in_output(side, w.scale.astype(jnp.float32), [of.shape for of in operands])
        acc, w_scale = _moved(op.accumulated(*operands), w_scale, region.moves, w)
        scales = jnp.reshape(x.scale, ()), w_scale
        if region.bias is not None:
            shape = [1] * acc.ndim
            for axis, n in zip(region.bias_axes, values[2].shape, strict=True):
                shape[axis] = n
            acc = acc + bias_integers(values[2].reshape(shape), *scales)
        return self.kernels.layer(acc, scales, grid, self._limits(grid), isinstance(op, Dot))

    def _add(self, grid: Grid, values: Sequence[Any]) -> Array:
        a, b = (of.quantized for of in values)
        return self.kernels.add(_integers(a), _grid(a), _integers(b), _grid(b), grid, self._limits(grid))

    def _mean(self, grid: Grid, values: Sequence[Any]) -> Array:
        assert self.region is not None
        (x,) = (of.quantized for of in values)
        return self.kernels.mean(_integers(x), tuple(self.region.eqn.params["axes"]), _grid(x), grid)

    def _average(self, grid: Grid, values: Sequence[Any]) -> Array:
        (x,), eqn = (of.quantized for of in values), self._eqn
        count = math.prod(eqn.params["window_dimensions"])
        return self.kernels.average(eqn.primitive.bind(_integers(x), **eqn.params), count, _grid(x), grid)

    def _same(self, grid: Grid, values: Sequence[Any]) -> Array:
        """The integers of a pool of largest values, or of a concatenation, of one grid."""
        return self._eqn.primitive.bind(*(_integers(of.quantized) for of in values), **self._eqn.params)

    @property
    def _eqn(self) -> JaxprEqn:
        assert self.region is not None
        return self.region.eqn

    def _limits(self, grid: Grid) -> Limits | None:
        assert self.region is not None
        low, high = self.region.low, self.region.high
        return None if low is None and high is None else limits_of(grid, low, high)


def _tied(found: Mapping[Location, Fused]) -> dict[Location, Fused]:
    """The same, with the first of all values that have one grid: what a pool or a concatenation takes and gives."""
    first: dict[Location, Location] = {}

    def root(at: Location) -> Location:
        while (at_first := first.get(at, at)) != at:
            at = at_first
        return at

    for at, of in found.items():
        if of.region is not None and of.region.kind in of.kernels.tied:
            roots = [root(place) for place in (*of.places, at)]
            first.update(dict.fromkeys(roots, min(roots)))
    return {at: of._replace(tied=root(at) if root(at) != at else None) for at, of in found.items()}


def with_keys(fused: Mapping[Location, Fused], decisions: Sequence[Decision]) -> dict[Location, Fused]:
    """The same with the decisions about layers as they are once they have keys."""
    of = {decision.contraction.location: decision for decision in decisions}
    keyed = lambda decision: decision and of[decision.contraction.location]
    return {at: one._replace(decision=keyed(one.decision)) for at, one in fused.items()}


def with_room_for_biases(
    qparams: Mapping[str, Any], fused: Mapping[Location, Fused], params: Mapping[str, Any]
) -> dict[str, Any]:
    """The qparams with scales of weights that are large enough for the biases of their channels.

    A dead channel has weights near 0, and a tiny scale, beside which its bias would be clipped.
    """
    found = dict(qparams)
    for of in fused.values():
        if of.decision is None or of.bias is None:
            continue
        side = int(of.decision.operands[1].is_weight)
        (w, *others), (x, *_) = (of.decision.operands[i].keys for i in (side, 1 - side))
        of_w, of_x, bias = found.get(w), found.get(x), params[of.bias]
        if others or not of_w or not of_x or of_w.scale.size not in (1, bias.size):
            continue
        found[w] = of_w._replace(scale=_with_room(of_w.scale, bias, of_x.scale))
    return found


@jax.jit
def _with_room(scale: Array, bias: Array, x_scale: Array) -> Array:
    least = least_scale(bias.astype(jnp.float32).reshape(-1), x_scale.reshape(-1))
    least = jnp.max(least) if scale.size == 1 else least
    return jnp.maximum(scale, least.reshape(scale.shape))


_KINDS = {
    "layer": Fused._layer,
    "add": Fused._add,
    "mean": Fused._mean,
    "average_pool": Fused._average,
    "max_pool": Fused._same,
    "concatenate": Fused._same,
}


def _integers(q: Quantized) -> Array:
    return q.values.astype(jnp.int32)


def _grid(q: Quantized) -> Grid:
    zero = jnp.zeros((), jnp.int32) if q.spec.symmetric else jnp.reshape(q.zero_point, ()).astype(jnp.int32)
    return Grid(jnp.reshape(q.scale, ()).astype(jnp.float32), zero, int(q.spec.qmin), int(q.spec.qmax))


def _moved(acc: Array, scale: Array, moves: Sequence[JaxprEqn], w: Quantized) -> tuple[Array, Array]:
    """An accumulator, and a scale for each of its channels, moved."""
    of = QuantizedParam(Quantized(acc, scale, None, w.spec, jnp.dtype(jnp.float32)), None, None, None, ())
    for eqn in moves:
        (of,) = MOVES[eqn.primitive.name].parameters(eqn, [of])
    return of.quantized.stored, of.quantized.scale
