# SPDX-License-Identifier: Apache-2.0
"""What does a W8A8 linear layer cost, quantizing x included, against the float32 `x @ w` of the same library?

Weights are quantized beforehand, one scale an output channel; x on the fly, one scale in all. Ratios of times in one
process, interleaved: medians over rounds, in brackets the quartiles.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import qwix
import torch
from onnx import TensorProto, helper

from jaxquant import QuantSpec, activation_spec, dot_general, quantize, weight_spec

from .runner import Part, kept, ratios

RNG = np.random.default_rng(0)
OUT_IN, IN_OUT = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))


def of_jax(rounds, x, w):
    """To `x @ w`: ours by layout of the weight and kind of x, and qwix."""
    x, w = jnp.asarray(x), jnp.asarray(w)
    w_out_in, w_in_out = quantize(w.T, weight_spec(channel_axis=0)), quantize(w, weight_spec(channel_axis=-1))
    linear = lambda spec, dims, **kw: lambda x, w: dot_general(quantize(x, spec), w, dims, **kw)
    w_qwix = qwix.quantize(w, jnp.int8, channelwise_axes=[1])
    theirs = lambda x, w: qwix.dot_general(qwix.quantize(x, jnp.int8), w, IN_OUT)
    return ratios(
        {
            "x @ w": kept(lambda x, w: x @ w, x, w),
            "symmetric": kept(linear(QuantSpec(), OUT_IN), x, w_out_in),
            "affine": kept(linear(activation_spec(), OUT_IN), x, w_out_in),
            "in, out": kept(linear(QuantSpec(), IN_OUT), x, w_in_out),
            "qwix": kept(theirs, x, w_qwix),
        },
        "x @ w",
        rounds,
    )


def of_torch(rounds, x, w):
    """torch._int_mm with x quantized by hand, to torch's own linear layer."""
    x, w = torch.from_numpy(x), torch.from_numpy(np.ascontiguousarray(w.T))
    scales = w.abs().amax(1) / 127
    codes = torch.round(w / scales[:, None]).to(torch.int8)

    def quantized():
        scale = x.abs().max() / 127
        return torch._int_mm(torch.round(x / scale).to(torch.int8), codes.T) * (scale * scales)

    return ratios({"x @ w": lambda: torch.nn.functional.linear(x, w), "int8": quantized}, "x @ w", rounds)["int8"]


def session(nodes, constants, n):
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", n]) for name in ("x", "y")]
    initial = [onnx.numpy_helper.from_array(v, name) for name, v in constants.items()]
    graph = helper.make_graph(nodes, "linear", tensors[:1], tensors[1:], initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def of_onnxruntime(rounds, x, w):
    """DynamicQuantizeLinear and MatMulInteger, to its own MatMul."""
    scales = np.abs(w).max(0) / 127
    codes = np.rint(w / scales).astype(np.int8)
    real = session([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": w}, w.shape[0])
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z"], ["acc"]),
        helper.make_node("Cast", ["acc"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["s", "scales"], ["scale"]),
        helper.make_node("Mul", ["real", "scale"], ["y"]),
    ]
    whole = session(nodes, {"w": codes, "scales": scales}, w.shape[0])
    runs = {"x @ w": lambda: real.run(None, {"x": x}), "int8": lambda: whole.run(None, {"x": x})}
    return ratios(runs, "x @ w", rounds)["int8"]


def linear_rows(rounds, *cases):
    for n, rows in cases:
        x, w = (RNG.normal(size=shape).astype(np.float32) for shape in ((rows, n), (n, n)))
        got = of_jax(rounds, x, w)
        ours, others = got["symmetric"], (got[name] for name in ("affine", "in, out", "qwix"))
        theirs = of_torch(rounds, x, w) if rows > 16 else "needs 17 rows", of_onnxruntime(rounds, x, w)
        yield f"{n}^2", rows, ours, *others, *theirs


PACKAGES = "torch", "onnxruntime", "qwix"
COLUMNS = (*("size", "rows", "jaxquant", "affine x", "weight (in, out)", "qwix", "torch", "onnxruntime"),)
PARTS = {"linear": Part(COLUMNS, linear_rows, 21, tuple(itertools.product((2048, 4096), (1, 4, 16, 128, 512))))}
