# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call: what is static of them, the arrays, and what becomes of those that a function changes."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from .._arrays._qarray import QArray
from .._base._checks import PyTree
from .._paths import is_qarray, with_paths
from .._program._origin import DATA, Origin, own_axes, parameter
from ._caches import Cache, CacheRules

OWN_ARGUMENTS = {"qparams": None, "lsq_gradient": False, "key": None}  # of a call, beside those of the function


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A leaf that is no array, known by its type and value, or of floats their text: 1 == True, 0.0 == -0.0."""

    kind: type
    known_by: Any
    value: Any = dataclasses.field(compare=False)

    @classmethod
    def of(cls, leaf: PyTree) -> "Static":
        return cls(type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf, leaf)

    @classmethod
    def known_by_identity(cls, value: object) -> "Static":
        return cls(type(value), id(value), value)


def is_traced(leaf: PyTree) -> bool:
    """Whether a leaf is an argument of the program: arrays. Numbers of Python stay what they are, as in f itself."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSU"
    return isinstance(leaf, Array | jax.ShapeDtypeStruct | QArray)


class Call(NamedTuple):
    """The static part of the arguments of one call."""

    structure: PyTree
    leaves: tuple[Static | None, ...]  # None where an array is
    params: tuple[int, int]  # which of the leaves are those of the params

    def arguments(self, arrays: Sequence[Any]) -> tuple[tuple, dict]:
        """`args` and `kwargs` again."""
        values = iter(arrays)
        return jax.tree.unflatten(self.structure, [next(values) if s is None else s.value for s in self.leaves])


def call_of(args: tuple, kwargs: Mapping[str, Any], argnum: int, caches: CacheRules) -> tuple[Call, list[Any]]:
    """The static part of the arguments, and their arrays; a QArray in the params, or that is a cache, counts as one."""
    if len(args) <= argnum:
        raise TypeError(
            f"`params_argnum={argnum}` must be one of the positional arguments, got {len(args)} of them. "
            "Pass the params by position."
        )
    is_one = {id(v) for v in jax.tree.leaves(args[argnum], is_leaf=is_qarray) if is_qarray(v)}
    is_one.update(map(id, caches.qarrays(args, kwargs, argnum)))
    leaves_of = functools.partial(jax.tree.flatten, is_leaf=lambda node: id(node) in is_one)
    leaves, structure = leaves_of((args, dict(kwargs)))
    start = len(leaves_of(args[:argnum])[0])
    params = start, start + len(leaves_of(args[argnum])[0])
    static = tuple(None if is_traced(leaf) else Static.of(leaf) for leaf in leaves)
    try:
        hash(static)
    except TypeError:
        others = [leaf for leaf in leaves if not is_traced(leaf)]
        kinds = sorted({type(leaf).__name__ for leaf in others})
        boxed = any(is_traced(getattr(leaf, "value", None)) for leaf in others)
        fix = "Pass the value of each variable: {v.path: v.value for v in model.variables}. " if boxed else ""
        raise TypeError(
            f"An argument must have leaves that are arrays or have a hash, got leaves of types {kinds}. {fix}"
            "Register the one without a hash as a pytree, or close over it."
        ) from None
    arrays = [leaf for leaf, s in zip(leaves, static, strict=True) if s is None]
    return Call(structure, static, params), arrays


def origins_of(
    call: Call, variables: Sequence[Any], argnum: int, caches: CacheRules
) -> tuple[dict[str, Any], list[Origin], list[Cache | None]]:
    """The parameters by their paths, the origin of each argument of the program, and the caches among them."""
    params, origins = {}, []
    values = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
    args, kwargs = call.arguments(values)
    named = with_paths(args[argnum], is_leaf=lambda node: False)
    paths = dict(zip(range(*call.params), (path for path, _ in named), strict=True))
    found = caches.among(args, kwargs, argnum)
    arrays = [i for i, s in enumerate(call.leaves) if s is None]
    for i, value in zip(arrays, values, strict=True):
        if (cache := found.get(i)) and cache.is_wanted:
            origins.append(DATA._replace(cache=cache.path, axes=own_axes(len(cache.shape)), value=("argument", i)))
            continue
        if i not in paths:
            origins.append(DATA._replace(value=("argument", i)))
            continue
        if paths[i] in params:
            raise ValueError(f"Two parameters have the path {paths[i]!r}. Rename one of the keys that make it.")
        params[paths[i]] = value
        origins.append(parameter(paths[i], value.ndim)._replace(value=("argument", i)))
    return params, origins, [found.get(i) for i in arrays]


def with_own(signature: inspect.Signature) -> inspect.Signature:
    """The signature of a function, and the arguments that a call takes beside."""
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in OWN_ARGUMENTS.items()
        if name not in signature.parameters
    ]
    return signature.replace(parameters=sorted([*signature.parameters.values(), *own], key=lambda p: p.kind))


def may_take(f: Callable, name: str) -> bool:
    """Whether a keyword may be meant for a function: it has such an argument, or passes on keywords that it has not.

    Of a method of a model, such as the `apply` of flax, what the model itself is called with says that.
    """
    owner = getattr(f, "__self__", None)
    functions = [f, type(owner).__call__] if callable(owner) else [f]
    try:
        own, *inner = (inspect.signature(g).parameters for g in functions)
    except (TypeError, ValueError):
        return True
    passes_on = lambda names: any(of.kind is inspect.Parameter.VAR_KEYWORD for of in names.values())
    if name in own or not passes_on(own):
        return name in own
    return not inner or name in inner[0] or passes_on(inner[0])


def arrays_of(args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Each array in the arguments, by where it is."""
    found = {}
    for name, argument in (*enumerate(args), *kwargs.items()):
        with contextlib.suppress(ValueError):  # a State of equinox is not read again after its update: a new one is
            leaves = [(path, leaf) for path, leaf in with_paths(argument) if is_traced(leaf)]
            found |= {f"{path!r} of argument {name!r}": leaf for path, leaf in leaves}
    return found


def refuse_lost_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], passed: Sequence[Any], returned: Sequence[Any]
) -> None:
    """Raises for changes that the function made to its arguments, as modules of nnx do, and does not return."""
    kept = set(map(id, passed))
    # A pytree that makes its leaves anew whenever it is flattened has not changed.
    made = {path for path, leaf in before.items() if id(leaf) not in kept}
    known = kept.union(map(id, returned))
    changed = [path for path, leaf in after.items() if id(leaf) not in known and path not in made]
    if changed:
        raise ValueError(
            f"The function changes its arguments while it is traced, at {', '.join(changed[:3])}"
            f"{' and others' if len(changed) > 3 else ''}, and the changes would be lost: running statistics and "
            "dropout keys would never move. Return them; or, what is not meant to last, change in a copy. With nnx: "
            "graphdef, params, state = nnx.split(model, nnx.Param, ...), and in the function model = nnx.merge("
            "graphdef, params, state, copy=True); return model(x), nnx.state(model, nnx.Not(nnx.Param)). The page "
            "docs/state.md has the whole recipe."
        )
