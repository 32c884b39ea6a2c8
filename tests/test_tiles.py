# SPDX-License-Identifier: Apache-2.0
"""Weight-only products of a few rows, which XLA:CPU computes tile by tile: the bits of the whole product."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lanes import by_default, cases

from jaxquant import (
    PerBlock,
    PerChannel,
    QuantSpec,
    dequantize,
    dot_general,
    float8_spec,
    quantize,
    quantize_fn,
    weight_spec,
)
from jaxquant._platform._tiles import tile_of

pytestmark = pytest.mark.bits


def normal(*shape, dtype=jnp.float32, seed=0):
    return jax.device_put(np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype))


def plain(w, x):
    return x @ w


def over_layers(w, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w)[:, : w.shape[0]], None), x, w)[0]


BF16 = jnp.bfloat16
# The function, its weight, and its input.
USES = {
    "a matrix": (plain, normal(512, 2048), normal(3, 512)),
    "one row": (plain, normal(2048, 1024), normal(1, 2048)),
    "odd sizes": (plain, normal(1003, 1408), normal(63, 1003)),
    "heads": (lambda w, x: jnp.einsum("bd,dhk->bhk", x, w), normal(512, 4, 1024), normal(2, 512)),
    "what heads give": (lambda w, x: jnp.einsum("bhk,hkd->bd", x, w), normal(8, 64, 2048), normal(2, 8, 64)),
    "experts": (lambda w, x: jnp.einsum("ecd,edf->ecf", x, w), normal(4, 256, 2048), normal(4, 2, 256)),
    "a ragged dot": (
        lambda w, x: lax.ragged_dot(x, w, jnp.int32([2, 3, 1])), normal(3, 512, 1024), normal(6, 512),
    ),
    "layers in a scan": (over_layers, normal(2, 1024, 1536), normal(2, 1024)),
    "rows of the weight": (
        lambda w, x: lax.dot_general(x, w, (((1,), (1,)), ((), ()))), normal(2048, 512), normal(1, 512),
    ),
    "bfloat16": (plain, normal(512, 2048, dtype=BF16), normal(3, 512, dtype=BF16)),
    "cast to bfloat16": (lambda w, x: x @ w.astype(BF16), normal(512, 2048), normal(3, 512, dtype=BF16)),
    "a reshaped one": (lambda w, x: x @ w.reshape(512, 2048), normal(8, 64, 2048), normal(3, 512)),
}  # fmt: skip
SPECS = {
    "8 bits": weight_spec(8), "4 bits": weight_spec(4), "affine": QuantSpec(symmetric=False),
    "4 bits in groups": weight_spec(4, block_size=32),
}  # fmt: skip
EVERY = [
    (use, spec) for use in USES for spec in SPECS if not ("groups" in spec and use in ("odd sizes", "what heads give"))
]


def served(f, spec, w, x):
    q = quantize_fn(f, [("", spec)])
    return q, q.freeze(w, x)


def compiled(q, *args):
    return jax.jit(q).lower(*args).compile()


def loops(program):
    return len(re.findall(r" while\(", program.as_text()))


@cases("use, spec", EVERY, [("a ragged dot", "8 bits")])
def test_the_bits_are_those_of_the_whole_product(use, spec):
    f, w, x = USES[use]
    q, frozen = served(f, SPECS[spec], w, x)
    want, program = jax.jit(q)(w, x), compiled(q, frozen, x)
    np.testing.assert_array_equal(program(frozen, x), want)
    np.testing.assert_array_equal(q(frozen, x), want)
    assert loops(program) == 1 + ("scan" in use)


@by_default("1-affine")
@pytest.mark.parametrize("spec", SPECS)
@cases("columns", [0, 1], [1])
def test_dot_general_by_hand(columns, spec):
    """Also with the rows of the weight as its columns, and a cache's keys, whose scales are of a token."""
    shape = (512, 2048) if columns else (2048, 512)
    axis = 1 - columns
    own = dataclasses.replace(SPECS[spec], granularity=PerBlock(axis, 32) if "groups" in spec else PerChannel(columns))
    w, x, numbers = quantize(normal(*shape), own), normal(3, 512), (((1,), (axis,)), ((), ()))
    turned = ((axis,), (1,)), ((), ())

    def by_hand(x, w):
        if "groups" in spec:
            return lax.dot_general(x, dequantize(w), numbers), lax.dot_general(dequantize(w), x, turned)
        integers, scale = w.values.astype(np.float32) - w.zero_point.astype(np.float32), w.scale.reshape(-1)
        y, transposed = lax.dot_general(x, integers, numbers), lax.dot_general(integers, x, turned)
        return y * scale[None], transposed * scale[:, None]

    product = jax.jit(lambda x, w: (dot_general(x, w, numbers), dot_general(w, x, turned)))
    for got, want in zip(product(x, w), jax.jit(by_hand)(x, w), strict=True):
        np.testing.assert_array_equal(got, want)
    assert loops(product.lower(x, w).compile()) == 2


@pytest.mark.slow
def test_scores_of_a_cache():
    keys = quantize(normal(2, 1024, 4, 64), QuantSpec(granularity=PerChannel((0, 1, 2))))
    query, numbers = normal(2, 4, 64), (((2,), (3,)), ((0, 1), (0, 2)))
    product = jax.jit(lambda x, w: dot_general(x, w, numbers))
    scaled = lambda y, w: y * w.scale.reshape(2, 1024, 4).swapaxes(1, 2)
    want = jax.jit(lambda x, w: scaled(lax.dot_general(x, w.values.astype(np.float32), numbers), w))(query, keys)
    np.testing.assert_array_equal(product(query, keys), want)


NHWC = functools.partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
BEHIND = {
    "dot": (jnp.matmul, (5, 576), (576, 704)),
    "batch": (lambda x, w: jnp.einsum("ebk,ekn->ebn", x, w), (2, 5, 64), (2, 64, 48)),
    "first": (lambda x, w: jnp.einsum("nk,bk->nb", w, x), (5, 64), (48, 64)),
    "convolution": (NHWC, (2, 8, 6, 6), (12, 8, 3, 3)),
    "depthwise": (functools.partial(NHWC, feature_group_count=8), (2, 8, 6, 6), (16, 1, 3, 3)),
    "ragged dot": (lambda x, w: lax.ragged_dot(x, w, jnp.int32([2, 0, 3])), (6, 64), (3, 64, 48)),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", BEHIND)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_product_scaled_behind_is_rounded_once(dtype, form, monkeypatch):
    """Beside float64; frozen and compiled it has the same bits, and so have its gradients. Affine as on a TPU, too."""
    f, *shapes = BEHIND[form]
    x, w = (normal(*shape, seed=i).astype(dtype) for i, shape in enumerate(shapes))
    eps = float(jnp.finfo(dtype).eps) / 2
    bound = lambda want, size: np.abs(want) * eps + size * 2.0**-20
    taken = []
    narrowly = lambda _, narrow, x, q: taken.append(narrow) or narrow(x, q)
    specs = {**SPECS, "float8": float8_spec(granularity=PerChannel(None))}
    for name in ("8 bits", "4 bits", "affine", "float8"):
        q = quantize_fn(lambda w, x: f(x, w), [("", specs[name])])
        run = lambda w, x, g, q=q: (q(w, x), *jax.vjp(q, w, x)[1](g))
        frozen = q.freeze(w, x)
        real = np.asarray(dequantize(dataclasses.replace(frozen, dtype=jnp.dtype(np.float32))), np.float64)
        in_float64 = np.asarray(jax.jit(f)(x.astype(np.float32), real.astype(np.float32)), np.float64)
        size = np.asarray(jax.jit(f)(jnp.abs(x).astype(np.float32), np.abs(real).astype(np.float32)), np.float64)
        g = jnp.cos(in_float64).astype(dtype)
        y, of_w, of_x = jax.jit(run)(w, x, g)
        assert (np.abs(np.asarray(y, np.float64) - in_float64) <= bound(in_float64, size)).all()
        for got, want in zip(run(w, x, g), (y, of_w, of_x), strict=True):
            np.testing.assert_array_equal(got, want)
        served = jax.jit(lambda frozen, x, g, q=q: (q(frozen, x), *jax.vjp(lambda x: q(frozen, x), x)[1](g)))
        for got, want in zip(served(frozen, x, g), (y, of_x), strict=True):
            np.testing.assert_array_equal(got, want)
        if name == "affine":
            monkeypatch.setattr("jaxquant._contract._weight_only.in_wide_sums", narrowly)
            jax.clear_caches()  # of the site, which is traced already
            by_sums = jax.jit(lambda w, x, q=q: q(w, x))(w, x)
            assert taken
            assert (np.abs(np.asarray(by_sums, np.float64) - in_float64) <= bound(in_float64, 4 * size)).all()
            monkeypatch.undo()
            jax.clear_caches()


def test_no_float_weight_is_written():
    q, frozen = served(*[USES["a matrix"][0], SPECS["8 bits"], *USES["a matrix"][1:]])
    text = compiled(q, frozen, USES["a matrix"][2]).as_text()
    assert "s8[512,2048]" in text
    assert "f32[512,1024]" in text
    assert "f32[512,2048]" not in text


@pytest.mark.slow
def test_in_a_batch():
    f, w, x = USES["a matrix"]
    q, frozen = served(f, SPECS["4 bits"], w, x)
    np.testing.assert_array_equal(jax.vmap(q, (None, 0))(frozen, x[:, None])[:, 0], q(w, x))


@pytest.mark.slow
def test_gradients_are_those_of_the_whole_product():
    f, w, x = USES["a matrix"]
    q, frozen = served(f, SPECS["8 bits"], w, x)
    grad = lambda w: jax.grad(lambda x: jnp.sin(q(w, x)).sum())(x)
    np.testing.assert_array_equal(grad(frozen), grad(w))
    second = lambda w: jax.grad(lambda x: jnp.sin(jax.grad(lambda x: jnp.sin(q(w, x)).sum())(x)).sum())(x)
    np.testing.assert_allclose(second(frozen), second(w), rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_on_devices():
    f, w, x = USES["a matrix"]
    q, frozen = served(f, SPECS["8 bits"], w, x)
    mesh = jax.make_mesh((4,), ("model",), (jax.sharding.AxisType.Auto,))
    on = jax.shard_map(
        q, mesh=mesh, in_specs=(jax.P(None, None), jax.P()), out_specs=jax.P(None, None), check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(on)(frozen, x), q(w, x))
    of_rows = jax.device_put(jnp.tile(x, (4, 1)), jax.NamedSharding(mesh, jax.P("model")))
    np.testing.assert_array_equal(jax.jit(q)(frozen, of_rows)[:3], q(w, x))


WHOLE = {
    "a transpose": (lambda w, x: x @ w.T, normal(2048, 512), normal(3, 512)),
    "the first operand": (lambda w, x: w.T @ x.T, normal(512, 2048), normal(3, 512)),
    "a small weight": (plain, normal(256, 512), normal(3, 256)),
    "many rows": (plain, normal(512, 2048), normal(129, 512)),
    "columns of no power of two": (plain, normal(512, 2100), normal(3, 512)),
}


@cases("use", list(WHOLE))
def test_others_stay_whole(use):
    f, w, x = WHOLE[use]
    q, frozen = served(f, SPECS["8 bits"], w, x)
    program = compiled(q, frozen, x)
    assert loops(program) == 0
    np.testing.assert_array_equal(program(frozen, x), jax.jit(q)(w, x))


def test_floats_stay_whole():
    f, w, x = USES["a matrix"]
    q, frozen = served(f, float8_spec(), w, x)
    assert loops(compiled(q, frozen, x)) == 0


def test_other_platforms_have_the_whole_product():
    f, w, x = USES["a matrix"]
    q, frozen = served(f, SPECS["8 bits"], w, x)
    lowered = lambda platform: jax.jit(q).trace(frozen, x).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" in lowered("cpu")
    assert "stablehlo.while" not in lowered("tpu")
    assert "stablehlo.while" not in lowered("cuda")


@pytest.mark.parametrize(
    ("rows", "shape", "expected"),
    [
        (1, (2048, 2048), 256), (128, (2048, 2048), 256), (129, (2048, 2048), 0), (1, (2048, 5632), 256),
        (1, (5632, 2048), 64), (1, (512, 512), 0), (1, (512, 2048), 1024), (1, (128, 2048), 0),
        (1, (2048, 50257), 0), (1, (16384, 4096), 0), (0, (2048, 2048), 0), ("b", (2048, 2048), 0),
    ],
)  # fmt: skip
def test_how_many_columns_are_a_tile(rows, shape, expected):
    assert tile_of(rows, shape[0] * shape[1], shape[1]) == expected


ODD = [1, 3, 5, 9, 11, 13, 15, 21, 27, 35]
FORMS = {
    "plain": (lambda w, x: x @ w, lambda k, n: ((k, n), (k,))),
    "a transpose": (lambda w, x: x @ w.T, lambda k, n: ((n, k), (k,))),
    "heads": (lambda w, x: jnp.einsum("bd,dhk->bhk", x, w), lambda k, n: ((k, 4, n // 4 + 1), (k,))),
    "experts": (lambda w, x: jnp.einsum("bec,ecd->bed", x, w), lambda k, n: ((3, k, n), (3, k))),
    "a ragged dot": (lambda w, x: lax.ragged_dot(x, w, jnp.int32([1, len(x) - 1])), lambda k, n: ((2, k, n), (k,))),
    "the first operand": (lambda w, x: (w.T @ x.T).T, lambda k, n: ((k, n), (k,))),
}


def of_seed(seed):
    """A weight-only product of random rows, widths with odd factors, dtype, bits and groups."""
    rng = np.random.default_rng(seed)
    k, n = (min(int(rng.choice(ODD)) * 2 ** int(rng.integers(3, 8)), 1536) for _ in range(2))
    rows, dtype = int(rng.integers(1, 141)), rng.choice([jnp.float32, jnp.float32, BF16, jnp.float16])
    f, shapes = FORMS[rng.choice(list(FORMS))]
    shape, of_row = shapes(k, n)
    size = next((size for size in (64, 32, 16) if k % size == 0), None) if f is FORMS["plain"][0] else None
    spec = weight_spec(int(rng.choice([4, 8])), block_size=rng.choice([None, size]))
    w, x = (jnp.asarray(rng.normal(size=of), dtype) for of in (shape, (rows, *of_row)))
    return f, spec, w / k**0.5, x


@cases("seed", [*range(60), "576"])
def test_what_is_served_is_what_was_trained_for_any_shape(seed):
    """Eagerly, compiled, beside a gradient, and as constants: one form of the float product, also in its gradient."""
    f, spec, w, x = of_seed(seed) if seed != "576" else (plain, SPECS["8 bits"], normal(576, 576), normal(8, 576))
    q, frozen = served(f, spec, w, x)
    call, total = jax.jit(q), lambda x, w: q(w, x).astype(jnp.float32).sum()
    want, of_x = call(w, x), jax.jit(jax.grad(total))(x, w)
    np.testing.assert_array_equal(call(frozen, x), want)
    np.testing.assert_array_equal(q(frozen, x), want)
    np.testing.assert_array_equal(jax.jit(lambda x: q(frozen, x))(x), want)
    np.testing.assert_array_equal(jax.jit(lambda w, x: jax.vjp(q, w, x)[0])(w, x), want)
    np.testing.assert_array_equal(jax.jit(jax.grad(total))(x, frozen), of_x)
