# SPDX-License-Identifier: Apache-2.0
"""The models that are taken to other runtimes: the CNN of the first notebook and the language model of the fifth."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxquant import Rule, activation_spec, quant_point, quantize_fn, weight_spec

W8, A8 = weight_spec(8), activation_spec(8)
STRIDES = {"conv1": 1, "conv2": 2, "conv3": 2}
HEADS, LAYERS, WIDTH, LENGTH, ALPHABET = 4, 2, 64, 32, 96


def conv(x, w, stride=1):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def cnn(params, x):
    for name, stride in STRIDES.items():
        x = jax.nn.relu(conv(x, params[name]["w"], stride) + params[name]["b"])
    return quant_point(x.reshape(x.shape[0], -1) @ params["dense"]["w"] + params["dense"]["b"], "logits")


def init_cnn(key):
    shapes = {"conv1": (3, 3, 1, 8), "conv2": (3, 3, 8, 16), "conv3": (3, 3, 16, 32), "dense": (128, 10)}
    he = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, len(shapes))
    return {
        name: {"w": he(k, shape), "b": jnp.zeros(shape[-1])}
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


LOGITS = Rule("logits", activation=A8, kind="value")
quantized_cnn = quantize_fn(cnn, [Rule("*/w", W8, A8)])
int8_cnn = quantize_fn(cnn, [LOGITS, Rule("*/w", W8, A8)])  # with logits on a grid, for integers alone


def normed(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def language_model(params, tokens):
    x = params["embedding"][tokens] + params["positions"][: tokens.shape[1]]
    unseen = jnp.triu(jnp.full((tokens.shape[1],) * 2, -1e30), 1)

    def layer(x, p):
        q, k, v = jnp.split(normed(x, p["norms"][0]) @ p["qkv"], 3, -1)
        heads = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
        scores = jnp.einsum("bthk,bshk->bhts", heads(q), heads(k)) / (q.shape[-1] / HEADS) ** 0.5
        attended = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores + unseen), heads(v))
        x = x + attended.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(normed(x, p["norms"][1]) @ p["up"]) @ p["down"], None

    x, _ = lax.scan(layer, x, params["layers"])
    return quant_point(normed(x, params["norm"]) @ params["embedding"].T, "logits")


def init_language_model(key):
    normal = lambda key, *shape, size=1.0: size * jax.random.normal(key, shape)
    keys = jax.random.split(key, 6)
    one, deep = WIDTH**-0.5, (2 * LAYERS * WIDTH) ** -0.5
    layers = {
        "norms": jnp.ones((LAYERS, 2, WIDTH)),
        "qkv": normal(keys[0], LAYERS, WIDTH, 3 * WIDTH, size=one),
        "out": normal(keys[1], LAYERS, WIDTH, WIDTH, size=deep),
        "up": normal(keys[2], LAYERS, WIDTH, 4 * WIDTH, size=one),
        "down": normal(keys[3], LAYERS, 4 * WIDTH, WIDTH, size=deep / 2),
    }
    embedding, positions = normal(keys[4], ALPHABET, WIDTH, size=one), normal(keys[5], LENGTH, WIDTH, size=0.1)
    return {"embedding": embedding, "positions": positions, "layers": layers, "norm": jnp.ones(WIDTH)}


LANGUAGE = [Rule("embedding", W8, A8, everywhere=True), Rule("layers/*", W8, A8)]
quantized_language_model = quantize_fn(language_model, LANGUAGE)
int8_language_model = quantize_fn(language_model, [LOGITS, *LANGUAGE])
