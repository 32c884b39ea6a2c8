# SPDX-License-Identifier: Apache-2.0
"""Functions with a gradient rule of their own whose second derivative is right in a scan, too."""

from collections.abc import Callable
from typing import Any

import jax


def custom_vjp(f: Callable[..., Any], nondiff_argnums: tuple[int, ...] = ()) -> Any:
    """`jax.custom_vjp`, with a body that JAX leaves whole.

    Where a loop is differentiated twice, JAX takes what a body makes of constants alone out of it, as arguments before
    the others. It then takes these for residuals, which it knows by their places among the arguments, and the
    derivative is wrong without an error (jax 0.10 and 0.12, unless JAX_CUSTOM_VJP3 is set). Nothing is taken
    out of a checkpoint. The rule must call the function itself for its value, not its body: else a second derivative
    would be of the bare staircase.
    """
    body = jax.checkpoint(f, prevent_cse=False, static_argnums=nondiff_argnums)
    return jax.custom_vjp(body, nondiff_argnums=nondiff_argnums)
