# SPDX-License-Identifier: Apache-2.0
import collections
import gc
import itertools
import os
import pathlib
import sys
import tomllib
import types

from xdist.scheduler import LoadGroupScheduling, WorkStealingScheduling

os.environ["JAX_PLATFORMS"] = "cpu"
FLAGS = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
# A program's kernels without the passes that make them fast: a quarter of the time to compile. XLA reads its flags once
# in the life of a process, so they are those of a worker. Later versions of jax than 0.10 have other emitters.
QUICK = " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
AS_USERS_DO = "JAX_DISABLE_MOST_OPTIMIZATIONS" in os.environ
# Of three workers or more, which learn it from the process that starts them, so many have the tests of bits alone.
APART = "JAXQUANT_WORKERS_OF_BITS"
number = lambda worker: int(worker.removeprefix("gw"))
IS_QUICK = number(os.environ.get("PYTEST_XDIST_WORKER", "gw0")) >= int(os.environ.get(APART, "99"))
# A program that one worker, or a run before, has compiled is not compiled again. Its key holds all that it is made of.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get("JAX_COMPILATION_CACHE_DIR", ".pytest_cache/xla")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import hypothesis
import jax
import programs
import pytest
from programs import Programs

os.environ["XLA_FLAGS"] = FLAGS + QUICK if IS_QUICK and jax.__version_info__ < (0, 11) else FLAGS
jax.devices()  # reads the flags
os.environ["XLA_FLAGS"] = FLAGS  # of processes that tests start

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # the frames of each op, which no test reads

hypothesis.settings.register_profile("jaxquant", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("jaxquant")

collect_ignore = ["data", "worker.py"]  # scripts: of TensorFlow, and of processes that a test starts


TESTS, MAPPED, MOST = itertools.count(), *map(pathlib.Path, ("/proc/self/maps", "/proc/sys/vm/max_map_count"))


def pytest_addoption(parser):
    parser.addoption("--record-programs", action="store_true", help="write tests/programs.toml, of a whole default run")


def pytest_configure(config):
    config.pluginmanager.register(Programs(config), "programs")
    workers = getattr(config.option, "numprocesses", None) or 0
    if workers > 2 and not AS_USERS_DO:
        os.environ[APART] = str(workers // 2)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Frees the compiled programs of earlier tests before they take all the memory mappings of the process.

    Linux allows 65,530, a program takes about 14, and XLA dies of a lack of them, after two thousand slow tests.
    """
    if next(TESTS) % 20 == 0 and MOST.exists() and MAPPED.read_bytes().count(b"\n") > int(MOST.read_text()) // 2:
        jax.clear_caches()
        gc.collect()


def is_of_bits(item):
    return item.get_closest_marker("bits") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item):
    mark = item.get_closest_marker("by_default")
    if mark and item.callspec.id not in mark.args:
        item.add_marker(pytest.mark.slow)


def refuse_lost_names(items):
    """Raises where by_default names a case that its test does not have."""
    have = collections.defaultdict(set)
    for item in items:
        if mark := item.get_closest_marker("by_default"):
            have[item.parent.nodeid, item.originalname, mark.args].add(item.callspec.id)
    for (file, test, names), ids in have.items():
        if lost := set(names) - ids:
            raise pytest.UsageError(f"{file}::{test} has no case {sorted(lost)}, which @by_default names")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Notebooks come first: they take the longest. Then the files that compile the most, tests of bits before others.

    Tests of bits are a group, for the worker that compiles as users do.
    """
    if not any("::" in arg for arg in config.args):
        refuse_lost_names(items)
    most = tomllib.loads(programs.FILE.read_text())["most"]
    weight = lambda item: (-most.get(programs.file_of(item.nodeid), 0), str(item.path))
    items.sort(key=lambda item: (item.path.name != "test_notebooks.py", not is_of_bits(item), weight(item)))
    for item in items:
        if is_of_bits(item) and APART in os.environ:
            item.add_marker(pytest.mark.xdist_group("bits"))


class Scheduling(LoadGroupScheduling):
    """Some workers have all tests of bits, which they compile as users do, the others all other tests.

    In a default run, whose programs are counted by file, a worker has whole files. Where there are no tests of bits, or
    no other worker, it has what there is.
    """

    def _split_scope(self, nodeid):
        is_of_bits = nodeid.endswith("@bits")
        name = programs.file_of(nodeid) if self.config.option.markexpr == "not slow" else nodeid.removesuffix("@bits")
        return name + "@bits" * is_of_bits

    def schedule(self):
        if self.collection is None:  # the first are not those without work, of which there may be more than files
            self.assigned_work = collections.OrderedDict(
                sorted(self.assigned_work.items(), key=lambda v: number(v[0].gateway.id))
            )
        super().schedule()

    def _units(self, node):
        """What is left for a worker."""
        is_for_bits = lambda node: number(node.gateway.id) < int(os.environ[APART])
        are_both = len(set(map(is_for_bits, self.nodes))) > 1
        is_apart = are_both and any(name.endswith("@bits") for name in self.collection)
        return [name for name in self.workqueue if not is_apart or name.endswith("@bits") == is_for_bits(node)]

    def _assign_work_unit(self, node):
        if units := self._units(node):
            self.workqueue.move_to_end(units[0], last=False)
            super()._assign_work_unit(node)

    def _reschedule(self, node):
        if not self._units(node) and not node.shutting_down:
            node.shutdown()
        else:
            super()._reschedule(node)


def pytest_xdist_make_scheduler(config, log):
    """Of few workers, each takes any test."""
    return (Scheduling if APART in os.environ else WorkStealingScheduling)(config, log)


def pytest_runtest_setup(item):
    """Programs of tests of bits are compiled as users compile them, all others with as few optimizations as there are.

    JAX_DISABLE_MOST_OPTIMIZATIONS=0 compiles all of them as users do.
    """
    if IS_QUICK and is_of_bits(item):
        pytest.fail("a test of bits has come to a worker whose flags are quick: pytest-xdist has lost its group")
    low = not AS_USERS_DO and not is_of_bits(item)
    if low != jax.config.read("jax_disable_most_optimizations"):
        jax.config.update("jax_disable_most_optimizations", low)
        jax.clear_caches()  # they do not know how a program was compiled


@pytest.fixture
def compared(record_property):
    """Call it with (judge, op, values compared, values that differ); the sums are printed at the end of the run."""
    return lambda judge, op, values, differ: record_property("compared", (judge, op, int(values), int(differ)))


@pytest.fixture
def bars(monkeypatch):
    """What each step of a bar is called, for tqdm."""
    shown = []

    def tqdm(items, desc):
        for item in items:
            yield item
            shown.append(desc)

    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=tqdm))
    return shown


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


@pytest.fixture
def asked(request):
    """What the test has had XLA compile so far: (the line that asked for it, name) of each program."""
    return request.config.pluginmanager.get_plugin("programs").asked
