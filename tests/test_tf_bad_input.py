# SPDX-License-Identifier: Apache-2.0
"""What bad input gets: the class of error, the argument's name, what came; raised while tracing."""

import functools
import inspect
import re
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits, x64

from jaxquant import tf

# Made in NumPy: nothing is compiled before something is refused.
F = np.float32
put = jax.device_put
X = put(np.linspace(-1, 1, 6, dtype=F).reshape(2, 3))
V3 = np.ones(3, F)
V3_TWICE = V3 * 2
ARGS, ARGS_G = tf.fake_quant_with_min_max_args, tf.fake_quant_with_min_max_args_gradient
VARS, VARS_G = tf.fake_quant_with_min_max_vars, tf.fake_quant_with_min_max_vars_gradient
PER, PER_G = tf.fake_quant_with_min_max_vars_per_channel, tf.fake_quant_with_min_max_vars_per_channel_gradient
QDQ, QDQ2 = tf.quantize_and_dequantize, tf.quantize_and_dequantize_v2
Q, DQ, CODES = tf.quantize, tf.dequantize, np.ones((2, 3), np.int8)
NAN = float("nan")
not_floats = [
    (np.arange(3), "int64"),
    (put(np.arange(3, dtype=np.int32)), "int32"),
    (np.ones(3, bool), "bool"),
    (np.ones(3, complex), "complex128"),
    ([1.0, 2.0], "list"),
    ((1.0, 2.0), "tuple"),
    ("text", "str"),
    (None, "NoneType"),
    (1, "int"),
    (True, "bool"),
    (jax.random.wrap_key_data(put(np.zeros(2, np.uint32))), "key"),
    (np.array(["a"]), "<U1"),
    (np.array([object()]), "object"),
    (np.ones(3, jnp.float8_e4m3fn), "float8"),
]

# (call, class, the argument's name, what came)
TABLE = [
    *[(functools.partial(op, value), TypeError, "`inputs`", text) for op in (ARGS,) for value, text in not_floats],
    *[(functools.partial(VARS, v, -1.0, 1.0), TypeError, "`inputs`", text) for v, text in not_floats[:6]],
    *[(functools.partial(PER, v, V3, V3), TypeError, "`inputs`", text) for v, text in not_floats[:6]],
    *[(functools.partial(QDQ2, v, -1.0, 1.0), TypeError, "`input`", text) for v, text in not_floats[:6]],
    *[(functools.partial(QDQ, v, -1.0, 1.0), TypeError, "`input`", text) for v, text in not_floats[:6]],
    *[(functools.partial(Q, v, -1.0, 1.0, "int8"), TypeError, "`input`", text) for v, text in not_floats[:6]],
    (lambda: VARS_G([1.0], X, -1.0, 1.0), TypeError, "`gradients`", "list"),
    # Integers and their modes.
    (lambda: Q(X, -1.0, 1.0, "int4"), ValueError, "`T`", "'int4'"),
    (lambda: Q(X, -1.0, 1.0, jnp.float32), ValueError, "`T`", "'float32'"),
    (lambda: Q(X, -1.0, 1.0, jnp.uint32), ValueError, "`T`", "'uint32'"),
    (lambda: Q(X, -1.0, 1.0, None), TypeError, "`T`", "NoneType"),
    (lambda: Q(X, -1.0, 1.0, 8), TypeError, "`T`", "int"),
    (lambda: Q(X, -1.0, 1.0, "int8", "MIN"), ValueError, "`mode`", "'MIN'"),
    (lambda: Q(X, -1.0, 1.0, "int8", "SCALED", "HALF_UP"), ValueError, "`round_mode`", "'HALF_UP'"),
    (lambda: Q(X, -1.0, 1.0, "int8", "MIN_FIRST", "HALF_TO_EVEN"), ValueError, "`round_mode`", "'MIN_FIRST'"),
    (lambda: Q(X, -1.0, 1.0, "int8", "SCALED", "HALF_TO_EVEN", True), TypeError, "`name`", "bool"),
    (lambda: Q(X, 1.0, -1.0, "int8"), ValueError, "`min_range`", "min_range=1.0 and max_range=-1.0"),
    (lambda: Q(X, V3_TWICE, V3, "int8", axis=1), ValueError, "`min_range`", "[2. 2. 2.]"),
    (lambda: Q(X, V3, V3, "int8"), ValueError, "`min_range`", "(3,)"),
    (lambda: Q(X, -V3, 1.0, "int8", axis=1), ValueError, "`max_range`", "()"),
    (lambda: Q(X, -V3, 1.0, "int8", axis=1), ValueError, "each slice of `input` along axis 1", "()"),
    (lambda: Q(X, -V3, V3, "int8"), ValueError, "For a range a slice pass `axis`", "(3,)"),
    (lambda: Q(X, -V3, V3, "int8", axis=0), ValueError, "`min_range`", "(3,)"),
    (lambda: Q(X, -V3, V3, "int8", axis=2), ValueError, "`axis=2`", "rank 2"),
    (lambda: Q(X, -V3, V3, "int8", axis=1.0), TypeError, "`axis`", "float"),
    (lambda: Q(X, -1.0, None, "int8"), TypeError, "`max_range`", "NoneType"),
    (lambda: Q(X, -1.0, 1.0, "int8", narrow_range=1), TypeError, "`narrow_range`", "int"),
    (lambda: Q(X, -1.0, 1.0, "int8", ensure_minimum_range=V3), TypeError, "`ensure_minimum_range`", "float32"),
    (lambda: Q(X, -1.0, 1.0, "int8", ensure_minimum_range=NAN), ValueError, "`ensure_minimum_range`", "nan"),
    (lambda: Q(X, -1.0, 1.0, "int8", ensure_minimum_range=-0.5), ValueError, "`ensure_minimum_range`", "-0.5"),
    (lambda: Q(X, -1.0, 1.0, "int8", ensure_minimum_range=np.inf), ValueError, "`ensure_minimum_range`", "inf"),
    (lambda: Q(X, -1.0, 1.0, "int8", ensure_minimum_range=None), TypeError, "`ensure_minimum_range`", "NoneType"),
    (lambda: VARS(X, -(10**400), 1), ValueError, "`min`", "beyond float64"),
    (lambda: jax.jit(lambda x, t: Q(x, -1.0, 1.0, t))(X, 8), TypeError, "`T`", "int32"),
    (lambda: DQ(X, -1.0, 1.0), TypeError, "`input`", "float32"),
    (lambda: DQ(jnp.ones(3, jnp.uint32), -1.0, 1.0), TypeError, "`input`", "uint32"),
    (lambda: DQ([1, 2], -1.0, 1.0), TypeError, "`input`", "list"),
    (lambda: DQ(3, -1.0, 1.0), TypeError, "`input`", "int"),
    (lambda: DQ(CODES, -1.0, 1.0, "SCALE"), ValueError, "`mode`", "'SCALE'"),
    (lambda: DQ(CODES, -1.0, 1.0, dtype=jnp.float16), ValueError, "`dtype`", "'float16'"),
    (lambda: DQ(CODES, -1.0, V3), ValueError, "`max_range`", "(3,)"),
    (lambda: DQ(CODES, -V3, V3, axis=3), ValueError, "`axis=3`", "rank 2"),
    # Ranges.
    (lambda: VARS(X, jnp.int32(-1), 1.0), TypeError, "`min`", "int32"),
    (lambda: VARS(X, None, 1.0), TypeError, "`min`", "NoneType"),
    (lambda: VARS(X, -1.0, True), TypeError, "`max`", "bool"),
    (lambda: VARS(X, -1.0, "1"), TypeError, "`max`", "str"),
    (lambda: VARS(X, V3, 1.0), ValueError, "`min`", "(3,)"),
    (lambda: VARS(X, -1.0, jnp.ones((1,))), ValueError, "`max`", "(1,)"),
    (lambda: PER(X, -1.0, V3), ValueError, "`min`", "()"),
    (lambda: PER(X, -V3, jnp.ones(2)), ValueError, "`max`", "(2,)"),
    (lambda: PER(X, -V3, jnp.ones((1, 3))), ValueError, "`max`", "(1, 3)"),
    (lambda: PER(jnp.float32(0.5), -V3, V3), ValueError, "`inputs`", "()"),
    (lambda: PER(jnp.float32(0.5), -1.0, 1.0), ValueError, "`inputs`", "()"),
    (lambda: PER(X, [-1.0] * 3, V3), TypeError, "`min`", "list"),
    (lambda: ARGS(X, 1.0, 1.0), ValueError, "`min`", "min=1.0 and max=1.0"),
    (lambda: ARGS(X, 2.0, 1.0), ValueError, "`min`", "min=2.0 and max=1.0"),
    (lambda: ARGS(X, NAN, 1.0), ValueError, "`min`", "min=nan"),
    (lambda: ARGS(X, 0.0, 1e-40), ValueError, "`min`", "max=9.99994610111476e-41"),
    (lambda: ARGS(X, 1.0, 1.00000001), ValueError, "`min`", "max=1.0"),
    (lambda: ARGS(X, jnp.float32(-1), 1.0), TypeError, "`min`", "float32"),
    (lambda: ARGS(X, -1.0, "1"), TypeError, "`max`", "str"),
    (lambda: jax.jit(lambda x, a: ARGS(x, a, 1.0))(X, -1.0), TypeError, "`min`", "float32"),
    (lambda: ARGS_G(X, X, 2.0, 1.0), ValueError, "`min`", "min=2.0"),
    (lambda: QDQ2(X, 2.0, 1.0, range_given=True), ValueError, "`input_min`", "input_min=2.0 and input_max=1.0"),
    (lambda: QDQ2(X, NAN, 1.0, range_given=True), ValueError, "`input_min`", "input_min=nan"),
    (lambda: QDQ(X, 2.0, 1.0, range_given=True), ValueError, "`input_min`", "input_max=1.0"),
    (lambda: QDQ2(X, V3_TWICE, V3, range_given=True, axis=1), ValueError, "`input_min`", "[2. 2. 2.]"),
    (lambda: QDQ2(X, V3, V3, range_given=True), ValueError, "`input_min`", "(3,)"),
    (lambda: QDQ2(X, V3, V3, range_given=True, axis=0), ValueError, "`input_min`", "(3,)"),
    (lambda: QDQ2(X, -1.0, V3, range_given=True, axis=1), ValueError, "`input_min`", "()"),
    (lambda: QDQ2(X, V3, V3, axis=0), ValueError, "`input_min`", "(3,)"),
    (lambda: QDQ2(X, None, 1.0), TypeError, "`input_min`", "NoneType"),
    # Static integers.
    *[
        (lambda op=op, v=v: op(v), kind, "`num_bits`", text)
        for op in (
            lambda v: ARGS(X, num_bits=v),
            lambda v: VARS(X, -1.0, 1.0, v),
            lambda v: PER(X, -V3, V3, v),
            lambda v: PER_G(X, X, -V3, V3, v),
        )
        for v, kind, text in [
            (1, ValueError, "got 1."),
            (17, ValueError, "got 17."),
            (-8, ValueError, "got -8."),
            (8.0, TypeError, "float"),
            (True, TypeError, "bool"),
            ("8", TypeError, "str"),
            (None, TypeError, "NoneType"),
            (jnp.int32(8), TypeError, "int32"),
        ]
    ],
    (lambda: jax.jit(lambda x, b: VARS(x, -1.0, 1.0, b))(X, 8), TypeError, "`num_bits`", "int32"),
    (lambda: QDQ2(X, -1.0, 1.0, num_bits=0), ValueError, "`num_bits`", "got 0."),
    (lambda: QDQ2(X, -1.0, 1.0, num_bits=62), ValueError, "`num_bits`", "got 62."),
    (lambda: QDQ2(X, -1.0, 1.0, num_bits=63, signed_input=False), ValueError, "`num_bits`", "got 63."),
    (lambda: QDQ2(X, -1.0, 1.0, num_bits=8.0), TypeError, "`num_bits`", "float"),
    # Axes.
    (lambda: QDQ2(X, V3, V3, axis=2), ValueError, "`axis=2`", "rank 2"),
    (lambda: QDQ2(X, V3, V3, axis=-3), ValueError, "`axis=-3`", "rank 2"),
    (lambda: QDQ2(jnp.float32(1), 0.0, 1.0, axis=0), ValueError, "`axis=0`", "rank 0"),
    (lambda: QDQ2(X, V3, V3, axis=np.int64(5)), ValueError, "`axis=5`", "rank 2"),
    (lambda: QDQ2(jnp.float32(1), 0.0, 1.0, axis=np.int64(0)), ValueError, "`axis=0`", "rank 0"),
    (lambda: QDQ2(X, V3, V3, axis=1.0), TypeError, "`axis`", "float"),
    (lambda: QDQ2(X, V3, V3, axis=True), TypeError, "`axis`", "bool"),
    (lambda: QDQ2(X, V3, V3, axis=(0, 1)), TypeError, "`axis`", "tuple"),
    (lambda: jax.jit(lambda x, a: QDQ2(x, V3, V3, axis=a))(X, 1), TypeError, "`axis`", "int32"),
    # Flags, modes, names.
    (lambda: VARS(X, -1.0, 1.0, narrow_range=1), TypeError, "`narrow_range`", "int"),
    (lambda: VARS(X, -1.0, 1.0, narrow_range=None), TypeError, "`narrow_range`", "NoneType"),
    (lambda: QDQ2(X, -1.0, 1.0, signed_input=8), TypeError, "`signed_input`", "int"),
    (lambda: QDQ2(X, -1.0, 1.0, range_given=jnp.bool_(True)), TypeError, "`range_given`", "bool"),
    (lambda: QDQ2(X, -1.0, 1.0, round_mode="HALF_AWAY"), ValueError, "`round_mode`", "'HALF_AWAY'"),
    (lambda: QDQ2(X, -1.0, 1.0, round_mode=None), TypeError, "`round_mode`", "NoneType"),
    (lambda: QDQ2(X, -1.0, 1.0, True, 8, True, "HALF_UP", True), TypeError, "`name`", "bool"),
    (lambda: VARS(X, -1.0, 1.0, 8, False, 3), TypeError, "`name`", "int"),
    # Shapes of cotangents.
    (lambda: ARGS_G(jnp.ones(3), X), ValueError, "`gradients`", "(3,)"),
    (lambda: VARS_G(jnp.ones((3, 2)), X, -1.0, 1.0), ValueError, "`gradients`", "(3, 2)"),
    (lambda: PER_G(jnp.ones(()), X, -V3, V3), ValueError, "`gradients`", "()"),
    (lambda: tf.grad_pass_through(lambda x: x)("text"), TypeError, "grad_pass_through", "str"),
    (
        lambda: tf.grad_pass_through(lambda a, b: tf.FakeQuantGradients(a, b, a))(X, X),
        TypeError,
        "pass_through",
        "Fake",
    ),
    (lambda: tf.grad_pass_through(jnp.sum)(X), TypeError, "grad_pass_through", "(2, 3)"),
    (lambda: tf.grad_pass_through(lambda x: x.astype(jnp.float16))(X), TypeError, "grad_pass_through", "float16"),
]


@pytest.mark.parametrize(("call", "error", "argument", "came"), TABLE)
def test_bad_input_is_refused_while_tracing(call, error, argument, came):
    with pytest.raises(error) as info:
        jax.eval_shape(call)
    assert argument in str(info.value)
    assert came in str(info.value)
    assert len(re.findall(r"[.)?] [A-Z]|: ", str(info.value))) > 0, "no second sentence that says what to do"


def test_a_range_of_more_precision_than_the_computation_is_refused():
    with x64(), pytest.raises(TypeError, match=r"`min` is float64, expected float32.*astype"):
        VARS(np.ones(3, F), np.asarray(-1.0), 1.0)


def test_a_cotangent_of_more_precision_than_the_computation_is_refused():
    with x64(), pytest.raises(TypeError, match=r"`gradients` is float64, expected float32.*astype"):
        VARS_G(np.ones(3), np.ones(3, F), -1.0, 1.0)


def test_a_cotangent_of_more_precision_than_the_input_is_summed_as_it_is():
    dx, dmin, dmax = jax.jit(VARS_G)(np.full(3, 1e5, F), np.full(3, 9.0, np.float16), -1.0, 1.0)
    assert (dx.dtype, dx.tolist(), dmin.item(), dmax.item()) == (jnp.float16, [0.0] * 3, 0.0, 3e5)


def test_integers_compose_in_float64():
    def there_and_back(x):
        of_modes = [(Q(x, -1.0, 2.0, "int16", mode), mode) for mode in ("MIN_COMBINED", "MIN_FIRST", "SCALED")]
        return [(q.output_min, DQ(*q, mode)) for q, mode in of_modes]

    with x64():
        x = np.linspace(-1, 1, 7)
        for low, y in jax.jit(there_and_back)(x):
            assert (low.dtype, y.dtype) == (jnp.float64, jnp.float32)
            assert np.abs(np.asarray(y) - x.astype(F)).max() < 1e-4


def test_what_is_beyond_int32_has_one_code_in_both_precisions():
    x = np.array([np.inf, -np.inf])
    with x64():
        wide, narrow = (jax.jit(lambda x: Q(x, -1.0, 1.0, "int32", "MIN_FIRST").output)(x) for x in (x, x.astype(F)))
    assert_same_bits(wide, narrow)


def test_a_range_of_zero_width_has_one_code():
    q = Q(np.array([-3, 0, 5], F), 0.0, 0.0, "int8", "MIN_FIRST", ensure_minimum_range=0.0)
    assert q.output.tolist() == [-128] * 3


def test_a_negative_zero_is_no_end_of_a_range():
    assert_same_bits(Q(X, -1.0, -0.0, "int8").output_max, F(0))


def test_a_narrow_grid_is_scaled_by_its_lowest_code():
    assert DQ(np.int8([-127, 5]), -127.0, 1.0, "SCALED", narrow_range=True).tolist() == [-127.0, 5.0]


def test_bits_of_quantize_and_dequantize_at_both_ends():
    for bits, signed in (1, True), (61, True), (1, False), (62, False):
        assert jax.eval_shape(lambda n=bits, s=signed: QDQ2(X, -1.0, 1.0, s, n)).shape == X.shape


def test_numbers_out_of_range_are_infinite_as_in_tensorflow():
    assert np.isnan(ARGS(X, -1e300, 1e300)).all()
    assert np.isnan(VARS(X, -1e300, 1e300)).all()
    assert jax.eval_shape(lambda: QDQ2(X, -1e300, 1.0, range_given=True)).shape == X.shape


def test_traced_and_vars_ranges_are_not_checked():
    """A check would make eager differ from jit; the values are TensorFlow's."""
    assert np.isnan(VARS(X, 1.0, 1.0)).all()
    assert np.isnan(VARS(X, NAN, 1.0)).all()
    assert_same_bits(VARS(X, 1.0, -1.0), jax.jit(VARS)(X, 1.0, -1.0))
    of = lambda low, high: QDQ2(X, low, high, range_given=True)
    for f, traced in (of, (1.0, -1.0)), (lambda low: of(low, -1.0), (1.0,)), (lambda high: of(1.0, high), (-1.0,)):
        assert jax.eval_shape(f, *traced).shape == X.shape


def test_subnormal_ends_of_a_range_are_zeros():
    for ends, read in ((1e-40, 0.5), (0.0, 0.5)), ((-0.5, -1e-40), (-0.5, 0.0)):
        assert_same_bits(ARGS(X, *ends), ARGS(X, *read))
    with pytest.raises(ValueError, match="min < max"):
        ARGS(X, 0.0, 1e-40)


@pytest.mark.parametrize(
    "op", [lambda x: ARGS(x), lambda x: VARS(x, -6.0, 6.0), lambda x: QDQ2(x, -6.0, 6.0, range_given=True)]
)
def test_nan_stays_alone_and_infinity_saturates(op):
    y, large = (np.asarray(op(put(np.array(v, F)))) for v in ([np.nan, np.inf, -np.inf, 1], [0, 1e30, -1e30, 1]))
    assert np.isnan(y).tolist() == [True, False, False, False]
    assert_same_bits(y[1:], large[1:])


def test_nan_in_the_data_is_left_out_of_the_range():
    y, without = (np.asarray(QDQ2(put(np.array([v, -10, 5, 0.3], F)), 0.0, 0.0)) for v in (np.nan, 0))
    assert_same_bits(y[1:], without[1:])
    assert np.isnan(y[0])


@pytest.mark.parametrize(
    "shape", [(), *(pytest.param(s, marks=pytest.mark.slow) for s in [(0,), (0, 3), (2, 0, 3)]), (3, 0)]
)
def test_rank_0_and_zero_size(shape):
    back = lambda x: DQ(Q(x, -1.0, 1.0, "int8").output, -1.0, 1.0)
    calls = [
        back,
        lambda x: ARGS(x),
        lambda x: VARS(x, -1.0, 1.0),
        lambda x: QDQ2(x, -1.0, 1.0),
        lambda x: QDQ(x, 0.0, 0.0),
    ]
    if shape:
        low, high = -np.ones(shape[-1], F), np.ones(shape[-1], F)
        calls += [lambda x: DQ(Q(x, low, high, "int8", axis=-1).output, low, high, axis=-1)]
        calls += [lambda x: PER(x, low, high), lambda x: QDQ2(x, low, high, axis=-1)]

    @jax.jit
    def run(x):
        passes = [jax.vjp(call, x) for call in calls]
        return [(y, *vjp(y)) for y, vjp in passes], VARS_G(x, x, -1.0, 1.0)[1:]

    got, ends = run(np.ones(shape, F))
    assert [v.shape for of_call in got for v in of_call] == [shape] * 2 * len(calls)
    assert [v.item() for v in ends] == [0.0, 0.0]


def test_the_output_has_the_dtype_of_the_input_and_is_never_weak():
    for value in (0.3, F(0.3), jnp.asarray(0.3), np.full(3, 0.3)):
        for y in jax.eval_shape(lambda value=value: (ARGS(value), VARS(value, -1, 1), QDQ2(value, -1, 1))):
            assert (y.dtype, y.weak_type) == (jnp.float32, False)
    of = lambda op, *args: jax.eval_shape(functools.partial(op, *args))
    with x64():
        assert of(ARGS, np.ones(3, F)).dtype == jnp.float32
        assert of(VARS, np.ones(3), -1.0, 1.0).dtype == jnp.float64
        assert of(QDQ2, np.ones(3, jnp.bfloat16), -1.0, 1.0).dtype == jnp.bfloat16
    grad = jax.grad(lambda x, lo: VARS(x, lo, 1.0).sum().astype(F), (0, 1))
    dx, dlo = of(grad, *put((np.ones(3, jnp.bfloat16), np.array(-1, jnp.bfloat16))))
    assert (dx.dtype, dlo.dtype) == (jnp.bfloat16, jnp.bfloat16)


def test_arrays_of_other_libraries_convert_themselves():
    class Parameter:
        def __jax_array__(self):
            return X

    class Number(Parameter):
        def __init__(self, value):
            self.value = value

        def __jax_array__(self):
            return put(F(self.value)) if isinstance(self.value, float) else self.value

    low, high = Number(-1.0), Number(1.0)
    assert_same_bits(VARS(Parameter(), low, high), VARS(X, -1.0, 1.0))
    assert_same_bits(QDQ2(Parameter(), low, high, range_given=True), QDQ2(X, -1.0, 1.0, range_given=True))
    q = Q(Parameter(), low, high, "int8")
    assert_same_bits(q.output, Q(X, -1.0, 1.0, "int8").output)
    assert_same_bits(DQ(Number(q.output), low, high), DQ(q.output, -1.0, 1.0))
    with pytest.raises(ValueError, match="input_min=1"):
        QDQ2(X, high, low, range_given=True)


def test_equal_options_share_one_trace():
    traces = []

    @functools.partial(jax.jit, static_argnames="num_bits")
    def f(x, low, high, num_bits):
        traces.append(num_bits)
        return VARS(x, low, high, num_bits)

    from jaxquant.tf._fake_quant import _fake_quant

    VARS(X, -1.0, 1.0, 8)
    before = _fake_quant._cache_size()
    for i in range(100):
        f(X, -1.0 - i, 1.0, 8)
        VARS(X, -1.0 - i, 1.0, 8)
        ARGS(X, -1.0 - i, 1.0)
    assert traces == [8]
    assert _fake_quant._cache_size() <= before + 1  # `args` is the one


def test_donation_warns_of_nothing_and_keeps_the_value():
    want = VARS(X, -1.0, 1.0)
    assert_same_bits(jax.jit(VARS, donate_argnums=0)(put(np.array(X)), -1.0, 1.0), want)


def test_threads_get_the_same_bits():
    want, got = VARS(X, -0.7, 0.9), []
    threads = [threading.Thread(target=lambda: got.append(VARS(X, -0.7, 0.9))) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(got) == 8
    for y in got:
        assert_same_bits(y, want)


@pytest.mark.parametrize("op", [ARGS, ARGS_G, VARS, VARS_G, PER, PER_G])
def test_a_tensorflow_call_ports_unchanged(op):
    """The positional order of tf.quantization, `name` last."""
    names = list(inspect.signature(op).parameters)
    want = ["inputs", "min", "max", "num_bits", "narrow_range", "name"]
    assert names == (["gradients", *want] if op in (ARGS_G, VARS_G, PER_G) else want)


@pytest.mark.parametrize("op", [QDQ, QDQ2])
def test_a_tensorflow_call_of_quantize_and_dequantize_ports_unchanged(op):
    parameters = inspect.signature(op).parameters
    want = ["input", "input_min", "input_max", "signed_input", "num_bits", "range_given", "round_mode", "name"]
    assert list(parameters) == [*want, "narrow_range", "axis"]
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ("narrow_range", "axis"))
    assert_same_bits(op(X, -1.0, 1.0, True, 8, True, "HALF_UP", "a_name"), op(X, -1.0, 1.0, True, 8, True, "HALF_UP"))


@pytest.mark.parametrize(
    ("op", "first"), [(Q, ["T", "mode", "round_mode", "name"]), (tf.quantize_v2, ["T", "mode"]), (DQ, ["mode", "name"])]
)
def test_a_tensorflow_call_of_quantize_and_dequantize_alone_ports_unchanged(op, first):
    names = list(inspect.signature(op).parameters)
    assert names[: 3 + len(first)] == ["input", "min_range", "max_range", *first]


def test_a_range_of_any_width_where_that_is_asked_for():
    assert_same_bits(Q(X, -1.0, 1.0, "int8", ensure_minimum_range=0).output, Q(X, -1.0, 1.0, "int8").output)


SHARED = {"num_bits": 8, "narrow_range": False}
OF_ARGS = {"min": -6, "max": 6, **SHARED}
OF_ROUND_TRIP = {"signed_input": True, **SHARED, "range_given": False, "round_mode": "HALF_TO_EVEN", "axis": None}
OF_QUANTIZE = {"mode": "MIN_COMBINED", "round_mode": "HALF_AWAY_FROM_ZERO", "narrow_range": False, "axis": None}
OF_QUANTIZE |= {"ensure_minimum_range": 0.01}
OF_DEQUANTIZE = {"mode": "MIN_COMBINED", "axis": None, "narrow_range": False}
DEFAULTS = [(ARGS, OF_ARGS), (ARGS_G, OF_ARGS), *[(op, SHARED) for op in (VARS, VARS_G, PER, PER_G)]]
DEFAULTS += [(QDQ, OF_ROUND_TRIP), (QDQ2, OF_ROUND_TRIP), (Q, OF_QUANTIZE), (tf.quantize_v2, OF_QUANTIZE)]


@pytest.mark.parametrize(("op", "defaults"), [*DEFAULTS, (DQ, OF_DEQUANTIZE)], ids=lambda v: getattr(v, "__name__", ""))
def test_the_defaults_are_tensorflows(op, defaults):
    parameters = inspect.signature(op).parameters.values()
    given = {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in ("name", "dtype")}
    assert given == defaults


@pytest.mark.parametrize(
    "T", ["int8", "qint8", jnp.int8, np.int8, np.dtype("int8"), types.SimpleNamespace(name="qint8")]
)
def test_a_type_has_many_names(T):
    assert Q(X, -1.0, 1.0, T).output.dtype == jnp.int8


def test_what_cannot_be_an_integer():
    """NaN is the lowest code, infinities saturate, and so does int32, which TensorFlow's cast wraps."""
    x = np.array([np.nan, np.inf, -np.inf], F)

    @jax.jit
    def codes(x):
        of = lambda T, mode="MIN_COMBINED": Q(x, -1.0, 1.0, T, mode).output
        modes = ("MIN_COMBINED", "MIN_FIRST", "SCALED")
        return [of("int8", mode) for mode in modes], of("int32"), of("int32", "MIN_FIRST")

    of_8, of_32, first = codes(x)
    assert [v.tolist() for v in of_8] == [[-128, 127, -128]] * 3
    assert of_32.tolist() == [-(2**31), 2**31 - 1, -(2**31)]
    assert first.tolist() == [-(2**31), 2**31 - 128, -(2**31)]


def test_traced_ranges_of_quantize_are_not_checked_and_one_element_is_a_scalar():
    q = jax.eval_shape(lambda a, b: Q(X, a, b, "int8"), 1.0, -1.0)
    assert q.output.shape == X.shape
    one = jax.jit(lambda a, b: Q(X, a, b, "int8"))(np.full(1, -1, F), np.full(1, 1, F))
    jax.tree.map(assert_same_bits, one, Q(X, -1.0, 1.0, "int8"))
    assert one.output_min.shape == ()


def test_integers_have_no_gradient():
    f = lambda x, a, b: DQ(Q(x, a, b, "int8", "SCALED").output, a, b, "SCALED").sum()
    assert [np.abs(g).max() for g in jax.jit(jax.grad(f, (0, 1, 2)))(X, -1.0, 1.0)] == [0.0, 0.0, 0.0]
