# SPDX-License-Identifier: Apache-2.0
"""Caches of unmodified functions: arguments that are written, read and returned in integers."""

import dataclasses
import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from inputs import ones
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import by_default, cases

from jaxquant import (
    PerBlock,
    PerChannel,
    PerToken,
    QParams,
    QuantSpec,
    Rule,
    dequantize,
    dot_general,
    fake_quant,
    mxfp4_spec,
    quant_point,
    quantize,
    quantize_fn,
    weight_spec,
)
from jaxquant.cache import update_slice, zeros

BATCH, LENGTH, HEADS, FEATURES = 2, 12, 2, 4
SHAPE = BATCH, LENGTH, HEADS, FEATURES
TOKENS = PerChannel((0, 1, 2))
KEYS, VALUES = QuantSpec(granularity=TOKENS), QuantSpec(bits=4, granularity=TOKENS)
RULES = [Rule("cache/k", activation=KEYS, kind="cache"), Rule("cache/v", activation=VALUES, kind="cache")]
# In steps of 1 / 16, so that the float sums of a projection are exact, of one row and of many.
in_steps = lambda seed, shape: np.round(np.random.default_rng(seed).normal(size=shape) * 16).astype(np.float32) / 16
X = in_steps(0, (BATCH, LENGTH, 8))
PARAMS = {n: jax.device_put(in_steps(i, (8, HEADS, FEATURES))) for i, n in enumerate("qkv")}


def empty():
    return {"k": zeros(SHAPE, KEYS), "v": zeros(SHAPE, VALUES)}


def in_float():
    return {"k": jnp.zeros(SHAPE), "v": jnp.zeros(SHAPE)}


def written(cache, new, t):
    return jax.lax.dynamic_update_slice(cache, new, (0, t, 0, 0))


def exact_softmax(scores):
    """Of steps of 2 ** -12, whose sum does not depend on the order in which XLA adds, as that of floats does."""
    levels = jnp.round(jnp.exp(scores - scores.max(-1, keepdims=True)) * 2.0**12)
    return levels / levels.sum(-1, keepdims=True)


def attention(params, cache, x, t, write=written, rounded=lambda name, v: v, softmax=jax.nn.softmax):
    """Of some tokens, the first of which is the t-th; `rounded` is what a cache is where it is read."""
    q, k, v = (jnp.einsum("btm,mhd->bthd", x, params[n]) for n in "qkv")
    cache = {"k": write(cache["k"], k, t), "v": write(cache["v"], v, t)}
    scores = jnp.einsum("bthd,bshd->bhts", q, rounded("k", cache["k"]))
    seen = jnp.arange(cache["k"].shape[1])[None] <= t + jnp.arange(x.shape[1])[:, None]
    probs = softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhts,bshd->bthd", probs, rounded("v", cache["v"])), cache


def rounded(name, v):
    return fake_quant(v, KEYS if name == "k" else VALUES)


def by_hand(f, *args):
    """A cache in float, rounded wherever it is read."""
    return jax.jit(functools.partial(f, rounded=rounded))(*args)


def steps(f, cache, x=X, n=None):
    """Token by token."""
    ys = []
    for t in range(n or x.shape[1]):
        y, cache = f(PARAMS, cache, x[:, t : t + 1], jnp.int32(t))
        ys.append(y)
    return jnp.concatenate(ys, 1), cache


def test_each_step_is_that_of_the_rounded_cache():
    q = quantize_fn(attention, RULES)
    (ys, cache), (want, in_floats) = (
        steps(jax.jit(q), empty()),
        steps(functools.partial(by_hand, attention), in_float()),
    )
    assert_same_bits(ys, want)
    for name, spec in {"k": KEYS, "v": VALUES}.items():
        whole = quantize(in_floats[name], spec)
        assert_same_bits(cache[name].values, whole.values)
        assert_same_bits(cache[name].scale, whole.scale)
        assert jax.tree.structure(cache[name]) == jax.tree.structure(empty()[name])
    assert cache["v"].pairs == (-1, 2)


def test_a_scan_of_steps_and_a_prompt_give_the_same_cache():
    q = quantize_fn(attention, RULES)
    step = lambda cache, xt: q(PARAMS, cache, *xt)[::-1]
    cache, ys = jax.lax.scan(step, empty(), (jnp.swapaxes(X, 0, 1)[:, :, None], jnp.arange(LENGTH)))
    _, whole = q(PARAMS, empty(), X, 0)
    for a, b in zip(*map(jax.tree.leaves, (cache, whole)), strict=True):
        assert_same_bits(a, b)
    assert_same_bits(jnp.moveaxis(ys[:, :, 0], 0, 1), steps(q, empty())[0])


def test_no_step_is_traced_or_compiled_again():
    traces = []

    def f(params, cache, x, t):
        traces.append(t)
        return attention(params, cache, x, t)

    q = jax.jit(quantize_fn(f, RULES), donate_argnums=1)
    steps(q, empty())
    assert len(traces) == 1
    assert q._cache_size() == 1


def test_floats_are_quantized_by_the_first_step():
    q = quantize_fn(attention, RULES)
    (ys, cache), (want, whole) = steps(q, in_float(), n=3), steps(q, empty(), n=3)
    assert_same_bits(ys, want)
    for a, b in zip(*map(jax.tree.leaves, (cache, whole)), strict=True):
        assert_same_bits(a, b)


def test_the_plan_lists_caches_with_their_bytes():
    q, t = quantize_fn(attention, RULES), jnp.int32(0)
    k = BATCH * LENGTH * HEADS * (FEATURES + 4 + 1)
    v = BATCH * LENGTH * HEADS * (FEATURES // 2 + 4 + 1)
    shapes = jax.eval_shape(in_float)
    for cache in empty(), in_float(), shapes:
        plan = q.plan(PARAMS, cache, X[:, :1], t)
        assert [(s.name, s.nbytes, s.spec) for s in plan if s.kind == "cache"] == [
            ("cache/k", k, KEYS),
            ("cache/v", v, VALUES),
        ]
        assert f"caches: 2 ({k + v:,} bytes; {2 * 4 * int(np.prod(SHAPE)):,} in float)" in str(plan)
    assert plan["dot_general_3:rhs"].why == "cache/k, a cache: its real values"
    assert not plan["q"].nbytes


def test_a_scale_that_stays():
    spec, qparams = QuantSpec(), QParams(jnp.float32(0.02), jnp.float32(0))
    rules = [Rule("cache/k", activation=spec, kind="cache"), Rule("cache/*", None, kind="cache")]
    cache = {"k": zeros(SHAPE, spec, qparams), "v": jnp.zeros(SHAPE)}
    rounded = lambda name, v: fake_quant(v, spec, qparams) if name == "k" else v
    want, _ = steps(jax.jit(functools.partial(attention, rounded=rounded)), in_float())
    ys, cache = steps(quantize_fn(attention, rules), cache)
    assert_same_bits(ys, want)
    assert cache["k"].scale == qparams.scale
    assert cache["v"].dtype == jnp.float32


@pytest.mark.slow
def test_blocks_of_tokens():
    spec = QuantSpec(granularity=PerBlock(1, 4))
    q = quantize_fn(attention, [Rule("cache/*", activation=spec, kind="cache")])
    cache = {n: zeros(SHAPE, spec) for n in "kv"}
    for t in range(0, LENGTH, 4):
        _, cache = q(PARAMS, cache, X[:, t : t + 4], t)
    _, floats = attention(PARAMS, in_float(), X, 0)
    assert_same_bits(cache["k"].values, quantize(floats["k"], spec).values)
    with pytest.raises(ValueError, match=r"At 'cache/k'.*must not cut the blocks of 4"):
        q(PARAMS, cache, X[:, :1], 0)


@pytest.mark.slow
def test_an_index_beyond_is_clamped_as_by_the_primitive():
    q = quantize_fn(lambda p, cache, new, t: written(cache, new, t), [Rule("cache", activation=KEYS, kind="cache")])
    whole = quantize(jax.random.normal(jax.random.key(0), SHAPE), KEYS)
    new = jnp.ones((BATCH, 1, HEADS, FEATURES))
    for t in (-LENGTH - 3, -LENGTH, -1, LENGTH - 1, LENGTH + 5):
        want = written(dequantize(whole), new, jnp.int32(t))
        assert_same_bits(dequantize(q({}, whole, new, jnp.int32(t))), fake_quant(want, KEYS))


OTHERS = {
    "arithmetic": (lambda k: k * 2, "by 'mul'"),
    "select": (lambda k: jnp.where(k > 0, k, 0), "by 'gt'"),
    "a write by a mask": (lambda k: jnp.where(jnp.arange(LENGTH)[None, :, None, None] == 3, 1, k), "by 'select_n'"),
    "a cast that is returned": (lambda k: k.astype(jnp.bfloat16), "by 'the result of the function'"),
    "a custom derivative": (jax.nn.relu, "by 'max'"),
}


@cases("name", OTHERS, ["arithmetic", "a write by a mask"])
def test_what_else_reads_it_in_float(name):
    read, by = OTHERS[name]

    def f(params, cache, x, t):
        y, cache = attention(params, cache, x, t)
        return y, cache, read(cache["k"])

    with pytest.raises(ValueError, match=rf"At 'cache/k'.*{by}.*write to it by.*at\[\.\.\.\]\.set.*everywhere=True"):
        quantize_fn(f, RULES).plan(PARAMS, empty(), X[:, :1], 0)
    if "returned" not in by:
        rules = [Rule("cache/k", activation=KEYS, kind="cache", everywhere=True), RULES[1]]
        *_, cache, v = quantize_fn(f, rules)(PARAMS, empty(), X, 0)
        assert_same_bits(v, read(dequantize(cache["k"])))


@pytest.mark.parametrize(
    ("cache", "rules", "message"),
    [
        ({n: zeros(SHAPE, VALUES) for n in "kv"}, RULES, r"At 'cache/k'.*QArray with.*bits=4.*rule says"),
        (
            {"k": zeros(SHAPE, QuantSpec(granularity=PerChannel((0, 1)))), "v": zeros(SHAPE, VALUES)},
            RULES,
            "At 'cache/k'.*Make it by jaxquant.cache.zeros",
        ),
        (None, [Rule("cash/*", activation=KEYS, kind="cache")], r"matched no site of kind 'cache'.*'cache/k'"),
        (None, [RULES[0], Rule("cache/k", activation=VALUES, kind="cache")], "shadowed|matched no"),
        (None, [Rule("cache/*", activation=QuantSpec(), kind="cache")], "At 'cache/k'.*whose scales stay"),
        (
            None,
            [Rule("cache/*", activation=QuantSpec(granularity=PerChannel((0, 3))), kind="cache")],
            "At 'cache/k', where the function writes.*comes in float must have",
        ),
        (None, [Rule("cache/*", activation=QuantSpec(granularity=PerBlock(1, 5)), kind="cache")], "At 'cache/k'"),
    ],
)  # fmt: skip
def test_errors(cache, rules, message):
    cache = in_float() if cache is None else cache
    with pytest.raises(ValueError, match=message):
        quantize_fn(attention, rules).plan(PARAMS, cache, X[:, :1], 0)


@pytest.mark.parametrize(
    "kw",
    [
        {"weight": KEYS},
        {"op": "dot_general"},
        {"activation": QuantSpec(granularity=PerToken())},
        {"activation": mxfp4_spec()},
        {"activation": QuantSpec(granularity=TOKENS, rounding="stochastic")},
    ],
)
def test_what_no_rule_of_a_cache_says(kw):
    with pytest.raises(ValueError, match=r"kind=.cache|of a cache"):
        Rule("cache/*", kind="cache", **kw)


def test_an_error_of_the_function_is_not_put_down_to_the_cache():
    """A QArray beside float params is what misplaced params look like, too."""
    with pytest.raises(ValueError, match="Size of label") as error:
        quantize_fn(attention, RULES).plan(PARAMS, empty(), X[:, :1, :3], 0)
    assert "params_argnum" not in str(error.value)


@pytest.mark.slow
def test_weights_beside_it_and_what_is_observed():
    rules = [*RULES, Rule("*", weight_spec(8), QuantSpec())]
    q = quantize_fn(attention, rules)
    t = jnp.int32(0)
    ranges = q.observe(PARAMS, empty(), X[:, :1], t)
    assert set(ranges) == {"q:input"}
    qparams = q.init_qparams(PARAMS, empty(), X[:, :1], t, ranges=ranges)
    frozen = q.freeze(PARAMS, empty(), X[:, :1], t, qparams=qparams)
    y, cache = q(frozen, empty(), X[:, :1], t, qparams=qparams)
    want, whole = q(PARAMS, empty(), X[:, :1], t, qparams=qparams)
    for a, b in zip(*map(jax.tree.leaves, ((y, cache), (want, whole))), strict=True):
        assert_same_bits(a, b)
    seen = []
    view = q.at_sites(lambda info, x: (seen.append(info.name), x)[1])
    view(PARAMS, empty(), X[:, :1], t)
    assert "q" in seen


def rows(cache, new, t):
    """One token at positions of its own for each example."""
    return jax.vmap(lambda cache, new, t: jax.lax.dynamic_update_slice(cache, new, (t, 0, 0)))(cache, new, t)


def as_prompt(cache, new):
    return jnp.zeros_like(cache).at[:, : new.shape[1]].set(new)


WRITES = {
    "an example each": lambda c, new, t: rows(c, new, jnp.array([t, t // 2])),
    "at": lambda c, new, t: c.at[:, t].set(new[:, 0]),
    "at an index each": lambda c, new, t: c.at[jnp.arange(BATCH), jnp.array([t, t // 2])].set(new[:, 0]),
    "a ring": lambda c, new, t: written(c, new, t % 5),
    "shifted": lambda c, new, t: jnp.concatenate([c[:, 1:], new], 1),
    "rolled": lambda c, new, t: jnp.roll(c, -1, 1).at[:, -1].set(new[:, 0]),
    "transposed": lambda c, new, t: written(c.transpose(0, 2, 1, 3).transpose(0, 2, 1, 3), new, t),
    "in a branch": lambda c, new, t: jax.lax.cond(t > 2, lambda: written(c, new, t), lambda: c),
    "in a loop": lambda c, new, t: jax.lax.fori_loop(0, 3, lambda i, c: written(c, new * (i + 1), t - i), c),
    "in a checkpoint": lambda c, new, t: jax.checkpoint(written)(c, new, t),
    "by a part": lambda c, new, t: written(c, c[:, ::-1][:, :2], t).at[:, t].set(new[:, 0]),
}


@by_default("shifted", "an example each")
@cases("name", WRITES, ["an example each", "shifted", "in a loop"])
def test_ways_to_write(name):
    f = functools.partial(attention, write=WRITES[name])
    rules = [Rule("cache/*", activation=KEYS, kind="cache")]
    cache, floats = ({n: make(SHAPE) for n in "kv"} for make in (lambda shape: zeros(shape, KEYS), jnp.zeros))
    q = jax.jit(quantize_fn(f, rules))
    plain = jax.jit(functools.partial(f, rounded=lambda name, v: fake_quant(v, KEYS)))
    for t in range(8):
        args = X[:, t : t + 1], jnp.int32(t)
        (y, cache), (want, floats) = q(PARAMS, cache, *args), plain(PARAMS, floats, *args)
        assert_same_bits(y, want)
    assert_same_bits(dequantize(cache["k"]), fake_quant(floats["k"], KEYS))
    assert q._cache_size() == 1
    assert jax.tree.structure(cache["k"]) == jax.tree.structure(zeros(SHAPE, KEYS))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_a_scan_over_layers_takes_and_gives_their_caches(bits):
    spec = QuantSpec(bits=bits, granularity=PerChannel((0, 1, 2, 3)))
    layers = {n: jnp.stack([v, v[::-1], -v]) for n, v in PARAMS.items()}

    def f(params, cache, x, t, rounded=lambda name, v: v):
        def layer(x, of):
            y, cache = attention(*of, x, t, rounded=rounded)
            return x + y.reshape(x.shape), cache

        return jax.lax.scan(layer, x, (params, cache))

    shape = 3, *SHAPE
    cache, floats = {n: zeros(shape, spec) for n in "kv"}, {n: jnp.zeros(shape) for n in "kv"}
    q = jax.jit(quantize_fn(f, [Rule("cache/*", activation=spec, kind="cache")]))
    each = QuantSpec(bits=bits, granularity=TOKENS)
    plain = jax.jit(functools.partial(f, rounded=lambda name, v: fake_quant(v, each)))
    for t in range(4):
        args = X[:, t : t + 1], jnp.int32(t)
        (y, cache), (want, floats) = q(layers, cache, *args), plain(layers, floats, *args)
        assert_same_bits(y, want)
    assert jax.tree.structure(cache["k"]) == jax.tree.structure(zeros(shape, spec))
    assert cache["k"].stored.dtype == zeros(shape, spec).stored.dtype
    assert q._cache_size() == 1


@pytest.mark.slow
def test_under_vmap_each_example_has_its_own():
    q = quantize_fn(attention, RULES)
    caches = jax.tree.map(lambda v: jnp.stack([v, v]), empty())
    xs, ts = jnp.stack([X[:, :1], X[:, 1:2]]), jnp.array([0, 3])
    ys, got = jax.vmap(q, (None, 0, 0, 0))(PARAMS, caches, xs, ts)
    for i in range(2):
        y, cache = q(PARAMS, empty(), xs[i], ts[i])
        np.testing.assert_allclose(ys[i], y, atol=1e-5)  # sums of floats, which XLA orders otherwise in a batch
        assert_same_bits(got["k"].stored[i], cache["k"].stored)


def test_a_function_that_generates_in_a_loop():
    def f(params, cache, x, rounded=lambda name, v: v):
        def token(t, of):
            x, cache = of
            y, cache = attention(params, cache, x, t, rounded=rounded)
            return y.reshape(x.shape), cache

        return jax.lax.fori_loop(0, 5, token, (x, cache))

    y, cache = quantize_fn(f, RULES)(PARAMS, empty(), X[:, :1])
    want, _ = by_hand(f, PARAMS, in_float(), X[:, :1])
    assert_same_bits(y, want)
    assert cache["v"].pairs == (-1, 2)


@pytest.mark.slow
def test_a_window_of_a_long_cache():
    """Read by a slice at a traced index, in which the scales come along."""

    def f(params, cache, x, t, rounded=lambda name, v: v):
        q, k, v = (jnp.einsum("btm,mhd->bthd", x, params[n]) for n in "qkv")
        cache = {"k": written(cache["k"], k, t), "v": written(cache["v"], v, t)}
        start = jnp.maximum(t - 3, 0)
        ks, vs = (jax.lax.dynamic_slice_in_dim(rounded(n, cache[n]), start, 4, 1) for n in "kv")
        seen = jnp.arange(4) <= t - start
        probs = jax.nn.softmax(jnp.where(seen, jnp.einsum("bthd,bshd->bhts", q, ks), -jnp.inf))
        return jnp.einsum("bhts,bshd->bthd", probs, vs), cache, cache["k"][:, :2]

    q, plain = jax.jit(quantize_fn(f, RULES)), functools.partial(by_hand, f)
    (ys, cache), (want, _) = (
        steps(lambda *args, f=f: f(*args)[:2], of) for f, of in ((q, empty()), (plain, in_float()))
    )
    assert_same_bits(ys, want)
    part = q(PARAMS, cache, X[:, :1], jnp.int32(0))[2]  # what is no whole cache is a QArray, too
    assert_same_bits(part.values, cache["k"].values[:, :2])


@pytest.mark.slow
def test_grouped_queries():
    def f(params, cache, x, t, rounded=lambda name, v: v):
        q = jnp.einsum("btm,mhd->bthd", x, jnp.concatenate([params["q"], -params["q"]], 1))
        k, v = (jnp.einsum("btm,mhd->bthd", x, params[n]) for n in "kv")
        cache = {"k": written(cache["k"], k, t), "v": written(cache["v"], v, t)}
        ks, vs = (jnp.repeat(rounded(n, cache[n]), 2, axis=2) for n in "kv")
        scores = jnp.einsum("bthd,bshd->bhts", q, ks)
        probs = jax.nn.softmax(jnp.where(jnp.arange(LENGTH) <= t, scores, -jnp.inf))
        return jnp.einsum("bhts,bshd->bthd", probs, vs), cache

    ys, _ = steps(jax.jit(quantize_fn(f, RULES)), empty())
    want, _ = steps(functools.partial(by_hand, f), in_float())
    assert_same_bits(ys, want)


# Contractions of integers

ROWS = QuantSpec(granularity=PerToken())
PRODUCTS = Rule("**/dot_general_*", activation=ROWS, kind="act_act")
ALL = [*RULES, PRODUCTS, Rule("*", weight_spec(8), ROWS)]
LONG = in_steps(1, (BATCH, 200, 8))


def long_cache():
    shape = BATCH, 200, HEADS, FEATURES
    return {"k": zeros(shape, KEYS), "v": zeros(shape, VALUES)}


@pytest.mark.slow
def test_integers_of_the_cache_meet_integers():
    q = quantize_fn(attention, [*RULES, PRODUCTS])

    def plain(params, cache, x, t):
        q, k, v = (jnp.einsum("btm,mhd->bthd", x, params[n]) for n in "qkv")
        cache = {"k": update_slice(cache["k"], k, (0, t, 0, 0)), "v": update_slice(cache["v"], v, (0, t, 0, 0))}
        scores = dot_general(q, cache["k"], (((3,), (3,)), ((0, 2), (0, 2))), spec=ROWS)
        probs = jax.nn.softmax(jnp.where(jnp.arange(LENGTH) <= t, scores, -jnp.inf))
        y = dot_general(probs, cache["v"], (((3,), (1,)), ((0, 1), (0, 2))), spec=ROWS)
        return y.transpose(0, 2, 1, 3), cache

    plan = q.plan(PARAMS, empty(), X[:, :1], jnp.int32(0))
    assert [site.spec.bits for site in plan if site.kind == "act_act"] == [8, 8, 4, 8]
    assert [site.entry for site in plan if site.kind == "act_act"] == ["dot_general_3:lhs", "", "", "dot_general_4:rhs"]
    (ys, cache), (want, by_hand) = steps(jax.jit(q), empty()), steps(jax.jit(plain), empty())
    assert_same_bits(ys, want)
    for a, b in zip(*map(jax.tree.leaves, (cache, by_hand)), strict=True):
        assert_same_bits(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [pytest.param(RULES, marks=pytest.mark.slow), ALL], ids=["in float", "in integers"])
def test_each_of_200_steps_is_that_with_the_cache_of_the_whole(rules):
    """The products have one shape here, so that XLA adds floats in one order."""
    q = jax.jit(quantize_fn(attention, rules))
    _, whole = q(PARAMS, long_cache(), LONG, jnp.int32(0))
    ys, cache = steps(q, long_cache(), LONG)
    for a, b in zip(*map(jax.tree.leaves, (cache, whole)), strict=True):
        assert_same_bits(a, b)
    full = [q(PARAMS, whole, LONG[:, t : t + 1], jnp.int32(t))[0] for t in range(200)]
    assert_same_bits(ys, jnp.concatenate(full, 1))


@pytest.mark.slow
def test_200_steps_are_one_full_pass():
    """With nothing left in float but what does not depend on an order, all shapes give the same bits."""
    q = jax.jit(quantize_fn(functools.partial(attention, softmax=exact_softmax), ALL))
    whole, _ = q(PARAMS, long_cache(), LONG, jnp.int32(0))
    ys, _ = steps(q, long_cache(), LONG)
    assert_same_bits(ys, whole)
    assert q._cache_size() == 2


QUERIES = dataclasses.replace(PRODUCTS, activation=QuantSpec())  # of one scale, which may be static
STATIC = [*RULES, QUERIES]


@pytest.mark.parametrize("spec", [ROWS, pytest.param(QuantSpec(), marks=pytest.mark.slow)])
def test_what_the_scales_of_a_cache_are_multiplied_into_is_dynamic(spec):
    rules = [*RULES, dataclasses.replace(PRODUCTS, activation=spec), Rule("*", weight_spec(8), ROWS)]
    q, args = quantize_fn(attention, rules), (PARAMS, empty(), X[:, :1], jnp.int32(0))
    qparams, probs = q.init_qparams(*args), "dot_general_4:rhs"
    assert qparams[probs] is None
    assert probs not in q.observe(*args)
    assert {site.name: site.scaled_by for site in q.plan(*args) if site.scaled_by} == {probs: "cache/v"}
    assert "times the scales of cache/v" in str(q.plan(*args))
    if spec == ROWS:
        assert_same_bits(q(*args, qparams=qparams)[0], q(*args)[0])
    with pytest.raises(ValueError, match=r"At 'dot_general_4:rhs'.*scales of the cache 'cache/v'.*always dynamic"):
        q(*args, qparams=qparams | {probs: QParams(jnp.float32(1), jnp.float32(0))})


def test_what_does_not_meet_a_cache():
    rule = dataclasses.replace(PRODUCTS, activation=dataclasses.replace(ROWS, rounding="stochastic"))
    with pytest.raises(ValueError, match=r"the cache 'k|the cache 'cache/k'"):
        quantize_fn(attention, [*RULES, rule]).plan(PARAMS, empty(), X[:, :1], jnp.int32(0))


@pytest.mark.slow
def test_a_static_query():
    """Its range is that of a prompt; what is larger saturates."""
    q = quantize_fn(attention, STATIC)
    qparams = q.init_qparams(PARAMS, empty(), X[:, :3], jnp.int32(0))
    assert list(qparams) == ["dot_general_3:lhs", "dot_general_4:rhs"]
    scale = qparams["dot_general_3:lhs"]
    observed = jnp.einsum("btm,mhd->bthd", X[:, :3], PARAMS["q"])
    assert_same_bits(scale.scale, jnp.abs(observed).max() / 127)

    def plain(params, cache, x, t):
        q, k, v = (jnp.einsum("btm,mhd->bthd", x, params[n]) for n in "qkv")
        cache = {"k": update_slice(cache["k"], k, (0, t, 0, 0)), "v": update_slice(cache["v"], v, (0, t, 0, 0))}
        query = quantize(q, QuantSpec(), scale._replace(spec=None))
        scores = dot_general(query, cache["k"], (((3,), (3,)), ((0, 2), (0, 2))))
        probs = jax.nn.softmax(jnp.where(jnp.arange(LENGTH) <= t, scores, -jnp.inf))
        y = dot_general(probs, cache["v"], (((3,), (1,)), ((0, 1), (0, 2))), spec=QuantSpec())
        return y.transpose(0, 2, 1, 3), cache

    step = jax.jit(functools.partial(q, qparams=qparams))
    (ys, cache), (want, by_hand) = steps(step, empty()), steps(jax.jit(plain), empty())
    assert_same_bits(ys, want)
    for a, b in zip(*map(jax.tree.leaves, (cache, by_hand)), strict=True):
        assert_same_bits(a, b)
    assert (np.asarray(ys) != np.asarray(steps(jax.jit(q), empty())[0])).any()
    plan = q.plan(PARAMS, empty(), X[:, :1], jnp.int32(0), qparams=qparams)
    assert [site.state for site in plan if site.entry in qparams] == ["static", "dynamic"]


SCALE = QParams(jnp.float32(0.02), jnp.float32(0))


def test_a_cache_of_one_scale_meets_static_operands_on_both_sides():
    rules = [Rule("cache/*", activation=QuantSpec(), kind="cache"), QUERIES]
    cache = {n: zeros(SHAPE, QuantSpec(), SCALE) for n in "kv"}
    q = quantize_fn(attention, rules)
    _, cache = q(PARAMS, cache, X, jnp.int32(0))
    args = PARAMS, cache, X[:, -1:], jnp.int32(LENGTH - 1)
    qparams = {"dot_general_3:lhs": SCALE, "dot_general_4:rhs": QParams(jnp.float32(1 / 127), jnp.float32(0))}
    assert not any(site.scaled_by for site in q.plan(*args, qparams=qparams))

    def plain(params, cache, x):
        query = quantize(jnp.einsum("btm,mhd->bthd", x, params["q"]), QuantSpec(), SCALE)
        scores = dot_general(query, cache["k"], (((3,), (3,)), ((0, 2), (0, 2))))
        probs = quantize(jax.nn.softmax(scores), QuantSpec(), qparams["dot_general_4:rhs"])
        return dot_general(cache["v"], probs, (((1,), (3,)), ((0, 2), (0, 1)))).transpose(0, 3, 1, 2)

    assert_same_bits(jax.jit(q)(*args, qparams=qparams)[0], jax.jit(plain)(*args[:3]))


EACH = QuantSpec(granularity=PerChannel((0, 1, 2, 3)))  # of a stack of layers
AXES = {
    "transposed": (EACH, lambda k, t: k[1].transpose(0, 2, 1, 3), ""),
    "a scale for each feature": (QuantSpec(granularity=PerChannel((0, 1, 4))), lambda k, t: k[1].swapaxes(1, 2), "k"),
    "blocks of tokens": (QuantSpec(granularity=PerBlock(2, 4)), lambda k, t: k[1].swapaxes(1, 2), "k"),
    "gathered": (EACH, lambda k, t: k[:, jnp.array([1, 0])][t].swapaxes(1, 2), ""),
    "halves": (EACH, lambda k, t: jnp.concatenate([k[1, ..., :2], k[1, ..., 2:]], -1).swapaxes(1, 2), "k"),
    "a branch": (EACH, lambda k, t: jax.lax.cond(t > 0, lambda: k[0], lambda: k[1]).swapaxes(1, 2), ""),
    "a loop": (EACH, lambda k, t: in_a_loop(k)[1].swapaxes(1, 2), ""),
    "turns of a scan": (EACH, lambda k, t: jax.lax.scan(lambda _, k: (0, k.swapaxes(1, 2)), 0, k)[1][1], ""),
}


def in_a_loop(k):
    """Written with two axes as one, which is another way to lie along them."""
    new = jnp.ones((1, 1, HEADS, FEATURES))
    body = lambda i, k: written(k.reshape(3, -1, HEADS, FEATURES), new, i).reshape(k.shape)
    return jax.lax.fori_loop(0, 3, body, k)


@by_default("transposed", "a loop")
@pytest.mark.parametrize("name", AXES)
def test_the_plan_knows_whether_scales_change_along_what_is_contracted(name):
    spec, read, scaled_by = AXES[name]

    def f(params, k, x, t, read=read):
        return jnp.einsum("bthd,bhsd->bhts", jnp.einsum("btm,mhd->bthd", x, params["q"]), read(k, t))

    q = quantize_fn(f, [Rule("k", activation=spec, kind="cache"), QUERIES])
    k = quantize(jax.random.normal(jax.random.key(0), (3, *SHAPE)), spec)
    args = {"q": PARAMS["q"]}, k, X[:, :1], jnp.int32(0)
    (site,) = (site for site in q.plan(*args) if site.kind == "act_act" and site.entry)
    assert site.scaled_by == scaled_by
    qparams = q.init_qparams(*args)
    assert (qparams[site.entry] is None) == bool(scaled_by)
    assert_same_bits(q(*args, qparams=qparams), q(*args))  # of the values at hand, both of them


def test_the_cache_is_written_in_place_and_not_made_float():
    shape = 2, 4096, HEADS, 128
    cache = {n: zeros(shape, KEYS) for n in "kv"}
    args = {n: ones((8, HEADS, 128)) for n in "qkv"}, cache, X[:, :1], jnp.int32(0)
    step = jax.jit(quantize_fn(attention, [Rule("cache/*", activation=KEYS, kind="cache"), PRODUCTS]), donate_argnums=1)
    memory = step.lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(v.nbytes for v in jax.tree.leaves(cache))
    if jax.__version_info__ >= (0, 9):  # XLA:CPU made int32 of the integers of such a product before
        assert memory.temp_size_in_bytes < 4 * int(np.prod(shape))


# Several devices


def mesh_of(kind):
    return jax.make_mesh((HEADS,), ("heads",), axis_types=(getattr(jax.sharding.AxisType, kind),))


def by_head(mesh, tree, axis=2):
    def put(v):
        spec = P(*[None] * axis, "heads") if v.ndim > axis and v.shape[axis] > 1 else P()
        return jax.device_put(v, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)


@pytest.mark.slow
@cases("name", WRITES, ["in a branch"])
def test_heads_on_explicit_axes(name):
    """Whole numbers, so that the projections have the same bits however they are split."""

    def f(params, cache, x, t):
        q, k, v = (jnp.einsum("btm,mhd->bthd", x, params[n]) for n in "qkv")
        cache = {n: WRITES[name](cache[n], new, t) for n, new in zip("kv", (k, v), strict=True)}
        unseen = jnp.where(jnp.arange(LENGTH) <= t, 0, -jnp.inf)[None, None, None]
        probs = exact_softmax(jnp.einsum("bthd,bshd->bhts", q, cache["k"]) + unseen)
        return jnp.einsum("bhts,bshd->bthd", probs, cache["v"]), cache

    whole, x = whole_numbers()
    rules = [Rule("cache/*", activation=KEYS, kind="cache"), QUERIES]
    q, cache = quantize_fn(f, rules), {n: zeros(SHAPE, KEYS) for n in "kv"}
    args = x[:, :1], jnp.int32(3)
    qparams = q.init_qparams(whole, cache, *args)
    step = jax.jit(q)
    want, written = step(whole, cache, *args, qparams=qparams)
    mesh = mesh_of("Explicit")
    with jax.set_mesh(mesh):
        whole, cache, qparams = by_head(mesh, whole, 1), by_head(mesh, cache), by_head(mesh, qparams)
        got, new = step(whole, cache, *args, qparams=qparams)
        for a, b in zip(*map(jax.tree.leaves, (new, cache)), strict=True):
            assert jax.typeof(a) == jax.typeof(b)
        assert jax.tree.structure(new) == jax.tree.structure(cache)
        loss = lambda whole, cache: (q(whole, cache, *args, qparams=qparams)[0] ** 2).sum()
        if name != "at an index each":  # of which JAX refuses to make a gradient, in float too
            jax.jit(jax.grad(loss))(whole, by_head(mesh, {n: jnp.zeros(SHAPE) for n in "kv"}))
    assert_same_bits(np.asarray(got), want)
    for a, b in zip(*map(jax.tree.leaves, (new, written)), strict=True):
        assert_same_bits(np.asarray(a), b)


SHARED = QuantSpec(granularity=PerChannel((0, 1)))  # by heads


def whole_numbers():
    return jax.tree.map(lambda v: jnp.round(9 * v), (PARAMS, X))


def in_shard_map(f, mesh, **kw):
    heads, kept = (P(None, "heads"), P(None, None, "heads"), P(), P()), P(None, None, "heads")
    return jax.shard_map(f, mesh=mesh, in_specs=heads, out_specs=(kept, kept), **kw)


@cases(
    ("kind", "name", "check_vma"),
    itertools.product(["Auto", "Explicit"], ["KEYS", "VALUES", "one scale"], [True, False]),
)
def test_a_shard_map_takes_and_gives_caches(kind, name, check_vma):
    spec = {"KEYS": KEYS, "VALUES": VALUES, "one scale": QuantSpec()}[name]
    mesh = mesh_of(kind)
    whole, x = whole_numbers()
    f, rules = (
        functools.partial(attention, softmax=exact_softmax),
        [Rule("cache/*", activation=spec, kind="cache"), PRODUCTS],
    )
    q, sharded = (jax.jit(quantize_fn(of, rules)) for of in (f, in_shard_map(f, mesh, check_vma=check_vma)))
    cache, args = (
        {n: zeros(SHAPE, spec, SCALE if name == "one scale" else None) for n in "kv"},
        (x[:, :2], jnp.int32(3)),
    )
    _, cache = q(whole, cache, x, jnp.int32(0))
    want = q(whole, cache, *args)
    with jax.set_mesh(mesh):
        got = sharded(by_head(mesh, whole, 1), by_head(mesh, cache), *args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert_same_bits(np.asarray(a), b)


@pytest.mark.slow
def test_a_gradient_through_a_shard_map():
    mesh = mesh_of("Auto")
    loss = lambda f: lambda params: (f(params, in_float(), X, jnp.int32(0))[0] ** 2).sum()
    got, want = (
        jax.grad(loss(quantize_fn(f, [*RULES, PRODUCTS])))(PARAMS) for f in (in_shard_map(attention, mesh), attention)
    )
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


def test_a_shard_map_may_not_take_apart_what_shares_a_scale():
    q = quantize_fn(in_shard_map(attention, mesh_of("Auto")), [Rule("cache/*", activation=SHARED, kind="cache")])
    with pytest.raises(ValueError, match=r"At 'cache/k': the cache leaves a shard_map split along axis 2.*Name axis 2"):
        q.plan(PARAMS, {n: zeros(SHAPE, SHARED) for n in "kv"}, X[:, :1], jnp.int32(0))


# Training


@pytest.mark.slow
@pytest.mark.parametrize(
    "products", [pytest.param([], marks=pytest.mark.slow), [PRODUCTS]], ids=["in float", "in integers"]
)
def test_the_rounding_of_the_cache_is_passed_straight_through(products):
    """Of a prompt with an empty cache in float, as of the rounded keys and values of a full pass."""
    q = quantize_fn(attention, [*RULES, *products])
    args, weight = (in_float(), X, jnp.int32(0)), jnp.sin(jnp.arange(X.size)).reshape(*X.shape[:2], HEADS, FEATURES)
    loss = lambda f: lambda params: (f(params, *args)[0] * weight).sum()
    got, want = (jax.jit(jax.value_and_grad(loss(f)))(PARAMS) for f in (q, functools.partial(by_hand, attention)))
    tolerance = 0.2 if products else 1e-4
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)
        assert np.abs(b).max() > 1
    assert_same_bits(q(PARAMS, *args)[0], q(PARAMS, empty(), *args[1:])[0])


def scores(params, keys, x, query=lambda v: v):
    return jnp.einsum("bthd,bshd->bhts", query(jnp.einsum("btm,mhd->bthd", x, params["q"])), keys)


def test_a_static_query_is_trained_as_it_is_served():
    """With a cache in float, in integers, and in a model that has none."""
    q, args = quantize_fn(attention, STATIC), (X, jnp.int32(0))
    qparams = q.init_qparams(PARAMS, in_float(), *args)
    small = qparams["dot_general_3:lhs"]._replace(scale=qparams["dot_general_3:lhs"].scale / 2)  # saturates
    qparams |= {"dot_general_3:lhs": small}
    trained, cache = q(PARAMS, in_float(), *args, qparams=qparams)
    assert_same_bits(trained, q(PARAMS, empty(), *args, qparams=qparams)[0])

    def without(params, x):
        return scores(params, jnp.einsum("btm,mhd->bthd", x, params["k"]), x)

    served = quantize_fn(scores, [Rule("keys", activation=KEYS, kind="cache"), QUERIES])
    (name,) = served.init_qparams(PARAMS, cache["k"], X)
    rules = [
        Rule(f"dot_general_2:{side}", activation=s, kind="act_act") for side, s in (("lhs", QuantSpec()), ("rhs", KEYS))
    ]
    training = quantize_fn(without, rules)
    of_training = {"dot_general_2:lhs": small, "dot_general_2:rhs": None}
    assert_same_bits(training(PARAMS, X, qparams=of_training), served(PARAMS, cache["k"], X, qparams={name: small}))


@pytest.mark.parametrize("rule", [Rule("w", weight_spec(8), ROWS), Rule("w", weight_spec(8)), Rule("w", None), None])
def test_the_plan_says_where_the_input_of_a_weight_is_a_cache(rule):
    """Its real values, once more quantized by the rule of the weight, or not."""
    f = lambda params, keys: jnp.einsum("bthd,df->bthf", keys, params["w"])
    rules, params = [rule] if rule else [], {"w": jax.random.normal(jax.random.key(0), (FEATURES, 3))}
    q, keys = quantize_fn(f, [Rule("keys", activation=KEYS, kind="cache"), *rules]), quantize(jnp.ones(SHAPE), KEYS)
    site = (plan := q.plan(params, keys))["w:input"]
    assert site.cache == "keys"
    if site.spec:
        assert "8 bits symmetric per token, of the real values of keys" in str(plan)
    else:
        assert site.why == "keys, a cache: its real values"
    assert_same_bits(q(params, keys), quantize_fn(f, rules)(params, dequantize(keys)))


def test_a_query_that_is_quantized_where_it_is_named():
    f = lambda params, keys, x: scores(params, keys, x, lambda v: quant_point(v, "query"))
    value, keys = Rule("query", activation=QuantSpec(), kind="value"), quantize(jnp.ones(SHAPE), KEYS)
    rules = [value, Rule("keys", activation=KEYS, kind="cache"), dataclasses.replace(QUERIES, pattern="**")]
    q, without = quantize_fn(f, rules), quantize_fn(scores, rules[1:])
    qparams = {"query": SCALE}
    assert list(q.init_qparams(PARAMS, keys, X)) == ["query"]
    want = without(PARAMS, keys, X, qparams={"dot_general_1:lhs": SCALE})
    assert_same_bits(q(PARAMS, keys, X, qparams=qparams), want)
    features = QuantSpec(granularity=PerChannel(3))  # scales that change along what is contracted
    rules[1] = Rule("keys", activation=features, kind="cache")
    with pytest.raises(ValueError, match=r"At .query#2.*the scales of the cache .keys'.*Drop the rule of the value"):
        quantize_fn(f, rules).plan(PARAMS, quantize(jnp.ones(SHAPE), features), X)


@pytest.mark.slow
def test_the_range_of_a_static_query_has_a_gradient():
    keys, weight = jax.random.normal(jax.random.key(0), SHAPE), jax.random.normal(jax.random.key(1), (2, 2, 12, 12))
    q = quantize_fn(scores, [Rule("keys", activation=KEYS, kind="cache"), QUERIES])
    by_hand = lambda scale: scores(PARAMS, fake_quant(keys, KEYS), X, lambda v: fake_quant(v, QuantSpec(), scale))
    want = jax.grad(lambda scale: (by_hand(scale) * weight).sum())(SCALE)
    for cache in keys, quantize(keys, KEYS):
        of = lambda scale, cache=cache: q(PARAMS, cache, X, qparams={"dot_general_1:lhs": scale})
        got = jax.grad(lambda scale, of=of: (of(scale) * weight).sum())(SCALE)
        np.testing.assert_allclose(got.scale, want.scale, rtol=1e-4)
    assert abs(want.scale) > 1


# Models of others


def tokens_of(seed, n, features=8):
    return jax.random.normal(jax.random.key(seed), (2, n, features))


def of_each_step(f, params, cache, x):
    ys = []
    for t in range(x.shape[1]):
        y, cache = f(params, cache, x[:, t : t + 1])
        ys.append(y)
    return jnp.concatenate(ys, 1), cache


@pytest.mark.slow
def test_flax_linen():
    nn = pytest.importorskip("flax.linen")

    def rounding(query, key, value, mask=None):
        return nn.dot_product_attention(query, fake_quant(key, KEYS), fake_quant(value, KEYS), mask=mask)

    make = functools.partial(nn.MultiHeadDotProductAttention, num_heads=2, qkv_features=8)
    x = tokens_of(0, 200)
    variables = make(decode=True).init(jax.random.key(1), x)

    def step(attention_fn, variables, x):
        return make(decode=True, attention_fn=attention_fn).apply(variables, x, mutable=["cache"])

    def of(f):
        return lambda params, cache, x: (lambda y, new: (y, new["cache"]))(*f({"params": params, "cache": cache}, x))

    rule = Rule("cache/cached_*", activation=KEYS, kind="cache")
    q = quantize_fn(functools.partial(step, nn.dot_product_attention), [rule])
    jitted = jax.jit(of(q))
    ints = variables["cache"] | {n: zeros((2, 200, 2, 4), KEYS) for n in ("cached_key", "cached_value")}
    ys, cache = of_each_step(jitted, variables["params"], ints, x)
    want, _ = of_each_step(jax.jit(of(functools.partial(step, rounding))), variables["params"], variables["cache"], x)
    assert_same_bits(ys, want)
    assert jax.tree.structure(cache) == jax.tree.structure(ints)
    assert jitted._cache_size() == 1
    causal = nn.make_causal_mask(jnp.ones((2, 200)))
    full = make(decode=False, attention_fn=rounding).apply({"params": variables["params"]}, x, mask=causal)
    np.testing.assert_allclose(ys, full, atol=1e-6)
    # A model in training has no cache: there rules for the products round as the cache will.
    products = "MultiHeadDotProductAttention/dot_general"
    training = quantize_fn(
        make(decode=False).apply,
        [Rule(f"{products}_{i}:{side}", activation=KEYS, kind="act_act") for i, side in ((0, "rhs"), (1, "lhs"))],
    )
    variables = {"params": variables["params"]}
    np.testing.assert_allclose(training(variables, x, mask=causal), full, atol=1e-6)
    loss = lambda f: lambda variables: (f(variables, x, mask=causal) ** 2).sum()
    got, want = (jax.grad(loss(f))(variables) for f in (training, make(decode=False, attention_fn=rounding).apply))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")

    def rounding(query, key, value, **kw):
        return nnx.dot_product_attention(query, fake_quant(key, KEYS), fake_quant(value, KEYS), **kw)

    def model(attention_fn):
        made = nnx.MultiHeadAttention(2, 8, decode=True, attention_fn=attention_fn, rngs=nnx.Rngs(0))
        made.init_cache((2, 200, 8))
        graphdef, params, cache, rest = nnx.split(made, nnx.Param, nnx.Cache, ...)

        def f(params, cache, x):
            made = nnx.merge(graphdef, params, cache, rest, copy=True)
            return made(x), nnx.state(made, nnx.Cache)

        return f, params, cache

    f, params, cache = model(nnx.dot_product_attention)
    plain, _, floats = model(rounding)
    q = jax.jit(quantize_fn(f, [Rule("cache/cached_*", activation=KEYS, kind="cache")]))
    x = tokens_of(0, 200)
    _, cache = q(params, cache, x[:, :1])  # a float cache comes back in integers
    _, floats = jax.jit(plain)(params, floats, x[:, :1])
    ys, cache = of_each_step(q, params, cache, x[:, 1:])
    want, _ = of_each_step(jax.jit(plain), params, floats, x[:, 1:])
    assert_same_bits(ys, want)
    assert q._cache_size() == 2


of_keras = pytest.mark.skipif(
    os.environ.get("KERAS_BACKEND") != "jax", reason="keras reads its backend when it is imported: KERAS_BACKEND=jax"
)


@pytest.mark.slow
@of_keras
def test_the_one_cache_of_keras_hub():
    """As its `call_with_cache` has it: (batch, layers, keys and values, tokens, heads, features)."""
    ops = pytest.importorskip("keras").ops

    def f(params, cache, x, at, rounded=lambda v: v):
        caches = []
        for i in range(2):
            own = cache[:, i, ...]
            q, k, v = (ops.einsum("btm,mhd->bthd", x, params[n] * (i + 1)) for n in "qkv")
            k = ops.slice_update(own[:, 0, ...], [0, at, 0, 0], k)
            v = ops.slice_update(own[:, 1, ...], [0, at, 0, 0], v)
            caches.append(ops.stack((k, v), axis=1))
            scores = ops.einsum("bthd,bshd->bhts", q, rounded(k))
            probs = ops.softmax(ops.where(ops.arange(12)[None] <= at + ops.arange(x.shape[1])[:, None], scores, -1e9))
            x = x + ops.reshape(ops.einsum("bhts,bshd->bthd", probs, rounded(v)), x.shape)
        return x, ops.stack(caches, axis=1)

    spec = QuantSpec(bits=4, granularity=PerChannel((0, 1, 2, 3, 4)))
    shape = 2, 2, 2, *SHAPE[1:]
    q = jax.jit(quantize_fn(f, [Rule("cache", activation=spec, kind="cache")]))
    plain = jax.jit(functools.partial(f, rounded=lambda v: fake_quant(v, VALUES)))
    cache, floats = zeros(shape, spec), jnp.zeros(shape)
    for t, n in (0, 3), (3, 1), (4, 1), (5, 1):
        args = tokens_of(t, n), jnp.int32(t)
        (y, cache), (want, floats) = q(PARAMS, cache, *args), plain(PARAMS, floats, *args)
        assert_same_bits(y, want)
    assert jax.tree.structure(cache) == jax.tree.structure(zeros(shape, spec))
    assert cache.pairs == (-1, 2)
    assert q._cache_size() == 2


@pytest.mark.slow
@of_keras
@pytest.mark.parametrize("name", ["GPT2", "Gemma", "Llama"])
@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def test_keras_hub(name, monkeypatch):
    """Grouped queries and a sliding window among them."""
    keras, models = pytest.importorskip("keras"), pytest.importorskip("keras_hub").models
    sizes = {"vocabulary_size": 50, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
    grouped = {"num_query_heads": 4, "num_key_value_heads": 2}
    window = {"head_dim": 4, "use_sliding_window_attention": True, "sliding_window_size": 6}
    own = {"GPT2": {"num_heads": 2, "max_sequence_length": 200}, "Gemma": grouped | window, "Llama": grouped}[name]
    backbone = getattr(models, f"{name}Backbone")(**sizes, **own)
    model = getattr(models, f"{name}CausalLM")(preprocessor=None, backbone=backbone)

    def f(params, cache, tokens, at):
        with keras.StatelessScope(state_mapping=list(zip(model.variables, params, strict=True))):
            logits, _, cache = model.call_with_cache(tokens, cache, at)
        return logits, cache

    params, tokens = [v.value for v in model.variables], np.random.default_rng(0).integers(1, 50, (2, 200), np.int32)
    shape = 2, 2, 2, 200, 2, 8 if name == "GPT2" else 4
    spec = QuantSpec(granularity=PerChannel((0, 1, 2, 3, 4)))
    q = jax.jit(quantize_fn(f, [Rule("cache", activation=spec, kind="cache")]))
    write = keras.ops.slice_update
    monkeypatch.setattr(keras.ops, "slice_update", lambda cache, at, new: write(cache, at, fake_quant(new, KEYS)))
    plain = jax.jit(f)
    cache, floats = zeros(shape, spec), jnp.zeros(shape)
    for t in range(200):
        args = tokens[:, t : t + 1], jnp.int32(t)
        want, floats = plain(params, floats, *args)
        with monkeypatch.context() as context:
            context.setattr(keras.ops, "slice_update", write)
            y, cache = q(params, cache, *args)
        assert_same_bits(y, want)
    assert q._cache_size() == 1


@pytest.mark.slow
def test_equinox():
    eqx = pytest.importorskip("equinox")

    class Attention(eqx.Module):
        query: eqx.nn.Linear
        key: eqx.nn.Linear
        value: eqx.nn.Linear

        def __call__(self, cache, x, t, rounded=lambda v: v):
            q, k, v = (layer(x).reshape(2, 4) for layer in (self.query, self.key, self.value))
            keys, values = cache[0].at[t].set(k), cache[1].at[t].set(v)
            scores = jnp.einsum("hd,shd->hs", q, rounded(keys))
            probs = jax.nn.softmax(jnp.where(jnp.arange(12) <= t, scores, -jnp.inf))
            return jnp.einsum("hs,shd->hd", probs, rounded(values)), (keys, values)

    model = Attention(*(eqx.nn.Linear(8, 8, key=jax.random.key(i)) for i in range(3)))
    params, static = eqx.partition(model, eqx.is_array)
    f = lambda params, cache, x, t, **kw: eqx.combine(params, static)(cache, x, t, **kw)
    spec = QuantSpec(granularity=PerChannel((0, 1)))
    q = jax.jit(quantize_fn(f, [Rule("cache/*", activation=spec, kind="cache")]))
    plain = jax.jit(functools.partial(f, rounded=lambda v: fake_quant(v, spec)))
    cache, floats = (zeros((12, 2, 4), spec),) * 2, (jnp.zeros((12, 2, 4)),) * 2
    for t in range(5):
        x = jax.random.normal(jax.random.key(t), (8,))
        (y, cache), (want, floats) = q(params, cache, x, jnp.int32(t)), plain(params, floats, x, jnp.int32(t))
        assert_same_bits(y, want)
    assert q._cache_size() == 1


def test_a_part_of_one_group_that_leaves_keeps_the_scale_of_a_group():
    """A scale of the tensor would stay where it is written."""
    spec = QuantSpec(granularity=PerChannel((0, 1)))

    def f(p, x, cache):
        cache = jax.lax.dynamic_update_slice(cache, x[None], (0, 0, 0))
        return x @ p["w"], cache[:, :1]

    q = quantize_fn(f, [("w", weight_spec(8)), Rule("cache", activation=spec, kind="cache")])
    params, x, cache = jax.eval_shape(lambda: ({"w": jnp.ones((4, 4))}, jnp.ones((2, 4)), zeros((1, 2, 4), spec)))
    _, part = jax.eval_shape(q, params, x, cache)
    assert (part.spec.granularity, part.scale.shape) == (PerChannel(0), (1, 1, 1))
