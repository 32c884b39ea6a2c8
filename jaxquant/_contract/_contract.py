# SPDX-License-Identifier: Apache-2.0
"""The contraction of integers, scaled once, with the gradient of the float contraction.

The value is `acc * (scale_a * scale_b)` with `acc` the contraction of `values - zero_point` in integers. It is
computed in int8, or in float32 that holds integers, chunked so that no sum reaches 2 ** 24: the same bits, in any
order of summation, because no step rounds.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._arrays._affine import real_values
from .._arrays._qarray import QArray, changed, checked_operand
from .._arrays._straight_through import with_gradient_of
from .._base import _checks as checks
from .._base import _numerics as num
from .._base._axes import Matrix
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
    """

    execution: str = dataclasses.field(default="auto", kw_only=True)
    gradient: tuple[Precision, Precision] = dataclasses.field(default=(None, None), kw_only=True)

    @classmethod
    @abc.abstractmethod
    def of(cls, params: Mapping[str, Any], **attributes: Any) -> Self:
        """The op of the parameters of its primitive."""

    @staticmethod
    def can_replace(params: Mapping[str, Any]) -> bool:
        """Whether it can take the place of its primitive with these parameters."""
        return True

    @abc.abstractmethod
    def real(self, *args: Any, **kwargs: Any) -> Array:
        """(a, b, *more) -> float32: the float formulation, which has the gradient of the op."""

    @abc.abstractmethod
    def exact(self, *args: Any, **kwargs: Any) -> Array:
        """(a, b, *more) -> float32: the value for two QArrays, which no execution, order or platform changes."""

    @abc.abstractmethod
    def operand_gradient(self, *args: Any, **kwargs: Any) -> tuple[Array, Array | None]:
        """(side, g, q, shape, rounding, *more) -> the gradient with respect to operand `side`, of this shape, float32.

        Of g as `gradient` says, rounded with what `rounding` has, and of the integers of the other operand. And the
        largest bin of what was rounded, where there is a history.
        """

    @abc.abstractmethod
    def contracted_axes(self, ndims: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of each operand along which one result sums, or which share a scale all the same."""

    # What a plan asks beyond that. The defaults suit an op whose scales are shared along what is contracted.

    @property
    def takes_blocks(self) -> bool:
        """Whether scales may change in blocks along contracted axes, and along what a gradient sums."""
        return False

    @property
    def joins_summed(self) -> bool:
        """Whether a gradient brings the axes that it sums together, so that blocks can run along them."""
        return False

    def summed_in_gradient(self, side: int, ndim: int) -> Sequence[int]:
        """The axes of the other operand, of this rank, that the gradient with respect to operand `side` sums."""
        return ()

    @property
    def why_one_scale(self) -> str:
        """Why a gradient has one scale, and not one for each of its rows, in words; empty if it may have them."""
        return ""

    def rows(self, *args: Any, **kwargs: Any) -> tuple[Array, Array | None]:
        """(side, x, shape, *more) -> (..., rows, K): what operand `side`, of this shape, meets in x, for its Gram.

        K runs along its contracted axes, in their order. And (experts, rows): whether a row meets the matrix of an
        expert; None where there are none.
        """
        raise ValueError(f"`gram=True` is not for {type(self).__name__}. Leave its weight out by a rule with None.")

    def matrix(self, side: int, ndim: int) -> Matrix:
        """How operand `side`, of this rank, lies in matrices whose K is that of `rows`."""
        raise ValueError(f"`gram=True` is not for {type(self).__name__}. Leave its weight out by a rule with None.")

    @property
    def pairs_axes(self) -> bool:
        """Whether `contracted_axes` are pairs that meet, so that both operands can be rotated along them."""
        return False

    def columns(self, side: int, ndims: Sequence[int]) -> tuple[int, int] | None:
        """The last axis of operand `side` that is not summed, and where it is in the result; None if it is nowhere."""
        return None

    def order_at_rest(self, side: int, ndim: int) -> Sequence[int]:
        """The axes of an operand in the order in memory that an integer product reads fastest; empty if any will do."""
        return ()


def without_zeros(acc: Array, length: Any, *operands: tuple[Array | None, Callable[[], Array]]) -> Array:
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
def _differentiated(x: Array, q: QArray) -> Array:
    """The real values of `q`, with the gradient to `x`: the same values, which so need not be kept."""
    return real_values(q, q.dtype, guarded=False)


_differentiated.defvjp(lambda x, q: (_differentiated(x, q), None), lambda _, g: (g, None))


def _contract_bwd(op, residuals, g):
    *operands, key, more, delayed = residuals
    real = [_differentiated(v.real, v.integers) for v in operands]
    *gradients, of_more = jax.vjp(lambda a, b, more: op.real(a, b, *more), *real, more)[1](g)
    seen = list(jax.tree.map(jnp.zeros_like, delayed))
    for side, (precision, other) in enumerate(zip(op.gradient, reversed(operands), strict=True)):
        if precision is not None and 0 not in gradients[side].shape:
            own, exact = None if key is None else jax.random.fold_in(key, side), gradients[side]
            rounding, g_values = Rounding(own, delayed[side]), lax.stop_gradient(g)
            low, largest = op.operand_gradient(side, g_values, other.integers, exact.shape, rounding, *more)
            gradients[side] = with_gradient_of(exact, shard_like(low.astype(exact.dtype), exact))
            seen[side] = with_seen(delayed[side], largest) if delayed[side] else None
    return *(QuantizedOperand(gradient, None, None) for gradient in gradients), None, of_more, tuple(seen)


@functools.partial(custom_vjp, rule=_contract_bwd, static=(0,))
def contract(
    op: ContractionOp, a: QuantizedOperand, b: QuantizedOperand, key: Any = None, more: tuple[Array, ...] = (),
    delayed: tuple[DelayedQParams | None, DelayedQParams | None] = (None, None),
) -> Array:  # fmt: skip
    """`op.exact` of the integers of two operands, with the gradients of `op.real` to their real values, twice too.

    Where `op.gradient` says a precision, the gradient has the value of `op.operand_gradient`, and still the derivative
    of the gradient of `op.real`; `key` is for what is rounded stochastically, and `delayed` is of the histories of both
    gradients. `more` are operands that are not quantized, such as the sizes of groups.
    """
    return op.exact(*(flagged(v.integers, v.nan_flags) for v in (a, b)), *more)


@functools.partial(jax.jit, static_argnames="op")
def contraction(a: QArray, b: QArray, op: ContractionOp) -> Array:
    """`op` of two QArrays, differentiated with respect to their scales."""
    in_float32 = (changed(q, dtype=jnp.dtype(jnp.float32)) for q in (a, b))
    return contract(op, *(QuantizedOperand(real_values(q, q.dtype), q) for q in in_float32))


def is_weight_only(a: Any, b: Any, execution: str) -> bool:
    """Whether one of two operands is in float, for which there is no execution."""
    if isinstance(a, QArray) == isinstance(b, QArray):
        return False
    if execution not in ("auto", "int8"):
        raise ValueError(
            f"`execution` is for two QArrays, got {execution!r} with one operand in float, which is a contraction in "
            "float. Drop it, or quantize the other operand."
        )
    return True


def checked_either(name: str, v: Any) -> Any:
    """Returns `v`, which must be a QArray, or a floating array beside one."""
    return checked_operand(name, v) if isinstance(v, QArray) else checks.float_array(name, v)


def with_real_values(a: Any, b: Any) -> tuple[Array, Array]:
    """The operands, of which one is in float, with the real values of the other one in its dtype."""
    a, b = checked_either("a", a), checked_either("b", b)
    dtype = (b if isinstance(a, QArray) else a).dtype
    real = lambda v: real_values(v, dtype) if isinstance(v, QArray) else v
    return real(a), real(b)
