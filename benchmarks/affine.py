# SPDX-License-Identifier: Apache-2.0
"""What does the affine fake quant cost, with given qparams and with the range of the data, against a pass over memory?

Ratios of times in one process, interleaved: medians over rounds, in brackets the quartiles. JAX's runs donate x on both
sides; torch is called eagerly, as its users call it, and gets new memory on both sides.
"""

import jax
import jax.numpy as jnp
import numpy as np
import qwix
import torch

from jaxquant import PerChannel, QuantSpec, activation_spec, fake_quant, fit_qparams, weight_spec

from .runner import Part, compared, donated, kept, ratios

RNG = np.random.default_rng(0)
SPECS = {
    "per tensor": QuantSpec(),
    "per tensor, affine": activation_spec(),
    "last axis": weight_spec(channel_axis=-1),
    "last axis, affine": QuantSpec(symmetric=False, granularity=PerChannel(-1)),
    "first axis": weight_spec(channel_axis=0),
    "blocks of 32": weight_spec(channel_axis=-1, block_size=32),
}


def of_torch(rounds, x):
    """torch's fake quant with given qparams, to its own x + 1: per tensor, last axis, first axis."""
    scale, zero = torch.rand(x.shape[0]) + 0.1, torch.zeros(x.shape[0], dtype=torch.int32)
    x = torch.from_numpy(x)
    runs = {"x + 1": lambda: x + 1, "tensor": lambda: torch.fake_quantize_per_tensor_affine(x, 0.03, 0, -128, 127)}
    for axis, name in ((1, "last axis"), (0, "first axis")):
        runs[name] = lambda axis=axis: torch.fake_quantize_per_channel_affine(x, scale, zero, axis, -128, 127)
    got = ratios(runs, "x + 1", min(rounds, 15))
    return {"per tensor": got["tensor"], "per tensor, affine": got["tensor"], **got}


def given(rounds, *sizes):
    """Qparams fitted before."""
    for n in sizes:
        x = RNG.normal(size=(n, n)).astype(np.float32)
        runs = {"x + 1": donated(lambda x: x + 1, jnp.asarray(x))}
        for name, spec in SPECS.items():
            qparams = fit_qparams(jnp.asarray(x), spec)
            runs[name] = donated(lambda x, q, spec=spec: fake_quant(x, spec, q), jnp.asarray(x), qparams)
        got, theirs = ratios(runs, "x + 1", rounds), of_torch(rounds, x)
        for name in SPECS:
            yield (
                f"`fake_quant`, {name}, {n}^2",
                got[name],
                theirs.get(name, ""),
            )


def gradients(rounds, *sizes):
    """d/dx alone, and with the gradient of the scale, both to x + g."""
    spec = SPECS["last axis"]
    for n in sizes:
        x, g = (jnp.asarray(RNG.normal(size=(n, n)).astype(np.float32)) for _ in range(2))
        qparams = fit_qparams(x, spec)
        dx = lambda g, x, q: jax.vjp(lambda x: fake_quant(x, spec, q), x)[1](g)[0]
        both = lambda g, x, q: jax.vjp(lambda x, q: fake_quant(x, spec, q), x, q)[1](g)
        got = ratios({"x + g": donated(lambda g, x: x + g, g, x), "dx": donated(dx, g, x, qparams)}, "x + g", rounds)
        yield f"d/dx, last axis, {n}^2", got["dx"], ""
        got = ratios({"x + g": kept(lambda g, x: x + g, g, x), "both": kept(both, g, x, qparams)}, "x + g", rounds)
        yield f"d/dx and d/dscale, last axis, {n}^2", got["both"], ""


def in_two(first, second, x):
    """A pass that reads x and one that writes it, each compiled alone: what a range and a fake quant have to do."""
    first, second, held = jax.jit(first), jax.jit(second, donate_argnums=0), [x.copy()]

    def run():
        jax.block_until_ready(first(held[0]))
        held[0] = jax.block_until_ready(second(held[0]))

    return run


def of_qwix(x, axis):
    codes = qwix.quantize(x, jnp.int8, channelwise_axes=[axis])
    return qwix.dequantize(codes).astype(x.dtype)


def with_range(rounds, *sizes):
    """The range of the data and the fake quant with it, to the two passes that are their least."""
    for n in sizes:
        x = jnp.asarray(RNG.normal(size=(n, n)).astype(np.float32))
        for name, axis in (("last axis", 1), ("first axis", 0)):
            spec = SPECS[name]
            runs = {
                "two passes": in_two(lambda x, axis=axis: jnp.max(jnp.abs(x), 1 - axis), lambda x: x + 1, x),
                "x + 1": donated(lambda x: x + 1, x),
                "jaxquant": donated(lambda x, spec=spec: fake_quant(x, spec), x),
                "qwix": donated(lambda x, axis=axis: of_qwix(x, axis), x),
            }
            to = compared(runs, rounds)
            range_, whole, theirs = (to("jaxquant", base) for base in ("two passes", "x + 1", "qwix"))
            two, qwixs = to("two passes", "x + 1"), to("qwix", "x + 1")
            yield f"range and `fake_quant`, {name}, {n}^2, to two passes", range_, ""
            yield f"the same to x + 1 (two passes: {two})", whole, "", ""
            yield f"the same to qwix (qwix to x + 1: {qwixs})", theirs, ""


PACKAGES = "torch", "qwix"
COLUMNS = "", "jaxquant", "torch, to its own x + 1"
PARTS = {
    name: Part(COLUMNS, rows, 41, (1024, 4096))
    for name, rows in (("given", given), ("gradients", gradients), ("with_range", with_range))
}
