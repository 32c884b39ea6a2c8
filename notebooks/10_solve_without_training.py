# %% [markdown]
# # Few bits without training: a language model from float to served
#
# Rounding each weight to the nearest level is easy and forgets what the layer is for. Solvers choose scales and levels
# by the error of the layer's results. They see a few batches of text, no labels and no gradients of the model, and take
# seconds. A small transformer is trained in float, solved in 4 and 3 bits, frozen to integers, saved, and served with
# the bits that were solved. Then come the results of a wider model over three seeds, with quantization-aware training
# (QAT) beside them. [Solvers](../docs/solve.md) says what each solver does.
#
#     q.observe(gram=True) ─▶ solve.ranges ─▶ solve.gptq ─▶ q.freeze ─▶ save ─▶ load ─▶ q(params, x)

# %%
# SPDX-License-Identifier: Apache-2.0
import json
import pydoc_data.topics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax import lax

import jaxquant
from jaxquant import (
    PerToken,
    Rule,
    activation_spec,
    load,
    merge,
    quantize_fn,
    report,
    save,
    solve,
    weight_spec,
)  # fmt: skip

output = Path("output")
output.mkdir(exist_ok=True)
STEPS, BATCH = 350, 16
LAYERS, WIDTH, HEADS, LENGTH = 2, 64, 4, 64

# %% [markdown]
# ## A model in float
#
# A transformer trained on Python's documentation character by character. The last tenth of the text is for testing.

# %%
text = np.array([c for c in "".join(pydoc_data.topics.topics.values()) if c.isascii()])
alphabet, data = np.unique(text, return_inverse=True)
train_data, test_data = np.split(data.astype(np.int32), [len(data) * 9 // 10])
test = test_data[: len(test_data) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)[:240]


def windows(seed, *shape):
    starts = np.random.default_rng(seed).integers(0, len(train_data) - LENGTH - 1, shape)
    return train_data[starts[..., None] + np.arange(LENGTH + 1)]


def normed(x, gain):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def model(params, tokens):
    x = params["embedding"][tokens] + params["positions"]
    unseen = jnp.triu(jnp.full((LENGTH, LENGTH), -1e30), 1)

    def layer(x, p):
        q, k, v = jnp.split(normed(x, p["norms"][0]) @ p["qkv"], 3, -1)
        heads = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
        scores = jnp.einsum("bthk,bshk->bhts", heads(q), heads(k)) / (WIDTH / HEADS) ** 0.5
        attended = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores + unseen), heads(v))
        x = x + attended.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(normed(x, p["norms"][1]) @ p["up"]) @ p["down"], None

    x, _ = lax.scan(layer, x, params["layers"])
    return normed(x, params["norm"]) @ params["embedding"].T


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
        gradient = jax.grad(lambda p: bits(model(p, tokens[:, :-1]), tokens[:, 1:]))(params)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), None

    return lax.scan(step, (params, optimizer.init(params)), batches)[0][0]


def bits_per_character(f, *args, **kwargs):
    return float(bits(jax.jit(f)(*args, test[:, :-1], **kwargs), test[:, 1:]))


start = time.perf_counter()
params = jax.block_until_ready(train(init(0), windows(0, STEPS, BATCH)))
in_float = bits_per_character(model, params)
print(f"{STEPS} steps in {time.perf_counter() - start:.0f} s: {in_float:.3f} bits per character")

# %% [markdown]
# ## Second moments of the inputs
#
# The squared error of a layer's results is that of its weights, weighted by the second moments of its inputs. A Gram
# holds their sum over the rows of a batch, and Grams of several batches are merged. Eight batches of 32 windows of the
# training text are enough here. The embedding, which is the output too, stays in float.

# %%
quantized = {f"w{b}": quantize_fn(model, [Rule("layers/*", weight_spec(b))]) for b in (4, 3)}
calibration = windows(2000, 8, 32)[..., :-1]
tokens = calibration[0]

start = time.perf_counter()
grams = merge(*(quantized["w4"].observe(params, batch, gram=True) for batch in calibration))
print(f"{time.perf_counter() - start:.1f} s")
for path, gram in grams.items():
    print(f"{path:<12} weight {params['layers'][path[7:]].shape!s:<14} products {gram.products.shape}")

# %% [markdown]
# The weights are stacked, one slice for each layer, and so are the Grams. With them a report says what rounding each
# weight to the nearest level costs its layers, before anything is solved.

# %%
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
for i, (name, q) in enumerate(quantized.items()):
    rows = [row for row in report(q, params, tokens, grams=grams) if row.layer_error is not None]
    axes.barh(np.arange(len(rows)) + 0.4 * i, [row.layer_error for row in rows], 0.4, label=name)
axes.set_yticks(np.arange(len(rows)) + 0.2, [row.entry for row in rows])
axes.set_xlabel("squared error of the results, relative to them")
axes.legend()
figure.savefig(output / "10_report.png")

# %% [markdown]
# ## Solve
#
# `solve.ranges` fits the scales; `solve.gptq` chooses the levels on the scales it is given. "Its ranges" are of
# `method="gptq"`, which compares scales by what GPTQ makes of them. The seconds are of first calls, compiling included:
# a solver compiles once for each shape of a weight, and what a row above has compiled is not compiled again.

# %%
minmax = lambda q: q.init_qparams(params, tokens)
ranges = lambda q, **how: solve.ranges(params, q, grams, tokens, **how)


def gptq(q, qparams):
    return solve.gptq(params, q, grams, tokens, qparams=qparams), qparams


WAYS = {
    "nearest": lambda q: (params, minmax(q)),
    "ranges": lambda q: (params, ranges(q)),
    "gptq": lambda q: gptq(q, minmax(q)),
    "gptq of ranges": lambda q: gptq(q, ranges(q)),
    "gptq of its ranges": lambda q: gptq(q, ranges(q, method="gptq")),
}

found, live = {}, {}
print(f"float: {in_float:.3f}         bits per character      more   seconds")
for name, q in quantized.items():
    for way, solved_by in WAYS.items():
        start = time.perf_counter()
        found[name, way] = solved, qparams = jax.block_until_ready(solved_by(q))
        seconds = time.perf_counter() - start
        live[name, way] = bits_per_character(q, solved, qparams=qparams)
        more = live[name, way] - in_float
        print(f"{name:<4}{way:<22}{live[name, way]:>14.3f}{more:>+10.3f}{seconds:>10.1f}")

# %% [markdown]
# ## Freeze, save, serve
#
# What was solved lies on the grid of its qparams, so that `q.freeze` finds the very levels that were chosen. The file
# holds packed integers, and the logits of what is loaded equal the logits of the solved parameters, to the bit.

# %%
different = {}
for name, q in quantized.items():
    solved, qparams = found[name, "gptq of ranges"]
    want = np.asarray(jax.jit(q)(solved, test[:, :-1], qparams=qparams))
    frozen = q.freeze(solved, tokens, qparams=qparams)
    save(output / f"10_{name}.npz", {"params": frozen, "qparams": qparams})
    served = load(output / f"10_{name}.npz")
    logits = np.asarray(jax.jit(q)(served["params"], test[:, :-1], qparams=served["qparams"]))
    different[name] = int((want.view(np.uint32) != logits.view(np.uint32)).sum())
    size = (output / f"10_{name}.npz").stat().st_size
    print(f"{name}: {different[name]} of {logits.size} logits differ; {size} bytes")
print(f"float32: {sum(leaf.nbytes for leaf in jax.tree.leaves(params))} bytes")

# %% [markdown]
# ## Inputs with large channels
#
# In large language models a few channels of the inputs grow many times as large as the others, and leave these few
# levels. This model is too small for that, so four channels are made 30 times as large here: the gains of the norms are
# multiplied, the rows of the weights behind them divided, and the function in float stays the same. `solve.smooth`
# searches such factors, with the power `alpha` of the inputs' size in them, and folds them into the gains. The inputs
# of `down` come out of a gelu, which lets no factor pass.

# %%
channels = np.array([3, 17, 30, 41])
layers = params["layers"]
with_outliers = params | {
    "layers": layers
    | {
        "norms": layers["norms"].at[..., channels].multiply(30),
        "qkv": layers["qkv"].at[:, channels].divide(30),
        "up": layers["up"].at[:, channels].divide(30),
    }
}
A4 = activation_spec(4, symmetric=True, granularity=PerToken())
q = quantize_fn(model, [Rule("layers/*", weight_spec(4), A4)])

smooth = {}
print("w4a4, bits per character    float   nearest   smooth, nearest   alphas")
for name, before in {"as trained": params, "with large channels": with_outliers}.items():
    alphas = {}
    note = lambda path, alpha, *_, alphas=alphas: alphas.update({path.removeprefix("layers/"): alpha})
    smoothed = solve.smooth(before, q, q.observe(before, tokens, gram=True), tokens, progress=note)
    smooth[name] = *(bits_per_character(f, before) for f in (model, q)), bits_per_character(q, smoothed)
    in_words = ", ".join(f"{path} {alpha}" for path, alpha in alphas.items())
    print(f"{name:<24}" + "{:>9.3f}{:>10.3f}{:>18.3f}".format(*smooth[name]) + f"   {in_words}")

# %% [markdown]
# ## Three seeds, and training beside them
#
# The same model three times as wide, in nine settings, is measured by `python -m benchmarks solvers`, which takes an
# hour; [its page](../docs/benchmarks.md) says how. "a8" and "a4" are inputs in 8 and 4 bits, one scale per token. QAT
# is 300 steps of training. A cell is how many bits per character more than the float model of the same seed takes: the
# mean of three seeds, and half of what they span.

# %%
measured = json.loads((Path(jaxquant.__file__).parents[1] / "benchmarks" / "data" / "solvers.json").read_text())
wide = measured["bits"]["float32"]["nearest"]
more = {
    name: {way: np.subtract(values, wide) for way, values in ways.items()}
    for name, ways in measured["bits"].items()
    if name != "float32"
}
ways = list(more["w4"])
shown = "w8a8", "w4 in groups of 32", "w3", "w2", "w4a8", "w4a4"

print(f"bits per character in float: {np.mean(wide):.3f}\n")
print(" " * 20 + "".join(f"{name.replace(' in groups of ', ', '):>17}" for name in shown))
for way in ways:
    cells = (f"{more[name][way].mean():+.3f} ± {np.ptp(more[name][way]) / 2:.3f}" for name in shown)
    print(f"{way:<20}" + "".join(f"{cell:>17}" for cell in cells))

# %% [markdown]
# What it costs: CPU seconds for all weights in 4 bits, of a first call, which compiles, and of another.

# %%
print(" " * 20 + "first call   another")
for way in ways:
    print("{:<20}{:>10.1f}{:>10.2f}".format(way, *measured["seconds"][way]))

figure, axes = plt.subplots(1, 3, figsize=(11, 4), layout="constrained", sharex=True)
for axis, name in zip(axes, ("w4", "w3", "w2"), strict=True):
    for way, marker in zip(ways, "osD^v<>ph*XP8", strict=True):
        values = more[name][way]
        spread = [[values.mean() - values.min()], [values.max() - values.mean()]]
        axis.errorbar(measured["seconds"][way][0], values.mean(), spread, fmt=marker, capsize=3, label=way)
    axis.set(title=name, xscale="log", xlabel="CPU seconds, first call")
    axis.axhline(0, color="0.5", linewidth=0.5)
axes[0].set_ylabel("bits per character, more than in float")
axes[2].set_yscale("log")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
figure.savefig(output / "10_solvers.png", dpi=150)
plt.show()

# %% [markdown]
# - **8 bits** lose nothing, and need no solver.
# - **4 and 3 bits**: GPTQ takes away more than 70 % of what rounding to the nearest loses, in seconds. QAT is within a
#   hundredth of a bit, and takes longer than any of them.
# - **2 bits**: the scales decide. GPTQ on scales that were compared by what it makes of them, and AdaRound on those of
#   `solve.ranges`, lose a third of what these 300 steps of QAT lose. More steps are another matter.
# - **4-bit inputs**: no solver of weights makes up for them. QAT halves the loss; `solve.with_rotation` takes away a
#   seventh of it, with GPTQ a third. `solve.smooth` gains nothing here, for this model has no large channels; where
#   there are some, as above, it brings back what they cost.

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
# What the text claims, with margins for other machines.
mean = lambda name, way: more[name][way].mean()
assert all(mean(name, "gptq") < mean(name, "nearest") for name in ("w4", "w3", "w2"))
assert all(abs(mean("w8a8", way)) < 1e-3 for way in ways if way != "QAT")
for name in ("w4 in groups of 32", "w4", "w3"):
    assert mean(name, "gptq") < 0.3 * mean(name, "nearest")
    assert mean(name, "gptq") - mean(name, "QAT") < 0.01
assert all(mean("w2", way) < 0.4 * mean("w2", "QAT") for way in ("gptq of its ranges", "adaround of ranges"))
assert all(mean("w4a4", "QAT") < mean("w4a4", way) for way in ways if way != "QAT")
assert all(measured["seconds"][way] < measured["seconds"]["QAT"] for way in ways if way != "QAT")
assert mean("w4a4", "QAT") < 0.6 * mean("w4a4", "nearest")
assert abs(mean("w4a4", "smooth, then gptq") - mean("w4a4", "gptq")) < 5e-3
assert (more["w4a4"]["rotate"] < more["w4a4"]["nearest"]).all()
assert 0.8 * mean("w4a4", "nearest") < mean("w4a4", "rotate") < 0.9 * mean("w4a4", "nearest")
assert 0.6 * mean("w4a4", "nearest") < mean("w4a4", "rotate, then gptq") < 0.7 * mean("w4a4", "nearest")
assert all(live[name, "gptq"] < live[name, "nearest"] for name in quantized)
assert live["w3", "gptq of ranges"] < live["w3", "ranges"] < live["w3", "nearest"]
assert live["w3", "gptq of its ranges"] - in_float < (live["w3", "nearest"] - in_float) / 2
assert different == {"w4": 0, "w3": 0}, "what was solved is what is served"
assert smooth["with large channels"][1] > smooth["as trained"][1] + 1
assert abs(smooth["with large channels"][2] - smooth["as trained"][1]) < 0.1
assert abs(smooth["as trained"][2] - smooth["as trained"][1]) < 0.1
print("all claims hold")
