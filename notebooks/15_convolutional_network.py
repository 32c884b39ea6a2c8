# %% [markdown]
# # A convolutional network, to the bits of its runtime
#
# A network with batch norms and depthwise convolutions, in flax nnx, from float to files that ONNX Runtime and LiteRT
# serve in integers. Its norms are folded, its weights rounded to 4 bits, first without training, then with it, and in
# the end every logit of the file is the logit that was trained.
#
#     nnx ─▶ fold_norms ─▶ quantize_fn(runtime=) ─▶ bias_correct ─▶ training ─▶ freeze ─▶ onnx.export, litert.export
#
# It needs `pip install 'jaxquant[notebooks,frameworks,onnx,litert]'`. The network is small, so that this takes minutes
# on a CPU; EfficientNet-Lite0 with its public weights goes the same way in `python -m benchmarks cnn`.

# %%
# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import optax
from ai_edge_litert.interpreter import Interpreter
from flax import nnx
from jax import lax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jaxquant
from jaxquant import Rule, activation_spec, merge, quantize_fn, solve, weight_spec

output = Path("output")
output.mkdir(exist_ok=True)
EPOCHS, MORE_EPOCHS, BATCH = 10, 3, 60

images, labels = load_digits(return_X_y=True)
images = (images / 8 - 1).astype(np.float32).reshape(-1, 8, 8, 1)
splits = train_test_split(images, labels, train_size=1200, random_state=0, stratify=labels)
x_train, x_test, y_train, y_test = map(jnp.asarray, splits)

# %% [markdown]
# ## The network
#
# A stem, two inverted residuals as MobileNet and EfficientNet have them, a head. All convolutions are without a bias:
# the norms have it.


# %%
class Layer(nnx.Module):
    """A convolution, its norm, and relu6."""

    def __init__(self, inputs, outputs, kernel, rngs, stride=1, depthwise=False, relu6=True):
        groups = inputs if depthwise else 1
        self.conv = nnx.Conv(
            inputs, outputs, (kernel, kernel), stride, feature_group_count=groups, use_bias=False, rngs=rngs
        )
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        self.relu6 = relu6

    def __call__(self, x):
        y = self.norm(self.conv(x))
        return nnx.relu6(y) if self.relu6 else y


class Block(nnx.Module):
    """Expanded, convolved in each channel, projected; the input is added where shapes are equal."""

    def __init__(self, inputs, outputs, rngs, stride=1):
        self.expand = Layer(inputs, 3 * inputs, 1, rngs)
        self.depthwise = Layer(3 * inputs, 3 * inputs, 3, rngs, stride, depthwise=True)
        self.project = Layer(3 * inputs, outputs, 1, rngs, relu6=False)

    def __call__(self, x):
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if x.shape == y.shape else y


class Net(nnx.Module):
    def __init__(self, rngs):
        self.stem = Layer(1, 12, 3, rngs)
        self.blocks = nnx.List([Block(12, 12, rngs), Block(12, 24, rngs, stride=2)])
        self.head = Layer(24, 64, 1, rngs)
        self.dense = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.dense(self.head(x).mean((1, 2)))


# %% [markdown]
# ## In float
#
# Norms take the statistics of each batch, and keep means of them for evaluation.


# %%
def cross_entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def train(step, carry, epochs, seed):
    """`step(carry, x, y)` for all batches, epoch by epoch."""

    @jax.jit
    def epoch(carry, key):
        order = jax.random.permutation(key, len(x_train)).reshape(-1, BATCH)
        return lax.scan(lambda carry, of: (step(carry, x_train[of], y_train[of]), None), carry, order)[0]

    for key in tqdm(jax.random.split(jax.random.key(seed), epochs), unit="epoch"):
        carry = jax.block_until_ready(epoch(carry, key))
    return carry


net = Net(nnx.Rngs(0))
graph, params, statistics = nnx.split(net, nnx.Param, ...)
adam = optax.adam(3e-3)


def step(carry, x, y):
    params, statistics, state = carry

    def loss(params):
        model = nnx.merge(graph, params, statistics, copy=True)
        return cross_entropy(model(x), y), nnx.state(model, nnx.Not(nnx.Param))

    gradient, statistics = jax.grad(loss, has_aux=True)(params)
    updates, state = adam.update(gradient, state)
    return optax.apply_updates(params, updates), statistics, state


params, statistics, _ = train(step, (params, statistics, adam.init(params)), EPOCHS, 1)
net = nnx.merge(graph, params, statistics)
net.eval()
graph, state = nnx.split(net)  # statistics are among the params


def evaluate(state, x):
    return nnx.merge(graph, state)(x)


right = lambda logits: 100 * float((jnp.argmax(logits, -1) == y_test).mean())
in_float = evaluate(state, x_test)
print(f"right in float: {right(in_float):.1f} %")

# %% [markdown]
# ## Fold the norms
#
# Scale and shift of each norm go into the convolution before it. The function that comes back takes the same params,
# and runs without norms.

# %%
folded, model = solve.fold_norms(state, evaluate, x_test)
print(f"largest change of a logit: {float(jnp.abs(model(folded, x_test) - in_float).max()):.1e}")

# %% [markdown]
# ## Quantize for the runtime
#
# With `runtime=` a site computes what the kernel of the runtime computes: a bias of int32 added to the accumulator, one
# product, one rounding. Sums, means and the values between layers have grids, too. The plan names the kernel of each
# op; `strict=True` would raise if one was computed in float.


# %%
def quantized(runtime):
    """The function in W4A8, and its qparams from 600 images."""
    q = quantize_fn(model, [Rule("**", weight_spec(4), activation_spec(8))], runtime=runtime)
    observe = jax.jit(q.observe)
    ranges = merge(*(observe(folded, x) for x in jnp.split(x_train[:600], 2)))
    return q, q.init_qparams(folded, x_train[:300], ranges=ranges)


q, qparams = quantized("onnxruntime")
print(q.plan(folded, x_test, qparams=qparams))

# %% [markdown]
# ## 4 bits
#
# Rounded to nearest, then with two solvers, which need 300 images and no labels: `bias_correct` makes up for the mean
# error of each channel, `adaround` chooses the direction of each rounding. And trained, from the corrected biases,
# with the arithmetic of the runtime.

# %%
logits = jax.jit(q)
of = lambda params: right(logits(params, x_test, qparams=qparams))
grams, args = q.observe(folded, x_train[:300], gram=True), (x_train[:300],)
errors = {}  # of each layer, relative to its results: rounded to nearest, corrected, solved, solved and corrected
told = lambda path, *of: errors.setdefault(path, []).extend(of[-2:])
corrected = solve.bias_correct(folded, q, grams, *args, qparams=qparams, progress=told)
solved = solve.adaround(folded, q, grams, *args, qparams=qparams)
solved = solve.bias_correct(folded, q, grams, *args, qparams=qparams, solved=solved, progress=told)


def trained(q, qparams, start):
    optimizer = optax.adam(5e-4)

    def step(carry, x, y):
        params, state = carry
        loss = lambda params: cross_entropy(q(params, x, qparams=qparams), y)
        updates, state = optimizer.update(jax.grad(loss, allow_int=True)(params), state)
        return optax.apply_updates(params, updates), state

    return train(step, (start, optimizer.init(start)), MORE_EPOCHS, 2)[0]


tuned = trained(q, qparams, corrected)
accuracy = {"float": right(in_float), "nearest": of(folded), "bias_correct": of(corrected)}
accuracy |= {"adaround, bias_correct": of(solved), "trained": of(tuned)}
for name, percent in accuracy.items():
    print(f"{name:24s} {percent:5.1f} %")

# %% [markdown]
# ## Export, and count
#
# The frozen network becomes a file, the runtime runs it, and its logits are compared with those of JAX. LiteRT has
# sums and an input of its own arithmetic, so that it is quantized anew, with the params that were trained.


# %%
def in_onnxruntime(q, frozen, qparams):
    written = jaxquant.onnx.export(q, frozen, x_test, qparams=qparams, path=output / "digits.onnx")
    options = onnxruntime.SessionOptions()
    # Without VNNI ONNX Runtime adds two products in 16 bits, which saturate; this makes it exact.
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(written.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: np.asarray(x_test)})[0]


def in_litert(q, frozen, qparams):
    written = jaxquant.litert.export(q, frozen, x_test, qparams=qparams, path=output / "digits.tflite")
    interpreter = Interpreter(model_content=written, num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], np.asarray(x_test))
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


def differing(q, qparams, run):
    """How many logits differ between JAX and the file."""
    frozen = q.freeze(tuned, x_test, qparams=qparams)
    want = np.asarray(jax.jit(q)(frozen, x_test, qparams=qparams))
    return int((run(q, frozen, qparams) != want).sum()), want.size


found = {"ONNX Runtime": differing(q, qparams, in_onnxruntime), "LiteRT": differing(*quantized("litert"), in_litert)}
for runtime, (count, size) in found.items():
    print(f"{runtime:12s} {count} of {size:,} logits differ")

# %%
figure, (left, middle) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
left.barh(list(accuracy), list(accuracy.values()), color=["0.6", *["C0"] * 3, "C1"])
left.set(xlabel="right, %; weights of 4 bits, activations of 8", xlim=(min(accuracy.values()) - 5, 100))
left.invert_yaxis()
layers = [path.removesuffix("/kernel").removesuffix("/conv") for path in errors]
for i, (name, marker) in enumerate((("nearest", "o"), ("bias_correct", "v"), ("adaround", "s"), ("both", "D"))):
    middle.plot(layers, [of[i] for of in errors.values()], marker, label=name)
middle.set(ylabel="relative squared error of a layer", yscale="log")
middle.tick_params("x", rotation=90)
middle.legend(fontsize="small")
figure.savefig(output / "15_convolutional_network.png", dpi=150)
print("saved", output / "15_convolutional_network.png")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
# What the text claims, with margins for other machines.
assert q.plan(folded, x_test, qparams=qparams).in_float == []
assert float(jnp.abs(model(folded, x_test) - in_float).max()) < 1e-3
assert accuracy["float"] > 95
assert accuracy["bias_correct"] > accuracy["nearest"]
assert accuracy["trained"] > accuracy["nearest"]
assert accuracy["trained"] > accuracy["float"] - 3
assert all(of[1] <= of[0] * 1.01 for of in errors.values())
assert all(count == 0 for count, _ in found.values())
print("all claims hold")
