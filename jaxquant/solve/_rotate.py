# SPDX-License-Identifier: Apache-2.0
"""Channels rotated in the parameters that make and take them, where the function stays the same."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import Array

from .._base import _checks as checks
from .._base import _numerics as num
from .._base._checks import PyTree
from .._paths import is_qarray, with_leaves, with_paths
from .._transform._quantize_fn import QuantizedFunction
from ._folds import Operands, folded, narrowed, of_channels, operands_of
from ._graph._classes import AxisClasses, Numbers
from ._graph._folding import Fold, Gain, Refused, fold_gain
from ._hadamard import block_of, hadamard
from ._matrices import array
from ._mesh import changed_leaves
from ._model import checked_function, shapes_of

Progress = Callable[[str, int, str | None], None]  # (path, how many channels are rotated together, why not)


class _Rotation:
    """The channels of a model that are rotated, and the gains that weights absorb for it."""

    def __init__(self, operands: Operands):
        found = AxisClasses(operands.graph)
        self.operands, self.classes, self.gains = operands, found.classes, found.gains
        inputs = {path: found.inputs(operand) for path, operand in operands.of.items()}
        self.inputs = {path: self.classes.of(numbers) for path, numbers in inputs.items()}
        self.axes = found.parameters()
        self.wanted = set(itertools.chain(*self.inputs.values()))
        for number in self.wanted:
            if block_of(n := self.classes.sizes[number]) == 1:
                self.classes.forbid((number,), f"are {n}, an odd number")
        for path, axes in self.axes.items():
            if any(axes) and not self._is_float(path):
                self.classes.forbid(tuple(itertools.chain(*axes)), f"are also in {path!r}, which is no array of floats")
        self.folds = [(fold, *gain) for gain in self.gains if (fold := self._fold(*gain))]

    def rotated(self, numbers: Numbers) -> list[int]:
        """The numbers, of some channels, of what is rotated."""
        return [i for i in self.classes.of(numbers) if i in self.wanted and self.classes.why(i) is None]

    def _is_float(self, path: str) -> bool:
        leaf = self.operands.leaves[path]
        return not is_qarray(leaf) and checks.is_float(leaf.dtype)

    def _fold(self, gain: Gain, numbers: Numbers) -> Fold | None:
        """The fold by which weights absorb a gain of channels to be rotated; None if they need not, or cannot."""
        if not self.rotated(numbers):
            return None
        found = fold_gain(self.operands.graph, gain)
        others = () if isinstance(found, Refused) else itertools.filterfalse(self._is_float, found.factors)
        found = next((Refused(f"{path!r} is no array of floats") for path in others), found)
        if isinstance(found, Fold):
            return found
        if not _is_constant(self.operands.leaves[gain.path]):
            why = f"are multiplied by {gain.path!r}, which no weights can take up: {found.why}"
            self.classes.forbid(tuple(self.rotated(numbers)), why)
        return None

    def leaves(self, given: dict[str, Any]) -> dict[str, Any]:
        """The parameters, rotated."""
        leaves = dict(given)
        wide = lambda path: (v := array(leaves[path])).astype(num.compute_dtype(v.dtype))
        for fold, gain, numbers in self.folds:
            if self.rotated(numbers):
                leaves |= {path: wide(path) for path in fold.factors}
                graph, leaf = self.operands.graph, leaves[gain.path]
                function = graph.functions.get(gain.path)
                own = leaf if function is None else function(leaf)
                s = of_channels(jax.ops.segment_sum, own, fold.factors[gain.path], 1, fold.size)
                ones = jnp.ones_like(leaf) if function is None else function.inverse(leaf, jnp.ones_like(leaf))
                for path, new in folded(graph, leaves, fold.factors, s).items():
                    leaves[path] = jnp.where(fold.factors[path] > 0, ones if path == gain.path else 1, new)
        for path, axes in self.axes.items():
            if any(map(self.rotated, axes)):
                leaves[path] = self._turned(wide(path), axes)
        return {
            path: leaf if (old := given[path]) is leaf else narrowed(path, leaf, old.dtype)
            for path, leaf in leaves.items()
        }

    def _turned(self, leaf: Array, axes: Sequence[Numbers]) -> Array:
        numbers = tuple(itertools.chain(*axes))
        return _turned(leaf, tuple((self.classes.sizes[i], bool(self.rotated((i,)))) for i in numbers))

    def together(self, path: str) -> int:
        """The number of inputs of a weight that are rotated together; 1 where they stay."""
        return math.prod(block_of(self.classes.sizes[i]) for i in self.rotated(self.inputs[path]))

    def why(self, path: str) -> str | None:
        """Why the inputs of a weight are not rotated; None where they are."""
        if self.rotated(self.inputs[path]):
            return None
        return self.classes.why(self.inputs[path][-1]) if self.inputs[path] else "are one alone, or all the same"


@functools.partial(jax.jit, static_argnames="axes")
def _turned(leaf: Array, axes: tuple[tuple[int, bool], ...]) -> Array:
    """A parameter with some of its axes rotated, each given by its size and whether it is."""
    v = leaf.reshape([size for size, _ in axes])
    for i in (i for i, (_, is_rotated) in enumerate(axes) if is_rotated):
        v = hadamard(v, (i,))
    return v.reshape(leaf.shape)


def _is_constant(leaf: PyTree) -> bool:
    v = array(leaf)
    return not isinstance(v, jax.core.Tracer) and bool((v == v.reshape(-1)[0]).all())


def rotate(
    params: PyTree,
    q: QuantizedFunction,
    *args: Any,
    unfolded: str = "leave",
    progress: Progress | None = None,
    **kwargs: Any,
) -> PyTree:
    """Rotates channels in all parameters that make and take them, and leaves the function as it is.

    The channels of a residual stream, and those between any two weights with linear ops between, have no basis of their
    own. With a Hadamard matrix H, whose square is 1, what makes them becomes W H, what takes them H W, and

        (x H) (H W) = x W

    A few channels that are much larger than others are spread over all of them by it, so that the inputs of these
    weights become easy to round, and no op is added to the program. A stream is followed through sums, moves, casts,
    scans, and norms by the root of the mean of squares, whose gains become ones: the weights behind take them up. What
    makes it may be rows of embeddings, positions and biases; what makes the values of an attention is rotated head by
    head.

    Args:
      params: the parameters of the function, in float.
      q: what `quantize_fn` returned. The inputs of weights that its rules quantize are rotated where it is possible;
        what else makes or takes these channels is rotated with them.
      *args, **kwargs: the arguments of the function behind its params; shapes suffice.
      unfolded: static. "leave" leaves channels as they are that cannot be rotated; "error" raises.
      progress: (path, together, why) -> None, called for each weight with the number of its inputs that are rotated
        together, the largest power of two that divides their number; 1 and the reason where they stay as they are.

    Returns:
      The params, of the same dtypes. The function gives the same results up to rounding; observe it anew for ranges
      and Grams.

    Gradient: none.

    Raises:
      TypeError: for an argument of another kind.
      ValueError: with unfolded="error" for a weight whose inputs cannot be rotated: because an op that they go through
        treats each channel by itself, such as a gelu or a product, or sums them, as the mean of a LayerNorm; because
        they come from an argument or go into the result; or because no weight can take up a gain, as with an
        embedding that is also the head.

    Source: Ashkboos et al., 2024, "QuaRot"; the rotations R1 and R2 of Liu et al., 2024, "SpinQuant".

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import Rule, activation_spec, quantize_fn, solve, weight_spec
    >>> f = lambda params, x: (jax.nn.relu(x) @ params["w1"]) @ params["w2"]
    >>> q = quantize_fn(f, [Rule("w2", weight_spec(8), activation_spec(8))])
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> params = {"w1": jax.random.normal(keys[0], (8, 16)), "w2": jax.random.normal(keys[1], (16, 4))}
    >>> params["w1"] = params["w1"].at[:, 3].multiply(100.0)
    >>> x = jax.random.normal(keys[2], (32, 8))
    >>> rotated = solve.rotate(params, q, x)
    >>> bool(jnp.allclose(f(rotated, x), f(params, x), rtol=1e-4, atol=1e-3))
    True
    >>> error = lambda params: jnp.square(q(params, x) - f(params, x)).sum().item()
    >>> error(rotated) < error(params) / 4
    True
    """
    checks.one_of("unfolded", unfolded, ("leave", "error"))
    program = checked_function(q).program(shapes_of(params), args, kwargs)
    state = _Rotation(operands_of(program, params))
    for path in state.inputs:
        why = state.why(path)
        if why is not None and unfolded == "error":
            raise ValueError(
                f'At {path!r}: its inputs cannot be rotated: their channels {why}. Pass unfolded="leave", or a '
                "function of `quantize_fn` whose rules leave it out."
            )
        if progress is not None:
            progress(path, state.together(path), why)
    leaves = changed_leaves(state.leaves, state.operands.leaves)
    return with_leaves(params, [leaves[path] for path, _ in with_paths(params)])
