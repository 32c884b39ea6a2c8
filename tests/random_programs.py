# SPDX-License-Identifier: Apache-2.0
"""Random programs under random rules: what is promised of every function is checked on functions nobody has written.

    python tests/random_programs.py 0 2000

checks the programs of these seeds and prints a table. `check(seed)` raises where a promise is broken.
"""

import collections
import random
import sys
import tempfile

import in_float32  # noqa: F401 - an execution
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jaxquant import (
    PerChannel,
    PerTensor,
    PerToken,
    QuantSpec,
    Rule,
    activation_spec,
    float8_spec,
    load,
    mxfp4_spec,
    mxfp8_spec,
    mxint8_spec,
    nvfp4_spec,
    quant_point,
    quantize_fn,
    save,
    weight_spec,
)

D = 32


# Why a plan may be refused; anything else is a promise that is broken.
REASONS = (
    "no granularity of the parameter matches it",
    "is quantized in two ways",
    "has blocks along the contracted axis, and this op contracts",
    "of two quantized operands has one scale along what it contracts",
    "is per output channel of the parameter's dot, and no dot uses it",
    "which no dot or convolution uses as it is",
    "the operand is the value",
)


class Program:
    """Steps from (2, 4, 32) to the same shape, and their parameters."""

    def __init__(self, choose):
        self.choose, self.params, self.steps = choose, {}, []
        for _ in range(choose.randint(1, 3)):
            self.add(choose.choice(list(KINDS)))
        if not self.params:
            self.add("dense")

    def __call__(self, params, x):
        for step in self.steps:
            x = step(params, x)
        return x

    def new(self, *shape):
        name = f"w{len(self.params)}"
        self.params[name] = jax.random.normal(jax.random.key(self.choose.randrange(10**6)), shape) / 3
        return name

    def add(self, kind):
        self.steps.append(KINDS[kind](self))

    def dense(self):
        k = self.new(D, D)
        return lambda p, x: jnp.tanh(x @ p[k])

    def transposed(self):
        k = self.new(D, D)
        return lambda p, x: jax.nn.relu(x @ p[k].T)

    def heads(self):
        k, out = self.new(D, 2, D // 2), self.new(2, D // 2, D)

        def heads(p, x):
            y = jnp.tanh(jnp.einsum("btm,mhd->bthd", x, p[k]))
            return x + jnp.einsum("bthd,hdm->btm", y, p[out])

        return heads

    def scan(self):
        k = self.new(3, D, D)
        return lambda p, x: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p[k])[0]

    def conv(self):
        k, numbers = self.new(3, D, D), ("NWC", "WIO", "NWC")
        return lambda p, x: jnp.tanh(lax.conv_general_dilated(x, p[k], (1,), "SAME", dimension_numbers=numbers))

    def checkpoint(self):
        k = self.new(D, D)
        return lambda p, x: jax.checkpoint(lambda w, x: jnp.sin(x @ w))(p[k], x)

    def cond(self):
        k = self.new(D, D)
        return lambda p, x: lax.cond(x.sum() > 0, lambda x: x @ p[k], lambda x: x @ p[k] * 2, x)

    def vmap(self):
        k = self.new(4, D, D)
        return lambda p, x: jnp.tanh(jax.vmap(lambda x, w: x @ w, (1, 0), 1)(x, p[k]))

    def slice(self):
        k = self.new(D, 2 * D)
        return lambda p, x: x @ p[k][:, :D] * jax.nn.sigmoid(x @ p[k][:, D:])

    def bfloat16(self):
        k = self.new(D, D)
        return lambda p, x: (x.astype(jnp.bfloat16) @ p[k].astype(jnp.bfloat16)).astype(jnp.float32)

    def tied(self):
        k = self.new(D, D)
        return lambda p, x: jnp.tanh(x @ p[k]) @ p[k].T

    def expert(self):
        k = self.new(3, D, D)
        return lambda p, x: x @ p[k][1]

    def loop(self):
        k = self.new(D, D)
        return lambda p, x: lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ p[k]), x)

    def flat(self):
        k = self.new(D * D)
        return lambda p, x: x @ p[k].reshape(D, D)

    def attention(self):
        return lambda p, x: jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x)) @ x

    def gather(self):
        k = self.new(5, D)
        return lambda p, x: x + p[k][jnp.array([0, 3, 1, 4])]

    def again(self):
        k = self.choose.choice([name for name, w in self.params.items() if w.shape == (D, D)] or [self.new(D, D)])
        return lambda p, x: x @ p[k] + 1

    def point(self):
        name = f"v{len(self.steps)}"
        return lambda p, x: quant_point(x * 1.5, name)

    def call(self):
        k = self.new(D, D)
        return lambda p, x: jax.jit(lambda a, b: jnp.tanh(a @ b))(x, p[k])

    def norm(self):
        k, scale = self.new(D, D), self.new(D)

        def norm(p, x):
            y = x @ p[k]
            y = y - y.mean(-1, keepdims=True)
            return y * lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-6) * p[scale] + x

        return norm

    def mean(self):
        k, bias = self.new(D, D), self.new(D)
        return lambda p, x: x + (x @ p[k] + p[bias]).mean(1, keepdims=True)


KINDS = {name: f for name, f in vars(Program).items() if name not in ("new", "add") and name[0] != "_"}


def weight(choose):
    bits = choose.choice([2, 3, 4, 5, 8, 8, 8])
    affine = QuantSpec(bits=bits, symmetric=False, granularity=PerChannel(None))
    tensor = QuantSpec(bits=bits, granularity=PerTensor(), scale_rule=choose.choice(["ceil", "half_step"]))
    blocks = weight_spec(bits, block_size=choose.choice([4, 8, 16]))
    floats = float8_spec(), mxfp8_spec(), mxfp4_spec(), nvfp4_spec(), mxint8_spec()
    return choose.choice([*[weight_spec(bits)] * 3, affine, tensor, blocks, *floats])


def activation(choose):
    per_token = activation_spec(8, symmetric=True, granularity=PerToken())
    affine, narrow = activation_spec(8), activation_spec(choose.choice([4, 6]))
    return choose.choice([None, affine, affine, activation_spec(8, symmetric=True), per_token, float8_spec(), narrow])


def rules_of(choose):
    of_inputs, more = activation(choose), {}
    if choose.random() < 0.3:
        more["everywhere"] = True
    if of_inputs is not None and choose.random() < 0.3:
        more["gradient"] = choose.choice(["bfloat16", QuantSpec(), (QuantSpec(), None)])
    rules = [Rule("**", weight(choose), of_inputs, **more)]
    if choose.random() < 0.3:
        rules.insert(0, Rule("**", activation=activation_spec(8), kind="act_act", optional=True))
    if choose.random() < 0.2:
        rules.insert(0, Rule("v*", activation=activation_spec(8), kind="value", optional=True))
    return rules


def equal(a, b):
    return all(np.array_equal(u, v, equal_nan=True) for u, v in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def op_by_op(program, values):
    """The results of a program, each of its ops compiled alone; loops and branches are one op."""
    jaxpr = program.jaxpr
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *values], strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else env[v]
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("jit", "pjit"):
            env.update(zip(eqn.outvars, op_by_op(eqn.params["jaxpr"], map(read, eqn.invars)), strict=True))
            continue
        ins = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
        outs = [v for v in eqn.outvars if str(v) != "_"]
        alone = jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=[eqn])
        env.update(zip(outs, jaxpr_as_fun(ClosedJaxpr(alone, []))(*map(env.get, ins)), strict=True))
    return [read(v) for v in jaxpr.outvars]


def alike(what, f, g, of_f, of_g):
    """That two ways to compute have the same bits; or have them op by op, where XLA compiles sums of floats otherwise.

    Says which.
    """
    if equal(jax.jit(f)(*of_f), jax.jit(g)(*of_g)):
        return "same bits"
    results = [op_by_op(jax.make_jaxpr(h)(*of), jax.tree.leaves(of)) for h, of in ((f, of_f), (g, of_g))]
    assert equal(*results), what
    return "same bits op by op"


def check(seed):
    """Raises where a promise is broken; returns what was found of each comparison, or that it was refused."""
    choose = random.Random(seed)
    program, x = Program(choose), jax.random.normal(jax.random.key(seed), (2, 4, D))
    params, rules = program.params, rules_of(choose)
    q, found = quantize_fn(program, rules), {}
    try:
        q.plan(params, x)
    except (ValueError, TypeError, NotImplementedError) as error:
        if not any(reason in str(error) for reason in REASONS):
            raise
        return {"refused": "for a reason that is known"}
    # A branch that was not taken has no range, and stays dynamic.
    ranges = {key: None if (r.x_min > r.x_max).any() else r for key, r in q.observe(params, x).items()}
    qparams = q.init_qparams(params, x, ranges=ranges)
    frozen = q.freeze(params, x, qparams=qparams)
    call = lambda params, x, qparams: q(params, x, qparams=qparams)
    trained, served = (params, x, qparams), (frozen, x, qparams)
    assert all(np.isfinite(v).all() for v in jax.tree.leaves(call(*trained)))
    found["frozen"] = alike("frozen", call, call, trained, served)
    with tempfile.TemporaryDirectory() as folder:
        save(f"{folder}/m.npz", served[::2])
        again = load(f"{folder}/m.npz")
    assert jax.tree.structure(again) == jax.tree.structure(served[::2])
    assert equal(again, served[::2]), "loaded"
    turn = seed % 5
    if turn == 0:
        found["frozen, dynamic"] = alike("dynamic", q, q, (params, x), (q.freeze(params, x), x))
    if turn == 1:
        in_floats = quantize_fn(program, rules, execution="float32")
        try:
            in_floats.plan(params, x)
            jax.eval_shape(in_floats, params, x)
        except ValueError as error:
            if 'execution="int8"' not in str(error):
                raise
        else:
            other = lambda params, x, qparams: in_floats(params, x, qparams=qparams)
            found["float32"] = alike("float32", call, other, trained, trained)
    if turn == 2:
        assert equal(jax.jit(call)(*trained), call(*trained)), "eager"
        found["eager"] = "same bits"
    if turn == 3:
        many = jax.vmap(call, (None, 0, None))
        batch = jnp.stack([x, 2 * x])
        found["vmap"] = alike("vmap", many, many, (params, batch, qparams), (frozen, batch, qparams))
    if turn == 4:
        loss = lambda t: (q(t[0], x, qparams=t[1]) ** 2).sum()
        gradients = jax.jit(jax.grad(loss))((params, qparams))
        assert all(np.isfinite(v).all() for v in jax.tree.leaves(gradients)), "gradients"
        found["gradients"] = "finite"
    return found


def main(first, count):
    table = collections.Counter()
    for seed in range(first, first + count):
        try:
            found = check(seed)
        except Exception as error:
            found = {"FAILED": ""}
            print(seed, repr(error)[:600], flush=True)
        table.update(f"{what}: {how}" for what, how in found.items())
        if seed % 20 == 0:
            jax.clear_caches()
        if seed % 100 == 99:
            print(seed + 1, dict(table), flush=True)
    print(dict(table))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
