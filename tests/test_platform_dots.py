# SPDX-License-Identifier: Apache-2.0
"""How the integer product of one row is computed on a TPU: with the bits of the plain product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lanes import by_default

from jaxquant._platform._dots import _dot_of_two_rows, integer_dot

pytestmark = pytest.mark.bits
# The shapes of both operands, and the dimension numbers.
ONE_ROW = {
    "a vector": ((32,), (32, 24), (((0,), (0,)), ((), ()))),
    "a row": ((1, 32), (24, 32), (((1,), (1,)), ((), ()))),
    "scores": ((1, 4, 16), (1, 40, 4, 16), (((2,), (3,)), ((0, 1), (0, 2)))),
    "values": ((4, 1, 40), (40, 4, 16), (((2,), (0,)), ((0,), (1,)))),
    "a vector of each": ((4, 1, 16), (4, 16), (((2,), (1,)), ((0,), (0,)))),
}
MORE = {
    "two rows": ((2, 32), (32, 24), (((1,), (0,)), ((), ()))),
    "texts and heads": ((2, 4, 16), (2, 40, 4, 16), (((2,), (3,)), ((0, 1), (0, 2)))),
}


def integers(shape):
    return jax.device_put(np.random.default_rng(shape).integers(-127, 128, shape).astype(np.int8))


@by_default("a row-False", "scores-False", "values-True")
@pytest.mark.parametrize("with_sums", [False, True])
@pytest.mark.parametrize("case", ONE_ROW)
def test_one_row_has_the_bits_of_the_plain_product(case, with_sums):
    *shapes, numbers = ONE_ROW[case]
    x, w = map(integers, shapes)
    product, *sums = jax.jit(lambda x, w: _dot_of_two_rows(x, w, numbers, with_sums))(x, w)
    wide = np.int32(x), np.int32(w)
    np.testing.assert_array_equal(product, lax.dot_general(*wide, numbers))
    for found in sums:
        want = lax.dot_general(jnp.ones_like(wide[0]), wide[1], numbers)
        np.testing.assert_array_equal(found, want.reshape(found.shape))
    assert len(sums) == with_sums


@pytest.mark.parametrize("case", [*ONE_ROW, *MORE])
def test_a_tpu_gets_one_row_twice(case):
    *shapes, numbers = (ONE_ROW | MORE)[case]
    traced = jax.jit(lambda x, w: integer_dot(x, w, numbers)[0]).trace(*map(integers, shapes))
    text = {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda", "tpu")}
    is_twice = {platform: "applies stablehlo.maximum" in text[platform] for platform in text}
    assert is_twice == {"cpu": False, "cuda": False, "tpu": case in ONE_ROW}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_one_row_for_each_of_sharded_heads(kind):
    *shapes, numbers = ONE_ROW["scores"]
    x, w = map(integers, shapes)
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    by_head = lambda *axes: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    f = jax.jit(lambda x, w: integer_dot(x, w, numbers)[0])
    sharded = jax.device_put(x, by_head(None, "heads")), jax.device_put(w, by_head(None, None, "heads"))
    traced = f.trace(*sharded)
    assert "applies stablehlo.maximum" in traced.lower(lowering_platforms=("tpu",)).as_text()
    got = f(*sharded)
    assert got.sharding.spec[1] == "heads"
    np.testing.assert_array_equal(got, f(x, w))
