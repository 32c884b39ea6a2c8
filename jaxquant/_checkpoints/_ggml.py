# SPDX-License-Identifier: Apache-2.0
"""Blocks of bytes as GGUF has them, and the numbers in them: `value * scale + minimum`, in float32.

Along the last axis. A block of a K-quant has float16 scales, and integer scales of 16 or 32 values beside them.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ._bits import U1, U4, halves, in_halves, in_planes, in_six_bits, planes, shifted, six_bits

I1, F2 = np.int8, "<f2"


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


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A type of blocks.

    Attributes:
      number: of the type in a file.
      fields: of a block, as NumPy has them.
      size: how many values a block has.
      unpack: the fields by name -> Numbers, whose last axis are the values and groups of one block.
      pack: its inverse, to a dict of fields.
      distance: of integers of 4 bits, which stay two in a byte, how far apart these are; else 0.
    """

    number: int
    fields: tuple
    size: int
    unpack: Callable[[dict[str, np.ndarray]], Numbers]
    pack: Callable[[Numbers], dict[str, np.ndarray]]
    distance: int = 0

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(list(self.fields))

    @property
    def of_pieces(self) -> np.dtype:
        """The dtype with a field in one piece, which NumPy copies at once."""
        return np.dtype([(name, f"V{self.dtype[name].itemsize}") for name, *_ in self.fields])

    def read(self, rows: np.ndarray) -> Numbers:
        """The numbers of (..., bytes), rows of whole blocks."""
        blocks = np.ascontiguousarray(rows).view(self.of_pieces)
        of = lambda dtype, v: np.array(v).view(dtype.base).reshape(*blocks.shape, *dtype.shape)
        fields = {name: of(self.dtype[name], blocks[name]) for name, *_ in self.fields}
        return self.unpack(fields).each(lambda v: v.reshape(*v.shape[:-2], -1))

    def write(self, numbers: Numbers) -> np.ndarray:
        """(..., bytes) of numbers: the inverse of `read`."""
        n = numbers.values.shape[-1] * (2 if self.distance else 1) // self.size
        of = numbers.each(lambda v: v.reshape(*v.shape[:-1], n, v.shape[-1] // n))
        blocks = np.empty(of.values.shape[:-1], self.of_pieces)
        for name, v in self.pack(of).items():
            v = np.ascontiguousarray(v, self.dtype[name].base)
            blocks[name] = v.reshape(*blocks.shape, -1).view(self.of_pieces[name])[..., 0]
        return blocks.view(U1).reshape(*blocks.shape[:-1], -1)


def _one(v: np.ndarray) -> Scale:
    return Scale(v[..., None])


def _fifth(qh: np.ndarray) -> np.ndarray:
    """(...,) uint32 -> (..., 32): its bits."""
    return np.unpackbits(qh[..., None].view(U1), axis=-1, bitorder="little")


def _in_fifth(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits, axis=-1, bitorder="little").view(U4)[..., 0]


def _plain(number: int, bits: int, has_minimum: bool) -> BlockType:
    """32 values of 4 or 5 bits with a float16 scale: the lower halves of bytes first; fifth bits beside them."""
    fields = (("d", F2), *[("m", F2)] * has_minimum, *[("qh", U4)] * (bits == 5), ("qs", U1, 16))

    def unpack(b: dict[str, np.ndarray]) -> Numbers:
        v = b["qs"] if bits == 4 else halves(b["qs"])
        if bits == 5:
            v |= shifted(_fifth(b["qh"]), 4, 1)
        return Numbers(v, _one(b["d"]), _one(b["m"]) if has_minimum else None)

    def pack(of: Numbers) -> dict[str, np.ndarray]:
        found = {"d": of.scale.of_groups[..., 0]}
        if of.minimum is not None:
            found["m"] = of.minimum.of_groups[..., 0]
        v = of.values
        return found | ({"qs": v} if bits == 4 else {"qs": in_halves(v), "qh": _in_fifth(v >> 4)})

    return BlockType(number, fields, 32, unpack, pack, 16 if bits == 4 else 0)


def _of_k(number: int, bits: int) -> BlockType:
    """256 values of 4 or 5 bits in groups of 32, with scales and minimums of 6 bits: 64 values to 32 bytes."""
    fields = (("d", F2), ("dmin", F2), ("scales", U4, 3), *[("qh", U1, 32)] * (bits == 5), ("qs", U1, (4, 32)))

    def unpack(b: dict[str, np.ndarray]) -> Numbers:
        v = b["qs"]
        if bits == 5:
            v = planes(v, 4).reshape(*b["d"].shape, 8, 32)
            v |= shifted(planes(b["qh"], 1), 4, 1)
        scales, minimums = six_bits(b["scales"])
        minimum = Scale(minimums, -b["dmin"][..., None])
        return Numbers(v.reshape(*b["d"].shape, -1), Scale(scales, b["d"][..., None]), minimum)

    def pack(of: Numbers) -> dict[str, np.ndarray]:
        v, (scale, minimum) = of.values.reshape(*of.values.shape[:-1], -1, 32), of[1:]
        assert minimum is not None
        assert scale.of_blocks is not None
        assert minimum.of_blocks is not None
        found = {"d": scale.of_blocks[..., 0], "dmin": -minimum.of_blocks[..., 0]}
        found["scales"] = in_six_bits(scale.of_groups, minimum.of_groups)
        if bits == 4:
            return found | {"qs": v}
        return found | {"qs": in_planes(v.reshape(*v.shape[:-2], 4, 2, 32), 4), "qh": in_planes(v >> 4, 1)}

    return BlockType(number, fields, 256, unpack, pack, 32 if bits == 4 else 0)


def _of_8_bits() -> BlockType:
    unpack = lambda b: Numbers(b["qs"], _one(b["d"]))
    return BlockType(
        8, (("d", F2), ("qs", I1, 32)), 32, unpack, lambda of: {"d": of.scale.of_groups[..., 0], "qs": of.values}
    )


def _of_6_bits() -> BlockType:
    """256 values of 6 bits in groups of 16: of 128 values the lower four bits in 64 bytes, the upper two in 32."""
    fields = (("ql", U1, (2, 64)), ("qh", U1, (2, 32)), ("scales", I1, 16), ("d", F2))

    def unpack(b: dict[str, np.ndarray]) -> Numbers:
        v = planes(b["ql"], 4).reshape(*b["d"].shape, 2, 4, 32)
        v |= shifted(planes(b["qh"], 2), 4, 2)
        return Numbers(v.reshape(*b["d"].shape, 256), Scale(b["scales"], b["d"][..., None]))

    def pack(of: Numbers) -> dict[str, np.ndarray]:
        v = of.values.reshape(*of.values.shape[:-1], 2, 4, 32)
        low = v.reshape(*v.shape[:-3], 2, 2, 64)
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
