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

UINT8 = QuantSpec(signed=False, symmetric=False)
INT8 = QuantSpec(symmetric=False)


def codes(x, spec, qparams):
    return quantize(jnp.asarray(x, jnp.float32), spec, qparams).values.tolist()


def test_symmetric_uint8():
    """[0, 1000] to [0, 255]."""
    spec = QuantSpec(signed=False)
    qparams = qparams_from_range(Range(0.0, 1000.0), spec)
    assert f"{qparams.scale:.6f}"[:6] == "3.9215"
    assert qparams.zero_point == 0
    assert codes([0.0, 1000.0], spec, qparams) == [0, 255]
    assert 500 / float(qparams.scale) == pytest.approx(127.5)
    assert codes([500.0], spec, qparams) == [128]  # a tie, to the even one


def test_affine_uint8():
    """[-20, 1000]: without a zero point -20 would be -5."""
    qparams = qparams_from_range(Range(-20.0, 1000.0), UINT8)
    assert (qparams.scale, qparams.zero_point) == (4.0, 5.0)
    assert codes([-20.0, 0.0, 1000.0], UINT8, qparams) == [0, 5, 255]


def test_affine_int8():
    """The same range in signed integers: the zero point of uint8 less 128."""
    qparams = qparams_from_range(Range(-20.0, 1000.0), INT8)
    assert (qparams.scale, qparams.zero_point) == (4.0, -123.0)
    assert codes([-20.0, 0.0, 1000.0], INT8, qparams) == [-128, -123, 127]


def test_a_skewed_range_is_extended_to_0_and_wastes_codes():
    """[40, 1000] becomes [0, 1000]: 40 is code 10, so that 0..9 are never used, 10 of 255 steps."""
    qparams = qparams_from_range(Range(40.0, 1000.0), UINT8)
    assert qparams == qparams_from_range(Range(0.0, 1000.0), UINT8)
    used = codes(np.linspace(40, 1000, 10_000), UINT8, qparams)
    assert min(used) == 10
    assert max(used) == 255
    assert round(100 * min(used) / 255, 2) == 3.92


@pytest.mark.parametrize("spec", [UINT8, INT8])
def test_the_zero_point_has_the_dtype_of_the_values(spec):
    q = quantize(jnp.linspace(-20.0, 1000.0, 7), spec)
    assert q.zero_point.dtype == q.values.dtype == spec.dtype


@pytest.mark.parametrize("spec", [pytest.param(UINT8, marks=pytest.mark.slow), INT8])
def test_comparing_with_the_zero_point_is_comparing_with_0(spec):
    """So relu is a maximum of integers."""
    x = jax.random.normal(jax.random.key(0), (1000,)) * 30
    q = quantize(x, spec)
    y = dequantize(q)
    for compare in (jnp.less, jnp.equal, jnp.greater):
        assert (compare(q.values, q.zero_point) == compare(y, 0)).all()
    relu = dequantize(dataclasses.replace(q, values=jnp.maximum(q.values, q.zero_point)))
    assert (relu == jax.nn.relu(y)).all()
    assert (relu != y).any()


def test_padding_with_0_is_padding_with_the_zero_point():
    x = jnp.asarray(np.random.default_rng(0).integers(-5, 250, (1, 1, 6)) * 4.0, jnp.float32)
    q, kernel = quantize(x, UINT8, QParams(4.0, 5)), quantize(jnp.ones((1, 1, 3)), QuantSpec(), QParams(1.0, 0))
    padded = jnp.pad(x, ((0, 0), (0, 0), (1, 1)))
    want = padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]
    assert (conv_general_dilated(q, kernel, (1,), "SAME") == want).all()


def test_another_padding_value_must_be_representable():
    """-20 is on the grid of [-20, 1000] and pads exactly; 2 is not, and -24 is outside: both come back as others."""
    qparams = qparams_from_range(Range(-20.0, 1000.0), UINT8)
    value = jnp.array([-20.0, 2.0, -24.0])
    assert (fake_quant(value, UINT8, qparams) == value).tolist() == [True, False, False]
    x = jnp.array([0.0, 40.0, 1000.0])
    pad = lambda v: jnp.concatenate([v[None], x, v[None]])
    q = quantize(x, UINT8, qparams)
    in_codes = jnp.pad(q.values, 1, constant_values=quantize(value[0], UINT8, qparams).values)
    assert (quantize(pad(value[0]), UINT8, qparams).values == in_codes).all()
    # A range made to hold the value holds it: extend the range before fitting.
    wider = qparams_from_range(Range(min(-24.0, -20.0), 1000.0), UINT8)
    assert abs(float(fake_quant(jnp.float32(-24.0), UINT8, wider)) + 24.0) <= float(wider.scale) / 2
