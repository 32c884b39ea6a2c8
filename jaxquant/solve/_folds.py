# SPDX-License-Identifier: Apache-2.0
"""Factors of the inputs of weights, folded into the weights and into the parameters that these inputs come from."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .._base import _checks as checks
from .._base import _numerics as num
from .._base._checks import PyTree
from .._contract._ops import OPS
from .._params import refuse_not_finite
from .._paths import is_qarray, named_in_errors, with_paths
from .._transform._source import Program
from ._graph._folding import Fold, Operand, Refused, fold
from ._graph._graph import Graph
from ._matrices import array

Reduce = Callable[..., Array]  # such as jax.ops.segment_max


class Operands(NamedTuple):
    """The inputs of quantized weights.

    Attributes:
      graph: the function.
      of: of each weight, the first of its ops, and which side of it the inputs are.
      leaves: the parameters by their paths.
    """

    graph: Graph
    of: Mapping[str, Operand]
    leaves: Mapping[str, Any]

    def fold(self, path: str) -> Fold | Refused:
        """The fold of a factor for each input of a weight, or why there is none."""
        if path not in self.of:
            return Refused("it is in the condition of a loop")
        found = fold(self.graph, self.of[path])
        for name in () if isinstance(found, Refused) else found.factors:
            leaf = self.leaves[name]
            if is_qarray(leaf) or not checks.is_float(leaf.dtype):
                return Refused(f"its inputs come from, or also meet, {name!r}, which is no array of floats")
        return found

    def follows_weights(self, path: str) -> bool:
        """Whether the inputs of a weight are made of what came out of another that the rules quantize."""
        ops = {operand.at for operand in self.of.values()}
        node = next((node for node in self.graph.nodes if node.at == self.of[path].at and node.name in OPS), None)
        todo, seen = [] if node is None else [node.ins[self.of[path].side]], set()
        while todo:
            value = todo.pop()
            made_by = self.graph.maker.get(value)
            if made_by is None or value in seen:
                continue
            if made_by.at in ops and made_by.name in OPS:
                return True
            seen.add(value)
            todo += made_by.ins
        return False


def operands_of(program: Program, params: PyTree) -> Operands:
    """The inputs of all weights that the rules quantize."""
    found: dict[str, Operand] = {}
    for location, decision in program.decisions.of.items():
        for side, choice in () if decision.contraction.in_condition else enumerate(decision.operands):
            for key in choice.keys if choice.is_weight else ():
                found.setdefault(key, Operand(location, 1 - side, choice.operand.origin.stack))
    leaves = dict(with_paths(params))
    for path in found:
        if not is_qarray(leaves[path]):
            with named_in_errors(path):
                refuse_not_finite(array(leaves[path]))
    return Operands(Graph(program.jaxpr, program.paths), found, leaves)


def is_whole(found: Fold, path: str) -> bool:
    """Whether each row of a weight is multiplied by a factor."""
    return path in found.factors and bool((found.factors[path] < 0).all())


def in_words(path: str, refused: Refused) -> str:
    """Why a factor for the inputs of a weight cannot be folded."""
    return f"At {path!r}: no factor of its inputs can be folded into parameters: {refused.why}."


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def of_channels(reduce: Reduce, v: Array, factors: Array, sign: int, count: int) -> Array:
    """A reduction of the elements that each factor changes: divides, for sign 1, or multiplies, for -1."""
    ids = jnp.broadcast_to(factors * sign, v.shape).reshape(-1)
    return reduce(v.reshape(-1), jnp.where(ids > 0, ids - 1, count), count + 1)[:count]


def largest(leaves: Mapping[str, Any], found: Fold, paths: list[str], sign: int) -> Array:
    """The largest magnitude of what each factor changes in some parameters; 0 if it changes nothing there."""
    own, factors = [array(leaves[path]) for path in paths], [np.int32(found.factors[path]) for path in paths]
    return _largest(own, factors, sign, found.size)


@functools.partial(jax.jit, static_argnames=("sign", "count"))
def _largest(leaves: list[Array], factors: list[Array], sign: int, count: int) -> Array:
    def of(leaf: Array, factors: Array) -> Array:
        # First on each device of its own part: flat, a parameter would be gathered.
        each = jnp.abs(leaf).max(alike(factors), keepdims=True, initial=0)
        return of_channels(jax.ops.segment_max, each, factors, sign, count).astype(jnp.float32)

    highest = functools.reduce(jnp.maximum, map(of, leaves, factors))
    return jnp.where(highest > 0, highest, 0)  # of nothing: -inf


def alike(factors: Array) -> tuple[int, ...]:
    """The axes along which a parameter has one factor."""
    return tuple(axis for axis, n in enumerate(factors.shape) if n == 1)


def folded(graph: Graph, leaves: Mapping[str, Any], factors: Mapping[str, np.ndarray], s: Array) -> dict[str, Array]:
    """Parameters with their elements divided, or multiplied, by the factors s, (count,).

    Or with the elements of the function that the program has of one, such as 1 + g.
    """
    own, numbers = {path: array(leaves[path]) for path in factors}, [np.int32(of) for of in factors.values()]
    wide = [v.astype(num.compute_dtype(v.dtype)) for v in own.values()]
    functions = [graph.functions.get(path) for path in factors]
    inside = [v if function is None else function(v) for v, function in zip(wide, functions, strict=True)]
    new = _changed(inside, numbers, s)
    for i, function in enumerate(functions):
        if function is not None:
            new[i] = jnp.where(numbers[i] == 0, wide[i], function.inverse(wide[i], new[i]))
    return {path: narrowed(path, v, own[path].dtype) for path, v in zip(own, new, strict=True)}


@jax.jit
def _changed(leaves: list[Array], factors: list[Array], s: Array) -> list[Array]:
    """With the elements divided by the factors of their numbers, or multiplied for numbers below 0."""
    s = jnp.concatenate([jnp.ones(1, s.dtype), s])

    def changed(v: Array, numbers: Array) -> Array:
        own = s[jnp.abs(numbers)].astype(v.dtype)
        return jnp.where(numbers > 0, v / own, v * own)

    return list(map(changed, leaves, factors))


def narrowed(path: str, wide: Array, dtype: DTypeLike) -> Array:
    """The values of a parameter in its dtype; raises where that does not hold them, if they are known."""
    if wide.dtype == dtype:
        return wide
    largest = _largest_finite(wide)
    if not isinstance(largest, jax.core.Tracer) and largest > float(jnp.finfo(dtype).max):
        raise ValueError(
            f"At {path!r}: the folded parameter has values up to {largest:.3g}, and {dtype} holds "
            f"{float(jnp.finfo(dtype).max):.3g}. Cast the parameter to bfloat16 or float32 first."
        )
    return num.downcast(wide, dtype)


@jax.jit
def _largest_finite(v: Array) -> Array:
    return jnp.abs(v).max(initial=0, where=jnp.isfinite(v))
