# SPDX-License-Identifier: Apache-2.0
"""The primitives of jax that only move values, or cast them: what becomes of axes, of groups and of parameters.

One entry a primitive in MOVES, which says how the axes of a value become the axes of results: in runs. The origins that
a walk follows, the scales that an evaluation moves, and the factors and channels of `solve/_graph` are derived from it.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn

from .._arrays._quantized import Quantized
from .._base import _checks as checks
from .._base import _groups as grouping
from .._base._sharding import replicated, vary_together
from .._spec._granularity import PerTensor
from ._jaxpr import Equation, avals, order_read, param
from ._origin import JOINED, PICKED, Moved, Origin, along_any, computed
from ._param import Pending, QuantizedParam, Unquantized, dequantized
from ._writes import as_part, is_written, scattered, updated, written_origin


class Run(NamedTuple):
    """Axes of an operand that become axes of a result, row by row: each run of axes moves on its own.

    Attributes:
      old: axes of the operand, in the order in which they are read; none where the new ones hold copies.
      new: axes of the result, next to each other; none where one element is left.
      cut: which elements of one axis are there, (start, stop, stride); stride -1 is all of them backwards. None is all.
      times: how often the elements of one axis stand there, one after the other.
      is_picked: whether indices say which elements.
    """

    old: tuple[int, ...]
    new: tuple[int, ...]
    cut: tuple[int, int, int] | None = None
    times: int = 1
    is_picked: bool = False


class Move(NamedTuple):
    """The entry of a primitive that moves values.

    Attributes:
      how: "moves" and "picks", by indices, are of one value; "each" of several, each of which it gives; "joins" puts
        several side by side; "casts" leaves integers as they are; "devices" is between these; "writes" a part anew,
        which only a cache takes.
      runs: eqn -> of each result the runs of the first operand's axes; None where that is not how it moves.
      origins: (eqn, origins of the operands) -> those of the results.
      parameters: (eqn, operands, of which some are quantized parameters) -> the results.
      takes: (eqn, operands) -> whether it moves those parameters; if not, they are read in float.
    """

    how: Literal["moves", "picks", "each", "joins", "casts", "devices", "writes"]
    runs: Callable[[JaxprEqn], Sequence[Sequence[Run]]] | None
    origins: Callable[[JaxprEqn, Sequence[Origin]], Sequence[Origin]]
    parameters: Callable[[JaxprEqn, Sequence[Any]], list[Any]]
    takes: Callable[[JaxprEqn, Sequence[Any]], bool]

    @property
    def is_same(self) -> bool:
        """Whether equal moves of one value are one value in a plan. With indices, or several, each is its own input."""
        return self.how not in ("picks", "joins", "writes")

    @property
    def has_indices(self) -> bool:
        """Whether all operands but the first are indices, which are read."""
        return self.how in ("picks", "writes")


_Runs = Callable[[JaxprEqn], Sequence[Sequence[Run]]]
_Axes = tuple[frozenset[int], ...]  # as in Origin
_OfGroups = Callable[[JaxprEqn, Array, tuple[int, ...], Sequence[Any]], list[Array]]


def one(runs: _Runs | None = None, groups: _OfGroups | None = None) -> Move:
    """The move of one value, which is all that there is to say of its primitive.

    Args:
      runs: eqn -> of each result how the axes of the value become its axes; None where it keeps them.
      groups: (eqn, values for groups, shape of the value, other operands) -> those of each result, where these do not
        follow from the runs. Without both, the primitive itself moves an array of any shape.
    """
    of_groups = groups or (runs and functools.partial(_by_runs, runs))
    return Move(
        "moves",
        runs or _in_place,
        functools.partial(_first, runs),
        functools.partial(_moved, of_groups),
        lambda eqn, ins: isinstance(ins[0], QuantizedParam),
    )


def _in_place(eqn: JaxprEqn) -> list[list[Run]]:
    return [[Run((i,), (i,)) for i in range(avals(eqn.invars)[0].ndim)]]


def _first(runs: _Runs | None, eqn: JaxprEqn, ins: Sequence[Origin]) -> list[Origin]:
    origin = ins[0]
    if origin.parts:
        origin = origin._replace(moves=_moves(eqn, origin.moves, runs))
    if runs is None or not origin.axes:
        return [origin] * len(eqn.outvars)
    each = zip(runs(eqn), avals(eqn.outvars), strict=True)
    return [origin._replace(axes=_axes(of, origin.axes, avals(eqn.invars)[0].shape, out.shape)) for of, out in each]


def _axes(runs: Sequence[Run], axes: _Axes, old: tuple[int, ...], new: tuple[int, ...]) -> _Axes:
    """The axes of parameters that the axes of a result run along: all of their run, but those of size 1."""
    result = [frozenset[int]()] * len(new)
    for run in runs:
        along = [axes[i] for i in run.old if old[i] not in (0, 1)] or [axes[i] for i in run.old]
        for j in [j for j in run.new if new[j] not in (0, 1)] or run.new:
            result[j] = frozenset([PICKED] if run.is_picked and not run.old else []).union(*along)
    return tuple(result)


def _moves(eqn: JaxprEqn, before: tuple[Moved, ...] | None, runs: _Runs | None) -> tuple[Moved, ...] | None:
    if before is None or runs is None:
        return before
    of_results = runs(eqn)
    if len(of_results) > 1 or any(run.times > 1 for run in of_results[0]):
        return None
    # A sharding is one of the program's mesh, which need not be there where the moves are made again.
    params = ((key, None if key == "sharding" else v) for key, v in sorted(eqn.params.items()))
    return (*before, Moved(eqn.primitive, tuple(params)))


def in_order(v: Array, moves: Sequence[Moved], of_turn: Callable[[Array], Array]) -> Array:
    """Applies `of_turn` to an array of a parameter's shape after these moves, in all iterations of their scans.

    Linear in the array.
    """
    for i, move in enumerate(moves):
        if move.primitive is None:
            return jax.vmap(lambda turn, rest=moves[i + 1 :]: in_order(turn, rest, of_turn))(v)
        v = move.primitive.bind(v, **dict(move.params))
    return of_turn(v)


def takes_unquantized(eqn: JaxprEqn, v: Unquantized, is_alone: bool) -> bool:
    """Whether a primitive, perhaps the only one, moves a value that is still to be quantized, or casts it."""
    move = MOVES.get(eqn.primitive.name)
    if move is None or move.how == "casts":
        return move is not None and is_alone and jnp.issubdtype(avals(eqn.outvars)[0].dtype, jnp.floating)
    if _layers(eqn, v) is not None:
        return True
    is_plain = move.how == "moves" and move.runs is not None and len(eqn.outvars) == 1
    return is_alone and is_plain and eqn.params.get("sharding") is None


def unquantized(eqn: JaxprEqn, ins: Sequence[Any]) -> list[Unquantized]:
    """The results of such a primitive, which are still to be quantized."""
    v, *rest = ins
    move, found = MOVES[eqn.primitive.name], _layers(eqn, v)
    if found is None:
        return [v.then(Pending(Equation.of(eqn), move.parameters, move.how == "casts"))]
    taken, axes = found
    return v.apart(taken).parts(lambda parameter: move.parameters(eqn, [parameter, *rest]), axes)


def _layers(eqn: JaxprEqn, v: Unquantized) -> tuple[set[int], list[list[int]]] | None:
    """The axes along which a move takes layers of a stack, and for each result the axes that its axes run along."""
    move = MOVES[eqn.primitive.name]
    if move.how not in ("moves", "picks") or move.runs is None:
        return None
    results = move.runs(eqn)
    runs = [run for runs in results for run in runs]
    is_whole = lambda run: len(run.old) == len(run.new) == 1 and not run.cut and not run.is_picked
    taken = {i for run in runs if not is_whole(run) for i in run.old}
    if not taken or not v.is_stack(taken) or any(not run.old or run.times > 1 for run in runs):
        return None
    axes = [[run.old[0] for run in sorted(runs, key=lambda run: run.new) for _ in run.new] for runs in results]
    is_in_order = all(of == sorted(of) for of in axes) and not any(run.cut and run.cut[2] < 0 for run in runs)
    return (taken, axes) if is_in_order else None


def _moved(groups: _OfGroups | None, eqn: JaxprEqn, ins: Sequence[Any]) -> list[QuantizedParam]:
    parameter, *rest = ins
    of_values = of_groups = lambda v: _results(eqn, v, *rest)
    if groups is not None:
        parameter, of_groups = parameter.ordered(), lambda v: groups(eqn, v, avals(eqn.invars)[0].shape, rest)
    return parameter.moves(of_values, of_groups, len(eqn.outvars))


def _results(eqn: JaxprEqn, *ins: Any, **changes: Any) -> list[Any]:
    params = {**eqn.params, **changes}
    if "fill_value" in params and not jnp.issubdtype(ins[0].dtype, jnp.inexact):
        params["fill_value"] = 0  # integers have no NaN; the scale has
    outs = eqn.primitive.bind(*ins, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _by_runs(runs: _Runs, eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    sharding = eqn.params.get("sharding")
    v = v if sharding is None else replicated(v)
    made = [_regrouped(v, of, shape, out.shape) for of, out in zip(runs(eqn), avals(eqn.outvars), strict=True)]
    return made if sharding is None else [jax.sharding.reshard(new, _for_groups(sharding, new)) for new in made]


def _regrouped(v: Array, runs: Sequence[Run], old: tuple[int, ...], new: tuple[int, ...]) -> Array:
    """Values for groups of a value of shape `old`, in the runs that make it one of shape `new`."""
    for run in runs:
        if run.cut and run.cut[2] < 0:
            v = lax.rev(v, run.old)
        elif run.cut:
            v = grouping.sliced(v, run.old[0], old[run.old[0]], *run.cut)
        elif run.times > 1 and v.shape[run.old[0]] > 1:
            v = lax.concatenate([v] * run.times, run.old[0])
    order = [i for run in runs for i in run.old]
    ends = list(itertools.accumulate((len(run.old) for run in runs), initial=0))
    pairs = [(range(*bounds), run.new) for bounds, run in zip(itertools.pairwise(ends), runs, strict=True)]
    return grouping.reshaped(lax.transpose(v, order), [old[i] for i in order], new, pairs)


# The runs of primitives.


def _transposed(eqn: JaxprEqn) -> list[list[Run]]:
    return [[Run((i,), (j,)) for j, i in enumerate(param(eqn, "permutation"))]]


def _reshaped(eqn: JaxprEqn) -> list[list[Run]]:
    order = order_read(eqn)
    old, new = tuple(avals(eqn.invars)[0].shape[i] for i in order), avals(eqn.outvars)[0].shape
    return [[Run(tuple(order[i] for i in of), tuple(to)) for of, to in grouping.segments(old, new)]]


def _squeezed(eqn: JaxprEqn) -> list[list[Run]]:
    gone, left = param(eqn, "dimensions"), itertools.count()
    return [[Run((i,), () if i in gone else (next(left),)) for i in range(avals(eqn.invars)[0].ndim)]]


def _broadcasted(eqn: JaxprEqn) -> list[list[Run]]:
    places = param(eqn, "broadcast_dimensions")
    old = lambda j: (places.index(j),) if j in places else ()
    return [[Run(old(j), (j,)) for j in range(avals(eqn.outvars)[0].ndim)]]


def _reversed(eqn: JaxprEqn) -> list[list[Run]]:
    back = {i: (0, avals(eqn.invars)[0].shape[i], -1) for i in param(eqn, "dimensions")}
    return [_cut(eqn, back)]


def _cut(eqn: JaxprEqn, cuts: Mapping[int, tuple[int, int, int]]) -> list[Run]:
    """The runs of what is cut along some axes, and stays along the others."""
    return [
        Run((i,), (i,), None if cuts.get(i) == (0, n, 1) else cuts.get(i))
        for i, n in enumerate(avals(eqn.invars)[0].shape)
    ]


def _sliced(eqn: JaxprEqn) -> list[list[Run]]:
    starts, stops = param(eqn, "start_indices"), param(eqn, "limit_indices")
    strides = param(eqn, "strides") or (1,) * len(starts)
    return [_cut(eqn, dict(enumerate(zip(starts, stops, strides, strict=True))))]


def _split(eqn: JaxprEqn) -> list[list[Run]]:
    ends = itertools.accumulate(param(eqn, "sizes"), initial=0)
    return [_cut(eqn, {param(eqn, "axis"): (*bounds, 1)}) for bounds in itertools.pairwise(ends)]


def _unstacked(eqn: JaxprEqn) -> list[list[Run]]:
    at, ndim = param(eqn, "axis"), avals(eqn.invars)[0].ndim
    rest = [Run((i,), (i - (i > at),)) for i in range(ndim) if i != at]
    return [[Run((at,), (), (k, k + 1, 1)), *rest] for k in range(len(eqn.outvars))]


def _tiled(eqn: JaxprEqn) -> list[list[Run]]:
    return [[Run((i,), (i,), times=n) for i, n in enumerate(param(eqn, "reps"))]]


def _dynamically_sliced(eqn: JaxprEqn) -> list[list[Run]]:
    sizes = zip(avals(eqn.invars)[0].shape, param(eqn, "slice_sizes"), strict=True)
    return [[Run((i,), (i,), is_picked=n != size) for i, (n, size) in enumerate(sizes)]]


def _gathered(eqn: JaxprEqn) -> list[list[Run]]:
    """Windows run along axes of the operand; each index, along the other axes, picks a part of it."""
    numbers, sizes = param(eqn, "dimension_numbers"), param(eqn, "slice_sizes")
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    places, picked = iter(numbers.offset_dims), gone.union(numbers.start_index_map)
    shape, new = avals(eqn.invars)[0].shape, range(avals(eqn.outvars)[0].ndim)
    of_indices = [Run((), (j,), is_picked=True) for j in new if j not in numbers.offset_dims]
    return [[
        *(Run((i,), () if i in gone else (next(places),), is_picked=i in picked or sizes[i] != n)
          for i, n in enumerate(shape)),
        *of_indices,
    ]]  # fmt: skip


def _resharded(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    return _results(eqn, v, dst_sharding=_for_groups(param(eqn, "dst_sharding"), v))


# Primitives with indices.


def _picked_origin(eqn: JaxprEqn, ins: Sequence[Origin]) -> list[Origin]:
    return [ins[0]._replace(picked=ins[0].picked or any(index.data for index in ins[1:]), moves=None)]


def _groups_of_slice(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], starts: Sequence[Any]) -> list[Array]:
    for axis, (n, start, size) in enumerate(zip(shape, starts, param(eqn, "slice_sizes"), strict=True)):
        v = grouping.picked(v, axis, n, start, size)
    return [v]


def _gathered_origin(eqn: JaxprEqn, ins: Sequence[Origin]) -> list[Origin]:
    origin, axes = computed(ins), _first(_gathered, eqn, ins)[0].axes
    if ins[0].parts:
        origin = origin._replace(gathered=True, parts=ins[0].parts, axes=axes, moves=None, picked=True)
    return [origin if ins[0].cache is None else origin._replace(cache=ins[0].cache, axes=axes)]


def _groups_of_gather(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], rest: Sequence[Any]) -> list[Array]:
    numbers, sizes = param(eqn, "dimension_numbers"), list(param(eqn, "slice_sizes"))
    fills = param(eqn, "mode") == lax.GatherScatterMode.FILL_OR_DROP
    for axis, n in enumerate(shape):
        shared = v.shape[axis] == 1 and not fills
        if axis in numbers.operand_batching_dims or (axis in numbers.start_index_map and not shared):
            v = grouping.apart(v, axis, n)
        elif axis in numbers.start_index_map:
            sizes[axis] = 1
        else:
            v = grouping.sliced(v, axis, n, 0, sizes[axis])
            sizes[axis] = v.shape[axis]
    # An index out of range gives NaN where the gather of floats does: of a scale the fill is NaN, too.
    mode = param(eqn, "mode") if fills else lax.GatherScatterMode.CLIP  # of an axis of size 1 every index is the first
    return _results(eqn, v, *rest, slice_sizes=tuple(sizes), mode=mode)


# Primitives between devices.


def _permuted_origin(eqn: JaxprEqn, ins: Sequence[Origin]) -> list[Origin]:
    return [ins[0]._replace(moves=None)]


def _on_axis(eqn: JaxprEqn, ins: Sequence[Any], groups: _OfGroups | None = None) -> list[QuantizedParam]:
    """The parameter moved by a primitive that wants values which vary over the axis of the mesh."""
    parameter = ins[0]
    like = parameter.real if parameter.quantized.stored is None else parameter.quantized.stored
    varying = parameter.move(lambda v: v, lambda v: vary_together(v, like)[0])
    return _moved(groups, eqn, [varying, *ins[1:]])


def _from_devices(eqn: JaxprEqn) -> list[list[Run]]:
    at, is_tiled = param(eqn, "all_gather_dimension"), param(eqn, "tiled")
    own = [Run((i,), (i + (not is_tiled and i >= at),)) for i in range(avals(eqn.invars)[0].ndim)]
    return [own if is_tiled else [*own, Run((), (at,))]]


def _of_devices_origin(eqn: JaxprEqn, ins: Sequence[Origin]) -> list[Origin]:
    # A named value has a range of its own on each device, so that all of it is no value with one range.
    if not ins[0].parts:
        return [ins[0]._replace(points=(), axes=())]
    # What each device has as it was passed is the parameter again.
    whole = () if ins[0].moves == () and param(eqn, "tiled") else None
    return [origin._replace(moves=whole) for origin in _first(_from_devices, eqn, ins)]


def _of_devices(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    axis, is_tiled = param(eqn, "all_gather_dimension"), param(eqn, "tiled")
    if is_tiled and v.shape[axis] == 1 < shape[axis]:  # of all devices
        return [v]
    if not is_tiled and all(n == 1 for n in v.shape):  # of all devices, too: each element along an axis has one else
        return [lax.expand_dims(v, [axis])]
    return _results(eqn, grouping.apart(v, axis, shape[axis]) if is_tiled else v)  # each device has groups of its own


def _is_parameter(eqn: JaxprEqn, ins: Sequence[Any]) -> bool:
    return isinstance(ins[0], QuantizedParam) and not ins[0].is_value


def _for_groups(sharding: Any, v: Array) -> Any:
    """The sharding of an array, as values `v` for its groups have it: whole where one is shared by several parts."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    mesh = sharding.mesh
    parts = lambda axis: math.prod(mesh.shape[name] for name in ((axis,) if isinstance(axis, str) else axis or ()))
    spec = (*sharding.spec, *[None] * (v.ndim - len(sharding.spec)))
    fits = (axis if n > 1 and n % parts(axis) == 0 else None for axis, n in zip(spec, v.shape, strict=True))
    return jax.sharding.NamedSharding(mesh, jax.P(*fits), memory_kind=sharding.memory_kind)


# Casts, which leave integers as they are.


def _cast_origin(eqn: JaxprEqn, ins: Sequence[Origin]) -> list[Origin]:
    # A parameter keeps its path, so that errors name it where a cast to integers reads it in float. A named value has
    # no range of its own after such a cast, nor after one to floats of 8 bits, which have another.
    keeps = ins[0].parts or checks.is_float(avals(eqn.outvars)[0].dtype)
    return [ins[0] if keeps else ins[0]._replace(points=())]


def _cast(eqn: JaxprEqn, ins: Sequence[Any]) -> list[QuantizedParam]:
    casts = (*ins[0].casts, (eqn.primitive, tuple(eqn.params.items())))
    return [dataclasses.replace(ins[0].map_floats(lambda v: _results(eqn, v)[0]), casts=casts)]


def _is_cast(eqn: JaxprEqn, ins: Sequence[Any]) -> bool:
    return isinstance(ins[0], QuantizedParam) and jnp.issubdtype(avals(eqn.outvars)[0].dtype, jnp.floating)


# Primitives of several values that give each.


def _each(eqn: JaxprEqn, ins: Sequence[Origin]) -> Sequence[Origin]:
    return ins


def _together(eqn: JaxprEqn, ins: Sequence[Any]) -> list[Any]:
    """The values that a primitive takes and gives, where each array of a parameter is one more of them."""
    ins = [v.ordered() if isinstance(v, QuantizedParam) else v for v in ins]
    leaves, structure = jax.tree.flatten(ins)
    of = [i for i, v in enumerate(ins) for _ in jax.tree.leaves(v)]  # which operand each leaf is part of
    shapes = [v.shape for v in avals(eqn.invars)]
    each = [(i, leaf, leaf.shape == shapes[i]) for i, leaf in zip(of, leaves, strict=True)]

    def of_each(name: str, values: Any) -> Any:  # of device_put: where to, and how
        if not isinstance(values, tuple | list):
            return values
        # Values for groups have not the shape that a sharding is of.
        of_groups = lambda of, v: _for_groups(of, v) if name == "devices" else None if name == "srcs" else of
        return tuple(values[i] if is_whole else of_groups(values[i], v) for i, v, is_whole in each)

    params = {name: of_each(name, values) for name, values in eqn.params.items()}
    return jax.tree.unflatten(structure, eqn.primitive.bind(*leaves, **params))


# Primitives that put values side by side.


def _joined_axes(eqn: JaxprEqn, axes: _Axes) -> _Axes:
    """The axes of what stands side by side, of which each runs along these."""
    axis, is_new = param(eqn, "dimension", "axis"), eqn.primitive.name == "stack"
    along = frozenset() if is_new else frozenset().union(*axes[axis : axis + 1])
    return (*axes[:axis], along | {JOINED}, *axes[axis + (not is_new) :]) if axes else ()


def _joined_origin(eqn: JaxprEqn, ins: Sequence[Origin]) -> list[Origin]:
    """The origin of parameters side by side, if they lie alike; or of parts of one cache, or such and what is new."""
    caches = [origin for origin in ins if origin.cache is not None]
    if caches and len({origin.cache for origin in caches}) == 1:
        return [caches[0]._replace(axes=_joined_axes(eqn, along_any(caches)))]
    first = ins[0].axes
    if any(not origin.weights or origin.axes != first for origin in ins):
        return [computed(ins)]
    axes = _joined_axes(eqn, first)
    parts = dict.fromkeys(part for origin in ins for part in origin.parts)
    params, picked = frozenset().union(*(origin.params for origin in ins)), any(origin.picked for origin in ins)
    return [Origin(params, parts=tuple(parts), axes=axes, moves=None, picked=picked)]


def _is_like(a: QuantizedParam, b: QuantizedParam) -> bool:
    """Whether the integers of two have one meaning, so that one array can hold them."""
    meaning = lambda q: (vars(q.spec) | {"granularity": None}, q.zero_point is None, q.tensor_scale is None)
    return meaning(a.quantized) == meaning(b.quantized)


def _are_joined(eqn: JaxprEqn, ins: Sequence[Any]) -> bool:
    of = [v for v in ins if isinstance(v, QuantizedParam)]
    if any(v.is_cache for v in of):  # beside which floats stand that are quantized now
        return all(v.is_cache and not v.casts and v.paths == of[0].paths for v in of)
    return all(isinstance(v, QuantizedParam) and not v.is_value and _is_like(v, ins[0]) for v in ins)


def _joined(eqn: JaxprEqn, ins: Sequence[Any]) -> list[QuantizedParam]:
    is_new, axis, shapes = eqn.primitive.name == "stack", param(eqn, "dimension", "axis"), avals(eqn.invars)
    shapes = [v.shape for v in shapes]
    of = next(v for v in ins if isinstance(v, QuantizedParam))
    parts = [(v if isinstance(v, QuantizedParam) else as_part(of, v)).ordered() for v in ins]
    has_one_scale = of.is_cache and of.quantized.spec.granularity == PerTensor()  # which stays, in all parts

    def of_groups(values: Sequence[Array]) -> Array:
        if has_one_scale:
            return lax.expand_dims(values[0], [axis]) if is_new else values[0]
        if not is_new:
            return grouping.joined(values, shapes, axis)
        wide = [(*shape[:axis], 1, *shape[axis:]) for shape in shapes]
        return grouping.joined([lax.expand_dims(v, [axis]) for v in values], wide, axis)

    def real(part: QuantizedParam) -> Array:  # of integers among parameters that are trained
        return part.cast(dequantized(part)) if part.real is None else part.real

    def whole(values: Sequence[Any]) -> Any:
        return None if any(v is None for v in values) else _results(eqn, *values)[0]

    def flags(part: QuantizedParam) -> Array:
        return jnp.zeros([1] * len(shapes[0]), jnp.float32) if part.nan_flags is None else part.nan_flags

    quantized = [part.quantized for part in parts]
    columns = ([getattr(q, name) for q in quantized] for name in ("scale", "zero_point", "tensor_scale"))
    scale, zero_point, tensor_scale = (None if of[0] is None else of_groups(of) for of in columns)
    # Of parts that were cast differently the value is rounded once, to what they are now.
    ways = [(part.quantized.dtype, part.casts) for part in parts]
    dtype, casts = ways[0] if all(way == ways[0] for way in ways) else (avals(eqn.outvars)[0].dtype, ())
    stored = whole([q.stored for q in quantized])
    joined = QuantizedParam(
        Quantized(stored, scale, zero_point, quantized[0].spec, dtype, tensor_scale=tensor_scale),
        whole([real(part) for part in parts]) if any(part.real is not None for part in parts) else None,
        whole([part.as_read for part in parts]),
        of_groups([flags(part) for part in parts]) if any(part.nan_flags is not None for part in parts) else None,
        tuple(dict.fromkeys(path for part in parts for path in part.paths)),
        casts,
        form=of.form,
    )
    return [joined]


def _picks(runs: _Runs, groups: _OfGroups, origins: Callable[[JaxprEqn, Sequence[Origin]], list[Origin]]) -> Move:
    return one(runs, groups)._replace(how="picks", origins=origins)


_EACH = Move("each", None, _each, _together, lambda eqn, ins: True)

MOVES: dict[str, Move] = {
    "transpose": one(_transposed),
    "reshape": one(_reshaped),
    "squeeze": one(_squeezed),
    "broadcast_in_dim": one(_broadcasted),
    "rev": one(_reversed),
    "slice": one(_sliced),
    "split": one(_split),
    "unstack": one(_unstacked),
    "tile": one(_tiled),
    "dynamic_slice": _picks(_dynamically_sliced, _groups_of_slice, _picked_origin),
    "gather": _picks(_gathered, _groups_of_gather, _gathered_origin),
    # These take an array of any shape, and leave it as it is.
    "copy": one(),
    "name": one(),  # whose origin has the name, too: `Walk.named`
    "stop_gradient": one(),
    # A sharding is one of the shape of the value, which the arrays for its groups have not.
    "sharding_constraint": one(groups=lambda eqn, v, shape, _: [v]),
    **dict.fromkeys(("reshard", "mesh_cast"), one(groups=_resharded)),
    **dict.fromkeys(("pvary", "pcast"), one()._replace(how="each", origins=_each)),  # several in older versions of jax
    **dict.fromkeys(("optimization_barrier", "device_put"), _EACH),
    **dict.fromkeys(("convert_element_type", "reduce_precision"), Move("casts", None, _cast_origin, _cast, _is_cast)),
    **dict.fromkeys(("concatenate", "stack"), Move("joins", None, _joined_origin, _joined, _are_joined)),
    "ppermute": one()._replace(how="devices", origins=_permuted_origin, parameters=_on_axis),
    "all_gather": Move(
        "devices", None, _of_devices_origin, functools.partial(_on_axis, groups=_of_devices), _is_parameter
    ),
    **{
        name: Move("writes", None, written_origin, write, is_written)
        for name, write in {"dynamic_update_slice": updated, "scatter": scattered}.items()
    },
}
