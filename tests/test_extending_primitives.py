# SPDX-License-Identifier: Apache-2.0
"""One entry from outside for a primitive of jax that only moves data: quantize_fn follows parameters through it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxquant import PerChannel, QuantSpec, Rule, activation_spec, quantize_fn
from jaxquant._contract._dot import Dot
from jaxquant._program._moves import MOVES, Run, one
from jaxquant.solve._graph._biases import Contracted, biases
from jaxquant.solve._graph._classes import AxisClasses
from jaxquant.solve._graph._folding import Operand, fold
from jaxquant.solve._graph._graph import Graph

MATMUL = ((1,), (0,)), ((), ())

swap = Primitive("swap_of_an_author")  # the transpose of a matrix
swap.def_impl(lambda x: x.T)
swap.def_abstract_eval(lambda x: x.update(shape=x.shape[::-1]))
mlir.register_lowering(swap, mlir.lower_fun(lambda x: lax.transpose(x, (1, 0)), multiple_results=False))
ad.deflinear(swap, lambda g: [swap.bind(g)])

SPEC = QuantSpec(granularity=PerChannel(0))
RULES = [Rule("w", SPEC, activation_spec(8))]
SWAPPED, TRANSPOSED = (quantize_fn(lambda p, x, f=f: x @ f(p["w"]), RULES) for f in (swap.bind, jnp.transpose))
PARAMS, X = ({"w": np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)}, np.ones((3, 6), np.float32))
PARAMS, X = jax.device_put((PARAMS, X))


@pytest.fixture
def with_entry(monkeypatch):
    monkeypatch.setitem(MOVES, swap.name, one(lambda eqn: [[Run((1,), (0,)), Run((0,), (1,))]]))


def test_without_an_entry_it_computes_with_the_parameter():
    with pytest.raises(ValueError, match="in an op of kind 'derived'"):
        quantize_fn(lambda p, x: x @ swap.bind(p["w"]), RULES)(PARAMS, X)


def test_the_plan_follows(with_entry):
    assert str(SWAPPED.plan(PARAMS, X)) == str(TRANSPOSED.plan(PARAMS, X))


def test_the_value_and_its_gradient_follow(with_entry):
    of = lambda q: jax.jit(jax.value_and_grad(lambda p, x: q(p, x).sum(), (0, 1)))(PARAMS, X)
    for got, want in zip(*(jax.tree.leaves(of(q)) for q in (SWAPPED, TRANSPOSED)), strict=True):
        assert_same_bits(got, want)


def test_the_frozen_value_follows(with_entry):
    swapped, transposed = (q.freeze(PARAMS, X) for q in (SWAPPED, TRANSPOSED))
    assert_same_bits(swapped["w"].values, transposed["w"].values)
    assert_same_bits(SWAPPED(swapped, X), SWAPPED(PARAMS, X))
    assert_same_bits(SWAPPED(swapped, X), TRANSPOSED(transposed, X))


def test_solvers_follow(with_entry):
    """What they read of a program says the same of parameters as through the transpose."""
    params = {"a": np.ones((8, 6)), "b": np.ones(4), "g": np.ones((8, 1)), "w": np.ones((8, 4))}

    def of(turn):
        f = lambda p, x: turn(turn(x @ turn(p["a"])) * p["g"]) @ p["w"] + p["b"][None]
        graph = Graph(jax.make_jaxpr(f)(params, X).jaxpr, [*params, None])
        _, last = (node.at for node in graph.nodes if node.name == "dot_general")
        folded = fold(graph, Operand(last, 0))
        assert folded.size == 8
        assert set(folded.factors) == {"g", "w"}
        channels = AxisClasses(graph).parameters()
        assert channels["a"][0] == channels["w"][0]
        return folded.factors, channels, biases(graph, [Contracted(last, 1, (), Dot(*MATMUL).matrix(1, (2, 2)))])

    jax.tree.map(np.testing.assert_array_equal, of(swap.bind), of(jnp.transpose))
