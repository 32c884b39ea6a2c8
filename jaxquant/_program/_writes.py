# SPDX-License-Identifier: Apache-2.0
"""The primitives of jax that write a part of a cache: what is written is quantized, and the rest stays."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn

from .._arrays._quantized import Quantized
from .._cache import Write
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
    in_float = lambda v, new: eqn.primitive.bind(v, new, *starts)
    return [_written(cache, new, Write.of, lambda write, new: write.from_index(at, new), in_float)]


def scattered(eqn: JaxprEqn, ins: Sequence[Any]) -> list[QuantizedParam]:
    """A cache after `scatter`: parts of it are written anew, at an index for each."""
    cache, indices, new = ins
    numbers, ndim = param(eqn, "dimension_numbers"), len(avals(eqn.invars)[0].shape)
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = dict(zip(numbers.update_window_dims, [i for i in range(ndim) if i not in gone], strict=True))
    axes = [windows.get(i) for i in range(len(avals(eqn.invars)[2].shape))]
    in_float = lambda v, new: eqn.primitive.bind(v, indices, new, **eqn.params)
    write_of = lambda q, shape: Write.of_many(q, shape, axes)
    return [_written(cache, new, write_of, lambda write, new: write.by(in_float, new), in_float)]


def as_part(cache: QuantizedParam, new: Array) -> QuantizedParam:
    """Quantizes an array to be joined to a part of a cache, as what is written to it."""
    return _written(cache, new, Write.of, Write.quantized, lambda _, new: new)


def _written(
    cache: QuantizedParam, new: Any, write_of: Callable[[Quantized, tuple[int, ...]], Write],
    in_integers: Callable[[Write, Any], Quantized], in_float: Callable[[Array, Array], Array],
) -> QuantizedParam:  # fmt: skip
    """A cache with a part written anew, in float too where it is differentiated."""
    q, real, is_part = cache.quantized, cache.real, isinstance(new, QuantizedParam)
    try:
        write = write_of(q, new.shape)
        written = in_integers(write, new.quantized if is_part else new)
        if real is not None:
            _check_scales(write)
            of_part = lambda: dequantized(new) if new.real is None else new.real
            real = in_float(real, of_part() if is_part else write.in_float(new))
    except (TypeError, ValueError) as error:
        raise type(error)(f"At {cache.paths[0]!r}, where the function writes to the cache: {error}") from error
    return dataclasses.replace(cache, quantized=written, real=real)


def _check_scales(write: Write) -> None:
    """Raises for scales that would stay as an empty cache, which came in float, has them."""
    if write.keeps:
        raise ValueError(
            "a cache that comes in float must have scales that are written with its parts, got "
            f"{write.cache.spec}, whose scales stay. Name the axes of what is written in its granularity, or pass "
            "jaxquant.cache.zeros(shape, spec, qparams) with the scales that stay."
        )
