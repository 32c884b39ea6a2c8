# SPDX-License-Identifier: Apache-2.0
"""QAT over 2 processes of 2 devices each; on a cluster each machine runs the part from `jax.distributed` on."""

import os
import socket
import subprocess
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"  # before jax starts; on real devices leave it out

if len(sys.argv) == 1:  # start this file twice, on a free port of this machine
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    workers = [subprocess.Popen([sys.executable, __file__, address, str(i)]) for i in range(2)]
    try:
        codes = [worker.wait(240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert codes == [0, 0], codes
    sys.exit()

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
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

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
RULES, ACTIVATION = [("kernel", weight_spec(4, channel_axis=-1))], activation_spec(8)


def loss(params, qparams, x, y):
    w = fake_quant_params(params, RULES, qparams["params"])["kernel"]
    return ((fake_quant(x, ACTIVATION, qparams["x"]) @ w - y) ** 2).mean()


def global_range(x):
    own = observe(x, ACTIVATION)  # of this shard alone
    return Range(lax.pmin(own.x_min, "data"), lax.pmax(own.x_max, "data"))


rng = np.random.default_rng(0)  # every process makes the same arrays, and keeps its shards of them
normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
params, x, y = {"kernel": normal(16, 8)}, normal(64, 16), normal(64, 8)
x[:32] -= 1  # the first process holds the low end, the second the high one
mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
put = lambda v, spec: jax.make_array_from_callback(v.shape, NamedSharding(mesh, spec), lambda at: v[at])
sharded = {"kernel": put(params["kernel"], P("data"))}
batch = put(x, P("data")), put(y, P("data"))

whole = NamedSharding(mesh, P())  # qparams on every device of both processes
merged = jax.jit(jax.shard_map(global_range, mesh=mesh, in_specs=P("data"), out_specs=P()))(batch[0])
fit = lambda params, r: {"params": init_qparams(params, RULES, "minmax"), "x": qparams_from_range(r, ACTIVATION)}
qparams = jax.jit(fit, out_shardings=whole)(sharded, merged)
faked = jax.jit(lambda p, q: fake_quant_params(p, RULES, q["params"]))(sharded, qparams)
dparams, dqparams = jax.jit(jax.grad(loss, (0, 1)), out_shardings=(sharded["kernel"].sharding, whole))(
    sharded, qparams, *batch
)

want_qparams = fit(params, observe(x, ACTIVATION))  # on one device of this process
want = fake_quant_params(params, RULES, want_qparams["params"])["kernel"]
want_gradients = jax.grad(loss, (0, 1))(params, want_qparams, x, y)
devices = f"{jax.local_device_count()} of {jax.device_count()} devices"
print(f"process {jax.process_index()}: {devices}, range {merged.x_min:.4f} .. {merged.x_max:.4f}")
assert observe(np.split(x, 2)[jax.process_index()], ACTIVATION) != observe(x, ACTIVATION)
assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), qparams, want_qparams))  # bit for bit
for shard in faked["kernel"].addressable_shards:
    assert (shard.data == want[shard.index]).all()  # bit for bit
close = lambda a, b: bool(jnp.allclose(np.asarray(a), b, 1e-5, 1e-5))
assert jax.tree.all(jax.tree.map(close, dqparams, want_gradients[1]))
for shard in dparams["kernel"].addressable_shards:
    assert close(shard.data, want_gradients[0]["kernel"][shard.index])
