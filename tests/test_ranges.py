# SPDX-License-Identifier: Apache-2.0
"""Ranges and qparams: against NumPy bit for bit, on every road, and the searched ones against a dense search."""

import dataclasses
import functools
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from exact import assert_same_bits, x64
from inputs import cast, hard_ranges, hard_values
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import cases, in_turn

from jaxquant import (
    PerBlock,
    PerChannel,
    PerTensor,
    QParams,
    QuantSpec,
    Range,
    activation_spec,
    ema_ranges,
    fake_quant,
    fit_qparams,
    histogram,
    merge_histograms,
    merge_ranges,
    observe,
    qparams_from_range,
    range_from_histogram,
)

F = np.float32
TINY = np.finfo(F).tiny
LARGEST = np.finfo(F).max / 2
SPECS = {
    "symmetric": QuantSpec(),
    "symmetric wide": QuantSpec(bits=4, narrow_range=False),
    "symmetric unsigned": QuantSpec(signed=False),
    "affine": activation_spec(),
    "affine 2": activation_spec(2, signed=False),
    "affine 5 narrow": activation_spec(5, narrow_range=True),
    "affine 16": activation_spec(16),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
THREE = [SPECS[k] for k in ("symmetric", "symmetric unsigned", "affine")]
three_specs = pytest.mark.parametrize("spec", THREE, ids=repr)
GRANULARITIES = {
    PerTensor(): (),
    PerChannel(-1): (1, 1, 8),
    PerChannel(0): (4, 1, 1),
    PerChannel((0, -1)): (4, 1, 8),
    PerBlock(1, 8): (4, 2, 8),
    PerBlock(-1, 2): (4, 16, 4),
}
NEUTRAL = Range(F(np.inf), F(-np.inf))


def same(got, want, what=""):
    jax.tree.map(lambda a, b: assert_same_bits(a, b, what), tuple(got), tuple(want))


def with_(spec, **changes):
    values = {name: getattr(spec, name) for name in ("bits", "signed", "symmetric", "narrow_range", "granularity")}
    return QuantSpec(**{**values, **changes})


def numpy_qparams(x_min, x_max, spec):
    """The docstring of `qparams_from_range`, one float32 operation at a time."""
    end = lambda v: np.where(np.isnan(v), F(0), np.clip(oracle.flush(np.asarray(v, F)), -LARGEST, LARGEST))
    low, high = np.minimum(end(x_min), F(0)), np.maximum(end(x_max), F(0))
    if spec.symmetric:
        width, steps = np.maximum(-low, high) if spec.signed else high, spec.qmax
    else:
        width, steps = oracle.sub(high, low), spec.qmax - spec.qmin
    scale = np.where(width > 0, np.maximum(oracle.div(width, F(steps)), TINY), F(1))
    zero_point = np.clip(F(spec.qmin) - np.rint(oracle.div(low, scale)), F(spec.qmin), F(spec.qmax))
    return QParams(scale, np.zeros_like(scale) if spec.symmetric else zero_point)


def ranges(spec):
    """Plain ranges, ties of the zero point, and every pair of extreme ends, reversed ones too."""
    low, high = hard_ranges(np.random.default_rng(spec.bits), 512, spec.qmax - spec.qmin)
    ends = F([0, 1e-45, 1e-40, TINY, 1e-36, 1e-30, 1, 1e30, 1.7014118e38, 3e38, 3.4028235e38, np.inf, np.nan])
    pairs = F(list(itertools.product(np.concatenate([ends, -ends]), repeat=2)))
    return np.concatenate([low, pairs[:, 0]]), np.concatenate([high, pairs[:, 1]])


@cases("spec", SPECS.values(), [SPECS["affine 5 narrow"]])
def test_qparams_of_a_range_are_those_of_numpy_on_every_road(spec, compared):
    low, high = ranges(spec)
    want = numpy_qparams(low, high, spec)
    f = lambda low, high: qparams_from_range(Range(low, high), spec)
    same(f(low, high), want, "eager")
    same(jax.jit(f)(low, high), want, "jit")
    same(jax.jit(jax.vmap(f))(low, high), want, "vmap")
    same(jax.jit(lambda: f(low, high))(), want, "closure constants")
    same(jax.lax.scan(lambda c, ends: (c, f(*ends)), 0, (low, high))[1], want, "scan")
    some = range(0, 32, 5)
    for i, got in zip(some, jax.jit(lambda: [f(low[n], high[n]) for n in some])(), strict=True):
        same(got, [v[i] for v in want], "constant scalars")
        same(f(float(low[i]), float(high[i])), [v[i] for v in want], "numbers")
    compared("NumPy, op by op", "qparams_from_range", 5 * 2 * low.size, 0)


@every_spec
def test_qparams_of_any_range_are_finite_and_have_zero_on_the_grid(spec):
    scale, zero_point = (np.asarray(v) for v in qparams_from_range(Range(*ranges(spec)), spec))
    assert np.isfinite(scale).all()
    assert (scale >= TINY).all()
    assert (zero_point == np.rint(zero_point)).all()
    assert ((spec.qmin <= zero_point) & (zero_point <= spec.qmax)).all() or (spec.symmetric and (zero_point == 0).all())


@cases("spec", SPECS.values(), [SPECS["affine 5 narrow"]])
def test_traced_bits_are_those_of_a_narrower_spec(spec):
    low, high = ranges(spec)
    x = hard_values(np.random.default_rng(0), 256, -1, 2, 15)[:, None]
    f = lambda bits: (
        qparams_from_range(Range(low, high), spec, bits=bits),
        fit_qparams(x[:, 0], spec, bits=bits),
        fit_qparams(x[:, 0], spec, "percentile", bits=bits, percentile=90),
    )
    got = jax.jit(jax.vmap(f))(jnp.arange(2, spec.bits + 1))
    for i, bits in enumerate(range(2, spec.bits + 1)):
        narrower, each = with_(spec, bits=bits), jax.tree.map(lambda v, i=i: v[i], got)
        same(each[0], numpy_qparams(low, high, narrower), "range")
        same(each[1], [v[0, 0] for v in numpy_fit(x, narrower, (1, 1))], "minmax")
        same(each[2], [v[0, 0] for v in numpy_fit(x, narrower, (1, 1), "percentile")], "percentile")


@functools.cache
def data():
    """(4, 16, 8): hard values, one channel each of NaN, infinities, zeros, tiny and large values."""
    rng = np.random.default_rng(7)
    low, high = hard_ranges(rng, 8, 15)
    x = np.stack([hard_values(rng, 64, a, b, 15) for a, b in zip(low, high, strict=True)], -1)
    x[:, 0] = rng.normal(size=64)
    x[:, 1], x[:, 2], x[:, 3], x[:, 4] = np.nan, np.inf, 0, x[:, 0] * F(1e-30)
    x[::5, 4], x[1::7, 0], x[1::9, 0] = -np.inf, np.nan, np.inf
    return x.reshape(4, 16, 8)


def groups(x, shape):
    """Each group of `x`, by a loop."""
    sizes = [n // g for n, g in zip(x.shape, shape or (1,) * x.ndim, strict=True)]
    for at in np.ndindex(shape or (1,) * x.ndim):
        yield x[tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, sizes, strict=True))].ravel()


def range_of(v, spec, method, percentile):
    v = np.sort(np.abs(v[np.isfinite(v)]) if spec.symmetric and spec.signed else v[np.isfinite(v)])
    if not v.size:
        return NEUTRAL
    both = not (spec.symmetric and spec.signed)
    outside = (1 - Fraction(str(percentile)) / 100) / (2 if both else 1) if method == "percentile" else Fraction(0)
    low, high = math.floor(outside * (v.size - 1)), math.ceil((1 - outside) * (v.size - 1))
    return Range(v[low] if both else -v[high], v[high])


def numpy_fit(x, spec, shape, method="minmax", percentile=90):
    with np.errstate(over="ignore"):
        ends = F([range_of(v, spec, method, percentile) for v in groups(np.asarray(x), shape)])
    return QParams(*(v.reshape(shape) for v in numpy_qparams(ends[:, 0], ends[:, 1], spec)))


METHODS = "minmax", "percentile"


@cases(
    ("granularity", "method", "spec"),
    itertools.product(GRANULARITIES, METHODS, THREE),
    in_turn(zip(GRANULARITIES, itertools.cycle(METHODS), strict=False), THREE),
)
def test_minmax_and_percentile_are_a_numpy_loop_over_the_groups(granularity, spec, method):
    spec, shape = with_(spec, granularity=granularity), GRANULARITIES[granularity]
    got = fit_qparams(data(), spec, method, percentile=90)
    same(got, numpy_fit(data(), spec, shape, method))
    assert np.isfinite(got.scale).all()


@three_specs
@pytest.mark.parametrize("shape", [(4096,), (96, 48)], ids=str)
def test_a_nan_hides_no_other_value(spec, shape):
    """The maximum of XLA:CPU forgets a NaN, and what it saw before, in arrays as large as these."""
    fitted = jax.jit(lambda x: fit_qparams(x, spec))
    size, x = math.prod(shape), np.ones(shape, F)
    for i in range(0, size, size // 9):
        for beside in (1, 8, 48, 1024):
            x.flat[i], x.flat[(i + beside) % size] = 1000, 1
            want = fitted(x)
            x.flat[(i + beside) % size] = np.nan
            assert_same_bits(fitted(x), want)
            x.flat[i] = x.flat[(i + beside) % size] = 1


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_half_step_leaves_the_largest_value_half_a_step_beyond_the_last_level(bits):
    plain, spec = (QuantSpec(bits=bits, granularity=PerChannel(-1), scale_rule=rule) for rule in ("ceil", "half_step"))
    x = np.random.default_rng(bits).normal(size=(64, 32)).astype(F)
    largest = np.abs(x).max(0, keepdims=True)
    want = largest / F(2 ** (bits - 1) - 0.5)
    assert_same_bits(fit_qparams(x, spec).scale, want)
    assert_same_bits(qparams_from_range(Range(-largest, largest / 2), spec).scale, want)
    assert_same_bits(fit_qparams(x, dataclasses.replace(spec, bits=16), bits=jnp.int32(bits)).scale, want)
    error = lambda spec: np.mean((fake_quant(x, spec) - x) ** 2)
    assert bits == 8 or error(spec) < 0.95 * error(plain)
    # The range is that of the data, so that none of them is clipped away from its gradient.
    assert_same_bits(jax.grad(lambda x: fake_quant(x, spec).sum())(x), np.ones_like(x))


@cases(
    ("size", "percentile"),
    itertools.product([1, 2, 101, 1001], [0.5, 50, 99.9, 100]),
    [(1, 50), (101, 50), (1001, 99.9)],
)
def test_percentiles_of_any_size_are_order_statistics(percentile, size):
    x = np.random.default_rng(size).normal(size=size).astype(F)
    for spec in (SPECS["symmetric"], SPECS["affine"]):
        want = numpy_fit(x[:, None], spec, (1, 1), "percentile", percentile)
        same(fit_qparams(x, spec, "percentile", percentile=percentile), [v[0, 0] for v in want])


def test_each_side_leaves_out_half_of_what_is_left_out():
    x = jnp.arange(100_001.0)
    for spec, ends in ((SPECS["symmetric"], [-95000, 95000]), (SPECS["affine"], [2500, 97500])):
        same(fit_qparams(x, spec, "percentile", percentile=95), qparams_from_range(Range(*map(float, ends)), spec))


@pytest.mark.slow
def test_all_percent_are_the_ends_also_of_more_values_than_float32_counts():
    x = jnp.arange(2**24 + 4).astype(jnp.bfloat16)
    for spec in (SPECS["symmetric"], SPECS["affine"]):
        same(fit_qparams(x, spec, "percentile", percentile=100), fit_qparams(x, spec))


THREE_KINDS = PerTensor(), PerChannel(-1), PerBlock(1, 8)


@cases(
    ("granularity", "method"),
    itertools.product(THREE_KINDS, METHODS),
    [(PerBlock(1, 8), "percentile")],
)
def test_every_road_gives_the_same_qparams(granularity, method):
    spec = with_(SPECS["affine" if method == "minmax" else "symmetric"], granularity=granularity)
    x, shape = data(), GRANULARITIES[granularity]
    f = lambda x: fit_qparams(x, spec, method, percentile=90)
    stack = np.stack([x, -x[::-1], np.where(np.abs(x) < 1, x, F(0.25))])
    want = numpy_fit(x, spec, shape, method)
    wants = [np.stack(v) for v in zip(*(numpy_fit(v, spec, shape, method) for v in stack), strict=True)]
    same(jax.jit(f)(x), want, "jit")
    same(jax.jit(lambda: f(x))(), want, "closure constant")
    same(jax.jit(jax.vmap(f))(stack), wants, "vmap")
    same(jax.lax.scan(lambda c, x: (c, f(x)), 0, stack)[1], wants, "scan")


def mesh(kind):
    return jax.make_mesh((4,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))


@cases(
    ("axis", "granularity", "method", "kind"),
    itertools.product([0, 2], THREE_KINDS, METHODS, ["Auto", "Explicit"]),
    [(0, PerBlock(1, 8), "minmax", "Explicit")],
)
def test_sharded_qparams_are_those_of_the_whole(axis, granularity, method, kind):
    spec = with_(SPECS["affine"], granularity=granularity)
    want = numpy_fit(data(), spec, GRANULARITIES[granularity], method)
    with_mesh = mesh(kind)
    x = jax.device_put(data(), NamedSharding(with_mesh, P(*[None] * axis, "data")))
    with jax.set_mesh(with_mesh):
        same(fit_qparams(x, spec, method, percentile=90), want, "eager")
        same(jax.jit(lambda x: fit_qparams(x, spec, method, percentile=90))(x), want, "jit")


ALL_METHODS = "minmax", "percentile", "mse", "lsq"
TWO = SPECS["symmetric"], SPECS["affine"]


@cases(
    ("spec", "method"),
    itertools.product(TWO, ALL_METHODS),
    [(TWO[0], "percentile"), (TWO[1], "minmax")],
)
def test_shard_map_gives_the_qparams_of_the_shard(spec, method):
    x = np.where(np.abs(data()) < 1e3, data(), F(np.nan))
    f = lambda x: jax.tree.map(lambda v: v[None], fit_qparams(x, spec, method))
    got = jax.jit(jax.shard_map(f, mesh=mesh("Auto"), in_specs=P("data"), out_specs=P("data")))(x)
    want = [np.stack(v) for v in zip(*(fit_qparams(shard, spec, method) for shard in x), strict=True)]
    assert len(set(got.scale.tolist())) == 4
    same(got, want) if method in ("minmax", "percentile") else np.testing.assert_allclose(got, want, 1e-5)


@cases(
    ("dtype", "method"),
    itertools.product(["float16", "bfloat16", "float32", "float64"], ["minmax", "percentile", "mse", "lsq"]),
    [
        *itertools.product(["bfloat16", "float64"], ["minmax", "percentile"]),
        *in_turn([("float16",), ("float32",), ("float64",)], ["percentile", "lsq", "lsq"]),
    ],
)
def test_scales_are_float32_for_every_dtype_of_the_data(dtype, method):
    spec = QuantSpec(granularity=PerChannel(-1))
    with x64(dtype == "float64"):
        x = cast(data().reshape(64, 8).astype(np.float64), oracle.FLOATS[dtype])
        got = fit_qparams(jnp.asarray(x), spec, method, percentile=90)
        assert [v.dtype for v in got] == [jnp.float32] * 2
        assert np.isfinite(got.scale).all()
        if method in ("minmax", "percentile"):
            same(got, numpy_fit(x.astype(np.float64), spec, (1, 8), method))


@cases(
    ("method", "dtype"),
    itertools.product(["minmax", "percentile", "mse", "lsq"], ["float16", "bfloat16"]),
    [("lsq", "float16")],
)
def test_small_channels_of_half_precision_keep_a_useful_scale(method, dtype):
    x = np.random.default_rng(0).normal(size=(128, 4)) * [1e-3, 3e-4, 1e-4, 1e-5]
    x = jnp.asarray(cast(x, oracle.FLOATS[dtype]))
    spec = QuantSpec(granularity=PerChannel(-1))
    got, want = (fit_qparams(v, spec, method).scale for v in (x, x.astype(jnp.float32)))
    np.testing.assert_allclose(got, want, 1e-5)
    largest = np.abs(x.astype(jnp.float32)).max(0, keepdims=True)
    assert ((got > largest / 600) & (got < largest)).all()


@cases(
    ("method", "spec"),
    itertools.product(["minmax", "percentile", "mse", "lsq"], THREE),
    [("minmax", THREE[0]), ("percentile", THREE[1]), ("lsq", THREE[2]), ("mse", THREE[0])],
)
def test_data_without_a_range(spec, method):
    nothing = QParams(F(1), F(0 if spec.symmetric else spec.qmin))
    channels = with_(spec, granularity=PerChannel(-1))
    x = np.tile(F([np.nan, np.inf, -np.inf, 0, -0.0, 1e-40]), (8, 1))
    same(fit_qparams(x, channels, method), [np.full((1, 6), v) for v in nothing], "columns")
    same(fit_qparams(jnp.ones((0, 3)), channels, method), [np.full((1, 3), v) for v in nothing], "(0, 3)")
    same(fit_qparams(jnp.ones((3, 0)), channels, method), [np.full((1, 0), v) for v in nothing], "(3, 0)")
    same(fit_qparams(jnp.ones(0), spec, method), nothing, "(0,)")


@cases(
    ("method", "spec"),
    itertools.product(["minmax", "percentile", "mse"], THREE),
    [("minmax", THREE[0]), ("percentile", THREE[1]), ("mse", THREE[2])],
)
def test_a_scalar_is_the_end_of_its_range(spec, method):
    scale, zero_point = fit_qparams(jnp.float32(0.75), spec, method)
    np.testing.assert_allclose(scale * (spec.qmax - zero_point), 0.75, 1e-6)


TINY_AND_HUGE = TINY, 1e-36, 1e18, 1e37, 3.4028235e38


@cases(
    ("spec", "method", "largest"),
    itertools.product(TWO, ALL_METHODS, TINY_AND_HUGE),
    itertools.chain(
        itertools.product(TWO, ["minmax", "lsq"], TINY_AND_HUGE),
        itertools.product([TWO[1]], ["percentile", "mse"], TINY_AND_HUGE),
    ),
)
def test_qparams_of_tiny_and_huge_data_are_finite(largest, method, spec):
    x = np.linspace(-1, 1, 64, dtype=F) * F(largest)
    scale, zero_point = fit_qparams(x, spec, method)
    assert TINY <= scale < np.inf
    assert spec.qmin <= zero_point <= spec.qmax
    assert scale >= np.minimum(largest / 300, LARGEST / 300)


# The searched scale.
def squared_error(x, scale, zero_point, spec):
    """Float64; scales and zero points broadcast in front of the values."""
    scale, zero_point = (np.asarray(v, np.float64)[..., None] for v in (scale, zero_point))
    level = np.clip(np.rint(x / scale) + zero_point, spec.qmin, spec.qmax)
    return (((level - zero_point) * scale - x) ** 2).sum(-1)


def dense_search(x, spec):
    """The least error of thousands of grids; affine 8 bits: of thousands of clipped ranges."""
    low, high = min(x.min(), 0.0), max(x.max(), 0.0)
    if low == high:
        return 0.0
    if spec.symmetric:
        end = max(-low, high) if spec.signed else high
        return squared_error(x, end / spec.qmax * np.geomspace(2.0**-12, 1.6, 4000), 0.0, spec).min()
    if spec.bits < 8:
        scale = (high - low) / (spec.qmax - spec.qmin) * np.geomspace(2.0**-12, 1.5, 1200)
        return min(squared_error(x, scale, float(z), spec).min() for z in range(spec.qmin, spec.qmax + 1))
    ends = np.unique(np.concatenate([np.linspace(0.4, 1.04, 33), 2.0 ** -np.arange(1, 12, 0.5), [0.0]]))
    a, b = (v.ravel() for v in np.meshgrid(ends * low, ends * high))
    a, b = a[b > a], b[b > a]
    scale = (b - a) / (spec.qmax - spec.qmin)
    return squared_error(x, scale, np.clip(spec.qmin - np.rint(a / scale), spec.qmin, spec.qmax), spec).min()


def distributions(n):
    rng = np.random.default_rng(n)
    normal = lambda: rng.normal(size=n)
    spiked = lambda *spikes: np.concatenate([spikes, rng.normal(size=n - len(spikes))])
    return {
        "normal": normal(),
        "laplace": rng.laplace(size=n),
        "uniform": rng.uniform(-1, 1, n),
        "student t, 3": rng.standard_t(3, n),
        "student t, 1.5": rng.standard_t(1.5, n),
        "relu": np.maximum(normal(), 0),
        "exponential": rng.exponential(size=n),
        "log-normal": np.exp(2 * normal()),
        "far from 0": normal() + 6,
        "negative": -np.abs(normal()) - 0.5,
        "two modes": normal() * 0.1 + rng.choice([-1, 2], n),
        "an outlier of 1000": spiked(1000.0),
        "outliers of both signs": spiked(-1000.0, 300.0),
        "mostly 0": np.where(rng.random(n) < 0.9, 0, normal()),
    }


@functools.cache
def tiny_groups(n):
    rng = np.random.default_rng([n, 1])
    kinds = [rng.normal, rng.laplace, lambda size: rng.standard_t(2, size), lambda size: np.abs(rng.normal(size=size))]
    return {f"{k} {i}": kinds[k](size=n) for k in range(4) for i in range(12)}


def check_search(columns, spec, bits, traced):
    x = np.stack(list(columns.values()), -1).astype(F)
    widths = {"bits": jnp.int32(bits)} if traced else {}
    of_columns = with_(spec, bits=8 if traced else bits, granularity=PerChannel(-1))
    scale, zero_point = fit_qparams(x, of_columns, "mse", **widths)
    narrower, x = with_(spec, bits=bits), x.T.astype(np.float64)
    found = squared_error(x, scale[0], zero_point[0], narrower)
    best = np.array([dense_search(v, narrower) for v in x])
    worse = {n: f"{a / b - 1:.2%}" for n, a, b in zip(columns, found, best, strict=True) if a > 1.01 * b + 1e-12}
    assert worse == {}


@pytest.mark.slow
def test_mse_leaves_out_one_outlier_of_many_values():
    x, spec = np.random.default_rng(0).normal(size=8192), QuantSpec(bits=3, symmetric=False)
    x[0] = 20
    error = squared_error(x.astype(F), *(np.asarray(v, float) for v in fit_qparams(x.astype(F), spec, "mse")), spec)
    assert error.min() <= 1.01 * dense_search(x, spec)


@cases(("bits", "spec"), itertools.product([2, 3, 4, 8], THREE), [(8, THREE[2])])
def test_mse_is_within_1_percent_of_a_dense_search(spec, bits):
    columns = distributions(256)
    if not spec.signed:
        columns = {k: columns[k] for k in ("relu", "exponential", "log-normal", "far from 0", "mostly 0", "uniform")}
    check_search(columns, spec, bits, traced=True)


@cases(
    ("bits", "size", "spec"),
    itertools.product([2, 3, 4, 8], [16, 32], THREE),
    [(8, 16, THREE[0])],
)
def test_mse_of_tiny_groups_is_within_1_percent_of_a_dense_search(spec, bits, size):
    columns = tiny_groups(size)
    check_search(columns if spec.signed else {k: abs(v) for k, v in columns.items()}, spec, bits, traced=False)


@pytest.mark.parametrize("spec", TWO, ids=repr)
def test_mse_takes_what_is_not_finite_for_zeros(spec):
    """A zero lies on every grid, and so costs nothing either."""
    x = np.where(np.abs(data()) < 1e3, data(), F(np.nan))
    x[0, :4, 3] = np.inf, -np.inf, np.nan, np.inf
    spec = with_(spec, bits=3, granularity=PerChannel(-1))
    same(fit_qparams(x, spec, "mse"), fit_qparams(np.where(np.isfinite(x), x, F(0)), spec, "mse"))


@cases(
    ("granularity", "spec"),
    itertools.product([PerBlock(0, 64), PerTensor(), PerBlock(1, 1)], [QuantSpec(bits=4), activation_spec(4)]),
    [],
)
def test_mse_of_a_tensor_and_of_blocks_is_within_1_percent(spec, granularity):
    x = np.stack([distributions(256)[k] for k in ("normal", "laplace", "relu", "an outlier of 1000")], -1).astype(F)
    got = fit_qparams(x, with_(spec, granularity=granularity), "mse")
    parts = list(groups(x.astype(np.float64), got.scale.shape))
    found = [
        squared_error(v, s, z, spec) for v, s, z in zip(parts, got.scale.ravel(), got.zero_point.ravel(), strict=True)
    ]
    best = [dense_search(v, spec) for v in parts]
    rounding = [4e-14 * (v**2).max() for v in parts]  # of the scale and of the product, to float32
    assert (np.array(found) <= 1.01 * np.array(best) + rounding).all()


FOUR_BITS = QuantSpec(bits=4), activation_spec(4)


@cases(
    ("spec", "method"),
    itertools.product(FOUR_BITS, ALL_METHODS),
    [(FOUR_BITS[0], "lsq"), (FOUR_BITS[1], "minmax"), (FOUR_BITS[1], "percentile")],
)
def test_scales_follow_powers_of_two(spec, method):
    x = np.stack(list(distributions(64).values()), -1).astype(F)
    f = jax.jit(lambda x: fit_qparams(x, with_(spec, granularity=PerChannel(-1)), method))
    scale, zero_point = f(x)
    for power in (-60, 60):
        same(f(x * F(2.0**power)), (np.asarray(scale) * F(2.0**power), zero_point), str(power))


OF_LSQ = QuantSpec(bits=3), QuantSpec(signed=False), activation_spec(4)


@cases("spec", OF_LSQ, [OF_LSQ[2]])
def test_lsq_is_its_formula(spec):
    x = np.stack(list(distributions(256).values()), -1).astype(F)
    x[::7] = np.nan
    scale, zero_point = fit_qparams(x, with_(spec, granularity=PerChannel(-1)), "lsq")
    zero = np.asarray(zero_point, np.float64)
    steps = spec.qmax if spec.symmetric else np.maximum(spec.qmax - zero, zero - spec.qmin)
    want = 2 * np.nanmean(np.abs(x.astype(np.float64)), 0, keepdims=True) / np.sqrt(steps)
    np.testing.assert_allclose(scale, want, 1e-6)
    same((zero_point,), (fit_qparams(x, with_(spec, granularity=PerChannel(-1))).zero_point,))


def some_ranges():
    rng = np.random.default_rng(2)
    pairs = [F(hard_ranges(rng, 16, 255)) for _ in range(3)]
    return [Range(*pair) for pair in pairs]


def test_merged_ranges():
    a, b, c = some_ranges()
    tree = lambda r: {"x": r, "y": {"z": Range(r.x_min[0], r.x_max[0])}}
    want = Range(np.minimum(a.x_min, b.x_min), np.maximum(a.x_max, b.x_max))
    for f in (merge_ranges, jax.jit(merge_ranges)):
        jax.tree.map(assert_same_bits, f(tree(a), tree(b)), tree(want))
        same(f(f(a, b), c), f(a, f(b, c)))
        same(f(a, b), f(b, a))
        same(f(a, a), a)
        same(f(Range(*(np.full(16, v) for v in NEUTRAL)), a), a)
    same(functools.reduce(merge_ranges, (NEUTRAL, Range(-1, 2), Range(np.float16(-3), 1.0))), Range(F(-3), F(2)))


def test_averaged_ranges():
    a, b, c = some_ranges()
    nothing = Range(*(np.full(16, v) for v in NEUTRAL))
    f = jax.jit(ema_ranges)
    for decay in (0.0, 0.3, 0.99, 1.0):
        want = [
            oracle.add(oracle.mul(x, F(decay)), oracle.mul(y, oracle.sub(F(1), F(decay))))
            for x, y in zip(a, b, strict=True)
        ]
        same(ema_ranges(a, b, decay), want, "eager")
        same(f(a, b, decay), want, "jit")
        jax.tree.map(assert_same_bits, f({"k": a}, {"k": b}, decay), {"k": Range(*want)})
        same(f(nothing, b, decay), b, "first batch")
        same(f(a, nothing, decay), a, "empty batch")
    same(ema_ranges(nothing, nothing, 0.5), nothing)
    batches = Range(*(np.stack(v) for v in zip(a, b, c, strict=True)))
    step = lambda mean, batch: (ema_ranges(mean, batch, 0.9), None)
    same(jax.lax.scan(step, nothing, batches)[0], ema_ranges(ema_ranges(a, b, 0.9), c, 0.9), "scan")


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_calibrated_ranges_are_those_of_numpy(granularity):
    spec, shape = QuantSpec(granularity=granularity), GRANULARITIES[granularity]
    keep = lambda v: v[np.isfinite(v)]
    ends = F([[keep(v).min(initial=np.inf), keep(v).max(initial=-np.inf)] for v in groups(data(), shape)])
    for f in (observe, jax.jit(observe, static_argnums=1)):
        for got, want in zip(f(data(), spec), ends.T, strict=True):
            assert_same_bits(oracle.flush(np.asarray(got)) + F(0), oracle.flush(want.reshape(shape)) + F(0))
    same(observe(jnp.ones((0,)), QuantSpec()), NEUTRAL)


# Histograms.
def test_histograms_merge_exactly_in_any_order():
    spec, x = QuantSpec(granularity=PerChannel(-1)), data()
    want = histogram(x, spec).counts
    parts = [histogram(part, spec) for part in np.split(x, 4)]
    f = jax.jit(merge_histograms)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        assert_same_bits(functools.reduce(f, [parts[i] for i in order]).counts, want)
    assert_same_bits(histogram(x[::-1, ::-1], spec).counts, want, "order")
    assert_same_bits(jax.jit(histogram, static_argnums=1)(x, spec).counts, want, "jit")
    scanned, _ = jax.lax.scan(lambda h, x: (f(h, histogram(x[None], spec)), None), histogram(x[:0], spec), x)
    assert_same_bits(scanned.counts, want, "scan")
    shard = lambda x: jax.lax.psum(histogram(x, spec).counts, "data")
    summed = jax.jit(jax.shard_map(shard, mesh=mesh("Auto"), in_specs=P("data"), out_specs=P()))(x)
    assert_same_bits(summed, want, "shard_map")


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_a_histogram_counts_signs_exponents_and_five_bits(granularity):
    counts = np.asarray(histogram(data(), QuantSpec(granularity=granularity)).counts)
    assert counts.shape == (*GRANULARITIES[granularity], 16384)
    for got, v in zip(counts.reshape(-1, 16384), groups(data(), GRANULARITIES[granularity]), strict=True):
        v = v[np.isfinite(v)]
        order = np.where(
            np.signbit(v), 8191 - (np.abs(v).view(np.int32) >> 18), 8192 + (np.abs(v).view(np.int32) >> 18)
        )
        assert_same_bits(got, np.bincount(order, minlength=16384).astype(np.uint32))


@cases("percentile", [50, 99.9, 100], [99.9])
def test_a_range_of_a_histogram_holds_the_percentile_and_little_more(percentile):
    columns = distributions(1000)
    columns |= {"zeros": np.zeros(1000), "one": np.full(1000, 7.0), "tiny": np.linspace(-1, 1, 1000) * 1e-30}
    x = np.stack(list(columns.values()), -1).astype(F)
    h = histogram(
        np.concatenate([x, np.full_like(x[:9], np.nan), np.full_like(x[:9], -np.inf)]),
        with_(QuantSpec(), granularity=PerChannel(-1)),
    )
    got = range_from_histogram(h, percentile)
    same(jax.jit(range_from_histogram, static_argnums=1)(h, percentile), got, "jit")
    outside = (100 - percentile) / 2
    low = np.percentile(x, outside, 0, method="lower", keepdims=True).astype(np.float64)
    high = np.percentile(x, 100 - outside, 0, method="higher", keepdims=True).astype(np.float64)
    assert ((np.asarray(got.x_min) <= low) & (np.asarray(got.x_max) >= high)).all()
    inside = ((x >= got.x_min) & (x <= got.x_max)).mean(0)
    assert (inside >= percentile / 100 - 1e-9).all()
    beyond = np.abs([np.asarray(got.x_min) - low, np.asarray(got.x_max) - high])
    assert (beyond <= 0.032 * np.abs([low, high]) + 4e-40).all()


def test_a_range_of_an_empty_histogram_is_neutral():
    spec = QuantSpec(granularity=PerChannel(-1))
    for x in (jnp.ones((0, 3)), jnp.full((4, 3), jnp.nan), jnp.ones((4, 0))):
        same(range_from_histogram(histogram(x, spec)), Range(*(np.full((1, x.shape[1]), v) for v in NEUTRAL)))


def test_values_that_are_not_finite_raise_with_their_number():
    x = jnp.asarray([1.0, jnp.nan, jnp.inf, -jnp.inf, jnp.nan, jnp.inf])
    for f in (observe, histogram, fit_qparams):
        with pytest.raises(ValueError, match=r"`x` must be finite, got 2 NaN and 3 infinite of 6 values"):
            f(x, QuantSpec(), nonfinite="raise")
        with pytest.raises(TypeError, match="needs the values of `x`, got a traced array"):
            jax.jit(lambda x, f=f: f(x, QuantSpec(), nonfinite="raise"))(x)
        jax.tree.map(assert_same_bits, f(x[:1], QuantSpec(), nonfinite="raise"), f(x[:1], QuantSpec()))


def test_ranges_have_no_gradient_and_no_nan_in_it():
    x = jnp.asarray([1.0, -2.0, np.nan], jnp.float32)
    for f in (lambda x: sum(observe(x, activation_spec())), lambda x: fit_qparams(x, QuantSpec()).scale):
        assert jax.grad(f)(x).tolist() == [0, 0, 0]


def test_all_percent_of_a_histogram_are_all_of_more_values_than_float32_counts():
    h = histogram(np.asarray([1.0, 100.0], F), QuantSpec())
    counts = jnp.where(h.counts == 0, 0, h.counts.at[jnp.argmax(h.counts)].set(2**24 + 1))
    assert range_from_histogram(h._replace(counts=counts), 100.0).x_max >= 100


@pytest.mark.parametrize("spec", [QuantSpec(), QuantSpec(symmetric=False), QuantSpec(signed=False)], ids=str)
@pytest.mark.parametrize("ends", [(0.0, 0.0), (np.inf, -np.inf), (-1e-40, 1e-40)])
def test_an_empty_range_has_a_finite_gradient(spec, ends):
    gradient = jax.grad(lambda r: qparams_from_range(r, spec).scale)(Range(*map(np.float32, ends)))
    assert np.isfinite(gradient).all()
