# SPDX-License-Identifier: Apache-2.0
"""The sites of a function as nodes of an ONNX graph: products of integers, or of floats between Q/DQ pairs."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._arrays._affine import quantize as quantized
from .._arrays._fit import fit_qparams
from .._arrays._qparams import QParams
from .._spec._spec import QuantSpec, plain_spec
from .._transform._plan import Op, Site
from . import _onnx_nodes as nodes
from ._values import moved

TINY = np.float32(2.0**-126)  # no scale is smaller


class Operand(NamedTuple):
    """What is quantized at a site: a float array, and qparams of its rank; the zero point has the integers' dtype."""

    x: jax.Array
    scale: jax.Array
    zero_point: jax.Array
    spec: QuantSpec
    is_weight: bool = False

    @property
    def dtype(self) -> np.dtype:
        return self.x.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def ndim(self) -> int:
        return self.x.ndim

    def with_one_axis(self) -> "Operand":
        """The operand with the axes along which scales vary as one, where they lead: those of tokens."""
        axes = [i for i, n in enumerate(self.scale.shape) if n != 1]
        if len(axes) < 2:
            return self
        if axes != [*range(len(axes))]:
            raise ValueError(f"Scales of shape {self.scale.shape}: ONNX has one axis of them before opset 21.")
        return self.moved(lambda v: v.reshape(-1, *v.shape[len(axes) :]))

    def moved(self, move: Callable[[Array], Array]) -> "Operand":
        """The operand with the array and its qparams moved alike."""
        return self._replace(x=move(self.x), scale=move(self.scale), zero_point=move(self.zero_point))

    def integers(self) -> tuple[Array, Array, Array, int | None]:
        """The integers, and their qparams as ONNX has them: one number, or one for each index of an axis."""
        if (joined := self.with_one_axis()) is not self:
            q, scale, zero_point, axis = joined.integers()
            return q.reshape(self.shape), scale, zero_point, axis
        axes = [i for i, n in enumerate(self.scale.shape) if n != 1]
        axis = axes[0] if axes else None
        scale, zero_point = (v.reshape(() if axis is None else (-1,)) for v in (self.scale, self.zero_point))
        return nodes.quantize.bind(self.x, scale, zero_point, axis=axis), scale, zero_point, axis

    def real(self) -> Array:
        if (joined := self.with_one_axis()) is not self:
            return joined.real().reshape(self.shape)
        q, scale, zero_point, axis = self.integers()
        return nodes.dequantize.bind(q, scale, zero_point, axis=axis)


def along_blocks(v: Array, shape: Sequence[int]) -> Array:
    """Qparams of blocks of an array of this shape with one for each index of these axes."""
    for axis, n in enumerate(shape):
        if v.shape[axis] > 1:
            v = jnp.repeat(v, n // v.shape[axis], axis)
    return v


def of_tokens(x: Array, spec: QuantSpec) -> QParams:
    """The qparams of each token, by the formulas of `fit_qparams` in ops of ONNX."""
    shape = jax.eval_shape(lambda x: fit_qparams(x, spec).scale, x).shape
    axes = tuple(i for i, n in enumerate(shape) if n == 1)
    step = lambda width, levels: jnp.where(width > 0, jnp.maximum(width / levels, TINY), 1)
    if spec.symmetric:
        scale = step(jnp.max(jnp.abs(x), axes, keepdims=True), np.float32(spec.qmax))
        return QParams(scale, jnp.zeros_like(scale))
    low, high = jnp.minimum(x.min(axes, keepdims=True), 0), jnp.maximum(x.max(axes, keepdims=True), 0)
    scale = step(high - low, np.float32(spec.qmax - spec.qmin))
    return QParams(scale, jnp.clip(spec.qmin - jnp.round(low / scale), spec.qmin, spec.qmax))


def site(info: Site, x: Array) -> Any:
    """The operand of a site."""
    spec, qparams = info.spec, info.qparams
    assert spec is not None
    plain_spec(f"An ONNX graph, at {info.name!r},", spec)
    if qparams is None and not info.is_per_token:
        raise ValueError(f"{info.name!r} is dynamic; expected qparams. Pass qparams=q.init_qparams(...).")
    if spec.dtype not in (jnp.int8, jnp.uint8):
        raise ValueError(f"{info.name!r} is of {spec.dtype}, ONNX multiplies int8 and uint8. Take up to 8 bits.")
    qparams = of_tokens(x, spec) if qparams is None else qparams
    scale, zero_point = (lax.reshape(v, (*(1,) * (x.ndim - v.ndim), *v.shape)) for v in qparams)
    # While it is learned it lies between integers; of a frozen weight it has their dtype, and unsigned ones would wrap.
    zero_point = jnp.round(zero_point.astype(jnp.float32))
    limits = jnp.iinfo(spec.dtype)
    if info.qparams is not None and (spec.qmin, spec.qmax) != (
        limits.min,
        limits.max,
    ):  # QuantizeLinear clips at the limits of the dtype
        s, z = (along_blocks(v, x.shape) for v in (scale, zero_point))
        x = jnp.clip(x, (spec.qmin - z) * s, (spec.qmax - z) * s)
    operand = Operand(x, scale, zero_point.astype(spec.dtype), spec, info.kind == "weight")
    return operand if info.op in ("dot_general", "conv_general_dilated") else operand.real()


def arranged(groups: Sequence[Sequence[int]], shape: tuple[int, ...], v: Array) -> Array:
    """An operand of this shape, or its qparams, with an axis for each group of its axes."""
    if v.size != 1 and v.shape != shape:  # qparams along one axis of several that are joined, for instance
        whole = {i for group in groups if any(v.shape[j] > 1 for j in group) for i in group}
        v = jnp.broadcast_to(v, [n if i in whole else 1 for i, n in enumerate(shape)])
    order = [i for group in groups for i in group]
    return v.transpose(order).reshape([math.prod(v.shape[i] for i in group) for group in groups])


def as_matrices(info: Op, lhs: Any, rhs: Any) -> tuple[list[Any], Callable[[Array], Array]]:
    """Of a dot: the operands as matrices with batch axes in front, and the result from the product of these."""
    groups = []
    for side, v in enumerate((lhs, rhs)):
        contracted, batch = (axes[side] for axes in info.params["dimension_numbers"])
        free = [i for i in range(v.ndim) if i not in (*contracted, *batch)]
        rows = [[i] for i in free] if side == 0 and free and not batch else [free]
        matrix = [*rows, contracted] if side == 0 else [contracted, free]
        groups.append([*([i] for i in batch), *matrix])
    arrange = lambda v, of: moved(v, functools.partial(arranged, of, v.shape))
    return list(map(arrange, (lhs, rhs), groups)), lambda y: y.reshape(info.result.shape)


def as_images(info: Op, lhs: Any, rhs: Any) -> tuple[list[Any], Callable[[Array], Array]]:
    """Of a convolution: the operands as (N, C, ...) and (O, I, ...), and the result in its own order."""
    numbers = info.params["dimension_numbers"]
    moves = [lambda v: v.transpose(numbers.lhs_spec), lambda v: v.transpose(numbers.rhs_spec)]
    back = [numbers.out_spec.index(i) for i in range(len(numbers.out_spec))]
    return [moved(v, move) for v, move in zip((lhs, rhs), moves, strict=True)], lambda y: y.transpose(back)


def refuse_blocks(*operands: Any) -> None:
    """Raises for groups that none of the ops to come has."""
    for v in operands:
        if isinstance(v, Operand) and any(1 < s < n for s, n in zip(v.scale.shape, v.shape, strict=True)):
            raise ValueError(
                f"Scales of shape {v.scale.shape}, of an array of shape {v.shape}: ONNX has no blocks before opset 21. "
                "In an integer graph a weight may have groups of a multiple of 16, in a product with a float32 input."
            )


def attributes_of(info: Op) -> dict[str, Any]:
    """The attributes of Conv and ConvInteger."""
    params, numbers = info.params, info.params["dimension_numbers"]
    if params["batch_group_count"] > 1 or any(n > 1 for n in params["lhs_dilation"]):
        raise ValueError("ONNX's Conv has no groups of examples and no dilated inputs.")
    return {
        "pads": tuple(pad[side] for side in (0, 1) for pad in params["padding"]),
        "strides": params["window_strides"],
        "dilations": params["rhs_dilation"],
        "group": params["feature_group_count"],
        "shape": tuple(info.result.shape[i] for i in numbers.out_spec),
    }


def block_of(weight: Operand, contracted: Sequence[int]) -> int | None:
    """The block size of MatMulNBits, at most 256: each block of the joined contracted axes has one scale.

    None if there is none: it is a power of two, of at least 16.
    """
    length, run = math.prod(weight.shape[i] for i in contracted), 1
    for i in sorted(contracted, reverse=True):
        run *= weight.shape[i] // weight.scale.shape[i]
        if weight.scale.shape[i] > 1:
            break
    block = math.gcd(run, 256)
    if block >= 16:
        return block
    return 32 if run == length else None  # the last block is padded


def side_in_blocks(info: Op, operands: Sequence[Any]) -> int | None:
    """On which side of a dot is the weight of a MatMulNBits; None if it is none."""
    axes, batch = info.params["dimension_numbers"] if info.name == "dot_general" else ((), ((), ()))
    for side, contracted in enumerate(axes):
        w, x = operands[side], operands[1 - side]
        is_alone = isinstance(w, Operand) and w.is_weight and not isinstance(x, Operand)
        is_float32 = is_alone and x.dtype == info.result.dtype == jnp.float32
        if is_float32 and not batch[side] and block_of(w, contracted):
            return side
    return None


def in_bytes(v: Array, bits: int) -> Array:
    """Unsigned integers as MatMulNBits has them: of 4 bits two in a byte, the first one low."""
    v = v.astype(jnp.uint8)
    if bits == 8:
        return v
    v = jnp.pad(v, [*[(0, 0)] * (v.ndim - 1), (0, v.shape[-1] % 2)])
    return v[..., ::2] | v[..., 1::2] << 4


def blocks_of(weight: Operand, contracted: Sequence[int], free: Sequence[int], block: int) -> tuple[list[Array], int]:
    """A weight as MatMulNBits has it: integers, scales and zero points for each free index and block; and the bits."""
    spec = weight.spec
    if spec.rounding == "stochastic":  # it would need a key; frozen integers are the same with any rounding
        spec = dataclasses.replace(spec, rounding="half_even")
    qparams = QParams(weight.scale, weight.zero_point.astype(jnp.float32))
    q = quantized(weight.x, spec, qparams).values.astype(jnp.int32)
    matrix = lambda v: arranged((free, contracted), weight.shape, along_blocks(v, weight.shape))
    q, scale, zero_point = map(matrix, (q, weight.scale, weight.zero_point.astype(jnp.int32)))
    scale, zero_point = (jnp.broadcast_to(v, q.shape)[:, ::block] for v in (scale, zero_point))
    q = jnp.pad(q, [(0, 0), (0, -q.shape[1] % block)]).reshape(len(q), -1, block)
    bits = 4 if spec.bits <= 4 else 8
    to_unsigned = 2 ** (bits - 1) if spec.signed else 0
    arrays = [in_bytes(q + to_unsigned, bits), scale]
    if not (spec.signed and spec.symmetric):  # else it is what MatMulNBits takes without one
        arrays.append(in_bytes(zero_point + to_unsigned, bits))
    return arrays, bits


def in_blocks(info: Op, operands: Sequence[Any], side: int, accuracy_level: int) -> Array:
    """A dot with a weight on this side, which alone is quantized."""
    w, x = operands[side], operands[1 - side]
    axes = info.params["dimension_numbers"][0]
    summed, of_x = zip(*sorted(zip(axes[side], axes[1 - side], strict=True)), strict=True)  # blocks are of neighbours
    free, rows = ([i for i in range(v.ndim) if i not in of] for v, of in ((w, summed), (x, of_x)))
    block = block_of(w, summed)
    assert block is not None
    arrays, bits = blocks_of(w, summed, free, block)
    x = arranged([*([[i] for i in rows] or [[]]), of_x], x.shape, x)
    attributes = {"K": x.shape[-1], "N": len(arrays[0]), "bits": bits, "block_size": block}
    y = nodes.matmul_nbits.bind(x, *arrays, **attributes, accuracy_level=accuracy_level)
    if side == 1:
        return y.reshape(info.result.shape)
    of_weight, of_rows = info.result.shape[: len(free)], info.result.shape[len(free) :]
    y = y.reshape(*of_rows, *of_weight)
    return y.transpose(*range(len(of_rows), y.ndim), *range(len(of_rows)))


def op(info: Op, lhs: Any, rhs: Any, *, graph: str, accuracy_level: int) -> Array:
    """A dot or convolution of operands, of which one may be a float array."""
    if graph == "integers" and (side := side_in_blocks(info, (lhs, rhs))) is not None:
        return in_blocks(info, (lhs, rhs), side, accuracy_level)
    refuse_blocks(lhs, rhs)
    if info.name == "dot_general":
        (lhs, rhs), result = as_matrices(info, lhs, rhs)
        in_float, in_integers = nodes.matmul.bind, nodes.matmul_integer.bind
        over = lambda v: v
    else:
        (lhs, rhs), result = as_images(info, lhs, rhs)
        attributes = attributes_of(info)
        in_float, in_integers = (functools.partial(of.bind, **attributes) for of in (nodes.conv, nodes.conv_integer))
        over = lambda v: v.reshape(1, -1, *(1,) * (v.ndim - 2))
    if graph == "integers" and isinstance(lhs, Operand) and isinstance(rhs, Operand):
        (a, _, a_zero, axis), (b, _, b_zero, _) = lhs.integers(), rhs.integers()
        # ONNX Runtime takes one zero point of inputs, and one of the weights of a convolution, or none.
        of_each = axis is not None
        zeros = [jnp.zeros((), a.dtype) if of_each else a_zero, *([] if rhs.spec.symmetric else [b_zero])]
        y = in_integers(a, b, *zeros)
        if of_each and not lhs.spec.symmetric:
            centred = b.astype(jnp.int32) - (0 if rhs.spec.symmetric else rhs.zero_point.astype(jnp.int32))
            y = y - lhs.zero_point.astype(jnp.int32) * jnp.sum(centred, -2, keepdims=True)
        y = y[None] if of_each else y  # else ONNX Runtime fuses these into an op with one scale of inputs
        return result(y.astype(jnp.float32) * (lhs.scale * over(rhs.scale)))
    lhs, rhs = (v.real() if isinstance(v, Operand) else v for v in (lhs, rhs))
    return result(in_float(lhs, rhs))
