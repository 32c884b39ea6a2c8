# SPDX-License-Identifier: Apache-2.0
"""Equivalence classes of the axes of a program's values: a rotation of one cancels, if no equation forbids it.

An axis belongs to a class, or to several, major ones first, where it is reshaped into others. The transfer function of
a primitive unites the classes of axes that it maps onto each other, splits a class where it regroups channels, and
forbids a class whose rotation it would not pass on. A class that nothing forbids can be rotated, on all axes of
parameters in it, and the program stays the same. Primitives that only move data are known by MOVES; others have an
entry in TRANSFERS; one that has neither passes no rotation.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..._base import _checks as checks
from ..._contract._ops import OPS
from ..._program._jaxpr import param
from ..._program._moves import MOVES, Run
from ._folding import Gain, Operand, Scans
from ._graph import END, SHARED, TURN, Graph, Node, dtype_of_result, length_of
from ._transfer import axes_of, runs_of

Numbers = tuple[int, ...]  # of classes, the major ones first
MIXES, CUTS = "which passes no rotation", "which takes them apart"


class Made(NamedTuple):
    """The parameter that alone says how a value changes along an axis, and the scans that take it turn by turn."""

    path: str
    stack: Scans = ()


class Axis(NamedTuple):
    """An axis along which a value changes.

    Attributes:
      numbers: of its classes.
      is_squared: whether the value is the square of one that can be rotated; its sum over the axis stays.
      made: of what, if it is a parameter, moved or multiplied by what does not change along the axis.
    """

    numbers: Numbers
    is_squared: bool = False
    made: Made | None = None


Axes = tuple[Axis | None, ...]  # of a value; None where it does not change
# (classes, node, its operands) -> its results
Transfer = Callable[["AxisClasses", Node, Sequence[Axes]], Sequence[Axes]]


class Classes:
    """A union-find of classes of channels: how many channels each has, and why it cannot be rotated, if it cannot."""

    def __init__(self):
        self.sizes: list[int] = []
        self._whys: list[str | None] = []
        self._now: list[Numbers] = []  # the classes that have taken the place of each

    def new(self, size: int, why: str | None = None) -> int:
        """The number of a new class."""
        self.sizes.append(size)
        self._whys.append(why)
        self._now.append((len(self._now),))
        return len(self._now) - 1

    def of(self, numbers: Numbers) -> Numbers:
        """The classes that have taken the place of these."""
        while (now := tuple(itertools.chain.from_iterable(self._now[i] for i in numbers))) != numbers:
            numbers = now
        return numbers

    def why(self, number: int) -> str | None:
        """Why a class, of those that `of` gives, cannot be rotated; None where it can."""
        return self._whys[number]

    def forbid(self, numbers: Numbers, why: str) -> None:
        """Notes why classes cannot be rotated, if nothing forbids it already."""
        for i in self.of(numbers):
            self._whys[i] = self._whys[i] or why

    def _replace(self, number: int, by: Numbers) -> None:
        self._now[number] = by
        if (why := self._whys[number]) is not None:
            self.forbid(by, why)

    def _split(self, number: int, minor: int) -> Numbers:
        """A class as two, of which the last has so many channels."""
        parts = self.new(self.sizes[number] // minor), self.new(minor)
        self._replace(number, parts)
        return parts

    def unite(self, a: Numbers, b: Numbers, why: str) -> None:
        """Makes two sequences of classes one, split where sizes differ; forbids them where they do not match."""
        a, b = self.of(a), self.of(b)
        while a and b:
            n, m = self.sizes[a[-1]], self.sizes[b[-1]]
            if n == m:
                if a[-1] != b[-1]:
                    self._replace(b[-1], (a[-1],))
                a, b = self.of(a[:-1]), self.of(b[:-1])
            elif max(n, m) % min(n, m):
                break
            elif n > m:
                a = *a[:-1], *self._split(a[-1], m)
                b = self.of(b)
            else:
                b = *b[:-1], *self._split(b[-1], n)
                a = self.of(a)
        self.forbid((*a, *b), why)

    def grouped(self, numbers: Numbers, sizes: Sequence[int]) -> list[Numbers] | None:
        """The classes in groups of so many channels, split where need be; None if they do not divide so."""
        numbers, groups = self.of(numbers), []
        for size in reversed(sizes):
            group: Numbers = ()
            while size > 1:
                n = self.sizes[numbers[-1]]
                if n > size and n % size == 0:
                    numbers = *numbers[:-1], *self._split(numbers[-1], size)
                elif size % n:
                    return None
                else:
                    numbers, group, size = numbers[:-1], (numbers[-1], *group), size // n
            groups.insert(0, group)
        return groups


class AxisClasses:
    """The classes of the axes of all values of a graph.

    Attributes:
      classes: of channels.
      axes: of each value.
      gains: parameters that channels are multiplied by, taken for ones, with the classes of these channels.
    """

    def __init__(self, graph: Graph):
        self.graph, self.classes = graph, Classes()
        self.axes: dict[int, Axes] = {}
        self.gains: list[tuple[Gain, Numbers]] = []
        tied = {made for made, _ in graph.ties}
        for i, words in graph.sources.items():
            self.axes[i] = self.new(graph.shapes[i], None if i in tied else f"are also in {words}")
        for i, path in graph.paths.items():
            own = self.new(graph.shapes[i])
            self.axes[i] = tuple(axis and axis._replace(made=Made(path)) for axis in own)
        for node in graph.nodes:
            outs = self._results(node, [self.axes[i] for i in node.ins])
            self.axes.update(zip(node.outs, outs, strict=True))
        for tie in graph.ties:
            made, other = (self.axes[i] for i in tie)
            front = len(made) - len(other)
            self.forbid(made[:front], "are stacked by a scan")
            for pair in zip(made[front:], other, strict=True):
                self.alike([axis for axis, i in zip(pair, tie, strict=True) if i not in graph.neutral], "a scan")

    def _results(self, node: Node, ins: Sequence[Axes]) -> Sequence[Axes]:
        if node.name == END:
            if not node.at:  # of the function; a scan is tied
                self.forbid(itertools.chain(*ins), f"are also in {node.words}")
            return []
        if node.name == TURN:
            self.forbid(ins[0][:1], "are taken turn by turn by a scan")
            turn = node.at, length_of(node)
            inside = lambda made: made and made._replace(stack=(*made.stack, turn))
            return [tuple(axis and axis._replace(made=inside(axis.made)) for axis in ins[0][1:])]
        if node.name == SHARED:
            return ins
        if node.outs[0] in self.graph.passes:  # a function of a gain is one, too
            return [ins[self.graph.passes[node.outs[0]]]]
        return _transfer_of(node.name)(self, node, ins)

    def inputs(self, operand: Operand) -> Numbers:
        """The classes that an operand contracts; none where it does not change along them."""
        node = next((node for node in self.graph.nodes if node.at == operand.at and node.name in OPS), None)
        if node is None:
            return (self.classes.new(1, "are inside a cond, a while loop or a shard_map"),)
        names, own = axes_of(node), self.axes[node.ins[operand.side]]
        is_summed = (not {*names.summed}.isdisjoint(names.parts([name])) for name in names.operands[operand.side])
        each = [axis.numbers for axis, of in zip(own, is_summed, strict=True) if axis and of]
        return self.classes.of(tuple(itertools.chain(*each)))

    def parameters(self) -> dict[str, list[Numbers]]:
        """The classes of each axis of each parameter."""
        return {
            path: [() if axis is None else self.classes.of(axis.numbers) for axis in self.axes[i]]
            for i, path in self.graph.paths.items()
        }

    def new(self, shape: Sequence[int], why: str | None = None) -> Axes:
        """The axes of a value, in classes of their own."""
        return tuple(None if n <= 1 else Axis((self.classes.new(n, why),)) for n in shape)

    def forbid(self, axes: Iterable[Axis | None], why: str) -> None:
        """Notes why the classes of axes cannot be rotated."""
        for axis in axes:
            if axis is not None:
                self.classes.forbid(axis.numbers, why)

    def alike(self, axes: Sequence[Axis | None], by: str) -> Axis | None:
        """The axis of a sum of values that have these, whose classes it unites."""
        present = [axis for axis in axes if axis is not None]
        if not present:
            return None
        first, *others = present
        if len(present) < len(axes):
            self.forbid(present, f"also go into {by}, beside what is the same for all of them")
        if any(axis.is_squared != first.is_squared for axis in others):
            self.forbid(present, f"also go into {by}, beside their squares")
        for axis in others:
            self.classes.unite(first.numbers, axis.numbers, f"also go into {by}, beside channels in other groups")
        return Axis(first.numbers, first.is_squared)


def _mixed(s: AxisClasses, node: Node, ins: Sequence[Axes], why: str = MIXES) -> list[Axes]:
    s.forbid(itertools.chain(*ins), f"also go into {node.words}, {why}")
    return [s.new(shape, f"come out of {node.words}, {why}") for shape in node.shapes[1]]


def _each(s: AxisClasses, node: Node, ins: Sequence[Axes]) -> Sequence[Axes]:
    return ins


def _cast(s: AxisClasses, node: Node, ins: Sequence[Axes]) -> Sequence[Axes]:
    dtype = dtype_of_result(node)
    return ins if checks.is_float(dtype) else _mixed(s, node, ins, f"to {dtype}")


def _of_rank(v: Axes, ndim: int) -> Axes:
    """The axes of an operand; a number, which jax lets stand beside an array, is the same for all."""
    return v or (None,) * ndim


# Element by element


def _pointwise(s: AxisClasses, node: Node, ins: Sequence[Axes]) -> list[Axes]:
    """An elementwise op that does not commute with rotations. Axes along which all operands are constant stay so."""
    ndim = len(node.shapes[1][0])
    columns = list(zip(*(_of_rank(v, ndim) for v in ins), strict=True))
    (made,) = _mixed(s, node, ins)
    return [tuple(axis if any(column) else None for axis, column in zip(made, columns, strict=True))]


def _sum(s: AxisClasses, node: Node, ins: Sequence[Axes]) -> list[Axes]:
    ndim = len(node.shapes[1][0])
    values = [_of_rank(v, ndim) for v, i in zip(ins, node.ins, strict=True) if i not in s.graph.neutral]
    return [tuple(s.alike([v[i] for v in values], node.words) for i in range(ndim))]


def _selected(s: AxisClasses, node: Node, ins: Sequence[Axes]) -> list[Axes]:
    (axes,) = _sum(s, node._replace(ins=node.ins[1:]), ins[1:])
    for of_condition, axis in zip(_of_rank(ins[0], len(axes)), axes, strict=True):
        if of_condition is not None:
            s.forbid([of_condition, axis], f"also go into {node.words}, with a condition for each of them")
    return [axes]


def _product_of(s: AxisClasses, a: Axis | None, b: Axis | None, why: str) -> Axis | None:
    """The axis of a product of values with these; of two, channels by channels are no product of rotated ones."""
    if a is not None and b is not None:
        s.forbid([a, b], why)
    return a or b


def _pairs(node: Node, ins: Sequence[Axes]) -> list[tuple[Axis | None, Axis | None]]:
    a, b = (_of_rank(v, len(node.shapes[1][0])) for v in ins)
    return list(zip(a, b, strict=True))


def _gain_of(axes: tuple[Axis, Axis], order: tuple[int, int]) -> tuple[int, Made] | None:
    """Which of two operands is a gain of the other along an axis, and the parameter it is made of."""
    gains = ((k, made) for k in order if (made := axes[k].made) and not axes[1 - k].is_squared)
    return next(gains, None)


def _multiplied(s: AxisClasses, node: Node, ins: Sequence[Axes]) -> list[Axes]:
    if node.ins[0] == node.ins[1]:
        return _squared(s, node, ins)
    changing = [sum(axis is not None for axis in v) for v in ins]
    order = (0, 1) if changing[0] < changing[1] else (1, 0)  # a gain changes along fewer axes than what it multiplies
    outs: list[Axis | None] = []
    gains: dict[tuple[int, Made], list[int]] = {}
    why = f"also go into {node.words}, with others"
    for i, (a, b) in enumerate(_pairs(node, ins)):
        if a is None or b is None or (found := _gain_of((a, b), order)) is None:
            outs.append(_product_of(s, a, b, why))
        else:
            gains.setdefault(found, []).append(i)
            of_gain, other = (a, b) if found[0] == 0 else (b, a)
            s.forbid([of_gain], why)
            outs.append(other._replace(made=None))
    for (k, gain), axes in gains.items():
        numbers = tuple(itertools.chain(*(axis.numbers for i in axes if (axis := outs[i]))))
        s.gains.append((Gain(gain.path, node.ins[k], tuple(axes), gain.stack), numbers))
    return [tuple(outs)]


def _divided(s: AxisClasses, node: Node, ins: Sequence[Axes]) -> list[Axes]:
    s.forbid(ins[1], f"also go into {node.words}, which divides by them")
    return [tuple(_product_of(s, a, b, f"also go into {node.words}, by others") for a, b in _pairs(node, ins))]


def _squared(s: AxisClasses, node: Node, ins: Sequence[Axes]) -> list[Axes]:
    s.forbid([axis for axis in ins[0] if axis and axis.is_squared], f"also go into {node.words}, with their squares")
    return [tuple(axis and Axis(axis.numbers, True) for axis in ins[0])]


def _power(s: AxisClasses, node: Node, ins: Sequence[Axes]) -> list[Axes]:
    return (_squared if param(node.eqn, "y") == 2 else _pointwise)(s, node, ins)


# Sums


def _reduced(s: AxisClasses, node: Node, ins: Sequence[Axes]) -> list[Axes]:
    gone = tuple(param(node.eqn, "axes"))
    sums = [axis for i in gone if (axis := ins[0][i]) is not None and not axis.is_squared]
    s.forbid(sums, f"also go into {node.words}, which sums them, as the mean of a LayerNorm does")
    return [tuple(axis for i, axis in enumerate(ins[0]) if i not in gone)]


def _contracted_pair(s: AxisClasses, a: Axis | None, b: Axis | None, words: str) -> None:
    if a is not None and b is not None:
        if a.is_squared or b.is_squared:
            s.forbid([a, b], f"also go into {words}, with their squares")
        s.classes.unite(a.numbers, b.numbers, f"also go into {words}, with channels in other groups")
    elif (one := a or b) is not None and not one.is_squared:
        s.forbid([one], f"also go into {words}, with what is the same for all of them")


def _contracted(s: AxisClasses, node: Node, ins: Sequence[Axes]) -> list[Axes]:
    op, ndims = OPS[node.name], [len(shape) for shape in node.shapes[0][:2]]
    if not op.can_replace(node.eqn.params) or not op.of(node.eqn.params).pairs_axes(ndims):
        return _mixed(s, node, ins)
    axes = axes_of(node)
    a, b = (dict(zip(*of, strict=True)) for of in zip(axes.operands, ins[:2], strict=True))
    cut = [of[name] for of in (a, b) for name in axes.apart if name in of]
    s.forbid([*cut, *itertools.chain(*ins[2:])], f"also go into {node.words}, {CUTS}")
    for name in axes.summed:
        _contracted_pair(s, a[name], b[name], node.words)
    why = f"also go into {node.words}, which takes one at a time"
    outs = [_product_of(s, a.get(name), b.get(name), why) for name in axes.out]
    return [tuple(axis and axis._replace(made=None) for axis in outs)]


# Moves, by the runs of axes that MOVES gives


def _moved(s: AxisClasses, node: Node, ins: Sequence[Axes]) -> list[Axes]:
    if (fill := node.eqn.params.get("fill_value")) and fill == fill:  # neither None, nor 0 or NaN, the same rotated
        return _mixed(s, node, ins)
    s.forbid(itertools.chain(*ins[1:]), f"also go into {node.words}, {CUTS}")
    outs = [_in_runs(s, node, k, ins[0]) for k in range(len(node.outs))]
    whole = [v for v in outs if v is not None]
    return whole if len(whole) == len(outs) else _mixed(s, node, ins, "which groups them in other ways")


def _in_runs(s: AxisClasses, node: Node, k: int, v: Axes) -> Axes | None:
    """The axes of result k of a move, run by run; None where channels would be in groups that are not theirs."""
    old, new, runs = node.shapes[0][0], node.shapes[1][k], runs_of(node, k)
    outs: list[Axis | None] = [None] * len(new)
    is_gathered = any(run.is_picked and not run.old for run in runs)
    for run in runs:
        axes = [v[i] for i in run.old if old[i] > 1]
        if run.is_picked or run.times > 1:
            s.forbid(axes, f"also go into {node.words}, {CUTS}")
            made = s.new([new[j] for j in run.new], f"come out of {node.words}, {CUTS}")
        elif run.cut:
            made = [_part(s, node, v[run.old[0]], old[run.old[0]], run.cut)]
        else:
            sizes = [new[j] for j in run.new if new[j] > 1]
            made = axes if len(axes) == len(sizes) == 1 else _regrouped(s, node, run, v, sizes)
            if made is None:
                return None
        places = run.new if len(made) == len(run.new) else [j for j in run.new if new[j] > 1]
        for j, axis in zip(places, made, strict=False):
            outs[j] = axis and axis._replace(made=None) if is_gathered else axis
    return tuple(outs)


def _regrouped(s: AxisClasses, node: Node, run: Run, v: Axes, sizes: Sequence[int]) -> Sequence[Axis | None] | None:
    """The axes of these sizes that axes become together; None where they cannot."""
    axes = [(v[i], n) for i in run.old if (n := node.shapes[0][0][i]) > 1]
    present = [axis for axis, _ in axes if axis is not None]
    if not present or not sizes:
        return [None] * len(sizes)
    copies = lambda n: (s.classes.new(n, f"are the same in {node.words}"),)
    numbers = itertools.chain(*(axis.numbers if axis else copies(n) for axis, n in axes))
    groups, first = s.classes.grouped(tuple(numbers), sizes), present[0]
    if groups is None or any(axis.is_squared != first.is_squared for axis in present):
        return None
    made = first.made if all(axis and axis.made == first.made for axis, _ in axes) else None
    return [Axis(group, first.is_squared, made) for group in groups]


def _whole(s: AxisClasses, node: Node, v: Axes, cut: Iterable[int]) -> list[Axes]:
    """The axes of a result that takes the channels along some axes of a value apart."""
    cut = list(cut)
    s.forbid([v[i] for i in cut], f"also go into {node.words}, {CUTS}")
    made = s.new(node.shapes[1][0], f"come out of {node.words}, {CUTS}")
    return [tuple(made[i] if i in cut else axis for i, axis in enumerate(v))]


def _part(s: AxisClasses, node: Node, axis: Axis | None, n: int, cut: tuple[int, int, int]) -> Axis | None:
    """An axis of n channels, cut by (start, stop, stride): blocks that stay whole keep their classes."""
    start, stop, stride = cut
    if axis is None or cut == (0, n, 1):
        return axis
    block = math.gcd(start, stop, n) if stride == 1 else 1
    outer, inner = s.classes.grouped(axis.numbers, (n // block, block)) or (axis.numbers, ())
    s.classes.forbid(outer, f"also go into {node.words}, {CUTS}")
    size = -(-(stop - start) // (abs(stride) * (block if inner else 1)))
    (made,) = s.new([size], f"come out of {node.words}, {CUTS}")
    return Axis((*(made.numbers if made else ()), *inner), axis.is_squared, axis.made) if made or inner else None


def _padded(s: AxisClasses, node: Node, ins: Sequence[Axes]) -> list[Axes]:
    (axes,) = _sum(s, node, ins)
    return _whole(s, node, axes, [i for i, config in enumerate(param(node.eqn, "padding_config")) if any(config)])


def _joined(s: AxisClasses, node: Node, ins: Sequence[Axes]) -> list[Axes]:
    at, is_new = param(node.eqn, "dimension", "axis"), node.name == "stack"
    if not is_new:
        s.forbid([v[at] for v in ins], f"also go into {node.words}, {CUTS}")
    (axes,) = _sum(s, node, [(*v[:at], None, *v[at + (not is_new) :]) for v in ins])
    return _whole(s, node, axes, [at])


_POINTWISE = (
    *("abs", "exp", "log", "logistic", "max", "min", "pow", "rsqrt", "sign", "sqrt", "tanh"),
    *("and", "eq", "ge", "gt", "le", "lt", "ne", "not", "or"),
)
OF_MOVES: dict[str, Transfer] = {  # by how they move
    **dict.fromkeys(("moves", "picks"), _moved),
    "each": _each,
    "casts": _cast,
    "joins": _joined,
}
TRANSFERS: dict[str, Transfer] = {
    "pad": _padded,
    "neg": _each,
    **dict.fromkeys(("add", "add_any", "sub"), _sum),
    "select_n": _selected,
    "mul": _multiplied,
    "div": _divided,
    "square": _squared,
    "integer_pow": _power,
    **dict.fromkeys(_POINTWISE, _pointwise),
    "reduce_sum": _reduced,
}


def _transfer_of(name: str) -> Transfer:
    if name in OPS:
        return _contracted
    of_move = OF_MOVES.get(MOVES[name].how) if name in MOVES else None
    return TRANSFERS.get(name) or of_move or _mixed
