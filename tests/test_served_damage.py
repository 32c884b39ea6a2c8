# SPDX-License-Identifier: Apache-2.0
"""A served call, damaged in every way there is: the bits of what was trained, or an error of ours, and nothing else."""

import collections
import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lanes import cases
from uses import normal

import jaxquant
from jaxquant import PerTensor, PerToken, QArray, QParams, Range, Rule, activation_spec, quantize_fn, weight_spec

W8, A8 = weight_spec(8), activation_spec(8)


def mlp(p, x):
    return jax.nn.relu(x @ p["a"] + p["bias"]) @ p["b"]


def cnn(p, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jax.nn.relu(lax.conv_general_dilated(x, p["conv"], (1, 1), "SAME", dimension_numbers=numbers))
    return x.reshape(x.shape[0], -1) @ p["head"]


def language_model(p, tokens):
    layer = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)
    x, _ = lax.scan(layer, p["embedding"][tokens], p["layers"])
    return x @ p["embedding"].T + p["bias"]


TOKENS = np.random.default_rng(9).integers(1, 30, (2, 5), np.int32)
LAYERS = {"up": normal(1, 3, 8, 16), "down": normal(2, 3, 16, 8)}
MODELS = {
    "mlp": (mlp, {"a": normal(0, 6, 10), "bias": normal(1, 1, 10), "b": normal(2, 10, 3)}, normal(3, 4, 6)),
    "cnn": (cnn, {"conv": normal(0, 3, 2, 1, 4), "head": normal(1, 64, 3)}, normal(2, 2, 4, 4, 1)),
    "language model": (
        language_model,
        {"embedding": normal(0, 30, 8), "layers": LAYERS, "bias": normal(3, 1, 1, 30)},
        TOKENS,
    ),
}


def rules(weight=W8, activation=A8):
    return [Rule("bias", optional=True), Rule("**", weight, activation, everywhere=True)]


@functools.cache
def served(name):
    f, params, x = MODELS[name]
    q = quantize_fn(f, rules())
    full = lambda v, end: np.full(v.shape, end, np.float32)
    seen = jax.eval_shape(lambda p: q.observe(p, x), params)
    ranges = {key: Range(full(r.x_min, -1), full(r.x_max, 2)) for key, r in seen.items()}
    qparams = q.init_qparams(params, x, ranges=ranges)
    return q, params, x, qparams, q.freeze(params, x, qparams=qparams)


def other_training(of):
    return of and of._replace(scale=np.asarray(of.scale) * np.float32(1.25))


def with_leaves(tree, kind):
    """The tree with one leaf after the other changed, of those inside of a kind: (name, change, tree)."""
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, tree))  # of NumPy, whose changes are not compiled
    is_kind = lambda v: isinstance(v, kind)
    inside = jax.tree.leaves(jax.tree.map(lambda v: jax.tree.map(lambda _: is_kind(v), v), tree, is_leaf=is_kind))
    changes = {
        "cast to bfloat16": lambda v: v.astype(jnp.bfloat16),
        "cast to int16": lambda v: v.astype(jnp.int16),
        "transposed": lambda v: v.T if v.T.shape != v.shape else None,
        "sliced": lambda v: v[1:] if v.ndim and v.shape[0] > 1 else None,
        "cut": lambda v: v[..., 1:] if v.ndim and v.shape[-1] > 1 else None,
    }
    for i, (leaf, is_inside) in enumerate(zip(leaves, inside, strict=True)):
        for name, change in changes.items():
            if is_inside and (new := change(leaf)) is not None:
                yield name, jax.tree.unflatten(structure, [*leaves[:i], new, *leaves[i + 1 :]])


def damaged(name):
    """(kind of damage, rules, params, qparams) of each damaged call."""
    q, params, x, qparams, frozen = served(name)
    other = quantize_fn(q.__wrapped__, rules(weight_spec(4), activation_spec(4)))
    shapes = jax.eval_shape(lambda p: other.init_qparams(p, x), params)
    narrow = jax.tree.map(lambda v: np.ones(v.shape, v.dtype), shapes)
    weights = [key for key in qparams if not key.endswith(("input", "lhs"))]
    for key in qparams:
        yield "an entry missing", rules(), frozen, {k: v for k, v in qparams.items() if k != key}
        yield "an entry of another spec", rules(), frozen, qparams | {key: narrow[key]}
    for key in weights:
        yield "a weight's entry of another training", rules(), frozen, qparams | {key: other_training(qparams[key])}
    yield "all entries of another training", rules(), frozen, {k: other_training(v) for k, v in qparams.items()}
    yield "all entries of another spec", rules(), frozen, narrow
    yield "no qparams", rules(), frozen, None
    dynamic = q.freeze(params, x)
    yield "frozen without qparams", rules(), dynamic, qparams
    for change, tree in with_leaves(frozen, QArray):
        yield f"a leaf of frozen params {change}", rules(), tree, qparams
    for change, tree in with_leaves(qparams, QParams):
        yield f"a leaf of qparams {change}", rules(), frozen, tree
    cast = jax.tree.map(lambda v: np.asarray(v).astype(jnp.bfloat16), frozen)
    yield "all leaves of frozen params cast to bfloat16", rules(), cast, qparams
    others = {
        "weights of 4 bits": rules(weight_spec(4)),
        "inputs of 4 bits": rules(activation=activation_spec(4)),
        "symmetric inputs": rules(activation=activation_spec(8, symmetric=True)),
        "inputs per token": rules(activation=activation_spec(8, granularity=PerToken())),
        "weights per tensor": rules(dataclasses.replace(W8, granularity=PerTensor())),
        "weights alone": rules(activation=None),
        "no rule": [],
    }
    for change, new in others.items():
        yield f"frozen by other rules: {change}", new, frozen, qparams
        yield f"frozen by other rules, ranges of the batch: {change}", new, dynamic, {}
        of_inputs = {k: v for k, v in qparams.items() if k not in weights}
        yield f"frozen by other rules, the entries of inputs: {change}", new, frozen, of_inputs


def is_ours(error):
    """Whether this package has raised it, or has added a note to an error of the function."""
    frame = error.__traceback__
    while frame.tb_next:
        frame = frame.tb_next
    raised_in = pathlib.Path(frame.tb_frame.f_code.co_filename)
    noted = any(note.startswith("jaxquant: ") for note in getattr(error, "__notes__", ()))
    return noted or raised_in.is_relative_to(pathlib.Path(jaxquant.__file__).parent)


def outcome(q, *args, **kw):
    try:
        return q(*args, **kw)
    except Exception as error:
        return error


def is_error(result):
    return isinstance(result, Exception)


@cases("name", MODELS, [])
def test_a_damaged_call_gives_what_was_trained_or_an_error_of_ours(name):
    q, params, x, qparams, _ = served(name)
    damages = [
        (damage, q if by == rules() else quantize_fn(q.__wrapped__, by), frozen, of)
        for damage, by, frozen, of in damaged(name)
    ]
    results = []

    @jax.jit
    def all_that_raise_nothing():
        """One program, in which arrays are constants, whose values are known, as they are to an eager call."""
        results.extend(outcome(new, frozen, x, qparams=of) for _, new, frozen, of in damages)
        want = {True: q(params, x, qparams=qparams), False: q(params, x)}
        return want, {i: y for i, y in enumerate(results) if not is_error(y)}

    want, got = jax.tree.map(np.asarray, all_that_raise_nothing())
    table = collections.Counter()
    for i, (damage, new, frozen, of) in enumerate(damages):
        if i in got:
            table[damage, "the same bits" if np.array_equal(got[i], want[bool(of)]) else "SILENT"] += 1
        else:
            for error in results[i], outcome(new, frozen, x, qparams=of):
                assert is_error(error), f"no error of the eager call: {damage}"
                table[damage, "an error of ours" if is_ours(error) else f"another error: {error!r}"] += 1
    bad = {key: n for key, n in table.items() if key[1] not in ("an error of ours", "the same bits")}
    assert not bad, bad
    refused = sum(is_error(result) for result in results)
    assert refused > 0.8 * len(damages), table
    assert {"no qparams", "all entries of another spec", "frozen without qparams"} <= {
        damage for damage, how in table if how == "an error of ours"
    }


@pytest.mark.slow
def test_ranges_of_inputs_may_be_new():
    """Inputs observed anew are a new calibration: the call is what the float parameters give with them."""
    q, params, x, qparams, frozen = served("language model")
    inputs = {key: v for key, v in qparams.items() if key.endswith(":input")}
    new = inputs | {(key := min(inputs)): other_training(inputs[key])}
    calls = (frozen, new), (params, qparams | new), (frozen, qparams)
    served_anew, trained_anew, as_trained = jax.jit(lambda: [q(p, x, qparams=s) for p, s in calls])()
    assert np.array_equal(served_anew, trained_anew)
    assert not np.array_equal(served_anew, as_trained)
