# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, all made while tracing: each error says the argument, what came, what was expected, the fix."""

import difflib
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, SupportsFloat, TypeAlias, TypeGuard

import jax
import jax.core
import jax.dtypes
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

PyTree: TypeAlias = Any  # nested containers, with leaves that are arrays or anything else
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def is_array(value: object) -> TypeGuard[Array]:
    """Whether `value` is an array, traced or not, or a NumPy scalar; what has a dtype of its own may be anything."""
    return isinstance(value, Array | np.ndarray | np.generic)


def is_index(value: object) -> bool:
    """Whether a value is one integer, static or traced."""
    if is_array(value):
        return value.shape == () and jnp.issubdtype(value.dtype, jnp.integer)
    return isinstance(value, int) and not isinstance(value, bool)


def is_index_array(value: object) -> bool:
    """Whether a value is an array of integers with at least one axis."""
    value = unwrapped(value)
    return is_array(value) and value.ndim > 0 and jnp.issubdtype(value.dtype, jnp.integer)


def is_float(dtype: object) -> bool:
    """Whether a dtype is one of the four floating dtypes of computation, which have 16 bits or more."""
    return str(dtype) in _FLOATS


def kind(value: object) -> str:
    """Describes an argument: the dtype of an array, the type of anything else."""
    return f"an array of dtype {value.dtype}" if is_array(value) else type(value).__name__


# What others call an argument, and what it is here.
_SYNONYMS = {
    "axis": "channel_axis", "per_channel": "channel_axis", "dtype": "bits", "num_bits": "bits", "n_bits": "bits",
    "group_size": "block_size", "weights": "weight", "activations": "activation", "act": "activation",
}  # fmt: skip


def argument_names(function: str, given: Iterable[str], names: Sequence[str]) -> None:
    """Refuses an unknown keyword, and suggests the closest of the names."""
    for name in given:
        if name not in names:
            synonym = _SYNONYMS.get(name)
            meant = repr(synonym) if synonym in names else nearest(name, names, 1)
            raise TypeError(
                f"`{name}` is not an argument of {function}, did you mean {meant}? It has {', '.join(names)}."
            )


def nearest(text: object, names: Iterable[Any], n: int = 5) -> str:
    """The closest names to a text, as a phrase for an error."""
    found = difflib.get_close_matches(str(text).replace("*", ""), list(dict.fromkeys(map(str, names))), n, 0.0)
    return ", ".join(map(repr, found)) or "none"


def same_keys(
    name: str, given: object, expected: Collection[str], fix: str, optional: Collection[str] = (),
    left: Mapping[Any, str] = {},
) -> None:  # fmt: skip
    """Refuses a value that is no dict, lacks a required key, or has an unknown one.

    `left` says why a key is none of the expected ones, where it could be one.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"`{name}` must be a dict from entry to its value or None, got {kind(given)}. {fix}")
    missing = [key for key in expected if key not in given and key not in optional]
    if missing:
        raise ValueError(
            f"`{name}` must have one value for each entry, got none for {missing[0]!r}"
            f"{f' and {len(missing) - 1} others' if missing[1:] else ''}; the nearest keys it has: "
            f"{nearest(missing[0], given)}. {fix}"
        )
    unknown = [key for key in given if key not in expected and key not in optional]
    if unknown:
        why = f"this call leaves as it is: {left[unknown[0]]}" if unknown[0] in left else ""
        is_none = f"is not an entry with these rules; the nearest: {nearest(unknown[0], expected)}"
        raise ValueError(f"`{name}` has {unknown[0]!r}, which {why or is_none}. {fix}")


class NotAnArray:
    """A leaf of a pytree that is no array, and says so where JAX or NumPy convert it."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"A {type(self).__name__} is integers with a scale, and not an array. Params that q.freeze made are for "
            "q(frozen, ...), not for the function itself. Otherwise pass dequantize(v), or v.values for the integers, "
            "contract it by jaxquant.dot_general, or take parts along its first axis by v[indices]."
        )

    __matmul__ = __rmatmul__ = __jax_array__ = __array__ = _refuse


def unwrapped(value: Any) -> Any:
    """The array inside an object that converts itself, such as a framework's parameter; else the value."""
    if isinstance(value, Array | NotAnArray) or not hasattr(value, "__jax_array__"):
        return value
    return value.__jax_array__()


def as_array(value: object) -> Array:
    """Returns `value` as an array of jax. One of NumPy is copied by NumPy: jax compiles a copy for each shape."""
    return jax.device_put(value.copy()) if isinstance(value, np.ndarray) else jnp.asarray(value)


def float_array(name: str, value: object) -> Array:
    """Returns `value` as an array of one of the four floating dtypes, never weakly typed."""
    value = unwrapped(value)
    if not (is_float(value.dtype) if is_array(value) else isinstance(value, float)):
        raise TypeError(
            f"`{name}` must be a floating array ({', '.join(_FLOATS)}), got {kind(value)}. "
            f"Numbers, lists and other dtypes convert by jnp.asarray(..., jnp.float32)."
        )
    array = as_array(value)
    return jax.lax.convert_element_type(array, array.dtype) if array.weak_type else array


def float_array_in(name: str, value: object, dtype: DTypeLike) -> Array:
    """Returns `value` in the dtype of the computation, which must hold it."""
    array = float_array(name, value)
    if jnp.finfo(array.dtype).bits > jnp.finfo(dtype).bits and not getattr(value, "weak_type", False):
        raise TypeError(
            f"`{name}` is {array.dtype}, expected {dtype} or narrower: it would lose precision silently. "
            f"Cast it yourself: {name}.astype(jnp.{dtype})."
        )
    return array.astype(dtype)


def _number(name: str, value: SupportsFloat, dtype: DTypeLike) -> np.ndarray:
    try:
        value = float(value)
    except OverflowError:
        raise ValueError(f"`{name}` must fit a {dtype}, got an integer beyond float64. Pass a smaller one.") from None
    with np.errstate(over="ignore"):  # infinite, as TensorFlow takes it
        return np.asarray(value).astype(dtype)


def real(name: str, value: object, dtype: DTypeLike) -> Array:
    """Returns a number or a floating array in the dtype of the computation."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return jnp.asarray(_number(name, value, dtype))
    return float_array_in(name, value, dtype)


def shape(name: str, array: Array, expected: tuple[int, ...], why: str) -> None:
    """Refuses an array of another shape; `why` says what the shape stands for."""
    if array.shape != expected:
        raise ValueError(f"`{name}` must have shape {expected}, got {array.shape}: {why}.")


def static_int(name: str, value: Any) -> int:
    """Returns `value` as an int; arrays, traced ones too, and bools are refused."""
    if isinstance(value, str | type):
        raise TypeError(f"`{name}` must be a static int, got {kind(value)} {value!r}. Pass a number, such as 8.")
    if isinstance(value, bool | np.bool_ | Array | np.ndarray) or not hasattr(value, "__index__"):
        raise TypeError(
            f"`{name}` must be a static int, got {kind(value)}. It fixes the compiled program, so it cannot be a "
            f"traced value: pass a Python int, or mark it in jax.jit(..., static_argnames={name!r})."
        )
    return operator.index(value)


def static_int_between(name: str, value: object, low: int, high: int) -> int:
    """Returns `value` as an int in `[low, high]`."""
    value = static_int(name, value)
    if not low <= value <= high:
        raise ValueError(f"`{name}` must be between {low} and {high}, inclusive, got {value}. Choose one of these.")
    return value


def static_bool(name: str, value: object) -> bool:
    """Returns `value` as a bool; nothing else is taken for one."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"`{name}` must be a static bool, got {kind(value)}. Pass True or False, or mark it in "
            f"jax.jit(..., static_argnames={name!r})."
        )
    return bool(value)


def static_float(name: str, value: object, instead: str) -> float:
    """Returns a static number as a Python float; `instead` is what takes arrays."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(
            f"`{name}` must be a static number, got {kind(value)}. For an array or a traced value use {instead}."
        )
    return float(_number(name, value, np.dtype(np.float64)))


def percentage(name: str, value: object) -> float:
    """Returns `value` as a Python float in (0, 100]."""
    value = static_float(name, value, "a histogram for each value")
    if not 0 < value <= 100:
        raise ValueError(f"`{name}` must be in (0, 100], got {value}. Pass percent: 99.9.")
    return value


def static_ints(name: str, value: object) -> tuple[int, ...]:
    """Returns a tuple or list of static ints as a tuple."""
    if not isinstance(value, tuple | list):
        raise TypeError(f"`{name}` must be a tuple of static ints, got {value!r}. One number is ({value!r},).")
    return tuple(static_int(name, n) for n in value)


def rounding_key(key: Array | None, rounds: bool, given: str) -> Array | None:
    """Returns the PRNG key for stochastic rounding, typed or of the old kind, or None; `given` says what has none."""
    if key is None:
        return None
    if not rounds:
        raise ValueError(
            f"`key` is for stochastic rounding alone, got one with {given}. Drop it, or give a spec "
            "rounding='stochastic'."
        )
    key = unwrapped(key)
    typed = is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_array(key) or not (typed or key.dtype == np.uint32):
        raise TypeError(f"`key` must be a PRNG key, got {kind(key)}. Make one by jax.random.key(seed).")
    if key.shape != (() if typed else (2,)):
        raise ValueError(f"`key` must be one PRNG key, got an array of shape {key.shape}. Pass one of them.")
    return key


def one_of(name: str, value: object, choices: Sequence[str]) -> str:
    """Returns `value`, which must be one of the strings `choices`."""
    if not isinstance(value, str):
        raise TypeError(
            f"`{name}` must be one of {', '.join(choices)}, got {kind(value)}. Pass one of them, or mark it in "
            f"jax.jit(..., static_argnames={name!r})."
        )
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}. Pass one of them.")
    return value
