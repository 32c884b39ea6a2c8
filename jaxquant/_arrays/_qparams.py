# SPDX-License-Identifier: Apache-2.0
"""The numbers of a quantized tensor, as they are passed and trained, and the spec that they were made for."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from .._base import _checks as checks
from .._spec._spec import QuantSpec


class _OfSpec(tuple):
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


class QParams(_OfSpec):
    """The numbers of an affine grid: `real = (q - zero_point) * scale`. A pytree of two arrays, unpacked as such.

    Attributes:
      scale: float32 > 0. Scalar per tensor; else of the rank of the tensor, with size 1 on the axes that share a scale
        and the number of blocks on an axis of blocks. Leading axes of size 1 may be left out.
      zero_point: float32 of the same shape, integers in [qmin, qmax]; 0 for a symmetric spec.
      spec: static, the QuantSpec that they were made for, or None. `init_qparams` and `q.init_qparams` set it; using
        the qparams with a spec of another grid then raises. QParams made by hand have none, and are taken as they are.
    """


class Log2QParams(_OfSpec):
    """QParams as `to_log2` makes them, to be trained; `from_log2` gives the QParams. A pytree of two arrays.

    Attributes:
      scale: float32, the logarithm to the base 2 of the scale.
      zero_point: as in QParams.
      spec: as in QParams.
    """


def _register(kind: type[_OfSpec]) -> None:
    with_keys = lambda v: ([(GetAttrKey(name), array) for name, array in v._asdict().items()], v.spec)
    of = lambda spec, arrays: kind(**dict(zip(kind._fields, arrays, strict=True)), spec=spec)
    jax.tree_util.register_pytree_with_keys(kind, with_keys, of)


for _kind in (QParams, Log2QParams):
    _register(_kind)


def to_log2(qparams: Any) -> Any:
    """QParams with the logarithm of each scale, in which an optimizer step changes a scale by a factor.

    An 8-bit scale may be 0.001. Adam moves each number by its learning rate, so a rate of 0.001 makes such a scale 0 or
    negative in one step. The same step in its logarithm is 0.07 % of the scale, which stays positive.

    Args:
      qparams: any pytree with QParams, such as {entry: QParams or None} of `q.init_qparams`.

    Returns:
      The same pytree with a Log2QParams for each QParams; zero points and other leaves are the same objects.

    Gradient: the gradient of the logarithm.

    Raises:
      TypeError: where there are no QParams.
      ValueError: for a concrete scale that is not a positive number.

    Source: Jain et al., 2020, "Trained Quantization Thresholds", section 3.

    >>> import jax.numpy as jnp
    >>> from jaxquant import QParams, from_log2, to_log2
    >>> trained = to_log2({"w": QParams(jnp.float32(0.25), jnp.float32(0))})
    >>> trained["w"].scale.item(), from_log2(trained)["w"].scale.item()
    (-2.0, 0.25)
    """

    def of(v: QParams) -> Log2QParams:
        scale = checks.real("scale", checks.unwrapped(v.scale), jnp.dtype(jnp.float32))
        if not isinstance(scale, jax.core.Tracer) and not (np.asarray(scale) > 0).all():
            raise ValueError(
                f"`qparams` must have scales > 0, got {np.asarray(scale).min()} as the smallest. Fit them anew by "
                "q.init_qparams(params, ...)."
            )
        return Log2QParams(jnp.log2(scale), v.zero_point, v.spec)

    return _mapped(of, QParams, "to_log2", qparams)


def from_log2(trained: Any) -> Any:
    """QParams again of what `to_log2` made: in the loss, and once after training, before `q.freeze`.

    Args:
      trained: any pytree with Log2QParams.

    Returns:
      The same pytree with a QParams for each Log2QParams; other leaves are the same objects.

    Gradient: with respect to the logarithm, `scale * ln 2` times the gradient with respect to the scale.

    Raises:
      TypeError: where there are no Log2QParams.

    Source: as `to_log2`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import Log2QParams, from_log2
    >>> grad = jax.grad(lambda trained: from_log2(trained).scale)(Log2QParams(jnp.float32(3.0), jnp.float32(0)))
    >>> round(grad.scale.item(), 4)
    5.5452
    """
    return _mapped(lambda v: QParams(jnp.exp2(v.scale), v.zero_point, v.spec), Log2QParams, "from_log2", trained)


def _mapped(f: Callable[[Any], Any], kind: type, function: str, tree: Any) -> Any:
    is_node = lambda node: isinstance(node, _OfSpec)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_node)
    found = [leaf for leaf in leaves if is_node(leaf)]
    if not found or not all(isinstance(leaf, kind) for leaf in found):
        of = " and ".join(sorted({type(leaf).__name__ for leaf in found})) or "none"
        raise TypeError(f"{function} takes a pytree with {kind.__name__}, got {of}. Make it by q.init_qparams(...).")
    return jax.tree.unflatten(structure, [f(leaf) if is_node(leaf) else leaf for leaf in leaves])
