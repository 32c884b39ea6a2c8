# SPDX-License-Identifier: Apache-2.0
"""What has qparams of its own: each parameter that is quantized, and each input of the ops that use one."""

import dataclasses

from .._jaxpr._walk import JOINED, Operand
from .._spec import PerBlock, PerChannel, PerTensor, QuantSpec


def on_parameter(spec: QuantSpec, operand: Operand, path: str, shape: tuple[int, ...]) -> QuantSpec:
    """The spec of an operand with its axes counted on the parameter of which it is made.

    Axes that the operand does not have, because a scan or an index took them away, are separate.
    """
    kind, ndim = spec.granularity, len(operand.shape)
    axis = getattr(kind, "axis", ())
    own = {a % ndim for a in (axis if isinstance(axis, tuple) else (axis,))}
    size = kind.size if isinstance(kind, PerBlock) else 0
    said: dict[int, set[int]] = {a: set() for a in range(len(shape))}  # of each axis: 1 separate, 0 shared, else blocks
    for i, along in enumerate(operand.origin.axes):
        separate = isinstance(kind, PerBlock) if i not in own else isinstance(kind, PerChannel)
        innermost = max(along - {JOINED}, default=None)
        for a in along - {JOINED}:
            said[a].add(size if size and i in own and a == innermost else int(separate or bool(size)))
    if any(len(of) > 1 for of in said.values()):
        raise ValueError(_unsayable(spec, operand, path, shape))
    of_axis = {a: next(iter(of), 1) for a, of in said.items() if shape[a] > 1}
    blocks = [a for a, of in of_axis.items() if of > 1]
    if blocks and (shape[blocks[0]] % size or any(not of for of in of_axis.values())):
        raise ValueError(_unsayable(spec, operand, path, shape))
    separate = tuple(a for a, of in of_axis.items() if of == 1)
    granularity = PerBlock(blocks[0], size) if blocks else PerChannel(separate) if separate else PerTensor()
    return dataclasses.replace(spec, granularity=granularity)


def _unsayable(spec: QuantSpec, operand: Operand, path: str, shape: tuple[int, ...]) -> str:
    runs = [sorted(along - {JOINED}) for along in operand.origin.axes]
    return (
        f"{spec} is of an operand of shape {operand.shape}, whose axes run along {runs} of the parameter {path!r} of "
        f"shape {shape}, and no granularity of the parameter says it. Name axes that stay apart by weight_spec("
        "channel_axis=...), counted on the parameter; or give the parameter the shape of the operand."
    )
