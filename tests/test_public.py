# SPDX-License-Identifier: Apache-2.0
"""The public names, and that each says what it takes, returns, raises and where it is from."""

import importlib.metadata
import inspect
import operator
import re

import jax
import numpy as np
import pytest

import jaxquant
from jaxquant import cache, checkpoints, delayed, litert, onnx, solve, tf, typing

PUBLIC = {
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "PerToken",
    "QArray",
    "QParams",
    "QuantSpec",
    "Range",
    "Rule",
    "activation_spec",
    "observe",
    "conv_general_dilated",
    "dequantize",
    "dequantize_params",
    "dot_general",
    "ema_ranges",
    "fake_quant",
    "fake_quant_params",
    "fit_qparams",
    "from_log2",
    "histogram",
    "init_qparams",
    "load",
    "match_rules",
    "merge",
    "pack",
    "qparams_from_range",
    "quant_point",
    "quantize",
    "quantize_fn",
    "quantize_params",
    "range_from_histogram",
    "report",
    "save",
    "scale_gradient",
    "to_log2",
    "unpack",
    "stored_for",
    "float8_spec",
    "mxfp8_spec",
    "mxfp6_spec",
    "mxfp4_spec",
    "mxint8_spec",
    "nvfp4_spec",
    "weight_spec",
}
PUBLIC_TF = {
    "FakeQuantGradients",
    "QuantizeOutput",
    "dequantize",
    "fake_quant_with_min_max_args",
    "fake_quant_with_min_max_args_gradient",
    "fake_quant_with_min_max_vars",
    "fake_quant_with_min_max_vars_gradient",
    "fake_quant_with_min_max_vars_per_channel",
    "fake_quant_with_min_max_vars_per_channel_gradient",
    "grad_pass_through",
    "quantize",
    "quantize_and_dequantize",
    "quantize_and_dequantize_v2",
    "quantize_v2",
}


PUBLIC_SOLVE = {"adaround", "bias_correct", "choose_bits", "equalize", "gptq", "low_rank", "ranges", "rotate", "smooth"}
PUBLIC_SOLVE |= {"fold_norms", "with_gains", "with_rotation"}
PUBLIC_OF_NAMESPACES = {
    cache: {"dynamic_slice", "update_slice", "zeros"},
    checkpoints: {"GEMMA3", "LLAMA", "QWEN2", "QWEN3", "Checkpoint", "Family", "gguf_spec", "read", "write"},
    delayed: {"DelayedQParams", "GradientHistory", "delayed_qparams", "split_histories", "update_histories"},
    litert: {"export"},
    onnx: {"export"},
    typing: {"Gram", "Histogram", "Log2QParams", "Op", "Plan", "QuantizedFunction", "Report", "ReportRow", "Site"}
    | {"Value"},
}


NAMESPACES = {"cache", "checkpoints", "delayed", "litert", "onnx", "solve", "tf", "typing"}


def names(module):
    return {name for name in vars(module) if not name.startswith("_")}


def test_public_names():
    assert names(jaxquant) == PUBLIC | NAMESPACES
    assert names(tf) == PUBLIC_TF
    assert names(solve) == PUBLIC_SOLVE
    assert {module: names(module) for module in PUBLIC_OF_NAMESPACES} == PUBLIC_OF_NAMESPACES


RENAMED = dict.fromkeys(("merge_ranges", "merge_histograms", "merge_grams"), "merge")
RENAMED["choose_bits"] = "solve.choose_bits"
RENAMED |= {
    name: f"{of.__name__.rpartition('.')[2]}.{name}"
    for of, names in PUBLIC_OF_NAMESPACES.items()
    if of is not checkpoints
    for name in names - {"export", "Value"}  # which never had other ones
}


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_old_names_say_the_new_ones(old):
    with pytest.raises(AttributeError, match=rf"no attribute {old!r}\. It is jaxquant\.{RENAMED[old]} now"):
        getattr(jaxquant, old)
    assert operator.attrgetter(RENAMED[old])(jaxquant) is not None
    assert not hasattr(jaxquant, "mergers")


functions = [(of, name) for of, names in PUBLIC_OF_NAMESPACES.items() for name in names if name[0].islower()]
functions += [(tf, name) for name in PUBLIC_TF if name[0].islower()]
functions += [(solve, name) for name in PUBLIC_SOLVE]
functions += [(jaxquant, name) for name in PUBLIC if name[0].islower() and not name.endswith("_spec")]


@pytest.mark.parametrize(("module", "name"), sorted(functions, key=str))
def test_docstrings_of_ops_are_complete(module, name):
    text = inspect.getdoc(getattr(module, name))
    source = "Source: TensorFlow 2.21" if module is tf else "Source: "
    for part in ("Args:", "Returns:", "Gradient:", "Raises:", source, ">>> "):
        assert part in text
    described = re.findall(r"^  ((?:\**\w+,\s+)*\**\w+):", text.split("Args:")[1].split("Returns:")[0], re.M)
    described = {parameter.strip("*") for line in described for parameter in re.split(r",\s+", line)}
    assert described == set(inspect.signature(getattr(module, name)).parameters)


types = [(of, name) for of, names in {jaxquant: PUBLIC, **PUBLIC_OF_NAMESPACES}.items() for name in names]


@pytest.mark.parametrize(("module", "name"), sorted((of for of in types if of[1][0].isupper()), key=str))
def test_types_say_what_they_hold(module, name):
    assert len(inspect.getdoc(getattr(module, name))) > 40


def test_the_version_is_that_of_the_package():
    assert jaxquant.__version__ == importlib.metadata.version("jaxquant")


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
