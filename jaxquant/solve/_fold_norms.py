# SPDX-License-Identifier: Apache-2.0
"""Norms with given statistics, folded into the contractions before them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .._base import _checks as checks
from .._base._checks import PyTree
from .._contract._ops import OPS
from .._paths import with_leaves, with_paths
from .._program._fusing import Level, Var, flattened
from .._program._jaxpr import Jaxpr, JaxprEqn, Literal, avals, evaluated, is_contraction, kind, read_equations
from .._transform._caches import CacheRules
from .._transform._call import Static, call_of
from .._transform._source import Source, value_of

Progress = Callable[[str], None]  # (path of the weight)


class _Norm(NamedTuple):
    """A contraction, and the products and sums behind it, with a number for each channel.

    Attributes:
      weight: the path of its weight.
      axis: the axis of the weight along which the channels are.
      bias: the path of the parameter that the folded bias becomes.
      output: the output of the contraction.
      channel: the axis of the output along which the channels are.
      steps: the names of the equations, the side of the operand that is no data, and that operand, not yet broadcast.
      result: what the last one gives.
    """

    weight: str
    axis: int
    bias: str
    output: Var
    channel: int
    steps: tuple[tuple[str, int, Var], ...]
    result: Var

    def factors(self, values: dict[Var, Any]) -> tuple[Array, Array]:
        """What the steps multiply each channel by, and what they add to it."""
        scale, shift = jnp.ones(1, jnp.float32), jnp.zeros(1, jnp.float32)
        for name, side, other in self.steps:
            v = jnp.asarray(other.val if isinstance(other, Literal) else values[other], jnp.float32).reshape(-1)
            if name in ("mul", "div"):
                scale, shift = (v * scale, v * shift) if name == "mul" else (scale / v, shift / v)
            elif name == "add":
                shift = shift + v
            else:  # a difference, of which either may be the data
                scale, shift = (scale, shift - v) if side else (-scale, v - shift)
        return scale, shift


class _Program(NamedTuple):
    """A function of one call, made flat, and the norms in it."""

    jaxpr: Jaxpr
    consts: Sequence[Any]
    arrays: Sequence[Any]
    paths: Sequence[str | None]
    norms: Sequence[_Norm]
    finish: Callable[[Sequence[Any]], PyTree]


def _program(f: Callable, argnum: int, args: tuple, kwargs: dict[str, Any]) -> _Program:
    caches = CacheRules.of(f, ())
    call, arrays = call_of(args, kwargs, argnum, caches)
    program = Source(f, (), argnum, caches).program(call, arrays)
    jaxpr, consts = flattened(program.jaxpr, program.consts)
    finish = lambda outs: value_of(program.leaves(outs), Static.of(program.structure))
    return _Program(jaxpr, consts, arrays, program.paths, _Search(jaxpr, program.paths).norms(), finish)


class _Search:
    """Finds norms in a program."""

    def __init__(self, jaxpr: Jaxpr, paths: Sequence[str | None]):
        self.level, self.jaxpr = Level(jaxpr), jaxpr
        self.path = {v: path for v, path in zip(jaxpr.invars, paths, strict=True) if path is not None}
        self.needs: dict[Var, frozenset[Var]] = {v: frozenset([v]) for v in jaxpr.invars}
        self.needs |= {v: frozenset() for v in jaxpr.constvars}
        self.users: dict[Var, list[tuple[JaxprEqn, int]]] = {}
        for eqn in jaxpr.eqns:
            needs = frozenset().union(*map(self.of, eqn.invars))
            self.needs.update(dict.fromkeys(eqn.outvars, needs))
            for i, v in enumerate(eqn.invars):
                if not isinstance(v, Literal):
                    self.users.setdefault(v, []).append((eqn, i))

    def of(self, v: Var) -> frozenset[Var]:
        """The arguments that a value depends on."""
        return frozenset() if isinstance(v, Literal) else self.needs.get(v, frozenset())

    def norms(self) -> list[_Norm]:
        found = [self._norm(eqn, side) for eqn in self._contractions() for side in range(2)]
        kept = [norm for norm in found if norm is not None]
        weights = [norm.weight for norm in kept]
        return [norm for norm in kept if weights.count(norm.weight) == 1]

    def _contractions(self) -> list[JaxprEqn]:
        return [eqn for eqn in self.jaxpr.eqns if is_contraction(kind(eqn), eqn.params) and kind(eqn) in OPS]

    def _norm(self, eqn: JaxprEqn, side: int) -> _Norm | None:
        weight = eqn.invars[side]
        if isinstance(weight, Literal) or weight not in self.path or len(self.users[weight]) > 1:
            return None
        output, ndims = eqn.outvars[0], [v.ndim for v in avals(eqn.invars[:2])]
        axes = OPS[kind(eqn)].of(eqn.params).axes(ndims)
        channels = {axes.out.index(name): i for i, name in enumerate(axes.operands[side]) if name in axes.out}
        v, steps, along = output, [], set[int]()
        while (step := self._step(v, channels)) is not None:
            eqn, of = step
            along |= self._varies(eqn.invars[of])
            if len(along) > 1:
                return None
            steps.append(step)
            v = eqn.outvars[0]
        others, channel = [eqn.invars[side] for eqn, side in steps], next(iter(along), None)
        is_scaled = any(eqn.primitive.name in ("mul", "div") for eqn, _ in steps)
        if channel is None or not is_scaled:
            return None
        bias = self._bias(others, [eqn for eqn, _ in steps], avals([output])[0].shape[channel])
        if bias is None:
            return None
        known = tuple((eqn.primitive.name, side, self._own(eqn.invars[side])[0]) for eqn, side in steps)
        return _Norm(self.path[weight], channels[channel], bias, output, channel, known, v)

    def _bias(self, others: Sequence[Var], steps: Sequence[JaxprEqn], n: int) -> str | None:
        """The path of the last parameter of n numbers that only these steps take, be it computed with."""

        def is_own(leaf: Var) -> bool:
            made_of_it = {v for v, needs in self.needs.items() if leaf in needs and needs <= self.path.keys()}
            users = [eqn for v in made_of_it for eqn, _ in self.users.get(v, ())]
            is_inside = lambda eqn: eqn in steps or made_of_it.issuperset(eqn.outvars)
            return all(map(is_inside, users)) and made_of_it.isdisjoint(self.jaxpr.outvars)

        leaves = {leaf for other in others for leaf in self.of(other) if avals([leaf])[0].size == n}
        own = [leaf for leaf in leaves if checks.is_float(avals([leaf])[0].dtype) and is_own(leaf)]
        first_use = lambda leaf: min(self.jaxpr.eqns.index(eqn) for eqn, _ in self.users[leaf])
        return self.path[max(own, key=first_use)] if own else None

    def _step(self, v: Var, channels: dict[int, int]) -> tuple[JaxprEqn, int] | None:
        """The equation that alone takes a value, if it multiplies it or adds to it a number for each channel."""
        users = self.users.get(v, [])
        if len(users) != 1 or v in self.jaxpr.outvars:
            return None
        eqn, i = users[0]
        if eqn.primitive.name not in ("add", "sub", "mul", "div") or (eqn.primitive.name == "div" and i):
            return None
        other = eqn.invars[1 - i]
        is_given = isinstance(other, Literal) or (other in self.needs and self.of(other) <= self.path.keys())
        return (eqn, 1 - i) if is_given and self._varies(other) <= channels.keys() else None

    def _own(self, v: Var) -> tuple[Var, tuple[int, ...]]:
        """A value before it was broadcast, and its shape with an axis of 1 for each axis that it has none for."""
        shape, made = avals([v])[0].shape, self.level.made(v)
        if made is None or made[1].primitive.name != "broadcast_in_dim":
            return v, shape
        old, places = avals(made[1].invars)[0].shape, made[1].params["broadcast_dimensions"]
        return made[1].invars[0], tuple(old[places.index(i)] if i in places else 1 for i in range(len(shape)))

    def _varies(self, v: Var) -> set[int]:
        """The axes of the output along which a value has more than one number."""
        return {axis for axis, n in enumerate(self._own(v)[1]) if n != 1}


def _folded(program: _Program, leaves: Mapping[str, Array]) -> dict[str, Array]:
    """The weights and biases with norms in them, of the parameters by their paths."""
    wanted = [v for norm in program.norms for *_, v in norm.steps if not isinstance(v, Literal)]
    values, changed = _values(program, leaves, wanted), dict[str, Array]()
    for norm in program.norms:
        scale, shift = norm.factors(values)
        weight, bias = leaves[norm.weight], leaves[norm.bias]
        shape = [-1 if i == norm.axis else 1 for i in range(weight.ndim)]
        changed[norm.weight] = (weight.astype(jnp.float32) * scale.reshape(shape)).astype(weight.dtype)
        changed[norm.bias] = jnp.broadcast_to(shift, (bias.size,)).reshape(bias.shape).astype(bias.dtype)
    return changed


def _values(program: _Program, leaves: Mapping[str, Array], wanted: Sequence[Var]) -> dict[Var, Any]:
    """Some values of a program, which depend on parameters and constants alone."""
    jaxpr = program.jaxpr
    env = dict(zip(jaxpr.constvars, program.consts, strict=True))
    env |= {v: leaves[path] for v, path in zip(jaxpr.invars, program.paths, strict=True) if path is not None}
    for eqn in read_equations(jaxpr, wanted):
        ins = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        env.update(zip(eqn.outvars, evaluated(eqn, ins, jaxpr), strict=True))
    return env


def _without(program: _Program, weights: Sequence[str]) -> PyTree:
    """The function without the norms behind some weights, whose biases are the parameters that were in the norms."""
    jaxpr = program.jaxpr
    folded = {norm.result: norm for norm in program.norms if norm.weight in weights}
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*program.consts, *program.arrays), strict=True))
    bias_of = {path: v for path, v in zip(program.paths, jaxpr.invars, strict=True) if path is not None}
    read = lambda v: v.val if isinstance(v, Literal) else env[v]
    taken = lambda eqn: [(of := folded[v]).output, bias_of[of.bias]] if (v := eqn.outvars[0]) in folded else eqn.invars
    for eqn in read_equations(jaxpr, taken=taken):
        if (norm := folded.get(eqn.outvars[0])) is None:
            outs = evaluated(eqn, list(map(read, eqn.invars)), jaxpr)
        else:
            y, bias = env[norm.output], env[bias_of[norm.bias]]
            outs = [y + bias.reshape([-1 if i == norm.channel else 1 for i in range(y.ndim)]).astype(y.dtype)]
        env.update(zip(eqn.outvars, outs, strict=True))
    return program.finish(list(map(read, jaxpr.outvars)))


def fold_norms(
    params: PyTree, f: Callable, *args: Any, params_argnum: int = 0, progress: Progress | None = None, **kwargs: Any
) -> tuple[PyTree, Callable]:
    """Norms with given statistics, such as BatchNorm in evaluation, folded into the contractions before them.

    Behind a convolution or a product such a norm is a factor and a sum for each channel, and so is what else multiplies
    or adds a parameter there. The factor goes into the
    weight; the sum, into a parameter of the norm, which becomes the bias; and the function is without the norm. It is
    the same function to rounding, with fewer ops, and a runtime fuses it. Do it before `equalize`, `bias_correct`,
    ranges and exports; a network that is trained on is trained without its norms.

    Args:
      params: pytree, with the statistics: what `f` takes as its params, such as the variables of linen, the state of
        nnx, or trainable and other variables of Keras in one dict. Or f closes over the statistics.
      f: function of the params, in evaluation. It is traced once.
      *args, **kwargs: the other arguments of f; shapes suffice.
      params_argnum: static int, as in `quantize_fn`.
      progress: function of the path of each weight that a norm is folded into; None calls none.

    Returns:
      (params, f): the params with other weights and biases, in their dtypes; and the function without these norms, with
      the arguments of f. Leaves that nothing changes are the same objects; statistics that nothing reads stay in the
      pytree.

    Gradient: of f, with respect to the weights and biases.

    Raises:
      TypeError: for an `f` that is no function.
      ValueError: if there is no such norm: the statistics are of the batch, or are an argument of their own; the norm
        comes before the contraction; something else reads the output in between; or the weight, or all parameters of
        the norm, are read elsewhere, too.

    Source: Jacob et al., 2018, section 3.2.

    >>> import jax, numpy as np
    >>> from jaxquant import solve
    >>> norm = lambda p, x: (x - p["mean"]) * jax.lax.rsqrt(p["var"] + np.float32(1e-3)) + p["bias"]
    >>> f = lambda params, x: jax.nn.relu(norm(params["norm"], x @ params["w"]))
    >>> norm_of_two = {name: np.ones((1, 2), np.float32) for name in ("mean", "var", "bias")}
    >>> params, x = {"w": np.ones((3, 2), np.float32), "norm": norm_of_two}, np.ones((4, 3), np.float32)
    >>> folded, g = solve.fold_norms(params, f, x)
    >>> [eqn.primitive.name for eqn in jax.make_jaxpr(g)(folded, x).eqns]
    ['dot_general', 'add', 'custom_jvp_call']
    """
    if not callable(f):
        raise TypeError(f"`f` must be a function, got {checks.kind(f)}. Pass one such as lambda params, x: ....")
    argnum = checks.static_int_between("params_argnum", params_argnum, 0, 255)
    program = _program(f, argnum, (*args[:argnum], params, *args[argnum:]), kwargs)
    if not program.norms:
        raise ValueError(
            "no norm with given statistics follows a contraction of a parameter, so that it alone reads the output. "
            "Trace the function in evaluation (train=False, use_running_average=True, model.eval()), with the "
            "statistics among the params, f(variables, x), or closed over."
        )
    changed = jax.jit(functools.partial(_folded, program))(dict(with_paths(params)))
    weights = [norm.weight for norm in program.norms]
    if progress is not None:
        for path in weights:
            progress(path)

    @functools.wraps(f)
    def without_norms(*args: Any, **kwargs: Any) -> PyTree:
        return _without(_program(f, argnum, args, kwargs), weights)

    return with_leaves(params, [changed.get(path, leaf) for path, leaf in with_paths(params)]), without_norms
