# SPDX-License-Identifier: Apache-2.0
"""The tensors of a file or a folder, read one by one."""

import abc
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._arrays._qarray import QArray
from .._paths import named_in_errors
from . import _gguf, _layouts, _shards
from ._families import Family
from ._ggml import BLOCKS
from ._ggml_arrays import qarray_of
from ._held import put


class Checkpoint(Mapping[str, Any], abc.ABC):
    """The tensors of a file or a folder by name, read one by one: `checkpoint[name]` is a QArray, or an array in float.

    Attributes:
      config: what is said beside the tensors: the metadata of a GGUF file, or the content of config.json.
    """

    config: dict[str, Any]

    def in_order(self, name: str) -> tuple[QArray | Array, Array | None]:
        """A tensor with its inputs in the order of their groups, and that order: `x[..., order]` are its inputs.

        None for a weight whose inputs are in order, which `checkpoint[name]` gives; of another one it raises.
        """
        return self[name], None


class OfGGUF(Checkpoint):
    """A GGUF file."""

    def __init__(self, path: pathlib.Path):
        self.config, self._places, self._data = _gguf.opened(path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, name: str) -> QArray | Array:
        return self.rows(name, slice(None))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def rows(self, name: str, order: slice | np.ndarray) -> QArray | Array:
        """A tensor with its rows in an order."""
        place = self._places[name]
        content = self._data[place.start : place.stop]
        if place.type in _gguf.FLOATS:
            return put(content.view(_gguf.FLOATS[place.type][1]).reshape(place.shape)[order])
        rows = content.reshape(*place.shape[:-1], -1)[order]
        return qarray_of(place.type, BLOCKS[place.type].read(rows))


class InFamily(Checkpoint):
    """A GGUF file by the names of Hugging Face, with the rows of its weights in the order of these."""

    def __init__(self, of: OfGGUF, family: Family):
        self._of, self._family, self.config = of, family, family.config(of.config)
        self.config["tie_word_embeddings"] = family.tensors.get("lm_head.weight") not in of
        layers = self.config["num_hidden_layers"]
        if not isinstance(layers, int) or not 0 < layers <= len(of):
            raise ValueError(f"a GGUF file of {len(of)} tensors says that it has {layers} layers")
        names = {family.in_gguf(name): name for name in family.names(layers)}
        self._names = {names.get(own, own): own for own in of}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> QArray | Array:
        own = self._names[name]
        rows = self._family.rows(name, self._of.shape(own)[0], self.config)
        v, added = self._of.rows(own, slice(None) if rows is None else np.argsort(rows)), self._family.added(name)
        return put(np.asarray(v) - added) if added and not isinstance(v, QArray) else v


_OF_INTEGERS = np.int8, jnp.float8_e4m3fn, jnp.float8_e5m2  # which mean nothing without a scale


class OfFolder(Checkpoint):
    """A folder of safetensors files."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self.config, self._places = _shards.opened(path)
        self._layout = _layouts.layout_of(self.config)
        self._weights = self._layout.weights(self._places) if self._layout else {}
        parts = {part for of in self._weights.values() for part in of.values()}
        for name in self._places.keys() - parts:
            if name.endswith(".weight") and self._places[name].dtype in _OF_INTEGERS:
                raise ValueError(f"{path}: {name!r} is of {self._places[name].dtype.name}, and has no scale.")
        if twice := [name for name in self._weights if name in self._places and name not in parts]:
            raise ValueError(f"{path}: {twice[0]!r} is there in float and in integers.")
        self._names = [*self._weights, *(name for name in self._places if name not in parts)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> QArray | Array:
        v, order = self.in_order(name)
        if order is not None:
            raise ValueError(
                f"The inputs of {name!r} are in groups by an order of their own (act order), so that no block of them "
                "shares a scale. Take weight, order = checkpoint.in_order(name), and contract x[..., order] with it."
            )
        return v

    def in_order(self, name: str) -> tuple[QArray | Array, Array | None]:
        with named_in_errors(str(self._path)), named_in_errors(name):
            if name not in self._weights:
                return put(self._places[name].read()), None
            parts = {end: self._places[of].read() for end, of in self._weights[name].items()}
            assert self._layout is not None
            found = _layouts.read(self._layout, parts, self.config)
            return found.weight, None if found.order is None else put(found.order)


def read(path: str | os.PathLike, family: Family | None = None) -> Checkpoint:
    """Opens a quantized model: a GGUF file, or a folder of safetensors files as Hugging Face has them.

    Integers stay the integers of the file, and scales its scales: `dequantize(checkpoint[name])` has the bits that the
    reference reader of the format gives. Nothing but a header is read before a tensor is asked for.

    - GGUF: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K and MXFP4; versions 2 and 3.
    - Folders, by the `quant_method` of config.json: compressed-tensors (integers of 2, 4 and 8 bits, packed or not;
      float8 of channels, tensors, tiles; MXFP4; NVFP4), awq, gptq (versions 1 and 2, act order), fp8 (of DeepSeek) and
      mxfp4 (of gpt-oss); and folders in float. A weight has the name and shape that it has in float.

    Where a tile is cut off at an edge, its scales are repeated for tiles that divide the axis. Scales of NVFP4 are in
    float32 unless a factor gives the same products as the file's divisor.

    Args:
      path: str or path of a file that ends in ".gguf", or of a folder with a config.json.
      family: of the model, such as `LLAMA`: a GGUF file is then read by the names of Hugging Face, with a config.json
        for `config`, and the rows of its queries and keys in halves.

    Returns:
      A Checkpoint: a Mapping of names to QArrays and arrays. A file must stay as it is while tensors are read.

    Gradient: none.

    Raises:
      FileNotFoundError: if there is no file.
      ValueError: for a file that is damaged, or that contradicts itself, with the file, the tensor, what was expected.
      ImportError: for a folder without the package safetensors.

    Source: ggml's `ggml-common.h` and `gguf.md`; compressed-tensors 0.20; AutoAWQ 0.2; AutoGPTQ 0.7; transformers 5.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from jaxquant import quantize, weight_spec
    >>> from jaxquant.checkpoints import read, write
    >>> w = quantize(jnp.array([[0.7, -0.2], [7.0, 1.0]]), weight_spec(4, channel_axis=0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/model", {"up.weight": w}, {"model_type": "mine"})
    ...     checkpoint = read(f"{folder}/model")
    ...     checkpoint["up.weight"].values.tolist()
    [[7, -2], [7, 1]]
    """
    path = pathlib.Path(path)
    if path.suffix == ".gguf":
        whole = OfGGUF(path)
        with named_in_errors(str(path)):
            return whole if family is None else InFamily(whole, family)
    if family is not None:
        raise ValueError(f"`family` is for a GGUF file, got {str(path)!r}. A folder has the names of its family.")
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder and no file that ends in .gguf.")
    return OfFolder(path)
