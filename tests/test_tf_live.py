# SPDX-License-Identifier: Apache-2.0
"""The live judge: fresh random cases against the TensorFlow that is installed, a million values for each op and more.

Needs the `conformance` extra. Every run draws another seed, which is printed with the counts; JAXQUANT_SEED repeats
a run.
"""

import os
import secrets
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import differing
from inputs import hard_ranges, hard_values

from jaxquant import tf

pytestmark = [pytest.mark.slow, pytest.mark.bits]
SEED = int(os.environ.get("JAXQUANT_SEED", secrets.randbits(32)))
LEAST = 1_000_000
BITS = [(num_bits, narrow) for num_bits in range(2, 17) for narrow in (False, True)]
SIZE, RANGES = 2048, 18  # 30 widths x 18 ranges x 2048 values


@pytest.fixture(scope="module")
def judge():
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # before the import: oneDNN's kernels have other semantics
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensorflow = pytest.importorskip("tensorflow", reason="needs the `conformance` extra")
    assert tensorflow.__version__.startswith("2.21.")
    tensorflow.get_logger().setLevel("ERROR")
    return tensorflow


def any_ranges(rng, steps):
    """Hard ranges, and two of random bits: reversed, infinite and NaN ones among them."""
    low, high = hard_ranges(rng, RANGES, steps)
    low[-2:], high[-2:] = rng.integers(0, 2**32, (2, 2), np.uint32).view(np.float32)
    return low, high


def increasing(low, high):
    with np.errstate(all="ignore"):
        keep = np.isfinite(high - low) & (high - low > 1e-30)
    return np.where(keep, low, -1).astype(np.float32), np.where(keep, high, 2).astype(np.float32)


def values(rng, low, high, steps):
    with np.errstate(all="ignore"):
        sane = np.isfinite(low) & np.isfinite(high)
        ends = zip(np.where(sane, low, -1), np.where(sane, high, 1), strict=True)
        return np.stack([hard_values(rng, SIZE, a, b, steps) for a, b in ends])


def cotangents(rng):
    return rng.integers(-8, 9, (RANGES, SIZE)).astype(np.float32)


class Tally:
    """Adds up what was compared for one op, and shows where it first differed."""

    def __init__(self, compared, op):
        self.compared, self.op, self.values, self.differ, self.first = compared, op, 0, 0, None

    def add(self, got, want, case, defined=None):
        got, want = np.asarray(got), np.asarray(want)
        if defined is not None:
            got, want = got[defined], want[defined]
        differ = differing(got, want)
        self.values, self.differ = self.values + want.size, self.differ + differ
        if differ and self.first is None:
            self.first = case

    def close(self):
        self.compared(f"TensorFlow, seed {SEED}", self.op, self.values, self.differ)
        assert self.values >= LEAST
        assert self.differ == 0, f"seed {SEED}: {self.differ} of {self.values} differ, the first in {self.first}"


def test_fake_quant_with_min_max_args(judge, compared):
    rng = np.random.default_rng([SEED, 0])
    forward = Tally(compared, "fake_quant_with_min_max_args")
    backward = Tally(compared, "fake_quant_with_min_max_args_gradient")
    for num_bits, narrow in BITS:
        steps = 2**num_bits - 1 - narrow
        low, high = increasing(*any_ranges(rng, steps))
        for x, g, a, b in zip(values(rng, low, high, steps), cotangents(rng), low, high, strict=True):
            case = float(a), float(b), num_bits, narrow
            forward.add(
                tf.fake_quant_with_min_max_args(x, *case),
                judge.quantization.fake_quant_with_min_max_args(x, *case),
                case,
            )
            want = judge.quantization.fake_quant_with_min_max_args_gradient(g, x, *case)
            backward.add(tf.fake_quant_with_min_max_args_gradient(g, x, *case), want, case)
    forward.close()
    backward.close()


def test_fake_quant_with_min_max_vars(judge, compared):
    rng = np.random.default_rng([SEED, 1])
    forward = Tally(compared, "fake_quant_with_min_max_vars")
    backward = Tally(compared, "fake_quant_with_min_max_vars_gradient")
    for num_bits, narrow in BITS:
        steps = 2**num_bits - 1 - narrow
        low, high = any_ranges(rng, steps)
        for x, g, a, b in zip(values(rng, low, high, steps), cotangents(rng), low, high, strict=True):
            case = a, b, num_bits, narrow
            forward.add(
                tf.fake_quant_with_min_max_vars(x, *case),
                judge.quantization.fake_quant_with_min_max_vars(x, *case),
                case,
            )
            want = judge.quantization.fake_quant_with_min_max_vars_gradient(g, x, *case)
            for got, value in zip(tf.fake_quant_with_min_max_vars_gradient(g, x, *case), want, strict=True):
                backward.add(got, value, case)
    forward.close()
    backward.close()


def test_fake_quant_with_min_max_vars_per_channel(judge, compared):
    rng = np.random.default_rng([SEED, 2])
    name = "fake_quant_with_min_max_vars_per_channel"
    forward, backward = Tally(compared, name), Tally(compared, f"{name}_gradient")
    for num_bits, narrow in BITS:
        steps = 2**num_bits - 1 - narrow
        low, high = any_ranges(rng, steps)
        x, g = values(rng, low, high, steps).T.copy(), cotangents(rng).T.copy()
        case = low, high, num_bits, narrow
        forward.add(getattr(tf, name)(x, *case), getattr(judge.quantization, name)(x, *case), case)
        want = getattr(judge.quantization, f"{name}_gradient")(g, x, *case)
        for got, value in zip(getattr(tf, f"{name}_gradient")(g, x, *case), want, strict=True):
            backward.add(got, value, case)
    forward.close()
    backward.close()


ROUND_TRIPS = [
    (signed, num_bits, mode, narrow)
    for signed in (True, False)
    for num_bits in (2, 3, 4, 8, 12, 16, 24)
    for mode in ("HALF_TO_EVEN", "HALF_UP")
    for narrow in (True, False)
    if signed or not narrow
]


def test_quantize_and_dequantize(judge, compared):
    """V2 and V4, with the range given and from the data; and grad_pass_through around V4."""
    rng = np.random.default_rng([SEED, 3])
    v1, v2 = Tally(compared, "quantize_and_dequantize"), Tally(compared, "quantize_and_dequantize_v2")
    through = Tally(compared, "grad_pass_through")
    for signed, num_bits, mode, narrow in ROUND_TRIPS:
        low, high = increasing(*hard_ranges(rng, RANGES, 2**num_bits - 1))
        for x, g, a, b in zip(values(rng, low, high, 2**num_bits - 1), cotangents(rng), low, high, strict=True):
            for given in (True, False):
                # Zeros of both signs and NaN make TensorFlow's own range depend on its vector lanes.
                x = x if given else np.where(np.abs(x) > 1e-30, x, np.float32(0))
                case = {"input_min": a, "input_max": b, "signed_input": signed, "num_bits": num_bits}
                case |= {"range_given": given, "round_mode": mode, "narrow_range": narrow}
                y, vjp = jax.vjp(lambda x, case=case: tf.quantize_and_dequantize_v2(x, **case), jnp.asarray(x))
                want = judge.quantization.quantize_and_dequantize_v2(judge.constant(x), **case)
                v2.add(y, want, case)
                grad = judge.raw_ops.QuantizeAndDequantizeV4Grad(gradients=g, input=x, input_min=a, input_max=b)
                v2.add(vjp(jnp.asarray(g))[0], grad[0], case)
                y, vjp = jax.vjp(lambda x, case=case: tf.quantize_and_dequantize(x, **case), jnp.asarray(x))
                v1.add(y, want, case)
                v1.add(vjp(jnp.asarray(g))[0], g, case)
            passed = tf.grad_pass_through(lambda x, case=case: tf.quantize_and_dequantize_v2(x, **case))
            y, vjp = jax.vjp(passed, jnp.asarray(x))
            variable = judge.constant(x)
            with judge.GradientTape() as tape:
                tape.watch(variable)
                op = lambda x, case=case: judge.quantization.quantize_and_dequantize_v2(x, **case)
                want = judge.grad_pass_through(op)(variable)
            through.add(y, want, case)
            through.add(vjp(jnp.asarray(g))[0], tape.gradient(want, variable, g), case)
        # Slices along an axis, which of the raw ops V3 can do, half to even.
        x = values(rng, low, high, 2**num_bits - 1)
        case = {"signed_input": signed, "range_given": True, "narrow_range": narrow, "axis": 0}
        want = judge.raw_ops.QuantizeAndDequantizeV3(input=x, input_min=low, input_max=high, num_bits=num_bits, **case)
        v2.add(tf.quantize_and_dequantize_v2(x, low, high, num_bits=num_bits, **case), want, (low, high, case))
    for tally in (v1, v2, through):
        tally.close()


def test_quantize(judge, compared):
    rng = np.random.default_rng([SEED, 4])
    forward, backward = Tally(compared, "quantize"), Tally(compared, "dequantize")
    options = [
        (T, mode, round_mode, narrow)
        for T in ("qint8", "quint8", "qint16", "quint16")
        for mode in ("MIN_COMBINED", "MIN_FIRST", "SCALED")
        for round_mode in (("HALF_AWAY_FROM_ZERO", "HALF_TO_EVEN") if mode == "SCALED" else ("HALF_AWAY_FROM_ZERO",))
        for narrow in ((False, True) if mode == "SCALED" else (False,))
    ]
    for T, mode, round_mode, narrow in options * 2:
        info = np.iinfo(T[1:])
        low, high = increasing(*hard_ranges(rng, RANGES, info.max - info.min))
        for x, a, b in zip(values(rng, low, high, info.max - info.min), low, high, strict=True):
            case = {"mode": mode, "round_mode": round_mode, "narrow_range": narrow}
            got = tf.quantize(x, a, b, T, **case)
            want = judge.quantization.quantize(judge.constant(x), a, b, getattr(judge, T), **case)
            defined = ~np.isnan(x)
            forward.add(got.output, judge.bitcast(want.output, T[1:]), (a, b, T, case), defined)
            forward.add(got.output_min, want.output_min, (a, b, T, case))
            forward.add(got.output_max, want.output_max, (a, b, T, case))
            q = rng.integers(info.min, info.max, SIZE, T[1:], endpoint=True)
            ends = rng.integers(0, 2**32, 2, np.uint32).view(np.float32) if rng.random() < 0.2 else (a, b)
            case = {"mode": mode, "narrow_range": narrow}
            want = judge.quantization.dequantize(judge.bitcast(judge.constant(q), getattr(judge, T)), *ends, **case)
            backward.add(tf.dequantize(q, *ends, **case), want, (ends, T, case))
            if mode == "MIN_COMBINED":
                case |= {"dtype": judge.bfloat16}
                want = judge.quantization.dequantize(judge.bitcast(judge.constant(q), getattr(judge, T)), *ends, **case)
                got = tf.dequantize(q, *ends, mode, dtype="bfloat16")
                backward.add(got.astype(jnp.float32), judge.cast(want, judge.float32), (ends, T, case))
        if mode != "MIN_FIRST":  # which has no axis in TensorFlow
            x = values(rng, low, high, info.max - info.min)
            case = {"mode": mode, "round_mode": round_mode, "narrow_range": narrow, "axis": 0}
            got = tf.quantize(x, low, high, T, **case)
            want = judge.quantization.quantize(judge.constant(x), low, high, getattr(judge, T), **case)
            forward.add(got.output, judge.bitcast(want.output, T[1:]), (low, high, T, case), ~np.isnan(x))
            forward.add(got.output_min, want.output_min, (low, high, T, case))
            forward.add(got.output_max, want.output_max, (low, high, T, case))
            q, case = got.output, {"mode": mode, "narrow_range": narrow, "axis": 0}
            want = judge.quantization.dequantize(judge.bitcast(judge.constant(q), getattr(judge, T)), low, high, **case)
            backward.add(tf.dequantize(q, low, high, **case), want, (low, high, T, case))
    forward.close()
    backward.close()
