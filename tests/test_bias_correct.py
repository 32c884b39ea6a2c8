# SPDX-License-Identifier: Apache-2.0
"""Biases that take back the mean error of the weights before them: in which functions, and why not in others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import x64
from jax import lax
from jax.sharding import PartitionSpec as P
from lanes import by_default, cases

from jaxquant import QuantSpec, Rule, dequantize, fake_quant, quantize_fn, solve, weight_spec
from jaxquant.typing import Gram

F = np.float32
W3 = weight_spec(3)
RULES = [("w*", W3)]


def normal(seed, *shape):
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(F))


X = 1 + normal(0, 12, 4)


def along(v, like):
    return jnp.broadcast_to(v, like.shape)


def dense(p, x):
    y = x @ p["w"]
    return y + along(p["b"], y)


def twice(p, x):
    h = jax.nn.relu(dense({"w": p["w1"], "b": p["b1"]}, x))
    return dense({"w": p["w2"], "b": p["b2"]}, h)


def conv(x, w, numbers=("NHWC", "HWIO", "NHWC"), groups=1):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)


def images(p, x):
    y = conv(x.reshape(2, 3, 2, 4), p["w"])
    return y + along(p["b"], y)


def channels_first(p, x):
    y = conv(x.reshape(2, 4, 3, 2), p["w"], ("NCHW", "OIHW", "NCHW"), 2)
    return jnp.moveaxis(y + along(p["b"][:, None, None], y), 1, -1)


def before_norm(p, x):
    """A convolution whose bias is the mean of the norm behind it."""
    y = conv(x.reshape(2, 3, 2, 4), p["w"])
    return (y - along(p["mean"], y)) * along(jnp.exp(p["scale"]), y) + along(p["b"], y)


def split(p, x):
    parts = jnp.split(x @ p["w"], 3, -1)
    return jnp.concatenate([y + along(p[name], y) for y, name in zip(parts, "qkv", strict=True)], -1)


def joined(p, x):
    y = x @ p["w"]
    return y + along(jnp.concatenate([p["q"], p["k"], p["v"]]), y)


def turn(h, p):
    return jnp.tanh(dense(p, h)), None


def layers(p, x):
    return lax.scan(turn, x, p["layers"])[0]


def recurrent(p, x):
    """Both products into one bias; over time, one of them before the scan."""
    inputs = x.reshape(3, 4, 4) @ p["w1"]
    step = lambda h, y: (jnp.tanh(y + h @ p["w2"] + along(p["b"], y)), None)
    return lax.scan(step, jnp.ones((4, 4), x.dtype), inputs)[0]


B, QKV = normal(2, 4), {name: normal(i, 2) for i, name in enumerate("qkv")}
LAYERS = {"layers": {"w": normal(1, 3, 4, 4), "b": normal(2, 3, 4)}}
# Functions whose result is that of one weight, with channels last; its params, and the biases that change.
LINEAR = {
    "dense": (dense, {"w": normal(1, 4, 4), "b": B}, "b"),
    "a residual before and behind": (lambda p, x: x + (dense(p, x) - x * 2), {"w": normal(1, 4, 4), "b": B}, "b"),
    "what is added before": (
        lambda p, x: x @ p["w"] + x + p["places"][:12] + along(p["b"], x),
        {"w": normal(1, 4, 4), "places": normal(3, 20, 4), "b": B}, "b",
    ),
    "subtracted": (lambda p, x: x @ p["w"] - along(p["b"], x), {"w": normal(1, 4, 4), "b": B}, "b"),
    "subtracted from": (lambda p, x: along(p["b"], x) - x @ p["w"], {"w": normal(1, 4, 4), "b": B}, "b"),
    "subtracted from another value": (
        lambda p, x: (x - x @ p["w"]) + along(p["b"], x), {"w": normal(1, 4, 4), "b": B}, "b",
    ),
    "heads": (
        lambda p, x: jnp.einsum("bd,dho->bho", x, p["w"]) + along(p["b"], jnp.ones((12, 2, 3))),
        {"w": normal(1, 4, 2, 3), "b": normal(2, 2, 3)}, "b",
    ),
    "a matrix for each head, last": (
        lambda p, x: jnp.einsum("bhd,dho->boh", x.reshape(6, 2, 4), p["w"]) + along(p["b"].T, jnp.ones((6, 3, 2))),
        {"w": normal(1, 4, 2, 3), "b": normal(2, 2, 3)}, "b",
    ),
    "reshaped and transposed": (
        lambda p, x: (x @ p["w"].T).reshape(12, 2, 3).swapaxes(0, 1) + along(p["b"], jnp.ones((2, 12, 3))),
        {"w": normal(1, 6, 4), "b": normal(2, 2, 1, 3)}, "b",
    ),
    "images": (images, {"w": normal(1, 3, 3, 4, 5), "b": normal(2, 5)}, "b"),
    "channels first, in groups": (channels_first, {"w": normal(1, 6, 2, 3, 3), "b": normal(2, 6)}, "b"),
    "before a norm": (
        before_norm,
        {"w": normal(1, 3, 3, 4, 5), "mean": normal(2, 5), "scale": normal(3, 5), "b": normal(4, 5)}, "mean",
    ),
    "one bias of three parts": (
        lambda p, x: x @ p["w"] + along(p["b"], jnp.ones((12, 6))), {"w": normal(1, 4, 6), "b": normal(2, 6)}, "b",
    ),
    "split, with three biases": (split, {"w": normal(1, 4, 6)} | QKV, "q k v"),
    "three biases side by side": (joined, {"w": normal(1, 4, 6)} | QKV, "q k v"),
    "two weights": (
        lambda p, x: x @ p["w1"] + jnp.tanh(x) @ p["w2"] + along(p["b"], x),
        {"w1": normal(1, 4, 4), "w2": normal(2, 4, 4), "b": B}, "b",
    ),
    "one channel": (
        lambda p, x: (x @ p["w"] + p["b"])[:, None], {"w": normal(1, 4), "b": normal(2)}, "b",
    ),
    "in a vmap, a jit and a checkpoint": (
        jax.checkpoint(lambda p, x: jax.jit(jax.vmap(lambda r: r @ p["w"] + p["b"]))(x)),
        {"w": normal(1, 4, 4), "b": B}, "b",
    ),
}  # fmt: skip


def corrected(f, params, x=X, rules=RULES, **kwargs):
    """The quantized function, its qparams, the new params, and what was reported."""
    q, said = quantize_fn(f, rules), {}
    qparams = q.init_qparams(params, x)
    progress = lambda path, *of: said.update({path: of})
    new = solve.bias_correct(
        params, q, q.observe(params, x, gram=True), x, qparams=qparams, progress=progress, **kwargs
    )
    return q, qparams, new, said


def changed(before, after):
    named = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {name(path) for (path, old), new in named if not np.array_equal(old, new)}


def mean_error(q, f, params, new, x, qparams):
    """Of each channel, in float64."""
    error = np.asarray(q(new, x, qparams=qparams), np.float64) - np.asarray(f(params, x), np.float64)
    return np.abs(error.reshape(-1, error.shape[-1]).mean(0)).max()


@by_default("a matrix for each head, last")
@cases("name", list(LINEAR), ["dense", "a matrix for each head, last"])
def test_the_mean_error_is_0(name):
    f, params, expected = LINEAR[name]
    q, qparams, new, said = corrected(f, params)
    assert changed(params, new) == set(expected.split())
    assert mean_error(q, f, params, params, X, qparams) > 0.03
    assert mean_error(q, f, params, new, X, qparams) < 2e-6
    assert set(said) == {path for path in params if path.startswith("w")}
    for why, before, after in said.values():
        assert why is None
        assert 0 < after < before


@pytest.mark.slow
def test_of_each_turn_of_a_scan():
    """Against NumPy: the mean of the float inputs of each layer, times what rounding loses."""
    q, qparams, new, said = corrected(layers, LAYERS, rules=[("**/w", W3)])
    assert changed(LAYERS, new) == {"layers/b"}
    w, b, h = *(np.asarray(LAYERS["layers"][name], np.float64) for name in "wb"), np.asarray(X, np.float64)
    rounded = np.asarray(dequantize(q.freeze(LAYERS, X, qparams=qparams)["layers"]["w"]), np.float64)
    before = after = output = 0
    for i in range(3):
        lost = h @ (w[i] - rounded[i])
        np.testing.assert_allclose(new["layers"]["b"][i] - b[i], lost.mean(0), atol=1e-6)
        before, after = before + (lost**2).sum(), after + ((lost - lost.mean(0)) ** 2).sum()
        output += ((h @ w[i]) ** 2).sum()
        h = np.tanh(h @ w[i] + b[i])
    assert said["layers/w"][0] is None
    np.testing.assert_allclose(said["layers/w"][1:], [before / output, after / output], rtol=1e-4)


@pytest.mark.slow
def test_scans_in_a_scan_and_over_time():
    params = {"w": normal(1, 2, 3, 4, 4), "b": normal(2, 2, 3, 4)}
    nested = lambda p, x: lax.scan(lambda h, p: (lax.scan(turn, h, p)[0], None), x, p)[0]
    flat = lambda p, x: lax.scan(turn, x, jax.tree.map(lambda v: v.reshape(6, *v.shape[2:]), p))[0]
    two, one = corrected(nested, params)[2], corrected(flat, params)[2]
    assert changed(params, two) == {"b"}
    np.testing.assert_allclose(two["b"], one["b"], atol=1e-6)

    params = {"w1": normal(1, 4, 4), "w2": normal(2, 4, 4), "b": B}
    q, qparams, new, said = corrected(recurrent, params)
    assert [why for why, *_ in said.values()] == [None, None]
    grams = q.observe(params, X, gram=True)
    specs = {path: q.plan(params, X)[path].entry_spec for path in said}
    lost = {path: params[path] - fake_quant(params[path], specs[path], qparams[path]) for path in said}
    added = sum(np.asarray(grams[path].sums @ lost[path] / grams[path].rows) for path in said)
    np.testing.assert_allclose(new["b"] - params["b"], added, atol=1e-6)


@pytest.mark.slow
def test_an_unrolled_loop_has_one_bias_for_all_turns():
    f = lambda p, x: jnp.tanh(dense(p, jnp.tanh(dense(p, x))))
    rolled = lambda p, x: lax.scan(lambda h, _: (jnp.tanh(dense(p, h)), None), x, None, length=2)[0]
    params = {"w": normal(1, 4, 4), "b": B}
    one, other = corrected(f, params)[2], corrected(rolled, params)[2]
    assert changed(params, one) == {"b"}
    np.testing.assert_allclose(one["b"], other["b"], atol=1e-6)


TWICE = {"w1": normal(1, 4, 4), "b1": normal(2, 4), "w2": normal(3, 4, 4), "b2": normal(4, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_function_is_closer(seed):
    """Two layers with a relu between: on the inputs that were observed, and on others of the same kind."""
    shapes = {"w1": (16, 32), "b1": (32,), "w2": (32, 8), "b2": (8,)}
    params = {name: normal(10 * seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    x, other = 1 + normal(90 + seed, 64, 16), 1 + normal(99, 64, 16)
    q, qparams, new, _ = corrected(twice, params, x)
    error = lambda p, x: float(jnp.square(q(p, x, qparams=qparams) - twice(params, x)).mean())
    assert error(new, x) < 0.85 * error(params, x)
    assert error(new, other) < error(params, other)


@pytest.mark.slow
def test_what_is_solved_is_served():
    """With integers in place of the weights, too, and in one compiled program; a second call changes nothing."""
    q, qparams, _, _ = corrected(twice, TWICE)
    grams = q.observe(TWICE, X, gram=True)
    given = functools.partial(solve.bias_correct, TWICE, q, grams, X, qparams=qparams)
    solved = solve.gptq(TWICE, q, grams, X, qparams=qparams)
    new = given(solved=solved)
    assert changed(solved, new) == {"b1", "b2"}
    frozen = q.freeze(new, X, qparams=qparams)
    np.testing.assert_array_equal(dequantize(frozen["w1"]), new["w1"])
    np.testing.assert_array_equal(q(frozen, X, qparams=qparams), q(new, X, qparams=qparams))
    of_frozen = given(solved=q.freeze(solved, X, qparams=qparams))
    again = given(solved=new)
    compiled = jax.jit(lambda p, grams: solve.bias_correct(p, q, grams, X, solved=solved))(TWICE, grams)
    for name in ("b1", "b2"):
        np.testing.assert_array_equal(of_frozen[name], new[name])
        np.testing.assert_array_equal(again[name], new[name])
        np.testing.assert_allclose(compiled[name], new[name], atol=1e-6)


def tied(p, x):
    return jnp.tanh(x @ p["w"] + along(p["b"], x)) + jnp.exp(along(p["b"], x))


def other_matrix(p, x):
    return (jax.nn.relu(x @ p["w"]) @ p["w2"]) + along(p["b"], x)


SQUARE = {"w": normal(1, 4, 4), "b": B}
LEFT = {
    "a relu": (
        lambda p, x: jax.nn.relu(x @ p["w"]) + along(p["b"], x), SQUARE,
        "its output goes into 'max' in 'relu', and no bias is added before",
    ),
    "nothing": (
        lambda p, x: x @ p["w"], SQUARE, "its output is the result of the function, and no bias is added before",
    ),
    "a factor": (
        lambda p, x: (x @ p["w"]) * along(p["g"], x) + along(p["b"], x), SQUARE | {"g": B},
        "its output goes into 'mul'",
    ),
    "a norm with the numbers of the batch": (
        lambda p, x: (lambda y: y - jnp.mean(y, 0, keepdims=True) + along(p["b"], x))(x @ p["w"]), SQUARE,
        "its output goes into 'reduce_sum'",
    ),
    "read elsewhere": (tied, SQUARE, "its bias 'b' also goes into 'exp'"),
    "added to something else": (
        lambda p, x: jnp.tanh(dense(p, x)) + along(p["b"], x), SQUARE, "its bias 'b' also goes into 'add'",
    ),
    "added to other rows": (
        lambda p, x: (lambda y: y + along(p["b"], y))(jnp.concatenate([x @ p["w"], x])), SQUARE,
        "its bias 'b' also goes into 'add'",
    ),
    "added to itself": (
        lambda p, x: (lambda y: y + along(jnp.concatenate([p["b"], p["c"]]), y))(
            jnp.concatenate([x @ p["w"], along(p["b"], x)], 1)
        ),
        SQUARE | {"c": B}, "its bias 'b' also goes into 'add'",
    ),
    "added to both halves": (
        lambda p, x: jnp.tanh((lambda y: y[:, :4] + along(p["b"], x) - (y[:, 4:] + along(p["b"], x)))(x @ p["w"])),
        {"w": normal(1, 4, 8), "b": B}, "its bias 'b' is added to several of its channels",
    ),
    "to some rows": (
        lambda p, x: (lambda y: y + along(p["b"], y))((x @ p["w"])[:5]), SQUARE,
        "some rows of its output are taken apart by 'slice'",
    ),
    "one number": (
        lambda p, x: x @ p["w"] + p["b"], {"w": normal(1, 4, 4), "b": normal(2)},
        ".*'b', which is added, has not one element for each channel",
    ),
    "one for all turns of a scan": (
        lambda p, x: lax.scan(lambda h, w: (jnp.tanh(h @ w + along(p["b"], h)), None), x, p["w"])[0],
        {"w": normal(1, 3, 4, 4), "b": B}, "its output goes into 'tanh'.*'b', which is added, has not one element",
    ),
    "one for each row": (
        lambda p, x: x @ p["w"] + p["b"], {"w": normal(1, 4, 4), "b": normal(2, 12, 4)},
        ".*'b', which is added, has not one element for each channel",
    ),
    "picked by data": (
        lambda p, x: x @ p["w"] + along(p["b"][x[0, 0].astype(int)], x), {"w": normal(1, 4, 4), "b": normal(2, 3, 4)},
        "its output is the result of the function",
    ),
    "experts": (
        lambda p, x: lax.ragged_dot(x, p["w"], jnp.int32([5, 4, 3])) + along(p["b"], x),
        {"w": normal(1, 3, 4, 4), "b": B}, "each row of its inputs meets one of several matrices",
    ),
    "a cond": (
        lambda p, x: lax.cond(x[0, 0] > -9, lambda: dense(p, x), lambda: x), SQUARE,
        "it is inside a cond, a while loop or a shard_map",
    ),
    "two uses with a bias each": (
        lambda p, x: jnp.tanh(dense(p, x)) @ p["w"] + along(p["c"], x), SQUARE | {"c": B},
        "several ops take it, each with other biases",
    ),
    "two uses in other orders": (
        lambda p, x: jnp.tanh(jnp.tanh(dense(p, x)) @ p["w"][:, ::-1] + along(p["b"], x)), SQUARE,
        "several ops take it, with its elements in different orders",
    ),
    "its halves in one sum": (
        lambda p, x: (lambda y: y[:, :4] + y[:, 4:] + along(p["b"], x))(x @ p["w"]), {"w": normal(1, 4, 8), "b": B},
        "its output goes into 'add' with more of it",
    ),
    "beside data": (
        lambda p, x: x @ p["w"] + along(jnp.concatenate([p["b"], x[0, :2]]), x),
        {"w": normal(1, 4, 4), "b": normal(2, 2)},
        "its output is the result of the function",
    ),
    "two uses in one sum": (
        lambda p, x: x @ p["w"] + jnp.tanh(x) @ p["w"] + along(p["b"], x), SQUARE,
        "its output goes into 'add' with more of it",
    ),
    "a bias in integers": (
        lambda p, x: x @ p["w"] + along(p["b"], x).astype(x.dtype), {"w": normal(1, 4, 4), "b": jnp.arange(4)},
        "its bias 'b' is no array of floats",
    ),
}  # fmt: skip


@cases("name", list(LEFT), ["a relu", "one for all turns of a scan"])
def test_where_there_is_no_bias_it_is_said(name):
    """Of a weight beside one that has a bias; and if there is no other, by an error."""
    f, params, why = LEFT[name]
    rules = [Rule("w", QuantSpec(bits=3)), Rule("other", W3, optional=True)]
    both = lambda p, x: (f(p, x), dense({"w": p["other"], "b": p["offset"]}, x))
    every = params | {"other": normal(8, 4, 4), "offset": normal(9, 4)}
    q, qparams, new, said = corrected(both, every, rules=rules)
    assert changed(every, new) == {"offset"}
    assert said["other"][0] is None
    assert said["w"][1] == said["w"][2] > 0
    with pytest.warns(UserWarning, match=f"bias_correct leaves 1 of 2 weights as they are. At 'w': {why}"):
        solve.bias_correct(every, q, q.observe(every, X, gram=True), X, qparams=qparams)
    with pytest.raises(ValueError, match=f"no weight of `grams` has a bias.*At 'w': {why}"):
        corrected(f, params, rules=rules)


@pytest.mark.slow
def test_narrow_biases_and_64_bits():
    params = {"w": normal(1, 4, 4), "b": B.astype(jnp.bfloat16)}
    f = lambda p, x: x @ p["w"] + along(p["b"].astype(x.dtype), x)
    _, _, new, _ = corrected(f, params)
    exact = corrected(f, params | {"b": params["b"].astype(F)})[2]
    assert new["b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(new["b"], exact["b"].astype(jnp.bfloat16))
    with x64(True):
        q, qparams, new, _ = corrected(dense, SQUARE)
        assert new["b"].dtype == F
        assert mean_error(q, dense, SQUARE, new, X, qparams) < 1e-6


@pytest.mark.slow
def test_on_two_devices():
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,))
    put = lambda v, *spec: jax.device_put(v, jax.NamedSharding(mesh, P(*spec)))
    params = {"w": put(SQUARE["w"], None, "d"), "b": put(B, "d")}
    want, got = corrected(dense, SQUARE)[2], corrected(dense, params)[2]
    np.testing.assert_allclose(got["b"], want["b"], atol=1e-6)


Q = quantize_fn(dense, RULES)
GRAMS, QPARAMS = Q.observe(SQUARE, X, gram=True), Q.init_qparams(SQUARE, X)
SUMS = GRAMS["w"]._replace
BAD = {
    "no quantized function": (TypeError, "`q` must be what quantize_fn returned", {"q": dense}),
    "no Grams": (TypeError, "`grams` must be a dict", {"grams": None}),
    "nothing": (ValueError, "the entries must be paths of quantized weights", {"grams": {}}),
    "another model": (ValueError, "no quantized weight 'v'; the nearest: 'w'", {"grams": {"v": GRAMS["w"]}}),
    "other sums": (
        ValueError, r"At 'w'.*sums of the Gram must have shape \(4,\).*got \(3,\)",
        {"grams": {"w": SUMS(sums=np.ones(3, F))}},
    ),
    "NaN": (ValueError, "At 'w'.*NaN or infinite", {"grams": {"w": SUMS(sums=np.full(4, np.nan, F))}}),
    "no rows": (
        ValueError, "At 'w'.*at least one row", {"grams": {"w": Gram(np.zeros((4, 4), F), F(0), np.zeros(4, F))}},
    ),
    "integers": (ValueError, "At 'w'.*integers already", {"params": Q.freeze(SQUARE, X)}),
    "no qparams": (ValueError, "At 'w'.*`qparams` must have the qparams of each weight", {"qparams": None}),
    "solved without a bias": (
        ValueError, r"`solved` must have the parameters of `params`.*got \['b'\] in `params` alone",
        {"solved": {"w": SQUARE["w"]}},
    ),
    "solved of another shape": (
        ValueError, r"At 'w': `solved` must have it in its shape \(4, 4\), got \(4, 3\)",
        {"solved": SQUARE | {"w": normal(1, 4, 3)}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    kind, match, more = BAD[name]
    given = {"params": SQUARE, "q": Q, "grams": GRAMS, "qparams": QPARAMS} | more
    params, q, grams = (given.pop(name) for name in ("params", "q", "grams"))
    with pytest.raises(kind, match=match):
        solve.bias_correct(params, q, grams, X, **given)


def test_low_rank_checks_what_was_solved():
    with pytest.raises(ValueError, match=r"At 'w': `solved` must have it in its shape \(4, 4\), got \(4, 3\)"):
        solve.low_rank(SQUARE, Q, GRAMS, X, rank=1, solved=SQUARE | {"w": normal(1, 4, 3)})
