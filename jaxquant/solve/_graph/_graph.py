# SPDX-License-Identifier: Apache-2.0
"""A program as a graph of equations, its calls and scans inlined: for analyses that follow values both ways."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ..._program._calls import CALLS
from ..._program._jaxpr import Location, avals, kind, param, programs, scan_parts, unread_param
from ..._program._moves import MOVES
from ._elementwise import functions_of, number_of

TURN, SHARED = "turn of a scan", "constant of a scan"  # what a scan takes, and what its program has of it
END = "end"  # where a value leaves what is followed


class Node(NamedTuple):
    """An equation of a graph.

    Attributes:
      name: of its primitive; TURN, SHARED or END.
      ins, outs: the values that it takes and gives, by number.
      shapes: of what it takes and gives.
      eqn: as jax has it; None at the end of the program.
      at: where it is; of TURN and SHARED the scan.
      words: what it is, for errors.
    """

    name: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    eqn: JaxprEqn
    at: Location
    words: str


def _moves_one(name: str) -> bool:
    """Whether an equation moves one value."""
    return name in (TURN, SHARED) or (name in MOVES and MOVES[name].is_same)


class Graph:
    """A program as a graph.

    Attributes:
      nodes: in an order in which each value is made before it is taken.
      maker: of each value that a node gives, the node.
      paths: of each value that is a parameter, its path.
      sources: of each other value that no node gives, what it is, in words.
      neutral: values that any positive factor leaves as they are: zeros, infinities and NaN.
      shapes: of each value.
      functions: of parameters, element by element, by their paths: what passes factors as if it were not there.
      passes: of each value that these make, which operand holds the parameter.
      ties: values that scans make, each with one that it is in some turn: a carry inside with that before and behind a
        turn, the last one with that inside, and what is stacked, with an axis more in front, with what turns give.
    """

    def __init__(self, jaxpr: Jaxpr, paths: Sequence[str | None]):
        self.nodes: list[Node] = []
        self.maker: dict[int, Node] = {}
        self.paths: dict[int, str] = {}
        self.sources: dict[int, str] = {}
        self.neutral: set[int] = set()
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.ties: list[tuple[int, int]] = []
        self._numbers: dict[int, float] = {}
        args = [self._source(v, "an argument of the function") for v in jaxpr.invars]
        self.paths = {i: path for i, path in zip(args, paths, strict=True) if path is not None}
        for i in self.paths:
            del self.sources[i]
        outs = self._program(jaxpr, args, (), "")
        self._end(outs, jaxpr.eqns[-1] if jaxpr.eqns else None, (), "the result of the function")
        self.functions = functions_of(self.nodes, self.paths, self._numbers, _moves_one)
        made = (node for function in self.functions.values() for node in function.nodes)
        self.passes = {node.outs[0]: next(k for k, i in enumerate(node.ins) if i not in self._numbers) for node in made}

    def _source(self, v: Any, words: str) -> int:
        i = len(self.shapes)
        self.shapes[i], self.sources[i] = v.aval.shape, words
        return i

    def _node(
        self, name: str, ins: Sequence[int], outs: Sequence[Any], eqn: Any, at: Location, words: str
    ) -> list[int]:
        """The values that a new node gives, for these variables."""
        made = [len(self.shapes) + k for k in range(len(outs))]
        self.shapes |= {i: v.aval.shape for i, v in zip(made, outs, strict=True)}
        shapes = tuple(tuple(self.shapes[i] for i in of) for of in (ins, made))
        if name not in (END, TURN, SHARED) and (unread := unread_param(eqn)):
            name = f"{name} with {unread}"  # of which no rule knows what it does
        node = Node(name, tuple(ins), tuple(made), (shapes[0], shapes[1]), eqn, at, words)
        self.nodes.append(node)
        self.maker |= dict.fromkeys(made, node)
        if name in (*MOVES, TURN, SHARED) and all(i in self.neutral for i in ins):
            self.neutral.update(made)
        if _moves_one(name) and ins[0] in self._numbers:
            self._numbers |= dict.fromkeys(made, self._numbers[ins[0]])
        return made

    def _end(self, ins: Sequence[int], eqn: JaxprEqn | None, at: Location, words: str) -> None:
        self._node(END, ins, [], eqn, at, words)

    def _literal(self, v: Literal) -> int:
        i = self._source(v, "a constant")
        value = np.asarray(v.val)
        if (number := number_of(value)) is not None:
            self._numbers[i] = number
        if value.dtype.kind in "fiV" and np.all((value == 0) | ~np.isfinite(value.astype(np.float64))):
            self.neutral.add(i)
        return i

    def _program(self, jaxpr: Jaxpr, args: Sequence[int], location: Location, within: str) -> list[int]:
        """Adds the equations of a program, and returns the values that are its results."""
        consts = [self._source(v, "an array that the function closes over") for v in jaxpr.constvars]
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        value = lambda v: self._literal(v) if isinstance(v, Literal) else env[v]
        for i, eqn in enumerate(jaxpr.eqns):
            at, ins, name = (*location, i), [value(v) for v in eqn.invars], kind(eqn)
            if name in CALLS and CALLS[name].is_through:
                called = str(eqn.params.get("name") or within)
                outs = self._program(programs(eqn)[0][0], ins, (*at, 0), called)
            elif name == "scan":
                outs = self._scan(eqn, ins, at, within)
            else:
                outs = self._node(name, ins, eqn.outvars, eqn, at, f"{name!r} in {within!r}" if within else repr(name))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def _scan(self, eqn: JaxprEqn, ins: Sequence[int], at: Location, within: str) -> list[int]:
        body = programs(eqn)[0][0]
        consts, carry, xs = scan_parts(eqn, ins)
        of_consts, of_carry, of_xs = scan_parts(eqn, body.invars)
        self._end(carry, eqn, at, "the carry of a scan")
        one = lambda name, i, v: self._node(name, [i], [v], eqn, at, f"the {name}")[0]
        inside = [self._source(v, "the carry of a scan") for v in of_carry]
        args = [
            *(one(SHARED, i, v) for i, v in zip(consts, of_consts, strict=True)),
            *inside,
            *(one(TURN, i, v) for i, v in zip(xs, of_xs, strict=True)),
        ]
        outs = self._program(body, args, (*at, 0), within)
        self._end(outs[: len(carry)], eqn, at, "the carry of a scan")
        self._end(outs[len(carry) :], eqn, at, "what a scan stacks")
        results = [self._source(v, "the result of a scan") for v in eqn.outvars]
        last = results[: len(carry)]
        for made, others in ((inside, carry), (inside, outs[: len(carry)]), (last, inside)):
            self.ties += zip(made, others, strict=True)
        self.ties += zip(results[len(carry) :], outs[len(carry) :], strict=True)
        return results


def length_of(node: Node) -> int:
    """How many turns a scan has."""
    return param(node.eqn, "length")


def dtype_of_result(node: Node) -> np.dtype:
    """The dtype of what an equation gives first."""
    return avals(node.eqn.outvars)[0].dtype
