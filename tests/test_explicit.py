# SPDX-License-Identifier: Apache-2.0
"""One site at a time on a mesh with explicit axes, which `jax.make_mesh` makes by default: what one device computes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard
from lanes import cases

from jaxquant import (
    PerToken,
    QuantSpec,
    Rule,
    activation_spec,
    fake_quant_params,
    float8_spec,
    quantize_fn,
    quantize_params,
    report,
    solve,
    weight_spec,
)

F = np.float32
W8, A8 = weight_spec(8), activation_spec(8)


def normal(seed, *shape):
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(F))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))


def put(mesh, v, spec):
    return jax.device_put(v, jax.NamedSharding(mesh, spec))


RULES = {
    "8 bits": Rule("w", W8, A8),
    "weight-only": Rule("w", W8),
    "groups": Rule("w", weight_spec(4, block_size=4)),
    "groups of 8 bits": Rule("w", weight_spec(4, block_size=4), QuantSpec()),
    "float8": Rule("w", float8_spec(), float8_spec()),
    "gradient": Rule("w", W8, A8, gradient=QuantSpec()),
    "bfloat16": Rule("w", W8, A8, gradient="bfloat16"),
    "tokens": Rule("w", W8, activation_spec(8, granularity=PerToken())),
    "16 bits": Rule("w", QuantSpec(bits=16), A8),
}
# On the mesh, and on one device.
einsum = lambda x, w: jnp.einsum("bk,kn->bn", x, w, out_sharding=P())
USES = {
    "as it is": (lambda p, x: einsum(x, p["w"]), lambda p, x: x @ p["w"], (16, 8)),
    "resharded": (lambda p, x: einsum(x, reshard(p["w"], P())), lambda p, x: x @ p["w"], (16, 8)),
    "by device_put": (
        lambda p, x: einsum(x, jax.device_put(p["w"], P())),
        lambda p, x: x @ p["w"], (16, 8),
    ),
    "transposed": (lambda p, x: einsum(x, reshard(p["w"], P()).T), lambda p, x: x @ p["w"].T, (8, 16)),
    "in a scan": (
        lambda p, x: lax.scan(lambda h, w: (einsum(h, reshard(w, P())), None), reshard(x, P()), p["w"])[0],
        lambda p, x: lax.scan(lambda h, w: (h @ w, None), x, p["w"])[0], (2, 16, 16),
    ),
}  # fmt: skip
SPLITS = {"rows": ("d", None), "columns": (None, "d"), "whole": (None, None)}
INPUTS = {"tokens": P("d"), "features": P(None, "d"), "whole": P()}
X = normal(0, 8, 16)
EVERY = [
    case for case in itertools.product(USES, RULES, SPLITS, INPUTS)
    if not (case[0] == "in a scan" and case[1] in ("groups", "groups of 8 bits"))
]  # fmt: skip
DEFAULT = [("resharded", "8 bits", "columns", "tokens")]


def on(mesh, use, split, inputs):
    f, alone, shape = USES[use]
    w = normal(1, *shape) / 4
    spec = P(*[None] * (w.ndim - 2), *SPLITS[split])
    return f, alone, {"w": w}, {"w": put(mesh, w, spec)}, put(mesh, X, INPUTS[inputs])


@pytest.mark.slow
@pytest.mark.bits
@cases("use, rule, split, inputs", EVERY, DEFAULT)
def test_a_site(mesh, use, rule, split, inputs):
    """Trained, frozen, observed: equal bits, but where a product of floats is summed over devices, and in gradients."""
    f, alone, params, params_on, x = on(mesh, use, split, inputs)
    q, by_one = (quantize_fn(g, [RULES[rule]]) for g in (f, alone))
    total = lambda q: lambda params, x: jnp.square(q(params, x)).sum()
    want, gradients = by_one(params, X), jax.grad(total(by_one), (0, 1))(params, X)
    is_exact = RULES[rule].activation is not None
    equal = assert_same_bits if is_exact else lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    with jax.set_mesh(mesh):
        frozen = q.freeze(params_on, x)
        equal(q(params_on, x), want)
        equal(q(frozen, x), want)
        got = jax.jit(jax.grad(total(q), (0, 1)))(params_on, x)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        for a, b in zip(jax.tree.leaves(frozen), jax.tree.leaves(by_one.freeze(params, X)), strict=True):
            assert_same_bits(a, b)
        both = q.observe(params_on, x), q.init_qparams(params_on, x)
    alike = by_one.observe(params, X), by_one.init_qparams(params, X)
    for a, b in zip(jax.tree.leaves(both), jax.tree.leaves(alike), strict=True):
        assert_same_bits(a, b)


TOOLS = {
    "report": lambda q, params, x, grams, qparams: report(q, params, x, loss=lambda y: jnp.square(y).mean()) and {},
    "ranges": lambda q, params, x, grams, qparams: solve.ranges(params, q, grams, x),
    "gptq": lambda q, params, x, grams, qparams: solve.gptq(params, q, grams, x, qparams=qparams, freeze=True),
    "adaround": lambda q, params, x, grams, qparams: solve.adaround(params, q, grams, x, qparams=qparams, steps=3),
    "low rank": lambda q, params, x, grams, qparams: [
        a @ b for a, b in solve.low_rank(params, q, grams, x, qparams=qparams, rank=2).values()
    ],
    "smooth": lambda q, params, x, grams, qparams: solve.smooth(params, q, grams, x),
    "rotate": lambda q, params, x, grams, qparams: solve.rotate(params, q, x),
    "equalize": lambda q, params, x, grams, qparams: solve.equalize(params, q, x),
    "bias_correct": lambda q, params, x, grams, qparams: solve.bias_correct(
        params, q, grams, x, qparams=qparams, progress=lambda *of: None
    ),
}


def layers(params, x, **kw):
    hidden = jnp.einsum("bk,kn->bn", x * params["g"], params["w"], **kw) + params["b"]
    return jnp.einsum("bn,nd->bd", jax.nn.relu(hidden), params["v"], out_sharding=P() if kw else None)


@pytest.mark.slow
@cases("tool", TOOLS, ["smooth"])
def test_tools(mesh, tool):
    """Two layers with columns, then rows split."""
    params = {"w": normal(1, 16, 8), "b": normal(2, 1, 8), "v": normal(3, 8, 16), "g": jnp.ones((1, 16))}
    specs = {"w": P(None, "d"), "b": P(None, "d"), "v": P("d", None), "g": P()}
    rules, of = [Rule(name, W8, A8) for name in ("w", "v")], TOOLS[tool]

    def run(f, params, x):
        q = quantize_fn(f, rules)
        return of(q, params, x, q.observe(params, x, gram=True), q.init_qparams(params, x))

    want = run(layers, params, X)
    with jax.set_mesh(mesh):
        params_on = {name: put(mesh, v, specs[name]) for name, v in params.items()}
        got = run(lambda params, x: layers(params, x, out_sharding=P(None, "d")), params_on, put(mesh, X, P()))
        for name in specs if tool in ("smooth", "rotate", "equalize", "bias_correct", "adaround") else ():
            assert got[name].sharding.spec == specs[name]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_rows_of_a_table(mesh):
    look = lambda params, t: params["E"].at[t].get(out_sharding=P("d"))
    table, rule = normal(1, 64, 16), Rule("E", weight_spec(8, channel_axis=0), everywhere=True)
    want = quantize_fn(lambda params, t: params["E"][t], [rule])({"E": table}, np.arange(8))
    with jax.set_mesh(mesh):
        got = quantize_fn(look, [rule])({"E": put(mesh, table, P())}, put(mesh, np.arange(8), P("d")))
    assert_same_bits(got, want)


def test_a_mask_and_params(mesh):
    rules, split = [("w", weight_spec(8, channel_axis=1))], P("d", None)
    q = quantize_fn(lambda params, x: einsum(x, params["w"]), [Rule("w", W8, A8)])
    w, rows = normal(1, 16, 8), np.arange(8) < 5
    with jax.set_mesh(mesh):
        params, x = {"w": put(mesh, w, split)}, put(mesh, X, split)
        got = q.observe(params, x, mask=put(mesh, rows, P()))["w:input"]
        trained, served = fake_quant_params(params, rules)["w"], quantize_params(params, rules)["w"]
    assert (got.x_min, got.x_max) == (X[:5].min(), X[:5].max())
    assert_same_bits(trained, fake_quant_params({"w": w}, rules)["w"])
    assert_same_bits(served.values, quantize_params({"w": w}, rules)["w"].values)
