# SPDX-License-Identifier: Apache-2.0
"""execution="native": narrow floats as operands of products that are added up in float32, in any order."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from jax import lax
from lanes import cases

import jaxquant as jq
from jaxquant import PerBlock, PerChannel, PerTensor, QuantSpec, Rule, float8_spec, quantize, quantize_fn
from jaxquant._arrays._qarray import inside
from jaxquant._contract import _native

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
MATMUL, BATCHED = (((1,), (0,)), ((), ())), (((2,), (1,)), ((0,), (0,)))
NHWC = "NHWC", "HWIO", "NHWC"
GRANULARITIES = PerTensor(), PerChannel(-1)
EPS = 2.0**-24


def normal(*shape, seed=0):
    return jax.device_put(np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32))


def small(*shape, seed=0):
    """Integers of which every sum is exact in float32."""
    return jax.device_put(np.random.default_rng([seed, *shape]).integers(-4, 5, shape).astype(np.float32))


def conv(a, b, **kw):
    return jq.conv_general_dilated(a, b, (2, 1), "SAME", dimension_numbers=NHWC, **kw)


# How two QArrays are contracted, their shapes, and how many products are a sum.
OPS = {
    "a matmul": (lambda a, b, **kw: jq.dot_general(a, b, MATMUL, **kw), (6, 384), (384, 40), 384),
    "a batch": (lambda a, b, **kw: jq.dot_general(a, b, BATCHED, **kw), (3, 5, 512), (3, 512, 8), 512),
    "a convolution": (conv, (2, 5, 4, 64), (3, 2, 64, 24), 384),
}
FORMATS = [(E4M3, E4M3), (E5M2, E4M3), ("float6_e2m3fn", E4M3)]


def operands(op, formats, make):
    """With a scale for each output channel, where a convolution and a matmul may have one."""
    _, of_a, of_b, _ = OPS[op]
    a, b = (QuantSpec(format=name, granularity=of) for name, of in zip(formats, GRANULARITIES, strict=True))
    return quantize(make(*of_a, seed=1), a), quantize(make(*of_b, seed=2), b)


def magnitudes(q):
    return jnp.abs(jq.dequantize(q))


@cases(("op", "formats"), itertools.product(OPS, FORMATS))
def test_the_value_is_the_exact_one_up_to_the_rounding_of_a_sum(op, formats):
    """Within (n + 3) eps sum |a b|: the bound of n float32 added in any order, and the products with the scales."""
    f, *_, n = OPS[op]
    a, b = operands(op, formats, normal)
    exact, native = f(a, b), f(a, b, execution="native")
    assert native.dtype == jnp.float32
    sizes = [quantize(magnitudes(q), q.spec) for q in (a, b)]
    bound = (n + 3) * EPS * f(*sizes)
    assert (jnp.abs(native - exact) <= bound).all()
    assert not (native == exact).all()  # it is another sum


@pytest.mark.bits
@cases("op", list(OPS))
def test_sums_that_are_exact_have_the_bits_of_the_exact_product(op):
    f, *_ = OPS[op]
    a, b = operands(op, (E4M3, E4M3), small)
    a, b = (
        jq.quantize(jq.dequantize(q).round(), q.spec, jq.QParams(jnp.ones_like(q.scale), 0 * q.scale)) for q in (a, b)
    )
    assert_same_bits(f(a, b, execution="native"), f(a, b))
    assert_same_bits(jax.jit(functools.partial(f, execution="native"))(a, b), f(a, b))


@pytest.mark.slow
def test_e5m2_with_itself_which_has_no_exact_product():
    a, b = operands("a matmul", (E5M2, E5M2), normal)
    with pytest.raises(ValueError, match="does not fit the sums of their digits"):
        jq.dot_general(a, b, MATMUL)
    got, want = jq.dot_general(a, b, MATMUL, execution="native"), jq.dequantize(a) @ jq.dequantize(b)
    assert (jnp.abs(got - want) <= 2 * 387 * EPS * (magnitudes(a) @ magnitudes(b))).all()


@pytest.mark.slow
@pytest.mark.bits
def test_integers_stay_exact():
    a, b = (
        quantize(normal(5, 64), QuantSpec(symmetric=False)),
        quantize(normal(64, 7), jq.weight_spec(8, channel_axis=-1)),
    )
    assert_same_bits(jq.dot_general(a, b, MATMUL, execution="native"), jq.dot_general(a, b, MATMUL))
    x, k = (
        quantize(normal(2, 6, 6, 3), QuantSpec(symmetric=False)),
        quantize(normal(3, 2, 3, 4), jq.weight_spec(8, channel_axis=-1)),
    )
    assert_same_bits(conv(x, k, execution="native"), conv(x, k))


# ---- In blocks.

TILES = QuantSpec(format="float4_e2m1fn", scale_dtype="float8_e4m3fn", granularity=PerBlock((-2, -1), (16, 16)))
BLOCKS = {  # specs of both operands, by the axis that is contracted
    "mxfp8": (jq.mxfp8_spec, jq.mxfp8_spec),
    "mxfp8, e5m2": (lambda axis: jq.mxfp8_spec(axis, E5M2), jq.mxfp8_spec),
    "mxfp6": (jq.mxfp6_spec, jq.mxfp6_spec),
    "mxfp4": (jq.mxfp4_spec, jq.mxfp4_spec),
    "mxfp8 and mxfp4": (jq.mxfp8_spec, jq.mxfp4_spec),
    "mxfp8 and one scale": (jq.mxfp8_spec, lambda axis: float8_spec()),
    "one scale and mxfp4": (lambda axis: float8_spec(E5M2), jq.mxfp4_spec),
    "nvfp4": (jq.nvfp4_spec, jq.nvfp4_spec),
    "nvfp4 and tiles": (jq.nvfp4_spec, lambda axis: TILES),
}
DOTS = {  # dimension numbers, shapes, and the axes of which the contracted one is in blocks
    "a matmul": (MATMUL, (6, 384), (384, 48), (-1, 0)),
    "a batch": (BATCHED, (3, 5, 256), (3, 256, 16), (-1, 1)),
    "a transposed batch": ((((0,), (2,)), ((2,), (0,))), (128, 5, 3), (3, 16, 128), (0, 2)),
    "two axes": ((((1, 2), (2, 0)), ((), ())), (6, 64, 16), (16, 16, 64), (1, 2)),
    "a block": (MATMUL, (6, 32), (32, 16), (-1, 0)),
    "vectors": ((((0,), (0,)), ((), ())), (64,), (64,), (0, 0)),
}
ALONE = {"two axes": ("nvfp4",)}  # of which MX has no exact product to compare with
CASES = [
    (dot, blocks)
    for dot, blocks in itertools.product(DOTS, BLOCKS)
    if blocks in ALONE.get(dot, BLOCKS) and (dot, blocks) != ("vectors", "nvfp4 and tiles")
]
FEW = [("a transposed batch", "nvfp4")]
# A scale that is no power of two is rounded with each block of the exact product.
POWERS = [case for case in CASES if "one scale" not in case[1]]


def in_blocks(dot, blocks, make):
    numbers, of_a, of_b, axes = DOTS[dot]
    a, b = (spec(axis) for spec, axis in zip(BLOCKS[blocks], axes, strict=True))
    return quantize(make(*of_a, seed=1), a), quantize(make(*of_b, seed=2), b), numbers


def real(q):
    return np.asarray(jq.dequantize(q), np.float64)


def contracted(a, b, numbers):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        return np.asarray(lax.dot_general(jnp.asarray(a), jnp.asarray(b), numbers))


@pytest.mark.slow
@cases(("dot", "blocks"), CASES, FEW)
def test_blocks_are_within_the_bound(dot, blocks):
    a, b, numbers = in_blocks(dot, blocks, normal)
    got = jax.jit(lambda a, b: jq.dot_general(a, b, numbers, execution="native"))(a, b)
    n = math.prod(a.shape[i] for i in numbers[0][0])
    bound = (n + 3) * EPS * contracted(abs(real(a)), abs(real(b)), numbers)
    assert got.dtype == jnp.float32
    assert (abs(np.asarray(got, np.float64) - contracted(real(a), real(b), numbers)) <= bound).all()


@pytest.mark.bits
@cases(("dot", "blocks"), POWERS, [case for case in FEW if case in POWERS])
def test_sums_of_blocks_that_are_exact_have_the_bits_of_the_exact_product(dot, blocks):
    a, b, numbers = in_blocks(dot, blocks, small)
    assert_same_bits(jq.dot_general(a, b, numbers, execution="native"), jq.dot_general(a, b, numbers))


@pytest.mark.skipif(not hasattr(lax, "scaled_dot"), reason="this JAX has no lax.scaled_dot")
@pytest.mark.bits
@cases(("dot", "blocks"), CASES, FEW)
def test_what_a_gpu_is_given_has_the_same_value(dot, blocks, monkeypatch):
    """XLA:CPU computes what is one kernel on a GPU: the rows are the right ones."""
    a, b, numbers = in_blocks(dot, blocks, small)
    product = lambda a, b: jax.jit(lambda a, b: _native.native_dot(inside(a), inside(b), numbers))(a, b)
    want, of_want = product(a, b)
    monkeypatch.setattr(_native, "_scaled_dot", lax.scaled_dot)
    monkeypatch.setattr(_native, "_in_bfloat16", _native._of_matrices)
    got, of_got = product(a, b)
    for pair in zip((got, *of_got), (want, *of_want), strict=True):
        assert_same_bits(*pair)


@pytest.mark.slow
@cases(("blocks",), [("mxfp8",), ("mxfp4",), ("nvfp4",)], [("mxfp4",)])
def test_a_program_for_a_gpu_has_the_scaled_dot_of_xla(blocks):
    """From JAX 0.12 on: 0.10 fails to compile it for mxfp4. For a CPU and a TPU it is a product of bfloat16."""
    a, b, numbers = in_blocks("a matmul", blocks, normal)
    traced = jax.jit(lambda a, b: jq.dot_general(a, b, numbers, execution="native")).trace(a, b)
    texts = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "tpu", "cpu")}
    is_there = {name: "xla.scaled_dot" in text for name, text in texts.items()}
    assert is_there == {"cuda": jax.__version_info__ >= (0, 12), "tpu": False, "cpu": False}
    product = r"dot_general.*\(tensor<6x384xbf16>, tensor<384x48xbf16>\) -> tensor<6x48xf32>"
    assert re.search(product, texts["tpu"])


# ---- In a function.


def mlp(params, x):
    h = jax.nn.relu(x @ params["a"])
    return h @ params["b"]


def cnn(params, x):
    h = lax.conv_general_dilated(x, params["a"], (1, 1), "SAME", dimension_numbers=NHWC)
    return jax.nn.relu(h).sum((1, 2)) @ params["b"]


def experts(params, x):
    return lax.ragged_dot(x, params["a"], jnp.int32([3, 0, 4]))


MODELS = {
    "MLP": (mlp, {"a": normal(32, 64), "b": normal(64, 8)}, normal(6, 32)),
    "CNN": (cnn, {"a": normal(3, 3, 4, 8), "b": normal(8, 5)}, normal(2, 6, 6, 4)),
    "experts": (experts, {"a": normal(3, 32, 32)}, normal(7, 32)),
}
RULES = {
    "e4m3": Rule("*", float8_spec(granularity=PerChannel(None)), float8_spec()),
    "e4m3, e5m2 backward": Rule(
        "*", float8_spec(granularity=PerChannel(None)), float8_spec(), gradient=float8_spec(E5M2)
    ),
}


BLOCK_RULES = {
    name: Rule("*", spec(), spec(), gradient=spec())
    for name, spec in {"mxfp8": jq.mxfp8_spec, "mxfp4": jq.mxfp4_spec, "nvfp4": jq.nvfp4_spec}.items()
}


def value_and_gradients(q, params, x):
    return jax.jit(jax.value_and_grad(lambda params, x: jnp.sum(jnp.sin(q(params, x))), (0, 1)))(params, x)


@cases(("model", "rule"), itertools.product(MODELS, RULES), [("MLP", "e4m3")])
def test_a_function_trains_as_with_exact_products(model, rule):
    f, params, x = MODELS[model]
    exact, native = (quantize_fn(f, [RULES[rule]], execution=name) for name in ("auto", "native"))
    text = jax.jit(functools.partial(value_and_gradients, native)).lower(params, x).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line or "convolution" in line]
    assert any("f8E4M3FN" in line for line in products)
    # Of two formats a convolution is in bfloat16.
    backward = any(("bf16" if model == "CNN" else "f8E5M2") in line for line in products)
    assert backward == ("e5m2" in rule)
    for got, want in zip(*(jax.tree.leaves(value_and_gradients(q, params, x)) for q in (native, exact)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(np.abs(want).max()))


WIDE = {"MLP": (mlp, {"a": normal(32, 64), "b": normal(64, 32)}, normal(32, 32)), "experts": MODELS["experts"]}


def rule_of(model, rule):
    """Of experts without blocks along rows, which are too few."""
    found = (RULES | BLOCK_RULES)[rule]
    return dataclasses.replace(found, gradient=None) if model == "experts" and rule in BLOCK_RULES else found


@pytest.mark.slow
@cases(("model", "rule"), itertools.product(WIDE, BLOCK_RULES), [("MLP", "mxfp8")])
def test_a_function_trains_in_blocks_as_with_exact_products(model, rule):
    f, params, x = WIDE[model]
    rules = [rule_of(model, rule)]
    exact, native = (quantize_fn(f, rules, execution=name) for name in ("auto", "native"))
    text = jax.jit(functools.partial(value_and_gradients, native)).lower(params, x).as_text()
    assert "xi8>" not in text.replace("xui8>", "")  # no digits
    for got, want in zip(*(jax.tree.leaves(value_and_gradients(q, params, x)) for q in (native, exact)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(np.abs(want).max()))


@cases(
    ("model", "rule"),
    [(model, "e4m3") for model in MODELS] + [(model, rule) for model in WIDE for rule in BLOCK_RULES],
    [("MLP", "nvfp4")],
)
def test_what_is_trained_is_served(model, rule):
    f, params, x = MODELS[model] if rule in RULES else WIDE[model]
    q = quantize_fn(f, [rule_of(model, rule)], execution="native")
    qparams = q.init_qparams(params, x)
    frozen = q.freeze(params, x, qparams=qparams)
    trained = jax.jit(q)(params, x, qparams=qparams)
    served = jax.jit(q)(frozen, x, qparams=qparams)
    # In float sums: a weight at rest lies transposed, of which XLA:CPU makes another product.
    np.testing.assert_allclose(served, trained, rtol=0, atol=1e-6 * float(jnp.abs(trained).max()))


@pytest.mark.slow
@cases(("model", "at"), itertools.product(MODELS, "xag"), [("MLP", "g")])
def test_a_nan_is_in_what_it_enters(model, at):
    """In values and gradients as with exact products, whose integers have flags for it; here it is in the products.

    A flag is for all that share a scale: in a convolution a NaN is in what it enters, as in float, and in no more.
    """
    f, params, x = MODELS[model]
    lost = lambda v: v.at[(1,) * v.ndim].set(jnp.nan)
    params, x = (params | {"a": lost(params["a"])} if at == "a" else params), (lost(x) if at == "x" else x)
    found = []
    for execution in ("native", "auto"):
        q = quantize_fn(f, [RULES["e4m3, e5m2 backward"]], execution=execution)
        y, pull = jax.vjp(jax.jit(q), params, x)
        g = jnp.ones_like(y)
        found.append(jax.tree.map(jnp.isnan, (y, pull(lost(g) if at == "g" else g))))
    native, exact = map(jax.tree.leaves, found)
    for got, want in zip(native, exact, strict=True):
        assert (got <= want).all() if model == "CNN" else (got == want).all()
    if model == "CNN":
        np.testing.assert_array_equal(native[0], jnp.isnan(f(params, x)))
    assert sum(int(v.sum()) for v in native) < sum(v.size for v in native)
    assert any(v.any() for v in native) or (model, at) == ("experts", "a")  # of an expert without a row


@pytest.mark.slow
@cases(("rule",), [(rule,) for rule in BLOCK_RULES], [("nvfp4",)])
def test_a_nan_in_a_block_is_in_its_row(rule):
    f, params, x = WIDE["MLP"]
    q = quantize_fn(f, [BLOCK_RULES[rule]], execution="native")
    y = q(params, x.at[2, 3].set(jnp.nan))
    assert jnp.isnan(y[2]).all()
    assert not jnp.isnan(y[jnp.arange(32) != 2]).any()


# ---- Bad input.


def _of(spec, size):
    return dataclasses.replace(spec, granularity=PerBlock(spec.granularity.axis, size))


INT8 = QuantSpec()
BAD = {
    "integers beside floats": (INT8, float8_spec(), "multiplies float8_e4m3fn and float8_e5m2"),
    "float4": (QuantSpec(format="float4_e2m1fn"), float8_spec(), "got QuantSpec.*float4_e2m1fn"),
    "another float8": (float8_spec(), float8_spec("float8_e3m4"), "float8_e3m4"),
    "float4 with one scale": (QuantSpec(format="float4_e2m1fn"), QuantSpec(format="float4_e2m1fn"), "with one scale"),
    "runs": (float8_spec(granularity=PerBlock(1, 128)), float8_spec(), 'pass execution="auto"'),
    "short blocks of MX": (_of(jq.mxfp8_spec(1), 16), jq.mxfp8_spec(0), "as in mxfp8_spec.*got .*size=16"),
    "long blocks of NVFP4": (_of(jq.nvfp4_spec(1), 32), jq.nvfp4_spec(0), "as in nvfp4_spec.*got .*size=32"),
    "MX beside NVFP4": (jq.mxfp4_spec(1), jq.nvfp4_spec(0), "both as in nvfp4_spec"),
    "scales of two kinds": (_of(jq.mxfp4_spec(1), 16), jq.nvfp4_spec(0), "both as in nvfp4_spec"),
    "float8 beside NVFP4": (float8_spec(), jq.nvfp4_spec(0), "both as in nvfp4_spec"),
    "integers in blocks": (jq.mxint8_spec(1), jq.mxfp8_spec(0), "exact for every format"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_operands(case):
    of_a, of_b, match = BAD[case]
    product = lambda a, b: jq.dot_general(quantize(a, of_a), quantize(b, of_b), MATMUL, execution="native")
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(product, normal(4, 256), normal(256, 4))


@pytest.mark.slow
def test_blocks_along_two_axes():
    a, b = quantize(normal(6, 64, 64), jq.mxfp8_spec(1)), quantize(normal(64, 64, 5), jq.mxfp8_spec(1))
    with pytest.raises(ValueError, match="blocks along one axis of it"):
        jq.dot_general(a, b, (((1, 2), (0, 1)), ((), ())), execution="native")


def test_a_convolution_has_one_scale():
    a, b = quantize(normal(2, 5, 4, 64), jq.nvfp4_spec(-1)), quantize(normal(3, 2, 64, 24), float8_spec())
    with pytest.raises(ValueError, match="in a dot product, blocks"):
        conv(a, b, execution="native")


def test_a_function_names_the_site():
    f, params, x = MODELS["MLP"]
    rule = Rule("*", jq.mxfp8_spec(0), float8_spec(granularity=PerBlock(-1, 16)))
    with pytest.raises(ValueError, match=r"a.*blocks along one axis of it"):
        quantize_fn(f, [rule], execution="native")(params, x)


def test_floats_meet_one_scale_as_ever():
    x, q = normal(4, 32), quantize(normal(32, 4), float8_spec())
    native, exact = (jq.dot_general(x, q, MATMUL, execution=name) for name in ("native", "auto"))
    assert_same_bits(native, exact)
    assert np.isfinite(exact).all()
