# SPDX-License-Identifier: Apache-2.0
"""The public names, and that each says what it takes, returns, raises and where it is from."""

import inspect
import re

import pytest

import jaxquant
from jaxquant import tf

PUBLIC = {"tf"}
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


@pytest.mark.parametrize("name", sorted(name for name in PUBLIC_TF if name[0].islower()))
def test_docstrings_are_complete(name):
    text = inspect.getdoc(getattr(tf, name))
    for part in ("Args:", "Returns:", "Gradient:", "Raises:", "Source: TensorFlow 2.21", ">>> "):
        assert part in text
    described = re.findall(r"^  (\w[\w, ]*):", text.split("Args:")[1].split("Returns:")[0], re.M)
    described = {parameter for line in described for parameter in line.split(", ")}
    assert described == set(inspect.signature(getattr(tf, name)).parameters)
