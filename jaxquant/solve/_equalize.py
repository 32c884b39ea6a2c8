# SPDX-License-Identifier: Apache-2.0
"""Ranges of channels made equal across layers, where the function stays the same."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import Array

from .. import _checks as checks
from .._jaxpr._channels import NoFactorsError
from .._jaxpr._folding import Fold
from .._paths import with_leaves, with_paths
from .._transform._quantize_fn import QuantizedFunction
from ._folds import Operands, folded, in_words, is_whole, largest, operands_of
from ._weights import checked_function, shapes_of

Progress = Callable[[str, float, float], None]  # (path, ratio of ranges before, after)


def _pairs(operands: Operands) -> dict[str, Fold]:
    """The weights whose inputs other weights make, with how a factor for each input is folded into both."""
    found: dict[str, Fold] = {}
    done: set[str] = set()
    errors = []
    for path in operands.of:
        if path in done:
            continue
        try:
            pair = operands.fold(path)
        except NoFactorsError as error:
            errors.append(in_words(path, error))
            continue
        done.update(other for other in pair.paths(-1) if is_whole(pair, other))
        if any(other in operands.of for other in pair.paths(1)):
            found[path] = pair
        else:
            errors.append(f"At {path!r}: its inputs come from {pair.paths(1)}, which no rule quantizes.")
    if not found:
        raise ValueError(
            f"no two weights that the rules quantize follow each other with linear ops and relus between. {errors[0]} "
            "Leave `equalize` out; `smooth` also folds into what is not quantized."
        )
    return found


def _ranges(operands: Operands, leaves: Mapping[str, Any], pair: Fold) -> tuple[Array, Array]:
    """The largest magnitude of each channel in the weights that make it, and in those that take it."""
    of = lambda sign: [path for path in pair.paths(sign) if path in operands.of]
    return largest(leaves, pair, of(1), 1), largest(leaves, pair, of(-1), -1)


def _distance(ranges: tuple[Array, Array]) -> Array:
    """The largest ratio of the two ranges of a channel, at least 1; of those where neither is 0."""
    first, second = ranges
    is_known = (first > 0) & (second > 0)
    ratio = jnp.where(is_known, first, 1) / jnp.where(is_known, second, 1)
    return jnp.maximum(ratio, 1 / ratio).max()


def _factors(ranges: tuple[Array, Array]) -> Array:
    first, second = ranges
    is_known = (first > 0) & (second > 0)
    return jnp.sqrt(jnp.where(is_known, first, 1) / jnp.where(is_known, second, 1))


def equalize(
    params: Any,
    q: QuantizedFunction,
    *args: Any,
    iterations: int = 20,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Any:
    """Makes the ranges of the channels between two weights equal in both, and leaves the function as it is.

    Column k of the first weight, and of its bias, is divided by s_k, and row k of the second one multiplied by it:

        s_k = sqrt(r1_k / r2_k)

    with r1_k and r2_k the largest magnitudes of this column and of this row; both are sqrt(r1_k * r2_k) then. So a
    channel is as large in its tensor on both sides as it can be, which is for weights with one scale. Between the two
    may be relus, pooling, and whatever else passes a positive factor. It needs no data.

    Args:
      params: the parameters of the function, in float.
      q: what `quantize_fn` returned. Pairs of weights that its rules quantize are equalized; what else makes or takes
        the channels, such as a bias, is divided or multiplied with them.
      *args, **kwargs: the arguments of the function behind its params; shapes suffice.
      iterations: static int >= 1, how many times all pairs are gone through: a weight may be the second of one pair and
        the first of the next.
      progress: (path, before, after) -> None, called for the second weight of each pair, after all iterations, with the
        largest ratio of the two ranges of a channel; 1 is equal.

    Returns:
      The params, of the same dtypes. The function gives the same results up to rounding; observe it anew for
      ranges and Grams.

    Gradient: none.

    Raises:
      TypeError: for an argument of another kind.
      ValueError: for a function without such a pair, with the reasons; and for no iterations.

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
    program = checked_function(q).program(shapes_of(params), args, kwargs)
    operands = operands_of(program, params)
    pairs, leaves = _pairs(operands), dict(operands.leaves)
    distances = lambda: {path: _distance(_ranges(operands, leaves, pair)) for path, pair in pairs.items()}
    before = distances()
    for _ in range(iterations):
        for pair in pairs.values():
            s = _factors(_ranges(operands, leaves, pair))
            leaves |= {path: folded(leaves[path], factors, s) for path, factors in pair.factors.items()}
    if progress is not None:
        for path, after in distances().items():
            if not isinstance(after, jax.core.Tracer):
                progress(path, float(before[path]), float(after))
    return with_leaves(params, [leaves[path] for path, _ in with_paths(params)])
