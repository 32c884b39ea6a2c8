# SPDX-License-Identifier: Apache-2.0
"""The gradient of the identity in front of any function."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays._straight_through import with_gradient_of
from .._base import _checks as checks
from .._base._checks import PyTree
from .._base._sharding import shard_like


def _described(tree: PyTree) -> tuple:
    """The structure of a tree with the shapes and dtypes of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return [(jnp.shape(v), jnp.result_type(v).name) for v in leaves], structure


def grad_pass_through(f: Callable) -> Callable:
    """Returns a function with the values of `f` and the gradient of the identity.

    `f` is called with its arguments; nothing inside it is differentiated, so its keyword arguments and what it
    closes over get no gradient.

    Args:
      f: function whose result has the structure, shapes and dtypes of its positional arguments: of the argument,
        if there is one, else of their tuple. Floating arrays, or pytrees of them.

    Returns:
      A function of the signature of `f`.

    Gradient: each positional argument gets the cotangent of the result in its place.

    Raises:
      TypeError: if the result does not match the arguments.

    Source: TensorFlow 2.21, `tf.grad_pass_through`, which also takes a function whose result is not like its arguments.

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import tf
    >>> jax.grad(tf.grad_pass_through(jnp.round))(0.3).item()
    1.0
    """

    @functools.wraps(f)
    def passed(*args: Any, **kwargs: Any) -> PyTree:
        x = args[0] if len(args) == 1 else args
        x = jax.tree.map(lambda v: checks.float_array("an argument of grad_pass_through", v), x)
        y = f(*lax.stop_gradient((x,) if len(args) == 1 else x), **kwargs)
        if _described(x) != _described(y):
            raise TypeError(
                f"grad_pass_through({getattr(f, '__name__', f)}) needs a result like its arguments, to hand its "
                f"cotangent on to them: expected {_described(x)}, got {_described(y)}. Reshape or cast inside the "
                "function."
            )
        y = jax.tree.map(shard_like, y, x)
        return with_gradient_of(x, y)

    return passed
