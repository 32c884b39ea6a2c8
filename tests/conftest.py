# SPDX-License-Identifier: Apache-2.0
import collections
import gc
import itertools
import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
# A program that one worker, or a run before, has compiled is not compiled again. Its key holds all that it is made of.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get("JAX_COMPILATION_CACHE_DIR", ".pytest_cache/xla")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # the frames of each op, which no test reads

hypothesis.settings.register_profile("jaxquant", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("jaxquant")

collect_ignore = ["data", "worker.py"]  # scripts: of TensorFlow, and of processes that a test starts


TESTS, MAPPED, MOST = itertools.count(), *map(pathlib.Path, ("/proc/self/maps", "/proc/sys/vm/max_map_count"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Frees the compiled programs of earlier tests before they take all the memory mappings of the process.

    Linux allows 65,530, a program takes about 14, and XLA dies of a lack of them, after two thousand slow tests.
    """
    if next(TESTS) % 20 == 0 and MOST.exists() and MAPPED.read_bytes().count(b"\n") > int(MOST.read_text()) // 2:
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items):
    """Notebooks come first: they take the longest, and the worker that runs none has other tests meanwhile."""
    items.sort(key=lambda item: (item.path.name != "test_notebooks.py", not item.get_closest_marker("bits")))


def pytest_runtest_setup(item):
    """Programs of tests of bits are compiled as users compile them, all others with as few optimizations as there are.

    JAX_DISABLE_MOST_OPTIMIZATIONS=0 compiles all of them as users do.
    """
    low = "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ and not item.get_closest_marker("bits")
    if low != jax.config.read("jax_disable_most_optimizations"):
        jax.config.update("jax_disable_most_optimizations", low)
        jax.clear_caches()  # they do not know how a program was compiled


@pytest.fixture
def compared(record_property):
    """Call it with (judge, op, values compared, values that differ); the sums are printed at the end of the run."""
    return lambda judge, op, values, differ: record_property("compared", (judge, op, int(values), int(differ)))


def pytest_terminal_summary(terminalreporter):
    totals = collections.Counter(), collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", []):
                if name == "compared" and report.when == "call":
                    judge, op, values, differ = value
                    totals[0][judge, op] += values
                    totals[1][judge, op] += differ
    if totals[0]:
        terminalreporter.section("values compared bit for bit")
    for (judge, op), values in sorted(totals[0].items()):
        terminalreporter.write_line(f"{judge:27} {op:50} {values:12,} values {totals[1][judge, op]:6,} differ")
