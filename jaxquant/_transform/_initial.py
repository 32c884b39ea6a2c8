# SPDX-License-Identifier: Apache-2.0
"""The qparams of a function before it is trained: of its parameters, and of the ranges of its inputs."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._arrays._fit import fit_qparams
from .._arrays._qparams import QParams
from .._arrays._range import Range, observe, qparams_from_range
from .._arrays._straight_through import tensor_qparams
from .._base import _checks as checks
from .._base._checks import PyTree
from .._params import refuse_unsigned_below_zero
from .._paths import is_qarray
from ._entries import Entry
from ._observers import has_range


def qparams_of_parameter(leaf: PyTree, entry: Entry, method: str) -> QParams | None:
    """The qparams of a parameter, fitted to its values."""
    if is_qarray(leaf):
        if leaf.frozen and not leaf.frozen.from_qparams:  # whose scale is fitted to its values
            return None
        return leaf.qparams
    if not entry.spec.signed and entry.spec.symmetric:
        refuse_unsigned_below_zero(*observe(leaf, entry.spec), entry.spec)
    return fit_qparams(leaf, entry.spec, method)


def qparams_of_input(r: object, entry: Entry) -> QParams | None:
    """The qparams of an input, of its range; None where it is dynamic."""
    if r is None:
        return None
    if not has_range(entry):
        raise ValueError("the input is always dynamic, got a range for it. Drop it, or pass None.")
    if not isinstance(r, Range):
        raise TypeError(
            f"a range of `ranges` must be a Range or None, got {checks.kind(r)}. Of a histogram: range_from_histogram."
        )
    checks.shape("x_min of the range", jnp.asarray(r.x_min), entry.groups, "one for each scale of the entry")
    unseen = not isinstance(r.x_min, jax.core.Tracer) and bool(np.any(np.asarray(r.x_min) > np.asarray(r.x_max)))
    if unseen:
        raise ValueError(
            "no batch has reached this input, whose range is Range(inf, -inf): a branch not taken, or a loop without a "
            "turn. Observe batches that do; or make it dynamic by ranges[entry] = None, or static by a Range you know."
        )
    if entry.spec.has_tensor_scale:
        return tensor_qparams(r, entry.spec)
    refuse_unsigned_below_zero(r.x_min, r.x_max, entry.spec)
    return qparams_from_range(r, entry.spec)
