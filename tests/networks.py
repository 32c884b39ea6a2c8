# SPDX-License-Identifier: Apache-2.0
"""Small convolutional networks of the kinds that runtimes serve: functions of (params, images), and their params."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def conv(p, x, stride=1, groups=1, numbers=NHWC, padding="SAME"):
    y = lax.conv_general_dilated(
        x, p["w"], (stride, stride), padding, dimension_numbers=numbers, feature_group_count=groups
    )
    return y + jnp.reshape(p["b"], (1, -1, 1, 1) if numbers is NCHW else (1, 1, 1, -1)) if "b" in p else y


def dense(p, x):
    return x @ p["w"] + jnp.broadcast_to(p["b"], (x.shape[0], p["b"].size))


def mobile(params, x):
    """Inverted residuals with relu6."""
    x = jax.nn.relu6(conv(params["stem"], x, 2))
    h = jax.nn.relu6(conv(params["expand"], x))
    h = jax.nn.relu6(conv(params["depthwise"], h, 1, 16))
    x = conv(params["project"], h) + x
    return dense(params["fc"], jax.nn.relu6(conv(params["head"], x)).mean((1, 2)))


def residual(params, x):
    """A residual block with a relu behind the sum, a max pool and an average pool, and a shortcut."""
    x = jax.nn.relu(conv(params["stem"], x))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    h = jax.nn.relu(conv(params["a"], x, 2))
    x = jax.nn.relu(conv(params["b"], h) + conv(params["short"], x, 2))
    x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    return dense(params["fc"], x.reshape(x.shape[0], -1))


def concatenated(params, x):
    """What one layer gives, beside what the next makes of it."""
    x = jax.nn.relu(conv(params["stem"], x, 2))
    for name in ("a", "b"):
        x = jnp.concatenate([x, jax.nn.relu(conv(params[name], x))], -1)
    return dense(params["fc"], jnp.maximum(conv(params["head"], x), 0).mean((1, 2)))


def one_image(params, x):
    """Images in (C, H, W) one by one, as in equinox: a weight in front, and means over axes that are kept."""

    def one(x):
        x = jnp.clip(conv(params["stem"], x[None], 2, numbers=NCHW)[0], 0, 6)
        x = jnp.mean(conv(params["head"], x[None], numbers=NCHW)[0], (1, 2), keepdims=True)
        return params["fc"]["w"] @ x.ravel() + params["fc"]["b"]

    return jax.vmap(one)(x.transpose(0, 3, 1, 2))


def scanned(params, x):
    """Layers in a scan, each of which is computed again backward."""
    x = jax.nn.relu(conv(params["stem"], x, 2))

    @jax.checkpoint
    def block(x, p):
        return jax.nn.relu(conv(p["b"], jax.nn.relu(conv(p["a"], x))) + x), None

    x, _ = lax.scan(block, x, params["blocks"])
    return dense(params["fc"], x.mean((1, 2)))


def excited(params, x):
    """Squeeze-and-excitation with hard-swish: these are computed in float."""
    x = jax.nn.hard_swish(conv(params["stem"], x, 2))
    s = jax.nn.relu(dense(params["squeeze"], x.mean((1, 2))))
    x = x * jax.nn.hard_sigmoid(dense(params["excite"], s))[:, None, None]
    return dense(params["fc"], jax.nn.hard_swish(conv(params["head"], x)).mean((1, 2)))


class Random:
    """Layers with random numbers."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def normal(self, scale, *shape):
        return np.float32(self.rng.normal(size=shape) * scale)

    def conv(self, k, i, o, gain=1.6):
        return {"w": self.normal(gain / np.sqrt(k * k * i), k, k, i, o), "b": self.normal(0.3, o)}

    def dense(self, i, o):
        return {"w": self.normal(1.5 / np.sqrt(i), i, o), "b": self.normal(0.3, o)}


def _params():
    of = Random(0)
    yield mobile, {
        "stem": of.conv(3, 3, 8), "expand": of.conv(1, 8, 16), "depthwise": of.conv(3, 1, 16),
        "project": of.conv(1, 16, 8), "head": of.conv(1, 8, 32), "fc": of.dense(32, 10),
    }  # fmt: skip
    yield residual, {
        "stem": of.conv(3, 3, 8), "a": of.conv(3, 8, 16), "b": of.conv(3, 16, 16), "short": of.conv(1, 8, 16),
        "fc": of.dense(64, 10),
    }  # fmt: skip
    yield concatenated, {
        "stem": of.conv(3, 3, 8), "a": of.conv(3, 8, 4), "b": of.conv(3, 12, 4), "head": of.conv(1, 16, 24),
        "fc": of.dense(24, 10),
    }  # fmt: skip
    oihw = lambda p: p | {"w": p["w"].transpose(3, 2, 0, 1)}
    fc = of.dense(24, 10)
    yield one_image, {
        "stem": oihw(of.conv(3, 3, 8)), "head": oihw(of.conv(3, 8, 24)), "fc": fc | {"w": fc["w"].T},
    }  # fmt: skip
    blocks = [{"a": of.conv(3, 8, 8), "b": of.conv(3, 8, 8, 0.8)} for _ in range(3)]
    yield scanned, {
        "stem": of.conv(3, 3, 8), "blocks": jax.tree.map(lambda *v: np.stack(v), *blocks), "fc": of.dense(8, 10),
    }  # fmt: skip
    yield excited, {
        "stem": of.conv(3, 3, 8), "squeeze": of.dense(8, 4), "excite": of.dense(4, 8), "head": of.conv(1, 8, 16),
        "fc": of.dense(16, 10),
    }  # fmt: skip


@functools.cache
def networks():
    """Each function by its name, and its params."""
    return {f.__name__: (f, params) for f, params in _params()}


def images(n, seed=1):
    return np.float32(np.random.default_rng(seed).normal(size=(n, 16, 16, 3)))
