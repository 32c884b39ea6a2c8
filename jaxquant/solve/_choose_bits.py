# SPDX-License-Identifier: Apache-2.0
"""Widths of parameters under a budget of bytes, by what each costs the loss."""

from .._base import _checks as checks
from .._report import Report

_MOST_CHOICES = 500  # kept of those that may still become the best; it costs the last per mille of a budget


def choose_bits(report: Report, budget_bytes: int) -> dict[str, int]:
    """Widths for the parameters, so that their bytes fit a budget and the loss grows little: mixed precision.

    Of all choices among the report's `bits` that fit, this is the one with the least sum of costs. It adds up what each
    parameter costs alone, with the others in float.

    Args:
      report: what `report` returned, with a loss.
      budget_bytes: integer, for the integers of all quantized parameters with their qparams, as `save` writes them.

    Returns:
      A dict from path to bits, for rules: `[Rule(path, weight_spec(bits)) for path, bits in chosen.items()]`.

    Gradient: none.

    Raises:
      TypeError: for anything but a Report.
      ValueError: for a report without a loss, or a budget that the fewest bits exceed.

    Source: the least sum of costs under a budget, as in Dong et al., 2020 (HAWQ-V2), with measured costs; solved as a
    multiple-choice knapsack.

    >>> import jax.numpy as jnp
    >>> from jaxquant import quantize_fn, report, weight_spec
    >>> from jaxquant.solve import choose_bits
    >>> f = lambda params, x: jnp.tanh(x @ params["a"]) @ params["b"]
    >>> a, b = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), jnp.linspace(-0.01, 0.01, 64).reshape(8, 8)
    >>> q = quantize_fn(f, [("*", weight_spec(4))])
    >>> x = jnp.linspace(0.0, 1.0, 16).reshape(2, 8)
    >>> found = report(q, {"a": a, "b": b}, x, loss=lambda y: jnp.mean((y - 1) ** 2))
    >>> chosen = choose_bits(found, 130)
    >>> sum(found[path].nbytes(bits) for path, bits in chosen.items()) <= 130
    True
    """
    if not isinstance(report, Report):
        raise TypeError(f"`report` must be what jaxquant.report returned, got {checks.kind(report)}.")
    rows = {row.entry: row for row in report if row.by_bits}
    if not rows:
        raise ValueError(
            "`report` must have the costs of its parameters, got none. Make it with a loss: report(q, params, x, "
            "loss=...)."
        )
    budget = checks.static_int_between("budget_bytes", budget_bytes, 0, 2**62)
    fewest = sum(row.nbytes(min(row.by_bits)) for row in rows.values())
    if budget < fewest:
        raise ValueError(
            f"`budget_bytes` must be at least {fewest}, which the fewest bits of the report need, got {budget}. "
            "Raise it, or report at fewer bits."
        )
    # Of the choices so far, those that no other beats in both bytes and cost: (bytes, cost, bits of each).
    best: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    needed = fewest
    for row in rows.values():
        needed -= row.nbytes(min(row.by_bits))
        longer = sorted(
            (size + row.nbytes(bits), cost + change, (*chosen, bits))
            for size, cost, chosen in best
            for bits, change in row.by_bits.items()
            if size + row.nbytes(bits) + needed <= budget
        )
        best = [longer[0]]
        for choice in longer[1:]:
            if choice[1] < best[-1][1]:
                best.append(choice)
        best = best[:: -(-len(best) // _MOST_CHOICES)] + best[-1:]
    return dict(zip(rows, best[-1][2], strict=True))
