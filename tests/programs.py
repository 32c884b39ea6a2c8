# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that counts the programs that each file of tests has XLA compile, and fails where they are too many.

`programs.toml` says how many a file may have. A program that the process has in memory is none, one in the persistent
cache is one; each file begins with nothing in memory, so that a count depends on nothing but the file. All docstrings
count as one file, for their examples share programs.
"""

import collections
import os
import pathlib
import sys
import tomllib

import jax
import pytest

FILE = pathlib.Path(__file__).with_suffix(".toml")
COMPILED = "/jax/core/compile/backend_compile_duration"
TESTS = f"{FILE.parent}/"
IMPORTS = "imports"  # of files of tests, before any test runs


def asked_by():
    """The line of a test, as file:line, that is being run; "" where there is none, as in a docstring."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{TESTS}test_"):
            return f"tests/{name[len(TESTS) :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def file_of(nodeid):
    """The file of a test that has a count of its own."""
    name = nodeid.split("::")[0]
    return name if name.startswith("tests/") else "docstrings"


class Programs:
    """Of a worker, what each test compiles; of the controller, which may be the same process, the sums by file."""

    def __init__(self, config):
        self.config, self.allowed = config, tomllib.loads(FILE.read_text())
        self.asked, self.imported, self.unit = [], [], None
        self.of = collections.defaultdict(collections.Counter)  # a file: {(line, program): number}
        jax.monitoring.register_event_duration_secs_listener(self.compiled)

    def compiled(self, event, _, fun_name="", **__):
        if event == COMPILED:
            self.asked.append((asked_by(), fun_name))

    def pytest_collection_finish(self):
        self.imported, self.asked = self.asked, []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        unit = file_of(item.nodeid), item.get_closest_marker("bits") is not None
        if unit != self.unit:
            jax.clear_caches()
            self.unit = unit

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call):
        outcome = yield
        if call.when == "teardown":
            outcome.get_result().programs = self.asked, self.imported  # goes from the worker to the controller with it
            self.asked, self.imported = [], []

    def pytest_runtest_logreport(self, report):
        asked, imported = getattr(report, "programs", ((), ()))
        self.of[file_of(report.nodeid)].update((line or report.nodeid, program) for line, program in asked)
        # Each worker imports all files, of which the first asks for what several make.
        self.of[IMPORTS] |= collections.Counter(map(tuple, imported))

    def counts(self):
        return {name: of for name, of in sorted(self.of.items()) if of}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if hasattr(self.config, "workerinput"):
            return
        counts = {name: of.total() for name, of in self.counts().items()}
        if self.config.option.record_programs:
            lines = [f'jax = "{jax.__version__}"', "", "[most]", *(f'"{name}" = {n}' for name, n in counts.items())]
            FILE.write_text(
                "\n".join(["# The programs of the default tests; written by --record-programs.", *lines, ""])
            )
        elif self.is_held and any(n > self.allowed["most"].get(name, 0) for name, n in counts.items()):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    @property
    def is_held(self):
        """Whether it is a default run with the version of jax that was counted, in which a worker has whole files."""
        is_default = self.config.option.markexpr == "not slow" and "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ
        workers = getattr(self.config.option, "numprocesses", None) or 1
        return is_default and workers != 2 and jax.__version__ == self.allowed["jax"]

    def pytest_terminal_summary(self, terminalreporter):
        counts = self.counts()
        tell = terminalreporter.write_line
        tell(f"{sum(of.total() for of in counts.values()):,} programs compiled")
        for name, of in counts.items():
            if self.is_held and of.total() > (most := self.allowed["most"].get(name, 0)):
                tell(f"FAILED {name} compiles {of.total()} programs, and may compile {most} (tests/programs.toml):")
                for (line, program), number in of.most_common(12):
                    tell(f"  {number:4} {line} {program}")
