# SPDX-License-Identifier: Apache-2.0
"""Which rows of the inputs of a function are observed, such as the tokens that are no padding."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import _checks as checks
from .._sharding import shard_like


def checked_mask(mask: Any, entries: Collection[str]) -> Any:
    """Returns `mask`, which must be an array of bools, or a pytree or a dict {entry: array} of them."""
    for leaf in jax.tree.leaves(mask):
        if not checks.is_array(leaf) or leaf.dtype != jnp.bool_:
            raise TypeError(
                f"`mask` must be an array of bools, or a pytree of them, got {checks.kind(leaf)}. True is what counts: "
                "mask=tokens != padding."
            )
    if isinstance(mask, Mapping) and 0 < len(known := set(mask) & set(entries)) < len(mask):
        name = next(name for name in mask if name not in known)
        raise ValueError(
            f"`mask` has entries of the function and {name!r}, which is none; the nearest: "
            f"{checks.nearest(str(name), list(entries))}. q.plan(...) has all entries."
        )
    return mask


def mask_of(mask: Any, entries: Collection[str], names: Sequence[str], x: Array) -> Array | None:
    """Which elements of an input count, of its shape; None if all do. `names` are what its entry is known by."""
    if mask is None:
        return None
    if isinstance(mask, Mapping) and mask and set(mask) <= set(entries):
        own = [mask[name] for name in dict.fromkeys(names) if name in mask]
        if not own:
            return None
    else:
        own = jax.tree.leaves(mask)
    shapes = dict.fromkeys(m.shape for m in own)
    fitting = [m for m in own if m.ndim and m.shape == x.shape[: m.ndim]]
    if len(fitting) != 1:
        several = "several of" if fitting else "none of"
        raise ValueError(
            f"At {names[0]!r}: `mask` must have one array for the leading axes of the input, of shape {x.shape}, and "
            f"{several} {', '.join(map(str, shapes))} fits. Pass one for this input by mask={{{names[0]!r}: ...}}, for "
            "its rows in their order; inputs that such a dict does not name count whole."
        )
    rows = jnp.asarray(fitting[0])
    return shard_like(jnp.broadcast_to(lax.expand_dims(rows, range(rows.ndim, x.ndim)), x.shape), x)
