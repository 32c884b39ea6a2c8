# SPDX-License-Identifier: Apache-2.0
"""The general dot product of quantized arrays."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from .._arrays._codes import centred, codes, sums_along
from .._arrays._qarray import QArray, checked_qarray, inside
from .._arrays._quantized import Quantized, permutation
from .._arrays._straight_through import quantize_straight_through
from .._base import _checks as checks
from .._base import _numerics as num
from .._base._axes import Axes, arranged, dot_axes, dot_numbers, dot_output, in_output, int_pairs
from .._base._groups import broadcast_groups
from .._base._sharding import is_explicit, replicated, shard_like, vary_together
from .._platform._cpu import computed_once
from .._platform._dots import bfloat16_dot, float_dot, integer_dot
from .._spec._granularity import granularity_of
from .._spec._spec import QuantSpec, checked_spec
from ._contract import ContractionOp, checked_either, contract, contraction, is_weight_only, scaled, without_zeros
from ._digits import in_digits, sum_of_digits
from ._dot_gradient import Factors, integer_factor, scaled_by
from ._in_groups import in_groups
from ._lowering import Lowering, check_int32, checked_execution, chosen
from ._native import asks_native, is_of_floats, native_dot
from ._operands import QuantizedOperand, Rounding, rounded
from ._weight_only import by_columns, is_scaled_behind, of_integers


@dataclasses.dataclass(frozen=True)
class Dot(ContractionOp):
    """`lax.dot_general` with dimension numbers ((contracted a, contracted b), (batch a, batch b)).

    `most` is how many products of a sum can be other than 0, where that is known to be fewer than all.
    """

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    most: int | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any], **attributes: Any) -> Self:
        return cls(*int_pairs(params["dimension_numbers"]), **attributes)

    def axes(self, ndims: Sequence[int]) -> Axes:
        a, b, out = map(tuple, dot_axes(self.contracted, self.batch, ndims))
        return Axes((a, b), out)

    @property
    def takes_blocks(self) -> bool:
        return True

    @property
    def turned(self) -> "Dot":
        """The product of the operands in the other order."""
        (ca, cb), (ba, bb), (of_a, of_b) = self.contracted, self.batch, self.gradient
        return Dot((cb, ca), (bb, ba), self.most, execution=self.execution, gradient=(of_b, of_a), dtype=self.dtype)

    def order_at_rest(self, side: int, ndim: int) -> Sequence[int]:
        free, contracted = self._free(ndim, side), self.contracted[side]
        return (*self.batch[side], *free, *contracted) if len(free) == len(contracted) == 1 else ()

    def real(self, a: Array, b: Array, *more: Array) -> Array:
        """The float formulation, which has the gradient of the op."""
        return float_dot(a, b, (self.contracted, self.batch), self.dtype)

    def exact(self, a: Quantized, b: Quantized, *more: Array) -> Array:
        """The scaled integer contraction, block by block where a scale changes along it; or of floats as they are."""
        if asks_native(self.execution, a, b):
            return self._native(a, b)
        specs, lowering = (a.spec, b.spec), chosen(LOWERINGS, self.execution)
        (stored_a, *of_a), (stored_b, *of_b) = (
            _as_stored(q, *axes) for q, *axes in zip((a, b), self.contracted, self.batch, strict=True)
        )
        (ca, cb), (ba, bb) = zip(of_a, of_b, strict=True)
        blocks_of = lambda a, b: [self._blocks(a, b, specs, i, j) for i, j in zip(ca, cb, strict=True)]

        def is_short() -> bool:
            length = math.prod(stored_a.shape[i] for i in ca) // max(math.prod(blocks_of(stored_a, stored_b)), 1)
            return lowering.takes(length if self.most is None else min(length, self.most), *specs)

        parts = in_digits(stored_a, stored_b, (ca, cb), is_short)
        blocks = blocks_of(parts[0][0], parts[1][0])
        dot = dataclasses.replace(self, contracted=(ca, cb), batch=(ba, bb))
        if math.prod(blocks) == 1:
            return dot._block(*parts, specs, lowering)
        stacked = [
            [_stacked(q, dict(zip(axes, blocks, strict=True))) for q in digits]
            for digits, axes in zip(parts, dot.contracted, strict=True)
        ]
        # One after the other, so that the order of the float sum is fixed.
        block = lambda a, b: dot._block(a, b, specs, lowering)
        first = block(_first(stacked[0]), _first(stacked[1]))  # for its type alone: XLA drops the value
        total, _ = vary_together(shard_like(jnp.zeros_like(first), first), first)
        add = lambda total, blocks: (total + block(*blocks), None)
        return lax.scan(add, total, stacked)[0]

    def _at_rest(self, a: Quantized, b: Quantized) -> tuple["Dot", Quantized, Quantized]:
        """The operands, and the product, in the order in which they lie in memory."""
        (a, ca, ba), (b, cb, bb) = (
            _as_stored(q, *axes) for q, *axes in zip((a, b), self.contracted, self.batch, strict=True)
        )
        return dataclasses.replace(self, contracted=(ca, cb), batch=(ba, bb)), a, b

    def accumulated(self, a: Quantized, b: Quantized) -> Array:
        dot, a, b = self._at_rest(a, b)
        length = math.prod(a.shape[i] for i in dot.contracted[0])
        check_int32(length, a.spec, b.spec)
        return dot._in_integers(a, b, length)

    def _native(self, a: Quantized, b: Quantized) -> Array:
        dot, a, b = self._at_rest(a, b)
        acc, scales = native_dot(a, b, (dot.contracted, dot.batch))
        return scaled(acc, *(dot.in_output(side, v, (a.shape, b.shape)) for side, v in enumerate(scales)))

    def operand_gradient(
        self, side: int, g: Array, q: Quantized, shape: tuple[int, ...], rounding: Rounding, *more: Array
    ) -> tuple[Array, Array | None]:
        """The gradient with respect to operand `side`, of this shape, from the integers of the other one.

        Where the scale of q varies along what is summed, it is multiplied into g: for each block along the axes that
        are kept, too, which are then axes of a batch.
        """
        precision = self.gradient[side]
        in_order = lambda own, other: (own, other) if side == 0 else (other, own)
        *operands, output = dot_axes(self.contracted, self.batch, in_order(len(shape), q.ndim))
        own, other = operands[side], operands[1 - side]
        batch, summed = output[: len(self.batch[0])], [n for n in other if n not in own]
        if isinstance(precision, QuantSpec) and precision.granularity.sizes and len(summed) > 1:
            dot, g, q = self._with_one_summed(side, g, q, self._free(q.ndim, 1 - side))
            return dot.operand_gradient(side, g, q, shape, rounding)
        groups = dict(zip(other, q.groups, strict=True))
        folded = any(groups[n] not in (0, 1) for n in summed)
        of = scaled_by(g, output, q, other, len(batch)) if folded else Factors(g, output, other, q.shape, [])
        g, of_g, of_q, in_blocks = of.x, of.of_x, of.of_q, of.shape
        lead = of_g[: len(batch) + len(of.split)]
        # In the order of the result, which is not transposed: it is as large as the weight.
        names = *in_order(of_g, of_q), summed, lead
        dot, of_y = Dot(*dot_numbers(*names), self.most, execution=self.execution), dot_output(*names)
        if isinstance(precision, QuantSpec):
            at = tuple(map(of_g.index, summed))
            spec = dataclasses.replace(precision, granularity=precision.granularity.of_op(at, g.shape))
            low, largest = rounded(g, spec, None if is_of_floats(self.execution, spec) else at, rounding)
            pair = in_order(low, integer_factor(q, folded, in_blocks))
            a, b = (_whole_along(v, axes) for v, axes in zip(pair, dot.contracted, strict=True))
            y = dot.exact(a, b)
        else:
            values, largest = lax.reshape(centred(q, jnp.float32).astype(jnp.bfloat16), in_blocks), None
            pair = in_order(g.astype(jnp.bfloat16), values)
            x, w = (replicated(v, axes) for v, axes in zip(pair, dot.contracted, strict=True))
            y = bfloat16_dot(x, w, (dot.contracted, dot.batch))
            if not folded:
                y = num.guard(y * in_output("q", q.step, q.shape, other, of_y))
        return lax.reshape(arranged(y, of_y, of.in_blocks(own)), shape), largest

    def _with_one_summed(
        self, side: int, g: Array, q: Quantized, summed: Sequence[int]
    ) -> tuple["Dot", Array, Quantized]:
        """The dot, g and q with the axes that a gradient sums, which lie together, as one: rows of blocks."""
        other, start, n = 1 - side, summed[0], len(summed)
        at = g.ndim - n if side == 0 else len(self.batch[0])
        as_one = lambda shape, at: [*shape[:at], math.prod(shape[at : at + n]), *shape[at + n :]]
        behind = lambda axes: tuple(i if i < start else i - n + 1 for i in axes)
        pair = lambda axes: tuple(behind(of) if i == other else of for i, of in enumerate(axes))
        dot = dataclasses.replace(self, contracted=pair(self.contracted), batch=pair(self.batch))
        return dot, lax.reshape(g, as_one(g.shape, at)), q.reshaped(as_one(q.shape, start))

    def _blocks(self, a: Quantized, b: Quantized, specs: tuple[QuantSpec, QuantSpec], i: int, j: int) -> int:
        """The number of runs of constant scale along an axis."""
        length = a.shape[i]
        runs = [q.groups[axis] for q, axis in ((a, i), (b, j))]
        if all(n == 1 for n in runs):
            return 1
        if length and any(n == length > 1 for n in runs):
            raise ValueError(
                f"Axis {i} of `a`, shape {a.shape}, and axis {j} of `b`, shape {b.shape}, are contracted, and one of "
                f"them has a scale of its own for each element: {specs[0]}, {specs[1]}. Share the scale along it: "
                "PerTensor, PerChannel on another axis, or PerBlock along it; or pass dot_general the other operand in "
                "float with spec=, so that the scale is multiplied into it first."
            )
        return length // math.gcd(*(length // max(n, 1) for n in runs)) if length else 1

    def _block(
        self,
        a: Sequence[Quantized],
        b: Sequence[Quantized],
        specs: tuple[QuantSpec, QuantSpec],
        lowering: "Lowering[Dot]",
    ) -> Array:
        """The contraction of operands in digits, with one scale along the contracted axes."""
        length = math.prod(a[0].shape[i] for i in self.contracted[0])
        most = length if self.most is None else min(length, self.most)
        product = lambda x, w: lowering.product(self, x, w, length)
        acc, operands = sum_of_digits(a, b, specs, most, lowering.check, product), (a[0], b[0])
        shapes = [q.shape for q in operands]
        scales = [self.in_output(side, q.scale, shapes) for side, q in enumerate(operands)]
        y = scaled(acc, *scales)
        for side, spec in enumerate(specs):
            if spec.has_minimum:
                minimum = self.in_output(side, operands[side].zero_point.astype(jnp.float32), shapes)
                y = y + scaled(self._sums(1 - side, (a, b), shapes), scales[1 - side], minimum)
        return y

    def _sums(self, side: int, digits: Sequence[Sequence[Quantized]], shapes: Sequence[tuple[int, ...]]) -> Array:
        """The sums of `values - zero_point` of an operand beside a minimum, as they broadcast in the output."""
        q, *more = digits[side]
        if more or q.spec.has_minimum:
            raise ValueError(
                f"An operand with a minimum meets integers of up to 8 bits with a zero point, or floats, got {q.spec}. "
                "Quantize the other one to 8 bits, or leave it in float."
            )
        sums = jnp.sum(centred(q, jnp.int32), self.contracted[side], keepdims=True)
        return self.in_output(side, sums, shapes)

    def _free(self, ndim: int, side: int) -> list[int]:
        taken = {*self.contracted[side], *self.batch[side]}
        return [i for i in range(ndim) if i not in taken]

    def _sums_with(self, side: int, q: Quantized) -> Array | None:
        """The sums that came with an operand, in the shape and the order of the axes that the output has."""
        contracted, kept = self.contracted[side], (*self.batch[side], *self._free(q.ndim, side))
        sums = sums_along(q, contracted)
        if sums is None:
            return None
        return lax.squeeze(lax.transpose(sums, (*kept, *contracted)), range(len(kept), q.ndim))

    def _in_integers(self, a: Quantized, b: Quantized, length: int) -> Array:
        if self._free(a.ndim, 0) and not self._free(b.ndim, 1):  # a vector is a row, which a CPU pads
            return self.turned._in_integers(b, a, length)
        wide = max(a.spec.bits, b.spec.bits) > 8
        (x, a_zero), (w, b_zero) = codes(a, wide), codes(b, wide)
        (ca, _), (ba, _) = self.contracted, self.batch
        came_a, came_b = (self._sums_with(side, q) for side, q in enumerate((a, b)))
        acc, *sums = integer_dot(x, w, (self.contracted, self.batch), a_zero is not None and came_b is None)
        outer, kept = len(ba), len(ba) + len(self._free(a.ndim, 0))

        def own_sums_of_a() -> Array:
            sizes = lambda axes: [a.shape[i] for i in axes]
            columns = jnp.ones_like(x, shape=[*sizes(ba), *sizes(ca), 4])
            at = tuple(range(outer, outer + len(ca))), tuple(range(outer))
            (sums,) = integer_dot(x, columns, ((ca, at[0]), (ba, at[1])))
            return sums[..., 0]

        def sums_of_a() -> Array:
            sums = own_sums_of_a() if came_a is None else came_a
            return lax.reshape(sums, [*acc.shape[:kept], *[1] * (acc.ndim - kept)])

        def sums_of_b() -> Array:
            of_columns = sums[0] if came_b is None else came_b
            return lax.reshape(of_columns, [*acc.shape[:outer], *[1] * (kept - outer), *acc.shape[kept:]])

        place = lambda side, v: None if v is None else self.in_output(side, v, (a.shape, b.shape))
        of_a, of_b = (place(0, a_zero), sums_of_b), (place(1, b_zero), sums_of_a)
        return without_zeros(acc, length, of_b, of_a)


LOWERINGS = {
    "int8": Lowering(Dot._in_integers, check_int32),
    "native": Lowering(Dot._in_integers, check_int32),  # of integers; floats have no need of one
}


def _whole_along(q: Quantized, axes: Sequence[int]) -> Quantized:
    """`q` with these axes on every device of a mesh with explicit axes, gathered as integers."""
    return jax.tree.map(lambda v: replicated(v, axes), q) if is_explicit(q.values) else q


def _as_stored(
    q: Quantized, contracted: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[Quantized, tuple[int, ...], tuple[int, ...]]:
    """An operand and its axes as they lie in memory: XLA:CPU has no int8 kernel for a contraction of a transpose."""
    there = permutation(q.order, q.ndim)
    free = [i for i in there if i not in (*contracted, *batch)]
    if q.pairs or not q.order or free != sorted(free):  # the free axes of the result are in the order of the array's
        return q, contracted, batch
    at = lambda axes: tuple(there.index(i) for i in axes)
    as_stored = dataclasses.replace(q, order=None)
    return as_stored.move(lambda v: v, lambda v: lax.transpose(v, there)), at(contracted), at(batch)


def _stacked(q: Quantized, blocks: dict[int, int]) -> Quantized:
    """The blocks along the contracted axes, {axis: number}, as a leading axis of each array of `q`."""

    def stack(v: Array, groups: Sequence[int]) -> Array:
        parts = [p for i, n in enumerate(groups) for p in ((blocks[i], n // blocks[i]) if i in blocks else (n,))]
        at = [i + sum(j < i for j in blocks) for i in blocks]
        rest = [i for i in range(len(parts)) if i not in at]
        v = lax.transpose(lax.reshape(v, parts), (*at, *rest))
        return lax.reshape(v, [math.prod(blocks.values()), *v.shape[len(at) :]])

    # At least one value for each block, also where one was shared by several.
    sizes = tuple(blocks.get(i, g) for i, g in enumerate(q.groups))
    split = lambda v: stack(jnp.broadcast_to(broadcast_groups(v, sizes), sizes), sizes)
    return q.ordered().without_sums().move(lambda v: stack(v, q.shape), split)


def _first(stacked: list[Quantized]) -> list[Quantized]:
    return jax.tree.map(lambda v: v[0], stacked)


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


def _check_spec(a: Any, b: Any, spec: object) -> None:
    """Refuses a `spec` that is not for an operand in float."""
    if isinstance(a, QArray) == isinstance(b, QArray):
        raise TypeError(
            f"`spec` is for an operand in float that meets a QArray, got {checks.kind(a)} and {checks.kind(b)}. Drop "
            "it for two QArrays; of two floats, quantize one."
        )
    if checked_spec(spec).rounding == "stochastic":
        raise ValueError(
            f"`spec` must round to nearest, got {spec}. Pass the operand as quantize(x, spec, key=jax.random.key(...))."
        )


@functools.partial(jax.jit, static_argnames="dot")
def _in_float(dot: Dot, a: Any, b: Any) -> Array:
    """`dot` of an operand in float and the real values of a QArray, in the dtype of the former."""
    side = int(isinstance(b, QArray))
    a, b = (inside(v) if isinstance(v, QArray) else v for v in (a, b))
    q, x = (a, b)[side], (b, a)[side]
    is_transposed = bool(dot.batch[side]) and q.ndim - 1 in dot.contracted[side]
    real = _values_alone if is_transposed and not is_explicit(q.stored) else Quantized.real

    def of_real(*operands: Array | Quantized) -> Array:
        a, b = (real(v, x.dtype) if isinstance(v, Quantized) else v for v in operands)
        return lax.dot_general(a, b, (dot.contracted, dot.batch))

    behind = lambda *operands: of_integers(dot, side, operands[side], operands[1 - side])
    product = behind if is_scaled_behind(dot, side, q, x) else of_real
    is_whole = q.order is not None or q.spec.format
    exact = lambda: product(a, b) if is_whole else by_columns(dot, product, side, (a, b))
    return in_groups(dot.of_dtype(x.dtype), side, q, x, exact) if dot.execution == "native" else exact()


def _values_alone(q: Quantized, dtype: DTypeLike) -> Array:
    """The real values, as an array of their own.

    XLA:CPU transposes what a product of a batch sums along its last axis, such as keys, and takes up to twice as long
    to compute each value in that order.
    """
    of = lambda scale, v: dataclasses.replace(q, scale=scale, stored=v).real(dtype)
    return computed_once(of, q.scale, q.stored)


@functools.partial(jax.jit, static_argnames=("side", "spec", "dot"))
def quantized_dot(x: Array, q: QArray | Quantized, side: int, spec: QuantSpec, dot: Dot) -> Array:
    """`dot` of operand `side` in float, quantized here, and integers, in the dtype of the former."""
    q = inside(q) if isinstance(q, QArray) else q
    in_order = lambda own, other: (own, other) if side == 0 else (other, own)
    *operands, output = dot_axes(dot.contracted, dot.batch, [v.ndim for v in in_order(x, q)])
    (of_x, of_q), inner = in_order(*operands), dot.contracted[side]
    summed, batch = [of_x[i] for i in inner], output[: len(dot.batch[0])]
    lengths, dtype = dict(zip((*of_x, *of_q), (*x.shape, *q.shape), strict=True)), x.dtype
    granularity = spec.granularity.of_op(inner, x.shape) if spec.granularity.is_of_op else spec.granularity
    groups = granularity.scale_shape(x.shape, spec)
    x = num.upcast(x, num.compute_dtype(dtype))
    of = Factors(x, of_x, of_q, q.shape, [])
    if any(g == lengths[n] > 1 for g, n in zip(q.groups, of_q, strict=True) if n in summed):
        of = scaled_by(x, of_x, q, of_q, 0)
        x, q, blocks = of.x, integer_factor(q, True, of.shape), of.x.shape[: len(of.split)]
        # The factor for each block of the integers is quantized on its own.
        granularity = granularity_of((*blocks, *[1] * (len(of_x) - len(groups)), *groups), x.shape)
    names = *in_order(of.of_x, of.of_q), summed, [*of.of_x[: len(of.split)], *batch]
    contracted, batched = dot_numbers(*names)
    spec, q = dataclasses.replace(spec, granularity=granularity), dataclasses.replace(q, dtype=jnp.dtype(jnp.float32))
    own = QuantizedOperand(*quantize_straight_through(x, spec, contracted[side], None, keeps_codes=True))
    other = QuantizedOperand(q.real(q.dtype), q)
    y = contract(dataclasses.replace(dot, contracted=contracted, batch=batched), *in_order(own, other))
    y = lax.reshape(arranged(y, dot_output(*names), of.in_blocks(output)), [lengths[n] for n in output])
    return y.astype(dtype)


def dot_general(
    a: Any, b: Any, dimension_numbers: Any, *, spec: QuantSpec | None = None, execution: str = "auto"
) -> Array:
    """The general dot product of the real values of two quantized arrays, computed in integers.

        acc * (a.scale * b.scale),  acc = the contraction of (a.values - a.zero_point) and (b.values - b.zero_point)

    exactly, and rounded only in the two products. With one operand in float (weight-only), it is `lax.dot_general` of
    this operand and `values - zero_point`, added up in float32, times the scale; or with the other one dequantized,
    where a scale changes along the contracted axis or the dtype does not hold the integers. If a scale of two changes
    along the contracted axis (PerBlock), the products of each block are added in order.

    With `spec`, the operand in float is quantized here, by its range, so that it is a contraction of integers too. Then
    a scale of the other one may change with every element along a contracted axis, as the scale of cached values
    changes with the token: all its scales are multiplied into the operand in float, which is quantized after that, once
    for each block along the axes that the other one keeps. So the probabilities of an attention meet its values.

    Args:
      a, b: QArrays of any shapes. Scales may differ along batch and free axes, and by blocks along contracted axes. One
        of the two may be a floating array; the scales of the other may then be of any kind.
      dimension_numbers: static, ((contracted a, contracted b), (batch a, batch b)) as in `jax.lax.dot_general`.
      spec: static QuantSpec for an operand in float; None leaves it in float. PerToken() is a scale for each of its
        rows along the contracted axes, PerBlock(None, size) for blocks of them; other granularities name its axes.
      execution: static; does not affect the result, but for "native". "int8": int8 x int8 -> int32, int32 for values
        wider than 8 bits. "auto" is "int8". "native": float8 values themselves are multiplied, by the float8 unit of a
        device that has one, and added up in float32 in the order of the device: within
        `(n + 3) 2 ** -24 sum |a b|` of the exact result, for n products. Both operands are
        in the dtype float8_e4m3fn or float8_e5m2, with one scale along the contracted axes; or in blocks along one of
        these, both of MX or both of NVFP4, which are bfloat16 products where no unit takes blocks. XLA cannot compile
        blocks for GPUs older than compute capability 8.9. Two of integers are as in "int8". Of one operand in float and
        one in groups along what is contracted, by what is fastest on a TPU or GPU, such as sums of groups in float32:
        for K bfloat16 products within `(2 ** -9 + 2 K 2 ** -24) sum |a b|`, of float32 without the first term; the
        exact value on a CPU, under explicit meshes, and in programs for a symbolic number of rows.

    Returns:
      float32, or the dtype of the operand in float; its axes are batch, free of a, free of b.

    Gradient: as `lax.dot_general` of the dequantized arrays, so with respect to the scales and an operand in float, as
    by `fake_quant` with `spec`; integers have none. `jax.jvp` raises.

    Raises:
      TypeError: for anything but two QArrays, or one and a floating array, and for `spec` with two QArrays.
      ValueError: for dimension numbers or shapes that do not fit, stochastic rounding by `spec`, a scale that changes
        with every element along a contracted axis of two QArrays, or a contraction so long that it may not fit int32:
        133,144 products at 8 x 8 bits symmetric, 66,311 if one is affine, 516 at 16 x 8. Other floats than those above
        have no execution="native".

    Source: Jacob et al., 2018; ONNX MatMulInteger.

    >>> import jax.numpy as jnp
    >>> from jaxquant import QParams, QuantSpec, dot_general, quantize
    >>> q = quantize(jnp.array([1.0, 2.0]), QuantSpec(), QParams(0.5, 0.0))
    >>> dot_general(q, q, (((0,), (0,)), ((), ()))).item()
    5.0
    >>> dot_general(jnp.array([0.2, 1.0]), q, (((0,), (0,)), ((), ())), spec=QuantSpec(bits=2)).item()
    2.0
    """
    execution = checked_execution(execution, LOWERINGS)
    if spec is not None:
        _check_spec(a, b, spec)
    in_float = spec is None and is_weight_only(a, b)
    checked = checked_either if in_float or spec is not None else checked_qarray
    a, b = checked("a", a), checked("b", b)
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
    dot = Dot((ca, cb), (ba, bb), execution=execution)
    if in_float:
        return _in_float(dot, a, b)
    if spec is None:
        return contraction(a, b, dot)
    return quantized_dot(b, a, 1, spec, dot) if isinstance(a, QArray) else quantized_dot(a, b, 0, spec, dot)
