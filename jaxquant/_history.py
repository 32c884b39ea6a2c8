# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling of gradients: the largest magnitudes of earlier steps, and how the one of a step is counted.

What leaves a backward pass is a cotangent, and JAX adds cotangents: of the turns of a scan, of the examples of a vmap,
of devices and of micro-batches. A sum of maxima is no maximum. So the cotangent counts: it is 1 in the bin where the
largest magnitude lies, and 0 in all others. The last bin that is not 0 in a sum of these, or in a mean, is the bin of
the largest magnitude of all.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ._arrays._json import spec_from_bytes, spec_to_bytes
from ._arrays._qparams import QParams
from ._arrays._range import LARGEST, Range, finite_or, qparams_from_range
from ._base import _checks as checks
from ._spec._spec import QuantSpec

_SHIFT = 20  # of the bits of a float32, so that 3 bits of its fraction are left: 8 bins for each power of two
_INF = 0x7F800000
BINS = _INF >> _SHIFT  # of all finite magnitudes


@functools.partial(jax.tree_util.register_dataclass, data_fields=("bins",), meta_fields=("spec",))
@dataclasses.dataclass(frozen=True)
class GradientHistory:
    """The largest magnitudes of a gradient in the last steps: state of a train step, beside the optimizer's. A pytree.

    Its array is of integers, so that it has no gradient, and no optimizer takes it.

    Attributes:
      bins: int32 of shape (steps,), or (turns, steps) in a scan over parameters, the newest first: which of 2,040 bins
        holds the largest magnitude. A bin is an eighth of a power of two wide. 0 where there was no step.
      spec: static, the QuantSpec of the gradient.
    """

    bins: Array
    spec: QuantSpec


@functools.partial(jax.tree_util.register_dataclass, data_fields=("qparams", "seen"), meta_fields=("spec",))
@dataclasses.dataclass(frozen=True)
class DelayedQParams:
    """The qparams of a gradient with a history, as a quantized function takes them. A pytree.

    Attributes:
      qparams: QParams with which the gradient is rounded; None to take them from its own values. They have no gradient.
      seen: float32 of shape (2040,), or (turns, 2040): zeros, whose cotangent counts where the largest magnitude lies.
      spec: static, the QuantSpec of the gradient.
    """

    qparams: QParams | None
    seen: Array
    spec: QuantSpec


# So that an exported program can take and return them.
for _kind in (GradientHistory, DelayedQParams):
    jax.export.register_pytree_node_serialization(
        _kind,
        serialized_name=f"jaxquant.{_kind.__name__}",
        serialize_auxdata=lambda of: spec_to_bytes(of[0]),
        deserialize_auxdata=lambda data: (spec_from_bytes(data),),
    )


def empty_history(spec: QuantSpec, turns: tuple[int, ...], steps: int) -> GradientHistory:
    """The history before the first step."""
    return GradientHistory(jnp.zeros((*turns, steps), jnp.int32), spec)


def largest_bin(g: Array) -> Array:
    """The bin of the largest finite magnitude of g, int32."""
    magnitude = jnp.abs(finite_or(g.astype(jnp.float32), 0))
    return lax.bitcast_convert_type(jnp.max(magnitude, initial=0), jnp.int32) >> _SHIFT


def with_seen(delayed: DelayedQParams, largest: Array) -> DelayedQParams:
    """The cotangent that counts a largest magnitude in its bin."""
    zeros = jax.tree.map(jnp.zeros_like, delayed)
    return dataclasses.replace(zeros, seen=(jnp.arange(BINS, dtype=jnp.int32) == largest).astype(jnp.float32))


def split_histories(qparams: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, GradientHistory]]:
    """Separates what an optimizer may train from the histories of gradients, which are state.

    Args:
      qparams: dict {entry: QParams, None or GradientHistory}, from `q.init_qparams` with a `Rule(..., history=)`.

    Returns:
      (trained, histories), two dicts. `q(params, ..., qparams={**trained, **delayed_qparams(histories)})` is
      differentiated; without a gradient, trained alone suffices, and it is what `q.freeze` and serving take.

    Gradient: none; both are parts of the argument.

    Raises:
      TypeError: for anything but a dict, and where there is no GradientHistory.

    Source: as `update_histories`.

    >>> import jax.numpy as jnp
    >>> from jaxquant import QuantSpec, Rule, quantize_fn
    >>> from jaxquant.delayed import split_histories
    >>> f = lambda params, x: x @ params["w"]
    >>> q = quantize_fn(f, [Rule("w", QuantSpec(), QuantSpec(), gradient=QuantSpec(), history=16)])
    >>> trained, histories = split_histories(q.init_qparams({"w": jnp.ones((4, 2))}, jnp.ones((3, 4))))
    >>> list(trained), list(histories)
    (['w:input', 'w'], ['w:input:gradient', 'w:gradient'])
    """
    if not isinstance(qparams, Mapping) or not any(isinstance(v, GradientHistory) for v in qparams.values()):
        raise TypeError(
            f"`qparams` must be a dict with a GradientHistory, got {_kinds(qparams)}. Make it by "
            "q.init_qparams(params, ...), with a Rule(..., gradient=, history=)."
        )
    is_history = lambda v: isinstance(v, GradientHistory)
    trained = {key: v for key, v in qparams.items() if not is_history(v)}
    return trained, {key: v for key, v in qparams.items() if is_history(v)}


def delayed_qparams(
    histories: Mapping[str, GradientHistory], *, just_in_time: bool = False
) -> dict[str, DelayedQParams]:
    """The qparams of gradients for one step, made of their histories: a scale for each, and a place to count.

    The scale is of the upper end of the bin of the largest magnitude in the history, so up to an eighth larger than of
    that magnitude; 1 where there is none. What is larger than any in the history is clipped.

    Args:
      histories: dict {entry: GradientHistory}, from `split_histories` or `update_histories`.
      just_in_time: static bool. True takes each range from the values at hand: for the backward pass that fills empty
        histories, before the first step.

    Returns:
      A dict {entry: DelayedQParams}, to be merged into the qparams of a call, and differentiated with respect to. Its
      cotangent is what `update_histories` takes.

    Gradient: none; histories are integers.

    Raises:
      TypeError: for anything but such a dict, and for `just_in_time` that is no bool.

    Source: Micikevicius et al., 2022, "FP8 Formats for Deep Learning", with delayed scaling as in Transformer Engine.

    >>> import jax.numpy as jnp
    >>> from jaxquant import float8_spec
    >>> from jaxquant.delayed import GradientHistory, delayed_qparams
    >>> e5m2 = float8_spec("float8_e5m2")
    >>> delayed = delayed_qparams({"w:gradient": GradientHistory(jnp.zeros(16, jnp.int32), e5m2)})
    >>> delayed["w:gradient"].qparams.scale.item()
    1.0
    """
    _checked("histories", histories, GradientHistory, "split_histories(qparams)")
    just_in_time = checks.static_bool("just_in_time", just_in_time)

    found = {}
    for (spec, _), keys in _alike(histories).items():
        for key, (qparams, seen) in zip(keys, _delayed([histories[key].bins for key in keys], spec), strict=True):
            found[key] = DelayedQParams(None if just_in_time else qparams, seen, spec)
    return {key: found[key] for key in histories}


@functools.partial(jax.jit, static_argnames="spec")
def _delayed(bins: Sequence[Array], spec: QuantSpec) -> list[tuple[QParams, Array]]:
    """The qparams of each history of a spec and shape, and zeros for what is seen."""
    scale, zero_point = _qparams(jnp.max(jnp.stack(bins), -1), spec)
    seen = jnp.zeros((*bins[0].shape[:-1], BINS), jnp.float32)
    return [(QParams(scale[i], zero_point[i]), seen) for i in range(len(bins))]


def _alike(histories: Mapping[str, GradientHistory]) -> dict[tuple[QuantSpec, tuple[int, ...]], list[str]]:
    """The entries by their spec and shape: a device takes as long for one as for all of a kind."""
    found: dict[Any, list[str]] = {}
    for key, history in histories.items():
        found.setdefault((history.spec, history.bins.shape), []).append(key)
    return found


def _qparams(largest: Array, spec: QuantSpec) -> QParams:
    """The qparams of what lies in a bin, or in one before it."""
    end = jnp.minimum(lax.bitcast_convert_type((largest + 1) << _SHIFT, jnp.float32), LARGEST)
    end = jnp.where(largest > 0, end, 0)  # of which the scale is 1
    return qparams_from_range(Range(-end, end), spec)


def update_histories(
    histories: Mapping[str, GradientHistory], seen: Mapping[str, DelayedQParams]
) -> dict[str, GradientHistory]:
    """The histories after a step: the largest magnitudes that its backward pass has seen first, the oldest dropped.

    A gradient keeps its history where the backward pass did not compute it, as in a branch not taken, and where it has
    no finite value but zeros, as in a step that a loss scaler drops. Other infinities and NaN are left out.

    Args:
      histories: dict {entry: GradientHistory}.
      seen: dict {entry: DelayedQParams}, the gradient with respect to `delayed_qparams(histories)`. Sums and means of
        it, over micro-batches, examples or devices, give the largest magnitude of all.

    Returns:
      A dict {entry: GradientHistory}.

    Gradient: none.

    Raises:
      TypeError: for other dicts than these, such as the two in the other order.
      ValueError: for other entries, other shapes, and, outside of jit, where nothing was seen of any entry.

    Source: as `delayed_qparams`. That the new maximum is a cotangent is as in flax's fp8 ops; counting it is ours.

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import QuantSpec, Rule, quantize_fn
    >>> from jaxquant.delayed import delayed_qparams, split_histories, update_histories
    >>> f = lambda params, x: x @ params["w"]
    >>> q = quantize_fn(f, [Rule("w", QuantSpec(), QuantSpec(), gradient=QuantSpec(), history=16)])
    >>> params, x = {"w": jnp.ones((4, 2))}, jnp.ones((3, 4))
    >>> trained, histories = split_histories(q.init_qparams(params, x))
    >>> loss = lambda params, delayed: q(params, x, qparams={**trained, **delayed}).sum() / 4
    >>> gradients, seen = jax.grad(loss, argnums=(0, 1))(params, delayed_qparams(histories))
    >>> histories = update_histories(histories, seen)
    >>> (127 * delayed_qparams(histories)["w:gradient"].qparams.scale).item()  # of 0.25, the end of its bin
    0.28125
    """
    _checked("histories", histories, GradientHistory, "split_histories(qparams)")
    _checked("seen", seen, DelayedQParams, "jax.grad with respect to delayed_qparams(histories)")
    if set(histories) != set(seen):
        name, *_ = sorted(set(histories) ^ set(seen))
        raise ValueError(
            f"`seen` must have the entries of `histories`, and one of them has no {name!r}. Differentiate with respect "
            "to delayed_qparams(histories)."
        )
    counts = [v.seen for v in seen.values()]
    if counts and not any(isinstance(v, jax.core.Tracer) or np.any(np.asarray(v) > 0) for v in counts):
        raise ValueError(
            "`seen` has seen no gradient, like what delayed_qparams(histories) gives. Pass the gradient with respect "
            "to it: gradients, seen = jax.grad(loss, argnums=(0, 1))(params, delayed)."
        )
    for key, history in histories.items():
        _check_alike(key, history, seen[key])
    found = {}
    for (spec, _), keys in _alike(histories).items():
        new = _later([histories[k].bins for k in keys], [seen[k].seen for k in keys])
        found |= {key: GradientHistory(bins, spec) for key, bins in zip(keys, new, strict=True)}
    return {key: found[key] for key in histories}


@jax.jit
def _later(histories: Sequence[Array], counts: Sequence[Array]) -> list[Array]:
    """Histories with what was seen in front; as they were where nothing was, or zeros, whose bin is the first."""
    bins, seen = jnp.stack(histories), jnp.stack(counts)
    new = jnp.max(jnp.where(seen > 0, jnp.arange(BINS, dtype=jnp.int32), -1), -1, keepdims=True)
    return list(jnp.where(new <= 0, bins, jnp.concatenate([new, bins[..., :-1]], -1)))


def _check_alike(key: str, history: GradientHistory, seen: DelayedQParams) -> None:
    expected = (*history.bins.shape[:-1], BINS)
    if seen.seen.shape != expected or seen.spec != history.spec:
        raise ValueError(
            f"At {key!r}: `seen` must be of shape {expected} and for {history.spec}, got shape {seen.seen.shape} and "
            f"{seen.spec}. Take both from one function."
        )


def _checked(name: str, given: object, kind: type, made_by: str) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(v, kind) for v in given.values()):
        raise TypeError(
            f"`{name}` must be a dict {{entry: {kind.__name__}}}, got {_kinds(given)}. It is made by {made_by}."
        )


def _kinds(given: object) -> str:
    if not isinstance(given, Mapping):
        return checks.kind(given)
    return f"a dict of {', '.join(sorted({type(v).__name__ for v in given.values()})) or 'nothing'}"
