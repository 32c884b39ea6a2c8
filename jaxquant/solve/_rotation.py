# SPDX-License-Identifier: Apache-2.0
"""Inputs and rows of weights rotated by a Hadamard matrix, where no parameter can make up for the rotation."""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax import Array

from .._base import _checks as checks
from .._base._checks import PyTree
from .._base._sharding import shard_like, varying_axes
from .._paths import named_in_errors, with_leaves, with_paths
from .._spec._granularity import PerTensor
from .._spec._spec import QuantSpec
from .._transform._axes import contracted_axes
from .._transform._choose import Decision
from .._transform._layout import Layout, layout_of
from .._transform._source import Program
from ._hadamard import block_of, hadamard
from ._wrapper import Changes, Wrapper


class WithRotation(Wrapper):
    """A function that rotates the inputs of some weights, as `solve.with_rotation` returns it.

    Called as the function, with the params that `init` makes, whose rows are rotated, too. It can be transformed as the
    function can. The original function is `f.__wrapped__`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        return self._result(args, kwargs)

    def init(self, *args: Any, **kwargs: Any) -> PyTree:
        """The params with rotated rows, of the same shapes and dtypes. Applied twice, it gives the params back.

        Args:
          *args, **kwargs: the arguments of the function; shapes suffice for all but the params.

        Raises:
          TypeError, ValueError: as a call.
        """
        params, layouts = args[self._argnum], _layouts(self._program(*self._call(args, kwargs)))
        new = (_rotated(leaf, layouts[path]) if path in layouts else leaf for path, leaf in with_paths(params))
        return with_leaves(params, list(new))

    def _changes(self, decision: Decision, program: Program) -> Changes:
        with named_in_errors(*decision.op.names):
            each = enumerate(zip(decision.operands, _axes(decision), strict=True))
        return {side: (axes, _along(axes)) for side, (choice, axes) in each if not choice.is_weight}

    def _changed_weights(self, program: Program) -> Collection[str]:
        return _layouts(program)

    def _check(self, program: Program, arrays: Sequence[Any], given: Any) -> None:
        layouts = _layouts(program)
        for path, v in zip(program.paths, arrays, strict=True):
            if path in layouts and varying_axes(v):
                raise ValueError(
                    f"At {path!r}: inside shard_map the weight is a shard, which varies over the mesh axes "
                    f"{sorted(varying_axes(v))}: its rows may be fewer than those that `init` rotated together. "
                    "Replicate it, or use jax.jit with shardings."
                )


def _along(axes: tuple[int, ...]) -> Callable[[Array, Any], Array]:
    return lambda x, _: hadamard(x, axes)


@functools.partial(jax.jit, static_argnames="layout")
def _rotated(leaf: Array, layout: Layout) -> Array:
    """A parameter with its rows rotated."""
    return shard_like(layout.parameter(hadamard(layout.matrices(leaf), (-2,))).astype(leaf.dtype), leaf)


def _axes(decision: Decision) -> list[tuple[int, ...]]:
    """The axes along which each operand of an op is rotated, in the order in which those of the weight lie."""
    contraction = decision.contraction
    if not contraction.as_op().pairs_axes([len(v.shape) for v in contraction.operands]):
        raise ValueError(
            f"a rotation is for dots, got {contraction.op!r}, whose inputs meet several rows of the weight. Take its "
            "path out of `patterns`."
        )
    pairs = contracted_axes(contraction)
    length = math.prod(contraction.operands[0].shape[i] for i in pairs[0])
    if block_of(length) < 2:
        raise ValueError(
            f"a rotation is for sums of an even number of products, in blocks of a power of two, got {length}. Take "
            "its path out of `patterns`."
        )
    of_weight = pairs[next((i for i, choice in enumerate(decision.operands) if choice.is_weight), 1)]
    order = sorted(range(len(of_weight)), key=of_weight.__getitem__)
    return [tuple(axes[i] for i in order) for axes in pairs]


def _layouts(program: Program) -> dict[str, Layout]:
    """The layout of each weight in the matrices whose rows are rotated."""
    entries, found = program.decisions.entries.of, {}
    for decision in program.decisions.of.values():
        for side, choice in enumerate(decision.operands):
            if not choice.is_weight:
                continue
            with named_in_errors(choice.name, rule=choice.rule):
                _axes(decision)
                path, *_ = choice.keys
                if reads := entries[path].reads:
                    raise ValueError(
                        f"the parameter is also read by {', '.join(map(repr, reads))}, where its rows would be rotated "
                        "and nothing rotates them back. Take its path out of `patterns`, or give each use a parameter "
                        "of its own."
                    )
                layout = layout_of(decision, side, entries[path].shape)
                if not found.setdefault(path, layout).has_rows_of(layout):
                    raise ValueError(
                        "its ops sum along different axes of it, and it can be rotated along one of them. Take its "
                        "path out of `patterns`, or give each use a parameter of its own."
                    )
    return found


def with_rotation(
    f: Callable, patterns: str | Sequence[str], *, kind: str = "weight", params_argnum: int = 0
) -> WithRotation:
    """A function that rotates the inputs of some weights, whose rows are rotated: it computes what it computed.

    Inputs with a few large channels are hard to round. Multiplied by a Hadamard matrix H, whose square is 1, they are
    spread over all channels, and

        (x H) (H W) = x W

    `solve.rotate` writes H into the parameters that make x. Where x comes out of a gelu and the like, no parameter can,
    and here the function multiplies by it: log2(K) additions for each element of x, once for all weights that take it.
    K is rotated in blocks of the largest power of two that divides it, and in float32 or wider. What follows, from
    `q.observe` to `q.freeze`, files and exports, sees a function as any other, whose params hold H W.

    Args:
      f: as in `quantize_fn`.
      patterns: static, the paths of the weights, as patterns of `Rule`; for kind="act_act" the names of ops, or of
        values that `quant_point` names.
      kind: static. "weight"; or "act_act" for ops of two operands of data, such as the scores of an attention, of which
        both are rotated in each call.
      params_argnum: as in `quantize_fn`.

    Returns:
      WithRotation: f, of params that `init(params, *args)` makes of the params and the other arguments of f.

    Gradient: of the products, with respect to the rotated params.

    Raises:
      TypeError: for an `f` that is no function.
      ValueError: in a call, for a pattern that matches no weight; for convolutions, and sums of an odd number of
        products; for a weight that is not contracted whole and alone, in one way, or that something else reads; inside
        a function with a derivative of its own; and for a shard of a weight, inside `shard_map`.

    Source: Ashkboos et al., 2024, "QuaRot"; the rotations R3 and R4 of Liu et al., 2024, "SpinQuant".

    >>> import numpy as np
    >>> from jaxquant import solve
    >>> f = solve.with_rotation(lambda params, x: x @ params["w"], "w")
    >>> params, x = {"w": np.eye(2, dtype=np.float32)}, np.float32([[8, 2]])
    >>> rotated = f.init(params, x)
    >>> np.round(2 * np.square(rotated["w"]), 3).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    >>> np.round(f(rotated, x), 3).tolist()
    [[8.0, 2.0]]
    """
    checks.one_of("kind", kind, ("weight", "act_act"))
    spec = QuantSpec(granularity=PerTensor()) if kind == "weight" else None
    return WithRotation(f, patterns, params_argnum, weight=spec, kind=kind)
