# SPDX-License-Identifier: Apache-2.0
"""Convolutions of integers by platform.

For GPUs, where XLA has none that sum in int32, products of matrices: the windows of the input, stacked, meet the kernel
in one product, whose sums are those of the convolution. cuDNN's convolutions of int8 are not used: they return float32,
how they accumulate is not documented, and in groups they are wrong (openxla/xla 49123). For CPUs, where XLA's
convolutions in groups are slower in int8 than in float32, convolutions of float32, as long as their sums are exact.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# In bytes, an 80th of the memory of an H100. Stacked windows are written and read once, which is less traffic than a
# sum in int32 that is read and written for each place in a window: only their size speaks against them.
LARGEST_STACK = 2**30
PARAMS = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
    *("feature_group_count", "batch_group_count"),
)


class _Axis(NamedTuple):
    """A spatial axis: output `i` sums inputs at `i * stride + j * dilation`, one for each place `j` in a window."""

    size: Any  # of the output; symbolic in an exported program
    stride: int
    window: int
    dilation: int

    @property
    def reach(self) -> int:
        """The number of inputs from the first to the last place of a window."""
        return (self.window - 1) * self.dilation + 1


def convolution(x: Array, w: Array, params: Mapping[str, Any]) -> Array:
    """The convolution of integers, summed in int32.

    `params` are those of the primitive `conv_general_dilated`; what they say of dtypes is not read.
    """
    return _convolution(x, w, tuple((name, params[name]) for name in PARAMS))


@functools.partial(jax.jit, static_argnums=2)  # so that it is traced once for each shape
def _convolution(x: Array, w: Array, items: tuple[tuple[str, Any], ...]) -> Array:
    params = dict(items)
    plain = lambda x, w: lax.conv_general_dilated(x, w, **params, preferred_element_type=jnp.int32)

    def by_products(x: Array, w: Array) -> Array:
        y = jax.eval_shape(plain, x, w)
        products: Any = lambda x, w: of_products(x, w, y, params)
        if any(axis is not None for v in (x, w) for axis in jax.typeof(v).sharding.spec):
            # On a mesh with explicit axes JAX asks for the sharding of more than a convolution needs one for.
            products = jax.sharding.auto_axes(products, out_sharding=y.sharding)
        return products(x, w)

    in_float = lambda x, w: lax.conv_general_dilated(*(v.astype(jnp.float32) for v in (x, w)), **params)
    on_cpu = {"cpu": lambda x, w: in_float(x, w).astype(jnp.int32)} if _is_exact_in_float(x, w, params) else {}
    return lax.platform_dependent(x, w, cuda=by_products, rocm=by_products, **on_cpu, default=plain)


def _is_exact_in_float(x: Array, w: Array, params: Mapping[str, Any]) -> bool:
    """Whether it is a convolution in groups all of whose sums float32 holds.

    None with negative padding, where XLA:CPU reads outside of an input (openxla/xla 48713).
    """
    length = math.prod(w.shape) // max(w.shape[params["dimension_numbers"].rhs_spec[0]], 1)
    is_narrow = x.dtype == w.dtype == jnp.int8 and length * 2**14 <= 2**24
    return is_narrow and params["feature_group_count"] > 1 and min(sum(params["padding"], (0,))) >= 0


def of_products(x: Array, w: Array, y: jax.ShapeDtypeStruct, params: Mapping[str, Any]) -> Array:
    """The convolution of x and w in int32, which has the shape of y, by products of matrices."""
    if 0 in (*x.shape, *w.shape, *y.shape):
        return jnp.zeros(y.shape, jnp.int32)
    (examples, features, *space), (outer, inner, *window), out = params["dimension_numbers"]
    x, w = lax.transpose(x, (examples, *space, features)), lax.transpose(w, (*window, inner, outer))
    sizes = [y.shape[i] for i in out[2:]]
    axes = list(map(_Axis, sizes, params["window_strides"], w.shape, params["rhs_dilation"]))
    # A window more than there is behind, so that a symbolic length is known to hold one.
    pads = [
        (low, high + axis.reach - 1, n - 1)
        for (low, high), axis, n in zip(params["padding"], axes, params["lhs_dilation"], strict=True)
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
    w = lax.reshape(w, [math.prod(w.shape[:-2]), *w.shape[-2:]])
    groups = params["batch_group_count"], params["feature_group_count"]
    product = lambda x, w: _product(x, w, groups)
    size = math.prod([x.shape[0], *sizes, w.shape[0], x.shape[-1], x.dtype.itemsize])
    is_large = isinstance(size, int) and size > LARGEST_STACK
    sums = _in_turn(x, w, axes, product) if is_large else product(_stacked(x, axes), w)
    return lax.transpose(sums, np.argsort([out[0], *out[2:], out[1]]))


def _product(x: Array, w: Array, groups: tuple[int, int]) -> Array:
    """(examples, *space, places, features) times (places, inner, outer), in int32: (examples, *space, outer)."""
    (examples, *space, places, _), (_, inner, outer) = x.shape, w.shape
    x = lax.reshape(x, [groups[0], examples // groups[0], *space, places, groups[1], inner])
    w = lax.reshape(w, [places, inner, *groups, outer // math.prod(groups)])
    numbers = ((x.ndim - 3, x.ndim - 1), (0, 1)), ((0, x.ndim - 2), (2, 3))
    y = lax.dot_general(x, w, numbers, preferred_element_type=jnp.int32)
    y = lax.transpose(y, (*range(2, y.ndim - 1), 0, 1, y.ndim - 1))
    return lax.reshape(y, [*y.shape[:-3], outer])


def _stacked(x: Array, axes: list[_Axis]) -> Array:
    """(examples, *space, features) -> (examples, *space, places, features)."""
    n, sizes = len(axes), [axis.size for axis in axes]
    if all(axis.window == 1 and axis.size == length for axis, length in zip(axes, x.shape[1:-1], strict=True)):
        return lax.expand_dims(x, [n + 1])
    starts = lax.concatenate([lax.broadcasted_iota(jnp.int32, (*sizes, 1), i) for i in range(n)], n)
    if any(axis.stride > 1 for axis in axes):
        starts = starts * np.array([axis.stride for axis in axes], np.int32).reshape([1] * n + [n])
    numbers = lax.GatherDimensionNumbers((0, *range(n + 1, 2 * n + 2)), (), tuple(range(1, n + 1)))
    whole = x.shape[0], *(axis.reach for axis in axes), x.shape[-1]
    x = lax.gather(x, starts, numbers, whole, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    if any(axis.dilation > 1 for axis in axes):
        x = lax.slice(x, [0] * x.ndim, x.shape, (1,) * (n + 1) + tuple(axis.dilation for axis in axes) + (1,))
    return lax.reshape(x, [x.shape[0], *sizes, math.prod(axis.window for axis in axes), x.shape[-1]])


def _in_turn(x: Array, w: Array, axes: list[_Axis], product: Callable[[Array, Array], Array]) -> Array:
    """The sum of one product for each place in a window."""
    counts, steps = [axis.window for axis in axes], [axis.dilation for axis in axes]
    extents = [(axis.size - 1) * axis.stride + 1 for axis in axes]

    def of_place(i: Any, kernel: Array) -> Array:
        starts = [at * step for at, step in zip(jnp.unravel_index(i, counts), steps, strict=True)]
        part = lax.dynamic_slice(x, (0, *starts, 0), (x.shape[0], *extents, x.shape[-1]))
        part = lax.slice(part, [0] * part.ndim, part.shape, (1, *(axis.stride for axis in axes), 1))
        return product(lax.expand_dims(part, [x.ndim - 1]), kernel[None])

    add = lambda total, place: (total + of_place(*place), None)
    return lax.scan(add, of_place(0, w[0]), (jnp.arange(1, w.shape[0]), w[1:]))[0]
