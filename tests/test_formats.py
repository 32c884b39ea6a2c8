# SPDX-License-Identifier: Apache-2.0
"""Narrow floats: their levels against ml_dtypes, the round trip on every route, and exact contractions of them."""

import dataclasses
import itertools
import math
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exact import assert_same_bits, x64
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import by_default, cases, in_turn

import jaxquant as jq
from jaxquant import PerBlock, PerChannel, PerTensor, QParams, QuantSpec, Range, Rule, float8_spec
from jaxquant._contract._digits import _rounded
from jaxquant._spec._formats import FLOATS
from jaxquant._spec._spec import ROUNDINGS, qparams_shape

bits = pytest.mark.bits

F = np.float32
MATMUL, ALONG = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))  # rows by columns, and by rows
NHWC = "NHWC", "HWIO", "NHWC"
SOME = ["float8_e4m3fn", "float6_e3m2fn", "float4_e2m1fn"]
GRANULARITIES = PerTensor(), PerChannel(-1), PerChannel((0, 1)), PerBlock((0, 1), (8, 4))


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def level_values(name):
    """All finite values of a format, ascending."""
    values = np.arange(2 ** FLOATS[name].bits, dtype=np.uint8).view(dtype_of(name)).astype(F)
    return np.unique(values[np.isfinite(values)])


def near_ties(name):
    """Each level, each tie of two, and what is 2 ** k ulp beside them."""
    levels = level_values(name)
    middle = (levels[1:].astype(np.float64) + levels[:-1]) / 2  # exact in float32
    centres = np.concatenate([levels, middle, [1.02 * levels[-1], 1e30, -3e38]]).astype(F)
    steps = [0, *(sign * 2**k for k in range(23) for sign in (1, -1))]
    values = np.concatenate([(centres.view(np.int32) + step).view(F) for step in steps])
    return values[np.isfinite(values)]


def values_of(dtype):
    """Every finite value of a dtype of 16 bits."""
    values = np.arange(2**16, dtype=np.uint16).view(dtype)
    return values[np.isfinite(values.astype(F))]


def cast(x, name):
    """By ml_dtypes, saturating."""
    levels = level_values(name)
    return np.clip(x.astype(F), levels[0], levels[-1]).astype(dtype_of(name)).astype(F)


@bits
@cases(("name",), FLOATS)
def test_the_gradient_to_a_scale_is_rounded_once(name):
    """A scale for each value, against fractions: the level minus x / scale, or the last level where that is beyond."""
    spec, rng = QuantSpec(format=name, granularity=PerChannel(-1)), np.random.default_rng(9)
    scale = np.exp2(rng.uniform(-60, 60, (1, 400))).astype(F)
    x = (np.exp2(rng.uniform(-12, 1, scale.shape)) * rng.choice([-1.1, 1.1], scale.shape) * spec.qmax * scale).astype(F)
    loss = lambda x, s: jq.fake_quant(x, spec, QParams(s, s * 0)).sum()
    both = lambda x, s: (jq.quantize(x, spec, QParams(s, s * 0)).values.astype(F), *jax.grad(loss, (0, 1))(x, s))
    level, dx, dscale = map(np.asarray, jax.jit(both)(x, scale))
    assert 0 < dx.sum() < dx.size
    for got, passed, value, s, q in zip(*(np.ravel(v).tolist() for v in (dscale, dx, x, scale, level)), strict=True):
        assert F(got) == F(float(Fraction(q) - int(passed) * Fraction(value) / Fraction(s))), (value, s)


@pytest.mark.parametrize("name", FLOATS)
def test_levels_are_the_finite_values_of_the_dtype(name):
    levels, want = FLOATS[name], level_values(name)
    assert (levels.number, levels.qmax, levels.qmin) == (len(want), want[-1], want[0])
    assert (levels.unit, levels.last_step) == (want[want > 0][0], want[-1] - want[-2])
    assert jax.dtypes.finfo(levels.dtype).max >= levels.qmax


ROUTES = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "scan": lambda f: lambda x: lax.scan(lambda _, v: (None, f(v)), None, x.reshape(-1, 7))[1].reshape(-1),
    "beside": lambda f: jax.jit(lambda x: f(x * 1.0) + 0.0),
}


@bits
@cases(("name", "route"), itertools.product(FLOATS, ROUTES), in_turn([(name,) for name in FLOATS], ROUTES))
def test_levels_are_those_of_ml_dtypes(name, route, compared):
    x = near_ties(name)
    x = x[: len(x) // 7 * 7]
    spec, one = QuantSpec(format=name), QParams(1.0, 0.0)
    got = ROUTES[route](lambda x: jq.fake_quant(x, spec, one))(x)
    want = cast(x, name) + F(0)  # one zero
    compared("ml_dtypes", name, x.size, int((np.asarray(got) != want).sum()))
    assert_same_bits(got, want, name)


@bits
@cases(
    ("name", "dtype"),
    itertools.product(FLOATS, ["float16", "bfloat16"]),
    [("float8_e4m3fn", "bfloat16"), ("float4_e2m1fn", "float16")],
)
def test_codes_of_every_value_of_16_bits_are_those_of_ml_dtypes(name, dtype, compared):
    x = values_of(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    q = jq.quantize(jnp.asarray(x), QuantSpec(format=name), QParams(1.0, 0.0))
    got, want = np.asarray(q.values).astype(F), cast(x, name)
    want = np.where(want == 0, np.abs(want), want) if name.endswith("uz") else want  # which has one zero
    compared("ml_dtypes", f"{name} of {dtype}", x.size, int((got != want).sum()))
    assert q.values.dtype == FLOATS[name].dtype
    assert_same_bits(got, want, name)


ONE_PASS = {
    "float8": float8_spec(), "mxfp8": jq.mxfp8_spec(-1), "mxfp4, first axis": jq.mxfp4_spec(0),
    "nvfp4": jq.nvfp4_spec(-1), "int4 in blocks": QuantSpec(bits=4, granularity=PerBlock(-1, 32)),
    "int8, stochastic": QuantSpec(rounding="stochastic"),
}  # fmt: skip


@by_default("mxfp8", "int4 in blocks", "int8, stochastic")
@pytest.mark.parametrize("name", ONE_PASS)
def test_a_cpu_writes_no_array_but_the_result(name):
    """No quotient, although it is read twice; and no copy of x for its range, if that is in blocks."""
    spec, x = ONE_PASS[name], jax.ShapeDtypeStruct((512, 512), F)
    in_blocks, key = bool(spec.granularity.sizes), None if spec.rounding == "half_even" else jax.random.key(0)
    qparams = None if in_blocks else QParams(F(0.1), F(0))
    program = jax.jit(lambda x: jq.fake_quant(x, spec, qparams, key=key)).lower(x).compile()
    entry = program.as_text().partition("\nENTRY ")[2]
    written = [line for line in entry.splitlines() if re.search(r" = f32\[512,512\]\S* (?!parameter)", line)]
    assert ["ROOT" in line for line in written] == [True], written
    assert not in_blocks or program.memory_analysis().temp_size_in_bytes < x.size * 4 / 2


@bits
@pytest.mark.parametrize("rounding", ["half_even", "half_away", "half_up"])
def test_ties_round_as_the_spec_says(rounding):
    x, spec = F([2.5, -2.5, 3.5, -3.5, 5, -5, 0.25, -0.25]), QuantSpec(format="float4_e2m1fn", rounding=rounding)
    want = {
        "half_even": [2, -2, 4, -4, 4, -4, 0, 0],
        "half_away": [3, -3, 4, -4, 6, -6, 0.5, -0.5],
        "half_up": [3, -2, 4, -3, 6, -4, 0.5, 0],
    }
    assert jq.fake_quant(x, spec, QParams(1.0, 0.0)).tolist() == want[rounding]


@bits
def test_float64_is_rounded_once():
    with x64():
        x = np.float64([1 + 2**-4 + 2**-40, 1 + 2**-4, 1 + 2**-4 - 2**-40])  # of a tie in e4m3
        assert jq.fake_quant(x, float8_spec(), QParams(1.0, 0.0)).tolist() == [1.125, 1.0, 1.0]


def test_stochastic_rounding_is_right_on_average():
    spec = float8_spec(rounding="stochastic")
    y = np.asarray(jq.fake_quant(np.full(20_000, 1.03, F), spec, QParams(1.0, 0.0), key=jax.random.key(0)))
    assert set(np.unique(y)) == {F(1.0), F(1.125)}
    assert abs(float(y.mean()) - 1.03) < 0.002


DTYPES = "float32", "bfloat16", "float16"


def data(dtype, shape=(16, 24)):
    x = np.random.default_rng(0).standard_t(3, size=shape) * 0.3
    x[0, 0], x[3, 3], x[:, 5] = 1e30 if dtype != "float16" else 6e4, -0.0, 0
    x[:2, 7] = 1e-39, -1e-41
    return np.asarray(x, getattr(ml_dtypes, dtype, dtype))


EVERY = list(itertools.product(FLOATS, ROUNDINGS, GRANULARITIES))


@by_default("float6_e3m2fn-half_even-PerChannel((0, 1))")
@bits
@cases(("name", "rounding", "granularity"), EVERY, EVERY[::82])
def test_fake_quant_is_quantize_and_dequantize(name, rounding, granularity):
    """Inside a program and alone; the dtypes take turns, so that each meets every format, rounding and granularity."""
    spec = QuantSpec(format=name, rounding=rounding, granularity=granularity)
    key = jax.random.key(1) if rounding == "stochastic" else None
    dtype = DTYPES[EVERY.index((name, rounding, granularity)) % 3]
    x = data(dtype)
    fake, q = jax.jit(lambda x: (jq.fake_quant(x, spec, key=key) + 0, jq.quantize(x, spec, key=key)))(x)
    y = jq.dequantize(q)
    assert_same_bits(fake, y, dtype)
    assert np.isfinite(np.asarray(y, F)).all()
    assert q.scale.shape == jax.eval_shape(lambda x: jq.fit_qparams(x, spec), x).scale.shape
    assert_same_bits(jq.fake_quant(x, spec, key=key), fake, dtype)


@cases(("name",), FLOATS, SOME)
def test_what_is_not_finite(name):
    x, spec = F([np.nan, np.inf, -np.inf, 1]), QuantSpec(format=name)
    given = lambda scale: jq.fake_quant(F([0, 1]), spec, QParams(scale, 0.0))
    of = jax.jit(lambda x, scale: (jq.fake_quant(x, spec), jq.quantize(x, spec), given(scale)))
    for scale in F([0.0, -1.0, np.nan]):  # where an optimizer left it
        y, q, by_scale = of(x, scale)
        assert np.isfinite(by_scale).all() == (scale == scale)
    assert_same_bits(y, F([np.nan, 1, -1, 1]))
    values = np.asarray(q.values).astype(F)
    assert_same_bits(values[1:], F([spec.qmax, spec.qmin, spec.qmax]))
    assert bool(np.isnan(values[0])) == (spec.bits > 4)


@by_default("float8_e4m3fn")
@bits
@cases(("name",), FLOATS, SOME)
def test_the_gradient_is_cut_where_the_rounded_value_is_beyond_the_grid(name):
    spec, levels = QuantSpec(format=name), FLOATS[name]
    tie = levels.qmax + levels.last_step / 2
    x = F([0.3, levels.qmax, np.nextafter(F(tie), F(0)), tie, np.nextafter(F(tie), F(1e9)), -2 * tie, np.nan])
    dx, dq = jax.jit(jax.grad(lambda x, q: jq.fake_quant(x, spec, q).sum(), (0, 1)))(x, QParams(F(1), F(0)))
    stays = levels.qmax / levels.last_step % 2 == 0  # to even
    assert dx.tolist() == [1, 1, 1, float(stays), 0, 0, 0]
    level = cast(x[:-1], name)
    steps = np.where(np.abs(x[:-1]) > tie if stays else np.abs(x[:-1]) >= tie, level, level - x[:-1])
    assert_same_bits(dq.scale, F(np.cumsum(steps.astype(F), dtype=F)[-1]))
    fitted = jax.jit(jax.grad(lambda x: jq.fake_quant(x, spec).sum()))
    assert np.asarray(fitted(data("float32", (8, 8)))).min() == 1
    end, ratio = float(np.finfo(F).max) / 2, tie / levels.qmax  # where ranges end
    beyond = np.zeros((8, 8), F)
    beyond[0, :2] = end * (0.1 + 0.9 * ratio), end * (0.01 + ratio)
    assert np.asarray(fitted(beyond))[0, :2].tolist() == [1, 0]


@cases(("name",), FLOATS)
def test_fits_of_a_float(name):
    x, spec = data("float32")[1:], QuantSpec(format=name, granularity=PerChannel(-1))
    errors = {}
    for method in ("minmax", "percentile", "mse", "lsq"):
        qparams = jq.fit_qparams(x, spec, method)
        errors[method] = float(np.sum((np.asarray(jq.fake_quant(x, spec, qparams)) - x) ** 2))
    assert errors["mse"] < errors["minmax"] * 0.999
    assert errors["mse"] <= min(errors.values())
    ranges = jq.observe(x, spec)
    assert_same_bits(jq.qparams_from_range(ranges, spec).scale, jq.fit_qparams(x, spec).scale)
    assert_same_bits(jq.qparams_from_range(Range(-3.0, 7.0), spec).scale, F(7) / F(spec.qmax))


def drawn(rng, shape, spec, sign=1):
    """A matrix of any levels, scales and zero points; half of each row is nearly the other half, or what cancels it."""
    levels, half = level_values(spec.format) if spec.format else np.arange(spec.qmin, spec.qmax + 1), shape[1] // 2
    values, groups = rng.choice(levels, shape), qparams_shape(spec, shape)
    again = rng.random((shape[0], half)) < 0.99
    values[:, :half] = np.where(again, sign * values[:, half : 2 * half], values[:, :half])
    scale = np.exp(rng.normal(size=groups))
    if spec.scale_dtype != "float32":
        held = level_values("float8_e4m3fn") if spec.has_tensor_scale else np.exp2(np.arange(-9, 10))
        scale = rng.choice(held[held > 0], groups)
        scale[:, : groups[1] // 2] = scale[:, groups[1] // 2 :]
    zero = np.zeros(groups) if spec.symmetric else rng.integers(spec.qmin, spec.qmax + 1, groups)
    arrays = values.astype(spec.dtype), scale.astype(dtype_of(spec.scale_dtype)), np.asarray(zero, spec.dtype)
    return jq.QArray(*arrays, spec, F, tensor_scale=F(1.3) if spec.has_tensor_scale else None)


def rounded(n):
    """An integer as the nearest float32, ties to even."""
    size, few = abs(n), max(abs(n).bit_length() - 24, 0)
    q, rest = divmod(size, 1 << few)
    half = (1 << few) >> 1
    q += few > 0 and (rest > half or (rest == half and q % 2 == 1))
    return F(-1 if n < 0 else 1) * F(q) * F(2.0**few)


def integers_of(q):
    """Exact Python integers, in units of the format."""
    values = np.asarray(q.values).astype(np.float64)
    zero = np.broadcast_to(np.asarray(q.zero_point), q.shape) if not q.spec.symmetric else 0
    return np.vectorize(int, otypes=[object])((values - zero) / q.spec.levels.unit)


def exact_product(a, b):
    """Of the rows of both."""
    acc = np.vectorize(rounded, otypes=[F])(integers_of(a) @ integers_of(b).T)
    return acc * F(a.spec.levels.unit * b.spec.levels.unit) * (np.asarray(a.scale) * np.asarray(b.scale).T) + F(0)


INT8, INT16 = QuantSpec(symmetric=False, granularity=PerChannel(0)), QuantSpec(bits=16, granularity=PerChannel(0))
PAIRS = [
    ("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn"), ("float8_e3m4", "float8_e4m3b11fnuz"),
    ("float6_e2m3fn", "float6_e3m2fn"), ("float4_e2m1fn", "float4_e2m1fn"), ("float4_e2m1fn", "float8_e4m3fn"),
    (INT8, "float8_e4m3fn"), (INT16, "float8_e4m3fn"), (INT8, "float4_e2m1fn"),
]  # fmt: skip


PRODUCTS = [(*pair, length) for pair in PAIRS for length in (0, 1, 37, 300, 10699 if "float8_e5m2" in pair else 16384)]


@by_default(
    "float8_e3m4-float8_e4m3b11fnuz-37",
    "QuantSpec(bits=8, symmetric=False, granularity=PerChannel(0))-float4_e2m1fn-300",
)
@bits
@cases(("a", "b", "length"), PRODUCTS)
def test_a_product_is_the_exact_sum_rounded_once(a, b, length, compared):
    rng, rows = np.random.default_rng(length), 3 if length > 1000 else 5
    a = a if isinstance(a, QuantSpec) else QuantSpec(format=a, granularity=PerChannel(0))
    a = drawn(rng, (rows, length), a)
    b = drawn(rng, (6, length), QuantSpec(format=b, granularity=PerChannel(0)), -1)
    dot = lambda a, b: np.asarray(jq.dot_general(a, b, ALONG)) + F(0)
    y, want = dot(a, b), exact_product(a, b)
    compared("Python integers", "dot_general of floats", y.size, int((y != want).sum()))
    assert_same_bits(y, want)
    order = rng.permutation(length)
    assert_same_bits(dot(*(dataclasses.replace(q, values=q.values[:, order]) for q in (a, b))), y)


@pytest.mark.slow
@bits
def test_a_sharded_sum_has_the_same_bits():
    rng, mesh = np.random.default_rng(0), jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    a, b = drawn(rng, (5, 64), float8_spec()), drawn(rng, (3, 64), float8_spec(), -1)
    at = lambda q: dataclasses.replace(q, values=jax.device_put(q.values, NamedSharding(mesh, P(None, "d"))))
    y = jax.jit(lambda a, b: jq.dot_general(a, b, ALONG))(at(a), at(b))
    assert_same_bits(np.asarray(y) + F(0), exact_product(a, b))


@pytest.mark.slow
@bits
def test_sums_of_digits_are_rounded_once():
    rng = np.random.default_rng(0)
    numbers = [int(n) for n in rng.integers(-(2**62), 2**62, 4000)] + [0, 1, -1, 2**24 + 1, -(2**24) - 3, 2**63 - 1]
    numbers = [n >> int(s) for n, s in zip(numbers, [*rng.integers(0, 62, 4000), *[0] * 6], strict=True)]
    numbers += [(2**24 + k) * 2**s + d for k in range(4) for s in range(1, 37) for d in (-1, 0, 1)]
    numbers += [(2**25 + 2 * k + 1) * 2**s + d for k in range(4) for s in range(1, 36) for d in (-1, 0, 1)]
    for top in range(26, 63):  # between two floats, and what each bit below makes of it
        between = [2**top + 2 ** (top - 24) + bit for bit in (0, *(2**i for i in range(top - 24)))]
        numbers += [sign * n for sign in (1, -1) for n in between]
    digits = []
    for n in numbers:  # digits that int32 sums may be, and not those of base 256
        parts = [int(v) for v in rng.integers(-(2**31) + 512, 2**31 - 512, 6)]
        rest = n - sum(p << (8 * i) for i, p in enumerate(parts))
        low = rest & 255
        digits.append([parts[0] + low, *parts[1:6], (rest - low) >> 48, 0])
        left = n - sum(p << (8 * i) for i, p in enumerate(digits[-1]))
        for i in range(6):  # what is left below 2 ** 48, byte by byte
            digits[-1][i] += (left >> (8 * i)) & 255 if i < 5 else left >> 40
    sums = np.array(digits, object)
    assert all(sum(int(p) << (8 * i) for i, p in enumerate(row)) == n for row, n in zip(digits, numbers, strict=True))
    keep = (abs(sums) < 2**31).all(1)
    assert keep.sum() > 4000
    got = jax.jit(lambda *parts: _rounded(list(parts)))(*(jax.device_put(v.astype(np.int32)) for v in sums[keep].T))
    assert_same_bits(got, F([rounded(n) for n, k in zip(numbers, keep, strict=True) if k]) + F(0))


CONVOLVED = (float8_spec(), "float8_e4m3fn"), (QuantSpec(symmetric=False), "float8_e5m2")


@bits
@cases(("of_x", "of_w"), CONVOLVED)
def test_a_convolution_is_its_patches_times_its_kernel(of_x, of_w):
    rng = np.random.default_rng(0)
    rows = drawn(rng, (2 * 6 * 5, 3), of_x)
    columns = drawn(rng, (4, 18), QuantSpec(format=of_w, granularity=PerChannel(0)))
    x = dataclasses.replace(rows, values=rows.values.reshape(2, 6, 5, 3))
    kernel = jq.QArray(
        columns.values.T.reshape(3, 2, 3, 4), columns.scale.reshape(1, 1, 1, 4), columns.zero_point.reshape(1, 1, 1, 4),
        dataclasses.replace(columns.spec, granularity=PerChannel(-1)), F,
    )  # fmt: skip
    y = jq.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=NHWC)
    patches = np.stack([x.values[:, i : i + 4, j : j + 4] for i in range(3) for j in range(2)], 3).reshape(-1, 18)
    want = exact_product(dataclasses.replace(rows, values=patches), columns)
    assert_same_bits(np.asarray(y).reshape(-1, 4) + F(0), want)


def test_a_nan_is_in_what_it_enters():
    x = np.ones((3, 4), F)
    x[1, 2] = np.nan
    spec = float8_spec()
    of = lambda v: jq.QArray(v.astype(spec.dtype), F(1), np.zeros((), spec.dtype), spec, F)
    of_rank_1 = dataclasses.replace(of(x), scale=F([1]), zero_point=np.zeros(1, spec.dtype))
    y = jq.dot_general(of_rank_1, of(np.ones((4, 2), F)), MATMUL)
    image, kernel = of(x.reshape(3, 2, 2, 1)), of(np.ones((1, 1, 1, 2), F))
    of_image = jq.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=NHWC)
    assert np.isnan(y).tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert np.isnan(of_image).all((1, 2, 3)).tolist() == [False, True, False]


@bits
def test_a_nan_in_a_tile_is_in_its_row_alone():
    rng, tiles = np.random.default_rng(0), QuantSpec(format="float8_e3m4", granularity=PerBlock((0, 1), (2, 8)))
    x = rng.choice(level_values("float8_e3m4"), (4, 16))
    x[1, 2] = np.nan
    w, scales = rng.integers(-127, 128, (16, 3)), F(rng.uniform(1, 2, (2, 2)))
    a = jq.QArray(x.astype(tiles.dtype), scales, np.zeros((2, 2), tiles.dtype), tiles, F)
    y = jq.dot_general(a, jq.QArray(w.astype(np.int8), F(1.3), np.int8(0), QuantSpec(), F), MATMUL)
    steps = np.repeat(scales, 2, 0) * F(1.3)
    assert_same_bits(y, F(x[:, :8] @ w[:8]) * steps[:, :1] + F(x[:, 8:] @ w[8:]) * steps[:, 1:])


def test_gradients_of_a_product_are_those_of_the_real_values():
    rng = np.random.default_rng(0)
    a, b = drawn(rng, (4, 8), float8_spec()), drawn(rng, (3, 8), float8_spec())
    dot = lambda s, t: jq.dot_general(dataclasses.replace(a, scale=s), dataclasses.replace(b, scale=t), ALONG)
    got = jax.jit(jax.grad(lambda *scales: dot(*scales).sum(), (0, 1)))(a.scale, b.scale)
    in_steps = (a.values.astype(np.float64) @ b.values.astype(np.float64).T).sum()
    np.testing.assert_allclose(got, [in_steps * b.scale, in_steps * a.scale], rtol=1e-5)


@cases(("name",), FLOATS, SOME)
def test_packed_and_saved(name, tmp_path):
    q = drawn(np.random.default_rng(0), (15, 24), QuantSpec(format=name, granularity=PerChannel(0)))
    q = dataclasses.replace(q, dtype=jnp.dtype("bfloat16"))
    for path in (tmp_path / "q.npz", tmp_path / "q.safetensors"):
        jq.save(path, {"w": q})
        loaded = jq.load(path)["w"]
        assert (loaded.spec, loaded.dtype, loaded.values.dtype) == (q.spec, q.dtype, q.values.dtype)
        assert_same_bits(np.asarray(loaded.values).view(np.uint8), np.asarray(q.values).view(np.uint8))
        assert_same_bits(jq.dequantize(loaded), jq.dequantize(q))
    width = 4 if q.spec.bits == 4 else 8
    assert q.nbytes == q.size * width // 8 + q.scale.size * 4 + math.ceil(q.scale.size * width / 8)


def test_float4_is_packed_by_its_bits():
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    packed = jq.pack(values, 4)
    assert packed.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert_same_bits(np.asarray(jq.unpack(packed, 4, (16,), jnp.float4_e2m1fn)).view(np.uint8), values.view(np.uint8))


@cases(("name",), ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"], ["float4_e2m1fn"])
def test_what_is_trained_is_served(name, tmp_path):
    rng = np.random.default_rng(0)
    params, x = {"a": (rng.normal(size=(6, 3)) * 0.3).astype(F)}, rng.normal(size=(32, 6)).astype(F)
    labels = (x @ rng.normal(size=(6, 3))).argmax(1)
    weight = QuantSpec(format=name, granularity=PerChannel(None))
    q = jq.quantize_fn(lambda p, x: x @ p["a"], [Rule("**", weight, activation=float8_spec())])

    def loss(params):
        y = q(params, x)
        return -(jax.nn.log_softmax(y) * np.eye(3, dtype=F)[labels]).sum() / 32, y

    value, losses = jax.jit(jax.value_and_grad(loss, has_aux=True)), []
    for _ in range(30):
        (now, want), dp = value(params)
        losses.append(float(now))
        trained, params = params, {"a": params["a"] - F(0.5) * np.asarray(dp["a"])}
    assert losses[-1] < 0.8 * losses[0]
    frozen = q.freeze(trained, x)
    assert frozen["a"].values.dtype == FLOATS[name].dtype
    jq.save(tmp_path / "net.npz", frozen)
    served = jax.jit(q)
    for tree in (frozen, jq.load(tmp_path / "net.npz")):
        assert_same_bits(served(tree, x), want)
    assert f"{name} per channel" in str(q.plan(trained, x))
    found = jq.report(q, trained, x)
    assert {row.levels for row in found if row.size} == {FLOATS[name].number}
    assert all(row.sqnr > 10 and 0 < row.used_levels <= row.levels for row in found)


@pytest.mark.slow
def test_other_transforms_take_floats():
    params = {"w": data("float32")[1:]}
    rules = [("w", float8_spec(granularity=PerChannel(-1)))]
    fake = np.asarray(jq.fake_quant_params(params, rules)["w"])
    assert_same_bits(jq.dequantize(jq.quantize_params(params, rules)["w"]), fake)
    assert_same_bits(jq.fake_quant_params(params, rules, jq.init_qparams(params, rules))["w"], fake)
    q = jq.quantize_params(params, rules)["w"]
    moves = lambda v: [v.T, v.reshape(5, 3, 24), v[2]]
    jax.tree.map(assert_same_bits, jax.jit(lambda q: [jq.dequantize(v) for v in moves(q)])(q), moves(fake))


def test_specs_say_their_format():
    assert repr(QuantSpec(format="float4_e2m1fn")) == "QuantSpec(format='float4_e2m1fn')"
    assert dataclasses.replace(float8_spec(), rounding="half_up") == float8_spec(rounding="half_up")
    spec = QuantSpec(format="float6_e3m2fn")
    assert (spec.bits, spec.qmin, spec.qmax, spec.dtype) == (6, -28.0, 28.0, ml_dtypes.float8_e4m3fn)


@bits
def test_an_affine_operand_beside_a_float_does_not_overflow():
    length = 65793  # of 255 * 128
    affine, w = QuantSpec(symmetric=False), QuantSpec(format="float4_e2m1fn")
    a = jq.QArray(np.full((1, length), 127, np.int8), F(1 / 255), np.int8(-128), affine, F)
    b = jq.QArray(np.full((length, 1), 6, w.dtype), F(1), np.zeros((), w.dtype), w, F)
    assert_same_bits(jq.dot_general(a, b, MATMUL), F([[F(length * 255 * 12) * F(0.5) * F(1 / 255)]]))
    longer = jax.eval_shape(lambda: jq.quantize(jnp.ones((1, length + 1)), affine))
    of_w = jax.eval_shape(lambda: jq.quantize(jnp.ones((length + 1, 1)), w))
    with pytest.raises(ValueError, match="no more than 65793 of"):
        jax.eval_shape(lambda a, b: jq.dot_general(a, b, MATMUL), longer, of_w)


def largest(spec, length):
    """A row of the value of the largest magnitude, where scales of float8 have theirs, and that value."""
    value = spec.qmin if spec.symmetric and -spec.qmin > spec.qmax else spec.qmax
    zero, scale = 0 if spec.symmetric else spec.qmin, 448 if spec.has_tensor_scale else 1
    groups = qparams_shape(spec, (1, length))
    q = jq.QArray(
        np.full((1, length), value, spec.dtype), np.full(groups, scale, dtype_of(spec.scale_dtype)),
        np.full(groups, zero, spec.dtype), spec, F, tensor_scale=F(1) if spec.has_tensor_scale else None,
    )  # fmt: skip
    return q, int(value - zero) * scale


E4M3 = dict(scale_dtype="float8_e4m3fn", granularity=PerBlock(1, 1))
LONGEST = [
    (QuantSpec(narrow_range=False), float8_spec(), 131_071),
    (QuantSpec(bits=9, symmetric=False), float8_spec(), 65_535),
    (QuantSpec(bits=16), float8_spec(), 43_690),
    (float8_spec("float8_e5m2"), float8_spec(), 10_699),
    (QuantSpec(format="float4_e2m1fn", **E4M3), QuantSpec(format="float4_e2m1fn", **E4M3), 43_690),
    (QuantSpec(narrow_range=False, **E4M3), QuantSpec(narrow_range=False, **E4M3), 10_699),
]


@bits
@cases(("of_a", "of_b", "length"), LONGEST)
def test_the_longest_sum_of_the_largest_is_exact(of_a, of_b, length):
    dot, rows = lambda a, b: jq.dot_general(a, b, ALONG), lambda n: [largest(spec, n) for spec in (of_a, of_b)]
    (a, x), (b, w) = rows(length)
    assert_same_bits(dot(a, b), F([[rounded(length * x * w)]]))
    with pytest.raises(ValueError, match=f"no more than {length} of"):
        jax.eval_shape(dot, *(q for q, _ in rows(length + 1)))


BAD = [
    (lambda: QuantSpec(format="fp8"), ValueError, "float8_e4m3fn"),
    (lambda: QuantSpec(format="nf4"), ValueError, "float4_e2m1fn"),
    (lambda: QuantSpec(format=8), TypeError, "`format`"),
    (lambda: QuantSpec(format="float8_e4m3fn", symmetric=False), ValueError, "`symmetric` must be left out"),
    (lambda: QuantSpec(format="float8_e4m3fn", signed=False), ValueError, "`signed` must be left out"),
    (lambda: QuantSpec(format="float4_e2m1fn", bits=8), ValueError, "`bits` must be left out .* has 4 bits"),
    (lambda: QuantSpec(format="float8_e4m3fn", narrow_range=False), ValueError, "`narrow_range` must be left out"),
    (lambda: float8_spec("float4_e2m1fn"), ValueError, "`format` must be one of float8_e4m3fn"),
    (lambda: jq.fake_quant(np.ones(2, F), float8_spec(), bits=4), ValueError, "`bits` is a schedule for integers"),
    (lambda: jq.pack(np.zeros(2, ml_dtypes.float4_e2m1fn), 3), ValueError, "`bits` must be 4 for float4_e2m1fn"),
    (lambda: product("float8_e5m2", "float8_e5m2", 4), ValueError, "no more than 0 of .* float8_e4m3fn"),
    (lambda: product("float8_e4m3fn", "float8_e4m3fn", 43691), ValueError, "no more than 43690 of"),
]


def product(a, b, length):
    of = lambda name, shape: jax.eval_shape(lambda: jq.quantize(jnp.zeros(shape), QuantSpec(format=name)))
    return jax.eval_shape(lambda a, b: jq.dot_general(a, b, MATMUL), of(a, (1, length)), of(b, (length, 1)))


@pytest.mark.parametrize(("call", "error", "match"), BAD)
def test_bad_input(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.slow
def test_a_convolution_of_float8_in_groups_of_examples():
    x, w = (jq.quantize(normal_of(seed, *shape), float8_spec()) for seed, shape in ((0, (4, 2, 5)), (1, (4, 2, 3))))
    got = jq.conv_general_dilated(x, w, (1,), "SAME", batch_group_count=2)
    want = jax.lax.conv_general_dilated(jq.dequantize(x), jq.dequantize(w), (1,), "SAME", batch_group_count=2)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def normal_of(seed, *shape):
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))
