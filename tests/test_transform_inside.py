# SPDX-License-Identifier: Apache-2.0
"""quantize_fn on functions that hold every construct of JAX: the bits and gradients of the program without it."""

import functools
import re

import hand_written as by_hand
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits, x64
from hand_written import Grid
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import cases

from jaxquant import (
    PerBlock,
    PerChannel,
    QuantSpec,
    Rule,
    activation_spec,
    dot_general,
    fake_quant,
    quant_point,
    quantize,
    quantize_fn,
    weight_spec,
)
from jaxquant._jaxpr._program import opened, programs

bits = pytest.mark.bits  # of those that compare sums of floats: what is in integers has its bits however it is compiled

ACTIVATION, WEIGHT = activation_spec(8), weight_spec(8, channel_axis=-1)
RULES = [Rule("**", weight_spec(8), ACTIVATION)]
MATMUL = (((1,), (0,)), ((), ()))
POLICIES = jax.checkpoint_policies


@jax.custom_vjp
def site(x, w):
    """A quantized matmul as the docstring of `quantize_fn` has it."""
    return dot_general(quantize(x, ACTIVATION), quantize(w, WEIGHT), MATMUL)


def in_float(x, w):
    return fake_quant(x, ACTIVATION) @ fake_quant(w, WEIGHT)


site.defvjp(lambda x, w: (site(x, w), (x, w)), lambda operands, g: jax.vjp(in_float, *operands)[1](g))


WHOLE, CHANNEL = Grid(affine=True, whole=True), Grid()


def exactly(x, w, grids=(WHOLE, CHANNEL)):
    """The value of a site, of NumPy alone."""
    return by_hand.exact("bi,io->bo", grids, x, w)[0]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, G = normal(0, 4, 6), normal(1, 4, 6)
PARAMS = {"w": normal(2, 6, 6), "ws": normal(3, 2, 6, 6)}
relu = functools.partial(jnp.maximum, 0.0)  # not jax.nn.relu, which has a derivative of its own


def values_and_gradients(*functions, params=PARAMS, x=X, g=G):
    """Of all in one program, which computes what they share once."""

    @jax.jit
    def each(params, x, g):
        return [(y, vjp(g)) for y, vjp in (jax.vjp(f, params, x) for f in functions)]

    return each(params, x, g)


def value_and_gradients(f, **arguments):
    return values_and_gradients(f, **arguments)[0]


def same(got, want):
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert_same_bits(one, other, jax.tree_util.keystr(path))


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
    (checkpoint,) = [parameters(e) for e in equations(program) if "prevent_cse" in parameters(e)]
    saving = lambda policy: None if policy is POLICIES.nothing_saveable else policy  # None saves nothing
    assert (saving(checkpoint["policy"]), checkpoint["prevent_cse"]) == (saving(policy), False)
    program, _ = opened(jax.make_jaxpr(jax.grad(lambda p: q(p, X).sum()))(PARAMS))
    in_integers = [
        e for e in equations(program) if e.primitive.name == "dot_general" and e.outvars[0].aval.dtype == "i4"
    ]
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


# What an operand is made of

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
        ("reshape, splitting", PerChannel(None), r"'flat'.*no granularity of the parameter says it"),
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
    by_hand = lambda p, x: f(p | {"ws": fake_quant(p["ws"], weight_spec(8, channel_axis=(0, 2)))}, x)
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
@cases("dtype", ["bfloat16", "float16"], ["bfloat16"])
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
