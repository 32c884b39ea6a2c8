# SPDX-License-Identifier: Apache-2.0
"""Rotation at a site: against NumPy, against the function with the rotation written into it, and what is refused."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits, x64
from jax import lax
from jax.sharding import PartitionSpec as P
from lanes import cases

from jaxquant import (
    PerBlock,
    PerToken,
    QuantSpec,
    Rule,
    activation_spec,
    dequantize,
    dot_general,
    fake_quant,
    fake_quant_params,
    load,
    mxfp4_spec,
    nvfp4_spec,
    quant_point,
    quantize,
    quantize_fn,
    report,
    save,
    solve,
    weight_spec,
)
from jaxquant._base._hadamard import block_of, hadamard

F = np.float32
W4, A4 = weight_spec(4), activation_spec(4, granularity=PerToken())
A8 = activation_spec(8)
DOT = lambda p, x: x @ p["w"]
ROTATED = functools.partial(Rule, rotate="hadamard")


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(F)


def with_outliers(seed, rows, k):
    x = normal(seed, rows, k)
    x[:, 3] *= 40
    return x


def matrix(n):
    """Of Sylvester, in blocks, in float64."""
    block = functools.reduce(np.kron, [np.array([[1, 1], [1, -1]]) / np.sqrt(2)] * (block_of(n).bit_length() - 1))
    return np.kron(np.eye(n // block_of(n)), np.atleast_2d(block))


# The rotation


@pytest.mark.parametrize(
    ("shape", "axes"), [((5, 16), (1,)), ((24, 3), (0,)), ((2, 4, 3, 6), (3, 1)), ((3, 12), (-1,))]
)
def test_hadamard_is_the_matrix_of_sylvester(shape, axes):
    x = normal(0, *shape)
    got = np.moveaxis(np.asarray(hadamard(x, axes)), axes, range(-len(axes), 0))
    want = np.moveaxis(np.asarray(x), axes, range(-len(axes), 0))
    rows = want.reshape(-1, np.prod([shape[i] for i in axes]))
    np.testing.assert_allclose(got.reshape(rows.shape), rows @ matrix(rows.shape[1]), atol=1e-5)
    np.testing.assert_allclose(hadamard(hadamard(x, axes), axes), x, atol=1e-5)


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_hadamard_has_the_same_bits_everywhere(dtype):
    """Also where products stand before it and sums behind it."""
    x, gain = jnp.asarray(normal(0, 6, 24), dtype), jnp.asarray(normal(1, 24), dtype)
    v = x * gain[None]
    turned, by_one = hadamard(v, (1,)), jnp.stack([hadamard(row, (0,)) for row in v])
    assert_same_bits(by_one, turned)
    assert_same_bits(jax.vmap(lambda row: hadamard(row, (0,)))(v), turned)
    wide = gain.astype(F)  # in which it is rotated
    want = turned + wide[None]
    assert_same_bits(jax.jit(lambda x, gain: hadamard(x * gain[None], (1,)) + wide[None])(x, gain), want)
    step = lambda c, row: (c, hadamard(row * gain, (0,)) + wide)
    assert_same_bits(lax.scan(step, 0, x)[1], want)
    by_hand = v.astype(F)
    for _ in range(3):
        a, b = by_hand.reshape(6, 3, 4, 2)[..., 0], by_hand.reshape(6, 3, 4, 2)[..., 1]
        by_hand = np.concatenate([np.asarray(a + b), np.asarray(a - b)], -1).reshape(6, 24)
    assert_same_bits(turned, jnp.asarray(by_hand * F(8**-0.5)))


FLOAT16 = {
    "x @ w": DOT,
    "wider": lambda params, x: jnp.dot(x, params["w"], preferred_element_type=F),
    "cast": lambda params, x: (x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)).astype(F),
}
FLOAT16_RULES = {
    "weights alone": {"activation": None}, "8 bits": {"activation": activation_spec(8)},
    "gradients too": {"activation": activation_spec(8), "gradient": QuantSpec()},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.bits
@cases("f, rule", list(itertools.product(FLOAT16, FLOAT16_RULES)), [("x @ w", "weights alone")])
def test_rotated_float16_is_as_wide_as_float32(f, rule):
    """Inputs of 1,500 sum to more than float16 holds before they are scaled back."""
    params = {"w": jnp.asarray(normal(0, 512, 16) / 1000, jnp.float16)}
    x = jnp.asarray(1500 + normal(1, 4, 512), jnp.float16)
    q = quantize_fn(FLOAT16[f], [Rule("w", weight_spec(8), rotate="hadamard", **FLOAT16_RULES[rule])])
    frozen, whole = q.freeze(params, x), np.asarray(params["w"], np.float64)
    want = np.asarray(x, np.float64) @ whole
    assert_same_bits(q(frozen, x), q(params, x))
    np.testing.assert_allclose(q(params, x), want, atol=0.02 * np.abs(want).max())
    assert frozen["w"].dtype == jnp.float16
    np.testing.assert_allclose(dequantize(frozen["w"]), whole, atol=5e-5)
    sum_of = lambda params, x: q(params, x).astype(F).sum()
    of_params, of_x = jax.grad(sum_of, (0, 1))(params, x)
    np.testing.assert_allclose(of_params["w"][:, 0], np.asarray(x, F).sum(0), rtol=0.02)
    np.testing.assert_allclose(of_x[0], whole.sum(1), atol=0.02 * np.abs(whole.sum(1)).max())
    assert_same_bits(jax.grad(sum_of, 1)(frozen, x), of_x)


LAYOUTS = {
    "rows": (DOT, (24, 5)), "columns": (lambda p, x: x @ p["w"].T, (5, 24)),
    "merged": (lambda p, x: x @ p["w"].reshape(24, 5), (4, 6, 5)),
    "heads": (lambda p, x: jnp.einsum("bk,nhk->bnh", x, p["w"]), (5, 2, 24)),
}  # fmt: skip


@cases("layout", LAYOUTS)
def test_real_values_are_rotated_back(layout):
    f, shape = LAYOUTS[layout]
    params = {"w": normal(1, *shape)}
    q = quantize_fn(f, [ROTATED("w", W4)])
    frozen = q.freeze(params, X)
    np.testing.assert_allclose(f({"w": dequantize(frozen["w"])}, X), q(frozen, X), atol=1e-4)
    with pytest.raises(ValueError, match="was frozen by a rule with rotate="):
        dequantize(frozen["w"].T)  # of which the axes are others


def test_hadamard_in_float64_and_its_gradient():
    with x64():
        x, g = np.random.default_rng(0).normal(size=(2, 5, 24))
        np.testing.assert_allclose(hadamard(x, (1,)), x @ matrix(24), rtol=1e-13, atol=1e-13)
        pull = jax.vjp(lambda x: hadamard(x, (1,)), x)[1]
        np.testing.assert_allclose(pull(jnp.asarray(g))[0], g @ matrix(24), rtol=1e-13, atol=1e-13)
    x = np.full((2, 8), np.inf, F)
    assert np.isnan(hadamard(x, (1,))).any()  # nothing is clipped


# A rule that rotates, against the function in which the rotation is written down


def in_heads(p, x):
    return jnp.einsum("thk,khd->td", x.reshape(-1, 4, 6), p["w"])  # the heads and their channels, in two orders


def by_hand_in_heads(p, x):
    return jnp.einsum("thk,khd->td", hadamard(x.reshape(-1, 4, 6), (2, 1)), p["w"])


def transposed(p, x):
    return jnp.tanh(x @ p["w"].T)


def shared(p, x):
    return x @ p["q"] + jnp.tanh(x @ p["k"])


def scanned(p, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]


def by_hand_scanned(p, x):
    return lax.scan(lambda x, w: (jnp.tanh(hadamard(x, (1,)) @ w), None), x, p["w"])[0]


def experts(p, x):
    return lax.ragged_dot(x, p["w"], np.int32([2, 3, 2]))


def tied(p, x):
    return jnp.tanh(x @ p["w"]) @ p["w"]


def by_hand_tied(p, x):
    return hadamard(jnp.tanh(hadamard(x, (1,)) @ p["w"]), (1,)) @ p["w"]


def rotating_input(f):
    return lambda p, x: f(p, hadamard(x, (1,)))


FUNCTIONS = {  # the function, the function with rotated inputs, params, and along which axes they are rotated
    "dot": (DOT, rotating_input(DOT), {"w": normal(1, 24, 5)}, (0,)),
    "heads": (in_heads, by_hand_in_heads, {"w": normal(1, 6, 4, 5)}, (0, 1)),
    "transposed": (transposed, rotating_input(transposed), {"w": normal(1, 5, 24)}, (1,)),
    "shared": (shared, rotating_input(shared), {"q": normal(1, 24, 5), "k": normal(2, 24, 5)}, (0,)),
    "scan": (scanned, by_hand_scanned, {"w": normal(1, 3, 24, 24)}, (1,)),
    "experts": (experts, rotating_input(experts), {"w": normal(1, 3, 24, 5)}, (1,)),
    "tied": (tied, by_hand_tied, {"w": normal(1, 24, 24)}, (0,)),
}
SPECS = {
    "W4A4": (W4, A4),
    "W4": (W4, None),
    "A8": (None, A8),
    "in blocks": (weight_spec(4, block_size=8), activation_spec(8, symmetric=True)),
}
X = with_outliers(0, 7, 24)
WAYS = [way for way in itertools.product(FUNCTIONS, SPECS) if way != ("heads", "in blocks")]  # of two axes: no blocks


@pytest.mark.bits
@cases("name, specs", WAYS)
def test_it_is_the_function_with_the_rotation_written_down(name, specs):
    (f, by_hand, params, axes), (weight, activation) = FUNCTIONS[name], SPECS[specs]
    q = quantize_fn(f, [ROTATED("*", weight, activation)])
    want = quantize_fn(by_hand, [Rule("*", weight, activation)])
    turned = jax.jit(lambda params: {path: hadamard(w, axes) for path, w in params.items()})(params)
    value, pull = jax.vjp(q, params, X)
    expected, pull_expected = jax.vjp(want, turned, X)
    if None in SPECS[specs]:  # a product in float, whose bits are those of the program that it is in
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
    else:
        assert_same_bits(value, expected)
    assert_same_bits(q(params, X), jax.jit(q)(params, X))
    g = normal(9, *value.shape)
    (of_params, of_x), (of_turned, of_input) = pull(g), pull_expected(g)
    for path, gradient in of_turned.items():
        np.testing.assert_allclose(of_params[path], hadamard(gradient, axes), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_x, of_input, rtol=1e-5, atol=1e-4)
    # The float function itself is what it was, for any observer.
    np.testing.assert_allclose(q.observe(params, X, with_value=True)[0], f(params, X), rtol=1e-5, atol=1e-4)
    assert len(q.plan(params, X)) == len(want.plan(turned, X))


@pytest.mark.bits
@cases("name, specs", WAYS, [("tied", "W4A4")])
def test_what_is_frozen_serves_the_same_bits(name, specs, tmp_path):
    (f, _, params, axes), (weight, activation) = FUNCTIONS[name], SPECS[specs]
    q = quantize_fn(f, [ROTATED("*", weight, activation)])
    qparams = q.init_qparams(params, X)
    want = q(params, X, qparams=qparams)
    frozen = q.freeze(params, X, qparams=qparams)
    assert_same_bits(q(frozen, X, qparams=qparams), want)
    if weight is None:
        return
    # In float, integers count as what they stand for, rotated back.
    turned_back = {path: hadamard(dequantize(dataclasses.replace(w, frozen=None)), axes) for path, w in frozen.items()}
    seen = q.observe(frozen, X, with_value=True)[0]
    np.testing.assert_allclose(seen, f(turned_back, X), rtol=1e-4, atol=1e-4)
    for path, w in frozen.items():
        own = q.plan(params, X)[path].entry_spec
        assert_same_bits(w.values.astype(np.int8), quantize(hadamard(params[path], axes), own, qparams[path]).values)
    save(tmp_path / "model.npz", frozen)
    loaded = load(tmp_path / "model.npz")
    assert jax.tree.structure(loaded) == jax.tree.structure(frozen)
    assert_same_bits(q(loaded, X, qparams=qparams), want)


def test_operands_of_data_are_rotated_both():
    scores = lambda p, x: quant_point(x * p["q"][None], "a") @ quant_point(x * p["k"][None], "b").T
    by_hand = lambda p, x: hadamard(x * p["q"][None], (1,)) @ hadamard(x * p["k"][None], (1,)).T
    params = {"q": normal(1, 24), "k": normal(2, 24)}
    rule = functools.partial(Rule, "*", activation=A8, kind="act_act")
    q, want = quantize_fn(scores, [rule(rotate="hadamard")]), quantize_fn(by_hand, [rule()])
    assert_same_bits(q(params, X), want(params, X))
    error = lambda y: np.square(y - scores(params, X)).sum()
    assert error(q(params, X)) < error(quantize_fn(scores, [rule()])(params, X)) / 2


def test_an_input_is_rotated_once_for_all_that_take_it():
    f, _, params, _ = FUNCTIONS["shared"]
    q = quantize_fn(f, [ROTATED("*", W4, A8)])
    assert [site.entry for site in q.plan(params, X)] == ["q:input", "q", "q:input", "k"]
    loops = str(jax.make_jaxpr(lambda p, x: q(p, x, qparams={}))(params, X)).count("name=_butterfly")
    assert loops == 3  # of x, and of each weight
    mixed = quantize_fn(f, [ROTATED("q", W4, A8), Rule("k", W4, A8)])
    assert [site.entry for site in mixed.plan(params, X)] == ["q:input", "q", "k:input", "k"]
    want = quantize_fn(lambda p, x: hadamard(x, (1,)) @ p["q"] + jnp.tanh(x @ p["k"]), [Rule("*", W4, A8)])
    assert_same_bits(mixed(params, X), want(params | {"q": hadamard(params["q"], (0,))}, X))


@pytest.mark.slow
def test_one_input_along_two_axes():
    f = lambda p, x: x @ p["a"] + x.T @ p["b"] + lax.dot_general(x, p["c"], (((0,), (0,)), ((), ())))
    by_hand = lambda p, x: (
        hadamard(x, (1,)) @ p["a"]
        + hadamard(x.T, (1,)) @ p["b"]
        + lax.dot_general(hadamard(x, (0,)), p["c"], (((0,), (0,)), ((), ())))
    )
    params, x = {name: normal(i, 24, 5) for i, name in enumerate("abc")}, with_outliers(9, 24, 24)
    want = quantize_fn(by_hand, [Rule("*", W4, A8)])({name: hadamard(w, (0,)) for name, w in params.items()}, x)
    assert_same_bits(quantize_fn(f, [ROTATED("*", W4, A8)])(params, x), want)


def test_the_plan_says_what_is_rotated():
    q = quantize_fn(DOT, [ROTATED("w", W4)])
    plan = q.plan({"w": normal(1, 24, 5)}, X)
    assert [site.rotated for site in plan] == [(1,), (0,)]
    assert str(plan).count(", rotated") == 2


def test_large_channels_cost_less_once_they_are_rotated():
    params = {"w": normal(1, 64, 32)}
    x = with_outliers(2, 100, 64)
    error = lambda q: float(np.square(q(params, x) - x @ params["w"]).sum())
    plain, rotated = (quantize_fn(DOT, [rule("w", weight_spec(8), A4)]) for rule in (Rule, ROTATED))
    assert error(rotated) < error(plain) / 4


# What observes, solves and reports sees the rotated operands


@pytest.mark.slow
def test_what_is_observed_is_rotated():
    params, x = {"w": normal(1, 24, 5)}, with_outliers(2, 50, 24)
    q, plain = quantize_fn(DOT, [ROTATED("w", W4, A8)]), quantize_fn(DOT, [Rule("w", W4, A8)])
    turned = np.asarray(hadamard(x, (1,)))
    assert q.observe(params, x)["w:input"].x_max == turned.max()
    gram = q.observe(params, x, gram=True)["w"].products
    want = matrix(24) @ np.asarray(plain.observe(params, x, gram=True)["w"].products, float) @ matrix(24)
    np.testing.assert_allclose(gram, want, atol=1e-5 * np.abs(want).max())
    seen = {}
    value = q.at_sites(lambda info, x: seen.setdefault(info.name, x))(params, x)
    np.testing.assert_array_equal(seen["w:input"], turned)
    np.testing.assert_array_equal(seen["w"], hadamard(params["w"], (0,)))
    np.testing.assert_allclose(value, x @ params["w"], rtol=1e-4, atol=1e-4)
    found = report(q, params, x, grams={"w": q.observe(params, x, gram=True)["w"]}, loss=lambda y: (y**2).mean())
    lost = x @ (rounded(q, params, x, None, (0,)) - params["w"])
    np.testing.assert_allclose(found["w"].layer_error, (lost**2).sum() / ((x @ params["w"]) ** 2).sum(), rtol=1e-3)
    assert found["w"].levels == 15
    np.testing.assert_allclose(found["w"].change, found["w"].predicted, rtol=0.1)
    turned_w = np.asarray(hadamard(params["w"], (0,)))
    assert found["w"].max_error == np.abs(fake_quant(turned_w, weight_spec(4, channel_axis=1)) - turned_w).max()
    alone = quantize_fn(DOT, [ROTATED("w", W4)])(params, x)
    change = np.square(alone).mean() - np.square(x @ params["w"]).mean()
    np.testing.assert_allclose(found["w"].change, change, rtol=1e-2)
    np.testing.assert_allclose(found["w"].by_bits[4], change, rtol=1e-2)


def rounded(q, params, x, qparams, axes):
    """The weight in float that has the effect of the rotated integers."""
    integers = dataclasses.replace(q.freeze(params, x, qparams=qparams)["w"], frozen=None)
    return hadamard(dequantize(integers), axes)


@pytest.mark.slow
def test_scales_are_of_the_rotated_weight():
    """Of min-max, and of the search by the layer's error: as for the function with the rotation written down."""
    params, x = {"w": normal(1, 24, 5) * np.linspace(0.1, 3, 24, dtype=F)[:, None]}, with_outliers(2, 50, 24)
    q, want = quantize_fn(DOT, [ROTATED("w", W4)]), quantize_fn(rotating_input(DOT), [Rule("w", W4)])
    turned = {"w": hadamard(params["w"], (0,))}
    np.testing.assert_array_equal(q.init_qparams(params, x)["w"].scale, want.init_qparams(turned, x)["w"].scale)
    got = solve.ranges(params, q, q.observe(params, x, gram=True), x)["w"]
    expected = solve.ranges(turned, want, want.observe(turned, x, gram=True), x)["w"]
    np.testing.assert_array_equal(got.scale, expected.scale)
    plain = quantize_fn(DOT, [("w", W4)])
    assert (got.scale != solve.ranges(params, plain, plain.observe(params, x, gram=True), x)["w"].scale).any()


GRIDS = {
    "w4": W4,
    "w3 in groups": weight_spec(3, block_size=8),
    "affine": QuantSpec(bits=4, symmetric=False, granularity=PerBlock(None, 8)),
    "mxfp4": mxfp4_spec(None),
    "nvfp4": nvfp4_spec(None),
}


@cases("solver", ["gptq", "adaround"])
@cases("grid", list(GRIDS))
def test_what_is_solved_is_served(grid, solver):
    params, x = {"w": normal(1, 64, 6)}, with_outliers(2, 200, 64)
    q = quantize_fn(DOT, [ROTATED("w", GRIDS[grid])])
    grams = q.observe(params, x, gram=True)
    qparams = solve.ranges(params, q, grams, x)
    found = []
    solved = getattr(solve, solver)(params, q, grams, x, qparams=qparams, progress=lambda *said: found.append(said))
    error = np.square(q(solved, x, qparams=qparams) - x @ params["w"]).sum() / np.square(x @ params["w"]).sum()
    ((_, before, after),) = found
    np.testing.assert_allclose(error, after, rtol=1e-2)
    assert after < 0.9 * before
    np.testing.assert_allclose(q.observe(solved, x, with_value=True)[0], x @ solved["w"])
    frozen = q.freeze(solved, x, qparams=qparams)
    assert_same_bits(q(frozen, x, qparams=qparams), q(solved, x, qparams=qparams))
    at_once = getattr(solve, solver)(params, q, grams, x, qparams=qparams, freeze=True)
    assert_same_bits(at_once["w"].values, frozen["w"].values)


@pytest.mark.slow
def test_turns_of_a_scan_and_what_is_lost_of_them():
    f, _, params, _ = FUNCTIONS["scan"]
    x = with_outliers(2, 100, 24)
    q = quantize_fn(f, [ROTATED("w", weight_spec(3))])
    grams, qparams = q.observe(params, x, gram=True), q.init_qparams(params, x)
    a, b = solve.low_rank(params, q, grams, x, rank=24, qparams=qparams)["w"]
    served = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, a @ b + rounded(q, params, x, qparams, (1,)))[0]
    np.testing.assert_allclose(served, f(params, x), atol=1e-4)
    solved = solve.gptq(params, q, grams, x, qparams=qparams)
    assert_same_bits(q(q.freeze(solved, x, qparams=qparams), x, qparams=qparams), q(solved, x, qparams=qparams))


@pytest.mark.slow
def test_biases_make_up_for_what_rotated_weights_lose():
    f = lambda p, x: x @ p["w"] + p["b"][None]
    params, x = {"w": normal(1, 24, 5), "b": normal(3, 5)}, with_outliers(2, 50, 24) + F(3)
    q = quantize_fn(f, [ROTATED("w", weight_spec(3))])
    grams, qparams = q.observe(params, x, gram=True), q.init_qparams(params, x)
    off = lambda new: np.abs(np.asarray(q(new, x, qparams=qparams) - f(params, x)).mean(0)).max()
    for solved in (None, q.freeze(params, x, qparams=qparams), solve.gptq(params, q, grams, x, qparams=qparams)):
        said = []
        note = lambda *of, said=said: said.append(of)
        corrected = solve.bias_correct(params, q, grams, x, qparams=qparams, solved=solved, progress=note)
        lost = q(params if solved is None else solved, x, qparams=qparams) - f(params, x)
        np.testing.assert_allclose(said[0][2], np.square(lost).sum() / np.square(x @ params["w"]).sum(), rtol=1e-3)
        assert off(params if solved is None else solved) > 0.02
        assert off(corrected) < 1e-4


@pytest.mark.slow
def test_narrow_weights_that_would_lose_levels():
    params, x = {"w": jnp.asarray(normal(1, 64, 32), jnp.bfloat16)}, jnp.asarray(normal(2, 100, 64), jnp.bfloat16)
    coarse, fine = (quantize_fn(DOT, [ROTATED("w", spec)]) for spec in (W4, QuantSpec(format="float8_e4m3fn")))
    solved = lambda q: solve.gptq(params, q, q.observe(params, x, gram=True), x, qparams=q.init_qparams(params, x))
    assert solved(coarse)["w"].dtype == jnp.bfloat16
    with pytest.raises(
        ValueError, match=r"At 'w'.*bfloat16 and rotated: .* levels would be others.*Cast it to float32"
    ):
        solved(fine)


def test_a_smoothed_function_is_not_rotated_yet():
    params = {"gain": normal(0, 24), "w": normal(1, 24, 5)}
    q = quantize_fn(lambda p, x: (x * p["gain"][None]) @ p["w"], [ROTATED("w", W4)])
    with pytest.raises(ValueError, match=r"At 'w'.*rotated, which mixes the channels.*Smooth by a `q`"):
        solve.smooth(params, q, q.observe(params, X, gram=True), X)


# Devices


@pytest.mark.slow
@pytest.mark.bits
@cases("kind", ["Auto", "Explicit"], ["Auto"])
def test_on_several_devices(kind):
    mesh = jax.make_mesh((4,), ("data",), (getattr(jax.sharding.AxisType, kind),))
    params, x = {"w": normal(1, 32, 8)}, with_outliers(0, 8, 32)
    f = lambda p, x: jnp.einsum("tk,kn->tn", x, p["w"], out_sharding=None if kind == "Auto" else P())
    q = quantize_fn(f, [ROTATED("w", W4, A8)])
    plain = quantize_fn(DOT, [ROTATED("w", W4, A8)])
    qparams = plain.init_qparams(params, x)
    want, frozen = plain(params, x, qparams=qparams), plain.freeze(params, x, qparams=qparams)
    put = lambda v, spec: jax.device_put(v, jax.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        for of_w, of_x in [(P("data"), P(None, "data")), (P(None, "data"), P()), (P(), P("data"))]:
            w, rows = {"w": put(params["w"], of_w)}, put(x, of_x)
            assert_same_bits(jax.jit(q)(w, rows, qparams=qparams), want)
            assert_same_bits(q.freeze(w, rows, qparams=qparams)["w"].values, frozen["w"].values)


@pytest.mark.slow
def test_rows_inside_shard_map_are_rotated_as_they_were_frozen():
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    f = lambda p, x: lax.psum(x @ p["w"], "data")
    whole, part = quantize_fn(DOT, [ROTATED("w", W4)]), quantize_fn(f, [ROTATED("w", W4)])
    frozen = whole.freeze({"w": normal(1, 48, 8)}, normal(0, 4, 48))
    specs = jax.tree.map(lambda v: P("data") if v.shape[0] == 48 else P(), frozen), P(None, "data")
    with pytest.raises(ValueError, match=r"At 'w'.*rotated in blocks of 16 rows, and by the rule it is .* of 8 rows"):
        jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P())(frozen, normal(0, 4, 48))


# What is refused


NORMALIZED = jax.custom_jvp(lambda w, x: x @ w)
NORMALIZED.defjvp(lambda v, t: (NORMALIZED(*v), t[1] @ v[0] + v[1] @ t[0]))
REFUSED = {
    "odd": (lambda p, x: x[:, :5] @ p["w"][:5], [ROTATED("w", W4)], "even number of products.*got 5"),
    "part": (lambda p, x: x[:, :4] @ p["w"][:4], [ROTATED("w", W4)], "whole and alone, got an operand of shape"),
    "convolution": (
        lambda p, x: lax.conv(x.T[None], p["w"].T[:, :, None], (1,), "VALID"), [ROTATED("w", W4)],
        "`rotate` is for dots, got 'conv_general_dilated'",
    ),
    "named value": (
        lambda p, x: quant_point(x, "x") @ p["w"],
        [Rule("x", activation=A8, kind="value"), ROTATED("w", W4, A8)], "quantized where it is named.*rotated here",
    ),
    "author's derivative": (
        lambda p, x: NORMALIZED(p["w"], x), [ROTATED("w", W4, custom="keep")], 'Say custom="inline", or drop `rotate`',
    ),
    "two ways": (
        lambda p, x: x @ p["w"] @ p["w"].T, [ROTATED("w", QuantSpec(bits=4))],
        "rotated in two ways",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rotated(name):
    f, rules, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        quantize_fn(f, rules).plan({"w": normal(1, 24, 24)}, X)


def test_rules_that_do_not_agree():
    scores = lambda p, x: quant_point(x, "a") @ quant_point(x * p[None], "b").T
    rules = [ROTATED("a", activation=A8, kind="act_act"), Rule("b", activation=A8, kind="act_act")]
    with pytest.raises(ValueError, match="one operand is rotated by its rule and the other is not"):
        quantize_fn(scores, rules).plan(normal(1, 24), X)


@pytest.mark.parametrize(
    ("error", "match", "given"),
    [
        (ValueError, "`rotate` must be one of hadamard, got 'random'", {"rotate": "random"}),
        (TypeError, "`rotate` must be one of hadamard, got bool", {"rotate": True}),
        (ValueError, "`everywhere` .*got it with rotate='hadamard'", {"rotate": "hadamard", "everywhere": True}),
        (
            ValueError,
            "`rotate` are of products.*'hadamard' with kind=",
            {"rotate": "hadamard", "kind": "value"},
        ),
    ],
)
def test_bad_rules(error, match, given):
    with pytest.raises(error, match=match):
        Rule("w", **given)


def test_only_a_function_can_rotate():
    with pytest.raises(ValueError, match="rotate='hadamard'"):
        fake_quant_params({"w": normal(1, 24, 5)}, [ROTATED("w", W4)])


def test_rotated_integers_serve_nothing_else():
    params = {"w": normal(1, 24, 5)}
    rotated, plain = quantize_fn(DOT, [ROTATED("w", W4)]), quantize_fn(DOT, [("w", W4)])
    frozen, others = rotated.freeze(params, X), plain.freeze(params, X)
    with pytest.raises(ValueError, match=r"At 'w'.*rotated in blocks of 8 rows, and by the rule it is not rotated"):
        plain(frozen, X)
    with pytest.raises(ValueError, match=r"At 'w'.*not rotated, and by the rule it is rotated in blocks of 8 rows"):
        rotated(others, X)
    with pytest.raises(ValueError, match=r"At 'w'.*not rotated"):
        rotated({"w": quantize(params["w"], weight_spec(4, channel_axis=1))}, X)
    without = quantize_fn(DOT, [Rule("w", None)])
    for f in (without, quantize_fn(lambda p, x: jnp.tanh(p["w"]), [Rule("*", W4, optional=True, kind="captured")])):
        with pytest.raises(ValueError, match=r"At 'w'.*frozen by a rule that rotates its rows"):
            f(frozen, X)
    with pytest.raises(ValueError, match="was frozen by a rule with rotate="):
        dot_general(X, frozen["w"], (((1,), (0,)), ((), ())))
