# SPDX-License-Identifier: Apache-2.0
"""Says where the time of a run of tests goes: a table by file, and the programs that are compiled again.

    PYTHONPATH=.ci python -m pytest -p suite

Seconds are those of the tests, added up over the workers, so that two of them at once count twice. What is neither
traced, nor lowered to StableHLO, nor compiled, runs: the test itself and its programs. A program is compiled again
where XLA was given the same one before, by this worker or the other one; it comes from the cache then, if that was
empty when the run began.
"""

import collections
import time

import jax
import pytest

STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}
COLUMNS = "tests", "seconds", "tracing", "lowering", "compiling", "running", "programs", "again"
STARTED = time.monotonic()


class Spent:
    """Of one test, in one worker."""

    def __init__(self):
        self.spans, self.again, self.was_cached = [], collections.Counter(), False
        self.by_name = collections.Counter(), collections.Counter()

    def add(self, event, seconds, fun_name="", **_):
        if event not in STAGES:
            return
        end = time.monotonic()
        # What is traced, or compiled, while something else is traced counts for what it is.
        within = [span for span in self.spans if span[1] >= end - seconds]
        self.spans.append((STAGES[event], end, seconds - sum(own for _, _, own in within)))
        if STAGES[event] == "compiling":
            self.again[fun_name] += self.was_cached
            self.by_name[0][fun_name] += 1
            self.by_name[1][fun_name] += seconds
            self.was_cached = False

    def note(self, event, **_):
        self.was_cached |= event == "/jax/compilation_cache/cache_hits"

    def report(self):
        seconds = collections.Counter()
        for stage, _, own in self.spans:
            seconds[stage] += own
        programs = sum(stage == "compiling" for stage, *_ in self.spans)
        return {**seconds, "programs": programs}, dict(+self.again), *map(dict, self.by_name)


spent = Spent()
jax.monitoring.register_event_duration_secs_listener(lambda *args, **kw: spent.add(*args, **kw))
jax.monitoring.register_event_listener(lambda *args, **kw: spent.note(*args, **kw))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    global spent
    outcome = yield
    if call.when == "teardown":
        outcome.get_result().spent = spent.report()  # goes from the worker to the controller with the report
        spent = Spent()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu"] = time.process_time()


CPU = []


class Controller:
    """What a run without workers does not have."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        CPU.append(node.workeroutput["cpu"])


def pytest_configure(config):
    config.pluginmanager.register(Controller())


def pytest_terminal_summary(terminalreporter):
    rows = collections.defaultdict(collections.Counter)
    again, programs, compiling = collections.Counter(), collections.Counter(), collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                row = rows[report.nodeid.split("::")[0]]
                row["seconds"] += report.duration
                row["tests"] += report.when == "call"
                counts, names, *by_name = getattr(report, "spent", ({}, {}, {}, {}))
                row.update(counts)
                row["again"] += sum(names.values())
                for total, one in zip((again, programs, compiling), (names, *by_name), strict=True):
                    total.update(one)
    rows["all"] = sum(rows.values(), collections.Counter())
    for row in rows.values():
        row["running"] = row["seconds"] - row["tracing"] - row["lowering"] - row["compiling"]
    tell = terminalreporter.write_line
    terminalreporter.section("where the time goes")
    tell(f"{time.monotonic() - STARTED:.0f} s of time, {sum(CPU) or time.process_time():.0f} s of CPU in the workers")
    tell(f"\n| file | {' | '.join(COLUMNS)} |\n|---{'|---:' * len(COLUMNS)}|")
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["seconds"]):
        tell(f"| {name} | {' | '.join(f'{row[column]:.0f}' for column in COLUMNS)} |")
    tell("\n| program | seconds of compiling | programs | again |\n|---|---:|---:|---:|")
    for name, seconds in compiling.most_common(30):
        tell(f"| {name} | {seconds:.0f} | {programs[name]} | {again[name]} |")
