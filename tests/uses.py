# SPDX-License-Identifier: Apache-2.0
"""The ways in which functions use parameters, each a small function, and all of them as one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxquant import PerToken, QuantSpec, Rule, activation_spec, weight_spec

W, A = weight_spec(8), activation_spec(8)


def normal(seed, *shape):
    return jax.device_put((np.random.default_rng(seed).normal(size=shape) * 0.3).astype(np.float32))


X = normal(0, 6, 8)
TOKENS, POINT = map(jax.device_put, (np.int32([[0, 3, 1], [7, 2, 2]]), np.int32([2, 0, 3, 1, 1, 2])))


class Use(NamedTuple):
    f: Callable
    params: dict[str, Any]
    rules: tuple
    is_equal_when_dynamic: bool = True


def use(f, *rules, **params):
    return Use(f, params, rules or (Rule("*", W, A),))


@jax.custom_vjp
def dense_of_an_author(w, x):
    return jnp.tanh(x @ w)


dense_of_an_author.defvjp(lambda w, x: (dense_of_an_author(w, x), (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))


@jax.custom_vjp
def scaled_gradient(w):
    return w


scaled_gradient.defvjp(lambda w: (w, None), lambda _, g: (g * 0.5,))


def rnn(p, x):
    def step(h, x):
        h = jnp.tanh(x @ p["in"] + h @ p["rec"])
        return h, h

    return lax.scan(step, jnp.zeros((3, 16)), x.reshape(2, 3, 8))[1]


def attention(p, x):
    q, k, v = jnp.einsum("td,dshk->sthk", x, p["qkv"])
    scores = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k))
    return jnp.einsum("thk,hkd->td", jnp.einsum("hts,shk->thk", scores, v), p["out"])


def decoder(p, x):
    layer = lambda x, p: (x + jnp.tanh(attention(p, x) @ p["up"].T) @ p["down"].reshape(16, 8), None)
    return lax.scan(jax.checkpoint(layer), x, p)[0]


def perceptrons(p, x):
    layer = lambda x, p: (x + jnp.tanh(x @ p["up"].T) @ p["down"].reshape(16, 8), None)
    return lax.scan(jax.checkpoint(layer), x, p)[0]


def passed_on(p, x):
    return lax.fori_loop(0, 3, lambda i, c: (c[0], jnp.tanh(c[1] @ c[0])), (p["w"], x))[1]


def while_large(p, x):
    small = lambda c: (c[0] < 3) & (jnp.sum(c[1] @ p["v"]) < 1e9)
    return lax.while_loop(small, lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["w"])), (0, x))[1]


def branches(p, x):
    return lax.cond(x[0, 0] > 0, lambda x: x @ p["a"], lambda x: jnp.tanh(x) @ p["b"] @ p["a"], x)


def one_of_two(p, x):
    return x @ lax.switch(jnp.argmax(x[0]) % 2, [lambda: p["w"][0], lambda: p["w"][1]])


def tied(p, x):
    h = p["e"][TOKENS] * 2
    return h @ p["e"].T + jnp.sum(p["e"] ** 2)


def experts(p, x):
    return jnp.einsum("bd,bdf->bf", x, p["w"][POINT])


EVERYWHERE = Rule("*", W, A, everywhere=True)
USES = {
    "plain": use(lambda p, x: jax.nn.relu(x @ p["v"]) @ p["w"], v=normal(1, 8, 24), w=normal(2, 24, 5)),
    "sliced": use(lambda p, x: (x @ p["w"][:, :8]) * (x @ p["w"][:, 8:16]) + x @ p["w"][:, 16:], w=normal(1, 8, 24)),
    "contracted and sliced": use(lambda p, x: x[:, :3] @ p["w"][:3] + x[:, 3:] @ p["w"][3:], w=normal(1, 8, 24)),
    "one value in several ops": use(
        lambda p, x: (x @ p["q"]) * (x @ p["k"]) * (x @ p["v"]), **{c: normal(i, 8, 8) for i, c in enumerate("qkv")}
    ),
    "tied per tensor": use(
        lambda p, x: jax.nn.relu(x @ p["w"]) @ p["w"].T, Rule("w", QuantSpec(), A), w=normal(1, 8, 24)
    ),
    "tied weight-only": use(
        lambda p, x: jax.nn.relu(x @ p["w"]) @ p["w"].T, ("w", weight_spec(4, channel_axis=0)), w=normal(1, 8, 24)
    ),
    "expert": use(lambda p, x: x @ p["w"][jnp.argmax(x[0]) % 4], w=normal(1, 4, 8, 24)),
    "fori_loop": use(lambda p, x: lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ p["w"][i]), x), w=normal(1, 4, 8, 8)),
    "passed on in a loop": use(passed_on, w=normal(1, 8, 8)),
    "while": use(while_large, w=normal(1, 8, 8), v=normal(2, 8, 8)),
    "cond": use(branches, a=normal(1, 8, 8), b=normal(2, 8, 8)),
    "switch of parts": use(one_of_two, w=normal(1, 2, 8, 8)),
    "over time": use(rnn, **{"in": normal(1, 8, 16), "rec": normal(2, 16, 16)}),
    "over layers": use(
        decoder, Rule("*", W, A), Rule("**", activation=A, kind="act_act"), qkv=normal(1, 3, 8, 3, 2, 4),
        out=normal(2, 3, 2, 4, 8), up=normal(3, 3, 16, 8), down=normal(4, 3, 4, 4, 8),
    ),
    "over layers in blocks": use(
        perceptrons, Rule("up", weight_spec(4, block_size=4), A), Rule("down", W), up=normal(3, 3, 16, 8),
        down=normal(4, 3, 4, 4, 8),
    ),
    "bfloat16": use(lambda p, x: x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16), w=normal(1, 8, 24)),
    "bfloat16 weight-only": use(
        lambda p, x: x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16), ("w", W), w=normal(1, 8, 24)
    ),
    "derived": use(
        lambda p, x: x @ (p["w"] + p["a"] @ p["b"]), Rule("w", W, A, kind="derived"), w=normal(1, 8, 24),
        a=normal(2, 8, 2), b=normal(3, 2, 24),
    ),
    "per token": use(
        lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"],
        Rule("*", weight_spec(4, block_size=8), activation_spec(8, granularity=PerToken())),
        w=normal(1, 8, 24), v=normal(2, 24, 8),
    ),
    "activation alone": use(lambda p, x: x @ p["w"], Rule("w", None, A), w=normal(1, 8, 24)),
    "kept": use(
        lambda p, x: dense_of_an_author(p["w"].T, x) @ p["v"], Rule("*", W, A, custom="keep"), w=normal(1, 24, 8),
        v=normal(2, 24, 8),
    ),
    "inlined": use(
        lambda p, x: dense_of_an_author(p["w"].T, x) @ p["v"], Rule("*", W, A, custom="inline"), w=normal(1, 24, 8),
        v=normal(2, 24, 8),
    ),
    "through an identity of an author": use(lambda p, x: x @ scaled_gradient(p["w"]), w=normal(1, 8, 24)),
    "jit and checkpoint and vmap": use(
        lambda p, x: jax.checkpoint(jax.jit(jax.vmap(lambda x: jnp.tanh(p["w"].T @ x))))(x), w=normal(1, 8, 24)
    ),
    "concatenated": use(
        lambda p, x: x @ jnp.concatenate([p["a"], p["b"], p["a"]], 1), a=normal(1, 8, 3), b=normal(2, 8, 5)
    ),
    "convolution": use(
        lambda p, x: lax.conv_general_dilated(
            x.reshape(2, 3, 8, 1), p["w"].astype(x.dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        w=normal(1, 3, 3, 1, 4),
    ),
    "tied embedding": use(tied, EVERYWHERE, e=normal(1, 8, 24)),
    "gathered by data": use(experts, EVERYWHERE, w=normal(1, 4, 8, 5)),
    "index under vmap": use(
        lambda p, x: jax.vmap(lambda i, x: x @ p["w"][i])(POINT, x), EVERYWHERE, w=normal(1, 4, 8, 5)
    ),
}  # fmt: skip


def together(names=tuple(USES)):
    """(f, params, rules) of some as one function, which compiles faster than one for each."""

    def f(params, x):
        return {name: USES[name].f(params[name], x) for name in names}

    def prefixed(name, rule):
        rule = rule if isinstance(rule, Rule) else Rule(*rule)
        fields = {k: getattr(rule, k) for k in ("weight", "activation", "kind", "custom", "everywhere")}
        pattern = rule.pattern if rule.kind == "act_act" else f"{name}/{rule.pattern}"
        return Rule(pattern, fields.pop("weight"), fields.pop("activation"), **fields)

    rules = [prefixed(name, rule) for name in names for rule in USES[name].rules]
    return f, {name: USES[name].params for name in names}, rules
