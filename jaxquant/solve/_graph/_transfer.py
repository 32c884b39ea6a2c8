# SPDX-License-Identifier: Apache-2.0
"""The transfer functions of factors of channels, forward and backward, for the primitives of jax.

Those that only move data are known by MOVES; the others have an entry in TRANSFERS. What has neither passes no factor.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..._base import _checks as checks
from ..._base._axes import Axes
from ..._contract._ops import OPS
from ..._program._jaxpr import avals, param
from ..._program._moves import MOVES, Run
from ._factors import Factors, NoFactorsError, Unmet, apart, arranged, known, lean, level, nothing, product
from ._graph import Node, dtype_of_result

Wanted = list[tuple[int, Factors]]  # of operands, by their number, the factors that they must have


class Transfer(NamedTuple):
    """The transfer functions of a primitive.

    Attributes:
      forward: (node, factors of the operands; None where any are as good) -> factors of the results, or what an operand
        must have for that.
      backward: (node, number of the result, its factors) -> what operands must have for it: the ways there are.
    """

    forward: Callable[[Node, Sequence[Factors | None]], list[Factors] | Unmet]
    backward: Callable[[Node, int, Factors], list[Wanted]]


# Moves, by the runs of axes that MOVES has of each


def runs_of(node: Node, k: int) -> list[Run]:
    """The runs that make a result of a move, in the order of its axes."""
    of_results = MOVES[node.name].runs
    assert of_results is not None
    return sorted(of_results(node.eqn)[k], key=lambda run: run.new)


def _moved(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
    if any(v is not None and v.any() for v in ins[1:]):
        raise NoFactorsError("by an index that would be divided")
    if (fill := node.eqn.params.get("fill_value")) and fill == fill:  # neither None, nor 0 or NaN, which stay
        raise NoFactorsError("with a value that would not be divided")
    v, shape = known(ins[0], len(node.shapes[0][0])), node.shapes[0][0]
    return [ahead(runs_of(node, k), v, shape, new) for k, new in enumerate(node.shapes[1])]


def ahead(runs: Sequence[Run], v: Factors, old: tuple[int, ...], new: tuple[int, ...]) -> Factors:
    """The factors of a result in these runs, of shape `new`, where the value of shape `old` has some."""
    for run in runs:
        if run.is_picked:
            v = apart(v, run.old)
        elif run.cut and v.shape[run.old[0]] > 1:
            start, stop, stride = run.cut
            at = slice(start, stop, stride) if stride > 0 else slice(None, None, -1)
            v = v[(slice(None),) * run.old[0] + (at,)]
        elif run.times > 1 and v.shape[run.old[0]] > 1:
            v = np.concatenate([v] * run.times, run.old[0])
    full, sizes = [], []
    for run in runs:
        one_each = len(run.old) == len(run.new) == 1
        changes = any(v.shape[i] > 1 for i in run.old) and not one_each
        full += [old[i] if changes else v.shape[i] for i in run.old]
        sizes += [new[j] if changes else v.shape[run.old[0]] if one_each else 1 for j in run.new]
    v = v.transpose([i for run in runs for i in run.old])
    return lean(np.broadcast_to(v, full).reshape(sizes))


def _moved_back(node: Node, k: int, v: Factors) -> list[Wanted]:
    return [[(0, behind(runs_of(node, k), v, node.shapes[0][0], node.shapes[1][k]))]]


def behind(runs: Sequence[Run], v: Factors, old: tuple[int, ...], new: tuple[int, ...]) -> Factors:
    """The factors that a value of shape `old` must have for a result in these runs, of shape `new`, to have these."""
    stretched = lambda run: not run.old or (len(run.old) == len(run.new) == 1 and old[run.old[0]] == 1)
    v = level(v, [j for run in runs if run.is_picked or stretched(run) for j in run.new])
    full, sizes = [], []
    for run in runs:
        one_each = len(run.old) == len(run.new) == 1
        changes = any(v.shape[j] > 1 for j in run.new) and not one_each
        full += [new[j] if changes else v.shape[j] for j in run.new]
        sizes += [old[i] if changes else v.shape[run.new[0]] if one_each else 1 for i in run.old]
    v = np.broadcast_to(v, full).reshape(sizes).transpose(np.argsort([i for run in runs for i in run.old]))
    for run in runs:
        if run.times > 1 and v.shape[i := run.old[0]] > 1:
            v = level(v.reshape(*v.shape[:i], run.times, old[i], *v.shape[i + 1 :]), [i]).squeeze(i)
        elif run.cut and not run.is_picked:
            v = _uncut(v, run.old[0], run.cut, old)
    return lean(v)


def _uncut(v: Factors, axis: int, cut: tuple[int, int, int], shape: tuple[int, ...]) -> Factors:
    """The factors of a whole of which a part has these; 0 elsewhere."""
    if cut[2] < 0:
        return np.flip(v, axis)
    made = np.zeros([shape[i] if i == axis else n for i, n in enumerate(v.shape)], v.dtype)
    made[(slice(None),) * axis + (slice(*cut),)] = v
    return made


def _each() -> Transfer:
    """The transfer of a primitive that takes several values and gives each."""
    ndim = lambda node, k: len(node.shapes[0][k])
    return Transfer(
        lambda node, ins: [known(v, ndim(node, k)) for k, v in enumerate(ins)], lambda node, k, v: [[(k, v)]]
    )


def _cast() -> Transfer:
    def through(node: Node, v: Factors) -> Factors:
        if v.any() and not checks.is_float(dtype := dtype_of_result(node)):
            raise NoFactorsError(f"to {dtype}")
        return v

    return _one(through, lambda node, _, v: through(node, v))


def _one(forward: Callable[[Node, Factors], Factors], backward: Callable[[Node, int, Factors], Factors]) -> Transfer:
    """The transfer of a primitive that keeps the channels of its one operand along the axes that stay."""
    return Transfer(
        lambda node, ins: [lean(forward(node, known(ins[0], len(node.shapes[0][0]))))],
        lambda node, k, v: [[(0, backward(node, k, v))]],
    )


def _joined(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
    """The factors of values side by side: with a size along the axis, unless all are alike."""
    axis, is_new, shapes = param(node.eqn, "dimension", "axis"), node.name == "stack", node.shapes[0]
    parts = [known(v, len(shape)) for v, shape in zip(ins, shapes, strict=True)]
    parts = [np.expand_dims(v, axis) for v in parts] if is_new else parts
    if all(v.shape[axis] == 1 and np.array_equal(v, parts[0]) for v in parts):
        return [parts[0]]
    others = np.broadcast_shapes(*(np.take(v, [0], axis).shape for v in parts))
    full = lambda v, n: np.broadcast_to(v, (*others[:axis], n, *others[axis + 1 :]))
    sizes = [1 if is_new else shape[axis] for shape in shapes]
    return [lean(np.concatenate([full(v, n) for v, n in zip(parts, sizes, strict=True)], axis))]


def _apart(node: Node, _: int, v: Factors) -> list[Wanted]:
    axis, is_new = param(node.eqn, "dimension", "axis"), node.name == "stack"
    ends = np.cumsum([0, *(1 if is_new else shape[axis] for shape in node.shapes[0])]).tolist()
    part = lambda a, b: v if v.shape[axis] == 1 else v.take(range(a, b), axis)
    parts = [part(*bounds) for bounds in itertools.pairwise(ends)]
    return [[(k, lean(w.squeeze(axis) if is_new else w)) for k, w in enumerate(parts)]]


def _padded_axes(node: Node) -> list[int]:
    return [i for i, config in enumerate(param(node.eqn, "padding_config")) if any(config)]


def _padded(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
    if ins[1] is not None:  # neither 0 nor infinite
        raise NoFactorsError("with a value that would not be divided")
    return [apart(known(ins[0], len(node.shapes[0][0])), _padded_axes(node))]


def _written(node: Node) -> tuple[list[int], list[int], Sequence[int]]:
    """The axes along which a part is written, the others, and where these are in the part, as `_Picked` has them."""
    shape = node.shapes[0][0]
    if node.name == "dynamic_update_slice":
        part, every = node.shapes[0][1], list(range(len(shape)))
        return [i for i in every if part[i] != shape[i]], every, every
    numbers, part = param(node.eqn, "dimension_numbers"), node.shapes[0][2]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept, places = [i for i in range(len(shape)) if i not in gone], numbers.update_window_dims
    partial = {i for place, i in zip(places, kept, strict=True) if part[place] != shape[i]}
    return sorted({*gone, *numbers.scatter_dims_to_operand_dims, *partial}), kept, places


def _writes(k: int) -> Transfer:
    """The transfer of a primitive that writes operand k into the first one, or adds it: both have the same factors."""

    def of_part(node: Node, v: Factors) -> Factors:
        cut, kept, places = _written(node)
        sizes = dict(zip(places, (apart(v, cut).shape[i] for i in kept), strict=True))
        return v.reshape([sizes.get(i, 1) for i in range(len(node.shapes[0][k]))])

    def of_whole(node: Node, v: Factors) -> Factors:
        _, kept, places = _written(node)
        own = dict(zip(places, kept, strict=True))
        sizes = {
            own[i]: n for i, n in enumerate(apart(v, [i for i in range(v.ndim) if i not in own]).shape) if i in own
        }
        return v.reshape([sizes.get(i, 1) for i in range(len(node.shapes[0][0]))])

    def ahead(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
        part = ins[k]
        both = [ins[0], None if part is None else of_whole(node, part)]
        return [apart(v, _written(node)[0]) for v in _alike(node, both)]

    def back(node: Node, _: int, v: Factors) -> list[Wanted]:
        v = level(v, _written(node)[0])
        return [[(0, v), (k, of_part(node, v))]]

    return Transfer(ahead, back)


def _sorted() -> Transfer:
    """The transfer of a sort: along its axis elements change places, of all operands alike."""

    def ahead(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
        return [apart(known(v, len(node.shapes[0][k])), [param(node.eqn, "dimension")]) for k, v in enumerate(ins)]

    return Transfer(ahead, lambda node, k, v: [[(k, level(v, [param(node.eqn, "dimension")]))]])


_IDENTITY = _one(lambda node, v: v, lambda node, _, v: v)

# Of one value after another


def _alike(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
    ndim = len(node.shapes[1][0])
    first, *others = [known(v, ndim) for v in ins if v is not None] or [nothing(ndim)]
    if not all(np.array_equal(v, first) for v in others):
        raise NoFactorsError("beside a value that would not be divided alike")
    return [first]


def _to_all(node: Node, _: int, v: Factors, start: int = 0) -> list[Wanted]:
    return [[(k, v) for k in range(start, len(node.ins))]]


def _selected(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
    if ins[0] is not None and ins[0].any():
        raise NoFactorsError("by a condition that would be divided")
    return _alike(node, ins[1:])


def _signs(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
    """The factors of a result that positive ones do not change, such as of a comparison of two values with the same."""
    _alike(node, ins)
    return [nothing(len(node.shapes[1][0]))]


def _refused(node: Node, _: int, v: Factors) -> list[Wanted]:
    raise NoFactorsError("which passes no factor")


def _multiplied(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
    ndim = len(node.shapes[1][0])
    a, b = (known(v, ndim) for v in ins)
    return [product(a, -b if node.name == "div" else b)]


def _to_one(node: Node, _: int, v: Factors) -> list[Wanted]:
    return [[(0, v)]] if node.name == "div" else [[(0, v)], [(1, v)]]


# Reductions


def _axes_of(node: Node) -> tuple[int, ...]:
    return tuple(param(node.eqn, "axes"))


def _reduce(forgets: bool = False) -> Transfer:
    forward = lambda node, v: apart(v, _axes_of(node)).squeeze(_axes_of(node))
    if forgets:  # indices
        return Transfer(lambda node, ins: [forward(node, known(ins[0], len(node.shapes[0][0]))) * 0], _refused)
    return _one(forward, lambda node, _, v: np.expand_dims(v, _axes_of(node)))


def _cumulative() -> Transfer:
    axes = lambda node: [param(node.eqn, "axis")]
    return _one(lambda node, v: apart(v, axes(node)), lambda node, _, v: level(v, axes(node)))


def _windows() -> Transfer:
    def axes(node: Node) -> set[int]:
        wide = {i for i, (n, m) in enumerate(zip(*(shapes[0] for shapes in node.shapes), strict=True)) if n != m}
        return wide.union(i for i, n in enumerate(param(node.eqn, "window_dimensions")) if n > 1)

    return _one(lambda node, v: apart(v, axes(node)), lambda node, _, v: level(v, axes(node)))


# Contractions. The factors of both operands are spread over the axes of the result and those that are summed.


class Sides(NamedTuple):
    """The operands of a contraction over common axes.

    Attributes:
      spread: (side, factors of an operand) -> over the common axes.
      gather: (side, factors over the common axes) -> of an operand.
      own: of each side, the common axes that it has.
      summed: the common axes that are summed.
      result, of_result: from the common axes to the axes of the result, and back.
      channels: of each side, the axes of the operand along which channels run.
    """

    spread: Callable[[int, Factors], Factors]
    gather: Callable[[int, Factors], Factors]
    own: tuple[frozenset[int], frozenset[int]]
    summed: tuple[int, ...]
    result: Callable[[Factors], Factors]
    of_result: Callable[[Factors], Factors]
    channels: tuple[tuple[int, ...], tuple[int, ...]]

    def opposite(self, side: int, v: Factors) -> Factors:
        """The factors of the other operand that cancel the factors of this one."""
        return lean(self.gather(1 - side, -self.spread(side, v)))


def axes_of(node: Node) -> Axes:
    """The names of the axes of a contraction."""
    op = OPS[node.name]
    if not op.can_replace(node.eqn.params):
        raise NoFactorsError("whose groups are not of rows")
    return op.of(node.eqn.params).axes([len(shape) for shape in node.shapes[0][:2]])


def sides_of(node: Node) -> Sides:
    """The operands of a contraction over common axes: those of the output, and those that are summed."""
    axes, shapes = axes_of(node), (*node.shapes[0][:2], *node.shapes[1])
    every = *axes.operands, axes.out
    parts = [axes.parts(names) for names in every]
    common = [*(name for name in parts[2] if name in (*parts[0], *parts[1])), *axes.summed]
    without = lambda names, others: [i for i, name in enumerate(names) if name not in others]

    def split(k: int, v: Factors) -> Factors:
        """The factors of an operand, or the output, with two axes for each in groups."""
        of_groups = lambda n: (axes.groups, n // axes.groups) if n > 1 else (1, 1)
        sizes = lambda name, n: of_groups(n) if name in axes.of_groups else (n,)
        return v.reshape([size for of in zip(every[k], v.shape, strict=True) for size in sizes(*of)])

    def joined(k: int, v: Factors) -> Factors:
        full, sizes = [], []
        for name, n in zip(every[k], shapes[k], strict=True):
            own = v.shape[len(full) : len(full) + 1 + (name in axes.of_groups)]
            own = (axes.groups, n // axes.groups) if len(own) > 1 and max(own) > 1 else own
            full += own
            sizes.append(math.prod(own))
        return lean(np.broadcast_to(v, full).reshape(sizes))

    def spread(k: int, v: Factors, alone: Callable[[Factors, list[int]], Factors] = apart) -> Factors:
        v = alone(split(k, v), without(parts[k], common))
        return lean(arranged(v, parts[k], common))

    def gather(k: int, v: Factors) -> Factors:
        return joined(k, arranged(apart(v, without(common, parts[k])), common, parts[k]))

    own = [frozenset(i for i, name in enumerate(common) if name in names) for names in parts[:2]]
    is_met = lambda name: {*axes.met}.issuperset(axes.parts([name]))
    channels = [tuple(i for i, name in enumerate(names) if is_met(name)) for names in axes.operands]
    return Sides(
        spread, gather, (own[0], own[1]), tuple(i for i, name in enumerate(common) if name in axes.summed),
        lambda v: gather(2, v), lambda v: spread(2, v, level), (channels[0], channels[1]),
    )  # fmt: skip


def _contracted(node: Node, ins: Sequence[Factors | None]) -> list[Factors] | Unmet:
    sides = sides_of(node)
    if any(v is not None and v.any() for v in ins[2:]):
        raise NoFactorsError("as an operand beside those that meet")
    spread = [sides.spread(side, known(ins[side], len(node.shapes[0][side]))) for side in range(2)]
    both = product(*spread)
    if all(both.shape[i] == 1 for i in sides.summed):
        _check_more(node, both)
        return [lean(sides.result(both))]
    for side in range(2):
        if not spread[1 - side].any():
            return Unmet(1 - side, lean(sides.gather(1 - side, -spread[side])))
    raise NoFactorsError("which sums channels")


def _check_more(node: Node, v: Factors) -> None:
    """Refuses factors of a result into which more floats go than the two operands, such as a bias of its own."""
    if v.any() and any(checks.is_float(aval.dtype) for aval in avals(node.eqn.invars)[2:]):
        raise NoFactorsError("beside an operand that would not be divided")


def _to_operand(node: Node, _: int, v: Factors) -> list[Wanted]:
    _check_more(node, v)
    sides = sides_of(node)
    spread = sides.of_result(v)
    along = {i for i, n in enumerate(spread.shape) if n > 1}
    ways = [[(side, lean(sides.gather(side, spread)))] for side in range(2) if along <= sides.own[side]]
    if not ways:  # the weight is the one with fewer axes, or the second
        side = int(len(node.shapes[0][1]) <= len(node.shapes[0][0]))
        level(spread, along - sides.own[side])
    return ways


_LINEAR, _PRODUCT = Transfer(_alike, _to_all), Transfer(_multiplied, _to_one)

OF_MOVES: dict[str, Transfer] = {  # by how they move
    **dict.fromkeys(("moves", "picks"), Transfer(_moved, _moved_back)),
    "each": _each(),
    "casts": _cast(),
    "joins": Transfer(_joined, _apart),
}
TRANSFERS: dict[str, Transfer] = {
    "pad": Transfer(_padded, lambda node, _, v: [[(0, level(v, _padded_axes(node)))]]),
    "sort": _sorted(),
    "dynamic_update_slice": _writes(1),
    **dict.fromkeys(("scatter", "scatter-add"), _writes(2)),
    **dict.fromkeys(("neg", "abs"), _IDENTITY),
    **dict.fromkeys(("add", "add_any", "sub", "max", "min"), _LINEAR),
    "select_n": Transfer(_selected, functools.partial(_to_all, start=1)),
    **dict.fromkeys(("mul", "div"), _PRODUCT),
    **dict.fromkeys(("sign", "is_finite", "eq", "ne", "lt", "le", "gt", "ge"), Transfer(_signs, _refused)),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), _reduce()),
    **dict.fromkeys(("argmax", "argmin"), _reduce(forgets=True)),
    **dict.fromkeys(("cumsum", "cummax", "cummin"), _cumulative()),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _windows()),
}


def transfer_of(name: str) -> Transfer | None:
    """The transfer of a primitive; None for one that passes no factor."""
    if name in OPS:
        return Transfer(_contracted, _to_operand)
    return TRANSFERS.get(name) or (OF_MOVES.get(MOVES[name].how) if name in MOVES else None)
