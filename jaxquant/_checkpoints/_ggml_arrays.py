# SPDX-License-Identifier: Apache-2.0
"""QArrays of the blocks of GGUF, and the specs of their grids."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from .._arrays._qarray import QArray
from .._base import _checks as checks
from .._spec._granularity import PerBlock
from .._spec._spec import QuantSpec
from ._ggml import BLOCKS, Numbers, Scale
from ._held import Values, held, put, values_of

_SIGNED = {"narrow_range": False}
_EXTREMUM = {"scale_rule": "extremum", "rounding": "half_up"}
_MINIMUM = {"rounding": "half_up", "symmetric": False, "signed": False, "offset": "minimum"}
_OF_6_BITS, _OF_8_BITS = {"bits": 6, "signed": False}, {"bits": 8, "narrow_range": False}
GRIDS: dict[str, tuple[int, dict[str, Any], dict[str, Any] | None]] = {  # values that share a scale, grid, its scales'
    "Q4_0": (32, {"bits": 4, **_EXTREMUM}, None),
    "Q4_1": (32, {"bits": 4, **_MINIMUM}, None),
    "Q5_0": (32, {"bits": 5, **_EXTREMUM}, None),
    "Q5_1": (32, {"bits": 5, **_MINIMUM}, None),
    "Q8_0": (32, {"bits": 8, "rounding": "half_away", **_SIGNED}, None),
    "Q4_K": (32, {"bits": 4, **_MINIMUM}, _OF_6_BITS),
    "Q5_K": (32, {"bits": 5, **_MINIMUM}, _OF_6_BITS),
    "Q6_K": (16, {"bits": 6, **_SIGNED}, _OF_8_BITS),
    "MXFP4": (32, {"exact_divisor": False, "format": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu"}, None),
}


def gguf_spec(name: str, axis: int = -1) -> QuantSpec:
    """The spec of a type of GGUF, in blocks along an axis: integers, scales and minimums of what `write` writes.

    Args:
      name: static, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K" or "MXFP4".
      axis: static int, the axis of the inputs of a weight: 0 of (inputs, outputs), -1 of what GGUF holds.

    Returns:
      QuantSpec with scale_rule="extremum" (Q4_0, Q5_0), offset="minimum" (Q4_1, Q5_1, Q4_K, Q5_K), scale_spec (all _K)
      and exact_divisor (those with float16 scales).

    Gradient: none.

    Raises:
      ValueError: for another name.

    Source: ggml's `quantize_row_*_ref` and `ggml-common.h`.

    >>> from jaxquant.checkpoints import gguf_spec
    >>> gguf_spec("Q8_0", axis=0)
    QuantSpec(bits=8, narrow_range=False, granularity=PerBlock(axis=0, size=32), rounding='half_away', \
scale_dtype='float16', exact_divisor=True)
    """
    checks.one_of("name", name, tuple(GRIDS))
    size, grid, own = GRIDS[name]
    if own is None:
        return QuantSpec(granularity=PerBlock(axis, size), **{"scale_dtype": "float16", "exact_divisor": True, **grid})
    scales = QuantSpec(granularity=PerBlock(axis, BLOCKS[name].size // size), scale_dtype="float16", **own)
    return QuantSpec(granularity=PerBlock(axis, size), scale_spec=scales, **grid)


def _is_offset(spec: QuantSpec) -> bool:
    """Whether integers that are signed in a QArray are unsigned in blocks, by their middle."""
    return spec.signed and not spec.format and spec.bits < 8


def qarray_of(name: str, numbers: Numbers) -> QArray:
    """The QArray of the numbers of blocks, in float32."""
    spec, own = gguf_spec(name), gguf_spec(name).scale_spec

    def scales(s: Scale) -> Any:
        if own is None:
            return s.of_groups.view(spec.scale_dtype) if name == "MXFP4" else s.of_groups
        scale = put(s.of_blocks)
        return QArray(put(s.of_groups), scale, put(np.zeros(scale.shape, own.dtype)), own, jnp.dtype(jnp.float32))

    array = numbers.values.view(spec.dtype) if name == "MXFP4" else numbers.values
    values = Values(array, BLOCKS[name].distance)
    values = values.signed(spec.bits) if _is_offset(spec) else values
    minimum = None if numbers.minimum is None else scales(numbers.minimum)
    return held(values, scales(numbers.scale), spec, minimum, jnp.float32)


def _means_same(q: QArray, spec: QuantSpec) -> bool:
    """Whether integers, scales and minimums of a QArray are what a spec says, however they were found."""
    of = lambda s: (s.levels.dtype, s.bits, s.signed, s.symmetric, s.format, s.offset)
    (size,) = spec.granularity.sizes.values()
    groups = (*q.shape[:-1], q.shape[-1] // size)
    if of(q.spec) != of(spec) or q.groups != groups or q.shape[-1] % size:
        return False
    if spec.scale_spec is None:
        return q.spec.scale_spec is None and q.spec.scale_dtype == spec.scale_dtype
    return isinstance(q.scale, QArray) and _means_same(q.scale, spec.scale_spec)


def type_of(q: QArray) -> str:
    """The type of GGUF whose lattice a QArray is on, of blocks along its last axis; raises if there is none."""
    for name in GRIDS:
        if _means_same(q, gguf_spec(name)):
            return name
    raise ValueError(
        f"expected a QArray on the lattice of a type of GGUF, in blocks along its last axis, got {q.spec} of shape "
        f"{q.shape}. Train with gguf_spec('Q4_0', axis), or another of {', '.join(GRIDS)}, and pass q.T where the "
        "blocks are along the first axis."
    )


def numbers_of(q: QArray) -> tuple[str, Numbers]:
    """The type of a QArray, and its numbers as blocks hold them."""
    name = type_of(q)
    spec = gguf_spec(name)

    def of(v: Any, like: str) -> Scale:
        if isinstance(v, QArray):
            return Scale(np.asarray(v.values), np.asarray(v.scale))
        return Scale(np.asarray(v).view(np.uint8) if like == "MXFP4" else np.asarray(v))

    values = values_of(q, BLOCKS[name].distance)
    values = values.unsigned(spec.bits) if _is_offset(spec) else values
    array = values.array.view(np.int8) if name == "Q8_0" else values.array
    return name, Numbers(array, of(q.scale, name), of(q.zero_point, name) if q.spec.has_minimum else None)
