# SPDX-License-Identifier: Apache-2.0
"""What solving and freezing hold in memory beside their inputs: a model of 377 million parameters in one scan.

Each row is a process of its own, whose peak the kernel counts from when the inputs are made. The second moments are
made up: what is solved for takes as much memory as what was observed.
"""

import ctypes
import gc
import json
import math
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from jax import lax

from jaxquant import quantize_fn, solve, weight_spec
from jaxquant.typing import Gram

from .runner import Part

LAYERS, WIDTH, HIDDEN, HEADS = 36, 1024, 2048, 8
OWN = pathlib.Path("/proc/self")
SHAPES = {
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "gate_up": (WIDTH, 2 * HIDDEN),
    "down": (HIDDEN, WIDTH),
}


def model(params, x):
    def layer(x, p):
        q, k, v = (y.reshape(*y.shape[:-1], HEADS, -1) for y in jnp.split(x @ p["qkv"], 3, -1))
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ p["out"]
        gate, up = jnp.split(x @ p["gate_up"], 2, -1)
        return x + (jax.nn.silu(gate) * up) @ p["down"], None

    return lax.scan(layer, x, params)[0]


Q = quantize_fn(model, [("*", weight_spec(4))])
X = jax.ShapeDtypeStruct((1, 128, WIDTH), jnp.float32)


def normal(seed, *shape):
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape) / math.sqrt(shape[-2]))()


def moments(layers, k):
    """Second moments of as many rows as inputs, that depend on each other, the same in each layer."""
    rows = normal(k, 2 * k, k) @ (jnp.eye(k) + normal(k + 1, k, k))
    each = rows.T @ rows, jnp.float32(2 * k), rows.sum(0)
    return Gram(*(jnp.tile(v, (layers,) + (1,) * v.ndim) for v in each))


CALLS = {
    "q.freeze": lambda params, qparams, grams: Q.freeze(params, X, qparams=qparams),
    "solve.gptq, freeze=True": lambda params, qparams, grams: solve.gptq(
        params, Q, grams, X, qparams=qparams, freeze=True
    ),
}


def resident(which):
    """Megabytes of this process that are in memory now, VmRSS, or were at most, VmHWM."""
    lines = (OWN / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) * 1024 / 1e6


def inputs_of(layers):
    params = {name: normal(i, layers, *shape) for i, (name, shape) in enumerate(SHAPES.items())}
    grams = {name: moments(layers, shape[0]) for name, shape in SHAPES.items()}
    return jax.block_until_ready((params, Q.init_qparams(params, X, ranges={}), grams))


def trimmed():
    """Megabytes in memory, without what the allocator keeps of what is freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident("VmRSS")


def measure(name, layers):
    """The megabytes of a call's inputs, and those beside them at its end and at most; and its seconds.

    Of the memory that is resident: 4-bit integers fill half of their buffers.
    """
    CALLS[name](*inputs_of(1))  # compiles what a layer takes: the compiler needs memory, too
    inputs = inputs_of(layers)
    before, start = trimmed(), time.perf_counter()
    (OWN / "clear_refs").write_text("5")  # the peak is counted from here on
    result = jax.block_until_ready(CALLS[name](*inputs))
    took, peak = time.perf_counter() - start, resident("VmHWM")
    held = trimmed()
    del result
    return sum(v.nbytes for v in jax.tree.leaves(inputs)) / 1e6, held - before, peak - before, took


def rows(layers, *names):
    largest = max(map(math.prod, SHAPES.values())) * layers * 4 / 1e6
    for name in names:
        command = [sys.executable, "-m", "benchmarks.memory", name, str(layers)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        inputs, held, peak, took = json.loads(done.stdout)
        yield name, *(f"{v:,.0f}" for v in (inputs, held, peak)), (peak - held) / largest, f"{took:.0f}"


def missing():
    return "" if (OWN / "clear_refs").exists() else "reads /proc, which this system has not"


COLUMNS = ("megabytes", "inputs", "result", "at most", "more than the result, to the largest weight", "seconds")
PACKAGES = ()
PARTS = {"calls": Part(COLUMNS, rows, LAYERS, tuple(CALLS))}

if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
