# SPDX-License-Identifier: Apache-2.0
"""Bits of bytes as files have them, taken apart and put together."""

import math

import numpy as np

U1, U4 = np.uint8, "<u4"
_SIX, _FOUR, _TWO = (np.uint32(byte * 0x01010101) for byte in (0x3F, 0x0F, 0x30))  # bits of each byte of a word


def pieces(v: np.ndarray) -> np.ndarray:
    """(..., m) of bytes -> (...,) of pieces of m bytes, which NumPy copies at once."""
    return v.view(f"V{v.shape[-1]}")[..., 0]


def shifted(v: np.ndarray, by: int, width: int) -> np.ndarray:
    """Bytes to the left, their lowest bits of this width; or to the right, and then these: several bytes in a word."""
    size = math.gcd(v.size, 8)
    words = np.ascontiguousarray(v).reshape(-1).view(f"u{size}")
    mask = words.dtype.type(int.from_bytes(bytes([2**width - 1] * size)))
    if by > 0:
        found = words & mask
        found <<= words.dtype.type(by)
    else:
        found = words >> words.dtype.type(-by)
        found &= mask
    return found.view(U1).reshape(v.shape)


def planes(v: np.ndarray, width: int) -> np.ndarray:
    """(..., m) -> (..., 8 / width, m): the fields of this width of m bytes, from the lowest."""
    found = np.empty((*v.shape[:-1], 8 // width, v.shape[-1]), U1)
    for i in range(8 // width):
        pieces(found)[..., i] = pieces(shifted(v, -i * width, width))
    return found


def in_planes(fields: np.ndarray, width: int) -> np.ndarray:
    """The inverse of `planes`; of integers that have more bits, of their lowest."""
    of = pieces(np.ascontiguousarray(fields))
    found = np.zeros((*fields.shape[:-2], fields.shape[-1]), U1)
    for i in range(8 // width):
        found |= shifted(np.array(of[..., i, None]).view(U1), i * width, width)
    return found


def halves(qs: np.ndarray) -> np.ndarray:
    """(..., m) -> (..., 2 m): the lower halves of m bytes, then the upper ones."""
    return planes(qs, 4).reshape(*qs.shape[:-1], -1)


def in_halves(values: np.ndarray) -> np.ndarray:
    """The inverse of `halves`."""
    return in_planes(values.reshape(*values.shape[:-1], 2, -1), 4)


def six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(..., 3) uint32 -> two of (..., 8) uint8: the integer scales and minimums of a K-quant, four bytes at a time."""
    low, mid, high = (packed[..., i] for i in range(3))
    scales = np.stack([low & _SIX, (high & _FOUR) | ((low >> 2) & _TWO)], -1)
    return scales.view(U1), np.stack([mid & _SIX, ((high >> 4) & _FOUR) | ((mid >> 2) & _TWO)], -1).view(U1)


def in_six_bits(scales: np.ndarray, minimums: np.ndarray) -> np.ndarray:
    """The inverse of `six_bits`."""
    words = (np.ascontiguousarray(v).view(U4) for v in (scales, minimums))
    (first, last), (low, high) = ((v[..., 0], v[..., 1]) for v in words)
    of_four = (last & _FOUR) | ((high & _FOUR) << 4)
    return np.stack([first | ((last & _TWO) << 2), low | ((high & _TWO) << 2), of_four], -1)
