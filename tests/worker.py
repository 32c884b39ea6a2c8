# SPDX-License-Identifier: Apache-2.0
"""One process of those that tests/test_processes.py starts: trains, freezes and saves on a mesh of all their devices.

`python worker.py FOLDER ADDRESS PROCESSES PROCESS`, with four devices among all of them.
"""

import dataclasses
import os
import pathlib
import sys

FOLDER, ADDRESS, PROCESSES, PROCESS = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // PROCESSES}"

import jax
import numpy as np
import orbax.checkpoint as orbax
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant import QArray, Rule, activation_spec, quantize_fn, save, weight_spec

if PROCESSES > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(ADDRESS, num_processes=PROCESSES, process_id=PROCESS)

RULES = [Rule("**", weight_spec(8), activation_spec(8))]
LAYOUTS = {"in": ("data", "model"), "out": ("model", "data")}  # of the axes of a weight on the mesh
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))


def put(v, *axes):
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.make_array_from_callback(v.shape, sharding, lambda at: v[at])


def model(params, x):
    return jax.nn.relu(x @ params["in"]) @ params["out"]


@jax.jit
def step(params, x, y):
    gradients = jax.grad(lambda params: ((q(params, x) - y) ** 2).mean())(params)
    return jax.tree.map(lambda v, g: v - 0.1 * g, params, gradients)


rng = np.random.default_rng(0)  # every process makes the same arrays, and keeps its shards of them
normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
params = {"in": put(normal(16, 32), *LAYOUTS["in"]), "out": put(normal(32, 8), *LAYOUTS["out"])}
q = quantize_fn(model, RULES)
for _ in range(3):
    params = step(params, put(normal(64, 16), "data"), put(normal(64, 8), "data"))
rows = normal(64, 16)
x = put(rows, "data")


def sharded(name, leaf):
    """A weight lies transposed at rest; a scale has size 1 along what is contracted, and is split with the columns."""
    rows, columns = LAYOUTS[name]
    axes = (columns, rows) if leaf.shape == params[name].shape[::-1] else (None, columns)
    return NamedSharding(mesh, PartitionSpec(*axes))


shardings = {
    name: jax.tree.map(lambda leaf, name=name: sharded(name, leaf), leaf)
    for name, leaf in jax.eval_shape(q.freeze, params, x).items()
}
frozen = jax.jit(q.freeze, out_shardings=shardings)(params, x)
served = jax.jit(q, out_shardings=NamedSharding(mesh, PartitionSpec()))(frozen, x)

with orbax.StandardCheckpointer() as checkpointer:
    checkpointer.save(FOLDER / "orbax", {"params": params, "frozen": frozen})


def of_device(v, device):
    if isinstance(v, QArray):  # without the sums along the whole of an axis
        parts = {name: of_device(getattr(v, name), device) for name in ("values", "scale", "zero_point")}
        return dataclasses.replace(v, **parts)
    return next(shard.data for shard in v.addressable_shards if shard.device == device)


for device in jax.local_devices():  # each shard in a file of its own, a tree of the same structure
    own = lambda v, device=device: of_device(v, device)
    shards = jax.tree.map(own, {"params": params, "frozen": frozen}, is_leaf=lambda v: isinstance(v, QArray))
    save(FOLDER / f"{np.flatnonzero(mesh.devices == device)[0]}.safetensors", shards)
if PROCESS == 0:
    np.save(FOLDER / "x.npy", rows)
    np.save(FOLDER / "served.npy", np.asarray(served))
