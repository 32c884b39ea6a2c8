# SPDX-License-Identifier: Apache-2.0
"""Factors of channels: which elements of a value are divided, or multiplied, by the factor of which channel.

They are integers that broadcast against the value, of its rank: 0 where an element stays, k + 1 where it is divided by
the factor of channel k, -k - 1 where it is multiplied by it. They are lean: size 1 on each axis along which they do not
change.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

Factors = np.ndarray


class NoFactorsError(Exception):
    """Why an equation passes no factors, in words that follow its own; and the pairs that must have one factor."""

    def __init__(self, why: str, pairs: tuple[Factors, Factors] | None = None):
        super().__init__(why)
        self.pairs = pairs


class Unmet(NamedTuple):
    """An operand that must have factors, so that the factors of the other operand cancel."""

    operand: int
    factors: Factors


def nothing(ndim: int) -> Factors:
    """The factors of a value that stays as it is."""
    return np.zeros((1,) * ndim, np.int64)


def lean(v: Factors) -> Factors:
    """The factors with size 1 along each axis where they do not change."""
    for i, n in enumerate(v.shape):
        if n > 1 and (first := v.take([0], i)).shape and (v == first).all():
            v = first
    return v


def joined(old: Factors | None, new: Factors) -> Factors:
    """The factors of a value that must have both, where one of them says nothing of an element."""
    if old is None:
        return lean(new)
    old, new = np.broadcast_arrays(old, new)
    differ = (old != 0) & (new != 0) & (old != new)
    if (differ & (np.sign(old) != np.sign(new))).any():
        raise NoFactorsError("which would be divided and multiplied")
    if differ.any():
        raise NoFactorsError("of which parts are several channels", (old[differ], new[differ]))
    return lean(np.where(old == 0, new, old))


def level(v: Factors, axes: Iterable[int]) -> Factors:
    """The factors that a value must have, which must be the same along some axes."""
    for i in axes:
        if v.shape[i] > 1:
            first = np.take_along_axis(v, np.expand_dims((v != 0).argmax(i), i), i)  # 0 says nothing
            every = np.broadcast_to(first, v.shape)
            differ = (v != 0) & (v != every)
            if differ.any():
                raise NoFactorsError("which gives several channels one element", (every[differ], v[differ]))
            v = first
    return v


def known(v: Factors | None, ndim: int) -> Factors:
    """Factors of this rank, also of a number without axes, which jax lets stand beside an array."""
    return nothing(ndim) if v is None else v.reshape((1,) * ndim) if v.ndim == 0 else v


def arranged(v: Factors, names: Sequence[str], wanted: Sequence[str]) -> Factors:
    """The factors with their axes where their names are wanted; they have size 1 on all others."""
    sizes, kept = dict(zip(names, v.shape, strict=True)), [name for name in names if name in wanted]
    v = v.reshape([sizes[name] for name in kept]).transpose([kept.index(name) for name in wanted if name in kept])
    return v.reshape([sizes.get(name, 1) for name in wanted])


def product(a: Factors, b: Factors) -> Factors:
    """The factors of a product: opposite ones cancel."""
    a, b = np.broadcast_arrays(a, b)
    if ((a != 0) & (b != 0) & (a != -b)).any():
        raise NoFactorsError("with another value that would be divided")
    return lean(a + b)


def apart(v: Factors, axes: Iterable[int]) -> Factors:
    """The factors, which must not change along some axes."""
    if any(v.shape[i] > 1 for i in axes):
        raise NoFactorsError("which mixes channels")
    return v
