# SPDX-License-Identifier: Apache-2.0
"""Scales of other dtypes than float32: microscaling (MX), NVFP4, and half precision."""

import dataclasses
import itertools
from fractions import Fraction

import in_float32  # noqa: F401 - an execution
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exact import assert_same_bits
from lanes import by_default, cases, in_turn
from test_formats import ALONG, DTYPES, cast, drawn, dtype_of, rounded

import jaxquant as jq
from jaxquant import (
    PerBlock,
    PerChannel,
    PerTensor,
    QParams,
    QuantSpec,
    Rule,
    mxfp4_spec,
    mxfp6_spec,
    mxfp8_spec,
    mxint8_spec,
    nvfp4_spec,
)
from jaxquant._spec._spec import ROUNDINGS

bits = pytest.mark.bits

F = np.float32
SPECS = {
    "mxfp8": mxfp8_spec(-1), "mxfp8 e5m2": mxfp8_spec(-1, "float8_e5m2"), "mxfp6": mxfp6_spec(-1),
    "mxfp6 e3m2": mxfp6_spec(-1, "float6_e3m2fn"), "mxfp4": mxfp4_spec(-1), "mxint8": mxint8_spec(-1),
    "nvfp4": nvfp4_spec(-1), "mxfp4 floor": mxfp4_spec(-1, scale_rule="floor"),
    "mxfp8 floor": mxfp8_spec(-1, scale_rule="floor"),
    "int4 e4m3": QuantSpec(bits=4, granularity=PerBlock(-1, 16), scale_dtype="float8_e4m3fn"),
    "int4 float16": QuantSpec(bits=4, granularity=PerBlock(-1, 32), scale_dtype="float16"),
    "uint4 bfloat16": QuantSpec(
        bits=4, signed=False, symmetric=False, granularity=PerBlock(-1, 32), scale_dtype="bfloat16"
    ),
}  # fmt: skip


POWERS = [name for name, spec in SPECS.items() if spec.scale_dtype == "float8_e8m0fnu"]
SHAPE = 32, 64  # of what is quantized alone, so that tests share programs


def blocks(dtype="float32"):
    """Blocks of 32 with heavy tails, of zeros, one value, subnormals, and of the largest."""
    x = (np.random.default_rng(0).standard_t(3, size=SHAPE) * 1e-4).astype(F)
    x[0], x[1, 1:], x[2], x[3, 5] = 0, 0, 1e-39, -0.0
    x[4] *= 1e7 if dtype == "float16" else 1e30
    return x.astype(dtype_of(dtype))


def step_of(q):
    """`q.step`, for each value."""
    of_tensor = F(1) if q.tensor_scale is None else np.asarray(q.tensor_scale)
    return np.repeat(np.asarray(q.scale).astype(F) * of_tensor, q.spec.granularity.size, 1)


def largest_of_blocks():
    """Magnitudes next to powers of two times the last level of a format, and in between."""
    rng = np.random.default_rng(0)
    at = [F(2.0**k * m) for k in range(-60, 60, 7) for m in (1, 1.25, 1.5, 1.75, 1.9375, 127 / 64)]
    near = (np.array(at).view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)).view(F).ravel()
    return np.concatenate([near, np.exp(rng.normal(size=500) * 10).astype(F)])


def power_above(value):
    """The least power of two that is not below a Fraction."""
    k = value.numerator.bit_length() - value.denominator.bit_length()
    return next(p for p in (Fraction(2) ** (k + i) for i in (-1, 0, 1)) if p >= value)


@bits
def test_powers_of_two_are_those_of_exact_arithmetic(compared):
    largest = largest_of_blocks()
    x = np.zeros((len(largest), 32), F)
    x[:, 3] = -largest
    scales = jax.jit(lambda x: {name: jq.quantize(x, SPECS[name]).scale for name in POWERS})(x)
    for name, scale in scales.items():
        spec, scale = SPECS[name], np.asarray(scale).astype(F)[:, 0]
        if spec.scale_rule == "ceil":
            want = [power_above(Fraction(float(v)) / Fraction(spec.qmax)) for v in largest]
        else:  # 2 ** (floor(log2(largest)) - floor(log2(last level)))
            want = [power_above(Fraction(float(v))) for v in largest]
            want = [p if p == Fraction(float(v)) else p / 2 for p, v in zip(want, largest, strict=True)]
            want = [p / 2 ** int(np.log2(spec.qmax)) for p in want]
        want = F([float(p) for p in want])
        compared("exact fractions", f"scale of {name}", want.size, int((scale != want).sum()))
        assert_same_bits(scale, want, name)


@bits
def test_nvfp4_is_the_formula_of_its_definition(compared):
    rows = SHAPE[0]
    x = (np.random.default_rng(1).standard_t(4, size=SHAPE) * 0.02).astype(F)
    q = jq.quantize(x, nvfp4_spec(-1))
    of_block = np.abs(x).reshape(rows, -1, 16).max(-1) / F(6)
    tensor = of_block.max() / F(448)
    scale = (of_block / tensor).astype(ml_dtypes.float8_e4m3fn).astype(F)
    codes = cast((x.reshape(rows, -1, 16) / (scale * tensor)[..., None]).astype(F), "float4_e2m1fn").reshape(SHAPE)
    got = np.asarray(q.values).astype(F)
    compared("NVFP4's formula", "codes", codes.size, int((got != codes).sum()))
    assert_same_bits(q.tensor_scale, tensor)
    assert_same_bits(np.asarray(q.scale).astype(F), scale)
    assert_same_bits(got, codes)
    real = codes.reshape(rows, -1, 16) * scale[..., None] * tensor
    assert_same_bits(np.asarray(jq.dequantize(q)) + F(0), real.reshape(SHAPE) + F(0))


@bits
def test_an_input_in_nvfp4_has_a_static_scale_of_the_tensor():
    """One for the q, k and v of each layer, of all batches; what is larger saturates, and no row counts for another."""
    seen, x = (np.random.default_rng(i).standard_t(4, size=(2, *SHAPE)).astype(F) for i in range(2))
    x[0, 0, 5] = 1e3
    of_layer = lambda _, wx: (None, [wx[1] @ w for w in wx[0]])  # by weights of 127, so that nothing else is rounded
    f = lambda params, x: jax.lax.scan(of_layer, None, (params, x))[1]
    q = jq.quantize_fn(f, [Rule("**", QuantSpec(), nvfp4_spec())])
    params = [np.broadcast_to(np.eye(64, dtype=F) * 127, (2, 64, 64))] * 3

    @jax.jit
    def run(x, of_rows):
        ranges = jq.merge(*(q.observe(params, batch) for batch in (seen, seen / 2)))
        qparams = {name: v for name, v in q.init_qparams(params, x, ranges=ranges).items() if name.endswith("input")}
        qparams |= dict.fromkeys("012")
        trained = lambda x, qparams: q(params, x, qparams=qparams)
        frozen = q.freeze(params, x, qparams=qparams)
        served = q(frozen, x, qparams=qparams), q(frozen, x[:, of_rows], qparams=qparams)
        loss = lambda x, qparams: sum(map(jnp.sum, trained(x, qparams)))
        return qparams, trained(x, qparams), served, jax.grad(loss, (0, 1))(x, qparams)

    qparams, trained, (served, rows), (of_x, of_qparams) = run(x, np.arange(3, 4))
    tensor = np.abs(seen).max((1, 2)) / F(6) / F(448)
    assert [name for name, v in qparams.items() if v is not None] == ["0:input"]
    assert_same_bits(qparams["0:input"].scale, tensor)
    tensor, in_blocks = tensor[:, None, None], x.reshape(2, 32, 4, 16)
    of_block = np.minimum(np.abs(in_blocks).max(-1) / F(6) / tensor, F(448))
    scale = of_block.astype(ml_dtypes.float8_e4m3fn).astype(F)
    codes = cast((in_blocks / (scale * tensor)[..., None]).reshape(SHAPE[0], -1).clip(-6, 6), "float4_e2m1fn")
    want = (codes.reshape(in_blocks.shape).astype(np.float64) * scale[..., None] * 127).astype(F).reshape(
        x.shape
    ) * tensor
    for got, same, row in zip(served, trained, rows, strict=True):
        assert_same_bits(got, same)
        assert_same_bits(np.asarray(got) + F(0), want + F(0))
        assert_same_bits(row, np.asarray(got)[:, 3:4])
    beyond = np.abs(x) > 7 * 448 * tensor  # the tie of the last level with the next one, 8
    assert_same_bits(of_x, np.where(beyond, F(0), F(3 * 127)))
    assert not np.asarray(of_qparams["0:input"].scale).any()
    with pytest.raises(ValueError, match="must have shape"):
        q(params, x, qparams=qparams | {"0:input": QParams(np.ones((2, 32, 4), F), np.zeros((2, 32, 4), F))})


@bits
def test_scales_of_half_precision_are_rounded_to_nearest():
    spec = lambda dtype: QuantSpec(bits=4, granularity=PerBlock(-1, 32), scale_dtype=dtype)
    x = np.random.default_rng(0).normal(size=(50, 64)).astype(F)
    x[-1] = 1e-30
    scales = jax.jit(lambda x: {dtype: jq.quantize(x, spec(dtype)).scale for dtype in ("float16", "bfloat16")})(x)
    exact = np.abs(x).reshape(50, 2, 32).max(-1) / F(7)
    for dtype, got in scales.items():
        assert got.dtype == dtype
        want = np.maximum(exact, 2**-24 if dtype == "float16" else 0).astype(dtype_of(dtype))  # never 0
        assert_same_bits(np.asarray(got).view(np.uint16), want.view(np.uint16), dtype)


ENDS = {"float16": {0: 2.0**-24, 65520: 65504}}
ENDS["bfloat16"] = {0: 2.0**-126, 129 * 2.0**-126: 129 * 2.0**-126, 3.4e38: 255 * 2.0**120}


@bits
@pytest.mark.parametrize("dtype", ENDS)
def test_scales_of_half_precision_end_where_the_dtype_does(dtype):
    spec = QuantSpec(bits=2, granularity=PerChannel(0), scale_dtype=dtype)
    scale, held = (F(list(v))[:, None] for v in (ENDS[dtype], ENDS[dtype].values()))
    qparams, x = QParams(scale, np.zeros_like(scale)), held * F([-1, 0, 1]) + F(0)
    assert_same_bits(jq.fake_quant(x, spec, qparams), x)
    assert_same_bits(jq.dequantize(jq.quantize(x, spec, qparams)), x)


EVERY = list(itertools.product(SPECS, ROUNDINGS))


@by_default("nvfp4-half_even")
@bits
@cases(("name", "rounding"), EVERY, [*EVERY[::46], ("nvfp4", "half_even")])
def test_fake_quant_is_quantize_and_dequantize(name, rounding):
    """Inside a program and alone; the dtypes take turns, so that each meets every spec and rounding."""
    spec = dataclasses.replace(SPECS[name], rounding=rounding)
    key = jax.random.key(1) if rounding == "stochastic" else None
    dtype = DTYPES[EVERY.index((name, rounding)) % 3]
    x = blocks(dtype)
    both = jax.jit(lambda x, s: (jq.fake_quant(x, spec, s, key=key) + 0, jq.quantize(x, spec, key=key)))
    fake, q = both(x, jq.fit_qparams(x, spec))
    y = np.asarray(jq.dequantize(q))
    assert_same_bits(fake, y, dtype)
    assert np.isfinite(y.astype(F)).all()
    assert not np.any(y[0])
    assert_same_bits(jq.fake_quant(x, spec, key=key), fake, dtype)


@pytest.mark.slow
@bits
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4 float16"])
def test_scales_where_an_optimizer_left_them(name):
    spec, x = SPECS[name], np.ones(SHAPE, F)
    scale = np.full((SHAPE[0], SHAPE[1] // spec.granularity.size), 0.3, F)
    scale[:5] = F([[0.0], [-1.0], [1e-45], [np.nan], [np.inf]])
    y = np.asarray(jq.fake_quant(x, spec, QParams(scale, np.zeros_like(scale))))
    assert np.isnan(y).all(1).tolist() == [False, False, False, True, True, *[False] * (len(y) - 5)]
    assert abs(y[5:] - 1).max() < 0.3
    assert_same_bits(jq.dequantize(jq.quantize(x, spec, QParams(scale, np.zeros_like(scale)))), y)


@bits
def test_a_scale_that_is_nan_changes_no_other_block():
    x, scale = np.full(SHAPE, 1e-3, F), np.full((SHAPE[0], SHAPE[1] // 16), 1e-4, F)
    lost = scale.copy()
    lost[3] = np.nan
    y, others = (np.asarray(jq.fake_quant(x, nvfp4_spec(-1), QParams(s, np.zeros_like(s)))) for s in (lost, scale))
    assert_same_bits(np.delete(y, 3, 0), np.delete(others, 3, 0))


@bits
def test_a_sum_behind_two_scales_is_not_contracted():
    x, bias = np.random.default_rng(4).normal(size=(2, *SHAPE)).astype(F)
    got = jax.jit(lambda x, bias: jq.fake_quant(x, nvfp4_spec(-1)) + bias)(x, bias)
    assert_same_bits(got, np.asarray(jq.fake_quant(x, nvfp4_spec(-1))) + bias)


@bits
@cases(("name",), SPECS)
def test_gradients_pass_straight_through_the_scale(name):
    spec, x = SPECS[name], np.random.default_rng(2).normal(size=SHAPE).astype(F)
    qparams, total = jq.fit_qparams(x, spec), lambda x, *q: jq.fake_quant(x, spec, *q).sum()
    (dx, dq), of_data = jax.jit(lambda x, q: (jax.grad(total, (0, 1))(x, q), jax.grad(total)(x)))(x, qparams)
    dx = np.asarray(dx)
    assert_same_bits(of_data, dx)
    if spec.scale_rule == "floor":  # which clips the largest
        assert 0.9 < dx.mean() < 1
    elif name not in ("nvfp4", "int4 e4m3", "int4 float16", "uint4 bfloat16"):
        assert dx.min() == 1
    q = jq.quantize(x, spec, qparams)
    zero = np.repeat(np.asarray(q.zero_point).astype(F), spec.granularity.size, 1)
    steps = np.where(dx == 1, np.asarray(q.values).astype(F) - zero - x / step_of(q), np.nan)
    steps = steps.reshape(len(x), -1, spec.granularity.size)
    inside = ~np.isnan(steps).any(-1)
    np.testing.assert_allclose(np.asarray(dq.scale)[inside], np.nansum(steps, -1)[inside], rtol=1e-4, atol=1e-4)


@bits
@cases(("name",), SPECS, ["mxint8", "nvfp4"])
def test_mse_takes_the_better_scale(name):
    x, spec = np.random.default_rng(0).standard_t(3, size=SHAPE).astype(F), SPECS[name]
    error = lambda qparams: (np.asarray(jq.fake_quant(x, spec, qparams)) - x) ** 2
    minmax = jq.fit_qparams(x, spec)
    best, start = error(jq.fit_qparams(x, spec, "mse")).sum(1), error(minmax)
    assert (best <= start.sum(1) * (1 + 1e-5)).all()
    if name in ("mxfp4", "mxint8", "nvfp4", "mxfp8 floor", "mxfp4 floor", "int4 e4m3"):  # elsewhere by little
        assert best.sum() < start.sum() * 0.999
    if spec.scale_dtype == "float8_e8m0fnu" and spec.scale_rule == "ceil":
        half = minmax._replace(scale=F(np.exp2(np.ceil(np.log2(np.float64(minmax.scale))) - 1)))
        of_block = lambda v: v.reshape(len(x), 2, 32).sum(-1)
        want = np.minimum(of_block(error(half)), of_block(start)).sum(1)
        np.testing.assert_allclose(best, want, rtol=1e-5)


@bits
def test_mse_takes_the_best_of_three_neighbours_in_e4m3():
    """But for the largest, which stays."""
    codes = np.r_[126, np.arange(1, 126), 1, 1]
    held = lambda codes: np.uint8(codes).view(ml_dtypes.float8_e4m3fn).astype(F)[:, None]
    x = np.random.default_rng(0).normal(size=(128, 16))
    x, spec = F(x / abs(x).max(1, keepdims=True)) * held(codes) * F(6), SPECS["nvfp4"]
    error = lambda scale: ((cast(x / scale, "float4_e2m1fn") * np.float64(scale) - x) ** 2).sum(1)
    _, stays, _ = three = [error(held(np.clip(codes + i, 1, 126))) for i in (-1, 0, 1)]
    want = np.where(codes == 126, stays, np.min(three, 0))
    q = jq.quantize(x.reshape(SHAPE), spec, jq.fit_qparams(x.reshape(SHAPE), spec, "mse"))
    assert q.tensor_scale == 1
    np.testing.assert_allclose(error(np.asarray(q.scale).astype(F).reshape(-1, 1)), want, rtol=1e-5)


@bits
@pytest.mark.parametrize("name", ["mxint8", "nvfp4"])
def test_mse_of_scales_in_float8_takes_what_is_not_finite_for_zeros(name):
    x, spec = np.random.default_rng(0).standard_t(3, size=SHAPE).astype(F) * F(1e-4), SPECS[name]
    x[0], x[:, ::7] = 0, 0
    y = x.copy()
    y[:, ::7] = np.resize(F([np.nan, np.inf, -np.inf]), y[:, ::7].shape)
    scale = np.asarray(jq.fit_qparams(x, spec, "mse").scale)
    assert_same_bits(jq.fit_qparams(y, spec, "mse").scale, scale)
    assert name == "nvfp4" or (scale[0] == 1).all()


@bits
def test_scales_of_data_and_of_their_range_are_their_formula():
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(F)
    x[0], x[1], x[2] = 0, -abs(x[1]), abs(x[2])
    unsigned = QuantSpec(signed=False, granularity=PerBlock(-1, 32), scale_dtype="float8_e8m0fnu", scale_rule="floor")
    specs = [SPECS["nvfp4"], SPECS["mxfp4 floor"], SPECS["mxfp8 floor"], unsigned]
    scales = lambda x, spec: (jq.fit_qparams(x, spec), jq.qparams_from_range(jq.observe(x, spec), spec))
    fitted = jax.jit(lambda x: [scales(x, spec) for spec in specs])(x)
    for spec, both in zip(specs, fitted, strict=True):
        largest = (abs(x) if spec.signed else np.maximum(x, 0)).reshape(4, -1, spec.granularity.size).max(-1)
        if spec.has_tensor_scale:
            want = np.where(largest > 0, largest / F(spec.qmax), np.finfo(F).tiny)
        else:
            exponent = np.frexp(largest)[1] - np.frexp(F(spec.qmax))[1]
            want = np.where(largest > 0, np.ldexp(F(1), exponent), F(1))
        for got in both:
            assert_same_bits(got.scale, want, spec)


PAIRS = [("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp4"), ("mxfp6", "mxint8"), ("mxint8", "mxint8")]
PAIRS = in_turn(PAIRS, ["int8", "float32"])


@bits
@cases(("of_a", "of_b", "execution"), PAIRS)
def test_blocks_are_exact_and_added_in_order(of_a, of_b, execution, compared):
    rng = np.random.default_rng(0)
    a, b = drawn(rng, (5, 128), SPECS[of_a]), drawn(rng, (6, 128), SPECS[of_b], -1)
    y = np.asarray(jq.dot_general(a, b, ALONG, execution=execution))
    units = lambda q: np.vectorize(int, otypes=[object])(q.values.astype(np.float64) / q.spec.levels.unit)
    x, w, steps = units(a), units(b), step_of(a)[:, None, ::32] * step_of(b)[None, :, ::32]
    total, unit = F(0), F(a.spec.levels.unit * b.spec.levels.unit)
    for i in range(4):
        at = slice(32 * i, 32 * i + 32)
        acc = np.vectorize(rounded, otypes=[F])(x[:, at] @ w[:, at].T)
        total = total + acc * unit * steps[..., i]
    compared("Python integers", f"{of_a} x {of_b}", y.size, int((y != total).sum()))
    assert_same_bits(y, total)


@by_default("nvfp4-320-int8")
@bits
@cases(
    ("of_b", "length", "execution"),
    [
        ("nvfp4", 320, "int8"), ("nvfp4", 2048, "float32"), ("int4 e4m3", 320, "float32"), ("int4 e4m3", 2048, "int8"),
        ("float8", 320, "int8"), ("float8", 2048, "float32"),
    ],
    [("nvfp4", 320, "int8"), ("float8", 2048, "float32")],
)  # fmt: skip
def test_a_product_of_nvfp4_is_the_exact_sum_rounded_once(of_b, length, execution, compared):
    rng = np.random.default_rng(length)
    a = drawn(rng, (4, length), nvfp4_spec(-1))
    b = drawn(rng, (5, length), jq.float8_spec() if of_b == "float8" else SPECS[of_b], -1)
    dot = lambda a, b: np.asarray(jq.dot_general(a, b, ALONG, execution=execution))
    y = dot(a, b)
    scales = lambda q: np.repeat(q.scale.astype(np.float64), 16, 1) if q.spec.has_tensor_scale else 1
    whole = lambda q: np.vectorize(int, otypes=[object])(q.values.astype(np.float64) * scales(q) * 2.0**10)
    steps = a.tensor_scale * (b.tensor_scale if b.spec.has_tensor_scale else b.scale)
    want = np.vectorize(rounded, otypes=[F])(whole(a) @ whole(b).T) * F(2.0**-20) * steps
    compared("Python integers", "dot_general of NVFP4", y.size, int((y != want).sum()))
    assert_same_bits(y + F(0), want + F(0))
    assert y.any()  # not all of them cancel
    order = rng.permutation(length // 16)
    moved = lambda q: dataclasses.replace(
        q, values=q.values.reshape(len(q.values), -1, 16)[:, order].reshape(q.shape), scale=q.scale[:, order]
    )
    if b.spec.has_tensor_scale:
        assert_same_bits(dot(moved(a), moved(b)), y)


def layers(params, x):
    def layer(x, w):
        return jax.nn.relu(x @ w), None

    x, _ = jax.lax.scan(layer, x, params["stack"])
    return x @ params["head"].T


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp8_spec", "mxfp6_spec", "mxfp4_spec", "mxint8_spec", "nvfp4_spec"])
def test_what_is_trained_is_served(name, tmp_path):
    rng, make = np.random.default_rng(0), getattr(jq, name)
    params = {"stack": F(rng.normal(size=(3, 64, 64)) / 6), "head": F(rng.normal(size=(4, 64)) / 8)}
    x, labels = F(rng.normal(size=(16, 64))), rng.integers(0, 4, 16)
    rules = [Rule("**", make(), activation=make())]
    q = jq.quantize_fn(layers, rules)
    qparams = q.init_qparams(params, x)
    loss = lambda p, s: -jax.nn.log_softmax(q(p, x, qparams=s))[np.arange(16), labels].mean()
    value, losses = jax.jit(jax.value_and_grad(loss, (0, 1))), []
    for _ in range(11):
        now, (dp, ds) = jax.device_get(value(params, qparams))
        losses.append(now)
        params = jax.tree.map(lambda v, g: v - F(0.1) * g, params, dp)
        qparams = jax.tree.map(lambda v, g: np.asarray(v) - F(1e-4) * g, qparams, ds)
    assert losses[-1] < 0.9 * losses[0]
    frozen = q.freeze(params, x, qparams=qparams)
    assert frozen["stack"].scale.dtype == make().scale_dtype
    rows = {row.entry: row for row in jq.report(q, params, x) if row.size}
    assert f"scale {make().scale_dtype}" in str(q.plan(params, x))
    jq.save(tmp_path / "net.safetensors", frozen)
    loaded = jq.load(tmp_path / "net.safetensors")
    for entry, row in rows.items():
        values, scale, _, *of_tensor = jax.tree.leaves(loaded[entry])  # zero points are 0, and not stored
        parts = [(v.size, v.dtype) for v in (values, scale, *of_tensor)]
        assert row.bytes_after == sum(
            n // 2 if i == 0 and make().bits == 4 else n * d.itemsize for i, (n, d) in enumerate(parts)
        )
    assert jax.tree.structure(loaded) == jax.tree.structure(frozen)
    want = q(params, x, qparams=qparams)
    for served in (q(frozen, x, qparams=qparams), jax.jit(q)(loaded, x, qparams=qparams)):
        assert_same_bits(served, want)


@bits
@cases(("name",), ["nvfp4", "mxfp6"])
def test_what_is_moved_keeps_its_values(name):
    x, spec = blocks(), SPECS[name]
    q, y = jq.quantize(x, spec), np.asarray(jq.fake_quant(x, spec))
    moves = lambda v: [v.T, v[5], v.reshape(4, 8, 64), v.reshape(-1)]
    moved = jax.jit(lambda q: [jq.dequantize(v) for v in moves(q)])(q)
    jax.tree.map(assert_same_bits, moved, moves(y))

    @jax.jit
    def of_rows(x):  # a scale of the tensor for each
        q = jax.vmap(lambda x: jq.quantize(x, spec))(x)
        return jax.lax.map(jq.dequantize, q), jax.vmap(lambda x: jq.fake_quant(x, spec))(x)

    assert_same_bits(*of_rows(x))
    assert jax.tree.unflatten(jax.tree.structure(q), jax.tree.leaves(q)).tensor_scale is q.tensor_scale
    bits = {"nvfp4": 4 + 8 / 16 + 4 / 16, "mxfp6": 8 + 8 / 32 + 8 / 32}[name]  # its zero point, too
    assert q.nbytes == q.size * bits / 8 + (4 if name == "nvfp4" else 0)


@pytest.mark.slow
def test_the_scale_of_the_tensor_goes_wherever_the_values_go():
    """Into memory that lies transposed, a concatenation and a stack."""
    rng = np.random.default_rng(0)
    sizes = {"a": [1], "joined": [1e3, 1e-3], "stacked": [1e3, 1e-3]}
    params = {k: [F(rng.normal(size=(64, 32)) * size) for size in of] for k, of in sizes.items()}
    x = F(rng.normal(size=(4, 64)))
    columns = QuantSpec(scale_dtype="float8_e4m3fn", granularity=jq.PerChannel(None))
    rules = [
        Rule("a/*", columns, activation=QuantSpec()),
        Rule("joined/*", nvfp4_spec(), activation=mxint8_spec()),
        Rule("stacked/*", nvfp4_spec(), activation=QuantSpec()),
    ]

    def f(p, x, np=jnp):
        return x @ p["a"][0], x @ np.concatenate(p["joined"], 1), (x @ np.stack(p["stacked"])).sum(0)

    q = jq.quantize_fn(f, rules)
    both = jax.jit(lambda p: (q(p, x), q(q.freeze(p, x), x)))(params)
    for y, served, want in zip(*both, f(params, x, np), strict=True):
        assert_same_bits(served, y)
        np.testing.assert_allclose(y, want, rtol=0.3, atol=0.2 * float(np.abs(want).max()))
    q = jax.tree.map(lambda v: v[0] if v.ndim else v, drawn(rng, (1, 32), nvfp4_spec(-1)))
    one, whole = jax.jit(lambda q: (jq.dequantize(q[3].reshape(1)), jq.dequantize(q)))(q)
    assert one.item() == np.asarray(whole)[3]
    missing = dataclasses.replace(q, tensor_scale=None)
    rows = jax.eval_shape(jax.vmap(lambda x: jq.quantize(x, nvfp4_spec(0))), np.ones((8, 32, 8), F))
    for wrong in (missing, rows):
        with pytest.raises(ValueError, match="do not fit"):
            jq.dequantize(wrong)
    parts = jax.tree.map(lambda v: None, q)  # as filters leave them
    assert jax.tree.structure(parts, is_leaf=lambda v: v is None) == jax.tree.structure(q)


@bits
def test_a_schedule_of_bits_with_powers_of_two_below():
    x, spec = np.random.default_rng(0).normal(size=SHAPE).astype(F), mxint8_spec(-1, scale_rule="floor")
    fixed = QParams(np.full((SHAPE[0], 2), 0.3, F), np.zeros((SHAPE[0], 2), F))

    @jax.jit
    def of(x, fixed, bits):
        return jq.fit_qparams(x, spec, bits=bits).scale, *(jq.fake_quant(x, spec, s, bits=bits) for s in (None, fixed))

    largest = np.abs(x).reshape(SHAPE[0], 2, 32).max(-1)
    highest_bit = lambda v: np.exp2(np.floor(np.log2(v)))
    for bits in (2, 4, 8):
        qmax = F(2 ** (bits - 1) - 1)
        scale, *got = of(x, fixed, np.int32(bits))
        steps = [F(highest_bit(of_last) / highest_bit(qmax)) for of_last in (largest, fixed.scale * qmax)]
        assert_same_bits(scale, steps[0])
        for y, step in zip(got, (np.repeat(step, 32, 1) for step in steps), strict=True):
            assert_same_bits(y, np.clip(np.rint(x / step), -qmax, qmax) * step + F(0))


@bits
def test_tiny_tensors_beside_blocks_of_zeros():
    x = np.zeros(SHAPE, F)
    for size in np.geomspace(1e-38, 1e-30, 40):
        x[0, 0] = size
        y = np.asarray(jq.fake_quant(x, nvfp4_spec(-1)))
        assert np.isfinite(y).all()
        assert_same_bits(y, jq.dequantize(jq.quantize(x, nvfp4_spec(-1))))


def test_specs_say_their_scales():
    assert repr(nvfp4_spec()) == (
        "QuantSpec(granularity=PerBlock(axis=None, size=16), format='float4_e2m1fn', scale_dtype='float8_e4m3fn')"
    )
    assert mxfp8_spec(0) != mxfp8_spec(0, scale_rule="floor")
    assert dataclasses.replace(mxfp4_spec(0), rounding="stochastic") == mxfp4_spec(0, rounding="stochastic")


X = np.ones((4, 40), F)
BAD = [
    (lambda: QuantSpec(scale_dtype="e8m0"), ValueError, "`scale_dtype` must be one of float32, .*float8_e8m0fnu"),
    (lambda: QuantSpec(scale_dtype=jnp.bfloat16), TypeError, "`scale_dtype`"),
    (lambda: QuantSpec(scale_rule="floor"), ValueError, "Pass scale_dtype='float8_e8m0fnu'"),
    (lambda: mxfp8_spec(scale_rule="even"), ValueError, "`scale_rule` must be one of ceil, floor"),
    (lambda: QuantSpec(symmetric=False, scale_dtype="float8_e8m0fnu"), ValueError, "`symmetric` must be True"),
    (lambda: QuantSpec(scale_dtype="float8_e4m3fn"), ValueError, "nvfp4_spec"),
    (lambda: dataclasses.replace(nvfp4_spec(), granularity=PerTensor()), ValueError, "PerBlock"),
    (lambda: mxfp8_spec(format="float4_e2m1fn"), ValueError, "`format` must be one of float8"),
    (lambda: mxfp4_spec(block_size=32), TypeError, "`block_size`"),
    (lambda: nvfp4_spec(granularity=PerTensor()), TypeError, "axis"),
    (lambda: jq.quantize(X, mxfp4_spec(-1)), ValueError, "Sizes that do: 1, 2, 4, 5, 8, 10, 20, 40"),
    (lambda: jq.quantize(X, mxfp4_spec()), ValueError, "does not say which axis"),
]


@pytest.mark.parametrize(("call", "error", "match"), BAD)
def test_bad_input(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_block_below_an_unsigned_grid_is_not_the_largest():
    spec = QuantSpec(signed=False, granularity=PerBlock(0, 2), scale_dtype="float8_e4m3fn")
    x = np.float32([-1, -2, 0.002, 0.0255, 0.0051, 0.001])
    assert_same_bits(jq.fake_quant(x, spec)[2:], jq.fake_quant(x[2:], spec))
