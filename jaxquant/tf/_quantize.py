# SPDX-License-Identifier: Apache-2.0
"""`quantize` to integers and `dequantize` back, in TensorFlow's three modes."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from .._arrays._pack import integer_array
from .._base import _checks as checks
from .._base import _numerics as num
from .._platform._division import divide
from ._checks import ends, ignored_name, optional_axis, ordered, shape_of_range
from ._nudge import along_axis, divide_number, largest_scale, per_channel

_NAMES = ("int8", "uint8", "int16", "uint16", "int32")
_DTYPES = {prefix + name: np.dtype(name) for prefix in ("", "q") for name in _NAMES}
_MODES = ("MIN_COMBINED", "MIN_FIRST", "SCALED")
_ROUND = {"HALF_AWAY_FROM_ZERO": num.round_half_away, "HALF_TO_EVEN": num.round_half_even}


class QuantizeOutput(NamedTuple):
    """The codes, and the real range that they span: to be handed to `dequantize`."""

    output: Array
    output_min: Array
    output_max: Array


class _Coding(NamedTuple):
    """The static part of how codes stand for real values."""

    dtype: np.dtype
    mode: str
    narrow_range: bool
    axis: int | None

    @property
    def lowest(self) -> float:
        return float(np.iinfo(self.dtype).min)

    @property
    def highest(self) -> float:
        return float(np.iinfo(self.dtype).max)


def _wide_quotient(a: float, b: Array) -> Array:
    """`a / b` in double precision, rounded once to the dtype of `b`.

    Up to 16 bits the one division in float32 has the same bits. `a` of 32 bits does not fit a float32: without x64
    the quotient is then right to 2e-7.
    """
    wide = jax.dtypes.canonicalize_dtype(jnp.float64)
    return num.guard(divide_number(a, b.astype(wide)).astype(b.dtype))


class _Adjusted(NamedTuple):
    """The range that is reported, and what takes its values to codes."""

    low: Array
    high: Array
    scale: Array
    offset: Array  # of the codes; MIN_FIRST only


def _larger(a: Array | float, b: Array) -> Array:
    # A select, here and in `_widen`, because C++'s std::min and std::max drop a NaN.
    return jnp.where(a < b, b, a)


def _widen(x_min: Array, x_max: Array, ensure_minimum_range: float) -> tuple[Array, Array]:
    """Makes the range contain 0 and be no narrower than the given part of its largest magnitude, or of 1."""
    low = jnp.where(x_min < 0, x_min, 0)
    largest = _larger(_larger(jnp.ones_like(x_min), jnp.abs(x_min)), jnp.abs(x_max))
    margin = num.guard(largest * ensure_minimum_range)
    return low, _larger(jnp.zeros_like(x_max), _larger(x_max, low + margin))


def _adjust(x_min: Array, x_max: Array, coding: _Coding, ensure_minimum_range: float) -> _Adjusted:
    x_min, x_max = lax.optimization_barrier((x_min, x_max))  # see _nudge.nudge
    low, high = _widen(x_min, x_max, ensure_minimum_range)
    if coding.mode == "SCALED":
        qmin = coding.lowest + coding.narrow_range
        scale, _ = largest_scale(low, high, qmin, coding.highest)
        return _Adjusted(divide_number(qmin, scale), divide_number(coding.highest, scale), scale, jnp.zeros_like(scale))
    scale = _wide_quotient(coding.highest - coding.lowest, high - low)
    if coding.mode == "MIN_COMBINED":
        return _Adjusted(low, high, scale, jnp.zeros_like(scale))
    scale = jnp.where(low == high, 0, scale)
    return _Adjusted(low, high, scale, num.round_half_away(low * scale) - coding.lowest)


@functools.partial(jax.jit, static_argnames=("coding", "round_mode", "ensure_minimum_range"))
def _quantize(
    x: Array, x_min: Array, x_max: Array, coding: _Coding, round_mode: str, ensure_minimum_range: float
) -> QuantizeOutput:
    x, lowest, highest = num.upcast(x, x_min.dtype), coding.lowest, coding.highest
    adjust = functools.partial(_adjust, coding=coding, ensure_minimum_range=ensure_minimum_range)
    adjusted = per_channel(adjust, coding.axis)(x_min, x_max)
    low, high, scale, offset = (along_axis(v, coding.axis, x.ndim) for v in adjusted)
    if coding.mode == "MIN_COMBINED":
        level = num.guard((num.clip(x, low, high) - low) * scale)
        codes = num.round_half_away(level + lowest) if lowest < 0 else num.round_half_up(level)
    elif coding.mode == "MIN_FIRST":
        # TensorFlow's kernel ends at the largest float32 below 2 ** 31.
        codes = num.round_half_away(x * scale) - offset
        codes = num.clip(codes, jnp.asarray(lowest, x.dtype), jnp.asarray(min(highest, 2.0**31 - 128), x.dtype))
    else:
        codes = _ROUND[round_mode](num.clip(x, low, high) * scale)
    codes = jnp.where(codes == codes, codes, lowest)
    return QuantizeOutput(codes.astype(coding.dtype), adjusted.low, adjusted.high)


def _min_combined(q: Array, x_min: Array, x_max: Array, coding: _Coding) -> Array:
    scale = divide(x_max - x_min, float(np.float32(coding.highest) - np.float32(coding.lowest)))
    return num.guard((q - coding.lowest) * scale) + x_min


def _min_first(q: Array, x_min: Array, x_max: Array, coding: _Coding) -> Array:
    wide = jax.dtypes.canonicalize_dtype(jnp.float64)
    scale = divide((x_max - x_min).astype(wide), coding.highest - coding.lowest).astype(x_min.dtype)
    rounded = num.guard(num.round_half_away(divide(x_min, scale)) * scale)
    rounded = jnp.where(x_max == x_min, x_min, rounded)
    return (rounded - num.guard(coding.lowest * scale)) + num.guard(q * scale)


def _scaled(q: Array, x_min: Array, x_max: Array, coding: _Coding) -> Array:
    scale = divide(x_max, coding.highest)
    if coding.lowest < 0:
        scale = _larger(divide(x_min, coding.lowest + coding.narrow_range), scale)
    return num.guard(q * scale)


_DEQUANTIZE = {"MIN_COMBINED": _min_combined, "MIN_FIRST": _min_first, "SCALED": _scaled}


@functools.partial(jax.jit, static_argnames=("coding", "dtype"))
def _dequantize(q: Array, x_min: Array, x_max: Array, coding: _Coding, dtype: np.dtype) -> Array:
    x_min, x_max = (along_axis(v, coding.axis, q.ndim) for v in lax.optimization_barrier((x_min, x_max)))
    return _DEQUANTIZE[coding.mode](q.astype(x_min.dtype), x_min, x_max, coding).astype(dtype)


_RANGE = ("min_range", "max_range")


def _range(values: tuple[Any, Any], dtype: np.dtype, x: Array, axis: int | None) -> tuple[Array, Array]:
    """The range: one value an end, of rank 0 or 1, or one for each slice along `axis`."""
    low, high = ends(_RANGE, values, dtype)
    if axis is None:
        low, high = (v.reshape(()) if v.shape == (1,) else v for v in (low, high))
    for end, v in zip(_RANGE, (low, high), strict=True):
        checks.shape(end, v, *shape_of_range(x.shape, axis))
    return lax.stop_gradient((low, high))


def quantize(
    input: ArrayLike,
    min_range: ArrayLike,
    max_range: ArrayLike,
    T: DTypeLike,
    mode: str = "MIN_COMBINED",
    round_mode: str = "HALF_AWAY_FROM_ZERO",
    name: str | None = None,
    *,
    narrow_range: bool = False,
    axis: int | None = None,
    ensure_minimum_range: float = 0.01,
) -> QuantizeOutput:
    """Quantizes real values to integers, and says which real range the integers span.

    The range is widened first: it always contains 0, and is no narrower than `ensure_minimum_range` times the largest
    of 1, |min_range| and |max_range|. With `lowest` and `highest` the ends of `T` and [low, high] the widened range:

        MIN_COMBINED  scale = (highest - lowest) / (high - low); (clip(input) - low) * scale, moved down by half the
                      codes if T is signed; rounded half up if T is unsigned and half away from 0 if it is signed
        MIN_FIRST     scale likewise; round(input * scale) - (round(low * scale) - lowest), clipped to T
        SCALED        scale = min((lowest + narrow_range) / low, highest / high); round(clip(input) * scale), so that
                      0 maps to 0; the range is adjusted to [(lowest + narrow_range) / scale, highest / scale]

    Args:
      input: floating array of any shape, real values.
      min_range, max_range: numbers or floating arrays, traced or not: the ends of the real range. Of one element, or
        of shape (input.shape[axis],) with an `axis`.
      T: static; the dtype of the codes: int8, uint8, int16, uint16 or int32, as a dtype, or a name with or without
        TensorFlow's "q" ("qint8"), or TensorFlow's own dtype.
      mode: static, "MIN_COMBINED", "MIN_FIRST" or "SCALED".
      round_mode: static, "HALF_AWAY_FROM_ZERO", or "HALF_TO_EVEN" in SCALED mode only.
      name: ignored.
      narrow_range: static bool; in SCALED mode drops the lowest code. With an unsigned T 0 then maps to code 1, which
        is not 0 again after `dequantize`: TensorFlow's result.
      axis: static int or None, the axis along which each slice has its own range. Negatives count from the end.
      ensure_minimum_range: static number, finite and not negative.

    Returns:
      `(output, output_min, output_max)`: the codes in dtype T with the shape of `input`, and the real range that they
      span, scalars or of shape (input.shape[axis],), in the dtype of the computation.

    Gradient: zero with respect to everything, as in TensorFlow. To train through quantization use a fake-quant op.

    Raises:
      TypeError: for an argument of the wrong kind, or a range of higher precision than the computation.
      ValueError: for T, mode, round_mode, axis, ensure_minimum_range or a shape that does not fit; and for max_range <
        min_range, if they are concrete. A traced range is not checked.

    Source: TensorFlow 2.21, `tf.quantization.quantize`, without oneDNN. What differs from it:

    - int32 saturates where TensorFlow's cast wraps: the top of the range is 2 ** 31 - 1 here and -2 ** 31 there.
    - NaN gives the lowest code; TensorFlow leaves it undefined.
    - MIN_FIRST takes an `axis`, which TensorFlow's does not. An axis of size 1 gives ranges of shape (1,), not ().
    - int32 scales are right to 2e-7 without x64, and exact with it.

    The r1.4 page of `quantize_v2` differs from both:

    - It has no `narrow_range`: its SCALED mode always elides the lowest code, which is narrow_range=True for a signed
      T, and uses max(|min|, |max|) for both ends.
    - It subtracts half the codes only for qint8, where every signed T needs it, and its text casts where the kernels
      round. It does not say that the range is made to contain 0.
    - It says that MIN_COMBINED drifts when repeated, and MIN_FIRST not. In 2.21 MIN_COMBINED moves once and stays;
      MIN_FIRST moves a step each time on symmetric ranges where `quantize` rounds low * scale and `dequantize` rounds
      low / step to different sides of a tie, as on [-1, 1].
    - Its sixth positional argument is `name`; `quantize_v2` here is `quantize`, whose sixth is `round_mode`.

    >>> import jax.numpy as jnp
    >>> from jaxquant import tf
    >>> q = tf.quantize(jnp.array([0.0, 3.0, 6.0, 9.0]), 0.0, 6.0, "quint8")
    >>> q.output.tolist(), q.output_min.item(), q.output_max.item()
    ([0, 128, 255, 255], 0.0, 6.0)
    """
    ignored_name(name)
    x = checks.float_array("input", input)
    dtype = _DTYPES[checks.one_of("T", _name_of(T), tuple(_DTYPES))]
    mode = checks.one_of("mode", mode, _MODES)
    round_mode = checks.one_of("round_mode", round_mode, tuple(_ROUND))
    if round_mode == "HALF_TO_EVEN" and mode != "SCALED":
        raise ValueError(
            f"`round_mode` 'HALF_TO_EVEN' exists in SCALED mode only, got `mode` {mode!r}. Leave it at "
            "'HALF_AWAY_FROM_ZERO', or use mode='SCALED'."
        )
    narrow_range = checks.static_bool("narrow_range", narrow_range)
    axis = optional_axis("axis", axis, x.ndim)
    minimum = checks.static_float("ensure_minimum_range", ensure_minimum_range, "a Python number")
    if not 0 <= minimum < np.inf:
        raise ValueError(
            f"`ensure_minimum_range` must be finite and not negative, got {minimum}. TensorFlow's is 0.01."
        )
    wide = num.compute_dtype(x.dtype)
    low, high = _range((min_range, max_range), wide, x, axis)
    not_greater = lambda low, high: ~(high < low)  # a NaN passes, as it does in TensorFlow
    ordered(_RANGE, (min_range, max_range), wide, not_greater, "min_range <= max_range")
    coding = _Coding(dtype, mode, narrow_range, axis)
    return _quantize(lax.stop_gradient(x), low, high, coding, round_mode, float(np.asarray(minimum).astype(wide)))


def _name_of(T: DTypeLike) -> Any:
    """The name of a dtype, however it is given; what is none comes back as it is."""
    if T is None or isinstance(T, str | Array | np.ndarray | np.generic):
        return T
    try:
        return np.dtype(T).name
    except TypeError:
        return getattr(T, "name", T)


quantize_v2 = quantize


def dequantize(
    input: ArrayLike,
    min_range: ArrayLike,
    max_range: ArrayLike,
    mode: str = "MIN_COMBINED",
    name: str | None = None,
    *,
    axis: int | None = None,
    narrow_range: bool = False,
    dtype: DTypeLike = jnp.float32,
) -> Array:
    """Real values of the integers that `quantize` made, given the range that it reported.

    With `lowest` and `highest` the ends of the integer dtype:

        MIN_COMBINED  scale = (max_range - min_range) / (highest - lowest); (input - lowest) * scale + min_range
        MIN_FIRST     the same scale, and min_range rounded to a multiple of it
        SCALED        scale = max(min_range / (lowest + narrow_range), max_range / highest), for an unsigned input
                      max_range / highest; input * scale

    Args:
      input: array of dtype int8, uint8, int16, uint16 or int32, any shape: codes.
      min_range, max_range: numbers or floating arrays, traced or not: the real range, as reported by `quantize`. Of
        one element, or of shape (input.shape[axis],) with an `axis`. Not checked.
      mode: static, "MIN_COMBINED", "MIN_FIRST" or "SCALED".
      name: ignored.
      axis: static int or None, the axis along which each slice has its own range. Negatives count from the end.
      narrow_range: static bool; in SCALED mode, as given to `quantize`. No effect on an unsigned input.
      dtype: static; float32 or bfloat16. Computed in float32, or in float64 for a float64 range, and cast once.

    Returns:
      An array of the shape of `input` in `dtype`.

    Gradient: zero with respect to the range, as in TensorFlow.

    Raises:
      TypeError: for an argument of the wrong kind.
      ValueError: for dtype, mode, axis or a shape that does not fit.

    Source: TensorFlow 2.21, `tf.quantization.dequantize`, without oneDNN. TensorFlow has bfloat16 only in MIN_COMBINED
    mode, and MIN_FIRST only without an axis. For int32 in SCALED mode without an axis it gives the code 2 ** 31 - 1 the
    wrong sign; here it has the right one.

    >>> import jax.numpy as jnp
    >>> from jaxquant import tf
    >>> tf.dequantize(jnp.array([0, 128, 255], jnp.uint8), 0.0, 6.0).tolist()
    [0.0, 3.0117647647857666, 6.0]
    """
    ignored_name(name)
    q = integer_array("input", input, _NAMES)
    mode = checks.one_of("mode", mode, _MODES)
    narrow_range = checks.static_bool("narrow_range", narrow_range)
    axis = optional_axis("axis", axis, q.ndim)
    out = np.dtype(checks.one_of("dtype", _name_of(dtype), ("float32", "bfloat16")))
    is_double = jnp.float64 in (getattr(checks.unwrapped(v), "dtype", None) for v in (min_range, max_range))
    wide = jax.dtypes.canonicalize_dtype(jnp.float64 if is_double else jnp.float32)
    low, high = _range((min_range, max_range), wide, q, axis)
    return _dequantize(q, low, high, _Coding(q.dtype, mode, narrow_range, axis), out)
