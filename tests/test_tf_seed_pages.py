# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow pages this project was born from, each sentence with a number as a test.

Pages: "Fake quantization" (r0.12), quantize_v2 (r1.4), QuantizeAndDequantizeV2 (raw op) and
quantize_and_dequantize_v2 (r2.4). Where a page and TensorFlow 2.21 differ TensorFlow wins; the test's name or comment
says so.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from exact import assert_same_bits, x64
from lanes import by_default

from jaxquant import tf

pytestmark = pytest.mark.bits

F = np.float32
G = np.array([1.0, 2.0, 4.0, 8.0, 16.0], F)


def test_fake_quant_with_min_max_args_page():
    """Defaults -6 and 6; 255 steps, 256 values; the closest of the step values; output in floating point."""
    x = jax.device_put(np.linspace(-8, 8, 4001, dtype=F))  # which compiles nothing
    y = np.asarray(tf.fake_quant_with_min_max_args(x))
    assert_same_bits(y, tf.fake_quant_with_min_max_args(x, None, None))
    levels = np.unique(y)
    assert len(levels) == 256
    # The range is nudged so that 0 is a level: half a step from the page's [-6, 6].
    assert 0.0 in levels
    assert abs(levels[0] + 6) <= 12 / 255
    assert abs(levels[-1] - 6) <= 12 / 255
    clipped = np.clip(x, levels[0], levels[-1])
    assert (np.abs(y - clipped) <= np.abs(clipped[:, None] - levels).min(1) + 1e-6).all()
    assert y.dtype == jnp.float32


def test_fake_quant_with_min_max_args_gradient_page():
    """gradients * (inputs >= min && inputs <= max), with the nudged min and max."""
    x = np.array([-7.0, -6.0, 0.0, 5.9, 7.0], F)
    low, high = oracle.nudged(F(-6), F(6), 8, False)[2:4]
    want = G * ((x >= low) & (x <= high))
    assert_same_bits(tf.fake_quant_with_min_max_args_gradient(*jax.device_put((G, x))), want)
    assert (low, high) == (F(-6.0235295), F(5.9764705))


def test_fake_quant_with_min_max_vars_page():
    """Shape [b, h, w, d], global scalars min and max; allows for training them."""
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(F)
    assert jax.eval_shape(tf.fake_quant_with_min_max_vars, x, F(-1), F(1)).shape == x.shape
    loss = lambda r: ((tf.fake_quant_with_min_max_vars(x, r["min"], r["max"], num_bits=4) - x) ** 2).mean()
    ranges = {"min": F(-0.5), "max": F(0.5)}

    @jax.jit
    def step(r):
        value, slope = jax.value_and_grad(loss)(r)
        return jax.tree.map(lambda v, g: v - g, r, slope), value

    _, before = step(ranges)
    for _ in range(20):
        ranges, _ = step(ranges)
    _, after = step(ranges)
    assert after.item() < before.item() / 4
    assert ranges["min"].item() < -1 < 1 < ranges["max"].item()


def test_fake_quant_with_min_max_vars_gradient_page():
    """inputs: gradients * (inside); min: sum(gradients * (inputs < min)); max: sum(gradients * (inputs > max))."""
    x = np.array([-7.0, -1.5, 0.0, 1.5, 7.0], F)
    got = jax.jit(tf.fake_quant_with_min_max_vars_gradient)(G, x, -2.0, 2.0)
    assert got.backprops_wrt_input.tolist() == [0.0, 2.0, 4.0, 8.0, 0.0]
    assert (got.backprop_wrt_min.item(), got.backprop_wrt_max.item()) == (1.0, 16.0)


@by_default("shape3")
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 2, 3), (2, 2, 3)])
def test_fake_quant_with_min_max_vars_per_channel_page(shape):
    """One of the shapes [d], [b, d], [b, h, w, d] (TensorFlow 2.21: any rank from 1); min and max of shape [d]."""
    x = np.random.default_rng(0).normal(size=shape).astype(F)
    low, high = np.array([-1.0, -0.5, -2.0], F), np.array([1.0, 0.5, 2.0], F)
    y = np.asarray(jax.jit(tf.fake_quant_with_min_max_vars_per_channel)(x, low, high))
    for c in range(3):
        assert_same_bits(y[..., c], oracle.fake_quant(x[..., c], low[c], high[c]))


def test_fake_quant_with_min_max_vars_per_channel_gradient_page():
    """As for vars, with sum_per_d."""
    x, g = np.array([[-9.0, 0.1], [9.0, 9.0], [0.1, -9.0]], F), np.array([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]], F)
    gradient = jax.jit(tf.fake_quant_with_min_max_vars_per_channel_gradient)
    got = gradient(g, x, np.full(2, -1.0, F), np.full(2, 1.0, F))
    assert got.backprops_wrt_input.tolist() == [[0.0, 2.0], [0.0, 0.0], [16.0, 0.0]]
    assert got.backprop_wrt_min.tolist() == [1.0, 32.0]
    assert got.backprop_wrt_max.tolist() == [4.0, 8.0]


def round_trip(x, low, high, **options):
    """quantize_and_dequantize_v2 of a given range."""
    return tf.quantize_and_dequantize_v2(jax.device_put(np.array(x, F)), low, high, range_given=True, **options)


def adjusted_ends(low, high, **options):
    """What the op makes of values far outside the range."""
    return round_trip([-1e6, 1e6], low, high, **options).tolist()


def test_quantize_and_dequantize_v2_raw_page_worked_ranges():
    """[-10, 5] -> scale 12.8, max 127 / 12.8 = 9.921875; [-10, 10] -> 12.7, min -128 / 12.7 = -10.07874."""
    assert adjusted_ends(-10.0, 5.0) == [-10.0, 9.921875]
    low, high = adjusted_ends(-10.0, 10.0)
    assert (round(low, 5), high) == (-10.07874, 10.0)
    x = [1 / 12.8, 1 / 12.7]
    assert round_trip(x, -10.0, 5.0).tolist()[0] == F(1 / 12.8)
    assert round_trip(x, -10.0, 10.0).tolist()[1] == F(10) / F(127)


def test_quantize_and_dequantize_v2_raw_page_unsigned_forces_min_to_zero():
    low, high = adjusted_ends(-10.0, 5.0, signed_input=False)
    assert (low, high) == (0.0, 5.0)


def test_quantize_and_dequantize_v2_raw_page_range_from_the_input():
    """range_given == False: the minimum and maximum of the input. 0.0 maps to 0."""
    x = [-10.0, -3.21, 0.0, 0.04, 5.0]
    y = tf.quantize_and_dequantize_v2(jax.device_put(np.array(x, F)), 0.0, 0.0)
    assert_same_bits(y, round_trip(x, -10.0, 5.0))
    assert y.tolist()[2] == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", oracle.FLOATS)
def test_quantize_and_dequantize_v2_raw_page_float_types(dtype):
    with x64(dtype == "float64"):
        of = lambda *values: np.array(values, oracle.FLOATS[dtype])
        x, (low, high) = of(-10.0, 0.3, 5.0), of(-10.0, 5.0)
        y = jax.jit(tf.quantize_and_dequantize_v2, static_argnames="range_given")(x, low, high, range_given=True)
        assert y.dtype == x.dtype
        assert y.tolist() == of(-10.0, 4 / 12.8, 5.0).tolist()


def test_quantize_and_dequantize_v2_raw_page_round_modes():
    """HALF_UP: 7.5 rounds up to 8 and -7.5 rounds up to -7. HALF_TO_EVEN: 8 and -8."""
    op = functools.partial(round_trip, [7.5, -7.5, 6.5, -6.5], -128.0, 127.0)
    assert op(round_mode="HALF_UP").tolist() == [8.0, -7.0, 7.0, -6.0]
    assert op(round_mode="HALF_TO_EVEN").tolist() == [8.0, -8.0, 6.0, -6.0]


def test_quantize_and_dequantize_v2_raw_page_narrow_range():
    """-127 instead of -128."""
    assert adjusted_ends(-127.0, 127.0, narrow_range=True) == [-127.0, 127.0]
    assert adjusted_ends(-127.0, 127.0) == [-128.0, 127.0]


@pytest.mark.slow
def test_quantize_and_dequantize_v2_raw_page_axis():
    """Each slice has its own range. The raw op writes -1 for none; here None is none and -1 is the last axis."""
    x = jax.device_put(np.array([[1.0, 100.0], [-0.5, 30.0]], F))
    whole, last, first = (np.asarray(tf.quantize_and_dequantize_v2(x, 0.0, 0.0, axis=axis)) for axis in (None, -1, 1))
    assert_same_bits(last, first)
    for c in range(2):
        assert_same_bits(last[:, c], oracle.quantize_and_dequantize(np.asarray(x)[:, c], 0, 0, given=False))
    assert (last != whole).any()


def test_quantize_and_dequantize_v2_raw_page_as_a_callable():
    """The page's formula: round(clamp(value) * scale) / scale; TensorFlow multiplies by an inverse of its own."""
    op = functools.partial(tf.quantize_and_dequantize_v2, input_min=-10.0, input_max=5.0, range_given=True)
    x = np.linspace(-12, 12, 97, dtype=F)
    want = np.rint(np.clip(x, -10, 9.921875) * 12.8) / 12.8
    np.testing.assert_allclose(np.ravel(jax.jit(jax.vmap(op))(x.reshape(97, 1))), want, atol=1e-6)


def test_quantize_and_dequantize_v2_r24_page_gradient_outside_the_range_is_zero():
    op = lambda x: tf.quantize_and_dequantize_v2(x, -10.0, 5.0, range_given=True).sum()
    assert jax.jit(jax.grad(op))(np.array([-11.0, -10.0, 0.0, 5.0, 5.1], F)).tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_quantize_and_dequantize_v2_r24_page_v1_by_grad_pass_through():
    """tf.grad_pass_through(tf.quantization.quantize_and_dequantize_v2)(...) is quantize_and_dequantize(...)."""
    x = np.array([[-11.0, -10.0], [0.3, 5.1]], F)
    v1 = lambda x: tf.quantize_and_dequantize(x, -10.0, 5.0, range_given=True)
    simulated = tf.grad_pass_through(lambda x: tf.quantize_and_dequantize_v2(x, -10.0, 5.0, range_given=True))

    @jax.jit
    def both(x):
        passes = [jax.vjp(op, x) for op in (simulated, v1)]
        return [(y, *vjp(x)) for y, vjp in passes]

    (y, dx), (want, want_dx) = both(x)
    assert_same_bits(y, want)
    assert_same_bits(dx, x)
    assert_same_bits(want_dx, x)


def test_quantize_and_dequantize_v2_r24_page_example_has_its_range_reversed():
    """The page's example passes input_min=5.0 and input_max=-10.0, which TensorFlow 2.21 refuses."""
    with pytest.raises(ValueError, match=r"input_min=5\.0 and input_max=-10\.0"):
        tf.quantize_and_dequantize_v2(np.ones((4, 4), F), input_min=5.0, input_max=-10.0, range_given=True)


def quantized(x, *args, **options):
    """NumPy arrays of what quantize_v2 gives."""
    return jax.tree.map(np.asarray, tf.quantize_v2(jax.device_put(np.array(x, F)), *args, **options))


def codes(*args, **options):
    return quantized(*args, **options).output.astype(np.float64)


def test_quantize_v2_page_min_combined():
    """out = (in - min_range) * range(T) / (max_range - min_range); if T == qint8, minus (range(T) + 1) / 2."""
    x = np.linspace(0, 6, 101).astype(F)
    scaled = x.astype(np.float64) * 255 / 6
    for T, moved in (("quint8", 0), ("qint8", 128)):
        got = codes(x, 0.0, 6.0, T)
        assert np.abs(got - (scaled - moved)).max() <= 0.5 + 1e-5
        assert got[[0, -1]].tolist() == [-moved, 255 - moved]


def test_quantize_v2_page_min_combined_every_signed_type_is_moved():
    """The page moves qint8 only; TensorFlow 2.21 every signed type, by half its codes."""
    for T, low in (("qint8", -128), ("qint16", -32768)):
        assert quantized([0.0], 0.0, 6.0, T).output[0] == low


@pytest.mark.slow
@pytest.mark.parametrize(("T", "bits"), [("qint8", 8), ("quint8", 8), ("qint16", 16), ("quint16", 16)])
def test_quantize_v2_page_min_first(T, bits):
    """round(input * range_scale) - round(range_min * range_scale) + lowest, clipped to T."""
    low, high, lowest = -2.0, 3.0, np.iinfo(T[1:]).min
    x = np.linspace(-4, 5, 333).astype(np.float32)
    steps = 1 << bits
    scale = steps / ((high - low) * (steps / (steps - 1)))
    want = np.round(x * scale) - np.round(low * scale) + lowest
    want = np.clip(want, lowest, np.iinfo(T[1:]).max)
    got = codes(x, low, high, T, "MIN_FIRST")
    assert np.abs(got - want).max() <= 1
    assert (got == want).mean() > 0.99


def test_quantize_v2_page_scaled_elides_the_lowest_code():
    """Output -127 to 127, m = max(|min|, |max|), 0.0 to 0: narrow_range=True for a signed T and a symmetric range."""
    x, m = np.linspace(-5, 5, 201).astype(F), 5.0
    q = quantized(x, -m, m, "qint8", "SCALED", narrow_range=True)
    s = (127 - -127) / (2 * m)
    assert np.abs(q.output.astype(np.float64) - x * s).max() <= 0.5 + 1e-5
    assert (q.output.min(), q.output.max(), q.output[100]) == (-127, 127, 0)
    assert (q.output_min, q.output_max) == (-5.0, 5.0)


def test_quantize_v2_page_scaled_is_not_centred_in_tensorflow_2_21():
    """The page centres the range on 0; 2.21 takes the end that limits the scale and adjusts the other."""
    q = quantized([-10, 5], -10.0, 5.0, "qint8", "SCALED")
    assert (q.output_min, q.output_max) == (-10.0, 9.921875)
    unsigned = quantized([-10, 5], -10.0, 5.0, "quint8", "SCALED")
    assert unsigned.output.tolist() == [0, 255]
    assert (unsigned.output_min, unsigned.output_max) == (0.0, 5.0)


def test_quantize_v2_page_adjusts_a_range_without_width():
    """Close to equal values are separated by a small epsilon: ensure_minimum_range times the magnitude or 1."""
    q = quantized([0.0], 0.0, 0.0, "quint8")
    assert (q.output_min, q.output_max) == (0.0, F(0.01))
    q = quantized([0.0], 5.0, 5.0, "quint8", ensure_minimum_range=2.0)
    assert (q.output_min, q.output_max) == (0.0, 10.0)
    # 2.21 also makes every range contain 0.
    q = quantized([0.0], 5.0, 6.0, "quint8")
    assert (q.output_min, q.output_max) == (0.0, 6.0)


@pytest.mark.slow
def test_quantize_v2_page_the_way_back():
    x = np.linspace(-2, 3, 200).astype(F)

    @functools.partial(jax.jit, static_argnums=1)
    def there_and_back(x, mode):
        q = tf.quantize_v2(x, -2.0, 3.0, "qint8", mode)
        return tf.dequantize(q.output, q.output_min, q.output_max, mode), q.output_min, q.output_max

    for mode in ("MIN_COMBINED", "MIN_FIRST", "SCALED"):
        y, low, high = map(np.asarray, there_and_back(x, mode))
        step = (high - low) / 255
        assert np.abs(y - x).max() <= step * 0.51 + (step / 2 if mode == "MIN_FIRST" else 0)


@functools.partial(jax.jit, static_argnums=3)
def trip(x, low, high, mode):
    q = tf.quantize_v2(x, low, high, "quint8", mode)
    return tf.dequantize(q.output, q.output_min, q.output_max, mode)


def after_trips(mode, trips, low=-1.0, high=1.0):
    """How far quantizing and dequantizing `trips` times has moved values, on average, in steps."""
    x = start = np.linspace(-0.5, 0.5, 101, dtype=F)
    for _ in range(trips):
        x = trip(x, low, high, mode)
    return float((np.asarray(x) - start).mean() * 255 / (high - low))


@pytest.mark.slow
def test_quantize_v2_page_repeated_trips():
    """The page: MIN_COMBINED drifts and MIN_FIRST does not. In TensorFlow 2.21 MIN_COMBINED moves once and stays.

    MIN_FIRST drifts, where the two roundings of the lower end disagree: on [-1, 1], by a step a trip.
    """
    assert after_trips("MIN_COMBINED", 1) == after_trips("MIN_COMBINED", 10)
    assert abs(after_trips("MIN_COMBINED", 10)) < 0.1
    assert after_trips("MIN_FIRST", 10) > 9
    assert abs(after_trips("MIN_FIRST", 10, -1.0, 2.0)) < 0.1
