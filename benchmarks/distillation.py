# SPDX-License-Identifier: Apache-2.0
"""What distillation adds to a solver on a real language model: SmolLM2-135M, its own float logits as the teacher.

Adam takes a step for each of 200 windows of 256 tokens, of the half of Python's help that calibrates; the other half is
evaluated, as by `language_model`. The loss is the KL divergence from the float model's predictions.

Weights are counted in levels. They start with the distance from their level that they have in float, so that they round
to what the solver has chosen, and some are near another. A scale takes its levels with it.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxquant import QArray, dequantize, from_log2, quantize_fn, solve, to_log2, weight_spec

from . import smollm2
from .language_model import PARAMS, grams_of_model, halves, text
from .runner import Part
from .smollm2 import missing as missing

GROUP, WINDOW = 64, 256
RATES = {"weights": 1e-3, "scales": 2e-3}  # of Adam: in levels, and for the logarithms of scales

Student = Callable[[Any, Any, Array], Array]  # of what is trained, what is fixed, and tokens


def trained(student: Student, params: dict[str, Any], fixed: Any, steps: int) -> dict[str, Any]:
    """The params after so many steps, each at its rate."""
    windows = smollm2.windows(halves()[0], steps, WINDOW)[:, :-1]
    rates: dict[Any, Any] = {name: optax.adam(optax.cosine_decay_schedule(RATES[name], steps)) for name in params}
    optimizer = optax.partition(rates, {name: name for name in params})
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, fixed: Any, tokens: Array) -> tuple[Any, Any]:
        want = jax.nn.log_softmax(smollm2.logits(fixed["teacher"], tokens))

        def divergence(params: Any) -> Array:
            got = jax.nn.log_softmax(student(params, fixed, tokens))
            return optax.losses.kl_divergence_with_log_targets(got, want).mean()

        updates, state = optimizer.update(jax.grad(divergence)(params), state)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, params)
    for i in np.random.default_rng(0).permutation(steps):
        params, state = step(params, state, fixed, jnp.asarray(windows[i])[None])
    return params


def level(qparams: Any, name: str) -> Array:
    """The distance between two levels, for each weight."""
    return jnp.repeat(qparams[f"layers/{name}"].scale, GROUP, 1)


def rows(steps: int, *bits: int) -> Iterator[tuple]:
    teacher, (evaluated, batches) = smollm2.parameters(), text()
    for n in bits:
        q, grams = quantize_fn(smollm2.logits, [(PARAMS, weight_spec(n, block_size=GROUP))]), grams_of_model()
        qparams = solve.ranges(teacher, q, grams, batches[0])
        solved = solve.gptq(teacher, q, grams, batches[0], qparams=qparams)
        nearest = q.freeze(teacher, batches[0], qparams=qparams)["layers"]

        def student(params: Any, fixed: Any, tokens: Array, q: Any = q) -> Array:
            of, teacher = fixed | params, fixed["teacher"]
            qparams = from_log2(of["scales"])
            layers = {name: w * level(qparams, name) for name, w in of["weights"].items()}
            return q(teacher | {"layers": teacher["layers"] | layers}, tokens, qparams=qparams)

        def told(params: Any, fixed: Any, student: Student = student) -> float:
            return smollm2.perplexity(functools.partial(jax.jit(student), params, fixed), evaluated)

        weights = {
            name: (teacher["layers"][name] + solved["layers"][name] - dequantize(v)) / level(qparams, name)
            for name, v in nearest.items()
            if isinstance(v, QArray)
        }
        both = {"weights": weights, "scales": to_log2(qparams)}
        fixed = {"teacher": teacher, **both}
        yield (
            f"{n} bits",
            told({}, fixed),
            told(trained(student, {"scales": both["scales"]}, fixed, steps), fixed),
            told(trained(student, both, fixed, steps), fixed),
        )


PACKAGES = "gguf", "tokenizers", "optax"
COLUMNS = "SmolLM2-135M, groups of 64", "`solve.gptq` of `ranges`", "scales distilled", "weights and scales distilled"
PARTS = {"steps": Part(COLUMNS, rows, 200, (3, 4))}
