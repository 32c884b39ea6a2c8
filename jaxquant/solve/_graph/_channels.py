# SPDX-License-Identifier: Apache-2.0
"""What becomes of factors of channels in the primitives of jax: which elements are divided, or multiplied, by which.

One entry a primitive in RULES; what has none passes no factor.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._base import _checks as checks
from ..._base import _groups as grouping
from ..._base._axes import int_pairs
from ..._contract._ops import OPS
from ..._program._jaxpr import order_read, param
from ._factors import Factors, NoFactorsError, UnmetError, apart, known, lean, level, nothing, product
from ._flat import Node, dtype_of_result

Wanted = list[tuple[int, Factors]]  # of operands, by their number, the factors that they must have


class Rule(NamedTuple):
    """What a primitive makes of factors.

    Attributes:
      forward: (node, factors of the operands; None where any are as good) -> factors of the results.
      backward: (node, number of the result, its factors) -> what operands must have for it: the ways there are.
    """

    forward: Callable[[Node, Sequence[Factors | None]], list[Factors]]
    backward: Callable[[Node, int, Factors], list[Wanted]]


# Moves


def _one(forward: Callable[[Node, Factors], Any], backward: Callable[[Node, int, Factors], Factors]) -> Rule:
    """The rule of a primitive that moves its first operand; others, such as indices, must have no factors."""

    def ahead(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
        if any(v is not None and v.any() for v in ins[1:]):
            raise NoFactorsError("by an index that would be divided")
        made = forward(node, known(ins[0], len(node.shapes[0][0])))
        return list(map(lean, made)) if isinstance(made, list) else [lean(made)]

    return Rule(ahead, lambda node, k, v: [[(0, backward(node, k, v))]])


def _same() -> Rule:
    """The rule of what takes several values and gives each."""
    ndim = lambda node, k: len(node.shapes[0][k])
    return Rule(lambda node, ins: [known(v, ndim(node, k)) for k, v in enumerate(ins)], lambda node, k, v: [[(k, v)]])


def _cast() -> Rule:
    def through(node: Node, v: Factors) -> Factors:
        if v.any() and not checks.is_float(dtype := dtype_of_result(node)):
            raise NoFactorsError(f"to {dtype}")
        return v

    return _one(through, lambda node, _, v: through(node, v))


def _reshaped(v: Factors, old: tuple[int, ...], new: tuple[int, ...]) -> Factors:
    full, sizes = list(v.shape), []
    for of_old, of_new in grouping.segments(old, new):
        changes = any(v.shape[i] > 1 for i in of_old)
        for i in of_old:
            full[i] = old[i] if changes else 1
        sizes += [new[j] if changes else 1 for j in of_new]
    return lean(np.broadcast_to(v, full).reshape(sizes))


def _as_read(node: Node) -> tuple[int, ...]:
    """The shape of the operand of a reshape with its axes in the order in which they are read."""
    return tuple(node.shapes[0][0][i] for i in order_read(node.eqn))


def _broadcast(node: Node, v: Factors) -> Factors:
    places, sizes = param(node.eqn, "broadcast_dimensions"), [1] * len(node.shapes[1][0])
    for place, n in zip(places, v.shape, strict=True):
        sizes[place] = n
    return v.reshape(sizes)


def _unbroadcast(node: Node, _: int, v: Factors) -> Factors:
    places, shape = param(node.eqn, "broadcast_dimensions"), node.shapes[0][0]
    kept = [i for i, n in zip(places, shape, strict=True) if n > 1]
    v = level(v, [i for i in range(v.ndim) if i not in kept])
    return v.reshape([v.shape[i] for i in places])


def _cut(v: Factors, cuts: Sequence[tuple[int, int, int]]) -> Factors:
    return v[tuple(slice(None) if n == 1 else slice(*cut) for n, cut in zip(v.shape, cuts, strict=True))]


def _uncut(v: Factors, cuts: Sequence[tuple[int, int, int]], shape: tuple[int, ...]) -> Factors:
    """Factors of the whole where a part has these; 0 elsewhere."""
    partial = [cut != (0, n, 1) for cut, n in zip(cuts, shape, strict=True)]
    made = np.zeros([n if p else v.shape[i] for i, (p, n) in enumerate(zip(partial, shape, strict=True))], v.dtype)
    made[tuple(slice(*cut) if p else slice(None) for p, cut in zip(partial, cuts, strict=True))] = v
    return lean(made)


def _slice_cuts(node: Node) -> list[tuple[int, int, int]]:
    starts, stops = param(node.eqn, "start_indices"), param(node.eqn, "limit_indices")
    strides = param(node.eqn, "strides") or (1,) * len(starts)
    return [
        (int(a), n if s == 1 and b == n else int(b), int(s))
        for a, b, s, n in zip(starts, stops, strides, node.shapes[0][0], strict=True)
    ]


def _parts(shapes: Sequence[tuple[int, ...]], axis: int) -> list[list[tuple[int, int, int]]]:
    """How arrays of these shapes lie side by side in one of them all."""
    ends = np.cumsum([0, *(shape[axis] for shape in shapes)]).tolist()
    return [
        [(ends[k], ends[k + 1], 1) if i == axis else (0, n, 1) for i, n in enumerate(shape)]
        for k, shape in enumerate(shapes)
    ]


def _split_cuts(node: Node) -> list[list[tuple[int, int, int]]]:
    return _parts(node.shapes[1], param(node.eqn, "axis"))


def _side_by_side(parts: Sequence[Factors], sizes: Sequence[int], axis: int) -> Factors:
    """The factors of values of these sizes along an axis, one after the other."""
    if all(v.shape[axis] == 1 and np.array_equal(v, parts[0]) for v in parts):
        return parts[0]
    others = np.broadcast_shapes(*(np.take(v, [0], axis).shape for v in parts))
    full = lambda v, n: np.broadcast_to(v, (*others[:axis], n, *others[axis + 1 :]))
    return lean(np.concatenate([full(v, n) for v, n in zip(parts, sizes, strict=True)], axis))


def _concatenated(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
    axis, parts = param(node.eqn, "dimension"), [known(v, len(node.shapes[1][0])) for v in ins]
    return [_side_by_side(parts, [shape[axis] for shape in node.shapes[0]], axis)]


def _unconcatenated(node: Node, _: int, v: Factors) -> list[Wanted]:
    cuts = _parts(node.shapes[0], param(node.eqn, "dimension"))
    return [[(k, lean(_cut(v, of))) for k, of in enumerate(cuts)]]


def _stacked(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
    axis, ndim = param(node.eqn, "axis"), len(node.shapes[1][0]) - 1
    return [_side_by_side([np.expand_dims(known(v, ndim), axis) for v in ins], [1] * len(ins), axis)]


def _turn_of(v: Factors, k: int, axis: int) -> Factors:
    """The factors at place k of an axis, without it."""
    return lean(v.take(k if v.shape[axis] > 1 else 0, axis))


def _unstacked_of(node: Node, k: int, v: Factors) -> Factors:
    axis, shape = param(node.eqn, "axis"), node.shapes[0][0]
    return _uncut(
        np.expand_dims(v, axis), [(k, k + 1, 1) if i == axis else (0, n, 1) for i, n in enumerate(shape)], shape
    )


def _tiled(node: Node, v: Factors) -> Factors:
    return np.tile(v, [r if n > 1 else 1 for r, n in zip(param(node.eqn, "reps"), v.shape, strict=True)])


def _untiled(node: Node, _: int, v: Factors) -> Factors:
    for i, (n, times) in enumerate(zip(node.shapes[0][0], param(node.eqn, "reps"), strict=True)):
        if times > 1 and v.shape[i] > 1:
            v = level(v.reshape(*v.shape[:i], times, n, *v.shape[i + 1 :]), [i]).squeeze(i)
    return v


def _padded_axes(node: Node) -> list[int]:
    return [i for i, config in enumerate(param(node.eqn, "padding_config")) if any(config)]


def _padded(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
    if ins[1] is not None:  # neither 0 nor infinite
        raise NoFactorsError("with a value that would not be divided")
    return [apart(known(ins[0], len(node.shapes[0][0])), _padded_axes(node))]


def _picked_axes(node: Node) -> list[int]:
    """The axes along which indices say which part of a value is taken."""
    sizes = zip(node.shapes[0][0], param(node.eqn, "slice_sizes"), strict=True)
    return [i for i, (whole, part) in enumerate(sizes) if part != whole]


class _Picked(NamedTuple):
    """What a gather makes of axes: of the operand those along which indices pick, and where the others are."""

    cut: list[int]
    kept: list[int]
    places: Sequence[int]


def _picked_by_indices(node: Node) -> _Picked:
    numbers, sizes = param(node.eqn, "dimension_numbers"), param(node.eqn, "slice_sizes")
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    shape = node.shapes[0][0]
    cut = [i for i, n in enumerate(shape) if i in gone or i in numbers.start_index_map or sizes[i] != n]
    return _Picked(cut, [i for i in range(len(shape)) if i not in gone], numbers.offset_dims)


def _gathered(node: Node, v: Factors) -> Factors:
    fill = param(node.eqn, "fill_value")
    if fill and fill == fill:  # neither None, nor 0 or NaN, which are the same divided
        raise NoFactorsError("with a value that would not be divided")
    cut, kept, places = _picked_by_indices(node)
    sizes = dict(zip(places, (apart(v, cut).shape[i] for i in kept), strict=True))
    return v.reshape([sizes.get(i, 1) for i in range(len(node.shapes[1][0]))])


def _ungathered(node: Node, _: int, v: Factors) -> Factors:
    cut, kept, places = _picked_by_indices(node)
    own = {place: i for place, i in zip(places, kept, strict=True) if i not in cut}
    v = level(v, [i for i in range(v.ndim) if i not in own])
    sizes = {i: v.shape[place] for place, i in own.items()}
    return v.reshape([sizes.get(i, 1) for i in range(len(node.shapes[0][0]))])


def _written(node: Node) -> tuple[list[int], list[int], Sequence[int]]:
    """Of a write, as `_Picked`: the axes along which a part is written, the others, and where these are in the part."""
    shape = node.shapes[0][0]
    if node.name == "dynamic_update_slice":
        part, every = node.shapes[0][1], list(range(len(shape)))
        return [i for i in every if part[i] != shape[i]], every, every
    numbers, part = param(node.eqn, "dimension_numbers"), node.shapes[0][2]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept, places = [i for i in range(len(shape)) if i not in gone], numbers.update_window_dims
    partial = {i for place, i in zip(places, kept, strict=True) if part[place] != shape[i]}
    return sorted({*gone, *numbers.scatter_dims_to_operand_dims, *partial}), kept, places


def _writes(k: int) -> Rule:
    """The rule of what writes operand k into the first one, or adds it: both have the same factors."""

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

    return Rule(ahead, back)


def _sorted() -> Rule:
    """The rule of a sort: along its axis elements change places, of all operands alike."""

    def ahead(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
        return [apart(known(v, len(node.shapes[0][k])), [param(node.eqn, "dimension")]) for k, v in enumerate(ins)]

    return Rule(ahead, lambda node, k, v: [[(k, level(v, [param(node.eqn, "dimension")]))]])


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
    """Of what a positive factor does not change, such as a comparison of two values with the same one."""
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


def _reduce(forgets: bool = False) -> Rule:
    forward = lambda node, v: apart(v, _axes_of(node)).squeeze(_axes_of(node))
    if forgets:  # indices
        return Rule(lambda node, ins: [forward(node, known(ins[0], len(node.shapes[0][0]))) * 0], _refused)
    return _one(forward, lambda node, _, v: np.expand_dims(v, _axes_of(node)))


def _cumulative() -> Rule:
    axes = lambda node: [param(node.eqn, "axis")]
    return _one(lambda node, v: apart(v, axes(node)), lambda node, _, v: level(v, axes(node)))


def _windows() -> Rule:
    def axes(node: Node) -> set[int]:
        wide = {i for i, (n, m) in enumerate(zip(*(shapes[0] for shapes in node.shapes), strict=True)) if n != m}
        return wide.union(i for i, n in enumerate(param(node.eqn, "window_dimensions")) if n > 1)

    return _one(lambda node, v: apart(v, axes(node)), lambda node, _, v: level(v, axes(node)))


# Contractions. The factors of both operands are spread over the axes of the result and those that are summed.


class Sides(NamedTuple):
    """How the operands of a contraction lie over common axes.

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
        """What the other operand must have for the factors of this one to cancel."""
        return lean(self.gather(1 - side, -self.spread(side, v)))


def sides_of(node: Node) -> Sides:
    """How the operands of a dot, a ragged dot or a convolution lie over common axes."""
    if node.name == "conv_general_dilated":
        return _conv_sides(node)
    if node.name == "dot_general":
        return _dot_sides(node, int_pairs(param(node.eqn, "dimension_numbers")))
    if not OPS[node.name].can_replace(node.eqn.params):
        raise NoFactorsError("whose groups are not of rows")
    numbers = param(node.eqn, "ragged_dot_dimension_numbers")
    return _dot_sides(node, int_pairs(numbers.dot_dimension_numbers), int(numbers.rhs_group_dimensions[0]))


def _dot_sides(node: Node, numbers: Any, group: int | None = None) -> Sides:
    """Over (batch, free of a, free of b, contracted); all matrices of a ragged dot, which `group` counts, are alike."""
    contracted, batch = numbers
    ndims, alike = [len(shape) for shape in node.shapes[0][:2]], ((), () if group is None else (group,))
    taken = [{*contracted[side], *batch[side], *alike[side]} for side in range(2)]
    free = [[i for i in range(ndims[side]) if i not in taken[side]] for side in range(2)]
    orders = [(*alike[side], *batch[side], *free[side], *contracted[side]) for side in range(2)]
    outer, kept = len(batch[0]), len(batch[0]) + len(free[0]) + len(free[1])
    total = kept + len(contracted[0])
    other = [range(outer + len(free[0]), kept), range(outer, outer + len(free[0]))]  # the free axes of the other one

    def spread(side: int, v: Factors) -> Factors:
        v = (
            apart(v, alike[side])
            .transpose(orders[side])
            .reshape([v.shape[i] for i in orders[side][len(alike[side]) :]])
        )
        return np.expand_dims(v, tuple(other[side]))

    def gather(side: int, v: Factors) -> Factors:
        v = apart(v, other[side]).squeeze(tuple(other[side]))
        return v.reshape([*(1 for _ in alike[side]), *v.shape]).transpose(np.argsort(orders[side]))

    summed, axes = tuple(range(kept, total)), frozenset(range(total))
    own = axes.difference(other[0]), axes.difference(other[1])
    return Sides(
        spread, gather, own, summed, lambda v: v.squeeze(summed), lambda v: np.expand_dims(v, summed),
        ((*batch[0], *contracted[0]), (*batch[1], *contracted[1])),
    )  # fmt: skip


def _conv_sides(node: Node) -> Sides:
    """Over (groups, output features of each, input features of each)."""
    numbers, groups = param(node.eqn, "dimension_numbers"), param(node.eqn, "feature_group_count")
    if param(node.eqn, "batch_group_count") != 1:
        raise NoFactorsError("in groups of examples")
    (out, inner, *_), feature, ndim = numbers.rhs_spec, numbers.lhs_spec[1], len(node.shapes[0][0])
    features, made, each = node.shapes[0][0][feature], node.shapes[0][1][out], node.shapes[0][1][inner]

    def vector(v: Factors, axes: Sequence[int], sizes: Sequence[int]) -> Factors:
        """The factors along some axes alone: of these sizes, or of size 1."""
        apart(v, [i for i in range(ndim) if i not in axes])
        v = v.transpose([*axes, *(i for i in range(ndim) if i not in axes)]).reshape([v.shape[i] for i in axes])
        return np.broadcast_to(v, sizes)

    def placed(v: Factors, axes: Sequence[int]) -> Factors:
        v = v.reshape([*v.shape, *[1] * (ndim - len(axes))])
        return lean(v.transpose(np.argsort([*axes, *(i for i in range(ndim) if i not in axes)])))

    def spread(side: int, v: Factors) -> Factors:
        if side == 0:
            return lean(vector(v, [feature], [features]).reshape(groups, 1, each))
        return lean(vector(v, [out, inner], [made, each]).reshape(groups, made // groups, each))

    def gather(side: int, v: Factors) -> Factors:
        if side == 0:
            return placed(np.broadcast_to(apart(v, [1]), (groups, 1, each)).reshape(features), [feature])
        return placed(np.broadcast_to(v, (groups, made // groups, each)).reshape(made, each), [out, inner])

    at = numbers.out_spec[1]
    result = lambda v: placed(np.broadcast_to(v, (groups, made // groups, 1)).reshape(made), [at])
    rest = [i for i in range(ndim) if i != at]
    of_result = lambda v: lean(vector(level(v, rest), [at], [made]).reshape(groups, made // groups, 1))
    return Sides(
        spread, gather, (frozenset((0, 2)), frozenset((0, 1, 2))), (2,), result, of_result, ((feature,), (inner,))
    )


def _contracted(node: Node, ins: Sequence[Factors | None]) -> list[Factors]:
    sides = sides_of(node)
    spread = [sides.spread(side, known(ins[side], len(node.shapes[0][side]))) for side in range(2)]
    both = product(*spread)
    if all(both.shape[i] == 1 for i in sides.summed):
        return [lean(sides.result(both))]
    for side in range(2):
        if not spread[1 - side].any():
            raise UnmetError(1 - side, lean(sides.gather(1 - side, -spread[side])))
    raise NoFactorsError("which sums channels")


def _to_operand(node: Node, _: int, v: Factors) -> list[Wanted]:
    sides = sides_of(node)
    spread = sides.of_result(v)
    along = {i for i, n in enumerate(spread.shape) if n > 1}
    ways = [[(side, lean(sides.gather(side, spread)))] for side in range(2) if along <= sides.own[side]]
    if not ways:  # the weight is the one with fewer axes, or the second
        side = int(len(node.shapes[0][1]) <= len(node.shapes[0][0]))
        level(spread, along - sides.own[side])
    return ways


_LINEAR, _PRODUCT = Rule(_alike, _to_all), Rule(_multiplied, _to_one)

RULES: dict[str, Rule] = {
    "transpose": _one(
        lambda node, v: v.transpose(param(node.eqn, "permutation")),
        lambda node, _, v: v.transpose(np.argsort(param(node.eqn, "permutation"))),
    ),
    "reshape": _one(
        lambda node, v: _reshaped(v.transpose(order_read(node.eqn)), _as_read(node), node.shapes[1][0]),
        lambda node, _, v: _reshaped(v, node.shapes[1][0], _as_read(node)).transpose(np.argsort(order_read(node.eqn))),
    ),
    "squeeze": _one(
        lambda node, v: v.squeeze(tuple(param(node.eqn, "dimensions"))),
        lambda node, _, v: np.expand_dims(v, tuple(param(node.eqn, "dimensions"))),
    ),
    "broadcast_in_dim": _one(_broadcast, _unbroadcast),
    "rev": _one(
        lambda node, v: np.flip(v, param(node.eqn, "dimensions")),
        lambda node, _, v: np.flip(v, param(node.eqn, "dimensions")),
    ),
    "slice": _one(
        lambda node, v: _cut(v, _slice_cuts(node)),
        lambda node, _, v: _uncut(v, _slice_cuts(node), node.shapes[0][0]),
    ),
    "split": _one(
        lambda node, v: [_cut(v, cuts) for cuts in _split_cuts(node)],
        lambda node, k, v: _uncut(v, _split_cuts(node)[k], node.shapes[0][0]),
    ),
    "concatenate": Rule(_concatenated, _unconcatenated),
    "stack": Rule(
        _stacked,
        lambda node, _, v: [[(k, _turn_of(v, k, param(node.eqn, "axis"))) for k in range(len(node.ins))]],
    ),
    "unstack": _one(
        lambda node, v: [_turn_of(v, k, param(node.eqn, "axis")) for k in range(len(node.outs))], _unstacked_of
    ),
    "tile": _one(_tiled, _untiled),
    "pad": Rule(_padded, lambda node, _, v: [[(0, level(v, _padded_axes(node)))]]),
    "gather": _one(_gathered, _ungathered),
    "sort": _sorted(),
    "dynamic_update_slice": _writes(1),
    **dict.fromkeys(("scatter", "scatter-add"), _writes(2)),
    "dynamic_slice": _one(
        lambda node, v: apart(v, _picked_axes(node)), lambda node, _, v: level(v, _picked_axes(node))
    ),
    **dict.fromkeys(("copy", "name", "stop_gradient", "sharding_constraint", "reshard", "mesh_cast"), _IDENTITY),
    **dict.fromkeys(("convert_element_type", "reduce_precision"), _cast()),
    **dict.fromkeys(("optimization_barrier", "device_put"), _same()),
    **dict.fromkeys(("neg", "abs"), _IDENTITY),
    **dict.fromkeys(("add", "add_any", "sub", "max", "min"), _LINEAR),
    "select_n": Rule(_selected, functools.partial(_to_all, start=1)),
    **dict.fromkeys(("mul", "div"), _PRODUCT),
    **dict.fromkeys(("sign", "is_finite", "eq", "ne", "lt", "le", "gt", "ge"), Rule(_signs, _refused)),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), _reduce()),
    **dict.fromkeys(("argmax", "argmin"), _reduce(forgets=True)),
    **dict.fromkeys(("cumsum", "cummax", "cummin"), _cumulative()),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _windows()),
    **dict.fromkeys(OPS, Rule(_contracted, _to_operand)),
}
