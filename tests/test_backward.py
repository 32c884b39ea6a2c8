# SPDX-License-Identifier: Apache-2.0
"""Backward products in low precision against their definition in NumPy: g, with the scales, rounded once for each."""

import dataclasses
import functools
import itertools
import re

import hand_written as by_hand
import in_float32  # noqa: F401 - an execution
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from hand_written import Grid
from jax import lax
from jax.sharding import PartitionSpec as P
from lanes import by_default, cases

import jaxquant as jq
from jaxquant import (
    PerBlock,
    PerChannel,
    PerTensor,
    PerToken,
    QuantSpec,
    Rule,
    activation_spec,
    float8_spec,
    mxfp8_spec,
    nvfp4_spec,
    quantize_fn,
    weight_spec,
)

F = np.float32
rng = np.random.default_rng(0)
X, W, G = (F(rng.normal(size=shape)) for shape in ((48, 64), (64, 32), (48, 32)))
OPERANDS = {  # of the weight and the input
    "channels": (weight_spec(8), activation_spec(8)),
    "tensors": (QuantSpec(), QuantSpec()),
    "blocks": (weight_spec(4, block_size=16), activation_spec(8)),
    "affine": (
        QuantSpec(symmetric=False, granularity=PerChannel(None)),
        activation_spec(8, granularity=PerToken()),
    ),
    "tiles": (QuantSpec(granularity=PerBlock((0, 1), (16, 8))), QuantSpec(granularity=PerBlock(None, 32))),
    "float8": (float8_spec(granularity=PerChannel(None)), float8_spec()),
    "mxfp8": (mxfp8_spec(), mxfp8_spec()),
    "nvfp4": (nvfp4_spec(), nvfp4_spec()),
}
PRECISIONS = {
    "bfloat16": "bfloat16",
    "int8": QuantSpec(),
    "rows and channels": (QuantSpec(granularity=PerToken()), QuantSpec(granularity=PerChannel(None))),
    "float8": float8_spec(),
    "mxfp8 and int8": (mxfp8_spec(), QuantSpec()),
    "int8 blocks": QuantSpec(granularity=PerBlock(None, 8)),
    "half": (None, QuantSpec()),
}


def matmul(p, x):
    return x @ p["w"]


def gradients(f, rule):
    """Of x and of w, compiled: XLA drops the value, where they do not need it."""
    q = quantize_fn(f, rule)
    return jax.jit(lambda w, x, g, **rest: jax.vjp(lambda w, x: q({"w": w}, x, **rest), w, x)[1](g)[::-1])


def quantized(v, spec, contracted):
    """The values without their zero point, and a scale for each."""
    size = spec.granularity.size if isinstance(spec.granularity, PerBlock) else v.shape[contracted]
    if spec.format:
        q = jq.quantize(v, dataclasses.replace(spec, granularity=PerBlock(contracted, size)))
        return np.asarray(q.values).astype(F), np.repeat(np.asarray(q.step), size, contracted)
    grid = Grid(spec.bits, not spec.symmetric, isinstance(spec.granularity, PerTensor))
    blocks = v.reshape(*v.shape[:contracted], -1, size, *v.shape[contracted + 1 :])
    values, scales, _ = by_hand.levels(blocks, grid, contracted + 1)
    return values.reshape(v.shape).astype(F), np.broadcast_to(scales, blocks.shape).reshape(v.shape)


def real(v, spec, contracted):
    """The values of `quantized`, in float64."""
    values, scales = quantized(v, spec, contracted)
    return values.astype(np.float64) * scales


def exact_gradients(equation, grids, x, w, g):
    """Of an einsum, to x and to w, without rounding of g."""
    of_x, of_w, of_y = equation.replace("->", ",").split(",")
    _, x, w, *_ = by_hand.exact(equation, grids, x, w)
    return np.einsum(f"{of_y},{of_w}->{of_x}", g, w), np.einsum(f"{of_x},{of_y}->{of_w}", x, g)


def in_bfloat16(g, other, scales):
    """The sum over the last axis of g (rows, summed) and of the other factor (kept, summed), which has these scales."""
    folded = (scales != scales[:, :1]).any()
    columns = []
    for values, by in zip(other, scales, strict=True):
        rounded = (g * by if folded else g).astype(jnp.bfloat16)
        columns.append(np.asarray(rounded, np.float64) @ values * (1 if folded else by[0]))
    return np.stack(columns, 1)


def rules(operands, precision):
    weight, activation = OPERANDS[operands]
    return [Rule("w", weight, activation, gradient=PRECISIONS.get(precision, precision))]


@functools.cache
def of_matmul(operands, precision):
    """`gradients` of the matmul."""
    return gradients(matmul, rules(operands, precision))


def assert_is_near(low, exact, most):
    """Rounded, by `most` of the largest."""
    assert 0 < np.abs(np.asarray(low) - np.asarray(exact)).max() < most * np.abs(exact).max()


@cases(
    ("operands", "precision"),
    [(o, p) for i, o in enumerate(OPERANDS) for j, p in enumerate(PRECISIONS) if (i + j) % 3 == 0],
    [("mxfp8", "half")],
)
def test_a_gradient_is_the_float_one_of_a_rounded_g(operands, precision):
    precisions = PRECISIONS[precision]
    of_sides = precisions if isinstance(precisions, tuple) else (precisions, precisions)
    low, exact = jax.jit(lambda *a: [of_matmul(operands, p)(*a) for p in (precision, None)])(W, X, G)
    for of_side, value, want in zip(of_sides, low, exact, strict=True):
        if of_side is None:
            assert_same_bits(value, want)
        else:
            assert_is_near(value, want, 4e-3 if of_side == "bfloat16" else 0.08 if of_side.format else 0.02)


def program_of_the_value(f, rule, w, x):
    q = quantize_fn(f, rule)
    return jax.jit(lambda w, x: jax.vjp(lambda w, x: q({"w": w}, x), w, x)[0]).lower(w, x).as_text()


@pytest.mark.slow
def test_the_program_of_the_value_is_that_without_a_gradient():
    """The precisions take turns."""
    of = lambda f, w, x, operands, precision: program_of_the_value(f, rules(operands, precision), w, x)
    for operands, precision in zip(OPERANDS, [*PRECISIONS, "bfloat16"], strict=True):
        at = matmul, W, X, operands
        assert of(*at, precision) == of(*at, None), (operands, precision)
    at = convolution, KERNEL, IMAGE, "affine"
    assert of(*at, "int8") == of(*at, None)


@cases(("operands",), ["channels", "blocks", "affine", "nvfp4"], ["blocks"])
def test_bfloat16_rounds_g_with_the_scales_that_vary_along_the_sum(operands):
    weight, activation = OPERANDS[operands]
    dx, dw = of_matmul(operands, "bfloat16")(W, X, G)
    of_w, of_x = quantized(W, weight, 0), quantized(X, activation, 1)
    wanted = in_bfloat16(G, *of_w), in_bfloat16(G.T, *(v.T for v in of_x)).T
    for got, want in zip((dx, dw), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


@by_default("False")
@pytest.mark.parametrize("transposes", [False, pytest.param(True, marks=pytest.mark.bits)])
def test_bfloat16_is_exact_where_g_is(transposes):
    """XLA:CPU raises an error of a product where it folds what the function transposes into it."""
    x, w, g = (F(rng.integers(-100, 100, size=v.shape)) for v in (X, W, G))
    x[0, 0], w[0] = 127, 127  # scales of 1
    rule = Rule("w", QuantSpec(granularity=PerChannel(None)), QuantSpec(), gradient="bfloat16")
    turned = (lambda y: y.T) if transposes else lambda y: y
    dx, dw = gradients(lambda p, x: turned(x @ p["w"]), [rule])(w, x, turned(g))
    assert_same_bits(dx, F(g @ w.T))
    assert_same_bits(dw, F(x.T @ g))


@by_default("int8-False-rows and channels")
@pytest.mark.parametrize(
    ("execution", "symmetric", "precision"),
    [("int8", True, "int8"), ("float32", False, "int8"), ("int8", False, "rows and channels")],
)
def test_int8_is_numpy_on_the_integers(execution, symmetric, precision, compared):
    weight, activation = QuantSpec(symmetric=symmetric, granularity=PerChannel(None)), QuantSpec(symmetric=False)
    q = quantize_fn(matmul, [Rule("w", weight, activation, gradient=PRECISIONS[precision])], execution=execution)
    dx, dw = map(np.asarray, jax.jit(lambda w, x: jax.vjp(lambda x, w: q({"w": w}, x), x, w)[1](G))(W, X))
    (of_w, w_scale), (of_x, x_scale) = quantized(W, weight, 0), quantized(X, activation, 1)
    on_grid = lambda g, axis: by_hand.levels(g, Grid(whole=precision == "int8"), axis)
    by, scale, _ = on_grid(G * w_scale[:1], 1)
    want = F(by @ of_w.T.astype(np.int64)) * scale
    by, scale, _ = on_grid(G, 0)
    want_w = F(of_x.T.astype(np.int64) @ by) * (scale * x_scale[0, 0])
    compared("NumPy int64", "gradients in int8", dx.size + dw.size, int((dx != want).sum() + (dw != want_w).sum()))
    assert_same_bits(dx, want)
    assert_same_bits(dw, want_w)


@pytest.mark.slow
def test_scales_of_blocks_are_multiplied_into_g():
    """Towards x, a weight in blocks along the axis that x keeps has one g for each block; also one that is frozen."""
    q = quantize_fn(matmul, rules("blocks", "int8"))
    towards_x = lambda f, w, g: jax.vjp(lambda x: q(f({"w": w}), x), X)[1](g)[0]
    found = jax.jit(lambda *a: [towards_x(f, *a) for f in (lambda p: p, lambda p: q.freeze(p, X))])(W, G)
    of_w, scales = quantized(W, OPERANDS["blocks"][0], 0)
    by, scale, _ = by_hand.levels(np.stack([G * s for s in scales[::16]]), Grid(whole=True), None)  # one for all
    parts = of_w.astype(np.int64).reshape(4, 16, 32)
    want = F(np.einsum("bmn,bkn->mbk", by, parts).reshape(48, 64)) * scale[0]
    for dx in found:
        assert_same_bits(dx, want)


SCALED = [  # the blocks of a weight, the gradient towards x, and whether a scale varies along its sum
    ("bthd,nhd->btn", (8, 2, 3), "bfloat16", False),
    ("bthd,nhd->btn", (8, 2, 3), QuantSpec(), False),
    ("bthd,nhd->btn", (1, 2, 3), QuantSpec(), True),
    ("btk,khd->bthd", (5, 1, 6), QuantSpec(), True),
    ("btk,khd->bthd", (5, 4, 6), "bfloat16", False),
]


@pytest.mark.slow
@pytest.mark.bits
def test_scales_along_two_axes():
    """That x has, or that are summed. g is of integers, which bfloat16 holds."""
    rng, sizes = np.random.default_rng(0), {"b": 2, "t": 3, "k": 5, "h": 4, "d": 6, "n": 8}
    draw = lambda of: F(rng.integers(-100, 100, [sizes[c] for c in of]))
    operands = [[draw(of) for of in equation.replace("->", ",").split(",")] for equation, *_ in SCALED]
    in_blocks = lambda sizes: QuantSpec(granularity=PerBlock((0, 1, 2), sizes))

    def towards_x(equation, blocks, precision, folded, x, w, g):
        rule = Rule("w", in_blocks(blocks), QuantSpec(), gradient=(precision, None))
        q = quantize_fn(lambda p, x: jnp.einsum(equation, x, p["w"]), [rule])
        return jax.vjp(lambda x: q({"w": w}, x), x)[1](g)[0]

    found = jax.jit(lambda of: [towards_x(*case, *v) for case, v in zip(SCALED, of, strict=True)])(operands)
    for dx, (equation, blocks, precision, folded), (_, w, g) in zip(found, SCALED, operands, strict=True):
        of_x, of_w, of_g = equation.replace("->", ",").split(",")
        q = jq.quantize(w, in_blocks(blocks))
        values, scales = np.asarray(q.values).astype(np.int64), np.kron(q.scale, np.ones(blocks, F))
        of_both = of_g + "".join(c for c in of_w if c not in of_g)
        by, scale = np.einsum(f"{of_g},{of_w}->{of_both}", g, scales if folded else np.ones_like(scales)), F(1)
        if precision != "bfloat16":
            by, scale, _ = by_hand.levels(by, Grid(whole=True), None)
        of_sum = F(1) if folded else scales[tuple(slice(None) if c in of_x else 0 for c in of_w)]
        want = F(np.einsum(f"{of_both},{of_w}->{of_x}", by, values)) * (np.ravel(scale) * of_sum)
        assert_same_bits(dx, want)


def test_what_is_not_finite_is_nan_in_what_it_enters():
    g = G.copy()
    g[3, 5], g[7, 1] = np.inf, np.nan
    dx, dw = map(np.asarray, of_matmul("tensors", "int8")(W, X, g))
    assert np.isnan(dx).all(1).tolist() == [i in (3, 7) for i in range(48)]
    assert np.isnan(dw).all(0).tolist() == [i in (1, 5) for i in range(32)]
    assert np.isnan(dx).sum() == 2 * 64
    assert np.isnan(dw).sum() == 2 * 64


def test_a_second_derivative_is_the_float_one():
    weight, activation = OPERANDS["channels"]
    q = quantize_fn(matmul, rules("channels", "bfloat16"))
    half_of_squares = lambda w, x: (q({"w": w}, x) ** 2).sum() / 2
    low = jax.jit(jax.grad(lambda w: (jax.grad(half_of_squares, 1)(w, X) ** 2).sum()))(W)
    w, x = real(W, weight, 0), real(X, activation, 1)
    y = x @ w
    dx = y @ w.T
    assert_is_near(low, 2 * (dx.T @ y + x.T @ (dx @ w)), 0.02)


IMAGE, KERNEL = F(rng.normal(size=(4, 7, 6, 8))), F(rng.normal(size=(3, 2, 4, 8)))


def convolution(p, x):
    return lax.conv_general_dilated(
        x, p["w"], (2, 1), ((1, 2), (0, 1)), (1, 2), (1, 2), ("NHWC", "HWIO", "NHWC"), feature_group_count=2
    )


@cases(
    ("operands", "precision"),
    itertools.product(["channels", "affine", "float8"], ["bfloat16", "int8"]),
    [("affine", "bfloat16")],
)
def test_a_convolution_has_the_gradient_of_a_rounded_g(operands, precision):
    g = F(rng.normal(size=jax.eval_shape(convolution, {"w": KERNEL}, IMAGE).shape))
    of = lambda *a: [gradients(convolution, rules(operands, p))(*a) for p in (precision, None)]
    for value, want in zip(*jax.jit(of)(KERNEL, IMAGE, g), strict=True):
        assert_is_near(value, want, 4e-3 if precision == "bfloat16" else 0.02)


def in_groups_of_examples(p, x):
    return lax.conv_general_dilated(
        x, p["w"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWOI", "NHWC"), batch_group_count=2
    )


CONVOLUTIONS = {"features": convolution, "examples": in_groups_of_examples}


OF_G = {  # of the rule, and the grid of each
    "int8": (QuantSpec(), Grid(whole=True)),
    "9 bits": ((QuantSpec(bits=9, granularity=PerToken()), QuantSpec(bits=9, granularity=PerChannel(None))), Grid(9)),
}


@by_default("examples-True-int8")
@cases(
    ("groups", "symmetric", "precision"),
    [*itertools.product(CONVOLUTIONS, (True, False), ("int8",)), ("features", True, "9 bits")],
    [("features", False, "int8"), ("examples", True, "int8"), ("features", True, "9 bits")],
)
def test_an_int8_gradient_of_a_convolution_is_exact_on_the_integers(groups, symmetric, precision):
    f, (gradient, grid) = CONVOLUTIONS[groups], OF_G[precision]
    rule = Rule("w", QuantSpec(), QuantSpec(symmetric=symmetric), gradient=gradient)
    kernel = KERNEL if f is convolution else F(rng.normal(size=(3, 2, 4, 8)))
    g = F(rng.normal(size=jax.eval_shape(f, {"w": kernel}, IMAGE).shape))
    dx, dw = gradients(f, [rule])(kernel, IMAGE, g)
    (of_w, w_scale, _), (of_x, x_scale, _) = (
        by_hand.levels(v, Grid(affine=affine, whole=True), None)
        for v, affine in ((kernel, False), (IMAGE, not symmetric))
    )
    pull = jax.jit(lambda w, x, g: jax.vjp(lambda w, x: f({"w": w}, x), w, x)[1](g))
    for side, got, other in (0, dw, x_scale), (1, dx, w_scale):
        of_g, scale, _ = by_hand.levels(g, grid, ((0, 1, 2), (1, 2, 3))[side])
        in_integers = pull(F(of_w), F(of_x), F(of_g))[side]  # below 2 ** 24
        assert_same_bits(got, np.asarray(in_integers) * (scale * other))


def test_the_convolutions_of_an_int8_gradient_are_of_int8():
    f = gradients(convolution, rules("tensors", "int8"))
    g = jax.eval_shape(convolution, {"w": KERNEL}, IMAGE)
    lowered = f.trace(KERNEL, IMAGE, g).lower(lowering_platforms=("tpu",))  # on a CPU, in groups, in float32
    operands = re.findall(r"stablehlo.convolution\(.*: \((.*)\) ->", lowered.as_text())
    assert sum(pair.count("xi8>") == 2 for pair in operands) == 2
    assert all("f32" in pair or "xi8>" in pair for pair in operands), operands


STOCHASTIC = QuantSpec(bits=4, rounding="stochastic")


@pytest.mark.slow
def test_a_stochastic_gradient_is_right_on_average():
    w, x, g = W[:8, :4], X[:4, :8], G[:4, :4]
    weight, activation = OPERANDS["channels"]
    of = gradients(matmul, [Rule("w", weight, activation, gradient=STOCHASTIC)])
    keys = lambda: jax.random.split(jax.random.key(0), 10_000)
    found = jax.jit(lambda: jax.vmap(lambda key: of(w, x, g, key=key))(keys()))()
    exact = g @ real(w, weight, 0).T, real(x, activation, 1).T @ g
    for values, want in zip(map(np.asarray, found), exact, strict=True):
        mean, deviation = values.mean(0), values.std(0) / 100
        assert (np.abs(mean - want) < 5 * deviation + 1e-5 * np.abs(want).max()).all()
        assert np.abs(values - want).max() > 10 * np.abs(mean - want).max()


def test_a_key_is_needed_for_the_derivative_alone():
    stochastic = [Rule("w", *OPERANDS["channels"], gradient=STOCHASTIC)]
    q, in_float = quantize_fn(matmul, stochastic), quantize_fn(matmul, rules("channels", None))
    program = lambda q, **rest: jax.jit(lambda w, x: q({"w": w}, x, **rest)).lower(W, X).as_text()
    assert program(q) == program(in_float)
    assert_same_bits(*jax.jit(lambda w, x: (q({"w": w}, x, key=jax.random.key(0)), q({"w": w}, x)))(W, X))
    with pytest.raises(ValueError, match=r"which needs a PRNG key\. Pass key="):
        jax.eval_shape(gradients(matmul, stochastic), W, X, G)
    with pytest.raises(ValueError, match="no rule that rounds so"):
        in_float({"w": W}, X, key=jax.random.key(0))


@pytest.mark.slow
def test_each_site_product_and_turn_of_a_scan_has_noise_of_its_own():
    """All of them are given the same g, and the other factor is 1."""

    def added(p, x, z):
        y, _ = lax.scan(lambda y, w: (y + x @ w, None), x @ p["v"], p["w"])
        return y + z @ p["u"]

    eye, g = np.eye(8, dtype=F), F(rng.normal(size=(8, 8)))
    params = {"w": np.stack([eye] * 3), "v": eye, "u": eye}
    q = quantize_fn(added, [Rule("*", QuantSpec(), QuantSpec(), gradient=STOCHASTIC)])
    run = jax.jit(lambda seed: jax.vjp(lambda p, z: q(p, eye, z, key=jax.random.key(seed)), params, eye)[1](g))
    (found, dz), (others, _) = (jax.tree.map(np.asarray, run(seed)) for seed in (0, 1))
    each = *found["w"], found["v"], found["u"], dz
    assert len({v.tobytes() for v in each}) == 6
    assert all((np.abs(v - g) < np.abs(g).max() / 7 * 1.001).all() for v in each)  # at most a step from g
    assert (others["v"] != found["v"]).any()


@cases("kind", ["scan and remat", "shard_map"], ["scan and remat"])
def test_inside_of_scan_remat_and_shard_map(kind):
    def block(w, x):
        return jax.nn.relu(x @ w)

    def layers(p, x):
        return lax.scan(lambda x, w: (jax.checkpoint(block)(w, x), None), x, p["w"])[0]

    loop = lambda p, x: block(p["w"][1], block(p["w"][0], x))
    stack, x = F(rng.normal(size=(2, 16, 16)) / 4), F(rng.normal(size=(8, 16)))
    per_token = activation_spec(8, granularity=PerToken())  # as on one device
    rule = [Rule("w", weight_spec(8, channel_axis=(0, -1)), per_token, gradient=QuantSpec())]
    g = F(rng.normal(size=(8, 16)))

    def run(f):
        """The gradients, of w and of x, and the value."""
        q = quantize_fn(f, rule)
        y, pull = jax.vjp(lambda w, x: q({"w": w}, x), stack, x)
        return *pull(g), y

    if kind == "scan and remat":
        jax.tree.map(assert_same_bits, *jax.jit(lambda: (run(layers), run(loop)))())
        return
    whole = jax.jit(lambda: run(layers))()
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    part = jax.shard_map(lambda w, x: layers({"w": w}, x), mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    _, dx, y = map(np.asarray, jax.jit(lambda: run(lambda p, x: part(p["w"], x)))())
    assert_same_bits(y, whole[2])
    assert np.abs(dx - whole[1]).max() < 0.02 * np.abs(whole[1]).max()  # g of each device has a scale of its own


def test_both_operands_may_be_activations():
    f = lambda p, x: jnp.einsum("btk,bsk->bts", x @ p["w"], x @ p["w"])
    rule = lambda gradient: [
        Rule("w", weight_spec(8), activation_spec(8)),
        Rule("dot_general_2", activation=QuantSpec(), kind="act_act", gradient=gradient),
    ]
    x, w, g = F(rng.normal(size=(2, 4, 8))), F(rng.normal(size=(8, 8))), F(rng.normal(size=(2, 4, 4)))
    pair = "bfloat16", QuantSpec(granularity=PerToken())
    exact, low = jax.jit(lambda: [gradients(f, rule(gradient))(w, x, g)[0] for gradient in (None, pair)])()
    assert_is_near(low, exact, 0.02)
    assert program_of_the_value(f, rule(pair), w, x) == program_of_the_value(f, rule(None), w, x)


TOKENS = F(rng.normal(size=(2, 16, 32)))


BLOCKS = QuantSpec(granularity=PerBlock(None, 8))


ROWS = {
    "tokens of a batch": ("btk,kn->btn", F(rng.normal(size=(32, 32))), TOKENS, (BLOCKS, BLOCKS)),
    "batches": ("gbtk,gkn->gbtn", F(rng.normal(size=(2, 32, 8))), TOKENS[:, None], (None, BLOCKS)),
    "two free axes": ("tk,kmn->tmn", F(rng.normal(size=(32, 4, 4))), TOKENS[0], (BLOCKS, None)),
}


@pytest.mark.slow
@cases("name", ROWS, ["tokens of a batch"])
def test_blocks_of_g_are_of_all_rows(name):
    """Several axes are summed towards w, towards w, and towards x."""
    equation, w, x, gradient = ROWS[name]
    rule = Rule("w", weight_spec(8), QuantSpec(), gradient=gradient)
    g = F(rng.normal(size=np.einsum(equation, x, w).shape))
    of = lambda f, *a: gradients(f, [rule])(*a)
    rows = lambda v: v.reshape(-1, v.shape[-1])
    low, alone = jax.jit(
        lambda w, x, g: (
            of(lambda p, x: jnp.einsum(equation, x, p["w"]), w, x, g),
            of(matmul, w, rows(x), rows(g)) if equation == "btk,kn->btn" else None,  # whose rows are one axis
        )
    )(w, x, g)
    exact = exact_gradients(equation, (Grid(whole=True), Grid()), x, w, g)
    for spec, value, want in zip(gradient, low, exact, strict=True):
        if spec:
            assert_is_near(value, want, 0.02)
    if alone:
        assert_same_bits(low[1], alone[1])


@pytest.mark.slow
def test_a_vector_has_one_scale_for_g():
    pair = QuantSpec(granularity=PerToken()), QuantSpec(granularity=PerChannel(None))
    for w, x in ((W[:, 0], X), (W, X[0])):
        g = F(rng.normal(size=(x @ w).shape))
        dx, dw = gradients(matmul, [Rule("w", QuantSpec(), QuantSpec(), gradient=pair)])(w, x, g)
        rows = lambda v, n: v.astype(np.float64).reshape(-1, n)
        exact_dx = rows(g, w.size // 64) @ rows(real(w, QuantSpec(), 0), w.size // 64).T
        exact_dw = rows(real(x, QuantSpec(), 0), 64).T @ rows(g, w.size // 64)
        for value, want in ((dx, exact_dx), (dw, exact_dw)):
            assert np.abs(np.asarray(value) - want.reshape(value.shape)).max() < 0.01 * np.abs(want).max()


def test_nothing_is_summed():
    image = IMAGE[:0]
    g = np.zeros(jax.eval_shape(convolution, {"w": KERNEL}, image).shape, F)
    dx, dw = gradients(convolution, [Rule("w", QuantSpec(), QuantSpec(), gradient=QuantSpec())])(KERNEL, image, g)
    assert dx.shape == image.shape
    assert not np.asarray(dw).any()
    dx, dw = of_matmul("channels", "int8")(W, X[:0], G[:0])
    assert (dx.shape, np.asarray(dw).any()) == ((0, 64), False)


def test_nothing_is_contracted():
    """The matrices hold no blocks, and there are none of them."""
    rule = Rule("w", QuantSpec(granularity=PerBlock((0, 1, 2), (1, 1, 8))), QuantSpec(), gradient=QuantSpec())
    shapes = (0, 0, 32), (0, 3, 0), (0, 3, 32)
    found = gradients(lambda p, x: x @ p["w"], [rule])(*(np.zeros(shape, F) for shape in shapes))
    assert [d.shape for d in found] == [(0, 3, 0), (0, 0, 32)]
    rule = Rule("w", QuantSpec(granularity=PerBlock((0, 1), (1, 4))), QuantSpec(), gradient=QuantSpec())
    found = gradients(matmul, [rule])(*(np.zeros(shape, F) for shape in ((0, 32), (8, 0), (8, 32))))
    assert [d.shape for d in found] == [(8, 0), (0, 32)]


def test_a_sum_of_a_gradient_whose_digits_may_not_fit_int32_is_refused():
    """Of 127 times up to 255 in two digits, of affine channels whose scales are multiplied into g."""
    rule = Rule("w", OPERANDS["affine"][0], QuantSpec(), gradient=(QuantSpec(), None))
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, F)
    of = lambda n: jax.eval_shape(gradients(matmul, [rule]), struct(8, n), struct(1, 8), struct(1, n))
    of((2**31 - 1) // (127 * 128))
    with pytest.raises(ValueError, match="does not fit the sums of their digits"):
        of((2**31 - 1) // (127 * 128) + 1)


def test_a_sum_of_a_gradient_of_a_convolution_is_as_long_as_its_output():
    """Of half as many windows as the image has elements."""
    f = lambda p, x: lax.conv_general_dilated(x, p["w"], (1, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, F)
    of_rule = gradients(f, [Rule("w", QuantSpec(), QuantSpec(), gradient=QuantSpec())])
    of = lambda n: jax.eval_shape(of_rule, struct(1, 1, 1, 1), struct(1, 1, 2 * n, 1), struct(1, 1, n, 1))
    of((2**31 - 1) // 127**2)
    with pytest.raises(ValueError, match="does not fit int32"):
        of((2**31 - 1) // 127**2 + 1)


ORDERS = ["tk,nk->tn", "kt,kn->nt", "btk,kn->tbn", "tbk,kn->btn", "btk,khd->bthd", "bthd,hdk->tbk", "kbt,nk->bnt"]
ORDERS += ["tk,k->t", "k,kn->n", "bkt,khd->bhtd", "btk,kn->btn", "tk,kn->nt"]


@pytest.mark.slow
@pytest.mark.bits
@cases(("order",), ORDERS, ["btk,kn->tbn"])
def test_bfloat16_products_of_any_order_of_axes(order):
    """Eagerly, compiled, and for each of a batch: XLA:CPU has no product for some of these."""
    sizes = {"b": 3, "t": 8, "k": 16, "n": 24, "h": 2, "d": 4}
    x, w, g = (F(rng.normal(size=[sizes[c] for c in of])) for of in order.replace("->", ",").split(","))
    rule = Rule("**", weight_spec(8), QuantSpec(), gradient="bfloat16")
    q = quantize_fn(lambda w, x: jnp.einsum(order, x, w), [rule])
    low = lambda w, x, g: jax.vjp(q, w, x)[1](g)
    exact = exact_gradients(order, (Grid(whole=True), Grid()), x, w, g)[::-1]
    one = *low(w, x, g), *jax.jit(low)(w, x, g)
    each = jax.jit(jax.vmap(low, (None, 1, 1), 1))(w, *(np.stack([v, 2 * v], 1) for v in (x, g)))
    twice = [np.stack([v, by * v], 1) for v, by in zip(exact, (4, 2), strict=True)]  # to w and to x
    for value, want in zip((*one, *each), (*exact, *exact, *twice), strict=True):
        assert np.abs(np.asarray(value) - want).max() < 4e-3 * np.abs(want).max()


@pytest.mark.slow
def test_a_symbolic_number_of_rows():
    (rows,) = jax.export.symbolic_shape("rows", constraints=["rows <= 1000"])
    weight, activation = QuantSpec(granularity=PerChannel(None)), QuantSpec(granularity=PerToken())
    f = jax.jit(
        lambda w, x, g: [
            gradients(matmul, [Rule("w", weight, activation, gradient=PRECISIONS[precision])])(w, x, g)[1]
            for precision in ("bfloat16", "int8")
        ]
    )
    struct = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 32), (rows, 64), (rows, 32))]
    w, x, g = (F(rng.integers(-100, 100, size=v.shape)) for v in (W, X, G))
    w[0], x[:, 0], g[0, 0] = 127, 127, 127  # scales of 1
    exported = jax.jit(jax.export.export(f)(*struct).call)
    for dw in exported(w, x, g):
        assert_same_bits(dw, x.T @ g)
    of_x, scales = quantized(X, activation, 1)
    by, scale, _ = by_hand.levels(G * scales[:, :1], Grid(whole=True), None)
    assert_same_bits(exported(W, X, G)[1], F(of_x.T.astype(np.int64) @ by) * scale)


BAD = [
    (lambda: Rule("w", gradient="float16"), TypeError, "`gradient` of a Rule must be None"),
    (lambda: Rule("w", gradient=("bfloat16",) * 3), TypeError, "A pair is"),
    (lambda: run(gradient=QuantSpec(granularity=PerToken())), ValueError, "towards the weight must be PerTensor"),
    (lambda: run(gradient=QuantSpec(granularity=PerChannel(0))), ValueError, "towards an input must be PerTensor"),
    (lambda: run(gradient=QuantSpec(granularity=PerBlock(None, 20))), ValueError, "does not divide the length"),
    (lambda: run(vector=True, gradient=QuantSpec(granularity=PerBlock(None, 4))), ValueError, "which is nothing"),
    (lambda: run(activation=None, gradient="bfloat16"), ValueError, "one of these is in float"),
    (lambda: run(weight=weight_spec(12), gradient="bfloat16"), ValueError, "needs operands of up to 8 bits"),
    (lambda: jq.fake_quant_params({"w": W}, [Rule("w", weight_spec(8), gradient="bfloat16")]), ValueError, "gradient="),
]


def run(weight=OPERANDS["channels"][0], activation=OPERANDS["channels"][1], vector=False, **kw):
    return quantize_fn(matmul, [Rule("w", weight, activation, **kw)])({"w": W[:, 0] if vector else W}, X)


@pytest.mark.parametrize(("call", "error", "match"), BAD)
def test_bad_input(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize(
    ("operands", "precision"),
    [
        ("float8", float8_spec("float8_e5m2")),
        pytest.param("tensors", "int8", marks=pytest.mark.slow),
        pytest.param("tensors", (nvfp4_spec(), None), marks=pytest.mark.slow),
    ],
    ids=["e5m2", "int8", "nvfp4"],
)
def test_the_scale_of_a_gradient_is_just_in_time(operands, precision):
    of = of_matmul(operands, precision)
    for once, scaled in zip(of(W, X, G), of(W, X, G * 2**20), strict=True):
        assert_same_bits(np.asarray(once) * F(2**20), scaled)


def test_the_largest_range_of_a_history_is_the_scale():
    q = quantize_fn(matmul, [Rule("w", float8_spec(), float8_spec(), gradient=float8_spec("float8_e5m2"))])
    batches = [X * F(1.5**-i) for i in range(6)]
    seen = [q.observe({"w": W}, x)["w:input"] for x in batches]
    history = jax.tree.map(lambda *r: np.stack(r), *seen[-3:])
    largest = jq.Range(history.x_min.min(0), history.x_max.max(0))
    qparams = q.init_qparams({"w": W}, X, ranges={"w:input": largest})
    assert_same_bits(qparams["w:input"].scale, np.abs(batches[3]).max() / F(448))  # of the last three


@pytest.mark.slow
def test_a_gradient_per_token_towards_the_second_operand_of_a_convolution_has_scales_of_its_features():
    x, kernel, g = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(4, 6, 3), (3, 3, 4), (4, 6, 4)]))
    g = g * jnp.exp2(jnp.arange(0.0, 8.0, 2))[None, None]

    def f(params, x, kernel):
        return lax.conv_general_dilated(
            x * params, kernel + x[0, 0, 0], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    def gradient(precision):
        q = quantize_fn(f, [Rule("**", None, QuantSpec(), kind="act_act", gradient=precision)])
        return jax.vjp(lambda kernel: q(jnp.float32(1), x, kernel), kernel)[1](g)[0]

    want = gradient(None)
    got = gradient(QuantSpec(granularity=PerToken()))
    assert (jnp.abs(got - want).max((0, 1)) < 0.02 * jnp.abs(want).max((0, 1))).all()
