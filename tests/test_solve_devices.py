# SPDX-License-Identifier: Apache-2.0
"""Solvers on params that lie on several devices: their bits, their sharding, and no weight that is gathered."""

import functools
import itertools
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inputs import ones
from jax import lax
from jax.sharding import PartitionSpec as P
from lanes import by_default, cases

from jaxquant import Rule, activation_spec, quantize_fn, solve, weight_spec
from jaxquant.solve import _folds, _low_rank, _smooth
from jaxquant.solve._model import model_of

F = np.float32
WIDTH, HIDDEN, LAYERS, SYMBOLS = 32, 64, 2, 16


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(F) / F(4)


def over(v, x):
    return jnp.broadcast_to(v, x.shape)


def normed(x, gain):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + F(1e-6)) * over(gain, x)


def model(params, tokens):
    def layer(x, p):
        h = normed(x, p["gain"]) @ p["up"]
        return x + jax.nn.relu(h + over(p["bias"], h)) @ p["down"], None

    x, _ = lax.scan(layer, params["embed"][tokens], params["layers"])
    return normed(x, params["gain"]) @ params["head"]


LAYER = {
    "gain": 1 + normal(0, LAYERS, WIDTH), "up": normal(1, LAYERS, WIDTH, HIDDEN), "bias": normal(2, LAYERS, HIDDEN),
    "down": normal(3, LAYERS, HIDDEN, WIDTH),
}  # fmt: skip
PARAMS = {
    "embed": normal(4, SYMBOLS, WIDTH), "layers": LAYER, "gain": 1 + normal(5, WIDTH), "head": normal(6, WIDTH, SYMBOLS)
}  # fmt: skip
PARAMS = jax.device_put(PARAMS)
# As models of language are split: what a layer makes by columns, what it takes by rows; and the other way round.
SPLITS = {"columns, then rows": ("up", "head"), "rows, then columns": ("down", "embed")}
TOKENS = np.random.default_rng(7).integers(0, SYMBOLS, (8, 16))


@functools.cache
def quantized():
    specs = weight_spec(4), activation_spec(8)
    q = quantize_fn(model, [Rule("layers/*", *specs, optional=True), Rule("head", *specs)])
    return q, q.observe(PARAMS, TOKENS, gram=True), q.init_qparams(PARAMS, TOKENS, ranges={})


def split(by_columns, devices):
    mesh = jax.make_mesh((devices,), ("d",), (jax.sharding.AxisType.Auto,))

    def put(path, v):
        name = path[-1].key
        is_by_columns = name in by_columns or name in ("gain", "bias")
        axes = (*[None] * (v.ndim - 1), "d") if is_by_columns else (*[None] * (v.ndim - 2), "d", None)
        return jax.device_put(v, jax.NamedSharding(mesh, P(*axes)))

    return jax.tree_util.tree_map_with_path(put, PARAMS)


def call(name, params):
    q, grams, qparams = quantized()
    options = {
        "gptq": {"qparams": qparams}, "adaround": {"qparams": qparams, "steps": 20}, "ranges": {}, "smooth": {},
        "bias_correct": {"qparams": qparams}, "low_rank": {"qparams": qparams, "rank": 4},
    }  # fmt: skip
    args = (grams, TOKENS) if name in options else (TOKENS,)
    return getattr(solve, name)(params, q, *args, **options.get(name, {}))


def check(name, params):
    """What a solver makes of params where they are, against what it makes of them on one device."""
    got, want = call(name, params), call(name, PARAMS)
    if name == "low_rank":
        for path, (a, b) in want.items():
            np.testing.assert_allclose(np.matmul(*map(np.asarray, got[path])), np.matmul(a, b), atol=1e-5)
        return
    assert name == "ranges" or any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (want, PARAMS)), strict=True))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    if name != "ranges":
        jax.tree.map(same_sharding, got, params)


def same_sharding(new, old):
    assert new.sharding.is_equivalent_to(old.sharding, old.ndim), (new.sharding, old.sharding)


def gathered(text):
    """The shapes of what a program gathers that has the elements of a turn of a weight, or more."""
    found = re.findall(r"= \(?\w+\[([\d,]+)\].* all-gather(?:-start)?\(", text)
    return [shape for shape in found if math.prod(map(int, shape.split(","))) >= WIDTH * SYMBOLS]


@pytest.mark.slow
@by_default("rotate-rows, then columns")
@cases(
    ("name", "by_columns"),
    itertools.product(["smooth", "equalize", "low_rank", "bias_correct", "rotate"], SPLITS),
    zip(["equalize", "rotate"], SPLITS, strict=True),
)
def test_params_on_four_devices(name, by_columns):
    check(name, split(SPLITS[by_columns], 4))


@cases("by_columns", SPLITS, ["columns, then rows"])
def test_no_program_gathers_a_weight(by_columns):
    """Rows that meet one factor are reduced first, and candidates and what is lost stay split along their columns."""
    q, grams, qparams = quantized()
    params = split(SPLITS[by_columns], 4)
    for weight in model_of(params, q, grams, (TOKENS,), {}, qparams).weights:
        ids = np.arange(weight.gram.sums.size).reshape(weight.gram.sums.shape)
        these, forms = (
            _smooth._Set((_smooth._Taken(weight.leaf, weight.gram, ids),), ()),
            _smooth._Forms(((weight.form, None),), ()),
        )
        one = weight.turn(0) if weight.turns else weight
        programs = {
            "low_rank": _low_rank._factors.lower(one.lost(), one.gram, one.form, 4, 0.01),
            "smooth": _smooth._error.lower(these, ones(ids.size), forms),
            "largest": _folds._largest.lower([weight.leaf], [np.int32(-1 - ids[..., None])], -1, ids.size),
        }
        for name, lowered in programs.items():
            assert not gathered(lowered.compile().as_text()), (name, weight.path)


SOLVERS = "ranges", "gptq", "adaround", "smooth", "equalize", "low_rank", "bias_correct", "rotate"


def all_solvers(devices):
    """In a process of its own, which has so many devices and leaves all the programs that it compiles in a folder."""
    assert jax.device_count() == devices
    params = split(SPLITS["columns, then rows"], devices)
    for name in SOLVERS:
        check(name, params)


@pytest.mark.slow
def test_all_solvers_on_eight_devices(tmp_path):
    flags = f"--xla_force_host_platform_device_count=8 --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    env = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_NUMPY_RANK_PROMOTION": "raise", "XLA_FLAGS": flags}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    script = "import test_solve_devices as tests; tests.all_solvers(8)"
    here = pathlib.Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", script], env=env, cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    programs = {path.name: path.read_text() for path in tmp_path.glob("*after_optimizations.txt")}
    of_eight = {name: text for name, text in programs.items() if "num_partitions=8" in text}
    assert any("_solved" in name for name in of_eight)
    assert not {name: found for name, text in of_eight.items() if (found := gathered(text))}
