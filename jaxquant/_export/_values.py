# SPDX-License-Identifier: Apache-2.0
"""The values that a runtime computes in integers, as ops of a graph: images in one order of their axes throughout."""

import abc
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._arrays._grid import frame_of, grid_of
from .._arrays._qparams import QParams
from .._base._checks import PyTree
from .._runtime._kernels import Grid
from .._transform._plan import Site, Value
from .._transform._quantize_fn import QuantizedFunction


class Made(NamedTuple):
    """The result of an op.

    Attributes:
      y: its float values.
      axes: the axes of y that the axes of the value are; None where y is reshaped.
      behind: of y on its grid the value.
    """

    y: Array
    axes: Sequence[int] | None = None
    behind: Callable[[Array], Array] = lambda y: y


class Values(abc.ABC):
    """The function for values of `q.at_sites`; one for each export.

    A value is put back into its own order of axes, and an op that takes images finds it as it was before.

    Attributes:
      runtime: in words.
      order: of a convolution's axes (examples, channels, spatial ...) as this runtime has them: a permutation of three,
        of which the last stands for all spatial axes.
      qparams: as they are passed to the function, known.
    """

    runtime: str
    order: tuple[int, int, int]

    def __init__(self, qparams: Mapping[str, Any]):
        self.qparams = qparams
        self._images: dict[int, tuple[Array, Array, tuple[int, ...]]] = {}  # by the id of the first, which lives here
        self.integers: dict[int, tuple[Array, Array]] = {}  # of values, likewise

    def __call__(self, info: Value, *operands: Any) -> Array:
        made: Made = getattr(self, f"_{info.kind}")(info, *operands)
        y = self.on_grid(info, made.y)
        axes = made.axes or ()
        is_moved = list(axes) != [*range(len(axes))]
        behind = (lambda v: v.transpose(axes)) if is_moved else made.behind
        value = behind(y)
        if is_moved:
            self._images[id(value)] = value, y, tuple(int(i) for i in np.argsort(axes))
        value = info.move(value)
        if (integers := self.integers_of(y)) is not None:
            self.integers[id(value)] = value, info.move(behind(integers))
        return value

    # What a runtime has ops of.

    @abc.abstractmethod
    def on_grid(self, info: Value, y: Array) -> Array:
        """The float values of y on the grid of a value."""

    @abc.abstractmethod
    def conv(self, info: Value, x: Array, w: Any, bias: Array | None) -> Array:
        """A convolution with its bias and activation, of images in the order of the runtime and the kernel as it is."""

    @abc.abstractmethod
    def dense(self, info: Value, x: Array, w: Any, bias: Array | None) -> Array:
        """The product of two matrices, with its bias and activation."""

    @abc.abstractmethod
    def mean(self, image: Array, axes: Sequence[int]) -> Array:
        """The means over axes, which are kept or not."""

    @abc.abstractmethod
    def pool(self, info: Value, image: Array, spatial: Sequence[int], back: Sequence[int]) -> Array:
        """The largest values, or the averages, of windows along the spatial axes of an image.

        `back` has for each axis of the image the axis of the value.
        """

    def integers_of(self, y: Array) -> Array | None:
        """The integers behind a result of `on_grid`; None where the graph has none of its own."""
        return None

    # What is the same for all.

    def grid(self, site: Site) -> Grid:
        """The grid of a value; in a scan, of one turn."""
        if site.qparams is None or site.spec is None:
            raise ValueError(f"At {site.name!r}: expected qparams, got none. Pass qparams=q.init_qparams(...).")
        return _grid(site, site.qparams)

    def known_grids(self, site: Site) -> Grid:
        """The grid of a value, in known numbers; in a scan, of all turns."""
        scale, zero_point = self.qparams[site.entry]
        with jax.ensure_compile_time_eval():
            return _grid(site, QParams(jnp.asarray(scale).reshape(-1), jnp.asarray(zero_point).reshape(-1)))

    def image(self, x: Array, order: Sequence[int]) -> Array:
        """A value with its axes in this order."""
        known = self._images.get(id(x))
        if known is not None and known[2] == tuple(order):
            return known[1]
        return x if list(order) == [*range(x.ndim)] else x.transpose(order)

    def ordered(self, spec: Sequence[int]) -> list[int]:
        """Axes (examples, channels, spatial ...) in the order of the runtime."""
        parts = [spec[:1], spec[1:2], spec[2:]]
        return [axis for i in self.order for axis in parts[i]]

    def _known_order(self, *values: Array) -> tuple[int, ...]:
        """The order of the first of some values that is an image, or its own."""
        return next((of[2] for v in values if (of := self._images.get(id(v)))), tuple(range(values[0].ndim)))

    def _layer(self, info: Value, lhs: Any, rhs: Any, bias: Array | None = None) -> Made:
        is_weight_first = info.is_weight_first
        w, x = (lhs, rhs) if is_weight_first else (rhs, lhs)
        if info.op.name == "conv_general_dilated":
            return self._conv(info, x, w, bias)
        return self._dense(info, x, w, bias)

    def _conv(self, info: Value, x: Array, w: Any, bias: Array | None) -> Made:
        numbers = info.op.params["dimension_numbers"]
        if info.is_weight_first:
            raise ValueError(f"At {info.site.name!r}: the kernel of a convolution must be its second operand.")
        n = w.shape[numbers.rhs_spec[0]]
        image = self.image(x, self.ordered(numbers.lhs_spec))
        return Made(
            self.conv(info, image, w, of_channels(bias, n)), np.argsort(self.ordered(numbers.out_spec)).tolist()
        )

    def _dense(self, info: Value, x: Array, w: Any, bias: Array | None) -> Made:
        """A product of matrices: rows of inputs with columns of the weight."""
        contracted, batch = info.op.params["dimension_numbers"]
        if batch[0]:
            raise ValueError(
                f"At {info.site.name!r}: {self.runtime} has no kernel of integers for a weight with batch axes, got "
                f"{info.op.params['dimension_numbers']}. Leave the op in float by a rule with None."
            )
        of_w, of_x = contracted if info.is_weight_first else contracted[::-1]
        rows, columns = ([i for i in range(v.ndim) if i not in of] for v, of in ((x, of_x), (w, of_w)))
        length, n = (math.prod(w.shape[i] for i in of) for of in (of_w, columns))
        order = [*rows, *of_x]
        matrix = x if x.ndim == 2 and order == [0, 1] else x.transpose(order).reshape(-1, length)
        weight = moved(w, lambda v: v.transpose([*of_w, *columns]))
        if w.ndim > 2:
            flat = lambda v: v.reshape(length, -1) if v.shape == weight.shape else v.reshape(1, -1)
            weight = moved(weight, flat)
        y = self.dense(info, matrix, weight, of_channels(bias, n))
        split = [*(x.shape[i] for i in rows), *(w.shape[i] for i in columns)]
        turned = [*range(len(rows), len(split)), *range(len(rows))]
        apart = lambda y: y if len(rows) == len(columns) == 1 else y.reshape(split)
        return Made(y, behind=(lambda y: apart(y).transpose(turned)) if info.is_weight_first else apart)

    def _quantize(self, info: Value, x: Array) -> Made:
        return Made(x)

    def _add(self, info: Value, a: Array, b: Array) -> Made:
        order = self._known_order(a, b)
        y = clipped(self.image(a, order) + self.image(b, order), info)
        return Made(y, np.argsort(order).tolist())

    def _mean(self, info: Value, x: Array) -> Made:
        order = self._known_order(x)
        y = self.mean(self.image(x, order), [order.index(axis) for axis in info.op.params["axes"]])
        kept = [axis for axis in order if axis not in info.op.params["axes"]]
        if kept != sorted(kept):  # put into its own order while it is an image
            order = [*range(x.ndim)]
            y = self.mean(x, info.op.params["axes"])
        return Made(y, behind=lambda y: y.reshape(info.result.shape))

    def _max_pool(self, info: Value, x: Array) -> Made:
        params = info.op.params
        windows, strides = params["window_dimensions"], params["window_strides"]
        spatial = [i for i in range(x.ndim) if windows[i] > 1 or strides[i] > 1 or any(params["padding"][i])]
        lead = [i for i in range(x.ndim) if i not in spatial]
        if len(lead) != 2:
            raise ValueError(
                f"At {info.site.name!r}: {self.runtime} pools images with an axis of examples and one of channels, got "
                f"windows {windows} of an array of shape {x.shape}. Leave the value in float by a rule with None."
            )
        order = self.ordered([*lead, *spatial])
        y = self.pool(info, self.image(x, order), [order.index(i) for i in spatial], order)
        return Made(y, np.argsort(order).tolist())

    _average_pool = _max_pool

    def _concatenate(self, info: Value, *operands: Array) -> Made:
        order = self._known_order(*operands)
        y = jnp.concatenate([self.image(v, order) for v in operands], order.index(info.op.params["dimension"]))
        return Made(y, np.argsort(order).tolist())


def warn_of_floats(
    q: QuantizedFunction, params: PyTree, args: Sequence[Any], qparams: Mapping[str, Any] | None
) -> None:
    """Says what a runtime computes in float, of a function that has its bits."""
    if q.runtime and (floats := q.plan(params, *args, **({"qparams": qparams} if qparams else {})).in_float):
        warnings.warn(
            f"{q.runtime!r} computes {len(floats)} values and ops in float, whose bits may differ from `q`: "
            f"{', '.join(floats)}. quantize_fn(..., strict=True) makes it an error.",
            stacklevel=3,
        )


def _grid(site: Site, qparams: QParams) -> Grid:
    """The grid of qparams, as it is used."""
    spec = site.spec
    assert spec is not None
    grid = grid_of(qparams, frame_of(spec)).effective()
    one = lambda v: v.reshape(()) if v.size == 1 else v
    zero = jnp.zeros_like(grid.scale) if grid.zero_point is None else grid.zero_point
    return Grid(one(grid.scale.astype(jnp.float32)), one(zero).astype(jnp.int32), int(spec.qmin), int(spec.qmax))


def moved(v: Any, move: Callable[[Array], Array]) -> Any:
    """An array moved, or an operand whose qparams move alike."""
    return v.moved(move) if hasattr(v, "moved") else move(v)


def of_channels(v: Array | None, n: int) -> Any:
    """One number for each channel."""
    return v if v is None else jnp.broadcast_to(v.reshape(-1), (n,))


def clipped(y: Array, info: Value) -> Array:
    """y within the limits of an activation."""
    y = y if info.low is None else jnp.maximum(y, np.float32(info.low))
    return y if info.high is None else jnp.minimum(y, np.float32(info.high))
