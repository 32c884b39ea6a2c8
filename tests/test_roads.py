# SPDX-License-Identifier: Apache-2.0
"""The quantized function in other runtimes, by jaxquant.onnx and jaxquant.litert: how many values differ there."""

import functools
import pathlib

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from runtimes import run_onnx
from shipped import (
    A8,
    ALPHABET,
    LENGTH,
    LOGITS,
    W8,
    conv,
    init_language_model,
    int8_cnn,
    int8_language_model,
    quantized_cnn,
    quantized_language_model,
)

from jaxquant import (
    PerBlock,
    PerToken,
    QParams,
    QuantSpec,
    Rule,
    activation_spec,
    dequantize,
    float8_spec,
    load,
    quant_point,
    quantize_fn,
    weight_spec,
)

HERE = pathlib.Path(__file__).parent

pytestmark = [pytest.mark.slow, pytest.mark.bits]


@pytest.fixture(autouse=True)
def _as_users_run_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


normal = lambda seed, *shape: jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape) * 0.3))
counted = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape) * 0.3  # the data of docs/export.md
ROWS = np.float32(np.random.default_rng(9).normal(size=(32, 24)))


@functools.cache
def images():
    datasets = pytest.importorskip("sklearn.datasets")
    return jnp.asarray(datasets.load_digits().images[1200:, ..., None] / 16, jnp.float32)


@functools.cache
def trained_cnn():
    return load(HERE / "data" / "digits_cnn.npz")


@functools.cache
def served(q):
    """(frozen, qparams, x, q's value) of a model."""
    if q in (quantized_cnn, int8_cnn):
        frozen, qparams, x = trained_cnn()["params"], trained_cnn()["qparams"], images()
        qparams = {key: qparams[key] for key in qparams if key != "logits" or q is int8_cnn}
    else:
        params = init_language_model(jax.random.key(0))
        x = jax.random.randint(jax.random.key(3), (8, LENGTH), 0, ALPHABET)
        qparams = q.init_qparams(params, x)
        frozen = q.freeze(params, x, qparams=qparams)
    return frozen, qparams, x, np.asarray(jax.jit(q)(frozen, x, qparams=qparams))


def steps(y, want, qparams):
    """How many of the values are off by 0, 1, ... steps of the logits' grid."""
    return np.bincount(np.rint(np.abs(y - want) / np.ravel(qparams["logits"].scale)).astype(int).ravel())


# ONNX


@functools.cache
def onnx():
    pytest.importorskip("jax2onnx")
    pytest.importorskip("onnxruntime")
    import jaxquant.onnx

    return jaxquant.onnx


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("batch", ["597", "any"])
def test_the_integer_graph_of_the_cnn_has_the_same_bits(batch, optimized, compared):
    frozen, qparams, x, want = served(quantized_cnn)
    any_batch = jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, 8, 8, 1"), jnp.float32)
    model = onnx().export(quantized_cnn, frozen, x if batch == "597" else any_batch, qparams=qparams)
    y, ops = run_onnx(model, x, optimized=optimized)
    assert (ops.count("ConvInteger"), ops.count("MatMulInteger")) == (3, 1)
    compared("ONNX Runtime", "digits CNN, integers", y.size, (y != want).sum())
    assert (y != want).sum() == 0
    assert len(model.SerializeToString()) < 13_000  # 7,144 weights


@pytest.mark.parametrize("optimized", [False, True])
def test_the_qdq_graph_of_the_cnn_is_off_by_one_step_at_most(optimized, compared):
    frozen, qparams, x, want = served(int8_cnn)
    model = onnx().export(int8_cnn, frozen, x, qparams=qparams, graph="qdq")
    y, ops = run_onnx(model, x, optimized=optimized)
    assert ops.count("DequantizeLinear") >= 8
    off = steps(y, want, qparams)
    compared("ONNX Runtime", "digits CNN, Q/DQ, by a step", y.size, off[1:].sum())
    assert len(off) <= 2
    assert off[1:].sum() <= 0.001 * y.size


def test_every_integer_product_of_the_language_model_is_exact(compared):
    frozen, qparams, x, want = served(int8_language_model)
    model = onnx().export(int8_language_model, frozen, x, qparams=qparams)
    from onnx import ValueInfoProto, numpy_helper

    products = [node for node in model.graph.node if node.op_type == "MatMulInteger"]
    assert len(products) == 9
    constants = {v.name: numpy_helper.to_array(v) for v in model.graph.initializer}
    names = [name for node in products for name in (*node.input, *node.output) if name not in constants]
    known = {v.name for v in model.graph.output}
    model.graph.output.extend(ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in known)
    outputs = list(dict.fromkeys([model.graph.output[0].name, *names]))
    results, _ = run_onnx(model, x, optimized=False, outputs=outputs)
    of = constants | dict(zip(outputs, results, strict=True))
    for node in products:
        a, b, zero, *_ = (of[name].astype(np.int64) for name in node.input)
        differing = (of[node.output[0]] != (a - zero) @ b).sum()
        compared("ONNX Runtime", "language model, integer products", of[node.output[0]].size, differing)
        assert differing == 0
    off = steps(results[0], want, qparams)  # of exp, tanh and sums in float, whose last bits differ
    compared("ONNX Runtime", "language model, integers, by a step", want.size, off[1:].sum())
    assert len(off) <= 2
    assert off[1:].sum() <= 0.01 * want.size


def test_products_are_exact_without_vnni(compared):
    q = quantize_fn(lambda p, x: x @ p["w"], [Rule("w", W8, A8)])
    params, x = {"w": counted(1, 64, 96)}, counted(2, 512, 64)
    qparams = q.init_qparams(params, x)
    model, want = onnx().export(q, params, x, qparams=qparams, graph="qdq"), q(params, x, qparams=qparams)
    saturating = (run_onnx(model, x, is_exact=False)[0] != want).sum()
    compared("ONNX Runtime", "fused pairs without x64quantprecision", want.size, saturating)
    assert (run_onnx(model, x)[0] != want).sum() == 0


def test_fused_pairs_of_the_language_model_are_its_integer_graph():
    frozen, qparams, x, _ = served(quantized_language_model)
    results = {}
    for graph in ("integers", "qdq"):
        model = onnx().export(quantized_language_model, frozen, x, qparams=qparams, graph=graph)
        results[graph], ops = run_onnx(model, x)
        assert ops.count({"integers": "MatMulInteger", "qdq": "MatMulIntegerToFloat"}[graph]) == 9
    assert (results["integers"] != results["qdq"]).sum() == 0


def attention(p, x):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
    scores = quant_point(jnp.maximum(jnp.einsum("bthk,bshk->bhts", q, k), -3.0), "scores")
    return jnp.einsum("bhts,bshk->bthk", scores, v)


def convolutions(p, x):
    y = lax.conv_general_dilated(
        x, p["a"], (2, 1), [(1, 2), (0, 1)], rhs_dilation=(1, 2), feature_group_count=2,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )  # fmt: skip
    return lax.conv_general_dilated(y.reshape(*y.shape[:2], -1), p["b"], (2,), "SAME")


QKV = {name: normal(i, 8, 2, 3) for i, name in enumerate("qkv")}
KERNELS = {"a": normal(1, 6, 2, 3, 3), "b": normal(2, 4, 6, 3)}
MLP, TOKENS = {"w": normal(1, 24, 16), "v": normal(2, 16, 5)}, normal(3, 2, 6, 24)
TOKEN, TOKEN_AFFINE = QuantSpec(granularity=PerToken()), activation_spec(8, granularity=PerToken())
W8_AFFINE = weight_spec(8, symmetric=False)
ODD = {
    "attention": (attention, QKV, normal(5, 2, 6, 8), W8, A8),
    "convolutions": (convolutions, KERNELS, normal(5, 2, 4, 9, 9), W8, A8),
    "a vector": (lambda p, x: x @ p["w"], {"w": normal(1, 24, 5)}, ROWS[0], W8, A8),
    "4 bits": (lambda p, x: x @ p["w"], {"w": normal(1, 24, 5)}, ROWS, weight_spec(4), activation_spec(4)),
    "unsigned": (lambda p, x: x @ p["w"], {"w": normal(1, 24, 5)}, ROWS, W8, activation_spec(8, signed=False)),
    "unsigned weights": (
        lambda p, x: x @ p["w"], {"w": normal(1, 24, 5)}, ROWS, weight_spec(4, signed=False, symmetric=False), A8
    ),
    "one scale": (lambda p, x: x @ p["w"].T, {"w": normal(1, 5, 24)}, ROWS, activation_spec(8), A8),
    "tokens": (lambda p, x: jax.nn.relu(x @ p["w"]) @ p["v"], MLP, TOKENS, W8, TOKEN),
    "affine tokens": (lambda p, x: jax.nn.relu(x @ p["w"]) @ p["v"], MLP, TOKENS, W8, TOKEN_AFFINE),
    "affine tokens and weights": (lambda p, x: x @ p["w"], MLP, TOKENS, W8_AFFINE, TOKEN_AFFINE),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_integer_graphs_of_other_ops_have_the_same_bits(name):
    f, params, x, weight, activation = ODD[name]
    rules = [Rule("*", weight, activation)] + ([Rule("*", None, A8, kind="act_act")] if name == "attention" else [])
    q = quantize_fn(f, rules)
    qparams = q.init_qparams(params, x, method="minmax")
    for values in (params, q.freeze(params, x, qparams=qparams)):
        model = onnx().export(q, values, x * 1.5, qparams=qparams)  # 1.5: clipped
        y, ops = run_onnx(model, x * 1.5)
        assert not {"MatMul", "Conv", "Einsum", "Gemm"} & set(ops)
        assert (y != np.asarray(jax.jit(q)(values, x * 1.5, qparams=qparams))).sum() == 0


def product(p, x):
    return x @ p["w"]


def weight_first(p, x):
    return jax.vmap(lambda x: p["w"] @ x)(x)


def outputs_first(p, x):
    return x @ p["w"].T


def from_heads(p, x):
    return jnp.einsum("bhd,hdn->bn", x, p["w"])


def to_heads(p, x):
    return jnp.einsum("btd,dhk->bthk", x, p["w"])


AFFINE = {"symmetric": False}
# Name: the function, the shapes of the weight and of one row of inputs, the spec.
WEIGHTS_ALONE = {
    "4 bits in groups": (product, (64, 48), (64,), weight_spec(4, block_size=32)),
    "4 bits": (product, (64, 48), (64,), weight_spec(4)),
    "8 bits": (product, (64, 48), (64,), weight_spec(8)),
    "4 bits, affine, three groups": (product, (48, 5), (48,), weight_spec(4, block_size=16, **AFFINE)),
    "8 bits, affine": (product, (64, 48), (64,), weight_spec(8, **AFFINE)),
    "8 bits in groups": (product, (64, 5), (64,), weight_spec(8, block_size=16)),
    "3 bits, unsigned": (product, (64, 48), (64,), weight_spec(3, signed=False, **AFFINE)),
    "one scale": (product, (64, 5), (64,), QuantSpec(bits=4)),
    "groups of 96": (product, (192, 5), (192,), weight_spec(4, block_size=96)),
    "more than 256": (product, (512, 5), (512,), weight_spec(4)),
    "no block divides": (product, (24, 5), (24,), weight_spec(4, **AFFINE)),
    "outputs first": (outputs_first, (48, 64), (64,), weight_spec(4, block_size=16)),
    "weight first": (weight_first, (48, 64), (64,), weight_spec(4, block_size=16)),
    "to heads": (to_heads, (64, 2, 3), (2, 64), weight_spec(4, block_size=16)),
    "from heads": (from_heads, (4, 16, 9), (4, 16), weight_spec(4, **AFFINE)),
    "from heads, groups": (from_heads, (4, 32, 9), (4, 32), QuantSpec(bits=4, granularity=PerBlock((0, 1), (1, 16)))),
}


def as_weight_of_rows(f, v):
    """The weight of f as (K, N), for rows of inputs with K numbers."""
    if f in (outputs_first, weight_first):
        return v.T
    return v.reshape(-1, v.shape[-1]) if f is from_heads else v.reshape(len(v), -1)


def along_blocks(v, shape):
    """A scale, or zero point, for each element."""
    v = np.reshape(v, np.shape(v) or (1,) * len(shape))
    return np.kron(v, np.ones([n // m for n, m in zip(shape, v.shape, strict=True)]))


def initializers(model):
    from onnx import numpy_helper

    return {v.name: numpy_helper.to_array(v) for v in model.graph.initializer}


def unpacked(model):
    """Integers, scales and zero points of the one MatMulNBits of a graph, each as (K, N)."""
    (node,) = (node for node in model.graph.node if node.op_type == "MatMulNBits")
    of = {v.name: v.i for v in node.attribute}
    stored, scale, *zero_point = (initializers(model)[name] for name in node.input[1:])
    halves = lambda v: np.stack([v & 15, v >> 4], -1).reshape(*v.shape[:-1], -1) if of["bits"] == 4 else v
    blocks = -(-of["K"] // of["block_size"])
    assert stored.shape == (of["N"], blocks, of["block_size"] * of["bits"] // 8)
    zeros = halves(zero_point[0])[:, :blocks] if zero_point else np.full(scale.shape, 2 ** (of["bits"] - 1))
    of_each = lambda v: np.repeat(v, of["block_size"], 1)[:, : of["K"]].T
    return halves(stored).reshape(of["N"], -1)[:, : of["K"]].T.astype(int), of_each(scale), of_each(zeros).astype(int)


def with_whole_sums(qparams):
    """Qparams whose scales are powers of two."""
    return {key: QParams(2.0 ** jnp.round(jnp.log2(v.scale)), v.zero_point) for key, v in qparams.items()}


@functools.cache
def weight_alone(name):
    """A function with one weight, its params, qparams with scales that are powers of two, and shapes of its inputs."""
    f, shape, row, spec = WEIGHTS_ALONE[name]
    q, params = quantize_fn(f, [("w", spec)]), {"w": normal(1, *shape)}
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape(", ".join(("rows", *map(str, row)))), jnp.float32)
    return q, params, with_whole_sums(q.init_qparams(params, jnp.zeros((1, *row)))), rows


@pytest.mark.parametrize("name", WEIGHTS_ALONE)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_weight_alone_is_a_matmul_nbits_of_our_integers(name, is_frozen):
    f, shape, row, spec = WEIGHTS_ALONE[name]
    q, params, _, rows = weight_alone(name)
    x = jnp.zeros((1, *row))
    qparams, frozen = q.init_qparams(params, x), q.freeze(params, x)
    given = {"qparams": None if is_frozen else qparams}
    model = onnx().export(q, frozen if is_frozen else params, rows, **given)
    (integers, scale, zero_point), of = unpacked(model), frozen["w"]
    offset = (8 if spec.bits <= 4 else 128) if spec.signed else 0
    for got, want in (
        (integers - offset, of.values),
        (zero_point - offset, along_blocks(of.zero_point, shape)),
        (scale, along_blocks(of.scale, shape)),
    ):
        np.testing.assert_array_equal(got, as_weight_of_rows(f, np.asarray(want)))
    for n in (1, 37):
        x = normal(n, n, *row)
        y, ops = run_onnx(model, x)
        assert ops.count("MatMulNBits") == 1
        assert not {"MatMul", "Gemm", "DequantizeLinear"} & set(ops)
        # Of two float sums of K products in any order each rounds a number K + 1 times at most.
        absolute = np.abs(x, dtype=float).reshape(-1, len(integers)) @ np.abs(
            (integers - zero_point) * scale, dtype=float
        )
        bound = 2 * (len(integers) + 1) * 2.0**-24 * absolute.reshape(y.shape)
        assert (np.abs(y - np.asarray(q(frozen, x), float)) <= bound).all()


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("name", WEIGHTS_ALONE)
def test_a_weight_alone_has_the_same_bits_where_sums_are_exact(name, optimized, compared):
    q, params, qparams, rows = weight_alone(name)
    model = onnx().export(q, params, rows, qparams=qparams)
    for n in (1, 37):
        x = np.float32(np.random.default_rng(n).integers(-8, 9, (n, *rows.shape[1:])))
        y, want = run_onnx(model, x, optimized=optimized)[0], np.asarray(jax.jit(q)(params, x, qparams=qparams))
        compared("ONNX Runtime", "MatMulNBits, exact sums", y.size, (y != want).sum())
        assert (y != want).sum() == 0


def test_a_weight_alone_of_a_vector():
    q, params, qparams, _ = weight_alone("4 bits in groups")
    x = jnp.arange(64.0) - 20
    y, ops = run_onnx(onnx().export(q, params, x, qparams=qparams), x)
    assert "MatMulNBits" in ops
    assert (y != q(params, x, qparams=qparams)).sum() == 0


def test_weights_alone_of_layers_in_a_scan_are_one_each():
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    q, x = (
        quantize_fn(lambda p, x: lax.scan(layer, x, p["w"])[0], [("w", weight_spec(4, block_size=32))]),
        normal(2, 5, 64),
    )
    frozen = q.freeze({"w": normal(1, 3, 64, 64)}, x)
    y, ops = run_onnx(onnx().export(q, frozen, x, qparams=None), x)
    assert ops == ["MatMulNBits", "Tanh"] * 3
    np.testing.assert_allclose(y, q(frozen, x), rtol=1e-5, atol=1e-5)


def test_weights_alone_stand_beside_other_products(compared):
    def model(p, x):
        y = jax.nn.relu(x @ p["a"])
        return y @ p["b"], y @ p["c"], y @ p["d"]

    rules = [("a", weight_spec(4, block_size=32)), Rule("b", W8, A8), Rule("c", None), ("d", weight_spec(8))]
    params = {name: normal(i, 64, n) for i, (name, n) in enumerate(zip("abcd", (64, 6, 7, 8), strict=True))}
    params["c"] = jnp.round(params["c"] * 8)
    q, x = quantize_fn(model, rules), np.float32(np.random.default_rng(9).integers(-8, 9, (32, 64)))
    qparams = with_whole_sums(q.init_qparams(params, x))
    graph = onnx().export(q, q.freeze(params, x, qparams=qparams), x, qparams={"b:input": qparams["b:input"]})
    ops = [node.op_type for node in graph.graph.node]
    assert [ops.count(name) for name in ("MatMulNBits", "MatMulInteger", "DequantizeLinear")] == [2, 1, 0]
    assert ops.count("MatMul") + ops.count("Gemm") == 1
    results, _ = run_onnx(graph, x, outputs=[v.name for v in graph.graph.output])
    for y, want in zip(results, q(params, x, qparams=qparams), strict=True):
        compared("ONNX Runtime", "MatMulNBits beside others", y.size, (y != want).sum())
        assert (y != want).sum() == 0


def test_an_accuracy_level_of_4_makes_the_inputs_integers():
    q, params, qparams, _ = weight_alone("8 bits")
    x = normal(3, 37, 64)
    y, _ = run_onnx(onnx().export(q, params, x, qparams=qparams, accuracy_level=4), x)
    off = np.abs(y - q(params, x, qparams=qparams))
    assert (off > 1e-4).mean() > 0.5
    half_a_step = np.abs(x).max(1, keepdims=True) / 254
    weight = np.abs(dequantize(q.freeze(params, x, qparams=qparams)["w"]))
    assert (off <= 1.01 * half_a_step * weight.sum(0)).all()


def experts(p, x):
    return jnp.einsum("bei,eio->beo", x, p["w"])


PAIRS = {
    "a scale for each row": (product, (64, 5), (64,), weight_spec(8, channel_axis=0), "integers"),
    "a batch of weights": (experts, (3, 24, 5), (3, 24), QuantSpec(), "integers"),
    "a Q/DQ graph": (product, (64, 5), (64,), weight_spec(4), "qdq"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_other_weights_alone_are_pairs(name, compared):
    f, shape, row, spec, graph = PAIRS[name]
    q, params, x = quantize_fn(f, [("w", spec)]), {"w": normal(1, *shape)}, normal(2, 32, *row)
    model = onnx().export(q, params, x, qparams=q.init_qparams(params, x), graph=graph)
    y, ops = run_onnx(model, x, optimized=False)
    assert [name for name in ops if name not in ("Transpose", "Reshape")] == ["DequantizeLinear", "MatMul"]
    np.testing.assert_allclose(y, q(params, x), rtol=1e-5, atol=1e-5)
    # By itself ONNX Runtime makes a MatMulNBits of level 4 of a pair and its product, where it can.
    compared("ONNX Runtime", f"{name}, by more than 0.001", y.size, (np.abs(run_onnx(model, x)[0] - y) > 1e-3).sum())
    y, _ = run_onnx(model, x, entries=[("session.qdq_matmulnbits_accuracy_level", "1")])
    np.testing.assert_allclose(y, q(params, x), rtol=1e-5, atol=1e-5)


def test_groups_that_are_no_blocks_are_an_error():
    q, params = quantize_fn(product, [("w", weight_spec(4, block_size=8))]), {"w": normal(1, 24, 5)}
    with pytest.raises(
        ValueError, match=r"Scales of shape \(3, 5\), of an array of shape \(24, 5\): ONNX has no blocks"
    ):
        onnx().export(q, params, ROWS, qparams=q.init_qparams(params, ROWS))


TWO = quantize_fn(lambda p, x, y: (x @ p["w"], {"y": y + x[:, :5]}), [Rule("w", W8, A8)])


def test_arguments_and_results_may_be_several():
    params, rows = {"w": normal(1, 24, 5)}, np.ones((32, 5), np.float32)
    qparams = TWO.init_qparams(params, ROWS, rows)
    model = onnx().export(TWO, params, ROWS, rows, qparams=qparams)
    assert (len(model.graph.input), len(model.graph.output)) == (2, 2)
    (y, other), _ = run_onnx(model, ROWS, rows, outputs=[v.name for v in model.graph.output])
    want = TWO(params, ROWS, rows, qparams=qparams)
    assert (y != want[0]).sum() == (other != want[1]["y"]).sum() == 0


def test_a_tied_embedding_is_in_the_file_once():
    def f(p, tokens):
        return (p["embedding"][tokens] @ p["w"]) @ p["embedding"].T

    q = quantize_fn(f, [Rule("w", W8, TOKEN)])
    params, tokens = {"embedding": normal(1, 64, 16), "w": normal(2, 16, 16)}, jnp.arange(12).reshape(2, 6)
    frozen = q.freeze(params, tokens)
    model = onnx().export(q, frozen, tokens, qparams=None)
    tables = [v for v in initializers(model).values() if v.size == 64 * 16]
    assert len(tables) == 1
    y, _ = run_onnx(model, tokens)
    np.testing.assert_allclose(y, q(frozen, tokens), rtol=1e-5, atol=1e-6)


def test_names_of_inputs_and_outputs_are_those_given():
    params, rows = {"w": normal(1, 24, 5)}, np.ones((32, 5), np.float32)
    names = ["x", "more"], ["y", "sum"]
    model = onnx().export(TWO, params, ROWS, rows, qparams=TWO.init_qparams(params, ROWS, rows), names=names)
    assert tuple([v.name for v in of] for of in (model.graph.input, model.graph.output)) == names


def test_jnp_is_left_as_it_was():
    before, q = dict(vars(jnp)), quantize_fn(lambda p, x: x @ p["w"], [Rule("w", W8, A8)])
    onnx().export(q, {"w": ROWS.T}, ROWS, qparams=q.init_qparams({"w": ROWS.T}, ROWS))
    assert not [name for name, v in before.items() if vars(jnp)[name] is not v]


def test_what_an_onnx_graph_cannot_take_says_what_to_do():
    q = quantize_fn(lambda p, state, x: (x - state["mean"]) @ p["w"], [Rule("w", W8, A8)])
    args = {"w": normal(1, 24, 5)}, {"mean": jnp.float32(1)}, ROWS
    qparams = q.init_qparams(*args)
    with pytest.raises(ValueError, match=r"Argument 1 of q must be an array.*got a dict.*Close over state"):
        onnx().export(q, *args, qparams=qparams)
    with pytest.raises(ValueError, match=r"`graph` must be one of integers, qdq, got 'QDQ'"):
        onnx().export(q, *args, qparams=qparams, graph="QDQ")


@pytest.mark.parametrize(
    ("spec", "qparams", "message"),
    [(A8, False, "'w:input' is dynamic"), (float8_spec(), True, "'w:input' is of float8_e4m3fn")],
)
@pytest.mark.parametrize("road", ["onnx", "litert"])
def test_what_a_runtime_has_no_integers_for_is_an_error(road, spec, qparams, message):
    q = quantize_fn(lambda p, x: x @ p["w"], [Rule("w", float8_spec() if spec.dtype != jnp.int8 else W8, spec)])
    params = {"w": normal(1, 24, 5)}
    known = q.init_qparams(params, ROWS) if qparams else None
    convert = onnx().export if road == "onnx" else litert().export
    with pytest.raises(ValueError, match=message):
        convert(q, params, ROWS, qparams=known)


# LiteRT


@functools.cache
def litert():
    pytest.importorskip("litert_converter")
    pytest.importorskip("ai_edge_litert")
    import jaxquant.litert

    return jaxquant.litert


def run_litert(model, x, kernels):
    """The result in the interpreter, and its ops."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    resolver = {
        "reference": OpResolverType.BUILTIN_REF, "optimized": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    }[kernels]  # fmt: skip
    interpreter = Interpreter(model_content=model, experimental_op_resolver_type=resolver, num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], np.asarray(x))
    interpreter.invoke()
    ops = [details["op_name"] for details in interpreter._get_ops_details()]
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"]), ops


@pytest.mark.parametrize("kernels", ["reference", "optimized"])
def test_the_flatbuffer_of_the_cnn_is_off_by_one_step_at_most(kernels, compared):
    frozen, qparams, x, want = served(int8_cnn)
    model = litert().export(int8_cnn, frozen, x, qparams=qparams)
    y, ops = run_litert(model, x, kernels)
    assert ops == ["QUANTIZE", "DEPTHWISE_CONV_2D", "CONV_2D", "CONV_2D", "RESHAPE", "FULLY_CONNECTED", "DEQUANTIZE"]
    off = steps(y, want, qparams)
    compared("LiteRT", "digits CNN, by a step", y.size, off[1:].sum())
    assert len(off) <= 2
    assert off[1] <= 0.2 * y.size


@pytest.mark.parametrize("kernels", ["reference", "optimized"])
def test_the_flatbuffer_of_the_language_model_is_off_by_one_step_at_most(kernels, compared):
    frozen, qparams, x, want = served(int8_language_model)
    model = litert().export(int8_language_model, frozen, x, qparams=qparams)
    y, ops = run_litert(model, x, kernels)
    assert ops.count("FULLY_CONNECTED") == 9
    off = steps(y, want, qparams)
    compared("LiteRT", "language model, by a step", y.size, off[1:].sum())
    assert len(off) <= 2
    assert off[1:].sum() <= 0.01 * y.size  # of the kernels of some processors none


def test_a_flatbuffer_of_several_results():
    params, rows = {"w": normal(1, 24, 5)}, np.ones((32, 5), np.float32)
    qparams = TWO.init_qparams(params, ROWS, rows)
    model = litert().export(TWO, params, ROWS, rows, qparams=qparams)
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(model_content=model).get_signature_runner()
    got, want = run(x0=ROWS, x1=rows), TWO(params, ROWS, rows, qparams=qparams)
    np.testing.assert_allclose(got["y0"], want[0], atol=1e-5)
    assert (got["y1"] != want[1]["y"]).sum() == 0


def pooled(params, x, points=()):
    named = lambda x, name: quant_point(x, name) if name in points else x
    y = named(jax.nn.relu(conv(x, params["k"])), "features")
    y = named(lax.reduce_window(y, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4, "pooled")
    return quant_point(y.reshape(y.shape[0], -1) @ params["w"], "logits")


def test_an_average_pool_wants_one_grid_on_both_sides(compared):
    params, x = {"k": counted(1, 3, 3, 8, 16), "w": counted(2, 576, 10) * 0.1}, counted(0, 64, 12, 12, 8)
    off = {}
    for points in ((), ("features", "pooled")):
        rules = [Rule(name, activation=A8, kind="value") for name in points]
        q = quantize_fn(functools.partial(pooled, points=points), [*rules, LOGITS, Rule("*", W8, A8)])
        qparams = q.init_qparams(params, x)
        if points:
            qparams["pooled"] = qparams["features"]
        model = litert().export(q, params, x, qparams=qparams)
        off[points] = steps(run_litert(model, x, "reference")[0], np.asarray(q(params, x, qparams=qparams)), qparams)
        compared(
            "LiteRT", f"average pool {'with' if points else 'without'} points, by a step", 640, off[points][1:].sum()
        )
    assert len(off[()]) > 5
    assert len(off["features", "pooled"]) <= 3
    assert off["features", "pooled"][2:].sum() <= 0.03 * 640
