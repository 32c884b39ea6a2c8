# SPDX-License-Identifier: Apache-2.0
"""Where a factor for each channel of an operand can be folded into parameters, so that a program stays the same."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..._contract._ops import OPS
from ..._program._jaxpr import Location
from ..._program._moves import MOVES
from ._factors import Factors, NoFactorsError, Unmet, joined, lean, level, nothing
from ._graph import END, SHARED, TURN, Graph, Node, length_of
from ._transfer import sides_of, transfer_of

_FAR = 1000  # from a parameter: with a contraction, or the like, between
_MOST_WAYS = 256
Scans = tuple[tuple[Location, int], ...]
Demands = Sequence[tuple[int, Factors]]  # values, and the factors that they must have


class Fold(NamedTuple):
    """Parameters that absorb a factor for each channel of an operand; static.

    The factors of the turns of scans are numbered turn by turn, so that they are `size` = prod(turns) * channels.

    Attributes:
      factors: of each parameter that changes, for its elements: 0 where they stay, k + 1 where they are divided by
        factor k, -k - 1 where they are multiplied by it; an array that broadcasts against the parameter.
      turns: the lengths of the scans whose turns have factors of their own.
      channels: how many there are, of one turn.
    """

    factors: Mapping[str, Factors]
    turns: tuple[int, ...]
    channels: int

    @property
    def size(self) -> int:
        """How many factors there are, in all turns."""
        return math.prod(self.turns) * self.channels

    def paths(self, sign: int) -> list[str]:
        """The parameters that are divided, for sign 1, or multiplied, for -1."""
        return [path for path, v in self.factors.items() if (np.sign(v) == sign).any()]


class Refused(NamedTuple):
    """Why factors cannot be folded, in words; and what must have one factor for it to get further.

    Attributes:
      why: in words.
      pairs: of factors, each of which must be one; None if that would not help.
      scan: whose turns must have the same factors, or None.
    """

    why: str
    pairs: tuple[Factors, Factors] | None = None
    scan: Location | None = None

    @classmethod
    def by(cls, error: NoFactorsError, about: str) -> "Refused":
        """The refusal of an equation, with what it is about before its own words."""
        return cls(f"{about}, {error}", error.pairs)


class Operand(NamedTuple):
    """The operand whose channels have factors: of which contraction, which side, and the scans over its weight."""

    at: Location
    side: int
    stack: Scans = ()


class Gain(NamedTuple):
    """A parameter that channels are multiplied by: its path, the value, the axes, and the scans over the parameter."""

    path: str
    value: int
    axes: tuple[int, ...]
    stack: Scans


class _Space(NamedTuple):
    """Which channels have a factor of their own: the number of each one's factor, and the scans with own turns."""

    number: np.ndarray
    turning: Scans

    @property
    def size(self) -> int:
        return int(self.number.max(initial=-1)) + 1

    def stride(self, node: Node) -> int:
        """From one turn of a scan to the next; 0 if all have the same factors."""
        places = [at for at, _ in self.turning]
        if node.at not in places:
            return 0
        return self.size * math.prod(n for _, n in self.turning[places.index(node.at) + 1 :])

    def coarser(self, refused: Refused) -> "_Space":
        """The space in which what was refused has one factor."""
        if refused.scan is not None:
            return self._replace(turning=tuple(scan for scan in self.turning if scan[0] != refused.scan))
        assert refused.pairs is not None
        a, b = (np.abs(v).ravel() - 1 for v in refused.pairs)
        if (a // self.size != b // self.size).any():
            return self._replace(turning=())
        lowest = np.arange(self.size)
        while True:
            least = np.minimum(lowest[a % self.size], lowest[b % self.size])
            before = lowest.copy()
            np.minimum.at(lowest, a % self.size, least)
            np.minimum.at(lowest, b % self.size, least)
            lowest = lowest[lowest]
            if np.array_equal(lowest, before):
                return self._replace(number=np.unique(lowest, return_inverse=True)[1][self.number])


class _Ways:
    """Which way is taken where there are several, in one attempt after the other until all are tried."""

    def __init__(self):
        self.taken: list[list[int]] = []
        self.at = 0

    def pick(self, n: int) -> int:
        if self.at == len(self.taken):
            self.taken.append([0, n])
        self.at += 1
        return self.taken[self.at - 1][0]

    def next(self) -> bool:
        """Whether there is another attempt."""
        self.at = 0
        while self.taken and self.taken[-1][0] + 1 == self.taken[-1][1]:
            self.taken.pop()
        if self.taken:
            self.taken[-1][0] += 1
        return bool(self.taken)


class _Attempt:
    """The factors that parameters get, for one way of taking up the factors of an operand."""

    def __init__(self, graph: Graph, distance: Mapping[int, int], space: _Space, ways: _Ways):
        self.graph, self.distance, self.space, self.ways = graph, distance, space, ways
        self.own: dict[int, Factors] = {}
        self.picked: dict[int, int] = {}

    def run(self, value: int, axes: Sequence[int], also: Callable[[Factors], Demands]) -> dict[str, Factors] | Refused:
        """The factors of parameters for one of each channel of a value, and for what else must have some then."""
        wanted = _distinct(self.graph.shapes[value], axes, self.space.number)
        for demanded in ((value, wanted), *also(wanted)):
            if refused := self.demand(*demanded):
                return refused
        found = self.forward()
        if isinstance(found, Refused):
            return found
        if not np.array_equal(found.get(value, 0), wanted):
            return Refused("its inputs are made in ways that do not agree")
        return {self.graph.paths[i]: v for i, v in self.own.items()}

    def demand(self, value: int, factors: Factors) -> Refused | None:
        """Notes what parameters must have for a value to have these factors."""
        todo, seen = [(value, factors, "")], set()
        while todo:
            value, factors, behind = todo.pop()
            known = value, factors.shape, factors.tobytes()
            if known in seen or value in self.graph.neutral or not factors.any():
                continue
            seen.add(known)
            if value in self.graph.sources:
                return Refused(f"its inputs come from {behind}{self.graph.sources[value]}")
            if value in self.graph.paths:
                try:
                    self.own[value] = joined(self.own.get(value), factors)
                except NoFactorsError as error:
                    return Refused.by(error, f"its inputs come from the parameter {self.graph.paths[value]!r}")
                continue
            node = self.graph.maker[value]
            behind, found = f"{node.words} with " if len(node.ins) > 1 else behind, self._behind(node, value, factors)
            if isinstance(found, Refused):
                return found
            todo += [(operand, v, behind) for operand, v in found]
        return None

    def _behind(self, node: Node, value: int, factors: Factors) -> list[tuple[int, Factors]] | Refused:
        """What the operands of an equation must have for one of its results."""
        stride = self.space.stride(node)
        if node.name == TURN:
            return [(node.ins[0], of_all_turns(factors, stride, length_of(node)))]
        if node.name == SHARED:
            if stride:
                return Refused("its inputs come from what all turns of a scan share", scan=node.at)
            return [(node.ins[0], factors)]
        if value in self.graph.passes:
            return [(node.ins[self.graph.passes[value]], factors)]
        try:
            if (rule := transfer_of(node.name)) is None:
                raise NoFactorsError("which passes no factor")
            ways = rule.backward(node, node.outs.index(value), factors)
        except NoFactorsError as error:
            named = [self.graph.paths[i] for i in node.ins if i in self.graph.paths]
            of = f" of the parameter {named[0]!r}" if named else ""
            return Refused.by(error, f"its inputs come out of {node.words}{of}")
        ways = sorted(ways, key=lambda way: max(self.distance[node.ins[k]] for k, _ in way))
        if len(ways) > 1 and value not in self.picked:
            self.picked[value] = self.ways.pick(len(ways))
        try:
            return [self._of_rank(node, k, v) for k, v in ways[self.picked.get(value, 0)]]
        except NoFactorsError as error:
            return Refused.by(error, f"its inputs come out of {node.words}")

    def _of_rank(self, node: Node, k: int, factors: Factors) -> tuple[int, Factors]:
        """An operand with its factors; one without axes beside arrays has one factor for all of them."""
        value, is_number = node.ins[k], node.shapes[0][k] == () and factors.ndim
        if not is_number or value in self.graph.neutral or value in self.graph.sources:
            return value, factors
        return value, level(factors, range(factors.ndim)).reshape(())

    def forward(self) -> dict[int, Factors] | Refused:
        """The factors of all values, given the factors of the parameters; what else must have some gets them."""
        while isinstance(found := self._values(), tuple) and not isinstance(found, Refused):
            (node, unmet), before = found, dict(self.own)
            if refused := self.demand(node.ins[unmet.operand], unmet.factors):
                return refused
            if all(v is before.get(i) or np.array_equal(v, before.get(i, 0)) for i, v in self.own.items()):
                return Refused(f"what would be divided also goes into {node.words}, which sums it")
        return found

    def _values(self) -> dict[int, Factors] | tuple[Node, Unmet] | Refused:
        """The factors of all values; or the first equation of which an operand must have factors, too."""
        env, neutral = dict(self.own), self.graph.neutral
        for node in self.graph.nodes:
            if not any(i in env for i in node.ins):
                continue
            shapes = node.shapes[0]
            ins = [None if i in neutral else env.get(i) for i in node.ins]
            ins = [
                nothing(len(shape)) if v is None and i not in neutral else v
                for i, v, shape in zip(node.ins, ins, shapes, strict=True)
            ]
            try:
                outs = self._ahead(node, ins)
            except NoFactorsError as error:
                paths = [
                    f"{self.graph.paths[i]!r}, which would be divided or multiplied," for i in node.ins if i in self.own
                ]
                what = paths[0] if paths else "what would be divided or multiplied"
                where = f"is also {node.words}" if node.name == END else f"also goes into {node.words}, {error}"
                return Refused(f"{what} {where}", error.pairs)
            if isinstance(outs, Unmet):
                return node, outs
            env |= {i: v for i, v in zip(node.outs, outs, strict=True) if v.any()}
        return env

    def _ahead(self, node: Node, ins: Sequence[Factors | None]) -> list[Factors] | Unmet:
        stride = self.space.stride(node)
        if node.name == TURN and ins[0] is not None:
            return [of_turn(ins[0], stride, length_of(node))]
        if node.name == SHARED and ins[0] is not None:
            if stride:
                raise NoFactorsError("which all turns share")
            return [ins[0]]
        if node.outs and node.outs[0] in self.graph.passes:
            factors = ins[self.graph.passes[node.outs[0]]]
            return [] if factors is None else [factors]
        if (rule := transfer_of(node.name)) is None:
            raise NoFactorsError("which passes no factor")
        return rule.forward(node, ins)


def of_all_turns(v: Factors, stride: int, length: int) -> Factors:
    """The factors of what a scan takes, given the factors in one turn: numbered turn by turn, if stride is not 0."""
    return np.stack([v + np.sign(v) * t * stride for t in range(length if stride else 1)])


def of_turn(v: Factors, stride: int, length: int) -> Factors:
    """The factors in a turn of a scan, numbered in it, of what the scan takes turn by turn."""
    turns = np.arange(length).reshape(-1, *[1] * (v.ndim - 1))
    v = v - np.sign(v) * turns * stride
    if (v != v[:1]).any():
        raise NoFactorsError("whose turns would be divided differently")
    return lean(v[0])


def _distinct(shape: tuple[int, ...], axes: Sequence[int], number: np.ndarray) -> Factors:
    """The factors of an operand with a channel for each place along some axes, of these numbers."""
    sizes = [n if i in axes else 1 for i, n in enumerate(shape)]
    return lean(number.reshape(sizes) + 1)


def _distances(graph: Graph) -> dict[int, int]:
    """How far each value is from a parameter: how many sums and products are between."""
    found = dict.fromkeys(graph.sources, _FAR) | dict.fromkeys(graph.paths, 0)
    found |= dict.fromkeys(graph.neutral, 0)
    for node in graph.nodes:
        own = [found[i] for i in node.ins] or [_FAR]
        distance = _FAR
        if node.name in (*MOVES, TURN, SHARED):
            distance = own[0]
        elif node.outs and node.outs[0] in graph.passes:
            distance = own[graph.passes[node.outs[0]]]
        elif len(node.ins) == 1:  # which passes no factor, and says whose function it is
            distance = 1 + own[0]
        elif node.name in ("mul", "div"):
            distance = 1 + min(own)
        elif node.name in ("add", "sub"):
            distance = 1 + max(own)
        found |= dict.fromkeys(node.outs, min(distance, _FAR))
    return found


def fold(graph: Graph, operand: Operand) -> Fold | Refused:
    """The fold of a factor for each channel that an operand contracts, or why there is none; static."""
    node = next((node for node in graph.nodes if node.at == operand.at and node.name in OPS), None)
    if node is None:
        return Refused("it is inside a cond, a while loop or a shard_map")
    sides, side = sides_of(node), operand.side
    opposite = lambda wanted: [(node.ins[1 - side], sides.opposite(side, wanted))]
    return _fold(graph, node.ins[side], sides.channels[side], operand.stack, opposite)


def fold_gain(graph: Graph, gain: Gain) -> Fold | Refused:
    """The fold of a gain, which becomes ones, into the weights that take it, or why there is none; static.

    The factors of the fold are the elements of the parameter.
    """
    path, value, axes, stack = gain
    found = _fold(graph, value, axes, stack, lambda wanted: [])
    if isinstance(found, Refused):
        return found
    shape = next(graph.shapes[i] for i, other in graph.paths.items() if other == path)
    elements = np.broadcast_to(found.factors[path], shape) > 0
    if elements.sum() != found.size or found.paths(1) != [path]:
        return Refused("several of its elements meet one row")
    return found


def _fold(
    graph: Graph, value: int, axes: Sequence[int], stack: Scans, also: Callable[[Factors], Demands]
) -> Fold | Refused:
    """The fold in the finest space that has one; of refusals the first, of the finest space."""
    count = math.prod(graph.shapes[value][i] for i in axes)
    space, distance = _Space(np.arange(count), stack), _distances(graph)
    first = None
    while space.size > 1:
        helpful, ways = None, _Ways()
        for _ in range(_MOST_WAYS):
            found = _Attempt(graph, distance, space, ways).run(value, axes, also)
            if not isinstance(found, Refused):
                return Fold(found, tuple(n for _, n in space.turning), space.size)
            first = first or found
            helpful = helpful or (found if found.pairs is not None or found.scan is not None else None)
            if not ways.next():
                break
        if helpful is None:
            break
        finer, space = space, space.coarser(helpful)
        if (finer.size, finer.turning) == (space.size, space.turning):
            break
    return first or Refused("it has one input alone")
