# SPDX-License-Identifier: Apache-2.0
"""The levels that values are rounded to, of qparams as they are used."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from .._base import _checks as checks
from .._base import _numerics as num
from .._base._groups import broadcast_groups, reduce_groups
from .._platform._cpu import computed_once, read_once, unknown
from .._platform._division import divide, divide_to_level
from .._spec._scale_formats import TINY
from .._spec._spec import QuantSpec, qparams_shape
from ._qparams import QParams


@functools.partial(jax.tree_util.register_dataclass, data_fields=("qmin", "qmax"), meta_fields=("spec", "is_fitted"))
@dataclasses.dataclass(frozen=True)
class Frame:
    """The untrained part of a grid.

    Attributes:
      qmin, qmax: its ends, traced if `bits` is scheduled.
      spec: static.
      is_fitted: static; whether the qparams were just fitted to these values, so that no limits need to be applied.
    """

    qmin: Any
    qmax: Any
    spec: QuantSpec
    is_fitted: bool = False


class Grid(NamedTuple):
    """The levels that values are rounded to, with a scale for each group, or for each value of a tensor.

    `zero_point` is None for a symmetric spec and means 0; for a spec with a minimum it is that. A scale of the tensor
    scales the others: `value = (level * scale) * tensor_scale`.
    """

    scale: Any
    zero_point: Any
    frame: Any
    tensor_scale: Any = None
    exact: Any = None  # the grid before it was rounded, by which levels are computed; None for the grid itself

    @property
    def qmin(self) -> Any:
        return self.frame.qmin

    @property
    def qmax(self) -> Any:
        return self.frame.qmax

    @property
    def trained(self) -> QParams:
        """The numbers that a gradient is of."""
        return QParams(self.scale, self.zero_point)

    @property
    def qparams(self) -> QParams:
        """The numbers as users see them, who have an array of zeros for the zero point of a symmetric spec."""
        return QParams(self.scale, jnp.zeros_like(self.scale) if self.zero_point is None else self.zero_point)

    def effective(self) -> "Grid":
        """The grid that values are rounded to, wherever an optimizer left the numbers.

        The scale is not tiny, the zero point on the grid, and scales are rounded to what holds them.
        """
        if self.tensor_scale is not None:
            return self
        grid, spec = self if self.frame.is_fitted else self._limited(), self.frame.spec
        scale, tensor_scale = spec.scales.rounded(grid.scale, grid.qmax, spec.scale_rule)
        zero_point = spec.scales.rounded_minimum(grid.zero_point) if spec.has_minimum else grid.zero_point
        if spec.scale_spec is not None:
            scale = lax.max(of_scales(scale, spec.scale_spec).real, TINY)
            zero_point = -of_scales(-zero_point, spec.scale_spec).real if spec.has_minimum else zero_point
        exact = grid if spec.exact_divisor else None
        return grid._replace(scale=scale, zero_point=zero_point, tensor_scale=tensor_scale, exact=exact)

    def _limited(self) -> "Grid":
        def of_positive(scale):
            # NaN for what is no number: integers cannot hold it, and it must not look like one.
            return num.select(scale < TINY, TINY, num.select(scale < jnp.inf, scale, jnp.nan))

        def of_scale(scale):
            if self.frame.spec.scale_rule == "extremum":
                return num.select(scale < 0, -of_positive(-scale), of_positive(scale))
            return of_positive(scale)

        def of_both(scale, zero_point):
            if self.frame.spec.has_minimum:
                return num.select(jnp.abs(zero_point) < jnp.inf, of_scale(scale), jnp.nan), zero_point
            scale = num.select(zero_point == zero_point, of_scale(scale), jnp.nan)
            return scale, num.clip(num.round_half_even(zero_point), self.qmin, self.qmax)

        if self.zero_point is None:
            return self._replace(scale=computed_once(of_scale, self.scale))
        scale, zero_point = computed_once(of_both, self.scale, self.zero_point)
        return self._replace(scale=scale, zero_point=zero_point)

    def over(self, x: Array) -> "Grid":
        """The grid of each value of `x`, in its dtype, with the scale and the zero point of its group."""
        over = lambda v: None if v is None else broadcast_groups(v.astype(x.dtype), x.shape)
        ends = {"qmin": self.qmin.astype(x.dtype), "qmax": self.qmax.astype(x.dtype)}
        scale, zero_point, tensor_scale = map(over, (self.scale, self.zero_point, self.tensor_scale))
        exact = None if self.exact is None else self.exact.over(x)
        return Grid(scale, zero_point, dataclasses.replace(self.frame, **ends), tensor_scale, exact)

    @property
    def minimum(self) -> Array | None:
        """The real value of level 0, of a spec that has one; None for 0."""
        return self.zero_point if self.frame.spec.has_minimum else None

    @property
    def zero(self) -> Array | None:
        """The level of real 0, of a spec that has one; None for 0."""
        return None if self.frame.spec.has_minimum else self.zero_point

    def above_minimum(self, x: Array) -> Array:
        """Real values, less the real value of level 0."""
        return x if self.minimum is None else x - self.minimum

    @property
    def step(self) -> Array:
        """The real value of one level, by which values are divided."""
        return num.product_of_scales(self.scale, self.tensor_scale)

    def level(self, x: Array, noise: Array | None = None) -> Array:
        """The level of each real value, not yet clipped."""
        if self.exact is not None:
            return self.exact.level(x, noise)
        spec = self.frame.spec
        rounds_at_ties = spec.rounding in ("half_even", "half_away") and spec.levels.bits <= 10
        signed_zero, x = spec.levels.has_signed_zero, self.above_minimum(x)
        quotient = divide_to_level(x, self.step, signed_zero) if rounds_at_ties else divide(unknown(x)[0], self.step)
        if signed_zero or noise is not None:  # floats and noise are rounded by more than one look at a value
            quotient = read_once(quotient)
        level = spec.levels.nearest(quotient, spec.rounding, noise)
        return level if self.zero is None else lax.add(level, self.zero)

    def value(self, level: Array) -> Array:
        """The real value of each level, clipped first; NaN stays."""
        return self.real(lax.min(lax.max(level, self.qmin), self.qmax))

    def real(self, level: Array, guarded: bool = True) -> Array:
        """The real value of each level, `(level - zero_point) * scale`; the product is last, so that zero is exactly 0.

        With a minimum `level * scale + minimum`, both rounded.

        Only what a contraction alone reads, which adds nothing to the product, needs no guard.

        The sum with `|steps| * 0` is two things at once. It makes one zero: XLA drops an addition of a constant zero
        point 0, and then the zero that a small negative value rounds to would be -0 in one program and 0 in another.
        And it guards the product: contracted with this sum it rounds to the same, and with the user's next one it
        cannot be. A select would not do: LLVM moves an addition into one with a constant on a side.
        """
        if self.minimum is not None:
            return num.guard(level * self.step) + self.minimum
        steps = level if self.zero is None else level - self.zero
        value = steps * self.scale + jnp.abs(steps) * 0 if guarded else steps * self.scale
        if self.tensor_scale is None:
            return value
        return num.guard(value * self.tensor_scale) if guarded else value * self.tensor_scale

    def in_dtype(self, level: Array) -> Array:
        """The levels, clipped, in the dtype that holds them."""
        return self.frame.spec.levels.in_dtype(level, self.qmin, self.qmax)


class OfScales(NamedTuple):
    """Scales as integers on a grid of their own, and the scales of that, which their largest are the last level of."""

    levels: Array
    grid: Grid

    @property
    def real(self) -> Array:
        return self.grid.over(self.levels).real(self.levels)


def of_scales(scale: Array, spec: QuantSpec) -> OfScales:
    """Positive scales on their own grid."""
    frame = frame_of(spec, is_fitted=True)
    largest = reduce_groups(jnp.max, scale, qparams_shape(spec, scale.shape))
    grid = Grid(spec.scales.of_largest(lax.max(largest, np.float32(0)), frame.qmax, spec.scale_rule), None, frame)
    grid = grid.effective()
    each = grid.over(scale)
    return OfScales(num.clip(each.level(scale), each.qmin, each.qmax), grid)


def grid_of(qparams: QParams, frame: Frame) -> Grid:
    """The grid of qparams, not yet limited; the zero point of a symmetric spec is never read."""
    return Grid(qparams.scale, None if frame.spec.symmetric else qparams.zero_point, frame)


def limits_of(spec: QuantSpec, bits: ArrayLike | None = None) -> tuple[Any, Any]:
    """`qmin` and `qmax` as float32: constants, or arrays for traced `bits`.

    Traced bits are limited to [2, spec.bits], which cannot be checked. By shifts: `exp2` is not exact everywhere.
    """
    if bits is None:
        return np.float32(spec.qmin), np.float32(spec.qmax)
    if spec.format:
        raise ValueError(f"`bits` is a schedule for integers, got {bits!r} with {spec}. Leave it None.")
    bits = _bits(spec, bits)
    half = lax.shift_left(jnp.int32(1), bits - 1)
    low, high = (-half, half - 1) if spec.signed else (jnp.zeros_like(half), 2 * half - 1)
    low = low + int(bool(spec.narrow_range))
    return low.astype(jnp.float32), high.astype(jnp.float32)


def frame_of(spec: QuantSpec, bits: ArrayLike | None = None, is_fitted: bool = False) -> Frame:
    """The frame of a spec, of fewer bits if a schedule says so."""
    return Frame(*limits_of(spec, bits), spec, is_fitted)


def _bits(spec: QuantSpec, bits: Any) -> Array:
    bits = checks.unwrapped(bits)
    if isinstance(bits, bool) or not jnp.issubdtype(getattr(bits, "dtype", type(bits)), jnp.integer):
        raise TypeError(
            f"`bits` must be an integer, traced or not, got {bits!r}. It is the width of a schedule: jnp.int32(4)."
        )
    if not isinstance(bits, int):
        checks.shape("bits", jnp.asarray(bits), (), "one width for the tensor")
    if not isinstance(bits, jax.core.Tracer) and not 2 <= int(bits) <= spec.bits:
        raise ValueError(
            f"`bits` must be between 2 and the {spec.bits} of {spec}, got {int(bits)}. Give the spec the most bits "
            "that a schedule reaches."
        )
    return jnp.clip(jnp.asarray(bits).astype(jnp.int32), 2, spec.bits)
