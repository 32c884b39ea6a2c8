# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test run by default, and which in the slow lane of .ci/run."""

import pytest


def cases(names, every, default):
    """Parametrizes a test by every case; those that are not among the default ones are slow."""
    every, default = list(every), list(default)
    assert not set(default) - set(every), "a default case that there is not"
    values = [case if isinstance(case, tuple) else (case,) for case in every]
    marks = [() if case in default else pytest.mark.slow for case in every]
    return pytest.mark.parametrize(names, [pytest.param(*v, marks=m) for v, m in zip(values, marks, strict=True)])
