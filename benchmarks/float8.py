# SPDX-License-Identifier: Apache-2.0
"""A step of float8 training: scales just in time and delayed, beside one by hand as Transformer Engine takes it."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxquant import Range, Rule, float8_spec, quantize_fn
from jaxquant.delayed import delayed_qparams, split_histories, update_histories

from . import aot
from .devices import mlp
from .runner import Part, compared, kept

STEPS = 16
E4M3, E5M2 = float8_spec(), float8_spec("float8_e5m2")
Case = tuple[Callable, tuple]


def inputs_of(layers: int, width: int, rows: int) -> tuple[list[Array], Array, Array]:
    *keys, of_x, of_y = jax.random.split(jax.random.key(0), layers + 2)
    normal = lambda key, *shape: jax.random.normal(key, shape)
    return (
        [normal(key, width, width) / width**0.5 for key in keys],
        normal(of_x, rows, width),
        normal(of_y, rows, width),
    )


def later(history: Any, new: Any) -> Any:
    return jax.tree.map(lambda old, v: jnp.concatenate([v[None], old[:-1]]), history, new)


def descended(params: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)


# ---- By hand: all scales delayed, products of float8, and no rounding has a mask.


def cast(x: Array, scale: Array, dtype: Any) -> Array:
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x / scale, -most, most).astype(dtype)


def product(a: Array, b: Array, contracted: tuple[int, int]) -> Array:
    of_a, of_b = contracted
    return lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)


@jax.custom_vjp
def dense(x: Array, w: Array, scales: Array, seen: Array) -> Array:
    """`x @ w`, with the scales of x, w and g; the cotangent of `seen` is their largest magnitudes."""
    return _forward(x, w, scales, seen)[0]


def _forward(x, w, scales, seen):
    qx, qw = cast(x, scales[0], jnp.float8_e4m3fn), cast(w, scales[1], jnp.float8_e4m3fn)
    return product(qx, qw, (1, 0)) * (scales[0] * scales[1]), (qx, qw, scales, jnp.abs(x).max(), jnp.abs(w).max())


def _backward(residuals, g):
    qx, qw, scales, *largest = residuals
    qg = cast(g, scales[2], jnp.float8_e5m2)
    of_x, of_w = product(qg, qw, (1, 1)) * (scales[2] * scales[1]), product(qx, qg, (0, 0)) * (scales[0] * scales[2])
    return of_x, of_w, None, jnp.stack([*largest, jnp.abs(g).max()])


dense.defvjp(_forward, _backward)


def by_hand(params: list[Array], x: Array, y: Array) -> Case:
    def loss(params, seen, histories, x, y):
        for w, own, history in zip(params, seen, histories, strict=True):
            scales = history.max(0) / jnp.float32([448, 448, 57344])
            x = jax.nn.relu(dense(x, w, scales, own))
        return ((x - y) ** 2).mean()

    def step(params, histories, x, y):
        gradients, seen = jax.grad(loss, (0, 1))(params, [jnp.zeros(3)] * len(params), histories, x, y)
        return descended(params, gradients), later(histories, seen)

    return step, (params, [jnp.ones((STEPS, 3))] * len(params), x, y)


# ---- With jaxquant.


def just_in_time(params: list[Array], x: Array, y: Array, execution: str) -> Case:
    q = quantize_fn(mlp, [Rule("*", E4M3, E4M3, gradient=E5M2)], execution=execution)

    def step(params, x, y):
        return descended(params, jax.grad(lambda params: ((q(params, x) - y) ** 2).mean())(params))

    return step, (params, x, y)


def delayed(params: list[Array], x: Array, y: Array, execution: str) -> Case:
    """As docs/low_precision.md has it: ranges of inputs and gradients of earlier steps, of weights of this one."""
    q = quantize_fn(mlp, [Rule("*", E4M3, E4M3, gradient=E5M2, history=STEPS)], execution=execution)
    largest = lambda ranges: {name: Range(r.x_min.min(0), r.x_max.max(0)) for name, r in ranges.items()}

    def loss(params, given, trained, x, y):
        outputs, seen = q.observe(params, x, with_value=True, qparams={**trained, **given})
        return ((outputs - y) ** 2).mean(), seen

    def step(params, ranges, histories, x, y):
        trained, _ = split_histories(q.init_qparams(params, x, ranges=largest(ranges)))
        slope = jax.grad(loss, (0, 1), has_aux=True)
        (gradients, largest_g), seen = slope(params, delayed_qparams(histories), trained, x, y)
        return descended(params, gradients), later(ranges, seen), update_histories(histories, largest_g)

    of_inputs = jax.eval_shape(q.observe, params, x)
    ranges = {name: Range(jnp.full(STEPS, -4.0), jnp.full(STEPS, 4.0)) for name in of_inputs}
    _, histories = split_histories(jax.eval_shape(q.init_qparams, params, x))
    histories = jax.tree.map(lambda v: jnp.full(v.shape, 900, v.dtype), histories)  # gradients of 1e-4
    return step, (params, ranges, histories, x, y)


def in_float(params: list[Array], x: Array, y: Array, dtype: str) -> Case:
    def loss(params, x, y):
        for w in params:
            x = jax.nn.relu(product(x.astype(dtype), w.astype(dtype), (1, 0)))
        return ((x - y) ** 2).mean()

    return lambda params, x, y: descended(params, jax.grad(loss)(params, x, y)), (params, x, y)


def cases(layers: int, width: int, rows: int, executions: tuple[str, ...]) -> dict[str, Case]:
    inputs = inputs_of(layers, width, rows)
    found = {dtype: in_float(*inputs, dtype) for dtype in ("float32", "bfloat16")}
    found["by hand, all delayed"] = by_hand(*inputs)
    for execution in executions:
        of = "exact" if execution == "auto" else execution
        found[f"jaxquant, just in time, {of}"] = just_in_time(*inputs, execution)
        found[f"jaxquant, delayed, {of}"] = delayed(*inputs, execution)
    return found


def compiled_rows(rounds: int, layers: int, width: int, rows: int) -> Iterator[tuple]:
    if why := "; ".join(filter(None, map(aot.missing, ("h100", "v5e")))):
        return print(f"Skipped: {why}.")
    found, cycles = cases(layers, width, rows, ("native",)), {}
    for name, case in found.items():
        programs = {target: aot.compiled(*case, target) for target in ("h100", "b200", "v5e", "v6e")}
        cycles[name] = {target: programs[target].cycles for target in ("v5e", "v6e")}
        narrow = sum(any(v.startswith("f8") for v in kinds[:2]) for kinds in programs["h100"].products)
        kernels = [programs[target].kernels for target in ("h100", "b200")]
        ratios = [cycles[name][t] / cycles["bfloat16"][t] if "bfloat16" in cycles else "" for t in ("v5e", "v6e")]
        yield name, narrow, *kernels, *ratios


def measured_rows(rounds: int, layers: int, width: int, rows: int) -> Iterator[tuple]:
    runs = {name: kept(*_flat(case)) for name, case in cases(layers, width, rows, ("native", "auto")).items()}
    to = compared(runs, rounds)
    for name in runs:
        if name != "float32":
            yield name, to(name, "float32")


def _flat(case: Case) -> tuple:
    f, args = case
    return f, *args


PACKAGES = ()
PARTS = {
    "compiled": Part(
        (
            *("compiled, none was run: a step", "products of float8", "kernels, H100", "kernels, B200"),
            *("cycles to bfloat16, v5e", "cycles to bfloat16, v6e"),
        ),
        compiled_rows, 1, (2, 1024, 256),
    ),
    "steps": Part(("measured on a CPU: a step", "time to float32"), measured_rows, 20, (2, 1024, 256)),
}  # fmt: skip
