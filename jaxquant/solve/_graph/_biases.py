# SPDX-License-Identifier: Apache-2.0
"""Which parameters are added to the output of a contraction, one element to each channel."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..._base._axes import Matrix
from ..._contract._ops import OPS
from ..._program._jaxpr import Location
from ..._program._moves import MOVES
from ._factors import Factors, NoFactorsError, Unmet, joined, lean, level, nothing
from ._folding import Scans, of_all_turns, of_turn
from ._graph import END, SHARED, TURN, Graph, Node, length_of
from ._transfer import OF_MOVES, runs_of, sides_of, transfer_of

_SUMS = "add", "add_any", "sub"


class NoBiasError(Exception):
    """Why nothing that is added can make up for the mean error of an output, in words."""


class Contracted(NamedTuple):
    """A contraction of a weight: where, which side the weight is, the scans over it, and how it lies in matrices."""

    at: Location
    side: int
    stack: Scans
    matrix: Matrix


def biases(graph: Graph, contractions: Sequence[Contracted]) -> dict[str, Factors]:
    """The parameters that are added to the output of a weight, an element to each channel, and to nothing else; static.

    Returns:
      Of each parameter, for its elements, an array that broadcasts against it: k + 1 where it is added to channel k of
      the output; -k - 1 where one of both is subtracted from the other; 0 elsewhere. Channels are numbered turn by turn
      of the scans over the weight, then matrix by matrix, then along N.

    Raises:
      NoBiasError: where some of the output goes elsewhere before a bias is added, or a bias does.
    """
    nodes = {node.at: node for node in graph.nodes if node.name in OPS}
    if not all(contraction.at in nodes for contraction in contractions):
        raise NoBiasError("it is inside a cond, a while loop or a shard_map")
    search = _Search(graph)
    first, *others = [search.of(nodes[contraction.at], contraction) for contraction in contractions]
    for other in others:
        if first.keys() != other.keys() or not all(np.array_equal(first[i], other[i]) for i in first):
            raise NoBiasError("several ops take it, each with other biases, and its Gram is of all of them together")
    for value, channels in first.items():
        search.check(value, channels)
    return {graph.paths[value]: channels for value, channels in first.items()}


def _numbered(matrix: Matrix, shape: tuple[int, ...]) -> Factors:
    """The numbers, from 1, of the channels that an operand of this shape has: matrix by matrix, then along N."""
    order = (*matrix.lead, *matrix.free, *matrix.contracted)
    sizes = [1 if i in matrix.contracted else shape[i] for i in order]
    return np.arange(1, math.prod(sizes) + 1).reshape(sizes).transpose(np.argsort(order))


def _rows(shape: tuple[int, ...], channels: Factors) -> int:
    """How many elements there are for each channel."""
    return math.prod(shape) // channels.size


def _is_moved(node: Node) -> bool:
    """Whether an equation moves values, and says of no element several times that it is there, by tiles or indices."""
    how = MOVES[node.name].how if node.name in MOVES else ""
    repeats = lambda run: run.times > 1 or (run.is_picked and not run.old)
    return how in OF_MOVES and not (how in ("moves", "picks") and any(map(repeats, runs_of(node, 0))))


class _Search:
    """Follows channels as factors are followed: in the same numbers, by the same rules.

    Attributes:
      strides: of the scans over the weight, how far the channels of one turn are from the next turn's.
      sums: of the result of each sum with a bias, which operand the bias is, and its channels.
      notes: what else is made of parameters alone and added, in words.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.strides: dict[Location, int] = {}
        self.sums: dict[int, tuple[int, Factors]] = {}
        self.notes: list[str] = []

    def of(self, node: Node, contraction: Contracted) -> dict[int, Factors]:
        """The parameters that are added to the output of one contraction, with their channels."""
        own = _numbered(contraction.matrix, node.shapes[0][contraction.side])
        for i, (at, _) in enumerate(contraction.stack):
            self.strides[at] = own.size * math.prod(n for _, n in contraction.stack[i + 1 :])
        try:
            sides = sides_of(node)
            env = {node.outs[0]: lean(sides.result(sides.spread(contraction.side, own)))}
        except NoFactorsError:
            raise NoBiasError("each row of its inputs meets one of several matrices") from None
        found: dict[int, Factors] = {}
        for taker in self.graph.nodes:
            if any(i in env for i in taker.ins):
                env |= self._added(taker, env, found) if taker.name in _SUMS else self._moved(taker, env)
        if not found:
            raise NoBiasError("its output is not used")
        return found

    def check(self, value: int, channels: Factors) -> None:
        """Raises where a bias is also added to something else, or taken by it."""
        env = {value: channels}
        for node in self.graph.nodes:
            if not any(i in env for i in node.ins):
                continue
            place, wanted = self.sums.get(node.outs[0], (0, None)) if node.outs else (0, None)
            try:
                if wanted is None:
                    env |= self._ahead(node, env)
                    continue
                got = env.get(node.ins[place], wanted * 0)
                if node.ins[1 - place] in env or ((got != 0) & (got != wanted)).any():
                    raise NoFactorsError("which sums it with other values")
            except NoFactorsError:
                raise NoBiasError(f"its bias {self.graph.paths[value]!r} also goes into {node.words}") from None

    def _moved(self, node: Node, env: Mapping[int, Factors]) -> dict[int, Factors]:
        """The channels of what a move makes of an output."""
        try:
            outs = self._ahead(node, env)
        except NoFactorsError:
            raise self._error(f"its output {'is' if node.name == END else 'goes into'} {node.words}") from None
        before = _rows(node.shapes[0][0], env.get(node.ins[0], np.ones(1)))
        is_cut = node.name in MOVES and MOVES[node.name].how in ("moves", "picks")
        if is_cut and any(_rows(self.graph.shapes[i], v) < before for i, v in outs.items()):
            raise self._error(f"some rows of its output are taken apart by {node.words}")
        return outs

    def _added(self, node: Node, env: Mapping[int, Factors], found: dict[int, Factors]) -> dict[int, Factors]:
        """Notes what a sum adds to an output if it is a bias; behind other things one may still come."""
        k = int(node.ins[1] in env)
        other, out = node.ins[1 - k], node.outs[0]
        if other in env or out in self.sums:
            raise self._error(f"its output goes into {node.words} with more of it")
        is_negative = node.name == "sub"
        channels = -env[node.ins[k]] if is_negative and k == 1 else env[node.ins[k]]
        wanted = -channels if is_negative and k == 0 else channels
        own = self._bias(other, wanted)
        if not own:
            return {out: channels}
        self.sums[out] = 1 - k, wanted
        for i, v in own.items():
            try:
                found[i] = joined(found.get(i), v)
            except NoFactorsError:
                raise NoBiasError(f"its bias {self.graph.paths[i]!r} is added to several of its channels") from None
        return {}

    def _bias(self, value: int, channels: Factors) -> dict[int, Factors]:
        """The parameters that a value is made of, if they have one element for each of these channels; else nothing."""
        parts = self._parts(value)
        found: dict[int, Factors] = {}
        try:
            if parts:
                is_number = self.graph.shapes[value] == ()
                channels = level(channels, range(channels.ndim)).reshape(()) if is_number else channels
                self._back(value, channels, found)
        except NoFactorsError:
            found = {}
        each = [(v.size == math.prod(self.graph.shapes[i]), v[v != 0]) for i, v in found.items() if v.any()]
        numbers = np.concatenate([np.abs(v) for _, v in each]) if each else np.zeros(0)
        if each and all(is_full for is_full, _ in each) and len(np.unique(numbers)) == len(numbers):
            return {i: v for i, v in found.items() if v.any()}
        self.notes += [f"{self.graph.paths[i]!r}, which is added, has not one element for each channel" for i in parts]
        return {}

    def _parts(self, value: int) -> list[int]:
        """The parameters that a value holds, if it holds nothing else and they are only moved."""
        if value in self.graph.paths:
            return [value]
        node = self.graph.maker.get(value)
        if node is None or not (node.name in (TURN, SHARED) or _is_moved(node)):
            return []
        parts = [self._parts(i) for i in node.ins]
        return [i for part in parts for i in part] if all(parts) else []

    def _back(self, value: int, channels: Factors, found: dict[int, Factors]) -> None:
        """Notes which elements of parameters a value holds for its channels."""
        if value in self.graph.paths:
            found[value] = joined(found.get(value), channels)
            return
        node = self.graph.maker[value]
        stride = self.strides.get(node.at, 0)
        if node.name == SHARED and stride:
            raise NoFactorsError("which all turns share")
        if node.name == TURN:
            way = [(0, of_all_turns(channels, stride, length_of(node)))]
        else:
            rule = None if node.name == SHARED else transfer_of(node.name)
            (way,) = rule.backward(node, node.outs.index(value), channels) if rule else [[(0, channels)]]
        for k, v in way:
            self._back(node.ins[k], v, found)

    def _ahead(self, node: Node, env: Mapping[int, Factors]) -> dict[int, Factors]:
        """The channels of the results of a node that only moves values; raises NoFactorsError for others."""
        ins = [env.get(i, nothing(len(shape))) for i, shape in zip(node.ins, node.shapes[0], strict=True)]
        if node.name == TURN:
            outs = [of_turn(ins[0], self.strides.get(node.at, 0), length_of(node))]
        elif node.name == SHARED:
            outs = ins
        elif _is_moved(node) and (rule := transfer_of(node.name)):
            outs = rule.forward(node, ins)
            assert not isinstance(outs, Unmet)  # which contractions alone give
        else:
            raise NoFactorsError("which is no move")
        return {i: v for i, v in zip(node.outs, outs, strict=True) if v.any()}

    def _error(self, why: str) -> NoBiasError:
        return NoBiasError("; ".join([f"{why}, and no bias is added before", *dict.fromkeys(self.notes)]))
