# SPDX-License-Identifier: Apache-2.0
"""A quantized matmul to write into a function by hand, and the values and gradients of such functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from exact import assert_same_bits

from jaxquant import Rule, activation_spec, dot_general, fake_quant, quantize, weight_spec

ACTIVATION, WEIGHT = activation_spec(8), weight_spec(8, channel_axis=-1)
RULES = [Rule("**", weight_spec(8), ACTIVATION)]
MATMUL = (((1,), (0,)), ((), ()))


@jax.custom_vjp
def site(x, w):
    """A quantized matmul as the docstring of `quantize_fn` has it."""
    return dot_general(quantize(x, ACTIVATION), quantize(w, WEIGHT), MATMUL)


def in_float(x, w):
    return fake_quant(x, ACTIVATION) @ fake_quant(w, WEIGHT)


site.defvjp(lambda x, w: (site(x, w), (x, w)), lambda operands, g: jax.vjp(in_float, *operands)[1](g))


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, G = normal(0, 4, 6), normal(1, 4, 6)
PARAMS = {"w": normal(2, 6, 6), "ws": normal(3, 2, 6, 6)}
relu = functools.partial(jnp.maximum, 0.0)  # not jax.nn.relu, which has a derivative of its own


def values_and_gradients(*functions, params=PARAMS, x=X, g=G):
    """Of all in one program, which computes what they share once."""

    @jax.jit
    def each(params, x, g):
        return [(y, vjp(g)) for y, vjp in (jax.vjp(f, params, x) for f in functions)]

    return each(params, x, g)


def value_and_gradients(f, **arguments):
    return values_and_gradients(f, **arguments)[0]


def same(got, want):
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert_same_bits(one, other, jax.tree_util.keystr(path))
