# SPDX-License-Identifier: Apache-2.0
"""One entry from outside for a contraction, and one for a way to add up its products."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from inputs import ones
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from lanes import by_default

from jaxquant import QuantSpec, Rule, activation_spec, dot_general, quantize, quantize_fn, solve, weight_spec
from jaxquant._arrays._codes import centred
from jaxquant._contract._contract import ContractionOp
from jaxquant._contract._dot import LOWERINGS, Dot
from jaxquant._contract._lowering import Lowering
from jaxquant._contract._ops import OPS
from jaxquant.solve._graph._classes import AxisClasses
from jaxquant.solve._graph._folding import Operand, fold
from jaxquant.solve._graph._graph import Graph

MATMUL = ((1,), (0,)), ((), ())
RNG = np.random.default_rng(0)
PARAMS, X = jax.device_put(
    (
        {name: RNG.normal(size=shape).astype(np.float32) for name, shape in (("w", (16, 8)), ("b", (8,)))},
        RNG.normal(size=(6, 16)).astype(np.float32),
    )
)

# ---- A product with a fused bias, as a kernel of an author.

fused = Primitive("matmul_with_bias")


def formula(x, w, bias):
    return lax.dot_general(x, w, MATMUL) + bias[None]


fused.def_impl(formula)
fused.def_abstract_eval(lambda x, w, bias: x.update(shape=(x.shape[0], w.shape[1])))
mlir.register_lowering(fused, mlir.lower_fun(formula, multiple_results=False))
ad.primitive_jvps[fused] = lambda primals, tangents: jax.jvp(
    formula, primals, [ad.instantiate_zeros(tangent) for tangent in tangents]
)


@dataclasses.dataclass(frozen=True)
class MatmulWithBias(ContractionOp):
    """The dot, and the bias added to what it gives."""

    @property
    def dot(self):
        return Dot(*MATMUL, execution=self.execution, gradient=self.gradient)

    @classmethod
    def of(cls, params, **attributes):
        return cls(**attributes)

    def real(self, a, b, bias):
        return self.dot.real(a, b) + bias[None]

    def exact(self, a, b, bias):
        return self.dot.exact(a, b) + bias[None]

    def operand_gradient(self, side, g, q, shape, key, bias):
        return self.dot.operand_gradient(side, g, q, shape, key)

    def axes(self, ndims):
        return self.dot.axes(ndims)


RULES = [Rule("w", weight_spec(8), activation_spec(8))]
IN_INT8 = [Rule("w", weight_spec(8), activation_spec(8), gradient=QuantSpec())]
plain = lambda params, x: x @ params["w"] + params["b"][None]
with_bias = lambda params, x: fused.bind(x, params["w"], params["b"])


@pytest.fixture
def with_entry(monkeypatch):
    monkeypatch.setitem(OPS, fused.name, MatmulWithBias)


def test_without_an_entry_the_rule_matches_no_op():
    with pytest.raises(ValueError, match="no dot or convolution uses"):
        quantize_fn(with_bias, RULES)(PARAMS, X)


def test_the_plan_has_its_operands(with_entry):
    (rule,) = RULES
    sites = list(quantize_fn(with_bias, [dataclasses.replace(rule, op=fused.name)]).plan(PARAMS, X))
    assert [(site.name, site.op, site.length) for site in sites] == [
        ("w:input", "matmul_with_bias", 16),
        ("w", "matmul_with_bias", 16),
    ]
    assert all(site.spec for site in sites)


@by_default("int8 gradient")
@pytest.mark.parametrize("rules", [RULES, IN_INT8], ids=["float gradient", "int8 gradient"])
def test_the_value_is_the_exact_dot_and_the_bias(with_entry, rules):
    got, want = (quantize_fn(f, rules) for f in (with_bias, plain))
    assert_same_bits(got(PARAMS, X), want(PARAMS, X))
    of = lambda q: jax.jit(jax.grad(lambda params, x: (q(params, x) ** 2).sum(), (0, 1)))(PARAMS, X)
    for one, other in zip(*(jax.tree.leaves(of(q)) for q in (got, want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)
    assert np.any(of(got)[0]["w"])


def test_it_is_served_frozen(with_entry):
    q = quantize_fn(with_bias, RULES)
    assert_same_bits(q(q.freeze(PARAMS, X), X), q(PARAMS, X))


def test_its_bias_is_read_in_float(with_entry):
    """Also where it is a part of the weight, which then cannot be integers alone."""
    tied = lambda f: lambda params, x: f({"w": params["w"], "b": params["w"][0]}, x)
    got, want = (quantize_fn(tied(f), RULES) for f in (with_bias, plain))
    assert_same_bits(got(PARAMS, X), want(PARAMS, X))
    with pytest.raises(ValueError, match=r"'w'.*also read in float, by 'matmul_with_bias'"):
        got.freeze(PARAMS, X)


def test_solvers_read_its_axes(with_entry):
    """Each makes of it what it makes of the dot; no factor comes out of it, of which its bias would know nothing."""
    rng, shapes = np.random.default_rng(1), {"a": (16, 8), "b": (1, 8), "c": (4,), "d": (4, 4), "w": (8, 4)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    graph_of = lambda f: Graph(jax.make_jaxpr(f)(params, X).jaxpr, [*params, None])
    read = []
    for turn in (fused.bind, formula):
        f = lambda p, x, turn=turn: turn(jnp.square(x @ p["a"]) * p["b"], p["w"], p["c"])
        q, graph = quantize_fn(f, [Rule("w", weight_spec(8), activation_spec(8))]), graph_of(f)
        grams = q.observe(params, X, gram=True)
        solved = solve.gptq(params, q, grams, X, qparams=q.init_qparams(params, X))
        at = [node.at for node in graph.nodes if node.name in OPS][-1]
        read.append((grams, solved, fold(graph, Operand(at, 0)).factors, AxisClasses(graph).parameters()["w"]))
    jax.tree.map(assert_same_bits, *read)
    graph = graph_of(lambda p, x: fused.bind(x @ p["a"], p["w"], p["c"]) @ p["d"])
    refused = fold(graph, Operand([node.at for node in graph.nodes if node.name in OPS][-1], 0))
    assert "beside an operand that would not be divided" in refused.why


# ---- Another way to add up products of integers.


def test_an_execution_of_an_author(monkeypatch):
    a, b = quantize(X, activation_spec(8)), quantize(PARAMS["w"], weight_spec(8, channel_axis=-1))

    def product(op, a, b, length):
        x, w = (centred(q, jnp.int32) for q in (a, b))
        add = lambda k, acc: acc + x[:, k][:, None] * w[k][None]  # one row of b at a time
        return lax.fori_loop(0, length, add, jnp.zeros((x.shape[0], w.shape[1]), jnp.int32))

    def check(length, a, b):
        if a.bits != 8:
            raise ValueError("only 8 bits")

    monkeypatch.setitem(LOWERINGS, "one_row", Lowering(product, check))
    dot = lambda a, b, **options: dot_general(a, b, MATMUL, **options)
    text = jax.jit(functools.partial(dot, execution="one_row")).lower(a, b).as_text()
    assert "stablehlo.while" in text
    assert "dot_general" not in text
    assert_same_bits(dot(a, b, execution="one_row"), dot(a, b))
    with pytest.raises(ValueError, match="only 8 bits"):
        dot(quantize(X, activation_spec(4)), b, execution="one_row")


def test_an_execution_that_another_op_has_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(LOWERINGS, "of_dots", LOWERINGS["int8"])
    conv = lambda params, x: lax.conv_general_dilated(
        x, params["w"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    q = quantize_fn(conv, RULES, execution="of_dots")
    with pytest.raises(ValueError, match=r"`execution` must be one of auto, int8, native.*, got 'of_dots'"):
        q({"w": ones((3, 4, 4))}, ones((2, 5, 4)))
