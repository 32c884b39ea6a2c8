# SPDX-License-Identifier: Apache-2.0
"""Integers of a file, as they lie there: two in a byte, or one; and the QArrays of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .._arrays._at_rest import Form, at_rest, lying_as
from .._arrays._qarray import QArray, changed, checked_qarray
from .._spec._spec import QuantSpec
from ._bits import halves, in_halves


class Values(NamedTuple):
    """Integers of a file.

    Attributes:
      array: (..., n) of them, or (..., n / 2) of bytes.
      distance: how far apart along the last axis the two of a byte are, the first in its lower half; 0 for one in each.
    """

    array: np.ndarray
    distance: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.array.shape[:-1], self.array.shape[-1] * (2 if self.distance else 1)

    def signed(self, bits: int) -> "Values":
        """Unsigned ones less the middle."""
        if self.distance:
            return Values(self.array ^ np.uint8(0x88), self.distance)
        return Values((self.array - np.uint8(2 ** (bits - 1))).view(np.int8))

    def unsigned(self, bits: int) -> "Values":
        """The inverse of `signed`."""
        if self.distance:
            return self.signed(bits)
        return Values(self.array.view(np.uint8) + np.uint8(2 ** (bits - 1)))

    def apart(self) -> np.ndarray:
        """One in each byte, unsigned."""
        if not self.distance:
            return self.array
        return halves(self.array.reshape(*self.array.shape[:-1], -1, self.distance)).reshape(self.shape)


def put(v: Any) -> Array:
    """An array, which is a copy of what is mapped from a file; no program is compiled for it."""
    if v.dtype.name in ("float64", "int64", "uint64") and not jax.config.read("jax_enable_x64"):
        raise ValueError(f"expected an array that jax holds, got {v.dtype.name}. Enable jax_enable_x64 to read it.")
    return jax.device_put(v if v.flags.writeable else np.array(v))


def held(
    values: Values, scale: Any, spec: QuantSpec, zero_point: Any = None, dtype: DTypeLike | None = None,
    tensor_scale: Any = None,
) -> QArray:  # fmt: skip
    """The QArray of a file's arrays, lying as the platform wants it; on CPUs two values in a byte as in the file."""
    zero = np.zeros(scale.shape, spec.dtype) if zero_point is None else zero_point
    scale, zero = (v if isinstance(v, QArray) else put(v) for v in (scale, zero))
    dtype = jnp.dtype(scale.dtype if dtype is None else dtype)
    if not values.distance:
        array = put(values.array.astype(spec.dtype, copy=False))
        q = QArray(array, scale, zero, spec, dtype, tensor_scale=tensor_scale)
        return at_rest(checked_qarray("it", q), is_weight=True)
    q = changed(QArray(put(values.array), scale, zero, spec, dtype), pairs=(-1, values.distance))
    form = Form.on(jax.default_backend(), q, is_weight=True)
    return checked_qarray("it", q) if form.pairs else lying_as(checked_qarray("it", q), form)


def values_of(q: QArray, distance: int = 0) -> Values:
    """The integers of a QArray, two in a byte at this distance, as they are."""
    if distance and q.pairs == (-1, distance) and q.order is None:
        return Values(np.asarray(q.stored), distance)
    values = np.asarray(q.values).view(np.uint8)
    if not distance:
        return Values(values)
    packed = in_halves(values.reshape(*values.shape[:-1], -1, 2 * distance))
    return Values(packed.reshape(*values.shape[:-1], -1), distance)
