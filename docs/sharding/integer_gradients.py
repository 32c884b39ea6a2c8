# SPDX-License-Identifier: Apache-2.0
"""Gradients added over devices as integers: data-parallel training with the same bits on 1, 2 and 4 devices."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # before jax starts; on real devices leave it out

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxquant import QuantSpec, Range, Rule, activation_spec, qparams_from_range, quantize, quantize_fn, weight_spec


def model(params, x):
    return jnp.tanh(x @ params["first"]) @ params["second"]


q = quantize_fn(model, [Rule("*", weight_spec(8), activation_spec(8), gradient="bfloat16")])
loss = lambda params, x, y: ((q(params, x) - y) ** 2).mean()
of_gradients = QuantSpec(bits=16)


def added(gradients):
    """Of microbatches: on one grid for all devices, whose integers are added in int32, exactly."""
    largest = lax.pmax(abs(gradients).max(), "data")
    qparams = qparams_from_range(Range(-largest, largest), of_gradients)
    integers = quantize(gradients, of_gradients, qparams).values.astype(jnp.int32).sum(0)
    return lax.psum(integers, "data") * qparams.scale


def in_float(gradients):
    return lax.psum(gradients.sum(0), "data")


def gradient(add, devices, params, x, y):
    """Of 16 microbatches, of which each device has a part."""
    mesh = jax.make_mesh((devices,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])

    def on_device(params, x, y):
        own = lax.pcast(params, ("data",), to="varying") if hasattr(lax, "pcast") else lax.pvary(params, ("data",))
        return jax.tree.map(add, lax.map(lambda batch: jax.grad(loss)(own, *batch), (x, y)))

    run = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    return jax.tree.map(np.asarray, jax.jit(run)(params, x, y))


keys = jax.random.split(jax.random.key(0), 4)
normal = lambda key, *shape: np.asarray(jax.random.normal(key, shape))
params = {"first": normal(keys[0], 32, 64) / 6, "second": normal(keys[1], 64, 8) / 8}
x, y = normal(keys[2], 16, 8, 32), normal(keys[3], 16, 8, 8)

differ = lambda a, b: sum(int((a[name] != b[name]).sum()) for name in a)
found = {add: [gradient(add, n, params, x, y) for n in (1, 2, 4)] for add in (added, in_float)}
for add, (one, two, four) in found.items():
    print(f"{add.__name__}: of 2 devices {differ(one, two)} values differ from those of one, of 4 {differ(one, four)}")
one, exact = found[added][0], found[in_float][0]
error = max(abs(one[name] - exact[name]).max() / abs(exact[name]).max() for name in one)
print(f"largest difference of the integers' sum from the float one, of the largest element: {error:.1e}")
assert differ(found[added][0], found[added][1]) == differ(found[added][0], found[added][2]) == 0
assert error < 1e-3
