# SPDX-License-Identifier: Apache-2.0
"""The primitives of jax that write a part of a cache: what is written is quantized, and the rest stays."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn

from .._arrays._quantized import Quantized
from .._cache import Part, part_in_float, part_of, parts_of, quantized_part, update_part, update_parts
from ._jaxpr import avals, param
from ._origin import Origin
from ._param import QuantizedParam, dequantized


def written_origin(eqn: JaxprEqn, ins: Sequence[Origin]) -> list[Origin]:
    """The origin of a cache that is written, which stays the cache."""
    return [ins[0]]


def is_written(eqn: JaxprEqn, ins: Sequence[Any]) -> bool:
    """Whether the first operand is a cache, and what is written floats or a part of one."""
    is_cache = lambda v: isinstance(v, QuantizedParam) and v.is_cache and not v.casts
    return is_cache(ins[0]) and not any(isinstance(v, QuantizedParam) and not is_cache(v) for v in ins[1:])


def updated(eqn: JaxprEqn, ins: Sequence[Any]) -> list[QuantizedParam]:
    """A cache after `dynamic_update_slice`."""
    cache, new, *starts = ins
    shape, sizes = (v.shape for v in avals(eqn.invars)[:2])
    # Clamped before: to the primitive a negative is no index from the end.
    at = tuple(jnp.clip(start, 0, n - size) for start, n, size in zip(starts, shape, sizes, strict=True))

    def write(q: Quantized, new: Any, part: Part) -> Quantized:
        return update_part(q, new, at, part)

    in_float = lambda v, new: eqn.primitive.bind(v, new, *starts)
    return [_written(cache, new, part_of, Write(write, in_float))]


def scattered(eqn: JaxprEqn, ins: Sequence[Any]) -> list[QuantizedParam]:
    """A cache after `scatter`: parts of it are written anew, at an index for each."""
    cache, indices, new = ins
    numbers, ndim = param(eqn, "dimension_numbers"), len(avals(eqn.invars)[0].shape)
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = dict(zip(numbers.update_window_dims, [i for i in range(ndim) if i not in gone], strict=True))
    axes = [windows.get(i) for i in range(len(avals(eqn.invars)[2].shape))]
    in_float = lambda v, new: eqn.primitive.bind(v, indices, new, **eqn.params)

    def write(q: Quantized, new: Any, part: Part) -> Quantized:
        return update_parts(q, new, part, in_float)

    return [_written(cache, new, lambda q, shape: parts_of(q, shape, axes), Write(write, in_float))]


def as_part(cache: QuantizedParam, new: Array) -> QuantizedParam:
    """Quantizes an array to be joined to a part of a cache, as what is written to it."""
    return _written(cache, new, part_of, Write(quantized_part, lambda _, new: new))


class Write(NamedTuple):
    """Functions that write a part: (cache, part, how it is quantized) in integers, and (cache, part) in float."""

    in_integers: Callable[[Quantized, Any, Part], Quantized]
    in_float: Callable[[Array, Array], Array]


def _written(
    cache: QuantizedParam, new: Any, part_of: Callable[[Quantized, tuple[int, ...]], Part], write: Write
) -> QuantizedParam:
    """A cache with a part written anew, in float too where it is differentiated."""
    q, real, is_part = cache.quantized, cache.real, isinstance(new, QuantizedParam)
    try:
        part = part_of(q, new.shape)
        written = write.in_integers(q, new.quantized if is_part else new, part)
        if real is not None:
            _check_scales(q, part)
            of_part = lambda: dequantized(new) if new.real is None else new.real
            real = write.in_float(real, of_part() if is_part else part_in_float(q, new, part))
    except (TypeError, ValueError) as error:
        raise type(error)(f"At {cache.paths[0]!r}, where the function writes to the cache: {error}") from error
    return dataclasses.replace(cache, quantized=written, real=real)


def _check_scales(cache: Quantized, part: Part) -> None:
    """Raises for scales that would stay as an empty cache, which came in float, has them."""
    if part.keeps:
        raise ValueError(
            f"a cache that comes in float must have scales that are written with its parts, got {cache.spec}, whose "
            "scales stay. Name the axes of what is written in its granularity, or pass jaxquant.cache.zeros(shape, "
            "spec, qparams) with the scales that stay."
        )
