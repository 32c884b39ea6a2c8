# SPDX-License-Identifier: Apache-2.0
"""execution="native": narrow floats as operands of products that are added up in float32, in any order."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from jax import lax
from lanes import cases, in_turn

import jaxquant as jq
from jaxquant import PerBlock, PerChannel, PerTensor, QuantSpec, Rule, float8_spec, quantize, quantize_fn

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
MATMUL, BATCHED = (((1,), (0,)), ((), ())), (((2,), (1,)), ((0,), (0,)))
NHWC = "NHWC", "HWIO", "NHWC"
GRANULARITIES = PerTensor(), PerChannel(-1)
EPS = 2.0**-24


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def small(*shape, seed=0):
    """Integers of which every sum is exact in float32."""
    return jnp.asarray(np.random.default_rng([seed, *shape]).integers(-4, 5, shape), jnp.float32)


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


@cases(("op", "formats"), itertools.product(OPS, FORMATS), [*in_turn([(op,) for op in OPS], FORMATS)])
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
@pytest.mark.parametrize("op", OPS)
def test_sums_that_are_exact_have_the_bits_of_the_exact_product(op):
    f, *_ = OPS[op]
    a, b = operands(op, (E4M3, E4M3), small)
    a, b = (
        jq.quantize(jq.dequantize(q).round(), q.spec, jq.QParams(jnp.ones_like(q.scale), 0 * q.scale)) for q in (a, b)
    )
    assert_same_bits(f(a, b, execution="native"), f(a, b))
    assert_same_bits(jax.jit(functools.partial(f, execution="native"))(a, b), f(a, b))


def test_e5m2_with_itself_which_has_no_exact_product():
    a, b = operands("a matmul", (E5M2, E5M2), normal)
    with pytest.raises(ValueError, match="does not fit the sums of their digits"):
        jq.dot_general(a, b, MATMUL)
    got, want = jq.dot_general(a, b, MATMUL, execution="native"), jq.dequantize(a) @ jq.dequantize(b)
    assert (jnp.abs(got - want) <= 2 * 387 * EPS * (magnitudes(a) @ magnitudes(b))).all()


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
    "experts": (experts, {"a": normal(3, 16, 8)}, normal(7, 16)),
}
RULES = {
    "e4m3": Rule("*", float8_spec(granularity=PerChannel(None)), float8_spec()),
    "e4m3, e5m2 backward": Rule(
        "*", float8_spec(granularity=PerChannel(None)), float8_spec(), gradient=float8_spec(E5M2)
    ),
}


def value_and_gradients(q, params, x):
    return jax.jit(jax.value_and_grad(lambda params, x: jnp.sum(jnp.sin(q(params, x))), (0, 1)))(params, x)


@cases(("model", "rule"), itertools.product(MODELS, RULES), [("MLP", "e4m3"), ("CNN", "e4m3, e5m2 backward")])
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
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))


@cases(("model",), MODELS, ["experts"])
def test_what_is_trained_is_served(model):
    f, params, x = MODELS[model]
    q = quantize_fn(f, [RULES["e4m3"]], execution="native")
    qparams = q.init_qparams(params, x)
    frozen = q.freeze(params, x, qparams=qparams)
    trained = jax.jit(q)(params, x, qparams=qparams)
    served = jax.jit(q)(frozen, x, qparams=qparams)
    # In float sums: a weight at rest lies transposed, of which XLA:CPU makes another product.
    np.testing.assert_allclose(served, trained, rtol=0, atol=1e-6 * float(jnp.abs(trained).max()))


@cases(("model", "at"), itertools.product(MODELS, "xag"), [("MLP", "x"), ("MLP", "a"), ("MLP", "g"), ("CNN", "g")])
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


# ---- Bad input.

INT8 = QuantSpec()
BAD = {
    "integers beside floats": (INT8, float8_spec(), "multiplies float8_e4m3fn and float8_e5m2"),
    "float4": (QuantSpec(format="float4_e2m1fn"), float8_spec(), "got QuantSpec.*float4_e2m1fn"),
    "another float8": (float8_spec(), float8_spec("float8_e3m4"), "float8_e3m4"),
    "blocks": (jq.mxfp8_spec(1), jq.mxfp8_spec(0), "one scale along it, got .*PerBlock"),
    "runs": (float8_spec(granularity=PerBlock(1, 128)), float8_spec(), 'pass execution="auto"'),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_operands(case):
    of_a, of_b, match = BAD[case]
    a, b = quantize(normal(4, 256), of_a), quantize(normal(256, 4), of_b)
    with pytest.raises(ValueError, match=match):
        jq.dot_general(a, b, MATMUL, execution="native")


def test_a_function_names_the_site():
    f, params, x = MODELS["MLP"]
    q = quantize_fn(f, [Rule("*", jq.mxfp8_spec(0), jq.mxfp8_spec(-1))], execution="native")
    with pytest.raises(ValueError, match=r"a.*one scale along it"):
        q(params, x)


def test_an_operand_in_float_has_no_execution():
    with pytest.raises(ValueError, match="`execution` is for two QArrays"):
        jq.dot_general(normal(4, 32), quantize(normal(32, 4), float8_spec()), MATMUL, execution="native")
    assert math.isfinite(float(jq.dot_general(normal(4, 32), quantize(normal(32, 4), float8_spec()), MATMUL).sum()))
