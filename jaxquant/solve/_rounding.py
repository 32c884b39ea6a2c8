# SPDX-License-Identifier: Apache-2.0
"""The frame of solvers that choose the levels of weights: each is a choice for one matrix, options, and a docstring."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from .._arrays._gram import Gram, relative, squared_errors
from .._arrays._grid import Grid, frame_of, grid_of
from .._arrays._qparams import QParams
from .._base import _checks as checks
from .._base import _numerics as num
from .._base._bar import callback
from .._base._checks import PyTree
from ._matrices import Form, array, grid_in_matrices, nearest
from ._model import Model, Weight, check_solved

Progress = Callable[[str, float, float], None]  # (path, error before, error after)
Shown = Progress | Literal[True] | None  # True for a bar


# (w, products, grid, *numbers) -> the levels of a weight (K, N), with these second moments (K, K) of its inputs; the
# numbers are traced. Hashable, so that one program serves all weights of a form: a frozen dataclass of static options.
Levels = Callable[..., Array]


class Errors(NamedTuple):
    """The relative squared error of a layer with the nearest levels and with those found."""

    before: Array
    after: Array


def rounded(model: Model, levels: Levels, numbers: Sequence[float], freeze: bool, progress: Shown) -> PyTree:
    """The params with the weights of a model on the levels that are chosen, as `solve.gptq` returns them."""
    freeze, model = checks.static_bool("freeze", freeze), model.on_grids().seen_whole()

    def solve(weight: Weight) -> Array:
        assert weight.qparams is not None
        leaf, errors = _solved(array(weight.leaf), weight.gram, weight.qparams, weight.form, levels, tuple(numbers))
        return _checked(weight, leaf, errors, callback(progress))

    return model.solved(solve, freeze, progress)


@functools.partial(jax.jit, static_argnames=("form", "levels"))
def _solved(
    leaf: Array, gram: Gram, qparams: QParams, form: Form, levels: Levels, numbers: tuple[Any, ...]
) -> tuple[Array, Errors]:
    """A weight on its grid; and its error before and after."""
    dtype = gram.products.dtype
    w, grid = form.matrices(leaf.astype(dtype)), grid_in_matrices(form, qparams, dtype)
    chosen = over_matrices(lambda *of: levels(*of, *numbers), w, gram.products, grid)
    found, errors = _no_worse(w, gram.products, grid, chosen)
    return _values(form, found, qparams, leaf.dtype), errors


def over_matrices(solve: Callable[..., Any], w: Array, products: Array, grid: Grid) -> PyTree:
    """The results of `solve` for each matrix (K, N), with its second moments and its grid, one at a time."""
    lead, fixed = w.shape[:-2], grid._replace(scale=None, zero_point=None)
    if not lead:
        return solve(w, products, grid)
    graph = lambda v: v.reshape(-1, *v.shape[-2:])
    each = graph(w), graph(products), graph(grid.scale), None if grid.zero_point is None else graph(grid.zero_point)
    one = lambda v: solve(v[0], v[1], fixed._replace(scale=v[2], zero_point=v[3]))
    return jax.tree.map(lambda v: v.reshape(*lead, *v.shape[1:]), lax.map(one, each))


def _no_worse(w: Array, products: Array, grid: Grid, levels: Array) -> tuple[Array, Errors]:
    """The levels (..., K, N) that were found; in columns where the nearest have a smaller error, the nearest."""
    others = nearest(w, grid)
    # A matrix that no row has met, such as an expert without tokens, is rounded to nearest.
    is_met = jnp.trace(products, axis1=-2, axis2=-1) > 0
    levels = jnp.where(is_met[..., None, None], levels, others)
    error = lambda levels: squared_errors(w - grid.value(levels), products)
    found, before = error(levels), error(others)
    is_better = ~(before < found)  # of no number, too, so that it is seen
    levels = jnp.where(is_better[..., None, :], levels, others)
    whole = squared_errors(w, products).sum()
    share = lambda errors: relative(errors.sum(), whole)
    return levels, Errors(share(before), share(jnp.where(is_better, found, before)))


def _values(form: Form, levels: Array, qparams: QParams, dtype: DTypeLike) -> Array:
    """The weight with these levels in its matrices: the values of its grid, which are rounded to the same levels."""
    if form.spec.levels.number > 2 ** (jnp.finfo(dtype).nmant + 1):
        raise ValueError(
            f"the weight is {dtype}, which cannot hold the {form.spec.levels.number} levels of {form.spec}. Cast it to "
            "float32."
        )
    levels = form.parameter(levels).astype(num.compute_dtype(dtype))
    return num.downcast(grid_of(qparams, frame_of(form.spec)).effective().over(levels).value(levels), dtype)


def _checked(weight: Weight, leaf: Array, errors: Errors, progress: Progress | None) -> Array:
    """The new values of a weight, if its errors are numbers; reported to the caller."""
    check_solved(errors.after, weight)
    if isinstance(errors.after, jax.core.Tracer):
        return leaf
    if progress is not None:
        progress(weight.path, float(errors.before), float(errors.after))
        for place in np.argwhere(np.asarray(weight.gram.rows) == 0) if np.ndim(weight.gram.rows) else ():
            progress(f"{weight.path}[{', '.join(map(str, place))}]", np.nan, np.nan)
    return leaf
