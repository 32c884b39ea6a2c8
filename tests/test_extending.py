# SPDX-License-Identifier: Apache-2.0
"""What is added from outside, in one place, works everywhere: a granularity, a format of numbers or scales, a range."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from inputs import normal, zeros
from jax import lax

from jaxquant import (
    PerBlock,
    PerChannel,
    QParams,
    QuantSpec,
    Rule,
    dequantize,
    dot_general,
    fake_quant,
    fit_qparams,
    init_qparams,
    load,
    quantize,
    quantize_fn,
    save,
    weight_spec,
)
from jaxquant._arrays._fit import METHODS
from jaxquant._platform._cpu import _in_passes
from jaxquant._platform._primitive import FORMS
from jaxquant._spec._formats import FLOATS, Float
from jaxquant._spec._granularity import Granularity
from jaxquant._spec._scale_formats import SCALE_FORMATS, Rounded
from jaxquant.solve._model import model_of
from jaxquant.solve._rounding import rounded
from jaxquant.typing import Gram

X = normal(0, 6, 16)
W = normal(1, 16, 8)
MATMUL = (((1,), (0,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class PerHalf(Granularity):
    """A scale for each half of an axis, whatever its length, and each index of the others."""

    axis: int

    def scale_shape(self, shape, spec):
        if shape[self.axis] % 2:
            raise ValueError(f"{spec} halves axis {self.axis} of shape {shape}, which is odd.")
        return tuple(2 if i == self.axis else n for i, n in enumerate(shape))


def halves(axis, shape, **kw):
    """Specs that share scales alike in arrays of a shape: by the granularity from outside, and by blocks."""
    own, blocks = PerHalf(axis), PerBlock(axis, shape[axis] // 2)
    return QuantSpec(granularity=own, **kw), QuantSpec(granularity=blocks, **kw)


@pytest.mark.parametrize("axis", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_granularity_quantizes(axis):
    own, blocks = halves(axis, X.shape)
    assert_same_bits(fake_quant(X, own), fake_quant(X, blocks))
    q = quantize(X, own, fit_qparams(X, own, "mse"))
    assert_same_bits(q.values, quantize(X, blocks, fit_qparams(X, blocks, "mse")).values)
    assert_same_bits(dequantize(q), fake_quant(X, own, fit_qparams(X, own, "mse")))
    assert_same_bits(dequantize(q.T), dequantize(q).T)


def test_a_granularity_says_what_does_not_fit():
    with pytest.raises(ValueError, match=r"QuantSpec\(bits=8, granularity=PerHalf\(axis=0\)\) halves axis 0"):
        quantize(X[1:], QuantSpec(granularity=PerHalf(0)))
    q = quantize(X, QuantSpec(granularity=PerHalf(0)))
    with pytest.raises(ValueError, match="do not fit"):
        dequantize(dataclasses.replace(q, values=q.values[1:]))


def test_a_granularity_contracts():
    products = [
        dot_general(quantize(X, of_x), quantize(W, of_w), MATMUL)
        for of_x, of_w in zip(halves(1, X.shape), halves(0, W.shape), strict=True)
    ]
    assert_same_bits(*products)


@pytest.mark.slow
def test_a_granularity_is_in_rules_and_files(tmp_path):
    model, params = lambda p, x: x @ p["w"], {"w": W}
    own, blocks = (
        quantize_fn(model, [Rule("w", of_w, of_x)])
        for of_x, of_w in zip(halves(1, X.shape), halves(0, W.shape), strict=True)
    )
    assert_same_bits(own(params, X), blocks(params, X))
    gradients = [jax.grad(lambda p, q=q: (q(p, X) ** 2).sum())(params)["w"] for q in (own, blocks)]
    assert_same_bits(*gradients)
    frozen = own.freeze(params, X)
    assert_same_bits(own(frozen, X), own(params, X))
    assert "PerHalf" not in str(own.plan(params, X))  # which says what it is of this parameter
    save(tmp_path / "frozen.safetensors", frozen)
    assert_same_bits(own(load(tmp_path / "frozen.safetensors"), X), own(params, X))


def test_a_granularity_is_saved(tmp_path):
    q = quantize(W, QuantSpec(bits=4, granularity=PerHalf(0)))
    save(tmp_path / "w.safetensors", {"w": q})
    again = load(tmp_path / "w.safetensors")["w"]
    assert again.spec == q.spec
    assert_same_bits(dequantize(again), dequantize(q))
    assert np.array_equal(jnp.asarray(again.values), q.values)


@pytest.fixture
def float6(monkeypatch):
    """A float of 6 bits that is not among the formats: its levels are the 63 integers of 6 bits / 16."""
    levels = Float("float6_e1m4fn", 6, 4, 0, 1.9375, stored="float8_e3m4")
    monkeypatch.setitem(FLOATS, levels.name, levels)
    return levels.name


def as_integers(axis, name):
    """The spec of a format, and of the integers that are its levels but for a factor."""
    of_axis = {"granularity": PerChannel(axis)}
    return QuantSpec(format=name, **of_axis), QuantSpec(bits=6, **of_axis)


def test_a_number_format_quantizes(float6):
    own, integers = as_integers(0, float6)
    assert (own.bits, own.qmax, str(own.dtype), own.levels.number) == (6, 31 / 16, "float8_e3m4", 63)
    assert_same_bits(fake_quant(X, own), fake_quant(X, integers))
    q = quantize(X, own)
    assert_same_bits(16 * q.values.astype(jnp.float32) + 0, quantize(X, integers).values.astype(jnp.float32))
    assert_same_bits(dequantize(q), fake_quant(X, own))
    # Of sums of floats, whose last bits may differ between programs.
    np.testing.assert_allclose(fit_qparams(X, own, "mse").scale, 16 * fit_qparams(X, integers, "mse").scale, rtol=1e-6)


def test_a_number_format_contracts_and_is_saved(float6, tmp_path):
    (x, x_int), (w, w_int) = ([quantize(v, spec) for spec in as_integers(axis, float6)] for v, axis in ((X, 0), (W, 1)))
    assert_same_bits(dot_general(x, w, MATMUL), dot_general(x_int, w_int, MATMUL))
    save(tmp_path / "w.safetensors", {"w": w})
    assert_same_bits(dequantize(load(tmp_path / "w.safetensors")["w"]), dequantize(w))


@pytest.fixture
def scales(monkeypatch):
    """A dtype that holds no scales by itself."""
    monkeypatch.setitem(SCALE_FORMATS, "float8_e5m2", Rounded(FLOATS["float8_e5m2"]))
    return "float8_e5m2"


def test_a_scale_format_quantizes(scales):
    of = {"bits": 4, "granularity": PerBlock(1, 8)}
    own, plain = QuantSpec(scale_dtype=scales, **of), QuantSpec(**of)
    q, fitted = quantize(X, own), fit_qparams(X, own, "mse")
    assert q.scale.dtype == scales
    assert_same_bits(q.scale, fit_qparams(X, own).scale.astype(scales))
    as_floats = QParams(q.scale.astype(jnp.float32), zeros(q.scale.shape))
    assert_same_bits(fake_quant(X, own), fake_quant(X, plain, as_floats))
    assert_same_bits(dequantize(q), fake_quant(X, own))
    error = lambda y: ((y - X) ** 2).sum()
    assert error(fake_quant(X, own, fitted)) < error(fake_quant(X, own))
    with pytest.raises(ValueError, match="`symmetric` must be True with scale_dtype='float8_e5m2'"):
        QuantSpec(symmetric=False, scale_dtype=scales)


def test_a_scale_format_contracts_and_is_saved(scales, tmp_path):
    x, w = (quantize(v, QuantSpec(granularity=PerChannel(i), scale_dtype=scales)) for i, v in enumerate((X, W)))
    wide = [
        dataclasses.replace(q, scale=q.scale.astype(jnp.float32), spec=QuantSpec(granularity=q.spec.granularity))
        for q in (x, w)
    ]
    assert_same_bits(dot_general(x, w, MATMUL), dot_general(*wide, MATMUL))
    save(tmp_path / "w.safetensors", {"w": w})
    again = load(tmp_path / "w.safetensors")["w"]
    assert again.spec == w.spec
    assert_same_bits(dequantize(again), dequantize(w))


def test_a_range_method_fits(monkeypatch):
    def wide(x, frame, percentile):
        scale, zero_point = METHODS["minmax"](x, frame, percentile)
        return QParams(2 * scale, zero_point)

    monkeypatch.setitem(METHODS, "wide", wide)
    spec = QuantSpec(granularity=PerChannel(1))
    minmax = fit_qparams(W, spec)
    assert_same_bits(fit_qparams(W, spec, "wide").scale, 2 * minmax.scale)
    assert_same_bits(init_qparams({"w": W}, [("w", spec)], "wide")["w"].scale, 2 * minmax.scale)
    with pytest.raises(
        ValueError, match="`method` must be one of minmax, percentile, mse, lsq, absmean, wide, got 'wider'"
    ):
        fit_qparams(W, spec, "wider")


def test_a_platform_has_its_own_form_of_a_function():
    """Ranges, which all quantizers take, on a platform that had none; nothing else changes."""
    forms, spec = FORMS["extremes"], QuantSpec()
    text = lambda on: jax.export.export(jax.jit(lambda x: fake_quant(x, spec)), platforms=[on])(X).mlir_module()
    before = text("rocm")
    assert "optimization_barrier" not in before
    forms["rocm"] = lambda *args, **static: list(lax.optimization_barrier(tuple(_in_passes(*args, **static))))
    try:
        assert "optimization_barrier" in text("rocm")
        assert "optimization_barrier" not in text("cuda")
    finally:
        forms["rocm"] = _in_passes
        del forms["rocm"]
    assert text("rocm") == before


@dataclasses.dataclass(frozen=True)
class HalfUp:
    """A solver of levels: ties are rounded up."""

    def __call__(self, w, products, grid):
        return jnp.clip(jnp.floor(w / grid.step + 0.5), grid.qmin, grid.qmax)


def test_a_solver_of_levels_is_a_choice_for_one_matrix():
    """In turns of a scan, too; a column that the nearest levels suit better keeps them."""
    f = lambda params, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]
    q, rng = quantize_fn(f, [Rule("w", weight_spec(4))]), np.random.default_rng(0)
    ties = (rng.integers(-6, 6, (2, 8, 8)) + np.float32(0.5)).astype(np.float32) / 4
    rows = rng.normal(size=(2, 20, 8)).astype(np.float32)
    grams = {"w": Gram(np.einsum("tik,til->tkl", rows, rows), np.full(2, 20, np.float32), rows.sum(1))}
    qparams, said = {"w": QParams(np.full((2, 1, 8), 0.25, np.float32), np.zeros((2, 1, 8), np.float32))}, []
    model = model_of({"w": ties}, q, grams, (jax.ShapeDtypeStruct((3, 8), jnp.float32),), {}, qparams)
    solved = np.asarray(rounded(model, HalfUp(), (), False, lambda *of: said.append(of))["w"])
    up, nearest = np.floor(ties * 4 + 0.5) / 4, np.round(ties * 4) / 4
    is_up = (solved == up).all(1)
    assert is_up.any()
    assert not is_up.all()
    np.testing.assert_array_equal(solved, np.where(is_up[:, None], up, nearest))
    assert [path for path, *_ in said] == ["w[0]", "w[1]"]
    assert all(after < before for _, before, after in said)
