# SPDX-License-Identifier: Apache-2.0
"""QAT of params sharded over 4 devices by `jit`: FSDP, and tensor parallel. Only the shardings differ."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # before jax starts; on real devices leave it out

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxquant import fake_quant_params, init_qparams, quantize_params, weight_spec

RULES = [("**/kernel", weight_spec(4, channel_axis=-1))]


def loss(params, qparams, x, y):
    w = fake_quant_params(params, RULES, qparams)  # the whole change for QAT
    return ((jax.nn.relu(x @ w["up"]["kernel"]) @ w["down"]["kernel"] - y) ** 2).mean()


keys = jax.random.split(jax.random.key(0), 4)
normal = lambda key, *shape: np.asarray(jax.random.normal(key, shape))
params = {"up": {"kernel": normal(keys[0], 16, 32)}, "down": {"kernel": normal(keys[1], 32, 8)}}
x, y = normal(keys[2], 64, 16), normal(keys[3], 64, 8)

fit = jax.jit(lambda params: init_qparams(params, RULES, "minmax"))
transform = jax.jit(lambda params, q: (fake_quant_params(params, RULES, q), quantize_params(params, RULES, q)))
train = jax.jit(jax.value_and_grad(loss, (0, 1)))
want_qparams = fit(params)
want = transform(params, want_qparams)
want_loss, want_gradients = train(params, want_qparams, x, y)

auto = jax.sharding.AxisType.Auto  # the compiler chooses what is gathered; explicit axes give the same bits
fsdp = jax.make_mesh((4,), ("data",), (auto,))
grid = jax.make_mesh((2, 2), ("data", "model"), (auto, auto))
LAYOUTS = {  # of the kernels up and down
    "fsdp": (fsdp, P("data", None), P("data", None)),  # gathered by the compiler where they are used
    "tensor parallel": (grid, P(None, "model"), P("model", None)),  # columns, then rows
}
for name, (mesh, up, down) in LAYOUTS.items():
    put = lambda v, spec, mesh=mesh: jax.device_put(v, NamedSharding(mesh, spec))
    sharded = {"up": put(params["up"], up), "down": put(params["down"], down)}
    batch = put((x, y), P("data"))
    qparams = fit(sharded)  # a range under jit is that of the whole kernel, wherever its shards are
    faked, integers = transform(sharded, qparams)
    value, gradients = train(sharded, qparams, *batch)
    local = faked["up"]["kernel"].addressable_shards[0].data.shape
    print(f"{name:16} loss {value:.4f}, one device {want_loss:.4f}; kernel 'up' (16, 32) in shards of {local}")
    same = jax.tree.map(lambda a, b: bool((a == b).all()), (qparams, faked, integers), (want_qparams, *want))
    assert jax.tree.all(same)  # bit for bit
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, 1e-5, 1e-5), gradients, want_gradients))
    assert faked["up"]["kernel"].sharding.is_equivalent_to(sharded["up"]["kernel"].sharding, 2)
