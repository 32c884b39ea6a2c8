# SPDX-License-Identifier: Apache-2.0
"""jaxquant.tf against the NumPy oracle, and properties that no oracle is needed for."""

import functools
import itertools

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from exact import assert_same_bits, differing, x64
from hypothesis import assume, given, settings
from inputs import cast, hard_ranges, hard_values
from lanes import cases

from jaxquant import tf

pytestmark = pytest.mark.bits

N = 64
finite = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
arrays = hnp.arrays(np.float32, N, elements=st.floats(width=32))
few = settings(max_examples=25)
levels = st.sampled_from([(2, True), (8, False), (16, True)])  # num_bits, narrow_range


def ordered(a, b):
    assume(a != b)
    return np.float32(min(a, b)), np.float32(max(a, b))


def compiled(op, static="num_bits narrow_range"):
    return jax.jit(op, static_argnames=static.split())


args = tf.fake_quant_with_min_max_args  # has a static range, and so runs eagerly
per_channel = compiled(tf.fake_quant_with_min_max_vars_per_channel)
quantize = compiled(tf.quantize, "T mode narrow_range")
dequantize = compiled(tf.dequantize, "mode narrow_range")
round_trip = compiled(tf.quantize_and_dequantize_v2, "signed_input num_bits range_given round_mode narrow_range")


@functools.partial(jax.jit, static_argnames=("num_bits", "narrow_range"))
def vars_and_gradients(x, low, high, g, num_bits=8, narrow_range=False):
    options = {"num_bits": num_bits, "narrow_range": narrow_range}
    y, vjp = jax.vjp(lambda *a: tf.fake_quant_with_min_max_vars(*a, **options), x, low, high)
    return y, *vjp(g)


# Options are compiled, and so few; all of them are in the slow sweeps below.
@few
@given(x=arrays, a=finite, b=finite, options=levels)
def test_fake_quant_is_the_oracle_on_any_bits(x, a, b, options):
    low, high = ordered(a, b)
    assume(oracle.flush(low) < oracle.flush(high))
    options = dict(zip(("num_bits", "narrow_range"), options, strict=True))
    y = args(jax.device_put(x), float(low), float(high), **options)
    assert_same_bits(y, oracle.fake_quant(x, low, high, **options), "args")
    masks = oracle.fake_quant_masks(x, low, high, **options)
    g = np.arange(-N // 2, N // 2).astype(np.float32)
    y, dx, dmin, dmax = map(np.asarray, vars_and_gradients(x, low, high, g, **options))
    assert_same_bits(y, oracle.fake_quant(x, low, high, divides=True, **options), "vars")
    assert_same_bits(dx, g * masks[0], "d_inputs")
    assert (dmin, dmax) == tuple((g * m).sum() for m in masks[1:])


# signed, bits, given, half to even, narrow
OPTIONS = [(True, 8, True, True, False), (True, 2, False, False, True), (False, 16, True, False, True)]
OPTIONS += [(False, 8, False, True, False)]


@few
@given(x=arrays, a=finite, b=finite, options=st.sampled_from(OPTIONS))
def test_quantize_and_dequantize_is_the_oracle_on_any_bits(x, a, b, options):
    low, high = ordered(a, b)
    signed, num_bits, given_, half_even, narrow = options
    if not given_:  # a largest value among zeros of both signs has no defined sign in TensorFlow
        x = np.where(np.abs(x) >= np.finfo(np.float32).tiny, x, np.float32(0))
        assume(not np.isnan(x).all())
    want = oracle.quantize_and_dequantize(x, low, high, signed, num_bits, given_, half_even, narrow)
    mode = "HALF_TO_EVEN" if half_even else "HALF_UP"
    options = {"signed_input": signed, "num_bits": num_bits, "range_given": given_, "round_mode": mode}
    assert_same_bits(round_trip(x, low, high, **options, narrow_range=narrow), want)


@cases(
    ("num_bits", "narrow"),
    itertools.product(range(2, 17), [False, True]),
)
def test_fake_quant_is_the_oracle_on_ties(num_bits, narrow, compared):
    rng = np.random.default_rng([num_bits, narrow])
    steps, channels = 2**num_bits - 1 - narrow, 48
    low, high = hard_ranges(rng, channels, steps)
    x = np.stack([hard_values(rng, 256, a, b, steps) for a, b in zip(low, high, strict=True)], -1)
    options = {"num_bits": num_bits, "narrow_range": narrow}
    vars_ = functools.partial(tf.fake_quant_with_min_max_vars, **options)
    both = jax.jit(lambda *a: (per_channel(*a, **options), jax.vmap(vars_, (1, 0, 0), 1)(*a)))
    got, divided = both(x, low, high)
    want = np.stack([oracle.fake_quant(x[:, c], low[c], high[c], **options) for c in range(channels)], -1)
    want_divided = [oracle.fake_quant(x[:, c], low[c], high[c], divides=True, **options) for c in range(channels)]
    differ = differing(got, want), differing(divided, np.stack(want_divided, -1))
    compared("NumPy oracle, ties", "fake_quant_with_min_max_vars_per_channel", x.size, differ[0])
    compared("NumPy oracle, ties", "fake_quant_with_min_max_vars", x.size, differ[1])
    assert differ == (0, 0)


@cases(
    ("dtype", "mode"),
    itertools.product(oracle.FLOATS, ["HALF_TO_EVEN", "HALF_UP"]),
)
def test_all_four_float_types(dtype, mode):
    rng = np.random.default_rng(0)
    with x64(dtype == "float64"):
        x = cast(hard_values(rng, 4096, -1.3, 2.1, 15), oracle.FLOATS[dtype])
        for_range = np.where(np.abs(x) > 1e-30, x, x.dtype.type(0))
        ops = tf.fake_quant_with_min_max_args, tf.fake_quant_with_min_max_vars
        back = functools.partial(tf.quantize_and_dequantize_v2, num_bits=4, round_mode=mode)

        @jax.jit
        def all_of(x, for_range):
            given_, from_data = back(x, -1.3, 2.1, range_given=True), back(for_range, -1.3, 2.1)
            return [op(x, -1.3, 2.1, num_bits=4) for op in ops], (from_data, given_)

        fake_quants, round_trips = all_of(x, for_range)
        for got, op, divides in zip(fake_quants, ops, (False, True), strict=True):
            assert_same_bits(got, oracle.fake_quant(x, -1.3, 2.1, 4, divides=divides), op.__name__)
        for got, given_ in zip(round_trips, (False, True), strict=True):
            values = x if given_ else for_range
            want = oracle.quantize_and_dequantize(values, -1.3, 2.1, True, 4, given_, mode == "HALF_TO_EVEN")
            assert_same_bits(got, want, f"given={given_}")


@cases("dtype", ["float16", "bfloat16"], ["bfloat16"])
def test_half_precision_gradients_are_masked_in_float32_and_cast_once(dtype):
    rng = np.random.default_rng(1)
    x = cast(hard_values(rng, 4096, -1.3, 2.1, 15), oracle.FLOATS[dtype])
    g = rng.integers(-4, 5, x.shape).astype(x.dtype)
    _, dx, dmin, dmax = map(np.asarray, vars_and_gradients(x, -1.3, 2.1, g, num_bits=4))
    inside, below, above = oracle.fake_quant_masks(x, -1.3, 2.1, 4)
    assert_same_bits(dx, (g * inside).astype(x.dtype))
    assert (dmin, dmax) == ((g * below).astype(np.float32).sum(), (g * above).astype(np.float32).sum())


@given(x=arrays, a=st.floats(-1e6, 0, width=32), b=st.floats(2.0**-10, 1e6, width=32), options=levels)
def test_properties_of_the_levels(x, a, b, options):
    low, high, (num_bits, narrow) = np.float32(a), np.float32(b), options
    op = lambda x: np.asarray(vars_and_gradients(x, low, high, x, num_bits=num_bits, narrow_range=narrow)[0])
    x = np.sort(x[~np.isnan(x)])
    x = np.resize(x, N) if x.size else np.zeros(N, np.float32)
    y = op(x)
    scale, _, nudged_low, nudged_high, _ = oracle.nudged(low, high, num_bits, narrow)
    assert_same_bits(op(y), y, "idempotent")
    assert (np.diff(op(np.sort(x))) >= 0).all(), "monotone"
    assert op(np.zeros(N, np.float32)).tolist() == [0.0] * N, "0 is exact"
    steps = y / scale
    assert np.abs(steps - np.rint(steps)).max() < 0.01, "on the grid"
    assert np.rint(steps).max() - np.rint(steps).min() <= 2**num_bits - 1 - narrow, "at most 2 ** num_bits levels"
    inside = (x >= nudged_low) & (x <= nudged_high)
    assert (np.abs(y - x)[inside] <= scale * 0.501 + np.abs(x[inside]) * 1e-6).all(), "error of half a step"


# type, mode, narrow_range
CODES = [("int8", "MIN_COMBINED", False), ("uint16", "MIN_COMBINED", False), ("uint8", "MIN_FIRST", False)]
CODES += [("int16", "SCALED", True), ("uint8", "SCALED", False)]
codes = st.sampled_from(CODES)


@given(x=arrays, a=finite, b=finite, options=codes)
def test_quantize_is_the_oracle_on_any_bits(x, a, b, options):
    low, high = sorted((np.float32(a), np.float32(b)))
    T, mode, narrow = options
    got = quantize(x, low, high, T=T, mode=mode, narrow_range=narrow)
    want, *reported = oracle.quantize(x, low, high, T, mode, narrow_range=narrow)
    assert_same_bits(got.output, want.astype(T), "codes")
    for value, want in zip(got[1:], reported, strict=True):
        assert_same_bits(value, np.float32(want), "range")


@given(a=st.floats(width=32), b=st.floats(width=32), options=codes, seed=st.integers(0, 99))
def test_dequantize_is_the_oracle_on_any_range(a, b, options, seed):
    T, mode, narrow = options
    info = np.iinfo(T)
    q = np.random.default_rng(seed).integers(info.min, info.max, N, T, endpoint=True)
    got = dequantize(q, np.float32(a), np.float32(b), mode=mode, narrow_range=narrow)
    assert_same_bits(got, oracle.dequantize(q, a, b, mode, narrow))


def every_pattern(dtype):
    return np.arange(2**16, dtype=np.uint16).view(oracle.FLOATS[dtype])


FOUR_RANGES = [(-1.3, 2.1), (-1.0, 1.0), (0.0, 6.0), (-40.0, 700.0)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("narrow", [False, True])
def test_every_half_precision_pattern_fake_quant(dtype, narrow, compared):
    x = every_pattern(dtype)
    total = differ = 0
    for num_bits in range(2, 17):
        options = {"num_bits": num_bits, "narrow_range": narrow}
        for low, high in FOUR_RANGES:
            g = jnp.ones_like(jnp.asarray(x))
            ends = {"min": low, "max": high, **options}
            args, args_vjp = jax.vjp(functools.partial(tf.fake_quant_with_min_max_args, **ends), x)
            divided, vjp = jax.vjp(functools.partial(tf.fake_quant_with_min_max_vars, **ends), x)
            mask = oracle.fake_quant_masks(x, low, high, **options)[0].astype(x.dtype)
            pairs = [
                (args, oracle.fake_quant(x, low, high, **options)),
                (divided, oracle.fake_quant(x, low, high, divides=True, **options)),
                (args_vjp(g)[0], mask),
                (vjp(g)[0], mask),
            ]
            total += sum(want.size for _, want in pairs)
            differ += sum(differing(got, want) for got, want in pairs)
        low, high = (np.float32(v) for v in np.transpose(FOUR_RANGES))
        channels = tf.fake_quant_with_min_max_vars_per_channel(x[:, None].repeat(4, 1), low, high, **options)
        want = np.stack([oracle.fake_quant(x, a, b, **options) for a, b in FOUR_RANGES], -1)
        total, differ = total + want.size, differ + differing(channels, want)
    compared("NumPy oracle, exhaustive", f"fake_quant_with_min_max_*, {dtype}", total, differ)
    assert differ == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("narrow", [False, True])
def test_every_half_precision_pattern_quantize_and_dequantize(dtype, narrow, compared):
    x = every_pattern(dtype)
    total = differ = 0
    for num_bits in range(2, 17):
        for signed, mode in ((True, "HALF_TO_EVEN"), (True, "HALF_UP"), (False, "HALF_UP")):
            for low, high in FOUR_RANGES:
                got = tf.quantize_and_dequantize_v2(x, low, high, signed, num_bits, True, mode, narrow_range=narrow)
                even = mode == "HALF_TO_EVEN"
                want = oracle.quantize_and_dequantize(x, low, high, signed, num_bits, True, even, narrow)
                total, differ = total + want.size, differ + differing(got, want)
    compared("NumPy oracle, exhaustive", f"quantize_and_dequantize_v2, {dtype}", total, differ)
    assert differ == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_precision_pattern_quantize(dtype, compared):
    x = every_pattern(dtype)
    total = differ = 0
    for T in ("int8", "uint8", "int16", "uint16"):
        q = np.arange(np.iinfo(T).min, np.iinfo(T).max + 1).astype(T)
        for mode in ("MIN_COMBINED", "MIN_FIRST", "SCALED"):
            for narrow in (False, True) if mode == "SCALED" else (False,):
                for low, high in FOUR_RANGES:
                    got = tf.quantize(x, low, high, T, mode, narrow_range=narrow)
                    codes, *_ = oracle.quantize(x, low, high, T, mode, narrow_range=narrow)
                    back = tf.dequantize(q, low, high, mode, narrow_range=narrow)
                    want = oracle.dequantize(q, low, high, mode, narrow)
                    total += x.size + q.size
                    differ += differing(got.output, codes.astype(T)) + differing(back, want)
    compared("NumPy oracle, exhaustive", f"quantize, dequantize, {dtype}", total, differ)
    assert differ == 0
