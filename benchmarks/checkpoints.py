# SPDX-License-Identifier: Apache-2.0
"""Files of language models: SmolLM2-135M on GGUF's lattices, served by llama.cpp; and how fast files are read.

JAX rounds inputs as llama.cpp does, by a spec. Perplexities are of four windows of 512 tokens; logits of one of 128.
"""

import functools
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant import PerBlock, QuantSpec, Rule, quantize, quantize_fn, solve
from jaxquant.checkpoints import LLAMA, gguf_spec, read, write

from . import llama_cpp, smollm2
from .language_model import WINDOW, grams_of_model, text
from .runner import Part, ratios

jax.config.update("jax_platforms", "cpu")  # whatever else there is

MOVED = np.float32(1 + 3e-7)
INPUTS = QuantSpec(bits=8, granularity=PerBlock(-1, 32), scale_dtype="float16", exact_divisor=True)


def missing() -> str:
    return smollm2.missing() or llama_cpp.missing()


def config() -> dict[str, Any]:
    """The settings of the model as config.json has them."""
    return read(smollm2.file(), LLAMA).config


def rules(name: str) -> list[Rule]:
    head = Rule("embedding", gguf_spec("Q8_0"), INPUTS, everywhere=True)
    return [head, *(Rule(f"layers/{own}", gguf_spec(name, -2), INPUTS) for own in smollm2.NAMES if "norm" not in own)]


def served(rounds: int, *names: str) -> Iterator[tuple]:
    for name in names:
        yield name, *_served(*name.split(", "))


def _served(kind: str, how: str = "") -> tuple:
    evaluated, batches = text()
    q, params, tokens = quantize_fn(smollm2.logits, rules(kind)), smollm2.parameters(), evaluated[:1, :128]
    few = params | {"layers": jax.tree.map(lambda v: v[:4], params["layers"])}
    apart = _apart(q, few, evaluated[0, :4], 4)
    qparams = None
    if how == "GPTQ":
        weights, grams = quantize_fn(smollm2.logits, rules(kind)[1:]), grams_of_model()
        qparams = solve.ranges(params, weights, grams, batches[0])
        params = solve.gptq(params, weights, grams, batches[0], qparams=qparams)
        qparams = q.init_qparams(params, tokens, ranges={}) | qparams
    run = jax.jit(functools.partial(q, qparams=qparams))
    frozen = q.freeze(params, tokens, qparams=qparams)
    logits = jax.jit(functools.partial(q, frozen))
    moved = params | {"layers": params["layers"] | {"attention_norm": params["layers"]["attention_norm"] * MOVED}}
    here, near = (np.asarray(run(of, tokens))[0] for of in (params, moved))
    model, nbytes = _loaded(frozen, smollm2.LAYERS)
    of_rows = lambda tokens: jnp.stack([jnp.asarray(model.logits(np.asarray(row))) for row in tokens])
    perplexities = (smollm2.perplexity(f, evaluated[::4]) for f in (logits, of_rows))
    there = model.logits(evaluated[0, :128])
    return f"{nbytes / 1e6:,.0f}", *perplexities, apart, _median(here, there), _median(here, near)


def _loaded(frozen: Any, layers: int) -> tuple[llama_cpp.Model, int]:
    """The file of a frozen model, loaded by llama.cpp; and its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.gguf"
        write(path, smollm2.Tensors(frozen, layers), config() | {"num_hidden_layers": layers}, LLAMA)
        return llama_cpp.Model(path, WINDOW), path.stat().st_size


def _median(a: np.ndarray, b: np.ndarray) -> str:
    """How far apart the logits of the median row are, to the spread of all."""
    return f"{np.median(np.abs(a - b).max(-1)) / b.std():.1e}"


def _apart(q: Any, params: Any, tokens: np.ndarray, layers: int) -> str:
    frozen = q.freeze(params, jnp.asarray(tokens)[None])
    return _median(np.asarray(jax.jit(q)(frozen, tokens[None]))[0], _loaded(frozen, layers)[0].logits(tokens))


def speed(rounds: int, *names: str) -> Iterator[tuple]:
    """Of a GGUF file with two weights, or of a folder."""
    w, of_model = np.random.default_rng(0).normal(size=(4096, 4096)).astype(np.float32), config()
    for name in names:
        is_folder = name == "compressed-tensors"
        spec = QuantSpec(bits=4, granularity=PerBlock(1, 32)) if is_folder else gguf_spec(name)
        tensors = {own: quantize(w, spec) for own in ("gate.weight", "up.weight")}
        family = None if is_folder else LLAMA._replace(tensors={own: own for own in tensors})
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / ("model" if is_folder else "model.gguf")
            write_it = functools.partial(_replaced, path, tensors, of_model, family)
            write_it()
            file = path / "model.safetensors" if is_folder else path
            content = np.fromfile(file, np.uint8)
            plain = functools.partial(np.fromfile, file, np.uint8)
            read_it = ratios({"plain": plain, "own": functools.partial(_whole, path)}, "plain", rounds)["own"]
            plain = functools.partial(content.tofile, pathlib.Path(folder) / "bytes")
            written = ratios({"plain": plain, "own": write_it}, "plain", rounds)["own"]
            yield name, f"{len(content) / 1e6:,.0f}", read_it, written


def _replaced(path: pathlib.Path, *of: Any) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    write(path, *of)


def _whole(path: pathlib.Path) -> dict[str, Any]:
    return jax.block_until_ready(dict(read(path)))


PACKAGES = "gguf", "safetensors"
PARTS = {
    "speed": Part(
        ("two matrices of 4,096 x 4,096 in", "MB", "time to read, to `np.fromfile`", "to write, to `tofile`"), speed,
        11, ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "compressed-tensors"),
    ),
    "served": Part(
        (
            "SmolLM2-135M in", "MB", "perplexity in JAX", "in llama.cpp", "logits apart: 4 layers, 4 tokens",
            "30 layers, 128 tokens",
            "30 layers in JAX, norms times 1 + 3e-7",
        ),
        served, 1, ("Q4_0", "Q4_0, GPTQ", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    ),
}  # fmt: skip
