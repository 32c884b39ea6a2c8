# SPDX-License-Identifier: Apache-2.0
"""The function quantized: parameters, caches and named values in integers, and ops of integers in place of its own."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.ad_checkpoint
import numpy as np
from jax import Array, lax

from .._arrays._affine import fake_quant
from .._arrays._at_rest import Form
from .._arrays._qarray import QArray, inside
from .._arrays._qparams import QParams
from .._arrays._quantized import Quantized
from .._arrays._straight_through import quantize_straight_through, with_gradient_of
from .._base import _numerics as num
from .._base._checks import PyTree
from .._base._sharding import axes_of, replicated, vary_together
from .._cache import as_cache
from .._contract._contract import Precision
from .._contract._dot import Dot
from .._contract._native import is_of_floats
from .._contract._operands import QuantizedOperand
from .._contract._ops import OPS
from .._paths import named_in_errors
from .._program._evaluate import Scope
from .._program._jaxpr import JaxprEqn, Location, avals
from .._program._param import QuantizedParam, Unquantized, dequantized, from_integers, quantized_now
from .._spec._spec import QuantSpec
from ._caches import Cache
from ._choose import Choice, Decision, is_stochastic
from ._compiled import (
    Delayed,
    FloatOp,
    fake_quantized,
    not_differentiated,
    of_value,
    of_weight,
    rows_with,
    site_in_float,
    site_in_integers,
    turned,
    value_of,
)
from ._decide import Decisions
from ._evaluate import Evaluator, ReadInFloat
from ._observers import Observation


class Quantizing(Evaluator):
    """The function quantized, whose operands may be observed.

    Attributes:
      decisions: about it.
      observation: of its operands.
      execution: of integer contractions.
      key: PRNG key for stochastic rounding, or None.
      caches: by their paths.
      once: the keys of what one op alone quantizes.
    """

    takes_integers = takes_values = True

    def __init__(
        self, decisions: Decisions, observation: Observation, execution: str, key: Array | None,
        caches: Mapping[str, Cache],
    ):  # fmt: skip
        super().__init__()
        self.decisions, self.observation, self.execution = decisions, observation, execution
        self.key, self.caches, self.once = key, caches, decisions.taken_once()

    # Parameters

    def parameter(self, path: str, value: PyTree, qparams: QParams | None, is_read: bool) -> Any:
        entry = self.decisions.entries.of.get(path)
        if isinstance(value, QArray):
            return _parameter(path, inside(value), (entry or value).spec)
        if entry is None:
            return value
        contracted = self._flagged(entry.spec, tuple(sorted(entry.contracted)))
        if not is_read and entry.spec.rounding != "stochastic":
            return Unquantized(value, qparams, entry.spec, contracted, path=path, layers=entry.layers)
        with named_in_errors(path, rule=entry.rule):
            key = self._key(entry.spec, self.key, path)
            real, q, flags = quantize_straight_through(value, entry.spec, contracted, key, qparams)
        return _parameter(path, q, entry.spec, real, value if is_read else None, flags)

    def _flagged(self, spec: QuantSpec, contracted: tuple[int, ...]) -> tuple[int, ...] | None:
        """The axes along which a NaN counts for all; None where the products are of floats, which have NaN."""
        return None if is_of_floats(self.execution, spec) else contracted

    def cache(self, cache: Cache, value: PyTree) -> Any:
        q = cache.quantized(value)
        # Only what comes in float is differentiated.
        real = None if isinstance(value, QArray) else fake_quant(value, cache.spec)
        return dataclasses.replace(_parameter(cache.path, as_cache(q), cache.spec, real), form=Form.of(q))

    def result(self, v: Any) -> Any:
        """A result of the function: a cache leaves it in integers."""
        is_whole = isinstance(v, QuantizedParam) and v.is_cache and not v.casts
        return self.caches[v.paths[0]].returned(v.quantized) if is_whole else v

    def _read_cache(self, cache: QuantizedParam, by: str | None) -> Array:
        rule = self.caches[cache.paths[0]].rule
        if by is None or by in OPS or rule.everywhere:
            return value_of(cache)
        raise ValueError(
            f"At {cache.paths[0]!r}, chosen by the rule {rule.pattern!r}: the function also reads the cache in float, "
            f"by {by!r}. Contract it as it is, after moves alone, and write to it by lax.dynamic_update_slice or "
            ".at[...].set, which say what they write, not by jnp.where; or let this read the real values of its "
            'integers by Rule(..., kind="cache", everywhere=True); or leave it in float by a rule with None.'
        )

    def read(self, parameter: QuantizedParam, by: str | None) -> Array:
        if parameter.is_cache:
            return self._read_cache(parameter, by)
        real, as_read = parameter.real, parameter.as_read
        entry = next((e for path in parameter.paths if (e := self.decisions.entries.of.get(path))), None)
        if entry is not None and not entry.is_weight:
            assert real is not None
            return with_gradient_of(real, num.select(real == real, parameter.cast(dequantized(parameter)), real))
        if entry is None or entry.rule.everywhere or (by is None and real is None):
            return value_of(parameter)
        if as_read is not None:
            return as_read
        lacking = ReadInFloat(parameter.paths, by)
        if real is None:
            raise lacking
        self.lacking.append(lacking)
        return value_of(parameter)

    # Ops

    def op(self, decision: Decision, eqn: JaxprEqn, ins: Sequence[Any], scope: Scope) -> Array:
        nameless = lambda v: dataclasses.replace(v, path="", layers=frozenset()) if isinstance(v, Unquantized) else v
        ins = list(map(nameless if self._is_one(decision, eqn, ins) else quantized_now, ins))
        values = list(ins)
        for side, choice in enumerate(decision.operands):
            if not isinstance(v := ins[side], QuantizedParam) or choice.arrives_quantized:
                continue
            if choice.spec is None and v.real is None and not v.is_cache:
                values[side] = dataclasses.replace(v, paths=())
            else:
                values[side] = self.read(ins[side], decision.contraction.op if ins[side].is_cache else choice.name)
        for i, v in enumerate(ins[2:], 2):
            values[i] = self.read(v, decision.contraction.op) if isinstance(v, QuantizedParam) else v
        self.observation.note(decision, values, scope)
        is_integer = all(choice.spec for choice in decision.operands)
        return (self._in_integers if is_integer else self._in_float)(decision, eqn, values, scope)

    def _is_one(self, decision: Decision, eqn: JaxprEqn, values: Sequence[Any]) -> bool:
        """Whether an op and the quantizers of its own can be one compiled function."""
        is_frozen = any(isinstance(v, QuantizedParam) and v.real is None for v in values)  # made again backward, alone
        is_plain = eqn.params.get("out_sharding") is None and not any(choice.cache for choice in decision.operands)
        return is_plain and not is_frozen

    def _in_float(self, decision: Decision, eqn: JaxprEqn, values: Sequence[Any], scope: Scope) -> Array:
        """An op in float, with the value of its quantizer for the operand that has one."""
        operands = list(values)
        for side, choice in enumerate(decision.operands):
            if choice.spec is None or isinstance(values[side], Unquantized):
                continue
            with named_in_errors(choice.name, rule=choice.rule):
                if choice.arrives_quantized:
                    operands[side] = dataclasses.replace(_checked(values[side]), paths=())
                    if choice.point is not None:
                        operands[side] = self.read(values[side], choice.name)
                else:
                    key = self._key(choice.spec, scope.key, (decision.contraction.location, side))
                    qparams = scope.qparams.get(choice.keys[0])
                    operands[side] = fake_quantized(values[side], choice.spec, qparams, key)
        sides = enumerate(decision.operands)
        in_tiles = next((i for i, choice in sides if _has_tiles(choice, operands[i], operands[1 - i])), None)
        op = decision.contraction.as_op(execution=self.execution, dtype=avals(eqn.outvars)[0].dtype)
        return site_in_float(FloatOp.of(eqn), op, in_tiles, *operands)

    def _with_scales(self, decision: Decision, eqn: JaxprEqn, values: Sequence[Any]) -> Array:
        """The product of a cache with an operand in float, into which its scales are multiplied."""
        side = next(i for i, choice in enumerate(decision.operands) if choice.cache is not None)
        spec, out, dot = decision.operands[1 - side].spec, avals(eqn.outvars)[0], decision.contraction.as_op()
        cache, x = _checked(values[side]), values[1 - side]
        in_order = lambda own: (own, x) if side == 0 else (x, own)
        assert spec is not None
        assert isinstance(dot, Dot)
        with named_in_errors(*decision.op.names):
            dot = dataclasses.replace(dot, execution=self.execution)
            y = rows_with(cache.quantized, x, side, spec, dot).astype(out.dtype)
        if cache.real is None:
            return y
        x = fake_quantized(x, spec, None, None)
        return with_gradient_of(eqn.primitive.bind(*in_order(cache.real), **eqn.params), y)

    def _in_integers(self, decision: Decision, eqn: JaxprEqn, values: Sequence[Any], scope: Scope) -> Array:
        if decision.is_folded:
            return self._with_scales(decision, eqn, values)
        operands, is_one = list(values), self._is_one(decision, eqn, values)
        for side, choice in enumerate(decision.operands):
            if isinstance(values[side], Unquantized):
                continue
            if choice.arrives_quantized:
                dtype, parameter = avals(eqn.invars)[side].dtype, _checked(values[side])
                spec = choice.spec if choice.cache is None else parameter.quantized.spec
                quantized = dataclasses.replace(parameter.quantized, spec=spec, dtype=dtype)
                parameter = dataclasses.replace(parameter, quantized=quantized)
                is_value = choice.point is not None
                operands[side] = of_value(parameter, choice.contracted) if is_value else parameter
            else:
                operands[side] = self._quantized(decision, side, values[side], scope, is_one)
        spec = next(filter(is_stochastic, decision.gradient), None)
        key = self._key(spec, scope.key, (decision.contraction.location, "gradient"))
        delayed = tuple(scope.qparams.get(name) if name else None for name in decision.gradient_keys)
        y = from_integers(functools.partial(self._product, decision, eqn, key, delayed), operands, of_weight)
        lacking = [name for name, v in zip(decision.gradient_keys, delayed, strict=True) if name and v is None]
        return not_differentiated(y, tuple(lacking)) if lacking else y

    def _quantized(
        self, decision: Decision, side: int, v: Any, scope: Scope, is_one: bool
    ) -> tuple[Array, Quantized, Array | None] | Unquantized:
        """An input with the gradient of its quantizer, in integers, and its NaN flags; or what its op quantizes."""
        choice = decision.operands[side]
        assert choice.spec is not None
        with named_in_errors(choice.name, rule=choice.rule):
            key = self._key(choice.spec, scope.key, (decision.contraction.location, side))
            known_by = id(v), choice.spec, choice.contracted, choice.keys
            if key is None and known_by in scope.memo:
                return scope.memo[known_by][1]
            qparams = scope.qparams.get(choice.keys[0])
            contracted = self._flagged(choice.spec, choice.contracted)
            if is_one and choice.keys[0] in self.once and choice.spec.rounding != "stochastic":
                return Unquantized(v, qparams, choice.spec, contracted, keeps_codes=True)
            result = quantize_straight_through(v, choice.spec, contracted, key, qparams, keeps_codes=True)
            scope.memo[known_by] = v, result  # the value too: no other then gets its id
            return result

    def _product(self, decision: Decision, eqn: JaxprEqn, key: Array | None, delayed: Delayed, *values: Any) -> Array:
        operands: list[Any] = [v if isinstance(v, Unquantized) else QuantizedOperand(*v) for v in values[:2]]
        more = values[2:]
        axes = [choice.contracted for choice in decision.operands]
        if eqn.params.get("out_sharding") is not None:  # contracted axes may be sharded then; gathered as integers
            operands = [v._replace(integers=v.integers.ordered()) for v in operands]
            whole = lambda axes: lambda v: replicated(v, axes) if v.ndim else v
            operands = [jax.tree.map(whole(of), operand) for operand, of in zip(operands, axes, strict=True)]
            taken = frozenset().union(*axes_of(operands[0].integers.stored))  # along which the other is whole, then
            both = [i for i, axis in enumerate(axes_of(operands[1].integers.stored)) if not taken.isdisjoint(axis)]
            operands[1] = jax.tree.map(whole(both), operands[1])
        with named_in_errors(*decision.op.names):
            out = avals(eqn.outvars)[0]
            dtype = min(out.dtype, np.dtype(np.float32), key=lambda dtype: dtype.itemsize)
            op = decision.contraction.as_op(execution=self.execution, gradient=decision.gradient, dtype=dtype)
            turns = decision.operands[0].cache is not None  # a CPU has no kernel for it as the first operand
            if any(delayed):
                _, delayed = vary_together(operands, delayed)
            if turns and isinstance(op, Dot):
                y = turned(op, operands, key, delayed)
            else:
                y = site_in_integers(op, *operands, key, more, delayed)
        return _like(y.astype(out.dtype), out)

    def named(self, decision: Decision, eqn: JaxprEqn, ins: Sequence[Any], scope: Scope) -> Any:
        """A value that is quantized where it is named, and travels on with its integers."""
        (choice,), (v, *beside) = decision.operands, ins
        assert choice.spec is not None
        if isinstance(v, QuantizedParam):
            if choice.point is not None:
                return v
            v = self.read(v, choice.name)
        self.observation.note(decision, [v], scope)
        v = eqn.primitive.bind(v, **eqn.params)
        with named_in_errors(choice.name, rule=choice.rule):
            key = self._key(choice.spec, scope.key, (decision.contraction.location, 0))
            qparams = scope.qparams.get(choice.keys[0])
            real, q, _ = quantize_straight_through(v, choice.spec, tuple(range(v.ndim)), key, qparams, keeps_codes=True)
            if (fused := self.decisions.fused.get(decision.contraction.location)) is not None:
                integers = fused.integers(q, *lax.stop_gradient((v, beside)))
                q = dataclasses.replace(q, stored=integers.astype(q.stored.dtype))
        return dataclasses.replace(_parameter(choice.keys[0], q, choice.spec, real), is_value=True)

    # Stochastic rounding

    def _key(self, spec: Precision, key: Array | None, of: str | tuple[Location, int | str]) -> Array | None:
        return self.decisions.entries.noise_key(key, of) if key is not None and is_stochastic(spec) else None


def _parameter(
    path: str, q: Quantized, spec: QuantSpec, real: Array | None = None, as_read: Array | None = None,
    nan_flags: Array | None = None,
) -> QuantizedParam:  # fmt: skip
    return QuantizedParam(dataclasses.replace(q, spec=spec), real, as_read, nan_flags, (path,))


def _checked(v: Any) -> QuantizedParam:
    if isinstance(v, QuantizedParam):
        return v
    raise NotImplementedError(
        "a parameter, or a value that is quantized where it is named, reaches its op in a way that its integers cannot "
        "follow. Report the program that does this; until then quantize the operand by fake_quant_params, or drop the "
        "rule of the value."
    )


def _has_tiles(choice: Choice, v: Any, other: object) -> bool:
    """Whether an operand is a weight of which parts are like the whole.

    Of a transpose XLA makes another product in a loop than outside; floats of 8 bits XLA:CPU converts on one thread as
    slowly as it writes them.
    """
    moves = choice.operand.origin.moves
    is_quantized = lambda v: isinstance(v, QuantizedParam | Unquantized)
    if not is_quantized(v) or is_quantized(other) or not choice.is_weight or moves is None:
        return False
    is_transposed = any(move.primitive is lax.transpose_p for move in moves)
    spec, order = (v.spec, None) if isinstance(v, Unquantized) else (v.quantized.spec, v.quantized.order)
    return order is None and not spec.format and not is_transposed


def _like(y: Array, out: Any) -> Array:
    """`y` with the sharding that the program says, on a mesh with explicit axes."""
    wanted = out.sharding
    return y if wanted.mesh.empty or jax.typeof(y).sharding == wanted else jax.sharding.reshard(y, wanted)
