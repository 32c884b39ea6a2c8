# SPDX-License-Identifier: Apache-2.0
"""What solvers gain over rounding to nearest, without training, and QAT beside them: a language model, three seeds.

The model is that of notebooks/05_train_freeze_serve, three times as wide, trained in float. The weights of its layers
are quantized; the embedding, which is the output too, stays in float. Every cell of the table is served once: the
integers of `q.freeze` must give the logits of the solved parameters, bit for bit.
"""

import functools
import json
import pathlib
import pydoc_data.topics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxquant import PerToken, Rule, activation_spec, merge_grams, quantize_fn, solve, weight_spec

from .runner import Part, Ratio, compared, kept, verdict

DATA = pathlib.Path(__file__).parent / "data" / "solvers.json"
LAYERS, WIDTH, HEADS, LENGTH = 2, 192, 4, 64
SEEDS, STEPS, BATCH, RATE = range(3), 1500, 16, 3e-3
QAT_STEPS, QAT_BATCH, QAT_RATE = 300, 8, 5e-4
CALIBRATION = 8, 32  # batches, windows in each


def text():
    """Python's documentation in numbers, the last tenth apart, and how many characters there are."""
    characters = "".join(c for c in "".join(pydoc_data.topics.topics.values()) if c.isascii())
    alphabet, data = np.unique(list(characters), return_inverse=True)
    return *np.split(data.astype(np.int32), [len(data) * 9 // 10]), len(alphabet)


TRAINING, HELD_OUT, SYMBOLS = text()
TEST = HELD_OUT[: len(HELD_OUT) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)[:320]


def windows(seed, *shape):
    starts = np.random.default_rng(seed).integers(0, len(TRAINING) - LENGTH - 1, shape)
    return TRAINING[starts[..., None] + np.arange(LENGTH + 1)]


def model(params, tokens):
    normed = lambda x, scale: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
    x = params["embedding"][tokens] + params["positions"]
    unseen = jnp.triu(jnp.full((LENGTH, LENGTH), -1e30), 1)

    def layer(x, p):
        q, k, v = jnp.split(normed(x, p["norms"][0]) @ p["qkv"], 3, -1)
        heads = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
        scores = jnp.einsum("bthk,bshk->bhts", heads(q), heads(k)) / (WIDTH / HEADS) ** 0.5
        attended = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores + unseen), heads(v))
        x = x + attended.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(normed(x, p["norms"][1]) @ p["up"]) @ p["down"], None

    x, _ = lax.scan(layer, x, params["layers"])
    return normed(x, params["norm"]) @ params["embedding"].T


def init(seed):
    keys = iter(jax.random.split(jax.random.key(seed), 6))
    normal = lambda size, *shape: size * jax.random.normal(next(keys), shape)
    one, deep = WIDTH**-0.5, (2 * LAYERS * WIDTH) ** -0.5
    layers = {
        "norms": jnp.ones((LAYERS, 2, WIDTH)),
        "qkv": normal(one, LAYERS, WIDTH, 3 * WIDTH),
        "out": normal(deep, LAYERS, WIDTH, WIDTH),
        "up": normal(one, LAYERS, WIDTH, 4 * WIDTH),
        "down": normal(deep / 2, LAYERS, 4 * WIDTH, WIDTH),
    }
    ends = {"embedding": normal(one, SYMBOLS, WIDTH), "positions": normal(0.1, LENGTH, WIDTH)}
    return {**ends, "layers": layers, "norm": jnp.ones(WIDTH)}


def bits(logits, targets):
    """Per character."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean() / jnp.log(2)


@functools.partial(jax.jit, static_argnames=("f", "rate"))
def train(f, params, batches, rate):
    steps = len(batches)
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, rate, steps // 20, steps), b2=0.98)

    def step(carry, tokens):
        params, state = carry
        gradient = jax.grad(lambda p: bits(f(p, tokens[:, :-1]), tokens[:, 1:]))(params)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), None

    return lax.scan(step, (params, optimizer.init(params)), batches)[0][0]


@functools.cache
def trained(seed, steps):
    return train(model, init(seed), windows(seed, steps, BATCH), RATE)


def minmax(q, params, calibration, **kw):
    return q.init_qparams(params, calibration[0], ranges={}, **kw)


def trained_on(f, params):
    return train(f, params, windows(1000, QAT_STEPS, QAT_BATCH), QAT_RATE)


def of_ranges(q, params, grams, calibration):
    return params, solve.ranges(params, q, grams, calibration[0])


def gptq(q, params, grams, calibration, scales=minmax):
    qparams = scales(q, params, calibration)
    return solve.gptq(params, q, grams, calibration[0], qparams=qparams), qparams


def gptq_of_ranges(q, params, grams, calibration):
    return gptq(q, params, grams, calibration, lambda *_: of_ranges(q, params, grams, calibration)[1])


def qat(q, params, grams, calibration):
    params = trained_on(q, params)
    return params, minmax(q, params, calibration)


# (q, params, grams, calibration) -> the params and qparams to call q with, or to freeze.
WAYS = {
    "nearest": lambda q, params, grams, calibration: (params, minmax(q, params, calibration)),
    "nearest, mse": lambda q, params, grams, calibration: (params, minmax(q, params, calibration, method="mse")),
    "ranges": of_ranges,
    "gptq": gptq,
    "gptq of ranges": gptq_of_ranges,
    "QAT": qat,
}


def rules(weight_bits, block_size=None, input_bits=None):
    activation = input_bits and activation_spec(input_bits, symmetric=True, granularity=PerToken())
    return [Rule("layers/*", weight_spec(weight_bits, block_size=block_size), activation)]


SETTINGS = {
    "w8a8": rules(8, input_bits=8),
    "w4a8": rules(4, input_bits=8),
    "w4a4": rules(4, input_bits=4),
    "w4 in groups of 32": rules(4, 32),
    "w4": rules(4),
    "w3 in groups of 32": rules(3, 32),
    "w3": rules(3),
    "w2 in groups of 32": rules(2, 32),
    "w2": rules(2),
}


def calibrated(q, params, seed):
    calibration = windows(2000 + seed, *CALIBRATION)[..., :-1]
    return merge_grams(*(q.observe(params, tokens, gram=True) for tokens in calibration)), calibration


def served(q, params, qparams, what):
    """The bits per character of a model on the held-out text; and its integers must give the same logits."""
    tokens, targets = TEST[:, :-1], TEST[:, 1:]
    logits = np.asarray(q(params, tokens, qparams=qparams))
    again = np.asarray(q(q.freeze(params, tokens, qparams=qparams), tokens, qparams=qparams))
    if wrong := (logits.view(np.uint32) != again.view(np.uint32)).sum():
        raise AssertionError(f"{what}: {wrong} of {logits.size} logits differ after q.freeze.")
    return float(bits(logits, targets))


def cell(values, in_float):
    """The mean over the seeds, and how much more it is than in float, give or take half of what the seeds span."""
    more = np.subtract(values, in_float)
    return f"{np.mean(values):.3f} ({more.mean():+.3f} ± {np.ptp(more) / 2:.3f})"


def bit_rows(steps, *names):
    seeds = SEEDS if steps == STEPS else SEEDS[:1]
    test = lambda params: float(bits(jax.jit(model)(params, TEST[:, :-1]), TEST[:, 1:]))
    in_float = [test(trained(seed, steps)) for seed in seeds]
    longer = [test(trained_on(model, trained(seed, steps))) for seed in seeds]
    found = {"float32": {"nearest": in_float, "QAT": longer}}
    yield "float32", *(cell(found["float32"][way], in_float) if way in found["float32"] else "" for way in WAYS)
    for name in names:
        q, of_setting = quantize_fn(model, SETTINGS[name]), {way: [] for way in WAYS}
        for seed in seeds:
            params = trained(seed, steps)
            grams, calibration = calibrated(q, params, seed)
            for way, solved in WAYS.items():
                of_setting[way].append(served(q, *solved(q, params, grams, calibration), f"{name}, {way}, {seed}"))
        found[name] = of_setting
        yield name, *(cell(values, in_float) for values in of_setting.values())
    if steps == STEPS:
        DATA.write_text(json.dumps(found, indent=1) + "\n")


def second_rows(rounds, *names):
    """The CPU time of each way, which is the same for all parameters: with compiling, and of calls after it."""
    for name in names:
        params = init(0)
        for way, solved in WAYS.items():
            q = quantize_fn(model, SETTINGS[name])
            grams, calibration = calibrated(q, params, 0)
            jax.clear_caches()
            times = []
            for _ in range(1 + rounds):
                start = time.process_time()
                jax.block_until_ready(solved(q, params, grams, calibration))
                times.append(time.process_time() - start)
            yield f"{way}, {name}", times[0], Ratio(*np.quantile(times[1:], [0.5, 0.25, 0.75]))


def gram_rows(rounds):
    q, params, tokens = quantize_fn(model, SETTINGS["w4"]), init(0), windows(0, CALIBRATION[1])[:, :-1]
    observe = lambda **kw: kept(lambda p, x: q.observe(p, x, gram=True, **kw), params, tokens)
    small = ["layers/qkv", "layers/out", "layers/up"]
    runs = {"evaluation": kept(model, params, tokens), "all": observe(), "small": observe(entries=small)}
    to = compared(runs, rounds)
    yield "q.observe(gram=True) of 32 windows", to("all", "evaluation"), verdict(to("all", "evaluation"), 2.5)
    yield "of the weights with 192 inputs, without `down`, which has 768", to("small", "evaluation"), ""


PACKAGES = ("optax",)
PARTS = {
    "bits": Part(("bits per character", *WAYS), bit_rows, STEPS, tuple(SETTINGS)),
    "seconds": Part(("CPU seconds", "first call", "another"), second_rows, 5, ("w4",)),
    "gram": Part(("to an evaluation in float", "time", "goal"), gram_rows, 40),
}
