# SPDX-License-Identifier: Apache-2.0
"""A quantized parameter on its way to the ops that use it: it travels with its qparams."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

from .. import _groups as grouping
from .._affine import real_values
from .._qarray import QArray, Scales, changed, scales_of
from .._sharding import vary_together
from ._program import avals, param


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["quantized", "real", "as_read", "nan_flags"],
    meta_fields=["paths", "casts", "is_value"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedParam:
    """A parameter, or a named value, or a part of it: what moves it moves integers, real values and scales alike.

    Attributes:
      quantized: its integers, which no cast changes, and their scales, all of its rank. `stored` is None where no op
        reads them, `zero_point` where it is known to be 0, all scales where there are none. The spec is that of the
        parameter; of a part the granularity is another, which the shape of the scales says.
      real: its real values, as ops that contract it differentiate them; casts round them. None of integers alone.
      as_read: its values for what else reads it, if anything does and they are others.
      nan_flags: for its groups, NaN where one of their values was; None where none can be.
      paths: of the parameter; of several that were concatenated, all.
      casts: what casts it has been through: the primitives and their parameters.
      is_value: whether it is a named value, which has a range of its own on each device.
    """

    quantized: QArray
    real: Array | None
    as_read: Array | None
    nan_flags: Array | None
    paths: tuple[str, ...]
    casts: tuple[tuple[Any, tuple[tuple[str, Any], ...]], ...] = ()
    is_value: bool = False

    def map(self, of_values: Callable[[Any], Any], of_groups: Callable[[Any], Any]) -> "QuantizedParam":
        """The parameter with other values, of each array of its shape, and of each that has a value for a group."""
        scales = scales_of(self.quantized).map(of_groups)
        quantized = changed(self.quantized, stored=_of(of_values, self.quantized.stored), **scales._asdict())
        moved = dataclasses.replace(self, quantized=quantized, nan_flags=_of(of_groups, self.nan_flags))
        return moved.map_floats(of_values)

    def map_floats(self, f: Callable[[Any], Any]) -> "QuantizedParam":
        """The parameter with `f` of its real values."""
        return dataclasses.replace(self, real=_of(f, self.real), as_read=_of(f, self.as_read))

    def cast(self, x: Array) -> Array:
        """Values of the parameter through the casts that it has been through."""
        for primitive, params in self.casts:
            x = primitive.bind(x, **dict(params))
        return x


def _of(f: Callable[[Any], Any], v: Any) -> Any:
    return None if v is None else f(v)


# To floats alone.
_CASTS = ("convert_element_type", "reduce_precision")
# To all, in any shape.
_PASSING = ("name", "copy", "stop_gradient", "pvary", "pcast", "ppermute")
# To any number of values at once.
_TOGETHER = ("optimization_barrier", "device_put")
# Of which a value is what is computed from it: it has a range of its own.
_OF_PARAMETERS = ("concatenate", "stack", "all_gather")
# To what has the shape of the parameter, or to its groups with the axes of size 1 whole.
_SHARDING = ("sharding_constraint", "reshard", "mesh_cast")


def _results(eqn: JaxprEqn, *ins: Any, **changes: Any) -> list[Any]:
    params = {**eqn.params, **changes}
    if "fill_value" in params and not jnp.issubdtype(ins[0].dtype, jnp.inexact):
        params["fill_value"] = 0  # integers have no NaN; the scale has
    outs = eqn.primitive.bind(*ins, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _sliced(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    starts, stops = param(eqn, "start_indices"), param(eqn, "limit_indices")
    strides = param(eqn, "strides") or (1,) * len(shape)
    for axis, bounds in enumerate(zip(shape, starts, stops, strides, strict=True)):
        v = grouping.sliced(v, axis, *bounds)
    return [v]


def _split(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    axis, ends = param(eqn, "axis"), list(itertools.accumulate(param(eqn, "sizes")))
    return [grouping.sliced(v, axis, shape[axis], *bounds) for bounds in itertools.pairwise([0, *ends])]


def _unstacked(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    axis = param(eqn, "axis")
    if v.shape[axis] == 1:
        return [lax.squeeze(v, [axis])] * shape[axis]
    v = grouping.apart(v, axis, shape[axis])
    return [lax.index_in_dim(v, i, axis, keepdims=False) for i in range(shape[axis])]


def _dynamic_slice(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], starts: Sequence[Any]) -> list[Array]:
    for axis, (n, start, size) in enumerate(zip(shape, starts, param(eqn, "slice_sizes"), strict=True)):
        v = grouping.picked(v, axis, n, start, size)
    return [v]


def _tiled(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    times = [n if v.shape[i] > 1 else 1 for i, n in enumerate(param(eqn, "reps"))]
    return [jnp.tile(v, times)]


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


def _all_gathered(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], _: Sequence[Any]) -> list[Array]:
    axis, is_tiled = param(eqn, "all_gather_dimension"), param(eqn, "tiled")
    if is_tiled and v.shape[axis] == 1 < shape[axis]:  # of all devices
        return [v]
    if not is_tiled and all(n == 1 for n in v.shape):  # of all devices, too: each element along an axis has one else
        return [lax.expand_dims(v, [axis])]
    return _results(eqn, grouping.apart(v, axis, shape[axis]) if is_tiled else v)  # each device has groups of its own


_Move = Callable[[JaxprEqn, Array, tuple[int, ...], Sequence[Any]], list[Array]]
_OF_GROUPS: dict[str, _Move] = {
    "transpose": lambda eqn, v, shape, _: [lax.transpose(v, param(eqn, "permutation"))],
    "reshape": lambda eqn, v, shape, _: [grouping.reshaped(v, shape, avals(eqn.outvars)[0].shape)],
    "squeeze": lambda eqn, v, shape, _: [lax.squeeze(v, param(eqn, "dimensions"))],
    "broadcast_in_dim": lambda eqn, v, shape, _: [
        grouping.broadcasted(v, avals(eqn.outvars)[0].ndim, param(eqn, "broadcast_dimensions"))
    ],
    "rev": lambda eqn, v, shape, _: [lax.rev(v, param(eqn, "dimensions"))],
    "slice": _sliced,
    "split": _split,
    "unstack": _unstacked,
    "dynamic_slice": _dynamic_slice,
    "tile": _tiled,
    "gather": _gathered,
    "all_gather": _all_gathered,
}


def is_moved(eqn: JaxprEqn, ins: Sequence[Any]) -> bool:
    """Whether an equation moves a quantized parameter, or several, and nothing else."""
    name = eqn.primitive.name
    if name in _OF_PARAMETERS and any(isinstance(v, QuantizedParam) and v.is_value for v in ins):
        return False
    if name in ("concatenate", "stack"):
        return all(isinstance(v, QuantizedParam) and _is_like(v, ins[0]) for v in ins)
    if name in _TOGETHER:
        return True
    moves = name in _OF_GROUPS or name in (*_PASSING, *_SHARDING) or _is_cast(eqn)
    return moves and isinstance(ins[0], QuantizedParam)


def _is_like(a: QuantizedParam, b: QuantizedParam) -> bool:
    """Whether the integers of two have one meaning, so that one array can hold them."""
    meaning = lambda q: (vars(q.spec) | {"granularity": None}, [v is None for v in scales_of(q)])
    return meaning(a.quantized) == meaning(b.quantized)


def _is_cast(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _CASTS and jnp.issubdtype(avals(eqn.outvars)[0].dtype, jnp.floating)


def _together(eqn: JaxprEqn, ins: Sequence[Any]) -> list[Any]:
    """Of a primitive that takes several values and gives them, each part of a parameter is one more."""
    leaves, structure = jax.tree.flatten(list(ins))
    of = [i for i, v in enumerate(ins) for _ in jax.tree.leaves(v)]  # which operand each leaf is part of
    is_whole = [leaf.shape == avals(eqn.invars)[i].shape for leaf, i in zip(leaves, of, strict=True)]

    def of_each(name: str, values: Any) -> Any:  # of device_put: where to, and how
        if not isinstance(values, tuple | list):
            return values
        return tuple(values[i] if w else _NOWHERE.get(name, values[i]) for i, w in zip(of, is_whole, strict=True))

    params = {name: of_each(name, values) for name, values in eqn.params.items()}
    return jax.tree.unflatten(structure, eqn.primitive.bind(*leaves, **params))


_NOWHERE = {"devices": None, "srcs": None}  # values for groups have not the shape that a sharding is of


def moved(eqn: JaxprEqn, ins: Sequence[Any]) -> list[Any]:
    """What becomes of a quantized parameter in an equation that moves it."""
    name = eqn.primitive.name
    if name not in (*_CASTS, *_PASSING):
        ins = [ordered(v) if isinstance(v, QuantizedParam) else v for v in ins]
    if name in ("concatenate", "stack"):
        return [_joined(eqn, ins)]
    if name in _TOGETHER:
        return _together(eqn, ins)
    parameter, *rest = ins
    shape = avals(eqn.invars)[0].shape
    of_values = lambda v: _results(eqn, v, *rest)
    if name in _CASTS:
        casts = (*parameter.casts, (eqn.primitive, tuple(eqn.params.items())))
        return [dataclasses.replace(parameter.map_floats(lambda v: of_values(v)[0]), casts=casts)]
    of_groups = of_values if name in _PASSING else functools.partial(_grouped, eqn, shape=shape, rest=rest)
    if name in ("ppermute", "all_gather"):  # which want values that vary over the axis
        like = parameter.real if parameter.quantized.stored is None else parameter.quantized.stored
        of_varying = of_groups
        of_groups = lambda v: of_varying(vary_together(v, like)[0])
    results = parameter.map(of_values, of_groups)
    part = lambda i: results.map(operator.itemgetter(i), operator.itemgetter(i))
    return [part(i) for i in range(len(eqn.outvars))]


def ordered(parameter: QuantizedParam) -> QuantizedParam:
    """The parameter with its integers as its values are, in order and dtype: what moves them counts on it."""
    q = parameter.quantized
    if q.stored is None:
        return parameter
    return dataclasses.replace(parameter, quantized=changed(q, stored=q.values, order=None))


def stacked(parameter: QuantizedParam, n: int) -> QuantizedParam:
    """The parameter to be scanned along its first axis, of length `n`: with values for each element of that."""
    order = parameter.quantized.order
    if order and len(order) == parameter.quantized.ndim:
        parameter = ordered(parameter)
    return parameter.map(lambda v: v, lambda v: grouping.apart(v, 0, n))


def sharded(
    parameter: QuantizedParam, shape: tuple[int, ...], spec: P, mesh: Any
) -> tuple[QuantizedParam, QuantizedParam]:
    """The parameter to be taken apart by shard_map as its values are; and how, which is a pytree of specs like it."""
    spec = P(*spec, *[None] * (len(shape) - len(spec)))

    def parts(axis: int) -> int:
        names = spec[axis]
        return math.prod(mesh.shape[name] for name in (names if isinstance(names, tuple) else (names,)) if name)

    def fitting(v: Array) -> Array:
        for i, n in enumerate(shape):
            if v.shape[i] > 1 and v.shape[i] % parts(i):
                v = grouping.apart(v, i, n)
        return v

    of_groups = lambda v: P(*(s if n > 1 else None for n, s in zip(v.shape, spec, strict=True)))
    parameter = ordered(parameter).map(lambda v: v, fitting)
    return parameter, parameter.map(lambda _: spec, of_groups)


def _grouped(eqn: JaxprEqn, v: Array, shape: tuple[int, ...], rest: Sequence[Any]) -> list[Array]:
    if eqn.primitive.name in _SHARDING:
        return [v]
    return _OF_GROUPS[eqn.primitive.name](eqn, v, shape, rest)


def dequantized(parameter: QuantizedParam) -> Array:
    """The real values of its integers, before any cast."""
    return _dequantized(qarray(parameter), parameter.nan_flags)


@jax.jit
def _dequantized(q: QArray, nan_flags: Array | None) -> Array:
    value = real_values(q, q.dtype)
    return value if nan_flags is None else value + grouping.broadcast_groups(nan_flags, value.shape).astype(value.dtype)


def qarray(parameter: QuantizedParam) -> QArray:
    """The integers of a parameter with all of their scales, wherever those are shared now."""
    q = parameter.quantized
    return changed(q, zero_point=jnp.zeros_like(q.scale, q.spec.dtype)) if q.zero_point is None else q


def from_integers(f: Callable, values: Sequence[Any], of_parameter: Callable[[QuantizedParam], Any]) -> Any:
    """`f(*values)`, with what `of_parameter` makes of the parameters among them.

    What is made of integers alone is made again for a backward pass, which would else keep it in float.
    """
    result = lambda *values: f(*(of_parameter(v) if isinstance(v, QuantizedParam) else v for v in values))
    is_frozen = any(isinstance(v, QuantizedParam) and v.real is None for v in values)
    return (jax.checkpoint(result) if is_frozen else result)(*values)


def _joined(eqn: JaxprEqn, parts: Sequence[QuantizedParam]) -> QuantizedParam:
    is_new = eqn.primitive.name == "stack"
    axis = param(eqn, "dimension", "axis")
    shapes = [v.shape for v in avals(eqn.invars)]

    def of_groups(values: Sequence[Array]) -> Array:
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
    return QuantizedParam(
        changed(quantized[0], stored=whole([q.stored for q in quantized]), dtype=dtype, **scales._asdict()),
        whole([real(part) for part in parts]) if any(part.real is not None for part in parts) else None,
        whole([part.as_read for part in parts]),
        of_groups([flags(part) for part in parts]) if any(part.nan_flags is not None for part in parts) else None,
        tuple(dict.fromkeys(path for part in parts for path in part.paths)),
        casts,
    )
