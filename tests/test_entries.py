# SPDX-License-Identifier: Apache-2.0
"""Entries of qparams: the spec of a parameter is that of its operand, with the axes of the parameter."""

import jax
import jax.numpy as jnp
import pytest

from jaxquant import PerBlock, PerChannel, PerTensor, QuantSpec
from jaxquant._jaxpr._program import traced
from jaxquant._jaxpr._walk import DATA, Walk, parameter
from jaxquant._transform._entries import on_parameter


def spec_of(shape, make, granularity):
    """On a parameter of which an operand is made."""
    jaxpr, _ = traced(
        lambda args: [jnp.tensordot(jnp.ones(4), make(args[0], args[1]), 0)], [jnp.ones(shape), jnp.int32(0)]
    )
    walk = Walk()
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
    with pytest.raises(ValueError, match=r"'w' of shape \(.*\), and no granularity of the parameter says it"):
        spec_of(shape, make, granularity)
