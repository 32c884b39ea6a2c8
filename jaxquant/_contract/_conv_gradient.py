# SPDX-License-Identifier: Apache-2.0
"""The gradient of a convolution as a program that other dtypes than float32 can be put into."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .._platform._convolutions import convolution


class Transposed(NamedTuple):
    """The program that is the gradient of a convolution with respect to one operand: moves, and one convolution."""

    jaxpr: Any

    @classmethod
    def of(
        cls, real: Callable, side: int, g: tuple[int, ...], other: tuple[int, ...], shape: tuple[int, ...]
    ) -> "Transposed":
        """The gradient of `real` with respect to operand `side`, of this shape, as a program of g and the other one."""
        struct = lambda shape: jax.ShapeDtypeStruct(shape, np.float32)

        def gradient(g, v):
            linear = lambda x: real(*((x, v) if side == 0 else (v, x)))
            return jax.linear_transpose(linear, struct(shape))(g)[0]

        return cls(jax.make_jaxpr(gradient)(struct(g), struct(other)).jaxpr)

    @property
    def length(self) -> int:
        """The number of products in a sum."""
        length = 0  # of no products there is no convolution
        for eqn in self.jaxpr.eqns:
            if eqn.primitive.name == "conv_general_dilated":
                kernel: Any = eqn.invars[1].aval
                length = math.prod(kernel.shape) // max(kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]], 1)
        return length

    def __call__(self, g: Array, v: Array, dtype: DTypeLike) -> Array:
        """The gradient of factors of another dtype than float32, summed in `dtype`."""
        env: dict[Any, Array] = dict(zip(self.jaxpr.invars, (g, v), strict=True))
        is_literal = lambda v: hasattr(v, "val")
        for eqn in self.jaxpr.eqns:
            arrays = [env[i] for i in eqn.invars if not is_literal(i)]
            of = arrays[0].dtype if arrays else dtype
            ins = [jnp.asarray(i.val, of) if is_literal(i) else env[i] for i in eqn.invars]  # zeros that pad
            is_conv, params = eqn.primitive.name == "conv_general_dilated", eqn.params
            if is_conv and dtype == jnp.int32:
                env[eqn.outvars[0]] = convolution(ins[0], ins[1], params)
                continue
            if is_conv:
                params = {**params, "preferred_element_type": np.dtype(dtype)}
            env[eqn.outvars[0]] = eqn.primitive.bind(*ins, **params)
        return env[self.jaxpr.outvars[0]].astype(dtype)
