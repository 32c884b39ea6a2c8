# SPDX-License-Identifier: Apache-2.0
"""Two processes train, freeze and save as one does, and what they save is loaded on another mesh."""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import differing
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxquant import QArray, Rule, activation_spec, load, quantize_fn, weight_spec

pytestmark = [pytest.mark.slow, pytest.mark.bits]
orbax = pytest.importorskip("orbax.checkpoint", reason="of the extra `frameworks`")
pytest.importorskip("safetensors", reason="of the extra `safetensors`")

WORKER = pathlib.Path(__file__).parent / "worker.py"
ROWS = {"in": "data", "out": "model"}  # the axis of their mesh, 2 x 2, along which the rows of a weight are split


def model(params, x):
    return jax.nn.relu(x @ params["in"]) @ params["out"]


Q = quantize_fn(model, [Rule("**", weight_spec(8), activation_spec(8))])


def run(folder, processes):
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    commands = [[sys.executable, WORKER, folder, address, str(processes), str(i)] for i in range(processes)]
    workers = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        ends = [worker.communicate(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * processes, ends
    return folder


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    return run(folder / "one", 1), run(folder / "two", 2)


def on_another_mesh(leaf):
    """All four devices in a row, along the columns, of which a scale has them too."""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P(None, "all")))


def like():
    params = {"in": jax.ShapeDtypeStruct((16, 32), jnp.float32), "out": jax.ShapeDtypeStruct((32, 8), jnp.float32)}
    frozen = jax.eval_shape(Q.freeze, params, jax.ShapeDtypeStruct((64, 16), jnp.float32))
    return jax.tree.map(on_another_mesh, {"params": params, "frozen": frozen})


def restored(folder):
    with orbax.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "orbax", like())


def same(got, want):
    return jax.tree.structure(got) == jax.tree.structure(want) and not any(
        differing(*pair) for pair in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


def served(frozen, x):
    return np.asarray(jax.jit(Q)(frozen, x))


def test_two_processes_have_the_bits_of_one(one_and_two):
    one, two = map(restored, one_and_two)
    assert same(two, one)
    x, *outputs = (np.load(path) for path in (one_and_two[0] / "x.npy", *(f / "served.npy" for f in one_and_two)))
    assert differing(*outputs) == 0
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(two)} == {4}
    assert differing(served(two["frozen"], x), outputs[0]) == 0


def test_the_shards_in_files_are_the_parts_of_the_whole(one_and_two):
    """A file of each device of the mesh of 2 x 2, in its order; each a model of its own, of part of each weight."""
    whole, folder = restored(one_and_two[0]), one_and_two[1]
    shards = np.array([load(folder / f"{i}.safetensors") for i in range(4)], object).reshape(2, 2)

    def joined(name, part):
        grid = shards if ROWS[name] == "data" else shards.T
        return np.block([[np.asarray(part(shard)) for shard in row] for row in grid])

    for name in ROWS:
        assert differing(joined(name, lambda shard, name=name: shard["params"][name]), whole["params"][name]) == 0
        want, parts = whole["frozen"][name], [shard["frozen"][name] for shard in shards.ravel()]
        assert all(isinstance(part, QArray) and part.spec == want.spec for part in parts)
        assert differing(joined(name, lambda shard, name=name: shard["frozen"][name].values), want.values) == 0
        assert differing(joined(name, lambda shard, name=name: shard["frozen"][name].scale)[:1], want.scale) == 0
