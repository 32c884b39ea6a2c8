# SPDX-License-Identifier: Apache-2.0
"""Measures functions against each other in one process: interleaved, medians, with the spread of the quartiles."""

import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "measured.md"


class Ratio(NamedTuple):
    median: float
    low: float
    high: float

    def __str__(self):
        return f"{self.median:.2f} ({self.low:.2f} - {self.high:.2f})"


def seconds(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, np.ndarray]:
    """The times of each run, one of each in every round, so that what slows the machine slows all of them."""
    for run in runs.values():
        for _ in range(min(rounds, 3)):
            run()
    times = {name: [] for name in runs}
    for i in range(rounds):
        names = list(runs) if i % 2 else list(runs)[::-1]
        for name in names:
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
    return {name: np.array(t) for name, t in times.items()}


def compared(runs: dict[str, Callable[[], object]], rounds: int) -> Callable[[str, str], Ratio]:
    """As a function of (run, base): time of the run over that of the base in the same round."""
    times = seconds(runs, rounds)
    return lambda run, base: Ratio(*np.quantile(times[run] / times[base], [0.5, 0.25, 0.75]))


def ratios(runs: dict[str, Callable[[], object]], base: str, rounds: int) -> dict[str, Ratio]:
    """Of each run to `base`."""
    to = compared(runs, rounds)
    return {name: to(name, base) for name in runs if name != base}


def donated(f: Callable, x: Any, *others: Any) -> Callable[[], object]:
    """A run of `f(x, *others)` that writes into the memory of the tree `x`, and feeds the next run with its result."""
    jitted, held = jax.jit(f, donate_argnums=0), [jax.tree.map(jnp.copy, x)]

    def run():
        held[0] = jax.block_until_ready(jitted(held[0], *others))

    return run


def kept(f: Callable, *arrays: Any) -> Callable[[], object]:
    """A run of `f(*arrays)` whose result is new memory."""
    jitted = jax.jit(f)
    return lambda: jax.block_until_ready(jitted(*arrays))


def machine(*packages: str) -> str:
    """What was measured on, in a line."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split(":")[1].split()}
    sets = [name for name in ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8") if name in flags]
    parts = [", ".join(sorted(names)), " ".join(sets), f"{os.cpu_count()} cores", f"Python {platform.python_version()}"]
    parts += [f"jax device {jax.devices()[0].device_kind}"]
    parts += [f"{name} {version(name)}" for name in ("jax", "jaxlib", *packages)]
    if "torch" in packages:
        import torch

        parts.append(f"torch with {torch.get_num_threads()} threads")
    return "; ".join(parts)


def made(f: Callable, *args: object) -> tuple[float, float]:
    """Seconds to trace and to compile, with nothing cached."""
    jax.clear_caches()
    start = time.perf_counter()
    traced = jax.jit(f).trace(*args)
    between = time.perf_counter()
    traced.lower().compile()
    return between - start, time.perf_counter() - between


class Part(NamedTuple):
    """Rows of a benchmark: `rows(rounds, *cases)` gives them, with a cell for each column."""

    columns: tuple[str, ...]
    rows: Callable[..., Iterator[tuple]]
    rounds: int
    cases: tuple = ()


def written(cell: Any) -> str:
    """A cell as Markdown has it."""
    if isinstance(cell, tuple) and not isinstance(cell, Ratio):
        return ", ".join(map(written, cell))
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def row_of(columns: Iterable[str], cells: Iterable[Any]) -> dict[str, Any]:
    """A row for JSON: cells by the names of their columns."""
    plain = (cell._asdict() if isinstance(cell, Ratio) else cell for cell in cells)
    return {column or "what": cell for column, cell in zip(columns, plain, strict=True)}


def measured(name: str, benchmark: ModuleType, chosen: list[str], quick: bool) -> dict[str, Any]:
    """Prints the rows of a benchmark as they come, and publishes them if they are all of it; gives them for JSON."""
    lines, rows, columns, about = [], [], (), machine(*benchmark.PACKAGES)

    def tell(*new):
        print(*new, sep="\n", flush=True)
        lines.extend(new)

    tell(f"{getattr(benchmark, 'HOW', 'Measured on')}: {about}.")
    for part in (benchmark.PARTS[name] for name in chosen or benchmark.PARTS):
        if part.columns != columns:
            columns = part.columns
            tell("", f"| {' | '.join(columns)} |".replace("|  |", "| |"), "|---" * len(columns) + "|")
        effort = (max(1, part.rounds // 10), *part.cases[:1]) if quick else (part.rounds, *part.cases)
        for cells in part.rows(*effort):
            tell(f"| {' | '.join(map(written, cells))} |")
            rows.append(row_of(columns, cells))
    if not (chosen or quick):
        publish(name, "\n".join(lines))
    return {"machine": about, "rows": rows}


def publish(name: str, text: str) -> None:
    """Puts tables between their marks in docs/measured.md."""
    before, rest = PAGE.read_text().split(f"<!-- {name} -->\n")
    _, after = rest.split(f"<!-- /{name} -->\n")
    PAGE.write_text(f"{before}<!-- {name} -->\n{text}\n<!-- /{name} -->\n{after}")
