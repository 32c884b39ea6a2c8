# SPDX-License-Identifier: Apache-2.0
"""What has qparams of its own: each parameter that is quantized, and each input of the ops that use one."""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .. import _checks as checks
from .._affine import qparams_of_shape
from .._jaxpr._program import Location
from .._jaxpr._walk import JOINED, PICKED, Contraction, Operand, Origin
from .._paths import named_in_errors
from .._qarray import QArray
from .._qparams import QParams
from .._rule import Rule
from .._spec import PerBlock, PerChannel, PerTensor, PerToken, QuantSpec, equal_but_for_rounding, qparams_shape


class Entry(NamedTuple):
    """A parameter, or an input of ops that use it alike: what has one scale, or one for each of its groups.

    Attributes:
      key: the path of the parameter, or the name of the first site.
      spec: QuantSpec with the axes of the parameter, or of the operand.
      shape, dtype: of the parameter, or of the operand.
      is_weight: whether it is a parameter.
      rule: that chose it.
      sites: the names of those that use it.
      contracted: of a parameter, the axes along which all of its ops sum.
      reads: of a parameter, what else reads it, in float.
      order: of a parameter's last axes in memory, once it is frozen, as in QArray; None where it is read in float.
      is_multiplied: of a parameter, whether a product of integers reads it.
      is_dynamic: whether its range is always taken from the values at hand: the batch is in the shape of its scale.
      location: of the first op that uses it.
      stack: the scans over parameters around an input, and their lengths: each turn has a scale of its own.
      is_seen: whether it can be observed: not in the condition of a loop.
    """

    key: str
    spec: QuantSpec
    shape: tuple[int, ...]
    dtype: Any
    is_weight: bool
    rule: Rule
    sites: tuple[str, ...]
    contracted: frozenset[int] = frozenset()
    reads: tuple[str, ...] = ()
    order: tuple[int, ...] | None = None
    is_multiplied: bool = False
    is_dynamic: bool = False
    location: Location = ()
    stack: tuple[tuple[Location, int], ...] = ()
    is_seen: bool = True

    @property
    def groups(self) -> tuple[int, ...]:
        """The shape of its qparams."""
        return *(n for _, n in self.stack), *qparams_shape(self.spec, self.shape)

    @property
    def size(self) -> int:
        """How many values it has, in all turns of a scan."""
        return math.prod((*(n for _, n in self.stack), *self.shape))


class Entries:
    """The entries of a function, in the order of its program; `keys` has the keys of both operands at each location."""

    def __init__(self, leaves: Mapping[str, Any]):
        self.leaves = leaves
        self.of: dict[str, Entry] = {}
        self.keys: dict[Location, list[tuple[str, ...]]] = {}
        self.left: Mapping[str, str] = {}  # why sites are left in float, by their names
        self._of_value: dict[Any, str] = {}

    def add(self, contraction: Contraction, side: int, name: str, spec: QuantSpec, rule: Rule, is_weight: bool,
            contracted: Sequence[int]) -> None:  # fmt: skip
        """Notes an operand that is quantized."""
        operand = contraction.operands[side]
        at = self.keys.setdefault(contraction.location, [(), ()])
        if is_weight:
            at[side] = operand.origin.parts
            for path in operand.origin.parts:
                with named_in_errors(name, rule=rule):
                    self._add_weight(path, contraction, side, name, spec, rule, contracted)
            return
        alike = operand.origin.value, spec, str(operand.dtype), contraction.stack
        key = self._of_value.setdefault(alike, name) if operand.origin.value is not None else name
        at[side] = (key,)
        if key in self.of:
            if self.of[key].is_weight:
                raise ValueError(
                    f"{key!r} is the path of a parameter and the name of an input. Rename the quant_point."
                )
            self.of[key] = self.of[key]._replace(sites=(*self.of[key].sites, name))
            return
        kind = rule.activation.granularity if rule.activation else spec.granularity
        is_dynamic = isinstance(spec.granularity, PerBlock) or isinstance(kind, PerToken)
        self.of[key] = Entry(
            key, spec, operand.shape, operand.dtype, False, rule, (name,), is_dynamic=is_dynamic,
            location=contraction.location, stack=contraction.stack, is_seen=not contraction.in_condition,
        )  # fmt: skip

    def share(self, contraction: Contraction, side: int, name: str, key: str) -> None:
        """Notes an operand that is quantized already, where it is named."""
        self.keys.setdefault(contraction.location, [(), ()])[side] = (key,)
        self.of[key] = self.of[key]._replace(sites=(*self.of[key].sites, name))

    def _add_weight(self, path: str, contraction: Contraction, side: int, name: str, spec: QuantSpec, rule: Rule,
                    contracted: Sequence[int]) -> None:  # fmt: skip
        leaf, operand = self.leaves[path], contraction.operands[side]
        spec = on_parameter(spec, operand, path, leaf.shape)
        summed = _along(operand.origin, list(contracted))
        kept = _along(operand.origin, [i for i in range(len(operand.shape)) if i not in contracted])
        own = frozenset(summed - kept) or _shared(spec, leaf.shape)
        order, is_multiplied = _at_rest(contraction, side, spec, rule, leaf.shape), rule.activation is not None
        entry = self.of.get(path)
        if entry is not None and not entry.is_weight:
            raise ValueError(f"{path!r} is the path of a parameter and the name of an input. Rename the quant_point.")
        if entry is None:
            self.of[path] = Entry(
                path, spec, leaf.shape, leaf.dtype, True, rule, (name,), own, order=order,
                is_multiplied=is_multiplied,
            )  # fmt: skip
            return
        if entry.spec != spec:
            raise ValueError(
                f"the parameter {path!r} of shape {leaf.shape} is quantized in two ways: as {entry.spec} at "
                f"{entry.sites[0]!r}, and as {spec} at {name!r}. One parameter has one scale for each of its groups, "
                "whatever uses it. Name them by weight_spec(bits, channel_axis=...), counted on the parameter and kept "
                "by every op, or by granularity=PerTensor(); or leave one of the uses in float by a rule with None."
            )
        # Of ops that sum along other axes a flag is for all that share a scale.
        common = own if own == entry.contracted else _shared(spec, leaf.shape)
        order = order if order == entry.order else None
        is_multiplied = is_multiplied or entry.is_multiplied
        self.of[path] = entry._replace(
            sites=(*entry.sites, name), contracted=common, order=order, is_multiplied=is_multiplied
        )

    def add_read(self, path: str, rule: Rule, name: str) -> Entry:
        """Notes a parameter that every use sees quantized; what reads it has no axes to say which share a scale."""
        spec, leaf = rule.weight, self.leaves[path]
        assert spec is not None
        if path not in self.of:
            with named_in_errors(path, rule=rule):
                axis = getattr(spec.granularity, "axis", ())
                if axis is None:
                    raise ValueError(
                        f"{spec} is per output channel of the parameter's dot, and no dot uses it. Name the axis: "
                        "weight_spec(bits, channel_axis=...), counted on the parameter."
                    )
                shared = _shared(spec, leaf.shape)
            self.of[path] = Entry(path, spec, leaf.shape, leaf.dtype, True, rule, (), shared)
        entry = self.of[path]
        self.of[path] = entry._replace(sites=(*entry.sites, name))
        return entry

    @functools.cached_property
    def _streams(self) -> dict[Any, int]:
        parameters = (key for key, entry in self.of.items() if entry.is_weight)
        ops = ((location, of) for location in self.keys for of in (0, 1, "gradient"))
        return {of: i for i, of in enumerate((*parameters, *ops))}

    def noise_key(self, key: Any, of: str | tuple[Location, int | str]) -> Any:
        """The PRNG key with which a parameter, by its path, or an operand or "gradient" at a location is rounded."""
        return jax.random.fold_in(key, self._streams[of])

    def inputs_of(self, path: str) -> set[str]:
        """The keys of what a parameter is contracted with."""
        sides = ((of[side], of[1 - side]) for of in self.keys.values() for side in range(2))
        found = {key for own, others in sides if path in own for key in others}
        return {key for key in found if not self.of[key].is_weight}

    def checked_qparams(self, qparams: Any, frozen: Mapping[str, QArray]) -> dict[str, QParams | None]:
        """The qparams of each entry, in float32 and of full rank, as a caller has passed them; None is dynamic."""
        if qparams is None or (isinstance(qparams, Mapping) and not qparams):
            return dict.fromkeys(self.of)
        self.same_keys("qparams", "q.init_qparams(params, ...)", qparams, frozen)
        return {key: self.checked(key, qparams.get(key)) for key in self.of}

    def are_of_qparams(self, argument: Any) -> bool:
        """Whether an argument is a dict of qparams that were made for this function."""
        is_ours = lambda v: v is None or (isinstance(v, QParams) and v.spec is not None)
        return isinstance(argument, Mapping) and bool(argument) and all(
            key in self.of and is_ours(v) for key, v in argument.items()
        )  # fmt: skip

    def same_keys(self, name: str, made_by: str, given: Any, optional: Collection[str]) -> None:
        """Raises for entries that are missing, but of the optional ones, or unknown."""
        fix = f"Make it by {made_by} of this call and these rules; None as the value of an entry makes it dynamic."
        checks.same_keys(name, given, self.of, fix, optional, self.left)

    def checked(self, key: str, qparams: Any) -> Any:
        """The qparams of an entry, as `checked_qparams` gives them."""
        entry = self.of[key]
        if qparams is None:
            return None
        with named_in_errors(key, rule=entry.rule):
            if entry.is_dynamic:
                raise ValueError(
                    f"{entry.spec} has a scale of its own for each part of the batch, which is dynamic always, got "
                    "qparams. Pass None for it."
                )
            why = f"one for each group of {entry.spec} in {'a parameter' if entry.is_weight else 'an input'} of shape "
            turns = f", in each of {math.prod(n for _, n in entry.stack)} turns of a scan" if entry.stack else ""
            ndim = len(entry.groups) if entry.stack else len(entry.shape)
            scale, zero_point = qparams_of_shape(qparams, entry.spec, entry.groups, ndim, f"{why}{entry.shape}{turns}")
            return QParams(scale.reshape(entry.groups), zero_point.reshape(entry.groups))

    def check_frozen(self, frozen: Mapping[str, QArray], qparams: Any, operands: Collection[str]) -> None:
        """A QArray under a rule must be what the rule makes of the parameter, and served as it was frozen for.

        `operands` are the parameters that some op contracts.
        """
        for path, q in frozen.items():
            entry = self.of.get(path)
            if entry is not None:
                with named_in_errors(path, rule=entry.rule):
                    _check_frozen_by(entry, q, (qparams or {}).get(path))
            elif path in operands and q.frozen and q.frozen.activation:
                raise ValueError(
                    f"At {path!r}: the parameter was frozen by a rule that quantizes its inputs to "
                    f"{q.frozen.activation}, and no rule quantizes it now. Serve it with the rules that it was frozen "
                    "with; dequantize(params[...]) is for use in float."
                )


def _check_frozen_by(entry: Entry, q: QArray, qparams: QParams | None) -> None:
    plain = lambda spec: vars(spec) | {"granularity": None}
    groups = (1,) * (q.ndim - q.scale.ndim) + q.scale.shape
    expected = entry.groups or (1,) * q.ndim
    if plain(q.spec) != plain(entry.spec) or groups != expected:
        raise ValueError(
            f"the parameter is a QArray with {q.spec} and a scale of shape {q.scale.shape}, and the rule "
            f"makes {entry.spec} of it, with a scale of shape {entry.groups}. Freeze it with the rules it "
            "is served with; or leave it out of the rules, and it is used as it is, with inputs in float."
        )
    _check_reads(entry, "given as a QArray")
    if q.frozen is None:
        return
    if not equal_but_for_rounding(q.frozen.activation, entry.rule.activation):
        raise ValueError(
            f"the parameter was frozen by a rule whose inputs are {q.frozen.activation or 'in float'}, and they are "
            f"{entry.rule.activation or 'in float'} by this one. Serve it with the rules that it was frozen with, or "
            "freeze the float parameters again."
        )
    if qparams is not None and not q.frozen.from_qparams:
        raise ValueError(
            "the parameter was frozen without qparams, by the range of its values, and `qparams` has an entry for it, "
            "whose scale it does not have. Freeze it with them, q.freeze(params, ..., qparams=qparams); or serve it "
            f"without that entry: qparams with the inputs alone, or with qparams[{entry.key!r}] = None."
        )


def _check_reads(entry: Entry, done: str) -> None:
    if entry.reads and not entry.rule.everywhere:
        raise ValueError(
            f"the parameter is quantized at {', '.join(map(repr, entry.sites))} and also read in float, by "
            f"{', '.join(map(repr, entry.reads))}, so that it cannot be {done}: what was trained would not be what is "
            "served. Let every use see the quantized value, in training too, by Rule(..., everywhere=True)."
        )


def check_freezing(entry: Entry) -> None:
    """Raises for a parameter that ops also read in float."""
    with named_in_errors(entry.key, rule=entry.rule):
        _check_reads(entry, "frozen")


def _shared(spec: QuantSpec, shape: tuple[int, ...]) -> frozenset[int]:
    """The axes along which not each element has a scale of its own."""
    groups = qparams_shape(spec, shape) or (1,) * len(shape)
    return frozenset(i for i, (n, g) in enumerate(zip(shape, groups, strict=True)) if g != n or n == 1)


def _along(origin: Origin, axes: Sequence[int]) -> set[int]:
    """The axes of a parameter along which axes of an operand run."""
    return {a for i in axes for a in origin.axes[i] if a >= 0}


def _at_rest(
    contraction: Contraction, side: int, spec: QuantSpec, rule: Rule, shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The order in memory in which an integer product reads a matrix, or a stack of them, fastest: the sum runs last.

    Of what the product takes whole, or a scan turn by turn: a slice would be moved in each call. Blocks are summed one
    after the other; convolutions, and products of more axes, gain nothing.
    """
    if contraction.op != "dot_general" or rule.activation is None or isinstance(spec.granularity, PerBlock):
        return None
    operand, ndim = contraction.operands[side], len(shape)
    before = ndim - len(operand.shape)
    runs = [a for along in operand.origin.axes for a in sorted(along)]
    is_whole = sorted(runs) == list(range(before, ndim)) and operand.shape == tuple(shape[a] for a in runs)
    is_scanned = all(n in [turns for _, turns in contraction.stack] for n in shape[:before])
    if not is_whole or not is_scanned or len(operand.origin.parts) > 1:
        return None
    contracted, batch = (of[side] for of in contraction.dot)
    free = [a for i, a in enumerate(runs) if i not in (*contracted, *batch)]
    is_lying = [runs[i] for i in contracted] == [ndim - 2] and free == [ndim - 1]
    return (-1, -2) if is_lying else None


def on_parameter(spec: QuantSpec, operand: Operand, path: str, shape: tuple[int, ...]) -> QuantSpec:
    """The spec of an operand with its axes counted on the parameter of which it is made.

    Axes that the operand does not have, because a scan or an index took them away, are separate.
    """
    kind, ndim = spec.granularity, len(operand.shape)
    axis = getattr(kind, "axis", ())
    own = {a % ndim for a in (axis if isinstance(axis, tuple) else (axis,))}
    sizes = {a % ndim: size for a, size in kind.sizes.items()} if isinstance(kind, PerBlock) else {}
    said: dict[int, set[int]] = {a: set() for a in range(len(shape))}  # of each axis: 1 separate, 0 shared, else blocks
    for i, along in enumerate(operand.origin.axes):
        separate = bool(sizes) or (i in own and isinstance(kind, PerChannel))
        innermost = max(along - {JOINED, PICKED}, default=None)
        for a in along - {JOINED, PICKED}:
            said[a].add(sizes[i] if i in sizes and a == innermost else int(separate))
    if any(len(of) > 1 for of in said.values()):
        raise ValueError(_unsayable(spec, operand, path, shape))
    of_axis = {a: next(iter(of), 1) for a, of in said.items() if shape[a] > 1}
    blocks = {a: of for a, of in of_axis.items() if of > 1}
    if any(shape[a] % size for a, size in blocks.items()):
        raise ValueError(_unsayable(spec, operand, path, shape))
    separate = tuple(a for a, of in of_axis.items() if of == 1)
    granularity = PerChannel(separate) if separate else PerTensor()
    if blocks:
        granularity = PerBlock(tuple(blocks), tuple(blocks.values()))
    return dataclasses.replace(spec, granularity=granularity)


def _unsayable(spec: QuantSpec, operand: Operand, path: str, shape: tuple[int, ...]) -> str:
    runs = [sorted(along - {JOINED, PICKED}) for along in operand.origin.axes]
    return (
        f"{spec} is of an operand of shape {operand.shape}, whose axes run along {runs} of the parameter {path!r} of "
        f"shape {shape}, and no granularity of the parameter says it. Name axes that stay apart by weight_spec("
        "channel_axis=...), counted on the parameter; or give the parameter the shape of the operand."
    )
