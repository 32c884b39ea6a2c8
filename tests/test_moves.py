# SPDX-License-Identifier: Apache-2.0
"""A quantized parameter is moved by every primitive as its real values are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from jax import lax
from jax.extend.core import Literal

from jaxquant import PerBlock, PerChannel, QuantSpec, dequantize, quantize
from jaxquant._groups import broadcast_groups, of_rank
from jaxquant._jaxpr._moves import is_moved, moved
from jaxquant._jaxpr._program import evaluated, programs, traced
from jaxquant._jaxpr._quantized_param import QuantizedParam

SHAPE = 4, 6, 8
INDEX = jnp.array([[3, 0], [-1, 9]])
MOVES = {
    "transpose": lambda w: w.transpose(2, 0, 1),
    "reshape, merged": lambda w: w.reshape(24, 8),
    "reshape, split": lambda w: w.reshape(4, 3, 2, 8),
    "squeeze": lambda w: lax.squeeze(lax.slice_in_dim(w, 1, 2), [0]),
    "broadcast": lambda w: jnp.broadcast_to(w[:, None], (4, 5, 6, 8)),
    "rev": lambda w: lax.rev(w, (0, 1)),
    "slice": lambda w: lax.slice(w, (0, 1, 2), (4, 5, 8), (1, 2, 3)),
    "slice, whole blocks": lambda w: w[:, 2:4],
    "split": lambda w: lax.split(w, (2, 4), 1)[1],
    "dynamic_slice": lambda w: lax.dynamic_slice(w, (jnp.int32(1), 0, jnp.int32(3)), (2, 6, 4)),
    "index": lambda w: lax.dynamic_index_in_dim(w, jnp.int32(2), 0, keepdims=False),
    "tile": lambda w: jnp.tile(w, (1, 2, 1)),
    "gather": lambda w: w[INDEX],
    "gather, out of range": lambda w: w.at[INDEX].get(mode="fill"),
    "gather of columns": lambda w: w[:, INDEX],
    "gather, clipped": lambda w: w.at[:, :, INDEX].get(mode="clip"),
    "concatenate": lambda w: lax.concatenate([w, w, w], 1),
    "stack": lambda w: jnp.stack([w, w]),
    "name and barrier": lambda w: lax.optimization_barrier(jax.ad_checkpoint.checkpoint_name(w, "w")),
    "cast": lambda w: w.astype(jnp.bfloat16).transpose(1, 0, 2),
    "unstack": lambda w: [part.T for part in w],
}
SPECS = QuantSpec(granularity=PerChannel((0, -1))), QuantSpec(symmetric=False, granularity=PerBlock(1, 2)), QuantSpec()


def moves_of(f, parameter):
    """The program of f, with nothing in it but what moves its argument."""

    def program(jaxpr, consts, args):
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        read = lambda v: v.val if isinstance(v, Literal) else env[v]
        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            if is_moved(eqn, ins):
                outs = moved(eqn, ins)
            elif any(isinstance(v, QuantizedParam) for v in ins):
                ((inner, inner_consts),) = programs(eqn)
                outs = program(inner, inner_consts, ins)
            else:
                outs = evaluated(eqn, ins, jaxpr)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return program(*traced(lambda args: jax.tree.leaves(f(*args)), [parameter.real]), [parameter])


@functools.cache
def every_move(spec):
    """What each move makes of an array: of its integers and groups, of the real values they travel with, and of these
    alone. One program, because one for each move takes far longer to compile."""
    q = quantize(np.random.default_rng(0).normal(size=SHAPE).astype(np.float32), spec)

    def parts(f, q, real):
        q = dataclasses.replace(q, scale=of_rank(q.scale, 3), zero_point=of_rank(q.zero_point, 3))
        for part in moves_of(f, QuantizedParam(q, real, None, None, ("w",))):
            over = lambda v, shape=part.quantized.shape: broadcast_groups(v, shape)
            yield part.real, part.quantized.values, over(part.quantized.scale), over(part.quantized.zero_point)

    program = lambda q, real: {
        name: list(zip(parts(f, q, real), jax.tree.leaves(f(real)), strict=True)) for name, f in MOVES.items()
    }
    return jax.tree.map(np.asarray, jax.jit(program)(q, dequantize(q)))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("move", MOVES)
def test_what_is_made_of_the_integers_is_what_is_made_of_the_real_values(move, spec):
    for (real, integers, scale, zero_point), want in every_move(spec)[move]:
        assert_same_bits(real, want)
        values = ((np.float32(integers) - np.float32(zero_point)) * scale).astype(want.dtype)
        assert_same_bits(
            np.where(values == 0, 0, values).astype(want.dtype), np.where(want == 0, 0, want).astype(want.dtype)
        )
