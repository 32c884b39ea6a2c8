# SPDX-License-Identifier: Apache-2.0
"""quantize_fn on models as they are, each against one in which the quantization is written by hand."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import hand_written as by_hand
import in_float32  # noqa: F401 - an execution
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits, differing
from hand_written import CHANNEL, WHOLE, Grid
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import by_default, cases

from jaxquant import PerToken, QArray, Rule, activation_spec, quantize_fn, weight_spec

pytestmark = pytest.mark.bits

W, A = weight_spec(8), activation_spec(8)
TOKEN = Grid(affine=True)
# haiku's BatchNorm raises a float to the power of an integer.
promoting = functools.partial(jax.numpy_dtype_promotion, "standard")


class Model(NamedTuple):
    """A function of params and other arguments as its users write it, and the same by hand."""

    f: Callable  # its first result is differentiated
    by_hand: Callable
    params: Any
    args: tuple
    rules: list
    quantized: list[str]  # the names of the sites that the rules choose
    in_float: list[str]
    value_and_grad: Callable = jax.value_and_grad
    jit: Callable = jax.jit

    def gradients(self, f):
        """The results of f and the gradients of the first, compiled as one."""
        at = lambda y: jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)

        def loss(params, *args):
            results = f(params, *args)
            return jnp.sum(results[0] * at(results[0])), results

        (_, results), gradients = self.jit(self.value_and_grad(loss, has_aux=True))(self.params, *self.args)
        return results, gradients


def with_inputs(*paths):
    """The sites of dots with parameters at these paths."""
    return [site for path in paths for site in (f"{path}:input", path)]


def by_path(tree):
    """What is at each path, by JAX's own naming, without the attribute that unpacks a parameter."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): v for path, v in pairs}


def same(got, want):
    got, want = by_path(got), by_path(want)
    assert set(got) == set(want)
    for path, leaf in want.items():
        assert_same_bits(got[path], leaf, path)


def close(got, want):
    """Gradients: the order of sums is the compiler's."""
    got, want = by_path(got), by_path(want)
    assert set(got) == set(want)
    for path, leaf in want.items():
        largest = np.abs(leaf).max()
        assert largest > 0, path
        np.testing.assert_allclose(got[path], leaf, rtol=0, atol=1e-5 * largest, err_msg=path)


def normal(seed, *shape, size=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * size).astype(np.float32)


def on(*grids):
    """A dot of rows and a kernel (in, out) on these grids."""
    return functools.partial(by_hand.einsum, "bi,io->bo", grids)


# Plain functions: by hand, the same with another dot in it.


def layers(params, x, dot=jnp.matmul):
    h = jnp.tanh(dot(x, params["in"]["w"]) + params["in"]["b"])
    return (dot(h, params["out"]),)


def mlp(rule, dot):
    params = {"in": {"w": normal(1, 7, 16, size=0.4), "b": normal(2, 1, 16)}, "out": normal(3, 16, 5, size=0.3)}
    sites = with_inputs("in/w", "out")
    chosen = sites if isinstance(rule, Rule) else sites[1::2]
    to_both = functools.partial(jax.value_and_grad, argnums=(0, 1))
    f, rest = functools.partial(layers, dot=dot), [site for site in sites if site not in chosen]
    return Model(layers, f, params, (normal(4, 6, 7),), [rule], chosen, rest, to_both)


@jax.custom_vjp
def weight_only(x, w):
    """The product with integers, scaled behind; its gradient is that of the real values."""
    shapes = jax.ShapeDtypeStruct(w.shape, np.float32), jax.ShapeDtypeStruct((1, w.shape[1]), np.float32)
    of = lambda w: tuple(np.float32(v) for v in by_hand.levels(w, CHANNEL, (0,))[:2])
    integers, scale = jax.pure_callback(of, shapes, w, vmap_method="sequential")
    y = x @ integers * scale
    return jnp.where(y == y, y, jnp.nan)  # lest it is contracted with the sum behind it


weight_only.defvjp(
    lambda x, w: (weight_only(x, w), (x, w)),
    lambda kept, g: jax.vjp(lambda x, w: x @ by_hand.real(CHANNEL, (0,), w), *kept)[1](g),
)


def decoder(params, tokens, weight=jnp.einsum, between=jnp.einsum):
    """Two layers in a scan over their stacked parameters."""
    normed = lambda x, scale: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, None]
    unseen = jnp.triu(jnp.full((tokens.shape[1],) * 2, -1e30), 1)

    def layer(x, p):
        q, k, v = weight("btd,dshk->sbthk", normed(x, p["norm"][0]), p["qkv"])
        attended = jax.nn.softmax(between("bthk,bshk->bhts", q, k) / 2 + unseen[None, None])
        x = x + weight("hkd,bthk->btd", p["out"], between("bhts,bshk->bthk", attended, v))
        h = jax.nn.gelu(weight("btd,df->btf", normed(x, p["norm"][1]), p["up"]))
        return x + weight("btf,df->btd", h, p["down"]), None

    x, _ = lax.scan(layer, params["embedding"][tokens], params["layers"])
    return (x @ params["head"],)


def transformer(spec, grid, between):
    norm, qkv = 1 + normal(1, 2, 2, 8, size=0.1), normal(2, 2, 8, 3, 2, 4, size=0.5)
    out, up, down = normal(3, 2, 2, 4, 8, size=0.4), normal(4, 2, 8, 16, size=0.4), normal(5, 2, 8, 16, size=0.3)
    params = {
        "embedding": normal(6, 11, 8),
        "layers": {"norm": norm, "qkv": qkv, "out": out, "up": up, "down": down},
        "head": normal(7, 8, 11, size=0.4),
    }
    rules = [("head", None), Rule("layers/*", W, spec)]
    chosen = with_inputs(*(f"layers/{name}" for name in ("qkv", "out", "up", "down")))
    attention = [f"dot_general_{i}:{side}" for i in (1, 2) for side in ("lhs", "rhs")]
    if between:
        rules, chosen = [*rules, Rule("**", activation=spec, kind="act_act")], chosen + attention
    in_float = with_inputs("head") + ([] if between else attention)

    def weight(equation, *operands):
        grids = (CHANNEL, grid) if equation.startswith("h") else (grid, CHANNEL)
        return by_hand.einsum(equation, grids, *operands)

    on_grid = lambda equation, *operands: by_hand.einsum(equation, (grid, grid), *operands)
    f = functools.partial(decoder, weight=weight, between=on_grid if between else jnp.einsum)
    tokens = np.random.default_rng(8).integers(0, 11, (2, 5)).astype(np.int32)
    return Model(decoder, f, params, (tokens,), rules, chosen, in_float)


# Frameworks: by hand, a function of the params alone. What else is random or a state comes from the framework.

IMAGES = normal(9, 6, 5, 5, 2)
HIDDEN = (6, 16)
BOTH = Rule("**/kernel", W, A)


def normalized(x, scale, bias):
    """BatchNorm; and the statistics of the batch."""
    mean = x.mean((0, 1, 2))
    var = jnp.maximum(0, (x * x).mean((0, 1, 2)) - mean * mean)
    wide = lambda v: v[None, None, None]
    return (x - wide(mean)) * (wide(lax.rsqrt(var + 1e-5)) * wide(scale)) + wide(bias), mean, var


def cnn(p, x, dropped, names=("kernel", "bias")):
    """Logits and the statistics of the batch. `dropped` has 0 and 2 for what Dropout drops and keeps."""
    w, b = names
    bias = lambda layer: p[f"{layer}/{b}"][None]
    x = by_hand.conv((WHOLE, CHANNEL), x, p[f"stem/{w}"])
    x, *stats = normalized(x, *(p[f"norm/{name}"].ravel() for name in ("scale", "offset" if b == "b" else b)))
    x = on(WHOLE, CHANNEL)(jax.nn.relu(x).reshape(6, -1), p[f"hidden/{w}"]) + bias("hidden")
    return (jax.nn.relu(x) * dropped) @ p[f"head/{w}"] + bias("head"), *stats


def linen():
    nn = pytest.importorskip("flax.linen", reason="of the extra `frameworks`")

    class Net(nn.Module):
        def setup(self):
            self.stem = nn.Conv(4, (3, 3), use_bias=False)
            self.norm = nn.BatchNorm(use_running_average=False, momentum=0.5)
            self.hidden, self.head = nn.Dense(16), nn.Dense(3)
            self.dropout = nn.Dropout(0.5, deterministic=False)

        def __call__(self, x):
            x = jax.nn.relu(self.norm(self.stem(x)))
            return self.head(self.dropout(jax.nn.relu(self.hidden(x.reshape(x.shape[0], -1)))))

    def f(params, x, old, key):
        variables = {"params": params, "batch_stats": old}
        y, changed = net.apply(variables, x, rngs={"dropout": key}, mutable=["batch_stats"])
        return y, changed["batch_stats"]

    def hand(params, x, old, key):
        ones = jnp.ones(HIDDEN)
        dropped = net.apply({}, ones, rngs={"dropout": key}, method=lambda net, x: net.dropout(x))
        y, *new = cnn(by_path(params), x, dropped)
        old = old["norm"]["mean"], old["norm"]["var"]
        mean, var = (0.5 * one + 0.5 * other for one, other in zip(old, new, strict=True))
        return y, {"norm": {"mean": mean, "var": var}}

    net = Net()
    keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(0)), strict=True))
    variables = net.init(keys, IMAGES)
    args = IMAGES, variables["batch_stats"], jax.random.key(1)
    rules, sites = [("head/**", None), BOTH], ("stem/kernel", "hidden/kernel")
    return Model(f, hand, variables["params"], args, rules, with_inputs(*sites), with_inputs("head/kernel"))


def nnx():
    nnx = pytest.importorskip("flax.nnx", reason="of the extra `frameworks`")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Conv(2, 4, (3, 3), use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
            self.hidden, self.head = nnx.Linear(100, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            x = jax.nn.relu(self.norm(self.stem(x)))
            return self.head(self.dropout(jax.nn.relu(self.hidden(x.reshape(x.shape[0], -1)))))

    def f(params, x, rest):
        net = nnx.merge(graph, params, rest, copy=True)
        return net(x), nnx.state(net, nnx.BatchStat)

    def hand(params, x, rest):
        dropped = nnx.merge(graph, params, rest, copy=True).dropout(jnp.ones(HIDDEN))
        y, *new = cnn(by_path(params), x, dropped)
        old = (by_path(rest)[f"norm/{name}"] for name in ("mean", "var"))
        mean, var = (0.5 * one + 0.5 * other for one, other in zip(old, new, strict=True))
        return y, {"norm": {"mean": mean, "var": var}}

    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)
    rules, sites = [("head/**", None), BOTH], ("stem/kernel", "hidden/kernel")
    return Model(f, hand, params, (IMAGES, rest), rules, with_inputs(*sites), with_inputs("head/kernel"))


def haiku():
    hk = pytest.importorskip("haiku", reason="of the extra `frameworks`")

    def net(x):
        x = hk.Conv2D(4, 3, with_bias=False, name="stem")(x)
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.5, name="norm")(x, True))
        x = jax.nn.relu(hk.Linear(16, name="hidden")(hk.Flatten()(x)))
        return hk.Linear(3, name="head")(hk.dropout(hk.next_rng_key(), 0.5, x))

    def hand(params, state, key, x):
        dropped = promoting()(hk.dropout)(next(hk.PRNGSequence(key)), 0.5, jnp.ones(HIDDEN))
        y, *new = cnn(by_path(params), x, dropped, "wb")
        means = {}
        for name, value in zip(("mean", "var"), new, strict=True):
            old = state[f"norm/~/{name}_ema"]
            hidden = 0.5 * old["hidden"] + 0.5 * value[None, None, None]
            means[f"norm/~/{name}_ema"] = {"counter": old["counter"] + 1, "hidden": hidden, "average": hidden / 0.75}
        return y, means

    net, keys = hk.transform_with_state(net), jax.random.split(jax.random.key(0), 3)
    init, apply = (promoting()(f) for f in net)
    params, state = init(keys[0], IMAGES)
    _, state = apply(params, state, keys[1], IMAGES)  # the second of the batches whose moving means are corrected
    rules, sites = [("head/*", None), Rule("**/w", W, A)], ("stem/w", "hidden/w")
    return Model(apply, hand, params, (state, keys[2], IMAGES), rules, with_inputs(*sites), with_inputs("head/w"))


def equinox(spec, grid):
    eqx = pytest.importorskip("equinox", reason="of the extra `frameworks`")

    class Net(eqx.Module):
        norm: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        cell: eqx.nn.LSTMCell
        head: eqx.nn.Linear
        activation: Callable  # a leaf

        def __call__(self, x):
            h = jax.vmap(self.norm)(x)
            h = self.activation(x + self.attention(h, h, h))
            (h, _), _ = lax.scan(lambda state, x: (self.cell(x, state), None), (jnp.zeros(6), jnp.zeros(6)), h)
            return self.head(h)

    dense = functools.partial(by_hand.einsum, "btd,ed->bte", (grid, CHANNEL))
    of_cell = functools.partial(by_hand.einsum, "bd,ed->be", (grid, CHANNEL))

    def hand(net, x):
        p = by_path(eqx.filter(net, eqx.is_array))
        h = jax.vmap(jax.vmap(net.norm))(x)
        q, k, v = (dense(h, p[f"attention/{name}_proj/weight"]) for name in ("query", "key", "value"))
        q, k, v = (projected.reshape(3, 5, 2, 4) for projected in (q, k, v))
        weights = jax.nn.softmax(jnp.einsum("bshd,bShd->bhsS", q / 2, k))
        h = jnp.einsum("bhsS,bShd->bshd", weights, v).reshape(3, 5, 8)
        h = jnp.tanh(x + dense(h, p["attention/output_proj/weight"]))

        def cell(state, x):
            hidden, c = state
            gates = of_cell(x, p["cell/weight_ih"]) + of_cell(hidden, p["cell/weight_hh"]) + p["cell/bias"][None]
            i, f, g, o = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        (h, _), _ = lax.scan(cell, (jnp.zeros((3, 6)), jnp.zeros((3, 6))), h.swapaxes(0, 1))
        return (h @ p["head/weight"].T + p["head/bias"][None],)

    keys = jax.random.split(jax.random.key(0), 3)
    parts = eqx.nn.MultiheadAttention(2, 8, key=keys[0]), eqx.nn.LSTMCell(8, 6, key=keys[1])
    net = Net(eqx.nn.LayerNorm(8), *parts, eqx.nn.Linear(6, 2, key=keys[2]), jnp.tanh)
    net = eqx.nn.inference_mode(net)
    projections = [f"attention/{name}_proj/weight" for name in ("query", "key", "value", "output")]
    rules = [("head/**", None), Rule(re.compile(".*/weight.*"), W, spec)]
    chosen = with_inputs(*projections, "cell/weight_ih", "cell/weight_hh")
    attention = [f"eqx.nn.MultiheadAttention/dot_general_{i}:{side}" for i in (0, 1) for side in ("lhs", "rhs")]
    f = lambda net, x: (jax.vmap(net)(x),)
    return Model(
        f, hand, net, (normal(1, 3, 5, 8),), rules, chosen, [*with_inputs("head/weight"), *attention],
        eqx.filter_value_and_grad, eqx.filter_jit,
    )  # fmt: skip


PER_TOKEN = activation_spec(8, granularity=PerToken())
PLAIN = {
    "mlp": lambda: mlp(Rule("**", W, A), on(WHOLE, CHANNEL)),
    "mlp, per token": lambda: mlp(Rule("**", W, PER_TOKEN), on(TOKEN, CHANNEL)),
    "mlp, weights alone": lambda: mlp(("**", W), weight_only),
    "transformer": lambda: transformer(A, WHOLE, False),
    "transformer, per token, attention too": lambda: transformer(PER_TOKEN, TOKEN, True),
}
OF_FRAMEWORKS = {
    "linen": linen,
    "nnx": nnx,
    "haiku": haiku,
    "equinox": lambda: equinox(A, WHOLE),
    "equinox, per token": lambda: equinox(PER_TOKEN, TOKEN),
}
MODELS = PLAIN | OF_FRAMEWORKS
CORE = "mlp", "mlp, weights alone"


class Case:
    """A model and what is compiled of it, when a test needs it."""

    def __init__(self, name):
        self.model = MODELS[name]()
        self.q = quantize_fn(self.model.f, self.model.rules, execution="int8")

    @functools.cached_property
    def expected(self):
        """Results and gradients by hand."""
        return self.model.gradients(self.model.by_hand)

    @functools.cached_property
    def results(self):
        return self.model.gradients(self.q)


@pytest.fixture(scope="module")
def case(request):
    return Case(request.param)


def on_models(default):
    marked = [pytest.param(name, marks=() if name in default else pytest.mark.slow) for name in MODELS]
    return pytest.mark.parametrize("case", marked, indirect=True)


@by_default("mlp", "transformer, per token, attention too")
@on_models([*PLAIN])
def test_the_plan_has_the_sites_of_the_model(case):
    plan = case.q.plan(case.model.params, *case.model.args)
    assert sorted(site.name for site in plan if site.spec) == sorted(case.model.quantized)
    assert sorted(site.name for site in plan if not site.spec) == sorted(case.model.in_float)


@by_default("mlp")
@on_models(CORE)
def test_the_results_are_those_of_the_model_by_hand(case):
    (y, *statistics), (want, *others) = case.results[0], case.expected[0]
    same(y, want)
    close(statistics, others)  # of float, as the model computes them: the compiler orders their sums in each program
    in_float = case.model.jit(case.model.f)(case.model.params, *case.model.args)
    assert differing(case.results[0][0], in_float[0]) > case.results[0][0].size / 2


@on_models(CORE)
def test_the_gradients_are_those_of_the_model_by_hand(case):
    close(case.results[1], case.expected[1])


@pytest.mark.slow
@on_models(["mlp"])
def test_without_jit_the_results_are_the_same(case):
    same(case.q(case.model.params, *case.model.args), case.results[0])


@on_models([])
def test_the_executions_have_the_same_bits(case):
    same(case.model.gradients(quantize_fn(case.model.f, case.model.rules, execution="float32")), case.results)


@on_models([])
@pytest.mark.parametrize("is_static", [True, False])
def test_what_was_trained_is_what_is_served(case, is_static):
    """Models that pass their state are frozen with it; what a model reads in float stays so."""
    q, (params, args) = case.q, (case.model.params, case.model.args)
    qparams = q.init_qparams(params, *args) if is_static else None
    frozen = q.freeze(params, *args, qparams=qparams)
    served, trained = (case.model.jit(functools.partial(q, qparams=qparams))(p, *args) for p in (frozen, params))
    same(served, trained)
    weights = {
        site.entry for site in q.plan(params, *args) if site.state and site.op and not site.name.endswith(":input")
    }
    integers = [v for v in jax.tree.leaves(frozen, is_leaf=lambda v: isinstance(v, QArray)) if isinstance(v, QArray)]
    assert len(integers) == len([key for key in weights if key in by_path(params)])


# What the peers fail at, a row of the table in PEERS.md each. (A plain function, equinox and haiku are above.)

BOTH_OPERANDS = [Rule("**", W, A)]
X, KERNEL = normal(20, 8, 12), normal(21, 12, 4, size=0.3)
G = normal(22, 8, 4)
MATMUL = on(WHOLE, CHANNEL)
DOTS = {"x @ w": lambda w, x: x @ w, "jnp.dot": lambda w, x: jnp.dot(x, w), "inner jit": jax.jit(lambda w, x: x @ w)}


def exactly(x=X, w=KERNEL, grids=(WHOLE, CHANNEL)):
    """The value, of NumPy alone."""
    return by_hand.exactly(x, w, grids)


def gradients_of(f, *args, g=G):
    return jax.grad(lambda *args: jnp.sum(f(*args) * g), (0, 1))(*args)


def with_gradients(q, hand=lambda w, x: MATMUL(x, w), args=(KERNEL, X), g=G):
    """Value and gradients, quantized and by hand, compiled as one."""
    return jax.jit(lambda *args: [(f(*args), gradients_of(f, *args, g=g)) for f in (q, hand)])(*args)


FIRST = "float", "quantized"


@pytest.mark.slow
@cases(("name", "first"), itertools.product(DOTS, FIRST), [("inner jit", "quantized")])
def test_neither_model_changes_the_other_whichever_runs_first(name, first):
    f = DOTS[name]
    q = quantize_fn(f, BOTH_OPERANDS)
    w, x = jax.device_put((KERNEL, X))  # NumPy has a product of its own
    models = {"float": (f, lax.dot(x, w)), "quantized": (q, exactly())}
    for kind in (first, *(set(models) - {first}), first):
        model, want = models[kind]
        for run in (model, jax.jit(model)):
            assert_same_bits(run(w, x), want, kind)


@pytest.mark.slow
def test_a_batch_of_the_shape_of_the_kernel():
    x, w, g = (normal(seed, 6, 6) for seed in (23, 24, 25))
    q = quantize_fn(lambda w, x: x @ w, BOTH_OPERANDS)
    assert [site.name for site in q.plan(w, x)] == [":input", ""]
    (y, gradients), (_, expected) = with_gradients(q, args=(w, x), g=g)
    assert_same_bits(y, exactly(x, w))
    close(gradients, expected)


@pytest.mark.slow
def test_the_gradient_of_a_convolution():
    dims = ("NHWC", "HWIO", "NHWC")
    f = lambda kernel, x: lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)
    hand = lambda kernel, x: by_hand.conv((WHOLE, CHANNEL), x, kernel)
    args, g = (normal(26, 3, 3, 2, 4), IMAGES), normal(27, 6, 5, 5, 4)
    q = quantize_fn(f, BOTH_OPERANDS)
    (y, gradients), (want, expected) = with_gradients(q, hand, args, g)
    assert_same_bits(y, want)
    close(gradients, expected)


@pytest.mark.slow
def test_a_data_parallel_gradient_in_shard_map():
    """Each shard has the range of its own rows."""
    q = quantize_fn(lambda w, x: x @ w, BOTH_OPERANDS)
    value_and_grad = jax.value_and_grad(lambda w, x, g: jnp.sum(q(w, x) * g), (0, 1))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(w, x, g):
        loss, (dw, dx) = value_and_grad(w, x, g)
        return lax.psum(loss, "data"), dw, dx, q(w, x)

    split = P("data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), split, split), out_specs=(P(), P(), split, split))
    loss, dw, dx, y = jax.jit(mapped)(KERNEL, X, G)
    expected = jax.jit(lambda x, g: gradients_of(lambda w, x: MATMUL(x, w), KERNEL, x, g=g))
    parts = [(exactly(x), expected(x, g)) for x, g in zip(np.split(X, 4), np.split(G, 4), strict=True)]
    assert_same_bits(y, np.concatenate([y for y, _ in parts]))
    close(dw, sum(dw for _, (dw, _) in parts))
    close(dx, np.concatenate([dx for _, (_, dx) in parts]))
    np.testing.assert_allclose(loss, np.sum(np.asarray(y) * G), rtol=1e-5)


@cases("kind", ["Auto", "Explicit"], [])
def test_a_data_parallel_gradient_on_a_mesh(kind):
    """The range is that of the whole batch."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    q = quantize_fn(lambda w, x: x @ w, BOTH_OPERANDS)
    put = lambda v, spec: jax.device_put(v, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        w, x, g = put(KERNEL, P()), put(X, P("data")), put(G, P("data"))
        y, gradients = jax.jit(lambda w, x, g: (q(w, x), gradients_of(q, w, x, g=g)))(w, x, g)
    assert y.sharding.is_equivalent_to(g.sharding, 2)
    assert_same_bits(y, exactly())
    close(gradients, jax.jit(lambda w, x: gradients_of(lambda w, x: MATMUL(x, w), w, x))(KERNEL, X))


@pytest.mark.slow
@cases("dtype", ["float16", "bfloat16"], ["bfloat16"])
def test_half_precision_weights_below_one(dtype):
    x, w, g = (v.astype(jnp.dtype(dtype)) for v in (X, KERNEL / 16, G))
    assert np.abs(w).max() < 0.1
    (y, gradients), (_, expected) = with_gradients(quantize_fn(lambda w, x: x @ w, BOTH_OPERANDS), args=(w, x), g=g)
    assert_same_bits(y, exactly(x, w).astype(dtype))
    for got, want in zip(gradients, expected, strict=True):
        got, want = (np.asarray(v).astype(np.float32) for v in (got, want))
        assert np.abs(got - want).max() <= jnp.finfo(dtype).eps * np.abs(want).max()


@pytest.mark.slow
@cases("bits", [2, 3, 4], [2])
def test_few_bits(bits):
    grids = Grid(bits, affine=True, whole=True), Grid(bits)
    q = quantize_fn(lambda w, x: x @ w, [Rule("**", weight_spec(bits), activation_spec(bits))])
    (y, gradients), (_, expected) = with_gradients(q, lambda w, x: on(*grids)(x, w))
    assert_same_bits(y, exactly(grids=grids))
    close(gradients, expected)


@pytest.mark.parametrize("rule", [("hiden/*", W), Rule("hiden/*", W, A), Rule("**", W, op="conv_general_dilated")])
def test_a_rule_that_matches_nothing(rule):
    q = quantize_fn(lambda params, x: x @ params["hidden"]["w"], [("hidden/*", W), rule])
    for call in (q, q.plan, jax.jit(q)):
        with pytest.raises(ValueError, match=r"`rules\[1\]`.*matched no site.*'hidden/w'"):
            call({"hidden": {"w": KERNEL}}, X)


@cases("granularity", ["per tensor", "per token"])
def test_nan_stays_in_its_rows(granularity):
    x = np.array(X)
    x[2, 3] = x[5] = np.nan
    grid, spec = (WHOLE, A) if granularity == "per tensor" else (TOKEN, PER_TOKEN)
    y = np.asarray(quantize_fn(lambda w, x: x @ w, [Rule("**", W, spec)])(KERNEL, x))
    kept = np.isfinite(x).all(1)
    assert kept.sum() == 6
    assert np.isnan(y[~kept]).all()
    # Of a row that is lost, what is finite still counts in the range of all.
    finite = np.where(np.isnan(x), np.float32(0), x)
    assert_same_bits(y[kept], exactly(finite, grids=(grid, CHANNEL))[kept])


# What else a function and its params may hold.


@pytest.mark.slow
def test_a_batch_that_the_function_closes_over():
    """What a kernel makes of it is data for the next kernel."""
    params = {"in": normal(28, 12, 6), "out": normal(29, 6, 3)}
    f = lambda params, x: jnp.tanh(x @ params["in"]) @ params["out"]
    passed, closed = quantize_fn(f, BOTH_OPERANDS), quantize_fn(lambda params: f(params, X), BOTH_OPERANDS)
    assert [site.spec for site in closed.plan(params)] == [site.spec for site in passed.plan(params, X)]
    assert_same_bits(*jax.jit(lambda params: (closed(params), passed(params, X)))(params))


def test_hyperparameters_in_a_module_stay_python_floats():
    """equinox's Dropout is a leaf p: float, which `eqx.filter_jit` leaves static, and `p == 0` a branch of Python."""
    eqx = pytest.importorskip("equinox", reason="of the extra `frameworks`")
    q, key, x = quantize_fn(lambda net, x: net(x, x, x), [("**/weight", W)]), jax.random.key(0), normal(30, 5, 8)
    of = lambda net: jax.make_jaxpr(lambda key, x: q(net(eqx.nn.MultiheadAttention(2, 8, key=key)), x))(key, x)
    assert str(of(lambda net: net)) == str(of(eqx.nn.inference_mode))
