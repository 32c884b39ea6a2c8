# SPDX-License-Identifier: Apache-2.0
"""A function whose ops get other operands, and that is otherwise as it was: called, transformed and quantized alike."""

import abc
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax import Array

from .._arrays._quantized import Quantized
from .._base import _checks as checks
from .._base._checks import PyTree
from .._program._calls import CALLS
from .._program._evaluate import Replacement, Replacements, Scope
from .._program._jaxpr import JaxprEqn, avals
from .._program._param import QuantizedParam
from .._spec._granularity import PerTensor
from .._spec._rule import Rule, checked_rules
from .._spec._spec import QuantSpec
from .._transform._caches import CacheRules
from .._transform._call import Call, Static, call_of
from .._transform._choose import Decision
from .._transform._observers import Observation
from .._transform._source import Program, Source, value_of

_TENSOR = QuantSpec(granularity=PerTensor())  # which any operand can have: it is not quantized here

# Of the sides of an op that change: by what a changed operand is known, and (operand, given) -> the changed one.
Changes = Mapping[int, tuple[Any, Callable[[Array, Mapping[str, Array]], Array]]]


class Wrapper(abc.ABC):
    """A function with changed operands at the ops of some weights. The original function is `f.__wrapped__`."""

    def __init__(self, f: Callable, patterns: str | Sequence[str], params_argnum: int, **rule: Any):
        if not callable(f):
            raise TypeError(f"`f` must be a function, got {checks.kind(f)}. Pass one such as lambda params, x: ....")
        argnum = checks.static_int_between("params_argnum", params_argnum, 0, 255)
        each = [patterns] if isinstance(patterns, str) else patterns
        rules = checked_rules([Rule(pattern, activation=_TENSOR, custom="inline", **rule) for pattern in each])
        functools.update_wrapper(self, f, ("__module__", "__name__", "__qualname__"), ())
        self._source, self._argnum = Source(f, rules, argnum, CacheRules.of(f, rules)), argnum
        self.__signature__ = inspect.signature(f)
        self._jitted = jax.jit(self._function, static_argnums=0)  # as in QuantizedFunction

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """The result of the function."""

    @abc.abstractmethod
    def _changes(self, decision: Decision, program: Program) -> Changes:
        """The operands of an op that change."""

    @abc.abstractmethod
    def _changed_weights(self, program: Program) -> Collection[str]:
        """The paths of weights that are other ones than the function had: for its changed ops alone."""

    @abc.abstractmethod
    def _check(self, program: Program, arrays: Sequence[Any], given: Any) -> None:
        """Raises for what a call cannot be computed with."""

    def _call(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Call, list[Any]]:
        return call_of(args, kwargs, self._argnum, self._source.caches)

    def _program(self, call: Call, arrays: Sequence[Any]) -> Program:
        program = self._source.program(call, arrays)
        for at, decision in program.decisions.of.items():
            if any(at[: len(custom)] == custom for custom in program.decisions.custom):
                raise ValueError(
                    f"At {' and '.join(map(repr, decision.op.names))}: it is inside a function with a derivative of "
                    "its own (jax.custom_jvp or custom_vjp), which is of operands as they were. Take its path out of "
                    "`patterns`."
                )
        return program

    def _result(self, args: tuple, kwargs: Mapping[str, Any], given: Any = None) -> PyTree:
        leaves, structure = self._jitted(*self._call(args, kwargs), given)
        return value_of(leaves, structure)

    def _function(self, call: Call, arrays: Sequence[Any], given: Any) -> tuple[list[Any], Static]:
        """The results, without what is static of them; and their structure."""
        program = self._program(call, arrays)
        self._check(program, arrays, given)
        changes = {at: self._changes(of, program) for at, of in program.decisions.of.items()}
        of = {at: Replacement(functools.partial(_changed, own)) for at, own in changes.items()}
        inputs = Observation.of(program.decisions).inputs
        replacements = Replacements(of, {}, program.walk.with_integers, _read, inputs, CALLS)
        changed = self._changed_weights(program)
        of_each = zip(program.paths, arrays, strict=True)
        args = [_marked(v, path) if path is not None and path in changed else v for path, v in of_each]
        outs = replacements.program(program.jaxpr, program.consts, args, (), Scope(given or {}, None, {}, {}))
        outs = replacements.floats(outs, "the result of the function")
        return program.leaves(outs), Static.of(program.structure)


def _changed(changes: Changes, eqn: JaxprEqn, ins: Sequence[Any], scope: Scope) -> Array:
    """The result of an op on changed operands, each made once for all ops that take it; if wider, rounded once."""
    weight = next((side for side in (0, 1) if side not in changes), None)
    operands: list[Any] = [
        v.real if side == weight and isinstance(v, QuantizedParam) else _floats(v, eqn) for side, v in enumerate(ins)
    ]
    for side, (key, change) in changes.items():
        known_by = id(ins[side]), key
        if known_by not in scope.memo:
            scope.memo[known_by] = ins[side], change(operands[side], scope.qparams)
        operands[side] = scope.memo[known_by][1]
    if all(v.dtype == old.dtype for v, old in zip(operands, avals(eqn.invars), strict=True)):
        return eqn.primitive.bind(*operands, **eqn.params)
    dtype = max((v.dtype for v in operands[:2]), key=lambda dtype: dtype.itemsize)
    operands = [v.astype(dtype) if i < 2 else v for i, v in enumerate(operands)]
    y = eqn.primitive.bind(*operands, **eqn.params | {"preferred_element_type": dtype})
    return y.astype(avals(eqn.outvars)[0].dtype)


def _marked(v: Array, path: str) -> QuantizedParam:
    """A changed weight on its way to its ops, so that the evaluation tells what else reads it."""
    return QuantizedParam(Quantized(None, None, None, _TENSOR, v.dtype), v, None, None, (path,))


def _floats(v: Any, eqn: JaxprEqn) -> Any:
    return _read(v, eqn.primitive.name) if isinstance(v, QuantizedParam) else v


def _read(parameter: QuantizedParam, by: str | None) -> Array:
    raise ValueError(
        f"At {' and '.join(map(repr, parameter.paths))}: the parameter is also read by {by!r}, for which it is another "
        "one now. Take its path out of `patterns`, or give each use a parameter of its own."
    )
