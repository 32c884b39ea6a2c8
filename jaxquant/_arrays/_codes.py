# SPDX-License-Identifier: Apache-2.0
"""Integers as an integer unit takes them, and their sums."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from .._base._groups import broadcast_groups
from .._spec._spec import QuantSpec
from ._qarray import QArray, changed, inside
from ._quantized import Quantized


def largest_magnitude(spec: QuantSpec) -> int:
    """The largest magnitude of `values - zero_point` of integers."""
    return int(max(-spec.qmin, spec.qmax) if spec.symmetric else spec.qmax - spec.qmin)


class Codes(NamedTuple):
    """Values for an integer unit: int8 and an int32 zero point, None for 0; or int32, centred, if one is wider."""

    values: Array
    zero: Array | None


def centred(q: Quantized, dtype: DTypeLike) -> Array:
    """`values - zero_point`, in a dtype that holds it; of a spec with a minimum the values."""
    if not q.spec.has_zero_point:
        return q.values.astype(dtype)
    zero = broadcast_groups(q.zero_point.astype(dtype), q.shape)
    return q.values.astype(dtype) - zero


def codes(q: Quantized, wide: bool) -> Codes:
    """The values as an integer unit takes them; `wide` if one of the operands has more than 8 bits."""
    if wide:
        return Codes(centred(q, jnp.int32), None)
    zero = q.zero_point.astype(jnp.int32) if q.spec.has_zero_point else None
    if q.spec.signed:
        return Codes(q.values, zero)
    return Codes(
        lax.bitcast_convert_type(q.values ^ jnp.uint8(128), jnp.int8), jnp.int32(-128) if zero is None else zero - 128
    )


def takes_sums(spec: QuantSpec, other: QuantSpec) -> bool:
    """Whether a product of integers of `spec` with those of `other` subtracts sums of the former.

    Where the latter have a zero point and both are taken as they are: not centred, in digits, or in blocks.
    """
    whole = lambda of: of.bits <= 8 and not (of.format or of.has_tensor_scale or of.granularity.sizes)
    return whole(spec) and whole(other) and not (other.signed and other.symmetric)


@functools.partial(jax.jit, static_argnames="axes")
def with_own_sums(q: QArray, axes: tuple[int, ...]) -> QArray:
    """`q` with the sums of its codes along some axes."""
    sums = jnp.sum(codes(inside(q), False).values, axes, dtype=jnp.int32, keepdims=True)
    return changed(q, sums=sums, summed=math.prod(q.shape[i] for i in axes))


def sums_along(q: Quantized, axes: Sequence[int]) -> Array | None:
    """The sums of the codes of `q` along these axes, of size 1 there, if it came with them."""
    sums, shape = q.own_sums, tuple(1 if i in axes else n for i, n in enumerate(q.shape))
    return sums if sums is not None and sums.shape == shape else None
