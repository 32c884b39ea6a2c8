# SPDX-License-Identifier: Apache-2.0
"""What a quantized function costs to trace and to compile, to the float function: counts, and CPU seconds."""

import os
import re
import time

os.environ["KERAS_BACKEND"] = "jax"

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np

from jaxquant import Rule, activation_spec, quantize_fn, weight_spec

from . import function_transform
from .runner import Part

AFFINE = Rule("**", weight_spec(8), activation_spec(8), optional=True)
RULES = {"affine": [AFFINE], "weight-only": [("**", weight_spec(8))]}
KERNELS = [Rule("**/kernel", weight_spec(8), activation_spec(8, symmetric=True))]


# One dot


def equations(jaxpr):
    """The equations of a program and of the programs in it; calls count what they call alone."""
    total = 0
    for eqn in jaxpr.eqns:
        values = [v for value in eqn.params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
        inner = [getattr(v, "jaxpr", v) for v in values]
        inner = [v for v in inner if hasattr(v, "eqns")]
        total += sum(map(equations, inner)) + (eqn.primitive.name not in ("jit", "pjit"))
    return total


def counts(f, *args):
    """Equations, and the instructions and fusions of the compiled program."""
    text = jax.jit(f).lower(*args).compile().as_text() or ""
    instructions = re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", text, re.M)
    program = jax.make_jaxpr(f)(*args)
    return equations(getattr(program, "jaxpr", program)), len(instructions), len(re.findall(r" fusion\(", text))


def dot_rows(rounds, *names):
    params, x = {"w": jnp.ones((64, 64))}, jnp.ones((32, 64))
    f = lambda params, x: x @ params["w"]
    for name in names:
        yield f"{name} dot", counts(quantize_fn(f, RULES[name]) if name in RULES else f, params, x)


# Models: (function of params and inputs, params, inputs, contenders beside the float function)


def by_hand(params, x):
    for name in sorted(params):
        x = jnp.tanh(function_transform.linear_by_hand(x, params[name]))
    return x


def layers():
    def f(params, x):
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return x

    params = {f"layer_{i:02}": jnp.ones((32, 32)) for i in range(24)}
    quantized = {name: quantize_fn(f, rules) for name, rules in RULES.items()}
    return f, params, jnp.ones((32, 32)), quantized | {"by hand, symmetric, no care for NaN": by_hand}


class Cnn(nn.Module):
    """Kernels of six shapes."""

    @nn.compact
    def __call__(self, x):
        for features in (16, 32, 64, 128):
            x = nn.relu(nn.Conv(features, (3, 3), strides=2)(x))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def of_linen(model, *shape, rules=KERNELS):
    x = jnp.ones(shape)
    params = model.init(jax.random.key(0), x)
    contenders = {"": quantize_fn(model.apply, rules), "qwix": function_transform.of_qwix(model)}
    return model.apply, params, x, contenders


def mobilenet():
    model = keras.applications.MobileNetV2(weights=None, input_shape=(96, 96, 3), classes=10)
    others = [v.value for v in model.non_trainable_variables]
    params = {v.path: v.value for v in model.trainable_variables}

    def f(params, x):
        return model.stateless_call([params[v.path] for v in model.trainable_variables], others, x)[0]

    inline = [Rule("**", weight_spec(8), activation_spec(8, symmetric=True), custom="inline")]
    return f, params, jnp.ones((2, 96, 96, 3)), {"": quantize_fn(f, inline)}


TRANSFORMER = [Rule("params/block_*/**/kernel", weight_spec(8), activation_spec(8, symmetric=True))]
MODELS = {
    "24 layers of 32 x 32": layers,
    "MLP": lambda: of_linen(function_transform.Mlp(), 256, 784),
    "transformer of 4 layers": lambda: of_linen(function_transform.Transformer(), 8, 128, 256, rules=TRANSFORMER),
    "CNN of six shapes": lambda: of_linen(Cnn(), 8, 32, 32, 3),
    "MobileNetV2": mobilenet,
    "transformer of 192 sites": lambda: of_linen(
        function_transform.Transformer(layers=16, width=64), 2, 16, 64, rules=TRANSFORMER
    ),
}


def made(f, params, x):
    """CPU seconds to trace the gradient and to compile it, with nothing cached."""
    jax.clear_caches()
    start = time.process_time()
    traced = jax.jit(jax.grad(lambda params, x: (f(params, x).astype(jnp.float32) ** 2).mean())).trace(params, x)
    between = time.process_time()
    traced.lower().compile()
    return between - start, time.process_time() - between


FOUR = "MLP", "transformer of 4 layers", "CNN of six shapes", "MobileNetV2"


def model_rows(rounds, *names):
    """To the float function; and the median of the four, if all of them are measured."""
    found = {}
    for name in names:
        f, params, x, contenders = MODELS[name]()
        times = {}
        for _ in range(rounds):
            for contender, g in {"float": f, **contenders}.items():
                times.setdefault(contender, []).append(made(g, params, x))
        median = {contender: np.median(taken, 0) for contender, taken in times.items()}
        for contender in contenders:
            label = f"{name}{', ' if contender else ''}{contender}"
            found[label] = tuple(map(float, median[contender] / median["float"]))
            yield label, found[label]
    if set(FOUR) <= set(names):
        trace = float(np.median([found[name][0] for name in FOUR]))
        yield (
            "median trace of the MLP, the transformer, the CNN and MobileNetV2",
            trace,
        )


PACKAGES = "flax", "keras", "qwix"
PARTS = {
    "dots": Part(("one dot: equations, instructions, fusions", "now"), dot_rows, 1, ("float", *RULES)),
    "models": Part(("the gradient, to float: trace, compile", "now"), model_rows, 3, tuple(MODELS)),
}
