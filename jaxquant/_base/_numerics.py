# SPDX-License-Identifier: Apache-2.0
"""The arithmetic that every quantizer shares: rounding, guards, clipping.

"Exact" means the bits of IEEE arithmetic evaluated one operation at a time, as NumPy and TensorFlow's CPU kernels do.
XLA keeps real-number identities rather than those bits: it turns divisions into multiplications by a reciprocal and
contracts a product and a sum into one rounding, depending on what stands next to them. So a formula has other bits
under `jit`, `vmap` and beside other code; at a tie one bit is a level. Each function says which rewrite it stops.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ._sharding import is_explicit


def compute_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype in which values of `dtype` are quantized: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def select(condition: Array, a: Any, b: Any) -> Array:
    """`jnp.where` of numbers, or of arrays that broadcast to the condition, as one operation.

    In a program `jnp.where` is a function that is called; XLA's time goes with its instructions, and calls count most.
    """
    if is_explicit(condition):  # JAX's broadcasts know what becomes of shardings
        return jnp.where(condition, a, b)
    dtype = next((v.dtype for v in (a, b) if hasattr(v, "dtype")), jnp.result_type(a, b))
    a, b = (v if hasattr(v, "dtype") else np.asarray(v, dtype) for v in (a, b))
    return (_selected if isinstance(condition, jax.core.Tracer) else _selected_alone)(condition, a, b)


def _selected(condition: Array, a: Any, b: Any) -> Array:
    full = lambda v: v if v.shape == condition.shape else jnp.broadcast_to(v, condition.shape)
    constant = lambda v: v.ndim == 0 and not isinstance(v, jax.core.Tracer)
    return lax.select(condition, *(lax.full_like(condition, v, v.dtype) if constant(v) else full(v) for v in (a, b)))


_selected_alone = jax.jit(_selected)  # eagerly, where jax_debug_nans would find a constant that is NaN


def guard(v: Array) -> Array:
    """Returns `v` with its rounding fixed: the identity, for NaN too.

    A product that feeds an addition, the user's `op(x) + bias`, too, is contracted into a fused multiply-add. A select
    whose condition depends on the data is not removed, nor contracted through; barriers and bitcasts are gone by then.
    """
    return select(lax.eq(v, v), v, jnp.nan)


def power_of_two(exponent: Array, dtype: DTypeLike) -> Array:
    """2 ** exponent for int32 exponents of normal numbers, by its bits: XLA:CPU's exp2 is not exact."""
    of = jnp.finfo(dtype)
    return lax.bitcast_convert_type((exponent.astype(f"int{of.bits}") - (of.minexp - 1)) << of.nmant, dtype)


def floor_log2(v: Array) -> Array:
    """floor(log2(|v|)) of normal numbers, by their bits; one below the least for 0 and subnormals."""
    of = jnp.finfo(v.dtype)
    return ((lax.bitcast_convert_type(v, f"int{of.bits}") >> of.nmant) & (2**of.nexp - 1)) + (of.minexp - 1)


def upcast(x: Array, dtype: DTypeLike) -> Array:
    """`x` in the dtype of the computation: of a cast to bfloat16 and one back XLA drops both, and so a rounding."""
    return x if x.dtype == dtype else guard(x).astype(dtype)


def rounded(y: Array, dtype: DTypeLike) -> Array:
    """`y` in another dtype, rounded where a cast back follows, too. Of a guard a TPU would keep the mask."""
    if y.dtype == jnp.float32 and dtype == jnp.bfloat16:  # of float16 `reduce_precision` loses subnormal numbers
        return lax.reduce_precision(y, 8, 7).astype(dtype)
    return y if y.dtype == dtype else guard(y.astype(dtype))


def downcast(y: Array, dtype: DTypeLike) -> Array:
    """`y` rounded once to `dtype`; what is beyond its largest number becomes that, not infinite. NaN stays."""
    if y.dtype == dtype:
        return y
    largest = jnp.asarray(jnp.finfo(dtype).max, y.dtype)
    return lax.min(lax.max(y, -largest), largest).astype(dtype)


def clip(x: Array, low: Array | float, high: Array | float) -> Array:
    """Clips `x` to `[low, high]` by selects: NaN stays NaN and a tie with a bound keeps the zero sign of `x`.

    `jnp.clip` differs in both.
    """
    x = select(high < x, high, x)
    return select(x < low, low, x)


def round_half_even(v: Array) -> Array:
    """To the nearest integer, 2.5 to 2: NumPy's rint."""
    return lax.round(v, lax.RoundingMethod.TO_NEAREST_EVEN)


def round_half_away(v: Array) -> Array:
    """To the nearest integer, 2.5 to 3 and -2.5 to -3: C's round."""
    return lax.round(v, lax.RoundingMethod.AWAY_FROM_ZERO)


def round_half_up(v: Array) -> Array:
    """`floor(v + 0.5)`, the sum rounded: 0.49999997 gives 1, as it does in TensorFlow. Guard a product first."""
    return jnp.floor(v + 0.5)


def round_stochastic(v: Array, noise: Array) -> Array:
    """Up with the probability of the fraction, for `noise` uniform in [0, 1); an integer stays.

    `floor(v + noise)` is not this: the sum is rounded, and half of that goes up.
    """
    below = jnp.floor(v)
    return below + (noise < v - below).astype(v.dtype)


ROUND = {"half_even": round_half_even, "half_up": round_half_up, "half_away": round_half_away}


def product_of_scales(scale: Array, tensor_scale: Array | None) -> Array:
    """The real value of one level: where a scale of the tensor scales the others, their product, rounded."""
    return scale if tensor_scale is None else guard(scale * tensor_scale)
