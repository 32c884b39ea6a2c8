# SPDX-License-Identifier: Apache-2.0
"""Grids that blocks of files have: a minimum, scales with a sign, scales with scales of their own, exact divisors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from lanes import by_default

import jaxquant as jq
from jaxquant import PerBlock, PerChannel, PerToken, QParams, QuantSpec, Rule, activation_spec, quantize_fn

bits = pytest.mark.bits

F, H = np.float32, np.float16
BLOCKS = PerBlock(0, 32)
ABOVE = {"bits": 4, "signed": False, "symmetric": False, "offset": "minimum", "granularity": BLOCKS}
OF_SCALES = QuantSpec(bits=6, signed=False, granularity=PerBlock(0, 4), scale_dtype="float16")
OF_SIGNED = QuantSpec(bits=8, narrow_range=False, granularity=PerBlock(0, 4), scale_dtype="float16")
EXTREMUM = QuantSpec(bits=4, granularity=BLOCKS, scale_rule="extremum")
HALF = {"scale_dtype": "float16", "exact_divisor": True, "rounding": "half_up"}
GRIDS = {
    "minimum": QuantSpec(**ABOVE),
    "one bit": QuantSpec(**(ABOVE | {"bits": 1})),
    "minimum in float16": QuantSpec(**ABOVE, **HALF),
    "extremum": EXTREMUM,
    "extremum in float16": dataclasses.replace(EXTREMUM, **HALF),
    "narrow extremum": QuantSpec(granularity=BLOCKS, scale_rule="extremum", narrow_range=True),
    "scales of scales": QuantSpec(**ABOVE, scale_spec=OF_SCALES),
    "scales of scales, symmetric": QuantSpec(bits=6, narrow_range=False, granularity=BLOCKS, scale_spec=OF_SIGNED),
}
K, N = 256, 16
RNG = np.random.default_rng(0)
W, X = (RNG.normal(size=shape).astype(F) for shape in ((K, N), (4, K)))
W[:32, 0], W[32:64, 0], W[:32, 1] = 0, 0.7, np.abs(W[:32, 1]) + 3  # blocks of zeros, of one value, far from 0


def each(v):
    """(groups, N) -> (K, N)."""
    return np.repeat(v, K // len(v), 0)


def rounded(v, spec):
    return np.floor(v + F(0.5)) if spec.rounding == "half_up" else np.rint(v)


def positive(width, steps):
    return np.where(width > 0, width / F(steps), F(1)).astype(F)


def of_its_own(scale, spec):
    """Scales on a grid of their own."""
    d = positive(scale.reshape(-1, 4, N).max(1), spec.qmax).astype(H).astype(F)
    d = np.repeat(d, 4, 0)
    return np.clip(np.rint(scale / d), 0, spec.qmax).astype(F) * d


def by_hand(spec):
    """(levels, real values) of W, in NumPy."""
    groups = W.reshape(-1, 32, N)
    low, high = groups.min(1), groups.max(1)
    if spec.scale_spec is not None:
        low = np.minimum(low, 0)
    if spec.has_minimum:
        scale, minimum = positive(high - low, spec.qmax), low
    else:
        most = np.maximum(np.maximum(-low, high), 0)
        scale, minimum = positive(most, spec.qmax), np.zeros_like(low)
        if spec.scale_rule == "extremum":
            scale = np.where(-low >= high, 1, -1).astype(F) * positive(most, -spec.qmin)
    exact = scale, minimum
    if spec.scale_dtype == "float16":
        scale, minimum = (v.astype(H).astype(F) for v in exact)
    if spec.scale_spec is not None:
        scale = of_its_own(scale, spec.scale_spec)
        minimum = -of_its_own(-minimum, spec.scale_spec)
    by = exact if spec.exact_divisor else (scale, minimum)
    q = np.clip(rounded((W - each(by[1])) / each(by[0]), spec), spec.qmin, spec.qmax)
    return q, q * each(scale) + each(minimum)


@bits
@by_default("minimum in float16", "extremum in float16", "narrow extremum", "scales of scales")
@pytest.mark.parametrize("name", GRIDS)
def test_values_are_those_by_hand_and_integers_have_them(name):
    spec = GRIDS[name]
    levels, real = by_hand(spec)
    q = jq.quantize(W, spec)
    np.testing.assert_array_equal(np.asarray(q.values, F), levels)
    every = jax.jit(
        lambda w, q: (jq.dequantize(q), *(jq.fake_quant(w, spec, of) for of in (None, jq.fit_qparams(w, spec))))
    )
    for found in every(W, q):
        assert (np.asarray(found) == real).all()


@pytest.mark.parametrize("name", ["minimum", "extremum"])
def test_gradients_are_those_of_the_line(name):
    spec = GRIDS[name]
    qparams = jq.fit_qparams(W, spec)
    small = QParams(qparams.scale * F(0.5), qparams.zero_point)  # so that values are clipped
    g = RNG.integers(-3, 4, W.shape).astype(F)
    _, vjp = jax.vjp(lambda w, qparams: jq.fake_quant(w, spec, qparams), W, small)
    dw, (dscale, doffset) = vjp(jnp.asarray(g))
    scale, offset = (each(np.asarray(v)) for v in small)
    minimum = offset if spec.has_minimum else 0
    v = (W - minimum) / scale
    level = np.rint(v)
    inside = (level >= spec.qmin) & (level <= spec.qmax)
    np.testing.assert_array_equal(dw, np.where(inside, g, 0))
    total = lambda t: t.astype(np.float64).reshape(-1, 32, N).sum(1)
    steps = np.where(inside, level - v, np.clip(level, spec.qmin, spec.qmax))
    np.testing.assert_allclose(dscale, total(g * steps), rtol=1e-4, atol=1e-4)
    if spec.has_minimum:  # sums of whole numbers
        np.testing.assert_array_equal(doffset, total(np.where(inside, 0, g)))
    else:
        assert not np.asarray(doffset).any()


INPUTS = {"float": None, "affine": activation_spec(8), "token": activation_spec(8, granularity=PerToken())}


@by_default("minimum in float16-affine", "extremum-token", "scales of scales-float")
@pytest.mark.parametrize(
    ("name", "inputs"),
    [("minimum in float16", "affine"), ("extremum", "token"), ("scales of scales", "float"), ("one bit", "token")],
)
def test_trained_is_frozen_in_dots(name, inputs):
    q = quantize_fn(lambda params, x: x @ params["w"], [Rule("w", GRIDS[name], INPUTS[inputs])])
    params = {"w": jnp.asarray(W)}
    qparams = q.init_qparams(params, X, ranges=None if inputs == "float" else q.observe(params, X))
    run = jax.jit(lambda params, x: q(params, x, qparams=qparams))
    y = run(params, X)
    assert_same_bits(run(q.freeze(params, X, qparams=qparams), X), y)
    x = X
    if inputs == "affine":
        (own,) = (v for path, v in qparams.items() if path != "w")
        x = jq.fake_quant(X, INPUTS[inputs], own)
    if inputs == "token":
        x = jq.fake_quant(X, activation_spec(8, granularity=PerChannel(0)))
    want = np.asarray(x, np.float64) @ np.asarray(jq.fake_quant(W, GRIDS[name], qparams["w"]), np.float64)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def test_two_minimums_do_not_meet():
    above = QuantSpec(**{**ABOVE, "bits": 8, "granularity": PerChannel(0)})
    with pytest.raises(ValueError, match="An operand with a minimum meets integers of up to 8 bits"):
        jq.dot_general(jq.quantize(X, above), jq.quantize(W, GRIDS["minimum"]), (((1,), (0,)), ((), ())))


@by_default("minimum in float16", "scales of scales, symmetric")
@pytest.mark.parametrize("name", ["minimum in float16", "scales of scales, symmetric", "one bit"])
def test_files_have_the_same_arrays(name, tmp_path):
    q = jq.quantize(W, GRIDS[name])
    jq.save(tmp_path / "q.npz", {"w": q})
    again = jq.load(tmp_path / "q.npz", like={"w": q})["w"]
    assert again.spec == q.spec
    jax.tree.map(assert_same_bits, again, q)
    assert jax.tree.structure(again) == jax.tree.structure(q)


def test_scales_of_scales_turn_with_their_values():
    q = jq.quantize(W, GRIDS["scales of scales"])
    assert q.scale.spec == OF_SCALES
    assert q.scale.scale.dtype == jnp.float16
    assert (np.asarray(q.zero_point.scale, F) <= 0).all()
    real = np.asarray(jq.dequantize(q))
    for moved, want in ((q.T, real.T), (q.T.T, real), (q.reshape(8, 32, N), real.reshape(8, 32, N))):
        assert (np.asarray(jq.dequantize(moved)) == want).all()
    assert q.T.scale.spec.granularity == PerBlock(1, 4)
    assert q.reshape(8, 32, N).spec.scale_spec is None  # in float32
    own = dataclasses.replace(OF_SCALES, granularity=PerBlock(-2, 4))
    of_layers = dataclasses.replace(GRIDS["scales of scales"], granularity=PerBlock(-2, 32), scale_spec=own)
    layer = jq.quantize(np.stack([W, W[::-1]]), of_layers)[0]
    assert isinstance(layer.scale, jq.QArray)
    jax.tree.map(assert_same_bits, jax.tree.leaves(layer), jax.tree.leaves(q))


def squares(spec, qparams):
    error = np.asarray(jq.fake_quant(W, spec, qparams), np.float64) - W
    return (error**2).reshape(-1, 32, N).sum(1)


@pytest.mark.slow
def test_searched_minimums_and_signed_scales_are_near_the_best():
    """Beside a dense search over both ends of each block."""
    for name in ("minimum", "extremum"):
        spec = GRIDS[name]
        best = squares(spec, jq.fit_qparams(W, spec))
        groups = W.reshape(-1, 32, N)
        start = jq.fit_qparams(W, spec)
        for a in np.linspace(-0.1, 0.4, 26):
            for b in np.linspace(-0.1, 0.4, 26) if spec.has_minimum else (0,):
                scale, zero = (np.asarray(v) for v in start)
                scale, zero = scale * F(1 - a - b), zero + F(a) * scale * spec.qmax * spec.has_minimum
                levels = np.clip(
                    np.rint((groups - zero[:, None] * spec.has_minimum) / scale[:, None]), spec.qmin, spec.qmax
                )
                real = levels * scale[:, None] + (zero[:, None] if spec.has_minimum else 0)
                best = np.minimum(best, ((real.astype(np.float64) - groups) ** 2).sum(1))
        found = squares(spec, jq.fit_qparams(W, spec, "mse"))
        assert found.sum() < 1.01 * best.sum()


def test_fits_keep_the_sign_of_the_extremum():
    sign = np.sign(jq.fit_qparams(W, EXTREMUM).scale)
    assert (sign < 0).any()
    for method in ("lsq", "percentile", "mse"):
        np.testing.assert_array_equal(np.sign(jq.fit_qparams(W, EXTREMUM, method, percentile=100.0).scale), sign)
    with pytest.raises(ValueError, match=r"lsq'. has no minimum"):
        jq.fit_qparams(W, GRIDS["minimum"], "lsq")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["extremum in float16", "scales of scales"])
def test_gptq_solves_on_these_grids(name):
    q = quantize_fn(lambda params, x: x @ params["w"], [Rule("w", GRIDS[name])])
    params, x = {"w": jnp.asarray(W)}, RNG.normal(size=(512, K)).astype(F) @ RNG.normal(size=(K, K)).astype(F)
    qparams = q.init_qparams(params, x)
    solved = jq.solve.gptq(params, q, q.observe(params, x, gram=True), x, qparams=qparams)
    y = q(solved, x, qparams=qparams)
    error = lambda of: float(jnp.mean((q(of, x, qparams=qparams) - x @ W) ** 2))
    assert error(solved) < 0.5 * error(params)
    assert_same_bits(q(q.freeze(solved, x, qparams=qparams), x, qparams=qparams), y)


REFUSED = {
    "signed": (dict(signed=True), "offset='minimum'"),
    "symmetric": (dict(symmetric=True), "offset='minimum'"),
    "coarse": (dict(scale_dtype="float8_e8m0fnu"), "must be True"),
    "exact": (dict(exact_divisor=True), "exact_divisor"),
    "offset": (dict(offset="lowest"), "offset"),
    "nested twice": (dict(scale_spec=GRIDS["scales of scales"]), "scale_spec"),
    "held twice": (dict(scale_spec=OF_SCALES, scale_dtype="float16"), "scale_spec"),
    "extremum": (dict(scale_rule="extremum"), "scale_rule='extremum'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_specs_without_a_meaning_raise(name):
    change, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        QuantSpec(**{**ABOVE, **change})


def test_what_knows_no_such_grid_says_so():
    above = QuantSpec(**{**ABOVE, "granularity": PerChannel(-1)})
    for refused, words in (
        ({"gradient": QuantSpec(**{**ABOVE, "granularity": jq.PerTensor()})}, "A gradient has a positive scale"),
        ({"kind": "cache", "activation": QuantSpec(**{**ABOVE, "granularity": PerChannel((0, 1))})}, "A cache has"),
    ):
        with pytest.raises(ValueError, match=words):
            Rule("w", *([QuantSpec()] if "gradient" in refused else []), **refused)
    layer = lambda params, x: jax.nn.relu(x @ params["w"] + params["b"][None])
    params = {"w": jnp.asarray(W), "b": jnp.zeros(N)}
    with pytest.raises(ValueError, match="'onnxruntime' has a positive scale"):
        quantize_fn(layer, [Rule("w", above, activation_spec(8))], runtime="onnxruntime").plan(params, X)
    low = quantize_fn(lambda params, x: x @ params["w"], [Rule("w", above, activation_spec(8), gradient=QuantSpec())])
    with pytest.raises(ValueError, match="A product with a gradient of fewer bits has no minimum"):
        jax.eval_shape(jax.grad(lambda x: low(params, x).sum()), jnp.asarray(X))
    image, kernel = jnp.zeros((1, 4, 4, 8)), {"w": jnp.ones((3, 3, 8, 4))}
    f = lambda params, x: jax.lax.conv_general_dilated(
        x, params["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    conv = quantize_fn(f, [Rule("w", above, activation_spec(8))])
    with pytest.raises(ValueError, match="A convolution of integers has no minimum"):
        jax.eval_shape(lambda x: conv(kernel, x), image)
