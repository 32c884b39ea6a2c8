# SPDX-License-Identifier: Apache-2.0
"""The container of GGUF files, versions 2 and 3: metadata, and where the bytes of each tensor are."""

import math
import os
import pathlib
import struct
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ._ggml import BLOCKS

FLOATS = {"F32": (0, np.dtype("<f4")), "F16": (1, np.dtype("<f2")), "BF16": (30, np.dtype(jnp.bfloat16))}
TYPES = {number: name for name, (number, _) in FLOATS.items()} | {block.number: name for name, block in BLOCKS.items()}
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MOST_AXES = 4


class Place(NamedTuple):
    """Where a tensor lies.

    Attributes:
      shape: its axes, the last of which lies in one piece.
      type: the name of its type.
      start, stop: its bytes in the file.
    """

    shape: tuple[int, ...]
    type: str
    start: int
    stop: int


class _Cursor:
    """Reads on through the bytes of a file, and never beyond them."""

    def __init__(self, path: pathlib.Path, data: np.ndarray):
        self.path, self.data, self.at = path, data.data, 0

    def fail(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is no sound GGUF file: at byte {self.at} {what}.")

    def take(self, n: int, what: str) -> memoryview:
        if n > len(self.data) - self.at:
            raise self.fail(f"{what} should take {n:,} bytes, and {len(self.data) - self.at:,} are left")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, kind: str, what: str) -> Any:
        (v,) = struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind), what))
        return v

    def count(self, least: int, what: str) -> int:
        """A number of things of which each takes `least` bytes, and which so must be there."""
        n = self.number("Q", what)
        if n * least > len(self.data) - self.at:
            raise self.fail(f"{what} is {n:,}, more than the {len(self.data) - self.at:,} bytes that are left can hold")
        return n

    def string(self, what: str) -> str:
        try:
            return bytes(self.take(self.number("Q", what), what)).decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is no UTF-8 ({error.reason})") from error

    def value(self, kind: int, what: str) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind], what)
        if kind == STRING:
            return self.string(what)
        if kind != ARRAY:
            raise self.fail(f"{what} has type {kind}, which is none of GGUF's")
        of = self.number("I", what)
        if of in NUMBERS:
            dtype = np.dtype("<" + NUMBERS[of])
            n = self.count(dtype.itemsize, what)
            return np.frombuffer(self.take(n * dtype.itemsize, what), dtype)
        n = self.count(8, what)
        if of != STRING:
            raise self.fail(f"{what} is an array of type {of}, and only numbers and strings are read")
        return [self.string(what) for _ in range(n)]


class GGUF(NamedTuple):
    """A file: its metadata by key, where its tensors are by name, and its bytes, mapped."""

    metadata: dict[str, Any]
    places: dict[str, Place]
    data: np.ndarray


def opened(path: str | os.PathLike) -> GGUF:
    """The content of a file's header; raises where it does not fit the file."""
    path = pathlib.Path(path)
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    cursor = _Cursor(path, data)
    if bytes(cursor.take(4, "the magic number")) != b"GGUF":
        raise ValueError(f"{path} is no GGUF file: it begins with {bytes(data[:4])!r}.")
    version = cursor.number("I", "the version")
    if version not in (2, 3):
        raise ValueError(f"{path} must be of GGUF version 2 or 3, little-endian, got {version}.")
    tensors = cursor.count(8 + 4 + 4 + 8, "the number of tensors")
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count(8 + 4 + 1, "the number of keys")):
        key = cursor.string("a key")
        if key in metadata:
            raise cursor.fail(f"the key {key!r} is there twice")
        metadata[key] = cursor.value(cursor.number("I", key), key)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise cursor.fail(f"general.alignment must be a multiple of 8, got {alignment!r}")
    infos = dict(_info(cursor) for _ in range(tensors))
    if len(infos) < tensors:
        raise cursor.fail("a name of a tensor is there twice")
    base = -(-cursor.at // alignment) * alignment
    places = {name: _place(cursor, name, info, base, alignment) for name, info in infos.items()}
    end = base
    for name, place in places.items():  # one behind the other, as llama.cpp wants them, too
        if place.start != end:
            raise ValueError(f"{path}: {name!r} should begin at byte {end:,}, and begins at {place.start:,}.")
        end = -(-place.stop // alignment) * alignment
        if data[place.stop : end].any():
            raise ValueError(f"{path}: {name!r} has bytes behind its last one, {place.stop:,}, that are not 0.")
    if len(data) > max(end, base):
        raise ValueError(f"{path} has {len(data) - end:,} bytes behind its last tensor.")
    return GGUF(metadata, places, data)


def _info(cursor: _Cursor) -> tuple[str, tuple[list[int], int, int]]:
    name = cursor.string("the name of a tensor")
    ndim = cursor.number("I", f"the rank of {name!r}")
    if ndim > MOST_AXES:
        raise cursor.fail(f"{name!r} has {ndim} axes, and {MOST_AXES} are the most")
    sizes = [cursor.number("Q", f"the shape of {name!r}") for _ in range(ndim)]
    return name, (sizes, cursor.number("I", f"the type of {name!r}"), cursor.number("Q", f"the offset of {name!r}"))


def _place(cursor: _Cursor, name: str, info: tuple[list[int], int, int], base: int, alignment: int) -> Place:
    sizes, number, offset = info
    shape, path = tuple(sizes[::-1]), cursor.path
    if number not in TYPES:
        raise ValueError(f"{path}: {name!r} is of type {number}, which is none of {', '.join(TYPES.values())}.")
    kind = TYPES[number]
    size, nbytes = (1, FLOATS[kind][1].itemsize) if kind in FLOATS else (BLOCKS[kind].size, BLOCKS[kind].dtype.itemsize)
    if shape and shape[-1] % size:
        raise ValueError(f"{path}: {name!r} of shape {shape} is {kind}, whose rows are multiples of {size}.")
    start, length = base + offset, math.prod(shape) // size * nbytes
    if offset % alignment or start + length > len(cursor.data):
        raise ValueError(
            f"{path}: {name!r} should be {length:,} bytes at {start:,}, a multiple of {alignment}, of a file of "
            f"{len(cursor.data):,} bytes."
        )
    return Place(shape, kind, start, start + length)
