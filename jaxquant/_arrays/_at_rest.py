# SPDX-License-Identifier: Apache-2.0
"""Integers of 4 bits and fewer as they lie in memory: two in a byte, as a platform reads and writes them fastest."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._base._checks import PyTree
from .._base._groups import Windows, part, with_part
from .._platform._cpu import apart_of_pairs, transposed
from ._qarray import QArray, changed, packed_dtype
from ._quantized import Quantized, in_memory, permutation


class Form(NamedTuple):
    """How values lie in memory: in a dtype, with their last axes in an order, and in pairs. Static."""

    dtype: Any
    order: tuple[int, ...] | None
    pairs: tuple[int, int] | None

    @classmethod
    def of(cls, q: QArray | Quantized) -> "Form":
        return cls(q.stored.dtype, q.order, q.pairs)

    @classmethod
    def on(cls, platform: str, q: QArray | Quantized, is_weight: bool) -> "Form":
        """Of a platform. XLA:CPU unpacks an int4 array whole, and writes it whole; TPUs take bytes apart slowly.

        In a weight two rows share bytes, of which a CPU takes columns. In a cache it is two features, so that heads and
        tokens, along which caches are split and written, have bytes of their own.
        """
        dtype = packed_dtype(q.spec)
        if dtype is None or platform != "cpu":
            return cls(jnp.dtype(dtype or q.spec.dtype), q.order, None)
        sizes = [q.shape[axis] for axis in permutation(q.order, q.ndim)]
        for axis in (-2, -1) if is_weight else (-1, -2):
            if -axis <= q.ndim and sizes[axis] % 2 == 0:
                return cls(jnp.dtype(jnp.uint8), q.order, (axis, 1 if axis == -2 else math.gcd(sizes[axis] // 2, 8)))
        return cls(q.spec.dtype, q.order, None)

    def of_turn(self, q: Quantized) -> Quantized:
        """A cache as each iteration of a loop has it: in this form, as far as a part of it can be."""
        pairs = self.pairs if self.pairs and -self.pairs[0] <= q.ndim else None
        pairs = pairs if pairs and q.shape[pairs[0]] % (2 * pairs[1]) == 0 else None
        form = Form(q.spec.dtype if self.pairs and not pairs else self.dtype, None, pairs)
        return q if form == Form.of(q) else dataclasses.replace(q, **form.stored(q))

    def stored(self, q: QArray | Quantized) -> dict[str, Any]:
        """The fields of an array with values that lie so."""
        values = in_memory(q.values, lambda ndim: permutation(self.order, ndim)) if self.order else q.values
        lie = lambda v: in_pairs(v, v.ndim + self.pairs[0], self.pairs[1]) if self.pairs else v.astype(self.dtype)
        return {"stored": lie(values), "order": self.order, "pairs": self.pairs}


def at_rest(q: QArray, platform: str | None = None, is_weight: bool = False) -> QArray:
    """A QArray as it lies on a platform, by default on that of new arrays."""
    form = Form.on(platform or jax.default_backend(), q, is_weight or q.frozen is not None)
    return q if form == Form.of(q) else lying_as(q, form)


@functools.partial(jax.jit, static_argnames="form")
def lying_as(q: QArray, form: Form) -> QArray:
    """A QArray whose values lie in a form."""
    return changed(q, **form.stored(q))


def stored_for(tree: PyTree, platform: str) -> PyTree:
    """Integers of 4 bits and fewer, stored as a platform reads and writes them fastest. Their values are the same.

    On a CPU two of them are a uint8, since XLA:CPU unpacks int4 arrays whole before it reads them, and writes them
    whole; TPUs and GPUs have int4. `q.freeze`, `cache.zeros` and `load` store them for `jax.default_backend()`: this is
    for arrays that go to another platform, such as to a program that is compiled on a CPU for a TPU.

    Args:
      tree: pytree with QArrays; traced or not. Other leaves, and QArrays of more bits, of float formats or of one
        value in a byte, are left as they are.
      platform: static str, "cpu", "tpu", "gpu", "cuda" or "rocm".

    Returns:
      The pytree, whose QArrays have another `stored` where the platform wants that, and so another tree structure. On a
      CPU an array whose last two sizes are odd has one value in a byte.

    Gradient: none; integers.

    Raises:
      ValueError: for another platform.

    Source: this package; measured in docs/weight_only.md and docs/generate.md.

    >>> from jaxquant import PerChannel, QuantSpec, stored_for
    >>> from jaxquant.cache import zeros
    >>> cache = zeros((1, 64, 2, 16), QuantSpec(bits=4, granularity=PerChannel((0, 1, 2))))
    >>> stored_for(cache, "tpu").stored.dtype, stored_for(cache, "cpu").stored.shape
    (dtype(int4), (1, 64, 2, 8))
    """
    if platform not in (known := ("cpu", "tpu", "gpu", "cuda", "rocm")):
        raise ValueError(f"`platform` must be one of {', '.join(known)}, got {platform!r}. See jax.default_backend().")
    of = lambda v: at_rest(v, platform) if isinstance(v, QArray) and _is_packed(v) else v
    return jax.tree.map(of, tree, is_leaf=lambda v: isinstance(v, QArray))


def _is_packed(q: QArray) -> bool:
    return q.pairs is not None or q.stored.dtype == packed_dtype(q.spec)


def in_pairs(values: Array, axis: int, distance: int) -> Array:
    """Values of 4 bits two in a byte: of two at this distance along an axis the first one in the lower half."""
    before, n, after = values.shape[:axis], values.shape[axis], values.shape[axis + 1 :]
    values = lax.reshape(lax.bitcast_convert_type(values, jnp.uint8), (*before, n // distance, distance, *after))
    first, second = (lax.slice_in_dim(values, i, None, 2, axis) for i in range(2))
    return lax.reshape((first & 15) | (second << 4), (*before, n // 2, *after))


def with_values(q: Quantized, values: Array, windows: Windows) -> Quantized:
    """An array with new values in a part, stored as it was."""
    there = permutation(q.order, q.ndim)
    values = transposed(values, there)
    windows = {there.index(axis): window for axis, window in windows.items()}
    if not q.pairs:
        return dataclasses.replace(q, stored=written(q.stored, values.astype(q.stored.dtype), windows))
    axis, distance = q.ndim + q.pairs[0], q.pairs[1]
    if axis in windows:  # the bytes that it begins and ends in are of its neighbours, too
        start, size = windows[axis]
        n = min((size // (2 * distance) + 2) * distance, q.stored.shape[axis])
        first = jnp.minimum(start // (2 * distance) * distance, q.stored.shape[axis] - n)
        bytes_of_part = {**windows, axis: (first, n)}
        old = apart_of_pairs(part(q.stored, bytes_of_part), axis, distance, values.dtype)
        values, windows = with_part(old, values, {axis: (start - 2 * first, size)}), bytes_of_part
    return dataclasses.replace(q, stored=with_part(q.stored, in_pairs(values, axis, distance), windows))


def written(v: Array, new: Array, windows: Windows) -> Array:
    """An array with a part of new values, in place if nothing else needs it."""
    if not jnp.issubdtype(v.dtype, jnp.floating) or jnp.finfo(v.dtype).bits != 8:
        return with_part(v, new, windows)
    # As bytes: XLA:CPU would convert all the float8 of the array to float16, and back.
    in_bytes = lambda v: lax.bitcast_convert_type(v, jnp.uint8)
    return lax.bitcast_convert_type(with_part(in_bytes(v), in_bytes(new), windows), v.dtype)
