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
import jaxquant.solve

ROOT = pathlib.Path(jaxquant.__file__).parent
FLOORS = (  # from the ground up; the files of a folder share a floor, and stand on those before them
    ("_checks", "_custom_vjp", "_groups", "_sharding", "_table", "_version"),
    ("_granularity", "_numerics", "_pack"),
    (
        *("_formats", "_platform/_primitive", "_platform/_cpu", "_platform/_division", "_platform/_dots"),
        *("_platform/_gpu", "_platform/_tiles"),
    ),
    ("_hadamard", "_scale_formats"),
    ("_spec",),
    ("_qarray", "_qparams", "_recipes"),
    ("_grid", "_writing"),
    ("_ranges/_range", "_ranges/_histogram", "_ranges/_fit"),
    ("_affine",),
    ("_cache", "_gram", "_history", "_straight_through", "_tally"),
    (
        *("tf/_checks", "tf/_nudge", "tf/_fake_quant", "tf/_quantize", "tf/_quantize_and_dequantize"),
        "tf/_grad_pass_through",
        *("_integer/_axes", "_integer/_operands", "_integer/_lowering", "_integer/_digits", "_integer/_contract"),
        *("_integer/_native", "_integer/_weight_only", "_integer/_conv_gradient", "_integer/_conv", "_integer/_dot"),
        *("_integer/_ragged", "_integer/_ops"),
    ),
    (
        *("_jaxpr/_program", "_jaxpr/_origin", "_jaxpr/_quantized_param", "_jaxpr/_writes", "_jaxpr/_moves"),
        *(
            "_jaxpr/_walk",
            "_jaxpr/_evaluate",
            "_jaxpr/_calls",
            "_jaxpr/_elementwise",
            "_jaxpr/_flat",
            "_jaxpr/_factors",
            "_jaxpr/_channels",
            "_jaxpr/_folding",
        ),
        *("_jaxpr/_biases", "_jaxpr/_streams", "_rule"),
    ),
    ("_paths",),
    ("_files", "_params"),
    (
        *("_transform/_plan", "_transform/_caches", "_transform/_call", "_transform/_axes", "_transform/_match"),
        *("_transform/_backward", "_transform/_errors", "_transform/_choices", "_transform/_layout"),
        "_transform/_mask",
        *("_transform/_entries", "_transform/_decide", "_transform/_freezing", "_transform/_observers"),
        *("_transform/_sites", "_transform/_source", "_transform/_quantize_fn"),
    ),
    ("_report",),
    (
        *("solve/_weights", "solve/_gptq", "solve/_ranges", "solve/_adaround", "solve/_low_rank"),
        *("solve/_folds", "solve/_smooth", "solve/_gains", "solve/_equalize", "solve/_rotate", "solve/_bias_correct"),
    ),
)
FLOOR_OF = {name: (floor, i) for floor, names in enumerate(FLOORS) for i, name in enumerate(names)}
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


def is_below(name, other):
    """Whether a file is on a floor below another one, or before it in its folder."""
    (floor, i), (above, j) = FLOOR_OF[name], FLOOR_OF[other]
    folder, _, _ = other.rpartition("/")
    return floor < above or (floor == above and i < j and bool(folder) and name.startswith(f"{folder}/"))


def test_every_file_has_a_floor():
    assert set(FILES) == set(FLOOR_OF)
    assert sum(map(len, FLOORS)) == len(FLOOR_OF)


@pytest.mark.parametrize("name", FILES)
def test_imports_go_down(name):
    for dots, module, names in imports(FILES[name]):
        if dots:
            assert all(is_below(target, name) for target in inside(name, dots, module, names)), (name, names)
        else:
            top = module.split(".")[0]
            assert top in OUTSIDE or top in sys.stdlib_module_names or top == EXTRAS.get(name), (name, module)
            full = [module, *(f"{module}.{n}" for n in names)]
            assert not any("_src" in m for m in full)
            reads_jax = name.startswith("_jaxpr/") or name == "_platform/_primitive"
            assert reads_jax or not any(m.startswith("jax.extend") for m in full)


def test_the_check_sees_an_import_of_a_sibling():
    assert inside("tf/_fake_quant", 2, "", ["_numerics"]) == ["_numerics"]
    assert inside("tf/_fake_quant", 1, "_grad_pass_through", ["f"]) == ["tf/_grad_pass_through"]


def test_the_check_sees_an_import_that_goes_up():
    assert is_below("_numerics", "_formats")
    assert not is_below("_formats", "_numerics")
    assert is_below("_ranges/_range", "_ranges/_fit")
    assert not is_below("_ranges/_fit", "_ranges/_range")
    assert not is_below("_checks", "_groups")
    assert not is_below("tf/_checks", "_integer/_axes")


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


PUBLIC = {
    name for module in (jaxquant, jaxquant.solve, jaxquant.tf) for name in vars(module) if not name.startswith("_")
}


def test_functions_are_short_and_take_few_parameters():
    """At most 45 lines beside the docstring; at most six parameters, but of what is public."""
    found = []
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                said = node.body[0] if ast.get_docstring(node) else None
                of_docstring = said.end_lineno - said.lineno + 1 if said else 0
                args = node.args
                parameters = {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)} - {"self", "cls"}
                is_public = node.name in PUBLIC or (node.name == "__init__" and "_qarray" in name)
                if node.end_lineno - node.lineno + 1 - of_docstring > 45 or (len(parameters) > 6 and not is_public):
                    found.append((name, node.name))
    assert found == []


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
