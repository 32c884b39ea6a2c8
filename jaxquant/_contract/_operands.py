# SPDX-License-Identifier: Apache-2.0
"""Operands of contractions: as an integer unit takes them, with NaN flags, and gradients on a grid."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from .._arrays._quantized import Quantized
from .._arrays._straight_through import quantize_straight_through
from .._base._groups import apart
from .._history import DelayedQParams, largest_bin
from .._spec._spec import QuantSpec


class QuantizedOperand(NamedTuple):
    """An operand of a contraction, as it is quantized.

    Attributes:
      real: its real values, which are there to be differentiated; no pass computes them.
      integers: the Quantized that stands for them.
      nan_flags: what is added to the scales of the result: NaN where the values along the contracted axes hold one, 0
        elsewhere; or None.
    """

    real: Array
    integers: Any  # Quantized; None in a gradient, which is to the real values
    nan_flags: Array | None = None


def with_flags(scale: Array, flags: Array) -> Array:
    """Scales with flags added to them, which are NaN or 0 and have size 1, or the length, on each axis."""
    for axis, n in enumerate(flags.shape):
        if n != 1 != scale.shape[axis]:  # blocks, each element of which has a flag of its own
            scale = apart(scale, axis, n)
    return scale + flags


def flagged(q: Quantized, flags: Array | None) -> Quantized:
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

    key: Array | None = None
    delayed: DelayedQParams | None = None


def rounded(
    g: Array, spec: QuantSpec, contracted: tuple[int, ...] | None, rounding: Rounding
) -> tuple[Quantized, Array | None]:
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


def plain(q: Quantized, values: Array, scale: Array | None = None, zero_point: Array | None = None) -> Quantized:
    """The values of q, moved, with these scales in float32; without, with 1."""
    spec = q.spec.with_float_scales
    scale = jnp.ones((1,) * values.ndim, jnp.float32) if scale is None else scale
    return Quantized(values, scale, zero_point, spec, jnp.dtype(jnp.float32))
