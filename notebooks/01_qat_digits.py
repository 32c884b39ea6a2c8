# %% [markdown]
# # From a float model to a served one, on digits
#
# We train a small convolutional network on scikit-learn's 8x8 digits in float32, quantize it to 8, 4, 3 and 2 bits, and
# serve the result from a file in a new process:
#
# 1. `quantize_fn` quantizes the model's forward function. The model is not changed.
# 2. `q.observe` and `q.init_qparams` calibrate it: post-training quantization (**PTQ**).
# 3. Training goes on through the quantizers, scales included: quantization-aware training (**QAT**).
# 4. `q.freeze`, `save` and `jax.export` make two files that a process without the model serves, with the same bits.
#
# Below that, the ops on which all of this stands, and the same network with the ops of TensorFlow.

# %%
# SPDX-License-Identifier: Apache-2.0
import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from jaxquant import Rule, activation_spec, quantize_fn, range_from_histogram, save, tf, weight_spec

BITS = (8, 4, 3, 2)
SEEDS = (0, 1, 2)
EPOCHS, BATCH, LEARNING_RATE = 20, 60, 2e-3

output = Path("output")
output.mkdir(exist_ok=True)

# %% [markdown]
# ## Data and model
#
# The test split is fixed and serves only for the accuracies reported below. The model is a plain function of a dict of
# parameters; the `apply` of flax, nnx, equinox or haiku would do as well (notebook 04). It is small on purpose, so that
# PTQ has something to lose.

# %%
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
splits = train_test_split(images, labels, train_size=1200, random_state=0, stratify=labels)
x_train, x_test, y_train, y_test = map(jnp.asarray, splits)
print(len(x_train), "images to train,", len(x_test), "to test")

SHAPES = {"conv1": (3, 3, 1, 8), "conv2": (3, 3, 8, 16), "conv3": (3, 3, 16, 32), "dense": (128, 10)}
STRIDES = {"conv1": 1, "conv2": 2, "conv3": 2}


def init(key):
    he = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, len(SHAPES))
    return {
        name: {"w": he(k, shape), "b": jnp.zeros(shape[-1])}
        for k, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def model(params, x):
    for name, s in STRIDES.items():
        x = jax.lax.conv_general_dilated(
            x, params[name]["w"], (s, s), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + params[name]["b"])
    return x.reshape(x.shape[0], -1) @ params["dense"]["w"] + params["dense"]["b"]


# %% [markdown]
# ## Quantize it
#
# Rules say what becomes of each matrix product and convolution, by the path of its parameter. Weights have one
# symmetric scale for each output channel; the inputs of the later layers have one scale and zero point for the whole
# tensor. The first layer sees 17 grey levels, which stay in float, so its rule has a weight alone. The plan shows what
# is quantized, before anything runs.


# %%
@functools.cache
def quantized(bits):
    first, others = Rule("conv1/w", weight_spec(bits)), Rule("*/w", weight_spec(bits), activation_spec(bits))
    return quantize_fn(model, [first, others])


print(quantized(4).plan(init(jax.random.key(0)), x_test))

# %% [markdown]
# ## Train
#
# Float training and QAT are one loop over a pytree `(params, qparams)`. `bits` is static, and None means float: then
# there are no qparams. In QAT the loss sees rounded weights and inputs, and the gradient passes straight through the
# rounding, to the scales too.

# %%
optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, EPOCHS * (len(x_train) // BATCH)))


def logits(trained, x, bits):
    params, qparams = trained
    return model(params, x) if bits is None else quantized(bits)(params, x, qparams=qparams)


def loss(trained, x, y, bits):
    return optax.softmax_cross_entropy_with_integer_labels(logits(trained, x, bits), y).mean()


@functools.partial(jax.jit, static_argnames="bits")
def train_epoch(trained, state, key, bits):
    def step(carry, batch):
        trained, state = carry
        value, gradients = jax.value_and_grad(loss)(trained, x_train[batch], y_train[batch], bits)
        updates, state = optimizer.update(gradients, state)
        return (optax.apply_updates(trained, updates), state), value

    batches = jax.random.permutation(key, len(x_train)).reshape(-1, BATCH)
    (trained, state), values = jax.lax.scan(step, (trained, state), batches)
    return trained, state, values.mean()


@functools.partial(jax.jit, static_argnames="bits")
def accuracy(trained, bits):
    return 100 * (logits(trained, x_test, bits).argmax(-1) == y_test).mean()


def train(trained, key, bits, progress):
    state, curve = optimizer.init(trained), []
    for k in jax.random.split(key, EPOCHS):
        trained, state, value = jax.block_until_ready(train_epoch(trained, state, k, bits))
        curve.append(float(value))
        progress.update()
    return trained, curve


# %% [markdown]
# ## Calibrate
#
# Before it can round, each input needs a range. `q.observe` runs the float model over data and returns the range of
# each input, or a histogram of its values. We calibrate in two ways:
#
# - **min-max**: every value of the training images lies in the range. This is the usual PTQ.
# - **clipped**: the range that holds 99 % of the values, and for weights the initial scale of LSQ (Esser et al., 2020).
#   At few bits it resolves most values better. QAT starts here.

# %%
observe = jax.jit(quantized(8).observe)
count = jax.jit(functools.partial(quantized(8).observe, histogram=True))


def experiment(seed, progress):
    init_key, float_key, qat_key = jax.random.split(jax.random.key(seed), 3)
    progress.set_description(f"seed {seed}, float")
    (params, _), curve = train((init(init_key), None), float_key, None, progress)
    ranges, clipped_ranges = observe(params, x_train), range_from_histogram(count(params, x_train), 99)
    curves, rows = {"float": curve}, []
    for bits in BITS:
        progress.set_description(f"seed {seed}, {bits} bits")
        q = quantized(bits)
        ptq = params, q.init_qparams(params, x_train, ranges=ranges)
        clipped = params, q.init_qparams(params, x_train, ranges=clipped_ranges, method="lsq")
        qat, curves[f"{bits} bits"] = train(clipped, qat_key, bits, progress)
        rows.append([accuracy((params, None), None)] + [accuracy(t, bits) for t in (ptq, clipped, qat)])
    return np.array(rows), curves, qat


with tqdm(total=len(SEEDS) * (1 + len(BITS)) * EPOCHS, unit="epoch", mininterval=1) as progress:
    results = [experiment(seed, progress) for seed in SEEDS]
runs = np.stack([rows for rows, _, _ in results])  # seed, bits, method

# %% [markdown]
# ## Results

# %%
METHODS = ("float", "PTQ", "PTQ, clipped", "QAT")
table, spread = runs.mean(0), runs.max(0) - runs.min(0)

print(f"Test accuracy in %, mean of {len(SEEDS)} seeds (largest minus smallest in brackets)\n")
print("bits" + "".join(f"{method:>15}" for method in METHODS))
for bits, means, spreads in zip(BITS, table, spread, strict=True):
    print(f"{bits:>4}" + "".join(f"{m:>8.1f} ({s:>4.1f})" for m, s in zip(means, spreads, strict=True)))
print(f"\nOne test image is {100 / len(x_test):.2f} points.")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
left.axhline(table[0, 0], color="0.5", linestyle="--", label="float")
for i, method in enumerate(METHODS[1:], start=1):
    left.plot(BITS, table[:, i], label=method)
    left.plot(BITS, runs[:, :, i].T, ".", color=left.lines[-1].get_color())
left.set(xticks=BITS, xlabel="bits of weights and activations", ylabel="test accuracy, %")
left.set_title(f"mean of {len(SEEDS)} seeds, dots for the seeds")
left.legend()
for name, curve in results[0][1].items():
    style = {"color": "0.5", "linestyle": "--"} if name == "float" else {}
    right.semilogy(range(1, EPOCHS + 1), curve, label=name, **style)
right.set(xlabel="epoch", ylabel="training loss", title="float training, then QAT from it (seed 0)")
right.legend()
figure.savefig(output / "01_accuracy.png", dpi=150)
print("saved", output / "01_accuracy.png")

# %% [markdown]
# At 8 and 4 bits every method is close to float. The differences there are about as large as those between seeds, and
# three seeds and one small test set do not show which method is better.
#
# At 3 and 2 bits PTQ loses accuracy, at 2 bits most of all, and QAT recovers most of that loss. At 2 bits clipped
# ranges alone recover a part, and training recovers more. QAT has had more training than PTQ; the 8-bit row is the
# control for that: the same extra training there changes little.
#
# ## Serve
#
# `q.freeze` replaces the weights by integers; `save` writes them with the scales of the inputs. `jax.export` writes the
# program, for any number of images. A new process needs these two files: no model, no rules, no training data.

# %%
bits = BITS[-1]
q, (params, qparams) = quantized(bits), results[0][2]
frozen = q.freeze(params, x_test, qparams=qparams)
save(output / "digits.npz", {"params": frozen, "qparams": qparams})

x_of_any_batch = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 8, 8, 1"), x_test.dtype)
served = jax.jit(lambda params, qparams, x: q(params, x, qparams=qparams))
(output / "digits.program").write_bytes(jax.export.export(served)(frozen, qparams, x_of_any_batch).serialize())
np.save(output / "x.npy", x_test)

SERVER = """
import jax.export, numpy as np
from jaxquant import load

program = jax.export.deserialize(bytearray(open("output/digits.program", "rb").read()))
model = load("output/digits.npz")
np.save("output/y.npy", program.call(model["params"], model["qparams"], np.load("output/x.npy")))
"""
subprocess.run([sys.executable, "-c", SERVER], check=True)
y = np.load(output / "y.npy")
differing = int((y != q(params, x_test, qparams=qparams)).sum())
print(
    f"{100 * (y.argmax(-1) == y_test).mean():.1f} % of the test images are right, {differing} of {y.size} logits differ"
)

# %%
np.savez(output / "float.npz", **{f"{name}/{part}": v for name, of in params.items() for part, v in of.items()})
for name in ("float", "digits"):
    print(f"{name}.npz: {(output / name).with_suffix('.npz').stat().st_size:,} bytes")

# %% [markdown]
# The file also holds what stays in float: biases, scales, and the description of each array.
#
# ## One quantizer and its gradient
#
# What stands at each weight and each input is a staircase: clip to a range, round to evenly spaced levels. Its true
# gradient is 0 almost everywhere, which is useless for training. The straight-through estimator is 1 inside the range
# and 0 outside. `jaxquant.tf` has the ops of TensorFlow, with TensorFlow's bits; `fake_quant_with_min_max_vars` first
# *nudges* the range, so that 0 is one of the levels.

# %%
x = jnp.linspace(-1.5, 1.5, 1201)
stairs, pullback = jax.vjp(lambda x: tf.fake_quant_with_min_max_vars(x, -1.0, 1.0, num_bits=3), x)
(slope,) = pullback(jnp.ones_like(x))
low, high = stairs.min(), stairs.max()

figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(6, 5), height_ratios=(3, 1), layout="constrained")
upper.plot(x, x, color="0.8", label="x")
upper.plot(x, stairs, label="fake quant of x")
upper.set(title=f"3 bits, range [-1, 1], nudged to [{low:.3f}, {high:.3f}] (dotted)", ylabel="value")
upper.legend()
lower.plot(x, slope, color="C1")
lower.set(xlabel="x", ylabel="gradient", ylim=(-0.1, 1.1))
for axes in (upper, lower):
    axes.axvline(low, color="0.5", linestyle=":")
    axes.axvline(high, color="0.5", linestyle=":")
figure.savefig(output / "01_staircase.png", dpi=150)
print("saved", output / "01_staircase.png")

# %% [markdown]
# Eight evenly spaced levels with one at 0 cannot reach equally far to both sides. So the range [-1, 1] moves by half a
# step, and values near one of its ends are clipped. `narrow_range=True` drops one level, and then a symmetric range
# stays as it is, which is what weights want.
#
# These ops go into a model by hand, where `quantize_fn` need not: one line before each product. Here the last layer
# with 3-bit weights, a range for each channel, and a 3-bit input.


# %%
def last_layer(layer, x, top):
    limit = jnp.abs(layer["w"]).max(0)
    w = tf.fake_quant_with_min_max_vars_per_channel(layer["w"], -limit, limit, num_bits=3, narrow_range=True)
    return tf.fake_quant_with_min_max_vars(x, 0.0, top, num_bits=3) @ w + layer["b"]


x = jax.nn.relu(jax.random.normal(jax.random.key(0), (4, 128)))
by_hand = last_layer(params["dense"], x, x.max())
by_rule = quantize_fn(lambda layer, x: x @ layer["w"] + layer["b"], [Rule("w", weight_spec(3), activation_spec(3))])(
    params["dense"], x
)
print("largest difference of the two:", float(jnp.abs(by_hand - by_rule).max()))

# %% [markdown]
# The two agree but for the rounding of float32 sums: `quantize_fn` adds integers, which is exact.

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
# What the text claims, with margins for other machines.
assert np.array_equal(slope, (low <= jnp.linspace(-1.5, 1.5, 1201)) & (jnp.linspace(-1.5, 1.5, 1201) <= high))
assert np.allclose([abs(low + 1), abs(high - 1)], (2 / 7) / 2, atol=1e-6)
symmetric = tf.fake_quant_with_min_max_vars(jnp.linspace(-1.5, 1.5, 1201), -1.0, 1.0, num_bits=3, narrow_range=True)
assert np.allclose([symmetric.min(), symmetric.max()], [-1, 1])
assert jnp.abs(by_hand - by_rule).max() < 1e-5 * jnp.abs(by_hand).max()

rows = {bits: dict(zip(METHODS, means, strict=True)) for bits, means in zip(BITS, table, strict=True)}
for row in rows.values():
    assert row["float"] > 95
for bits, margin in ((8, 2), (4, 4)):
    assert all(abs(rows[bits][method] - rows[bits]["float"]) < margin for method in METHODS)
for bits in (3, 2):
    row = rows[bits]
    lost, recovered = row["float"] - row["PTQ"], row["QAT"] - row["PTQ"]
    print(f"{bits} bits: PTQ loses {lost:.1f} points, QAT recovers {recovered:.1f}")
    assert lost > 1
    assert recovered >= 0.5 * lost
assert rows[2]["PTQ"] < rows[3]["PTQ"] - 5
assert rows[2]["PTQ"] < rows[2]["PTQ, clipped"] - 3 < rows[2]["QAT"] - 6
assert differing == 0
assert (output / "digits.npz").stat().st_size < 0.5 * (output / "float.npz").stat().st_size
print("all claims hold")
