# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of jaxquant, of programs by hand and of others on TPUs and GPUs that are not there: its estimates.

Cycles and bytes are XLA's own estimates for a TPU, kernels and conditionals are counted in the program of a GPU, which
is not tuned without one. Nothing is run, and nothing is measured.
"""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant import PerChannel, PerToken, QuantSpec, Rule, activation_spec, float8_spec, quantize_fn, weight_spec

from . import aot, by_hand
from .accelerator import Failed, attempt, in_bfloat16, transformer
from .runner import Part

jax.config.update("jax_platforms", "cpu")  # for the arrays of this process, whatever else there is

SYMMETRIC = Rule("**", weight_spec(8), activation_spec(8, symmetric=True))
AFFINE = Rule("**", weight_spec(8), activation_spec(8))
FLOAT8 = Rule("**", float8_spec(granularity=PerChannel(None)), float8_spec())
PER_TOKEN = Rule("**", weight_spec(8), activation_spec(8, symmetric=True, granularity=PerToken()))
FOUR_BITS = Rule("**", weight_spec(4), activation_spec(8, symmetric=True))
SERVED = {
    "static": SYMMETRIC,
    "dynamic": SYMMETRIC,
    "per token": PER_TOKEN,
    "static affine": AFFINE,
    "dynamic affine": AFFINE,
    "weight-only": ("**", weight_spec(8)),
    "static, 4-bit weights": FOUR_BITS,
    "weight-only, 4 bits": ("**", weight_spec(4)),
    "weight-only, 4 bits in blocks": ("**", weight_spec(4, block_size=32)),
    "weight-only, 4 bits in groups of 128, native": ("**", weight_spec(4, block_size=128)),
    "weight-only, 4 bits in groups of 32, native": ("**", weight_spec(4, block_size=32)),
    "static, float8": FLOAT8,
}
TRAINED = {
    "int8": SYMMETRIC,
    "int8 per token": PER_TOKEN,
    "int8, affine": AFFINE,
    "int8, gradient bfloat16": dataclasses.replace(SYMMETRIC, gradient="bfloat16"),
    "int8, gradient int8": dataclasses.replace(SYMMETRIC, gradient=QuantSpec()),
    "int8 per token, gradient int8": dataclasses.replace(PER_TOKEN, gradient=QuantSpec()),
    "int8, static": SYMMETRIC,
    "weight-only": ("**", weight_spec(8)),
    "4-bit weights": FOUR_BITS,
    "float8": FLOAT8,
}
Case = tuple[Callable, tuple]  # a function, and the shapes of its arguments


class Model(NamedTuple):
    """A function of (params, x), the shapes of its params, and those of x by the number of rows.

    `split` says which axis of each weight is split over devices that share a layer: the columns, then the rows.
    """

    apply: Callable
    params: Any
    shape: Callable[[int], tuple[int, ...]]
    split: Any

    def inputs(self, rows: int, dtype: str) -> tuple[Any, Any]:
        like = lambda shape: jax.ShapeDtypeStruct(shape, dtype)
        return jax.tree.map(like, self.params, is_leaf=lambda v: isinstance(v, tuple)), like(self.shape(rows))


def mlp(params: Sequence[Array], x: Array) -> Array:
    for w in params:
        x = jax.nn.relu(x @ w)
    return x


def mlp_of(layers: int, width: int) -> Model:
    return Model(mlp, [(width, width)] * layers, lambda rows: (rows, width), [1 - i % 2 for i in range(layers)])


def transformer_of(layers: int, width: int) -> Model:
    square = dict.fromkeys(("q", "k", "v", "out"), (width, width))
    block = square | {"up": (width, 4 * width), "down": (4 * width, width)}
    params = {"blocks": [block] * layers, "head": (width, 10)}
    split = {"blocks": [{name: int(name not in ("out", "down")) for name in block}] * layers, "head": 0}
    tokens = lambda rows: min(rows, 128)
    return Model(transformer, params, lambda rows: (rows // tokens(rows), tokens(rows), width), split)


MODELS = {"MLP": mlp_of(4, 2048), "transformer": transformer_of(2, 1024)}


@dataclasses.dataclass(frozen=True)
class Multiplied:
    """A weight whose products `x @ w` are a function of x."""

    by: Callable[[Array], Array]

    def __rmatmul__(self, x: Array) -> Array:
        return self.by(x)


# ---- Served: frozen weights.


def served(kind: str, model: Model, rows: int, dtype: str) -> Case:
    """A function that serves, as of SERVED."""
    params, x = model.inputs(rows, dtype)
    q = quantize_fn(model.apply, [SERVED[kind]], execution="native" if kind.endswith("native") else "auto")
    if not kind.startswith("static"):
        return q, (jax.eval_shape(q.freeze, params, x), x)
    qparams = jax.eval_shape(q.init_qparams, params, x)
    frozen = jax.eval_shape(lambda p, x, s: q.freeze(p, x, qparams=s), params, x, qparams)
    return lambda p, x, s: q(p, x, qparams=s), (frozen, x, qparams)


def served_by_hand(kind: str, model: Model, rows: int, dtype: str) -> Case:
    params, x = model.inputs(rows, dtype)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    affine = kind.endswith("affine")

    def frozen(w: Any) -> by_hand.Weight:
        of: Any = jax.ShapeDtypeStruct
        sums = of((1, w.shape[1]), jnp.int32) if affine else None
        return by_hand.Weight(of(w.shape, jnp.int8), of((1, w.shape[1]), jnp.float32), sums)

    def run(weights, grids, x):
        by = lambda w, grid: Multiplied(lambda x: by_hand.served(kind, x, w, grid))
        is_weight = lambda v: isinstance(v, by_hand.Weight)
        return model.apply(jax.tree.map(by, weights, grids, is_leaf=is_weight), x)

    grids = jax.tree.map(lambda w: (number, number if affine else None), params)
    return run, (jax.tree.map(frozen, params), grids, x)


def served_by_qwix(kind: str, model: Model, rows: int, dtype: str) -> Case:
    """By its own quantization and products; static is a range written into the program."""
    import qwix

    params, x = model.inputs(rows, dtype)
    how = {
        "static": lambda x: qwix.quantize(x, jnp.int8, calibration_method="fixed,-4,4"),
        "dynamic": lambda x: qwix.quantize(x, jnp.int8),
        "per token": lambda x: qwix.quantize(x, jnp.int8, channelwise_axes=range(x.ndim - 1)),
        "static affine": lambda x: qwix.quantize(x, jnp.int8, calibration_method="fixed,-3,4"),
        "dynamic affine": lambda x: qwix.quantize(x, jnp.int8, calibration_method="minmax"),
        "weight-only": lambda x: x,
    }[kind]
    frozen = jax.tree.map(
        lambda w: jax.eval_shape(lambda w: qwix.quantize(w, jnp.int8, channelwise_axes=[1]), w), params
    )

    def run(weights, x):
        by = lambda w: Multiplied(lambda x: qwix.dot_general(how(x), w, _last_with_first(x)))
        is_weight = lambda v: isinstance(v, qwix.QArray)
        return model.apply(jax.tree.map(by, weights, is_leaf=is_weight), x)

    return run, (frozen, x)


def _last_with_first(x: Array) -> Any:
    return ((x.ndim - 1,), (0,)), ((), ())


# ---- Trained: a step of SGD from float32 params.


def step_of(apply: Callable, dtype: str) -> Callable:
    if dtype == "bfloat16":
        apply = in_bfloat16(apply)

    def step(params, x, *qparams):
        gradient = jax.grad(lambda params: (apply(params, x, *qparams) ** 2).mean())(params)
        return jax.tree.map(lambda v, g: v - 0.01 * g, params, gradient)

    return step


def trained(kind: str, model: Model, rows: int, dtype: str) -> Case:
    """A training step, as of TRAINED; "float" is the model's own."""
    params, x = model.inputs(rows, "float32")
    if kind == "float":
        return step_of(model.apply, dtype), (params, x)
    q = quantize_fn(model.apply, [TRAINED[kind]])
    if not kind.endswith("static"):
        return step_of(q, dtype), (params, x)
    qparams = jax.eval_shape(q.init_qparams, params, x)

    def step(params, x, qparams):
        return step_of(lambda params, x: q(params, x, qparams=qparams), dtype)(params, x)

    return step, (params, x, qparams)


def trained_by(product: Callable[[Array, Array], Array], model: Model, rows: int, dtype: str) -> Case:
    """A training step whose products `x @ w` with a weight are another's."""

    def apply(params, x):
        by = lambda w: Multiplied(lambda x: product(x, w))
        return model.apply(jax.tree.map(by, params), x)

    return step_of(apply, dtype), model.inputs(rows, "float32")


def trained_by_hand(kind: str, model: Model, rows: int, dtype: str) -> Case:
    grid = {"int8": "dynamic", "int8 per token": "per token", "int8, affine": "dynamic affine"}[kind]
    return trained_by(lambda x, w: by_hand.trained(x, w, grid), model, rows, dtype)


def trained_by_aqt(kind: str, model: Model, rows: int, dtype: str) -> Case:
    """Rounded to the nearest."""
    import aqt.jax.v2.config as aqt

    bits = 8 if kind == "int8, gradient int8" else None
    config = aqt.config_v4(fwd_bits=8, dlhs_bits=bits, drhs_bits=bits)
    aqt.set_stochastic_rounding(config, False, False, "jax.uniform")
    return trained_by(lambda x, w: config(x, w, _last_with_first(x)), model, rows, dtype)


def trained_by_qwix(kind: str, model: Model, rows: int, dtype: str) -> Case:
    """By its provider, which takes the products of a flax module."""
    import flax.linen as nn
    import qwix

    class Products(nn.Module):
        @nn.compact
        def __call__(self, params, x):
            by = lambda w: Multiplied(lambda x: jax.lax.dot_general(x, w, _last_with_first(x)))
            return model.apply(jax.tree.map(by, params), x)

    gradient = {"bwd_qtype": "int8"} if kind == "int8, gradient int8" else {}
    rule = qwix.QtRule(weight_qtype="int8", act_qtype="int8", **gradient)
    module = qwix.quantize_model(Products(), qwix.QtProvider([rule]))
    return step_of(lambda params, x: module.apply({}, params, x), dtype), model.inputs(rows, "float32")


# ---- The tables.

CONTENDERS = {
    "jaxquant": (served, tuple(SERVED)),
    "by hand": (served_by_hand, ("static", "dynamic", "per token", "static affine", "dynamic affine", "weight-only")),
    "qwix": (served_by_qwix, ("static", "dynamic", "per token", "static affine", "dynamic affine", "weight-only")),
}
TRAINERS = {
    "jaxquant": (trained, tuple(TRAINED)),
    "by hand": (trained_by_hand, ("int8", "int8 per token", "int8, affine")),
    "qwix": (trained_by_qwix, ("int8", "int8, gradient int8")),
    "AQT": (trained_by_aqt, ("int8", "int8, gradient int8")),
}
ROWS = 8, 128, 1024
TPUS = "v5e", "v6e"  # which have columns


class Found(NamedTuple):
    """What is read of a program: of a TPU cycles and bytes, of a GPU kernels and conditionals."""

    first: float
    second: float


def program(make: Callable[[], Case], target: str) -> Found | Failed:
    def read() -> Found:
        compiled = aot.compiled(*make(), target)
        fields = ("cycles", "bytes") if target in aot.TPUS else ("kernels", "conditionals")
        return Found(*(getattr(compiled, field) for field in fields))

    return attempt(read)


POOL = ThreadPoolExecutor(os.cpu_count())
Programs = dict[str, list[Future]]  # by target, one for each number of rows


def programs(make: Callable[[int], Case], rows: Mapping[str, Sequence[int]]) -> Programs:
    """Starts to compile a function for some targets, each with its numbers of rows."""
    return {
        target: [POOL.submit(program, functools.partial(make, n), target) for n in numbers]
        for target, numbers in rows.items()
    }


def _ratio(got: Any, base: Any, field: str) -> float | None:
    return None if isinstance(got, Failed) or isinstance(base, Failed) else getattr(got, field) / getattr(base, field)


def estimates(got: Programs, base: Programs) -> tuple:
    """The cells of a function: cycles and bytes to those of the base, kernels and conditionals."""
    results, bases = (
        {target: [future.result() for future in each.get(target, ())] for target in (*TPUS, "h100")}
        for each in (got, base)
    )
    of = lambda target, field: [_ratio(*pair, field) for pair in zip(results[target], bases[target], strict=True)]
    told = lambda ratios: " / ".join("fails" if r is None else f"{r:.2f}" for r in ratios)
    cells = [told(of(target, field)) for field in ("first", "second") for target in TPUS]
    on_gpu = ", ".join("fails" if isinstance(r, Failed) else f"{r.first} and {r.second}" for r in results["h100"])
    return *cells, on_gpu


def begun(
    contenders: dict[str, tuple], few: tuple[str, ...], model: Model, dtype: str, rows: Mapping[str, Sequence[int]]
) -> list[tuple[str, Programs]]:
    """Each contender's label, and its programs, which are being compiled."""
    return [
        (f"{who}, {kind}", programs(functools.partial(case_of, make, kind, model, dtype), rows))
        for who, (make, kinds) in contenders.items()
        for kind in kinds
        if kind in few or not few
    ]


def case_of(make: Callable, kind: str, model: Model, dtype: str, rows: int) -> Case:
    return make(kind, model, rows, dtype)


def serving_rows(rounds: int, *cases: tuple[str, str, tuple[str, ...]]) -> Iterator[tuple]:
    rows = dict.fromkeys(TPUS, ROWS) | {"h100": ROWS[1:2]}
    for name, dtype, few in cases:
        model = MODELS[name]
        base = programs(lambda n, m=model: (m.apply, m.inputs(n, "bfloat16")), rows)
        found = begun(CONTENDERS, few, model, dtype, rows)
        yield f"{name}: bfloat16", *estimates(base, base)
        for label, got in found:
            yield f"{name}, {dtype} x: {label}", *estimates(got, base)


def step_rows(rounds: int, *cases: tuple[str, str, tuple[str, ...]]) -> Iterator[tuple]:
    for name, dtype, few in cases:
        yield from steps(f"{name}, {dtype}", MODELS[name], dtype, few, (*TPUS, "h100"))


def steps(name: str, model: Model, dtype: str, few: tuple[str, ...], targets: Sequence[str]) -> Iterator[tuple]:
    rows = dict.fromkeys(targets, (4096,))
    base = programs(functools.partial(trained, "float", model, dtype=dtype), rows)
    found = begun(TRAINERS, few, model, dtype, rows)
    yield f"{name} step: float", *estimates(base, base)
    for label, got in found:
        yield f"{name} step: {label}", *estimates(got, base)


def width_rows(rounds: int, *widths: int) -> Iterator[tuple]:
    """What the steps of a wider MLP take."""
    few = "int8", "int8, gradient int8"
    for width in widths:
        yield from steps(f"MLP of 4 x {width}^2, float32", mlp_of(4, width), "float32", few, ("v5e",))


# ---- Over devices.

MESHES = {"data": (4, 1), "tensor": (1, 4), "data and tensor": (2, 2), "FSDP": (4, 1)}  # by the layout of the weights
SHARDED_STEPS = {"jaxquant": ("int8", "int8, affine", "int8, gradient int8"), "by hand": ("int8",)}
SHARDED_WIDE = {
    "jaxquant": ("int8 per token", "int8 per token, gradient int8"),
    "by hand": ("int8 per token",),
    "qwix": ("int8", "int8, gradient int8"),  # per token, as it has no other
}
SHARDED_SERVED = "static", "dynamic", "static affine"


def on_mesh(case: Case, model: Model, layout: str, is_step: bool) -> aot.Program:
    """A step or a served function on four v5e: batches split along "data", weights as the layout says."""
    data, tensor = MESHES[layout]
    mesh = aot.mesh("v5e", data=data, tensor=tensor)
    f, (params, x, *others) = case
    sharding = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    place = lambda v, *axes: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding(*axes))

    def placed(part: Any, split: int) -> Any:
        """A weight, or what it is frozen to: integers, which lie transposed, and numbers for its columns."""
        rows_first = ["data", None] if layout == "FSDP" else ["tensor" if axis == split else None for axis in (0, 1)]
        axes_of = lambda v: rows_first if 1 in v.shape or jnp.issubdtype(v.dtype, jnp.floating) else rows_first[::-1]
        axes = lambda v: [axis if n > 1 else None for axis, n in zip(axes_of(v), v.shape, strict=True)]
        return jax.tree.map(lambda v: place(v, *axes(v)), part)

    tree = jax.tree.structure(model.split)
    params = tree.unflatten(map(placed, tree.flatten_up_to(params), jax.tree.leaves(model.split)))
    out = jax.tree.map(lambda v: v.sharding, params) if is_step else sharding("data")
    return aot.compiled(f, (params, place(x, "data"), *jax.tree.map(place, others)), "v5e", out)


def sharded_rows(rounds: int, *cases: tuple[str, Model, int, str, Mapping, tuple[str, ...]]) -> Iterator[tuple]:
    """Training steps and, of some models, served functions, to the float program on the same mesh."""
    told = lambda found: ", ".join(f"{n} {kind}" for kind, n in sorted(found.items())) or "none"
    for (name, model, rows, dtype, trainers, kinds), layout in itertools.product(cases, MESHES):
        made = lambda who, kind, m=model, n=rows, d=dtype: TRAINERS[who][0](kind, m, n, d)
        steps = {f"{who}, {kind}": made(who, kind) for who, of in trainers.items() for kind in of}
        calls = {f"jaxquant, {kind}": served(kind, model, rows, dtype) for kind in kinds}
        float_call = model.apply, model.inputs(rows, "bfloat16")
        float_step = trained("float", model, rows, dtype)
        for what, base, others in (("step", float_step, steps), ("served", float_call, calls)):
            if not others:
                continue
            make = lambda case, m=model, at=layout, w=what: attempt(lambda: on_mesh(case, m, at, w == "step"))
            first, *rest = [POOL.submit(make, case) for case in (base, *others.values())]
            float_program = first.result()
            label = f"{name}, {rows:,} rows, {layout}, {what}"
            memory = f"{float_program.memory / 2**20:,.0f} MiB"
            yield f"{label}: float", 1.0, memory, told(float_program.collectives)
            for kind, future in zip(others, rest, strict=True):
                got = future.result()
                if isinstance(got, Failed):
                    yield f"{label}: {kind}", "fails", "", ""
                    continue
                ratio = got.cycles / float_program.cycles
                cycles = "no estimate" if math.isnan(ratio) else ratio
                yield f"{label}: {kind}", cycles, f"{got.memory / float_program.memory:.2f}", told(got.collectives)


# ---- What a language model's step takes in memory: layers under `lax.scan` and `jax.checkpoint`.

REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "by name": jax.checkpoint_policies.save_only_these_names("jaxquant_codes", "jaxquant_scales"),
}
LAYERS, WIDTH, HIDDEN, HEADS, VOCABULARY, TOKENS = 12, 1024, 2816, 8, 8192, (8, 512)
IN_TOKENS = QuantSpec(granularity=PerToken())
GRADIENTS = {
    "int8 per token": Rule("*", weight_spec(8), IN_TOKENS),
    "int8, static": SYMMETRIC,
    "int8 per token, gradient int8": Rule("*", weight_spec(8), IN_TOKENS, gradient=QuantSpec()),
    "weight-only, 4 bits": Rule("*", weight_spec(4)),
}


def language_model(remat: str, product: Callable[[Array, Array], Array] = jnp.matmul) -> Callable[..., Array]:
    """f(params, tokens) -> the mean cross entropy of the next token, of a gated transformer of LAYERS layers."""
    normal = lambda x: x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)).astype(x.dtype)

    def layer(x: Array, p: Mapping[str, Array]) -> tuple[Array, None]:
        h = normal(x)
        q, k, v = (product(h, p[name]).reshape(*h.shape[:2], HEADS, -1) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / math.sqrt(WIDTH // HEADS)
        scores = jnp.where(jnp.tril(jnp.ones((h.shape[1],) * 2, bool)), scores, -jnp.inf)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
        x = x + product(mixed.reshape(x.shape), p["out"])
        h = normal(x)
        return x + product(jax.nn.silu(product(h, p["gate"])) * product(h, p["up"]), p["down"]), None

    if (policy := REMAT[remat]) is not None:
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def f(params: Mapping[str, Any], tokens: Array) -> Array:
        x, _ = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])
        logits = product(x, params["head"]).astype(jnp.float32)[:, :-1]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()

    return f


def gradient_of(kind: str, remat: str) -> Case:
    """One gradient in bfloat16, of a kind of GRADIENTS, or "by hand"; the ranges of a static one are constants."""
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    square = dict.fromkeys((*"qkv", "out"), like(LAYERS, WIDTH, WIDTH))
    wide = dict.fromkeys(("gate", "up"), like(LAYERS, WIDTH, HIDDEN))
    layers = square | wide | {"down": like(LAYERS, HIDDEN, WIDTH)}
    params = {"embedding": like(VOCABULARY, WIDTH), "layers": layers, "head": like(WIDTH, VOCABULARY)}
    args = params, jax.ShapeDtypeStruct(TOKENS, jnp.int32)
    if kind.startswith("by hand"):
        given = 0.05 if kind.endswith("static") else None
        return jax.grad(language_model(remat, lambda x, w: by_hand.remembered(x, w, given))), args
    if kind == "float":
        return jax.grad(language_model(remat)), args
    rule = GRADIENTS[kind]
    q = quantize_fn(language_model(remat), [dataclasses.replace(rule, pattern=name) for name in ("layers/*", "head")])
    if kind != "int8, static":
        return jax.grad(q), args
    shapes = jax.eval_shape(q.init_qparams, *args)
    fixed = lambda: jax.tree.map(lambda v: jnp.full(v.shape, 0.05, v.dtype), shapes)
    return jax.grad(lambda params, tokens: q(params, tokens, qparams=fixed())), args


def training_rows(rounds: int, *targets: str) -> Iterator[tuple]:
    """Memory beside params and gradients, and of a TPU cycles, to the float program of the same policy."""
    kinds = "float", *GRADIENTS, "by hand, int8 per token", "by hand, int8, static"
    made = lambda target, kind, remat: attempt(lambda: aot.compiled(*gradient_of(kind, remat), target))
    found = {of: POOL.submit(made, *of) for of in itertools.product(targets, kinds, REMAT)}
    for target, kind in itertools.product(targets, kinds):
        cells = []
        for remat in REMAT:
            got, base = (found[target, of, remat].result() for of in (kind, "float"))
            if isinstance(got, Failed):
                cells.append(f"fails: {got}")
                continue
            of_cycles = f" / {got.cycles / base.cycles:.2f}" if target in aot.TPUS else ""
            told = f"{got.memory / base.memory:.2f}{of_cycles}"
            cells.append(f"{got.memory / 2**20:,.0f} MiB" if kind == "float" else told)
        yield f"{target}: {kind}", *cells


def missing() -> str:
    return "; ".join(filter(None, (aot.missing(target) for target in ("v5e", "h100"))))


HOW = "Estimated by XLA for devices that are not there, not measured, on"
PACKAGES = "libtpu", "jax-cuda12-plugin", "qwix", "aqtp", "flax"
COLUMNS = (
    "", "cycles, v5e", "cycles, v6e", "bytes, v5e", "bytes, v6e", "kernels and conditionals, H100",
)  # fmt: skip
# All kinds for the first, the usual ones for the others.
FEW, FEW_STEPS = (
    ("static", "dynamic", "per token", "weight-only"),
    ("int8", "int8, affine", "int8, gradient bfloat16", "int8, gradient int8"),
)
CASES = ("MLP", "float32"), ("MLP", "bfloat16"), ("transformer", "float32"), ("transformer", "bfloat16")
every = lambda few, cases: tuple((*case, few if i else ()) for i, case in enumerate(cases))
PARTS = {
    "serving": Part(COLUMNS, serving_rows, 1, every(FEW, CASES)),
    "steps": Part(COLUMNS, step_rows, 1, every(FEW_STEPS, CASES[:3])),
    "training": Part(("one gradient: memory / cycles", *REMAT), training_rows, 1, ("v5e", "h100")),
    "width": Part(COLUMNS, width_rows, 1, (4096, 8192)),
    "sharded": Part(
        ("on four v5e", "cycles of one, to float", "memory of one, to float", "collectives"),
        sharded_rows,
        1,
        (
            ("MLP", MODELS["MLP"], 4096, "float32", SHARDED_STEPS, SHARDED_SERVED),
            ("transformer", MODELS["transformer"], 4096, "float32", SHARDED_STEPS, SHARDED_SERVED),
            ("MLP of 4 x 4096^2, bfloat16", mlp_of(4, 4096), 16384, "bfloat16", SHARDED_WIDE, ()),
        ),
    ),
}
