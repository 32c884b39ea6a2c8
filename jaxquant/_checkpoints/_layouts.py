# SPDX-License-Identifier: Apache-2.0
"""Layouts of quantized weights in folders of Hugging Face, by the `quant_method` of their config.

A weight has the name and the shape that it has in float, (outputs, inputs), and several tensors, its parts.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._arrays._qarray import QArray
from .._spec._granularity import Granularity, PerBlock, PerChannel, PerTensor
from .._spec._spec import QuantSpec
from ._held import Values, held, put

Parts = Mapping[str, np.ndarray]
_AWQ = [0, 4, 1, 5, 2, 6, 3, 7]  # where each output of a word lies


class Read(NamedTuple):
    """A weight, and the order of its inputs: None as they are."""

    weight: QArray
    order: np.ndarray | None = None


class Layout(NamedTuple):
    """The parts of a weight, and how they are read.

    Attributes:
      main: the ends of the names of its integers.
      needed: the ends of other parts, without which the tensor is none of the layout.
      others: the ends of parts that may be missing.
      named: the end of its name.
      read: (parts by their ends, quantization_config) -> Read.
    """

    main: tuple[str, ...]
    needed: tuple[str, ...]
    others: tuple[str, ...]
    named: str
    read: Callable[[Parts, Mapping[str, Any]], Read]

    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """The parts of each weight by their ends, of a file's names."""
        names, found = set(names), dict[str, dict[str, str]]()
        for name in sorted(names):
            main = next((end for end in self.main if name.endswith(end)), None)
            if main is None:
                continue
            module = name.removesuffix(main)
            parts = {end: module + end for end in (*self.needed, *self.others) if module + end in names}
            if set(self.needed) <= set(parts):
                found[module + self.named] = {main: name} | parts
            elif main != ".weight":
                lacking = ", ".join(module + end for end in self.needed if end not in parts)
                raise ValueError(f"{name!r} is there without {lacking}.")
        return found


def _kind(v: np.ndarray) -> str:
    return f"{v.dtype.name} of shape {v.shape}"


def expect(parts: Parts, end: str, shape: tuple[int, ...], *dtypes: DTypeLike) -> np.ndarray:
    """A part, which must have this shape and one of the dtypes."""
    v = parts[end]
    if v.shape != shape or (dtypes and v.dtype not in dtypes):
        of = f" of {' or '.join(np.dtype(dtype).name for dtype in dtypes)}" if dtypes else ""
        raise ValueError(f"expected {end!r} of shape {shape}{of}, got {_kind(v)}")
    return v


def fields(v: np.ndarray, bits: int) -> Values:
    """(..., n) of integers: their fields of 2, 4 or 8 bits, from the lowest; of 4 bits two in a byte."""
    v = np.ascontiguousarray(v).view(np.uint8)
    if bits != 2:
        return Values(v, 1 if bits == 4 else 0)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return Values(((v[..., None] >> shifts) & np.uint8(3)).reshape(*v.shape[:-1], -1))


def cut(values: Values, columns: int) -> Values:
    """The first columns; of an odd number one in each byte."""
    if values.shape[-1] == columns:
        return values
    return Values(values.apart()[..., :columns])


class Groups(NamedTuple):
    """The groups of a weight, and its scales as they are repeated where a last block is cut off."""

    granularity: Granularity
    repeats: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, scale: tuple[int, ...], shape: tuple[int, ...], sizes: tuple[int, ...]) -> "Groups":
        """Of scales of this shape for blocks of these sizes, or for rows, or for all.

        A block that its axis cuts off has fewer values: what divides both is the size of the blocks then.
        """
        if math.prod(scale) == 1:
            return cls(PerTensor(), (1,) * len(scale), ())
        if scale in ((shape[0],), (shape[0], 1)):
            return cls(PerChannel(0), (1,) * len(scale), (shape[0], 1))
        if len(scale) != 2 or scale != tuple(-(-n // size) for n, size in zip(shape, sizes, strict=True)):
            raise ValueError(f"scales of shape {scale} for a weight of shape {shape} in blocks of {sizes}")
        own = [math.gcd(n, size) for n, size in zip(shape, sizes, strict=True)]
        axes = [axis for axis, size in enumerate(sizes) if size > 1]
        repeats = tuple(size // of for size, of in zip(sizes, own, strict=True))
        kind = PerBlock(tuple(axes), tuple(own[axis] for axis in axes))
        return cls(kind, repeats, tuple(n // of for n, of in zip(shape, own, strict=True)))

    def spread(self, v: np.ndarray) -> np.ndarray:
        for axis, n in enumerate(self.repeats):
            v = np.repeat(v, n, axis) if n > 1 else v
        if not self.shape:
            return v.reshape(())
        return v.reshape(self.shape) if v.ndim < 2 else v[tuple(map(slice, self.shape))]


def in_order(g_idx: np.ndarray | None, groups: int, size: int) -> np.ndarray | None:
    """The order of inputs that brings those of a group together; None if they are."""
    if g_idx is None or groups == 1:
        return None
    n = len(g_idx)
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    if n != groups * size or (g_idx[order] != np.arange(n) // size).any():
        raise ValueError(f"a group index that has not {size} of {n} inputs in each of {groups} groups")
    return None if (order == np.arange(n)).all() else order


def in_columns(values: Values, order: np.ndarray | None) -> Values:
    """The values with their inputs in an order; None as they are."""
    return values if order is None else Values(values.apart()[:, order])


def _said(config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What each group of a config of compressed-tensors says of weights."""
    groups = config.get("config_groups")
    found = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    found = [of for of in found if isinstance(of, dict)]
    if not found:
        raise ValueError("`quantization_config` has no `config_groups` with `weights`")
    return found


def _agreeing(
    config: Mapping[str, Any], kind: str, bits: Iterable[int], symmetric: bool = True
) -> Sequence[Mapping[str, Any]]:
    """What a config says of weights of a type and one of these widths; raises if it says nothing of them."""
    bits = list(bits)
    of = lambda said: (said.get("type", "int"), said.get("num_bits"), bool(said.get("symmetric", True)))
    found = [said for said in _said(config) if of(said) in [(kind, n, symmetric) for n in bits]]
    if not found:
        raise ValueError(
            f"its tensors are {kind} of {' or '.join(map(str, bits))} bits {'without' if symmetric else 'with'} zero "
            f"points, and `quantization_config` says (type, num_bits, symmetric) = {list(map(of, _said(config)))}"
        )
    return found


def _block(said: Iterable[Mapping[str, Any]], n: int, groups: int) -> int:
    """The size of `groups` blocks along an axis of n: what a config says, or what divides it."""
    sizes = (of.get("group_size") for of in said)
    fitting = [size for size in sizes if isinstance(size, int) and size > 0 and -(-n // size) == groups]
    return fitting[0] if fitting else -(-n // groups)


def _compressed(parts: Parts, config: Mapping[str, Any]) -> Read:
    if ".weight" in parts:
        return _naive(parts, config)
    packed = parts[".weight_packed"]
    if packed.dtype == np.uint8:
        return _float4(parts, config)
    shape = expect(parts, ".weight_shape", (2,), np.int64, np.int32) if ".weight_shape" in parts else None
    if shape is None or packed.ndim != 2 or packed.dtype != np.int32 or (shape <= 0).any():
        raise ValueError(
            f"expected '.weight_packed' of int32 (outputs, words) and a '.weight_shape', got {_kind(packed)}"
        )
    rows, columns = map(int, shape)
    fitting = [bits for bits in (2, 4, 8) if packed.shape == (rows, -(-columns * bits // 32))]
    if not fitting:
        raise ValueError(
            f"'.weight_packed' of shape {packed.shape} holds no integers of 2, 4 or 8 bits of shape {(rows, columns)}"
        )
    said = _agreeing(config, "int", fitting, ".weight_zero_point" not in parts)
    bits = said[0]["num_bits"]
    values = cut(fields(packed, bits), columns).signed(bits)
    zeros = lambda zero: Values(fields(zero.T, bits).apart()[:, :rows].T).signed(bits).array
    return _grouped(values, parts, said, bits, zeros)


def _grouped(
    values: Values, parts: Parts, said: Sequence[Mapping[str, Any]], bits: int,
    unpacked: Callable[[np.ndarray], np.ndarray],
) -> Read:  # fmt: skip
    """Signed integers (outputs, inputs) with scales of groups of inputs."""
    scale, zero = np.atleast_1d(parts[".weight_scale"]), parts.get(".weight_zero_point")
    groups = scale.shape[-1]
    size = _block(said, values.shape[1], groups)
    of, order = Groups.of(scale.shape, values.shape, (1, size)), in_order(parts.get(".weight_g_idx"), groups, size)
    spec = QuantSpec(
        bits=bits, narrow_range=False, symmetric=zero is None, granularity=of.granularity, scale_dtype=scale.dtype.name
    )
    if zero is not None:
        zero = unpacked(zero)
        if zero.shape != scale.shape:
            raise ValueError(f"zero points of shape {zero.shape} beside scales of shape {scale.shape}")
        zero = of.spread(zero)
    return Read(held(in_columns(values, order), of.spread(scale), spec, zero), order)


def _naive(parts: Parts, config: Mapping[str, Any]) -> Read:
    """Values of 8 bits as they are: int8, or float8."""
    values, scale = parts[".weight"], np.atleast_1d(parts[".weight_scale"])
    if values.dtype == np.int8:
        said = _agreeing(config, "int", [8], ".weight_zero_point" not in parts)
        return _grouped(Values(values), parts, said, 8, lambda zero: zero)
    if values.dtype != jnp.float8_e4m3fn or values.ndim != 2:
        raise ValueError(f"expected a '.weight' of int8 or float8_e4m3fn, (outputs, inputs), got {_kind(values)}")
    said = _agreeing(config, "float", [8])
    tiles = [tuple(of["block_structure"]) for of in said if of.get("block_structure")]
    of_rows = 1, _block(said, values.shape[1], scale.shape[-1])
    return Read(_float8(values, scale, tiles[0] if tiles else of_rows))


def _float8(values: np.ndarray, scale: np.ndarray, sizes: tuple[int, ...]) -> QArray:
    of = Groups.of(scale.shape, values.shape, sizes)
    spec = QuantSpec(format="float8_e4m3fn", granularity=of.granularity, scale_dtype=scale.dtype.name)
    return held(Values(values), of.spread(scale), spec)


def _float4(parts: Parts, config: Mapping[str, Any]) -> Read:
    """Two codes of e2m1 in a byte, the first one low: MXFP4, or NVFP4, whose scale of the tensor divides."""
    _agreeing(config, "float", [4])
    values = fields(parts[".weight_packed"], 4).apart().view(jnp.float4_e2m1fn)
    rows, columns = values.shape
    if ".weight_global_scale" not in parts:
        scale = expect(parts, ".weight_scale", (rows, columns // 32), np.uint8, jnp.float8_e8m0fnu)
        return Read(_mxfp4(values, scale.view(jnp.float8_e8m0fnu), jnp.bfloat16))
    scale = expect(parts, ".weight_scale", (rows, columns // 16), jnp.float8_e4m3fn)
    (divisor,) = expect(parts, ".weight_global_scale", (1,), np.float32)
    return Read(_nvfp4(values, scale, divisor))


def _mxfp4(values: np.ndarray, scale: np.ndarray, dtype: DTypeLike, axis: int = 1) -> QArray:
    spec = QuantSpec(format="float4_e2m1fn", granularity=PerBlock(axis, 32), scale_dtype="float8_e8m0fnu")
    return held(Values(values), scale, spec, dtype=dtype)


def _nvfp4(values: np.ndarray, scale: np.ndarray, divisor: np.float32) -> QArray:
    """With the scales in 8 bits where a factor gives the same products as the divisor, else in float32."""
    spec = QuantSpec(format="float4_e2m1fn", granularity=PerBlock(1, 16), scale_dtype="float8_e4m3fn")
    with np.errstate(all="ignore"):
        factor = np.float32(1) / divisor
        if multiplies_as(factor, divisor, scale):
            return held(Values(values), scale, spec, dtype=jnp.float32, tensor_scale=put(factor))
        in_float = QuantSpec(format="float4_e2m1fn", granularity=PerBlock(1, 16))
        return held(Values(values), scale.astype(np.float32) / divisor, in_float)


def multiplies_as(factor: np.float32, divisor: np.float32, scale: np.ndarray) -> bool:
    """Whether the values of NVFP4 with these scales are the same with a factor as with a divisor of the tensor."""
    own = np.unique(scale.astype(np.float32))
    levels = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)[:, None]
    return bool(((levels * own) * factor == levels * (own / divisor)).all())


def _awq(parts: Parts, config: Mapping[str, Any]) -> Read:
    """(inputs, outputs / 8), the outputs of a word in an order of their own; zero points likewise."""
    if config.get("bits") != 4 or config.get("version", "gemm") != "gemm":
        raise ValueError(
            "AWQ of 4 bits and version 'gemm' is read, got "
            f"bits={config.get('bits')}, version={config.get('version')!r}"
        )
    packed = parts[".qweight"]
    rows, columns = packed.shape[0], packed.shape[-1] * 8
    scale = parts[".scales"]
    size = _block([config], rows, len(scale))
    expect(parts, ".scales", (-(-rows // size), columns), np.float16, jnp.bfloat16)
    expect(parts, ".qweight", (rows, columns // 8), np.int32)
    apart = lambda v: fields(v, 4).apart().reshape(len(v), -1, 8)[..., _AWQ].reshape(len(v), -1)
    zero = apart(expect(parts, ".qzeros", (len(scale), columns // 8), np.int32))
    return Read(_unsigned(Values(apart(packed).T), scale.T, zero.T, size, 4))


def _unsigned(values: Values, scale: np.ndarray, zero: np.ndarray, size: int, bits: int) -> QArray:
    """Unsigned integers (outputs, inputs); signed ones where each zero point is the middle."""
    of, middle = Groups.of(scale.shape, values.shape, (1, size)), 2 ** (bits - 1)
    is_symmetric = bool((zero == middle).all())
    spec = QuantSpec(
        bits=bits, signed=is_symmetric, symmetric=is_symmetric, narrow_range=False, granularity=of.granularity,
        scale_dtype=scale.dtype.name,
    )  # fmt: skip
    if is_symmetric:
        return held(values.signed(bits), of.spread(scale), spec)
    return held(values, of.spread(scale), spec, of.spread(zero))


def _gptq(parts: Parts, config: Mapping[str, Any]) -> Read:
    """(words of inputs, outputs); zero points (groups, words of outputs), less 1 in version 1."""
    bits, version = config.get("bits"), config.get("checkpoint_format", "gptq")
    if bits not in (2, 4, 8) or version not in ("gptq", "gptq_v2"):
        raise ValueError(
            "GPTQ of 2, 4 or 8 bits in the formats 'gptq' and 'gptq_v2' is read, got "
            f"bits={bits}, checkpoint_format={version!r}"
        )
    each, packed = 32 // bits, parts[".qweight"]
    rows, columns = packed.shape[0] * each, packed.shape[-1]
    expect(parts, ".qweight", (rows // each, columns), np.int32)
    scale = parts[".scales"]
    groups, size = len(scale), _block([config], rows, len(scale))
    expect(parts, ".scales", (-(-rows // size), columns), np.float16, jnp.bfloat16, np.float32)
    zero = fields(expect(parts, ".qzeros", (groups, -(-columns // each)), np.int32), bits).apart()[:, :columns]
    zero = (zero + np.uint8(version == "gptq")) & np.uint8(2**bits - 1)
    g_idx = expect(parts, ".g_idx", (rows,), np.int32, np.int64) if ".g_idx" in parts else None
    order = in_order(g_idx, groups, size)
    return Read(_unsigned(in_columns(fields(packed.T, bits), order), scale.T, zero.T, size, bits), order)


def _deepseek(parts: Parts, config: Mapping[str, Any]) -> Read:
    tile = config.get("weight_block_size")
    values = parts[".weight"]
    if not isinstance(tile, list) or len(tile) != 2 or values.dtype != jnp.float8_e4m3fn or values.ndim != 2:
        raise ValueError(
            "expected a '.weight' of float8_e4m3fn and a `weight_block_size` of two numbers, got "
            f"{_kind(values)} and {tile}"
        )
    return Read(_float8(values, parts[".weight_scale_inv"], tuple(tile)))


def _gpt_oss(parts: Parts, config: Mapping[str, Any]) -> Read:
    """(experts, outputs, groups, 16) of bytes -> (experts, inputs, outputs), as the float weight lies."""
    packed = parts["_blocks"]
    if packed.ndim != 4 or packed.shape[-1] != 16 or packed.dtype != np.uint8:
        raise ValueError(f"expected '_blocks' of uint8 (experts, outputs, groups, 16), got {_kind(packed)}")
    experts, rows, groups, _ = packed.shape
    scale = expect(parts, "_scales", (experts, rows, groups), np.uint8)
    values = fields(packed, 4).apart().reshape(experts, rows, -1).view(jnp.float4_e2m1fn).swapaxes(1, 2)
    return Read(_mxfp4(values, scale.view(jnp.float8_e8m0fnu).swapaxes(1, 2), jnp.bfloat16))


_OF_WEIGHT = (".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale")
LAYOUTS = {
    "compressed-tensors": Layout((".weight_packed", ".weight"), (".weight_scale",), _OF_WEIGHT, ".weight", _compressed),
    "awq": Layout((".qweight",), (".qzeros", ".scales"), (), ".weight", _awq),
    "gptq": Layout((".qweight",), (".qzeros", ".scales"), (".g_idx",), ".weight", _gptq),
    "fp8": Layout((".weight",), (".weight_scale_inv",), (), ".weight", _deepseek),
    "mxfp4": Layout(("_blocks",), ("_scales",), (), "", _gpt_oss),
}


def layout_of(config: Mapping[str, Any]) -> Layout | None:
    """The layout of a folder's quantized weights; None if it has none."""
    said = config.get("quantization_config")
    if said is None:
        return None
    method = said.get("quant_method") if isinstance(said, dict) else None
    if method not in LAYOUTS:
        raise ValueError(f"`quant_method` must be one of {', '.join(LAYOUTS)}, got {method!r}.")
    return LAYOUTS[method]


def read(layout: Layout, parts: Parts, config: Mapping[str, Any]) -> Read:
    """A weight of its parts."""
    try:
        return layout.read(parts, config["quantization_config"])
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # of numbers that mean nothing
        raise ValueError(f"its parts and `quantization_config` do not fit: {error}") from error
