# SPDX-License-Identifier: Apache-2.0
"""The plan of a function: its sites, what becomes of them, and the table that says so."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax import Array, ShapeDtypeStruct

from .._base import _checks as checks
from .._base._table import as_html, as_text
from .._spec._rule import pattern_in_words
from .._spec._spec import QuantSpec

_HEADER = (
    *("site", "op", "shape", "K", "quantized to", "entry", "its spec", "state", "rule", "kernel", "bytes"),
    "left in float because",
)
_NO_OPERAND = "matched, but no operand"
FROM_FLOAT, IN_FLOAT, ARGUMENT = "quantized from float: ", "in float: ", "an argument"  # in the column "kernel"
_OPTIONAL = "entry", "its spec", "kernel", "bytes", "left in float because"


class Site(NamedTuple):
    """One operand of a dot or a convolution, or a cache.

    Attributes:
      name: the path of a parameter; "path:input" for the operand it is contracted with; for others the name given by
        `quant_point`, or the scope of the op and its number there.
      kind: "weight", "act_act", "derived", "captured", "gradient", as in `Rule`; "params" where both operands are
        parameters; "closed" where the op cannot be entered.
      op: the primitive; "cache" of a cache.
      scope: the scope of the op.
      shape, dtype: of the operand.
      length: K, how many products are summed for one result.
      spec: QuantSpec with the axes of the operand; None if it is left in float.
      rule: the pattern of the rule that decided; None if there was none.
      why: why it is left in float; empty if it is not.
      entry: the key of its qparams: the path of the parameter, or for an input the name of the first site that uses it
        so. The paths of concatenated parameters are joined by ", ".
      entry_spec: QuantSpec with the axes of the parameter; for an input, `spec`.
      is_per_token: whether the rule says PerToken(); `spec` then has its axes.
      scaled_by: the path of a cache whose scales change along what is contracted: they are multiplied into it before it
        is quantized, so that it is always dynamic. Empty if there is none.
      cache: the path of the cache that the operand is: its integers, where `spec` stands without `entry`, or its real
        values. Empty if it is none.
      is_in_groups: whether floats meet it, with scales that vary along what is summed: `execution="native"` then has
        sums of groups on TPUs and GPUs.
      kernel: of a value that a runtime computes, the ops that its kernel is for, or what made the floats that it
        quantizes; of an op that no kernel computes, why. Empty of others.
      nbytes: of a cache, its bytes in integers with their scales; 0 of others.
      state: "static" if quantized with the qparams of the entry, "dynamic" with the range of the values at hand,
        "frozen" if the parameter is integers already; empty if it is left in float.
      qparams: None in a plan. `at_sites` hands the function for sites the qparams here, None where the site is dynamic.
    """

    name: str
    kind: str
    op: str
    scope: str
    shape: tuple[int, ...]
    dtype: np.dtype
    length: int
    spec: QuantSpec | None
    rule: Any
    why: str
    entry: str = ""
    entry_spec: QuantSpec | None = None
    state: str = ""
    qparams: Any = None
    is_per_token: bool = False
    nbytes: int = 0
    scaled_by: str = ""
    cache: str = ""
    is_in_groups: bool = False
    kernel: str = ""

    @property
    def is_in_float(self) -> bool:
        """Whether a runtime computes it in float, or what it is quantized from."""
        return self.kernel.startswith((FROM_FLOAT, IN_FLOAT)) and self.kernel != FROM_FLOAT + ARGUMENT

    @property
    def quantized_to(self) -> str:
        """The spec that it is quantized to, in words."""
        words = in_words(self.spec, self.is_per_token) if self.spec else "-"
        scaled = f", times the scales of {self.scaled_by}" if self.scaled_by else ""
        again = f", of the real values of {self.cache}" if self.cache and self.entry else ""
        return words + scaled + again


class Op(NamedTuple):
    """A dot or a convolution with a site, as `at_sites` hands it to the function for ops; called, it is itself.

    Attributes:
      name: "dot_general", "conv_general_dilated" or "ragged_dot_general".
      params: what `jax.lax` calls its static arguments: "dimension_numbers", "window_strides", "padding", ...
      result: ShapeDtypeStruct of the result.
      lax_op: the op on arrays.
    """

    name: str
    params: Mapping[str, Any]
    result: ShapeDtypeStruct
    lax_op: Callable[..., Any]

    def __call__(self, *operands: Array) -> Array:
        return self.lax_op(*operands)


class Value(NamedTuple):
    """A value that a runtime computes in integers, as `at_sites` hands it to the function for values.

    Attributes:
      site: of the value, with its `qparams`.
      kind: "layer", "add", "mean", "average_pool", "max_pool", "concatenate"; or "quantize" for a value of floats.
      op: of a layer the contraction; else the op, with its static arguments.
      low, high: the limits of an activation; None where there is none.
      bias_axes: the axes of the result of a layer, once it is moved, that the axes of its bias are.
      move: from an array as the contraction gives it to one as the value is.
      result: ShapeDtypeStruct of the value.
      input: of a layer, the site of its input.
      is_weight_first: whether the weight of a layer is the first operand of the contraction.
    """

    site: Site
    kind: str
    op: Op
    low: float | None = None
    high: float | None = None
    bias_axes: tuple[int, ...] = ()
    move: Callable[[Array], Array] = lambda v: v
    result: Any = None
    input: Site | None = None
    is_weight_first: bool = False


class Count(NamedTuple):
    """Parameters, the numbers in them, and their bytes as they are in the pytree."""

    parameters: int = 0
    numbers: int = 0
    nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sites of a function: iterate over it, take one by its name, or print the table.

    Attributes:
      sites: in the order of the program.
      counts: dict from what becomes of parameters ("quantized", "left in float by a rule", "without a rule", "matched,
        but no operand") to Count. Counts all parameters, also those that no dot or convolution uses, such as embeddings
        that are gathered.
      execution: of the function.
    """

    sites: tuple[Site, ...]
    counts: Mapping[str, Count]
    execution: str = "auto"

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, name: str) -> Site:
        for site in self.sites:
            if site.name == name:
                return site
        raise KeyError(f"{name!r}; the nearest names: {checks.nearest(name, [site.name for site in self.sites])}")

    def __str__(self) -> str:
        return as_text(*self._table(), self._sums())

    def _repr_html_(self) -> str:
        return as_html(*self._table(), self._sums(), lambda row: row[4].startswith("-"))

    @property
    def in_float(self) -> list[str]:
        """What a runtime computes in float, with why: values between its integers, and ops."""
        return [f"{site.name!r} ({site.kernel})" for site in self if site.is_in_float]

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The header and the rows, without the columns that say nothing in any row."""
        rows = [
            (
                site.name or "''",
                site.op,
                f"{site.dtype}[{','.join(map(str, site.shape))}]",
                str(site.length),
                site.quantized_to,
                "-" if not site.spec else "same" if site.entry == site.name else site.entry,
                "-" if not site.entry_spec else "same" if site.entry_spec == site.spec else in_words(site.entry_spec),
                site.state or "-",
                "-" if site.rule is None else pattern_in_words(site.rule),
                site.kernel,
                f"{site.nbytes:,}" if site.nbytes else "",
                site.why,
            )
            for site in self.sites
        ]
        kept = [
            i for i, name in enumerate(_HEADER) if name not in _OPTIONAL or {row[i] for row in rows} - {"same", "-", ""}
        ]
        of = lambda cells: tuple(cells[i] for i in kept)
        return of(_HEADER), list(map(of, rows))

    def _sums(self) -> tuple[str, ...]:
        quantized = sum(site.spec is not None for site in self.sites)
        parameters = "; ".join(
            f"{what} {n.parameters} ({n.numbers:,} numbers, {n.nbytes:,} bytes)" for what, n in self.counts.items()
        )
        caches = [site for site in self if site.kind == "cache"]
        floats = sum(math.prod(site.shape) * site.dtype.itemsize for site in caches)
        of_caches = f"caches: {len(caches)} ({sum(site.nbytes for site in caches):,} bytes; {floats:,} in float)"
        lines = f"{quantized} of {len(self)} sites are quantized", f"parameters: {parameters or 'none'}"
        lines = (*lines, of_caches) if caches else lines
        values, floats = (sum(map(of, self)) for of in (lambda site: bool(site.kernel), lambda site: site.is_in_float))
        if values:
            lines = *lines, f"runtime: {values - floats} values by its kernels, {floats} computed in float"
        in_groups = sum(site.is_in_groups for site in self)
        if in_groups and self.execution == "native":
            lines = *lines, f"native: {in_groups} by sums of groups on TPUs and GPUs; CPUs have the exact value"
        if _NO_OPERAND not in self.counts:
            return lines
        return *lines, f"{_NO_OPERAND}: biases and the like, which no dot or convolution takes as they are"


def in_words(spec: QuantSpec, is_per_token: bool = False) -> str:
    """A spec in a cell of a table."""
    kind = spec.granularity
    per = "token" if is_per_token and not kind.sizes else kind.words
    per += "" if spec.scales.is_exact else f", scale {spec.scale_dtype}"
    if spec.format:
        return f"{spec.format} per {per}"
    sign = "" if spec.signed else "unsigned "
    return f"{spec.bits} bit{'s' * (spec.bits > 1)} {sign}{'symmetric' if spec.symmetric else 'affine'} per {per}"
