# SPDX-License-Identifier: Apache-2.0
"""The primitives of jax that hold programs: how a walk enters each, and how it is built anew around what is replaced.

One entry a primitive in CALLS. Walk and evaluation must agree: a walk that follows a parameter into a program notes
contractions there, which an evaluation then finds with the integers of the parameter.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.sharding import PartitionSpec as P

from .._base._sharding import vary_together
from ._evaluate import Replacements, Step
from ._jaxpr import (
    HIJAX,
    Call,
    Location,
    avals,
    evaluated,
    kind,
    param,
    programs,
    scan_parts,
    unchanged,
    while_parts,
    while_programs,
)
from ._moves import MOVES
from ._origin import JOINED, Moved, Origin, alike, computed, either
from ._param import QuantizedParam, Unquantized, put_together, quantized_now, sharded, stacked
from ._walk import Place, Walk


def _walk_call(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: Place) -> Sequence[Origin]:
    ((jaxpr, _),) = programs(eqn)
    return walk.program(jaxpr, ins, place.inside(0))


def _evaluate_call(replace: Replacements, step: Step) -> Sequence[Any]:
    eqn, ins, location, scope = step
    (program,) = programs(eqn)
    return replace.program(*program, ins, (*location, 0), scope)


def _evaluate_jit(replace: Replacements, step: Step) -> Sequence[Any]:
    # Inlined; what its shardings demand, constraints demand too.
    constrained = lambda values, name: [
        lax.with_sharding_constraint(v, s) if isinstance(s, jax.sharding.Sharding) and isinstance(v, Array) else v
        for v, s in zip(values, param(step.eqn, name), strict=True)
    ]
    outs = _evaluate_call(replace, step._replace(ins=constrained(step.ins, "in_shardings")))
    return constrained(outs, "out_shardings")


def _evaluate_remat(replace: Replacements, step: Step) -> Sequence[Any]:
    eqn, ins, location, scope = step
    policy, prevent_cse = param(eqn, "policy"), param(eqn, "prevent_cse")
    inner = replace.inner(eqn, 0, location, [True] * len(eqn.outvars))
    checkpointed = jax.checkpoint(inner, prevent_cse=prevent_cse, policy=policy)
    outs, observed = checkpointed(replace.inputs.within(scope.qparams, location), scope.key, *ins)
    scope.note(observed)
    return outs


def _walk_custom(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: Place) -> Sequence[Origin]:
    outs = _walk_call(walk, eqn, ins, place._replace(custom=(*place.custom, place.location)))
    known = {point for origin in ins for point in origin.points}  # what is named inside may leave in float
    return [origin._replace(points=tuple(point for point in origin.points if point in known)) for origin in outs]


def _walk_hijax(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: Place) -> Sequence[Origin]:
    return [walk.named(eqn, origin, place) for origin in _walk_custom(walk, eqn, ins, place)]  # a name is one of them


def _evaluate_custom(replace: Replacements, step: Step) -> Sequence[Any]:
    eqn, ins, location, scope = step = step._replace(ins=list(map(quantized_now, step.ins)))
    if location not in replace.custom:
        return _untouched(replace, step)
    if replace.custom[location] == "inline":
        return _evaluate_call(replace, step)
    inner = replace.inner(eqn, 0, location)
    leaves, structure = jax.tree.flatten((replace.inputs.within(scope.qparams, location), scope.key, *ins))

    @jax.custom_vjp
    def kept(*leaves):
        return inner(*jax.tree.unflatten(structure, leaves))

    def forward(*leaves):
        of = lambda is_varied: {i: v.value for i, v in enumerate(leaves) if v.perturbed == is_varied}
        return kept(*(v.value for v in leaves)), (of(True), of(False))

    def backward(residuals, g):
        # With respect to the varied operands alone: rules such as equinox's refuse to differentiate the others.
        varied, others = residuals

        def original(varied):
            values = varied | others
            _, _, *ins = jax.tree.unflatten(structure, [values[i] for i in range(structure.num_leaves)])
            unquantized = lambda v: replace.read(v, None) if v.real is None else v.real
            ins = [unquantized(v) if isinstance(v, QuantizedParam) else v for v in ins]
            return evaluated(eqn, ins, programs(eqn)[0][0])

        outs, pull = jax.vjp(original, varied)
        (found,) = pull([_instantiated(*pair) for pair in zip(g[0], outs, strict=True)])
        return tuple(found.get(i) for i in range(structure.num_leaves))

    kept.defvjp(forward, backward, symbolic_zeros=True)
    outs, observed = kept(*leaves)
    scope.note(observed)
    return outs


def _untouched(replace: Replacements, step: Step) -> Sequence[Any]:
    """A call with a custom derivative in which nothing is replaced, such as an identity that parameters pass."""
    eqn, ins = step.eqn, step.ins
    outs = list(map(quantized_now, _evaluate_call(replace, step)))
    if not any(isinstance(v, QuantizedParam) for v in outs):
        return evaluated(eqn, replace.floats(ins, kind(eqn)), programs(eqn)[0][0])
    has_read = any(isinstance(v, QuantizedParam) and v.as_read is not None for v in ins)

    def form(name: str) -> list[Any]:
        of = lambda v: replace.read(v, None) if (values := getattr(v, name)) is None else values
        own = [of(v) if isinstance(v, QuantizedParam) else v for v in ins]
        return evaluated(eqn, own, programs(eqn)[0][0])

    forms = {name: form(name) for name in ("real", *(["as_read"] if has_read else []))}
    result = lambda v, k: {name: values[k] for name, values in forms.items() if getattr(v, name) is not None}
    return [
        dataclasses.replace(v, **result(v, k)) if isinstance(v, QuantizedParam) else forms["real"][k]
        for k, v in enumerate(outs)
    ]


def _instantiated(cotangent: Any, out: Any) -> Any:
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return cotangent
    is_float = jnp.issubdtype(out.dtype, jnp.inexact)
    return jnp.zeros_like(out) if is_float else np.zeros(out.shape, jax.dtypes.float0)


def _inside(ins: Sequence[Origin], place: Place) -> list[Origin]:
    """Inputs of a loop or branch get new value numbers, so that none inside is merged with one outside."""
    return [origin._replace(value=(place.location, "taken", k)) for k, origin in enumerate(ins)]


def _constant(walk: Walk, eqn: JaxprEqn, body: Jaxpr, before: int, carry: Sequence[Origin]) -> list[Origin]:
    """The carry of a loop, in which a parameter that it changes is what is computed from it; a cache is written."""
    same = unchanged(body, before, len(carry))
    changed = [origin for origin, is_same in zip(carry, same, strict=True) if not is_same]
    walk.read(changed, kind(eqn))
    goes_on = lambda origin: not origin.has_integers or origin.cache is not None
    return [
        origin if is_same or goes_on(origin) else computed([origin])._replace(value=origin.value)
        for origin, is_same in zip(carry, same, strict=True)
    ]


def _settled(body: Callable[[Sequence[Origin]], list[Origin]], carry: Sequence[Origin]) -> list[Origin]:
    """The origins of what a loop returns, when another round changes those of its carry no more."""
    while True:
        outs = body(carry)
        after = [either(*pair) for pair in zip(carry, outs[: len(carry)], strict=True)]
        if all(map(alike, after, carry)):
            return [*carry, *outs[len(carry) :]]
        carry = [new._replace(value=old.value) for new, old in zip(after, carry, strict=True)]


class _Carry:
    """The carry of a loop, without the parameters that it passes on as they are; with caches that it writes.

    `with_integers` says of each what is one.
    """

    def __init__(self, replace: Replacements, step: Step, body: int, before: int, carry: Sequence[Any]):
        same = unchanged(programs(step.eqn)[body][0], before, len(carry))
        self.constant = [s and isinstance(v, QuantizedParam) for v, s in zip(carry, same, strict=True)]
        self.all = carry
        written = replace.with_integers[step.location][: len(carry)]
        self.with_integers = [c or w for c, w in zip(self.constant, written, strict=True)]
        floats = [v if w else replace.floats([v], kind(step.eqn))[0] for v, w in zip(carry, written, strict=True)]
        self.start = self.changing(floats)

    def whole(self, changing: Sequence[Any]) -> list[Any]:
        rest = iter(changing)
        return [v if c else next(rest) for v, c in zip(self.all, self.constant, strict=True)]

    def changing(self, outs: Sequence[Any]) -> list[Any]:
        rest = [v for v, c in zip(outs, self.constant, strict=True) if not c]
        return [v.of_turn() if isinstance(v, QuantizedParam) else v for v in rest]


def _in_loop(values: Sequence[Any], body: Jaxpr) -> list[Any]:
    """The constants of a loop, quantized before it, but stacks of which each iteration picks a layer of its own."""
    constants, changing = body.invars[: len(values)], set(body.invars[len(values) :])
    stays = lambda v, var: isinstance(v, Unquantized) and bool(v.layers) and _is_picked(body, {var}, changing)
    return [v if stays(v, var) else quantized_now(v) for v, var in zip(values, constants, strict=True)]


def _is_picked(program: Jaxpr, stack: set[Any], changing: set[Any]) -> bool:
    """Whether a program takes parts of a stack, of which it has casts, too, by indices among what changes."""
    stack, changing = set(stack), set(changing)
    of = lambda names, known: [not isinstance(v, Literal) and v in known for v in names]
    for eqn in program.eqns:
        move, call = MOVES.get(eqn.primitive.name), CALLS.get(kind(eqn))
        is_of_stack, has_changed = of(eqn.invars, stack), of(eqn.invars, changing)
        changing.update(eqn.outvars if any(has_changed) else ())
        if move and move.how == "casts":
            stack.update(eqn.outvars if is_of_stack[0] else ())
        elif move and move.how == "picks" and is_of_stack[0] and any(has_changed[1:]):
            return True
        elif call and call.is_through and any(is_of_stack):
            ((inner, _),) = programs(eqn)
            both = (set(itertools.compress(inner.invars, known)) for known in (is_of_stack, has_changed))
            if _is_picked(inner, *both):
                return True
    return False


def _as_y(v: Any) -> Any:
    """A result of an iteration, to be stacked, a cache in integers; nothing of a parameter, which nothing reads."""
    if isinstance(v, Unquantized) or (isinstance(v, QuantizedParam) and not v.is_cache):
        return None
    return v.of_turn() if isinstance(v, QuantizedParam) else v


def _walk_scan(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: Place) -> Sequence[Origin]:
    consts, carry, xs = scan_parts(eqn, _inside(ins, place))
    within, here = place.inside(0), (place.location, param(eqn, "length"))
    slices = [_of_turn(x, here) if x.parts else x._replace(axes=x.axes[1:], stack=()) for x in xs]
    if any(x.parts for x in xs):
        within = within._replace(stack=(*place.stack, here))
    body = lambda carry: walk.program(programs(eqn)[0][0], [*consts, *carry, *slices], within)
    outs = _settled(body, _constant(walk, eqn, programs(eqn)[0][0], len(consts), carry))
    is_dropped = [k >= len(carry) and not is_read for k, is_read in enumerate(place.reads)]
    walk.read([y for y, dropped in zip(outs, is_dropped, strict=True) if not dropped][len(carry) :], "scan")
    stays = (origin.cache is not None or dropped for origin, dropped in zip(outs, is_dropped, strict=True))
    walk.with_integers[place.location] = list(stays)
    ys = [_of_turns(y) if y.cache is not None else computed([y]) for y in outs[len(carry) :]]
    return [*outs[: len(carry)], *ys]  # stacks of what is no cache are followed no further


def _of_turn(x: Origin, scan: tuple[Location, int]) -> Origin:
    moves = None if x.moves is None else (*x.moves, Moved(None))
    return x._replace(axes=x.axes[1:], moves=moves, stack=(*x.stack, scan))


def _of_turns(y: Origin) -> Origin:
    """Stacks the parts of a cache that the iterations of a scan give."""
    return y._replace(axes=(frozenset([JOINED]), *y.axes) if y.axes else ())


def _evaluate_scan(replace: Replacements, step: Step) -> Sequence[Any]:
    eqn, ins, location, scope = step
    consts, carry, xs = scan_parts(eqn, ins)
    length, n = param(eqn, "length"), len(carry)
    consts, carry = _in_loop(consts, programs(eqn)[0][0]), list(map(quantized_now, carry))
    xs = [stacked(x, length) if isinstance(x, QuantizedParam | Unquantized) else x for x in xs]
    carry = _Carry(replace, step, 0, len(consts), carry)
    inner = replace.inner(eqn, 0, location, [*carry.with_integers, *replace.with_integers[location][n:]])
    inputs = replace.inputs
    is_stacked = lambda key: location in inputs.scans[key]
    qparams = inputs.within(scope.qparams, location)
    of_turns = {key: v for key, v in qparams.items() if is_stacked(key)}
    shared = {key: v for key, v in qparams.items() if key not in of_turns}
    key = scope.key
    keys = None if key is None else jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(length))
    seen = {key: v for key, v in inputs.seen(location, ins).items() if not is_stacked(key)}

    def body(state, turn):
        (changing, seen), (xs, of_turn, own) = state, turn
        xs = [x.layer() if isinstance(x, Unquantized) else x for x in xs]
        outs, observed = inner({**shared, **of_turn}, own, *consts, *carry.whole(changing), *xs)
        seen = {key: v.merged(observed.pop(key)) for key, v in seen.items()}
        return (carry.changing(outs[:n]), seen), (list(map(_as_y, outs[n:])), observed)

    (changing, seen), (ys, observed) = lax.scan(
        body, (carry.start, seen), (list(xs), of_turns, keys), length, param(eqn, "reverse"), param(eqn, "unroll")
    )
    scope.note(seen | observed)
    return [*carry.whole(changing), *ys]


def _walk_while(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: Place) -> Sequence[Origin]:
    condition_consts, consts, carry = while_parts(eqn, _inside(ins, place))
    condition, body = while_programs(eqn)
    carry = _constant(walk, eqn, programs(eqn)[body][0], len(consts), carry)
    carry = _settled(lambda carry: walk.program(programs(eqn)[body][0], [*consts, *carry], place.inside(body)), carry)
    walk.with_integers[place.location] = [origin.cache is not None for origin in carry]
    within = place.inside(condition)._replace(in_condition=True)
    walk.program(programs(eqn)[condition][0], [*condition_consts, *carry], within)
    return carry


def _evaluate_while(replace: Replacements, step: Step) -> Sequence[Any]:
    eqn, ins, location, scope = step
    condition_consts, consts, carry = while_parts(eqn, ins)
    i, k = while_programs(eqn)
    condition_consts, consts = (_in_loop(of, programs(eqn)[at][0]) for of, at in ((condition_consts, i), (consts, k)))
    carry = list(map(quantized_now, carry))
    carry = _Carry(replace, step, k, len(consts), carry)
    condition, inner = replace.inner(eqn, i, location), replace.inner(eqn, k, location, carry.with_integers)
    qparams = replace.inputs.within(scope.qparams, location)
    first = None if scope.key is None else jnp.int32(0)  # turn; counted for the sake of the keys alone
    key_of = lambda turn: None if turn is None or scope.key is None else jax.random.fold_in(scope.key, turn)

    def body(state):
        changing, seen, turn = state
        outs, observed = inner(qparams, key_of(turn), *consts, *carry.whole(changing))
        seen = {key: v.merged(observed[key]) for key, v in seen.items()}
        return carry.changing(outs), seen, None if turn is None else turn + 1

    changing, seen, _ = lax.while_loop(
        lambda state: condition(qparams, key_of(state[2]), *condition_consts, *carry.whole(state[0]))[0][0],
        body,
        (carry.start, replace.inputs.seen(location, ins), first),
    )
    scope.note(seen)
    return carry.whole(changing)


def _walk_cond(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: Place) -> Sequence[Origin]:
    within = [place.inside(k) for k in range(len(programs(eqn)))]  # an input of one branch is observed in that alone
    branches = [
        walk.program(jaxpr, _inside(ins[1:], at), at) for at, (jaxpr, _) in zip(within, programs(eqn), strict=True)
    ]
    outs = [either(*outs) for outs in zip(*branches, strict=True)]
    walk.with_integers[place.location] = [origin.has_integers for origin in outs]
    return outs


def _evaluate_cond(replace: Replacements, step: Step) -> Sequence[Any]:
    eqn, ins, location, scope = step
    ins = list(map(quantized_now, ins))
    with_integers, nothing = replace.with_integers[location], replace.inputs.seen(location, ins)
    inner = [replace.inner(eqn, k, location, with_integers) for k in range(len(programs(eqn)))]

    def branch(f: Callable) -> Callable:
        def all_seen(qparams, key, *args):
            outs, observed = f(qparams, key, *args)
            # All branches alike: a part may have lost the sums that the whole came with.
            outs = [v.of_turn().without_sums() if isinstance(v, QuantizedParam) else v for v in outs]
            return outs, {k: v.merged(observed[k]) if k in observed else v for k, v in nothing.items()}

        return all_seen

    qparams = replace.inputs.within(scope.qparams, location)
    try:
        outs, observed = lax.switch(ins[0], list(map(branch, inner)), qparams, scope.key, *ins[1:])
    except TypeError as error:
        paths = {path for v in ins if isinstance(v, QuantizedParam) for path in v.paths}
        if not any(with_integers):
            raise
        raise ValueError(
            f"At {' and '.join(map(repr, sorted(paths)))}: the branches of a cond or switch return parts of the "
            "parameter with scales of different shapes, or differently cast, so that no one op can take them. Cut "
            "blocks whole, and cast after the branch."
        ) from error
    scope.note(observed)
    return outs


def _walk_shard_map(walk: Walk, eqn: JaxprEqn, ins: list[Origin], place: Place) -> Sequence[Origin]:
    outs = _walk_call(walk, eqn, _inside(ins, place), place)
    walk.read(outs, "shard_map")
    walk.with_integers[place.location] = [origin.cache is not None for origin in outs]
    return [computed([origin]) if origin.has_integers and origin.cache is None else origin for origin in outs]


def _evaluate_shard_map(replace: Replacements, step: Step) -> Sequence[Any]:
    eqn, ins, location, scope = step
    of, inputs = functools.partial(param, eqn), replace.inputs
    mesh, axes = of("mesh"), of("manual_axes", "newly_manual_axes")
    inner = replace.inner(eqn, 0, location, replace.with_integers[location])
    qparams = inputs.within(scope.qparams, location)
    taken = [
        sharded(v, aval.shape, spec, mesh) if isinstance(v, QuantizedParam | Unquantized) else (v, spec)
        for v, aval, spec in zip(ins, avals(eqn.invars), of("in_specs"), strict=True)
    ]
    whole = lambda values: jax.tree.map(lambda _: P(), values)

    def on_device(qparams, key, *args):
        outs, observed = inner(qparams, key, *args)
        # All arrays of a cache leave as its values do: groups are in parts then, too.
        outs = tuple(vary_together(v.ordered())[0] if isinstance(v, QuantizedParam) else v for v in outs)
        return outs, {key: inputs.across(v, axes) for key, v in observed.items()}

    outs, observed = jax.shard_map(
        on_device, mesh=mesh, in_specs=(whole(qparams), whole(scope.key), *(spec for _, spec in taken)),
        out_specs=(tuple(of("out_specs")), whole(inputs.seen(location, []))), check_vma=of("check_vma"),
        axis_names=set(axes),
    )(qparams, scope.key, *(v for v, _ in taken))  # fmt: skip
    scope.note(observed)
    caches = {v.paths: v for v in ins if isinstance(v, QuantizedParam)}
    return [put_together(v, caches[v.paths]) if isinstance(v, QuantizedParam) else v for v in outs]


CALLS: dict[str, Call] = {
    **dict.fromkeys(("jit", "pjit"), Call(_walk_call, _evaluate_jit, is_through=True)),
    **dict.fromkeys(("closed_call", "eval_jaxpr"), Call(_walk_call, _evaluate_call, is_through=True)),
    **dict.fromkeys(("remat2", "checkpoint"), Call(_walk_call, _evaluate_remat, is_through=True)),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), Call(_walk_custom, _evaluate_custom, is_through=True)),
    HIJAX: Call(_walk_hijax, _evaluate_custom, is_through=True),
    "scan": Call(_walk_scan, _evaluate_scan),
    "while": Call(_walk_while, _evaluate_while),
    "cond": Call(_walk_cond, _evaluate_cond),
    "shard_map": Call(_walk_shard_map, _evaluate_shard_map),
}
