# SPDX-License-Identifier: Apache-2.0
"""Values that are quantized where `quant_point` names them, and whose integers the dots take that meet them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from hand_written import Grid, exact, levels
from jax.sharding import PartitionSpec as P
from lanes import cases

from jaxquant import (
    PerToken,
    QParams,
    QuantSpec,
    Rule,
    activation_spec,
    fake_quant,
    quant_point,
    quantize_fn,
    weight_spec,
)

F = np.float32


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(F)


X, PARAMS = normal(0, 6, 8), {"a": normal(1, 8, 12) / 3, "b": normal(2, 6, 4) / 3}
W8, A8 = weight_spec(8), activation_spec(8)
WEIGHTS = Rule("*", W8, A8)
TOKENS = activation_spec(8, granularity=PerToken())
POOLED = Rule("pooled", activation=A8, kind="value")
VALUE = Rule("v", activation=A8, kind="value")
WHOLE = Grid(8, affine=True, whole=True)


def pooled(p, x):
    return quant_point(jax.nn.relu(x @ p["a"]).reshape(len(x), 6, 2).mean(-1), "pooled")


def model(p, x):
    return pooled(p, x) @ p["b"]


def dot(x, w):
    """By hand, of 8 bits."""
    return exact("mk,kn->mn", (WHOLE, Grid(8)), x, w)[0]


def real(v, grid=WHOLE):
    level, scale, _ = levels(v, grid, (0,))
    return level.astype(F) * scale


def static_dot(x, w, of_x, of_w):
    """By hand, with these qparams."""
    on_grid = lambda v, of, spec: np.clip(np.rint(v / of.scale) + of.zero_point, spec.qmin, spec.qmax) - of.zero_point
    return on_grid(x, of_x, A8) @ on_grid(w, of_w, W8) * (of_x.scale * of_w.scale)


def pooled_by_hand(x):
    return np.maximum(x, 0).reshape(len(x), 6, 2).sum(-1) / F(2)


@functools.cache
def calibrated():
    """With qparams for every entry."""
    q = quantize_fn(model, [POOLED, WEIGHTS])
    return q, jax.device_get(q.init_qparams(PARAMS, X, ranges=q.observe(PARAMS, X)))


def test_the_dot_takes_the_integers_of_the_value():
    q, both = calibrated()
    plan = q.plan(PARAMS, X)
    assert [(site.name, site.kind, site.entry) for site in plan] == [
        ("a:input", "weight", "a:input"),
        ("a", "weight", "a"),
        ("pooled", "value", "pooled"),
        ("pooled#2", "weight", "pooled"),  # the input of b
        ("b", "weight", "b"),
    ]
    expected = dot(pooled_by_hand(dot(X, PARAMS["a"])), PARAMS["b"])
    assert_same_bits(jax.jit(q)(PARAMS, X), expected)
    assert_same_bits(q(q.freeze(PARAMS, X), X), expected)
    assert set(both) == {"a:input", "a", "pooled", "b"}
    static = q(q.freeze(PARAMS, X, qparams=both), X, qparams={key: both[key] for key in ("a:input", "pooled")})
    value = pooled_by_hand(static_dot(X, PARAMS["a"], both["a:input"], both["a"]))
    assert_same_bits(static, static_dot(value, PARAMS["b"], both["pooled"], both["b"]))


def test_a_name_without_a_rule_is_no_site():
    assert [site.name for site in quantize_fn(model, [WEIGHTS]).plan(PARAMS, X)] == ["a:input", "a", "pooled", "b"]
    text = lambda rules: jax.jit(quantize_fn(model, rules)).lower(PARAMS, X).as_text()
    assert text([Rule("pooled", None, kind="value"), WEIGHTS]) == text([WEIGHTS])


MOVES = {
    "reshape": lambda v: v.reshape(3, 2, 6).reshape(6, 6),
    "transpose": lambda v: v.T,
    "slice": lambda v: v[1:4],
    "cast": lambda v: v.astype(jnp.bfloat16),
    "checkpoint": jax.checkpoint(lambda v: v[::-1]),
    "jit": jax.jit(lambda v: v[:2]),
    "cond": lambda v: jax.lax.cond(v.shape[0] > 2, lambda v: v, lambda v: v, v),
}


@cases("name", MOVES, ["reshape", "transpose"])
def test_moved_it_is_the_same_value(name):
    move = MOVES[name]
    meets = lambda p, v: v @ p["w"].astype(v.dtype)
    q = quantize_fn(lambda p, x: meets(p, move(quant_point(x * 2, "v"))), [VALUE, WEIGHTS])
    params, x = {"w": normal(3, 6, 4)}, normal(4, 6, 6)
    assert q.plan(params, x)["v#2"].entry == "v"
    (v, v_scale, _), (w, w_scale, _) = levels(x * 2, WHOLE, (1,)), levels(params["w"], Grid(8), (0,))
    y = q(params, x)
    assert_same_bits(y, (F(move(F(v))) @ F(w) * (v_scale * w_scale)).astype(y.dtype))


def test_what_computes_with_it_sees_the_quantized_value():
    f = lambda p, x: jnp.abs(quant_point(x, "v")) + quant_point(x * 2, "other")
    assert_same_bits(jax.jit(quantize_fn(f, [VALUE]))({}, X), np.abs(real(X)) + X * 2)


def test_the_gradient_is_that_of_fake_quant():
    q, scale = quantize_fn(model, [POOLED, Rule("*", W8)]), calibrated()[1]["pooled"]
    times = quantize_fn(lambda w, x: x @ w, [Rule("", W8)])  # of integers, whose levels hang on the last bits

    def by_hand(p, scale):
        v = jax.nn.relu(times(p["a"], X)).reshape(6, 6, 2).mean(-1)
        return times(p["b"], fake_quant(v, A8, scale)).sum()

    ours = lambda p, s: q(p, X, qparams={"a": None, "b": None, "pooled": s}).sum()
    got, want = (jax.jit(jax.grad(f, (0, 1)))(PARAMS, scale) for f in (ours, by_hand))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_view_gives_it_once():
    seen = []

    def site(info, x):
        seen.append((info.name, info.qparams is not None))
        return x

    q, qparams = calibrated()
    y = jax.jit(q.at_sites(site))(PARAMS, X, qparams=qparams)
    assert dict(seen) == dict.fromkeys(("a:input", "a", "pooled", "b"), True)
    np.testing.assert_allclose(y, pooled_by_hand(X @ PARAMS["a"]) @ PARAMS["b"], atol=1e-5)


def test_a_nan_stays_in_its_row():
    q = quantize_fn(
        lambda p, x: (quant_point(x, "v") @ p["w"], quant_point(x, "v") + 1),
        [VALUE, WEIGHTS],
    )
    x = X[:, :6].copy()
    x[2, 1] = np.nan
    y, v = q({"w": PARAMS["b"]}, x)
    assert np.isnan(y).any(1).tolist() == [False, False, True, False, False, False]
    assert np.isnan(v).sum() == 1


@pytest.mark.slow
def test_in_a_scan_each_layer_has_its_own_range():
    w, x = normal(5, 3, 6, 6) * F([1, 4, 0.1])[:, None, None], X[:, :6]
    layer = lambda p, x: quant_point(x @ p["w"], "v") @ p["w"]
    q, one = (
        quantize_fn(f, [VALUE, WEIGHTS])
        for f in (lambda p, x: jax.lax.scan(lambda x, p: (layer(p, x), None), x, p)[0], layer)
    )
    ranges = q.observe({"w": w}, x)
    assert ranges["v"].x_max.shape == (3,)
    qparams = jax.device_get(q.init_qparams({"w": w}, x, ranges=ranges))
    static, dynamic = x, np.stack([x, x[::-1] * 2])
    for i in range(3):
        static = one({"w": w[i]}, static, qparams={key: QParams(*(v[i] for v in of)) for key, of in qparams.items()})
        dynamic = np.stack([dot(dot(x, w[i]), w[i]) for x in dynamic])
    assert_same_bits(q({"w": w}, x, qparams=qparams), static)
    assert_same_bits(jax.vmap(q, (None, 0))({"w": w}, np.stack([x, x[::-1] * 2])), dynamic)


@pytest.mark.slow
def test_each_device_has_a_range_of_its_own():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x, w):
        v = jax.lax.all_gather(quant_point(x, "v"), "d", tiled=True)
        return (v @ w)[None], v[None]

    on_devices = jax.shard_map(body, mesh=mesh, in_specs=(P("d"), P()), out_specs=(P("d"), P("d")), check_vma=False)
    x = np.concatenate([X, 100 * X])
    y, v = quantize_fn(lambda p, x: on_devices(x, p["w"]), [VALUE, WEIGHTS])({"w": PARAMS["a"]}, x)
    expected = np.concatenate([real(part) for part in (X, 100 * X)])
    for i in range(2):
        assert_same_bits(v[i], expected)
        np.testing.assert_allclose(y[i], expected @ PARAMS["a"], rtol=0.02, atol=3)


def test_a_parameter_beside_a_value_is_no_part_of_it():
    spec = QuantSpec()
    beside = lambda order: lambda p, x: (jnp.concatenate([quant_point(x, "v"), p["w"]][::order]), x @ p["w"].T)
    for order in 1, -1:
        q = quantize_fn(beside(order), [Rule("v", activation=spec, kind="value"), Rule("w", spec)])
        y, _ = q({"w": PARAMS["a"].T}, X)
        assert_same_bits(y, np.concatenate([real(X, Grid(8, whole=True)), PARAMS["a"].T][::order]))


def test_names_in_what_f_differentiates_and_of_constants_are_sites():
    gradient = lambda x: jax.grad(lambda x: jnp.sin(quant_point(x * x, "v")).sum())(x)
    f = lambda p, x: (gradient(x) + quant_point(PARAMS["a"].T[:6] * 2, "c")) @ p["w"]
    plan = quantize_fn(f, [Rule("*", activation=A8, kind="value")]).plan({"w": PARAMS["a"]}, X)
    assert [site.name for site in plan if site.kind == "value"] == ["v", "c"]


def test_what_leaves_a_kept_derivative_is_an_input_of_its_own():
    @jax.custom_vjp
    def f(x):
        return quant_point(jnp.tanh(x), "v")

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * 2,))
    keep = Rule("v", activation=A8, kind="value", custom="keep")
    q = quantize_fn(lambda p, x: f(x) @ p["a"], [keep, WEIGHTS])
    assert q.plan(PARAMS, X)["v#2"].entry == "v#2"
    np.testing.assert_allclose(q(PARAMS, X), np.tanh(X) @ PARAMS["a"], atol=0.1)
    assert_same_bits(jax.jit(jax.grad(lambda x: f(x).sum()))(X), np.full_like(X, 2))


def test_as_integers_and_back_it_is_another_value():
    f = lambda p, x: quant_point(x * 9, "v").astype(jnp.int32).astype(jnp.float32) @ p["a"]
    q = quantize_fn(f, [VALUE, WEIGHTS])
    assert q.plan(PARAMS, X)["v#2"].entry == "v#2"
    assert np.isfinite(q(PARAMS, X)).all()


def test_the_name_that_has_a_rule_counts():
    f = lambda p, x: quant_point(quant_point(x, "v"), "u") @ p["a"]
    for named in "v", "u":
        q = quantize_fn(f, [Rule(named, activation=A8, kind="value"), WEIGHTS])
        sites = {site.name: site.entry for site in q.plan(PARAMS, X)}
        assert sites == ({"v": "v", "u": "v", "a": "a"} if named == "v" else {"u": "u", "u#2": "u", "a": "a"})
        assert_same_bits(q(PARAMS, X), dot(X, PARAMS["a"]))


def test_rows_of_an_embedding_are_a_value():
    rows = np.int32([1, 3, 3])
    f = lambda p, x: quant_point(p["a"][rows], "v") @ p["w"]
    q, params = quantize_fn(f, [VALUE, Rule("w", W8, A8)]), {"a": PARAMS["a"], "w": PARAMS["a"].T}
    assert q.plan(params, X)["v"].spec == A8
    assert_same_bits(q(params, X), dot(params["a"][rows], params["w"]))


@pytest.mark.parametrize(
    ("f", "rules", "message"),
    [
        (model, [POOLED, Rule("*", W8, QuantSpec())], r"At 'pooled#2'.*is the value 'pooled', which is quantized to"),
        (model, [Rule("pooled", activation=TOKENS, kind="value")], "has one scale, got"),
        (model, [Rule("poled", activation=A8, kind="value")], r"matched no site of kind 'value'.*'pooled'"),
        (lambda p, x: x @ quant_point(p["a"], "v"), [VALUE], "is the parameter 'a'"),
        (lambda p, x: quant_point(x, "a") @ p["a"], [WEIGHTS], "'a' is the path of a parameter and the name"),
        (lambda p, x: quant_point(x > 0, "v"), [VALUE], "must be floating.*bool"),
    ],
)  # fmt: skip
def test_errors(f, rules, message):
    with pytest.raises(ValueError, match=message):
        quantize_fn(f, rules).plan(PARAMS, X)


@pytest.mark.parametrize("kw", [{"weight": W8}, {"op": "dot_general"}, {"gradient": "bfloat16"}])
def test_a_rule_for_values_is_of_no_product(kw):
    with pytest.raises(ValueError, match='kind="value"'):
        Rule("v", activation=A8, kind="value", **kw)


def test_a_value_with_the_name_of_a_parameter_is_refused():
    """The parameter would be quantized as if it were the value, though no rule is for it."""
    scores = lambda p, x: quant_point(x * p["q"][None], "q") @ quant_point(x, "k").T
    q = quantize_fn(scores, [Rule("*", activation=A8, kind="act_act")])
    with pytest.raises(ValueError, match="'q' is the path of a parameter and the name of an input"):
        q({"q": np.ones(4, np.float32)}, np.ones((3, 4), np.float32))
    value = quantize_fn(lambda p, x: p["q"][None] + quant_point(x, "q"), [Rule("q", activation=A8, kind="value")])
    with pytest.raises(ValueError, match="'q' is the path of a parameter"):
        value({"q": np.ones(4, np.float32)}, np.ones((3, 4), np.float32))
