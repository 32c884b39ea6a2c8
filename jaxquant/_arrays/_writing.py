# SPDX-License-Identifier: Apache-2.0
"""Checks of parameters and scales that integers cannot hold, made where the values are known."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._spec._scale_formats import TINY
from .._spec._spec import QuantSpec
from ._qparams import QParams


def refuse_not_finite(leaf: Array, total: Array | None = None) -> None:
    """Raises for a parameter with NaN or infinities; `total` is its sum, if that is already computed."""
    total = jnp.sum(leaf) if total is None else total  # traced under jit, though the leaf be known
    if isinstance(total, jax.core.Tracer) or np.isfinite(np.asarray(total, np.float64)):
        return
    for what, found in (("NaN", jnp.isnan(leaf)), ("infinite numbers", jnp.isinf(leaf))):
        if count := int(found.sum()):
            raise ValueError(
                f"the parameter has {count} {what}, which integers cannot hold: outputs that are NaN now would be "
                "numbers when it is served. Fix what made them."
            )


def refuse_lost_scales(qparams: Mapping[str, Any]) -> None:
    """Raises for scales that an optimizer has moved to where no scale is."""
    for name, of in qparams.items():
        if not isinstance(of, QParams) or isinstance(of.scale, jax.core.Tracer):
            continue
        scale = np.asarray(of.scale)
        lost = ~((scale >= TINY) & (scale < np.inf))
        if lost.any():
            raise ValueError(
                f"At {name!r}: {int(lost.sum())} of {scale.size} scales are 0, negative or not finite, got "
                f"{scale[lost].flat[0]} as the first: what they scale is served as zeros or NaN. Train their "
                "logarithms, to_log2(qparams), in which any step keeps a scale positive; or train qparams at a smaller "
                "learning rate."
            )


def refuse_unsigned_below_zero(x_min: Any, x_max: Any, spec: QuantSpec) -> None:
    """Raises for a range without positive values, of which a symmetric unsigned spec makes zeros."""
    if spec.signed or not spec.symmetric or any(isinstance(v, jax.core.Tracer) for v in (x_min, x_max)):
        return
    low, high = np.broadcast_arrays(np.asarray(x_min), np.asarray(x_max))
    below = (low < 0) & (high <= 0)
    if below.any():
        raise ValueError(
            f"{int(below.sum())} of {below.size} ranges lie below 0, such as [{low[below].flat[0]}, "
            f"{high[below].flat[0]}], and {spec} has no value there but 0. Make it signed, or symmetric=False."
        )
