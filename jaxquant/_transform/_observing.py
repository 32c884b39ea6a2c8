# SPDX-License-Identifier: Apache-2.0
"""The function in float, whose operands are observed."""

from collections.abc import Sequence
from typing import Any

from jax import Array

from .._program._evaluate import Scope
from .._program._jaxpr import JaxprEqn
from ._choose import Decision
from ._evaluate import Evaluator
from ._observers import Observation


class Observing(Evaluator):
    """The function in float, whose operands are observed."""

    def __init__(self, observation: Observation):
        super().__init__()
        self.observation = observation

    def op(self, decision: Decision, eqn: JaxprEqn, ins: Sequence[Any], scope: Scope) -> Array:
        self.observation.note(decision, ins, scope)
        return eqn.primitive.bind(*ins, **eqn.params)

    named = op
