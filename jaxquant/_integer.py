# SPDX-License-Identifier: Apache-2.0
"""Contractions of quantized arrays: the exact integer contraction, scaled once.

The value is `acc * (scale_a * scale_b)` with `acc` the contraction of `values - zero_point` in integers. It is
computed in int8, or in float32 that holds integers, chunked so that no sum reaches 2 ** 24: the same bits, in any
order of summation, because no step rounds.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import _checks as checks
from . import _numerics as num
from ._affine import real_values
from ._groups import broadcast_groups
from ._qarray import QArray, checked_qarray
from ._spec import QuantSpec

# What comparing symbolic sizes raises; jax < 0.10 has it elsewhere.
_HOME = jax.errors if hasattr(jax.errors, "InconclusiveDimensionOperation") else jax.core
_INCONCLUSIVE = getattr(_HOME, "InconclusiveDimensionOperation")  # noqa: B009
_EXACT = 2**24  # float32 holds every integer up to it
EXECUTIONS = ("auto", "int8", "float32")


def _bound(spec: QuantSpec) -> int:
    """The largest magnitude of `values - zero_point`."""
    return max(-spec.qmin, spec.qmax) if spec.symmetric else spec.qmax - spec.qmin


class _Codes(NamedTuple):
    """Values for an integer unit: int8 and an int32 zero point, None for 0; or int32, centred, if one is wider."""

    values: Array
    zero: Array | None


def _centred(q: QArray, dtype: Any) -> Array:
    if q.spec.symmetric:
        return q.values.astype(dtype)
    zero = broadcast_groups(q.zero_point.astype(dtype), q.shape)
    return q.values.astype(dtype) - zero


def _codes(q: QArray, wide: bool) -> _Codes:
    if wide:
        return _Codes(_centred(q, jnp.int32), None)
    zero = q.zero_point.astype(jnp.int32)
    if q.spec.signed:
        return _Codes(q.values, None if q.spec.symmetric else zero)
    return _Codes(lax.bitcast_convert_type(q.values ^ jnp.uint8(128), jnp.int8), zero - 128)


def _in_output(name: str, v: Array, shape: tuple[int, ...], places: dict[int, int], ndim: int) -> Array:
    """A value for each group of an operand, with its axes where they are in the output: {axis: axis of the output}."""
    if v.ndim == 0:
        return v
    v = broadcast_groups(v, shape)
    inner = [i for i in range(len(shape)) if i not in places]
    if any(v.shape[i] not in (0, 1) for i in inner):
        raise ValueError(
            f"`{name}` has a scale of its own for each element along a contracted axis, which cannot be applied after "
            f"the contraction: scale of shape {v.shape}, values of shape {shape}, contracted axes {inner}. Share it "
            "along them: PerTensor, PerChannel on other axes, or, in dot_general, PerBlock along the contracted one."
        )
    if any(v.shape[i] == 0 for i in inner):  # nothing is contracted, and nothing scaled
        return jnp.ones([1] * ndim, v.dtype)
    kept = sorted(places)
    v = lax.reshape(v, [v.shape[i] for i in kept])
    sizes = [1] * ndim
    for i in kept:
        sizes[places[i]] = v.shape[kept.index(i)]
    order = sorted(range(len(kept)), key=lambda j: places[kept[j]])
    return lax.reshape(lax.transpose(v, order), sizes)


def _scaled(acc: Array, a_scale: Array, b_scale: Array) -> Array:
    return num.guard(acc.astype(jnp.float32) * (a_scale * b_scale))


def _is_at_most(length: Any, limit: int) -> bool:
    """Whether a length is, where it is symbolic too: then only if its constraints say so."""
    try:
        return length <= limit
    except _INCONCLUSIVE:
        return False


def _fits(length: Any, a: QuantSpec, b: QuantSpec, execution: str) -> None:
    largest = _bound(a) * _bound(b)
    limit = (2**31 - 1) // largest
    if not _is_at_most(length, limit):
        symbolic = "" if isinstance(length, int) else (
            f", or say that it is short enough: jax.export.symbolic_shape(..., constraints=['{length} <= {limit}'])"
        )  # fmt: skip
        raise ValueError(
            f"A contraction of {length} products of {a} and {b} does not fit int32: each is up to {largest}, and no "
            f"more than {limit} of them fit. Use fewer bits, or PerBlock along the contracted axis{symbolic}."
        )
    if execution == "float32" and largest > _EXACT:
        raise ValueError(
            f'`execution="float32"` holds integers up to 2 ** 24, got products up to {largest} of {a} and {b}. '
            'Pass execution="int8", which takes int32 for them.'
        )


def _chunks(length: Any, size: int) -> list[tuple[int, Any]]:
    """Where the chunks of at most `size` of a contracted axis start and end."""
    if isinstance(length, int):
        return [(start, min(start + size, length)) for start in range(0, max(length, 1), size)]
    if not _is_at_most(length, size):
        raise ValueError(
            f'`execution="float32"` contracts in chunks of {size}, and cannot count those of a symbolic length, '
            f'{length}. Pass execution="int8", or say that it is short enough: jax.export.symbolic_shape(..., '
            f"constraints=['{length} <= {size}'])."
        )
    return [(0, length)]


class Dot(NamedTuple):
    """`lax.dot_general` with dimension numbers ((contracted a, contracted b), (batch a, batch b)); static."""

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    execution: str

    def real(self, a: Array, b: Array) -> Array:
        """The float formulation, whose gradient is that of the op."""
        free = self._free(a.ndim, 0)
        if self.batch != ((), ()) or len(free) < 2 or any(axis is not None for axis in jax.typeof(a).sharding.spec):
            return lax.dot_general(a, b, (self.contracted, self.batch), preferred_element_type=jnp.float32)
        # As a matrix of rows: XLA:CPU takes up to twice the time for an activation of three axes.
        rows = [a.shape[i] for i in free]
        a = lax.reshape(
            lax.transpose(a, (*free, *self.contracted[0])), [math.prod(rows), *(a.shape[i] for i in self.contracted[0])]
        )
        inner = tuple(range(1, a.ndim))
        y = lax.dot_general(a, b, ((inner, self.contracted[1]), ((), ())), preferred_element_type=jnp.float32)
        return lax.reshape(y, [*rows, *y.shape[1:]])

    def exact(self, a: QArray, b: QArray) -> Array:
        """The scaled integer contraction, block by block where a scale changes along it."""
        blocks = [self._blocks(a, b, i, j) for i, j in zip(*self.contracted, strict=True)]
        if math.prod(blocks) == 1:
            return self._block(a, b)
        a, b = (
            _stacked(q, dict(zip(axes, blocks, strict=True))) for q, axes in zip((a, b), self.contracted, strict=True)
        )
        # One after the other, so that the order of the float sum is fixed.
        first = self._block(_first(a), _first(b))  # for its type alone: XLA drops the value
        total, _ = num.vary_together(num.shard_like(jnp.zeros_like(first), first), first)
        step = lambda total, blocks: (total + self._block(*blocks), None)
        return lax.scan(step, total, (a, b))[0]

    def _blocks(self, a: QArray, b: QArray, i: int, j: int) -> int:
        """How many runs of constant scale an axis has."""
        length = a.shape[i]
        runs = [_groups(q)[axis] for q, axis in ((a, i), (b, j))]
        if all(n == 1 for n in runs):
            return 1
        if length and any(n == length > 1 for n in runs):
            raise ValueError(
                f"Axis {i} of `a`, shape {a.shape}, and axis {j} of `b`, shape {b.shape}, are contracted, and one of "
                f"them has a scale of its own for each element: {a.spec}, {b.spec}. Share the scale along it: "
                "PerTensor, PerChannel on another axis, or PerBlock along it."
            )
        return length // math.gcd(*(length // max(n, 1) for n in runs)) if length else 1

    def _block(self, a: QArray, b: QArray) -> Array:
        length = math.prod(a.shape[i] for i in self.contracted[0])
        _fits(length, a.spec, b.spec, self.execution)
        acc = self._in_float32(a, b, length) if self.execution == "float32" else self._in_integers(a, b, length)
        a_at, b_at = self._places(a, b)
        return _scaled(
            acc, *(_in_output(n, q.scale, q.shape, at, acc.ndim) for n, q, at in (("a", a, a_at), ("b", b, b_at)))
        )

    def _free(self, ndim: int, side: int) -> list[int]:
        taken = {*self.contracted[side], *self.batch[side]}
        return [i for i in range(ndim) if i not in taken]

    def _places(self, a: QArray, b: QArray) -> tuple[dict[int, int], dict[int, int]]:
        """Which axis of the output each kept axis of `a` and of `b` becomes: batch, free of a, free of b."""
        a_free, b_free = self._free(a.ndim, 0), self._free(b.ndim, 1)
        of_a = dict(zip((*self.batch[0], *a_free), itertools.count()))
        return of_a, dict(zip(self.batch[1], itertools.count())) | dict(zip(b_free, itertools.count(len(of_a))))

    def _in_float32(self, a: QArray, b: QArray, length: int) -> Array:
        """Chunks that are exact in float32, added in int32."""
        x, w = _centred(a, jnp.float32), _centred(b, jnp.float32)
        contracted = self.contracted
        if len(contracted[0]) != 1:  # to one contracted axis, the last
            x, w = (
                lax.reshape(lax.transpose(v, (*batch, *free, *inner)), [*(v.shape[i] for i in (*batch, *free)), length])
                for v, batch, free, inner in (
                    (x, self.batch[0], self._free(a.ndim, 0), contracted[0]),
                    (w, self.batch[1], self._free(b.ndim, 1), contracted[1]),
                )
            )
            leading = tuple(range(len(self.batch[0])))
            contracted, batch = ((x.ndim - 1,), (w.ndim - 1,)), (leading, leading)
        else:
            batch = self.batch
        (i,), (j,) = contracted
        size = _EXACT // (_bound(a.spec) * _bound(b.spec))
        total = 0
        for start, end in _chunks(length, size):
            parts = lax.slice_in_dim(x, start, end, axis=i), lax.slice_in_dim(w, start, end, axis=j)
            part = lax.dot_general(*parts, (contracted, batch), lax.Precision.HIGHEST, jnp.float32)
            total = total + part.astype(jnp.int32)
        return jnp.asarray(total)

    def _in_integers(self, a: QArray, b: QArray, length: int) -> Array:
        if self._free(a.ndim, 0) and not self._free(b.ndim, 1):  # a vector as the row that is padded, not as a column
            (ca, cb), (ba, bb) = self.contracted, self.batch
            return Dot((cb, ca), (bb, ba), self.execution)._in_integers(b, a, length)
        wide = max(a.spec.bits, b.spec.bits) > 8
        (x, a_zero), (w, b_zero) = _codes(a, wide), _codes(b, wide)
        (ca, cb), (ba, bb) = self.contracted, self.batch
        free, outer = self._free(a.ndim, 0), len(ba)
        # (batch, rows, contracted): XLA:CPU is fast on rows, and slow on fewer than four; of a symbolic number of rows,
        # of an exported program, nobody knows whether they are. It folds a transpose back into the contraction, which
        # is then in no library and up to ten times slower than in float32; of one more row it writes a copy.
        rows, order = math.prod(a.shape[i] for i in free), (*ba, *free, *ca)
        missing = max(4 - rows, 0) if isinstance(rows, int) else 0
        missing = max(missing, int(order != tuple(range(a.ndim))))
        x = lax.transpose(x, order)
        x = lax.reshape(x, [*(a.shape[i] for i in ba), rows, *(a.shape[i] for i in ca)])
        # A row of ones sums the columns of b, which a reduction does in several times the time of the contraction. On
        # a mesh with explicit axes it would not have the sharding of the others.
        replicated = all(axis is None for axis in jax.typeof(x).sharding.spec)
        ones = int(a_zero is not None and replicated)
        if extra := max(ones, missing if replicated else 0):
            fill = jnp.ones_like(x, shape=[extra if k == outer else n for k, n in enumerate(x.shape)])
            x = lax.concatenate([x, fill], outer)
        inner = tuple(range(outer + 1, x.ndim))
        dot = lambda x, w, c, batch: lax.dot_general(x, w, ((inner, c), batch), preferred_element_type=jnp.int32)
        product = dot(x, w, cb, (tuple(range(outer)), bb))
        acc = lax.slice_in_dim(product, 0, rows, axis=outer)
        acc = lax.reshape(acc, [*acc.shape[:outer], *(a.shape[i] for i in free), *acc.shape[outer + 1 :]])
        a_at, b_at = self._places(a, b)
        place = lambda name, zero, q, at: _in_output(name, zero, q.shape, at, acc.ndim)
        if b_zero is not None:
            b_zero = place("b", b_zero, b, b_at)
            few = jnp.ones_like(x, shape=[*(a.shape[i] for i in ba), *(a.shape[i] for i in ca), 4])
            leading = tuple(range(outer))
            sums = dot(x, few, tuple(range(outer, outer + len(ca))), (leading, leading))
            sums = lax.slice_in_dim(sums, 0, rows, axis=outer)[..., 0]
            sums = lax.reshape(sums, [*acc.shape[: outer + len(free)], *[1] * (acc.ndim - outer - len(free))])
            acc = acc - b_zero * sums
        if a_zero is not None:
            a_zero = place("a", a_zero, a, a_at)
            if ones:
                sums = lax.slice_in_dim(product, rows, rows + 1, axis=outer)
            else:
                sums = jnp.sum(w, cb, dtype=jnp.int32)
                left = [i for i in range(b.ndim) if i not in cb]
                sums = lax.transpose(sums, [left.index(i) for i in (*bb, *self._free(b.ndim, 1))])
            sums = lax.reshape(sums, [*acc.shape[:outer], *[1] * len(free), *acc.shape[outer + len(free) :]])
            acc = acc - a_zero * (sums if b_zero is None else sums - length * b_zero)
        return acc


def _groups(q: QArray) -> tuple[int, ...]:
    return (1,) * (q.ndim - q.scale.ndim) + q.scale.shape


def _stacked(q: QArray, blocks: dict[int, int]) -> QArray:
    """The blocks along the contracted axes, {axis: number}, as a leading axis of each array of `q`."""

    def stack(v: Array, groups: Sequence[int]) -> Array:
        parts = [p for i, n in enumerate(groups) for p in ((blocks[i], n // blocks[i]) if i in blocks else (n,))]
        at = [i + sum(j < i for j in blocks) for i in blocks]
        rest = [i for i in range(len(parts)) if i not in at]
        v = lax.transpose(lax.reshape(v, parts), (*at, *rest))
        return lax.reshape(v, [math.prod(blocks.values()), *v.shape[len(at) :]])

    # At least one value for each block, also where one was shared by several.
    sizes = [blocks.get(i, g) for i, g in enumerate(_groups(q))]
    split = lambda v: stack(
        jnp.broadcast_to(v, sizes) if v.ndim == 0 else jnp.broadcast_to(broadcast_groups(v, tuple(sizes)), sizes), sizes
    )
    return QArray(stack(q.values, q.shape), split(q.scale), split(q.zero_point), q.spec, q.dtype)


def _first(q: QArray) -> QArray:
    return jax.tree.map(lambda v: v[0], q)


@jax.custom_vjp
def _held(x: Array, q: QArray) -> Array:
    """The real values of `q`, with the gradient to `x`: the same values, which so need not be kept."""
    return real_values(q, q.dtype, guarded=False)


_held.defvjp(lambda x, q: (_held(x, q), None), lambda _, g: (g, None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def contract(op: Any, x: Array, w: Array, a: QArray, b: QArray, marks: tuple[Array, Array] | None = None) -> Array:
    """`op.exact(a, b)`, with the gradients of `op.real` to `x` and `w`, the real values of `a` and `b`.

    `x` and `w` are there to be differentiated, twice too; no pass computes their values, which it has as integers.
    `marks` are added to the scales of the result alone.
    """
    if marks is not None:
        a, b = (dataclasses.replace(q, scale=q.scale + mark) for q, mark in zip((a, b), marks, strict=True))
    return op.exact(a, b)


def _contract_bwd(op, residuals, g):
    x, w, a, b = residuals
    return *jax.vjp(op.real, _held(x, a), _held(w, b))[1](g), None, None, None


contract.defvjp(lambda op, x, w, a, b, marks: (contract(op, x, w, a, b, marks), (x, w, a, b)), _contract_bwd)


@functools.partial(jax.jit, static_argnames="op")
def _op(a: QArray, b: QArray, op: Any) -> Array:
    a, b = (dataclasses.replace(q, dtype=jnp.dtype(jnp.float32)) for q in (a, b))
    return contract(op, real_values(a, a.dtype), real_values(b, b.dtype), a, b, None)


def checked_execution(value: Any) -> str:
    """Returns `execution` with what is best here for "auto"."""
    value = checks.one_of("execution", value, EXECUTIONS)
    return "int8" if value == "auto" else value


def _dimension_numbers(value: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
    is_pair = lambda v: isinstance(v, tuple | list) and len(v) == 2
    if not is_pair(value) or not all(is_pair(v) and all(isinstance(i, tuple | list) for i in v) for v in value):
        raise TypeError(
            "`dimension_numbers` must be ((contracted a, contracted b), (batch a, batch b)), each a tuple of axes, got "
            f"{value!r}. A matmul is (((1,), (0,)), ((), ()))."
        )
    names = "dimension_numbers of a", "dimension_numbers of b"
    return tuple(tuple(map(checks.static_ints, names, pair)) for pair in value)


def _axes(name: str, axes: tuple[int, ...], ndim: int) -> None:
    if not all(0 <= i < ndim for i in axes) or len(set(axes)) < len(axes):
        raise ValueError(f"`{name}` must be different axes in [0, {ndim}), got {axes}. Count them from the front.")


def dot_general(a: QArray, b: QArray, dimension_numbers: Any, *, execution: str = "auto") -> Array:
    """The general dot product of the real values of two quantized arrays, computed in integers.

        acc * (a.scale * b.scale),  acc = the contraction of (a.values - a.zero_point) and (b.values - b.zero_point)

    exactly, and rounded in the two products alone. Where a scale changes along the contracted axis (PerBlock), that of
    each block, added in order.

    Args:
      a, b: QArray of any shapes. Scales may differ along batch and free axes, and by blocks along contracted ones.
      dimension_numbers: static, ((contracted a, contracted b), (batch a, batch b)) as in `jax.lax.dot_general`.
      execution: static; cannot change a bit. "int8": int8 x int8 -> int32, int32 if a value is wider than 8 bits.
        "float32": integers in float32, in chunks that are exact. "auto" is "int8".

    Returns:
      float32; its axes are batch, free of a, free of b.

    Gradient: that of `lax.dot_general` of the dequantized arrays, so to the scales; none to integers. `jax.jvp` raises.

    Raises:
      TypeError: for anything but QArrays.
      ValueError: for dimension numbers or shapes that do not fit, a scale that changes with every element along a
        contracted axis, or a contraction so long that it may not fit int32: 133,144 products at 8 x 8 bits
        symmetric, 66,311 if one is affine, 516 at 16 x 8. Products beyond 2 ** 24 have no execution="float32".

    Source: Jacob et al., 2018; ONNX MatMulInteger.

    >>> import jax.numpy as jnp
    >>> from jaxquant import QParams, QuantSpec, dot_general, quantize
    >>> q = quantize(jnp.array([1.0, 2.0]), QuantSpec(), QParams(0.5, 0.0))
    >>> dot_general(q, q, (((0,), (0,)), ((), ()))).item()
    5.0
    """
    a, b = checked_qarray("a", a), checked_qarray("b", b)
    (ca, cb), (ba, bb) = _dimension_numbers(dimension_numbers)
    _axes("dimension_numbers of a", (*ca, *ba), a.ndim)
    _axes("dimension_numbers of b", (*cb, *bb), b.ndim)
    for what, of_a, of_b in (("contracted", ca, cb), ("batch", ba, bb)):
        sizes = [tuple(q.shape[i] for i in axes) for q, axes in ((a, of_a), (b, of_b))]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"The {what} axes must have the same sizes, got {sizes[0]} of `a`, shape {a.shape}, and {sizes[1]} of "
                f"`b`, shape {b.shape}. Correct dimension_numbers={dimension_numbers}."
            )
    return _op(a, b, Dot((ca, cb), (ba, bb), checked_execution(execution)))


class Conv(NamedTuple):
    """`lax.conv_general_dilated` with everything static resolved."""

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    a_dilation: tuple[int, ...]
    b_dilation: tuple[int, ...]
    dimensions: lax.ConvDimensionNumbers
    feature_groups: int
    batch_groups: int
    execution: str

    def real(self, a: Array, b: Array, dtype: Any = jnp.float32, precision: Any = None) -> Array:
        """The float formulation, whose gradient is that of the op."""
        windows = ((b.shape[i] - 1) * d for i, d in zip(self.dimensions.rhs_spec[2:], self.b_dilation, strict=True))
        if any(not 0 <= p <= window for pads, window in zip(self.padding, windows, strict=True) for p in pads):
            # XLA:CPU reads outside of an input with negative low padding (openxla/xla 48713), which is what padding
            # wider than the window becomes in a gradient.
            a, self = self._padded(a, jnp.zeros((), a.dtype))
        return lax.conv_general_dilated(
            a, b, *self[:6], self.batch_groups, precision=precision, preferred_element_type=dtype
        )

    def exact(self, a: QArray, b: QArray) -> Array:
        """The scaled integer convolution."""
        length = math.prod(b.shape) // max(b.shape[self.dimensions.rhs_spec[0]], 1)
        _fits(length, a.spec, b.spec, self.execution)
        acc = self._in_float32(a, b) if self.execution == "float32" else self._in_integers(a, b, length)
        return _scaled(acc, self._place("a", a.scale, a, acc.ndim), self._place("b", b.scale, b, acc.ndim))

    def _place(self, name: str, v: Array, q: QArray, ndim: int) -> Array:
        """Scales may differ along the batch of `a` and the output features of `b`."""
        if name == "b":
            return _in_output(name, v, q.shape, {self.dimensions.rhs_spec[0]: self.dimensions.out_spec[1]}, ndim)
        places = {self.dimensions.lhs_spec[0]: self.dimensions.out_spec[0]} if self.batch_groups == 1 else {}
        return _in_output(name, v, q.shape, places, ndim)

    def _in_float32(self, a: QArray, b: QArray) -> Array:
        """Chunks of input features that are exact in float32, added in int32."""
        total = 0
        for x, w in self._chunks(_centred(a, jnp.float32), _centred(b, jnp.float32), _bound(a.spec) * _bound(b.spec)):
            total = total + self.real(x, w, precision=lax.Precision.HIGHEST).astype(jnp.int32)
        return jnp.asarray(total)

    def _chunks(self, x: Array, w: Array, largest: int) -> Iterator[tuple[Array, Array]]:
        feature, (_, inner, *window) = self.dimensions.lhs_spec[1], self.dimensions.rhs_spec
        area, features = math.prod(w.shape[i] for i in window), w.shape[inner]
        size = max(_EXACT // (largest * max(area, 1)), 1)
        if size >= features and area * largest <= _EXACT:
            yield x, w
            return
        grouped = lambda v: v.reshape(*v.shape[:feature], self.feature_groups, features, *v.shape[feature + 1 :])
        for start in range(0, features, size):
            end = min(start + size, features)
            part = lax.slice_in_dim(grouped(x), start, end, axis=feature + 1)
            part = part.reshape(*x.shape[:feature], self.feature_groups * (end - start), *x.shape[feature + 1 :])
            kernel = lax.slice_in_dim(w, start, end, axis=inner)
            # A window that is too large by itself: all but a run of it is 0 in each chunk.
            place = sum(
                lax.broadcasted_iota(jnp.int32, kernel.shape, i) * math.prod(w.shape[j] for j in window[n + 1 :])
                for n, i in enumerate(window)
            )
            run = _EXACT // largest
            for low in range(0, area, run):
                inside = (low <= place) & (place < low + run)
                yield part, kernel if area <= run else jnp.where(inside, kernel, 0)

    def _in_integers(self, a: QArray, b: QArray, length: int) -> Array:
        wide = max(a.spec.bits, b.spec.bits) > 8
        (x, a_zero), (w, b_zero) = _codes(a, wide), _codes(b, wide)
        op = self
        if a_zero is not None:  # what pads is real 0, the zero point, not the code 0
            x, op = self._padded(x, broadcast_groups(a_zero, a.shape))
        acc = op.real(x, w, jnp.int32)
        if a_zero is not None:
            out, *inner = self.dimensions.rhs_spec
            columns = jnp.sum(w, tuple(inner), dtype=jnp.int32, keepdims=True)
            columns = _in_output("b", columns, b.shape, {out: self.dimensions.out_spec[1]}, acc.ndim)
            acc = acc - self._place("a", a_zero, a, acc.ndim) * columns
        if b_zero is not None:
            windows = op.real(x, jnp.ones_like(w), jnp.int32)
            if a_zero is not None:
                windows = windows - length * self._place("a", a_zero, a, acc.ndim)
            acc = acc - self._place("b", b_zero, b, acc.ndim) * windows
        return acc

    def _padded(self, x: Array, zero: Array) -> tuple[Array, "Conv"]:
        """`x` padded and dilated by its zero point, and the convolution that is left to do."""
        config = [(0, 0, 0)] * x.ndim
        for axis, (low, high), dilation in zip(
            self.dimensions.lhs_spec[2:], self.padding, self.a_dilation, strict=True
        ):
            config[axis] = (low, high, dilation - 1)
        fill = zero.astype(x.dtype)
        if fill.ndim == 0:
            padded = lax.pad(x, fill, config)
        else:
            padded = lax.pad(x, jnp.int8(0), config)
            padded = jnp.where(lax.pad(jnp.ones_like(x), jnp.int8(0), config) == 1, padded, fill)
        none = tuple((0, 0) for _ in self.padding)
        return padded, self._replace(padding=none, a_dilation=(1,) * len(none))


def _steps(name: str, value: Any, spatial: int) -> tuple[int, ...]:
    """Strides or dilations, one for each spatial axis."""
    steps = checks.static_ints(name, value)
    if len(steps) != spatial or any(n < 1 for n in steps):
        raise ValueError(
            f"`{name}` must be {spatial} ints of at least 1, one a spatial axis, got {steps}. Pass them all."
        )
    return steps


def _pads(padding: Any, spatial: int) -> tuple[tuple[int, int], ...]:
    is_pairs = isinstance(padding, tuple | list) and all(isinstance(p, tuple | list) and len(p) == 2 for p in padding)
    if not is_pairs or len(padding) != spatial:
        raise TypeError(
            '`padding` must be "SAME", "SAME_LOWER", "VALID" or a pair (low, high) for each spatial axis, got '
            f"{padding!r}. Pass ((1, 1), (1, 1)) for 1 on every side of an image."
        )
    return tuple((checks.static_int("padding", low), checks.static_int("padding", high)) for low, high in padding)


def conv_general_dilated(
    a: QArray,
    b: QArray,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    *,
    execution: str = "auto",
) -> Array:
    """The convolution of the real values of two quantized arrays, computed in integers; padding is real 0.

    Args:
      a: QArray, the input; its scale may differ from example to example.
      b: QArray, the kernel; its scale may differ between output features.
      window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, batch_group_count:
        static, as in `jax.lax.conv_general_dilated`.
      execution: static, as in `dot_general`; cannot change a bit.

    Returns:
      float32, the shape of `lax.conv_general_dilated`.

    Gradient: that of `lax.conv_general_dilated` of the dequantized arrays, so to the scales; none to integers.
    `jax.jvp` raises.

    Raises:
      TypeError: for anything but QArrays.
      ValueError: for shapes or arguments that `jax.lax.conv_general_dilated` refuses, a scale that changes along
        contracted axes, PerBlock among them, or a window so large that its sum may not fit int32.

    Source: Jacob et al., 2018; ONNX ConvInteger.

    >>> import jax.numpy as jnp
    >>> from jaxquant import QParams, QuantSpec, conv_general_dilated, quantize
    >>> x = quantize(jnp.ones((1, 1, 4)), QuantSpec(symmetric=False), QParams(0.5, 7.0))
    >>> kernel = quantize(jnp.ones((1, 1, 3)), QuantSpec(), QParams(1.0, 0.0))
    >>> conv_general_dilated(x, kernel, (1,), "SAME").tolist()
    [[[2.0, 3.0, 3.0, 2.0]]]
    """
    a, b = checked_qarray("a", a), checked_qarray("b", b)
    if a.ndim != b.ndim or a.ndim < 2:
        raise ValueError(
            f"`a` and `b` must have one rank, at least 2, got shapes {a.shape} and {b.shape}. Add the batch, feature "
            "or kernel axes that are missing."
        )
    dimensions = lax.conv_dimension_numbers(a.shape, b.shape, dimension_numbers)
    ones = (1,) * (a.ndim - 2)
    window_strides = _steps("window_strides", window_strides, a.ndim - 2)
    a_dilation = _steps("lhs_dilation", ones if lhs_dilation is None else lhs_dilation, a.ndim - 2)
    b_dilation = _steps("rhs_dilation", ones if rhs_dilation is None else rhs_dilation, a.ndim - 2)
    groups = checks.static_int("feature_group_count", feature_group_count)
    batch_groups = checks.static_int("batch_group_count", batch_group_count)
    if isinstance(padding, str):
        checks.one_of("padding", padding, ("SAME", "SAME_LOWER", "VALID"))
        if any(d != 1 for d in a_dilation):
            raise ValueError(
                f"`padding` must be pairs of numbers where lhs_dilation is not 1, got {padding!r} with lhs_dilation="
                f"{a_dilation}. Compute them for the transposed convolution."
            )
        windows = [(b.shape[i] - 1) * d + 1 for i, d in zip(dimensions.rhs_spec[2:], b_dilation, strict=True)]
        padding = lax.padtype_to_pads([a.shape[i] for i in dimensions.lhs_spec[2:]], windows, window_strides, padding)
    pads = _pads(padding, a.ndim - 2)
    conv = Conv(
        window_strides, pads, a_dilation, b_dilation, dimensions, groups, batch_groups,
        checked_execution(execution),
    )  # fmt: skip
    # JAX checks the shapes, as it does for floats.
    jax.eval_shape(conv.real, *(jax.ShapeDtypeStruct(q.shape, np.float32) for q in (a, b)))
    return _op(a, b, conv)
