# SPDX-License-Identifier: Apache-2.0
"""Times of weight-only graphs in ONNX Runtime, to the float graph: `python -m benchmarks.onnx_runtime [THREADS]`.

Six products of 2048 x 2048, so that no cache holds the weights. Interleaved in one process, ratios of medians.
"""

import sys
import time

import jax
import jax.export
import numpy as np
import onnxruntime

import jaxquant.onnx
from jaxquant import quantize_fn, weight_spec

K, LAYERS, ROUNDS = 2048, 6, 25
GRAPHS = {
    "4 bits in groups of 32": (weight_spec(4, block_size=32), {}),
    "4 bits": (weight_spec(4), {}),
    "8 bits": (weight_spec(8), {}),
    "4 bits in groups of 32, level 4": (weight_spec(4, block_size=32), {"accuracy_level": 4}),
    "8 bits, level 4": (weight_spec(8), {"accuracy_level": 4}),
}


def products(params, x):
    return [x @ w for w in params]


jitted = jax.jit(products)


def quantized(params, rows, spec, how):
    q = quantize_fn(products, [("*", spec)])
    return jaxquant.onnx.export(q, q.freeze(params, rows), rows, **how)


def run_of(model, threads):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {session.get_inputs()[0].name: x})


def milliseconds(runs, x):
    """The times of each run, one of each in every round, so that what slows the machine slows all of them."""
    times = {name: [] for name in runs}
    for _ in range(ROUNDS + 3):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(x))
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: np.median(v[3:]) for name, v in times.items()}


def main(threads=0):
    rng = np.random.default_rng(0)
    params = [np.float32(rng.normal(size=(K, K))) for _ in range(LAYERS)]
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"rows, {K}"), np.float32)
    models = {"float": jaxquant.onnx.export(quantize_fn(products, []), params, rows)}
    models |= {name: quantized(params, rows, *of) for name, of in GRAPHS.items()}
    on_device = jax.device_put(params)
    runs = {name: run_of(model, threads) for name, model in models.items()}
    runs["float, by jax"] = lambda x: jitted(on_device, x)
    found = {n: milliseconds(runs, np.float32(rng.normal(size=(n, K)))) for n in (1, 8, 32)}
    print(f"ONNX Runtime {onnxruntime.__version__}, threads: {threads or 'all'}. Rows: {', '.join(map(str, found))}.")
    for name in runs:
        ratios = [f"{times[name] / times['float']:.2f}" for times in found.values()]
        size = f"{models[name].ByteSize() / models['float'].ByteSize():.2f} of the bytes" if name in models else ""
        print(" | ".join([name, *ratios, size]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
