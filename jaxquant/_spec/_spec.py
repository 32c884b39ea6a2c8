# SPDX-License-Identifier: Apache-2.0
"""QuantSpec: the grid, the groups that share a scale, the rounding. Static and hashable; no arrays."""

import dataclasses
from typing import Any

import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .._base import _checks as checks
from ._formats import FLOATS, Float, Integers
from ._granularity import Granularity, PerTensor
from ._scale_formats import SCALE_FORMATS, ScaleFormat

ROUNDINGS = ("half_even", "half_up", "half_away", "stochastic")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class QuantSpec:
    """The grid of a tensor: `real = (q - zero_point) * scale` with `qmin <= q <= qmax`, integers or narrow floats.

    Static and hashable: it goes through `jax.jit` as a static argument, equal specs share one trace, and it is a leaf
    of a tree of specs. It holds no array; the numbers are in `QParams`.

    Attributes:
      bits: static int, 2 to 16; 1 beside offset="minimum", two levels. Up to 8 bits are held in int8 or uint8, more in
        int16 or uint16. Formats fix theirs.
      signed: whether q is signed. The grid is [-2 ** (bits - 1), 2 ** (bits - 1) - 1], or [0, 2 ** bits - 1] if not.
      symmetric: the zero point is 0 by definition and never read. The opposite, affine, trains a zero point.
      narrow_range: drops the lowest q, so that a symmetric signed grid has as many steps below 0 as above. None means
        True if symmetric and signed without scale_rule="half_step", else False.
      granularity: PerTensor(), PerChannel(axis), PerToken() or PerBlock(axis, size).
      rounding: how x / scale, a correctly rounded quotient, is rounded to q. "half_even"; "half_up", floor(v + 0.5)
        with the sum rounded, as in `jaxquant.tf`; "half_away"; or "stochastic", up with the probability of the
        fraction, which needs a `key` wherever it is used.
      scale_dtype: what holds the scale, which is rounded to it wherever it is used; QParams stay float32. "float32";
        "float16" and "bfloat16", to nearest; "float8_e8m0fnu", powers of two; or, for blocks, "float8_e4m3fn", to
        nearest, beside one float32 for the tensor: the largest scale / 448.
      scale_rule: for scales that are powers of two, "ceil" takes the next one above, which clips nothing; "floor", the
        rule of OCP, takes 2 ** (floor(log2(largest value)) - the exponent of the largest level), which clips up to an
        eighth in e4m3. For signed symmetric integers with float32 scales, "half_step" divides the largest value not by
        qmax but by qmax + 1/2, so that it lies half a step beyond the last level; the grid then keeps its lowest q.
        "extremum", for signed symmetric integers whose scales are no powers of two, divides the value of the largest
        magnitude, with its sign, by qmin, as GGUF's Q4_0 does: scales may be negative, and all levels are kept.
      offset: of an affine grid. "zero_point", an integer, so that 0 is a level: `real = (q - zero_point) * scale`. Or
        "minimum", a real number in the dtype of the scale, of unsigned q: `real = q * scale + minimum`, as in GGUF.
      scale_spec: None, or the QuantSpec of the scales, symmetric integers that then have scales of their own, in blocks
        along the axis of the blocks: K-quants of GGUF have scales of 6 bits, and a float16 for 8 of these. A minimum is
        held so, too; the sign is in its scale. A QArray has QArrays for scale and minimum.
      exact_divisor: whether values become integers by the scale and the minimum before scale_dtype rounds these, as in
        GGUF's types; real values are made of the rounded ones in any case.
      format: None for integers. Otherwise q is a narrow float, signed and symmetric, without its infinities and NaN:
        "float8_e4m3fn" (to 448), "float8_e5m2" (57344), "float8_e3m4" (15.5), "float8_e4m3b11fnuz" (30),
        "float6_e2m3fn" (7.5), "float6_e3m2fn" (28) or "float4_e2m1fn" (6). Each is held in the dtype of its name; XLA
        has no float6, so float8_e4m3fn holds it, which has all its levels.

    Raises:
      TypeError: for an argument of another kind, traced ones among them.
      ValueError: for bits outside of these, an unknown rounding or format, an axis named twice, a narrow symmetric
        unsigned grid (it would not hold 0), bits or signs of integers beside a format, or a scale_rule, offset,
        scale_spec or exact_divisor beside what gives it no meaning.

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
    offset: str = "zero_point"
    scale_spec: "QuantSpec | None" = None
    exact_divisor: bool = False

    def __post_init__(self):
        if isinstance(self.bits, Array | np.ndarray):
            raise TypeError(
                "`bits` of a QuantSpec must be a static int, got an array. It fixes the dtype of the integers. "
                "For bits that change without a recompile pass `bits=` to fit_qparams and fake_quant."
            )
        set_ = lambda name, value: object.__setattr__(self, name, value)
        if self.format is not None:
            set_("bits", FLOATS[self.format].bits)
        set_("bits", checks.static_int_between("bits", self.bits, 1 if self.offset == "minimum" else 2, 16))
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
        checks.one_of("scale_rule", self.scale_rule, ("ceil", "floor", "half_step", "extremum"))
        checks.one_of("offset", self.offset, ("zero_point", "minimum"))
        set_("exact_divisor", checks.static_bool("exact_divisor", self.exact_divisor))
        if not isinstance(self.granularity, Granularity):
            raise TypeError(
                f"`granularity` must be PerTensor(), PerChannel(axis), PerToken() or PerBlock(axis, size), got "
                f"{self.granularity!r}. An axis alone is PerChannel({self.granularity!r})."
            )
        self.scales.check(self)
        self._check_blocks()

    def _check_blocks(self) -> None:
        """Raises for what blocks of files have, beside that with which it has no meaning."""
        own = self.scale_spec
        if self.has_minimum and (self.symmetric or self.signed or self.scales.is_coarse):
            raise ValueError(
                "`offset='minimum'` is for affine unsigned integers with scales in float32, float16 or bfloat16, got "
                f"symmetric={self.symmetric}, signed={self.signed}, scale_dtype={self.scale_dtype!r}. Pass "
                "symmetric=False, signed=False."
            )
        if self.exact_divisor and (self.scales.is_exact or self.scales.is_coarse):
            raise ValueError(
                "`exact_divisor` is for scales in float16 or bfloat16, which are rounded, got "
                f"scale_dtype={self.scale_dtype!r}. Leave it out."
            )
        if own is None:
            return
        if not (isinstance(own, QuantSpec) and own.symmetric and own.is_plain and own.bits <= 8 and not own.format):
            raise ValueError(
                "`scale_spec` must be a QuantSpec of symmetric integers of up to 8 bits, got "
                f"{own!r}. Scales of 6 bits, 8 of which share a float16, are QuantSpec(bits=6, signed=False, "
                "granularity=PerBlock(axis, 8), scale_dtype='float16')."
            )
        if self.scale_dtype != "float32" or self.scale_rule != "ceil" or (self.symmetric and not self.signed):
            raise ValueError(
                "`scale_spec` is for signed symmetric integers, or such with a minimum, and says how the scales are "
                f"held, got symmetric={self.symmetric}, signed={self.signed}, scale_dtype={self.scale_dtype!r} and "
                f"scale_rule={self.scale_rule!r}. Leave the last two out."
            )

    @property
    def is_plain(self) -> bool:
        """Whether a grid is a positive scale and an integer zero point, which all contractions and formats know."""
        has_blocks = self.has_minimum or self.exact_divisor or self.scale_spec is not None
        return not has_blocks and self.scale_rule != "extremum"

    @property
    def with_float_scales(self) -> "QuantSpec":
        """The integers of the spec, in 2 bits at least, with one scale in float32, and a zero point for an offset."""
        return dataclasses.replace(
            self, bits=max(self.bits, 2), granularity=PerTensor(), scale_dtype="float32", scale_rule="ceil",
            offset="zero_point", scale_spec=None, exact_divisor=False,
        )  # fmt: skip

    @property
    def _is_narrow_by_default(self) -> bool:
        return self.symmetric and self.signed and self.scale_rule not in ("half_step", "extremum")

    @property
    def levels(self) -> Integers | Float:
        """The dtype of q."""
        return FLOATS[self.format] if self.format else Integers(self.bits, self.signed, bool(self.narrow_range))

    @property
    def scales(self) -> ScaleFormat:
        """The format of the scales."""
        return SCALE_FORMATS[self.scale_dtype]

    @property
    def has_tensor_scale(self) -> bool:
        """Whether one float32 for the tensor scales the scales of its blocks."""
        return self.scales.has_tensor_scale

    @property
    def is_of_magnitude(self) -> bool:
        """Whether the largest magnitude of values says their scale."""
        return self.symmetric and self.signed and self.scale_rule != "extremum"

    @property
    def has_zero_point(self) -> bool:
        """Whether the level of real 0 is a number of the grid."""
        return not (self.symmetric or self.has_minimum)

    @property
    def has_minimum(self) -> bool:
        """Whether a real number is added, in place of a zero point that is subtracted."""
        return self.offset == "minimum"

    @property
    def offset_dtype(self) -> DTypeLike:
        """The dtype that holds what the grid adds."""
        return self.scale_dtype if self.has_minimum else self.dtype

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


def checked_spec(spec: object) -> QuantSpec:
    """Returns `spec`, which must be a QuantSpec."""
    if not isinstance(spec, QuantSpec):
        raise TypeError(
            f"`spec` must be a QuantSpec, got {checks.kind(spec)}. Build one by QuantSpec(...), weight_spec(...) or "
            "activation_spec(...); it is static, so mark it in jax.jit(..., static_argnames='spec')."
        )
    return spec


def plain_spec(what: str, spec: QuantSpec) -> QuantSpec:
    """Returns `spec`, which must have a plain grid."""
    if not spec.is_plain:
        raise ValueError(
            f"{what} has a positive scale in one piece and an integer zero point, got {spec}. Take a QuantSpec without "
            "offset='minimum', scale_rule='extremum', scale_spec and exact_divisor, or leave it in float."
        )
    return spec


def has_grid_of(spec: QuantSpec, other: QuantSpec) -> bool:
    """Whether qparams of one are qparams of the other: all is equal but what shares a scale, and how to round."""
    return dataclasses.replace(spec, granularity=other.granularity, rounding=other.rounding) == other


def qparams_shape(spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scale of an array of this shape; raises where the granularity does not fit it."""
    return spec.granularity.scale_shape(shape, spec)
