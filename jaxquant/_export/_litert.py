# SPDX-License-Identifier: Apache-2.0
"""The export of a quantized function as a LiteRT model."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from .._base import _checks as checks
from .._base._checks import PyTree
from .._transform._quantize_fn import QuantizedFunction
from ._values import warn_of_floats


def export(
    q: QuantizedFunction,
    params: PyTree,
    *args: Any,
    qparams: Mapping[str, Any] | None = None,
    path: str | os.PathLike | None = None,
    integers: bool = False,
) -> bytes:
    """The LiteRT model of `q(params, *args, qparams=qparams)` as a function of `args`.

    Args:
      q: of `quantize_fn`, with runtime="litert" for a model with the bits of the function by XNNPACK, or
        "litert_reference" by the reference kernels and on microcontrollers.
      params: its parameters, frozen or not: constants of the model.
      *args: arrays or ShapeDtypeStructs, whose shapes the model has.
      qparams: as in a call.
      path: of a file to write; None writes none.
      integers: static bool. True makes arguments that are quantized first, and results that have grids, int8 on these
        grids, as NPUs want them. Only with a runtime.

    Returns:
      bytes, a flatbuffer.

    Gradient: none; a file has none.

    Warns:
      UserWarning: of values and ops that the runtime computes in float, whose bits may differ (`q.plan`); none where
        `strict=True`, which raises.

    Raises:
      ImportError: without the extra, `pip install 'jaxquant[litert]'`.
      ValueError: as a call; for a q that ONNX Runtime serves, and for what LiteRT has no int8 of.

    Source: litert-converter, of StableHLO in which each site is the composite op `quant.fake_quant`.

    >>> q = quantize_fn(model, rules, runtime="litert")  # doctest: +SKIP
    >>> jaxquant.litert.export(q, frozen, images, qparams=qparams, path="model.tflite")  # doctest: +SKIP
    """
    if q.runtime == "onnxruntime":
        raise ValueError("`q` is served by 'onnxruntime', expected 'litert'. Make another q for this runtime.")
    try:
        from . import _flatbuffer as flatbuffers
    except ImportError as error:
        raise ImportError(f"jaxquant.litert needs {error.name}. Install it: pip install 'jaxquant[litert]'.") from error
    warn_of_floats(q, params, args, qparams)
    view = q.at_sites(flatbuffers.site, None, flatbuffers.LiteRTValues(qparams or {}) if q.runtime else None)
    content = flatbuffers.flatbuffer(lambda *args: view(params, *args, qparams=qparams), *args)
    if checks.static_bool("integers", integers):
        if not q.runtime:
            raise ValueError("`integers` is for a model with a runtime's bits. Make q with runtime='litert'.")
        content = flatbuffers.with_integers(content)
    if path is not None:
        pathlib.Path(path).write_bytes(content)
    return content
