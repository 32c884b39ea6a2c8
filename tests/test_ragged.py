# SPDX-License-Identifier: Apache-2.0
"""Ragged dots against the loop over groups: rows of one group are those of a dot, with the qparams of all rows."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from jax import lax
from lanes import cases

from jaxquant import (
    PerBlock,
    PerChannel,
    PerToken,
    QuantSpec,
    Rule,
    activation_spec,
    dequantize,
    dot_general,
    fake_quant,
    float8_spec,
    mxfp8_spec,
    nvfp4_spec,
    quantize,
    quantize_fn,
    weight_spec,
)

rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
X, W, G = normal(24, 32), normal(4, 32, 16), normal(24, 16)
SIZES = {
    "some in none": (7, 0, 5, 3),
    "all in one": (24, 0, 0, 0),
    "even": (6, 6, 6, 6),
    "none": (0, 0, 0, 0),
    "uneven": (1, 1, 21, 1),
    "more than there are": (20, 20, 20, 20),
}
ROWS, EACH = PerChannel(0), PerChannel((0, 2))
PAIRS = {  # of the rule, and with axes of the operands
    "8 bits": (weight_spec(8), activation_spec(8), QuantSpec(granularity=EACH), activation_spec(8)),
    "affine tokens": (
        QuantSpec(symmetric=False, granularity=PerChannel(None)),
        QuantSpec(symmetric=False, granularity=PerToken()),
        QuantSpec(symmetric=False, granularity=EACH),
        QuantSpec(symmetric=False, granularity=ROWS),
    ),
    "blocks": (
        weight_spec(4, block_size=8),
        activation_spec(8),
        QuantSpec(bits=4, granularity=PerBlock(1, 8)),
        activation_spec(8),
    ),
    "16 bits": (weight_spec(8), activation_spec(16), QuantSpec(granularity=EACH), activation_spec(16)),
    "float8": (float8_spec(), float8_spec(), float8_spec(), float8_spec()),
    "mxfp8": (mxfp8_spec(), mxfp8_spec(), mxfp8_spec(axis=1), mxfp8_spec(axis=1)),
    "nvfp4": (nvfp4_spec(), nvfp4_spec(), nvfp4_spec(axis=1), nvfp4_spec(axis=1)),
}


def experts(p, x, sizes):
    return lax.ragged_dot(x, p["w"], sizes)


def loop(one, x, sizes):
    """`one(x, e)` of all rows and each matrix, of which each row takes that of its group."""
    group = np.repeat(np.arange(len(sizes) + 1), [*sizes, len(x)])[: len(x), None]
    return functools.reduce(lambda y, e: jnp.where(group == e, one(e), y), range(len(sizes)), jnp.float32(0))


def rules(weight, activation, **kw):
    return [Rule("*", weight, activation, **kw)]


def sized(name):
    return jnp.array(SIZES[name], jnp.int32)


@cases("name", PAIRS, ["8 bits", "affine tokens", "blocks"])
def test_is_the_loop_over_groups(name):
    weight, activation, of_weight, of_input = PAIRS[name]
    q, x, w = quantize_fn(experts, rules(weight, activation)), quantize(X, of_input), quantize(W, of_weight)
    call = jax.jit(q)
    for sizes in SIZES.values():
        got = call({"w": W}, X, jnp.array(sizes, jnp.int32))
        expected = loop(lambda e: dot_general(x, w[e], (((1,), (0,)), ((), ()))), X, sizes)
        assert_same_bits(got, expected)
    assert_same_bits(q({"w": W}, X, jnp.array(sizes, jnp.int32)), got)


def test_the_groups_and_the_output_channels_have_scales_of_their_own():
    plan = quantize_fn(experts, rules(weight_spec(8), activation_spec(8))).plan({"w": W}, X, sized("even"))
    assert [(site.name, site.op, site.kind, site.length) for site in plan] == [
        ("w:input", "ragged_dot_general", "weight", 32),
        ("w", "ragged_dot_general", "weight", 32),
    ]
    assert plan["w"].spec.granularity == EACH


@pytest.mark.parametrize("sizes", ["some in none", "uneven"])
def test_the_gradient_is_that_of_the_loop(sizes):
    q = quantize_fn(experts, rules(weight_spec(8), activation_spec(8)))
    by_hand = lambda p, x: loop(
        lambda e: fake_quant(x, activation_spec(8)) @ fake_quant(p["w"], QuantSpec(granularity=EACH))[e],
        X, SIZES[sizes],
    )  # fmt: skip
    _, pull = jax.vjp(lambda p, x: q(p, x, sized(sizes)), {"w": W}, X)
    _, expected = jax.vjp(by_hand, {"w": W}, X)
    for got, want in zip(*map(jax.tree.leaves, (pull(G), expected(G))), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


INT8 = QuantSpec()
GRADIENTS = {
    "int8": INT8,
    "rows and channels": (QuantSpec(granularity=PerToken()), QuantSpec(granularity=PerChannel(None))),
    "blocks": QuantSpec(granularity=PerBlock(None, 8)),
    "bfloat16": "bfloat16",
    "mxfp8 and bfloat16": (mxfp8_spec(), "bfloat16"),  # whose blocks reach from one matrix into the next
}


@cases("name", GRADIENTS, ["int8", "blocks", "bfloat16"])
def test_a_gradient_in_low_precision_is_that_of_the_dot_with_all_matrices(name):
    sizes, of = SIZES["some in none"], rules(weight_spec(8), activation_spec(8), gradient=GRADIENTS[name])
    every = quantize_fn(lambda p, x: jnp.einsum("mk,kgn->mgn", x, p["w"]), of)
    is_in = np.repeat(np.arange(5), [*sizes, 9])[:, None, None] == np.arange(4)[None, :, None]
    expected = jax.vjp(every, {"w": W.transpose(1, 0, 2)}, X)[1](jnp.where(is_in, G[:, None], 0))
    q = quantize_fn(experts, of)
    y, pull = jax.vjp(lambda p, x: q(p, x, sized("some in none")), {"w": W}, X)
    got = pull(G)
    assert_same_bits(
        y, quantize_fn(experts, rules(weight_spec(8), activation_spec(8)))({"w": W}, X, sized("some in none"))
    )
    assert_same_bits(got[1], expected[1])
    assert_same_bits(got[0]["w"], expected[0]["w"].transpose(1, 0, 2))


def test_an_int8_gradient_is_integer_arithmetic():
    sizes, of = SIZES["uneven"], rules(QuantSpec(), QuantSpec(), gradient=INT8)
    pull = jax.vjp(lambda w, x: quantize_fn(experts, of)({"w": w}, x, sized("uneven")), W, X)[1]
    g, x, w = quantize(G, INT8), quantize(X, QuantSpec()), quantize(W, QuantSpec())
    group = np.repeat(np.arange(4), sizes)
    of_g, of_x, of_w = (np.asarray(v.values, np.int64) for v in (g, x, w))
    towards_x = np.einsum("mn,mkn->mk", of_g, of_w[group])
    towards_w = np.stack([of_x[group == e].T @ of_g[group == e] for e in range(4)])
    got = pull(G)
    assert_same_bits(got[0], np.float32(towards_w) * (np.float32(x.scale) * np.float32(g.scale)))
    assert_same_bits(got[1], np.float32(towards_x) * (np.float32(g.scale) * np.float32(w.scale)))


def test_a_weight_only_site_is_the_ragged_dot_of_its_real_values():
    for spec in weight_spec(4, block_size=8), float8_spec():
        own = QuantSpec(bits=4, granularity=PerBlock(1, 8)) if spec.format is None else spec
        expected = jax.jit(lax.ragged_dot)(X, dequantize(quantize(W, own)), sized("uneven"))
        q = quantize_fn(experts, rules(spec, None))
        assert_same_bits(jax.jit(q)({"w": W}, X, sized("uneven")), expected)
        frozen = q.freeze({"w": W}, X, sized("uneven"))
        assert_same_bits(jax.jit(q)(frozen, X, sized("uneven")), expected)


def test_frozen_experts_give_the_same_bits():
    q = quantize_fn(experts, rules(weight_spec(8), activation_spec(8)))
    args = {"w": W}, X, sized("some in none")
    qparams = q.init_qparams(*args, ranges=q.observe(*args))
    frozen = q.freeze(*args, qparams=qparams)
    inputs = {key: v for key, v in qparams.items() if key != "w"}
    assert_same_bits(q(frozen, *args[1:], qparams=inputs), q(*args, qparams=qparams))
    assert frozen["w"].values.dtype == jnp.int8


def test_inside_vmap_scan_and_a_batch_of_matrices():
    of = rules(weight_spec(8), activation_spec(8, granularity=PerToken()))
    q, sizes = quantize_fn(experts, of), jnp.array([SIZES["uneven"], SIZES["some in none"]], jnp.int32)
    x, w = jnp.stack([X, X[::-1]]), jnp.stack([W, W[::-1]])
    one = [[q({"w": w[j]}, x[i], sizes[i]) for i in range(2)] for j in range(2)]
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((), ())), (1,), (0,))
    shared = quantize_fn(lambda p, x, s: lax.ragged_dot_general(x, p["w"], s, numbers), of)
    assert_same_bits(shared({"w": W}, x, sizes), jnp.stack(one[0]))
    own = quantize_fn(lambda p, x, s: jax.vmap(lambda w, x, s: experts({"w": w}, x, s))(p["w"], x, s), of)
    assert_same_bits(own({"w": w}, x, sizes), jnp.stack([one[0][0], one[1][1]]))
    layers = lambda p, x, s: lax.scan(lambda x, w: (experts({"w": w}, x, s)[:, :8].repeat(4, 1), None), x, p["w"])[0]
    y = X
    for i in range(2):
        y = q({"w": w[i]}, y, sizes[0])[:, :8].repeat(4, 1)
    assert_same_bits(quantize_fn(layers, of)({"w": w}, X, sizes[0]), y)
    assert_same_bits(jax.vmap(q, (None, 0, 0))({"w": W}, x, sizes), jnp.stack(one[0]))


def test_two_inputs_without_a_parameter():
    q = quantize_fn(
        lambda p, x, w, s: lax.ragged_dot(x, w, s), [Rule("*", activation=activation_spec(8), kind="act_act")]
    )
    x, w = quantize(X, activation_spec(8)), quantize(W, activation_spec(8))
    expected = loop(lambda e: dot_general(x, w[e], (((1,), (0,)), ((), ()))), X, SIZES["uneven"])
    assert_same_bits(q({}, X, W, sized("uneven")), expected)


def test_a_ragged_contraction_is_no_site():
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    f = lambda p, x, s: lax.ragged_dot_general(x, p["w"], s, numbers)
    with pytest.raises(ValueError, match=r"At 'w', chosen by the rule '\*'.*ragged_dot_general.*cannot replace"):
        quantize_fn(f, rules(weight_spec(8), None)).plan({"w": G}, X, sized("even"))


def test_of_a_symbolic_number_of_rows_and_of_nothing():
    q = quantize_fn(experts, rules(weight_spec(8), activation_spec(8)))
    (rows,) = jax.export.symbolic_shape("rows")
    exported = jax.export.export(jax.jit(q))({"w": W}, jax.ShapeDtypeStruct((rows, 32), jnp.float32), sized("uneven"))
    assert_same_bits(exported.call({"w": W}, X, sized("uneven")), q({"w": W}, X, sized("uneven")))
    assert q({"w": W}, X[:0], sized("none")).shape == (0, 16)
    assert_same_bits(q({"w": W[:0]}, X, sized("none")[:0]), jnp.zeros((24, 16)))


def test_fewer_rows_than_groups():
    q = quantize_fn(experts, rules(weight_spec(8), activation_spec(8, granularity=PerToken())))
    x, w = quantize(X[:3], PAIRS["affine tokens"][3]), quantize(W, QuantSpec(granularity=EACH))
    for sizes in (1, 0, 1, 1), (0, 0, 0, 3), (0, 1, 0, 0), (2, 0, 0, 0):
        expected = loop(lambda e: dot_general(x, w[e], (((1,), (0,)), ((), ()))), X[:3], sizes)
        assert_same_bits(q({"w": W}, X[:3], jnp.array(sizes, jnp.int32)), expected)


def test_a_sum_of_one_group_is_no_longer_for_others():
    """Of 70 groups of 2048 columns: 143,360 products, of which 2048 are of one group; 133,144 fit int32."""
    of = rules(QuantSpec(), QuantSpec(), gradient=(INT8, None))
    params, x, sizes = {"w": jax.ShapeDtypeStruct((70, 8, 2048), jnp.float32)}, normal(4, 8), jnp.zeros(70, jnp.int32)
    gradient = jax.grad(lambda x, p: quantize_fn(experts, of)(p, x, sizes).sum())
    assert jax.eval_shape(gradient, x, params).shape == x.shape


def test_the_sizes_may_be_of_a_small_dtype():
    q, sizes = quantize_fn(experts, rules(weight_spec(8), activation_spec(8))), jnp.array([100, 100, 0, 100], jnp.uint8)
    x = jnp.tile(X, (13, 1))[:300]
    assert_same_bits(q({"w": W}, x, sizes), q({"w": W}, x, sizes.astype(jnp.int32)))


def test_the_gradient_of_a_float_ragged_dot_is_refused():
    gradient = jax.grad(lambda p, x, s: (experts(p, x, s) ** 2).sum())
    with pytest.raises(ValueError, match="the function differentiates by itself"):
        quantize_fn(gradient, rules(weight_spec(8), None)).plan({"w": W}, X, sized("even"))
    left = [*rules(weight_spec(8), None), Rule("**", None, kind="gradient", optional=True)]
    assert quantize_fn(gradient, left).plan({"w": W}, X, sized("even"))["w"].spec


def test_a_ragged_contraction_reads_a_parameter():
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    f = lambda p, x, s: (x.T @ p["w"], lax.ragged_dot_general(x, p["w"], s, numbers))
    q = quantize_fn(f, rules(weight_spec(8), activation_spec(8), op="dot_general"))
    with pytest.raises(ValueError, match=r"also read in float, by 'ragged_dot_general'"):
        q.freeze({"w": G}, X, sized("even"))
