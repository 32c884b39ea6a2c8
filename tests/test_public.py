# SPDX-License-Identifier: Apache-2.0
"""The public names, and that each says what it takes, returns, raises and where it is from."""

import inspect
import re

import pytest

import jaxquant
from jaxquant import tf

PUBLIC = {
    "Histogram",
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "QArray",
    "QParams",
    "QuantSpec",
    "Range",
    "Rule",
    "activation_spec",
    "calibrate",
    "conv_general_dilated",
    "dequantize",
    "dequantize_params",
    "dot_general",
    "ema_ranges",
    "fake_quant",
    "fake_quant_params",
    "fit_qparams",
    "histogram",
    "init_qparams",
    "load",
    "match_rules",
    "merge_histograms",
    "merge_ranges",
    "pack",
    "qparams_from_range",
    "quant_point",
    "quantize",
    "quantize_fn",
    "quantize_params",
    "range_from_histogram",
    "save",
    "scale_gradient",
    "tf",
    "unpack",
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


def names(module):
    return {name for name in vars(module) if not name.startswith("_")}


def test_public_names():
    assert names(jaxquant) == PUBLIC
    assert names(tf) == PUBLIC_TF


functions = [(tf, name) for name in PUBLIC_TF if name[0].islower()]
functions += [(jaxquant, name) for name in PUBLIC - {"tf", "activation_spec", "weight_spec"} if name[0].islower()]


@pytest.mark.parametrize(("module", "name"), sorted(functions, key=str))
def test_docstrings_of_ops_are_complete(module, name):
    text = inspect.getdoc(getattr(module, name))
    source = "Source: TensorFlow 2.21" if module is tf else "Source: "
    for part in ("Args:", "Returns:", "Gradient:", "Raises:", source, ">>> "):
        assert part in text
    described = re.findall(r"^  ((?:\w+,\s+)*\w+):", text.split("Args:")[1].split("Returns:")[0], re.M)
    described = {parameter for line in described for parameter in re.split(r",\s+", line)}
    assert described == set(inspect.signature(getattr(module, name)).parameters)


@pytest.mark.parametrize("name", sorted(name for name in PUBLIC if name[0].isupper()))
def test_types_say_what_they_hold(name):
    assert len(inspect.getdoc(getattr(jaxquant, name))) > 40
