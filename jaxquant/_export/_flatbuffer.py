# SPDX-License-Identifier: Apache-2.0
"""A function at its sites as a LiteRT flatbuffer: each site is a composite op of which the converter makes int8."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flatbuffers
import jax
import jax.core
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from jax import Array, lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jaxlib.mlir.dialects import stablehlo
from litert_converter import converter_api_ext as converter
from litert_converter.mlir import ir, passmanager
from litert_converter.mlir.dialects import stablehlo as stablehlo_of_converter

from .._arrays._affine import fake_quant
from .._arrays._qparams import QParams
from .._base._checks import PyTree
from .._spec._spec import QuantSpec, plain_spec
from .._transform._plan import Site, Value
from ._straight_line import straight_line
from ._values import Values, clipped

_STABLEHLO = "1.9.0"  # the version that both write and read
_CONSUMERS = "dot_general", "conv_general_dilated", "name"  # of int8: ops, and the points where values are named

mark_p = Primitive("litert_int8")
mark_p.def_abstract_eval(lambda x, *_, **__: ShapedArray(x.shape, x.dtype))


def site(info: Site, x: Array) -> Array:
    """x, to be a tensor of int8 with these qparams, which are constants once the program is a straight line."""
    if info.qparams is None:
        is_dynamic = info.is_per_token
        fix = "Give its rule one scale, activation_spec(8)" if is_dynamic else "Pass qparams=q.init_qparams(...)"
        made = "has a scale for each token, which each call computes and this graph does not"
        raise ValueError(f"{info.name!r} {made if is_dynamic else 'is dynamic'}; expected qparams. {fix}.")
    if info.spec is None or info.spec.dtype != np.int8:
        raise ValueError(
            f"{info.name!r} is of {info.spec and info.spec.dtype}, expected int8. Take a signed spec of up to 8 bits."
        )
    if info.op not in _CONSUMERS:  # a table of rows that are looked up, which LiteRT has in float
        return fake_quant(x, info.spec, info.qparams)
    return mark_p.bind(x, *info.qparams, spec=info.spec)


class LiteRTValues(Values):
    """Ops that the converter makes int8 of: each result on its grid, images as (N, ..., C)."""

    runtime = "LiteRT"
    order = 0, 2, 1

    def on_grid(self, info: Value, y: Array) -> Array:
        return site(info.site, y)

    def conv(self, info: Value, x: Array, w: Array, bias: Array | None) -> Array:
        (out, inner, *spatial), params = info.op.params["dimension_numbers"].rhs_spec, dict(info.op.params)
        ndim = x.ndim
        images = lax.ConvDimensionNumbers((0, ndim - 1, *range(1, ndim - 1)), (ndim - 1, ndim - 2, *range(ndim - 2)),
                                          (0, ndim - 1, *range(1, ndim - 1)))  # fmt: skip
        kernel = w.transpose([*spatial, inner, out])
        y = lax.conv_general_dilated_p.bind(x, kernel, **{**params, "dimension_numbers": images})
        return clipped(y if bias is None else y + bias.reshape((1,) * (ndim - 1) + (-1,)), info)

    def dense(self, info: Value, x: Array, w: Array, bias: Array | None) -> Array:
        y = x @ w
        return clipped(y if bias is None else y + bias[None], info)

    def mean(self, image: Array, axes: Sequence[int]) -> Array:
        return image.mean(tuple(axes))

    def pool(self, info: Value, image: Array, spatial: Sequence[int], back: Sequence[int]) -> Array:
        of = {
            name: tuple(info.op.params[name][i] for i in back)
            for name in ("window_dimensions", "window_strides", "padding")
        }
        init, add = (-np.inf, lax.max) if info.kind == "max_pool" else (np.float32(0), lax.add)
        y = lax.reduce_window(image, init, add, *of.values())
        return y if info.kind == "max_pool" else y / np.float32(math.prod(of["window_dimensions"]))


def _composite(x: Any, scale: Any, zero_point: Any, *, spec: QuantSpec) -> Array:
    plain_spec("A LiteRT model", spec)
    scale, zero_point = np.asarray(scale), np.asarray(zero_point)
    axes = [i + x.ndim - scale.ndim for i, n in enumerate(scale.shape) if n > 1]
    if len(axes) > 1:
        raise ValueError(f"Scales of shape {scale.shape}: LiteRT has one axis of them.")
    value = lambda x, **_: fake_quant(x, spec, QParams(scale, zero_point))
    if isinstance(x, jax.core.Tracer):
        if spec.bits < 8:
            raise ValueError(f"An input has {spec.bits} bits, LiteRT's int8 has 8.")
    else:
        with jax.ensure_compile_time_eval():
            x = value(x)  # a weight, as the converter rounds it again
    attributes = {"dtype": "i8", "narrow_range": spec.narrow_range, "scale": scale.reshape(-1)}
    if axes:
        attributes["quantization_dimension"] = axes[0]
    if not spec.symmetric:
        attributes["zero_point"] = np.rint(zero_point).reshape(-1).astype(np.int64)
    return lax.composite(value, name="quant.fake_quant")(x, **attributes)


def flatbuffer(f: Callable[..., PyTree], *args: Any) -> bytes:
    """The bytes of the LiteRT model of a function at its sites, for arguments of these shapes."""
    straight = straight_line(f, {mark_p.name: _composite})
    lowered = jax.jit(straight).lower(*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in args))
    program = stablehlo.serialize_portable_artifact_str(str(lowered.compiler_ir("stablehlo")), _STABLEHLO)
    context = ir.Context()
    converter.prepare_mlir_context(context)
    with context, ir.Location.unknown():
        module = stablehlo_of_converter.deserialize_portable_artifact(context, program)
        names = [f"x{i}" for i in range(len(args))], [f"y{i}" for i in range(len(jax.tree.leaves(lowered.out_info)))]
        converter.set_signature(module.operation, "serving_default", *names)
        config = converter.ConvertToTFLConfig()
        config.strict_qdq_mode = True
        converter.run_convert_to_tfl_passes(module, passmanager.PassManager(context=context), config)
        return converter.export_flatbuffer_to_bytes(module.operation)


def with_integers(content: bytes) -> bytes:
    """A model without the ops that quantize its arguments and make floats of its results."""
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content))
    (graph,) = model.subgraphs
    code = lambda op: model.operatorCodes[op.opcodeIndex].builtinCode
    reads = [i for op in graph.operators for i in op.inputs]
    before = {op.inputs[0]: op for op in graph.operators if code(op) == schema.BuiltinOperator.QUANTIZE}
    behind = {op.outputs[0]: op for op in graph.operators if code(op) == schema.BuiltinOperator.DEQUANTIZE}
    first = {i: before[i] for i in map(int, graph.inputs) if i in before and reads.count(i) == 1}
    last = {i: behind[i] for i in map(int, graph.outputs) if i in behind and reads.count(i) == 0}
    inputs = {i: int(op.outputs[0]) for i, op in first.items()}
    outputs = {i: int(op.inputs[0]) for i, op in last.items()}
    graph.inputs = [inputs.get(int(i), int(i)) for i in graph.inputs]
    graph.outputs = [outputs.get(int(i), int(i)) for i in graph.outputs]
    for signature in model.signatureDefs or []:
        for tensors, new in ((signature.inputs, inputs), (signature.outputs, outputs)):
            for tensor in tensors:
                tensor.tensorIndex = new.get(tensor.tensorIndex, tensor.tensorIndex)
    gone = [*first.values(), *last.values()]
    graph.operators = [op for op in graph.operators if not any(op is of for of in gone)]
    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())
