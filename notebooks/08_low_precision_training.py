# %% [markdown]
# # Low-precision training: the backward pass in bfloat16, int8 and float8
#
# Two of the three products of a training step are in its backward pass. Here a network for digits and a character
# transformer are trained with int8 weights and inputs from the first step on, and with the gradients in the backward
# products in float32, bfloat16, int8 and float8. The value of the model is the same function in all of them. How far
# off are the gradients, layer by layer; what does it do to the loss; what does a step take? Notebook 12 has the recipes
# of accelerators, which round all three products: float8, MXFP8 and NVFP4.
# [Low-precision training](../docs/low_precision.md) says what is rounded where.

# %%
# SPDX-License-Identifier: Apache-2.0
import itertools
import pydoc_data.topics
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from jaxquant import (
    PerChannel,
    PerToken,
    QuantSpec,
    Rule,
    activation_spec,
    float8_spec,
    quantize_fn,
    weight_spec,
)

output = Path("output")
output.mkdir(exist_ok=True)

# %% [markdown]
# ## Two models

# %%
images, labels = load_digits(return_X_y=True)
splits = train_test_split((images / 16).astype(np.float32), labels, train_size=1200, random_state=0, stratify=labels)
x_train, _, y_train, _ = splits


def classify(params, x):
    for name in ("first", "second"):
        x = jax.nn.relu(x @ params[name]["w"] + params[name]["b"])
    return x @ params["last"]["w"] + params["last"]["b"]


def init_classifier(seed):
    rng, params = np.random.default_rng(seed), {}
    for name, shape in {"first": (64, 128), "second": (128, 64), "last": (64, 10)}.items():
        w = rng.normal(0, (2 / shape[0]) ** 0.5, shape)
        params[name] = {"w": np.float32(w), "b": np.zeros(shape[1], np.float32)}
    return params


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
        dense = lambda x, name: x @ p[name]
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


# %% [markdown]
# ## Five backward passes
#
# One rule for each. g, the gradient with respect to the result of a dot, has one scale for the tensor in each step; or,
# in "int8 by rows", one for each row towards the input, and one for each output channel towards the weight. float8 is
# e5m2, whose levels are spread over as many powers of two as those of float16.

# %%
by_rows = QuantSpec(granularity=PerToken()), QuantSpec(granularity=PerChannel(None))
GRADIENTS = {
    "float32": None,
    "bfloat16": "bfloat16",
    "int8": QuantSpec(),
    "int8 by rows": by_rows,
    "float8": float8_spec("float8_e5m2"),
}
LOW = list(GRADIENTS)[1:]


def quantized(model, pattern):
    specs = weight_spec(8), activation_spec(8)
    return {name: quantize_fn(model, [Rule(pattern, *specs, gradient=g)]) for name, g in GRADIENTS.items()}


cross_entropy = optax.softmax_cross_entropy_with_integer_labels
class_loss = lambda f: lambda params, x, y: cross_entropy(f(params, x), y).mean()
text_loss = lambda f: lambda params, t: cross_entropy(f(params, t[:, :-1]), t[:, 1:]).mean()


def windows(data, seed, steps, size=4):
    starts = np.random.default_rng(seed).integers(0, len(data) - LENGTH - 1, (steps, size))
    return (data[starts[..., None] + np.arange(LENGTH + 1)],)


def digits(seed, steps, size=60):
    rng = np.random.default_rng(seed)
    at = np.stack([rng.choice(len(x_train), size, replace=False) for _ in range(steps)])
    return x_train[at], y_train[at]


TASKS = {
    "digits": (init_classifier, classify, "*/w", class_loss, lambda seed, n=200: digits(seed, n), 4e-3),
    "text": (
        init_writer, write, re.compile("layers/.*|head"), text_loss,
        lambda seed, n=200: windows(train_text, seed, n), 6e-3,
    ),
}  # fmt: skip
MODELS = {
    name: {"no quantization": model, **quantized(model, pattern)} for name, (_, model, pattern, *_) in TASKS.items()
}

# %% [markdown]
# One loop trains all. What differs is the function that computes loss and gradients, which is compiled once for each
# model and backward pass, and measured below, too.

# %%
slopes = {
    name: {kind: jax.jit(jax.value_and_grad(loss(f))) for kind, f in MODELS[name].items()}
    for name, (_, _, _, loss, *_) in TASKS.items()
}
adam = optax.scale_by_adam(b2=0.98)
adam_init = jax.jit(adam.init)


@jax.jit
def update(params, state, gradients, rate):
    updates, state = adam.update(gradients, state)
    return jax.tree.map(lambda p, u: p - rate.astype(p.dtype) * u, params, updates), state


def train(slope, params, batches, rate):
    """The trained parameters, and the loss of each step, one for each batch."""
    state, losses, done = adam_init(params), [], np.linspace(0, 1, len(batches[0]), endpoint=False)
    rates = rate * np.minimum(20 * done, (1 + np.cos(np.pi * done)) / 2)  # up in a twentieth of the steps, and down
    for now, *batch in zip(rates, *batches, strict=True):
        value, gradients = slope(params, *batch)
        params, state = update(params, state, gradients, now)
        losses.append(value)
    return params, np.array(losses)


# %%
def compile_slope(name, kind):
    init, *_, batches, _ = TASKS[name]
    slopes[name][kind](init(0), *(b[0] for b in batches(0, 1)))


with ThreadPoolExecutor(2) as pool:  # two at a time: XLA leaves Python to the other
    list(pool.map(compile_slope, *zip(*itertools.product(TASKS, GRADIENTS), strict=True)))

SEEDS = range(3)
curves, trained = {}, {}
with tqdm(total=len(TASKS) * len(GRADIENTS) * len(SEEDS), unit="run", mininterval=1) as progress:
    for name, (init, _, _, _, batches, rate) in TASKS.items():
        for kind in GRADIENTS:
            for seed in SEEDS:
                progress.set_description(f"{name}, {kind}")
                run = train(slopes[name][kind], init(seed), batches(seed), rate)
                trained[name, kind, seed], curves[name, kind, seed] = run
                progress.update()

# %%
final = {
    (name, kind): np.array([np.mean(curves[name, kind, seed][-30:]) for seed in SEEDS])
    for name in TASKS for kind in GRADIENTS
}  # fmt: skip
figure, rows = plt.subplots(2, 2, figsize=(10, 6), layout="constrained", sharex="col")
smooth = lambda values: np.convolve(values, np.full(10, 0.1), "valid")
for (above, below), name in zip(rows.T, TASKS, strict=True):
    for color, kind in enumerate(GRADIENTS):
        for seed in SEEDS:
            values, exact = (smooth(curves[name, k, seed]) for k in (kind, "float32"))
            style = {"color": f"C{color}", "linewidth": 0.9, "label": kind if seed == 0 else None}
            above.plot(values, alpha=0.7, **style)
            if kind != "float32":
                below.plot(values - exact, **style)
    above.set(title=name, yscale="log")
    below.set(xlabel="step")
rows[0, 0].set_ylabel("training loss, mean of 10 steps")
rows[1, 0].set_ylabel("and minus the loss of float32")
rows[0, 0].legend(title="backward pass")
figure.savefig(output / "08_curves.png", dpi=150)
plt.show()
print("final loss, mean of the last 30 steps, of three seeds; and minus the loss of float32, seed by seed")
for kind in GRADIENTS:
    of = [(final[name, kind], final[name, kind] - final[name, "float32"]) for name in TASKS]
    values = "".join(f"{v.mean():>9.4f} ({', '.join(f'{d:+.4f}' for d in away)})" for v, away in of)
    print(f"{kind:<12}{values}")

# %% [markdown]
# With bfloat16 and float8 the curves lie on the float32 curves, seed by seed: seeds see other batches, and are further
# apart than the backward passes. int8 with one scale for g learns the text more slowly, in every seed; by rows less
# than a third of that is left.

# %% [markdown]
# ## The error of the gradient, layer by layer
#
# The same batch at the same parameters, at the end of training, in each precision: the cosine of the angle to the
# float32 gradient, and the norm of the difference divided by the norm of the float32 gradient.


# %%
def layers_of(gradients):
    """The gradients to matrices, by path, with one for each layer of a stack."""
    found = {}
    for path, g in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.startswith("layers/") and "norms" not in name:
            found |= {f"{i}/{name[7:]}": layer for i, layer in enumerate(np.asarray(g))}
        elif name.endswith("/w") or name == "head":
            found[name.removesuffix("/w")] = g
    last = ("second", "last", "head")
    order = sorted(found, key=lambda name: (last.index(name) if name in last else -1, name))
    return {name: np.asarray(found[name], np.float64).ravel() for name in order}


errors = {}
for name, (*_, batches, _) in TASKS.items():
    params, batch = trained[name, "float32", 0], [b[0] for b in batches(100, 1)]
    of = {kind: layers_of(slopes[name][kind](params, *batch)[1]) for kind in GRADIENTS}
    for kind in LOW:
        for layer, g in of["float32"].items():
            got = of[kind][layer]
            cosine = got @ g / np.sqrt((got @ got) * (g @ g))
            errors[name, kind, layer] = cosine, np.sqrt(((got - g) ** 2).sum() / (g @ g))

# %%
figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=(1, 2.5), sharey=True)
for axes, name in zip(panels, TASKS, strict=True):
    for color, kind in enumerate(LOW, 1):
        of = {layer: error for (task, k, layer), (_, error) in errors.items() if (task, k) == (name, kind)}
        axes.plot(list(of), list(of.values()), "o-", color=f"C{color}", label=kind)
    axes.set(title=name, yscale="log")
    axes.tick_params(axis="x", rotation=45)
panels[0].set_ylabel("relative error of the gradient")
panels[1].legend(title="backward pass", ncols=2, loc="center", bbox_to_anchor=(0.5, 0.4))
figure.savefig(output / "08_errors.png", dpi=150)
plt.show()
print(f"{'':<16}" + "".join(f"{kind:>20}" for kind in LOW))
print(f"{'':<16}" + f"{'cosine':>12}{'error':>8}" * len(LOW))
for name, layer in dict.fromkeys((name, layer) for name, _, layer in errors):
    values = "".join(f"{c:>12.5f}{e:>8.4f}" for k in LOW for c, e in [errors[name, k, layer]])
    print(f"{name:<8}{layer:<8}{values}")

# %% [markdown]
# ## The time of a step
#
# Of the gradient of the text model, for a batch of 256 characters, against the float model without quantization; the
# machine is the one that ran the notebook. Integers need rows to pay: [Benchmarks](../docs/benchmarks.md) has
# larger layers, and more machines.

# %%
times = {kind: [] for kind in slopes["text"]}
for _ in range(12):
    for kind, step in slopes["text"].items():
        start = time.perf_counter()
        jax.block_until_ready(step(params, *batch))
        times[kind].append(time.perf_counter() - start)
float_step = np.median(times["no quantization"][2:])
for kind in GRADIENTS:
    print(f"{kind:<14}{np.median(times[kind][2:]) / float_step:.2f} of the float step")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
away = {kind: final["text", kind] - final["text", "float32"] for kind in LOW}
assert (away["int8"] > 0.01).all(), away
assert abs(away["int8 by rows"].mean()) < away["int8"].mean() / 3, away
for kind in ("bfloat16", "float8"):
    assert abs(away[kind].mean()) < away["int8"].mean() / 5, away
assert all(cosine > 0.9999 and error < 0.005 for (_, kind, _), (cosine, error) in errors.items() if kind == "bfloat16")
for (name, kind, layer), (_, error) in errors.items():
    if kind == "int8 by rows":
        assert error < errors[name, "int8", layer][1], (name, layer)
    assert kind == "int8" or error < 0.25, (name, kind, layer, error)
print("all claims hold")
