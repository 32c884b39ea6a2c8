# SPDX-License-Identifier: Apache-2.0
"""The scale and zero point of data, by five methods."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from .._base import _checks as checks
from .._base import _numerics as num
from .._base._groups import broadcast_groups, reduce_groups
from .._platform._cpu import computed_once
from .._platform._division import divide
from .._spec._scale_formats import TINY
from .._spec._spec import QuantSpec, checked_spec, qparams_shape
from ._grid import Frame, Grid, frame_of
from ._qparams import QParams
from ._range import LARGEST, finite_or, grid_of_range, no_nonfinite, range_of, rows_of


def _minmax(x: Array, frame: Frame, _: float = 100.0) -> QParams:
    x_min, x_max = range_of(x, frame.spec)[:2]
    fitted = lambda x_max, x_min: grid_of_range(x_min, x_max, frame)[:2]
    scale, zero_point = computed_once(fitted, x_max, x_min)
    return Grid(scale, zero_point, frame).qparams


def _mean(x: Array, shape: tuple[int, ...]) -> Array:
    """The mean of the finite values of each group, 0 where there is none."""
    total = lambda v: reduce_groups(jnp.sum, v, shape)
    finite = jnp.abs(x) < jnp.inf
    return total(jnp.where(finite, x, 0)) / jnp.maximum(total(finite.astype(x.dtype)), 1)


def _lsq(x: Array, frame: Frame, _: float) -> QParams:
    if frame.spec.has_minimum:
        raise ValueError(f"`method='lsq'` has no minimum, got {frame.spec}. Pass method='minmax' or 'mse'.")
    start, qmin, qmax = _minmax(x, frame), frame.qmin, frame.qmax
    of_zero = start.zero_point
    steps = qmax - of_zero if frame.spec.symmetric else jnp.maximum(qmax - of_zero, of_zero - qmin)
    return _of_mean(x, start, lambda mean: divide(2 * mean, jnp.sqrt(steps)))


def _absmean(x: Array, frame: Frame, _: float) -> QParams:
    if not frame.spec.symmetric:
        raise ValueError(f"`method='absmean'` is for symmetric grids, got {frame.spec}. Pass method='minmax' or 'mse'.")
    return _of_mean(x, _minmax(x, frame), lambda mean: mean)


def _of_mean(x: Array, start: QParams, of: Callable[[Array], Array]) -> QParams:
    """The qparams whose scale is a function of the mean magnitude, in units of the scale at the start."""
    scale, zero_point = start
    x = num.upcast(x, num.compute_dtype(x.dtype))
    # In units of the min-max scale, so that no sum overflows.
    v = jnp.abs(divide(x, broadcast_groups(scale.astype(x.dtype), x.shape)))
    fitted = num.guard(of(_mean(v, scale.shape).astype(jnp.float32)) * scale)
    fitted = jnp.where(fitted < jnp.inf, fitted, LARGEST)
    return QParams(jnp.where(jnp.abs(fitted) < TINY, scale, fitted), zero_point)


def _order_statistics(x: Array, below: float, above: float) -> tuple[Array, Array]:
    """The values that leave these fractions of the finite values of each row below and above: values of the data."""
    count = jnp.sum(jnp.abs(x) < jnp.inf, -1, dtype=jnp.int32)
    last = jnp.maximum(count - 1, 0)
    ordered = jnp.sort(finite_or(x, jnp.inf), -1)
    # float32 does not hold every count: so from each end on its own, where none is exact.
    beyond = lambda f: jnp.minimum(jnp.floor(last.astype(jnp.float32) * f).astype(jnp.int32), last)
    pick = lambda i: jnp.where(count > 0, jnp.take_along_axis(ordered, i[:, None], -1)[:, 0], 0)
    return pick(beyond(below)), pick(last - beyond(above))


def _percentile(x: Array, frame: Frame, percentile: float) -> QParams:
    spec = frame.spec
    shape = qparams_shape(spec, x.shape)
    rows = rows_of(num.upcast(x, num.compute_dtype(x.dtype)), shape)
    if spec.is_of_magnitude:
        _, high = _order_statistics(jnp.abs(rows), 0.0, (100 - percentile) / 100)
        low = -high
    else:
        outside = (100 - percentile) / 200
        low, high = _order_statistics(rows, outside, outside)
    low, high = (end.reshape(shape).astype(jnp.float32) for end in (low, high))
    return grid_of_range(low, high, frame).qparams


class _Trial(NamedTuple):
    """A grid and what it costs each group: the scale as a multiple of the one of min-max, and the squared error."""

    ratio: Array
    zero_point: Array
    error: Array


def _trial(v: Array, ratio: Array, zero_point: Array, frame: Frame) -> _Trial:
    """The error of a grid on `v`, after the least-squares step of its scale for the levels that it assigns.

    The step makes of any guess the best scale of its neighbourhood: the error is a chain of parabolas, one for each
    assignment of values to levels, and this is the lowest point of the one that the guess lies on.
    """
    total = lambda t: reduce_groups(jnp.sum, t, ratio.shape)
    grid = Grid(ratio, zero_point, frame).over(v)
    finite = jnp.abs(v) < jnp.inf
    q = jnp.where(finite, num.clip(grid.level(v), grid.qmin, grid.qmax) - grid.zero_point, 0)
    rest = jnp.where(finite, v - q * grid.scale, 0)
    slope, curvature = total(rest * q), total(q * q)
    curvature = jnp.where(curvature > 0, curvature, 1)  # all levels are 0
    return _Trial(ratio + slope / curvature, zero_point, total(rest * rest) - slope * slope / curvature)


def _better(a: _Trial, b: _Trial) -> _Trial:
    return jax.tree.map(lambda old, new: jnp.where(b.error < a.error, new, old), a, b)


# Ranges to try, as fractions of the min-max range: from somewhat wider down to where outliers push them.
_SHRINK = 2.0 ** -np.arange(0, 11, 1 / 8)
_SHRINK_END = np.concatenate([[1.6, 1.25], 2.0 ** -np.arange(0, 4, 1 / 4), 2.0 ** -np.arange(4, 10, 2.0), [0.0]])


def _density(size: int, steps: int, fewest: int, most: int) -> int:
    """The number of scales to try where the best may lie.

    Each value of a group has a tie, where the parabola of the error changes, about every 1 / level of the scale: small
    groups have many deep valleys, close together for many levels. In large groups they average out.
    """
    return int(np.clip(2 * steps * min(size, 1024 // max(size, 1)), fewest, most))


def _nearby_scale(x: Array, frame: Frame) -> QParams:
    """The scale of min-max, or one beside it that its format holds, whichever has the least squared error."""
    spec = dataclasses.replace(frame.spec, rounding="half_even", scale_rule="ceil")
    frame = dataclasses.replace(frame, spec=spec)
    x = num.upcast(x, num.compute_dtype(x.dtype))
    start = Grid(_minmax(x, frame).scale, None, frame).effective()

    def error(scale: Array) -> Array:
        grid = Grid(scale, None, frame, start.tensor_scale).over(x)
        wrong = jnp.where(jnp.abs(x) < jnp.inf, grid.value(grid.level(x)) - x, 0)
        unit = broadcast_groups(start.step.astype(x.dtype), x.shape)  # so that no square overflows or vanishes
        return reduce_groups(jnp.sum, divide(wrong, unit) ** 2, scale.shape)

    best, lowest = start.scale, error(start.scale)
    for scale in spec.scales.neighbours(start.scale):
        found = error(scale)
        best, lowest = num.select(found < lowest, scale, best), jnp.minimum(found, lowest)
    return Grid(start._replace(scale=best).step, None, frame).qparams


def _mse(x: Array, frame: Frame, _: float) -> QParams:
    spec, qmin, qmax = frame.spec, frame.qmin, frame.qmax
    if spec.scales.is_coarse:
        return _nearby_scale(x, frame)
    if spec.has_minimum:
        return _mse_above_minimum(x, frame)
    start = _minmax(x, frame)
    nearest = dataclasses.replace(frame, spec=dataclasses.replace(spec, rounding="half_even"))  # whatever the spec is
    # In units of the min-max scale, so that no square overflows or vanishes.
    x = num.upcast(x, num.compute_dtype(x.dtype)).astype(jnp.float32)
    v = divide(x, broadcast_groups(start.scale, x.shape))
    size = math.prod(x.shape) // max(math.prod(start.scale.shape), 1)

    def search(best: _Trial, grid_of: Callable, candidates: Iterable[Any]) -> _Trial:
        def step(best, candidate):
            ratio, zero_point = grid_of(candidate)
            return _better(best, _trial(v, ratio, zero_point, nearest)), None

        return lax.scan(step, best, jnp.asarray(candidates, jnp.float32))[0]

    best = _trial(v, jnp.ones_like(start.scale), start.zero_point, nearest)
    steps = (spec.levels.number - 1) // (2 if spec.signed or not spec.symmetric else 1)
    dense = np.geomspace(1.6, 0.25, _density(size, steps, 64, 4096))
    best = search(best, lambda ratio: (jnp.ones_like(start.scale) * ratio, start.zero_point), np.r_[_SHRINK, dense])
    shifts, near = [0.0], np.linspace(0.9, 1.1, 33)
    if not spec.symmetric:
        # Of the values, not of the grid of min-max, which ends at 0 where they end within half a step of it.
        low, high = range_of(v, spec)[:2]

        def of_ends(ends):
            ratio = jnp.maximum((high * ends[1] - low * ends[0]) / (qmax - qmin), TINY)
            return ratio, jnp.clip(qmin - jnp.round(low * ends[0] / ratio), qmin, qmax)

        best = search(best, of_ends, [(a, b) for a in _SHRINK_END for b in _SHRINK_END if a or b])
        shifts, near = np.arange(-2, 3), np.geomspace(0.8, 1.25, _density(size, steps // 4, 33, 1024))
    centre = best
    nearby = lambda c: (centre.ratio * c[0], jnp.clip(centre.zero_point + c[1], qmin, qmax))
    best = search(best, nearby, [(r, s) for r in near for s in shifts])
    for _ in range(2):
        best = _better(best, _trial(v, best.ratio, best.zero_point, nearest))
    scale = num.guard(start.scale * best.ratio)
    return QParams(jnp.where(jnp.abs(scale) < TINY, TINY, scale), best.zero_point)


def _mse_above_minimum(x: Array, frame: Frame) -> QParams:
    """The scale and the minimum: from ranges with both ends cut off, each followed by steps of least squares."""
    start, qmax = _minmax(x, frame), frame.qmax
    nearest = dataclasses.replace(frame, spec=dataclasses.replace(frame.spec, rounding="half_even"))
    x = num.upcast(x, num.compute_dtype(x.dtype)).astype(jnp.float32)
    over = lambda v: broadcast_groups(v, x.shape)
    v = divide(x - over(start.zero_point), over(start.scale))  # the levels of min-max
    is_finite = jnp.abs(v) < jnp.inf
    mean = lambda t: _mean(jnp.where(is_finite, t, jnp.inf), start.scale.shape)

    def line(ratio: Array, minimum: Array) -> _Trial:
        """The line of least squares through the values over the levels that a grid assigns."""
        grid = Grid(ratio, minimum, nearest).over(v)
        q = num.clip(grid.level(v), grid.qmin, grid.qmax)
        q_mean, v_mean = mean(q), mean(v)
        q, rest = q - over(q_mean), jnp.where(is_finite, v, 0) - over(v_mean)
        slope = mean(q * rest) / jnp.maximum(mean(q * q), TINY)
        slope = jnp.where(slope > 0, slope, ratio)  # all values on one level
        minimum = v_mean - slope * q_mean
        error = mean((rest - over(slope) * q) ** 2)
        is_held = frame.spec.scale_spec is None or start.zero_point + start.scale * minimum <= 0
        return _Trial(slope, minimum, jnp.where(is_held, error, jnp.inf))

    def step(best: _Trial, ends: Array) -> tuple[_Trial, None]:
        found = line(best.ratio * 0 + (ends[1] - ends[0]), best.ratio * 0 + ends[0] * qmax)
        return _better(best, line(found.ratio, found.zero_point)), None

    cuts = np.concatenate([np.linspace(-0.1, 0.3, 25), [0.35, 0.4, 0.45]]).astype(np.float32)
    ends = jnp.asarray([(a, 1 - b) for a in cuts for b in cuts])
    of_minmax = _Trial(jnp.ones_like(start.scale), jnp.zeros_like(start.scale), jnp.full_like(start.scale, jnp.inf))
    best = lax.scan(step, _better(of_minmax, line(*of_minmax[:2])), ends)[0]
    for _ in range(2):
        best = _better(best, line(best.ratio, best.zero_point))
    scale, minimum = num.guard(start.scale * best.ratio), start.zero_point + num.guard(start.scale * best.zero_point)
    return QParams(jnp.where(scale < TINY, TINY, scale), minimum)


@functools.partial(jax.jit, static_argnames=("method", "percentile"))
def _fit(x: Array, frame: Frame, method: str, percentile: float) -> QParams:
    return METHODS[method](x, frame, percentile)


# By the values, the frame of the grid, and a percentile.
METHODS = {"minmax": _minmax, "percentile": _percentile, "mse": _mse, "lsq": _lsq, "absmean": _absmean}


def fit_qparams(
    x: ArrayLike,
    spec: QuantSpec,
    method: str = "minmax",
    *,
    bits: ArrayLike | None = None,
    percentile: float = 99.9,
    nonfinite: str = "ignore",
) -> QParams:
    """Fits a scale and zero point to real values, one for each group of the spec's granularity.

    - "minmax": `qparams_from_range` of the smallest and the largest value.
    - "percentile": `qparams_from_range` of the range that holds `percentile` percent of the values, with as many cut
      off below as above; of |x| if symmetric and signed. Its ends are values of x, the outer one where an end falls
      between two. So in groups of fewer than 1 / (1 - percentile / 100) values it is "minmax".
    - "mse": the grid with the least mean squared error. The search starts from shrunken min-max ranges, each followed
      by the least-squares step of the scale. It is within 1 % of a dense search in groups of up to 256 values, which
      the tests check. It takes about 190 passes over x, 800 if affine, and more in groups of up to 1,024 values, whose
      error has many valleys: up to 4,300, affine 10,000, at 8 bits. For scales in float8 it is the best of the "minmax"
      scale and those beside it, in two or three passes.
    - "lsq": scale = 2 * mean(|x|) / sqrt(qmax), a start from which learned scales train best at 2 and 3 bits, and which
      is far from the least error at 8. If affine, it takes the zero point of "minmax", and for qmax the steps on the
      longer side of it.
    - "absmean": scale = mean(|x|), for symmetric grids: with weight_spec(2) the ternary weights of BitNet b1.58.

    Args:
      x: floating array of any shape, real values.
      spec: QuantSpec, static.
      method: static, one of the five.
      bits: integer, traced or not, at most spec.bits: the grid of a schedule. None means spec.bits.
      percentile: static number in (0, 100]; read by "percentile" alone.
      nonfinite: static. "ignore" leaves NaN and infinities out; "raise" raises for them, and needs a concrete `x`.

    Returns:
      QParams of float32 for every dtype of x, always finite, scale >= 2 ** -126. No values, or only zeros, give scale 1
      (2 ** -126 where a tensor scale scales it). "mse", "lsq" and "absmean" sum floats, so their last bits may differ
      from program to program; the others do not. Under `shard_map` the QParams are fitted to the shard.

    Gradient: none; `fake_quant` trains the QParams themselves.

    Raises:
      TypeError: for an argument of another kind, or a traced x with nonfinite="raise".
      ValueError: for a granularity that does not fit x, an unknown method, bits or percentile out of range.

    Source: min-max and percentile: every calibration scheme; "lsq": Esser et al., 2020, "Learned Step Size
    Quantization"; "absmean": Ma et al., 2024, "The Era of 1-bit LLMs".

    >>> import jax.numpy as jnp
    >>> from jaxquant import QuantSpec, fit_qparams
    >>> fit_qparams(jnp.array([0.5, -1.0, 12.7]), QuantSpec()).scale.item()
    0.10000000149011612
    """
    x = checks.float_array("x", x)
    frame = frame_of(checked_spec(spec), bits, is_fitted=True)
    checks.one_of("method", method, tuple(METHODS))
    percentile = checks.percentage("percentile", percentile)
    no_nonfinite(x, nonfinite)
    return _fit(lax.stop_gradient(x), frame, method, percentile)
