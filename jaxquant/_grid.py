# SPDX-License-Identifier: Apache-2.0
"""The levels that values are rounded to, of qparams as they are used."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from . import _numerics as num
from ._groups import broadcast_groups
from ._qparams import QParams
from ._scale_formats import TINY
from ._spec import QuantSpec


class Grid(NamedTuple):
    """The levels that values are rounded to, with a scale for each group, or spread over the values of a tensor.

    No zero point is 0, of a symmetric spec. The ends are scalars: constants, or arrays of a schedule of bits. Where
    there is a scale of the tensor, it scales the others: `value = (level * scale) * tensor_scale`.
    """

    scale: Any
    zero_point: Any
    qmin: Any
    qmax: Any
    tensor_scale: Any = None

    @property
    def qparams(self) -> QParams:
        """As users see them, who have an array of zeros for the zero point of a symmetric spec."""
        return QParams(self.scale, jnp.zeros_like(self.scale) if self.zero_point is None else self.zero_point)

    def used(self, spec: QuantSpec, fitted: bool = False) -> "Grid":
        """As it is used, wherever an optimizer left it: with scales as their dtype holds them.

        The scale is not tiny and the zero point on the grid; what was just fitted is so already.
        """
        grid = self if fitted else self._limited()
        scale, tensor_scale = spec.scales.rounded(grid.scale, grid.qmax, spec.scale_rule)
        return grid._replace(scale=scale, tensor_scale=tensor_scale)

    def _limited(self) -> "Grid":
        def scale_used(scale):
            # NaN for what is no number: integers cannot hold it, and it must not look like one.
            return num.select(scale < TINY, TINY, num.select(scale < jnp.inf, scale, jnp.nan))

        def both_used(scale, zero_point):
            scale = num.select(zero_point == zero_point, scale_used(scale), jnp.nan)
            return scale, num.clip(num.round_half_even(zero_point), self.qmin, self.qmax)

        if self.zero_point is None:
            return self._replace(scale=num.computed_once(scale_used, self.scale))
        scale, zero_point = num.computed_once(both_used, self.scale, self.zero_point)
        return self._replace(scale=scale, zero_point=zero_point)

    def over(self, x: Array) -> "Grid":
        """For the values of `x`: in their dtype, each with the scale and the zero point of its group."""
        spread = lambda v: broadcast_groups(v.astype(x.dtype), x.shape)
        ends = self.qmin.astype(x.dtype), self.qmax.astype(x.dtype)
        groups = (None if v is None else spread(v) for v in (self.scale, self.zero_point, self.tensor_scale))
        scale, zero_point, tensor_scale = groups
        return Grid(scale, zero_point, *ends, tensor_scale)

    @property
    def step(self) -> Array:
        """The real value of one level, by which values are divided."""
        return num.product_of_scales(self.scale, self.tensor_scale)

    def level(self, x: Array, spec: QuantSpec, noise: Array | None = None) -> Array:
        """The level of each real value, not yet clipped."""
        return num.affine_level(x, self.step, self.zero_point, lambda v: spec.levels.nearest(v, spec.rounding, noise))

    def value(self, level: Array) -> Array:
        """The real value of each level, clipped first; NaN stays."""
        return self.real(lax.min(lax.max(level, self.qmin), self.qmax))

    def real(self, level: Array, guarded: bool = True) -> Array:
        """The real value of each level on the grid; not guarded, for what only a contraction reads."""
        value = num.affine_value(level, self.scale, self.zero_point, guarded)
        if self.tensor_scale is None:
            return value
        return num.guard(value * self.tensor_scale) if guarded else value * self.tensor_scale

    def held(self, level: Array, spec: QuantSpec) -> Array:
        """The levels, clipped, in the dtype that holds them."""
        return spec.levels.held(level, self.qmin, self.qmax)


def grid_of(qparams: QParams, spec: QuantSpec, ends: tuple[Any, Any]) -> Grid:
    """The grid of qparams, not yet limited; the zero point of a symmetric spec is never read."""
    return Grid(qparams.scale, None if spec.symmetric else qparams.zero_point, *ends)
