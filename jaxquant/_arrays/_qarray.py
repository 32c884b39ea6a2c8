# SPDX-License-Identifier: Apache-2.0
"""Integers with their qparams, as a pytree."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .._base import _checks as checks
from .._base import _groups as grouping
from .._base import _numerics as num
from .._base._sharding import is_inside_shard_map
from .._spec._granularity import PerChannel, PerTensor, granularity_of
from .._spec._spec import QuantSpec
from ._grid import of_scales
from ._qparams import QParams
from ._quantized import Quantized, Stored, in_memory, permutation


class Frozen(NamedTuple):
    """A note of `q.freeze` on what it made a QArray of and for, checked where it is served. Static.

    Attributes:
      shape: of the parameter.
      from_qparams: whether its scale came from qparams; else it was fitted to the values.
      static_inputs: whether an input of the ops that use it had qparams.
      activation: the QuantSpec of these inputs in the rule, None where they stay in float.
    """

    shape: tuple[int, ...]
    from_qparams: bool
    static_inputs: bool
    activation: QuantSpec | None


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class QArray(Stored, checks.NotAnArray):
    """A quantized array: `real = (values - zero_point) * scale`. A pytree of its arrays.

    Attributes:
      values: int8 or uint8 up to 8 bits, int16 or uint16 above, or floats of the format; of the shape of the array.
      scale: float32, or of the spec's scale_dtype; shaped as in QParams.
      zero_point: of the shape of scale and the dtype of values. Integers compare with it as real values compare with 0:
        relu in integers is `jnp.maximum(values, zero_point)`.
      tensor_scale: float32 where scales are float8_e4m3fn: `real = (values * scale) * tensor_scale`; else None.
      spec: QuantSpec, static.
      dtype: static, the dtype of the array that was quantized; `dequantize` returns it.
      order: static, how values lie in memory: their last axes in another order. (-1, -2) is a matrix whose columns lie
        one after the other, as `q.freeze` leaves weights that are contracted; None is the order of the axes. `values`,
        `shape` and all functions of a QArray see the axes of the array in any case.
      frozen: static, what `q.freeze` made it from and for: `shape`, `from_qparams`, `static_inputs`, `activation`. A
        call that serves it otherwise raises. None if something else made it.
      stored: the leaf of the pytree, the values as they lie in memory: in `order`, and of 4 bits and fewer two in a
        byte in caches and in weights that `q.freeze` left for inputs in float. See `stored_for`.
      pairs: static, (axis, distance): two values this far apart along the axis, counted from the end, lie in one uint8
        of `stored`, so that nothing is scanned or vmapped along that axis. None if none do.
      sums: int32 where `q.freeze` made it for inputs with a zero point, else None: the sums of the values (of unsigned
        ones less 128) along the axes where it has size 1. Contractions along these axes read them; others compute their
        own.
      summed: static, the number of values in each of the sums; None without sums.

    `dataclasses.replace(q, values=...)` gives other integers with the same qparams, and without sums.

    A stack (L, ...) is scanned and vmapped along its first axis like any pytree, if its granularity keeps that axis:
    PerChannel((0, -1)). `q.T`, `q.reshape(...)` and `q[i]` are QArrays whose granularity follows their new axes;
    `dynamic_slice` and `update_slice` read and write a part. A QArray is not an array: `dequantize` gives the real
    values, `dot_general` contracts.
    """

    values: Any = Stored.values  # computed where it is read, and a field for `dataclasses.replace`; kept is `stored`
    scale: Array
    zero_point: Array
    spec: QuantSpec
    dtype: np.dtype
    order: tuple[int, ...] | None
    tensor_scale: Any
    frozen: Frozen | None
    stored: Array = dataclasses.field(init=False, repr=False)
    sums: Any = dataclasses.field(init=False, repr=False)
    summed: int | None = dataclasses.field(init=False, repr=False)
    pairs: tuple[int, int] | None = dataclasses.field(init=False, repr=False)

    def __init__(
        self, values: Any, scale: Any, zero_point: Any, spec: QuantSpec, dtype: DTypeLike,
        order: tuple[int, ...] | None = None, tensor_scale: Any = None, frozen: Frozen | None = None,
    ):  # fmt: skip
        stored = in_memory(values, lambda ndim: permutation(order, ndim)) if order else values
        vars(self).update(stored=stored, scale=scale, zero_point=zero_point, tensor_scale=tensor_scale)
        vars(self).update(spec=spec, dtype=dtype, order=order, frozen=frozen, sums=None, summed=None, pairs=None)

    @property
    def step(self) -> Array:
        """The real value of one level, float32 in the shape of scale."""
        return num.product_of_scales(_in_float(self.scale).astype(jnp.float32), self.tensor_scale)

    @property
    def qparams(self) -> QParams:
        """The numbers of the grid, float32 in the shape of scale."""
        return QParams(self.step, _in_float(self.zero_point).astype(jnp.float32))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays in memory; int4, uint4 and float4 take half a byte."""
        bits = lambda v: (jnp.iinfo if jnp.issubdtype(v.dtype, jnp.integer) else jnp.finfo)(v.dtype).bits
        return sum(math.ceil(math.prod(v.shape) * bits(v) / 8) for v in jax.tree.leaves(self))

    @property
    def T(self) -> "QArray":
        """The QArray with its axes in the opposite order."""
        return _transposed(self)

    def reshape(self, *shape: Any) -> "QArray":
        """The QArray in another shape, given as for an array; one size may be -1."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        like = jax.ShapeDtypeStruct(self.shape, self.spec.dtype)
        return _reshaped(self, jax.eval_shape(lambda v: v.reshape(sizes), like).shape)

    def __getitem__(self, index: Any) -> "QArray":
        """The part at an index of the first axes: integers, static or traced, and static slices, as of an array.

        An integer has the scale of its group. A slice may be a part of a group that spans its axis, but not of a block.
        An array of integers alone picks parts along the first axis, such as the beams of a cache; not of parameters
        that `q.freeze` made, which are for `q`.
        """
        if checks.is_index_array(index) and self.frozen is None:
            index = checks.unwrapped(index)
            return _taken(self, _places(self, index if isinstance(index, jax.core.Tracer) else np.asarray(index)))
        windows, picked = _indexed(self, index)
        part = window(self, windows, picked)
        has_whole_scales = all(self.groups[axis] == self.shape[axis] for axis in windows)
        return _with_scales_of(part, self, lambda v: v[index]) if has_whole_scales else part


def inside(q: QArray) -> Quantized:
    """The array as the package computes with it, with scales of its rank."""
    scale, zero_point, tensor_scale = (
        None if v is None else grouping.of_rank(_in_float(v), q.ndim) for v in (q.scale, q.zero_point, q.tensor_scale)
    )
    zero_point = None if q.spec.symmetric else zero_point
    return Quantized(q.stored, scale, zero_point, q.spec, q.dtype, q.order, tensor_scale, q.sums, q.summed, q.pairs)


def _in_float(v: Any) -> Any:
    """Scales, or a minimum, in float32 where they are integers with scales of their own."""
    return inside(v).real(jnp.float32) if isinstance(v, QArray) else v


def _nested(v: Array, spec: QuantSpec, sign: int) -> QArray:
    """Scales, or a minimum, as integers with scales of their own."""
    own = of_scales(sign * v, spec)
    levels, scale = own.levels.astype(spec.dtype), (sign * own.grid.scale).astype(spec.scale_dtype)
    return QArray(levels, scale, jnp.zeros_like(scale, spec.dtype), spec, jnp.dtype(jnp.float32))


def outside(q: Quantized, frozen: Frozen | None = None, spec: QuantSpec | None = None) -> QArray:
    """The array as users hold it, with the granularity that its scales have, unless a spec says so; a scalar for one.

    `spec` is for an array whose scales are those of the spec.
    """
    granularity = (spec or q.spec).granularity
    if spec is None and granularity != PerTensor():
        granularity = granularity_of(q.groups, q.shape)
        if granularity == PerTensor() and q.tensor_scale is not None:
            granularity = PerChannel(0)  # of one scale, which that of the tensor scales
    zero_point = jnp.zeros_like(q.scale, q.spec.offset_dtype) if q.zero_point is None else q.zero_point
    scalar = lambda v: v.reshape(()) if all(n == 1 for n in v.shape) else v
    of_groups = scalar if granularity == PerTensor() else lambda v: v
    tensor_scale = None if q.tensor_scale is None else scalar(q.tensor_scale)
    scales = {"scale": of_groups(q.scale), "zero_point": of_groups(zero_point), "tensor_scale": tensor_scale}
    # Moved scales are floats: blocks of them need not be blocks behind the move.
    own = None if spec is None else spec.scale_spec
    if own is not None:
        scales["scale"] = _nested(q.scale, own, 1)
        scales["zero_point"] = _nested(zero_point, own, -1) if q.spec.has_minimum else zero_point
    spec = dataclasses.replace(q.spec, granularity=granularity, scale_spec=own)
    new = object.__new__(QArray)
    vars(new).update({**vars(q), **scales, "spec": spec, "frozen": frozen})
    return new


def _as_frozen(q: QArray, new: Quantized) -> QArray:
    return outside(new, q.frozen and q.frozen._replace(shape=new.shape))


@jax.jit
def _transposed(q: QArray) -> QArray:
    new = _as_frozen(q, inside(q).transposed(range(q.ndim)[::-1]))
    return _with_scales_of(new, q, lambda v: v.T)


def _with_scales_of(new: QArray, q: QArray, move: Callable[[QArray], QArray]) -> QArray:
    """What a move made of `q`, with scales that keep their own scales where they have some."""
    if not isinstance(q.scale, QArray):
        return new
    moved = {name: move(v) for name in ("scale", "zero_point") if isinstance(v := getattr(q, name), QArray)}
    return changed(new, **moved, spec=dataclasses.replace(new.spec, scale_spec=moved["scale"].spec))


@functools.partial(jax.jit, static_argnames="shape")
def _reshaped(q: QArray, shape: tuple[int, ...]) -> QArray:
    return _as_frozen(q, inside(q).reshaped(shape))


@jax.jit
def _taken(q: QArray, index: Array) -> QArray:
    return _as_frozen(q, inside(q).taken(index))


def window(q: QArray, windows: grouping.Windows, picked: Sequence[int] = ()) -> QArray:
    """A part that cuts no block, without the axes of which one element is picked."""
    starts, sizes = ({axis: of[i] for axis, of in windows.items()} for i in range(2))
    return _window(q, starts, tuple(sizes.items()), tuple(picked))


@functools.partial(jax.jit, static_argnames=("sizes", "picked"))
def _window(q: QArray, starts: dict[int, Any], sizes: tuple[tuple[int, int], ...], picked: tuple[int, ...]) -> QArray:
    windows = {axis: (starts[axis], size) for axis, size in sizes}
    return _as_frozen(q, inside(q).window(windows, picked))


def _places(q: QArray, index: Array | np.ndarray) -> Array | np.ndarray:
    """Indices of the first axis, in bounds; negatives count from the end."""
    n = q.shape[0] if q.ndim else 0
    if isinstance(index, np.ndarray) and ((index < -n) | (index >= n)).any():
        raise IndexError(
            f"`index` must be in [{-n}, {n}) for a QArray of shape {q.shape}, got {index.tolist()}. "
            "Only traced integers are clamped."
        )
    of = np if isinstance(index, np.ndarray) else jnp
    return of.clip(of.where(index < 0, index + n, index), 0, n - 1)


def changed(q: QArray, **fields: Any) -> QArray:
    """`q` with other static fields, or sums."""
    new = object.__new__(QArray)
    vars(new).update(vars(q) | fields)
    return new


@functools.partial(jax.jit, static_argnames="dtype")
def real_values(q: QArray, dtype: DTypeLike) -> Array:
    """`(values - zero_point) * scale` in `dtype`."""
    return inside(q).real(dtype)


def _indexed(q: QArray, index: Any) -> tuple[grouping.Windows, list[int]]:
    """The part at an index, as windows, and the axes of which one element is picked."""
    entries = [checks.unwrapped(i) for i in (index if isinstance(index, tuple) else (index,))]
    wrong = [i for i in entries if not (isinstance(i, slice) or checks.is_index(i))]
    if wrong:
        raise TypeError(
            f"A QArray is indexed by integers and static slices, one for each of its first axes, got "
            f"{checks.kind(wrong[0])}. Parts along the first axis are v[indices]; along others, move that axis first. "
            "Params that q.freeze made are for q(frozen, ...), not for the function itself."
        )
    if len(entries) > q.ndim:
        raise IndexError(
            f"`index` must have at most {q.ndim} axes for a QArray of shape {q.shape}, got {len(entries)}."
        )
    windows, picked = {}, []
    for axis, i in enumerate(entries):
        if isinstance(i, slice):
            start, size = _bounds(i, q.shape[axis])
            windows[axis] = window_of("index", q.shape, q.groups, axis, start, size)
        else:
            windows[axis] = start_of("index", i, axis, q.shape, 1), 1
            picked.append(axis)
    return {axis: of for axis, of in windows.items() if axis in picked or of[1] != q.shape[axis]}, picked


def _bounds(i: slice, n: int) -> tuple[int, int]:
    """The start and the size of a slice of an axis."""
    for v in (i.start, i.stop, i.step):
        if v is not None:
            checks.static_int("a slice of a QArray", v)
    start, stop, step = i.indices(n)
    if step != 1:
        raise ValueError(f"A slice of a QArray must have step 1, got {i}. Index dequantize(v) or v.values by others.")
    return start, max(stop - start, 0)


def start_of(name: str, start: Any, axis: int, shape: tuple[int, ...], size: int) -> Any:
    """The start of a window, in bounds: a static one is checked, a traced one is clamped.

    Negatives count from the end.
    """
    n, start = shape[axis], checks.unwrapped(start)
    if not checks.is_index(start):
        raise TypeError(
            f"`{name}` must be integers, static or traced, got {checks.kind(start)}. Pass one for each axis."
        )
    if not isinstance(start, Array):
        first = operator.index(start)
        if not 0 <= (first + n if first < 0 else first) <= n - size:
            raise IndexError(
                f"`{name}` must be in [0, {n - size}], or from the end in [{-n}, {-size}], for a part of size {size} "
                f"along axis {axis}, got {first}, which is out of range for a QArray of shape {shape}. Only traced "
                "integers are clamped."
            )
        return first % n if n else 0
    wide = start.astype(jnp.int32) if start.dtype.itemsize < 4 else start
    return jnp.clip(jnp.where(wide < 0, wide + n, wide), 0, n - size).astype(jnp.int32)


def window_of(
    name: str, shape: tuple[int, ...], groups: tuple[int, ...], axis: int, start: Any, size: int
) -> tuple[Any, int]:
    """A window along an axis, in bounds, which cuts no block: a traced start is rounded down to the start of one."""
    n, g = shape[axis], groups[axis]
    start, block = start_of(name, start, axis, shape, size), n // g if g > 1 else 1
    if size % block or (isinstance(start, int) and start % block):
        at = f"{start} to {start + size}" if isinstance(start, int) else f"{size} elements from a traced one"
        raise ValueError(
            f"`{name}` must not cut the blocks of {block} that share a scale along axis {axis} of a QArray of shape "
            f"{shape}, got {at}. Start and end at multiples of {block}, or give the spec smaller blocks."
        )
    return start if block == 1 or isinstance(start, int) else start // block * block, size


def packed_dtype(spec: QuantSpec) -> DTypeLike | None:
    """The dtype that holds two integers in a byte; None if they have more than 4 bits, or are floats."""
    return None if spec.bits > 4 or spec.format else jnp.int4 if spec.signed else jnp.uint4


class Static(NamedTuple):
    """The fields of a QArray that are no arrays."""

    spec: QuantSpec
    dtype: np.dtype
    order: tuple[int, ...] | None
    frozen: Frozen | None
    summed: int | None
    pairs: tuple[int, int] | None


def _with_keys(q: QArray) -> tuple[list[tuple[Any, Array]], Static]:
    # By another name in another order, so that what restores arrays by their paths does not take one for the other.
    arrays = {"stored" if q.order or q.pairs else "values": q.stored, "scale": q.scale, "zero_point": q.zero_point}
    if q.spec.has_tensor_scale:  # by the spec, not by what is there: trees of other leaves have the same structure
        arrays["tensor_scale"] = q.tensor_scale
    if q.summed is not None:
        arrays["sums"] = q.sums
    keyed = [(jax.tree_util.GetAttrKey(name), v) for name, v in arrays.items()]
    return keyed, Static(q.spec, q.dtype, q.order, q.frozen, q.summed, q.pairs)


def _of_arrays(static: Static, arrays: Any) -> QArray:
    stored, scale, zero_point, *more = arrays
    new, sums = object.__new__(QArray), None if static.summed is None else more.pop()
    scales = {"scale": scale, "zero_point": zero_point, "tensor_scale": more[0] if more else None}
    vars(new).update(static._asdict(), stored=stored, sums=sums, **scales)
    return new


jax.tree_util.register_pytree_with_keys(QArray, _with_keys, _of_arrays)


def checked_qarray(name: str, q: object) -> QArray:
    """Returns `q`, which must be a QArray."""
    if not isinstance(q, QArray):
        raise TypeError(f"`{name}` must be a QArray, got {checks.kind(q)}. Make one by quantize(x, spec).")
    check_dtypes(name, q)
    groups = q.groups
    whole = len(groups) == q.ndim and q.spec.granularity.fits(groups, q.shape)
    of_tensor = ""
    if q.spec.has_tensor_scale:
        whole = whole and q.tensor_scale is not None and q.tensor_scale.ndim in (0, q.ndim)
        of_tensor = f", a tensor_scale of shape {getattr(q.tensor_scale, 'shape', None)}"
    if not whole or q.zero_point.shape != q.scale.shape:
        raise ValueError(
            f"`{name}` has values of shape {q.shape}, a scale of shape {q.scale.shape} and a zero point of shape "
            f"{q.zero_point.shape}{of_tensor}, which do not fit {q.spec}. A stack of QArrays made by vmap or scan is "
            "used under vmap or scan; one used whole keeps the axis of the stack: PerChannel((0, -1))."
        )
    check_sums(name, q)
    return q


def check_sums(name: str, q: QArray) -> None:
    """Raises for sums of another shape than the values have them for; those of shards are no sums of a shard."""
    if q.summed is None or is_inside_shard_map():
        return
    shape = getattr(q.sums, "shape", None)
    fits = (
        shape is not None and len(shape) == q.ndim and all(n in (1, of) for n, of in zip(shape, q.shape, strict=True))
    )
    if not fits or q.sums.size * q.summed != q.size:
        raise ValueError(
            f"`{name}` has sums of shape {shape}, each of {q.summed} values, which do not fit values of shape "
            f"{q.shape}. Take a part by v[i] or v.reshape(...) and other values by dataclasses.replace(v, values=...), "
            "not by jax.tree.map; or freeze the float parameters again."
        )


def check_dtypes(name: str, q: QArray) -> None:
    """Raises for arrays that something has cast: integers in floats are other numbers, and scales other scales."""
    expected = {
        "values": ["uint8"] if q.pairs else [q.spec.dtype, *filter(None, [packed_dtype(q.spec)])],
        "scale": [q.spec.scale_dtype],
        "zero_point": [q.spec.offset_dtype],
    }
    if q.spec.has_tensor_scale:
        expected["tensor_scale"] = ["float32"]
    if q.summed is not None:
        expected["sums"] = ["int32"]
    if q.spec.scale_spec is not None:
        expected["scale"] = ["float32"]
        expected["zero_point"] = ["float32"] if q.spec.has_minimum else expected["zero_point"]
    for part, dtypes in expected.items():
        dtype = getattr(q.stored if part == "values" else getattr(q, part), "dtype", None)
        if dtype is not None and dtype not in dtypes:
            raise TypeError(
                f"`{name}` must have {part} of dtype {dtypes[0]}, as {q.spec} holds them, got {dtype}. Leave "
                "QArrays out of a cast: jax.tree.map(lambda v: v if isinstance(v, QArray) else v.astype(...), params, "
                "is_leaf=lambda v: isinstance(v, QArray))."
            )
