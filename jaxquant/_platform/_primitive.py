# SPDX-License-Identifier: Apache-2.0
"""Functions that platforms compute in different ways: primitives, lowered for the platform at hand alone.

`lax.platform_dependent` has what each platform would compute in every program: traced, batched and differentiated.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from .._base._checks import PyTree
from .._base._sharding import is_explicit, vary_together


class Forms(dict[str, Callable]):
    """The forms of a function by platform, of (*args, **static). What is set here, programs for a platform have."""

    def __init__(self, primitive: Primitive):
        super().__init__()
        self.primitive = primitive

    def __setitem__(self, platform: str, f: Callable) -> None:
        super().__setitem__(platform, f)
        lowered = mlir.lower_fun(f, multiple_results=self.primitive.multiple_results)
        mlir.register_lowering(self.primitive, lowered, platform=platform)


FORMS: dict[str, Forms] = {}  # of each function, by its name


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
    abstract = lambda x, *_, **__: x.update(weak_type=False)
    primitive, bound, _ = _made(name, abstract, default, {"cpu": cpu}, static)

    def of_batch(args: Sequence[Any], axes: Sequence[int | None], **params: Any) -> tuple[Array, int]:
        first = [v if axis is None else jnp.moveaxis(v, axis, 0) for v, axis in zip(args, axes, strict=True)]
        size = next(v.shape[0] for v, axis in zip(first, axes, strict=True) if axis is not None)
        x = first[0] if axes[0] is not None else lax.broadcast(first[0], (size,))
        # The axes of a batch of something smaller come after that of the examples.
        ranked = lambda v: lax.expand_dims(v, range(1, 1 + x.ndim - v.ndim))
        others = (v if axis is None else ranked(v) for v, axis in zip(first[1:], axes[1:], strict=True))
        return primitive.bind(x, *others, **params), 0

    batching.primitive_batchers[primitive] = of_batch
    return bound


def several(
    name: str, results: Callable[..., Sequence[tuple[Sequence[Any], Any]]], default: Callable,
    static: tuple[str, ...], **platforms: Callable,
) -> Callable[..., list[Array]]:  # fmt: skip
    """As `elementwise`, a function of several results: `default`, but on these platforms, each of (*args, **static).

    `results` gives their shapes and dtypes, for (*avals, **static).
    """
    of = lambda x, of_result: x.update(shape=tuple(of_result[0]), dtype=of_result[1], weak_type=False, sharding=None)
    abstract = lambda x, *more, **params: [of(x, out) for out in results(x, *more, **params)]
    primitive, bound, on_each = _made(name, abstract, default, platforms, static, multiple=True)

    def of_batch(args: Sequence[Any], axes: Sequence[int | None], **params: Any) -> tuple[list[Array], list[int]]:
        made = jax.vmap(functools.partial(on_each, **params), axes)(*args)
        return list(made), [0] * len(made)

    batching.primitive_batchers[primitive] = of_batch
    return bound


def _made(
    name: str, abstract: Callable, default: Callable, platforms: dict[str, Callable], static: Sequence[str],
    multiple: bool = False,
) -> tuple[Primitive, Callable, Callable]:  # fmt: skip
    """A primitive without a rule for batches; the function that binds it; and what it is, by `platform_dependent`."""
    primitive, of = Primitive(name), functools.partial
    primitive.multiple_results = multiple
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(default, multiple_results=multiple))
    forms = FORMS[name] = Forms(primitive)
    for platform, f in platforms.items():
        forms[platform] = f

    def on_each(*args: Any, **params: Any) -> PyTree:
        of_platforms = {platform: of(f, **params) for platform, f in forms.items()}
        return lax.platform_dependent(*args, **of_platforms, default=of(default, **params))

    def of_tangents(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        is_moved = [type(tangent) is not ad.Zero for tangent in tangents]
        moved = lambda values: [v for v, is_one in zip(values, is_moved, strict=True) if is_one]

        def of(*values: Array) -> PyTree:
            rest = iter(values)
            return on_each(*(next(rest) if m else v for v, m in zip(primals, is_moved, strict=True)), **params)

        _, tangent = jax.jvp(of, moved(primals), moved(tangents))
        return primitive.bind(*primals, **params), tangent

    def bound(x: Array, *others: Any, **params: Any) -> PyTree:
        if is_explicit(x):
            return on_each(x, *others, **params)
        return primitive.bind(*vary_together(x, *others), **params)

    primitive.def_impl(jax.jit(on_each, static_argnames=tuple(static)))  # not bind: jax.disable_jit leads back here
    ad.primitive_jvps[primitive] = of_tangents
    return primitive, bound, on_each


def apart(f: Callable, *args: Array) -> PyTree:
    """`f(*args)`; on a CPU by a call that XLA does not inline: it fuses nothing in it with what is around it."""
    program, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    outs = _apart.bind(*program.consts, *args, program=program.jaxpr, count=len(program.consts))
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def _inlined(*args: Array, program: Jaxpr, count: int) -> list[Array]:
    return jax.core.eval_jaxpr(program, args[:count], *args[count:])


def _called(*args: Array, **params: Any) -> list[Array]:
    with set_xla_metadata(inlineable="false"):
        return jax.jit(functools.partial(_inlined, **params))(*args)


def _apart_of_batch(args: Sequence[Any], axes: Sequence[int | None], **params: Any) -> tuple[list[Array], list[int]]:
    outs = apart(jax.vmap(functools.partial(_inlined, **params), axes), *args)
    return outs, [0] * len(outs)


_results = lambda *_, program, count: [v.aval for v in program.outvars]
_apart, *_ = _made("computed_apart", _results, _inlined, {"cpu": _called}, ("program", "count"), multiple=True)
batching.primitive_batchers[_apart] = _apart_of_batch
