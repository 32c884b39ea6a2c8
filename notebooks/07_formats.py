# %% [markdown]
# # Number formats: int8, int4, float8, MX, NVFP4
#
# A character transformer is trained in float32 and then quantized to seven formats, weights and inputs alike: after
# training (**PTQ**), and in the formats of 4 bits, where there is something to win, by quantization-aware training
# (**QAT**). Each is frozen, saved, loaded, and served with the bits that were trained. What a format costs is the bits
# of a weight with its share of the scales; [Number formats](../docs/formats.md) explains the formats.

# %%
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools
import pydoc_data.topics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
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
# ## The model
#
# Plain JAX: one layer, whose attention and MLP stand side by side as in PaLM, so that one weight takes the input of
# both and one gives the output. All that is quantized contracts a multiple of 32.

# %%
WIDTH, HEADS, LENGTH = 64, 4, 64
text = "".join(c for c in "".join(pydoc_data.topics.topics.values()) if c.isascii())
alphabet = sorted(set(text))
data = np.array([alphabet.index(c) for c in text], np.int32)
train_text, test_text = np.split(data, [len(data) * 9 // 10])
test_windows = test_text[: 64 * (LENGTH + 1)].reshape(64, LENGTH + 1)
normed = lambda x, scale: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def model(params, tokens):
    x = params["embedding"][tokens] + params["positions"][: tokens.shape[1]]
    unseen = jnp.triu(jnp.full((tokens.shape[1],) * 2, -1e30), 1)

    heads = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
    weights, norms = params["weights"], params["norms"]
    q, k, v, up = jnp.split(normed(x, norms[0]) @ weights["in"], [WIDTH, 2 * WIDTH, 3 * WIDTH], -1)
    scores = jnp.einsum("bthk,bshk->bhts", heads(q), heads(k)) / (WIDTH / HEADS) ** 0.5
    attended = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores + unseen), heads(v)).reshape(x.shape)
    x = x + jnp.concatenate([attended, jax.nn.gelu(up)], -1) @ weights["out"]
    return normed(x, norms[1]) @ weights["head"]


def init(key):
    normal = lambda key, *shape, size=WIDTH**-0.5: size * jax.random.normal(key, shape)
    keys = jax.random.split(key, 5)
    return {
        "embedding": normal(keys[0], len(alphabet), WIDTH),
        "positions": normal(keys[1], LENGTH, WIDTH, size=0.1),
        "norms": jnp.ones((2, WIDTH)),
        "weights": {
            "in": normal(keys[2], WIDTH, 7 * WIDTH),
            "out": normal(keys[3], 5 * WIDTH, WIDTH, size=(5 * WIDTH) ** -0.5),
            "head": normal(keys[4], WIDTH, len(alphabet)),
        },
    }


# %% [markdown]
# ## Quantize, train on
#
# One rule for all weights that meet a product. Scales are of the weights and inputs of each step, so that nothing but
# the parameters is trained, and QAT is the float loop with `q` in the place of the model. The blocks of a batch are of
# its values in any case: they have no ranges to calibrate.


# %%
TRAINED = "int4", "mxfp4", "nvfp4"
STEPS, MORE_STEPS, BATCH = 700, 100, 8
quantized = {name: quantize_fn(model, [Rule("weights/*", *specs)]) for name, specs in FORMATS.items()}
print(quantized["nvfp4"].plan(init(jax.random.key(0)), test_windows[:, :-1]))


def loss_of(f, params, windows):
    return optax.softmax_cross_entropy_with_integer_labels(f(params, windows[:, :-1]), windows[:, 1:]).mean()


def trainer(f, rate, steps):
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, rate, steps // 20, steps), b2=0.98)

    @jax.jit
    def step(params, state, windows):
        updates, state = optimizer.update(jax.grad(functools.partial(loss_of, f))(params, windows), state)
        return optax.apply_updates(params, updates), state

    def train(params, batches):
        state = optimizer.init(params)
        for windows in batches:
            params, state = step(params, state, windows)
        return params

    return train


def batches(seed, steps):
    starts = np.random.default_rng(seed).integers(0, len(train_text) - LENGTH - 1, (steps, BATCH))
    return train_text[starts[..., None] + np.arange(LENGTH + 1)]


@jax.jit
def bits(logits):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, test_windows[:, 1:])
    return losses.mean() / jnp.log(2)


# %%
results, last = {}, {}
FUNCTIONS = {"float32": model, **quantized}
START = init(jax.random.key(0))


def compiled(name):
    """Functions for the logits and to train, which calls with the untrained model compile."""
    f, freeze = FUNCTIONS[name], quantized[name].freeze if name in FORMATS else lambda params, x: params
    logits = jax.jit(lambda params, x: (f(params, x), freeze(params, x)))
    logits(START, test_windows[:, :-1])
    if name in FORMATS and name not in TRAINED:
        return logits, None
    train = trainer(f, 3e-4, MORE_STEPS)
    train(START, batches(1, 1))
    return logits, train


with tqdm(total=2 + len(FORMATS), unit="run", mininterval=1) as progress, ThreadPoolExecutor(2) as pool:
    of_float = pool.submit(trainer(model, 6e-3, STEPS), START, batches(0, STEPS))
    programs = dict(zip(FUNCTIONS, pool.map(compiled, FUNCTIONS), strict=True))  # meanwhile
    in_float = of_float.result()
    progress.update()

    def run(name):
        logits, train = programs[name]
        runs = [in_float, train(in_float, batches(1, MORE_STEPS))] if train else [in_float]
        ends = [logits(params, test_windows[:, :-1]) for params in runs]
        results[name], last[name] = [float(bits(v)) for v, _ in ends], ends[-1]
        progress.update()

    list(pool.map(run, FUNCTIONS))

# %% [markdown]
# ## Freeze, save, load, serve
#
# What the quantized function computes with the loaded weights is what was trained, to the bit, in every format.

# %%
wrong, bits_per_weight = {}, {}


def serve(name):
    q, (logits, frozen) = quantized[name], last[name]
    save(output / f"07_{name}.npz", frozen)
    served = load(output / f"07_{name}.npz")
    wrong[name] = int((np.asarray(jax.jit(q)(served, test_windows[:, :-1])) != np.asarray(logits)).sum())
    weights = [v for v in jax.tree.leaves(served, is_leaf=lambda v: isinstance(v, QArray)) if isinstance(v, QArray)]
    held = sum(w.size * w.spec.bits + w.scale.size * w.scale.dtype.itemsize * 8 for w in weights)
    bits_per_weight[name] = held / sum(w.size for w in weights)


with ThreadPoolExecutor(2) as pool:
    list(pool.map(serve, quantized))
print(f"{sum(wrong.values())} logits of {len(wrong)} served models differ from the trained ones")

# %%
print("          bits per weight      PTQ      QAT, bits per character")
for name, values in results.items():
    print(f"{name:<10}{bits_per_weight.get(name, 32):>15.2f}" + "".join(f"{v:>9.3f}" for v in values))

# %%
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for kind, color in enumerate(("C1", "C0")):
    for name in FORMATS if kind == 0 else TRAINED:
        axes.plot(bits_per_weight[name], results[name][kind], "o", color=color)
    label = ("PTQ", "QAT")[kind]
    axes.axhline(results["float32"][kind], color=color, linewidth=0.7, label=f"{label}; line: float32")
for name in FORMATS:
    axes.annotate(
        name, (bits_per_weight[name], results[name][0]), xytext=(4, 4), textcoords="offset points", fontsize=8
    )
axes.set(xlabel="bits per weight, scales counted", ylabel="bits per character", xlim=(3.8, 10))
axes.legend()
figure.savefig(output / "07_formats.png", dpi=150)
plt.show()

# %% [markdown]
# Formats of 6 and 8 bits cost next to nothing after training. Those of 4 bits cost 0.05 to 0.1 bits a character, and
# training wins back a part.

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert wrong == dict.fromkeys(FORMATS, 0)
cost = {name: np.subtract(values, results["float32"][: len(values)]) for name, values in results.items()}
for name in ("int8", "float8", "mxfp8", "mxfp6"):
    assert (cost[name] < 0.03).all(), (name, cost[name])
for name in TRAINED:
    assert 0.02 < cost[name][0] < 0.3, (name, cost[name])
for name in ("int4", "mxfp4"):
    assert cost[name][1] < 0.9 * cost[name][0], (name, cost[name])
print("all claims hold")
