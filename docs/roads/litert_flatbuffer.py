# SPDX-License-Identifier: Apache-2.0
"""A quantized function as a LiteRT flatbuffer: the function at its sites, converted by litert-converter.

`pip install 'jaxquant[litert]'`. The sites become the composite op `quant.fake_quant`, of which the converter makes
int8 tensors: an op between two of them is an integer op, and everything else stays in float.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jaxlib.mlir.dialects import stablehlo
from litert_converter import converter_api_ext as converter
from litert_converter.mlir import ir, passmanager
from litert_converter.mlir.dialects import stablehlo as stablehlo_of_converter
from straight_line import straight_line

from jaxquant import QParams, fake_quant

STABLEHLO = "1.9.0"  # the version that both write and read
CONSUMERS = "dot_general", "conv_general_dilated", "name"  # of int8: ops, and the points where values are named

mark_p = Primitive("litert_int8")
mark_p.def_abstract_eval(lambda x, *_, **__: ShapedArray(x.shape, x.dtype))


def site(info, x):
    """x, to be a tensor of int8 with these qparams, which are constants once the program is a straight line."""
    if info.qparams is None:
        per_token = info.is_per_token
        fix = "Give its rule one scale, activation_spec(8)" if per_token else "Pass qparams=q.init_qparams(...)"
        made = (
            "has a scale for each token, which each call computes and this graph does not"
            if per_token
            else "is dynamic"
        )
        raise ValueError(f"{info.name!r} {made}; expected qparams. {fix}.")
    if info.spec.dtype != jnp.int8:
        raise ValueError(f"{info.name!r} is of {info.spec.dtype}, expected int8. Take a signed spec of up to 8 bits.")
    if info.op not in CONSUMERS:  # a table of rows that are looked up, which LiteRT has in float
        return fake_quant(x, info.spec, info.qparams)
    return mark_p.bind(x, *info.qparams, spec=info.spec)


def composite(x, scale, zero_point, *, spec):
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


def flatbuffer(q, params, *args, qparams):
    """The bytes of the LiteRT model of q(params, *args, qparams=qparams) as a function of args."""
    view = q.at_sites(site)
    return converted(straight_line(lambda *args: view(params, *args, qparams=qparams), {mark_p.name: composite}), *args)


def converted(f, *args):
    """The flatbuffer of f for arguments of these shapes."""
    lowered = jax.jit(f).lower(*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in args))
    program = stablehlo.serialize_portable_artifact_str(str(lowered.compiler_ir("stablehlo")), STABLEHLO)
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
