# SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/tf_*.npz: inputs, and what TensorFlow's CPU kernels make of them.

Run with the `conformance` extra installed:  python tests/data/make_tf_cases.py

An archive holds `manifest` (JSON: the TensorFlow version, and a list of cases with `kwargs` and `tags`) and arrays
named `{case}/{array}`. The ranges and inputs are made to stand where a quantizer can go wrong: on ties and a few ulp
beside them, at the ends of the nudged range, where the nudge itself is a tie, and where the range is degenerate. The
shapes are few, so that few programs have to be compiled to check them.
"""

import json
import os
import pathlib

os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # oneDNN's kernels have other semantics
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

HERE = pathlib.Path(__file__).parent

RANGES = (
    *(
        "typical",
        "typical",
        "typical",
        "symmetric",
        "pow2",
        "pow2",
        "nudge_tie",
        "nudge_tie",
        "nudge_near",
        "nudge_near",
    ),
    *("min_pos", "max_neg", "zero_min", "zero_max", "tiny", "huge", "both_zero", "equal", "reversed", "nan", "inf"),
    *("overflow", "subnormal", "subnormal_scale"),
)
ORDERED = [kind for kind in RANGES if kind not in ("reversed", "nan")]
STRICT = [kind for kind in ORDERED if kind not in ("both_zero", "equal", "subnormal")]


def ulps(rng, v, most, dtype):
    """Moves each of `v` by up to `most` representable values."""
    v = np.asarray(v, dtype)
    for _ in range(most):
        step = rng.integers(-1, 2, v.shape)
        v = np.where(step == 0, v, np.nextafter(v, np.where(step < 0, -np.inf, np.inf).astype(dtype)))
    return v.astype(dtype)


def make_range(rng, kind, steps, dtype):
    """One range of a kind for a grid of `steps` steps."""
    width = np.exp(rng.normal(1, 2))
    low = -width * rng.random()
    step = 2.0 ** rng.integers(-6, 4)
    level = rng.integers(0, steps + 1)
    tiny, most = float(np.finfo(dtype).tiny), float(np.finfo(dtype).max)
    pair = {
        "typical": (low, low + width),
        "symmetric": (-width, width),
        "pow2": (-level * step, (steps - level) * step),
        "nudge_tie": (-(level - 0.5) * step, (steps - level + 0.5) * step),
        "nudge_near": (-(level - 0.5) * step, (steps - level + 0.5) * step),
        "min_pos": (width * rng.random(), width * 1.5),
        "max_neg": (-width * 1.5, -width * rng.random()),
        "zero_min": (0.0, width),
        "zero_max": (-width, 0.0),
        "tiny": (low * 1e-24, (low + width) * 1e-24),
        "huge": (low * 1e30, (low + width) * 1e30),
        "both_zero": (0.0, -0.0),
        "equal": (width, width),
        "reversed": (width, low),
        "nan": (low, np.nan),
        "inf": (low, np.inf),
        "overflow": (-0.9 * most, 0.9 * most),
        "subnormal": (-tiny / 8, tiny / 4),
        "subnormal_scale": (-tiny * 4, tiny * 4),
    }[kind]
    pair = np.asarray(pair).astype(dtype)
    return ulps(rng, pair, 3, dtype) if kind == "nudge_near" else pair


def make_inputs(rng, shape, low, high, scale, levels, dtype, special=True):
    """Values in and around [low, high]: normal, ties, neighbours of ties, the ends and theirs, specials."""
    n = int(np.prod(shape))
    with np.errstate(all="ignore"):
        low, high, scale = np.float64(low), np.float64(high), np.float64(scale)
        width = high - low if np.isfinite(high - low) and high != low else 1.0
        middle = (low + high) / 2 if np.isfinite(low + high) else 0.0
        level = rng.integers(max(levels[0] - 2, -(2**40)), min(levels[1] + 2, 2**40), n, endpoint=True)
        first = rng.random(n) < 0.5
        choices = [
            rng.normal(middle, abs(width) / 2, n),
            (level + 0.5) * scale,
            (level + 0.5) * scale,
            level * scale,
            np.where(first, levels[0] * scale, levels[1] * scale),
            np.where(first, low, high),
        ]
        x = np.choose(rng.integers(0, len(choices), n), choices).astype(dtype)
        x = np.where(rng.random(n) < 0.6, ulps(rng, x, 4, dtype), x)
        tiny, most = np.finfo(dtype).tiny, np.finfo(dtype).max
        if not special:
            # The range comes from the data. A NaN there, or a largest value among zeros and subnormals of both signs,
            # gives what TensorFlow's vector lanes make of it: not a case.
            x = np.where((abs(x) >= tiny) & ~np.isnan(x), x, 0)
        else:
            specials = np.array([0, -0.0, np.nan, np.inf, -np.inf, tiny / 4, -tiny / 4, most, -most, tiny], dtype)
            x = np.where(rng.random(n) < 0.15, rng.choice(specials, n), x)
    return np.asarray(x, dtype).reshape(shape)


def make_cotangent(rng, shape, kind, dtype):
    g = rng.integers(-8, 9, shape) if kind != "float" else rng.normal(size=shape)
    g = np.asarray(g, dtype)
    if kind == "special" and g.size:
        g = np.where(rng.random(shape) < 0.05, rng.choice(np.array([np.nan, np.inf, -np.inf, -0.0]), shape), g)
    return np.asarray(g, dtype)


def fake_quant_case(rng, i, op):
    """One case of `op`, whose inputs are x, min and max."""
    bits, narrow = 2 + i % 15, bool(i // 15 % 2)
    steps = 2**bits - 1 - narrow
    channels = op.endswith("per_channel")
    shape = (32, 6) if channels else (128,)
    if i % 8 == 7:  # other shapes, for few configurations only
        bits, narrow, steps = 8, False, 255
        others = [(5,), (2, 3, 4), (0, 3), (3, 2, 0), (2, 3, 2, 2)] if channels else [(), (0,), (2, 3, 4), (3, 1)]
        shape = others[i // 8 % len(others)]
    kinds = STRICT if op.endswith("args") else RANGES

    def inputs(shape, low, high):
        with np.errstate(all="ignore"):
            scale = (np.float64(high) - low) / steps
            lowest = round(low / scale) if abs(low / scale) < 1e15 else 0
        return make_inputs(rng, shape, low, high, scale, (lowest, lowest + steps), np.float32)

    if channels:
        kind = [str(k) for k in rng.choice(kinds, shape[-1])]
        low, high = np.array([make_range(rng, k, steps, np.float32) for k in kind], np.float32).reshape(-1, 2).T
        columns = [inputs(shape[:-1], a, b) for a, b in zip(low, high, strict=True)]
        x = np.stack(columns, -1) if columns else np.zeros(shape, np.float32)
    else:
        kind = [kinds[i % len(kinds)]]
        low, high = make_range(rng, kind[0], steps, np.float32)
        x = inputs(shape, low, high)
    cotangent = ("int", "float", "int", "special")[i % 4]
    g = make_cotangent(rng, shape, cotangent, np.float32)
    options = {"num_bits": bits, "narrow_range": narrow}
    forward = getattr(tf.quantization, op)
    backward = getattr(tf.quantization, op + "_gradient")
    arrays = {"x": x, "g": g}
    if op.endswith("args"):
        options |= {"min": float(low), "max": float(high)}
        arrays |= {"y": forward(x, **options), "dx": backward(g, x, **options)}
    else:
        dx, dmin, dmax = backward(g, x, low, high, **options)
        arrays |= {"min": low, "max": high, "y": forward(x, low, high, **options)}
        arrays |= {"dx": dx, "dmin": dmin, "dmax": dmax}
    return options, [*kind, cotangent], arrays


def round_trip_case(rng, i):
    """One case of quantize_and_dequantize_v2; what TensorFlow cannot do with an axis is done slice by slice."""
    k = i % 40  # few configurations, so that few programs have to be compiled
    dtype = np.float64 if k % 5 == 4 else np.float32
    signed = bool(k % 3)
    bits = (8, 8, 4, 16, 2, 3, 12, 24, 31, 1, 61)[k // 2 % 11]
    narrow = bool(k // 3 % 2) and bits > 1
    mode = ("HALF_TO_EVEN", "HALF_UP")[k % 2]
    given = bool(k % 7 % 2)
    axis = (None, None, 0, 1)[k // 4 % 4]
    shape = (96,) if axis is None else (6, 16)
    if k % 16 == 15:
        axis, shape = None, ((), (0,), (2, 3, 4))[i % 3]
    levels = (-(2 ** (bits - 1)) + narrow, 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    kind = [str(k) for k in rng.choice(ORDERED, 1 if axis is None else shape[axis])]
    ends = np.array([make_range(rng, k, levels[1] - levels[0], dtype) for k in kind], dtype)
    low, high = ends.min(1), ends.max(1)

    def inputs(shape, low, high):
        with np.errstate(all="ignore"):
            scale = np.max(
                [e / q for e, q in zip((np.float64(low), np.float64(high)), levels, strict=True) if q] or [1]
            )
        return make_inputs(rng, shape, low, high, scale, levels, dtype, special=given)

    if axis is None:
        low, high = low[0], high[0]
        x = inputs(shape, low, high)
    else:
        x = np.stack([inputs(np.delete(shape, axis), a, b) for a, b in zip(low, high, strict=True)], axis)
    g = make_cotangent(rng, shape, ("int", "special")[i % 2], dtype)
    options = dict(signed_input=signed, num_bits=bits, range_given=given, round_mode=mode, narrow_range=narrow)

    def forward(x, low, high, axis):
        # Not as scalars: TensorFlow caches those by value and takes -0.0 for 0.0.
        low, high = (tf.reshape(tf.constant(np.reshape(v, -1)), np.shape(v)) for v in (low, high))
        return tf.quantization.quantize_and_dequantize_v2(tf.constant(x), low, high, axis=axis, **options).numpy()

    if axis is None or not given:
        y = forward(x, low, high, axis)
    else:
        slices = zip(np.moveaxis(x, axis, 0), low, high, strict=True)
        y = np.stack([forward(s, a, b, None) for s, a, b in slices], axis)
    dx, _, _ = tf.raw_ops.QuantizeAndDequantizeV4Grad(
        gradients=g, input=x, input_min=low, input_max=high, axis=-1 if axis is None else axis
    )
    return (
        options | {"axis": axis},
        [*kind, dtype.__name__],
        {"x": x, "g": g, "min": low, "max": high, "y": y, "dx": dx},
    )


TYPES = ("qint8", "quint8", "qint16", "quint16", "qint32")
MODES = ("MIN_COMBINED", "MIN_FIRST", "SCALED")


def integer_options(k):
    """Type, mode, narrow_range, axis and shape of configuration `k`."""
    name, mode = TYPES[k % 5], MODES[k // 5 % 3]
    axis = None if mode == "MIN_FIRST" else (None, None, 0, 1)[k // 3 % 4]
    shape = (96,) if axis is None else (6, 16)
    return name, mode, bool(k // 2 % 2), axis, shape


def quantize_case(rng, i):
    name, mode, narrow, axis, shape = integer_options(i % 60)
    if i % 16 == 15:
        axis, shape = None, ((), (0,), (2, 3, 4))[i % 3]
    info = np.iinfo(name[1:])
    even = mode == "SCALED" and i % 60 % 4 == 3
    least = (0.01, 0.01, 0.5, 1e-4)[i % 4]
    count = 1 if axis is None else shape[axis]
    kinds = [kind for kind in RANGES if kind not in ("reversed", "nan", "inf", "overflow")]
    kind = [str(k) for k in rng.choice(kinds, count)]
    ends = np.array([make_range(rng, k, info.max - info.min, np.float32) for k in kind], np.float32)
    low, high = ends.min(1), ends.max(1)

    def inputs(shape, low, high):
        low, high = np.minimum(0.0, low), np.maximum(0.0, high)
        levels = (int(info.min), int(info.max))
        with np.errstate(all="ignore"):
            scale = (high - low) / (levels[1] - levels[0])
            if mode == "SCALED":
                scale = np.max([e / q for e, q in zip((low, high), levels, strict=True) if q])
            else:
                lowest = round(low / scale) if abs(low / scale) < 1e15 else 0
                levels = (lowest, lowest + levels[1] - levels[0])
        return make_inputs(rng, shape, low, high, scale, levels, np.float32)

    if axis is None:
        low, high = low[0], high[0]
        x = inputs(shape, low, high)
    else:
        x = np.stack([inputs(np.delete(shape, axis), a, b) for a, b in zip(low, high, strict=True)], axis)
    options = dict(mode=mode, round_mode="HALF_TO_EVEN" if even else "HALF_AWAY_FROM_ZERO", narrow_range=narrow)
    options |= dict(axis=axis, ensure_minimum_range=least)
    got = tf.quantization.quantize(tf.constant(x), low, high, getattr(tf, name), **options)
    output = tf.bitcast(got.output, name[1:]).numpy()
    reported = {"output_min": got.output_min, "output_max": got.output_max}
    reported = {key: np.reshape(v, () if axis is None else (-1,)) for key, v in reported.items()}
    # Undefined: a NaN, and an int32 at the top of the range, which TensorFlow's cast wraps to the lowest.
    middle = (reported["output_min"] + reported["output_max"]) / 2
    middle = middle if axis is None else np.expand_dims(middle, 1 - axis)
    defined = ~np.isnan(x) & ~((name == "qint32") & (x > middle) & (output == info.min))
    arrays = {"x": x, "min": low, "max": high, "y": output, "defined": defined, **reported}
    return options | {"T": name}, kind, arrays


def dequantize_case(rng, i):
    name, mode, narrow, axis, shape = integer_options(i % 60)
    if i % 16 == 15:
        axis, shape = None, ((), (0,), (2, 3, 4))[i % 3]
    half = mode == "MIN_COMBINED" and i % 60 % 4 == 3
    count = 1 if axis is None else shape[axis]
    kind = [str(k) for k in rng.choice(RANGES, count)]
    low, high = np.array([make_range(rng, k, 255, np.float32) for k in kind], np.float32).T
    if axis is None:
        low, high = low[0], high[0]
    info = np.iinfo(name[1:])
    # SCALED turns the sign of the largest int32 round: not a case.
    q = rng.integers(info.min, info.max - 200 * (name == "qint32"), shape, info.dtype, endpoint=True)
    q = np.where(rng.random(shape) < 0.1, info.min, q).astype(info.dtype)
    options = dict(mode=mode, axis=axis, narrow_range=narrow, dtype=tf.bfloat16 if half else tf.float32)
    y = tf.quantization.dequantize(tf.bitcast(tf.constant(q), getattr(tf, name)), low, high, **options)
    arrays = {"x": q, "min": low, "max": high, "y": tf.cast(y, tf.float32)}
    return options | {"dtype": "bfloat16" if half else "float32"}, [name, *kind], arrays


def write(name, count, make):
    rng = np.random.default_rng(list(name.encode()))
    cases, arrays = [], {}
    for i in range(count):
        options, tags, values = make(rng, i)
        cases.append({"kwargs": options, "tags": tags})
        arrays |= {f"{i}/{key}": np.asarray(value) for key, value in values.items()}
    manifest = json.dumps({"tensorflow": tf.__version__, "cases": cases})
    np.savez_compressed(HERE / f"tf_{name}.npz", manifest=np.array(manifest), **arrays)
    print(f"{name}: {count} cases, {sum(a.size for k, a in arrays.items() if k.endswith('/y'))} values")


if __name__ == "__main__":
    for op in ("args", "vars", "vars_per_channel"):
        op = f"fake_quant_with_min_max_{op}"
        write(op, 240, lambda rng, i, op=op: fake_quant_case(rng, i, op))
    write("quantize_and_dequantize_v2", 320, round_trip_case)
    write("quantize", 360, quantize_case)
    write("dequantize", 360, dequantize_case)
