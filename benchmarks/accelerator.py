# SPDX-License-Identifier: Apache-2.0
"""What do the ops give and cost on an accelerator: their bits against the CPU's, and their times?

    python -m benchmarks accelerator                                # on a GPU or TPU: writes docs/benchmarks_gpu.md
    python -m benchmarks accelerator.exactness accelerator.steps    # some of its parts, printed alone
    python -m benchmarks accelerator.record                         # the bits of XLA:CPU anew, on any machine

Needs nothing but jax. What fails becomes a line of its table and stops nothing else.

Each time is of a loop inside one program, divided by its length, so that it holds no dispatch from Python. What is
compared is interleaved; medians over rounds, in brackets the quartiles.
"""

import functools
import itertools
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxquant import (
    PerChannel,
    QuantSpec,
    Rule,
    activation_spec,
    dot_general,
    fake_quant,
    fit_qparams,
    quantize,
    quantize_fn,
    tf,
    weight_spec,
)

from . import exactness
from .runner import Ratio, kept, machine, row_of, seconds

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "benchmarks_gpu.md"
LIMIT, QUICK = 330, 20  # seconds, after which no further row is begun


class Failed(str):
    """The first line of an error, in the place of what there would be without it."""


def attempt(f: Callable, *args: Any) -> Any:
    try:
        return f(*args)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Failed(f"{type(error).__name__}: {lines[0]}"[:160])


# ---- Bits.


def exactness_rows(*families: str) -> Iterator[tuple]:
    """A row for each output of each op, over its cases; and one for each case that fails."""
    want = exactness.recorded()
    cases = list(exactness.cases(*families))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compiling is what takes the time
        results = list(pool.map(lambda case: attempt(exactness.compared, case, want), cases))
    found: dict[str, list[tuple[exactness.Difference, str]]] = {}
    for case, result in zip(cases, results, strict=True):
        if isinstance(result, Failed):
            yield case.name, result
            continue
        op = case.name.split(",")[0] + ", subnormal" * case.name.endswith("subnormal")
        for output, difference in result.items():
            name = f"{op}: {output}{'' if case.exact else ' (sums of floats)'}"
            found.setdefault(name, []).append((difference, case.name))
    for name, pairs in found.items():
        differing = [pair for pair in pairs if pair[0].differ]
        row = [name, f"{len(differing)} of {len(pairs)}", sum(d.values for d, _ in pairs)]
        if not differing:
            yield *row, 0
            continue
        ulps, relative = (max(getattr(d, field) for d, _ in pairs) for field in ("ulps", "relative"))
        worst = max(differing, key=lambda pair: pair[0].relative)[1]
        ulps = "a NaN on one side" if np.isinf(ulps) else f"{ulps:.0f}"
        yield *row, sum(d.differ for d, _ in pairs), ulps, f"{relative:.1e}", worst


# ---- Times.


def loop(step: Callable, length: int) -> Callable:
    """`length` steps `carry = step(carry, now, fixed)` as a function of (carry, every now, fixed)."""

    def looped(carry, every, fixed):
        return lax.scan(lambda carry, now: (step(carry, now, fixed), None), carry, every, length=length)[0]

    return looped


def repeated(tree: Any, length: int) -> Any:
    return jax.tree.map(lambda v: jnp.broadcast_to(v, (length, *jnp.shape(v))), tree)


def calls(f: Callable, length: int, x: Array, varying: tuple = (), fixed: tuple = ()) -> Callable[[], object]:
    """A run of `length` calls `f(x, *varying, *fixed)` in one program.

    One number of x changes before each call, and each reads its own `varying`: what does not change in a loop is moved
    out of it.
    """
    result = jax.eval_shape(f, x, *varying, *fixed)

    def step(carry, now, fixed):
        number, varying = now
        x = lax.dynamic_update_slice(carry[0], number.astype(x_dtype).reshape((1,) * x_ndim), (0,) * x_ndim)
        return x, f(x, *varying, *fixed)

    x_dtype, x_ndim = x.dtype, x.ndim
    every = jnp.arange(length, dtype=jnp.float32) % 8, repeated(varying, length)
    carry = x, jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), result)
    return kept(loop(step, length), carry, every, fixed)


def length_for(work: float, budget: float) -> int:
    return int(np.clip(budget // work, 4, 200))


def started(make: Callable[[], Callable]) -> Callable[[], object]:
    run = make()
    run()
    return run


class Times:
    """The times of runs of `length` steps each, and the errors of those that cannot be made or run."""

    def __init__(self, makers: dict[str, Callable[[], Callable]], length: int, rounds: int):
        runs = {name: attempt(started, make) for name, make in makers.items()}
        self.errors = {name: run for name, run in runs.items() if isinstance(run, Failed)}
        self.taken = seconds({name: run for name, run in runs.items() if name not in self.errors}, rounds)
        self.names, self.length = list(makers), length

    def median(self, name: str) -> float:
        return float(np.median(self.taken[name])) / self.length

    def cell(self, name: str, form: Callable[[float], float]) -> str:
        """A number made of the seconds of a step."""
        return self.errors[name] if name in self.errors else f"{form(self.median(name)):.4g}"

    def ratio(self, name: str, base: str) -> str:
        if name in self.errors or base in self.errors:
            return ""
        return str(Ratio(*np.quantile(self.taken[name] / self.taken[base], [0.5, 0.25, 0.75])))


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def with_vjp(f: Callable) -> Callable:
    """The value of `f(x, *others)` and its vjp of g, as a function of (x, *others, g)."""

    def both(x, *others):
        *others, g = others
        value, vjp = jax.vjp(f, x, *others)
        return value, vjp(g)

    return both


def elementwise_rows(
    sizes: Sequence[int] = (4096, 16384), dtypes: Sequence[str] = ("float32", "bfloat16"), rounds: int = 11
) -> Iterator[tuple]:
    """The forward pass to x + 1; with a vjp, which writes two arrays, to x + g, which writes one."""
    tensor, channel = QuantSpec(), weight_spec(channel_axis=-1)
    affine = QuantSpec(symmetric=False, granularity=PerChannel(-1))
    on = lambda spec: lambda x, q: fake_quant(x, spec, q)
    for n, dtype in itertools.product(sizes, dtypes):
        x, g, length = normal(0, n, n, dtype=dtype), normal(1, n, n, dtype=dtype), length_for(n * n, 2e9)
        given = lambda spec, x=x: (on(spec), (fit_qparams(x, spec),))
        forward = {
            "`fake_quant`, per tensor": given(tensor),
            "`fake_quant`, last axis": given(channel),
            "`fake_quant`, last axis, affine": given(affine),
            "`fake_quant`, last axis, range of the data": (lambda x: fake_quant(x, channel), ()),
            "`tf.fake_quant_with_min_max_vars`": (
                tf.fake_quant_with_min_max_vars,
                (jnp.float32(-1.3), jnp.float32(2.1)),
            ),
        }
        run = lambda f, *args, length=length, x=x: lambda: calls(f, length, x, *args)
        makers = {"x + 1": run(lambda x: x + 1)} | {name: run(*pair) for name, pair in forward.items()}
        yield from _against("x + 1", Times(makers, length, rounds), dtype, n)
        makers = {"x + g": run(lambda x, g: x + g, (), (g,))}
        makers |= {f"{name}, and vjp": run(with_vjp(f), varying, (g,)) for name, (f, varying) in forward.items()}
        yield from _against("x + g", Times(makers, length, rounds), dtype, n)


def _against(base: str, times: Times, dtype: str, n: int) -> Iterator[tuple]:
    for name in times.names:
        ratio = ("", "") if name == base else (base, times.ratio(name, base))
        yield name, dtype, f"{n}^2", times.cell(name, lambda second: second * 1e6), *ratio


IN_OUT, OUT_IN = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))
COMPARED = "int8", "float8_e4m3fn", "jaxquant"
SHAPES = *((n, n) for n in (1024, 2048, 4096, 8192)), *((rows, 8192) for rows in (1, 16, 256))


def products(rows: int, n: int) -> dict[str, Callable]:
    """Makers of (dot, x, w) for each kind of product, of a matrix (rows, n) and one (n, n)."""
    x, w, spec = normal(0, rows, n), normal(1, n, n), QuantSpec()
    dot = lambda **kw: lambda x, w: lax.dot_general(x, w, IN_OUT, **kw)
    return {
        "float32": lambda: (dot(), x, w),
        "float32, highest": lambda: (dot(precision=lax.Precision.HIGHEST), x, w),
        "bfloat16": lambda: (dot(), x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)),
        "int8": lambda: (dot(preferred_element_type=jnp.int32), *(quantize(v, spec).values for v in (x, w))),
        "float8_e4m3fn": lambda: (
            dot(preferred_element_type=jnp.bfloat16), *(v.astype(jnp.float8_e4m3fn) for v in (x, w))
        ),
        "jaxquant": lambda: (
            lambda x, w: dot_general(quantize(x, spec), w, OUT_IN),
            x.astype(jnp.bfloat16),
            quantize(w.T, weight_spec(channel_axis=0)),
        ),
    }  # fmt: skip


def product_rows(shapes: Sequence[tuple[int, int]] = SHAPES, rounds: int = 11) -> Iterator[tuple]:
    for rows, n in shapes:
        operations = 2 * rows * n * n
        length = length_for(operations, 3e12)

        def run(make, length=length):
            dot, x, w = make()
            return calls(dot, length, x, (), (w,))

        makers = {name: functools.partial(run, make) for name, make in products(rows, n).items()}
        times = Times(makers, length, rounds)
        rates = [times.cell(name, lambda second, n=operations: n / second / 1e12) for name in times.names]
        yield f"({rows}, {n}) x ({n}, {n})", *rates, *(times.ratio(name, "bfloat16") for name in COMPARED)


# ---- Training steps.


def mlp(params: list[dict[str, Array]], x: Array) -> Array:
    *hidden, head = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"][None])
    return x @ head["kernel"] + head["bias"][None]


def mlp_with(widths: Sequence[int], batch: int) -> tuple[Callable, Any, Array]:
    sizes = itertools.pairwise(widths)
    params = [{"kernel": normal(i, m, n) / m**0.5, "bias": jnp.zeros(n)} for i, (m, n) in enumerate(sizes)]
    return mlp, params, normal(99, batch, widths[0])


def transformer(params: dict[str, Any], x: Array, heads: int = 8) -> Array:
    """Attention and a feed-forward layer in each block, each behind a normalization without parameters."""
    for block in params["blocks"]:
        q, k, v = ((_normalized(x) @ block[name]).reshape(*x.shape[:2], heads, -1) for name in ("q", "k", "v"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        x = x + y.reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(_normalized(x) @ block["up"]) @ block["down"]
    return x.mean(1) @ params["head"]


def _normalized(x: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def transformer_with(layers: int, width: int, batch: int, tokens: int) -> tuple[Callable, Any, Array]:
    shapes = dict.fromkeys(("q", "k", "v", "out"), (width, width)) | {
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    block = lambda i: {name: normal(i, *shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    params = {"blocks": [block(i) for i in range(layers)], "head": normal(98, width, 10)}
    return transformer, params, normal(99, batch, tokens, width)


MODELS = {
    "MLP, 784-1024-1024-1024-10, batch of 4096": lambda: mlp_with((784, 1024, 1024, 1024, 10), 4096),
    "transformer, 2 layers, width 1024, 16 x 512 tokens": lambda: transformer_with(2, 1024, 16, 512),
}


def in_bfloat16(apply: Callable) -> Callable:
    """The model computed in bfloat16, with float32 params and results."""
    cast = lambda tree: jax.tree.map(lambda v: v.astype(jnp.bfloat16), tree)
    return lambda params, x: apply(cast(params), cast(x)).astype(jnp.float32)


def contenders(apply: Callable) -> dict[str, Callable]:
    both = [Rule("**", weight_spec(8), activation_spec(8, symmetric=True))]
    return {
        "float32": apply,
        "bfloat16": in_bfloat16(apply),
        "`quantize_fn`, int8": quantize_fn(apply, both, execution="int8"),
        "`quantize_fn`, weights alone": quantize_fn(apply, [("**", weight_spec(8))]),
        "`quantize_fn`, int8, of the bfloat16 model": quantize_fn(in_bfloat16(apply), both, execution="int8"),
    }


def adam_step(apply: Callable, rate: float = 1e-3) -> Callable:
    """A step of a `loop`: the carry is (params, first moments, second moments, number of steps)."""

    def loss(params, x, labels):
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(apply(params, x)), labels[:, None], 1))

    def step(state, batch, fixed):
        params, first, second, count = state
        gradient, count = jax.grad(loss)(params, *batch), count + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradient)
        update = lambda p, m, v: p - rate * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)
        return jax.tree.map(update, params, first, second), first, second, count

    return step


def step_rows(models: dict[str, Callable] = MODELS, length: int = 10, rounds: int = 7) -> Iterator[tuple]:
    for model, make in models.items():
        apply, params, x = make()
        zeros = jax.tree.map(jnp.zeros_like, params)
        state, batches = (params, zeros, zeros, jnp.float32(0)), repeated((x, jnp.arange(x.shape[0]) % 10), length)
        run = lambda f, state=state, batches=batches: lambda: kept(loop(adam_step(f), length), state, batches, ())
        times = Times({name: run(f) for name, f in contenders(apply).items()}, length, rounds)
        for name in times.names:
            ratios = ["" if name == base else times.ratio(name, base) for base in ("float32", "bfloat16")]
            yield model, name, times.cell(name, lambda second: second * 1e3), *ratios


# ---- The page.


class Part(NamedTuple):
    """A section of the page: its title, what to know for reading it, and its table."""

    title: str
    text: str
    columns: tuple[str, ...]
    rows: Callable[[], Iterator[tuple]]


PARTS = {
    "exactness": Part(
        "Bits",
        """\
Values that differ from those that XLA:CPU gave for the same inputs. A NaN equals a NaN. Ulps count the numbers between
two values, levels between two integers; the next column is in units of the largest value. Sums of floats are promised
on no device. XLA:CPU reads and writes subnormals as 0; other devices may not.""",
        ("op: output", "cases that differ", "values", "differ", "ulps at most", "relative at most", "largest in"),
        exactness_rows,
    ),
    "elementwise": Part(
        "Element-wise ops",
        """\
Scales and ranges are given but where it says otherwise, and then the vjp is to them too. The value and the vjp to x are
two arrays written, where x + g is one. Arrays of 4096^2 may stay in the cache of the device.""",
        ("op", "dtype", "size", "microseconds", "base", "time to that of the base"),
        elementwise_rows,
    ),
    "products": Part(
        "Products",
        """\
10^12 operations a second, two for each product and sum. float32 is JAX's default precision, which may be less than
float32, and `Precision.HIGHEST`. int8 sums to int32. jaxquant is `dot_general` of x in bfloat16, quantized in the time
measured, and an int8 weight stored (out, in). Each call follows the write of one number, which the smallest feel.""",
        (
            *("product", "float32", "float32, highest", "bfloat16", "int8", "float8_e4m3fn", "jaxquant"),
            *(f"time of {name} to bfloat16" for name in COMPARED),
        ),
        product_rows,
    ),
    "steps": Part(
        "Training steps",
        """\
Forward, backward and Adam, with 8-bit weights per channel and symmetric 8-bit activations per tensor. The bfloat16
model computes in bfloat16 from float32 params.""",
        ("model", "step", "milliseconds", "time to float32", "time to bfloat16"),
        step_rows,
    ),
}


def line(cells: Sequence[Any], width: int) -> str:
    """A line of a table, filled up to its width."""
    cells = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(cells + [''] * (width - len(cells)))} |"


def section(part: Part, until: float, found: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of a part, whose rows are added to `found`.

    An error ends it with a row that says so, and so does the time `until` which rows begin.
    """
    width = len(part.columns)
    yield from (f"## {part.title}", "", *part.text.splitlines(), "", line(part.columns, width), "|---" * width + "|")
    rows = part.rows()
    while True:
        if time.monotonic() > until:
            yield line(["not measured: the time of the run is up"], width)
            return
        row = attempt(next, rows, None)
        if row is None:
            return
        yield line([row] if isinstance(row, Failed) else row, width)
        if isinstance(row, Failed):
            return
        found.append(row_of(part.columns, (*row, *[""] * (width - len(row)))))


def heading() -> Iterator[str]:
    """The device, the versions, and a warning if the bits were recorded with others."""
    yield from ("# Benchmarks on an accelerator", "", "Written by `python -m benchmarks accelerator`.", "")
    platform = " ".join(jax.devices()[0].client.platform_version.split())
    yield f"Measured on: {machine()}; {jax.default_backend()}, {platform}."
    recorded, here = exactness.recorded().versions, exactness.versions()
    if not here.items() <= recorded.items():
        said = [", ".join(f"{name} {v}" for name, v in versions.items()) for versions in (recorded, here)]
        yield from (
            "",
            f"**The bits were recorded with {said[0]}; this is {said[1]}.** What differs may be due to that.",
        )


def main(
    chosen: Sequence[str], quick: bool = False, page: pathlib.Path = PAGE, parts: dict[str, Part] = PARTS
) -> dict[str, Any] | None:
    """Prints some parts, or all of them and then writes the page; gives the rows, or None if nothing is measured."""
    if chosen == ["record"]:
        jax.config.update("jax_platforms", "cpu")
        exactness.record()
        return None
    if jax.default_backend() == "cpu":
        print("JAX finds no accelerator here, so nothing is measured and nothing is written.")
        return None
    until, lines, found = time.monotonic() + (QUICK if quick else LIMIT), [], []
    report(heading(), lines)
    for name in chosen or parts:
        report(("", *section(parts[name], until, found)), lines)
        if not (chosen or quick):  # after each part, so that nothing is lost if the machine is
            page.write_text("\n".join(lines) + "\n")
    return {"machine": machine(), "rows": found}


def report(new: Any, lines: list[str]) -> None:
    """Prints lines as they come, and keeps them."""
    for text in new:
        print(text, flush=True)
        lines.append(text)
