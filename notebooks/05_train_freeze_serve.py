# %% [markdown]
# # Train, freeze, serve: a language model
#
# A small transformer learns to write Python's documentation character by character. It is trained in float32,
# quantized after training and by quantization-aware training, frozen to integers, saved, and loaded in a new process,
# which generates text. What was trained is what is served: the logits of the new process equal the trained model's, bit
# for bit.
#
#     q.observe ─▶ ranges ─▶ q.init_qparams ─▶ train q(params, x, qparams=qparams) ─▶ q.freeze ─▶ save ─▶ load

# %%
# SPDX-License-Identifier: Apache-2.0
import functools
import pickle
import pydoc_data.topics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from tqdm import tqdm

from jaxquant import Rule, activation_spec, from_log2, load, merge, quantize_fn, save, to_log2, weight_spec

output = Path("output")
output.mkdir(exist_ok=True)
SEEDS, STEPS, MORE_STEPS = range(2), 1500, 100
LAYERS, WIDTH, HEADS, LENGTH, BATCH = 2, 64, 4, 64, 4

# %% [markdown]
# ## The text
#
# Every Python has it: the help of the interpreter, half a megabyte. The last tenth is for testing.

# %%
text = "".join(c for c in "".join(pydoc_data.topics.topics.values()) if c.isascii())
alphabet = sorted(set(text))
code = {c: i for i, c in enumerate(alphabet)}
data = np.array([code[c] for c in text], np.int32)
train_data, test_data = np.split(data, [len(data) * 9 // 10])
test_windows = test_data[: len(test_data) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)[:320]
test_tokens = test_windows[:, :-1]
print(len(data), "characters,", len(alphabet), "different ones")
print(text[4000:4300])

# %% [markdown]
# ## The model
#
# Plain JAX: embeddings, two layers in a `lax.scan` over their stacked parameters, and an output that is tied to the
# embedding. Attention and MLP of a layer stand side by side as in PaLM, so that one weight takes the input of both and
# one gives the output. The file below is what the new process imports; nothing in it knows of quantization.

# %%
MODEL = f"""
import jax, jax.numpy as jnp
from jax import lax

HEADS = {HEADS}


def normed(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def model(params, tokens):
    x = params["embedding"][tokens] + params["positions"][: tokens.shape[1]]
    unseen = jnp.triu(jnp.full((tokens.shape[1],) * 2, -1e30), 1)

    def layer(x, p):
        width = x.shape[-1]
        q, k, v, up = jnp.split(normed(x, p["norm"]) @ p["in"], [width, 2 * width, 3 * width], -1)
        heads = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
        scores = jnp.einsum("bthk,bshk->bhts", heads(q), heads(k)) / (width / HEADS) ** 0.5
        attended = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores + unseen), heads(v)).reshape(x.shape)
        return x + jnp.concatenate([attended, jax.nn.gelu(up)], -1) @ p["out"], None

    x, _ = lax.scan(layer, x, params["layers"])
    return normed(x, params["norm"]) @ params["embedding"].T
"""
(output / "language_model.py").write_text(MODEL)
sys.path.insert(0, str(output))
from language_model import model


def init(seed):
    normal = lambda key, *shape, size=WIDTH**-0.5: size * jax.random.normal(key, shape)
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        "embedding": normal(keys[0], len(alphabet), WIDTH),
        "positions": normal(keys[1], LENGTH, WIDTH, size=0.1),
        "layers": {
            "norm": jnp.ones((LAYERS, WIDTH)),
            "in": normal(keys[2], LAYERS, WIDTH, 7 * WIDTH),
            "out": normal(keys[3], LAYERS, 5 * WIDTH, WIDTH, size=(5 * LAYERS * WIDTH) ** -0.5),
        },
        "norm": jnp.ones(WIDTH),
    }


# %% [markdown]
# ## What is quantized
#
# The tied embedding has 8 bits in all of them, and `everywhere=True`: the lookup sees the quantized rows, too, without
# which it could not be frozen. The layers have 8 bits in weights and activations, 4 and 8, or 4 bits in blocks of 32
# weights with everything else in float.

# %%
A8 = activation_spec(8)
embedding = functools.partial(Rule, "embedding", weight_spec(8), everywhere=True)
RULES = {
    "w8a8": [embedding(activation=A8), Rule("layers/*", weight_spec(8), A8)],
    "w4a8": [embedding(activation=A8), Rule("layers/*", weight_spec(4), A8)],
    "w4 in blocks of 32": [embedding(), Rule("layers/*", weight_spec(4, block_size=32))],
}
quantized = {name: quantize_fn(model, rules) for name, rules in RULES.items()}
plan = quantized["w4a8"].plan(init(0), test_windows[:BATCH, :-1])
print(plan)

# %% [markdown]
# The column "its spec" counts on the parameter, which holds both layers: `layers/in` has a scale for each layer and
# output channel. An input inside the scan has a scale for each layer, too.
#
# ## Training
#
# One loop for all: it takes a function of (trained, tokens), and what it trains is any pytree. With qparams beside the
# parameters their ranges are learned.


# %%
def bits(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean() / jnp.log(2)


def windows(seed, steps):
    starts = np.random.default_rng(seed).integers(0, len(train_data) - LENGTH - 1, (steps, BATCH))
    return train_data[starts[..., None] + np.arange(LENGTH + 1)]


optimizer = optax.scale_by_adam(b2=0.98)


def trainer(apply):
    @jax.jit
    def step(trained, state, tokens, rate):
        loss = lambda trained: bits(apply(trained, tokens[:, :-1]), tokens[:, 1:])
        value, gradients = jax.value_and_grad(loss)(trained)
        updates, state = optimizer.update(gradients, state)
        return jax.tree.map(lambda t, u: t - rate * u, trained, updates), state, value

    def train(trained, batches, rate):
        steps, state, losses = len(batches), optimizer.init(trained), []
        rates = optax.warmup_cosine_decay_schedule(0, rate, steps // 20, steps)(np.arange(steps))
        for tokens, now in zip(batches, np.asarray(rates), strict=True):
            trained, state, value = step(trained, state, tokens, now)
            losses.append(value)
            progress.update()
        return trained, np.array(losses)

    return train


def test_bits(logits):
    return float(bits(logits, test_windows[:, 1:]))


# Scales are trained by their logarithm, which no step of the optimizer makes 0 or negative.
with_qparams = {name: lambda t, x, q=q: q(t[0], x, qparams=from_log2(t[1])) for name, q in quantized.items()}
train_float, float_logits = trainer(model), jax.jit(model)
observe = jax.jit(lambda params, x: quantized["w8a8"].observe(params, x))  # of the float model, whatever has 8 bits
train_quantized = {name: trainer(apply) for name, apply in with_qparams.items()}
logits = {name: jax.jit(apply) for name, apply in with_qparams.items()}

results, curves, last = {name: {"PTQ": [], "QAT": []} for name in RULES}, {}, {}
results["float32"] = {"float": [], "float, trained on": []}


def started(name, params, batches):
    ranges = functools.reduce(merge, (observe(params, x) for x in batches[:16, :, :-1]))
    of_inputs = ranges if "a8" in name else None
    return params, to_log2(quantized[name].init_qparams(params, batches[0, :, :-1], ranges=of_inputs))


def compile_ahead(name):  # by a step of the model that is not trained yet
    start = started(name, init(0), windows(0, 1))
    logits[name](start, test_tokens)
    train_quantized[name](start, windows(0, 1), 0)


def adapt(name, in_float, batches, seed):
    start = started(name, in_float, batches)
    results[name]["PTQ"].append(test_bits(logits[name](start, test_tokens)))
    trained, curves[name, seed] = train_quantized[name](start, batches, 5e-4)
    end = logits[name](trained, test_tokens)
    results[name]["QAT"].append(test_bits(end))
    last[name] = trained[0], from_log2(trained[1]), np.asarray(end)


steps = STEPS + len(RULES) + len(SEEDS) * (1 + len(RULES)) * MORE_STEPS
with tqdm(total=steps, unit="step", mininterval=1) as progress, ThreadPoolExecutor(2) as pool:
    of_float = pool.submit(train_float, init(0), windows(0, STEPS), 6e-3)
    list(pool.map(compile_ahead, quantized))  # meanwhile
    in_float, start = of_float.result()
    for seed in SEEDS:  # of what it is trained on with: one float model is adapted
        more = windows(1 + seed, MORE_STEPS)
        trained_on, curve = train_float(in_float, more, 5e-4)
        results["float32"]["float"].append(test_bits(float_logits(in_float, test_tokens)))
        results["float32"]["float, trained on"].append(test_bits(float_logits(trained_on, test_tokens)))
        curves["float32", seed] = np.concatenate([start, curve])
        list(pool.map(functools.partial(adapt, in_float=in_float, batches=more, seed=seed), quantized))

# %%
print("bits per character                    " + "".join(f"seed {seed}   " for seed in SEEDS) + "mean")
means = {}
for name, rows in results.items():
    for kind, values in rows.items():
        means[name, kind] = float(np.mean(values))
        print(f"{name:<19}{kind:<19}" + "".join(f"{v:6.3f}   " for v in values) + f"{means[name, kind]:6.3f}")

# %%
figure, (whole, apart) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
smooth = lambda losses: np.convolve(losses, np.ones(20) / 20, "valid")
whole.plot(smooth(start), linewidth=1)
for name, color in zip(RULES, ("C3", "C4", "C5"), strict=True):
    for seed in SEEDS:
        more_bits = smooth(curves[name, seed] - curves["float32", seed][STEPS:])
        apart.plot(more_bits, color=color, linewidth=1, alpha=0.7, label=name if seed == 0 else None)
whole.set(title="training in float32", xlabel="step", ylabel="bits per character, mean of 20 steps", ylim=(2.4, 4))
apart.set(title="QAT, more than float32 on the same batches", xlabel="step of QAT", ylabel="bits per character")
apart.axhline(0, color="gray", linewidth=0.5)
apart.legend()
figure.savefig(output / "05_curves.png", dpi=150)
plt.show()

# %% [markdown]
# Compared with the float model trained for as many steps, 8-bit weights cost less than a hundredth of a bit per
# character. 4-bit weights cost one or two hundredths after training (PTQ), and about half of that after
# quantization-aware training (QAT).
#
# ## Freeze, save, serve
#
# `q.freeze` turns the weights into integers with the learned qparams. The quantized function takes them in place of the
# parameters. A new process loads the file, knows the model and the rules, and computes the same logits, to the bit.

# %%
SERVER = """
import pickle, sys
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numpy as np
from jaxquant import load, quantize_fn
sys.path.insert(0, "output")
from language_model import model

all_rules, alphabet, tokens = pickle.load(open("output/05_rules.pickle", "rb"))


def served_by(name, rules):
    q, served = quantize_fn(model, rules), load(f"output/05_{name}.npz")
    np.save(f"output/05_{name}_logits.npy", jax.jit(q)(served["params"], tokens, qparams=served["qparams"]))
    return q, served


with ThreadPoolExecutor(2) as pool:  # two at a time, for most of it is compiling
    q, served = list(pool.map(served_by, all_rules, all_rules.values()))[-1]


@jax.jit
def written(served, tokens, key):
    def step(tokens, key):
        logits = q(served["params"], tokens, qparams=served["qparams"])[:, -1]
        token = jax.random.categorical(key, logits / 0.7)
        return jnp.concatenate([tokens[:, 1:], token[:, None]], 1), token[0]

    return jax.lax.scan(step, tokens, jax.random.split(key, 300))[1]


print("".join(alphabet[i] for i in written(served, tokens[:1], jax.random.key(1))))
"""
trained, sizes = {}, {}
sizes["float32"] = sum(v.nbytes for v in jax.tree.leaves(last["w8a8"][0]))
for name, q in quantized.items():
    params, qparams, trained[name] = last[name]
    save(output / f"05_{name}.npz", {"params": q.freeze(params, test_tokens, qparams=qparams), "qparams": qparams})
    sizes[name] = (output / f"05_{name}.npz").stat().st_size
(output / "05_rules.pickle").write_bytes(pickle.dumps((RULES, alphabet, test_tokens)))
written = subprocess.run([sys.executable, "-c", SERVER], check=True, capture_output=True, text=True).stdout
wrong = {}
for name, logits in trained.items():
    served = np.load(output / f"05_{name}_logits.npy")
    wrong[name] = int((logits.view(np.uint32) != served.view(np.uint32)).sum())
    print(f"{name}: {wrong[name]} of {logits.size} logits differ in the new process")
print(f"\nThe last of them writes:\n{written}")

# %% [markdown]
# ## Sizes and speed
#
# The bytes are of the files, with embeddings, positions, norms and scales; for float32, of the parameters. The speed is
# of a forward pass over 16 windows of 64 on the machine that ran this notebook. A model as narrow as this one gains
# little or nothing from integers on a CPU; [Benchmarks](../docs/benchmarks.md) has one that gains more.


# %%
def compiled(f, params):
    return jax.jit(f).lower(params, tokens).compile()


def seconds(f, *args):
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return np.median(times)


print("                       bytes   of float32   tokens per second")
tokens, rows = test_tokens[:16], {"float32": (model, last["w8a8"][0])}
for name, q in quantized.items():
    served = load(output / f"05_{name}.npz")
    rows[name] = functools.partial(q, qparams=served["qparams"]), served["params"]
with ThreadPoolExecutor(2) as pool:
    programs = list(pool.map(compiled, *zip(*rows.values(), strict=True)))
for (name, (_, params)), program in zip(rows.items(), programs, strict=True):
    speed = tokens.size / seconds(program, params, tokens)
    print(f"{name:<18}{sizes[name]:>10}{sizes[name] / sizes['float32']:>13.2f}{speed:>20.0f}")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
on = means["float32", "float, trained on"]
assert on < 2.9, "the model has learned: counts of pairs of characters alone take 3.3 bits"
assert wrong == dict.fromkeys(RULES, 0), "what was trained is what is served"
assert abs(means["w8a8", "PTQ"] - means["float32", "float"]) < 0.01
assert abs(means["w8a8", "QAT"] - on) < 0.01
for name in ("w4a8", "w4 in blocks of 32"):
    assert means[name, "PTQ"] - means["float32", "float"] > means[name, "QAT"] - on
assert means["w4a8", "QAT"] - on < 0.03
assert sizes["w8a8"] < 0.4 * sizes["float32"]
assert sizes["w4 in blocks of 32"] < 0.3 * sizes["float32"]
print("all claims hold")
