# SPDX-License-Identifier: Apache-2.0
"""The function in float, with functions of the caller at its sites, and in place of the ops that have one."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

from .._arrays._qarray import QArray
from .._arrays._qparams import QParams
from .._arrays._quantized import Quantized
from .._base import _checks as checks
from .._base._checks import PyTree
from .._base._groups import of_rank
from .._program._evaluate import Scope
from .._program._fusing import moved
from .._program._jaxpr import JaxprEqn, avals, params_of
from .._program._param import QuantizedParam
from .._spec._granularity import granularity_of
from ._axes import groups_shape
from ._choose import Choice, Decision
from ._compiled import FloatOp
from ._decide import Decisions
from ._evaluate import Evaluator, in_float
from ._fused import Fused
from ._plan import Op, Site, Value


class Viewing(Evaluator):
    """The function in float, with a function of the caller at its sites, and another in place of ops, if there is one.

    Attributes:
      decisions: about the function.
      site: (info, x) -> what the op gets in place of x.
      of_op: (info, *operands) -> the result of the op; None computes it.
      of_value: (info, *operands) -> a value that a runtime computes in integers; None leaves it to the other two.
    """

    def __init__(
        self, decisions: Decisions, site: Callable[[Site, Any], Any], of_op: Callable[..., Array] | None,
        of_value: Callable[..., Array] | None,
    ):  # fmt: skip
        super().__init__()
        self.decisions, self.site, self.of_op, self.of_value = decisions, site, of_op, of_value
        self.takes_values = of_value is not None
        self.layers = {of.decision.contraction.location for of in decisions.fused.values() if of.decision}

    def parameter(self, path: str, value: PyTree, qparams: QParams | None, is_read: bool) -> PyTree:
        entry = self.decisions.entries.of.get(path)
        if isinstance(value, QArray):
            qparams = value.qparams
        value = read = in_float(value)
        if entry is None:
            return value
        if entry.reads and (info := self.decisions.sites.of_reads.get(path)):
            read = self._given(info._replace(qparams=qparams), value)
        scale, zero_point = (None, None) if qparams is None else (of_rank(v, value.ndim) for v in qparams)
        q = Quantized(None, scale, zero_point, entry.spec, value.dtype)
        return QuantizedParam(q, value, read, None, (path,))

    def op(self, decision: Decision, eqn: JaxprEqn, ins: Sequence[Any], scope: Scope) -> Array:
        operands = [self.read(v, None) if isinstance(v, QuantizedParam) else v for v in ins]
        if self.takes_values and decision.contraction.location in self.layers:  # its value is computed at its name
            return FloatOp.of(eqn)(*operands)
        for side, choice in enumerate(decision.operands):
            is_given = choice.cache is None and (choice.point is None or self.of_op is not None)
            if choice.spec is not None and is_given:
                operands[side] = self._at(decision, side, ins[side] if choice.is_weight else operands[side], scope)
        lax_op, out = FloatOp.of(eqn), avals(eqn.outvars)[0]
        if self.of_op is None:
            return lax_op(*operands)
        result = jax.ShapeDtypeStruct(out.shape, out.dtype)
        y = self.of_op(Op(decision.contraction.op, dict(params_of(eqn)), result, lax_op), *operands)
        return _checked_result("op", y, result, " and ".join(map(repr, decision.op.names)))

    def named(self, decision: Decision, eqn: JaxprEqn, ins: Sequence[Any], scope: Scope) -> Any:
        v = self.read(ins[0], None) if isinstance(ins[0], QuantizedParam) else ins[0]
        if self.of_value is not None and (fused := self.decisions.fused.get(decision.contraction.location)):
            return self._value(decision, fused, v, ins[1:], scope)
        v = eqn.primitive.bind(v, **eqn.params)
        return v if decision.operands[0].point is not None else self._at(decision, 0, v, scope)

    def _value(self, decision: Decision, fused: Fused, v: Array, beside: Sequence[Any], scope: Scope) -> Array:
        """A value that a runtime computes, of what its region takes; of floats, of itself."""
        assert self.of_value is not None
        site = self.decisions.sites.of_ops[decision.contraction.location, 0]
        site = site._replace(qparams=scope.qparams.get(decision.operands[0].keys[0]))
        result, region, layer = jax.ShapeDtypeStruct(v.shape, v.dtype), fused.region, fused.decision
        if region is None:
            made = self.of_value(Value(site, "quantize", Op("", {}, result, lambda v: v), result=result), v)
        else:
            eqn, operands, of_input = region.eqn, list(beside), None
            for side, choice in enumerate(layer.operands if layer else ()):
                if layer is not None and choice.is_weight:
                    operands[side] = self._at(layer, side, beside[side], scope)
                elif layer is not None:
                    of_input = self.decisions.sites.of_ops[layer.contraction.location, side]
                    of_input = of_input._replace(qparams=scope.qparams.get(choice.keys[0]))
            out = avals(eqn.outvars)[0]
            op = Op(
                eqn.primitive.name, dict(params_of(eqn)), jax.ShapeDtypeStruct(out.shape, out.dtype), FloatOp.of(eqn)
            )
            limits = region.low, region.high
            is_first = layer is not None and layer.operands[0].is_weight
            move = functools.partial(moved, moves=(*region.moves, *region.behind))
            info = Value(site, region.kind, op, *limits, region.bias_axes, move, result, of_input, is_first)
            made = self.of_value(info, *operands)
        return _checked_result("value", made, result, repr(site.name))

    def _at(self, decision: Decision, side: int, v: Any, scope: Scope) -> Any:
        """The result of the caller's function for an operand."""
        choice: Choice = decision.operands[side]
        info, qparams = (
            self.decisions.sites.of_ops[decision.contraction.location, side],
            scope.qparams.get(choice.keys[0]),
        )
        if choice.is_weight:
            q, v = v.quantized, v.real
            qparams = None if q.scale is None else QParams(q.scale, q.zero_point)
            info = info if qparams is None else _fitting(info, qparams, v.shape)
        info = info._replace(qparams=qparams)
        is_operand = self.of_op is not None and decision.op.kind != "value"
        return self.site(info, v) if is_operand else self._given(info, v)

    def _given(self, info: Site, x: Array) -> Array:
        return _checked_result("site", self.site(info, x), x, repr(info.name))


def _checked_result(of: str, y: Any, like: PyTree, where: str) -> Array:
    if not checks.is_array(y) or y.shape != like.shape or y.dtype != like.dtype:
        raise ValueError(
            f"`{of}` must return an array of shape and dtype {like.dtype}{list(like.shape)} at {where}, got "
            f"{checks.kind(y)}. Convert the value back, or compute with it and return what it was given."
        )
    return y


def _fitting(info: Site, qparams: QParams, shape: tuple[int, ...]) -> Site:
    """A site with the granularity that the qparams of a part of a parameter have, where it is finer than its spec."""
    assert info.spec is not None
    groups = groups_shape(info.spec, shape)
    if qparams.scale.shape == groups:
        return info
    granularity = granularity_of(qparams.scale.shape, shape)
    return info._replace(spec=dataclasses.replace(info.spec, granularity=granularity))
