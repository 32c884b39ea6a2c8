# SPDX-License-Identifier: Apache-2.0
"""What to quantize to: the grid, what shares a scale, how to round. All of it static and hashable; no arrays."""

import dataclasses
from typing import Any

import numpy as np
from jax import Array

from . import _checks as checks
from ._formats import FLOATS, Float, Integers
from ._granularity import Granularity, PerBlock, PerChannel, PerTensor
from ._scale_formats import SCALE_FORMATS, ScaleFormat

ROUNDINGS = ("half_even", "half_up", "half_away", "stochastic")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class QuantSpec:
    """How a tensor is quantized: `real = (q - zero_point) * scale` with `qmin <= q <= qmax`, integers or narrow floats.

    Static and hashable: it goes through `jax.jit` as a static argument, equal specs share one trace, and it is a leaf
    of a tree of specs. It holds no array; the numbers are in `QParams`.

    Attributes:
      bits: static int, 2 to 16. 8 and fewer are held in int8 or uint8, more in int16 or uint16. A format has its own.
      signed: whether q is; the grid is [-2 ** (bits - 1), 2 ** (bits - 1) - 1], or [0, 2 ** bits - 1].
      symmetric: the zero point is 0 by definition and never read. Affine, its opposite, trains one.
      narrow_range: drops the lowest q, so that a symmetric signed grid has as many steps below 0 as above.
        None means: if symmetric and signed, and not scale_rule="half_step".
      granularity: PerTensor(), PerChannel(axis), PerToken() or PerBlock(axis, size).
      rounding: of x / scale, a correctly rounded quotient. "half_even"; "half_up", floor(v + 0.5) with the sum
        rounded, as in `jaxquant.tf`; "half_away"; "stochastic", up with the probability of the fraction, which needs
        a `key` wherever it is used.
      scale_dtype: what holds the scale, which is rounded to it wherever it is used; QParams stay float32. "float32";
        "float16" and "bfloat16", to nearest; "float8_e8m0fnu", powers of two; "float8_e4m3fn", to nearest and beside
        one float32 for the tensor, the largest of them / 448: of blocks.
      scale_rule: of scales that are powers of two: "ceil" takes the next one above, which clips nothing; "floor",
        OCP's, 2 ** (floor(log2(largest value)) - the exponent of the largest level), which clips up to an eighth in
        e4m3. Of signed symmetric integers with float32 scales: "half_step" divides the largest value by qmax + 1/2 and
        not by qmax, so that it lies half a step beyond the last level; the grid then has its lowest q.
      format: None for integers; else q is a narrow float, signed and symmetric, without its infinities and NaN:
        "float8_e4m3fn" (to 448), "float8_e5m2" (57344), "float8_e3m4" (15.5), "float8_e4m3b11fnuz" (30),
        "float6_e2m3fn" (7.5), "float6_e3m2fn" (28) or "float4_e2m1fn" (6). Held in that dtype; float6, which XLA does
        not have, in float8_e4m3fn, which has all its levels.

    Raises:
      TypeError: for an argument of another kind, traced ones among them.
      ValueError: for bits outside 2..16, an unknown rounding or format, an axis named twice, a narrow symmetric
        unsigned grid, which would not hold 0, a format beside bits or signs of integers, or "half_step" for
        anything but signed symmetric integers with float32 scales.

    >>> from jaxquant import PerChannel, QuantSpec
    >>> QuantSpec(bits=4, granularity=PerChannel(-1))
    QuantSpec(bits=4, granularity=PerChannel(-1))
    >>> QuantSpec(bits=4).qmin, QuantSpec(bits=4).qmax
    (-7, 7)
    """

    def __new__(cls, *args: Any, **kw: Any):
        fields = [field.name for field in dataclasses.fields(cls)]
        checks.argument_names("QuantSpec", kw, fields)
        if args:
            raise TypeError(f"QuantSpec takes its arguments by name, got {args}. Pass bits={args[0]!r}.")
        if kw.get("format") is not None:  # here, where what was passed differs from what is the default
            levels = FLOATS[checks.one_of("format", kw["format"], tuple(FLOATS))]
            for name, own in {"bits": levels.bits, "signed": True, "symmetric": True, "narrow_range": True}.items():
                if kw.get(name, own) != own:
                    raise ValueError(
                        f"`{name}` must be left out beside format={levels.name!r}, got {kw[name]!r}: a float is signed "
                        f"and symmetric, and this one has {levels.bits} bits."
                    )
        return super().__new__(cls)

    bits: int = 8
    signed: bool = True
    symmetric: bool = True
    narrow_range: bool | None = None
    granularity: Granularity = PerTensor()
    rounding: str = "half_even"
    format: str | None = None
    scale_dtype: str = "float32"
    scale_rule: str = "ceil"

    def __post_init__(self):
        if isinstance(self.bits, Array | np.ndarray):
            raise TypeError(
                "`bits` of a QuantSpec must be a static int, got an array. It fixes the dtype of the integers. "
                "For bits that change without a recompile pass `bits=` to fit_qparams and fake_quant."
            )
        set_ = lambda name, value: object.__setattr__(self, name, value)
        if self.format is not None:
            set_("bits", FLOATS[self.format].bits)
        set_("bits", checks.static_int_between("bits", self.bits, 2, 16))
        set_("signed", checks.static_bool("signed", self.signed))
        set_("symmetric", checks.static_bool("symmetric", self.symmetric))
        if self.narrow_range is None:
            set_("narrow_range", self._is_narrow_by_default)
        set_("narrow_range", checks.static_bool("narrow_range", self.narrow_range))
        if self.narrow_range and self.symmetric and not self.signed:
            raise ValueError(
                "`narrow_range` must be False if symmetric and not signed, got True: the lowest q is the zero point, "
                "and without it 0 could not be represented. Leave it None."
            )
        checks.one_of("rounding", self.rounding, ROUNDINGS)
        checks.one_of("scale_dtype", self.scale_dtype, tuple(SCALE_FORMATS))
        checks.one_of("scale_rule", self.scale_rule, ("ceil", "floor", "half_step"))
        if not isinstance(self.granularity, Granularity):
            raise TypeError(
                f"`granularity` must be PerTensor(), PerChannel(axis), PerToken() or PerBlock(axis, size), got "
                f"{self.granularity!r}. An axis alone is PerChannel({self.granularity!r})."
            )
        self.scales.check(self)

    @property
    def _is_narrow_by_default(self) -> bool:
        return self.symmetric and self.signed and self.scale_rule != "half_step"

    @property
    def levels(self) -> Integers | Float:
        """What q is."""
        return FLOATS[self.format] if self.format else Integers(self.bits, self.signed, bool(self.narrow_range))

    @property
    def scales(self) -> ScaleFormat:
        """What holds scales."""
        return SCALE_FORMATS[self.scale_dtype]

    @property
    def has_tensor_scale(self) -> bool:
        """Whether one float32 for the tensor scales the scales of its blocks."""
        return self.scales.has_tensor_scale

    @property
    def qmin(self) -> int | float:
        """The lowest q."""
        return self.levels.qmin

    @property
    def qmax(self) -> int | float:
        """The highest q."""
        return self.levels.qmax

    @property
    def dtype(self) -> np.dtype:
        """The dtype that holds q."""
        return self.levels.dtype

    def __repr__(self):
        implied = {field.name: field.default for field in dataclasses.fields(self)}
        implied["narrow_range"] = self._is_narrow_by_default
        implied["bits"] = self.bits if self.format else None  # of integers always said, for those who read an error
        said = [f"{name}={getattr(self, name)!r}" for name, v in implied.items() if getattr(self, name) != v]
        return f"QuantSpec({', '.join(said)})"


_HIGHEST_RANK = 16  # more axes than a parameter has; groups have as many values at least


def weight_spec(bits: int = 8, channel_axis: Any = None, block_size: int | None = None, **kw: Any) -> QuantSpec:
    """The spec of a weight: symmetric, with a scale for each output channel, or for blocks within each.

    Args:
      bits: static int, 2 to 16.
      channel_axis: static int or tuple, the axis of the output channels: -1 for a kernel (in, out), as in flax, 0 for
        one (out, in), as in equinox. None means the output channels of the op; `quantize_fn` knows them, a function
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
      format: static, as in QuantSpec: "float8_e4m3fn", or "float8_e5m2" of more range and fewer digits, ...
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
    names = tuple(name for name, levels in FLOATS.items() if levels.bits == 8)
    return QuantSpec(format=checks.one_of("format", format, names), granularity=granularity, **kw)


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
    return _microscaling("mxfp8_spec", axis, 8, kw, format=format)


def mxfp6_spec(axis: int | None = None, format: str = "float6_e2m3fn", **kw: Any) -> QuantSpec:
    """Microscaling: float6 in blocks of 32, with a power of two for a scale. As `mxfp8_spec`.

    >>> from jaxquant import mxfp6_spec
    >>> mxfp6_spec(-1).qmax
    7.5
    """
    return _microscaling("mxfp6_spec", axis, 6, kw, format=format)


def mxfp4_spec(axis: int | None = None, **kw: Any) -> QuantSpec:
    """Microscaling: float4_e2m1fn in blocks of 32, with a power of two for a scale. As `mxfp8_spec`.

    >>> from jaxquant import mxfp4_spec
    >>> mxfp4_spec(-1).qmax
    6.0
    """
    return _microscaling("mxfp4_spec", axis, 4, kw, format="float4_e2m1fn")


def mxint8_spec(axis: int | None = None, **kw: Any) -> QuantSpec:
    """Microscaling: 8-bit integers in blocks of 32, with a power of two for a scale. As `mxfp8_spec`.

    >>> from jaxquant import mxint8_spec
    >>> mxint8_spec(-1)
    QuantSpec(bits=8, granularity=PerBlock(axis=-1, size=32), scale_dtype='float8_e8m0fnu')
    """
    return _microscaling("mxint8_spec", axis, None, kw)


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


def _microscaling(name: str, axis: Any, bits: int | None, kw: dict[str, Any], **format: Any) -> QuantSpec:
    _checked_keywords(name, kw, ["axis", "format", "scale_dtype"], "axis")
    if bits:
        checks.one_of("format", format["format"], tuple(n for n, levels in FLOATS.items() if levels.bits == bits))
    return QuantSpec(granularity=PerBlock(axis, 32), scale_dtype="float8_e8m0fnu", **format, **kw)


def _checked_keywords(function: str, kw: dict[str, Any], own: list[str], instead: str) -> None:
    if instead and "granularity" in kw:
        raise TypeError(f"`granularity` cannot be passed here: {instead} say it. Build a QuantSpec(...) directly.")
    others = [field.name for field in dataclasses.fields(QuantSpec) if field.name not in own]
    checks.argument_names(function, kw, [*own, *(name for name in others if not (instead and name == "granularity"))])


def checked(spec: Any) -> QuantSpec:
    """Returns `spec`, which must be a QuantSpec."""
    if not isinstance(spec, QuantSpec):
        raise TypeError(
            f"`spec` must be a QuantSpec, got {checks.kind(spec)}. Build one by QuantSpec(...), weight_spec(...) or "
            "activation_spec(...); it is static, so mark it in jax.jit(..., static_argnames='spec')."
        )
    return spec


def has_grid_of(spec: QuantSpec, other: QuantSpec) -> bool:
    """Whether qparams of one are qparams of the other: all is equal but what shares a scale, and how to round."""
    return dataclasses.replace(spec, granularity=other.granularity, rounding=other.rounding) == other


def equal_but_for_rounding(spec: QuantSpec | None, other: QuantSpec | None) -> bool:
    """Whether they are equal but for how to round, which training and serving may do differently."""
    if spec is None or other is None:
        return spec is other
    return dataclasses.replace(spec, rounding=other.rounding) == other


def spec_to_json(spec: QuantSpec) -> dict[str, Any]:
    """The spec as what JSON can hold: for files, and for programs that are exported with QArrays as arguments."""
    fields = {name: getattr(spec, name) for name in ("bits", "signed", "symmetric", "narrow_range", "rounding")}
    for name in ("format", "scale_dtype", "scale_rule"):  # not of those before: their files stay
        if getattr(spec, name) != QuantSpec.__dataclass_fields__[name].default:
            fields[name] = getattr(spec, name)
    return fields | spec.granularity.to_json()


def spec_from_json(fields: dict[str, Any]) -> QuantSpec:
    """The spec of which `spec_to_json` gave the fields."""
    fields = dict(fields)
    return QuantSpec(granularity=Granularity.from_json(fields), **fields)


def qparams_shape(spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scale of an array of this shape; raises where the granularity does not fit it."""
    return spec.granularity.scale_shape(shape, spec)
