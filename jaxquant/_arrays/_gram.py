# SPDX-License-Identifier: Apache-2.0
"""The moments of the inputs that a weight contracts, which say what an error of the weight costs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._base._sharding import is_explicit, replicated
from ._merging import merged


class Gram(NamedTuple):
    """The first and second moments of the inputs that a weight contracts.

    The squared error of a layer whose weight W, of shape (K, N), is off by E is `trace(E.T @ products @ E)`, and the
    mean of its error `sums @ E / rows`.

    Attributes:
      products: float32, or float64 if 64 bits are enabled, (..., K, K): the sum of x^T x over the rows x, K long, that
        meet the weight. K runs along the axes of the weight that are contracted, in their order in the op. Leading axes
        are the turns of a scan over the weight, and what has a contraction of its own: the axes of a batch, the groups
        of a convolution, the experts of a ragged dot.
      rows: of the dtype of products and the shape of its leading axes: how many there are.
      sums: of the dtype of products, (..., K): the sum of the rows x.
    """

    products: Array
    rows: Array
    sums: Array


def gram(rows: Array, is_met: Array | None = None, counts: Array | None = None) -> Gram:
    """The moments of rows (..., rows, K); with `is_met` (experts, rows) of the rows that meet each expert.

    `counts` (..., rows) is whether a row is one; those that are none must be 0.
    """
    rows = rows.astype(float)  # float32, or float64 if 64 bits are enabled
    if is_met is not None:
        is_met = is_met if counts is None else is_met & jnp.broadcast_to(counts, is_met.shape)
        return lax.map(lambda met: gram(jnp.where(met[:, None], rows, 0))._replace(rows=met.sum(dtype=float)), is_met)
    *lead, n, _ = rows.shape
    batch = tuple(range(len(lead)))
    numbers = ((len(lead),), (len(lead),)), (batch, batch)
    whole = jax.NamedSharding(jax.typeof(rows).sharding.mesh, jax.P()) if is_explicit(rows) else None
    products = lax.dot_general(rows, rows, numbers, precision=lax.Precision.HIGHEST, out_sharding=whole)
    number = jnp.full(lead, n, rows.dtype) if counts is None else replicated(counts.sum(-1, dtype=rows.dtype))
    return Gram(products, number, replicated(rows.sum(-2)))


def matmul(a: Array, b: Array) -> Array:
    """A product of matrices as exact as the device has it."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def squared_errors(error: Array, products: Array) -> Array:
    """The summed squared error of a layer's results, for each column of an error (..., K, N) of its weight."""
    return (error * matmul(products, error)).sum(-2)


def relative(error: Array, output: Array) -> Array:
    """A squared error relative to the square of the output; of a layer that gives zeros alone, the error itself."""
    return error / jnp.where(output > 0, output, 1)


def merge_grams(*grams: Any) -> Any:
    """The sums of Grams, such as of several batches.

    Args:
      *grams: one or more: Gram, or dicts of them with the same keys, as `q.observe(..., gram=True)` gives them.

    Returns:
      A Gram, or a dict of them like the first.

    Gradient: as a sum.

    Raises:
      TypeError: for anything but Grams or dicts of them, such as a list of them, and for no argument.
      ValueError: for different keys or shapes.

    Source: the Hessian of a layer's squared error, as in Hassibi et al., 1993, "Optimal Brain Surgeon".

    >>> import jax.numpy as jnp
    >>> from jaxquant import merge_grams, quantize_fn, weight_spec
    >>> q = quantize_fn(lambda params, x: x @ params["w"], [("w", weight_spec(4))])
    >>> batches = jnp.ones((2, 3)), 2 * jnp.ones((5, 3))
    >>> grams = merge_grams(*(q.observe({"w": jnp.ones((3, 4))}, x, gram=True) for x in batches))
    >>> grams["w"].products[0].tolist(), grams["w"].rows.item(), grams["w"].sums.tolist()
    ([22.0, 22.0, 22.0], 7.0, [12.0, 12.0, 12.0])
    """

    def summed(a: Gram, b: Gram) -> Gram:
        if jnp.shape(a.products) != jnp.shape(b.products):
            raise ValueError(
                f"`products` must have one shape, got {jnp.shape(a.products)} and {jnp.shape(b.products)}: Grams of "
                "two weights, or of two models. Observe all batches with one function and its parameters."
            )
        return Gram(*(x + y for x, y in zip(a, b, strict=True)))

    return merged(summed, Gram, "merge_grams", grams)
