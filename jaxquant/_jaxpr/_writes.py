# SPDX-License-Identifier: Apache-2.0
"""The primitives of jax that write a part of a cache: what is written is quantized, and the rest stays."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn

from .._cache import keeps_scales, update_slice, written_in_float
from .._qarray import QArray
from ._origin import Origin
from ._program import avals
from ._quantized_param import QuantizedParam, dequantized, with_fitting_spec, with_integers


def written_origin(eqn: JaxprEqn, ins: Sequence[Origin]) -> list[Origin]:
    return [ins[0]]


def is_written(eqn: JaxprEqn, ins: Sequence[Any]) -> bool:
    """Whether the first operand is a cache, and what is written floats or a part of one."""
    is_cache = lambda v: isinstance(v, QuantizedParam) and v.is_cache and not v.casts
    return is_cache(ins[0]) and not any(isinstance(v, QuantizedParam) and not is_cache(v) for v in ins[1:])


def updated(eqn: JaxprEqn, ins: Sequence[Any]) -> list[QuantizedParam]:
    """A cache after `dynamic_update_slice`."""
    cache, new, *starts = ins
    sizes = zip(starts, *(v.shape for v in avals(eqn.invars)[:2]), strict=True)
    # Clamped before: to the primitive a negative is no index from the end.
    at = tuple(jnp.clip(start, 0, n - size) for start, n, size in sizes)
    write = lambda v, new: eqn.primitive.bind(v, new, *starts)
    return [_written(cache, new, lambda q, new: update_slice(q, new, at), write)]


def _written(
    cache: QuantizedParam, new: Any, in_integers: Callable[[QArray, Any], QArray],
    in_float: Callable[[Array, Array], Array],
) -> QuantizedParam:  # fmt: skip
    """A cache with a part written anew, in float too where it is differentiated."""
    q, real = with_fitting_spec(cache), cache.real
    is_part = isinstance(new, QuantizedParam)
    try:
        result = with_integers(cache, in_integers(q, with_fitting_spec(new) if is_part else new))
        if real is not None:
            _check_written(q, new.quantized.shape if is_part else new.shape)
            of_part = lambda: dequantized(new) if new.real is None else new.real
            real = in_float(real, of_part() if is_part else written_in_float(q, new))
    except (TypeError, ValueError) as error:
        raise type(error)(f"At {cache.paths[0]!r}, where the function writes to the cache: {error}") from error
    return dataclasses.replace(result, real=real)


def _check_written(cache: QArray, shape: tuple[int, ...]) -> None:
    """Raises for scales that would stay those of a cache that came in float, which was empty."""
    if keeps_scales(cache, shape):
        raise ValueError(
            f"a cache that comes in float must have scales that are written with its parts, got {cache.spec}, whose "
            f"scales stay where a part of shape {shape} is written. Name the axes of what is written in its "
            "granularity, or pass jaxquant.zeros(shape, spec, qparams) with the scales that stay."
        )
