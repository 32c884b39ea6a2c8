# SPDX-License-Identifier: Apache-2.0
"""A quantized parameter is moved by every primitive as its real values are."""

import dataclasses
import functools

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from inputs import zeros
from jax import lax
from jax.extend.core import Literal, Primitive
from lanes import cases

from jaxquant import (
    PerBlock,
    PerChannel,
    QuantSpec,
    Rule,
    activation_spec,
    dequantize,
    quantize,
    quantize_fn,
    weight_spec,
)
from jaxquant._arrays._qarray import inside
from jaxquant._base._groups import broadcast_groups, of_rank
from jaxquant._program import _moves as registry
from jaxquant._program._calls import CALLS
from jaxquant._program._jaxpr import NAME, evaluated, programs, traced
from jaxquant._program._origin import JOINED, PICKED, parameter
from jaxquant._program._param import QuantizedParam
from jaxquant._program._walk import Walk

SHAPE = 4, 6, 8
INDEX = jax.device_put(np.int32([[3, 0], [-1, 9]]))
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
    "unstack": lambda w: [part.T for part in jnp.unstack(w)],
}
SPECS = QuantSpec(granularity=PerChannel((0, -1))), QuantSpec(symmetric=False, granularity=PerBlock(1, 2)), QuantSpec()


def moves_of(f, parameter):
    """The program of f, with nothing in it but what moves its argument."""

    def program(jaxpr, consts, args):
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        read = lambda v: v.val if isinstance(v, Literal) else env[v]
        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            move = registry.MOVES.get(eqn.primitive.name)
            if move and move.takes(eqn, ins):
                outs = move.parameters(eqn, ins)
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
        q = dataclasses.replace(inside(q), zero_point=of_rank(q.zero_point, 3))
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


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("move", MOVES)
def test_a_walk_says_along_which_axes_the_scales_of_an_evaluation_vary(move, axis):
    q = jax.eval_shape(lambda x: quantize(x, QuantSpec(granularity=PerChannel(axis))), zeros(SHAPE))
    f, real = MOVES[move], jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    got = jax.eval_shape(lambda q, real: moves_of(f, QuantizedParam(inside(q), real, None, None, ("w",))), q, real)
    jaxpr, _ = traced(lambda args: jax.tree.leaves(f(*args)), [real])
    origins = Walk(CALLS).program(jaxpr, [parameter("w", 3)])
    assert len(got) == len(origins)
    for part, origin in zip(got, origins, strict=True):
        assert origin.parts == ("w",)
        for n, groups, along in zip(part.real.shape, part.quantized.scale.shape, origin.axes, strict=True):
            varies = axis in along and n > 1
            assert (groups > 1) == varies or not along.isdisjoint({JOINED, PICKED}), (move, along)


# What jax has to move data, beside the moves above.
OF_JAX = {
    "ravel": jnp.ravel,
    "expand_dims": lambda w: jnp.expand_dims(w, (0, 3)),
    "rot90": jnp.rot90,
    "roll": lambda w: jnp.roll(w, 1, 1),
    "repeat": lambda w: jnp.repeat(w, 2, 0),
    "append": lambda w: jnp.append(w, w),
    "block": lambda w: jnp.block([[w, w], [w, w]]),
    "take_along_axis": lambda w: jnp.take_along_axis(w, np.zeros((4, 2, 8), int), 1),
    "compress": lambda w: jnp.compress(np.array([True, False]), w, size=1, axis=0),
    "pad": lambda w: jnp.pad(w, 1),
    "set": lambda w: w.at[0].set(w[1]),
    "update": lambda w: lax.dynamic_update_slice(w, w, (0, 0, 0)),
    "where": lambda w: jnp.where(np.arange(8) > 3, w, w),
    "sort": lambda w: jnp.sort(w),
    "view": lambda w: w.view(jnp.int32),
    "copy": jnp.copy,
    "device_put": lambda w: jax.device_put(w, jax.devices()[0]),
    "stop_gradient": lax.stop_gradient,
    "reduce_precision": lambda w: lax.reduce_precision(w, 8, 7),
}
LEFT_OUT = {
    "pad": "puts other numbers beside",
    "scatter": "writes into a value what may have other scales",
    "dynamic_update_slice": "writes into a value what may have other scales",
    "select_n": "takes elements of values that may have other scales",
    "sort": "has an order that the numbers say",
    "bitcast_convert_type": "makes other numbers of the bits",
}
ON_MESH = {
    "sharding_constraint",
    "reshard",
    "mesh_cast",
    "ppermute",
    "all_gather",
    "pvary",
    "pcast",
}  # test_sharding.py


def primitives(jaxpr):
    """The names of the primitives that take a floating value, in a program and in those inside it."""
    for eqn in jaxpr.eqns:
        if any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.invars):
            yield eqn.primitive.name
        for inner, _ in programs(eqn):
            yield from primitives(inner)


def test_each_primitive_that_moves_data_has_an_entry_or_is_left_out():
    of = lambda f: traced(lambda args: jax.tree.leaves(f(*args)), [jnp.zeros(SHAPE)])[0]
    tried = {name for f in (*MOVES.values(), *OF_JAX.values()) for name in primitives(of(f))} - set(CALLS)
    here = {v.name for of in (lax, jax.extend.core.primitives) for v in vars(of).values() if isinstance(v, Primitive)}
    here |= {NAME}  # which jax names nowhere in its older versions
    assert tried == ((set(registry.MOVES) - ON_MESH) | set(LEFT_OUT)) & here


def test_each_entry_says_what_a_walk_and_what_an_evaluation_makes_of_it():
    for move in registry.MOVES.values():
        assert all(map(callable, (move.origins, move.parameters, move.takes)))
    for call in CALLS.values():
        assert all(map(callable, (call.walk, call.evaluate)))
    assert not set(CALLS) & set(registry.MOVES)


REORDERED = {
    "a matrix": ((8, 6), lambda p, x: x @ p["w"].reshape((6, 8), order="F"), QuantSpec(), True),
    "features": ((3, 2, 8), lambda p, x: x @ lax.reshape(p["w"], (6, 8), (1, 0, 2)), weight_spec(8), True),
    "a transpose": ((6, 6), lambda p, x: x @ p["w"].reshape((6, 6), order="F"), weight_spec(8), True),
    "groups": ((6, 6), lambda p, x: x @ p["w"].reshape((6, 6), order="F"), QuantSpec(granularity=PerBlock(1, 3)), 0),
}  # fmt: skip


@cases("name", REORDERED)
def test_a_reshape_that_reads_its_axes_in_another_order(name):
    shape, f, spec, with_inputs = REORDERED[name]
    rng, along = np.random.default_rng(0), [len(shape) - 1 if with_inputs else 0]
    sizes = np.logspace(-2, 0, shape[along[0]]).reshape([n if i in along else 1 for i, n in enumerate(shape)])
    w, x = (jax.device_put(v.astype(np.float32)) for v in (rng.normal(size=shape) * sizes, rng.normal(size=(4, 6))))
    q = quantize_fn(f, [Rule("w", spec, QuantSpec() if with_inputs else None)])
    want = f({"w": w}, x)
    assert_same_bits(q(q.freeze({"w": w}, x), x), q({"w": w}, x))
    np.testing.assert_allclose(q({"w": w}, x), want, atol=0.02 * float(jnp.abs(want).max()))


@pytest.mark.slow
def test_members_of_a_vmapped_convolution():
    """Whose batching rule groups features by such a reshape."""
    numbers = ("NHWC", "HWIO", "NHWC")
    one = lambda w, x: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
    f = lambda p, x: jax.vmap(one)(p["w"], x)
    rng = np.random.default_rng(0)
    w, x = (jax.device_put(rng.normal(size=of).astype(np.float32)) for of in ((3, 3, 3, 4, 6), (3, 2, 5, 5, 4)))
    w = w * jnp.logspace(-1, 0, 6)[None, None, None, None]
    q = quantize_fn(f, [Rule("w", weight_spec(8), activation_spec(8))])
    want = f({"w": w}, x)
    np.testing.assert_allclose(q({"w": w}, x), want, atol=0.02 * float(jnp.abs(want).max()))
    assert_same_bits(q(q.freeze({"w": w}, x), x), q({"w": w}, x))
