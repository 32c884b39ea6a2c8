# SPDX-License-Identifier: Apache-2.0
"""The leaves of a pytree by their paths, and errors that name them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.tree_util import GetAttrKey, KeyPath, keystr, tree_flatten_with_path

from ._arrays._qarray import QArray
from ._base._checks import PyTree
from ._spec._rule import Rule


def is_qarray(node: PyTree) -> bool:
    """Whether a node of a pytree is a QArray, which counts as one leaf."""
    return isinstance(node, QArray)


def unboxed(node: PyTree) -> list[Any]:
    """What is in a node that is there for its attribute `value` alone, as a parameter of nnx; nothing of others."""
    children, _ = tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    return [child for path, child in children if path == (GetAttrKey("value"),) and len(children) == 1]


def with_paths(
    tree: PyTree, path: KeyPath = (), is_leaf: Callable[[Any], bool] = is_qarray
) -> Iterator[tuple[str, Any]]:
    """Each leaf and its path, without the attribute that unpacks a box."""
    for keys, node in tree_flatten_with_path(tree, is_leaf=lambda n: is_leaf(n) or bool(unboxed(n)))[0]:
        if inside := unboxed(node):
            yield from with_paths(inside[0], path + keys, is_leaf)
        else:
            yield keystr(path + keys, simple=True, separator="/"), node


def with_leaves(tree: PyTree, leaves: Sequence[Any]) -> PyTree:
    """The pytree with other leaves, in the order of `with_paths`."""
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_qarray), leaves)


@contextlib.contextmanager
def named_in_errors(*paths: str, rule: Rule | None = None) -> Iterator[None]:
    """An error inside also says which leaf, or operands, it is about, and the rule that chose it."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        by = f", chosen by the rule {rule.pattern!r}" if rule else ""
        raise kind(f"At {' and '.join(map(repr, paths))}{by}: {error}") from error
