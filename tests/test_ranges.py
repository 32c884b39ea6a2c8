# SPDX-License-Identifier: Apache-2.0
"""Ranges and qparams: against NumPy bit for bit, on every road, and the searched ones against a dense search."""

import dataclasses
import functools
import itertools
import math
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from exact import assert_same_bits, x64
from inputs import SPECIALS, cast, hard_ranges, hard_values
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import by_default, cases, in_turn

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
    merge,
    observe,
    qparams_from_range,
    range_from_histogram,
)
from jaxquant._arrays._tally import tally
from jaxquant._platform._cpu import _in_one_pass
from jaxquant.typing import Histogram

pytestmark = pytest.mark.bits

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
THREE = [SPECS[k] for k in ("symmetric", "symmetric unsigned", "affine")]
GRANULARITIES = {
    PerTensor(): (),
    PerChannel(-1): (1, 1, 8),
    PerChannel(0): (4, 1, 1),
    PerChannel((0, -1)): (4, 1, 8),
    PerBlock(1, 8): (4, 2, 8),
    PerBlock(-1, 2): (4, 16, 4),
}
NEUTRAL = Range(F(np.inf), F(-np.inf))
TWO = SPECS["symmetric"], SPECS["affine"]


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
    some = range(0, 32, 11)

    @jax.jit
    def roads(*ends):
        scanned = jax.lax.scan(lambda c, ends: (c, f(*ends)), 0, ends)[1]
        mapped, constant = jax.vmap(f)(*ends), f(low, high)
        arrays = {"jit": f(*ends), "vmap": mapped, "closure constants": constant, "scan": scanned}
        return arrays, [f(low[n], high[n]) for n in some]

    arrays, scalars = roads(low, high)
    for road, got in arrays.items():
        same(got, want, road)
    for i, got in zip(some, scalars, strict=True):
        same(got, [v[i] for v in want], "constant scalars")
        same(f(float(low[i]), float(high[i])), [v[i] for v in want], "numbers")
    compared("NumPy, op by op", "qparams_from_range", 5 * 2 * low.size, 0)


@functools.cache
def qparams_of_any_range():
    """Of every spec, by one program."""
    f = jax.jit(lambda ends: {name: qparams_from_range(Range(*ends[name]), spec) for name, spec in SPECS.items()})
    return jax.device_get(f({name: ranges(spec) for name, spec in SPECS.items()}))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_qparams_of_any_range_are_finite_and_have_zero_on_the_grid(name):
    spec, (scale, zero_point) = SPECS[name], qparams_of_any_range()[name]
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
    got = jax.device_get(jax.jit(jax.vmap(f))(np.arange(2, spec.bits + 1)))
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
ALL_METHODS = *METHODS, "mse", "lsq"


@by_default(
    "PerChannel(-1)-percentile-QuantSpec(bits=8, signed=False)",
    "PerBlock(axis=1, size=8)-minmax-QuantSpec(bits=8, signed=False)",
    "PerChannel(0)-minmax-QuantSpec(bits=8, symmetric=False)",
)
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


@cases(
    ("shape", "spec"),
    itertools.product([(4096,), (96, 48)], THREE),
    [((4096,), THREE[0]), ((96, 48), THREE[2])],
)
def test_a_nan_hides_no_other_value(spec, shape):
    """The maximum of XLA:CPU forgets a NaN, and what it saw before, in arrays as large as these."""
    fit = jax.jit(lambda x: fit_qparams(x, spec))
    fitted = lambda x: fit(x.copy())  # jax before 0.10 may read an array of NumPy while it is changed below
    size, x = math.prod(shape), np.ones(shape, F)
    for i in range(0, size, size // 9):
        for beside in (1, 8, 48, 1024):
            x.flat[i], x.flat[(i + beside) % size] = 1000, 1
            want = fitted(x)
            x.flat[(i + beside) % size] = np.nan
            assert_same_bits(fitted(x), want)
            x.flat[i] = x.flat[(i + beside) % size] = 1


HALF_STEP = QuantSpec(bits=16, granularity=PerChannel(-1), scale_rule="half_step")


@functools.partial(jax.jit, static_argnames="spec")
def half_step(x, ends, bits, spec):
    """Qparams of data and of a range, the values and their gradient: one program for all widths."""
    y, vjp = jax.vjp(lambda x: fake_quant(x, spec, bits=bits), x)
    of_range = qparams_from_range(Range(*ends), spec, bits=bits)
    return fit_qparams(x, spec, bits=bits).scale, of_range.scale, y, vjp(jnp.ones_like(x))[0]


@cases(
    ("bits", "spec"),
    [(bits, spec) for bits in (2, 3, 4, 8) for spec in (HALF_STEP, dataclasses.replace(HALF_STEP, bits=bits))],
    [(bits, HALF_STEP) for bits in (2, 3, 4, 8)],
)
def test_half_step_leaves_the_largest_value_half_a_step_beyond_the_last_level(bits, spec):
    x = np.random.default_rng(bits).normal(size=(64, 48)).astype(F)
    largest = np.abs(x).max(0, keepdims=True)
    widths = None if spec.bits == bits else np.int32(bits)
    of_data, of_range, y, dx = half_step(x, (-largest, largest / 2), widths, spec)
    want = largest / F(2 ** (bits - 1) - 0.5)
    assert_same_bits(of_data, want)
    assert_same_bits(of_range, want)
    plain = np.rint(x / (step := largest / (2 ** (bits - 1) - 1))) * step
    error = lambda y: np.mean((np.asarray(y) - x) ** 2)
    assert bits == 8 or error(y) < 0.95 * error(plain)
    # The range is that of the data, so that none of them is clipped away from its gradient.
    assert_same_bits(dx, np.ones_like(x))


@cases(
    ("size", "percentile"),
    itertools.product([1, 2, 101, 10_001], [0.5, 50, 95, 99.9, 100]),
    [(10_001, 95)],
)
def test_percentiles_of_any_size_are_order_statistics(percentile, size):
    x = np.random.default_rng(size).normal(size=size).astype(F)
    for spec, got in zip(TWO, percentiles(x, percentile), strict=True):
        want = numpy_fit(x[:, None], spec, (1, 1), "percentile", percentile)
        same(got, [v[0, 0] for v in want])


@functools.partial(jax.jit, static_argnums=1)
def percentiles(x, percentile):
    return [fit_qparams(x, spec, "percentile", percentile=percentile) for spec in TWO]


def test_each_side_leaves_out_half_of_what_is_left_out():
    both = percentiles(np.arange(10_001, dtype=F), 95)
    for spec, got, ends in zip(TWO, both, ([-9500, 9500], [250, 9750]), strict=True):
        same(got, numpy_qparams(*F(ends), spec))


def test_by_default_a_thousandth_is_left_out():
    got = fit_qparams(np.arange(10_001, dtype=F), TWO[0], "percentile")
    same(got, numpy_qparams(*F([-9990, 9990]), TWO[0]))


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
    scanned = lambda stack: jax.lax.scan(lambda c, x: (c, f(x)), 0, stack)[1]
    constant, *stacks = jax.jit(lambda stack: (f(x), jax.vmap(f)(stack), scanned(stack)))(stack)
    same(constant, want, "closure constant")
    for got, road in zip(stacks, ("vmap", "scan"), strict=True):
        same(got, wants, road)


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
        same(jax.jit(lambda x: fit_qparams(x, spec, method, percentile=90))(x), want)


@cases(
    ("spec", "method"),
    itertools.product(TWO, ALL_METHODS),
)
def test_shard_map_gives_the_qparams_of_the_shard(spec, method):
    x = np.where(np.abs(data()) < 1e3, data(), F(np.nan))
    f = lambda x: jax.tree.map(lambda v: v[None], fit_qparams(x, spec, method))
    got = jax.jit(jax.shard_map(f, mesh=mesh("Auto"), in_specs=P("data"), out_specs=P("data")))(x)
    exact = method in ("minmax", "percentile")
    each = lambda shard: numpy_fit(shard, spec, (), method, 99.9) if exact else fit_qparams(shard, spec, method)
    want = [np.stack(v) for v in zip(*map(each, x), strict=True)]
    assert len(set(got.scale.tolist())) == 4
    same(got, want) if exact else np.testing.assert_allclose(got, want, 1e-5)


@by_default("bfloat16-minmax")
@cases(
    ("dtype", "method"),
    itertools.product(["float16", "bfloat16", "float32", "float64"], ["minmax", "percentile", "mse", "lsq"]),
    [("bfloat16", "minmax"), ("float16", "percentile"), ("float64", "lsq")],
)
def test_scales_are_float32_for_every_dtype_of_the_data(dtype, method):
    spec = QuantSpec(granularity=PerChannel(-1))
    with x64(dtype == "float64"):
        x = cast(np.tile(data().reshape(64, 8), 6).astype(np.float64), oracle.FLOATS[dtype])
        got = fit_qparams(x, spec, method, percentile=90)
        assert [v.dtype for v in got] == [jnp.float32] * 2
        assert np.isfinite(got.scale).all()
        if method in ("minmax", "percentile"):
            same(got, numpy_fit(x.astype(np.float64), spec, (1, 48), method))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _of_columns(x, bits, spec, method):
    return fit_qparams(x, with_(spec, granularity=PerChannel(-1)), method, bits=bits)


def of_columns(x, spec, method, bits=8):
    """The qparams of each column, of 8 bits or fewer: one program for all data and all widths.

    It has 48 columns, because XLA takes three times as long to compile a loop over fewer, which it unrolls.
    """
    n = x.shape[1]
    wide = np.pad(F(x), ((0, 0), (0, 48 - n)), "wrap")
    return QParams(*(v[:, :n] for v in jax.device_get(_of_columns(wide, np.int32(bits), spec, method))))


@cases(
    ("method", "dtype"),
    itertools.product(["minmax", "percentile", "mse", "lsq"], ["float16", "bfloat16"]),
    [("lsq", "float16")],
)
def test_small_channels_of_half_precision_keep_a_useful_scale(method, dtype):
    spec = QuantSpec()
    x = np.random.default_rng(0).normal(size=(rows(spec), 48)) * np.resize([1e-3, 3e-4, 1e-4, 1e-5], 48)
    x = cast(x, oracle.FLOATS[dtype])
    got = np.asarray(fit_qparams(x, with_(spec, granularity=PerChannel(-1)), method).scale)
    np.testing.assert_allclose(got, of_columns(x, spec, method).scale, 1e-5)
    largest = np.abs(F(x)).max(0, keepdims=True)
    assert ((got > largest / 600) & (got < largest)).all()


def rows(spec):
    """How long the columns are: few values are searched for longer, so that both kinds of search are tested."""
    return 16 if spec.symmetric else 256


def of_nothing(spec, shape):
    return [np.full(shape, v) for v in (F(1), F(0 if spec.symmetric else spec.qmin))]


@by_default("minmax-QuantSpec(bits=8)", "percentile-QuantSpec(bits=8, symmetric=False)")
@cases(
    ("method", "spec"),
    itertools.product(ALL_METHODS, THREE),
    [("minmax", THREE[0]), ("percentile", THREE[2]), ("lsq", THREE[2]), ("mse", THREE[0])],
)
def test_data_without_a_range(spec, method):
    x = np.tile(F([np.nan, np.inf, -np.inf, 0, -0.0, 1e-40]), (rows(spec), 1))
    same(of_columns(x, spec, method), of_nothing(spec, (1, 6)))


EMPTY = {(0, 3): (1, 3), (3, 0): (1, 0), (0,): ()}


@by_default("(0, 3)-lsq-QuantSpec(bits=8, symmetric=False)", "(0,)-mse-QuantSpec(bits=8)")
@cases(
    ("shape", "method", "spec"),
    itertools.product(EMPTY, ALL_METHODS, THREE),
    [
        ((0, 3), "minmax", THREE[0]),
        ((0, 3), "lsq", THREE[2]),
        ((3, 0), "percentile", THREE[1]),
        ((3, 0), "mse", THREE[0]),
        ((0,), "mse", THREE[0]),
    ],
)
def test_no_data_have_no_range(shape, method, spec):
    spec = with_(spec, granularity=PerChannel(-1)) if EMPTY[shape] else spec
    same(fit_qparams(np.ones(shape, F), spec, method), of_nothing(spec, EMPTY[shape]))


@cases(
    ("method", "spec"),
    itertools.product(["minmax", "percentile", "mse"], THREE),
    [("minmax", THREE[2]), ("percentile", THREE[1])],
)
def test_a_scalar_is_the_end_of_its_range(spec, method):
    scale, zero_point = jax.device_get(fit_qparams(F(0.75), spec, method))
    np.testing.assert_allclose(scale * (spec.qmax - zero_point), 0.75, 1e-6)


TINY_AND_HUGE = TINY, 1e-36, 1e18, 1e37, 3.4028235e38


@by_default(
    "QuantSpec(bits=8)-minmax",
    "QuantSpec(bits=8)-lsq",
    "QuantSpec(bits=8, symmetric=False)-minmax",
    "QuantSpec(bits=8, symmetric=False)-percentile",
)
@cases(
    ("spec", "method"),
    itertools.product(TWO, ALL_METHODS),
    [*itertools.product(TWO, ["minmax", "lsq", "mse"]), (TWO[1], "percentile")],
)
def test_qparams_of_tiny_and_huge_data_are_finite(method, spec):
    largest = F(TINY_AND_HUGE)
    scale, zero_point = of_columns(np.linspace(-1, 1, rows(spec), dtype=F)[:, None] * largest, spec, method)
    assert ((scale >= TINY) & (scale < np.inf)).all()
    assert ((spec.qmin <= zero_point) & (zero_point <= spec.qmax)).all()
    assert (scale >= np.minimum(largest / 300, LARGEST / 300)).all()


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


def check_search(columns, spec, bits, widest):
    x = np.stack(list(columns.values()), -1).astype(F)
    scale, zero_point = of_columns(x, with_(spec, bits=widest), "mse", bits)
    narrower, x = with_(spec, bits=bits), x.T.astype(np.float64)
    found = squared_error(x, scale[0], zero_point[0], narrower)
    best = np.array([dense_search(v, narrower) for v in x])
    worse = {n: f"{a / b - 1:.2%}" for n, a, b in zip(columns, found, best, strict=True) if a > 1.01 * b + 1e-12}
    assert worse == {}


@pytest.mark.slow
@cases("spec", TWO, TWO[:1])
def test_mse_leaves_out_what_is_far_from_many_values(spec):
    """No worse than the grid that fits the others."""
    rng = np.random.default_rng(0)
    normal, positive = rng.normal(size=4096), rng.exponential(size=4096)
    kinds = [(normal, 20), (normal, 30), (normal, 12), (abs(normal), -20), (positive, -30), (normal + 3, -20)]
    kinds = [(sign * v, sign * far) for v, far in kinds for sign in (1, -1)]
    others = np.stack([v for v, _ in kinds], -1)
    others[0] = 0
    x = others.copy()
    x[0] = [far for _, far in kinds]
    x = np.concatenate([x, others], 1).astype(F)
    fitted, of_others = np.split(np.arange(x.shape[1]), 2)
    for bits in 2, 3, 4:
        scale, zero_point = of_columns(x, spec, "mse", bits)
        of_x = x.T[fitted].astype(np.float64), with_(spec, bits=bits)
        error, without = (squared_error(of_x[0], scale[0, i], zero_point[0, i], of_x[1]) for i in (fitted, of_others))
        assert (error <= 1.01 * without).all()
        assert not (spec.symmetric and zero_point.any())


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "bits"), [(TWO[0], 6), (TWO[1], 5)])
def test_mse_leaves_no_better_grid_beside(spec, bits):
    """None that is better by 1 %, whose scale is at most a quarter larger and, if affine, the zero point 2 away."""
    narrower, x = with_(spec, bits=bits), np.stack(list(distributions(4096).values()), -1).astype(F)
    scale, zero_point = of_columns(x, spec, "mse", bits)
    ratios, shifts = np.geomspace(0.8, 1.25, 101), [0] if spec.symmetric else np.arange(-2, 3)
    ratios, shifts = (v.ravel() for v in np.meshgrid(ratios, shifts))
    for v, s, z in zip(x.T.astype(np.float64), scale[0].astype(np.float64), zero_point[0], strict=True):
        beside = squared_error(v, s * ratios, np.clip(z + shifts, narrower.qmin, narrower.qmax), narrower)
        assert squared_error(v, s, z, narrower) <= 1.01 * beside.min()


@pytest.mark.slow
def test_mse_cuts_off_more_on_one_side_than_on_the_other():
    rng, spec = np.random.default_rng(0), activation_spec(5)
    uniform, positive = rng.uniform(-1, 1, 4096), rng.exponential(size=4096)
    x = np.stack([uniform, uniform, -positive, positive], -1).astype(F)
    x[:2] = np.transpose([(7, -35), (8, -40), (-50, 10), (50, -10)])
    scale, zero_point = of_columns(x, TWO[1], "mse", spec.bits)
    ratios, zeros = (v.ravel() for v in np.meshgrid(np.geomspace(0.5, 2, 41), np.arange(spec.qmin, spec.qmax + 1)))
    for v, s, z in zip(x.T.astype(np.float64), scale[0].astype(np.float64), zero_point[0], strict=True):
        assert squared_error(v, s, z, spec) <= 1.01 * squared_error(v, s * ratios, zeros, spec).min()


@pytest.mark.parametrize(("spec", "about", "of_few"), [(TWO[0], 190, 4300), (TWO[1], 800, 10_000)])
def test_mse_passes_over_the_values_no_more_often_than_it_says(spec, about, of_few):
    program = lambda n: str(jax.make_jaxpr(lambda x: fit_qparams(x, spec, "mse"))(np.ones(n, F)))
    passes = lambda n: sum(int(length) for length in re.findall(r"length=(\d+)", program(n)))
    assert all(passes(n) <= 1.05 * about for n in (2048, 2**20))
    assert all(passes(n) <= of_few for n in (1, 16, 32, 256))


@pytest.mark.slow
def test_mse_leaves_out_one_outlier_of_many_values():
    x, spec = np.random.default_rng(0).normal(size=8192), QuantSpec(bits=3, symmetric=False)
    x[0] = 20
    error = squared_error(x.astype(F), *(np.asarray(v, float) for v in fit_qparams(x.astype(F), spec, "mse")), spec)
    assert error.min() <= 1.01 * dense_search(x, spec)


@cases(("bits", "spec"), itertools.product([2, 3, 4, 8], THREE))
def test_mse_is_within_1_percent_of_a_dense_search(spec, bits):
    columns = distributions(256)
    if not spec.signed:
        columns = {k: columns[k] for k in ("relu", "exponential", "log-normal", "far from 0", "mostly 0", "uniform")}
    check_search(columns, spec, bits, widest=8)


@cases(
    ("bits", "size", "spec"),
    itertools.product([2, 3, 4, 8], [16, 32], THREE),
    [(8, 16, THREE[0])],
)
def test_mse_of_tiny_groups_is_within_1_percent_of_a_dense_search(spec, bits, size):
    columns = tiny_groups(size)
    check_search(columns if spec.signed else {k: abs(v) for k, v in columns.items()}, spec, bits, widest=bits)


@pytest.mark.parametrize("spec", TWO, ids=repr)
def test_mse_takes_what_is_not_finite_for_zeros(spec):
    """A zero lies on every grid, and so costs nothing either."""
    x = np.stack(list(distributions(rows(spec)).values()), -1)
    x[:4, 3], x[1::7, 0], x[:, 1] = (np.inf, -np.inf, np.nan, np.inf), np.nan, np.nan
    x[4:, 7:] = np.nan
    same(of_columns(x, spec, "mse", 3), of_columns(np.where(np.isfinite(x), x, 0), spec, "mse", 3))


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


@cases(
    ("spec", "method"),
    itertools.product(TWO, ALL_METHODS),
    [(TWO[0], "lsq"), (TWO[1], "minmax"), (TWO[1], "percentile")],
)
def test_scales_follow_powers_of_two(spec, method):
    x = np.stack(list(distributions(rows(spec)).values()), -1).astype(F)
    scale, zero_point = of_columns(x, spec, method, 4)
    for power in (-60, 60):
        same(of_columns(x * F(2.0**power), spec, method, 4), (scale * F(2.0**power), zero_point), str(power))


@cases(("bits", "spec"), [(3, THREE[0]), (8, THREE[1]), (4, THREE[2])], [(4, THREE[2])])
def test_lsq_is_its_formula(spec, bits):
    x = np.stack(list(distributions(rows(spec)).values()), -1).astype(F)
    x[::7], x[2:, 0] = np.nan, np.nan
    scale, zero_point = of_columns(x, spec, "lsq", bits)
    zero, narrower = zero_point.astype(np.float64), with_(spec, bits=bits)
    steps = narrower.qmax if spec.symmetric else np.maximum(narrower.qmax - zero, zero - narrower.qmin)
    want = 2 * np.nanmean(np.abs(x.astype(np.float64)), 0, keepdims=True) / np.sqrt(steps)
    np.testing.assert_allclose(scale, want, 1e-6)
    assert scale.dtype == F
    same((zero_point,), (of_columns(x, spec, "minmax", bits).zero_point,))


@pytest.mark.slow
def test_absmean_is_the_mean_magnitude():
    x = np.stack(list(distributions(16).values()), -1).astype(F)
    scale, zero_point = of_columns(x, THREE[0], "absmean", 2)
    np.testing.assert_allclose(scale, np.abs(x.astype(np.float64)).mean(0, keepdims=True), 1e-6)
    assert (zero_point == 0).all()


def test_absmean_has_no_affine_grid():
    with pytest.raises(ValueError, match="`method='absmean'` is for symmetric grids"):
        fit_qparams(np.ones(3, F), THREE[2], "absmean")


def test_lsq_of_2_bits_reaches_both_ends_of_the_scales():
    x = np.zeros((16, 2), F)
    x[0, 0], x[:, 1] = 8 * TINY, 2 * LARGEST
    least, largest = of_columns(x, THREE[0], "lsq", 2).scale[0]
    assert least == TINY  # 2 * 8 * TINY / 16
    assert largest == LARGEST


def some_ranges():
    rng = np.random.default_rng(2)
    pairs = [F(hard_ranges(rng, 16, 255)) for _ in range(3)]
    return [Range(*pair) for pair in pairs]


def test_merged_ranges():
    a, b, _ = some_ranges()
    tree = lambda r: {"x": r, "y": {"z": Range(r.x_min[0], r.x_max[0])}}
    want = Range(np.minimum(a.x_min, b.x_min), np.maximum(a.x_max, b.x_max))
    jax.tree.map(assert_same_bits, jax.jit(merge)(tree(a), tree(b)), tree(want))
    same(functools.reduce(merge, (NEUTRAL, Range(-1, 2), Range(np.float16(-3), 1.0))), Range(F(-3), F(2)))
    assert list(merge({"b": a, "a": a}, {"a": b, "b": b})) == ["b", "a"]
    assert merge(Range(-1, 2)).x_max.dtype == F  # one, too


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
        jax.tree.map(assert_same_bits, ema_ranges({"k": a}, {"k": b}, decay), {"k": Range(*want)})
        same(f(nothing, b, decay), b, "first batch")
        same(f(a, nothing, decay), a, "empty batch")
    same(ema_ranges(nothing, nothing, 0.5), nothing)
    batches = Range(*(np.stack(v) for v in zip(a, b, c, strict=True)))
    step = lambda mean, batch: (ema_ranges(mean, batch, 0.9), None)
    same(jax.lax.scan(step, nothing, batches)[0], ema_ranges(ema_ranges(a, b, 0.9), c, 0.9), "scan")


@functools.cache
def seen(granularity):
    """The range and the histogram of the data, by one program."""
    spec = QuantSpec(granularity=granularity)
    return jax.device_get(jax.jit(lambda x: (observe(x, spec), histogram(x, spec).counts))(data()))


some_granularities = cases("granularity", GRANULARITIES, list(GRANULARITIES)[::2])


@by_default("PerBlock(axis=1, size=8)")
@some_granularities
def test_calibrated_ranges_are_those_of_numpy(granularity):
    shape = GRANULARITIES[granularity]
    keep = lambda v: v[np.isfinite(v)]
    ends = F([[keep(v).min(initial=np.inf), keep(v).max(initial=-np.inf)] for v in groups(data(), shape)])
    for got, want in zip(seen(granularity)[0], ends.T, strict=True):
        assert_same_bits(oracle.flush(got) + F(0), oracle.flush(want.reshape(shape)) + F(0))


def test_no_data_have_the_neutral_range():
    same(observe(np.ones(0, F), QuantSpec()), NEUTRAL)


@pytest.mark.parametrize("end", F([np.inf, -np.inf]))
def test_infinities_alone_are_left_out(end):
    x = F([1, end, -3, end])
    for f in (observe, fit_qparams):
        same(f(x, SPECS["affine"]), f(x[::2], SPECS["affine"]))


def test_ends_of_float64_beyond_float32_are_its_largest():
    with x64():
        for x, want in ([1e300, -np.inf, -1e39], [-2 * LARGEST, 2 * LARGEST]), ([np.nan, np.inf, np.nan], NEUTRAL):
            same(observe(np.float64(x), QuantSpec()), F(want))


# Histograms.
def counts_of(v):
    """By NumPy, of one group."""
    v = v[np.isfinite(v)]
    order = np.where(np.signbit(v), 8191 - (np.abs(v).view(np.int32) >> 18), 8192 + (np.abs(v).view(np.int32) >> 18))
    return np.bincount(order, minlength=16384).astype(np.uint32)


def test_histograms_merge_exactly_in_any_order():
    spec, x = QuantSpec(granularity=PerChannel(-1)), data()
    want = histogram(x, spec).counts
    assert_same_bits(histogram(x[::-1, ::-1], spec).counts, want, "order")
    empty = Histogram(np.zeros_like(want))
    merged = jax.jit(lambda x: jax.lax.scan(lambda h, x: (merge(h, histogram(x[None], spec)), None), empty, x)[0])
    assert_same_bits(merged(x).counts, want, "scan")
    assert_same_bits(merged(x[::-1]).counts, want, "scan in another order")
    shard = lambda x: jax.lax.psum(histogram(x, spec).counts, "data")
    summed = jax.jit(jax.shard_map(shard, mesh=mesh("Auto"), in_specs=P("data"), out_specs=P()))(x)
    assert_same_bits(summed, want, "shard_map")


@some_granularities
def test_a_histogram_counts_signs_exponents_and_five_bits(granularity):
    counts = seen(granularity)[1]
    assert counts.shape == (*GRANULARITIES[granularity], 16384)
    for got, v in zip(counts.reshape(-1, 16384), groups(data(), GRANULARITIES[granularity]), strict=True):
        assert_same_bits(got, counts_of(v))


@pytest.mark.filterwarnings("ignore:`percentile` 50 cuts 'h'")
@cases("percentile", [50, 99.9, 100])
def test_a_range_of_a_histogram_holds_the_percentile_and_little_more(percentile):
    columns = distributions(1000)
    columns |= {"zeros": np.zeros(1000), "one": np.full(1000, 7.0), "tiny": np.linspace(-1, 1, 1000) * 1e-30}
    x = np.stack(list(columns.values()), -1).astype(F)
    h = Histogram(np.stack([counts_of(v) for v in x.T])[None])
    got = jax.device_get(range_from_histogram(h, percentile))
    outside = (100 - percentile) / 2
    low = np.percentile(x, outside, 0, method="lower", keepdims=True).astype(np.float64)
    high = np.percentile(x, 100 - outside, 0, method="higher", keepdims=True).astype(np.float64)
    assert ((got.x_min <= low) & (got.x_max >= high)).all()
    inside = ((x >= got.x_min) & (x <= got.x_max)).mean(0)
    assert (inside >= percentile / 100 - 1e-9).all()
    beyond = np.abs([got.x_min - low, got.x_max - high])
    assert (beyond <= 0.032 * np.abs([low, high]) + 4e-40).all()


@pytest.mark.slow
@pytest.mark.parametrize(("left_out", "percentile"), [(500, [90.0]), (5, [])])
def test_a_histogram_leaves_out_half_on_each_side_a_thousandth_by_default(left_out, percentile):
    h = Histogram(counts_of(np.repeat(F([-8, -4, 2, 4, 8]), [left_out, 1, 9999 - 2 * left_out, 1, left_out])))
    x_min, x_max = range_from_histogram(h, *percentile)
    assert -4.125 < x_min <= -4
    assert 4 <= x_max < 4.125


def test_a_percentile_that_cuts_off_massive_values_warns():
    """Of both signs, with the entry and its largest value; not of one that is under ten times the range."""
    rows = [np.append(np.linspace(-1, 1, 10_000), v) for v in (9.0, -3120.0, 40.0)]
    h = {"down:input": Histogram(np.stack([counts_of(F(v)) for v in rows]))}
    with pytest.warns(
        UserWarning, match="`percentile` 99.9 cuts 'down:input', which reaches 3072, off at 1. A"
    ) as found:
        range_from_histogram(h)
    assert (len(found), found[0].filename) == (1, __file__)
    range_from_histogram(Histogram(h["down:input"].counts[[0, 0, 0]]))


def test_a_range_of_an_empty_histogram_is_neutral():
    spec = QuantSpec(granularity=PerChannel(-1))
    for shape in (0, 3), (1, 3), (4, 3), (4, 0):
        assert_same_bits(histogram(np.full(shape, np.nan, F), spec).counts, np.zeros((1, shape[1], 16384), np.uint32))
    empty = Histogram(np.zeros((1, 17, 16384), np.uint32))
    same(range_from_histogram(empty), Range(*(np.full((1, 17), v) for v in NEUTRAL)))
    assert range_from_histogram(Histogram(empty.counts[:, :0])).x_min.shape == (1, 0)


def test_values_that_are_not_finite_raise_with_their_number():
    x = F([1.0, np.nan, np.inf, -np.inf, np.nan, np.inf])
    for f in (observe, histogram, fit_qparams):
        with pytest.raises(ValueError, match=r"`x` must be finite, got 2 NaN and 3 infinite of 6 values"):
            f(x, QuantSpec(), nonfinite="raise")
        with pytest.raises(TypeError, match="needs the values of `x`, got a traced array"):
            jax.eval_shape(lambda x, f=f: f(x, QuantSpec(), nonfinite="raise"), x)
        jax.tree.map(assert_same_bits, f(x[:1], QuantSpec(), nonfinite="raise"), f(x[:1], QuantSpec()))


def test_ranges_have_no_gradient_and_no_nan_in_it():
    for f in (lambda x: sum(observe(x, activation_spec())), lambda x: fit_qparams(x, QuantSpec()).scale):
        assert jax.jit(jax.grad(f))(F([1.0, -2.0, np.nan])).tolist() == [0, 0, 0]


@pytest.mark.slow
def test_all_percent_of_a_histogram_are_all_of_more_values_than_float32_counts():
    counts = counts_of(F([1.0, 100.0]))
    counts[np.argmax(counts)] = 2**24 + 1
    assert np.asarray(range_from_histogram(Histogram(counts), 100.0).x_max) >= 100


def test_an_empty_range_has_a_finite_gradient():
    ends = Range(F([0, np.inf, -1e-40]), F([0, -np.inf, 1e-40]))
    scale = lambda r: sum(qparams_from_range(r, spec).scale.sum() for spec in THREE)
    for gradient in jax.jit(jax.grad(scale))(ends):
        assert np.isfinite(gradient).all()


def test_a_histogram_keeps_its_shares_however_often_it_is_doubled():
    """Beyond 2 ** 32 values in all, and beyond 2 ** 31 in one bin, where counts are halved."""
    x = np.abs(np.random.default_rng(0).normal(size=2**12)).astype(F)
    x[: 2**11] = 0
    one = histogram(x, activation_spec(8))
    want = {percentile: range_from_histogram(one, percentile) for percentile in (90, 99.9, 100)}
    double = jax.jit(lambda h: merge(h, h))
    total = one
    for n in range(13, 45):
        total = double(total)
        for percentile in want if n in (31, 32, 33, 44) else ():
            assert range_from_histogram(total, percentile) == want[percentile], (n, percentile)
    half = functools.reduce(lambda h, _: double(h), range(17), one)
    in_any_order = merge(half, one, half, one), merge(one, merge(one, half), half)
    np.testing.assert_array_equal(*(h.counts for h in in_any_order))
    for wrong in ((), ([one, one],)):
        with pytest.raises(TypeError, match=r"merge takes Ranges.*\(\*values\)"):
            merge(*wrong)


@pytest.mark.slow
def test_a_tally_counts_on():
    t = tally(jnp.linspace(-1.0, 1.0, 64), activation_spec(8))
    many = functools.reduce(lambda t, _: t.merged(t), range(32), t)
    assert int(many.clipped) / int(many.size) == int(t.clipped) / int(t.size)
    assert ((many.levels > 0) == (t.levels > 0)).all()
    np.testing.assert_allclose(many.noise / many.signal, t.noise / t.signal, rtol=1e-5)


# In one pass, as on a CPU

SHAPES = {  # of values and groups, and the contracted axes
    "columns of an odd number of rows": ((1003, 40), (1, 40), (0,)),
    "rows": ((40, 103), (40, 1), (1,)),
    "a tensor": ((7, 10, 17), (), (2,)),
    "blocks of 48 rows": ((96, 384), (2, 384), (0,)),
    "blocks of 8 columns": ((5, 24), (5, 3), (1,)),
    "the middle of three axes": ((3, 350, 40), (3, 1, 40), (1,)),
    "what is contracted is another axis": ((6, 10), (1, 10), (1,)),
    "one value each": ((4, 5), (4, 5), (0,)),
    "nothing": ((0, 3), (1, 3), (0,)),
}
WAYS = (False, 0, True), (False, np.inf, False), (True, 0, False), (True, 0, True)  # magnitudes, of nothing, with flags


def by_numpy(x, groups, of_magnitude, nothing, contracted):
    parts = [n for g, size in zip((1,) * (x.ndim - len(groups)) + groups, x.shape, strict=True) for n in (g, size // g)]
    x = np.abs(x) if of_magnitude else x
    end = lambda reduce, of: reduce(np.where(np.isfinite(x), x, of).reshape(parts), tuple(range(1, 2 * x.ndim, 2)))
    low, high = (end(f, F(of)) for f, of in ((functools.partial(np.min, initial=nothing), nothing),
                                            (functools.partial(np.max, initial=-nothing), -nothing)))  # fmt: skip
    found = None if contracted is None else ~np.isfinite(x).all(contracted, keepdims=True)
    flags = None if found is None else np.where(found, F(np.nan), F(0))
    return None if of_magnitude else low.reshape(groups), high.reshape(groups), flags


def test_one_pass_has_the_ends_and_flags_of_numpy():
    rng, arrays, specials = np.random.default_rng(0), {}, SPECIALS[np.abs(SPECIALS) != F(1e-40)]
    for name, (shape, *_) in SHAPES.items():
        x = (rng.normal(size=shape) + 3).astype(F)  # above 0, where an end of 0 would be wrong
        x = np.where(rng.random(shape) < 0.01, rng.choice(specials, shape), x)
        arrays[name] = np.where(np.arange(shape[-1]) == 1, F(np.nan), x)

    def every(form, arrays):
        of = lambda name, groups, axes, ways: [
            form(arrays[name], groups, *way, axes if f else None) for *way, f in ways
        ]
        return {name: of(name, *rest, WAYS[i % 2 :: 2]) for i, (name, (_, *rest)) in enumerate(SHAPES.items())}

    got = jax.jit(functools.partial(every, _in_one_pass))(arrays)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(every(by_numpy, arrays)), strict=True):
        assert_same_bits(np.asarray(one) + 0, other.astype(F) + 0)  # a zero may have either sign
