# SPDX-License-Identifier: Apache-2.0
"""Networks under `quantize_fn(runtime=)`: what is fused, the bits of the runtime that serves them, and errors."""

import contextlib
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
from runtimes import run_litert, run_onnx

from jaxquant import (
    PerToken,
    QuantSpec,
    Rule,
    activation_spec,
    litert,
    onnx,
    quant_point,
    quantize_fn,
    weight_spec,
)

RUNTIMES = "onnxruntime", "litert", "litert_reference"
W8, A8 = weight_spec(8), activation_spec(8)
RULES = [Rule("**", W8, A8)]
CNNS = ["mobile", "residual", "concatenated", "one_image", "scanned", "excited"]
IN_FLOAT = {  # (network, runtime) -> the values that are computed in float; scans are not entered for LiteRT
    ("excited", "any"): {"squeeze/w:input", "head/w:input", "fc/w:input"},
    ("scanned", "onnxruntime"): {"fc/w:input"},
    ("scanned", "litert"): {"fc/w:input"} | {f"blocks/{x}/w{of}" for x in "ab" for of in (":input", "")},
}

pytestmark = pytest.mark.bits


@pytest.fixture(autouse=True)
def _as_users_run_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def quantized(name, runtime):
    return quantize_fn(networks.networks()[name][0], RULES, runtime=runtime)


def plan(name, runtime):
    return quantized(name, runtime).plan(networks.networks()[name][1], networks.images(4))


@pytest.mark.parametrize(("name", "runtime"), [*((name, "onnxruntime") for name in CNNS), ("scanned", "litert")])
def test_the_plan_says_what_is_fused(name, runtime):
    known = IN_FLOAT.get((name, runtime), IN_FLOAT.get((name, "any"), set()))
    sites = plan(name, runtime)
    assert {site.name.partition("#")[0] for site in sites if site.is_in_float} == known
    values, floats = (sum(map(of, sites)) for of in (lambda site: bool(site.kernel), lambda site: site.is_in_float))
    assert f"runtime: {values - floats} values by its kernels, {floats} computed in float" in str(sites)
    assert floats >= len(known)


def test_names_of_values_and_their_kernels():
    found = {site.name: (site.kernel, site.entry) for site in plan("residual", "litert") if site.kernel}
    layer = "conv_general_dilated + bias"
    assert found == {
        "stem/w:input": ("quantized from float: an argument", "stem/w:input"),
        "stem/w:output": (f"{layer} + relu", "stem/w:output"),
        "max_pool": ("max_pool", "stem/w:output"),
        "a/w:output": (f"{layer} + relu", "a/w:output"),
        "b/w:output": (layer, "b/w:output"),
        "short/w:output": (layer, "short/w:output"),
        "add": ("add + relu", "add"),
        "average_pool": ("average_pool", "add"),
        "fc/w:output": ("dot_general + bias", "fc/w:output"),
    }
    assert {site.entry for site in plan("concatenated", "litert") if site.kernel == "concatenate"} == {"stem/w:output"}


def test_values_are_handed_out_with_what_they_are_computed_from():
    q, (_, params), seen = quantized("residual", "litert"), networks.networks()["residual"], []

    def value(info, *operands):
        shapes = [operand.shape for operand in operands]
        seen.append((info.site.name, info.kind, info.low, info.input and info.input.name, len(shapes)))
        y = jnp.zeros(info.op.result.shape) if info.kind == "layer" else jnp.zeros(info.result.shape)
        return info.move(y) if info.kind == "layer" else y

    view = q.at_sites(lambda info, x: x, None, value)
    assert jax.eval_shape(view, params, networks.images(2)).shape == (2, 10)
    assert seen == [
        ("stem/w:input", "quantize", None, None, 1),
        ("stem/w:output", "layer", 0.0, "stem/w:input#2", 3),
        ("max_pool", "max_pool", None, None, 1),
        ("a/w:output", "layer", 0.0, "max_pool#2", 3),
        ("b/w:output", "layer", None, "a/w:output#2", 3),
        ("short/w:output", "layer", None, "max_pool#3", 3),
        ("add", "add", 0.0, None, 2),
        ("average_pool", "average_pool", None, None, 1),
        ("fc/w:output", "layer", None, "average_pool#2", 3),
    ]
    with pytest.raises(TypeError, match="`value` must be a function"):
        q.at_sites(lambda info, x: x, None, 3)
    one_image, (_, params) = quantized("one_image", "litert"), networks.networks()["one_image"]
    moved = lambda info, *_: info.move(jnp.zeros((info.op.result if info.kind == "layer" else info.result).shape))
    view = one_image.at_sites(lambda info, x: x, None, moved)
    assert jax.eval_shape(view, params, networks.images(2)).shape == (2, 10)


def unusual(params, x):
    """Clips and means that are written in other ways, and what no kernel computes."""
    x = jax.lax.clamp(np.float32(0), networks.conv(params["stem"], x, 2), np.float32(6))
    x = jnp.minimum(networks.conv(params["expand"], x), 6)
    x = jnp.exp(jnp.maximum(x, 1.0))
    y = networks.conv({"w": params["project"]["w"]}, x) + np.ones((1, 8, 8, 8), np.float32)
    pooled = np.float32(1 / 64) * networks.conv(params["head"], y).sum((1, 2))
    logits = quant_point(networks.dense(params["fc"], pooled), "logits")
    return logits @ logits.T * np.float32(3)


def test_other_ways_to_write_them():
    params = networks.networks()["mobile"][1]
    rules = [Rule("project/w", W8), Rule("**", activation=A8, kind="act_act"), *RULES]
    sites = quantize_fn(unusual, rules, runtime="onnxruntime").plan(params, networks.images(2))
    layer = "conv_general_dilated + bias"
    in_float = dict.fromkeys(("project/w:input", "project/w"), "in float: an operand stays in float")
    assert {site.name: site.kernel for site in sites if site.kernel} == in_float | {
        "stem/w:input": "quantized from float: an argument",
        "stem/w:output": f"{layer} + relu6",
        "expand/w:output": f"{layer} + clip(1.0, 6.0)",
        "head/w:input": "quantized from float: add",
        "head/w:output": layer,
        "mean": "mean",
        "logits": "dot_general + bias",
        "logits#2": "in float: no kernel multiplies two values (act_act)",
        "logits#3": "in float: no kernel multiplies two values (act_act)",
    }


def test_a_rule_of_its_own_leaves_a_value_in_float():
    q = quantize_fn(networks.mobile, [Rule("add", None, kind="value"), *RULES], runtime="onnxruntime")
    sites = q.plan(networks.networks()["mobile"][1], networks.images(4))
    assert "add" not in [site.name for site in sites if site.op == "name"]
    assert "quantized from float" not in sites["project/w:output"].kernel


@functools.cache
def served(name, runtime, steps=0):
    """The qparams and the params after some steps of training, the frozen params, and the values of q."""
    q, (_, params), x = quantized(name, runtime), networks.networks()[name], networks.images(16)
    qparams = q.init_qparams(params, networks.images(16, 2))
    if steps:
        loss = lambda params, qparams: ((q(params, x, qparams=qparams) - 1) ** 2).mean()
        gradient = jax.jit(jax.grad(loss, (0, 1)))
        down = lambda v, g: v - np.float32(1e-3) * g if v.dtype == np.float32 else v
        smaller = lambda v, g: v * (1 - 1e-3 * jnp.abs(jnp.sign(g))) if v.dtype == np.float32 else v
        for _ in range(steps):
            of_params, of_qparams = gradient(params, qparams)
            params, qparams = jax.tree.map(down, params, of_params), jax.tree.map(smaller, qparams, of_qparams)
    frozen = q.freeze(params, x, qparams=qparams)
    return params, qparams, frozen, np.asarray(jax.jit(q)(frozen, x, qparams=qparams))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "runtime"), [*itertools.product(CNNS, RUNTIMES)])
def test_trained_equals_frozen(name, runtime):
    params, qparams, _, want = served(name, runtime)
    q, x = quantized(name, runtime), networks.images(16)
    assert (np.asarray(q(params, x, qparams=qparams)) == want).all()
    assert np.abs(want - np.asarray(networks.networks()[name][0](params, x))).std() < 0.1 * want.std()


@pytest.mark.slow
@pytest.mark.parametrize("name", CNNS)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_runtime_has_the_same_bits(runtime, name, compared):
    for module in ("jax2onnx", "onnxruntime") if runtime == "onnxruntime" else ("litert_converter", "ai_edge_litert"):
        pytest.importorskip(module)
    _, qparams, frozen, want = served(name, runtime, steps=3 * (name == "mobile"))
    q, x = quantized(name, runtime), networks.images(16)
    is_whole = name not in ("scanned", "excited")
    message = "computes . values and ops in float, whose bits may differ"
    with contextlib.nullcontext() if is_whole else pytest.warns(UserWarning, match=message):
        content = (onnx if runtime == "onnxruntime" else litert).export(q, frozen, x, qparams=qparams)
    if runtime == "onnxruntime":
        y, ops = run_onnx(content, x)
        layers = ops.count("QLinearConv") + ops.count("QGemm")
    else:
        y, ops = run_litert(content, [x], runtime)
        layers = sum(ops.count(op) for op in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"))
    compared(runtime, name if is_whole else f"{name}, in float in part", y.size, int((y != want).sum()))
    sites = q.plan(frozen, x, qparams=qparams)
    turns = 3 if name == "scanned" else 1
    assert layers == sum(turns if "blocks" in s.name else 1 for s in sites if s.op != "name" and s.entry[-2:] == "/w")
    if is_whole:
        assert int((y != want).sum()) == 0
        assert sum(op in ("QuantizeLinear", "QUANTIZE") for op in ops) == 1
        assert sum(op in ("DequantizeLinear", "DEQUANTIZE") for op in ops) == 1


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_integers_go_in_and_come_out(runtime, compared):
    for module in ("jax2onnx", "onnxruntime") if runtime == "onnxruntime" else ("litert_converter", "ai_edge_litert"):
        pytest.importorskip(module)
    _, qparams, frozen, want = served("residual", runtime)
    q, x, of_onnx = quantized("residual", runtime), networks.images(16), runtime == "onnxruntime"
    content = (onnx if of_onnx else litert).export(q, frozen, x, qparams=qparams, integers=True)
    (scale, zero), (of_result, zero_of_result) = (
        (np.float32(v).ravel()[0] for v in qparams[name]) for name in ("stem/w:input", "fc/w:output")
    )
    low, dtype = (128, np.uint8) if of_onnx else (0, np.int8)
    steps = {"litert": x * (np.float32(1) / scale), "onnxruntime": x / scale}.get(runtime, x / scale)
    rounded = np.rint(steps) if runtime != "litert_reference" else np.sign(steps) * np.floor(np.abs(steps) + 0.5)
    given = (np.clip(rounded + zero, -128, 127) + low).astype(dtype)
    y, ops = run_onnx(content, given) if of_onnx else run_litert(content, [given], runtime)
    assert y.dtype == dtype
    assert not {"QuantizeLinear", "DequantizeLinear", "QUANTIZE", "DEQUANTIZE"}.intersection(ops)
    real = (y.astype(np.float32) - low - zero_of_result) * of_result
    compared(runtime, "integers in and out", y.size, int((real != want).sum()))
    assert (real == want).all()


def product(params, x):
    return jax.nn.relu(x @ params["w"] + params["b"])


PARAMS = {"w": np.float32(np.random.default_rng(0).normal(size=(6, 4))), "b": np.float32([1, 2, 3, 1e-3])}
ROWS = np.float32(np.random.default_rng(1).normal(size=(5, 6)))


def named_product(params, x):
    return quant_point(product(params, quant_point(x, "w:input")), "w:output")


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_gradient_is_that_of_the_float_ops(runtime):
    """Straight through the kernel: the bits that the same grids have without one."""
    plain = quantize_fn(named_product, [Rule("w:*", activation=A8, kind="value"), *RULES])
    served = quantize_fn(product, RULES, runtime=runtime)
    qparams = served.init_qparams(PARAMS, ROWS)
    gradients = [
        jax.jit(jax.grad(lambda *of, q=q: q(of[0], of[1], qparams=of[2]).sum(), (0, 1, 2)))(PARAMS, ROWS, qparams)
        for q in (plain, served)
    ]
    leaves = [jax.tree.leaves(of) for of in gradients]
    assert len(leaves[0]) == len(leaves[1]) == 9
    assert all((a == b).all() for a, b in zip(*leaves, strict=True))
    assert all(np.abs(v).max() > 0 for v in leaves[1][:3])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("w", W8, activation_spec(8, granularity=PerToken())), "At 'w'.*takes inputs of 8 bits with one scale"),
        (Rule("w", W8, activation_spec(4)), "takes inputs of 8 bits with one scale that is known before it runs"),
        (Rule("w", W8, activation_spec(8, rounding="half_away")), "and rounds them itself, got .*half_away"),
        (Rule("w", QuantSpec(symmetric=False), A8), "multiplies weights of up to 8 bits that are signed and symmetric"),
        (Rule("w", weight_spec(4, block_size=2), A8), "with one scale or one for each output channel, got .*PerBlock"),
    ],
)
def test_specs_that_no_kernel_has_are_errors(rule, message):
    with pytest.raises(ValueError, match=message):
        quantize_fn(product, [rule], runtime="onnxruntime").plan(PARAMS, ROWS)


@pytest.mark.parametrize(("of", "name", "runtime"), [(onnx, "onnx", "onnxruntime"), (litert, "litert", "litert")])
def test_an_extra_that_is_missing_is_named(of, name, runtime, monkeypatch):
    for module in ("jax2onnx", "litert_converter"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in [of for of in sys.modules if of.startswith("jaxquant._export._")]:
        monkeypatch.delitem(sys.modules, module)
        monkeypatch.delattr(sys.modules["jaxquant._export"], module.rpartition(".")[2], raising=False)
    with pytest.raises(ImportError, match=rf"jaxquant.{name} needs \w+\. Install it: pip install 'jaxquant\[{name}\]'"):
        of.export(quantize_fn(product, RULES, runtime=runtime), PARAMS, ROWS)


def positional(params, x):
    """A bias for each position, as long as there are channels: no kernel adds it."""
    y = jax.lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", dimension_numbers=networks.NHWC)
    return jax.nn.relu(y + params["positions"]) + jax.nn.relu(2.0)


def test_a_bias_is_of_channels():
    params = {"w": np.ones((1, 1, 3, 16), np.float32), "positions": np.ones((16, 1, 1), np.float32)}
    sites = quantize_fn(positional, [Rule("w", W8, A8)], runtime="litert").plan(params, networks.images(2))
    assert sites["w:output"].kernel == "conv_general_dilated"
    sites = quantize_fn(positional, [Rule("w", W8, A8)], runtime="litert").plan(
        params | {"positions": np.ones((1, 1, 16), np.float32)}, networks.images(2)
    )
    assert sites["w:output"].kernel == "conv_general_dilated + bias + relu"


def test_a_runtime_wants_static_ranges():
    q = quantize_fn(product, RULES, runtime="litert")
    with pytest.raises(ValueError, match="At 'w:input': 'litert' computes the value with a range that is known before"):
        q(PARAMS, ROWS)
    with pytest.raises(ValueError, match="`runtime` must be one of onnxruntime, litert, litert_reference, got 'tflite"):
        quantize_fn(product, RULES, runtime="tflite")
    with pytest.raises(ValueError, match="`q` is served by 'litert', expected 'onnxruntime'"):
        onnx.export(q, PARAMS, ROWS)


def test_strict_names_what_would_be_computed_in_float():
    q = quantize_fn(networks.networks()["excited"][0], RULES, runtime="litert", strict=True)
    with pytest.raises(
        ValueError, match=r"it would compute 'squeeze/w:input' \(quantized from float: mean, of a value"
    ):
        q.plan(networks.networks()["excited"][1], networks.images(2))
    quantize_fn(networks.mobile, RULES, runtime="litert", strict=True).plan(
        networks.networks()["mobile"][1], networks.images(2)
    )


def test_a_dead_channel_keeps_its_bias():
    """Its scale would be so small that the int32 of its bias is clipped."""
    dead = {"w": PARAMS["w"] * np.float32([1, 1, 1e-12, 1]), "b": PARAMS["b"]}
    q = quantize_fn(product, RULES, runtime="litert")
    qparams = q.init_qparams(dead, ROWS)
    scales = np.float64(qparams["w"].scale).ravel() * np.float64(qparams["w:input"].scale).ravel()
    assert (np.abs(dead["b"] / scales) <= 2**30).all()
    assert (np.abs(dead["b"] / scales) > 2**28).sum() == 1
    y = np.asarray(q(dead, ROWS, qparams=qparams))
    assert (np.asarray(q(q.freeze(dead, ROWS, qparams=qparams), ROWS, qparams=qparams)) == y).all()
    assert np.abs(y[:, 2] - 3).max() <= np.ravel(qparams["w:output"].scale)[0]
