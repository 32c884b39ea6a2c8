# SPDX-License-Identifier: Apache-2.0
"""Ragged dots against the loop over groups: rows of one group are those of a dot, with the qparams of all rows."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from hand_written import Grid, levels
from jax import lax
from lanes import cases

from jaxquant import (
    PerBlock,
    PerChannel,
    PerToken,
    QuantSpec,
    Rule,
    activation_spec,
    dot_general,
    float8_spec,
    mxfp8_spec,
    nvfp4_spec,
    quantize,
    quantize_fn,
    weight_spec,
)

F = np.float32
rng = np.random.default_rng(0)
normal = lambda *shape: rng.normal(size=shape).astype(F)
X, W, G = normal(24, 32), normal(4, 32, 16), normal(24, 16)
SIZES = {
    "some in none": (7, 0, 5, 3),
    "all in one": (24, 0, 0, 0),
    "even": (6, 6, 6, 6),
    "none": (0, 0, 0, 0),
    "uneven": (1, 1, 21, 1),
    "more than there are": (20, 20, 20, 20),
    "the last is empty": (7, 16, 1, 0),
}
SIZES = {name: np.int32(sizes) for name, sizes in SIZES.items()}
TOKENS, TOKEN, WHOLE = activation_spec(8, granularity=PerToken()), Grid(8, affine=True), Grid(8, True, whole=True)
PAIRS = {  # of the rule; then the grids, and how many blocks a column of the weight has
    "8 bits": (weight_spec(8), activation_spec(8), Grid(8), WHOLE, 1),
    "affine tokens": (QuantSpec(symmetric=False, granularity=PerChannel(None)), TOKENS, Grid(8, True), TOKEN, 1),
    "blocks": (weight_spec(4, block_size=8), activation_spec(8), Grid(4), WHOLE, 4),
    "16 bits": (weight_spec(8), activation_spec(16), Grid(8), Grid(16, True, True), 1),
}
FORMATS = {  # of the rule, and with axes of the operands
    "float8": (float8_spec(), float8_spec()),
    "mxfp8": (mxfp8_spec(), mxfp8_spec(axis=1)),
    "nvfp4": (nvfp4_spec(), nvfp4_spec(axis=1)),
}


def experts(p, x, sizes):
    return lax.ragged_dot(x, p["w"], sizes)


def groups(rows, sizes):
    """The group of each row; the number of groups for those in none."""
    return np.repeat(np.arange(len(sizes) + 1), [*sizes, rows])[:rows]


def levels_of_both(x, w, of_weight, of_input, blocks=1):
    """By hand, as `levels` gives them: (rows, blocks, columns) of x, (groups, blocks, columns, outputs) of w."""
    parts = w.reshape(len(w), blocks, -1, w.shape[-1])
    w = levels(parts, of_weight, (0, 1, 2, 3) if of_weight.whole else (2,))
    level, scale, mask = levels(x, of_input, (1,))
    return (level.reshape(len(x), blocks, -1), scale, mask), w


def by_hand(x, w, sizes, *grids):
    """Each row in int64 with the matrix of its group, block by block; 0 for rows in no group."""
    group = groups(len(x), sizes)
    (of_x, x_scale, _), (of_w, w_scale, _) = levels_of_both(x, w, *grids)
    own, y = np.minimum(group, len(w) - 1), F(0)
    for block in range(of_x.shape[1]):
        acc = np.einsum("mk,mkn->mn", of_x[:, block], of_w[own, block])
        y = y + acc.astype(F) * (x_scale * np.broadcast_to(w_scale, (*of_w.shape[:2], 1, w.shape[-1]))[own, block, 0])
    return np.where(group[:, None] < len(w), y, F(0))


def rules(weight, activation, **kw):
    return [Rule("*", weight, activation, **kw)]


def gradients(q):
    """To the weight and to the input, by one program for all sizes."""
    return jax.jit(lambda w, x, sizes, g: jax.vjp(lambda w, x: q({"w": w}, x, sizes), w, x)[1](g))


@cases("name", PAIRS, ["affine tokens", "blocks"])
def test_is_the_loop_over_groups(name):
    weight, activation, *grids = PAIRS[name]
    call = jax.jit(quantize_fn(experts, rules(weight, activation)))
    for sizes in SIZES.values():
        assert_same_bits(call({"w": W}, X, sizes), by_hand(X, W, sizes, *grids))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_of_formats_is_the_loop_over_groups(name):
    of_rule, spec = FORMATS[name]
    call, x, w = jax.jit(quantize_fn(experts, rules(of_rule, of_rule))), quantize(X, spec), quantize(W, spec)
    each = np.stack([dot_general(x, w[e], (((1,), (0,)), ((), ()))) for e in range(len(W))])
    for sizes in SIZES.values():
        group = groups(len(X), sizes)
        expected = np.where(group[:, None] < 4, each[np.minimum(group, 3), np.arange(len(X))], F(0))
        assert_same_bits(call({"w": W}, X, sizes), expected)


def test_the_groups_and_the_output_channels_have_scales_of_their_own():
    plan = quantize_fn(experts, rules(weight_spec(8), activation_spec(8))).plan({"w": W}, X, SIZES["even"])
    assert [(site.name, site.op, site.kind, site.length) for site in plan] == [
        ("w:input", "ragged_dot_general", "weight", 32),
        ("w", "ragged_dot_general", "weight", 32),
    ]
    assert plan["w"].spec.granularity == PerChannel((0, 2))


def test_the_gradient_is_that_of_the_loop():
    both = gradients(quantize_fn(experts, rules(weight_spec(8), activation_spec(8))))
    (x, x_scale, of_x), (w, w_scale, of_w) = levels_of_both(X, W, Grid(8), WHOLE)
    x, w, of_w = x[:, 0] * x_scale, (w * w_scale)[:, 0], of_w[:, 0]
    for sizes in SIZES["some in none"], SIZES["uneven"]:
        is_in = groups(24, sizes)[:, None] == np.arange(4)
        towards_w = np.einsum("mk,me,mn->ekn", x, is_in, G) * of_w
        towards_x = np.einsum("ekn,me,mn->mk", w, is_in, G) * of_x
        for got, want in zip(both(W, X, sizes, G), (towards_w, towards_x), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5)


INT8 = QuantSpec()
GRADIENTS = {
    "int8": INT8,
    "rows and channels": (QuantSpec(granularity=PerToken()), QuantSpec(granularity=PerChannel(None))),
    "blocks": QuantSpec(granularity=PerBlock(None, 8)),
    "bfloat16": "bfloat16",
    "mxfp8 and bfloat16": (mxfp8_spec(), "bfloat16"),  # whose blocks reach from one matrix into the next
}


@cases("name", GRADIENTS, ["blocks"])
def test_a_gradient_in_low_precision_is_that_of_the_dot_with_all_matrices(name):
    sizes, of = SIZES["some in none"], rules(weight_spec(8), activation_spec(8), gradient=GRADIENTS[name])
    every = quantize_fn(lambda p, x: jnp.einsum("mk,kgn->mgn", x, p["w"]), of)
    is_in = groups(24, sizes)[:, None, None] == np.arange(4)[None, :, None]
    expected = jax.jit(lambda w, x, g: jax.vjp(every, {"w": w}, x)[1](g))(
        W.transpose(1, 0, 2), X, np.where(is_in, G[:, None], F(0))
    )
    got = gradients(quantize_fn(experts, of))(W, X, sizes, G)
    assert_same_bits(got[1], expected[1])
    assert_same_bits(got[0], expected[0]["w"].transpose(1, 0, 2))


def test_an_int8_gradient_is_integer_arithmetic():
    q, sizes = quantize_fn(experts, rules(QuantSpec(), QuantSpec(), gradient=INT8)), SIZES["uneven"]
    group, whole = groups(24, sizes), Grid(8, whole=True)
    (of_x, x, _), (of_w, w, _) = levels_of_both(X, W, whole, whole)
    of_g, g, _ = levels(G, whole, ())
    towards_x = np.einsum("mn,mkn->mk", of_g, of_w[group, 0])
    towards_w = np.stack([of_x[group == e, 0].T @ of_g[group == e] for e in range(4)])
    got = gradients(q)(W, X, sizes, G)
    assert_same_bits(got[0], F(towards_w) * (x * g))
    assert_same_bits(got[1], F(towards_x) * (g * w.squeeze()))
    assert_same_bits(q({"w": W}, X, sizes), by_hand(X, W, sizes, whole, whole))


def test_axes_in_any_order():
    """Examples, other rows, features, rows in groups, other rows; features, outputs, examples, groups."""
    numbers = lax.RaggedDotDimensionNumbers((((2,), (0,)), ((0,), (2,))), (3,), (3,))
    f = lambda p, x, sizes: lax.ragged_dot_general(x, p["w"], sizes, numbers)
    x, w, g = normal(2, 3, 4, 5, 2), normal(4, 7, 2, 3), normal(2, 3, 5, 2, 7)
    sizes = np.int32([[[2, 1, 1], [0, 5, 0], [0, 0, 0]], [[1, 0, 4], [5, 0, 0], [3, 1, 1]]])
    group = np.stack([[groups(5, some) for some in each] for each in sizes])
    is_in = (group[..., None] == np.arange(3)).astype(int)

    (of_x, x_scale, _), (of_w, w_scale, _) = levels(x, TOKEN, (2,)), levels(w, Grid(8), (0,))
    acc = np.einsum("brkms,knbg->brmsgn", of_x, of_w).astype(F) * np.einsum("brkms,knbg->brmsgn", x_scale, w_scale)
    y = quantize_fn(f, rules(weight_spec(8), TOKENS))({"w": w}, x, sizes)
    assert_same_bits(y, np.einsum("brmsgn,brmg->brmsn", acc, F(is_in)))

    whole = Grid(8, whole=True)
    (of_x, x_scale, _), (of_w, w_scale, _), (of_g, g_scale, _) = (
        levels(v, whole, ()) for v in (x, w, g * is_in.any(-1)[..., None, None])
    )
    dw, dx = gradients(quantize_fn(f, rules(INT8, INT8, gradient=INT8)))(w, x, sizes, g)
    towards_x = np.einsum("brmsn,brmg,knbg->brkms", of_g, is_in, of_w)
    towards_w = np.einsum("brmsn,brmg,brkms->knbg", of_g, is_in, of_x)
    assert_same_bits(dx, F(towards_x) * (g_scale.item() * w_scale.squeeze()))
    assert_same_bits(dw, F(towards_w) * (g_scale.item() * x_scale.squeeze()))


@pytest.mark.slow
def test_a_weight_only_site_is_the_ragged_dot_of_its_real_values_in_blocks_or_scaled_behind():
    blocks, scale, _ = levels(W.reshape(4, 4, 8, 16), Grid(4), (2,))
    of_blocks, of_float = (blocks * scale).astype(F).reshape(W.shape), quantize(W, float8_spec())
    integers, of_columns, _ = levels(W, Grid(8), (1,))
    sizes = SIZES["uneven"]
    expert = np.repeat(np.arange(4), sizes)
    for spec, real, scale in (
        (weight_spec(4, block_size=8), of_blocks, F(1)),
        (float8_spec(), of_float.values.astype(F), of_float.scale.reshape(1, 1)),
        (weight_spec(8), integers.astype(F), of_columns[expert, 0]),
    ):
        q = quantize_fn(experts, rules(spec, None))
        call, expected = jax.jit(q), jax.jit(lax.ragged_dot)(X, real, sizes) * scale
        assert_same_bits(call({"w": W}, X, sizes), expected)
        assert_same_bits(call(q.freeze({"w": W}, X, sizes), X, sizes), expected)


def test_frozen_experts_give_the_same_bits():
    q = quantize_fn(experts, rules(weight_spec(8), activation_spec(8)))
    args = {"w": W}, X, SIZES["some in none"]
    qparams = q.init_qparams(*args, ranges=q.observe(*args))
    frozen = q.freeze(*args, qparams=qparams)
    inputs = {key: v for key, v in qparams.items() if key != "w"}
    # The same as of a call without qparams: the range of the input is of the same rows.
    expected = by_hand(X, W, SIZES["some in none"], Grid(8), WHOLE)
    assert_same_bits(q(frozen, *args[1:], qparams=inputs), expected)
    assert_same_bits(q(*args, qparams=qparams), expected)
    assert frozen["w"].values.dtype == jnp.int8


@pytest.mark.slow
def test_inside_vmap_scan_and_a_batch_of_matrices():
    of = rules(weight_spec(8), TOKENS)
    sizes, x, w = np.stack([SIZES["uneven"], SIZES["some in none"]]), np.stack([X, X[::-1]]), np.stack([W, W[::-1]])
    one = lambda x, w, sizes: by_hand(x, w, sizes, Grid(8), TOKEN)
    of_w = np.stack([one(x[i], W, sizes[i]) for i in range(2)])
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((), ())), (1,), (0,))
    shared = quantize_fn(lambda p, x, s: lax.ragged_dot_general(x, p["w"], s, numbers), of)
    assert_same_bits(shared({"w": W}, x, sizes), of_w)
    own = quantize_fn(lambda p, x, s: jax.vmap(lambda w, x, s: experts({"w": w}, x, s))(p["w"], x, s), of)
    assert_same_bits(own({"w": w}, x, sizes), np.stack([one(x[i], w[i], sizes[i]) for i in range(2)]))
    layers = lambda p, x, s: lax.scan(lambda x, w: (experts({"w": w}, x, s)[:, :8].repeat(4, 1), None), x, p["w"])[0]
    y = X
    for i in range(2):
        y = one(y, w[i], sizes[0])[:, :8].repeat(4, 1)
    assert_same_bits(quantize_fn(layers, of)({"w": w}, X, sizes[0]), y)
    assert_same_bits(jax.vmap(quantize_fn(experts, of), (None, 0, 0))({"w": W}, x, sizes), of_w)


def test_two_inputs_without_a_parameter():
    q = quantize_fn(
        lambda p, x, w, s: lax.ragged_dot(x, w, s), [Rule("*", activation=activation_spec(8), kind="act_act")]
    )
    assert_same_bits(q({}, X, W, SIZES["uneven"]), by_hand(X, W, SIZES["uneven"], WHOLE, WHOLE))


def test_a_ragged_contraction_is_no_site():
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    f = lambda p, x, s: lax.ragged_dot_general(x, p["w"], s, numbers)
    with pytest.raises(ValueError, match=r"At 'w', chosen by the rule '\*'.*ragged_dot_general.*cannot replace"):
        quantize_fn(f, rules(weight_spec(8), None)).plan({"w": G}, X, SIZES["even"])


def test_of_a_symbolic_number_of_rows_and_of_nothing():
    q, sizes = quantize_fn(experts, rules(weight_spec(8), activation_spec(8))), SIZES["uneven"]
    (rows,) = jax.export.symbolic_shape("rows")
    exported = jax.export.export(jax.jit(q))({"w": W}, jax.ShapeDtypeStruct((rows, 32), F), sizes)
    assert_same_bits(exported.call({"w": W}, X, sizes), by_hand(X, W, sizes, Grid(8), WHOLE))
    assert jax.eval_shape(q, {"w": W}, X[:0], SIZES["none"]).shape == (0, 16)
    assert_same_bits(q({"w": W[:0]}, X, SIZES["none"][:0]), np.zeros((24, 16), F))


def test_fewer_rows_than_groups():
    q = quantize_fn(experts, rules(weight_spec(8), TOKENS))
    for x in X[:2], X[:1]:
        for sizes in (1, 0, 1, 1), (0, 0, 0, 3), (0, 1, 0, 0), (2, 0, 0, 0):
            assert_same_bits(q({"w": W}, x, np.int32(sizes)), by_hand(x, W, sizes, Grid(8), TOKEN))


def test_groups_that_share_scales():
    q, sizes = quantize_fn(experts, rules(QuantSpec(granularity=PerChannel(-1)), TOKENS)), SIZES["uneven"]
    (of_x, x_scale, _), (of_w, w_scale, _) = levels(X, TOKEN, (1,)), levels(W, Grid(8), (0, 1))
    acc = np.einsum("mk,mkn->mn", of_x, of_w[groups(24, sizes)])
    assert_same_bits(q({"w": W}, X, sizes), acc.astype(F) * (x_scale * w_scale[0]))


@pytest.mark.slow
def test_rows_of_one_value():
    """Nothing is contracted: each has a scale of its own."""
    numbers = lax.RaggedDotDimensionNumbers((((), ()), ((), ())), (0,), (0,))
    x, w, sizes = normal(6), normal(3, 4), np.int32([2, 1, 2])
    q = quantize_fn(
        lambda p, x, s: lax.ragged_dot_general(x, p["w"], s, numbers),
        rules(QuantSpec(granularity=PerChannel(-1)), TOKENS),
    )
    (of_x, x_scale, _), (of_w, w_scale, _) = levels(x, TOKEN, ()), levels(w, Grid(8), (0,))
    y = F(of_x[:5, None] * of_w[groups(5, sizes)]) * (x_scale[:5, None] * w_scale)
    assert_same_bits(q({"w": w}, x, sizes), np.append(y, np.zeros((1, 4), F), 0))


def test_a_sum_of_one_group_is_no_longer_for_others():
    """Of 70 groups of 2048 columns: 143,360 products, of which 2048 are of one group; 133,144 fit int32."""
    of = rules(QuantSpec(), QuantSpec(), gradient=(INT8, None))
    x, sizes = normal(4, 8), np.zeros(70, np.int32)
    gradient = jax.grad(lambda x, p, sizes: quantize_fn(experts, of)(p, x, sizes).sum())
    params = lambda *shape: {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    assert jax.eval_shape(gradient, x, params(70, 8, 2048), sizes).shape == x.shape
    with pytest.raises(ValueError, match="more than 133144 of them"):
        jax.eval_shape(gradient, x, params(2, 8, 133_145), sizes[:2])


def test_the_sizes_may_be_of_a_small_dtype():
    """Of one that does not hold their sum, too."""
    q = quantize_fn(experts, rules(weight_spec(8), activation_spec(8)))
    for sizes in *SIZES.values(), (7, 250, 5, 3):
        assert_same_bits(q({"w": W}, X, np.uint8(sizes)), by_hand(X, W, sizes, Grid(8), WHOLE))


def test_the_gradient_of_a_float_ragged_dot_is_refused():
    gradient = jax.grad(lambda p, x, s: (experts(p, x, s) ** 2).sum())
    with pytest.raises(ValueError, match="the function itself differentiates"):
        quantize_fn(gradient, rules(weight_spec(8), None)).plan({"w": W}, X, SIZES["even"])
    left = [*rules(weight_spec(8), None), Rule("**", None, kind="gradient", optional=True)]
    assert quantize_fn(gradient, left).plan({"w": W}, X, SIZES["even"])["w"].spec


def test_a_ragged_contraction_reads_a_parameter():
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    f = lambda p, x, s: (x.T @ p["w"], lax.ragged_dot_general(x, p["w"], s, numbers))
    q = quantize_fn(f, rules(weight_spec(8), activation_spec(8), op="dot_general"))
    with pytest.raises(ValueError, match=r"also read in float, by 'ragged_dot_general'"):
        q.freeze({"w": G}, X, SIZES["even"])
