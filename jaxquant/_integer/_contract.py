# SPDX-License-Identifier: Apache-2.0
"""Contractions of quantized arrays: the exact integer contraction, scaled once.

The value is `acc * (scale_a * scale_b)` with `acc` the contraction of `values - zero_point` in integers. It is
computed in int8, or in float32 that holds integers, chunked so that no sum reaches 2 ** 24: the same bits, in any
order of summation, because no step rounds.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import Array, lax

from .. import _checks as checks
from .. import _numerics as num
from .._affine import real_values
from .._granularity import PerTensor
from .._groups import apart, broadcast_groups
from .._qarray import QArray, checked_qarray
from .._ranges._range import finite_or
from .._spec import QuantSpec
from .._straight_through import quantize_straight_through, with_gradient_of

_HOME = jax.errors if hasattr(jax.errors, "InconclusiveDimensionOperation") else jax.core
_INCONCLUSIVE = getattr(_HOME, "InconclusiveDimensionOperation")  # noqa: B009
EXACT = 2**24  # float32 holds every integer up to it
EXECUTIONS = ("auto", "int8", "float32")
# How g is rounded for the gradient of an operand: not at all, to bfloat16, or to the grid of a spec.
Precision = str | QuantSpec | None


def largest_magnitude(spec: QuantSpec) -> int:
    """The largest magnitude of `values - zero_point` of integers."""
    return int(max(-spec.qmin, spec.qmax) if spec.symmetric else spec.qmax - spec.qmin)


class Codes(NamedTuple):
    """Values for an integer unit: int8 and an int32 zero point, None for 0; or int32, centred, if one is wider."""

    values: Array
    zero: Array | None


def centred(q: QArray, dtype: Any) -> Array:
    """`values - zero_point`, in a dtype that holds it."""
    if q.spec.symmetric:
        return q.values.astype(dtype)
    zero = broadcast_groups(q.zero_point.astype(dtype), q.shape)
    return q.values.astype(dtype) - zero


def codes(q: QArray, wide: bool) -> Codes:
    """The values as an integer unit takes them; `wide` if one of the operands has more than 8 bits."""
    if wide:
        return Codes(centred(q, jnp.int32), None)
    zero = q.zero_point.astype(jnp.int32)
    if q.spec.signed:
        return Codes(q.values, None if q.spec.symmetric else zero)
    return Codes(lax.bitcast_convert_type(q.values ^ jnp.uint8(128), jnp.int8), zero - 128)


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


def with_flags(scale: Array, flags: Array) -> Array:
    """Scales with flags added to them, which are NaN or 0 and have size 1, or the length, on each axis."""
    if scale.ndim:
        scale = lax.reshape(scale, [*[1] * (flags.ndim - scale.ndim), *scale.shape])
        for axis, n in enumerate(flags.shape):
            if n != 1 != scale.shape[axis]:  # blocks, each element of which has a flag of its own
                scale = apart(scale, axis, n)
    return scale + flags


def flagged(q: QArray, flags: Array | None) -> QArray:
    """An operand with flags added to the scales of the result."""
    if flags is None:
        return q
    if q.tensor_scale is not None:
        return dataclasses.replace(q, tensor_scale=q.tensor_scale + flags)
    return dataclasses.replace(q, scale=with_flags(q.scale.astype(jnp.float32), flags))


def rounded(g: Array, spec: QuantSpec, contracted: tuple[int, ...], key: Any) -> QArray:
    """g on the grid of a spec, in whose products what is not finite is NaN."""
    if spec.rounding == "stochastic" and key is None:
        raise ValueError(
            f"The gradient is rounded stochastically by {spec}, which needs a PRNG key. Pass key=jax.random.key(...) "
            "to the quantized function where it is differentiated."
        )
    _, q, flags = quantize_straight_through(finite_or(g, jnp.nan), spec, contracted, key)
    return flagged(q, flags)


def plain(q: QArray, values: Array, scale: Array, zero_point: Array | None) -> QArray:
    """The values of q, moved, with these scales in float32."""
    spec = dataclasses.replace(q.spec, granularity=PerTensor(), scale_dtype="float32", scale_rule="ceil")
    zero = jnp.zeros_like(scale, values.dtype) if zero_point is None else zero_point
    return QArray(values, scale, zero, spec, jnp.dtype(jnp.float32))


def is_at_most(length: Any, limit: int) -> bool:
    """Whether a length is, where it is symbolic too: then only if its constraints say so."""
    try:
        return length <= limit
    except _INCONCLUSIVE:
        return False


def check_fits(length: Any, a: QuantSpec, b: QuantSpec, execution: str) -> None:
    """Raises for a contraction of `length` products whose accumulator may not fit."""
    largest = largest_magnitude(a) * largest_magnitude(b)
    limit = (2**31 - 1) // largest
    if not is_at_most(length, limit):
        symbolic = "" if isinstance(length, int) else (
            f", or say that it is short enough: jax.export.symbolic_shape(..., constraints=['{length} <= {limit}'])"
        )  # fmt: skip
        raise ValueError(
            f"A contraction of {length} products of {a} and {b} does not fit int32: each is up to {largest}, and no "
            f"more than {limit} of them fit. Use fewer bits, or PerBlock along the contracted axis{symbolic}."
        )
    if execution == "float32" and largest > EXACT:
        raise ValueError(
            f'`execution="float32"` holds integers up to 2 ** 24, got products up to {largest} of {a} and {b}. '
            'Pass execution="int8", which takes int32 for them.'
        )


def chunks(length: Any, size: int) -> list[tuple[int, Any]]:
    """Where the chunks of at most `size` of a contracted axis start and end."""
    if isinstance(length, int):
        return [(start, min(start + size, length)) for start in range(0, max(length, 1), size)]
    if not is_at_most(length, size):
        raise ValueError(
            f'`execution="float32"` contracts in chunks of {size}, and cannot count those of a symbolic length, '
            f'{length}. Pass execution="int8", or say that it is short enough: jax.export.symbolic_shape(..., '
            f"constraints=['{length} <= {size}'])."
        )
    return [(0, length)]


@jax.custom_vjp
def _differentiated(x: Array, q: QArray) -> Array:
    """The real values of `q`, with the gradient to `x`: the same values, which so need not be kept."""
    return real_values(q, q.dtype, guarded=False)


_differentiated.defvjp(lambda x, q: (_differentiated(x, q), None), lambda _, g: (g, None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def contract(
    op: Any, x: Array, w: Array, a: QArray, b: QArray, nan_flags: tuple[Array | None, Array | None] = (None, None),
    key: Any = None, more: tuple[Array, ...] = (),
) -> Array:  # fmt: skip
    """`op.exact(a, b, *more)`, with the gradients of `op.real` to `x` and `w`, the real values of `a` and `b`.

    `x` and `w` are there to be differentiated, twice too; no pass computes their values, which it has as integers.
    The flags are added to the scales of the result alone. Where `op.gradient` says a precision, the gradient has the
    value of `op.operand_gradient`, and its own derivative is still that of `op.real`; `key` is for what is rounded
    stochastically. `more` are other operands, such as the sizes of groups.
    """
    return op.exact(*map(flagged, (a, b), nan_flags), *more)


def _contract_fwd(op, x, w, a, b, flags, key, more):
    return contract(op, x, w, a, b, flags, key, more), (x, w, a, b, key, more)


def _contract_bwd(op, residuals, g):
    x, w, a, b, key, more = residuals
    gradients = list(jax.vjp(lambda x, w: op.real(x, w, *more), _differentiated(x, a), _differentiated(w, b))[1](g))
    for side, (precision, other) in enumerate(zip(op.gradient, (b, a), strict=True)):
        if precision is not None and 0 not in gradients[side].shape:
            own, exact = None if key is None else jax.random.fold_in(key, side), gradients[side]
            low = op.operand_gradient(side, lax.stop_gradient(g), other, exact.shape, own, *more)
            gradients[side] = with_gradient_of(exact, low.astype(exact.dtype))
    return *gradients, None, None, None, None, None


contract.defvjp(_contract_fwd, _contract_bwd)


@functools.partial(jax.jit, static_argnames="op")
def contraction(a: QArray, b: QArray, op: Any) -> Array:
    """`op` of two QArrays, differentiated with respect to their scales."""
    a, b = (dataclasses.replace(q, dtype=jnp.dtype(jnp.float32)) for q in (a, b))
    return contract(op, real_values(a, a.dtype), real_values(b, b.dtype), a, b)


def checked_execution(value: Any) -> str:
    """Returns `execution` with what is best here for "auto"."""
    value = checks.one_of("execution", value, EXECUTIONS)
    return "int8" if value == "auto" else value


def with_real_values(a: Any, b: Any, execution: Any) -> tuple[Array, Array] | None:
    """The real values of both operands if one of them is in float; None if both are integers."""
    if isinstance(a, QArray) == isinstance(b, QArray):
        return None
    if checked_execution(execution) != checked_execution("auto"):
        raise ValueError(
            f"`execution` is for two QArrays, got {execution!r} with one operand in float, which is a contraction in "
            "float. Drop it, or quantize the other operand."
        )
    if isinstance(a, QArray):
        b = checks.float_array("b", b)
        return real_values(checked_qarray("a", a), b.dtype), b
    a = checks.float_array("a", a)
    return a, real_values(checked_qarray("b", b), a.dtype)
