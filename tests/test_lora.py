# SPDX-License-Identifier: Apache-2.0
"""Low-rank factors trained beside a frozen base, of which no float copy is kept for the backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from lanes import cases

from jaxquant import QuantSpec, Rule, activation_spec, float8_spec, nvfp4_spec, quantize, quantize_fn, weight_spec

ROWS, WIDTH, RANK = 2, 128, 4
A8 = activation_spec(8)
RULES = {
    "4 bits": [("base", weight_spec(4, block_size=32)), ("head", weight_spec(8))],
    "8 x 8 bits": [Rule("base", weight_spec(8), A8), Rule("head", weight_spec(8), A8)],
    "gradient": [Rule("base", weight_spec(8), A8, gradient=QuantSpec()), Rule("head", weight_spec(8), A8)],
    "float8": [("base", float8_spec()), ("head", float8_spec())],
    "nvfp4": [Rule("base", nvfp4_spec(), nvfp4_spec()), ("head", nvfp4_spec())],
    "integers under no rule": [],
}


def model(params, x):
    def layer(x, p):
        return jnp.tanh(x @ p["base"] + (x @ p["down"]) @ p["up"]), None

    x, _ = jax.lax.scan(layer, x, {name: params[name] for name in ("base", "down", "up")})
    return x @ params["head"]


def made(layers):
    """The input, the base and the factors."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32) / 8
    base = {"base": normal(layers, WIDTH, WIDTH), "head": normal(WIDTH, WIDTH)}
    return normal(ROWS, WIDTH), base, {"down": normal(layers, WIDTH, RANK), "up": normal(layers, RANK, WIDTH)}


def quantized(name):
    """The function, and what makes integers of its base."""
    q = quantize_fn(model, RULES[name])
    by_hand = lambda w: quantize(w, weight_spec(8, channel_axis=(0, -1) if w.ndim == 3 else -1))

    def frozen(base, factors, x):
        params = q.freeze({**base, **factors}, x) if RULES[name] else jax.tree.map(by_hand, base)
        return {path: params[path] for path in base}

    return q, frozen


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(f, *args):
    y, pull = jax.vjp(f, *args)
    return y, *pull(jnp.ones_like(y))


@cases("name", RULES)
def test_no_float_copy_of_the_base_is_kept_for_the_backward_pass(name):
    """And the scales of the integers have a gradient."""
    (x, base, factors), (q, frozen) = made(3), quantized(name)
    integers = frozen(base, factors, x)
    call = lambda factors, base: q({**base, **factors}, x)
    _, pull = jax.eval_shape(lambda factors: jax.vjp(lambda factors: call(factors, integers), factors), factors)
    kept = [v for v in jax.tree.leaves(pull) if v.size >= WIDTH * WIDTH]
    assert kept
    assert {v.dtype for v in kept} <= {w.stored.dtype for w in integers.values()}
    y, got, of_base = value_and_gradients(call, factors, integers)
    assert all(np.asarray(v).any() for v in (*got.values(), *(w.scale for w in of_base.values())))
    if RULES[name]:  # the value of training, and its gradient, whose products are in another order
        z, expected = value_and_gradients(lambda factors: call(factors, base), factors)
        assert_same_bits(y, z)
        for path in factors:
            np.testing.assert_allclose(got[path], expected[path], atol=1e-5, err_msg=path)


@pytest.mark.slow
def test_no_float_copy_of_the_base_is_in_the_memory_of_a_step():
    def temporary(layers):
        (x, base, factors), (q, frozen) = made(layers), quantized("4 bits")
        loss = lambda factors, integers: (q({**integers, **factors}, x) ** 2).sum()
        step = jax.jit(jax.grad(loss)).lower(factors, jax.eval_shape(frozen, base, factors, x))
        return step.compile().memory_analysis().temp_size_in_bytes

    assert (temporary(16) - temporary(8)) / 8 < 0.8 * 4 * WIDTH * WIDTH
