# SPDX-License-Identifier: Apache-2.0
"""Parameters on meshes: solvers compute where XLA chooses how arrays lie, and what comes out lies as what went in."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType

from .._base._checks import PyTree


def with_automatic_axes(f: Callable[..., Any], leaves: PyTree, *others: Any) -> PyTree:
    """`f(leaves, *others)`; where leaves are on a mesh with explicit axes, as if XLA chose how arrays lie on it.

    What comes out lies as a leaf of its shape, or is whole, such as scales.
    """
    mesh = next(filter(None, map(_explicit_mesh, jax.tree.leaves(leaves))), None)
    if mesh is None:
        return f(leaves, *others)
    automatic = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))

    def on(mesh: jax.sharding.Mesh, v: Any) -> PyTree:
        sharding = getattr(v, "sharding", None)
        spec = sharding.spec if isinstance(sharding, jax.NamedSharding) else jax.P()
        return jax.device_put(v, jax.NamedSharding(mesh, spec)) if isinstance(v, Array) else v

    there = jax.tree.map(functools.partial(on, automatic), (leaves, *others))
    with jax.set_mesh(automatic):
        found = f(*there)
    of_shape = {jnp.shape(leaf): leaf.sharding for leaf in jax.tree.leaves(leaves) if _explicit_mesh(leaf)}
    whole = jax.NamedSharding(mesh, jax.P())
    return jax.tree.map(lambda v: jax.device_put(v, of_shape.get(jnp.shape(v), whole)), found)


def changed_leaves(f: Callable[..., dict[str, Any]], leaves: Mapping[str, Any], *others: Any) -> dict[str, Any]:
    """The leaves with those that `f(leaves, *others)` gives, each on a mesh as before; with automatic axes in f."""
    changed = lambda leaves, *others: {k: v for k, v in f(leaves, *others).items() if v is not leaves[k]}
    new = with_automatic_axes(changed, dict(leaves), *others)
    as_before = lambda v, old: jax.device_put(v, old.sharding) if _explicit_mesh(old) else v
    return {**leaves, **{path: as_before(v, leaves[path]) for path, v in new.items()}}


def sharding_of(leaf: PyTree) -> jax.NamedSharding | None:
    """The sharding of a leaf on a mesh with automatic axes; None on one device, and where it is traced."""
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.NamedSharding) or sharding.is_fully_replicated:
        return None
    return sharding if set(sharding.mesh.axis_types) == {AxisType.Auto} else None


def _explicit_mesh(leaf: PyTree) -> jax.sharding.Mesh | None:
    """The mesh of a leaf that is on one with explicit axes; None elsewhere, and where it is traced."""
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, jax.NamedSharding) else None
    return mesh if isinstance(mesh, jax.sharding.Mesh) and AxisType.Explicit in mesh.axis_types else None


def room_for(v: Array, n: int) -> Array:
    """Room for n arrays, on the devices of the first; where it is traced, XLA chooses."""
    sharding = None if isinstance(v, jax.core.Tracer) else v.sharding
    is_named = isinstance(sharding, jax.NamedSharding)
    device = jax.NamedSharding(sharding.mesh, jax.P(None, *sharding.spec)) if is_named else None
    return jnp.zeros((n, *v.shape), v.dtype, device=device)
