# SPDX-License-Identifier: Apache-2.0
"""The rounding of the gradient in the backward products of an op, by its rules."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from .._contract._contract import Precision
from .._paths import named_in_errors
from .._spec._granularity import PerChannel, PerTensor, PerToken
from .._spec._rule import Rule
from .._spec._spec import QuantSpec, qparams_shape
from ._match import MatchedOp


def precisions(
    op: MatchedOp, names: Sequence[str], rules: Sequence[Rule | None], specs: Sequence[QuantSpec | None]
) -> tuple[tuple[Precision, Precision], tuple[int, int]]:
    """The precision of the products that give the gradients of the two operands, and how many steps each remembers."""
    found: list[Precision] = [None, None]
    steps = [0, 0]
    for side in range(2):
        rule = rules[side if op.weight is None else op.weight]
        if rule is None or rule.gradients == (None, None):
            continue
        found[side] = precision = rule.gradients[side if op.weight is None else int(side == op.weight)]
        with named_in_errors(names[side], rule=rule):
            if None in specs:
                raise ValueError(
                    "`gradient` needs two quantized operands, and one of these is in float. Give the "
                    "rule `weight` and `activation`, or drop `gradient`."
                )
            if op.contraction.custom and rule.custom == "keep":
                raise ValueError(
                    '`gradient` is for the derivative of quantized ops, and custom="keep" keeps the derivative that '
                    'its author wrote. Drop one of them, or pass custom="inline".'
                )
            if isinstance(precision, QuantSpec):
                steps[side] = rule.history
            if precision is not None:
                _check_gradient(op, side, precision, [spec for spec in specs if spec is not None][1 - side])
    return (found[0], found[1]), (steps[0], steps[1])


def _check_gradient(op: MatchedOp, side: int, precision: QuantSpec | str, other: QuantSpec) -> None:
    if not isinstance(precision, QuantSpec):
        if not other.format and other.bits > 8:
            raise ValueError(
                '`gradient="bfloat16"` needs operands of up to 8 bits, which bfloat16 holds exactly, and the other one '
                f"has {other.bits}. Pass a QuantSpec, or None for float32."
            )
        return
    kind, is_weight, replaced = precision.granularity, side == op.weight, op.contraction.as_op()
    if kind == PerToken() and (why := replaced.why_one_scale):
        raise ValueError(f"`gradient` towards an input {why} has one scale, got {precision}. Say PerTensor().")
    allowed: list[Any] = [PerTensor(), PerChannel(None) if is_weight else PerToken()]
    if kind not in allowed and not (replaced.takes_blocks and None in kind.sizes):
        blocks = " or PerBlock(None, size), along what is summed" if replaced.takes_blocks else ""
        raise ValueError(
            f"`gradient` towards {'the weight' if is_weight else 'an input'} must be {allowed[0]}, "
            f"{allowed[1]}{blocks}, got {precision}. Different ones are a pair: gradient=(towards the input, towards "
            "the weight)."
        )
    if kind.sizes:
        shape = op.contraction.operands[1 - side].shape
        summed = replaced.summed_in_gradient(side, [len(v.shape) for v in op.contraction.operands])
        if not summed or (not replaced.joins_summed and list(summed) != list(range(summed[0], summed[-1] + 1))):
            raise ValueError(
                f"`gradient` has blocks along what is summed, which is "
                f"{f'axes {summed}, apart from each other,' if summed else 'nothing'} of the other operand, of shape "
                f"{shape}. Say PerTensor() for this product."
            )
        length = math.prod(shape[i] for i in summed)
        qparams_shape(dataclasses.replace(precision, granularity=kind.of_op((0,), (length,))), (length,))
