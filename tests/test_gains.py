# SPDX-License-Identifier: Apache-2.0
"""Products in front of weights, into which factors are folded where no parameter of the model takes them up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inputs import ones
from jax import lax
from lanes import cases
from test_smooth import (
    A8,
    CONVOLUTIONAL,
    IMAGES,
    MODELS,
    REFUSED,
    W4,
    W8,
    X,
    changed,
    convolutional,
    error,
    normal,
    over,
    qkv,
    same_function,
    turn,
)  # fmt: skip

from jaxquant import Rule, activation_spec, quantize_fn, solve

RULES = [Rule("**", W8, A8, optional=True)]


def smoothed(f, params, x, rules=RULES, **kwargs):
    q = quantize_fn(f, rules)
    return solve.smooth(params, q, q.observe(params, x, gram=True), x, alpha=0.5, **kwargs)


def activated(p, x):
    return jax.nn.gelu(x) @ p["w"]


W = {"w": normal(1, 8, 5)}
OUTLIERS = jax.device_put(np.asarray(normal(2, 64, 8)) * np.where(np.arange(8) == 3, np.float32(50), 1))


@cases("name", [*MODELS], ["a matrix for each head"])
def test_the_function_stays_with_gains_and_with_factors_in_them(name):
    f, params, _ = MODELS[name]
    g = solve.with_gains(f, "**")
    start = g.init(params, X)
    same_function(lambda p, x: f(p["params"], x), start, start, X)
    np.testing.assert_allclose(g(start, X), jax.jit(f)(params, X), rtol=0, atol=1e-5)
    new = smoothed(g, start, X)
    assert changed(start["gains"], new["gains"]) == set(start["gains"])
    same_function(g, start, new, X)


# Two uses of a weight have a gain each; of a tied embedding, the weight would change where it is gathered.
TAKEN = [
    name for name in REFUSED if name not in ("a cond", "one input", "a tied embedding", "another use of the weight")
]


@cases("name", TAKEN)
def test_what_no_parameter_takes_up_is_taken_up_by_a_gain(name):
    function, params, _ = REFUSED[name]
    f = lambda p, x: jax.tree.leaves(function(p, x))[-1]
    g = solve.with_gains(f, "w")
    start = g.init(params, X)
    new = smoothed(g, start, X, unfolded="error")
    assert changed(start, new) == {"params/w", "gains/w:input"}
    same_function(g, start, new, X)
    np.testing.assert_allclose(g(new, X), jax.jit(f)(params, X), rtol=0, atol=1e-4)


def test_each_use_of_a_weight_has_a_gain():
    f, params, _ = REFUSED["another use of the weight"]
    g = solve.with_gains(f, "w")
    start = g.init(params, X)
    new = smoothed(g, start, X, unfolded="error")
    assert changed(start, new) == {"params/w", "gains/w:input", "gains/w:input#2"}
    same_function(g, start, new, X)


def test_the_product_is_of_the_input():
    g = solve.with_gains(activated, "w")
    gain = normal(3, 1, 8)
    np.testing.assert_array_equal(
        g({"params": W, "gains": {"w:input": gain}}, OUTLIERS),
        jax.jit(lambda p, x: (jax.nn.gelu(x) * over(gain, x)) @ p["w"])(W, OUTLIERS),
    )


@pytest.mark.slow
def test_the_gradient_is_that_of_the_product():
    g = solve.with_gains(activated, "w")
    params = {"params": W, "gains": {"w:input": normal(3, 1, 8)}}
    by_hand = lambda p: jnp.sin((jax.nn.gelu(X[0]) * over(p["gains"]["w:input"], X[0])) @ p["params"]["w"]).sum()
    found, wanted = jax.grad(lambda p: jnp.sin(g(p, X[0])).sum())(params), jax.grad(by_hand)(params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, wanted)


# The shapes of gains, by the name of the first site that takes the input


def test_one_input_has_one_gain():
    params = MODELS["a norm, and q, k, v"][1]
    gains = solve.with_gains(qkv, ["q", "k", "v"]).init(params, X)["gains"]
    assert {key: gain.shape for key, gain in gains.items()} == {"q:input": (1, 1, 8)}
    gains = solve.with_gains(qkv, "v").init(params, X)["gains"]
    assert {key: gain.shape for key, gain in gains.items()} == {"v:input": (1, 1, 8)}


def test_channels_of_convolutions_have_gains():
    gains = solve.with_gains(convolutional, ["c*", "depthwise"]).init(CONVOLUTIONAL, IMAGES)["gains"]
    assert {key: gain.shape for key, gain in gains.items()} == {
        "c1:input": (1, 1, 1, 3), "c2:input": (1, 1, 1, 4), "depthwise:input": (1, 1, 1, 6),
    }  # fmt: skip


@pytest.mark.slow
def test_what_channels_of_convolutions_take_up():
    g = solve.with_gains(convolutional, ["c*", "depthwise"])
    start = g.init(CONVOLUTIONAL, IMAGES)
    new = smoothed(g, start, IMAGES)
    assert changed(start["gains"], new["gains"]) == {"c1:input", "c2:input", "depthwise:input"}
    same_function(g, start, new, IMAGES)


@pytest.mark.slow
def test_turns_of_scans_have_gains_of_their_own():
    f = lambda p, x: lax.scan(lambda x, p: (lax.scan(turn, x, p)[0], None), x, p, reverse=True)[0]
    params = MODELS["scans in a scan, backwards"][1]
    g = solve.with_gains(f, "w")
    start = g.init(params, X)
    assert start["gains"]["w:input"].shape == (2, 3, 1, 1, 8)
    gain = normal(5, 2, 3, 1, 1, 8)

    def by_hand(x, p):
        p, own = p
        return jnp.tanh((x * over(p["gain"], x) * own) @ p["w"]), None

    unrolled = X
    for i in (1, 0):
        for k in range(3):
            unrolled, _ = by_hand(unrolled, (jax.tree.map(lambda v, i=i, k=k: v[i, k], params), gain[i, k]))
    np.testing.assert_allclose(g({**start, "gains": {"w:input": gain}}, X), unrolled, rtol=1e-4, atol=1e-5)


def test_gains_of_narrow_inputs_are_float32():
    half = {"w": W["w"].astype(jnp.bfloat16)}
    g, x = solve.with_gains(activated, "w"), X[0].astype(jnp.bfloat16)
    start = g.init(half, x)
    assert start["gains"]["w:input"].dtype == jnp.float32
    assert g(start, x).dtype == jnp.bfloat16


def test_shapes_suffice_for_all_but_the_params():
    of_shape = solve.with_gains(activated, "w").init(W, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert of_shape["gains"]["w:input"].shape == (1, 1, 8)


# All that follows


@pytest.mark.slow
def test_factors_in_gains_make_inputs_easy_to_round():
    g = solve.with_gains(activated, "w")
    start = g.init(W, OUTLIERS)
    q = quantize_fn(g, [Rule("params/w", W8, A8)])
    new = smoothed(g, start, OUTLIERS, [Rule("params/w", W8, A8)])
    assert error(q, g, start, new, OUTLIERS) < error(q, g, start, start, OUTLIERS) / 4


@pytest.mark.slow
@pytest.mark.bits
@cases("name", ["a leaky relu, in a checkpoint", "layers in a scan"], ["a leaky relu, in a checkpoint"])
def test_what_is_served_is_what_was_smoothed_and_solved(name):
    f, params, _ = MODELS[name]
    g = solve.with_gains(f, "**")
    rules = [Rule("params/**", W4, activation_spec(8), optional=True)]
    params, q = smoothed(g, g.init(params, X), X, rules), quantize_fn(g, rules)
    ranges, grams = q.observe(params, X), q.observe(params, X, gram=True)
    qparams = solve.ranges(params, q, grams, X, qparams=q.init_qparams(params, X, ranges=ranges))
    solved = solve.gptq(params, q, grams, X, qparams=qparams)
    frozen = q.freeze(solved, X, qparams=qparams)
    want = q(solved, X, qparams=qparams)
    np.testing.assert_array_equal(q(frozen, X, qparams=qparams), want)
    np.testing.assert_array_equal(jax.jit(q)(frozen, X, qparams=qparams), want)
    one = jax.vmap(lambda x: q(frozen, x[None], qparams=qparams)[0])(X)
    np.testing.assert_array_equal(one, want)


def test_scopes_keep_their_names():
    """Also the names of ops in a scan, which is built anew."""

    def f(p, x):
        with jax.named_scope("model"):
            return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]

    params, rules = {"w": normal(1, 3, 8, 8)}, [Rule("**", W8, scope="model/**")]
    g = solve.with_gains(f, "w")
    plans = quantize_fn(f, rules).plan(params, X), quantize_fn(g, rules).plan(g.init(params, X), X)
    assert [site.scope for plan in plans for site in plan] == ["model"] * 4


def test_params_that_are_not_the_first_argument_and_keywords():
    f = lambda x, p, *, key, factor: jax.nn.gelu(x) @ p["w"] * (factor + key)
    g = solve.with_gains(f, "w", params_argnum=1)
    start = g.init(X, W, key=1.0, factor=2.0)
    np.testing.assert_array_equal(g(X, start, key=1.0, factor=2.0), jax.jit(f)(X, W, key=1.0, factor=2.0))
    q = quantize_fn(g, [("params/w", W8)], params_argnum=1)
    assert q(X, start, key=1.0, factor=2.0).shape == (4, 6, 5)


def test_what_is_static_of_results_stays():
    g = solve.with_gains(lambda p, x, name: {"y": x @ p["w"], "name": name}, "w")
    assert g(g.init(W, X, "a"), X, "a")["name"] == "a"


# Bad input


@jax.custom_jvp
def product(x, w):
    return x @ w


product.defjvp(lambda primals, tangents: (product(*primals), tangents[0] @ primals[1]))
BAD = {
    "no function": (lambda: solve.with_gains(3, "w"), TypeError, "`f` must be a function, got int"),
    "no path": (lambda: solve.with_gains(activated, "other").init(W, X), ValueError, "'other'"),
    "params without gains": (
        lambda: solve.with_gains(activated, "w")(W, X), TypeError,
        "The params, argument 0, must be a dict of 'params' and 'gains', got dict.*f.init",
    ),
    "no arguments": (lambda: solve.with_gains(activated, "w")(), TypeError, "must be a dict of 'params' and 'gains'"),
    "gains of other weights": (
        lambda: solve.with_gains(activated, "w")({"params": W, "gains": {"v:input": jnp.ones((1, 1, 8))}}, X),
        ValueError, "`gains` must have one value for each entry, got none for 'w:input'",
    ),
    "gains of another shape": (
        lambda: solve.with_gains(activated, "w")({"params": W, "gains": {"w:input": ones((8,))}}, X),
        ValueError, r"`gains\['w:input'\]` must have shape \(1, 1, 8\), got \(8,\)",
    ),
    "in a cond": (
        lambda: solve.with_gains(
            lambda p, x: lax.cond(x[0, 0, 0] > 0, lambda: x @ p["w"], lambda: x @ -p["w"]), "w"
        ).init(W, X),
        ValueError, "At 'w.*inside a cond, a while loop or a shard_map.*Take its path out of `patterns`",
    ),
    "in a function with a derivative of its own": (
        lambda: solve.with_gains(lambda p, x: product(x[0], p["w"]), "w").init(W, X),
        ValueError, "At 'w.*inside a function with a derivative of its own.*Take its path out of `patterns`",
    ),
    "one input along two axes": (
        lambda: solve.with_gains(lambda p, x: (x @ p["a"], jnp.einsum("nk,nm->km", x, p["b"])), "*").init(
            {"a": normal(1, 8, 8), "b": normal(2, 8, 8)}, normal(3, 8, 8)
        ),
        ValueError, "the input of shape .8, 8. goes into several weights, which take it along other axes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input(name):
    call, kind, match = BAD[name]
    with pytest.raises(kind, match=match):
        call()


def test_the_way_out_is_named():
    q = quantize_fn(activated, [Rule("w", W8, A8)])
    with pytest.raises(ValueError, match=r"solve.with_gains\(f, 'w'\)"):
        solve.smooth(W, q, q.observe(W, X, gram=True), X, unfolded="error")
