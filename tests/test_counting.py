# SPDX-License-Identifier: Apache-2.0
"""What solvers change is counted whole: weights before, biases, uses that no Gram sees, columns, members of a stack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inputs import normal, ones
from jax import lax
from lanes import cases

from jaxquant import QuantSpec, Rule, activation_spec, fake_quant, quantize_fn, solve, weight_spec

F = np.float32
W4, W8, A8 = weight_spec(4), weight_spec(8), activation_spec(8)


def off(q, f, params, others, x):
    """The mean squared error of the whole function with other parameters."""
    return float(jnp.square(q(others, x) - f(params, x)).mean())


# Factors that make a weight before worse


def two_layers(p, x):
    return jax.nn.relu(x @ p["w1"] + p["b"][None]) @ p["w2"]


UNEVEN = {
    "w1": normal(0, 32, 32, scale=1 / 6), "b": normal(1, 32, scale=1 / 3),
    "w2": normal(2, 32, 16, scale=np.exp(1.5 * np.asarray(normal(3, 32, 1))) / 6),
}  # fmt: skip
WIDE = normal(4, 256, 32)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [QuantSpec(), W8])
def test_a_weight_before_counts(spec):
    """By one scale its columns are rounded more coarsely when they are made unequal."""
    q, told = quantize_fn(two_layers, [("w1", spec), ("w2", spec)]), {}
    grams = q.observe(UNEVEN, WIDE, gram=True)
    smooth = solve.smooth(UNEVEN, q, grams, WIDE, progress=lambda path, *of: told.update({path: of}))
    np.testing.assert_allclose(two_layers(smooth, WIDE), two_layers(UNEVEN, WIDE), rtol=1e-3, atol=1e-4)
    _, before, after = told["w2"]
    got = off(q, two_layers, UNEVEN, smooth, WIDE) / off(q, two_layers, UNEVEN, UNEVEN, WIDE)
    assert got < 1
    assert abs(np.log(got / (after / before))) < 1  # as it was predicted, up to a factor of e


def test_a_weight_before_without_a_gram_is_not_changed():
    q = quantize_fn(two_layers, [("w1", QuantSpec()), ("w2", QuantSpec())])
    grams = q.observe(UNEVEN, WIDE, gram=True, entries=["w2"])
    same = solve.smooth(UNEVEN, q, grams, WIDE)
    jax.tree.map(np.testing.assert_array_equal, same, UNEVEN)
    with pytest.raises(ValueError, match=r"At 'w2'.*the quantized 'w1' would change, too, of which there is no Gram"):
        solve.smooth(UNEVEN, q, grams, WIDE, unfolded="error")
    channels = quantize_fn(two_layers, [("w1", W8), ("w2", W8)])  # a column with a scale of its own may be divided
    solve.smooth(UNEVEN, channels, channels.observe(UNEVEN, WIDE, gram=True, entries=["w2"]), WIDE, unfolded="error")


# Biases of columns that are nearly 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float16, marks=pytest.mark.slow), jnp.float32])
def test_a_live_bias_over_a_dead_column_is_bounded(dtype):
    f = lambda p, x: jax.nn.relu(x @ p["one"] + p["b"][None]) @ p["two"]
    params = {
        "one": (normal(0, 32, 32) / 6).at[:, 7].multiply(1e-4), "b": (normal(1, 32) / 4).at[7].set(1.0),
        "two": normal(2, 32, 8) / 6,
    }  # fmt: skip
    params, x = jax.tree.map(lambda v: v.astype(dtype), params), normal(3, 256, 32).astype(dtype)
    q = quantize_fn(f, [Rule(name, QuantSpec(), A8) for name in ("one", "two")])
    equal = solve.equalize(params, q, x)
    np.testing.assert_allclose(f(equal, x), f(params, x), rtol=0.02, atol=0.02)
    assert off(q, f, params, equal, x) < 2 * off(q, f, params, params, x)


@pytest.mark.slow
def test_what_stops_a_pair_is_named():
    f = lambda p, x: (jax.nn.relu6(x @ p["a"]) @ p["b"]) @ p["c"]
    params, q, told = {name: normal(i, 8, 8) for i, name in enumerate("abc")}, None, []
    q = quantize_fn(f, [(name, QuantSpec()) for name in "abc"])
    solve.equalize(params, q, normal(4, 3, 8), progress=lambda *of: told.append(of))
    assert [path for path, *_ in told] == ["b", "c"]
    assert np.isnan(told[0][1:]).all()
    with pytest.raises(ValueError, match=r"At 'b': .*'min'.*unfolded=\"leave\""):
        solve.equalize(params, q, normal(4, 3, 8), unfolded="error")
    with pytest.raises(ValueError, match=r"no two weights.*At 'b': .*'min'"):
        solve.equalize(params, quantize_fn(f, [("a", QuantSpec()), ("b", QuantSpec())]), normal(4, 3, 8))


# Uses that no Gram sees


@cases("solver", ["gptq", "adaround", "ranges"], ["gptq"])
def test_a_tied_embedding_is_refused_by_its_path(solver):
    f = lambda p, t: (p["e"][t] * p["g"][None]) @ p["e"].T
    params, t = {"e": normal(0, 20, 8), "g": ones(8)}, np.arange(20)
    q = quantize_fn(f, [Rule("e", W4, A8, everywhere=True)])
    grams, qparams = q.observe(params, t, gram=True), q.init_qparams(params, t)
    with pytest.raises(ValueError, match=r"At 'e'.*which no Gram sees"):
        getattr(solve, solver)(params, q, grams, t, qparams=qparams)


# Columns


@cases("method", ["diagonal", "full"])
def test_no_column_is_worse_than_by_min_max(method):
    """Of inputs that depend on each other, of which a cost by rows knows nothing."""
    mixing = np.ones((32, 32), F) + 0.05 * np.asarray(normal(1, 32, 32))
    w, x = normal(2, 32, 64), jnp.asarray(np.asarray(normal(3, 64, 32)) @ mixing)
    q = quantize_fn(lambda p, x: x @ p["w"], [("w", weight_spec(3))])
    grams, plain = q.observe({"w": w}, x, gram=True), q.init_qparams({"w": w}, x)
    found = solve.ranges({"w": w}, q, grams, x, method=method)
    error = lambda qparams: np.square(x @ (fake_quant(w, weight_spec(3, channel_axis=1), qparams["w"]) - w)).sum(0)
    assert (error(found) <= error(plain) * (1 + 1e-4)).all()


# Members of a stack


def routed(p, x, sizes):
    return lax.ragged_dot(x, p["w"], sizes)


@cases("solver", ["gptq", "adaround", "ranges", "low_rank", "smooth"], ["gptq", "smooth"])
def test_an_expert_without_tokens_is_rounded_to_nearest(solver):
    params, x, sizes = {"w": normal(0, 3, 16, 8)}, normal(1, 20, 16), jnp.int32([12, 0, 8])
    q, told = quantize_fn(routed, [Rule("w", QuantSpec(bits=3), None)]), []
    grams, qparams = q.observe(params, x, sizes, gram=True), q.init_qparams(params, x, sizes)
    if solver in ("ranges", "smooth"):
        assert np.isfinite(jax.tree.leaves(getattr(solve, solver)(params, q, grams, x, sizes))[0]).all()
        return
    if solver == "low_rank":
        a, b = solve.low_rank(params, q, grams, x, sizes, qparams=qparams, rank=2)["w"]
        assert np.isfinite(a).all() and np.isfinite(b).all()  # noqa: PT018
        return
    solved = getattr(solve, solver)(params, q, grams, x, sizes, qparams=qparams, progress=lambda *of: told.append(of))
    nearest = fake_quant(params["w"], QuantSpec(bits=3), qparams["w"])
    np.testing.assert_array_equal(solved["w"][1], nearest[1])
    assert (solved["w"][0] != nearest[0]).any()
    assert [path for path, *_ in told] == ["w", "w[1]"]
    assert np.isnan(told[1][1:]).all()
    without = q.observe(params, x[:0], sizes * 0, gram=True)
    with pytest.raises(ValueError, match="at least one row"):
        getattr(solve, solver)(params, q, without, x, sizes, qparams=qparams)


# Weights that are no numbers


TOOLS = {
    "gptq": lambda p, q, g, x, qparams: solve.gptq(p, q, g, x, qparams=qparams, damping=0.01),
    "ranges": lambda p, q, g, x, qparams: solve.ranges(p, q, g, x),
    "smooth": lambda p, q, g, x, _: solve.smooth(p, q, g, x),
    "equalize": lambda p, q, g, x, _: solve.equalize(p, q, x), "rotate": lambda p, q, g, x, _: solve.rotate(p, q, x),
    "bias_correct": lambda p, q, g, x, qparams: solve.bias_correct(
        p, q, g, x, qparams=qparams, progress=lambda *of: None
    ),
    "low_rank": lambda p, q, g, x, qparams: solve.low_rank(p, q, g, x, qparams=qparams, rank=1),
}  # fmt: skip


@cases(
    "tool, value", [(tool, value) for tool in TOOLS for value in ("NaN", "inf")], [("gptq", "NaN"), ("ranges", "inf")]
)
def test_a_weight_that_is_no_number_is_named(tool, value):
    q = quantize_fn(two_layers, [("w1", W4), ("w2", W4)])
    grams, qparams = q.observe(UNEVEN, WIDE, gram=True), q.init_qparams(UNEVEN, WIDE)
    params = UNEVEN | {"w2": np.array(UNEVEN["w2"])}
    params["w2"][0, 0] = value
    with pytest.raises(ValueError, match=r"At 'w2'.*the parameter has 1 (NaN|infinite)"):
        TOOLS[tool](params, q, grams, WIDE, qparams)


@pytest.mark.slow
def test_an_overflow_is_not_called_singular():
    params, x = {"w": normal(0, 8, 4) * F(1e15)}, normal(1, 16, 8) * F(1e8)
    q = quantize_fn(lambda p, x: x @ p["w"], [("w", W4)])
    with pytest.raises(ValueError, match="squares of its outputs overflow float32"):
        solve.gptq(params, q, q.observe(params, x, gram=True), x, qparams=q.init_qparams(params, x))


def test_what_a_narrow_parameter_does_not_hold_is_named():
    """A gain of float16 that would take up more than it holds."""
    f = lambda p, x: (x * p["g"][None].astype(F)) @ p["w"]
    params, x = (
        {
            "g": np.float16([1, *[6e4] * 7]),
            "w": np.asarray(normal(0, 8, 4)) * np.where(np.arange(8) == 1, F(1e-4), F(1))[:, None],
        },
        normal(1, 16, 8),
    )
    q = quantize_fn(f, [Rule("w", W4, A8)])
    with pytest.raises(ValueError, match=r"At 'g': the folded parameter has values up to .*float16 holds"):
        solve.smooth(params, q, q.observe(params, x, gram=True), x, alpha=0.0)


# Gains that are functions of a parameter, and tokens that are picked


def normed(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))


GAIN = np.where(np.arange(32) == 3, F(15), 1 + 0.3 * np.abs(np.asarray(normal(3, 32))))
GAINS = {
    "1 + g": (lambda g: 1 + g, GAIN - 1), "1 - g": (lambda g: 1 - g, 1 - GAIN), "exp": (jnp.exp, np.log(GAIN)),
    "softplus": (jax.nn.softplus, np.log(np.expm1(GAIN))), "1 + g / 2": (lambda g: 1 + g / 2, 2 * (GAIN - 1)),
    "cast": (lambda g: g.astype(F) + 1, (GAIN - 1).astype(jnp.bfloat16)),
}  # fmt: skip
PICKS = {
    "all": lambda h, order: h, "gathered": lambda h, order: h[order],
    "along an axis": lambda h, order: jnp.take_along_axis(h, order[:, None], 0),
    "packed": lambda h, order: jnp.zeros((70, h.shape[1])).at[order].set(h),
    "added": lambda h, order: jnp.zeros_like(h).at[order // 2].add(h),
    "written": lambda h, order: lax.dynamic_update_slice(jnp.zeros((70, h.shape[1])), h, (order[0] * 0 + 3, 0)),
    "sorted": lambda h, order: lax.sort((jnp.broadcast_to(order[:, None], h.shape), h), dimension=0, num_keys=1)[1],
}  # fmt: skip


@pytest.mark.slow
@cases(
    "gain, pick", [*((gain, "all") for gain in GAINS), *(("1 + g", pick) for pick in PICKS)],
    [("1 + g", "gathered")],
)  # fmt: skip
def test_a_function_of_a_gain_takes_up_factors(gain, pick):
    form, g = GAINS[gain]
    params, x, order = (
        {"g": g, "w": normal(1, 32, 16) / 6},
        normal(2, 64, 32),
        jax.device_put(np.random.default_rng(0).permutation(64)),
    )
    f = lambda p, x: PICKS[pick](normed(x) * jnp.broadcast_to(form(p["g"]), x.shape), order) @ p["w"]
    q = quantize_fn(f, [Rule("w", W4, A8)])
    smooth = solve.smooth(params, q, q.observe(params, x, gram=True), x, unfolded="error")
    exact = {"rtol": 1e-2, "atol": 5e-2} if gain == "cast" else {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(f(smooth, x), f(params, x), **exact)
    assert off(q, f, params, smooth, x) < off(q, f, params, params, x) / 2


def test_a_function_that_takes_up_no_factor_is_named():
    f = lambda p, x: (normed(x) * jnp.broadcast_to(20 * jnp.tanh(p["g"]), x.shape)) @ p["w"]
    params, x = {"g": jnp.arctanh(GAIN / 20), "w": normal(1, 32, 16) / 6}, normal(2, 64, 32)
    q = quantize_fn(f, [Rule("w", W4, A8)])
    with pytest.raises(ValueError, match="'tanh' of the parameter 'g', which passes no factor"):
        solve.smooth(params, q, q.observe(params, x, gram=True), x, unfolded="error")


def test_gains_of_one_plus_weight_are_rotated_away():
    def f(p, t):
        layer = lambda h, p: (
            h + jax.nn.relu((normed(h) * jnp.broadcast_to(1 + p["g"], h.shape)) @ p["up"]) @ p["down"],
            None,
        )
        return normed(lax.scan(layer, p["e"][t], p["layers"])[0]) @ p["head"]

    layers = {
        "g": normal(0, 2, 8, scale=0.3),
        "up": normal(1, 2, 8, 16, scale=1 / 3),
        "down": normal(2, 2, 16, 8, scale=1 / 4),
    }
    params, t = {"e": normal(3, 20, 8), "layers": layers, "head": normal(4, 8, 5)}, np.arange(12)
    told = {}
    q = quantize_fn(f, [Rule("layers/up", QuantSpec(bits=4), A8), Rule("head", W4, A8)])
    rotated = solve.rotate(params, q, t, progress=lambda path, *of: told.update({path: of}))
    assert told == {"layers/up": (8, None), "head": (8, None)}
    np.testing.assert_array_equal(rotated["layers"]["g"], 0)
    f = jax.jit(f)
    np.testing.assert_allclose(f(rotated, t), f(params, t), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_router_and_a_shared_expert_are_rescaled_with_the_experts():
    def f(p, x):
        h = normed(x) * jnp.broadcast_to(1 + p["g"], x.shape)
        expert = jnp.argmax(h @ p["router"], -1)
        order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=3)
        y = lax.ragged_dot(h[order], p["experts"], sizes)
        return jnp.zeros_like(y).at[order].set(y) + h @ p["shared"]

    params = {
        "g": GAIN - 1,
        "router": normal(4, 32, 3),
        "experts": normal(5, 3, 32, 8) / 6,
        "shared": normal(6, 32, 8) / 6,
    }
    q, x = quantize_fn(f, [Rule("experts", QuantSpec(bits=4), A8), Rule("shared", W4, A8)]), normal(7, 64, 32)
    smooth = solve.smooth(params, q, q.observe(params, x, gram=True), x, unfolded="error")
    np.testing.assert_allclose(f(smooth, x), f(params, x), rtol=1e-3, atol=1e-3)
    assert all((smooth[name] != params[name]).any() for name in params)
    assert off(q, f, params, smooth, x) < off(q, f, params, params, x)


@pytest.mark.slow
def test_factors_follow_a_reshape_that_reads_its_axes_in_another_order():
    def f(p, x):
        hidden = (x @ p["a"]) * p["gain"]
        return hidden.reshape(-1, 4, 4).reshape((len(x), 16), order="F") @ p["b"]

    params = {"a": normal(0, 8, 16), "gain": jnp.ones((1, 16)).at[0, 3].set(40.0), "b": normal(1, 16, 6)}
    x, q = normal(2, 16, 8), quantize_fn(f, [Rule("b", W8, A8)])
    smooth = solve.smooth(params, q, q.observe(params, x, gram=True), x, alpha=0.5, unfolded="error")
    np.testing.assert_allclose(f(smooth, x), f(params, x), rtol=1e-4, atol=1e-3)
