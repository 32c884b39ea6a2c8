#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of the docs. Needs the extra `notebooks`.

.venv/bin/python docs/figures/make.py [NAME ...]
"""

import ast
import functools
import json
import pathlib
import re
import sys
import textwrap

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from jaxquant import (
    QParams,
    QuantSpec,
    Range,
    Rule,
    activation_spec,
    ema_ranges,
    fake_quant,
    histogram,
    merge,
    observe,
    quantize_fn,
    range_from_histogram,
    report,
    weight_spec,
)
from jaxquant.delayed import delayed_qparams, split_histories, update_histories

FOLDER = pathlib.Path(__file__).parent
GRAY, COLORS = "#808080", ["#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444"]


def pipeline():
    """From a float model to a served one, with the function at each arrow."""
    boxes = (
        "float model",
        "quantized function",
        "activation ranges",
        "learned scales",
        "integer weights",
        "served model",
    )
    arrows = ["quantize_fn", "q.observe", "q.init_qparams", "q.freeze", "save, load\njax.export"]
    figure, axis = plt.subplots(figsize=(11, 1.9))
    axis.set(xlim=(-0.1, 6 * 2 - 0.75), ylim=(0, 1.75))
    axis.axis("off")
    for i, box in enumerate(boxes):
        style = {"facecolor": "none", "edgecolor": COLORS[0 if i else 2], "linewidth": 1.8}
        axis.add_patch(FancyBboxPatch((2 * i, 0.62), 1.05, 0.8, boxstyle="round,pad=0.05", **style))
        axis.text(2 * i + 0.52, 1.02, box.replace(" ", "\n"), ha="center", va="center", fontsize=11)
    for i, name in enumerate(arrows):
        at = (2 * i + 1.12, 1.02), (2 * i + 1.93, 1.02)
        axis.add_patch(FancyArrowPatch(*at, arrowstyle="-|>", mutation_scale=14, color=GRAY))
        axis.text(2 * i + 1.52, 0.5, name, ha="center", va="top", fontsize=10, family="monospace", color=COLORS[1])
    axis.text(7.6, 1.62, "train q(params, x, qparams=)", ha="center", fontsize=10, family="monospace", color=COLORS[1])
    return figure


def printed(notebook):
    """What the cells of an executed notebook have printed."""
    cells = json.loads((FOLDER.parents[1] / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    return ["".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", [])]


def accuracy():
    """Test accuracy against bits, by the table that notebook 01 prints."""
    (table,) = (text for text in printed("01_qat_digits") if text.startswith("Test accuracy"))
    row = re.compile(r"^ +(\d+)" + r" +([\d.]+) \( *([\d.]+)\)" * 4, re.M)
    bits, *columns = np.array(row.findall(table), float).T
    figure, axis = plt.subplots(figsize=(9, 3.2))
    for name, mean, color in zip(("float", "PTQ", None, "QAT"), columns[::2], (GRAY, *COLORS), strict=False):
        if name:
            style = "--" if name == "float" else "-"
            axis.plot(range(len(bits)), mean, style, marker="o", label=name, color=color)
    axis.set_xticks(range(len(bits)), [f"{b:.0f}" for b in bits])
    axis.set(title="A small CNN on digits, weights and activations", xlabel="bits", ylabel="test accuracy, %")
    axis.legend()
    return figure


def published(benchmark, named=1):
    """The rows of a benchmark in docs/measured.md: the cells by the first one, or the first two."""
    table = (FOLDER.parent / "measured.md").read_text().split(f"<!-- {benchmark} -->")[1].split("<!-- /")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {", ".join(cells[:named]): cells[named:] for cells in rows}


def grouped(axis, groups, title):
    """A bar for each label of each group that has it, `{group: {label: value}}`, with a line at 1."""
    labels = list(dict.fromkeys(label for values in groups.values() for label in values))
    width = 0.84 / len(labels)
    for k, label in enumerate(labels):
        having = [i for i, values in enumerate(groups.values()) if label in values]
        heights = [values[label] for values in groups.values() if label in values]
        bars = axis.bar(np.array(having) + width * k, heights, width * 0.9, label=label)
        axis.bar_label(bars, fmt="%.2f", fontsize=9, color=GRAY)
    axis.axhline(1, color=GRAY, linewidth=0.8, linestyle="--")
    axis.set_xticks(np.arange(len(groups)) + width * (len(labels) - 1) / 2, list(groups))
    axis.set_title(title)
    axis.margins(y=0.12)
    if len(labels) > 1:
        axis.legend()


def sizes(axis):
    """By the table that notebook 05 prints."""
    (table,) = (text for text in printed("05_train_freeze_serve") if text.lstrip().startswith("bytes"))
    found = re.findall(r"^(\w[\w ]*?) +\d+ +([\d.]+) +\d+$", table, re.M)
    groups = {name.replace(" in ", "\nin "): {"bytes": float(value)} for name, value in found}
    grouped(axis, groups, "Bytes of a language model")
    axis.tick_params(axis="x", labelsize=8)


def first(cell):
    return float(cell.split()[0])


def serving():
    """What freezing is worth, and the size."""
    table = published("serving")
    names = {"frozen, static": "frozen, static", "frozen, dynamic": "frozen, dynamic", "q(params)": "not frozen"}
    groups = {
        f"{rows} row{'s' * (rows > 1)}": {
            label: first(table[f"{rows} rows: {name}"][0]) for name, label in names.items()
        }
        for rows in (1, 8, 128)
    }
    figure, (latency, size) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(2, 1))
    grouped(latency, groups, "Time of a call, 4 layers of 2048 x 2048, float32 = 1")
    sizes(size)
    return figure


def benchmarks():
    """The training step, serving, a linear layer, the size and the compile time, each to float and beside peers."""
    steps, calls, compiling = map(published, ("function_transform", "serving", "compile_cost"))
    figure, axes = plt.subplot_mosaic([["step", "size"], ["call", "layer"], ["compile", "compile"]], figsize=(10, 9))
    names = {
        "jaxquant": "int8",
        "bfloat16 backward": "int8, gradient bfloat16",
        "int8 backward": "int8, gradient int8",
        "qwix": "qwix",
        "qwix, int8 backward": "qwix, gradient int8",
    }
    groups = {
        model: {label: first(steps[f"{model} step, {name}"][0]) for label, name in names.items()}
        for model in ("MLP", "transformer")
    }
    grouped(axes["step"], groups, "Training step, float32 = 1")
    axes["step"].set_ylim(0, 2.8)
    axes["step"].legend(ncols=2, fontsize=8)
    sizes(axes["size"])
    rows = {f"MLP,\n{n} row{'s' * (n > 1)}": f"{n} rows: frozen, static" for n in (1, 8, 128)}
    language = "language model, one token for each of {}, w8a8, frozen and static"
    rows |= {f"language\nmodel, {n}": language.format(n) for n in (1, 16)}
    groups = {group: {"jaxquant": first(calls[row][0])} for group, row in rows.items()}
    grouped(axes["call"], groups, "Serving call, frozen, float32 = 1")
    layers, groups = published("integer", 2), {}
    for n in (1, 16, 128):
        ours, _, _, qwix, _, onnxruntime = layers[f"2048^2, {n}"]
        found = {"jaxquant": ours, "qwix": qwix, "ONNX Runtime": onnxruntime}
        groups[f"{n} row{'s' * (n > 1)}"] = {label: first(cell) for label, cell in found.items()}
    grouped(axes["layer"], groups, "Linear layer of 2048 x 2048, float32 = 1")
    models = {
        "MLP": "MLP",
        "transformer of 4 layers": "transformer",
        "CNN of six shapes": "CNN",
        "MobileNetV2": "MobileNetV2",
    }
    groups = {
        short: {
            label: float(compiling[row][0].split(", ")[1])
            for label, row in (("jaxquant", model), ("qwix", f"{model}, qwix"))
            if row in compiling
        }
        for model, short in models.items()
    }
    grouped(axes["compile"], groups, "Compile time of the gradient, float32 = 1")
    return figure


SOLVED = {  # of the ways of benchmarks/solvers.py
    "nearest": ("o", COLORS[0]),
    "ranges": ("s", COLORS[1]),
    "gptq": ("D", COLORS[2]),
    "gptq of its ranges": ("^", COLORS[3]),
    "adaround of ranges": ("v", COLORS[4]),
    "rotate": ("<", "#f59e0b"),
    "rotate, then gptq": ("X", "#14b8a6"),
    "QAT": ("P", GRAY),
}


def solvers():
    """Bits per character of a language model by its weights' bits: what each solver and QAT make of them."""
    found = json.loads((FOLDER.parents[1] / "benchmarks" / "data" / "solvers.json").read_text())["bits"]
    means = {name: {way: np.mean(values) for way, values in ways.items()} for name, ways in found.items()}
    in_float = means.pop("float32")["nearest"]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), width_ratios=(5, 4))
    few = [name for name in means if name[:2] in ("w3", "w2")]
    for axis, names in zip(axes, ([name for name in means if name not in few], few), strict=True):
        for k, (way, (marker, color)) in enumerate(SOLVED.items()):
            at = np.arange(len(names)) + 0.11 * (k - (len(SOLVED) - 1) / 2)
            axis.plot(at, [means[name][way] for name in names], marker, label=way, color=color)
        axis.axhline(in_float, color=GRAY, linewidth=0.8, linestyle="--")
        axis.set_xticks(range(len(names)), [name.replace(" in ", "\nin ") for name in names])
        axis.set_xlim(-0.5, len(names) - 0.5)
    axes[0].set(title="8 and 4 bits; dashed: float", ylabel="bits per character")
    axes[1].set(title="3 and 2 bits", yscale="log")
    axes[1].yaxis.set_major_locator(mpl.ticker.FixedLocator([2, 2.5, 3, 3.5, 4, 4.5]))
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[1].yaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes[0].legend(loc="upper right", fontsize=9, handletextpad=0.2, borderaxespad=0)
    return figure


def caches():
    """Bits per character by the bytes of the cache, by the table that notebook 11 prints."""
    (table,) = (text for text in printed("11_generate") if text.startswith("cache "))
    figure, axis = plt.subplots(figsize=(9, 3.2))
    for (name, size, bits), marker in zip(re.findall(r"^(\w+) +(\d+) +([\d.]+) ", table, re.M), "os^vD", strict=True):
        axis.plot(int(size), float(bits), marker, markersize=9, label=name)
    axis.set(title="A language model with 4-bit weights, by its cache", ylabel="bits per character")
    axis.set(xlabel="bytes of the cache per token", xlim=(0, None))
    axis.legend()
    return figure


def staircase():
    """Fake quantization of 3 bits, and the gradient with respect to x: straight through inside the range."""
    spec, qparams = QuantSpec(bits=3), QParams(1.0, 0.0)
    x = jnp.linspace(-5, 5, 2001)
    y = fake_quant(x, spec, qparams)
    gradient = jax.vmap(jax.grad(lambda x: fake_quant(x, spec, qparams)))(x)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    axes[0].plot(x, x, color=GRAY, linewidth=1, linestyle="--", label="x")
    axes[0].plot(x, y, label="fake_quant(x)")
    axes[0].set(title="Forward: 7 levels, then clipping", xlabel="x")
    axes[0].legend()
    axes[1].plot(x, gradient, color=COLORS[1])
    axes[1].set(title="Backward: straight-through estimator", xlabel="x", ylabel="gradient w.r.t. x", ylim=(-0.1, 1.3))
    return figure


def granularities():
    """Which weights of a kernel share one scale."""
    rows, columns = 6, 8
    kinds = {
        "per tensor\n1 scale": lambda r, c: 0,
        "per channel\n8 scales": lambda r, c: c,
        "per group of 3\n16 scales": lambda r, c: (r // 3) * columns + c,
    }
    figure, axes = plt.subplots(1, 3, figsize=(9, 3))
    colors = plt.get_cmap("tab20").colors
    for axis, (title, group) in zip(axes, kinds.items(), strict=True):
        for r in range(rows):
            for c in range(columns):
                color = colors[group(r, c) * 2 % 20 + (group(r, c) * 2 // 20) % 2]
                axis.add_patch(Rectangle((c, -r), 0.9, -0.9, facecolor=color, alpha=0.8))
        axis.set(xlim=(-0.1, columns), ylim=(-rows, 0.1), title=title, aspect="equal")
        axis.axis("off")
    axes[0].text(-0.25, -rows / 2, "inputs", rotation=90, va="center", ha="right")
    axes[1].text(columns / 2, -rows - 0.3, "output channels", ha="center", va="top")
    return figure


def onto_the_grid():
    """Float weights during QAT at 3 bits: many gather at the thresholds between two levels, where rounding flips."""
    x = jax.random.normal(jax.random.key(0), (256, 16))
    target = jnp.tanh(x @ jax.random.normal(jax.random.key(1), (16, 8)) / 3)
    spec, qparams = weight_spec(3, channel_axis=-1), QParams(jnp.full((1, 8), 0.15), jnp.zeros((1, 8)))
    loss = lambda w: jnp.mean((jnp.tanh(x @ fake_quant(w, spec, qparams)) - target) ** 2)
    optimizer = optax.adam(optax.linear_schedule(2e-2, 0.0, 400))

    def step(carry, _):
        w, state = carry
        updates, state = optimizer.update(jax.grad(loss)(w), state)
        return (optax.apply_updates(w, updates), state), w

    w = jax.random.normal(jax.random.key(2), (16, 8)) * 0.15
    _, history = jax.lax.scan(step, (w, optimizer.init(w)), None, 400)
    figure, axis = plt.subplots(figsize=(9, 3.4))
    for level in np.arange(-3, 4) * 0.15:
        axis.axhline(level, color=GRAY, linewidth=0.8, linestyle="--")
    axis.plot(
        np.arange(0, 400, 4), np.asarray(history).reshape(400, -1)[::4, :40], linewidth=0.9, alpha=0.8, color=COLORS[0]
    )
    axis.set(title="Float weights during QAT at 3 bits; levels dashed", xlabel="step", ylabel="weight")
    axis.set_ylim(-0.6, 0.6)
    return figure


def curves():
    """The training loss of a regression: in float, then QAT from there at 4 bits, and at 2 with ranges of two kinds."""
    x = jax.random.normal(jax.random.key(0), (256, 16))
    w1, w2 = (jax.random.normal(jax.random.key(i), shape) / 3 for i, shape in ((1, (16, 32)), (2, (32, 8))))
    target = jnp.tanh(x @ w1) @ w2
    model = lambda p, x: jnp.tanh(x @ p["w1"]) @ p["w2"]
    optimizer = optax.adam(optax.linear_schedule(1e-2, 0.0, 400))

    def train(trained, f):
        def step(carry, _):
            trained, state = carry
            value, g = jax.value_and_grad(lambda t: jnp.mean((f(*t) - target) ** 2))(trained)
            updates, state = optimizer.update(g, state)
            return (optax.apply_updates(trained, updates), state), value

        (trained, _), losses = jax.jit(lambda t: jax.lax.scan(step, (t, optimizer.init(t)), None, 400))(trained)
        return trained, losses

    keys = jax.random.split(jax.random.key(3))
    params = {name: jax.random.normal(k, w.shape) / 4 for name, k, w in zip(("w1", "w2"), keys, (w1, w2), strict=True)}
    (params,), losses = train((params,), lambda p: model(p, x))
    figure, axis = plt.subplots(figsize=(9, 3.4))
    axis.semilogy(losses, color=GRAY, label="float")
    for bits, name, method in (
        (4, "4 bits, learned ranges", "mse"),
        (2, "2 bits, learned", "lsq"),
        (2, "2 bits, min-max", None),
    ):
        q = quantize_fn(model, [Rule("w*", weight_spec(bits))])
        trained = (params, q.init_qparams(params, x, method=method)) if method else (params,)
        _, losses = train(trained, lambda p, s=None, q=q: q(p, x, qparams=s))
        axis.semilogy(np.arange(400, 800), losses, label=f"QAT, {name}")
    axis.set(title="Training loss: float, then QAT from its end", xlabel="step", ylabel="loss")
    axis.legend(loc="upper left", bbox_to_anchor=(0.06, 1))
    return figure


def ranges():
    """The upper end of an activation's range over batches, by three observers."""
    spec, total, seen, counts = activation_spec(8), Range(np.inf, -np.inf), Range(np.inf, -np.inf), None
    rows = {"this batch": [], "min-max, merge": [], "moving average, ema_ranges": [], "99.9 %, histogram": []}
    for i in range(60):
        x = jax.nn.relu(jax.random.normal(jax.random.key(i), (512,)) + 0.5)
        x = x.at[0].set(9.0) if i == 20 else x
        batch = observe(x, spec)
        total, seen = merge(total, batch), ema_ranges(seen, batch, 0.9)
        counts = histogram(x, spec) if counts is None else merge(counts, histogram(x, spec))
        of_batch = batch, total, seen, range_from_histogram(counts, percentile=99.9)
        for row, r in zip(rows.values(), of_batch, strict=True):
            row.append(float(r.x_max))
    figure, axis = plt.subplots(figsize=(9, 3.2))
    for (name, row), color in zip(rows.items(), [GRAY, *COLORS], strict=False):
        axis.plot(row, label=name, color=color, linewidth=1 if name == "this batch" else 2)
    axis.set(title="One outlier in batch 20", xlabel="batch", ylabel="upper end of the range")
    axis.legend()
    return figure


def delayed():
    """The largest magnitude of a gradient over steps, and what its history lets through."""
    q = quantize_fn(lambda w, x: x @ w, [Rule("", QuantSpec(), QuantSpec(), gradient=QuantSpec(), history=8)])
    w, x = jnp.eye(16), jax.random.normal(jax.random.key(0), (32, 16))
    trained, histories = split_histories(q.init_qparams(w, x))

    @jax.jit
    def step(histories, g):
        given = delayed_qparams(histories)
        seen = jax.vjp(lambda given: q(w, x, qparams={**trained, **given}), given)[1](g)[0]
        return update_histories(histories, seen)

    largest, limit = [], []
    for i in range(60):
        g = 2.0 ** (3 * np.sin(i / 9)) * jax.random.normal(jax.random.key(i), (32, 16)) * (4 if i == 20 else 1)
        given = delayed_qparams(histories)[":gradient"].qparams
        limit.append(np.nan if i == 0 else 127 * float(given.scale))
        largest.append(float(jnp.abs(g).max()))
        histories = step(histories, g)
    largest, limit = np.array(largest), np.array(limit)
    steps, clipped = np.arange(60), largest > limit
    figure, axis = plt.subplots(figsize=(9, 3.2))
    axis.step(steps, limit, where="mid", color=COLORS[0], label="end of the range, of the 8 steps before")
    axis.plot(steps, largest, "o-", color=GRAY, markersize=3, linewidth=1, label="largest magnitude of g")
    axis.plot(steps[clipped], largest[clipped], "o", color=COLORS[4], markersize=5, label="clipped")
    axis.set(title="A history of 8 steps", xlabel="step", yscale="log")
    axis.legend()
    return figure


@functools.cache
def network():
    """A small network, trained on nothing: its report is about errors alone."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = {f"layer{i}": jax.random.normal(k, (32, 32)) * 0.25 for i, k in enumerate(keys[:4])}
    x = jax.random.normal(keys[4], (64, 32))

    def f(p, x):
        for i in range(4):
            x = jax.nn.relu(x @ p[f"layer{i}"])
        return x

    return f, params, x


def sqnr():
    """Signal-to-quantization-noise ratio of each weight and input at 8 and at 4 bits."""
    f, params, x = network()
    figure, axis = plt.subplots(figsize=(9, 3.2))
    for k, bits in enumerate((8, 4)):
        found = report(quantize_fn(f, [Rule("*", weight_spec(bits), activation_spec(bits))]), params, x)
        axis.bar(np.arange(len(found)) + 0.4 * k, [row.sqnr for row in found], 0.36, label=f"{bits} bits")
    axis.set_xticks(np.arange(len(found)) + 0.2, [row.entry for row in found], rotation=20, ha="right")
    axis.set(title="Error of each quantized operand", ylabel="SQNR, dB", ylim=(0, 60))
    axis.legend(ncols=2, loc="upper right")
    return figure


def costs():
    """A report as bars: SQNR, and what each operand costs the loss."""
    f, params, x = network()
    targets = f(params, x) + 0.1 * jax.random.normal(jax.random.key(1), (64, 32))
    q = quantize_fn(f, [Rule("*", weight_spec(4), activation_spec(4))])
    found = report(q, params, x, loss=lambda y: jnp.mean((y - targets) ** 2))
    rows = list(found)[::-1]  # the first at the top
    at, names = np.arange(len(rows)), [row.entry for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 1.2 + 0.32 * len(rows)), sharey=True, layout="constrained")
    left.barh(at, [row.sqnr for row in rows])
    left.set_yticks(at, names)
    left.set_xlabel("SQNR, dB")
    right.barh(at - 0.2, [row.predicted for row in rows], 0.4, label="predicted", color="0.6")
    right.barh(at + 0.2, [row.change for row in rows], 0.4, label="measured", color="C1")
    right.set_xlabel(f"change of the loss, {found.loss:.4g} in float")
    right.legend()
    return figure


PACKAGE = FOLDER.parents[1] / "jaxquant"


def imported(path):
    """The rooms of the package, top-level files and folders, that a file imports."""
    folder = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) + 1 - node.level]
            yield from (((*base, *(node.module or name.name).split("."))[0]) for name in node.names)


def floors():
    """The rooms of the package on the lowest floors that their imports allow, folders with what is in them."""
    files = {}
    for path in sorted(PACKAGE.rglob("[_a-z]*.py")):
        if path.name not in ("__init__.py", "_version.py"):
            files.setdefault(path.relative_to(PACKAGE).with_suffix("").parts[0], []).append(path)
    below = {room: {name for path in of for name in imported(path)} - {room} for room, of in files.items()}

    @functools.cache
    def floor(room):
        return 1 + max(map(floor, below[room]), default=-1)

    top = max(map(floor, files))
    figure, axis = plt.subplots(figsize=(11, 9))
    axis.set(xlim=(-42, 42), ylim=(-0.2, top + 1))
    axis.axis("off")
    for level in range(top + 1):
        inside = {room: " ".join(p.stem for p in of if p.stem != room) for room, of in files.items()}
        contents = {room: textwrap.wrap(text, max(36, len(text) // 2 + 8))
                    for room, text in inside.items() if floor(room) == level}  # fmt: skip
        widths = [3 + max(len(room), *(0.6 * len(line) for line in lines), 0) for room, lines in contents.items()]
        left = -sum(widths) / 2
        for (room, lines), width in zip(contents.items(), widths, strict=True):
            color, middle = COLORS[1 if lines else 0], left + width / 2
            frame = {"boxstyle": "round,pad=0.04", "facecolor": "none", "edgecolor": color, "linewidth": 1.5}
            axis.add_patch(FancyBboxPatch((left + 0.6, level), width - 1.2, 0.74, **frame))
            centred = {"ha": "center", "va": "center", "family": "monospace"}
            axis.text(middle, level + (0.61 if lines else 0.37), room, **centred)
            axis.text(middle, level + 0.17, "\n".join(lines), fontsize=7, color=color, **centred)
            left += width
    return figure


def walk():
    """An operand on its way through a site, forward and backward, with the function at each arrow."""
    forward = "operand,\nfloat", "integers, scale,\nNaN flags", "int8 digits", "accumulator,\nint32", "result,\nfloat"
    backward = (
        "gradients of operand,\nscale, zero point",
        "gradient of the\ndequantized operand",
        "gradient of\nthe result",
    )
    figure, axis = plt.subplots(figsize=(11, 3.6))
    axis.set(xlim=(-0.2, 15.3), ylim=(-0.3, 4.2))
    axis.axis("off")

    def box(x, y, text, color):
        axis.add_patch(FancyBboxPatch((x, y), 2, 0.9, boxstyle="round,pad=0.06", facecolor="none", edgecolor=color))
        axis.text(x + 1, y + 0.45, text, ha="center", va="center", fontsize=9)

    def arrow(start, end, y, text):
        axis.add_patch(FancyArrowPatch((start, y), (end, y), arrowstyle="-|>", mutation_scale=14, color=GRAY))
        code = {"fontsize": 8, "family": "monospace", "color": COLORS[1]}
        axis.text((start + end) / 2, y + 0.62, text, ha="center", va="bottom", **code)

    for i, text in enumerate(forward):
        box(3.25 * i, 2.2, text, COLORS[0])
    for i, text in enumerate(ON_THE_WAY):
        arrow(3.25 * i + 2.1, 3.25 * i + 3.18, 2.65, text)
    for x, text in zip((0, 6.5, 13), backward, strict=True):
        box(x, 0.2, text, COLORS[3])
    for start, end, text in ((12.9, 8.6, WAY_BACK[0]), (6.4, 2.1, WAY_BACK[1])):
        arrow(start, end, 0.65, text)
    return figure


ON_THE_WAY = "quantize_\nstraight_through", "in_digits", "lowering", "scaled"
WAY_BACK = "contract: op.real transposed,\nor op.operand_gradient", "straight through,\nthe form of LSQ"


FIGURES = (
    pipeline,
    floors,
    walk,
    accuracy,
    benchmarks,
    serving,
    solvers,
    caches,
    staircase,
    granularities,
    onto_the_grid,
    curves,
    ranges,
    delayed,
    sqnr,
    costs,
)

if __name__ == "__main__":
    mpl.use("svg")
    plt.style.use(FOLDER / "figures.mplstyle")
    for draw in FIGURES:
        if len(sys.argv) == 1 or draw.__name__ in sys.argv[1:]:
            draw().savefig(FOLDER / f"{draw.__name__}.svg", metadata={"Date": None})
            print(f"{draw.__name__}.svg")
