# SPDX-License-Identifier: Apache-2.0
"""Values for groups of a tensor move as the tensor does: broadcast, they are what becomes of all its elements."""

import functools

import hypothesis.strategies as st
import numpy as np
import pytest
from exact import assert_same_bits
from hypothesis import given, settings
from jax import lax

from jaxquant import _groups as groups

SHAPE = 4, 6, 2


def values(sizes, shape=SHAPE):
    """One for each group, and one for each element."""
    v = np.random.default_rng(list(sizes)).normal(size=sizes).astype(np.float32)
    return v, every(v, shape)


def every(v, shape):
    return np.broadcast_to(np.asarray(groups.broadcast_groups(v, shape)), shape)


def check(v, want):
    assert_same_bits(every(v, want.shape), np.asarray(want))


sizes = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2]))
few = settings(max_examples=8)  # every shape is compiled


@few
@given(sizes, st.permutations(range(3)))
def test_transposed(sizes, permutation):
    v, x = values(sizes)
    check(groups.transposed(v, permutation), x.transpose(permutation))


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
NEW = [(24, 2), slow((4, 12)), slow((48,)), (2, 2, 6, 2), (4, 2, 3, 2), (8, 6), slow((3, 16)), (4, 1, 6, 2, 1)]


@pytest.mark.parametrize("new", [*NEW, slow((1, 4, 6, 2)), slow((2, 12, 2))], ids=str)
@few
@given(sizes)
def test_reshaped(new, sizes):
    v, x = values(sizes)
    check(groups.reshaped(v, SHAPE, new), x.reshape(new))


def test_reshaped_keeps_what_it_can():
    """Runs of the elements in their order stay blocks; others have a value for each element of the run of axes."""
    for sizes, new, want in [
        ((4, 3, 1), (24, 2), (12, 1)),
        ((4, 3, 1), (48,), (12,)),
        ((4, 6, 1), (8, 3, 2), (8, 3, 1)),
        ((2, 1, 1), (2, 2, 6, 2), (2, 1, 1, 1)),
        ((1, 6, 1), (4, 2, 3, 2), (1, 2, 3, 1)),
        ((1, 2, 2), (4, 2, 3, 2), (1, 2, 1, 2)),
        ((1, 6, 1), (24, 2), (24, 1)),
        ((1, 3, 1), (4, 2, 3, 2), (1, 2, 3, 1)),
    ]:
        assert groups.reshaped(np.zeros(sizes, np.float32), SHAPE, new).shape == want


def test_an_axis_of_size_1_that_comes_or_goes_stands_alone():
    for old, new, want in [
        ((1,), (1, 1), [((), (0,)), ((0,), (1,))]),
        ((1, 1), (1,), [((0,), ()), ((1,), (0,))]),
        ((3, 1), (3, 1, 1), [((0,), (0,)), ((), (1,)), ((1,), (2,))]),
    ]:
        assert [tuple(map(tuple, run)) for run in groups.segments(old, new)] == want


def test_the_runs_of_a_reshape_are_as_short_as_possible():
    runs = [tuple(map(tuple, run)) for run in groups.segments((2, 2, 6, 5), (4, 2, 3, 5))]
    assert runs == [((0, 1), (0,)), ((2,), (1, 2)), ((3,), (3,))]


def test_reshaped_to_and_from_nothing():
    assert groups.reshaped(np.ones((1, 1), np.float32), (1, 1), ()).shape == ()
    assert groups.reshaped(np.ones((), np.float32), (), (1, 1)).shape == (1, 1)
    check(groups.reshaped(np.ones((1, 3), np.float32), (0, 3), (3, 0)), np.ones((3, 0), np.float32))


@few
@given(sizes, st.integers(0, 2), st.data())
def test_sliced(sizes, axis, data):
    v, x = values(sizes)
    n = SHAPE[axis]
    start = data.draw(st.integers(0, n - 1))
    stop, stride = data.draw(st.integers(start + 1, n)), data.draw(st.integers(1, 2))
    check(groups.sliced(v, axis, n, start, stop, stride), lax.slice_in_dim(x, start, stop, stride, axis))
    size = stop - start
    check(groups.picked(v, axis, n, np.int32(start), size), lax.slice_in_dim(x, start, stop, axis=axis))


def test_whole_blocks_stay_blocks():
    v, _ = values((1, 3, 1))
    assert groups.sliced(v, 1, 6, 2, 6).shape == (1, 2, 1)
    assert groups.sliced(v, 1, 6, 1, 5).shape == (1, 4, 1)


@few
@given(sizes, sizes, st.integers(0, 2))
def test_joined(one, other, axis):
    (v, x), (w, y) = values(one), values(other)
    check(groups.joined([v, w], [SHAPE] * 2, axis), np.concatenate([x, y], axis))


@few
@given(sizes)
def test_broadcasted(sizes):
    v, x = values(sizes)
    wide = lax.broadcast_in_dim(x, (4, 5, 6, 2), (0, 2, 3))
    check(groups.broadcasted(v, 4, (0, 2, 3)), wide)


@few
@given(sizes, st.integers(0, 2))
def test_apart(sizes, axis):
    v, x = values(sizes)
    got = groups.apart(v, axis, SHAPE[axis])
    assert got.shape[axis] == SHAPE[axis]
    check(got, x)
