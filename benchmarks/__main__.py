# SPDX-License-Identifier: Apache-2.0
"""Measures the tables of docs/measured.md, each in a process of its own, and writes them there.

Run it in the root of the repository; needs `pip install '.[benchmarks]'`. NAME is a benchmark, or one of its parts,
`serving.layouts`, which is printed alone.
"""

import argparse
import importlib
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from .runner import measured

NAMES = (  # as they stand on the page; the last one has a page of its own
    "function_transform",
    "serving",
    "integer",
    "caches",
    "compile_cost",
    "mixed_precision",
    "params_transform",
    "elementwise",
    "affine",
    "formats",
    "float8",
    "learned_scales",
    "solvers",
    "memory",
    "language_model",
    "cnn",
    "checkpoints",
    "recipes",
    "distillation",
    "devices",
    "accelerator",
)


def here(name: str, parts: list[str], quick: bool) -> dict[str, Any]:
    """What a benchmark measures in this process: nothing without its packages, or without its device."""
    try:
        benchmark = importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        print(f"Skipped: {name} needs {error.name}, which `pip install '.[benchmarks]'` brings.")
        return {}
    if why := benchmark.missing() if hasattr(benchmark, "missing") else "":
        print(f"Skipped: {name} {why}.")
        return {}
    if unknown := set(parts) - {*benchmark.PARTS, *["record"] * (name == "accelerator")}:
        sys.exit(f"{name} has no part {', '.join(sorted(unknown))}, but {', '.join(benchmark.PARTS)}.")
    found = benchmark.main(parts, quick) if name == "accelerator" else measured(name, benchmark, parts, quick)
    return {name: found} if found else {}


def apart(name: str, parts: list[str], quick: bool) -> dict[str, Any] | None:
    """The same in a process of its own; None if it fails."""
    words = [f"{name}.{part}" for part in parts] or [name]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks", *words, *["--quick"] * quick, "--json", str(path)]
        print(f"\n## {name}\n", flush=True)
        return json.loads(path.read_text()) if subprocess.run(command).returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="few rounds and cases; writes nothing into the page")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="writes what is measured, by benchmark")
    options = parser.parse_args()
    chosen: dict[str, list[str]] = {}
    for word in options.names or NAMES:
        name, _, part = word.partition(".")
        if name not in NAMES:
            parser.error(f"there is no benchmark {name!r}, but {', '.join(NAMES)}")
        chosen.setdefault(name, []).extend([part] if part else [])
    run = here if len(chosen) == 1 else apart
    found = {name: run(name, parts, options.quick) for name, parts in chosen.items()}
    if options.json:
        merged = {name: rows for each in found.values() for name, rows in (each or {}).items()}
        options.json.write_text(json.dumps(merged, indent=2) + "\n")
    if failed := [name for name, each in found.items() if each is None]:
        sys.exit(f"Failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
