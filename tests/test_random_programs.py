# SPDX-License-Identifier: Apache-2.0
"""A few of the random programs in each run; `python tests/random_programs.py 0 2000` takes as many as one likes."""

import jax
import pytest
from random_programs import check

pytestmark = [pytest.mark.slow, pytest.mark.bits]


@pytest.mark.parametrize("first", range(0, 50, 10))
def test_promises_hold_of_random_programs(first):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = [check(seed) for seed in range(first, first + 10)]
    assert sum("refused" not in of for of in found) >= 4, found
