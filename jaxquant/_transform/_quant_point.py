# SPDX-License-Identifier: Apache-2.0
"""Names for values that have no parameter, by which rules find them."""

import jax
import jax.ad_checkpoint
from jax import Array
from jax.typing import ArrayLike

from .._base import _checks as checks
from .._program._jaxpr import POINT


def quant_point(x: ArrayLike, name: str) -> Array:
    """`x` itself, with a name for the site where it becomes an operand: one that has no parameter.

    The name stays with the value through reshapes, transposes, slices and casts, and Rules of kind "act_act" match it.
    A Rule of kind "value" quantizes the value here, for whatever uses it. Outside of `quantize_fn` the call does
    nothing.

    Args:
      x: array of any shape and dtype.
      name: static str, not empty.

    Returns:
      `x`.

    Gradient: as the identity.

    Raises:
      TypeError: for anything but an array, or a name that is not a str.

    Source: `jax.ad_checkpoint.checkpoint_name`, which it calls: a checkpoint policy sees the name "jaxquant:name".

    >>> import jax.numpy as jnp
    >>> from jaxquant import Rule, activation_spec, quant_point, quantize_fn
    >>> scores = lambda params, q, k: quant_point(q, "q") @ quant_point(k, "k").T
    >>> q = quantize_fn(scores, [Rule("q", activation=activation_spec(8), kind="act_act")])
    >>> [site.name for site in q.plan({}, jnp.ones((3, 4)), jnp.ones((5, 4))) if site.spec]
    ['q']
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"`name` must be a str that is not empty, got {name!r}. Pass one such as 'attention/scores'.")
    x = checks.unwrapped(x)
    if not checks.is_array(x):
        raise TypeError(f"`x` must be an array, got {checks.kind(x)}. Convert it by jnp.asarray(...).")
    return jax.ad_checkpoint.checkpoint_name(x, f"{POINT}:{name}")
