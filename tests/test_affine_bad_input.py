# SPDX-License-Identifier: Apache-2.0
"""What bad input to specs, ranges, affine ops and integer contractions gets, eagerly and while tracing."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import x64

import jaxquant as jq
from jaxquant import PerBlock, PerChannel, PerTensor, QParams, QuantSpec, Range, activation_spec, weight_spec
from jaxquant.typing import Histogram

# All of it made in NumPy: nothing is compiled before something is refused.
F = np.float32
put = jax.device_put
X = put(np.linspace(-1, 1, 24, dtype=F).reshape(4, 6))
V3 = np.ones(3, F)
S, A, STOCHASTIC = QuantSpec(), activation_spec(), QuantSpec(rounding="stochastic")
R, H, HC = (
    Range(-1.0, 1.0),
    *(Histogram(put(np.zeros(shape, np.uint32))) for shape in ((16384,), (4, 1, 16384))),
)


def qarray(shape, spec):
    scale, zero_point = put((F(1), np.zeros((), spec.dtype)))
    return jq.QArray(put(np.ones(shape, spec.dtype)), scale, zero_point, spec, np.dtype(F))


Q = qarray((4, 6), S)
MATMUL = (((1,), (0,)), ((), ()))
IMAGE, KERNEL = qarray((1, 2, 8), A), qarray((3, 2, 3), S)
KEY, NAN = jax.random.wrap_key_data(put(np.zeros(2, np.uint32))), float("nan")
CODES = np.int8([0, 8]), put(np.int8([-3, 0])), put(np.uint8([16]))
of = lambda granularity, **kw: QuantSpec(granularity=granularity, **kw)
fake = functools.partial(jq.fake_quant, X)
conv = functools.partial(jq.conv_general_dilated, IMAGE, KERNEL)
conv_in_2d = functools.partial(jq.conv_general_dilated, *[qarray((1, 1, 4, 6), S)] * 2)
BLOCKS = "Sizes that do: 1, 2, 3, 6."
not_floats = [
    (put(np.arange(3, dtype=np.int32)), "int32"),
    (np.ones(3, bool), "bool"),
    (np.ones(3, complex), "complex128"),
    ([1.0, 2.0], "list"),
    ("text", "str"),
    (None, "NoneType"),
    (KEY, "key"),
    (np.ones(3, jnp.float8_e4m3fn), "float8"),
    (S, "QuantSpec"),
    (Q, "QArray"),
    (1, "int"),
]
not_static = [(8.5, "float"), (True, "bool"), (put(np.int32(2)), "array"), ("2", "str"), (V3, "array")]


def dot_of_length(length, a=S, b=S, **kw):
    def contract(x):
        return jq.dot_general(jq.quantize(x, a), jq.quantize(x, b), (((0,), (0,)), ((), ())), **kw)

    return jax.eval_shape(contract, jax.ShapeDtypeStruct((length,), jnp.float32))


# (call of a traced x, class, the argument's name, what came)
SPECS = [
    *[(lambda x, v=v: QuantSpec(bits=v), TypeError, "`bits`", text) for v, text in [*not_static, (None, "NoneType")]],
    (lambda x: QuantSpec(bits=1), ValueError, "`bits`", "got 1."),
    (lambda x: QuantSpec(bits=17), ValueError, "`bits`", "got 17."),
    (lambda x: QuantSpec(bits=-8), ValueError, "`bits`", "got -8."),
    (lambda x: QuantSpec(bits=x[0, 0].astype(int)), TypeError, "`bits=`", "array"),
    (lambda x: QuantSpec(signed=1), TypeError, "`signed`", "int"),
    (lambda x: QuantSpec(symmetric="yes"), TypeError, "`symmetric`", "str"),
    (lambda x: QuantSpec(symmetric=x[0, 0] > 0), TypeError, "`symmetric`", "bool"),
    (lambda x: QuantSpec(narrow_range=0), TypeError, "`narrow_range`", "int"),
    (lambda x: QuantSpec(rounding="nearest"), ValueError, "`rounding`", "'nearest'"),
    (lambda x: QuantSpec(rounding=None), TypeError, "`rounding`", "NoneType"),
    (lambda x: QuantSpec(scale_rule="half"), ValueError, "`scale_rule`", "'half'"),
    *[
        (lambda x, kw=kw: QuantSpec(scale_rule="half_step", **kw), ValueError, "symmetric integers", said)
        for kw, said in [
            ({"signed": False}, "signed=False"),
            ({"symmetric": False}, "symmetric=False"),
            ({"format": "float4_e2m1fn"}, "format='float4_e2m1fn'"),
            ({"scale_dtype": "float8_e8m0fnu"}, "scale_dtype='float8_e8m0fnu'"),
        ]
    ],
    (lambda x: of(-1), TypeError, "`granularity`", "PerChannel(-1)"),
    (lambda x: of(PerTensor), TypeError, "`granularity`", "PerTensor"),
    (lambda x: of(None), TypeError, "`granularity`", "None"),
    *[(lambda x, v=v: PerChannel(v), TypeError, "`axis`", text) for v, text in not_static],
    *[(lambda x, v=v: PerChannel((0, v)), TypeError, "`axis`", text) for v, text in not_static],
    (lambda x: PerChannel(x[0, 0].astype(int)), TypeError, "`axis`", "int32"),
    (lambda x: PerChannel((0, 0)), ValueError, "`axis`", "(0, 0)"),
    (lambda x: PerChannel(()), ValueError, "`axis`", "()"),
    *[(lambda x, v=v: PerBlock(v, 2), TypeError, "`axis`", text) for v, text in not_static],
    *[(lambda x, v=v: PerBlock((0, v), (2, 2)), TypeError, "`axis`", text) for v, text in not_static],
    *[(lambda x, v=v: PerBlock(0, v), TypeError, "`size`", text) for v, text in [*not_static, (None, "NoneType")]],
    *[
        (lambda x, v=v, n=n: PerBlock(v, n), ValueError, "`size` have one number for each", f"axis={v}")
        for v, n in [((0, 1), 2), (0, (2, 2)), ((0, 1), (2, 2, 2)), ((0, 0), (2, 2)), ((None, 1), (2, 2)), ((), ())]
    ],
    (lambda x: PerBlock(x[0, 0].astype(int), 2), TypeError, "`axis`", "int32"),
    (lambda x: PerBlock(0, x[0, 0].astype(int)), TypeError, "`size`", "int32"),
    (lambda x: PerBlock(0, 0), ValueError, "`size`", "got 0."),
    (lambda x: PerBlock(0, -4), ValueError, "`size`", "got -4."),
    (lambda x: weight_spec("4"), TypeError, "`bits`", "str"),
    (lambda x: weight_spec(granularity=PerTensor()), TypeError, "`granularity`", "channel_axis"),
    (lambda x: weight_spec(channel_axis=2, block_size=4), ValueError, "`channel_axis`", "got 2"),
    (lambda x: weight_spec(channel_axis=(0, 1), block_size=4), ValueError, "`channel_axis`", "(0, 1)"),
    (lambda x: weight_spec(channel_axis=x[0, 0].astype(int), block_size=4), TypeError, "`channel_axis`", "int32"),
    (lambda x: weight_spec(channel_axis=True, block_size=4), TypeError, "`channel_axis`", "bool"),
    (lambda x: weight_spec(channel_axis=V3, block_size=4), TypeError, "`channel_axis`", "float32"),
    (lambda x: weight_spec(channel_axis=0, block_size=0), ValueError, "`size`", "got 0."),
    (lambda x: weight_spec(channel_axis=0, block_size=2.0), TypeError, "`size`", "float"),
    (lambda x: activation_spec(0), ValueError, "`bits`", "got 0."),
    (lambda x: activation_spec(symmetric=V3), TypeError, "`symmetric`", "float32"),
]

takes_x_and_spec = [jq.fit_qparams, jq.observe, jq.histogram, jq.fake_quant, jq.quantize]
SHARED = [
    *[(lambda x, f=f, v=v: f(v, S), TypeError, "`x`", text) for f in takes_x_and_spec for v, text in not_floats],
    *[
        (lambda x, f=f, v=v: f(x, v), kind, name, text)
        for f in takes_x_and_spec
        for v, kind, name, text in [
            (None, TypeError, "`spec`", "NoneType"),
            (8, TypeError, "`spec`", "int"),
            (PerChannel(-1), TypeError, "`spec`", "PerChannel"),
            (QuantSpec, TypeError, "`spec`", "type"),
            (of(PerChannel(2)), ValueError, "PerChannel(2)", "rank 2, shape (4, 6)"),
            (of(PerChannel((0, -3))), ValueError, "PerChannel((-3, 0))", "[-2, 2)"),
            (of(PerChannel((0, -2))), ValueError, "PerChannel((-2, 0))", "twice"),
            (weight_spec(), ValueError, "channel_axis", "shape (4, 6)"),
            (weight_spec(block_size=2), ValueError, "axis", "shape (4, 6)"),
            (of(PerBlock(5, 2)), ValueError, "PerBlock(axis=5, size=2)", "rank 2"),
            (of(PerBlock(-1, 4)), ValueError, "`size`", BLOCKS),
            (of(PerBlock((0, -1), (1, 4))), ValueError, "`size`", BLOCKS),
            (of(PerBlock((0, -2), (1, 1))), ValueError, "names an axis", "twice"),
        ]
    ],
    (lambda x: jq.fake_quant(x[0, 0], of(PerChannel(0))), ValueError, "PerChannel(0)", "rank 0"),
]

RANGES = [
    (lambda x: jq.fit_qparams(x, S, "max"), ValueError, "`method`", "'max'"),
    (lambda x: jq.fit_qparams(x, S, None), TypeError, "`method`", "NoneType"),
    (lambda x: jq.fit_qparams(x, S, x), TypeError, "`method`", "float32"),
    *[
        (lambda x, v=v, f=f: f(v), kind, "`percentile`", text)
        for f in (
            lambda v: jq.fit_qparams(X, S, "percentile", percentile=v),
            functools.partial(jq.range_from_histogram, H),
        )
        for v, kind, text in [
            (0, ValueError, "got 0.0"),
            (101, ValueError, "got 101.0"),
            (NAN, ValueError, "nan"),
            ("99", TypeError, "str"),
            (True, TypeError, "bool"),
            (None, TypeError, "NoneType"),
            (put(F(99)), TypeError, "float32"),
        ]
    ],
    (lambda x: jq.range_from_histogram(H, x[0, 0]), TypeError, "`percentile`", "float32"),
    *[
        (lambda x, f=f: f(x, S, nonfinite="drop"), ValueError, "`nonfinite`", "'drop'")
        for f in (jq.fit_qparams, jq.observe, jq.histogram)
    ],
    (lambda x: jq.observe(x, S, nonfinite=True), TypeError, "`nonfinite`", "bool"),
    *[
        (lambda x, f=f, v=v: f(v), kind, "`bits`", text)
        for f in (
            lambda v: jq.fit_qparams(X, QuantSpec(bits=4), bits=v),
            lambda v: jq.qparams_from_range(Range(-1.0, 1.0), QuantSpec(bits=4), bits=v),
            lambda v: jq.fake_quant(X, QuantSpec(bits=4), bits=v),
        )
        for v, kind, text in [
            (1, ValueError, "got 1."),
            (5, ValueError, "got 5."),
            ("4", TypeError, "'4'"),
            (4.0, TypeError, "4.0"),
            (True, TypeError, "True"),
            (put(F(4)), TypeError, "float32"),
            (put(np.int32([2, 3])), ValueError, "(2,)"),
        ]
    ],
    (lambda x: jq.fit_qparams(x, S, bits=x[0, 0]), TypeError, "`bits`", "float32"),
    *[
        (lambda x, r=r: jq.qparams_from_range(r, S), TypeError, name, text)
        for v, text in not_floats[:-1]
        for r, name in ((Range(v, V3), "`x_min`"), (Range(-V3, v), "`x_max`"))
    ],
    (lambda x: jq.qparams_from_range((-1.0, 1.0), S), TypeError, "`r`", "tuple"),
    (lambda x: jq.qparams_from_range({"a": {"b": -V3}}, S), TypeError, "at 'a' at 'b'", "Range(x_min, x_max)"),
    (lambda x: jq.qparams_from_range(Range(-1.0, True), S), TypeError, "`x_max`", "bool"),
    (lambda x: jq.qparams_from_range(Range(-1.0, 10**400), S), ValueError, "`x_max`", "beyond float64"),
    (lambda x: jq.qparams_from_range(Range(-1.0, V3), S), ValueError, "`x_max`", "(3,)"),
    (lambda x: jq.qparams_from_range(Range(x, V3), S), ValueError, "`x_max`", "(3,)"),
    (lambda x: jq.qparams_from_range(Range(-1.0, 1.0), None), TypeError, "`spec`", "NoneType"),
    *[
        (lambda x, f=f, a=a, b=b: f(a, b), kind, name, text)
        for f in (jq.merge, functools.partial(jq.ema_ranges, decay=0.5))
        for a, b, kind, name, text in [
            (R, (-1.0, 1.0), TypeError, "`b`", "tuple"),
            (None, R, TypeError, "`a`", "NoneType"),
            ({"k": R}, R, TypeError, "`a`", "dict"),
            ({"k": R}, {"l": R}, ValueError, "`a`", "['k'] in `a`"),
            ({"k": {"m": R}}, {"k": {"n": R, "m": R}}, ValueError, "at 'k'", "['n'] in `b`"),
            ({"k": R}, {"k": [R]}, TypeError, "at 'k'", "list"),
            (R, Range(-V3, V3), ValueError, "x_min of b", "(3,)"),
            (Range(-V3, 1.0), Range(-V3, V3), ValueError, "x_max of b", "(3,)"),
            (Range(put(np.int32(-1)), 1.0), R, TypeError, "`x_min`", "int32"),
            (Range(None, None), R, TypeError, "`x_min`", "NoneType"),
            (R, Range(-1.0, "1"), TypeError, "`x_max`", "str"),
        ]
    ],
    *[
        (lambda x, v=v: jq.ema_ranges(R, R, v), kind, "`decay`", text)
        for v, kind, text in [
            (2.0, ValueError, "got 2.0"),
            (-0.1, ValueError, "got -0.1"),
            (NAN, ValueError, "got nan"),
            (V3, ValueError, "(3,)"),
            (True, TypeError, "bool"),
            ("0.9", TypeError, "str"),
            (None, TypeError, "NoneType"),
            (put(np.int32(1)), TypeError, "int32"),
        ]
    ],
    (lambda x: jq.merge(H, HC), ValueError, "`b`", "(4, 1, 16384)"),
    (lambda x: jq.merge(H, H.counts), TypeError, "`b`", "Array"),
    (lambda x: jq.merge(None, H), TypeError, "`a`", "NoneType"),
    (lambda x: jq.merge(Histogram(None), H), TypeError, "`a`", "NoneType"),
    (lambda x: jq.merge(H, Histogram(np.ones(16384, F))), TypeError, "`b`", "float32"),
    (lambda x: jq.range_from_histogram(X), TypeError, "`h`", "Array"),
    (lambda x: jq.range_from_histogram(Histogram(V3.astype(np.uint32))), ValueError, "`h`", "(3,)"),
]

AFFINE = [
    *[
        (lambda x, f=f, v=v: f(x, S, v), kind, name, text)
        for f in (jq.fake_quant, jq.quantize)
        for v, kind, name, text in [
            ((0.1, 0.0), TypeError, "`qparams`", "tuple"),
            (0.1, TypeError, "`qparams`", "float"),
            (R, TypeError, "`qparams`", "Range"),
            ({"scale": 0.1}, TypeError, "`qparams`", "dict"),
            (QParams(V3, V3), ValueError, "`qparams.scale`", "(3,)"),
            (QParams(0.1, V3), ValueError, "`qparams.zero_point`", "(3,)"),
            (QParams(*[np.ones((1, 1, 1), F)] * 2), ValueError, "`qparams.scale`", "(1, 1, 1)"),
            (QParams(None, 0.0), TypeError, "`qparams.scale`", "NoneType"),
            (QParams("1", 0.0), TypeError, "`qparams.scale`", "str"),
            (QParams(put(np.int32(1)), 0.0), TypeError, "`qparams.scale`", "int32"),
            (QParams(0.1, True), TypeError, "`qparams.zero_point`", "bool"),
            (QParams(0.1, [0.0]), TypeError, "`qparams.zero_point`", "list"),
        ]
    ],
    (lambda x: fake(S, (0.1, 0.0), bits=4), TypeError, "`qparams`", "tuple"),
    (lambda x: jq.fake_quant(x, of(PerChannel(-1)), QParams(0.1, 0.0)), ValueError, "`qparams.scale`", "(1, 6)"),
    (lambda x: jq.fake_quant(x, of(PerChannel(0)), QParams(x[0], x[0])), ValueError, "`qparams.scale`", "(4, 1)"),
    (lambda x: jq.fake_quant(x, of(PerBlock(1, 3)), QParams(x, x)), ValueError, "`qparams.scale`", "(4, 2)"),
    (lambda x: fake(of(PerChannel(-1)), QParams(x[:1], x[0])), ValueError, "`qparams.zero_point`", "(6,)"),
    (lambda x: jq.fake_quant(x, STOCHASTIC), ValueError, "`key`", "None"),
    (lambda x: jq.quantize(x, STOCHASTIC), ValueError, "`key`", "None"),
    (lambda x: jq.fake_quant(x, S, key=KEY), ValueError, "`key`", "QuantSpec(bits=8)"),
    (lambda x: jq.fake_quant(x, STOCHASTIC, key=3), TypeError, "`key`", "int"),
    (lambda x: jq.fake_quant(x, STOCHASTIC, key="3"), TypeError, "`key`", "str"),
    (lambda x: jq.quantize(x, STOCHASTIC, key=V3), TypeError, "`key`", "float32"),
    (
        lambda x: jq.quantize(x, STOCHASTIC, key=jax.random.wrap_key_data(put(np.zeros((2, 2), np.uint32)))),
        ValueError,
        "`key`",
        "(2,)",
    ),
    *[
        (lambda x, v=v: jq.dequantize(v), TypeError, "`q`", text)
        for v, text in [(X, "float32"), (None, "NoneType"), ((1, 2), "tuple"), (S, "QuantSpec")]
    ],
    *[(lambda x, v=v: jq.scale_gradient(v, 0.5), TypeError, "`x`", text) for v, text in not_floats],
    *[(lambda x, v=v: jq.scale_gradient(x, v), TypeError, "`factor`", text) for v, text in not_floats[:-1]],
    (lambda x: jq.scale_gradient(x, V3), ValueError, "`factor`", "(3,)"),
    *[
        (lambda x, f=f, v=v: f(v), kind, "`bits`", text)
        for f in (
            lambda v: jq.pack(np.zeros(3, np.int8), v),
            lambda v: jq.unpack(np.zeros(2, np.uint8), v, (4,)),
        )
        for v, kind, text in [
            (0, ValueError, "got 0."),
            (5, ValueError, "got 5."),
            *[(v, TypeError, text) for v, text in not_static],
        ]
    ],
    (lambda x: jq.pack(x, 4), TypeError, "`values`", "float32"),
    (lambda x: jq.pack([1, 2], 4), TypeError, "`values`", "list"),
    (lambda x: jq.pack(Q, 4), TypeError, "`values`", "QArray"),
    (lambda x: jq.pack(np.zeros(3, np.int16), 4), TypeError, "`values`", "int16"),
    (lambda x: jq.pack(CODES[0], 4), ValueError, "`values`", "[0, 8]"),
    (lambda x: jq.pack(CODES[1], 2), ValueError, "`values`", "[-3, 0]"),
    (lambda x: jq.pack(CODES[2], 4), ValueError, "`values` must be in [0, 15]", "[16, 16]"),
    (lambda x: jq.unpack(np.zeros(2, np.int8), 4, (4,)), TypeError, "`packed`", "int8"),
    (lambda x: jq.unpack([1, 2], 4, (4,)), TypeError, "`packed`", "list"),
    (lambda x: jq.unpack(np.zeros(3, np.uint8), 4, (4,)), ValueError, "`packed`", "(3,)"),
    (lambda x: jq.unpack(np.zeros((2, 1), np.uint8), 4, (4,)), ValueError, "`packed`", "(2, 1)"),
    (lambda x: jq.unpack(np.zeros(2, np.uint8), 4, 4), TypeError, "`shape`", "int"),
    (lambda x: jq.unpack(np.zeros(2, np.uint8), 4, (4.0,)), TypeError, "`shape`", "float"),
    (lambda x: jq.unpack(np.zeros(0, np.uint8), 4, (-1,)), ValueError, "`shape`", "(-1,)"),
    (lambda x: jq.unpack(np.zeros(2, np.uint8), 4, (4,), jnp.int16), ValueError, "`dtype`", "int16"),
    (lambda x: jq.unpack(np.zeros(2, np.uint8), 4, (4,), None), ValueError, "`dtype`", "None"),
]

INTEGERS = [
    *[
        (lambda x, v=v: jq.dot_general(v, Q, MATMUL), TypeError, "`a`", t)
        for v, t in [(Q.values, "int8"), (None, "None")]
    ],
    *[
        (lambda x, v=v: jq.dot_general(Q, v, MATMUL), TypeError, "`b`", t)
        for v, t in [(Q.values, "int8"), (None, "None")]
    ],
    (lambda x: jq.dot_general(X, X.T, MATMUL), TypeError, "`a`", "float32"),
    (lambda x: jq.dot_general(X, Q, MATMUL, execution="tpu"), ValueError, "`execution`", "'tpu'"),
    (lambda x: jq.dot_general(Q, Q, MATMUL), ValueError, "`a`", "(6,) of `a`, shape (4, 6), and (4,) of `b`"),
    (lambda x: jq.dot_general(Q, Q, (((1,), (1,)), ((0,), (0, 1)))), ValueError, "`dimension_numbers", "(1, 0, 1)"),
    (lambda x: jq.dot_general(Q, Q, (((1, 1), (1, 1)), ((), ()))), ValueError, "`dimension_numbers", "(1, 1)"),
    (lambda x: jq.dot_general(Q, Q, (((2,), (1,)), ((), ()))), ValueError, "`dimension_numbers of a`", "(2,)"),
    (lambda x: jq.dot_general(Q, Q, (((1,), (-1,)), ((), ()))), ValueError, "`dimension_numbers of b`", "(-1,)"),
    (lambda x: jq.dot_general(Q, Q, (((1.0,), (1,)), ((), ()))), TypeError, "`dimension_numbers of a`", "float"),
    (lambda x: jq.dot_general(Q, Q, ((1,), (1,))), TypeError, "`dimension_numbers`", "((1,), (1,))"),
    (lambda x: jq.dot_general(Q, Q, (((1,), (1,), ()), ((), ()))), TypeError, "`dimension_numbers`", "(1,), ())"),
    (lambda x: jq.dot_general(Q, Q, None), TypeError, "`dimension_numbers`", "None"),
    (lambda x: jq.dot_general(Q, Q, ((1, 1), ((), ()))), TypeError, "`dimension_numbers`", "((1, 1), ((), ()))"),
    (lambda x: jq.dot_general(Q, Q, (((1,), (1,)), ((), ())), execution="int4"), ValueError, "`execution`", "'int4'"),
    (lambda x: jq.dot_general(Q, Q, (((1,), (1,)), ((), ())), execution=8), TypeError, "`execution`", "int"),
    (lambda x: dot_of_length(133145), ValueError, "int32", "133145 products"),
    (lambda x: dot_of_length(66312, A), ValueError, "int32", "66312 products"),
    (lambda x: dot_of_length(132105, QuantSpec(bits=16)), ValueError, "digits", "132105 products"),
    (
        lambda x: jq.dot_general(jq.quantize(x, of(PerChannel(1))), Q, (((1,), (1,)), ((), ()))),
        ValueError,
        "Axis 1 of `a`",
        "PerChannel(1)",
    ),
    (lambda x: jq.conv_general_dilated(KERNEL.values, KERNEL, (1,), "SAME"), TypeError, "`a`", "int8"),
    (lambda x: jq.conv_general_dilated(IMAGE, None, (1,), "SAME"), TypeError, "`b`", "NoneType"),
    (lambda x: jq.conv_general_dilated(Q, KERNEL, (1,), "SAME"), ValueError, "`a`", "(4, 6) and (3, 2, 3)"),
    (lambda x: jq.conv_general_dilated(*[jq.quantize(x[0], S)] * 2, (), ()), ValueError, "`a`", "(6,) and (6,)"),
    (lambda x: conv((1,), "SAME", (2,)), ValueError, "`padding`", "'SAME'"),
    (lambda x: conv((1,), "BOTH"), ValueError, "`padding`", "'BOTH'"),
    (lambda x: conv((1,), None), TypeError, "`padding`", "None"),
    (lambda x: conv((1,), ((0.5, 1.5),)), TypeError, "`padding`", "float"),
    (lambda x: conv((1,), (1,)), TypeError, "`padding`", "(1,)"),
    (lambda x: conv_in_2d((1, 1), ((1, 1), 1)), TypeError, "`padding`", "((1, 1), 1)"),
    (lambda x: conv((1,), ((1, 1, 1),)), TypeError, "`padding`", "((1, 1, 1),)"),
    (lambda x: conv((1,), ((1, 1), (0, 0))), TypeError, "`padding`", "((1, 1), (0, 0))"),
    (lambda x: conv((1,), ((x[0, 0].astype(int), 0),)), TypeError, "`padding`", "int32"),
    (lambda x: conv(1, "SAME"), TypeError, "`window_strides`", "int"),
    (lambda x: conv((0,), "SAME"), ValueError, "`window_strides`", "(0,)"),
    (lambda x: conv((1, 1), "SAME"), ValueError, "`window_strides`", "(1, 1)"),
    (lambda x: conv_in_2d((1, 0), "SAME"), ValueError, "`window_strides`", "(1, 0)"),
    (lambda x: conv_in_2d((1, 1), "SAME", (2, 1)), ValueError, "`padding`", "(2, 1)"),
    (lambda x: conv((1,), "SAME", rhs_dilation=2), TypeError, "`rhs_dilation`", "int"),
    (lambda x: conv((1,), ((0, 0),), lhs_dilation=2), TypeError, "`lhs_dilation`", "int"),
    (lambda x: conv((1,), "SAME", execution="fast"), ValueError, "`execution`", "'fast'"),
    *[
        (lambda x, a=a, b=b: conv_of(x, a, b), ValueError, name, "contracted axis")
        for a, b, name in [
            (of(PerChannel(1)), S, "`a`"),
            (S, of(PerChannel(2)), "`b`"),
            (of(PerBlock(1, 2)), S, "`a`"),
            (S, of(PerBlock(1, 2)), "`b`"),
        ]
    ],
]


def conv_of(x, a, b):
    x = x.reshape(1, 4, 6)
    return jq.conv_general_dilated(jq.quantize(x, a), jq.quantize(x, b), (1,), "SAME")


TABLE = {"specs": SPECS, "shared": SHARED, "ranges": RANGES, "affine": AFFINE, "integers": INTEGERS}
rows = pytest.mark.parametrize(
    ("call", "error", "argument", "came"),
    [pytest.param(*row, id=f"{name}-{i}-{row[2]}-{row[3]}") for name, t in TABLE.items() for i, row in enumerate(t)],
)


@rows
def test_bad_input_is_refused(call, error, argument, came):
    for run in (lambda: call(X), lambda: jax.eval_shape(call, X)):
        with pytest.raises(error) as info:
            run()
        assert argument in str(info.value)
        assert came in str(info.value)
        assert re.search(r"[.)\]}] [A-Z]|: ", str(info.value)), "no second sentence that says what to do"


def test_values_must_be_concrete_to_be_checked():
    for f in (jq.fit_qparams, jq.observe, jq.histogram):
        with pytest.raises(TypeError, match=r'`nonfinite="raise"`.*traced array. Call it outside of jit'):
            jax.eval_shape(lambda x, f=f: f(x, S, nonfinite="raise"), X)


def test_float64_is_not_narrowed_silently():
    with x64():
        wide, narrow = put(np.float64(0.5)), put(np.ones(3, F))
        calls = {
            "qparams.scale": lambda: jq.fake_quant(narrow, S, QParams(wide, 0.0)),
            "qparams.zero_point": lambda: jq.quantize(narrow, S, QParams(0.5, wide)),
            "x_min": lambda: jq.qparams_from_range(Range(wide, 1.0), S),
            "x_max": lambda: jq.merge(R, Range(-1.0, wide)),
            "decay": lambda: jq.ema_ranges(R, R, wide),
            "factor": lambda: jq.scale_gradient(narrow, wide),
        }
        for name, call in calls.items():
            with pytest.raises(TypeError, match=rf"`{name}` is float64, expected float32.*astype"):
                call()


def test_leading_axes_of_size_1_may_be_missing_in_qparams():
    for spec, shapes in (S, [(), (1,), (1, 1)]), (of(PerChannel(-1)), [(6,), (1, 6)]):
        for v in (np.ones(shape, F) for shape in shapes):
            assert jax.eval_shape(lambda x, v=v, spec=spec: jq.fake_quant(x, spec, QParams(v, v)), X).shape == X.shape


def test_a_type_has_more_than_one_name():
    packed = put(np.uint8([0xF1]))
    for dtype in (jnp.int8, np.int8, np.dtype("int8"), "int8"):
        assert jq.unpack(packed, 4, (2,), dtype).tolist() == [1, -1]
