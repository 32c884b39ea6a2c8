# SPDX-License-Identifier: Apache-2.0
"""Integers with their qparams, as a pytree."""

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._base import _checks as checks
from .._base import _groups as grouping
from .._base import _numerics as num
from .._base._sharding import is_inside_shard_map
from .._platform._cpu import transposed
from .._spec._granularity import PerChannel, PerTensor, granularity_of
from .._spec._spec import QuantSpec


class Frozen(NamedTuple):
    """A note of `q.freeze` on what it made a QArray of and for, checked where it is served. Static.

    Attributes:
      shape: of the parameter.
      from_qparams: whether its scale came from qparams; else it was fitted to the values.
      static_inputs: whether an input of the ops that use it had qparams.
      activation: the QuantSpec of these inputs in the rule, None where they stay in float.
      rotated: how many rows were rotated together, by Rule(rotate=), 0 if none. Its values are rotated.
      rotated_along: the axes along which they were, counted from the end; none where these are not whole axes of it.
    """

    shape: tuple[int, ...]
    from_qparams: bool
    static_inputs: bool
    activation: QuantSpec | None
    rotated: int = 0
    rotated_along: tuple[int, ...] = ()


class Scales(NamedTuple):
    """The arrays of a QArray that turn its values into real ones: each has a value for each group, or one for all."""

    scale: Any
    zero_point: Any
    tensor_scale: Any

    def map(self, f: Callable[[Any], Any]) -> "Scales":
        return Scales(*(None if v is None else f(v) for v in self))


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class QArray(checks.NotAnArray):
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
      stored: the leaf of the pytree, the values as they lie in memory: in `order`, and as int4 or uint4, two in a byte,
        where `q.freeze` leaves weights of 4 bits and fewer whose inputs are in float.
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

    @property
    def _own_values(self) -> Any:
        values = _transposed(self.stored, lambda ndim: _back(self.order, ndim)) if self.order else self.stored
        if getattr(values, "dtype", None) not in (jnp.int4, jnp.uint4):
            return values
        dtype = self.spec.dtype
        return values.update(dtype=dtype) if isinstance(values, jax.ShapeDtypeStruct) else values.astype(dtype)

    values: Any = _own_values  # computed where it is read, and a field for `dataclasses.replace`; kept is `stored`
    scale: Array
    zero_point: Array
    spec: QuantSpec
    dtype: Any
    order: tuple[int, ...] | None
    tensor_scale: Any
    frozen: Frozen | None
    stored: Array = dataclasses.field(init=False, repr=False)
    sums: Any = dataclasses.field(init=False, repr=False)
    summed: int | None = dataclasses.field(init=False, repr=False)

    def __init__(
        self, values: Any, scale: Any, zero_point: Any, spec: QuantSpec, dtype: Any,
        order: tuple[int, ...] | None = None, tensor_scale: Any = None, frozen: Frozen | None = None,
    ):  # fmt: skip
        stored = _transposed(values, lambda ndim: permutation(order, ndim)) if order else values
        arrays = {"stored": stored, "scale": scale, "zero_point": zero_point, "tensor_scale": tensor_scale}
        vars(self).update(arrays, spec=spec, dtype=dtype, order=order, frozen=frozen, sums=None, summed=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        stored = self.stored.shape
        return tuple(stored[i] for i in _back(self.order, len(stored))) if self.order else stored

    @property
    def ndim(self) -> int:
        """The rank of the array."""
        return self.stored.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stored.size

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays in memory; int4, uint4 and float4 take half a byte."""
        bits = lambda v: (jnp.iinfo if jnp.issubdtype(v.dtype, jnp.integer) else jnp.finfo)(v.dtype).bits
        return sum(math.ceil(math.prod(v.shape) * bits(v) / 8) for v in jax.tree.leaves(self))

    @property
    def step(self) -> Array:
        """The real value of one level, float32 in the shape of scale."""
        return num.product_of_scales(self.scale.astype(jnp.float32), self.tensor_scale)

    @property
    def T(self) -> "QArray":
        """The QArray with its axes in the opposite order."""
        order = tuple(reversed(range(self.ndim)))
        return self._moved(transposed(self.values, order), lambda v: lax.transpose(v, order))

    def reshape(self, *shape: Any) -> "QArray":
        """The QArray in another shape, given as for an array; one size may be -1."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        values = self.values.reshape(sizes)
        return self._moved(values, lambda v: grouping.reshaped(v, self.shape, values.shape))

    def __getitem__(self, index: Any) -> "QArray":
        """The part at an index of the first axes: integers, static or traced, and static slices, as of an array.

        An integer has the scale of its group. A slice may be a part of a group that spans its axis, but not of a block.
        An array of integers alone picks parts along the first axis, such as the beams of a cache; not of parameters
        that `q.freeze` made, which are for `q`.
        """
        if checks.is_index_array(index) and self.frozen is None:
            index = checks.unwrapped(index)
            return self._picked(index if isinstance(index, jax.core.Tracer) else np.asarray(index))
        windows, picked = _indexed(self, index)
        return self._part(windows, picked)

    def _picked(self, index: Array | np.ndarray) -> "QArray":
        """The parts along the first axis that indices say, as `_part` has each."""
        n = self.shape[0] if self.ndim else 0
        if isinstance(index, np.ndarray) and ((index < -n) | (index >= n)).any():
            raise IndexError(
                f"`index` must be in [{-n}, {n}) for a QArray of shape {self.shape}, got {index.tolist()}. "
                "Only traced integers are clamped."
            )
        of = np if isinstance(index, np.ndarray) else jnp
        at = of.clip(of.where(index < 0, index + n, index), 0, n - 1)
        of_values = lambda v: v.at[at].get(mode="promise_in_bounds")
        new = range(index.ndim - 1)
        of_groups = lambda v: lax.expand_dims(v, new) if v.shape[0] == 1 else of_values(grouping.apart(v, 0, n))
        return self._moved(of_values(self.values), of_groups)

    def _part(self, windows: grouping.Windows, picked: Sequence[int] = ()) -> "QArray":
        """A part, without the axes of which one element is picked."""
        at = lambda v, windows: lax.squeeze(grouping.part(v, windows), picked)
        of_groups = lambda v: at(v, grouping.windows_of_groups(v.shape, self.shape, windows))
        if self.order and any(axis >= self.ndim - len(self.order) for axis in windows):
            return self._moved(at(self.values, windows), of_groups)
        part = changed(self, stored=at(self.stored, windows))  # whose elements lie as before
        q = self._moved(part.values, of_groups)
        frozen, along = q.frozen, self.frozen.rotated_along if self.frozen else ()
        if frozen and all(axis < self.ndim + i for axis in windows for i in along):
            frozen = frozen._replace(rotated_along=along)
        return changed(q, stored=part.stored, order=self.order, sums=q.sums, summed=q.summed, frozen=frozen)

    def _moved(self, values: Array, f: Callable[[Array], Array]) -> "QArray":
        """The QArray of values that were moved, with the granularity that its scales then have."""
        q = moved(self, values, f)
        frozen = self.frozen and self.frozen._replace(shape=values.shape, rotated_along=())
        if self.scale.ndim == 0:
            return changed(q, frozen=frozen)
        granularity, scales = granularity_of(q.scale.shape, values.shape), scales_of(q)
        if granularity == PerTensor() and q.tensor_scale is not None:
            granularity = PerChannel(0)  # of one scale, which that of the tensor scales
        elif granularity == PerTensor():
            scales = scales.map(lambda v: v.reshape(()))
        return changed(q, scales, spec=dataclasses.replace(q.spec, granularity=granularity), frozen=frozen)


def changed(q: QArray, scales: Scales | None = None, **fields: Any) -> QArray:
    """`q` with other scales or fields, as its values lie: `stored` instead of `values`, and any leaves.

    With other values it has no sums but those among the fields.
    """
    new, of_values = object.__new__(QArray), {"sums": None, "summed": None} if "stored" in fields else {}
    vars(new).update(vars(q) | of_values | (scales._asdict() if scales else {}) | fields)
    return new


def sums_of(q: QArray) -> Array | None:
    """The sums that came with `q`, unless it is a part of what they are sums of, such as a shard."""
    return None if q.summed is None or q.sums.size * q.summed != q.size else q.sums


def with_sums(q: QArray, sums: Array | None, summed: int | None) -> QArray:
    """`q` with sums of so many values each; without, if it has more or fewer values for them."""
    new = changed(q, sums=sums, summed=summed)
    return changed(q, sums=None, summed=None) if sums_of(new) is None else new


def scales_of(q: QArray) -> Scales:
    """The arrays of a QArray that turn its values into real ones."""
    return Scales(q.scale, q.zero_point, q.tensor_scale)


def groups_of(q: QArray) -> tuple[int, ...]:
    """The number of groups with a scale along each axis of `q`."""
    return (1,) * (q.ndim - q.scale.ndim) + q.scale.shape


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
            windows[axis] = window_of("index", q, axis, start, size)
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


def window_of(name: str, q: QArray, axis: int, start: Any, size: int) -> tuple[Any, int]:
    """A window along an axis, in bounds, which cuts no block: a traced start is rounded down to the start of one."""
    n, g = q.shape[axis], groups_of(q)[axis]
    start, block = start_of(name, start, axis, q.shape, size), n // g if g > 1 else 1
    if size % block or (isinstance(start, int) and start % block):
        at = f"{start} to {start + size}" if isinstance(start, int) else f"{size} elements from a traced one"
        raise ValueError(
            f"`{name}` must not cut the blocks of {block} that share a scale along axis {axis} of a QArray of shape "
            f"{q.shape}, got {at}. Start and end at multiples of {block}, or give the spec smaller blocks."
        )
    return start if block == 1 or isinstance(start, int) else start // block * block, size


def packed_dtype(spec: QuantSpec) -> Any:
    """The dtype that holds two integers in a byte; None if they have more than 4 bits, or are floats."""
    return None if spec.bits > 4 or spec.format else jnp.int4 if spec.signed else jnp.uint4


def moved(q: QArray, values: Any, f: Callable[[Array], Array]) -> QArray:
    """`q` with its values elsewhere, and its scales and sums by `f`, which says what becomes of values for groups."""
    of_groups, sums = lambda v: f(grouping.of_rank(v, q.ndim)) if v.ndim else v, sums_of(q)
    new = changed(q, scales_of(q).map(of_groups), stored=values, order=None)
    return new if sums is None else with_sums(new, f(sums), q.summed)


class Static(NamedTuple):
    """The fields of a QArray that are no arrays."""

    spec: QuantSpec
    dtype: Any
    order: tuple[int, ...] | None
    frozen: Frozen | None
    summed: int | None


def _with_keys(q: QArray) -> tuple[list[tuple[Any, Array]], Static]:
    # By another name in another order, so that what restores arrays by their paths does not take one for the other.
    arrays = {"stored" if q.order else "values": q.stored, **scales_of(q)._asdict()}
    if not q.spec.has_tensor_scale:  # by the spec, not by what is there: trees of other leaves have the same structure
        del arrays["tensor_scale"]
    if q.summed is not None:
        arrays["sums"] = q.sums
    keyed = [(jax.tree_util.GetAttrKey(name), v) for name, v in arrays.items()]
    return keyed, Static(q.spec, q.dtype, q.order, q.frozen, q.summed)


def _of_arrays(static: Static, arrays: Any) -> QArray:
    stored, scale, zero_point, *more = arrays
    new, sums = object.__new__(QArray), None if static.summed is None else more.pop()
    scales = Scales(scale, zero_point, more[0] if more else None)
    vars(new).update(static._asdict(), stored=stored, sums=sums, **scales._asdict())
    return new


jax.tree_util.register_pytree_with_keys(QArray, _with_keys, _of_arrays)


def permutation(order: Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The axes of an array in the order in which they lie, where its last axes lie in `order`."""
    order = order or ()
    if sorted(order) != list(range(-len(order), 0)) or len(order) > ndim:
        raise ValueError(
            f"`order` must be the last axes of the array, counted from the end, got {tuple(order)} for an array of "
            f"rank {ndim}. To scan or vmap along an axis that it moves, dataclasses.replace(q, order=None)."
        )
    return *range(ndim - len(order)), *(ndim + axis for axis in order)


def _back(order: Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    there = permutation(order, ndim)
    return tuple(map(there.index, range(ndim)))


def _transposed(v: Any, axes: Callable[[int], tuple[int, ...]]) -> Any:
    """An array, or the shape of one; what else is a leaf, as it is."""
    if isinstance(v, jax.ShapeDtypeStruct):
        return v.update(shape=tuple(v.shape[i] for i in axes(v.ndim)), sharding=None)
    return transposed(v, axes(v.ndim)) if checks.is_array(v) else v


def checked_operand(name: str, q: Any) -> QArray:
    """Returns `q`, which must be a QArray whose real values mean something beside other arrays."""
    q = checked_qarray(name, q)
    if q.frozen and q.frozen.rotated:
        raise ValueError(
            f"`{name}` was frozen by a rule with rotate=, so that it holds the rotated parameter, which meets rotated "
            "inputs alone. Serve it by q(params, ...), with the rules that it was frozen with; dequantize(v) of the "
            "whole parameter rotates its real values back."
        )
    return q


def checked_qarray(name: str, q: Any) -> QArray:
    """Returns `q`, which must be a QArray."""
    if not isinstance(q, QArray):
        raise TypeError(f"`{name}` must be a QArray, got {checks.kind(q)}. Make one by quantize(x, spec).")
    check_dtypes(name, q)
    groups = groups_of(q)
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
    if not fits or sums_of(q) is None:
        raise ValueError(
            f"`{name}` has sums of shape {shape}, each of {q.summed} values, which do not fit values of shape "
            f"{q.shape}. Take a part by v[i] or v.reshape(...) and other values by dataclasses.replace(v, values=...), "
            "not by jax.tree.map; or freeze the float parameters again."
        )


def check_dtypes(name: str, q: QArray) -> None:
    """Raises for arrays that something has cast: integers in floats are other numbers, and scales other scales."""
    expected = {
        "values": [q.spec.dtype, *filter(None, [packed_dtype(q.spec)])],
        "scale": [q.spec.scale_dtype],
        "zero_point": [q.spec.dtype],
    }
    if q.spec.has_tensor_scale:
        expected["tensor_scale"] = ["float32"]
    if q.summed is not None:
        expected["sums"] = ["int32"]
    for part, dtypes in expected.items():
        dtype = getattr(q.stored if part == "values" else getattr(q, part), "dtype", None)
        if dtype is not None and dtype not in dtypes:
            raise TypeError(
                f"`{name}` must have {part} of dtype {dtypes[0]}, as {q.spec} holds them, got {dtype}. Leave "
                "QArrays out of a cast: jax.tree.map(lambda v: v if isinstance(v, QArray) else v.astype(...), params, "
                "is_leaf=lambda v: isinstance(v, QArray))."
            )
