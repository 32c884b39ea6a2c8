# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test run by default, and which in the slow lane of .ci/run."""

import itertools

import pytest


def cases(names, every, default=()):
    """Parametrizes a test by every case; those that are not among the default ones, or all, are slow."""
    every, default = list(every), list(default)
    strange = [case for case in default if case not in every]
    assert not strange, f"not among the cases: {strange}"
    values = [case if isinstance(case, tuple) else (case,) for case in every]
    marks = [() if case in default else pytest.mark.slow for case in every]
    named = [pytest.param(*v, marks=m, id="-".join(map(str, v))) for v, m in zip(values, marks, strict=True)]
    return pytest.mark.parametrize(names, named)


def in_turn(some, others):
    """Each of `some`, tuples, with the next one of `others`, round and round."""
    return [(*case, other) for case, other in zip(some, itertools.cycle(others), strict=False)]


def by_default(*ids):
    """Of the cases of a test, these alone run by default; the others are slow (conftest.py)."""
    return pytest.mark.by_default(*ids)
