# SPDX-License-Identifier: Apache-2.0
"""The rounding error of a weight, as the product of two narrow matrices."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._arrays._gram import Gram, matmul
from .._base import _checks as checks
from .._base._checks import PyTree
from .._transform._quantize_fn import QuantizedFunction
from ._matrices import Form, checked_damping, damped
from ._model import Weight, check_solved, model_of


@functools.partial(jax.jit, static_argnames=("form", "rank"))
def _factors(lost: Array, gram: Gram, form: Form, rank: int, damping: float) -> tuple[Array, Array]:
    """The product of rank r with which the squared error of the layer is least, of what is lost."""
    lost, moments = form.matrices(lost.astype(gram.products.dtype)), damped(gram.products, damping)
    # With H = L L^T the error is |L^T E|^2, whose best approximation is in its singular vectors. Those of the shorter
    # side are eigenvectors of its second moments, a sum over the longer side, which stays on its devices.
    lower = jnp.linalg.cholesky(moments)
    error = form.by_columns(matmul(lower.mT, lost))
    is_wide = error.shape[-2] <= error.shape[-1]
    wide = form.by_columns(error if is_wide else error.mT)
    short = jnp.linalg.eigh(matmul(wide, wide.mT))[1][..., ::-1][..., :rank]  # largest first
    long = matmul(short.mT, wide)
    values = jnp.linalg.norm(long, axis=-1, keepdims=True)
    root = jnp.sqrt(jnp.where(values > 0, values, 1))
    short, long = short * root.mT, long / root
    left, right = (short, long) if is_wide else (long.mT, short.mT)
    return jax.scipy.linalg.solve_triangular(lower.mT, left, lower=False), right


def low_rank(
    params: PyTree,
    q: QuantizedFunction,
    grams: Mapping[str, Gram],
    *args: Any,
    rank: int,
    qparams: Mapping[str, Any] | None = None,
    solved: PyTree = None,
    damping: float = 0.01,
    **kwargs: Any,
) -> dict[str, tuple[Array, Array]]:
    """The rounding error of each weight, as a product a @ b to be added in float beside the integers.

    Of all products of this rank it is the one with which the layer's output is off least: `x @ w_rounded + (x @ a) @ b`
    is what to serve, or a start for adapters that are trained (QLoRA).

    Args:
      params: the parameters of the function, in float.
      q, grams, *args, **kwargs: as for `solve.gptq`.
      rank: static int >= 1, at most K and N of every weight.
      qparams: {entry: QParams or None} with the grid of each weight; read where `solved` is None.
      solved: the params that are served, such as `solve.gptq` gives them; None is the weights rounded to nearest.
      damping: as for `solve.gptq`.

    Returns:
      {path: (a, b)} for each weight of `grams`: floats (..., K, r) and (..., r, N), with the leading axes and the order
      of K of its Gram, and N the other axes of the weight in their order.

    Gradient: none.

    Raises:
      TypeError, ValueError: as `solve.gptq`; for a rank that is larger than a weight; and for `solved` of another
        model.

    Source: Zhang et al., 2024, "LQER: Low-Rank Quantization Error Reconstruction for LLMs", with the whole second
    moments in place of their diagonal.

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import quantize_fn, solve, weight_spec
    >>> q = quantize_fn(lambda params, x: x @ params["w"], [("w", weight_spec(2))])
    >>> params, x = {"w": jax.random.normal(jax.random.key(0), (8, 8))}, jax.random.normal(jax.random.key(1), (32, 8))
    >>> grams, qparams = q.observe(params, x, gram=True), q.init_qparams(params, x)
    >>> a, b = solve.low_rank(params, q, grams, x, rank=2, qparams=qparams)["w"]
    >>> error = lambda y: jnp.square(y - x @ params["w"]).sum().item()
    >>> y = q(params, x, qparams=qparams)
    >>> error(y + (x @ a) @ b) < error(y) * 2 / 3
    True
    """
    rank, damping = checks.static_int_between("rank", rank, 1, 2**31 - 1), checked_damping(damping)
    model = model_of(params, q, grams, args, kwargs, qparams).serving(solved)
    for weight in model.weights:
        *_, k, n = jax.eval_shape(weight.form.matrices, weight.leaf).shape
        if rank > min(k, n):
            raise ValueError(
                f"At {weight.path!r}: `rank` must be at most {min(k, n)} for matrices {(k, n)}, got {rank}."
            )

    def solve(weight: Weight) -> tuple[Array, Array]:
        a, b = _factors(weight.lost(), weight.gram, weight.form, rank, damping)
        check_solved(a.sum(), weight)
        return a, b

    return model.found(solve)
