# %% [markdown]
# # LoRA: factors beside a frozen base
#
# A character transformer has read Python's documentation. Now it shall write Python code, by thin matrices beside the
# frozen ones, which are all that is trained. The base is float32, or what `q.freeze` makes of it: 4 bits in blocks of
# 32, NVFP4, float8, int8 with int8 inputs, or float8 with float8 inputs and an e5m2 gradient, multiplied as they are by
# the device. What the backward pass keeps of the base are the integers or floats that it is frozen to, here counted
# without the scales. [Training](../docs/training.md#low-rank-factors-beside-a-frozen-base) has a small
# example.

# %%
# SPDX-License-Identifier: Apache-2.0
import argparse
import inspect
import pydoc_data.topics
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxquant import Rule, activation_spec, float8_spec, nvfp4_spec, quantize_fn, weight_spec

# %% [markdown]
# ## The base

# %%
LAYERS, WIDTH, HEADS, LENGTH = 2, 64, 4, 64
text = "".join(c for c in "".join(pydoc_data.topics.topics.values()) if c.isascii())
alphabet = sorted(set(text))
numbers = lambda text: np.array([alphabet.index(c) for c in text if c in alphabet], np.int32)
train_text, _ = np.split(numbers(text), [len(text) * 9 // 10])
normed = lambda x, scale: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def write(params, tokens):
    x = params["embedding"][tokens] + params["positions"][: tokens.shape[1]]
    unseen = jnp.triu(jnp.full((tokens.shape[1],) * 2, -1e30, x.dtype), 1)

    def layer(x, p):
        thin = lambda x, name: x @ p[f"{name}.down"] @ p[f"{name}.up"] if f"{name}.up" in p else 0
        dense = lambda x, name: x @ p[name] + thin(x, name)
        q, k, v = jnp.split(dense(normed(x, p["norms"][0]), "qkv"), 3, -1)
        heads = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
        scores = jnp.einsum("bthk,bshk->bhts", heads(q), heads(k)) / (q.shape[-1] / HEADS) ** 0.5
        attended = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores + unseen), heads(v))
        x = x + dense(attended.reshape(x.shape), "out")
        return x + dense(jax.nn.gelu(dense(normed(x, p["norms"][1]), "up")), "down"), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return normed(x, params["norm"]) @ params["head"]


def init_writer(seed):
    rng = np.random.default_rng(seed)
    normal = lambda *shape, size: np.float32(rng.normal(0, size, shape))
    one, deep = WIDTH**-0.5, (2 * LAYERS * WIDTH) ** -0.5
    layers = {
        "norms": np.ones((LAYERS, 2, WIDTH), np.float32),
        "qkv": normal(LAYERS, WIDTH, 3 * WIDTH, size=one),
        "out": normal(LAYERS, WIDTH, WIDTH, size=deep),
        "up": normal(LAYERS, WIDTH, 4 * WIDTH, size=one),
        "down": normal(LAYERS, 4 * WIDTH, WIDTH, size=deep / 2),
    }
    return {
        "embedding": normal(len(alphabet), WIDTH, size=one),
        "positions": normal(LENGTH, WIDTH, size=0.1),
        "layers": layers,
        "norm": np.ones(WIDTH, np.float32),
        "head": normal(WIDTH, len(alphabet), size=one),
    }


# %%
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
text_loss = lambda f: lambda params, t: cross_entropy(f(params, t[:, :-1]), t[:, 1:]).mean()


def windows(data, seed, steps, size=4):
    starts = np.random.default_rng(seed).integers(0, len(data) - LENGTH - 1, (steps, size))
    return (data[starts[..., None] + np.arange(LENGTH + 1)],)


adam = optax.scale_by_adam(b2=0.98)
adam_init = jax.jit(adam.init)


@jax.jit
def update(params, state, gradients, rate):
    updates, state = adam.update(gradients, state)
    return jax.tree.map(lambda p, u: p - rate.astype(p.dtype) * u, params, updates), state


def train(slope, params, batches, rate):
    """The trained parameters; a step for each batch."""
    state, done = adam_init(params), np.linspace(0, 1, len(batches[0]), endpoint=False)
    rates = rate * np.minimum(20 * done, (1 + np.cos(np.pi * done)) / 2)  # up in a twentieth of the steps, and down
    for now, *batch in zip(rates, *batches, strict=True):
        _, gradients = slope(params, *batch)
        params, state = update(params, state, gradients, now)
    return params


# %%
float_slope = jax.jit(jax.value_and_grad(text_loss(write)))
params = train(float_slope, init_writer(0), windows(train_text, 0, 200), 6e-3)

# %% [markdown]
# ## Six bases

# %%
RANK = 4
code = numbers(inspect.getsource(argparse))
code, test_code = np.split(code, [len(code) * 9 // 10])
float8, float8_gradient = float8_spec(), float8_spec("float8_e5m2")
frozen = re.compile("layers/[a-z]*|head")
BASES = {
    "float32": write,
    "4 bits, blocks of 32": quantize_fn(write, [Rule(frozen, weight_spec(4, block_size=32))]),
    "NVFP4": quantize_fn(write, [Rule(frozen, nvfp4_spec())]),
    "float8": quantize_fn(write, [Rule(frozen, float8)]),
    "float8, native": quantize_fn(write, [Rule(frozen, float8, float8, gradient=float8_gradient)], execution="native"),
    "int8, int8 inputs": quantize_fn(write, [Rule(frozen, weight_spec(8), activation_spec(8))]),
}
rng, factors = np.random.default_rng(1), {}
for name in ("qkv", "out", "up", "down"):
    _, rows, columns = params["layers"][name].shape
    factors[f"{name}.down"] = rng.normal(0, rows**-0.5, (LAYERS, rows, RANK)).astype(np.float32)
    factors[f"{name}.up"] = np.zeros((LAYERS, RANK, columns), np.float32)
beside = lambda base, factors: {**base, "layers": {**base["layers"], **factors}}
batches = windows(code, 0, 100)
tests = windows(test_code, 1, 16)[0]
bytes_of = lambda v: v.size * (jnp.iinfo if jnp.issubdtype(v.dtype, jnp.integer) else jnp.finfo)(v.dtype).bits // 8

adapted = {}
for name, q in BASES.items():
    base = params if q is write else jax.jit(q.freeze)(beside(params, factors), tests[0, :, :-1])
    base = {**base, "layers": {n: w for n, w in base["layers"].items() if n not in factors}}
    loss = lambda factors, base, t, q=q: text_loss(lambda f, t: q(beside(base, f), t))(factors, t)
    slope = jax.jit(jax.value_and_grad(loss))
    test_loss = lambda factors, slope=slope, base=base: np.mean([slope(factors, base, t)[0] for t in tests])
    ends = train(lambda f, t, slope=slope, base=base: slope(f, base, t), factors, batches, 1e-2)
    weights = [base["head"], *(base["layers"][n] for n in ("qkv", "out", "up", "down"))]
    backward = lambda f, base, loss=loss: jax.vjp(lambda f: loss(f, base, batches[0][0]), f)[1]
    kept = jax.tree.leaves(jax.eval_shape(backward, factors, base))
    kept = [v for v in kept if sorted(v.shape) in [sorted(w.shape) for w in weights]]
    adapted[name] = {
        "before": test_loss(factors),
        "after": test_loss(ends),
        "base": sum(w.nbytes for w in weights),
        "kept": sum(map(bytes_of, kept)),
        "dtypes": {str(v.dtype) for v in kept},
    }
print(f"{'':<22}{'bytes of the base':>18}{'kept backward':>15}{'loss before':>13}{'after':>8}")
for name, of in adapted.items():
    print(f"{name:<22}{of['base']:>18,}{of['kept']:>15,}{of['before']:>13.3f}{of['after']:>8.3f}")
print(f"{sum(v.size for v in jax.tree.leaves(factors)):,} numbers are trained")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
of_float = adapted.pop("float32")
assert of_float["kept"] == of_float["base"]
for name, of in adapted.items():
    assert of["dtypes"] <= {"int4", "int8", "float4_e2m1fn", "float8_e4m3fn"}, (name, of)
    assert of["kept"] <= of["base"] < 0.28 * of_float["base"], (name, of)  # with scales, and with sums of columns
    assert of["after"] < of["before"] - 0.2, (name, of)
    assert abs(of["after"] - of_float["after"]) < 0.02, (name, of)
print("all claims hold")
