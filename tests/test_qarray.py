# SPDX-License-Identifier: Apache-2.0
"""A QArray moves with its scales, or says why not; and what is no array says so itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from lanes import by_default, cases

from jaxquant import (
    PerBlock,
    PerChannel,
    PerTensor,
    QArray,
    QuantSpec,
    conv_general_dilated,
    dequantize,
    dot_general,
    quantize,
    stored_for,
)
from jaxquant._spec._spec import qparams_shape
from jaxquant.cache import update_slice

SHAPE = 4, 6, 8
F = np.float32
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
    "sliced": lambda v: v[2:4, :, 4:],
    "merged": lambda v: v.reshape(24, 8),
    "split": lambda v: v.reshape((4, 6, 2, 4)),
    "with a new axis": lambda v: v.reshape(4, 1, -1, 8),
}


def quantized(granularity, shape=SHAPE, **kw):
    """Random integers and qparams."""
    spec, rng = QuantSpec(**{"symmetric": False, "granularity": granularity, **kw}), np.random.default_rng(0)
    groups = qparams_shape(spec, shape)
    zero = np.zeros(groups) if spec.symmetric else rng.integers(spec.qmin, spec.qmax + 1, groups)
    values, zero = (v.astype(spec.dtype) for v in (rng.integers(spec.qmin, spec.qmax + 1, shape), zero))
    return QArray(*map(jax.device_put, (values, np.exp(rng.normal(size=groups)).astype(F), zero)), spec, jnp.float32)


def spread(v, shape):
    """One value for each element, by NumPy."""
    v = np.asarray(v).reshape((1,) * (len(shape) - np.ndim(v)) + np.shape(v))
    for axis, n in enumerate(shape):
        v = np.repeat(v, n // v.shape[axis], axis)
    return v


def levels(q):
    return np.int32(q.values) - spread(q.zero_point, q.shape)


def real(q):
    return F(levels(q)) * spread(q.scale, q.shape)


@jax.jit
def every_move(q):
    """And its real values: one program, because one for each takes far longer to compile."""
    return {name: (moved := move(q), dequantize(moved)) for name, move in MOVES.items()}


def test_a_move_and_a_write_are_one_program(asked):
    q, token = quantized(PerChannel((0, 1))), quantized(PerTensor()).values[:, :1].astype(F)
    moves = {name: move for name, move in MOVES.items() if name not in ("last", "traced")}  # the program of another one
    moves |= {"picked": lambda v: v[np.array([0, 2])], "written": lambda v: update_slice(v, token, (0, 3, 0))}
    jax.clear_caches()
    for name, move in moves.items():
        before = len(asked)
        move(q)
        assert len(asked) - before == 1, (name, asked[before:])


def test_parts_at_indices_have_the_scales_of_their_blocks():
    q, index = quantized(PerBlock(0, 2)), np.array([3, 0, 1])
    assert_same_bits(real(q[index]), real(q)[index])


@pytest.mark.parametrize("move", MOVES)
@cases(("granularity",), GRANULARITIES, GRANULARITIES[::2])
def test_a_move_of_the_integers_is_that_of_the_real_values(granularity, move):
    q = quantized(granularity)
    got, real_values = every_move(q)[move]
    assert_same_bits(real_values, MOVES[move](real(q)))
    assert_same_bits(got.values, MOVES[move](np.asarray(q.values)))
    assert isinstance(got.spec.granularity, PerTensor) == (got.scale.ndim == 0)


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES)
def test_a_move_is_the_same_eagerly(move):
    q = quantized(PerChannel((0, -1)))
    got, (moved, _) = MOVES[move](q), every_move(q)[move]
    jax.tree.map(assert_same_bits, got, moved)
    assert got.spec == moved.spec


def as_arrays(q):
    return {part: getattr(q, part) for part in ("values", "scale", "zero_point")}


ORDERS = (-1, -2), (-2, -1, -3), (-1, -3, -2)


@cases(("order",), [(order,) for order in ORDERS], [ORDERS[:1]])
def test_an_order_in_memory_is_seen_by_none(order):
    q = quantized(PerChannel((0, -1)))
    lying = dataclasses.replace(q, order=order)
    assert lying.stored.shape == np.transpose(real(q), (0, *order) if len(order) == 2 else order).shape
    assert (lying.shape, lying.ndim, lying.size, lying.nbytes) == (q.shape, q.ndim, q.size, q.nbytes)
    jax.tree.map(assert_same_bits, as_arrays(lying), as_arrays(q))
    assert_same_bits(dequantize(lying), real(q))
    for move in MOVES.values():
        got, want = move(lying), move(q)
        jax.tree.map(assert_same_bits, as_arrays(got), as_arrays(want))
        assert (got.spec, got.shape) == (want.spec, want.shape)
    other = dataclasses.replace(lying, values=-lying.values)
    assert other.order == order
    assert_same_bits(other.values, -q.values)
    jax.tree.map(assert_same_bits, dataclasses.replace(lying, order=None), q)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("signed", [True, False])
def test_four_bits_in_memory_are_seen_by_none(signed, platform):
    q = quantized(PerChannel((0, -1)), bits=4, signed=signed, symmetric=True)
    half = dataclasses.replace(q, values=q.values.astype(jnp.int4 if signed else jnp.uint4))
    half = stored_for(half, platform)
    assert half.pairs == {"cpu": (-1, 4), "tpu": None}[platform]
    jax.tree.map(assert_same_bits, as_arrays(half), as_arrays(q))
    assert (half.shape, q.nbytes - half.nbytes) == (q.shape, q.size // 2)
    assert half[0].stored.dtype == half.stored.dtype
    for name, (moved, real_values) in every_move(half).items():
        assert_same_bits(moved.values, MOVES[name](np.asarray(q.values)))
        assert_same_bits(real_values, MOVES[name](real(q)))
    taken = lambda q: jax.jit(dequantize).lower(q).compile().memory_analysis().argument_size_in_bytes
    assert taken(q) - taken(half) == q.size // 2
    turns = lambda q: jax.lax.scan(lambda _, part: (None, dequantize(part)), None, q)[1]
    assert_same_bits(turns(half), real(q))


def test_what_is_no_array_may_stand_in_its_place():
    """Shapes, None and specs of a tree map; in an order, too."""
    q = quantized(PerChannel((0, -1)), bits=4, symmetric=True)
    half = dataclasses.replace(q, values=q.values.astype(jnp.int4))
    for lying in (q, dataclasses.replace(q, order=(-1, -2)), half, stored_for(half, "cpu")):
        shapes = jax.eval_shape(lambda lying=lying: lying)
        assert (shapes.shape, shapes.values.shape, shapes.values.dtype) == (q.shape, q.shape, q.values.dtype)
        assert lying.pairs or dataclasses.replace(shapes, scale=None).stored.shape == lying.stored.shape
        nothing = jax.tree.map(lambda _: None, lying)
        assert nothing.values is None
        assert "values=None" in repr(nothing)
        jax.tree.map(assert_same_bits, jax.tree.map(lambda v: v, lying), lying)


def test_an_order_is_of_the_axes_that_there_are():
    q = quantized(PerChannel(0), (6, 6), symmetric=True)
    for order in ((0, 1), (-1, -1), (-1, -3), (-1, -2, -3)):
        with pytest.raises(ValueError, match=r"`order` must be the last axes.*order=None"):
            dataclasses.replace(q, order=order)
    with pytest.raises(ValueError, match="got \\(-1, -2\\) for an array of rank 1"):
        jax.vmap(dequantize)(dataclasses.replace(q, order=(-1, -2)))


def test_a_scale_of_one_value_contracts_in_any_order():
    a = quantized(PerTensor())
    scale = np.asarray(a.scale)
    b = dataclasses.replace(a, scale=scale[None], zero_point=np.asarray(a.zero_point)[None], order=(-1, -2))
    want = F(np.einsum("akb,ckd->abcd", levels(a), levels(a))) * (scale * scale)
    assert_same_bits(dot_general(a, b, (((1,), (1,)), ((), ()))), want)


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
    assert_same_bits(turns(lying), real(q))
    assert_same_bits(jax.vmap(dequantize)(lying), real(q))


NUMBERS = {"akb,ckd->abcd": (((1,), (1,)), ((), ())), "abk,adk->abd": (((2,), (2,)), ((0,), (0,)))}


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_contractions_are_of_the_array_in_any_order(order):
    q = quantized(PerChannel(0))
    lying = dataclasses.replace(q, order=order)
    dots = jax.jit(lambda a, b: [dot_general(q, b, numbers) for numbers in NUMBERS.values() for q in (a, b)])
    for got, equation in zip(dots(q, lying), np.repeat(list(NUMBERS), 2), strict=True):
        scales = np.einsum(equation, *[spread(q.scale, (4, 1, 1))] * 2)
        assert_same_bits(got, F(np.einsum(equation, levels(q), levels(q))) * scales, equation)


def test_a_convolution_and_blocks_are_of_the_array_in_any_order():
    x, w = (quantized(PerTensor(), shape, symmetric=True) for shape in ((4, 6, 8, 1), (3, 2, 1, 4)))
    a, b = quantized(PerTensor(), symmetric=True), quantized(PerBlock(1, 3), symmetric=True)

    lying = dataclasses.replace(w, order=(-1, -4, -3, -2)), dataclasses.replace(b, order=(-1, -2))
    got = conv_general_dilated(x, lying[0], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    padded = np.pad(levels(x), ((0, 0), (1, 1), (0, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 2), (1, 2))
    scale = np.asarray(x.scale) * np.asarray(w.scale)
    assert_same_bits(got, F(np.einsum("nhwiyx,yxio->nhwo", windows, levels(w))) * scale)
    first, second = (
        F(np.einsum("akb,ckd->abcd", levels(a)[:, k : k + 3], levels(b)[:, k : k + 3]))
        * (np.asarray(a.scale) * np.asarray(b.scale)[None, None, :, k // 3])
        for k in (0, 3)
    )
    assert_same_bits(dot_general(a, lying[1], (((1,), (1,)), ((), ()))), first + second)


def test_granularities_move_with_the_axes():
    of = lambda granularity, move: jax.eval_shape(MOVES[move], quantized(granularity)).spec.granularity
    assert of(PerChannel((0, -1)), "T") == PerChannel((0, 2))
    assert of(PerChannel((0, -1)), "first") == PerChannel(1)
    assert of(PerChannel(0), "first") == PerTensor()
    assert of(PerBlock(1, 3), "merged") == PerBlock(0, 3)
    assert of(PerBlock(-1, 2), "T") == PerBlock(0, 2)
    assert of(PerBlock(-1, 2), "split") == PerBlock(3, 2)
    assert of(PerBlock((1, -1), (3, 4)), "T") == PerBlock((0, 1), (4, 3))
    assert of(PerBlock((1, -1), (3, 4)), "first") == PerBlock((0, 1), (3, 4))


def test_channels_that_are_merged_become_blocks():
    got = jax.eval_shape(MOVES["merged"], quantized(PerChannel(0)))
    assert (got.spec.granularity, got.scale.shape) == (PerBlock((0, 1), (6, 8)), (4, 1))


def test_an_element_of_a_vector_with_scales_has_one():
    part = quantized(PerChannel(0), (3,))[1]
    assert (part.shape, part.scale.shape, part.zero_point.shape, part.spec.granularity) == ((), (), (), PerTensor())


def test_one_block_of_a_tensor_with_a_scale_is_no_tensor():
    """The scale of the tensor scales the one of the block."""
    spec = QuantSpec(bits=4, granularity=PerBlock(0, 16), scale_dtype="float8_e4m3fn")
    part = jax.eval_shape(lambda x: quantize(x, spec)[:16], np.zeros(32, np.float32))
    assert (part.scale.shape, part.tensor_scale.shape, part.spec.granularity) == ((1,), (), PerChannel(0))


def test_an_iteration_ends_and_an_index_is_checked():
    q = quantized(PerChannel(0))
    assert [row.shape for row in q] == [(6, 8)] * 4
    for index in (4, -5):
        with pytest.raises(IndexError, match="out of range for a QArray"):
            q[index]
    for index in (..., (0, None), True, None, 1.0, np.ones(4, bool), (0, np.arange(2))):
        with pytest.raises(TypeError, match="by integers and static slices"):
            q[index]
    with pytest.raises(IndexError, match=r"shape \(\)"):
        quantized(PerTensor(), ())[0]


@by_default("granularity3")
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel((0, 2)), PerChannel(1), PerBlock(0, 2)])
def test_indices_pick_parts_along_the_first_axis(granularity):
    """Eagerly and compiled: the beams of a cache."""
    q, at = quantized(granularity), np.array([[2, -1], [2, 0]])
    real = np.asarray(dequantize(q))
    for pick in (lambda q, at: q[at], jax.jit(lambda q, at: q[at])):
        np.testing.assert_array_equal(dequantize(pick(q, at)), real[at])
    np.testing.assert_array_equal(dequantize(jax.jit(lambda q, at: q[at])(q, at + 100)), real[at * 0 + 3])
    with pytest.raises(IndexError, match=r"must be in \[-4, 4\)"):
        q[at + 3]


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


def test_four_bits_are_moved_in_a_program():
    """XLA:CPU of jaxlib 0.7 copies them wrongly between two layouts, where a program returns them."""
    specs = QuantSpec(bits=4), QuantSpec(bits=4, signed=False, symmetric=False), QuantSpec(format="float4_e2m1fn")
    dtypes = jnp.int4, jnp.uint4, jnp.float4_e2m1fn

    @jax.jit
    def quantized(x):
        each = [quantize(x, spec) for spec in specs]
        each = [dataclasses.replace(q, values=q.values.astype(d)) for q, d in zip(each, dtypes, strict=True)]
        return each, [dataclasses.replace(q, order=(-1, -2)) for q in each]

    each, ordered = quantized(np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32))
    moved = jax.jit(lambda each, ordered: ([q.T for q in each], [dataclasses.replace(q, order=None) for q in ordered]))
    for q, lies, turned, back in zip(each, ordered, *moved(each, ordered), strict=True):
        want = np.asarray(q.stored).astype(np.float32)
        for got, like in ((lies, want.T), (turned, want.T), (back, want)):
            np.testing.assert_array_equal(np.asarray(got.stored).astype(np.float32), like)
