# SPDX-License-Identifier: Apache-2.0
"""A traced function as a straight line of ops, for converters that know no loops over layers and fold no constants.

Scans are unrolled, calls of functions are replaced by their ops, what nothing reads is left out, and what depends on no
argument is computed here; but for the transpose of an embedding that is the head, too, which would be there twice.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._base._checks import PyTree
from .._program._jaxpr import opened, programs, read_equations

_INLINED = {"jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
Replaced = Mapping[str, Callable[..., Any]]  # functions for ops, and for calls of functions, by their names


def straight_line(f: Callable[..., PyTree], replaced: Replaced) -> Callable[..., PyTree]:
    """f, of arrays, as a straight line of ops, with the same values."""

    def straight(*args: Any) -> PyTree:
        traced, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        jaxpr, consts = opened(traced)
        outs = _evaluated(jaxpr, consts, args, replaced)
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return straight


def _evaluated(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], replaced: Replaced) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    inside = lambda program, args: _evaluated(program[0], program[1], args, replaced)
    for eqn in read_equations(jaxpr):
        compute = _as_it_is if _is_tied(eqn, jaxpr, values) else _known_here
        ins = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        name, params = eqn.primitive.name, eqn.params
        is_known = not any(isinstance(v, jax.core.Tracer) for v in ins)
        if name in replaced:
            outs = replaced[name](*ins, **params)
        elif name in _INLINED and params.get("name") in replaced:
            outs = replaced[params["name"]](*ins)
        elif name in _INLINED:
            outs = inside(programs(eqn)[0], ins)
        elif name == "scan" and not is_known:
            outs = _unrolled(eqn, ins, inside)
        else:
            outs = compute(functools.partial(eqn.primitive.bind, **eqn.primitive.get_bind_params(params)), *ins)
        values.update(zip(eqn.outvars, outs if isinstance(outs, list | tuple) else [outs], strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def _as_it_is(f: Callable[..., Any], *values: Any) -> Any:
    return f(*values)


def _is_tied(eqn: JaxprEqn, jaxpr: Jaxpr, values: Mapping[Any, Any]) -> bool:
    """Whether it transposes a table that others read, too, for products in float alone."""
    if eqn.primitive.name != "transpose" or isinstance(values[eqn.invars[0]], jax.core.Tracer):
        return False
    readers = lambda v: [other for other in jaxpr.eqns if any(v is of for of in other.invars)]
    users = readers(eqn.outvars[0])
    return len(readers(eqn.invars[0])) > 1 and bool(users) and all(of.primitive.name == "dot_general" for of in users)


def _known_here(f: Callable[..., Any], *values: Any) -> Any:
    """f(*values), computed here and now if no value depends on an argument."""
    if any(isinstance(v, jax.core.Tracer) for v in values):
        return f(*values)
    with jax.ensure_compile_time_eval():
        return f(*values)


def _unrolled(eqn: JaxprEqn, ins: Sequence[Any], inside: Callable[..., list[Any]]) -> list[Any]:
    params = eqn.params
    of_all, carried = params["num_consts"], params["num_carry"]
    consts, carry, xs = ins[:of_all], ins[of_all : of_all + carried], ins[of_all + carried :]
    turns = range(params["length"])
    results: list[Any] = [None for _ in turns]
    for i in reversed(turns) if params["reverse"] else turns:
        of_turn = [_known_here(operator.itemgetter(i), x) for x in xs]
        carry_and_ys = inside(programs(eqn)[0], [*consts, *carry, *of_turn])
        carry, results[i] = carry_and_ys[:carried], carry_and_ys[carried:]
    return [*carry, *(_known_here(lambda *ys: jnp.stack(ys), *ys) for ys in zip(*results, strict=True))]
