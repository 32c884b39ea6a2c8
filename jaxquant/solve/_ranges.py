# SPDX-License-Identifier: Apache-2.0
"""The scales of weights with which the output of their layers is off least."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._arrays._fit import fit_qparams
from .._arrays._gram import Gram, matmul, squared_errors
from .._arrays._grid import Grid
from .._arrays._qparams import QParams
from .._base import _checks as checks
from .._base._checks import PyTree
from .._base._groups import broadcast_groups, reduce_groups
from .._spec._spec import qparams_shape
from .._transform._quantize_fn import QuantizedFunction
from ._gptq import InOrderOfRows
from ._matrices import Form, array, grid_in_matrices, nearest
from ._model import model_of
from ._rounding import over_matrices

# Scales to try, as fractions of the scale of min-max, which stays where no other is better.
_RATIOS = np.concatenate([[1.0], np.geomspace(1.1, 0.2, 48)]).astype(np.float32)


def _of_group(form: Form, products: Array) -> Array:
    """The second moments of inputs that meet one group of a weight, which has a scale; 0 between groups."""
    shape = form.layout.shape
    groups = qparams_shape(form.spec, shape)
    ids = jnp.arange(np.prod(groups, dtype=int), dtype=jnp.int32).reshape(groups)
    ids = form.matrices(jnp.broadcast_to(broadcast_groups(ids, shape), shape))[..., 0]
    return jnp.where(ids[..., :, None] == ids[..., None, :], products, 0)


class _Search(NamedTuple):
    """A comparison of scales: (w, products, grid) -> levels; (error, products) -> the cost of each element; ratios."""

    levels: Callable[[Array, Array, Grid], Array]
    costs: Callable[[Array, Array], Array]
    ratios: np.ndarray = _RATIOS


def _diagonal(products: Array) -> Array:
    return jnp.diagonal(products, axis1=-2, axis2=-1)[..., None]


def _each_of_column(error: Array, products: Array) -> Array:
    """The cost of its column, to which all rows have come together."""
    return jnp.broadcast_to(squared_errors(error, products)[..., None, :], error.shape)


_METHODS = {
    "diagonal": _Search(lambda w, _, grid: nearest(w, grid), lambda error, products: _diagonal(products) * error**2),
    "full": _Search(lambda w, _, grid: nearest(w, grid), lambda error, products: error * matmul(products, error)),
    "gptq": _Search(
        functools.partial(over_matrices, InOrderOfRows()),
        _each_of_column,
        np.array([1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4], np.float32),
    ),
}


@functools.partial(jax.jit, static_argnames=("form", "method"))
def _searched(leaf: Array, gram: Gram, form: Form, method: str) -> QParams:
    """The qparams with the least error of those with a shrunken scale, for each group."""
    spec, dtype, search = form.spec, gram.products.dtype, _METHODS[method]
    start, w = fit_qparams(leaf, spec), form.matrices(leaf.astype(dtype))
    products = _of_group(form, gram.products) if method == "full" else gram.products

    def candidate(ratio: Array) -> Array:
        scale = start.scale * ratio
        if not spec.has_tensor_scale:
            return scale
        # The scale of the tensor is derived from the largest, which stays.
        largest = start.scale.max()
        return jnp.where(start.scale == largest, largest, jnp.minimum(scale, largest))

    def step(best: tuple[Array, Array], ratio: Array) -> tuple[tuple[Array, Array], None]:
        scale = candidate(ratio)
        grid = grid_in_matrices(form, QParams(scale, start.zero_point), dtype)
        cost = form.parameter(search.costs(grid.value(search.levels(w, products, grid)) - w, products))
        cost = reduce_groups(jnp.sum, cost, scale.shape)
        is_better = cost < best[0]
        return (jnp.where(is_better, cost, best[0]), jnp.where(is_better, scale, best[1])), None

    none = jnp.full(start.scale.shape, jnp.inf, dtype), start.scale
    (_, scale), _ = lax.scan(step, none, jnp.asarray(search.ratios))

    def of_columns(scale: Array) -> Array:
        """The error of the columns that take part in each group."""
        grid = grid_in_matrices(form, QParams(scale, start.zero_point), dtype)
        error = squared_errors(grid.value(search.levels(w, gram.products, grid)) - w, gram.products)
        each = form.parameter(jnp.broadcast_to(error[..., None, :], w.shape))
        return reduce_groups(jnp.sum, each, scale.shape)

    # A cost by rows or groups does not see how they depend on each other; a column that is worse off keeps min-max.
    is_worse = of_columns(scale) > of_columns(start.scale)
    return QParams(jnp.where(is_worse, start.scale, scale), start.zero_point)


def ranges(
    params: PyTree,
    q: QuantizedFunction,
    grams: Mapping[str, Gram],
    *args: Any,
    method: str = "diagonal",
    qparams: Mapping[str, Any] | None = None,
    progress: bool = False,
    **kwargs: Any,
) -> dict[str, QParams | None]:
    """The scales of weights with which the output of their layers is off least, of those below min-max.

    What "mse" of `fit_qparams` is for the error of the weights, this is for the error of the layer. The zero points of
    affine weights are as min-max has them.

    Args:
      params: the parameters of the function, in float.
      q: what `quantize_fn` returned.
      grams: {path: Gram}, as `q.observe(params, ..., gram=True)` gives it. These weights get a scale.
      *args, **kwargs: the other arguments of the function; shapes suffice.
      method: static. "diagonal" weights the squared error of each row of a weight with the mean square of its input;
        "full" also takes into account how the inputs of one group depend on each other, at the cost of a product of
        (K, K) and (K, N) for each of 49 scales. "gptq" compares what `solve.gptq` makes of 11 scales, one ratio for all
        groups of a column: the scales to hand to it at 2 and 3 bits.
      qparams: {entry: QParams or None} to take all other entries from, such as the static ranges of inputs; None leaves
        them dynamic.
      progress: static bool. True shows a bar, by tqdm.

    Returns:
      {entry: QParams or None} of all entries of the function, for `solve.gptq`, `q.freeze` and calls.

    Gradient: none.

    Raises:
      TypeError: for an argument of another kind.
      ValueError: as `solve.gptq`, for Grams; and for another method.

    Source: Nagel et al., 2021, "A White Paper on Neural Network Quantization", section 3.1, with the layer's error.

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import quantize_fn, solve, weight_spec
    >>> q = quantize_fn(lambda params, x: x @ params["w"], [("w", weight_spec(4))])
    >>> params, x = {"w": jnp.array([[1.0, 1.0], [0.1, 7.0]])}, jnp.array([[0.1, 0.0], [0.0, 10.0]])
    >>> found = solve.ranges(params, q, q.observe(params, x, gram=True), x)
    >>> [round(s, 2) for s in found["w"].scale.ravel().tolist()]
    [0.1, 1.0]
    """
    checks.one_of("method", method, tuple(_METHODS))
    progress = checks.static_bool("progress", progress)
    model = model_of(params, q, grams, args, kwargs, qparams).seen_whole()
    if qparams is not None:
        model.entries.same_keys("qparams", "q.init_qparams(params, ...)", qparams, ())
    new = model.found(lambda weight: _searched(array(weight.leaf), weight.gram, weight.form, method), progress=progress)
    of = {path: found._replace(spec=model.entries.of[path].spec) for path, found in new.items()}
    return {key: (qparams or {}).get(key) for key in model.entries.of} | of
