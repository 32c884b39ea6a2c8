# SPDX-License-Identifier: Apache-2.0
"""The values that ONNX Runtime computes in integers, as nodes between Q/DQ pairs that it fuses."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._runtime._kernels import bias_integers, limits_of
from .._transform._plan import Value
from . import _onnx_nodes as nodes
from ._onnx_sites import Operand, attributes_of
from ._values import Made, Values, of_channels


class OnnxValues(Values):
    """Activations are uint8: ONNX Runtime makes int8 ones unsigned only where they have one use, as a residual has not.

    An activation is left to the limits of the grid of its result, without which no node would be fused with it.
    """

    runtime = "ONNX Runtime"
    order = 0, 1, 2

    def __init__(self, qparams: Mapping[str, Any]):
        super().__init__(qparams)
        self.arguments: dict[int, Array] = {}  # uint8, by the ids of their stand-ins in float
        self._integers: dict[int, tuple[Array, Array]] = {}

    def argument(self, x: Array) -> Array:
        """The stand-in in float of an argument in uint8, for the op that would quantize it."""
        stands = nodes.of_integers.bind(x)
        self.arguments[id(stands)] = x
        return stands

    def result(self, y: Any) -> Any:
        """The uint8 of a result that is a value on a grid; others are as they are."""
        return self.integers[id(y)][1] if id(y) in self.integers else y

    def on_grid(self, info: Value, y: Array) -> Array:
        grid = self.grid(info.site)
        zero = (grid.zero_point - grid.qmin).astype(jnp.uint8)
        q = self.arguments.get(id(y))
        if q is None:
            q = nodes.quantize.bind(y, grid.scale, zero, axis=None)
        real = nodes.dequantize.bind(q, grid.scale, zero, axis=None)
        self._integers[id(real)] = real, q
        return real

    def integers_of(self, y: Array) -> Array | None:
        return self._integers[id(y)][1]

    def conv(self, info: Value, x: Array, w: Operand, bias: Array | None) -> Array:
        self._check_limits(info)
        w = w.moved(lambda v: v.transpose(info.op.params["dimension_numbers"].rhs_spec))
        return nodes.conv.bind(x, w.real(), *self._bias(info, bias, w, 0), **attributes_of(info.op))

    def dense(self, info: Value, x: Array, w: Operand, bias: Array | None) -> Array:
        self._check_limits(info)
        of_bias = self._bias(info, bias, w, 1)
        return (nodes.gemm if of_bias else nodes.matmul).bind(x, w.real(), *of_bias)

    def mean(self, image: Array, axes: Sequence[int]) -> Array:
        kept = [i for i in range(image.ndim) if i not in axes]
        if kept != [0, 1]:
            image = image.transpose([*kept, *axes])
            lead = [1, 1, *image.shape[: len(kept)]][-max(len(kept), 2) :]
            image = image.reshape(lead[0], math.prod(lead[1:]), *image.shape[len(kept) :])
        return nodes.global_average_pool.bind(image, shape=(*image.shape[:2], *[1] * (image.ndim - 2)))

    def pool(self, info: Value, image: Array, spatial: Sequence[int], back: Sequence[int]) -> Array:
        of = {name: [info.op.params[name][back[i]] for i in spatial] for name in info.op.params}
        return (nodes.max_pool if info.kind == "max_pool" else nodes.average_pool).bind(
            image,
            kernel_shape=tuple(of["window_dimensions"]),
            strides=tuple(of["window_strides"]),
            pads=tuple(pad[side] for side in (0, 1) for pad in of["padding"]),
            shape=tuple(info.op.result.shape[i] for i in back),
        )

    def _add(self, info: Value, a: Array, b: Array) -> Made:
        self._check_limits(info)
        return super()._add(info._replace(low=None, high=None), a, b)

    def _bias(self, info: Value, bias: Array | None, w: Operand, axis: int) -> list[Array]:
        """The bias of a layer, an int32 behind a node that makes a float of it; none where there is no bias."""
        if bias is None:
            return []
        assert info.input is not None
        x_scale = self.grid(info.input).scale
        w_scale = of_channels(w.scale, bias.size)
        zero = jnp.zeros(bias.shape, jnp.int32)
        return [nodes.dequantize.bind(bias_integers(bias, x_scale, w_scale), x_scale * w_scale, zero, axis=0)]

    def _check_limits(self, info: Value) -> None:
        """Raises for an activation that the grid of its result does not imply: no node would be fused with it."""
        grid = self.known_grids(info.site)
        with jax.ensure_compile_time_eval():
            low, high = (np.asarray(v) for v in limits_of(grid, info.low, info.high))
        if (low != grid.qmin).any() or (high != grid.qmax).any():
            ends = [(v - np.asarray(grid.zero_point)) * np.asarray(grid.scale) for v in (grid.qmin, grid.qmax)]
            raise ValueError(
                f"At {info.site.name!r}: ONNX Runtime fuses {info.site.kernel!r} where the grid ends within {info.low} "
                f"and {info.high}, got one from {np.min(ends[0]):.6g} to {np.max(ends[1]):.6g}. Give the value an "
                "affine spec, and keep its scale at or below what its limits allow for, (high - low) / 255."
            )
