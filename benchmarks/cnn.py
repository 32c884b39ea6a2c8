# SPDX-License-Identifier: Apache-2.0
"""EfficientNet-Lite0 in integers, in the runtimes that serve it: bits, the classes that stay, and times, beside peers.

Needs `pip install 'jaxquant[onnx,litert]' ai-edge-quantizer scikit-image` and the weights (`efficientnet.missing`). 64
crops of eight photos calibrate by min-max, 200 crops of eight others are classified, and of 32 of these the logits are
compared. Times are of one image on one thread.
"""

import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant.litert
import jaxquant.onnx
from jaxquant import Rule, activation_spec, merge, quantize_fn, range_from_histogram, solve, weight_spec

from . import efficientnet
from .efficientnet import missing as missing
from .runner import Part, donated, kept, ratios

jax.config.update("jax_platforms", "cpu")  # whatever else there is

Run = Callable[[np.ndarray], np.ndarray]  # logits of one image
RUNTIMES = "onnxruntime", "litert", "litert_reference"


class Served(NamedTuple):
    """A network for a runtime: its logits in JAX, its file, and what is written."""

    logits: Callable[[Any], Any]
    content: bytes
    kernels: int
    floats: list[str]


@functools.cache
def images() -> np.ndarray:
    return efficientnet.photos(efficientnet.EVALUATION, 25, 1)


@functools.cache
def batches() -> list[np.ndarray]:
    return np.split(efficientnet.photos(efficientnet.CALIBRATION, 8, 0), 8)


@functools.cache
def folded() -> tuple[Any, Callable]:
    """The params without norms, and the function."""
    return solve.fold_norms(efficientnet.parameters(), efficientnet.model, batches()[0])


def observed(q: Any, **options: Any) -> Any:
    """What `q.observe` gives of all batches."""
    observe = jax.jit(lambda params, x: q.observe(params, x, **options))
    return merge(*(observe(folded()[0], x) for x in batches()))


def quantized_to(weights: int, activations: int, **options: Any) -> tuple[Any, Any]:
    """The function and its qparams, by min-max."""
    params, f = folded()
    q = quantize_fn(f, [Rule("**", weight_spec(weights), activation_spec(activations))], **options)
    return q, q.init_qparams(params, batches()[0], ranges=observed(q))


@functools.cache
def served(runtime: str) -> Served:
    q, qparams = quantized_to(8, 8, runtime=runtime)
    frozen, one = q.freeze(folded()[0], batches()[0], qparams=qparams), images()[:1]
    if runtime == "onnxruntime":
        content = jaxquant.onnx.export(q, frozen, one, qparams=qparams).SerializeToString()
    else:
        content = jaxquant.litert.export(q, frozen, one, qparams=qparams)
    plan = q.plan(frozen, one, qparams=qparams)
    kernels = sum(bool(site.kernel) and not site.is_in_float for site in plan) - 1  # the input is no op
    return Served(jax.jit(lambda x: q(frozen, x, qparams=qparams)), content, kernels, plan.in_float)


# ---- Runtimes.


def in_onnx(content: bytes) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.add_session_config_entry("session.x64quantprecision", "1")  # else products saturate without VNNI
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x})[0]


def in_litert(content: bytes, reference: bool = False) -> Run:
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    kernels = {"experimental_op_resolver_type": OpResolverType.BUILTIN_REF} if reference else {}
    interpreter = Interpreter(model_content=content, num_threads=1, **kernels)
    interpreter.allocate_tensors()
    (first,), (last,) = interpreter.get_input_details(), interpreter.get_output_details()

    def run(x: np.ndarray) -> np.ndarray:
        interpreter.set_tensor(first["index"], quantized(x, *first["quantization"]) if first["dtype"] == np.int8 else x)
        interpreter.invoke()
        return interpreter.get_tensor(last["index"])

    return run


def quantized(x: np.ndarray, scale: float, zero_point: int) -> np.ndarray:
    return np.clip(np.rint(x / scale) + zero_point, -128, 127).astype(np.int8)


def by(runtime: str) -> Run:
    content = served(runtime).content
    return in_onnx(content) if runtime == "onnxruntime" else in_litert(content, runtime == "litert_reference")


@functools.cache
def in_float(kind: str) -> bytes:
    """The float network as a file."""
    if kind == "onnxruntime":
        return efficientnet.onnx_file(efficientnet.parameters())
    params, f = folded()
    return jaxquant.litert.export(quantize_fn(f, []), params, images()[:1])


# ---- Peers, each of the float file.


@functools.cache
def by_onnxruntime() -> bytes:
    """Static quantization by ONNX Runtime itself: uint8, a scale for each output channel, min-max."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(quantization.CalibrationDataReader):
        def __init__(self):
            self.rest = iter([{"x": x[None]} for batch in batches() for x in batch])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.rest, None)

    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder) / f"{name}.onnx" for name in ("float", "prepared", "quantized")]
        paths[0].write_bytes(in_float("onnxruntime"))
        quant_pre_process(str(paths[0]), str(paths[1]))
        types = {"activation_type": quantization.QuantType.QUInt8, "weight_type": quantization.QuantType.QInt8}
        quantization.quantize_static(str(paths[1]), str(paths[2]), Reader(), per_channel=True, **types)
        return paths[2].read_bytes()


@functools.cache
def by_ai_edge() -> bytes:
    """Static quantization by ai-edge-quantizer: int8, a scale for each output channel, min-max."""
    from ai_edge_quantizer import quantizer, recipe

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "float.tflite"
        path.write_bytes(in_float("litert"))
        of = quantizer.Quantizer(str(path), recipe.static_wi8_ai8())
        data = {"serving_default": [{"x0": x[None]} for batch in batches() for x in batch]}
        return bytes(of.quantize(of.calibrate(data)).quantized_model)


# ---- Rows.


@functools.cache
def classes_in_float() -> np.ndarray:
    params, f = folded()
    logits = jax.jit(f)
    return np.concatenate([np.asarray(logits(params, x)).argmax(1) for x in np.split(images(), 25)])


def agreement(run: Run) -> str:
    found = np.concatenate([run(x[None]).argmax(1) for x in images()])
    return f"{(found == classes_in_float()).mean():.1%}"


def bits(rounds: int, *names: str) -> Iterator[tuple]:
    for name in names:
        if name in RUNTIMES:
            of, run, few = served(name), by(name), images()[:32]
            y = np.concatenate([run(x[None]) for x in few])
            want = np.concatenate([np.asarray(of.logits(x)) for x in np.split(few, 4)])
            differ = f"{(y != want).sum():,} of {y.size:,}"
            yield f"jaxquant, for {name}", f"{of.kernels} of {of.kernels + len(of.floats)}", differ, agreement(run)
        else:
            run = in_onnx(by_onnxruntime()) if name == "onnxruntime's own" else in_litert(by_ai_edge())
            yield name, "", "", agreement(run)


def in_jax(rounds: int, count: int) -> tuple:
    """The frozen network, without a runtime, to the float one."""
    (q, qparams), (params, f), x = quantized_to(8, 8), folded(), images()[:count]
    frozen = q.freeze(params, batches()[0], qparams=qparams)
    runs = {"float": kept(f, params, x), "q": kept(lambda p, x: q(p, x, qparams=qparams), frozen, x)}
    return f"JAX, a batch of {count}, all threads", ratios(runs, "float", rounds)["q"], ""


def times(rounds: int, *names: str) -> Iterator[tuple]:
    x = images()[:1]
    for name in names:
        if name.startswith("JAX"):
            yield in_jax(rounds, int(name.removeprefix("JAX ")))
            continue
        of = in_onnx if name == "onnxruntime" else in_litert
        peer = by_onnxruntime() if name == "onnxruntime" else by_ai_edge()
        files = {"float": in_float(name), "own": peer, "q": served(name).content}
        runs: dict[str, Any] = {key: functools.partial(of(content), x) for key, content in files.items()}
        found = ratios(runs, "float", rounds)
        yield name, found["q"], found["own"]


def few_bits(rounds: int, *widths: tuple[int, int]) -> Iterator[tuple]:
    for weights, activations in widths:
        name = f"W{weights}A{activations}"
        q, qparams = quantized_to(weights, activations)
        yield name, "min-max", "rounded", in_jax_as_in_float(q, folded()[0], qparams)
        yield from (by_solvers(name, q, qparams) if weights < 8 else by_percentiles(name, q))


def by_percentiles(name: str, q: Any) -> Iterator[tuple]:
    (params, _), histograms = folded(), observed(q, histogram=True)
    for percentile in (99.99, 99.9, 99.0):
        ranges = range_from_histogram(histograms, percentile)
        qparams = q.init_qparams(params, batches()[0], ranges=ranges)
        yield name, f"percentile {percentile}", "rounded", in_jax_as_in_float(q, params, qparams)


def by_solvers(name: str, q: Any, qparams: Any) -> Iterator[tuple]:
    (params, _), grams, args = folded(), observed(q, gram=True), (batches()[0],)
    corrected = solve.bias_correct(params, q, grams, *args, qparams=qparams)
    yield name, "min-max", "bias_correct", in_jax_as_in_float(q, corrected, qparams)
    solved = solve.adaround(params, q, grams, *args, qparams=qparams)
    yield name, "min-max", "adaround", in_jax_as_in_float(q, solved, qparams)


def in_jax_as_in_float(q: Any, params: Any, qparams: Any) -> str:
    logits = jax.jit(lambda params, qparams, x: q(params, x, qparams=qparams))
    found = [np.asarray(logits(params, qparams, x)).argmax(1) for x in np.split(images(), 25)]
    return f"{(np.concatenate(found) == classes_in_float()).mean():.1%}"


def steps(rounds: int, *runtimes: str) -> Iterator[tuple]:
    """A QAT step, scales learned too, of the stem and the first five blocks: 16 convolutions, two residual sums."""
    x = images()[:4, ::2, ::2]
    whole = efficientnet.parameters()
    params, f = solve.fold_norms({"stem": whole["stem"], "blocks": whole["blocks"][:5]}, efficientnet.trunk, x)
    target, runs = jax.jit(f)(params, x), {}

    def step(trained: tuple, q: Any) -> tuple:
        loss = lambda trained: jnp.mean((q(trained[0], x, qparams=trained[1]) - target) ** 2)
        return jax.tree.map(lambda v, g: v - 1e-6 * g, trained, jax.grad(loss)(trained))

    for runtime in (None, *runtimes):
        q = quantize_fn(f, [Rule("**", weight_spec(8), activation_spec(8))], runtime=runtime)
        trained = params, q.init_qparams(params, x, ranges=q.observe(params, x))
        runs[runtime or "float grids"] = donated(functools.partial(step, q=q), trained)
    yield from ratios(runs, "float grids", rounds).items()


PACKAGES = "onnxruntime", "jax2onnx", "ai-edge-litert", "litert-converter", "ai-edge-quantizer"
PARTS = {
    "bits": Part(
        ("8 bits, min-max", "ops in integers", "logits that differ from `q`", "top-1 as in float, 200 crops"),
        bits, 1, (*RUNTIMES, "onnxruntime's own", "ai-edge-quantizer"),
    ),
    "times": Part(
        ("runtime, one thread", "jaxquant's file, to float", "its own quantization, to float"),
        times, 30, ("onnxruntime", "litert", "JAX 1", "JAX 8"),
    ),
    "few_bits": Part(
        ("in JAX", "ranges", "weights", "top-1 as in float, 200 crops"), few_bits, 1, ((8, 8), (8, 6), (4, 8))
    ),
    "steps": Part(("a QAT step in JAX, `runtime=`", "to the step without"), steps, 20, RUNTIMES),
}  # fmt: skip
