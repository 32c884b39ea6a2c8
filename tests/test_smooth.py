# SPDX-License-Identifier: Apache-2.0
"""Factors of channels that are moved into weights: the function stays, the errors of what is rounded become smaller."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uses
from inputs import dead, normal, ones
from jax import lax
from lanes import cases

from jaxquant import QuantSpec, Rule, activation_spec, float8_spec, quantize_fn, solve, weight_spec
from jaxquant.solve._smooth import _Taken
from jaxquant.typing import Gram

F = np.float32
W4, W8, A8 = weight_spec(4), weight_spec(8), activation_spec(8)
RULES = [Rule("**", W8, A8, optional=True)]


def over(v, x):
    return jnp.broadcast_to(v, x.shape)


def normed(x, gain):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * over(gain, x)


def relu_layer(x, p):
    y = x @ p["kernel"]
    return jax.nn.relu(y + over(p["bias"], y))


def heads(y, n=2):
    return y.reshape(*y.shape[:-1], n, -1)


def attended(q, k, v):
    scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    y = jnp.einsum("bhts,bshd->bthd", scores, v)
    return y.reshape(*y.shape[:2], -1)


def of_layers(params, x):
    """The layers of notebooks/05: both norms in one parameter, q, k and v in another."""

    def layer(x, p):
        q, k, v = map(heads, jnp.split(normed(x, p["norms"][0]) @ p["qkv"], 3, -1))
        x = x + attended(q, k, v) @ p["out"]
        return x + jax.nn.gelu(normed(x, p["norms"][1]) @ p["up"]) @ p["down"], None

    x, _ = lax.scan(layer, x, params["layers"])
    return normed(x, params["norm"]) @ params["head"]


def conv(x, w, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)


def convolutional(p, x):
    h = conv(x, p["c1"])
    axes = dict(axis=(0, 1, 2), keepdims=True)
    h = (h - h.mean(**axes)) * lax.rsqrt(h.var(**axes) + 1e-5) * over(p["scale"], h) + over(p["bias"], h)
    h = jax.nn.relu(h)
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    h = conv(h, p["c2"])
    h = conv(jax.nn.relu(h + over(p["b2"], h)), p["depthwise"], 6)
    return h.reshape(len(h), -1) @ p["dense"]


X = normal(0, 4, 6, 8)
LAYERS = {
    "norms": normal(1, 3, 2, 8), "qkv": normal(2, 3, 8, 24), "out": normal(3, 3, 8, 8), "up": normal(4, 3, 8, 16),
    "down": normal(5, 3, 16, 8),
}  # fmt: skip
SIZES = jnp.int32([10, 8, 6])


def qkv(p, x):
    h = normed(x, p["gain"])
    return attended(heads(h @ p["q"]), heads(h @ p["k"]), heads(h @ p["v"]))


def biased(p, x):
    h = normed(x, p["gain"])
    return (h + over(p["bias"], h)) @ p["w"]


def grouped_queries(p, x):
    k, v = (jnp.repeat(heads(x @ p[name]), 2, axis=2) for name in "kv")
    return attended(heads(x @ p["q"], 4), k, v) @ p["out"]


def gated(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def moved(h):
    h = jnp.stack([h, -h], -1).reshape(4, 6, 16)
    return jnp.tile(jnp.pad(h, ((0, 0), (0, 1), (0, 0)))[..., ::-1], (1, 1, 2))


def turn(x, p):
    return jnp.tanh((x * over(p["gain"], x)) @ p["w"]), None


# The function, its params, and the paths of those that change, without the weights whose inputs are the function's.
MODELS = {
    "a norm, and q, k, v": (
        qkv, {"gain": normal(1, 8), "q": normal(2, 8, 6), "k": normal(3, 8, 6), "v": normal(4, 8, 4)}, "gain q k v",
    ),
    "a norm with a bias": (
        biased, {"gain": normal(1, 8), "bias": normal(2, 8), "w": normal(3, 8, 5)}, "gain bias w",
    ),
    "a relu between, in nested dicts": (
        lambda p, x: relu_layer(x, p["params"]["a"]) @ p["params"]["b"]["kernel"],
        {"params": {"a": {"kernel": normal(1, 8, 16), "bias": normal(2, 16)}, "b": {"kernel": normal(3, 16, 5)}}},
        "params/a/kernel params/a/bias params/b/kernel",
    ),
    "a leaky relu, in a checkpoint": (
        jax.checkpoint(lambda p, x: jax.nn.leaky_relu(x @ p["a"]) @ p["b"]),
        {"a": normal(1, 8, 16), "b": normal(2, 16, 5)}, "a b",
    ),
    "the values of an attention": (
        lambda p, x: attended(*(heads(x @ p[name]) for name in "qkv")) @ p["out"],
        {"q": normal(1, 8, 8), "k": normal(2, 8, 8), "v": normal(3, 8, 8), "out": normal(4, 8, 5)}, "v out",
    ),
    "the values of grouped queries": (
        grouped_queries, {"q": normal(1, 8, 12), "k": normal(2, 8, 6), "v": normal(3, 8, 6), "out": normal(4, 12, 5)},
        "v out",
    ),
    "a gated layer": (gated, {"gate": normal(1, 8, 16), "up": normal(2, 8, 16), "down": normal(3, 16, 5)}, "up down"),
    "layers in a scan": (
        of_layers, {"layers": LAYERS, "norm": normal(6, 8), "head": normal(7, 8, 5)},
        "layers/norms layers/qkv layers/out layers/up norm head",
    ),
    "one norm for the turns of a scan": (
        lambda p, x: lax.scan(lambda x, w: (x + jnp.tanh(normed(x, p["gain"]) @ w), None), x, p["w"])[0],
        {"gain": normal(1, 8), "w": normal(2, 3, 8, 8)}, "gain w",
    ),
    "one layer for the turns of a scan": (
        lambda p, x: lax.scan(lambda x, _: (x + normed(x, p["gain"]) @ p["w"], None), x, None, length=3)[0],
        {"gain": normal(1, 8), "w": normal(2, 8, 8)}, "gain w",
    ),
    "two sources side by side": (
        lambda p, x: jnp.concatenate([x * over(p["gain"], x), jax.nn.relu(x @ p["a"])], -1) @ p["w"],
        {"gain": normal(1, 8), "a": normal(2, 8, 4), "w": normal(3, 12, 5)}, "gain a w",
    ),
    "a matrix for each head": (
        lambda p, x: jnp.einsum("bthd,hdo->btho", x[:, :, None] * over(p["gain"], jnp.ones((4, 6, 2, 8))), p["w"]),
        {"gain": normal(1, 2, 8), "w": normal(2, 2, 8, 5)}, "gain w",
    ),
    "experts": (
        lambda p, x: lax.ragged_dot(jax.nn.relu(lax.ragged_dot(x.reshape(-1, 8), p["a"], SIZES)), p["b"], SIZES),
        {"a": normal(1, 3, 8, 16), "b": normal(2, 3, 16, 5)}, "a b",
    ),
    "stacked, tiled, padded and turned": (
        lambda p, x: jnp.roll(moved(x * over(p["gain"], x)), 3, -1) @ p["w"],
        {"gain": normal(1, 8), "w": normal(2, 32, 5)}, "gain w",
    ),
    "parts of a parameter": (
        lambda p, x: sum((x * over(g, x)) @ w for g, w in zip(jnp.unstack(p["gain"]), (p["a"], p["b"]), strict=True)),
        {"gain": normal(1, 2, 8), "a": normal(2, 8, 5), "b": normal(3, 8, 5)}, "gain a b",
    ),
    "scans in a scan, backwards": (
        lambda p, x: lax.scan(lambda x, p: (lax.scan(turn, x, p)[0], None), x, p, reverse=True)[0],
        {"gain": normal(1, 2, 3, 8), "w": normal(2, 2, 3, 8, 8)}, "gain w",
    ),
    "the other half, where one passes nothing": (
        lambda p, x: ((x @ p["up"]) * jax.nn.sigmoid(x @ p["gate"])) @ p["down"],
        {"gate": normal(1, 8, 16), "up": normal(2, 8, 16), "down": normal(3, 16, 5)}, "up down",
    ),
}  # fmt: skip
IMAGES = normal(0, 2, 8, 8, 3)
CONVOLUTIONAL = {
    "c1": normal(1, 3, 3, 3, 4), "scale": normal(2, 4), "bias": normal(3, 4), "c2": normal(4, 3, 3, 4, 6),
    "b2": normal(5, 6), "depthwise": normal(6, 3, 3, 1, 6), "dense": normal(7, 96, 5),
}  # fmt: skip


def leaves(tree):
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in named}


def changed(before, after):
    before, after = leaves(before), leaves(after)
    return {path for path in before if not np.array_equal(before[path], after[path])}


def same_function(f, params, new, *args):
    f = jax.jit(f)
    want, got = f(params, *args), f(new, *args)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(np.abs(want).max()))


def error(q, f, params, new, x, **kwargs):
    """Of the quantized function, relative."""
    want = np.asarray(jax.jit(f)(params, x), np.float64)
    return float(np.square(q(new, x, **kwargs) - want).sum() / np.square(want).sum())


def smoothed(f, params, x, rules=RULES, **kwargs):
    q = quantize_fn(f, rules)
    return solve.smooth(params, q, q.observe(params, x, gram=True), x, **kwargs)


@cases("name", list(MODELS), ["layers in a scan"])
def test_the_function_stays(name):
    f, params, expected = MODELS[name]
    new = smoothed(f, params, X, alpha=0.5)
    assert changed(params, new) == set(expected.split())
    same_function(f, params, new, X)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, params)


@pytest.mark.slow
def test_of_convolutions():
    """Through a pooling, a depthwise convolution, which takes factors and passes them, and a flattened image."""
    new = smoothed(convolutional, CONVOLUTIONAL, IMAGES, alpha=0.5)
    assert changed(CONVOLUTIONAL, new) == {"scale", "bias", "c2", "b2", "depthwise", "dense"}
    same_function(convolutional, CONVOLUTIONAL, new, IMAGES)


# Of the ways in which functions use parameters, those whose weights have Grams; and which weights are folded.
USED = {
    "plain": "v w", "one value in several ops": "q k v", "passed on in a loop": "", "while": "", "cond": "",
    "over time": "in", "over layers": "out up", "over layers in blocks": "", "per token": "w", "kept": "w",
    "inlined": "w", "through an identity of an author": "w", "jit and checkpoint and vmap": "w", "convolution": "",
}  # fmt: skip


@pytest.mark.slow
@cases("name", list(USED), ["over layers"])
def test_no_way_of_using_parameters_changes(name):
    """With a factor for each input of the function, so that there is something to fold into."""
    f, params, rules, _ = uses.USES[name]
    gained = lambda p, x: f({path: v for path, v in p.items() if path != "gain"}, x * over(p["gain"], x))
    params = {**params, "gain": 1 + 0.1 * jnp.arange(8.0)}
    q, said = quantize_fn(gained, rules), []
    grams = {path: gram for path, gram in q.observe(params, uses.X, gram=True).items() if np.all(gram.rows > 0)}
    new = solve.smooth(params, q, grams, uses.X, alpha=0.5, progress=lambda *v: said.append(v))
    assert {path for path, alpha, _, _ in said if alpha is not None} == set(USED[name].split())
    assert {path for path, _, _, _ in said} == set(grams)
    same_function(gained, params, new, uses.X)


def geometric(a, w, alpha):
    s = a**alpha / w ** (1 - alpha)
    return s / np.exp(np.log(s).mean())


@cases("alpha", [0, 0.3, 1])
def test_the_factors(alpha):
    """As NumPy has them: of the inputs of q, k and v together, and of what the gain is divided by."""
    f, params, _ = MODELS["a norm, and q, k, v"]
    new, old = leaves(smoothed(f, params, X, alpha=alpha)), leaves(params)
    inputs = np.asarray(normed(X, params["gain"]), np.float64).reshape(-1, 8)
    w = np.abs(np.concatenate([old[name] for name in "qkv"], 1)).max(1)
    s = geometric(np.sqrt((inputs**2).mean(0)), w, alpha)
    np.testing.assert_allclose(old["gain"] / new["gain"], s, rtol=1e-5)
    for name in "qkv":
        np.testing.assert_allclose(new[name] / old[name], np.broadcast_to(s[:, None], old[name].shape), rtol=1e-5)


@pytest.mark.slow
def test_each_turn_of_a_scan_has_factors_of_its_own():
    params = {"layers": LAYERS, "norm": normal(6, 8), "head": normal(7, 8, 5)}
    new, old = leaves(smoothed(of_layers, params, X, alpha=0)), leaves(params)
    s = np.stack([geometric(1, np.abs(old["layers/up"][i]).max(1), 0) for i in range(3)])
    np.testing.assert_allclose(old["layers/norms"][:, 1] / new["layers/norms"][:, 1], s, rtol=1e-5)
    assert np.abs(s[0] / s[1] - 1).max() > 0.1


@pytest.mark.slow
def test_heads_that_share_a_value_share_its_factor():
    f, params, _ = MODELS["the values of grouped queries"]
    new, old = leaves(smoothed(f, params, X, alpha=0)), leaves(params)
    rows = np.abs(old["out"]).max(1).reshape(2, 2, 3).max(1).ravel()  # two heads of queries for each of values
    np.testing.assert_allclose(old["v"][0] / new["v"][0], geometric(1, rows, 0), rtol=1e-5)


@pytest.mark.slow
def test_the_moments_of_what_was_divided():
    s, ids = jax.device_put(np.array([2, 0.5], F)), np.array([0, 1, -1, 0])
    of = lambda x: Gram(x.T @ x, jnp.float32(len(x)), x.sum(0))
    x = normal(1, 6, 4)
    got = _Taken(x, of(x), ids).divided(s)
    jax.tree.map(lambda v, w: np.testing.assert_allclose(v, w, rtol=1e-6), got, of(x / jnp.array([[2.0, 0.5, 1, 2]])))


def test_channels_that_are_0_stay():
    params = {"gain": dead(np.ones(8, F), 2), "w": dead(normal(1, 8, 5), 5)}
    f = lambda p, x: (x * over(p["gain"], x)) @ p["w"]
    new = smoothed(f, params, X, alpha=0.5)
    ratio = np.asarray(new["w"] / params["w"])[:, 0]
    assert ratio[2] == 1
    assert new["gain"][5] == 1
    others = np.delete(ratio, [2, 5])
    np.testing.assert_allclose(np.log(others).mean(), 0, atol=1e-6)
    assert np.all(np.abs(others - 1) > 1e-3)


# What cannot be folded


def with_residual(p, x):
    h = normed(x, p["gain"])
    return h + h @ p["w"]


def tied(p, x):
    tokens = jnp.int32([0, 5, 3])
    return normed(p["w"][tokens], p["gain"]) @ p["w"].T


def two_uses(p, x):
    h = normed(x, p["gain"]) @ p["w"]
    return h @ p["w"]


GAIN = {"gain": normal(1, 8), "w": normal(2, 8, 8)}
REFUSED = {
    "gelu": (
        lambda p, x: jax.nn.gelu(normed(x, p["gain"])) @ p["w"], GAIN,
        "what would be divided or multiplied also goes into 'integer_pow', which passes no factor",
    ),
    "silu": (
        lambda p, x: jax.nn.silu(normed(x, p["gain"])) @ p["w"], GAIN,
        "also goes into 'logistic' in 'silu', which passes no factor",
    ),
    "a residual": (with_residual, GAIN, "also goes into 'add', beside a value that would not be divided alike"),
    "a result": (
        lambda p, x: (lambda h: (h, h @ p["w"]))(normed(x, p["gain"])), GAIN, "is also the result of the function",
    ),
    "a tied embedding": (tied, GAIN, "also goes into 'mul', with another value that would be divided"),
    "an argument": (lambda p, x: x @ p["w"], GAIN, "its inputs come from an argument of the function"),
    "a closed array": (lambda p, x: X @ p["w"], GAIN, "its inputs come from an array that the function closes over"),
    "a carry": (
        lambda p, x: lax.scan(lambda x, w: (x @ w, None), x, p["w"])[0], {"w": normal(2, 3, 8, 8)},
        "its inputs come from the carry of a scan",
    ),
    "a result of a scan": (
        lambda p, x: lax.scan(lambda x, g: (x, x * over(g, x)), x, p["gain"][None])[1][0] @ p["w"], GAIN,
        "its inputs come from the result of a scan",
    ),
    "a sum behind": (
        lambda p, x: (lambda h: h.sum(-1, keepdims=True) + h @ p["w"])(x * over(p["gain"], x)), GAIN,
        "also goes into 'reduce_sum', which mixes channels",
    ),
    "a relu of 6": (
        lambda p, x: jax.nn.relu6(x * over(p["gain"], x)) @ p["w"], GAIN,
        "its inputs come from 'min' in 'relu6' with a constant",
    ),
    "a factor for all channels": (
        lambda p, x: (x * over(p["g"], x)) @ p["w"], {"g": normal(1), "w": normal(2, 8, 8)},
        "which gives several channels one element",
    ),
    "another use of the weight": (two_uses, GAIN, "'w', which would be divided and multiplied"),
    "a cond": (
        lambda p, x: lax.cond(x[0, 0, 0] > 0, lambda: normed(x, p["gain"]) @ p["w"], lambda: x), GAIN,
        "it is inside a cond, a while loop or a shard_map",
    ),
    "a loop behind": (
        lambda p, x: (lambda h: lax.while_loop(lambda y: y.sum() < 9, lambda y: y + jnp.abs(h), x) + h @ p["w"])(
            normed(x, p["gain"])
        ), GAIN, "also goes into 'while', which passes no factor",
    ),
    "a loop of turns behind": (
        lambda p, x: (lambda h: lax.scan(lambda y, _: (y + h, None), x, None, length=2)[0] + h @ p["w"])(
            normed(x, p["gain"])
        ), GAIN, "also goes into 'add', beside a value that would not be divided alike",
    ),
    "a start of a loop": (
        lambda p, x: (lambda h: lax.scan(lambda y, _: (y + 1, None), h, None, length=2)[0] + h @ p["w"])(
            normed(x, p["gain"])
        ), GAIN, "is also the carry of a scan",
    ),
    "a padding that is not 0": (
        lambda p, x: jnp.pad(x * over(p["gain"], x), ((0, 0), (0, 1), (0, 0)), constant_values=1.0) @ p["w"], GAIN,
        "also goes into 'pad' in '_pad', with a value that would not be divided",
    ),
    "a cast to few bits": (
        lambda p, x: (x * over(p["gain"], x)).astype(jnp.float8_e4m3fn).astype(jnp.float32) @ p["w"], GAIN,
        "its inputs come out of 'convert_element_type', to float8_e4m3fn",
    ),
    "one input": (
        lambda p, x: (x[..., :1] * p["g"]) @ p["w"], {"g": normal(1, 1, 1, 1), "w": normal(2, 1, 8)},
        "it has one input alone",
    ),
}  # fmt: skip


@cases("name", list(REFUSED), ["a residual"])
def test_refuses(name):
    f, params, why = REFUSED[name]
    q = quantize_fn(f, [Rule("w", W8, A8, everywhere=name == "a tied embedding")])
    grams = q.observe(params, X, gram=True)
    with pytest.raises(ValueError, match=rf"At 'w': no factor of its inputs .*{why}.* Pass unfolded=\"leave\""):
        solve.smooth(params, q, grams, X, unfolded="error")
    said = []
    new = solve.smooth(params, q, grams, X, alpha=0.5, progress=lambda *v: said.append(v))
    assert changed(params, new) == set()
    ((path, alpha, before, after),) = said
    assert (path, alpha) == ("w", None)
    assert 0 < before == after


def test_refuses_what_is_integers_already():
    f, params, _ = MODELS["a relu between, in nested dicts"]
    q = quantize_fn(f, RULES)
    frozen = q.freeze(params, X)
    frozen["params"]["b"] = params["params"]["b"]
    name = "params/b/kernel"
    grams = {name: q.observe(params, X, gram=True)[name]}
    with pytest.raises(ValueError, match="'params/a/kernel', which is no array of floats"):
        solve.smooth(frozen, q, grams, X, unfolded="error")


# What it is worth


def outliers(seed=0):
    """Inputs of which two channels are 30 times as large, after a norm."""
    gain = np.where(np.isin(np.arange(32), (3, 17)), F(30), F(1))
    return {"gain": jax.device_put(gain), "w": normal(seed + 1, 32, 24)}, normal(seed, 64, 32)


def gained(p, x):
    return normed(x, p["gain"]) @ p["w"]


@pytest.mark.slow
def test_outliers_are_no_matter():
    params, x = outliers()
    q = quantize_fn(gained, [Rule("w", W8, A8)])
    plain = error(q, gained, params, params, x)
    assert error(q, gained, params, smoothed(gained, params, x), x) < plain / 10
    assert error(q, gained, params, smoothed(gained, params, x, alpha=0.5), x) < plain / 10


@pytest.mark.slow
def test_weights_alone():
    """As in AWQ: rows that meet large inputs are rounded more finely."""
    params, x = outliers()
    rules = [("w", W4)]
    q = quantize_fn(gained, rules)
    new = smoothed(gained, params, x, rules)
    assert error(q, gained, params, new, x) < error(q, gained, params, params, x) / 1.5


@cases("block", [None, 8])
def test_the_error_that_is_predicted_is_that_of_weights_alone(block):
    """Without quantized inputs the prediction is no model: it is the error on these batches."""
    params, x = outliers()
    rules = [("w", weight_spec(4, block_size=block) if block else W4)]
    q, said = quantize_fn(gained, rules), []
    new = smoothed(gained, params, x, rules, progress=lambda *v: said.append(v))
    ((path, alpha, before, after),) = said
    assert path == "w"
    assert alpha is not None
    np.testing.assert_allclose(before, error(q, gained, params, params, x), rtol=1e-3)
    np.testing.assert_allclose(after, error(q, gained, params, new, x), rtol=1e-3)


@pytest.mark.slow
def test_the_error_of_inputs_that_is_predicted():
    """Uniform noise of a step, for a range of 4 times the root mean square of the largest channel."""
    params, x = outliers()
    said = []
    smoothed(gained, params, x, [Rule("w", weight_spec(16), A8)], alpha=0, progress=lambda *v: said.append(v))
    h = np.asarray(normed(x, params["gain"]), np.float64)
    w = np.asarray(params["w"], np.float64)
    step = 8 * np.sqrt((h**2).mean(0)).max() / 255
    want = step**2 / 12 * 64 * (w**2).sum() / ((h @ w) ** 2).sum()
    np.testing.assert_allclose(said[0][2], want, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [RULES, pytest.param([("**", W4)], marks=pytest.mark.slow)], ids=["w8a8", "w4"])
def test_the_search_predicts_nothing_worse(rules):
    params = {"layers": LAYERS, "norm": normal(6, 8), "head": normal(7, 8, 5)}
    said = {}
    smoothed(of_layers, params, X, rules, progress=lambda path, *v: said.update({path: v}))
    assert set(said) == {"head", "layers/qkv", "layers/out", "layers/up", "layers/down"}
    assert all(after <= before for _, before, after in said.values())
    assert said["layers/down"][0] is None
    assert all(after < before for alpha, before, after in said.values() if alpha is not None)
    assert any(alpha is not None for alpha, _, _ in said.values())


def test_no_change_is_among_what_is_tried():
    """With inputs and rows of equal sizes every alpha but one makes it worse."""
    signs = jnp.sign(normal(3, 8, 5))
    params = {"gain": ones(8), "w": signs}  # on the grid as it is
    f = lambda p, x: (x * over(p["gain"], x)) @ p["w"]
    said = []
    new = smoothed(f, params, X, [("w", W4)], progress=lambda *v: said.append(v))
    assert said == [("w", None, 0.0, 0.0)]
    assert changed(params, new) == set()
    assert changed(params, smoothed(f, params, X, [("w", W4)], alpha=1)) == {"gain", "w"}


@pytest.mark.slow
def test_floats_of_inputs_make_an_error_that_no_factor_changes():
    params, x = outliers()
    said = {"float8": [], None: []}
    smoothed(gained, params, x, [Rule("w", W8, float8_spec())], progress=lambda *v: said["float8"].append(v))
    smoothed(gained, params, x, [("w", W8)], progress=lambda *v: said[None].append(v))
    assert said["float8"] == said[None]


def partly(p, x):
    """Four of eight channels have a weight of their own beside."""
    h = x * over(p["gain"], x)
    return jnp.concatenate([h[..., :4] @ p["a"], h @ p["b"]], -1)


@pytest.mark.slow
def test_a_weight_that_takes_some_of_the_inputs():
    """The first set is a alone, with four rows of b; the second is both, with what was folded before in their Grams."""
    params = {"gain": normal(1, 8) * jnp.array([1.0, 50] * 4), "a": normal(2, 4, 5), "b": normal(3, 8, 5)}
    rules, said = [("*", W4)], {}
    new = smoothed(partly, params, X, rules, progress=lambda path, *v: said.update({path: v}))
    same_function(partly, params, new, X)
    assert list(said) == ["a", "b"]
    assert all(alpha is not None for alpha, _, _ in said.values())
    np.testing.assert_allclose(said["b"][2], error(quantize_fn(partly, rules), partly, params, new, X), rtol=1e-3)


@pytest.mark.slow
def test_under_jit():
    f, params, _ = MODELS["a norm, and q, k, v"]
    q = quantize_fn(f, RULES)
    grams = q.observe(params, X, gram=True)
    want = solve.smooth(params, q, grams, X)
    got = jax.jit(lambda params, grams: solve.smooth(params, q, grams, X))(params, grams)
    for path, v in leaves(want).items():
        np.testing.assert_allclose(leaves(got)[path], v, rtol=1e-4)


@pytest.mark.slow
def test_dtypes_stay():
    f, params, expected = MODELS["a relu between, in nested dicts"]
    params = jax.tree.map(lambda v: v.astype(jnp.bfloat16), params)
    new = smoothed(f, params, X.astype(jnp.bfloat16), alpha=0.5)
    assert {v.dtype for v in jax.tree.leaves(new)} == {jnp.dtype(jnp.bfloat16)}
    assert changed(params, new) == set(expected.split())


# Equal ranges


def three(p, x):
    h = relu_layer(relu_layer(x, p["a"]), p["b"])
    return h @ p["c"]["kernel"]


factors = lambda *args: np.exp(np.asarray(normal(*args)))
THREE = {
    "a": {"kernel": normal(1, 8, 16, scale=factors(2, 1, 16)), "bias": normal(3, 16)},
    "b": {"kernel": normal(4, 16, 12, scale=factors(5, 16, 1)), "bias": normal(6, 12)},
    "c": {"kernel": normal(7, 12, 5, scale=factors(8, 12, 1))},
}
PER_TENSOR = [Rule("**/kernel", QuantSpec(), QuantSpec())]


@pytest.mark.slow
def test_equalized_ranges():
    said = []
    q = quantize_fn(three, PER_TENSOR)
    new = solve.equalize(THREE, q, X, iterations=50, progress=lambda *v: said.append(v))
    same_function(three, THREE, new, X)
    for first, second in (("a", "b"), ("b", "c")):
        columns, rows = jnp.abs(new[first]["kernel"]).max(0), jnp.abs(new[second]["kernel"]).max(1)
        np.testing.assert_allclose(columns, rows, rtol=1e-3)
    assert [path for path, _, _ in said] == ["b/kernel", "c/kernel"]
    assert all(before > 2 and 1 <= after < 1.001 for _, before, after in said)
    assert error(q, three, THREE, new, X) < error(q, three, THREE, THREE, X) / 1.5


@pytest.mark.slow
def test_one_equalization_is_the_root_of_the_ratio():
    f, params, _ = MODELS["a relu between, in nested dicts"]
    new = leaves(solve.equalize(params, quantize_fn(f, RULES), X, iterations=1))
    old = leaves(params)
    s = np.sqrt(np.abs(old["params/a/kernel"]).max(0) / np.abs(old["params/b/kernel"]).max(1))
    np.testing.assert_allclose(old["params/a/bias"] / new["params/a/bias"], s, rtol=1e-5)
    np.testing.assert_allclose(new["params/b/kernel"], old["params/b/kernel"] * s[:, None], rtol=1e-5)


def test_equalizes_values_and_convolutions():
    f, params, _ = MODELS["the values of an attention"]
    new = solve.equalize(params, quantize_fn(f, RULES), X)
    assert changed(params, new) == {"v", "out"}
    same_function(f, params, new, X)
    new = solve.equalize(CONVOLUTIONAL, quantize_fn(convolutional, RULES), IMAGES)
    assert changed(CONVOLUTIONAL, new) == {"c2", "b2", "depthwise", "dense"}  # what a scale makes is left
    same_function(convolutional, CONVOLUTIONAL, new, IMAGES)


@pytest.mark.slow
def test_a_dead_channel_stays():
    params = {"a": normal(1, 8, 6).at[:, 2].set(0), "b": normal(2, 6, 5).at[4].set(0)}
    f = lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"]
    new = solve.equalize(params, quantize_fn(f, RULES), X)
    same_function(f, params, new, X)
    np.testing.assert_array_equal(new["a"][:, 4], params["a"][:, 4])
    np.testing.assert_array_equal(new["b"][2], params["b"][2])


# Bad input


def of_gained():
    params, x = outliers()
    q = quantize_fn(gained, [Rule("w", W8, A8)])
    return params, q, q.observe(params, x, gram=True), x


BAD = [
    ({"alpha": 1.5}, ValueError, "`alpha` must be in .0, 1., got 1.5"),
    ({"alpha": -0.1}, ValueError, "`alpha` must be in .0, 1., got -0.1"),
    ({"alpha": jnp.ones(())}, TypeError, "`alpha` must be a static number"),
    ({"unfolded": "raise"}, ValueError, "`unfolded` must be one of leave, error, got 'raise'"),
    ({"q": gained}, TypeError, "`q` must be what quantize_fn returned, got function"),
    ({"grams": None}, TypeError, "`grams` must be a dict"),
]


@pytest.mark.parametrize(("given", "kind", "match"), BAD)
def test_bad_input(given, kind, match):
    names = "params", "q", "grams", "x"
    arguments = dict(zip(names, of_gained(), strict=True)) | given
    positional = [arguments.pop(name) for name in names]
    with pytest.raises(kind, match=match):
        solve.smooth(*positional, **arguments)


def test_bad_input_of_equalize():
    f, params, _ = MODELS["a relu between, in nested dicts"]
    q = quantize_fn(f, RULES)
    with pytest.raises(ValueError, match="`iterations` must be between 1 and 10000"):
        solve.equalize(params, q, X, iterations=0)
    with pytest.raises(TypeError, match="`q` must be what quantize_fn returned, got function"):
        solve.equalize(params, f, X)
    params, q, _, x = of_gained()
    with pytest.raises(ValueError, match=r"no two weights .* At 'w': its inputs come from \['gain'\], which no rule"):
        solve.equalize(params, q, x)
    f, params, _ = MODELS["a gated layer"]
    only = quantize_fn(f, [("gate", W8)])
    with pytest.raises(ValueError, match=r"no two weights .* At 'gate': no factor of its inputs .* an argument"):
        solve.equalize(params, only, X)
