# SPDX-License-Identifier: Apache-2.0
"""Random programs under random rules: what is promised of every function is checked on functions nobody has written.

    python tests/random_programs.py 0 2000

checks the programs of these seeds and prints a table. `check(seed)` raises where a promise is broken.
"""

import collections
import pathlib
import random
import sys
import tempfile
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
KINDS = (
    "dense transposed heads scan conv checkpoint cond vmap slice bfloat16 tied expert loop flat attention gather again "
    "point call norm mean"
).split()


class Program:
    """Steps from (2, 4, 32) to the same shape, and their parameters."""

    def __init__(self, choose):
        self.choose, self.params, self.steps = choose, {}, []
        for _ in range(choose.randint(1, 3)):
            self.add(choose.choice(KINDS))
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
        self.steps.append(getattr(self, f"_{kind}")())

    def _dense(self):
        k = self.new(D, D)
        return lambda p, x: jnp.tanh(x @ p[k])

    def _transposed(self):
        k = self.new(D, D)
        return lambda p, x: jax.nn.relu(x @ p[k].T)

    def _heads(self):
        k, out = self.new(D, 2, D // 2), self.new(2, D // 2, D)

        def heads(p, x):
            y = jnp.tanh(jnp.einsum("btm,mhd->bthd", x, p[k]))
            return x + jnp.einsum("bthd,hdm->btm", y, p[out])

        return heads

    def _scan(self):
        k = self.new(3, D, D)
        return lambda p, x: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p[k])[0]

    def _conv(self):
        k, numbers = self.new(3, D, D), ("NWC", "WIO", "NWC")
        return lambda p, x: jnp.tanh(lax.conv_general_dilated(x, p[k], (1,), "SAME", dimension_numbers=numbers))

    def _checkpoint(self):
        k = self.new(D, D)
        return lambda p, x: jax.checkpoint(lambda w, x: jnp.sin(x @ w))(p[k], x)

    def _cond(self):
        k = self.new(D, D)
        return lambda p, x: lax.cond(x.sum() > 0, lambda x: x @ p[k], lambda x: x @ p[k] * 2, x)

    def _vmap(self):
        k = self.new(4, D, D)
        return lambda p, x: jnp.tanh(jax.vmap(lambda x, w: x @ w, (1, 0), 1)(x, p[k]))

    def _slice(self):
        k = self.new(D, 2 * D)
        return lambda p, x: x @ p[k][:, :D] * jax.nn.sigmoid(x @ p[k][:, D:])

    def _bfloat16(self):
        k = self.new(D, D)
        return lambda p, x: (x.astype(jnp.bfloat16) @ p[k].astype(jnp.bfloat16)).astype(jnp.float32)

    def _tied(self):
        k = self.new(D, D)
        return lambda p, x: jnp.tanh(x @ p[k]) @ p[k].T

    def _expert(self):
        k = self.new(3, D, D)
        return lambda p, x: x @ p[k][1]

    def _loop(self):
        k = self.new(D, D)
        return lambda p, x: lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ p[k]), x)

    def _flat(self):
        k = self.new(D * D)
        return lambda p, x: x @ p[k].reshape(D, D)

    def _attention(self):
        return lambda p, x: jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x)) @ x

    def _gather(self):
        k = self.new(5, D)
        return lambda p, x: x + p[k][jnp.array([0, 3, 1, 4])]

    def _again(self):
        k = self.choose.choice([name for name, w in self.params.items() if w.shape == (D, D)] or [self.new(D, D)])
        return lambda p, x: x @ p[k] + 1

    def _point(self):
        name = f"v{len(self.steps)}"
        return lambda p, x: quant_point(x * 1.5, name)

    def _call(self):
        k = self.new(D, D)
        return lambda p, x: jax.jit(lambda a, b: jnp.tanh(a @ b))(x, p[k])

    def _norm(self):
        k, scale = self.new(D, D), self.new(D)

        def norm(p, x):
            y = x @ p[k]
            y = y - y.mean(-1, keepdims=True)
            return y * lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-6) * p[scale] + x

        return norm

    def _mean(self):
        k, bias = self.new(D, D), self.new(D)
        return lambda p, x: x + (x @ p[k] + p[bias]).mean(1, keepdims=True)


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


def alike(what, f, g):
    """That two ways to compute have the same bits; or have them op by op, where XLA compiles sums of floats otherwise.

    Says which.
    """
    if equal(f(), g()):
        return "same bits"
    with jax.disable_jit():
        assert equal(f(), g()), what
    return "same bits op by op"


def check(seed):
    """Raises where a promise is broken; returns what was found of each comparison, or that it was refused."""
    choose = random.Random(seed)
    program, x = Program(choose), jax.random.normal(jax.random.key(seed), (2, 4, D))
    params, rules = program.params, rules_of(choose)
    q, found = quantize_fn(program, rules), {}
    try:
        q.plan(params, x)
        qparams = q.init_qparams(params, x)
        frozen = q.freeze(params, x, qparams=qparams)
    except (ValueError, TypeError, NotImplementedError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        assert "jaxquant" in pathlib.Path(last).parts[-3:-1] or "/jaxquant/" in last, f"a foreign error: {error!r}"
        return {"refused": str(error)}
    call = jax.jit(lambda params, x, qparams: q(params, x, qparams=qparams))
    static = lambda: call(params, x, qparams)
    assert all(np.isfinite(v).all() for v in jax.tree.leaves(static()))
    found["frozen"] = alike("frozen", static, lambda: call(frozen, x, qparams))
    with tempfile.TemporaryDirectory() as folder:
        save(f"{folder}/m.npz", {"params": frozen, "qparams": qparams})
        again = load(f"{folder}/m.npz")
    assert jax.tree.structure(again) == jax.tree.structure({"params": frozen, "qparams": qparams})
    assert equal(again, {"params": frozen, "qparams": qparams}), "loaded"
    turn = seed % 5
    if turn == 0:
        of_values = q.freeze(params, x)
        found["frozen, dynamic"] = alike("frozen, dynamic", lambda: jax.jit(q)(params, x), lambda: q(of_values, x))
    if turn == 1:
        in_floats = quantize_fn(program, rules, execution="float32")
        try:
            jax.eval_shape(in_floats, params, x)
        except ValueError as error:
            assert "float32" in str(error)
        else:
            other = lambda: jax.jit(lambda params, x: in_floats(params, x, qparams=qparams))(params, x)
            found["float32"] = alike("float32", static, other)
    if turn == 2:
        found["eager"] = alike("eager", static, lambda: q(params, x, qparams=qparams))
    if turn == 3:
        batch = jnp.stack([x, 2 * x])
        many = jax.jit(jax.vmap(lambda params, x: q(params, x, qparams=qparams), (None, 0)))
        found["vmap"] = alike("vmap", lambda: many(params, batch), lambda: many(frozen, batch))
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
        table.update([f"{what}: {how}" if what != "refused" else "refused" for what, how in found.items()])
        if seed % 20 == 0:
            jax.clear_caches()
        if seed % 100 == 99:
            print(seed + 1, dict(table), flush=True)
    print(dict(table))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
