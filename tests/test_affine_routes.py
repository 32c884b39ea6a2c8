# SPDX-License-Identifier: Apache-2.0
"""One value everywhere: fake_quant and its gradients give the same bits on every road that JAX offers to them."""

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
from exact import assert_same_bits
from inputs import cast, hard_values
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import by_default, cases

from jaxquant import PerBlock, PerChannel, QParams, QuantSpec, dequantize, fake_quant, fit_qparams, quantize

pytestmark = pytest.mark.bits

SHAPE = 16, 8


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
    "stochastic": Route(STOCHASTIC, (1, 8), key=jax.device_put(np.uint32([0, 7]))),  # which compiles nothing
    "from data": Route(QuantSpec(**AFFINE), (), from_data=True),
    "from data, blocks, half up": Route(
        QuantSpec(bits=4, granularity=PerBlock(-1, 4), rounding="half_up", **AFFINE), (16, 2), from_data=True
    ),
}
SETS = 4
CHANNEL = "4 bits, affine, half away"
KINDS = "Auto", "Explicit"  # of the axes of a mesh
GIVEN = [name for name, route in SPECS.items() if not route.from_data]


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
    return stacked([SPECS[name].all_values(*jax.device_put(a)) for a in zip(*inputs(name), strict=True)])


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
    sets = each(name, (1, 2))
    return jax.jit(lambda *xs: [f(x, s, z, g) for (x, g), (_, s, z, _) in zip(xs, sets, strict=True)])(
        *((x, g) for x, _, _, g in sets)
    )


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


@by_default("4 bits, affine, half away-jit, constant qparams")
@cases(
    ("name", "route"),
    itertools.product(SPECS, ROUTES),
    [
        *itertools.product(["stochastic", "from data"], ["jit"]),
        ("4 bits, affine, half away", "jit, constant qparams"),
    ],
)
def test_routes(name, route):
    run, sets = ROUTES[route]
    check(name, list(run(SPECS[name].all_values, name)), sets)


@cases("name", SPECS)
def test_checkpoint(name):
    remat = jax.checkpoint(SPECS[name].call)

    @jax.jit
    def f(x, scale, zero_point, g):
        y, vjp = jax.vjp(remat, x, scale, zero_point)
        return y, *vjp(g)

    check(name, [f(*a) for a in each(name)])


@pytest.mark.slow
@cases("name", SPECS, ["from data"])
def test_vmap_over_x_alone(name):
    f = SPECS[name].all_values
    xs, scales, zero_points, gs = inputs(name)
    y, dx, *_ = jax.jit(jax.vmap(f, (0, None, None, 0)))(xs, scales[1], zero_points[1], gs)
    want = stacked([f(*jax.device_put((x, scales[1], zero_points[1], g)))[:2] for x, g in zip(xs, gs, strict=True)])
    assert_same_bits(y, want[0])
    assert_same_bits(dx, want[1])


@cases("name", ["weights", CHANNEL], [CHANNEL])
def test_per_channel_is_vmap_of_per_tensor_and_a_loop(name):
    spec = SPECS[name].spec
    one = Route(QuantSpec(bits=spec.bits, symmetric=spec.symmetric, rounding=spec.rounding), ())
    over_channels = jax.jit(jax.vmap(one.all_values, (-1, 0, 0, -1), (-1, -1, 0, 0)))
    channel, vmapped, looped = jax.jit(one.all_values), [], []
    for x, scale, zero_point, g in each(name):
        y, dx, dscale, dzero_point = map(np.asarray, over_channels(x, scale[0], zero_point[0], g))
        vmapped.append((y, dx, dscale[None], dzero_point[None]))
        channels = [channel(x[:, c], scale[0, c], zero_point[0, c], g[:, c]) for c in range(8)]
        y, dx, dscale, dzero_point = (np.stack(v, -1) for v in zip(*channels, strict=True))
        looped.append((y, dx, dscale[None], dzero_point[None]))
    check(name, vmapped)
    check(name, looped)


@cases(
    ("name", "dtype"),
    itertools.product(SPECS, ["float32", "bfloat16", "float16"]),
)
def test_neighbours_in_one_jit(name, dtype):
    """The user's own operations before and after are not merged into the arithmetic, nor into that of the gradient."""
    route, rng = SPECS[name], np.random.default_rng(9)
    u, v, bias, g = (cast(rng.normal(size=(2048, 8)), oracle.FLOATS[dtype]) for _ in range(4))
    groups = tuple(n if n in (1, 2, 8) else 2048 for n in route.groups)
    qparams = np.full(groups, 0.0471, np.float32), np.full(groups, 3, np.float32)
    after = lambda y, dx: (y, y + bias, bias - y, dx, dx + bias)
    want = map(np.asarray, route.all_values(*jax.device_put((u * v, *qparams, g * v)))[:2])
    got = jax.jit(lambda u, v, g, *qparams: after(*route.all_values(u * v, *qparams, g * v)[:2]))(u, v, g, *qparams)
    for one, other in zip(got, after(*want), strict=True):
        assert_same_bits(one, other)


@pytest.mark.slow
@cases("name", GIVEN, [CHANNEL])
def test_sums_beside_half_precision_neighbours(name):
    """The cotangent, too, is rounded to bfloat16 before it is summed."""
    route, rng = SPECS[name], np.random.default_rng(10)
    x, u, v = (cast(rng.normal(size=SHAPE), oracle.FLOATS["bfloat16"]) for _ in range(3))
    qparams = np.full(route.groups, 0.0471, np.float32), np.zeros(route.groups, np.float32)
    want = [np.asarray(leaf) for leaf in route.all_values(*jax.device_put((x, *qparams, u * v)))]
    got = jax.jit(lambda x, u, v: route.all_values(x, *qparams, u * v))(x, u, v)
    most = affine_oracle.total(np.abs((u * v).astype(np.float32)), route.groups)
    for n, steps in ((2, 2.0**route.spec.bits), (3, 0.0471)):
        assert (np.abs(got[n] - want[n]) <= 1e-5 * steps * most).all()


def mesh(kind):
    return jax.make_mesh((4,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))


@cases(
    ("name", "kind"),
    itertools.product(SPECS, KINDS),
)
def test_rows_sharded(name, kind):
    with_mesh = mesh(kind)
    rows, whole = NamedSharding(with_mesh, P("data")), NamedSharding(with_mesh, P())
    f, results = jax.jit(SPECS[name].all_values), []
    with jax.set_mesh(with_mesh):
        for a in each(name):
            results.append(f(*(jax.device_put(v, s) for v, s in zip(a, (rows, whole, whole, rows), strict=True))))
            assert len(results[-1][0].sharding.device_set) == 4
    check(name, results)


@cases(
    ("name", "what", "kind"),
    itertools.product(["weights", "16 bits, affine, every element", CHANNEL], ["x", "qparams", "both"], KINDS),
)
def test_channels_sharded(name, what, kind):
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


@cases("name", ["weights", "activations, unsigned, half up", CHANNEL], [CHANNEL])
def test_shard_map(name):
    """Replicated qparams: their gradients are summed over the shards of x."""
    sharded = jax.shard_map(
        SPECS[name].all_values,
        mesh=mesh("Auto"),
        in_specs=(P("data"), P(), P(), P("data")),
        out_specs=(P("data"), P("data"), P(), P()),
    )
    check(name, [jax.jit(sharded)(*a) for a in each(name)])


@pytest.mark.slow
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
    x = np.ones(8, np.float32)
    x[at - 1], x[at] = 100, np.nan
    qparams = affine_oracle.qparams_from_range(np.float32(0), np.float32(100), QuantSpec(symmetric=symmetric))
    scale, y = of_data(jax.device_put(x, NamedSharding(mesh("Auto"), P("data"))), QuantSpec(symmetric=symmetric))
    assert_same_bits(scale, qparams[0])
    assert_same_bits(y, affine_oracle.fake_quant(x, *qparams, QuantSpec(symmetric=symmetric)))


@functools.partial(jax.jit, static_argnums=1)
def of_data(x, spec):
    return fit_qparams(x, spec).scale, fake_quant(x, spec)


CONSTANT = {  # in NumPy or in JAX
    "y + c": lambda y, x, of: y + 0.37,
    "c - y": lambda y, x, of: 0.37 - y,
    "x - y": lambda y, x, of: x - y,
    "2 x - y": lambda y, x, of: x * 2 - y,
    "where(y) + c": lambda y, x, of: of.where(x > 0, y, 0) + 0.37,
    "concatenate(y) + c": lambda y, x, of: of.concatenate([y, x]) + 0.37,
}


@functools.cache
def data_and_values(symmetric):
    """x, and of it fake_quant and dequantize(quantize), each for itself."""
    spec = QuantSpec(symmetric=symmetric)
    x = np.random.default_rng(0).normal(size=4096).astype(jax.dtypes.canonicalize_dtype(float))
    return x, [
        np.asarray(f(jax.device_put(x), spec)) for f in (fake_quant, lambda x, spec: dequantize(quantize(x, spec)))
    ]


@pytest.mark.slow
@cases(
    ("after", "symmetric"),
    itertools.product(CONSTANT, [True, False]),
    [(next(iter(CONSTANT)), False)],
)
def test_the_sum_with_a_constant_behind_an_op_is_not_contracted(after, symmetric):
    """LLVM moves the addition of a constant into a select, and past it to a product."""
    x, values = data_and_values(symmetric)
    spec, after = QuantSpec(symmetric=symmetric), CONSTANT[after]
    both = jax.jit(lambda x: [after(y, x, jnp) for y in (fake_quant(x, spec), dequantize(quantize(x, spec)))])
    for got, y in zip(both(x), values, strict=True):
        assert_same_bits(got, after(y, x, np))


TWO = QuantSpec(), QuantSpec(symmetric=False, granularity=PerChannel(-1))


@cases(("given", "spec"), itertools.product([False, True], TWO), [(True, TWO[0])])
def test_constants_of_a_program_have_the_levels_of_arguments(spec, given):
    """Among the values are ties, which a reciprocal moves."""
    steps = np.rint(np.random.default_rng(2).normal(size=(512, 16)) * 40)
    x = jax.device_put(steps.astype(np.float32) * np.float32(0.035))
    qparams = fit_qparams(x, spec) if given else None
    both = lambda: (quantize(x, spec, qparams).values, fake_quant(x, spec, qparams))
    jax.tree.map(assert_same_bits, jax.jit(both)(), both())
