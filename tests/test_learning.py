# SPDX-License-Identifier: Apache-2.0
"""Training in plain JAX: learned ranges, schedules of the step, and ranges of activations in the train state."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exact import assert_same_bits, differing

from jaxquant import (
    Range,
    activation_spec,
    ema_ranges,
    fake_quant,
    fake_quant_params,
    init_qparams,
    merge,
    observe,
    qparams_from_range,
    quantize_params,
    weight_spec,
)

# optax.adam raises a float to the power of an integer.
promoting = functools.partial(jax.numpy_dtype_promotion, "standard")

rules = lambda bits: [("**/kernel", weight_spec(bits, channel_axis=-1))]


def problem(seed, hidden=32):
    """A teacher of one hidden layer: inputs, targets of variance 1, and the parameters of a student."""
    keys = jax.random.split(jax.random.key(seed), 5)
    normal = lambda key, *shape: jax.random.normal(key, shape)
    x = normal(keys[0], 256, 16)
    y = jax.nn.relu(x @ normal(keys[1], 16, 12)) @ normal(keys[2], 12, 4)
    layer = lambda key, m, n: {"kernel": normal(key, m, n) / m**0.5, "bias": jnp.zeros((1, n))}
    return x, y / y.std(), {"hidden": layer(keys[3], 16, hidden), "out": layer(keys[4], hidden, 4)}


def net(params, x):
    x = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return x @ params["out"]["kernel"] + params["out"]["bias"]


def mean_squared(params, x, y):
    return ((net(params, x) - y) ** 2).mean()


def labels(trained):
    """Which optimizer of `multi_transform` updates which leaf: to be copied."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: path[0].key, trained)


# --- Learned ranges -----------------------------------------------------------------------------------------------


@jax.jit
@functools.partial(jax.vmap, in_axes=(0, 0, None, None))
def learned(seed, qparams, rate, bits):
    """200 steps: the mean of the last losses and the qparams. A rate of 0 leaves the qparams as they are."""
    x, y, params = problem(seed)
    optimizer = optax.multi_transform({"params": optax.adam(0.01), "qparams": optax.adam(rate)}, labels)

    def loss(trained):
        quantized = fake_quant_params(trained["params"], rules(4), trained["qparams"], bits=bits, lsq_gradient=True)
        return mean_squared(quantized, x, y)

    def step(carry, _):
        trained, state = carry
        value, gradients = jax.value_and_grad(loss)(trained)
        with promoting():
            updates, state = optimizer.update(gradients, state, trained)
        return (optax.apply_updates(trained, updates), state), value

    trained = {"params": params, "qparams": qparams}
    (trained, _), losses = jax.lax.scan(step, (trained, optimizer.init(trained)), length=200)
    return losses[-20:].mean(), trained["qparams"]


@functools.cache
def initial(method, bits):
    return jax.jit(jax.vmap(lambda seed: init_qparams(problem(seed)[2], rules(4), method, bits=bits)))(jnp.arange(3))


# Measured on the three seeds
@pytest.mark.slow
@pytest.mark.parametrize(("method", "bits", "at_most"), [("lsq", 2, 0.6), ("mse", 2, 0.6), ("lsq", 3, 0.85)])
def test_learned_qparams_end_below_frozen_minmax_on_every_seed(method, bits, at_most):
    start = initial(method, bits)
    got, ended = learned(jnp.arange(3), start, 0.001, jnp.int32(bits))
    frozen, kept = learned(jnp.arange(3), initial("minmax", bits), 0.0, jnp.int32(bits))
    assert (got < at_most * frozen).all(), (got, frozen)
    assert ended.keys() == start.keys() == {"hidden/kernel", "out/kernel"}
    for path, qparams in ended.items():
        assert (qparams.scale != start[path].scale).mean() > 0.9
        assert (qparams.scale > 0).all()
        assert_same_bits(qparams.zero_point, start[path].zero_point, "symmetric")
        assert_same_bits(kept[path].scale, initial("minmax", bits)[path].scale, "frozen")


@pytest.mark.slow
def test_the_lsq_gradient_is_for_sgd_and_adam_takes_no_notice():
    x, y, params = start()
    qparams = init_qparams(params, rules(4), "lsq")
    loss = lambda qparams, lsq: mean_squared(fake_quant_params(params, rules(4), qparams, lsq_gradient=lsq), x, y)

    @jax.jit
    def updates():
        gradients = [jax.grad(loss)(qparams, lsq) for lsq in (False, True)]
        with promoting():
            return [[tx.update(g, tx.init(qparams))[0] for g in gradients] for tx in (optax.sgd(1.0), optax.adam(1.0))]

    of_sgd, of_adam = updates()
    for path, sharing in (("hidden/kernel", 16), ("out/kernel", 32)):
        (plain, scaled), (plain_adam, scaled_adam) = ([u[path].scale for u in us] for us in (of_sgd, of_adam))
        np.testing.assert_allclose(scaled, plain / (sharing * 7) ** 0.5, rtol=1e-5)
        np.testing.assert_allclose(scaled_adam, plain_adam, rtol=1e-3)
        assert jnp.abs(plain).min() > 0


# --- Schedules ----------------------------------------------------------------------------------------------------

NEVER = 1000


class Schedule(NamedTuple):
    """Steps, traced, so that one program runs every schedule."""

    float_until: Any = 0
    freeze_from: Any = NEVER
    four_bits_from: Any = NEVER
    two_bits_from: Any = NEVER


class State(NamedTuple):
    trained: dict
    optimizer: Any
    step: Any


OPTIMIZER = optax.multi_transform({"params": optax.adam(0.01), "qparams": optax.adam(0.0001)}, labels)
TRACES = []


@functools.cache
def start():
    """Made when a test first asks for it, in one program: each of its operations alone is one too."""
    return jax.jit(problem)(0)


def width(schedule, step):
    return jnp.where(step < schedule.four_bits_from, 8, jnp.where(step < schedule.two_bits_from, 4, 2))


def loss_of(trained, bits, is_float):
    params = trained["params"]
    quantized = fake_quant_params(params, rules(8), trained["qparams"], bits=bits, lsq_gradient=True)
    x, y, _ = start()
    return mean_squared(jax.tree.map(lambda p, q: jnp.where(is_float, p, q), params, quantized), x, y)


whole_loss = jax.jit(loss_of)


def refitted(trained, bits):
    return trained | {"qparams": init_qparams(trained["params"], rules(8), "lsq", bits=bits)}


@jax.jit
def train_step(state, schedule):
    TRACES.append(schedule)
    trained, step = state.trained, state.step
    bits = width(schedule, step)
    changed = (step == schedule.four_bits_from) | (step == schedule.two_bits_from)
    trained = jax.lax.cond(changed, refitted, lambda trained, bits: trained, trained, bits)
    value, gradients = jax.value_and_grad(loss_of)(trained, bits, step < schedule.float_until)
    with promoting():
        updates, optimizer = OPTIMIZER.update(gradients, state.optimizer, trained)
    new = optax.apply_updates(trained, updates)
    keep = step >= schedule.freeze_from
    new["qparams"] = jax.tree.map(lambda old, new: jnp.where(keep, old, new), trained["qparams"], new["qparams"])
    return State(new, optimizer, step + 1), value


@jax.jit
def first(params, schedule):
    trained = {"params": params, "qparams": init_qparams(params, rules(8), "minmax", bits=width(schedule, 0))}
    return State(trained, OPTIMIZER.init(trained), jnp.int32(0))


@functools.cache
def history(steps, **schedule):
    """The state before each step and after the last, and the losses."""
    schedule = Schedule(*map(np.int32, Schedule(**schedule)))
    states, losses = [first(start()[2], schedule)], []
    for _ in range(steps):
        state, value = train_step(states[-1], schedule)
        states.append(state)
        losses.append(value)
    return states, losses


def count_differing(a, b):
    return sum(map(differing, jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.slow
def test_quantization_starts_late():
    delayed, _ = history(12, float_until=5)
    floats, losses = history(12, float_until=NEVER)
    quantized, _ = history(12)
    for n in range(6):
        assert count_differing(delayed[n].trained, floats[n].trained) == 0
        assert count_differing(delayed[n].trained["qparams"], delayed[0].trained["qparams"]) == 0  # no gradient yet
    assert count_differing(delayed[6].trained["params"], floats[6].trained["params"])
    assert count_differing(delayed[6].trained["qparams"], delayed[5].trained["qparams"])
    assert count_differing(quantized[1].trained["params"], floats[1].trained["params"])
    x, y, params = start()
    np.testing.assert_allclose(losses[0], mean_squared(params, x, y), rtol=1e-5)
    np.testing.assert_allclose(losses[5], mean_squared(floats[5].trained["params"], x, y), rtol=1e-5)


@pytest.mark.slow
def test_ranges_freeze():
    frozen, _ = history(12, freeze_from=6)
    free, _ = history(12)
    of = lambda states, n, name: states[n].trained[name]
    for n in range(12):
        moved = count_differing(of(frozen, n, "qparams"), of(frozen, n + 1, "qparams"))
        assert bool(moved) == (n < 6)
        assert count_differing(of(free, n, "qparams"), of(free, n + 1, "qparams"))
        assert count_differing(of(frozen, n, "params"), of(frozen, n + 1, "params"))
    # That no gradient comes does not freeze them: Adam goes on by its momentum.
    with promoting():
        updates, _ = jax.jit(OPTIMIZER.update)(jax.tree.map(jnp.zeros_like, free[6].trained), free[6].optimizer)
    assert all(jnp.abs(qparams.scale).max() > 0 for qparams in updates["qparams"].values())


def at_step(n):
    """Of a run 8 -> 4 -> 2: the state that step n trains with, its qparams refitted where the width changes."""
    states, _ = history(18, four_bits_from=6, two_bits_from=12)
    bits = 8 if n < 6 else 4 if n < 12 else 2
    trained = states[n].trained
    return (jax.jit(refitted)(trained, np.int32(bits)) if n in (6, 12) else trained), bits


@jax.jit
def on_the_grid(trained, bits):
    return fake_quant_params(trained["params"], rules(8), trained["qparams"], bits=bits)


@pytest.mark.slow
@pytest.mark.parametrize("n", [0, 5, 6, 11, 12, 17])
def test_every_width_fills_its_levels(n):
    trained, bits = at_step(n)
    quantized = on_the_grid(trained, np.int32(bits))
    for layer in quantized.values():
        counts = [len(np.unique(channel)) for channel in np.asarray(layer["kernel"]).T]
        assert max(counts) <= 2**bits - 1
        assert max(counts) > {8: 15, 4: 3, 2: 2}[bits]


@pytest.mark.slow
@pytest.mark.parametrize("n", [6, 12])
def test_qparams_are_refitted_where_the_width_changes(n):
    (refit, bits), (states, losses) = at_step(n), history(18, four_bits_from=6, two_bits_from=12)
    kept = states[n].trained
    loss = lambda trained: whole_loss(trained, np.int32(bits), False)
    np.testing.assert_allclose(losses[n], loss(refit), rtol=1e-5)
    for path, qparams in refit["qparams"].items():  # and a step of Adam further
        np.testing.assert_allclose(states[n + 1].trained["qparams"][path].scale, qparams.scale, atol=2e-4)
    # Kept, the scale of the wider grid clips most of the weights. Measured: 0.66 against 1.08, 0.58 against 0.71.
    assert loss(refit) < 0.85 * loss(kept)


def test_the_last_width_becomes_integers():
    states, _ = history(18, four_bits_from=6, two_bits_from=12)
    params, qparams = states[18].trained["params"], states[18].trained["qparams"]
    of_training = on_the_grid(states[18].trained, np.int32(2))
    integers = quantize_params(params, rules(2), qparams)
    for name, layer in integers.items():
        q = layer["kernel"]
        assert set(np.unique(q.values)) == {-1, 0, 1}
        assert_same_bits(np.float32(q.values) * np.asarray(q.scale), of_training[name]["kernel"], name)


def test_one_program_runs_every_schedule():
    for schedule in ({}, {"float_until": 5}, {"freeze_from": 6}, {"four_bits_from": 6, "two_bits_from": 12}):
        history(12, **schedule)
    assert len(TRACES) == 1


# --- Activations --------------------------------------------------------------------------------------------------

SPEC = activation_spec(8)
UPDATES = {
    "ema": lambda old, h: ema_ranges(old, observe(h, SPEC), 0.9),
    "merge": lambda old, h: merge(old, observe(h, SPEC)),
}
frozen = lambda old, h: old
NOTHING = {name: Range(np.float32(np.inf), np.float32(-np.inf)) for name in ("input", "hidden", "sum")}


def hand_written(params, x, ranges, update):
    """Outputs and the ranges after them. `update` makes of the old range and the values at a point the new range."""
    new = {}

    def point(name, h):
        new[name] = update(ranges[name], h)
        return fake_quant(h, SPEC, qparams_from_range(new[name], SPEC))

    hidden = point("hidden", jax.nn.relu(x @ params["kernel"]))
    return point("sum", hidden + point("input", x)) @ params["out"], new


def batches(count):
    """Of shrinking size, in 32nds: their products with small integers are exact, in any order of a sum."""
    x = np.random.default_rng(3).integers(-40, 41, (count, 32, 8)).astype(np.float32) / 8
    return x * np.exp2(-(np.arange(count, dtype=np.float32) % 3)).reshape(-1, 1, 1)


def exact_params():
    kernel = np.random.default_rng(4).integers(-4, 5, (8, 8)).astype(np.float32)
    return {"kernel": kernel, "out": np.eye(8, dtype=np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_ranges_in_the_train_state_have_the_same_bits_on_every_road(update):
    params, x = exact_params(), batches(6)
    step = lambda ranges, x: hand_written(params, x, ranges, update)[::-1]
    compiled = jax.jit(step)
    eager, jitted, outputs = NOTHING, NOTHING, []
    for batch in x:
        eager, y = step(eager, batch)
        jitted, z = compiled(jitted, batch)
        assert_same_bits(z, y)
        outputs.append(y)
    scanned, ys = jax.lax.scan(step, NOTHING, x)
    assert_same_bits(ys, jnp.stack(outputs))
    for name in NOTHING:
        for got in (jitted, scanned):
            assert_same_bits(jnp.stack(got[name]), jnp.stack(eager[name]), name)
    assert all(differing(r.x_max, jnp.float32(jnp.inf)) and r.x_min < r.x_max for r in eager.values())


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_the_ranges_are_those_of_the_batches(update):
    params, x = exact_params(), batches(6)
    ranges, step = NOTHING, jax.jit(lambda batch, ranges: hand_written(params, batch, ranges, update)[1])
    for batch in x:
        ranges = jax.device_get(step(batch, ranges))
    ends = np.array([(batch.min(), batch.max()) for batch in x])
    want = [ends[:, 0].min(), ends[:, 1].max()]
    if update is UPDATES["ema"]:
        want = list(itertools.accumulate(ends, lambda old, new: 0.9 * old + 0.1 * new))[-1]
    np.testing.assert_allclose(ranges["input"], want, rtol=1e-6)
    hidden = np.maximum(x @ params["kernel"], 0)
    assert ranges["hidden"].x_min == 0
    assert 0 < ranges["hidden"].x_max <= hidden.max()


@pytest.mark.slow
def test_a_model_trains_with_its_activations_quantized_and_is_evaluated_with_frozen_ranges():
    x = jax.random.normal(jax.random.key(5), (64, 8))
    y = jnp.tanh(x[:, ::-1])
    key = jax.random.key(6)
    params = {"kernel": jax.random.normal(key, (8, 8)) / 2, "out": jax.random.normal(key, (8, 8)) / 4}
    weights = [("*", weight_spec(4, channel_axis=-1))]
    predict = lambda params, x, ranges, update: hand_written(fake_quant_params(params, weights), x, ranges, update)

    def loss(params, x, y, ranges, update):
        outputs, ranges = predict(params, x, ranges, update)
        return ((outputs - y) ** 2).mean(), ranges

    @jax.jit
    def step(params, ranges):
        (value, ranges), gradients = jax.value_and_grad(loss, has_aux=True)(params, x, y, ranges, UPDATES["ema"])
        return jax.tree.map(lambda p, g: p - 0.2 * g, params, gradients), ranges, value

    ranges, losses = NOTHING, []
    for _ in range(60):
        params, ranges, value = step(params, ranges)
        losses.append(value)
    assert losses[-1] < 0.5 * losses[0]

    evaluate = jax.jit(lambda x: predict(params, x, ranges, frozen))
    outputs, after = evaluate(x)
    for name, kept in after.items():
        assert_same_bits(jnp.stack(kept), jnp.stack(ranges[name]), name)
    # An example is what it is, whatever comes with it; in training, the batch makes the range.
    wide, _ = evaluate(jnp.concatenate([x[:32], 100 * x[32:]]))
    np.testing.assert_allclose(wide[:32], outputs[:32], rtol=1e-5, atol=1e-6)
    trained_on, _ = predict(params, jnp.concatenate([x[:32], 100 * x[32:]]), ranges, UPDATES["ema"])
    assert jnp.abs(trained_on[:32] - outputs[:32]).max() > 0.1


def test_clipped_activations_pass_no_gradient_and_ranges_none():
    params = dict.fromkeys(("kernel", "out"), np.eye(8, dtype=np.float32))
    ranges = {name: Range(np.float32(-4), np.float32(3.9375)) for name in NOTHING}  # a scale of 1 / 32
    total = lambda x, ranges: hand_written(params, x, ranges, frozen)[0].sum()
    x = np.float32([[-9.0, -4.0, -1.0, 0.5, 1.5, 2.5, 3.0, 5.0]])
    gradient = jax.jit(jax.grad(total))(x, ranges)
    # Of x + relu(x) each on its own, and then of their sum.
    assert gradient.tolist() == [[0, 1, 1, 2, 2, 0, 0, 0]]
    of_calibrated = jax.grad(lambda x: observe(x, SPEC).x_max + qparams_from_range(observe(x, SPEC), SPEC).scale)
    assert not np.asarray(jax.jit(of_calibrated)(x)).any()
