# %% [markdown]
# # Ship it: one model, four roads
#
# A model is trained here and served elsewhere. One CNN, trained to 8 bits on scikit-learn's digits, leaves JAX on four
# roads. What changes on the way is counted: bytes, values that differ, and the time of a batch, as a ratio to the float
# model in the same runtime.
#
#     trained ─▶ q.freeze ─┬─▶ jax.export ─▶ StableHLO ─▶ XLA
#                          ├─▶ jaxquant.onnx.export ─▶ ONNX Runtime
#                          ├─▶ jaxquant.litert.export ─▶ LiteRT
#                          └─▶ words of int32 ─▶ safetensors ─▶ what reads the layout
#
# It needs `pip install 'jaxquant[notebooks,onnx,litert,safetensors]'`.

# %%
# SPDX-License-Identifier: Apache-2.0
import statistics
import time
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import optax
import safetensors.numpy
from ai_edge_litert.interpreter import Interpreter
from jax import lax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jaxquant
from jaxquant import (
    Rule,
    activation_spec,
    dequantize,
    from_log2,
    load,
    quant_point,
    quantize_fn,
    save,
    to_log2,
    weight_spec,
)  # fmt: skip

output = Path("output")
output.mkdir(exist_ok=True)
EPOCHS, MORE_EPOCHS, BATCH = 8, 4, 60

# %% [markdown]
# ## The model
#
# XLA and ONNX Runtime want ranges at the inputs of products, and compute the rest in float. LiteRT computes everything
# in integers, so that it wants a range of the result, too: `quant_point` names the logits. All other values are inputs
# of products here; sums and averages would want points of their own (docs/export.md).

# %%
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
splits = train_test_split(images, labels, train_size=1200, random_state=0, stratify=labels)
x_train, x_test, y_train, y_test = map(jnp.asarray, splits)

SHAPES = {"conv1": (3, 3, 1, 8), "conv2": (3, 3, 8, 16), "conv3": (3, 3, 16, 32), "dense": (512, 10)}


def conv(layer, x, stride=1):
    y = lax.conv_general_dilated(x, layer["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + layer["b"])


def model(params, x):
    x = conv(params["conv3"], conv(params["conv2"], conv(params["conv1"], x), stride=2))
    return quant_point(x.reshape(x.shape[0], -1) @ params["dense"]["w"] + params["dense"]["b"], "logits")


def init(key):
    he = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, len(SHAPES))
    return {
        name: {"w": he(k, shape), "b": jnp.zeros(shape[-1])}
        for k, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


A8 = activation_spec(8)
q = quantize_fn(model, [Rule("logits", activation=A8, kind="value"), Rule("*/w", weight_spec(8), A8)])
print(q.plan(init(jax.random.key(0)), x_test))

# %% [markdown]
# ## Train, freeze


# %%
def train(f, trained, epochs, learning_rate, progress):
    optimizer = optax.adam(learning_rate)
    loss = lambda trained, x, y: optax.softmax_cross_entropy_with_integer_labels(f(trained, x), y).mean()

    @jax.jit
    def epoch(carry, key):
        def step(carry, batch):
            trained, state = carry
            updates, state = optimizer.update(jax.grad(loss)(trained, x_train[batch], y_train[batch]), state)
            return (optax.apply_updates(trained, updates), state), None

        return lax.scan(step, carry, jax.random.permutation(key, len(x_train)).reshape(-1, BATCH))[0]

    carry = trained, optimizer.init(trained)
    for key in jax.random.split(jax.random.key(1), epochs):
        carry = jax.block_until_ready(epoch(carry, key))
        progress.update()
    return carry[0]


with tqdm(total=EPOCHS + MORE_EPOCHS, unit="epoch") as progress:
    float_params = train(model, init(jax.random.key(0)), EPOCHS, 2e-3, progress)
    qparams = q.init_qparams(float_params, x_train, ranges=q.observe(float_params, x_train))
    of_q = lambda trained, x: q(trained[0], x, qparams=from_log2(trained[1]))
    params, scales = train(of_q, (float_params, to_log2(qparams)), MORE_EPOCHS, 1e-3, progress)
    qparams = from_log2(scales)
frozen = q.freeze(params, x_test, qparams=qparams)

x = np.asarray(x_test[:512])
want = np.asarray(jax.jit(q)(frozen, x, qparams=qparams))
step = float(qparams["logits"].scale)
accuracy = lambda y: 100 * float((y.argmax(-1) == y_test[: len(y)]).mean())
float_logits = np.asarray(model(float_params, x))
print(f"right: float {accuracy(float_logits):.1f} %, 8 bits {accuracy(want):.1f} %")

# %% [markdown]
# ## Four roads
#
# Each gives the bytes of its file, and a function of images. The float model takes the same road.

# %%
float_model = lambda x: model(float_params, x)
in_float = quantize_fn(lambda _, x: float_model(x), [])
served = lambda params, qparams, x: q(params, x, qparams=qparams)


def stablehlo():
    def run(f, name, *arguments):
        program = jax.export.export(jax.jit(f))(*arguments, x)
        (output / f"{name}.program").write_bytes(program.serialize())
        save(output / f"{name}.npz", arguments)
        program = jax.export.deserialize(bytearray((output / f"{name}.program").read_bytes()))
        call, loaded = jax.jit(program.call), load(output / f"{name}.npz")
        files = [(output / f"{name}.{end}").stat().st_size for end in ("program", "npz")]
        return sum(files), lambda x: np.asarray(call(*loaded, x))

    return run(served, "digits", frozen, qparams), run(model, "float", float_params)


def onnx(graph):
    def run(model):
        options = onnxruntime.SessionOptions()
        # Without VNNI ONNX Runtime adds two products in 16 bits, which saturate; this makes it exact.
        options.add_session_config_entry("session.x64quantprecision", "1")
        written = model.SerializeToString()
        session = onnxruntime.InferenceSession(written, options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        return len(written), lambda x: session.run(None, {name: x})[0]

    quantized = jaxquant.onnx.export(q, frozen, x, qparams=qparams, graph=graph)
    return run(quantized), run(jaxquant.onnx.export(in_float, {}, x))


def litert():
    def run(written):
        interpreter = Interpreter(model_content=written, num_threads=1)
        interpreter.allocate_tensors()
        of, to = interpreter.get_input_details()[0]["index"], interpreter.get_output_details()[0]["index"]

        def call(x):
            interpreter.set_tensor(of, x)
            interpreter.invoke()
            return interpreter.get_tensor(to)

        return len(written), call

    quantized = jaxquant.litert.export(q, frozen, x, qparams=qparams)
    return run(quantized), run(jaxquant.litert.export(in_float, {}, x))


# %% [markdown]
# A layout is weights alone: here compressed-tensors' "pack-quantized", four 8-bit integers in a word of int32, rows of
# outputs. What reads it computes as it likes, so that the weights are what is compared. More of them are in
# docs/checkpoints.md.


# %%
def layout():
    tensors, floats = {}, {}
    for name, layer in frozen.items():
        w = layer["w"]
        rows = np.asarray(w.values).reshape(-1, w.shape[-1]).T  # (out, in)
        unsigned = (rows.astype(np.int16) + 128).astype(np.uint8)
        padded = np.pad(unsigned, [(0, 0), (0, -unsigned.shape[1] % 4)])
        words = np.ascontiguousarray(padded).view(np.int32)
        of = {
            "weight_packed": words,
            "weight_scale": np.asarray(w.scale).reshape(-1, 1),
            "bias": np.asarray(layer["b"]),
        }
        tensors |= {f"{name}.{part}": np.ascontiguousarray(v) for part, v in of.items()}
        floats |= {f"{name}.{part}": np.asarray(v) for part, v in float_params[name].items()}
    safetensors.numpy.save_file(tensors, output / "digits.safetensors")
    safetensors.numpy.save_file(floats, output / "float.safetensors")

    read, differing, count = safetensors.numpy.load_file(output / "digits.safetensors"), 0, 0
    for name, layer in frozen.items():
        integers = read[f"{name}.weight_packed"].view(np.uint8).astype(np.float32) - 128
        weights = np.asarray(dequantize(layer["w"])).reshape(-1, layer["w"].shape[-1]).T
        differing += int((integers[:, : weights.shape[1]] * read[f"{name}.weight_scale"] != weights).sum())
        count += weights.size
    sizes = [(output / f"{name}.safetensors").stat().st_size for name in ("digits", "float")]
    return sizes, differing, count


# %% [markdown]
# ## What came out
#
# Times are medians of interleaved runs of one batch of 512 images on this machine, as ratios to the float model in the
# same runtime: they compare formats, not runtimes.


# %%
def ratio(quantized, in_float, repeats=15):
    times = {quantized: [], in_float: []}
    for call in times:
        call(x)
    for _ in range(repeats):
        for call, of in times.items():
            start = time.perf_counter()
            call(x)
            of.append(time.perf_counter() - start)
    return statistics.median(times[quantized]) / statistics.median(times[in_float])


roads = {
    "StableHLO": stablehlo(),
    "ONNX, integers": onnx("integers"),
    "ONNX, Q/DQ": onnx("qdq"),
    "LiteRT": litert(),
}
rows = {}
for name, ((size, call), (float_size, float_call)) in roads.items():
    y = call(x)
    off = np.abs(y - want) / step
    rows[name] = {
        "bytes": size, "float": float_size, "differing": int((off > 0.5).sum()), "of": y.size,
        "steps": float(off.max().round()), "time": ratio(call, float_call), "right": accuracy(y),
    }  # fmt: skip
(size, float_size), differing, count = layout()

print("road               bytes   float's   values off   by steps   right, %   time of float's")
for name, row in rows.items():
    values = f"{row['differing']} of {row['of']}"
    print(
        f"{name:14s} {row['bytes']:9,} {row['float']:9,} {values:>12s} {row['steps']:10.0f} {row['right']:10.1f} "
        f"{row['time']:17.2f}"
    )
print(f"{'a layout':14s} {size:9,} {float_size:9,} {f'{differing} of {count}':>12s}   (weights)")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained", sharey=True)
left.barh([*rows, "a layout"], [*(row["bytes"] / row["float"] for row in rows.values()), size / float_size])
left.set(xlabel="bytes of the float model's", xlim=(0, 1.05))
right.barh(list(rows), [row["time"] for row in rows.values()], color="C1")
right.axvline(1, color="0.5", linestyle=":")
right.set(xlabel="time of the float model's, same runtime")
left.invert_yaxis()
figure.savefig(output / "09_roads.png", dpi=150)
print("saved", output / "09_roads.png")

# %% [markdown]
# - **StableHLO** is the program itself: every bit is the same.
# - **ONNX, integers** is MatMulInteger and ConvInteger, whose sums are exact; what follows is computed in float as
#   here. Every bit is the same, too.
# - **ONNX, Q/DQ** has the same integers, and leaves the kernels to the runtime. Where it fuses nothing, as for
#   convolutions with a bias in float, it adds dequantized values in float, and a value may end one step off.
# - **LiteRT** stays in int8 from the first layer to the last. It multiplies accumulators by a fixed-point number to get
#   to the next grid, and rounds halves away from zero: one step, now and then two, and hardly ever another digit.
# - **A layout** carries weights, exactly.
#
# The file of StableHLO is mostly program and names; of a larger model a quarter is left. Time is a matter of the
# processor and the kernels. Without instructions for int8 products (VNNI, AMX, dot products of Arm), and for so small a
# model, float is often faster; ONNX Runtime's ConvInteger is its slow path, and its Q/DQ convolutions with a bias in
# float are float convolutions.

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
# What the text claims, with margins for other machines.
assert rows["StableHLO"]["differing"] == rows["ONNX, integers"]["differing"] == differing == 0
assert (roads["StableHLO"][0][1](x) == want).all()
assert (roads["ONNX, integers"][0][1](x) == want).all()
assert rows["ONNX, Q/DQ"]["steps"] <= 1
assert rows["ONNX, Q/DQ"]["differing"] < 0.01 * want.size
assert rows["LiteRT"]["steps"] <= 2
assert rows["LiteRT"]["differing"] < 0.5 * want.size
assert all(row["bytes"] < 0.5 * row["float"] for name, row in rows.items() if name != "StableHLO")
assert size < 0.3 * float_size
assert accuracy(float_logits) > 95
assert all(abs(row["right"] - accuracy(float_logits)) < 2 for row in rows.values())
print("all claims hold")
