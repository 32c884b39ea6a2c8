# SPDX-License-Identifier: Apache-2.0
"""Did a change of the code change what is compiled? The optimized programs of the public functions, before and after.

`python -m benchmarks.programs record PATH` in the old tree, then `compare PATH` in the new one: it prints how each
program differs, up to the names in it, and the seconds of tracing of both; it exits with 1 if any does. The programs
are XLA's for the device at hand, so record and compare on one machine with one jaxlib.
"""

import argparse
import difflib
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxquant import (
    PerBlock,
    PerToken,
    QParams,
    QuantSpec,
    Rule,
    activation_spec,
    conv_general_dilated,
    dequantize,
    dot_general,
    fake_quant,
    fake_quant_params,
    fit_qparams,
    float8_spec,
    histogram,
    mxfp4_spec,
    mxint8_spec,
    nvfp4_spec,
    observe,
    quantize,
    quantize_fn,
    tf,
    weight_spec,
)

SPECS = {
    "weight": weight_spec(8, channel_axis=-1),
    "affine": activation_spec(8),
    "symmetric": activation_spec(8, symmetric=True),
    "unsigned 4": QuantSpec(bits=4, signed=False, symmetric=False),
    "blocks": QuantSpec(bits=4, granularity=PerBlock(-1, 16)),
    "float8": float8_spec(),
    "mxfp4": mxfp4_spec(-1),
    "mxint8": mxint8_spec(-1),
    "nvfp4": nvfp4_spec(-1),
}
INPUTS = {
    "affine": activation_spec(8),
    "symmetric": activation_spec(8, symmetric=True),
    "per token": activation_spec(8, granularity=PerToken()),
}
RULES = {f"{name} inputs": [Rule("**", weight_spec(8), spec, optional=True)] for name, spec in INPUTS.items()}
RULES |= {
    f"gradient in {name}": [Rule("**", weight_spec(8), INPUTS["symmetric"], gradient=gradient, optional=True)]
    for name, gradient in {"bfloat16": "bfloat16", "int8": QuantSpec()}.items()
}
RULES["weight-only"] = [Rule("**", weight_spec(4))]
NHWC = ("NHWC", "HWIO", "NHWC")
MATMUL = (((1,), (0,)), ((), ()))
Program = tuple[str, Callable[..., Any], tuple]  # a name, a function, and its arguments


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def squared(f: Callable) -> Callable:
    """A loss with a gradient that depends on the value."""
    return lambda *args: (f(*args) ** 2).sum()


# ---- Ops


def ops_of_a_spec(name: str, spec: QuantSpec) -> Iterator[Program]:
    x, f = normal(8, 64), lambda x, qparams=None: fake_quant(x, spec, qparams)
    yield f"fake_quant, {name}", f, (x,)
    yield f"fake_quant of bfloat16, {name}", f, (x.astype(jnp.bfloat16),)
    yield f"gradient of fake_quant, {name}", jax.grad(squared(f)), (x,)
    qparams = QParams(*fit_qparams(x, spec))
    yield f"gradient of fake_quant with qparams, {name}", jax.grad(squared(f), (0, 1)), (x, qparams)
    yield f"quantize, {name}", lambda x: quantize(x, spec), (x,)
    yield f"dequantize, {name}", dequantize, (quantize(x, spec),)


def ranges() -> Iterator[Program]:
    x = normal(8, 64)
    for method in ("minmax", "percentile", "mse", "lsq"):
        for name in ("affine", "weight"):
            yield f"fit {method}, {name}", lambda x, n=name, m=method: fit_qparams(x, SPECS[n], m), (x,)
    yield "observe", lambda x: observe(x, SPECS["affine"]), (x,)
    yield "observe channels", lambda x: observe(x, SPECS["weight"]), (x,)
    yield "histogram", lambda x: histogram(x, SPECS["affine"]), (x,)


def contractions() -> Iterator[Program]:
    x, w, image, kernel = normal(8, 64), normal(64, 32), normal(2, 8, 8, 4), normal(3, 3, 4, 8)
    weight, blocks = quantize(w, SPECS["weight"]), quantize(w, QuantSpec(bits=4, granularity=PerBlock(0, 16)))
    for name in ("affine", "symmetric"):
        q = quantize(x, SPECS[name])
        yield f"dot in int8, {name}", lambda a, b: dot_general(a, b, MATMUL), (q, weight)
        yield f"dot of blocks, {name}", lambda a, b: dot_general(a, b, MATMUL), (q, blocks)
        convolution = lambda a, b: conv_general_dilated(a, b, (2, 2), "SAME", dimension_numbers=NHWC)
        yield f"convolution, {name}", convolution, (quantize(image, SPECS[name]), quantize(kernel, SPECS["weight"]))
    yield "dot of 12 bits", lambda a, b: dot_general(a, b, MATMUL), (quantize(x, activation_spec(12)), weight)
    floats = quantize(x, float8_spec()), quantize(w, float8_spec())
    yield "dot of float8", lambda a, b: dot_general(a, b, MATMUL), floats


# ---- Functions: (function of params and an input, params, input)


def perceptron(params, x):
    return jnp.tanh(x @ params["a"] + params["b"]) @ params["c"]


def convolutional(params, x):
    x = lax.conv_general_dilated(x, params["kernel"], (2, 2), "SAME", dimension_numbers=NHWC)
    return jnp.maximum(x, 0).reshape(len(x), -1) @ params["dense"]


def attention(params, x):
    q, k, v = (jnp.einsum("bte,ehd->bhtd", x, params[name]) for name in "qkv")
    weights = jax.nn.softmax(q @ k.swapaxes(2, 3))
    return jnp.einsum("bhtd,hde->bte", weights @ v, params["out"])


def stacked(params, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]


def experts(params, x):
    return lax.ragged_dot(x, params["w"], jnp.array([3, 0, 5], jnp.int32))


def models() -> dict[str, tuple[Callable, Any, jax.Array]]:
    heads = {name: normal(16, 2, 8) for name in "qkv"}
    return {
        "perceptron": (perceptron, {"a": normal(64, 32), "b": normal(32), "c": normal(32, 8)}, normal(8, 64)),
        "convolutional": (
            convolutional,
            {"kernel": normal(3, 3, 4, 8), "dense": normal(128, 8)},
            normal(2, 8, 8, 4),
        ),
        "attention": (attention, heads | {"out": normal(2, 8, 16)}, normal(2, 6, 16)),
        "stacked": (stacked, {"layers": normal(3, 64, 64)}, normal(8, 64)),
        "experts": (experts, {"w": normal(3, 64, 16)}, normal(8, 64)),
    }


def functions() -> Iterator[Program]:
    for model, (f, params, x) in models().items():
        for name, rules in RULES.items():
            if model != "perceptron" and name.startswith("gradient") and "int8" not in name:
                continue
            q = quantize_fn(f, rules)
            yield f"{model}, {name}", q, (params, x)
            yield f"gradient of {model}, {name}", jax.grad(squared(q)), (params, x)
            if name in ("affine inputs", "weight-only"):
                learned = squared(lambda params, qparams, x, q=q: q(params, x, qparams=qparams))
                qparams = q.init_qparams(params, x)
                yield f"gradient of {model} with qparams, {name}", jax.grad(learned, (0, 1)), (params, qparams, x)
                yield f"{model} frozen, {name}", q, (q.freeze(params, x), x)


def programs() -> Iterator[Program]:
    for name, spec in SPECS.items():
        yield from ops_of_a_spec(name, spec)
    yield from ranges()
    yield from contractions()
    yield from functions()
    params = {"a": normal(64, 32), "b": normal(64, 8)}
    yield "fake_quant_params", lambda params: fake_quant_params(params, [("*", SPECS["weight"])]), (params,)
    yield "tf.fake_quant_with_min_max_vars", lambda x: tf.fake_quant_with_min_max_vars(x, -1.0, 2.0), (normal(8, 64),)


# ---- The text of a program


def without_names(text: str) -> str:
    """The text of an optimized program without where it came from, and with names that are numbered as they come."""
    text = re.sub(r", metadata=\{[^}]*\}|stack_frame_id=\d+", "", text)
    text = re.sub(r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d.*\n)*\n*", "", text, flags=re.M)
    _, _, text = text.partition("\n")  # the first line has the name of the function
    names: dict[str, str] = {}
    number = lambda match: names.setdefault(match.group().lstrip("%"), f"n{len(names)}")
    return re.sub(r"%[\w.\-]+|(?<=calls=)[\w.\-]+|\b[\w.\-]+(?=: [fsupb]\w*\d*\[)", number, text)


def compiled() -> dict[str, tuple[str, float]]:
    """Each program as text, and the CPU seconds of its tracing."""
    found = {}
    for name, f, args in programs():
        start = time.process_time()
        traced = jax.jit(f).trace(*args)
        seconds = time.process_time() - start
        found[name] = without_names(traced.lower().compile().as_text() or ""), seconds
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """What differs of each program that does, in lines."""
    for name in before.keys() | after.keys():
        old, new = (of[name][0].splitlines() if name in of else [] for of in (before, after))
        if lines := list(difflib.unified_diff(old, new, "before", "after", lineterm="", n=0)):
            yield "\n".join([f"# {name}: {len(lines)} lines", *(line[:200] for line in lines[:20])])


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.programs", description=__doc__)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("path", type=pathlib.Path)
    options = parser.parse_args()
    after = compiled()
    if options.what == "record":
        options.path.write_text(json.dumps(after))
        print(f"{len(after)} programs")
        return
    before = json.loads(options.path.read_text())
    found = list(differences(before, after))
    print(*found, sep="\n")
    traced = [sum(seconds for _, seconds in of.values()) for of in (before, after)]
    print(f"{len(found)} of {len(after)} programs differ; traced in {traced[0]:.1f} s before, {traced[1]:.1f} s after")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
