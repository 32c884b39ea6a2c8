# SPDX-License-Identifier: Apache-2.0
"""Reports on a quantized model: errors, sizes, and the cost of each parameter and input to the loss."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from ._arrays._affine import fake_quant
from ._arrays._gram import Gram, relative, squared_errors
from ._arrays._merging import merge
from ._arrays._qparams import QParams
from ._arrays._tally import Tally, decibels, sqnr, tally, to_nearest
from ._base import _checks as checks
from ._base._bar import callback, in_bar
from ._base._checks import PyTree
from ._base._groups import reduce_groups
from ._base._sharding import replicated
from ._base._table import as_html, as_text
from ._files import saved_bytes
from ._paths import is_qarray, named_in_errors, with_leaves, with_paths
from ._spec._granularity import PerTensor
from ._spec._spec import QuantSpec
from ._transform._axes import groups_shape
from ._transform._entries import Entry
from ._transform._layout import Layout
from ._transform._plan import Site, in_words
from ._transform._quantize_fn import QuantizedFunction

Progress = Callable[[str, int, int], None]  # (entry, how many are done, how many there are)


class ReportRow(NamedTuple):
    """The effect of quantizing one parameter, or one input of the ops that use it.

    Attributes:
      entry: the path of the parameter, or the name of the first site that uses the input.
      sites: the names of all sites that use it.
      spec: QuantSpec, counted on the parameter or on the operand.
      size: how many values a parameter has; 0 for inputs.
      groups: how many scales it has.
      sqnr: the signal-to-quantization-noise ratio in decibels; NaN for zeros and for frozen parameters.
      max_error: the largest error of a value.
      clipped: the share of values more than half a step beyond the last level, in [0, 1]; NaN for frozen parameters.
      used_levels, levels: how many levels some value has, and how many there are; None above 8 bits.
      dead: how many channels of a parameter, or groups in a channel, hold only 0 once they are quantized, and did not
        before; None for inputs. A channel is what one output of an op sums over.
      bytes_before: bytes of a parameter in float; 0 for inputs, which are not stored.
      bytes_after: bytes of its levels and their qparams, as `save` writes them.
      change: by how much the loss grows if this alone is quantized, below 0 where it falls; None without a loss.
      predicted: the same, predicted from the curvature of the loss: `g d + d H d / 2` for the error d; None without a
        loss.
      by_bits: {bits: change} of a parameter at other widths, with ranges by min-max; empty without a loss.
      layer_error: the squared error of the layer's results relative to them, `tr(dW^T H dW) / tr(W^T H W)`, with H of
        the Gram of a parameter, 0 for a layer of zeros; None without one.
      channels: how many `dead` is of.
      worst_channel: the index of the channel of a parameter with the smallest SQNR, along the axes that its op does not
        sum over (and of groups, along the others), and this SQNR; None for inputs, and where all are exact.
      by_layer: the SQNR of each layer of a stack, or of an input in each iteration of a scan, in order; else empty.
      largest: the largest magnitude of an input; None for parameters.
      place: where it is: the iteration of each scan around it, and the index in the input.
      massive: the iterations of a scan, in order, where the largest magnitude of an input is more than ten times the
        median over the iterations.
      unclipped: the SQNR that an input with one scale would have with the range of its values, at least: its errors
        are taken to be uniform within a step; None where nothing is clipped.
    """

    entry: str
    sites: tuple[str, ...]
    spec: QuantSpec
    size: int
    groups: int
    sqnr: float
    max_error: float
    clipped: float
    used_levels: int | None
    levels: int | None
    dead: int | None
    bytes_before: int
    bytes_after: int
    change: float | None = None
    predicted: float | None = None
    by_bits: Mapping[int, float] = {}
    layer_error: float | None = None
    channels: int | None = None
    worst_channel: tuple[tuple[int, ...], float] | None = None
    by_layer: tuple[float, ...] = ()
    largest: float | None = None
    place: tuple[int, ...] = ()
    massive: tuple[int, ...] = ()
    unclipped: float | None = None

    @property
    def worst(self) -> int | None:
        """The layer, or the iteration of a scan, with the smallest SQNR; None where there is one alone."""
        known = [v for v in self.by_layer if not math.isnan(v)]
        return self.by_layer.index(min(known)) if known else None

    def nbytes(self, bits: int) -> int:
        """The bytes of a parameter's integers of this width with float32 scales, as `save` writes them."""
        return saved_bytes(_in_integers(self.spec, bits), self.size, self.groups)


def _in_integers(spec: QuantSpec, bits: int) -> QuantSpec:
    """The spec with integers of other bits, and scales in float32."""
    rule = spec.scale_rule if spec.scale_rule == "half_step" else "ceil"
    return dataclasses.replace(
        spec.with_float_scales, granularity=spec.granularity, bits=bits, format=None, scale_rule=rule
    )


_HEADER = (
    "entry", "quantized to", "layer error", "SQNR, dB", "worst layer", "worst channel", "largest", "max error",
    "clipped", "levels used", "dead channels", "bytes", "float bytes", "loss", "predicted",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `report`: iterate over its rows, take one by its entry, or print the table; a notebook shows it.

    Attributes:
      rows: ReportRows, in the order of their cost if there is a loss, else in the order of the program.
      loss: of the function in float; None without one.
      quantized_loss: of the quantized function; None without one.
    """

    rows: tuple[ReportRow, ...]
    loss: float | None = None
    quantized_loss: float | None = None

    def __iter__(self) -> Iterator[ReportRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, entry: str) -> ReportRow:
        for row in self.rows:
            if row.entry == entry:
                return row
        raise KeyError(f"{entry!r}; the nearest entries: {checks.nearest(entry, [row.entry for row in self.rows])}")

    def __str__(self) -> str:
        return as_text(*self._table())

    def _repr_html_(self) -> str:
        return as_html(*self._table(), lambda row: False)

    def _table(self) -> tuple[Sequence[str], list[tuple[str, ...]], list[str]]:
        number = lambda v: "-" if v is None else f"{v:+.3g}"
        known = lambda v, text: "-" if math.isnan(v) else text.format(v)
        rows = [
            (
                row.entry,
                in_words(row.spec),
                "-" if row.layer_error is None else f"{row.layer_error:.3g}",
                known(row.sqnr, "{:.1f}"),
                _worst_layer(row),
                _worst_channel_in_words(row),
                "-" if row.largest is None else f"{row.largest:.3g} at {_index(row.place)}",
                known(row.max_error, "{:.3g}"),
                known(100 * row.clipped, "{:.2g} %"),
                "-" if row.levels is None else f"{row.used_levels} of {row.levels}",
                "-" if row.dead is None else f"{row.dead} of {row.channels}",
                f"{row.bytes_after:,}" if row.size else "-",
                f"{row.bytes_before:,}" if row.size else "-",
                number(row.change),
                number(row.predicted),
            )
            for row in self.rows
        ]
        before, after = (sum(getattr(row, name) for row in self.rows) for name in ("bytes_before", "bytes_after"))
        last = [f"quantized parameters: {after:,} bytes of {before:,}", *filter(None, map(_warning, self.rows))]
        if self.loss is not None:
            last.append(f"loss: {self.loss:.5g} in float, {self.quantized_loss:.5g} quantized")
        empty = [i for i in range(len(_HEADER)) if all(row[i] == "-" for row in rows)]
        kept = lambda row: tuple(cell for i, cell in enumerate(row) if i not in empty)
        return kept(_HEADER), [kept(row) for row in rows], last


def report(
    q: QuantizedFunction,
    params: PyTree,
    *batch: Any,
    loss: Callable[[Any], Any] | None = None,
    qparams: Mapping[str, Any] | None = None,
    grams: Mapping[str, Gram] | None = None,
    bits: Sequence[int] = (2, 3, 4, 8),
    mask: PyTree = None,
    predicted: bool = True,
    progress: Progress | Literal[True] | None = None,
    **kwargs: Any,
) -> Report:
    """The effect of quantizing each parameter and each input of a function, on one batch.

    The function runs in float, and each parameter and input is compared with its quantized value. With a loss, each is
    also quantized alone in an otherwise float function; the cost is measured, and predicted from the exact curvature.
    All of it is one compiled program, with `progress` a few. It takes the time of a forward pass for each entry and for
    each of `bits` of each parameter, and of a Hessian-vector product for each entry.

    Args:
      q: what `quantize_fn` returned, with the params as its first argument.
      params: the parameters, in float; frozen ones are listed without errors.
      *batch, **kwargs: the other arguments of the function. `key=` is as in a call, and serves `quantized_loss` with
        rules that round stochastically (errors are those of rounding to nearest).
      loss: (value of the function) -> scalar, to be minimized; close over the targets. None measures no costs.
      qparams: as in a call of `q`; None takes the ranges of the values at hand.
      grams: {path: Gram}, as `q.observe(params, ..., gram=True)` gives it, for `layer_error`; None has none.
      bits: static integers in [2, 16], the widths at which each parameter's cost is measured, for `choose_bits`.
      mask: as in `q.observe`, the rows of inputs that count for their errors. A loss leaves out what it does by itself.
      predicted: whether costs are predicted, too, which takes most of the time and of the memory.
      progress: (entry, how many are done, how many there are) -> None, once before the first entry, when nothing has
        run, and after the costs of each one. True shows a bar, by tqdm.

    Returns:
      Report.

    Gradient: none; it returns Python numbers.

    Raises:
      TypeError: for a `q` that is not a quantized function, or a loss that does not return a scalar.
      ValueError: as a call of `q`, and for params that are not its first argument.

    Source: the second-order expansion of Hassibi and Stork, 1993, with exact Hessian-vector products.

    >>> import jax.numpy as jnp
    >>> from jaxquant import Rule, activation_spec, quantize_fn, report, weight_spec
    >>> q = quantize_fn(lambda params, x: x @ params["w"], [Rule("w", weight_spec(4), activation_spec(8))])
    >>> params, x = {"w": jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)}, jnp.linspace(0.0, 1.0, 16).reshape(2, 8)
    >>> found = report(q, params, x, loss=lambda y: jnp.mean(y**2))
    >>> sorted(row.entry for row in found)
    ['w', 'w:input']
    >>> (found["w"].bytes_after, found["w"].bytes_before, round(found["w"].sqnr))
    (32, 128, 24)
    """
    if not isinstance(q, QuantizedFunction):
        raise TypeError(f"`q` must be what quantize_fn returned, got {checks.kind(q)}.")
    entries, inputs = q.tallies(params, *batch, qparams=qparams, mask=mask, **kwargs)
    leaves = dict(with_paths(params))
    rows = []
    for key, entry in entries.items():
        with named_in_errors(key, rule=entry.rule):
            if entry.is_weight:
                rows.append(_of_parameter(entry, leaves[key], (qparams or {}).get(key)))
            elif key in inputs:
                rows.append(_of_input(entry, inputs[key]))
    errors = _layer_errors(q, params, grams, batch, kwargs, qparams) if grams else {}
    rows = [row._replace(layer_error=errors.get(row.entry)) for row in rows]
    if loss is None:
        return Report(tuple(rows))
    widths = tuple(checks.static_int_between("bits", b, 2, 16) for b in bits)
    costs = _Costs(q, entries, qparams, loss, widths, kwargs, predicted)
    found = jax.device_get(costs.all(params, batch, progress))
    for i, row in enumerate(rows):
        if row.entry in found["change"]:  # all but frozen parameters
            costs_of = {name: float(found[name][row.entry]) for name in ("change", "predicted") if found[name]}
            rows[i] = row._replace(**costs_of)
        if row.entry in found["by_bits"]:
            rows[i] = rows[i]._replace(by_bits=dict(zip(widths, found["by_bits"][row.entry].tolist(), strict=True)))
    rows.sort(key=lambda row: -math.inf if row.change is None else row.change, reverse=True)
    return Report(tuple(rows), float(found["loss"]), float(found["quantized_loss"]))


def _index(place: tuple[int, ...]) -> str:
    return ", ".join(map(str, place))


def _warning(row: ReportRow) -> str:
    """What is to be done about an input that a range clips, or that is massive somewhere."""
    if row.unclipped is not None and row.unclipped > row.sqnr + 1:
        return (
            f"{row.entry}: its range clips what counts: {row.sqnr:.1f} dB, with the range of its values at least "
            f"{row.unclipped:.1f}. Take min-max, or PerToken()"
        )
    if not row.massive or row.spec.granularity != PerTensor():
        return ""
    places = _index(row.massive)
    return f"{row.entry}: massive in iteration {places}, up to {row.largest:.3g}. Take PerToken(), and do not clip it"


def _worst_layer(row: ReportRow) -> str:
    if row.worst is None:
        return "-"
    return f"{row.worst}: {row.by_layer[row.worst]:.1f}, median {np.nanmedian(row.by_layer):.1f}"


def _worst_channel_in_words(row: ReportRow) -> str:
    if row.worst_channel is None:
        return "-"
    place, ratio = row.worst_channel
    return f"{_index(place)}: {ratio:.1f}"


def _row(entry: Entry, t: Tally, **sizes: Any) -> ReportRow:
    size = int(t.size)
    return ReportRow(
        entry=entry.key,
        sites=entry.sites,
        spec=entry.spec,
        groups=math.prod(entry.groups),
        sqnr=sqnr(t),
        max_error=float(t.max_error),
        clipped=int(t.clipped) / size if size else 0.0,
        used_levels=int((t.levels > 0).sum()) if t.levels.size else None,
        levels=entry.spec.levels.number if t.levels.size else None,
        **sizes,
    )


def _of_input(entry: Entry, t: Tally) -> ReportRow:
    each, place, turns = [jax.device_get(t)], (), tuple(n for _, n in entry.stack)
    if turns:  # a tally for each turn of a scan
        flat = [v.reshape(math.prod(turns), *v.shape[len(turns) :]) for v in each[0]]
        each = [Tally(*of) for of in zip(*flat, strict=True)]
        place = np.unravel_index(max(range(len(each)), key=lambda i: float(each[i].largest)), turns)
    t = jax.device_get(merge(*each)) if turns else each[0]
    row = _row(entry, t, size=0, dead=None, bytes_before=0, bytes_after=0)
    if turns:
        largest = np.array([float(of.largest) for of in each])
        massive = tuple(map(int, np.flatnonzero(largest > 10 * (np.median(largest) or np.inf))))
        row = row._replace(by_layer=tuple(map(sqnr, each)), massive=massive)
    if not int(t.size):
        return row
    place = tuple(map(int, (*place, *np.unravel_index(int(t.place), entry.shape))))
    return row._replace(largest=float(t.largest), place=place, unclipped=_unclipped(row, each))


def _unclipped(row: ReportRow, each: Sequence[Tally]) -> float | None:
    """The SQNR with a range up to the largest magnitude of each tally, at least."""
    if not row.clipped or row.spec.granularity != PerTensor() or row.spec.format:
        return None
    steps = (float(t.largest) / (2 ** (row.spec.bits - row.spec.symmetric) - 1) for t in each)
    noise = sum(float(t.size) * step**2 / 12 for t, step in zip(each, steps, strict=True))
    return decibels(sum(float(t.signal) for t in each), noise)


def _of_parameter(entry: Entry, leaf: PyTree, qparams: QParams | None) -> ReportRow:
    size, spec = math.prod(entry.shape), entry.spec
    before, after = size * jnp.dtype(leaf.dtype).itemsize, saved_bytes(spec, size, math.prod(entry.groups))
    sizes = {"size": size, "bytes_before": before, "bytes_after": after}
    if is_qarray(leaf):
        zero = jnp.zeros(())
        nothing = Tally(zero, zero, zero, zero, zero, jnp.zeros(0), zero, zero)
        return _row(entry, nothing, **sizes, dead=None)._replace(max_error=math.nan, clipped=math.nan)
    leaf, qparams = jax.tree.map(replicated, (leaf, qparams))
    t = jax.device_get(tally(leaf, spec, qparams))
    signal, noise, is_dead = jax.device_get(_by_channel(leaf, qparams, spec, entry.contracted))
    row = _row(entry, t, **sizes, dead=int(is_dead.sum()), channels=is_dead.size)
    row = row._replace(worst_channel=_worst_channel(signal, noise))
    return row._replace(by_layer=_by_layer(leaf, qparams, spec, entry.layers)) if entry.layers else row


def _by_layer(leaf: Array, qparams: QParams | None, spec: QuantSpec, layers: frozenset[int]) -> tuple[float, ...]:
    """The SQNR of each layer of a stack."""
    sums = jax.device_get(_sums_by_layer(leaf, qparams, to_nearest(spec), layers))
    return tuple(decibels(*map(float, of)) for of in zip(*sums, strict=True))


@functools.partial(jax.jit, static_argnames=("spec", "layers"))
def _sums_by_layer(leaf: Array, qparams: QParams | None, spec: QuantSpec, layers: frozenset[int]) -> list[Array]:
    """The sums of the squares of values, and of their errors."""
    axes = tuple(i for i in range(leaf.ndim) if i not in layers)
    of = lambda v: jnp.sum(jnp.square(v.astype(jnp.float32)), axes).reshape(-1)
    return [of(leaf), of(fake_quant(leaf, spec, qparams) - leaf)]


def _layer_errors(
    q: QuantizedFunction,
    params: PyTree,
    grams: Mapping[str, Gram],
    batch: tuple,
    kwargs: Mapping[str, Any],
    qparams: Mapping[str, Any] | None,
) -> dict[str, float]:
    """The relative squared error of the results of each layer whose weight is not integers already."""
    entries, layouts = q.weights(params, grams, batch, kwargs)
    leaves, found = dict(with_paths(params)), {}
    for path, layout in layouts.items():
        if not is_qarray(leaves[path]):
            leaf = leaves[path]
            rounded = fake_quant(leaf, to_nearest(entries.of[path].spec), (qparams or {}).get(path))
            found[path] = float(_layer_error(leaf, rounded, grams[path].products, layout))
    return found


@functools.partial(jax.jit, static_argnames="layout")
def _layer_error(leaf: Array, rounded: Array, products: Array, layout: Layout) -> Array:
    of = lambda v: squared_errors(layout.matrices(v), products).sum()
    return relative(of(leaf - rounded), of(leaf))


@functools.partial(jax.jit, static_argnames=("spec", "contracted"))
def _by_channel(leaf: Array, qparams: QParams | None, spec: QuantSpec, contracted: frozenset[int]) -> list[Array]:
    """The sums of squares of each group in each channel, of their errors, and whether rounding leaves only 0."""
    rounded = fake_quant(leaf, to_nearest(spec), qparams)
    groups = groups_shape(spec, leaf.shape)
    if contracted:
        groups = tuple(g if i in contracted else n for i, (g, n) in enumerate(zip(groups, leaf.shape, strict=True)))
    signal, noise = (reduce_groups(jnp.sum, jnp.square(v.astype(jnp.float32)), groups) for v in (leaf, rounded - leaf))
    alive, still = (reduce_groups(jnp.any, v != 0, groups) for v in (leaf, rounded))
    return [signal, noise, alive & ~still]


def _worst_channel(signal: np.ndarray, noise: np.ndarray) -> tuple[tuple[int, ...], float] | None:
    shares = np.divide(noise, signal, out=np.zeros_like(noise), where=signal > 0)
    if not shares.size or not shares.max() > 0:
        return None
    place = np.unravel_index(shares.argmax(), shares.shape)
    axes = [i for i, n in enumerate(shares.shape) if n > 1]
    return tuple(int(place[i]) for i in axes), decibels(float(signal[place]), float(noise[place]))


class _Costs(NamedTuple):
    """The cost of each entry alone to the loss."""

    q: QuantizedFunction
    entries: Mapping[str, Entry]
    qparams: Any
    loss: Callable[[Any], Any]
    widths: tuple[int, ...]
    kwargs: Mapping[str, Any]
    predicts: bool

    def all(self, params: PyTree, batch: tuple, progress: Progress | Literal[True] | None) -> dict[str, Any]:
        """Measured, predicted and at other widths: as one program, or entry by entry where each is told of."""
        if progress is None:
            return jax.jit(self._at_once)(params, *batch)
        keys = self._keys(params)
        told = callback(progress) or (lambda *of: None)
        told(next(iter(keys), ""), 0, len(keys))
        errors = jax.jit(self._all_errors)(params)
        measured, predicted = jax.jit(self._measured), jax.jit(self._predicted)
        alone, loss = np.eye(len(keys), dtype=np.float32), jax.jit(self._quantized_loss)(params, *batch)
        found = {"loss": None, "quantized_loss": loss, "change": {}, "predicted": {}, "by_bits": {}}
        for i, key in enumerate(in_bar(keys, progress, "costs")):
            jobs = 1 + len(self.widths) * (key in errors)
            masks = np.concatenate([np.zeros_like(alone[:1]), alone[[i] * jobs]])
            nothing, change, *by_bits = measured(params, batch, errors, masks, np.array([0, *range(jobs)], np.int32))
            found["loss"], found["change"][key] = nothing, change - nothing
            if key in errors:
                found["by_bits"][key] = jnp.stack([v - nothing for v in by_bits]) if by_bits else jnp.zeros(0)
            if self.predicts:
                found["predicted"][key] = predicted(params, batch, errors, alone[i : i + 1])[0]
            jax.block_until_ready(found)
            told(key, i + 1, len(keys))
        return found

    def _at_once(self, params: PyTree, *batch: Any) -> dict[str, Any]:
        errors, keys = self._all_errors(params), self._keys(params)
        # Nothing, each entry alone, and each parameter at each width: one loop, so that the function stands in it once.
        alone, others = np.eye(len(keys), dtype=np.float32), range(1, len(self.widths) + 1)
        nothing = np.zeros((1, len(keys)), np.float32)
        masks = [nothing, alone, *(alone[[keys.index(key)] * len(others)] for key in errors)]
        widths = [0] * (1 + len(keys)) + list(others) * len(errors)
        loss, *_ = measured = self._measured(params, batch, errors, jnp.concatenate(masks), jnp.asarray(widths))
        change = measured[1:] - loss
        predicted = self._predicted(params, batch, errors, alone) if self.predicts else ()
        by_bits = change[len(keys) :].reshape(len(errors), len(self.widths))
        return {
            "loss": loss,
            "quantized_loss": self._quantized_loss(params, *batch),
            "change": dict(zip(keys, change[: len(keys)], strict=True)),
            "predicted": dict(zip(keys, predicted, strict=self.predicts)),
            "by_bits": dict(zip(errors, by_bits, strict=True)),
        }

    def _keys(self, params: PyTree) -> list[str]:
        """The entries that are not integers already."""
        frozen = {path for path, leaf in with_paths(params) if is_qarray(leaf)}
        return [key for key in self.entries if key not in frozen]

    def _all_errors(self, params: PyTree) -> dict[str, Array]:
        leaves = {path: leaf for path, leaf in with_paths(params) if path in self.entries and not is_qarray(leaf)}
        return {path: self._errors(path, leaf) for path, leaf in leaves.items()}

    def _measured(
        self, params: PyTree, batch: tuple, errors: Mapping[str, Array], masks: ArrayLike, widths: ArrayLike
    ) -> Array:
        """The loss of each job: with the errors of some entries, at one of the widths."""
        return lax.map(lambda job: self._at(params, batch, errors, *job), (masks, widths))

    def _predicted(self, params: PyTree, batch: tuple, errors: Mapping[str, Array], alone: ArrayLike) -> Array:
        """The growth of the loss by single entries, from its derivatives: the first comes with each of the second."""
        at = jax.grad(lambda mask: self._at(params, batch, errors, mask, 0))
        slope, curvature = lax.map(lambda one: jax.jvp(at, (jnp.zeros_like(one),), (one,)), jnp.asarray(alone))
        return jnp.sum(jnp.where(jnp.asarray(alone) == 1, slope + curvature / 2, 0), -1)

    def _at(self, params: PyTree, batch: tuple, errors: Mapping[str, Array], mask: Array, width: Any) -> Array:
        amounts = dict(zip(self._keys(params), mask, strict=True))
        return self._loss(params, batch, amounts, {key: v[width] for key, v in errors.items()})

    def _quantized_loss(self, params: PyTree, *batch: Any) -> Array:
        return self._checked(self.q(params, *batch, qparams=self.qparams, **self.kwargs))

    def _errors(self, path: str, leaf: Array) -> Array:
        """The errors of a parameter as its rule says, and at each of the widths by min-max, stacked."""
        entry = self.entries[path]
        spec = to_nearest(entry.spec)
        own = fake_quant(leaf, spec, (self.qparams or {}).get(path)) - leaf
        if not self.widths:
            return own[None]
        wide = _in_integers(spec, max(self.widths))
        error = lambda bits: fake_quant(leaf, wide, bits=bits) - leaf
        return jnp.concatenate([own[None], lax.map(error, jnp.asarray(self.widths, jnp.int32))])

    def _loss(self, params: PyTree, batch: tuple, mask: Mapping[str, Array], errors: Mapping[str, Array]) -> Array:
        """The loss with a part of the error of each entry added to it; errors count as constants."""
        leaves = [
            leaf + mask[path].astype(leaf.dtype) * errors[path] if path in errors else leaf
            for path, leaf in with_paths(params)
        ]
        params = with_leaves(params, leaves)

        def site(info: Site, x: Array) -> Array:
            if info.entry not in mask or self.entries[info.entry].is_weight:
                return x
            assert info.spec is not None
            spec, at = to_nearest(info.spec), lax.stop_gradient(x)
            error = lax.stop_gradient(fake_quant(at, spec, info.qparams) - at)
            return x + mask[info.entry].astype(x.dtype) * error

        kwargs = self.q.keywords_of_function(self.kwargs)
        return self._checked(self.q.at_sites(site)(params, *batch, qparams=self.qparams, **kwargs))

    def _checked(self, value: object) -> Array:
        try:
            loss = self.loss(value)
        except Exception as error:
            if checks.is_array(value):
                raise
            raise TypeError(
                f"`loss` is called with all that the function returns, a {type(value).__name__}, and failed: {error} "
                "Take the part that it needs: loss=lambda value: loss(value[0])."
            ) from error
        if not checks.is_array(loss) or loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise TypeError(f"`loss` must return a floating scalar, got {checks.kind(loss)}. Take its mean.")
        return loss.astype(jnp.float32)
