# SPDX-License-Identifier: Apache-2.0
"""Factors of channels moved from activations into weights, where the function stays the same."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._arrays._fit import fit_qparams
from .._arrays._gram import Gram, relative, squared_errors
from .._base import _checks as checks
from .._base._checks import PyTree
from .._paths import with_leaves, with_paths
from .._spec._granularity import PerToken
from .._spec._spec import QuantSpec
from .._transform._quantize_fn import QuantizedFunction
from ._folds import Operands, folded, in_words, is_whole, largest, of_channels, operands_of
from ._graph._folding import Fold, Refused
from ._matrices import Form, array, grid_in_matrices, nearest
from ._mesh import changed_leaves
from ._model import Model, Weight, model_of, shapes_of

_ALPHAS = tuple(i / 10 for i in range(11))
_SPREAD = 4.0  # root mean squares of a channel that its range is taken to reach, on both sides

Progress = Callable[[str, float | None, float, float], None]  # (path, alpha, error before, error after)


class _Taken(NamedTuple):
    """A weight as it is so far, and the number of the factor of each of its rows, or -1.

    Of one that makes the inputs of others, and so is divided by the factors: of each of its columns.
    """

    leaf: Array
    gram: Gram
    ids: Any

    def of_rows(self, s: Array) -> Array:
        """The factor of each row."""
        return jnp.where(self.ids < 0, 1, s[self.ids])

    def divided(self, s: Array) -> Gram:
        """The moments of the inputs, divided by the factors."""
        own, (products, rows, sums) = self.of_rows(s), self.gram
        return Gram(products / (own[..., :, None] * own[..., None, :]), rows, sums / own)


@jax.jit
def _divided(taken: tuple[_Taken, ...], s: Array) -> list[Gram]:
    return [one.divided(s) for one in taken]


def _errors(taken: _Taken, s: Array, form: Form, activation: QuantSpec | None) -> tuple[Array, Array]:
    """The squared error of a layer as it is predicted with the factors s, (count,); and the square of its output."""
    gram = taken.divided(s)
    dtype = gram.products.dtype
    original = form.matrices(taken.leaf.astype(dtype))
    w = form.by_columns(original * taken.of_rows(s)[..., None])
    qparams = fit_qparams(form.parameter(w).astype(taken.leaf.dtype), form.spec)
    grid = grid_in_matrices(form, qparams, dtype)
    error = squared_errors(grid.value(nearest(w, grid)) - w, gram.products).sum()
    if activation is not None and not activation.format:  # the error of a float is relative: no factor changes it
        error = error + _of_activation(w, gram, form, activation)
    return error, squared_errors(original, taken.gram.products).sum()


def _errors_before(before: _Taken, s: Array, form: Form) -> Array:
    """The mean squared error of each channel that a weight makes which is divided by the factors s, (count,)."""
    (leaf, gram, ids), count = before, len(s)
    dtype = gram.products.dtype
    w = form.matrices(leaf.astype(dtype)) / jnp.where(ids < 0, 1, s[ids])[..., None, :]
    grid = grid_in_matrices(form, fit_qparams(form.parameter(w).astype(leaf.dtype), form.spec), dtype)
    error = squared_errors(grid.value(nearest(w, grid)) - w, gram.products) / jnp.maximum(gram.rows, 1)[..., None]
    places = jnp.broadcast_to(jnp.where(ids < 0, count, ids), error.shape)
    return jax.ops.segment_sum(error.reshape(-1), places.reshape(-1), count + 1)[:count]


def _of_activation(w: Array, gram: Gram, form: Form, spec: QuantSpec) -> Array:
    """The error of the output by rounding the inputs, if that is uniform noise of one step."""
    turns = sum(move.primitive is None for move in form.layout.moves)
    rows = jnp.maximum(gram.rows, 1)[..., None]
    sizes = jnp.sqrt(jnp.diagonal(gram.products, axis1=-2, axis2=-1) / rows)
    alike = (-1,) if spec.granularity == PerToken() else tuple(range(turns, sizes.ndim))
    step = 2 * _SPREAD * sizes.max(alike, keepdims=True) / (spec.qmax - spec.qmin)
    return (rows * step**2 / 12 * (w**2).sum(-1)).sum()


def _factors(a: Array, w: Array, alpha: float, turns: int) -> Array:
    """a^alpha / w^(1 - alpha), with geometric mean 1 in each turn; 1 where a channel is 0."""
    is_known = (a > 0) & (w > 0)
    log = lambda v: jnp.log(jnp.where(is_known, v, 1))
    exponent = (alpha * log(a) - (1 - alpha) * log(w)).reshape(turns, -1)
    is_known = is_known.reshape(turns, -1)
    mean = exponent.sum(1, keepdims=True) / jnp.maximum(is_known.sum(1, keepdims=True, dtype=a.dtype), 1)
    return jnp.where(is_known, jnp.exp(exponent - mean), 1).reshape(-1)


def _ids(weight: Weight, factors: np.ndarray, sign: int = -1) -> np.ndarray:
    """The number of the factor of each row of the matrices of a weight; for sign 1 of each column. -1 for none."""
    layout = weight.form.layout
    with jax.ensure_compile_time_eval():
        numbers = np.broadcast_to(np.int32(sign * factors), layout.shape)
        each = np.asarray(layout.matrices(jax.device_put(numbers.copy())))
        return np.maximum(each[..., 0] if sign < 0 else each[..., 0, :], 0) - 1


class _Best(NamedTuple):
    """The factors that were found, the place of their alpha, and the relative error without and with them."""

    s: Array
    at: Array
    before: Array
    after: Array


class _Forms(NamedTuple):
    """The static part of a set.

    Attributes:
      taken: the form of each weight, and the spec of its inputs.
      before: the form of each weight before them.
    """

    taken: tuple[tuple[Form, QuantSpec | None], ...]
    before: tuple[Form, ...]


class _Set(NamedTuple):
    """Weights that take the same inputs, as they are so far, and the quantized weights that make these inputs."""

    taken: tuple[_Taken, ...]
    before: tuple[_Taken, ...]


@functools.partial(jax.jit, static_argnames="forms")
def _error(these: _Set, s: Array, forms: _Forms) -> Array:
    """The sum of their errors, relative to the squares of their outputs; with those that come from before."""
    each = zip(these.taken, forms.taken, strict=True)
    errors, wholes = zip(*(_errors(taken, s, *own) for taken, own in each), strict=True)
    return relative(jnp.stack(errors).sum() + _from_before(these, s, forms), jnp.stack(wholes).sum())


def _from_before(these: _Set, s: Array, forms: _Forms) -> Array:
    """The error of the outputs by the weights before, channel by channel, through the rows that take them."""
    total = jnp.zeros((), s.dtype)
    for before, own in zip(these.before, forms.before, strict=True):
        errors = _errors_before(before, s, own)
        for taken, (form, _) in zip(these.taken, forms.taken, strict=True):
            rows = jnp.square(form.matrices(taken.leaf.astype(s.dtype))).sum(-1)
            squares = jnp.where(taken.ids < 0, 0, rows * (errors * s**2)[taken.ids])
            total += (squares * taken.gram.rows[..., None]).sum()
    return total


@functools.partial(jax.jit, static_argnames=("forms", "size", "turns", "alphas"))
def _best(these: _Set, w: Array, forms: _Forms, size: int, turns: int, alphas: tuple[float | None, ...]) -> _Best:
    """The factors with the least error, for the largest magnitude of each row; None as an alpha is no change."""
    _, gram, ids = these.taken[0]
    total = lambda v: of_channels(jax.ops.segment_sum, jnp.broadcast_to(v, ids.shape), ids + 1, 1, size)
    squares = total(jnp.diagonal(gram.products, axis1=-2, axis2=-1))
    a = jnp.sqrt(squares / jnp.maximum(total(gram.rows[..., None]), 1))
    same = jnp.ones_like(a)
    known = [jnp.asarray(alpha, a.dtype) for alpha in alphas if alpha is not None]
    tried = jax.vmap(lambda alpha: _factors(a, w.astype(a.dtype), alpha, turns))(jnp.stack(known))
    tried = jnp.concatenate([*(same[None] for alpha in alphas if alpha is None), tried, same[None]])
    *_, before = errors = jax.lax.map(lambda s: _error(these, s, forms), tried)
    at = jnp.argmin(jnp.where(jnp.isfinite(errors), errors, jnp.inf)[:-1])
    return _Best(tried[at], at, before, errors[at])


class _Smoothing:
    """A model whose weights are smoothed one set after the other: its parameters and second moments so far."""

    def __init__(self, model: Model, operands: Operands, alpha: float | None, report: Progress | None):
        self.model, self.operands, self.report = model, operands, report
        self.alphas = (None, *_ALPHAS) if alpha is None else (alpha,)
        self.leaves: dict[str, Any] = {}
        self.grams: dict[str, Gram] = {}
        self.done: set[str] = set()

    def smoothed(self, unfolded: str, leaves: dict[str, Any], grams: dict[str, Gram]) -> dict[str, Any]:
        """The parameters with all sets of weights smoothed, one after the other."""
        self.leaves, self.grams = dict(leaves), dict(grams)
        for weight in self.model.weights:
            if weight.path not in self.done:
                found = self.operands.fold(weight.path)
                found = found if isinstance(found, Refused) else self._unseen(found) or found
                if isinstance(found, Fold):
                    self.smooth(weight, found)
                elif unfolded == "leave":
                    self.leave(weight)
                else:
                    raise ValueError(
                        f'{in_words(weight.path, found)} Pass unfolded="leave", leave it out of `grams`, or give its '
                        f"inputs a gain by solve.with_gains(f, {weight.path!r})."
                    )
        return self.leaves

    def smooth(self, weight: Weight, found: Fold) -> None:
        """Smooths the weights that take the inputs of this one."""
        takes_them = set(found.paths(-1)) - {weight.path}
        weights = [weight, *(other for other in self.model.weights if other.path in takes_them)]
        these, forms = self._set(weights, found)
        w = largest(self.leaves, found, [other.path for other in weights], -1)
        best = _best(these, w, forms, found.size, found.size // found.channels, self.alphas)
        is_traced = isinstance(best.at, jax.core.Tracer)
        alpha = None if is_traced else self.alphas[int(best.at)]
        if alpha is not None or is_traced:
            self._fold(found, weights, these, best.s)
        whole = [other.path for other in weights if is_whole(found, other.path)]
        self._note([path for path in whole if path not in self.done], alpha, best.before, best.after)
        self.done.update(whole)

    def _unseen(self, found: Fold) -> Refused | None:
        """Why not, where factors would change the error of quantized weights, and nobody could say how."""
        for path, factors in found.factors.items():
            entry = self.model.entries.of.get(path)
            if entry is None or not entry.is_weight:
                continue
            if entry.reads and entry.rule.everywhere:
                return Refused(f"{path!r} would change, too, which {entry.reads[0]!r} reads and no Gram sees")
            groups = entry.groups or (1,) * factors.ndim
            each = zip(groups, self.leaves[path].shape, factors.shape, strict=True)
            has_own_scales = all(g == n for g, n, of in each if of > 1)
            if path not in self.grams and not has_own_scales:
                return Refused(f"the quantized {path!r} would change, too, of which there is no Gram")
        return None

    def leave(self, weight: Weight) -> None:
        """Leaves a weight as it is."""
        these, forms = self._set([weight], None)
        error = _error(these, np.ones(1, np.float32), forms)
        self._note([weight.path], None, error, error)

    def _set(self, weights: Sequence[Weight], found: Fold | None) -> tuple[_Set, _Forms]:
        factors = {} if found is None else found.factors
        nothing = np.zeros((), int)
        before = [weight for weight in self.model.weights if (factors.get(weight.path, nothing) > 0).any()]
        state = lambda weight: (array(self.leaves[weight.path]), self.grams[weight.path])
        taken = (_Taken(*state(weight), _ids(weight, factors.get(weight.path, nothing))) for weight in weights)
        made_by = (_Taken(*state(weight), _ids(weight, factors[weight.path], 1)) for weight in before)
        activation = lambda weight: self.model.entries.of[weight.path].rule.activation
        forms = _Forms(tuple((w.form, activation(w)) for w in weights), tuple(w.form for w in before))
        return _Set(tuple(taken), tuple(made_by)), forms

    def _fold(self, found: Fold, weights: Sequence[Weight], these: _Set, s: Array) -> None:
        self.leaves |= folded(self.operands.graph, self.leaves, found.factors, s)
        self.grams |= zip((weight.path for weight in weights), _divided(these.taken, s), strict=True)

    def _note(self, paths: Sequence[str], alpha: float | None, before: Array, after: Array) -> None:
        if self.report is not None and not isinstance(after, jax.core.Tracer):
            for path in paths:
                self.report(path, alpha, float(before), float(after))


def smooth(
    params: PyTree,
    q: QuantizedFunction,
    grams: Mapping[str, Gram],
    *args: Any,
    alpha: float | None = None,
    unfolded: str = "leave",
    progress: Progress | None = None,
    **kwargs: Any,
) -> PyTree:
    """Moves factors of the channels of inputs into the weights that take them, and leaves the function as it is.

    Row k of a weight is multiplied by s_k, and what makes its input k is divided by it: the gain of a norm, the columns
    and the bias of the layer before, with a relu between; the columns of the values of an attention; one half of a
    gated layer. All weights that take the same inputs, such as q, k and v, are multiplied together:

        s_k = a_k^alpha / w_k^(1 - alpha)

    with a_k the root mean square of input k and w_k the largest magnitude of row k in all these weights, normalised to
    a geometric mean of 1. Inputs with a few large channels become easy to round; with weights alone quantized, rows
    that meet large inputs are rounded more finely.

    Args:
      params: the parameters of the function, in float.
      q: what `quantize_fn` returned.
      grams: {path: Gram}, as `q.observe(params, ..., gram=True)` gives it. These weights are smoothed. Where a
        quantized weight would change that has no Gram here, and no scale for each channel that changes, nothing is
        folded.
      *args, **kwargs: the other arguments of the function; shapes suffice.
      alpha: static number in [0, 1]; or None, which takes the best of 0, 0.1, ..., 1 and of no change, for each set of
        weights, by the squared error of their outputs: of the weights on their min-max grid; of the weights before
        them that are divided, also on their grid; and, where the rule quantizes the inputs to integers, of uniform
        rounding noise in these, whose range is taken as 4 times the root mean square of the largest channel.
      unfolded: static. "leave" leaves weights as they are for whose inputs no parameter can make up; "error" raises.
        `solve.with_gains` gives such inputs a product that absorbs the factor, and stays in the program.
      progress: (path, alpha, before, after) -> None, called for each weight with the predicted squared error of its
        output, and of the others that take the same inputs, relative to the output. Alpha is None where it stays as it
        is: because nothing can be folded, or no alpha is better.

    Returns:
      The params, of the same dtypes. The function gives the same results up to rounding; observe it anew for
      ranges and Grams.

    Gradient: none.

    Raises:
      TypeError: for an argument of another kind.
      ValueError: as `solve.gptq`, for Grams; for alpha outside [0, 1]; and with unfolded="error" for a weight whose
        inputs come out of something that passes no factor, such as a gelu, or go elsewhere, too, such as a residual.

    Source: Xiao et al., 2022, "SmoothQuant"; the search as in Lin et al., 2023, "AWQ".

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import Rule, activation_spec, quantize_fn, solve, weight_spec
    >>> f = lambda params, x: (x * params["gain"]) @ params["w"]
    >>> q = quantize_fn(f, [Rule("w", weight_spec(8), activation_spec(8))])
    >>> params = {"gain": jnp.ones((1, 8)).at[0, 0].set(100.0), "w": jax.random.normal(jax.random.key(0), (8, 4))}
    >>> x = jax.random.normal(jax.random.key(1), (32, 8))
    >>> smoothed = solve.smooth(params, q, q.observe(params, x, gram=True), x)
    >>> error = lambda params: jnp.square(q(params, x) - f(params, x)).sum().item()
    >>> error(smoothed) < error(params) / 4
    True
    """
    checks.one_of("unfolded", unfolded, ("leave", "error"))
    if alpha is not None:
        alpha = checks.static_float("alpha", alpha, "one call for each")
        if not 0 <= alpha <= 1:
            raise ValueError(f"`alpha` must be in [0, 1], got {alpha}. Pass 0.5, or None to search it.")
    model = model_of(params, q, grams, args, kwargs, None)
    operands = operands_of(q.program(shapes_of(params), args, kwargs), params)
    state = _Smoothing(model, operands, alpha, progress)
    smoothed = functools.partial(state.smoothed, unfolded)
    leaves = changed_leaves(smoothed, operands.leaves, {weight.path: weight.gram for weight in model.weights})
    return with_leaves(params, [leaves[path] for path, _ in with_paths(params)])
