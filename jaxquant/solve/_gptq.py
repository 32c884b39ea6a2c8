# SPDX-License-Identifier: Apache-2.0
"""Rounding a weight row by row, each row making up for the errors of those before it."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._arrays._gram import Gram, matmul
from .._arrays._grid import Grid
from .._base import _checks as checks
from .._base._checks import PyTree
from .._transform._quantize_fn import QuantizedFunction
from ._matrices import checked_damping, damped, nearest, of_each
from ._model import model_of
from ._rounding import Shown, rounded

_BLOCK = 128  # rows whose errors are made up for one by one; those before them in one product of matrices


def _factor(products: Array) -> Array:
    """(K, K) strictly lower: what row i makes up for of the error of row j, in the order of the rows.

    With H = R R^T, R upper, the squared error is |R^T E|^2, whose row i is R_ii E_i + sum of R_ji E_j over j < i. So
    row i is rounded where its share would be 0. This is GPTQ, whose H^-1 has the Cholesky factor R^-1, without the
    inverse.
    """
    lower = jnp.linalg.cholesky(products[::-1, ::-1])
    return jnp.tril((lower / jnp.diagonal(lower)[None]).T[::-1, ::-1], -1)


def _rounded(w: Array, factor: Array, grid: Grid) -> Array:
    """The levels of a weight (K, N), row after row."""
    k, size = len(w), min(_BLOCK, len(w))
    last = -k % size  # rows of zeros
    pad = lambda v, value=0.0: jnp.pad(v, ((0, last), (0, 0)), constant_values=value)
    w, grid = pad(w), of_each(functools.partial(pad, value=1), grid)
    factor = jnp.pad(factor, ((0, last), (0, last)))

    def block(b, state):
        at = lambda v: lax.dynamic_slice_in_dim(v, b * size, size)
        rows, original, of_block = at(factor), at(w), of_each(at, grid)
        own = lax.dynamic_slice_in_dim(rows, b * size, size, 1)
        targets = original + matmul(rows, state.errors)

        def row(errors, i):
            of_row = of_each(lambda v: v[i], of_block)
            level = nearest(targets[i] + matmul(own[i], errors), of_row)
            return errors.at[i].set(original[i] - of_row.value(level)), level

        new = _Rows(*lax.scan(row, jnp.zeros_like(original), jnp.arange(size)))
        return jax.tree.map(lambda v, part: lax.dynamic_update_slice_in_dim(v, part, b * size, 0), state, new)

    start = _Rows(jnp.zeros_like(w), jnp.zeros_like(w))
    return lax.fori_loop(0, len(w) // size, block, start).levels[:k]


class _Rows(NamedTuple):
    """The errors of rows that are rounded, 0 for others, and their levels."""

    errors: Array
    levels: Array


@dataclasses.dataclass(frozen=True)
class InOrderOfRows:
    """Levels row after row; `activation_order`: those with the largest inputs first."""

    activation_order: bool = True

    def __call__(self, w: Array, products: Array, grid: Grid, damping: float = 0.01) -> Array:
        order = jnp.argsort(-jnp.diagonal(products)) if self.activation_order else jnp.arange(len(w))
        factor = _factor(damped(products, damping)[order][:, order])
        levels = _rounded(w[order], factor, of_each(lambda v: v[order], grid))
        return jnp.zeros_like(levels).at[order].set(levels)


def gptq(
    params: PyTree,
    q: QuantizedFunction,
    grams: Mapping[str, Gram],
    *args: Any,
    qparams: Mapping[str, Any] | None,
    damping: float = 0.01,
    activation_order: bool = True,
    freeze: bool = False,
    progress: Shown = None,
    **kwargs: Any,
) -> PyTree:
    """Rounds weights so that the layer's output is off by little, not each weight: GPTQ.

    The rows of a weight, along what is contracted, are rounded one after the other, and what is not yet rounded makes
    up for the error so far, as the second moments of the inputs say. The scales of `qparams` stay. A column of
    which the nearest levels have a smaller error gets these: no column ends up worse than by rounding to nearest.

    Args:
      params: the parameters of the function, in float.
      q: what `quantize_fn` returned.
      grams: {path: Gram}, as `q.observe(params, ..., gram=True)` gives it. These weights are solved, the others stay.
      *args, **kwargs: the other arguments of the function; shapes suffice.
      qparams: {entry: QParams or None} with the grid of each weight that is solved, of `solve.ranges` or
        `q.init_qparams`.
      damping: number >= 0, added to the diagonal of the second moments as a multiple of its mean.
      activation_order: static bool. True rounds the rows with the largest inputs first; the scales do not depend on it.
      freeze: static bool. True gives these weights as `q.freeze` does, in integers, so that no more than one of them is
        in float at a time; `q.freeze` of the result freezes the others.
      progress: (path, before, after) -> None, called after each weight with the squared error of its layer's output,
        relative to the output, by rounding to nearest and as it is now; and with NaN for a matrix that no row has met,
        such as "path[1]" of an expert without tokens, which is rounded to nearest. True shows a bar, by tqdm.

    Returns:
      The params, with weights that lie on the grid of `qparams`: `q.freeze(params, ..., qparams=qparams)` has the
      levels that were chosen, and `q(params, ..., qparams=qparams)` their values.

    Gradient: none.

    Raises:
      TypeError: for an argument of another kind.
      ValueError: for a Gram of another model, without rows, with NaN, or singular without damping; for a weight
        without qparams, with NaN, that is integers already, or that something reads of which there is no Gram, such as
        a gather of a tied embedding; and for bfloat16 weights with more than 8 bits.

    Source: Frantar et al., 2022, "GPTQ", in the form of Babai's nearest plane algorithm.

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import quantize_fn, solve, weight_spec
    >>> q = quantize_fn(lambda params, x: x @ params["w"], [("w", weight_spec(4))])
    >>> params = {"w": jax.random.normal(jax.random.key(0), (8, 4))}
    >>> x = jax.random.normal(jax.random.key(1), (32, 4)) @ jax.random.normal(jax.random.key(2), (4, 8))
    >>> grams = q.observe(params, x, gram=True)
    >>> qparams = solve.ranges(params, q, grams, x)
    >>> solved = solve.gptq(params, q, grams, x, qparams=qparams)
    >>> error = lambda rounded: jnp.square(q(rounded, x, qparams=qparams) - x @ params["w"]).sum().item()
    >>> error(solved) < error(params) / 2
    True
    """
    levels, damping = InOrderOfRows(checks.static_bool("activation_order", activation_order)), checked_damping(damping)
    return rounded(model_of(params, q, grams, args, kwargs, qparams), levels, [damping], freeze, progress)
