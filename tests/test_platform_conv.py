# SPDX-License-Identifier: Apache-2.0
"""What platforms get for a convolution of integers: the bits of the convolution, computed here, and what is lowered."""

import re
import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import by_default, cases

from jaxquant import QuantSpec, Rule, activation_spec, conv_general_dilated, quantize, quantize_fn, weight_spec
from jaxquant._platform import _convolutions

pytestmark = pytest.mark.bits

NHWC = ("NHWC", "HWIO", "NHWC")
PARAMS = {"w": np.random.default_rng(1).normal(size=(3, 2, 5, 6)).astype(np.float32)}
IMAGE = np.random.default_rng(2).normal(size=(3, 6, 7, 5)).astype(np.float32)


def drawn(seed, kind, n):
    """Integers of a type, and the parameters of a convolution of them in n dimensions: any that JAX takes."""
    rng, groups = np.random.default_rng([31, seed]), 1 if kind == "plain" else 2
    ints = lambda low, high: tuple(map(int, rng.integers(low, high, n)))
    size, window, strides, a_dilation, b_dilation = ints(1, 8), ints(1, 4), ints(1, 4), ints(1, 4), ints(1, 3)
    padding = [tuple(map(int, rng.integers(-2, 6, 2))) for _ in range(n)]
    padding = tuple(
        (0, 1) if (m - 1) * d + 1 + sum(p) < 0 else p for m, d, p in zip(size, a_dilation, padding, strict=True)
    )
    (examples, inner, outer), empty = rng.integers(1, 5, 3), rng.integers(0, 40)
    examples, inner, outer = (0 if empty == i else int(v) for i, v in enumerate((examples, inner, outer)))
    if empty == 3 and n:  # without negative padding, which JAX refuses then, as it does empty windows
        size, padding = (0, *size[1:]), tuple((max(low, 0), max(high, 0)) for low, high in padding)
    orders = lax.ConvDimensionNumbers(*(tuple(map(int, rng.permutation(n + 2))) for _ in range(3)))
    shape = lambda sizes, order: [sizes[order.index(i)] for i in range(n + 2)]
    x = shape(
        (examples * (groups if kind == "examples" else 1), inner * (groups if kind == "features" else 1), *size),
        orders[0],
    )
    w = shape((outer * groups, inner, *window), orders[1])
    params = dict(zip(_convolutions.PARAMS, (strides, padding, a_dilation, b_dilation, orders), strict=False))
    params |= {"feature_group_count": groups if kind == "features" else 1}
    params |= {"batch_group_count": groups if kind == "examples" else 1}
    dtype = (np.int8, np.int8, np.int8, np.int32)[seed % 4]
    return *(rng.integers(-128, 128, v).astype(dtype) for v in (x, w)), params


DRAWN = [(seed, ("plain", "features", "examples")[seed % 3], seed // 3 % 4) for seed in range(300)]


@cases(("seed", "kind", "n"), DRAWN, [DRAWN[i] for i in (6, 8, 10)])
def test_products_have_the_bits_of_the_convolution(seed, kind, n, monkeypatch, compared):
    x, w, params = drawn(seed, kind, n)
    plain = lambda x, w: lax.conv_general_dilated(x, w, **params, preferred_element_type=jnp.int32)
    want = np.asarray(jax.jit(plain)(*(v.astype(np.int32) for v in (x, w))))
    of_products = lambda x, w: _convolutions.of_products(x, w, jax.eval_shape(plain, x, w), params)
    for largest in (_convolutions.LARGEST_STACK, 0):  # stacked, and one place in a window at a time
        monkeypatch.setattr(_convolutions, "LARGEST_STACK", largest)
        got, here = jax.jit(lambda x, w: (of_products(x, w), _convolutions.convolution(x, w, params)))(x, w)
        compared("XLA's int32", "convolution by products", got.size, int((np.asarray(got) != want).sum()))
        assert_same_bits(got, want, str((largest, params)))
        compared("XLA's int32", "convolution on a CPU", here.size, int((np.asarray(here) != want).sum()))
        assert_same_bits(here, want, str(params))


def test_cpus_convolve_in_groups_in_float32_while_that_is_exact():
    """Up to 1,024 products of int8 in a sum; one more, and without groups, in int32."""

    def convolution(length, groups, x, w):
        x, w = (jnp.broadcast_to(v, (n, of, length)) for v, n, of in ((x, 1, 2), (w, 2, 2 // groups)))
        numbers = lax.conv_dimension_numbers(x.shape, w.shape, None)
        params = dict(zip(_convolutions.PARAMS, ((1,), ((0, 0),), (1,), (1,), numbers, groups, 1), strict=True))
        return _convolutions.convolution(x, w, params)

    each = ((1024, 2, "f32"), (1025, 2, "i32"), (9, 1, "i32"))
    number = jax.ShapeDtypeStruct((), np.int8)
    lowered = jax.jit(lambda x, w: [convolution(*of[:2], x, w) for of in each]).lower(number, number)
    assert re.findall(r"stablehlo.convolution.*-> tensor<1x2x1x(\w+)>", lowered.as_text()) == [of for *_, of in each]
    run = lowered.compile()
    for x, w in ((-128, -128), (-128, 127), (127, 127)):
        for y, (length, groups, _) in zip(run(np.int8(x), np.int8(w)), each, strict=True):
            np.testing.assert_array_equal(y, x * w * length * (2 // groups))


@pytest.fixture
def of_gpus(monkeypatch):
    """Here, what GPUs get."""

    def substitute():
        of_cuda = lambda *args, cuda, **others: cuda(*args)
        monkeypatch.setattr(_convolutions, "lax", types.SimpleNamespace(**vars(lax) | {"platform_dependent": of_cuda}))
        _convolutions._convolution.clear_cache()

    yield substitute
    _convolutions._convolution.clear_cache()


def conv(p, x):
    return lax.conv_general_dilated(x, p["w"], (2, 1), ((3, -1), (1, 0)), rhs_dilation=(1, 2), dimension_numbers=NHWC)


def value_and_gradients(activation):
    q = quantize_fn(conv, [Rule("w", weight_spec(8), activation, gradient=QuantSpec())])

    def f(p, x, g):
        y, pull = jax.vjp(q, p, x)
        return y, pull(g)

    return f


ACTIVATIONS = {
    "symmetric": QuantSpec(),
    "affine": activation_spec(8),
    "12 bits": QuantSpec(bits=12),
}


@cases("name", list(ACTIVATIONS), ["affine"])
def test_a_site_has_the_bits_that_it_has_elsewhere(name, of_gpus):
    y = jax.eval_shape(conv, PARAMS, IMAGE)
    args = PARAMS, IMAGE, np.random.default_rng(3).integers(-9, 10, y.shape).astype(np.float32)
    run = lambda: jax.jit(value_and_gradients(ACTIVATIONS[name]))(*args)
    want = run()
    of_gpus()
    jax.tree.map(assert_same_bits, run(), want)


@by_default("symmetric-cuda", "affine-rocm")
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gpus_get_no_convolution_of_integers(name, platform):
    """Convolutions of gradients in float stay."""

    def lowered(f, *args):
        text = jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()
        products = re.findall(r"stablehlo.(dot_general|convolution)\b.*: \((.*)\) -> (.*)", text)
        return {(op, *re.findall(r"[fi]\d+(?=>)", types)) for op, *parts in products for types in [" ".join(parts)]}

    y = jax.eval_shape(conv, PARAMS, IMAGE)
    q = quantize_fn(conv, [Rule("w", weight_spec(8), ACTIVATIONS[name])])
    in_int8, in_int32 = (("dot_general", kind, kind, "i32") for kind in ("i8", "i32"))
    wanted = in_int32 if name == "12 bits" else in_int8
    # Beside the columns of a weight, which are a product of int8.
    assert lowered(q, PARAMS, IMAGE) - {in_int8} == {wanted} - {in_int8}
    trained = lowered(value_and_gradients(ACTIVATIONS[name]), PARAMS, IMAGE, y)
    assert {in_int8, wanted} <= trained <= {in_int8, in_int32, ("convolution", "f32", "f32", "f32")}


@by_default("groups")
@pytest.mark.parametrize(
    ("kernel", "options", "axes"),
    [((3, 3, 2, 6), {"feature_group_count": 2}, P("data", None, None, None)), ((3, 3, 4, 6), {}, P(None, "data"))],
    ids=["groups", "space"],
)
def test_an_explicit_mesh_takes_what_it_takes_of_the_convolution(kernel, options, axes, of_gpus):
    """Whose products would need a sharding of every reshape; they are traced on every platform."""
    rng, on = np.random.default_rng(4), jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x, w = (rng.integers(-127, 128, shape).astype(np.int8) for shape in ((8, 4, 5, 4), kernel))
    params = {"padding": ((1, 1),) * 2, "feature_group_count": 1, "batch_group_count": 1} | options
    params |= {name: (1, 1) for name in ("window_strides", "lhs_dilation", "rhs_dilation")}
    params |= {"dimension_numbers": lax.conv_dimension_numbers(x.shape, w.shape, NHWC)}
    want = jax.jit(lambda x, w: lax.conv_general_dilated(x, w, **params, preferred_element_type=jnp.int32))(x, w)
    of_gpus()
    with jax.set_mesh(on):
        x = jax.device_put(x, NamedSharding(on, axes))
        got = jax.jit(lambda x, w: _convolutions.convolution(x, w, params))(x, w)
    assert_same_bits(got, want)
    assert "data" in got.sharding.spec


@pytest.mark.slow
def test_an_exported_program_of_symbolic_images_has_the_bits_of_the_function(of_gpus):
    pytest.importorskip("flatbuffers", reason="jax needs it to write a program")
    kernel = quantize(PARAMS["w"], weight_spec(8, channel_axis=-1))
    options = {"lhs_dilation": (1, 2), "rhs_dilation": (1, 2), "dimension_numbers": NHWC}
    f = lambda x: conv_general_dilated(quantize(x, QuantSpec()), kernel, (2, 1), ((0, 0), (0, 1)), **options)
    shape = jax.export.symbolic_shape("b, h, w, 5")
    want = [jax.jit(f)(x) for x in (IMAGE, IMAGE[:1, :4])]
    of_gpus()
    exported = jax.export.export(jax.jit(f))(jax.ShapeDtypeStruct(shape, jnp.float32))
    assert "stablehlo.convolution" not in exported.mlir_module()
    for x, y in zip((IMAGE, IMAGE[:1, :4]), want, strict=True):
        assert_same_bits(exported.call(x), y)
