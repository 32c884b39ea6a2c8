# SPDX-License-Identifier: Apache-2.0
"""The moments of the inputs that a weight contracts, which say what an error of the weight costs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._base._sharding import is_explicit, replicated


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

    def merged(self, other: "Gram") -> "Gram":
        """The moments of the rows of both."""
        a, b = jnp.shape(self.products), jnp.shape(other.products)
        if a != b:
            raise ValueError(
                f"`products` must have one shape, got {a} and {b}: Grams of two weights, or of two models. Observe all "
                "batches with one function and its parameters."
            )
        return Gram(*(a + b for a, b in zip(self, other, strict=True)))


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
