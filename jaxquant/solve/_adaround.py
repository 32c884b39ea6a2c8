# SPDX-License-Identifier: Apache-2.0
"""Rounding each weight up or down as the error of the layer learns it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._arrays._gram import Gram, matmul, squared_errors
from .._arrays._grid import Grid
from .._base import _checks as checks
from .._base import _numerics as num
from .._base._checks import PyTree
from .._transform._quantize_fn import QuantizedFunction
from ._model import model_of
from ._rounding import Shown, rounded

# As published: sigmoids stretched beyond [0, 1] and clipped; after a fifth of the steps a pull to 0 or 1 that sharpens.
_STRETCH, _PULL, _WARM_UP = (-0.1, 1.1), (20.0, 2.0), 0.2
_STRENGTH = 10.0
_RATE, _FIRST, _SECOND, _SMALL = 0.03, 0.9, 0.999, 1e-8  # of Adam


def _share(v: Array) -> Array:
    """The share of the way up that each weight goes, in [0, 1]."""
    low, high = _STRETCH
    return jnp.clip(jax.nn.sigmoid(v) * (high - low) + low, 0, 1)


def _start(share: Array) -> Array:
    """The variables of which `_share` makes these shares."""
    low, high = _STRETCH
    p = (share - low) / (high - low)
    return jnp.log(p / (1 - p))


@dataclasses.dataclass(frozen=True)
class Learned:
    """Levels that steps of Adam choose."""

    steps: int

    def __call__(self, w: Array, products: Array, grid: Grid) -> Array:
        # Noise of 1 rounds down, of 0 up, in every format.
        ends = (num.clip(grid.level(w, jnp.full_like(w, noise)), grid.qmin, grid.qmax) for noise in (1, 0))
        down, up = ends
        low, high = grid.value(down), grid.value(up)
        gap = high - low
        start = _start(jnp.clip(jnp.where(gap > 0, (w - low) / jnp.where(gap > 0, gap, 1), 0), 0, 1))
        # In units of the mean squared error of rounding to nearest, so that one pull fits every layer.
        nearest = jnp.where(w - low > high - w, high, low)
        unit = squared_errors(w - nearest, products).mean()
        unit = jnp.where(unit > 0, unit, 1)

        def gradient(v: Array, i: Array) -> Array:
            share, back = jax.vjp(_share, v)
            of_layer = 2 * matmul(products, low + share * gap - w) * gap / unit
            first, last = _PULL
            progress = jnp.clip((i / self.steps - _WARM_UP) / (1 - _WARM_UP), 0, 1)
            power = last + (first - last) * (1 + jnp.cos(progress * jnp.pi)) / 2
            away = 2 * share - 1
            of_pull = -2 * power * jnp.sign(away) * jnp.abs(away) ** (power - 1)
            return back(of_layer + jnp.where(i >= _WARM_UP * self.steps, _STRENGTH / len(w), 0) * of_pull)[0]

        def step(state: tuple[Array, Array, Array], i: Array) -> tuple[tuple[Array, Array, Array], None]:
            v, mean, square = state
            g = gradient(v, i)
            mean, square = _FIRST * mean + (1 - _FIRST) * g, _SECOND * square + (1 - _SECOND) * g**2
            t = i + 1
            moved = (mean / (1 - _FIRST**t)) / (jnp.sqrt(square / (1 - _SECOND**t)) + _SMALL)
            return (v - _RATE * moved, mean, square), None

        zeros, steps = jnp.zeros_like(w), jnp.arange(self.steps, dtype=w.dtype)
        (v, _, _), _ = lax.scan(step, (start, zeros, zeros), steps)
        return jnp.where(_share(v) > 0.5, up, down)


def adaround(
    params: PyTree,
    q: QuantizedFunction,
    grams: Mapping[str, Gram],
    *args: Any,
    qparams: Mapping[str, Any] | None,
    steps: int = 500,
    freeze: bool = False,
    progress: Shown = None,
    **kwargs: Any,
) -> PyTree:
    """Rounds each weight up or down so that the layer's output is off by little, which gradient steps learn: AdaRound.

    The loss is the squared error of the layer's output, by the second moments of its inputs, with a pull of what is
    between two levels to one of them that sharpens; Adam takes the steps, in one compiled loop. A column of which the
    nearest levels have a smaller error gets these.

    Args:
      params, q, grams, *args, qparams, freeze, progress, **kwargs: as for `solve.gptq`.
      steps: static int >= 1; each takes a product of (K, K) and (K, N).

    Returns:
      The params, with weights that lie on the grid of `qparams`, as `solve.gptq` gives them.

    Gradient: none.

    Raises:
      TypeError, ValueError: as `solve.gptq`, but for singular second moments, which need no damping here.

    Source: Nagel et al., 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization".

    >>> import jax, jax.numpy as jnp
    >>> from jaxquant import quantize_fn, solve, weight_spec
    >>> q = quantize_fn(lambda params, x: x @ params["w"], [("w", weight_spec(4))])
    >>> params = {"w": jax.random.normal(jax.random.key(0), (8, 4))}
    >>> x = jax.random.normal(jax.random.key(1), (32, 4)) @ jax.random.normal(jax.random.key(2), (4, 8))
    >>> grams, qparams = q.observe(params, x, gram=True), q.init_qparams(params, x)
    >>> solved = solve.adaround(params, q, grams, x, qparams=qparams)
    >>> error = lambda rounded: jnp.square(q(rounded, x, qparams=qparams) - x @ params["w"]).sum().item()
    >>> error(solved) < error(params) / 2
    True
    """
    levels = Learned(checks.static_int_between("steps", steps, 1, 2**31 - 1))
    return rounded(model_of(params, q, grams, args, kwargs, qparams), levels, [], freeze, progress)
