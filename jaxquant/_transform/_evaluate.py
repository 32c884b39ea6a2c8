# SPDX-License-Identifier: Apache-2.0
"""A program evaluated with something else at its sites: the ways to do so, and how the program runs."""

import abc
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jax import Array

from .._arrays._qarray import real_values
from .._arrays._qparams import QParams
from .._base._checks import PyTree
from .._paths import is_qarray
from .._program._calls import CALLS
from .._program._evaluate import Replacement, Replacements, Scope
from .._program._jaxpr import NAME, JaxprEqn
from .._program._param import QuantizedParam, quantized_now
from ._caches import Cache
from ._choose import Decision, is_stochastic
from ._observers import Observation
from ._source import Program


class Evaluator(abc.ABC):
    """A way to evaluate a function: by default in float, with the real values of what comes in integers.

    Attributes:
      lacking: the reads of parameters in float, in one evaluation, that had no value to be given.
      takes_integers: whether ops that no rule quantizes get parameters which are integers as they are.
      takes_values: whether values that a runtime computes get what they are computed from.
    """

    takes_integers = False
    takes_values = False

    def __init__(self):
        self.lacking: list[ReadInFloat] = []

    def parameter(self, path: str, value: PyTree, qparams: QParams | None, is_read: bool) -> PyTree:
        """A parameter on its way to its ops; `is_read` where something may read it in float."""
        return in_float(value)

    def cache(self, cache: Cache, value: PyTree) -> PyTree:
        """A cache on its way to what writes and reads it."""
        return in_float(value)

    def read(self, parameter: QuantizedParam, by: str | None) -> Array:
        """A parameter for what computes with it in float."""
        assert parameter.as_read is not None
        return parameter.as_read

    @abc.abstractmethod
    def op(self, decision: Decision, eqn: JaxprEqn, ins: Sequence[Any], scope: Scope) -> Array:
        """The result of an op that has a site."""

    @abc.abstractmethod
    def named(self, decision: Decision, eqn: JaxprEqn, ins: Sequence[Any], scope: Scope) -> Any:
        """A value that a rule quantizes where it is named."""

    def result(self, v: Any) -> PyTree:
        """A result of the function."""
        return v


def in_float(value: PyTree) -> PyTree:
    """The real values of a parameter or a cache."""
    return real_values(value, value.dtype) if is_qarray(value) else value


class ReadInFloat(ValueError):
    """Something reads parameters in float of which the walk does not know."""

    def __init__(self, paths: Sequence[str], by: str | None):
        self.paths = paths
        super().__init__(
            f"At {' and '.join(map(repr, paths))}: the parameter is also read in float, by {by!r}, which its integers "
            "cannot give. Let every use see the quantized value, in training too, by Rule(..., everywhere=True)."
        )


def evaluated(
    how: Evaluator, program: Program, arrays: Sequence[Any], qparams: Mapping[str, Any],
    observation: Observation, key: Array | None,
) -> tuple[list[Any], dict[str, Any]]:  # fmt: skip
    """The arrays among the results of a program, and what is observed; qparams that are None are dynamic."""
    decisions, entries = program.decisions, program.decisions.entries.of
    fused = {at: of.values for at, of in decisions.fused.items()} if how.takes_values else {}
    ops = {
        at: Replacement(functools.partial(how.named if of.contraction.op == NAME else how.op, of), fused.get(at, ()))
        for at, of in {**decisions.of, **(decisions.left if how.takes_integers else {})}.items()
    }
    run = Replacements(ops, decisions.custom, program.walk.with_integers, how.read, observation.inputs, CALLS)
    is_weight = lambda name: name in entries and entries[name].is_weight
    inputs = {name: v for name, v in qparams.items() if v is not None and not is_weight(name)}
    read = {path for path, entry in entries.items() if entry.reads and not entry.rule.everywhere}
    # Parameters that are read in float where the walk does not follow them, such as those that a cond chooses, need
    # their values there. Only the evaluation can tell that this happens: what the walk follows no further may never be
    # read, and values that are carried for nothing would change the loops of other programs. So it is made once more.
    while True:
        how.lacking.clear()
        scope = Scope(inputs, _key_of_inputs(program, key), {}, {})
        args = [
            v if path is None else how.parameter(path, v, qparams.get(path), path in read)
            for path, v in zip(program.paths, arrays, strict=True)
        ]
        args = [how.cache(of, v) if of else v for of, v in zip(program.caches, args, strict=True)]
        outs = map(how.result, map(quantized_now, run.program(program.jaxpr, program.consts, args, (), scope)))
        outs = run.floats(list(outs), "the result of the function")
        if not how.lacking:
            return outs, scope.observed
        if error := next((error for error in how.lacking if read.issuperset(error.paths)), None):
            raise error
        read.update(path for error in how.lacking for path in error.paths)


def _key_of_inputs(program: Program, key: Array | None) -> Array | None:
    """The key of what is rounded where the program runs; None if it is parameters alone, or nothing."""
    decisions = program.decisions.of.values()
    of_inputs = [choice.spec for of in decisions for choice in of.operands if not choice.is_weight]
    specs = [*of_inputs, *(spec for of in decisions for spec in of.gradient)]
    return key if any(map(is_stochastic, specs)) else None
