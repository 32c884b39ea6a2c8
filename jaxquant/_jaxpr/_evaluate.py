# SPDX-License-Identifier: Apache-2.0
"""A program evaluated with other contractions in the places of some."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ._program import HIGH, Location, bound, kind, param, programs, scan_parts, while_parts, while_programs


class Replacements:
    """What to compute in the places of contractions, and how calls with a derivative of their own are treated."""

    def __init__(self, contractions: Mapping[Location, Callable], custom: Mapping[Location, str]):
        self.contractions, self.custom = contractions, custom
        self.around = {location[:n] for location in contractions for n in range(1, len(location))}

    def program(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], location: Location = (), shared: Any = None
    ) -> list[Any]:
        """The results of a program; `shared` is what its replacements have computed and may use again."""
        shared = {} if shared is None else shared
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        read = lambda v: v.val if isinstance(v, Literal) else env[v]
        for i, eqn in enumerate(jaxpr.eqns):
            here, ins = (*location, i), [read(v) for v in eqn.invars]
            if here in self.contractions:
                outs = [self.contractions[here](eqn, *ins, shared)]
            elif here in self.around:
                outs = _EVALUATIONS[kind(eqn)](self, eqn, ins, here, shared)
            else:
                outs = bound(eqn, ins, jaxpr)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def inner(self, eqn: JaxprEqn, k: int, location: Location) -> Callable[..., list[Any]]:
        """Program `k` of an equation as a function that JAX traces for itself."""
        jaxpr, consts = programs(eqn)[k]
        return lambda *args: self.program(jaxpr, consts, args, (*location, k))


def _call(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    (program,) = programs(eqn)
    return replace.program(*program, ins, (*location, 0), shared)


def _jit(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    # Inlined; what its shardings demand, constraints demand too.
    constrained = lambda values, name: [
        lax.with_sharding_constraint(v, s) if isinstance(s, jax.sharding.Sharding) else v
        for v, s in zip(values, param(eqn, name), strict=True)
    ]
    outs = _call(replace, eqn, constrained(ins, "in_shardings"), location, shared)
    return constrained(outs, "out_shardings")


def _remat(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    policy, prevent_cse = param(eqn, "policy"), param(eqn, "prevent_cse")
    return jax.checkpoint(replace.inner(eqn, 0, location), prevent_cse=prevent_cse, policy=policy)(*ins)


def _custom(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    if replace.custom[location] == "inline":
        return _call(replace, eqn, ins, location, shared)

    @jax.custom_vjp
    def kept(*ins):
        return replace.inner(eqn, 0, location)(*ins)

    def forward(*ins):
        values, varied = [v.value for v in ins], tuple(i for i, v in enumerate(ins) if v.perturbed)
        return kept(*values), (values, _Varied(varied))

    def backward(residuals, g):
        # With respect to the varied operands alone: rules such as equinox's refuse to differentiate the others.
        values, varied = residuals
        of_varied = {i: values[i] for i in varied.at}

        def original(of_varied):
            ins = [of_varied.get(i, v) for i, v in enumerate(values)]
            return bound(eqn, ins, programs(eqn)[0][0])

        outs, pull = jax.vjp(original, of_varied)
        (found,) = pull([_instantiated(*pair) for pair in zip(g, outs, strict=True)])
        return tuple(found.get(i) for i in range(len(values)))

    kept.defvjp(forward, backward, symbolic_zeros=True)
    return kept(*ins)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Varied:
    """The operands with respect to which a gradient is taken: known while tracing."""

    at: tuple[int, ...]


def _instantiated(cotangent: Any, out: Any) -> Any:
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return cotangent
    is_float = jnp.issubdtype(out.dtype, jnp.inexact)
    return jnp.zeros_like(out) if is_float else np.zeros(out.shape, jax.dtypes.float0)


def _scan(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    consts, carry, xs = scan_parts(eqn, ins)
    inner = replace.inner(eqn, 0, location)

    def body(carry, xs):
        outs = inner(*consts, *carry, *xs)
        return outs[: len(carry)], outs[len(carry) :]

    of = lambda name: param(eqn, name)
    carry, ys = lax.scan(body, list(carry), list(xs), of("length"), of("reverse"), of("unroll"))
    return [*carry, *ys]


def _while(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    condition_consts, consts, carry = while_parts(eqn, ins)
    condition, body = (replace.inner(eqn, k, location) for k in while_programs(eqn))
    return lax.while_loop(
        lambda carry: condition(*condition_consts, *carry)[0], lambda carry: body(*consts, *carry), list(carry)
    )


def _cond(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    branches = [replace.inner(eqn, k, location) for k in range(len(programs(eqn)))]
    return lax.switch(ins[0], branches, *ins[1:])


def _shard_map(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, shared: Any) -> Sequence[Any]:
    of = functools.partial(param, eqn)
    inner = replace.inner(eqn, 0, location)
    return jax.shard_map(
        lambda *args: tuple(inner(*args)), mesh=of("mesh"), in_specs=tuple(of("in_specs")),
        out_specs=tuple(of("out_specs")), check_vma=of("check_vma"),
        axis_names=set(of("manual_axes", "newly_manual_axes")),
    )(*ins)  # fmt: skip


_EVALUATIONS: dict[str, Callable[[Replacements, JaxprEqn, list[Any], Location, Any], Sequence[Any]]] = {
    **dict.fromkeys(("jit", "pjit"), _jit),
    **dict.fromkeys(("closed_call", "eval_jaxpr"), _call),
    **dict.fromkeys(("remat2", "checkpoint"), _remat),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", HIGH), _custom),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
