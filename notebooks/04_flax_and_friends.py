# %% [markdown]
# # The same call on linen, nnx, equinox and haiku
#
# `quantize_fn` takes a function and returns it quantized:
#
#     q = quantize_fn(apply, rules)
#
# It traces the function, follows the parameters to the matrix products and convolutions that use them, and replaces
# those that the rules choose. The model is not changed, and its author need not know. So one call, with one rule, works
# for every framework: here flax linen, flax nnx, equinox and haiku. Weights have 2 bits, activations 4.

# %%
# SPDX-License-Identifier: Apache-2.0
import functools
from pathlib import Path

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen, nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jaxquant import Rule, activation_spec, ema_ranges, load, quantize_fn, save, weight_spec

EPOCHS, BATCH, LEARNING_RATE = 40, 60, 5e-3
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
# scikit-learn's 8x8 digits. The test split is fixed. The training loop takes a function of parameters and images, and
# parameters of any framework: it knows nothing of quantization.

# %%
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
splits = train_test_split(images, labels, train_size=1200, random_state=0, stratify=labels)
x_train, x_test, y_train, y_test = map(jnp.asarray, splits)
print(len(x_train), "images to train,", len(x_test), "to test")

optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, EPOCHS * (len(x_train) // BATCH)))


def loss(params, x, y, apply):
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()


@functools.partial(jax.jit, static_argnames="apply")
def train(apply, params, key):
    """The trained parameters, and the mean loss of each epoch."""

    def step(carry, batch):
        params, state = carry
        value, gradients = jax.value_and_grad(loss)(params, x_train[batch], y_train[batch], apply)
        updates, state = optimizer.update(gradients, state)
        return (optax.apply_updates(params, updates), state), value

    orders = jax.vmap(lambda k: jax.random.permutation(k, len(x_train)))(jax.random.split(key, EPOCHS))
    (params, _), values = jax.lax.scan(step, (params, optimizer.init(params)), orders.reshape(-1, BATCH))
    return params, values.reshape(EPOCHS, -1).mean(1)


def accuracy(apply, params):
    return float(100 * (apply(params, x_test).argmax(-1) == y_test).mean())


# %% [markdown]
# ## The network four times
#
# A convolution and two dense layers, as one writes them in each framework.
#
# **flax linen**


# %%
class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Conv(16, (3, 3), strides=2)(x))
        x = linen.relu(linen.Dense(32)(x.reshape(len(x), -1)))
        return linen.Dense(10)(x)


linen_model = Linen()
linen_params = linen_model.init(jax.random.key(0), x_test)

# %% [markdown]
# **flax nnx**: a model is split into a static graph and its state.


# %%
class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), strides=2, rngs=rngs)
        self.dense = nnx.Linear(256, 32, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv(x))
        x = nnx.relu(self.dense(x.reshape(len(x), -1)))
        return self.head(x)


nnx_graph, nnx_params = nnx.split(Nnx(nnx.Rngs(0)))

# %% [markdown]
# **equinox**: the model itself is the pytree. It sees one image at a time, channels first, and output channels are the
# first axis of a weight.


# %%
class Equinox(eqx.Module):
    conv: eqx.nn.Conv2d
    dense: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.conv = eqx.nn.Conv2d(1, 16, 3, stride=2, padding=1, key=keys[0])
        self.dense = eqx.nn.Linear(256, 32, key=keys[1])
        self.head = eqx.nn.Linear(32, 10, key=keys[2])

    def __call__(self, x):
        x = jax.nn.relu(self.conv(x.transpose(2, 0, 1)))
        x = jax.nn.relu(self.dense(x.ravel()))
        return self.head(x)


equinox_model = Equinox(jax.random.key(0))

# %% [markdown]
# **haiku**: a function becomes a pair, `init` and `apply`.


# %%
def haiku_network(x):
    x = jax.nn.relu(hk.Conv2D(16, 3, stride=2)(x))
    x = jax.nn.relu(hk.Linear(32)(hk.Flatten()(x)))
    return hk.Linear(10)(x)


haiku_model = hk.without_apply_rng(hk.transform(haiku_network))
haiku_params = haiku_model.init(jax.random.key(0), x_test)

MODELS = {  # the function, its parameters
    "linen": (linen_model.apply, linen_params),
    "nnx": (lambda state, x: nnx.merge(nnx_graph, state)(x), nnx_params),
    "equinox": (lambda model, x: jax.vmap(model)(x), equinox_model),
    "haiku": (haiku_model.apply, haiku_params),
}

# %% [markdown]
# ## The call, and the plan
#
# One rule for all four: `**` matches every parameter that a product or convolution uses. `weight_spec(2)` names no
# axis, which means the output channels of the op, wherever the framework keeps them. `activation_spec(4)` is for the
# other operand, with one range for the whole batch.
#
# `plan` says what becomes of each operand, with nothing computed: shapes suffice. Read it before training.

# %%
RULES = [Rule("**", weight_spec(2), activation_spec(4))]

quantized = {name: quantize_fn(apply, RULES) for name, (apply, _) in MODELS.items()}
plans = {name: q.plan(MODELS[name][1], x_train[:BATCH]) for name, q in quantized.items()}
for name, plan in plans.items():
    print(f"{name}\n{plan}\n")

# %% [markdown]
# Each has the same three ops, and all six operands are quantized. The names differ, the axis of the channels, and in
# equinox, which writes `weight @ x`, the side of the weight.
#
# A rule that matches nothing is an error:

# %%
refused = ""
try:
    quantize_fn(MODELS["haiku"][0], [("**/kernel", weight_spec(2))]).plan(haiku_params, x_test)
except ValueError as error:
    refused = str(error)
print(refused)

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
for plan in plans.values():
    assert len(plan) == 6
    assert sorted(site.op for site in plan) == ["conv_general_dilated"] * 2 + ["dot_general"] * 4
    assert sorted(site.spec.bits for site in plan) == [2, 2, 2, 4, 4, 4]
assert "'**/kernel', matched no site" in refused
assert "'conv2_d/w'" in refused

# %% [markdown]
# ## Training
#
# The quantized function replaces the original in the loss, under `grad` and under `jit`. The straight-through estimator
# passes the gradient to the float parameters, which the optimizer updates as always. That is all of QAT.
#
# Each float network is trained, then evaluated quantized as it is (PTQ, post-training quantization), then trained on
# with the quantization. As a control the float network is trained on, too, without it.

# %%
METHODS = ("float", "float, trained on", "PTQ", "QAT")
trained, curves, accuracies = {}, {}, {}
print("test accuracy, %" + "".join(f"{method:>20}" for method in METHODS))
for name, (apply, params) in MODELS.items():
    q, (float_key, more_key) = quantized[name], jax.random.split(jax.random.key(1))
    in_float, float_curve = train(apply, params, float_key)
    in_float_longer, longer_curve = train(apply, in_float, more_key)
    trained[name], qat_curve = train(q, in_float, more_key)
    curves[name] = {"float": jnp.concatenate([float_curve, longer_curve]), "QAT": qat_curve}
    pairs = (apply, in_float), (apply, in_float_longer), (q, in_float), (q, trained[name])
    accuracies[name] = dict(zip(METHODS, (accuracy(*pair) for pair in pairs), strict=True))
    print(f"{name:<16}" + "".join(f"{v:>20.1f}" for v in accuracies[name].values()))

# %%
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for i, (name, of_name) in enumerate(curves.items()):
    axes.semilogy(range(1, 2 * EPOCHS + 1), of_name["float"], "--", color=f"C{i}", label=f"{name}, float")
    axes.semilogy(range(EPOCHS + 1, 2 * EPOCHS + 1), of_name["QAT"], color=f"C{i}", label=f"{name}, QAT")
axes.set(xlabel="epoch", ylabel="training loss", title=f"float, trained on or by QAT from epoch {EPOCHS + 1}")
axes.legend(ncols=2)
figure.savefig(output / "04_curves.png", dpi=150)
print("saved", output / "04_curves.png")

# %% [markdown]
# In every framework PTQ costs more than 20 points, and QAT recovers more than five sixths of them. (Each framework
# draws its own first weights, and this is one seed: another moves a row by a point or two, and the rows do not compare
# the frameworks.)

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
for name, row in accuracies.items():
    lost, recovered = row["float, trained on"] - row["PTQ"], row["QAT"] - row["PTQ"]
    print(f"{name}: PTQ loses {lost:.1f} points, QAT recovers {recovered:.1f}")
    assert row["float"] > 90
    assert lost > 20
    assert recovered > lost * 5 / 6

# %% [markdown]
# ## To a served file
#
# So far each batch has had its own activation ranges. A served model fixes them: `observe` returns the ranges of one
# batch, `ema_ranges` averages them over the training set, and `init_qparams` turns them into scales. Then `freeze`
# turns the weights into integers, in the same pytree, and the quantized function takes the frozen parameters in place
# of the float ones.

# %%
differences, served_accuracies = {}, {}
batches = x_train.reshape(-1, BATCH, 8, 8, 1)
print("served     accuracy, %   bytes   of float32   logits changed by freezing and loading")
for name, q in quantized.items():
    params, observe = trained[name], jax.jit(q.observe)
    ranges = functools.reduce(lambda a, b: ema_ranges(a, b, 0.9), [observe(params, batch) for batch in batches])
    qparams = q.init_qparams(params, batches[0], ranges=ranges)
    frozen = {"params": q.freeze(params, batches[0], qparams=qparams), "qparams": qparams}
    save(output / f"04_{name}.npz", frozen)

    served = load(output / f"04_{name}.npz", like=frozen)
    logits = q(served["params"], x_test, qparams=served["qparams"])
    differences[name] = differing(logits, q(params, x_test, qparams=qparams))
    right = served_accuracies[name] = float(100 * (logits.argmax(-1) == y_test).mean())
    size, in_float = (sum(v.nbytes for v in jax.tree.leaves(tree)) for tree in (served["params"], params))
    print(f"{name:<11}{right:>11.1f}{size:>8}{size / in_float:>13.2f}{differences[name]:>9}")

# %% [markdown]
# Freezing, saving and loading change no bit. The accuracy that a row loses is the price of fixed ranges at 4 bits;
# [notebook 05](05_train_freeze_serve.ipynb) learns them.

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert all(right > 85 for right in served_accuracies.values())
assert differences == dict.fromkeys(MODELS, 0)
print("all claims hold")
