# SPDX-License-Identifier: Apache-2.0
"""The sharding of an array, where it is part of its type: under `shard_map`, and on meshes with explicit axes."""

from collections.abc import Sequence

import jax
from jax import Array, lax

from ._checks import PyTree


def is_explicit(v: Array) -> bool:
    """Whether `v` is on a mesh with explicit axes, where the sharding of every result is part of its type."""
    return not jax.typeof(v).sharding.mesh.empty


def axes_of(v: Array) -> list[frozenset[str]]:
    """The axes of the mesh along which each axis of `v` is split, where its type says so."""
    named = lambda axis: frozenset((axis,) if isinstance(axis, str) else axis or ())
    return [named(axis) for axis in jax.typeof(v).sharding.spec]


def vary_together(*trees: PyTree) -> PyTree:
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
