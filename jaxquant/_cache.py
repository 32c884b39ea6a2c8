# SPDX-License-Identifier: Apache-2.0
"""Quantized arrays that are written and read in parts, such as the keys and values of an attention."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from ._arrays._affine import fake_quant, quantize
from ._arrays._at_rest import Form, at_rest, in_pairs, with_values, written
from ._arrays._qarray import QArray, changed, checked_qarray, inside, window, window_of
from ._arrays._qparams import QParams
from ._arrays._quantized import Quantized
from ._base import _checks as checks
from ._base._groups import Windows, of_rank, windows_of_groups
from ._spec._granularity import PerTensor, granularity_of
from ._spec._spec import QuantSpec, checked_spec, has_grid_of, qparams_shape


def zeros(
    shape: Sequence[int], spec: QuantSpec, qparams: QParams | None = None, *, dtype: DTypeLike = jnp.float32
) -> QArray:
    """A quantized array of zeros, in the fewest bytes: an empty cache.

    `quantize(jnp.zeros(shape, dtype), spec, qparams)`, with integers of 4 bits and fewer two in a byte.

    Args:
      shape: static, a tuple of ints.
      spec: QuantSpec, static. A scale for each token and head of (batch, time, heads, features) is PerChannel((0, 1,
        2)); one for each feature in blocks of 32 tokens PerBlock(1, 32).
      qparams: QParams, traced or not, for a static scale such as PerTensor(). None is for scales that `update_slice`
        fits to what it writes.
      dtype: static, the floating dtype that `dequantize` returns.

    Returns:
      QArray. Where it is large, call this under `jax.jit`, which keeps no zeros in float.

    Gradient: none; integers.

    Raises:
      TypeError, ValueError: as `quantize`.

    Source: `jax.numpy.zeros`.

    >>> from jaxquant import PerChannel, QuantSpec
    >>> from jaxquant.cache import zeros
    >>> zeros((1, 64, 2, 16), QuantSpec(bits=4, granularity=PerChannel((0, 1, 2)))).stored.nbytes
    1024
    """
    shape, spec = checks.static_ints("shape", shape), checked_spec(spec)
    zero = lax.optimization_barrier(jnp.zeros((), dtype))  # else XLA computes it all while compiling, in minutes
    return at_rest(quantize(jnp.broadcast_to(zero, shape), spec, qparams))


def dynamic_slice(operand: QArray, start_indices: Sequence[ArrayLike], slice_sizes: Sequence[int]) -> QArray:
    """A part of a quantized array, of static size, from where data say: such as a window of a cache.

    Args:
      operand: QArray of any shape.
      start_indices: a tuple of one integer for each axis, static or traced. Negatives count from the end. A static one
        must fit; a traced one is clamped as `lax.dynamic_slice` does, so that the part lies inside, and along an axis
        with blocks then rounded down to the start of a block.
      slice_sizes: static, a tuple of one int for each axis; whole blocks. Of values that share one scale along all of
        an axis it may be any number.

    Returns:
      QArray of that shape, whose granularity follows its axes. `q[...]` is the same for static slices, and takes
      integers.

    Gradient: with respect to the scale, when its real values are used; integers have none.

    Raises:
      TypeError: for anything but a QArray, integers and static sizes.
      ValueError: for tuples of another length, sizes beyond the shape, or a part that cuts blocks.
      IndexError: for a static start that is out of range.

    Source: `jax.lax.dynamic_slice`.

    >>> import jax.numpy as jnp
    >>> from jaxquant import PerChannel, QuantSpec, dequantize, quantize
    >>> from jaxquant.cache import dynamic_slice
    >>> q = quantize(jnp.array([[1.0], [2.0], [3.0]]), QuantSpec(granularity=PerChannel(0)))
    >>> dequantize(dynamic_slice(q, (jnp.int32(1), 0), (2, 1))).tolist()
    [[2.0], [3.0]]
    """
    q = checked_qarray("operand", operand)
    sizes = checks.static_ints("slice_sizes", slice_sizes)
    _check_fits("slice_sizes", sizes, q.shape)
    starts = _one_for_each_axis("start_indices", start_indices, q.shape)
    return window(q, _windows("start_indices", q.shape, q.groups, starts, sizes))


def update_slice(
    cache: QArray, new: ArrayLike | QArray, index: Sequence[ArrayLike], *, key: Array | None = None
) -> QArray:
    """A quantized array with a part of it written anew: `lax.dynamic_update_slice` of values and of their scales.

    Groups that share a scale lie wholly in the part that is written, and get the scale of `new`: the result is that
    of quantizing the real values whole. A token of a cache (batch, time, heads, features) with a scale for each token
    and head is written by `update_slice(cache, token[:, None], (0, t, 0, 0))`. A scale that no part of this shape could
    change stays: the scale of PerTensor(), and scales that are shared along each axis on which `new` is the smaller
    one. `new` is then quantized with it, and what is larger saturates.

    Under `jax.jit(..., donate_argnames=...)` and in the carry of `lax.scan` it is written in place. All is static but
    arrays and traced indices, so that no step is traced or compiled again.

    Args:
      cache: QArray of any shape.
      new: floating array of the rank of the cache and at most its size on each axis, quantized here by the spec of the
        cache; or a QArray of this spec and these groups. Where a scale stays, a QArray is quantized again with it,
        which keeps its integers if it has the same scale.
      index: a tuple of one integer for each axis, static or traced: where `new` starts. Negatives count from the end. A
        static one must fit; a traced one is clamped as `lax.dynamic_update_slice` does, so that `new` lies inside (a
        token beyond the last overwrites the last), and along an axis with blocks then rounded down to the start of a
        block.
      key: PRNG key, for stochastic rounding alone.

    Returns:
      QArray, of the same structure, shapes and dtypes as the cache.

    Gradient: none with respect to `new`, as `quantize`.

    Raises:
      TypeError: for an argument of another kind.
      ValueError: for a shape, spec or tuple that does not fit, groups of which `new` is only a part, or scales with a
        scale of the tensor (NVFP4), which is of all blocks.
      IndexError: for a static index that is out of range.

    Source: `jax.lax.dynamic_update_slice`; scales for each token, and keys for each channel in blocks of tokens: Liu et
    al., 2024, "KIVI".

    >>> import jax.numpy as jnp
    >>> from jaxquant import PerChannel, QuantSpec, dequantize
    >>> from jaxquant.cache import update_slice, zeros
    >>> cache = zeros((3, 2), QuantSpec(granularity=PerChannel(0)))
    >>> dequantize(update_slice(cache, jnp.array([[1.0, -1.0]]), (1, 0))).tolist()
    [[0.0, 0.0], [1.0, -1.0], [0.0, 0.0]]
    """
    cache = checked_qarray("cache", cache)
    new = checked_qarray("new", new) if isinstance(new, QArray) else checks.float_array("new", new)
    _check_fits("new", new.shape, cache.shape)
    index = _one_for_each_axis("index", index, cache.shape)
    windows = _windows("index", cache.shape, cache.groups, index, new.shape)
    of = "a QArray as `new`" if isinstance(new, QArray) else str(cache.spec)
    key = checks.rounding_key(key, cache.spec.rounding == "stochastic" and not isinstance(new, QArray), of)
    starts = {axis: start for axis, (start, _) in windows.items()}
    return _updated(cache, new, starts, key)


@jax.jit
def _updated(cache: QArray, new: Array | QArray, starts: dict[int, Any], key: Array | None) -> QArray:
    q, written = as_cache(cache), as_cache(new) if isinstance(new, QArray) else new
    windows = {axis: (start, new.shape[axis]) for axis, start in starts.items()}
    q = Write.of(q, new.shape).at(windows, written, key)
    scales = {"scale": q.scale.reshape(cache.scale.shape), "zero_point": q.zero_point.reshape(cache.scale.shape)}
    return changed(cache, stored=q.stored, **scales, sums=None, summed=None)


def as_cache(q: QArray) -> Quantized:
    """An array that is written in parts: with its zero points, be they 0, which are written in place as all else."""
    return dataclasses.replace(inside(q), zero_point=of_rank(q.zero_point, q.ndim))


class Write(NamedTuple):
    """A write of new values into a cache.

    Attributes:
      cache: that is written.
      shape: of the new values.
      groups: of these, along each axis.
      keeps: whether the scales of the cache stay.
      whole: the axes of the cache of which all is written, and the axes of the new values that run along them.
    """

    cache: Quantized
    shape: tuple[int, ...]
    groups: tuple[int, ...]
    keeps: bool
    whole: Mapping[int, int]

    @classmethod
    def of(cls, cache: Quantized, shape: tuple[int, ...]) -> "Write":
        """The write of a part, or of what is put beside the cache; raises where groups are not whole in it."""
        if cache.spec.has_tensor_scale:
            raise ValueError(
                f"`cache` must have scales of its groups alone, got {cache.spec}, whose scale of the tensor is of all "
                "groups, also of those that are not written. Use mxfp4_spec(axis), or float32 scales."
            )
        keeps = _keeps_scales(cache, shape)
        if not keeps:
            _check_whole_groups(cache, shape)
        each = zip(cache.groups, shape, cache.shape, strict=True)
        groups = (size if g == n else g * size // max(n, 1) if g > 1 else g for g, size, n in each)
        whole = {i: i for i, n in enumerate(cache.shape) if n == shape[i]}
        return cls(cache, shape, tuple(groups), keeps, whole)

    @classmethod
    def of_many(cls, cache: Quantized, shape: tuple[int, ...], axes: Sequence[int | None]) -> "Write":
        """The write of many parts in one array, whose axes run along these of the cache; None for what counts parts."""
        sizes = {axis: size for axis, size in zip(axes, shape, strict=True) if axis is not None}
        one = cls.of(cache, tuple(sizes.get(axis, 1) for axis in range(cache.ndim)))
        counts = (1,) * len(shape) if one.keeps else shape
        groups = (n if axis is None else one.groups[axis] for axis, n in zip(axes, counts, strict=True))
        whole = {axis: i for i, axis in enumerate(axes) if axis is not None and axis in one.whole}
        return cls(cache, shape, tuple(groups), one.keeps, whole)

    def at(self, windows: Windows, new: Array | Quantized, key: Array | None = None) -> Quantized:
        """The cache with new values where the windows are."""
        q, places = self.quantized(new, key), windows_of_groups(self.cache.groups, self.cache.shape, windows)
        cache = self._with_scales(q, lambda v, new: written(v, new, places))
        return with_values(cache.without_sums(), q.values, windows)

    def from_index(self, index: Sequence[Any], new: Array | Quantized) -> Quantized:
        """The cache with new values from a traced index on."""
        return self.at(_windows("index", self.cache.shape, self.cache.groups, index, self.shape), new)

    def by(self, write: Callable[[Array, Array], Array], new: Array | Quantized) -> Quantized:
        """The cache with many parts written anew, as `write(array, new)` does for values and for scales."""
        q = self.quantized(new)
        cache = self._with_scales(q, write).without_sums()
        axis = self.whole.get(cache.ndim + cache.pairs[0]) if cache.pairs and not cache.order else None
        if cache.pairs and axis is not None:
            return dataclasses.replace(cache, stored=write(cache.stored, in_pairs(q.values, axis, cache.pairs[1])))
        form = Form.of(cache)._replace(order=None)
        if form.pairs or cache.order:
            cache = cache.ordered()
        cache = dataclasses.replace(cache, stored=write(cache.stored, q.values.astype(cache.stored.dtype)))
        return dataclasses.replace(cache, **form.stored(cache))

    def _with_scales(self, q: Quantized, write: Callable[[Array, Array], Array]) -> Quantized:
        """The cache with the scales of the new values, unless its own stay."""
        if self.keeps:
            return self.cache
        cache, of = self.cache, lambda v, new: write(v, lax.reshape(new, self.groups))
        return dataclasses.replace(cache, scale=of(cache.scale, q.scale), zero_point=of(cache.zero_point, q.zero_point))

    def quantized(self, new: Array | Quantized, key: Array | None = None) -> Quantized:
        """The new values in integers, with the scales of the cache where these stay."""
        spec, qparams = self._quantizer()
        if isinstance(new, Quantized):
            if not has_grid_of(new.spec, spec) or (not self.keeps and new.groups != self.groups):
                raise ValueError(
                    f"`new` must be of the spec of the cache, {self.cache.spec}, with a scale for each of "
                    f"{self.groups} groups along its axes, got {new.spec} with {new.groups}. Pass it in float, and it "
                    "is quantized here."
                )
            if not self.keeps:
                return new
            new, spec = new.real(jnp.float32), dataclasses.replace(spec, rounding="half_even")
        return as_cache(quantize(new, spec, qparams, key=key))

    def in_float(self, new: Array) -> Array:
        """The new values in float, with the gradient of their quantizer."""
        return fake_quant(new, *self._quantizer())

    def _quantizer(self) -> tuple[QuantSpec, QParams | None]:
        spec = dataclasses.replace(self.cache.spec, granularity=granularity_of(self.groups, self.shape))
        if not self.keeps:
            return spec, None
        own = lambda v: v.astype(jnp.float32).reshape(qparams_shape(spec, self.shape))
        return spec, QParams(own(self.cache.scale), own(self.cache.zero_point))


def _keeps_scales(cache: Quantized, shape: tuple[int, ...]) -> bool:
    """Whether no part of this shape could change a scale: each is also of what lies beside the part."""
    smaller = [i for i, (size, n) in enumerate(zip(shape, cache.shape, strict=True)) if size < n]
    groups, has_blocks = cache.groups, bool(cache.spec.granularity.sizes)
    return cache.spec.granularity == PerTensor() or (
        bool(smaller) and not has_blocks and all(groups[i] == 1 for i in smaller)
    )


def _check_whole_groups(cache: Quantized, shape: tuple[int, ...]) -> None:
    for axis, (g, size, n) in enumerate(zip(cache.groups, shape, cache.shape, strict=True)):
        if g == 1 and size < n:
            raise ValueError(
                f"`new` must hold whole groups that share a scale, which span axis {axis} of `cache`, shape "
                f"{cache.shape}, got shape {shape}: the scale is also of the values that stay. Write all {n} of them, "
                f"or name axis {axis} in the granularity of the cache, which is that of {cache.spec}."
            )
        if 1 < g < n and size % (n // g):
            raise ValueError(
                f"`new` must not cut the blocks of {n // g} that share a scale along axis {axis} of `cache`, shape "
                f"{cache.shape}, got shape {shape}. Write whole blocks, or give the spec smaller ones."
            )


def _windows(
    name: str, shape: tuple[int, ...], groups: tuple[int, ...], starts: Sequence[Any], sizes: Sequence[int]
) -> Windows:
    """A part of an array that cuts no block."""
    of = {
        axis: window_of(name, shape, groups, axis, *window)
        for axis, window in enumerate(zip(starts, sizes, strict=True))
    }
    return {axis: window for axis, window in of.items() if window[1] != shape[axis]}


def _one_for_each_axis(name: str, index: Sequence[ArrayLike], shape: tuple[int, ...]) -> Sequence[Any]:
    if not isinstance(index, tuple | list) or len(index) != len(shape):
        got = f"{len(index)} of them" if isinstance(index, tuple | list) else checks.kind(index)
        zeros = ", ".join(["0"] * len(shape))
        raise ValueError(
            f"`{name}` must be a tuple of {len(shape)} integers, one for each axis of shape {shape}, got {got}. "
            f"The start is ({zeros})."
        )
    return index


def _check_fits(name: str, sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    what = f"`{name}`" if name == "slice_sizes" else f"the shape of `{name}`"
    if len(sizes) != len(shape) or not all(0 <= size <= n for size, n in zip(sizes, shape, strict=True)):
        raise ValueError(
            f"{what} must have one size for each axis of a QArray of shape {shape}, and none above its own, got "
            f"{sizes}. Add axes of size 1, or pass a smaller part."
        )
