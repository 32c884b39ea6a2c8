# SPDX-License-Identifier: Apache-2.0
"""What an ordinary optimizer does to learned scales: Adam on parameters and qparams together, in five ways.

Each row is 500 steps of QAT from a trained float model, weights and inputs with learned ranges. A cell says how many
scales ended at 0, below, or as no number, and what the model does on its test set.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxquant import QParams, Rule, activation_spec, from_log2, quantize_fn, to_log2, weight_spec

from .mixed_precision import MODELS, Trained, cross_entropy, digits, train
from .runner import Part

STEPS = 500


def mlp(params, x):
    x = jax.nn.relu(x.reshape(x.shape[0], -1) @ params["first"])
    return jax.nn.relu(x @ params["second"]) @ params["head"]


def digits_mlp(seed):
    _, _, batches, calibration, test = digits(seed)
    shapes = {"first": (64, 64), "second": (64, 64), "head": (64, 10)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    params = {
        name: jax.random.normal(key, shape) * (2 / shape[0]) ** 0.5
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    return Trained(mlp, train(mlp, params, batches, 5e-3), batches, calibration, test)


def floored(qparams, start):
    """The scale no smaller than a hundredth of what it was, straight through: an op with a floor."""
    is_pair = lambda v: isinstance(v, QParams)
    through = lambda scale, floor: scale + lax.stop_gradient(jnp.maximum(scale, floor) - scale)
    of = lambda v, first: v._replace(scale=through(v.scale, first.scale / 100))
    return jax.tree.map(of, qparams, start, is_leaf=is_pair)


def smallest(qparams):
    return min(float(v.scale.min()) for v in qparams.values())


# How qparams become what is trained, and back; and whether the gradient is LSQ's.
plain = lambda v: v
WAYS = {
    "a rate of their own": (plain, lambda v, start: v, False),
    "together": (plain, lambda v, start: v, False),
    "together, LSQ's factor": (plain, lambda v, start: v, True),
    "together, a floor": (plain, floored, False),
    "together, log2": (to_log2, lambda v, start: from_log2(v), False),
}


def learned(q, model, qparams, way, rate):
    """Parameters and qparams after some steps."""
    made, back, lsq = WAYS[way]
    of_scales = optax.adam(0.01 * smallest(qparams) if way == "a rate of their own" else rate)
    labels = lambda trained: ("params", "qparams")
    optimizer = optax.multi_transform({"params": optax.adam(rate), "qparams": of_scales}, labels)
    at = jnp.arange(STEPS) % len(model.batches[0])

    def loss(trained, x, y):
        return cross_entropy(q(trained[0], x, qparams=back(trained[1], qparams), lsq_gradient=lsq), y)

    @jax.jit
    def run(trained):
        def step(carry, i):
            trained, state = carry
            x, y = jax.tree.map(lambda v: jnp.asarray(v)[i], model.batches)
            updates, state = optimizer.update(jax.grad(loss)(trained, x, y), state, trained)
            return (optax.apply_updates(trained, updates), state), None

        return lax.scan(step, (trained, optimizer.init(trained)), at)[0][0]

    params, trained = run((model.params, made(qparams)))
    return params, back(trained, qparams), trained if way == "together, a floor" else back(trained, qparams)


def rows(seeds, *names):
    for name in names:
        for bits in (4, 2):
            for rate in (1e-3, 1e-2):
                cells, scales, is_class = {way: [] for way in WAYS}, 0, False
                for seed in range(seeds):
                    model = THREE[name](seed)
                    q = quantize_fn(model.f, [Rule("**", weight_spec(bits), activation_spec(8))])
                    x, y = model.test
                    qparams = q.init_qparams(model.params, model.calibration[0], method="mse")
                    scales = sum(v.scale.size for v in qparams.values())
                    for way in WAYS:
                        params, used, trained = learned(q, model, qparams, way, rate)
                        lost = sum(int((~(v.scale > 0)).sum()) for v in trained.values())
                        logits = jax.jit(lambda p, x, s, q=q: q(p, x, qparams=s))(params, x, used)
                        is_class = logits.ndim == 2
                        got = 100 * (logits.argmax(-1) == y).mean() if is_class else cross_entropy(logits, y)
                        cells[way].append((lost, float(got)))
                said = [
                    f"{max(lost for lost, _ in of)}; {np.mean([got for _, got in of]):.{1 if is_class else 3}f}"
                    f"{' %' if is_class else ''}"
                    for of in cells.values()
                ]
                yield name, bits, f"{rate:g}", scales, *said


THREE = {"CNN on digits": digits, "MLP on digits": digits_mlp, "character model": MODELS["character model"]}
PACKAGES = "optax", "scikit-learn"
PARTS = {"ways": Part(("model", "bits", "rate", "scales", *WAYS), rows, 3, tuple(THREE))}
