# SPDX-License-Identifier: Apache-2.0
"""Blocks of bytes as GGUF has them, and the numbers in them: `value * scale + minimum`, in float32.

Along the last axis. A block of a K-quant has float16 scales, and integer scales of 16 or 32 values beside them.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

U1, I1, F2, U4 = np.uint8, np.int8, "<f2", "<u4"
_SIX, _FOUR, _TWO = (np.uint32(byte * 0x01010101) for byte in (0x3F, 0x0F, 0x30))  # bits of each byte of a word


class Scale(NamedTuple):
    """Numbers of groups along the last axis: of themselves, or integers times a number of more groups.

    Attributes:
      of_groups: (..., groups), float16, or uint8 exponents; or integers of up to 8 bits.
      of_blocks: (..., blocks), float16, which scales the integers; None where there are none.
    """

    of_groups: np.ndarray
    of_blocks: np.ndarray | None = None

    def each(self, f: Callable[[np.ndarray], np.ndarray]) -> "Scale":
        """A function of both arrays."""
        return Scale(f(self.of_groups), None if self.of_blocks is None else f(self.of_blocks))


class Numbers(NamedTuple):
    """The content of blocks.

    Attributes:
      values: (..., n), unsigned integers, but int8 of 8 bits, and codes of a float; or (..., n / 2), two in a byte.
      scale, minimum: of groups of them; a minimum may be None.
    """

    values: np.ndarray
    scale: Scale
    minimum: Scale | None = None

    def each(self, f: Callable[[np.ndarray], np.ndarray]) -> "Numbers":
        """A function of all arrays."""
        return Numbers(f(self.values), self.scale.each(f), None if self.minimum is None else self.minimum.each(f))


def halves(qs: np.ndarray) -> np.ndarray:
    """(..., m) -> (..., 2 m): the lower halves of m bytes, then the upper ones."""
    return np.concatenate([qs & 15, qs >> 4], -1)


def in_halves(values: np.ndarray) -> np.ndarray:
    """The inverse of `halves`."""
    low, high = np.split(values.astype(U1), 2, -1)
    return low | (high << 4)


def planes(bits: np.ndarray, width: int) -> np.ndarray:
    """(..., m) -> (..., 8 / width, m): the fields of this width of m bytes, from the lowest."""
    shifts = np.arange(0, 8, width, dtype=U1)[:, None]
    return (bits[..., None, :] >> shifts) & U1(2**width - 1)


def in_planes(fields: np.ndarray, width: int) -> np.ndarray:
    """The inverse of `planes`."""
    shifts = np.arange(0, 8, width, dtype=U1)[:, None]
    return np.bitwise_or.reduce(fields.astype(U1) << shifts, -2)


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


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A type of blocks.

    Attributes:
      number: of the type in a file.
      fields: of a block, as NumPy has them.
      size: how many values a block has.
      unpack: the fields -> Numbers, whose last axis are the values and groups of one block.
      pack: its inverse, to a dict of fields.
      distance: of integers of 4 bits, which stay two in a byte, how far apart these are; else 0.
    """

    number: int
    fields: tuple
    size: int
    unpack: Callable[[np.ndarray], Numbers]
    pack: Callable[[Numbers], dict[str, np.ndarray]]
    distance: int = 0

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(list(self.fields))

    def read(self, rows: np.ndarray) -> Numbers:
        """The numbers of (..., bytes), rows of whole blocks."""
        blocks = np.ascontiguousarray(rows).view(self.dtype)
        return self.unpack(blocks).each(lambda v: v.reshape(*v.shape[:-2], -1))

    def write(self, numbers: Numbers) -> np.ndarray:
        """(..., bytes) of numbers: the inverse of `read`."""
        n = numbers.values.shape[-1] * (2 if self.distance else 1) // self.size
        of = numbers.each(lambda v: v.reshape(*v.shape[:-1], n, v.shape[-1] // n))
        blocks = np.empty(of.values.shape[:-1], self.dtype)
        for name, v in self.pack(of).items():
            blocks[name] = v
        return blocks.view(U1).reshape(*blocks.shape[:-1], -1)


def _one(v: np.ndarray) -> Scale:
    return Scale(v[..., None])


def _fifth(qh: np.ndarray) -> np.ndarray:
    """(...,) uint32 -> (..., 32): its bits."""
    return ((qh[..., None] >> np.arange(32, dtype=np.uint32)) & 1).astype(U1)


def _in_fifth(bits: np.ndarray) -> np.ndarray:
    return np.bitwise_or.reduce(bits.astype(np.uint32) << np.arange(32, dtype=np.uint32), -1)


def _plain(number: int, bits: int, has_minimum: bool) -> BlockType:
    """32 values of 4 or 5 bits with a float16 scale: the lower halves of bytes first; fifth bits beside them."""
    fields = (("d", F2), *[("m", F2)] * has_minimum, *[("qh", U4)] * (bits == 5), ("qs", U1, 16))

    def unpack(b: np.ndarray) -> Numbers:
        v = b["qs"] if bits == 4 else halves(b["qs"]) | (_fifth(b["qh"]) << 4)
        return Numbers(v, _one(b["d"]), _one(b["m"]) if has_minimum else None)

    def pack(of: Numbers) -> dict[str, np.ndarray]:
        found = {"d": of.scale.of_groups[..., 0]}
        if of.minimum is not None:
            found["m"] = of.minimum.of_groups[..., 0]
        v = of.values
        return found | ({"qs": v} if bits == 4 else {"qs": in_halves(v & 15), "qh": _in_fifth(v >> 4)})

    return BlockType(number, fields, 32, unpack, pack, 16 if bits == 4 else 0)


def _of_k(number: int, bits: int) -> BlockType:
    """256 values of 4 or 5 bits in groups of 32, with scales and minimums of 6 bits: 64 values to 32 bytes."""
    fields = (("d", F2), ("dmin", F2), ("scales", U4, 3), *[("qh", U1, 32)] * (bits == 5), ("qs", U1, (4, 32)))

    def unpack(b: np.ndarray) -> Numbers:
        v = b["qs"] if bits == 4 else planes(b["qs"], 4).reshape(*b.shape, 8, 32) | (planes(b["qh"], 1) << 4)
        scales, minimums = six_bits(b["scales"])
        minimum = Scale(minimums, -b["dmin"][..., None])
        return Numbers(v.reshape(*b.shape, -1), Scale(scales, b["d"][..., None]), minimum)

    def pack(of: Numbers) -> dict[str, np.ndarray]:
        v, (scale, minimum) = of.values.reshape(*of.values.shape[:-1], -1, 32), of[1:]
        assert minimum is not None
        assert scale.of_blocks is not None
        assert minimum.of_blocks is not None
        found = {"d": scale.of_blocks[..., 0], "dmin": -minimum.of_blocks[..., 0]}
        found["scales"] = in_six_bits(scale.of_groups, minimum.of_groups)
        if bits == 4:
            return found | {"qs": v}
        return found | {"qs": in_planes((v & 15).reshape(*v.shape[:-2], 4, 2, 32), 4), "qh": in_planes(v >> 4, 1)}

    return BlockType(number, fields, 256, unpack, pack, 32 if bits == 4 else 0)


def _of_8_bits() -> BlockType:
    unpack = lambda b: Numbers(b["qs"], _one(b["d"]))
    return BlockType(
        8, (("d", F2), ("qs", I1, 32)), 32, unpack, lambda of: {"d": of.scale.of_groups[..., 0], "qs": of.values}
    )


def _of_6_bits() -> BlockType:
    """256 values of 6 bits in groups of 16: of 128 values the lower four bits in 64 bytes, the upper two in 32."""
    fields = (("ql", U1, (2, 64)), ("qh", U1, (2, 32)), ("scales", I1, 16), ("d", F2))

    def unpack(b: np.ndarray) -> Numbers:
        low = planes(b["ql"], 4).reshape(*b.shape, 2, 4, 32)
        v = low | (planes(b["qh"], 2) << 4)
        return Numbers(v.reshape(*b.shape, 256), Scale(b["scales"], b["d"][..., None]))

    def pack(of: Numbers) -> dict[str, np.ndarray]:
        v = of.values.reshape(*of.values.shape[:-1], 2, 4, 32)
        low = (v & 15).reshape(*v.shape[:-3], 2, 2, 64)
        assert of.scale.of_blocks is not None
        found = {"ql": in_planes(low, 4), "qh": in_planes(v >> 4, 2), "scales": of.scale.of_groups}
        return found | {"d": of.scale.of_blocks[..., 0]}

    return BlockType(14, fields, 256, unpack, pack)


def _of_mxfp4() -> BlockType:
    """32 codes of e2m1, with the exponent of a power of two, plus 127."""
    unpack = lambda b: Numbers(halves(b["qs"]), _one(b["e"]))
    pack = lambda of: {"e": of.scale.of_groups[..., 0], "qs": in_halves(of.values)}
    return BlockType(39, (("e", U1), ("qs", U1, 16)), 32, unpack, pack)


BLOCKS = {
    "Q4_0": _plain(2, 4, False),
    "Q4_1": _plain(3, 4, True),
    "Q5_0": _plain(6, 5, False),
    "Q5_1": _plain(7, 5, True),
    "Q8_0": _of_8_bits(),
    "Q4_K": _of_k(12, 4),
    "Q5_K": _of_k(13, 5),
    "Q6_K": _of_6_bits(),
    "MXFP4": _of_mxfp4(),
}
