# SPDX-License-Identifier: Apache-2.0
"""The groups of values that share a scale. Static; no arrays."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

from .._base import _checks as checks


@dataclasses.dataclass(frozen=True)
class Granularity(abc.ABC):
    """The groups of values that share a scale. A subclass, a frozen dataclass, says the shape of the scale of an array.

    All else has a default, which suits one that depends on the shape of the array alone.
    """

    @abc.abstractmethod
    def scale_shape(self, shape: tuple[int, ...], spec: object) -> tuple[int, ...]:
        """The shape of the scale of an array; raises, in the name of the spec, where it does not fit."""

    def fits(self, groups: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether the values of an array can have so many groups along their axes."""
        return all(g == n or (g and n % g == 0) for g, n in zip(groups, shape, strict=True))

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that it names."""
        return ()

    @property
    def sizes(self) -> dict[Any, int]:
        """The size of the blocks along each axis that it names; empty without blocks."""
        return {}

    @property
    def is_of_op(self) -> bool:
        """Whether only the op that uses an operand knows its axes."""
        return not self.axes

    def of_op(self, contracted: Sequence[int], shape: tuple[int, ...]) -> "Granularity":
        """The granularity, by named axes, of an operand of this shape in an op that contracts some of its axes."""
        return granularity_of(self.scale_shape(shape, self) or (1,) * len(shape), shape)

    @property
    def is_dynamic(self) -> bool:
        """Whether the range of an input is always taken from the values at hand."""
        return False

    @property
    def words(self) -> str:
        """The group that has one scale, for a table: tensor, channel -1."""
        return str(self)

    def to_json(self) -> dict[str, Any]:
        """The granularity as what JSON can hold."""
        return {"granularity": type(self).__name__, **vars(self)}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Granularity":
        """The granularity of which `to_json` gave the fields, which are taken out of others."""
        kind = {kind.__name__: kind for kind in Granularity.__subclasses__()}[fields.pop("granularity")]
        return kind(**{field.name: fields.pop(field.name) for field in dataclasses.fields(kind)})


@dataclasses.dataclass(frozen=True)
class PerTensor(Granularity):
    """One scale for the whole tensor; its qparams are scalars."""

    def scale_shape(self, shape: tuple[int, ...], spec: object) -> tuple[int, ...]:
        return ()

    def fits(self, groups: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        return all(g == 1 for g in groups)

    @property
    def is_of_op(self) -> bool:
        return False

    @property
    def words(self) -> str:
        return "tensor"


@dataclasses.dataclass(frozen=True)
class PerChannel(Granularity):
    """A scale for each index along one axis or several, shared along the others.

    Attributes:
      axis: static int or tuple of ints; negatives count from the end. None means the output channels of the op that
        uses the weight, which a function that sees only the tensor cannot know: it raises.

    The qparams have the rank of the tensor, its size on `axis`, and size 1 on every other axis.
    """

    axis: int | tuple[int, ...] | None

    def __post_init__(self):
        if self.axis is None:
            return
        axes = sorted(checks.static_int("axis", a) for a in _several(self.axis))
        if not axes or len(set(axes)) < len(axes):
            raise ValueError(
                f"`axis` must name at least one axis and none of them twice, got {self.axis}. "
                "For one scale in all use PerTensor()."
            )
        object.__setattr__(self, "axis", tuple(axes) if len(axes) > 1 else axes[0])

    def __repr__(self):
        return f"PerChannel({self.axis})"

    def scale_shape(self, shape: tuple[int, ...], spec: object) -> tuple[int, ...]:
        axes = _checked_axes(self, shape, spec, "channel_axis")
        return tuple(n if i in axes else 1 for i, n in enumerate(shape))

    def fits(self, groups: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        return all(g in (1, n) for g, n in zip(groups, shape, strict=True))

    @property
    def axes(self) -> tuple[int, ...]:
        return () if self.axis is None else _several(self.axis)

    def of_op(self, contracted: Sequence[int], shape: tuple[int, ...]) -> Granularity:
        return _per_row(contracted, shape)

    @property
    def words(self) -> str:
        return f"channel {self.axis}"


@dataclasses.dataclass(frozen=True)
class PerToken(Granularity):
    """A scale for each row of an activation, shared along the axes that the op contracts: each token, or each image.

    `quantize_fn` knows those axes. A function that sees only the tensor does not, and raises; for a batch of sequences
    (examples, tokens, features) pass it PerChannel((0, 1)).
    """

    def scale_shape(self, shape: tuple[int, ...], spec: object) -> tuple[int, ...]:
        raise ValueError(
            f"{spec} does not say which axes are contracted: only the op that uses the tensor knows them. Got shape "
            f"{shape}; name the other axes, such as PerChannel(0) for rows, or PerChannel((0, 1)) for a batch of "
            "sequences."
        )

    def of_op(self, contracted: Sequence[int], shape: tuple[int, ...]) -> Granularity:
        return _per_row(contracted, shape)

    @property
    def is_dynamic(self) -> bool:
        return True

    @property
    def words(self) -> str:
        return "token"


@dataclasses.dataclass(frozen=True)
class PerBlock(Granularity):
    """A scale for each run of `size` elements along one axis, or for each tile along several; other axes separate.

    Attributes:
      axis: static int, or tuple of ints; negatives count from the end. None means the contracted axis of the op that
        uses the tensor.
      size: static int >= 1, or a tuple with one for each axis, such as PerBlock((-2, -1), (128, 128)); each must divide
        the length of its axis.

    The qparams have the shape of the tensor, with the number of blocks in place of the length of `axis`.
    """

    axis: int | tuple[int, ...] | None
    size: int | tuple[int, ...]

    def __post_init__(self):
        axes = tuple(None if a is None else checks.static_int("axis", a) for a in _several(self.axis))
        sizes = tuple(checks.static_int_between("size", n, 1, 2**31 - 1) for n in _several(self.size))
        if len(axes) != len(sizes) or not axes or len(set(axes)) < len(axes) or (len(axes) > 1 and None in axes):
            raise ValueError(
                f"`axis` must name at least one axis and none of them twice, and `size` have one number for each, got "
                f"axis={self.axis} and size={self.size}. Tiles of a matrix are PerBlock((-2, -1), (128, 128))."
            )
        object.__setattr__(self, "axis", axes[0] if len(axes) == 1 else axes)
        object.__setattr__(self, "size", sizes[0] if len(axes) == 1 else sizes)

    def scale_shape(self, shape: tuple[int, ...], spec: object) -> tuple[int, ...]:
        sizes = dict(zip(_checked_axes(self, shape, spec, "axis"), self.sizes.values(), strict=True))
        for axis, size in sizes.items():
            if (length := shape[axis]) % size:
                fitting = ", ".join(str(n) for n in range(1, length + 1) if length % n == 0)
                raise ValueError(
                    f"`size` of {self} does not divide the length {length} of axis {axis}, shape {shape}. "
                    f"Sizes that do: {fitting}."
                )
        return tuple(n // sizes.get(i, 1) for i, n in enumerate(shape))

    def fits(self, groups: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        fits = lambda g, n: g in (1, n) or any(g * size == n for size in self.sizes.values())
        return all(map(fits, groups, shape))

    @property
    def axes(self) -> tuple[int, ...]:
        return () if self.axis is None else _several(self.axis)

    @property
    def sizes(self) -> dict[Any, int]:
        return dict(zip(_several(self.axis), _several(self.size), strict=True))

    def of_op(self, contracted: Sequence[int], shape: tuple[int, ...]) -> Granularity:
        return PerBlock(contracted[0], self.size)

    @property
    def is_dynamic(self) -> bool:
        return True

    @property
    def words(self) -> str:
        return f"block of {' x '.join(map(str, self.sizes.values()))} on {self.axis}"


def _several(value: object) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _checked_axes(kind: PerChannel | PerBlock, shape: tuple[int, ...], spec: object, name: str) -> list[int]:
    """The axes of an array that a granularity names, counted from the front."""
    if kind.axis is None:
        raise ValueError(
            f"{spec} does not say which axis: only the op that uses the tensor knows it. Got shape {shape}; "
            f"pass {name}, such as weight_spec(channel_axis=-1) for a kernel (in, out) or 0 for one (out, in)."
        )
    if not all(-len(shape) <= a < len(shape) for a in kind.axes):
        raise ValueError(
            f"{kind} is out of range for an array of rank {len(shape)}, shape {shape}. Pass axes in "
            f"[{-len(shape)}, {len(shape)}); a scale for each 32 values along an axis is PerBlock(axis, 32)."
        )
    axes = [a % len(shape) for a in kind.axes]
    if len(set(axes)) < len(axes):
        raise ValueError(f"{kind} names an axis of an array of shape {shape} twice. Name each once.")
    return axes


def per_axes(axes: Sequence[int]) -> PerTensor | PerChannel:
    """A scale for each index along some axes, or one in all for none."""
    return PerChannel(tuple(axes)) if axes else PerTensor()


def _per_row(contracted: Sequence[int], shape: tuple[int, ...]) -> Granularity:
    """A scale for each index along the axes that are not contracted."""
    return per_axes([i for i in range(len(shape)) if i not in contracted])


def granularity_of(groups: tuple[int, ...], shape: tuple[int, ...]) -> Granularity:
    """The granularity with these numbers of groups along the axes of an array."""
    if all(g in (1, n) for g, n in zip(groups, shape, strict=True)):
        return per_axes([i for i, (g, n) in enumerate(zip(groups, shape, strict=True)) if g == n != 1])
    sizes = {i: n // g for i, (g, n) in enumerate(zip(groups, shape, strict=True)) if g != n}
    return PerBlock(tuple(sizes), tuple(sizes.values()))
