# SPDX-License-Identifier: Apache-2.0
"""`fake_quant_with_min_max_*`: levels are unsigned, and `narrow_range` drops the lowest one."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from .._base import _checks as checks
from .._base import _numerics as num
from .._base._gradients import custom_vjp
from .._base._sharding import shard_like, vary_together
from .._platform._division import divide
from ._checks import ends, ignored_name, ordered
from ._nudge import Nudged, along_axis, masked_product, nudge, per_channel


class FakeQuantGradients(NamedTuple):
    """What the `*_gradient` functions of the ops with trained ranges return, in TensorFlow's order and names."""

    backprops_wrt_input: Array
    backprop_wrt_min: Array
    backprop_wrt_max: Array


def _levels(num_bits: int, narrow_range: bool) -> tuple[float, float]:
    num_bits = checks.static_int_between("num_bits", num_bits, 2, 16)
    return float(checks.static_bool("narrow_range", narrow_range)), 2.0**num_bits - 1


def _nudged(x: Array, x_min: Array, x_max: Array, qmin: float, qmax: float) -> tuple[Nudged, Array]:
    """The nudged range, broadcastable against `x`, and where there is none: min == max == 0 means "not set yet"."""
    x_min, x_max = lax.stop_gradient((x_min, x_max))
    axis = x.ndim - 1 if x_min.ndim else None
    nudged = per_channel(functools.partial(nudge, qmin=qmin, qmax=qmax), axis)(x_min, x_max)
    nudged = jax.tree.map(lambda v: along_axis(v, axis, x.ndim), nudged)
    return nudged, nudged.zero < 0


@functools.partial(jax.jit, static_argnames=("qmin", "qmax", "divides"))
def _fake_quant(x: Array, x_min: Array, x_max: Array, qmin: float, qmax: float, divides: bool) -> Array:
    nudged, unset = _nudged(x, x_min, x_max, qmin, qmax)
    shifted = num.clip(num.upcast(x, x_min.dtype), nudged.x_min, nudged.x_max) - nudged.x_min
    level = divide(shifted, nudged.scale) if divides else num.guard(shifted * nudged.inverse)
    y = num.round_half_up(level - nudged.zero) * nudged.scale
    return num.guard(jnp.where(unset, 0, y)).astype(x.dtype)


def _inside(g: Array, x: Array, nudged: Nudged, unset: Array) -> Array:
    return masked_product(g, (nudged.x_min <= x) & (x <= nudged.x_max) | unset)


@functools.partial(jax.jit, static_argnames=("qmin", "qmax"))
def _input_gradient(g: Array, x: Array, x_min: Array, x_max: Array, qmin: float, qmax: float) -> Array:
    nudged = _nudged(x, x_min, x_max, qmin, qmax)
    return _inside(g, num.upcast(x, x_min.dtype), *nudged).astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("qmin", "qmax"))
def _gradients(g: Array, x: Array, x_min: Array, x_max: Array, qmin: float, qmax: float) -> FakeQuantGradients:
    nudged, unset = _nudged(x, x_min, x_max, qmin, qmax)
    dtype, x = x.dtype, num.upcast(x, x_min.dtype)
    g = num.upcast(g, x.dtype)
    leading = tuple(range(x.ndim - x_min.ndim))

    def total(outside: Array) -> Array:
        sums = jnp.where(unset, 0, masked_product(g, outside)).sum(leading)
        # TensorFlow's sums start at +0, so a lone -0 gives +0. A plain `+ 0` XLA drops.
        return sums + jnp.where(sums == sums, 0, jnp.nan)

    dx = _inside(g, x, nudged, unset).astype(dtype)
    return FakeQuantGradients(dx, total(x < nudged.x_min), total(x > nudged.x_max))


def _args_bwd(qmin, qmax, residuals, g):
    return _input_gradient(g, *residuals, qmin, qmax), None, None


@functools.partial(custom_vjp, rule=_args_bwd, static=(3, 4))
def _args(x: Array, x_min: Array, x_max: Array, qmin: float, qmax: float) -> Array:
    return _fake_quant(x, x_min, x_max, qmin, qmax, divides=False)


def _vars_bwd(qmin, qmax, divides, residuals, g):
    return tuple(map(shard_like, _gradients(g, *residuals, qmin, qmax), residuals))


@functools.partial(custom_vjp, rule=_vars_bwd, static=(3, 4, 5))
def _vars(x: Array, x_min: Array, x_max: Array, qmin: float, qmax: float, divides: bool) -> Array:
    return _fake_quant(x, x_min, x_max, qmin, qmax, divides)


def _constant_range(x: Array, x_min: ArrayLike | None, x_max: ArrayLike | None) -> tuple[Array, Array, Array]:
    """The attributes `min` and `max` of the `args` ops, checked as TensorFlow checks them."""
    values = (
        -6.0 if x_min is None else checks.static_float("min", x_min, "fake_quant_with_min_max_vars"),
        6.0 if x_max is None else checks.static_float("max", x_max, "fake_quant_with_min_max_vars"),
    )
    dtype = num.compute_dtype(x.dtype)
    ordered(("min", "max"), values, dtype, np.less, "min < max")
    return vary_together(x, *ends(("min", "max"), values, dtype))


def _cotangent(gradients: ArrayLike, inputs: Array) -> Array:
    g = checks.float_array_in("gradients", gradients, num.compute_dtype(inputs.dtype))
    checks.shape("gradients", g, inputs.shape, "it is the cotangent of an output shaped like `inputs`")
    return g


def fake_quant_with_min_max_args(
    inputs: ArrayLike,
    min: float | None = -6.0,
    max: float | None = 6.0,
    num_bits: int = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> Array:
    """Quantizes and dequantizes real values with a constant range.

    With `(scale, x_min, x_max)` the range after nudging (below), and every operation rounded on its own,

        y = floor((clip(x, x_min, x_max) - x_min) * (1 / scale) - zero + 0.5) * scale

    The 2 ** num_bits levels start at `narrow_range`; the range is nudged so that real 0 is a level, and a range
    without 0 is shifted, not extended: [1, 2] becomes [0, 1]. Ties go up in real space. NaN stays NaN.

    Args:
      inputs: floating array of any shape, real values.
      min, max: static numbers, the ends of the real range; None means -6 and 6.
      num_bits: static int, 2 to 16.
      narrow_range: static bool; drops the lowest level, so that a symmetric range stays where it is. Use it for
        weights.
      name: ignored.

    Returns:
      An array of the shape and dtype of `inputs`.

    Gradient: with respect to `inputs`, `fake_quant_with_min_max_args_gradient`; `min` and `max` are constants.

    Raises:
      TypeError: for an argument of the wrong kind, an array or a traced value for `min` and `max` included.
      ValueError: for num_bits outside 2..16, or unless min < max (in the dtype of the computation, subnormals as 0).

    Source: TensorFlow 2.21, `tf.quantization.fake_quant_with_min_max_args`. Older pages speak of 255 steps and
    of the raw range in the gradient; TensorFlow has 2 ** num_bits - 1 steps and the nudged range.

    >>> import jax.numpy as jnp
    >>> from jaxquant import tf
    >>> tf.fake_quant_with_min_max_args(jnp.array([-9.0, 0.3, 4.0]), min=-1.0, max=2.0, num_bits=2).tolist()
    [-1.0, 0.0, 2.0]
    """
    ignored_name(name)
    x, (qmin, qmax) = checks.float_array("inputs", inputs), _levels(num_bits, narrow_range)
    return _args(*_constant_range(x, min, max), qmin, qmax)


def fake_quant_with_min_max_args_gradient(
    gradients: ArrayLike,
    inputs: ArrayLike,
    min: float | None = -6.0,
    max: float | None = 6.0,
    num_bits: int = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> Array:
    """The gradient of `fake_quant_with_min_max_args` to `inputs`: `gradients * (x_min <= inputs <= x_max)`.

    The bounds are the NUDGED ones and both inclusive. It is a product: a masked -1 gives -0, a masked NaN NaN.

    Args:
      gradients: floating array of the shape of `inputs`, the cotangent of the output; of no more precision than the
        computation.
      inputs, min, max, num_bits, narrow_range, name: as given to the op.

    Returns:
      An array of the shape and dtype of `inputs`.

    Gradient: linear in `gradients`; zero to `inputs`.

    Raises:
      TypeError, ValueError: as the op does; ValueError if the shapes of `gradients` and `inputs` differ.

    Source: TensorFlow 2.21, `tf.quantization.fake_quant_with_min_max_args_gradient`. Its page writes the raw range.

    >>> import jax.numpy as jnp
    >>> from jaxquant import tf
    >>> tf.fake_quant_with_min_max_args_gradient(jnp.ones(3), jnp.array([-9.0, 0.3, 2.0]), -1.0, 2.0, 2).tolist()
    [0.0, 1.0, 1.0]
    """
    ignored_name(name)
    x, (qmin, qmax) = checks.float_array("inputs", inputs), _levels(num_bits, narrow_range)
    return _input_gradient(_cotangent(gradients, x), *_constant_range(x, min, max), qmin, qmax)


def _scalar_range(x: Array, x_min: ArrayLike | None, x_max: ArrayLike | None) -> tuple[Array, Array, Array]:
    why = "one range for the tensor. For one a channel use fake_quant_with_min_max_vars_per_channel"
    return _range(x, x_min, x_max, (), why)


def _range(
    x: Array, x_min: ArrayLike | None, x_max: ArrayLike | None, shape: tuple[int, ...], why: str
) -> tuple[Array, Array, Array]:
    lo, hi = ends(("min", "max"), (x_min, x_max), num.compute_dtype(x.dtype))
    checks.shape("min", lo, shape, why)
    checks.shape("max", hi, shape, why)
    return vary_together(x, lo, hi)


def fake_quant_with_min_max_vars(
    inputs: ArrayLike,
    min: ArrayLike | None,
    max: ArrayLike | None,
    num_bits: int = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> Array:
    """Quantizes and dequantizes real values with a trained range.

    The formula is that of `fake_quant_with_min_max_args` with a division by `scale` in place of the product with its
    inverse, as in TensorFlow. On exact ties the two ops can differ by a level.

    Args:
      inputs: floating array of any shape, real values.
      min, max: numbers or floating scalars, traced or not: the ends of the real range. They are not checked. min == max
        == 0 (no range yet; subnormals are 0) gives 0 everywhere, NaN and infinite inputs included, and passes
        gradients. Other equal and non-finite ranges, and ranges with a subnormal step, give NaN. A reversed range gives
        what TensorFlow gives.
      num_bits: static int, 2 to 16.
      narrow_range: static bool; drops the lowest level, so that a symmetric range stays where it is. Use it for
        weights.
      name: ignored.

    Returns:
      An array of the shape and dtype of `inputs`.

    Gradient: `fake_quant_with_min_max_vars_gradient`, with respect to `inputs`, `min` and `max`.

    Raises:
      TypeError: for an argument of the wrong kind, or a range of higher precision than the computation.
      ValueError: for num_bits outside 2..16, or a range that is not a scalar.

    Source: TensorFlow 2.21, `tf.quantization.fake_quant_with_min_max_vars`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import tf
    >>> loss = lambda hi: tf.fake_quant_with_min_max_vars(jnp.array([-9.0, 0.3, 4.0]), -1.0, hi, num_bits=2).sum()
    >>> loss(2.0).item(), jax.grad(loss)(2.0).item()
    (1.0, 1.0)
    """
    ignored_name(name)
    x, (qmin, qmax) = checks.float_array("inputs", inputs), _levels(num_bits, narrow_range)
    return _vars(*_scalar_range(x, min, max), qmin, qmax, True)


def fake_quant_with_min_max_vars_gradient(
    gradients: ArrayLike,
    inputs: ArrayLike,
    min: ArrayLike | None,
    max: ArrayLike | None,
    num_bits: int = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> FakeQuantGradients:
    """The gradients of `fake_quant_with_min_max_vars`.

        d_inputs = gradients * (x_min <= inputs <= x_max)
        d_min = sum(gradients * (inputs < x_min))
        d_max = sum(gradients * (inputs > x_max))

    with the NUDGED range. They are products, so a NaN in `gradients` reaches both sums wherever it is. A NaN in
    `inputs` is in no mask. An unset range, min == max == 0, gives `gradients`, 0, 0.

    Args:
      gradients: floating array of the shape of `inputs`, the cotangent of the output; of no more precision than the
        computation.
      inputs, min, max, num_bits, narrow_range, name: as given to the op.

    Returns:
      `(backprops_wrt_input, backprop_wrt_min, backprop_wrt_max)`: one of the shape and dtype of `inputs`, and two
      scalars in the dtype of the computation. Inside `shard_map` the sums are over the shard.

    Gradient: linear in `gradients`; zero to the others.

    Raises:
      TypeError, ValueError: as the op does; ValueError if the shapes of `gradients` and `inputs` differ.

    Source: TensorFlow 2.21, `tf.quantization.fake_quant_with_min_max_vars_gradient`. Its page writes the raw range.

    >>> import jax.numpy as jnp
    >>> from jaxquant import tf
    >>> got = tf.fake_quant_with_min_max_vars_gradient(jnp.ones(3), jnp.array([-9.0, 0.3, 4.0]), -1.0, 2.0, 2)
    >>> [v.tolist() for v in got]
    [[0.0, 1.0, 0.0], 1.0, 1.0]
    """
    ignored_name(name)
    x, (qmin, qmax) = checks.float_array("inputs", inputs), _levels(num_bits, narrow_range)
    return _gradients(_cotangent(gradients, x), *_scalar_range(x, min, max), qmin, qmax)


def _channel_ranges(x: Array, x_min: ArrayLike | None, x_max: ArrayLike | None) -> tuple[Array, Array, Array]:
    if x.ndim == 0:
        raise ValueError(
            "`inputs` must have rank >= 1, its last axis the channels, got shape (). "
            "For a scalar use fake_quant_with_min_max_vars."
        )
    why = f"one range for each channel of `inputs`, whose shape is {x.shape}"
    return _range(x, x_min, x_max, x.shape[-1:], why)


def fake_quant_with_min_max_vars_per_channel(
    inputs: ArrayLike,
    min: ArrayLike | None,
    max: ArrayLike | None,
    num_bits: int = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> Array:
    """Quantizes and dequantizes real values with one trained range for each channel.

    The formula of `fake_quant_with_min_max_args` for each channel: a product with the inverse scale, where
    `fake_quant_with_min_max_vars` divides. The bits equal a loop of that formula over the channels.

    Args:
      inputs: floating array of shape (..., channels), rank 1 or more, real values.
      min, max: floating arrays of shape (channels,), traced or not: the ends of the real ranges, unchecked as in
        `fake_quant_with_min_max_vars`.
      num_bits: static int, 2 to 16.
      narrow_range: static bool; drops the lowest level, so that a symmetric range stays where it is. Use it for
        weights.
      name: ignored.

    Returns:
      An array of the shape and dtype of `inputs`.

    Gradient: `fake_quant_with_min_max_vars_per_channel_gradient`, with respect to `inputs`, `min` and `max`.

    Raises:
      TypeError: for an argument of the wrong kind, or a range of higher precision than the computation.
      ValueError: for num_bits outside 2..16, a scalar `inputs`, or ranges of another shape than (channels,).

    Source: TensorFlow 2.21, `tf.quantization.fake_quant_with_min_max_vars_per_channel`. Its page allows rank 1, 2
    and 4; its kernel and this op take any rank from 1.

    >>> import jax.numpy as jnp
    >>> from jaxquant import tf
    >>> x, top = jnp.array([[0.3, 3.0], [9.0, 9.0]]), jnp.array([1.0, 6.0])
    >>> tf.fake_quant_with_min_max_vars_per_channel(x, -top, top, num_bits=2, narrow_range=True).tolist()
    [[0.0, 6.0], [1.0, 6.0]]
    """
    ignored_name(name)
    x, (qmin, qmax) = checks.float_array("inputs", inputs), _levels(num_bits, narrow_range)
    return _vars(*_channel_ranges(x, min, max), qmin, qmax, False)


def fake_quant_with_min_max_vars_per_channel_gradient(
    gradients: ArrayLike,
    inputs: ArrayLike,
    min: ArrayLike | None,
    max: ArrayLike | None,
    num_bits: int = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> FakeQuantGradients:
    """The gradients of `fake_quant_with_min_max_vars_per_channel`.

    As `fake_quant_with_min_max_vars_gradient` for each channel, with sums over all axes but the last.

    Args:
      gradients: floating array of the shape of `inputs`, the cotangent of the output; of no more precision than the
        computation.
      inputs, min, max, num_bits, narrow_range, name: as given to the op.

    Returns:
      `(backprops_wrt_input, backprop_wrt_min, backprop_wrt_max)`: one of the shape and dtype of `inputs`, and two
      of shape (channels,) in the dtype of the computation. Inside `shard_map` the sums are over the shard.

    Gradient: linear in `gradients`; zero to the others.

    Raises:
      TypeError, ValueError: as the op does; ValueError if the shapes of `gradients` and `inputs` differ.

    Source: TensorFlow 2.21, `tf.quantization.fake_quant_with_min_max_vars_per_channel_gradient`.

    >>> import jax.numpy as jnp
    >>> from jaxquant import tf
    >>> x, top = jnp.array([[0.3, 3.0], [9.0, 9.0]]), jnp.array([1.0, 6.0])
    >>> got = tf.fake_quant_with_min_max_vars_per_channel_gradient(jnp.ones((2, 2)), x, -top, top)
    >>> got.backprop_wrt_max.tolist()
    [1.0, 1.0]
    """
    ignored_name(name)
    x, (qmin, qmax) = checks.float_array("inputs", inputs), _levels(num_bits, narrow_range)
    return _gradients(_cotangent(gradients, x), *_channel_ranges(x, min, max), qmin, qmax)
