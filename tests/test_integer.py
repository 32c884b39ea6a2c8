# SPDX-License-Identifier: Apache-2.0
"""Contractions of quantized arrays against int64: the same bits in int8 and in float32, on every road."""

import dataclasses
import functools
import itertools
import math
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits, differing
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import cases, in_turn

from jaxquant import (
    PerBlock,
    PerChannel,
    QArray,
    QParams,
    QuantSpec,
    conv_general_dilated,
    dequantize,
    dot_general,
    fake_quant,
    quantize,
    weight_spec,
)
from jaxquant._affine import quantize_straight_through
from jaxquant._integer._contract import contract
from jaxquant._integer._dot import Dot
from jaxquant._spec import qparams_shape

pytestmark = pytest.mark.bits

MATMUL = (((1,), (0,)), ((), ()))
NHWC = ("NHWC", "HWIO", "NHWC")
EXECUTIONS = "int8", "float32"
both_executions = pytest.mark.parametrize("execution", EXECUTIONS)
TYPES = {
    "symmetric": QuantSpec(),
    "affine": QuantSpec(symmetric=False),
    "unsigned symmetric": QuantSpec(signed=False),
    "unsigned affine": QuantSpec(signed=False, symmetric=False),
    "wide": QuantSpec(narrow_range=False),
    "4 bits": QuantSpec(bits=4),
    "3 bits affine": QuantSpec(bits=3, symmetric=False),
}


def per_channel(spec, axis):
    return QuantSpec(**{**vars(spec), "granularity": PerChannel(axis)})


def array(rng, shape, spec, extreme=False):
    """A QArray of random values, or of the ends of the grid alone, with random scales and zero points."""
    values = rng.integers(spec.qmin, spec.qmax + 1, shape)
    if extreme:
        values = np.where(rng.random(shape) < 0.9, spec.qmax, spec.qmin)
    groups = qparams_shape(spec, shape)
    scale = np.exp(rng.normal(size=groups)).astype(np.float32)
    zero = np.zeros(groups) if spec.symmetric else rng.integers(spec.qmin, spec.qmax + 1, groups)
    if extreme and not spec.symmetric:
        zero = np.full(groups, spec.qmin)
    # Not by jnp.asarray, which compiles a program for each shape.
    return QArray(*map(jax.device_put, (values.astype(spec.dtype), scale, zero.astype(spec.dtype))), spec, jnp.float32)


def spread(v, shape):
    v = np.asarray(v).reshape((1,) * (len(shape) - np.ndim(v)) + np.shape(v))
    for axis, n in enumerate(shape):
        v = np.repeat(v, n // v.shape[axis], axis) if v.shape[axis] else v
    return v


def centred(q):
    return np.asarray(q.values).astype(np.int64) - spread(q.zero_point, q.shape)


def matmul64(a, b):
    """The value of a matmul without blocks, from int64."""
    scale = spread(a.scale, a.shape)[:, :1] * spread(b.scale, b.shape)[:1]
    return (centred(a) @ centred(b)).astype(np.float32) * scale


OF_B = "symmetric", "unsigned affine", "4 bits"


@cases(
    ("of_a", "of_b", "execution"),
    itertools.product(TYPES, OF_B, EXECUTIONS),
    in_turn(itertools.product(TYPES, OF_B), EXECUTIONS),
)
def test_matmul(of_a, of_b, execution, compared):
    rng = np.random.default_rng([0, *of_a.encode(), *of_b.encode()])
    for extreme in (False, True):
        a = array(rng, (5, 1100), per_channel(TYPES[of_a], 0), extreme)
        b = array(rng, (1100, 7), per_channel(TYPES[of_b], -1), extreme)
        got = dot_general(a, b, MATMUL, execution=execution)
        differ = differing(got, matmul64(a, b))
        compared("int64", f"dot_general, {execution}", got.size, differ)
        assert differ == 0


def test_a_matmul_of_unsigned_16_bits():
    rng, wide = np.random.default_rng(3), QuantSpec(bits=16, signed=False, symmetric=False)
    a, b = array(rng, (5, 60), wide), array(rng, (60, 7), per_channel(TYPES["unsigned affine"], -1))
    assert_same_bits(dot_general(a, b, MATMUL), matmul64(a, b))


@cases(
    ("length", "of_a", "execution"),
    itertools.product([1, 519, 1041, 16384], ["symmetric", "affine"], EXECUTIONS),
    [
        *itertools.product([519, 1041], ["affine"], EXECUTIONS),
        (1, "affine", "float32"),
        (519, "symmetric", "float32"),
        (16384, "affine", "int8"),
        (16384, "symmetric", "float32"),
    ],
)
def test_every_length(length, of_a, execution, compared):
    """Past 518 and 1040 products one float32 sum would round."""
    rng = np.random.default_rng(length)
    for extreme in (False, True):
        a, b = array(rng, (32, length), TYPES[of_a], extreme), array(rng, (length, 48), weight_spec(8, -1), extreme)
        got = dot_general(a, b, MATMUL, execution=execution)
        differ = differing(got, matmul64(a, b))
        compared("int64", f"dot_general, {execution}, long", got.size, differ)
        assert differ == 0


def test_one_float32_sum_would_not_do():
    rng = np.random.default_rng(1)
    a, b = array(rng, (32, 16384), TYPES["affine"], True), array(rng, (16384, 48), weight_spec(8, -1), True)
    acc = jnp.asarray(centred(a), jnp.float32) @ jnp.asarray(centred(b), jnp.float32)
    assert differing(acc * (a.scale * b.scale), matmul64(a, b)) > 0


DIMENSIONS = [
    ((4, 2, 6, 3), (3, 4, 6, 5), (((2,), (2,)), ((0, 3), (1, 0)))),
    ((4, 2, 6, 3), (3, 4, 6, 5), (((2, 3), (2, 0)), ((), ()))),
    ((3, 700, 2), (700, 2, 3), (((1, 2), (0, 1)), ((0,), (2,)))),
    ((7,), (7,), (((0,), (0,)), ((), ()))),
    ((2, 3, 7), (5, 7), (((2,), (1,)), ((), ()))),
    ((7, 5), (4, 7, 3), (((0,), (1,)), ((), ()))),
    ((3, 2), (4,), (((), ()), ((), ()))),
    ((3, 4), (3, 4), (((), ()), ((0, 1), (0, 1)))),
    ((2, 0), (0, 3), MATMUL),
    ((0, 2), (2, 3), MATMUL),
    ((), (), (((), ()), ((), ()))),
]


def sum_of_products(a, b, dimension_numbers):
    """In NumPy: the batch axes first, then the others of `a`, then those of `b`."""
    (contracted_a, contracted_b), (batch_a, batch_b) = dimension_numbers
    names_a = list(string.ascii_lowercase[: a.ndim])
    names_b = list(string.ascii_uppercase[: b.ndim])
    for of_a, of_b in zip((*contracted_a, *batch_a), (*contracted_b, *batch_b), strict=True):
        names_b[of_b] = names_a[of_a]
    batch = [names_a[i] for i in batch_a]
    free_a = [name for i, name in enumerate(names_a) if i not in (*contracted_a, *batch_a)]
    free_b = [name for i, name in enumerate(names_b) if i not in (*contracted_b, *batch_b)]
    return np.einsum(f"{''.join(names_a)},{''.join(names_b)}->{''.join(batch + free_a + free_b)}", a, b)


@cases(
    ("shape_a", "shape_b", "dimension_numbers", "of", "execution"),
    [
        (*case, of, execution)
        for case in DIMENSIONS
        for of in ("symmetric", "unsigned affine")
        for execution in EXECUTIONS
    ],
    [(*case, "unsigned affine", execution) for case, execution in zip(DIMENSIONS, itertools.cycle(EXECUTIONS))],
)
def test_dimension_numbers(shape_a, shape_b, dimension_numbers, of, execution):
    rng = np.random.default_rng(2)
    a, b = array(rng, shape_a, TYPES[of]), array(rng, shape_b, TYPES[of])
    exact = sum_of_products(centred(a), centred(b), dimension_numbers)
    want = exact.astype(np.float32) * (np.asarray(a.scale) * np.asarray(b.scale))
    assert_same_bits(dot_general(a, b, dimension_numbers, execution=execution), want)


@both_executions
def test_scales_along_batch_and_free_axes(execution):
    rng = np.random.default_rng(3)
    a = array(rng, (4, 6, 9), QuantSpec(symmetric=False, granularity=PerChannel((0, 1))))
    b = array(rng, (9, 5, 4), QuantSpec(symmetric=False, granularity=PerChannel((1, 2))))
    exact = np.einsum("bmk,knb->bmn", centred(a), centred(b)).astype(np.float32)
    scale = np.asarray(a.scale).reshape(4, 6, 1) * np.asarray(b.scale)[0].T.reshape(4, 1, 5)
    got = dot_general(a, b, (((2,), (0,)), ((0,), (2,))), execution=execution)
    assert_same_bits(got, exact * scale)


def in_blocks(a, b, size):
    """The value of a matmul whose scales change every `size` along the contraction, summed in order."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(0, a.shape[1], size):
        acc = (centred(a)[:, k : k + size] @ centred(b)[k : k + size]).astype(np.float32)
        total = total + acc * (spread(a.scale, a.shape)[:, k : k + 1] * spread(b.scale, b.shape)[k : k + 1])
    return total


@both_executions
@pytest.mark.parametrize(
    ("of_a", "of_b", "size"),
    [
        (QuantSpec(symmetric=False), weight_spec(4, -1, 16), 16),
        (QuantSpec(granularity=PerBlock(1, 32)), weight_spec(4, -1, 48), 16),
        (QuantSpec(symmetric=False, granularity=PerBlock(1, 8)), QuantSpec(granularity=PerChannel(-1)), 8),
        (QuantSpec(granularity=PerChannel(0)), QuantSpec(granularity=PerBlock(1, 2)), 1),  # blocks on a free axis
        (QuantSpec(granularity=PerBlock(1, 96)), weight_spec(4, -1, 96), 96),
        (QuantSpec(granularity=PerBlock(1, 16)), QuantSpec(bits=4, granularity=PerBlock((0, 1), (16, 5))), 16),
        (QuantSpec(granularity=PerBlock((0, 1), (3, 32))), QuantSpec(granularity=PerBlock((0, 1), (96, 2))), 32),
    ],
    ids=str,
)
def test_blocks(of_a, of_b, size, execution):
    rng = np.random.default_rng(4)
    a, b = array(rng, (6, 96), of_a), array(rng, (96, 10), of_b)
    if size == 1:
        with pytest.raises(ValueError, match="a scale of its own for each element"):
            dot_general(a, b, MATMUL, execution=execution)
    else:
        assert_same_bits(dot_general(a, b, MATMUL, execution=execution), in_blocks(a, b, size))


@both_executions
def test_blocks_along_two_contracted_axes(execution):
    rng = np.random.default_rng(5)
    a, b = array(rng, (3, 1, 8), QuantSpec()), array(rng, (1, 8, 5), QuantSpec(granularity=PerBlock(1, 4)))
    a2, b2 = (QArray(q.values.reshape(s), q.scale.reshape(t), q.zero_point.reshape(t), q.spec, q.dtype)
              for q, s, t in ((a, (3, 8), ()), (b, (8, 5), (2, 5))))  # fmt: skip
    got = dot_general(a, b, (((1, 2), (0, 1)), ((), ())), execution=execution)
    assert_same_bits(got, in_blocks(a2, b2, 4))


@cases(
    ("bits_a", "bits_b", "length", "execution"),
    [(*case, execution) for case in [(16, 8, 516), (12, 12, 128), (9, 4, 3000)] for execution in EXECUTIONS],
    [(16, 8, 516, "int8"), (12, 12, 128, "float32"), (9, 4, 3000, "int8")],
)
def test_values_wider_than_8_bits(bits_a, bits_b, length, execution):
    rng = np.random.default_rng(6)
    a = array(rng, (4, length), QuantSpec(bits=bits_a, granularity=PerChannel(0)), True)
    b = array(rng, (length, 5), QuantSpec(bits=bits_b), True)
    assert_same_bits(dot_general(a, b, MATMUL, execution=execution), matmul64(a, b))


def test_the_longest_contraction_is_where_int32_ends():
    shape = lambda n, spec: jax.eval_shape(lambda: array_of_ones(n, spec))
    wide = QuantSpec(narrow_range=False)
    pairs = (
        (QuantSpec(), QuantSpec(), 133_144),
        (QuantSpec(symmetric=False), QuantSpec(), 66_311),
        (wide, wide, 131_071),
    )
    for a, b, longest in pairs:
        dot = lambda a, b: dot_general(a, b, (((0,), (0,)), ((), ())))
        jax.eval_shape(dot, shape(longest, a), shape(longest, b))
        with pytest.raises(ValueError, match=f"more than {longest} of them"):
            jax.eval_shape(dot, shape(longest + 1, a), shape(longest + 1, b))


def array_of_ones(n, spec):
    zero = jnp.zeros((), spec.dtype)
    return QArray(jnp.ones(n, spec.dtype), jnp.float32(1), zero, spec, jnp.float32)


CONVOLUTIONS = [
    dict(zip(("groups", "a_dilation", "b_dilation", "strides", "padding"), c, strict=True))
    for c in itertools.product(
        [1, 2], [(1, 1), (2, 1)], [(1, 1), (1, 2)], [(1, 1), (2, 1)], [((1, 1), (2, 0)), ((0, 3), (-1, 1))]
    )
]


def conv64(a, b, strides, padding, a_dilation, b_dilation, dimensions, groups=1, batch_groups=1):
    """One output at a time, NHWC and HWIO: nothing of XLA."""
    x, w = centred(a), centred(b)
    n, h, wd, c = x.shape
    dilated = np.zeros((n, (h - 1) * a_dilation[0] + 1, (wd - 1) * a_dilation[1] + 1, c), np.int64)
    dilated[:, :: a_dilation[0], :: a_dilation[1]] = x
    crop = tuple(slice(max(-low, 0), dilated.shape[i + 1] - max(-high, 0)) for i, (low, high) in enumerate(padding))
    pads = [(0, 0), *((max(low, 0), max(high, 0)) for low, high in padding), (0, 0)]
    dilated = np.pad(dilated[:, crop[0], crop[1]], pads)
    kh, kw, per_group, outputs = w.shape
    height, width = ((dilated.shape[i + 1] - (w.shape[i] - 1) * b_dilation[i] - 1) // strides[i] + 1 for i in range(2))
    acc = np.zeros((n // batch_groups, height, width, outputs), np.int64)
    for o, i, j, k, m in itertools.product(range(outputs), range(kh), range(kw), range(height), range(width)):
        group = o * groups // outputs
        examples = slice(None)
        if batch_groups > 1:
            size = n // batch_groups
            examples = slice(o * batch_groups // outputs * size, (o * batch_groups // outputs + 1) * size)
        inputs = dilated[examples, k * strides[0] + i * b_dilation[0], m * strides[1] + j * b_dilation[1]]
        acc[:, k, m, o] += inputs[:, group * per_group : (group + 1) * per_group] @ w[i, j, :, o]
    return acc.astype(np.float32) * (np.asarray(a.scale) * np.asarray(b.scale))


OPERANDS = "symmetric", "affine", "unsigned affine, per example"


@cases(
    ("n", "of"),
    itertools.product(range(0, len(CONVOLUTIONS), 5), OPERANDS),
    in_turn([(n,) for n in range(0, len(CONVOLUTIONS), 5)], OPERANDS[::-1]),
)
def test_convolution(n, of, compared):
    options = CONVOLUTIONS[n]
    rng = np.random.default_rng([7, *of.encode()])
    spec = QuantSpec(signed="unsigned" not in of, symmetric=of == "symmetric")
    spec = per_channel(spec, 0) if "example" in of else spec
    a = array(rng, (2, 6, 7, 8), spec)
    b = array(rng, (3, 2, 8 // options["groups"], 6), per_channel(TYPES["affine" if spec.signed else "symmetric"], -1))
    args = *(options[k] for k in ("strides", "padding", "a_dilation", "b_dilation")), NHWC, options["groups"]
    want = conv64(a, b, *args)
    for execution in ("int8", "float32"):
        got = conv_general_dilated(a, b, *args, execution=execution)
        differ = differing(got, want)
        compared("int64", f"conv_general_dilated, {execution}", got.size, differ)
        assert differ == 0


@both_executions
@pytest.mark.parametrize(
    ("shape_a", "shape_b", "groups"),
    [((1, 4, 5, 128), (3, 3, 128, 4), 1), ((1, 4, 4, 256), (3, 3, 128, 4), 2), ((1, 1, 700, 2), (1, 600, 2, 2), 1)],
    ids=["features", "groups", "window"],
)
def test_convolutions_that_one_float32_sum_does_not_hold(shape_a, shape_b, groups, execution):
    rng = np.random.default_rng(8)
    a, b = array(rng, shape_a, TYPES["affine"], True), array(rng, shape_b, weight_spec(8, -1), True)
    args = (1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1), NHWC, groups
    assert_same_bits(conv_general_dilated(a, b, *args, execution=execution), conv64(a, b, *args))


def test_a_convolution_of_16_bits_with_8():
    rng = np.random.default_rng(9)
    a, b = array(rng, (2, 5, 4, 3), QuantSpec(bits=16)), array(rng, (3, 2, 3, 4), weight_spec(8, -1))
    args = (1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1), NHWC
    assert_same_bits(conv_general_dilated(a, b, *args), conv64(a, b, *args))


PADDINGS = ((0, 0), (-1, 1)), ((0, 0), (5, 5))  # negative, and wider than the window


@cases(
    ("padding", "execution"),
    [(padding, execution) for padding in PADDINGS for execution in EXECUTIONS],
    [(PADDINGS[0], "float32"), (PADDINGS[1], "int8")],
)
def test_padding_that_xla_gets_wrong(padding, execution):
    """In float32 without dilation (openxla/xla 48713), also in the gradient."""
    rng = np.random.default_rng(13)
    a, b = array(rng, (2, 5, 9, 8), TYPES["symmetric"]), array(rng, (3, 2, 8, 6), TYPES["symmetric"])
    a, b = (dataclasses.replace(q, scale=jnp.float32(0.5)) for q in (a, b))
    args = (1, 1), padding, (1, 1), (1, 1), NHWC
    want = conv64(a, b, *args)
    assert_same_bits(conv_general_dilated(a, b, *args, execution=execution), want)
    padded = lax.pad(dequantize(a), jnp.float32(0), ((0, 0, 0), (0, 0, 0), (*padding[1], 0), (0, 0, 0)))
    g = jnp.asarray(rng.integers(-3, 4, want.shape).astype(np.float32))
    of_scale = lambda f: jax.vjp(f, a.scale)[1](g)[0]
    got = of_scale(lambda s: conv_general_dilated(dataclasses.replace(a, scale=s), b, *args, execution=execution))
    real = lambda s: lax.conv_general_dilated(s / 0.5 * padded, dequantize(b), (1, 1), "VALID", dimension_numbers=NHWC)
    assert_same_bits(got, of_scale(real))


@both_executions
def test_batch_groups(execution):
    rng = np.random.default_rng(9)
    a, b = array(rng, (4, 3, 3, 5), TYPES["affine"]), array(rng, (2, 2, 5, 6), weight_spec(8, -1))
    args = (1, 1), ((1, 0), (0, 1)), (1, 1), (1, 1), NHWC, 1, 2
    assert_same_bits(conv_general_dilated(a, b, *args, execution=execution), conv64(a, b, *args))


def test_padding_is_real_zero():
    a = quantize(jnp.ones((1, 1, 4)), TYPES["affine"], QParams(0.5, -100))  # so the code 0 is a real 50
    kernel = quantize(jnp.ones((1, 1, 3)), QuantSpec(), QParams(1.0, 0))
    assert conv_general_dilated(a, kernel, (1,), "SAME").tolist() == [[[2.0, 3.0, 3.0, 2.0]]]


@functools.cache
def operands(kind):
    rng = np.random.default_rng(10)
    stack = lambda make: jax.tree.map(lambda *v: jnp.stack(v), *(make() for _ in range(8)))
    if kind == "conv":
        a, b = lambda: array(rng, (4, 5, 5, 8), TYPES["affine"]), array(rng, (3, 3, 8, 8), weight_spec(8, -1))
        return lambda a, b: conv_general_dilated(a, b, (1, 1), "SAME", dimension_numbers=NHWC), stack(a), b
    a, b = lambda: array(rng, (4, 64), TYPES["affine"]), array(rng, (64, 8), weight_spec(4, -1, 16))
    return lambda a, b: dot_general(a, b, MATMUL), stack(a), b


def slices(stacked):
    return [jax.tree.map(lambda v, i=i: v[i], stacked) for i in range(8)]


def mesh(kind):
    return jax.make_mesh((4,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))


@cases(
    ("granularity", "dtype"),
    itertools.product([PerChannel(-1), PerBlock(0, 4)], ["float32", "bfloat16"]),
    [(PerChannel(-1), "bfloat16"), (PerBlock(0, 4), "float32")],
)
def test_one_operand_in_float_is_the_contraction_of_the_real_values(granularity, dtype):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jax.device_put(rng.normal(size=shape).astype(dtype))
    x, g, w = normal(3, 8), normal(3, 5), quantize(normal(8, 5), QuantSpec(bits=4, granularity=granularity))
    in_float = lambda x, w: lax.dot_general(x, dequantize(w), MATMUL)
    got, want = (
        jax.vjp(lambda x, scale, dot=dot: dot(x, dataclasses.replace(w, scale=scale)), x, w.scale)
        for dot in (lambda x, w: dot_general(x, w, MATMUL), in_float)
    )
    assert_same_bits(got[0], want[0])
    jax.tree.map(assert_same_bits, got[1](g), want[1](g))
    swapped = ((0,), (1,)), ((), ())
    assert_same_bits(dot_general(w, x, swapped), lax.dot_general(dequantize(w), x, swapped))
    image, kernel = normal(4, 2, 7), quantize(normal(6, 2, 3), QuantSpec(granularity=PerChannel(0)))
    want = lax.conv_general_dilated(image, dequantize(kernel), (2,), "SAME")
    assert_same_bits(conv_general_dilated(image, kernel, (2,), "SAME"), want)


@cases("kind", ["dot", "conv"], ["dot"])
def test_one_value_on_every_road(kind):
    f, stacked, b = operands(kind)
    want = np.stack([f(a, b) for a in slices(stacked)])
    assert_same_bits(np.stack([jax.jit(f)(a, b) for a in slices(stacked)]), want, "jit")
    assert_same_bits(np.stack([jax.jit(lambda a=a: f(a, b))() for a in slices(stacked)[:2]]), want[:2], "constants")
    assert_same_bits(jax.vmap(f, (0, None))(stacked, b), want, "vmap")
    assert_same_bits(lax.scan(lambda c, a: (c, f(a, b)), 0, stacked)[1], want, "scan")
    bias = np.float32(0.1)
    got = jax.jit(lambda a, b: f(a, b) + bias)(slices(stacked)[0], b)
    assert_same_bits(got, want[0] + bias, "a sum behind it")


@cases(
    ("kind", "axis_type", "columns"),
    [
        case
        for case in itertools.product(["dot", "conv"], ["Auto", "Explicit"], [False, True])
        if case != ("conv", "Explicit", True)  # JAX asks for the sharding of the output, of a float convolution too
    ],
    [("dot", "Auto", True), ("dot", "Explicit", False), ("conv", "Auto", False)],
)
def test_sharded(kind, axis_type, columns):
    f, stacked, b = operands(kind)
    a = slices(stacked)[0]
    want, on = f(a, b), mesh(axis_type)
    put = lambda v, axis: jax.device_put(
        v, NamedSharding(on, P(*(["data" if i == axis else None for i in range(v.ndim)])))
    )
    a = jax.tree.map(lambda v: put(v, 0 if v.ndim and not columns else None), a)
    b = jax.tree.map(lambda v: put(v, v.ndim - 1 if columns else None), b)
    with jax.set_mesh(on):
        got = jax.jit(f)(a, b)
    assert_same_bits(got, want)
    assert got.sharding.spec[-1 if columns else 0] == "data"


@pytest.mark.parametrize("qparams", [None, QParams(np.float32(0.5), np.float32(0))], ids=["dynamic", "static"])
def test_flags_of_nan_on_an_explicit_mesh(qparams):
    x, on = np.ones((8, 4), np.float32), mesh("Explicit")
    x[1, 2] = np.nan
    flags = jax.jit(lambda x: quantize_straight_through(x, QuantSpec(), (1,), None, qparams)[2])
    want = flags(x)
    with jax.set_mesh(on):
        assert_same_bits(flags(jax.device_put(x, NamedSharding(on, P("data", None)))), want)


@pytest.mark.parametrize("kind", ["dot", "conv"])
def test_shard_map(kind):
    f, stacked, b = operands(kind)
    a = slices(stacked)[0]
    specs = QArray(P("data"), P(), P(), a.spec, a.dtype), jax.tree.map(lambda _: P(), b)
    run = jax.shard_map(f, mesh=mesh("Auto"), in_specs=specs, out_specs=P("data"))
    assert_same_bits(jax.jit(run)(a, b), f(a, b))


@cases(("execution", "free"), itertools.product(EXECUTIONS, [(4,), (2, 2)]), [("int8", (4,)), ("float32", (2, 2))])
def test_gradients_are_those_of_the_float_formulation(execution, free):
    """To the scales, and exactly so where no product rounds."""
    rng = np.random.default_rng(11)
    a, b = array(rng, (*free, 32), QuantSpec(bits=4, symmetric=False)), array(rng, (32, 6), weight_spec(4, -1, 8))
    numbers = (((len(free),), (0,)), ((), ()))
    a, b = (QArray(q.values, 2.0 ** jnp.round(jnp.log2(q.scale)), q.zero_point, q.spec, q.dtype) for q in (a, b))
    g = jnp.asarray(rng.integers(-4, 5, (*free, 6)).astype(np.float32))
    scales = a.scale, b.scale
    with_scales = lambda s, t: (
        QArray(a.values, s, a.zero_point, a.spec, a.dtype), QArray(b.values, t, b.zero_point, b.spec, b.dtype)
    )  # fmt: skip
    real = lambda s, t: lax.dot_general(*map(dequantize, with_scales(s, t)), numbers)
    ours = lambda s, t: dot_general(*with_scales(s, t), numbers, execution=execution)
    for got, want in zip(jax.vjp(ours, *scales)[1](g), jax.vjp(real, *scales)[1](g), strict=True):
        assert_same_bits(got, want)


def test_training_through_integers():
    """What a quantized layer does: forward in integers, backward through fake_quant, of the weight and its scale."""
    rng = np.random.default_rng(12)
    x, w = (jnp.asarray(rng.normal(size=s).astype(np.float32)) for s in ((8, 16), (16, 4)))
    spec, op = QuantSpec(), Dot(*MATMUL, "int8")

    def loss(x, w, integers):
        x_real, w_real = fake_quant(x, spec), fake_quant(w, weight_spec(8, -1))
        y = (
            contract(op, x_real, w_real, quantize(x, spec), quantize(w, weight_spec(8, -1)))
            if integers
            else x_real @ w_real
        )
        return jnp.sum(y * y)

    got = jax.jit(jax.grad(functools.partial(loss, integers=True), (0, 1)))(x, w)
    want = jax.grad(functools.partial(loss, integers=False), (0, 1))(x, w)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(jnp.abs(other).max()))
    assert all(math.isfinite(float(jnp.sum(v))) and float(jnp.abs(v).sum()) > 0 for v in got)


def test_execution_and_jit_make_one_trace():
    traces = []

    @jax.jit
    def f(a, b):
        traces.append(1)
        return dot_general(a, b, MATMUL)

    a = quantize(jnp.ones((4, 8)), QuantSpec())
    for _ in range(100):
        f(a, quantize(jnp.ones((8, 2)), QuantSpec()))
    assert len(traces) == 1


@both_executions
@pytest.mark.parametrize("granularity", [PerChannel(0), PerBlock(0, 2)], ids=repr)
def test_nothing_contracted_is_zero(granularity, execution):
    a = quantize(jnp.ones((0, 3)), QuantSpec(granularity=granularity))
    b = quantize(jnp.ones((0, 2)), QuantSpec(symmetric=False))
    got = dot_general(a, b, (((0,), (0,)), ((), ())), execution=execution)
    assert_same_bits(got, np.zeros((3, 2), np.float32))


@both_executions
def test_a_kernel_without_outputs(execution):
    x, w = quantize(jnp.ones((1, 4, 2)), QuantSpec()), quantize(jnp.ones((3, 2, 0)), QuantSpec())
    got = conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), execution=execution)
    assert_same_bits(got, np.zeros((1, 4, 0), np.float32))
