# SPDX-License-Identifier: Apache-2.0
"""jaxquant.tf against TensorFlow 2.21's CPU kernels, as recorded by tests/data/make_tf_cases.py."""

import json
import pathlib

import jax
import jax.numpy as jnp
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


# Every twelfth case by default, because tracing and compiling take the time, and the others in the slow lane.
PARTS = 12
parts = pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])


def cases(archive, part):
    with np.load(DATA / f"tf_{archive}.npz") as file:
        arrays = {name: file[name] for name in file.files}
    manifest = json.loads(str(arrays.pop("manifest")))
    assert manifest["tensorflow"].startswith("2.21.")
    for i, case in list(enumerate(manifest["cases"]))[part::PARTS]:
        values = {name.split("/")[1]: a for name, a in arrays.items() if name.split("/")[0] == str(i)}
        yield case["kwargs"], case["tags"], values


def got_arrays(op, options, a):
    """What the op and its vjp give for the inputs of a case, under the names of the archive."""
    inputs = [jnp.asarray(a[name]) for name in ("x", "min", "max") if name in a]
    y, vjp = jax.vjp(lambda *inputs: getattr(tf, op)(*inputs, **options), *inputs)
    return {"y": y, **dict(zip(("dx", "dmin", "dmax"), vjp(jnp.asarray(a["g"])), strict=False))}


def close_sums(got, want, most) -> int:
    """How many of the sums of floats differ by more than rounding: 1e-5 of the sum of magnitudes, or as NaN or inf."""
    got, want = np.asarray(got), np.asarray(want)
    with np.errstate(invalid="ignore"):
        same = (got == want) | ((got != got) & (want != want)) | (abs(got - want) <= 1e-5 * most)
    return int((~same).sum())


def compare(op, options, tags, a):
    """The values compared, and how many differ."""
    got = got_arrays(op, options, a)
    want = {name: a[name] for name in ("y", "dx", "dmin", "dmax") if name in a}
    if op == "quantize_and_dequantize":  # the gradient of the raw ops V2 and V3
        want["dx"] = a["g"]
    if op.startswith("quantize_and"):
        want |= {"dmin": np.zeros_like(a["min"]), "dmax": np.zeros_like(a["max"])}
    differ = {}
    for name, value in want.items():
        if name in ("dmin", "dmax") and "float" in tags:
            most = got_arrays(op, options, a | {"g": abs(a["g"])})[name]
            differ[name] = close_sums(got[name], value, most)
        else:
            differ[name] = differing(got[name], value)
    return sum(v.size for v in want.values()), differ


@parts
@pytest.mark.parametrize(("archive", "op"), [(archive, op) for archive, ops in ARCHIVES.items() for op in ops])
def test_every_case_gives_the_bits_of_tensorflow(archive, op, part, compared):
    failed, total, number = [], 0, 0
    for options, tags, a in cases(archive, part):
        with x64(a["x"].dtype == np.float64):
            values, differ = compare(op, options, tags, a)
        number, total = number + 1, total + values
        if any(differ.values()):
            failed.append((number - 1, options, tags, differ))
    compared("TensorFlow 2.21, recorded", op, total, sum(sum(d.values()) for *_, d in failed))
    assert number >= 20
    assert not failed, f"{len(failed)} of {number} cases, the first:\n" + "\n".join(map(str, failed[:10]))


def integer_call(op, options, a):
    """What the op gives, under the names of the archive."""
    inputs = [jnp.asarray(a[name]) for name in ("x", "min", "max")]
    if op == "dequantize":
        return {"y": tf.dequantize(*inputs, **options).astype(jnp.float32)}
    got = tf.quantize(*inputs, **options)
    codes = np.where(a["defined"], np.asarray(got.output), a["y"])
    return {"y": codes, "output_min": got.output_min, "output_max": got.output_max}


def far(got, want) -> int:
    """How many values are further off than the scale of an int32 is without x64: 2e-7."""
    span = 2.0**32 if want.dtype == np.int32 else np.abs(want)
    with np.errstate(invalid="ignore"):
        near = np.abs(np.float64(got) - want) <= 2e-7 * span
    return int((~near & ~np.isclose(got, want, 0, 0, equal_nan=True)).sum())


@parts
@pytest.mark.parametrize("wide", [True, False], ids=["x64", "x32"])
@pytest.mark.parametrize("op", ["quantize", "dequantize"])
def test_every_integer_case_gives_the_bits_of_tensorflow(op, wide, part, compared):
    """Codes and ranges to the bit; those of int32 without x64, whose scale needs float64, to 2e-7."""
    failed, total, number = [], 0, 0
    for options, tags, a in cases(op, part):
        is_int32 = "qint32" in (options.get("T"), tags[0])
        if wide and not is_int32:
            continue
        with x64(wide):
            got = integer_call(op, options, a)
        measure = far if is_int32 and not wide else differing
        differ = {name: measure(value, a[name]) for name, value in got.items()}
        number += 1
        total += sum(np.size(v) for v in got.values()) * (measure is differing)
        if any(differ.values()):
            failed.append((number - 1, options, tags, differ))
    name = f"{op} (int32 under x64)" if wide else op
    compared("TensorFlow 2.21, recorded", name, total, sum(sum(d.values()) for *_, d in failed))
    assert number >= (5 if wide else 20)
    assert not failed, f"{len(failed)} of {number} cases, the first:\n" + "\n".join(map(str, failed[:10]))
