# SPDX-License-Identifier: Apache-2.0
"""Gradients of fake_quant against their definition; and one value everywhere, with its gradients, on every route."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import affine_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from exact import assert_same_bits, differing, x64
from inputs import cast, hard_values
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxquant import (
    PerBlock,
    PerChannel,
    PerTensor,
    QParams,
    QuantSpec,
    dequantize,
    fake_quant,
    fit_qparams,
    quantize,
    scale_gradient,
)

SHAPE = 16, 8
GROUPS = {PerTensor(): (), PerChannel(-1): (1, 8), PerBlock(0, 4): (4, 8)}
float32 = lambda *values: jnp.asarray(values, jnp.float32)


def gradients(x, spec, scale, zero_point=0.0, g=None, **options):
    """dx, dscale, dzero_point for the cotangent `g`, all 1 if None."""
    call = lambda x, scale, zero_point: fake_quant(x, spec, QParams(scale, zero_point), **options)
    y, vjp = jax.vjp(call, *map(jnp.asarray, (x, scale, zero_point)))
    return vjp(jnp.ones_like(y) if g is None else jnp.asarray(g))


@pytest.mark.parametrize("dtype", oracle.FLOATS)
@pytest.mark.parametrize("granularity", GROUPS, ids=str)
@pytest.mark.parametrize(("symmetric", "rounding"), [(True, "half_even"), (False, "half_up"), (False, "half_away")])
def test_gradients_are_the_oracle(symmetric, rounding, granularity, dtype, compared):
    spec = QuantSpec(bits=4, symmetric=symmetric, rounding=rounding, granularity=granularity)
    groups, rng = GROUPS[granularity], np.random.default_rng(1)
    differ = 0
    with x64(dtype == "float64"):
        for awkward, offset in itertools.product((True, False), (0.0, 0.4, 3.0, 40.0)):
            scale = np.asarray(np.exp2(rng.integers(-4, 5, groups)), np.float32)
            zero_point = np.asarray(rng.integers(-8, 8, groups) + offset, np.float32)
            g = rng.integers(-8, 9, SHAPE).astype(oracle.FLOATS[dtype])
            if awkward:
                scale = np.asarray(scale * rng.uniform(1, 2, groups), np.float32)
                x = hard_values(rng, 128, -8, 8, 16).reshape(SHAPE)
                x = np.where(np.abs(x) < 1e30, x, np.float32(np.nan))  # infinite quotients have no sum
            else:  # every product and every sum is exact
                x = rng.integers(-64, 64, SHAPE).astype(np.float32) / 4
            x = cast(x * affine_oracle.spread(scale, SHAPE), oracle.FLOATS[dtype])
            dx, dscale, dzero_point = gradients(x, spec, scale, zero_point, g)
            want = affine_oracle.gradients(g, x, scale, zero_point, spec)
            differ += differing(dx, want[0])
            assert_same_bits(dzero_point, want[2], "zero_point")
            assert (np.abs(dscale - want[1]) <= 1e-5 * want[3]).all()
            if not awkward:
                assert_same_bits(dscale + 0, want[1] + np.float32(0), "scale")
    compared("NumPy oracle", "gradient of fake_quant", 8 * x.size, differ)
    assert differ == 0


AFFINE4 = QuantSpec(bits=4, symmetric=False)  # [-8, 7]


@pytest.mark.parametrize(
    ("x", "dx", "dscale", "dzero_point"),
    [
        (0.5, 1, 0, 0),  # inside, on a level
        (0.625, 1, -0.25, 0),  # inside, rounded down
        (0.75, 1, 0.5, 0),  # a tie, to the even level 2
        (1.25, 1, -0.5, 0),  # a tie, to the even level 2
        (-4.0, 1, 0, 0),  # at the lower bound
        (-4.25, 1, 0.5, 0),  # -8.5 is rounded to the bound
        (np.nextafter(np.float32(-4.25), np.float32(-9)), 0, -8, -0.5),  # and its neighbour is not
        (3.5, 1, 0, 0),  # at the upper bound
        (np.nextafter(np.float32(3.75), np.float32(0)), 1, None, 0),  # 7.4999995 is rounded to the bound
        (3.75, 0, 7, -0.5),  # 7.5 is rounded beyond it
        (100.0, 0, 7, -0.5),
        (-100.0, 0, -8, -0.5),
        (np.inf, 0, 7, -0.5),
        (-np.inf, 0, -8, -0.5),
        (np.nan, 0, 0, 0),
        (0.0, 1, 0, 0),
        (-0.0, 1, 0, 0),
    ],
)
def test_definition(x, dx, dscale, dzero_point):
    """Scale 0.5, zero point 0, levels -8 .. 7, g = 1; the zero point of a symmetric spec gets nothing."""
    got = [float(v) for v in gradients(np.float32(x), AFFINE4, 0.5)]
    if dscale is None:
        dscale = float(np.float32(7) - np.float32(x) / np.float32(0.5))
    assert got == [dx, dscale, dzero_point]
    symmetric = QuantSpec(bits=4, narrow_range=False)
    assert [float(v) for v in gradients(np.float32(x), symmetric, 0.5)] == [dx, dscale, 0]


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("signed", [True, False])
def test_the_largest_weight_of_a_channel_keeps_its_gradient(bits, signed):
    """absmax / (absmax / 127) can be 127.00001: a mask tested before rounding would clip it."""
    spec = QuantSpec(bits=bits, signed=signed, granularity=PerChannel(-1))
    x = np.random.default_rng(2).normal(size=(64, 256)).astype(np.float32)
    x = x if signed else np.abs(x)
    scale, zero_point = fit_qparams(x, spec)
    assert bits == 2 or (np.abs(x).max(0) / np.asarray(scale)[0] > spec.qmax).any()
    assert_same_bits(gradients(x, spec, scale, zero_point)[0], np.ones_like(x))
    assert_same_bits(jax.grad(lambda x: fake_quant(x, spec).sum())(x), np.ones_like(x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_clipped_element_stops_nan_and_infinite_cotangents(dtype):
    x = jnp.asarray([100.0, -100.0, 1.0, jnp.nan, 0.5], dtype)
    g = jnp.asarray([jnp.nan, jnp.inf, jnp.nan, jnp.inf, -jnp.inf], dtype)
    assert_same_bits(gradients(x, AFFINE4, 0.5, g=g)[0], jnp.asarray([0, 0, jnp.nan, 0, -jnp.inf], dtype))


@pytest.mark.parametrize(("off", "on"), [(3.4, 3.0), (3.5, 4.0), (300.0, 7.0), (-300.0, -8.0), (np.inf, 7.0)])
def test_a_zero_point_off_the_grid_is_limited_straight_through(off, on):
    x = jnp.linspace(-9, 9, 37)
    want = jax.tree.map(np.asarray, gradients(x, AFFINE4, 0.5, on))
    assert_same_bits(fake_quant(x, AFFINE4, QParams(0.5, off)), fake_quant(x, AFFINE4, QParams(0.5, on)))
    jax.tree.map(assert_same_bits, tuple(gradients(x, AFFINE4, 0.5, off)), tuple(want))
    assert want[2] != 0
    assert quantize(x, AFFINE4, QParams(0.5, off)).zero_point.item() == on


@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, 1e-40, 2.0**-130, -np.inf])
def test_a_scale_that_is_no_scale_is_the_smallest_straight_through(scale):
    x = float32(1.0, -1.0, 0.0, 2.0**-126, 3 * 2.0**-126)
    assert_same_bits(fake_quant(x, AFFINE4, QParams(scale, 0.0)), fake_quant(x, AFFINE4, QParams(2.0**-126, 0.0)))
    assert quantize(x, AFFINE4, QParams(scale, 0.0)).scale == np.float32(2.0**-126)
    dx, dscale, dzero_point = gradients(x, AFFINE4, np.float32(scale), g=float32(3, 1, 1, 1, 1))
    assert dx.tolist() == [0, 0, 1, 1, 1]
    assert dscale == 3 * 7 - 8
    assert dzero_point == -(2.0**-126) * 4


def test_a_nan_scale_gives_no_gradient_to_x():
    dx, dscale, dzero_point = gradients(float32(1.0, -1.0, 0.0), AFFINE4, np.float32(np.nan))
    assert dx.tolist() == [0, 0, 0]
    assert dscale == 0
    assert np.isnan(dzero_point)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", GROUPS, ids=str)
def test_a_range_from_the_data_gets_no_gradient(symmetric, granularity):
    spec = QuantSpec(bits=4, symmetric=symmetric, granularity=granularity)
    x = jnp.asarray(np.random.default_rng(3).normal(size=SHAPE), jnp.float32)
    g = jnp.asarray(np.random.default_rng(4).normal(size=SHAPE), jnp.float32)
    qparams = fit_qparams(x, spec)
    y, vjp = jax.vjp(lambda x: fake_quant(x, spec), x)
    assert_same_bits(y, fake_quant(x, spec, qparams))
    want = jax.vjp(lambda x: fake_quant(x, spec, qparams), x)[1](g)[0]
    assert_same_bits(vjp(g)[0], want)
    assert_same_bits(jax.jit(lambda x, g: jax.vjp(lambda x: fake_quant(x, spec), x)[1](g)[0])(x, g), want)


def test_an_outlier_that_is_not_finite_spares_its_neighbours():
    x = jnp.asarray([0.5, jnp.inf, -1.0, jnp.nan])
    y, vjp = jax.vjp(lambda x: fake_quant(x, QuantSpec()), x)
    assert_same_bits(y[jnp.array([0, 2])], fake_quant(x[jnp.array([0, 2])], QuantSpec()))
    assert vjp(jnp.ones(4))[0].tolist() == [1, 0, 1, 0]


def test_second_order():
    """The gradient of the gradient is that of the straight-through gradient: 6 * y, not of the bare staircase."""
    w, spec, qparams = float32(2.1, -0.7, 90.0), QuantSpec(), QParams(0.5, 0.0)
    cube = lambda w: fake_quant(w, spec, qparams).astype(jnp.float32) ** 3
    y = fake_quant(w, spec, qparams)
    first = jax.vmap(jax.grad(cube))(w)
    second = jax.vmap(jax.grad(jax.grad(cube)))(w)
    assert first.tolist() == [12.0, 0.75, 0.0]
    assert second.tolist() == [12.0, -3.0, 0.0]
    assert second.tolist() == [*(6 * y)[:2].tolist(), 0.0]
    from_data = jax.grad(jax.grad(lambda w: fake_quant(w, spec) ** 3))(jnp.float32(2.0))
    assert from_data == 6 * fake_quant(jnp.float32(2.0), spec)


def test_forward_mode_raises():
    x = jnp.ones(3)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: fake_quant(x, QuantSpec()), (x,), (x,))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.hessian(lambda x: fake_quant(x, QuantSpec()).sum())(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scale_gradient(dtype):
    x, g = jnp.asarray([[1.0, -2.0], [jnp.nan, 3.0]], dtype), jnp.asarray([[4.0, -8.0], [1.0, jnp.inf]], dtype)
    for factor in (0.25, 2, jnp.float32(0.25), np.float32(3)):
        y, vjp = jax.vjp(lambda x, factor=factor: scale_gradient(x, factor), x)
        assert_same_bits(y, x)
        assert_same_bits(vjp(g)[0], g * jnp.asarray(factor, dtype))
    assert jax.jit(jax.grad(lambda f: scale_gradient(x, f)[0, 0].astype(jnp.float32)))(0.5) == 0


def test_scale_gradient_is_refused_a_vector():
    with pytest.raises(ValueError, match="`factor` must have shape"):
        scale_gradient(jnp.ones(3), jnp.ones(3))


def test_dequantize_trains_the_scale():
    spec = QuantSpec(symmetric=False, granularity=PerChannel(-1))
    q = quantize(np.array([[1.0, -4.0], [2.5, 8.0]], np.float32), spec, QParams(float32([0.5, 2.0]), float32([3, -1])))
    dq = jax.grad(lambda q: dequantize(q).sum(), allow_int=True)(q)
    assert dq.scale.tolist() == [[2.0 + 5.0, -2.0 + 4.0]]
    assert [v.dtype for v in (dq.values, dq.zero_point)] == [jax.dtypes.float0] * 2


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("start", [0.2, 1.5])
def test_learned_qparams_descend(symmetric, start):
    """From a scale too small and one too large, at 3 bits, towards the least error on a Gaussian off centre."""
    spec = QuantSpec(bits=3, symmetric=symmetric)
    x = jnp.asarray(np.random.default_rng(5).normal(0.2, 1, 4096), jnp.float32)
    error = lambda qparams: jnp.mean((fake_quant(x, spec, qparams) - x) ** 2)

    @jax.jit
    def train(qparams):
        def step(qparams, _):
            value, slope = jax.value_and_grad(error)(qparams)
            return QParams(qparams.scale - 0.1 * slope.scale, qparams.zero_point - 0.5 * slope.zero_point), value

        return jax.lax.scan(step, qparams, length=60)

    qparams, errors = train(QParams(jnp.float32(start), jnp.float32(0)))
    best = min(float(error(QParams(s, qparams.zero_point))) for s in np.linspace(0.1, 2, 96))
    assert errors[-1] < 0.7 * errors[0]
    assert errors[-1] < 1.1 * best


class Route(NamedTuple):
    spec: QuantSpec
    groups: tuple[int, ...]  # the shape of the qparams
    from_data: bool = False  # the range is that of x, of a shard where x is sharded by shard_map
    key: jax.Array | None = None

    def call(self, x, scale, zero_point):
        return fake_quant(x, self.spec, None if self.from_data else QParams(scale, zero_point), key=self.key)

    def all_values(self, x, scale, zero_point, g):
        y, vjp = jax.vjp(self.call, x, scale, zero_point)
        return y, *vjp(g)


AFFINE, CHANNELS = {"symmetric": False}, {"granularity": PerChannel(-1)}
STOCHASTIC = QuantSpec(rounding="stochastic", **AFFINE, **CHANNELS)
SPECS = {
    "weights": Route(QuantSpec(**CHANNELS), (1, 8)),
    "weights, 4 bits, blocks": Route(QuantSpec(bits=4, granularity=PerBlock(-1, 4)), (16, 2)),
    "activations, unsigned, half up": Route(QuantSpec(signed=False, rounding="half_up", **AFFINE), ()),
    "16 bits, affine, every element": Route(QuantSpec(bits=16, granularity=PerChannel((0, -1)), **AFFINE), (16, 8)),
    "4 bits, affine, half away": Route(QuantSpec(bits=4, rounding="half_away", **AFFINE, **CHANNELS), (1, 8)),
    "stochastic": Route(STOCHASTIC, (1, 8), key=jax.random.key(7)),
    "from data": Route(QuantSpec(**AFFINE), (), from_data=True),
    "from data, blocks, half up": Route(
        QuantSpec(bits=4, granularity=PerBlock(-1, 4), rounding="half_up", **AFFINE), (16, 2), from_data=True
    ),
}
SETS = 4
every_spec = pytest.mark.parametrize("name", SPECS)
given_qparams = pytest.mark.parametrize("name", [name for name, route in SPECS.items() if not route.from_data])


@functools.cache
def inputs(name):
    """Stacked x, scale, zero_point, integer g: awkward scales in the first half of the sets, exact sums in the rest."""
    route, rng = SPECS[name], np.random.default_rng([8, *name.encode()])
    groups = (SETS, *route.groups)
    scale = np.exp2(rng.integers(-6, 6, groups)).astype(np.float32)
    scale[: SETS // 2] *= rng.uniform(1, 2, scale[: SETS // 2].shape).astype(np.float32)
    zero_point = rng.integers(route.spec.qmin, route.spec.qmax + 1, groups).astype(np.float32)
    steps = min(2**route.spec.bits, 256)
    x = rng.integers(-4 * steps, 4 * steps + 1, (SETS, *SHAPE)).astype(np.float32) / 4
    near = hard_values(rng, x[0].size * SETS // 2, -steps, steps, 2 * steps).reshape(-1, *SHAPE)
    x[: SETS // 2] = np.where(np.abs(near) < 1e30, near, np.float32(np.nan))
    with np.errstate(all="ignore"):
        x = np.stack([v * affine_oracle.spread(s, SHAPE) for v, s in zip(x, scale, strict=True)])
    return x, scale, zero_point, rng.integers(-8, 9, x.shape).astype(np.float32)


@functools.cache
def expected(name):
    """Eager, one set at a time."""
    return stacked([SPECS[name].all_values(*map(jnp.asarray, a)) for a in zip(*inputs(name), strict=True)])


def stacked(results):
    return tuple(np.stack(leaves) for leaves in zip(*results, strict=True))


@functools.cache
def magnitudes(name):
    """What the sum of dscale adds, in magnitudes: g times at most the whole grid."""
    route, (_, scale, _, g) = SPECS[name], inputs(name)
    most = 2.0**route.spec.bits
    return np.stack([affine_oracle.total(np.abs(v) * most, s.shape) for v, s in zip(g, scale, strict=True)])


def check(name, results, sets=range(SETS)):
    """y, dx, dzero_point in the same bits; dscale too where its sum is exact, else to 1e-5 of the magnitudes."""
    for n, y, dx, dscale, dzero_point in zip(sets, *stacked(results), strict=True):
        want = [leaf[n] for leaf in expected(name)]
        for got, w, what in zip((y, dx, dzero_point), (want[0], want[1], want[3]), ("y", "dx", "dzero"), strict=True):
            assert_same_bits(got, w, what)
        assert (np.abs(dscale - want[2]) <= 1e-5 * magnitudes(name)[n]).all()
        if n >= SETS // 2:
            assert_same_bits(dscale + 0, want[2] + 0, "dscale")


def each(name, sets=range(SETS)):
    return [[v[n] for v in inputs(name)] for n in sets]


def unstacked(results):
    return zip(*results, strict=True)


def constant_qparams(f, name):
    for x, scale, zero_point, g in each(name, (1, 2)):
        yield jax.jit(lambda x, g, s=scale, z=zero_point: f(x, s, z, g))(x, g)


ROUTES: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "jit": (lambda f, name: [jax.jit(f)(*a) for a in each(name)], (0, 1, 2, 3)),
    "jit, constant qparams": (constant_qparams, (1, 2)),
    "jit, all constant": (
        lambda f, name: [jax.jit(lambda: f(*map(jnp.asarray, each(name)[0])))()],
        (0,),
    ),
    "vmap": (lambda f, name: unstacked(jax.jit(jax.vmap(f))(*inputs(name))), (0, 1, 2, 3)),
    "scan": (lambda f, name: unstacked(jax.lax.scan(lambda c, a: (c, f(*a)), 0, inputs(name))[1]), (0, 1, 2, 3)),
}


@pytest.mark.parametrize("route", ROUTES)
@every_spec
def test_routes(name, route):
    run, sets = ROUTES[route]
    check(name, list(run(SPECS[name].all_values, name)), sets)


@every_spec
def test_checkpoint(name):
    remat = jax.checkpoint(SPECS[name].call)

    @jax.jit
    def f(x, scale, zero_point, g):
        y, vjp = jax.vjp(remat, x, scale, zero_point)
        return y, *vjp(g)

    check(name, [f(*a) for a in each(name)])


@every_spec
def test_vmap_over_x_alone(name):
    f = SPECS[name].all_values
    xs, scales, zero_points, gs = inputs(name)
    y, dx, *_ = jax.jit(jax.vmap(f, (0, None, None, 0)))(xs, scales[1], zero_points[1], gs)
    one = lambda x, g: f(jnp.asarray(x), scales[1], zero_points[1], jnp.asarray(g))[:2]
    want = stacked([one(x, g) for x, g in zip(xs, gs, strict=True)])
    assert_same_bits(y, want[0])
    assert_same_bits(dx, want[1])


@pytest.mark.parametrize("name", ["weights", "4 bits, affine, half away"])
def test_per_channel_is_vmap_of_per_tensor_and_a_loop(name):
    spec = SPECS[name].spec
    one = Route(QuantSpec(bits=spec.bits, symmetric=spec.symmetric, rounding=spec.rounding), ())
    over_channels = jax.vmap(one.all_values, (-1, 0, 0, -1), (-1, -1, 0, 0))
    vmapped, looped = [], []
    for x, scale, zero_point, g in each(name):
        y, dx, dscale, dzero_point = over_channels(x, scale[0], zero_point[0], g)
        vmapped.append((y, dx, dscale[None], dzero_point[None]))
        channels = [one.all_values(x[:, c], scale[0, c], zero_point[0, c], jnp.asarray(g[:, c])) for c in range(8)]
        y, dx, dscale, dzero_point = (np.stack(v, -1) for v in zip(*channels, strict=True))
        looped.append((y, dx, dscale[None], dzero_point[None]))
    check(name, vmapped)
    check(name, looped)


HALVES = zip(SPECS, itertools.cycle(["bfloat16", "float16"]))


@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(SPECS, ["float32"]), *HALVES])
def test_neighbours_in_one_jit(name, dtype):
    """The user's own operations before and after are not merged into the arithmetic, nor into that of the gradient."""
    route, rng = SPECS[name], np.random.default_rng(9)
    u, v, bias, g = (jnp.asarray(cast(rng.normal(size=(2048, 8)), oracle.FLOATS[dtype])) for _ in range(4))
    groups = tuple(n if n in (1, 2, 8) else 2048 for n in route.groups)
    scale, zero_point = np.full(groups, 0.0471, np.float32), np.full(groups, 3, np.float32)

    def values(x, g, scale, zero_point):
        y, dx, *_ = route.all_values(x, scale, zero_point, g)
        return y, y + bias, bias - y, dx, dx + bias

    want = values(u * v, g * v, scale, zero_point)
    got = jax.jit(lambda u, v, g, *qparams: values(u * v, g * v, *qparams))(u, v, g, scale, zero_point)
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


@given_qparams
def test_sums_beside_half_precision_neighbours(name):
    """The cotangent, too, is rounded to bfloat16 before it is summed."""
    route, rng = SPECS[name], np.random.default_rng(10)
    x, u, v = (jnp.asarray(cast(rng.normal(size=SHAPE), oracle.FLOATS["bfloat16"])) for _ in range(3))
    scale, zero_point = np.full(route.groups, 0.0471, np.float32), np.zeros(route.groups, np.float32)
    want = route.all_values(x, scale, zero_point, u * v)
    got = jax.jit(lambda x, u, v: route.all_values(x, scale, zero_point, u * v))(x, u, v)
    most = affine_oracle.total(np.abs(np.asarray(u * v, np.float32)), route.groups)
    for n, steps in ((2, 2.0**route.spec.bits), (3, 0.0471)):
        assert (np.abs(got[n] - want[n]) <= 1e-5 * steps * most).all()


def mesh(kind):
    return jax.make_mesh((4,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))


@every_spec
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_rows_sharded(name, kind):
    with_mesh = mesh(kind)
    rows, whole = NamedSharding(with_mesh, P("data")), NamedSharding(with_mesh, P())
    f, results = jax.jit(SPECS[name].all_values), []
    with jax.set_mesh(with_mesh):
        for a in each(name):
            results.append(f(*(jax.device_put(v, s) for v, s in zip(a, (rows, whole, whole, rows), strict=True))))
            assert len(results[-1][0].sharding.device_set) == 4
    check(name, results)


@pytest.mark.parametrize("name", ["weights", "16 bits, affine, every element", "4 bits, affine, half away"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("what", ["x", "qparams", "both"])
def test_channels_sharded(name, kind, what):
    """Tensor parallel: the channels of x, of the qparams or of both are sharded."""
    with_mesh = mesh(kind)
    columns, whole = NamedSharding(with_mesh, P(None, "data")), NamedSharding(with_mesh, P())
    of_x, of_qparams = (columns if what in (v, "both") else whole for v in ("x", "qparams"))
    route, results, sets = SPECS[name], [], (1, 2)
    call, all_values = jax.jit(route.call), jax.jit(route.all_values)
    with jax.set_mesh(with_mesh):
        for *a, g in each(name, sets):
            a = [jax.device_put(v, s) for v, s in zip(a, (of_x, of_qparams, of_qparams), strict=True)]
            y = call(*a)
            results.append(all_values(*a, jax.device_put(g, y.sharding)))
            assert_same_bits(results[-1][0], y)
    check(name, results, sets)


@pytest.mark.parametrize("name", ["weights", "activations, unsigned, half up", "4 bits, affine, half away"])
def test_shard_map(name):
    """Replicated qparams: their gradients are summed over the shards of x."""
    sharded = jax.shard_map(
        SPECS[name].all_values,
        mesh=mesh("Auto"),
        in_specs=(P("data"), P(), P(), P("data")),
        out_specs=(P("data"), P("data"), P(), P()),
    )
    check(name, [jax.jit(sharded)(*a) for a in each(name)])


def test_shard_map_of_noise_and_of_ranges_is_that_of_each_shard():
    route = SPECS["stochastic"]
    (x, scale, zero_point, _), split = each("stochastic", (2,))[0], functools.partial(jax.shard_map, mesh=mesh("Auto"))
    rows = split(route.call, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    got = jax.jit(rows)(x, scale, zero_point)
    assert_same_bits(got, np.concatenate([route.call(jnp.asarray(v), scale, zero_point) for v in np.split(x, 4)]))
    from_data = split(lambda x: fake_quant(x, QuantSpec()), in_specs=P("data"), out_specs=P("data"))
    assert_same_bits(jax.jit(from_data)(x), np.concatenate([fake_quant(v, QuantSpec()) for v in np.split(x, 4)]))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("at", [1, 3, 7])
def test_a_nan_on_one_shard_hides_nothing_from_the_range(symmetric, at):
    """XLA:CPU drops a NaN from a maximum over devices, and with it all that its shard holds."""
    spec = QuantSpec(symmetric=symmetric)
    x = np.ones(8, np.float32)
    x[at - 1], x[at] = 100, np.nan
    sharded = jax.device_put(x, NamedSharding(mesh("Auto"), P("data")))
    assert_same_bits(fit_qparams(sharded, spec).scale, fit_qparams(x, spec).scale)
    assert_same_bits(fake_quant(sharded, spec), fake_quant(x, spec))
