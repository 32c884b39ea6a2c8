# SPDX-License-Identifier: Apache-2.0
"""The README's example runs and learns, and its commands stand where .ci/run looks for them."""

import ast
import importlib.util
import inspect
import itertools
import pathlib
import re
import subprocess
import sys
import warnings

import jax
import pytest

import jaxquant

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = {
    f"{path.stem}-{i}": code
    for path in sorted((ROOT / "docs").glob("*.md"))
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S), 1)
}


def run(code):
    """As a reader runs it, without the strict promotion of the tests."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(code, {})


def modules(code):
    """Top-level names of the packages that it imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return sorted({name.split(".")[0] for name in names})


@pytest.mark.slow
def test_the_readme_runs_learns_and_raises(tmp_path):
    """In a process of its own, for keras chooses its backend once."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 8
    here = [code for code in blocks if all(importlib.util.find_spec(module) for module in modules(code))]
    assert len(here) >= 6
    command = [sys.executable, "-c", "\n".join(here)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    before, after = map(float, re.findall(r"^[\d.e-]+$", done.stdout, re.M))
    assert after < before / 4
    assert "'kernel', matched no site" in done.stdout


def test_the_readme_is_short():
    assert len(README.split()) <= 1200
    assert len((ROOT / "docs" / "benchmarks.md").read_text().split()) <= 3000


def test_the_commands_are_one_line_each():
    for name, last in (("main-job", "notebooks/01_qat_digits.py"), ("tests", "-m pytest")):
        (command,) = re.findall(rf"<!-- {name} -->\n```\n(.*)\n```\n", README)
        assert command.startswith("python3 -m venv .venv && ")
        assert command.endswith(last)


@pytest.mark.bits
@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_a_page_run(example, tmp_path, monkeypatch):
    code = EXAMPLES[example]
    monkeypatch.chdir(tmp_path)  # some of them write files
    for module in modules(code):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}, of an extra or of .ci/run")
    assert "assert " in code
    if "os.environ" in code:  # which counts when keras or tensorflow is imported first
        (tmp_path / "example.py").write_text(code)  # for what reads its own source
        subprocess.run([sys.executable, "example.py"], check=True, capture_output=True, text=True, cwd=tmp_path)
    else:
        with warnings.catch_warnings():
            if {"aqt", "qwix"} & set(modules(code)):  # which call what jax and flax have deprecated
                warnings.simplefilter("ignore", DeprecationWarning)
            run(code)


def test_links_exist():
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        links = re.findall(r"\]\(([^)#:]+)\)", path.read_text())
        assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    namespaces = {
        name: module for name, module in vars(jaxquant).items() if inspect.ismodule(module) and name[0] != "_"
    }
    whole = {"solve", "tf"}  # with their members
    for name in namespaces.keys() - whole:
        listed = set(re.findall(rf"^::: jaxquant\.{name}\.(\w+)$", page, re.M))
        assert listed == {name for name in vars(namespaces[name]) if not name.startswith("_")}
    listed = set(re.findall(r"^::: jaxquant\.(\w+)$", page, re.M))
    assert listed == {name for name in vars(jaxquant) if not name.startswith("_")} - (namespaces.keys() - whole)
    of_modules = re.findall(r"show_root_heading: false\n      members: \[(.*)\]", page)
    for members, module in zip(of_modules, (jaxquant.solve, jaxquant.tf), strict=True):
        assert set(members.split(", ")) == {name for name, v in vars(module).items() if inspect.isfunction(v)}


def test_the_page_of_the_code_says_what_is_in_each_file():
    """In the words that the file begins with."""
    folder, page = ROOT / "jaxquant", (ROOT / "docs" / "architecture.md").read_text()
    said = re.search(r"<!-- rooms -->\n\|.*\|\n\|[-|]+\|\n(.*)<!-- /rooms -->", page, re.S)
    files = {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.py"))}
    first = lambda path: ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
    rows = [f"| `{name}` | {first(path)} |" for name, path in files.items() if path.name != "__init__.py"]
    assert said[1].splitlines() == rows
    mentioned = set(re.findall(r"`((?:\w+/)?_\w+)`", page))
    assert {name.rpartition("/")[2] for name in mentioned} <= {name.rpartition("/")[2] for name in files}


def test_the_site_has_every_page():
    pages = set(re.findall(r": ([\w/]+\.md)$", (ROOT / ".ci" / "mkdocs.yml").read_text(), re.M))
    tutorials = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert pages == tutorials | {path.name for path in (ROOT / "docs").glob("*.md")}


def test_every_table_of_measurements_says_what_its_figures_are():
    page = (ROOT / "docs" / "measured.md").read_text()
    kinds = re.findall(r"^\| (\w+) \| .* \|$", page.partition("## ")[0], re.M)
    assert kinds == ["Measured", "Estimated"]
    for section in page.split("\n## ")[1:]:
        kind = None
        for line, after in itertools.pairwise(section.splitlines()):
            kind = next((k for k in kinds if line.startswith(k)), kind)
            assert kind or not after.startswith("|---"), f"a table without its kind: {section[:40]!r}"


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_figures_are_those_that_commands_have_measured(page):
    """Each table has its commands above it, and their published rows have every figure of its cells."""
    text, measured = (ROOT / page).read_text(), (ROOT / "docs" / "measured.md").read_text()
    tables = re.findall(r"^(`python -m benchmarks [^\n]*(?:\n[^\n|]+)*:)\n\n\|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    assert len(tables) >= (2 if page == "README.md" else 12)
    for command, rows in tables:
        of = [name for name in re.findall(r"[a-z_]+", command) if f"<!-- {name} -->" in measured]
        published = " ".join(measured.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0] for name in of)
        known = set(re.findall(r"[-+]?[\d,]*\.?\d+", published))
        for row in rows.splitlines():
            _, *cells = row.strip("|").split("|")
            unknown = {figure for cell in cells for figure in re.findall(r"[-+]?[\d,]*\.?\d+", cell)} - known
            assert not unknown, (command, row, unknown)


def test_figures_are_drawn_used_and_described():
    drawn = set(re.findall(r"^def (\w+)\(\):", (ROOT / "docs" / "figures" / "make.py").read_text(), re.M))
    files = {path.stem for path in (ROOT / "docs" / "figures").glob("*.svg")}
    used = set()
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for text, name in re.findall(r"!\[([^\]]*)\]\([\w/]*figures/(\w+)\.svg\)", path.read_text()):
            assert len(text) > 40, (path.name, name)
            used.add(name)
    assert files == used <= drawn


@pytest.mark.slow
def test_figures_can_be_drawn_of_the_tables_of_the_page():
    pytest.importorskip("matplotlib")
    of_file = importlib.util.spec_from_file_location("make", ROOT / "docs" / "figures" / "make.py")
    make = importlib.util.module_from_spec(of_file)
    of_file.loader.exec_module(make)
    drawn = [draw() for draw in make.FIGURES if "published" in inspect.getsource(draw)]
    assert len(drawn) >= 2
