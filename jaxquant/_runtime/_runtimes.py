# SPDX-License-Identifier: Apache-2.0
"""The runtimes by their names."""

from ._kernels import Kernels
from ._litert import Reference, Xnnpack
from ._onnxruntime import OnnxRuntime

RUNTIMES: dict[str, Kernels] = {of.name: of for of in (OnnxRuntime(), Xnnpack(), Reference())}
