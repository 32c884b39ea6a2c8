# SPDX-License-Identifier: Apache-2.0
"""Caches of unmodified functions: arguments that are written, read and returned in integers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from lanes import cases

from jaxquant import (
    PerBlock,
    PerChannel,
    PerToken,
    QParams,
    QuantSpec,
    Rule,
    dequantize,
    fake_quant,
    mxfp4_spec,
    quantize,
    quantize_fn,
    weight_spec,
    zeros,
)

BATCH, LENGTH, HEADS, FEATURES = 2, 12, 2, 4
SHAPE = BATCH, LENGTH, HEADS, FEATURES
TOKENS = PerChannel((0, 1, 2))
KEYS, VALUES = QuantSpec(granularity=TOKENS), QuantSpec(bits=4, granularity=TOKENS)
RULES = [Rule("cache/k", activation=KEYS, kind="cache"), Rule("cache/v", activation=VALUES, kind="cache")]
X = np.random.default_rng(0).normal(size=(BATCH, LENGTH, 8)).astype(np.float32)
PARAMS = {n: jax.random.normal(jax.random.key(i), (8, HEADS, FEATURES)) for i, n in enumerate("qkv")}


def empty():
    return {"k": zeros(SHAPE, KEYS), "v": zeros(SHAPE, VALUES)}


def in_float():
    return {"k": jnp.zeros(SHAPE), "v": jnp.zeros(SHAPE)}


def written(cache, new, t):
    return jax.lax.dynamic_update_slice(cache, new, (0, t, 0, 0))


def attention(params, cache, x, t, write=written, rounded=lambda name, v: v):
    """Of some tokens, the first of which is the t-th; `rounded` is what a cache is where it is read."""
    q, k, v = (jnp.einsum("btm,mhd->bthd", x, params[n]) for n in "qkv")
    cache = {"k": write(cache["k"], k, t), "v": write(cache["v"], v, t)}
    scores = jnp.einsum("bthd,bshd->bhts", q, rounded("k", cache["k"]))
    seen = jnp.arange(cache["k"].shape[1])[None] <= t + jnp.arange(x.shape[1])[:, None]
    probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
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
    assert cache["v"].stored.dtype == jnp.int4


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
    "a cast that is returned": (lambda k: k.astype(jnp.bfloat16), "by 'the result of the function'"),
    "a custom derivative": (jax.nn.relu, "by 'custom_jvp_call'"),
}


@cases("name", OTHERS, ["arithmetic"])
def test_what_else_reads_it_in_float(name):
    read, by = OTHERS[name]

    def f(params, cache, x, t):
        y, cache = attention(params, cache, x, t)
        return y, cache, read(cache["k"])

    with pytest.raises(ValueError, match=f"At 'cache/k'.*{by}.*everywhere=True"):
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
            "At 'cache/k'.*Make it by jaxquant.zeros",
        ),
        (None, [Rule("cash/*", activation=KEYS, kind="cache")], r"matched no site of kind 'cache'.*'cache/k'"),
        (None, [RULES[0], Rule("cache/k", activation=VALUES, kind="cache")], "shadowed|matched no"),
        (None, [Rule("cache/*", activation=QuantSpec(), kind="cache")], "At 'cache/k'.*scales stay where"),
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
