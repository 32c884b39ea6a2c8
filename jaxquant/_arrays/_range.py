# SPDX-License-Identifier: Apache-2.0
"""The range of data, and the scale and zero point of a range."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from .._base import _checks as checks
from .._base import _numerics as num
from .._base._checks import PyTree
from .._base._sharding import replicated
from .._platform._cpu import extremes, unknown
from .._platform._division import divide
from .._spec._scale_formats import quotient
from .._spec._spec import QuantSpec, checked_spec, qparams_shape
from ._grid import Frame, Grid, frame_of
from ._qparams import QParams

LARGEST = np.float32(jnp.finfo(jnp.float32).max) / 2  # so that the width of a range is finite too
_ZERO = np.float32(0)


class Range(NamedTuple):
    """The ends of real ranges, float32, in the shape of the scale: scalars per tensor.

    `Range(inf, -inf)` is the empty range, the neutral element of `merge`.
    """

    x_min: Any
    x_max: Any

    def checked(self, other: "Range") -> tuple["Range", "Range"]:
        """Both in float32; raises for different shapes."""
        real = lambda name, v: checks.real(name, v, jnp.dtype(jnp.float32))
        a, b = (Range(real("x_min", r.x_min), real("x_max", r.x_max)) for r in (self, other))
        for name, of_a, of_b in zip(self._fields, a, b, strict=True):
            checks.shape(f"{name} of b", of_b, of_a.shape, "the shape in `a`")
        return a, b

    def merged(self, other: "Range") -> "Range":
        """The smallest range that contains both."""
        return _widest(*self.checked(other))


@jax.jit
def _widest(a: Range, b: Range) -> Range:
    return Range(jnp.minimum(a.x_min, b.x_min), jnp.maximum(a.x_max, b.x_max))


# So that an exported program can take and return it.
jax.export.register_namedtuple_serialization(Range, serialized_name="jaxquant.Range")


def no_nonfinite(x: Array, nonfinite: str) -> None:
    """Raises for what a range cannot take into account, where that was asked for."""
    checks.one_of("nonfinite", nonfinite, ("ignore", "raise"))
    if nonfinite == "ignore":
        return
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            '`nonfinite="raise"` needs the values of `x`, got a traced array. Call it outside of jit, or let '
            '"ignore" leave NaN and infinities out of the range.'
        )
    values = np.asarray(x.astype(num.compute_dtype(x.dtype)))
    if not np.isfinite(values).all():
        raise ValueError(
            f"`x` must be finite, got {int(np.isnan(values).sum())} NaN and {int(np.isinf(values).sum())} infinite of "
            f'{values.size} values. Fix what made them, or pass nonfinite="ignore" to leave them out.'
        )


def finite_or(x: Array, otherwise: float) -> Array:
    """`x`, or `otherwise` where it is NaN or infinite."""
    return num.select(jnp.abs(x) < jnp.inf, x, otherwise)


def range_of(
    x: Array, spec: QuantSpec, nothing: float | None = None, contracted: Sequence[int] | None = None
) -> tuple[Array | None, Array, Array | None]:
    """The lowest and the highest of the finite values of each group, in float32, and NaN flags, as `extremes` has them.

    Of a signed symmetric spec the highest is the largest absolute value, and there is no lowest.
    """
    of_magnitude = spec.is_of_magnitude
    nothing = (np.inf if spec.has_minimum else 0) if nothing is None else nothing
    x_min, x_max, flags = extremes(x, qparams_shape(spec, x.shape), of_magnitude, nothing, contracted)
    return None if x_min is None else _to_float32(x_min), _to_float32(x_max), flags


def _to_float32(end: Array) -> Array:
    """An end of float64 beyond float32 becomes its largest number; infinity, of the empty range, stays."""
    if end.dtype == jnp.float32:
        return end
    return jnp.where(jnp.abs(end) < jnp.inf, num.downcast(end, jnp.dtype(jnp.float32)), end.astype(jnp.float32))


@functools.partial(jax.jit, static_argnames="spec")
def _observe(x: Array, spec: QuantSpec) -> Range:
    both_ends = QuantSpec(symmetric=False, granularity=spec.granularity)
    return Range(*range_of(x, both_ends, nothing=np.inf)[:2])


def observe(x: ArrayLike, spec: QuantSpec, *, nonfinite: str = "ignore") -> Range:
    """The range of one batch of real values: the smallest and the largest of each group that shares a scale.

    Args:
      x: floating array of any shape.
      spec: QuantSpec, static; its granularity says which values share a range.
      nonfinite: static. "ignore" leaves NaN and infinities out; "raise" raises for them, and needs a concrete `x`.

    Returns:
      Range of float32 in the shape of the scale; the empty range, (inf, -inf), where no value is finite. Combine
      batches by `merge` or `ema_ranges`. Under `shard_map` it is the range of the shard: combine by `lax.pmin`
      and `lax.pmax`.

    Gradient: none; ranges are observed, and QParams are trained.

    Raises:
      TypeError: for an `x` that is no floating array, or traced with nonfinite="raise".
      ValueError: for a granularity that does not fit, or values that are not finite where that was asked for.

    Source: the min-max observer of every calibration scheme.

    >>> import jax.numpy as jnp
    >>> from jaxquant import activation_spec, observe
    >>> [end.item() for end in observe(jnp.array([-1.0, 3.0, jnp.nan]), activation_spec())]
    [-1.0, 3.0]
    """
    x = checks.float_array("x", x)
    no_nonfinite(x, nonfinite)
    return _observe(lax.stop_gradient(x), checked_spec(spec))


def grid_of_range(x_min: Array | None, x_max: Array, frame: Frame) -> Grid:
    """The grid of a range without NaN: the formulas of `qparams_from_range`, inside a compiled program.

    No `x_min` is the range of the largest absolute value `x_max`.
    """
    scale, zero_point = _of_range(x_min, x_max, frame)
    return Grid(scale, zero_point, frame)


@functools.partial(jax.jit, inline=True)  # traced once for the sides of a condition
def _of_range(x_min: Array | None, x_max: Array, frame: Frame) -> tuple[Array, Array | None]:
    spec, qmin, qmax = frame.spec, frame.qmin, frame.qmax
    if x_min is None:
        (x_max,) = unknown(x_max)
        largest = lax.min(x_max, LARGEST)
        return spec.scales.of_largest(largest, qmax, spec.scale_rule), None
    low, high = unknown(x_min, x_max)
    if spec.has_minimum:
        low, high = lax.max(low, -LARGEST), lax.min(high, LARGEST)
        low, high = (num.select(low <= high, v, 0) for v in (low, high))  # of the empty range
        low = low if spec.scale_spec is None else lax.min(low, _ZERO)  # whose sign is that of all
        return quotient(high - low, qmax - qmin, 1), low
    low, high = lax.min(lax.max(low, -LARGEST), _ZERO), lax.min(lax.max(high, _ZERO), LARGEST)
    if spec.symmetric:
        largest = lax.max(-low, high) if spec.signed else high
        if spec.scale_rule == "extremum":
            magnitude = spec.scales.of_largest(largest, -qmin, spec.scale_rule)
            return num.select(-low >= high, magnitude, -magnitude), None
        return spec.scales.of_largest(largest, qmax, spec.scale_rule), None
    scale = quotient(high - low, qmax - qmin, 1)
    zero_point = qmin - num.round_half_even(divide(low, scale))
    return scale, lax.min(lax.max(zero_point, qmin), qmax)


@jax.jit
def _qparams_from_range(x_min: Array, x_max: Array, frame: Frame) -> QParams:
    x_min, x_max = (num.select(v == v, v, 0) for v in (x_min, x_max))
    return grid_of_range(x_min, x_max, frame).qparams


def qparams_from_range(r: Range | Mapping[str, Range], spec: QuantSpec, *, bits: ArrayLike | None = None) -> Any:
    """The scale and zero point with which the grid covers a real range.

    The range is extended to contain 0, which always falls on an integer of the grid. Affine:

        scale = (x_max - x_min) / (qmax - qmin);  zero_point = qmin - round(x_min / scale)

    Symmetric: `scale = max(-x_min, x_max) / qmax`, unsigned `x_max / qmax`, and the zero point is 0; with
    scale_rule="half_step" the divisor is qmax + 1/2. The quotients are correctly rounded, ties to even.

    Args:
      r: Range of numbers or of floating arrays of one shape, real values, traced or not; or a dict of them.
      spec: QuantSpec, static. Its granularity is not read: the qparams have the shape of the range.
      bits: integer, traced or not, at most spec.bits: the grid of a schedule. None means spec.bits.

    Returns:
      QParams of float32, or a dict of them like `r`. Defined for every range and always finite. A zero range has scale
      1, a tiny range the smallest normal float32 (2 ** -126). Infinite ends count as half the largest float32. A NaN
      end counts as 0, and so does an end on the wrong side of 0: the empty range, (inf, -inf), is a zero range.

    Gradient: the formula's, as JAX defines it. `fake_quant` trains the QParams themselves.

    Raises:
      TypeError: for anything but a Range or dict of them, and for ends that are not numbers or floating arrays, or are
        float64.
      ValueError: for ends of different shapes, or bits outside 2..spec.bits.

    Source: Jacob et al., 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference".

    >>> from jaxquant import QuantSpec, Range, qparams_from_range
    >>> [v.item() for v in qparams_from_range(Range(-20.0, 1000.0), QuantSpec(symmetric=False))]
    [4.0, -123.0]
    """
    frame = frame_of(checked_spec(spec), bits)

    def of(r: Range) -> QParams:
        x_min, x_max = (checks.real(name, v, jnp.dtype(jnp.float32)) for name, v in r._asdict().items())
        checks.shape("x_max", x_max, x_min.shape, "the shape of `x_min`, one range for each scale")
        return _qparams_from_range(x_min, x_max, frame)

    return for_each(of, Range, "qparams_from_range", r=r)


def rows_of(x: Array, shape: tuple[int, ...]) -> Array:
    """The values of each group along the last axis: (groups, elements)."""
    groups = (1,) * (x.ndim - len(shape)) + shape
    parts = [part for g, n in zip(groups, x.shape, strict=True) for part in (g, n // max(g, 1))]
    x = replicated(x)
    order = [*range(0, len(parts), 2), *range(1, len(parts), 2)]
    return x.reshape(parts).transpose(order).reshape(math.prod(groups), math.prod(parts[1::2]))


_MADE_BY = {
    "Range": "Range(x_min, x_max) or observe(x, spec)",
    "Histogram": "histogram(x, spec)",
    "Gram": "q.observe(params, ..., gram=True)",
}


def for_each(f: Callable, kind: type, function: str, **values: Any) -> PyTree:
    """`f` of values of one kind; or of those under each key of dicts of them, as a dict."""
    if all(isinstance(v, kind) for v in values.values()):
        return f(*values.values())
    (first, one), *others = values.items()
    if all(isinstance(v, Mapping) for v in values.values()):
        for name, other in others:
            if set(one) != set(other):
                raise ValueError(
                    f"`{first}` and `{name}` must have the same keys in {function}, got "
                    f"{sorted(set(one) - set(other), key=str)} in `{first}` alone and "
                    f"{sorted(set(other) - set(one), key=str)} in `{name}` alone. For an unseen key add the neutral "
                    "value: Range(inf, -inf), an empty histogram, or a Gram of zeros."
                )
        return {
            key: for_each(f, kind, f"{function} at {key!r}", **{name: v[key] for name, v in values.items()})
            for key in one
        }
    raise TypeError(
        f"{' and '.join(f'`{name}`' for name in values)} must be of type {kind.__name__}, or dicts of it, in "
        f"{function}, got {' and '.join(type(v).__name__ for v in values.values())}. Make one by "
        f"{_MADE_BY[kind.__name__]}."
    )
