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
bits = st.sampled_from([2, 8, 16])
few = settings(max_examples=25)  # options are compiled; sweeps of all bits are slow tests


def ordered(a, b):
    assume(a != b)
    return np.float32(min(a, b)), np.float32(max(a, b))


def same_as_oracle(x, low, high, num_bits, narrow):
    options = {"num_bits": num_bits, "narrow_range": narrow}
    args = tf.fake_quant_with_min_max_args(x, float(low), float(high), **options)
    assert_same_bits(args, oracle.fake_quant(x, low, high, **options), "args")
    y, vjp = jax.vjp(lambda *a: tf.fake_quant_with_min_max_vars(*a, **options), *map(jnp.asarray, (x, low, high)))
    assert_same_bits(y, oracle.fake_quant(x, low, high, divides=True, **options), "vars")
    masks = oracle.fake_quant_masks(x, low, high, **options)
    g = np.arange(-N // 2, N // 2).astype(np.float32)
    dx, dmin, dmax = vjp(jnp.asarray(g))
    assert_same_bits(dx, g * masks[0], "d_inputs")
    assert (dmin, dmax) == tuple((g * m).sum() for m in masks[1:])


@few
@given(x=arrays, a=finite, b=finite, num_bits=bits, narrow=st.booleans())
def test_fake_quant_is_the_oracle_on_any_bits(x, a, b, num_bits, narrow):
    low, high = ordered(a, b)
    assume(oracle.flush(low) < oracle.flush(high))
    same_as_oracle(x, low, high, num_bits, narrow)


@few
@given(x=arrays, a=finite, b=finite, num_bits=bits, options=st.tuples(*[st.booleans()] * 4))
def test_quantize_and_dequantize_is_the_oracle_on_any_bits(x, a, b, num_bits, options):
    low, high = ordered(a, b)
    signed, given_, half_even, narrow = options
    if not given_:  # a largest value among zeros of both signs has no defined sign in TensorFlow
        x = np.where(np.abs(x) >= np.finfo(np.float32).tiny, x, np.float32(0))
        assume(not np.isnan(x).all())
    want = oracle.quantize_and_dequantize(x, low, high, signed, num_bits, given_, half_even, narrow)
    mode = "HALF_TO_EVEN" if half_even else "HALF_UP"
    got = tf.quantize_and_dequantize_v2(x, low, high, signed, num_bits, given_, mode, narrow_range=narrow)
    assert_same_bits(got, want)


@cases(
    ("num_bits", "narrow"),
    itertools.product(range(2, 17), [False, True]),
    [(2, True), (5, False), (8, False), (8, True), (16, True)],
)
def test_fake_quant_is_the_oracle_on_ties(num_bits, narrow, compared):
    rng = np.random.default_rng([num_bits, narrow])
    steps, channels = 2**num_bits - 1 - narrow, 48
    low, high = hard_ranges(rng, channels, steps)
    x = np.stack([hard_values(rng, 256, a, b, steps) for a, b in zip(low, high, strict=True)], -1)
    options = {"num_bits": num_bits, "narrow_range": narrow}
    got = tf.fake_quant_with_min_max_vars_per_channel(x, low, high, **options)
    want = np.stack([oracle.fake_quant(x[:, c], low[c], high[c], **options) for c in range(channels)], -1)
    divided = jax.vmap(lambda *a: tf.fake_quant_with_min_max_vars(*a, **options), (1, 0, 0), 1)(x, low, high)
    want_divided = [oracle.fake_quant(x[:, c], low[c], high[c], divides=True, **options) for c in range(channels)]
    differ = differing(got, want), differing(divided, np.stack(want_divided, -1))
    compared("NumPy oracle, ties", "fake_quant_with_min_max_vars_per_channel", x.size, differ[0])
    compared("NumPy oracle, ties", "fake_quant_with_min_max_vars", x.size, differ[1])
    assert differ == (0, 0)


@cases(
    ("dtype", "mode"),
    itertools.product(oracle.FLOATS, ["HALF_TO_EVEN", "HALF_UP"]),
    [("float16", "HALF_UP"), ("bfloat16", "HALF_TO_EVEN"), ("float64", "HALF_UP")],
)
def test_all_four_float_types(dtype, mode):
    rng = np.random.default_rng(0)
    with x64(dtype == "float64"):
        x = cast(hard_values(rng, 4096, -1.3, 2.1, 15), oracle.FLOATS[dtype])
        for divides, op in ((False, tf.fake_quant_with_min_max_args), (True, tf.fake_quant_with_min_max_vars)):
            got = op(x, -1.3, 2.1, num_bits=4)
            assert_same_bits(got, oracle.fake_quant(x, -1.3, 2.1, 4, divides=divides), op.__name__)
        for given_ in (False, True):
            x = x if given_ else np.where(np.abs(x) > 1e-30, x, x.dtype.type(0))
            got = tf.quantize_and_dequantize_v2(x, -1.3, 2.1, True, 4, given_, mode)
            want = oracle.quantize_and_dequantize(x, -1.3, 2.1, True, 4, given_, mode == "HALF_TO_EVEN")
            assert_same_bits(got, want, f"given={given_}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gradients_are_masked_in_float32_and_cast_once(dtype):
    rng = np.random.default_rng(1)
    x = cast(hard_values(rng, 4096, -1.3, 2.1, 15), oracle.FLOATS[dtype])
    g = rng.integers(-4, 5, x.shape).astype(x.dtype)
    _, vjp = jax.vjp(lambda *a: tf.fake_quant_with_min_max_vars(*a, num_bits=4), jnp.asarray(x), -1.3, 2.1)
    dx, dmin, dmax = vjp(jnp.asarray(g))
    inside, below, above = oracle.fake_quant_masks(x, -1.3, 2.1, 4)
    assert_same_bits(dx, (g * inside).astype(x.dtype))
    assert (dmin, dmax) == ((g * below).astype(np.float32).sum(), (g * above).astype(np.float32).sum())


@given(x=arrays, a=st.floats(-1e6, 0, width=32), b=st.floats(2.0**-10, 1e6, width=32), num_bits=bits)
def test_properties_of_the_levels(x, a, b, num_bits):
    low, high = np.float32(a), np.float32(b)
    op = lambda x: np.asarray(tf.fake_quant_with_min_max_vars(x, low, high, num_bits=num_bits))
    x = np.sort(x[~np.isnan(x)])
    x = np.resize(x, N) if x.size else np.zeros(N, np.float32)
    y = op(x)
    scale, _, nudged_low, nudged_high, _ = oracle.nudged(low, high, num_bits, False)
    assert_same_bits(op(y), y, "idempotent")
    assert (np.diff(op(np.sort(x))) >= 0).all(), "monotone"
    assert op(np.zeros(N, np.float32)).tolist() == [0.0] * N, "0 is exact"
    steps = y / scale
    assert np.abs(steps - np.rint(steps)).max() < 0.01, "on the grid"
    assert np.rint(steps).max() - np.rint(steps).min() <= 2**num_bits - 1, "at most 2 ** num_bits levels"
    inside = (x >= nudged_low) & (x <= nudged_high)
    assert (np.abs(y - x)[inside] <= scale * 0.501 + np.abs(x[inside]) * 1e-6).all(), "error of half a step"


types = st.sampled_from(["int8", "uint8", "int16", "uint16"])
modes = st.sampled_from(["MIN_COMBINED", "MIN_FIRST", "SCALED"])


@given(x=arrays, a=finite, b=finite, T=types, mode=modes, narrow=st.booleans())
def test_quantize_is_the_oracle_on_any_bits(x, a, b, T, mode, narrow):
    low, high = sorted((np.float32(a), np.float32(b)))
    got = tf.quantize(x, low, high, T, mode, narrow_range=narrow)
    codes, *reported = oracle.quantize(x, low, high, T, mode, narrow_range=narrow)
    assert_same_bits(got.output, codes.astype(T), "codes")
    for value, want in zip(got[1:], reported, strict=True):
        assert_same_bits(value, np.float32(want), "range")


@given(a=st.floats(width=32), b=st.floats(width=32), T=types, mode=modes, narrow=st.booleans(), seed=st.integers(0, 99))
def test_dequantize_is_the_oracle_on_any_range(a, b, T, mode, narrow, seed):
    info = np.iinfo(T)
    q = np.random.default_rng(seed).integers(info.min, info.max, N, T, endpoint=True)
    got = tf.dequantize(q, np.float32(a), np.float32(b), mode, narrow_range=narrow)
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
