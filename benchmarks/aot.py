# SPDX-License-Identifier: Apache-2.0
"""Compiles for TPUs and GPUs that are not there, and reads what XLA says of the programs.

TPUs need `pip install 'jax[tpu]'`, GPUs `pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt` of the version of
jaxlib, and no NVIDIA library. What is read is XLA's estimate, or the text of a program: never a measurement.
"""

import collections
import functools
import importlib.util
import math
import mmap
import os
import pathlib
import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

from jaxquant import QArray, stored_for

TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
GPUS = {"h100": "NVIDIA H100 80GB HBM3", "a100": "NVIDIA A100-SXM4-80GB", "b200": "NVIDIA B200"}
# They are read once, when JAX looks for its platforms.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # asks no cloud which TPU this machine has
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")  # several processes compile at once
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the plugin alone, without NVIDIA's libraries


def missing(target: str) -> str:
    """What is to be installed before it compiles for a target, or nothing."""
    found = lambda name: importlib.util.find_spec(name.partition(".")[0]) and importlib.util.find_spec(name)
    if target in TPUS:
        return "" if found("libtpu") else "needs libtpu, which `pip install 'jax[tpu]'` brings"
    if found("jax_plugins.xla_cuda12"):
        return ""
    return "needs `pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt`, of the version of jaxlib"


_ONE_AT_A_TIME = threading.Lock()  # libtpu is loaded once, and threads compile at once


def devices(target: str) -> list[Any]:
    """Devices that are not there: four of TPUS, eight of 7x, or one of GPUS."""
    with _ONE_AT_A_TIME:
        return _devices(target)


@functools.cache
def _devices(target: str) -> list[Any]:
    if why := missing(target):
        raise ModuleNotFoundError(f"{target} {why}")
    if target in TPUS:
        return topologies.get_topology_desc(platform="tpu", topology_name=TPUS[target]).devices
    return topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=_config(target)).devices


def mesh(target: str, **sizes: int) -> Mesh:
    """A mesh of devices that are not there, by the names and sizes of its axes."""
    return Mesh(np.array(devices(target)).reshape([*sizes.values()]), [*sizes])


def _config(target: str) -> str:
    """The description of a GPU, one of those that the plugin's library holds as text."""
    found = importlib.util.find_spec("jax_plugins.xla_cuda12")
    assert found is not None
    folder, *_ = found.submodule_search_locations or [""]
    wanted = f'device_description_str: "{GPUS[target]}"'.encode()
    with (
        open(pathlib.Path(folder) / "xla_cuda_plugin.so", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
    ):
        start = -1
        while (start := library.find(b"gpu_device_info {", start + 1)) >= 0:
            text = library[start : library.find(b"\0", start)]
            if wanted in text:
                return text.decode()
    raise LookupError(f"The CUDA plugin has no description of {GPUS[target]}.")


class Line(NamedTuple):
    """An instruction of an optimized program: the dtype of its result, what it does, and all of its text."""

    dtype: str
    op: str
    text: str

    def named(self, *attributes: str) -> list[str]:
        """The computations that an attribute names."""
        found = re.search(rf"\b(?:{'|'.join(attributes)})=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.text)
        return re.findall(r"[\w.\-]+", found[1] or found[2]) if found else []


_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")
_NO_KERNEL = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id"}
_COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"}
_NO_ESTIMATE = str(2**63 - 1)
_PRODUCTS = {"dot", "convolution", "ragged-dot", "scaled-dot"}


class Program:
    """A compiled program: `lowered`, its StableHLO before XLA's optimizations, `optimized`, its HLO after them.

    The path that runs is the entry, with the body of a loop and of a condition the branch that is taken where it is
    true: in jaxquant that of finite values.
    """

    def __init__(self, lowered: jax.stages.Lowered):
        self.lowered = lowered.as_text()
        compiled = lowered.compile()
        self.optimized, self._costs = compiled.as_text() or "", compiled.cost_analysis()
        memory: Any = compiled.memory_analysis()
        self.memory: int = memory.temp_size_in_bytes  # beside arguments and results
        self.computations, self.entry, lines = {}, "", {}
        for text in self.optimized.splitlines():
            if begins := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", text):
                name, lines = begins[2], {}
                self.computations[name] = lines
                self.entry = name if begins[1] else self.entry
            elif line := _LINE.match(text):
                lines[line[1]] = Line(line[2].partition("[")[0], line[3], text)

    @property
    def bytes(self) -> float:
        """The bytes that the kernels read and write, of a TPU, as XLA counts them; both branches of a condition."""
        costs: Any = self._costs[0] if isinstance(self._costs, list) else self._costs
        return costs["bytes accessed"]

    @property
    def cycles(self) -> float:
        """XLA's estimate of the cycles of a TPU on the path that runs; NaN if it has none for an instruction.

        What is in a loop counts as often as it runs, where XLA knows that.
        """
        estimate = re.compile(r'"estimated_cycles":"(\d+)"')
        found = [(turns, n) for turns, line in self._path(self.entry) for n in estimate.findall(line.text)]
        return math.nan if _NO_ESTIMATE in [n for _, n in found] else sum(turns * int(n) for turns, n in found)

    @property
    def kernels(self) -> int:
        """The kernels that a GPU is given on the path that runs, copies included; those of a loop once."""
        return sum(line.op not in _NO_KERNEL for _, line in self._path(self.entry))

    @property
    def conditionals(self) -> int:
        return sum(line.op == "conditional" for lines in self.computations.values() for line in lines.values())

    @property
    def collectives(self) -> collections.Counter[str]:
        """How many of each kind the program has. One that runs beside others in parts, a chain, counts once."""
        found, chains = collections.Counter(), set()
        for line in (line for lines in self.computations.values() for line in lines.values()):
            if (kind := line.op.removesuffix("-start")) in _COLLECTIVES:
                if chain := re.search(r'chain_id="(\d+)"', line.text):
                    chains.add((kind, chain[1]))
                else:
                    found[kind] += 1
        return found + collections.Counter(kind for kind, _ in chains)

    @property
    def products(self) -> list[tuple[str, str, str]]:
        """The dtypes of the operands and of the result of each matrix product and convolution."""
        return [
            (*(lines[name].dtype for name in _operands(line)[:2]), line.dtype.strip("("))
            for lines in self.computations.values()
            for line in lines.values()
            if line.op in _PRODUCTS or "__cublas$" in line.text or "__cudnn$" in line.text
        ]

    def written(self, *ops: str) -> int:
        """How many times the StableHLO holds ops, without `stablehlo.`."""
        return sum(len(re.findall(rf"\bstablehlo\.{op}\b", self.lowered)) for op in ops)

    def _path(self, name: str, turns: int = 1) -> list[tuple[int, Line]]:
        """The instructions that run, and how often."""
        path = []
        for line in self.computations[name].values():
            if line.op == "conditional":
                branches = line.named("branch_computations") or line.named("true_computation")
                path += self._path(branches[-1], turns)
            elif line.op in ("while", "call"):
                path += self._path(line.named("body", "to_apply")[0], turns * self._turns(line))
            else:
                path.append((turns, line))
        return path

    def _turns(self, line: Line) -> int:
        """How often a loop runs: what XLA says, or the constant that its counter, from 0, is compared with; else 1."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line.text):
            return int(known[1])
        lines = [v.text for name in line.named("condition") for v in self.computations[name].values()]
        less = next((text for text in lines if "direction=LT" in text), "")
        bounds = re.findall(r"(%?[\w.\-]+) = s32\[\]\S* constant\((\d+)\)", "\n".join(lines))
        return next((int(n) for name, n in bounds if f"{name})" in less), 1)


def _operands(line: Line) -> list[str]:
    inside = line.text.partition(f" {line.op}(")[2].partition(")")[0]
    return re.findall(r"%([\w.\-]+)", inside)


def compiled(f: Callable, args: Any, target: str, out_shardings: Any = None) -> Program:
    """`f(*args)` for devices that are not there.

    `args` are arrays, or what has their shapes and dtypes, and shardings if they are on a mesh of these devices.
    Integers of 4 bits lie as these devices want them.
    """
    stored = functools.partial(stored_for, platform="tpu" if target in TPUS else "cuda")
    is_in_pairs = lambda v: isinstance(v, QArray) and v.pairs is not None
    args = jax.tree.map(lambda v: jax.eval_shape(stored, v) if is_in_pairs(v) else v, args, is_leaf=is_in_pairs)
    alone = SingleDeviceSharding(devices(target)[0])
    is_placed = lambda v: isinstance(v, jax.ShapeDtypeStruct) and v.sharding
    like = lambda v: v if is_placed(v) else jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=alone)
    jitted = jax.jit(f, keep_unused=True, out_shardings=out_shardings)
    return Program(jitted.lower(*jax.tree.map(like, args)))
