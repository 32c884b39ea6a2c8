# SPDX-License-Identifier: Apache-2.0
"""Ways to add up products of integers exactly, by name."""

from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.core
from jax import Array

from .._arrays._codes import largest_magnitude
from .._arrays._quantized import Quantized
from .._base import _checks as checks
from .._spec._spec import QuantSpec
from ._contract import ContractionOp

_HOME = jax.errors if hasattr(jax.errors, "InconclusiveDimensionOperation") else jax.core
_INCONCLUSIVE = getattr(_HOME, "InconclusiveDimensionOperation")  # noqa: B009
_AUTO = "int8"  # what "auto" is
Op = TypeVar("Op", bound=ContractionOp)


class Lowering(NamedTuple, Generic[Op]):
    """A way to add up the products of an op exactly: all of them give the same int32.

    Attributes:
      product: (op, a, b, length) -> int32, the contraction of `values - zero_point` of two Quantizeds of integers, of
        `length` products each.
      check: (length, spec of a, spec of b) -> None; raises ValueError for operands that it does not take.
    """

    product: Callable[[Op, Quantized, Quantized, int], Array]
    check: Callable[[int, QuantSpec, QuantSpec], None]

    def takes(self, length: int, a: QuantSpec, b: QuantSpec) -> bool:
        """Whether sums of `length` products of operands of these specs pass its check."""
        try:
            self.check(length, a, b)
        except ValueError:
            return False
        return True


Lowerings = Mapping[str, Lowering[Op]]  # of an op, by the names that `execution` takes


def chosen(lowerings: Lowerings[Op], execution: str) -> Lowering[Op]:
    """The lowering of a name."""
    name = checked_execution(execution, lowerings)
    return lowerings[_AUTO if name == "auto" else name]


def checked_execution(value: object, lowerings: Mapping[str, Lowering]) -> str:
    """Returns `execution`, which must be "auto" or the name of a lowering."""
    return checks.one_of("execution", value, ("auto", *lowerings))


def is_at_most(length: int, limit: int) -> bool:
    """Whether a length is, where it is symbolic too: then only if its constraints say so."""
    try:
        return length <= limit
    except _INCONCLUSIVE:
        return False


def check_int32(length: int, a: QuantSpec, b: QuantSpec) -> None:
    """Raises for a contraction of `length` products whose accumulator may not fit int32."""
    largest = largest_magnitude(a) * largest_magnitude(b)
    limit = (2**31 - 1) // largest
    if not is_at_most(length, limit):
        symbolic = "" if isinstance(length, int) else (
            f", or say that it is short enough: jax.export.symbolic_shape(..., constraints=['{length} <= {limit}'])"
        )  # fmt: skip
        raise ValueError(
            f"A contraction of {length} products of {a} and {b} does not fit int32: each is up to {largest}, and no "
            f"more than {limit} of them fit. Use fewer bits, or in a dot product PerBlock along the contracted axis"
            f"{symbolic}."
        )
