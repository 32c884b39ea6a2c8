# SPDX-License-Identifier: Apache-2.0
"""Weight-only dots in groups along what is summed, in the form that a device is fastest at: `execution="native"`.

The exact value is `x @ (values * scale)`: scales of groups cost a TPU their broadcast over the weight, and a GPU a
weight in floats. Here integers are multiplied, the partial sum of each group in float32, and scaled behind.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._arrays._quantized import Quantized
from .._arrays._straight_through import with_gradient_of
from .._base import _numerics as num
from .._base._axes import arranged, dot_numbers, dot_output
from .._base._groups import broadcast_groups
from .._base._sharding import is_explicit
from ._contract import ContractionOp
from ._weight_only import holds

BLOCKS, GROUPS = "blocks", "groups"  # the names of their axes
FEW, SOME = 32, 256  # rows, up to which groups are a batch, and up to which scales are spread
MOST = 64  # groups, up to which each has a product of its own in a program

Named = tuple[Array, list[str]]  # an array, and the names of its axes


class Operands(NamedTuple):
    """A dot of floats with a weight in groups, by the names of axes.

    Attributes:
      x: the floats.
      w: the integers, in the dtype of x.
      scale, zero_point: for each group of w, and each element along other axes; a zero point may be None.
      axis: the name of the axis that is in groups.
      summed, batch: names.
      out: the names of the axes of the result.
    """

    x: Named
    w: Named
    scale: Array
    zero_point: Array | None
    axis: str
    summed: tuple[str, ...]
    batch: tuple[str, ...]
    out: Sequence[str]

    def product(self, x: Named, w: Named, *batch: str) -> Named:
        """In float32, with more axes of a batch."""
        names, batched = (x[1], w[1], self.summed), (*self.batch, *batch)
        y = lax.dot_general(x[0], w[0], dot_numbers(*names, batched), preferred_element_type=jnp.float32)
        return y, dot_output(*names, batched)

    def scaled(self, y: Named, x: Named, each: int | None, at: int = 0) -> Array:
        """Partial sums, less the zero points, times the scales: of all groups, `each` to a block, or of one."""
        axis = self.w[1].index(self.axis)

        def placed(v: Array) -> Array:
            if each is None:
                return arranged(lax.slice_in_dim(v, at, at + 1, axis=axis), self.w[1], y[1])
            sizes = [*v.shape[:axis], v.shape[axis] // each, each, *v.shape[axis + 1 :]]
            return arranged(lax.reshape(v, sizes), [*self.w[1][:axis], BLOCKS, GROUPS, *self.w[1][axis + 1 :]], y[1])

        if self.zero_point is None:
            return y[0] * placed(self.scale)
        summed = [i for i, name in enumerate(x[1]) if name in self.summed]
        sums = arranged(jnp.sum(x[0], summed, dtype=jnp.float32, keepdims=True), x[1], y[1])
        return (y[0] - sums * placed(self.zero_point)) * placed(self.scale)

    def free(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self.out]


def by_batch(of: Operands, groups: int, each: int = 1) -> Array:
    """One product, whose batch are blocks of `each` groups: x is there once for each of these, and 0 in the others."""

    def split(v: Named) -> Named:
        at, shape = v[1].index(of.axis), v[0].shape
        sizes = [*shape[:at], groups // each, shape[at] * each // groups, *shape[at + 1 :]]
        return lax.reshape(v[0], sizes), [*v[1][:at], BLOCKS, *v[1][at:]]

    (x, of_x), w = split(of.x), split(of.w)
    own = np.repeat(np.eye(each, dtype=bool), x.shape[of_x.index(of.axis)] // each, 1)
    names = [*of_x, GROUPS]
    mask = arranged(jnp.asarray(own), [GROUPS, of.axis], names)
    copies = jnp.where(mask, lax.expand_dims(x, [x.ndim]), 0), names
    y, names = of.product(copies, w, BLOCKS)
    scaled = of.scaled((y, names), copies, each)
    return arranged(jnp.sum(scaled, [names.index(BLOCKS), names.index(GROUPS)]), of.free(names), of.out)


def one_by_one(of: Operands, groups: int) -> Array:
    """A product for each group, added."""
    length = of.w[0].shape[of.w[1].index(of.axis)] // groups

    def part(i: int) -> Array:
        picked = lambda v: lax.slice_in_dim(v[0], i * length, (i + 1) * length, axis=v[1].index(of.axis))
        x, w = ((picked(v), v[1]) for v in (of.x, of.w))
        y, names = of.product(x, w)
        return arranged(of.scaled((y, names), x, None, i), names, of.out)

    return functools.reduce(jnp.add, map(part, range(groups)))


def by_spread_scales(of: Operands, groups: int) -> Array:
    """One product of scaled integers, whose scales a product with ones spreads over a group."""
    w, names = of.w
    axis = names.index(of.axis)
    ones = jnp.asarray(np.repeat(np.eye(groups), w.shape[axis] // groups, 0), jnp.bfloat16)

    def spread(v: Array) -> Array:
        along = ((1,), (axis,)), ((), ())
        parts = (lax.dot_general(ones, v, along, preferred_element_type=jnp.float32) for v in _in_bfloat16(v))
        return jnp.moveaxis(functools.reduce(jnp.add, parts), 0, axis)

    values = w if of.zero_point is None else w.astype(jnp.float32) - spread(of.zero_point)
    y, of_y = of.product(of.x, ((values.astype(jnp.float32) * spread(of.scale)).astype(w.dtype), names))
    return arranged(y, of_y, of.out)


def _in_bfloat16(v: Array) -> list[Array]:
    """Three arrays of bfloat16 that add up to float32."""
    parts = []
    for _ in range(3):
        parts.append(num.rounded(v, jnp.bfloat16))
        v = v - parts[-1].astype(jnp.float32)
    return parts


def _forms(rows: int, groups: int, length: int) -> dict[str, Callable[[Operands, int], Array]]:
    """What is faster than the exact value, by platform: on a TPU by XLA's estimate, on a GPU by what is written."""
    found: dict[str, Callable[[Operands, int], Array]] = {"cuda": by_batch} if rows <= FEW else {}
    each = 1 if length >= 64 else 128 // length
    if rows <= min(FEW, length // 2) and groups % each == 0:
        found["tpu"] = functools.partial(by_batch, each=each)
    elif length >= 128 and groups <= MOST:
        found["tpu"] = one_by_one
    elif rows <= SOME:
        found["tpu"] = by_spread_scales
    return found


def in_groups(op: ContractionOp, side: int, q: Quantized, x: Array, exact: Callable[[], Array]) -> Array:
    """`exact()`, the product of floats with a weight on `side`, in the form that the device is fastest at.

    The gradient is the gradient of `exact()`.
    """
    axes = op.axes((q.ndim, x.ndim) if side == 0 else (x.ndim, q.ndim))
    of_w, of_x = axes.operands[side], axes.operands[1 - side]
    at = [i for i, name in enumerate(of_w) if name in axes.summed and q.groups[i] > 1]
    free = [n for name, n in zip(of_x, x.shape, strict=True) if name not in of_w]
    is_dot = op.takes_blocks and not axes.apart and not q.spec.has_minimum
    if not is_dot or len(at) != 1 or not all(isinstance(n, int) for n in free) or is_explicit(x):
        return exact()
    groups = q.groups[at[0]]
    forms = _forms(math.prod(free), groups, q.shape[at[0]] // groups) if holds(x.dtype, q) else {}

    def run(form: Callable[[Operands, int], Array], x: Array, q: Quantized) -> Array:
        sizes = tuple(groups if i == at[0] else n for i, n in enumerate(q.shape))
        of = lambda v: broadcast_groups(v.astype(jnp.float32), sizes)
        batch = tuple(name for name in of_w if name in of_x and name not in axes.summed)
        zero_point = None if q.zero_point is None else of(q.zero_point)
        parts = of(q.step), zero_point, of_w[at[0]], tuple(axes.summed), batch, axes.out
        operands = Operands((x, list(of_x)), (q.values.astype(x.dtype), list(of_w)), *parts)
        return num.rounded(form(operands, groups), op.dtype)

    by_platform = {name: functools.partial(run, form) for name, form in forms.items()}
    args = lax.stop_gradient((x, q))
    value = lax.platform_dependent(*args, **by_platform, default=lambda x, q: lax.stop_gradient(exact()))
    return with_gradient_of(exact(), value)
