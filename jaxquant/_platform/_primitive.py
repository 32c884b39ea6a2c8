# SPDX-License-Identifier: Apache-2.0
"""Element-wise functions that platforms compute in different ways: primitives, lowered for the platform at hand alone.

`lax.platform_dependent` has what each platform would compute in every program: traced, batched and differentiated.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._base._sharding import is_explicit, vary_together


def elementwise(name: str, cpu: Callable, default: Callable, static: tuple[str, ...] = ()) -> Callable:
    """The function that is `cpu` on CPUs and `default` elsewhere, with an equation of its own in a program.

    Args:
      name: of the equation.
      cpu, default: (x, *others, **static) -> an array of the shape and dtype of `x`, to which the others broadcast.
      static: the names of arguments that are static.

    Returns:
      The function. Where `x` lies on explicit axes it is `lax.platform_dependent`, which knows what becomes of them.

    Gradient: of `cpu` or `default`, as `lax.platform_dependent` has it.
    """
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, *_, **__: x.update(weak_type=False))
    mlir.register_lowering(primitive, mlir.lower_fun(default, multiple_results=False))
    mlir.register_lowering(primitive, mlir.lower_fun(cpu, multiple_results=False), platform="cpu")

    def on_each(*args: Any, **params: Any) -> Array:
        of = functools.partial
        return lax.platform_dependent(*args, cpu=of(cpu, **params), default=of(default, **params))

    def of_tangents(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Array, Array]:
        is_moved = [type(tangent) is not ad.Zero for tangent in tangents]
        moved = lambda values: [v for v, is_one in zip(values, is_moved, strict=True) if is_one]

        def of(*values: Array) -> Array:
            rest = iter(values)
            return on_each(*(next(rest) if m else v for v, m in zip(primals, is_moved, strict=True)), **params)

        _, tangent = jax.jvp(of, moved(primals), moved(tangents))
        return primitive.bind(*primals, **params), tangent

    def of_batch(args: Sequence[Any], axes: Sequence[int | None], **params: Any) -> tuple[Array, int]:
        first = [v if axis is None else jnp.moveaxis(v, axis, 0) for v, axis in zip(args, axes, strict=True)]
        size = next(v.shape[0] for v, axis in zip(first, axes, strict=True) if axis is not None)
        x = first[0] if axes[0] is not None else lax.broadcast(first[0], (size,))
        # The axes of a batch of something smaller come after that of the examples.
        ranked = lambda v: lax.expand_dims(v, range(1, 1 + x.ndim - v.ndim))
        others = (v if axis is None else ranked(v) for v, axis in zip(first[1:], axes[1:], strict=True))
        return primitive.bind(x, *others, **params), 0

    primitive.def_impl(jax.jit(on_each, static_argnames=static))  # not bind, which jax.disable_jit leads back here
    ad.primitive_jvps[primitive] = of_tangents
    batching.primitive_batchers[primitive] = of_batch

    def bound(x: Array, *others: Any, **params: Any) -> Array:
        if is_explicit(x):
            return on_each(x, *others, **params)
        return primitive.bind(*vary_together(x, *others), **params)

    return bound
