# SPDX-License-Identifier: Apache-2.0
"""Names of axes: those of one name meet in a contraction, and come together in its output.

The axes of a dot are named "batch0" and "sum0" by their number among the dimension numbers, and "a1" and "b1" by their
place in the operand that alone has them.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ._groups import broadcast_groups

Names = Sequence[str]
Pairs = tuple[tuple[int, ...], tuple[int, ...]]


class Matrix(NamedTuple):
    """The layout of an operand as matrices (..., K, N) that are contracted along K.

    Attributes:
      lead: its axes of which each index has a matrix of its own.
      contracted: those that run along K.
      free: those that run along N.
      groups: in how many groups the results are, each with a matrix of its own, as in a convolution.
    """

    lead: tuple[int, ...]
    contracted: tuple[int, ...]
    free: tuple[int, ...]
    groups: int = 1

    def of(self, v: Array) -> Array:
        """The matrices of an array of the operand's shape."""
        n = [math.prod(v.shape[i] for i in axes) for axes in (self.contracted, self.free)]
        v = lax.transpose(v, (*self.lead, *self.contracted, *self.free))
        lead = v.shape[: len(self.lead)]
        if self.groups == 1:
            return v.reshape(*lead, *n)
        return jnp.moveaxis(v.reshape(*lead, n[0], self.groups, n[1] // self.groups), -2, -3)


class Axes(NamedTuple):
    """The names of the axes of a contraction: equal names meet, and are summed unless the output has them.

    What one operand alone has, and the output has not, is a window, or an axis along which matrices are others.

    Attributes:
      operands: the names of the axes of both.
      out: of the output.
      apart: names along which indices take operands apart: rows in groups, and the matrices that these meet.
      groups: in how many groups the axes of `of_groups` are, as features of a convolution, which meet group by group.
      of_groups: of each such axis, by its name, the name that it has in a group.
    """

    operands: tuple[tuple[str, ...], tuple[str, ...]]
    out: tuple[str, ...]
    apart: frozenset[str] = frozenset()
    groups: int = 1
    of_groups: Mapping[str, str] = MappingProxyType({})

    def parts(self, names: Names) -> list[str]:
        """These names, with two for an axis in groups."""
        of = self.of_groups
        return [part for name in names for part in (("group", of[name]) if name in of else (name,))]

    @property
    def met(self) -> list[str]:
        """The names that both operands have, in the order of the first."""
        a, b = map(self.parts, self.operands)
        return [name for name in a if name in b]

    @property
    def summed(self) -> list[str]:
        """The names that are summed."""
        return [name for name in self.met if name not in self.parts(self.out)]

    def free(self, side: int) -> list[int]:
        """The axes of an operand that the output has and the other one has not."""
        own, other = self.operands[side], self.operands[1 - side]
        return [i for i, name in enumerate(own) if name in self.out and name not in other]


def dot_axes(contracted: Pairs, batch: Pairs, ndims: Sequence[int]) -> tuple[list[str], list[str], list[str]]:
    """The names of the axes of both operands of a dot, and of its output."""
    a, b = operands = [[f"{operand}{i}" for i in range(ndim)] for operand, ndim in zip("ab", ndims, strict=True)]
    for kind, places in (("batch", batch), ("sum", contracted)):
        for k, pair in enumerate(zip(*places, strict=True)):
            for names, i in zip(operands, pair, strict=True):
                names[i] = f"{kind}{k}"
    return a, b, dot_output(a, b, [a[i] for i in contracted[0]], [a[i] for i in batch[0]])


def dot_output(a: Names, b: Names, contracted: Names, batch: Names) -> list[str]:
    """The names of the axes of the output: those of the batch, and those that `a` alone and `b` alone has."""
    return [*batch, *(name for names in (a, b) for name in names if name not in (*contracted, *batch))]


def dot_numbers(a: Names, b: Names, contracted: Names, batch: Names) -> tuple[Pairs, Pairs]:
    """The axes of both operands that a dot contracts, and those of its batch."""
    places = lambda wanted: (tuple(map(a.index, wanted)), tuple(map(b.index, wanted)))
    return places(contracted), places(batch)


def int_pairs(numbers: Any) -> tuple[Pairs, Pairs]:
    """The dimension numbers of a dot, ((contracted a, contracted b), (batch a, batch b)), as Python ints."""
    (ca, cb), (ba, bb) = (tuple(tuple(map(int, axes)) for axes in pair) for pair in numbers)
    return (ca, cb), (ba, bb)


def blocks_of(name: str) -> str:
    """The name of the axis that counts the blocks of an axis."""
    return f"blocks of {name}"


def arranged(v: Array, names: Names, wanted: Names) -> Array:
    """An array with its axes where their names are wanted, and 1 for names it lacks; it has size 1 on all others."""
    kept = [name for name in names if name in wanted]
    sizes = dict(zip(names, v.shape, strict=True))
    v = lax.reshape(v, [sizes[name] for name in kept])
    v = lax.transpose(v, [kept.index(name) for name in wanted if name in kept])
    return lax.reshape(v, [sizes.get(name, 1) for name in wanted])


def in_output(operand: str, v: Array, shape: tuple[int, ...], names: Names, output: Names) -> Array:
    """A value for each group of an operand of this shape, as it broadcasts in the output."""
    if all(n == 1 for n in v.shape):
        return lax.reshape(v, ())
    v = broadcast_groups(v, shape)
    inner = [i for i, name in enumerate(names) if name not in output]
    if any(v.shape[i] not in (0, 1) for i in inner):
        raise ValueError(
            f"`{operand}` has a scale of its own for each element along a contracted axis, which cannot be applied "
            f"after the contraction: scale of shape {v.shape}, values of shape {shape}, contracted axes {inner}. Share "
            "it along them: PerTensor, PerChannel on other axes, or, in dot_general, PerBlock along the contracted one."
        )
    if any(v.shape[i] == 0 for i in inner):  # nothing is contracted, and nothing scaled
        return jnp.ones([1] * len(output), v.dtype)
    return arranged(v, names, output)
