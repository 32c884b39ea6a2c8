# SPDX-License-Identifier: Apache-2.0
"""Writes digits_cnn.npz: the CNN of shipped.py, trained by QAT on scikit-learn's digits, as integers with qparams.

    PYTHONPATH=tests python tests/data/make_digits_cnn.py

It is stored, so that what other runtimes make of it is the same on every machine.
"""

import pathlib

import jax
import jax.numpy as jnp
import optax
from shipped import cnn, init_cnn, int8_cnn
from sklearn.datasets import load_digits

from jaxquant import save

images, labels = load_digits(return_X_y=True)
x, y = jnp.asarray(images[:1200] / 16, jnp.float32).reshape(-1, 8, 8, 1), jnp.asarray(labels[:1200])


def train(f, trained, epochs, learning_rate):
    optimizer = optax.adam(learning_rate)
    loss = lambda trained, x, y: optax.softmax_cross_entropy_with_integer_labels(f(trained, x), y).mean()

    @jax.jit
    def step(carry, batch):
        trained, state = carry
        updates, state = optimizer.update(jax.grad(loss)(trained, x[batch], y[batch]), state)
        return (optax.apply_updates(trained, updates), state), None

    carry = trained, optimizer.init(trained)
    for key in jax.random.split(jax.random.key(1), epochs):
        carry, _ = jax.lax.scan(step, carry, jax.random.permutation(key, len(x)).reshape(-1, 60))
    return carry[0]


params = train(cnn, init_cnn(jax.random.key(0)), 20, 2e-3)
qparams = int8_cnn.init_qparams(params, x, ranges=int8_cnn.observe(params, x))
params, qparams = train(lambda trained, x: int8_cnn(trained[0], x, qparams=trained[1]), (params, qparams), 10, 1e-3)
logits = int8_cnn(params, x, qparams=qparams)
print("of the images of the training", float((logits.argmax(-1) == y).mean()), "are right")
frozen = int8_cnn.freeze(params, x, qparams=qparams)
save(pathlib.Path(__file__).with_name("digits_cnn.npz"), {"params": frozen, "qparams": qparams})
