# SPDX-License-Identifier: Apache-2.0
"""Files of quantized models: GGUF, and folders of Hugging Face; `pip install 'jaxquant[checkpoints]'`."""

from ._checkpoints._checkpoint import Checkpoint as Checkpoint
from ._checkpoints._checkpoint import read as read
from ._checkpoints._families import GEMMA3 as GEMMA3
from ._checkpoints._families import LLAMA as LLAMA
from ._checkpoints._families import QWEN2 as QWEN2
from ._checkpoints._families import QWEN3 as QWEN3
from ._checkpoints._families import Family as Family
from ._checkpoints._ggml_arrays import gguf_spec as gguf_spec
from ._checkpoints._written import write as write
