# SPDX-License-Identifier: Apache-2.0
"""A program evaluated with some contractions replaced."""

import collections
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._base._sharding import vary_together
from ._jaxpr import Call, Location, evaluated, kind, programs
from ._moves import MOVES, takes_unquantized, unquantized
from ._param import QuantizedParam, Unquantized, from_integers, quantized_now


class Scope(NamedTuple):
    """The context of an evaluation, beside the arguments of the program.

    Attributes:
      qparams: of the inputs of the contractions in it, by entry.
      key: PRNG key with which they, and gradients, are rounded stochastically, or None; of each turn of a loop its own.
      observed: what its contractions have seen of their inputs, by entry; filled while it is evaluated.
      memo: what they have computed and may use again.
    """

    qparams: Mapping[str, Any]
    key: Array | None
    observed: dict[str, Any]
    memo: dict[Any, Any]

    def note(self, observed: Mapping[str, Any]) -> None:
        """Adds what is observed to what was observed before."""
        before = self.observed
        before.update({key: before[key].merged(v) if key in before else v for key, v in observed.items()})


class Inputs(NamedTuple):
    """The place of the qparams and observations of the inputs of contractions.

    Attributes:
      used: of each location of a contraction, the entries whose qparams it needs.
      observed: of each entry that is observed, the locations where.
      scans: of each entry, the scans whose turns each have a value of their own.
      nothing: (entry, locations of scans) -> what is observed where nothing is seen, stacked for these scans.
      across: (what is seen on one device, axes of the mesh) -> what is seen on all.
    """

    used: Mapping[Location, Collection[str]]
    observed: Mapping[str, Collection[Location]]
    scans: Mapping[str, Collection[Location]]
    nothing: Callable[[str, Collection[Location]], Any]
    across: Callable[[Any, Collection[str]], Any]

    def within(self, qparams: Mapping[str, Any], location: Location) -> dict[str, Any]:
        """The qparams that are needed at a location, or inside of it."""
        n = len(location)
        needed = {key for at, keys in self.used.items() if at[:n] == location for key in keys}
        return {key: v for key, v in qparams.items() if key in needed}

    def seen(self, location: Location, ins: Sequence[Any]) -> dict[str, Any]:
        """The neutral observation of each entry below `location`, varying over the mesh axes of `ins`."""
        n = len(location)
        inside = [key for key, places in self.observed.items() if any(at[:n] == location for at in places)]
        seen = {key: self.nothing(key, [at for at in self.scans[key] if at[:n] == location]) for key in inside}
        return vary_together(seen, ins)[0] if seen else seen


class Replacement(NamedTuple):
    """The function that takes the place of an equation.

    Attributes:
      compute: (eqn, ins, scope) -> the result.
      beside: the values of the program that it gets in `ins`, behind the operands of the equation.
    """

    compute: Callable[..., Any]
    beside: Sequence[Any] = ()


class Step(NamedTuple):
    """An equation that is evaluated: with which operands, where, and with what beside them."""

    eqn: JaxprEqn
    ins: list[Any]
    location: Location
    scope: Scope


class Replacements:
    """The replacements of contractions, and the treatment of the rest.

    Attributes:
      contractions: of each location the replacement.
      custom: of each call with a custom derivative, around a contraction, "keep" or "inline".
      with_integers: which results of a branch have integers.
      read: (parameter, by what) -> its values, where anything computes with it; by None for a derivative alone.
      inputs: of the contractions.
      calls: of the names of primitives that hold programs, how these are evaluated.
    """

    def __init__(
        self, contractions: Mapping[Location, Replacement], custom: Mapping[Location, str],
        with_integers: Mapping[Location, Sequence[bool]], read: Callable[..., Array], inputs: Inputs,
        calls: Mapping[str, Call],
    ):  # fmt: skip
        self.contractions, self.custom, self.with_integers = contractions, custom, with_integers
        self.read, self.inputs, self.calls = read, inputs, calls
        self.around = {location[:n] for location in contractions for n in range(1, len(location))}

    def program(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], location: Location, scope: Scope
    ) -> list[Any]:
        """The results of a program."""
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        value = lambda v: v.val if isinstance(v, Literal) else env[v]
        beside = lambda i: of.beside if (of := self.contractions.get((*location, i))) else ()
        read = [
            [v for v in (*eqn.invars, *beside(i)) if not isinstance(v, Literal)] for i, eqn in enumerate(jaxpr.eqns)
        ]
        uses = collections.Counter(itertools.chain(*read))
        for i, eqn in enumerate(jaxpr.eqns):
            here, move = (*location, i), MOVES.get(eqn.primitive.name)
            for v in read[i]:
                if isinstance(env[v], Unquantized) and not self._takes(eqn, here, env[v], uses[v] == 1):
                    env[v] = env[v].quantized()  # for all that use it
            ins = [value(v) for v in (*eqn.invars, *beside(i))]
            has_parameter = any(isinstance(v, QuantizedParam | Unquantized) for v in ins)
            if here in self.contractions:
                with eqn.ctx.manager:  # such as another mesh
                    outs = [self.contractions[here].compute(eqn, ins, scope)]
            elif here in self.around or (has_parameter and kind(eqn) in self.calls):
                with jax.named_scope(str(eqn.source_info.name_stack)):  # which is part of the names inside
                    outs = self.calls[kind(eqn)].evaluate(self, Step(eqn, ins, here, scope))
            elif isinstance(ins and ins[0], Unquantized):
                with eqn.ctx.manager:
                    outs = unquantized(eqn, ins)
            elif has_parameter and move and move.takes(eqn, ins):
                with eqn.ctx.manager:
                    outs = move.parameters(eqn, ins)
            elif has_parameter and not eqn.effects:
                of_parameter = functools.partial(self.read, by=kind(eqn))
                outs = from_integers(lambda *ins, eqn=eqn: evaluated(eqn, ins, jaxpr), ins, of_parameter)
            else:
                outs = evaluated(eqn, self.floats(ins, kind(eqn)), jaxpr)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def _takes(self, eqn: JaxprEqn, here: Location, v: Unquantized, is_alone: bool) -> bool:
        """Whether an equation, perhaps the only one that uses a value, takes it before it is quantized."""
        if here in self.contractions:
            return is_alone
        if kind(eqn) in self.calls:
            return is_alone or bool(v.layers)
        return takes_unquantized(eqn, v, is_alone)

    def floats(self, values: Sequence[Any], by: str) -> list[Any]:
        """The values with parameters as their real ones, for what computes with them."""
        return [self.read(v, by) if isinstance(v, QuantizedParam) else v for v in map(quantized_now, values)]

    def inner(self, eqn: JaxprEqn, k: int, location: Location, with_integers: Sequence[bool] = ()) -> Callable:
        """Program `k` of an equation as a function (qparams, key, *args) -> (results, what it observes) for JAX.

        Results are arrays, but those that `with_integers` says.
        """
        jaxpr, consts = programs(eqn)[k]
        with_integers = with_integers or [False] * len(jaxpr.outvars)

        def f(qparams: Mapping[str, Any], key: Array | None, *args: Any) -> tuple[list[Any], dict[str, Any]]:
            scope = Scope(qparams, key, {}, {})
            outs = self.program(jaxpr, consts, args, (*location, k), scope)
            outs = [v if h else self.floats([v], kind(eqn))[0] for v, h in zip(outs, with_integers, strict=True)]
            return outs, scope.observed

        return f
