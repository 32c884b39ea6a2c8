# SPDX-License-Identifier: Apache-2.0
"""Operands of contractions: as an integer unit takes them, with NaN flags, and gradients on a grid."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._arrays._qarray import QArray, changed, sums_of
from .._arrays._straight_through import quantize_straight_through
from .._base._groups import apart, broadcast_groups
from .._history import DelayedQParams, largest_bin
from .._spec._granularity import PerTensor
from .._spec._spec import QuantSpec


class QuantizedOperand(NamedTuple):
    """An operand of a contraction, as it is quantized.

    Attributes:
      real: its real values, which are there to be differentiated; no pass computes them.
      integers: the QArray that stands for them.
      nan_flags: what is added to the scales of the result: NaN where the values along the contracted axes hold one, 0
        elsewhere; or None.
    """

    real: Array
    integers: Any  # a QArray; None in a gradient, which is to the real values
    nan_flags: Array | None = None


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


def takes_sums(spec: QuantSpec, other: QuantSpec) -> bool:
    """Whether a product of integers of `spec` with those of `other` subtracts sums of the former.

    Where the latter have a zero point and both are taken as they are: not centred, in digits, or in blocks.
    """
    whole = lambda of: of.bits <= 8 and not (of.format or of.has_tensor_scale or of.granularity.sizes)
    return whole(spec) and whole(other) and not (other.signed and other.symmetric)


@functools.partial(jax.jit, static_argnames="axes")
def with_own_sums(q: QArray, axes: tuple[int, ...]) -> QArray:
    """`q` with the sums of its codes along some axes."""
    sums = jnp.sum(codes(q, False).values, axes, dtype=jnp.int32, keepdims=True)
    return changed(q, sums=sums, summed=math.prod(q.shape[i] for i in axes))


def sums_along(q: QArray, axes: Sequence[int]) -> Array | None:
    """The sums of the codes of `q` along these axes, of size 1 there, if it came with them."""
    sums, shape = sums_of(q), tuple(1 if i in axes else n for i, n in enumerate(q.shape))
    return sums if sums is not None and sums.shape == shape else None


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


class Rounding(NamedTuple):
    """With what a gradient is rounded, beside its spec.

    Attributes:
      key: PRNG key of stochastic rounding, or None.
      delayed: what its history gives; None if it has none.
    """

    key: Any = None
    delayed: DelayedQParams | None = None


def rounded(
    g: Array, spec: QuantSpec, contracted: tuple[int, ...] | None, rounding: Rounding
) -> tuple[QArray, Array | None]:
    """g on the grid of a spec, in whose products what is not finite is NaN; and its largest bin, for a history."""
    if spec.rounding == "stochastic" and rounding.key is None:
        raise ValueError(
            f"The gradient is rounded stochastically by {spec}, which needs a PRNG key. Pass key=jax.random.key(...) "
            "to the quantized function where it is differentiated."
        )
    delayed = rounding.delayed
    qparams, largest = (None, None) if delayed is None else (delayed.qparams, largest_bin(g))
    _, q, flags = quantize_straight_through(g, spec, contracted, rounding.key, qparams)
    return flagged(q, flags), largest


def plain(q: QArray, values: Array, scale: Array, zero_point: Array | None) -> QArray:
    """The values of q, moved, with these scales in float32."""
    spec = dataclasses.replace(q.spec, granularity=PerTensor(), scale_dtype="float32", scale_rule="ceil")
    zero = jnp.zeros_like(scale, values.dtype) if zero_point is None else zero_point
    return QArray(values, scale, zero, spec, jnp.dtype(jnp.float32))
