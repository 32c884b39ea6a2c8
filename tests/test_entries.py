# SPDX-License-Identifier: Apache-2.0
"""Entries of qparams: the spec of a parameter is that of its operand, with the axes of the parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inputs import ones

from jaxquant import PerBlock, PerChannel, PerTensor, QuantSpec
from jaxquant._program._calls import CALLS
from jaxquant._program._jaxpr import traced
from jaxquant._program._origin import DATA, parameter
from jaxquant._program._walk import Walk
from jaxquant._spec._spec import qparams_shape
from jaxquant._transform._axes import on_operand, on_parameter


def spec_of(shape, make, granularity):
    """On a parameter of which an operand is made."""
    jaxpr, _ = traced(
        lambda args: [jnp.tensordot(jnp.ones(4), make(args[0], args[1]), 0)], [np.ones(shape, np.float32), np.int32(0)]
    )
    walk = Walk(CALLS)
    walk.program(jaxpr, [parameter("w", len(shape)), DATA])
    operand = next(o for c in walk.found() for o in c.operands if o.origin.parts)
    return on_parameter(QuantSpec(granularity=granularity), operand, "w", shape).granularity


index = lambda w, i: jax.lax.dynamic_index_in_dim(w, i, 0, keepdims=False)


@pytest.mark.parametrize(
    ("shape", "make", "granularity", "want"),
    [
        ((6, 8), lambda w, i: w, PerChannel(1), PerChannel(1)),
        ((6, 8), lambda w, i: w.T, PerChannel(0), PerChannel(1)),
        ((6, 8), lambda w, i: w, PerTensor(), PerTensor()),
        ((3, 6, 8), index, PerChannel(1), PerChannel((0, 2))),
        ((3, 6, 8), index, PerTensor(), PerChannel(0)),
        ((3, 6, 8), index, PerBlock(0, 2), PerBlock(1, 2)),
        ((6, 2, 4), lambda w, i: w.reshape(6, 8), PerChannel(1), PerChannel((1, 2))),
        ((2, 4, 6), lambda w, i: w.reshape(8, 6), PerChannel(1), PerChannel(2)),
        ((2, 4, 6), lambda w, i: w.reshape(8, 6), PerBlock(0, 2), PerBlock(1, 2)),
        ((3, 6, 8), index, PerBlock((0, 1), (2, 4)), PerBlock((1, 2), (2, 4))),
        ((6, 8), lambda w, i: w.T, PerBlock((0, 1), (2, 3)), PerBlock((0, 1), (3, 2))),
        ((6, 8), lambda w, i: w.reshape(6, 2, 4), PerChannel((1, 2)), PerChannel(1)),
        ((6, 8), lambda w, i: w[:, :4], PerChannel(1), PerChannel(1)),
        ((6, 1), lambda w, i: w, PerChannel(1), PerTensor()),
    ],
)
def test_axes_are_counted_on_the_parameter(shape, make, granularity, want):
    assert spec_of(shape, make, granularity) == want


@pytest.mark.parametrize(
    ("shape", "make", "granularity"),
    [
        ((36,), lambda w, i: w.reshape(6, 6), PerChannel(1)),
        ((6, 8), lambda w, i: w.reshape(6, 2, 4), PerChannel(1)),
        ((6, 2, 3), lambda w, i: w.reshape(6, 6), PerBlock(1, 2)),
    ],
)
def test_what_no_axes_say_raises_with_both_shapes(shape, make, granularity):
    with pytest.raises(ValueError, match=r"'w' of shape \(.*\), and no granularity of the parameter matches it"):
        spec_of(shape, make, granularity)


MOVES = {
    "as it is": ((6, 4, 8), lambda w: w),
    "transposed": ((6, 4, 8), lambda w: w.transpose(2, 0, 1)),
    "split": ((6, 4, 8), lambda w: w.reshape(6, 4, 2, 4)),
    "merged": ((6, 4, 8), lambda w: w.reshape(24, 8)),
    "merged and transposed": ((6, 4, 8), lambda w: w.transpose(0, 2, 1).reshape(48, 4)),
    "with an axis of size 1": ((6, 4, 8), lambda w: w[:, None]),
    "of size 1": ((6, 1, 8), lambda w: w.reshape(6, 8)),
    "one index of two": ((6, 2, 8), lambda w: w[:, 1:]),
}
GRANULARITIES = [
    PerTensor(), *map(PerChannel, [0, 1, 2, (0, 1), (0, 2), (1, 2), (0, 1, 2)]), PerBlock(0, 2), PerBlock(2, 4),
    PerBlock((1, 2), (1, 4)), PerBlock((0, 2), (3, 2)), PerBlock((0, 1, 2), (1, 1, 4)),
]  # fmt: skip


@pytest.mark.parametrize("move", MOVES)
def test_axes_counted_on_the_operand_and_back_share_the_same_values(move):
    """Wherever both ways can be said: a scale of the parameter stays one of the same values."""
    (shape, make), kept = MOVES[move], 0
    jaxpr, _ = traced(lambda args: [jnp.tensordot(jnp.ones(4), make(args[0]), 0)], [jnp.ones(shape)])
    walk = Walk(CALLS)
    walk.program(jaxpr, [parameter("w", len(shape))])
    operand = next(o for c in walk.found() for o in c.operands if o.origin.parts)
    for granularity in GRANULARITIES:
        spec = QuantSpec(granularity=granularity)
        try:
            there = on_operand(spec, operand, (0,), shape, True)
            back = on_parameter(there, operand, "w", shape)
        except ValueError:
            continue
        again = on_operand(back, operand, (0,), shape, True)
        groups = lambda spec, shape: qparams_shape(spec, shape) or (1,) * len(shape)
        assert groups(back, shape) == groups(spec, shape), granularity
        assert groups(again, operand.shape) == groups(there, operand.shape), granularity
        kept += 1
    assert kept >= 4


def walked(f, *shapes):
    jaxpr, _ = traced(lambda args: jax.tree.leaves(f(*args)), [ones(shape) for shape in shapes])
    walk = Walk(CALLS)
    args = [parameter("w", len(shapes[0])), *(DATA._replace(value=i) for i in range(1, len(shapes)))]
    walk.read(walk.program(jaxpr, args), "the result")
    return walk


def inputs(f, *shapes):
    """Of the operands that are no parameter, what tells their values apart."""
    operands = (o for c in walked(f, *shapes).found() for o in c.operands)
    return [o.origin.value for o in operands if not o.origin.parts]


dense = jax.jit(lambda w, x: x.reshape(-1, 8) @ w)
W, X = (8, 8), (2, 3, 8)


def test_one_value_is_known_by_all_the_ops_that_use_it():
    """However it gets there: by a call, by equal moves, under a checkpoint; and other values are others."""
    q, k, v = inputs(lambda w, x: [dense(w, x), dense(w, x), jax.checkpoint(dense)(w, x)], W, X)
    assert q == k == v
    assert len(set(inputs(lambda w, x: [dense(w, x), dense(w, x + 1), dense(w, x * 1), dense(w, x[:1])], W, X))) == 4
    assert len(set(inputs(lambda w, x: [dense(w, jnp.tanh(x)), dense(w, jnp.tanh(x))], W, X))) == 2
    halves = inputs(lambda w, x: [dense(w, part) for part in jnp.split(x, [1], 1)], W, X)
    assert len(set(halves)) == 2


def test_a_loop_has_values_of_its_own():
    def f(w, x):
        step = lambda c, w: (dense(w, x).reshape(X) + dense(w, x).reshape(X) + dense(w, c).reshape(X), None)
        return jax.lax.scan(step, x, w)[0], dense(w[0], x)

    one, same, carry, outside = inputs(f, (4, *W), X)
    assert one == same
    assert len({one, carry, outside}) == 3


def test_scans_over_parameters_are_noted_and_others_are_not():
    over = lambda w, x: jax.lax.scan(lambda x, w: (dense(w, x).reshape(X), None), x, w)[0]
    assert [[n for _, n in c.stack] for c in walked(over, (4, *W), X).found()] == [[4]]
    data = lambda w, x: jax.lax.scan(lambda c, x: (c, dense(w, x[None])), 0, x)[1]
    assert [c.stack for c in walked(data, W, X).found()] == [()]
    twice = lambda w, x: jax.lax.scan(lambda x, w: (over(w, x), None), x, w)[0]
    assert [[n for _, n in c.stack] for c in walked(twice, (5, 4, *W), X).found()] == [[5, 4]]


def test_what_else_reads_a_parameter_is_noted():
    walk = walked(lambda w, x: (dense(w, x), (w**2).sum(), w[jnp.array([1])], w.T), W, X)
    assert walk.reads["w"] >= {"gather"}
    assert walk.reads["w"] & {"integer_pow", "square"}
    assert walked(lambda w, x: dense(w.T, x), W, X).reads == {}
