# SPDX-License-Identifier: Apache-2.0
"""What settings make of a real language model: SmolLM2-135M, by the perplexity of text that it was not calibrated on.

The text is the topics of Python's own help: 16 windows of 512 tokens of its second half are evaluated, 16 of the first
half calibrate. Bytes are of all parameters, the embedding in float32 where nothing else is said.
"""

import functools
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxquant import (
    PerChannel,
    PerToken,
    QArray,
    QuantSpec,
    Rule,
    activation_spec,
    dot_general,
    merge,
    mxfp4_spec,
    nvfp4_spec,
    quantize,
    quantize_fn,
    range_from_histogram,
    solve,
    weight_spec,
)

from . import smollm2
from .runner import Part, ratios
from .smollm2 import missing as missing

jax.config.update("jax_platforms", "cpu")  # whatever else there is

PARAMS, DOWN = "layers/*", "layers/down"
WINDOW = 512


class Solved(NamedTuple):
    """A function quantized, its parameters, and its qparams; None where ranges are those of the values at hand."""

    q: Any
    params: Any
    qparams: Any = None


Setting = Callable[[Callable, Any], Solved]  # of a function, and its parameters in float
Peer = Callable[[Any], tuple[Callable[..., Array], Any]]  # parameters in float -> f(parameters, tokens), and parameters
Text = tuple[np.ndarray, list[Array]]  # windows to evaluate, and batches to calibrate


def halves() -> tuple[str, str]:
    """Python's help: what calibrates or trains, and what is evaluated."""
    topics = pydoc_data.topics.topics
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    return whole[: len(whole) // 2], whole[len(whole) // 2 :]


@functools.cache
def text() -> Text:
    calibration, evaluated = (smollm2.windows(half, 16, WINDOW) for half in halves())
    return evaluated, [jnp.asarray(part[:, :-1]) for part in np.split(calibration, 4)]


def tokens(bits: int, symmetric: bool = True) -> QuantSpec:
    return activation_spec(bits, symmetric=symmetric, granularity=PerToken())


# ---- Settings.


def nearest(*rules: Any) -> Setting:
    return lambda f, params: Solved(quantize_fn(f, list(rules)), params)


def by_method(method: str, *rules: Any) -> Setting:
    def setting(f: Callable, params: Any) -> Solved:
        q = quantize_fn(f, list(rules))
        return Solved(q, params, q.init_qparams(params, text()[1][0], method=method, ranges={}))

    return setting


def static(percentile: float | None, *rules: Any) -> Setting:
    """One range for an input of each layer, of all calibration batches."""

    def setting(f: Callable, params: Any) -> Solved:
        q, batches = quantize_fn(f, list(rules)), text()[1]
        observe = jax.jit(lambda params, tokens: q.observe(params, tokens, histogram=percentile is not None))
        ranges = merge(*(observe(params, batch) for batch in batches))
        ranges = ranges if percentile is None else range_from_histogram(ranges, percentile)
        return Solved(q, params, q.init_qparams(params, batches[0], ranges=ranges))

    return setting


def grams_of(f: Callable, params: Any) -> Any:
    """The Grams of what the layers' matrices meet, in float, of the batches that calibrate."""
    q = quantize_fn(f, [(PARAMS, weight_spec(8))])
    observe = jax.jit(lambda params, tokens: q.observe(params, tokens, gram=True))
    return functools.reduce(merge, (observe(params, batch) for batch in text()[1]))


@functools.cache
def grams_of_model() -> Any:
    return grams_of(smollm2.logits, smollm2.parameters())


def solved(*rules: Any, levels: bool = True) -> Setting:
    """Scales by `solve.ranges`, and levels by `solve.gptq`."""

    def setting(f: Callable, params: Any) -> Solved:
        q, batches = quantize_fn(f, list(rules)), text()[1]
        grams = grams_of_model() if f is smollm2.logits else grams_of(f, params)
        qparams = solve.ranges(params, q, grams, batches[0])
        params = solve.gptq(params, q, grams, batches[0], qparams=qparams) if levels else params
        return Solved(q, params, qparams)

    return setting


def rotated(setting: Setting) -> Setting:
    """With a head of its own, the residual stream turned by `solve.rotate`, and the inputs of `down` by a rotation."""

    def of_rotated(f: Callable, params: Any) -> Solved:
        q, batch = quantize_fn(f, [Rule(PARAMS, weight_spec(8), tokens(8))]), text()[1][0]
        params = solve.rotate(smollm2.untied(params), q, batch)
        f = solve.with_rotation(f, DOWN)
        return setting(f, f.init(params, batch))

    return of_rotated


EMBEDDING = Rule("embedding", weight_spec(8, channel_axis=0), everywhere=True)
W4, GROUPS = (PARAMS, weight_spec(4)), (PARAMS, weight_spec(4, block_size=64))
SETTINGS: dict[str, Setting] = {
    "W8": nearest((PARAMS, weight_spec(8))),
    "W8A8 per token, affine": nearest(Rule(PARAMS, weight_spec(8), tokens(8, symmetric=False))),
    "W8A8 per token": nearest(Rule(PARAMS, weight_spec(8), tokens(8))),
    "W8A8 per token, the embedding in 8 bits": nearest(EMBEDDING, Rule(PARAMS, weight_spec(8), tokens(8))),
    "W8A8 per token, rotated": rotated(nearest(Rule(PARAMS, weight_spec(8), tokens(8)))),
    "W8A8 static": static(None, Rule(PARAMS, weight_spec(8), activation_spec(8))),
    "W8A8 static, percentile 99.99": static(99.99, Rule(PARAMS, weight_spec(8), activation_spec(8))),
    "W8A8 static, `down` per token": static(
        None, Rule(DOWN, weight_spec(8), tokens(8)), Rule(PARAMS, weight_spec(8), activation_spec(8))
    ),
    "W4, nearest": nearest(W4),
    'W4, method="mse"': by_method("mse", W4),
    "W4, ranges": solved(W4, levels=False),
    "W4, gptq of ranges": solved(W4),
    "W4 in groups of 64, nearest": nearest(GROUPS),
    "W4 in groups of 64, gptq of ranges": solved(GROUPS),
    "W3 in groups of 64, gptq of ranges": solved((PARAMS, weight_spec(3, block_size=64))),
    "NVFP4, nearest": nearest((PARAMS, nvfp4_spec())),
    "MXFP4, nearest": nearest((PARAMS, mxfp4_spec())),
    "W4A8 per token, gptq of ranges": solved(Rule(PARAMS, weight_spec(4), tokens(8))),
    "W4A4 per token, gptq of ranges": solved(Rule(PARAMS, weight_spec(4), tokens(4))),
    "W4A4 per token, rotated, gptq of ranges": rotated(solved(Rule(PARAMS, weight_spec(4), tokens(4)))),
}
CACHES = {"a cache of 8 bits": 8, "a cache of 4 bits": 4}
# Settings whose time is measured; the others have their programs.
TIMED = "W8", "W8A8 per token", "W4, nearest", "W4 in groups of 64, nearest"


# ---- Peers, on the same weights and text.


def by_qwix(bits: int, is_of_inputs: bool) -> Peer:
    """By its own quantization and products, a scale for each output channel, and for each token."""

    def peer(params: Any) -> tuple[Callable[..., Array], Any]:
        import qwix

        in_bits = lambda w: qwix.quantize(w, f"int{bits}", channelwise_axes=[1])
        of = lambda x: qwix.quantize(x, "int8", channelwise_axes=range(x.ndim - 1)) if is_of_inputs else x
        matmul = lambda x, w: qwix.dot_general(of(x), w, (((x.ndim - 1,), (0,)), ((), ())))
        layers = {name: jax.vmap(in_bits)(w) if w.ndim == 3 else w for name, w in params["layers"].items()}
        return functools.partial(smollm2.logits, matmul=matmul), params | {"layers": layers}

    return peer


def by_llm_compressor(block_size: int | None) -> Peer:
    """Its GPTQ of 4 bits on our Grams, with the scales of the nearest grid."""

    def peer(params: Any) -> tuple[Callable[..., Array], Any]:
        import torch
        from compressed_tensors.quantization import QuantizationArgs
        from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

        how = {"strategy": "group", "group_size": block_size} if block_size else {"strategy": "channel"}
        args, grams, batch = QuantizationArgs(num_bits=4, **how), grams_of_model(), text()[1][0]
        q = quantize_fn(smollm2.logits, [(PARAMS, weight_spec(4, narrow_range=False, block_size=block_size))])
        qparams = q.init_qparams(params, batch, ranges={})

        def of_layer(w: np.ndarray, products: np.ndarray, scale: np.ndarray) -> np.ndarray:
            of_rows = torch.tensor(scale.T.copy())[None]
            rows, products = torch.tensor(w.T.copy())[None], torch.tensor(products.reshape(len(w), len(w)))[None]
            found, *_ = quantize_weight(rows, products, of_rows, torch.zeros_like(of_rows), None, args)
            return found[0].numpy().T

        def of_stack(name: str, w: Array) -> Array:
            parts = w, grams[f"layers/{name}"].products, qparams[f"layers/{name}"].scale
            return jnp.asarray(np.stack([of_layer(*layer) for layer in zip(*map(np.array, parts), strict=True)]))

        layers = {name: of_stack(name, w) if w.ndim == 3 else w for name, w in params["layers"].items()}
        return smollm2.logits, params | {"layers": layers}

    return peer


PEERS: dict[str, Peer] = {
    "qwix, W8A8 per token": by_qwix(8, True),
    "qwix, W4": by_qwix(4, False),
    "llm-compressor, W4, GPTQ": by_llm_compressor(None),
    "llm-compressor, W4 in groups of 64, GPTQ": by_llm_compressor(64),
}


# ---- The table.


def nbytes(tree: Any) -> int:
    return sum(v.nbytes for v in jax.tree.leaves(tree, is_leaf=lambda v: isinstance(v, QArray)))


def with_cache(bits: int) -> Callable[..., Array]:
    """The float model, whose keys and values are integers with a scale for each token and head."""
    spec = QuantSpec(bits=bits, granularity=PerChannel((0, 1, 2)))
    rows = QuantSpec(granularity=PerToken())
    return functools.partial(
        smollm2.logits,
        cached=lambda k, v, i: (quantize(k, spec), quantize(v, spec)),
        product=lambda x, cache, numbers: dot_general(x, cache, numbers, spec=rows),
    )


def times(call: Callable[..., Array], args: tuple, params: Any, rounds: int) -> str:
    """Of one token, and of 16, to the float model's."""
    of_float = jax.jit(smollm2.logits)

    def ratio(length: int) -> float:
        tokens = jnp.ones((1, length), jnp.int32)
        runs = {
            "ours": lambda: jax.block_until_ready(call(*args, tokens)),
            "float": lambda: jax.block_until_ready(of_float(params, tokens)),
        }
        return ratios(runs, "float", rounds)["ours"].median

    return f"{ratio(1):.2f} / {ratio(16):.2f}"


def setting_rows(rounds: int, *names: str) -> Iterator[tuple]:
    params, (evaluated, batches) = smollm2.parameters(), text()
    told = lambda f, *args: smollm2.perplexity(lambda tokens: f(*args, tokens), evaluated)
    yield "float32", told(jax.jit(smollm2.logits), params), f"{nbytes(params) / 1e6:,.0f}", "", ""
    for name in names:
        start = time.process_time()
        seconds = lambda start=start: f"{time.process_time() - start:.0f} s"
        if name in CACHES:
            yield f"float32, {name}", told(jax.jit(with_cache(CACHES[name])), params), "", "", ""
        elif name in PEERS:
            f, of_peer = jax.block_until_ready(PEERS[name](params))
            yield name, told(jax.jit(f), of_peer), "", "", seconds()
        else:
            q, of_setting, qparams = SETTINGS[name](smollm2.logits, params)
            more = {} if qparams is None else {"qparams": qparams}
            frozen = jax.block_until_ready(q.freeze(of_setting, batches[0], **more))
            solving, size = seconds(), f"{nbytes(frozen) / 1e6:,.0f}"
            call = jax.jit(lambda params, more, tokens, q=q: q(params, tokens, **more))
            time_of = times(call, (frozen, more), params, rounds) if name in TIMED else ""
            yield name, told(call, frozen, more), size, time_of, solving


def disturbed_rows(rounds: int, *names: str) -> Iterator[tuple]:
    """How many of the greedy tokens are others where the embedding is changed by a millionth, as by other last bits."""
    params, (evaluated, batches) = smollm2.parameters(), text()
    tokens = jnp.asarray(evaluated[:4, :-1])
    noise = 1 + 1e-6 * jax.random.normal(jax.random.key(0), params["embedding"].shape)
    functions: dict[str, tuple[Callable[..., Array], Any]] = {"float32": (smollm2.logits, params)}
    for name in names:
        q, of_setting, _ = SETTINGS[name](smollm2.logits, params)
        functions[name] = q, q.freeze(of_setting, batches[0])
    for name, (f, frozen) in functions.items():
        greedy = jax.jit(lambda params, f=f: jnp.argmax(f(params, tokens), -1))
        changed = greedy(frozen | {"embedding": frozen["embedding"] * noise})
        yield name, f"{float((changed != greedy(frozen)).mean()):.1%}"


PACKAGES = "gguf", "tokenizers", "qwix", "llmcompressor"
COLUMNS = "the layers' 210 matrices", "perplexity", "MB", "time of 1 / 16 tokens, to float", "CPU to solve and freeze"
PARTS = {
    "settings": Part(COLUMNS, setting_rows, 21, (*SETTINGS, *CACHES)),
    "disturbed": Part(("", "greedy tokens that are others"), disturbed_rows, 1, ("W8", "W8A8 per token")),
    "peers": Part(COLUMNS, setting_rows, 21, tuple(PEERS)),
}  # fmt: skip
