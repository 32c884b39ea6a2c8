# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on a CPU, by ctypes: the compiled library in npm's package @node-llama-cpp/linux-x64.

LLAMA_CPP_PREBUILT names its folder `bins/linux-x64`. The structs are of llama.cpp v0.5.0, which version 3.22.1 holds.
"""

import ctypes
import functools
import os
import pathlib
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from typing import Any

import numpy as np

F32 = 0  # ggml's type of the cache


def missing() -> str:
    return "" if os.environ.get("LLAMA_CPP_PREBUILT") else (
        "needs `npm pack @node-llama-cpp/linux-x64@3.22.1`, unpacked, and LLAMA_CPP_PREBUILT=its folder bins/linux-x64"
    )  # fmt: skip


def _fields(*parts: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in parts for name in names.split()]


class _Model(ctypes.Structure):
    _fields_ = _fields(
        (c_void_p, "devices tensor_buft_overrides"), (c_int32, "n_gpu_layers split_mode load_mode lazy_mode main_gpu"),
        (c_void_p, "tensor_split progress_callback progress_callback_user_data kv_overrides"),
        (c_bool, "vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp"),
    )  # fmt: skip


class _Context(ctypes.Structure):
    _fields_ = _fields(
        (c_uint32, "n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq"),
        (c_int32, "n_threads n_threads_batch ctx_type rope_scaling_type pooling_type attention_type flash_attn_type"),
        (c_float, "rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow"),
        (c_uint32, "yarn_orig_ctx"), (c_float, "defrag_thold"), (c_void_p, "cb_eval cb_eval_user_data"),
        (c_int, "type_k type_v"), (c_void_p, "abort_callback abort_callback_data"),
        (c_bool, "embeddings offload_kqv no_perf op_offload swa_full kv_unified"), (c_void_p, "samplers"),
        (c_size_t, "n_samplers"), (c_void_p, "ctx_other"),
    )  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = _fields(
        (c_int32, "n_tokens"), (POINTER(c_int32), "token"), (POINTER(c_float), "embd"),
        (POINTER(c_int32), "pos n_seq_id"), (POINTER(POINTER(c_int32)), "seq_id"), (POINTER(c_int8), "logits"),
    )  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL:
    folder = pathlib.Path(os.environ["LLAMA_CPP_PREBUILT"]).resolve()
    backends = ctypes.CDLL(str(next(folder.glob("libggml.v*.so"))))
    backends.ggml_backend_load_all_from_path(os.fsencode(folder))  # the best one for this processor
    found = ctypes.CDLL(str(next(folder.glob("libllama.v*.so"))))
    signatures = {
        "llama_backend_init": (None,), "llama_log_set": (None, c_void_p, c_void_p),
        "llama_model_default_params": (_Model,), "llama_context_default_params": (_Context,),
        "llama_model_load_from_file": (c_void_p, c_char_p, _Model),
        "llama_init_from_model": (c_void_p, c_void_p, _Context), "llama_model_get_vocab": (c_void_p, c_void_p),
        "llama_vocab_n_tokens": (c_int32, c_void_p), "llama_batch_init": (_Batch, c_int32, c_int32, c_int32),
        "llama_batch_free": (None, _Batch), "llama_decode": (c_int32, c_void_p, _Batch),
        "llama_get_logits_ith": (POINTER(c_float), c_void_p, c_int32), "llama_free": (None, c_void_p),
        "llama_model_free": (None, c_void_p),
    }  # fmt: skip
    for name, (result, *arguments) in signatures.items():
        getattr(found, name).restype, getattr(found, name).argtypes = result, arguments
    default = found.llama_context_default_params()  # so that structs of another version are no silent wrong ones
    if (default.n_ctx, default.n_batch, default.type_k, default.offload_kqv) != (512, 2048, 1, True):
        raise ImportError(f"the structs of {folder} are not of llama.cpp v0.5.0")
    found.llama_backend_init()
    return found


_SILENT = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda *_: None)


class Model:
    """A GGUF file, loaded with what rounds least: no repacked weights, a float32 cache, no flash attention."""

    def __init__(self, path: str | os.PathLike, length: int, threads: int = 2):
        self.lib = lib = _library()
        lib.llama_log_set(ctypes.cast(_SILENT, c_void_p), None)
        params = lib.llama_model_default_params()
        params.n_gpu_layers, params.check_tensors, params.use_extra_bufts = 0, True, False
        self.model = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise ValueError(f"llama.cpp does not load {path}")
        context = lib.llama_context_default_params()
        context.n_ctx = context.n_batch = context.n_ubatch = max(64, length)
        context.n_threads = context.n_threads_batch = threads
        context.type_k = context.type_v = F32
        context.flash_attn_type = 0
        self.params = context
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def logits(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """(tokens, vocabulary) in float32, each token seeing itself and those before it."""
        lib, n = self.lib, len(tokens)
        context, batch = lib.llama_init_from_model(self.model, self.params), lib.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), i, 1, 1
            batch.seq_id[i][0] = 0
        try:
            if code := lib.llama_decode(context, batch):
                raise ValueError(f"llama_decode returned {code}")
            rows = (np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (self.n_vocab,)) for i in range(n))
            return np.stack([row.copy() for row in rows])
        finally:
            lib.llama_batch_free(batch)
            lib.llama_free(context)

    def generated(self, tokens: Sequence[int], n: int) -> list[int]:
        """The most likely n tokens behind these."""
        found = list(map(int, tokens))
        for _ in range(n):
            found.append(int(self.logits(found)[-1].argmax()))
        return found[len(tokens) :]
