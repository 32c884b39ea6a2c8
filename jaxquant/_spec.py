# SPDX-License-Identifier: Apache-2.0
"""What to quantize to: the grid, what shares a scale, how to round. All of it static and hashable; no arrays."""

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import _checks as checks

ROUNDINGS = ("half_even", "half_up", "half_away", "stochastic")


@dataclasses.dataclass(frozen=True)
class PerTensor:
    """One scale for the whole tensor; its qparams are scalars."""


@dataclasses.dataclass(frozen=True)
class PerChannel:
    """A scale for each index along one axis or several, shared along the others.

    Attributes:
      axis: static int or tuple of ints; negatives count from the end. None means the output channels of the op that
        uses the tensor, which a function that sees only the tensor cannot know: it raises.

    The qparams of a tensor have its rank, its size on `axis`, and size 1 on every other axis.
    """

    axis: int | tuple[int, ...] | None

    def __post_init__(self):
        if self.axis is None:
            return
        several = self.axis if isinstance(self.axis, tuple | list) else [self.axis]
        axes = sorted(checks.static_int("axis", a) for a in several)
        if not axes or len(set(axes)) < len(axes):
            raise ValueError(
                f"`axis` must name at least one axis and none of them twice, got {self.axis}. "
                "For one scale in all use PerTensor()."
            )
        object.__setattr__(self, "axis", tuple(axes) if len(axes) > 1 else axes[0])

    def __repr__(self):
        return f"PerChannel({self.axis})"


@dataclasses.dataclass(frozen=True)
class PerBlock:
    """A scale for each run of `size` elements along one axis, every other axis separate.

    Attributes:
      axis: static int; negatives count from the end. None means the contracted axis of the op that uses the tensor.
      size: static int >= 1; it must divide the length of that axis.

    The qparams of a tensor have its shape, but with the number of blocks on `axis`.
    """

    axis: int | None
    size: int

    def __post_init__(self):
        if self.axis is not None:
            object.__setattr__(self, "axis", checks.static_int("axis", self.axis))
        object.__setattr__(self, "size", checks.static_int_between("size", self.size, 1, 2**31 - 1))


Granularity = PerTensor | PerChannel | PerBlock


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class QuantSpec:
    """How a tensor is quantized: `real = (q - zero_point) * scale` with integers `qmin <= q <= qmax`.

    Static and hashable: it goes through `jax.jit` as a static argument, equal specs share one trace, and it is a leaf
    of a tree of specs. It holds no array; the numbers are in `QParams`.

    Attributes:
      bits: static int, 2 to 16. 8 and fewer are held in int8 or uint8, more in int16 or uint16.
      signed: whether q is; the grid is [-2 ** (bits - 1), 2 ** (bits - 1) - 1], or [0, 2 ** bits - 1].
      symmetric: the zero point is 0 by definition and never read. Affine, its opposite, trains one.
      narrow_range: drops the lowest q, so that a symmetric signed grid has as many steps below 0 as above.
        None means: if symmetric and signed.
      granularity: PerTensor(), PerChannel(axis) or PerBlock(axis, size).
      rounding: of x / scale, a correctly rounded quotient. "half_even"; "half_up", floor(v + 0.5) with the sum
        rounded, as in `jaxquant.tf`; "half_away"; "stochastic", up with the probability of the fraction, which needs
        a `key` wherever it is used.

    Raises:
      TypeError: for an argument of another kind, traced ones among them.
      ValueError: for bits outside 2..16, an unknown rounding, an axis named twice, or a narrow symmetric unsigned
        grid, which would not hold 0.

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
        return super().__new__(cls)

    bits: int = 8
    signed: bool = True
    symmetric: bool = True
    narrow_range: bool | None = None
    granularity: Granularity = PerTensor()
    rounding: str = "half_even"

    def __post_init__(self):
        if isinstance(self.bits, Array | np.ndarray):
            raise TypeError(
                "`bits` of a QuantSpec must be a static int, got an array. It fixes the dtype of the integers. "
                "For bits that change without a recompile pass `bits=` to fit_qparams and fake_quant."
            )
        set_ = lambda name, value: object.__setattr__(self, name, value)
        set_("bits", checks.static_int_between("bits", self.bits, 2, 16))
        set_("signed", checks.static_bool("signed", self.signed))
        set_("symmetric", checks.static_bool("symmetric", self.symmetric))
        if self.narrow_range is None:
            set_("narrow_range", self.symmetric and self.signed)
        set_("narrow_range", checks.static_bool("narrow_range", self.narrow_range))
        if self.narrow_range and self.symmetric and not self.signed:
            raise ValueError(
                "`narrow_range` must be False if symmetric and not signed, got True: the lowest q is the zero point, "
                "and without it 0 could not be represented. Leave it None."
            )
        checks.one_of("rounding", self.rounding, ROUNDINGS)
        if not isinstance(self.granularity, Granularity):
            raise TypeError(
                f"`granularity` must be PerTensor(), PerChannel(axis) or PerBlock(axis, size), got "
                f"{self.granularity!r}. An axis alone is PerChannel({self.granularity!r})."
            )

    @property
    def qmin(self) -> int:
        """The lowest q."""
        return int(self.signed) * -(2 ** (self.bits - 1)) + bool(self.narrow_range)

    @property
    def qmax(self) -> int:
        """The highest q."""
        return 2 ** (self.bits - self.signed) - 1

    @property
    def dtype(self) -> np.dtype:
        """The dtype that holds q."""
        return np.dtype(f"{'' if self.signed else 'u'}int{8 if self.bits <= 8 else 16}")

    def __repr__(self):
        implied = {field.name: field.default for field in dataclasses.fields(self)}
        implied["narrow_range"] = self.symmetric and self.signed
        said = [f"{name}={getattr(self, name)!r}" for name, v in implied.items() if getattr(self, name) != v]
        return f"QuantSpec({', '.join(said)})"


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
      TypeError, ValueError: as QuantSpec, and for a block_size with a channel_axis that is not one of 0, 1, -1, -2.

    >>> from jaxquant import weight_spec
    >>> weight_spec(4, channel_axis=-1, block_size=32)
    QuantSpec(bits=4, granularity=PerBlock(axis=-2, size=32))
    """
    _checked_keywords("weight_spec", kw, ["bits", "channel_axis", "block_size"], "channel_axis and block_size")
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


_GRANULARITIES = {kind.__name__: kind for kind in (PerTensor, PerChannel, PerBlock)}


def spec_to_json(spec: QuantSpec) -> dict[str, Any]:
    """The spec as what JSON can hold: for files, and for programs that are exported with QArrays as arguments."""
    fields = {name: getattr(spec, name) for name in ("bits", "signed", "symmetric", "narrow_range", "rounding")}
    return fields | {"granularity": type(spec.granularity).__name__, **vars(spec.granularity)}


def spec_from_json(fields: dict[str, Any]) -> QuantSpec:
    """The spec of which `spec_to_json` gave the fields."""
    fields = dict(fields)
    kind = _GRANULARITIES[fields.pop("granularity")]
    of_kind = {field.name: fields.pop(field.name) for field in dataclasses.fields(kind)}
    if isinstance(axis := of_kind.get("axis"), list):  # JSON has no tuples
        of_kind["axis"] = tuple(axis)
    return QuantSpec(granularity=kind(**of_kind), **fields)


def qparams_shape(spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scale of an array of this shape; raises where the granularity does not fit it."""
    kind = spec.granularity
    if isinstance(kind, PerTensor):
        return ()
    if kind.axis is None:
        name = "channel_axis" if isinstance(kind, PerChannel) else "axis"
        raise ValueError(
            f"{spec} does not say which axis: only the op that uses the tensor knows it. Got shape {shape}; "
            f"pass {name}, such as weight_spec(channel_axis=-1) for a kernel (in, out) or 0 for one (out, in)."
        )
    axes = kind.axis if isinstance(kind.axis, tuple) else (kind.axis,)
    if not all(-len(shape) <= a < len(shape) for a in axes):
        raise ValueError(
            f"{kind} is out of range for an array of rank {len(shape)}, shape {shape}. Pass axes in "
            f"[{-len(shape)}, {len(shape)})."
        )
    axes = [a % len(shape) for a in axes]
    if len(set(axes)) < len(axes):
        raise ValueError(f"{kind} names an axis of an array of shape {shape} twice. Name each once.")
    if isinstance(kind, PerChannel):
        return tuple(n if i in axes else 1 for i, n in enumerate(shape))
    (axis,), length = axes, shape[axes[0]]
    if length % kind.size:
        fitting = ", ".join(str(n) for n in range(1, length + 1) if length % n == 0)
        raise ValueError(
            f"`size` of {kind} does not divide the length {length} of axis {axis}, shape {shape}. "
            f"Sizes that do: {fitting}."
        )
    return (*shape[:axis], length // kind.size, *shape[axis + 1 :])


def granularity_of(groups: tuple[int, ...], shape: tuple[int, ...]) -> PerTensor | PerChannel | PerBlock | None:
    """The granularity with these numbers of groups along the axes of an array; None if there is none that says it."""
    separate = [i for i, (g, n) in enumerate(zip(groups, shape, strict=True)) if g == n != 1]
    blocks = [i for i, (g, n) in enumerate(zip(groups, shape, strict=True)) if g not in (1, n)]
    if not blocks:
        return PerChannel(tuple(separate)) if separate else PerTensor()
    (axis, *others) = blocks
    alone = not others and all(g == n for i, (g, n) in enumerate(zip(groups, shape, strict=True)) if i != axis)
    return PerBlock(axis, shape[axis] // groups[axis]) if alone else None


def grid(spec: QuantSpec, bits: Any, dtype: Any) -> tuple[Any, Any]:
    """`qmin` and `qmax` as scalars of the dtype of the computation: constants, or arrays for traced `bits`.

    Traced bits are limited to [2, spec.bits], which cannot be checked. By shifts: `exp2` is not exact everywhere.
    """
    if bits is None:
        return np.dtype(dtype).type(spec.qmin), np.dtype(dtype).type(spec.qmax)
    bits = _bits(spec, bits)
    half = lax.shift_left(jnp.int32(1), bits - 1)
    low, high = (-half, half - 1) if spec.signed else (jnp.zeros_like(half), 2 * half - 1)
    low = low + int(bool(spec.narrow_range))
    return jnp.asarray(low, dtype), jnp.asarray(high, dtype)


def _bits(spec: QuantSpec, bits: Any) -> Array:
    bits = checks.unwrapped(bits)
    if isinstance(bits, bool) or not jnp.issubdtype(getattr(bits, "dtype", type(bits)), jnp.integer):
        raise TypeError(
            f"`bits` must be an integer, traced or not, got {bits!r}. It is the width of a schedule: jnp.int32(4)."
        )
    if not isinstance(bits, int):
        checks.shape("bits", jnp.asarray(bits), (), "one width for the tensor")
    if not isinstance(bits, jax.core.Tracer) and not 2 <= int(bits) <= spec.bits:
        raise ValueError(
            f"`bits` must be between 2 and the {spec.bits} of {spec}, got {int(bits)}. Give the spec the most bits "
            "that a schedule reaches."
        )
    return jnp.clip(jnp.asarray(bits).astype(jnp.int32), 2, spec.bits)
