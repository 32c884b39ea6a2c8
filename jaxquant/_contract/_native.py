# SPDX-License-Identifier: Apache-2.0
"""Narrow floats as they are, for the products of a device: added up in float32, in an order of its own."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._arrays._quantized import Quantized
from .._base._groups import broadcast_groups
from .._base._sharding import is_explicit
from .._platform._dots import Numbers, bfloat16_dot
from .._spec._spec import QuantSpec

_DTYPES = "float8_e4m3fn", "float8_e5m2"  # those that devices multiply
# In blocks: by the dtype of the scales, how long they are and what they hold. MX, and NVFP4.
_BLOCKS = {"float8_e8m0fnu": (32, (*_DTYPES, "float4_e2m1fn")), "float8_e4m3fn": (16, ("float4_e2m1fn",))}
# XLA:GPU makes one kernel of it; with JAX 0.10 it fails to compile it for some formats.
_scaled_dot: Any = lax.scaled_dot if jax.__version_info__ >= (0, 12) else None


def is_of_floats(execution: str, spec: QuantSpec) -> bool:
    """Whether what is rounded to `spec` is multiplied as floats, in which a NaN is a NaN, and needs no flag."""
    return execution == "native" and spec.dtype in _DTYPES


def is_native(execution: str, a: Quantized, b: Quantized, axes: tuple[Sequence[int], Sequence[int]]) -> bool:
    """Whether two operands with one scale along these axes are multiplied as they are. Two of integers stay exact."""
    if not asks_native(execution, a, b):
        return False
    for q, contracted in zip((a, b), axes, strict=True):
        if q.spec.dtype not in _DTYPES or q.tensor_scale is not None or any(q.groups[i] > 1 for i in contracted):
            raise _refusal(a, b)
    return True


def asks_native(execution: str, a: Quantized, b: Quantized) -> bool:
    """Whether a product is asked for of the values as they are, of which one is a float."""
    return execution == "native" and bool(a.spec.format or b.spec.format)


def _refusal(a: Quantized, b: Quantized) -> ValueError:
    return ValueError(
        f'`execution="native"` multiplies {" and ".join(_DTYPES)}, which devices do, with one scale along what is '
        "contracted; and in a dot product, blocks along one axis of it, both as in mxfp8_spec() and mxfp4_spec() or "
        f'both as in nvfp4_spec(); got {a.spec} and {b.spec}. Quantize both operands so, or pass execution="auto", '
        "which is exact for every format."
    )


def native_dot(a: Quantized, b: Quantized, numbers: Numbers) -> tuple[Array, tuple[Array, Array]]:
    """The product of two operands as they are, float32, and the scales of each that are left to be applied to it."""
    contracted, batch = numbers
    scale_dtype = _scale_dtype_of_blocks(a, b, contracted)
    if scale_dtype is None:
        is_native("native", a, b, contracted)
        return lax.dot_general(a.values, b.values, numbers, preferred_element_type=jnp.float32), (a.step, b.step)
    size, _ = _BLOCKS[scale_dtype]
    at = _axis_in_blocks(a, b, contracted, size)
    ca, cb = ((*axes[:at], *axes[at + 1 :], axes[at]) for axes in contracted)
    x, w = (_with_blocks(q, axes, size, scale_dtype) for q, axes in zip((a, b), (ca, cb), strict=True))
    product, kernel = (functools.partial(f, ((ca, cb), batch)) for f in (_in_bfloat16, _of_matrices))
    arrays, left = (x.values, x.scales, w.values, w.scales), (x.left, w.left)
    if _scaled_dot is None or 0 in x.values.shape or 0 in w.values.shape or any(map(is_explicit, arrays)):
        return product(*arrays), left
    return lax.platform_dependent(*arrays, cuda=kernel, default=product), left


def _scale_dtype_of_blocks(a: Quantized, b: Quantized, axes: tuple[Sequence[int], Sequence[int]]) -> str | None:
    """The dtype of the scales of blocks, of those that devices multiply; None where there are no blocks."""
    found = {
        q.spec.scale_dtype
        for q, contracted in zip((a, b), axes, strict=True)
        if any(q.groups[i] > 1 for i in contracted)
        or (q.spec.dtype not in _DTYPES and q.spec.scale_dtype in _BLOCKS)  # which may be a single block
    }
    if not found:
        return None
    scale_dtype = min(found)
    if len(found) > 1 or scale_dtype not in _BLOCKS or any(q.spec.dtype not in _BLOCKS[scale_dtype][1] for q in (a, b)):
        raise _refusal(a, b)
    return scale_dtype


def _axis_in_blocks(a: Quantized, b: Quantized, axes: tuple[Sequence[int], Sequence[int]], size: int) -> int:
    """The contracted axis that is in blocks of this size. Along others each element may have a scale."""
    lengths = [a.shape[i] for i in axes[0]]
    groups = [{a.groups[i], b.groups[j]} for i, j in zip(*axes, strict=True)]
    in_blocks = [k for k, n in enumerate(lengths) if n // size in groups[k] - {1}]
    whole = [k for k, n in enumerate(lengths) if n % size == 0 and groups[k] == {1}]
    found = in_blocks or whole[-1:]
    fits = (groups[k] <= {1, n // size if k in found else n} for k, n in enumerate(lengths))
    if len(found) != 1 or not all(fits):
        raise _refusal(a, b)
    return found[0]


class _Blocks(NamedTuple):
    """An operand whose last contracted axis is in blocks.

    Attributes:
      values: as they are.
      scales: one for each value, but along that axis one for each block.
      left: float32, the scale of what is more than a block.
    """

    values: Array
    scales: Array
    left: Array


def _with_blocks(q: Quantized, contracted: Sequence[int], size: int, scale_dtype: str) -> _Blocks:
    sizes = [n // size if i == contracted[-1] else n for i, n in enumerate(q.shape)]
    if all(q.groups[i] == 1 for i in contracted):
        return _Blocks(q.values, jnp.ones(sizes, scale_dtype), q.step)
    scales = broadcast_groups(q.scale.astype(scale_dtype), tuple(sizes))
    left = jnp.ones((1,) * q.ndim, jnp.float32) if q.tensor_scale is None else q.tensor_scale
    return _Blocks(q.values, jnp.broadcast_to(scales, sizes), left)


def _in_bfloat16(numbers: Numbers, x: Array, of_x: Array, w: Array, of_w: Array) -> Array:
    """The product of the real values, which bfloat16 holds: they have six bits at most."""
    real = lambda v, scales: v.astype(jnp.bfloat16) * broadcast_groups(scales.astype(jnp.bfloat16), v.shape)
    return bfloat16_dot(real(x, of_x), real(w, of_w), numbers)


def _of_matrices(numbers: Numbers, x: Array, of_x: Array, w: Array, of_w: Array) -> Array:
    """As XLA:GPU wants it: rows of what is contracted, of one batch at most."""
    (contracted, batch), count = numbers, 1 if numbers[1][0] else 0
    free = [[i for i in range(v.ndim) if i not in (*contracted[side], *batch[side])] for side, v in enumerate((x, w))]

    def rows(side: int, v: Array) -> Array:
        axes = batch[side], free[side], contracted[side]
        sizes = [math.prod(v.shape[i] for i in of) for of in axes]
        return _in_one_piece(lax.reshape(lax.transpose(v, sum(map(tuple, axes), ())), sizes[1 - count :]))

    arrays, scales = ([rows(side, v) for side, v in enumerate(pair)] for pair in ((x, w), (of_x, of_w)))
    of_rows = ((count + 1,), (count + 1,)), (tuple(range(count)),) * 2
    y = _scaled_dot(
        *arrays, lhs_scale=scales[0], rhs_scale=scales[1], dimension_numbers=of_rows, preferred_element_type=jnp.float32
    )
    return lax.reshape(y, [*(x.shape[i] for i in (*batch[0], *free[0])), *(w.shape[i] for i in free[1])])


def _in_one_piece(v: Array) -> Array:
    """Rows that lie as such in memory, two values of 4 bits to a byte.

    XLA:GPU crashes on an odd number of columns of them, and takes a transpose into its kernel that leaves such.
    """
    if v.dtype != "float4_e2m1fn":
        return v
    pairs = lax.bitcast_convert_type(lax.reshape(v, [*v.shape[:-1], v.shape[-1] // 2, 2]), jnp.uint8)
    return lax.reshape(lax.bitcast_convert_type(lax.optimization_barrier(pairs), v.dtype), v.shape)
