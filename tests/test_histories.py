# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling of gradients, against train steps by hand with explicit ranges, in NumPy."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exact import assert_same_bits
from jax import lax
from jax.sharding import PartitionSpec as P
from lanes import by_default, cases

import jaxquant as jq
from jaxquant import QParams, QuantSpec, Rule, float8_spec, quantize_fn
from jaxquant.delayed import GradientHistory, delayed_qparams, split_histories, update_histories

F = np.float32
rng = np.random.default_rng(0)
E5M2 = float8_spec("float8_e5m2")
INPUT = QParams(F(2**-4), F(0))
STEPS, ROWS, WIDTH = 4, 24, 16


def normal(*shape):
    return F(rng.normal(size=shape))


def layer(w, x):
    return jax.nn.relu(x @ w)


def loop(p, x):
    return layer(p["w1"], layer(p["w0"], x))


def scanned(p, x):
    return lax.scan(lambda x, w: (layer(w, x), None), x, jnp.stack([p["w0"], p["w1"]]))[0]


def stack(p, x):
    return lax.scan(lambda x, w: (jax.checkpoint(layer)(w, x), None), x, p["w"])[0]


def train_step(q, trained):
    """Gradients of the sum of squares, weighted, with respect to the parameters, and what they have seen."""

    def loss(params, delayed, x, y, weight):
        return weight * 0.5 * ((q(params, x, qparams={**trained, **delayed}) - y) ** 2).sum()

    @functools.partial(jax.jit, static_argnames="just_in_time")
    def step(params, histories, *batch, just_in_time=False):
        return jax.grad(loss, (0, 1))(params, delayed_qparams(histories, just_in_time=just_in_time), *batch)

    return step


def quantized(f, params, gradient, *x, **kw):
    """The function with a history of its gradients, the static qparams of its inputs, and the histories."""
    q = quantize_fn(f, [Rule("**", QuantSpec(), QuantSpec(), gradient=gradient, history=STEPS)], **kw)
    qparams, histories = split_histories(q.init_qparams(params, *x))
    inputs = {name: INPUT if name.endswith(":input") else None for name in qparams}
    turns = {name: jax.tree.map(lambda v, n=v.scale.shape: np.broadcast_to(v, n), INPUT) for name, v in qparams.items()}
    return q, {name: v and turns[name] for name, v in inputs.items()}, histories


# By hand


def end_of_bin(largest):
    """The least eighth of a power of two that is larger."""
    fraction, exponent = np.frexp(largest)
    return F(np.ldexp((np.floor(fraction * 16) + 1) / 16, exponent))


class History:
    """The largest magnitudes of one gradient."""

    def __init__(self, spec):
        self.spec, self.largest = spec, []

    def rounded(self, g):
        """Its values and its scale, by the largest of the steps before; and remembers this one."""
        known = max(self.largest, default=0)
        most = F(57344 if self.spec.format else 127)
        scale = end_of_bin(known) / most if known else F(1)
        self.largest = [np.abs(g).max(), *self.largest][:STEPS]
        if self.spec.format:
            return np.clip(g / scale, -most, most).astype(ml_dtypes.float8_e5m2).astype(np.float64), scale
        return np.clip(np.rint(g / scale), -most, most).astype(np.float64), scale


def levels(v, scale):
    level = np.rint(v / scale)
    return np.clip(level, -127, 127).astype(np.float64), np.abs(level) <= 127


def product(a, b, scale):
    """Exact in float64: no sum needs more than 53 bits."""
    return (a @ b).astype(F) * scale


def gradients_by_hand(weights, histories, x, y, weight):
    """Of the layers, of which each rounds g once towards its input and once towards its weight."""
    kept = []
    for w in weights:
        (qx, inside), scale = levels(x, INPUT.scale), np.abs(w).max() / F(127)
        qw, _ = levels(w, scale)
        value = product(qx, qw, INPUT.scale * scale)
        kept.append((qx, inside, qw, scale, value > 0))
        x = np.maximum(value, 0)
    g, found = F(weight) * (x - y), []
    for (qx, inside, qw, scale, is_open), (to_input, to_weight) in zip(kept[::-1], histories[::-1], strict=True):
        g = np.where(is_open, g, F(0))
        (of_input, input_scale), (of_weight, weight_scale) = to_input.rounded(g), to_weight.rounded(g)
        found.append(product(qx.T, of_weight, INPUT.scale * weight_scale))
        g = np.where(inside, product(of_input, qw.T, input_scale * scale), F(0))
    return found[::-1]


PROGRAMS = {
    "layers": (loop, lambda w: {"w0": w[0], "w1": w[1]}, lambda g: [g["w0"], g["w1"]]),
    "scan and remat": (stack, lambda w: {"w": np.stack(w)}, lambda g: list(g["w"])),
}


@pytest.mark.bits
@cases(("program", "gradient"), [(p, g) for p in PROGRAMS for g in ("int8", "e5m2")], [("scan and remat", "e5m2")])
def test_fifty_steps_are_those_by_hand(program, gradient):
    spec = {"int8": QuantSpec(), "e5m2": E5M2}[gradient]
    f, tree, leaves = PROGRAMS[program]
    weights, x, y = [normal(WIDTH, WIDTH) / 4 for _ in range(2)], normal(ROWS, WIDTH), normal(ROWS, WIDTH)
    q, trained, histories = quantized(f, tree(weights), spec, x)
    step, by_hand = train_step(q, trained), [(History(spec), History(spec)) for _ in weights]
    clipped = 0
    for i in range(50):
        weight = F(2.0) ** rng.integers(-12, -6)  # g grows beyond its history, and shrinks
        before = by_hand[1][0].largest
        want = gradients_by_hand(weights, by_hand, x, y, weight)
        clipped += bool(before) and by_hand[1][0].largest[0] > end_of_bin(max(before))
        got, seen = step(tree(weights), histories, x, y, weight)
        histories = update_histories(histories, seen)
        for one, other in zip(leaves(got), want, strict=True):
            assert_same_bits(one, other, f"step {i}")
        weights = [w - F(2**-4) * g for w, g in zip(weights, want, strict=True)]
    assert clipped > 2
    assert all(np.abs(g).max() > 0 for g in want)


@pytest.mark.slow
@pytest.mark.bits
def test_just_in_time_is_what_a_rule_without_a_history_gives():
    params, x, y = {"w0": normal(WIDTH, WIDTH), "w1": normal(WIDTH, WIDTH)}, normal(ROWS, WIDTH), normal(ROWS, WIDTH)
    q, trained, histories = quantized(loop, params, E5M2, x)
    got, seen = train_step(q, trained)(params, histories, x, y, 1.0, just_in_time=True)
    plain = quantize_fn(loop, [Rule("**", QuantSpec(), QuantSpec(), gradient=E5M2)])
    loss = lambda params: 0.5 * ((plain(params, x, qparams=trained) - y) ** 2).sum()
    jax.tree.map(assert_same_bits, got, jax.jit(jax.grad(loss))(params))
    # And what it has seen are the ranges of g.
    g = np.asarray(plain(params, x, qparams=trained)) - y
    g = np.where(np.asarray(plain(params, x, qparams=trained)) > 0, g, 0)
    scale = delayed_qparams(update_histories(histories, seen))["w1:gradient"].qparams.scale
    assert_same_bits(scale, end_of_bin(np.abs(g).max()) / F(57344))


@pytest.mark.slow
@pytest.mark.bits
def test_each_side_has_a_history_of_what_is_rounded_for_it():
    """Towards the input the scales of the weight's channels are in g, and its grid is another."""
    w, x, g = normal(WIDTH, WIDTH), normal(ROWS, WIDTH), normal(ROWS, WIDTH)
    weight, gradient = QuantSpec(granularity=jq.PerChannel(1)), (E5M2, QuantSpec())
    q = quantize_fn(lambda w, x: x @ w, [Rule("", weight, QuantSpec(), gradient=gradient, history=STEPS)])
    trained, histories = split_histories(q.init_qparams(w, x))
    trained = {"": None, ":input": INPUT}
    pull = jax.jit(lambda d: jax.vjp(lambda w, x, d: q(w, x, qparams={**trained, **d}), w, x, d)[1](g))
    *_, seen = pull(delayed_qparams(histories))
    delayed = delayed_qparams(update_histories(histories, seen))
    of_w, of_x, _ = pull(delayed)
    channels = np.abs(w).max(0) / F(127)
    by_hand = {":input:gradient": History(E5M2), ":gradient": History(QuantSpec())}
    for _ in range(2):
        (to_input, input_scale) = by_hand[":input:gradient"].rounded(g * channels)
        (to_weight, weight_scale) = by_hand[":gradient"].rounded(g)
    assert_same_bits(delayed[":input:gradient"].qparams.scale, input_scale)
    assert_same_bits(delayed[":gradient"].qparams.scale, weight_scale)
    (qx, inside), (qw, _) = levels(x, INPUT.scale), levels(w, channels)
    assert_same_bits(of_w, product(qx.T, to_weight, INPUT.scale * weight_scale))
    assert_same_bits(of_x, np.where(inside, product(to_input, qw.T, input_scale), F(0)))


# What adds cotangents: one history has the largest of all


def largest_of(histories):
    return {name: int(h.bins[..., 0].max()) for name, h in histories.items()}


@functools.cache
def whole_batch():
    """The layers, and what one step sees of a whole batch."""
    params, x, y = {"w0": normal(WIDTH, WIDTH), "w1": normal(WIDTH, WIDTH)}, normal(ROWS, WIDTH), normal(ROWS, WIDTH)
    x *= 1.5 ** np.arange(ROWS, dtype=F)[:, None] / 1e3  # of the last rows far larger gradients
    q, trained, histories = quantized(loop, params, E5M2, x)
    _, seen = train_step(q, trained)(params, histories, x, y, 1.0, just_in_time=True)
    return params, x, y, q, trained, histories, largest_of(update_histories(histories, seen))


@pytest.mark.slow
def test_examples_of_a_vmap_have_one_history():
    params, x, y, q, trained, histories, want = whole_batch()

    def loss(params, delayed):
        one = lambda x: q(params, x, qparams={**trained, **delayed})
        return 0.5 * ((jax.vmap(one)(x) - y) ** 2).sum()

    seen = jax.jit(jax.grad(loss, 1))(params, delayed_qparams(histories, just_in_time=True))
    got = largest_of(update_histories(histories, seen))
    assert got["w1:gradient"] == want["w1:gradient"]
    assert all(abs(got[name] - want[name]) <= 8 for name in want)  # g of an example has a scale of its own


@pytest.mark.slow
@cases("combine", ["sum", "mean"], ["mean"])
def test_micro_batches_have_one_history(combine):
    params, x, y, q, trained, histories, _ = whole_batch()
    step = train_step(q, trained)
    filled = update_histories(histories, step(params, histories, x, y, 1.0, just_in_time=True)[1])
    _, of_whole = step(params, filled, x, y, 1.0)

    @jax.jit
    def accumulated(params, filled):
        parts = x.reshape(4, -1, WIDTH), y.reshape(4, -1, WIDTH)
        found = lax.map(lambda part: step(params, filled, *part, 1.0)[1], parts)
        return jax.tree.map(lambda v: getattr(jnp, combine)(v, 0), found)

    got, of_whole = (largest_of(update_histories(filled, seen)) for seen in (accumulated(params, filled), of_whole))
    assert got == of_whole


def devices_have_one_history():
    """Inside of a function that is quantized, and around it."""
    params, x, y, q, trained, histories, _ = whole_batch()
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    inside = jax.shard_map(loop, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    of_inside, *_ = quantized(lambda p, x: inside(p, x), params, E5M2, x)
    filled = update_histories(histories, train_step(q, trained)(params, histories, x, y, 1.0, just_in_time=True)[1])
    whole, seen_of_whole = train_step(q, trained)(params, filled, x, y, 1.0)
    got, seen = train_step(of_inside, trained)(params, filled, x, y, 1.0)
    want = largest_of(update_histories(filled, seen_of_whole))
    assert largest_of(update_histories(filled, seen)) == want

    def around(params, histories, x, y):
        return jax.tree.map(lambda v: lax.psum(v, "d"), step(params, histories, x, y, 1.0))

    step = train_step(q, trained)
    specs = P(), P(), P("d"), P("d")
    for check in (True, False):  # under which JAX adds, or the caller does
        of = step if check else around
        sharded = jax.shard_map(
            lambda p, h, x, y, of=of: of(p, h, x, y, 1.0) if of is step else of(p, h, x, y),
            mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check,
        )  # fmt: skip
        outside, seen = jax.jit(sharded)(params, filled, x, y)
        assert largest_of(update_histories(filled, seen)) == want
        for name, g in whole.items():  # the sums of devices are added in float32
            assert np.abs(g - outside[name]).max() < 1e-6 * np.abs(g).max()
            assert np.abs(g - got[name]).max() < 1e-6 * np.abs(g).max()


@pytest.mark.slow
def test_explicit_axes_have_one_history():
    params, x, y, q, trained, histories, _ = whole_batch()
    filled = update_histories(histories, train_step(q, trained)(params, histories, x, y, 1.0, just_in_time=True)[1])
    want, seen_of_whole = train_step(q, trained)(params, filled, x, y, 1.0)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        put = lambda tree, axes: jax.device_put(tree, jax.sharding.NamedSharding(mesh, axes))
        x, y, params, filled = put(x, P("d")), put(y, P("d")), put(params, P()), put(filled, P())
        got, seen = train_step(q, trained)(params, filled, x, y, 1.0)
        assert largest_of(update_histories(filled, seen)) == largest_of(update_histories(filled, seen_of_whole))
    jax.tree.map(assert_same_bits, got, want)


@pytest.mark.slow
def test_devices_have_one_history():
    devices_have_one_history()


@pytest.mark.slow
def test_eight_devices_have_one_history():
    here = pathlib.Path(__file__)
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    code = "import jax, test_histories; assert jax.device_count() == 8; test_histories.devices_have_one_history()"
    subprocess.run([sys.executable, "-c", code], cwd=here.parent, env={**os.environ, **flags}, check=True, timeout=300)


@pytest.mark.slow
def test_turns_of_a_scan_that_share_a_weight_have_one_history():
    w, x, weights = normal(WIDTH, WIDTH) / 8, normal(ROWS, WIDTH), [F(1), F(64), F(1)]

    def f(p, x):  # g of the second turn is far larger
        return lax.scan(lambda x, c: (x, c * (x @ p["w"])), x, jnp.asarray(weights))[1].sum(0)

    q, trained, histories = quantized(f, {"w": w}, E5M2, x)
    _, seen = train_step(q, trained)({"w": w}, histories, x, jnp.zeros_like(x), 1.0)
    history = update_histories(histories, seen)["w:gradient"]
    assert history.bins.shape == (STEPS,)
    y = np.asarray(q({"w": w}, x, qparams=trained))
    assert_same_bits(delayed_qparams({"w": history})["w"].qparams.scale, end_of_bin(64 * np.abs(y).max()) / F(57344))
    counts = seen["w:gradient"].seen
    assert counts.sum() == 3
    assert (counts > 0).sum() == 2


# Kinds of ops


def conv(p, x):
    return lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def ragged(p, x):
    return lax.ragged_dot(x, p["w"], jnp.array([10, 14]))


def attention(p, x):
    return jnp.einsum("ik,jk->ij", jq.quant_point(x @ p["w"], "a"), jq.quant_point(x, "b"))


OPS = {
    "conv": (conv, (3, 3, 4, 8), (2, 6, 6, 4), ["w:input:gradient", "w:gradient"]),
    "ragged": (ragged, (2, 16, 8), (24, 16), ["w:input:gradient", "w:gradient"]),
    "attention": (attention, (16, 16), (24, 16), ["a:gradient", "b:gradient"]),
}


@pytest.mark.slow
@pytest.mark.bits
@cases(("op", "execution"), [(op, e) for op in OPS for e in ("auto", "native")], [("conv", "auto")])
def test_every_op_has_histories(op, execution):
    f, *shapes, keys = OPS[op]
    w, x = (normal(*shape) for shape in shapes)
    kind = {"kind": "act_act", "activation": float8_spec()} if op == "attention" else {"weight": float8_spec()}
    rule = Rule("*", **{"activation": float8_spec(), **kind}, gradient=E5M2, history=STEPS)
    rules = [Rule("w", None), rule] if op == "attention" else [rule]
    q = quantize_fn(f, rules, execution=execution)
    trained, histories = split_histories(q.init_qparams({"w": w}, x))
    assert list(histories) == keys
    y = np.asarray(f({"w": w}, x))
    g = F(rng.normal(size=y.shape))
    pull = lambda delayed: jax.vjp(lambda w, d: q({"w": w}, x, qparams={**trained, **d}), w, delayed)[1](g)
    _, seen = jax.jit(pull)(delayed_qparams(histories))
    histories = update_histories(histories, seen)
    delayed = delayed_qparams(histories)
    for key in keys:
        assert_same_bits(delayed[key].qparams.scale, end_of_bin(np.abs(g).max()) / F(57344), key)
    # With these scales, the gradient is the one of a g that is on their grid already.
    on_grid = jq.fake_quant(g, E5M2, delayed[keys[0]].qparams)
    got, _ = jax.jit(pull)(delayed)
    plain = quantize_fn(f, [*rules[:-1], Rule("*", **{"activation": float8_spec(), **kind})], execution=execution)
    want = jax.jit(lambda g: jax.vjp(lambda w: plain({"w": w}, x, qparams=trained), w)[1](g)[0])(on_grid)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    assert np.abs(got).max() > 0


@pytest.mark.slow
def test_a_branch_not_taken_keeps_its_history():
    w, x = normal(WIDTH, WIDTH), normal(ROWS, WIDTH)
    f = lambda p, x, take: lax.cond(take, lambda x: x @ p["w"], lambda x: x, x)
    q, trained, histories = quantized(f, {"w": w}, E5M2, x, True)
    slope = jax.jit(jax.grad(lambda d, take: q({"w": w}, x, take, qparams={**trained, **d}).sum()))
    histories = update_histories(histories, slope(delayed_qparams(histories), True))
    later = update_histories(histories, slope(delayed_qparams(histories), True))
    assert all(h.bins.tolist() == [h.bins[0]] * 2 + [0] * (STEPS - 2) and h.bins[0] > 0 for h in later.values())
    same = jax.jit(update_histories)(histories, slope(delayed_qparams(histories), False))
    jax.tree.map(assert_same_bits, same, histories)


def test_what_is_larger_than_the_history_is_clipped_and_what_is_not_finite_is_left_out():
    w = normal(WIDTH, WIDTH)
    q, trained, histories = quantized(lambda p, x: x @ p["w"], {"w": w}, QuantSpec(), np.eye(WIDTH, dtype=F))
    pull = lambda d, g: jax.vjp(lambda x, d: q({"w": w}, x, qparams={**trained, **d}), np.eye(WIDTH, dtype=F), d)[1](g)
    g = np.full((WIDTH, WIDTH), F(0.7))
    _, seen = pull(delayed_qparams(histories), g)
    histories = update_histories(histories, seen)
    end = end_of_bin(F(0.7))
    (clipped, seen), (at_end, _) = (pull(delayed_qparams(histories), v) for v in (10 * g, np.full_like(g, end)))
    assert_same_bits(clipped, at_end)
    assert largest_of(update_histories(histories, seen))["w:gradient"] > largest_of(histories)["w:gradient"]
    g[0, 0], g[1, 1] = np.inf, np.nan
    got, seen = pull(delayed_qparams(histories), g)
    assert largest_of(update_histories(histories, seen)) == largest_of(histories)
    assert np.isnan(got).any()


@pytest.mark.slow
def test_a_bin_holds_its_largest_magnitude():
    values = F([1e-45, 1e-38, 2**-126, 1, 3.4e38, 0.999999, *np.exp(rng.uniform(-87, 88, 2000))])
    w = np.eye(1, dtype=F)
    q, trained, histories = quantized(lambda p, x: x @ p["w"], {"w": w}, QuantSpec(), w)

    @jax.jit
    @jax.vmap
    def ends(g):
        _, seen = jax.vjp(lambda w, d: q({"w": w}, w, qparams={**trained, **d}), w, delayed_qparams(histories))[1](g)
        later = delayed_qparams(update_histories(histories, seen))
        return later["w:gradient"].qparams.scale

    scales = np.asarray(ends(values[:, None, None]))
    known = values >= 2**-126  # below, there is no history
    assert (scales[~known] == 1).all()
    with np.errstate(over="ignore"):
        expected = np.minimum(end_of_bin(values), np.finfo(F).max / 2) / F(127)
    assert_same_bits(scales[known], np.maximum(expected[known], F(2**-126)))


# A train step


@pytest.mark.slow
def test_an_optimizer_takes_what_is_no_history(tmp_path):
    optax = pytest.importorskip("optax", reason="of the extra `frameworks`")
    params, (x, y) = {"w0": normal(WIDTH, WIDTH) / 4, "w1": normal(WIDTH, WIDTH) / 4}, normal(2, ROWS, WIDTH)
    q = quantize_fn(loop, [Rule("**", QuantSpec(), QuantSpec(), gradient=E5M2, history=STEPS)])
    trained, histories = split_histories(q.init_qparams(params, x))
    adam, standard = optax.adamw(3e-3), jax.numpy_dtype_promotion("standard")

    def loss(learned, delayed):
        params, trained = learned
        return ((q(params, x, qparams={**jq.from_log2(trained), **delayed}) - y) ** 2).mean()

    @jax.jit
    def step(learned, histories, state):
        value, (slopes, seen) = jax.value_and_grad(loss, (0, 1))(learned, delayed_qparams(histories))
        with standard:  # which optax needs
            updates, state = adam.update(slopes, state, learned)
        return optax.apply_updates(learned, updates), update_histories(histories, seen), state, value

    learned = params, jq.to_log2(trained)
    state, values = adam.init(learned), []
    for _ in range(60):
        learned, histories, state, value = step(learned, histories, state)
        values.append(float(value))
    assert values[-1] < 0.8 * values[0]
    assert all((h.bins > 0).all() for h in histories.values())
    # A checkpoint of it, and the model that is served.
    jq.save(tmp_path / "state.npz", histories)
    jax.tree.map(assert_same_bits, jq.load(tmp_path / "state.npz", like=histories), histories)
    params, trained = learned[0], jq.from_log2(learned[1])
    frozen = q.freeze(params, x, qparams=trained)
    assert_same_bits(q(frozen, x, qparams=trained), q(params, x, qparams=trained))


@pytest.mark.slow
def test_an_exported_step_takes_and_returns_histories():
    w, x = normal(WIDTH, WIDTH), normal(ROWS, WIDTH)
    q, trained, histories = quantized(lambda p, x: x @ p["w"], {"w": w}, E5M2, x)
    step = jax.jit(lambda p, h, x: train_step(q, trained)(p, h, x, x, 1.0))
    exported = jax.export.deserialize(jax.export.export(step)({"w": w}, histories, x).serialize())
    jax.tree.map(assert_same_bits, exported.call({"w": w}, histories, x), step({"w": w}, histories, x))


# Mistakes


@functools.cache
def simple():
    w, x = np.eye(4, dtype=F), np.ones((3, 4), F)
    return w, x, *quantized(lambda p, x: x @ p["w"], {"w": w}, E5M2, x)


MISTAKES = {
    "histories in a call": (
        lambda w, x, q, trained, histories: q({"w": w}, x, qparams={**trained, **histories}),
        TypeError, "'w:input:gradient'.*split_histories",
    ),
    "a gradient without them": (
        lambda w, x, q, trained, _: jax.grad(lambda w: q({"w": w}, x, qparams=trained).sum())(w),
        ValueError, "'w:input:gradient'.*delayed_qparams",
    ),
    "a gradient without qparams": (
        lambda w, x, q, *_: jax.grad(lambda w: q({"w": w}, x).sum())(w), ValueError, "delayed_qparams",
    ),
    "the gradient of a history": (
        lambda w, x, q, trained, histories: jax.grad(
            lambda h: q({"w": w}, x, qparams={**trained, **delayed_qparams(h)}).sum()
        )(histories),
        TypeError, "int32",
    ),
    "in the other order": (
        lambda *a: update_histories(delayed_qparams(a[-1]), a[-1]), TypeError, "dict of DelayedQParams",
    ),
    "nothing seen": (
        lambda *a: update_histories(a[-1], delayed_qparams(a[-1])), ValueError, "seen no gradient",
    ),
    "other entries": (
        lambda *a: update_histories(a[-1], {"w:gradient": delayed_qparams(a[-1])["w:gradient"]}),
        ValueError, "'w:input:gradient'",
    ),
    "of another spec": (
        lambda w, x, q, trained, histories: q({"w": w}, x, qparams={
            **trained, **delayed_qparams({n: GradientHistory(h.bins, QuantSpec()) for n, h in histories.items()})
        }),
        TypeError, "float8_e5m2.*got seen of shape",
    ),
    "qparams for a history": (
        lambda w, x, q, trained, _: q({"w": w}, x, qparams={**trained, "w:gradient": INPUT}), TypeError, "got QParams",
    ),
    "without a history": (lambda w, x, q, trained, _: split_histories(trained), TypeError, "history="),
    "histories in freeze": (
        lambda w, x, q, trained, histories: q.freeze({"w": w}, x, qparams={**trained, **histories}),
        TypeError, "split_histories",
    ),
    "in rows": (
        lambda *_: Rule("w", QuantSpec(), QuantSpec(), gradient=QuantSpec(granularity=jq.PerToken()), history=4),
        ValueError, "PerTensor",
    ),
    "without a gradient": (lambda *_: Rule("w", QuantSpec(), QuantSpec(), history=4), ValueError, "gradient=None"),
    "negative": (lambda *_: Rule("w", QuantSpec(), QuantSpec(), gradient=E5M2, history=-1), ValueError, "history"),
    "of a cache": (lambda *_: Rule("w", kind="cache", history=4), ValueError, "history"),
    "of parameters alone": (
        lambda w, *_: jq.fake_quant_params({"w": w}, [Rule("w", QuantSpec(), gradient=E5M2, history=4)]),
        ValueError, "history=4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_errors(mistake):
    make, kind, text = MISTAKES[mistake]
    with pytest.raises(kind, match=text):
        make(*simple())


def test_without_a_gradient_the_program_is_that_without_a_history():
    w, x, q, trained, _ = simple()
    plain = quantize_fn(lambda p, x: x @ p["w"], [Rule("**", QuantSpec(), QuantSpec(), gradient=E5M2)])
    text = lambda q, qparams: jax.jit(lambda w, x: q({"w": w}, x, qparams=qparams)).lower(w, x).as_text()
    assert text(q, trained) == text(plain, trained)


@by_default("nan")
@pytest.mark.parametrize("bad", [np.inf, np.nan, 0.0])
def test_a_step_without_a_finite_gradient_leaves_the_history(bad):
    """As many as the history is long, as a loss scaler drops them: the next good gradient is rounded as before."""
    rng = np.random.default_rng(0)
    params, x = {"w": rng.normal(size=(8, 4)).astype(np.float32)}, rng.normal(size=(6, 8)).astype(np.float32)
    q = quantize_fn(lambda p, x: x @ p["w"], [Rule("w", QuantSpec(), QuantSpec(), gradient=QuantSpec(), history=2)])
    trained, histories = split_histories(q.init_qparams(params, x))
    loss = lambda params, delayed, scale: scale * jnp.square(q(params, x, qparams={**trained, **delayed})).sum()
    gradient = jax.jit(jax.grad(loss, (0, 1)))
    for just_in_time in (True, False):
        good, seen = gradient(params, delayed_qparams(histories, just_in_time=just_in_time), np.float32(1))
        histories = update_histories(histories, seen)
    before = histories
    for _ in range(3):
        _, seen = gradient(params, delayed_qparams(histories), np.float32(bad))
        histories = update_histories(histories, seen)
    for key, history in histories.items():
        np.testing.assert_array_equal(history.bins, before[key].bins)
    assert_same_bits(gradient(params, delayed_qparams(histories), np.float32(1))[0]["w"], good["w"])
