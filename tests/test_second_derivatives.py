# SPDX-License-Identifier: Apache-2.0
"""The derivative of a derivative through a scan is the one through the same steps written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lanes import cases

from jaxquant import QParams, QuantSpec, Rule, activation_spec, fake_quant, quantize_fn, tf, weight_spec

W8, A8, S8 = weight_spec(8), activation_spec(8), activation_spec(8, symmetric=True)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 8)).astype(np.float32)
LAYERS = (RNG.normal(size=(3, 8, 8)) / 3).astype(np.float32)  # square, so that no shape tells x from a weight


def quantized(rule, **options):
    q = quantize_fn(lambda w, h: h @ w, [rule], **options)
    return lambda h, w: q(w, h)


STEPS = {
    "fake_quant": lambda h, w: fake_quant(h, A8) @ w,
    "fake_quant of qparams": lambda h, w: h @ fake_quant(w, QuantSpec(), QParams(abs(w).max() / 127, jnp.zeros(()))),
    "args": lambda h, w: tf.fake_quant_with_min_max_args(h, -1, 1) @ w,
    "vars": lambda h, w: tf.fake_quant_with_min_max_vars(h, -w.max(), w.max()) @ w,
    "per channel": lambda h, w: tf.fake_quant_with_min_max_vars_per_channel(h, -abs(w).max(0), abs(w).max(0)) @ w,
    "quantize_and_dequantize_v2": lambda h, w: tf.quantize_and_dequantize_v2(h, -1.0, 1.0, range_given=True) @ w,
    "integers": quantized(Rule("", W8, A8)),
    "blocks": quantized(Rule("", weight_spec(8, block_size=4), S8)),
    "gradient in integers": quantized(Rule("", W8, S8, gradient=QuantSpec(bits=16))),
}


def twice(f):
    """The gradients of the squared norm of a gradient: a product of the Hessian, which has no zeros here."""
    squares = lambda tree: sum(jnp.vdot(v, v) for v in jax.tree.leaves(tree))
    return jax.jit(jax.grad(lambda w, x: squares(jax.grad(lambda w, x: squares(f(w, x)), (0, 1))(w, x)), (0, 1)))


@pytest.mark.slow
@cases("name", list(STEPS), ["vars"])
def test_through_a_scan(name):
    step = lambda h, w: jnp.tanh(STEPS[name](h, w))

    def written_out(w, x):
        for layer in w:
            x = step(x, layer)
        return x

    expected = twice(written_out)(LAYERS, X)
    assert all(abs(v).max() > 1 for v in expected)
    for body in (step, jax.checkpoint(step)):
        scanned = lambda w, x, body=body: lax.scan(lambda h, layer: (body(h, layer), None), x, w)[0]
        for actual, wanted in zip(twice(scanned)(LAYERS, X), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4 * abs(wanted).max())
