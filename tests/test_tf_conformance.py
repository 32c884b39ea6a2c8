# SPDX-License-Identifier: Apache-2.0
"""jaxquant.tf against TensorFlow 2.21's CPU kernels, as recorded by tests/data/make_tf_cases.py."""

import collections
import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from exact import differing, x64

from jaxquant import tf

pytestmark = pytest.mark.bits

DATA = pathlib.Path(__file__).parent / "data"
ARCHIVES = {
    "fake_quant_with_min_max_args": ["fake_quant_with_min_max_args"],
    "fake_quant_with_min_max_vars": ["fake_quant_with_min_max_vars"],
    "fake_quant_with_min_max_vars_per_channel": ["fake_quant_with_min_max_vars_per_channel"],
    "quantize_and_dequantize_v2": ["quantize_and_dequantize_v2", "quantize_and_dequantize"],
}


def parts(count, default):
    """Of every `count`-th program the cases; tracing and compiling take the time, so that most are in the slow lane.

    Together, those by default have every mode, axis and dtype, and the options that are a bool both ways.
    """
    marks = ((part, () if part == default else pytest.mark.slow) for part in range(count))
    return [pytest.param(part, count, marks=mark, id=str(part)) for part, mark in marks]


@functools.cache
def groups(archive):
    """The cases of an archive: lists of those that differ in values alone, and so have one program."""
    with np.load(DATA / f"tf_{archive}.npz") as file:
        arrays = {name: file[name] for name in file.files}
    manifest = json.loads(str(arrays.pop("manifest")))
    assert manifest["tensorflow"].startswith("2.21.")
    of_case, found = collections.defaultdict(dict), collections.defaultdict(list)
    for name, a in arrays.items():
        number, part = name.split("/")
        of_case[number][part] = a
    for i, case in enumerate(manifest["cases"]):
        options, a = case["kwargs"], of_case[str(i)]
        static = tuple((name, v) for name, v in options.items() if name not in ("min", "max"))
        found[static, a["x"].dtype.str, a["x"].shape].append((options, case["tags"], a))
    return list(found.values())


@functools.cache
def passes(ops, options):
    """For a cotangent and inputs what each op gives, and its vjp; compiled, where no range is static."""

    def run(g, *inputs):
        got = {}
        for op in ops:
            y, vjp = jax.vjp(lambda *inputs, op=op: getattr(tf, op)(*inputs, **dict(options)), *inputs)
            got[op] = dict(zip(("y", "dx", "dmin", "dmax"), (y, *vjp(g)), strict=False))
        return got

    return run if "min" in dict(options) else jax.jit(run)


def got_arrays(ops, options, a):
    """Under the names of the archive."""
    arrays = jax.device_put([a[name] for name in ("g", "x", "min", "max") if name in a])
    return passes(ops, tuple(options.items()))(*arrays)


def close_sums(got, want, most) -> int:
    """How many of the sums of floats differ by more than rounding: 1e-5 of the sum of magnitudes, or as NaN or inf."""
    got, want = np.asarray(got), np.asarray(want)
    with np.errstate(invalid="ignore"):
        same = (got == want) | ((got != got) & (want != want)) | (abs(got - want) <= 1e-5 * most)
    return int((~same).sum())


def compare(ops, options, tags, a):
    """The values compared of each op, and how many differ."""
    got, sums, compared = got_arrays(ops, options, a), {}, {}
    if "float" in tags:
        sums = got_arrays(ops, options, a | {"g": abs(a["g"])})
    for op in ops:
        want = {name: a[name] for name in ("y", "dx", "dmin", "dmax") if name in a}
        if op == "quantize_and_dequantize":  # the gradient of the raw ops V2 and V3
            want["dx"] = a["g"]
        if op.startswith("quantize_and"):
            want |= {"dmin": np.zeros_like(a["min"]), "dmax": np.zeros_like(a["max"])}
        differ = {}
        for name, value in want.items():
            if name in ("dmin", "dmax") and sums:
                differ[name] = close_sums(got[op][name], value, np.asarray(sums[op][name]))
            else:
                differ[name] = differing(got[op][name], value)
        compared[op] = sum(v.size for v in want.values()), differ
    return compared


@pytest.mark.parametrize(("part", "count"), parts(11, 3))
@pytest.mark.parametrize("archive", ARCHIVES)
def test_every_case_gives_the_bits_of_tensorflow(archive, part, count, compared):
    ops, number = tuple(ARCHIVES[archive]), 0
    failed, totals = [], collections.Counter()
    for options, tags, a in (case for group in groups(archive)[part::count] for case in group):
        with x64(a["x"].dtype == np.float64):
            of_ops = compare(ops, options, tags, a)
        number += 1
        for op, (values, differ) in of_ops.items():
            totals[op] += values
            if any(differ.values()):
                failed.append((op, options, tags, differ))
    for op in ops:
        compared("TensorFlow 2.21, recorded", op, totals[op], sum(sum(d.values()) for f, *_, d in failed if f == op))
    assert number >= 20
    assert not failed, f"{len(failed)} of {number} cases, the first:\n" + "\n".join(map(str, failed[:10]))


@functools.cache
def integers(op, options):
    if op == "dequantize":
        return jax.jit(lambda *a: tf.dequantize(*a, **dict(options)).astype(np.float32))
    return jax.jit(lambda *a: tf.quantize(*a, **dict(options)))


def integer_call(op, options, a):
    """What the op gives, under the names of the archive."""
    got = integers(op, tuple(options.items()))(*(a[name] for name in ("x", "min", "max")))
    if op == "dequantize":
        return {"y": got}
    codes = np.where(a["defined"], np.asarray(got.output), a["y"])
    return {"y": codes, "output_min": got.output_min, "output_max": got.output_max}


def is_int32(options, tags):
    return "qint32" in (options.get("T"), tags[0])


def far(got, want) -> int:
    """How many values are further off than the scale of an int32 is without x64: 2e-7."""
    span = 2.0**32 if want.dtype == np.int32 else np.abs(want)
    with np.errstate(invalid="ignore"):
        near = np.abs(np.float64(got) - want) <= 2e-7 * span
    return int((~near & ~np.isclose(got, want, 0, 0, equal_nan=True)).sum())


def check_integers(op, wide, groups, compared):
    """Codes and ranges to the bit; those of int32 without x64, whose scale needs float64, to 2e-7. Returns how many."""
    failed, total, number = [], 0, 0
    for options, tags, a in (case for group in groups for case in group):
        with x64(wide):
            got = integer_call(op, options, a)
        measure = far if is_int32(options, tags) and not wide else differing
        differ = {name: measure(value, a[name]) for name, value in got.items()}
        number += 1
        total += sum(np.size(v) for v in got.values()) * (measure is differing)
        if any(differ.values()):
            failed.append((number - 1, options, tags, differ))
    name = f"{op} (int32 under x64)" if wide else op
    compared("TensorFlow 2.21, recorded", name, total, sum(sum(d.values()) for *_, d in failed))
    assert not failed, f"{len(failed)} of {number} cases, the first:\n" + "\n".join(map(str, failed[:10]))
    return number


@pytest.mark.parametrize(("part", "count"), parts(11, 6))
@pytest.mark.parametrize("op", ["quantize", "dequantize"])
def test_every_integer_case_gives_the_bits_of_tensorflow(op, part, count, compared):
    assert check_integers(op, False, groups(op)[part::count], compared) >= 20


@pytest.mark.parametrize(("part", "count"), parts(3, 1))
@pytest.mark.parametrize("op", ["quantize", "dequantize"])
def test_every_case_of_int32_gives_the_bits_of_tensorflow_under_x64(op, part, count, compared):
    of_int32 = [group for group in groups(op) if is_int32(*group[0][:2])]
    assert check_integers(op, True, of_int32[part::count], compared) >= 5
