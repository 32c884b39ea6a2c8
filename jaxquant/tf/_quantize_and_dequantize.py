# SPDX-License-Identifier: Apache-2.0
"""`quantize_and_dequantize*`: a scale and no zero point, so that 0 maps to 0."""

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
from ._checks import ends, ignored_name, optional_axis, ordered, shape_of_range
from ._nudge import along_axis, largest_scale, masked_product, per_channel


class _Options(NamedTuple):
    qmin: float
    qmax: float
    range_given: bool
    round_mode: str
    axis: int | None


class _Adjusted(NamedTuple):
    scale: Array
    inverse: Array
    x_min: Array
    x_max: Array


def _adjust(x_min: Array, x_max: Array, qmin: float, qmax: float) -> _Adjusted:
    """The largest scale that maps the range of one tensor into the levels, and the range that it then represents."""
    x_min, x_max = lax.optimization_barrier((x_min, x_max))  # see _nudge.nudge
    scale, by_min = largest_scale(x_min, x_max, qmin, qmax)
    inverse = jnp.where(by_min, divide(x_min, qmin), divide(x_max, qmax))
    return _Adjusted(scale, inverse, jnp.where(by_min, x_min, qmin * inverse), jnp.where(by_min, qmax * inverse, x_max))


@functools.partial(jax.jit, static_argnames="options")
def _round_trip(x: Array, x_min: Array, x_max: Array, options: _Options) -> Array:
    qmin, qmax, range_given, round_mode, axis = options
    dtype, x = x.dtype, num.upcast(x, x_min.dtype)
    if not range_given:
        # NaN is left out of the range, so that it spoils no other element.
        others = tuple(i for i in range(x.ndim) if i != axis)
        x_min = jnp.min(jnp.where(x == x, x, jnp.inf), others, initial=jnp.inf)
        x_max = jnp.max(jnp.where(x == x, x, -jnp.inf), others, initial=-jnp.inf)
    adjusted = per_channel(functools.partial(_adjust, qmin=qmin, qmax=qmax), axis)(x_min, x_max)
    adjusted = jax.tree.map(lambda v: along_axis(v, axis, x.ndim), adjusted)
    clipped = num.clip(x, adjusted.x_min, adjusted.x_max) if range_given else x
    level = _ROUND[round_mode](num.guard(clipped * adjusted.scale))
    return num.guard(level * adjusted.inverse).astype(dtype)


_ROUND = {"HALF_TO_EVEN": num.round_half_even, "HALF_UP": num.round_half_up}


@functools.partial(jax.jit, static_argnames="axis")
def _gradient(g: Array, x: Array, x_min: Array, x_max: Array, axis: int | None) -> Array:
    x_min, x_max = (along_axis(v, axis, x.ndim) for v in (x_min, x_max))
    x = num.upcast(x, x_min.dtype)
    return masked_product(g, (x_min <= x) & (x <= x_max))


def _op_bwd(options, bounded, residuals, g):
    dx = _gradient(g, *residuals, options.axis) if bounded else g
    return shard_like(dx, residuals[0]), None, None


@functools.partial(custom_vjp, rule=_op_bwd, static=(3, 4))
def _op(x: Array, x_min: Array, x_max: Array, options: _Options, bounded: bool) -> Array:
    return _round_trip(x, x_min, x_max, options)


def _levels(signed: bool, num_bits: int, narrow: bool) -> tuple[float, float]:
    signed, narrow = checks.static_bool("signed_input", signed), checks.static_bool("narrow_range", narrow)
    num_bits = checks.static_int_between("num_bits", num_bits, 1, 61 if signed else 62)
    return (float(narrow - 2 ** (num_bits - 1)), 2.0 ** (num_bits - 1) - 1) if signed else (0.0, 2.0**num_bits - 1)


def _options(ndim: int, levels: tuple[float, float], range_given: bool, round_mode: str, axis: int | None) -> _Options:
    range_given = checks.static_bool("range_given", range_given)
    round_mode = checks.one_of("round_mode", round_mode, tuple(_ROUND))
    return _Options(*levels, range_given, round_mode, optional_axis("axis", axis, ndim))


def _with_range(x: Array, x_min: ArrayLike, x_max: ArrayLike, options: _Options) -> tuple[Array, Array, Array]:
    dtype, names = num.compute_dtype(x.dtype), ("input_min", "input_max")
    lo, hi = ends(names, (x_min, x_max), dtype)
    for end, v in zip(names, (lo, hi), strict=True):
        if options.range_given or v.ndim:
            checks.shape(end, v, *shape_of_range(x.shape, options.axis))
    if options.range_given:
        ordered(names, (x_min, x_max), dtype, np.less_equal, "input_min <= input_max")
    return vary_together(x, lo, hi)


def quantize_and_dequantize(
    input: ArrayLike,
    input_min: ArrayLike,
    input_max: ArrayLike,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: str = "HALF_TO_EVEN",
    name: str | None = None,
    *,
    narrow_range: bool = False,
    axis: int | None = None,
) -> Array:
    """Quantizes and dequantizes real values by a scale alone, with a gradient that passes through.

    The values of `quantize_and_dequantize_v2`.

    Args:
      input: floating array of any shape, real values.
      input_min, input_max, signed_input, num_bits, range_given, round_mode, name, narrow_range, axis: as there;
        without `range_given` the range is checked for its shape and not used.

    Returns:
      An array of the shape and dtype of `input`.

    Gradient: with respect to `input` the incoming gradient, everywhere; none for the range.

    Raises:
      TypeError, ValueError: as `quantize_and_dequantize_v2` does.

    Source: TensorFlow 2.21, `tf.quantization.quantize_and_dequantize` (the raw ops V2 and V3; the raw V1 op no
    longer exists).

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import tf
    >>> jax.grad(lambda x: tf.quantize_and_dequantize(x, -10.0, 5.0, range_given=True))(20.0).item()
    1.0
    """
    ignored_name(name)
    x, levels = checks.float_array("input", input), _levels(signed_input, num_bits, narrow_range)
    options = _options(x.ndim, levels, range_given, round_mode, axis)
    return _op(*_with_range(x, input_min, input_max, options), options, bounded=False)


def quantize_and_dequantize_v2(
    input: ArrayLike,
    input_min: ArrayLike,
    input_max: ArrayLike,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: str = "HALF_TO_EVEN",
    name: str | None = None,
    *,
    narrow_range: bool = False,
    axis: int | None = None,
) -> Array:
    """Quantizes and dequantizes real values by a scale alone, with no gradient outside the given range.

    The levels are [-2 ** (num_bits - 1) + narrow_range, 2 ** (num_bits - 1) - 1], or [0, 2 ** num_bits - 1] if not
    `signed_input`. The scale is the largest that maps the range into them; it fixes one end of the range and the
    other is adjusted: [-10, 5] in 8 signed bits has scale 12.8 and becomes [-10, 9.921875]. Then

        y = round(clip(input, adjusted range) * scale) * (1 / scale)

    so that 0 maps to 0. Without `range_given` the range is the range of `input` and nothing is clipped.

    Args:
      input: floating array of any shape, real values.
      input_min, input_max: numbers or floating arrays, traced or not: the ends of the real range. Scalars, or of
        shape (input.shape[axis],) with an `axis`. Without `range_given` they only bound the gradient.
      signed_input: static bool, whether the LEVELS are signed.
      num_bits: static int, 1 to 61, or 62 if not `signed_input`.
      range_given: static bool, whether to use the given range or the range of `input`, NaN left out.
      round_mode: static, "HALF_TO_EVEN" or "HALF_UP": floor(v + 0.5), so 7.5 gives 8 and -7.5 gives -7.
      name: ignored.
      narrow_range: static bool; drops the lowest signed level, and does nothing if not `signed_input`.
      axis: static int or None, the axis along which each slice has its own range. None means none and negatives
        count from the end; the raw TensorFlow op writes -1 for none.

    Returns:
      An array of the shape and dtype of `input`.

    Gradient: with respect to `input`, `g * (input_min <= input <= input_max)` with the range AS PASSED, not as
    adjusted, also if `range_given` is False: there, passing 0 and 0 stops nearly all of it. None for the range. For a
    gradient that passes everywhere use `quantize_and_dequantize`, or `grad_pass_through` around this op.

    Raises:
      TypeError: for an argument of the wrong kind, or a range of higher precision than the computation.
      ValueError: for num_bits, axis, round_mode or a shape that does not fit; and for a given range with
        input_min > input_max or NaN, if it is concrete. A traced range is not checked.

    Source: TensorFlow 2.21, `tf.quantization.quantize_and_dequantize_v2` (the raw op V4). TensorFlow's kernel fails
    for an `axis` with a given range; here each slice gives what the op gives for it alone. Its pages write a
    division by the scale, a clip always, and an example with input_min=5.0 and input_max=-10.0, which raises.

    >>> import jax.numpy as jnp
    >>> from jaxquant import tf
    >>> tf.quantize_and_dequantize_v2(jnp.array([-10.04, 7.5, 20.0]), -10.0, 5.0, range_given=True).tolist()
    [-10.0, 7.5, 9.921875]
    """
    ignored_name(name)
    x, levels = checks.float_array("input", input), _levels(signed_input, num_bits, narrow_range)
    options = _options(x.ndim, levels, range_given, round_mode, axis)
    return _op(*_with_range(x, input_min, input_max, options), options, bounded=True)
