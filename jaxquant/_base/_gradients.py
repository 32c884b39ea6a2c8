# SPDX-License-Identifier: Apache-2.0
"""Functions with a gradient rule of their own whose second derivative is right in a scan, too."""

from collections.abc import Callable
from typing import Any

import jax


def custom_vjp(f: Callable[..., Any], rule: Callable[..., Any], static: tuple[int, ...] = ()) -> Any:
    """`f` with a gradient rule: (*static arguments, the other arguments, g) -> the gradients of the others.

    The value of the forward pass is the function's own, not its body's: else a second derivative would be of the bare
    staircase. And there the body is left whole. Where a loop is differentiated twice, JAX takes what a body makes of
    constants alone out of it, as arguments before the others; residuals that are arguments it knows by their places,
    and takes the wrong ones, without an error (jax 0.10 and 0.12, unless JAX_CUSTOM_VJP3 is set). Nothing is taken out
    of a checkpoint.
    """
    op = jax.custom_vjp(f, nondiff_argnums=static)
    again = jax.custom_vjp(jax.checkpoint(f, prevent_cse=False, static_argnums=static), nondiff_argnums=static)

    def forward(*args):
        return again(*args), tuple(arg for i, arg in enumerate(args) if i not in static)

    op.defvjp(forward, rule)
    again.defvjp(forward, rule)
    return op
