# SPDX-License-Identifier: Apache-2.0
"""Functions with rotated inputs: against NumPy, against the rotation written by hand, and what is refused."""

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
    PerToken,
    QuantSpec,
    Rule,
    activation_spec,
    dequantize,
    load,
    quant_point,
    quantize_fn,
    save,
    solve,
    weight_spec,
)
from jaxquant.solve._hadamard import block_of, hadamard

F = np.float32
W4, A4 = weight_spec(4), activation_spec(4, granularity=PerToken())
A8 = activation_spec(8)
DOT = lambda p, x: x @ p["w"]


def quantized(f, rules, params, *args, patterns="*"):
    """The function with rotated inputs, quantized; and its params."""
    g = solve.with_rotation(f, patterns)
    return quantize_fn(g, rules), g.init(params, *args)


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


@pytest.mark.parametrize(("shape", "axes"), [((5, 16), (1,)), ((24, 3), (0,)), ((2, 4, 3, 6), (3, 1)), ((5, 6), (-1,))])
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
    whole = np.asarray(params["w"], np.float64)
    q, params = quantized(FLOAT16[f], [Rule("w", weight_spec(8), **FLOAT16_RULES[rule])], params, x)
    frozen, want = q.freeze(params, x), np.asarray(x, np.float64) @ whole
    assert_same_bits(q(frozen, x), q(params, x))
    np.testing.assert_allclose(q(params, x), want, atol=0.02 * np.abs(want).max())
    assert frozen["w"].dtype == params["w"].dtype == jnp.float16
    sum_of = lambda params, x: q(params, x).astype(F).sum() / 8  # so that float16 holds the gradient
    of_params, of_x = jax.grad(sum_of, (0, 1))(params, x)
    turned = np.asarray(hadamard(np.asarray(x, F), (1,)))
    for got, want in ((of_params["w"][:, 0], turned.sum(0) / 8), (of_x[0], whole.sum(1) / 8)):
        np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())
    assert_same_bits(jax.grad(sum_of, 1)(frozen, x), of_x)


LAYOUTS = {
    "rows": (DOT, (24, 5)), "columns": (lambda p, x: x @ p["w"].T, (5, 24)),
    "merged": (lambda p, x: x @ p["w"].reshape(24, 5), (4, 6, 5)),
    "heads": (lambda p, x: jnp.einsum("bk,nhk->bnh", x, p["w"]), (5, 2, 24)),
}  # fmt: skip


@cases("layout", LAYOUTS)
def test_what_is_frozen_is_an_array_as_any_other(layout):
    f, shape = LAYOUTS[layout]
    params, g = {"w": normal(1, *shape)}, solve.with_rotation(f, "w")
    turned = g.init(params, X)
    np.testing.assert_allclose(g.init(turned, X)["w"], params["w"], atol=1e-5)
    np.testing.assert_allclose(g(turned, X), f(params, X), atol=1e-4)
    q = quantize_fn(g, [Rule("w", W4)])
    frozen = q.freeze(turned, X)
    np.testing.assert_allclose(g({"w": dequantize(frozen["w"])}, X), q(frozen, X), atol=1e-4)


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
    want = quantize_fn(by_hand, [Rule("*", weight, activation)])
    turned = jax.jit(lambda params: {path: hadamard(w, axes) for path, w in params.items()})(params)
    q, made = quantized(f, [Rule("*", weight, activation)], params, X)
    jax.tree.map(assert_same_bits, made, turned)
    value, pull = jax.vjp(q, turned, X)
    expected, pull_expected = jax.vjp(want, turned, X)
    if None in SPECS[specs]:  # a product in float, whose bits are those of the program that it is in
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
    else:
        assert_same_bits(value, expected)
    assert_same_bits(q(turned, X), jax.jit(q)(turned, X))
    g = normal(9, *value.shape)
    (of_params, of_x), (of_turned, of_input) = pull(g), pull_expected(g)
    for path, gradient in of_turned.items():
        np.testing.assert_allclose(of_params[path], gradient, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_x, of_input, rtol=1e-5, atol=1e-4)
    # The float function itself is what it was, for any observer.
    np.testing.assert_allclose(q.observe(turned, X, with_value=True)[0], f(params, X), rtol=1e-5, atol=1e-4)
    assert len(q.plan(turned, X)) == len(want.plan(turned, X))


@pytest.mark.bits
@cases("name, specs", WAYS, [("tied", "W4A4")])
def test_what_is_frozen_serves_the_same_bits(name, specs, tmp_path):
    (f, _, params, _), (weight, activation) = FUNCTIONS[name], SPECS[specs]
    q, params = quantized(f, [Rule("*", weight, activation)], params, X)
    qparams = q.init_qparams(params, X)
    want, frozen = q(params, X, qparams=qparams), q.freeze(params, X, qparams=qparams)
    assert_same_bits(q(frozen, X, qparams=qparams), want)
    save(tmp_path / "model.npz", frozen)
    loaded = load(tmp_path / "model.npz")
    assert jax.tree.structure(loaded) == jax.tree.structure(frozen)
    assert_same_bits(q(loaded, X, qparams=qparams), want)


def test_operands_of_data_are_rotated_both():
    scores = lambda p, x: quant_point(x * p["q"][None], "a") @ quant_point(x * p["k"][None], "b").T
    by_hand = lambda p, x: hadamard(x * p["q"][None], (1,)) @ hadamard(x * p["k"][None], (1,)).T
    params = {"q": normal(1, 24), "k": normal(2, 24)}
    rules = [Rule("*", activation=A8, kind="act_act")]
    q = quantize_fn(solve.with_rotation(scores, "a", kind="act_act"), rules)
    assert_same_bits(q(params, X), quantize_fn(by_hand, rules)(params, X))
    error = lambda y: np.square(y - scores(params, X)).sum()
    assert error(q(params, X)) < error(quantize_fn(scores, rules)(params, X)) / 2


def test_an_input_is_rotated_once_for_all_that_take_it():
    f, _, params, _ = FUNCTIONS["shared"]
    q, turned = quantized(f, [Rule("*", W4, A8)], params, X)
    assert [site.entry for site in q.plan(turned, X)] == ["q:input", "q", "q:input", "k"]
    loops = str(jax.make_jaxpr(lambda p, x: q(p, x, qparams={}))(turned, X)).count("name=_butterfly")
    assert loops == 1  # of x
    mixed, turned = quantized(f, [Rule("*", W4, A8)], params, X, patterns="q")
    assert [site.entry for site in mixed.plan(turned, X)] == ["q:input", "q", "k:input", "k"]
    want = quantize_fn(lambda p, x: hadamard(x, (1,)) @ p["q"] + jnp.tanh(x @ p["k"]), [Rule("*", W4, A8)])
    assert_same_bits(mixed(turned, X), want(params | {"q": hadamard(params["q"], (0,))}, X))


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
    q, turned = quantized(f, [Rule("*", W4, A8)], params, x)
    assert_same_bits(q(turned, x), want)


def test_large_channels_cost_less_once_they_are_rotated():
    params = {"w": normal(1, 64, 32)}
    x = with_outliers(2, 100, 64)
    error = lambda q, w: float(np.square(q(w, x) - x @ params["w"]).sum())
    rules = [Rule("w", weight_spec(8), A4)]
    assert error(*quantized(DOT, rules, params, x)) < error(quantize_fn(DOT, rules), params) / 4


# What observes and solves


@cases("solver", ["gptq", "adaround"])
def test_what_is_solved_is_served(solver):
    params, x = {"w": normal(1, 64, 6)}, with_outliers(2, 200, 64)
    q, params = quantized(DOT, [Rule("w", weight_spec(3, block_size=8))], params, x)
    grams = q.observe(params, x, gram=True)
    turned = np.asarray(hadamard(x, (1,)), float)
    np.testing.assert_allclose(grams["w"].products, turned.T @ turned, atol=1e-5 * np.abs(turned.T @ turned).max())
    qparams, found = solve.ranges(params, q, grams, x), []
    solved = getattr(solve, solver)(params, q, grams, x, qparams=qparams, progress=lambda *said: found.append(said))
    ((_, before, after),) = found
    assert after < 0.9 * before
    frozen = q.freeze(solved, x, qparams=qparams)
    assert_same_bits(q(frozen, x, qparams=qparams), q(solved, x, qparams=qparams))


def test_factors_do_not_pass_a_rotation():
    params = {"gain": normal(0, 24), "w": normal(1, 24, 5)}
    q, params = quantized(lambda p, x: (x * p["gain"][None]) @ p["w"], [Rule("w", W4)], params, X, patterns="w")
    with pytest.raises(ValueError, match=r"At 'w': no factor .* come from .* in '_butterfly'"):
        solve.smooth(params, q, q.observe(params, X, gram=True), X, unfolded="error")


# Devices


@pytest.mark.slow
@pytest.mark.bits
@cases("kind", ["Auto", "Explicit"], ["Auto"])
def test_on_several_devices(kind):
    mesh = jax.make_mesh((4,), ("data",), (getattr(jax.sharding.AxisType, kind),))
    params, x = {"w": normal(1, 32, 8)}, with_outliers(0, 8, 32)
    f = lambda p, x: jnp.einsum("tk,kn->tn", x, p["w"], out_sharding=None if kind == "Auto" else P())
    g, rules = solve.with_rotation(f, "w"), [Rule("w", W4, A8)]
    q, (plain, turned) = quantize_fn(g, rules), quantized(DOT, rules, params, x)
    original, params = params, turned
    qparams = plain.init_qparams(params, x)
    want, frozen = plain(params, x, qparams=qparams), plain.freeze(params, x, qparams=qparams)
    put = lambda v, spec: jax.device_put(v, jax.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        for of_w, of_x in [(P("data"), P(None, "data")), (P(None, "data"), P()), (P(), P("data"))]:
            w, rows = {"w": put(params["w"], of_w)}, put(x, of_x)
            assert_same_bits(g.init({"w": put(original["w"], of_w)}, rows)["w"], params["w"])
            assert_same_bits(jax.jit(q)(w, rows, qparams=qparams), want)
            assert_same_bits(q.freeze(w, rows, qparams=qparams)["w"].values, frozen["w"].values)


@pytest.mark.slow
def test_a_shard_of_the_rows_is_refused():
    """It would be rotated in blocks of 8, and all rows were in blocks of 16."""
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    g = solve.with_rotation(DOT, "w")
    of = lambda split: jax.shard_map(g, mesh=mesh, in_specs=(P("data") if split else P(), P()), out_specs=P())
    params, x = {"w": normal(1, 48, 8)}, normal(0, 4, 48)
    np.testing.assert_allclose(of(False)(g.init(params, x), x), x @ params["w"], atol=1e-4)
    with pytest.raises(ValueError, match=r"At 'w'.*a shard, which varies over the mesh axes \['data'\]"):
        jax.shard_map(
            lambda p, x: lax.psum(g(p, x), "data"), mesh=mesh, in_specs=(P("data"), P(None, "data")), out_specs=P()
        )(params, x)


# What is refused


NORMALIZED = jax.custom_jvp(lambda w, x: x @ w)
NORMALIZED.defjvp(lambda v, t: (NORMALIZED(*v), t[1] @ v[0] + v[1] @ t[0]))
REFUSED = {
    "odd": (lambda p, x: x[:, :5] @ p["w"][:5], "even number of products.*got 5"),
    "part": (lambda p, x: x[:, :4] @ p["w"][:4], "whole and alone, got an operand of shape"),
    "convolution": (
        lambda p, x: lax.conv(x.T[None], p["w"].T[:, :, None], (1,), "VALID"),
        "a rotation is for dots, got 'conv_general_dilated'",
    ),
    "author's derivative": (lambda p, x: NORMALIZED(p["w"], x), "derivative of its own.*Take its path out"),
    "two ways": (lambda p, x: x @ p["w"] @ p["w"].T, "sum along different axes of it"),
    "read elsewhere": (
        lambda p, x: x @ p["w"] + jnp.tanh(p["w"])[:1], "also read by 'tanh'.*nothing rotates them back",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rotated(name):
    f, match = REFUSED[name]
    g, params = solve.with_rotation(f, "w"), {"w": normal(1, 24, 24)}
    for called in (g, g.init):
        with pytest.raises(ValueError, match=match):
            called(params, X)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_a_weight_that_a_branch_may_choose_for_another_op_is_refused(sign):
    """Of which the plan knows nothing; its rows would be rotated there, and no inputs."""
    f = lambda p, x: lax.cond(x.sum() > 0, lambda: p["w"], lambda: p["v"]) @ p["u"] + x @ p["w"]
    params, x = {name: normal(i, 8, 8) for i, name in enumerate("wvu")}, sign * normal(9, 8, 8)
    with pytest.raises(ValueError, match=r"At 'w'.*also read by 'cond', for which it is another one now"):
        solve.with_rotation(f, "w")(params, x)


def test_bad_arguments():
    with pytest.raises(ValueError, match="`kind` must be one of weight, act_act, got 'value'"):
        solve.with_rotation(DOT, "w", kind="value")
    with pytest.raises(TypeError, match="`f` must be a function, got int"):
        solve.with_rotation(1, "w")
    with pytest.raises(ValueError, match="'v', matched no site"):
        solve.with_rotation(DOT, "v")({"w": normal(1, 24, 5)}, X)
    with pytest.raises(TypeError, match="rotate"):
        Rule("w", rotate="hadamard")
