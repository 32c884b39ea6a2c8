# SPDX-License-Identifier: Apache-2.0
"""Parameters in integers: how they are made, and what is checked of those that are served, where values are known."""

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import Array

from .._arrays._affine import quantize
from .._arrays._at_rest import at_rest
from .._arrays._codes import with_own_sums
from .._arrays._grid import frame_of, grid_of
from .._arrays._qarray import Frozen, QArray, changed, check_dtypes, check_sums
from .._arrays._qparams import QParams
from .._base import _checks as checks
from .._base._checks import PyTree
from .._base._sharding import is_inside_shard_map
from .._params import refuse_not_finite
from .._paths import is_qarray, named_in_errors, with_paths
from .._spec._spec import QuantSpec
from ._entries import Entries, check_reads


def freeze_leaf(
    path: str, leaf: PyTree, entries: Entries, qparams: Mapping[str, QParams | None], key: Array | None
) -> PyTree:
    """A parameter in integers, if an entry says so, and as it lies in memory when it is served."""
    entry = entries.of.get(path)
    if entry is None or is_qarray(leaf):
        return leaf
    known = qparams.get(path)
    with named_in_errors(path, rule=entry.rule):
        check_reads(entry, "frozen")
        own = entries.noise_key(key, path) if entry.spec.rounding == "stochastic" and key is not None else None
        platform = None if entry.is_multiplied else jax.default_backend()
        summed = None if entry.summed is None else tuple(sorted(entry.summed))
        form = _Form(entry.spec, platform, entry.order, summed)
        q, total = _quantized(checks.float_array("x", leaf), known, own, form)
        refuse_not_finite(leaf, total)
    has_static_inputs = any(qparams.get(name) is not None for name in entries.inputs_of(entry.key))
    frozen = Frozen(q.shape, known is not None, has_static_inputs, entry.rule.activation)
    return changed(q, frozen=frozen)


class _Form(NamedTuple):
    """The form in which the integers of a parameter are made and lie; static. Several in a byte for a `platform`."""

    spec: QuantSpec
    platform: str | None
    order: tuple[int, ...] | None
    summed: tuple[int, ...] | None


@functools.partial(jax.jit, static_argnames="form")
def _quantized(leaf: Array, qparams: QParams | None, key: Array | None, form: _Form) -> tuple[QArray, Array]:
    """A parameter in integers, and its sum, which is finite only where all its values are."""
    q = quantize(leaf, form.spec, qparams, key=key)
    q = dataclasses.replace(q, order=form.order, dtype=leaf.dtype)
    q = at_rest(q, form.platform, is_weight=True) if form.platform else q
    return q if form.summed is None else with_own_sums(q, form.summed), jnp.sum(leaf)


def refuse_changed(params: PyTree) -> None:
    """Raises for integers of which something has changed an array since they were made."""
    for path, q in with_paths(params):
        if not is_qarray(q):
            continue
        with named_in_errors(path):
            check_dtypes("params", q)
            if q.frozen and q.shape != q.frozen.shape and not is_inside_shard_map():
                raise ValueError(
                    f"the parameter has shape {q.shape}, and was frozen with shape {q.frozen.shape}. Take the params "
                    "of this function; a part of one by v[i] or v.reshape(...), not by jax.tree.map."
                )
            check_sums("params", q)


def refuse_lost_ranges(arrays: Sequence[Any], params: PyTree, qparams: object) -> None:
    """Raises where nothing is said of the ranges of inputs, and parameters among the arrays were frozen with some."""
    if qparams is not None or not any(is_qarray(v) and v.frozen and v.frozen.static_inputs for v in arrays):
        return
    lost = [path for path, v in with_paths(params) if is_qarray(v) and v.frozen and v.frozen.static_inputs]
    raise ValueError(
        f"`qparams` must have the ranges of inputs that {', '.join(map(repr, lost[:3]))}"
        f"{' and others' if lost[3:] else ''} were frozen with, got None. Pass qparams=, of which the entries "
        "of inputs suffice; or qparams={} for ranges of each batch, which are not what was trained."
    )


@functools.partial(jax.jit, static_argnames="spec")
def _is_quantized_with(q: QArray, qparams: QParams, spec: QuantSpec) -> Array:
    """Whether integers have the scale and the zero point that `quantize` uses with qparams, of one shape."""
    grid = grid_of(qparams, frame_of(spec)).effective()
    step, zero_point = q.qparams
    same = jnp.all(step.reshape(grid.step.shape) == grid.step)
    if grid.zero_point is None:
        return same
    return same & jnp.all(zero_point.reshape(grid.zero_point.shape) == grid.zero_point)


class Compared:
    """The scales of integers and of their entries that are known to agree: equal arrays are compared once."""

    def __init__(self):
        self._known: dict[str, tuple[Any, ...]] = {}
        self._last: tuple[list[weakref.ref], dict[str, Any]] = [], {}

    def check(self, arrays: Sequence[Any], params: PyTree, qparams: object, entries: Callable[[], Entries]) -> None:
        """Raises for integers whose scale is known not to be that of their entry."""
        qarrays, known = list(filter(is_qarray, arrays)), qparams if isinstance(qparams, Mapping) else {}
        if not qarrays or not known or self._are_last(qarrays, known):
            return
        if new := self._new(params, known):
            self._check_new(new, entries())
        # Not what is traced, which must not outlive its trace.
        if not any(isinstance(v, jax.core.Tracer) for v in jax.tree.leaves(known)):
            self._last = [weakref.ref(q) for q in qarrays], dict(known)

    def _are_last(self, qarrays: Sequence[QArray], qparams: Mapping[str, Any]) -> bool:
        """Whether a call has the very objects of the last one that passed, which need no look."""
        frozen, of = self._last
        return (
            _are_same([ref() for ref in frozen], qarrays)
            and len(of) == len(qparams)
            and all(of.get(key) is v for key, v in qparams.items())
        )

    def _new(self, params: PyTree, qparams: Mapping[str, Any]) -> dict[str, tuple[QArray, QParams]]:
        """The integers and the qparams of their entries that have not been compared, where the values are known."""
        found = {}
        for path, q in with_paths(params):
            if is_qarray(q) and isinstance(of := qparams.get(path), QParams):
                numbers = q.scale, q.zero_point, *of
                is_traced = any(isinstance(v, jax.core.Tracer) for v in jax.tree.leaves(numbers))
                if not is_traced and not _are_same(self._known.get(path, ()), numbers):
                    found[path] = q, of
        return found

    def _check_new(self, pairs: Mapping[str, tuple[QArray, QParams]], entries: Entries) -> None:
        for path, (q, qparams) in pairs.items():
            entry = entries.of.get(path)
            # Now, also where a call is traced in which they are constants: then jax_debug_nans looks at ours, too.
            at_once = jax.ensure_compile_time_eval(), jax.debug_nans(False)
            with named_in_errors(path, rule=entry and entry.rule), at_once[0], at_once[1]:
                if entry and not _is_quantized_with(q, entries.checked(path, qparams), entry.spec):
                    raise ValueError(
                        "the parameter was frozen with other qparams than these: its scale is not that of its entry. "
                        "Serve it with the qparams that it was frozen with, or freeze the float parameters with these."
                    )
            self._known[path] = q.scale, q.zero_point, *qparams


def _are_same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))
