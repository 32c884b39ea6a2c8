# SPDX-License-Identifier: Apache-2.0
"""QAT with `shard_map` over 4 devices: params and qparams on each of them, the batch in shards."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # before jax starts; on real devices leave it out

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxquant import (
    Range,
    activation_spec,
    fake_quant,
    fake_quant_params,
    init_qparams,
    observe,
    qparams_from_range,
    weight_spec,
)

RULES, ACTIVATION = [("kernel", weight_spec(4, channel_axis=-1))], activation_spec(8)


def loss(params, qparams, x, y):
    w = fake_quant_params(params, RULES, qparams["params"])["kernel"]
    return ((fake_quant(x, ACTIVATION, qparams["x"]) @ w - y) ** 2).mean()


def global_range(x):
    own = observe(x, ACTIVATION)  # of this shard alone
    return Range(lax.pmin(own.x_min, "data"), lax.pmax(own.x_max, "data"))


def train(params, qparams, x, y):
    """The mean over the devices. Gradients of what is on each of them are summed over them by JAX."""
    total = lambda *args: loss(*args) / lax.axis_size("data")
    value, gradients = jax.value_and_grad(total, (0, 1))(params, qparams, x, y)
    return lax.psum(value, "data"), gradients


keys = jax.random.split(jax.random.key(0), 3)
normal = lambda key, *shape: np.asarray(jax.random.normal(key, shape))
params, x, y = {"kernel": normal(keys[0], 16, 8)}, normal(keys[1], 64, 16), normal(keys[2], 64, 8)
x = x + np.linspace(-1, 1, 64, dtype=np.float32)[:, None]  # the first shard holds the low end, the last the high one

mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
on_shards = lambda f, *specs: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P()))
merged = on_shards(global_range, P("data"))(x)
qparams = {"params": init_qparams(params, RULES, "lsq"), "x": qparams_from_range(merged, ACTIVATION)}
value, gradients = on_shards(train, P(), P(), P("data"), P("data"))(params, qparams, x, y)

want_value, want_gradients = jax.value_and_grad(loss, (0, 1))(params, qparams, x, y)
first = observe(x[:16], ACTIVATION)
print(f"range of the batch {merged.x_min:.4f} .. {merged.x_max:.4f}")
print(f"range of the first shard {first.x_min:.4f} .. {first.x_max:.4f}")
print(f"loss {value:.4f}, one device {want_value:.4f}")
print(f"gradient to the scale of x {gradients[1]['x'].scale:.4f}, one device {want_gradients[1]['x'].scale:.4f}")
assert merged == observe(x, ACTIVATION) != first  # bit for bit
assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, 1e-5, 1e-5), gradients, want_gradients))
