# SPDX-License-Identifier: Apache-2.0
"""Values whose gradient is passed straight through what made other values of them: for contractions in integers."""

import functools
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from .._base._sharding import vary_together
from .._platform._cpu import computed_apart, nan_where
from .._spec._spec import QuantSpec
from ._affine import as_trained, fake_quant_bwd, levels_of, noise_for, quantized_of
from ._grid import frame_of, grid_of
from ._qparams import QParams
from ._quantized import Quantized
from ._range import finite_or, grid_of_range, range_of


@jax.custom_vjp
def _straight_through(x, trained, frame, noise):
    """`x` with the gradients of `fake_quant`, for `contract`, which has the value in integers."""
    return x


_straight_through.defvjp(lambda *args: (_straight_through(*args), args), fake_quant_bwd)


@functools.partial(jax.jit, static_argnames="spec")
def fitted(x: Array, spec: QuantSpec) -> QParams:
    """The range of a whole, as qparams for its parts, which have no gradient."""
    x_min, x_max, _ = range_of(lax.stop_gradient(x), spec)
    return grid_of_range(x_min, x_max, frame_of(spec, is_fitted=True)).trained


def straight_through(
    x: Array, spec: QuantSpec, contracted: tuple[int, ...] | None, key: Array | None, qparams: QParams | None = None,
    is_fitted: bool = False,
) -> tuple[Any, Quantized, Array | None]:  # fmt: skip
    """Quantizes one operand of a contraction; `is_fitted` where the qparams are the range of what x is a part of.

    Returns:
      x itself, with the gradients of `fake_quant(x, spec, qparams)`; its integers; and flags to add to the scale of the
      result, of size 1 along the contracted axes: NaN where the values along these hold a NaN or an infinity, else 0.
      None for `contracted=None`: for products of floats, which have NaN themselves.
    """
    frame, noise = frame_of(spec, is_fitted=is_fitted or qparams is None), noise_for(x, spec, key)
    values = lax.stop_gradient(x)
    if contracted is None:
        values = finite_or(values, np.nan)

    # The integers stand alone on a CPU: else it would compute anew for them what the values are made of, the scaled
    # product before them, and from them what the backward pass reads.
    if qparams is None:
        x_min, x_max, flags = range_of(values, spec, contracted=contracted)

        def fitted(values, x_min, x_max, noise):
            grid = grid_of_range(x_min, x_max, frame)
            return grid.trained, levels_of(values, grid.effective(), noise)

        trained, integers = computed_apart(fitted, values, x_min, x_max, noise)
        grid = grid_of(trained, frame)
        effective = grid.effective()
        q = quantized_of(integers, effective, x.dtype)
        if effective.scale is grid.scale:  # the gradient reads what is kept of the integers, and not its like
            grid = grid._replace(scale=q.scale, zero_point=q.zero_point)
    else:
        grid = grid_of(qparams, frame)
        grid = grid if is_fitted else as_trained(grid)
        effective = grid_of(lax.stop_gradient(grid.trained), frame).effective()
        flags = None if contracted is None else nan_where(values, contracted)
        q = quantized_of(computed_apart(levels_of, values, effective, noise), effective, x.dtype)
    real = _straight_through(*vary_together(x, grid.trained, frame, noise))
    return real, q, flags


quantize_straight_through = jax.jit(straight_through, static_argnames=("spec", "contracted", "is_fitted"))


@jax.custom_vjp
def with_gradient_of(x: ArrayLike, value: Array) -> Any:
    """`value`, a pytree like `x`, with its gradient passed to `x`: straight through what made it of `x`."""
    return value


# The op itself, not its body: else a second derivative would not see x.
with_gradient_of.defvjp(lambda x, value: (with_gradient_of(x, value), None), lambda _, g: (g, None))
