# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the arguments of a call, told once it has failed: where they show it, and in what the function raises."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax

from .._arrays._qarray import QArray
from .._arrays._qparams import QParams
from .._base import _checks as checks
from .._base._checks import PyTree
from .._paths import is_qarray, with_paths
from ._caches import CacheRules
from ._call import is_traced


def misuse(args: tuple, kwargs: Mapping[str, Any], argnum: int, caches: CacheRules) -> str:
    """The mistake in the arguments of a call that has failed, in words, where they show it; else nothing."""
    others = {i: v for i, v in (*enumerate(args), *kwargs.items()) if i != argnum}
    params = args[argnum] if argnum < len(args) else None
    if found := _found(QParams, params):
        return (
            f"The params, argument {argnum}, hold QParams, at {next(iter(found))!r}, like a whole file that was "
            'loaded. Pass its parts: q(served["params"], ..., qparams=served["qparams"]).'
        )
    for i, v in others.items():
        if any(of.spec for of in _found(QParams, v).values()):
            return (
                f"Argument {i!r} holds QParams. Pass them by name: q(params, ..., qparams=qparams), after all "
                "arguments of the function; so in q.freeze, too."
            )
    of_caches = set(map(id, caches.qarrays(args, kwargs, argnum)))
    found_in = lambda v: [q for q in _found(QArray, v).values() if id(q) not in of_caches]
    for i, v in others.items():
        is_swapped = is_traced(params) and not is_qarray(params) and len(jax.tree.leaves(v)) > 1
        if isinstance(i, int) and (is_swapped or (found_in(v) and not _found(QArray, params))):
            return (
                f"The params are argument {argnum}, got {checks.kind(params)} there, and a pytree of arrays as "
                f"argument {i}. If they are swapped, call q(params, ...); if they are meant so, say params_argnum={i}."
            )
    return ""


def _found(kind: type, tree: PyTree) -> dict[str, Any]:
    """The nodes of a kind, by their paths."""
    is_kind, found = lambda node: isinstance(node, kind), {}
    with contextlib.suppress(ValueError):  # as in arrays_of
        found = {path: node for path, node in with_paths(tree, is_leaf=is_kind) if is_kind(node)}
    return found


@contextlib.contextmanager
def noted(params: PyTree, qparams: Collection[str]) -> Iterator[None]:
    """An error of the function itself, inside, keeps its type and has a note of which parameters it is about."""
    try:
        yield
    except Exception as error:
        known = {path for path, _ in with_paths(params)}
        lacking = [name for name in qparams if name not in known and f"{name}:input" in qparams]
        if lacking:
            lacking = ", ".join(map(repr, lacking[:3]))
            error.add_note(f"jaxquant: params lack {lacking}, of which there are qparams.")
        raise
