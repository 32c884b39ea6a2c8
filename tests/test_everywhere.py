# SPDX-License-Identifier: Apache-2.0
"""Entries of a function: their keys and states, what every use of a parameter sees, and every slip told."""

import functools

import hand_written as by_hand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from hand_written import CHANNEL, WHOLE, Grid, exactly
from jax import lax
from jax.sharding import PartitionSpec as P
from lanes import cases
from uses import POINT, TOKENS, X, normal, together

from jaxquant import (
    PerBlock,
    PerChannel,
    PerToken,
    QArray,
    QParams,
    QuantSpec,
    Range,
    Rule,
    activation_spec,
    conv_general_dilated,
    dequantize,
    dot_general,
    fake_quant,
    histogram,
    merge,
    quantize,
    quantize_fn,
    quantize_params,
    weight_spec,
)
from jaxquant._transform._quantizing import Quantizing

W, A = weight_spec(8), activation_spec(8)
RULES = [Rule("*", W, A)]
P2 = {"v": normal(1, 8, 16), "w": normal(2, 16, 4)}
F = np.float32


def mlp(p, x):
    return jnp.tanh(x @ p["v"]) @ p["w"]


@functools.cache
def trained():
    """The function that several tests call, so that it is compiled once, and its qparams."""
    q = quantize_fn(mlp, RULES)
    return q, q.init_qparams(P2, X)


def changed(v, at, value):
    v = np.array(v)
    v[at] = value
    return v


def real(v, contracted):
    """What a weight stands for, by NumPy."""
    values, scale, _ = by_hand.levels(v, CHANNEL, contracted)
    return values.astype(F) * scale


def integers(v, axis, bits=8):
    """A QArray of a matrix, by NumPy, with a scale for each index of that axis."""
    values, scale, _ = by_hand.levels(v, Grid(bits), (1 - axis % 2,))
    return QArray(np.int8(values), scale, np.int8(0 * scale), weight_spec(bits, channel_axis=axis), v.dtype)


def qkv(p, x):
    return (x @ p["q"]) * (x @ p["k"]) + jnp.tanh(x) @ p["q"]


# Entries


def test_inputs_used_alike_are_one_entry_and_parameters_have_their_path():
    params = {"q": normal(1, 8, 8), "k": normal(2, 8, 8)}
    plan = quantize_fn(qkv, RULES).plan(params, X)
    assert {site.name: (site.entry, site.state) for site in plan} == {
        "q:input": ("q:input", "dynamic"), "q": ("q", "dynamic"), "k:input": ("q:input", "dynamic"),
        "k": ("k", "dynamic"), "q:input#2": ("q:input#2", "dynamic"), "q#2": ("q", "dynamic"),
    }  # fmt: skip
    s = jax.eval_shape(quantize_fn(qkv, RULES).init_qparams, params, X)
    assert set(s) == {"q:input", "q", "k", "q:input#2"}


def test_a_plan_says_static_dynamic_or_frozen_and_counts_the_spec_on_the_parameter():
    f = lambda p, x: lax.scan(lambda x, w: (jnp.tanh(x @ w.T), None), x, p["w"])[0]
    q, params = quantize_fn(f, RULES), {"w": normal(1, 3, 8, 8)}
    s = jax.eval_shape(q.init_qparams, params, X)
    assert jax.tree.map(lambda v: v.shape, s) == {"w": QParams((3, 8, 1), (3, 8, 1)), "w:input": QParams((3,), (3,))}
    site = q.plan(params, X, qparams=s)["w"]
    assert (site.spec.granularity, site.entry_spec.granularity, site.state) == (
        PerChannel(1),
        PerChannel((0, 1)),
        "static",
    )
    assert "channel (0, 1)" in str(q.plan(params, X))
    frozen = jax.eval_shape(lambda p, s: q.freeze(p, X, qparams=s), params, s)
    states = {site.name: site.state for site in q.plan(frozen, X, qparams=s | {"w:input": None})}
    assert states == {"w": "frozen", "w:input": "dynamic"}


@pytest.mark.slow
def test_none_makes_an_entry_dynamic():
    q, s = trained()
    assert_same_bits(q(P2, X, qparams=dict.fromkeys(s)), q(P2, X))
    jax.tree.map(assert_same_bits, q.init_qparams(P2, X, ranges={}), s | {"v:input": None, "w:input": None})
    only = q.init_qparams(P2, X, ranges=q.observe(P2, X) | {"w:input": None})
    assert only["w:input"] is None
    assert only["v:input"] is not None
    shapes = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert q.init_qparams(P2, shapes, ranges={})["v:input"] is None
    per_token = quantize_fn(mlp, [Rule("*", W, activation_spec(8, granularity=PerToken()))])
    assert per_token.observe(P2, X) == {}
    assert per_token.init_qparams(P2, X)["v:input"] is None


def test_what_is_static_ignores_the_batch():
    q, s = trained()
    others = lambda x, **kw: np.delete(q(P2, x, **kw), 3, 0)
    broken = changed(X, (3, 2), 1e9)
    assert_same_bits(others(broken, qparams=s), others(X, qparams=s))
    assert not np.array_equal(others(broken), others(X))


def test_a_nan_reaches_the_results_that_it_enters_and_no_others():
    q, s = trained()
    y = np.asarray(q(P2, changed(X, (3, 2), np.nan), qparams=s))
    assert np.isnan(y[3]).all()
    assert np.isfinite(np.delete(y, 3, 0)).all()
    params = P2 | {"w": changed(P2["w"], (0, 1), np.nan)}
    y = np.asarray(q(params, X, qparams=s))
    assert np.isnan(y[:, 1]).all()
    assert np.isfinite(np.delete(y, 1, 1)).all()


@cases(
    ("granularity",),
    [PerChannel(None), PerBlock(0, 32), PerBlock((0, 1), (32, 16))],
    [PerBlock((0, 1), (32, 16))],
)
def test_a_nan_of_a_matrix_reaches_its_column(granularity):
    """So large that the maximum of XLA:CPU forgets it."""
    q = quantize_fn(lambda w, x: x @ w, [Rule("**", QuantSpec(bits=4, granularity=granularity), activation_spec())])
    x, w = normal(1, 8, 96), normal(2, 96, 48)
    column, row = np.isnan(q(changed(w, (3, 5), np.nan), x)), np.isnan(q(w, changed(x, (6, 2), np.nan)))
    np.testing.assert_array_equal(column, np.broadcast_to(np.arange(48) == 5, (8, 48)))
    np.testing.assert_array_equal(row, np.broadcast_to(np.arange(8)[:, None] == 6, (8, 48)))


def refused(f, match, kind=ValueError):
    with pytest.raises(kind, match=match):
        f()


def test_slips_in_qparams_and_ranges_are_told():
    (q, s), ranges = trained(), trained()[0].observe(P2, X)
    without = lambda of, key: {k: v for k, v in of.items() if k != key}
    call = lambda s: lambda: q(P2, X, qparams=s)
    refused(call(without(s, "w:input")), r"got none for 'w:input'; the nearest.*'v:input'.*None as the value")
    refused(call(s | {"w:imput": s["w"]}), r"'w:imput', which is not an entry.*'w:input'")
    refused(call(s | {"w": s["v"]}), r"At 'w'.*must have shape \(1, 4\), got \(1, 16\).*a parameter of shape \(16, 4\)")
    refused(call([]), "must be a dict from entry", TypeError)
    refused(call(s | {"w": Range(0.0, 1.0)}), "At 'w'.*must be QParams or None", TypeError)
    init = lambda ranges: lambda: q.init_qparams(P2, X, ranges=ranges)
    refused(init(without(ranges, "v:input")), "`ranges`.*none for 'v:input'")
    refused(init(ranges | {"x": ranges["v:input"]}), "'x', which is not an entry")
    refused(init(ranges | {"v:input": histogram(X, A)}), "At 'v:input'.*range_from_histogram", TypeError)
    refused(init(ranges | {"v:input": Range(np.zeros(2, F), np.ones(2, F))}), r"At 'v:input'.*shape")
    refused(init(ranges | {"v:input": Range(jnp.inf, -jnp.inf)}), "At 'v:input'.*no batch has reached")
    refused(init(3), "`ranges` must be a dict", TypeError)
    per_token = quantize_fn(mlp, [Rule("*", W, activation_spec(8, granularity=PerToken()))])
    refused(lambda: per_token(P2, X, qparams=s), "At 'v:input'.*always dynamic")
    own = quantize_fn(lambda p, x, qparams=None: mlp(p, x), RULES)
    refused(lambda: own.freeze(P2, X, qparams=s), "`qparams` is an argument of the function")
    assert_same_bits(own(P2, X, qparams=1.0), q(P2, X))


def test_a_qarray_must_be_what_its_rule_says():
    q, s = trained()
    four, rows = P2 | {"v": integers(P2["v"], 1, bits=4)}, P2 | {"w": integers(P2["w"], 0)}
    refused(lambda: q(four, X), r"At 'v', chosen by the rule '\*'.*bits=4.*the rule makes")
    refused(lambda: q(rows, X), r"At 'w'.*PerChannel\(0\).*PerChannel\(1\)")
    negative = {path: integers(v, -1) for path, v in P2.items()}
    assert_same_bits(*jax.jit(lambda *of: [q(p, X) for p in of])(negative, q.freeze(P2, X)))
    refused(lambda: q(negative, X, qparams=s | {"v": QParams(1.0, 0.0)}), "At 'v'.*shape")


def test_two_ways_are_refused_with_both():
    tied = lambda p, x: jax.nn.relu(x @ p["w"]) @ p["w"].T
    message = r"At 'w#2'.*in two ways.*PerChannel\(1\)\) at 'w', and as.*PerChannel\(0\)\) at 'w#2'.*channel_axis"
    refused(lambda: quantize_fn(tied, RULES)({"w": P2["v"]}, X), message)
    refused(lambda: quantize_fn(tied, RULES).plan({"w": P2["v"]}, X), message)


# Every use


def tied(p, tokens):
    h = p["e"][tokens] * 2
    return h @ p["e"].T


EVERYWHERE = [Rule("*", W, A, everywhere=True)]


def test_a_tied_embedding_is_quantized_in_both_uses():
    params = {"e": normal(1, 8, 24)}
    q, half = quantize_fn(tied, EVERYWHERE), quantize_fn(tied, RULES)
    logits = lambda e: by_hand.exact("btd,ed->bte", (WHOLE, CHANNEL), e[TOKENS] * 2, params["e"])[0]
    both, in_one = jax.jit(lambda p: (q(p, TOKENS), half(p, TOKENS)))(params)
    assert_same_bits(both, logits(real(params["e"], (1,))))
    assert_same_bits(in_one, logits(np.asarray(params["e"])))
    sites = [(site.name, site.op, site.entry, site.shape) for site in q.plan(params, TOKENS) if site.spec]
    assert sites == [
        ("e:input", "dot_general", "e:input", (2, 3, 24)),
        ("e", "dot_general", "e", (24, 8)),
        ("e#2", "gather", "e", (8, 24)),
    ]
    refused(
        lambda: half.freeze(params, TOKENS),
        r"At 'e'.*quantized at 'e' and also read in float, by 'gather'.*everywhere=True",
    )
    refused(lambda: half({"e": integers(params["e"], 0)}, TOKENS), r"read in float.*given as a QArray")


@pytest.mark.slow
def test_gradients_of_a_tied_embedding_come_from_both_uses():
    params = {"e": normal(1, 8, 24)}
    s = (q := quantize_fn(tied, EVERYWHERE)).init_qparams(params, TOKENS, method="mse")
    rows = weight_spec(8, channel_axis=0)

    def by_hand(p, s):
        e = fake_quant(p["e"], rows, s["e"])
        return fake_quant(e[TOKENS] * 2, A, s["e:input"]) @ e.T

    gradient = lambda f: jax.grad(lambda p, s: jnp.sum(jnp.sin(f(p, s))), (0, 1))(params, s)
    got, want = gradient(lambda p, s: q(p, TOKENS, qparams=s)), gradient(by_hand)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())
    jax.tree.map(close, got, want)


def test_an_index_out_of_range_gives_what_the_float_gather_gives():
    params, tokens = {"e": normal(1, 8, 24)}, np.array([1, 9, -1, -9])
    f = lambda p, t: [p["e"].at[t].get(mode=mode) for mode in ("fill", "clip", None)]
    q = quantize_fn(f, [Rule("e", weight_spec(8, channel_axis=0), everywhere=True)])
    frozen, by_hand = q.freeze(params, tokens), {"e": real(params["e"], (1,))}
    got, served, want = jax.jit(lambda p, s, e, t: (q(p, t), q(s, t), f(e, t)))(params, frozen, by_hand, tokens)
    jax.tree.map(assert_same_bits, got, want)
    jax.tree.map(assert_same_bits, served, want)
    assert [bool(np.isnan(y).any()) for y in want] == [True, False, False]


@cases("granularity", [PerChannel(None), QuantSpec().granularity, PerBlock(None, 4)])
def test_a_dot_of_gathered_parameters_is_a_site(granularity):
    """Experts that data choose: the scale of each is gathered with it."""
    params, spec = {"w": normal(1, 4, 8, 5)}, QuantSpec(granularity=granularity)
    f = lambda p, x: jnp.einsum("bd,bdf->bf", x, p["w"][POINT])
    q = quantize_fn(f, [Rule("w", spec, A, everywhere=True)])
    (site,) = [site for site in q.plan(params, X) if site.name == "w"]
    separate = {PerChannel(None): PerChannel((0, 2)), PerBlock(None, 4): PerBlock(1, 4)}
    assert site.entry_spec.granularity == separate.get(granularity, PerChannel(0))
    s = q.init_qparams(params, X)
    frozen = q.freeze(params, X, qparams=s)
    served, trained = jax.jit(lambda s, *of: [q(p, X, qparams=s) for p in of])(s, frozen, params)
    assert_same_bits(served, trained)
    values, scale, _ = by_hand.levels(X, WHOLE, None)  # whose range s has
    want = np.einsum("bd,bdf->bf", values * scale, np.asarray(dequantize(frozen["w"]))[POINT])
    np.testing.assert_allclose(trained, want, rtol=1e-4, atol=1e-5)
    refused(
        lambda: quantize_fn(f, [Rule("w", spec, A)])(params, X),
        "of kind 'derived'.*everywhere=True. quantizes what is gathered",
    )


def test_without_a_dot_the_axis_is_named():
    f, params = lambda p, t: p["e"][t], {"e": normal(1, 8, 24)}
    refused(lambda: quantize_fn(f, EVERYWHERE)(params, TOKENS), "At 'e'.*no dot uses it.*channel_axis")
    q = quantize_fn(f, [Rule("e", weight_spec(8, channel_axis=-1), everywhere=True)])
    assert_same_bits(q(params, TOKENS), real(params["e"], (0,))[TOKENS])
    refused(lambda: quantize_fn(f, [("e", W)])(params, TOKENS), "matched no site.*everywhere=True")
    refused(lambda: Rule("e", activation=A, kind="act_act", everywhere=True), "`everywhere` is for parameters")
    refused(lambda: quantize_params(params, EVERYWHERE[:1]), "everywhere=True, which a function")


def test_what_is_returned_or_carried_is_read_in_float():
    """A parameter that leaves the ways on which integers follow has its own values, and cannot be frozen."""
    f = lambda p, x: (x @ p["w"], p["w"])
    q, both, params = quantize_fn(f, RULES), quantize_fn(f, EVERYWHERE), {"w": P2["v"]}
    frozen = both.freeze(params, X)
    passed, served, trained = jax.jit(lambda p, s: [of[1] for of in (q(p, X), both(s, X), both(p, X))])(params, frozen)
    assert_same_bits(passed, params["w"])
    refused(lambda: q.freeze(params, X), "the result of the function")
    assert_same_bits(trained, real(params["w"], (0,)))
    assert_same_bits(served, trained)
    rolled = lambda p, x: lax.fori_loop(0, 2, lambda i, c: (jnp.roll(c[0], 1, 0), c[1] @ c[0]), (p["w"], x))[1]
    refused(lambda: quantize_fn(rolled, RULES)({"w": normal(1, 8, 8)}, X), "'w', which is in an op of kind 'derived'")


# Another function at each site


MORE = "one value in several ops", "over layers in blocks", "cond", "kept", "gathered by data"


SOME = "plain", "tied embedding"


@functools.cache
def served(names):
    """Several uses as one function, quantized, in float and frozen, with the values of all three."""
    f, params, rules = together(names)
    q = quantize_fn(f, rules)
    s = q.init_qparams(params, X, ranges=merge(q.observe(params, X), q.observe(params, -np.asarray(X))))
    frozen = q.freeze(params, X, qparams=s)
    return q, params, s, frozen, *jax.jit(lambda p, s: (q(p, X, qparams=s), f(p, X)))(params, s)


@pytest.mark.parametrize("names", [SOME, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"])
def test_the_function_can_be_rebuilt_with_fake_quant_at_its_sites(names):
    q, params, s, frozen, want, in_float = served(names)
    called = []
    view = q.at_sites(lambda info, x: (called.append(info.name), fake_quant(x, info.spec, info.qparams))[1])
    identity = q.at_sites(lambda info, x: x)
    of_all = jax.jit(lambda p, frozen, s: (view(p, X, qparams=s), view(frozen, X, qparams=s), identity(p, X)))
    *rebuilt, same = of_all(params, frozen, s)
    assert sorted(called) == sorted(2 * [site.name for site in q.plan(params, X) if site.spec])
    for name, y in want.items():
        for got in rebuilt:
            np.testing.assert_allclose(got[name], y, rtol=0, atol=2e-2 * np.abs(y).max(), err_msg=name)
            assert np.median(np.abs(got[name] - y)) < 1e-5 * np.abs(y).max(), name
        assert_same_bits(same[name], in_float[name], name)


def test_a_site_is_given_what_the_plan_says():
    q, s = trained()
    seen = {}
    jax.eval_shape(q.at_sites(lambda info, x: (seen.update({info.name: (info, x.shape)}), x)[1]), P2, X)
    assert {name: info for name, (info, _) in seen.items()} == {site.name: site for site in q.plan(P2, X)}
    assert all(info.shape == shape for info, shape in seen.values())

    @jax.jit
    def given(p, s):
        found = {}
        q.at_sites(lambda info, x: (found.update({info.name: info.qparams}), x)[1])(p, X, qparams=s)
        return found

    jax.tree.map(assert_same_bits, {name: QParams(*v, s[name].spec) for name, v in given(P2, s).items()}, s)
    refused(lambda: q.at_sites(3), "`site` must be a function", TypeError)
    refused(lambda: q.at_sites(lambda info, x: x[:1])(P2, X), r"`site` must return.*\[6, 8\] at 'v:input'")


def test_an_op_is_given_what_its_sites_make():
    q, params, s, frozen, want, in_float = served(SOME)
    called = []

    def site(info, x):
        if info.op != "dot_general":
            return fake_quant(x, info.spec, info.qparams)
        return quantize(x, info.spec, info.qparams)

    def op(info, lhs, rhs):
        called.append(info.name)
        assert {type(lhs), type(rhs)} == {QArray}
        y = dot_general(lhs, rhs, info.params["dimension_numbers"])
        assert (y.shape, y.dtype) == (info.result.shape, info.result.dtype)
        return y

    view, float_op = q.at_sites(site, op), q.at_sites(lambda info, x: x, lambda info, lhs, rhs: info(lhs, rhs))
    of_all = jax.jit(lambda p, frozen, s: (view(p, X, qparams=s), view(frozen, X, qparams=s), float_op(p, X)))
    *rebuilt, same = of_all(params, frozen, s)
    assert len(called) == 2 * len([site for site in q.plan(params, X) if site.name.endswith(":input")])
    for got in rebuilt:
        assert_same_bits(got["plain"], want["plain"])
        np.testing.assert_allclose(got["tied embedding"], want["tied embedding"], rtol=1e-6)  # the table is squared
    for name, y in same.items():
        assert_same_bits(y, in_float[name], name)


def test_an_op_with_one_site_is_given_the_other_operand_as_it_is():
    q = quantize_fn(lambda p, x: x @ p["w"], [Rule("w", W)])
    op = lambda info, x, w: info(x, dequantize(w))
    view = q.at_sites(lambda info, w: quantize(w, info.spec, info.qparams), op)
    got, want = jax.jit(lambda w, by_hand: (view({"w": w}, X), X @ by_hand))(P2["v"], real(P2["v"], (0,)))
    assert_same_bits(got, want)
    refused(lambda: q.at_sites(lambda info, x: x, 3), "`op` must be a function", TypeError)
    refused(
        lambda: q.at_sites(lambda info, x: x, lambda info, x, w: x)({"w": P2["v"]}, X),
        r"`op` must return an array of shape and dtype float32\[6, \d+\] at 'w:input' and 'w'",
    )


# The same by hand


def test_a_forward_pass_by_hand_on_the_integer_ops_is_the_frozen_function():
    numbers = ("NHWC", "HWIO", "NHWC")

    def f(p, x):
        h = lax.conv_general_dilated(x, p["c"], (1, 1), "SAME", dimension_numbers=numbers)
        return jax.nn.relu(h).reshape(2, -1) @ p["w"]

    params, x = {"c": normal(1, 3, 3, 1, 4), "w": normal(2, 96, 5)}, normal(3, 2, 3, 8, 1)
    q = quantize_fn(f, RULES)
    s = q.init_qparams(params, x, ranges={key: Range(F(-1), F(2)) for key in ("c:input", "w:input")})
    frozen = q.freeze(params, x, qparams=s)
    assert isinstance(frozen["c"], QArray)

    def by_hand(frozen, s, x):
        x = quantize(x, A, s["c:input"])
        h = conv_general_dilated(x, frozen["c"], (1, 1), "SAME", dimension_numbers=numbers)
        h = quantize(jax.nn.relu(h).reshape(2, -1), A, s["w:input"])
        return dot_general(h, frozen["w"], (((1,), (0,)), ((), ())))

    both = jax.jit(lambda frozen, s, x: (q(frozen, x, qparams=s), by_hand(frozen, s, x)))
    assert_same_bits(*both(frozen, s, x))


@pytest.mark.slow
def test_a_frozen_function_is_differentiated_with_respect_to_its_input():
    q = quantize_fn(mlp, RULES)
    s = q.init_qparams(P2, X)
    gradient = lambda params: jax.grad(lambda x: jnp.sum(jnp.sin(q(params, x, qparams=s))))(X)
    np.testing.assert_allclose(gradient(q.freeze(P2, X, qparams=s)), gradient(P2), rtol=1e-6)


# What other bits than before part 7 have


def test_pieces_and_casts_of_a_parameter_have_its_own_range_and_integers():
    w = changed(P2["v"], 0, 10 * np.asarray(P2["v"])[0])  # the range is that of the first row
    x, x16 = np.asarray(X)[:, :3], np.asarray(X).astype(jnp.bfloat16)
    half = lambda p, x: x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)
    piece, both = quantize_fn(lambda p, x: x @ p["w"][3:6], RULES), quantize_fn(half, RULES)
    weight_only = quantize_fn(half, [("w", W)])
    functions = lambda p, x, x16: (piece(p, x), both(p, x16), weight_only(p, x16))
    of_piece, of_both, alone = jax.jit(functions)({"w": w}, x, x16)
    (values, scale, _), (whole, w_scale, _) = by_hand.levels(x, WHOLE, None), by_hand.levels(w, CHANNEL, (0,))
    wanted_alone = ((x16.astype(F) @ whole.astype(F)) * w_scale).astype(jnp.bfloat16)
    want = (values @ whole[3:6]).astype(F) * (scale * w_scale)
    assert_same_bits(of_piece, want)
    assert not np.array_equal(want, exactly(x, w[3:6]))
    assert_same_bits(of_both, exactly(x16, w).astype(jnp.bfloat16))
    assert_same_bits(alone, wanted_alone)


@pytest.mark.slow
def test_a_shard_of_a_parameter_has_its_range():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("model",))
    cut = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("model"), P(None, "model")), out_specs=P())
    f = lambda p, x: cut(lambda w, x: lax.psum(x @ w, "model"))(p["w"], x)
    params = {"w": P2["v"].at[0].mul(10.0)}
    for rules in ([("w", W)], [Rule("w", weight_spec(8, block_size=2))], RULES):
        q = quantize_fn(f, rules)
        s = q.init_qparams(params, X)
        frozen = q.freeze(params, X, qparams=s)
        assert_same_bits(q(frozen, X, qparams=s), q(params, X, qparams=s))
        assert_same_bits(q(q.freeze(params, X), X), q(params, X))
        whole = quantize_fn(lambda p, x: x @ p["w"], rules)
        np.testing.assert_allclose(q(params, X, qparams=s), whole(params, X, qparams=s), rtol=1e-5, atol=1e-5)
        assert jax.tree.map(jnp.shape, s) == jax.tree.map(jnp.shape, whole.init_qparams(params, X))


def test_all_reads_that_only_the_evaluation_sees_are_found_at_once(monkeypatch):
    """Branches give parameters, and something reads them in float: the function is evaluated twice, not once a read."""
    given, parameter = [], Quantizing.parameter

    def noted(self, path, *of):
        given.append(path)
        return parameter(self, path, *of)

    def f(p, x):
        for a, b in ("ab", "cd"):
            w = lax.cond(x.sum() > 0, lambda a=a: p[a], lambda b=b: p[b])
            x = x @ w + x @ p[a] + x @ p[b] + jnp.sin(w).sum()
        return x

    monkeypatch.setattr(Quantizing, "parameter", noted)
    jax.eval_shape(quantize_fn(f, RULES), dict.fromkeys("abcd", jax.ShapeDtypeStruct((8, 8), jnp.float32)), X)
    assert sorted(given) == [*"aabbccdd"]
