# %% [markdown]
# # QAT for any pytree
#
# A model's parameters are a pytree, in every JAX framework. So quantization-aware training is one line in the loss:
#
#     params = fake_quant_params(params, rules)
#
# We write one small network in plain JAX, flax linen, flax nnx and equinox, and train each with 2-bit weights by that
# line. Then we train the scales too, turn the result into integers and write them to disk. This is weight-only
# quantization: activations and biases stay in float.

# %%
# SPDX-License-Identifier: Apache-2.0
import functools
import importlib.util
import itertools
import pprint
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen, nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jaxquant import (
    dequantize_params,
    fake_quant_params,
    init_qparams,
    load,
    match_rules,
    quantize_params,
    save,
    weight_spec,
)

SIZES = (64, 128, 128, 10)
SEEDS = (0, 1, 2)
EPOCHS, BATCH, LEARNING_RATE = 30, 60, 1e-2

output = Path("output")
output.mkdir(exist_ok=True)


def differing(a, b):
    """How many values differ in a bit."""
    a, b = np.asarray(a), np.asarray(b)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        raise ValueError("arrays of one dtype and shape, please")
    return int((a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}")).sum())


# %% [markdown]
# ## Data and training
#
# scikit-learn's 8x8 digits, as rows of 64 numbers. The test split is fixed; the settings were chosen on a part of the
# training images. The training loop takes a loss and any pytree, and knows nothing of models or quantization.

# %%
images, labels = load_digits(return_X_y=True)
splits = train_test_split((images / 16).astype(np.float32), labels, train_size=1200, random_state=0, stratify=labels)
x_train, x_test, y_train, y_test = map(jnp.asarray, splits)
print(len(x_train), "images to train,", len(x_test), "to test")

adam = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, EPOCHS * (len(x_train) // BATCH)))


def train(loss, trained, key, optimizer=adam):
    """What was trained, and the mean loss of each epoch."""

    def step(carry, batch):
        trained, state = carry
        value, gradients = jax.value_and_grad(loss)(trained, x_train[batch], y_train[batch])
        updates, state = optimizer.update(gradients, state, trained)
        return (optax.apply_updates(trained, updates), state), value

    orders = jax.vmap(lambda k: jax.random.permutation(k, len(x_train)))(jax.random.split(key, EPOCHS))
    (trained, _), values = jax.lax.scan(step, (trained, optimizer.init(trained)), orders.reshape(-1, BATCH))
    return trained, values.reshape(EPOCHS, -1).mean(1)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def accuracy(logits):
    return 100 * (logits.argmax(-1) == y_test).mean()


# %% [markdown]
# ## The network four times
#
# **Plain JAX**: a list of dicts. A kernel is (in, out).


# %%
def init(key, sizes=SIZES):
    he = jax.nn.initializers.he_normal()
    shapes = list(itertools.pairwise(sizes))
    keys = jax.random.split(key, len(shapes))
    return [{"kernel": he(k, shape), "bias": jnp.zeros(shape[1])} for k, shape in zip(keys, shapes, strict=True)]


def network(params, x):
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]


# %% [markdown]
# **flax linen**: the variables are nested dicts.


# %%
class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        for features in SIZES[1:-1]:
            x = linen.relu(linen.Dense(features)(x))
        return linen.Dense(SIZES[-1])(x)


linen_model = Linen()
linen_variables = linen_model.init(jax.random.key(0), x_train)

# %% [markdown]
# **flax nnx**: a model is split into a static graph and its state.


# %%
class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List(nnx.Linear(*shape, rngs=rngs) for shape in itertools.pairwise(SIZES))

    def __call__(self, x):
        *hidden, last = self.layers
        for layer in hidden:
            x = nnx.relu(layer(x))
        return last(x)


nnx_graph, nnx_state = nnx.split(Nnx(nnx.Rngs(0)))

# %% [markdown]
# **equinox**: the model itself is the pytree. It sees one image at a time, and its weights are (out, in).


# %%
class Equinox(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, len(SIZES) - 1)
        shapes = itertools.pairwise(SIZES)
        self.layers = [eqx.nn.Linear(*shape, key=k) for k, shape in zip(keys, shapes, strict=True)]

    def __call__(self, x):
        *hidden, last = self.layers
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return last(x)


equinox_model = Equinox(jax.random.key(0))

# %% [markdown]
# ## Rules, and the plan
#
# A rule is a pattern of paths and a spec; the first that matches decides, and what none matches stays in float. These
# rules say: 2 bits (the values -1, 0 and 1 times a scale), with a scale for each output channel. The axis of the output
# channels is the last for a kernel (in, out), and axis 0 for a weight (out, in). Nothing else differs between the
# frameworks.
#
# `match_rules` shows what the rules choose, as a pytree like the parameters.

# %%
KERNELS = (("**/kernel", weight_spec(2, channel_axis=-1)),)
WEIGHTS = (("**/weight", weight_spec(2, channel_axis=0)),)

print("plain JAX")
pprint.pp(match_rules(init(jax.random.key(0)), KERNELS))
print("\nlinen")
pprint.pp(match_rules(linen_variables, KERNELS))
print("\nnnx, its state as a dict")
pprint.pp(nnx.to_pure_dict(match_rules(nnx_state, KERNELS)))
print("\nequinox, the first layer:", match_rules(equinox_model, WEIGHTS).layers[0])

# %% [markdown]
# A rule that matches nothing is an error, raised while the loss is traced. The flax rules for the equinox model:

# %%
refused = ""
try:
    match_rules(equinox_model, KERNELS)
except ValueError as error:
    refused = str(error)
print(refused)

# %% [markdown]
# The axis has no such check, because the wrong one exists as well. So read the plan. Here is the axis of the flax rules
# for the equinox model:

# %%
wrong_axis = match_rules(equinox_model, [("**/weight", weight_spec(2, channel_axis=-1))])
print(wrong_axis.layers[0].weight)

# %% [markdown]
# ## The line
#
# This is the loss of all four. Without rules `fake_quant_params` returns the parameters as they are, so it is the loss
# of the float network too.


# %%
def loss_of(apply, rules):
    def loss(params, x, y):
        params = fake_quant_params(params, rules)  # the only change for QAT
        return cross_entropy(apply(params, x), y)

    return loss


# %% [markdown]
# We train the plain network in float, and copy its parameters into the other three, so that all four start QAT as the
# same network. Each then sees the same images in the same order.


# %%
def copied(tree):
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(float_params))


init_key, float_key, qat_key = jax.random.split(jax.random.key(0), 3)
float_params, float_curve = jax.jit(functools.partial(train, loss_of(network, ())))(init(init_key), float_key)

kernels_and_biases = [v for layer in float_params for v in (layer["kernel"].T, layer["bias"])]
MODELS = {  # how to apply it, its parameters, its rules
    "plain JAX": (network, float_params, KERNELS),
    "linen": (linen_model.apply, copied(linen_variables), KERNELS),
    "nnx": (lambda state, x: nnx.merge(nnx_graph, state)(x), copied(nnx_state), KERNELS),
    "equinox": (
        lambda model, x: jax.vmap(model)(x),
        jax.tree.unflatten(jax.tree.structure(equinox_model), kernels_and_biases),
        WEIGHTS,
    ),
}

trained, curves, accuracies, start_logits = {}, {}, {}, {}
print("test accuracy, %    float   2 bits after training   2 bits by QAT")
for name, (apply, params, rules) in MODELS.items():
    trained[name], curves[name] = jax.jit(functools.partial(train, loss_of(apply, rules)))(params, qat_key)
    start_logits[name] = apply(fake_quant_params(params, rules), x_test)
    final_logits = apply(fake_quant_params(trained[name], rules), x_test)
    accuracies[name] = [float(accuracy(v)) for v in (apply(params, x_test), start_logits[name], final_logits)]
    print("{:<12}{:>13.1f}{:>24.1f}{:>16.1f}".format(name, *accuracies[name]))

# %%
figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
axes.semilogy(range(1, EPOCHS + 1), float_curve, color="0.5", linestyle="--", label="float")
for (name, curve), style in zip(curves.items(), ("-", "--", "-.", ":"), strict=True):
    axes.semilogy(range(EPOCHS + 1, 2 * EPOCHS + 1), curve, style, label=f"{name}, 2 bits")
axes.set(xlabel="epoch", ylabel="training loss", title="float training, then QAT in each framework")
axes.legend()
figure.savefig(output / "03_frameworks.png", dpi=150)
print("saved", output / "03_frameworks.png")

# %% [markdown]
# 2 bits cost the network more than 10 points, and QAT brings nearly all of them back, in each framework.
#
# At the start the fake-quantized weights are the same bits in all four, in equinox transposed. During training the
# frameworks may sum in another order, and rounding to 2 bits amplifies that, so the trained networks need not be equal.

# %%
start_weights = {name: jax.tree.leaves(fake_quant_params(params, rules)) for name, (_, params, rules) in MODELS.items()}
start_kernels = {name: leaves[1::2] for name, leaves in start_weights.items()} | {
    "equinox": [weight.T for weight in start_weights["equinox"][::2]]
}
start_differences = {}
print("at the start, against plain JAX:   kernels that differ in a bit   largest difference of the logits")
for name, kernels in start_kernels.items():
    start_differences[name] = sum(differing(a, b) for a, b in zip(kernels, start_kernels["plain JAX"], strict=True))
    apart = abs(start_logits[name] - start_logits["plain JAX"]).max()
    print(f"{name:<35}{start_differences[name]:>28}{apart:>35.1e}")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
for name, (float_accuracy, ptq, qat) in accuracies.items():
    assert np.allclose(start_logits[name], start_logits["plain JAX"], rtol=1e-4, atol=1e-4)
    assert ptq < float_accuracy - 10
    assert abs(qat - float_accuracy) < 3
assert start_differences == dict.fromkeys(MODELS, 0)
for a, b, c in zip(*(start_weights[name] for name in ("plain JAX", "linen", "nnx")), strict=True):
    assert differing(a, b) == differing(a, c) == 0
for weight, kernel in zip(start_weights["equinox"][::2], start_weights["plain JAX"][1::2], strict=True):
    assert differing(weight.T, kernel) == 0
assert "layers/0/weight" in refused
assert wrong_axis.layers[0].weight.granularity.axis == -1

# %% [markdown]
# ## Learned scales against min-max
#
# So far each scale came from the largest weight of its channel, anew in every step: `qparams=None`, min-max. LSQ (Esser
# et al., 2020) makes the scales parameters. Three changes:
#
# - `init_qparams` fits the scales once: a dict from path to `QParams`, here by `"lsq"`, `2 * mean|w| / sqrt(qmax)`;
# - `fake_quant_params` takes them, and has a gradient with respect to them; `lsq_gradient=True` is the paper's factor;
# - `optax.multi_transform` gives parameters and scales an optimizer each. The labels are the two top keys.
#
# To tell what the initial scales do from what training them does, a third run starts from the same scales and keeps
# them fixed.
#
# (Adam divides each gradient by its size, so with Adam the factor hardly matters. With SGD it sets the pace.)

# %%
LABELS = {"params": "params", "qparams": "qparams"}
learned = optax.multi_transform({"params": adam, "qparams": adam}, LABELS)
fixed = optax.multi_transform({"params": adam, "qparams": optax.set_to_zero()}, LABELS)


def learned_loss(trained, x, y):
    params = fake_quant_params(trained["params"], KERNELS, trained["qparams"], lsq_gradient=True)
    return cross_entropy(network(params, x), y)


def with_lsq_start(params):
    return {"params": params, "qparams": init_qparams(params, KERNELS, "lsq")}


def quantized_accuracy(params, qparams=None):
    return accuracy(network(fake_quant_params(params, KERNELS, qparams), x_test))


# %% [markdown]
# All runs of a seed start from one float network. The seeds change its first weights and the order of the images; they
# run side by side, by `vmap`. We take two networks: the one above, and a narrow deep one, chosen because 2 bits hurt it
# more.


# %%
def run(sizes, seed):
    init_key, float_key, qat_key = jax.random.split(jax.random.key(seed), 3)
    params, _ = train(loss_of(network, ()), init(init_key, sizes), float_key)
    in_float, float_curve = train(loss_of(network, ()), params, qat_key)
    minmax, minmax_curve = train(loss_of(network, KERNELS), params, qat_key)
    lsq_fixed, fixed_curve = train(learned_loss, with_lsq_start(params), qat_key, fixed)
    lsq, lsq_curve = train(learned_loss, with_lsq_start(params), qat_key, learned)
    of_float = accuracy(network(in_float, x_test))
    ptq, qat = quantized_accuracy(params), quantized_accuracy(minmax)
    rows = jnp.stack([of_float, ptq, qat, quantized_accuracy(**lsq_fixed), quantized_accuracy(**lsq)])
    return lsq, rows, jnp.stack([float_curve, minmax_curve, fixed_curve, lsq_curve])


METHODS = ("float, trained as long", "PTQ, min-max", "QAT, min-max", "QAT, LSQ start, fixed", "QAT, LSQ start, learned")
NETWORKS = {"narrow": (64, 16, 16, 16, 16, 10), "wide": SIZES}
TRAINED = [method for method in METHODS if "PTQ" not in method]
results, by_lsq, curves = {}, {}, {}
for name, sizes in NETWORKS.items():
    by_lsq[name], rows, curves[name] = jax.jit(jax.vmap(functools.partial(run, sizes)))(jnp.array(SEEDS))
    results[name] = dict(zip(METHODS, np.asarray(rows).T, strict=True))
    print(f"{name}, {'-'.join(map(str, sizes))}: test accuracy in %, 2-bit weights")
    print(f"{'':<26}mean  largest - smallest   seeds")
    for method, row in results[name].items():
        print(f"{method:<24}{row.mean():>6.1f}{np.ptp(row):>20.1f}   " + "".join(f"{v:>6.1f}" for v in row))
    print()
print(f"One test image is {100 / len(x_test):.2f} points.")

# %%
figure, every = plt.subplots(1, 2, sharex=True, sharey=True, figsize=(10, 3.5), layout="constrained")
for axes, (name, rows) in zip(every, results.items(), strict=True):
    for i, method in enumerate(TRAINED):
        axes.plot(rows[method], [i] * len(SEEDS), "o", color=f"C{i}", alpha=0.6)
        axes.plot(rows[method].mean(), i, "|", color=f"C{i}", markersize=24)
    axes.set(title=f"{name}, {'-'.join(map(str, NETWORKS[name]))}", xlabel="test accuracy, %")
every[0].set(yticks=range(len(TRAINED)), yticklabels=TRAINED, ylim=(len(TRAINED) - 0.5, -0.5))
figure.suptitle("QAT with 2-bit weights: dots for the seeds, bars for their mean")
figure.savefig(output / "03_lsq.png", dpi=150)
print("saved", output / "03_lsq.png")

# %%
figure, every = plt.subplots(1, 2, sharey=True, figsize=(10, 4), layout="constrained")
for axes, (name, of_seeds) in zip(every, curves.items(), strict=True):
    for method, curve in zip(TRAINED, of_seeds.mean(0), strict=True):
        axes.semilogy(range(1, EPOCHS + 1), curve, label=method)
    axes.set(title=f"{name}, {'-'.join(map(str, NETWORKS[name]))}", xlabel="epoch")
every[0].set(ylabel="training loss, mean of the seeds")
every[1].legend()
figure.savefig(output / "03_curves.png", dpi=150)
print("saved", output / "03_curves.png")

# %% [markdown]
# On the narrow network LSQ is ahead of min-max for every seed, by more than 4 points in the mean. More than half of it
# comes from the initial scales, without training them. The rest comes with training them; three seeds are too few to
# show that it does in general.
#
# On the wide network there is no such gap: the means of the three QAT runs are within 2 points of float. What matters
# there is QAT at all. On both networks, with any of the scales, it is worth more than 10 points over PTQ.

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
means = {name: {method: row.mean() for method, row in rows.items()} for name, rows in results.items()}
in_float, ptq, minmax, lsq_fixed, lsq = results["narrow"].values()
assert (lsq > minmax).all()
assert (lsq - minmax).mean() > 4
assert (lsq_fixed - minmax).mean() > 0.5 * (lsq - minmax).mean()
wide = means["wide"]
assert means["narrow"]["PTQ, min-max"] < wide["PTQ, min-max"] - 10
assert all(abs(wide[method] - wide["float, trained as long"]) < 2 for method in wide if method.startswith("QAT"))
for of_network in means.values():
    assert min(v for method, v in of_network.items() if method.startswith("QAT")) > of_network["PTQ, min-max"] + 10

# %% [markdown]
# ## Integers
#
# `quantize_params` replaces each parameter that the rules choose by a `QArray` (int8 values, scales, zero points), with
# the scales used in training: min-max again, or the learned `qparams`. `dequantize_params` gives real values back. They
# are not merely close to what QAT computed with: they are the same bits. So are the logits.


# %%
def check_integers(apply, params, rules, qparams=None):
    """The integers, and how many weights and logits differ in a bit from QAT, and how many predictions."""
    integers = quantize_params(params, rules, qparams)
    simulated, restored = fake_quant_params(params, rules, qparams), dequantize_params(integers)
    leaves = zip(jax.tree.leaves(simulated), jax.tree.leaves(restored), strict=True)
    logits = [apply(p, x_test) for p in (simulated, restored)]
    predictions = int((logits[0].argmax(-1) != logits[1].argmax(-1)).sum())
    return integers, [sum(differing(a, b) for a, b in leaves), differing(*logits), predictions]


first_seed = lambda tree: jax.tree.map(lambda v: v[0], tree)
CASES = {name: (apply, trained[name], rules) for name, (apply, _, rules) in MODELS.items()}
for name, by_seed in by_lsq.items():
    tree = first_seed(by_seed)
    CASES[f"LSQ, {name}"] = network, tree["params"], KERNELS, tree["qparams"]

integers, differences = {}, {}
print("differences between QAT and integers:   weights   logits   predictions")
for name, case in CASES.items():
    integers[name], differences[name] = check_integers(*case)
    print("{:<36}{:>11}{:>9}{:>14}".format(name, *differences[name]))

last = integers["LSQ, narrow"][-1]["kernel"]
print("\nthe last kernel of the narrow network, a column for each digit:")
print(np.asarray(last.values), last.values.dtype)
print("times", np.asarray(last.scale).round(2))

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert all(counts == [0, 0, 0] for counts in differences.values())
assert set(np.unique(last.values)) <= {-1, 0, 1}

# %% [markdown]
# ## On disk
#
# `save` writes any such tree, to `.npz`, or with the package safetensors to `.safetensors`; values of 4 and 2 bits are
# packed. `load` checks a digest and gives the same bits back, as a dict from path to leaf, or in the structure of
# `like`.
#
# The size depends on shapes and bits alone, so the 8- and 4-bit files are of the float network as it is.

# %%
SUFFIXES = [".npz"] + [".safetensors"] * (importlib.util.find_spec("safetensors") is not None)
TREES = {"float32": float_params} | {
    f"{bits} bits": quantize_params(float_params, [("**/kernel", weight_spec(bits, channel_axis=-1))])
    for bits in (8, 4)
}
TREES["2 bits"] = integers["LSQ, wide"]
n_weights = sum(layer["kernel"].size for layer in float_params)

sizes, wrong = {}, 0
print(f"{n_weights} weights; bytes, and in brackets how many times smaller than float32")
print("          weights alone" + "".join(f"{suffix:>24}" for suffix in SUFFIXES))
for name, tree in TREES.items():
    bits = 32 if name == "float32" else int(name.split()[0])
    sizes[name] = [n_weights * bits // 8]
    for suffix in SUFFIXES:
        path = output / f"03_{name.replace(' ', '_')}{suffix}"
        save(path, tree)
        loaded = load(path)
        pairs = zip(jax.tree.leaves(loaded), jax.tree.leaves(tree), strict=True)
        wrong += sum(differing(a, b) for a, b in pairs) + (jax.tree.structure(loaded) != jax.tree.structure(tree))
        sizes[name].append(path.stat().st_size)
    columns = zip(sizes[name], sizes["float32"], strict=True)
    print(f"{name:<12}" + "  ".join(f"{f'{size} ({whole / size:.1f})':>{20}}" for size, whole in columns))
print("\nvalues that differ after loading:", wrong)

# %% [markdown]
# The weights themselves are 4, 8 and 16 times smaller. The files shrink less: biases stay float32, every channel has a
# float32 scale, and every array a header. In a network this small that shows: at 2 bits the file is 7 to 12 times
# smaller, not 16.

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
ratios = {name: np.divide(sizes["float32"], of_name) for name, of_name in sizes.items()}
assert [float(ratios[name][0]) for name in ("8 bits", "4 bits", "2 bits")] == [4, 8, 16]
assert all((r[1:] < r[0]).all() for name, r in ratios.items() if name != "float32")
assert ((ratios["2 bits"][1:] > 7) & (ratios["2 bits"][1:] < 12)).all()
assert wrong == 0
print("all claims hold")
