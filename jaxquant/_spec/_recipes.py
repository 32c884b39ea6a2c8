# SPDX-License-Identifier: Apache-2.0
"""The specs that most weights and activations have: integers, float8, microscaling, NVFP4."""

import dataclasses
from typing import Any

from .._base import _checks as checks
from ._formats import FLOATS
from ._granularity import Granularity, PerBlock, PerChannel, PerTensor
from ._spec import QuantSpec

_HIGHEST_RANK = 16  # more axes than a parameter has; groups have as many values at least


def weight_spec(
    bits: int = 8, channel_axis: int | tuple[int, ...] | None = None, block_size: int | None = None, **kw: Any
) -> QuantSpec:
    """The spec of a weight: symmetric, with a scale for each output channel, or for blocks within each.

    Args:
      bits: static int, 2 to 16.
      channel_axis: static int or tuple, the axis of the output channels: -1 for a kernel (in, out), as in flax, 0 for
        one (out, in), as in equinox. None means the output channels of the op, which `quantize_fn` knows; a function
        that sees only the array raises and asks for the axis.
      block_size: static int or None. Blocks run along the input axis beside the channels: the last but one for -1,
        axis 1 for 0. For any other layout give `granularity=PerBlock(axis, size)` to QuantSpec.
      **kw: any other attribute of QuantSpec.

    Raises:
      TypeError, ValueError: as QuantSpec; for a block_size with a channel_axis that is not one of 0, 1, -1, -2; and for
        a channel_axis that no parameter has, as in weight_spec(4, 32), which means block_size=32.

    >>> from jaxquant import weight_spec
    >>> weight_spec(4, channel_axis=-1, block_size=32)
    QuantSpec(bits=4, granularity=PerBlock(axis=-2, size=32))
    """
    _checked_keywords("weight_spec", kw, ["bits", "channel_axis", "block_size"], "channel_axis and block_size")
    if isinstance(channel_axis, int) and not -_HIGHEST_RANK <= channel_axis < _HIGHEST_RANK:
        raise ValueError(
            f"`channel_axis` must be an axis of the parameter, got {channel_axis}, which looks like a group size. Pass "
            f"weight_spec({bits}, block_size={abs(channel_axis)})."
        )
    if isinstance(block_size, int) and block_size < 0:
        raise ValueError(
            f"`block_size` must be at least 1, got {block_size}. One scale for all of a channel is block_size=None."
        )
    if block_size is None:
        return QuantSpec(bits=bits, granularity=PerChannel(channel_axis), **kw)
    if channel_axis is not None and not isinstance(channel_axis, tuple | list):
        channel_axis = checks.static_int("channel_axis", channel_axis)
    if channel_axis not in (None, 0, 1, -1, -2):
        raise ValueError(
            f"`channel_axis` must be 0, 1, -1, -2 or None beside a block_size, got {channel_axis}: the blocks run "
            f"along the axis next to it. Name that axis yourself: QuantSpec(granularity=PerBlock(axis, {block_size}))."
        )
    axis = None if channel_axis is None else channel_axis ^ 1  # 0 and 1, -1 and -2
    return QuantSpec(bits=bits, granularity=PerBlock(axis, block_size), **kw)


def activation_spec(bits: int = 8, symmetric: bool = False, **kw: Any) -> QuantSpec:
    """The spec of an activation: affine, per tensor.

    Args:
      bits: static int, 2 to 16.
      symmetric: static bool; with True the zero point is 0.
      **kw: any other attribute of QuantSpec.

    Raises:
      TypeError, ValueError: as QuantSpec.

    >>> from jaxquant import activation_spec
    >>> activation_spec().qmin
    -128
    """
    _checked_keywords("activation_spec", kw, ["bits", "symmetric"], "")
    return QuantSpec(bits=bits, symmetric=symmetric, **kw)


def float8_spec(format: str = "float8_e4m3fn", granularity: Granularity = PerTensor(), **kw: Any) -> QuantSpec:
    """The spec of a float8 tensor: a float32 scale, the largest magnitude / the largest number of the format.

    Args:
      format: static, as in QuantSpec: "float8_e4m3fn", "float8_e5m2" with more range and fewer digits, ...
      granularity: PerTensor(), or PerChannel(axis); PerChannel(None) for the output channels of a weight.
      **kw: any other attribute of QuantSpec.

    Raises:
      TypeError, ValueError: as QuantSpec, and for a format of other bits.

    >>> from jaxquant import float8_spec
    >>> float8_spec()
    QuantSpec(format='float8_e4m3fn')
    >>> float8_spec().qmax
    448.0
    """
    _checked_keywords("float8_spec", kw, ["format", "granularity"], "")
    return QuantSpec(format=_format_of_bits(8, format), granularity=granularity, **kw)


def mxfp8_spec(axis: int | None = None, format: str = "float8_e4m3fn", **kw: Any) -> QuantSpec:
    """Microscaling: float8 in blocks of 32, with a power of two for a scale.

    Args:
      axis: static int, along which the blocks run. None means the contracted axis of the op, which `quantize_fn` knows.
      format: static, a float8 as in QuantSpec.
      **kw: any other attribute of QuantSpec; scale_rule="floor" is the scale of the OCP specification.

    Raises:
      TypeError, ValueError: as QuantSpec, and for a format of other bits.

    Source: OCP Microscaling Formats (MX) Specification 1.0, but for the default scale_rule.

    >>> from jaxquant import mxfp8_spec
    >>> mxfp8_spec(-1)
    QuantSpec(granularity=PerBlock(axis=-1, size=32), format='float8_e4m3fn', scale_dtype='float8_e8m0fnu')
    """
    return _microscaling("mxfp8_spec", axis, kw, format=_format_of_bits(8, format))


def mxfp6_spec(axis: int | None = None, format: str = "float6_e2m3fn", **kw: Any) -> QuantSpec:
    """Microscaling: float6 in blocks of 32, with a power of two for a scale. As `mxfp8_spec`.

    >>> from jaxquant import mxfp6_spec
    >>> mxfp6_spec(-1).qmax
    7.5
    """
    return _microscaling("mxfp6_spec", axis, kw, format=_format_of_bits(6, format))


def mxfp4_spec(axis: int | None = None, **kw: Any) -> QuantSpec:
    """Microscaling: float4_e2m1fn in blocks of 32, with a power of two for a scale. As `mxfp8_spec`.

    >>> from jaxquant import mxfp4_spec
    >>> mxfp4_spec(-1).qmax
    6.0
    """
    return _microscaling("mxfp4_spec", axis, kw, format="float4_e2m1fn")


def mxint8_spec(axis: int | None = None, **kw: Any) -> QuantSpec:
    """Microscaling: 8-bit integers in blocks of 32, with a power of two for a scale. As `mxfp8_spec`.

    >>> from jaxquant import mxint8_spec
    >>> mxint8_spec(-1)
    QuantSpec(bits=8, granularity=PerBlock(axis=-1, size=32), scale_dtype='float8_e8m0fnu')
    """
    return _microscaling("mxint8_spec", axis, kw)


def nvfp4_spec(axis: int | None = None, **kw: Any) -> QuantSpec:
    """NVFP4: float4_e2m1fn in blocks of 16, with a float8_e4m3fn for a scale, and one float32 that scales those.

    Args:
      axis: static int, along which the blocks run. None means the contracted axis of the op, which `quantize_fn` knows.
      **kw: any other attribute of QuantSpec.

    Raises:
      TypeError, ValueError: as QuantSpec.

    Source: NVIDIA's NVFP4.

    >>> from jaxquant import nvfp4_spec
    >>> nvfp4_spec(-1)
    QuantSpec(granularity=PerBlock(axis=-1, size=16), format='float4_e2m1fn', scale_dtype='float8_e4m3fn')
    """
    _checked_keywords("nvfp4_spec", kw, ["axis", "format", "scale_dtype"], "axis")
    return QuantSpec(format="float4_e2m1fn", granularity=PerBlock(axis, 16), scale_dtype="float8_e4m3fn", **kw)


def _format_of_bits(bits: int, format: Any) -> str:
    return checks.one_of("format", format, tuple(name for name, levels in FLOATS.items() if levels.bits == bits))


def _microscaling(name: str, axis: Any, kw: dict[str, Any], **format: Any) -> QuantSpec:
    _checked_keywords(name, kw, ["axis", "format", "scale_dtype"], "axis")
    return QuantSpec(granularity=PerBlock(axis, 32), scale_dtype="float8_e8m0fnu", **format, **kw)


def _checked_keywords(function: str, kw: dict[str, Any], own: list[str], instead: str) -> None:
    if instead and "granularity" in kw:
        raise TypeError(f"`granularity` cannot be passed here: {instead} set it. Build a QuantSpec(...) directly.")
    others = [field.name for field in dataclasses.fields(QuantSpec) if field.name not in own]
    checks.argument_names(function, kw, [*own, *(name for name in others if not (instead and name == "granularity"))])
