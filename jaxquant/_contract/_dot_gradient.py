# SPDX-License-Identifier: Apache-2.0
"""The two factors of a backward product of a dot: a gradient, and integers whose scales may be multiplied into it."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .._arrays._codes import centred
from .._arrays._quantized import Quantized
from .._base._axes import arranged, blocks_of
from .._base._groups import broadcast_groups
from ._operands import plain


class Factors(NamedTuple):
    """The factors of a contraction, one of them in integers, whose scales may be in the other one.

    Attributes:
      x: the factor with the scales.
      of_x, of_q: the names of the axes of both.
      shape: of the integers.
      split: the axes of the integers that are in blocks now, with one that counts them, which is of the batch.
    """

    x: Array
    of_x: Sequence[str]
    of_q: Sequence[str]
    shape: Sequence[int]
    split: Sequence[str]

    def in_blocks(self, names: Sequence[str]) -> list[str]:
        return [part for n in names for part in ((blocks_of(n), n) if n in self.split else (n,))]


def scaled_by(x: Array, of_x: Sequence[str], q: Quantized, of_q: Sequence[str], at: int) -> Factors:
    """A factor `x` of a contraction with `q`, whose scales are multiplied into it, and the integers without them.

    Where a scale changes along an axis that `q` alone has, there is a factor for each of its blocks; the axis that
    counts these stands among the axes of x from `at` on.
    """
    groups, lengths = (dict(zip(of_q, sizes, strict=True)) for sizes in (q.groups, q.shape))
    alone = [n for n in of_q if n not in of_x]
    of = Factors(x, of_x, of_q, q.shape, [n for n in alone if groups[n] not in (0, 1)])
    of_x = [*of_x[:at], *map(blocks_of, of.split), *of_x[at:]]
    sizes = tuple(groups[n] if n in alone else lengths[n] for n in of_q)
    each = jnp.broadcast_to(broadcast_groups(q.step, sizes), sizes)
    each = arranged(each, [blocks_of(n) if n in of.split else n for n in of_q], of_x)
    x = lax.expand_dims(x, range(at, at + len(of.split))) * each.astype(x.dtype)
    for n in of.split:
        lengths |= {blocks_of(n): groups[n], n: lengths[n] // groups[n]}
    of_q = of.in_blocks(of_q)
    return of._replace(x=x, of_x=of_x, of_q=of_q, shape=[lengths[n] for n in of_q])


def integer_factor(q: Quantized, folded: bool, shape: Sequence[int]) -> Quantized:
    """The integers of q in this shape, with its scales, or without where these are folded into the other factor."""
    if not folded:
        return plain(q, lax.reshape(q.values, shape), q.step, q.zero_point)
    values = q.values
    if not q.spec.symmetric:  # a zero point for each of what is summed is no factor of the sum
        wide = dataclasses.replace(q.spec, bits=q.spec.bits + 1, signed=True, symmetric=True)
        q, values = dataclasses.replace(q, spec=wide), centred(q, jnp.int16)
    return plain(q, lax.reshape(values, shape))
