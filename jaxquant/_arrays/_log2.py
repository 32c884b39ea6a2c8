# SPDX-License-Identifier: Apache-2.0
"""Scales that are trained by their logarithms, so that no step of an optimizer makes one 0 or negative."""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._base import _checks as checks
from .._base._checks import PyTree
from ._qparams import Log2QParams, OfSpec, QParams


def to_log2(qparams: PyTree) -> PyTree:
    """QParams with the logarithm of each scale, in which an optimizer step changes a scale by a factor.

    An 8-bit scale may be 0.001. Adam moves each number by its learning rate, so a rate of 0.001 makes such a scale 0 or
    negative in one step. The same step in its logarithm is 0.07 % of the scale, which stays positive.

    Args:
      qparams: any pytree with QParams, such as {entry: QParams or None} of `q.init_qparams`.

    Returns:
      The same pytree with a Log2QParams for each QParams; zero points and other leaves are the same objects.

    Gradient: the gradient of the logarithm.

    Raises:
      TypeError: where there are no QParams.
      ValueError: for a concrete scale that is not a positive number.

    Source: Jain et al., 2020, "Trained Quantization Thresholds", section 3.

    >>> import jax.numpy as jnp
    >>> from jaxquant import QParams, from_log2, to_log2
    >>> trained = to_log2({"w": QParams(jnp.float32(0.25), jnp.float32(0))})
    >>> trained["w"].scale.item(), from_log2(trained)["w"].scale.item()
    (-2.0, 0.25)
    """

    def of(v: QParams) -> Log2QParams:
        scale = checks.real("scale", checks.unwrapped(v.scale), jnp.dtype(jnp.float32))
        if not isinstance(scale, jax.core.Tracer) and not (np.asarray(scale) > 0).all():
            raise ValueError(
                f"`qparams` must have scales > 0, got {np.asarray(scale).min()} as the smallest. Fit them anew by "
                "q.init_qparams(params, ...)."
            )
        return Log2QParams(jnp.log2(scale), v.zero_point, v.spec)

    return _mapped(of, QParams, "to_log2", qparams)


def from_log2(trained: PyTree) -> PyTree:
    """QParams again of what `to_log2` made: in the loss, and once after training, before `q.freeze`.

    Args:
      trained: any pytree with Log2QParams.

    Returns:
      The same pytree with a QParams for each Log2QParams; other leaves are the same objects.

    Gradient: with respect to the logarithm, `scale * ln 2` times the gradient with respect to the scale.

    Raises:
      TypeError: where there are no Log2QParams.

    Source: as `to_log2`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import from_log2
    >>> from jaxquant.typing import Log2QParams
    >>> grad = jax.grad(lambda trained: from_log2(trained).scale)(Log2QParams(jnp.float32(3.0), jnp.float32(0)))
    >>> round(grad.scale.item(), 4)
    5.5452
    """
    return _mapped(lambda v: QParams(jnp.exp2(v.scale), v.zero_point, v.spec), Log2QParams, "from_log2", trained)


def _mapped(f: Callable[[Any], Any], kind: type, function: str, tree: PyTree) -> PyTree:
    is_node = lambda node: isinstance(node, OfSpec)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_node)
    found = [leaf for leaf in leaves if is_node(leaf)]
    if not found or not all(isinstance(leaf, kind) for leaf in found):
        of = " and ".join(sorted({type(leaf).__name__ for leaf in found})) or "none"
        raise TypeError(f"{function} takes a pytree with {kind.__name__}, got {of}. Make it by q.init_qparams(...).")
    return jax.tree.unflatten(structure, [f(leaf) if is_node(leaf) else leaf for leaf in leaves])
