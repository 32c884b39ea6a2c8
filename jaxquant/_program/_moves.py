# SPDX-License-Identifier: Apache-2.0
"""The primitives of jax that only move values, or cast them: what becomes of axes, of groups and of parameters.

One entry a primitive in MOVES. A walk asks what the origins of its results are, an evaluation what becomes of quantized
parameters; the two halves of an entry must agree, since a plan says of the results what an evaluation then does.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn

from .._arrays._qarray import Scales, changed, scales_of, sums_of
from .._base import _checks as checks
from .._base import _groups as grouping
from .._base._sharding import for_groups, replicated, vary_together
from .._spec._granularity import PerTensor
from ._jaxpr import avals, order_read, param
from ._origin import JOINED, PICKED, Moved, Origin, along_any, computed
from ._param import QuantizedParam, dequantized, ordered, with_sums_of
from ._writes import as_part, is_written, scattered, updated, written_origin


class Move(NamedTuple):
    """What a primitive makes of values.

    Attributes:
      origins: (eqn, origins of the operands) -> those of the results.
      parameters: (eqn, operands, of which some are quantized parameters) -> the results.
      takes: (eqn, operands) -> whether it moves those parameters; if not, they are read in float.
      is_same: whether equal moves of one value are one value in a plan. Not of those with indices or of several values:
        each is an input of its own.
      has_indices: whether all operands but the first are indices, which are read.
      is_write: whether it writes a part anew, which only a cache takes.
    """

    origins: Callable[[JaxprEqn, Sequence[Origin]], Sequence[Origin]]
    parameters: Callable[[JaxprEqn, Sequence[Any]], list[Any]]
    takes: Callable[[JaxprEqn, Sequence[Any]], bool]
    is_same: bool = True
    has_indices: bool = False
    is_write: bool = False


_Axes = tuple[frozenset[int], ...]  # as in Origin
_OfAxes = Callable[[JaxprEqn, _Axes], _Axes]
_OfGroups = Callable[[JaxprEqn, Array, tuple[int, ...], Sequence[Any]], list[Array]]


def one(axes: _OfAxes | None = None, groups: _OfGroups | None = None) -> Move:
    """The move of one value.

    Args:
      axes: (eqn, axes that the value runs along) -> those of each result; None where it keeps them.
      groups: (eqn, values for groups, shape of the value, other operands) -> those of each result; None where the
        primitive itself moves an array of any shape.
    """
    return Move(
        functools.partial(_first, axes),
        functools.partial(_moved, groups),
        lambda eqn, ins: isinstance(ins[0], QuantizedParam),
    )


def _first(axes: _OfAxes | None, eqn: JaxprEqn, ins: Sequence[Origin]) -> list[Origin]:
    origin = ins[0]
    if origin.axes:
        origin = origin._replace(axes=origin.axes if axes is None else axes(eqn, origin.axes))
    if origin.parts:
        origin = origin._replace(moves=_moves(eqn, origin.moves))
    return [origin] * len(eqn.outvars)


_IN_ORDER = {"copy", "name", "stop_gradient", "sharding_constraint", "reshard", "mesh_cast"}
_REORDER = {"transpose", "reshape", "squeeze", "broadcast_in_dim", "rev", "slice"}


def _moves(eqn: JaxprEqn, before: tuple[Moved, ...] | None) -> tuple[Moved, ...] | None:
    name = eqn.primitive.name
    if before is None or name in _IN_ORDER:
        return before
    # A sharding is one of the program's mesh, which need not be there where the moves are made again.
    params = ((key, None if key == "sharding" else v) for key, v in sorted(eqn.params.items()))
    return (*before, Moved(eqn.primitive, tuple(params))) if name in _REORDER else None


def in_order(v: Array, moves: Sequence[Moved], of_turn: Callable[[Array], Array]) -> Array:
    """What `of_turn` makes of an array of a parameter's shape after these moves, in all turns of the scans among them.

    Linear in the array.
    """
    for i, (primitive, params) in enumerate(moves):
        if primitive is None:
            return jax.vmap(lambda turn, rest=moves[i + 1 :]: in_order(turn, rest, of_turn))(v)
        v = primitive.bind(v, **dict(params))
    return of_turn(v)


def _moved(groups: _OfGroups | None, eqn: JaxprEqn, ins: Sequence[Any]) -> list[QuantizedParam]:
    parameter, *rest = ins
    of_values = of_groups = lambda v: _results(eqn, v, *rest)
    if groups is not None:
        parameter, of_groups = ordered(parameter), lambda v: groups(eqn, v, avals(eqn.invars)[0].shape, rest)
    results, sums = parameter.map(of_values, of_groups), sums_of(parameter.quantized)
    of_results = [] if sums is None else of_groups(sums)  # once for all of them

    def result(i: int) -> QuantizedParam:
        part = results.map(operator.itemgetter(i), operator.itemgetter(i))
        return with_sums_of(part, parameter, lambda _: of_results[i])

    return [result(i) for i in range(len(eqn.outvars))]


def _results(eqn: JaxprEqn, *ins: Any, **changes: Any) -> list[Any]:
    params = {**eqn.params, **changes}
    if "fill_value" in params and not jnp.issubdtype(ins[0].dtype, jnp.inexact):
        params["fill_value"] = 0  # integers have no NaN; the scale has
    outs = eqn.primitive.bind(*ins, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


# What becomes of axes and groups, by primitive.


def _transposed_axes(eqn: JaxprEqn, axes: tuple) -> tuple:
    return tuple(axes[i] for i in param(eqn, "permutation"))


def _squeezed_axes(eqn: JaxprEqn, axes: tuple) -> tuple:
    return tuple(of for i, of in enumerate(axes) if i not in param(eqn, "dimensions"))


def _broadcasted_axes(eqn: JaxprEqn, axes: tuple) -> tuple:
    places = param(eqn, "broadcast_dimensions")
    return tuple(axes[places.index(i)] if i in places else frozenset() for i in range(avals(eqn.outvars)[0].ndim))


def _broadcasted(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    places = param(eqn, "broadcast_dimensions")
    return [_placed(eqn, lax.expand_dims(v, [i for i in range(avals(eqn.outvars)[0].ndim) if i not in places]))]


def _reshaped_axes(eqn: JaxprEqn, axes: tuple) -> tuple:
    """Which axes the new ones run along: in runs of equal size, each new axis along all the old ones of its run."""
    order = order_read(eqn)
    old, new = tuple(avals(eqn.invars)[0].shape[i] for i in order), avals(eqn.outvars)[0].shape
    axes = tuple(axes[i] for i in order)
    result = [frozenset[int]()] * len(new)
    for of_old, of_new in grouping.segments(old, new):
        along = [axes[i] for i in of_old if old[i] > 1] or [axes[i] for i in of_old]  # those of size 1 do not count
        for j in [j for j in of_new if new[j] > 1] or of_new:
            result[j] = frozenset().union(*along)
    return tuple(result)


def _reshaped(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    order = order_read(eqn)
    v = replicated(v) if param(eqn, "sharding") is not None else v
    new = grouping.reshaped(lax.transpose(v, order), tuple(shape[i] for i in order), avals(eqn.outvars)[0].shape)
    return [_placed(eqn, new)]


def _placed(eqn: JaxprEqn, v: Array) -> Array:
    """Values for groups where an equation says how its result lies on a mesh."""
    sharding = param(eqn, "sharding")
    return v if sharding is None else jax.sharding.reshard(v, for_groups(sharding, v))


def _unstacked_axes(eqn: JaxprEqn, axes: tuple) -> tuple:
    return tuple(of for i, of in enumerate(axes) if i != param(eqn, "axis"))


def _unstacked(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    axis = param(eqn, "axis")
    if v.shape[axis] == 1:
        return [lax.squeeze(v, [axis])] * shape[axis]
    v = grouping.apart(v, axis, shape[axis])
    return [lax.index_in_dim(v, i, axis, keepdims=False) for i in range(shape[axis])]


def _sliced(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    starts, stops = param(eqn, "start_indices"), param(eqn, "limit_indices")
    strides = param(eqn, "strides") or (1,) * len(shape)
    for axis, bounds in enumerate(zip(shape, starts, stops, strides, strict=True)):
        v = grouping.sliced(v, axis, *bounds)
    return [v]


def _split(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    axis, ends = param(eqn, "axis"), list(itertools.accumulate(param(eqn, "sizes")))
    return [grouping.sliced(v, axis, shape[axis], *bounds) for bounds in itertools.pairwise([0, *ends])]


def _resharded(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    return _results(eqn, v, dst_sharding=for_groups(param(eqn, "dst_sharding"), v))


def _tiled(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    times = [n if v.shape[i] > 1 else 1 for i, n in enumerate(param(eqn, "reps"))]
    return [jnp.tile(v, times)]


# Primitives with indices.


def _picked_origin(eqn: JaxprEqn, ins: Sequence[Origin]) -> list[Origin]:
    return [ins[0]._replace(picked=ins[0].picked or any(index.data for index in ins[1:]), moves=None)]


def _dynamic_slice(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], starts: Sequence[Any]) -> list[Array]:
    for axis, (n, start, size) in enumerate(zip(shape, starts, param(eqn, "slice_sizes"), strict=True)):
        v = grouping.picked(v, axis, n, start, size)
    return [v]


def _gathered_axes(eqn: JaxprEqn, axes: tuple) -> tuple:
    """The axes of what a gather makes: windows run along those of the parameter, each index picks a part of it."""
    numbers = param(eqn, "dimension_numbers")
    gone = *numbers.collapsed_slice_dims, *numbers.operand_batching_dims
    windows = iter([of for i, of in enumerate(axes) if i not in gone])
    ndim = avals(eqn.outvars)[0].ndim
    return tuple(next(windows) if i in numbers.offset_dims else frozenset([PICKED]) for i in range(ndim))


def _gathered_origin(eqn: JaxprEqn, ins: Sequence[Origin]) -> list[Origin]:
    origin, axes = computed(ins), _gathered_axes(eqn, ins[0].axes) if ins[0].axes else ()
    if ins[0].parts:
        origin = origin._replace(gathered=True, parts=ins[0].parts, axes=axes, moves=None, picked=True)
    return [origin if ins[0].cache is None else origin._replace(cache=ins[0].cache, axes=axes)]


def _gathered(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], rest: Sequence[Any]) -> list[Array]:
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


def _on_axis(eqn: JaxprEqn, ins: Sequence[Any], groups: _OfGroups | None = None) -> list[QuantizedParam]:
    """The parameter moved by a primitive that wants values which vary over the axis of the mesh."""
    parameter = ins[0]
    like = parameter.real if parameter.quantized.stored is None else parameter.quantized.stored
    varying = parameter.map(lambda v: v, lambda v: vary_together(v, like)[0])
    return _moved(groups, eqn, [varying, *ins[1:]])


def _of_devices_axes(eqn: JaxprEqn, axes: tuple) -> tuple:
    if param(eqn, "tiled"):
        return axes
    at = param(eqn, "all_gather_dimension")
    return (*axes[:at], frozenset(), *axes[at:])


def _of_devices_origin(eqn: JaxprEqn, ins: Sequence[Origin]) -> list[Origin]:
    # A named value has a range of its own on each device, so that all of it is no value with one range.
    if not ins[0].parts:
        return [ins[0]._replace(points=(), axes=())]
    # What each device has as it was passed is the parameter again.
    whole = () if ins[0].moves == () and param(eqn, "tiled") else None
    return [origin._replace(moves=whole) for origin in _first(_of_devices_axes, eqn, ins)]


def _of_devices(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    axis, is_tiled = param(eqn, "all_gather_dimension"), param(eqn, "tiled")
    if is_tiled and v.shape[axis] == 1 < shape[axis]:  # of all devices
        return [v]
    if not is_tiled and all(n == 1 for n in v.shape):  # of all devices, too: each element along an axis has one else
        return [lax.expand_dims(v, [axis])]
    return _results(eqn, grouping.apart(v, axis, shape[axis]) if is_tiled else v)  # each device has groups of its own


def _is_parameter(eqn: JaxprEqn, ins: Sequence[Any]) -> bool:
    return isinstance(ins[0], QuantizedParam) and not ins[0].is_value


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
    ins = [ordered(v) if isinstance(v, QuantizedParam) else v for v in ins]
    leaves, structure = jax.tree.flatten(ins)
    of = [i for i, v in enumerate(ins) for _ in jax.tree.leaves(v)]  # which operand each leaf is part of
    shapes = [v.shape for v in avals(eqn.invars)]
    each = [(i, leaf, leaf.shape == shapes[i]) for i, leaf in zip(of, leaves, strict=True)]

    def of_each(name: str, values: Any) -> Any:  # of device_put: where to, and how
        if not isinstance(values, tuple | list):
            return values
        # Values for groups have not the shape that a sharding is of.
        of_groups = lambda of, v: for_groups(of, v) if name == "devices" else None if name == "srcs" else of
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
    meaning = lambda q: (vars(q.spec) | {"granularity": None}, [v is None for v in scales_of(q)])
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
    parts = [ordered(v if isinstance(v, QuantizedParam) else as_part(of, v)) for v in ins]
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
    scales = Scales(*(None if v[0] is None else of_groups(v) for v in zip(*map(scales_of, quantized), strict=True)))
    # Of parts that were cast differently the value is rounded once, to what they are now.
    ways = [(part.quantized.dtype, part.casts) for part in parts]
    dtype, casts = ways[0] if all(way == ways[0] for way in ways) else (avals(eqn.outvars)[0].dtype, ())
    joined = QuantizedParam(
        changed(quantized[0], scales, stored=whole([q.stored for q in quantized]), dtype=dtype),
        whole([real(part) for part in parts]) if any(part.real is not None for part in parts) else None,
        whole([part.as_read for part in parts]),
        of_groups([flags(part) for part in parts]) if any(part.nan_flags is not None for part in parts) else None,
        tuple(dict.fromkeys(path for part in parts for path in part.paths)),
        casts,
        is_cache=of.is_cache,
    )
    return [joined]


MOVES: dict[str, Move] = {
    "transpose": one(_transposed_axes, lambda eqn, v, shape, _: [lax.transpose(v, param(eqn, "permutation"))]),
    "reshape": one(_reshaped_axes, _reshaped),
    "squeeze": one(_squeezed_axes, lambda eqn, v, shape, _: [lax.squeeze(v, param(eqn, "dimensions"))]),
    "broadcast_in_dim": one(_broadcasted_axes, _broadcasted),
    "unstack": one(_unstacked_axes, _unstacked),
    # The axes of these stay, with some of the elements, or in another order.
    "rev": one(groups=lambda eqn, v, shape, _: [lax.rev(v, param(eqn, "dimensions"))]),
    "slice": one(groups=_sliced),
    "split": one(groups=_split),
    "tile": one(groups=_tiled),
    "dynamic_slice": one(groups=_dynamic_slice)._replace(origins=_picked_origin, is_same=False, has_indices=True),
    "gather": one(groups=_gathered)._replace(origins=_gathered_origin, is_same=False, has_indices=True),
    # These take an array of any shape, and leave it as it is.
    "copy": one(),
    "name": one(),  # whose origin has the name, too: `Walk.named`
    "stop_gradient": one(),
    "pvary": one()._replace(origins=_each),  # several values in older versions of jax
    "pcast": one()._replace(origins=_each),
    "ppermute": one()._replace(parameters=_on_axis),
    "all_gather": Move(_of_devices_origin, functools.partial(_on_axis, groups=_of_devices), _is_parameter),
    **dict.fromkeys(("convert_element_type", "reduce_precision"), Move(_cast_origin, _cast, _is_cast)),
    **dict.fromkeys(("optimization_barrier", "device_put"), Move(_each, _together, lambda eqn, ins: True)),
    **dict.fromkeys(("concatenate", "stack"), Move(_joined_origin, _joined, _are_joined, is_same=False)),
    **{
        name: Move(written_origin, write, is_written, is_same=False, has_indices=True, is_write=True)
        for name, write in {"dynamic_update_slice": updated, "scatter": scattered}.items()
    },
    # A sharding is one of the shape of the value, which the arrays for its groups have not.
    "sharding_constraint": one(groups=lambda eqn, v, shape, _: [v]),
    **dict.fromkeys(("reshard", "mesh_cast"), one(groups=_resharded)),
}
