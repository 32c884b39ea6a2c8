# SPDX-License-Identifier: Apache-2.0
"""What holds for every value, scale, zero point and width: properties of ranges, affine ops and integer contractions.

Shapes are static and the widths traced, so that one compiled program serves all examples.
"""

import functools

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from hypothesis import given
from lanes import cases

import jaxquant as jq
from jaxquant import PerBlock, PerChannel, QParams, QuantSpec, Range, activation_spec

pytestmark = pytest.mark.bits

N = 64
SPECS = [QuantSpec(bits=16), activation_spec(16), QuantSpec(bits=16, signed=False), activation_spec(16, signed=False)]
ODD = [QuantSpec(bits=16, rounding=r) for r in ("half_even", "half_away")]
CHANNELS = activation_spec(16, granularity=PerChannel(-1))
every_spec = cases("spec", SPECS, [SPECS[3]])

any_float = st.floats(width=32)
values = hnp.arrays(np.float32, N, elements=any_float)
moderate = hnp.arrays(np.float32, N, elements=st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False))
squares = hnp.arrays(np.float32, (8, 8), elements=st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False))
scales = st.floats(2.0**-30, 2.0**30, width=32)
scale_rows = hnp.arrays(np.float32, (1, 8), elements=st.floats(2.0**-10, 2.0**14, width=32))
zero_points = st.integers(-40_000, 70_000).map(np.float32)
widths = st.integers(2, 16).map(np.int32)
on_a_grid = given(x=values, scale=scales, zero_point=zero_points, bits=widths)


@functools.partial(jax.jit, static_argnums=1)
def fake(x, spec, scale, zero_point, bits):
    return jq.fake_quant(x, spec, QParams(scale, zero_point), bits=bits)


@functools.partial(jax.jit, static_argnums=1)
def gradient(x, spec, scale, zero_point, bits, g):
    return jax.vjp(lambda x: jq.fake_quant(x, spec, QParams(scale, zero_point), bits=bits), x)[1](g)[0]


quantize, fit = (
    jax.jit(jq.quantize, static_argnums=1),
    jax.jit(jq.fit_qparams, static_argnums=(1, 2)),
)
from_range = jax.jit(jq.qparams_from_range, static_argnums=1)
dot, conv = (
    jax.jit(f)
    for f in (
        lambda a, b: jq.dot_general(a, b, (((1,), (0,)), ((), ()))),
        lambda a, b: jq.conv_general_dilated(a, b, (1,), "SAME"),
    )
)


def ends(spec, bits, zero_point):
    """(qmin, qmax, zero point in use), in float64."""
    narrower = QuantSpec(bits=int(bits), signed=spec.signed, symmetric=spec.symmetric)
    zero = 0.0 if spec.symmetric else float(np.clip(zero_point, narrower.qmin, narrower.qmax))
    return narrower.qmin, narrower.qmax, zero


@pytest.mark.slow
@every_spec
@on_a_grid
def test_idempotent(spec, x, scale, zero_point, bits):
    y = fake(x, spec, scale, zero_point, bits)
    assert_same_bits(fake(y, spec, scale, zero_point, bits), y)


@every_spec
@on_a_grid
def test_monotone(spec, x, scale, zero_point, bits):
    x = np.sort(np.where(np.isnan(x), 0, x))
    assert (np.diff(np.asarray(fake(x, spec, scale, zero_point, bits))) >= 0).all()


@pytest.mark.parametrize("spec", ODD, ids=repr)
@on_a_grid
def test_odd(spec, x, scale, zero_point, bits):
    """Zeros are all positive."""
    assert_same_bits(fake(-x, spec, scale, zero_point, bits), 0 - np.asarray(fake(x, spec, scale, zero_point, bits)))


@every_spec
@on_a_grid
def test_at_most_as_many_values_as_levels(spec, x, scale, zero_point, bits):
    x = np.where(np.isnan(x), 0, np.concatenate([x[: N // 2], np.arange(N // 2, dtype=np.float32) * scale]))
    y = np.unique(fake(x, spec, scale, zero_point, np.minimum(bits, 4)))
    assert len(y) <= 2 ** min(bits, 4) - (spec.symmetric and spec.signed)


@every_spec
@on_a_grid
def test_outputs_lie_on_the_grid(spec, x, scale, zero_point, bits):
    y = np.asarray(fake(x, spec, scale, zero_point, bits))
    y = y[~np.isnan(x)]
    qmin, qmax, zero = ends(spec, bits, zero_point)
    steps = np.rint(y.astype(np.float64) / scale)
    assert_same_bits((steps * scale).astype(np.float32) + np.float32(0), y)
    assert ((qmin - zero <= steps) & (steps <= qmax - zero)).all()


@every_spec
@given(x=moderate, zero_point=zero_points, bits=widths)
def test_the_error_inside_the_range_is_half_a_step(spec, x, zero_point, bits):
    """Exactly, with a scale of 2 ** 3: neither the quotient nor the product rounds."""
    qmin, qmax, zero = ends(spec, bits, zero_point)
    y = np.asarray(fake(x, spec, 8.0, zero_point, bits), np.float64)
    inside = ((qmin - zero) * 8 <= x) & (x <= (qmax - zero) * 8)
    assert np.where(inside, np.abs(y - x), 0).max() <= 4


@every_spec
@given(x=moderate, scale=scales, zero_point=zero_points, bits=widths)
def test_the_error_with_any_scale_is_half_a_step_and_two_roundings(spec, x, scale, zero_point, bits):
    """The quotient rounds, so that a value just beyond a tie goes to the wrong side of it, and the product rounds."""
    qmin, qmax, zero = ends(spec, bits, zero_point)
    y = np.asarray(fake(x, spec, scale, zero_point, bits), np.float64)
    inside = ((qmin - zero) * scale <= x) & (x <= (qmax - zero) * scale)
    assert np.where(inside, np.abs(y - x) - scale / 2 - (np.abs(x) + np.abs(y)) * 2.0**-24, 0).max() <= 0


@every_spec
@given(scale=any_float, zero_point=zero_points, bits=widths)
def test_zero_is_exact_on_any_scale_that_is_a_number(spec, scale, zero_point, bits):
    scale = scale if np.isfinite(scale) else 1.0
    for zero in (0.0, -0.0):
        x = np.full(N, zero, np.float32)
        assert_same_bits(fake(x, spec, scale, zero_point, bits), np.zeros(N, np.float32))


@every_spec
@on_a_grid
def test_infinities_saturate_and_nan_stays_alone(spec, x, scale, zero_point, bits):
    x[:4] = np.inf, -np.inf, np.nan, 0
    y = np.asarray(fake(x, spec, scale, zero_point, bits))
    qmin, qmax, zero = ends(spec, bits, zero_point)
    assert y[:2].tolist() == [np.float32((end - zero) * scale) for end in (qmax, qmin)]
    assert (np.isnan(y) == np.isnan(x)).all()
    assert not np.isinf(y).any()


@functools.partial(jax.jit, static_argnums=1)
def there_and_back(x, spec, scale, zero_point):
    """Integers, their real values, fake_quant, and the integers of these real values."""
    q = jq.quantize(x, spec, QParams(scale, zero_point))
    again = jq.quantize(jq.dequantize(q), spec, QParams(q.scale, q.zero_point.astype(jnp.float32)))
    return q.values, jq.dequantize(q), jq.fake_quant(x, spec, QParams(scale, zero_point)), again.values


NARROWER = [QuantSpec(), activation_spec(), activation_spec(4, signed=False)]


@cases("spec", NARROWER, NARROWER[1:])
@given(x=values, scale=scales, zero_point=zero_points)
def test_dequantize_of_quantize_is_fake_quant(spec, x, scale, zero_point):
    q, back, y, _ = map(np.asarray, there_and_back(x, spec, scale, zero_point))
    number = ~np.isnan(x)
    assert_same_bits(back[number], y[number])
    assert (q[~number] == spec.qmin).all()
    assert q.dtype == spec.dtype
    assert ((q >= spec.qmin) & (q <= spec.qmax)).all()


@given(x=moderate, scale=scales, zero_point=zero_points)
def test_a_dequantized_array_quantizes_to_the_same_values(x, scale, zero_point):
    q, *_, again = there_and_back(x, activation_spec(), scale, zero_point)
    assert_same_bits(again, q)


over_channels = jax.jit(jax.vmap(lambda x, *a: fake(x, SPECS[1], *a), (1, 0, None, None), 1))


@pytest.mark.slow
@given(x=squares, scale=scale_rows, zero_point=zero_points, bits=widths, order=st.permutations(range(8)))
def test_channels_are_separate(x, scale, zero_point, bits, order):
    zero = np.full((1, 8), zero_point)
    y = np.asarray(fake(x, CHANNELS, scale, zero, bits))
    assert_same_bits(fake(x[:, order], CHANNELS, scale[:, order], zero, bits), y[:, order])
    one = [fake(x[:, c], SPECS[1], scale[0, c], zero_point, bits) for c in range(8)]
    assert_same_bits(np.stack(one, -1), y, "loop")
    assert_same_bits(over_channels(x, scale[0], zero_point, bits), y, "vmap")


@pytest.mark.slow
@given(x=squares, scale=scale_rows, zero_point=zero_points, bits=widths)
def test_blocks_are_channels_of_the_reshaped_array(x, scale, zero_point, bits):
    blocks = activation_spec(16, granularity=PerBlock(0, 1))
    scale = np.tile(scale, (8, 1)) * np.arange(1, 9, dtype=np.float32)[:, None]
    zeros = np.full((8, 8), zero_point)
    flat = activation_spec(16, granularity=PerChannel(0))
    want = np.reshape(fake(x.reshape(64, 1), flat, scale.reshape(64, 1), zeros.reshape(64, 1), bits), (8, 8))
    assert_same_bits(fake(x, blocks, scale, zeros, bits), want)
    runs = activation_spec(16, granularity=PerBlock(1, 4))
    want = fake(x.reshape(16, 4), flat, scale[:, :2].reshape(16, 1), zeros[:, :2].reshape(16, 1), bits)
    assert_same_bits(fake(x, runs, scale[:, :2], zeros[:, :2], bits), np.reshape(want, (8, 8)))


@pytest.mark.slow
@given(x=squares, scale=scale_rows, zero_point=zero_points, bits=widths)
def test_transposing_the_array_is_renaming_the_axis(x, scale, zero_point, bits):
    zero = np.full((1, 8), zero_point)
    rows = activation_spec(16, granularity=PerChannel(0))
    assert_same_bits(np.transpose(fake(x.T, rows, scale.T, zero.T, bits)), fake(x, CHANNELS, scale, zero, bits))


@every_spec
@given(x=moderate, scale=scales, zero_point=zero_points, bits=widths, power=st.integers(-20, 20))
def test_powers_of_two_commute(spec, x, scale, zero_point, bits, power):
    x, factor = np.where(np.abs(x) < 2.0**-60, 0, x), np.float32(2.0**power)
    y = fake(x * factor, spec, scale * factor, zero_point, bits)
    assert_same_bits(y, np.asarray(fake(x, spec, scale, zero_point, bits)) * factor)


@every_spec
@given(x=values, scale=scales, zero_point=zero_points, bits=widths, g=values)
def test_the_gradient_is_g_where_nothing_is_clipped_and_0_elsewhere(spec, x, scale, zero_point, bits, g):
    qmin, qmax, zero = ends(spec, bits, zero_point)
    with np.errstate(all="ignore"):
        quotient = (x / np.float32(scale)).astype(np.float32)
    level = np.rint(np.where(np.abs(quotient) < np.finfo(np.float32).tiny, 0, quotient)) + np.float32(zero)
    inside = (qmin <= level) & (level <= qmax)
    assert_same_bits(gradient(x, spec, scale, zero_point, bits, g), np.where(inside, g, np.float32(0)))


scaled = jax.jit(jq.scale_gradient)


@given(x=values, factor=any_float)
def test_scale_gradient_is_the_identity(x, factor):
    assert_same_bits(scaled(x, factor), x)


@pytest.mark.slow
@given(x=moderate, scale=scales, seed=st.integers(0, 2**31 - 1))
def test_stochastic_rounding_takes_one_of_the_two_levels_beside(x, scale, seed):
    spec = activation_spec(16, rounding="stochastic")
    q = quantize(x, spec, QParams(scale, 0.0), key=jax.random.key(seed))
    with np.errstate(over="ignore"):
        quotient = np.clip(x / np.float32(scale), spec.qmin, spec.qmax)
    assert (np.abs(np.asarray(q.values, np.float64) - quotient) < 1).all()


# Ranges.
range_ends = hnp.arrays(np.float32, (3, 2, N), elements=st.floats(width=32, allow_nan=False, allow_subnormal=False))


def ranges(pairs):
    return [Range(*(np.asarray(v) + np.float32(0) for v in pair)) for pair in pairs]


def same(a, b):
    jax.tree.map(assert_same_bits, tuple(a), tuple(b))


merge, ema = jax.jit(jq.merge), jax.jit(jq.ema_ranges)


@pytest.mark.slow
@given(pairs=range_ends)
def test_merging_ranges_is_associative_commutative_and_idempotent(pairs):
    a, b, c = ranges(pairs)
    same(merge(merge(a, b), c), merge(a, merge(b, c)))
    same(merge(a, b), merge(b, a))
    same(merge(a, a), a)
    same(merge(a, Range(*(np.full(N, v, np.float32) for v in (np.inf, -np.inf)))), a)


@given(pairs=range_ends)
def test_a_merged_range_is_the_smallest_that_contains_both(pairs):
    a, b, _ = ranges(pairs)
    low, high = map(np.asarray, merge(a, b))
    assert (low == np.minimum(a.x_min, b.x_min)).all()
    assert (high == np.maximum(a.x_max, b.x_max)).all()


@pytest.mark.slow
@given(x=moderate, y=moderate, decay=st.floats(0, 1, width=32))
def test_an_average_lies_between_both(x, y, decay):
    """But for the three roundings of the sum of two products with weights that add up to 1 but for a rounding."""
    a, b = (Range(np.minimum(v, 0), np.maximum(v, 0)) for v in (x, y))
    for old, new, got in zip(a, b, map(np.asarray, ema(a, b, decay)), strict=True):
        room = 4 * np.float32(2.0**-24) * np.maximum(np.abs(old), np.abs(new)) + np.finfo(np.float32).tiny
        assert ((np.minimum(old, new) - room <= got) & (got <= np.maximum(old, new) + room)).all()


@jax.jit
def counts_of(x, y, both):
    """Of two arrays, merged, and of one."""
    count = lambda x: jq.histogram(x, QuantSpec())
    return jq.merge(count(x), count(y)).counts, count(both).counts


@pytest.mark.slow
@given(x=values, y=values, order=st.permutations(range(N)))
def test_merged_histograms_are_that_of_all_values_in_any_order(x, y, order):
    merged, whole = map(np.asarray, counts_of(x, y, np.concatenate([y, x[order]])))
    assert_same_bits(merged, whole)
    assert merged.sum() == np.isfinite(x).sum() + np.isfinite(y).sum()


@every_spec
@given(low=values, high=values, bits=widths)
def test_the_qparams_of_any_two_floats_are_finite_and_hold_zero(spec, low, high, bits):
    scale, zero_point = map(np.asarray, from_range(jq.Range(low, high), spec, bits=bits))
    qmin, qmax, _ = ends(spec, bits, 0)
    assert np.isfinite(scale).all()
    assert (scale >= np.finfo(np.float32).tiny).all()
    assert (zero_point == np.rint(zero_point)).all()
    assert ((zero_point == 0) if spec.symmetric else (qmin <= zero_point) & (zero_point <= qmax)).all()


@cases("spec", [QuantSpec(bits=16), activation_spec(16)], [activation_spec(16)])
@given(x=moderate, bits=widths)
def test_minmax_clips_nothing_but_what_rounding_does(spec, x, bits):
    """Affine, the rounded zero point moves the range by half a step, so the end is off by up to one."""
    x = np.where(np.abs(x) < 2.0**-60, 0, x)
    scale, zero_point = fit(x, spec, "minmax", bits=bits)
    y = np.asarray(fake(x, spec, scale, zero_point, bits), np.float64)
    steps = 0.5 if spec.symmetric else 1.0
    assert (np.abs(y - x) <= steps * float(scale) * (1 + 2.0**-20) + np.abs(x) * 2.0**-22).all()


@functools.partial(jax.jit, static_argnums=1)
def ranges_of(x, spec):
    """The qparams of a percentile, of the highest one, and of the whole range."""
    percentile = functools.partial(jq.fit_qparams, x, spec, "percentile")
    return percentile(), percentile(percentile=100), jq.fit_qparams(x, spec)


@cases("spec", [QuantSpec(), activation_spec()])
@given(x=values)
def test_a_percentile_lies_inside_of_the_whole_range(spec, x):
    x[0] = 1.0
    inner, highest, whole = ranges_of(x, spec)
    assert (np.asarray(inner.scale) <= np.asarray(whole.scale)).all()
    same(highest, whole)


# Integers.
codes = hnp.arrays(np.uint8, N)


@jax.jit
def real_and_relu(x, scale, zero_point):
    """The real values of integers, and of those that are not negative."""
    q = jq.quantize(x, activation_spec(), QParams(scale, zero_point))
    relu = jq.QArray(jnp.maximum(q.values, q.zero_point), q.scale, q.zero_point, q.spec, q.dtype)
    return jq.dequantize(q), jq.dequantize(relu)


@given(x=moderate, scale=scales, zero_point=zero_points)
def test_relu_of_integers(x, scale, zero_point):
    real, relu = real_and_relu(x, scale, zero_point)
    assert_same_bits(relu, np.maximum(np.asarray(real), 0))


def arrays_of(a, b, a_scale, b_scale, zero, shape=(8, 8)):
    """An affine and a symmetric QArray of any codes."""
    b = np.maximum(b.view(np.int8), -127).reshape(shape)
    array = lambda v, s, z, spec: jq.QArray(v, np.float32(s), np.int8(z), spec, jnp.dtype("float32"))
    return array(a.view(np.int8).reshape(shape), a_scale, zero, activation_spec()), array(b, b_scale, 0, QuantSpec())


pairs = given(a=codes, b=codes, a_scale=scales, b_scale=scales, zero=st.integers(-128, 127))
centred = lambda q: np.asarray(q.values, np.int64) - int(q.zero_point)


@pytest.mark.slow
@pairs
def test_a_dot_is_the_scaled_integer_product(a, b, a_scale, b_scale, zero):
    a, b = arrays_of(a, b, a_scale, b_scale, zero)
    want = (centred(a) @ centred(b)).astype(np.float32) * (np.float32(a_scale) * np.float32(b_scale))
    assert_same_bits(dot(a, b), want)


@pairs
def test_a_dot_transposes_and_scales(a, b, a_scale, b_scale, zero):
    a, b = arrays_of(a, b, a_scale, b_scale, zero)
    y = np.asarray(dot(a, b))
    turned = jax.tree.map(np.transpose, (b, a))
    assert_same_bits(dot(*turned).T, y)
    twice, _ = arrays_of(a.values, b.values, 2 * a_scale, b_scale, zero)
    assert_same_bits(dot(twice, b), 2 * y)


@pairs
def test_a_dot_is_additive_in_the_integers(a, b, a_scale, b_scale, zero):
    """Split along the contracted axis: the rest at the zero point adds nothing."""
    a, b = arrays_of(a, b, 1.0, 1.0, zero)
    first = np.arange(8) < 3
    part = lambda keep: jq.QArray(np.where(keep, a.values, a.zero_point), a.scale, a.zero_point, a.spec, a.dtype)
    parts = (np.asarray(dot(part(keep), b)) for keep in (first, ~first))
    assert_same_bits(sum(parts), dot(a, b))


@pytest.mark.slow
@pairs
def test_a_convolution_is_the_scaled_integer_sum(a, b, a_scale, b_scale, zero):
    x, _ = arrays_of(a, b, a_scale, b_scale, zero, (2, 4, 8))
    _, w = arrays_of(a[:48], b[:48], a_scale, b_scale, zero, (4, 4, 3))
    padded = np.pad(centred(x), ((0, 0), (0, 0), (1, 1)))
    want = sum(np.einsum("nil,oi->nol", padded[..., k : k + 8], centred(w)[..., k]) for k in range(3))
    want = want.astype(np.float32) * (np.float32(a_scale) * np.float32(b_scale))
    assert_same_bits(conv(x, w), want)
