# SPDX-License-Identifier: Apache-2.0
"""The compiled functions of sites: an op with the quantizers of its own, traced and differentiated once for a shape."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from .._arrays._affine import fake_quant
from .._arrays._qparams import QParams
from .._arrays._quantized import Quantized
from .._arrays._straight_through import (
    CODES,
    SCALES,
    OfTensor,
    quantize_straight_through,
    straight_through,
    with_gradient_of,
)
from .._contract._contract import ContractionOp, contract
from .._contract._dot import Dot, quantized_dot
from .._contract._in_groups import in_groups
from .._contract._operands import QuantizedOperand, flagged
from .._contract._weight_only import ScaledBehind, by_columns, is_scaled_behind, scaled_behind
from .._history import DelayedQParams
from .._platform._cpu import nan_where
from .._platform._tiles import written
from .._program._jaxpr import JaxprEqn
from .._program._param import QuantizedParam, Unquantized, dequantized, from_integers
from .._spec._spec import QuantSpec

Delayed = tuple[DelayedQParams | None, ...]  # what histories give for the gradients with respect to both operands


class FloatOp(NamedTuple):
    """An op as the program has it, in float: its primitive with parameters. Static."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "FloatOp":
        return cls(eqn.primitive, tuple(eqn.params.items()))

    def of_dtype(self, dtype: DTypeLike) -> "FloatOp":
        """The op with its result in another dtype."""
        return self._replace(params=tuple((dict(self.params) | {"preferred_element_type": np.dtype(dtype)}).items()))

    def real(self, a: Array, b: Array, *more: Array) -> Array:
        return self(a, b, *more)

    def __call__(self, *operands: Array) -> Array:
        return self.primitive.bind(*operands, **dict(self.params))


def value_of(parameter: QuantizedParam, guarded: bool = True) -> Array:
    """The real values of a quantized parameter, with the gradient of its quantizer."""
    value = parameter.cast(dequantized(parameter, guarded))
    return value if parameter.real is None else with_gradient_of(parameter.real, value)


def of_weight(parameter: QuantizedParam) -> tuple[Array, Quantized, Array | None]:
    """The real values of a parameter that have a gradient, its integers, and its NaN flags."""
    q, real = parameter.quantized, parameter.real
    return q.real(q.dtype) if real is None else real, q, parameter.nan_flags


def of_value(value: QuantizedParam, contracted: tuple[int, ...]) -> tuple[Array, Quantized, Array]:
    """The same of a value that is quantized where it is named, which may hold a NaN."""
    assert value.real is not None
    return value.real, value.quantized, nan_where(lax.stop_gradient(value.real), contracted)


# A site keeps its operands, integers of inputs and scales; what else a backward pass reads is computed again.
_kept = functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(CODES, SCALES), prevent_cse=False
)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(_kept, static_argnums=(0,))
def site_in_integers(
    op: ContractionOp, a: QuantizedOperand | Unquantized, b: QuantizedOperand | Unquantized, key: Array | None,
    more: tuple[Array, ...], delayed: Delayed,
) -> Array:  # fmt: skip
    """`contract`, with the quantizers of operands that are its own."""

    def own(v: Unquantized) -> QuantizedOperand:
        real, q, flags = of_weight(v.quantized(straight_through))
        return QuantizedOperand(real, dataclasses.replace(q, dtype=real.dtype), flags)

    return contract(op, *(own(v) if isinstance(v, Unquantized) else v for v in (a, b)), key, more, delayed)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
@functools.partial(_kept, static_argnums=(0, 1, 2))
def site_in_float(f: FloatOp, op: ContractionOp, in_tiles: int | None, *operands: Any) -> Array:
    """An op in float, of the values of parameters; one of them may be converted tile by tile."""
    operands = tuple(v.quantized(straight_through) if isinstance(v, Unquantized) else v for v in operands)
    whole, side = functools.partial(_in_float, f, op), _weight_side(operands)
    exact = lambda: whole(*operands) if in_tiles is None else by_columns(op, whole, in_tiles, operands)
    if side is None or op.execution != "native":
        return exact()
    _, q, flags = of_weight(operands[side])
    return in_groups(op, side, flagged(q, flags), operands[1 - side], exact)


def _weight_side(operands: Sequence[Any]) -> int | None:
    """The side of a weight that meets floats; None if none does."""
    sides = [i for i, v in enumerate(operands[:2]) if isinstance(v, QuantizedParam)]
    return sides[0] if len(sides) == 1 and not operands[sides[0]].is_cache else None


def _in_float(f: FloatOp, op: ContractionOp, *operands: Any) -> Array:
    """An op in float, with the scales of one parameter behind it where they can be."""
    side = _weight_side(operands)
    if side is None or not is_scaled_behind(op, side, operands[side].quantized, operands[1 - side]):
        return from_integers(f, operands, lambda v: written(value_of(v, guarded=False)))
    weight, x, more = operands[side], operands[1 - side], operands[2:]
    real, q, flags = of_weight(weight)
    real = weight.cast(real) if weight.real is None else real
    operand = QuantizedOperand(real, dataclasses.replace(q, dtype=real.dtype), flags)
    return scaled_behind(ScaledBehind(f, op, side), x, operand, more)


def rows_with(q: Quantized, x: Array, side: int, spec: QuantSpec, dot: Dot) -> Array:
    """The product of rows of floats with a cache, which is the second operand: a CPU has no kernel for it as first."""
    y = quantized_dot(x, q, 0, spec, dot if side else dot.turned)
    return y if side else _turned_back(y, len(dot.batch[0]), x.ndim - len(dot.contracted[1]))


def turned(dot: Dot, operands: Sequence[QuantizedOperand], key: Array | None, delayed: Delayed) -> Array:
    """The product of two operands, computed as that of the second with the first."""
    y = site_in_integers(dot.turned, *operands[::-1], key, (), delayed[::-1])
    return _turned_back(y, len(dot.batch[1]), operands[1].integers.ndim - len(dot.contracted[1]))


def _turned_back(y: Array, batch: int, free: int) -> Array:
    """A product with the free axes of its operands in the other order; those of the first one end at `free`."""
    return lax.transpose(y, (*range(batch), *range(free, y.ndim), *range(batch, free)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def not_differentiated(y: Array, lacking: tuple[str, ...]) -> Array:
    """A result whose gradient is rounded with the ranges of histories that the call does not have."""
    return y


def _refuse_gradient(lacking: tuple[str, ...], _: None, g: Array) -> Any:
    raise ValueError(
        f"At {lacking[0]!r}: the rule gives the gradient a history, and `qparams` of the call that is differentiated "
        "has no entry for it. Pass qparams={**trained, **delayed_qparams(histories)}, with trained, histories = "
        "split_histories(q.init_qparams(params, ...)); or drop `history` from the rule."
    )


not_differentiated.defvjp(lambda y, lacking: (y, None), _refuse_gradient)


@functools.partial(jax.jit, static_argnames="spec")
def fake_quantized(x: Array, spec: QuantSpec, qparams: QParams | OfTensor | None, key: Array | None) -> Array:
    """`fake_quant`, compiled once for a shape."""
    if isinstance(qparams, OfTensor):
        real, q, _ = quantize_straight_through(x, spec, None, key, qparams)
        return with_gradient_of(real, q.real(x.dtype))
    return fake_quant(x, spec, qparams, key=key)
