# SPDX-License-Identifier: Apache-2.0
"""Gains that are a function of a parameter, element by element: 1 + g, exp(g), softplus(g). They absorb factors, too.

The parameter becomes f^-1 of what the gain must be, so that factors pass such a function as if it were not there.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._base._checks import PyTree

_STEPS = 64  # of a bisection: as many as float32 needs between any two numbers of 2 ** 40 or less
# Primitives of monotonic functions without an upper end. What is made of them is inverted, and the result compared.
_FUNCTIONS = {"add", "sub", "mul", "div", "neg", "abs", "max", "exp", "log1p", "log", "square", "ne", "select_n"}
_LINEAR = {"mul", "div"}  # by numbers: which pass factors by themselves


class Elementwise(NamedTuple):
    """A monotonic function of one parameter.

    Attributes:
      path: of the parameter.
      nodes: of the graph program that compute it, in their order.
      numbers: by their values, the constants among their operands.
      result: the value that is the function's.
    """

    path: str
    nodes: tuple[Any, ...]
    numbers: Mapping[int, float]
    result: int

    def __call__(self, x: Array) -> Array:
        """The function of all elements of an array."""
        env: dict[int, Any] = {}
        for node in self.nodes:
            own = [env.get(i, self.numbers.get(i, x)) for i in node.ins]
            ins = [jnp.asarray(v, x.dtype) if isinstance(v, float) else v for v in own]
            env[node.outs[0]] = node.eqn.primitive.bind(*ins, **node.eqn.params)
        return env[self.result]

    def inverse(self, x: Array, wanted: Array) -> Array:
        """What the parameter x must become for the function to have the wanted values; raises where none does."""
        at = [self(jnp.asarray(v, x.dtype)) for v in (0.0, 1.0, -2.0)]
        if not any(isinstance(v, jax.core.Tracer) for v in at):
            start, slope = float(at[0]), float(at[1]) - float(at[0])
            if slope and float(at[2]) == start - 2 * slope:
                return (wanted - start) / slope
        low, high = -128 - jnp.abs(x), 128 + jnp.abs(x) + jnp.abs(wanted)
        for _ in range(_STEPS):
            middle = (low + high) / 2
            is_below = (self(middle) < wanted) == (at[1] > at[0])
            low, high = jnp.where(is_below, middle, low), jnp.where(is_below, high, middle)
        off = jnp.abs(self(high) - wanted) > 1e-4 * jnp.abs(wanted)
        if not isinstance(off, jax.core.Tracer) and off.any():
            raise ValueError(
                f"At {self.path!r}: no value of the parameter gives the gain {wanted[off].ravel()[0]:.3g} that the "
                "factors need, by the function that the program has of it. Leave the weights behind it out of `grams`."
            )
        return high


def functions_of(
    nodes: Sequence[Any], paths: Mapping[int, str], numbers: Mapping[int, float], moves_one: Callable[[str], bool]
) -> dict[str, Elementwise]:
    """The functions of parameters that nothing else reads, by their paths; what moves one value passes it on."""
    owner, inside = dict(paths), dict[int, str]()
    of_path: dict[str, list[Any]] = {path: [] for path in paths.values()}
    for node in nodes:
        found = {path for i in node.ins if (path := owner.get(i) or inside.get(i))}
        if moves_one(node.name) and node.ins[0] in owner:
            owner |= dict.fromkeys(node.outs, owner[node.ins[0]])
        elif node.name in _FUNCTIONS and len(found) == 1 and all(i in numbers for i in _others(node, owner, inside)):
            (path,) = found
            inside[node.outs[0]] = path
            of_path[path].append(node)
    read = {path: set[int]() for path in of_path}  # by what is no part of the function
    for node in nodes:
        if not node.outs or not (node.outs[0] in inside or node.outs[0] in owner):
            for i in node.ins:
                if path := owner.get(i) or inside.get(i):
                    read[path].add(i)
    made = {path: Elementwise(path, tuple(of), numbers, next(iter(read[path]), -1)) for path, of in of_path.items()}
    is_function = lambda path: len(read[path]) == 1 and made[path].result in inside and _bends(of_path[path])
    return {path: function for path, function in made.items() if is_function(path)}


def _others(node: PyTree, *known: Mapping[int, str]) -> Iterator[int]:
    return itertools.filterfalse(lambda i: any(i in of for of in known), node.ins)


def _bends(nodes: Sequence[Any]) -> bool:
    """Whether a function is more than a product by a number."""
    return any(node.name not in _LINEAR for node in nodes)


def number_of(value: object) -> float | None:
    """A constant as a number, if it is one of floats."""
    v = np.asarray(value)
    return float(v) if v.size == 1 and v.dtype.kind in "fV" else None
