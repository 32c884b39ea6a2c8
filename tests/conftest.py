# SPDX-License-Identifier: Apache-2.0
import collections
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("jaxquant", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("jaxquant")

collect_ignore = ["data"]  # scripts that need TensorFlow

COMPARED = pytest.StashKey[collections.Counter]()


@pytest.fixture
def compared(request):
    """Counts `(judge, op) -> [values compared, values that differ]`, printed at the end of the run."""
    return request.config.stash.setdefault(COMPARED, {})


def pytest_terminal_summary(terminalreporter, config):
    counts = config.stash.get(COMPARED, {})
    if counts:
        terminalreporter.section("values compared bit for bit")
    for (judge, op), (values, differ) in sorted(counts.items()):
        terminalreporter.write_line(f"{judge:24} {op:44} {values:12,} values {differ:6,} differ")
