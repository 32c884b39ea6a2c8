# SPDX-License-Identifier: Apache-2.0
"""A function as the program of one call, with what the rules decide about it."""

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import jax

from .._arrays._at_rest import Form
from .._base._checks import PyTree
from .._paths import is_qarray
from .._program._calls import CALLS
from .._program._fusing import flattened
from .._program._jaxpr import traced
from .._program._origin import Origin
from .._program._walk import Walk
from .._runtime._kernels import Kernels
from .._spec._rule import Rule
from ._caches import Cache, CacheRules, site_of
from ._call import Call, Static, arrays_of, is_traced, origins_of, refuse_lost_changes
from ._decide import Decisions, Given, decide
from ._fused import Fusing, named
from ._match import Matcher, ops_of
from ._misuse import noted


class Program(NamedTuple):
    """A function as a program, with what it is decided to do with it."""

    jaxpr: Any
    consts: Sequence[Any]
    paths: Sequence[str | None]  # of the parameters among its arguments
    caches: Sequence[Cache | None]  # among them
    walk: Walk
    decisions: Decisions
    structure: PyTree
    static: tuple[Static | None, ...]  # of the results; None where an array is

    def leaves(self, outs: Sequence[Any]) -> list[Any]:
        """The leaves of the results: these arrays, and what is static."""
        arrays = iter(outs)
        return [next(arrays) if s is None else s for s in self.static]


class Source(NamedTuple):
    """A function of params that are one of its arguments, and the rules about it."""

    f: Callable
    rules: Sequence[Rule]
    argnum: int
    caches: CacheRules
    strict: bool = False
    kernels: Kernels | None = None

    def program(self, call: Call, arrays: Sequence[Any], static: Set[str] = frozenset()) -> Program:
        """The program of a call; `static` are the entries that have qparams."""
        results = []

        def flat(arrays):
            args, kwargs = call.arguments(arrays)
            before = arrays_of(args, kwargs)
            with noted(args[self.argnum], static):
                leaves, structure = jax.tree.flatten(self.f(*args, **kwargs))
            refuse_lost_changes(before, arrays_of(args, kwargs), arrays, leaves)
            results[:] = structure, tuple(None if is_traced(leaf) else Static.of(leaf) for leaf in leaves)
            return list(filter(is_traced, leaves))

        # The function sees integers as what they stand for: an array of the shape, and the sharding, they have.
        jaxpr, consts = traced(flat, [v.values.astype(v.dtype) if is_qarray(v) else v for v in arrays])
        if self.kernels is not None:
            jaxpr, consts = flattened(jaxpr, consts)
        params, origins, matched = origins_of(call, jaxpr.invars, self.argnum, self.caches)
        form = lambda v: Form.of(v) if is_qarray(v) else None
        caches = [
            cache._replace(form=form(v)) if cache and cache.is_wanted else None
            for cache, v in zip(matched, arrays, strict=True)
        ]
        paths = [origin.path for origin in origins]
        walk = _walked(jaxpr, origins)
        frozen = {path for path, v in zip(paths, arrays, strict=True) if path is not None and is_qarray(v)}
        arguments = self.caches.paths(*call.arguments(arrays), self.argnum)
        of_caches = {cache.path: cache for cache in matched if cache}
        matcher = Matcher(self.rules, params, f"params_argnum={self.argnum}", arguments, of_caches)
        fusing = None
        if self.kernels is not None:
            of_data = lambda: [v for v, origin in zip(jaxpr.invars, origins, strict=True) if origin.data]
            ops = matcher.match(ops_of([matcher.with_roles(of) for of in walk.found()])).ops
            jaxpr, consts, rules = named(jaxpr, consts, of_data(), ops, self.kernels)
            matcher, walk = matcher._replace(rules=[*self.rules, *rules]), _walked(jaxpr, origins)
            fusing = Fusing(self.kernels, jaxpr, of_data(), paths)
        sites = [site_of(cache, v) for cache, v in zip(caches, arrays, strict=True) if cache]
        decisions = decide(walk, matcher, self.strict, Given(static, frozen, sites), fusing)
        return Program(jaxpr, consts, paths, caches, walk, decisions, *results)


def _walked(jaxpr: Any, origins: Sequence[Origin]) -> Walk:
    """The walk through a program whose arguments have these origins."""
    walk = Walk(CALLS)
    walk.read(walk.program(jaxpr, origins), "the result of the function")
    return walk


def value_of(leaves: Sequence[Any], structure: Static) -> PyTree:
    """The results of a function, as it returns them."""
    return jax.tree.unflatten(structure.value, [v.value if isinstance(v, Static) else v for v in leaves])
