# SPDX-License-Identifier: Apache-2.0
"""What solvers gain over rounding to nearest, without training, and QAT beside them: a language model, three seeds.

The model is a character transformer of width 192, trained in float. The weights of its layers are quantized; the
embedding, which is the output too, stays in float. Every cell of the table is served once: the integers of `q.freeze`
must give the logits of the solved parameters, bit for bit.

A full run measures the bits per character that data/solvers.json lacks, such as of a new way, and keeps the others;
delete the file to measure all of them.
"""

import functools
import json
import pathlib
import pydoc_data.topics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxquant import PerToken, Rule, activation_spec, merge, quantize_fn, solve, weight_spec

from .runner import Part, Ratio, compared, kept

DATA = pathlib.Path(__file__).parent / "data" / "solvers.json"
LAYERS, WIDTH, HEADS, LENGTH = 2, 192, 4, 64
SEEDS, STEPS, BATCH, RATE = range(3), 1500, 16, 3e-3
QAT_STEPS, QAT_BATCH, QAT_RATE = 300, 8, 5e-4
CALIBRATION = 8, 32  # batches, windows in each
ROUNDS = 5  # of seconds


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


@functools.cache
def quantized(f, rules):
    return quantize_fn(f, rules)


class Case(NamedTuple):
    """A float model, rules, and what was observed of it."""

    rules: tuple[Rule, ...]
    params: Any
    calibration: Any  # batches of tokens
    grams: Any
    f: Any = model

    @property
    def q(self):
        return quantized(self.f, self.rules)


def observed(rules, params, calibration, f=model):
    grams = (quantized(f, rules).observe(params, tokens, gram=True) for tokens in calibration)
    return Case(rules, params, calibration, merge(*grams), f)


def minmax(case, **kw):
    return case.q.init_qparams(case.params, case.calibration[0], ranges={}, **kw)


def ranges(case, **kw):
    return solve.ranges(case.params, case.q, case.grams, case.calibration[0], **kw)


def nearest(case, scales=minmax):
    return case.q, case.params, scales(case)


def rounded(solver, case, scales=minmax):
    qparams = scales(case)
    return case.q, solver(case.params, case.q, case.grams, case.calibration[0], qparams=qparams), qparams


def smoothed(case):
    params = solve.smooth(case.params, case.q, case.grams, case.calibration[0])
    return observed(case.rules, params, case.calibration)


def rotated(case):
    f = solve.with_rotation(model, [rule.pattern for rule in case.rules])
    return observed(case.rules, f.init(case.params, case.calibration[0]), case.calibration, f)


def trained_on(f, params):
    return train(f, params, windows(1000, QAT_STEPS, QAT_BATCH), QAT_RATE)


# case -> the quantized function, and the params and qparams to call it with, or to freeze.
WAYS = {
    "nearest": nearest,
    "nearest, mse": lambda case: nearest(case, functools.partial(minmax, method="mse")),
    "ranges": lambda case: nearest(case, ranges),
    "gptq": lambda case: rounded(solve.gptq, case),
    "gptq of ranges": lambda case: rounded(solve.gptq, case, ranges),
    "gptq of its ranges": lambda case: rounded(solve.gptq, case, functools.partial(ranges, method="gptq")),
    "adaround": lambda case: rounded(solve.adaround, case),
    "adaround of ranges": lambda case: rounded(solve.adaround, case, ranges),
    "smooth": lambda case: nearest(smoothed(case)),
    "smooth, then gptq": lambda case: rounded(solve.gptq, smoothed(case)),
    "rotate": lambda case: nearest(rotated(case)),
    "rotate, then gptq": lambda case: rounded(solve.gptq, rotated(case)),
    "QAT": lambda case: nearest(case._replace(params=trained_on(case.q, case.params))),
}


def rules(weight_bits, block_size=None, input_bits=None):
    activation = input_bits and activation_spec(input_bits, symmetric=True, granularity=PerToken())
    return (Rule("layers/*", weight_spec(weight_bits, block_size=block_size), activation),)


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
FEW = tuple(name for name in SETTINGS if name[:2] in ("w3", "w2"))
MANY = tuple(name for name in SETTINGS if name not in FEW)


def served(model, what):
    """The bits per character of a model on the held-out text; and its integers must give the same logits."""
    (q, params, qparams), tokens, targets = model, TEST[:, :-1], TEST[:, 1:]
    logits = np.asarray(q(params, tokens, qparams=qparams))
    again = np.asarray(q(q.freeze(params, tokens, qparams=qparams), tokens, qparams=qparams))
    if wrong := (logits.view(np.uint32) != again.view(np.uint32)).sum():
        raise AssertionError(f"{what}: {wrong} of {logits.size} logits differ after q.freeze.")
    return float(bits(logits, targets))


def bits_of(steps, seed, name, ways):
    """Of each way the bits per character in a setting; each is served."""
    case = observed(SETTINGS[name], trained(seed, steps), windows(2000 + seed, *CALIBRATION)[..., :-1])
    return {way: served(WAYS[way](case), f"{name}, {way}, {seed}") for way in ways}


def bits_in_float(steps, seed, _, ways):
    """Of the model as it was trained, and trained on for as many steps as QAT."""
    params = {"nearest": lambda params: params, "QAT": lambda params: trained_on(model, params)}
    test = lambda params: float(bits(jax.jit(model)(params, TEST[:, :-1]), TEST[:, 1:]))
    return {way: test(params[way](trained(seed, steps))) for way in ways}


def before():
    """What the last full run has found."""
    return json.loads(DATA.read_text()) if DATA.exists() else {"bits": {}, "seconds": {}}


def measured(steps, names):
    """{setting: {way: bits per character of each seed}}. A full run keeps what DATA has, and writes it as it goes."""
    found = before() if steps == STEPS else {"bits": {}}
    seeds = SEEDS if steps == STEPS else SEEDS[:1]
    for name in ("float32", *names):
        ways, of = (("nearest", "QAT"), bits_in_float) if name == "float32" else (tuple(WAYS), bits_of)
        had = found["bits"].get(name, {})
        missing = [way for way in ways if way not in had]
        if missing and name != "float32":
            again = [bits_in_float(steps, seed, name, ["nearest"])["nearest"] for seed in seeds]
            if again != found["bits"]["float32"]["nearest"]:
                raise AssertionError(f"Other models than those of {DATA.name} have been trained: delete it.")
        each = [of(steps, seed, name, missing) for seed in seeds] if missing else []
        found["bits"][name] = {way: had.get(way) or [one[way] for one in each] for way in ways}
        if steps == STEPS:
            DATA.write_text(json.dumps(found, indent=1) + "\n")
    return found["bits"]


def cell(values, in_float):
    """The mean over the seeds, and how much more it is than in float, give or take half of what the seeds span."""
    more = np.subtract(values, in_float)
    return f"{np.mean(values):.3f} ({more.mean():+.3f} ± {np.ptp(more) / 2:.3f})"


def bit_rows(columns, steps, *names):
    found = measured(steps, names)
    in_float = found["float32"]["nearest"]
    for way in WAYS:
        each = (found.get(name, {}).get(way) for name in columns)
        yield way, *(cell(values, in_float) if values else "" for values in each)


def second_rows(rounds, name):
    """The CPU time of each way, which is the same for all parameters: with compiling, and of calls after it."""
    found = before()
    for way, solved in WAYS.items():
        quantized.cache_clear()
        case = observed(SETTINGS[name], init(0), windows(2000, *CALIBRATION)[..., :-1])
        jax.clear_caches()
        times = []
        for _ in range(1 + rounds):
            start = time.process_time()
            jax.block_until_ready(solved(case)[1:])
            times.append(time.process_time() - start)
        found["seconds"][way] = [times[0], float(np.median(times[1:]))]
        yield way, times[0], Ratio(*np.quantile(times[1:], [0.5, 0.25, 0.75]))
    if rounds == ROUNDS:
        DATA.write_text(json.dumps(found, indent=1) + "\n")


def gram_rows(rounds):
    q, params, tokens = quantized(SETTINGS["w4"]), init(0), windows(0, CALIBRATION[1])[:, :-1]
    observe = lambda **kw: kept(lambda p, x: q.observe(p, x, gram=True, **kw), params, tokens)
    small = ["layers/qkv", "layers/out", "layers/up"]
    runs = {"evaluation": kept(model, params, tokens), "all": observe(), "small": observe(entries=small)}
    to = compared(runs, rounds)
    yield "q.observe(gram=True) of 32 windows", to("all", "evaluation")
    yield "of the weights with 192 inputs, without `down`, which has 768", to("small", "evaluation"), ""


PACKAGES = ("optax",)
PARTS = {
    "bits": Part(
        ("bits per character", "float32", *MANY), functools.partial(bit_rows, ("float32", *MANY)), STEPS, MANY
    ),
    "few_bits": Part(("bits per character", *FEW), functools.partial(bit_rows, FEW), STEPS, FEW),
    "seconds": Part(("CPU seconds, w4", "first call", "another"), second_rows, ROUNDS, ("w4",)),
    "gram": Part(("to an evaluation in float", "time"), gram_rows, 40),
}
