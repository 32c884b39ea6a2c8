# SPDX-License-Identifier: Apache-2.0
"""Gradients of fake_quant against their definition."""

import itertools
from fractions import Fraction

import affine_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from exact import assert_same_bits, differing, x64
from inputs import cast, hard_values
from jax.sharding import PartitionSpec as P
from lanes import cases, in_turn

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

pytestmark = pytest.mark.bits

SHAPE = 16, 8
GROUPS = {PerTensor(): (), PerChannel(-1): (1, 8), PerBlock((0, 1), (4, 2)): (4, 4)}
float32 = lambda *values: jnp.asarray(values, jnp.float32)


def gradients(x, spec, scale, zero_point=0.0, g=None, **options):
    """dx, dscale, dzero_point for the cotangent `g`, all 1 if None."""
    call = lambda x, scale, zero_point: fake_quant(x, spec, QParams(scale, zero_point), **options)
    y, vjp = jax.vjp(call, *map(jnp.asarray, (x, scale, zero_point)))
    return vjp(jnp.ones_like(y) if g is None else jnp.asarray(g))


@cases(
    ("granularity", "rounding", "dtype"),
    itertools.product(GROUPS, ["half_even", "half_up", "half_away"], ["float32", "bfloat16", "float16", "float64"]),
    [
        *zip(GROUPS, ["half_even", "half_up", "half_away"], ["float32", "bfloat16", "float32"], strict=True),
    ],
)
def test_gradients_are_the_oracle(granularity, rounding, dtype, compared):
    symmetric = rounding == "half_even"
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
            assert (np.abs(dscale - want[1]) <= 2.5e-7 * want[3]).all()
            if not awkward:
                assert_same_bits(dscale + 0, want[1] + np.float32(0), "scale")
    compared("NumPy oracle", "gradient of fake_quant", 8 * x.size, differ)
    assert differ == 0


@pytest.mark.parametrize("bits", [2, 4, 8, 12, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_gradient_to_a_scale_is_rounded_once(symmetric, bits):
    """A scale for each value: against fractions, where the rounded quotient alone is 2 ** 15 times as far off."""
    spec = QuantSpec(bits=bits, symmetric=symmetric, granularity=PerChannel(-1))
    rng = np.random.default_rng(bits)
    scale = np.exp2(rng.uniform(-100, 100, (1, 500))).astype(np.float32)
    scale[0, :4] = 2.0**-126, 2.0**127, 1, np.nextafter(np.float32(2), np.float32(0))
    zero_point = np.rint(rng.uniform(spec.qmin, spec.qmax, scale.shape)).astype(np.float32) * (not symmetric)
    most = 1 if bits == 2 else spec.qmax - 1  # so that 2 ** 127 times it is finite
    levels = np.where(scale > 2.0**100, 0, rng.uniform(-most - zero_point, most - zero_point))
    x = oracle.flush((levels * scale).astype(np.float32))
    _, dscale, _ = gradients(x, spec, scale, zero_point)
    for got, value, s in zip(*(np.ravel(v).tolist() for v in (dscale, x, scale)), strict=True):
        error = round(Fraction(value) / Fraction(s)) - Fraction(value) / Fraction(s)
        assert np.float32(got) == np.float32(float(error)), (value, s)


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


@cases(
    ("bits", "signed"),
    itertools.product([2, 4, 8, 16], [True, False]),
    [(2, False), (8, True), (16, True)],
)
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


@cases(
    ("granularity", "symmetric"),
    itertools.product(GROUPS, [True, False]),
    in_turn([(granularity,) for granularity in GROUPS], [False, True]),
)
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


@cases(("start", "symmetric"), itertools.product([0.2, 1.5], [True, False]), [(0.2, False), (1.5, True)])
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


def test_a_shared_zero_point_or_value_meets_the_scale_of_its_own_example():
    """The product with the scale is of each example, not of the sums."""
    scale_of = lambda f, c: scale_gradient(shared, f) * c
    of_factors = lambda s: jax.vmap(lambda f, c: scale_gradient(s, f) * c)(float32(1, 2), float32(10, 20)).sum()
    grad, shared = jax.jit(jax.grad(of_factors)), jnp.float32(1)
    assert jax.vmap(scale_of)(float32(1, 2), float32(10, 20)).tolist() == [10, 20]
    assert grad(shared) == 1 * 10 + 2 * 20
    x, scale = jnp.stack([float32(9, -9, 0.3), float32(30, 1, 50)]), float32(0.5, 2)
    one = lambda x, s, zero_point: fake_quant(x, AFFINE4, QParams(s, zero_point)).sum()
    by_row = jax.jit(jax.grad(one, 2))
    want = sum(by_row(*row, shared) for row in zip(x, scale, strict=True))
    assert jax.jit(jax.grad(lambda z: jax.vmap(one, (0, 0, None))(x, scale, z).sum()))(shared) == want
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P("data"), P("data"), P()), "out_specs": P("data")}
    sharded = jax.shard_map(lambda x, s, z: one(x[0], s[0], z)[None], mesh=mesh, **specs)
    assert jax.jit(jax.grad(lambda z: sharded(x, scale, z).sum()))(shared) == want


def test_nan_gives_no_gradient_also_where_the_cotangent_is_nan():
    x, g = float32(np.nan, 1.2), float32(np.nan, 1)
    _, dscale, dzero_point = gradients(x, AFFINE4, 0.5, g=g)
    assert dscale == gradients(x[1:], AFFINE4, 0.5)[1]
    assert dzero_point == 0


@cases("where", [P(), P("data")], [])
def test_gradients_on_an_explicit_mesh_of_arrays_made_before_it(where):
    x, spec = jax.random.normal(jax.random.key(0), (8, 16)), QuantSpec(granularity=PerChannel(0))
    f = jax.grad(lambda x: (fake_quant(x, spec) ** 2).sum())
    want = f(x)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        assert_same_bits(jax.jit(f)(x), want)
        assert_same_bits(jax.jit(f)(jax.device_put(x, jax.NamedSharding(mesh, where))), want)
