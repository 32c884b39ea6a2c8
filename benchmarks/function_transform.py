# SPDX-License-Identifier: Apache-2.0
"""What a training step of a quantized function costs, to the user's float step: an MLP and a transformer, with Adam."""

import dataclasses
import functools
from typing import Any

import aqt.jax.v2.config as aqt
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix

from jaxquant import QuantSpec, Rule, activation_spec, quantize_fn, weight_spec

from .runner import Part, compared, kept, ratios

RNG = np.random.default_rng(0)
SYMMETRIC = Rule("**/kernel", weight_spec(8), activation_spec(8, symmetric=True))
AFFINE = Rule("**/kernel", weight_spec(8), activation_spec(8))


class Mlp(nn.Module):
    """784-1024-1024-1024-10."""

    dense: Any = nn.Dense

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = nn.relu(self.dense(1024, name=f"layer_{i}")(x))
        return self.dense(10, name="head")(x)


class Block(nn.Module):
    """Attention of four heads and a feed-forward layer, each behind a LayerNorm."""

    width: int
    dense: Any

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        q, k, v = (self.dense(self.width, name=name)(y) for name in ("q", "k", "v"))
        q, k, v = (h.reshape(*h.shape[:2], 4, -1) for h in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        x = x + self.dense(self.width, name="out")(y.reshape(x.shape))
        y = self.dense(4 * self.width, name="up")(nn.LayerNorm()(x))
        return x + self.dense(self.width, name="down")(nn.gelu(y))


class Transformer(nn.Module):
    """Activations of three axes: (batch, tokens, width)."""

    layers: int = 4
    width: int = 256
    dense: Any = nn.Dense

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            x = Block(self.width, self.dense, name=f"block_{i}")(x)
        return self.dense(10, name="head")(x.mean(1))


def inputs(*shape):
    x = jnp.asarray(RNG.normal(size=shape).astype(np.float32))
    return x, jnp.asarray(RNG.integers(0, 10, shape[0]))


MODELS = {"MLP": (Mlp(), inputs(256, 784)), "transformer": (Transformer(), inputs(8, 128, 256))}


def of_qwix(model, **gradient):
    rule = qwix.QtRule(weight_qtype="int8", act_qtype="int8", **gradient)
    return qwix.quantize_model(model, qwix.QtProvider([rule])).apply


def of_aqt(model):
    """All three products in int8, rounded to the nearest."""
    config = aqt.config_v4(fwd_bits=8, dlhs_bits=8, drhs_bits=8)
    aqt.set_stochastic_rounding(config, False, False, "jax.uniform")
    return model.clone(dense=functools.partial(nn.Dense, dot_general=config)).apply


def absmax(v, axis):
    scale = jnp.max(jnp.abs(v), axis, keepdims=True) / 127
    return jnp.round(v / scale).astype(jnp.int8), scale


@jax.custom_vjp
def linear_by_hand(x, w):
    return linear_by_hand_fwd(x, w)[0]


def linear_by_hand_fwd(x, w):
    (x, x_scale), (w, w_scale) = absmax(x, (0, 1)), absmax(w, 0)
    product = jax.lax.dot(x, w, preferred_element_type=jnp.int32)
    return product.astype(jnp.float32) * (x_scale * w_scale), (x, x_scale, w, w_scale)


def linear_by_hand_bwd(residuals, g):
    x, x_scale, w, w_scale = residuals
    return g @ (w.astype(jnp.float32) * w_scale).T, (x.astype(jnp.float32) * x_scale).T @ g


linear_by_hand.defvjp(linear_by_hand_fwd, linear_by_hand_bwd)


def mlp_by_hand(variables, x):
    """The least that an int8 forward with the gradient at the quantized values takes: no guard, no mask, no NaN."""
    layers = variables["params"]
    for name in ("layer_0", "layer_1", "layer_2"):
        x = nn.relu(linear_by_hand(x, layers[name]["kernel"]) + layers[name]["bias"])
    return linear_by_hand(x, layers["head"]["kernel"]) + layers["head"]["bias"]


def applies(name):
    """The function of each contender, of (variables, x)."""
    model, _ = MODELS[name]
    ours = lambda *rules, **kw: quantize_fn(model.apply, rules, **kw)
    return {
        "float": model.apply,
        "int8": ours(SYMMETRIC),
        "int8, affine activations": ours(AFFINE),
        "int8, gradient bfloat16": ours(dataclasses.replace(SYMMETRIC, gradient="bfloat16")),
        "int8, gradient int8": ours(dataclasses.replace(SYMMETRIC, gradient=QuantSpec())),
        "qwix": of_qwix(model),
        "qwix, gradient int8": of_qwix(model, bwd_qtype="int8"),
        "AQT, gradient int8": of_aqt(model),
    } | ({"by hand": mlp_by_hand} if name == "MLP" else {})


def step_of(apply):
    optimizer = optax.adam(1e-3)

    def loss(params, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), labels).mean()

    def step(params, state, x, labels):
        updates, state = optimizer.update(jax.grad(loss)(params, x, labels), state, params)
        return optax.apply_updates(params, updates), state

    return optimizer, step


def steps(name, contenders):
    """A run of each contender: a training step whose params and optimizer state are written in place."""
    model, (x, labels) = MODELS[name]
    params, runs = model.init(jax.random.key(0), x), {}
    for contender, apply in contenders.items():
        optimizer, step = step_of(apply)
        jitted, held = jax.jit(step, donate_argnums=(0, 1)), [jax.tree.map(jnp.copy, (params, optimizer.init(params)))]

        def run(jitted=jitted, held=held):
            held[0] = jax.block_until_ready(jitted(*held[0], x, labels))

        runs[contender] = run
    return runs


def step_rows(rounds, *names):
    for name in names:
        runs = steps(name, applies(name))
        to = compared(runs, rounds)
        for contender in runs:
            if contender != "float":
                yield f"{name} step, {contender}", to(contender, "float")
        yield f"{name} step, int8, to qwix", to("int8", "qwix")


def product_rows(rounds, *shapes):
    """What XLA's int8 product takes of the float32 one, the codes being there."""
    dot = lambda x, w, **kw: jax.lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), **kw)
    for x, w in shapes:
        floats = [jnp.asarray(RNG.normal(size=shape).astype(np.float32)) for shape in (x, w)]
        matrix = floats[0].reshape(-1, x[-1])
        codes = [(v * 30).astype(jnp.int8) for v in (matrix, floats[1])]
        runs = {
            "float32": kept(dot, *floats),
            "as a matrix": kept(dot, matrix, floats[1]),
            "int8": kept(lambda x, w: dot(x, w, preferred_element_type=jnp.int32), *codes),
        }
        to = ratios(runs, "float32", rounds)
        yield f"the int8 product alone, {x} x {w} (float32 as a matrix {to['as a matrix']})", to["int8"], ""


def expert_rows(rounds, *cases):
    """A mixture of experts: `lax.ragged_dot` of float32, whose groups have different sizes, is 1."""
    layer = lambda params, x, sizes: jax.lax.ragged_dot(x, params["w"], sizes)
    loss = lambda f: jax.grad(lambda params, *args: (f(params, *args) ** 2).sum(), (0, 1))
    for rows, width, out, experts in cases:
        x, w = (jnp.asarray(RNG.normal(size=n), jnp.float32) for n in ((rows, width), (experts, width, out)))
        sizes = jnp.asarray(RNG.multinomial(rows, np.full(experts, 1 / experts)), jnp.int32)
        what = f"ragged dot, {rows} rows, {experts} experts of {width} x {out}"
        rule = Rule("w", weight_spec(8), activation_spec(8, symmetric=True))
        q = quantize_fn(layer, [rule])
        frozen = q.freeze({"w": w}, x, sizes)
        runs = {"float": kept(layer, {"w": w}, x, sizes), "frozen": kept(q, frozen, x, sizes)}
        to = compared(runs, rounds)
        yield f"{what}: frozen", to("frozen", "float"), ""
        gradients = None, "bfloat16", QuantSpec()
        of = {str(g): quantize_fn(layer, [dataclasses.replace(rule, gradient=g)]) for g in gradients}
        runs = {name: kept(loss(f), {"w": w}, x, sizes) for name, f in {"float": layer, **of}.items()}
        to = compared(runs, rounds)
        for name, g in zip(("float32", "bfloat16", "int8"), gradients, strict=True):
            yield f"{what}: gradient, {name} backward", to(str(g), "float"), ""


PACKAGES = "flax", "optax", "qwix", "aqtp"
COLUMNS = "", "ratio"
SHAPES = ((256, 1024), (1024, 1024)), ((8, 128, 256), (256, 1024))
PARTS = {
    "products": Part(COLUMNS, product_rows, 101, SHAPES),
    "steps": Part(COLUMNS, step_rows, 101, tuple(MODELS)),
    "experts": Part(COLUMNS, expert_rows, 31, ((1024, 512, 512, 8), (512, 256, 512, 32))),
}
