# SPDX-License-Identifier: Apache-2.0
"""The file listing is the architecture: a file imports only from floors below its own."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

import jaxquant

ROOT = pathlib.Path(jaxquant.__file__).parent
FLOORS = {
    "tf/_quantize": 3,
    "_sharding": 0,
    "_numerics": 0.1,
    "_checks": 0,
    "_version": 0,
    "_groups": 0,
    "_pack": 1,
    "_formats": 0.5,
    "_granularity": 0.5,
    "_scale_formats": 0.6,
    "_spec": 1,
    "_recipes": 1.05,
    "_qparams": 1.05,
    "_grid": 1.1,
    "_ranges/_range": 2,
    "_ranges/_histogram": 2.1,  # one folder, and each file stands on the one before
    "_ranges/_fit": 2.1,
    "_qarray": 2.9,
    "_affine": 3,
    "_straight_through": 3.1,
    "_table": 0,
    "_tally": 4,
    "_report": 7,
    "_integer/_axes": 4,
    "_integer/_operands": 4,
    "_integer/_lowering": 4.02,
    "_integer/_contract": 4.03,
    "_integer/_digits": 4.05,
    "_jaxpr/_transpose": 4,
    "_integer/_dot": 4.1,
    "_integer/_conv": 4.1,
    "_integer/_ragged": 4.2,
    "_integer/_ops": 4.3,
    "_rule": 4.4,
    "_paths": 4.5,
    "_params": 4.6,
    "_files": 5,
    "_jaxpr/_program": 5,
    "_jaxpr/_origin": 5.1,
    "_jaxpr/_quantized_param": 5.1,
    "_jaxpr/_moves": 5.2,
    "_jaxpr/_walk": 5.3,
    "_jaxpr/_evaluate": 5.3,
    "_jaxpr/_calls": 5.4,
    "_transform/_call": 6,
    "_transform/_plan": 6,
    "_transform/_match": 6.1,
    "_transform/_backward": 6.15,
    "_transform/_axes": 6,
    "_transform/_errors": 6.15,
    "_transform/_choices": 6.2,
    "_transform/_entries": 6.3,
    "_transform/_freezing": 6.4,
    "_transform/_decide": 6.4,
    "_transform/_observers": 6.4,
    "_transform/_sites": 6.5,
    "_transform/_quantize_fn": 6.6,
    "tf/_grad_pass_through": 3.2,
    "tf/_checks": 1,
    "tf/_nudge": 2,
    "tf/_fake_quant": 3,
    "tf/_quantize_and_dequantize": 3,
}
OUTSIDE = {"jax", "numpy"}
EXTRAS = {"_files": "safetensors", "_report": "matplotlib"}  # imported by the function that needs it
FILES = {str(p.relative_to(ROOT).with_suffix("")): p for p in ROOT.rglob("*.py") if p.name != "__init__.py"}


def imports(path):
    """(dots, module, names) of each import in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, ()) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", [alias.name for alias in node.names]


def inside(name, dots, module, names):
    """The files of the package that an import reaches."""
    folder = pathlib.PurePosixPath(name).parents[dots - 1]
    targets = [module] if module else names
    return [str(folder / target.replace(".", "/")).lstrip("./") for target in targets]


def test_every_file_has_a_floor():
    assert set(FILES) == set(FLOORS)


@pytest.mark.parametrize("name", FILES)
def test_imports_go_down(name):
    for dots, module, names in imports(FILES[name]):
        if dots:
            assert all(FLOORS[target] < FLOORS[name] for target in inside(name, dots, module, names)), (name, names)
        else:
            top = module.split(".")[0]
            assert top in OUTSIDE or top in sys.stdlib_module_names or top == EXTRAS.get(name), (name, module)
            full = [module, *(f"{module}.{n}" for n in names)]
            assert not any("_src" in m for m in full)
            assert name.startswith("_jaxpr/") or not any(m.startswith("jax.extend") for m in full)


def test_the_check_sees_an_import_of_a_sibling():
    assert inside("tf/_fake_quant", 2, "", ["_numerics"]) == ["_numerics"]
    assert inside("tf/_fake_quant", 1, "_grad_pass_through", ["f"]) == ["tf/_grad_pass_through"]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("__init__.py")), ids=lambda p: p.parent.name)
def test_package_files_only_name_what_is_public(path):
    body = ast.parse(path.read_text()).body
    assert isinstance(body[0], ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) for node in body[1:])
    assert all(alias.asname == alias.name for node in body[1:] for alias in node.names)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_names_its_licence_and_stays_short(path):
    lines = path.read_text().splitlines()
    assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"
    assert len(lines) <= 600
    assert not re.search(r"config\.update|pure_callback|io_callback", path.read_text())


def run(code):
    env = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}  # any use of a backend raises
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def test_import_starts_no_backend():
    assert run("import jaxquant").returncode == 0
    assert "no_such_platform" in run("import jaxquant, jax; jax.devices()").stderr


def test_import_loads_nothing_but_jaxquant_and_jax():
    done = run(
        "import sys, jax, jax.numpy; before = set(sys.modules); import jaxquant; print(*set(sys.modules) - before)"
    )
    assert done.returncode == 0
    assert {name.split(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names == {"jaxquant", "jax"}
