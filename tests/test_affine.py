# SPDX-License-Identifier: Apache-2.0
"""quantize, dequantize and fake_quant: values against the oracle, integers as a pytree, traced bits, noise, packing."""

import collections
import dataclasses
import functools
import itertools

import affine_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from exact import assert_same_bits, differing, x64
from inputs import cast, hard_ranges, hard_values
from lanes import by_default, cases, in_turn

from jaxquant import (
    PerBlock,
    PerChannel,
    PerTensor,
    QArray,
    QParams,
    QuantSpec,
    Range,
    dequantize,
    dot_general,
    fake_quant,
    fit_qparams,
    pack,
    qparams_from_range,
    quantize,
    unpack,
)

pytestmark = pytest.mark.bits

JUDGE = "NumPy oracle"
SHAPE = 4, 6, 192
BITS = 2, 3, 4, 8, 12, 16
ROUNDINGS = "half_even", "half_up", "half_away"
GRANULARITIES = PerTensor(), PerChannel(-1), PerBlock(-1, 8), PerChannel((0, -2)), PerBlock((-2, -1), (3, 96))
SCALE_KINDS = 6
F = np.float32


@functools.partial(jax.jit, static_argnames="spec")
def in_one(x, spec, qparams=None, key=None):
    """fake_quant, quantize, and dequantize of its integers, by one program of each spec and shape."""
    q = quantize(x, spec, qparams, key=key)
    return fake_quant(x, spec, qparams, key=key), q, dequantize(q)


def spec_grid():
    """Every bits, signed and symmetric in float32 and one more dtype; the rest in turn, without a common period."""
    others = itertools.cycle(["bfloat16", "float64", "float16", "bfloat16", "float16"])
    for i, (bits, signed, symmetric, wide) in enumerate(itertools.product(BITS, *[(True, False)] * 3)):
        spec = QuantSpec(
            bits=bits,
            signed=signed,
            symmetric=symmetric,
            narrow_range=i % 7 < 3 and (signed or not symmetric),
            granularity=GRANULARITIES[i % 5],
            rounding=ROUNDINGS[i % 3],
        )
        yield "float32" if wide else next(others), spec


def qparams_shape(spec, shape):
    kind = spec.granularity
    if isinstance(kind, PerTensor):
        return ()
    axes = np.atleast_1d(kind.axis) % len(shape)
    if isinstance(kind, PerBlock):
        sizes = dict(zip(axes, np.atleast_1d(kind.size), strict=True))
        return tuple(int(n // sizes.get(i, 1)) for i, n in enumerate(shape))
    return tuple(n if i in axes else 1 for i, n in enumerate(shape))


def hard_qparams(rng, spec, shape, first):
    """Awkward scales, powers of two, the smallest, large ones, what must be limited; zero points on and off grid."""
    groups = qparams_shape(spec, shape)
    n = int(np.prod(groups))
    awkward, power = np.exp(rng.normal(0, 2, n)), 2.0 ** rng.integers(-12, 12, n)
    kind = (first + np.arange(n)) % SCALE_KINDS
    scale = np.choose(kind, [awkward, power, np.full(n, 2.0**-126), awkward * 1e30, -power * (n % 2), awkward * 1e-3])
    qmin, qmax = affine_oracle.grid(spec)
    zero_point = rng.integers(qmin - 1, qmax + 2, n) + np.where(kind == 1, 0.5, np.where(kind == 5, 0.4, 0))
    return scale.astype(np.float32).reshape(groups), zero_point.astype(np.float32).reshape(groups)


def hard_x(rng, spec, scale, dtype, shape=SHAPE):
    """Ties between levels of each group and their neighbours, specials, random bits."""
    steps = 2**spec.bits
    x = hard_values(rng, int(np.prod(shape)), -steps, steps, 2 * steps).reshape(shape)
    with np.errstate(all="ignore"):
        x = x * affine_oracle.spread(np.float64(affine_oracle.used(scale, scale, spec)[0]), shape)
    return cast(x, oracle.FLOATS[dtype])


GRID = list(spec_grid())


# By default every option at least once.
@cases(("dtype", "spec"), GRID, [GRID[i] for i in (6, 23)])
def test_values(dtype, spec, compared):
    rng = np.random.default_rng([spec.bits, spec.signed, spec.symmetric, len(dtype)])
    differ = collections.Counter()
    with x64(dtype == "float64"):
        for first in range(SCALE_KINDS):
            scale, zero_point = hard_qparams(rng, spec, SHAPE, first)
            x = hard_x(rng, spec, scale, dtype)
            y, q, back = in_one(x, spec, QParams(scale, zero_point))
            used, number = affine_oracle.used(scale, zero_point, spec), ~np.isnan(x)
            assert_same_bits(q.scale, used[0])
            assert_same_bits(q.zero_point, used[1].astype(affine_oracle.integers_of(spec)))
            differ["fake_quant"] += differing(y, affine_oracle.fake_quant(x, scale, zero_point, spec))
            differ["quantize"] += differing(q.values, affine_oracle.quantize(x, scale, zero_point, spec))
            differ["back"] += differing(np.asarray(back)[number], np.asarray(y)[number])
    values = SCALE_KINDS * x.size
    compared(JUDGE, "fake_quant", values, differ["fake_quant"])
    compared(JUDGE, "quantize", values, differ["quantize"])
    compared("fake_quant", "dequantize(quantize)", values, differ["back"])
    assert differ == {"fake_quant": 0, "quantize": 0, "back": 0}


AFFINE = [QuantSpec(signed=False, symmetric=False), QuantSpec(symmetric=False)]
SPECIAL = {
    QuantSpec(): ([-127, 127, -127, 0, 0, 2], [np.nan, 63.5, -63.5, 0, 0, 1]),
    AFFINE[0]: ([0, 255, 0, 10, 10, 12], [np.nan, 122.5, -5, 0, 0, 1]),
}


@by_default("bfloat16-QuantSpec(bits=8, signed=False, symmetric=False)")
@cases(
    ("dtype", "spec"),
    itertools.product(oracle.FLOATS, SPECIAL),
    [("float32", QuantSpec()), ("float32", AFFINE[0]), ("bfloat16", AFFINE[0])],
)
def test_what_cannot_be_an_integer(dtype, spec):
    """NaN stays NaN in float and is qmin in integers; infinities saturate; a zero is +0; each for itself alone."""
    values, real = SPECIAL[spec]
    with x64(dtype == "float64"):
        x = np.array([np.nan, np.inf, -np.inf, -0.0, -0.2, 1.0], oracle.FLOATS[dtype])
        y, q, _ = in_one(x, spec, QParams(F(0.5), F(10)))
    assert q.values.tolist() == values
    assert_same_bits(y, np.asarray(real).astype(x.dtype))


@cases("spec", [QuantSpec(), *AFFINE], [QuantSpec(), AFFINE[0]])
def test_nan_qparams_give_nan_and_never_a_number(spec):
    x = np.linspace(-1, 1, 6, dtype=F)
    for scale, zero_point in ((np.nan, 0), (0.1, np.nan)):
        y, _, back = in_one(x, spec, QParams(F(scale), F(zero_point)))
        is_nan = bool(np.isnan(scale)) or not spec.symmetric
        assert np.isnan(y).tolist() == np.isnan(back).tolist() == [is_nan] * 6


KINDS = list(itertools.product((True, False), repeat=2))


@cases(
    ("signed", "symmetric", "bits"),
    [(*kind, bits) for kind in KINDS for bits in (2, 8, 16)],
    in_turn(KINDS, [8, 2, 16]),
)
def test_qparams_of_a_range(bits, signed, symmetric):
    spec = QuantSpec(bits=bits, signed=signed, symmetric=symmetric)
    low, high = hard_ranges(np.random.default_rng(bits), 1024, 2**bits - 1)
    odd = np.array(
        [0, -0.0, 1e-45, 1e-38, -1e-38, 2e-38, -1e-37, 1, -1, 3e38, -3e38, np.inf, -np.inf, np.nan], np.float32
    )
    low, high = (np.concatenate(v) for v in ((low, np.repeat(odd, odd.size)), (high, np.tile(odd, odd.size))))
    got = [np.asarray(v) for v in qparams_from_range(jax.device_put(Range(low, high)), spec)]
    for value, want in zip(got, affine_oracle.qparams_from_range(low, high, spec), strict=True):
        assert np.isfinite(value).all()
        assert_same_bits(value + 0, want + F(0))  # the sign of a zero point 0 says nothing
    assert (got[0] >= affine_oracle.TINY).all()


@by_default("PerBlock(axis=-1, size=8)-True")
@cases(
    ("granularity", "symmetric"),
    itertools.product(GRANULARITIES, [True, False]),
    in_turn([(granularity,) for granularity in GRANULARITIES[::2]], [False, True]),
)
def test_ranges_from_the_data(granularity, symmetric):
    """qparams=None is min-max of each group, NaN and infinities left out."""
    spec = QuantSpec(bits=4, symmetric=symmetric, granularity=granularity)
    x = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    x[0, 0, :3] = np.nan, np.inf, -np.inf
    groups = qparams_shape(spec, SHAPE)
    padded = (1,) * (len(SHAPE) - len(groups)) + groups
    parts = [part for g, n in zip(padded, SHAPE, strict=True) for part in (g, n // g)]
    finite = np.where(np.isfinite(x), x, 0).reshape(parts)
    low, high = (f(finite, (1, 3, 5)).reshape(groups) for f in (np.min, np.max))
    qparams = affine_oracle.qparams_from_range(low, high, spec)
    y, q, _ = in_one(x, spec)
    assert_same_bits(y, affine_oracle.fake_quant(x, *qparams, spec))
    assert_same_bits(q.values, affine_oracle.quantize(x, *qparams, spec))


OPTIONS = [
    {"narrow_range": False},
    {"signed": True},
    {"signed": False, "rounding": "half_up"},
    {"symmetric": False},
    {"signed": False, "symmetric": False, "narrow_range": True},
]


@cases("options", OPTIONS)
def test_traced_bits_are_the_static_spec_of_those_bits(options):
    rng, traces = np.random.default_rng(2), []
    widest = QuantSpec(bits=16, **options)
    x = hard_values(rng, 1024, -1.3, 2.1, 15)

    @jax.jit
    def traced(x, bits):
        traces.append(bits)
        qparams = fit_qparams(x, widest, bits=bits)
        given = QParams(jnp.float32(0.07), jnp.float32(1))
        y, vjp = jax.vjp(lambda x: fake_quant(x, widest, given, bits=bits), x)
        return qparams, fake_quant(x, widest, bits=bits), y, vjp(jnp.ones_like(x))[0]

    for bits in range(2, 17):
        spec = QuantSpec(bits=bits, **options)
        scale, zero_point = affine_oracle.qparams_from_range(*ends_of(x), spec)
        dx, *_ = affine_oracle.gradients(np.ones_like(x), x, 0.07, 1.0, spec)
        want = (
            QParams(scale, zero_point),
            affine_oracle.fake_quant(x, scale, zero_point, spec),
            affine_oracle.fake_quant(x, 0.07, 1.0, spec),
            dx,
        )
        jax.tree.map(assert_same_bits, traced(x, jnp.int32(bits)), want)
        assert_same_bits(fake_quant(x, widest, bits=bits), want[1], "concrete bits=")
    jax.tree.map(assert_same_bits, fit_qparams(x, spec), want[0])
    assert len(traces) == 1


def ends_of(x):
    finite = x[np.isfinite(x)]
    return finite.min(), finite.max()


def stochastic(bits=8, **options):
    return QuantSpec(bits=bits, rounding="stochastic", **options)


NOISY = stochastic(4), stochastic(symmetric=False, granularity=PerChannel(-1))


@cases(
    ("spec", "dtype"),
    itertools.product(NOISY, ["float32", "bfloat16"]),
    [(NOISY[0], "bfloat16")],
)
def test_stochastic_rounding_is_the_oracle_with_the_noise_of_the_key(spec, dtype, compared):
    rng, key = np.random.default_rng(3), jax.random.key(3)
    noise = np.asarray(jax.random.uniform(key, SHAPE, F))
    differ = 0
    for first in range(SCALE_KINDS):
        scale, zero_point = hard_qparams(rng, spec, SHAPE, first)
        x = hard_x(rng, spec, scale, dtype)
        y, q, _ = in_one(x, spec, QParams(scale, zero_point), key)
        differ += differing(y, affine_oracle.fake_quant(x, scale, zero_point, spec, noise))
        differ += differing(q.values, affine_oracle.quantize(x, scale, zero_point, spec, noise))
    compared(JUDGE, "fake_quant, quantize, stochastic", 2 * SCALE_KINDS * x.size, differ)
    assert differ == 0


@pytest.mark.slow
def test_stochastic_rounding_is_unbiased():
    fractions = np.array([2.0**-10, 0.01, 0.25, 0.5, 0.9, 0.999], np.float32)
    x = np.concatenate([fractions, 3 + fractions, -fractions, -3 - fractions])
    n = 2**18
    f = jax.jit(lambda key: fake_quant(jnp.broadcast_to(x, (n, x.size)), stochastic(), QParams(1.0, 0.0), key=key))
    mean = np.asarray(f(jax.random.key(4)), np.float64).mean(0)
    fraction = np.float64(x) - np.floor(x)
    assert (np.abs(mean - x) <= 5 * np.sqrt(fraction * (1 - fraction) / n)).all(), mean - x


@pytest.mark.slow
def test_stochastic_rounding_over_keys_is_unbiased_and_by_one_level():
    x = np.array([2.0**-12, 0.3, -0.3, -7.8, 100.1], F)
    call = lambda key: fake_quant(x, stochastic(), QParams(1.0, 0.0), key=key)
    each = jax.jit(lambda key: jax.vmap(call)(jax.random.split(key, 2**16)))
    y = np.asarray(each(jax.random.key(5)), np.float64)
    fraction = np.float64(x - np.floor(x))
    assert (np.abs(y.mean(0) - x) <= 5 * np.sqrt(fraction * (1 - fraction) / 2**16)).all()
    assert_same_bits(np.unique(y), np.unique([*np.floor(x), *np.ceil(x)]).astype(np.float64))


@pytest.mark.slow
def test_stochastic_rounding_moves_no_integer():
    x = np.array([*range(-127, 128), np.nan, np.inf, -np.inf], F)
    each = lambda seed: in_one(x, stochastic(), QParams(1.0, 0.0), jax.random.key(seed))
    y, q, _ = jax.jit(jax.vmap(each))(np.arange(20))
    assert_same_bits(y, np.stack([np.clip(x, -127, 127)] * 20))
    assert q.values.tolist() == [[*range(-127, 128), -127, 127, -127]] * 20


@pytest.mark.parametrize("f", [fake_quant, quantize])
def test_a_key_is_needed_for_stochastic_rounding_alone(f):
    with pytest.raises(ValueError, match="`key` must be a PRNG key, got None"):
        jax.eval_shape(lambda: f(np.ones(3, F), stochastic()))
    with pytest.raises(ValueError, match="`key` is for stochastic rounding alone"):
        jax.eval_shape(lambda: f(np.ones(3, F), QuantSpec(), key=jax.random.key(0)))


@cases("dtype", oracle.FLOATS)
def test_a_qarray_is_a_pytree(dtype):
    spec = QuantSpec(bits=4, symmetric=False, granularity=PerChannel(-1))
    with x64(dtype == "float64"):
        x = np.random.default_rng(6).normal(size=(5, 3)).astype(oracle.FLOATS[dtype])
        y, q, _ = in_one(x, spec)
        leaves, structure = jax.tree.flatten(q)
        assert [(v.shape, v.dtype) for v in leaves] == [((5, 3), jnp.int8), ((1, 3), jnp.float32), ((1, 3), jnp.int8)]
        for again in (jax.tree.unflatten(structure, leaves), jax.tree.map(lambda v: v, q), jax.jit(lambda q: q)(q)):
            assert isinstance(again, QArray)
            assert (again.spec, again.dtype) == (spec, x.dtype)
            jax.tree.map(assert_same_bits, again, q)
            assert dequantize(again).dtype == x.dtype
            assert_same_bits(dequantize(again), y)
        assert (q.shape, q.ndim, q.size, q.nbytes) == ((5, 3), 2, 15, 15 + 3 * 4 + 3)
        abstract = jax.eval_shape(lambda x: quantize(x, spec), x)
        assert jax.tree.structure(abstract) == structure
        assert [(v.shape, v.dtype) for v in jax.tree.leaves(abstract)] == [(v.shape, v.dtype) for v in leaves]
        assert (abstract.shape, abstract.nbytes) == (q.shape, q.nbytes)


WIDTHS = list(itertools.product((2, 8, 9, 16), (True, False)))


@pytest.mark.parametrize(("bits", "signed"), WIDTHS)
def test_integers_are_as_wide_as_the_spec_says(bits, signed):
    spec = QuantSpec(bits=bits, signed=signed, symmetric=False)
    q = jax.eval_shape(lambda: quantize(np.zeros(9, F), spec))
    assert q.values.dtype == q.zero_point.dtype == q.spec.dtype == affine_oracle.integers_of(spec)


@cases(("bits", "signed"), WIDTHS, [(9, False)])
def test_integers_reach_both_ends_of_the_grid(bits, signed):
    spec = QuantSpec(bits=bits, signed=signed, symmetric=False)
    values = np.asarray(in_one(np.linspace(0, 1, 9, dtype=F), spec)[1].values)
    assert (values.min(), values.max()) == affine_oracle.grid(spec)


@cases(
    ("granularity", "signed"),
    itertools.product([PerTensor(), PerChannel(-1)], [True, False]),
    [(PerChannel(-1), False)],
)
def test_relu_in_integers(granularity, signed):
    x = np.random.default_rng(7).normal(0.3, 1, (64, 3)).astype(F)
    _, q, back = in_one(x, QuantSpec(signed=signed, symmetric=False, granularity=granularity))
    rectified = dataclasses.replace(q, values=np.maximum(q.values, q.zero_point))
    assert_same_bits(dequantize(rectified), np.maximum(back, 0))


@cases("symmetric", [True, False])
def test_a_stack_is_scanned_and_vmapped(symmetric):
    spec = QuantSpec(bits=4, symmetric=symmetric, granularity=PerChannel((0, -1)))
    x = np.random.default_rng(8).normal(size=(3, 5, 4)).astype(F)
    want, q, back = in_one(x, spec)
    assert q.scale.shape == (3, 1, 4)
    assert_same_bits(back, want)
    scan = lambda q: jax.lax.scan(lambda carry, layer: (carry, dequantize(layer)), 0, q)[1]
    for got in jax.jit(lambda q: (scan(q), jax.vmap(dequantize)(q)))(q):
        assert_same_bits(got, want)


SHAPES = (), (0,), (1,), (7,), (8,), (3, 5, 7), (2, 0, 3)


def check_packed(values, bits):
    """One after the other from the lowest bit of the first byte, and back."""
    packed = pack(jax.device_put(values), bits)
    stream = sum((int(v) % 2**bits) << (bits * i) for i, v in enumerate(values.ravel()))
    assert (packed.dtype, packed.shape) == (np.uint8, (-(-values.size * bits // 8),))
    assert bytes(packed.tolist()) == stream.to_bytes(packed.size, "little")
    assert_same_bits(unpack(packed, bits, values.shape, values.dtype), values)


@cases(
    ("shape", "bits", "dtype"),
    itertools.product(SHAPES, (1, 2, 3, 4), (np.int8, np.uint8)),
)
def test_pack_round_trip(shape, bits, dtype):
    lowest = -(2 ** (bits - 1)) if dtype is np.int8 else 0
    check_packed(np.resize(np.arange(lowest, lowest + 2**bits), shape).astype(dtype), bits)


@pytest.mark.parametrize(("bits", "dtype"), list(itertools.product((2, 3, 4), (np.int8, np.uint8))))
def test_every_pair_of_neighbours_is_packed(bits, dtype):
    values = np.arange(2**bits, dtype=np.uint8)
    if dtype is np.int8:
        values = values.astype(np.int8) - np.int8(2 ** (bits - 1))
    check_packed(np.stack(np.meshgrid(values, values), -1), bits)


def test_values_that_do_not_fit_are_not_packed():
    for values, bits in ((np.array([8], np.int8), 4), (np.array([-5], np.int8), 3), (np.array([4], np.uint8), 2)):
        with pytest.raises(ValueError, match="`values` must be in"):
            pack(values, bits)
    assert jax.jit(pack, static_argnums=1)(np.int8([17, -1]), 4).tolist() == [0xF1]  # traced ones keep their low bits
    with pytest.raises(ValueError, match="`packed` must have shape"):
        unpack(np.zeros(2, np.uint8), 4, (5,))


def test_equal_specs_share_one_trace():
    from jaxquant._arrays._affine import _quantize, _round_trip, real_values

    traces, x, functions = [], np.ones((3, 2), F), (_round_trip, _quantize, real_values)
    spec = lambda: QuantSpec(bits=5, granularity=PerChannel((-1, 0)))

    def call(x, spec):
        traces.append(spec)
        return fake_quant(x, spec)

    jitted = jax.jit(call, static_argnames="spec")
    before = [f._cache_size() for f in functions]
    for i in range(100):
        jitted(x, spec())
        fake_quant(x, spec(), QParams(x * F(1 + i), x))
    for i in range(100):
        dequantize(quantize(x, spec(), QParams(x * F(1 + i), x)))
    assert len(traces) == 1
    assert [f._cache_size() - b for f, b in zip(functions, before, strict=True)] == [1, 1, 1]


@pytest.mark.parametrize("dtype", oracle.FLOATS)
def test_outputs_are_never_weak(dtype):
    spec = QuantSpec(symmetric=False)
    with x64(dtype == "float64"):
        for x in (np.array([0.5, 1.0], oracle.FLOATS[dtype]), *([0.5, jnp.asarray(0.5)] if dtype == "float32" else [])):
            for qparams in (None, QParams(0.1, 3), QParams(F(0.1), np.int32(3))):
                y, q, back = jax.eval_shape(lambda x=x, qparams=qparams: in_one(x, spec, qparams))
                for v in (y, back):
                    assert (v.dtype, v.weak_type) == (jnp.dtype(dtype), False)
                assert [v.weak_type for v in jax.tree.leaves(q)] == [False] * 3
                assert [v.dtype for v in jax.tree.leaves(q)] == [jnp.int8, jnp.float32, jnp.int8]


def test_float32_stays_float32_where_float64_exists():
    with x64():
        y, q, back = jax.eval_shape(lambda: in_one(np.linspace(-1, 1, 7, dtype=F), QuantSpec(), QParams(0.1, 0.0)))
        assert y.dtype == q.dtype == back.dtype == jnp.float32
        of_float64 = jax.eval_shape(lambda: fit_qparams(np.linspace(-1, 1, 7), QuantSpec()))
        assert [v.dtype for v in of_float64] == [jnp.float32] * 2


EMPTY = [
    ((), PerTensor()),
    ((0,), PerTensor()),
    ((0, 3), PerChannel(-1)),
    ((3, 0), PerChannel(-1)),
    ((2, 0, 4), PerBlock(-1, 2)),
    ((4, 0), PerBlock(-1, 2)),
]


@cases(
    ("shape", "granularity", "symmetric"),
    [(*case, symmetric) for case in EMPTY for symmetric in (True, False)],
    [(*EMPTY[4], False)],
)
def test_rank_0_and_size_0(shape, granularity, symmetric):
    spec = QuantSpec(symmetric=symmetric, granularity=granularity)
    x = np.full(shape, 0.3, F)

    @jax.jit
    def all_values(x):
        y, vjp = jax.vjp(lambda x, q: fake_quant(x, spec, q), x, fit_qparams(x, spec))
        return y, vjp(jnp.ones_like(y)), dequantize(quantize(x, spec))

    y, (dx, dqparams), back = all_values(x)
    assert_same_bits(back, y)
    assert_same_bits(dx, np.ones_like(x))
    assert dqparams.scale.shape == dqparams.zero_point.shape == qparams_shape(spec, shape)
    assert np.isfinite(dqparams.scale).all()
    assert y.shape == shape


@pytest.mark.parametrize("bits", [2, 8])
def test_finite_values_stay_finite_in_half_precision(bits):
    """The zero point moves the ends of the grid beyond 65504."""
    x = np.array([-65504.0, 65504.0, 0.0, np.inf, np.nan], np.float16)
    y, _, back = in_one(x, QuantSpec(bits=bits, symmetric=False))
    assert np.isfinite(y).tolist() == [True] * 4 + [False]
    assert_same_bits(*(np.asarray(v)[:4] for v in (back, y)))


def test_a_stack_is_refused_where_its_scales_would_be_read_as_blocks():
    x = np.stack([np.full((3, 8), 10.0**i, F) for i in range(4)])
    q, back = jax.jit(jax.vmap(lambda x: in_one(x, QuantSpec())[1:]))(x)
    assert_same_bits(back, x)
    for use in (dequantize, lambda q: dot_general(q, q, (((2,), (2,)), ((0,), (0,))))):
        with pytest.raises(ValueError, match=r"scale of shape \(4,\).*under vmap or scan"):
            use(q)


def test_a_grid_without_its_zero_is_refused():
    with pytest.raises(ValueError, match="`narrow_range` must be False"):
        QuantSpec(signed=False, narrow_range=True)
