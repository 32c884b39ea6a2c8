# SPDX-License-Identifier: Apache-2.0
"""Contractions of quantized arrays against int64: the same bits, on every road."""

import dataclasses
import functools
import itertools
import re
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits, differing
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import by_default, cases

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
from jaxquant._arrays._qarray import inside
from jaxquant._arrays._straight_through import quantize_straight_through
from jaxquant._contract._contract import contract
from jaxquant._contract._dot import Dot
from jaxquant._contract._operands import QuantizedOperand
from jaxquant._spec._spec import qparams_shape

pytestmark = pytest.mark.bits

MATMUL = (((1,), (0,)), ((), ()))
NHWC = ("NHWC", "HWIO", "NHWC")
NWC = ("NWC", "WIO", "NWC")
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


@cases(("of_a", "of_b"), itertools.product(TYPES, OF_B))
def test_matmul(of_a, of_b, compared):
    rng = np.random.default_rng([0, *of_a.encode(), *of_b.encode()])
    for extreme in (False, True):
        a = array(rng, (5, 1100), per_channel(TYPES[of_a], 0), extreme)
        b = array(rng, (1100, 7), per_channel(TYPES[of_b], -1), extreme)
        got = dot_general(a, b, MATMUL)
        differ = differing(got, matmul64(a, b))
        compared("int64", "dot_general", got.size, differ)
        assert differ == 0


@cases(
    ("of_b", "length"),
    itertools.product(["symmetric", "affine", "symmetric 16", "affine 16"], [517, 1100]),
    [("affine", 1100)],
)
def test_sums_of_16_bits_that_int32_does_not_hold(of_b, length):
    """In digits of 8 bits, rounded once."""
    rng, wide = np.random.default_rng(length), {"symmetric 16": QuantSpec(bits=16)}
    wide["affine 16"] = QuantSpec(bits=16, symmetric=False)
    for of_a in wide.values():
        for extreme in (False, True):
            a = array(rng, (5, length), of_a, extreme)
            b = array(rng, (length, 7), per_channel(wide.get(of_b) or TYPES[of_b], -1), extreme)
            assert_same_bits(dot_general(a, b, MATMUL), matmul64(a, b))


def test_a_convolution_of_16_by_8_bits():
    rng, window = np.random.default_rng(4), (3, 3, 64, 4)
    x, w = array(rng, (2, 5, 5, 64), QuantSpec(bits=16)), array(rng, window, per_channel(TYPES["symmetric"], 3))
    numbers = ("NHWC", "HWIO", "NHWC")
    got = conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=numbers)
    integers = lambda q: np.asarray(q.values, np.int64)
    want = sum(
        np.tensordot(integers(x)[:, i : i + 3, j : j + 3], integers(w)[i, j], 1) for i in range(3) for j in range(3)
    )
    scale = np.float32(x.scale) * np.asarray(w.scale).reshape(-1)
    assert_same_bits(got, want.astype(np.float32) * scale)


def test_a_matmul_of_unsigned_16_bits():
    rng, wide = np.random.default_rng(3), QuantSpec(bits=16, signed=False, symmetric=False)
    a, b = array(rng, (5, 60), wide), array(rng, (60, 7), per_channel(TYPES["unsigned affine"], -1))
    assert_same_bits(dot_general(a, b, MATMUL), matmul64(a, b))


@cases(("length", "of_a"), itertools.product([1, 519, 1041, 4100, 16384], ["symmetric", "affine"]))
def test_every_length(length, of_a, compared):
    """Past 518 and 1040 products a float32 sum would round."""
    rng = np.random.default_rng(length)
    for extreme in (False, True):
        a, b = array(rng, (32, length), TYPES[of_a], extreme), array(rng, (length, 48), weight_spec(8, -1), extreme)
        got = dot_general(a, b, MATMUL)
        differ = differing(got, matmul64(a, b))
        compared("int64", "dot_general, long", got.size, differ)
        assert differ == 0


def test_one_float32_sum_would_not_do():
    rng = np.random.default_rng(1)
    a, b = array(rng, (32, 16384), TYPES["affine"], True), array(rng, (16384, 48), weight_spec(8, -1), True)
    acc = np.asarray(jax.jit(jnp.matmul)(*(centred(q).astype(np.float32) for q in (a, b))))
    assert differing(acc * (np.asarray(a.scale) * b.scale), matmul64(a, b)) > 0


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
    ((3, 70, 2), (70, 2, 3), (((1, 2), (0, 1)), ((0,), (2,)))),
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


@cases("of", ["symmetric", "unsigned affine"], ["unsigned affine"])
def test_dimension_numbers(of):
    """All by one program."""
    rng = np.random.default_rng(2)
    pairs = [(array(rng, a, TYPES[of]), array(rng, b, TYPES[of])) for a, b, _ in DIMENSIONS]

    @jax.jit
    def dots(pairs):
        return [dot_general(a, b, numbers) for (a, b), (*_, numbers) in zip(pairs, DIMENSIONS, strict=True)]

    for got, (a, b), (*shapes, numbers) in zip(dots(pairs), pairs, DIMENSIONS, strict=True):
        exact = sum_of_products(centred(a), centred(b), numbers)
        want = exact.astype(np.float32) * (np.asarray(a.scale) * np.asarray(b.scale))
        assert_same_bits(got, want, (shapes, numbers))


def test_scales_along_batch_and_free_axes():
    rng = np.random.default_rng(3)
    a = array(rng, (4, 6, 9), QuantSpec(symmetric=False, granularity=PerChannel((0, 1))))
    b = array(rng, (9, 5, 4), QuantSpec(symmetric=False, granularity=PerChannel((1, 2))))
    exact = np.einsum("bmk,knb->bmn", centred(a), centred(b)).astype(np.float32)
    scale = np.asarray(a.scale).reshape(4, 6, 1) * np.asarray(b.scale)[0].T.reshape(4, 1, 5)
    got = dot_general(a, b, (((2,), (0,)), ((0,), (2,))))
    assert_same_bits(got, exact * scale)
    a, b = array(rng, (3,), per_channel(TYPES["affine"], 0)), array(rng, (4,), per_channel(QuantSpec(), 0))
    want = np.outer(centred(a), centred(b)).astype(np.float32) * np.outer(a.scale, b.scale)
    assert_same_bits(dot_general(a, b, (((), ()), ((), ()))), want)


def in_blocks(a, b, size):
    """The value of a matmul whose scales change every `size` along the contraction, summed in order."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(0, a.shape[1], size):
        acc = (centred(a)[:, k : k + size] @ centred(b)[k : k + size]).astype(np.float32)
        total = total + acc * (spread(a.scale, a.shape)[:, k : k + 1] * spread(b.scale, b.shape)[k : k + 1])
    return total


BLOCKS = [
    (QuantSpec(symmetric=False), weight_spec(4, -1, 16), 16),
    (QuantSpec(granularity=PerBlock(1, 32)), weight_spec(4, -1, 48), 16),
    (QuantSpec(symmetric=False, granularity=PerBlock(1, 8)), QuantSpec(granularity=PerChannel(-1)), 8),
    (QuantSpec(granularity=PerBlock(1, 96)), weight_spec(4, -1, 96), 96),
    (QuantSpec(granularity=PerBlock(1, 16)), QuantSpec(bits=4, granularity=PerBlock((0, 1), (16, 5))), 16),
    (QuantSpec(granularity=PerBlock((0, 1), (3, 32))), QuantSpec(granularity=PerBlock((0, 1), (96, 2))), 32),
]


@cases(("of_a", "of_b", "size"), BLOCKS, BLOCKS[::5])
def test_blocks(of_a, of_b, size):
    rng = np.random.default_rng(4)
    a, b = array(rng, (6, 96), of_a), array(rng, (96, 10), of_b)
    assert_same_bits(dot_general(a, b, MATMUL), in_blocks(a, b, size))


def test_a_scale_for_each_element_that_is_contracted():
    rng = np.random.default_rng(4)
    a, b = array(rng, (6, 96), per_channel(QuantSpec(), 0)), array(rng, (96, 10), QuantSpec(granularity=PerBlock(1, 2)))
    with pytest.raises(ValueError, match="a scale of its own for each element"):  # blocks on a free axis
        dot_general(a, b, MATMUL)
    a, b = array(rng, (6, 2), per_channel(QuantSpec(), 1)), array(rng, (2, 10), QuantSpec())
    with pytest.raises(ValueError, match=r"Axis 1 of `a`.*a scale of its own for each element"):
        dot_general(a, b, MATMUL)


def test_blocks_along_two_contracted_axes():
    rng = np.random.default_rng(5)
    a, b = array(rng, (3, 1, 8), QuantSpec()), array(rng, (1, 8, 5), QuantSpec(granularity=PerBlock(1, 4)))
    got = dot_general(a, b, (((1, 2), (0, 1)), ((), ())))
    reshaped = lambda q, shape, groups: dataclasses.replace(
        q, values=np.asarray(q.values).reshape(shape), scale=np.asarray(q.scale).reshape(groups), zero_point=np.int8(0)
    )
    assert_same_bits(got, in_blocks(reshaped(a, (3, 8), ()), reshaped(b, (8, 5), (2, 5)), 4))


WIDE = (16, 8, 516), (12, 12, 14), (9, 4, 3000), (16, 16, 2)


@cases(("bits_a", "bits_b", "length"), WIDE, WIDE[:2])
def test_values_wider_than_8_bits(bits_a, bits_b, length):
    rng = np.random.default_rng(6)
    plain = bits_a != 9  # of the fewest bits that do not fit int8, and unsigned
    spec = QuantSpec(bits=bits_a, signed=plain, symmetric=plain, granularity=PerChannel(0))
    a = array(rng, (4, length), spec, True)
    b = array(rng, (length, 5), QuantSpec(bits=bits_b), True)
    assert_same_bits(dot_general(a, b, MATMUL), matmul64(a, b))


def test_the_longest_contraction_is_where_int32_ends():
    shape = lambda n, spec: jax.eval_shape(lambda: array_of_ones(n, spec))
    wide = QuantSpec(narrow_range=False)
    pairs = (
        (QuantSpec(), QuantSpec(), 133_144),
        (QuantSpec(symmetric=False), QuantSpec(), 66_311),
        (wide, wide, 131_071),
        (QuantSpec(bits=2), QuantSpec(bits=2), 2**31 - 1),
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
    [(0, OPERANDS[2]), (15, OPERANDS[2]), (20, "affine")],
)
def test_convolution(n, of, compared):
    options = CONVOLUTIONS[n]
    rng = np.random.default_rng([7, *of.encode()])
    spec = QuantSpec(signed="unsigned" not in of, symmetric=of == "symmetric")
    spec = per_channel(spec, 0) if "example" in of else spec
    a = array(rng, (2, 6, 7, 8), spec)
    b = array(rng, (3, 2, 8 // options["groups"], 6), per_channel(TYPES["affine" if spec.signed else "symmetric"], -1))
    args = *(options[k] for k in ("strides", "padding", "a_dilation", "b_dilation")), NHWC, options["groups"]
    got = conv_general_dilated(a, b, *args)
    differ = differing(got, conv64(a, b, *args))
    compared("int64", "conv_general_dilated", got.size, differ)
    assert differ == 0


LARGE = {
    "features": ((1, 512, 4, 5), (3, 3, 512, 4), 1),
    "groups": ((1, 256, 4, 4), (3, 3, 128, 4), 2),
    "window": ((1, 1, 41, 61), (40, 60, 1, 4), 1),
}


@cases("of", list(LARGE))
def test_convolutions_that_a_float32_sum_does_not_hold(of):
    rng, (shape_a, shape_b, groups) = np.random.default_rng(8), LARGE[of]
    a, b = array(rng, shape_a, TYPES["affine"], True), array(rng, shape_b, weight_spec(8, -1), True)
    args = (1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1)
    got = conv_general_dilated(a, b, *args, ("NCHW", "HWIO", "NHWC"), groups)
    last = dataclasses.replace(a, values=np.moveaxis(a.values, 1, -1))
    assert_same_bits(got, conv64(last, b, *args, NHWC, groups))


@pytest.mark.parametrize(("bits_a", "bits_b"), [(16, 8), (9, 8), (16, 12)])
def test_a_convolution_of_values_wider_than_8_bits(bits_a, bits_b):
    rng = np.random.default_rng(9)
    a, b = array(rng, (2, 5, 4, 3), QuantSpec(bits=bits_a)), array(rng, (3, 2, 3, 4), weight_spec(bits_b, -1))
    args = (1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1), NHWC
    assert_same_bits(conv_general_dilated(a, b, *args), conv64(a, b, *args))


def test_a_convolution_without_a_window_is_a_matmul():
    rng = np.random.default_rng(9)
    a, b = array(rng, (5, 7), TYPES["affine"]), array(rng, (7, 1), TYPES["unsigned affine"])
    got = conv_general_dilated(a, b, (), (), dimension_numbers=("NC", "IO", "NC"))
    assert_same_bits(got, matmul64(a, b))


def test_values_of_8_bits_meet_as_int8():
    rng = np.random.default_rng(9)
    a, b = array(rng, (4, 5, 5), TYPES["affine"]), array(rng, (4, 5, 5), TYPES["unsigned affine"])
    both = lambda a, b: (dot_general(a, b, (((1,), (1,)), ((0,), (0,)))), conv_general_dilated(a, b, (1,), "SAME"))
    products = re.findall(r"stablehlo.(dot_general|convolution)\b.*: \((.*)\) ->", jax.jit(both).lower(a, b).as_text())
    assert {op for op, _ in products} == {"dot_general", "convolution"}
    assert all(operands.count("xi8>") == 2 for _, operands in products), products


PADDINGS = ((0, 0), (-1, 1)), ((-3, 3), (-2, 2)), ((2, 2), (2, 0))  # negative, and wider than the window


@by_default("((-3, 3), (-2, 2))", "((2, 2), (2, 0))")
@pytest.mark.parametrize("padding", PADDINGS, ids=str)
def test_padding_that_xla_gets_wrong(padding):
    """In float32 without dilation (openxla/xla 48713), also in the gradient."""
    rng = np.random.default_rng(13)
    a, b = array(rng, (2, 5, 9, 8), TYPES["symmetric"]), array(rng, (3, 2, 8, 6), TYPES["symmetric"])
    a, b = (dataclasses.replace(q, scale=np.float32(0.5)) for q in (a, b))
    args = (1, 1), padding, (1, 1), (1, 1), NHWC
    want = conv64(a, b, *args)
    g = rng.integers(-3, 4, want.shape).astype(np.float32)

    @jax.jit
    def value_and_gradient(a, b, g):
        f = lambda s: conv_general_dilated(dataclasses.replace(a, scale=s), b, *args)
        y, pull = jax.vjp(f, a.scale)
        return y, *pull(g)

    y, of_scale = value_and_gradient(a, b, g)
    assert_same_bits(y, want)
    assert_same_bits(of_scale, np.float32((want.astype(np.float64) / 0.5 * g).sum()))


def test_batch_groups():
    rng = np.random.default_rng(9)
    a, b = array(rng, (4, 3, 3, 5), TYPES["affine"]), array(rng, (2, 2, 5, 6), weight_spec(8, -1))
    args = (1, 1), ((1, 0), (0, 1)), (1, 1), (1, 1), NHWC, 1, 2
    assert_same_bits(conv_general_dilated(a, b, *args), conv64(a, b, *args))


def test_padding_is_real_zero():
    whole = lambda v, shape, scale, zero, of: QArray(
        np.full(shape, v, np.int8), np.float32(scale), np.int8(zero), TYPES[of], jnp.float32
    )
    a = whole(-98, (1, 1, 4), 0.5, -100, "affine")  # so the code 0 is a real 50
    kernel = whole(1, (1, 1, 3), 1, 0, "symmetric")
    assert conv_general_dilated(a, kernel, (1,), "SAME").tolist() == [[[2.0, 3.0, 3.0, 2.0]]]


def test_a_zero_point_of_the_tensor_is_padded_as_one_number():
    def conv(a, b):
        a, b = quantize(a, QuantSpec(symmetric=False)), quantize(b, QuantSpec())
        return conv_general_dilated(a, b, (1,), "SAME", dimension_numbers=NWC)

    program = str(jax.make_jaxpr(conv)(np.ones((1, 4, 2), np.float32), np.ones((3, 2, 2), np.float32)))
    assert program.count("padding_config=((0, 0, 0), (1, 1, 0), (0, 0, 0))") == 1


@functools.cache
def operands(kind):
    """A contraction, eight values of `a` in a stack, one of `b`, and what it makes of each."""
    rng = np.random.default_rng(10)
    if kind == "conv":
        f = lambda a, b: conv_general_dilated(a, b, (1, 1), "SAME", dimension_numbers=NHWC)
        by_hand = lambda a, b: conv64(a, b, (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1), NHWC)
        shapes, of_b = ((4, 5, 5, 8), (3, 3, 8, 8)), weight_spec(8, -1)
    else:
        f, by_hand = lambda a, b: dot_general(a, b, MATMUL), lambda a, b: in_blocks(a, b, 16)
        shapes, of_b = ((4, 64), (64, 8)), weight_spec(4, -1, 16)
    some, b = [array(rng, shapes[0], TYPES["affine"]) for _ in range(8)], array(rng, shapes[1], of_b)
    return f, jax.tree.map(lambda *v: np.stack(v), *some), b, np.stack([by_hand(a, b) for a in some])


def slices(stacked):
    return [jax.tree.map(lambda v, i=i: v[i], stacked) for i in range(8)]


def mesh(kind):
    return jax.make_mesh((4,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))


@by_default("PerBlock(axis=0, size=4)-float32")
@cases(
    ("granularity", "dtype"),
    itertools.product([PerChannel(-1), PerBlock(0, 4)], ["float32", "bfloat16"]),
    [(PerChannel(-1), "bfloat16"), (PerBlock(0, 4), "float32")],
)
def test_one_operand_in_float_meets_integers_whose_scale_is_behind_or_real_values_in_blocks(granularity, dtype):
    """The gradient to x is of g times the scale; to the scale, of the real values."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)
    integers = lambda shape, spec: dataclasses.replace(array(rng, shape, spec), dtype=jnp.dtype(dtype))
    x, g, image = normal(3, 8), normal(3, 5), normal(4, 2, 7)
    w = integers((8, 5), QuantSpec(bits=4, granularity=granularity))
    kernel = integers((6, 2, 3), QuantSpec(granularity=PerChannel(0)))

    def all_of(dot, conv, x, w, g, image, kernel):
        y, pull = jax.vjp(lambda x, scale: dot(x, dataclasses.replace(w, scale=scale), MATMUL), x, w.scale)
        return y, *pull(g), dot(w, x, (((0,), (1,)), ((), ()))), conv(image, kernel, (2,), "SAME")

    def behind(op, x, q, scale, *args):
        y = op(x.astype(np.float32), q.values.astype(np.float32), *args) * scale
        return y.astype(dtype)

    def by_hand(x, w, g, image, kernel):
        of_image = behind(lax.conv_general_dilated, image, kernel, kernel.scale.reshape(1, 6, 1), (2,), "SAME")
        real = lambda v: dequantize(v) if isinstance(v, QArray) else v
        of_real = lambda a, b, numbers: lax.dot_general(real(a), real(b), numbers)
        y, of_x, of_scale, turned, _ = all_of(of_real, lambda *args: None, x, w, g, image, kernel)
        if isinstance(granularity, PerBlock):
            return y, of_x, of_scale, turned, of_image
        y = behind(jnp.matmul, x, w, w.scale)
        of_x = (g.astype(np.float32) * w.scale).astype(dtype) @ w.values.T.astype(dtype)
        turned = jnp.einsum("kn,bk->nb", w.values.astype(np.float32), x.astype(np.float32)) * w.scale.T
        return y, of_x, of_scale, turned.astype(dtype), of_image

    args = x, w, g, image, kernel
    got = jax.jit(functools.partial(all_of, dot_general, conv_general_dilated))(*args)
    for one, other in zip(got, jax.jit(by_hand)(*args), strict=True):
        assert_same_bits(one, other)


@cases("kind", ["dot", "conv"], ["dot"])
def test_one_value_on_every_road(kind):
    f, stacked, b, want = operands(kind)
    assert_same_bits(np.stack([f(a, b) for a in slices(stacked)]), want)
    bias = np.float32(0.1)

    @jax.jit
    def roads(stacked, b):
        first = slices(stacked)[0]
        return {
            "vmap": jax.vmap(f, (0, None))(stacked, b),
            "scan": lax.scan(lambda c, a: (c, f(a, b)), 0, stacked)[1],
            "a sum behind it": f(first, b) + bias,
        }

    got = roads(stacked, b)
    assert_same_bits(got.pop("a sum behind it"), want[0] + bias)
    for road, y in got.items():
        assert_same_bits(y, want, road)
    assert_same_bits(jax.jit(lambda: f(slices(stacked)[0], b))(), want[0], "constants")


@by_default("dot-Explicit-False")
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
    f, stacked, b, want = operands(kind)
    a, on = slices(stacked)[0], mesh(axis_type)
    put = lambda v, axis: jax.device_put(
        np.asarray(v), NamedSharding(on, P(*(["data" if i == axis else None for i in range(v.ndim)])))
    )
    a = jax.tree.map(lambda v: put(v, 0 if v.ndim and not columns else None), a)
    b = jax.tree.map(lambda v: put(v, v.ndim - 1 if columns else None), b)
    with jax.set_mesh(on):
        got = jax.jit(f)(a, b)
    assert_same_bits(got, want[0])
    assert got.sharding.spec[-1 if columns else 0] == "data"


@pytest.mark.slow
def test_transposed_and_in_an_outer_product_on_an_explicit_mesh():
    rng, on, affine = np.random.default_rng(13), mesh("Explicit"), TYPES["affine"]
    a, b, v = array(rng, (6, 8), affine), array(rng, (6, 5), affine), array(rng, (8,), affine)
    put = lambda q, *axes: dataclasses.replace(q, values=jax.device_put(q.values, NamedSharding(on, P(*axes))))
    outer = lambda q, b: dot_general(q, b[0], (((), ()), ((), ())))
    with jax.set_mesh(on):
        got = jax.jit(lambda a, b, v: (dot_general(a, b, (((0,), (0,)), ((), ()))), outer(v, b)))(
            put(a, None, "data"), put(b, None, None), put(v, "data")
        )
    assert_same_bits(got[0], (centred(a).T @ centred(b)).astype(np.float32) * (a.scale * b.scale))
    assert_same_bits(got[1], np.outer(centred(v), centred(b)[0]).astype(np.float32) * (v.scale * b.scale))
    assert [y.sharding.spec[0] for y in got] == ["data", "data"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["symmetric", "affine"])
def test_rows_are_split_along_any_axis_of_an_explicit_mesh(kind):
    rng, on = np.random.default_rng(17), mesh("Explicit")
    a, b = array(rng, (3, 8, 16), TYPES[kind]), array(rng, (16, 5), TYPES["symmetric"])
    rows = dataclasses.replace(a, values=jax.device_put(a.values, NamedSharding(on, P(None, "data", None))))
    with jax.set_mesh(on):
        got = jax.jit(lambda a, b: dot_general(a, b, (((2,), (0,)), ((), ()))))(rows, b)
    assert_same_bits(got, (centred(a) @ centred(b)).astype(np.float32) * (a.scale * b.scale))
    assert got.sharding.spec == P(None, "data", None)


@pytest.mark.parametrize("qparams", [None, QParams(np.float32(0.5), np.float32(0))], ids=["dynamic", "static"])
def test_flags_of_nan_on_an_explicit_mesh(qparams):
    x, on = np.ones((8, 4), np.float32), mesh("Explicit")
    x[1, 2] = np.nan
    flags = jax.jit(lambda x: quantize_straight_through(x, QuantSpec(), (1,), None, qparams)[2])
    with jax.set_mesh(on):
        got = flags(jax.device_put(x, NamedSharding(on, P("data", None))))
    assert_same_bits(got, np.where(np.isnan(x).any(1, keepdims=True), np.float32(np.nan), np.float32(0)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dot", "conv"])
def test_shard_map(kind):
    f, stacked, b, want = operands(kind)
    a = slices(stacked)[0]
    specs = QArray(P("data"), P(), P(), a.spec, a.dtype), jax.tree.map(lambda _: P(), b)
    run = jax.shard_map(f, mesh=mesh("Auto"), in_specs=specs, out_specs=P("data"))
    assert_same_bits(jax.jit(run)(a, b), want[0])


@pytest.mark.parametrize("free", [(4,), (2, 2)], ids=str)
def test_gradients_are_those_of_the_float_formulation(free):
    """To the scales, and exactly so where no product rounds."""
    rng = np.random.default_rng(11)
    a, b = array(rng, (*free, 32), QuantSpec(bits=4, symmetric=False)), array(rng, (32, 6), weight_spec(4, -1, 8))
    numbers = (((len(free),), (0,)), ((), ()))
    a, b = (dataclasses.replace(q, scale=2 ** np.rint(np.log2(q.scale))) for q in (a, b))
    g = rng.integers(-4, 5, (*free, 6)).astype(np.float32)

    @jax.jit
    def towards_scales(a, b, g):
        of_scales = lambda *scales: map(lambda q, scale: dataclasses.replace(q, scale=scale), (a, b), scales)
        return jax.vjp(lambda *s: dot_general(*of_scales(*s), numbers), a.scale, b.scale)[1](g)

    got = towards_scales(a, b, g)
    of_a, of_b, rows = centred(a).reshape(-1, 32), centred(b), g.reshape(-1, 6)
    towards_a, towards_b = rows @ (of_b * spread(b.scale, b.shape)).T, (of_a * a.scale).T @ rows
    assert_same_bits(got[0], np.float32((of_a * towards_a).sum()))
    assert_same_bits(got[1], (of_b * towards_b).reshape(4, 8, 6).sum(1).astype(np.float32))


@pytest.mark.slow
def test_training_through_integers():
    """What a quantized layer does: forward in integers, backward through fake_quant, of the weight and its scale."""
    rng = np.random.default_rng(12)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((8, 16), (16, 4)))
    spec, op = QuantSpec(), Dot(*MATMUL)

    def loss(x, w, integers):
        x_real, w_real = fake_quant(x, spec), fake_quant(w, weight_spec(8, -1))
        of_x = QuantizedOperand(x_real, inside(quantize(x, spec)))
        of_w = QuantizedOperand(w_real, inside(quantize(w, weight_spec(8, -1))))
        y = contract(op, of_x, of_w) if integers else x_real @ w_real
        return jnp.sum(y * y)

    got, want = (jax.jit(jax.grad(functools.partial(loss, integers=i), (0, 1)))(x, w) for i in (True, False))
    for one, other in zip(map(np.asarray, got), map(np.asarray, want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())
        assert np.isfinite(one).all()
        assert one.any()


def test_execution_and_jit_make_one_trace():
    traces = []

    @jax.jit
    def f(a, b):
        traces.append(1)
        return dot_general(a, b, MATMUL)

    rng = np.random.default_rng(0)
    for _ in range(100):
        f(array(rng, (4, 8), QuantSpec()), array(rng, (8, 2), QuantSpec()))
    assert len(traces) == 1


NOTHING = PerChannel(0), PerBlock(0, 2)


@pytest.mark.parametrize("granularity", NOTHING)
def test_nothing_contracted_is_zero(granularity):
    rng = np.random.default_rng(0)
    a, b = array(rng, (0, 3), QuantSpec(granularity=granularity)), array(rng, (0, 2), QuantSpec(symmetric=False))
    got = dot_general(a, b, (((0,), (0,)), ((), ())))
    assert_same_bits(got, np.zeros((3, 2), np.float32))


@pytest.mark.parametrize(
    ("x", "w", "padding", "y"),
    [((1, 4, 2), (3, 2, 0), "SAME", (1, 4, 0)), ((1, 20, 0), (15, 0, 2), "VALID", (1, 6, 2))],
    ids=["no outputs", "no features"],
)
def test_an_empty_kernel(x, w, padding, y):
    a, b = (array(np.random.default_rng(0), shape, QuantSpec()) for shape in (x, w))
    got = conv_general_dilated(a, b, (1,), padding, dimension_numbers=NWC)
    assert_same_bits(got, np.zeros(y, np.float32))
