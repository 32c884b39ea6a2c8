# %% [markdown]
# # Number formats: int8, int4, float8, MX, NVFP4
#
# Two models, a dense network on digits and a character transformer, are trained in float32 and then quantized to seven
# formats, weights and inputs alike: after training (**PTQ**), and by quantization-aware training (**QAT**; of text in
# formats of 4 bits, where there is something to win). Each is frozen, saved, loaded, and served with the bits that were
# trained. What a format costs is the bits of a weight with
# its share of the scales; [docs/formats.md](../docs/formats.md) explains the formats.

# %%
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import pydoc_data.topics
import re
from collections.abc import Callable
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
    PerBlock,
    PerChannel,
    PerTensor,
    QArray,
    QParams,
    QuantSpec,
    Rule,
    activation_spec,
    fake_quant,
    float8_spec,
    load,
    mxfp4_spec,
    mxfp6_spec,
    mxfp8_spec,
    nvfp4_spec,
    quantize_fn,
    save,
    weight_spec,
)

output = Path("output")
output.mkdir(exist_ok=True)

# %% [markdown]
# ## The formats
#
# A format is a spec for the weights and one for the inputs. `int8` and `float8` have a scale for each output channel
# and one for a tensor of inputs; the others have a scale for each block of 32 or 16 values along the contracted axis,
# on both sides. `int4` has the blocks of `mxfp4`, with scales in float32.

# %%
int4 = QuantSpec(bits=4, granularity=PerBlock(None, 32))
FORMATS = {
    "int8": (weight_spec(8), activation_spec(8)),
    "int4": (int4, int4),
    "float8": (float8_spec(granularity=PerChannel(None)), float8_spec()),
    "mxfp8": (mxfp8_spec(), mxfp8_spec()),
    "mxfp6": (mxfp6_spec(), mxfp6_spec()),
    "mxfp4": (mxfp4_spec(), mxfp4_spec()),
    "nvfp4": (nvfp4_spec(), nvfp4_spec()),
}

# %%
figure, rows = plt.subplots(4, 1, figsize=(10, 3), layout="constrained", sharex=True)
for axes, name in zip(rows, ("int8", "float8", "mxfp6", "nvfp4"), strict=True):
    spec = dataclasses.replace(FORMATS[name][0], granularity=PerTensor(), scale_dtype="float32")
    values = np.linspace(-spec.qmax, spec.qmax, 100_001, dtype=np.float32)
    axes.vlines(np.unique(fake_quant(values, spec, QParams(1.0, 0.0))) / spec.qmax, 0, 1, linewidth=0.6)
    axes.set(yticks=[], ylim=(0, 1))
    axes.set_ylabel(name, rotation=0, ha="right", va="center")
rows[-1].set(xlabel="levels, as fractions of the largest", xlim=(-1.02, 1.02))
plt.show()

# %% [markdown]
# ## Two models
#
# Plain JAX. All that is quantized contracts a multiple of 32.

# %%
images, labels = load_digits(return_X_y=True)
splits = train_test_split((images / 16).astype(np.float32), labels, train_size=1200, random_state=0, stratify=labels)
x_train, x_test, y_train, y_test = splits


def classify(params, x):
    x = jax.nn.relu(x @ params["first"]["w"] + params["first"]["b"])
    return x @ params["last"]["w"] + params["last"]["b"]


def init_classifier(key):
    shapes = {"first": (64, 64), "last": (64, 10)}
    he = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, 2)
    return {n: {"w": he(k, s), "b": jnp.zeros(s[1])} for k, (n, s) in zip(keys, shapes.items(), strict=True)}


# %%
LAYERS, WIDTH, HEADS, LENGTH = 2, 64, 4, 64
text = "".join(c for c in "".join(pydoc_data.topics.topics.values()) if c.isascii())
alphabet = sorted(set(text))
data = np.array([alphabet.index(c) for c in text], np.int32)
train_text, test_text = np.split(data, [len(data) * 9 // 10])
test_windows = test_text[: 64 * (LENGTH + 1)].reshape(64, LENGTH + 1)
normed = lambda x, scale: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def write(params, tokens):
    x = params["embedding"][tokens] + params["positions"][: tokens.shape[1]]
    unseen = jnp.triu(jnp.full((tokens.shape[1],) * 2, -1e30), 1)

    def layer(x, p):
        q, k, v = jnp.split(normed(x, p["norms"][0]) @ p["qkv"], 3, -1)
        heads = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
        scores = jnp.einsum("bthk,bshk->bhts", heads(q), heads(k)) / (q.shape[-1] / HEADS) ** 0.5
        attended = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores + unseen), heads(v))
        x = x + attended.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(normed(x, p["norms"][1]) @ p["up"]) @ p["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return normed(x, params["norm"]) @ params["head"]


def init_writer(key):
    normal = lambda key, *shape, size=1.0: size * jax.random.normal(key, shape)
    keys = jax.random.split(key, 7)
    one, deep = WIDTH**-0.5, (2 * LAYERS * WIDTH) ** -0.5
    layers = {
        "norms": jnp.ones((LAYERS, 2, WIDTH)),
        "qkv": normal(keys[0], LAYERS, WIDTH, 3 * WIDTH, size=one),
        "out": normal(keys[1], LAYERS, WIDTH, WIDTH, size=deep),
        "up": normal(keys[2], LAYERS, WIDTH, 4 * WIDTH, size=one),
        "down": normal(keys[3], LAYERS, 4 * WIDTH, WIDTH, size=deep / 2),
    }
    return {
        "embedding": normal(keys[4], len(alphabet), WIDTH, size=one),
        "positions": normal(keys[5], LENGTH, WIDTH, size=0.1),
        "layers": layers,
        "norm": jnp.ones(WIDTH),
        "head": normal(keys[6], WIDTH, len(alphabet), size=one),
    }


# %% [markdown]
# ## Quantize, train on
#
# One rule for all weights that meet a product. Scales are of the weights and inputs of each step, so that nothing but
# the parameters is trained, and QAT is the float loop with `q` in the place of the model. The blocks of a batch are of
# its values in any case: they have no ranges to calibrate.


# %%
def quantized(model, pattern):
    return {name: quantize_fn(model, [Rule(pattern, *specs)]) for name, specs in FORMATS.items()}


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def trainer(loss, rate, steps):
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, rate, max(steps // 20, 1), steps), b2=0.98)

    def step(carry, batch):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, *batch), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.jit(lambda params, batches: jax.lax.scan(step, (params, optimizer.init(params)), batches)[0][0])


def batches_of(seed, steps, size):
    """Digits and windows of text, in the order of a seed."""
    rng = np.random.default_rng(seed)
    at = np.stack([rng.choice(len(x_train), size, replace=False) for _ in range(steps)])
    starts = rng.integers(0, len(train_text) - LENGTH - 1, (steps, size))
    return (x_train[at], y_train[at]), (train_text[starts[..., None] + np.arange(LENGTH + 1)],)


class_loss = lambda f: lambda params, x, y: cross_entropy(f(params, x), y).mean()
text_loss = lambda f: lambda params, t: cross_entropy(f(params, t[:, :-1]), t[:, 1:]).mean()


@dataclasses.dataclass
class Task:
    init: Callable  # key -> params
    functions: dict  # of the name of each format, and float32
    trained: tuple  # the names of those that are trained on
    loss: Callable  # f -> (params, *batch) -> loss
    measure: Callable  # logits of the test data -> what is reported
    test: np.ndarray
    which: int  # of the batches
    size: int  # of a batch
    steps: tuple  # in float, of QAT
    rates: tuple
    seeds: range


wrong_digits = lambda logits: 100 * (logits.argmax(-1) != y_test).mean()
bits = jax.jit(lambda logits: cross_entropy(logits, test_windows[:, 1:]).mean() / jnp.log(2))
TASKS = {
    "digits": Task(
        init_classifier, {"float32": classify, **quantized(classify, "*/w")}, ("float32", *FORMATS), class_loss,
        wrong_digits, x_test, which=0, size=60, steps=(600, 120), rates=(4e-3, 1e-3), seeds=range(3),
    ),
    "text": Task(
        init_writer, {"float32": write, **quantized(write, re.compile("layers/.*|head"))},
        ("float32", "int4", "mxfp4", "nvfp4"), text_loss, bits, test_windows[:, :-1],
        which=1, size=8, steps=(1000, 40), rates=(6e-3, 3e-4), seeds=range(1),
    ),
}  # fmt: skip
print(TASKS["digits"].functions["nvfp4"].plan(init_classifier(jax.random.key(0)), x_test))

# %%
results, last = {}, {}
with tqdm(total=sum(len(task.functions) for task in TASKS.values()), unit="run", mininterval=1) as progress:
    for name, task in TASKS.items():
        batches = lambda seed, steps, task=task: batches_of(seed, steps, task.size)[task.which]
        in_float = trainer(task.loss(task.functions["float32"]), task.rates[0], task.steps[0])
        starts = [in_float(task.init(jax.random.key(seed)), batches(seed, task.steps[0])) for seed in task.seeds]
        for kind, f in task.functions.items():
            progress.set_description(f"{name}, {kind}")
            freeze = f.freeze if kind in FORMATS else lambda params, x: params
            logits = jax.jit(lambda params, x, f=f, freeze=freeze: (f(params, x), freeze(params, x)))
            after = [starts]
            if kind in task.trained:
                train = trainer(task.loss(f), task.rates[1], task.steps[1])
                pairs = zip(starts, task.seeds, strict=True)
                after += [[train(params, batches(100 + seed, task.steps[1])) for params, seed in pairs]]
            every = [[logits(params, task.test) for params in of] for of in after]
            results[name, kind] = np.array([[task.measure(np.asarray(v)) for v, _ in of] for of in every])
            last[name, kind] = every[-1][-1]
            progress.update()

# %% [markdown]
# ## Freeze, save, load, serve
#
# What the quantized function computes with the loaded weights is what was trained, to the bit, in every format.

# %%
wrong, bits_per_weight = {}, {}
for (name, kind), (logits, frozen) in last.items():
    if kind == "float32":
        continue
    q, path = TASKS[name].functions[kind], output / f"07_{name}_{kind}.npz"
    save(path, frozen)
    served = load(path)
    wrong[name, kind] = int((np.asarray(jax.jit(q)(served, TASKS[name].test)) != np.asarray(logits)).sum())
    weights = [v for v in jax.tree.leaves(served, is_leaf=lambda v: isinstance(v, QArray)) if isinstance(v, QArray)]
    held = sum(w.size * w.spec.bits + w.scale.size * w.scale.dtype.itemsize * 8 for w in weights)
    bits_per_weight[name, kind] = held / sum(w.size for w in weights)
print(f"{sum(wrong.values())} logits of {len(wrong)} served models differ from the trained ones")

# %%
print("                          digits, errors in %        text, bits per character")
print("          bits per weight      PTQ      QAT                PTQ      QAT")
for name in ("float32", *FORMATS):
    held = bits_per_weight.get(("text", name), 32)
    digits, characters = (results[task, name].mean(1) for task in TASKS)
    trained = f"{characters[1]:>9.3f}" if len(characters) > 1 else ""
    print(f"{name:<10}{held:>15.2f}{digits[0]:>9.2f}{digits[1]:>9.2f}{characters[0]:>19.3f}{trained}")

# %%
figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for axes, task in zip(panels, TASKS, strict=True):
    for kind, color in enumerate(("C1", "C0")):
        for name in FORMATS:
            if kind == 1 and name not in TASKS[task].trained:
                continue
            values, at = results[task, name][kind], bits_per_weight[task, name]
            axes.plot([at] * len(values), values, ".", color=color, alpha=0.3)
            axes.plot(at, values.mean(), "o", color=color)
            if kind == 0:
                axes.annotate(name, (at, values.mean()), xytext=(4, 4), textcoords="offset points", fontsize=8)
        label = ("PTQ", "QAT")[kind]
        axes.axhline(results[task, "float32"][kind].mean(), color=color, linewidth=0.7, label=f"{label}; line: float32")
    axes.set(title=task, xlabel="bits per weight, scales counted", xlim=(3.8, 10))
panels[0].set_ylabel("test errors in %")
panels[1].set_ylabel("bits per character")
panels[0].legend()
figure.savefig(output / "07_formats.png", dpi=150)
plt.show()

# %% [markdown]
# Formats of 6 and 8 bits cost next to nothing after training. Those of 4 bits cost a few hundredths of a bit to more
# than a tenth for each character, and training wins back a part. On digits a few images more or less are noise.

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert wrong == {(task, name): 0 for task in TASKS for name in FORMATS}
in_float = results["text", "float32"].mean(1)
cost = lambda kind: results["text", kind].mean(1) - in_float[: len(results["text", kind])]  # PTQ, and QAT
for kind in ("int8", "float8", "mxfp8", "mxfp6"):
    assert (cost(kind) < 0.03).all(), (kind, cost(kind))
for kind in ("int4", "mxfp4", "nvfp4"):
    assert 0.02 < cost(kind)[0] < 0.3, (kind, cost(kind))
for kind in ("int4", "mxfp4"):
    assert cost(kind)[1] < 0.9 * cost(kind)[0], (kind, cost(kind))
print("all claims hold")
