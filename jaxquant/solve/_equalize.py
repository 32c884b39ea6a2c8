# SPDX-License-Identifier: Apache-2.0
"""Ranges of channels made equal across layers, where the function stays the same."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._base import _checks as checks
from .._base._checks import PyTree
from .._paths import with_leaves, with_paths
from .._transform._quantize_fn import QuantizedFunction
from ._folds import Operands, alike, folded, in_words, is_whole, largest, of_channels, operands_of
from ._graph._folding import Fold, Refused
from ._matrices import array
from ._mesh import changed_leaves
from ._model import checked_function, shapes_of

Progress = Callable[[str, float, float], None]  # (path, ratio of ranges before, after)


def _pairs(operands: Operands, unfolded: str) -> tuple[dict[str, Fold], list[str]]:
    """The weights whose inputs other weights make, with how a factor for each input is folded into both.

    And those that are behind other weights, but make no such pair.
    """
    found: dict[str, Fold] = {}
    done: set[str] = set()
    behind: dict[str, str] = {}  # why a weight behind others that are quantized makes no pair
    first: list[str] = []  # why another makes none
    for path in operands.of:
        if path in done:
            continue
        pair = operands.fold(path)
        if isinstance(pair, Refused):
            if operands.follows_weights(path):
                behind[path] = in_words(path, pair)
            else:
                first.append(in_words(path, pair))
            continue
        done.update(other for other in pair.paths(-1) if is_whole(pair, other))
        if any(other in operands.of for other in pair.paths(1)):
            found[path] = pair
        else:
            first.append(f"At {path!r}: its inputs come from {pair.paths(1)}, which no rule quantizes.")
    if behind and unfolded == "error":
        raise ValueError(f'{" ".join(behind.values())} Pass unfolded="leave", or leave them out of the rules.')
    if not found:
        raise ValueError(
            "no two weights that the rules quantize follow each other with linear ops and relus between. "
            f"{' '.join(behind.values() or first[:1])} Leave `equalize` out; `smooth` also folds into what is not "
            "quantized."
        )
    return found, list(behind)


def _ranges(operands: Operands, leaves: Mapping[str, Any], pair: Fold) -> tuple[Array, Array]:
    """The largest magnitude of each channel in the weights that make it, and in those that take it."""
    of = lambda sign: [path for path in pair.paths(sign) if path in operands.of]
    return largest(leaves, pair, of(1), 1), largest(leaves, pair, of(-1), -1)


@jax.jit
def _distance(ranges: tuple[Array, Array]) -> Array:
    """The largest ratio of the two ranges of a channel, at least 1; of those where neither is 0."""
    first, second = ranges
    is_known = (first > 0) & (second > 0)
    ratio = jnp.where(is_known, first, 1) / jnp.where(is_known, second, 1)
    return jnp.maximum(ratio, 1 / ratio).max()


@jax.jit
def _factors(ranges: tuple[Array, Array], biases: Array | np.ndarray, most: Array) -> Array:
    """The factors that make both ranges of a channel equal, and no bias larger than `most`."""
    first, second = ranges
    is_known = (first > 0) & (second > 0)
    least = biases / jnp.where(most > 0, most, 1)
    return jnp.where(is_known, jnp.maximum(jnp.sqrt(first / second), least), 1)


@functools.partial(jax.jit, static_argnames="count")
def _most(leaves: list[Array], factors: list[np.ndarray], biases: Array | np.ndarray, count: int) -> Array:
    """The largest channel that weights make of inputs with a mean square of 1, with its bias."""
    of = lambda leaf, numbers: jnp.square(leaf.astype(jnp.float32)).sum(alike(numbers), keepdims=True)
    channels = lambda leaf, numbers: of_channels(jax.ops.segment_sum, of(leaf, numbers), numbers, 1, count)
    return (jnp.sqrt(functools.reduce(jnp.add, map(channels, leaves, factors))) + biases).max()


class _Biases:
    """The other parameters that make the channels between a pair, such as a bias, and how large a bias may become.

    A nearly dead column would be divided by next to nothing, and its bias with it, which then is the activation's
    range. No bias may be larger than the channels were, for inputs with a mean square of 1.
    """

    def __init__(self, operands: Operands, leaves: Mapping[str, Any], pair: Fold):
        self.pair = pair
        self.paths = [path for path in pair.paths(1) if path not in operands.of]
        weights = [path for path in pair.paths(1) if path in operands.of]
        own, factors = [array(leaves[path]) for path in weights], [np.int32(pair.factors[path]) for path in weights]
        self.most = _most(own, factors, self.of(leaves), pair.size)

    def of(self, leaves: Mapping[str, Any]) -> Array | np.ndarray:
        """The largest bias of each channel."""
        return largest(leaves, self.pair, self.paths, 1) if self.paths else np.zeros(self.pair.size, np.float32)


def equalize(
    params: PyTree,
    q: QuantizedFunction,
    *args: Any,
    iterations: int = 20,
    unfolded: str = "leave",
    progress: Progress | None = None,
    **kwargs: Any,
) -> PyTree:
    """Makes the ranges of the channels between two weights equal in both, and leaves the function as it is.

    Column k of the first weight, and of its bias, is divided by s_k, and row k of the second one multiplied by it:

        s_k = sqrt(r1_k / r2_k)

    with r1_k and r2_k the largest magnitudes of this column and of this row; both are sqrt(r1_k * r2_k) then. So a
    channel is as large in its tensor on both sides as it can be, which is for weights with one scale. Between the two
    may be relus, pooling, and whatever else passes a positive factor. It needs no data. s_k is larger where the bias of
    a column would become larger than all channels were, |b| + |column|_2: a nearly dead column keeps its bias.

    Args:
      params: the parameters of the function, in float.
      q: what `quantize_fn` returned. Pairs of weights that its rules quantize are equalized; what else makes or takes
        the channels, such as a bias, is divided or multiplied with them.
      *args, **kwargs: the arguments of the function behind its params; shapes suffice.
      iterations: static int >= 1, how many times all pairs are gone through: a weight may be the second of one pair and
        the first of the next.
      unfolded: static. "leave" leaves weights as they are for whose inputs no weight before them can make up; "error"
        raises, with what stands between, such as the minimum of a relu6.
      progress: (path, before, after) -> None, called for the second weight of each pair, after all iterations, with the
        largest ratio of the two ranges of a channel; 1 is equal. And with NaN for a weight that is behind others and
        left as it is: unfolded="error" says why.

    Returns:
      The params, of the same dtypes. The function gives the same results up to rounding; observe it anew for
      ranges and Grams.

    Gradient: none.

    Raises:
      TypeError: for an argument of another kind.
      ValueError: for a function without such a pair, with the reasons; for no iterations; for a weight with NaN; and
        with unfolded="error" for a weight behind others that makes no pair.

    Source: Nagel et al., 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section 4.1.

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import QuantSpec, quantize_fn, solve
    >>> f = lambda params, x: jax.nn.relu(x @ params["w1"]) @ params["w2"]
    >>> q = quantize_fn(f, [("*", QuantSpec())])
    >>> params = {"w1": jnp.array([[1.0, 16.0]]), "w2": jnp.array([[4.0], [1.0]])}
    >>> equal = solve.equalize(params, q, jnp.ones((1, 1)))
    >>> equal["w1"].tolist(), equal["w2"].tolist()
    ([[2.0, 4.0]], [[2.0], [4.0]])
    """
    iterations = checks.static_int_between("iterations", iterations, 1, 10_000)
    checks.one_of("unfolded", unfolded, ("leave", "error"))
    program = checked_function(q).program(shapes_of(params), args, kwargs)
    operands = operands_of(program, params)
    pairs, left = _pairs(operands, unfolded)

    def equalized(leaves: dict[str, Any]) -> dict[str, Any]:
        leaves = dict(leaves)
        biases = {path: _Biases(operands, leaves, pair) for path, pair in pairs.items()}
        distances = lambda: {path: _distance(_ranges(operands, leaves, pair)) for path, pair in pairs.items()}
        before = distances()
        for _ in range(iterations):
            for path, pair in pairs.items():
                s = _factors(_ranges(operands, leaves, pair), biases[path].of(leaves), biases[path].most)
                leaves |= folded(operands.graph, leaves, pair.factors, s)
        if progress is not None:
            for path, after in distances().items():
                if not isinstance(after, jax.core.Tracer):
                    progress(path, float(before[path]), float(after))
        return leaves

    if progress is not None:
        for path in left:
            progress(path, np.nan, np.nan)
    leaves = changed_leaves(equalized, operands.leaves)
    return with_leaves(params, [leaves[path] for path, _ in with_paths(params)])
