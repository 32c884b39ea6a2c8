# SPDX-License-Identifier: Apache-2.0
"""Specs: the grid of every width, equality, what they print, which values share a scale, what JAX takes them for."""

import functools
import itertools

import jax
import numpy as np
import pytest
from exact import assert_same_bits

from jaxquant import PerBlock, PerChannel, PerTensor, PerToken, QuantSpec, activation_spec, weight_spec
from jaxquant._arrays._grid import limits_of
from jaxquant._spec._spec import qparams_shape

SOME = [
    QuantSpec(),
    QuantSpec(bits=4, signed=False),
    QuantSpec(narrow_range=False),
    QuantSpec(symmetric=False, narrow_range=True, rounding="stochastic"),
    QuantSpec(granularity=PerChannel((0, -1)), rounding="half_up"),
    weight_spec(3),
    weight_spec(4, channel_axis=-1, block_size=32),
    activation_spec(16, signed=False, rounding="half_away"),
]
FLAGS = list(itertools.product([False, True], repeat=2))


@pytest.mark.parametrize("spec", SOME, ids=repr)
def test_what_a_spec_prints_makes_it_again(spec):
    again = eval(repr(spec))
    assert again is not spec
    assert (again, hash(again)) == (spec, hash(spec))
    assert [spec == other for other in SOME].count(True) == 1


def test_a_spec_prints_what_differs_from_the_default():
    assert repr(QuantSpec()) == repr(QuantSpec(narrow_range=True)) == "QuantSpec(bits=8)"
    assert (
        repr(QuantSpec(bits=4, granularity=PerChannel([1, 0]))) == "QuantSpec(bits=4, granularity=PerChannel((0, 1)))"
    )
    assert repr(activation_spec(signed=False)) == "QuantSpec(bits=8, signed=False, symmetric=False)"
    affine = QuantSpec(symmetric=False, narrow_range=True)
    assert repr(affine) == "QuantSpec(bits=8, symmetric=False, narrow_range=True)"
    assert repr(PerBlock(-1, 8)) == "PerBlock(axis=-1, size=8)"
    assert repr(PerBlock([-2, -1], (8, 4))) == "PerBlock(axis=(-2, -1), size=(8, 4))"
    assert repr(weight_spec(4, -1, scale_rule="half_step")) == (
        "QuantSpec(bits=4, granularity=PerChannel(-1), scale_rule='half_step')"
    )


@pytest.mark.parametrize(("signed", "narrow"), FLAGS)
def test_the_grid_of_every_width(signed, narrow):
    for bits in range(2, 17):
        spec = QuantSpec(bits=bits, signed=signed, symmetric=signed, narrow_range=narrow)
        holds = np.iinfo(spec.dtype)
        assert spec.qmax - spec.qmin == 2**bits - 1 - narrow
        assert spec.qmin == ((-spec.qmax - 1 if signed else 0) + narrow)
        assert (holds.min < 0, holds.bits) == (signed, 8 if bits <= 8 else 16)
        assert holds.min <= spec.qmin < spec.qmax <= holds.max


def test_narrow_range_is_on_when_symmetric_and_signed():
    on = {(s, y): QuantSpec(signed=s, symmetric=y).narrow_range for s, y in FLAGS}
    assert on == {(False, False): False, (False, True): False, (True, False): False, (True, True): True}
    assert QuantSpec(narrow_range=False).qmin == -128
    assert QuantSpec(scale_rule="half_step").qmin == -128
    assert QuantSpec(scale_rule="half_step", narrow_range=True).qmin == -127


def test_integers_and_bools_of_numpy_are_those_of_python():
    spec = QuantSpec(bits=np.int64(4), signed=np.bool_(False), granularity=PerBlock(np.int32(-1), np.uint8(2)))
    plain = QuantSpec(bits=4, signed=False, granularity=PerBlock(-1, 2))
    assert (spec, hash(spec)) == (plain, hash(plain))
    assert [type(v) for v in (spec.bits, spec.signed, spec.granularity.size)] == [int, bool, int]


@pytest.mark.parametrize(
    ("axis", "same"), [((0,), 0), ([1], 1), ((1, 0), (0, 1)), ([0, -1], (-1, 0)), (np.int64(2), 2)]
)
def test_axes_have_one_form(axis, same):
    a, b = PerChannel(axis), PerChannel(same)
    assert (a, hash(a), a.axis) == (b, hash(b), b.axis)
    assert a != PerChannel(5)


def test_blocks_along_one_axis_have_one_form():
    assert PerBlock([-1], (8,)) == PerBlock(-1, 8)
    assert hash(PerBlock((0, 1), (2, 4))) == hash(PerBlock([0, 1], [2, 4]))
    assert PerBlock((0, 1), (2, 4)).sizes == {0: 2, 1: 4}


@pytest.mark.parametrize(("channel_axis", "axis"), [(-1, -2), (0, 1), (1, 0), (-2, -1), (None, None)])
def test_blocks_of_a_weight_run_along_the_axis_beside_its_channels(channel_axis, axis):
    assert weight_spec(4, channel_axis, 16) == QuantSpec(bits=4, granularity=PerBlock(axis, 16))


def test_weight_and_activation_specs():
    weight, activation = weight_spec(channel_axis=-1), activation_spec()
    assert (weight.symmetric, weight.narrow_range, weight.granularity) == (True, True, PerChannel(-1))
    assert (activation.symmetric, activation.narrow_range, activation.granularity) == (False, False, PerTensor())
    assert weight_spec(signed=False, rounding="half_up") == QuantSpec(
        signed=False, rounding="half_up", granularity=PerChannel(None)
    )
    assert activation_spec(4, True, granularity=PerChannel(0)) == QuantSpec(bits=4, granularity=PerChannel(0))


def test_a_tensor_alone_does_not_say_its_tokens():
    with pytest.raises(ValueError, match=r"PerToken.*which axes are contracted.*PerChannel\(\(0, 1\)\)"):
        qparams_shape(QuantSpec(granularity=PerToken()), (2, 3, 4))


def test_a_spec_is_a_leaf_and_cannot_change():
    assert jax.tree.leaves({"a": SOME[0], "b": [SOME[5]]}) == [SOME[0], SOME[5]]
    with pytest.raises(AttributeError):
        SOME[0].bits = 4


def test_equal_specs_share_one_trace():
    traces = []

    @functools.partial(jax.jit, static_argnums=1)
    def f(x, spec):
        traces.append(spec)
        return x

    for _ in range(20):
        f(0.0, weight_spec(4, channel_axis=(0, -1)))
        f(0.0, QuantSpec(bits=4, narrow_range=True, granularity=PerChannel([-1, 0])))
    f(0.0, QuantSpec())
    assert traces == [weight_spec(4, channel_axis=(0, -1)), QuantSpec()]


@pytest.mark.parametrize(
    ("granularity", "shape", "expected"),
    [
        (PerTensor(), (2, 3), ()),
        (PerTensor(), (), ()),
        (PerChannel(-1), (2, 3, 4), (1, 1, 4)),
        (PerChannel(0), (2, 3, 4), (2, 1, 1)),
        (PerChannel((0, -1)), (2, 3, 4), (2, 1, 4)),
        (PerChannel((0, 1)), (2, 3), (2, 3)),
        (PerChannel(-1), (5, 0), (1, 0)),
        (PerChannel(0), (5, 0), (5, 1)),
        (PerBlock(-1, 2), (3, 8), (3, 4)),
        (PerBlock(0, 8), (8, 3), (1, 3)),
        (PerBlock(-2, 1), (8, 3), (8, 3)),
        (PerBlock(1, 2), (3, 0, 2), (3, 0, 2)),
        (PerBlock((-2, -1), (4, 2)), (3, 8, 6), (3, 2, 3)),
        (PerBlock((1, 0), (2, 4)), (4, 6), (1, 3)),
    ],
    ids=repr,
)
def test_the_shape_of_the_qparams(granularity, shape, expected):
    assert qparams_shape(QuantSpec(granularity=granularity), shape) == expected


@pytest.mark.parametrize(("signed", "narrow"), FLAGS)
def test_the_traced_grid_is_the_static_one(signed, narrow):
    of = lambda bits: QuantSpec(bits=bits, signed=signed, symmetric=signed, narrow_range=narrow)
    traced = jax.jit(jax.vmap(lambda bits: limits_of(of(16), bits)))(np.arange(2, 17))
    static = [[float(end) for end in limits_of(of(bits))] for bits in range(2, 17)]
    for got, want, name in zip(traced, np.float32(static).T, ("qmin", "qmax"), strict=True):
        assert_same_bits(got, want, name)
    assert static == [[of(bits).qmin, of(bits).qmax] for bits in range(2, 17)]


def test_traced_bits_are_limited_to_those_of_the_spec():
    ends = jax.jit(jax.vmap(lambda bits: limits_of(QuantSpec(bits=4), bits)))(np.array([-3, 1, 2, 4, 9]))
    assert [e.tolist() for e in ends] == [[-1, -1, -1, -7, -7], [1, 1, 1, 7, 7]]
