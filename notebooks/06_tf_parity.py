# %% [markdown]
# # jaxquant.tf and TensorFlow's quantization ops
#
# `jaxquant.tf` has the ops of `tf.quantization` under their names, with the results of TensorFlow 2.21's CPU kernels.
# This notebook shows what the ops do and how to port calls. It needs no TensorFlow: it reads the results that the tests
# have recorded, so it has to run from a checkout of the repository.

# %%
# SPDX-License-Identifier: Apache-2.0
import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxquant
from jaxquant import tf

DATA = Path(jaxquant.__file__).parents[1] / "tests" / "data"

output = Path("output")
output.mkdir(exist_ok=True)


def raises(error, f, *args, **kwargs):
    try:
        f(*args, **kwargs)
    except error:
        return True
    return False


def differing(got, want):
    """How many values differ in a bit, the sign of zero included; a NaN equals a NaN."""
    got, want = np.asarray(got), np.asarray(want)
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        raise ValueError("arrays of one dtype and shape, please")
    bits = f"u{got.dtype.itemsize}"
    return int(((got.view(bits) != want.view(bits)) & ~((got != got) & (want != want))).sum())


# %% [markdown]
# ## The ops
#
# `x_min`, `x_max` are the ends of the *nudged* range, which section "Nudging" explains.
#
# | `jaxquant.tf` | TensorFlow | range | gradient with respect to the input | to the range |
# |---|---|---|---|---|
# | `fake_quant_with_min_max_args` | same name | two static numbers | 1 in `[x_min, x_max]`, else 0 | constant |
# | `fake_quant_with_min_max_vars` | same name | two scalars | the same | sums of what is clipped |
# | `fake_quant_with_min_max_vars_per_channel` | same name | two vectors, for the last axis | the same | per channel |
# | `fake_quant_*_gradient` | same names | as the op | these are the gradients above | |
# | `quantize_and_dequantize` | same name; raw V2, V3 | given, or from the data | 1 everywhere | none |
# | `quantize_and_dequantize_v2` | same name; raw V4 | given, or from the data | 1 in the range as passed | none |
# | `quantize` (`quantize_v2`) | `quantize`; raw QuantizeV2 | given | none | none |
# | `dequantize` | same name; raw Dequantize | given | none | none |
# | `grad_pass_through` | `tf.grad_pass_through` | | as for the identity | |
#
# ## Porting a call
#
# Write `jaxquant.tf.X` for `tf.quantization.X`. The arguments have TensorFlow's names and order up to `name`.
#
# | TensorFlow | here |
# |---|---|
# | `tf.quantization.X(...)`, arguments by position up to `name` | the same |
# | positions after `name` (`narrow_range`, `axis`, ...) | by keyword only |
# | `name="..."` | accepted, ignored |
# | `tf.qint8` as `T` | `"qint8"`, `"int8"`, `jnp.int8`, or TensorFlow's own dtype |
# | codes of dtype qint8 | int8: JAX has no qint8 |
# | `axis=None`, `axis=-1` | no axis, the last axis |
# | raw ops: `axis=-1` | `axis=None` |
# | a list as the input | refused: pass an array |
# | `tf.compat.v1.quantize_v2(x, lo, hi, T, mode, name)` | `name=` by keyword: `round_mode` comes before it |
# | `tf.quantization.quantized_concat` | not here |

# %%
FAKE_QUANTS = [f"fake_quant_with_min_max_{of}" for of in ("args", "vars", "vars_per_channel")]
OPS = [f"{op}{part}" for op in FAKE_QUANTS for part in ("", "_gradient")]
OPS += ["quantize_and_dequantize", "quantize_and_dequantize_v2", "quantize", "dequantize"]
positional, by_keyword = {}, {}
for name in OPS:
    parameters = inspect.signature(getattr(tf, name)).parameters.values()
    positional[name] = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    by_keyword[name] = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    print(f"{name}\n    {', '.join(positional[name])}; by keyword {', '.join(sorted(by_keyword[name])) or 'none'}")

# %%
x = jnp.asarray(np.random.default_rng(0).normal(0, 3, (4, 6)), jnp.float32)
low, high = x.min(0), x.max(0)
plain = tf.quantize(x, -6.0, 6.0, "qint8")
print("qint8 gives", plain.output.dtype, "codes. How many of them differ:")

types = {'"int8"': "int8", "jnp.int8": jnp.int8, 'np.dtype("int8")': np.dtype("int8")}
same = {f"T={name}": (plain, tf.quantize(x, -6.0, 6.0, T)) for name, T in types.items()}
named = tf.quantize(x, -6.0, 6.0, "qint8", "MIN_COMBINED", "HALF_AWAY_FROM_ZERO", "a_name")
same["all arguments by position"] = plain, named
last, second = (tf.quantize(x, low, high, "qint8", mode="SCALED", axis=axis) for axis in (-1, 1))
same["axis=-1 and axis=1"] = last, second
for what, (a, b) in same.items():
    print(f"    {differing(a.output, b.output)} with {what}")

list_refused = raises(TypeError, tf.fake_quant_with_min_max_args, [1.0, 2.0])
name_refused = raises(ValueError, tf.quantize_v2, x, -6.0, 6.0, "qint8", "MIN_COMBINED", "a_name")
print(f"is refused: a list {list_refused}, a name in the sixth position {name_refused}")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
FAKE_QUANT = ("num_bits", "narrow_range", "name")
ROUND_TRIP = ("input", "input_min", "input_max", "signed_input", "num_bits", "range_given", "round_mode", "name")
assert positional == {
    "fake_quant_with_min_max_args": ("inputs", "min", "max", *FAKE_QUANT),
    "fake_quant_with_min_max_args_gradient": ("gradients", "inputs", "min", "max", *FAKE_QUANT),
    "fake_quant_with_min_max_vars": ("inputs", "min", "max", *FAKE_QUANT),
    "fake_quant_with_min_max_vars_gradient": ("gradients", "inputs", "min", "max", *FAKE_QUANT),
    "fake_quant_with_min_max_vars_per_channel": ("inputs", "min", "max", *FAKE_QUANT),
    "fake_quant_with_min_max_vars_per_channel_gradient": ("gradients", "inputs", "min", "max", *FAKE_QUANT),
    "quantize_and_dequantize": ROUND_TRIP,
    "quantize_and_dequantize_v2": ROUND_TRIP,
    "quantize": ("input", "min_range", "max_range", "T", "mode", "round_mode", "name"),
    "dequantize": ("input", "min_range", "max_range", "mode", "name"),
}
for after in by_keyword.values():
    assert after <= {"narrow_range", "axis", "ensure_minimum_range", "dtype"}
assert plain.output.dtype == jnp.int8
assert len(same) == 5
assert all(differing(a.output, b.output) == 0 for a, b in same.values())
assert list_refused
assert tf.quantize_v2 is tf.quantize
assert name_refused

# %% [markdown]
# Some calls that TensorFlow refuses have a result here:
#
# - `quantize_and_dequantize*` with an `axis` and `range_given=True`, and `quantize` and `dequantize` in MIN_FIRST mode
#   with an `axis`: each slice is what the op gives for that slice alone;
# - float16 and bfloat16: computed in float32 and cast once.

# %%
calls = {
    "round trip": (lambda x, lo, hi, axis=None: tf.quantize_and_dequantize_v2(x, lo, hi, range_given=True, axis=axis)),
    "MIN_FIRST": (lambda x, lo, hi, axis=None: tf.quantize(x, lo, hi, "quint8", mode="MIN_FIRST", axis=axis).output),
}
extended = {}
for name, call in calls.items():
    slices = [call(x[:, i], low[i], high[i]) for i in range(x.shape[1])]
    extended[f"{name} with an axis, from its slices"] = call(x, low, high, axis=1), jnp.stack(slices, 1)
for dtype in ("float16", "bfloat16"):
    narrow = x.astype(dtype)
    in_float32 = tf.fake_quant_with_min_max_args(narrow.astype(jnp.float32)).astype(dtype)
    extended[f"{dtype}, from float32 cast"] = tf.fake_quant_with_min_max_args(narrow), in_float32
for what, (got, want) in extended.items():
    print(f"{differing(got, want)} of {got.size} differ, {got.dtype}: {what}")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert len(extended) == 4
assert all(differing(got, want) == 0 for got, want in extended.values())
for dtype in (jnp.float16, jnp.bfloat16):
    assert tf.fake_quant_with_min_max_args(x.astype(dtype)).dtype == dtype

# %% [markdown]
# ## The same bits
#
# The archives in `tests/data` hold inputs and what TensorFlow 2.21 made of them (run without oneDNN, whose kernels have
# other semantics). Many inputs stand on ties and at the ends of ranges, and some ranges are degenerate on purpose. Here
# we compare a few cases of each op; `tests/test_tf_conformance.py` compares all of them.
#
# Left out here: float64 and int32, which need JAX's x64 mode for the same bits; range gradients for cotangents that are
# not integers, because sums of floats depend on their order; and values that TensorFlow leaves undefined, such as the
# code of a NaN.


# %%
def recorded(name, wanted, count):
    """The first `count` cases of an archive for which `wanted(options, tags, shape)` holds."""
    with np.load(DATA / f"tf_{name}.npz") as file:
        manifest = json.loads(str(file["manifest"]))
        for i, case in enumerate(manifest["cases"]):
            keys = [key for key in file.files if key.startswith(f"{i}/")]
            if count and wanted(case["kwargs"], case["tags"], file[f"{i}/x"]):
                count -= 1
                yield case["kwargs"], case["tags"], {key.split("/")[1]: file[key] for key in keys}


def compare(op, options, tags, a):
    """How many values were compared, and how many of them differ."""
    inputs = [jnp.asarray(a[name]) for name in ("x", "min", "max") if name in a]
    f = lambda *inputs: getattr(tf, op)(*inputs, **options)
    if op == "quantize":
        got = f(*inputs)._asdict()
        got["y"] = np.where(a["defined"], got.pop("output"), a["y"])
    elif op == "dequantize":
        got = {"y": f(*inputs).astype(jnp.float32)}
    else:
        y, pullback = jax.vjp(f, *inputs)
        got = {"y": y, **dict(zip(("dx", "dmin", "dmax"), pullback(jnp.asarray(a["g"])), strict=False))}
    names = [name for name in got if name in a and not (name in ("dmin", "dmax") and "float" in tags)]
    return np.array([sum(a[name].size for name in names), sum(differing(got[name], a[name]) for name in names)])


eight_bits = lambda options, tags, x: options["num_bits"] == 8 and x.size in (128, 192)
single = lambda options, tags, x: x.dtype == np.float32
not_int32 = lambda options, tags, x: "qint32" not in (options.get("T"), tags[0])
SAMPLES = {
    "fake_quant_with_min_max_args": (eight_bits, 12),
    "fake_quant_with_min_max_vars": (eight_bits, 12),
    "fake_quant_with_min_max_vars_per_channel": (eight_bits, 12),
    "quantize_and_dequantize_v2": (single, 8),
    "quantize": (not_int32, 8),
    "dequantize": (not_int32, 8),
}
parity = {}
versions = {json.loads(str(np.load(DATA / f"tf_{op}.npz")["manifest"]))["tensorflow"] for op in SAMPLES}
print("recorded with TensorFlow", *versions)
print(f"{'op':<42}{'cases':>6}{'values':>8}{'differ':>8}")
for op, (wanted, count) in SAMPLES.items():
    counts = [compare(op, *case) for case in recorded(op, wanted, count)]
    parity[op] = (len(counts), *sum(counts))
    print(f"{op:<42}{parity[op][0]:>6}{parity[op][1]:>8}{parity[op][2]:>8}")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert all(version.startswith("2.21.") for version in versions)
assert all(cases == SAMPLES[op][1] and differ == 0 for op, (cases, _, differ) in parity.items())

# %% [markdown]
# ## Nudging
#
# The fake-quant ops round to evenly spaced levels and want real 0 to be one of them. So they move the range, by at most
# half a step if it contains 0, and keep its width. A range that does not contain 0 is shifted to it, not extended:
# [1, 2] becomes [0, 1].


# %%
def nudged(low, high, num_bits, narrow_range=False):
    """The ends of the nudged ranges, one for each channel: what inputs far outside are clipped to."""
    low, high = jnp.atleast_1d(jnp.float32(low)), jnp.atleast_1d(jnp.float32(high))
    far = jnp.array([[-1e6], [1e6]]) * jnp.ones_like(low)
    return np.asarray(tf.fake_quant_with_min_max_vars_per_channel(far, low, high, num_bits, narrow_range))


rng = np.random.default_rng(1)
width = np.float32(np.exp(rng.normal(1, 2, 1000)))
low = -width * rng.random(1000, np.float32)
high = low + width
of_bits = {}
print("1000 ranges     largest move, steps   largest change of the width   0 comes back as 0")
for num_bits in (2, 4, 8):
    ends = nudged(low, high, num_bits)
    moves = abs(ends - [low, high]) / (width / (2**num_bits - 1))
    widths = (ends[1] - ends[0]) / width
    at_zero = tf.fake_quant_with_min_max_vars_per_channel(jnp.zeros((1, 1000)), low, high, num_bits)
    of_bits[num_bits] = ends, at_zero
    print(f"{num_bits} bits {moves.max():>28.4f}{abs(widths - 1).max():>30.1e}{(at_zero == 0).sum():>20}")

print("[1, 2] becomes", nudged(1, 2, 8)[:, 0], "and [-2, -1]", nudged(-2, -1, 8)[:, 0])
print("[-1, 1] becomes", nudged(-1, 1, 8)[:, 0], "and with narrow_range", nudged(-1, 1, 8, True)[:, 0])

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
for num_bits, (ends, at_zero) in of_bits.items():
    step = width / (2**num_bits - 1)
    assert (abs(ends - [low, high]) <= 0.5001 * step).all()
    assert np.allclose(ends[1] - ends[0], width, rtol=1e-5)
    assert (at_zero == 0).all()
assert nudged(1, 2, 8)[:, 0].tolist() == [0, 1]
assert nudged(-2, -1, 8)[:, 0].tolist() == [-1, 0]
assert np.allclose(nudged(-1, 1, 8)[:, 0], [-127 / 127.5, 128 / 127.5], atol=1e-6)
assert np.allclose(nudged(-1, 1, 8, True)[:, 0], [-1, 1], atol=1e-6)

# %%
asked = np.linspace(-1.5, 0.5, 801, dtype=np.float32)
got = nudged(asked, asked + 1, 2)
x = jnp.linspace(-0.9, 0.9, 1801)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
levels = -0.4 + np.arange(4) / 3
left.plot(x, levels[abs(np.asarray(x)[:, None] - levels).argmin(1)], color="0.7", label="nearest of 4 levels, no nudge")
left.plot(x, tf.fake_quant_with_min_max_vars(x, -0.4, 0.6, num_bits=2), label="fake quant: 0 is a level")
left.axhline(0, color="0.5", linestyle=":")
left.set(title="2 bits, range [-0.4, 0.6]", xlabel="x", ylabel="value")
left.legend()
right.plot(asked, asked, color="0.7", linestyle="--", label="min, max as passed")
right.plot(asked, asked + 1, color="0.7", linestyle="--")
right.plot(asked, got[0], color="C0", label="nudged min")
right.plot(asked, got[1], color="C1", label="nudged max")
right.set(title="2 bits, ranges [min, min + 1]", xlabel="min as passed", ylabel="end of the range")
right.legend()
figure.savefig(output / "06_nudging.png", dpi=150)
print("saved", output / "06_nudging.png")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
contains_zero = (asked <= 0) & (asked >= -1)
assert len(np.unique(np.round(got[0], 4))) == 4
assert (got[0, asked > 0] == 0).all()
assert (got[1, asked < -1] == 0).all()
assert (abs(got[0] - asked)[contains_zero] < 0.5001 / 3).all()

# %% [markdown]
# In the right plot the nudged minimum has four values: with 2 bits, 0 can be the first, second, third or last level.
#
# `args` and `per_channel` multiply by an inverse of the step where `vars` divides by the step. On ties, where a value
# lies halfway between two levels, the results can differ, by one level. On random inputs, few of which come so close to
# a tie, a difference is rare.

# %%
x_random = jnp.asarray(rng.normal(0, 1, 20000), jnp.float32)
on_ties = on_random = ties = 0
gaps = []
for low, high in rng.uniform((-1, 0.1), (-0.1, 1), (20, 2)).astype(np.float32):
    step = (high - low) / np.float32(255)
    x_ties = (np.arange(-255, 255, dtype=np.float32) + np.float32(0.5)) * step
    args, vars = (
        lambda x, op=op, low=low, high=high: op(x, float(low), float(high))
        for op in (tf.fake_quant_with_min_max_args, tf.fake_quant_with_min_max_vars)
    )
    gap = abs(args(x_ties) - vars(x_ties))
    gaps.append((gap, step))
    ties, on_ties = ties + gap.size, on_ties + int((gap > 0).sum())
    on_random += int((args(x_random) != vars(x_random)).sum())
print(f"args and vars differ on {on_ties} of {ties} ties and on {on_random} of {20 * x_random.size} random values")
print(f"largest difference: {max((gap / step).max() for gap, step in gaps):.4f} levels")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
for gap, step in gaps:
    assert ((gap == 0) | (abs(gap - step) < 1e-3 * step)).all()
assert on_ties > 0
assert on_random < 1e-4 * 20 * x_random.size

# %% [markdown]
# ## Gradients
#
# The gradient with respect to the input is 1 from the nudged minimum to the nudged maximum, both included, and 0
# outside. The gradients with respect to `min` and `max` are the sums of the cotangents of the values that are clipped
# below and above.

# %%
low, high = nudged(-1, 1, 8)[:, 0]
print(f"[-1, 1] is nudged to [{low}, {high}]")
below, above = np.nextafter([low, high], np.float32([-9, 9]), dtype=np.float32)
points = jnp.array([-2.0, below, low, 0.3, high, above, 2.0, 3.0])
g = jnp.arange(1.0, 9.0)
_, pullback = jax.vjp(tf.fake_quant_with_min_max_vars, points, -1.0, 1.0)
dx, dmin, dmax = pullback(g)
print("dx  ", dx, "\ndmin", dmin, "\ndmax", dmax)
gradient = tf.fake_quant_with_min_max_vars_gradient(g, points, -1.0, 1.0)
from_op = [differing(a, b) for a, b in zip(gradient, (dx, dmin, dmax), strict=True)]
print("values of dx, dmin and dmax that differ from fake_quant_with_min_max_vars_gradient:", from_op)

# One of the two ends as passed lies outside the nudged range: the gradient at an end of [-1, 1] itself can be 0.
at_ends = tf.fake_quant_with_min_max_args_gradient(jnp.ones(2), jnp.array([-1.0, 1.0]), -1.0, 1.0)
print("gradient at -1 and 1:", at_ends)

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert (dx == g * jnp.array([0, 0, 1, 1, 1, 0, 0, 0])).all()
assert (dmin, dmax) == (g[:2].sum(), g[5:].sum())
assert from_op == [0, 0, 0]
assert sorted(at_ends.tolist()) == [0, 1]

# %% [markdown]
# `quantize_and_dequantize_v2` stops the gradient outside the range *as passed*. That is neither the range to which it
# clips, nor the range of the data where `range_given=False`. `quantize_and_dequantize` has the same values and passes
# the gradient everywhere; `grad_pass_through` makes the first into the second.


# %%
def values_and_slopes(f, x):
    y, pullback = jax.vjp(f, x)
    return y, pullback(jnp.ones_like(x))[0]


x = jnp.array([-11.0, -10.0, 0.0, 5.0, 7.5, 9.0, 20.0])
v4 = lambda x: tf.quantize_and_dequantize_v2(x, -10.0, 5.0, range_given=True)
v2 = lambda x: tf.quantize_and_dequantize(x, -10.0, 5.0, range_given=True)
y, slope = values_and_slopes(v4, x)
print("x    ", x, "\ny    ", y, "\nslope", slope)
passing = {"quantize_and_dequantize": v2, "grad_pass_through": tf.grad_pass_through(v4)}
passing = {name: values_and_slopes(f, x) for name, f in passing.items()}
for name, (y2, slope2) in passing.items():
    print(f"{name}: {differing(y2, y)} of y differ, slope {slope2}")
_, of_data = values_and_slopes(lambda x: tf.quantize_and_dequantize_v2(x, 0.0, 0.0, range_given=False), x)
print("slope with the range of the data, where the range as passed is [0, 0]:", of_data)

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert y[4] == 7.5  # not clipped
assert slope.tolist() == [0, 1, 1, 1, 0, 0, 0]  # and yet no gradient
for y2, slope2 in passing.values():
    assert differing(y2, y) == 0
    assert (slope2 == 1).all()
assert (of_data == (x == 0)).all()

# %% [markdown]
# The rule is differentiable again, so second derivatives work in reverse mode. Forward mode raises a TypeError. So does
# `jax.hessian`, which is forward over reverse: write `jax.jacrev(jax.grad(f))`.

# %%
f = lambda x: (tf.fake_quant_with_min_max_args(x, -1.0, 1.0) ** 2).sum()
x = jnp.array([-3.0, 0.2, 0.7])
second = jax.grad(jax.grad(f))(0.2)
hessian = jax.jacrev(jax.grad(f))(x)
forward = {"jax.jvp": raises(TypeError, jax.jvp, f, (x,), (x,)), "jax.hessian": raises(TypeError, jax.hessian(f), x)}
print("second derivative of fake_quant(x) ** 2 at 0.2:", second, "\nHessian at", x, "\n", hessian)
print("raises a TypeError:", forward)

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert second == 2
assert (hessian == jnp.diag(jnp.array([0.0, 2.0, 2.0]))).all()
assert forward["jax.jvp"]
assert forward["jax.hessian"]

# %% [markdown]
# ## The modes of quantize and dequantize
#
# In formulas, for codes `lowest .. highest` and a range `[low, high]` that contains 0:
#
# | mode | scale | code | real value |
# |---|---|---|---|
# | MIN_COMBINED | `(highest - lowest) / (high - low)` | `round((x - low) * scale) + lowest` | the inverse |
# | MIN_FIRST | the same | `round(x * scale) - (round(low * scale) - lowest)` | `low` rounded to a step first |
# | SCALED | `min(lowest / low, highest / high)` | `round(x * scale)` | `code / scale` |
#
# MIN_COMBINED clips to the range, MIN_FIRST clips the codes, and SCALED clips to an adjusted range, which it reports.
# With `narrow_range=True` its lowest code is one higher. On [0, 6]:

# %%
x = np.linspace(-1, 7, 4001, dtype=np.float32)
inside = np.clip(x.astype(np.float64), 0, 6)
away = lambda v: np.sign(v) * np.floor(abs(v) + 0.5)
formulas = {
    ("MIN_COMBINED", "quint8"): np.floor(inside * (255 / 6) + 0.5),
    ("MIN_COMBINED", "qint8"): away(inside * (255 / 6) - 128),
    ("MIN_FIRST", "quint8"): away(inside * (255 / 6)),
    ("MIN_FIRST", "qint8"): away(inside * (255 / 6)) - 128,
    ("SCALED", "quint8"): away(inside * (255 / 6)),
    ("SCALED", "qint8"): away(np.clip(x.astype(np.float64), -128 / 127 * 6, 6) * (127 / 6)),
}
reported, codes = {}, {}
tie = abs(inside * (255 / 6) % 1 - 0.5) < 1e-3  # there float32 and the float64 of the formulas can disagree
tie |= abs(x.astype(np.float64) * (127 / 6) % 1 - 0.5) < 1e-3
for (mode, T), formula in formulas.items():
    q = tf.quantize(x, 0.0, 6.0, T, mode=mode)
    reported[mode, T], codes[mode, T] = (q.output_min.item(), q.output_max.item()), np.asarray(q.output)
    print(f"{mode:<13}{T:<7} 0, 3, 6 ->", *(int(q.output[np.argmin(abs(x - v))]) for v in (0, 3, 6)), end="  ")
    print("range", [round(v, 4) for v in reported[mode, T]], end="  ")
    print((codes[mode, T] != formula)[~tie].sum(), "codes differ from the formula")
print(f"left out as too close to a tie: {100 * tie.mean():.2f} % of the values")

# %% [markdown]
# In MIN_COMBINED mode the signed codes are the unsigned ones minus 128, except at ties: after the subtraction a tie
# rounds away from 0, so below 0 it goes down where the unsigned code goes up. Real 0 of a symmetric range is such a
# tie: it becomes 128 unsigned and -1 signed.

# %%
unsigned, signed = (tf.quantize(x, 0.0, 6.0, T).output.astype(jnp.int32) for T in ("quint8", "qint8"))
print((unsigned - 128 != signed)[~tie].sum(), "codes away from ties are not the unsigned ones minus 128")
zero = {T: tf.quantize(jnp.zeros(()), -1.0, 1.0, T) for T in ("quint8", "qint8")}
for T, q in zero.items():
    back = tf.dequantize(*q).item()
    print(f"0 in [-1, 1] -> {T} {int(q.output)} -> {back:.5f}, {back * 127.5:+.2f} steps")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
for key, formula in formulas.items():
    assert (codes[key] == formula)[~tie].all()
assert tie.mean() < 0.01
assert (unsigned - 128 == signed)[~tie].all()
assert [int(q.output) for q in zero.values()] == [128, -1]

# %% [markdown]
# SCALED has no offset, so 0 has code 0 and comes back as 0. The scale fits one end of the range, and the other end is
# adjusted. With `narrow_range=True` the lowest code is not used, and a symmetric range stays symmetric.

# %%
x = jnp.arange(-1200, 1201) / 100
scaled = {}
for low, high, narrow_range in ((-10, 5, False), (-10, 5, True), (-6, 6, False), (-6, 6, True)):
    q = tf.quantize(x, low, high, "qint8", mode="SCALED", narrow_range=narrow_range)
    back = tf.dequantize(*q, mode="SCALED", narrow_range=narrow_range)
    scaled[low, high, narrow_range] = q, back
    ends = q.output_min.item(), q.output_max.item()
    print(f"[{low}, {high}] {narrow_range=!s:<6} codes {q.output.min()}..{q.output.max()}, range {ends}", end=", ")
    print("0 comes back as", *back[x == 0])

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert (x == 0).sum() == 1
for (key, (q, back)), expected in zip(
    scaled.items(), ((-10, 9.921875), (-10, 10), (-128 / 127 * 6, 6), (-6, 6)), strict=True
):
    assert np.allclose((q.output_min.item(), q.output_max.item()), expected, rtol=1e-6)
    assert (int(q.output.min()), int(q.output.max())) == (-128 + key[2], 127)
    assert (back[x == 0] == 0).all()
    assert np.allclose([back.min(), back.max()], expected, rtol=1e-6)
assert tf.quantize(x, -10, 5, "qint8", mode="SCALED").output_max == 9.921875

# %% [markdown]
# ## Does MIN_COMBINED drift?
#
# The r1.4 page of `quantize_v2` says of MIN_COMBINED that "a small bias is introduced where repeated iterations of
# quantizing and dequantizing will introduce a larger and larger error", and recommends MIN_FIRST. We quantize and
# dequantize 20 times, handing on the reported range, and watch the mean error in steps. Beside the two modes we run the
# page's own formula for quint8, "multiply each value of the input by 255/6 and cast to quint8": a cast truncates.


# %%
def truncate(x, low, high):
    scale = np.float32(255) / np.float32(high - low)
    q = ((np.clip(x, low, high) - np.float32(low)) * scale).astype(np.uint8)
    return tf.dequantize(q, low, high)


def round_trip(mode):
    return lambda x, low, high: tf.dequantize(*tf.quantize(x, low, high, "quint8", mode=mode), mode=mode)


TRIPS = {"MIN_COMBINED": round_trip("MIN_COMBINED"), "MIN_FIRST": round_trip("MIN_FIRST"), "page's formula": truncate}
RANGES = ((0.0, 6.0), (-1.0, 2.0), (-6.0, 6.0), (-1.0, 1.0))
drift = {}
print("mean error in steps after 1, 2, 3 and 20 round trips")
for low, high in RANGES:
    start = np.linspace(low, high, 2001, dtype=np.float32)
    for name, trip in TRIPS.items():
        x, errors = start, [0.0]
        for _ in range(20):
            x = np.asarray(trip(x, low, high))
            errors.append(np.mean(np.float64(x) - start) / ((high - low) / 255))
        drift[name, low, high] = errors
        shown = "".join(f"{errors[i]:>8.3f}" for i in (1, 2, 3, 20))
        print(f"{f'[{low:g}, {high:g}]':<10}{name:<15}{shown}")

# %%
figure, every = plt.subplots(1, len(RANGES), figsize=(12, 3.5), sharex=True, layout="constrained")
for axes, (low, high) in zip(every, RANGES, strict=True):
    for name, style in zip(TRIPS, ("-", "--", ":"), strict=True):
        axes.plot(drift[name, low, high], style, label=name)
    axes.set(title=f"[{low:g}, {high:g}]", xlabel="round trips", xticks=range(0, 21, 5))
every[0].set(ylabel="mean error, steps")
every[0].legend()
figure.savefig(output / "06_drift.png", dpi=150)
print("saved", output / "06_drift.png")

# %% [markdown]
# In 2.21's arithmetic MIN_COMBINED does not drift: the first trip moves a value to a level, and further trips leave it
# there. The formula of the page, with a cast that truncates, keeps falling in [-1, 2] and [-1, 1], because a level that
# comes back a rounding too low is truncated to the next one down. TensorFlow 2.21 rounds instead.
#
# MIN_FIRST is the mode that drifts, in [-1, 1]: by one step a trip, until the values reach the end of the range. Both
# ops round `low` to a step, `quantize` by `round(low * scale)` and `dequantize` by `round(low / step)`. In a
# symmetric range `low` is 127.5 steps below 0, and float32 can put the two quotients on different sides of the tie, as
# in [-1, 1], or on the same side, as in [-6, 6].
#
# So that this does not rest on four ranges: all 256 codes through `dequantize` and `quantize`, for 4000 ranges of three
# kinds. A range in which no code changes cannot drift after the first trip.

# %%
rng = np.random.default_rng(2)
width, part = np.exp(rng.normal(1, 2, 4000)), rng.random(4000)
kinds = {
    "random": (-width * part, width * (1 - part)),
    "from 0": (0 * width, width),
    "symmetric": (-width, width),
}
changed, zero_error, most = {}, {}, 0
codes_moved, zero_off = {}, {}
print("           of 4000 ranges: a code changes   0 is off by a step   largest error of 0, steps   codes that change")
for kind, ends in kinds.items():
    low, high = (jnp.asarray(v, jnp.float32) for v in ends)
    for T in ("qint8", "quint8"):
        info = np.iinfo(T[1:])
        codes = np.broadcast_to(np.arange(info.min, info.max + 1, dtype=info.dtype), (4000, 256))
        for mode in ("MIN_COMBINED", "MIN_FIRST", "SCALED"):
            options = {"mode": mode, "axis": 0}
            to_codes = lambda x, T=T, low=low, high=high, options=options: tf.quantize(
                x, low, high, T, ensure_minimum_range=1e-6, **options
            )
            again = to_codes(tf.dequantize(codes, low, high, **options)).output
            moved = again.astype(jnp.int32) - codes
            changed[kind, T, mode] = int((moved != 0).any(1).sum())
            most = max(most, int(abs(moved).max()))
            codes_moved[kind, T, mode] = np.unique((moved != 0).sum(1)).tolist()
            at_zero = tf.dequantize(to_codes(jnp.zeros((4000, 1))).output, low, high, **options)[:, 0]
            at_zero = abs(at_zero * 255 / (high - low))  # in steps
            zero_error[kind, T, mode] = float(at_zero.max())
            zero_off[kind, T, mode] = int((at_zero > 0.9).sum())
            print(f"{kind:<11}{T:<8}{mode:<14}{changed[kind, T, mode]:>10}{zero_off[kind, T, mode]:>21}", end="")
            print(f"{zero_error[kind, T, mode]:>28.5f}   {' or '.join(map(str, codes_moved[kind, T, mode]))}")
print("the largest change of a code is", most)

# %% [markdown]
# MIN_COMBINED changes no code in any of these ranges. Its bias is another one: unless the range starts at 0, real 0 is
# in general not a level, and comes back wrong by up to half a step, once. MIN_FIRST gives real 0 to float32 accuracy,
# unless the two roundings disagree, which in this sample they do in about a quarter of the symmetric ranges. There 0 is
# wrong by a whole step, and a trip moves all codes but the last by one. SCALED changes no code and keeps 0 exactly;
# with an unsigned type it has no negative values.

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
for low, high in RANGES:
    assert np.ptp(drift["MIN_COMBINED", low, high][1:]) == 0
    assert abs(drift["MIN_COMBINED", low, high][20]) < 0.01
    if (low, high) != (-1, 1):
        assert np.ptp(drift["MIN_FIRST", low, high][1:]) == 0
        assert abs(drift["MIN_FIRST", low, high][20]) < 0.01
assert drift["MIN_FIRST", -1, 1][1] > 0.99
assert drift["MIN_FIRST", -1, 1][20] > 19
truncated = [np.ptp(drift["page's formula", low, high][1:]) > 0.5 for low, high in RANGES]
assert truncated == [False, True, False, True]

for (kind, _, mode), count in changed.items():
    if mode != "MIN_FIRST" or kind != "symmetric":
        assert count == 0
    else:
        assert 800 < count < 1200
assert most == 1
for key, count in changed.items():
    assert set(codes_moved[key]) <= {0, 255}
    assert zero_off[key] == count
assert tf.quantize(jnp.float32(-1), -1.0, 1.0, "quint8", mode="SCALED").output == 0
for (kind, _, mode), error in zero_error.items():
    if mode == "SCALED" or kind == "from 0":
        assert error == 0
    elif mode == "MIN_COMBINED":
        assert 0.49 < error < 0.501
    else:
        assert error > 0.999 if kind == "symmetric" else error < 1e-4

# %% [markdown]
# ## What differs from the old pages
#
# The left column names a page of the TensorFlow documentation, or the article on zero points of 2023. The right column
# is TensorFlow 2.21 and `jaxquant.tf`, and the cell below tries each row on the latter.
#
# | | page | says | 2.21 |
# |---|---|---|---|
# | 1 | fake quant, r1 | 255 steps | `2 ** num_bits - 1 - narrow_range` |
# | 2 | fake quant, r1 | gradient: the raw `min`, `max` | the nudged ones |
# | 3 | fake quant, r1 | per channel: rank 1, 2 or 4 | any rank from 1 |
# | 4 | fake quant, r1 | nothing of `min == max == 0` | 0 everywhere, and the gradient passes |
# | 5 | article, 2023 | [40, 1000] is extended to [0, 1000] | so does `quantize`; fake quant shifts to [0, 960] |
# | 6 | quantize_v2, r1.4 | SCALED never uses the lowest code | only with `narrow_range=True` |
# | 7 | quantize_v2, r1.4 | SCALED reports [-m, m] | the adjusted range |
# | 8 | quantize_v2, r1.4 | SCALED: `s = (max_fixed - min_fixed) / (2 * m)` | for unsigned twice that |
# | 9 | quantize_v2, r1.4 | half the codes is subtracted for qint8 | for every signed type |
# | 10 | quantize_v2, r1.4 | close ends are separated by an epsilon | and the range is made to contain 0 |
# | 11 | QuantizeAndDequantizeV2 | `round(clamp(x) * scale) / scale` | times an inverse of its own |
# | 12 | QuantizeAndDequantizeV2 | clamps always | only a given range |
# | 13 | QuantizeAndDequantizeV2 | `axis=-1` is no axis | None is none, -1 the last |
# | 14 | quantize_and_dequantize_v2, 2.4 | example with min 5 and max -10 | refused |
# | 15 | quantize_and_dequantize_v2, 2.4 | "gradient outside the range is 0" | the range as passed, even if not used |
# | 16 | QuantizeAndDequantizeV2 | float16 and bfloat16 | no CPU kernel in 2.21; here they work |

# %%
rows = {}
x = jnp.asarray(rng.normal(0, 2, 4096), jnp.float32)
levels = lambda **options: len(np.unique(tf.fake_quant_with_min_max_args(x, -1.0, 1.0, **options)))
rows[1] = [levels(num_bits=b, narrow_range=n) for b in (2, 4) for n in (False, True)] == [4, 3, 16, 15]

low, high = nudged(-1, 1, 8)[:, 0]
between = jnp.array([(low - 1) / 2, (high + 1) / 2])  # only in the raw range, only in the nudged one
slope = tf.fake_quant_with_min_max_args_gradient(jnp.ones(2), between, -1.0, 1.0)
rows[2] = -1 < between[0] < low and 1 < between[1] < high and slope.tolist() == [0, 1]

ranks = [jnp.ones((2,) * rank) for rank in (1, 2, 3, 4, 5)]
end = jnp.ones(2)
rows[3] = all(tf.fake_quant_with_min_max_vars_per_channel(v, -end, end).shape == v.shape for v in ranks)

y, slope = values_and_slopes(lambda x: tf.fake_quant_with_min_max_vars(x, 0.0, 0.0), x)
rows[4] = (y == 0).all() and (slope == 1).all()

shifted, extended = nudged(40, 1000, 8)[:, 0], tf.quantize(x, 40.0, 1000.0, "quint8")
rows[5] = np.allclose(shifted, [0, 960]) and (extended.output_min, extended.output_max) == (0, 1000)

scaled = [tf.quantize(x, -1.0, 1.0, "qint8", mode="SCALED", narrow_range=n) for n in (False, True)]
rows[6] = [int(q.output.min()) for q in scaled] == [-128, -127]
rows[7] = scaled[0].output_min == np.float32(-128 / 127) and scaled[1].output_min == -1
rows[8] = tf.quantize(jnp.float32(6), 0.0, 6.0, "quint8", mode="SCALED").output == 255
rows[9] = tf.quantize(jnp.float32(-1), -1.0, 1.0, "qint16").output == -(2**15)

apart, with_zero = (tf.quantize(x, *ends, "quint8") for ends in ((0.0, 0.001), (1.0, 2.0)))
rows[10] = np.isclose(apart.output_max, 0.01) and (with_zero.output_min, with_zero.output_max) == (0, 2)

scale = np.float32(127) / np.float32(3)  # of [-2, 3]
by_page = np.round(np.clip(x, np.float32(-128) / scale, 3) * scale) / scale
by_op = tf.quantize_and_dequantize_v2(x, -2.0, 3.0, range_given=True)
rows[11] = 0 < differing(by_op, by_page) < x.size and np.allclose(by_op, by_page, rtol=1e-6)

unsigned = [
    tf.quantize_and_dequantize_v2(jnp.array([-1.0, 1.0]), 0.0, 1.0, signed_input=False, range_given=given)
    for given in (True, False)
]
rows[12] = unsigned[0][0] == 0 and unsigned[1][0] == -1

matrix = x.reshape(64, 64)
by_axis = {axis: tf.quantize_and_dequantize(matrix, 0.0, 0.0, axis=axis) for axis in (None, -1, 1)}
rows[13] = differing(by_axis[-1], by_axis[1]) == 0 and differing(by_axis[None], by_axis[1]) > 0

rows[14] = raises(ValueError, tf.quantize_and_dequantize_v2, x, input_min=5.0, input_max=-10.0, range_given=True)

_, slope = values_and_slopes(lambda x: tf.quantize_and_dequantize_v2(x, -1.0, 1.0), x)
rows[15] = (slope == (abs(x) <= 1)).all() and (slope == 0).any()

rows[16] = all(
    tf.quantize_and_dequantize_v2(x.astype(dtype), -1.0, 1.0).dtype == dtype for dtype in (jnp.float16, jnp.bfloat16)
)
print("the right column holds in", sum(map(bool, rows.values())), "of", len(rows), "rows")

# %% tags=["hide-cell"] jupyter={"source_hidden": true}
assert list(rows) == list(range(1, 17))
for row, holds in rows.items():
    assert holds, f"row {row}"
assert sum(cases for cases, _, _ in parity.values()) == 60
assert sum(differ for _, _, differ in parity.values()) == 0
values = sum(values for _, values, _ in parity.values())
print(f"all claims hold: {values} values with TensorFlow's bits, {len(rows)} rows")
