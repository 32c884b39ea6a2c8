# SPDX-License-Identifier: Apache-2.0
"""What do the ops of jaxquant.tf cost, against a pass over memory and against TensorFlow and torch?

Every number is a ratio of times in one process: of an op to x + 1 in the same library (of a gradient to x + g). The
runs are interleaved; the median is over rounds, in brackets the quartiles. JAX's runs donate x (or g) on both sides.
TensorFlow and torch are called eagerly, as their users call them, and get new memory on both sides.
"""

import functools
import os

os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow
import torch

from jaxquant import tf

from .runner import Part, donated, kept, ratios

RNG = np.random.default_rng(0)
GRAD = tf.fake_quant_with_min_max_vars_per_channel_gradient


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def ends(n):
    return -np.abs(normal(n)) - 0.1, np.abs(normal(n)) + 0.1


def of_tensorflow(rounds, base, op, *arrays):
    """The ratio of TensorFlow's op to its own base."""
    arrays = [tensorflow.constant(a) for a in arrays]
    return ratios({"base": lambda: base(*arrays[:2]), "op": lambda: op(*arrays)}, "base", min(rounds, 21))["op"]


def of_torch(rounds, op, x):
    x = torch.from_numpy(x)
    return ratios({"base": lambda: x + 1, "op": lambda: op(x)}, "base", min(rounds, 21))["op"]


def scalars(rounds, *powers):
    """One range for the tensor, 2 ** power elements."""
    for power in powers:
        x, low, high = normal(2**power), np.float32(-1.3), np.float32(2.1)
        got = ratios(
            {
                "x + 1": donated(lambda x: x + 1, jnp.asarray(x)),
                "args": donated(lambda x: tf.fake_quant_with_min_max_args(x, -1.3, 2.1), jnp.asarray(x)),
                "vars": donated(tf.fake_quant_with_min_max_vars, jnp.asarray(x), low, high),
                "v2": donated(
                    lambda x, *r: tf.quantize_and_dequantize_v2(x, *r, range_given=True), jnp.asarray(x), low, high
                ),
            },
            "x + 1",
            rounds,
        )
        add = lambda x, *_: x + 1
        op = tensorflow.quantization.fake_quant_with_min_max_vars
        theirs = of_tensorflow(rounds, add, op, x, low, high)
        args = of_tensorflow(
            rounds, add, lambda x: tensorflow.quantization.fake_quant_with_min_max_args(x, -1.3, 2.1), x
        )
        torchs = of_torch(rounds, lambda x: torch.fake_quantize_per_tensor_affine(x, 3.4 / 255, 97, 0, 255), x)
        yield f"`args`, 2^{power} elements", got["args"], args, torchs
        yield f"`vars`, 2^{power} elements", got["vars"], theirs, torchs
        yield f"`quantize_and_dequantize_v2`, given, 2^{power}", got["v2"], "", "", ""


def five_vectors(x, a, b, c, d, e):
    """No quantizer at all: the cheapest pass that reads five values a channel, as the op has to."""
    return (((x * a[None] + b[None]) * c[None]) - d[None]) * e[None]


def three_vectors(x, scale, inverse, zero_point):
    """The op's own arithmetic without its guards, with both ends and the zero computed again for each element."""
    low, high = -zero_point[None] * scale[None], (255 - zero_point[None]) * scale[None]
    zero = jnp.floor(0.5 - low * inverse[None])
    return jnp.floor((jnp.where(x < low, low, jnp.where(high < x, high, x)) - low) * inverse[None] - zero) * scale[None]


def channels(rounds, *sizes):
    """One range a channel, n x n elements."""
    for n in sizes:
        x, (low, high), g = normal(n, n), ends(n), normal(n, n)
        per_channel = tf.fake_quant_with_min_max_vars_per_channel
        vectors = [jnp.abs(normal(n)) for _ in range(5)]
        last = ratios(
            {
                "x + 1": donated(lambda x: x + 1, jnp.asarray(x)),
                "op": donated(per_channel, jnp.asarray(x), low, high),
                "floor": donated(five_vectors, jnp.asarray(x), *vectors),
                "three": donated(three_vectors, jnp.asarray(x), *vectors[:3]),
                "vmap": donated(jax.vmap(tf.fake_quant_with_min_max_vars, (1, 0, 0), 1), jnp.asarray(x), low, high),
                "first": donated(jax.vmap(tf.fake_quant_with_min_max_vars), jnp.asarray(x), low, high),
                "v2 first": donated(
                    lambda x, *r: tf.quantize_and_dequantize_v2(x, *r, range_given=True, axis=0),
                    jnp.asarray(x),
                    low,
                    high,
                ),
            },
            "x + 1",
            rounds,
        )
        add = lambda x, *_: x + 1
        theirs = of_tensorflow(
            rounds, add, tensorflow.quantization.fake_quant_with_min_max_vars_per_channel, x, low, high
        )
        scale, zero = torch.from_numpy((high - low) / 255), torch.full((n,), 128, dtype=torch.int32)
        by_channel = functools.partial(torch.fake_quantize_per_channel_affine, quant_min=0, quant_max=255)
        torchs = [
            of_torch(rounds, functools.partial(by_channel, scale=scale, zero_point=zero, axis=i), x) for i in (1, 0)
        ]
        yield f"`per_channel`, last axis, {n}^2", last["op"], theirs, torchs[0]
        yield f"five vectors read, nothing quantized, {n}^2", last["floor"], "", "", ""
        yield f"three vectors read, the others computed, {n}^2", last["three"], "", "", ""
        yield f"plain `vmap` of `vars`, last axis, {n}^2", last["vmap"], "", "", ""
        yield f"`vmap` of `vars`, first axis, {n}^2", last["first"], "", torchs[1]
        yield f"`quantize_and_dequantize_v2`, axis 0, {n}^2", last["v2 first"], "", ""
        args = (jnp.asarray(g), jnp.asarray(x))
        back = ratios(
            {
                "x + g": donated(lambda g, x: x + g, *args),
                "dx": donated(lambda g, x: tf.fake_quant_with_min_max_args_gradient(g, x, -1.3, 2.1), *args),
                "dx channel": donated(lambda g, x, *r: GRAD(g, x, *r)[0], *args, low, high),
            },
            "x + g",
            rounds,
        )
        three = ratios({"x + g": kept(lambda g, x: x + g, *args), "all": kept(GRAD, *args, low, high)}, "x + g", rounds)
        op = tensorflow.quantization.fake_quant_with_min_max_vars_per_channel_gradient
        theirs = of_tensorflow(rounds, lambda g, x: x + g, op, g, x, low, high)
        yield f"d/dx of `args`, {n}^2", back["dx"], "", ""
        yield f"d/dx of `per_channel`, {n}^2", back["dx channel"], "", ""
        yield (
            f"all three gradients of `per_channel`, {n}^2",
            three["all"],
            theirs,
            "",
        )


PACKAGES = "tensorflow-cpu", "torch"
COLUMNS = "", "jaxquant", "TensorFlow", "torch"
PARTS = {"scalars": Part(COLUMNS, scalars, 61, (20, 24)), "channels": Part(COLUMNS, channels, 41, (1024, 4096))}
