# SPDX-License-Identifier: Apache-2.0
"""Whole files of models: GGUF, and folders of Hugging Face in the layout of compressed-tensors."""

import json
import math
import operator
import os
import pathlib
import secrets
import shutil
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._arrays._qarray import QArray
from .._base import _checks as checks
from .._paths import named_in_errors
from .._spec._granularity import PerBlock, PerChannel, PerTensor
from ._families import Family
from ._ggml import BLOCKS
from ._ggml_arrays import numbers_of, type_of
from ._layouts import multiplies_as

_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # of safetensors, and types of GGUF
_INTEGERS = {"int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64", "float8_e4m3fn": "F8_E4M3"}


def write(
    path: str | os.PathLike,
    tensors: Mapping[str, Any],
    config: Mapping[str, Any],
    family: Family | None = None,
    *,
    metadata: Mapping[str, Any] | None = None,
    like: str | os.PathLike | None = None,
) -> None:
    """Writes a model as others load it: a GGUF file for llama.cpp, or a folder for transformers.

    The integers and scales of QArrays are written as they are. One that is on no lattice of the format raises, with the
    spec to train with: nothing is rounded here.

    - A path that ends in ".gguf": the lattices of `gguf_spec`, in blocks along the inputs. Weights that are 1-D are
      written in float32, as llama.cpp wants them.
    - Else a folder with config.json and model.safetensors, in the layout of compressed-tensors: signed integers of 4 or
      8 bits, with or without zero points, or float8_e4m3fn, with scales of rows, of groups of inputs, or of tiles
      (float8), in float32, float16 or bfloat16; MXFP4; and NVFP4 whose scale of the tensor divides as it multiplies,
      as a power of two does. Inputs are in float there.

    Args:
      path: str or path. A file there is replaced, at once and whole; a folder must be new or empty.
      tensors: names of Hugging Face -> QArrays and floating arrays, weights as (outputs, inputs): a mapping that reads
        one at a time, such as a Checkpoint, is written with one in memory.
      config: content of config.json.
      family: of the model, such as `LLAMA`; for GGUF.
      metadata: more keys of GGUF, such as a tokenizer's: `{k: v for k, v in checkpoint.config.items() if
        k.startswith("tokenizer.")}` of a file that was read. Without, the file has no tokenizer.
      like: folder whose other files, such as a tokenizer, are copied; for a folder.

    Returns:
      None.

    Gradient: none; arrays are read.

    Raises:
      ValueError: for a QArray on no lattice of the format, a name that is not of the family, a tensor that is missing,
        and for rotary embeddings that are scaled, which `metadata` can say.
      ImportError: for GGUF without the package gguf.

    Source: as `read`.

    >>> import tempfile
    >>> import numpy as np
    >>> from jaxquant.checkpoints import write
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/model", {"up.weight": np.ones((2, 2))}, {})
    Traceback (most recent call last):
    ...
    ValueError: At 'up.weight': expected a QArray, or an array in float32, float16, bfloat16, got ...
    """
    path = pathlib.Path(path)
    if path.suffix != ".gguf":
        return _write_folder(path, tensors, config, like)
    if family is None:
        raise ValueError("`family` must be given for a GGUF file: LLAMA, QWEN2, QWEN3, GEMMA3, or your own Family.")
    unfinished = path.with_name(f"{path.stem}.{secrets.token_hex(8)}{path.suffix}")
    try:
        _write_gguf(unfinished, tensors, config, family, metadata or {})
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


# ---- GGUF.


def _write_gguf(
    path: pathlib.Path, tensors: Mapping[str, Any], config: Mapping[str, Any], family: Family,
    metadata: Mapping[str, Any],
) -> None:  # fmt: skip
    _check_complete(tensors, config, family)
    import gguf

    writer = gguf.GGUFWriter(path, family.architecture)
    settings = family.metadata(config) | {"tokenizer.ggml.model": "none"} | dict(metadata)
    for key, v in settings.items():
        if key != "general.architecture":
            _add(writer, key, v.tolist() if isinstance(v, np.ndarray) else v)
    for name in tensors:
        v, own = tensors[name], family.in_gguf(name)
        with named_in_errors(name):
            if isinstance(v, QArray):
                kind = type_of(v)
                block = BLOCKS[kind]
                shape = [*v.shape[:-1], v.shape[-1] // block.size * block.dtype.itemsize]
                writer.add_tensor_info(
                    own, shape, np.dtype(np.uint8), math.prod(shape), gguf.GGMLQuantizationType[kind]
                )
            else:
                kind = "F32" if v.ndim < 2 else _FLOATS[_floating(v)]
                size = 4 if kind == "F32" else 2
                dtype = np.dtype(np.float32 if kind == "F32" else np.float16)
                writer.add_tensor_info(own, v.shape, dtype, v.size * size, gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in tensors:
        v = tensors[name]
        rows = family.rows(name, v.shape[0], config)
        if isinstance(v, QArray):
            kind, numbers = numbers_of(v)
            writer.write_tensor_data(
                BLOCKS[kind].write(numbers if rows is None else numbers.each(operator.itemgetter(rows)))
            )
        else:
            v = np.asarray(v)[slice(None) if rows is None else rows]
            v = v.astype(np.float32) if v.ndim < 2 else v
            v = v + added if (added := family.added(name)) else v
            writer.write_tensor_data(v.view(np.uint16) if v.dtype == jnp.bfloat16 else v)
    writer.close()


def _check_complete(tensors: Mapping[str, Any], config: Mapping[str, Any], family: Family) -> None:
    """Raises for what a reader would fill in silently, or refuse."""
    missing = set(family.names(config["num_hidden_layers"])) - set(tensors)
    if config.get("tie_word_embeddings", False):
        missing.discard("lm_head.weight")
    if missing:
        raise ValueError(
            f"`tensors` lacks {', '.join(sorted(missing)[:4])} of the family {family.architecture!r}. A model whose "
            "head is its embedding says so in `config`: tie_word_embeddings=True."
        )


def _add(writer: Any, key: str, v: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[list] = writer.add_array
    if type(v) not in kinds:
        raise ValueError(f"`metadata` at {key!r} must be a bool, int, float, str or list of one of these, got {v!r}.")
    kinds[type(v)](key, v)


def _floating(v: Any) -> str:
    """The name of the dtype of a floating array of 16 or 32 bits."""
    name = np.dtype(getattr(v, "dtype", object)).name
    if name not in _FLOATS:
        raise ValueError(f"expected a QArray, or an array in {', '.join(_FLOATS)}, got {checks.kind(v)} of {name}")
    return name


# ---- Folders.


def _write_folder(
    path: pathlib.Path, tensors: Mapping[str, Any], config: Mapping[str, Any], like: str | os.PathLike | None
) -> None:
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"`path` must be a new or an empty folder, or end in .gguf, got {str(path)!r}.")
    path.mkdir(parents=True, exist_ok=True)
    groups: dict[str, tuple[str, dict[str, Any], list[str]]] = {}
    ignored: list[str] = []

    def parts(name: str) -> dict[str, np.ndarray]:
        v, module = tensors[name], name.removesuffix(".weight")
        with named_in_errors(name):
            if not isinstance(v, QArray):
                _floating(v)
                if v.ndim == 2:
                    ignored.append(module)
                return {name: np.asarray(v)}
            if module == name:
                raise ValueError("a QArray must have a name that ends in .weight")
            kind, said, of = _compressed(v)
        groups.setdefault(json.dumps([kind, said]), (kind, said, []))[2].append(module)
        return {module + end: part for end, part in of.items()}

    try:
        _stream(path / "model.safetensors", tensors, parts)
    except BaseException:
        (path / "model.safetensors").unlink(missing_ok=True)  # which has no header yet
        raise
    found = [
        {"targets": modules, "weights": said, "input_activations": None, "output_activations": None, "format": kind}
        for kind, said, modules in groups.values()
    ]
    kinds = {kind for kind, _, _ in groups.values()}
    of_groups = {
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ignored,
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "config_groups": {f"group_{i}": group for i, group in enumerate(found)},
    }  # fmt: skip
    config = {key: v for key, v in config.items() if key != "quantization_config"}
    config |= {"quantization_config": of_groups} if groups else {}
    (path / "config.json").write_text(json.dumps(config, indent=1))
    for other in sorted(pathlib.Path(like).iterdir()) if like else ():
        is_of_weights = other.suffix in (".safetensors", ".bin", ".gguf") or other.name.endswith(".index.json")
        if other.is_file() and not is_of_weights and other.name != "config.json":
            shutil.copy(other, path / other.name)


def _compressed(q: QArray) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """The format, what the config says of the weight, and its parts."""
    spec, kind = q.spec, q.spec.granularity
    if q.frozen is not None and q.frozen.activation is not None:
        raise ValueError(
            f"its inputs were {q.frozen.activation} where it was frozen, and files of this layout have inputs in "
            "float. Train with a rule without `activation`."
        )
    if spec.format == "float4_e2m1fn" and q.ndim == 2:
        return _float4(q)
    is_float8 = spec.format == "float8_e4m3fn"
    is_integers = not spec.format and spec.signed and spec.bits in (4, 8)
    sizes = kind.sizes if isinstance(kind, PerBlock) else {}
    is_grouped = len(sizes) == 1 and next(iter(sizes)) in (1, -1)
    is_tiled = is_float8 and len(sizes) == 2 and q.ndim == 2
    fits = q.ndim == 2 and (kind in (PerTensor(), PerChannel(0)) or is_grouped or is_tiled)
    if not (spec.is_plain and fits and (is_float8 or is_integers) and spec.scale_dtype in _FLOATS):
        raise ValueError(
            "expected signed integers of 4 or 8 bits or float8_e4m3fn, (outputs, inputs), with scales of rows, groups "
            f"of inputs, or tiles, got {spec} of shape {q.shape}. Train with weight_spec(4, block_size=32) or the like."
        )
    said: dict[str, Any] = {"num_bits": spec.bits, "symmetric": spec.symmetric, "dynamic": False}
    said |= {"type": "float" if is_float8 else "int"}
    if is_tiled:
        said |= {"strategy": "block", "block_structure": list(sizes.values())}
    elif is_grouped:
        said |= {"strategy": "group", "group_size": next(iter(sizes.values()))}
    else:
        said |= {"strategy": "tensor" if kind == PerTensor() else "channel"}
    scale = np.asarray(q.scale)
    parts = {".weight_scale": scale.reshape(1) if kind == PerTensor() else scale}
    values = np.asarray(q.values)
    if is_float8:
        return "float-quantized", said, parts | {".weight": values}
    packed = lambda v: _words(v.view(np.uint8) + np.uint8(2 ** (spec.bits - 1)), spec.bits)
    parts |= {".weight_packed": packed(values), ".weight_shape": np.array(q.shape, np.int64)}
    if not spec.symmetric:
        parts[".weight_zero_point"] = np.ascontiguousarray(packed(np.asarray(q.zero_point).reshape(scale.shape).T).T)
    return "pack-quantized", said, parts


def _float4(q: QArray) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """Two codes of e2m1 in a byte, the first one low."""
    spec, sizes = q.spec, q.spec.granularity.sizes
    scale, codes = np.asarray(q.scale), np.asarray(q.values).view(np.uint8)
    parts = {".weight_packed": codes[:, ::2] | (codes[:, 1::2] << 4)}
    said = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
    if spec.scale_dtype == "float8_e8m0fnu" and sizes in ({1: 32}, {-1: 32}):
        said |= {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
        return "mxfp4-pack-quantized", said, parts | {".weight_scale": scale.view(np.uint8)}
    if spec.scale_dtype == "float8_e4m3fn" and sizes in ({1: 16}, {-1: 16}):
        factor = np.asarray(q.tensor_scale, np.float32).reshape(1)
        if multiplies_as(factor[0], np.float32(1) / factor[0], scale):
            said |= {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
            parts |= {".weight_scale": scale, ".weight_global_scale": np.float32(1) / factor}
            return "nvfp4-pack-quantized", said, parts
        raise ValueError(
            f"the scale of the tensor is {factor[0]}, and the file divides by one, which gives other values. Make it a "
            "power of two."
        )
    raise ValueError(f"expected blocks of mxfp4_spec(1) or nvfp4_spec(1), (outputs, inputs), got {spec}.")


def _words(v: np.ndarray, bits: int) -> np.ndarray:
    """(..., n) of integers of few bits -> int32 words, the first integer in the lowest bits; zeros behind the last."""
    each = 32 // bits
    v = np.pad(v & np.uint8(2**bits - 1), [*[(0, 0)] * (v.ndim - 1), (0, -v.shape[-1] % each)])
    if bits == 4:
        pairs = np.ascontiguousarray(v).view("<u2")
        v = (pairs | (pairs >> 4)).astype(np.uint8)  # of its lower byte
    return np.ascontiguousarray(v).view(np.int32)


def _stream(path: pathlib.Path, tensors: Mapping[str, Any], parts: Any) -> None:
    """A safetensors file with one tensor in memory: the header is written last, into room that is left for it."""
    room = 8 * -(-sum(6 * (len(name.encode()) + 160) for name in tensors) // 8) + 64
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names, at = {**_FLOATS, **_INTEGERS}, 0
    with path.open("wb") as file:
        file.seek(8 + room)
        for tensor in tensors:
            for name, v in parts(tensor).items():
                header[name] = {"dtype": names[v.dtype.name], "shape": v.shape, "data_offsets": [at, at + v.nbytes]}
                file.write(np.ascontiguousarray(v).reshape(-1).view(np.uint8).data)
                at += v.nbytes
        text = json.dumps(header).encode()
        assert len(text) <= room
        file.seek(0)
        file.write(room.to_bytes(8, "little") + text.ljust(room))
