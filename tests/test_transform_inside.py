# SPDX-License-Identifier: Apache-2.0
"""quantize_fn on functions that hold every construct of JAX: the bits and gradients of the program without it."""

import functools

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits, x64
from hand_written import exactly
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import by_default, cases
from sites import (
    ACTIVATION,
    PARAMS,
    RULES,
    G,
    X,
    in_float,
    normal,
    relu,
    same,
    site,
    value_and_gradients,
    values_and_gradients,
)

from jaxquant import QuantSpec, Rule, dequantize, quantize, quantize_fn, weight_spec
from jaxquant._program._jaxpr import opened, programs

bits = pytest.mark.bits  # of tests that compare sums of floats: what is in integers has its bits however it is compiled

POLICIES = jax.checkpoint_policies


def equations(jaxpr):
    """Those of a program and of all programs in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner, _ in programs(eqn):
            yield from equations(inner)


def parameters(eqn):
    """Those of an equation; a primitive of jax.experimental.hijax has them in an object."""
    return next(iter(eqn.params.values())).params if eqn.primitive.name == "call_hi_primitive" else eqn.params


def one(dot, p, x):
    return relu(dot(x, p["w"]))


def layers(dot, p, x, order=(0, 1)):
    for i in order:
        x = relu(dot(x, p["ws"][i]))
    return x


def repeated(dot, p, x, n=3):
    for _ in range(n):
        x = relu(dot(x, p["w"])) + x
    return x


def by_row(dot, p, x):
    return jnp.stack([one(dot, p, row[None])[0] for row in x])


PLAIN = functools.partial(one, jnp.matmul)
layer = lambda h, w: (relu(h @ w), None)


def scan_of_scans(p, x):
    inner = lambda h, ws: lax.scan(layer, h, ws)
    return lax.scan(lambda h, _: inner(h, p["ws"]), x, None, length=2)[0]


def stacked(p, x):
    """What a scan puts out, layer by layer."""
    body = lambda h, w: ((h := relu(h @ w)), h)
    return lax.scan(body, x, p["ws"])[1]


def each(dot, p, x):
    outs = []
    for w in p["ws"]:
        outs.append(x := relu(dot(x, w)))
    return jnp.stack(outs)


def alternatives(p, x, *, on, other=lambda p, x: x):
    return lax.cond(on(x), PLAIN, other, p, x)


def switched(p, x, i):
    branches = [PLAIN, functools.partial(layers, jnp.matmul), lambda p, x: x]
    return lax.switch((x[0, 0] < 1e9).astype(jnp.int32) * i, branches, p, x)


def converted(p, x):
    """A closure converted to a function of what it closes over."""
    f, consts = jax.closure_convert(lambda x: relu(x @ p["w"]), x)
    return f(x, *consts)


def closed_call(p, x):
    """The call that older transforms of JAX leave behind; no public function makes it."""
    program, _ = opened(jax.make_jaxpr(jax.jit(PLAIN))({"w": p["w"]}, x))
    (eqn,) = program.eqns
    call = eqn.replace(primitive=primitives.closed_call_p, params={"call_jaxpr": eqn.params["jaxpr"]})
    return jax.core.eval_jaxpr(program.replace(eqns=[call]), (), p["w"], x)[0]


always, never = lambda x: x[0, 0] < 1e9, lambda x: x[0, 0] > 1e9
JITTED = jax.jit(PLAIN)
backwards = functools.partial(layers, order=(1, 0))
twice_layers = lambda dot, p, x: layers(dot, p, x, (0, 1) * 2)
constant = lambda p, x, **kw: lax.scan(lambda h, _: (PLAIN(p, h) + h, None), x, length=3, **kw)[0]
INSIDE = {
    "jit": (jax.jit(PLAIN), one),
    "jit in jit": (jax.jit(lambda p, x: jax.jit(PLAIN)(p, x)), one),
    "jit, donating": (jax.jit(PLAIN, donate_argnums=1), one),
    "jit, called twice": (lambda p, x: JITTED(p, JITTED(p, x)), lambda dot, p, x: one(dot, p, one(dot, p, x))),
    "scan over layers": (lambda p, x: lax.scan(layer, x, p["ws"])[0], layers),
    "scan, outputs": (stacked, each),
    "scan, reverse": (lambda p, x: lax.scan(layer, x, p["ws"], reverse=True)[0], backwards),
    "scan of a constant": (constant, repeated),
    "scan, unroll": (functools.partial(constant, unroll=2), repeated),
    "scan in scan": (scan_of_scans, twice_layers),
    "scan of a jit": (lambda p, x: lax.scan(jax.jit(layer), x, p["ws"])[0], layers),
    "fori_loop": (lambda p, x: lax.fori_loop(0, 3, lambda _, h: PLAIN(p, h) + h, x), repeated),
    "fori_loop over layers": (lambda p, x: lax.fori_loop(0, 2, lambda i, h: relu(h @ p["ws"][i]), x), layers),
    "cond, taken": (functools.partial(alternatives, on=always), one),
    "cond, not taken": (functools.partial(alternatives, on=never), lambda dot, p, x: x),
    "cond, in both": (functools.partial(alternatives, on=never, other=functools.partial(layers, jnp.matmul)), layers),
    "switch, 0": (functools.partial(switched, i=0), one),
    "switch, 1": (functools.partial(switched, i=1), layers),
    "switch, 2": (functools.partial(switched, i=2), lambda dot, p, x: x),
    "checkpoint": (jax.checkpoint(PLAIN), one),
    "checkpoint in scan": (lambda p, x: lax.scan(jax.checkpoint(layer), x, p["ws"])[0], layers),
    "map": (lambda p, x: lax.map(lambda row: PLAIN(p, row[None])[0], x), by_row),
    "closure_convert": (converted, one),
    "closed_call": (closed_call, one),
    "vmap over rows": (lambda p, x: jax.vmap(lambda row: relu(row @ p["w"]))(x), one),
}  # fmt: skip


@functools.cache
def without_a_construct(plain, outputs):
    return value_and_gradients(functools.partial(plain, site), g=COTANGENTS[outputs])


COTANGENTS = {False: G, True: normal(4, 2, 4, 6)}


@by_default("scan over layers")
@bits
@cases("name", INSIDE, ["scan over layers", "cond, in both"])  # of one program without them
def test_values_and_gradients_are_those_of_the_program_without_the_construct(name):
    f, plain = INSIDE[name]
    outputs = name == "scan, outputs"
    got = value_and_gradients(quantize_fn(f, RULES), g=COTANGENTS[outputs])
    want = without_a_construct(plain, outputs)
    if name == "map":  # a loop sums the gradients of its turns as it computes them, with products that are not rounded
        near = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())
        jax.tree.map(near, got[1], want[1])
        got, want = got[0], want[0]
    same(got, want)


def test_a_choice_of_parameters_is_followed_no_further_and_stays_in_float():
    """Their dot has them in float, and what else uses them is quantized."""
    choice = lambda p, x: lax.cond(always(x), lambda: p["w"].T, lambda: p["w"])
    program = lambda dot, p, x: dot(x, p["w"]) + x @ choice(p, x)
    q = quantize_fn(functools.partial(program, jnp.matmul), RULES)
    assert [site.spec is None for site in q.plan(PARAMS, X)] == [False, False, True, True]
    assert_same_bits(*jax.jit(lambda: (q(PARAMS, X), program(site, PARAMS, X)))())


@pytest.mark.slow
def test_an_associative_scan_combines_quantized():
    def program(dot, p, x):
        return lax.associative_scan(lambda a, b: dot(a, p["w"]) + b, x)

    q = quantize_fn(functools.partial(program, jnp.matmul), RULES)
    (y, *gradients), (want, *others) = map(jax.tree.leaves, values_and_gradients(q, functools.partial(program, site)))
    assert_same_bits(y, want)
    for g, other in zip(gradients, others, strict=True):  # the uses of one weight are added up in another order
        np.testing.assert_allclose(g, other, rtol=1e-4, atol=1e-6)


def countdown(dot, p, x):
    """A loop whose length depends on quantized values, with a site in its condition too."""
    state = x, np.int32(0)
    while_ = lambda s: (dot(s[0], p["w"]).max() < 50) & (s[1] < 9)
    body = lambda s: (dot(s[0], p["w"]).clip(0) + np.float32(1), s[1] + np.int32(1))
    if dot is jnp.matmul:
        return lax.while_loop(while_, body, state)
    while while_(state):
        state = body(state)
    return state


def test_a_while_loop_is_quantized_in_its_body_and_its_condition():
    while_, turns = functools.partial(countdown, jnp.matmul), np.int32(3)
    plan = quantize_fn(while_, RULES).plan(PARAMS, X)
    assert [site.name for site in plan] == ["w:input", "w", "w:input#2", "w#2"]
    fori = lambda p, x, n: lax.fori_loop(0, n, lambda _, h: PLAIN(p, h) + h, x)
    got = quantize_fn(lambda p, x, n: (while_(p, x), fori(p, x, n)), RULES)(PARAMS, X, turns)
    assert 1 < got[0][1] < 9  # not by chance: a float loop may take as many
    x = X
    for _ in range(turns):
        x = np.maximum(exactly(x, PARAMS["w"]), 0) + x
    same(got, (countdown(exactly, PARAMS, X), x))


def test_batched_weights_have_a_scale_for_each_channel_of_each():
    f = lambda p, x: jax.vmap(lambda w, x: x @ w, (0, None))(p["ws"], x)
    assert_same_bits(quantize_fn(f, RULES)(PARAMS, X), np.stack([exactly(X, w) for w in PARAMS["ws"]]))


@pytest.mark.parametrize(("policy", "forwards"), [(None, 2), ("nothing_saveable", 2), ("everything_saveable", 1)])
def test_a_checkpoint_keeps_its_policy(policy, forwards):
    policy = policy and getattr(POLICIES, policy)
    f = jax.checkpoint(lambda p, x: relu(relu(x @ p["w"]) @ p["ws"][0]), policy=policy, prevent_cse=False)
    q = quantize_fn(f, RULES)
    program, _ = opened(jax.make_jaxpr(q)(PARAMS, X))
    checkpoint, *_ = [parameters(e) for e in equations(program) if "prevent_cse" in parameters(e)]  # before those in it
    saving = lambda policy: None if policy is POLICIES.nothing_saveable else policy  # None saves nothing
    assert (saving(checkpoint["policy"]), checkpoint["prevent_cse"]) == (saving(policy), False)
    program, _ = opened(jax.make_jaxpr(jax.grad(lambda p: q(p, X).sum()))(PARAMS))
    in_integers = [e for e in equations(program) if e.primitive.name == "integer_dot"]
    assert len(in_integers) == 2 * forwards


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="jax.experimental.hijax is younger")
@cases("custom", ["keep", "inline"], ["keep"])
def test_a_primitive_of_hijax_is_entered(custom):
    from jax.experimental import hijax

    class Matmul(getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive):  # its name until jax 0.11
        def __init__(self, a, b):
            self.in_avals, self.out_aval, self.params = (a, b), jax.typeof(X), {}
            super().__init__()

        def expand(self, a, b):
            return a @ b

        def vjp_fwd(self, nonzeros, a, b):
            return self(a, b), (a, b)

        def vjp_bwd_retval(self, operands, g):
            a, b = operands
            return 2 * (g @ b.T), 2 * (a.T @ g)  # the author's, to be told from that of the matmul

    f = lambda p, x: relu(Matmul(jax.typeof(x), jax.typeof(p["w"]))(x, p["w"]))
    with pytest.raises(ValueError, match=r"a function with a derivative of its own .* Rule\(..., custom=\"keep\"\)"):
        quantize_fn(f, RULES).plan(PARAMS, X)
    q = quantize_fn(f, [Rule("w", weight_spec(8), ACTIVATION, custom=custom)], strict=True)
    assert [site.name for site in q.plan(PARAMS, X) if site.spec] == ["w:input", "w"]
    value = exactly(X, PARAMS["w"])
    assert_same_bits(q(PARAMS, X), np.maximum(value, 0))
    got = jax.grad(lambda p: (q(p, X) * G).sum())(PARAMS)["w"]
    masked = np.where(value > 0, G, np.float32(0))
    wanted = 2 * (X.T @ masked) if custom == "keep" else jax.vjp(site, X, PARAMS["w"])[1](masked)[1]
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("policy", "saved"), [("save_only_these_names", 1), ("save_any_names_but_these", 0)])
def test_a_checkpoint_saves_the_names_that_its_policy_says(policy, saved):
    def f(p, x):
        h = checkpoint_name(relu(x @ p["in"]), "hidden")
        return (h @ p["out"]).sum()

    q = quantize_fn(jax.checkpoint(f, policy=getattr(POLICIES, policy)("hidden")), RULES)
    pull = jax.eval_shape(lambda *args: jax.vjp(q, *args)[1], {"in": normal(4, 6, 7), "out": normal(5, 7, 5)}, X)
    assert [v.shape for v in jax.tree.leaves(pull)].count((4, 7)) == saved


# Functions with a derivative of their own


def with_derivative(kind, body):
    """A function of (w, x) whose derivative is three times the true one to x, and none to w."""
    f = getattr(jax, kind)(body)
    if kind == "custom_jvp":

        @f.defjvp
        def _(primals, tangents):
            w, x = primals
            return f(w, x), 3 * jax.jvp(lambda x: body(w, x), (x,), tangents[1:])[1]

    else:
        pull = lambda operands, g: (
            jnp.zeros_like(operands[0]),
            3 * jax.vjp(lambda x: body(operands[0], x), operands[1])[1](g)[0],
        )
        f.defvjp(lambda w, x: (f(w, x), (w, x)), pull)
    return f


KINDS = "custom_jvp", "custom_vjp"
matmul = lambda w, x: x @ w


@bits
@cases("kind", KINDS, ["custom_vjp"])
def test_a_derivative_of_its_own_is_used_where_no_site_is_inside(kind):
    scaled = with_derivative(kind, lambda w, x: x * w[:1])
    program = lambda dot, p, x: dot(scaled(p["w"], x), p["w"])
    q = quantize_fn(functools.partial(program, jnp.matmul), RULES)
    same(*values_and_gradients(q, functools.partial(program, site)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_site_in_a_function_with_a_derivative_of_its_own_needs_a_word(kind):
    f = lambda p, x: with_derivative(kind, matmul)(p["w"], x)
    with pytest.raises(ValueError, match=r"'w'.*derivative of its own.*custom=\"keep\".*custom=\"inline\""):
        quantize_fn(f, RULES).plan(PARAMS, X)


@pytest.mark.slow
@bits
@cases("kind", KINDS, ["custom_jvp"])
def test_a_derivative_of_its_own_is_kept_or_inlined_as_the_rule_says(kind):
    f = lambda p, x: with_derivative(kind, matmul)(p["w"], x)
    keep, inline = (quantize_fn(f, [Rule("**", weight_spec(8), ACTIVATION, custom=c)]) for c in ("keep", "inline"))
    functions = f, quantize_fn(f, [("w", None)]), keep, inline, lambda p, x: site(x, p["w"])
    in_float, without, kept, inlined, wanted = values_and_gradients(*functions)
    same(without, in_float)
    assert_same_bits(kept[0], exactly(X, PARAMS["w"]))
    assert_same_bits(kept[1][0]["w"], np.zeros((6, 6), np.float32))
    assert_same_bits(kept[1][1], in_float[1][1])
    same(inlined, wanted)


@pytest.mark.slow
def test_a_kept_derivative_takes_integers_and_keys_as_they_are():
    @jax.custom_jvp
    def f(w, x, n, key):
        return (x + jax.random.normal(key, x.shape)) @ w * n.astype(jnp.float32)

    f.defjvp(lambda primals, tangents: (f(*primals), 5 * tangents[1]))
    q = quantize_fn(lambda p, *args: f(p["w"], *args), [Rule("**", weight_spec(8), ACTIVATION, custom="keep")])
    key = jax.random.key(0)
    value, to_x = jax.value_and_grad(lambda x: q(PARAMS, x, jnp.int32(2), key).sum())(X)
    want = exactly(X + np.asarray(jax.random.normal(key, X.shape)), PARAMS["w"])
    np.testing.assert_allclose(value, 2 * want.sum(), rtol=1e-5)
    assert_same_bits(to_x, np.full((4, 6), 5, np.float32))


def test_two_rules_inside_one_derivative_must_agree():
    rules = [Rule("**", weight_spec(8), custom=c, scope=scope) for c, scope in (("keep", "a"), ("inline", None))]

    def scoped(p, x):
        def body(ws, x):
            with jax.named_scope("a"):
                x = x @ ws[0]
            return x @ ws[1]

        f = jax.custom_jvp(body)
        f.defjvp(lambda primals, tangents: (f(*primals), tangents[1]))
        return f(p["ws"], x)

    with pytest.raises(ValueError, match=r"inline.*keep"):
        quantize_fn(scoped, rules).plan(PARAMS, X)


# Several devices


def mesh(kind="Auto"):
    return jax.make_mesh((4,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))


@pytest.mark.slow
def test_shardings_of_a_jit_inside_are_kept():
    devices = mesh()
    rows, columns = NamedSharding(devices, P("data")), NamedSharding(devices, P(None, "data"))
    whole = NamedSharding(devices, P())
    w, x = normal(5, 6, 8), normal(6, 8, 6)
    f = jax.jit(lambda w, x: relu(x @ w), in_shardings=(whole, rows), out_shardings=columns)
    y = quantize_fn(lambda p, x: f(p["w"], x), RULES)({"w": w}, x)
    assert y.sharding.is_equivalent_to(columns, 2)
    assert_same_bits(y, np.maximum(exactly(x, w), 0))


@bits
@pytest.mark.slow
def test_in_a_shard_map_the_range_of_an_activation_is_that_of_the_shard():
    devices = mesh()
    program = lambda dot, w, x: relu(dot(x, w))
    shard = lambda dot: jax.shard_map(
        functools.partial(program, dot), mesh=devices, in_specs=(P(), P("data")), out_specs=P("data")
    )
    f = lambda p, x: shard(jnp.matmul)(p["w"], x)
    x = normal(7, 8, 6)
    value, (to_params, to_x) = value_and_gradients(quantize_fn(f, RULES), x=x, g=(g := normal(8, 8, 6)))
    shards = [value_and_gradients(functools.partial(one, site), x=x[i : i + 2], g=g[i : i + 2]) for i in range(0, 8, 2)]
    assert_same_bits(value, np.concatenate([y for y, _ in shards]))
    assert_same_bits(to_x, np.concatenate([g for _, (_, g) in shards]))
    np.testing.assert_allclose(to_params["w"], sum(g["w"] for _, (g, _) in shards), rtol=1e-5, atol=1e-6)


# What cannot be entered


def pallas(p, x):
    pl = pytest.importorskip("jax.experimental.pallas")

    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4, 6), jnp.float32), interpret=True)(x, p["w"])


RAGGED_SUM = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
CLOSED = {
    "pallas_call": pallas,
    "ragged_dot": lambda p, x: lax.ragged_dot_general(x.T, p["w"], np.array([4], np.int32), RAGGED_SUM),
    "custom_linear_solve": lambda p, x: lax.custom_linear_solve(lambda v: p["w"] @ v, x.T, lambda mv, v: v),
}


@pytest.mark.parametrize("name", CLOSED)
def test_a_parameter_in_an_op_that_cannot_be_entered_is_refused_if_a_rule_wants_it(name):
    with pytest.raises(ValueError, match=rf"At 'w', chosen by the rule 'w\*'.*{name}.*cannot replace anything"):
        quantize_fn(CLOSED[name], [Rule("w*", weight_spec(8))]).plan(PARAMS, X)


@bits
@cases("name", CLOSED, ["ragged_dot"])
def test_an_op_that_cannot_be_entered_stays_as_it_is_beside_a_site(name):
    f = lambda p, x: (x @ p["ws"][0], CLOSED[name](p, x))
    rules = (("w", None), ("ws", weight_spec(8))), (("ws", weight_spec(8)),)

    def by_hand(p, x):
        ws = quantize(p["ws"], weight_spec(8, channel_axis=(0, 2)))
        return x @ ws.values[0].astype(np.float32) * ws.scale[0], CLOSED[name](p | {"ws": dequantize(ws)}, x)

    functions = by_hand, *(quantize_fn(f, of) for of in rules)
    want, *results = jax.jit(lambda p, x: [function(p, x) for function in functions])(PARAMS, X)
    for got in results:
        same(got, want)


def test_a_callback_beside_a_site_is_called():
    f = lambda p, x: jax.pure_callback(lambda x: x + np.float32(1), x, x) @ p["w"]
    assert_same_bits(quantize_fn(f, RULES)(PARAMS, X), exactly(X + 1, PARAMS["w"]))


def two_layers(p, x):
    return (relu(x @ p["ws"][0]) @ p["w"]).sum()


@pytest.mark.parametrize("pattern", ["**", "w", "ws"])
def test_a_function_that_differentiates_is_refused_unless_a_rule_is_for_its_gradient(pattern):
    rules = [Rule(pattern, weight_spec(8), ACTIVATION)]
    with pytest.raises(ValueError, match=r"differentiates.*jax\.grad\(quantize_fn"):
        quantize_fn(jax.grad(two_layers), rules).plan(PARAMS, X)
    plan = quantize_fn(jax.grad(two_layers), [*rules, Rule("**", None, kind="gradient")]).plan(PARAMS, X)
    assert {s.kind for s in plan if s.spec} == {"weight"}
    assert any(s.kind == "gradient" for s in plan)


def test_a_gradient_of_one_layer_is_refused_too():
    """No parameter is in its backward pass; what comes out would be the gradient of the float function."""
    with pytest.raises(ValueError, match="differentiates"):
        quantize_fn(jax.grad(lambda p, x: (x @ p["w"]).sum()), RULES).plan({"w": PARAMS["w"]}, X)


# Dtypes


@bits
@cases("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(dtype):
    params, x, g = jax.tree.map(lambda v: v.astype(jnp.dtype(dtype)), ({"w": PARAMS["w"]}, X, G))
    functions = quantize_fn(lambda p, x: x @ p["w"], RULES), lambda p, x: in_float(x, p["w"])
    (value, gradients), (_, wanted) = values_and_gradients(*functions, params=params, x=x, g=g)
    assert_same_bits(value, exactly(x, params["w"]).astype(dtype))
    same(gradients, wanted)


def test_float64_keeps_its_dtype():
    with x64():
        params, x = jax.tree.map(lambda v: np.float64(v) * 1.1, (PARAMS, X))
        q = quantize_fn(lambda p, x: x @ p["w"], RULES)
        assert_same_bits(q(params, x), np.float64(exactly(x, params["w"])))
        gradients = jax.eval_shape(lambda *args: jax.vjp(q, *args)[1](x), params, x)
        assert {v.dtype for v in jax.tree.leaves(gradients)} == {np.dtype("float64")}


def noises(f, params, rule):
    """What stochastic rounding makes of one array, wherever f puts it to a dot with the identity: different arrays."""
    ys = quantize_fn(f, [rule])(params, X, key=jax.random.key(3))
    return len({np.asarray(y).tobytes() for y in ys})


NOISY_INPUT = Rule("w", weight_spec(8), QuantSpec(bits=4, rounding="stochastic"))


def test_parts_of_one_operand_are_rounded_with_noise_of_their_own():
    f = lambda p, x: jnp.split(x @ jnp.concatenate([p["q"], p["k"], p["v"]], 1), 3, 1)
    params = dict.fromkeys("qkv", X.T @ X)
    assert noises(f, params, ("*", weight_spec(4, rounding="stochastic"))) == 3


def test_the_turns_of_a_loop_are_rounded_with_noise_of_their_own():
    def f(p, x):
        dot = lambda i: x @ p["w"] + 0 * i
        _, of_scan = lax.scan(lambda carry, i: (carry, dot(i)), 0.0, np.arange(3, dtype=np.float32))
        put = lambda state: (state[0] + 1, state[1].at[state[0]].set(dot(state[0])))
        _, of_while = lax.while_loop(lambda state: state[0] < 3, put, (0, jnp.zeros((3, *x.shape))))
        return *of_scan, *of_while, dot(0)

    assert noises(f, {"w": np.eye(X.shape[-1], dtype=np.float32)}, NOISY_INPUT) == 7
