# SPDX-License-Identifier: Apache-2.0
"""Quantize, dequantize, and both in float with a gradient."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from .._base import _checks as checks
from .._base import _numerics as num
from .._base._gradients import custom_vjp
from .._base._groups import broadcast_groups, of_rank, reduce_groups
from .._base._sharding import shard_like, vary_together
from .._platform._cpu import loaded
from .._platform._division import divide
from .._spec._spec import QuantSpec, checked_spec, has_grid_of, qparams_shape
from ._fit import fit_qparams
from ._grid import Grid, frame_of, grid_of
from ._qarray import QArray, checked_qarray, outside, real_values
from ._qparams import QParams
from ._quantized import Quantized


@jax.jit
def _effective_step(grid: Grid) -> Array:
    # Compiled, because an eager conditional is a new program in each call.
    return grid.effective().step


@jax.jit
def _round_trip(x: Array, grid: Grid, noise: Array | None) -> Array:
    dtype, x = x.dtype, num.upcast(x, num.compute_dtype(x.dtype))
    grid = grid.effective().over(x)
    return num.downcast(grid.value(grid.level(x, noise)), dtype)


def _rounding_error(x: Array, steps: Array, scale: Array) -> Array:
    """`steps - x / scale`, rounded once, for the integer or narrow float `steps` next to the quotient.

    The rounded quotient would lose the digits of the error that it does not hold, seven of 24 at 127. So what is left
    of x is computed first, exactly: with a scale from 1 to 2, and cut into parts of which the product with `steps` is
    a float, so that no contraction changes it either. In float64, whose scales are of float32, each product is.
    """
    of = jnp.finfo(x.dtype)
    unit = num.power_of_two(-jnp.minimum(num.floor_log2(scale), of.maxexp - 2), x.dtype)
    left, scale = x * unit, scale * unit
    if x.dtype == jnp.float64:
        return -divide(left - steps * scale, scale)
    rest = scale
    for _ in range(3):  # of 8 digits each
        part = lax.bitcast_convert_type(lax.bitcast_convert_type(rest, jnp.int32) & -(2**16), jnp.float32)
        left, rest = left - steps * part, rest - part
    return -divide(left, scale)


@jax.jit
def _gradients(g: Array, x: Array, grid: Grid, noise: Array | None) -> tuple[Array, QParams]:
    """The gradients to x, scale, and zero_point in units of -scale: sums that are exact where the cotangents are.

    To a minimum as it is: where values are clipped it moves them, and elsewhere the levels move against it.
    """
    x = num.upcast(x, num.compute_dtype(x.dtype))
    shape, grid = grid.scale.shape, grid.effective().over(x)
    level = grid.level(x, noise)  # after rounding: the largest weight over its own scale can be 127.00001 levels
    g, zero = shard_like(g, level), grid.zero
    zero = jnp.zeros((), x.dtype) if zero is None else zero
    if zero.shape == x.shape:  # a select of two arrays wants one sharding
        zero = shard_like(zero, level)
    below, above = level < grid.qmin, level > grid.qmax
    inside = (grid.qmin <= level) & (level <= grid.qmax)
    wide = num.upcast(g, x.dtype)
    total = lambda v: reduce_groups(jnp.sum, v, shape).astype(jnp.float32)
    error = _rounding_error(grid.above_minimum(x), level - zero, grid.step)
    steps = jnp.where(below, grid.qmin - zero, jnp.where(above, grid.qmax - zero, error))
    counts = below | above | inside  # not NaN
    dscale = total(jnp.where(counts, wide * steps, 0))
    clipped = total(jnp.where(below | above, wide, 0))
    dzero = None if grid.zero_point is None else clipped if grid.frame.spec.has_minimum else -clipped
    return passed(g, inside), QParams(dscale, dzero)


def passed(g: Array, inside: Array) -> Array:
    """The gradient where values are inside of the grid, 0 elsewhere."""
    return num.select(inside, loaded(g), 0)


@jax.jit
def gradient_of_fitted(g: Array, x: Array, grid: Grid, noise: Array | None) -> Array:
    """The gradient to x, where the qparams are fitted to x itself."""
    spec = grid.frame.spec
    x = num.upcast(x, num.compute_dtype(x.dtype))
    is_plain = spec.symmetric and spec.scales.is_exact and spec.scale_rule != "extremum"
    beyond = spec.levels.beyond(spec.rounding) if is_plain else None
    if spec.scale_rule == "half_step":  # the ends of the range lie on a tie with the level beyond, and pass too
        beyond = 1.0
    if beyond is not None:
        # No finite value lies outside of its own range, so that no level need be computed; but those beyond half the
        # largest float, where ranges end, and there ties with the next level round outwards.
        limit = broadcast_groups((grid.qmax.astype(x.dtype) + beyond) * grid.scale.astype(x.dtype), x.shape)
        inside = lax.lt(lax.abs(x), limit)
    else:
        grid = grid.effective().over(x)
        level = grid.level(x, noise)
        inside = lax.bitwise_and(lax.ge(level, grid.qmin), lax.le(level, grid.qmax))
    return passed(shard_like(g, inside), inside)


def fake_quant_bwd(residuals, g):
    """The rule of the gradient: to x, and to the trained numbers as QParams; none to the frame and the noise."""
    x, trained, frame, noise = residuals
    grid = grid_of(trained, frame)
    if frame.is_fitted:
        return shard_like(gradient_of_fitted(g, x, grid, noise), x), None, None, None
    dx, dtrained = _gradients(g, x, grid, noise)
    return shard_like(dx, x), jax.tree.map(shard_like, dtrained, trained), None, None


@functools.partial(custom_vjp, rule=fake_quant_bwd)
def _fake_quant(x, trained, frame, noise):
    return _round_trip(x, grid_of(trained, frame), noise)


def noise_for(x: Array, spec: QuantSpec, key: Array | None) -> Array | None:
    """One uniform number for each element if the spec rounds stochastically."""
    rounds = spec.rounding == "stochastic"
    key = checks.rounding_key(key, rounds, str(spec))
    if not rounds:
        return None
    if key is None:
        raise ValueError(f"`key` must be a PRNG key, got None: {spec} rounds stochastically. Pass jax.random.key(...).")
    return jax.random.uniform(key, x.shape, jnp.float32).astype(num.compute_dtype(x.dtype))


def checked_qparams(x: Array, spec: QuantSpec, qparams: object, bits: ArrayLike | None) -> QParams:
    """The qparams of `x`, from the data or as passed, in float32."""
    expected = qparams_shape(spec, x.shape)
    if qparams is None:
        return fit_qparams(lax.stop_gradient(x), spec, bits=bits)
    if bits is not None and isinstance(qparams, QParams) and qparams.spec:  # of a step of a schedule
        qparams = qparams._replace(spec=dataclasses.replace(qparams.spec, bits=spec.bits))
    why = f"one for each group of {spec} in an array of shape {x.shape}"
    return qparams_of_shape(qparams, spec, expected, x.ndim, why)


def qparams_of_shape(qparams: object, spec: QuantSpec, expected: tuple[int, ...], ndim: int, why: str) -> QParams:
    """Qparams as passed, in float32, of the expected shape; leading axes of size 1 may be missing, or up to `ndim`."""
    if not isinstance(qparams, QParams):
        raise TypeError(
            f"`qparams` must be QParams or None, got {checks.kind(qparams)}. Build them by QParams(scale, zero_point), "
            "fit_qparams or qparams_from_range; convert Log2QParams by from_log2."
        )
    _check_made_for(qparams, spec)
    arrays = []
    for name, value in zip(("scale", "zero_point"), qparams, strict=True):
        value = checks.unwrapped(value)
        if name == "zero_point" and jnp.issubdtype(getattr(value, "dtype", jnp.float32), jnp.integer):
            value = jnp.asarray(value).astype(jnp.float32)
        array = checks.real(f"qparams.{name}", value, jnp.dtype(jnp.float32))
        padded = (1,) * (len(expected) - array.ndim) + array.shape
        if array.ndim > ndim or (padded != expected and (expected or math.prod(array.shape) != 1)):
            raise ValueError(
                f"`qparams.{name}` must have shape {expected}, got {array.shape}: {why}. Reshape them, or fit them by "
                "fit_qparams(x, spec)."
            )
        arrays.append(array)
    checks.shape("qparams.zero_point", arrays[1], arrays[0].shape, "the shape of `qparams.scale`")
    return QParams(arrays[0], arrays[1])


def _check_made_for(qparams: QParams, spec: QuantSpec) -> None:
    """Raises for qparams of another spec, or of which something has cast the arrays since."""
    made_for = qparams.spec
    if made_for is None:
        return
    if not has_grid_of(made_for, spec):
        raise ValueError(
            f"`qparams` must be of {spec}, got qparams of {made_for}. Make them by init_qparams with these rules, or"
            " use the rules that they were made with."
        )
    for name, value in qparams._asdict().items():
        value = checks.unwrapped(value)
        if getattr(value, "dtype", jnp.float32) != jnp.float32:
            raise TypeError(
                f"`qparams.{name}` must be float32, as init_qparams made it, got {checks.kind(value)}. Cast only the "
                "other parameters: qparams stay float32."
            )


@jax.custom_vjp
def _scale_gradient(x, factor):
    # Selected by the factor, for vmap: else a factor an example meets a cotangent that is summed over the examples.
    return jnp.where(factor == factor, x, x)


def _scale_gradient_bwd(factor, g):
    return shard_like(num.guard(num.upcast(g, factor.dtype) * factor).astype(g.dtype), g), None


_scale_gradient.defvjp(lambda x, factor: (_scale_gradient(x, factor), factor), _scale_gradient_bwd)


@functools.partial(jax.jit, static_argnames="spec", inline=True)
def _fake_quant_fitted(x: Array, spec: QuantSpec, noise: Array | None) -> Array:
    frame = frame_of(spec, is_fitted=True)
    grid = grid_of(fit_qparams(lax.stop_gradient(x), spec), frame)
    return _fake_quant(*vary_together(x, grid.trained, frame, noise))


def fake_quant(
    x: ArrayLike,
    spec: QuantSpec,
    qparams: QParams | None = None,
    *,
    key: Array | None = None,
    bits: ArrayLike | None = None,
) -> Array:
    """Quantizes and dequantizes real values in float, with a straight-through gradient that trains the qparams too.

        y = (clip(round(x / scale) + zero_point, qmin, qmax) - zero_point) * scale

    This is `dequantize(quantize(x, spec, qparams))` bit for bit, except that NaN stays NaN. The scale is used as at
    least 2 ** -126 and the zero point rounded into [qmin, qmax], so that an optimizer step cannot leave the grid.

    Args:
      x: floating array of any shape, real values. float16 and bfloat16 are computed in float32 and rounded once.
      spec: QuantSpec, static.
      qparams: QParams, traced or not. None fits them to x by min-max. The zero point of a symmetric spec is 0,
        whatever is passed for it.
      key: PRNG key, only for stochastic rounding. One key makes the same noise on every shard of `shard_map` and for
        every example under `vmap`: split it there.
      bits: integer, traced or not, at most spec.bits: a schedule of widths without a recompile. Fit the qparams for
        the same bits.

    Returns:
      An array of the shape and dtype of `x`.

    Gradient: with respect to x, the incoming `g` where the level is not clipped, tested after rounding, and 0 elsewhere
    and at NaN; scale_rule="half_step" without qparams clips no gradient within half the largest float, although it
    rounds the ends of the range inwards. With respect to scale, the sum of `g * (round(x / scale) - x / scale)` where
    not clipped, with a difference that is rounded once (stochastic: up to twice), and of `g * (qmin or qmax -
    zero_point)` where clipped. With respect to zero_point, the sum of `-scale * g` where clipped; 0 if symmetric.
    Gradients pass straight through the rounding and the limits of the qparams; qparams fitted here have no gradient.
    `jax.jvp` and `jax.hessian` raise.

    Raises:
      TypeError: for an argument of another kind.
      ValueError: for a granularity, qparams or bits that do not fit, or a key that is missing or not used.

    Source: scale: Esser et al., 2020, "Learned Step Size Quantization"; zero point: Bhalgat et al., 2020, "LSQ+".

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import QParams, QuantSpec, fake_quant
    >>> x, spec, qparams = jnp.array([0.26, -9.0]), QuantSpec(bits=4), QParams(0.5, 0.0)
    >>> fake_quant(x, spec, qparams).tolist()
    [0.5, -3.5]
    >>> jax.grad(lambda x: fake_quant(x, spec, qparams).sum())(x).tolist()
    [1.0, 0.0]
    """
    x, spec = checks.float_array("x", x), checked_spec(spec)
    if qparams is None and bits is None:
        return _fake_quant_fitted(x, spec, noise_for(x, spec, key))
    frame = frame_of(spec, bits, is_fitted=qparams is None)
    grid = as_trained(grid_of(checked_qparams(x, spec, qparams, bits), frame))
    return _fake_quant(*vary_together(x, grid.trained, frame, noise_for(x, spec, key)))


@functools.partial(jax.jit, inline=True)  # traced once for the sides of a condition
def levels_of(x: Array, grid: Grid, noise: Array | None) -> Array:
    """The levels of real values in the dtype that holds them, of a grid that is effective."""
    x = num.upcast(x, num.compute_dtype(x.dtype))
    grid = grid.over(x)
    return grid.in_dtype(grid.level(x, noise))


def quantized_of(values: Array, grid: Grid, dtype: np.dtype) -> Quantized:
    """Levels on an effective grid, made of an array of `dtype`."""
    spec = grid.frame.spec
    of = lambda v, dtype: None if v is None else of_rank(v.astype(dtype), values.ndim)
    scale, zero_point = of(grid.scale, spec.scale_dtype), of(grid.zero_point, spec.offset_dtype)
    return Quantized(values, scale, zero_point, spec, dtype, tensor_scale=of(grid.tensor_scale, jnp.float32))


@jax.jit
def _quantize(x: Array, grid: Grid, noise: Array | None) -> QArray:
    grid = grid.effective()
    values, zero_point = levels_of(x, grid, noise), grid.zero_point
    if zero_point is not None and not grid.frame.spec.has_minimum:  # integers have no NaN; the scale has
        grid = grid._replace(zero_point=num.select(zero_point == zero_point, zero_point, grid.frame.spec.qmin))
    return outside(quantized_of(values, grid, x.dtype), spec=grid.frame.spec)


@functools.partial(jax.jit, static_argnames="spec", inline=True)
def _quantize_fitted(x: Array, spec: QuantSpec, noise: Array | None) -> QArray:
    return _quantize(x, grid_of(fit_qparams(x, spec), frame_of(spec, is_fitted=True)), noise)


def quantize(x: ArrayLike, spec: QuantSpec, qparams: QParams | None = None, *, key: Array | None = None) -> QArray:
    """Real values to integers: `clip(round(x / scale) + zero_point, qmin, qmax)`.

    Args:
      x: floating array of any shape, real values.
      spec: QuantSpec, static.
      qparams: QParams, traced or not. None fits them to x by min-max.
      key: PRNG key, for stochastic rounding alone.

    Returns:
      QArray, with the scale and zero point that were used, limited as in `fake_quant`. Infinities saturate; NaN becomes
      qmin, as in ONNX Runtime (except in its blocked kernel), because integers have no NaN.

    Gradient: none with respect to x, because quantized values are integers. Train through `fake_quant`.

    Raises:
      TypeError, ValueError: as `fake_quant`.

    Source: ONNX QuantizeLinear (half to even, true division).

    >>> import jax.numpy as jnp
    >>> from jaxquant import QParams, QuantSpec, quantize
    >>> quantize(jnp.array([400.0, 2000.0]), QuantSpec(signed=False), QParams(1000 / 255, 0)).values.tolist()
    [102, 255]
    """
    x, spec = checks.float_array("x", x), checked_spec(spec)
    noise = noise_for(x, spec, key)
    if qparams is None:
        return _quantize_fitted(x, spec, noise)
    return _quantize(x, grid_of(checked_qparams(x, spec, qparams, None), frame_of(spec)), noise)


def as_trained(grid: Grid) -> Grid:
    """The grid as the gradient rule takes it, which gives the gradient of the zero point in units of -scale.

    The scale multiplies here, after shard_map has added the shards.
    """
    if grid.zero is None or grid.frame.is_fitted:
        return grid
    return grid._replace(zero_point=_scale_gradient(*vary_together(grid.zero_point, _effective_step(grid))))


def dequantize(q: QArray) -> Array:
    """Integers to real values: `(values - zero_point) * scale`.

    Args:
      q: QArray.

    Returns:
      An array of the shape of `q` and the dtype that was quantized.

    Gradient: with respect to the scale; integers have none.

    Raises:
      TypeError: for anything but a QArray.

    Source: ONNX DequantizeLinear.

    >>> import jax.numpy as jnp
    >>> from jaxquant import QParams, QuantSpec, dequantize, quantize
    >>> dequantize(quantize(jnp.array([0.26, -9.0]), QuantSpec(bits=4), QParams(0.5, 0.0))).tolist()
    [0.5, -3.5]
    """
    return real_values(checked_qarray("q", q), q.dtype)


def scale_gradient(x: ArrayLike, factor: ArrayLike) -> Array:
    """`x` itself, with its gradient multiplied: LSQ's 1 / sqrt(n * qmax) for a scale that n weights share.

    Args:
      x: floating array of any shape.
      factor: number or floating scalar, traced or not.

    Returns:
      `x`.

    Gradient: with respect to x, `g * factor`; none for factor.

    Raises:
      TypeError: for an argument of another kind.
      ValueError: for a factor that is not a scalar.

    Source: Esser et al., 2020, "Learned Step Size Quantization", section 2.2.

    >>> import jax
    >>> from jaxquant import scale_gradient
    >>> jax.grad(lambda s: scale_gradient(s, 0.25) * 2)(1.0).item()
    0.5
    """
    x = checks.float_array("x", x)
    factor = checks.real("factor", checks.unwrapped(factor), num.compute_dtype(x.dtype))
    checks.shape("factor", factor, (), "one for the array")
    return _scale_gradient(*vary_together(x, factor))
