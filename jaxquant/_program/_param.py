# SPDX-License-Identifier: Apache-2.0
"""A quantized parameter on its way to the ops that use it: it travels with its scales."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from .._arrays._affine import real_values
from .._arrays._qarray import QArray, changed, groups_of, scales_of, sums_of, with_sums
from .._base import _groups as grouping
from .._spec._granularity import PerChannel, PerTensor, granularity_of

_Cast = tuple[Any, tuple[tuple[str, Any], ...]]  # a primitive and its parameters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedParam:
    """A parameter, a named value, a cache, or a part: what moves it moves integers, real values and scales alike.

    Attributes:
      quantized: its integers, which no cast changes, and their scales, all of its rank. `stored` is None where no op
        reads them, `zero_point` where it is known to be 0, all scales where there are none. The spec is that of the
        parameter; of a part the granularity is another, which the shape of the scales says.
      real: its real values, as ops that contract it differentiate them; casts round them. None of integers alone.
      as_read: its values for what else reads it, if anything does and they are others.
      nan_flags: for its groups, NaN where one of their values was; None where none can be.
      paths: of the parameter; of several that were concatenated, all.
      casts: what casts it has been through.
      is_value: whether it is a named value, which has a range of its own on each device.
      is_cache: whether it is a cache, which is written in parts; `paths` is its one path.
    """

    quantized: QArray
    real: Array | None
    as_read: Array | None
    nan_flags: Array | None
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    casts: tuple[_Cast, ...] = dataclasses.field(default=(), metadata={"static": True})
    is_value: bool = dataclasses.field(default=False, metadata={"static": True})
    is_cache: bool = dataclasses.field(default=False, metadata={"static": True})

    def map(self, of_values: Callable[[Any], Any], of_groups: Callable[[Any], Any]) -> "QuantizedParam":
        """The parameter with other values, of each array of its shape, and of each that has a value for a group.

        Without the sums that came with it, of which `with_sums_of` says whether they are those of the values still.
        """
        q = self.quantized
        quantized = changed(q, scales_of(q).map(of_groups), stored=_mapped(of_values, q.stored))
        moved = dataclasses.replace(self, quantized=quantized, nan_flags=_mapped(of_groups, self.nan_flags))
        return moved.map_floats(of_values)

    def map_floats(self, f: Callable[[Any], Any]) -> "QuantizedParam":
        return dataclasses.replace(self, real=_mapped(f, self.real), as_read=_mapped(f, self.as_read))

    def cast(self, x: Array) -> Array:
        for primitive, params in self.casts:
            x = primitive.bind(x, **dict(params))
        return x


def _mapped(f: Callable[[Any], Any], v: Any) -> Any:
    return None if v is None else f(v)


def with_sums_of(
    parameter: QuantizedParam, other: QuantizedParam, f: Callable[[Array], Array] = lambda v: v
) -> QuantizedParam:
    """The parameter with the sums of another one by `f`, which says what has become of values for groups."""
    q, sums = other.quantized, sums_of(other.quantized)
    if sums is None:
        return parameter
    return dataclasses.replace(parameter, quantized=with_sums(parameter.quantized, f(sums), q.summed))


def without_sums(parameter: QuantizedParam) -> QuantizedParam:
    """The parameter without the sums that came with it."""
    return dataclasses.replace(parameter, quantized=with_sums(parameter.quantized, None, None))


def ordered(parameter: QuantizedParam) -> QuantizedParam:
    """The parameter with its integers as its values are, in order and dtype: what moves them counts on it."""
    q = parameter.quantized
    if q.stored is None:
        return parameter
    return with_sums_of(dataclasses.replace(parameter, quantized=changed(q, stored=q.values, order=None)), parameter)


def stacked(parameter: QuantizedParam, n: int) -> QuantizedParam:
    """The parameter to be scanned along its first axis, of length `n`: with values for each element of that."""
    order = parameter.quantized.order
    if order and len(order) == parameter.quantized.ndim:
        parameter = ordered(parameter)
    of_groups = lambda v: grouping.apart(v, 0, n)
    return with_sums_of(parameter.map(lambda v: v, of_groups), parameter, of_groups)


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
    parameter = ordered(parameter)
    # Sums are whole on each device along what is summed, and those of a part there are taken by nothing: `sums_of`.
    fitted = with_sums_of(parameter.map(lambda v: v, fitting), parameter)
    return fitted, jax.tree.map(lambda v: spec if v.shape == shape else of_groups(v), fitted)


def put_together(parts: QuantizedParam, cache: QuantizedParam) -> QuantizedParam:
    """A cache of the parts that devices had in shard_map, each with scales of its own; it came there as `cache`."""
    q, before = parts.quantized, cache.quantized
    if q.spec.granularity == PerTensor():  # whose one scale stays
        scales = scales_of(before).map(lambda v: v.reshape((1,) * q.ndim))
        return dataclasses.replace(parts, quantized=changed(q, scales))
    groups = enumerate(zip(groups_of(before), groups_of(q), strict=True)) if q.shape == before.shape else ()
    shared = next((axis for axis, (old, new) in groups if old < new), None)
    if shared is not None:
        raise ValueError(
            f"At {cache.paths[0]!r}: the cache leaves a shard_map split along axis {shared}, along which values share "
            f"a scale, got {q.spec}: each device would have a scale of its own for its part. Name axis {shared} in the "
            "granularity of the cache, or split it along another one."
        )
    return parts


def dequantized(parameter: QuantizedParam, guarded: bool = True) -> Array:
    """The real values of its integers, before any cast; unguarded for what a contraction alone reads."""
    return _dequantized(qarray(parameter), parameter.nan_flags, guarded)


@functools.partial(jax.jit, static_argnames="guarded")
def _dequantized(q: QArray, nan_flags: Array | None, guarded: bool) -> Array:
    value = real_values(q, q.dtype, guarded or bool(q.spec.format))  # floats have a -0, of which the guard makes 0
    return value if nan_flags is None else value + grouping.broadcast_groups(nan_flags, value.shape).astype(value.dtype)


def qarray(parameter: QuantizedParam) -> QArray:
    """The integers of a parameter with all of their scales, wherever those are shared now."""
    q = parameter.quantized
    return changed(q, zero_point=jnp.zeros_like(q.scale, q.spec.dtype)) if q.zero_point is None else q


def with_fitting_spec(parameter: QuantizedParam) -> QArray:
    """The integers of a parameter with all of their scales, and a granularity that these have."""
    q, said = qarray(parameter), parameter.quantized.spec.granularity
    if said == PerTensor():
        return changed(q, scales_of(q).map(lambda v: v.reshape(())))
    granularity = granularity_of(groups_of(q), q.shape)
    granularity = PerChannel(0) if granularity == PerTensor() else granularity  # its one scale is the scale of a group
    return changed(q, spec=dataclasses.replace(q.spec, granularity=granularity))


def with_integers(parameter: QuantizedParam, q: QArray) -> QuantizedParam:
    """The parameter with other integers and scales, of the same spec."""
    scales = scales_of(q).map(lambda v: grouping.of_rank(v, q.ndim))
    if parameter.quantized.zero_point is None:
        scales = scales._replace(zero_point=None)
    return dataclasses.replace(parameter, quantized=changed(q, scales, spec=parameter.quantized.spec))


def from_integers(f: Callable, values: Sequence[Any], of_parameter: Callable[[QuantizedParam], Any]) -> Any:
    """`f(*values)`, with what `of_parameter` makes of the parameters among them.

    What is made of integers alone is made again for a backward pass, which would else keep it in float.
    """
    result = lambda *values: f(*(of_parameter(v) if isinstance(v, QuantizedParam) else v for v in values))
    is_frozen = any(isinstance(v, QuantizedParam) and v.real is None for v in values)
    return (jax.checkpoint(result) if is_frozen else result)(*values)
