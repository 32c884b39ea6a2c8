# SPDX-License-Identifier: Apache-2.0
"""What bits chosen for each parameter gain over equal bits of the same size: PTQ of weights, three seeds."""

import functools
import pydoc_data.topics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jaxquant import Rule, quantize_fn, report, weight_spec
from jaxquant.solve import choose_bits

from .runner import Part

WIDTHS = 2, 3, 4, 8


class Trained(NamedTuple):
    """A model, trained in float, and its data: (inputs, labels)."""

    f: Callable
    params: Any
    batches: tuple
    calibration: tuple
    test: tuple


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(f, params, batches, rate):
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, len(batches[0])))

    @jax.jit
    def run(params):
        def step(carry, batch):
            params, state = carry
            gradient = jax.grad(lambda p: cross_entropy(f(p, batch[0]), batch[1]))(params)
            updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, (params, optimizer.init(params)), batches)[0][0]

    return run(params)


def cnn(params, x):
    conv = functools.partial(lax.conv_general_dilated, padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = jax.nn.relu(conv(x, params["conv1"], (1, 1)))
    x = jax.nn.relu(conv(x, params["conv2"], (2, 2)))
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["hidden"])
    return x @ params["head"]


def digits(seed):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    x, x_test, y, y_test = train_test_split(images, labels, train_size=1200, random_state=seed, stratify=labels)
    shapes = {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "hidden": (512, 32), "head": (32, 10)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    params = {
        name: jax.random.normal(key, shape) * (2 / np.prod(shape[:-1])) ** 0.5
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    order = np.concatenate([np.random.default_rng(i).permutation(1200) for i in range(20)]).reshape(-1, 60)
    batches = x[order], y[order]
    return Trained(cnn, train(cnn, params, batches, 5e-3), batches, (x[:600], y[:600]), (x_test, y_test))


WIDTH, LENGTH = 64, 64


def language_model(params, tokens):
    normed = lambda x: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    x = params["embedding"][tokens] + params["positions"]
    unseen = jnp.triu(jnp.full((LENGTH, LENGTH), -1e30), 1)
    for p in params["layers"]:
        q, k, v = jnp.split(normed(x) @ p["qkv"], 3, -1)
        attended = jax.nn.softmax(q @ k.swapaxes(1, 2) / WIDTH**0.5 + unseen) @ v
        x = x + attended @ p["out"]
        x = x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"]
    return normed(x) @ params["head"]


def characters(seed):
    text = "".join(c for c in "".join(pydoc_data.topics.topics.values()) if c.isascii())
    data = np.unique(list(text), return_inverse=True)[1].astype(np.int32)
    symbols = int(data.max()) + 1
    keys = iter(jax.random.split(jax.random.key(seed), 20))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * shape[0] ** -0.5
    sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = {
        "embedding": normal(symbols, WIDTH), "positions": normal(LENGTH, WIDTH) / 4, "head": normal(WIDTH, symbols),
        "layers": [{name: normal(*shape) / (1 + (name in ("out", "down"))) for name, shape in sizes.items()}
                   for _ in range(2)],
    }  # fmt: skip
    starts = np.random.default_rng(seed).integers(0, len(data) * 9 // 10 - LENGTH - 1, (800, 8, 1))
    windows = data[starts + np.arange(LENGTH + 1)]
    batches = windows[..., :-1], windows[..., 1:]
    params = train(language_model, params, batches, 5e-3)
    at = np.arange(len(data) * 9 // 10, len(data) - LENGTH - 1, LENGTH)[:256, None]
    test = data[at + np.arange(LENGTH + 1)]
    calibration = windows[:16].reshape(-1, LENGTH + 1)
    calibration, test = ((v[:, :-1], v[:, 1:]) for v in (calibration, test))
    return Trained(language_model, params, batches, calibration, test)


def costs(model, seed):
    """How much the test loss grows at uniform bits, and at chosen ones of no more bytes: {bits: (uniform, chosen)}."""
    f, params, _, (x, y), (x_test, y_test) = model(seed)
    test = lambda g: float(cross_entropy(jax.jit(g)(params, x_test), y_test))
    in_float = test(f)
    found = report(quantize_fn(f, [("**", weight_spec(4))]), params, x, loss=lambda z: cross_entropy(z, y), bits=WIDTHS)
    for bits in WIDTHS[:-1]:
        budget = sum(row.nbytes(bits) for row in found if row.by_bits)
        chosen = choose_bits(found, budget)
        uniform = quantize_fn(f, [("**", weight_spec(bits))])
        mixed = quantize_fn(f, [Rule(path, weight_spec(b)) for path, b in chosen.items()])
        yield bits, test(uniform) - in_float, test(mixed) - in_float


MODELS = {"digits CNN": digits, "character model": characters}


def cost_rows(seeds, *names):
    for name in names:
        found = {}
        for seed in range(seeds):
            for bits, *grown in costs(MODELS[name], seed):
                found.setdefault(bits, []).append(grown)
        for bits in WIDTHS[1:-1]:  # at the fewest bits there is nothing to choose
            each = tuple(zip(*found[bits], strict=True))  # uniform, chosen
            words = [", ".join(f"{v:+.3f}" for v in values) for values in each]
            yield name, f"{bits} bits", *words, *(f"{np.mean(values):+.3f}" for values in each)


PACKAGES = ("scikit-learn",)
COLUMNS = "model", "budget of", "uniform, three seeds", "chosen, three seeds", "mean, uniform", "mean, chosen"
PARTS = {"costs": Part(COLUMNS, cost_rows, 3, tuple(MODELS))}
