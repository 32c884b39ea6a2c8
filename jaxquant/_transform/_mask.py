# SPDX-License-Identifier: Apache-2.0
"""The rows of inputs that are observed, such as the tokens that are no padding."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._base import _checks as checks
from .._base._checks import PyTree
from .._base._sharding import shard_like


class Mask(NamedTuple):
    """The rows that count: an array of bools, a pytree of them, or a dict of them by entries."""

    of: PyTree

    @classmethod
    def made(cls, mask: PyTree) -> "Mask | None":
        """The mask of an argument, None of None; raises for what is not of bools."""
        for leaf in jax.tree.leaves(mask):
            if not checks.is_array(leaf) or leaf.dtype != jnp.bool_:
                raise TypeError(
                    f"`mask` must be an array of bools, or a pytree of them, got {checks.kind(leaf)}. True is what "
                    "counts: mask=tokens != padding."
                )
        return None if mask is None else cls(mask)

    def checked(self, entries: Collection[str]) -> "Mask":
        """The mask; raises for a dict of which some keys are entries of the function and others are none."""
        unknown = [] if not isinstance(self.of, Mapping) else [name for name in self.of if name not in entries]
        if 0 < len(unknown) < len(self.of):
            raise ValueError(
                f"`mask` has entries of the function and {unknown[0]!r}, which is none; the nearest: "
                f"{checks.nearest(str(unknown[0]), list(entries))}. q.plan(...) has all entries."
            )
        return self

    def over(self, x: Array, names: Sequence[str], entries: Collection[str]) -> Array | None:
        """A mask of the shape of an input, whose entry has these names; None if all elements count."""
        if isinstance(self.of, Mapping) and self.of and set(self.of) <= set(entries):
            own = [self.of[name] for name in dict.fromkeys(names) if name in self.of]
            if not own:
                return None
        else:
            own = jax.tree.leaves(self.of)
        fitting = [rows for rows in own if rows.ndim and rows.shape == x.shape[: rows.ndim]]
        if len(fitting) != 1:
            of = f"{'several' if fitting else 'none'} of {', '.join(str(rows.shape) for rows in own)}"
            raise ValueError(
                f"At {names[0]!r}: `mask` must have one array for the leading axes of the input, of shape {x.shape}, "
                f"and {of} fits. Pass one for its rows in their order by mask={{{names[0]!r}: ...}}; inputs that such "
                "a dict does not name count whole."
            )
        rows = jnp.asarray(fitting[0])
        return shard_like(jnp.broadcast_to(lax.expand_dims(rows, range(rows.ndim, x.ndim)), x.shape), x)
