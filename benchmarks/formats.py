# SPDX-License-Identifier: Apache-2.0
"""What number formats cost in time, and what two rules for the scale of integers cost in accuracy: three seeds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant import (
    PerBlock,
    PerChannel,
    QParams,
    QuantSpec,
    Rule,
    activation_spec,
    dot_general,
    fake_quant,
    float8_spec,
    mxfp4_spec,
    mxfp8_spec,
    nvfp4_spec,
    quantize,
    quantize_fn,
    weight_spec,
)

from .function_transform import MODELS as FLOAT_MODELS
from .function_transform import steps
from .mixed_precision import MODELS, cross_entropy, train
from .runner import Part, compared, donated, kept

INT4 = QuantSpec(bits=4, granularity=PerBlock(-1, 32))
ROUNDED = {  # a spec, what its fake_quant is compared with
    "float8_spec()": (float8_spec(), QuantSpec()),
    "mxfp8_spec(-1)": (mxfp8_spec(-1), INT4),
    "mxfp4_spec(-1)": (mxfp4_spec(-1), INT4),
    "nvfp4_spec(-1)": (nvfp4_spec(-1), INT4),
}


def rounding_rows(rounds):
    """Of 2 ** 21 values; the first has a given scale, the others have scales of the values."""
    x, one = jax.random.normal(jax.random.key(0), (2048, 1024)), QParams(jnp.float32(1), jnp.float32(0))
    plain = {"rounded": kept(lambda x: fake_quant(x, float8_spec(), one), x), "x + 1": kept(lambda x: x + 1, x)}
    got = compared(plain, rounds)("rounded", "x + 1")
    yield "float8_spec(), scale 1, to x + 1", got
    specs = {name: spec for name, (spec, *_) in ROUNDED.items()} | {"int8": QuantSpec(), "int4": INT4}
    to = compared({name: kept(functools.partial(fake_quant, spec=s), x) for name, s in specs.items()}, rounds)
    for name, (_, base) in ROUNDED.items():
        got = to(name, "int4" if base == INT4 else "int8")
        yield f"{name} to {'int4 in blocks of 32' if base == INT4 else 'int8'}", got


def memory_rows(rounds):
    """Of 2 ** 24 values that do not fit the caches, in place, as x + 1; scales of the values where it says no 1."""
    x, one = jax.random.normal(jax.random.key(0), (4096, 4096)), QParams(jnp.float32(1), jnp.float32(0))
    runs = {"x + 1": lambda x: x + 1, "float8_spec(), scale 1": lambda x: fake_quant(x, float8_spec(), one)}
    specs = {"float8_spec()": float8_spec(), "int8": QuantSpec(), "int4 in blocks of 32": INT4}
    specs |= {
        f"{make.__name__}({axis})": make(axis) for make in (mxfp8_spec, mxfp4_spec, nvfp4_spec) for axis in (-1, 0)
    }
    runs |= {name: functools.partial(fake_quant, spec=spec) for name, spec in specs.items()}
    to = compared({name: donated(f, x) for name, f in runs.items()}, rounds)
    for name in runs:
        if name != "x + 1":
            yield f"{name}, 4096 x 4096, to x + 1", to(name, "x + 1")


def product_rows(rounds):
    """(256, 1024) x (1024, 1024), both quantized already."""
    x, w = jax.random.normal(jax.random.key(0), (256, 1024)), jax.random.normal(jax.random.key(1), (1024, 1024))
    pairs = {
        "int8": (QuantSpec(), weight_spec(8, -1)),
        "int8 in blocks of 32": (QuantSpec(granularity=PerBlock(1, 32)), QuantSpec(granularity=PerBlock(0, 32))),
        "float8_spec()": (float8_spec(), float8_spec(granularity=PerChannel(-1))),
        **{f"{make.__name__}()": (make(1), make(0)) for make in (nvfp4_spec, mxfp4_spec, mxfp8_spec)},
    }
    runs = {"float32": kept(jnp.matmul, x, w)}
    for name, (a, b) in pairs.items():
        product = lambda a, b: dot_general(a, b, (((1,), (0,)), ((), ())))
        runs[name] = kept(product, quantize(x, a), quantize(w, b))
    to = compared(runs, rounds)
    for name in pairs:
        base = "int8 in blocks of 32" if name == "mxfp4_spec()" else "float32"
        yield f"{name} to {base}", to(name, base)


def step_rows(rounds):
    """A training step of the MLP of `function_transform`, weights and inputs in the format."""
    apply = FLOAT_MODELS["MLP"][0].apply
    of = lambda weight, activation, **kw: quantize_fn(apply, [Rule("**/kernel", weight, activation)], **kw)
    contenders = {
        "float": apply,
        "int8": of(weight_spec(8), activation_spec(8)),
        "float8_spec()": of(float8_spec(granularity=PerChannel(None)), float8_spec()),
        "float8_spec(), native": of(float8_spec(granularity=PerChannel(None)), float8_spec(), execution="native"),
        "nvfp4_spec()": of(nvfp4_spec(), nvfp4_spec()),
        "nvfp4_spec(), native": of(nvfp4_spec(), nvfp4_spec(), execution="native"),
    }
    to = compared(steps("MLP", contenders), rounds)
    for name in contenders:
        if name != "float":
            yield f"training step of the MLP, {name} to float", to(name, "float")


def rule_rows(seeds, *names):
    """How much the test loss is above the loss of the float model that was trained for as many steps."""
    for name in names:
        found = {}
        for seed in range(seeds):
            f, params, batches, _, (x, y) = MODELS[name](seed)
            more = jax.tree.map(lambda v: v[:200], batches)
            test = lambda g, params, x=x, y=y: float(cross_entropy(jax.jit(g)(params, x), y))
            floats = test(f, params), test(f, train(f, params, more, 1e-3))
            for bits in (2, 3, 4):
                for rule in ("ceil", "half_step"):
                    q = quantize_fn(f, [Rule("**", weight_spec(bits, scale_rule=rule), activation_spec(8))])
                    losses = test(q, params), test(q, train(q, params, more, 1e-3))
                    found.setdefault(bits, {}).setdefault(rule, []).append(np.subtract(losses, floats))
        for bits, by_rule in found.items():
            each = [column for rule in by_rule.values() for column in zip(*rule, strict=True)]
            yield name, bits, *(", ".join(f"{v:+.3f}" for v in each[i]) for i in (0, 2, 1, 3))


PACKAGES = "flax", "optax", "scikit-learn"
TIMES = "what", "time"
RULES = "model", "bits of weights", "PTQ: / qmax", "PTQ: / (qmax + 1/2)", "QAT: / qmax", "QAT: / (qmax + 1/2)"
PARTS = {
    "rounding": Part(TIMES, rounding_rows, 60),
    "memory": Part(TIMES, memory_rows, 15),
    "products": Part(TIMES, product_rows, 20),
    "steps": Part(TIMES, step_rows, 15),
    "rules": Part(RULES, rule_rows, 3, tuple(MODELS)),
}
