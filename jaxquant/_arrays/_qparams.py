# SPDX-License-Identifier: Apache-2.0
"""The numbers of a quantized tensor, as they are passed and trained, and the spec that they were made for."""

import operator
from typing import Any

import jax
from jax.tree_util import GetAttrKey

from .._spec._spec import QuantSpec


class OfSpec(tuple):
    """A named tuple of two arrays, and beside them a static spec."""

    _fields = "scale", "zero_point"
    spec: QuantSpec | None
    scale: Any = property(operator.itemgetter(0))
    zero_point: Any = property(operator.itemgetter(1))

    def __new__(cls, scale: Any, zero_point: Any, spec: QuantSpec | None = None):
        self = super().__new__(cls, (scale, zero_point))
        self.spec = spec
        return self

    def __getnewargs__(self):  # of copies and pickles
        return *self, self.spec

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changes: Any) -> Any:
        return type(self)(**{**self._asdict(), "spec": self.spec, **changes})

    def __repr__(self):
        of = f", spec={self.spec}" if self.spec else ""
        return f"{type(self).__name__}(scale={self.scale!r}, zero_point={self.zero_point!r}{of})"


class QParams(OfSpec):
    """The numbers of an affine grid: `real = (q - zero_point) * scale`. A pytree of two arrays, unpacked as such.

    Attributes:
      scale: float32 > 0. Scalar per tensor; else of the rank of the tensor, with size 1 on the axes that share a scale
        and the number of blocks on an axis of blocks. Leading axes of size 1 may be left out.
      zero_point: float32 of the same shape, integers in [qmin, qmax]; 0 for a symmetric spec.
      spec: static, the QuantSpec that they were made for, or None. `init_qparams` and `q.init_qparams` set it; using
        the qparams with a spec of another grid then raises. QParams made by hand have none, and are taken as they are.
    """


class Log2QParams(OfSpec):
    """QParams as `to_log2` makes them, to be trained; `from_log2` gives the QParams. A pytree of two arrays.

    Attributes:
      scale: float32, the logarithm to the base 2 of the scale.
      zero_point: as in QParams.
      spec: as in QParams.
    """


_with_keys = lambda v: ([(GetAttrKey(name), array) for name, array in v._asdict().items()], v.spec)
for _kind in (QParams, Log2QParams):
    _of_arrays = lambda spec, arrays, kind=_kind: kind(*arrays, spec=spec)
    jax.tree_util.register_pytree_with_keys(_kind, _with_keys, _of_arrays)
