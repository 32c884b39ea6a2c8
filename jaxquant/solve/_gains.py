# SPDX-License-Identifier: Apache-2.0
"""Products in front of weights whose inputs no parameter can make up for: places for the factors of `smooth`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._base import _checks as checks
from .._base import _numerics as num
from .._base._checks import PyTree
from .._paths import named_in_errors
from .._spec._granularity import PerTensor
from .._spec._spec import QuantSpec
from .._transform._choose import Decision
from .._transform._source import Program
from ._graph._graph import Graph
from ._graph._transfer import sides_of
from ._wrapper import Changes, Wrapper

_TENSOR = QuantSpec(granularity=PerTensor())  # of the weights, which are not quantized here


class _Gain(NamedTuple):
    """A gain: its shape, with the turns of scans in front, and the dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype


class WithGains(Wrapper):
    """A function with a product in front of some weights, as `solve.with_gains` returns it.

    Called as the function, with `{"params": params, "gains": gains}` in place of the params, which `init` makes. It can
    be transformed as the function can. The original function is `f.__wrapped__`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        n = self._argnum
        given = args[n] if len(args) > n else None
        if not isinstance(given, Mapping) or set(given) != {"params", "gains"}:
            raise TypeError(
                f"The params, argument {n}, must be a dict of 'params' and 'gains', got {checks.kind(given)}. Make it "
                "of the params by f.init(params, ...)."
            )
        return self._result((*args[:n], given["params"], *args[n + 1 :]), kwargs, given["gains"])

    def init(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The params with gains of ones: of the function that stays the same.

        Args:
          *args, **kwargs: the arguments of the original function; shapes suffice for all but the params.

        Returns:
          {"params": params, "gains": {name: array}}, a gain for each input of the weights, by the name of the first of
          its sites. Its shape is (*turns of scans over the weight, *shape of the input, with 1 along all axes but those
          of the channels), in float32, or float64 for inputs in float64.

        Raises:
          TypeError, ValueError: as a call.
        """
        gains = _gains(self._program(*self._call(args, kwargs)))
        ones = {key: jnp.ones(gain.shape, gain.dtype) for key, gain in gains.items()}
        return {"params": args[self._argnum], "gains": ones}

    def _changes(self, decision: Decision, program: Program) -> Changes:
        def change(key: str) -> Callable[[Array, Mapping[str, Array]], Array]:
            return lambda x, gains: num.downcast(x.astype(gains[key].dtype) * gains[key], x.dtype)

        return {side: (key, change(key)) for key, side in _inputs(decision)}

    def _changed_weights(self, program: Program) -> Collection[str]:
        return ()

    def _check(self, program: Program, arrays: Sequence[Any], given: Any) -> None:
        gains = _gains(program)
        checks.same_keys("gains", given, gains, "Make them by f.init(params, ...) of this call.")
        for key, gain in gains.items():
            checks.shape(f"gains[{key!r}]", given[key], gain.shape, "one for each channel of this input")


def _gains(program: Program) -> dict[str, _Gain]:
    """The gains of a function."""
    nodes = {node.at: node for node in Graph(program.jaxpr, program.paths).nodes if node.at in program.decisions.of}
    found: dict[str, _Gain] = {}
    for location, decision in program.decisions.of.items():
        with named_in_errors(*decision.op.names):
            if location not in nodes:
                raise ValueError(
                    "it is inside a cond, a while loop or a shard_map, where no factor is followed. Take its path out "
                    "of `patterns`."
                )
            for key, side in _inputs(decision):
                operand, stack = decision.contraction.operands[side], program.decisions.entries.of[key].stack
                channels = sides_of(nodes[location]).channels[side]
                own = [n if i in channels else 1 for i, n in enumerate(operand.shape)]
                gain = _Gain((*(n for _, n in stack), *own), num.compute_dtype(operand.dtype))
                if found.setdefault(key, gain) != gain:
                    raise ValueError(
                        f"the input of shape {operand.shape} goes into several weights, which take it along other "
                        "axes. Give each a gain by a call of its own: with_gains(with_gains(f, ...), ...)."
                    )
    return found


def _inputs(decision: Decision) -> list[tuple[str, int]]:
    """The inputs that are multiplied at an op: their keys, and the sides."""
    each = enumerate(decision.operands)
    return [(choice.keys[0], side) for side, choice in each if choice.spec and not choice.is_weight]


def with_gains(f: Callable, patterns: str | Sequence[str], *, params_argnum: int = 0) -> WithGains:
    """A function with a product by ones in front of some weights, for `solve.smooth` to fold its factors into.

    Where the inputs of a weight come out of a gelu, a residual, or the values of an attention that shares them, no
    parameter can make up for a factor. Here the inputs are multiplied by a gain, a parameter that is new:

        y = (x * gain) @ w

    The gains are ones, so that the function stays the same; `smooth` finds them as it finds the gain of a norm, and
    divides them by the factors that it multiplies the weight by. What follows, from `q.observe` to `q.freeze`, sees a
    function as any other. A product for each element of the input is what it costs in each call.

    Args:
      f: as in `quantize_fn`.
      patterns: static, the paths of the weights, as patterns of `Rule`. Weights that take one input share its gain.
      params_argnum: as in `quantize_fn`.

    Returns:
      WithGains: f, with `{"params": params, "gains": gains}` in place of the params; `init(params, *args)` makes it of
      the params and the other arguments of f. So the paths that rules match begin with "params/".

    Gradient: of the products, with respect to gains, too. To leave them as they are, differentiate with respect to
      the params alone, or mask them in the optimizer.

    Raises:
      TypeError: for an `f` that is no function; in a call for params without gains.
      ValueError: in a call, for a pattern that matches no weight; for a weight inside a cond, a while loop, a shard_map
        or a function with a derivative of its own; for gains of other entries or shapes.

    Source: Xiao et al., 2022, "SmoothQuant", where the factor is not folded.

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import Rule, activation_spec, quantize_fn, solve, weight_spec
    >>> f = solve.with_gains(lambda params, x: jax.nn.gelu(x) @ params["w"], "w")
    >>> x = jax.random.normal(jax.random.key(0), (32, 8)).at[:, 0].multiply(100.0)
    >>> params = f.init({"w": jax.random.normal(jax.random.key(1), (8, 4))}, x)
    >>> q = quantize_fn(f, [Rule("**", weight_spec(8), activation_spec(8))])
    >>> smoothed = solve.smooth(params, q, q.observe(params, x, gram=True), x)
    >>> error = lambda params: jnp.square(q(params, x) - f(params, x)).sum().item()
    >>> error(smoothed) < error(params) / 4
    True
    """
    return WithGains(f, patterns, params_argnum, weight=_TENSOR)
