# SPDX-License-Identifier: Apache-2.0
"""A report says of each parameter and input what one computes by hand, alone and on the loss."""

import dataclasses
import functools
import itertools
import math

import hand_written as by_hand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hand_written import Grid
from jax import lax
from uses import X, normal

from jaxquant import (
    PerToken,
    QArray,
    QParams,
    QuantSpec,
    Rule,
    activation_spec,
    quantize_fn,
    report,
    save,
    weight_spec,
)
from jaxquant._report import _worst_channel
from jaxquant.solve import choose_bits
from jaxquant.typing import ReportRow

W4, A4 = weight_spec(4), activation_spec(4)
COLUMNS, WHOLE = Grid(4), Grid(4, affine=True, whole=True)
F = np.float32
V, W = np.array(normal(1, 8, 24)), np.asarray(normal(2, 24, 5))
V[:, 3] = 0
PARAMS, X = {"v": V, "w": W}, np.asarray(X)
HIDDEN = np.maximum(X @ V, 0)
TARGETS = HIDDEN @ W + np.asarray(normal(3, 6, 5)) / F(10)


def mlp(p, x):
    return jax.nn.relu(x @ p["v"]) @ p["w"]


def loss(y):
    return ((y - TARGETS) ** 2).mean()


Q = quantize_fn(mlp, [Rule("*", W4, A4)])
OPERANDS = {"v": (V, COLUMNS), "w": (W, COLUMNS), "v:input": (X, WHOLE), "w:input": (HIDDEN, WHOLE)}


@functools.cache
def found():
    return report(Q, PARAMS, X, loss=loss)


def in_float64(x, grid):
    """By NumPy: real values, those quantized, and their integers."""
    values, scale, _ = by_hand.levels(x, grid, 0)
    return np.float64(x), values * np.float64(scale), values


def quantized(x, grid):
    return in_float64(x, grid)[1].astype(F)


def test_errors_of_parameters_and_inputs_are_those_of_numpy():
    for entry, (x, grid) in OPERANDS.items():
        row, (real, nearest, values) = found()[entry], in_float64(x, grid)
        noise = ((nearest - real) ** 2).sum()
        np.testing.assert_allclose(row.sqnr, 10 * np.log10((real**2).sum() / noise), rtol=1e-5)
        np.testing.assert_allclose(row.max_error, np.abs(nearest - real).max(), rtol=1e-5)
        assert (row.used_levels, row.levels) == (len(np.unique(values)), 16 if grid.affine else 15)
        assert row.clipped == 0


def test_the_worst_channel_is_that_of_numpy():
    for entry in ("v", "w"):
        row, (real, nearest, _) = found()[entry], in_float64(*OPERANDS[entry])
        ((place,), ratio) = row.worst_channel
        noise, signal = ((v**2).sum(0) for v in (nearest - real, real))
        worst = np.argmax(noise / np.maximum(signal, 1e-30))
        assert place == worst
        np.testing.assert_allclose(ratio, 10 * np.log10(signal[worst] / noise[worst]), rtol=1e-5)
        assert f"{place}: {ratio:.1f}" in str(found())
    assert found()["v:input"].worst_channel is None
    assert _worst_channel(np.ones((1, 3), F), np.zeros((1, 3), F)) is None


def test_sizes_are_those_of_the_file_and_channels_of_zeros_are_not_rounded_to_0(tmp_path):
    rows = found()
    assert (V == 0).all(0).any()
    assert (rows["v"].dead, rows["v"].groups, rows["w"].dead) == (0, 24, 0)
    assert (rows["v"].bytes_before, rows["v"].bytes_after) == (4 * 192, 96 + 24 * 4)
    wide = report(quantize_fn(mlp, [("v", weight_spec(16))]), PARAMS, X)
    for bits, row in ((4, rows["v"]), (8, rows["v"]), (16, wide["v"])):
        values, scale, _ = by_hand.levels(V, Grid(bits), 0)
        values = values.astype(np.int16 if bits > 8 else np.int8)
        path = tmp_path / f"{bits}.npz"
        spec = weight_spec(bits, channel_axis=1)
        save(path, {"v": QArray(values, scale, np.zeros_like(scale, values.dtype), spec, V.dtype)})
        with np.load(path) as arrays:
            assert row.nbytes(bits) == sum(arrays[name].nbytes for name in arrays if name.startswith("v"))
    assert rows["v:input"].dead is None
    assert rows["v:input"].bytes_after == 0


def test_clipped_values_are_those_beyond_half_a_step():
    x = F([[-20, -0.4, 0.2, 7.4, 7.6, np.nan]])
    q, p = quantize_fn(lambda p, x: x @ p["w"], [Rule("w", None, QuantSpec(bits=4))]), {"w": np.ones((6, 1), F)}
    (row,) = report(q, p, x, qparams={"w:input": QParams(F(1), F(0))})
    assert row.clipped == 2 / 5


def loss_of(v=V, w=W, x=X, of_hidden=lambda h: h):
    """By NumPy."""
    return loss(of_hidden(np.maximum(x @ v, 0)) @ w)


ALONE = {
    "v": {"v": quantized(V, COLUMNS)},
    "w": {"w": quantized(W, COLUMNS)},
    "v:input": {"x": quantized(X, WHOLE)},
    "w:input": {"of_hidden": lambda h: quantized(h, WHOLE)},
}


@pytest.mark.parametrize("entry", ALONE)
def test_the_change_is_that_of_one_quantized_by_hand(entry):
    np.testing.assert_allclose(found()[entry].change, loss_of(**ALONE[entry]) - loss_of(), rtol=1e-4, atol=1e-7)


def test_the_losses_are_those_of_the_function_and_the_quantized_one():
    assert found().loss == pytest.approx(float(loss_of()), rel=1e-6)
    every = {name: value for of in ALONE.values() for name, value in of.items()}
    assert found().quantized_loss == pytest.approx(float(loss_of(**every)), rel=1e-6)


def test_the_prediction_is_exact_where_the_loss_is_quadratic():
    """In the last weight, and nowhere else: ReLU bends the others."""
    row = found()["w"]
    assert row.predicted == pytest.approx(row.change, rel=1e-4)
    change = ((HIDDEN > 0) * (X @ (quantized(V, COLUMNS) - V))) @ W  # of the results, where no unit of ReLU flips
    want = np.mean(2 * (HIDDEN @ W - TARGETS) * change + change**2)  # with the gradient, and with the Hessian
    assert found()["v"].predicted == pytest.approx(float(want), rel=1e-4)


def test_other_widths_are_those_of_a_rule_of_these_bits():
    assert set(found()["v"].by_bits) == {2, 3, 4, 8}
    for bits in (2, 8):
        want = loss_of(v=quantized(V, Grid(bits))) - loss_of()
        assert found()["v"].by_bits[bits] == pytest.approx(float(want), rel=1e-4, abs=1e-7)
    assert found()["v:input"].by_bits == {}


@pytest.mark.slow
def test_other_widths_have_the_scale_rule():
    q = quantize_fn(mlp, [Rule("*", weight_spec(4, scale_rule="half_step"))])
    row = report(q, PARAMS, X, loss=loss, bits=(4,))["v"]
    assert row.by_bits[4] == pytest.approx(row.change, rel=1e-4)


def test_rows_are_in_the_order_of_their_cost():
    changes = [row.change for row in found()]
    assert changes == sorted(changes, reverse=True)


def test_layers_in_a_scan_are_one_row_and_branches_not_taken_count_nothing():
    def f(p, x):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])
        return lax.cond(x[0, 0] > 9, lambda x: x @ p["a"], lambda x: x @ p["b"], x)

    p = {"w": normal(1, 3, 8, 8), "a": normal(2, 8, 8), "b": normal(3, 8, 8)}
    q = quantize_fn(f, [Rule("*", W4, A4)])
    rows = report(q, p, X)
    sums, weights, x, inputs = [], [], X, []
    for w in np.asarray(p["w"]):
        for of, v, grid in ((sums, x, WHOLE), (weights, w, COLUMNS)):
            real, nearest, _ = in_float64(v, grid)
            of.append(((real**2).sum(), ((nearest - real) ** 2).sum()))
        inputs.append(np.abs(x))
        x = np.tanh(x @ w)
    in_decibels = lambda sums: 10 * np.log10(np.divide(*np.transpose(sums)))
    np.testing.assert_allclose(rows["w:input"].sqnr, in_decibels([np.sum(sums, 0)])[0], rtol=1e-5)
    for entry, of in (("w:input", sums), ("w", weights)):
        np.testing.assert_allclose(rows[entry].by_layer, in_decibels(of), rtol=1e-5)
        assert rows[entry].worst == np.argmin(in_decibels(of))
    turn, row, channel = rows["w:input"].place
    assert rows["w:input"].largest == inputs[turn][row, channel] == np.max([v.max() for v in inputs])
    assert f"{rows['w'].worst}: {min(rows['w'].by_layer):.1f}, median" in str(rows)
    assert math.isnan(rows["a:input"].sqnr)
    assert rows["a:input"].largest is None
    assert rows["w:input"].massive == ()
    large = X.copy()
    large[1, 2] = 3000
    massive = report(q, p, large)
    assert massive["w:input"].massive == (0,)
    assert massive["w:input"].unclipped is None
    assert "w:input: massive in iteration 0, up to 3e+03. Take PerToken()" in str(massive)
    narrow = QParams(np.full(3, 0.5, F), np.zeros(3, F))
    clipped = report(q, p, large, qparams=dict.fromkeys([row.entry for row in rows]) | {"w:input": narrow})
    row = clipped["w:input"]
    assert row.sqnr < 1 < 10 < row.unclipped < massive["w:input"].sqnr
    assert "w:input: its range clips what counts" in str(clipped)
    assert rows["b:input"].sqnr > 0
    assert rows["w"].groups == 24


@pytest.mark.slow
def test_learned_qparams_and_frozen_parameters():
    s = Q.init_qparams(PARAMS, X)
    s["v"] = s["v"]._replace(scale=s["v"].scale * 2)
    rows = report(Q, PARAMS, X, qparams=s)
    scale = np.asarray(s["v"].scale)
    np.testing.assert_allclose(rows["v"].max_error, np.abs(np.rint(V / scale) * scale - V).max(), rtol=1e-5)
    assert rows["v"].sqnr < found()["v"].sqnr - 3
    frozen = report(Q, Q.freeze(PARAMS, X, qparams=s), X, qparams=s, loss=loss)
    assert math.isnan(frozen["v"].sqnr)
    assert "nan" not in str(frozen)
    assert frozen["v"].bytes_before == 4 * PARAMS["v"].size
    assert frozen["v"].change is None
    assert frozen["w:input"].change is not None
    weight_only = quantize_fn(mlp, [("*", W4)])
    integers = report(weight_only, weight_only.freeze(PARAMS, X), X, loss=loss)
    assert integers.loss == pytest.approx(integers.quantized_loss, rel=1e-5)


@pytest.mark.slow
def test_per_token_and_stochastic_specs():
    rules = [Rule("v", weight_spec(4, rounding="stochastic"), activation_spec(8, granularity=PerToken()))]
    rows = report(quantize_fn(mlp, rules), PARAMS, X)
    assert rows["v:input"].sqnr > 40
    assert rows["v"].sqnr == pytest.approx(found()["v"].sqnr)
    with pytest.raises(ValueError, match=r"Pass jax\.random\.key"):
        report(quantize_fn(mlp, rules), PARAMS, X, loss=loss)
    costs = report(quantize_fn(mlp, rules), PARAMS, X, loss=loss, key=jax.random.key(0))
    nearest = dataclasses.replace(rules[0], weight=weight_spec(4))
    assert costs["v"].change == report(quantize_fn(mlp, [nearest]), PARAMS, X, loss=loss)["v"].change


@pytest.mark.slow
def test_values_between_two_levels_are_rounded_as_the_rule_says():
    roundings, w = ("half_even", "half_away"), F([[0.5, 7], [0.5, -7]])
    rules = [(rounding, weight_spec(4, channel_axis=0, rounding=rounding)) for rounding in roundings]
    q = quantize_fn(lambda p, x: x @ p["half_even"] + x @ p["half_away"], rules)
    rows = report(q, dict.fromkeys(roundings, w), np.ones((1, 2), F), loss=jnp.sum, bits=())
    assert [rows[rounding].change for rounding in roundings] == pytest.approx([-1.0, 1.0])


@pytest.mark.slow
def test_progress_tells_of_each_entry_and_changes_no_cost(bars):
    told = []
    rows = report(Q, PARAMS, X, loss=loss, predicted=False, progress=lambda *of: told.append(of))
    assert told[0][0] == told[1][0]  # what is first, before anything has run
    assert sorted(entry for entry, *_ in told[1:]) == sorted(OPERANDS)
    assert [of[1:] for of in told] == [(i, 4) for i in range(5)]
    for row in found():
        assert rows[row.entry].predicted is None
        assert rows[row.entry].change == pytest.approx(row.change, rel=1e-4, abs=1e-6)
        assert rows[row.entry].by_bits == pytest.approx(row.by_bits, rel=1e-4, abs=1e-6)
    with_all = report(Q, PARAMS, X, loss=loss, bits=(), progress=True)
    assert bars == ["costs"] * 4
    assert with_all["v"].predicted == pytest.approx(found()["v"].predicted, rel=1e-4)
    assert not with_all["v"].by_bits
    assert rows.loss == pytest.approx(found().loss)
    assert report(Q, PARAMS, X, loss=loss, bits=(), predicted=False)["v"].predicted is None


def test_it_prints_and_shows_a_table():
    text, html = str(found()), found()._repr_html_()
    assert text.splitlines()[0].split()[:2] == ["entry", "quantized"]
    assert "loss: " in text.splitlines()[-1]
    assert html.count("<tr>") == 5
    assert "per channel 1" in html
    assert "predicted" not in str(report(Q, PARAMS, X))
    plan = Q.plan(PARAMS, X)._repr_html_()
    assert plan.count("<tr>") == 5
    assert "4 of 4 sites are quantized" in plan
    assert plan.count("<table onclick=") == 1


def test_long_tables_are_grouped_by_module_and_text_is_escaped():
    params = {f"block{i}": {"<a>": {"w": np.ones((4, 4), F)}} for i in range(9)}

    def f(p, x):
        for i in range(9):
            x = (x @ p[f"block{i}"]["<a>"]["w"] + x) @ np.ones((4, 4), F) @ p[f"block{i}"]["<a>"]["w"]
        return x

    html = quantize_fn(f, [Rule("block1/**", W4)]).plan(params, np.ones((2, 4), F))._repr_html_()
    assert "<summary>block1/&lt;a&gt;: " in html
    assert "<a>" not in html
    assert html.count("<details>") >= 9


def test_chosen_bits_are_the_best_that_fit_the_budget():
    rows = {name: found()[name] for name in ("v", "w")}
    sizes = lambda bits: sum(rows[name].nbytes(b) for name, b in bits.items())
    cost = lambda bits: sum(rows[name].by_bits[b] for name, b in bits.items())
    every = [dict(zip(rows, bits, strict=True)) for bits in itertools.product((2, 3, 4, 8), repeat=2)]
    for budget in sorted({sizes(bits) for bits in every}):
        chosen = choose_bits(found(), budget)
        assert sizes(chosen) <= budget
        assert cost(chosen) == min(cost(bits) for bits in every if sizes(bits) <= budget)


@pytest.mark.slow
def test_many_parameters_are_chosen_from_in_no_time():
    rng = np.random.default_rng(0)
    row = found()["v"]
    rows = tuple(
        row._replace(entry=str(i), size=int(n), by_bits={2: c, 3: c / 4, 4: c / 16, 8: 0.0})
        for i, (n, c) in enumerate(zip(rng.integers(100, 10**6, 100), rng.exponential(size=100), strict=True))
    )
    budget = sum(row.nbytes(3) for row in rows)
    chosen = choose_bits(dataclasses.replace(found(), rows=rows), budget)
    size, cost = (
        sum(of(row, chosen[row.entry]) for row in rows) for of in (ReportRow.nbytes, lambda r, b: r.by_bits[b])
    )
    assert 0.99 * budget < size <= budget
    assert cost < 0.8 * sum(row.by_bits[3] for row in rows)


def test_wrong_arguments_say_what_to_do():
    with pytest.raises(TypeError, match=r"`q` must be what quantize_fn returned"):
        report(mlp, PARAMS, X)
    with pytest.raises(ValueError, match=r"`q` must have its params as the first argument, got params_argnum=1"):
        report(quantize_fn(lambda x, p: mlp(p, x), [("*", W4)], params_argnum=1), X, PARAMS)
    with pytest.raises(TypeError, match=r"`loss` must return a floating scalar"):
        report(Q, PARAMS, X, loss=lambda y: y)
    with pytest.raises(TypeError, match=r"`report` must be what jaxquant.report returned"):
        choose_bits(Q, 100)
    with pytest.raises(ValueError, match=r"Make it with a loss"):
        choose_bits(report(Q, PARAMS, X), 10**6)
    with pytest.raises(ValueError, match=r"`budget_bytes` must be at least"):
        choose_bits(found(), 10)
    with pytest.raises(KeyError, match="'v'"):
        found()["vv"]
    with pytest.raises(ValueError, match="`bits`"):
        report(Q, PARAMS, X, loss=loss, bits=(1,))


def linen_model():
    linen = pytest.importorskip("flax.linen", reason="of the extra `frameworks`")
    model = linen.Sequential([linen.Dense(16), linen.relu, linen.Dense(3)])
    return model.apply, model.init(jax.random.key(0), X)


def nnx_model():
    nnx = pytest.importorskip("flax.nnx", reason="of the extra `frameworks`")
    graph, state = nnx.split(nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.relu))
    return lambda state, x: nnx.merge(graph, state)(x), state


def equinox_model():
    eqx = pytest.importorskip("equinox", reason="of the extra `frameworks`")
    params, static = eqx.partition(eqx.nn.MLP(8, 3, 16, 1, key=jax.random.key(0)), eqx.is_array)
    return lambda params, x: jax.vmap(eqx.combine(params, static))(x), params


def haiku_model():
    hk = pytest.importorskip("haiku", reason="of the extra `frameworks`")
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 3])(x)))
    return model.apply, model.init(jax.random.key(0), X)


def stateful_model():
    """BatchNorm updates its statistics: the loss takes the first of two results."""
    linen = pytest.importorskip("flax.linen", reason="of the extra `frameworks`")
    model = linen.Sequential([linen.Dense(16), linen.BatchNorm(use_running_average=False), linen.Dense(3)])
    variables = model.init(jax.random.key(0), X)
    state = variables.pop("batch_stats")
    apply = lambda params, x: model.apply({"params": params, "batch_stats": state}, x, mutable=["batch_stats"])
    return apply, variables["params"]


@pytest.mark.slow
@pytest.mark.parametrize("model", [linen_model, nnx_model, equinox_model, haiku_model, stateful_model])
def test_of_every_framework(model):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        f, params = model()
        of = lambda y: jnp.mean((y[0] if isinstance(y, tuple) else y) ** 2)
        rows = report(quantize_fn(f, [Rule("**", W4, activation_spec(8))]), params, X, loss=of)
    sites = quantize_fn(f, [Rule("**", W4, activation_spec(8))]).plan(params, X)
    assert {row.entry for row in rows} == {site.entry for site in sites if site.spec}
    for row in rows:
        assert row.sqnr > 10
        assert abs(row.predicted - row.change) < 0.5 * abs(row.change) + 1e-3


def test_the_error_of_a_layer_is_that_of_its_results():
    """By NumPy in float64, of the results that each weight alone makes."""
    grams = Q.observe(PARAMS, X, gram=True)
    rows = {row.entry: row for row in report(Q, PARAMS, X, grams=grams)}
    for name, (weight, grid) in {"v": OPERANDS["v"], "w": OPERANDS["w"]}.items():
        inputs = np.float64(X if name == "v" else HIDDEN)
        real, rounded, _ = in_float64(weight, grid)
        expected = np.square(inputs @ (real - rounded)).sum() / np.square(inputs @ real).sum()
        np.testing.assert_allclose(rows[name].layer_error, expected, rtol=1e-4)
        assert rows[f"{name}:input"].layer_error is None
    assert "layer error" in str(report(Q, PARAMS, X, grams=grams))
    assert "layer error" not in str(report(Q, PARAMS, X))
    one = report(Q, PARAMS, X, grams={"v": grams["v"]}, qparams=Q.init_qparams(PARAMS, X))
    assert one["w"].layer_error is None
    assert one["v"].layer_error == rows["v"].layer_error
    zeros = PARAMS | {"v": np.zeros_like(PARAMS["v"])}
    assert report(Q, zeros, X, grams={"v": grams["v"]})["v"].layer_error == 0
    frozen = Q.freeze(PARAMS, X)
    assert all(row.layer_error is None for row in report(Q, frozen, X, grams=grams))
    with pytest.raises(ValueError, match="no quantized weight 'z'"):
        report(Q, PARAMS, X, grams={"z": grams["v"]})


@pytest.mark.slow
def test_channels_that_become_zero_by_one_scale_are_counted():
    w = np.random.default_rng(0).normal(size=(64, 16)).astype(F) * np.where(np.arange(16) < 12, F(1e-3), F(1))
    params, x = {"w": jnp.asarray(w)}, jnp.ones((2, 64))
    q = quantize_fn(lambda p, x: x @ p["w"], [("w", QuantSpec())])
    row = report(q, params, x)["w"]
    assert (row.dead, row.channels, row.groups) == (12, 16, 1)
    assert "12 of 16" in str(report(q, params, x))
    finer = quantize_fn(lambda p, x: x @ p["w"], [("w", weight_spec(8))])
    assert report(finer, params, x)["w"].dead == 0


@pytest.mark.slow
def test_rows_that_a_mask_leaves_out_have_no_errors():
    params, x = {"w": jnp.ones((4, 2))}, jnp.linspace(-1.0, 1.0, 24).reshape(6, 4).at[5].set(100.0)
    q = quantize_fn(lambda p, x: x @ p["w"], [Rule("w", weight_spec(8), activation_spec(8))])
    got, want = report(q, params, x, mask=jnp.arange(6) < 5), report(q, params, x[:5])
    assert got["w:input"] == want["w:input"]
    assert got["w:input"].max_error < report(q, params, x)["w:input"].max_error / 20
