# SPDX-License-Identifier: Apache-2.0
"""Do the ops give on this device the bits that XLA:CPU gave? Cases, the record of their bits, and the comparison."""

import contextlib
import hashlib
import json
import math
import pathlib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant import (
    PerBlock,
    PerChannel,
    PerTensor,
    QParams,
    QuantSpec,
    Range,
    Rule,
    activation_spec,
    conv_general_dilated,
    dequantize,
    dot_general,
    ema_ranges,
    fake_quant,
    fit_qparams,
    histogram,
    observe,
    qparams_from_range,
    quantize,
    quantize_fn,
    range_from_histogram,
    scale_gradient,
    tf,
    weight_spec,
)

RECORD = pathlib.Path(__file__).parent / "data" / "cpu_bits.npz"
SHAPE = 32, 48
TINY = np.finfo(np.float32).tiny
SPECIALS = np.array([0, -0.0, np.nan, np.inf, -np.inf, 3e38, -3e38, TINY, -TINY, 0.49999997, -0.49999997], np.float32)


class Case(NamedTuple):
    """A function of arrays that returns a dict of arrays.

    `exact` says whether it promises the same bits in every program on XLA:CPU; if not, it holds sums of floats.
    """

    name: str
    f: Callable[..., dict[str, jax.Array]]
    inputs: tuple[Any, ...]  # pytrees of arrays
    exact: bool = True


# ---- Inputs: integers, halves and powers of two of a seeded generator, so that they are the same on every machine.


def awkward(rng: np.random.Generator, shape: Any = ()) -> np.ndarray:
    """Positive float32 values around 2 ** -8 with all 24 bits of the significand."""
    return np.ldexp(rng.integers(2**23, 2**24, shape), rng.integers(-34, -28, shape)).astype(np.float32)


def integers(rng: np.random.Generator, shape: Any = SHAPE, most: int = 8) -> np.ndarray:
    """Integers as float32: cotangents whose sums are exact in any order."""
    return rng.integers(-most, most + 1, shape).astype(np.float32)


def plain(rng: np.random.Generator, shape: Any = SHAPE) -> np.ndarray:
    """Values in [-1, 1)."""
    return np.ldexp(rng.integers(-(2**23), 2**23, shape), -23).astype(np.float32)


def hard(rng: np.random.Generator, scale: Any, steps: int, dtype: Any = np.float32) -> np.ndarray:
    """Levels of the grid, ties between them, their neighbours; some of them NaN, infinite, huge or of random bits.

    None is subnormal: XLA:CPU reads those as 0, and other devices may not, which is a case of its own.
    """
    x = np.float64(scale) * (rng.integers(-2 * steps - 5, 2 * steps + 6, SHAPE) / 2)
    x = (x * (1 + 2.0**-24 * rng.integers(-6, 7, SHAPE))).astype(np.float32)
    x = np.where(rng.random(SHAPE) < 0.1, rng.integers(0, 2**32, SHAPE, np.uint32).view(np.float32), x)
    x = np.where(rng.random(SHAPE) < 0.05, rng.choice(SPECIALS, SHAPE), x)
    with np.errstate(all="ignore"):
        return np.where(np.abs(x) < TINY, np.float32(0), x).astype(dtype)


def subnormal(rng: np.random.Generator, shape: Any = SHAPE) -> np.ndarray:
    """Values on both sides of the smallest normal number."""
    magnitude = rng.integers(0, 2**25, shape, np.uint32)
    return (magnitude | rng.integers(0, 2, shape, np.uint32) << np.uint32(31)).view(np.float32)


# ---- jaxquant.tf.


def of_tf(rng: np.random.Generator) -> Iterator[Case]:
    channels = SHAPE[-1]
    for bits, narrow in ((8, False), (4, True), (2, False)):
        options = {"num_bits": bits, "narrow_range": narrow}
        label = f"{bits} bits{', narrow' * narrow}"
        steps = 2**bits - 1 - narrow
        low, high = -awkward(rng) * 100, awkward(rng) * 100
        lows, highs = -awkward(rng, channels) * 100, awkward(rng, channels) * 100
        x, g = hard(rng, (np.float64(high) - low) / steps, steps), integers(rng)
        xs = hard(rng, (np.float64(highs) - lows) / steps, steps)
        ends = {"min": float(low), "max": float(high)}
        yield Case(
            f"tf.fake_quant_with_min_max_args, {label}",
            lambda x, g, kw=options | ends: {
                "value": tf.fake_quant_with_min_max_args(x, **kw),
                "gradient": tf.fake_quant_with_min_max_args_gradient(g, x, **kw),
            },
            (x, g),
        )
        for name, op, gradient, inputs in (
            ("vars", tf.fake_quant_with_min_max_vars, tf.fake_quant_with_min_max_vars_gradient, (x, low, high)),
            (
                "vars_per_channel",
                tf.fake_quant_with_min_max_vars_per_channel,
                tf.fake_quant_with_min_max_vars_per_channel_gradient,
                (xs, lows, highs),
            ),
        ):
            for dtype in ("float32", "bfloat16", "float16") if bits == 8 else ("float32",):
                x_min_max = hard_cast(inputs[0], dtype), *inputs[1:]

                def both(g, x, low, high, op=op, gradient=gradient, kw=options):
                    gradients = gradient(g.astype(x.dtype), x, low, high, **kw)
                    names = "to inputs", "to min", "to max"
                    return {"value": op(x, low, high, **kw)} | dict(zip(names, gradients, strict=True))

                yield Case(f"tf.fake_quant_with_min_max_{name}, {label}, {dtype}", both, (g, *x_min_max))
    yield from of_tf_quantize(rng)
    yield from of_tf_round_trip(rng)
    low, high = np.float32(-3e-38), np.float32(1.5e-36)
    yield Case(
        "tf.fake_quant_with_min_max_vars, subnormal",
        lambda x, low, high: {"value": tf.fake_quant_with_min_max_vars(x, low, high)},
        (subnormal(rng), low, high),
    )


def hard_cast(x: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(jnp.dtype(dtype))


def of_tf_quantize(rng: np.random.Generator) -> Iterator[Case]:
    modes = [("MIN_COMBINED", "HALF_AWAY_FROM_ZERO"), ("MIN_FIRST", "HALF_AWAY_FROM_ZERO")]
    modes += [("SCALED", "HALF_AWAY_FROM_ZERO"), ("SCALED", "HALF_TO_EVEN")]
    cases = [(*mode, dtype, None) for mode in modes for dtype in ("int8", "uint8")]
    cases += [(*mode, "int8", 1) for mode in modes[:3]] + [("MIN_COMBINED", modes[0][1], "int16", None)]
    for mode, round_mode, dtype, axis in cases:
        shape, info = () if axis is None else SHAPE[axis], np.iinfo(dtype)
        low, high = -awkward(rng, shape) * 100, awkward(rng, shape) * 100
        steps = int(info.max) - int(info.min)
        x, q = hard(rng, (np.float64(high) - low) / steps, steps), rng.integers(info.min, info.max + 1, SHAPE, dtype)
        label = f"{mode}, {dtype}{'' if axis is None else ', by channel'}"
        rounding = ", half to even" * (round_mode == "HALF_TO_EVEN")

        def coded(x, low, high, T=dtype, mode=mode, round_mode=round_mode, axis=axis):
            return tf.quantize(x, low, high, T, mode, round_mode, axis=axis)._asdict()

        def back(q, low, high, mode=mode, axis=axis):
            return {"value": tf.dequantize(q, low, high, mode, axis=axis)}

        yield Case(f"tf.quantize, {label}{rounding}", coded, (x, low, high))
        if not rounding:
            yield Case(f"tf.dequantize, {label}", back, (q, low, high))


def of_tf_round_trip(rng: np.random.Generator) -> Iterator[Case]:
    for given, signed, round_mode, axis in (
        (True, True, "HALF_TO_EVEN", None),
        (True, False, "HALF_UP", None),
        (True, True, "HALF_UP", 1),
        (False, True, "HALF_TO_EVEN", None),
        (False, True, "HALF_TO_EVEN", 1),
    ):
        shape = () if axis is None else SHAPE[axis]
        high = awkward(rng, shape) * 100
        low = -high if signed else np.zeros_like(high)
        x = hard(rng, np.float64(high) / 127, 127) if given else plain(rng) * high
        options = {"signed_input": signed, "range_given": given, "round_mode": round_mode, "axis": axis}

        def both(g, x, low, high, options=options):
            op = lambda x: tf.quantize_and_dequantize_v2(x, low, high, **options)
            value, vjp = jax.vjp(op, x)
            same = tf.quantize_and_dequantize(x, low, high, **options)
            return {"value": value, "gradient": vjp(g)[0], "value of quantize_and_dequantize": same}

        label = f"{'given' if given else 'of the data'}, {'' if signed else 'un'}signed, {round_mode}"
        label += "" if axis is None else ", by channel"
        yield Case(f"tf.quantize_and_dequantize_v2, {label}", both, (integers(rng), x, low, high))


# ---- The affine ops.

GRANULARITIES = {"tensor": PerTensor(), "channel": PerChannel(-1), "block": PerBlock(0, 8)}


def groups(granularity: Any) -> tuple[int, ...]:
    kinds = {PerTensor: (), PerChannel: (1, SHAPE[1]), PerBlock: (SHAPE[0] // 8, SHAPE[1])}
    return kinds[type(granularity)]


def each(scale: np.ndarray) -> np.ndarray:
    """A value for each group, for every element of its group."""
    return np.repeat(scale, SHAPE[0] // scale.shape[0], 0) if scale.ndim else scale


def label_of(spec: QuantSpec) -> str:
    per = next(name for name, granularity in GRANULARITIES.items() if granularity == spec.granularity)
    rounding = "" if spec.rounding == "half_even" else f", {spec.rounding}"
    return f"{spec.bits} bits, {'symmetric' if spec.symmetric else 'affine'}, per {per}{rounding}"


def qparams_of(rng: np.random.Generator, spec: QuantSpec, scale: np.ndarray) -> QParams:
    zero_point = np.zeros_like(scale)
    if not spec.symmetric:
        zero_point = rng.integers(int(spec.qmin), int(spec.qmax) + 1, scale.shape).astype(np.float32)
    return QParams(scale, zero_point)


def of_fake_quant(rng: np.random.Generator) -> Iterator[Case]:
    for bits, symmetric, per in [(b, s, p) for b in (8, 4, 2) for s in (True, False) for p in GRANULARITIES]:
        spec = QuantSpec(bits=bits, symmetric=symmetric, granularity=GRANULARITIES[per])
        for dtype in ("float32", "bfloat16", "float16") if bits == 8 or per == "tensor" else ("float32",):
            scale = awkward(rng, groups(spec.granularity))
            inputs = integers(rng), hard(rng, each(scale), 2**bits, jnp.dtype(dtype)), qparams_of(rng, spec, scale)

            def both(g, x, qparams, spec=spec):
                value, vjp = jax.vjp(lambda x: fake_quant(x, spec, qparams), x)
                return {"value": value, "to x": vjp(g.astype(x.dtype))[0]}

            yield Case(f"fake_quant, {label_of(spec)}, {dtype}", both, inputs)
    for symmetric, per in [(s, p) for s in (True, False) for p in GRANULARITIES]:
        spec = QuantSpec(symmetric=symmetric, granularity=GRANULARITIES[per])
        # Eighths of a level of a power of two, so that every term of the sums has few bits.
        scale = np.ldexp(np.float32(1), rng.integers(-12, 4, groups(spec.granularity))).astype(np.float32)
        x = (rng.integers(-1200, 1201, SHAPE) / 8 * each(scale)).astype(np.float32)

        def trained(g, x, qparams, spec=spec):
            gradients = jax.vjp(lambda x, q: fake_quant(x, spec, q), x, qparams)[1](g)
            return {"to x": gradients[0], "to scale": gradients[1].scale, "to zero_point": gradients[1].zero_point}

        yield Case(
            f"gradients of fake_quant, {label_of(spec)}", trained, (integers(rng), x, qparams_of(rng, spec, scale))
        )
        hard_x = hard(rng, each(awkward(rng, groups(spec.granularity))), 127)

        def fitted(g, x, spec=spec):
            value, vjp = jax.vjp(lambda x: fake_quant(x, spec), x)
            return {"value": value, "to x": vjp(g)[0]}

        yield Case(f"fake_quant with the range of the data, {label_of(spec)}", fitted, (integers(rng), hard_x))
    spec = QuantSpec()
    yield Case(
        "fake_quant, subnormal",
        lambda x: {"value": fake_quant(x, spec, QParams(TINY, np.float32(0)))},
        (subnormal(rng),),
    )
    factor = awkward(rng)
    yield Case(
        "gradient of scale_gradient",
        lambda g, x, factor: {"to x": jax.vjp(lambda x: scale_gradient(x, factor), x)[1](g)[0]},
        (plain(rng), plain(rng), factor),
    )


def of_quantize(rng: np.random.Generator) -> Iterator[Case]:
    specs = [QuantSpec(bits=bits, symmetric=False, granularity=GRANULARITIES["channel"]) for bits in (8, 4, 2)]
    specs += [QuantSpec(rounding=rounding) for rounding in ("half_even", "half_up", "half_away", "stochastic")]
    specs += [QuantSpec(granularity=GRANULARITIES["block"])]
    for spec in specs:
        scale = awkward(rng, groups(spec.granularity))
        inputs = hard(rng, each(scale), 2**spec.bits), qparams_of(rng, spec, scale)

        def there_and_back(x, qparams, spec=spec):
            key = jax.random.key(0) if spec.rounding == "stochastic" else None
            q = quantize(x, spec, qparams, key=key)
            return {"integers": q.values, "dequantize": dequantize(q)}

        yield Case(f"quantize, {label_of(spec)}", there_and_back, inputs)


def of_ranges(rng: np.random.Generator) -> Iterator[Case]:
    specs = [QuantSpec(symmetric=s, granularity=GRANULARITIES[per]) for s in (True, False) for per in GRANULARITIES]
    for spec in specs:
        x = hard(rng, each(awkward(rng, groups(spec.granularity))), 127)
        for method in ("minmax", "percentile"):
            fitted = lambda x, spec=spec, method=method: fit_qparams(x, spec, method, percentile=90.0)._asdict()
            yield Case(f"fit_qparams, {method}, {label_of(spec)}", fitted, (x,))
    for spec, method in [(spec, method) for spec in (specs[0], specs[4]) for method in ("mse", "lsq")]:
        fitted = lambda x, spec=spec, method=method: fit_qparams(x, spec, method)._asdict()
        yield Case(f"fit_qparams, {method}, {label_of(spec)}", fitted, (plain(rng),), exact=False)
    odd = np.array([0, -0.0, 1, -1, 3e38, -3e38, np.inf, -np.inf, np.nan, 1e-30, -1e-30], np.float32)
    low = np.concatenate([-awkward(rng, 512), np.repeat(odd, odd.size)])
    high = np.concatenate([awkward(rng, 512), np.tile(odd, odd.size)])
    small = subnormal(rng, (2, 512))
    for spec in (QuantSpec(), QuantSpec(signed=False), QuantSpec(symmetric=False), QuantSpec(bits=4, symmetric=False)):
        label = f"{spec.bits} bits, {'symmetric' if spec.symmetric else 'affine'}{', unsigned' * (not spec.signed)}"
        fitted = lambda low, high, spec=spec: qparams_from_range(Range(low, high), spec)._asdict()
        yield Case(f"qparams_from_range, {label}", fitted, (low, high))
        yield Case(f"qparams_from_range, {label}, subnormal", fitted, tuple(small))
    x, spec = hard(rng, awkward(rng), 127), specs[4]
    yield Case("observe, per channel", lambda x: observe(x, spec)._asdict(), (x,))
    yield Case("observe, per tensor", lambda x: observe(x, specs[3])._asdict(), (x,))
    yield Case(
        "ema_ranges",
        lambda a, b, decay: ema_ranges(Range(-a, a), Range(-b, b), decay)._asdict(),
        (awkward(rng, 256), awkward(rng, 256), np.float32(0.9)),
    )
    yield Case(
        "histogram and range_from_histogram",
        lambda x: range_from_histogram(histogram(x, spec), 90.0)._asdict(),
        (x,),
    )


# ---- Contractions in integers, and a function transformed.

IN_OUT = (((1,), (0,)), ((), ()))


def of_contractions(rng: np.random.Generator) -> Iterator[Case]:
    symmetric, affine, weight = QuantSpec(), activation_spec(), weight_spec(channel_axis=-1)
    matrices, long = (plain(rng, (24, 200)), plain(rng, (200, 40))), (plain(rng, (4, 2304)), plain(rng, (2304, 16)))
    batched = (((2,), (1,)), ((0,), (0,)))
    for label, specs, dims, inputs in (
        ("symmetric", (symmetric, weight), IN_OUT, matrices),
        ("affine", (affine, weight), IN_OUT, matrices),
        ("both affine", (affine, affine), IN_OUT, matrices),
        ("4 bits", (QuantSpec(bits=4), weight_spec(4, channel_axis=-1)), IN_OUT, matrices),
        ("blocks", (symmetric, weight_spec(channel_axis=-1, block_size=40)), IN_OUT, matrices),
        ("one row", (symmetric, weight), IN_OUT, (matrices[0][:1], matrices[1])),
        ("long sums", (symmetric, weight), IN_OUT, long),
        ("batched", (affine, symmetric), batched, (plain(rng, (3, 8, 32)), plain(rng, (3, 32, 16)))),
    ):

        def dot(a, b, specs=specs, dims=dims):
            return {"value": dot_general(quantize(a, specs[0]), quantize(b, specs[1]), dims)}

        yield Case(f"dot_general, {label}", dot, inputs)
    image, kernel = plain(rng, (2, 12, 12, 8)), plain(rng, (3, 3, 8, 16))
    layout, per_output = ("NHWC", "HWIO", "NHWC"), QuantSpec(granularity=PerChannel(-1))
    for label, spec, strides, features in (
        ("symmetric", symmetric, (1, 1), 1),
        ("affine, strides", affine, (2, 2), 1),
        ("affine, grouped", affine, (1, 1), 4),
    ):

        def conv(a, b, spec=spec, strides=strides, features=features):
            a, b = quantize(a, spec), quantize(b, per_output)
            options = {"dimension_numbers": layout, "feature_group_count": features}
            return {"value": conv_general_dilated(a, b, strides, "SAME", **options)}

        yield Case(f"conv_general_dilated, {label}", conv, (image, kernel[:, :, : 8 // features]))


def of_function(rng: np.random.Generator) -> Iterator[Case]:
    def mlp(params, x):
        return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"]

    params = {"w1": plain(rng, (32, 64)), "b1": plain(rng, (1, 64)), "w2": plain(rng, (64, 10))}
    x, g = plain(rng, (16, 32)), integers(rng, (16, 10))
    q = quantize_fn(mlp, [Rule("w*", weight_spec(8), activation_spec(8))])
    yield Case("quantize_fn of an MLP", lambda params, x: {"value": q(params, x)}, (params, x))
    gradient = lambda params, x, g: jax.vjp(q, params, x)[1](g)[0]
    yield Case("gradient of quantize_fn of an MLP", gradient, (params, x, g), exact=False)


FAMILIES = {
    "tf": of_tf,
    "fake_quant": of_fake_quant,
    "quantize": of_quantize,
    "ranges": of_ranges,
    "contractions": of_contractions,
    "function": of_function,
}


def cases(*families: str) -> Iterator[Case]:
    """The cases of some families, of all by default; each has its own generator, so that its inputs are its own."""
    for i, (name, make) in enumerate(FAMILIES.items()):
        if name in families or not families:
            yield from make(np.random.default_rng(i))


# ---- Running, recording, comparing.


def outputs(case: Case) -> dict[str, np.ndarray]:
    """What a case gives on the default device, by names."""
    results = jax.jit(case.f)(*jax.tree.map(jnp.asarray, case.inputs))
    return {f"{case.name}: {name}": np.asarray(value) for name, value in results.items()}


def digest(case: Case) -> str:
    """Of the inputs: another NumPy might make others of the same seed."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(v).tobytes() for v in jax.tree.leaves(case.inputs))).hexdigest()


def versions() -> dict[str, str]:
    """Of what decides about the bits; without jaxquant's if it is not installed but run from a clone."""
    found = {}
    for name in ("jaxquant", "jax", "jaxlib"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class Recorded(NamedTuple):
    """What the CPU gave, by the names of outputs; the digests of the inputs, by the names of cases; the versions."""

    values: dict[str, np.ndarray]
    inputs: dict[str, str]
    versions: dict[str, str]


def record(path: pathlib.Path = RECORD, *families: str) -> None:
    """Writes the bits that XLA:CPU gives, for all families by default."""
    if jax.default_backend() != "cpu":
        raise RuntimeError(f"The record must be made on XLA:CPU, got {jax.default_backend()}. Set JAX_PLATFORMS=cpu.")
    values, inputs = {}, {}
    for case in cases(*families):
        inputs[case.name] = digest(case)
        values |= outputs(case)
    about = np.array(json.dumps({"inputs": inputs, "versions": versions()}))
    np.savez_compressed(path, about=about, **values)


def recorded(path: pathlib.Path = RECORD) -> Recorded:
    with np.load(path) as file:
        values = dict(file)
    return Recorded(values, **json.loads(str(values.pop("about"))))


class Difference(NamedTuple):
    """Of two arrays: how many values, how many differ in a bit, and the largest difference.

    `ulps` counts the numbers of the dtype between two values, infinite where one alone is NaN; `relative` is in units
    of the largest finite value.
    """

    values: int
    differ: int
    ulps: float
    relative: float


def difference(got: np.ndarray, want: np.ndarray) -> Difference:
    """NaNs are equal; a zero of another sign differs by no ulp."""
    if want.dtype.kind == "V":  # a dtype that .npz does not know
        want = want.view(got.dtype)
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        raise ValueError(f"got {got.dtype}{got.shape}, recorded {want.dtype}{want.shape}")
    bits = [v.view(f"u{v.dtype.itemsize}") for v in (got, want)]
    nan = [v != v for v in (got, want)]
    differ = (bits[0] != bits[1]) & ~(nan[0] & nan[1])
    if not differ.any():
        return Difference(got.size, 0, 0, 0.0)
    ulps = np.where(nan[0] | nan[1], np.inf, np.abs(_place(got) - _place(want)))
    real = [v.astype(np.float64) for v in (got, want)]
    both = np.isfinite(real[0]) & np.isfinite(real[1])
    largest = np.abs(real[1][both]).max(initial=0)
    apart = np.abs(real[0][both] - real[1][both]).max(initial=0)
    return Difference(got.size, int(differ.sum()), float(ulps[differ].max()), apart / largest if largest else math.inf)


def _place(v: np.ndarray) -> np.ndarray:
    """The place of each value among all of its dtype."""
    if v.dtype.kind in "iub":
        return v.astype(np.int64)
    sign = 2 ** (8 * v.dtype.itemsize - 1)
    bits = v.view(f"u{v.dtype.itemsize}").astype(np.int64)
    return np.where(bits < sign, bits, sign - bits)


def compared(case: Case, want: Recorded) -> dict[str, Difference]:
    """The differences of a case from the record, by the names of its outputs."""
    if want.inputs.get(case.name) != digest(case):
        raise ValueError("the record is of other inputs: make it anew by `python -m benchmarks accelerator.record`")
    got = outputs(case)
    return {name.removeprefix(f"{case.name}: "): difference(v, want.values[name]) for name, v in got.items()}
