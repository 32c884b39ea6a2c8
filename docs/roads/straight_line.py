# SPDX-License-Identifier: Apache-2.0
"""A traced function as a straight line of ops, for converters that know no loops over layers and fold no constants.

Scans are unrolled, calls of functions are replaced by their ops, and what depends on no argument is computed here; but
for the transpose of an embedding that is the head, too, which would be in the file twice.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr"}
INLINED |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def straight_line(f, replaced):
    """f, of arrays, as a straight line of ops, with the same values.

    `replaced`: functions that take the place of ops, and of calls of functions, by their names in the program.
    """

    def straight(*args):
        traced, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        outs = _evaluated(traced.jaxpr, traced.consts, args, replaced)
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return straight


def _evaluated(jaxpr, consts, args, replaced):
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    inside = lambda closed, args: _evaluated(
        getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()), args, replaced
    )
    for eqn in jaxpr.eqns:
        compute = _as_it_is if _is_tied(eqn, jaxpr, values) else _known_here
        ins = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        name, params = eqn.primitive.name, eqn.params
        if name in replaced:
            outs = replaced[name](*ins, **params)
        elif name in INLINED and params.get("name") in replaced:
            outs = replaced[params["name"]](*ins)
        elif name in INLINED:
            outs = inside(params[INLINED[name]], ins)
        elif name == "scan":
            outs = _unrolled(params, ins, inside)
        else:
            outs = compute(functools.partial(eqn.primitive.bind, **eqn.primitive.get_bind_params(params)), *ins)
        values.update(zip(eqn.outvars, outs if isinstance(outs, (list, tuple)) else [outs], strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def _as_it_is(f, *values):
    return f(*values)


def _is_tied(eqn, jaxpr, values):
    """Whether it transposes a table that others read, too, for products in float alone."""
    if eqn.primitive.name != "transpose" or isinstance(values[eqn.invars[0]], jax.core.Tracer):
        return False
    readers = lambda v: [other for other in jaxpr.eqns if any(v is of for of in other.invars)]
    users = readers(eqn.outvars[0])
    return len(readers(eqn.invars[0])) > 1 and bool(users) and all(of.primitive.name == "dot_general" for of in users)


def _known_here(f, *values):
    """f(*values), computed here and now if no value depends on an argument."""
    if any(isinstance(v, jax.core.Tracer) for v in values):
        return f(*values)
    with jax.ensure_compile_time_eval():
        return f(*values)


def _unrolled(params, ins, inside):
    of_all, carried = params["num_consts"], params["num_carry"]
    consts, carry, xs = ins[:of_all], ins[of_all : of_all + carried], ins[of_all + carried :]
    turns = range(params["length"])
    results = [None for _ in turns]
    for i in reversed(turns) if params["reverse"] else turns:
        of_turn = [_known_here(operator.itemgetter(i), x) for x in xs]
        carry_and_ys = inside(params["jaxpr"], [*consts, *carry, *of_turn])
        carry, results[i] = carry_and_ys[:carried], carry_and_ys[carried:]
    return [*carry, *(_known_here(lambda *ys: jnp.stack(ys), *ys) for ys in zip(*results, strict=True))]
