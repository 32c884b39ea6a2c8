# SPDX-License-Identifier: Apache-2.0
"""One command knows every table of docs/measured.md, and says in JSON what it has measured."""

import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from inputs import ones

from benchmarks import programs, runner
from benchmarks.__main__ import NAMES

ROOT = pathlib.Path(__file__).parents[1]


def test_the_page_has_a_place_for_every_benchmark():
    marks = re.findall(r"^<!-- (\w+) -->$.*?^<!-- /\1 -->$", runner.PAGE.read_text(), re.M | re.S)
    assert (*marks, "accelerator") == NAMES
    files = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    helpers = {
        "__init__",
        "__main__",
        "runner",
        "exactness",
        "programs",
        "aot",
        "by_hand",
        "onnx_runtime",
        "smollm2",
        "efficientnet",
        "llama_cpp",
    }
    assert files - helpers == set(NAMES)


def test_programs_are_compared_up_to_names():
    text = lambda f: jax.jit(f).lower(ones(3)).compile().as_text()
    record = lambda f: {"f": (programs.without_names(text(f)), 0.0)}

    def renamed(y):
        return jnp.sin(y) * 2

    f = lambda x: jnp.sin(x) * 2
    assert text(f) != text(renamed)
    assert list(programs.differences(record(f), record(renamed))) == []
    (found,) = programs.differences(record(f), record(lambda x: jnp.cos(x) * 2))
    assert "cosine" in found
    (missing,) = programs.differences(record(f), {})
    assert missing.startswith("# f: ")


@pytest.mark.slow
def test_a_quick_run_writes_json_and_leaves_the_page(tmp_path):
    before = runner.PAGE.read_text()
    command = [sys.executable, "-m", "benchmarks", "serving.layouts", "accelerator", "--quick"]
    done = subprocess.run([*command, "--json", tmp_path / "found.json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["serving"]
    assert "jax" in found["machine"]
    assert [row["ratio"].keys() for row in found["rows"]] == [{"median", "low", "high"}] * 2
    for row in found["rows"]:
        assert f"| {row['what']} | {row['ratio']['median']:.2f} (" in done.stdout
    assert "no accelerator" in done.stdout
    assert runner.PAGE.read_text() == before
