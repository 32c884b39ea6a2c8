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
FOLDERS = {  # from the ground up: a folder and its files, each of which stands on those before it; "" is the root
    "_base": "_checks _sharding _numerics _groups _gradients _axes _table _bar",
    "_platform": "_primitive _cpu _division _convolutions _dots _tiles",
    "_spec": "_formats _granularity _scale_formats _spec _rule _recipes",
    "_arrays": "_qparams _log2 _grid _range _merging _histogram _fit _quantized _qarray _at_rest _json _codes _affine"
    " _straight_through _gram _pack _tally",
    "tf": "_checks _nudge _fake_quant _grad_pass_through _quantize _quantize_and_dequantize",
    "": "_version _renamed _paths _cache _history _params",
    "_files": "",
    "_checkpoints": "_bits _held _ggml _ggml_arrays _gguf _families _shards _layouts _checkpoint _written",
    "checkpoints": "",
    "_contract": "_operands _contract _lowering _digits _native _conv_gradient _weight_only _in_groups _conv"
    " _dot_gradient _dot _ragged _ops",
    "_runtime": "_wide _kernels _onnxruntime _litert _runtimes",
    "_program": "_jaxpr _origin _param _writes _moves _walk _evaluate _calls _fusing",
    "_transform": "_quant_point _plan _axes _caches _match _backward _errors _choose _layout _entries _sites"
    " _fused _decide _call _misuse _freezing _mask _compiled _observers _initial _source _evaluate _quantizing"
    " _observing _viewing _quantize_fn",
    "_export": "_straight_line _values _onnx_nodes _onnx_sites _onnx_values _onnx _flatbuffer _litert",
    "litert": "",
    "onnx": "",
    "_report": "",
    "cache": "",
    "delayed": "",
    "typing": "",
    "solve/_graph": "_factors _elementwise _graph _transfer _folding _biases _classes",
    "solve": "_fold_norms _hadamard _wrapper _mesh _matrices _model _rounding _adaround _folds _bias_correct"
    " _choose_bits _equalize _gains _gptq _low_rank _ranges _rotate _rotation _smooth",
}
FLOORS = [[f"{folder}/{file}".strip("/") for file in files.split(" ")] for folder, files in FOLDERS.items()]
FLOOR_OF = {name: (floor, i) for floor, names in enumerate(FLOORS) for i, name in enumerate(names)}
OUTSIDE = {"jax", "numpy"}
EXTRAS = {  # imported by the function that needs it
    "_base/_bar": ["tqdm"],
    "_files": ["safetensors"],
    "_checkpoints/_shards": ["safetensors"],
    "_checkpoints/_written": ["gguf"],
    "_export/_flatbuffer": ["ai_edge_litert", "flatbuffers", "jaxlib", "litert_converter"],
    "_export/_onnx_nodes": ["jax2onnx", "onnx"],
}
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
    folder = pathlib.PurePosixPath(name).parents[dots - 1] / module.replace(".", "/")
    is_file = str(folder).lstrip("./") in FILES
    return [str(path).lstrip("./") for path in ([folder] if is_file else [folder / name for name in names])]


def is_below(name, other):
    """Whether a file is on a floor below another one, or before it in its folder."""
    return FLOOR_OF[name] < FLOOR_OF[other]


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
            assert top in OUTSIDE or top in sys.stdlib_module_names or top in EXTRAS.get(name, []), (name, module)
            full = [module, *(f"{module}.{n}" for n in names)]
            assert not any("_src" in m for m in full)
            reads_jax = name.startswith(("_program/", "_export/", "solve/_graph/")) or name == "_platform/_primitive"
            assert reads_jax or not any(m.startswith("jax.extend") for m in full)


def test_params_need_no_contraction():
    """What `fake_quant_params` needs, and how much that is."""
    needed, todo = set(), ["_params"]
    while todo:
        name = todo.pop()
        if name not in needed:
            needed.add(name)
            todo += [found for dots, *of in imports(FILES[name]) if dots for found in inside(name, dots, *of)]
    assert {name.partition("/")[0] for name in needed} == {
        "_base",
        "_platform",
        "_spec",
        "_arrays",
        "_params",
        "_paths",
    }
    assert len(needed) <= 22
    assert sum(len(FILES[name].read_text().splitlines()) for name in needed) <= 4700


def test_the_check_sees_an_import_of_a_sibling():
    assert inside("tf/_fake_quant", 2, "_base", ["_numerics"]) == ["_base/_numerics"]
    assert inside("tf/_fake_quant", 1, "_grad_pass_through", ["f"]) == ["tf/_grad_pass_through"]


def test_the_check_sees_an_import_that_goes_up():
    assert is_below("_base/_numerics", "_spec/_formats")
    assert not is_below("_spec/_formats", "_base/_numerics")
    assert is_below("_arrays/_range", "_arrays/_fit")
    assert not is_below("_arrays/_fit", "_arrays/_range")


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
    name
    for module in (
        jaxquant,
        jaxquant.cache,
        jaxquant.delayed,
        jaxquant.litert,
        jaxquant.onnx,
        jaxquant.solve,
        jaxquant.tf,
    )
    for name in vars(module)
    if not name.startswith("_")
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


def annotations(path):
    """What is annotated in a file, as text."""
    for node in ast.walk(ast.parse(path.read_text())):
        of = (node.annotation,) if isinstance(node, ast.AnnAssign | ast.arg) else ()
        of = (node.returns,) if isinstance(node, ast.FunctionDef) else of
        yield from (ast.unparse(annotation) for annotation in of if annotation is not None)


def test_most_annotations_are_types():
    found = [annotation for path in FILES.values() for annotation in annotations(path)]
    assert found.count("Any") <= 0.05 * len(found)


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
