# SPDX-License-Identifier: Apache-2.0
"""From data to the scale and zero point, by four methods."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .. import _checks as checks
from .. import _numerics as num
from .._spec import QuantSpec, checked, grid, qparams_shape
from ._range import TINY, QParams, finite_or, no_nonfinite, range_of, rows_of, to_qparams


def _minmax(x: Array, spec: QuantSpec, qmin: Array, qmax: Array) -> QParams:
    x_min, x_max = range_of(x, spec)
    return to_qparams(x_min, x_max, spec, qmin, qmax)


def _mean(x: Array, shape: tuple[int, ...]) -> Array:
    """The mean of the finite values of each group, 0 where there is none."""
    total = lambda v: num.gather(jnp.sum, v, shape)
    finite = jnp.abs(x) < jnp.inf
    return total(jnp.where(finite, x, 0)) / jnp.maximum(total(finite.astype(x.dtype)), 1)


def _lsq(x: Array, spec: QuantSpec, qmin: Array, qmax: Array) -> QParams:
    scale, zero_point = _minmax(x, spec, qmin, qmax)
    steps = qmax - zero_point if spec.symmetric else jnp.maximum(qmax - zero_point, zero_point - qmin)
    x = num.upcast(x, num.compute_dtype(x.dtype))
    mean = _mean(jnp.abs(x), scale.shape).astype(jnp.float32)
    fitted = num.divide(2 * mean, jnp.sqrt(steps))
    return QParams(jnp.where(fitted < TINY, scale, fitted), zero_point)


def _order_statistics(x: Array, low: float, high: float) -> tuple[Array, Array]:
    """The values at two fractions of the sorted finite values of each row: values of the data, not between them."""
    count = jnp.sum(jnp.abs(x) < jnp.inf, -1)
    ordered = jnp.sort(finite_or(x, jnp.inf), -1)
    at = lambda f, whole: whole(jnp.maximum(count - 1, 0).astype(jnp.float32) * f).astype(jnp.int32)
    pick = lambda i: jnp.take_along_axis(ordered, i[:, None], -1)[:, 0]
    return pick(at(low, jnp.floor)), pick(at(high, jnp.ceil))


def _percentile(x: Array, spec: QuantSpec, qmin: Array, qmax: Array, percentile: float) -> QParams:
    shape = qparams_shape(spec, x.shape)
    rows = rows_of(num.upcast(x, num.compute_dtype(x.dtype)), shape)
    if not rows.shape[1]:
        return _minmax(x, spec, qmin, qmax)
    if spec.symmetric and spec.signed:
        _, high = _order_statistics(jnp.abs(rows), 0.0, percentile / 100)
        low = -high
    else:
        outside = (1 - percentile / 100) / 2
        low, high = _order_statistics(rows, outside, 1 - outside)
    low, high = (end.reshape(shape).astype(jnp.float32) for end in (low, high))
    return to_qparams(low, high, spec, qmin, qmax)


class _Trial(NamedTuple):
    """A grid and what it costs each group: the scale as a multiple of the one of min-max, and the squared error."""

    ratio: Array
    zero_point: Array
    error: Array


def _trial(v: Array, ratio: Array, zero_point: Array, qmin: Array, qmax: Array) -> _Trial:
    """The error of a grid on `v`, after the least-squares step of its scale for the levels that it assigns.

    The step makes of any guess the best scale of its neighbourhood: the error is a chain of parabolas, one for each
    assignment of values to levels, and this is the lowest point of the one that the guess lies on.
    """
    total = lambda t: num.gather(jnp.sum, t, ratio.shape)
    here, zero = num.spread(ratio, v.shape), num.spread(zero_point, v.shape)
    finite = jnp.abs(v) < jnp.inf
    q = jnp.where(finite, num.clip(num.affine_level(v, here, zero, "half_even", None), qmin, qmax) - zero, 0)
    rest = jnp.where(finite, v - q * here, 0)
    slope, curvature = total(rest * q), jnp.maximum(total(q * q), 1)  # whole numbers: 1 only where all are 0
    return _Trial(ratio + slope / curvature, zero_point, total(rest * rest) - slope * slope / curvature)


def _better(a: _Trial, b: _Trial) -> _Trial:
    return jax.tree.map(lambda old, new: jnp.where(b.error < a.error, new, old), a, b)


# Shrunken ranges to try, as fractions of the min-max range: dense near 1, and down to where outliers push them.
_SHRINK = 2.0 ** -np.concatenate([np.arange(0, 5, 1 / 8), np.arange(5, 11, 1 / 4)])
_SHRINK_END = np.concatenate([2.0 ** -np.arange(0, 4, 1 / 4), 2.0 ** -np.arange(4, 10, 2.0), [0.0]])
_NEAR = np.linspace(0.9, 1.1, 33)


def _mse(x: Array, spec: QuantSpec, qmin: Array, qmax: Array) -> QParams:
    start = _minmax(x, spec, qmin, qmax)
    # In units of the min-max scale, so that no square overflows or vanishes.
    v = num.divide(x.astype(jnp.float32), num.spread(start.scale, x.shape))
    low, high = qmin - start.zero_point, qmax - start.zero_point

    def shrunken(best, ends):
        ratio = jnp.maximum((high * ends[1] - low * ends[0]) / (qmax - qmin), TINY)
        zero_point = jnp.clip(qmin - jnp.round(low * ends[0] / ratio), qmin, qmax)
        return _better(best, _trial(v, ratio, zero_point, qmin, qmax)), None

    def scaled(best, ratio):
        return _better(best, _trial(v, jnp.ones_like(low) * ratio, start.zero_point, qmin, qmax)), None

    def nearby(best, change):
        ratio, shift = change
        zero_point = jnp.clip(centre.zero_point + shift, qmin, qmax)
        return _better(best, _trial(v, centre.ratio * ratio, zero_point, qmin, qmax)), None

    best = _trial(v, jnp.ones_like(start.scale), start.zero_point, qmin, qmax)
    if spec.symmetric:
        best, _ = lax.scan(scaled, best, jnp.asarray(_SHRINK, jnp.float32))
        shifts = [0.0]
    else:
        pairs = [(a, b) for a in _SHRINK_END for b in _SHRINK_END if a or b]
        best, _ = lax.scan(shrunken, best, jnp.asarray(pairs, jnp.float32))
        shifts = [-2.0, -1.0, 0.0, 1.0, 2.0]
    centre = best
    changes = [(r, s) for r in _NEAR for s in shifts]
    best, _ = lax.scan(nearby, best, jnp.asarray(changes, jnp.float32))
    for _ in range(2):
        best = _better(best, _trial(v, best.ratio, best.zero_point, qmin, qmax))
    scale = num.guard(start.scale * best.ratio)
    return QParams(jnp.where(scale < TINY, TINY, scale), best.zero_point)


@functools.partial(jax.jit, static_argnames=("spec", "method", "percentile"))
def _fit(x: Array, qmin: Array, qmax: Array, spec: QuantSpec, method: str, percentile: float) -> QParams:
    if method == "percentile":
        return _percentile(x, spec, qmin, qmax, percentile)
    return _METHODS[method](x, spec, qmin, qmax)


_METHODS: dict[str, Callable] = {"minmax": _minmax, "mse": _mse, "lsq": _lsq}


def fit_qparams(
    x: Any,
    spec: QuantSpec,
    method: str = "minmax",
    *,
    bits: Any = None,
    percentile: float = 99.9,
    nonfinite: str = "ignore",
) -> QParams:
    """Fits a scale and zero point to real values, one for each group of the spec's granularity.

    - "minmax": `qparams_from_range` of the smallest and the largest value.
    - "percentile": of the range that holds `percentile` percent of the values, as many cut off below as above; of
      |x| if symmetric and signed. Its ends are values of x, the outer ones where it falls between two.
    - "mse": the grid with the least mean squared error. Searched from shrunken min-max ranges, each followed by the
      least-squares step of the scale; within 1 % of a dense search. About 140 passes over x, 620 if affine.
    - "lsq": scale = 2 * mean(|x|) / sqrt(qmax), from which learned scales train best at few bits; if affine, with
      the zero point of "minmax" and the larger number of steps on one side of it for qmax.

    Args:
      x: floating array of any shape, real values.
      spec: QuantSpec, static.
      method: static, one of the four.
      bits: integer, traced or not, at most spec.bits: the grid of a schedule. None means spec.bits.
      percentile: static number in (0, 100]; read by "percentile" alone.
      nonfinite: static. "ignore" leaves NaN and infinities out; "raise" raises for them, and needs a concrete `x`.

    Returns:
      QParams of float32 for every dtype of x, always finite, scale >= 2 ** -126. Values that are all 0, or none, give
      scale 1. Sums of floats ("mse", "lsq") may differ in the last bits from program to program; the others do not.
      Under `shard_map` they are of the shard.

    Gradient: none is promised; `fake_quant` trains the QParams themselves.

    Raises:
      TypeError: for an argument of another kind, or a traced x with nonfinite="raise".
      ValueError: for a granularity that does not fit x, an unknown method, bits or percentile out of range.

    Source: min-max and percentile: every calibration scheme; "lsq": Esser et al., 2020, "Learned Step Size
    Quantization".

    >>> import jax.numpy as jnp
    >>> from jaxquant import QuantSpec, fit_qparams
    >>> fit_qparams(jnp.array([0.5, -1.0, 12.7]), QuantSpec()).scale.item()
    0.10000000149011612
    """
    x = checks.float_array("x", x)
    spec = checked(spec)
    checks.one_of("method", method, ("minmax", "percentile", "mse", "lsq"))
    percentile = checks.percentage("percentile", percentile)
    no_nonfinite(x, nonfinite)
    return _fit(x, *grid(spec, bits, jnp.float32), spec, method, percentile)
