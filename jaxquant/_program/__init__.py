# SPDX-License-Identifier: Apache-2.0
"""JAX programs as data: what each value is made of, and evaluation with some contractions replaced.

The only folder that knows how jax spells a program. What is left as it was is bound again by `jax.core.eval_jaxpr`, one
equation at a time, so that jit, grad, vmap, scan, shard_map of the result are JAX's own affair; only an equation that
holds a program with something to replace is built anew, by the public function that made it. What jax's primitives do
stands in two registries, an entry a primitive: those that only move data in `_moves`, those that hold programs in
`_calls`.
"""
