# SPDX-License-Identifier: Apache-2.0
"""The public names, and that each says what it takes, returns, raises and where it is from."""

import dataclasses
import importlib.metadata
import inspect
import operator
import pathlib
import re

import jax
import numpy as np
import pytest

import jaxquant
from jaxquant import cache, checkpoints, delayed, litert, onnx, solve, tf, typing

SPACES = {
    module.__name__: module for module in (cache, checkpoints, delayed, jaxquant, litert, onnx, solve, tf, typing)
}
INTERFACE = (pathlib.Path(__file__).parent / "data" / "interface.txt").read_text().splitlines()
PUBLIC = [
    re.match(r"([\w.]+)\.(\w+)", line).groups() for line in INTERFACE
]  # pairs of a module, or a class, and a name


def signature(f):
    parameters = inspect.signature(f).parameters.values()
    return str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))


def interface():
    """A line for each public name, a function with its parameters, and for what users call or set of three classes."""
    for path, module in SPACES.items():
        for name, v in vars(module).items():
            if not name.startswith("_") and not inspect.ismodule(v):
                yield f"{path}.{name}{signature(v) if inspect.isfunction(v) else ''}"
    for name in ("init_qparams", "observe", "plan", "freeze", "at_sites"):
        yield f"jaxquant.typing.QuantizedFunction.{name}{signature(getattr(typing.QuantizedFunction, name))}"
    for of in (jaxquant.QuantSpec, jaxquant.Rule):
        for field in dataclasses.fields(of):
            default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
            yield f"jaxquant.{of.__name__}.{field.name}{default}"


def test_the_interface_is_as_written():
    """docs/stability.md says what may change, and when; tests/data/interface.txt is then written anew, and read."""
    assert sorted(interface()) == INTERFACE


RENAMED = dict.fromkeys(("merge_ranges", "merge_histograms", "merge_grams"), "merge")
RENAMED["choose_bits"] = "solve.choose_bits"
RENAMED |= {
    name: f"{path.removeprefix('jaxquant.')}.{name}"
    for path, name in PUBLIC
    if path in ("jaxquant.cache", "jaxquant.delayed", "jaxquant.typing") and name != "Value"  # which never had another
}


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_old_names_say_the_new_ones(old):
    with pytest.raises(AttributeError, match=rf"no attribute {old!r}\. It is jaxquant\.{RENAMED[old]} now"):
        getattr(jaxquant, old)
    assert operator.attrgetter(RENAMED[old])(jaxquant) is not None
    assert not hasattr(jaxquant, "mergers")


functions = [
    (path, name) for path, name in PUBLIC if path in SPACES and name[0].islower() and not name.endswith("_spec")
]
functions.append(("jaxquant.checkpoints", "gguf_spec"))


@pytest.mark.parametrize(("path", "name"), functions)
def test_docstrings_of_ops_are_complete(path, name):
    module = SPACES[path]
    text = inspect.getdoc(getattr(module, name))
    source = "Source: TensorFlow 2.21" if module is tf else "Source: "
    for part in ("Args:", "Returns:", "Gradient:", "Raises:", source, ">>> "):
        assert part in text
    described = re.findall(r"^  ((?:\**\w+,\s+)*\**\w+):", text.split("Args:")[1].split("Returns:")[0], re.M)
    described = {parameter.strip("*") for line in described for parameter in re.split(r",\s+", line)}
    assert described == set(inspect.signature(getattr(module, name)).parameters)


@pytest.mark.parametrize(("path", "name"), [of for of in PUBLIC if of[0] in SPACES and of[1][0].isupper()])
def test_types_say_what_they_hold(path, name):
    assert len(inspect.getdoc(getattr(SPACES[path], name))) > 40


def test_the_version_is_one():
    root = pathlib.Path(__file__).parents[1]
    (cited,) = re.findall(r"^version: (.*)\ndate-released: (.*)$", (root / "CITATION.cff").read_text(), re.M)
    released = re.findall(r"^## (.*) \((.*), tag", (root / "docs" / "changelog.md").read_text(), re.M)
    assert jaxquant.__version__ == importlib.metadata.version("jaxquant") == cited[0]
    assert cited == released[0]


W8 = jaxquant.weight_spec(8)
STOCHASTIC = jaxquant.weight_spec(8, rounding="stochastic")


class Variable:
    """As of keras: no array, and without a hash."""

    __hash__ = None
    value = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        (lambda: jaxquant.weight_spec(8, axis=-1), ["`axis`", "weight_spec", "did you mean 'channel_axis'"]),
        (lambda: jaxquant.weight_spec(4, group_size=32), ["`group_size`", "did you mean 'block_size'"]),
        (lambda: jaxquant.activation_spec(8, symetric=True), ["`symetric`", "activation_spec", "'symmetric'"]),
        (lambda: jaxquant.QuantSpec(8), ["by name", "bits=8"]),
        (lambda: jaxquant.QuantSpec(num_bits=8), ["`num_bits`", "QuantSpec", "did you mean 'bits'"]),
        (lambda: jaxquant.Rule("w", weights=W8), ["`weights`", "Rule", "did you mean 'weight'"]),
        (
            lambda: jaxquant.quantize_fn(lambda params, x: x, [])([Variable()], np.ones(2, np.float32)),
            ["a hash", "Variable", "{v.path: v.value for v in model.variables}"],
        ),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(call, texts):
    with pytest.raises(TypeError, match="(?s)" + ".*".join(map(re.escape, texts))):
        call()


def test_a_function_with_a_key_of_its_own_cannot_round_stochastically():
    f = lambda params, x, key: x @ params["w"]
    args = {"w": np.ones((2, 2), np.float32)}, np.ones((1, 2), np.float32)
    with pytest.raises(ValueError, match=r"`key` is an argument of the function itself.*f_key"):
        jaxquant.quantize_fn(f, [("w", STOCHASTIC)])(*args, key=jax.random.key(0))


def test_a_quantized_function_says_what_it_is():
    def model(params, x):
        """Of its own."""
        return x @ params["w"]

    q = jaxquant.quantize_fn(model, [("w", W8), (re.compile(".*"), None)])
    assert repr(q).endswith("model with rules for 'w', '.*'; params_argnum=0, execution='auto', strict=False>")
    assert q.__name__ == "model"
    assert "q.plan" in q.__doc__
    assert q.__wrapped__ is model
