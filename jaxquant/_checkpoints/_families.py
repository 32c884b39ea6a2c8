# SPDX-License-Identifier: Apache-2.0
"""Families of models: the names of their tensors and settings in Hugging Face's files and in GGUF."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np


class Family(NamedTuple):
    """A family of models. A user's own is one more of these: `LLAMA._replace(architecture=..., tensors=...)`.

    Attributes:
      architecture: its name in GGUF.
      tensors: names of Hugging Face -> names of GGUF, `{}` for the number of a layer.
      settings: keys of GGUF, behind the architecture -> keys of config.json.
      in_pairs: names of Hugging Face -> the key of config.json with the number of heads, of weights whose rows GGUF has
        in pairs where Hugging Face has them in halves, for rotary embeddings.
      defaults: keys of GGUF -> values, of settings that config.json may leave out; None for one that GGUF may lack.
      plus_one: names of Hugging Face, of weights of norms that multiply by `1 + weight`: GGUF has the sum, in float32,
        as the model computes it.
      implied: keys of config.json that GGUF lacks -> their value by the others, with which llama.cpp computes.
    """

    architecture: str
    tensors: Mapping[str, str]
    settings: Mapping[str, str]
    in_pairs: Mapping[str, str] = {}
    defaults: Mapping[str, Any] = {}
    plus_one: Collection[str] = ()
    implied: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {}

    def in_gguf(self, name: str) -> str:
        """The name of a tensor in GGUF."""
        general, number = _general(name)
        if general not in self.tensors:
            raise ValueError(
                f"{name!r} is no tensor of {self.architecture!r}, whose names are {', '.join(self.tensors)}. "
                "Add it: family._replace(tensors={**family.tensors, name: name in GGUF})."
            )
        return self.tensors[general].format(number)

    def rows(self, name: str, n: int, config: Mapping[str, Any]) -> np.ndarray | None:
        """The order of the rows of a weight in GGUF; None as they are."""
        key = self.in_pairs.get(_general(name)[0])
        if key is None:
            return None
        heads = config.get(key) or config["num_attention_heads"]
        if not isinstance(heads, int) or heads <= 0 or n % (2 * heads):
            raise ValueError(f"{name!r} has {n} rows, which are no pairs of {heads} heads, as `{key}` says")
        return np.arange(n).reshape(heads, 2, n // heads // 2).swapaxes(1, 2).reshape(-1)

    def added(self, name: str) -> np.float32:
        """What GGUF has more in a weight: 0 or 1."""
        return np.float32(_general(name)[0] in self.plus_one)

    def metadata(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a model in GGUF."""
        config = _with_rope(config)
        found = dict(self.defaults) | {
            key: config[own] for key, own in self.settings.items() if config.get(own) is not None
        }
        if missing := [f"{own} (for {key})" for key, own in self.settings.items() if key not in found]:
            raise ValueError(f"`config` lacks {', '.join(missing)}, without which GGUF has no {self.architecture!r}.")
        for key, of in self.implied.items():
            if config.get(key) not in (None, expected := of(config)):
                raise ValueError(
                    f"`config` has {key}={config[key]!r}, for which GGUF has no key, and llama.cpp computes a "
                    f"{self.architecture!r} with {expected!r}."
                )
        return {f"{self.architecture}.{key}": v for key, v in found.items() if v is not None}

    def config(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a GGUF file as config.json has them."""
        if (found := metadata.get("general.architecture")) != self.architecture:
            raise ValueError(f"expected a GGUF file of the architecture {self.architecture!r}, got {found!r}")
        said = {own: metadata.get(f"{self.architecture}.{key}") for key, own in self.settings.items()}
        of_defaults = {self.settings[key]: v for key, v in self.defaults.items()}
        found = of_defaults | {own: v for own, v in said.items() if v is not None}
        if missing := [own for own in self.settings.values() if own not in found and own != "vocab_size"]:
            raise ValueError(f"the GGUF file lacks {', '.join(missing)} of {self.architecture!r}")
        scaling = metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if scaling != "none":
            found["rope_scaling"] = {"rope_type": scaling}
            found["rope_scaling"] |= {"factor": metadata.get(f"{self.architecture}.rope.scaling.factor")}
        found |= {key: of(found) for key, of in self.implied.items()}
        return {own: v for own, v in found.items() if v is not None}

    def names(self, layers: int) -> list[str]:
        """The names of all tensors of so many layers, as Hugging Face has them."""
        return [name.format(i) for name in self.tensors for i in (range(layers) if "{}" in name else (0,))]


def _with_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the bases of rotary embeddings where transformers 4 has them; raises for scaled positions."""
    of = config.get("rope_parameters") or {}
    everywhere, local = of.get("full_attention", of), of.get("sliding_attention", {})
    scaling = config.get("rope_scaling") or {}
    for name, rope in ("rope_parameters", everywhere), ("rope_parameters", local), ("rope_scaling", scaling):
        if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
            raise ValueError(
                f"`config` has {name} of type {kind!r}, which is not written, and without which positions are others. "
                "Take it out of `config`, and pass llama.cpp's keys for it: metadata={'llama.rope.scaling.type': ...}."
            )
    bases = {"rope_theta": everywhere.get("rope_theta"), "rope_local_base_freq": local.get("rope_theta")}
    return dict(config) | {key: v for key, v in bases.items() if v is not None}


def _general(name: str) -> tuple[str, str]:
    """A name with `{}` for the number of its layer, and that."""
    number = re.search(r"\.(\d+)\.", name)
    return (re.sub(r"\.\d+\.", ".{}.", name, count=1), number[1]) if number else (name, "")


def _tensors(**more: str) -> dict[str, str]:
    """The tensors of a decoder, with more of each layer by their GGUF names."""
    layers = {
        "self_attn.q_proj.weight": "attn_q.weight",
        "self_attn.k_proj.weight": "attn_k.weight",
        "self_attn.v_proj.weight": "attn_v.weight",
        "self_attn.o_proj.weight": "attn_output.weight",
        "mlp.gate_proj.weight": "ffn_gate.weight",
        "mlp.up_proj.weight": "ffn_up.weight",
        "mlp.down_proj.weight": "ffn_down.weight",
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
    } | {f"self_attn.{own.replace('__', '.')}": name for own, name in more.items()}
    return {f"model.layers.{{}}.{name}": f"blk.{{}}.{own}" for name, own in layers.items()} | {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }


_SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_OF_HEADS = {"attention.key_length": "head_dim", "attention.value_length": "head_dim"}
_WITH_HEADS = _SETTINGS | _OF_HEADS
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_DEFAULTS = {"rope.freq_base": 10000.0, "attention.head_count_kv": None}
_IMPLIED = {"hidden_act": lambda config: "silu"}  # and no layer sees a window alone
LLAMA = Family(
    "llama", _tensors(), _WITH_HEADS,
    {f"model.layers.{{}}.self_attn.{own}.weight": key for own, key in _HEADS.items()},
    _DEFAULTS | dict.fromkeys(_OF_HEADS), implied=_IMPLIED | {"sliding_window": lambda config: None},
)  # fmt: skip
_BIASES = {f"{own}_proj__bias": f"attn_{own}.bias" for own in "qkv"}
QWEN2 = Family(
    "qwen2", _tensors(**_BIASES), _SETTINGS,
    defaults=_DEFAULTS, implied=_IMPLIED | {"use_sliding_window": lambda config: False},
)  # fmt: skip
_NORMS = {f"{own}_norm__weight": f"attn_{own}_norm.weight" for own in "qk"}
QWEN3 = QWEN2._replace(architecture="qwen3", tensors=_tensors(**_NORMS), settings=_WITH_HEADS, defaults=LLAMA.defaults)


def _scale_of_queries(config: Mapping[str, Any]) -> float:
    """Gemma's products of queries and keys are divided by its root: the width of a head, but in the model of 27B."""
    is_largest = config["num_hidden_layers"] == 62
    return config["hidden_size"] / config["num_attention_heads"] if is_largest else config["head_dim"]


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    """Five layers of Gemma that see a window, and one that sees everything."""
    return [f"{'sliding' if (i + 1) % 6 else 'full'}_attention" for i in range(config["num_hidden_layers"])]


_OF_WINDOWS = {
    "attention.sliding_window": "sliding_window",
    "rope.freq_base_swa": "rope_local_base_freq",
    "final_logit_softcapping": "final_logit_softcapping",
}
_OF_GEMMA = _tensors(**_NORMS) | {
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.post_attention_norm.weight",
    "model.layers.{}.pre_feedforward_layernorm.weight": "blk.{}.ffn_norm.weight",
    "model.layers.{}.post_feedforward_layernorm.weight": "blk.{}.post_ffw_norm.weight",
}
GEMMA3 = Family(
    "gemma3", _OF_GEMMA, _WITH_HEADS | _OF_WINDOWS,
    defaults=_DEFAULTS | {"rope.freq_base": 1e6, "rope.freq_base_swa": None, "final_logit_softcapping": None},
    plus_one=[name for name in _OF_GEMMA if name.endswith("norm.weight")],
    implied={
        "hidden_activation": lambda config: "gelu_pytorch_tanh", "query_pre_attn_scalar": _scale_of_queries,
        "sliding_window_pattern": lambda config: 6, "layer_types": _layer_types,
    },
)  # fmt: skip
