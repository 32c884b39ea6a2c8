# SPDX-License-Identifier: Apache-2.0
"""The evaluator of optimized HLO has the bits of XLA, in what programs for the CPU hold."""

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import differing
from jax import lax

pytestmark = pytest.mark.bits

RNG = np.random.default_rng(0)
X = np.concatenate([RNG.normal(size=(6, 10)), [[0.5, -0.5, 1.5, -2.5, np.inf, -np.inf, 0, -0.0, 300, np.nan]]]).astype(
    np.float32
)
N = RNG.integers(-100, 100, (7, 10)).astype(np.int32)
BYTES = RNG.integers(-128, 128, (2, 9, 10, 8)).astype(np.int8)
KERNEL = RNG.integers(-128, 128, (3, 2, 4, 8)).astype(np.int8)
INT8 = {"preferred_element_type": jnp.int32}


def convolution(x, w, **options):
    return lax.conv_general_dilated(
        x, w, options.pop("stride", (1, 1)), options.pop("padding", "SAME"), **INT8, **options
    )


def summed(x):
    return lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] + x + s[0]), (jnp.float32(0), x))[1]


IMAGES = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
PROGRAMS = {
    "rounding": (
        lambda x: [jnp.round(x), jnp.floor(x), jnp.ceil(x), lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO)],
        X,
    ),
    "arithmetic": (
        lambda x, y: [x + y, x - y, x * y, x / y, -x, jnp.abs(x), jnp.sign(x), lax.rem(x, y), x > y],
        X,
        X[::-1],
    ),
    "integers": (
        lambda a, b: [a // 3, a >> 2, a << b, lax.shift_right_logical(a, b), lax.clz(a), ~a & b | a ^ b],
        N,
        N % 40,
    ),
    "casts": (lambda x, n: [x.astype(jnp.int8), n.astype(jnp.float32), x.astype(jnp.bfloat16), n.astype(bool)], X, N),
    "bits": (lambda x: [lax.bitcast_convert_type(x, jnp.int32), lax.bitcast_convert_type(x, jnp.uint8)], X),
    "limits": (lambda x: [jnp.clip(x, -1, 1), jnp.maximum(x, 0), lax.clamp(-1.0, x, 1.0), jnp.where(x > 0, x, 1)], X),
    "moves": (
        lambda x: [x.T, x.reshape(5, 14), x[1:5:2, ::-1], jnp.pad(x, ((1, 0), (0, 2))), x[None] + 1, jnp.eye(3)],
        X,
    ),
    "negative padding": (lambda x: lax.pad(x, np.float32(7), [(-1, 2, 1), (2, -3, 0)]), X),
    "places by data": (
        lambda x, k: [x[k], lax.dynamic_update_slice(x, x[:2, :2], (k, k)), x.at[k].add(1.5)],
        X,
        np.int32(2),
    ),
    "gathered": (lambda x, n: [jnp.take_along_axis(x, n % 10, 1), x[n[0] % 7]], X, N),
    "scattered": (lambda n: jnp.zeros(50, jnp.int32).at[n.ravel() % 60].add(1, mode="drop"), N),
    "reductions": (lambda x, n: [n.sum(0), n.max(), x.min(1), (x > 0).any(0), (x < 0).all(1), jnp.argmax(n, 1)], X, N),
    "windows": (lambda n: lax.reduce_window(n, np.int32(0), lax.add, (2, 3), (2, 1), ((1, 0), (0, 2))), N),
    "cumulated": (lambda n: jnp.cumsum(n, 1), N),
    "sorted": (
        lambda n, x: [jnp.sort(x, 0), jnp.argsort(n % 5, 1), *lax.sort((n % 5, x), dimension=0, num_keys=1)],
        N,
        X,
    ),
    "loops": (lambda x, n: [summed(x), lax.map(jnp.sum, n), lax.fori_loop(0, 3, lambda k, v: v * 2, x)], X, N),
    "conditions": (
        lambda x, k: [lax.cond(k > 1, jnp.sign, jnp.abs, x), lax.switch(k, [jnp.sign, jnp.abs, jnp.negative], x)],
        X,
        np.int32(2),
    ),
    "products": (
        lambda a: [lax.dot_general(a, a, (((3,), (3,)), ((0,), (0,))), **INT8), jnp.dot(a[0, 0], a[0, 0].T, **INT8)],
        BYTES,
    ),
    "convolution": (lambda x, w: convolution(x, w[..., :4, :], feature_group_count=2, **IMAGES), BYTES, KERNEL),
    "wide convolution": (
        lambda x, w: convolution(
            x,
            jnp.concatenate([w, w], 2),
            stride=(2, 1),
            padding=((2, 1), (0, 3)),
            lhs_dilation=(1, 2),
            rhs_dilation=(2, 1),
            **IMAGES,
        ),
        BYTES,
        KERNEL,
    ),
    "batch in groups": (
        lambda x, w: convolution(x, jnp.concatenate([w, w], 2), batch_group_count=2, **IMAGES),
        BYTES,
        KERNEL,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_bits_of_xla(name):
    f, *args = PROGRAMS[name]
    compiled = jax.jit(f, keep_unused=True).lower(*args).compile()
    got, want = hlo.Machine(compiled.as_text())(*args), jax.tree.leaves(compiled(*args))
    got = got if isinstance(got, tuple) else (got,)
    assert [differing(*pair) for pair in zip(got, want, strict=True)] == [0] * len(want)


def test_quotients_are_off_by_a_seed():
    text = jax.jit(lambda a, b: a / b).lower(X, X).compile().as_text()
    a, b = RNG.normal(size=(2, *X.shape)).astype(np.float32)
    (want, other), again = (
        (hlo.Machine(text, off_by=3, seed=seed)(a, b) for seed in (1, 2)),
        hlo.Machine(text, off_by=3, seed=1)(a, b),
    )
    units = want.view(np.int32) - (a / b).view(np.int32)
    assert set(units.ravel()) == {-3, -2, -1, 0, 1, 2, 3}
    assert differing(want, again) == 0 < differing(want, other)


def test_a_product_and_the_sum_that_it_feeds_are_rounded_once():
    text = jax.jit(lambda a, b, c: [a * b + c, c - a * b, a * b - c]).lower(X, X, X).compile().as_text()
    a, b, c = RNG.normal(size=(3, *X.shape)).astype(np.float32)
    twice, once = hlo.Machine(text)(a, b, c), hlo.Machine(text, contracted=True)(a, b, c)
    exact = a.astype(np.float64) * b
    want = [v.astype(np.float32) for v in (exact + c, c - exact, exact - c)]
    assert [differing(*pair) for pair in zip(once, want, strict=True)] == [0] * 3
    assert all(differing(*pair) for pair in zip(once, twice, strict=True))


def test_what_it_does_not_know_has_a_name():
    text = "ENTRY main (x: f32[2]) -> f32[2] {\n  x = f32[2]{0} parameter(0)\n  ROOT y = f32[2]{0} unheard-of(x)\n}\n"
    with pytest.raises(NotImplementedError, match="unheard-of"):
        hlo.Machine(text)(np.zeros(2, np.float32))
