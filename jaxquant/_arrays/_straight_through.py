# SPDX-License-Identifier: Apache-2.0
"""Values whose gradient is passed straight through what made other values of them: for contractions in integers."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from .._base import _numerics as num
from .._base._groups import broadcast_groups
from .._base._sharding import shard_like, vary_together
from .._platform._cpu import computed_apart, nan_where
from .._spec._granularity import PerTensor
from .._spec._scale_formats import TINY, RoundedOfTensor
from .._spec._spec import QuantSpec
from ._affine import as_trained, fake_quant_bwd, gradient_of_fitted, levels_of, noise_for, passed, quantized_of
from ._grid import Frame, Grid, frame_of, grid_of
from ._qparams import QParams
from ._quantized import OF_GROUPS, Quantized
from ._range import LARGEST, Range, finite_or, grid_of_range, qparams_from_range, range_of

# The names of what a site keeps for its backward pass, for policies of jax.checkpoint.
CODES, SCALES = "jaxquant_codes", "jaxquant_scales"


class Fitted(NamedTuple):
    """The scales of values, fitted to a stack that they are a part of, and of it all; they have no gradient."""

    scale: Array
    tensor_scale: Array

    def grid(self, frame: Frame) -> Grid:
        return Grid(self.scale, None, frame, self.tensor_scale)


class OfTensor(NamedTuple):
    """A static scale of the tensor, beside which scales of blocks follow the values; it has no gradient."""

    tensor_scale: Array

    def fitted(self, x: Array, spec: QuantSpec) -> Fitted:
        """The scales of blocks of x; what is larger than the scale of the tensor allows for saturates."""
        assert isinstance(spec.scales, RoundedOfTensor)
        x_min, x_max, _ = range_of(lax.stop_gradient(x), spec)
        scale = grid_of_range(x_min, x_max, frame_of(spec, is_fitted=True)).scale
        of_tensor = lax.stop_gradient(jnp.reshape(self.tensor_scale, (1,) * x.ndim))
        of_tensor = num.select(of_tensor < np.inf, lax.max(of_tensor, np.float32(TINY / spec.scales.unit)), np.nan)
        return Fitted(spec.scales.beside(scale, of_tensor), of_tensor)


def range_spec(spec: QuantSpec, is_weight: bool = False) -> QuantSpec:
    """The spec that an operand is observed with: of an input with a scale of the tensor, one range."""
    if is_weight or not spec.has_tensor_scale:
        return spec
    return dataclasses.replace(spec, granularity=PerTensor(), scale_dtype="float32")


def tensor_qparams(r: Range, spec: QuantSpec) -> QParams:
    """The scale of the tensor for inputs in a range, as QParams, whose zero point is 0."""
    assert isinstance(spec.scales, RoundedOfTensor)
    scale, zero_point = qparams_from_range(r, range_spec(spec))
    return QParams(spec.scales.of_tensor(scale), zero_point)


@jax.custom_vjp
def _straight_through(x, trained, frame, noise):
    """`x` with the gradients of `fake_quant`, for `contract`, which has the value in integers."""
    return x


def _straight_through_bwd(kept, g):
    x, trained, frame, noise = kept
    if not isinstance(trained, Fitted):
        return fake_quant_bwd(kept, g)
    return shard_like(gradient_of_fitted(g, x, trained.grid(frame), noise), x), None, None, None


_straight_through.defvjp(lambda *args: (_straight_through(*args), args), _straight_through_bwd)


@jax.jit
def _gradient_of_codes(g: Array, q: Quantized, nan_flags: Array | None) -> Array:
    """The gradient of a signed symmetric grid from the integers, of which some are clipped where a range ends.

    At NaN and infinities, which flags tell, and beyond half the largest float the level is the last one; there it
    counts as clipped in all that has such flags, or such a range.
    """
    frame = frame_of(q.spec, is_fitted=True)
    bound = num.select(q.scale < grid_of_range(None, jnp.asarray(LARGEST), frame).scale, np.float32(np.inf), frame.qmax)
    bound = broadcast_groups(bound, q.shape)
    if nan_flags is not None:
        bound = lax.min(*jnp.broadcast_arrays(bound, num.select(nan_flags == 0, np.float32(np.inf), frame.qmax)))
    level = lax.abs(q.values.astype(jnp.float32))
    return passed(shard_like(g, level), lax.lt(level, jnp.broadcast_to(bound, level.shape)))


@jax.custom_vjp
def _straight_through_codes(x, q, nan_flags):
    """The same, with the gradient as the integers tell it, so that `x` need not be kept."""
    return x


_straight_through_codes.defvjp(
    lambda x, *kept: (_straight_through_codes(x, *kept), kept),
    lambda kept, g: (shard_like(_gradient_of_codes(g, *kept), g), None, None),
)


def _is_told_by_codes(spec: QuantSpec) -> bool:
    """Whether integers tell where the gradient of `fake_quant` passes, of a range of the values at hand."""
    is_narrow = bool(spec.format) and spec.bits < 8
    is_plain = spec.symmetric and spec.signed and spec.rounding != "stochastic"
    return is_plain and spec.scales.is_exact and spec.scale_rule != "extremum" and not is_narrow


def _with_names(q: Quantized) -> Quantized:
    """Quantized values to be kept."""
    scales = {field: _to_keep(getattr(q, field), SCALES) for field in OF_GROUPS}
    return dataclasses.replace(q, stored=_to_keep(q.stored, CODES), **scales)


def _to_keep(v: Array | None, name: str) -> Array | None:
    """An array with a name; floats of 8 bits by their bits.

    JAX rounds the floats that a checkpoint keeps by `reduce_precision`, for which the largest exponent is infinity.
    """
    if v is None or v.dtype.itemsize > 1 or jnp.issubdtype(v.dtype, jnp.integer):
        return v if v is None else checkpoint_name(v, name)
    bits = checkpoint_name(lax.bitcast_convert_type(v, jnp.uint8), name)
    return lax.bitcast_convert_type(bits, v.dtype)


@functools.partial(jax.jit, static_argnames="spec")
def fitted_to_stack(x: Array, spec: QuantSpec) -> Fitted:
    """The scales of the parts of a stack, of a format that has one for the tensor, too."""
    x_min, x_max, _ = range_of(lax.stop_gradient(x), spec)
    grid = grid_of_range(x_min, x_max, frame_of(spec, is_fitted=True)).effective()
    assert grid.tensor_scale is not None
    return Fitted(grid.scale, grid.tensor_scale)


def straight_through(
    x: Array, spec: QuantSpec, contracted: tuple[int, ...] | None, key: Array | None,
    qparams: QParams | Fitted | OfTensor | None = None, keeps_codes: bool = False,
) -> tuple[Any, Quantized, Array | None]:  # fmt: skip
    """Quantizes one operand of a contraction.

    Args:
      x, spec, contracted, key, qparams: of the quantizer.
      keeps_codes: whether the integers are for the backward pass to keep, in place of x.

    Returns:
      x itself, with the gradients of `fake_quant(x, spec, qparams)`; its integers; and flags to add to the scale of the
      result, of size 1 along the contracted axes: NaN where the values along these hold a NaN or an infinity, else 0.
      None for `contracted=None`: for products of floats, which have NaN themselves.
    """
    qparams = qparams.fitted(x, spec) if isinstance(qparams, OfTensor) else qparams
    frame, noise = frame_of(spec, is_fitted=not isinstance(qparams, QParams)), noise_for(x, spec, key)
    values = lax.stop_gradient(x)
    if contracted is None:
        values = finite_or(values, np.nan)

    # The integers stand alone on a CPU: else it would compute anew for them what the values are made of, the scaled
    # product before them, and from them what the backward pass reads.
    if qparams is None:
        x_min, x_max, flags = (_to_keep(v, SCALES) for v in range_of(values, spec, contracted=contracted))

        def fitted(values, x_min, x_max, noise):
            grid = grid_of_range(x_min, x_max, frame)
            return grid.trained, levels_of(values, grid.effective(), noise)

        trained, integers = computed_apart(fitted, values, x_min, x_max, noise)
        grid = grid_of(trained, frame)
        effective = grid.effective()
        q = quantized_of(integers, effective, x.dtype)
        if effective.scale is grid.scale:  # the gradient reads what is kept of the integers, and not its like
            grid = grid._replace(scale=q.scale, zero_point=q.zero_point)
        trained = grid.trained
    else:
        trained = qparams if isinstance(qparams, Fitted) else as_trained(grid_of(qparams, frame)).trained
        fixed = lax.stop_gradient(trained)
        effective = fixed.grid(frame) if isinstance(fixed, Fitted) else grid_of(fixed, frame).effective()
        flags = None if contracted is None else _to_keep(nan_where(values, contracted), SCALES)
        q = quantized_of(computed_apart(levels_of, values, effective, noise), effective, x.dtype)
    if keeps_codes and qparams is None and _is_told_by_codes(spec):
        q = _with_names(q)
        return _straight_through_codes(*vary_together(x, q, flags)), q, flags
    return _straight_through(*vary_together(x, trained, frame, noise)), q, flags


quantize_straight_through = jax.jit(straight_through, static_argnames=("spec", "contracted", "keeps_codes"))


@jax.custom_vjp
def with_gradient_of(x: ArrayLike, value: Array) -> Any:
    """`value`, a pytree like `x`, with its gradient passed to `x`: straight through what made it of `x`."""
    return value


# The op itself, not its body: else a second derivative would not see x.
with_gradient_of.defvjp(lambda x, value: (with_gradient_of(x, value), None), lambda _, g: (g, None))
