# SPDX-License-Identifier: Apache-2.0
"""jax.export of the ops and of quantized functions: symbolic sizes, integers as arguments, the same bits."""

import re
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from jax import lax
from lanes import by_default, cases

from jaxquant import (
    PerBlock,
    PerChannel,
    PerToken,
    QArray,
    QParams,
    QuantSpec,
    Range,
    Rule,
    activation_spec,
    dequantize,
    dot_general,
    fake_quant,
    quantize,
    quantize_fn,
    save,
    weight_spec,
)

pytest.importorskip("flatbuffers", reason="jax needs it to write a program")
RNG = np.random.default_rng(0)
MATMUL = (((1,), (0,)), ((), ()))
SYMMETRIC = activation_spec(8, symmetric=True)
PER_TOKEN = activation_spec(8, granularity=PerToken())
BLOCKS = activation_spec(8, granularity=PerBlock(None, 16))


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


PARAMS = {"w": normal(64, 32), "kernel": normal(3, 3, 8, 16)}
dense = lambda p, x: jnp.tanh(x @ p["w"])
conv = lambda p, x: lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def attention(p, x):
    scores = jnp.einsum("btd,bsd->bts", x, x)
    return jnp.einsum("bts,bsd->btd", scores, x)


CASES = {  # the function, the rules of it, and the symbolic shape
    "affine": (dense, [Rule("w", weight_spec(8), activation_spec(8))], "b, 64"),
    "symmetric": (dense, [Rule("w", weight_spec(8), SYMMETRIC)], "b, 64"),
    "per token": (dense, [Rule("w", weight_spec(8), PER_TOKEN)], "b, 64"),
    "blocks": (dense, [Rule("w", weight_spec(8, block_size=16), BLOCKS)], "b, 64"),
    "weight-only": (dense, [("w", weight_spec(8))], "b, 64"),
    "batch and time": (dense, [Rule("w", weight_spec(8), activation_spec(8))], "b, t, 64"),
    "convolution": (conv, [Rule("kernel", weight_spec(8), activation_spec(8))], "b, 6, 6, 8"),
    "convolution per image": (conv, [Rule("kernel", weight_spec(8), PER_TOKEN)], "b, 6, 6, 8"),
    "attention": (attention, [Rule("**", activation=activation_spec(8), kind="act_act")], "b, t, 16"),
}


def of_sizes(text, **sizes):
    return tuple(sizes.get(part, 0) or int(part) for part in text.split(", "))


@cases("name", list(CASES))
def test_a_program_of_symbolic_sizes_has_the_bits_of_the_function(name):
    f, rules, text = CASES[name]
    q = quantize_fn(f, rules)
    constraints = ["t <= 128"] if name == "attention" else []
    shape = jax.export.symbolic_shape(text, constraints=constraints)
    exported = jax.export.export(jax.jit(q))(PARAMS, jax.ShapeDtypeStruct(shape, jnp.float32))
    loaded = jax.export.deserialize(exported.serialize())
    if name != "weight-only":
        assert "xi8>" in exported.mlir_module()
    for b, t in ((1, 5), (3, 2), (33, 1)):
        x = normal(*of_sizes(text, b=b, t=t))
        assert_same_bits(loaded.call(PARAMS, x), q(PARAMS, x))


def test_a_symbolic_length_that_may_be_too_long_raises_with_the_constraint_to_say():
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, t, 16"), jnp.float32)
    q = quantize_fn(attention, CASES["attention"][1])
    with pytest.raises(ValueError, match=r"constraints=\['t <= 33025'\]"):
        jax.export.export(jax.jit(q))(PARAMS, x)


def test_a_symbolic_length_that_is_short_enough_is_contracted():
    (n,) = jax.export.symbolic_shape("n", constraints=["n <= 1000"])
    of = lambda v: QArray(v, np.float32(0.5), np.int8(0), SYMMETRIC, np.float32)
    dot = lambda v, w: dot_general(of(v), of(w), MATMUL)
    exported = jax.export.export(jax.jit(dot))(*(jax.ShapeDtypeStruct(shape, np.int8) for shape in ((4, n), (n, 5))))
    v, w = (RNG.integers(-127, 128, shape).astype(np.int8) for shape in ((4, 37), (37, 5)))
    assert_same_bits(exported.call(v, w), v.astype(np.float32) @ w.astype(np.float32) * np.float32(0.25))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [activation_spec(8), weight_spec(4, channel_axis=1)])
def test_the_ops_take_symbolic_sizes(spec):
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 64"), jnp.float32)
    w = quantize(PARAMS["w"], weight_spec(8, channel_axis=1))
    f = lambda x: (fake_quant(x, spec), quantize(x, spec), dot_general(quantize(x, activation_spec(8)), w, MATMUL))
    exported = jax.export.export(jax.jit(f))(x)
    for rows in (1, 5):
        x = normal(rows, 64)
        jax.tree.map(assert_same_bits, exported.call(x), jax.jit(f)(x))


SPECS = [
    QuantSpec(),
    QuantSpec(bits=4, signed=False, symmetric=False, granularity=PerChannel((0, 1)), rounding="half_away"),
    QuantSpec(bits=3, narrow_range=False, granularity=PerBlock(1, 2)),
]
SERVER = """
import sys, jax, jax.export, numpy as np
import jaxquant
program = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
arrays = np.load(sys.argv[2])
spec, dtype = program.in_tree.unflatten(range(program.in_tree.num_leaves))[0][0]["w"].spec, np.dtype("float32")
w = jaxquant.QArray(arrays["values"], arrays["scale"], arrays["zero_point"], spec, dtype)
np.save(sys.argv[3], program.call({"w": w}, arrays["x"]))
"""


@by_default("QuantSpec(bits=3, narrow_range=False, granularity=PerBlock(axis=1, size=2))")
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_integers_go_into_and_come_out_of_an_exported_program(spec):
    q = quantize(normal(4, 6), spec)
    args = {
        "q": q,
        "qparams": QParams(q.scale, np.zeros_like(q.scale)),
        "range": Range(np.float32(1), np.float32(2)),
    }
    f = jax.jit(lambda args: (args, dequantize(args["q"])))
    loaded = jax.export.deserialize(jax.export.export(f)(args).serialize())
    got, want = loaded.call(args), f(args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert isinstance(got[0]["q"], QArray)
    assert got[0]["q"].spec == spec
    jax.tree.map(assert_same_bits, got, want)


FUNCTION_SERVER = """
import sys, jax.export, numpy as np
import jaxquant
program = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
served = jaxquant.load(sys.argv[2])
np.save(sys.argv[3], program.call(served["params"], np.load(sys.argv[4]), served["qparams"]))
"""


@pytest.mark.bits  # as the new process compiles: tanh has other bits with few optimizations
@pytest.mark.slow
def test_a_new_process_serves_a_frozen_function_from_two_files(tmp_path):
    """Layers in a scan, a tied embedding and an input that stays dynamic, of a batch of any size."""

    def f(p, tokens):
        layer = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)
        x, _ = lax.scan(layer, p["embedding"][tokens], p["layers"])
        return x @ p["embedding"].T

    params = {
        "embedding": normal(32, 16),
        "layers": {"up": normal(3, 16, 24), "down": normal(3, 24, 16)},
    }
    tokens = np.int32(np.arange(5) * 7 % 32)
    eight, four = weight_spec(8), weight_spec(4, block_size=8)
    rules = [Rule("embedding", eight, activation_spec(8), everywhere=True), Rule("layers/up", eight, SYMMETRIC)]
    q = quantize_fn(f, [*rules, Rule("layers/down", four, activation_spec(8))])
    qparams = q.init_qparams(params, tokens, ranges=q.observe(params, tokens) | {"layers/down:input": None})
    frozen = q.freeze(params, tokens, qparams=qparams)
    save(tmp_path / "model.npz", {"params": frozen, "qparams": qparams})
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b"), tokens.dtype)
    exported = jax.export.export(jax.jit(lambda p, x, s: q(p, x, qparams=s)))(frozen, shape, qparams)
    module = exported.mlir_module()
    dots = re.findall(
        r"stablehlo.dot_general.*: \(tensor<[^>]*x(\w+)>, tensor<[^>]*x(\w+)>\) -> tensor<[^>]*x(\w+)>", module
    )
    assert len(dots) >= 3
    assert {dot for dot in dots if dot[:2] != ("i8", "i8")} == set()
    assert {dot[2] for dot in dots} == {"i32"}
    assert not re.search(r"stablehlo.constant dense<\\?\"0x.*xi8>", module)
    (tmp_path / "program").write_bytes(exported.serialize())
    np.save(tmp_path / "x.npy", tokens)
    paths = [str(tmp_path / name) for name in ("program", "model.npz", "y.npy", "x.npy")]
    subprocess.run([sys.executable, "-c", FUNCTION_SERVER, *paths], check=True, timeout=120)
    assert_same_bits(np.load(paths[2]), q(params, tokens, qparams=qparams))


def test_a_new_process_serves_an_exported_program_from_integers(tmp_path):
    w, x = quantize(PARAMS["w"], weight_spec(8, channel_axis=1)), normal(3, 64)
    f = jax.jit(lambda p, x: dot_general(quantize(x, activation_spec(8)), p["w"], MATMUL))
    shapes = {"w": w}, jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 64"), jnp.float32)
    (tmp_path / "program").write_bytes(jax.export.export(f)(*shapes).serialize())
    np.savez(tmp_path / "arrays.npz", values=w.values, scale=w.scale, zero_point=w.zero_point, x=x)
    paths = [str(tmp_path / name) for name in ("program", "arrays.npz", "y.npy")]
    subprocess.run([sys.executable, "-c", SERVER, *paths], check=True, timeout=120)
    assert_same_bits(np.load(paths[2]), f({"w": w}, x))


def test_one_program_for_several_platforms_has_integer_products_and_no_weights():
    layers = {"w": normal(3, 64, 64) / np.float32(8)}
    f = lambda p, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]
    q, x = quantize_fn(f, [Rule("w", weight_spec(8), activation_spec(8))]), normal(5, 64)
    turns = np.full(3, 2, np.float32)
    qparams = q.init_qparams(layers, x, ranges={"w:input": Range(-turns, turns)})
    frozen, inputs = q.freeze(layers, x, qparams=qparams), {"w:input": qparams["w:input"]}
    served = jax.jit(lambda p, s, x: q(p, x, qparams=s))
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 64"), jnp.float32)
    program = jax.export.export(served, platforms=("cpu", "cuda", "tpu"))(frozen, inputs, rows)
    module = program.mlir_module()
    products = re.findall(r"stablehlo.dot_general.*: \((.*)\) -> (.*)", module)
    assert products
    assert all("i8>" in operands and "i32>" in result for operands, result in products)
    assert not re.search(r'dense<"0x|dense_resource', module)
    assert len(program.serialize()) < 40_000
    again = jax.export.deserialize(program.serialize())
    assert_same_bits(again.call(frozen, inputs, x), q(layers, x, qparams=qparams))
