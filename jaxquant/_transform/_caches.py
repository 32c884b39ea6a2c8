# SPDX-License-Identifier: Apache-2.0
"""The arguments of a function that are caches, by the rules of kind "cache"."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._arrays._affine import quantize
from .._arrays._at_rest import Form, at_rest
from .._arrays._qarray import QArray, changed, outside
from .._arrays._quantized import Quantized
from .._base import _checks as checks
from .._base._checks import PyTree
from .._paths import is_qarray, named_in_errors, with_paths
from .._spec._granularity import PerChannel, PerTensor, granularity_of
from .._spec._rule import Rule, first_rule
from .._spec._spec import QuantSpec
from ._axes import groups_shape
from ._plan import Site


class Cache(NamedTuple):
    """An argument that is a cache: where it is, and by which rule.

    Attributes:
      path: begins with the name of the argument, but in the one that holds the parameters.
      rule: that chose it; its `activation` is the spec.
      shape, dtype: of its real values.
      form: how its integers lie in memory, where it came in integers; else None.
    """

    path: str
    rule: Rule
    shape: tuple[int, ...]
    dtype: np.dtype
    form: Form | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether its rule does not leave it in float."""
        return self.rule.activation is not None

    @property
    def spec(self) -> QuantSpec:
        assert self.rule.activation is not None
        return self.rule.activation

    def quantized(self, value: PyTree) -> QArray:
        """The cache in integers, as it is passed or as it is made of floats."""
        with named_in_errors(self.path, rule=self.rule):
            if not is_qarray(value):
                return at_rest(quantize(value, self.spec))
            if value.spec != self.spec or value.groups != groups_shape(self.spec, self.shape):
                raise ValueError(
                    f"the cache is a QArray with {value.spec} and a scale of shape {value.scale.shape}, and the rule "
                    f"says {self.spec}. Make it by jaxquant.cache.zeros({self.shape}, spec) with the spec of the rule, "
                    "or give the rule the spec of the cache."
                )
            return value

    def returned(self, q: Quantized) -> QArray:
        """The cache as the function returns it: with the structure that the next call takes, if it is whole."""
        if q.shape != self.shape or q.groups != groups_shape(self.spec, self.shape):
            granularity = granularity_of(q.groups, q.shape)
            is_shared = granularity == PerTensor() != q.spec.granularity  # the one scale of a part is of a group
            return outside(q, spec=dataclasses.replace(q.spec, granularity=PerChannel(0))) if is_shared else outside(q)
        whole = outside(q, spec=self.spec)
        if self.form is None:
            return at_rest(whole)
        return whole if self.form == Form.of(whole) else changed(whole, **self.form.stored(whole))

    def nbytes(self, value: PyTree) -> int:
        """Its bytes in integers, with scales."""
        return jax.eval_shape(self.quantized, value).nbytes


def site_of(cache: Cache, value: PyTree) -> Site:
    """A cache in the plan."""
    return Site(
        name=cache.path,
        kind="cache",
        op="cache",
        scope="",
        shape=cache.shape,
        dtype=cache.dtype,
        length=0,
        spec=cache.spec,
        rule=cache.rule.pattern,
        why="",
        nbytes=cache.nbytes(value),
    )


class CacheRules(NamedTuple):
    """The rules of kind "cache", and the names of the arguments that they speak of."""

    rules: Sequence[Rule]
    names: Sequence[str]

    @classmethod
    def of(cls, f: Callable, rules: Sequence[Rule]) -> "CacheRules":
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        try:
            names = [p.name for p in inspect.signature(f).parameters.values() if p.kind in kinds]
        except (TypeError, ValueError):
            names = []
        return cls([rule for rule in rules if rule.kind == "cache"], names)

    def qarrays(self, args: tuple, kwargs: Mapping[str, Any], argnum: int) -> list[QArray]:
        """The QArrays among the arguments that are caches, apart from those in the params."""
        if not self.rules:
            return []
        leaves = self.leaves(args, kwargs, argnum, is_qarray)
        return [v for i, path, v in leaves if i != argnum and is_qarray(v) and self.first(path, v)]

    def among(self, args: tuple, kwargs: Mapping[str, Any], argnum: int) -> dict[int, Cache]:
        """The caches that rules match, by the number of the leaf; a QArray in the arguments counts as its arrays."""
        if not self.rules:
            return {}
        found = enumerate(self.leaves(args, kwargs, argnum, lambda node: False))
        return {i: Cache(path, rule, v.shape, v.dtype) for i, (_, path, v) in found if (rule := self.first(path, v))}

    def leaves(
        self, args: tuple, kwargs: Mapping[str, Any], argnum: int, is_leaf: Callable[[Any], bool]
    ) -> Iterator[tuple[int | str, str, Any]]:
        """The number or the keyword of its argument, the path, and the value of each leaf, in their order."""
        for i, v in (*enumerate(args), *sorted(kwargs.items())):
            name = self.names[i] if isinstance(i, int) and i < len(self.names) else str(i)
            for path, leaf in with_paths(v, is_leaf=is_leaf):
                yield i, path if i == argnum else "/".join(filter(None, (name, path))), leaf

    def paths(self, args: tuple, kwargs: Mapping[str, Any], argnum: int) -> list[str]:
        """The paths of all leaves that a rule may match."""
        leaves = self.leaves(args, kwargs, argnum, is_qarray) if self.rules else ()
        return [path for _, path, v in leaves if checks.is_float(getattr(v, "dtype", None))]

    def first(self, path: str, leaf: PyTree) -> Rule | None:
        """The rule for a leaf, which is a floating array or integers for one."""
        return first_rule(self.rules, path, leaf) if checks.is_float(getattr(leaf, "dtype", None)) else None
