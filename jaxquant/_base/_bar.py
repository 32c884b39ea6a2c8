# SPDX-License-Identifier: Apache-2.0
"""A bar for work that takes long, by tqdm."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., None])


def in_bar(items: Iterable[T], progress: Any, what: str) -> Iterable[T]:
    """The items; if `progress` is True with a bar that moves as they are taken."""
    if progress is not True:
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("`progress=True` shows a bar of tqdm: pip install tqdm, or pass a function.") from error
    return tqdm(items, desc=what)


def callback(progress: C | Literal[True] | None) -> C | None:
    """What is called; None for a bar."""
    return None if progress is True else progress
