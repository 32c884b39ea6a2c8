# SPDX-License-Identifier: Apache-2.0
"""quantize_fn on what operands are made of: the parameters that it finds, their axes, and the bits they give."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from hand_written import WHOLE, Grid, exactly
from jax import lax
from lanes import cases
from sites import ACTIVATION, MATMUL, PARAMS, RULES, X, normal, relu, same, site, values_and_gradients

from jaxquant import (
    PerBlock,
    PerChannel,
    QuantSpec,
    Rule,
    dot_general,
    fake_quant,
    quant_point,
    quantize,
    quantize_fn,
    weight_spec,
)

bits = pytest.mark.bits  # of tests that compare sums of floats

P2 = PARAMS | {
    "mask": np.random.default_rng(9).random((6, 6)) < 0.5,
    "flat": normal(10, 36),
    "split": normal(11, 2, 3, 6),
}
P2 |= {
    "qkv": normal(12, 6, 18),
    "experts": normal(13, 4, 6, 6),
    "a": normal(14, 6, 2),
    "b": normal(15, 2, 6),
    "v": normal(16, 6),
}
CAPTURED = normal(17, 6, 6)
MADE = {
    "transpose": (lambda p, i: p["w"].T, "w"),
    "reshape, merging": (lambda p, i: p["split"].reshape(6, 6), "split"),
    "cast": (lambda p, i: p["w"].astype(jnp.bfloat16).astype(jnp.float32), "w"),
    "slice": (lambda p, i: p["qkv"][:, 6:12], "qkv"),
    "split": (lambda p, i: jnp.split(p["qkv"], 3, axis=1)[2], "qkv"),
    "rows reversed": (lambda p, i: p["w"][::-1], "w"),
    "one of a stack": (lambda p, i: p["ws"][0], "ws"),
    "the last of a stack": (lambda p, i: p["ws"][-1], "ws"),
    "expert": (lambda p, i: p["experts"][i], "experts"),
    "dynamic_slice": (lambda p, i: lax.dynamic_slice(p["qkv"], (0, 3 * i), (6, 6)), "qkv"),
    "squeeze": (lambda p, i: p["w"][None].squeeze(0), "w"),
    "broadcast": (lambda p, i: jnp.broadcast_to(p["v"][:, None], (6, 6)), "v"),
    "barrier": (lambda p, i: lax.optimization_barrier(p["w"]), "w"),
    "swapaxes of a slice": (lambda p, i: jnp.swapaxes(p["split"][:, :, :3], 0, 2).reshape(3, 6).T, "split"),
    "masked": (lambda p, i: p["w"] * p["mask"].astype(jnp.float32), None),
    "selected": (lambda p, i: jnp.where(p["mask"], p["w"], 0), None),
    "low rank": (lambda p, i: p["w"] + p["a"] @ p["b"], None),
    "concatenate": (lambda p, i: jnp.concatenate([p["a"], p["b"].T, p["a"]], 1), None),
    "scaled": (lambda p, i: p["w"] * 0.5, None),
}


def of_operand(name):
    """A product with it, quantized."""
    make, path = MADE[name]
    f = lambda p, x, i: relu(x @ make(p, i))
    return quantize_fn(f, [Rule("**", weight_spec(8), ACTIVATION, kind="weight" if path else "derived")])


@pytest.mark.parametrize("name", MADE)
def test_an_operand_is_followed_to_its_parameter_or_derived_from_several(name):
    operand = [s for s in of_operand(name).plan(P2, X, np.int32(2)) if s.spec][1]
    assert operand.spec == weight_spec(8, channel_axis=1)
    assert operand.name == (MADE[name][1] or operand.op + f"_{int(name == 'low rank')}")


@functools.cache
def operands():
    made = jax.jit(lambda p, i: {name: make(p, i) for name, (make, _) in MADE.items()})(P2, np.int32(2))
    return made | {"cast": P2["w"]}  # quantized before it is cast


def test_every_operand_is_quantized_to_the_bits_of_what_is_made_of_its_parameters():
    """All in one program, which compiles faster than one for each."""
    got = jax.jit(lambda *args: {name: of_operand(name)(*args) for name in MADE})(P2, X, np.int32(2))
    for name, y in got.items():
        assert_same_bits(y, np.maximum(exactly(X, operands()[name]), 0), name)


@cases("name", MADE, ["swapaxes of a slice"])
def test_an_operand_alone_has_the_bits_of_what_is_made_of_its_parameters(name):
    y = of_operand(name)(P2, X, np.int32(2))
    assert_same_bits(y, np.maximum(exactly(X, operands()[name]), 0))


@bits
@pytest.mark.slow
def test_the_gradient_finds_its_way_back_through_what_an_operand_is_made_of():
    def program(dot, p, x):
        ws = [MADE[name][0](p, np.int32(2)) for name in ("transpose", "reshape, merging", "slice", "expert", "masked")]
        for w in ws:
            x = relu(dot(x, w))
        return x

    rules = [Rule("**", weight_spec(8), ACTIVATION, kind=kind) for kind in ("weight", "derived")]
    params = {k: v for k, v in P2.items() if k != "mask"}
    close = lambda f: lambda p, x: f(p | {"mask": P2["mask"]}, x)
    functions = quantize_fn(functools.partial(program, jnp.matmul), rules), functools.partial(program, site)
    got, want = values_and_gradients(*map(close, functions), params=params)
    same(got, want)
    assert all(np.any(got[1][0][name]) for name in ("w", "split", "qkv", "experts"))


def test_a_row_of_an_embedding_is_an_activation():
    tokens = np.array([1, 5, 2])
    f = lambda p, x, tokens: p["w"][tokens] @ p["ws"][0] @ p["w"].T
    q = quantize_fn(f, RULES)
    assert [s.name for s in q.plan(PARAMS, X, tokens)] == ["ws:input", "ws", "w:input", "w"]
    want = exactly(exactly(PARAMS["w"][tokens], PARAMS["ws"][0]), PARAMS["w"].T)
    assert_same_bits(q(PARAMS, X, tokens), want)


def test_a_captured_weight_is_named_by_its_op():
    f = lambda p, x: lax.scan(lambda h, _: (relu(h @ CAPTURED), None), x @ p["w"], length=2)[0]
    q = quantize_fn(f, [*RULES, Rule("dot_general_1", weight_spec(8), ACTIVATION, kind="captured")])
    assert [s.kind for s in q.plan(PARAMS, X)] == ["weight", "weight", "captured", "captured"]
    x = exactly(X, PARAMS["w"])
    for _ in range(2):
        x = np.maximum(exactly(x, CAPTURED), 0)
    assert_same_bits(q(PARAMS, X), x)


def attention(p, x):
    with jax.named_scope("scores"):
        return quant_point(x * 2, "q") @ quant_point(x + 1, "k").T


CHOICES = [("**", "scores"), ("scores/dot_general_0", None), ("[qk]", None), ("**", "sc*")]


def attention_chosen(pattern, scope):
    pattern = re.compile(pattern) if pattern == "[qk]" else pattern
    return quantize_fn(attention, [Rule(pattern, activation=ACTIVATION, kind="act_act", scope=scope)])


@pytest.mark.parametrize(("pattern", "scope"), CHOICES)
def test_two_activations_are_chosen_by_scope_by_op_or_by_name(pattern, scope):
    plan = attention_chosen(pattern, scope).plan(PARAMS, X)
    assert [(s.name, s.spec) for s in plan] == [("q", ACTIVATION), ("k", ACTIVATION)]


@cases(("pattern", "scope"), CHOICES, [("[qk]", None)])
def test_two_activations_that_are_chosen_are_quantized(pattern, scope):
    want = exactly(X * 2, (X + 1).T, (WHOLE, WHOLE))
    assert_same_bits(attention_chosen(pattern, scope)(PARAMS, X), want)


@bits
def test_one_of_two_activations_is_quantized_by_its_name():
    q = quantize_fn(attention, [Rule("k", activation=ACTIVATION, kind="act_act")])
    assert [(s.name, bool(s.spec)) for s in q.plan(PARAMS, X)] == [("q", False), ("k", True)]
    assert_same_bits(*jax.jit(lambda x: (q(PARAMS, x), x * 2 @ fake_quant((x + 1).T, ACTIVATION)))(X))


ON_PARAMETER = {  # the granularity on the parameter, and where it comes to lie on the operand
    "transposed": ("transpose", PerChannel(0), PerChannel(1)),
    "merged": ("reshape, merging", PerChannel(-1), PerChannel(1)),
    "cut": ("slice", PerChannel(1), PerChannel(1)),
    "of the stack alone": ("one of a stack", PerChannel(0), None),
    "of the stack and the columns": ("expert", PerChannel((0, 2)), PerChannel(1)),
    "blocks, transposed": ("transpose", PerBlock(1, 3), PerBlock(0, 3)),
    "blocks, contracted": ("transpose", PerBlock(None, 2), PerBlock(0, 2)),
}


def on_parameter(name):
    """A product with an operand of that granularity, and the spec that this is on the operand."""
    make, given, want = ON_PARAMETER[name]
    f = lambda p, x: x @ MADE[make][0](p, np.int32(2))
    q = quantize_fn(f, [Rule("**", QuantSpec(granularity=given), ACTIVATION)])
    return q, QuantSpec(granularity=want) if want else QuantSpec()


@pytest.mark.parametrize("name", ON_PARAMETER)
def test_axes_of_a_spec_are_counted_on_the_parameter(name):
    q, want = on_parameter(name)
    assert [s.spec for s in q.plan(P2, X)] == [ACTIVATION, want]


@functools.cache
def products():
    """By name, as quantized and as wanted: all in one program, which compiles faster than one for each."""
    made, wanted = {name: on_parameter(name) for name in ON_PARAMETER}, {}
    for name, (_, spec) in made.items():
        if not isinstance(spec.granularity, PerBlock):
            grid = Grid(whole=spec == QuantSpec())
            wanted[name] = exactly(X, operands()[ON_PARAMETER[name][0]], (WHOLE, grid))

    def of_blocks(x, operands):
        x, specs = quantize(x, ACTIVATION), {name: spec for name, (_, spec) in made.items() if name not in wanted}
        return {n: dot_general(x, quantize(operands[ON_PARAMETER[n][0]], v), MATMUL) for n, v in specs.items()}

    each = jax.jit(lambda p, x, operands: ({n: q(p, x) for n, (q, _) in made.items()}, of_blocks(x, operands)))
    got, others = each(P2, X, operands())
    return {name: (got[name], want) for name, want in (wanted | others).items()}


@pytest.mark.slow
def test_a_parameter_is_quantized_along_the_axes_of_its_spec():
    assert products().keys() == ON_PARAMETER.keys()
    for name, (got, want) in products().items():
        assert_same_bits(got, want, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_PARAMETER)
def test_a_parameter_alone_is_quantized_along_the_axes_of_its_spec(name):
    assert_same_bits(on_parameter(name)[0](P2, X), products()[name][1])


@pytest.mark.parametrize(
    ("made", "granularity", "message"),
    [
        ("reshape, merging", PerChannel(0), r"'split'.*no axis of the operand.*\[\[0, 1\], \[2\]\]"),
        ("reshape, splitting", PerBlock(0, 6), r"'flat'.*no axis of the operand"),
        ("reshape, splitting", PerChannel(None), r"'flat'.*no granularity of the parameter matches it"),
        ("transpose", PerChannel(1), r"'w'.*contracted.*Share the scale"),
        ("transpose", PerChannel(2), r"'w'.*out of range.*rank 2"),
        ("transpose", PerBlock(1, 4), r"'w'.*does not divide"),
        ("transpose", PerBlock(0, 3), r"'w'.*contracted.*Share the scale"),  # blocks of columns, a scale for each row
    ],
)
def test_axes_that_do_not_fit_are_refused_when_planned(made, granularity, message):
    make = MADE[made][0] if made in MADE else lambda p, i: p["flat"].reshape(6, 6)
    q = quantize_fn(lambda p, x: x @ make(p, 0), [Rule("**", QuantSpec(granularity=granularity), ACTIVATION)])
    with pytest.raises(ValueError, match=message):
        q.plan(P2, X)
