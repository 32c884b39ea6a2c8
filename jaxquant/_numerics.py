# SPDX-License-Identifier: Apache-2.0
"""The arithmetic that every quantizer shares: rounding, guards, exact division, clipping, nudging, the affine form.

"Exact" means the bits of IEEE arithmetic evaluated one operation at a time, as NumPy and TensorFlow's CPU
kernels do. XLA keeps real-number identities rather than those bits: it turns divisions into multiplications by a
reciprocal and contracts a product and a sum into one rounding, depending on what stands next to them. So the same
formula gives other bits under `jit`, under `vmap` and beside other code, and at a tie one bit is a whole level.
Each function below says which rewrite it stops.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import Array, lax


def compute_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which values of `dtype` are quantized: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def is_explicit(v: Array) -> bool:
    """Whether `v` is on a mesh with explicit axes, where the sharding of every result is part of its type."""
    return not jax.typeof(v).sharding.mesh.empty


def select(condition: Array, a: Any, b: Any) -> Array:
    """`jnp.where` of numbers, or of arrays that broadcast to the condition, as one operation.

    In a program `jnp.where` is a function that is called; XLA's time goes with its instructions, and calls count most.
    """
    if is_explicit(condition):  # JAX's broadcasts know what becomes of shardings
        return jnp.where(condition, a, b)
    dtype = next(v.dtype for v in (a, b) if hasattr(v, "dtype"))

    def full(v: Any) -> Array:
        if jnp.ndim(v) == 0 and not isinstance(v, jax.core.Tracer):
            return lax.full_like(condition, v, dtype)
        return v if v.shape == condition.shape else jnp.broadcast_to(v, condition.shape)

    return lax.select(condition, full(a), full(b))


def guard(v: Array) -> Array:
    """Returns `v` with its rounding fixed: the identity, for NaN too.

    A product that feeds an addition is contracted into a fused multiply-add, also when the addition is the user's
    own `op(x) + bias`. Neither XLA nor LLVM removes a select whose condition depends on the data, nor contracts
    through it; `optimization_barrier`, `reduce_precision` and bitcasts are gone before the contraction happens.
    """
    return select(v == v, v, jnp.nan)


def power_of_two(exponent: Array, dtype: jnp.dtype) -> Array:
    """2 ** exponent for int32 exponents of normal numbers, by its bits: XLA:CPU's exp2 is not exact."""
    of = jnp.finfo(dtype)
    return lax.bitcast_convert_type((exponent.astype(f"int{of.bits}") - (of.minexp - 1)) << of.nmant, dtype)


def exponent(v: Array) -> Array:
    """floor(log2(|v|)) of normal numbers, by their bits; one below the least for 0 and subnormals."""
    of = jnp.finfo(v.dtype)
    bits = lax.bitcast_convert_type(v, f"int{of.bits}")
    return ((bits >> of.nmant) & (2**of.nexp - 1)) + (of.minexp - 1)


def upcast(x: Array, dtype: jnp.dtype) -> Array:
    """`x` in the dtype of the computation.

    XLA keeps what the user computed in bfloat16 in float32 where a cast to float32 follows, and so drops a rounding
    that the eager call has.
    """
    return x if x.dtype == dtype else guard(x).astype(dtype)


def downcast(y: Array, dtype: jnp.dtype) -> Array:
    """`y` rounded once to `dtype`; what is beyond its largest number becomes that, not infinite. NaN stays."""
    if y.dtype == dtype:
        return y
    largest = jnp.asarray(jnp.finfo(dtype).max, y.dtype)
    return clip(y, -largest, largest).astype(dtype)


def divide(a: Array, b: Array | float) -> Array:
    """Correctly rounded `a / b` with `b` broadcast against `a`.

    XLA rewrites a division by a constant, or by a broadcast value, as a multiplication by the reciprocal, and
    `a / (b / c)` as `(a * c) / b`. A divisor selected element by element is none of these. The select hangs on `a`
    because a condition on `b` alone would be as constant, or as broadcast, as `b` is.
    """
    otherwise = jnp.nan if is_explicit(a) else a  # NaN too, without another constant; where all of one sharding is
    return a / select(a == a, b if isinstance(b, float | int) else b.astype(a.dtype), otherwise)


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


def affine_level(x: Array, scale: Array, zero_point: Array | None, nearest: Callable[[Array], Array]) -> Array:
    """The level of each real value on the affine grid, not yet clipped: `nearest(x / scale) + zero_point`.

    No zero point is 0.
    """
    # Of a constant x `divide` would fold the select that it hangs on.
    level = nearest(divide(lax.optimization_barrier(x), scale))
    return level if zero_point is None else level + zero_point


def affine_value(level: Array, scale: Array, zero_point: Array | None, guarded: bool = True) -> Array:
    """The real value of each level, `(level - zero_point) * scale`; the product is last, so that zero is exactly 0.

    Only what a contraction alone reads, which adds nothing to the product, needs no guard.

    The sum with `|steps| * 0` is two things at once. It makes one zero: XLA drops an addition of a constant zero point
    0, and then the zero that a small negative value rounds to would be -0 in one program and 0 in another. And it
    guards the product: contracted with this sum it rounds to the same, and with the user's next one it cannot be. A
    select would not do: LLVM moves an addition into one with a constant on a side.
    """
    steps = level if zero_point is None else level - zero_point
    return steps * scale + jnp.abs(steps) * 0 if guarded else steps * scale


def rounding_error(x: Array, steps: Array, scale: Array) -> Array:
    """`steps - x / scale`, rounded once, for the integer or narrow float `steps` next to the quotient.

    The rounded quotient would lose the digits of the error that it does not hold, seven of 24 at 127. So what is left
    of x is computed first, exactly: with a scale from 1 to 2, and cut into parts of which the product with `steps` is
    a float, so that no contraction changes it either. In float64, whose scales are of float32, each product is.
    """
    of = jnp.finfo(x.dtype)
    unit = power_of_two(-jnp.minimum(exponent(scale), of.maxexp - 2), x.dtype)
    left, scale = x * unit, scale * unit
    if x.dtype == jnp.float64:
        return -divide(left - steps * scale, scale)
    rest = scale
    for _ in range(3):  # of 8 digits each
        part = lax.bitcast_convert_type(lax.bitcast_convert_type(rest, jnp.int32) & -(2**16), jnp.float32)
        left, rest = left - steps * part, rest - part
    return -divide(left, scale)


def product_of_scales(scale: Array, tensor_scale: Array | None) -> Array:
    """The real value of one level: where a scale of the tensor scales the others, their product, rounded."""
    return scale if tensor_scale is None else guard(scale * tensor_scale)


def masked_product(g: Array, mask: Array) -> Array:
    """`g * mask` for a boolean mask, with a product's signs: a masked -1 gives -0 and a masked NaN stays NaN.

    Of the product itself XLA makes `select(mask, g, 0)`. The guard is for speed: of a select of a plain load XLA:CPU
    makes a masked load, which takes twice the time.
    """
    g = guard(shard_like(g, mask))
    return jnp.where(mask, g, g * 0)


class Nudged(NamedTuple):
    """A range moved so that real 0 falls on a level; five arrays of one shape.

    `inverse` is not the rounded `1 / scale` but a quotient of its own. `zero` is `-x_min * inverse`, rounded, which is
    never negative: -1 marks a range that is not set, `x_min == x_max == 0`.
    """

    scale: Array
    inverse: Array
    x_min: Array
    x_max: Array
    zero: Array


def nudge(x_min: Array, x_max: Array, qmin: float, qmax: float) -> Nudged:
    """Moves the real range `[x_min, x_max]` of one tensor onto the levels `qmin .. qmax`.

    Ranges that do not contain 0 are shifted, not extended: `[1, 2]` becomes `[0, 1]`.

    Args:
      x_min, x_max: scalars of one floating dtype. Nothing is checked: what an empty, reversed or non-finite range
        gives is what the same operations give in TensorFlow's kernels.
      qmin, qmax: static, integers.
    """
    # Constants would be folded before the rewrites that the selects stop, and the selects with them.
    x_min, x_max = lax.optimization_barrier((x_min, x_max))
    steps = qmax - qmin
    width = x_max - x_min
    scale = divide(width, steps)
    inverse = steps / width
    zero_point = qmin - divide(x_min, scale)
    zero_point = clip(round_half_away(zero_point), jnp.asarray(qmin, scale.dtype), jnp.asarray(qmax, scale.dtype))
    zero_point = jnp.where(zero_point == zero_point, zero_point, 0)
    # Guarded although x86 contracts no product that is used twice: other processors do.
    low = guard((qmin - zero_point) * scale)
    high = guard((qmax - zero_point) * scale)
    zero = jnp.where((x_min == 0) & (x_max == 0), -1, round_half_up(guard(-low * inverse)))
    return Nudged(scale, inverse, low, high, zero)


def largest_scale(x_min: Array, x_max: Array, qmin: float, qmax: float) -> tuple[Array, Array]:
    """The largest scale, levels per real value, that maps a range into `qmin .. qmax`; and whether `x_min` limits it.

    An end of the range on the other side of 0 than its level limits nothing. If neither does, the scale is the largest
    finite number.
    """
    unbounded = jnp.finfo(x_min.dtype).max
    of_min = jnp.where(qmin * x_min > 0, qmin / x_min, unbounded)
    of_max = jnp.where(qmax * x_max > 0, qmax / x_max, unbounded)
    by_min = of_min < of_max
    return guard(jnp.where(by_min, of_min, of_max)), by_min


def along_axis(v: Array, axis: int | None, ndim: int) -> Array:
    """Reshapes a vector so that it broadcasts along `axis` of a rank-`ndim` array; a scalar stays one."""
    if axis is None or v.ndim == 0:
        return v
    return lax.broadcast_in_dim(v, [v.shape[0] if i == axis else 1 for i in range(ndim)], [axis])


def per_channel(f: Callable, axis: int | None) -> Callable:
    """Lifts the arithmetic of one tensor's range, `f(x_min, x_max)`, to one range a channel; None: one range."""
    return f if axis is None else functools.partial(computed_once, jax.vmap(f))


def computed_once(f: Callable, x: Array, *others: Array) -> Any:
    """`f(x, *others)` of one number each a channel, computed once for each channel.

    XLA:CPU fuses the arithmetic of a channel into the element-wise pass that uses it, and so does it again for every
    element: divisions and all, twice the time of the pass. The result of a conditional stands alone. The branches
    are the same; the condition is a sum, of which XLA:CPU makes fewer kernels than of `any`.
    """
    branched = lambda x, *others: lax.cond(jnp.sum(x) < 0, f, f, x, *others)
    return lax.platform_dependent(x, *others, cpu=branched, default=f)


def vary_together(*trees: Any) -> Any:
    """Casts all arrays to vary over every mesh axis that one of them varies over; a no-op outside `shard_map`.

    Inside `shard_map` a sharded `x` varies over a mesh axis and a replicated range does not. A `custom_vjp` rule
    must return a cotangent of the type of each argument, but the gradient of the range as the rule computes it is
    per shard. After the cast the types agree, and JAX's own rule for the cast sums the gradient over the axis.
    """
    union = frozenset().union(*map(varying_axes, jax.tree.leaves(trees)))
    return jax.tree.map(lambda x: _vary(x, union), trees)


def varying_axes(x: Array) -> frozenset:
    """The mesh axes over which `x` varies, inside `shard_map`."""
    kind = jax.typeof(x)
    if hasattr(kind, "manual_axis_type"):  # jax >= 0.10
        return frozenset(kind.manual_axis_type.varying)
    return frozenset(kind.vma)


def is_inside_shard_map() -> bool:
    """Whether arrays are shards here: inside `shard_map`."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _vary(x: Array, axes: frozenset) -> Array:
    missing = tuple(sorted(axes - varying_axes(x)))
    if not missing:
        return x
    if hasattr(lax, "pcast"):
        return lax.pcast(x, missing, to="varying")
    return getattr(lax, "pvary")(x, missing)  # jax < 0.9  # noqa: B009


def shard_like(v: Array, like: Array) -> Array:
    """`v` with the sharding of `like` on a mesh with explicit axes, where it is part of the type; else `v` itself.

    A cotangent must have the type of its argument, and comes out with that of the computation: sharded channels
    give sharded gradients also to ranges that are replicated.
    """
    wanted = jax.typeof(like).sharding
    return v if wanted.mesh.empty or jax.typeof(v).sharding == wanted else jax.sharding.reshard(v, wanted)


def replicated(v: Array, axes: Sequence[int] | None = None) -> Array:
    """`v` with all or some axes whole on every device of a mesh with explicit axes, for what XLA cannot do in pieces.

    Anywhere else `v` itself.
    """
    sharding = jax.typeof(v).sharding
    wanted = [None if axes is None or i in axes else axis for i, axis in enumerate(sharding.spec)]
    if list(sharding.spec) == wanted:
        return v
    return jax.sharding.reshard(v, jax.sharding.NamedSharding(sharding.mesh, jax.P(*wanted)))
