# SPDX-License-Identifier: Apache-2.0
"""Weights as the matrices that ops contract: their layout, their grids, and the moments of their rows."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from .._arrays._grid import Grid, frame_of, grid_of
from .._arrays._qparams import QParams
from .._base import _checks as checks
from .._base import _numerics as num
from .._base._checks import PyTree
from .._spec._spec import QuantSpec
from .._transform._layout import Layout


class Form(NamedTuple):
    """The static part of a weight: a solver compiles once for all weights of one form.

    Attributes:
      spec: QuantSpec, to nearest.
      layout: how the weight lies in matrices.
      sharding: how it lies on a mesh, if it is on several devices.
    """

    spec: QuantSpec
    layout: Layout
    sharding: jax.NamedSharding | None = None

    def matrices(self, v: Array) -> Array:
        """The matrices (..., K, N) of an array of the weight's shape, split along N where the weight is split."""
        return self.by_columns(self.layout.matrices(v))

    def by_columns(self, v: Array) -> Array:
        """Matrices (..., K, N), split along N where the weight is split."""
        if self.sharding is None:
            return v
        # Columns are solved each by itself; rows on other devices would be gathered for each.
        axes = [axis for of in self.sharding.spec if of for axis in ((of,) if isinstance(of, str) else of)]
        if v.shape[-1] % math.prod(self.sharding.mesh.shape[axis] for axis in axes):
            return v
        columns = jax.P(*[None] * (v.ndim - 1), tuple(axes))
        return lax.with_sharding_constraint(v, jax.NamedSharding(self.sharding.mesh, columns))

    def parameter(self, matrices: Array) -> Array:
        """The array of the weight's shape, and with its sharding, that has these matrices."""
        v = self.layout.parameter(matrices)
        return v if self.sharding is None else lax.with_sharding_constraint(v, self.sharding)


def array(leaf: PyTree) -> Array:
    """A leaf as an array; one that is read from a file is read here."""
    return checks.float_array("params", leaf if isinstance(leaf, Array) else np.asarray(leaf))


def grid_in_matrices(form: Form, qparams: QParams, dtype: DTypeLike) -> Grid:
    """The grid that a weight is rounded to, with a scale for each element of its matrices (..., K, N)."""
    shape, grid = form.layout.shape, grid_of(qparams, frame_of(form.spec)).effective()
    grid = grid._replace(exact=None)  # levels of the real values, whatever the scale that rounds
    grid = grid.over(jnp.zeros(shape, dtype))
    return of_each(lambda v: form.matrices(jnp.broadcast_to(v, shape)), grid)


def of_each(f: Callable[[Array], Array], grid: Grid) -> Grid:
    """The grid with a function of what it has for each element."""
    zero_point = None if grid.zero_point is None else f(grid.zero_point)
    return grid._replace(scale=f(grid.scale), zero_point=zero_point)


def nearest(w: Array, grid: Grid) -> Array:
    """The level next to each value."""
    return num.clip(grid.level(w), grid.qmin, grid.qmax)


def checked_damping(damping: float) -> float:
    """A number >= 0."""
    damping = checks.static_float("damping", damping, "one call for each")
    if not 0 <= damping < np.inf:
        raise ValueError(f"`damping` must be finite and >= 0, got {damping}. 0.01 is 1 % of the mean of the diagonal.")
    return damping


def damped(products: Array, damping: float) -> Array:
    """Second moments (..., K, K) with a multiple of the mean of their diagonal added to it."""
    mean = jnp.trace(products, axis1=-2, axis2=-1) / products.shape[-1]
    added = damping * jnp.where(mean > 0, mean, 1)
    return products + added[..., None, None] * jnp.broadcast_to(jnp.eye(products.shape[-1]), products.shape)
