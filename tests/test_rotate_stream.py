# SPDX-License-Identifier: Apache-2.0
"""Rotations of channels that are folded into parameters: the function stays, large channels are spread over all."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inputs import dead
from jax import lax
from lanes import cases

from jaxquant import Rule, activation_spec, quantize_fn, solve, weight_spec

F, K = np.float32, 16
W4, A4 = weight_spec(4), activation_spec(4)
RULES = [Rule("**", W4, A4, optional=True)]


def normal(seed, *shape):
    scale = shape[-2] ** -0.5 if len(shape) > 1 else 1
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(F) * F(scale))


def gain(seed, *shape):
    return jax.device_put(1 + F(0.3) * np.random.default_rng(seed).normal(size=shape).astype(F))


def over(v, x):
    return jnp.broadcast_to(v, x.shape)


def normed(x, g):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + x.dtype.type(1e-6)) * over(g, x)


def heads(y, n=4):
    return y.reshape(*y.shape[:-1], n, -1)


def attended(q, k, v):
    scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    y = jnp.einsum("bhts,bshd->bthd", scores, v)
    return y.reshape(*y.shape[:2], -1)


def turned(x):
    """Rotary positions, which leave the heads of queries and keys no other basis."""
    a, b = jnp.split(x, 2, -1)
    angle = jnp.arange(x.shape[1], dtype=x.dtype)[None, :, None, None] * jnp.ones((1, 1, 1, a.shape[-1]), x.dtype)
    c, s = over(jnp.cos(angle), a), over(jnp.sin(angle), a)
    return jnp.concatenate([a * c - b * s, a * s + b * c], -1)


def gated(x, p):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def layer(x, p):
    """Two heads of keys and values for four of queries, and a gated layer."""
    h = normed(x, p["norm1"])
    k, v = (jnp.repeat(heads(h @ p[name], 2), 2, axis=2) for name in "kv")
    x = x + attended(turned(heads(h @ p["q"])), turned(k), v) @ p["out"]
    return x + gated(normed(x, p["norm2"]), p), None


def embedded(p, tokens):
    x = p["embed"][tokens]
    return x + over(p["positions"][: x.shape[1]], x)


def in_a_scan(p, tokens):
    x, _ = lax.scan(layer, embedded(p, tokens), p["layers"])
    return normed(x, p["norm"]) @ p["head"]


def in_a_loop(p, tokens):
    x = embedded(p, tokens)
    for i in range(2):
        x, _ = layer(x, p[f"layer{i}"])
    return normed(x, p["norm"]) @ p["head"]


def of_layers(*lead, width=K):
    shapes = {
        "q": (width, 16), "k": (width, 8), "v": (width, 8), "out": (16, width), "gate": (width, 24), "up": (width, 24),
        "down": (24, width),
    }  # fmt: skip
    weights = {name: normal(i, *lead, *shape) for i, (name, shape) in enumerate(shapes.items())}
    return weights | {name: gain(ord(name[-1]), *lead, width) for name in ("norm1", "norm2")}


def around(width=K):
    return {
        "embed": normal(11, 20, width), "positions": normal(12, 8, width), "norm": dead(gain(13, width), 2),
        "head": normal(14, width, 20),
    }  # fmt: skip


TOKENS = jax.device_put(np.random.default_rng(0).integers(0, 20, (4, 6)))
SCANNED = around() | {"layers": of_layers(2)}


def tied(p, tokens):
    """The embedding is also the head."""
    x = p["embed"][tokens]
    return normed(x + gated(normed(x, p["norm1"]), p), p["norm"]) @ p["embed"].T


TIED = {"embed": normal(1, 20, K), "norm1": gain(2, K), "norm": np.full(K, 1.5, np.float32), **of_layers()}
TIED = {name: TIED[name] for name in ("embed", "norm", "norm1", "gate", "up", "down")}


def joined(p, tokens):
    """Queries, keys and values in one weight, norms in one parameter, and no rotary positions."""

    def layer(x, p):
        qkv = normed(x, p["norms"][0]) @ p["qkv"]
        x = x + attended(*map(heads, jnp.split(qkv, 3, -1))) @ p["out"]
        return x + jax.nn.gelu(normed(x, p["norms"][1]) @ p["up"]) @ p["down"], None

    x, _ = lax.scan(layer, p["embed"][tokens], p["layers"])
    return x @ p["head"]


JOINED = around() | {
    "layers": {
        "norms": gain(1, 2, 2, K), "qkv": normal(2, 2, K, 3 * K), "out": normal(3, 2, K, K), "up": normal(4, 2, K, 24),
        "down": normal(5, 2, 24, K),
    }
}  # fmt: skip
SIZES = jnp.int32([10, 8, 6])


def experts(p, tokens):
    x = p["embed"][tokens].reshape(-1, K)
    wide = over(lax.rsqrt(over(jnp.square(x).mean(-1, keepdims=True), x)), x) * over(p["norm"], x)  # as flax has it
    h = jax.nn.relu(lax.ragged_dot(x * wide, p["up"], SIZES))
    return (x + lax.ragged_dot(h, p["down"], SIZES)) @ p["head"]


EXPERTS = around() | {"up": normal(1, 3, K, 24), "down": normal(2, 3, 24, K)}


def moved(p, tokens):
    """A stream in other orders, in a checkpoint, stacked, cut along the time, and beside zeros."""

    @jax.checkpoint
    def turn(x, w):
        h = (-x).transpose(2, 0, 1)
        x = x + jnp.tanh(jnp.einsum("kbt,kn->btn", h, w["up"])) @ w["down"] / 2
        a, b = jnp.unstack(jnp.stack([x, x / 2], 1), axis=1)
        x = a + jnp.pad(b[:, 1:], ((0, 0), (1, 0), (0, 0))) + jnp.tile(x[:, :1], (1, 6, 1))
        x = jnp.where((jnp.arange(6) < 4)[None, :, None], x, 0)
        return x, jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, 1:]], 1)

    x, stacked = lax.scan(turn, p["embed"][tokens], {"up": p["up"], "down": p["down"]})
    return (stacked.sum(0) + x) @ p["head"]


def replaced(p, tokens):
    """What a turn of a scan gives is made of what it takes by a weight alone."""
    x, _ = lax.scan(lambda x, w: (normed(x, p["norm"]) @ w, None), p["embed"][tokens], p["w"])
    return x @ p["head"]


# The function, its params, and how many inputs of each weight are rotated together.
OF_LAYERS = {"q": 16, "k": 16, "v": 16, "out": 4, "gate": 16, "up": 16, "down": 1}
MODELS = {
    "layers in a scan": (in_a_scan, SCANNED, {**{f"layers/{n}": k for n, k in OF_LAYERS.items()}, "head": 16}),
    "layers in a loop": (
        in_a_loop, around() | {f"layer{i}": of_layers() for i in range(2)},
        {**{f"layer{i}/{n}": k for i in range(2) for n, k in OF_LAYERS.items()}, "head": 16},
    ),
    "blocks of 4": (
        in_a_scan, around(12) | {"layers": of_layers(2, width=12)},
        {**{f"layers/{n}": min(k, 4) for n, k in OF_LAYERS.items()}, "head": 4},
    ),
    "a tied embedding with one gain for all": (tied, TIED, {"gate": 16, "up": 16, "down": 1, "embed": 16}),
    "q, k and v in one": (
        joined, JOINED, {"layers/qkv": 16, "layers/out": 4, "layers/up": 16, "layers/down": 1, "head": 16},
    ),
    "experts": (experts, EXPERTS, {"up": 16, "down": 1, "head": 16}),
    "a weight for each turn alone": (replaced, around() | {"w": normal(1, 2, K, K)}, {"w": 16, "head": 16}),
    "in other orders": (
        moved, around() | {"up": normal(1, 2, K, 24), "down": normal(2, 2, 24, K)}, {"up": 16, "down": 1, "head": 16},
    ),
}  # fmt: skip


def named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def changed(before, after):
    before, after = named(before), named(after)
    return {path for path in before if not np.array_equal(before[path], after[path])}


def rotated(f, params, *args, rules=RULES, **kwargs):
    """The params, and {path: (inputs that are rotated together, why not)}."""
    said = {}
    new = solve.rotate(params, quantize_fn(f, rules), *args, progress=lambda path, *v: said.update({path: v}), **kwargs)
    return new, said


def same_function(f, params, new, *args):
    f = jax.jit(f)
    want, got = f(params, *args), f(new, *args)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))


def sylvester(n):
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / math.sqrt(n)


@cases("name", list(MODELS), ["layers in a scan"])
def test_the_function_stays(name):
    f, params, together = MODELS[name]
    new, said = rotated(f, params, TOKENS)
    assert {path: n for path, (n, _) in said.items()} == together
    assert all((why is None) == (n > 1) for n, why in said.values())
    assert {"embed", *(path for path, n in together.items() if n > 1)} <= changed(params, new)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, params)
    same_function(f, params, new, TOKENS)


def test_the_parameters():
    """As NumPy has them: rows of gains, then a rotation, on the axes of stacked parameters."""
    new, old = named(rotated(in_a_scan, SCANNED, TOKENS)[0]), named(SCANNED)
    h, of_head = sylvester(K), np.kron(np.eye(2), sylvester(4))
    g = old["layers/norm1"][:, :, None].astype(np.float64)
    np.testing.assert_allclose(new["embed"], old["embed"] @ h, atol=1e-6)
    np.testing.assert_allclose(new["positions"], old["positions"] @ h, atol=1e-6)
    np.testing.assert_allclose(new["layers/q"], h @ (g * old["layers/q"]), atol=1e-6)
    np.testing.assert_allclose(new["layers/v"], h @ (g * old["layers/v"]) @ of_head, atol=1e-6)
    np.testing.assert_allclose(
        new["layers/out"], np.kron(np.eye(4), sylvester(4)) @ old["layers/out"].astype(np.float64) @ h, atol=1e-6
    )
    np.testing.assert_allclose(new["head"], h @ (old["norm"][:, None] * old["head"].astype(np.float64)), atol=1e-6)
    for path in ("layers/norm1", "layers/norm2", "norm"):
        assert (new[path] == 1).all()


def linen_model():
    nn = pytest.importorskip("flax.linen", reason="of the extra `frameworks`")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(20, K)(tokens)
            for _ in range(2):
                x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.RMSNorm()(x))
                h = nn.RMSNorm()(x)
                x = x + nn.Dense(K)(nn.silu(nn.Dense(24)(h)) * nn.Dense(24)(h))
            return nn.Dense(20)(nn.RMSNorm()(x))

    model = Model()
    return model.apply, model.init(jax.random.key(0), TOKENS)


def nnx_model():
    nnx = pytest.importorskip("flax.nnx", reason="of the extra `frameworks`")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.head = nnx.Embed(20, K, rngs=rngs), nnx.Linear(K, 20, rngs=rngs)
            self.norms = nnx.List([nnx.RMSNorm(K, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(4, K, decode=False, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            return self.head(self.norms[1](x + self.attention(self.norms[0](x))))

    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)
    return lambda params, tokens: nnx.merge(graph, params, rest)(tokens), params


@pytest.mark.slow
@pytest.mark.parametrize("model", [linen_model, nnx_model])
def test_of_flax(model):
    f, params = model()
    params = jax.tree.map(lambda v: v + 0.1 * jax.random.normal(jax.random.key(v.size), v.shape, v.dtype), params)
    with jax.numpy_rank_promotion("allow"):
        new, said = rotated(f, params, TOKENS)
        same_function(f, params, new, TOKENS)
    attention = ("query", "key", "value", "out")
    assert {said[path][0] for path in said for name in attention[:3] if name in path} == {K}
    assert {said[path][0] for path in said if "out" in path} == {4}
    assert all(n > 1 or "logistic" in why for n, why in said.values())


# What cannot be rotated


def block(x, p):
    return x + jnp.tanh(normed(x, p["norm1"]) @ p["up"]) @ p["down"]


def plain(p, tokens, after=lambda x, p: x):
    return after(block(p["embed"][tokens], p), p) @ p["head"]


PLAIN = around() | {name: of_layers()[name] for name in ("norm1", "up", "down")}


def layer_normed(p, tokens):
    x = p["embed"][tokens]
    return (x - x.mean(-1, keepdims=True)) @ p["head"]


def after(f):
    return lambda p, tokens: plain(p, tokens, f)


def turn_of(x, _):
    return x / 2, x


def after_cond(p, tokens):
    y = block(p["embed"][tokens], p)
    return lax.cond(y[0, 0, 0] > 0, lambda: y, lambda: -y) @ p["head"]


def sharded(p, tokens):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("i")
    x = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec, out_specs=spec)(p["embed"][tokens])
    return x @ p["head"]


REFUSED = {
    "a result": (lambda p, t: (plain(p, t), p["embed"][t]), "are also in the result of the function"),
    "an argument": (
        lambda p, t: (p["embed"][t] + over(t.astype(F)[..., None], p["embed"][t])) @ p["head"],
        "also go into 'add', beside what is the same for all of them",
    ),
    "a start that is an argument": (
        lambda p, x: lax.scan(lambda x, _: (block(x, p), None), x, None, length=2)[0] @ p["head"],
        "are also in an argument of the function",
    ),
    "a closed array": (
        lambda p, t: (p["embed"][t] + SCANNED["embed"][t]) @ p["head"],
        "are also in an array that the function closes over",
    ),
    "a gelu": (after(lambda x, p: jax.nn.gelu(x)), "also go into 'integer_pow', which passes no rotation"),
    "a product": (after(lambda x, p: x * block(x, p)), "also go into 'mul', with others"),
    "a quotient": (after(lambda x, p: x / (1 + x * x)), "also go into 'add', beside what is the same for all of them"),
    "a sum with one number": (after(lambda x, p: x + 1), "also go into 'add', beside what is the same for all of them"),
    "a sum with squares": (after(lambda x, p: x + x * x), "also go into 'add', beside their squares"),
    "a LayerNorm": (layer_normed, "also go into 'reduce_sum', which sums them, as the mean of a LayerNorm does"),
    "a part": (after(lambda x, p: x + jnp.pad(x[..., 1:], ((0, 0), (0, 0), (1, 0)))), "also go into 'slice', which"),
    "a mask": (
        after(lambda x, p: jnp.where(x > 0, x, 0)), "also go into 'gt', which passes no rotation",
    ),
    "an order": (after(lambda x, p: x + x[..., ::-1]), "also go into 'rev', which takes them apart"),
    "a row of few": (after(lambda x, p: x.at[:, 0].set(0)), "come out of 'scatter', which passes no rotation"),
    "integers": (after(lambda x, p: x.astype(jnp.int32).astype(F)), "come out of 'convert_element_type', to int32"),
    "a sum by a dot": (
        after(lambda x, p: x + x @ jnp.ones((K, K))),
        "also go into 'dot_general', with what is the same for all of them",
    ),
    "one at a time": (
        after(lambda x, p: jnp.einsum("btk,bk->btk", x, x[:, 0])),
        "also go into 'dot_general', which takes one at a time",
    ),
    "some of them": (
        after(lambda x, p: jnp.where((jnp.arange(K) < 4)[None, None], x, 0)), "with a condition for each of them",
    ),
    "a padding": (
        after(lambda x, p: jnp.pad(x, ((0, 0), (0, 1), (0, 0)), constant_values=1.0)),
        "in '_pad', beside what is the same for all of them",
    ),
    "a row that is not there": (
        lambda p, t: p["embed"].at[t].get(mode="fill", fill_value=1.0) @ p["head"],
        "come out of 'gather', which passes no rotation",
    ),
    "rows that are picked": (
        lambda p, t: plain(p, t) + p["head"][t % K], "also go into 'gather', which takes them apart",
    ),
    "what a scan stacks": (
        lambda p, t: jnp.einsum("lbt,lv->btv", lax.scan(turn_of, p["embed"][t][..., 0], None, length=K)[1], p["head"]),
        "are stacked by a scan",
    ),
    "rows of experts": (
        lambda p, t: jnp.einsum(
            "mn,mv->nv",
            lax.ragged_dot(p["embed"][:16], jnp.stack([p["up"], 2 * p["up"]]), jnp.int32([10, 6])),
            p["head"],
        ),
        "also go into 'ragged_dot_general', which takes them apart",
    ),
    "a reshape": (
        after(lambda x, p: x.reshape(4, K, 6).transpose(0, 2, 1)), "come out of 'reshape', which groups them in other",
    ),
    "other groups": (
        after(lambda x, p: x + jnp.concatenate([x, x], -1)[..., 8:24]), "also go into 'concatenate', which takes",
    ),
    "turns": (
        after(lambda x, p: x + over(lax.scan(lambda c, v: (c + v, None), jnp.zeros((6, 4)), x.T)[0].T[..., None], x)),
        "are taken turn by turn by a scan",
    ),
    "a gain of a residual": (
        after(lambda x, p: x + normed(x, p["norm"])),
        "are multiplied by 'norm', which no weights can take up: what would be divided or multiplied also goes into "
        "'add', beside",
    ),
    "a cond": (after_cond, "come out of 'cond', which passes no rotation"),
    "a while loop": (
        after(lambda x, p: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + jnp.abs(x), x)),
        "come out of 'while', which passes no rotation",
    ),
    "a weight in a cond": (
        lambda p, t: lax.cond(t[0, 0] > 0, lambda: p["embed"][t] @ p["head"], lambda: jnp.zeros((4, 6, 20))),
        "are inside a cond, a while loop or a shard_map",
    ),
    "a shard_map": (sharded, "come out of 'shard_map', which passes no rotation"),
    "a parameter that is read elsewhere": (
        lambda p, t: plain(p, t) * jnp.tanh(p["embed"]).sum(), "also go into 'tanh', which passes no rotation",
    ),
}  # fmt: skip


@cases("name", list(REFUSED), ["a result", "a start that is an argument", "a product", "a gain of a residual"])
def test_refuses(name):
    f, why = REFUSED[name]
    x = normal(0, 4, 6, K) if name == "a start that is an argument" else TOKENS
    q = quantize_fn(f, [Rule("head", W4, A4)])
    said = []
    new = solve.rotate(PLAIN, q, x, progress=lambda *v: said.append(v))
    assert changed(PLAIN, new) == set()
    ((path, together, reason),) = said
    assert (path, together) == ("head", 1)
    assert why in reason
    with pytest.raises(ValueError, match=r"At 'head': its inputs cannot be rotated: their channels .* Pass unfolded"):
        solve.rotate(PLAIN, q, x, unfolded="error")


def test_refuses_a_tied_embedding_with_gains():
    params = TIED | {"norm": gain(3, K)}
    new, said = rotated(tied, params, TOKENS)
    assert changed(params, new) == set()
    assert said["up"] == (
        1, "are multiplied by 'norm', which no weights can take up: what would be divided or "
        "multiplied also goes into 'mul', with another value that would be divided",
    )  # fmt: skip


def test_refuses_an_odd_width():
    params = around(15) | {"layers": of_layers(2, width=15)}
    new, said = rotated(in_a_scan, params, TOKENS)
    assert {path: why for path, (_, why) in said.items()}["head"] == "are 15, an odd number"
    assert changed(params, new) == {"layers/v", "layers/out"}  # head by head
    same_function(in_a_scan, params, new, TOKENS)


def test_refuses_what_is_integers_already():
    q = quantize_fn(plain, [Rule("up", W4), Rule("head", W4)])
    frozen = q.freeze(PLAIN, TOKENS) | {"head": PLAIN["head"]}
    said = []
    new = solve.rotate(frozen, q, TOKENS, progress=lambda *v: said.append(v))
    assert [why for _, _, why in said] == ["are also in 'up', which is no array of floats"] * 2
    assert changed(frozen, new) == set()


@pytest.mark.slow
def test_a_gain_is_no_weight_that_is_rotated():
    """The gain is folded; what it is contracted with stays as it is, but for the factors."""

    def f(p, tokens):
        x = p["embed"][tokens]
        y = jnp.tanh(x @ p["up"]) @ p["down"]
        return normed(x, p["gain"][:, 0]) @ p["head"] + over(y @ p["gain"], jnp.ones((4, 6, 20)))

    params = PLAIN | {"gain": gain(1, K, 1)}
    new, said = rotated(f, params, TOKENS)
    same_function(f, params, new, TOKENS)
    assert said["gain"] == (1, "also go into 'mul', with others")
    assert said["head"] == said["up"] == (K, None)


def test_refuses_gains_of_turns_that_share_a_weight():
    f = lambda p, t: lax.scan(lambda x, g: (block(x, p | {"norm1": g}), None), p["embed"][t], p["gains"])[0] @ p["head"]
    params = PLAIN | {"gains": gain(1, 2, K)}
    new, said = rotated(f, params, TOKENS)
    assert said["head"] == (
        1, "are multiplied by 'gains', which no weights can take up: several of its elements meet one row",
    )  # fmt: skip
    assert changed(params, new) == set()


# What it is worth


def with_outliers(width=32):
    """Two channels of the stream are 20 times as large, and the weights that take them so much smaller."""
    params = around(width) | {"layers": of_layers(2, width=width)}
    scale = jnp.ones(width).at[jnp.array([3, 17])].set(20.0)
    taken = lambda w: w / over(scale[:, None], w)
    layers = {name: taken(w) if name in ("q", "k", "v", "gate", "up") else w for name, w in params["layers"].items()}
    layers |= {name: layers[name] * over(scale, layers[name]) for name in ("out", "down")}
    made = {name: params[name] * over(scale, params[name]) for name in ("embed", "positions")}
    return params | made | {"layers": layers, "head": taken(params["head"])}


@pytest.mark.slow
def test_outliers_are_spread():
    """The ranges of the inputs of each weight fall, and so does the error of 4 bits."""
    params = with_outliers()
    q = quantize_fn(in_a_scan, RULES)
    new = solve.rotate(params, q, TOKENS)
    same_function(in_a_scan, params, new, TOKENS)
    before, after = q.observe(params, TOKENS), q.observe(new, TOKENS)
    for name in ("layers/k:input", "layers/gate:input", "head:input"):
        widths = [np.asarray(of[name].x_max - of[name].x_min) for of in (before, after)]
        assert (widths[1] < 0.6 * widths[0]).all()
    want = np.asarray(jax.jit(in_a_scan)(params, TOKENS))
    error = lambda p: np.square(q(p, TOKENS) - want).sum() / np.square(want).sum()
    assert error(new) < 0.7 * error(params)


@pytest.mark.slow
def test_then_gptq():
    q = quantize_fn(in_a_scan, [Rule("**", weight_spec(3), optional=True)])
    new = solve.rotate(SCANNED, q, TOKENS)
    grams = q.observe(new, TOKENS, gram=True)
    qparams = solve.ranges(new, q, grams, TOKENS)
    solved = solve.gptq(new, q, grams, TOKENS, qparams=qparams)
    want = in_a_scan(SCANNED, TOKENS)
    error = lambda p, **of: float(jnp.square(q(p, TOKENS, **of) - want).sum())
    assert error(solved, qparams=qparams) < error(SCANNED)


@pytest.mark.slow
def test_one_rounding_of_bfloat16():
    """The bits of the float32 parameters' rotation, rounded."""
    half = jax.tree.map(lambda v: v.astype(jnp.bfloat16), SCANNED)
    q = quantize_fn(in_a_scan, RULES)
    got = solve.rotate(half, q, TOKENS)
    want = solve.rotate(jax.tree.map(lambda v: np.asarray(v, F), half), q, TOKENS)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), got, want)
    assert {v.dtype for v in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_under_jit():
    q = quantize_fn(in_a_scan, RULES)
    want = solve.rotate(SCANNED, q, TOKENS)
    got = jax.jit(lambda params: solve.rotate(params, q, TOKENS))(SCANNED)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


# Bad input


def test_bad_input():
    q = quantize_fn(plain, [Rule("head", W4)])
    with pytest.raises(TypeError, match="`q` must be what quantize_fn returned, got function"):
        solve.rotate(PLAIN, plain, TOKENS)
    with pytest.raises(ValueError, match="`unfolded` must be one of leave, error, got 'raise'"):
        solve.rotate(PLAIN, q, TOKENS, unfolded="raise")
