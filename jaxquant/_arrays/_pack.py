# SPDX-License-Identifier: Apache-2.0
"""Integers of 1 to 4 bits, packed into bytes."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from .._base import _checks as checks


@functools.partial(jax.jit, static_argnames="bits")
def _pack(values: Array, bits: int) -> Array:
    as_bits = (values.ravel().astype(jnp.uint8)[:, None] >> jnp.arange(bits, dtype=jnp.uint8)[None]) & 1
    return jnp.packbits(as_bits.ravel(), bitorder="little")


def pack(values: ArrayLike, bits: int) -> Array:
    """Values of 1 to 4 bits side by side in bytes, the first in the lowest bits of the first byte.

    Args:
      values: int8, uint8 or float4 array of any shape, such as the values of a QArray; each must fit `bits` bits.
      bits: static int, 1 to 4; 4 for float4.

    Returns:
      uint8 of shape (ceil(size * bits / 8),); signed values in two's complement, floats by their bits.

    Gradient: none; integers.

    Raises:
      TypeError: for values of another dtype.
      ValueError: for bits outside 1..4, float4 with bits other than 4, or concrete values that do not fit. Traced
        values keep their low bits.

    Source: the usual little-endian layout.

    >>> import jax.numpy as jnp
    >>> from jaxquant import pack
    >>> pack(jnp.array([1, -1, 2], jnp.int8), 4).tolist()
    [241, 2]
    """
    bits = checks.static_int_between("bits", bits, 1, 4)
    if getattr(values, "dtype", None) == jnp.float4_e2m1fn:
        if bits != 4:
            raise ValueError(f"`bits` must be 4 for float4_e2m1fn, got {bits}. Pass 4.")
        return _pack(_bits_of_float4(values), 4)
    array = integer_array("values", values, ("int8", "uint8"))
    if not isinstance(values := checks.unwrapped(values), jax.core.Tracer) and array.size:
        signed = jnp.issubdtype(array.dtype, jnp.signedinteger)
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        lowest, highest = (int(f(np.asarray(values))) for f in (np.min, np.max))
        if lowest < low or highest > high:
            raise ValueError(
                f"`values` must be in [{low}, {high}] to pack them in {bits} bits, got [{lowest}, {highest}]. "
                "Quantize them with a spec of these bits."
            )
    return _pack(array, bits)


_FLOAT4 = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)  # by their bits


@jax.jit
def _bits_of_float4(values: Array) -> Array:
    """The bits of float4, by the size of the values, and not as integers of 4 bits, of which XLA:CPU makes bytes."""
    size = jnp.searchsorted(_FLOAT4[:8], jnp.abs(values.astype(jnp.float32))).astype(jnp.uint8)
    return size | (jnp.signbit(values.astype(jnp.float32)).astype(jnp.uint8) << 3)


@functools.partial(jax.jit, static_argnames=("bits", "shape", "dtype"))
def _unpack(packed: Array, bits: int, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    count = math.prod(shape)
    as_bits = jnp.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    values = jnp.sum(as_bits << jnp.arange(bits, dtype=jnp.uint8)[None], -1, dtype=jnp.uint8)
    if dtype == jnp.int8:  # the sign is the highest of the bits
        unused = jnp.int8(8 - bits)
        return lax.shift_right_arithmetic((values << unused.astype(jnp.uint8)).astype(jnp.int8), unused).reshape(shape)
    if dtype == jnp.float4_e2m1fn:
        return jnp.asarray(_FLOAT4)[values].astype(dtype).reshape(shape)
    return values.reshape(shape)


def unpack(packed: ArrayLike, bits: int, shape: tuple[int, ...], dtype: DTypeLike = jnp.int8) -> Array:
    """Unpacks what `pack` packed.

    Args:
      packed: uint8 of shape (ceil(size * bits / 8),).
      bits: static int, 1 to 4.
      shape: static, of the array that was packed.
      dtype: static, int8, uint8 or float4_e2m1fn: the dtype that was packed.

    Returns:
      An array of that shape and dtype.

    Gradient: none; integers.

    Raises:
      TypeError: for `packed` of another dtype.
      ValueError: for bits outside 1..4, another dtype, or a shape that the bytes do not hold.

    Source: as `pack`.

    >>> import jax.numpy as jnp
    >>> from jaxquant import pack, unpack
    >>> unpack(pack(jnp.array([1, -1, 2], jnp.int8), 4), 4, (3,)).tolist()
    [1, -1, 2]
    """
    bits = checks.static_int_between("bits", bits, 1, 4)
    packed = integer_array("packed", packed, ("uint8",))
    if np.dtype(dtype) not in (np.int8, np.uint8, jnp.float4_e2m1fn):
        raise ValueError(f"`dtype` must be int8, uint8 or float4_e2m1fn, got {dtype}. Pass the dtype that was packed.")
    shape = checks.static_ints("shape", shape)
    if any(n < 0 for n in shape):
        raise ValueError(f"`shape` must have no negative size, got {shape}. Pass the shape that was packed.")
    expected = -(-math.prod(shape) * bits // 8)
    checks.shape("packed", packed, (expected,), f"{bits} bits for each of the values of shape {shape}")
    return _unpack(packed, bits, shape, np.dtype(dtype))


def integer_array(name: str, value: object, dtypes: Sequence[str]) -> Array:
    """Returns `value` as an array of one of the integer dtypes."""
    value = checks.unwrapped(value)
    if not checks.is_array(value) or str(value.dtype) not in dtypes:
        raise TypeError(
            f"`{name}` must be an array of codes ({', '.join(dtypes)}), got {checks.kind(value)}. "
            f"Real values are quantized first; integers convert by jnp.asarray(..., jnp.int8)."
        )
    return checks.as_array(value)
