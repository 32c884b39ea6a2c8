# SPDX-License-Identifier: Apache-2.0
"""Solvers: against the published algorithms in float64 NumPy, what is frozen against what was solved, bad input."""

import collections
import functools
import math
import re
import sys
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import x64
from jax import lax
from jax.sharding import PartitionSpec as P
from lanes import by_default, cases

from jaxquant import (
    PerBlock,
    QParams,
    QuantSpec,
    Rule,
    activation_spec,
    dequantize,
    fake_quant,
    mxfp4_spec,
    mxint8_spec,
    nvfp4_spec,
    quantize_fn,
    solve,
    weight_spec,
)
from jaxquant._base._bar import in_bar
from jaxquant.solve._adaround import Learned
from jaxquant.solve._gptq import InOrderOfRows
from jaxquant.solve._model import model_of
from jaxquant.solve._rounding import _solved
from jaxquant.typing import Gram

F = np.float32
W3, W4, A8 = weight_spec(3), weight_spec(4), activation_spec(8)
DOT = lambda p, x: x @ p["w"]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(F)


def dependent(seed, rows, k):
    """Inputs that depend on each other, as those of a network do."""
    return normal(seed, rows, k) @ (np.eye(k, dtype=F) + normal(seed + 1, k, k) / F(np.sqrt(k)))


def of_moments(products, rows=1):
    return Gram(products, F(rows), np.zeros(len(products), F))


def served(q, params, x, qparams, rounded):
    """The frozen params, whose real values are those of the solved ones, and whose call has the same bits."""
    frozen = q.freeze(rounded, x, qparams=qparams)
    for name, leaf in frozen.items():
        if not isinstance(leaf, np.ndarray | jax.Array):
            np.testing.assert_array_equal(dequantize(leaf), rounded[name])
    np.testing.assert_array_equal(q(frozen, x, qparams=qparams), q(rounded, x, qparams=qparams))
    return frozen


# GPTQ as it is published: row by row, with the Cholesky factor of the inverse, in float64.


def published(w, h, round_row, damping=0.01, activation_order=True):
    """The rounded weight (K, N); and how far the nearest tie was, in steps."""
    order = np.argsort(-np.diag(h), kind="stable") if activation_order else np.arange(len(w))
    damped = h + damping * np.diag(h).mean() * np.eye(len(h))
    factor = np.linalg.cholesky(np.linalg.inv(damped[order][:, order])).T
    rest, out, tie = w.astype(np.float64)[order], np.zeros_like(w, np.float64), np.inf
    for i, k in enumerate(order):
        out[k], distance = round_row(k, rest[i])
        tie = min(tie, distance)
        rest[i:] -= np.outer(factor[i, i:], (rest[i] - out[k]) / factor[i, i])
    return out, tie


def no_worse(w, h, found, nearest):
    """The columns that were found, or the nearest levels where these have a smaller error."""
    cost = lambda v: (((w - v).T @ h) * (w - v).T).sum(1)
    return np.where(cost(found) <= cost(nearest), found, nearest)


SPECS = {
    "4 bits": W4,
    "groups of 8": weight_spec(4, block_size=8),
    "affine": QuantSpec(bits=3, symmetric=False, granularity=PerBlock(0, 16)),
    "per tensor": QuantSpec(bits=4),
    "2 bits": weight_spec(2),
}


def published_columns(name, w, x, qparams):
    """What makes levels of values; the values as published, these or the nearest where that is better, the nearest."""
    q = quantize_fn(DOT, [("w", SPECS[name])])
    spec, (scale, zero) = q.plan({"w": w}, x)["w"].entry_spec, (np.asarray(v, np.float64) for v in qparams["w"])
    widen = lambda v: np.broadcast_to(np.repeat(v, len(w) // v.shape[0], 0) if v.ndim else v, w.shape)
    scale, zero = widen(scale), widen(zero)

    def round_row(k, row):
        level = row / scale[k] + zero[k]
        inside = (spec.qmin <= level) & (level <= spec.qmax)
        distance = np.abs(level - np.floor(level) - 0.5).min(where=inside, initial=1)
        return (np.clip(np.round(row / scale[k]) + zero[k], spec.qmin, spec.qmax) - zero[k]) * scale[k], distance

    h = x.T.astype(np.float64) @ x
    found, tie = published(w, h, round_row)
    assert tie > 1e-6
    nearest = np.stack([round_row(k, row)[0] for k, row in enumerate(w.astype(np.float64))])
    levels = lambda v: np.round(np.asarray(v, np.float64) / scale + zero)
    return levels, found, no_worse(w, h, found, nearest), nearest


@by_default("groups of 8-0-32")
@cases(
    "name,seed,k",
    [(name, seed, 32) for name in SPECS for seed in range(4)] + [("4 bits", 0, 300)],
    [("groups of 8", 0, 32), ("affine", 0, 32), ("4 bits", 0, 300)],
)
def test_gptq_has_the_integers_of_the_published_algorithm(name, seed, k):
    """Of 300 rows in blocks whose errors travel from one to the next."""
    with x64(True):
        x, w = dependent(seed, 40 * k // 32, k), normal(seed + 9, k, 24)
        q = quantize_fn(DOT, [("w", SPECS[name])])
        grams = q.observe({"w": w}, x, gram=True)
        qparams = q.init_qparams({"w": w}, x)
        solved = solve.gptq({"w": w}, q, grams, x, qparams=qparams)
    levels, found, expected, nearest = published_columns(name, w, x, qparams)
    np.testing.assert_array_equal(levels(solved["w"]), levels(expected))
    assert (levels(found) == levels(expected)).all(0).mean() > 0.9  # of the columns, as published
    assert (levels(found) != levels(nearest)).mean() > 0.1
    served(q, {"w": w}, x, qparams, solved)


def objective(products, w, rounded):
    error = np.asarray(w, np.float64) - np.asarray(rounded, np.float64)
    return np.einsum("kn,kl,ln->", error, np.asarray(products, np.float64), error)


GRIDS = {
    "mxfp4": mxfp4_spec(0),
    "nvfp4": nvfp4_spec(0),
    "mxint8": mxint8_spec(0),
    "unsigned": QuantSpec(bits=4, signed=False, symmetric=False),
    "16 bits": weight_spec(16),
    "tiles": QuantSpec(bits=4, granularity=PerBlock((0, 1), (16, 8))),
}


@cases("name", list(GRIDS))
def test_every_grid_is_served_as_it_was_solved(name):
    x, w = dependent(3, 80, 64), normal(4, 64, 16)
    spec = GRIDS[name]
    q = quantize_fn(DOT, [("w", spec)])
    grams, qparams = q.observe({"w": w}, x, gram=True), q.init_qparams({"w": w}, x)
    seen = []
    solved = solve.gptq({"w": w}, q, grams, x, qparams=qparams, progress=lambda *of: seen.append(of))
    nearest = fake_quant(w, q.plan({"w": w}, x)["w"].spec, qparams["w"])
    before, after, whole = (objective(grams["w"].products, w, of) for of in (nearest, solved["w"], 0 * w))
    assert after < 0.9 * before
    ((path, *errors),) = seen
    assert path == "w"
    np.testing.assert_allclose(errors, [before / whole, after / whole], rtol=1e-3)
    served(q, {"w": w}, x, qparams, solved)


# Wherever a weight is: as the matrices that its ops contract.


def in_heads(p, x):
    return jnp.einsum("bhd,doh->bho", x.reshape(-1, 3, 4), p["w"])


def in_scan(p, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w.reshape(12, 12).T), None), x, p["w"])[0]


def in_groups(p, x):
    return lax.conv_general_dilated(
        x, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
    )


def with_experts(p, x):
    return lax.ragged_dot(x, p["w"], jnp.int32([7, 33]))


# The function, its weight, its input, and the weight as matrices (..., K, N) by NumPy.
PLACES = {
    "transposed": (lambda p, x: x @ p["w"].T, normal(1, 6, 12), dependent(2, 40, 12), lambda w: w.T),
    "reshaped": (
        lambda p, x: x @ p["w"].transpose(1, 0, 2).reshape(12, 5), normal(1, 3, 4, 5), dependent(2, 40, 12),
        lambda w: w.transpose(1, 0, 2).reshape(12, 5),
    ),
    "turned round": (lambda p, x: x @ p["w"][::-1], normal(1, 12, 6), dependent(2, 40, 12), lambda w: w[::-1]),
    "heads": (in_heads, normal(1, 4, 6, 3), dependent(2, 40, 12), lambda w: w.transpose(2, 0, 1)),
    "two axes": (
        lambda p, x: jnp.einsum("bhd,dho->bo", x.reshape(-1, 3, 4), p["w"]), normal(1, 4, 3, 5), dependent(2, 40, 12),
        lambda w: w.reshape(12, 5),
    ),
    "a scan": (in_scan, normal(1, 3, 12, 3, 4), dependent(2, 40, 12), lambda w: w.reshape(3, 12, 12).swapaxes(1, 2)),
    "a grouped convolution": (
        in_groups, normal(1, 3, 2, 2, 6), dependent(2, 60, 4).reshape(3, 4, 5, 4),
        lambda w: w.reshape(12, 2, 3).swapaxes(0, 1),
    ),
    "experts": (with_experts, normal(1, 2, 12, 5), dependent(2, 40, 12), lambda w: w),
}  # fmt: skip


@cases("name", list(PLACES))
def test_gptq_of_a_weight_anywhere_is_that_of_its_matrices(name):
    """Each matrix, by itself, as the weight of a plain dot with the same second moments."""
    f, w, x, matrices = PLACES[name]
    spec = QuantSpec(bits=4)
    q = quantize_fn(f, [("w", spec)])
    grams, qparams = q.observe({"w": w}, x, gram=True), q.init_qparams({"w": w}, x)
    solved = solve.gptq({"w": w}, q, grams, x, qparams=qparams)
    served(q, {"w": w}, x, qparams, solved)
    plain, k = quantize_fn(DOT, [("w", spec)]), matrices(w).shape[-2]
    flat = lambda v: np.asarray(v).reshape(-1, *v.shape[-2:])
    before, after, products = map(flat, (matrices(w), matrices(solved["w"]), grams["w"].products))
    scales = np.broadcast_to(np.ravel(qparams["w"].scale), len(before))
    is_changed = False
    for one, found, moments, scale in zip(before, after, products, scales, strict=True):
        own = {"w": QParams(scale, F(0))}
        alone = solve.gptq({"w": one}, plain, {"w": of_moments(moments, 9)}, normal(0, 2, k), qparams=own)
        np.testing.assert_array_equal(found, alone["w"])
        is_changed |= bool((found != fake_quant(np.array(one), spec, own["w"])).any())
    assert is_changed


@cases("name", ["4 bits", "affine", "mxfp4", "tiles"], ["mxfp4"])
def test_adaround_takes_the_level_below_or_above_and_is_better_than_the_nearest(name):
    x, w = dependent(3, 80, 64), normal(4, 64, 16)
    q = quantize_fn(DOT, [("w", {**SPECS, **GRIDS}[name])])
    grams, qparams, errors = q.observe({"w": w}, x, gram=True), q.init_qparams({"w": w}, x), []
    solved = solve.adaround({"w": w}, q, grams, x, qparams=qparams, progress=lambda *of: errors.extend(of))
    served(q, {"w": w}, x, qparams, solved)
    spec = q.plan({"w": w}, x)["w"].spec
    nearest = np.asarray(fake_quant(w, spec, qparams["w"]))
    moved = np.asarray(solved["w"]) != nearest
    assert 0.1 < moved.mean() < 0.6
    step = np.abs(np.asarray(solved["w"]) - nearest)
    assert (np.abs(w - nearest) <= 0.501 * step)[moved].all()  # the nearest, or its neighbour across the value
    assert ((np.asarray(solved["w"]) - w) * (nearest - w) <= 0)[moved].all()
    before, after, whole = (objective(grams["w"].products, w, of) for of in (nearest, solved["w"], 0 * w))
    assert after < 0.7 * before
    np.testing.assert_allclose(errors[1:], [before / whole, after / whole], rtol=1e-3)


@pytest.mark.slow
def test_adaround_finds_the_best_of_all_roundings_of_a_short_column():
    """Of 2 ** 8 roundings of each of 6 columns, in units of the best error."""
    x, w = dependent(5, 40, 8), normal(6, 8, 6)
    q = quantize_fn(DOT, [("w", W4)])
    grams, qparams = q.observe({"w": w}, x, gram=True), q.init_qparams({"w": w}, x)
    solved = np.asarray(solve.adaround({"w": w}, q, grams, x, qparams=qparams, steps=1000)["w"], np.float64)
    scale = np.asarray(qparams["w"].scale, np.float64)
    ways = np.stack(np.meshgrid(*[[0, 1]] * 8, indexing="ij"), -1).reshape(-1, 8, 1)
    every = np.clip(np.floor(w / scale) + ways, -7, 7) * scale
    cost = lambda v: np.einsum("...kn,kl,...ln->...n", w - v, x.T.astype(np.float64) @ x, w - v)
    best, found, nearest = cost(every).min(0), cost(solved), cost(np.round(w / scale) * scale)
    assert (found >= best * (1 - 1e-5)).all()
    assert (found <= nearest * (1 + 1e-5)).all()
    assert (found - best).sum() < 0.4 * (nearest - best).sum()


def weighted(w, h, spec, method):
    """The ratio to the scale of min-max with the least error, for each group of 8 rows and column, by trying them."""
    groups, ratios = w.reshape(-1, 8, w.shape[1]).astype(np.float64), np.r_[1.0, np.geomspace(1.1, 0.2, 48)].astype(F)
    start = np.abs(groups).max(1, keepdims=True).astype(F) / F(spec.qmax)
    blocks = np.stack([h[i : i + 8, i : i + 8] for i in range(0, len(h), 8)])
    blocks = blocks if method == "full" else blocks * np.eye(8)
    costs = []
    for ratio in ratios:
        scale = (start * ratio).astype(np.float64)
        error = groups - np.clip(np.round(groups / scale), spec.qmin, spec.qmax) * scale
        costs.append(np.einsum("gkn,gkl,gln->gn", error, blocks, error))
    return start[:, 0], ratios, np.stack(costs)


@pytest.mark.parametrize("method", ["diagonal", "full"])
def test_ranges_have_the_least_error_of_the_layer(method):
    x, w = dependent(7, 60, 32) * np.geomspace(0.1, 10, 32, dtype=F), normal(8, 32, 6)
    q = quantize_fn(DOT, [("w", weight_spec(3, block_size=8))])
    grams = q.observe({"w": w}, x, gram=True)
    scale = np.asarray(solve.ranges({"w": w}, q, grams, x, method=method)["w"].scale)
    start, ratios, costs = weighted(w, x.T.astype(np.float64) @ x, W3, method)
    chosen = np.abs(scale[None] / (start * ratios[:, None, None]) - 1).argmin(0)
    np.testing.assert_allclose(scale, start * ratios[chosen], rtol=1e-6)
    found = np.take_along_axis(costs, chosen[None], 0)[0]
    np.testing.assert_allclose(found, costs.min(0), rtol=1e-4)
    assert found.sum() < 0.8 * costs[0].sum()
    assert len(set(chosen.ravel())) > 5


@pytest.mark.parametrize(
    "spec",
    [weight_spec(2, block_size=8), pytest.param(QuantSpec(bits=2), marks=pytest.mark.slow)],
    ids=["groups", "one scale"],
)
def test_ranges_for_gptq_have_the_least_error_after_it(spec):
    """Of the ratios that are tried, for each column, or for all where they share a scale."""
    x, w = dependent(7, 60, 32), normal(8, 32, 6)
    q = quantize_fn(DOT, [("w", spec)])
    grams = q.observe({"w": w}, x, gram=True)
    start = q.init_qparams({"w": w}, x)["w"]
    found = solve.ranges({"w": w}, q, grams, x, method="gptq")["w"]
    ratios = np.array([1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4], F)
    h = x.T.astype(np.float64) @ x

    def columns(scale):
        qparams = {"w": QParams(scale, np.zeros_like(scale))}
        error = np.float64(w) - np.float64(solve.gptq({"w": w}, q, grams, x, qparams=qparams)["w"])
        return np.einsum("kn,kl,ln->n", error, h, error)

    every = np.stack([columns(np.asarray(start.scale) * ratio) for ratio in ratios])
    every = every if spec.granularity.sizes else every.sum(1, keepdims=True)
    np.testing.assert_allclose(columns(np.asarray(found.scale)).sum(), every.min(0).sum(), rtol=0.02)
    assert every.min(0).sum() < 0.9 * every[0].sum()
    chosen = np.atleast_2d(np.asarray(found.scale / start.scale))
    assert np.abs(chosen[..., None] - ratios).min(-1).max() < 1e-6
    np.testing.assert_allclose(chosen, np.broadcast_to(chosen[:1], chosen.shape), rtol=1e-6)  # of a column


def test_ranges_of_a_scale_of_the_tensor_leave_its_largest_block():
    x, w = dependent(3, 80, 64), normal(4, 64, 16)
    q = quantize_fn(DOT, [("w", nvfp4_spec(0))])
    grams, plain = q.observe({"w": w}, x, gram=True), q.init_qparams({"w": w}, x)["w"].scale
    qparams = solve.ranges({"w": w}, q, grams, x)
    scale = np.asarray(qparams["w"].scale)
    assert scale.max() == plain.max()
    assert (scale < plain).mean() > 0.2
    cost = lambda qparams: objective(grams["w"].products, w, fake_quant(w, nvfp4_spec(0), qparams))
    assert cost(qparams["w"]) < 0.95 * cost(None)


@pytest.mark.slow
def test_ranges_keep_the_other_entries(bars):
    f = lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"]
    params, x = {"a": normal(1, 8, 8), "b": normal(2, 8, 8)}, normal(3, 20, 8)
    q = quantize_fn(f, [Rule("*", W4, A8)])
    static = q.init_qparams(params, x)
    found = solve.ranges(params, q, q.observe(params, x, gram=True, entries=["a"]), x, qparams=static)
    assert found["b"] is static["b"]
    assert found["b:input"] is static["b:input"]
    assert found["a"].spec == static["a"].spec
    assert (found["a"].scale != static["a"].scale).any()
    grams = q.observe(params, x, gram=True)
    dynamic = solve.ranges(params, q, grams, x, progress=True)
    assert dynamic["a:input"] is None
    solve.gptq(params, q, grams, x, qparams=dynamic, progress=True)
    assert bars == ["weights"] * 4
    q(params, x, qparams=dynamic)


@cases("is_solved", [False, True], [True])
def test_low_rank_is_the_best_product_of_its_rank(is_solved):
    x, w = dependent(7, 60, 16), normal(8, 16, 12)
    q = quantize_fn(DOT, [("w", weight_spec(2))])
    grams, qparams = q.observe({"w": w}, x, gram=True), q.init_qparams({"w": w}, x)
    rounded = {"w": fake_quant(w, weight_spec(2, 1), qparams["w"])}
    if is_solved:
        rounded = solve.gptq({"w": w}, q, grams, x, qparams=qparams)
    given = {"solved": rounded} if is_solved else {"qparams": qparams}
    lost = x.astype(np.float64) @ (w - np.asarray(rounded["w"], np.float64))
    values = np.linalg.svd(lost, compute_uv=False)
    for rank in (1, 4, 12):
        a, b = solve.low_rank({"w": w}, q, grams, x, rank=rank, damping=0, **given)["w"]
        assert (a.shape, b.shape) == ((16, rank), (rank, 12))
        rest = np.square(lost - np.asarray(x) @ np.asarray(a) @ np.asarray(b)).sum()
        np.testing.assert_allclose(rest, np.square(values[rank:]).sum(), rtol=1e-4, atol=1e-6 * np.square(values).sum())


@pytest.mark.slow
def test_low_rank_of_matrices_in_a_scan():
    w, x = normal(1, 3, 12, 12), dependent(2, 40, 12)
    f = lambda p, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0]
    q = quantize_fn(f, [("w", weight_spec(3))])
    grams, qparams = q.observe({"w": w}, x, gram=True), q.init_qparams({"w": w}, x)
    a, b = solve.low_rank({"w": w}, q, grams, x, rank=12, qparams=qparams)["w"]
    rounded = q.freeze({"w": w}, x, qparams=qparams)["w"]
    np.testing.assert_allclose(a @ b, w - dequantize(rounded), atol=1e-5)


# Bad input


def of_bad_input():
    x, w = normal(1, 6, 4), normal(2, 4, 3)
    q = quantize_fn(DOT, [("w", W4)])
    return q, {"w": w}, x, q.observe({"w": w}, x, gram=True), q.init_qparams({"w": w}, x)


Q, PARAMS, X, GRAMS, QPARAMS = of_bad_input()
NO_ROWS = of_moments(np.zeros((4, 4), F), 0)
SINGULAR = of_moments(np.ones((4, 4), F))
BAD = {
    "no quantized function": (TypeError, "`q` must be what quantize_fn returned", {"q": DOT}),
    "no dict": (TypeError, "`grams` must be a dict", {"grams": GRAMS["w"]}),
    "other things": (TypeError, "`grams` must be a dict", {"grams": {"w": np.eye(4)}}),
    "nothing": (ValueError, "the entries must be paths of quantized weights", {"grams": {}}),
    "another model": (ValueError, "no quantized weight 'v'; the nearest: 'w'", {"grams": {"v": GRAMS["w"]}}),
    "another shape": (
        ValueError, r"At 'w'.*must have shape \(4, 4\).*got \(3, 3\)",
        {"grams": {"w": of_moments(np.eye(3, dtype=F))}},
    ),
    "no rows": (ValueError, "At 'w'.*at least one row", {"grams": {"w": NO_ROWS}}),
    "NaN": (ValueError, "At 'w'.*NaN or infinite", {"grams": {"w": of_moments(np.full((4, 4), np.nan, F))}}),
    "infinity": (ValueError, "At 'w'.*NaN or infinite", {"grams": {"w": of_moments(np.full((4, 4), np.inf, F))}}),
    "integers": (ValueError, "At 'w'.*integers already", {"params": Q.freeze(PARAMS, X)}),
}  # fmt: skip


@pytest.mark.parametrize("solver", ["gptq", "adaround", "ranges", "low_rank"])
@pytest.mark.parametrize("name", BAD)
def test_bad_grams(name, solver):
    kind, match, changed = BAD[name]
    given = {"params": PARAMS, "q": Q, "grams": GRAMS} | changed
    more = {"rank": 2} if solver == "low_rank" else {}
    with pytest.raises(kind, match=match):
        getattr(solve, solver)(given["params"], given["q"], given["grams"], X, qparams=QPARAMS, **more)


def test_bad_qparams():
    for solver in (solve.gptq, solve.adaround, functools.partial(solve.low_rank, rank=1)):
        for qparams in (None, {"w": None}):
            with pytest.raises(
                ValueError, match=r"At 'w'.*`qparams` must have the qparams of each weight.*solve.ranges"
            ):
                solver(PARAMS, Q, GRAMS, X, qparams=qparams)
        with pytest.raises(ValueError, match=r"At 'w'.*must have shape \(1, 3\), got \(1, 2\)"):
            solver(PARAMS, Q, GRAMS, X, qparams={"w": QParams(np.ones((1, 2), F), np.zeros((1, 2), F))})
    with pytest.raises(ValueError, match="one value for each entry, got none for 'w'"):
        solve.ranges(PARAMS, Q, GRAMS, X, qparams={"v": None})


def test_a_bar_is_of_tqdm(bars, monkeypatch):
    assert list(in_bar("ab", True, "letters")) == list(in_bar("ab", None, "letters")) == ["a", "b"]
    assert bars == ["letters"] * 2
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        in_bar("ab", True, "letters")


def test_bad_options():
    for damping, kind in ((-0.1, ValueError), ("a", TypeError), (np.nan, ValueError)):
        with pytest.raises(kind, match="`damping`"):
            solve.gptq(PARAMS, Q, GRAMS, X, qparams=QPARAMS, damping=damping)
    with pytest.raises(TypeError, match="`activation_order`"):
        solve.gptq(PARAMS, Q, GRAMS, X, qparams=QPARAMS, activation_order=1)
    with pytest.raises(ValueError, match="`steps`"):
        solve.adaround(PARAMS, Q, GRAMS, X, qparams=QPARAMS, steps=0)
    with pytest.raises(ValueError, match="`method`"):
        solve.ranges(PARAMS, Q, GRAMS, X, method="half")
    with pytest.raises(TypeError, match="`progress`"):
        solve.ranges(PARAMS, Q, GRAMS, X, progress=1)
    with pytest.raises(ValueError, match=r"At 'w'.*`rank` must be at most 3 for matrices \(4, 3\), got 4"):
        solve.low_rank(PARAMS, Q, GRAMS, X, rank=4, qparams=QPARAMS)


@pytest.mark.slow
def test_singular_second_moments_need_damping():
    for solver in (solve.gptq, functools.partial(solve.low_rank, rank=1)):
        with pytest.raises(ValueError, match=r"At 'w'.*second moments are singular.*Pass damping=0.01"):
            solver(PARAMS, Q, {"w": SINGULAR}, X, qparams=QPARAMS, damping=0)
        solver(PARAMS, Q, {"w": SINGULAR}, X, qparams=QPARAMS)
    # Inputs that are 0 in every row leave what rounding to nearest makes.
    nothing = solve.gptq(PARAMS, Q, {"w": NO_ROWS._replace(rows=F(1))}, X, qparams=QPARAMS)
    np.testing.assert_array_equal(nothing["w"], fake_quant(PARAMS["w"], weight_spec(4, 1), QPARAMS["w"]))


@cases("bits", [4, 8])
def test_narrow_weights_hold_the_levels_that_they_can(bits):
    x, w = dependent(3, 40, 16), normal(4, 16, 8).astype(jnp.bfloat16)
    f = lambda p, x: x @ p["w"].astype(F)
    q = quantize_fn(f, [("w", weight_spec(bits))])
    grams, qparams = q.observe({"w": w}, x, gram=True), q.init_qparams({"w": w}, x)
    solved = solve.gptq({"w": w}, q, grams, x, qparams=qparams)
    assert solved["w"].dtype == jnp.bfloat16
    frozen = q.freeze(solved, x, qparams=qparams)
    np.testing.assert_array_equal(q(frozen, x, qparams=qparams), q(solved, x, qparams=qparams))
    q = quantize_fn(f, [("w", weight_spec(9))])
    with pytest.raises(ValueError, match=r"At 'w'.*bfloat16, which cannot hold the 511 levels.*Cast it to float32"):
        solve.gptq({"w": w}, q, grams, x, qparams=q.init_qparams({"w": w}, x))


@pytest.mark.slow
def test_leaves_are_read_one_by_one_when_they_are_solved():
    read = []

    class Lazy:
        """A leaf in a file: a shape, a dtype, and its values when they are asked for."""

        def __init__(self, name, value):
            self.name, self.value, self.shape, self.dtype = name, value, value.shape, value.dtype

        def __array__(self, dtype=None, copy=None):
            read.append(self.name)
            return self.value

    f = lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"]
    params, x = {"a": normal(1, 8, 8), "b": normal(2, 8, 8)}, normal(3, 20, 8)
    q = quantize_fn(f, [("*", W4)])
    grams, qparams = q.observe(params, x, gram=True), q.init_qparams(params, x)
    lazy = {name: Lazy(name, v) for name, v in params.items()}
    note = lambda path, before, after: read.append(f"{path} solved")
    solved = solve.gptq(lazy, q, grams, jax.ShapeDtypeStruct(x.shape, x.dtype), qparams=qparams, progress=note)
    assert read == ["a", "a solved", "b", "b solved"]
    expected = solve.gptq(params, q, grams, x, qparams=qparams)
    for name in params:
        np.testing.assert_array_equal(solved[name], expected[name])


def test_one_compile_for_weights_of_one_form():
    params, x = {f"w{i}": normal(i, 24, 24) for i in range(4)}, dependent(9, 40, 24)
    q = quantize_fn(lambda p, x: sum(x @ w for w in p.values()), [("*", W3)])
    grams, qparams = q.observe(params, x, gram=True), q.init_qparams(params, x)
    before = _solved._cache_size()
    solve.gptq(params, q, grams, x, qparams=qparams)
    assert _solved._cache_size() == before + 1


@pytest.mark.slow
def test_solvers_under_jit():
    q, params, x, grams, qparams = of_bad_input()
    for solver in (solve.gptq, solve.adaround):
        call = lambda params, grams, solver=solver: solver(params, q, grams, x, qparams=qparams)
        want = call(params, grams)["w"]
        np.testing.assert_array_equal(jax.jit(call)(params, grams)["w"], want)
        np.testing.assert_array_equal(jax.jit(lambda params, call=call: call(params, grams))(params)["w"], want)


LAYERED = {"a": normal(1, 3, 8, 8), "b": normal(2, 8, 8)}


def layered():
    q = quantize_fn(lambda p, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["a"])[0] @ p["b"], [("*", W4)])
    x = normal(3, 20, 8)
    return q, x, q.observe(LAYERED, x, gram=True), q.init_qparams(LAYERED, x)


@pytest.mark.slow
@pytest.mark.parametrize("solver", [solve.gptq, solve.adaround])
def test_a_jitted_call_may_take_the_memory_of_its_params(solver):
    """Also of a stack, of which traced turns are put together; every buffer is of use."""
    q, x, grams, qparams = layered()
    call = lambda params, grams: solver(params, q, grams, x, qparams=qparams)
    params = jax.tree.map(jnp.array, LAYERED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solved = jax.jit(call, donate_argnums=0)(params, grams)
    assert all(v.is_deleted() for v in params.values())
    jax.tree.map(np.testing.assert_array_equal, solved, call(LAYERED, grams))


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [False, True])
def test_weights_that_are_solved_in_calls_of_their_own_are_freed_one_by_one(freeze):
    q, x, grams, qparams = layered()
    params = jax.tree.map(jnp.array, LAYERED)
    held = {name: weakref.ref(v) for name, v in params.items()}
    for path, gram in grams.items():
        params = solve.gptq(params, q, {path: gram}, x, qparams=qparams, freeze=freeze)
        assert held.pop(path)() is None
        assert all(ref() is not None for ref in held.values())
    expected = solve.gptq(LAYERED, q, grams, x, qparams=qparams, freeze=freeze)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_params_that_are_not_the_first_argument_and_keywords():
    f = lambda x, p, *, shift: x @ p["w"] + shift
    q, (_, params, x, grams, _) = quantize_fn(f, [("w", W4)], params_argnum=1), of_bad_input()
    qparams = solve.ranges(params, q, q.observe(x, params, shift=F(1), gram=True), x, shift=F(1))
    one = solve.gptq(params, q, grams, x, qparams=qparams, shift=F(1))
    np.testing.assert_array_equal(one["w"], solve.gptq(params, Q, grams, x, qparams=qparams)["w"])


@pytest.mark.slow
@pytest.mark.parametrize("split", [pytest.param(P(None, "data"), marks=pytest.mark.slow), P("data", None)])
def test_weights_on_several_devices_are_solved_where_they_are(split):
    """The same bits, with the sharding that the weight has; and no array of its size is gathered."""
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    x, w = dependent(3, 80, 64), normal(4, 64, 48)
    q = quantize_fn(DOT, [("w", weight_spec(4, block_size=16))])
    grams, qparams = q.observe({"w": w}, x, gram=True), q.init_qparams({"w": w}, x)
    sharded = jax.device_put(w, jax.NamedSharding(mesh, split))
    for solver, *options in ((solve.gptq, InOrderOfRows(), (0.01,)), (solve.adaround, Learned(500), ())):
        found = solver({"w": sharded}, q, grams, x, qparams=qparams)["w"]
        assert found.sharding.is_equivalent_to(sharded.sharding, 2)
        np.testing.assert_array_equal(found, solver({"w": w}, q, grams, x, qparams=qparams)["w"])
        (weight,) = model_of({"w": sharded}, q, grams, (x,), {}, qparams).weights
        text = _solved.lower(weight.leaf, weight.gram, weight.qparams, weight.form, *options).compile().as_text()
        gathered = re.findall(r"= (?:f32|f64)\[([\d,]+)\][^ ]* all-gather\(", text)
        assert all(math.prod(map(int, of.split(","))) < w.size / 4 for of in gathered)
    scales = solve.ranges({"w": sharded}, q, grams, x)["w"].scale
    np.testing.assert_array_equal(scales, solve.ranges({"w": w}, q, grams, x)["w"].scale)


@pytest.mark.slow
@pytest.mark.parametrize("split", [pytest.param(P(None, "data"), marks=pytest.mark.slow), P("data", None)])
def test_weights_on_a_mesh_with_explicit_axes_are_solved_where_they_are(split):
    x, w = dependent(3, 80, 64), normal(4, 64, 48)
    q = quantize_fn(DOT, [("w", weight_spec(4, block_size=16))])
    grams, qparams = q.observe({"w": w}, x, gram=True), q.init_qparams({"w": w}, x)
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(w, jax.NamedSharding(mesh, split))
        for solver in (solve.gptq, solve.adaround):
            found = solver({"w": sharded}, q, grams, x, qparams=qparams)["w"]
            assert jax.typeof(found) == jax.typeof(sharded)
            np.testing.assert_array_equal(found, solver({"w": w}, q, grams, x, qparams=qparams)["w"])
        scales = solve.ranges({"w": sharded}, q, grams, x)["w"].scale
        a, b = solve.low_rank({"w": sharded}, q, grams, x, rank=4, qparams=qparams)["w"]
    np.testing.assert_array_equal(scales, solve.ranges({"w": w}, q, grams, x)["w"].scale)
    one, other = solve.low_rank({"w": w}, q, grams, x, rank=4, qparams=qparams)["w"]
    np.testing.assert_allclose(np.asarray(a) @ np.asarray(b), one @ other, atol=1e-5)


@pytest.mark.slow
def test_turns_of_a_scan_are_solved_one_by_one():
    f, w, x, _ = PLACES["a scan"]
    q = quantize_fn(f, [("w", W3)])
    grams, paths, leaves = q.observe({"w": w}, x, gram=True), [], []

    class Lazy(np.ndarray):
        def __getitem__(self, i):
            leaves.append(i)
            return super().__getitem__(i)

    lazy = w.view(Lazy)
    qparams = solve.ranges({"w": lazy}, q, grams, x)
    solved = solve.gptq({"w": lazy}, q, grams, x, qparams=qparams, progress=lambda path, *_: paths.append(path))
    assert paths == ["w[0]", "w[1]", "w[2]"]
    assert leaves == [0, 1, 2, 0, 1, 2]
    assert solved["w"].shape == w.shape
    served(q, {"w": w}, x, qparams, solved)
    a, b = solve.low_rank({"w": w}, q, grams, x, rank=2, solved=solved)["w"]
    assert (a.shape, b.shape) == ((3, 12, 2), (3, 2, 12))


def test_weights_can_be_frozen_as_they_are_solved():
    f = lambda p, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["a"])[0] @ p["b"] @ p["c"]
    params = {"a": normal(1, 3, 8, 8), "b": normal(2, 8, 8), "c": normal(5, 8, 8)}
    x = normal(3, 20, 8)
    q = quantize_fn(f, [Rule("*", W4, A8)])
    grams, qparams = q.observe(params, x, gram=True, entries=["a", "b"]), q.init_qparams(params, x)
    for solver in (solve.gptq, solve.adaround):
        frozen = solver(params, q, grams, x, qparams=qparams, freeze=True)
        assert frozen["c"] is params["c"]
        expected = q.freeze(solver(params, q, grams, x, qparams=qparams), x, qparams=qparams)
        assert jax.tree.structure(q.freeze(frozen, x, qparams=qparams)) == jax.tree.structure(expected)
        for name in "ab":
            jax.tree.map(np.testing.assert_array_equal, frozen[name], expected[name])
    with pytest.raises(TypeError, match="`freeze`"):
        solve.gptq(params, q, grams, x, qparams=qparams, freeze=1)


# What a solver compiles.

LAYER_SOLVERS = {
    "smooth": lambda q, p, grams, x: solve.smooth(p, q, grams, x, alpha=0.5),
    "ranges": lambda q, p, grams, x: solve.ranges(p, q, grams, x),
    "gptq": lambda q, p, grams, x: solve.gptq(p, q, grams, x, qparams=q.init_qparams(p, x)),
}


@by_default("smooth", "ranges")
@pytest.mark.parametrize("name", LAYER_SOLVERS)
def test_equal_layers_are_compiled_once(name, asked):
    """A solver compiles for thirty layers of one shape what it compiles for two."""

    def programs(layers):
        def f(p, x):
            for i in range(layers):
                x = jnp.tanh((x * p[f"gain{i}"]) @ p[f"w{i}"])
            return x

        params = {f"w{i}": normal(i, 4, 4) for i in range(layers)}
        params |= {f"gain{i}": np.ones((1, 4), F) for i in range(layers)}
        q, x = quantize_fn(f, [Rule("w*", W4, A8)]), normal(9, 8, 4)
        grams = q.observe(params, x, gram=True)
        jax.clear_caches()
        before = len(asked)
        LAYER_SOLVERS[name](q, params, grams, x)
        return [program for _, program in asked[before:]]

    few, many = programs(2), programs(30)
    assert few
    assert collections.Counter(many) == collections.Counter(few)
