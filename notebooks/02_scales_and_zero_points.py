# %% [markdown]
# # Scales and zero points
#
# Quantization stores a real number as a small integer, its *code* `q`:
#
#     real = (q - zero_point) * scale        qmin <= q <= qmax
#
# This notebook shows where `scale` and `zero_point` come from, what they cost, and how they are trained. It follows the
# article "Tensor Quantization: The Untold Story" (Dhruv Matani, 2023), with its numbers, and goes on to granularity,
# learned scales and integer matrix products.

# %%
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits, load_wine
from sklearn.model_selection import train_test_split

import jaxquant
from jaxquant import (
    QParams,
    QuantSpec,
    Range,
    activation_spec,
    dequantize,
    fake_quant,
    fit_qparams,
    qparams_from_range,
    quantize,
    scale_gradient,
    tf,
    weight_spec,
)

output = Path("output")
output.mkdir(exist_ok=True)


def save(figure, name):
    figure.savefig(output / name, dpi=150)
    print("saved", output / name)


def differing(a, b):
    """How many float32 values differ in a bit."""
    return int((np.asarray(a).view(np.uint32) != np.asarray(b).view(np.uint32)).sum())


# %% [markdown]
# ## Four ranges
#
# A `QuantSpec` says what the grid is: how many bits, signed or not, symmetric (the zero point is 0) or affine (it is
# free). It holds no data. `qparams_from_range` finds the `QParams(scale, zero_point)` that put a real range on it.
#
# | | real range | spec | scale | zero point |
# |---|---|---|---|---|
# | 1 | [0, 1000] | symmetric uint8, codes 0 to 255 | 1000 / 255 = 3.9215... | 0 |
# | 2 | [-20, 1000] | affine uint8 | 1020 / 255 = 4 | 5 |
# | 3 | [-20, 1000] | affine int8, codes -128 to 127 | 4 | 5 - 128 = -123 |
# | 4 | [40, 1000], extended to [0, 1000] | affine uint8 | 3.9215... | 0 |

# %%
symmetric_uint8 = QuantSpec(signed=False)
affine_uint8 = QuantSpec(signed=False, symmetric=False)
affine_int8 = QuantSpec(symmetric=False)
EXAMPLES = (
    (0.0, 1000.0, symmetric_uint8, "symmetric uint8"),
    (-20.0, 1000.0, affine_uint8, "affine uint8"),
    (-20.0, 1000.0, affine_int8, "affine int8"),
    (40.0, 1000.0, affine_uint8, "affine uint8"),
)
four = [qparams_from_range(Range(x_min, x_max), spec) for x_min, x_max, spec, _ in EXAMPLES]
for (x_min, x_max, _, name), (scale, zero_point) in zip(EXAMPLES, four, strict=True):
    print(f"{f'[{x_min:g}, {x_max:g}]':<12}{name:<17}scale {scale:.7f}, zero point {zero_point:.0f}")

# %%
figure, every = plt.subplots(1, 4, figsize=(13, 3.6), layout="constrained")
for number, (axes, example, qparams) in enumerate(zip(every, EXAMPLES, four, strict=True), 1):
    x_min, x_max, spec, name = example
    real = jnp.linspace(x_min, 95, 4001)
    axes.plot(real, quantize(real, spec, qparams).values)
    axes.axvline(0, color="0.8", linewidth=1)
    axes.plot(0, qparams.zero_point, "o", color="C1", label=f"real 0 is code {qparams.zero_point:.0f}")
    if x_min > 0:
        first = int(quantize(jnp.float32(x_min), spec, qparams).values)
        axes.axhspan(spec.qmin, first - 0.5, color="C3", alpha=0.3, label=f"codes {spec.qmin} to {first - 1} wasted")
    axes.set(title=f"{number}: [{x_min:g}, {x_max:g}], {name}", xlabel="real value", xlim=(-25, 100))
    axes.set(ylim=(spec.qmin - 2, spec.qmin + 38))
    axes.legend(loc="upper left")
every[0].set(ylabel="code, the lowest 38")
save(figure, "02_four_ranges.png")

# %% [markdown]
# **Example 1.** A real value divided by the scale falls between two codes, and is rounded to one. 500 / scale is
# 127.5 in float32, exactly between 127 and 128. Ties go to the even neighbour, here 128, as in ONNX: rounding all ties
# up would shift the mean. What comes back is 501.96. The error, half a step, is the largest for any value inside the
# range.

# %%
q = quantize(jnp.float32(500), symmetric_uint8, four[0])
print(f"500 / scale = {jnp.float32(500) / four[0].scale}, code {q.values}, back {dequantize(q):.2f}")
ties = quantize(jnp.array([0.5, 1.5, 2.5, 3.5]), symmetric_uint8, QParams(1.0, 0.0))
print("0.5, 1.5, 2.5 and 3.5 with scale 1 have the codes", ties.values)
inside = jnp.linspace(0, 1000, 100_001)
error = abs(fake_quant(inside, symmetric_uint8, four[0]) - inside)
print(f"largest error in [0, 1000]: {error.max() / four[0].scale:.3f} steps")

# %% [markdown]
# **Examples 2 and 3.** -20 is 5 steps below 0, so without an offset its code would be -5. The zero point adds 5, and is
# itself the code of real 0. In int8 everything moves down by 128. Rounding is the same, so both hold the same real
# values.

# %%
real = jnp.array([-20.0, 0.0, 1000.0])
unsigned, signed = quantize(real, affine_uint8, four[1]), quantize(real, affine_int8, four[2])
print("uint8", unsigned.values, " int8", signed.values)
inside = jnp.linspace(-20, 1000, 100_001)
uint8_from_int8 = differing(fake_quant(inside, affine_uint8, four[1]), fake_quant(inside, affine_int8, four[2]))
print(f"uint8 and int8 give back different real values for {uint8_from_int8} of {inside.size:,} in [-20, 1000]")

# %% [markdown]
# **Example 4.** The range is always extended to contain 0. 40 gets code 10, so the codes 0 to 9 are never used: 10 of
# 255 steps, 3.92 %. The further the range is from 0, the worse: of [960, 1000] no more than 11 codes are left.
#
# (TensorFlow's fake quant does not extend this range but shifts it to [0, 960]; see notebook 06.)

# %%
print("range          codes used of 256")
used = {}
for x_min in (0, 40, 500, 900, 960):
    codes = quantize(jnp.linspace(x_min, 1000, 10_001), affine_uint8).values
    used[x_min] = len(np.unique(codes))
    print(f"{f'[{x_min}, 1000]':<15}{used[x_min]}, from {codes.min()} on")
forty = int(quantize(jnp.float32(40), affine_uint8, four[3]).values)
print(f"40 has code {forty}; {forty} of 255 steps are {100 * forty / 255:.2f} %")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert [float(scale) for scale, _ in four] == [np.float32(1000) / np.float32(255), 4, 4, np.float32(1000 / 255)]
assert [float(zero_point) for _, zero_point in four] == [0, 5, -123, 0]

assert jnp.float32(500) / four[0].scale == 127.5
assert (int(q.values), round(float(dequantize(q)), 2)) == (128, 501.96)
assert ties.values.tolist() == [0, 2, 2, 4]
assert error.max() <= 0.50001 * four[0].scale

assert unsigned.values.tolist() == [0, 5, 255]
assert signed.values.tolist() == [-128, -123, 127]
assert uint8_from_int8 == 0

assert forty == 10
assert round(100 * 10 / 255, 2) == 3.92
assert (used[0], used[40], used[960]) == (256, 246, 11)

# %% [markdown]
# ## Why 0 must be exact
#
# Three things rest on it.
#
# **Comparing with 0.** `QArray.zero_point` has the dtype of the codes. So comparing a code with it is comparing the
# real value with 0, without leaving the integers, and a ReLU is a maximum. (`QParams.zero_point` is float32, because
# it can be trained.)

# %%
values = jnp.asarray(np.random.default_rng(0).uniform(-20, 1000, 10_000), jnp.float32)
values = jnp.concatenate([values, jnp.linspace(-20, 20, 1001)])
compared = []
for spec, qparams in zip((affine_uint8, affine_int8), four[1:3], strict=True):
    q = quantize(values, spec, qparams)
    relu = jnp.maximum(q.values, q.zero_point)
    wrong_order = (q.values > q.zero_point) != (dequantize(q) > 0)
    wrong_relu = relu != quantize(jax.nn.relu(values), spec, qparams).values
    compared.append((spec.dtype, q, relu, wrong_order, wrong_relu))
    print(f"{relu.dtype}: of {values.size} values {wrong_order.sum()} compare wrongly with 0", end=", ")
    print(f"{wrong_relu.sum()} have another ReLU")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
for dtype, q, relu, wrong_order, wrong_relu in compared:
    assert q.zero_point.dtype == q.values.dtype == dtype
    assert not wrong_order.any()
    assert relu.dtype == dtype
    assert not wrong_relu.any()

# %% [markdown]
# **Zeros stay zeros.** A dead unit, a mask or a pruned weight must not come back as a small number. For every range, 0
# is on the grid exactly; a value `v` is on the grid if `fake_quant(v) == v`. Other values need not be on it, even where
# the range contains them.

# %%
rng = np.random.default_rng(1)
ends = rng.normal(0, 10, (2, 1000)).astype(np.float32)
zeros = []
for spec in (symmetric_uint8, affine_uint8, affine_int8, QuantSpec(bits=4), activation_spec(3)):
    of_ranges = qparams_from_range(Range(ends.min(0), ends.max(0)), spec)
    each = dataclasses.replace(spec, granularity=jaxquant.PerChannel(0))
    zeros.append(fake_quant(jnp.zeros(1000), each, of_ranges))
print("0 comes back as 0 in", (jnp.stack(zeros) == 0).sum(), "of 5000 cases, 5 specs with 1000 ranges each\n")

print("   v   fake_quant(v) with scale 4, zero point 5, range [-20, 1000]")
sent = jnp.array([0.0, 2.0, 10.0, 12.0, -20.0, -30.0, 2000.0])
came_back = fake_quant(sent, affine_uint8, four[1])
for v, back in zip(sent, came_back, strict=True):
    print(f"{v:>5.0f}{back:>10.1f}")

# %% [markdown]
# **Padding.** A convolution pads with real 0. In codes that is the zero point, not the code 0.
# `jaxquant.conv_general_dilated` pads so. Below, the same convolution by hand with the code 0, which is real -20 here:
# the sums at the two borders are wrong, and no other.

# %%
signal = jnp.asarray(rng.uniform(100, 1000, (1, 1, 32)), jnp.float32)  # batch, feature, width
kernel = jnp.asarray([[[0.25, 0.5, 0.25]]])
x, w = quantize(signal, affine_uint8, four[1]), quantize(kernel, QuantSpec())
padded_with_0 = jaxquant.conv_general_dilated(x, w, (1,), "SAME")[0, 0]
in_codes = dataclasses.replace(x, values=jnp.pad(x.values, ((0, 0), (0, 0), (1, 1)), constant_values=0))
padded_with_code_0 = jaxquant.conv_general_dilated(in_codes, w, (1,), "VALID")[0, 0]
in_codes = dataclasses.replace(x, values=jnp.pad(x.values, ((0, 0), (0, 0), (1, 1)), constant_values=5))
padded_with_zero_point = jaxquant.conv_general_dilated(in_codes, w, (1,), "VALID")[0, 0]
real = jax.lax.conv_general_dilated(dequantize(x), dequantize(w), (1,), "SAME")[0, 0]

wrong = np.flatnonzero(padded_with_code_0 != padded_with_0)
print("padding with code 0: wrong at", wrong, "by", (padded_with_code_0 - padded_with_0)[wrong])
print("padding with the zero point:", differing(padded_with_zero_point, padded_with_0), "sums differ")
print(f"largest difference from the float convolution: {abs(padded_with_0 / real - 1).max():.1e} of a sum")

# %% [markdown]
# Padding with another value, say 10, needs two things: the range must contain it, and it must be on the grid. Here it
# is not: 10 / 4 = 2.5 becomes 8, an error of half a step at every border pixel. If that is too much, move the scale
# until 10 is an integer number of steps. Rounding 2.5 steps to 2 makes the scale 5 and the range wider than asked.

# %%
pad = jnp.float32(10)
steps = jnp.round(pad / four[1].scale)
adjusted = QParams(pad / steps, four[1].zero_point)
ends = dequantize(dataclasses.replace(unsigned, scale=adjusted.scale))[jnp.array([0, 2])]
for name, qparams in (("from the range", four[1]), ("adjusted", adjusted)):
    back = fake_quant(pad, affine_uint8, qparams)
    print(f"{name:<16}scale {qparams.scale}, 10 comes back as {back}, on the grid: {back == pad}")
print("adjusted range", ends)

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert all((v == 0).all() for v in zeros)
assert came_back.tolist() == [0, 0, 8, 12, -20, -20, 1000]

assert wrong.tolist() == [0, 31]
assert np.allclose((padded_with_code_0 - padded_with_0)[wrong], -20 * 0.25, rtol=0.02)
assert differing(padded_with_zero_point, padded_with_0) == 0
assert np.allclose(padded_with_0, real, rtol=1e-5)

assert fake_quant(pad, affine_uint8, four[1]) == 8
assert fake_quant(pad, affine_uint8, adjusted) == pad
assert ends.tolist() == [-25, 1250]

# %% [markdown]
# ## A trained weight
#
# The rest needs data. We train a small network on scikit-learn's 8x8 digits, in float, and look at the weight of its
# second layer, 128 inputs times 128 outputs. Its output channels are the last axis.

# %%
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
splits = train_test_split(images, labels, train_size=1200, random_state=0, stratify=labels)
x_train, x_test, y_train, y_test = map(jnp.asarray, splits)
SIZES = (64, 128, 128, 10)


def init(key):
    he = jax.nn.initializers.he_normal()
    shapes = itertools.pairwise(SIZES)
    return [{"w": he(k, s), "b": jnp.zeros(s[1])} for k, s in zip(jax.random.split(key, 3), shapes, strict=True)]


def layers(params, x):
    """What each layer gives, before the ReLU that the next one applies."""
    outputs = []
    for layer in params:
        x = (jax.nn.relu(x) if outputs else x) @ layer["w"] + layer["b"]
        outputs.append(x)
    return outputs


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(layers(params, x)[-1], y).mean()


def train(loss, trained, key, epochs, optimizer):
    """What was trained, and the mean loss of each epoch."""

    def step(carry, batch):
        trained, state = carry
        value, gradients = jax.value_and_grad(loss)(trained, x_train[batch], y_train[batch])
        updates, state = optimizer.update(gradients, state, trained)
        return (optax.apply_updates(trained, updates), state), value

    shuffled = jax.vmap(lambda k: jax.random.permutation(k, len(x_train)))(jax.random.split(key, epochs))
    (trained, _), values = jax.lax.scan(step, (trained, optimizer.init(trained)), shuffled.reshape(-1, 60))
    return trained, values.reshape(epochs, -1).mean(1)


def accuracy(params):
    return 100 * float((layers(params, x_test)[-1].argmax(-1) == y_test).mean())


init_key, float_key, qat_key = jax.random.split(jax.random.key(0), 3)
train_float = jax.jit(lambda p: train(loss, p, float_key, 30, optax.adamw(3e-3, weight_decay=1e-2)))
params, float_curve = train_float(init(init_key))
w = params[1]["w"]
print(f"float accuracy {accuracy(params):.1f} %, weight {w.shape}, std {w.std():.3f}, largest {abs(w).max():.3f}")

# %% [markdown]
# *Granularity* is what shares a scale: the whole tensor, a channel, or a block of a channel. The largest of all 16,384
# weights sets the scale of the tensor. A channel with small weights then uses few of its levels. (Of a symmetric signed
# grid the lowest code is left out, so that it reaches equally far to both sides: 3 bits are 7 levels.)

# %%
tensor, channel = QuantSpec(), weight_spec(channel_axis=-1)
narrowest = int(abs(w).max(0).argmin())
hit = {}
figure, every = plt.subplots(2, 2, figsize=(11, 6), sharex=True, layout="constrained")
for row, bits in zip(every, (3, 4), strict=True):
    spec, own = dataclasses.replace(tensor, bits=bits), dataclasses.replace(channel, bits=bits)
    qparams, of_channels = fit_qparams(w, spec), fit_qparams(w, own)
    levels = np.arange(spec.qmin, spec.qmax + 1)
    column = w[:, narrowest]
    shared = quantize(w, spec, qparams).values[:, narrowest]
    alone = quantize(w, own, of_channels).values[:, narrowest]
    hit[bits] = len(np.unique(shared)), len(np.unique(alone))
    own_scale = of_channels.scale[0, narrowest]
    for axes, v, scale, title in (
        (row[0], w, qparams.scale, "all weights"),
        (row[1], column, own_scale, f"the weights of channel {narrowest}"),
    ):
        axes.hist(np.ravel(v), 81 if v.ndim == 2 else 21, color="0.75")
        for level in levels * float(scale):
            color, name = ("C1", "grid of the tensor") if axes is row[0] else ("C0", "grid of the channel")
            axes.axvline(level, color=color, linewidth=1.2, label=name if level == 0 else None)
        axes.set(title=f"{bits} bits, {title}", ylabel="number of weights")
    for level in levels * float(qparams.scale):
        row[1].axvline(
            level, color="C1", linestyle="--", linewidth=1, label="grid of the tensor" if not level else None
        )
    for axes in row:
        axes.legend(loc="upper right")
for axes in every[1]:
    axes.set(xlabel="value of the weight")
save(figure, "02_grid.png")
for bits, (shared, alone) in hit.items():
    print(f"{bits} bits: channel {narrowest} uses {shared} of the tensor's {2**bits - 1} levels, {alone} of its own")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert accuracy(params) > 95
for bits, (shared, alone) in hit.items():
    assert shared < alone == 2**bits - 1

# %% [markdown]
# ## Error against bits
#
# The error is given as SQNR, the signal-to-quantization-noise ratio: `10 log10(mean(w²) / mean((fake_quant(w) - w)²))`
# in decibels. All zeros would have 0 dB. One bit more halves the step, which quarters the squared error: 6 dB.
#
# `fit_qparams` has four methods: "minmax" covers every value; "percentile" clips the outer 0.1 %; "mse" searches for
# the least squared error; "lsq" is where learned scales start. `bits=` is traced: one compile serves all widths.

# %%
BITS = range(2, 9)
METHODS = ("minmax", "percentile", "mse", "lsq")
SPECS = {
    "per tensor": tensor,
    "per channel": channel,
    "blocks of 16": weight_spec(channel_axis=-1, block_size=16),
    "blocks of 8": weight_spec(channel_axis=-1, block_size=8),
}


def sqnr(w, spec, method, bits):
    noise = fake_quant(w, spec, fit_qparams(w, spec, method, bits=bits), bits=bits) - w
    return 10 * jnp.log10(jnp.mean(w**2) / jnp.mean(noise**2))


decibels = {}
print("SQNR in dB" + " " * 18 + "".join(f"{f'{bits} bits':>8}" for bits in BITS))
for granularity, spec in SPECS.items():
    for method in METHODS:
        of_bits = jax.jit(lambda w, bits, spec=spec, method=method: sqnr(w, spec, method, bits))
        decibels[granularity, method] = np.array([of_bits(w, jnp.int32(bits)) for bits in BITS])
        print(f"{granularity:<16}{method:<12}" + "".join(f"{v:>8.1f}" for v in decibels[granularity, method]))

# %%
overhead = {name: 32 * fit_qparams(w, spec).scale.size / w.size for name, spec in SPECS.items()}
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.2), sharey=True, layout="constrained")
for granularity, color in zip(SPECS, ("C0", "C1", "C2", "C3"), strict=True):
    left.plot(BITS, decibels[granularity, "minmax"], "--", color=color)
    left.plot(BITS, decibels[granularity, "mse"], color=color, label=granularity)
    stored = np.array(BITS) + overhead[granularity]
    right.plot(stored, decibels[granularity, "mse"], ".-", color=color, label=granularity)
for method, color in zip(METHODS, ("C4", "C5", "C6", "C8"), strict=True):
    middle.plot(BITS, decibels["per tensor", method], ".-", color=color, label=method)
left.set(title="mse (lines), minmax (dashed)", xlabel="bits", ylabel="SQNR, dB")
middle.set(title="per tensor, the four methods", xlabel="bits")
right.set(title="mse, with the scales counted in", xlabel="stored bits for each weight")
for axes in (left, middle, right):
    axes.legend()
    axes.grid(alpha=0.3)
save(figure, "02_error.png")
print("bits for the float32 scales, for each weight:", {name: round(v, 3) for name, v in overhead.items()})
same_scales = {}
for granularity in list(SPECS)[1:]:
    fits = (fit_qparams(w, SPECS[granularity], method).scale for method in ("percentile", "minmax"))
    same_scales[granularity] = differing(*fits)
print("scales of percentile that differ from minmax:", same_scales)

# %% [markdown]
# What the numbers show, for this weight:
#
# - With "minmax" and "mse" a bit is worth about 6 dB: between 4.5 and 8, once there are 3 bits.
# - With "mse" no method does better anywhere, and a finer granularity is better at every width.
# - What "mse" gains is much at 2 bits and little at 8: there min-max is within 1 dB per tensor and per channel.
# - "percentile" per tensor gains up to 6 bits, and at 8 bits loses: what it clips then costs more than the finer steps
#   bring. Per channel and per block it is min-max, bit for bit: 99.9 % of 128 values are all of them.
# - "lsq" widens its step only with the square root of the width, so that a bit is worth 3 dB. It is made for few bits
#   and for training on, not to be used as it is at 8 bits.
# - A finer granularity has to store its scales. A float32 for each 8 weights is 4 bits for each weight. At an equal
#   number of stored bits, per channel is ahead of the blocks here.

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
for granularity in SPECS:
    best = decibels[granularity, "mse"]
    assert all((best >= decibels[granularity, method]).all() for method in METHODS)
    for method in ("minmax", "mse"):
        worth = np.diff(decibels[granularity, method])[1:]
        assert ((worth > 4.5) & (worth < 8)).all()
    assert (abs(np.diff(decibels[granularity, "lsq"])[1:] - 3) < 1).all()
    assert best[0] - decibels[granularity, "minmax"][0] > 2
for granularity in ("per tensor", "per channel"):
    assert decibels[granularity, "mse"][-1] - decibels[granularity, "minmax"][-1] < 1
for coarse, fine in itertools.pairwise(SPECS):
    assert (decibels[fine, "mse"] > decibels[coarse, "mse"]).all()
percentile, minmax = (decibels["per tensor", method] for method in ("percentile", "minmax"))
assert (percentile[:5] > minmax[:5]).all()
assert percentile[-1] < minmax[-1]
assert same_scales == dict.fromkeys(list(SPECS)[1:], 0)
for size in (16, 8):
    stored = np.array(BITS) + overhead[f"blocks of {size}"]
    same_size = np.interp(stored, np.array(BITS) + overhead["per channel"], decibels["per channel", "mse"])
    shared = stored <= 8
    assert shared.sum() >= 3
    assert (same_size > decibels[f"blocks of {size}", "mse"])[shared].all()

# %% [markdown]
# ## Standardised activations
#
# The article ends with a remark: standardised activations use the quantized range better. An activation usually has one
# scale for the whole tensor, and features that differ in mean and spread have to share it. We compare raw features with
# the same features after `(a - mean) / std`, feature by feature, as a batch norm does. Two tensors: what the second
# layer gives for the training images, and the 13 columns of scikit-learn's wine data, which come in different units.
#
# The error of a feature is its mean squared error as a share of its variance, which standardising does not change. For
# the codes of each feature we count how many occur, and their entropy: how many bits of information they carry.

# %%
spec = activation_spec(4)
raw = {"second layer": layers(params, x_train)[1], "wine": jnp.asarray(load_wine().data, jnp.float32)}
tensors = {}
for name, a in raw.items():
    tensors[name, "raw"], tensors[name, "standardised"] = a, (a - a.mean(0)) / a.std(0)


def entropy(codes):
    share = np.unique(codes, return_counts=True)[1] / codes.size
    return -(share * np.log2(share)).sum()


use = {}
print("4 bits, affine, per tensor            codes used   entropy, bits      error / variance")
print("                                   of 16, median   mean   all   median     largest")
for key, a in tensors.items():
    q = quantize(a, spec)
    columns = np.asarray(q.values).T
    errors = np.asarray(jnp.mean((dequantize(q) - a) ** 2, 0) / a.var(0))
    counts = [len(np.unique(c)) for c in columns]
    use[key] = {"counts": counts, "entropy": np.mean([entropy(c) for c in columns]), "errors": errors}
    print(
        f"{key[0]:<14}{key[1]:<14}{np.median(counts):>16.0f}{use[key]['entropy']:>10.2f}{entropy(columns):>6.2f}"
        f"{np.median(errors):>9.3f}{errors.max():>12.3f}"
    )

# %%
figure, every = plt.subplots(2, 2, figsize=(11, 6.5), layout="constrained")
for row, name in zip(every, raw, strict=True):
    for axes, kind in zip(row, ("raw", "standardised"), strict=True):
        codes = np.asarray(quantize(tensors[name, kind], spec).values)
        share = np.stack([(codes == code).mean(0) for code in range(spec.qmin, spec.qmax + 1)])
        extent = (-0.5, codes.shape[1] - 0.5, spec.qmin - 0.5, spec.qmax + 0.5)
        shown = axes.imshow(100 * share, origin="lower", aspect="auto", extent=extent, cmap="Blues", vmin=0, vmax=50)
        axes.set(title=f"{name}, {kind}", xlabel="feature", ylabel="code")
        figure.colorbar(shown, ax=axes, label="examples with this code, %", extend="max")
save(figure, "02_standardised.png")

# %% [markdown]
# Standardised, a feature uses more of the codes and the features become alike: the worst one gains most. In the wine
# data the column with the largest numbers takes the raw range for itself, and most other columns have one code left.
#
# The remark does not hold for the codes of the whole tensor taken together: in the second layer their entropy is a
# little *lower* after standardising. It is the single feature that gains.

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
for name in raw:
    before, after = use[name, "raw"], use[name, "standardised"]
    assert np.median(after["counts"]) > np.median(before["counts"])
    assert after["entropy"] > before["entropy"] + 0.2
    assert np.median(after["errors"]) < np.median(before["errors"])
    assert after["errors"].max() < before["errors"].max() / 4
assert np.median(use["wine", "raw"]["counts"]) == 1
together = {kind: entropy(np.asarray(quantize(tensors["second layer", kind], spec).values)) for _, kind in tensors}
assert together["standardised"] < together["raw"]

# %% [markdown]
# ## Training a range: two gradients
#
# A range can be a parameter. The forward pass of the next two is the same staircase; they differ in what they tell the
# range.
#
# - TensorFlow's op gives the range the gradient of the values that it clips, and nothing else.
# - `fake_quant` gives the scale the LSQ form: the values that are clipped, and also what rounding does to the others,
#   `round(x / scale) - x / scale` for each.
#
# We fit a Gaussian sample by gradient descent on the mean squared error (Adam), with one trained number, the end of a
# symmetric range. It starts at min-max, at a tenth of it and at twice it. The optimum is what
# `fit_qparams(method="mse")` finds.

# %%
sample = jnp.asarray(np.random.default_rng(0).normal(size=4096), jnp.float32)
STEPS = 1000
STARTS = {"min-max": 1.0, "too small": 0.1, "too large": 2.0}


def by_tensorflow(end, bits):
    return tf.fake_quant_with_min_max_vars(sample, -end, end, num_bits=bits, narrow_range=True)


def by_lsq(end, bits):
    return fake_quant(sample, QuantSpec(bits=bits), QParams(end / QuantSpec(bits=bits).qmax, 0.0))


def error(form, bits):
    return lambda end: jnp.mean((form(end, bits) - sample) ** 2)


def descend(form, bits, starts):
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, STEPS))
    value_and_slope = jax.value_and_grad(error(form, bits))

    def step(carry, _):
        end, state = carry
        value, slope = value_and_slope(end)
        updates, state = optimizer.update(slope, state)
        return (optax.apply_updates(end, updates), state), (end, value, slope)

    run = lambda start: jax.lax.scan(step, (start, optimizer.init(start)), length=STEPS)[1]
    return jax.tree.map(np.asarray, jax.jit(lambda starts: jax.lax.map(run, starts))(starts))


FORMS = {"TensorFlow": by_tensorflow, "LSQ": by_lsq}
runs, optimum = {}, {}
print("mean squared error as a multiple of the optimum, at the start and after", STEPS, "steps")
print("bits  start       " + "".join(f"{name:>20}" for name in FORMS))
for bits in (2, 3, 4):
    spec = QuantSpec(bits=bits)
    optimum[bits] = float(jnp.mean((fake_quant(sample, spec, fit_qparams(sample, spec, "mse")) - sample) ** 2))
    starts = abs(sample).max() * jnp.array(list(STARTS.values()))
    for name, form in FORMS.items():
        runs[name, bits] = descend(form, bits, starts)
    for i, start in enumerate(STARTS):
        ratios = [runs[name, bits][1][i] / optimum[bits] for name in FORMS]
        print(f"{bits:>4}  {start:<12}" + "".join(f"{r[0]:>10.2f} ->{r[-1]:>7.3f}" for r in ratios))

# %%
figure, every = plt.subplots(1, 4, figsize=(15, 4), layout="constrained", width_ratios=(1, 1, 1, 1.2))
for axes, bits in zip(every, (2, 3, 4), strict=False):
    for name, style in zip(FORMS, ("--", "-"), strict=True):
        for i, (start, color) in enumerate(zip(STARTS, ("C0", "C1", "C2"), strict=True)):
            axes.plot(runs[name, bits][1][i] / optimum[bits], style, color=color, label=f"{name}, {start}")
    axes.axhline(1, color="0.6", linewidth=1)
    axes.set(title=f"{bits} bits", xlabel="steps", yscale="log", ylim=(0.9, 60))
every[0].set(ylabel="MSE as a multiple of the optimum")
every[0].legend(fontsize=8)
grid = jnp.linspace(0.3, 5, 471)
slopes = {name: jax.jit(jax.vmap(jax.grad(error(form, 2))))(grid) for name, form in FORMS.items()}
for name, style in zip(FORMS, ("--", "-"), strict=True):
    every[3].plot(grid, slopes[name], style, color="0.2", label=name)
every[3].axhline(0, color="0.6", linewidth=1)
best_end = float(fit_qparams(sample, QuantSpec(bits=2), "mse").scale)
every[3].axvline(best_end, color="C3", linestyle=":", label="optimum")
every[3].set(title="2 bits: gradient with respect to the end", xlabel="end of the range", ylabel="gradient of the MSE")
every[3].legend()
save(figure, "02_range_gradient.png")

# %% [markdown]
# TensorFlow's gradient is never positive: it asks for a wider range, or for nothing. From min-max and above, where it
# clips nothing, the range does not move at all. From below it passes the optimum and goes on until little is clipped.
# At 2 bits it ends several times above the optimum from every start.
#
# The LSQ form has both signs and ends close to the optimum from all three starts. Not on it: the straight-through
# gradient is not the gradient of this error, and at 2 bits its zero lies a little off.
#
# This is the fit of a range alone. It does not say what either does in a network, where the loss is another and the
# weights move too.

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
for bits in (2, 3, 4):
    ends, errors, gradients = runs["TensorFlow", bits]
    assert (gradients <= 0).all()
    assert (np.diff(ends) >= 0).all()
    assert (gradients[[0, 2]] == 0).all()
    assert np.ptp(ends[[0, 2]], axis=1).max() == 0
    assert errors[1].min() < 1.01 * optimum[bits] < errors[1, -1] / 1.2
    errors = runs["LSQ", bits][1]
    assert (errors[:, -1] < 1.02 * optimum[bits]).all()
    assert np.ptp(errors[:, -1]) < 1e-3 * optimum[bits]
assert (runs["TensorFlow", 2][1][:, -1] > 3 * optimum[2]).all()
assert (slopes["LSQ"][grid < 0.9 * best_end] < 0).all()
assert (slopes["LSQ"][grid > 1.1 * best_end] > 0).all()
assert (slopes["TensorFlow"] <= 0).all()

# %% [markdown]
# ## Learned scales, and bits as a schedule
#
# Now train the weights of the network and one scale for each of their channels together, while the bits go down from 8
# to 2. Two details:
#
# - A scale collects the gradients of all weights of its channel. How large that is relative to the scale, compared with
#   the weights, depends on the bits. LSQ multiplies it by `1 / sqrt(n * qmax)`, with `n` weights sharing the scale:
#   `scale_gradient`. Below it evens the ratio out.
# - `bits` is a traced integer. Each stage refits the scales for its bits and trains on, in one compiled function.

# %%
stages_traced = []
optimizer = optax.adam(1e-3)


def fake_quant_weight(layer, scale, bits, power):
    qmax = jnp.left_shift(1, bits - 1) - 1
    factor = (len(layer["w"]) * qmax).astype(jnp.float32) ** power
    qparams = QParams(scale_gradient(scale, factor), jnp.zeros_like(scale))
    return {**layer, "w": fake_quant(layer["w"], channel, qparams, bits=bits)}


def quantized(trained, bits, power=-0.5):
    pairs = zip(trained["params"], trained["scales"], strict=True)
    return [fake_quant_weight(layer, scale, bits, power) for layer, scale in pairs]


def fit_scales(params, method, bits):
    return [fit_qparams(layer["w"], channel, method, bits=bits).scale for layer in params]


@jax.jit
def stage(params, key, bits):
    stages_traced.append(bits)  # runs when the function is traced, not when it is called
    trained = {"params": params, "scales": fit_scales(params, "lsq", bits)}
    return train(lambda t, x, y: loss(quantized(t, bits), x, y), trained, key, 10, optimizer)


@jax.jit
def relative_gradient(params, bits, power):
    """The gradients of the scales and weights of the second layer, each relative to its own size: their ratio."""
    trained = {"params": params, "scales": fit_scales(params, "lsq", bits)}
    d = jax.grad(lambda t: loss(quantized(t, bits, power), x_train, y_train))(trained)
    relative = lambda d, v: jnp.linalg.norm(d) / jnp.linalg.norm(v)
    of_scales = relative(d["scales"][1], trained["scales"][1])
    return of_scales / relative(d["params"][1]["w"], params[1]["w"])


@jax.jit
def quantized_accuracy(trained, bits):
    return 100 * (layers(quantized(trained, bits), x_test)[-1].argmax(-1) == y_test).mean()


float_params, trained = params, {"params": params}
rows, curves = {}, {}
print("      accuracy in %: float weights, not trained        gradient of the scales")
print("bits       min-max scales      LSQ scales   trained      plain   with factor")
for bits, key in zip((8, 6, 4, 3, 2), jax.random.split(qat_key, 5), strict=True):
    width = jnp.int32(bits)
    as_it_is = [{"params": float_params, "scales": fit_scales(float_params, m, width)} for m in ("minmax", "lsq")]
    ratios = [relative_gradient(trained["params"], width, power) for power in (0.0, -0.5)]
    trained, curves[bits] = stage(trained["params"], key, width)
    rows[bits] = [*(float(quantized_accuracy(t, width)) for t in (*as_it_is, trained)), *map(float, ratios)]
    print("{:>4}{:>21.1f}{:>16.1f}{:>10.1f}{:>11.1f}{:>14.2f}".format(bits, *rows[bits]))
print("the stages were traced", len(stages_traced), "time")

# %%
figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
axes.semilogy(range(1, 31), float_curve, color="0.5", linestyle="--", label="float")
for i, (bits, curve) in enumerate(curves.items()):
    axes.semilogy(30 + 10 * i + np.arange(1, 11), curve, ".-", label=f"{bits} bits")
axes.set(xlabel="epoch", ylabel="training loss", title="float training, then the bits of the schedule")
axes.legend()
save(figure, "02_training.png")

# %% [markdown]
# At 3 bits and more there is nothing to gain here: all is within 2 points of the float network, 12 of the 597 test
# images. At 2 bits min-max loses much, and training gets it back. More than half of that comes from the initial scales.
# One seed, and weight-only: notebook 01 has activations and several seeds.
#
# For a width of the schedule the results equal the results of a spec with that width, bit for bit:

# %%
traced_from_static = {}
for bits in rows:
    static = dataclasses.replace(channel, bits=bits)
    qparams, traced = fit_qparams(w, static), fit_qparams(w, channel, bits=jnp.int32(bits))
    weights = fake_quant(w, channel, qparams, bits=jnp.int32(bits)), fake_quant(w, static, qparams)
    traced_from_static[bits] = differing(traced.scale, qparams.scale), differing(*weights)
print("scales and weights that differ between traced and static bits:", traced_from_static)

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert len(stages_traced) == 1
minmax, lsq, qat, plain, with_factor = (
    dict(zip(rows, column, strict=True)) for column in np.transpose(list(rows.values()))
)
assert all(abs(row[i] - accuracy(float_params)) < 2 for bits, row in rows.items() for i in range(3) if bits > 2)
assert len(x_test) == 597
assert qat[2] > minmax[2] + 10
assert lsq[2] > minmax[2] + 0.5 * (qat[2] - minmax[2])
assert plain[8] > 5 * plain[2]
assert max(with_factor.values()) < 2 * min(with_factor.values())
assert traced_from_static == dict.fromkeys(rows, (0, 0))

# %% [markdown]
# ## Integers in place of reals
#
# So far integers were only simulated. `dot_general` contracts two `QArray`s in integers and scales once:
#
#     acc * (x.scale * w.scale),    acc = (x.values - x.zero_point) @ w.values
#
# Its products of int8 are summed in int32, so they are exact and give the same bits as NumPy's int64.
#
# `fake_quant(x) @ fake_quant(w)`, the usual simulation, rounds in every product and sum. It is close, and not the same.
#
# The activations here are affine int8, the weights symmetric int8 per channel. Both are mostly positive, so that the
# sums grow. As a control we do the same contraction of integers in float32, which has gaps above 2 ** 24.

# %%
LENGTHS = (64, 256, 1024, 4096)
COLUMNS = ((1,), (0,)), ((), ())  # contract the columns of x with the rows of w
rng = np.random.default_rng(3)
table = {}
print("       largest sum,  outputs that differ from int8   simulation:    error of       next codes")
print("    K        2**24  integers in float32   simulation  largest diff.  quantization   that differ")
for length in LENGTHS:
    x = jnp.asarray(rng.uniform(0.5, 1, (64, length)), jnp.float32)
    w = jnp.asarray(rng.normal(4, 1, (length, 256)), jnp.float32)
    qx, qw = quantize(x, activation_spec()), quantize(w, channel)
    by_int8 = jaxquant.dot_general(qx, qw, COLUMNS)
    simulated = fake_quant(x, activation_spec()) @ fake_quant(w, channel)

    centred = np.int64(qx.values) - np.int64(qx.zero_point), np.int64(qw.values)
    acc, scales = centred[0] @ centred[1], np.float32(qx.scale) * np.asarray(qw.scale)
    in_float32 = np.asarray(jnp.matmul(*(jnp.asarray(v, jnp.float32) for v in centred))) * scales
    differ = [differing(by_int8, y) / by_int8.size for y in (in_float32, simulated)]

    exact = acc * (np.float64(qx.scale) * np.float64(qw.scale))
    rms = np.sqrt((exact**2).mean())
    next_qparams = fit_qparams(by_int8, activation_spec())
    codes = [quantize(y, activation_spec(), next_qparams).values for y in (by_int8, simulated)]
    row = table[length] = {
        "sum": (abs(centred[0]) @ abs(centred[1])).max() / 2**24,
        "differ": differ,
        "int64": differing(by_int8, acc.astype(np.float32) * scales),
        "apart": abs(by_int8 - simulated).max() / rms,
        "quantization": np.sqrt(((exact - np.float64(x) @ np.float64(w)) ** 2).mean()) / rms,
        "arithmetic": [abs(np.float64(y) - exact).max() / rms for y in (by_int8, simulated)],
        "codes": (codes[0] != codes[1]).mean(),
    }
    shares = "{:>19.0%}{:>13.0%}".format(*differ)
    errors = f"{row['apart']:>15.1e}{row['quantization']:>14.1e}{row['codes']:>14.3%}"
    print(f"{length:>5}{row['sum']:>13.2f}  {shares}{errors}")
print("differences and errors as a share of the outputs' rms")
print("outputs that differ between int8 and NumPy's int64:", sum(row["int64"] for row in table.values()))

# %%
column = lambda name, *i: [np.array(row[name])[i] for row in table.values()]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for i, name in enumerate(("integers in float32", "simulation")):
    left.plot(LENGTHS, 100 * np.array(column("differ", i)), "o^"[i] + "-", label=name)
left.set(ylabel="outputs that differ from int8, %", ylim=(-5, 105))
right.plot(LENGTHS, column("quantization"), "d-", color="0.5", label="quantization itself, rms")
right.plot(LENGTHS, column("arithmetic", 1), "^-", color="C2", label="arithmetic of the simulation, largest")
right.plot(LENGTHS, column("arithmetic", 0), "s-", color="C0", label="arithmetic of the integers, largest")
right.set(ylabel="error, share of the outputs' rms", yscale="log")
for axes in (left, right):
    axes.set(xlabel="K, products in each sum", xscale="log", xticks=LENGTHS, xticklabels=LENGTHS)
    axes.minorticks_off()
    axes.legend()
save(figure, "02_integers.png")

# %% [markdown]
# Integers in float32 are exact as long as the sums are below 2 ** 24, and at K = 4096 they are not.
#
# Most outputs of the simulation differ from the integers in a bit. The difference is small, here less than a tenth of
# the error of quantization. If the outputs are quantized again for a next layer, as in the last column, less than one
# code in a thousand differs: it takes an output that close to a tie.
#
# **Memory.** Up to 8 bits a code takes a byte. `pack` puts codes of 2 to 4 bits side by side. The scales stay float32.

# %%
four_bits = quantize(w, weight_spec(4, channel_axis=-1))
packed = jaxquant.pack(four_bits.values, 4)
unpacked = jaxquant.unpack(packed, 4, four_bits.shape)
print(f"{w.shape}, bytes: float32 {w.nbytes}, 8 bits {qw.nbytes}, 4 bits {four_bits.nbytes}, ", end="")
print(f"packed {packed.nbytes} and {four_bits.scale.nbytes} of scales")
print((unpacked != four_bits.values).sum(), "codes differ after unpacking")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
for row in table.values():
    assert row["int64"] == 0
    in_float32, simulation = row["differ"]
    assert (in_float32 == 0) == (row["sum"] < 1)
    assert simulation > 0.5
    assert row["arithmetic"][0] < row["arithmetic"][1]
    assert row["apart"] < 0.1 * row["quantization"]
    assert row["codes"] < 1e-3
assert table[4096]["sum"] > 2

assert (unpacked == four_bits.values).all()
assert qw.nbytes == four_bits.nbytes == w.size + 256 * (4 + 1)  # a float32 scale, an int8 zero point for each channel
assert (4 * w.size, w.size / 2) == (w.nbytes, packed.nbytes)
print("all claims hold")
