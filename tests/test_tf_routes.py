# SPDX-License-Identifier: Apache-2.0
"""One value everywhere: each op of jaxquant.tf gives the same bits on every road that JAX offers to it."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from exact import assert_same_bits
from inputs import cast, hard_ranges, hard_values
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import cases

from jaxquant import tf

pytestmark = pytest.mark.bits

RANGES, ROWS, CHANNELS = 8, 16, 6
KINDS = "Auto", "Explicit"  # of the axes of a mesh


class Op(NamedTuple):
    call: Callable  # (x, low, high) -> y
    per_channel: bool = False
    trained: bool = False  # has gradients to the range
    attributes: bool = False  # the range is static
    from_data: bool = False  # the range is that of x, of a shard where x is sharded by shard_map
    steps: int = 255


def round_trip(op, bits, **options):
    return lambda x, low, high: op(x, low, high, num_bits=bits, **options)


def integers(T, mode, axis=None, **options):
    """To codes and back: another code or another reported range gives another value."""

    def call(x, low, high):
        q = tf.quantize(x, low, high, T, mode, axis=axis, **options)
        narrow = options.get("narrow_range", False)
        return tf.dequantize(q.output, q.output_min, q.output_max, mode, axis=axis, narrow_range=narrow).astype(x.dtype)

    return Op(call, per_channel=axis is not None, steps=2 ** np.iinfo(T).bits - 1)


def codes(T, mode):
    return Op(lambda x, *r: tf.quantize(x, *r, T, mode).output.astype(x.dtype), steps=2 ** np.iinfo(T).bits - 1)


V1, V4 = tf.quantize_and_dequantize, tf.quantize_and_dequantize_v2
OPS = {
    "args": Op(lambda x, a, b: tf.fake_quant_with_min_max_args(x, float(a), float(b)), attributes=True),
    "args 4 narrow": Op(
        lambda x, a, b: tf.fake_quant_with_min_max_args(x, float(a), float(b), 4, True), attributes=True, steps=14
    ),
    "vars": Op(tf.fake_quant_with_min_max_vars, trained=True),
    "vars 3": Op(lambda *a: tf.fake_quant_with_min_max_vars(*a, num_bits=3), trained=True, steps=7),
    "vars 16 narrow": Op(lambda *a: tf.fake_quant_with_min_max_vars(*a, 16, True), trained=True, steps=65534),
    "per channel": Op(tf.fake_quant_with_min_max_vars_per_channel, True, True),
    "per channel 4 narrow": Op(
        lambda *a: tf.fake_quant_with_min_max_vars_per_channel(*a, 4, True), True, True, steps=14
    ),
    "V4 given": Op(round_trip(V4, 8, range_given=True)),
    "V4 given, half up, unsigned": Op(round_trip(V4, 4, range_given=True, round_mode="HALF_UP", signed_input=False)),
    "V4 given, axis": Op(round_trip(V4, 4, range_given=True, axis=-1, narrow_range=True), True, steps=14),
    "V4 from data": Op(round_trip(V4, 8, round_mode="HALF_UP"), from_data=True),
    "V4 from data, axis": Op(round_trip(V4, 3, axis=-1), True, from_data=True, steps=7),
    "V1 given": Op(round_trip(V1, 8, range_given=True, round_mode="HALF_UP")),
    "V1 from data": Op(round_trip(V1, 8), from_data=True),
    "codes, combined": codes("int8", "MIN_COMBINED"),
    "codes, first": codes("uint8", "MIN_FIRST"),
    "codes, scaled": codes("int16", "SCALED"),
    "integers, combined": integers("uint8", "MIN_COMBINED"),
    "integers, combined, axis": integers("int8", "MIN_COMBINED", -1),
    "integers, first": integers("int8", "MIN_FIRST"),
    "integers, first, axis": integers("uint16", "MIN_FIRST", 1),
    "integers, scaled": integers("int8", "SCALED", narrow_range=True),
    "integers, scaled, axis": integers("uint8", "SCALED", -1),
    "integers, scaled, half even": integers("int16", "SCALED", round_mode="HALF_TO_EVEN"),
}


def all_values(op: Op):
    """(x, low, high, g) -> y and every gradient."""

    def f(x, low, high, g):
        if op.attributes:
            y, vjp = jax.vjp(lambda x: op.call(x, low, high), x)
        else:
            y, vjp = jax.vjp(op.call, x, low, high)
        return y, vjp(g)

    return f


@functools.cache
def inputs(name):
    """xs (RANGES, ROWS, CHANNELS), lows and highs (RANGES,) or (RANGES, CHANNELS), integer cotangents."""
    op, rng = OPS[name], np.random.default_rng([3, *name.encode()])
    low, high = hard_ranges(rng, RANGES * CHANNELS, op.steps)
    if not op.per_channel:
        low, high = (np.repeat(v[:RANGES], CHANNELS) for v in (low, high))
    if op.attributes:  # min == max is an error there
        high = np.where(low == high, low + 1, high)
    x = np.stack([hard_values(rng, ROWS, a, b, op.steps) for a, b in zip(low, high, strict=True)], -1)
    x = np.moveaxis(x.reshape(ROWS, RANGES, CHANNELS), 1, 0)
    if op.from_data:
        x = np.where(np.abs(x) > 1e-30, x, 0)
    g = rng.integers(-8, 9, x.shape).astype(x.dtype)
    low, high = (v.reshape(RANGES, CHANNELS) if op.per_channel else v[::CHANNELS] for v in (low, high))
    return x, low, high, g


@functools.cache
def expected(name):
    """Eager, one range at a time."""
    return [jax.tree.map(np.asarray, all_values(OPS[name])(*map(to_jax(name), a))) for a in each(name)]


def to_jax(name):
    return (lambda v: v if np.ndim(v) == 0 else jax.device_put(v)) if OPS[name].attributes else jax.device_put


def each(name):
    """The sets. Each constant range makes a program longer: of those, one with a tie in the nudge and a huge one."""
    sets = list(zip(*inputs(name), strict=True))
    return sets[2::3] if OPS[name].attributes else sets


def stacked(results):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


def same(got, want):
    jax.tree.map(lambda a, b: assert_same_bits(a, b), got, want)


def mesh(kind):
    return jax.make_mesh((4,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))


def with_constants(f, sets):
    """`f` of the sets (x, low, high, g) with each range a constant: one program for all of them."""
    return jax.jit(lambda xs: [f(x, a[1], a[2], g) for (x, g), a in zip(xs, sets, strict=True)])(
        [(a[0], a[3]) for a in sets]
    )


def jitted(name, f, sets=None):
    """`f` with the range traced where it can be, and constant where it is an attribute."""
    sets, compiled = sets or each(name), jax.jit(f)
    return with_constants(f, sets) if OPS[name].attributes else [compiled(*a) for a in sets]


TRACED = [name for name, op in OPS.items() if not op.attributes]  # their range
every_op = lambda *default: cases("name", OPS, default)


@pytest.mark.slow
@every_op("args", "per channel 4 narrow", "integers, scaled, half even")
def test_jit(name):
    same(jitted(name, all_values(OPS[name])), expected(name))


@pytest.mark.slow
@every_op("V4 given, axis")
def test_checkpoint(name):
    op = OPS[name]
    remat = op._replace(call=lambda x, a, b: jax.checkpoint(lambda x: op.call(x, a, b))(x))
    got = [y_and_gradients[1][0] for y_and_gradients in jitted(name, all_values(remat))]
    same(got, [gradients[0] for _, gradients in expected(name)])


@cases("name", TRACED, ["per channel 4 narrow"])
def test_vmap_over_x_and_ranges(name):
    same(jax.vmap(all_values(OPS[name]))(*inputs(name)), stacked(expected(name)))
    same(jax.jit(jax.vmap(all_values(OPS[name])))(*inputs(name)), stacked(expected(name)))


@pytest.mark.slow
@every_op("integers, scaled, half even")
def test_vmap_over_x(name):
    f = all_values(OPS[name])
    xs, lows, highs, gs = inputs(name)
    low, high = to_jax(name)(lows[1]), to_jax(name)(highs[1])
    want = stacked([f(jax.device_put(x), low, high, jax.device_put(g)) for x, g in zip(xs, gs, strict=True)])
    same(jax.jit(jax.vmap(lambda x, g: f(x, low, high, g)))(xs, gs), want)
    if not OPS[name].attributes:
        same(jax.jit(jax.vmap(f, (0, None, None, 0)))(xs, low, high, gs), want)


@cases("name", TRACED)
def test_scan(name):
    f = all_values(OPS[name])
    _, got = jax.lax.scan(lambda carry, a: (carry, f(*a)), 0, inputs(name))
    same(got, stacked(expected(name)))


@pytest.mark.slow
@every_op("per channel 4 narrow")
def test_closure_constant_ranges(name):
    f = all_values(OPS[name])
    some = list(zip(each(name), expected(name), strict=True))[1::2]
    same(with_constants(f, [a for a, _ in some]), [want for _, want in some])


@pytest.mark.slow
@every_op("vars")
def test_closure_constant_everything(name):
    f = all_values(OPS[name])
    some = list(zip(each(name), expected(name), strict=True))[::3]
    got = jax.jit(lambda: [f(jnp.asarray(a[0]), *a[1:3], jnp.asarray(a[3])) for a, _ in some])()
    same(got, [want for _, want in some])


@cases(
    ("name", "dtype"),
    itertools.product(OPS, ["float32", "bfloat16", "float16"]),
)
def test_neighbours_in_one_jit(name, dtype):
    """The user's own operations before and after the op are not merged into its arithmetic."""
    op, rng = OPS[name], np.random.default_rng(4)
    u, v, bias = (cast(rng.normal(size=(512, CHANNELS)), oracle.FLOATS[dtype]) for _ in range(3))
    low, high = hard_ranges(rng, CHANNELS, op.steps)
    low, high = (low, high) if op.per_channel else (np.float32(-1.3), np.float32(2.1))
    after = lambda y: (y + bias, bias - y)
    want = [after(np.asarray(op.call(*map(to_jax(name), (x, low, high))))) for x in (u * v, u + v)]
    got = jax.jit(lambda u, v: [after(op.call(x, low, high)) for x in (u * v, u + v)])(u, v)
    same(got, want)


@pytest.mark.slow
@every_op("per channel 4 narrow")
def test_gradients_beside_half_precision_neighbours(name):
    op, rng = OPS[name], np.random.default_rng(6)
    u, v = (cast(rng.normal(size=(512, CHANNELS)), oracle.FLOATS["bfloat16"]) for _ in range(2))
    g = cast(rng.integers(-8, 9, u.shape), oracle.FLOATS["bfloat16"])
    shape = CHANNELS if op.per_channel else ()
    low, high = np.full(shape, -0.7, np.float32), np.full(shape, 0.9, np.float32)
    f = all_values(op)
    want = f(*map(to_jax(name), (u * v, low, high, g)))[1]
    same(jax.jit(lambda u, v, g: f(u * v, low, high, g)[1])(u, v, g), want)


@cases(
    ("name", "kind"),
    itertools.product(OPS, KINDS),
)
def test_sharded_jit(name, kind):
    with_mesh = mesh(kind)
    rows, whole = NamedSharding(with_mesh, P("data")), NamedSharding(with_mesh, P())
    of_range = (lambda v: v) if OPS[name].attributes else lambda v: jax.device_put(v, whole)
    placed = lambda x, low, high, g: (jax.device_put(x, rows), of_range(low), of_range(high), jax.device_put(g, rows))
    got = jitted(name, all_values(OPS[name]), [placed(*a) for a in each(name)])
    assert all(len(y.sharding.device_set) == 4 for y, _ in got)
    same(got, expected(name))


@pytest.mark.slow
@cases(
    ("name", "what", "kind"),
    itertools.product([name for name, op in OPS.items() if op.per_channel], ["x", "ranges", "both"], KINDS),
    [("per channel 4 narrow", "ranges", "Explicit")],
)
def test_channels_sharded(name, what, kind):
    """Tensor parallel: the channels of x, of the ranges or of both are sharded."""
    x, low, high, g = (np.concatenate([v, v], -1)[..., :8] for v in each(name)[0])
    call, f = jax.jit(OPS[name].call), jax.jit(all_values(OPS[name]))
    want, with_mesh = jax.tree.map(np.asarray, f(x, low, high, g)), mesh(kind)
    columns = NamedSharding(with_mesh, P(None, "data") if what != "ranges" else P())
    ranges = NamedSharding(with_mesh, P("data") if what != "x" else P())
    args = [jax.device_put(v, s) for v, s in zip((x, low, high), (columns, ranges, ranges), strict=True)]
    with jax.set_mesh(with_mesh):
        y = call(*args)
        same(y, want[0])
        same(f(*args, jax.device_put(g, y.sharding)), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["per channel", "V4 given, axis"])
def test_a_gradient_is_sharded_as_its_argument(name):
    with_mesh, grad = mesh("Explicit"), jax.grad(lambda *args: OPS[name].call(*args).sum(), (0, 1, 2))
    at = lambda shape, *axes: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(with_mesh, P(*axes)))
    for x, ranges in ((None, None), "data"), ((None, "data"), None):
        args = at((16, 8), *x), at((8,), ranges), at((8,), ranges)
        with jax.set_mesh(with_mesh):
            assert [v.sharding.spec for v in jax.eval_shape(grad, *args)] == [P(*x), P(ranges), P(ranges)]


@cases("name", [name for name, op in OPS.items() if not op.from_data], ["per channel 4 narrow"])
def test_shard_map(name):
    f, sharded = all_values(OPS[name]), functools.partial(jax.shard_map, mesh=mesh("Auto"))
    if OPS[name].attributes:
        rows = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}
        run = lambda x, low, high, g: sharded(lambda x, g: f(x, low, high, g), **rows)(x, g)
    else:
        run = sharded(f, in_specs=(P("data"), P(), P(), P("data")), out_specs=(P("data"), (P("data"), P(), P())))
    same(jitted(name, run), expected(name))


NARROW = "per channel 4 narrow"


@pytest.mark.slow
def test_per_channel_is_a_loop_over_channels():
    x, low, high, g = inputs(NARROW)
    y, (dx, dmin, dmax) = stacked(expected(NARROW))
    one = jax.jit(all_values(OPS[NARROW]))
    for r, c in np.ndindex(RANGES, CHANNELS):
        got = jax.tree.map(np.asarray, one(x[r, :, c, None], low[r, c, None], high[r, c, None], g[r, :, c, None]))
        same(jax.tree.map(lambda v: v[..., 0], got), (y[r, :, c], (dx[r, :, c], dmin[r, c], dmax[r, c])))
        assert_same_bits(y[r, :, c], oracle.fake_quant(x[r, :, c], low[r, c], high[r, c], 4, True))


@pytest.mark.slow
def test_per_channel_is_args_of_each_channel():
    """The formula with the product: `vars` divides, and differs from it on ties."""
    x, low, high, _ = inputs(NARROW)
    y = stacked(expected(NARROW))[0]
    divided = 0
    for r, c in np.ndindex(RANGES, CHANNELS):
        if low[r, c] < high[r, c]:
            channel, ends = jax.device_put(x[r, :, c]), (low[r, c], high[r, c])
            args = np.asarray(tf.fake_quant_with_min_max_args(channel, *map(float, ends), 4, True))
            assert_same_bits(args, y[r, :, c])
            divided += (
                np.asarray(tf.fake_quant_with_min_max_vars(channel, *jax.device_put(ends), 4, True)) != args
            ).sum()
    assert divided > 0


@cases("axis", [0, 1, -1])
def test_an_axis_is_a_loop_over_slices(axis):
    rng = np.random.default_rng(5)
    low, high = hard_ranges(rng, 5, 15)
    x = np.stack([hard_values(rng, 12, a, b, 15).reshape(3, 4) for a, b in zip(low, high, strict=True)], axis)
    for given in (True, False):
        x = x if given else np.where(np.abs(x) > 1e-30, x, 0).astype(np.float32)
        one = jax.jit(functools.partial(V4, num_bits=4, range_given=given))
        whole = jax.jit(functools.partial(V4, num_bits=4, range_given=given, axis=axis))(x, low, high)
        slices = zip(np.moveaxis(x, axis, 0), low, high, strict=True)
        assert_same_bits(whole, np.stack([one(*of_slice) for of_slice in slices], axis))
