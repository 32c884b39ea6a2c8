# SPDX-License-Identifier: Apache-2.0
"""Quantize, dequantize, and both in float with a gradient."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import Array, lax

from . import _checks as checks
from . import _numerics as num
from ._groups import broadcast_groups, reduce_groups
from ._qarray import QArray, checked_qarray
from ._ranges._fit import fit_qparams
from ._ranges._range import TINY, QParams, if_finite, range_of, to_qparams
from ._spec import QuantSpec, checked, grid, qparams_shape


def _on_grid(
    scale: Array, zero_point: Array, qmin: Any, qmax: Any, spec: QuantSpec, fitted: bool = False
) -> tuple[Array, Array | None]:
    """Qparams as they are used, wherever an optimizer left them: a scale that is not tiny, a zero point on the grid.

    Those fitted to x are so already; the zero of a symmetric spec is a constant, for XLA to drop.
    """

    def used(scale, zero_point):
        # NaN for what is no number: integers cannot hold it, and it must not look like one.
        scale = num.select(scale < TINY, TINY, num.select(scale < jnp.inf, scale, jnp.nan))
        if spec.symmetric:
            return scale, zero_point
        scale = num.select(zero_point == zero_point, scale, jnp.nan)
        return scale, num.clip(num.round_half_even(zero_point), qmin, qmax)

    if not fitted:
        scale, zero_point = num.once(used, scale, zero_point) if scale.ndim else used(scale, zero_point)
    return scale, None if spec.symmetric else zero_point


@functools.partial(jax.jit, static_argnames="spec")
def _used_scale(scale: Array, zero_point: Array, qmin: Any, qmax: Any, spec: QuantSpec) -> Array:
    # Compiled, because an eager conditional is a new program in each call.
    return _on_grid(scale, zero_point, qmin, qmax, spec)[0]


class _Grid(NamedTuple):
    """A grid in the dtype of a computation, with a value for each group spread over a shape; no zero point is 0."""

    scale: Array
    zero_point: Array | None
    qmin: Any
    qmax: Any

    def level(self, x: Array, noise: Array | None, spec: QuantSpec) -> Array:
        """The level of each real value, not yet clipped."""
        return num.affine_level(x, self.scale, self.zero_point, spec.rounding, noise)

    def value(self, level: Array) -> Array:
        """The real value of each level, clipped first; NaN stays."""
        level = lax.min(lax.max(level, self.qmin), self.qmax)
        return num.affine_value(level, self.scale, self.zero_point)


def _grid_of(x: Array, qparams: tuple[Array, Array | None], qmin: Any, qmax: Any) -> _Grid:
    """The grid for values of the shape and dtype of `x`."""
    scale, zero_point = qparams
    over = lambda v: broadcast_groups(v.astype(x.dtype), x.shape)
    zero_point = None if zero_point is None else over(zero_point)
    return _Grid(over(scale), zero_point, qmin.astype(x.dtype), qmax.astype(x.dtype))


@functools.partial(jax.jit, static_argnames=("spec", "fitted"))
def _round_trip(x, scale, zero_point, qmin, qmax, noise, spec, fitted) -> Array:
    dtype, x = x.dtype, num.upcast(x, num.compute_dtype(x.dtype))
    grid = _grid_of(x, _on_grid(scale, zero_point, qmin, qmax, spec, fitted), qmin, qmax)
    return num.downcast(grid.value(grid.level(x, noise, spec)), dtype)


@functools.partial(jax.jit, static_argnames="spec")
def _gradients(g, x, scale, zero_point, qmin, qmax, noise, spec) -> tuple[Array, Array, Array]:
    """To x, to scale, and to zero_point in units of -scale: a sum that is exact where the cotangents are."""
    x = num.upcast(x, num.compute_dtype(x.dtype))
    shape = scale.shape
    grid = _grid_of(x, _on_grid(scale, zero_point, qmin, qmax, spec), qmin, qmax)
    # The mask is of the level after rounding: the largest weight over its own scale can be 127.00001 levels.
    level = grid.level(x, noise, spec)
    g, zero = num.shard_like(g, level), grid.zero_point
    zero = jnp.zeros((), x.dtype) if zero is None else zero
    if zero.shape == x.shape:  # a select of two arrays wants one sharding
        zero = num.shard_like(zero, level)
    below, above = level < grid.qmin, level > grid.qmax
    inside = (grid.qmin <= level) & (level <= grid.qmax)
    wide = num.upcast(g, x.dtype)
    total = lambda v: reduce_groups(jnp.sum, v, shape)
    v = num.divide(x, grid.scale)
    steps = jnp.where(below, grid.qmin - zero, jnp.where(above, grid.qmax - zero, level - zero - v))
    counts = below | above | inside  # not NaN
    dscale = total(jnp.where(counts, wide * steps, 0)).astype(jnp.float32)
    if spec.symmetric:
        return _passed(g, inside), dscale, jnp.zeros_like(dscale)
    clipped = total(jnp.where(below | above, wide, 0)).astype(jnp.float32)
    return _passed(g, inside), dscale, -clipped


def _passed(g: Array, inside: Array) -> Array:
    # Guarded, because XLA:CPU makes of a select of a plain load a masked load, which takes twice the time.
    return num.select(inside, num.guard(g), 0)


@functools.partial(jax.jit, static_argnames="spec")
def _gradient_of_fitted(g, x, scale, zero_point, qmin, qmax, noise, spec) -> Array:
    """To x, where the qparams are fitted to x itself."""
    x = num.upcast(x, num.compute_dtype(x.dtype))
    grid = _grid_of(x, _on_grid(scale, zero_point, qmin, qmax, spec, fitted=True), qmin, qmax)
    if spec.symmetric and spec.narrow_range and spec.rounding in ("half_even", "half_away"):
        # No finite value lies outside of its own range, so that no level need be computed; but those beyond half the
        # largest float, where ranges end, and there ties with the next level round outwards.
        limit = broadcast_groups((grid.qmax + 0.5) * scale.astype(x.dtype), x.shape)
        inside = (-limit < x) & (x < limit)
    else:
        level = grid.level(x, noise, spec)
        inside = (grid.qmin <= level) & (level <= grid.qmax)
    return _passed(num.shard_like(g, inside), inside)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _fake_quant(x, scale, zero_point, qmin, qmax, noise, spec, fitted):
    return _round_trip(x, scale, zero_point, qmin, qmax, noise, spec, fitted)


def _fake_quant_fwd(x, scale, zero_point, qmin, qmax, noise, spec, fitted):
    # The op itself, not its body: else a second derivative would differentiate the bare staircase.
    residuals = x, scale, zero_point, qmin, qmax, noise
    return _fake_quant(*residuals, spec, fitted), residuals


def _fake_quant_bwd(spec, fitted, residuals, g):
    if fitted:
        return num.shard_like(_gradient_of_fitted(g, *residuals, spec), residuals[0]), *[None] * 5
    gradients = _gradients(g, *residuals, spec)
    return *(num.shard_like(d, v) for d, v in zip(gradients, residuals[:3], strict=True)), None, None, None


_fake_quant.defvjp(_fake_quant_fwd, _fake_quant_bwd)


def _noise(x: Array, spec: QuantSpec, key: Any) -> Array | None:
    """One uniform number for each element if the spec rounds stochastically."""
    if spec.rounding != "stochastic":
        if key is not None:
            raise ValueError(
                f"`key` is for stochastic rounding alone, got one with {spec}. Drop it, or set rounding='stochastic'."
            )
        return None
    if key is None:
        raise ValueError(f"`key` must be a PRNG key, got None: {spec} rounds stochastically. Pass jax.random.key(...).")
    return jax.random.uniform(checks.prng_key("key", key), x.shape, jnp.float32).astype(num.compute_dtype(x.dtype))


def checked_qparams(x: Array, spec: QuantSpec, qparams: Any, bits: Any) -> QParams:
    """The qparams of `x`, from the data or as passed, in float32."""
    expected = qparams_shape(spec, x.shape)
    if qparams is None:
        return fit_qparams(lax.stop_gradient(x), spec, bits=bits)
    return qparams_of_shape(qparams, expected, x.ndim, f"one for each group of {spec} in an array of shape {x.shape}")


def qparams_of_shape(qparams: Any, expected: tuple[int, ...], ndim: int, why: str) -> QParams:
    """Qparams as passed, in float32, of the expected shape; leading axes of size 1 may be missing, or up to `ndim`."""
    if not isinstance(qparams, QParams):
        raise TypeError(
            f"`qparams` must be QParams or None, got {checks.kind(qparams)}. Build them by QParams(scale, zero_point), "
            "fit_qparams or qparams_from_range."
        )
    arrays = []
    for name, value in zip(("scale", "zero_point"), qparams, strict=True):
        value = checks.unwrapped(value)
        if name == "zero_point" and jnp.issubdtype(getattr(value, "dtype", jnp.float32), jnp.integer):
            value = jnp.asarray(value).astype(jnp.float32)
        array, _ = checks.ends((f"qparams.{name}", ""), (value, 0.0), jnp.dtype(jnp.float32))
        padded = (1,) * (len(expected) - array.ndim) + array.shape
        if array.ndim > ndim or (padded != expected and (expected or math.prod(array.shape) != 1)):
            raise ValueError(
                f"`qparams.{name}` must have shape {expected}, got {array.shape}: {why}. Reshape them, or fit them by "
                "fit_qparams(x, spec)."
            )
        arrays.append(array)
    checks.shape("qparams.zero_point", arrays[1], arrays[0].shape, "the shape of `qparams.scale`")
    return QParams(*arrays)


@jax.custom_vjp
def _scale_gradient(x, factor):
    # Selected by the factor, for vmap: else a factor an example meets a cotangent that is summed over the examples.
    return jnp.where(factor == factor, x, x)


def _scale_gradient_bwd(factor, g):
    return num.shard_like(num.guard(num.upcast(g, factor.dtype) * factor).astype(g.dtype), g), None


_scale_gradient.defvjp(lambda x, factor: (_scale_gradient(x, factor), factor), _scale_gradient_bwd)


def fake_quant(x: Any, spec: QuantSpec, qparams: QParams | None = None, *, key: Any = None, bits: Any = None) -> Array:
    """Quantizes and dequantizes real values in float, with a straight-through gradient that trains the qparams too.

        y = (clip(round(x / scale) + zero_point, qmin, qmax) - zero_point) * scale

    bit for bit `dequantize(quantize(x, spec, qparams))`, but that NaN stays NaN. The scale is used as at least
    2 ** -126 and the zero point rounded into [qmin, qmax], so that an optimizer step cannot leave the grid.

    Args:
      x: floating array of any shape, real values. float16 and bfloat16 are computed in float32 and rounded once.
      spec: QuantSpec, static.
      qparams: QParams, traced or not. None fits them to x by min-max. The zero point of a symmetric spec is 0,
        whatever is passed for it.
      key: PRNG key, for stochastic rounding alone. One key makes the same noise on every shard of `shard_map` and for
        every example under `vmap`: split it there.
      bits: integer, traced or not, at most spec.bits: a schedule of widths without a recompile. Fit the qparams for
        the same bits.

    Returns:
      An array of the shape and dtype of `x`.

    Gradient: to x the incoming `g` where the level is not clipped, tested after rounding, and 0 elsewhere and at NaN.
    To scale the sum of `g * (round(x / scale) - x / scale)` where not clipped and `g * (qmin or qmax - zero_point)`
    where clipped. To zero_point the sum of `-scale * g` where clipped; 0 if symmetric. Rounding and limits of the
    qparams are passed straight through; qparams fitted here have no gradient. `jax.jvp` and `jax.hessian` raise.

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
    x, spec = checks.float_array("x", x), checked(spec)
    qmin, qmax = grid(spec, bits, jnp.float32)
    scale, zero_point = checked_qparams(x, spec, qparams, bits)
    fitted = qparams is None
    if not fitted:
        scale, zero_point = _trained(QParams(scale, zero_point), qmin, qmax, spec)
    noise = _noise(x, spec, key)
    arrays = num.vary_together(x, scale, zero_point, qmin, qmax, *([] if noise is None else [noise]))
    return _fake_quant(*arrays, *([None] if noise is None else []), spec, fitted)


def _to_integers(level: Array, qmin: Any, qmax: Any, spec: QuantSpec) -> Array:
    """Clipped; NaN, which compares with nothing, becomes qmin."""
    return lax.min(num.select(level >= qmin, level, qmin), qmax).astype(spec.dtype)


def _integers(x, scale, zero_point, qmin, qmax, noise, spec) -> Array:
    """The integers of real values, with qparams that are on the grid."""
    x = num.upcast(x, num.compute_dtype(x.dtype))
    grid = _grid_of(x, (scale, zero_point), qmin, qmax)
    return _to_integers(grid.level(x, noise, spec), grid.qmin, grid.qmax, spec)


def _qarray(integers: Array, scale: Array, zero_point: Array | None, spec: QuantSpec, dtype: Any) -> QArray:
    zero_point = jnp.zeros_like(scale) if zero_point is None else zero_point
    return QArray(integers, scale, zero_point.astype(spec.dtype), spec, dtype)


@functools.partial(jax.jit, static_argnames=("spec", "fitted"))
def _quantize(x, scale, zero_point, qmin, qmax, noise, spec, fitted) -> QArray:
    scale, zero_point = _on_grid(scale, zero_point, qmin, qmax, spec, fitted)
    integers = _integers(x, scale, zero_point, qmin, qmax, noise, spec)
    if zero_point is not None:
        zero_point = num.select(zero_point == zero_point, zero_point, spec.qmin)  # integers have no NaN; the scale has
    return _qarray(integers, scale, zero_point, spec, x.dtype)


def quantize(x: Any, spec: QuantSpec, qparams: QParams | None = None, *, key: Any = None) -> QArray:
    """Real values to integers: `clip(round(x / scale) + zero_point, qmin, qmax)`.

    Args:
      x: floating array of any shape, real values.
      spec: QuantSpec, static.
      qparams: QParams, traced or not. None fits them to x by min-max.
      key: PRNG key, for stochastic rounding alone.

    Returns:
      QArray; its scale and zero point are those used, limited as in `fake_quant`. Infinities saturate; NaN becomes
      qmin, as in ONNX Runtime (but its blocked kernel), because integers have none.

    Gradient: none to x; quantized values are integers. Train through `fake_quant`.

    Raises:
      TypeError, ValueError: as `fake_quant`.

    Source: ONNX QuantizeLinear (half to even, true division).

    >>> import jax.numpy as jnp
    >>> from jaxquant import QParams, QuantSpec, quantize
    >>> quantize(jnp.array([400.0, 2000.0]), QuantSpec(signed=False), QParams(1000 / 255, 0)).values.tolist()
    [102, 255]
    """
    x, spec = checks.float_array("x", x), checked(spec)
    qmin, qmax = grid(spec, None, jnp.float32)
    scale, zero_point = checked_qparams(x, spec, qparams, None)
    noise = _noise(x, spec, key)
    return _quantize(x, scale, zero_point, qmin, qmax, noise, spec, qparams is None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _straight_through(x, scale, zero_point, qmin, qmax, noise, spec, fitted):
    """`x` with the gradients of `fake_quant`, for `contract`, which has the value in integers."""
    return x


_straight_through.defvjp(
    lambda x, *others: (_straight_through(x, *others), (x, *others[:-2])),
    _fake_quant_bwd,
)


@functools.partial(jax.jit, static_argnames=("spec", "contracted"))
def quantize_straight_through(
    x: Array, spec: QuantSpec, contracted: tuple[int, ...], key: Any, qparams: QParams | None = None
) -> tuple[Any, QArray, Array]:
    """`x` with the gradients of `fake_quant(x, spec, qparams)`, and `quantize(x, spec, qparams)`: of a contraction.

    And flags, to be added to the scale: NaN where the values along the contracted axes, of size 1 here, hold a NaN, so
    that the results which they enter are NaN; 0 elsewhere.
    """
    qmin, qmax = grid(spec, None, jnp.float32)
    noise = _noise(x, spec, key)
    together = lambda *arrays: (
        *num.vary_together(*arrays, qmin, qmax, *([] if noise is None else [noise])), *([None] if noise is None else [])
    )  # fmt: skip
    values = lax.stop_gradient(x)

    def quantized(scale, zero_point, finite):
        integers = _integers(values, scale, zero_point, qmin, qmax, noise, spec)
        return integers, scale, zero_point, _nan_flags(values, contracted, finite)

    # Quantized on both sides of the condition of the range, so that the integers stand alone: XLA:CPU would compute
    # them anew, from quotients kept in float32, where the backward pass reads them.
    if qparams is None:
        fitted = lambda x_min, x_max, finite: quantized(*to_qparams(x_min, x_max, spec, qmin, qmax), finite)
        integers, scale, zero_point, flags = range_of(values, spec, fitted)
        trained = scale, scale if zero_point is None else zero_point
    else:
        trained = scale, zero_point = _trained(qparams, qmin, qmax, spec)
        used = _on_grid(*lax.stop_gradient((scale, zero_point)), qmin, qmax, spec)
        integers, scale, zero_point, flags = if_finite(values, lambda finite: quantized(*used, finite))
    real = _straight_through(*together(x, *trained), spec, qparams is None)
    return real, _qarray(integers, scale, zero_point, spec, x.dtype), flags


def _trained(qparams: QParams, qmin: Any, qmax: Any, spec: QuantSpec) -> QParams:
    """The qparams as the gradient rule takes them.

    It gives the gradient of the zero point in units of -scale, which multiplies here, after shard_map has added the
    shards.
    """
    scale, zero_point = qparams
    if not spec.symmetric:
        zero_point = _scale_gradient(*num.vary_together(zero_point, _used_scale(scale, zero_point, qmin, qmax, spec)))
    return QParams(scale, zero_point)


def _nan_flags(values: Array, contracted: tuple[int, ...], finite: bool) -> Array:
    if finite and not num.is_explicit(values) and not num.varying_axes(values):
        shape = [1 if i in contracted else n for i, n in enumerate(values.shape)]
        return jnp.zeros(shape, jnp.float32)
    flags = jnp.sum(jnp.where(values == values, 0, jnp.nan), contracted, dtype=jnp.float32, keepdims=True)
    return jnp.zeros_like(flags) if finite else flags  # of the type that the other branch has


@functools.partial(jax.jit, static_argnames=("dtype", "guarded"))
def real_values(q: QArray, dtype: jnp.dtype, guarded: bool = True) -> Array:
    """`(values - zero_point) * scale`, computed in float32 (float64 for float64) and rounded once to `dtype`."""
    over = lambda v: broadcast_groups(v.astype(num.compute_dtype(dtype)), q.shape)
    scale, zero_point = over(q.scale), None if q.spec.symmetric else over(q.zero_point)
    values = num.affine_value(q.values.astype(scale.dtype), scale, zero_point, guarded)
    # Guarded once more: of integers, which are never NaN, LLVM knows that `|steps| * 0` is 0, and drops the sum.
    return num.downcast(num.guard(values) if guarded else values, dtype)


@jax.custom_vjp
def with_gradient_of(x: Array, value: Array) -> Array:
    """`value`, with its gradient passed to `x`: straight through what made it of `x`."""
    return value


# The op itself, not its body: else a second derivative would not see x.
with_gradient_of.defvjp(lambda x, value: (with_gradient_of(x, value), None), lambda _, g: (g, None))


def dequantize(q: QArray) -> Array:
    """Integers to real values: `(values - zero_point) * scale`.

    Args:
      q: QArray.

    Returns:
      An array of the shape of `q` and the dtype that was quantized.

    Gradient: with respect to the scale; none to integers.

    Raises:
      TypeError: for anything but a QArray.

    Source: ONNX DequantizeLinear.

    >>> import jax.numpy as jnp
    >>> from jaxquant import QParams, QuantSpec, dequantize, quantize
    >>> dequantize(quantize(jnp.array([0.26, -9.0]), QuantSpec(bits=4), QParams(0.5, 0.0))).tolist()
    [0.5, -3.5]
    """
    return real_values(checked_qarray("q", q), q.dtype)


def scale_gradient(x: Any, factor: Any) -> Array:
    """`x` itself, with its gradient multiplied: LSQ's 1 / sqrt(n * qmax) for a scale that n weights share.

    Args:
      x: floating array of any shape.
      factor: number or floating scalar, traced or not.

    Returns:
      `x`.

    Gradient: to x, `g * factor`; none to factor.

    Raises:
      TypeError: for an argument of another kind.
      ValueError: for a factor that is no scalar.

    Source: Esser et al., 2020, "Learned Step Size Quantization", section 2.2.

    >>> import jax
    >>> from jaxquant import scale_gradient
    >>> jax.grad(lambda s: scale_gradient(s, 0.25) * 2)(1.0).item()
    0.5
    """
    x = checks.float_array("x", x)
    factor, _ = checks.ends(("factor", ""), (checks.unwrapped(factor), 0.0), num.compute_dtype(x.dtype))
    checks.shape("factor", factor, (), "one for the array")
    return _scale_gradient(*num.vary_together(x, factor))
