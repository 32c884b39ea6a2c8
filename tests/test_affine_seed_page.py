# SPDX-License-Identifier: Apache-2.0
"""Seed page 004, "Tensor Quantization: The Untold Story", as written: its numbers, in the affine vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import (
    QParams,
    QuantSpec,
    Range,
    conv_general_dilated,
    dequantize,
    fake_quant,
    qparams_from_range,
    quantize,
)

pytestmark = pytest.mark.bits

F = np.float32
UINT8 = QuantSpec(signed=False, symmetric=False)
INT8 = QuantSpec(symmetric=False)


def numbers(qparams):
    return qparams.scale.item(), qparams.zero_point.item()


def codes(x, spec, qparams):
    return quantize(F(x), spec, qparams).values.tolist()


def test_symmetric_uint8():
    """[0, 1000] to [0, 255]."""
    spec = QuantSpec(signed=False)
    qparams = qparams_from_range(Range(0.0, 1000.0), spec)
    assert f"{qparams.scale:.6f}"[:6] == "3.9215"
    assert qparams.zero_point.item() == 0
    assert codes([0.0, 1000.0], spec, qparams) == [0, 255]
    assert 500 / float(qparams.scale) == pytest.approx(127.5)
    assert codes([500.0], spec, qparams) == [128]  # a tie, to the even one


def test_affine_uint8():
    """[-20, 1000]: without a zero point -20 would be -5."""
    qparams = qparams_from_range(Range(-20.0, 1000.0), UINT8)
    assert numbers(qparams) == (4.0, 5.0)
    assert codes([-20.0, 0.0, 1000.0], UINT8, qparams) == [0, 5, 255]


def test_affine_int8():
    """The same range in signed integers: the zero point of uint8 less 128."""
    qparams = qparams_from_range(Range(-20.0, 1000.0), INT8)
    assert numbers(qparams) == (4.0, -123.0)
    assert codes([-20.0, 0.0, 1000.0], INT8, qparams) == [-128, -123, 127]


def test_a_skewed_range_is_extended_to_0_and_wastes_codes():
    """[40, 1000] becomes [0, 1000]: 40 is code 10, so that 0..9 are never used, 10 of 255 steps."""
    qparams = qparams_from_range(Range(40.0, 1000.0), UINT8)
    assert numbers(qparams) == numbers(qparams_from_range(Range(0.0, 1000.0), UINT8))
    used = codes(np.linspace(40, 1000, 10_000), UINT8, qparams)
    assert min(used) == 10
    assert max(used) == 255
    assert round(100 * min(used) / 255, 2) == 3.92


@pytest.mark.parametrize("spec", [UINT8, INT8])
def test_the_zero_point_has_the_dtype_of_the_values(spec):
    q = jax.eval_shape(lambda: quantize(jnp.linspace(-20.0, 1000.0, 7), spec))
    assert q.zero_point.dtype == q.values.dtype == spec.dtype


@pytest.mark.parametrize("spec", [pytest.param(UINT8, marks=pytest.mark.slow), INT8])
def test_comparing_with_the_zero_point_is_comparing_with_0(spec):
    """So relu is a maximum of integers."""
    x = F(np.random.default_rng(0).normal(size=1000) * 30)
    q = quantize(x, spec)
    y, values, zero = (np.asarray(v) for v in (dequantize(q), q.values, q.zero_point))
    for compare in (np.less, np.equal, np.greater):
        assert (compare(values, zero) == compare(y, 0)).all()
    relu = np.asarray(dequantize(dataclasses.replace(q, values=np.maximum(values, zero))))
    assert (relu == np.maximum(y, 0)).all()
    assert (relu != y).any()


def test_padding_with_0_is_padding_with_the_zero_point():
    x = F(np.random.default_rng(0).integers(-5, 250, (1, 1, 6)) * 4)
    q, kernel = quantize(x, UINT8, QParams(4.0, 5)), quantize(np.ones((1, 1, 3), F), QuantSpec(), QParams(1.0, 0))
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1)))
    want = padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]
    assert (np.asarray(conv_general_dilated(q, kernel, (1,), "SAME")) == want).all()


def test_another_padding_value_must_be_representable():
    """-20 is on the grid of [-20, 1000] and pads exactly; 2 is not, and -24 is outside: both come back as others."""
    qparams = qparams_from_range(Range(-20.0, 1000.0), UINT8)
    value = F([-20.0, 2.0, -24.0])
    assert (np.asarray(fake_quant(value, UINT8, qparams)) == value).tolist() == [True, False, False]
    x = [0.0, 40.0, 1000.0]
    (pad,) = codes(value[:1], UINT8, qparams)
    assert codes([-20.0, *x, -20.0], UINT8, qparams) == [pad, *codes(x, UINT8, qparams), pad]
    # A range made to hold the value holds it: extend the range before fitting.
    wider = qparams_from_range(Range(min(-24.0, -20.0), 1000.0), UINT8)
    held = np.asarray(fake_quant(value, UINT8, wider))[2]
    assert abs(held + 24.0) <= float(wider.scale) / 2
