# SPDX-License-Identifier: Apache-2.0
"""Measures functions against each other in one process: interleaved, medians, with the spread of the quartiles."""

import os
import pathlib
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple

import jax
import numpy as np


class Ratio(NamedTuple):
    median: float
    low: float
    high: float

    def __str__(self):
        return f"{self.median:.2f} ({self.low:.2f} - {self.high:.2f})"


def seconds(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, np.ndarray]:
    """The times of each run, one of each in every round, so that what slows the machine slows all of them."""
    for run in runs.values():
        for _ in range(3):
            run()
    times = {name: [] for name in runs}
    for i in range(rounds):
        names = list(runs) if i % 2 else list(runs)[::-1]
        for name in names:
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
    return {name: np.array(t) for name, t in times.items()}


def ratios(runs: dict[str, Callable[[], object]], base: str, rounds: int = 61) -> dict[str, Ratio]:
    """Time of each run over that of `base` in the same round: the median and the quartiles."""
    times = seconds(runs, rounds)
    quartiles = {name: np.quantile(t / times[base], [0.5, 0.25, 0.75]) for name, t in times.items() if name != base}
    return {name: Ratio(*q) for name, q in quartiles.items()}


def donated(f: Callable, x: jax.Array, *others: jax.Array) -> Callable[[], object]:
    """A run of `f(x, *others)` that writes into the memory of `x`, and feeds the next run with its result."""
    jitted, held = jax.jit(f, donate_argnums=0), [x.copy()]

    def run():
        held[0] = jax.block_until_ready(jitted(held[0], *others))

    return run


def kept(f: Callable, *arrays: jax.Array) -> Callable[[], object]:
    """A run of `f(*arrays)` whose result is new memory."""
    jitted = jax.jit(f)
    return lambda: jax.block_until_ready(jitted(*arrays))


def machine(*packages: str) -> str:
    """What was measured on, in a line."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split(":")[1].split()}
    sets = [name for name in ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8") if name in flags]
    device = jax.devices()[0]
    parts = [", ".join(sorted(names)), " ".join(sets), f"{os.cpu_count()} cores", f"Python {platform.python_version()}"]
    parts += [f"jax device {device.device_kind}"]
    return "; ".join(parts + [f"{name} {version(name)}" for name in ("jax", "jaxlib", *packages)])


def publish(name: str, text: str) -> None:
    """Prints a table and puts it between its marks in docs/benchmarks.md."""
    print(text)
    path = pathlib.Path(__file__).parents[1] / "docs" / "benchmarks.md"
    before, rest = path.read_text().split(f"<!-- {name} -->\n")
    _, after = rest.split(f"<!-- /{name} -->\n")
    path.write_text(f"{before}<!-- {name} -->\n{text}\n<!-- /{name} -->\n{after}")


def made(f: Callable, *args: object) -> tuple[float, float]:
    """Seconds to trace and to compile, with nothing cached."""
    jax.clear_caches()
    start = time.perf_counter()
    traced = jax.jit(f).trace(*args)
    between = time.perf_counter()
    traced.lower().compile()
    return between - start, time.perf_counter() - between


def goals(name: str, parts: dict[str, Callable], chosen: list[str], column: str, *packages: str) -> None:
    """The rows (what, got, goal or None) of the chosen parts as a table; published if all parts are."""
    rows = [row for part in chosen or parts for row in parts[part]()]
    lines = [f"Measured on: {machine(*packages)}.", "", f"| | {column} | goal |", "|---|---|---|"]
    for what, got, goal in rows:
        met = goal is not None and float(str(got).split()[0]) <= goal
        lines.append(f"| {what} | {got} | {'' if goal is None else f'{goal}, ' + ('met' if met else 'missed')} |")
    if chosen:
        print("\n".join(lines))
    else:
        publish(name, "\n".join(lines))
