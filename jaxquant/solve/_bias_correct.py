# SPDX-License-Identifier: Apache-2.0
"""The mean of what rounding a weight does to its layer's output, made up for by the bias of the layer."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._arrays._gram import Gram, matmul, relative, squared_errors
from .._base import _checks as checks
from .._base import _numerics as num
from .._base._checks import PyTree
from .._paths import is_qarray, with_leaves, with_paths
from .._transform._layout import layout_of
from .._transform._quantize_fn import QuantizedFunction
from .._transform._source import Program
from ._folds import narrowed
from ._graph._biases import Contracted, NoBiasError, biases
from ._graph._factors import Factors
from ._graph._graph import Graph
from ._matrices import Form, array
from ._mesh import changed_leaves
from ._model import Model, Weight, model_of, shapes_of

Progress = Callable[[str, str | None, float, float], None]  # (path, why it is left, error before, error after)


class _Error(NamedTuple):
    """The error of an output: its mean (..., N), and sums of squares of the error, of this mean, and of the output."""

    mean: Array
    whole: Array
    of_mean: Array
    output: Array


@functools.partial(jax.jit, static_argnames="form")
def _error(leaf: Array, lost: Array, gram: Gram, form: Form) -> _Error:
    w, lost = (form.matrices(v.astype(gram.products.dtype)) for v in (leaf, lost))
    mean = matmul(gram.sums[..., None, :], lost)[..., 0, :] / gram.rows[..., None]
    squares = lambda v: squared_errors(v, gram.products).sum()
    return _Error(mean, squares(lost), (gram.rows[..., None] * mean**2).sum(), squares(w))


class _Found(NamedTuple):
    """By the path of each weight: its biases, with the channels that they are added to; or why there is none."""

    biases: dict[str, dict[str, Factors]]
    why: dict[str, str]


def _contractions(program: Program, weight: Weight) -> list[Contracted]:
    """The ops that take a weight."""
    found = []
    for location, decision in program.decisions.of.items():
        for side, choice in () if decision.contraction.in_condition else enumerate(decision.operands):
            if choice.is_weight and weight.path in choice.keys:
                layout = layout_of(decision, side, weight.form.layout.shape)
                if layout != weight.form.layout:
                    raise NoBiasError("several ops take it, with its elements in different orders")
                found.append(Contracted(location, side, choice.operand.origin.stack, layout.matrix))
    return found


def _found(model: Model, program: Program) -> _Found:
    """The biases of all weights; raises if there is none."""
    graph, leaves, found = Graph(program.jaxpr, program.paths), dict(with_paths(model.params)), _Found({}, {})
    for weight in model.weights:
        try:
            own = biases(graph, _contractions(program, weight))
            for path in own:
                if is_qarray(leaves[path]) or not checks.is_float(leaves[path].dtype):
                    raise NoBiasError(f"its bias {path!r} is no array of floats")
            found.biases[weight.path] = own
        except NoBiasError as error:
            found.why[weight.path] = str(error)
    if not found.biases:
        path, why = next(iter(found.why.items()))
        raise ValueError(
            f"no weight of `grams` has a bias that can make up for its error. At {path!r}: {why}. Leave `bias_correct` "
            "out, fold norms first (`solve.fold_norms`, statistics among the params), or give the function a "
            "bias for each channel of an output."
        )
    return found


def _corrected(found: _Found, leaves: Mapping[str, Any], errors: dict[str, _Error]) -> dict[str, Array]:
    """The biases with the means of the errors of all weights whose outputs they are added to."""
    biases = {bias: array(leaves[bias]) for own in found.biases.values() for bias in own}
    channels = {path: {bias: np.int32(of) for bias, of in own.items()} for path, own in found.biases.items()}
    new = _with_means(biases, {path: errors[path].mean for path in channels}, channels)
    return {path: narrowed(path, v, leaves[path].dtype) for path, v in new.items()}


@jax.jit
def _with_means(biases: dict[str, Array], means: dict[str, Array], channels: dict[str, dict[str, Array]]) -> PyTree:
    """Biases with what is added to each of their elements, by the number of its channel and its sign; widened."""
    new = {path: bias.astype(num.compute_dtype(bias.dtype)) for path, bias in biases.items()}
    for path, own in channels.items():
        mean = jnp.concatenate([jnp.zeros(1, means[path].dtype), means[path].reshape(-1)])
        for bias, numbers in own.items():
            new[bias] += (mean[jnp.abs(numbers)] * jnp.sign(numbers).astype(mean.dtype)).astype(new[bias].dtype)
    return new


def _report(progress: Progress, path: str, why: str | None, error: _Error) -> None:
    whole, of_mean, output = (np.asarray(v).sum() for v in error[1:])  # over the turns of scans
    share = lambda v: float(relative(np.maximum(v, 0), output))
    progress(path, why, share(whole), share(whole - of_mean if why is None else whole))


def bias_correct(
    params: PyTree,
    q: QuantizedFunction,
    grams: Mapping[str, Gram],
    *args: Any,
    qparams: Mapping[str, Any] | None = None,
    solved: PyTree = None,
    progress: Progress | None = None,
    **kwargs: Any,
) -> PyTree:
    """Adds to each bias what rounding the weights before it takes from its layer's output on average.

    For a weight W of which W_q is served, and inputs x with these Grams, the bias becomes

        b + mean(x) @ (W - W_q)

    so that the mean of the error over these inputs is 0 in each channel of the output; the rest of the error stays as
    it is. The weights stay as they are. A bias is a parameter that is added to the output of a weight, or subtracted,
    with one element for each of its channels, whether other values are added before it or not: of a dense layer, of
    the heads of an attention, of a convolution, or the mean of a batch norm behind one. A bias that several weights
    share absorbs the errors of all, if their outputs are summed.

    Args:
      params: the parameters of the function, in float.
      q: what `quantize_fn` returned.
      grams: {path: Gram}, as `q.observe(params, ..., gram=True)` gives it. The biases behind these weights are
        corrected.
      *args, **kwargs: the other arguments of the function; shapes suffice.
      qparams: {entry: QParams or None} with the grid of each weight; read where `solved` is None.
      solved: the params that are served, such as `solve.gptq` gives them, also with weights in integers; None is the
        weights rounded to nearest.
      progress: (path, why, before, after) -> None, called for each weight with the squared error of its layer's output,
        relative to the output. `why` is None where its biases are corrected; else it says what stands before a bias,
        what else the bias is used for, or that there is none, and both errors are equal. None warns of the weights
        that are left, with the reason for the first one.

    Returns:
      `solved`, or `params` if that is None, with new biases of the same dtypes. These are made of the biases of
      `params`, so that a second call changes nothing.

    Gradient: none.

    Raises:
      TypeError: for an argument of another kind.
      ValueError: as `solve.gptq`, for Grams and qparams; for `solved` of another model; and if no weight has a bias
        that can be corrected, with the reason for the first one.

    Source: Nagel et al., 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section 4.2,
    with means that are observed; Finkelstein et al., 2019, "Fighting Quantization Bias With Bias".

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import quantize_fn, solve, weight_spec
    >>> f = lambda params, x: x @ params["w"] + params["b"]
    >>> q = quantize_fn(f, [("w", weight_spec(3))])
    >>> params = {"w": jax.random.normal(jax.random.key(0), (8, 4)), "b": jnp.zeros((1, 4))}
    >>> x = 1 + jax.random.normal(jax.random.key(1), (32, 8))
    >>> grams, qparams = q.observe(params, x, gram=True), q.init_qparams(params, x)
    >>> corrected = solve.bias_correct(params, q, grams, x, qparams=qparams)
    >>> error = lambda new: jnp.abs((q(new, x, qparams=qparams) - f(params, x)).mean(0)).max().item()
    >>> error(params) > 0.1, error(corrected) < 1e-5
    (True, True)
    """
    model = model_of(params, q, grams, args, kwargs, qparams).serving(solved)
    found = _found(model, q.program(shapes_of(params), args, kwargs))
    if found.why and progress is None:
        path, why = next(iter(found.why.items()))
        warnings.warn(
            f"bias_correct leaves {len(found.why)} of {len(model.weights)} weights as they are. At {path!r}: {why}. "
            "`progress=` is told the reason for each.",
            stacklevel=2,
        )

    def solve(weight: Weight) -> _Error:
        return _error(array(weight.leaf), weight.lost(), weight.gram, weight.form)

    errors = model.found(solve)
    leaves = dict(with_paths(model.params))
    new = changed_leaves(functools.partial(_corrected, found), leaves, errors)
    if progress is not None and not any(isinstance(v, jax.core.Tracer) for v in jax.tree.leaves(errors)):
        for path, error in errors.items():
            _report(progress, path, found.why.get(path), error)
    served = params if solved is None else solved
    biases = {bias for own in found.biases.values() for bias in own}
    return with_leaves(served, [new[path] if path in biases else leaf for path, leaf in with_paths(served)])
