# SPDX-License-Identifier: Apache-2.0
"""The export of a quantized function as an ONNX model."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

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
    graph: str | None = None,
    names: tuple[Sequence[str], Sequence[str]] | None = None,
    accuracy_level: int = 1,
    integers: bool = False,
) -> Any:
    """The ONNX model of `q(params, *args, qparams=qparams)` as a function of `args`.

    Args:
      q: of `quantize_fn`, with runtime="onnxruntime" for a graph with the bits of the function.
      params: its parameters, frozen or not: constants of the graph.
      *args: arrays or ShapeDtypeStructs; dimensions may be symbolic (`jax.export.symbolic_shape`).
      qparams: as in a call; None where weights alone are quantized and frozen.
      path: of a file to write; None writes none.
      graph: static. "qdq" has pairs of QuantizeLinear and DequantizeLinear, which a runtime fuses into kernels of
        integers; "integers" has MatMulInteger and ConvInteger, and MatMulNBits where the weight alone is quantized.
        None is "qdq" of a q with a runtime, and else "integers".
      names: of the inputs, then of the outputs; None leaves them to jax2onnx.
      integers: static bool. True makes float arguments that are quantized first, and results that have grids, uint8 on
        these grids, `round(x / scale) + zero_point + 128` of a signed spec, as NPUs want them. Only with a runtime.
      accuracy_level: static, of MatMulNBits: 1 adds up in float32; with 4 the runtime makes the inputs int8, too.

    Returns:
      onnx.ModelProto, of opset 20.

    Gradient: none; a file has none.

    Warns:
      UserWarning: of values and ops that the runtime computes in float, whose bits may differ (`q.plan`); none where
        `strict=True`, which raises.

    Raises:
      ImportError: without the extra, `pip install 'jaxquant[onnx]'`.
      ValueError: as a call; for a q that another runtime serves, and for what ONNX has no ops of.

    Source: jax2onnx emits the nodes of the program, and this module the nodes of the sites.

    >>> q = quantize_fn(model, rules, runtime="onnxruntime")  # doctest: +SKIP
    >>> jaxquant.onnx.export(q, frozen, images, qparams=qparams, path="model.onnx")  # doctest: +SKIP
    """
    served = q.runtime
    if served not in (None, "onnxruntime"):
        raise ValueError(f"`q` is served by {served!r}, expected 'onnxruntime'. Make another q for this runtime.")
    try:
        from . import _onnx_nodes as nodes
        from . import _onnx_sites as sites
        from ._onnx_values import OnnxValues
    except ImportError as error:
        raise ImportError(f"jaxquant.onnx needs {error.name}. Install it: pip install 'jaxquant[onnx]'.") from error
    graph = graph or ("qdq" if served else "integers")
    checks.one_of("graph", graph, ("integers", "qdq"))
    for i, v in enumerate(args):
        if not hasattr(v, "shape"):
            raise ValueError(
                f"Argument {i + 1} of q must be an array or a ShapeDtypeStruct, got a {type(v).__name__}: a graph has "
                "arrays for inputs. Close over state: quantize_fn(lambda params, x: f(params, state, x), rules)."
            )
    warn_of_floats(q, params, args, qparams)
    op = functools.partial(sites.op, graph=graph, accuracy_level=accuracy_level)
    values = OnnxValues(qparams or {}) if served and graph == "qdq" else None
    view = q.at_sites(sites.site, op, values)
    f = lambda *args: view(params, *args, qparams=qparams)
    if checks.static_bool("integers", integers):
        if values is None:
            raise ValueError("`integers` is for a graph with a runtime's bits. Make q with runtime='onnxruntime'.")
        f, args = _of_integers(f, values, args)
    model = nodes.emitted(f, *args, names=names)
    if path is not None:
        with open(path, "wb") as file:
            file.write(model.SerializeToString())
    return model


def _of_integers(f: Callable, values: Any, args: Sequence[Any]) -> tuple[Callable, tuple[Any, ...]]:
    """A function of arguments in uint8 where they were float, with its results in uint8; and shapes of these."""
    is_float = [checks.is_float(v.dtype) for v in args]

    def of_integers(*args: Any) -> PyTree:
        outs = f(*(values.argument(v) if of else v for v, of in zip(args, is_float, strict=True)))
        return jax.tree.map(values.result, outs)

    dtypes = [np.dtype(np.uint8) if of else v.dtype for v, of in zip(args, is_float, strict=True)]
    return of_integers, tuple(jax.ShapeDtypeStruct(v.shape, dtype) for v, dtype in zip(args, dtypes, strict=True))
