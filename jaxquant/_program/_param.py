# SPDX-License-Identifier: Apache-2.0
"""A quantized parameter on its way to the ops that use it: it travels with its scales."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import PartitionSpec as P

from .._arrays._at_rest import Form
from .._arrays._qparams import QParams
from .._arrays._quantized import Quantized, moved
from .._arrays._straight_through import Fitted, fitted_to_stack, quantize_straight_through
from .._base import _groups as grouping
from .._spec._granularity import PerTensor, granularity_of
from .._spec._spec import QuantSpec, qparams_shape
from ._jaxpr import Equation

_Cast = tuple[Any, tuple[tuple[str, Any], ...]]  # a primitive and its parameters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedParam:
    """A parameter, a named value, a cache, or a part: what moves it moves integers, real values and scales alike.

    Attributes:
      quantized: its integers, which no cast changes, and their scales.
      real: its real values, as ops that contract it differentiate them; casts round them. None of integers alone.
      as_read: its values for what else reads it, if anything does and they are others.
      nan_flags: for its groups, NaN where one of their values was; None where none can be.
      paths: of the parameter; of several that were concatenated, all.
      casts: what casts it has been through.
      is_value: whether it is a named value, which has a range of its own on each device.
      form: how a cache lay in memory when it came; `paths` is its one path, and it is written in parts. Else None.
    """

    quantized: Quantized
    real: Array | None
    as_read: Array | None
    nan_flags: Array | None
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    casts: tuple[_Cast, ...] = dataclasses.field(default=(), metadata={"static": True})
    is_value: bool = dataclasses.field(default=False, metadata={"static": True})
    form: Form | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def is_cache(self) -> bool:
        return self.form is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return self.quantized.shape

    def moves(
        self, of_values: Callable[[Any], Sequence[Any]], of_groups: Callable[[Any], Sequence[Any]], n: int
    ) -> list["QuantizedParam"]:
        """The `n` results of what moves it, as `Quantized.moves`."""
        floats = [moved(of_values, v, n) for v in (self.real, self.as_read)]
        each = self.quantized.moves(of_values, of_groups, n), *floats, moved(of_groups, self.nan_flags, n)
        names = "quantized", "real", "as_read", "nan_flags"
        return [dataclasses.replace(self, **dict(zip(names, of, strict=True))) for of in zip(*each, strict=True)]

    def move(self, of_values: Callable[[Any], Any], of_groups: Callable[[Any], Any]) -> "QuantizedParam":
        """The result of what moves it."""
        return self.moves(lambda v: [of_values(v)], lambda v: [of_groups(v)], 1)[0]

    def ordered(self) -> "QuantizedParam":
        """The parameter with its integers as its values are, in order and dtype: what moves them counts on it."""
        return dataclasses.replace(self, quantized=self.quantized.ordered())

    def of_turn(self) -> "QuantizedParam":
        """The parameter as every iteration of a loop, and every branch, has it."""
        if self.form is None:
            return self.ordered()
        return dataclasses.replace(self, quantized=self.form.of_turn(self.quantized))

    def without_sums(self) -> "QuantizedParam":
        return dataclasses.replace(self, quantized=self.quantized.without_sums())

    def map_floats(self, f: Callable[[Any], Any]) -> "QuantizedParam":
        real, as_read = (None if v is None else f(v) for v in (self.real, self.as_read))
        return dataclasses.replace(self, real=real, as_read=as_read)

    def cast(self, x: Array) -> Array:
        for primitive, params in self.casts:
            x = primitive.bind(x, **dict(params))
        return x


class Pending(NamedTuple):
    """A move or a cast of a parameter that is still to be quantized: it follows the quantizer. Static."""

    eqn: Equation
    of: Callable[[Any, Sequence[QuantizedParam]], list[QuantizedParam]]
    is_cast: bool


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("value", "qparams"),
    meta_fields=("spec", "contracted", "keeps_codes", "moves", "path", "layers"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Unquantized:
    """An operand that is quantized where it is used: an input, or a parameter, perhaps of one of several layers.

    Attributes:
      value: in float, before any cast and move.
      qparams, spec, contracted, keeps_codes: of its quantizer.
      moves: what casts and moves it has been through, which follow its quantizer.
      path: of a parameter; empty in a compiled function, which several sites share.
      layers: axes of a parameter along which it is a stack: no op has them.
    """

    value: Array
    qparams: QParams | Fitted | None
    spec: QuantSpec
    contracted: tuple[int, ...] | None
    keeps_codes: bool = False
    moves: tuple[Pending, ...] = ()
    path: str = ""
    layers: frozenset[int] = frozenset()

    def quantized(self, how: Callable[..., Any] = quantize_straight_through) -> QuantizedParam:
        real, q, nan_flags = how(self.value, self.spec, self.contracted, None, self.qparams, self.keeps_codes)
        parameter = QuantizedParam(q, real, None, nan_flags, (self.path,))
        return functools.reduce(lambda v, move: move.of(move.eqn, [v])[0], self.moves, parameter)

    def is_stack(self, axes: Collection[int]) -> bool:
        """Whether it can be taken apart along these axes: a part has the scales that it has in the stack."""
        if not self.layers.issuperset(axes) or not all(move.is_cast for move in self.moves):
            return False
        is_trained = isinstance(self.qparams, QParams) and self.spec.scales.has_tensor_scale
        return not is_trained and set(axes).isdisjoint(self.contracted or ())

    def then(self, move: Pending) -> "Unquantized":
        return dataclasses.replace(self, moves=(*self.moves, move))

    def apart(self, axes: Collection[int]) -> "Unquantized":
        """The same, with an own scale for each element along some axes of layers, beside one of the tensor."""
        shape, qparams = self.value.shape, self.qparams
        if qparams is None and not self.spec.scales.has_tensor_scale:
            return self
        qparams = fitted_to_stack(self.value, self.spec) if qparams is None else qparams

        def of_each(v: Array) -> Array:
            v = grouping.of_rank(v, len(shape))
            return functools.reduce(lambda v, axis: grouping.apart(v, axis, shape[axis]), axes, v)

        return dataclasses.replace(self, qparams=jax.tree.map(of_each, qparams))

    def parts(
        self, f: Callable[[QuantizedParam], Sequence[QuantizedParam]], axes: Sequence[Sequence[int]]
    ) -> list["Unquantized"]:
        """The parts that `f` makes of it, which is apart: which of its axes each axis of a part runs along."""
        own = {} if self.qparams is None else self.qparams._asdict()
        scales = dict.fromkeys(("scale", "zero_point")) | own
        whole, shape = Quantized(None, spec=self.spec, dtype=self.value.dtype, **scales), self.value.shape
        parts = f(QuantizedParam(whole, self.value, None, None, (self.path,)))

        def of(part: QuantizedParam, axes: Sequence[int]) -> "Unquantized":
            qparams = self.qparams and self.qparams._replace(**{name: getattr(part.quantized, name) for name in own})
            return self._part(part.real, qparams, axes, shape)

        return list(map(of, parts, axes))

    def layer(self) -> "Unquantized":
        """An element of the first axis, of whose arrays a scan has taken it already."""
        return self._part(self.value, self.qparams, range(1, self.value.ndim + 1), (1, *self.value.shape))

    def _part(
        self, value: Any, qparams: QParams | Fitted | None, axes: Sequence[int], whole: tuple[int, ...]
    ) -> "Unquantized":
        groups = qparams_shape(self.spec, whole) or (1,) * len(whole)
        own = [n if groups[i] == whole[i] else groups[i] for i, n in zip(axes, value.shape, strict=True)]
        spec = dataclasses.replace(self.spec, granularity=granularity_of(tuple(own), value.shape))
        places = lambda of: (j for j, i in enumerate(axes) if i in of)
        contracted = None if self.contracted is None else tuple(places(self.contracted))
        layers = frozenset(places(self.layers))
        return dataclasses.replace(self, value=value, qparams=qparams, spec=spec, contracted=contracted, layers=layers)


def quantized_now(v: Any) -> Any:
    """A value, quantized if it is a parameter that is still to be."""
    return v.quantized() if isinstance(v, Unquantized) else v


def stacked(parameter: Any, n: int) -> Any:
    """The parameter to be scanned along its first axis, of length `n`: with values for each element of that."""
    if isinstance(parameter, Unquantized):
        return parameter.apart([0]) if parameter.is_stack([0]) else stacked(parameter.quantized(), n)
    if not parameter.quantized.lies_whole([0]):
        parameter = parameter.ordered()
    return parameter.move(lambda v: v, lambda v: grouping.apart(v, 0, n))


def sharded(parameter: Any, shape: tuple[int, ...], spec: P, mesh: Any) -> tuple[Any, Any]:
    """The parameter to be taken apart by shard_map as its values are; and how, which is a pytree of specs like it."""
    spec = P(*spec, *[None] * (len(shape) - len(spec)))
    if isinstance(parameter, Unquantized):
        split = [i for i, names in enumerate(spec) if names is not None]
        parameter = parameter.apart(split) if parameter.is_stack(split) else parameter.quantized()

    def parts(axis: int) -> int:
        names = spec[axis]
        return math.prod(mesh.shape[name] for name in (names if isinstance(names, tuple) else (names,)) if name)

    def fitting(v: Array) -> Array:
        for i, n in enumerate(shape):
            if v.shape[i] > 1 and v.shape[i] % parts(i):
                v = grouping.apart(v, i, n)
        return v

    of_groups = lambda v: P(*(s if n > 1 else None for n, s in zip(v.shape, spec, strict=True)))
    if isinstance(parameter, QuantizedParam):
        parameter = parameter.ordered().move(lambda v: v, fitting)
    return parameter, jax.tree.map(lambda v: spec if v.shape == shape else of_groups(v), parameter)


def put_together(parts: QuantizedParam, cache: QuantizedParam) -> QuantizedParam:
    """A cache of the parts that devices had in shard_map, each with scales of its own; it came there as `cache`."""
    q, before = parts.quantized, cache.quantized
    if q.spec.granularity == PerTensor():  # whose one scale stays
        whole = dataclasses.replace(
            q, scale=before.scale, zero_point=before.zero_point, tensor_scale=before.tensor_scale
        )
        return dataclasses.replace(parts, quantized=whole)
    groups = enumerate(zip(before.groups, q.groups, strict=True)) if q.shape == before.shape else ()
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
    return _dequantized(parameter.quantized, parameter.nan_flags, guarded)


@functools.partial(jax.jit, static_argnames="guarded")
def _dequantized(q: Quantized, nan_flags: Array | None, guarded: bool) -> Array:
    value = q.real(q.dtype, guarded or bool(q.spec.format))  # floats have a -0, of which the guard makes 0
    return value if nan_flags is None else value + grouping.broadcast_groups(nan_flags, value.shape).astype(value.dtype)


def from_integers(f: Callable, values: Sequence[Any], of_parameter: Callable[[QuantizedParam], Any]) -> Any:
    """`f(*values)`, with what `of_parameter` makes of the parameters among them.

    What is made of integers alone is made again for a backward pass, which would else keep it in float.
    """
    result = lambda *values: f(*(of_parameter(v) if isinstance(v, QuantizedParam) else v for v in values))
    is_frozen = any(isinstance(v, QuantizedParam) and v.real is None for v in values)
    return (jax.checkpoint(result) if is_frozen else result)(*values)
