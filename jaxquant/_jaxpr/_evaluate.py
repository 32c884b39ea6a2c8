# SPDX-License-Identifier: Apache-2.0
"""A program evaluated with some contractions replaced."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.sharding import PartitionSpec as P

from .._sharding import vary_together
from ._moves import QuantizedParam, from_integers, is_moved, moved, ordered, sharded, stacked
from ._program import (
    HIGH,
    Location,
    avals,
    bound,
    kind,
    param,
    programs,
    scan_parts,
    unchanged,
    while_parts,
    while_programs,
)


class Scope(NamedTuple):
    """What a program is evaluated with, beside its arguments.

    Attributes:
      qparams: of the inputs of the contractions in it, by entry.
      key: PRNG key with which they, and gradients, are rounded stochastically, or None; of each turn of a loop its own.
      observed: what its contractions have seen of their inputs, by entry; filled while it is evaluated.
      memo: what they have computed and may use again.
    """

    qparams: Mapping[str, Any]
    key: Any
    observed: dict[str, Any]
    memo: dict[Any, Any]


class Inputs(NamedTuple):
    """Where the inputs of contractions have their qparams and are observed.

    Attributes:
      used: of each location of a contraction, the entries whose qparams it needs.
      first: of each entry that is observed, the location where.
      scans: of each entry, the scans over parameters around it: each of its turns has a value of its own.
      nothing: (entry, locations of scans) -> what is observed where nothing is seen, stacked for these scans.
      merge: of what two turns or branches have seen.
      across: (what is seen on one device, axes of the mesh) -> what is seen on all.
    """

    used: Mapping[Location, Collection[str]]
    first: Mapping[str, Location]
    scans: Mapping[str, Collection[Location]]
    nothing: Callable[[str, Collection[Location]], Any]
    merge: Callable[[Any, Any], Any]
    across: Callable[[Any, Collection[str]], Any]

    def within(self, qparams: Mapping[str, Any], location: Location) -> dict[str, Any]:
        """The qparams that are needed at a location, or inside of it."""
        n = len(location)
        needed = {key for at, keys in self.used.items() if at[:n] == location for key in keys}
        return {key: v for key, v in qparams.items() if key in needed}

    def seen(self, location: Location, ins: Sequence[Any]) -> dict[str, Any]:
        """What is observed inside of a location where nothing is seen; on the devices where `ins` are."""
        n = len(location)
        inside = [key for key, at in self.first.items() if at[:n] == location]
        seen = {key: self.nothing(key, [at for at in self.scans[key] if at[:n] == location]) for key in inside}
        return vary_together(seen, ins)[0] if seen else seen


class Replacements:
    """What replaces contractions, and how the rest is treated.

    Attributes:
      contractions: of each location the function (eqn, ins, scope) -> result.
      custom: of each call with a custom derivative, around a contraction, "keep" or "inline".
      holding: which results of a branch are a parameter.
      read: (parameter, by what) -> its values, where anything computes with it; by None for a derivative alone.
      inputs: of the contractions.
    """

    def __init__(
        self, contractions: Mapping[Location, Callable], custom: Mapping[Location, str],
        holding: Mapping[Location, Sequence[bool]], read: Callable[..., Array], inputs: Inputs,
    ):  # fmt: skip
        self.contractions, self.custom, self.holding = contractions, custom, holding
        self.read, self.inputs = read, inputs
        self.around = {location[:n] for location in contractions for n in range(1, len(location))}

    def program(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], location: Location, scope: Scope
    ) -> list[Any]:
        """The results of a program."""
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        value = lambda v: v.val if isinstance(v, Literal) else env[v]
        for i, eqn in enumerate(jaxpr.eqns):
            here, ins = (*location, i), [value(v) for v in eqn.invars]
            holds = any(isinstance(v, QuantizedParam) for v in ins)
            if here in self.contractions:
                with eqn.ctx.manager:  # such as another mesh
                    outs = [self.contractions[here](eqn, ins, scope)]
            elif here in self.around or (holds and kind(eqn) in _EVALUATIONS):
                outs = _EVALUATIONS[kind(eqn)](self, eqn, ins, here, scope)
            elif holds and is_moved(eqn, ins):
                with eqn.ctx.manager:
                    outs = moved(eqn, ins)
            elif holds and not eqn.effects:
                of_parameter = functools.partial(self.read, by=kind(eqn))
                outs = from_integers(lambda *ins, eqn=eqn: bound(eqn, ins, jaxpr), ins, of_parameter)
            else:
                outs = bound(eqn, self.floats(ins, kind(eqn)), jaxpr)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def floats(self, values: Sequence[Any], by: str) -> list[Any]:
        """With parameters as their values, for what computes with them."""
        return [self.read(v, by) if isinstance(v, QuantizedParam) else v for v in values]

    def inner(self, eqn: JaxprEqn, k: int, location: Location, holding: Sequence[bool] = ()) -> Callable:
        """Program `k` of an equation as a function (qparams, key, *args) -> (results, what it observes) for JAX.

        Results are arrays, but those that `holding` says.
        """
        jaxpr, consts = programs(eqn)[k]
        holding = holding or [False] * len(jaxpr.outvars)

        def f(qparams: Mapping[str, Any], key: Any, *args: Any) -> tuple[list[Any], dict[str, Any]]:
            scope = Scope(qparams, key, {}, {})
            outs = self.program(jaxpr, consts, args, (*location, k), scope)
            outs = [v if h else self.floats([v], kind(eqn))[0] for v, h in zip(outs, holding, strict=True)]
            return outs, scope.observed

        return f


def _call(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, scope: Scope) -> Sequence[Any]:
    (program,) = programs(eqn)
    return replace.program(*program, ins, (*location, 0), scope)


def _jit(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, scope: Scope) -> Sequence[Any]:
    # Inlined; what its shardings demand, constraints demand too.
    constrained = lambda values, name: [
        lax.with_sharding_constraint(v, s) if isinstance(s, jax.sharding.Sharding) and isinstance(v, Array) else v
        for v, s in zip(values, param(eqn, name), strict=True)
    ]
    outs = _call(replace, eqn, constrained(ins, "in_shardings"), location, scope)
    return constrained(outs, "out_shardings")


def _remat(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, scope: Scope) -> Sequence[Any]:
    policy, prevent_cse = param(eqn, "policy"), param(eqn, "prevent_cse")
    inner = replace.inner(eqn, 0, location, [True] * len(eqn.outvars))
    checkpointed = jax.checkpoint(inner, prevent_cse=prevent_cse, policy=policy)
    outs, observed = checkpointed(replace.inputs.within(scope.qparams, location), scope.key, *ins)
    scope.observed.update(observed)
    return outs


def _custom(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, scope: Scope) -> Sequence[Any]:
    if location not in replace.custom:
        return _untouched(replace, eqn, ins, location, scope)
    if replace.custom[location] == "inline":
        return _call(replace, eqn, ins, location, scope)
    inner = replace.inner(eqn, 0, location)
    leaves, structure = jax.tree.flatten((replace.inputs.within(scope.qparams, location), scope.key, *ins))

    @jax.custom_vjp
    def kept(*leaves):
        return inner(*jax.tree.unflatten(structure, leaves))

    def forward(*leaves):
        values, varied = [v.value for v in leaves], tuple(i for i, v in enumerate(leaves) if v.perturbed)
        return kept(*values), (values, _Varied(varied))

    def backward(residuals, g):
        # With respect to the varied operands alone: rules such as equinox's refuse to differentiate the others.
        values, varied = residuals
        of_varied = {i: values[i] for i in varied.at}

        def original(of_varied):
            leaves = [of_varied.get(i, v) for i, v in enumerate(values)]
            _, _, *ins = jax.tree.unflatten(structure, leaves)
            unquantized = lambda v: replace.read(v, None) if v.real is None else v.real
            ins = [unquantized(v) if isinstance(v, QuantizedParam) else v for v in ins]
            return bound(eqn, ins, programs(eqn)[0][0])

        outs, pull = jax.vjp(original, of_varied)
        (found,) = pull([_instantiated(*pair) for pair in zip(g[0], outs, strict=True)])
        return tuple(found.get(i) for i in range(len(values)))

    kept.defvjp(forward, backward, symbolic_zeros=True)
    outs, observed = kept(*leaves)
    scope.observed.update(observed)
    return outs


def _untouched(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, scope: Scope) -> Sequence[Any]:
    """A call with a custom derivative in which nothing is replaced, such as an identity that parameters pass."""
    outs = _call(replace, eqn, ins, location, scope)
    if not any(isinstance(v, QuantizedParam) for v in outs):
        return bound(eqn, replace.floats(ins, kind(eqn)), programs(eqn)[0][0])
    has_read = any(isinstance(v, QuantizedParam) and v.as_read is not None for v in ins)

    def form(name: str) -> list[Any]:
        of = lambda v: replace.read(v, None) if (values := getattr(v, name)) is None else values
        own = [of(v) if isinstance(v, QuantizedParam) else v for v in ins]
        return bound(eqn, own, programs(eqn)[0][0])

    forms = {name: form(name) for name in ("real", *(["as_read"] if has_read else []))}
    result = lambda v, k: {name: values[k] for name, values in forms.items() if getattr(v, name) is not None}
    return [
        dataclasses.replace(v, **result(v, k)) if isinstance(v, QuantizedParam) else forms["real"][k]
        for k, v in enumerate(outs)
    ]


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


class _Carry:
    """What a loop carries, without the parameters that it passes on as they are."""

    def __init__(self, replace: Replacements, eqn: JaxprEqn, body: Jaxpr, before: int, carry: Sequence[Any]):
        same = unchanged(body, before, len(carry))
        self.constant = [s and isinstance(v, QuantizedParam) for v, s in zip(carry, same, strict=True)]
        self.all = carry
        self.start = replace.floats([v for v, c in zip(carry, self.constant, strict=True) if not c], kind(eqn))

    def whole(self, changing: Sequence[Any]) -> list[Any]:
        rest = iter(changing)
        return [v if c else next(rest) for v, c in zip(self.all, self.constant, strict=True)]

    def changing(self, outs: Sequence[Any]) -> list[Any]:
        return [v for v, c in zip(outs, self.constant, strict=True) if not c]


def _scan(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, scope: Scope) -> Sequence[Any]:
    consts, carry, xs = scan_parts(eqn, ins)
    length, n = param(eqn, "length"), len(carry)
    xs = [stacked(x, length) if isinstance(x, QuantizedParam) else x for x in xs]
    carry = _Carry(replace, eqn, programs(eqn)[0][0], len(consts), carry)
    inner = replace.inner(eqn, 0, location, [*carry.constant, *[False] * (len(eqn.outvars) - n)])
    inputs = replace.inputs
    is_stacked = lambda key: location in inputs.scans[key]
    qparams = inputs.within(scope.qparams, location)
    of_turns = {key: v for key, v in qparams.items() if is_stacked(key)}
    shared = {key: v for key, v in qparams.items() if key not in of_turns}
    keys = None if scope.key is None else jax.vmap(lambda i: jax.random.fold_in(scope.key, i))(jnp.arange(length))
    seen = {key: v for key, v in inputs.seen(location, ins).items() if not is_stacked(key)}

    def body(state, turn):
        (changing, seen), (xs, of_turn, own) = state, turn
        outs, observed = inner({**shared, **of_turn}, own, *consts, *carry.whole(changing), *xs)
        seen = {key: inputs.merge(v, observed.pop(key)) for key, v in seen.items()}
        return (carry.changing(outs[:n]), seen), (outs[n:], observed)

    (changing, seen), (ys, observed) = lax.scan(
        body, (carry.start, seen), (list(xs), of_turns, keys), length, param(eqn, "reverse"), param(eqn, "unroll")
    )
    scope.observed.update(seen | observed)
    return [*carry.whole(changing), *ys]


def _while(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, scope: Scope) -> Sequence[Any]:
    condition_consts, consts, carry = while_parts(eqn, ins)
    i, k = while_programs(eqn)
    carry = _Carry(replace, eqn, programs(eqn)[k][0], len(consts), carry)
    condition, inner = replace.inner(eqn, i, location), replace.inner(eqn, k, location, carry.constant)
    qparams = replace.inputs.within(scope.qparams, location)
    first = None if scope.key is None else jnp.int32(0)  # turn; counted for the sake of the keys alone
    key_of = lambda turn: None if turn is None else jax.random.fold_in(scope.key, turn)

    def body(state):
        changing, seen, turn = state
        outs, observed = inner(qparams, key_of(turn), *consts, *carry.whole(changing))
        seen = {key: replace.inputs.merge(v, observed[key]) for key, v in seen.items()}
        return carry.changing(outs), seen, None if turn is None else turn + 1

    changing, seen, _ = lax.while_loop(
        lambda state: condition(qparams, key_of(state[2]), *condition_consts, *carry.whole(state[0]))[0][0],
        body,
        (carry.start, replace.inputs.seen(location, ins), first),
    )
    scope.observed.update(seen)
    return carry.whole(changing)


def _cond(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, scope: Scope) -> Sequence[Any]:
    holding, nothing = replace.holding[location], replace.inputs.seen(location, ins)
    inner = [replace.inner(eqn, k, location, holding) for k in range(len(programs(eqn)))]

    def branch(f: Callable) -> Callable:
        def all_seen(qparams, key, *args):
            outs, observed = f(qparams, key, *args)
            outs = [ordered(v) if isinstance(v, QuantizedParam) else v for v in outs]  # all branches alike
            return outs, {k: replace.inputs.merge(v, observed[k]) if k in observed else v for k, v in nothing.items()}

        return all_seen

    qparams = replace.inputs.within(scope.qparams, location)
    try:
        outs, observed = lax.switch(ins[0], list(map(branch, inner)), qparams, scope.key, *ins[1:])
    except TypeError as error:
        paths = {path for v in ins if isinstance(v, QuantizedParam) for path in v.paths}
        if not any(holding):
            raise
        raise ValueError(
            f"At {' and '.join(map(repr, sorted(paths)))}: the branches of a cond or switch return parts of the "
            "parameter with scales of different shapes, or differently cast, so that no one op can take them. Cut "
            "blocks whole, and cast after the branch."
        ) from error
    scope.observed.update(observed)
    return outs


def _shard_map(replace: Replacements, eqn: JaxprEqn, ins: list[Any], location: Location, scope: Scope) -> Sequence[Any]:
    of, inputs = functools.partial(param, eqn), replace.inputs
    mesh, axes = of("mesh"), of("manual_axes", "newly_manual_axes")
    inner = replace.inner(eqn, 0, location)
    qparams = inputs.within(scope.qparams, location)
    taken = [
        sharded(v, aval.shape, spec, mesh) if isinstance(v, QuantizedParam) else (v, spec)
        for v, aval, spec in zip(ins, avals(eqn.invars), of("in_specs"), strict=True)
    ]
    whole = lambda values: jax.tree.map(lambda _: P(), values)

    def on_device(qparams, key, *args):
        outs, observed = inner(qparams, key, *args)
        return tuple(outs), {key: inputs.across(v, axes) for key, v in observed.items()}

    outs, observed = jax.shard_map(
        on_device, mesh=mesh, in_specs=(whole(qparams), whole(scope.key), *(spec for _, spec in taken)),
        out_specs=(tuple(of("out_specs")), whole(inputs.seen(location, []))), check_vma=of("check_vma"),
        axis_names=set(axes),
    )(qparams, scope.key, *(v for v, _ in taken))  # fmt: skip
    scope.observed.update(observed)
    return outs


_EVALUATIONS: dict[str, Callable[[Replacements, JaxprEqn, list[Any], Location, Scope], Sequence[Any]]] = {
    **dict.fromkeys(("jit", "pjit"), _jit),
    **dict.fromkeys(("closed_call", "eval_jaxpr"), _call),
    **dict.fromkeys(("remat2", "checkpoint"), _remat),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", HIGH), _custom),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
