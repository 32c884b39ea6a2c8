# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that only TensorFlow's ops have."""

from collections.abc import Callable
from typing import Any

import jax.core
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .._base import _checks as checks


def ends(names: tuple[str, str], values: tuple[Any, Any], dtype: DTypeLike) -> tuple[Array, Array]:
    """Returns both ends of a range in the dtype of the computation."""
    return checks.real(names[0], values[0], dtype), checks.real(names[1], values[1], dtype)


def ignored_name(value: object) -> None:
    """TensorFlow's `name` is accepted, so that calls port unchanged; anything else in its place is a slip."""
    if value is not None and not isinstance(value, str):
        raise TypeError(
            f"`name` must be None or a str, and is ignored, got {checks.kind(value)}. What follows is keyword-only."
        )


def optional_axis(name: str, value: object, ndim: int) -> int | None:
    """Returns an axis counted from the front; None means no axis."""
    if value is None:
        return None
    value = checks.static_int(name, value)
    if not -ndim <= value < ndim:
        raise ValueError(
            f"`{name}={value}` is out of range for an array of rank {ndim}. "
            "Pass one of its axes, or None for one range."
        )
    return value % ndim


def shape_of_range(shape: tuple[int, ...], axis: int | None) -> tuple[tuple[int, ...], str]:
    """The shape of the ends of a range, one for all of `input` or one for each slice along an axis, and why."""
    if axis is None:
        return (), "one range for the tensor. For a range a slice pass `axis`"
    return (shape[axis],), f"one range for each slice of `input` along axis {axis}"


def ordered(
    names: tuple[str, str], values: tuple[Any, Any], dtype: np.dtype, relation: Callable, expected: str
) -> None:
    """Checks a range if it is concrete, with subnormals read as 0: so the kernels read them."""
    values = checks.unwrapped(values[0]), checks.unwrapped(values[1])
    if any(isinstance(v, jax.core.Tracer) for v in values):
        return
    with np.errstate(over="ignore"):  # infinite, as TensorFlow takes it
        low, high = (np.asarray(v, np.float64).astype(dtype) for v in values)
    tiny = np.finfo(dtype).tiny
    if not relation(*(np.where(np.abs(v) < tiny, 0, v) for v in (low, high))).all():
        raise ValueError(
            f"`{names[0]}` and `{names[1]}` must satisfy {expected}, got {names[0]}={low} and {names[1]}={high}. "
            "Swap or widen them."
        )
