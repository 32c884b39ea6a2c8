# SPDX-License-Identifier: Apache-2.0
"""What quantize_fn returns, under every transform of JAX: one value and one gradient, to the bit."""

import concurrent.futures
import functools

import hand_written as by_hand
import in_float32  # noqa: F401 - an execution
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from hand_written import Grid
from inputs import hard_values
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxquant import PerToken, Rule, activation_spec, fake_quant, quantize_fn, weight_spec

pytestmark = pytest.mark.bits

TOKENS = activation_spec(8, granularity=PerToken())
BOTH, PER_TOKEN = ((Rule("**", weight_spec(8), spec),) for spec in (activation_spec(8), TOKENS))
WEIGHTS = (("**", weight_spec(8)),)
RULES = {"weights": WEIGHTS, "both": BOTH, "per token": PER_TOKEN}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
every_rule = pytest.mark.parametrize(
    "rules", [pytest.param(r, marks=[] if r is BOTH else pytest.mark.slow) for r in RULES.values()], ids=RULES
)


def model(params, x):
    return jnp.maximum(x @ params["first"], 0) @ params["second"]


def layer(params, x):
    """Its first half, which compiles in half the time."""
    return x @ params["first"]


GRIDS = {BOTH: (by_hand.WHOLE, by_hand.CHANNEL), PER_TOKEN: (Grid(affine=True), Grid())}


def exactly(params, x, rules=BOTH):
    """The value of the model, quantized, of NumPy alone; of weights alone, up to the order of its sums."""
    if rules is WEIGHTS:
        dot = lambda x, w: x @ np.multiply(*by_hand.levels(w, Grid(), (0,))[:2])
    else:
        dot = functools.partial(by_hand.exactly, grids=GRIDS[rules])
    return dot(np.maximum(dot(x, params["first"]), 0), params["second"])


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {"first": normal(0, 6, 8), "second": normal(1, 8, 4)}
X, G = normal(2, 8, 6), normal(3, 8, 4)


def same(got, want):
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert_same_bits(one, other, jax.tree_util.keystr(path))


def with_gradients(f):
    """A function of (params, x, g) that returns the value of f and its gradients to both."""

    def both(params, x, g):
        y, pull = jax.vjp(f, params, x)
        return y, *pull(g)

    return both


# Shared by tests, so that each program is compiled once.
quantized = functools.cache(functools.partial(quantize_fn, model))
jitted = functools.cache(lambda rules, **options: jax.jit(with_gradients(quantized(rules, **options))))


@functools.cache
def hard():
    """Parameters, inputs and cotangents at the ends of the range, NaN and infinities among them."""
    rng = np.random.default_rng(4)
    make = lambda *shape: hard_values(rng, int(np.prod(shape)), -1, 1, 255).reshape(shape)
    return {"first": make(6, 8), "second": make(8, 4)}, make(8, 6), G


CALLS = {
    "jit": jax.jit,
    "jit in jit": lambda f: jax.jit(jax.jit(f)),
    "vmap of one": lambda f: (
        lambda *args: jax.tree.map(lambda v: v[0], jax.vmap(f)(*jax.tree.map(lambda v: v[None], args)))
    ),
    "scan of one": lambda f: (
        lambda *args: jax.tree.map(
            lambda v: v[0], lax.scan(lambda _, a: (None, f(*a)), None, jax.tree.map(lambda v: v[None], args))[1]
        )
    ),
}


@pytest.mark.parametrize("values", [slow("normal"), "hard"])
@pytest.mark.parametrize("call", ["jit", slow("jit in jit"), slow("vmap of one"), slow("scan of one")])
@every_rule
def test_values_and_gradients_are_the_same_however_it_is_called(rules, call, values):
    args = hard() if values == "hard" else (PARAMS, X, G)
    f = with_gradients(quantized(rules))
    (y, *gradients), (want, *others) = CALLS[call](f)(*args), f(*args)
    same(y, want)
    if call != "vmap of one":
        same(gradients, others)
        return
    # The gradients are float contractions of JAX's, which XLA sums in another order if they are batched: on a CPU with
    # AVX2 alone last bits differ, on one with AVX-512 none.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), gradients, others)


@pytest.mark.parametrize("values", [slow("normal"), "hard"])
def test_execution_cannot_change_a_bit(values):
    args = hard() if values == "hard" else (PARAMS, X, G)
    functions = [with_gradients(quantized(BOTH, execution=e)) for e in ("int8", "float32", "auto")]
    int8, float32, auto = jax.jit(lambda *args: [f(*args) for f in functions])(*args)
    same(int8, float32)
    same(int8, auto)


def test_grad_and_value_and_grad_are_those_of_vjp():
    q = quantized(BOTH)
    y, *gradients = with_gradients(q)(PARAMS, X, G)
    loss = lambda p, x: (q(p, x) * G).sum()
    value, got = jax.value_and_grad(loss, (0, 1))(PARAMS, X)
    same(jax.grad(loss, (0, 1))(PARAMS, X), got)
    same(got, gradients)
    assert_same_bits(value, (y * G).sum())


@pytest.mark.slow
@every_rule
def test_vmap_over_params_is_a_loop(rules):
    q = quantized(rules)
    params = {"first": normal(5, 3, 6, 8), "second": normal(6, 3, 8, 4)}
    rows = [q(jax.tree.map(lambda v: v[i], params), X) for i in range(3)]  # noqa: B023
    got, want = jax.vmap(q, (0, None))(params, X), np.stack(rows)
    if rules is WEIGHTS:  # its dots are in float, which sum in another order in a batch
        np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-21 * np.abs(want).max())
    else:
        assert_same_bits(got, want)


@pytest.mark.slow
def test_a_range_of_a_tensor_is_of_the_example_under_vmap_and_one_of_a_token_does_not_care():
    x = normal(7, 3, 8, 6) * jnp.array([1, 10, 100], jnp.float32)[:, None, None]
    whole = x.reshape(24, 6)
    for rules in RULES.values():
        q = quantize_fn(model, rules)
        assert_same_bits(jax.vmap(q, (None, 0))(PARAMS, x), jnp.stack([q(PARAMS, one) for one in x]))
    of_tokens, of_tensor = (quantize_fn(model, rules) for rules in (PER_TOKEN, BOTH))
    assert_same_bits(of_tokens(PARAMS, whole).reshape(3, 8, 4), jax.vmap(of_tokens, (None, 0))(PARAMS, x))
    assert not np.array_equal(of_tensor(PARAMS, whole).reshape(3, 8, 4), jax.vmap(of_tensor, (None, 0))(PARAMS, x))


@pytest.mark.slow
def test_gradients_of_each_example():
    q = quantize_fn(model, BOTH)
    gradient = jax.grad(lambda p, x: (q(p, x[None]) ** 2).sum())
    rows = [gradient(PARAMS, x) for x in X]
    for got, want in zip(
        jax.tree.leaves(jax.vmap(gradient, (None, 0))(PARAMS, X)),
        jax.tree.leaves(jax.tree.map(lambda *v: jnp.stack(v), *rows)), strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@every_rule
def test_checkpoint_changes_nothing(rules):
    q = quantize_fn(model, rules)
    for policy in (None, jax.checkpoint_policies.dots_saveable):
        f = jax.checkpoint(q, policy=policy)
        same(jax.jit(with_gradients(f))(PARAMS, X, G), with_gradients(q)(PARAMS, X, G))


@pytest.mark.slow
def test_scan_over_it_is_a_loop():
    square = {"first": normal(8, 6, 8), "second": normal(9, 8, 6)}
    q, x = quantize_fn(model, BOTH), X
    for _ in range(3):
        x = exactly(square, x) + x
    assert_same_bits(lax.scan(lambda x, _: (q(square, x) + x, None), X, length=3)[0], x)


# Devices


def mesh(kind="Auto"):
    return jax.make_mesh((4,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))


LAYOUTS = {
    "data parallel": (P(), P(), P("data")),
    "columns": (P(None, "data"), P(None, "data"), P()),
    "rows": (P(), P("data"), P()),
    "fsdp": (P(None, "data"), P("data"), P("data")),
}


@every_rule
@pytest.mark.parametrize("layout", [n if n == "fsdp" else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_sharded_params_give_the_bits_of_one_device(layout, rules):
    first, second, data = (NamedSharding(mesh(), spec) for spec in LAYOUTS[layout])
    params = {"first": jax.device_put(PARAMS["first"], first), "second": jax.device_put(PARAMS["second"], second)}
    got, want = jax.jit(quantized(rules))(params, jax.device_put(X, data)), exactly(PARAMS, X, rules)
    if rules is WEIGHTS:  # its dots are in float, and summed in another order where K is split
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    else:
        assert_same_bits(got, want)


@pytest.mark.slow
def test_an_explicit_mesh_gives_the_bits_of_one_device():
    whole, data = (NamedSharding(mesh("Explicit"), spec) for spec in (P(), P("data", None)))
    params = jax.device_put(PARAMS, whole)
    f = jitted(BOTH, execution="auto")
    y, to_params, to_x = f(params, jax.device_put(X, data), jax.device_put(G, data))
    want, want_to_params, want_to_x = f(PARAMS, X, G)
    assert jax.typeof(y).sharding.spec == P("data", None)
    same(y, want)
    # Float contractions, of fewer rows on each device: a CPU with AVX2 alone sums them in another order on jax 0.7.2.
    wanted = want_to_params, want_to_x
    for got, want in zip(jax.tree.leaves((to_params, to_x)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_columns_on_an_explicit_mesh_stay_where_they_are():
    columns = NamedSharding(mesh("Explicit"), P(None, "data"))
    y = jax.jit(quantize_fn(layer, BOTH))({"first": jax.device_put(PARAMS["first"], columns)}, X)
    assert jax.typeof(y).sharding.spec == P(None, "data")
    assert_same_bits(y, by_hand.exactly(X, PARAMS["first"]))


@pytest.mark.slow
def test_operands_on_several_devices_are_contracted_where_f_asks_for_the_sum():
    on = mesh("Explicit")
    q = quantize_fn(lambda w, x: jnp.dot(x, w, out_sharding=NamedSharding(on, P())), BOTH)
    at = lambda shape, *axes: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(on, P(*axes)))
    y = jax.eval_shape(q, at((8, 6), "data", None), at((3, 8), None, "data"))
    assert (y.shape, y.sharding.spec) == ((3, 6), P(None, None))


@pytest.mark.slow
def test_a_contraction_over_sharded_axes_has_the_sharding_that_f_asks_for():
    whole, rows, columns = (NamedSharding(mesh("Explicit"), P(*axes)) for axes in ((), ("data",), (None, "data")))
    w, x, g = normal(4, 8, 6), normal(5, 3, 8), normal(6, 3, 6)
    q = jax.jit(with_gradients(quantize_fn(lambda w, x: jnp.dot(x, w, out_sharding=whole), BOTH)))
    got = q(jax.device_put(w, rows), jax.device_put(x, columns), jax.device_put(g, whole))
    assert [jax.typeof(v).sharding.spec for v in got] == [P(None, None), P("data", None), P(None, "data")]
    same(got, with_gradients(quantize_fn(lambda w, x: x @ w, BOTH))(w, x, g))


@pytest.mark.slow
def test_under_shard_map_the_range_of_a_tensor_is_of_the_shard():
    q = quantize_fn(model, BOTH)
    f = jax.shard_map(q, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P("data"))
    shards = jnp.concatenate([q(PARAMS, X[i : i + 2]) for i in range(0, 8, 2)])
    assert_same_bits(jax.jit(f)(PARAMS, X), shards)
    assert not np.array_equal(shards, q(PARAMS, X))
    of_tokens = quantize_fn(model, PER_TOKEN)
    f = jax.shard_map(of_tokens, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P("data"))
    assert_same_bits(f(PARAMS, X), of_tokens(PARAMS, X))
    gradient = jax.grad(lambda p: (f(p, X) * G).sum())(PARAMS)
    for got, want in zip(
        jax.tree.leaves(gradient), jax.tree.leaves(with_gradients(of_tokens)(PARAMS, X, G)[1]), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# The rest of a program's life


@pytest.mark.slow
@pytest.mark.parametrize("what", ["value", "gradients"])
def test_an_exported_program_is_the_same_after_it_is_loaded(what):
    f, args = (jax.jit(quantized(BOTH)), (PARAMS, X))
    if what == "gradients":
        f, args = jitted(BOTH, execution="auto"), (PARAMS, X, G)
    pytest.importorskip("flatbuffers", reason="jax needs it to write a program")
    loaded = jax.export.deserialize(jax.export.export(f)(*args).serialize())
    same(loaded.call(*args), f(*args))


@pytest.mark.slow
def test_donated_params_are_given_away_without_a_warning():
    q, g = quantize_fn(layer, BOTH), normal(4, 8, 8)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params):
        return jax.tree.map(lambda v, g: v - g, params, jax.grad(lambda p: (q(p, X) * g).sum())(params))

    given = {"first": jnp.array(PARAMS["first"])}
    want = jax.jit(step.__wrapped__)({"first": PARAMS["first"]})
    same(step(given), want)
    assert given["first"].is_deleted()


def test_f_is_traced_once_for_equal_arguments():
    traces = []

    def f(params, x, flag=True):
        traces.append(flag)
        return layer(params, x)

    q = quantize_fn(f, BOTH)
    for _ in range(100):
        q(PARAMS, X)
    assert len(traces) == 1
    of_shapes = jax.eval_shape  # traces as a call does, and compiles nothing
    of_shapes(jax.jit(q), PARAMS, X)
    of_shapes(jax.grad(lambda p: q(p, X).sum()), PARAMS)
    assert len(traces) == 1
    of_shapes(functools.partial(q, flag=False), PARAMS, X)
    of_shapes(q, PARAMS, X[:4])
    assert traces == [True, False, True]


@pytest.mark.slow
def test_two_threads_may_call_it():
    q = quantize_fn(model, BOTH)
    inputs = [X[:n] for n in (2, 4, 6, 8)] * 2
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda x: q(PARAMS, x), inputs))
    fresh = quantize_fn(model, BOTH)
    same(got, [fresh(PARAMS, x) for x in inputs])


@pytest.mark.slow
def test_without_jit_it_is_the_same():
    q = quantize_fn(model, BOTH)
    want = with_gradients(q)(PARAMS, X, G)
    with jax.disable_jit():
        got = with_gradients(quantize_fn(model, BOTH))(PARAMS, X, G)
    assert_same_bits(got[0], want[0])
    for one, other in zip(jax.tree.leaves(got[1:]), jax.tree.leaves(want[1:]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# Arguments and results


@pytest.mark.slow
def test_static_arguments_are_told_apart_by_type_and_stay_what_they_are():
    seen = []

    def f(p, x, flag, *, mode="a", other=None):
        seen.append(type(flag))
        return model(p, x), type(flag).__name__, mode, other

    q = quantize_fn(f, BOTH)
    want = quantize_fn(model, BOTH)(PARAMS, X)
    for flag in (1, True, "1", 1.0, 0.0, -0.0, 1, True, 1.0):
        y, kind, mode, other = q(PARAMS, X, flag, mode="b")
        assert (kind, mode, other) == (type(flag).__name__, "b", None)
        assert_same_bits(y, want)
    assert seen == [int, bool, str, float, float, float]


def test_results_that_are_no_arrays_come_through():
    answers = {"f": model, "n": 3, "s": "a", "half": 0.5, "yes": True, "nothing": None, "set": {1}}
    got = quantize_fn(lambda p, x: answers | {"y": layer(p, x), "np": np.float32(2)}, BOTH)(PARAMS, X)
    assert {k: got[k] for k in answers} == answers
    assert type(got["yes"]) is bool
    assert_same_bits(got["np"], np.float32(2))


def test_weak_types_are_those_of_f():
    f = lambda p, x, s: (model(p, x), s * 2, jnp.asarray(1.0), x * s)
    got, want = (jax.eval_shape(f, PARAMS, X, 2.0) for f in (quantize_fn(f, BOTH), f))
    assert [(v.dtype, v.weak_type) for v in got] == [(v.dtype, v.weak_type) for v in want]


@pytest.mark.slow
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_that_is_an_argument_of_f_reaches_f(make):
    f = lambda p, x, key: (x + jax.random.normal(key, x.shape)) @ p["first"]
    q = quantize_fn(f, BOTH)
    want = quantize_fn(lambda p, x: x @ p["first"], BOTH)(PARAMS, X + jax.random.normal(make(3), X.shape))
    assert_same_bits(q(PARAMS, X, make(3)), want)
    assert_same_bits(q(PARAMS, X, key=make(3)), want)


def test_effects_happen_once_and_in_order(capsys):
    def f(p, x):
        def body(h, i):
            jax.debug.print("step {}", i, ordered=True)
            return h + layer(p, h).sum(), None

        return lax.scan(body, x, jnp.arange(3))[0]

    jax.block_until_ready(quantize_fn(f, BOTH)(PARAMS, X))
    jax.effects_barrier()
    assert capsys.readouterr().out.split() == ["step", "0", "step", "1", "step", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("around", [slow(jax.grad), jax.jit, slow(lambda g: lambda s: jax.vmap(g)(s[None])[0])])
def test_f_may_close_over_what_an_outer_transform_traces(around):
    outer = lambda f: lambda s: f(lambda p, x: x * s).sum()
    q = outer(lambda scaled: quantize_fn(lambda p, x: layer(p, scaled(p, x)), BOTH)(PARAMS, X))
    want = outer(lambda scaled: quantize_fn(layer, BOTH)(PARAMS, scaled(PARAMS, X)))
    np.testing.assert_allclose(around(q)(jnp.float32(1.5)), around(want)(jnp.float32(1.5)), rtol=1e-6)


@pytest.mark.slow
def test_a_gradient_of_a_gradient_is_that_of_the_straight_through_model():
    x, w = normal(0, 5, 8), normal(1, 8, 3)
    in_float = lambda w, x: fake_quant(x, activation_spec(8)) @ fake_quant(w, weight_spec(8, channel_axis=1))
    q = quantize_fn(lambda w, x: x @ w, [Rule("**", weight_spec(8), activation_spec(8))])

    def penalty(f):
        of_x = lambda w: jax.grad(lambda x: (f(w, x) ** 2).sum())(x)
        return jax.grad(lambda w: (of_x(w) ** 2).sum())

    got, expected = map(np.asarray, jax.jit(lambda w: [penalty(f)(w) for f in (q, in_float)])(w))
    assert np.abs(expected).max() > 100
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_a_row_of_nan_that_is_masked_leaves_the_gradient_alone():
    x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    x[1, 2] = np.nan
    q = quantize_fn(lambda w, x: x @ w, [Rule("**", weight_spec(8), activation_spec(8))])
    w, kept = np.eye(8, dtype=np.float32), np.arange(5)[:, None] != 1
    gradient, y = jax.jit(jax.grad(lambda w: (jnp.where(kept, y := q(w, x), 0).sum(), y), has_aux=True))(w)
    assert np.isnan(y).all(1).tolist() == [False, True, False, False, False]
    assert np.isfinite(gradient).all()
    assert np.all(gradient)
