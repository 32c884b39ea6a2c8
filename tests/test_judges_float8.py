# SPDX-License-Identifier: Apache-2.0
"""Training in float8 beside flax and qwix: one model, the same first parameters, batches and optimizer; final losses.

Needs the `judges` extra.
"""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_judges import installed

from jaxquant import QuantSpec, Range, Rule, float8_spec, quantize_fn
from jaxquant.delayed import delayed_qparams, split_histories, update_histories

pytestmark = [pytest.mark.slow, pytest.mark.bits]
SEEDS, STEPS, HISTORY, RATE = 6, 300, 16, 0.3
# The batch has a size of its own: qwix tells weights from inputs by their shapes.
BATCH, INPUTS, HIDDEN, OUTPUTS = 48, 32, 64, 8
E4M3, E5M2 = float8_spec(), float8_spec("float8_e5m2")


@functools.cache
def peers():
    return installed("flax.linen", "flax.linen.fp8_ops", "qwix")


def mlp(dot_general_cls=None):
    nn, *_ = peers()
    first, second, last = (nn.Dense(n, dot_general_cls=dot_general_cls) for n in (HIDDEN, HIDDEN, OUTPUTS))
    return nn.Sequential([first, nn.tanh, second, nn.tanh, last])


@jax.jit
def task(seed):
    """First parameters of a student, and all its batches. Targets are the outputs of one teacher, with noise."""
    _, *keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], (STEPS, BATCH, INPUTS))
    teacher = jax.tree.map(lambda w: 1.5 * w, mlp().init(jax.random.key(3), x[0]))
    y = mlp().apply(teacher, x)
    return mlp().init(keys[1], x[0])["params"], x, y + 0.1 * jax.random.normal(keys[2], y.shape)


def squared(outputs, y):
    return ((outputs - y) ** 2).mean()


def loss_scale_of(step):
    """From 2 ** -20 to 1/2. It doubles every 15 steps, so that gradients outgrow their histories again and again."""
    return jnp.ldexp(jnp.float32(1), step // 15 - 20)


# Recipes. Each is two functions: of (params, x, y) to its first state, and of (params, state, x, y, loss_scale) to the
# scaled loss, its gradients, and the next state.


def stateless(apply):
    def gradients(params, state, x, y, loss_scale):
        loss = lambda params: loss_scale * squared(apply({"params": params}, x), y)
        return *jax.value_and_grad(loss)(params), state

    return lambda params, x, y: (), gradients


def of_flax():
    _, fp8_ops, _ = peers()
    model = mlp(functools.partial(fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=HISTORY))
    kept = fp8_ops.OVERWRITE_WITH_GRADIENT

    def gradients(params, state, x, y, loss_scale):
        loss = lambda params, state: loss_scale * squared(model.apply({"params": params, kept: state}, x), y)
        value, (gradient, state) = jax.value_and_grad(loss, (0, 1))(params, state)
        return value, gradient, state

    return lambda params, x, y: model.init(jax.random.key(0), x)[kept], gradients


def of_qwix(**kw):
    *_, qwix = peers()
    types = {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn", "bwd_qtype": "float8_e5m2"}
    rules = [qwix.QtRule(module_path=".*", **types, **kw)]
    return stateless(qwix.quantize_model(mlp(), qwix.QtProvider(rules)).apply)


def ours(gradient=E5M2, execution="native", update=update_histories):
    rules = [Rule("**", E4M3, E4M3, gradient=gradient, history=HISTORY)]
    q = quantize_fn(lambda params, x: mlp().apply({"params": params}, x), rules, execution=execution)

    def gradients(params, state, x, y, loss_scale, just_in_time=False):
        inputs, histories = state
        ranges = {name: Range(r.x_min.min(0), r.x_max.max(0)) for name, r in inputs.items()}
        trained, _ = split_histories(q.init_qparams(params, x, ranges=ranges))

        def loss(params, delayed):
            outputs, seen = q.observe(params, x, with_value=True, qparams={**trained, **delayed})
            return loss_scale * squared(outputs, y), seen

        delayed = delayed_qparams(histories, just_in_time=just_in_time)
        (value, seen), (gradient, largest) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, delayed)
        inputs = jax.tree.map(lambda old, new: jnp.concatenate([old[1:], new[None]]), inputs, seen)
        return value, gradient, (inputs, (update_histories if just_in_time else update)(histories, largest))

    def start(params, x, y):
        inputs = jax.tree.map(lambda r: jnp.stack([r] * HISTORY), q.observe(params, x))
        _, histories = split_histories(q.init_qparams(params, x))
        return gradients(params, (inputs, histories), x, y, loss_scale_of(0), just_in_time=True)[-1]

    return start, gradients


RECIPES = {
    "float32": lambda: stateless(mlp().apply),
    "flax": of_flax,
    "qwix": of_qwix,  # a scale for each row and each channel
    "qwix, one scale": functools.partial(of_qwix, disable_channelwise_axes=True),
    "ours": ours,
    "gradients of 2 bits": functools.partial(ours, QuantSpec(bits=2), "auto"),
    "histories of the first step": functools.partial(ours, update=lambda histories, seen: histories),
}


@functools.cache
def losses(recipe):
    """Of the first step, and the mean of the last hundred steps, for each seed; and the program's narrow floats."""

    def step(carry, batch):
        (params, state), (i, x, y) = carry, batch
        loss_scale = loss_scale_of(i)
        value, gradient, state = gradients(params, state, x, y, loss_scale)
        later = jax.tree.map(lambda p, g: p - RATE / loss_scale * g, params, gradient)
        return (later, state), value / loss_scale

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start, gradients = RECIPES[recipe]()

        @jax.jit
        def train(params, x, y):
            return lax.scan(step, (params, start(params, x[0], y[0])), (jnp.arange(STEPS), x, y))[1]

        program = train.lower(*task(0))
        train = program.compile()
        of_seeds = np.stack([train(*task(seed)) for seed in range(SEEDS)])
    return of_seeds[:, 0], of_seeds[:, -100:].mean(1), set(re.findall(r"f8\w+", program.as_text()))


def apart(recipe, other):
    """How far two recipes end from each other, seed by seed, in units of the noise of seeds.

    The noise is the largest minus the smallest final loss of float32 over the seeds.
    """
    return np.abs(losses(recipe)[1] - losses(other)[1]) / np.ptp(losses("float32")[1])


@pytest.mark.parametrize("peer", ["float32", "flax", "qwix", "qwix, one scale"])
def test_the_final_loss_is_within_the_noise_of_seeds(peer, compared):
    """Of every seed, and within half of the noise."""
    for recipe in ("ours", peer):
        first, last, kinds = losses(recipe)
        assert (last < first / 4).all(), recipe
        assert kinds == (set() if recipe == "float32" else {"f8E4M3FN", "f8E5M2"}), recipe
    by = apart("ours", peer)
    means = " and ".join(f"{losses(recipe)[1].mean():.4f}" for recipe in ("ours", peer))
    compared(peer, f"final losses, ours and its: {means}, {by.max():.2f} of the noise", by.size, (by > 0).sum())
    assert (by < 0.5).all(), by


@pytest.mark.parametrize("wrong", ["gradients of 2 bits", "histories of the first step"])
def test_a_wrong_recipe_ends_elsewhere(wrong, compared):
    by = apart(wrong, "flax")
    compared("flax", f"final losses, but {wrong}: {by.min():.1f} of the noise", by.size, (by > 0).sum())
    assert (by > 1).all(), by
