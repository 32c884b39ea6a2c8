# SPDX-License-Identifier: Apache-2.0
"""The model that a solver is called with: its weights with grids and moments, checked, and solved one by one."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._arrays._affine import fake_quant
from .._arrays._gram import Gram, squared_errors
from .._arrays._qarray import real_values
from .._arrays._qparams import QParams
from .._arrays._tally import to_nearest
from .._base import _checks as checks
from .._base._bar import in_bar
from .._base._checks import PyTree
from .._params import refuse_lost_scales, refuse_not_finite
from .._paths import is_qarray, named_in_errors, with_leaves, with_paths
from .._spec._granularity import granularity_of
from .._spec._spec import qparams_shape
from .._transform._entries import Entries
from .._transform._freezing import freeze_leaf
from .._transform._layout import Layout
from .._transform._quantize_fn import QuantizedFunction
from ._matrices import Form, array
from ._mesh import room_for, sharding_of, with_automatic_axes


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight that a solver changes.

    Attributes:
      path, form: of the weight; path[i] of a turn of a scan.
      leaf: its values, or what they are read from.
      gram: its second moments.
      qparams: its grid; None where it is not given.
      served: its values as they are served, if a solver asks for them.
    """

    path: str
    form: Form
    leaf: Any
    gram: Gram
    qparams: QParams | None
    served: PyTree = None

    @property
    def turns(self) -> int:
        """The number of scan iterations that this one is cut into, each with scales of its own; 0 if none cuts it."""
        spec, layout, *_ = self.form
        groups = qparams_shape(spec, layout.shape)
        is_scanned = bool(layout.moves) and layout.moves[0].primitive is None
        return layout.shape[0] if is_scanned and groups[:1] == layout.shape[:1] and not spec.has_tensor_scale else 0

    def turn(self, i: int) -> "Weight":
        """The weight of one turn."""
        spec, layout, *_ = self.form
        leaf, (gram, qparams) = self.leaf[i], _turn((self.gram, self.qparams), i)
        shape = layout.shape[1:]
        spec = dataclasses.replace(spec, granularity=granularity_of(qparams_shape(spec, layout.shape)[1:], shape))
        layout = Layout(shape, layout.moves[1:], layout.matrix)
        form = Form(spec, layout, sharding_of(leaf))
        return Weight(f"{self.path}[{i}]", form, leaf, gram, qparams, None if self.served is None else self.served[i])

    def lost(self) -> Array:
        """The loss, as it is quantized, by being served; rounded to nearest, if it is not served otherwise."""
        w = array(self.leaf)
        if self.served is None:
            return w - fake_quant(w, self.form.spec, self.qparams)
        if is_qarray(self.served):
            return w - real_values(self.served, w.dtype)
        return w - array(self.served)


@jax.jit
def _turn(of: Any, i: int) -> PyTree:
    return jax.tree.map(lambda v: v[i], of)


class Model(NamedTuple):
    """A quantized function and its parameters, as solvers are called with them."""

    params: PyTree
    entries: Entries
    weights: tuple[Weight, ...]
    qparams: Any

    def on_grids(self) -> "Model":
        """The model; raises for a weight without qparams, before anything is solved."""
        for weight in self.weights:
            if weight.qparams is None:
                with named_in_errors(weight.path, rule=self.entries.of[weight.path].rule):
                    raise ValueError(
                        "`qparams` must have the qparams of each weight that is solved, which are the grid that it is "
                        "rounded to, got None. Make them by solve.ranges(params, q, grams, ...) or "
                        "q.init_qparams(params, ...)."
                    )
        return self

    def seen_whole(self) -> "Model":
        """The model; raises for a weight with a use that no Gram sees, for a solver that changes its values or grid."""
        for weight in self.weights:
            entry = self.entries.of[weight.path]
            if entry.reads:
                with named_in_errors(weight.path, rule=entry.rule):
                    raise ValueError(
                        f"the parameter is also read by {', '.join(map(repr, entry.reads))}, which no Gram sees: what "
                        "is best for the ops that contract it may be worse there. Leave it out, so that it is rounded "
                        f"to nearest: {{path: gram for path, gram in grams.items() if path != {weight.path!r}}}; or "
                        "give each use a parameter of its own."
                    )
        return self

    def serving(self, solved: PyTree) -> "Model":
        """The model with the weights that are served; None is rounded to nearest, and needs qparams of each."""
        if solved is None:
            return self.on_grids()
        served, own = dict(with_paths(solved)), dict(with_paths(self.params))
        if served.keys() != own.keys():
            raise ValueError(
                "`solved` must have the parameters of `params`, as they are served, got "
                f"{sorted(own.keys() - served.keys())} in `params` alone and {sorted(served.keys() - own.keys())} in "
                "`solved` alone. Pass what a solver made of these params."
            )
        for weight in self.weights:
            if (shape := getattr(served[weight.path], "shape", None)) != weight.form.layout.shape:
                raise ValueError(
                    f"At {weight.path!r}: `solved` must have it in its shape {weight.form.layout.shape}, got {shape}. "
                    "Pass what a solver made of these params."
                )
        each = (dataclasses.replace(weight, served=served[weight.path]) for weight in self.weights)
        return self._replace(weights=tuple(each))

    def found(self, solve: Callable[[Weight], Any], freeze: bool = False, progress: Any = None) -> dict[str, Any]:
        """The results of `solve` for each weight, by path: one weight after the other, one scan iteration at a time."""
        new = {}
        for weight in in_bar(self.weights, progress, "weights"):
            path = weight.path
            with named_in_errors(path, rule=self.entries.of[path].rule):
                new[path] = _with_automatic_axes(functools.partial(_of_numbers, solve), weight)
            if freeze:
                new[path] = freeze_leaf(path, new[path], self.entries, self.qparams, None)
        return new

    def solved(self, solve: Callable[[Weight], Any], freeze: bool, progress: Any = None) -> PyTree:
        """The params, with what `solve` makes of each weight in place of it, or the integers of it."""
        new = self.found(solve, freeze, progress)
        return with_leaves(self.params, [new.get(path, leaf) for path, leaf in with_paths(self.params)])


def _of_numbers(solve: Callable[[Weight], Any], weight: Weight) -> PyTree:
    """The result of `solve` for a weight, which is read here, and must be finite."""
    weight = dataclasses.replace(weight, leaf=array(weight.leaf))
    refuse_not_finite(weight.leaf)
    return solve(weight)


def _with_automatic_axes(solve: Callable[[Weight], Any], weight: Weight) -> PyTree:
    """The result of `solve` for a weight; on a mesh with explicit axes, where XLA chooses how arrays lie on it."""

    def of(leaf: PyTree, *others: Any) -> PyTree:
        form = weight.form._replace(sharding=sharding_of(leaf))
        return _in_turns(solve, Weight(weight.path, form, leaf, *others))

    return with_automatic_axes(of, weight.leaf, weight.gram, weight.qparams, weight.served)


def _in_turns(solve: Callable[[Weight], Any], weight: Weight) -> PyTree:
    """The result of `solve` for a weight; for scan iterations stacked, with one in memory at a time."""
    n, stacks = weight.turns, None
    for i in range(n):
        part = _in_turns(solve, weight.turn(i))
        stacks = jax.tree.map(lambda v: room_for(v, n), part) if stacks is None else stacks
        stacks = _put(stacks, part, i)
    return solve(weight) if stacks is None else stacks


@functools.partial(jax.jit, donate_argnums=0)
def _put(stacks: PyTree, part: PyTree, i: int) -> PyTree:
    return jax.tree.map(lambda stack, v: stack.at[i].set(v), stacks, part)


def checked_function(q: object) -> QuantizedFunction:
    """Returns `q`, which must be a quantized function."""
    if not isinstance(q, QuantizedFunction):
        raise TypeError(
            f"`q` must be what quantize_fn returned, got {checks.kind(q)}. Solvers are called (params, q, ..)."
        )
    return q


def model_of(
    params: PyTree,
    q: object,
    grams: Mapping[str, Gram],
    args: tuple,
    kwargs: Mapping[str, Any],
    qparams: Mapping[str, Any] | None,
) -> Model:
    """The model, with everything checked that can be wrong with the arguments of a solver."""
    q = checked_function(q)
    if not isinstance(grams, Mapping) or not all(isinstance(gram, Gram) for gram in grams.values()):
        raise TypeError(
            f"`grams` must be a dict {{path: Gram}}, got {checks.kind(grams)}. Make it by q.observe(params, ..., "
            "gram=True)."
        )
    entries, layouts = q.weights(shapes_of(params), grams, args, kwargs)
    leaves = dict(with_paths(params))
    weights = []
    for path, layout in layouts.items():
        entry = entries.of[path]
        with named_in_errors(path, rule=entry.rule):
            if is_qarray(leaves[path]):
                raise ValueError("the weight is integers already, got a QArray. Solve the float parameters.")
            _check_gram(grams[path], layout)
            own = qparams.get(path) if isinstance(qparams, Mapping) else None
            refuse_lost_scales({path: own})
        form = Form(to_nearest(entry.spec), layout, sharding_of(leaves[path]))
        weights.append(Weight(path, form, leaves[path], grams[path], entries.checked(path, own)))
    return Model(params, entries, tuple(weights), qparams)


def shapes_of(params: PyTree) -> PyTree:
    """The params as shapes, so that leaves which are read when they are needed are not read for a plan."""

    def of(leaf: PyTree) -> PyTree:
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not is_qarray(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf

    return with_leaves(params, [of(leaf) for _, leaf in with_paths(params)])


def _check_gram(gram: Gram, layout: Layout) -> None:
    *lead, k, _ = jax.eval_shape(layout.matrices, jax.ShapeDtypeStruct(layout.shape, jnp.float32)).shape
    shape = jnp.shape(gram.products)
    if shape != (*lead, k, k):
        raise ValueError(
            f"the products of the Gram must have shape {(*lead, k, k)} for a weight of shape {layout.shape}, got "
            f"{shape}: it is of another model, or of another use of the weight. Observe this one."
        )
    if jnp.shape(gram.sums) != (*lead, k):
        raise ValueError(
            f"the sums of the Gram must have shape {(*lead, k)} for a weight of shape {layout.shape}, got "
            f"{jnp.shape(gram.sums)}. Take Grams as q.observe(params, ..., gram=True) and merge give them."
        )
    if any(isinstance(v, jax.core.Tracer) for v in gram):
        return
    if not np.any(np.asarray(gram.rows) > 0):
        raise ValueError(
            f"the Gram must be of at least one row, got {np.asarray(gram.rows).tolist()} rows. Observe batches that "
            "reach the weight, such as all branches and experts; or leave it out of `grams`."
        )
    with jax.ensure_compile_time_eval():  # also where a call is traced in which it is a constant
        is_finite = bool(_is_finite(gram.products, gram.sums))
    if not is_finite:
        raise ValueError(
            "the Gram has NaN or infinite numbers, so that an input has them, or values whose squares overflow. Look "
            "for them in q.observe(params, ...)."
        )


@jax.jit
def _is_finite(products: Array, sums: Array) -> Array:
    return jnp.isfinite(products).all() & jnp.isfinite(sums).all()


def check_solved(result: Array, weight: Weight) -> None:
    """Raises if what was solved is no number, with what made it none."""
    if isinstance(result, jax.core.Tracer) or np.isfinite(result):
        return
    w, (products, *_) = weight.form.matrices(array(weight.leaf)).astype(float), weight.gram
    if not np.isfinite(squared_errors(w, products).sum()):
        raise ValueError(
            f"the squares of its outputs overflow {products.dtype}: the parameter has values up to {np.abs(w).max()}, "
            f"and the moments of its inputs reach {np.abs(products).max()}. Scale them down, or leave it out of "
            "`grams`."
        )
    raise ValueError(
        "the second moments are singular: an input is 0, or the sum of others, in every row. Pass damping=0.01, or "
        "more."
    )
