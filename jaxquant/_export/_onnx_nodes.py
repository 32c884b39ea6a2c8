# SPDX-License-Identifier: Apache-2.0
"""Nodes of an ONNX graph as primitives of JAX, which jax2onnx emits; and the model of a program that has some."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import Primitive, jaxpr_as_fun
from jax2onnx import to_onnx
from jax2onnx.plugins.plugin_system import PrimitiveLeafPlugin, register_primitive

from .._arrays._affine import quantize as quantized
from .._arrays._qparams import QParams
from .._base._checks import PyTree
from .._spec._granularity import PerChannel, PerTensor
from .._spec._spec import QuantSpec
from ._straight_line import straight_line

RUNTIME = "com.microsoft"  # the domain of ONNX Runtime's own ops
Names = tuple[Sequence[str], Sequence[str]]  # of the inputs and of the outputs of a graph


def node(
    name: str, shape_and_dtype: Callable[..., tuple[Any, Any]], compute: Callable[..., Array] | None = None,
    attributes: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda params: params,
) -> Primitive:  # fmt: skip
    """A primitive that jax2onnx emits as the ONNX node of this name; `compute` is its value on NumPy arrays."""
    primitive = Primitive(f"onnx_{name}")
    primitive.def_abstract_eval(lambda *avals, **params: ShapedArray(*shape_and_dtype(*avals, **params)))
    if compute is not None:
        primitive.def_impl(lambda *values, **params: compute(*map(np.asarray, values), **params))

    def lower(self: Any, context: Any, eqn: Any) -> None:
        ins = [context.get_value_for_var(v, name_hint=context.fresh_name("in")) for v in eqn.invars]
        out = context.get_value_for_var(eqn.outvars[0], name_hint=context.fresh_name("out"))
        result = getattr(context.builder, name)(*ins, _outputs=[out.name], **attributes(eqn.params))
        result.type, result.shape = out.type, out.shape
        context.bind_value_for_var(eqn.outvars[0], result)

    about = {"onnx": [{"component": name, "doc": ""}], "jax_doc": "", "since": "0", "context": "jaxquant"}
    register_primitive(jaxpr_primitive=primitive.name, component=primitive.name, testcases=[], **about)(
        type(primitive.name, (PrimitiveLeafPlugin,), {"lower": lower})
    )
    return primitive


def to_integers(x: Any, scale: Any, zero_point: Any, axis: int | None) -> Array:
    """QuantizeLinear of constants, by the quantizer that it stands for."""
    shape = () if axis is None else [-1 if i == axis else 1 for i in range(x.ndim)]
    granularity = PerTensor() if axis is None else PerChannel(axis)
    spec = QuantSpec(signed=zero_point.dtype == np.int8, symmetric=False, granularity=granularity)
    as_float = lambda v: jnp.asarray(v, jnp.float32).reshape(shape)
    return quantized(jnp.asarray(x), spec, QParams(as_float(scale), as_float(zero_point))).values


def _of_axis(params: Mapping[str, Any]) -> Mapping[str, Any]:
    return {} if params["axis"] is None else params


def _product(dtype: Any) -> Callable[..., tuple[Any, Any]]:
    return lambda x, w, *_: ((*jnp.broadcast_shapes(x.shape[:-2], w.shape[:-2]), x.shape[-2], w.shape[-1]), dtype)


def _of_shape(dtype: Any) -> Callable[..., tuple[Any, Any]]:
    return lambda *_, shape, **__: (shape, dtype)


def _as_lists(params: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in params.items() if name != "shape"}


def _same(x: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    return x.shape, x.dtype


quantize = node("QuantizeLinear", lambda x, s, z, axis: (x.shape, z.dtype), to_integers, _of_axis)
dequantize = node("DequantizeLinear", lambda x, s, z, axis: (x.shape, s.dtype), None, _of_axis)
matmul = node("MatMul", _product(jnp.float32))
gemm = node("Gemm", _product(jnp.float32))
matmul_integer = node("MatMulInteger", _product(jnp.int32))
matmul_nbits = node(
    "MatMulNBits", lambda x, *_, N, **__: ((*x.shape[:-1], N), x.dtype), None, lambda of: {**of, "_domain": RUNTIME}
)
conv = node("Conv", _of_shape(jnp.float32), None, _as_lists)
conv_integer = node("ConvInteger", _of_shape(jnp.int32), None, _as_lists)
global_average_pool = node("GlobalAveragePool", _of_shape(jnp.float32), None, _as_lists)
average_pool = node("AveragePool", _of_shape(jnp.float32), None, _as_lists)
max_pool = node("MaxPool", _of_shape(jnp.float32), None, _as_lists)
relu = node("Relu", _same)
of_integers = Primitive("floats_of_an_integer_argument")  # which nothing may read, but the op that quantizes it
of_integers.def_abstract_eval(lambda x: ShapedArray(x.shape, np.dtype(np.float32)))


def emitted(f: Callable[..., PyTree], *args: Any, names: Names | None = None) -> onnx.ModelProto:
    """The ONNX model of a function of arrays.

    Opset 20: with 21 ONNX Runtime makes an invalid graph of some int8 convolutions.
    """
    # Else the weights would be computed in float, and relu would be a maximum.
    straight = straight_line(f, {dequantize.name: dequantize.bind, "relu": relu.bind})
    # jax2onnx exchanges functions of flax and jax.numpy while it traces; it sees the program only.
    traced = jax.make_jaxpr(straight)(*args)
    if any(eqn.primitive is of_integers for eqn in traced.eqns):
        raise ValueError(
            "`integers=True` wants arguments that are quantized before anything reads them, and one is read in float. "
            "Leave `integers` out, or quantize what reads it."
        )
    program = jaxpr_as_fun(traced)
    structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in args]
    results = lambda outs: outs[0] if len(outs) == 1 else tuple(outs)
    inputs, outputs = names or (None, None)
    found = dict(jnp.__dict__)
    try:
        model = to_onnx(
            lambda *args: results(program(*args)), structs, opset=20, input_names=inputs, output_names=outputs
        )
    finally:
        jnp.__dict__.update(found)  # jax2onnx leaves a jnp.cumsum of its own there, which takes less
    if any(of.domain == RUNTIME for of in model.graph.node) and all(of.domain != RUNTIME for of in model.opset_import):
        model.opset_import.add(domain=RUNTIME, version=1)
    return model
