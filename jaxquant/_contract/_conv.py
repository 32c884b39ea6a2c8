# SPDX-License-Identifier: Apache-2.0
"""The convolution of quantized arrays."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._arrays._codes import centred, codes, sums_along
from .._arrays._qarray import QArray, checked_qarray, inside
from .._arrays._quantized import Quantized
from .._base import _checks as checks
from .._base import _numerics as num
from .._base._axes import Axes, Matrix, in_output
from .._base._groups import broadcast_groups
from .._base._sharding import replicated
from .._platform._convolutions import convolution
from .._platform._dots import integer_sums
from .._spec._spec import QuantSpec
from ._contract import ContractionOp, checked_either, contraction, is_weight_only, scaled, without_zeros
from ._conv_gradient import Transposed
from ._digits import in_digits, sum_of_digits
from ._lowering import Lowering, check_int32, checked_execution, chosen
from ._native import is_native, is_of_floats
from ._operands import Rounding, plain, rounded
from ._weight_only import is_scaled_behind, of_integers


@dataclasses.dataclass(frozen=True)
class Conv(ContractionOp):
    """`lax.conv_general_dilated` with everything static resolved."""

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    a_dilation: tuple[int, ...]
    b_dilation: tuple[int, ...]
    dimensions: lax.ConvDimensionNumbers
    feature_groups: int
    batch_groups: int

    @classmethod
    def of(cls, params: Mapping[str, Any], **attributes: Any) -> Self:
        pads = tuple((low, high) for low, high in params["padding"])
        strides, a_dilation, b_dilation = (
            tuple(params[name]) for name in ("window_strides", "lhs_dilation", "rhs_dilation")
        )
        groups = params["feature_group_count"], params["batch_group_count"]
        return cls(strides, pads, a_dilation, b_dilation, params["dimension_numbers"], *groups, **attributes)

    def axes(self, ndims: Sequence[int]) -> Axes:
        a, b, out = self._axes()
        (_, feature, *_), (_, inner, *_) = self.dimensions.lhs_spec, self.dimensions.rhs_spec
        b[inner] = "sum"
        of_groups = {} if self.feature_groups == 1 else {"inputs": "sum", "features": "each"}
        a[feature] = "inputs" if of_groups else "sum"
        return Axes((tuple(a), tuple(b)), tuple(out), groups=self.feature_groups, of_groups=of_groups)

    def summed_in_gradient(self, side: int, ndims: Sequence[int]) -> Sequence[int]:
        return ()

    def columns(self, side: int, ndims: Sequence[int]) -> None:
        return None

    @property
    def why_one_scale(self) -> str:
        return "" if self.batch_groups == 1 else f"in groups of examples (batch_group_count={self.batch_groups})"

    def rows(self, side: int, x: Array, shape: tuple[int, ...], *more: Array) -> tuple[Array, None]:
        """The windows that meet the kernel: by a convolution with each of its values alone, for each feature group."""
        if side == 0 or self.batch_groups > 1:
            raise ValueError(
                "`gram=True` is for kernels of convolutions with batch_group_count=1, got the parameter as operand "
                f"{side} and batch_group_count={self.batch_groups}. Leave it out by a rule with None."
            )
        out, feature, n = self.dimensions.rhs_spec[0], self.dimensions.out_spec[1], self.feature_groups
        own = [length for i, length in enumerate(shape) if i != out]
        one_each = jnp.moveaxis(jnp.eye(math.prod(own), dtype=x.dtype).reshape(*own, -1), -1, out)
        y = self.of_dtype(x.dtype).real(x, jnp.concatenate([one_each] * n, out))
        rows = jnp.moveaxis(y, feature, -1).reshape(-1, n, math.prod(own))
        return (rows[:, 0] if n == 1 else rows.swapaxes(0, 1)), None

    def matrix(self, side: int, ndims: Sequence[int]) -> Matrix:
        out = self.dimensions.rhs_spec[0]
        return Matrix((), tuple(i for i in range(ndims[1]) if i != out), (out,), self.feature_groups)

    def real(self, a: Array, b: Array, *more: Array) -> Array:
        """The float formulation, which has the gradient of the op."""
        a, conv = self._with_narrow_padding(a, b)
        return lax.conv_general_dilated(a, b, **conv._params, preferred_element_type=self.dtype)

    def _with_narrow_padding(self, a: Array, b: Array) -> tuple[Array, "Conv"]:
        """`a` padded, where the padding is negative or wider than the window, and the convolution that is left to do.

        XLA:CPU reads outside of an input with negative low padding (openxla/xla 48713), which is what padding wider
        than the window becomes in a gradient.
        """
        windows = ((b.shape[i] - 1) * d for i, d in zip(self.dimensions.rhs_spec[2:], self.b_dilation, strict=True))
        if all(0 <= p <= window for pads, window in zip(self.padding, windows, strict=True) for p in pads):
            return a, self
        return self._padded(a, jnp.zeros((), a.dtype))

    @property
    def _params(self) -> dict[str, Any]:
        """The parameters of the primitive."""
        return {
            "window_strides": self.strides,
            "padding": self.padding,
            "lhs_dilation": self.a_dilation,
            "rhs_dilation": self.b_dilation,
            "dimension_numbers": self.dimensions,
            "feature_group_count": self.feature_groups,
            "batch_group_count": self.batch_groups,
        }

    def _of_integers(self, x: Array, w: Array) -> Array:
        """The convolution of integers, summed in int32."""
        x, conv = self._with_narrow_padding(x, w)
        return convolution(x, w, conv._params)

    def exact(self, a: Quantized, b: Quantized, *more: Array) -> Array:
        """The scaled integer convolution; or of floats as they are."""
        length = self._length(b)
        specs, summed, shapes = (a.spec, b.spec), self.contracted_axes((a.ndim, b.ndim)), (a.shape, b.shape)
        if is_native(self.execution, a, b, summed):
            acc = self.of_dtype(jnp.float32).real(*_of_one_dtype(a, b))
            return scaled(acc, self.in_output(0, a.step, shapes), self.in_output(1, b.step, shapes))
        lowering = chosen(LOWERINGS, self.execution)
        (a, *_), (b, *_) = parts = in_digits(a, b, summed, lambda: lowering.takes(length, *specs))
        acc = sum_of_digits(*parts, specs, length, lowering.check, lambda x, w: lowering.product(self, x, w, length))
        return scaled(acc, self.in_output(0, a.scale, shapes), self.in_output(1, b.scale, shapes))

    def accumulated(self, a: Quantized, b: Quantized) -> Array:
        check_int32(self._length(b), a.spec, b.spec)
        return self._in_integers(a, b, self._length(b))

    def _length(self, b: Quantized) -> int:
        return math.prod(b.shape) // max(b.shape[self.dimensions.rhs_spec[0]], 1)

    def operand_gradient(
        self, side: int, g: Array, q: Quantized, shape: tuple[int, ...], rounding: Rounding, *more: Array
    ) -> tuple[Array, Array | None]:
        """The gradient with respect to operand `side`, of this shape, from the integers of the other one.

        A scale for each example, or output feature, is multiplied into g: the gradient sums over them.
        """
        g, q = jax.tree.map(replicated, (g, q))  # which a convolution sums over, or shares, in every axis
        precision, step = self.gradient[side], q.step
        if any(n != 1 for n in step.shape):
            shapes = (shape, q.shape) if side == 0 else (q.shape, shape)
            g, step = g * self.in_output(1 - side, step, shapes), jnp.ones((1,) * q.ndim, jnp.float32)
        transposed = Transposed.of(self.of_dtype(jnp.float32).real, side, g.shape, q.shape, shape)
        if not isinstance(precision, QuantSpec):
            low = centred(q, jnp.float32).astype(jnp.bfloat16)
            return num.guard(transposed(g.astype(jnp.bfloat16), low, jnp.float32) * step), None
        out = self.dimensions.out_spec
        kind = precision.granularity.of_op([i for i in range(g.ndim) if i != out[side]], g.shape)
        spec = dataclasses.replace(precision, granularity=kind)
        summed = tuple(i for i in range(g.ndim) if i not in kind.axes)
        a, largest = rounded(g, spec, None if is_of_floats(self.execution, spec) else summed, rounding)
        b = plain(q, q.values, step, q.zero_point)

        def contracted(x: Quantized, w: Quantized) -> Array:
            wide = max(x.spec.bits, w.spec.bits) > 8
            (v, _), (u, zero) = codes(x, wide), codes(w, wide)
            acc = transposed(v, u, jnp.int32)
            if zero is None:
                return acc
            zeros = jnp.broadcast_to(broadcast_groups(zero, w.shape), w.shape).astype(jnp.int8)
            return acc - transposed(v, zeros, jnp.int32)

        axes = summed, tuple(range(q.ndim))
        if is_native(self.execution, a, b, axes):
            acc = transposed(*_of_one_dtype(a, b), jnp.float32)
        else:
            lowering, specs, length = chosen(LOWERINGS, self.execution), (spec, q.spec), transposed.length
            (a, *_), (b, *_) = parts = in_digits(a, b, axes, lambda: lowering.takes(length, *specs))
            acc = sum_of_digits(*parts, specs, length, lowering.check, contracted)
        *operands, output = self._axes()
        return scaled(acc, in_output("g", a.scale, a.shape, output, operands[side]), b.scale), largest

    def _axes(self) -> tuple[list[str], list[str], list[str]]:
        """The names of the axes of both operands and of the output, which share the examples and the features.

        Scales may differ along these; not along examples that are taken in groups.
        """
        specs = self.dimensions.lhs_spec, self.dimensions.rhs_spec, self.dimensions.out_spec
        a, b, output = ([f"{operand}{i}" for i in range(len(spec))] for operand, spec in zip("aby", specs, strict=True))
        (batch, *_), (out, *_), (examples, features, *_) = specs
        output[examples], output[features], b[out] = "examples", "features", "features"
        if self.batch_groups == 1:
            a[batch] = "examples"
        return a, b, output

    def _in_integers(self, a: Quantized, b: Quantized, length: int) -> Array:
        wide = max(a.spec.bits, b.spec.bits) > 8
        (x, a_zero), (w, b_zero) = codes(a, wide), codes(b, wide)
        op = self
        if a_zero is not None:  # what pads is real 0, the zero point, not the code 0
            x, op = self._padded(x, broadcast_groups(a_zero, a.shape))
        acc = op._of_integers(x, w)
        shapes = a.shape, b.shape
        place = lambda side, v: None if v is None else self.in_output(side, v, shapes)

        def columns() -> Array:
            _, *summed = self.dimensions.rhs_spec
            sums = sums_along(b, summed)
            return lax.expand_dims(integer_sums(w, summed), summed) if sums is None else sums

        of_a = place(0, a_zero), lambda: self.in_output(1, columns(), shapes)
        of_b = place(1, b_zero), lambda: op._of_integers(x, jnp.ones_like(w))
        return without_zeros(acc, length, of_a, of_b)

    def _padded(self, x: Array, zero: Array) -> tuple[Array, "Conv"]:
        """`x` padded and dilated by its zero point, and the convolution that is left to do."""
        config = [(0, 0, 0)] * x.ndim
        for axis, (low, high), dilation in zip(
            self.dimensions.lhs_spec[2:], self.padding, self.a_dilation, strict=True
        ):
            config[axis] = (low, high, dilation - 1)
        fill = zero.astype(x.dtype)
        if all(n == 1 for n in fill.shape):
            padded = lax.pad(x, lax.squeeze(fill, range(fill.ndim)), config)
        else:
            padded = lax.pad(x, jnp.int8(0), config)
            padded = jnp.where(lax.pad(jnp.ones_like(x), jnp.int8(0), config) == 1, padded, fill)
        none = tuple((0, 0) for _ in self.padding)
        return padded, dataclasses.replace(self, padding=none, a_dilation=(1,) * len(none))


LOWERINGS = {
    "int8": Lowering(Conv._in_integers, check_int32),
    "native": Lowering(Conv._in_integers, check_int32),  # of integers; floats have no need of one
}


@functools.partial(jax.jit, static_argnames="conv")
def _in_float(conv: Conv, a: Any, b: Any) -> Array:
    """`conv` of an operand in float and a QArray, in the dtype of the former."""
    side = int(isinstance(b, QArray))
    q, x = (inside(b), a) if side else (inside(a), b)
    if is_scaled_behind(conv, side, q, x):
        return of_integers(conv, side, q, x)
    return conv.of_dtype(x.dtype).real(*((x, q.real(x.dtype)) if side else (q.real(x.dtype), x)))


def _of_one_dtype(a: Quantized, b: Quantized) -> tuple[Array, Array]:
    """The values, which a convolution wants in one dtype: where formats differ, in one that holds both."""
    dtype = a.values.dtype if a.values.dtype == b.values.dtype else jnp.bfloat16
    return a.values.astype(dtype), b.values.astype(dtype)


def _steps(name: str, value: object, spatial: int) -> tuple[int, ...]:
    """Strides or dilations, one for each spatial axis."""
    steps = checks.static_ints(name, value)
    if len(steps) != spatial or any(n < 1 for n in steps):
        raise ValueError(
            f"`{name}` must be {spatial} ints of at least 1, one a spatial axis, got {steps}. Pass them all."
        )
    return steps


def _pads(padding: Any, spatial: int) -> tuple[tuple[int, int], ...]:
    is_pairs = isinstance(padding, tuple | list) and all(isinstance(p, tuple | list) and len(p) == 2 for p in padding)
    if not is_pairs or len(padding) != spatial:
        raise TypeError(
            '`padding` must be "SAME", "SAME_LOWER", "VALID" or a pair (low, high) for each spatial axis, got '
            f"{padding!r}. Pass ((1, 1), (1, 1)) for 1 on every side of an image."
        )
    return tuple((checks.static_int("padding", low), checks.static_int("padding", high)) for low, high in padding)


def conv_general_dilated(
    a: Any,
    b: Any,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    *,
    execution: str = "auto",
) -> Array:
    """The convolution of the real values of two quantized arrays, computed in integers; padding is real 0.

    Args:
      a: QArray, the input; its scale may differ from example to example.
      b: QArray, the kernel; its scale may differ between output features. One of the two may be a floating array
        (weight-only), which is convolved with the integers, as in `dot_general`.
      window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, batch_group_count:
        static, as in `jax.lax.conv_general_dilated`.
      execution: static, as in `dot_general`; does not affect the result, but for "native". There operands of two
        formats are multiplied in bfloat16, which holds both.

    Returns:
      float32, or the dtype of the operand in float, in the shape of `lax.conv_general_dilated`.

    Gradient: as `lax.conv_general_dilated` of the dequantized arrays, so with respect to the scales; integers have
    none. `jax.jvp` raises.

    Raises:
      TypeError: for anything but two QArrays, or one and a floating array.
      ValueError: for shapes or arguments that `jax.lax.conv_general_dilated` refuses, a scale that changes along
        contracted axes (also by PerBlock), or a window so large that its sum may not fit int32.

    Source: Jacob et al., 2018; ONNX ConvInteger.

    >>> import jax.numpy as jnp
    >>> from jaxquant import QParams, QuantSpec, conv_general_dilated, quantize
    >>> x = quantize(jnp.ones((1, 1, 4)), QuantSpec(symmetric=False), QParams(0.5, 7.0))
    >>> kernel = quantize(jnp.ones((1, 1, 3)), QuantSpec(), QParams(1.0, 0.0))
    >>> conv_general_dilated(x, kernel, (1,), "SAME").tolist()
    [[[2.0, 3.0, 3.0, 2.0]]]
    """
    execution = checked_execution(execution, LOWERINGS)
    in_float = is_weight_only(a, b)
    checked = checked_either if in_float else checked_qarray
    a, b = checked("a", a), checked("b", b)
    if a.ndim != b.ndim or a.ndim < 2:
        raise ValueError(
            f"`a` and `b` must have one rank, at least 2, got shapes {a.shape} and {b.shape}. Add the batch, feature "
            "or kernel axes that are missing."
        )
    dimensions = lax.conv_dimension_numbers(a.shape, b.shape, dimension_numbers)
    ones = (1,) * (a.ndim - 2)
    window_strides = _steps("window_strides", window_strides, a.ndim - 2)
    a_dilation = _steps("lhs_dilation", ones if lhs_dilation is None else lhs_dilation, a.ndim - 2)
    b_dilation = _steps("rhs_dilation", ones if rhs_dilation is None else rhs_dilation, a.ndim - 2)
    groups = checks.static_int("feature_group_count", feature_group_count)
    batch_groups = checks.static_int("batch_group_count", batch_group_count)
    if isinstance(padding, str):
        checks.one_of("padding", padding, ("SAME", "SAME_LOWER", "VALID"))
        if any(d != 1 for d in a_dilation):
            raise ValueError(
                f"`padding` must be pairs of numbers where lhs_dilation is not 1, got {padding!r} with lhs_dilation="
                f"{a_dilation}. Compute them for the transposed convolution."
            )
        windows = [(b.shape[i] - 1) * d + 1 for i, d in zip(dimensions.rhs_spec[2:], b_dilation, strict=True)]
        padding = lax.padtype_to_pads([a.shape[i] for i in dimensions.lhs_spec[2:]], windows, window_strides, padding)
    pads = _pads(padding, a.ndim - 2)
    conv = Conv(window_strides, pads, a_dilation, b_dilation, dimensions, groups, batch_groups, execution=execution)
    # JAX checks the shapes, as it does for floats.
    jax.eval_shape(conv.real, *(jax.ShapeDtypeStruct(q.shape, np.float32) for q in (a, b)))
    return _in_float(conv, a, b) if in_float else contraction(a, b, conv)
