# SPDX-License-Identifier: Apache-2.0
"""Values for groups of a tensor move as the tensor does: broadcast, they are what becomes of all its elements."""

import itertools

import jax
import numpy as np
from exact import assert_same_bits
from lanes import cases

from jaxquant._base import _groups as groups

SHAPE = 4, 6, 2
SIZES = (1, 1, 1), (4, 6, 2), (2, 3, 1), (1, 6, 2), (4, 1, 2), (2, 2, 2), (1, 3, 1), (4, 2, 1)


def every(v, shape):
    """One value for each element."""
    v = np.asarray(v)
    for axis, n in enumerate(shape):
        v = np.repeat(v, n // v.shape[axis], axis) if n else v
    return v


def values(sizes):
    """One for each group, and one for each element."""
    v = np.random.default_rng(list(sizes)).normal(size=sizes).astype(np.float32)
    return v, every(v, SHAPE)


def check(made):
    """(function, values for groups, what becomes of all elements), of each case: by one program."""
    functions, inputs, wanted = zip(*made, strict=True)
    got = jax.jit(lambda inputs: [f(*v) for f, v in zip(functions, inputs, strict=True)])(inputs)
    for y, v, want in zip(got, inputs, wanted, strict=True):
        assert_same_bits(every(y, want.shape), want, [part.shape for part in v])


def shape_of(f, sizes):
    return jax.eval_shape(f, np.zeros(sizes, np.float32)).shape


def test_values_broadcast():
    """Of a smaller rank, too."""
    add = lambda v, zeros: zeros + groups.broadcast_groups(v, SHAPE)
    zeros = np.zeros(SHAPE, np.float32)
    check((add, (v[0] if len(v) == 1 else v, zeros), x) for v, x in map(values, SIZES))


NEW = [(24, 2), (4, 12), (48,), (2, 2, 6, 2), (4, 2, 3, 2), (8, 6), (3, 16), (4, 1, 6, 2, 1), (1, 4, 6, 2), (2, 12, 2)]


@cases("new", [(new,) for new in NEW], [((24, 2),), ((2, 2, 6, 2),), ((4, 2, 3, 2),), ((8, 6),), ((4, 1, 6, 2, 1),)])
def test_reshaped(new):
    check((lambda v: groups.reshaped(v, SHAPE, new), (v,), x.reshape(new)) for v, x in map(values, SIZES))


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
        ((1, 6, 1), (2, 1, 2, 6, 2), (1, 1, 1, 6, 1)),
    ]:
        assert shape_of(lambda v, new=new: groups.reshaped(v, SHAPE, new), sizes) == want


def test_an_axis_of_size_1_that_comes_or_goes_stands_alone():
    for old, new, want in [
        ((1,), (1, 1), [((), (0,)), ((0,), (1,))]),
        ((1, 1), (1,), [((0,), ()), ((1,), (0,))]),
        ((3, 1), (3, 1, 1), [((0,), (0,)), ((), (1,)), ((1,), (2,))]),
        ((3, 1, 1), (3, 1), [((0,), (0,)), ((1,), ()), ((2,), (1,))]),
        ((3, 1), (3,), [((0,), (0,)), ((1,), ())]),
    ]:
        assert [tuple(map(tuple, run)) for run in groups.segments(old, new)] == want


def test_the_runs_of_a_reshape_are_as_short_as_possible():
    for old, new, want in [
        ((2, 2, 6, 5), (4, 2, 3, 5), [((0, 1), (0,)), ((2,), (1, 2)), ((3,), (3,))]),
        ((2, 2, 2, 5), (8, 5), [((0, 1, 2), (0,)), ((3,), (1,))]),
        ((2, 3), (6, 1), [((0, 1), (0,)), ((), (1,))]),
        ((6, 1), (2, 3), [((0,), (0, 1)), ((1,), ())]),
    ]:
        assert [tuple(map(tuple, run)) for run in groups.segments(old, new)] == want


def test_reshaped_to_and_from_nothing():
    assert shape_of(lambda v: groups.reshaped(v, (1, 1), ()), (1, 1)) == ()
    assert shape_of(lambda v: groups.reshaped(v, (), (1, 1)), ()) == (1, 1)
    empty = np.ones((3, 0), np.float32)
    check([(lambda v: groups.reshaped(v, (0, 3), (3, 0)), (np.ones((1, 3), np.float32),), empty)])
    for sizes, old, new in [((1, 1), (0, 3), (3, 0)), ((1, 1), (3, 0), (0,)), ((0,), (0,), (3, 0))]:
        assert shape_of(lambda v, old=old, new=new: groups.reshaped(v, old, new), sizes) == new


def test_sliced_from_nothing():
    assert shape_of(lambda v: groups.sliced(v, 0, 0, 0, 0, 2), (0, 3)) == (0, 3)


SLICES = (0, 1, 3, 1), (1, 2, 6, 1), (1, 0, 5, 2), (2, 1, 2, 1), (0, 0, 4, 2), (1, 1, 5, 1), (1, 2, 4, 2), (0, 2, 4, 1)
SLICES += (1, 2, 5, 1), (1, 1, 4, 1)


def test_sliced():
    made = []
    for sizes, (axis, start, stop, stride) in itertools.product(SIZES[1:5], SLICES):
        (v, x), n, size = values(sizes), SHAPE[axis], stop - start
        part = lambda stride, axis=axis, start=start, stop=stop: (*[slice(None)] * axis, slice(start, stop, stride))
        cut = lambda v, args=(axis, n, start, stop, stride): groups.sliced(v, *args)
        pick = lambda v, at, axis=axis, n=n, size=size: groups.picked(v, axis, n, at, size)
        made += [(cut, (v,), x[part(stride)]), (pick, (v, np.int32(start)), x[part(1)])]
    check(made)


def test_whole_blocks_stay_blocks():
    assert shape_of(lambda v: groups.sliced(v, 1, 6, 2, 6), (1, 3, 1)) == (1, 2, 1)
    assert shape_of(lambda v: groups.sliced(v, 1, 6, 1, 5), (1, 3, 1)) == (1, 4, 1)
    assert shape_of(lambda v: groups.sliced(v, 1, 6, 0, 6), (1, 3, 1)) == (1, 3, 1)
    assert shape_of(lambda v: groups.sliced(v, 0, 0, 0, 0), (0, 1)) == (0, 1)


def test_what_is_picked_keeps_what_it_can():
    pick = lambda axis, n, size: shape_of(lambda v: groups.picked(v, axis, n, np.int32(0), size), (1, 3, 1))
    assert pick(0, 4, 2) == (1, 3, 1)
    assert pick(1, 6, 6) == (1, 3, 1)
    assert pick(1, 6, 2) == (1, 2, 1)


def test_joined():
    made = []
    for i, one in enumerate(SIZES):
        (v, x), (w, y), axis = values(one), values(SIZES[(3 * i + 1) % len(SIZES)]), i % 3
        join = lambda *parts, axis=axis: groups.joined(parts, [SHAPE] * 2, axis)
        made.append((join, (v, w), np.concatenate([x, y], axis)))
    check(made)


def test_blocks_beside_the_same_or_a_shared_value_stay_blocks():
    join = lambda *sizes: shape_of(lambda v: groups.joined([v, np.ones(sizes, np.float32)], [SHAPE] * 2, 0), (1, 3, 1))
    assert join(4, 3, 1) == join(1, 1, 1) == (8, 3, 1)
    assert join(1, 2, 1) == (8, 6, 1)
    assert shape_of(lambda v: groups.joined([v], [SHAPE], 0), (1, 3, 1)) == (4, 3, 1)


def test_apart():
    made = []
    for sizes, axis in zip(SIZES, itertools.cycle(range(3))):
        v, x = values(sizes)
        apart = lambda v, axis=axis: groups.apart(v, axis, SHAPE[axis])
        assert shape_of(apart, sizes)[axis] == SHAPE[axis]
        made.append((apart, (v,), x))
    check(made)
