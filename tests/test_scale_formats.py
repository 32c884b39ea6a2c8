# SPDX-License-Identifier: Apache-2.0
"""Scales of other dtypes than float32: microscaling (MX), NVFP4, and half precision."""

import dataclasses
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exact import assert_same_bits
from lanes import cases
from test_formats import DTYPES, MATMUL, cast, dequantized, rounded, wide_range

import jaxquant as jq
from jaxquant import (
    PerBlock,
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
from jaxquant._spec import ROUNDINGS

pytestmark = pytest.mark.bits

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


def blocks(dtype="float32", rows=24):
    """Blocks of 32 with heavy tails, of zeros, one value, subnormals, and of the largest."""
    x = (np.random.default_rng(0).standard_t(3, size=(rows, 64)) * 1e-4).astype(F)
    x[0], x[1, 1:], x[2], x[3, 5] = 0, 0, 1e-39, -0.0
    x[4] *= 1e7 if dtype == "float16" else 1e30
    return jnp.asarray(x, dtype)


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


@cases(
    ("name",),
    [name for name, spec in SPECS.items() if spec.scale_dtype == "float8_e8m0fnu"],
    ["mxfp8", "mxint8", "mxfp4 floor"],
)
def test_powers_of_two_are_those_of_exact_arithmetic(name, compared):
    spec, largest = SPECS[name], largest_of_blocks()
    x = np.zeros((len(largest), 32), F)
    x[:, 3] = -largest
    scale = np.asarray(jq.quantize(x, spec).scale).astype(F)[:, 0]
    if spec.scale_rule == "ceil":
        want = [power_above(Fraction(float(v)) / Fraction(spec.qmax)) for v in largest]
    else:  # 2 ** (floor(log2(largest)) - floor(log2(last level)))
        want = [power_above(Fraction(float(v))) for v in largest]
        want = [p if p == Fraction(float(v)) else p / 2 for p, v in zip(want, largest, strict=True)]
        want = [p / 2 ** int(np.log2(spec.qmax)) for p in want]
    want = F([float(p) for p in want])
    compared("exact fractions", f"scale of {name}", want.size, int((scale != want).sum()))
    assert_same_bits(scale, want)


def test_nvfp4_is_the_formula_of_its_definition(compared):
    x = (np.random.default_rng(1).standard_t(4, size=(200, 64)) * 0.02).astype(F)
    q = jq.quantize(x, nvfp4_spec(-1))
    of_block = np.abs(x).reshape(200, 4, 16).max(-1) / F(6)
    tensor = of_block.max() / F(448)
    scale = (of_block / tensor).astype(ml_dtypes.float8_e4m3fn).astype(F)
    codes = cast((x.reshape(200, 4, 16) / (scale * tensor)[..., None]).astype(F), "float4_e2m1fn").reshape(x.shape)
    got = np.asarray(q.values).astype(F)
    compared("NVFP4's formula", "codes", codes.size, int((got != codes).sum()))
    assert_same_bits(q.tensor_scale, tensor)
    assert_same_bits(np.asarray(q.scale).astype(F), scale)
    assert_same_bits(got, codes)
    assert_same_bits(
        jq.dequantize(q) + 0, (codes.reshape(200, 4, 16) * scale[..., None] * tensor).reshape(x.shape) + F(0)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_of_half_precision_are_rounded_to_nearest(dtype):
    spec = QuantSpec(bits=4, granularity=PerBlock(-1, 32), scale_dtype=dtype)
    x = np.random.default_rng(0).normal(size=(50, 64)).astype(F)
    got = jq.quantize(x, spec).scale
    assert got.dtype == dtype
    want = (np.abs(x).reshape(50, 2, 32).max(-1) / F(7)).astype(getattr(ml_dtypes, dtype, dtype))
    assert_same_bits(np.asarray(got).view(np.uint16), want.view(np.uint16))
    tiny = jq.quantize(np.full((1, 32), 1e-30, F), spec)
    assert tiny.scale.astype(jnp.float32).item() >= (2.0**-24 if dtype == "float16" else 1e-31)


EVERY = list(itertools.product(SPECS, ROUNDINGS))


@cases(("name", "rounding"), EVERY, [*EVERY[::23], ("nvfp4", "half_even")])
def test_fake_quant_is_quantize_and_dequantize(name, rounding):
    """In one program for all dtypes, and alone for one of them."""
    spec = dataclasses.replace(SPECS[name], rounding=rounding)
    key = jax.random.key(1) if rounding == "stochastic" else None
    xs = {dtype: blocks(dtype) for dtype in DTYPES}
    both = jax.jit(lambda xs: {k: (jq.quantize(x, spec, key=key), jq.fit_qparams(x, spec)) for k, x in xs.items()})(xs)
    qs, qparams = ({k: v[i] for k, v in both.items()} for i in range(2))
    fake = jax.jit(lambda xs, s: {k: jq.fake_quant(x, spec, s[k], key=key) + 0 for k, x in xs.items()})(xs, qparams)
    for dtype, y in dequantized(qs).items():
        assert_same_bits(fake[dtype], y, dtype)
        assert np.isfinite(np.asarray(y, F)).all()
        assert not np.any(y[0])
    dtype = DTYPES[EVERY.index((name, rounding)) % 3]
    assert_same_bits(jq.fake_quant(xs[dtype], spec, key=key), fake[dtype], dtype)
    assert_same_bits(jq.fake_quant(xs[dtype], spec, qparams[dtype], key=key), fake[dtype], dtype)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4 float16"])
def test_scales_where_an_optimizer_left_them(name):
    spec, x = SPECS[name], jnp.ones((6, 32))
    scale = jnp.repeat(jnp.array([[0.0], [-1.0], [1e-45], [jnp.nan], [jnp.inf], [0.3]]), 32 // spec.granularity.size, 1)
    y = np.asarray(jq.fake_quant(x, spec, QParams(scale, jnp.zeros_like(scale))))
    assert np.isnan(y).all(1).tolist() == [False, False, False, True, True, False]
    assert abs(y[5] - 1).max() < 0.3
    assert_same_bits(jq.dequantize(jq.quantize(x, spec, QParams(scale, jnp.zeros_like(scale)))), y)


@cases(("name",), SPECS, ["mxfp4 floor", "nvfp4"])
def test_gradients_pass_straight_through_the_scale(name):
    spec, x = SPECS[name], jnp.asarray(np.random.default_rng(2).normal(size=(8, 64)), F)
    qparams = jq.fit_qparams(x, spec)
    dx, dq = jax.grad(lambda x, q: jq.fake_quant(x, spec, q).sum(), (0, 1))(x, qparams)
    of_data = jax.grad(lambda x: jq.fake_quant(x, spec).sum())(x)
    assert_same_bits(of_data, dx)
    if spec.scale_rule == "floor":  # which clips the largest
        assert 0.9 < float(dx.mean()) < 1
    elif name not in ("nvfp4", "int4 e4m3", "int4 float16", "uint4 bfloat16"):
        assert float(dx.min()) == 1
    q = jq.quantize(x, spec, qparams)
    step = np.repeat(np.asarray(q.step), spec.granularity.size, 1)
    zero = np.repeat(np.asarray(q.zero_point).astype(F), spec.granularity.size, 1)
    steps = np.where(np.asarray(dx) == 1, np.asarray(q.values).astype(F) - zero - np.asarray(x) / step, np.nan)
    inside = ~np.isnan(steps).reshape(8, -1, spec.granularity.size).any(-1)
    want = np.nansum(steps.reshape(8, -1, spec.granularity.size), -1)
    np.testing.assert_allclose(np.asarray(dq.scale)[inside], want[inside], rtol=1e-4, atol=1e-4)


@cases(("name",), SPECS, ["mxint8", "nvfp4"])
def test_mse_takes_the_better_scale(name):
    x, spec = jnp.asarray(np.random.default_rng(0).standard_t(3, size=(40, 64)), F), SPECS[name]
    error = lambda qparams: np.asarray(((jq.fake_quant(x, spec, qparams) - x) ** 2).sum(1))
    best, start = error(jq.fit_qparams(x, spec, "mse")), error(jq.fit_qparams(x, spec))
    assert (best <= start * (1 + 1e-5)).all()
    if name in ("mxfp4", "mxint8", "nvfp4", "mxfp8 floor", "mxfp4 floor", "int4 e4m3"):  # elsewhere by little
        assert best.sum() < start.sum() * 0.999
    if spec.scale_dtype == "float8_e8m0fnu" and spec.scale_rule == "ceil":
        half = jq.fit_qparams(x, spec)._replace(scale=jq.quantize(x, spec).step / 2)
        of_block = lambda v: np.asarray(((jq.fake_quant(x, spec, v) - x) ** 2).reshape(40, 2, 32).sum(-1))
        want = np.minimum(of_block(half), of_block(None)).sum(1)
        np.testing.assert_allclose(best, want, rtol=1e-5)


PAIRS = [("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp4"), ("mxfp6", "mxint8"), ("mxint8", "mxint8")]


def values_in_units(q):
    return np.vectorize(int, otypes=[object])(np.asarray(q.values).astype(np.float64) / q.spec.levels.unit)


@cases(("of_a", "of_b"), PAIRS, PAIRS[2:4])
def test_blocks_are_exact_and_added_in_order(of_a, of_b, compared):
    rng = np.random.default_rng(0)
    a = jq.quantize(wide_range(rng, (5, 128)), SPECS[of_a])
    b = jq.quantize(wide_range(rng, (6, 128)), SPECS[of_b]).T
    y = jq.dot_general(a, b, MATMUL)
    total, unit = F(0), F(a.spec.levels.unit * b.spec.levels.unit)
    for i in range(4):
        at = slice(32 * i, 32 * i + 32)
        acc = np.vectorize(rounded, otypes=[F])(values_in_units(a)[:, at] @ values_in_units(b)[at])
        total = total + acc * unit * (np.asarray(a.step)[:, i : i + 1] * np.asarray(b.step)[i : i + 1])
    compared("Python integers", f"{of_a} x {of_b}", y.size, int((np.asarray(y) != total).sum()))
    assert_same_bits(y, total)
    assert_same_bits(jq.dot_general(a, b, MATMUL, execution="float32"), y)


@cases(
    ("of_b", "length"),
    itertools.product(["nvfp4", "int4 e4m3", "float8"], [64, 2048]),
    [("nvfp4", 64), ("float8", 2048)],
)
def test_a_product_of_nvfp4_is_the_exact_sum_rounded_once(of_b, length, compared):
    rng = np.random.default_rng(length)
    x, w = wide_range(rng, (4, length)), wide_range(rng, (5, length))
    x[:, length // 2 :], w[:, length // 2 :] = x[:, : length // 2], -w[:, : length // 2] * F(1 + 2**-9)
    a = jq.quantize(x, nvfp4_spec(-1))
    b = jq.quantize(w, jq.float8_spec() if of_b == "float8" else SPECS[of_b]).T
    y = jq.dot_general(a, b, MATMUL)
    scaled = lambda q: (
        np.asarray(q.values).astype(np.float64)
        * np.repeat(np.asarray(q.scale).astype(np.float64), q.shape[0] // q.scale.shape[0], 0)
    )
    whole = lambda v: np.vectorize(int, otypes=[object])(v * 2.0**10)
    of_a, steps = whole(scaled(a.T).T), a.tensor_scale
    if of_b == "float8":
        of_b, steps = whole(np.asarray(b.values).astype(np.float64)), np.asarray(steps) * np.asarray(b.scale)
    else:
        of_b, steps = whole(scaled(b)), np.asarray(steps) * np.asarray(b.tensor_scale)
    want = np.vectorize(rounded, otypes=[F])(of_a @ of_b) * F(2.0**-20) * steps
    compared("Python integers", "dot_general of NVFP4", y.size, int((np.asarray(y) != want).sum()))
    assert_same_bits(y + 0, want + F(0))
    assert_same_bits(jq.dot_general(a, b, MATMUL, execution="float32"), y)
    order = rng.permutation(length // 16)
    moved = lambda q: jq.QArray(
        q.values.reshape(len(q.values), -1, 16)[:, order].reshape(q.shape), q.scale[:, order], q.zero_point[:, order],
        q.spec, q.dtype, tensor_scale=q.tensor_scale,
    )  # fmt: skip
    if b.tensor_scale is not None:
        assert_same_bits(jq.dot_general(moved(a), moved(b.T).T, MATMUL), y)


def layers(params, x):
    def layer(x, w):
        return jax.nn.relu(x @ w), None

    x, _ = jax.lax.scan(layer, x, params["stack"])
    return x @ params["head"].T


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp8_spec", "mxfp6_spec", "mxfp4_spec", "mxint8_spec", "nvfp4_spec"])
def test_what_is_trained_is_served(name, tmp_path):
    rng, make = np.random.default_rng(0), getattr(jq, name)
    params = {
        "stack": jnp.asarray(rng.normal(size=(3, 64, 64)) / 6, F),
        "head": jnp.asarray(rng.normal(size=(4, 64)) / 8, F),
    }
    x, labels = jnp.asarray(rng.normal(size=(16, 64)), F), jnp.asarray(rng.integers(0, 4, 16))
    rules = [Rule("**", make(), activation=make())]
    q, other = (jq.quantize_fn(layers, rules, execution=execution) for execution in ("int8", "float32"))
    qparams = q.init_qparams(params, x)
    loss = lambda p, s: -jax.nn.log_softmax(q(p, x, qparams=s))[jnp.arange(16), labels].mean()
    start, value = loss(params, qparams), jax.jit(jax.value_and_grad(loss, (0, 1)))
    for _ in range(10):
        _, (dp, ds) = value(params, qparams)
        params = jax.tree.map(lambda v, g: v - 0.1 * g, params, dp)
        qparams = jax.tree.map(lambda v, g: v - 1e-4 * g, qparams, ds)
    assert float(loss(params, qparams)) < 0.9 * float(start)
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
    assert_same_bits(other(frozen, x, qparams=qparams), want)


@cases(("name",), ["nvfp4", "mxfp6"], ["nvfp4"])
def test_what_is_moved_keeps_its_values(name):
    x = blocks(rows=32)
    q, y = jq.quantize(x, SPECS[name]), jq.fake_quant(x, SPECS[name])
    assert_same_bits(jq.dequantize(q.T), y.T)
    assert_same_bits(jq.dequantize(q[5]), y[5])
    assert_same_bits(jq.dequantize(q.reshape(4, 8, 64)), y.reshape(4, 8, 64))
    assert_same_bits(jq.dequantize(q.reshape(-1)), y.reshape(-1))
    of_rows = jax.vmap(lambda x: jq.quantize(x, SPECS[name]))(x)  # a scale of the tensor for each
    assert_same_bits(jax.lax.map(jq.dequantize, of_rows), jax.vmap(lambda x: jq.fake_quant(x, SPECS[name]))(x))
    assert jax.tree.unflatten(jax.tree.structure(q), jax.tree.leaves(q)).tensor_scale is q.tensor_scale
    bits = {"nvfp4": 4 + 8 / 16 + 4 / 16, "mxfp6": 8 + 8 / 32 + 8 / 32}[name]  # its zero point, too
    assert q.nbytes == q.size * bits / 8 + (4 if name == "nvfp4" else 0)


def test_the_scale_of_the_tensor_goes_wherever_the_values_go():
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=(64, 32)) * s, F) for k, s in (("a", 1e3), ("b", 1e-3))}
    x = jnp.asarray(rng.normal(size=(4, 64)), F)
    columns = QuantSpec(scale_dtype="float8_e4m3fn", granularity=jq.PerChannel(None))
    for f, weight in (
        (lambda p, x: x @ p["a"], columns),  # lies transposed when it is frozen
        (lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1), nvfp4_spec()),
        (lambda p, x: (x @ jnp.stack([p["a"], p["b"]])).sum(0), nvfp4_spec()),
    ):
        q = jq.quantize_fn(f, [Rule("**", weight, activation=mxint8_spec() if weight != columns else QuantSpec())])
        y, want = jax.jit(lambda params, q=q, f=f: (q(params, x), f(params, x)))(params)
        assert_same_bits(q(q.freeze(params, x), x), y)
        np.testing.assert_allclose(y, want, rtol=0.3, atol=0.2 * float(np.abs(want).max()))
    q = jq.quantize(jnp.arange(1, 33.0) * 1e-3, nvfp4_spec(-1))
    assert jq.dequantize(q[3].reshape(1)).item() == jq.dequantize(q)[3]
    missing = dataclasses.replace(q, tensor_scale=None)
    rows = jax.vmap(lambda x: jq.quantize(x, nvfp4_spec(0)))(jnp.ones((8, 32, 8)))
    for wrong in (missing, rows):
        with pytest.raises(ValueError, match="do not fit"):
            jq.dequantize(wrong)
    parts = jax.tree.map(lambda v: None, q)  # as filters leave them
    assert jax.tree.structure(parts, is_leaf=lambda v: v is None) == jax.tree.structure(q)


def test_a_schedule_of_bits_with_powers_of_two_below():
    x, spec = jnp.asarray(np.random.default_rng(0).normal(size=(8, 64)), F), mxint8_spec(-1, scale_rule="floor")
    for bits in (2, 4, 8):
        alone = dataclasses.replace(spec, bits=bits)
        assert_same_bits(jq.fit_qparams(x, spec, bits=bits).scale, jq.fit_qparams(x, alone).scale)
        assert_same_bits(jq.fake_quant(x, spec, bits=bits), jq.fake_quant(x, alone))
        qparams = QParams(jnp.full((8, 2), 0.3), jnp.zeros((8, 2)))
        assert_same_bits(jq.fake_quant(x, spec, qparams, bits=bits), jq.fake_quant(x, alone, qparams))


def test_tiny_tensors_beside_blocks_of_zeros():
    for size in np.geomspace(1e-38, 1e-30, 40):
        x = jnp.zeros((2, 16)).at[0, 0].set(size)
        y = jq.fake_quant(x, nvfp4_spec(-1))
        assert bool(jnp.isfinite(y).all())
        assert_same_bits(y, jq.dequantize(jq.quantize(x, nvfp4_spec(-1))))


def test_specs_say_their_scales():
    assert repr(nvfp4_spec()) == (
        "QuantSpec(granularity=PerBlock(axis=None, size=16), format='float4_e2m1fn', scale_dtype='float8_e4m3fn')"
    )
    assert mxfp8_spec(0) != mxfp8_spec(0, scale_rule="floor")
    assert dataclasses.replace(mxfp4_spec(0), rounding="stochastic") == mxfp4_spec(0, rounding="stochastic")


X = jnp.ones((4, 40))
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
