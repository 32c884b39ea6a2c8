# SPDX-License-Identifier: Apache-2.0
"""Gradients of fake_quant against their definition."""

import dataclasses
import functools
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
from lanes import by_default, cases, in_turn

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
SIZE = 37  # of most arrays here, so that they share programs
F = np.float32


def padded(*values, dtype=F):
    """Followed by zeros, which add nothing where the cotangent is padded too."""
    return np.concatenate([values, np.zeros(SIZE - len(values))]).astype(dtype)


@functools.partial(jax.jit, static_argnames="spec")
def values_and_gradients(x, spec, scale, zero_point, g, bits=None):
    """y, and dx, dscale, dzero_point for the cotangent `g`."""
    call = lambda x, scale, zero_point: fake_quant(x, spec, QParams(scale, zero_point), bits=bits)
    y, vjp = jax.vjp(call, x, scale, zero_point)
    return y, *vjp(g)


quantized = jax.jit(quantize, static_argnums=1)


def gradients(x, spec, scale, zero_point=0.0, g=None, bits=None):
    """dx, dscale, dzero_point, for a cotangent of all 1 if None."""
    g = np.ones_like(x) if g is None else g
    return values_and_gradients(x, spec, F(scale), F(zero_point), g, bits)[1:]


@by_default("PerBlock(axis=(0, 1), size=(4, 2))-half_away-float32")
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
                x = np.where(np.abs(x) < 1e30, x, F(np.nan))  # infinite quotients have no sum
            else:  # every product and every sum is exact
                x = rng.integers(-64, 64, SHAPE).astype(np.float32) / 4
            x = cast(x * affine_oracle.spread(scale, SHAPE), oracle.FLOATS[dtype])
            dx, dscale, dzero_point = map(np.asarray, gradients(x, spec, scale, zero_point, g))
            want = affine_oracle.gradients(g, x, scale, zero_point, spec)
            differ += differing(dx, want[0])
            assert_same_bits(dzero_point, want[2], "zero_point")
            assert (np.abs(dscale - want[1]) <= 2.5e-7 * want[3]).all()
            if not awkward:
                assert_same_bits(dscale + 0, want[1] + F(0), "scale")
    compared("NumPy oracle", "gradient of fake_quant", 8 * x.size, differ)
    assert differ == 0


@by_default("False-16", "False-8", "True-16", "True-8")
@pytest.mark.parametrize("bits", [2, 4, 8, 12, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_gradient_to_a_scale_is_rounded_once(symmetric, bits):
    """A scale for each value: against fractions, where the rounded quotient alone is 2 ** 15 times as far off."""
    spec = QuantSpec(bits=bits, symmetric=symmetric, granularity=PerChannel(-1))
    widest = dataclasses.replace(spec, bits=16)
    rng = np.random.default_rng(bits)
    scale = np.exp2(rng.uniform(-100, 100, (1, 500))).astype(np.float32)
    scale[0, :4] = 2.0**-126, 2.0**127, 1, np.nextafter(F(2), F(0))
    zero_point = np.rint(rng.uniform(spec.qmin, spec.qmax, scale.shape)).astype(np.float32) * (not symmetric)
    most = 1 if bits == 2 else spec.qmax - 1  # so that 2 ** 127 times it is finite
    levels = np.where(scale > 2.0**100, 0, rng.uniform(-most - zero_point, most - zero_point))
    x = oracle.flush((levels * scale).astype(np.float32))
    _, dscale, _ = gradients(x, widest, scale, zero_point, bits=None if bits == 16 else np.int32(bits))  # one is static
    for got, value, s in zip(*(np.ravel(v).tolist() for v in (dscale, x, scale)), strict=True):
        error = round(Fraction(value) / Fraction(s)) - Fraction(value) / Fraction(s)
        assert F(got) == F(float(error)), (value, s)


def test_the_gradient_to_a_scale_is_rounded_once_of_float64():
    spec, x, scale = QuantSpec(granularity=PerChannel(0)), np.array([0.7, -3.3, 1 + 1e-12]), F([0.75, 0.375, 1])
    with x64():
        dscale = jax.jit(jax.grad(lambda s: fake_quant(x, spec, QParams(s, np.zeros(3, F))).sum()))(scale)
    quotients = [Fraction(v) / Fraction(s) for v, s in zip(x.tolist(), scale.tolist(), strict=True)]
    assert_same_bits(dscale, F([float(round(v) - v) for v in quotients]))


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
        (np.nextafter(F(-4.25), F(-9)), 0, -8, -0.5),  # and its neighbour is not
        (3.5, 1, 0, 0),  # at the upper bound
        (np.nextafter(F(3.75), F(0)), 1, None, 0),  # 7.4999995 is rounded to the bound
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
    got = [float(v) for v in gradients(F(x), AFFINE4, 0.5)]
    if dscale is None:
        dscale = float(F(7) - F(x) / F(0.5))
    assert got == [dx, dscale, dzero_point]
    symmetric = QuantSpec(bits=4, narrow_range=False)
    assert [float(v) for v in gradients(F(x), symmetric, 0.5)] == [dx, dscale, 0]


@cases(
    ("bits", "signed"),
    itertools.product([2, 4, 8, 16], [True, False]),
    [(2, False), (8, True)],
)
def test_the_largest_weight_of_a_channel_keeps_its_gradient(bits, signed):
    """absmax / (absmax / 127) can be 127.00001: a mask tested before rounding would clip it."""
    spec = QuantSpec(bits=bits, signed=signed, granularity=PerChannel(-1))
    x = np.random.default_rng(2).normal(size=(64, 256)).astype(np.float32)
    x = x if signed else np.abs(x)

    @jax.jit
    def both(x):
        qparams = fit_qparams(x, spec)
        given = jax.grad(lambda x: fake_quant(x, spec, qparams).sum())(x)
        return qparams.scale, given, jax.grad(lambda x: fake_quant(x, spec).sum())(x)

    scale, *dx = map(np.asarray, both(x))
    assert bits == 2 or (np.abs(x).max(0) / scale[0] > spec.qmax).any()
    for got in dx:
        assert_same_bits(got, np.ones_like(x))


@cases("dtype", ["float32", "bfloat16", "float16"], ["bfloat16"])
def test_a_clipped_element_stops_nan_and_infinite_cotangents(dtype):
    of = functools.partial(padded, dtype=oracle.FLOATS[dtype])
    x, g = of(100.0, -100.0, 1.0, np.nan, 0.5), of(np.nan, np.inf, np.nan, np.inf, -np.inf)
    assert_same_bits(gradients(x, AFFINE4, 0.5, g=g)[0], of(0, 0, np.nan, 0, -np.inf))


@pytest.mark.parametrize(("off", "on"), [(3.4, 3.0), (3.5, 4.0), (300.0, 7.0), (-300.0, -8.0), (np.inf, 7.0)])
def test_a_zero_point_off_the_grid_is_limited_straight_through(off, on):
    x = np.linspace(-9, 9, SIZE, dtype=F)
    got, want = (values_and_gradients(x, AFFINE4, F(0.5), F(v), np.ones_like(x)) for v in (off, on))
    jax.tree.map(assert_same_bits, got, want)
    assert want[3].item() != 0
    assert quantized(x, AFFINE4, QParams(F(0.5), F(off))).zero_point.item() == on


@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, 1e-40, 2.0**-130, -np.inf])
def test_a_scale_that_is_no_scale_is_the_smallest_straight_through(scale):
    x, g = padded(1.0, -1.0, 0.0, 2.0**-126, 3 * 2.0**-126), padded(3, 1, 1, 1, 1)
    y, dx, dscale, dzero_point = values_and_gradients(x, AFFINE4, F(scale), F(0), g)
    assert_same_bits(y, values_and_gradients(x, AFFINE4, F(2.0**-126), F(0), g)[0])
    assert quantized(x, AFFINE4, QParams(F(scale), F(0))).scale.item() == 2.0**-126
    assert dx.tolist() == padded(0, 0, 1, 1, 1).tolist()
    assert (dscale.item(), dzero_point.item()) == (3 * 7 - 8, -(2.0**-126) * 4)


def test_a_nan_scale_gives_no_gradient_to_x():
    dx, dscale, dzero_point = gradients(padded(1.0, -1.0, 0.0), AFFINE4, np.nan)
    assert dx.tolist() == [0] * SIZE
    assert dscale.item() == 0
    assert np.isnan(dzero_point)


@by_default("PerChannel(-1)-True")
@cases(
    ("granularity", "symmetric"),
    itertools.product(GROUPS, [True, False]),
    in_turn([(granularity,) for granularity in GROUPS], [False, True]),
)
def test_a_range_from_the_data_gets_no_gradient(symmetric, granularity):
    spec = QuantSpec(bits=4, symmetric=symmetric, granularity=granularity)
    x, g = (np.random.default_rng(seed).normal(size=SHAPE).astype(F) for seed in (3, 4))

    @jax.jit
    def both(x, g):
        qparams = fit_qparams(x, spec)
        passes = [jax.vjp(f, x) for f in (lambda x: fake_quant(x, spec), lambda x: fake_quant(x, spec, qparams))]
        return [(y, vjp(g)) for y, vjp in passes]

    jax.tree.map(assert_same_bits, *both(x, g))


def test_an_outlier_that_is_not_finite_spares_its_neighbours():
    @jax.jit
    def pass_of(x):
        y, vjp = jax.vjp(lambda x: fake_quant(x, QuantSpec()), x)
        return y, *vjp(jnp.ones_like(x))

    y, dx = map(np.asarray, pass_of(np.array([0.5, np.inf, -1.0, np.nan], F)))
    alone = pass_of(np.array([0.5, 0, -1.0, 0], F))[0]
    assert_same_bits(y[::2], np.asarray(alone)[::2])
    assert dx.tolist() == [1, 0, 1, 0]


def test_second_order():
    """The gradient of the gradient is that of the straight-through gradient: 6 * y, not of the bare staircase."""
    w, spec, qparams = np.array([2.1, -0.7, 90.0], F), QuantSpec(), QParams(F(0.5), F(0))
    cube = lambda w: fake_quant(w, spec, qparams) ** 3
    from_data = lambda w: fake_quant(w, spec) ** 3

    @jax.jit
    def all_orders(w, two):
        of_given = fake_quant(w, spec, qparams), *(jax.vmap(f)(w) for f in (jax.grad(cube), jax.grad(jax.grad(cube))))
        return of_given, (jax.grad(jax.grad(from_data))(two), fake_quant(two, spec))

    (y, first, second), (of_data, y_of_data) = all_orders(w, F(2))
    assert first.tolist() == [12.0, 0.75, 0.0]
    assert second.tolist() == [12.0, -3.0, 0.0]
    assert second.tolist() == [*(6 * np.asarray(y))[:2].tolist(), 0.0]
    assert of_data == 6 * np.asarray(y_of_data)


def test_forward_mode_raises():
    f, x = lambda x: fake_quant(x, QuantSpec()), np.ones(3, F)
    for forward in (lambda x: jax.jvp(f, (x,), (x,)), jax.hessian(lambda x: f(x).sum())):
        with pytest.raises(TypeError, match="custom_vjp"):
            jax.jit(forward).lower(x)


@cases("dtype", ["float32", "bfloat16", "float16"], ["bfloat16"])
def test_scale_gradient(dtype):
    dtype, factors = oracle.FLOATS[dtype], (0.25, 2, jax.device_put(F(0.25)), F(3))
    x, g = np.array([[1.0, -2.0], [np.nan, 3.0]], dtype), np.array([[4.0, -8.0], [1.0, np.inf]], dtype)

    @jax.jit
    def by_factor(x, g):
        passes = [jax.vjp(lambda x, factor=factor: scale_gradient(x, factor), x) for factor in factors]
        to_factor = jax.grad(lambda f: scale_gradient(x, f)[0, 0].astype(F))(0.5)
        return [(y, *vjp(g)) for y, vjp in passes], to_factor

    got, to_factor = by_factor(x, g)
    for (y, dx), factor in zip(got, factors, strict=True):
        assert_same_bits(y, x)
        assert_same_bits(dx, g * np.asarray(factor).astype(dtype))
    assert to_factor == 0


def test_scale_gradient_is_refused_a_vector():
    with pytest.raises(ValueError, match="`factor` must have shape"):
        jax.eval_shape(scale_gradient, np.ones(3, F), np.ones(3, F))


def test_dequantize_trains_the_scale():
    spec = QuantSpec(symmetric=False, granularity=PerChannel(-1))
    qparams = QParams(np.array([[0.5, 2.0]], F), np.array([[3, -1]], F))
    q = jax.jit(lambda x: quantize(x, spec, qparams))(np.array([[1.0, -4.0], [2.5, 8.0]], F))
    dq = jax.jit(jax.grad(lambda q: dequantize(q).sum(), allow_int=True))(q)
    assert dq.scale.tolist() == [[2.0 + 5.0, -2.0 + 4.0]]
    assert [v.dtype for v in (dq.values, dq.zero_point)] == [jax.dtypes.float0] * 2


@cases(("start", "symmetric"), itertools.product([0.2, 1.5], [True, False]))
def test_learned_qparams_descend(symmetric, start):
    """From a scale too small and one too large, at 3 bits, towards the least error on a Gaussian off centre."""
    spec = QuantSpec(bits=3, symmetric=symmetric)
    x = np.random.default_rng(5).normal(0.2, 1, 4096).astype(F)

    @jax.jit
    def train(x, qparams):
        error = lambda qparams: jnp.mean((fake_quant(x, spec, qparams) - x) ** 2)

        def step(qparams, _):
            value, slope = jax.value_and_grad(error)(qparams)
            return QParams(qparams.scale - F(0.1) * slope.scale, qparams.zero_point - F(0.5) * slope.zero_point), value

        qparams, errors = jax.lax.scan(step, qparams, length=60)
        others = jax.lax.map(lambda s: error(QParams(s, qparams.zero_point)), np.linspace(0.1, 2, 96, dtype=F))
        return errors, others.min()

    errors, best = map(np.asarray, train(x, QParams(F(start), F(0))))
    assert errors[-1] < 0.7 * errors[0]
    assert errors[-1] < 1.1 * best


def test_a_shared_zero_point_or_value_meets_the_scale_of_its_own_example():
    """The product with the scale is of each example, not of the sums."""
    factors, cotangents, shared = (jax.device_put(np.array(v, F)) for v in ([1, 2], [10, 20], 1))
    scale_of = lambda s: jax.vmap(lambda f, c: scale_gradient(s, f) * c)(factors, cotangents)
    y, grad = jax.jit(lambda s: (scale_of(s), jax.grad(lambda s: scale_of(s).sum())(s)))(shared)
    assert y.tolist() == [10, 20]
    assert grad == 1 * 10 + 2 * 20
    x, scale = (jax.device_put(np.array(v, F)) for v in ([[9, -9, 0.3], [30, 1, 50]], [0.5, 2]))
    one = lambda x, s, zero_point: fake_quant(x, AFFINE4, QParams(s, zero_point)).sum()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P("data"), P("data"), P()), "out_specs": P("data")}
    sharded = jax.shard_map(lambda x, s, z: one(x[0], s[0], z)[None], mesh=mesh, **specs)

    @jax.jit
    def on_every_road(z):
        by_row = [jax.grad(one, 2)(*row, z) for row in zip(x, scale, strict=True)]
        together = jax.grad(lambda z: jax.vmap(one, (0, 0, None))(x, scale, z).sum())(z)
        return by_row, together, jax.grad(lambda z: sharded(x, scale, z).sum())(z)

    by_row, *got = on_every_road(shared)
    assert got == [sum(map(np.asarray, by_row))] * 2


def test_nan_gives_no_gradient_also_where_the_cotangent_is_nan():
    x, g = padded(np.nan, 1.2), padded(np.nan, 1)
    _, dscale, dzero_point = gradients(x, AFFINE4, 0.5, g=g)
    assert_same_bits(dscale, gradients(padded(0, 1.2), AFFINE4, 0.5, g=padded(0, 1))[1])
    assert dzero_point.item() == 0


@pytest.mark.slow
def test_a_gradient_is_sharded_as_its_argument_on_an_explicit_mesh():
    """One of an array made before the mesh is wherever the other argument is."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x, spec = jax.device_put(np.ones((8, 16), F)), QuantSpec(granularity=PerChannel(0))
    f = jax.grad(lambda x, s: fake_quant(x, spec, QParams(s, jnp.zeros_like(s))).sum(), (0, 1))
    on = lambda v, *axes: jax.device_put(v, jax.NamedSharding(mesh, P(*axes)))
    every = [[v, on(v, None, None), on(v, "data", None)] for v in (x, x[:, :1])]
    for args in itertools.product(*every):
        for of, v in zip(jax.eval_shape(f, *args), args, strict=True):
            assert jax.typeof(v).sharding.mesh.empty or of.sharding.spec == v.sharding.spec


@cases("where", [P(), P("data")], [])
def test_gradients_on_an_explicit_mesh_of_arrays_made_before_it(where):
    x = jax.device_put(np.random.default_rng(0).normal(size=(8, 16)).astype(F))
    spec = QuantSpec(granularity=PerChannel(0))
    f = jax.grad(lambda x: (fake_quant(x, spec) ** 2).sum())
    want = f(x)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        assert_same_bits(jax.jit(f)(x), want)
        assert_same_bits(jax.jit(f)(jax.device_put(x, jax.NamedSharding(mesh, where))), want)
