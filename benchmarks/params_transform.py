# SPDX-License-Identifier: Apache-2.0
"""What fake-quantizing a params pytree costs: GPT-2-small shapes, and the training step of an MLP."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix

from jaxquant import fake_quant_params, weight_spec

from .runner import Part, compared, donated, made, ratios

RNG = np.random.default_rng(0)
RULES = [("**/embedding", weight_spec(8, channel_axis=0)), ("**/kernel", weight_spec(8, channel_axis=-1))]


def gpt2(width=768, words=50257, positions=1024, layers=12):
    """The shapes of GPT-2 small: 148 leaves, 50 of them matrices; 124M numbers."""
    array = lambda *shape: jnp.asarray(RNG.normal(size=shape).astype(np.float32) * 0.02)
    linear = lambda n, m: {"kernel": array(n, m), "bias": array(m)}
    norm = lambda: {"scale": array(width), "bias": array(width)}
    block = lambda: {
        "norm_1": norm(),
        "attention": {"qkv": linear(width, 3 * width), "out": linear(width, width)},
        "norm_2": norm(),
        "mlp": {"up": linear(width, 4 * width), "down": linear(4 * width, width)},
    }
    tree = {f"block_{i}": block() for i in range(layers)}
    tree |= {"tokens": {"embedding": array(words, width)}, "positions": {"embedding": array(positions, width)}}
    return tree | {"norm": norm()}


def matrices(f, tree):
    """`f(matrix, axis of its channels)` at each leaf that the rules choose, other leaves as they are."""
    axis = lambda path: 0 if path[-1].key == "embedding" else 1
    return jax.tree.map_with_path(lambda path, v: f(v, axis(path)) if v.ndim == 2 else v, tree)


def of_qwix(x, axis):
    return qwix.dequantize(qwix.quantize(x, jnp.int8, channelwise_axes=[axis])).astype(x.dtype)


def naive(x, axis):
    scale = jnp.max(jnp.abs(x), 1 - axis, keepdims=True) / 127
    return jnp.clip(jnp.round(x / scale), -127, 127) * scale


def straight_through(x, axis):
    """As it is written by hand: the gradient passes everywhere."""
    return x + jax.lax.stop_gradient(naive(x, axis) - x)


def straight_through_clipped(x, axis):
    """By hand too: rounding is passed, and the clip and the scale are JAX's to differentiate."""
    scale = jax.lax.stop_gradient(jnp.max(jnp.abs(x), 1 - axis, keepdims=True) / 127)
    v = jnp.clip(x / scale, -127, 127)
    return (v + jax.lax.stop_gradient(jnp.round(v) - v)) * scale


def two_passes(tree):
    """A pass that reads the tree and one that writes it, each compiled alone: the least that a range can cost."""
    largest = jax.jit(lambda t: matrices(lambda v, axis: jnp.max(jnp.abs(v), 1 - axis), t))
    plus_one, held = (
        jax.jit(lambda t: jax.tree.map(lambda v: v + 1, t), donate_argnums=0),
        [jax.tree.map(jnp.copy, tree)],
    )

    def run():
        jax.block_until_ready([v for v in jax.tree.leaves(largest(held[0])) if v.ndim == 1])
        held[0] = jax.block_until_ready(plus_one(held[0]))

    return run


def tree_rows(rounds):
    tree = gpt2()
    ours = lambda t: fake_quant_params(t, RULES)
    to = compared(
        {
            "x + 1": donated(lambda t: jax.tree.map(lambda v: v + 1, t), tree),
            "two": two_passes(tree),
            "ours": donated(ours, tree),
            "qwix": donated(lambda t: matrices(of_qwix, t), tree),
        },
        rounds,
    )
    two, whole, theirs = (to("ours", base) for base in ("two", "x + 1", "qwix"))
    yield f"forward, to two passes (they are {to('two', 'x + 1')} of x + 1)", two
    yield f"forward, to x + 1 (qwix {to('qwix', 'x + 1')})", whole, ""
    yield "forward, to qwix", theirs

    def with_vjp(f):
        """The gradient is written into the memory of the cotangent, and the value into memory to spare."""

        def step(tree, g, spare):
            y, vjp = jax.vjp(f, tree)
            return vjp(g)[0], y

        jitted = jax.jit(step, donate_argnums=(1, 2), keep_unused=True)
        held = [jax.tree.map(jnp.ones_like, tree) for _ in range(2)]

        def run():
            held[:] = jax.block_until_ready(jitted(tree, *held))

        return run

    forms = {"naive": straight_through, "clipped": straight_through_clipped}
    runs = {name: with_vjp(lambda t, f=f: matrices(f, t)) for name, f in forms.items()}
    to = compared({**runs, "ours": with_vjp(ours)}, rounds)
    naive_, clipped = to("ours", "naive"), to("ours", "clipped")
    yield "forward and vjp, to x + stop_gradient(q(x) - x), whose vjp is nothing", naive_
    yield "forward and vjp, to the form that clips", clipped


def making_rows(rounds):
    tree = jax.eval_shape(gpt2)
    times = [made(lambda t: fake_quant_params(t, RULES), tree) for _ in range(rounds)]
    trace, compile_ = map(float, np.median(times, 0))
    yield "trace, seconds", trace, ""
    yield "compile, seconds", compile_


def dispatch_rows(rounds):
    """The same 148 leaves of a few numbers each, so that the call is what takes the time."""
    tree = gpt2(width=4, words=8, positions=4)
    runs = {"x + 1": lambda t: jax.tree.map(lambda v: v + 1, t), "ours": lambda t: fake_quant_params(t, RULES)}
    to = ratios({name: donated(f, tree) for name, f in runs.items()}, "x + 1", rounds)["ours"]
    yield "dispatch, to x + 1", to


def mlp_step(quantizer):
    optimizer = optax.adam(1e-3)

    def loss(params, x, labels):
        params = quantizer(params)
        for i in range(4):
            x = x @ params[f"layer_{i}"]["kernel"] + params[f"layer_{i}"]["bias"]
            x = jax.nn.relu(x) if i < 3 else x
        return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()

    def step(params, state, x, labels):
        gradients = jax.grad(loss)(params, x, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return optimizer, step


def mlp_rows(rounds):
    sizes = (784, 1024, 1024, 1024, 10)
    array = lambda *shape: jnp.asarray(RNG.normal(size=shape).astype(np.float32) / shape[0] ** 0.5)
    params = {
        f"layer_{i}": {"kernel": array(n, m), "bias": array(m)} for i, (n, m) in enumerate(itertools.pairwise(sizes))
    }
    x, labels = array(256, 784), jnp.asarray(RNG.integers(0, 10, 256))
    quantizers = {
        "float": lambda p: p,
        "ours": lambda p: fake_quant_params(p, RULES[1:]),
        "qwix": lambda p: matrices(lambda v, axis: v + jax.lax.stop_gradient(of_qwix(v, axis) - v), p),
    }
    runs, times = {}, {}
    for name, quantizer in quantizers.items():
        optimizer, step = mlp_step(quantizer)
        state = optimizer.init(params)
        times[name] = np.median([made(step, params, state, x, labels) for _ in range(max(1, rounds // 20))], 0)
        jitted, held = jax.jit(step, donate_argnums=(0, 1)), [jax.tree.map(jnp.copy, (params, state))]

        def run(jitted=jitted, held=held):
            held[0] = jax.block_until_ready(jitted(*held[0], x, labels))

        runs[name] = run
    to = ratios(runs, "float", rounds)
    by_hand = f"qwix's round trip, by hand straight-through: {to['qwix']}"
    yield f"MLP step, to the float step ({by_hand})", to["ours"]
    for i, part in enumerate(("trace", "compile")):
        yield f"MLP step, {part}, to the float step", float(times["ours"][i] / times["float"][i])


PACKAGES = "optax", "qwix"
COLUMNS = "", "jaxquant"
PARTS = {
    "tree": Part(COLUMNS, tree_rows, 15),
    "making": Part(COLUMNS, making_rows, 5),
    "dispatch": Part(COLUMNS, dispatch_rows, 1001),
    "mlp": Part(COLUMNS, mlp_rows, 101),
}
