# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's quantization ops under TensorFlow's names, with the bits of TensorFlow 2.21's CPU kernels.

Every op is a pure function, compiled with its options static, with a gradient by `jax.custom_vjp`. Being
`custom_vjp`, the ops have reverse mode to any order (`jax.grad`, `jax.jacrev`, `jax.grad` of `jax.grad`); `jax.jvp`
and `jax.jacfwd` raise JAX's TypeError. For a Hessian write `jax.jacrev(jax.grad(f))`.

Not float32: TensorFlow's kernels are float32 (and float64 for `quantize_and_dequantize*`). Here float16 and
bfloat16 are computed in float32 and cast once at the end, and float64 in float64.
"""

from ._fake_quant import FakeQuantGradients as FakeQuantGradients
from ._fake_quant import fake_quant_with_min_max_args as fake_quant_with_min_max_args
from ._fake_quant import fake_quant_with_min_max_args_gradient as fake_quant_with_min_max_args_gradient
from ._fake_quant import fake_quant_with_min_max_vars as fake_quant_with_min_max_vars
from ._fake_quant import fake_quant_with_min_max_vars_gradient as fake_quant_with_min_max_vars_gradient
from ._fake_quant import fake_quant_with_min_max_vars_per_channel as fake_quant_with_min_max_vars_per_channel
from ._fake_quant import (
    fake_quant_with_min_max_vars_per_channel_gradient as fake_quant_with_min_max_vars_per_channel_gradient,
)
from ._grad_pass_through import grad_pass_through as grad_pass_through
from ._quantize import QuantizeOutput as QuantizeOutput
from ._quantize import dequantize as dequantize
from ._quantize import quantize as quantize
from ._quantize import quantize_v2 as quantize_v2
from ._quantize_and_dequantize import quantize_and_dequantize as quantize_and_dequantize
from ._quantize_and_dequantize import quantize_and_dequantize_v2 as quantize_and_dequantize_v2
