# SPDX-License-Identifier: Apache-2.0
"""Low-rank factors trained beside a frozen base, of which no float copy is kept for the backward pass."""

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
    normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape) / 8
    base = {"base": normal(1, layers, WIDTH, WIDTH), "head": normal(2, WIDTH, WIDTH)}
    return normal(0, ROWS, WIDTH), base, {"down": normal(3, layers, WIDTH, RANK), "up": normal(4, layers, RANK, WIDTH)}


def frozen(name, x, base, factors):
    q = quantize_fn(model, RULES[name])
    if RULES[name]:
        integers = q.freeze({**base, **factors}, x)
        return q, {path: integers[path] for path in base}
    by_hand = lambda w: quantize(w, weight_spec(8, channel_axis=(0, -1) if w.ndim == 3 else -1))
    return q, {path: by_hand(w) for path, w in base.items()}


@cases("name", RULES, ["4 bits", "8 x 8 bits", "integers under no rule"])
def test_no_float_copy_of_the_base_is_kept_for_the_backward_pass(name):
    x, base, factors = made(3)
    q, integers = frozen(name, x, base, factors)
    y, pull = jax.vjp(lambda factors: q({**integers, **factors}, x), factors)
    kept = [v for v in jax.tree.leaves(pull) if v.size >= WIDTH * WIDTH]
    assert kept
    assert {v.dtype for v in kept} <= {w.stored.dtype for w in integers.values()}
    (got,) = pull(jnp.ones_like(y))
    if RULES[name]:  # the value of training, and its gradient, whose products are in another order
        z, pull = jax.vjp(lambda factors: q({**base, **factors}, x), factors)
        assert_same_bits(y, z)
        for path, expected in pull(jnp.ones_like(y))[0].items():
            np.testing.assert_allclose(got[path], expected, atol=1e-5, err_msg=path)
    else:
        assert all((v != 0).any() for v in got.values())


def test_no_float_copy_of_the_base_is_in_the_memory_of_a_step():
    def temporary(layers):
        x, base, factors = made(layers)
        q, integers = frozen("4 bits", x, base, factors)
        loss = lambda factors, integers: (q({**integers, **factors}, x) ** 2).sum()
        return jax.jit(jax.grad(loss)).lower(factors, integers).compile().memory_analysis().temp_size_in_bytes

    assert (temporary(16) - temporary(8)) / 8 < 0.8 * 4 * WIDTH * WIDTH


@pytest.mark.parametrize("name", ["4 bits", "8 x 8 bits"])
def test_the_scales_of_a_frozen_base_have_a_gradient(name):
    x, base, factors = made(2)
    q, integers = frozen(name, x, base, factors)
    gradient = jax.grad(lambda p: (q({**p, **factors}, x) ** 2).sum(), allow_int=True)(integers)
    assert all((gradient[path].scale != 0).any() for path in base)
