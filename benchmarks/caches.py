# SPDX-License-Identifier: Apache-2.0
"""What a quantized cache of keys and values costs and saves: on the CPU, on a TPU that is not there, and in quality."""

import functools
import math
import pydoc_data.topics
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxquant import PerChannel, PerToken, QArray, QuantSpec, dot_general, float8_spec
from jaxquant.cache import update_slice, zeros

from . import aot
from .runner import Part, donated, ratios

jax.config.update("jax_platforms", "cpu")  # whatever else there is

ROWS = QuantSpec(granularity=PerToken())  # of queries and probabilities


def spec_of(name, granularity):
    """A dtype, or the spec of a quantized cache."""
    specs = {
        "int8": QuantSpec(granularity=granularity),
        "float8": float8_spec(granularity=granularity),
        "int4": QuantSpec(bits=4, granularity=granularity),
    }
    return specs.get(name, name)


def empty(of, shape):
    """Keys and values."""
    return tuple(zeros(shape, of) if isinstance(of, QuantSpec) else jnp.zeros(shape, of) for _ in range(2))


def written(cache, new, index):
    if isinstance(cache, QArray):
        return update_slice(cache, new, index)
    return lax.dynamic_update_slice(cache, new.astype(cache.dtype), index)


def product(x, cache, numbers, spec=ROWS):
    if isinstance(cache, QArray):
        return dot_general(x, cache, numbers, spec=spec)
    return lax.dot_general(x.astype(cache.dtype), cache, numbers, preferred_element_type=jnp.float32)


# ---- One attention: 8 heads of 64, one text. A cache is (texts, tokens, heads, features).

HEADS, FEATURES, STEPS = 8, 64, 32
EACH_TOKEN = PerChannel((0, 1, 2))  # and head
KINDS = {  # a cache, and the spec of the other operand
    "int8": ("int8", ROWS),
    "int8, without spec": ("int8", None),
    "float8": ("float8", ROWS),
    "int4": ("int4", ROWS),
}


def attention(spec, caches, new, t):
    """One token attends to all that are in the cache, and to itself."""
    q, k, v = new
    keys, values = (written(cache, token[:, None], (0, t, 0, 0)) for cache, token in zip(caches, (k, v), strict=True))
    scores = product(q, keys, (((2,), (3,)), ((0, 1), (0, 2))), spec) / FEATURES**0.5
    probs = jax.nn.softmax(jnp.where(jnp.arange(keys.shape[1]) <= t, scores, -jnp.inf))
    return (keys, values), product(probs, values, (((2,), (1,)), ((0, 1), (0, 2))), spec)


def loop(spec, state, new):
    """A program of the last STEPS tokens; the results are in the state, too, or nobody would compute them."""
    caches, _ = state
    turns = jnp.arange(STEPS) + caches[0].shape[1] - STEPS
    return lax.scan(lambda caches, turn: attention(spec, caches, *turn), caches, (new, turns))


def step_rows(rounds, *lengths):
    normal = lambda i: jax.random.normal(jax.random.key(i), (STEPS, 1, HEADS, FEATURES))
    new, before = tuple(map(normal, range(3))), normal(3)
    for tokens in lengths:
        run = lambda name, spec, tokens=tokens: donated(
            functools.partial(loop, spec),
            (empty(spec_of(name, EACH_TOKEN), (1, tokens, HEADS, FEATURES)), jnp.zeros_like(before)),
            new,
        )
        runs = {name: run(*kind) for name, kind in {"float32": ("float32", None), **KINDS}.items()}
        for name, ratio in ratios(runs, "float32", rounds).items():
            yield f"{tokens:,} tokens, {name}", ratio


def in_float(program, size):
    """Whether a program writes so many floats for a kernel of its own to read, outside of the chip's memory: S(1)."""
    shapes = re.findall(r"= \(?(?:f32|bf16|f16)\[([\d,]+)\]\{(\S*)\}", program.optimized.partition("ENTRY")[2])
    return any(math.prod(map(int, shape.split(","))) == size and "S(1)" not in layout for shape, layout in shapes)


def estimated_rows(_, *sizes):
    if why := aot.missing("v5e"):
        print(f"Skipped: the estimates need {why.removeprefix('needs ')}.")
        return
    for texts, tokens in sizes:
        shape = texts, tokens, HEADS, FEATURES
        like = jax.ShapeDtypeStruct((texts, HEADS, FEATURES), jnp.float32)
        new, t = (like, like, like), jax.ShapeDtypeStruct((), jnp.int32)

        def compiled(of, spec, shape=shape, args=(new, t)):
            caches = jax.eval_shape(lambda: empty(spec_of(of, EACH_TOKEN), shape))
            return aot.compiled(functools.partial(attention, spec), (caches, *args), "v5e")

        base = compiled("bfloat16", None)
        for name, kind in KINDS.items():
            program = compiled(*kind)
            cycles, nbytes = program.cycles / base.cycles, program.bytes / base.bytes
            read = "float" if in_float(program, math.prod(shape)) else "integers"
            yield f"{tokens:,} tokens, batch {texts}, {name}", cycles, nbytes, read


# ---- The character model of notebook 11, all of its weights in float.

LAYERS, WIDTH, LENGTH, BATCH, TRAINING = 2, 64, 64, 4, 1200
OWN_HEADS = 4
CACHES = "float32", "int8", "float8", "int4"


def normed(x, gain):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def model(params, tokens, caches=None, start=0):
    n = tokens.shape[1]
    x = params["embedding"][tokens] + lax.dynamic_slice_in_dim(params["positions"], start, n)

    def layer(carry, of_layer):
        (x, caches), (p, i) = carry, of_layer
        q, k, v = jnp.split(normed(x, p["norms"][0]) @ p["qkv"], 3, -1)
        q, k, v = (y.reshape(*y.shape[:2], OWN_HEADS, -1) for y in (q, k, v))
        if caches is not None:
            index = (i, 0, start, 0, 0)
            caches = tuple(written(cache, new[None], index) for cache, new in zip(caches, (k, v), strict=True))
            k, v = (cache[i] for cache in caches)
        scores = product(q, k, (((3,), (3,)), ((0, 2), (0, 2)))) / q.shape[-1] ** 0.5
        seen = jnp.arange(k.shape[1]) <= start + jnp.arange(n)[:, None]
        probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        attended = product(probs, v, (((3,), (1,)), ((0, 1), (0, 2))))
        x = x + jnp.moveaxis(attended, 1, 2).reshape(x.shape) @ p["out"]
        return (x + jax.nn.gelu(normed(x, p["norms"][1]) @ p["up"]) @ p["down"], caches), None

    layers = params["layers"], jnp.arange(LAYERS)
    (x, caches), _ = lax.scan(layer, (x, caches), layers)
    return normed(x, params["norm"]) @ params["embedding"].T, caches


@functools.cache
def texts():
    """How many symbols there are, and the characters to train on and to test with."""
    text = [c for c in "".join(pydoc_data.topics.topics.values()) if c.isascii()]
    alphabet, data = np.unique(text, return_inverse=True)
    training, test = np.split(data.astype(np.int32), [len(data) * 9 // 10])
    test = test[: len(test) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)[::5][:128]
    return len(alphabet), training, test


def init(seed, symbols):
    keys = iter(jax.random.split(jax.random.key(seed), 6))
    normal = lambda size, *shape: size * jax.random.normal(next(keys), shape)
    one, deep = WIDTH**-0.5, (2 * LAYERS * WIDTH) ** -0.5
    layers = {
        "norms": jnp.ones((LAYERS, 2, WIDTH)),
        "qkv": normal(one, LAYERS, WIDTH, 3 * WIDTH),
        "out": normal(deep, LAYERS, WIDTH, WIDTH),
        "up": normal(one, LAYERS, WIDTH, 4 * WIDTH),
        "down": normal(deep / 2, LAYERS, 4 * WIDTH, WIDTH),
    }
    ends = {"embedding": normal(one, symbols, WIDTH), "positions": normal(0.1, LENGTH, WIDTH)}
    return {**ends, "layers": layers, "norm": jnp.ones(WIDTH)}


def bits(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean() / jnp.log(2)


@jax.jit
def train(params, batches):
    steps = len(batches)
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, 6e-3, max(steps // 20, 1), steps), b2=0.98)

    def step(carry, tokens):
        params, state = carry
        gradient = jax.grad(lambda p: bits(model(p, tokens[:, :-1])[0], tokens[:, 1:]))(params)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), None

    return lax.scan(step, (params, optimizer.init(params)), batches)[0][0]


def trained(seed, steps):
    symbols, data, _ = texts()
    starts = np.random.default_rng(seed).integers(0, len(data) - LENGTH - 1, (steps, BATCH))
    return train(init(seed, symbols), data[starts[..., None] + np.arange(LENGTH + 1)])


@jax.jit
def read(params, caches, tokens):
    """The logits after each token of texts that are read one token at a time."""

    def step(caches, turn):
        t, token = turn
        logits, caches = model(params, token[:, None], caches, t)
        return caches, logits[:, 0]

    turns = jnp.arange(LENGTH), tokens.T
    return jnp.moveaxis(lax.scan(step, caches, turns)[1], 0, 1)


def quality_rows(seeds):
    steps, (_, _, test) = TRAINING if seeds > 1 else TRAINING // 10, texts()
    each_token = PerChannel((0, 1, 2, 3))  # of each layer and text, and head
    shape = LAYERS, len(test), LENGTH, OWN_HEADS, WIDTH // OWN_HEADS
    found = {name: [] for name in CACHES}
    for params in (trained(seed, steps) for seed in range(seeds)):
        for name in CACHES:
            logits = read(params, empty(spec_of(name, each_token), shape), test[:, :-1])
            found[name].append(float(bits(logits, test[:, 1:])))
    for name, own in found.items():
        more = np.mean(own) - np.mean(found["float32"])
        yield name, ", ".join(f"{v:.4f}" for v in own), f"{np.mean(own):.4f}", f"{more:+.4f}"


PACKAGES = ("optax",)
PARTS = {
    "step": Part(("measured: a step", "time to float32"), step_rows, 31, (512, 2048, 8192)),
    "v5e": Part(
        ("estimated by XLA: a step on a v5e", "cycles to bfloat16", "bytes to bfloat16", "reads"),
        estimated_rows,
        1,
        ((1, 8192), (8, 8192)),
    ),
    "quality": Part(("cache", "bits per character, by seed", "mean", "more than float32"), quality_rows, 3),
}
