# %% [markdown]
# # Generate with a quantized cache
#
# A language model that generates keeps the keys and values of all tokens so far. With many texts and long ones this
# cache is larger than the weights. Here the transformer of notebook 05 gets its weights solved to 4 bits, is saved, and
# a new process loads it and generates with caches of float32, bfloat16, int8, float8 and int4. Its loop is one program:
# a `lax.scan` in which the cache is written in place. The same loop, exported by `jax.export`, runs where the model is
# not known. [Generate](../docs/generate.md) says what each op of the cache does.
#
#     solve ─▶ q.freeze ─▶ save ─▶ load ─▶ zeros ─▶ scan of update_slice and dot_general(..., spec=)

# %%
# SPDX-License-Identifier: Apache-2.0
import json
import pickle
import pydoc_data.topics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax import lax

from jaxquant import (
    PerChannel,
    QArray,
    QuantSpec,
    Rule,
    float8_spec,
    merge,
    quantize_fn,
    save,
    solve,
    weight_spec,
)  # fmt: skip
from jaxquant.cache import zeros

output = Path("output")
output.mkdir(exist_ok=True)
STEPS, BATCH = 1000, 4
LAYERS, WIDTH, HEADS, LENGTH = 2, 64, 4, 64
TEXTS, PROMPT = 8, 16  # what is generated: so many texts, after so many characters

# %% [markdown]
# ## A model with a cache
#
# A small transformer. It takes any number of tokens, from position `start` on. In training there are no caches, and it
# attends to its own keys and values. Given caches, it writes into them first. A cache is an array or a QArray, of shape
# (layers, texts, tokens, heads, features). The layers are scanned, and the caches are in the carry: what is scanned
# over would be copied.
#
# The served loop is `generate`: one program that takes a token in each step, a given one or the one it has just chosen.
# So it reads texts, too, and its logits say how well. The caches that it is given are donated, and written in place.

# %%
MODEL = f"""
import functools
import jax, jax.numpy as jnp
from jax import lax
from jaxquant import PerToken, QArray, QuantSpec, dot_general
from jaxquant.cache import update_slice

HEADS = {HEADS}
ROWS = QuantSpec(granularity=PerToken())  # of queries and probabilities: int8, a scale for each row


def normed(x, gain):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def written(cache, new, index):
    if isinstance(cache, QArray):
        return update_slice(cache, new, index)
    return lax.dynamic_update_slice(cache, new.astype(cache.dtype), index)


def product(x, cache, dimensions):
    if isinstance(cache, QArray):
        return dot_general(x, cache, dimensions, spec=ROWS)
    return lax.dot_general(x, cache.astype(x.dtype), dimensions)


def model(params, tokens, caches=None, start=0):
    n = tokens.shape[1]
    x = params["embedding"][tokens] + lax.dynamic_slice_in_dim(params["positions"], start, n)

    def layer(carry, of_layer):
        (x, caches), (p, i) = carry, of_layer
        q, k, v = jnp.split(normed(x, p["norms"][0]) @ p["qkv"], 3, -1)
        q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in (q, k, v))
        if caches is not None:
            index = (i, 0, start, 0, 0)
            caches = tuple(written(cache, new[None], index) for cache, new in zip(caches, (k, v)))
            k, v = (cache[i] for cache in caches)
        scores = product(q, k, (((3,), (3,)), ((0, 2), (0, 2)))) / q.shape[-1] ** 0.5
        seen = jnp.arange(k.shape[1]) <= start + jnp.arange(n)[:, None]
        probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        attended = product(probs, v, (((3,), (1,)), ((0, 1), (0, 2))))
        x = x + jnp.moveaxis(attended, 1, 2).reshape(x.shape) @ p["out"]
        return (x + jax.nn.gelu(normed(x, p["norms"][1]) @ p["up"]) @ p["down"], caches), None

    layers = params["layers"], jnp.arange(len(params["layers"]["norms"]))
    (x, caches), _ = lax.scan(layer, (x, caches), layers)
    return normed(x, params["norm"]) @ params["embedding"].T, caches


def generator(q):
    @functools.partial(jax.jit, donate_argnames="caches")
    def generate(served, caches, tokens, given, seed):
        "Texts of which the first tokens are given, with all others written; the logits after each token; the caches."

        def step(carry, turn):
            (token, caches), (t, own, key) = carry, turn
            token = jnp.where(t < given, own, token)
            logits, caches = q(served["params"], token[:, None], caches, t, qparams=served["qparams"])
            return (jax.random.categorical(key, logits[:, 0] / 0.7), caches), (token, logits[:, 0])

        length = tokens.shape[1]
        turns = jnp.arange(length), tokens.T, jax.random.split(jax.random.key(seed), length)
        (_, caches), (tokens, logits) = lax.scan(step, (tokens[:, 0], caches), turns)
        return tokens.T, jnp.moveaxis(logits, 0, 1), caches

    return generate
"""
(output / "cached_model.py").write_text(MODEL)
sys.path.insert(0, str(output))
from cached_model import generator, model

# %% [markdown]
# ## Train, solve, save
#
# As in [notebook 10](10_solve_without_training.ipynb): trained in float on Python's documentation character by
# character, then solved. `solve.ranges` fits the scales, `solve.gptq` chooses the levels. The embedding, which is the
# output too, has 8 bits.

# %%
text = np.array([c for c in "".join(pydoc_data.topics.topics.values()) if c.isascii()])
alphabet, data = np.unique(text, return_inverse=True)
train_data, test_data = np.split(data.astype(np.int32), [len(data) * 9 // 10])
test = test_data[: len(test_data) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)[::5][:128]


def windows(seed, *shape):
    starts = np.random.default_rng(seed).integers(0, len(train_data) - LENGTH - 1, shape)
    return train_data[starts[..., None] + np.arange(LENGTH + 1)]


def init(seed):
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
    ends = {"embedding": normal(one, len(alphabet), WIDTH), "positions": normal(0.1, LENGTH, WIDTH)}
    return {**ends, "layers": layers, "norm": jnp.ones(WIDTH)}


def bits(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean() / jnp.log(2)


@jax.jit
def train(params, batches):
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, 6e-3, STEPS // 20, STEPS), b2=0.98)

    def step(carry, tokens):
        params, state = carry
        gradient = jax.grad(lambda p: bits(model(p, tokens[:, :-1])[0], tokens[:, 1:]))(params)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), None

    return lax.scan(step, (params, optimizer.init(params)), batches)[0][0]


start = time.perf_counter()
params = jax.block_until_ready(train(init(0), windows(0, STEPS, BATCH)))
print(f"{STEPS} steps in {time.perf_counter() - start:.0f} s")

RULES = [Rule("embedding", weight_spec(8), everywhere=True), Rule("layers/*", weight_spec(4))]
q = quantize_fn(model, RULES)
calibration = windows(2000, 4, 32)[..., :-1]
tokens = calibration[0]
# The embedding is also the head: its Gram sees the head alone, so that it stays with the nearest levels.
layers = [site.entry for site in q.plan(params, tokens) if site.kind == "weight" and site.entry.startswith("layers")]
grams = merge(*(q.observe(params, batch, gram=True, entries=layers) for batch in calibration))
qparams = solve.ranges(params, q, grams, tokens)
solved = solve.gptq(params, q, grams, tokens, qparams=qparams)
served = {"params": q.freeze(solved, tokens, qparams=qparams), "qparams": qparams}
save(output / "11_weights.npz", served)

in_float = float(bits(jax.jit(model)(params, test[:, :-1])[0], test[:, 1:]))
weights = {"float32": params, "4 bits": served["params"]}
is_qarray = lambda leaf: isinstance(leaf, QArray)  # which counts half a byte for 4 bits; jax counts a whole one
weights = {name: sum(v.nbytes for v in jax.tree.leaves(tree, is_leaf=is_qarray)) for name, tree in weights.items()}
print(f"bits per character in float: {in_float:.3f}")
print(f"bytes of weights: {weights['float32']} in float, {weights['4 bits']} in 4 bits")

# %% [markdown]
# ## Five caches
#
# A scale for each token and head: what is written is quantized by itself, and never again. The bits per character are
# those of the served model, one token at a time, each after all that is in the cache.

# %%
EACH = PerChannel((0, 1, 2, 3))  # layer, text, token, head
CACHES = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "int8": QuantSpec(granularity=EACH),
    "float8": float8_spec(granularity=EACH),
    "int4": QuantSpec(bits=4, granularity=EACH),
}


def empty(of, texts):
    shape = (LAYERS, texts, LENGTH, HEADS, WIDTH // HEADS)
    return tuple(zeros(shape, of) if isinstance(of, QuantSpec) else jnp.zeros(shape, of) for _ in ("keys", "values"))


generate = generator(q)
quality, size, in_place, decoded = {}, {}, {}, {}


def measure(name):
    caches = empty(CACHES[name], len(test))
    nbytes = sum(cache.nbytes for cache in caches)
    size[name] = nbytes // (len(test) * LENGTH)
    program = generate.lower(served, caches, test[:, :-1], LENGTH, 0).compile()
    in_place[name] = program.memory_analysis().alias_size_in_bytes == nbytes
    _, *decoded[name] = program(served, caches, test[:, :-1], LENGTH, 0)
    quality[name] = float(bits(decoded[name][0], test[:, 1:]))


with ThreadPoolExecutor(2) as pool:  # two at a time, for most of it is compiling
    list(pool.map(measure, CACHES))
print("cache       bytes per token   bits per character   more than float32   in place")
for name in CACHES:
    more = quality[name] - quality["float32"]
    print(f"{name:<12}{size[name]:>15}{quality[name]:>21.4f}{more:>+20.4f}{in_place[name]!s:>11}")

# %% [markdown]
# ## The same as all at once
#
# A prompt can be written in one call, too, and gives the logits of one token after another: the scales of a token do
# not depend on what is written with it. Attention on the same queries, keys and values is then equal to the bit, if the
# softmax is computed row by row in both (`tests/test_cache.py` shows it on 200 tokens). The whole model is not: sums of
# floats, in norms, softmax and products with float inputs, have other last bits in other shapes. Now and then this puts
# a key or value on the other side of a tie, and it has another level.

# %%
whole, caches = jax.jit(q)(served["params"], test[:, :-1], empty(CACHES["int8"], len(test)), qparams=qparams)
one_by_one, one_by_one_caches = decoded["int8"]
levels = sum(cache.size for cache in caches)
other = sum(int((a.values != b.values).sum()) for a, b in zip(caches, one_by_one_caches, strict=True))
apart = float(jnp.abs(whole - one_by_one).max())
print(f"{other} of {levels} levels in the caches differ; logits by {apart:.1e} at most")
print(f"{float(bits(whole, test[:, 1:])):.4f} and {quality['int8']:.4f} bits per character")

# %% [markdown]
# ## A new process generates
#
# It loads the weights, knows the model, the rules and the specs of the caches, and writes text. The tokens per second
# are of the whole loop with its prompt, the fastest of eight runs on the machine that ran this notebook. In a model as
# narrow as this, on a CPU, reading the cache is not what takes the time, while XLA:CPU has no fast way with float8 and
# with integers of 4 bits: here a quantized cache saves bytes, not seconds.

# %%
SERVER = """
import json, pickle, sys, time
import jax, jax.numpy as jnp
from jaxquant import QuantSpec, load, quantize_fn
from jaxquant.cache import zeros
sys.path.insert(0, "output")
from cached_model import generator, model

rules, specs, shape, tokens, given = pickle.load(open("output/11_rules.pickle", "rb"))
served, generate = load("output/11_weights.npz"), generator(quantize_fn(model, rules))
times, texts = {name: [] for name in specs}, {}
for _ in range(8):
    for name, of in specs.items():
        empty = lambda: zeros(shape, of) if isinstance(of, QuantSpec) else jnp.zeros(shape, of)
        caches = jax.block_until_ready((empty(), empty()))
        start = time.perf_counter()
        written, *_ = jax.block_until_ready(generate(served, caches, tokens, given, 0))
        times[name].append(time.perf_counter() - start)
        texts[name] = written.tolist()
print(json.dumps({name: (texts[name], tokens.size / min(times[name])) for name in specs}))
"""


def new_process(code):
    return json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


tokens = test[:TEXTS, :-1]
shape = (LAYERS, TEXTS, LENGTH, HEADS, WIDTH // HEADS)
timed = {name: CACHES[name] for name in ("float32", "int8", "float8", "int4")}
(output / "11_rules.pickle").write_bytes(pickle.dumps((RULES, timed, shape, tokens, PROMPT)))
found = new_process(SERVER)
texts = {name: np.array(tokens) for name, (tokens, _) in found.items()}
print(f"{TEXTS} texts     bytes of weights   bytes of cache   tokens per second")
for name, (_, speed) in found.items():
    print(f"{name:<12}{weights['4 bits']:>17}{size[name] * TEXTS * LENGTH:>17}{speed:>20.0f}")
for name in texts:
    print(f"\n{name}:" + "".join(f"\n  {''.join(alphabet[text])!r}" for text in texts[name][4:7]))

# %% [markdown]
# ## Exported
#
# The whole loop is one function of arrays, so `jax.export` can write it down. The process that runs it has neither the
# model nor the rules: it imports jaxquant for the QArrays among the arguments, and makes an empty cache. It writes the
# same characters.

# %%
EXPORTED = """
import json, pickle
import jax, jax.export
from jaxquant import load
from jaxquant.cache import zeros

spec, shape, tokens, given = pickle.load(open("output/11_spec.pickle", "rb"))
program = jax.export.deserialize(open("output/11_program", "rb").read())
generate = jax.jit(program.call, donate_argnums=1)
caches = zeros(shape, spec), zeros(shape, spec)
written, *_ = generate(load("output/11_weights.npz"), caches, tokens, given, 0)
print(json.dumps(written.tolist()))
"""
program = jax.export.export(generate)(served, empty(CACHES["int8"], TEXTS), tokens, PROMPT, 0).serialize()
(output / "11_program").write_bytes(program)
(output / "11_spec.pickle").write_bytes(pickle.dumps((CACHES["int8"], shape, tokens, PROMPT)))
exported = np.array(new_process(EXPORTED))
print(f"{len(program)} bytes of program; {(exported != texts['int8']).sum()} of {exported.size} characters differ")

# %% [markdown]
# ## Bytes against quality

# %%
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for name, marker in zip(CACHES, "os^vD", strict=True):
    axis.plot(size[name], quality[name], marker, markersize=9, label=name)
axis.axhline(in_float, color="0.5", linewidth=0.8, linestyle="--", label="all in float32")
axis.set(xlabel="bytes of the cache per token", ylabel="bits per character", title="4-bit weights, five caches")
axis.set_xlim(0)
axis.legend()
figure.savefig(output / "11_caches.png", dpi=150)
plt.show()

# %% [markdown]
# int8 takes a third of float32's bytes, and costs less than two thousandths of a bit per character; int4 a fifth, and
# about a hundredth. With 16 features to a head, the scale of a token and its zero point are 5 of int8's 21 bytes; with
# 128 they would be 5 of 133. The dashed line
# has the weights in float32, too.

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
of_values = lambda bits: 2 * LAYERS * HEADS * (WIDTH // HEADS * bits // 8)
of_scales = 2 * LAYERS * HEADS * 5  # a float32 and a zero point of one byte
assert (size["float32"], size["bfloat16"]) == (of_values(32), of_values(16))
assert size["int8"] == size["float8"] == of_values(8) + of_scales
assert size["int4"] == of_values(4) + of_scales
assert all(in_place.values()), "each array of a cache comes back where it was given"
more = {name: quality[name] - quality["float32"] for name in CACHES}
assert in_float < 2.9, "the model has learned: counts of pairs of characters alone take 3.3 bits"
assert 0 < quality["float32"] - in_float < 0.02, "what 4-bit weights cost"
assert weights["4 bits"] < 0.3 * weights["float32"]
assert all(abs(more[name]) < 2e-3 for name in ("bfloat16", "int8"))
assert abs(more["float8"]) < 5e-3
assert abs(more["int8"]) < more["int4"] < 0.02
assert other < 1e-3 * levels
assert abs(float(bits(whole, test[:, 1:])) - quality["int8"]) < 1e-3
assert all((text[:, :PROMPT] == tokens[:, :PROMPT]).all() for text in texts.values()), "the prompt is kept"
assert (texts["int8"] != tokens).any()
assert (exported == texts["int8"]).all(), "what is exported is what is served"
print("all claims hold")
