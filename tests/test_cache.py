# SPDX-License-Identifier: Apache-2.0
"""A quantized cache is written and read in parts, and an attention on it is a product of integers."""

import dataclasses
import functools
import itertools
import math
import re

import in_float32  # noqa: F401 - an execution
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from inputs import ones
from lanes import by_default, cases

from jaxquant import (
    PerBlock,
    PerChannel,
    PerToken,
    QParams,
    QuantSpec,
    dequantize,
    dot_general,
    fake_quant,
    float8_spec,
    mxfp8_spec,
    nvfp4_spec,
    quantize,
    stored_for,
)
from jaxquant.cache import dynamic_slice, update_slice, zeros

F = np.float32
SHAPE = B, T, H, D = 2, 8, 4, 4  # examples, tokens, heads, features
TOKEN = PerChannel((0, 1, 2))  # a scale for each token and head
KIVI = PerBlock(1, 4)  # for each feature, in blocks of four tokens
ROWS = QuantSpec(granularity=PerToken())
SPECS = {
    "int8": QuantSpec(granularity=TOKEN),
    "int4": QuantSpec(bits=4, granularity=TOKEN),
    "float8": float8_spec("float8_e4m3fn", granularity=TOKEN),
    "int8 in blocks": QuantSpec(granularity=KIVI),
    "int4 in blocks": QuantSpec(bits=4, granularity=KIVI),
    "int4 in blocks of features": QuantSpec(bits=4, granularity=PerBlock(-1, 2)),
    "int8 affine": QuantSpec(symmetric=False, granularity=TOKEN),
    "uint4 affine in blocks": QuantSpec(bits=4, signed=False, symmetric=False, granularity=KIVI),
    "float8 in bfloat16 scales": dataclasses.replace(float8_spec(granularity=TOKEN), scale_dtype="bfloat16"),
    "mxfp8": dataclasses.replace(mxfp8_spec(-1), granularity=PerBlock(-1, 2)),
}
# By default; the others in the slow tests.
SOME = "int8", "uint4 affine in blocks", "mxfp8"
STATIC = {
    "tensor": (QuantSpec(), (), (2, 1, 4, 4)),
    "feature": (QuantSpec(bits=4, granularity=PerChannel((2, 3))), (1, 1, H, D), (1, 3, 4, 4)),
    "affine": (QuantSpec(symmetric=False, granularity=PerChannel(-1)), (1, 1, 1, D), (2, 2, 1, 4)),
}


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(F)


def spread(v, shape):
    """One value for each element, by NumPy."""
    v = np.asarray(v)
    v = v.reshape((1,) * (len(shape) - v.ndim) + v.shape)
    for axis, n in enumerate(shape):
        v = np.repeat(v, n // v.shape[axis], axis)
    return v


def by_hand(x, spec, groups):
    """Levels and scales of symmetric specs with float32 scales."""
    parts = [part for g, n in zip(groups, x.shape, strict=True) for part in (g, n // g)]
    largest = np.abs(x).reshape(parts).max(tuple(range(1, 2 * x.ndim, 2)))
    scale = np.where(largest > 0, largest / F(spec.qmax), 1).astype(F)
    steps = x / spread(scale, x.shape)
    return (steps if spec.format else np.round(steps)).astype(spec.dtype), scale


def groups_of(q):
    return (1,) * (q.ndim - q.scale.ndim) + q.scale.shape


def real(q):
    steps = np.asarray(q.values).astype(F) - spread(np.asarray(q.zero_point).astype(F), q.shape)
    return steps * spread(np.asarray(q.scale).astype(F), q.shape)


def same(got, want):
    """The same pytree, to the bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        as_known = lambda v: v.astype(jnp.int8) if v.dtype in (jnp.int4, jnp.uint4) else v
        assert_same_bits(as_known(a), as_known(b))


def stored_like(q, cache):
    """What quantize gives, as the cache holds it."""
    if q.spec.bits > 4:
        return q
    half = dataclasses.replace(q, values=q.values.astype(jnp.int4 if q.spec.signed else jnp.uint4))
    return stored_for(half, "cpu" if cache.pairs else "tpu")


def full(spec, seed=0, shape=SHAPE):
    empty = zeros(shape, spec)
    return stored_like(quantize(random(*shape, seed=seed), spec), empty)


jitted = jax.jit(update_slice, donate_argnames="cache")
copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def written_at(cache, new, index):
    """By a static index and, in a program that is compiled once for each shape, by a traced one."""
    got = update_slice(cache, new, index)
    same(jitted(copied(cache), new, tuple(map(jnp.int32, index))), got)
    return got


# Written.


@cases("name", SPECS)
def test_an_empty_cache_is_zeros(name):
    spec = SPECS[name]
    empty = zeros(SHAPE, spec, dtype=jnp.bfloat16)
    same(empty, stored_like(quantize(jnp.zeros(SHAPE, jnp.bfloat16), spec), empty))
    assert empty.stored.size == math.prod(SHAPE) // (2 if spec.bits == 4 else 1)
    assert not np.asarray(dequantize(empty)).any()
    same(jax.jit(lambda: zeros(SHAPE, spec, dtype=jnp.bfloat16))(), empty)


@by_default("uint4 affine in blocks")
@cases("name", SPECS, SOME)
def test_a_part_is_written_as_it_is_quantized_whole(name):
    cache, size, new = full(SPECS[name]), 4, random(1, 4, H, D, seed=1)
    got, x = written_at(cache, new, (1, 4, 0, 0)), random(*SHAPE)
    x[1:, 4:] = new
    same(got, stored_like(quantize(x, SPECS[name]), cache))
    if SPECS[name].symmetric and SPECS[name].scale_dtype == "float32":
        values, scale = by_hand(x, SPECS[name], groups_of(cache))
        assert_same_bits(got.scale, scale)
        assert_same_bits(got.values, values)
    same(written_at(cache, quantize(new, SPECS[name]), (-1, -size, 0, -D)), got)


@pytest.mark.slow
@cases("axis", range(4), [1, 3])
def test_a_part_along_any_axis_that_has_scales_of_its_own(axis):
    spec, sizes = QuantSpec(granularity=PerChannel((0, 1, 2, 3))), list(SHAPE)
    sizes[axis] = 1
    index = [0] * 4
    index[axis] = 1
    x, new = random(*SHAPE), random(*sizes, seed=1)
    x[tuple(slice(i, i + n) for i, n in zip(index, sizes, strict=True))] = new
    same(written_at(full(spec), new, tuple(index)), quantize(x, spec))


@by_default("affine")
@pytest.mark.parametrize("name", STATIC)
def test_scales_that_a_part_cannot_change_stay(name):
    spec, groups, sizes = STATIC[name]
    scale, zero = F(np.exp(random(*groups))), F(np.round(random(*groups, seed=1)) * (not spec.symmetric))
    cache, new = zeros(SHAPE, spec, QParams(scale, zero)), random(*sizes, seed=2) * 30
    got, want = written_at(cache, new, (0, 2, 0, 0)), np.broadcast_to(spread(zero, SHAPE), SHAPE).astype(spec.dtype)
    steps = np.round(new / spread(scale, sizes)) + spread(zero, sizes)
    want[tuple(slice(i, i + n) for i, n in zip((0, 2, 0, 0), sizes, strict=True))] = steps.clip(spec.qmin, spec.qmax)
    assert_same_bits(got.values, want)
    same(stored_like(dataclasses.replace(got, values=cache.values), cache), cache)
    if groups:  # of two, or of the whole shape
        return
    q = quantize(new, spec, QParams(scale * 2, zero))
    same(written_at(cache, q, (0, 2, 0, 0)), update_slice(cache, dequantize(q), (0, 2, 0, 0)))
    assert_same_bits(written_at(cache, random(*SHAPE), (0, 0, 0, 0)).scale, scale)


@cases("order", [((-1, -2),), ((-2, -1, -3),)])
def test_a_cache_is_written_as_it_lies(order):
    cache = stored_for(full(SPECS["int4"]), "tpu")
    got = written_at(
        dataclasses.replace(cache, values=cache.stored, order=order), random(B, 1, H, D, seed=1), (0, 3, 0, 0)
    )
    assert (got.order, got.stored.dtype) == (order, jnp.int4)
    want = update_slice(cache, random(B, 1, H, D, seed=1), (0, 3, 0, 0))
    same(dataclasses.replace(got, values=got.values.astype(jnp.int4), order=None), want)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "pairs"), [((2, 12), (-1, 2)), ((2, 6, 5), (-2, 1))])
def test_a_part_that_begins_or_ends_in_a_byte_leaves_its_other_half(shape, pairs):
    """Written along the axis of the pairs, at each start, beyond the last, too."""
    spec = QuantSpec(bits=4, granularity=PerChannel((0, 1)))
    in_int4 = jax.jit(lambda q: dataclasses.replace(q, values=q.values.astype(jnp.int4)))
    cache = quantize(random(*shape), spec)
    half = stored_for(in_int4(cache), "cpu")
    assert (half.pairs, half.stored.size, half.shape) == (pairs, cache.size // 2, shape)

    @jax.jit
    def write(new, start):
        caches = (update_slice(v, new, (0, start, *[0] * len(shape[2:]))) for v in (half, cache))
        return [(v.values, v.scale, v.pairs == pairs) for v in caches]

    for size in 1, 2, 3, 5, shape[1]:
        new = random(2, size, *shape[2:], seed=size)
        for start in range(shape[1]):
            (*got, stays), (*want, _) = write(new, np.int32(start))
            assert stays
            jax.tree.map(assert_same_bits, got, want)


@pytest.mark.slow
def test_a_traced_index_is_clamped():
    cache, new = full(SPECS["int8"]), random(B, 3, H, D, seed=1)
    for start, at in {20: 5, 6: 5, -1: 5, -4: 4, -30: 0}.items():
        same(
            jitted(copied(cache), new, (0, jnp.int32(start), 0, 0)),
            update_slice(cache, new, (0, at, 0, 0)),
        )
        got = dynamic_slice(cache, (jnp.int8(5), jnp.int32(start), 0, 0), (B, 3, H, D))
        assert_same_bits(real(got), real(cache)[:, at : at + 3])
    blocks = full(SPECS["int4 in blocks"])
    for start, at in {3: 0, 7: 4, -1: 4, 99: 4}.items():
        got = update_slice(blocks, new[:, :1].repeat(4, 1), (0, jnp.int32(start), 0, 0))
        same(got, update_slice(blocks, new[:, :1].repeat(4, 1), (0, at, 0, 0)))
        assert_same_bits(
            real(dynamic_slice(blocks, (0, jnp.int32(start), 0, 0), (B, 4, H, D))), real(blocks)[:, at : at + 4]
        )


@cases("name", ["int8", "int4", "float8"])
def test_a_scan_over_tokens_is_one_at_a_time(name):
    """And quantizing them all at once; with an example at a position of its own under vmap, too."""
    spec, x = SPECS[name], jax.device_put(random(*SHAPE))
    step = lambda cache, turn: (update_slice(cache, turn[1][:, None], (0, turn[0], 0, 0)), None)
    empty = zeros(SHAPE, spec)
    got, _ = jax.jit(functools.partial(jax.lax.scan, step))(empty, (jnp.arange(T), jnp.moveaxis(x, 1, 0)))
    same(got, stored_like(quantize(x, spec), empty))
    cache = empty
    for t in range(T):
        cache = jitted(cache, x[:, t : t + 1], (0, jnp.int32(t), 0, 0))
    same(cache, got)
    each = jax.jit(jax.vmap(lambda cache, new, t: update_slice(cache, new, (t, 0, 0))))
    apart = each(got, x[:, :1], jnp.array([2, 5]))
    want = update_slice(got, x[:1, :1], (0, 2, 0, 0))
    same(apart, update_slice(want, x[1:, :1], (1, 5, 0, 0)))


def test_stochastic_rounding_wants_a_key():
    spec, new = QuantSpec(granularity=TOKEN, rounding="stochastic"), ones((B, 1, H, D))
    key, empty = jax.random.key(0), zeros(SHAPE, QuantSpec(granularity=TOKEN))
    empty = dataclasses.replace(empty, spec=spec)
    got = update_slice(empty, new / 3, (0, 2, 0, 0), key=key)
    assert_same_bits(got.values[:, 2:3], quantize(new / 3, spec, key=key).values)
    q = quantize(new / 3, QuantSpec(), QParams(0.1, 0.0))
    one = dataclasses.replace(zeros(SHAPE, q.spec, QParams(0.1, 0.0)), spec=QuantSpec(rounding="stochastic"))
    assert_same_bits(update_slice(one, q, (0, 2, 0, 0)).values[:, 2:3], q.values)  # no key: it has its levels
    with pytest.raises(ValueError, match="`key` must be a PRNG key"):
        update_slice(empty, new, (0, 2, 0, 0))
    with pytest.raises(ValueError, match=r"`key` is for stochastic rounding alone.*a QArray"):
        update_slice(empty, quantize(new, spec, key=key), (0, 2, 0, 0), key=key)


# In place, on one device and on several.


@pytest.mark.bits
@cases("name", ["int8", "int4", "float8", "int4 in blocks"])
def test_a_donated_cache_is_written_in_place(name):
    shape, traces = (2, 512, 4, 16), []
    cache = zeros(shape, SPECS[name])

    def step(cache, new, t):
        traces.append(t)
        return update_slice(cache, new, (0, t, 0, 0))

    new = jnp.ones((2, 4, 4, 16))
    program = (step := jax.jit(step, donate_argnums=0)).lower(cache, new, jnp.int32(0)).compile()
    memory, text = program.memory_analysis(), program.as_text()
    assert memory.alias_size_in_bytes == cache.nbytes  # all arrays of it
    assert memory.temp_size_in_bytes < cache.nbytes // 32
    whole = rf"(?:s|u|f)\w+\[2,512,4,{cache.stored.shape[-1]}\]\S* "
    assert re.search(whole + r"(?:\S*fusion|dynamic-update-slice)\(", text)
    assert not re.search(whole + r"copy\(", text)
    assert "f16[2,512,4,16]" not in text  # as which a CPU would copy float8
    traces.clear()
    for t in range(4):
        cache = step(cache, new, jnp.int32(4 * t))
    assert (len(traces), step._cache_size()) == (0, 1)


@pytest.mark.slow
def test_heads_on_several_devices_stay_there():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("heads",))
    by_head = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "heads"))

    def step(k, v, x, t):
        k, v = (update_slice(cache, x, (0, t, 0, 0)) for cache in (k, v))
        return k, v, attend(x[:, 0], k, v, jnp.arange(T) <= t)

    alone = jax.jit(step)
    want = alone(
        full(SPECS["int8"]), full(SPECS["int4"], 1), x := jnp.asarray(random(B, 1, H, D, seed=2)), jnp.int32(3)
    )
    k, v, x = jax.device_put((full(SPECS["int8"]), full(SPECS["int4"], 1), x), by_head)
    sharded = jax.jit(step)
    text = sharded.lower(k, v, x, jnp.int32(3)).compile().as_text()
    moves = re.findall(r"= (\S+) (?:all-gather|all-reduce|all-to-all|collective-permute)\(", text)
    assert set(moves) <= {"f32[]"}  # whether all is finite, of which a CPU makes a condition
    same(sharded(k, v, x, jnp.int32(3)), want)
    P = jax.sharding.PartitionSpec
    specs = {"in_specs": (*[by_head.spec] * 3, P()), "out_specs": (*[by_head.spec] * 2, P(None, "heads"))}
    local = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
    same(local(full(SPECS["int8"]), full(SPECS["int4"], 1), x, jnp.int32(3)), want)


ON_A_MESH = {
    "written": lambda cache, x, t: update_slice(cache, x, (0, t, 0, 0)),
    "each at its own": lambda cache, x, t: jax.vmap(lambda cache, x, t: update_slice(cache, x, (t, 0, 0)))(
        cache, x, t - jnp.arange(B)
    ),
    "in a scan": lambda cache, x, t: jax.lax.scan(
        lambda cache, t: (update_slice(cache, x, (0, 4 * t, 0, 0)), None), cache, jnp.arange(2)
    )[0],
    "read": lambda cache, x, t: dynamic_slice(cache, (0, t, 0, 0), x.shape),
    "a part": lambda cache, x, t: cache[:, 4:],
}


# Under vmap the axis of blocks is counted without the examples.
ON_MESHES = [
    (what, name)
    for what, name in itertools.product(ON_A_MESH, SPECS)
    if what != "each at its own" or SPECS[name].granularity != KIVI
]


@cases(("what", "name"), ON_MESHES)
def test_heads_on_explicit_axes(what, name):
    """The same bits, and each array stays as it was split."""
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    f, args = jax.jit(ON_A_MESH[what]), (full(SPECS[name]), jnp.asarray(random(B, 4, H, D, seed=1)), jnp.int32(4))
    want = f(*args)

    def by_head(v):
        spec = [None, None, "heads", None][: v.ndim]
        return jax.device_put(v, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

    with jax.set_mesh(mesh):
        got = f(*jax.tree.map(by_head, args))
        for v, like in zip(jax.tree.leaves(got), jax.tree.leaves(jax.tree.map(by_head, want)), strict=True):
            assert jax.typeof(v) == jax.typeof(like)
    same(got, want)


# Read.

PARTS = {
    "tokens": lambda v: v[:, 4:8],
    "a head": lambda v: v[:, :, 1:2],
    "features": lambda v: v[:, :, :, 2:4],
    "all": lambda v: v[:, :],
    "nothing": lambda v: v[:, :0],
    "beyond": lambda v: v[1:9, -4:20],
    "an element": lambda v: v[1, -3],
    "of each": lambda v: v[-1:, 3, 1, :],
    "scalar": lambda v: v[1, 2, 3, 0],
}


@cases("name", SPECS)
def test_an_index_is_that_of_the_real_values(name):
    q = full(SPECS[name])
    got = jax.jit(lambda q: {part: (p := f(q), dequantize(p)) for part, f in PARTS.items()})(q)
    for part, f in PARTS.items():
        assert_same_bits(got[part][1], f(real(q)), part)
        cuts_pairs = bool(q.pairs) and part in ("features", "scalar")
        assert got[part][0].stored.dtype == (q.spec.dtype if cuts_pairs else q.stored.dtype)
    same(PARTS["of each"](q), got["of each"][0])


@cases("name", SPECS)
def test_a_traced_part_is_that_of_the_real_values(name):
    q = full(SPECS[name])
    window = jax.jit(lambda q, t: dynamic_slice(q, (0, t, 1, -2), (B, 4, 2, 2)))
    for t in (0, 4):
        assert_same_bits(real(window(q, jnp.int32(t))), real(q)[:, t : t + 4, 1:3, -2:])
        same(window(q, jnp.int32(t)), dynamic_slice(q, (0, t, 1, 2), (B, 4, 2, 2)))
    row = jax.jit(lambda q, t, h: q[1, t, h])
    assert_same_bits(real(row(q, jnp.int32(5), jnp.uint8(2))), real(q)[1, 5, 2])
    same(row(q, jnp.int32(5), jnp.uint8(2)), q[1, 5, 2])


# An attention, of the last axes (..., heads, features), in groups of queries for each head of the cache.

SCORES = (((3,), (3,)), ((0, 1), (0, 2)))  # (batch, heads, queries, features) with (batch, tokens, heads, features)
CONTEXT = (((3,), (1,)), ((0, 1), (0, 2)))  # (batch, heads, queries, tokens) with the same


def attend(query, k, v, visible, spec=ROWS):
    """(batch, heads, features) -> the same; the queries of a group follow one another."""
    groups = query.reshape(query.shape[0], k.shape[2], -1, query.shape[-1])
    scores = dot_general(groups, k, SCORES, spec=spec) * np.float32(query.shape[-1] ** -0.5)
    probs = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), -1)
    return dot_general(probs, v, CONTEXT, spec=spec).reshape(query.shape)


def rows_by_hand(x, bits=8):
    return by_hand(x, QuantSpec(bits=bits), (*x.shape[:-1], 1))


def levels(q):
    return np.int64(np.asarray(q.values).astype(F)) - spread(np.int64(np.asarray(q.zero_point).astype(F)), q.shape)


@functools.partial(jax.jit, static_argnames=("dims", "spec", "execution"))
def dot(a, b, dims, spec=None, execution="auto"):
    return dot_general(a, b, dims, spec=spec, execution=execution)


TOKENS = "int8", "int4", "int8 affine"


@by_default("1-int8")
@cases(("group", "name"), itertools.product([1, 3], TOKENS), [(1, "int8"), (3, "int8 affine")])
def test_scores_are_those_of_integers(name, group):
    query, k = random(B, H, group, D, seed=1), full(SPECS[name])
    values, scale = rows_by_hand(query)
    acc = np.einsum("bhgd,bthd->bhgt", np.int64(values), levels(k))
    want = F(acc) * (scale * np.moveaxis(np.asarray(k.scale)[..., 0], 1, 2)[:, :, None])
    assert_same_bits(dot(query, k, SCORES, ROWS), want)
    assert_same_bits(dot(query, k, SCORES, ROWS, "float32"), want)
    assert_same_bits(dot(quantize(query, QuantSpec(granularity=TOKEN)), k, SCORES), want)
    assert_same_bits(jnp.transpose(dot(k, query, tuple(p[::-1] for p in SCORES), ROWS), (0, 1, 3, 2)), want)
    assert_same_bits(dot_general(query, k, SCORES, spec=ROWS), want)


@cases(("bits", "name"), itertools.product([8, 4], TOKENS))
def test_probabilities_take_the_scale_of_a_token_first(name, bits):
    probs, v, spec = np.abs(random(B, H, 3, T, seed=1)), full(SPECS[name]), dataclasses.replace(ROWS, bits=bits)
    scaled = probs * np.moveaxis(np.asarray(v.scale)[..., 0], 1, 2)[:, :, None]
    values, scale = rows_by_hand(scaled, bits)
    want = F(np.einsum("bhgt,bthd->bhgd", np.int64(values), levels(v))) * scale
    assert_same_bits(dot(probs, v, CONTEXT, spec), want)
    assert_same_bits(dot(probs, v, CONTEXT, spec, "float32"), want)
    turned = dot(v, probs, tuple(p[::-1] for p in CONTEXT), spec)
    assert_same_bits(jnp.transpose(turned, (0, 1, 3, 2)), want)
    assert_same_bits(dot_general(probs, v, CONTEXT, spec=spec), want)
    off = np.abs(want - np.einsum("bhgt,bthd->bhgd", probs, real(v))).max()
    assert off < (0.05 if bits == 8 else 1.0)
    half = dot(jnp.asarray(probs, jnp.bfloat16), v, CONTEXT, spec)
    assert_same_bits(half, dot(jnp.asarray(probs, jnp.bfloat16).astype(F), v, CONTEXT, spec).astype(jnp.bfloat16))


def test_probabilities_in_blocks_and_on_one_scale():
    probs, v = np.abs(random(B, H, 3, T, seed=1)), full(SPECS["int8"])
    scaled = probs * np.moveaxis(np.asarray(v.scale)[..., 0], 1, 2)[:, :, None]
    values, scale = by_hand(scaled, QuantSpec(), (1, 1, 1, 1))
    want = F(np.einsum("bhgt,bthd->bhgd", np.int64(values), levels(v))) * scale
    assert_same_bits(dot(probs, v, CONTEXT, QuantSpec()), want)
    assert_same_bits(dot(probs, v, CONTEXT, QuantSpec(granularity=PerBlock((0, 1, 2, 3), (B, H, 3, T)))), want)
    values, scale = by_hand(scaled, QuantSpec(), (B, H, 3, 2))
    parts = [
        F(np.einsum("bhgt,bthd->bhgd", np.int64(values[..., i : i + 4]), levels(v)[:, i : i + 4]))
        * scale[..., [i // 4]]
        for i in (0, 4)
    ]
    assert_same_bits(dot(probs, v, CONTEXT, QuantSpec(granularity=PerBlock(None, 4))), F(0) + parts[0] + parts[1])


@cases("name", ["int8 in blocks", "int4 in blocks", "uint4 affine in blocks"], ["uint4 affine in blocks"])
def test_keys_with_a_scale_for_each_feature_in_blocks_of_tokens(name):
    """A query for each block, with the scales of its features; and values so, where each block is a product."""
    query, cache = random(B, H, 3, D, seed=1), full(SPECS[name])
    scale = np.asarray(cache.scale)  # (batch, blocks, heads, features)
    values, of_rows = rows_by_hand(query[:, None] * scale[:, :, :, None])
    parts = [
        F(np.einsum("bhgd,bthd->bhgt", np.int64(values[:, i]), levels(cache)[:, 4 * i : 4 * i + 4])) * of_rows[:, i]
        for i in range(T // 4)
    ]
    got = dot(query, cache, SCORES, ROWS)
    assert_same_bits(got, np.concatenate(parts, -1))
    assert_same_bits(jnp.transpose(dot(cache, query, tuple(p[::-1] for p in SCORES), ROWS), (0, 1, 3, 2)), got)
    probs = np.abs(random(B, H, 3, T, seed=2))
    values, of_rows = rows_by_hand(probs)
    parts = [
        F(np.einsum("bhgt,bthd->bhgd", np.int64(values[..., i : i + 4]), levels(cache)[:, i : i + 4]))
        * (of_rows * scale[:, i // 4, :, None])
        for i in (0, 4)
    ]
    assert_same_bits(dot(probs, cache, CONTEXT, ROWS), F(0) + parts[0] + parts[1])


@cases("name", ["float8", "mxfp8", "float8 in bfloat16 scales"], ["mxfp8", "float8 in bfloat16 scales"])
def test_floats_meet_integers(name):
    probs, v = np.abs(random(B, H, 3, T, seed=1)), full(SPECS[name])
    if name == "mxfp8":
        want = np.einsum("bhgt,bthd->bhgd", probs, real(v))
        np.testing.assert_allclose(dot(probs, v, CONTEXT, ROWS), want, atol=0.1)
        return
    scaled = probs * np.moveaxis(np.asarray(v.scale).astype(F)[..., 0], 1, 2)[:, :, None]
    values, scale = rows_by_hand(scaled)
    want = F(np.einsum("bhgt,bthd->bhgd", np.float64(values), np.asarray(v.values).astype(np.float64))) * scale
    assert_same_bits(dot(probs, v, CONTEXT, ROWS), want)


def test_gradients_are_those_of_the_float_attention():
    probs, v = jnp.abs(random(B, H, 3, T, seed=1)), full(SPECS["int8"])
    weights, scale = jnp.asarray(random(B, H, 3, D, seed=2)), v.scale

    def integers(probs, scale):
        return jnp.vdot(weights, dot_general(probs, dataclasses.replace(v, scale=scale), CONTEXT, spec=ROWS))

    def floats(probs, scale):
        scaled = probs * jnp.moveaxis(scale[..., 0], 1, 2)[:, :, None]
        scaled = fake_quant(scaled, QuantSpec(granularity=TOKEN))
        return jnp.vdot(weights, jnp.einsum("bhgt,bthd->bhgd", scaled, v.values.astype(jnp.float32)))

    got, want = (jax.jit(jax.grad(f, (0, 1)))(probs, scale) for f in (integers, floats))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.slow
def test_a_nan_is_in_the_results_that_it_enters():
    probs, v = np.abs(random(B, H, 3, T, seed=1)), full(SPECS["int8"])
    probs[1, 2, 1, 4] = np.nan
    got = np.isnan(dot(probs, v, CONTEXT, ROWS))
    assert got[1, 2, 1].all()
    assert got.sum() == D
    k = dataclasses.replace(v, scale=v.scale.at[0, 3, 1].set(np.nan))
    assert np.isnan(dot(probs[:1] * 0 + 1, k[:1], CONTEXT, ROWS))[0, 1].all()


@pytest.mark.slow
def test_attention_in_a_window_and_in_groups_by_hand():
    """Queries of two heads for each head of the cache, and of the last tokens alone, read from where data say."""
    k, v, query = full(SPECS["int8"]), full(SPECS["int4"], 1), random(B, 2 * H, D, seed=2)
    window = 3

    @jax.jit
    def step(k, v, query, t):
        part = (0, t - window + 1, 0, 0), (B, window, H, D)
        return attend(query, dynamic_slice(k, *part), dynamic_slice(v, *part), True)

    got, masked = step(k, v, query, jnp.int32(5)), attend(query, k, v, (np.arange(T) > 2) & (np.arange(T) <= 5))
    np.testing.assert_allclose(got, masked, atol=1e-6)
    of_k = real(k)[:, 3:6].repeat(2, 2)
    values, scale = rows_by_hand(query)
    scores = np.einsum("bhd,bthd->bht", F(values) * scale, of_k) * F(D**-0.5)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    scaled = probs * np.moveaxis(np.asarray(v.scale)[:, 3:6, :, 0], 1, 2).repeat(2, 1)
    values, scale = rows_by_hand(scaled)
    want = np.einsum("bht,bthd->bhd", F(values) * scale, levels(v)[:, 3:6].repeat(2, 2))
    np.testing.assert_allclose(got, want, atol=0.02)  # where a probability lies by a tie
    assert (np.abs(got - want) < 1e-5).mean() > 0.9


def test_decoding_is_the_full_pass_to_the_bit():
    """200 tokens, one at a time, with a cache of keys and values; the full pass has them all quantized at once."""
    n, heads, features = 200, 2, 8
    x = jnp.asarray(random(1, n, heads * features))
    weights = [jnp.asarray(random(heads * features, heads * features, seed=i)) / 4 for i in range(3)]
    q, k, v = ((x @ w).reshape(1, n, heads, features) for w in weights)
    spec_k, spec_v = SPECS["int8"], SPECS["int4"]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(k_cache, v_cache, q, k, v, t):
        k_cache, v_cache = (update_slice(c, new[:, None], (0, t, 0, 0)) for c, new in ((k_cache, k), (v_cache, v)))
        return k_cache, v_cache, attend(q, k_cache, v_cache, jnp.arange(n) <= t)

    @jax.jit
    def whole(q, k, v):
        causal = jnp.arange(n)[None] <= jnp.arange(n)[:, None]
        scores = dot_general(jnp.moveaxis(q, 1, 2), k, SCORES, spec=ROWS) * np.float32(features**-0.5)
        # A row at a time, because XLA adds up the rows of a matrix in another order.
        softmax = lambda row: jax.nn.softmax(jnp.where(row[1], row[0], -jnp.inf), -1)
        probs = jnp.moveaxis(jax.lax.map(softmax, (jnp.moveaxis(scores, 2, 0), causal)), 0, 2)
        return jnp.moveaxis(dot_general(probs, v, CONTEXT, spec=ROWS), 2, 1)

    caches, outputs = [zeros((1, n, heads, features), spec) for spec in (spec_k, spec_v)], []
    for t in range(n):
        *caches, y = step(*caches, q[:, t], k[:, t], v[:, t], jnp.int32(t))
        outputs.append(y)
    assert step._cache_size() == 1
    same(caches[0], quantize(k, spec_k))
    assert_same_bits(jnp.stack(outputs, 1), whole(q, quantize(k, spec_k), quantize(v, spec_v)))


# Refused.

INT8, KEYS, TENSOR = (zeros(SHAPE, spec) for spec in (SPECS["int8"], SPECS["int8 in blocks"], QuantSpec()))
NEW = np.ones((B, 1, H, D), F)
NV = zeros((B, T, H, 16), nvfp4_spec(-1))
AT = (0, 3, 0, 0)
REFUSED = {
    "an array": (lambda: update_slice(NEW, NEW, AT), TypeError, ["`cache` must be a QArray", "float32", "quantize"]),
    "integers": (
        lambda: update_slice(INT8, NEW.astype(int), AT),
        TypeError,
        ["`new` must be a floating array", "int64", "jnp.asarray"],
    ),
    "of a lower rank": (
        lambda: update_slice(INT8, NEW[:, 0], AT),
        ValueError,
        ["`new`", "(2, 4, 4)", str(SHAPE), "Add axes of size 1"],
    ),
    "too long": (
        lambda: update_slice(INT8, NEW.repeat(9, 1), AT),
        ValueError,
        ["`new`", "(2, 9, 4, 4)", str(SHAPE), "smaller"],
    ),
    "beyond": (
        lambda: update_slice(INT8, NEW, (0, 8, 0, 0)),
        IndexError,
        ["`index` must be in [0, 7]", "axis 1", "got 8", "traced"],
    ),
    "of NumPy": (lambda: update_slice(INT8, NEW, (0, np.int64(8), 0, 0)), IndexError, ["got 8"]),
    "too long there": (
        lambda: update_slice(INT8, NEW.repeat(2, 1), (0, -1, 0, 0)),
        IndexError,
        ["[0, 6]", "[-8, -2]", "got -1"],
    ),
    "whole": (lambda: update_slice(INT8, NEW, (1, 0, 0, 0)), IndexError, ["[0, 0]", "axis 0", "got 1"]),
    "one number": (
        lambda: update_slice(INT8, NEW, 3),
        ValueError,
        ["`index` must be a tuple of 4", "got int", "(0, 0, 0, 0)"],
    ),
    "too few": (lambda: update_slice(INT8, NEW, (3,)), ValueError, ["`index`", "got 1 of them", "(0, 0, 0, 0)"]),
    "no integer": (
        lambda: update_slice(INT8, NEW, (0, 3.0, 0, 0)),
        TypeError,
        ["`index` must be integers", "got float", "one for each axis"],
    ),
    "another spec": (
        lambda: update_slice(INT8, quantize(NEW, SPECS["int4"]), AT),
        ValueError,
        ["`new` must be of the spec", "bits=4", "in float"],
    ),
    "other groups": (
        lambda: update_slice(INT8, quantize(NEW, QuantSpec(granularity=PerChannel(1))), AT),
        ValueError,
        ["(2, 1, 4, 1) groups", "(1, 1, 1, 1)", "in float"],
    ),
    "a cut block": (
        lambda: update_slice(KEYS, NEW, (0, 4, 0, 0)),
        ValueError,
        ["`index`", "blocks of 4", "axis 1", "4 to 5", "multiples of 4"],
    ),
    "between blocks": (
        lambda: update_slice(KEYS, NEW.repeat(4, 1), (0, 2, 0, 0)),
        ValueError,
        ["`index`", "2 to 6", "multiples of 4"],
    ),
    "a cut block, traced": (
        lambda: jitted(KEYS, NEW, (0, 4, 0, 0)),
        ValueError,
        ["blocks of 4", "1 elements from a traced one"],
    ),
    "a cut group": (
        lambda: update_slice(INT8, NEW[..., :2], AT),
        ValueError,
        ["`new` must hold whole groups", "axis 3", "(2, 1, 4, 2)", "all 4", "PerChannel((0, 1, 2))"],
    ),
    "one block": (
        lambda: update_slice(zeros((B, 4, H, D), KEYS.spec), NEW, (0, 0, 0, 0)),
        ValueError,
        ["whole groups", "axis 1"],
    ),
    "a scale of the tensor": (
        lambda: update_slice(NV, np.ones((B, 1, H, 16), F), AT),
        ValueError,
        ["`cache`", "float8_e4m3fn", "mxfp4_spec"],
    ),
    "a slice of an array": (lambda: dynamic_slice(NEW, AT, (1, 1, 1, 1)), TypeError, ["`operand` must be a QArray"]),
    "sizes": (lambda: dynamic_slice(INT8, AT, (1, 9, 1, 1)), ValueError, ["`slice_sizes`", "(1, 9, 1, 1)", str(SHAPE)]),
    "negative": (lambda: dynamic_slice(INT8, AT, (1, -1, 1, 1)), ValueError, ["`slice_sizes`"]),
    "traced sizes": (
        lambda: dynamic_slice(INT8, AT, (1, jnp.int32(1), 1, 1)),
        TypeError,
        ["`slice_sizes` must be a static int"],
    ),
    "a start": (
        lambda: dynamic_slice(INT8, (0, 6, 0, 0), (1, 4, 1, 1)),
        IndexError,
        ["`start_indices` must be in [0, 4]", "got 6"],
    ),
    "a block that is cut": (
        lambda: dynamic_slice(KEYS, (0, 4, 0, 0), (1, 3, 1, 1)),
        ValueError,
        ["`start_indices`", "blocks of 4", "4 to 7"],
    ),
    "a slice that cuts": (
        lambda: KEYS[:, 2:6],
        ValueError,
        ["`index` must not cut the blocks of 4", "2 to 6", "multiples of 4"],
    ),
    "a step": (lambda: INT8[:, ::2], ValueError, ["step 1", "slice(None, None, 2)", "dequantize"]),
    "a traced slice": (lambda: INT8[:, jnp.int32(1) :], TypeError, ["a slice of a QArray` must be a static int"]),
    "an index beyond": (lambda: INT8[:, 8], IndexError, ["`index` must be in [0, 7]", "axis 1", "got 8"]),
    "more axes": (lambda: INT8[0, 0, 0, 0, 0], IndexError, ["at most 4 axes", "got 5"]),
    "two QArrays": (
        lambda: dot_general(INT8, INT8, SCORES, spec=ROWS),
        TypeError,
        ["`spec` is for an operand in float", "QArray and QArray", "Drop it"],
    ),
    "two floats": (
        lambda: dot_general(NEW, NEW, SCORES, spec=ROWS),
        TypeError,
        ["got an array of dtype float32 and an array", "quantize one"],
    ),
    "no spec": (lambda: dot_general(NEW, INT8, SCORES, spec=8), TypeError, ["`spec` must be a QuantSpec", "int"]),
    "stochastic": (
        lambda: dot_general(NEW, INT8, SCORES, spec=dataclasses.replace(ROWS, rounding="stochastic")),
        ValueError,
        ["round to nearest", "quantize(x, spec, key="],
    ),
    "integers in float": (
        lambda: dot_general(np.ones((B, H, 1, D), int), INT8, SCORES, spec=ROWS),
        TypeError,
        ["`a` must be a floating array", "int64"],
    ),
    "quantized probabilities": (
        lambda: dot_general(quantize(np.ones((B, H, 1, T), F), QuantSpec()), INT8, CONTEXT),
        ValueError,
        ["a scale of its own for each element", "spec=", "multiplied into it first"],
    ),
    "a shape of floats": (lambda: zeros((2.0,), QuantSpec()), TypeError, ["`shape` must be a static int"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input(name):
    call, kind, texts = REFUSED[name]
    with pytest.raises(kind) as error:
        call()
    for text in texts:
        assert text in str(error.value), error.value
