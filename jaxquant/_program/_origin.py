# SPDX-License-Identifier: Apache-2.0
"""Provenance of a value: the parameters that it holds or was computed from, and along which axes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ._jaxpr import Location


class Moved(NamedTuple):
    """A primitive that has put the elements of a parameter in another order, or None: a scan took the first axis."""

    primitive: Any
    params: tuple[tuple[str, Any], ...] = ()


class Origin(NamedTuple):
    """The provenance of a value.

    Attributes:
      params: the paths of the parameters that it depends on.
      data: whether it depends on another argument, too.
      captured: whether it depends on an array that the function closes over.
      parts: the paths of the parameters whose values it holds, perhaps some of them in another order; several where
        parameters were concatenated, none if it was computed from them.
      axes: for each axis of the value, the axes of these parameters, or of the cache, that it runs along; JOINED where
        they stand side by side, PICKED where each element is another part, which indices say. Of a cache in which they
        are not known, none.
      moves: what has put the elements of its one parameter in their order here; None where that is not known.
      picked: whether data say which part of the parameter it is.
      computed: the parameters of at least two axes that it was computed from, with no contraction between.
      products: where the contractions are that it came out of, if it was made of parameters alone.
      stack: the scans that take its parts turn by turn, with their lengths.
      gathered: whether it holds its parts in an order that indices say: what a gather makes of a parameter.
      name: what `quant_point` called it, and
      points: where that was, and where it was named before; it may have been moved since.
      cache: the path of the cache whose values it holds, perhaps some of them, in another order, or written anew.
      value: what tells it from other values of the program: equal for one that comes through a call, or through equal
        moves. Not compared where values come together.
    """

    params: frozenset[str] = frozenset()
    data: bool = False
    captured: bool = False
    parts: tuple[str, ...] = ()
    axes: tuple[frozenset[int], ...] = ()
    moves: tuple[Moved, ...] | None = ()
    picked: bool = False
    computed: frozenset[str] = frozenset()
    products: frozenset[Location] = frozenset()
    stack: tuple[tuple[Location, int], ...] = ()
    gathered: bool = False
    name: str | None = None
    points: tuple[Location, ...] = ()
    cache: str | None = None
    value: Any = None

    @property
    def has_integers(self) -> bool:
        """Whether its integers may travel with it: a parameter that is not computed with, a named value, a cache."""
        return bool(self.parts or self.points or self.cache is not None)

    @property
    def weights(self) -> tuple[str, ...]:
        """The parameters that an op has for an operand by it: its parts, but none if they were gathered."""
        return () if self.gathered else self.parts

    @property
    def path(self) -> str | None:
        """The path of the parameter it is, of several joined by "+"; None if it is none."""
        return "+".join(self.weights) if self.weights else None

    @property
    def role(self) -> str:
        """Its role as an operand: "weight", "data", "derived" from parameters alone, or "captured" from neither."""
        if self.weights:
            return "weight"
        return "data" if self.data else "derived" if self.params else "captured"


JOINED, PICKED = -1, -2  # instead of an axis of a parameter
DATA, CAPTURED, LITERAL = Origin(data=True), Origin(captured=True), Origin()


def own_axes(ndim: int) -> tuple[frozenset[int], ...]:
    """The axes of what is passed to a program, each along itself."""
    return tuple(frozenset([i]) for i in range(ndim))


def parameter(path: str, ndim: int) -> Origin:
    """The origin of a parameter itself."""
    return Origin(frozenset([path]), parts=(path,), axes=own_axes(ndim))


def computed(origins: Sequence[Origin]) -> Origin:
    """The origin of what is computed from values of these origins."""
    has_data = any(o.data for o in origins)
    products = frozenset[Location]().union(*(() if has_data else o.products for o in origins))
    # Rank-1 parameters are biases or norm gains, never weights. One that is broadcast over the rows of a product is a
    # bias too, such as one per attention head.
    is_bias = lambda o: sum(map(bool, o.axes)) < 2 or (bool(products) and not all(o.axes))
    matrices = (o.parts for o in origins if not is_bias(o) and not o.gathered)
    return Origin(
        frozenset().union(*(o.params for o in origins)),
        has_data,
        any(o.captured for o in origins),
        computed=frozenset().union(*matrices, *(o.computed for o in origins)),
        products=products,
    )


def either(*origins: Origin) -> Origin:
    """The origin of what is one of several values, as branches give it."""
    if origins[0].cache is not None:
        axes = along_any(origins)
        origins = tuple(o._replace(axes=axes) for o in origins)
    if not all(alike(o, origins[0]) for o in origins):
        return computed(origins)
    same = all(o.moves == origins[0].moves for o in origins)
    return origins[0] if same else origins[0]._replace(moves=None)


def along_any(origins: Sequence[Origin]) -> tuple[frozenset[int], ...]:
    """For each axis of values of one shape what it runs along in any of them; none if that is not known of one."""
    known = len({len(o.axes) for o in origins}) == 1
    return tuple(frozenset().union(*of) for of in zip(*(o.axes for o in origins), strict=True)) if known else ()


def alike(a: Origin, b: Origin) -> bool:
    """Whether two values were made of the same, be they the same value or not, and in whatever order."""
    return a._replace(value=None, moves=None) == b._replace(value=None, moves=None)
