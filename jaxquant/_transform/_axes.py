# SPDX-License-Identifier: Apache-2.0
"""The axes of a spec, counted on a parameter and on an operand that is made of it."""

import dataclasses
import math
from collections.abc import Sequence

from .._program._jaxpr import NAME
from .._program._origin import JOINED, PICKED
from .._program._walk import Contraction, Operand
from .._spec._granularity import PerBlock, PerChannel, PerTensor, PerToken, per_axes
from .._spec._spec import QuantSpec, qparams_shape


def contracted_axes(contraction: Contraction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of each operand along which one result sums, or which share a scale all the same."""
    if contraction.op == NAME:
        return (), ()
    return contraction.as_op().contracted_axes([len(operand.shape) for operand in contraction.operands])


def groups_shape(spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The number of groups with a scale along each axis of an array of this shape."""
    return qparams_shape(spec, shape) or (1,) * len(shape)


def shared_axes(spec: QuantSpec, shape: tuple[int, ...]) -> frozenset[int]:
    """The axes along which not each element has a scale of its own."""
    groups = groups_shape(spec, shape)
    return frozenset(i for i, (n, g) in enumerate(zip(shape, groups, strict=True)) if g != n or n == 1)


def _runs(operand: Operand) -> list[set[int]]:
    """For each axis of an operand, the axes of the parameter that it runs along."""
    return [set(along - {JOINED, PICKED}) for along in operand.origin.axes]


def along(operand: Operand, axes: Sequence[int]) -> set[int]:
    """The axes of a parameter along which axes of an operand run."""
    return set().union(*(_runs(operand)[i] for i in axes))


def _with(spec: QuantSpec, axes: Sequence[int]) -> QuantSpec:
    """The spec with a scale for each element along some axes."""
    return dataclasses.replace(spec, granularity=per_axes(axes))


def on_operand(
    spec: QuantSpec, operand: Operand, contracted: tuple[int, ...], shape: tuple[int, ...], is_weight: bool
) -> QuantSpec:
    """A spec with its axes counted on the operand; what names an axis of a parameter, of some shape, counts on that."""
    kind = spec.granularity
    picked = [i for i, along in enumerate(operand.origin.axes) if PICKED in along and is_weight]
    if kind == PerTensor():
        return _with(spec, picked) if picked else spec
    if kind.is_of_op:
        return _of_op(spec, operand, contracted, is_weight)
    return spec if operand.origin.path is None else _named(spec, operand, picked, shape)


def _of_op(spec: QuantSpec, operand: Operand, contracted: tuple[int, ...], is_weight: bool) -> QuantSpec:
    """A spec whose axes are those that the op contracts, or the others."""
    kind = spec.granularity
    if kind.sizes and len(contracted) != 1:
        named = dataclasses.replace(spec, granularity=_blocks(math.prod(kind.sizes.values()), operand, contracted))
        raise ValueError(
            f"{spec} has blocks along the contracted axis, and this op contracts {len(contracted)} of shape "
            f"{operand.shape}: {contracted}. Give the parameter a rule of its own before this one, with the axes of "
            f"the blocks counted on the parameter: {named}."
        )
    if kind == PerToken() and is_weight:
        raise ValueError(
            f"{spec} is for activations, and this is the weight. Give it PerChannel(None), a scale for each output "
            "channel, as weight_spec(bits) does."
        )
    if kind == PerChannel(None) and not is_weight:
        raise ValueError(
            f"{spec} is for the output channels of a weight, and this operand of shape {operand.shape} is not a "
            "weight. Pass PerToken() for a scale along each row that is contracted, or name the axes: "
            "PerChannel(axis)."
        )
    return dataclasses.replace(spec, granularity=kind.of_op(contracted, operand.shape))


def _blocks(size: int, operand: Operand, contracted: tuple[int, ...]) -> PerBlock:
    """Blocks of a size along several contracted axes, the last ones first, counted on the parameter if there is one."""
    of = {i: _runs(operand)[i] for i in contracted}
    is_apart = operand.origin.path is not None and all(len(along) == 1 for along in of.values())
    sizes = {}
    for i in sorted(contracted, reverse=True):
        axis = min(of[i]) if is_apart else i
        sizes[axis] = math.gcd(size, operand.shape[i])
        size //= sizes[axis]
    return PerBlock(tuple(sorted(sizes)), tuple(sizes[axis] for axis in sorted(sizes)))


def _named(spec: QuantSpec, operand: Operand, picked: Sequence[int], shape: tuple[int, ...]) -> QuantSpec:
    """A spec whose axes are named, counted on the parameter."""
    kind = spec.granularity
    qparams_shape(_with(spec, kind.axes), shape)
    named = [a % len(shape) for a in kind.axes]
    runs = _runs(operand)
    axes = [i for i, of in enumerate(runs) if of.intersection(named) or i in picked]
    alone = [[i for i in axes if runs[i] == {a}] for a in named]
    is_split = bool(kind.sizes) and (len(axes) != len(named) or any(len(at) != 1 for at in alone))
    if is_split or any(not runs[i] <= set(named) for i in axes):
        raise ValueError(
            f"{kind} of a parameter of shape {shape} is no axis of the operand of shape {operand.shape} that the "
            f"function makes of it, whose axes run along {[sorted(along) for along in operand.origin.axes]}. Name axes "
            "that stay apart from the others, or leave the axis None for the output channels of the op."
        )
    if kind.sizes:
        blocks = PerBlock(tuple(i for at in alone for i in at), tuple(kind.sizes.values()))
        return dataclasses.replace(spec, granularity=blocks)
    return _with(spec, axes)


def on_parameter(spec: QuantSpec, operand: Operand, path: str, shape: tuple[int, ...]) -> QuantSpec:
    """The spec of an operand with its axes counted on the parameter of which it is made.

    Axes that the operand does not have, because a scan or an index took them away, are separate.
    """
    kind, ndim = spec.granularity, len(operand.shape)
    own = {a % ndim for a in kind.axes}
    sizes = {a % ndim: size for a, size in kind.sizes.items()}
    said: dict[int, set[int]] = {a: set() for a in range(len(shape))}  # of each axis: 1 separate, 0 shared, else blocks
    for i, runs in enumerate(_runs(operand)):
        separate = bool(sizes) or i in own
        innermost = max(runs, default=None)
        for a in runs:
            said[a].add(sizes[i] if i in sizes and a == innermost else int(separate))
    of_axis = {a: next(iter(of), 1) for a, of in said.items() if shape[a] > 1}
    blocks = {a: of for a, of in of_axis.items() if of > 1}
    if any(len(of) > 1 for of in said.values()) or any(shape[a] % size for a, size in blocks.items()):
        raise ValueError(
            f"{spec} is of an operand of shape {operand.shape}, whose axes run along "
            f"{list(map(sorted, _runs(operand)))} of the parameter {path!r} of shape {shape}, and no granularity of "
            "the parameter matches it. Name axes that stay apart by weight_spec(channel_axis=...), counted on the "
            "parameter; or give the parameter the shape of the operand."
        )
    separate = tuple(a for a, of in of_axis.items() if of == 1)
    granularity = PerBlock(tuple(blocks), tuple(blocks.values())) if blocks else per_axes(separate)
    return dataclasses.replace(spec, granularity=granularity)
