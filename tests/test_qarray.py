# SPDX-License-Identifier: Apache-2.0
"""A QArray moves with its scales, or says why not; and what is no array says so itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from lanes import cases

from jaxquant import (
    PerBlock,
    PerChannel,
    PerTensor,
    QParams,
    QuantSpec,
    conv_general_dilated,
    dequantize,
    dot_general,
    quantize,
)

SHAPE = 4, 6, 8
X = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
GRANULARITIES = [
    PerTensor(),
    PerChannel(0),
    PerChannel((0, -1)),
    PerChannel((0, 1, 2)),
    PerBlock(1, 3),
    PerBlock(-1, 2),
]
GRANULARITIES += [PerBlock((1, -1), (3, 4)), PerBlock((0, 1, 2), (2, 2, 8))]
MOVES = {
    "T": lambda v: v.T,
    "first": lambda v: v[0],
    "last": lambda v: v[-1],
    "traced": lambda v: v[jnp.int32(2)],
    "merged": lambda v: v.reshape(24, 8),
    "split": lambda v: v.reshape((4, 6, 2, 4)),
    "with a new axis": lambda v: v.reshape(4, 1, -1, 8),
}


def quantized(granularity, symmetric=False):
    return quantize(X, QuantSpec(symmetric=symmetric, granularity=granularity))


@functools.cache
def every_move(granularity):
    """Of the integers, and of the real values: one program, because one for each takes far longer to compile."""
    q = quantized(granularity)
    program = jax.jit(lambda q, x: {name: (move(q), move(x)) for name, move in MOVES.items()})
    moved = program(q, dequantize(q))
    return moved, jax.jit(lambda moved: {name: dequantize(got) for name, (got, _) in moved.items()})(moved)


@pytest.mark.parametrize("move", MOVES)
@cases(("granularity",), GRANULARITIES, GRANULARITIES[2::2])
def test_a_move_of_the_integers_is_that_of_the_real_values(granularity, move):
    moved, real = every_move(granularity)
    got, want = moved[move]
    assert_same_bits(real[move], want)
    assert isinstance(got.spec.granularity, PerTensor) == (got.scale.ndim == 0)


@pytest.mark.parametrize("move", MOVES)
def test_a_move_is_the_same_eagerly(move):
    q = quantized(PerChannel((0, -1)))
    moved, _ = every_move(PerChannel((0, -1)))
    got = MOVES[move](q)
    jax.tree.map(assert_same_bits, got, moved[move][0])
    assert got.spec == moved[move][0].spec


def as_arrays(q):
    return {part: getattr(q, part) for part in ("values", "scale", "zero_point")}


ORDERS = (-1, -2), (-2, -1, -3), (-1, -3, -2)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_order_in_memory_is_seen_by_none(order):
    q = quantized(PerChannel((0, -1)))
    lying = dataclasses.replace(q, order=order)
    assert lying.stored.shape == tuple(np.transpose(X, (0, *order) if len(order) == 2 else order).shape)
    assert (lying.shape, lying.ndim, lying.size, lying.nbytes) == (q.shape, q.ndim, q.size, q.nbytes)
    jax.tree.map(assert_same_bits, as_arrays(lying), as_arrays(q))
    assert_same_bits(dequantize(lying), dequantize(q))
    for move in MOVES.values():
        got, want = move(lying), move(q)
        jax.tree.map(assert_same_bits, as_arrays(got), as_arrays(want))
        assert (got.spec, got.shape) == (want.spec, want.shape)
    other = dataclasses.replace(lying, values=-lying.values)
    assert other.order == order
    assert_same_bits(other.values, -q.values)
    jax.tree.map(assert_same_bits, dataclasses.replace(lying, order=None), q)


@pytest.mark.parametrize("signed", [True, False])
def test_four_bits_in_memory_are_seen_by_none(signed):
    q = quantize(X, QuantSpec(bits=4, signed=signed, granularity=PerChannel((0, -1))))
    half = dataclasses.replace(q, values=q.values.astype(jnp.int4 if signed else jnp.uint4))
    jax.tree.map(assert_same_bits, as_arrays(half), as_arrays(q))
    assert (half.shape, q.nbytes - half.nbytes) == (q.shape, X.size // 2)
    assert half[0].stored.dtype == half.stored.dtype
    for move in MOVES.values():
        jax.tree.map(assert_same_bits, as_arrays(move(half)), as_arrays(move(q)))
    taken = lambda q: jax.jit(dequantize).lower(q).compile().memory_analysis().argument_size_in_bytes
    assert taken(q) - taken(half) == X.size // 2
    turns = lambda q: jax.lax.scan(lambda _, part: (None, dequantize(part)), None, q)[1]
    assert_same_bits(turns(half), dequantize(q))


def test_what_is_no_array_may_stand_in_its_place():
    """Shapes, None and specs of a tree map; in an order, too."""
    q = quantize(X, QuantSpec(bits=4, granularity=PerChannel((0, -1))))
    for lying in (q, dataclasses.replace(q, order=(-1, -2)), dataclasses.replace(q, values=q.values.astype(jnp.int4))):
        shapes = jax.eval_shape(lambda lying=lying: lying)
        assert (shapes.shape, shapes.values.shape, shapes.values.dtype) == (q.shape, q.shape, q.values.dtype)
        assert dataclasses.replace(shapes, scale=None).stored.shape == lying.stored.shape
        nothing = jax.tree.map(lambda _: None, lying)
        assert nothing.values is None
        assert "values=None" in repr(nothing)
        jax.tree.map(assert_same_bits, jax.tree.map(lambda v: v, lying), lying)


def test_an_order_is_of_the_axes_that_there_are():
    q = quantize(X[0, :, :6], QuantSpec(granularity=PerChannel(0)))
    for order in ((0, 1), (-1, -1), (-1, -3), (-1, -2, -3)):
        with pytest.raises(ValueError, match=r"`order` must be the last axes.*order=None"):
            dataclasses.replace(q, order=order)
    with pytest.raises(ValueError, match="got \\(-1, -2\\) for an array of rank 1"):
        jax.vmap(dequantize)(dataclasses.replace(q, order=(-1, -2)))


def test_a_scale_of_one_value_contracts_in_any_order():
    a = quantized(PerTensor())
    b = dataclasses.replace(a, scale=a.scale.reshape(1), zero_point=a.zero_point.reshape(1))
    numbers = (((1,), (1,)), ((), ()))
    assert_same_bits(dot_general(a, dataclasses.replace(b, order=(-1, -2)), numbers), dot_general(a, a, numbers))


def test_paths_of_leaves_say_an_order():
    names = lambda q: [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(q)[0]]
    q = quantized(PerTensor())
    assert names(q) == [".values", ".scale", ".zero_point"]
    assert names(dataclasses.replace(q, order=(-1, -2))) == [".stored", ".scale", ".zero_point"]


def test_a_stack_keeps_the_order_of_its_elements():
    """In an index, a scan and a vmap: their matrices lie as before."""
    q = quantized(PerChannel((0, -1)))
    lying = dataclasses.replace(q, order=(-1, -2))
    assert (lying[1].order, lying[1].stored.shape, lying[1].shape) == ((-1, -2), (8, 6), (6, 8))
    turns = lambda q: jax.lax.scan(lambda _, part: (None, dequantize(part)), None, q)[1]
    assert_same_bits(turns(lying), dequantize(q))
    assert_same_bits(jax.vmap(dequantize)(lying), dequantize(q))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("numbers", [(((1,), (1,)), ((), ())), (((2,), (2,)), ((0,), (0,)))], ids=["one", "batch"])
def test_contractions_are_of_the_array_in_any_order(order, numbers):
    a, b = (quantized(PerChannel(0)) for _ in range(2))
    lying = dataclasses.replace(b, order=order)
    want = dot_general(a, b, numbers)
    assert_same_bits(dot_general(a, lying, numbers), want)
    assert_same_bits(dot_general(lying, lying, numbers), want)


def test_a_convolution_and_blocks_are_of_the_array_in_any_order():
    x, w = quantize(X[:, :, :, None], QuantSpec()), quantize(X[:3, :2, None, :4], QuantSpec())
    of = lambda w: conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert_same_bits(of(dataclasses.replace(w, order=(-1, -4, -3, -2))), of(w))
    a, b = quantized(PerTensor(), symmetric=True), quantized(PerBlock(1, 3), symmetric=True)
    numbers = (((1,), (1,)), ((), ()))
    assert_same_bits(dot_general(a, dataclasses.replace(b, order=(-1, -2)), numbers), dot_general(a, b, numbers))


def test_granularities_move_with_the_axes():
    of = lambda granularity, move: MOVES[move](quantized(granularity)).spec.granularity
    assert of(PerChannel((0, -1)), "T") == PerChannel((0, 2))
    assert of(PerChannel((0, -1)), "first") == PerChannel(1)
    assert of(PerChannel(0), "first") == PerTensor()
    assert of(PerBlock(1, 3), "merged") == PerBlock(0, 3)
    assert of(PerBlock(-1, 2), "T") == PerBlock(0, 2)
    assert of(PerBlock(-1, 2), "split") == PerBlock(3, 2)
    assert of(PerBlock((1, -1), (3, 4)), "T") == PerBlock((0, 1), (4, 3))
    assert of(PerBlock((1, -1), (3, 4)), "first") == PerBlock((0, 1), (3, 4))


def test_channels_that_are_merged_become_blocks():
    got = quantized(PerChannel(0)).reshape(24, 8)
    assert (got.spec.granularity, got.scale.shape) == (PerBlock((0, 1), (6, 8)), (4, 1))


def test_an_iteration_ends_and_an_index_is_checked():
    q = quantized(PerChannel(0))
    assert [row.shape for row in q] == [(6, 8)] * 4
    for index in (4, -5):
        with pytest.raises(IndexError, match="out of range for a QArray"):
            q[index]
    for index in (slice(2), (0, 1), True, None, 1.0, jnp.arange(2)):
        with pytest.raises(TypeError, match="one integer, of its first axis"):
            q[index]
    with pytest.raises(IndexError, match=r"shape \(\)"):
        quantize(np.float32(1), QuantSpec(), QParams(1.0, 0.0))[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda q, x: q @ x,
        lambda q, x: x @ q,
        lambda q, x: jnp.asarray(x) @ q,
        lambda q, x: jnp.asarray(q),
        lambda q, x: np.asarray(q),
        lambda q, x: jnp.matmul(q, x),
        lambda q, x: jnp.sum(q),
        lambda q, x: jnp.asarray(x) + q,
    ],
)
def test_used_as_an_array_it_says_what_to_do(use):
    q = quantized(PerTensor())
    with pytest.raises(TypeError, match=r"A QArray is integers.*q\(frozen, \.\.\.\).*dequantize\(v\).*dot_general"):
        use(q, np.ones((8, 3), np.float32))
