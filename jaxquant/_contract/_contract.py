# SPDX-License-Identifier: Apache-2.0
"""The contraction of integers, scaled once, with the gradient of the float contraction.

The value is `acc * (scale_a * scale_b)` with `acc` the contraction of `values - zero_point` in integers, which has the
same bits in any order of summation, because no step rounds.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from .._arrays._qarray import QArray, checked_qarray, inside
from .._arrays._quantized import Quantized
from .._arrays._straight_through import with_gradient_of
from .._base import _checks as checks
from .._base import _numerics as num
from .._base._axes import Axes, Matrix, in_output
from .._base._gradients import custom_vjp
from .._base._sharding import shard_like
from .._history import DelayedQParams, with_seen
from .._spec._spec import QuantSpec
from ._operands import QuantizedOperand, Rounding, flagged

# How g is rounded for the gradient of an operand: not at all, to bfloat16, or to the grid of a spec.
Precision = str | QuantSpec | None


@dataclasses.dataclass(frozen=True)
class ContractionOp(abc.ABC):
    """A contraction of two operands that integers can compute; static and hashable. OPS has one for each primitive.

    Attributes:
      execution: the name of a lowering, or "auto".
      gradient: how the gradient of the result is rounded for the gradient of each operand.
      dtype: of the result, and of what the products of its gradient leave: their partial sums over devices, too.
    """

    execution: str = dataclasses.field(default="auto", kw_only=True)
    gradient: tuple[Precision, Precision] = dataclasses.field(default=(None, None), kw_only=True)
    dtype: np.dtype = dataclasses.field(default=np.dtype(np.float32), kw_only=True)

    def of_dtype(self, dtype: DTypeLike) -> Self:
        return dataclasses.replace(self, dtype=np.dtype(dtype))

    @classmethod
    @abc.abstractmethod
    def of(cls, params: Mapping[str, Any], **attributes: Any) -> Self:
        """The op of the parameters of its primitive."""

    @staticmethod
    def can_replace(params: Mapping[str, Any]) -> bool:
        """Whether it can take the place of its primitive with these parameters."""
        return True

    @abc.abstractmethod
    def real(self, a: Array, b: Array, *more: Array) -> Array:
        """The float formulation, of `dtype`, which has the gradient of the op; `more` are operands behind both."""

    @abc.abstractmethod
    def exact(self, a: Quantized, b: Quantized, *more: Array) -> Array:
        """The value of quantized operands, float32, which no execution, order or platform changes."""

    def accumulated(self, a: Quantized, b: Quantized) -> Array:
        """The sums of products of `values - zero_point`, int32, of up to 8 bits with one scale along them."""
        raise NotImplementedError(f"{type(self).__name__} has no such sums")

    @abc.abstractmethod
    def operand_gradient(
        self, side: int, g: Array, q: Quantized, shape: tuple[int, ...], rounding: Rounding, *more: Array
    ) -> tuple[Array, Array | None]:
        """The gradient with respect to operand `side`, of this shape, float32, from the integers q of the other one.

        g is rounded as `gradient` says, with what `rounding` has. And the largest bin of what was rounded, where there
        is a history.
        """

    @abc.abstractmethod
    def axes(self, ndims: Sequence[int]) -> Axes:
        """The names of the axes of operands of these ranks, and of the output."""

    # What follows from the names.

    def contracted_axes(self, ndims: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of each operand along which one result sums, or which share a scale all the same.

        First those that meet, which are pairs.
        """
        axes = self.axes(ndims)
        kept = {*axes.parts(axes.out), *axes.apart}

        def of(names: Sequence[str]) -> tuple[int, ...]:
            met = [names.index(name) for name in axes.summed if name in names]
            lost = (i for i, name in enumerate(names) if not kept.issuperset(axes.parts([name])))
            return (*met, *(i for i in lost if i not in met))

        return of(axes.operands[0]), of(axes.operands[1])

    def pairs_axes(self, ndims: Sequence[int]) -> bool:
        """Whether all of `contracted_axes` are pairs that meet, so that both operands can be rotated along them."""
        axes = self.axes(ndims)
        return all(len(of) == len(axes.summed) for of in self.contracted_axes(ndims)) and not axes.of_groups

    def summed_in_gradient(self, side: int, ndims: Sequence[int]) -> Sequence[int]:
        """The axes of the other operand that the gradient with respect to operand `side` sums."""
        own, other = (self.axes(ndims).operands[i] for i in (side, 1 - side))
        return [i for i, name in enumerate(other) if name not in own]

    def rows(self, side: int, x: Array, shape: tuple[int, ...], *more: Array) -> tuple[Array, Array | None]:
        """(..., rows, K): what operand `side`, of this shape, meets in x, for its Gram.

        K runs along its contracted axes, in their order. And (experts, rows): whether a row meets the matrix of an
        expert; None where there are none.
        """
        axes = self.axes((x.ndim, len(shape)) if side else (len(shape), x.ndim))
        own, other = axes.operands[side], axes.operands[1 - side]
        summed = [name for name in own if name in axes.summed]
        batch = [name for name in own if name in axes.met and name not in summed]
        order = *batch, *(name for name in other if name not in own), *summed
        x = lax.transpose(x, [other.index(name) for name in order])
        return x.reshape(*x.shape[: len(batch)], -1, math.prod(shape[own.index(name)] for name in summed)), None

    def matrix(self, side: int, ndims: Sequence[int]) -> Matrix:
        """The layout of operand `side` as matrices, whose K is the K of `rows`."""
        axes, summed = self.axes(ndims), self.axes(ndims).summed
        places = lambda names: tuple(i for i, name in enumerate(axes.operands[side]) if name in names)
        return Matrix(places({*axes.met, *axes.apart}.difference(summed)), places(summed), tuple(axes.free(side)))

    def in_output(self, side: int, v: Array, shapes: Sequence[tuple[int, ...]], *more: Array) -> Array:
        """A value for each group of operand `side`, of operands of these shapes, as it broadcasts in the output."""
        axes = self.axes([len(shape) for shape in shapes])
        return in_output("ab"[side], v, shapes[side], axes.operands[side], axes.out)

    def columns(self, side: int, ndims: Sequence[int]) -> tuple[int, int] | None:
        """The last axis of operand `side` that is not summed, and where it is in the result; None if it is nowhere."""
        axes = self.axes(ndims)
        free = [i for i in axes.free(side) if axes.operands[side][i] not in axes.apart]
        return (free[-1], axes.out.index(axes.operands[side][free[-1]])) if free else None

    # What a plan asks beyond that. The defaults suit an op whose scales are shared along what is contracted.

    @property
    def takes_blocks(self) -> bool:
        """Whether scales may change in blocks along contracted axes, and along what a gradient sums."""
        return False

    @property
    def joins_summed(self) -> bool:
        """Whether a gradient brings the axes that it sums together, so that blocks can run along them."""
        return False

    @property
    def why_one_scale(self) -> str:
        """Why a gradient has one scale, and not one for each of its rows, in words; empty if it may have them."""
        return ""

    def order_at_rest(self, side: int, ndim: int) -> Sequence[int]:
        """The axes of an operand in the order in memory that an integer product reads fastest; empty if any will do."""
        return ()


def without_zeros(acc: Array, length: int, *operands: tuple[Array | None, Callable[[], Array]]) -> Array:
    """The sum of `length` products of `values - zero_point`, made of that of the products of values.

    Each operand comes as its zero point, None for 0, and the sum of the values that it meets in the other one, both as
    they broadcast in the output. The first one's is subtracted first.
    """
    (first, met_by_first), (second, met_by_second) = operands
    if first is not None:
        acc = acc - first * met_by_first()
    if second is not None:
        met = met_by_second()
        acc = acc - second * (met if first is None else met - length * first)
    return acc


def scaled(acc: Array, a_scale: Array, b_scale: Array) -> Array:
    """The real values of an accumulator."""
    return num.guard(acc.astype(jnp.float32) * (a_scale * b_scale))


@jax.custom_vjp
def differentiated(x: Array, q: Quantized) -> Array:
    """The real values of `q`, with the gradient to `x`: the same values, which so need not be kept."""
    return q.real(q.dtype, guarded=False)


differentiated.defvjp(lambda x, q: (differentiated(x, q), None), lambda _, g: (g, None))


def _contract_bwd(op, residuals, g):
    *operands, key, more, delayed = residuals
    real = [differentiated(v.real, v.integers) for v in operands]
    *gradients, of_more = jax.vjp(lambda a, b, more: op.real(a, b, *more), *real, more)[1](g)
    seen = list(jax.tree.map(jnp.zeros_like, delayed))
    for side, (precision, other) in enumerate(zip(op.gradient, reversed(operands), strict=True)):
        if precision is not None and 0 not in gradients[side].shape:
            own, exact = None if key is None else jax.random.fold_in(key, side), gradients[side]
            rounding, g_values = Rounding(own, delayed[side]), num.upcast(lax.stop_gradient(g), jnp.float32)
            _refuse_minimum("A product with a gradient of fewer bits", other.integers.spec)
            low, largest = op.operand_gradient(side, g_values, other.integers, exact.shape, rounding, *more)
            gradients[side] = with_gradient_of(exact, shard_like(num.rounded(low, exact.dtype), exact))
            seen[side] = with_seen(delayed[side], largest) if delayed[side] else None
    return *(QuantizedOperand(gradient, None, None) for gradient in gradients), None, of_more, tuple(seen)


def _refuse_minimum(what: str, *specs: QuantSpec) -> None:
    if found := [spec for spec in specs if spec.has_minimum]:
        raise ValueError(
            f"{what} has no minimum, got {found[0]}. Take offset='zero_point', or leave the other operand and the "
            "gradient in float."
        )


@functools.partial(custom_vjp, rule=_contract_bwd, static=(0,))
def contract(
    op: ContractionOp, a: QuantizedOperand, b: QuantizedOperand, key: Array | None = None, more: tuple[Array, ...] = (),
    delayed: tuple[DelayedQParams | None, DelayedQParams | None] = (None, None),
) -> Array:  # fmt: skip
    """`op.exact` of the integers of two operands, with the gradients of `op.real` to their real values, twice too.

    Where `op.gradient` says a precision, the gradient has the value of `op.operand_gradient`, and still the derivative
    of the gradient of `op.real`; `key` is for what is rounded stochastically, and `delayed` is of the histories of both
    gradients. `more` are operands that are not quantized, such as the sizes of groups.
    """
    return _exact(op, a, b, more)


@functools.partial(jax.jit, static_argnums=0, inline=True)  # traced once, for the value and for the forward pass
def _exact(op: ContractionOp, a: QuantizedOperand, b: QuantizedOperand, more: tuple[Array, ...]) -> Array:
    if not op.takes_blocks:
        _refuse_minimum("A convolution of integers", a.integers.spec, b.integers.spec)
    return op.exact(flagged(a.integers, a.nan_flags), flagged(b.integers, b.nan_flags), *more).astype(op.dtype)


@functools.partial(jax.jit, static_argnames="op")
def contraction(a: QArray, b: QArray, op: ContractionOp) -> Array:
    """`op` of two QArrays, differentiated with respect to their scales."""
    in_float32 = (dataclasses.replace(inside(q), dtype=jnp.dtype(jnp.float32)) for q in (a, b))
    return contract(op, *(QuantizedOperand(q.real(q.dtype), q) for q in in_float32))


def is_weight_only(a: Any, b: Any) -> bool:
    """Whether one of two operands is in float."""
    return isinstance(a, QArray) != isinstance(b, QArray)


def checked_either(name: str, v: Any) -> Any:
    """Returns `v`, which must be a QArray, or a floating array beside one."""
    return checked_qarray(name, v) if isinstance(v, QArray) else checks.float_array(name, v)
