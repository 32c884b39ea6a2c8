# SPDX-License-Identifier: Apache-2.0
"""The tensors of a folder of safetensors files: where each lies. The package safetensors checks what a file says."""

import json
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1",
    "U16": "<u2", "U32": "<u4", "U64": "<u8", "BOOL": "?", "BF16": jnp.bfloat16, "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2, "F8_E8M0": jnp.float8_e8m0fnu,
}  # fmt: skip


class Place(NamedTuple):
    """Where a tensor lies: its bytes in a file, and what they are."""

    path: pathlib.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self) -> np.ndarray:
        content = np.memmap(self.path, np.uint8, "r") if self.stop > self.start else np.zeros(0, np.uint8)
        return content[self.start : self.stop].view(self.dtype).reshape(self.shape)


def opened(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, Place]]:
    """The content of config.json, and the places of all tensors."""
    config, index = _json(folder / "config.json"), folder / "model.safetensors.index.json"
    named = _json(index).get("weight_map") if index.exists() else None
    if named is None:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} has no *.safetensors. Pass the folder of a model of Hugging Face.")
    elif isinstance(named, dict) and all(isinstance(v, str) and pathlib.PurePath(v).name == v for v in named.values()):
        files = sorted(set(named.values()))
    else:
        raise ValueError(f"{index}: `weight_map` must be names of files in the folder by names of tensors.")
    places: dict[str, Place] = {}
    for file in files:
        if not (folder / file).is_file():
            raise ValueError(f"{folder} lacks {file}, which {index.name} names. Download it, too.")
        found = _places(folder / file)
        if twice := sorted(set(found) & set(places)):
            raise ValueError(f"{folder}: {twice[0]!r} is in {file} and in {places[twice[0]].path.name}.")
        places |= found
    for name, file in (named or {}).items():
        if name not in places or places[name].path.name != file:
            raise ValueError(f"{folder}: {name!r} should be in {file}, as {index.name} says, and is not.")
    return config, places


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}.") from error
    if not isinstance(said, dict):
        raise ValueError(f"{path} must hold an object, got {type(said).__name__}.")
    return said


def _places(path: pathlib.Path) -> dict[str, Place]:
    import safetensors

    try:
        with safetensors.safe_open(path, framework="numpy") as file:  # checks offsets, sizes and overlaps
            names = set(file.keys())
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no sound safetensors file: {error}.") from error
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size), object_pairs_hook=lambda pairs: _once(path, pairs))
    header.pop("__metadata__", None)
    if unknown := sorted({of["dtype"] for of in header.values()} - set(_DTYPES)):
        raise ValueError(f"{path} has tensors of {unknown[0]}, and of {', '.join(_DTYPES)} they are read.")
    assert names == set(header)
    return {
        name: Place(
            path, np.dtype(_DTYPES[of["dtype"]]), tuple(of["shape"]), *(8 + size + at for at in of["data_offsets"])
        )
        for name, of in header.items()
    }


def _once(path: pathlib.Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"{path} names a tensor twice.")
    return found
