# SPDX-License-Identifier: Apache-2.0
"""The layout of a parameter in the matrices that its ops contract: a Gram is of these, and a solver changes them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._base._axes import Matrix
from .._program._moves import in_order
from .._program._origin import Moved
from ._choose import Choice, Decision


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a parameter of some shape in matrices (..., K, N), contracted along K; static and hashable.

    Attributes:
      shape: of the parameter.
      moves: what puts its elements in the order of the operand.
      matrix: how the operand lies in matrices.
    """

    shape: tuple[int, ...]
    moves: tuple[Moved, ...]
    matrix: Matrix

    def matrices(self, v: Array) -> Array:
        """The matrices of an array of the parameter's shape."""
        return in_order(v, self.moves, self.matrix.of)

    def parameter(self, matrices: Array) -> Array:
        """The array of the parameter's shape that has these matrices."""
        # Each element is one element of a matrix, so that the transpose of the map is its inverse.
        like = jax.ShapeDtypeStruct(self.shape, matrices.dtype)
        return jax.linear_transpose(self.matrices, like)(matrices)[0]

    def has_rows_of(self, other: "Layout") -> bool:
        """Whether the same elements of the parameter lie in each row, so that both have one Gram."""
        return self == other or np.array_equal(self._rows(), other._rows())

    def _rows(self) -> np.ndarray:
        with jax.ensure_compile_time_eval():
            places = jnp.arange(math.prod(self.shape), dtype=jnp.int32).reshape(self.shape)
            return np.sort(np.asarray(self.matrices(places)), -1)


def layout_of(decision: Decision, side: int, shape: tuple[int, ...]) -> Layout:
    """The layout of a parameter of this shape that an op takes whole and alone."""
    choice: Choice = decision.operands[side]
    origin, operand = choice.operand.origin, choice.operand.shape
    is_whole = math.prod(operand) * math.prod(n for _, n in origin.stack) == math.prod(shape) and not origin.picked
    if not is_whole or len(origin.parts) > 1 or origin.moves is None:
        raise ValueError(
            "second moments and rotations are for parameters that an op takes whole and alone, got an operand of shape "
            f"{operand} made of {', '.join(origin.parts)}, of shape {shape}. Give each part a parameter of its own, or "
            "leave it out, by a rule with None, or by `entries`."
        )
    contraction = decision.contraction
    matrix = contraction.as_op().matrix(side, [len(v.shape) for v in contraction.operands])
    return Layout(shape, origin.moves, matrix)
