#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Changes one thing at a time in the numeric floors, and says which changes no test sees.

    .venv/bin/python .ci/mutants.py [--count 300] [--seed 0] [--share 1/2] [--patience 30]
    .venv/bin/python .ci/mutants.py --table

Needs the `test` extra, and a project that is installed with -e; not part of .ci/run, because it takes hours. First the
default tests run once under coverage, nothing traced kept from one to the next, which tells the tests that reach a line
and their seconds (kept in .mutants.json: remove it when the tests have changed). A mutant meets the tests that reach
its lines, or its file if it is a constant: those that saw mutants of the file before, then the quickest, until one
fails. With --patience it meets as many as take so many seconds, after which its verdict is open. Each --share i/n takes
every n-th mutant, in a copy of the project; a run goes on where the log, .mutants.log, ends, and with those left open.
What a reader finds of a survivor is appended there as "equivalent, read, 0 s: FILE:LINE: BEFORE  ->  AFTER  [why]", or
"free", where the result is another one of those that are promised. --table makes .ci/mutants.txt of the log.
"""

import argparse
import ast
import bisect
import collections
import copy
import importlib
import itertools
import json
import math
import os
import pathlib
import random
import resource
import shutil
import sys
import tempfile
import time

import coverage
import pytest

FLOORS = (
    *("_base/_axes.py", "_base/_groups.py", "_base/_numerics.py", "_base/_sharding.py"),
    "_spec/_scale_formats.py",
    *("_arrays/_affine.py", "_arrays/_fit.py", "_arrays/_grid.py", "_arrays/_histogram.py", "_arrays/_pack.py"),
    *("_arrays/_quantized.py", "_arrays/_range.py", "_arrays/_straight_through.py"),
    "_contract/*.py",
    "tf/*.py",
)
COMPARED = {"Lt": "LtE Gt", "LtE": "Lt GtE", "Gt": "GtE Lt", "GtE": "Gt LtE", "Eq": "NotEq", "NotEq": "Eq"}
COMPARED |= {"Is": "IsNot", "IsNot": "Is", "In": "NotIn", "NotIn": "In"}
COMPUTED = {"Add": "Sub", "Sub": "Add", "Mult": "Div", "Div": "Mult", "FloorDiv": "Mult", "Mod": "FloorDiv"}
COMPUTED |= {
    "Pow": "Mult",
    "LShift": "RShift",
    "RShift": "LShift",
    "BitAnd": "BitOr",
    "BitOr": "BitAnd",
    "BitXor": "BitAnd",
}
CALLED = dict([("min", "max"), ("minimum", "maximum"), ("reduce_min", "reduce_max"), ("floor", "ceil"), ("any", "all")])
CALLED |= {b: a for a, b in CALLED.items()}
SWAPPED = {"select", "where", "clip", "divide", "sub", "div", "rem", "cond"}  # their last two arguments
SKIPPED = ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom


def changes(node):
    """What an expression may be instead."""

    def changed(**fields):
        new = copy.copy(node)
        vars(new).update(fields)
        return new

    match node:
        case ast.Compare():
            for i, op in enumerate(node.ops):
                for name in COMPARED[type(op).__name__].split():
                    yield changed(ops=[*node.ops[:i], getattr(ast, name)(), *node.ops[i + 1 :]])
        case ast.BinOp() if type(node.op).__name__ in COMPUTED:
            yield changed(op=getattr(ast, COMPUTED[type(node.op).__name__])())
        case ast.BoolOp():
            yield changed(op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
            for i in range(len(node.values)):
                yield changed(values=node.values[:i] + node.values[i + 1 :])
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.IfExp() if not isinstance(node.test, ast.Compare):
            yield changed(test=ast.UnaryOp(ast.Not(), node.test))
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield from (ast.Constant(node.value + 1), ast.Constant(node.value - 1))
        case ast.Attribute(attr=name) if name in CALLED:
            yield changed(attr=CALLED[name])
        case ast.Name(id=name) if name in CALLED:
            yield changed(id=CALLED[name])
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=[*some, a, b]) if name in SWAPPED:
            yield changed(args=[*some, b, a])


def sites(node, negated=False):
    """(expression, what it becomes) everywhere, but in annotations, decorators, messages and docstrings."""
    if isinstance(node, SKIPPED) or (isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: nothing but an error depends on it
        return
    yield from ((node, new) for new in changes(node))
    if negated:
        yield node, ast.UnaryOp(ast.Not(), node)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns", "decorator_list"):
                is_test = (isinstance(node, ast.If | ast.While) and name == "test") or name == "ifs"
                yield from sites(child, is_test and not isinstance(child, ast.Compare))


def mutants(path):
    """(file, line, before, after, mutated source), with the lines below where they were."""
    source = path.read_bytes()
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    for old, new in sites(ast.parse(source)):
        begin, end = starts[old.lineno - 1] + old.col_offset, starts[old.end_lineno - 1] + old.end_col_offset
        after = ast.unparse(ast.fix_missing_locations(ast.Expression(new)))
        if ast.unparse(old) != after:
            lines = "\n" * (old.end_lineno - old.lineno)
            mutated = source[:begin] + f"({after}{lines})".encode() + source[end:]
            yield str(path), range(old.lineno, old.end_lineno + 1), ast.unparse(old), after, mutated


def pytest_runtest_setup():
    """In the workers of `reach`: a test reaches what it needs, even where one before it has traced the same."""
    sys.modules["jax"].clear_caches()


class Seconds(collections.Counter):
    """Of each test."""

    def pytest_runtest_logreport(self, report):
        self[report.nodeid.removesuffix("@bits")] += report.duration


def reach(files):
    """({test: its seconds}, {file: {line: the tests that reach it}})."""
    seconds = Seconds()
    options = ["--cov=jaxquant", "--cov-context=test", "--cov-report=", "-p", "mutants", "-q"]
    pytest.main([*files, *options], [seconds])
    data, lines = coverage.CoverageData(), {}
    data.read()
    test = lambda context: context.rpartition("|")[0].removesuffix("@bits")
    for path in data.measured_files():
        contexts = data.contexts_by_lineno(path).items()
        lines[os.path.relpath(path)] = {n: sorted({test(name) for name in of if name}) for n, of in contexts}
    return seconds, lines


OPTIONS = "-q", "-x", "-o", "addopts=-m 'not slow' --doctest-modules", "-p", "no:cacheprovider"
OPTIONS += "-W", "ignore::pytest.PytestAssertRewriteWarning"  # of hypothesis, which is there before pytest


class First:
    """The first test that fails."""

    failed = ""

    def pytest_runtest_logreport(self, report):
        self.failed = self.failed or (report.nodeid if report.failed else "")

    pytest_collectreport = pytest_runtest_logreport


def failed(tests, seconds):
    """The first of the tests that fails, run in a process that has jax already, but nothing of jaxquant; or nothing."""
    read, write = os.pipe()
    if not (child := os.fork()):
        limit = int(60 + 5 * seconds)  # of CPU, which no work beside it takes away
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        first = First()
        try:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
                code = pytest.main([*OPTIONS, *tests], [first])
            os.write(write, first.failed.encode())
            os._exit(0 if first.failed or not code else 1)
        finally:  # never on in the code of the parent
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as said:
        by = said.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise ChildProcessError(f"pytest did not run {tests[0]} ...")
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else by


def run(of_test, tests_of, options, log):
    """Notes the verdict of each mutant, those that the log has aside."""
    every = [m for glob in FLOORS for path in sorted(pathlib.Path("jaxquant").glob(glob)) for m in mutants(path)]
    chosen = random.Random(options.seed).sample(every, min(options.count or len(every), len(every)))
    share, of = map(int, options.share.split("/"))
    saw, known = collections.defaultdict(collections.Counter), verdicts(log)
    for path, lines, before, after, mutated in chosen[share - 1 :: of]:
        what = f"{path}:{lines[0]}: {before}  ->  {after}".replace("\n", " ")
        if known.get(what, "open") != "open":
            continue
        reached = tests_of.get(path, {})
        tests = {t for n in lines for t in reached.get(str(n), ())} or {
            t for of_line in reached.values() for t in of_line
        }
        order = sorted(tests, key=lambda test: (-saw[path][test], of_test[test]))
        spent = list(itertools.accumulate(of_test[test] for test in order))
        met = max(8, bisect.bisect(spent, options.patience))
        if met < len(order) and what in known:  # open still
            continue
        target, start = pathlib.Path(path), time.monotonic()
        original = target.read_bytes()
        target.write_bytes(mutated)
        by = ""
        # Most do not survive the first few, which are collected sooner than all.
        for part in (order[:8], order[8:60][: met - 8], order[60:met]):
            by = by or (failed(part, sum(of_test[test] for test in part)) if part else "")
        target.write_bytes(original)
        saw[path][by] += 1
        with log.open("a") as file:
            verdict = "killed" if by else "survived" if met >= len(order) else "open"
            met, seconds = f"{min(met, len(order))} of {len(order)} tests", f"{time.monotonic() - start:.0f} s"
            file.write(f"{verdict}, {met}, {seconds}: {what}  [{by}]\n")


def noted(log):
    """{mutant: its last verdict, and the test that killed it or what a reader says}."""
    lines = log.read_text().splitlines() if log.exists() else []
    parts = ((line.split(",")[0], *line.split(" s: ", 1)[1].rsplit("  [", 1)) for line in lines)
    return {what: (verdict, by.removesuffix("]")) for verdict, what, by in parts}


def verdicts(log):
    return {what: verdict for what, (verdict, _) in noted(log).items()}


VERDICTS = "killed", "equivalent", "free", "survived", "open"


def counted(log):
    """The verdicts by file, as a table; and what was not killed."""
    counts, alive = collections.defaultdict(collections.Counter), []
    for what, (verdict, why) in noted(log).items():
        counts[what.split(":")[0]][verdict] += 1
        alive += [f"{verdict}: {what}{f'  [{why}]' if why else ''}"] if verdict != "killed" else []
    print("| file | mutants |", " | ".join(VERDICTS), f"|\n|---|{'---:|' * (len(VERDICTS) + 1)}")
    total = sum(counts.values(), collections.Counter())
    for path, of in (*sorted(counts.items()), ("all", total)):
        print(f"| {path} | {of.total()} |", " | ".join(str(of[v]) for v in VERDICTS), "|")
    share = 100 * total["killed"] / (total.total() - total["equivalent"])
    print(f"\n{100 * total['killed'] / total.total():.1f} % killed, {share:.1f} % of those that are not equivalent.")
    print("\nNot killed:", *sorted(alive), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0, help="a sample; 0, the default, for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", default="1/1")
    parser.add_argument("--patience", type=float, default=math.inf, help="seconds of tests for a mutant")
    parser.add_argument("--table", action="store_true", help="of the verdicts in the log")
    options = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parents[1]
    os.chdir(root)
    log = root / ".mutants.log"
    if options.table:
        sys.exit(counted(log))
    if not os.path.exists(".mutants.json"):
        os.environ["PYTHONPATH"] = str(root / ".ci")  # of the workers, which find this file
        sys.path.insert(0, "tests")
        pathlib.Path(".mutants.json").write_text(json.dumps(reach(["jaxquant", "tests"])))
        # Anew, without the backend of this process, whose threads a fork would lose.
        os.execv(sys.executable, [sys.executable, __file__, *sys.argv[1:]])
    of_test, tests_of = json.loads(pathlib.Path(".mutants.json").read_text())
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": os.path.abspath(".pytest_cache/xla")}
    os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(root, f"{folder}/project", ignore=shutil.ignore_patterns(".*cache", ".venv", "output"))
        os.chdir(f"{folder}/project")
        sys.path[:0] = [os.getcwd(), os.path.abspath("tests")]
        sys.dont_write_bytecode = True  # a file may change twice in a second
        importlib.import_module("jax")  # but no backend, whose threads a fork would lose
        run(of_test, tests_of, options, log)
