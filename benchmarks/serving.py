# SPDX-License-Identifier: Apache-2.0
"""What a frozen function costs, to float32 and to the function that quantizes its weights in each call."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxquant import QArray, QParams, Rule, activation_spec, dot_general, quantize, quantize_fn, weight_spec

from .runner import Part, kept, made, ratios

RNG = np.random.default_rng(0)
SYMMETRIC, AFFINE = activation_spec(8, symmetric=True), activation_spec(8)
MATMUL = (((1,), (0,)), ((), ()))


def normal(*shape, size=1.0):
    return jnp.asarray((RNG.normal(size=shape) * size).astype(np.float32))


def mlp(params, x):
    for w in params:
        x = jax.nn.relu(x @ w)
    return x


PARAMS = [normal(2048, 2048, size=2048**-0.5) for _ in range(4)]
ROWS = 1, 8, 128


def serving_rows(rounds, *batches):
    q = quantize_fn(mlp, [Rule("*", weight_spec(8), SYMMETRIC)])
    weights = {"": weight_spec(8), ", 4 bits": weight_spec(4), ", 4 bits in groups": weight_spec(4, block_size=32)}
    for rows in batches:
        x = normal(rows, 2048)
        s = q.init_qparams(PARAMS, x)
        frozen = q.freeze(PARAMS, x, qparams=s)
        static = lambda p, x, s: q(p, x, qparams=s)
        only = {f"weight-only, frozen{name}": quantize_fn(mlp, [("*", spec)]) for name, spec in weights.items()}
        to = ratios(
            {
                "float": kept(mlp, PARAMS, x),
                "frozen, static": kept(static, frozen, x, s),
                "frozen, dynamic": kept(lambda p, x: q(p, x, qparams={}), frozen, x),
                "q(params, qparams=)": kept(static, PARAMS, x, s),
                "q(params)": kept(q, PARAMS, x),
                **{name: kept(of, of.freeze(PARAMS, x), x) for name, of in only.items()},
            },
            "float",
            rounds,
        )
        for name, ratio in to.items():
            yield f"{rows} rows: {name}", ratio


def layout_rows(rounds, *batches):
    """A weight at rest as the model has it, or as frozen: what one int8 product takes of the float32 one."""
    for rows in batches:
        x, w = normal(rows, 2048), PARAMS[0]
        codes = quantize(x, SYMMETRIC, QParams(0.03, 0.0))
        own = quantize(w, weight_spec(8, channel_axis=1))
        runs = {
            "float": kept(lambda x, w: x @ w, x, w),
            "(in, out)": kept(lambda x, w: dot_general(x, w, MATMUL), codes, own),
            "(out, in), as frozen": kept(
                lambda x, w: dot_general(x, w, MATMUL), codes, dataclasses.replace(own, order=(-1, -2))
            ),
        }
        for name, ratio in ratios(runs, "float", rounds).items():
            yield f"{rows} rows: one int8 product of a weight {name}", ratio, ""


def packed_rows(rounds):
    """Weight-only weights of 4 bits two in a byte, as frozen, to one in a byte."""
    scanned = lambda stack, x: lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, stack)[0]
    x, stack = normal(8, 2048), jnp.stack(PARAMS)
    for name, f, params in (("8 rows", mlp, PARAMS), ("8 rows, in a scan over the layers", scanned, {"w": stack})):
        f = f if params is PARAMS else lambda p, x, f=f: f(p["w"], x)
        q = quantize_fn(f, [("*", weight_spec(4, block_size=32))])
        frozen = q.freeze(params, x)
        in_bytes = jax.tree.map(
            lambda v: dataclasses.replace(v, values=v.values), frozen, is_leaf=lambda v: isinstance(v, QArray)
        )
        runs = {"two": kept(q, frozen, x), "one": kept(q, in_bytes, x)}
        yield f"{name}: 4-bit weights two in a byte, to one in a byte", ratios(runs, "one", rounds)["two"], ""


def step_rows(rounds):
    """A training step, an evaluation and a trace with qparams, to those without."""
    x, params = normal(256, 1024), [normal(1024, 1024, size=1 / 32) for _ in range(4)]
    q = quantize_fn(mlp, [Rule("*", weight_spec(8), SYMMETRIC)])
    s = q.init_qparams(params, x)
    static = lambda p, x, s: q(p, x, qparams=s)
    dynamic = {"q(params)": kept(q, params, x), "q(params, qparams=)": kept(static, params, x, s)}
    to = ratios(dynamic, "q(params)", rounds)["q(params, qparams=)"]
    yield "q(params, qparams=), 256 rows, to q(params)", to

    def step(p, s, x):
        moved = lambda v, g: v - 1e-6 * g
        loss = (lambda t: jnp.sum(static(t[0], x, t[1]) ** 2)) if s else (lambda t: jnp.sum(q(t[0], x) ** 2))
        return jax.tree.map(moved, (p, s), jax.grad(loss)((p, s)))

    runs = {"dynamic": kept(step, params, {}, x), "with qparams": kept(step, params, s, x)}
    to = ratios(runs, "dynamic", rounds)["with qparams"]
    yield "training step with qparams, to the dynamic one", to
    runs = {
        "evaluation": kept(mlp, params, x),
        "observe": kept(functools.partial(q.observe, with_value=True), params, x),
    }
    to = ratios(runs, "evaluation", rounds)["observe"]
    yield "q.observe(with_value=True), to an evaluation in float", to
    without, with_ = (
        np.median([made(f, *args)[0] for _ in range(max(1, rounds // 6))])
        for f, args in ((q, (params, x)), (static, (params, x, s)))
    )
    yield "tracing with qparams, to without", float(with_ / without)


LAYERS, WIDTH, HEADS, CONTEXT = 4, 512, 8, 64


def language_model(params, tokens, keys, values):
    """One token for each of a batch, with the keys and values of those before."""

    def layer(x, p):
        w, keys, values = p
        normed = lambda x: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        q, k, v = (y.reshape(-1, HEADS, WIDTH // HEADS) for y in jnp.split(normed(x) @ w["qkv"], 3, -1))
        keys, values = (jnp.concatenate([old[:, 1:], new[:, None]], 1) for old, new in ((keys, k), (values, v)))
        scores = jax.nn.softmax(jnp.einsum("bhk,bthk->bht", q, keys) * (WIDTH / HEADS) ** -0.5)
        x = x + jnp.einsum("bht,bthk->bhk", scores, values).reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(normed(x) @ w["up"]) @ w["down"], (keys, values)

    x, (keys, values) = lax.scan(layer, params["embedding"][tokens], (params["layers"], keys, values))
    return x @ params["embedding"].T, keys, values


def language_rows(rounds, *batches):
    size = WIDTH**-0.5
    layers = {
        "qkv": normal(LAYERS, WIDTH, 3 * WIDTH, size=size), "out": normal(LAYERS, WIDTH, WIDTH, size=size),
        "up": normal(LAYERS, WIDTH, 4 * WIDTH, size=size), "down": normal(LAYERS, 4 * WIDTH, WIDTH, size=size / 2),
    }  # fmt: skip
    params = {"embedding": normal(8192, WIDTH, size=size), "layers": layers}
    for batch in batches:
        tokens = jnp.asarray(RNG.integers(0, 8192, batch))
        cache = [normal(LAYERS, batch, CONTEXT, HEADS, WIDTH // HEADS) for _ in range(2)]
        runs = {"float": kept(language_model, params, tokens, *cache)}
        for name, activation in (("w8a8", SYMMETRIC), ("w8, weight-only", None)):
            rules = [
                Rule("embedding", weight_spec(8), activation, everywhere=True),
                Rule("layers/*", weight_spec(8), activation),
            ]
            q = quantize_fn(language_model, rules)
            s = q.init_qparams(params, tokens, *cache)
            frozen = q.freeze(params, tokens, *cache, qparams=s)
            runs[name] = kept(
                functools.partial(lambda q, p, s, *args: q(p, *args, qparams=s), q), frozen, s, tokens, *cache
            )
        for name, ratio in ratios(runs, "float", rounds).items():
            yield (
                f"language model, one token for each of {batch}, {name}, frozen and static",
                ratio,
            )


PACKAGES = ()
COLUMNS = "", "ratio"
PARTS = {
    "serving": Part(COLUMNS, serving_rows, 31, ROWS),
    "layouts": Part(COLUMNS, layout_rows, 101, ROWS),
    "packed": Part(COLUMNS, packed_rows, 31),
    "steps": Part(COLUMNS, step_rows, 41),
    "language": Part(COLUMNS, language_rows, 61, (1, 16)),
}
