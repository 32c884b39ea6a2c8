# SPDX-License-Identifier: Apache-2.0
"""The params transforms on several devices: bits, gradients and shardings under FSDP, tensor and data parallelism."""

import functools
import itertools
import os
import pathlib
import subprocess
import sys

import affine_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from inputs import hard_values
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import cases

from jaxquant import (
    PerBlock,
    PerChannel,
    PerTensor,
    PerToken,
    QArray,
    QParams,
    QuantSpec,
    Range,
    Rule,
    activation_spec,
    dequantize_params,
    fake_quant,
    fake_quant_params,
    fit_qparams,
    float8_spec,
    init_qparams,
    observe,
    qparams_from_range,
    quantize_fn,
    quantize_params,
    weight_spec,
)
from jaxquant.tf import fake_quant_with_min_max_args

F = np.float32
SCRIPTS = pathlib.Path(__file__).parents[1] / "docs" / "sharding"


def mesh(kind, shape=(4,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(getattr(jax.sharding.AxisType, kind),) * len(names))


def same(got, want, what=""):
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert_same_bits(one, other, f"{what}{jax.tree_util.keystr(path)}")


def split_as(spec, shape):
    """The sharding of the qparams of a kernel: its own, along the axes that they do not share."""
    return P(*(axis if n > 1 else None for axis, n in zip(spec, shape, strict=True)))


# Every granularity on one kernel each, in one program.
SHAPE, AFFINE = (16, 8), {"symmetric": False}
SPECS = {
    "tensor": QuantSpec(bits=4, granularity=PerTensor(), **AFFINE),
    "rows": QuantSpec(granularity=PerChannel(0)),
    "columns": QuantSpec(bits=4, rounding="half_away", granularity=PerChannel(-1), **AFFINE),
    "blocks/of rows": QuantSpec(bits=4, granularity=PerBlock(0, 4), **AFFINE),
    "blocks/of columns": QuantSpec(signed=False, rounding="half_up", granularity=PerBlock(-1, 2), **AFFINE),
    "tiles": QuantSpec(bits=4, granularity=PerBlock((0, 1), (4, 2)), **AFFINE),
}
RULES = list(SPECS.items())
GROUPS = {"tensor": (), "rows": (16, 1), "columns": (1, 8), "blocks/of rows": (4, 8), "blocks/of columns": (16, 4)}
GROUPS["tiles"] = 4, 4
GRID = (2, 2), ("data", "model")
LAYOUTS = {
    "fsdp, rows": (((4,), ("data",)), P("data", None)),
    "fsdp, columns": (((4,), ("data",)), P(None, "data")),
    "column parallel": (GRID, P(None, "model")),
    "row parallel": (GRID, P("model", None)),
    "fsdp and column parallel": (GRID, P("data", "model")),
    "both axes on rows": (GRID, P(("data", "model"), None)),
}


def nested(leaves):
    """A params pytree of the leaves by path, with one that no rule chooses."""
    tree = {name: leaf for name, leaf in leaves.items() if "/" not in name}
    return {**tree, "blocks": {n.split("/")[1]: leaf for n, leaf in leaves.items() if "/" in n}}


@functools.cache
def inputs(exact):
    """Kernels, qparams and integer cotangents: with sums that no order changes, or at ties and NaN."""
    rng, leaves, qparams, g = np.random.default_rng([11, exact]), {}, {}, {}
    for name, spec in SPECS.items():
        scale = np.exp2(rng.integers(-6, 6, GROUPS[name])).astype(F) * (1 if exact else F(rng.uniform(1, 2)))
        steps = 2**spec.bits
        if exact:
            x = rng.integers(-4 * steps, 4 * steps + 1, SHAPE).astype(F) / 4
        else:
            x = hard_values(rng, 128, -steps, steps, 2 * steps).reshape(SHAPE)
            x = np.where(np.abs(x) < 1e30, x, F(np.nan))
        leaves[name] = x * affine_oracle.spread(scale, SHAPE).astype(F)
        zero_point = rng.integers(spec.qmin, spec.qmax + 1, GROUPS[name]) * (not spec.symmetric)
        qparams[name] = QParams(scale, np.asarray(zero_point, F))
        g[name] = rng.integers(-8, 9, SHAPE).astype(F)
    return nested(leaves), qparams, nested(g)


def everything(params, qparams, g):
    """All that the transforms give, of the range of the kernels and of given qparams: like the kernels, and not."""
    of_data, of_data_vjp = jax.vjp(lambda p: fake_quant_params(p, RULES), params)
    y, vjp = jax.vjp(lambda p, q: fake_quant_params(p, RULES, q), params, qparams)
    codes, (dparams, dqparams) = quantize_params(params, RULES, qparams), vjp(g)
    like = {
        "of data": of_data,
        "its gradient": of_data_vjp(g)[0],
        "y": y,
        "codes": jax.tree.map(lambda q: q.values, codes, is_leaf=lambda q: isinstance(q, QArray)),
        "dequantized": dequantize_params(codes),
        "dparams": dparams,
    }
    fitted, of_data = init_qparams(params, RULES, "minmax"), quantize_params(params, RULES)
    rest = {"fitted": fitted, "codes": codes, "codes of data": of_data, "dqparams": dqparams}
    return like, rest


@functools.cache
def expected(exact):
    """On one device."""
    return jax.jit(everything)(*inputs(exact))


def without_dscale(rest):
    """Of sums of floats; `shard_map` below bounds their rounding."""
    return {**rest, "dqparams": {path: d.zero_point for path, d in rest["dqparams"].items()}}


def kernels(layout, kind):
    """The mesh, and params, qparams and cotangents on it: the qparams whole for FSDP, else split with the kernels."""
    (shape, names), spec = LAYOUTS[layout]
    on = mesh(kind, shape, names)
    of_qparams = lambda v: P() if layout.startswith("fsdp,") or not np.ndim(v) else split_as(spec, v.shape)
    put = lambda v, s: jax.device_put(v, NamedSharding(on, s))
    sets = []
    for exact in (True, False):
        params, qparams, g = inputs(exact)
        qparams = jax.tree.map(lambda v: put(v, of_qparams(v)), qparams)
        sets.append((put(params, spec), qparams, put(g, spec)))
    return on, NamedSharding(on, spec), sets


@cases(
    ("layout", "kind"),
    [(layout, kind) for layout in LAYOUTS for kind in ("Auto", "Explicit")],
    [],
)
def test_sharded_params_give_the_bits_of_one_device_and_stay_sharded(layout, kind):
    on, sharding, sets = kernels(layout, kind)
    with jax.set_mesh(on):
        compiled = jax.jit(everything).lower(*sets[0]).compile()
        (like, rest), (hard_like, hard_rest) = (compiled(*a) for a in sets)
    same((like, rest), expected(True))
    same((hard_like, without_dscale(hard_rest)), (expected(False)[0], without_dscale(expected(False)[1])))
    for path, leaf in jax.tree.leaves_with_path(like):
        assert leaf.sharding.is_equivalent_to(sharding, 2), (path, leaf.sharding)
    for path, qparams in sets[0][1].items():
        d, q = rest["dqparams"][path].scale, qparams.scale
        assert kind == "Auto" or d.sharding.is_equivalent_to(q.sharding, q.ndim), (path, d.sharding)
    # What goes between devices are ranges and sums of groups, never a kernel.
    assert "f32[16,8]{1,0} all-gather" not in compiled.as_text()


@pytest.mark.slow
def test_blocks_that_lie_on_two_shards():
    rules, (params, *_) = [("w", QuantSpec(symmetric=False, granularity=PerBlock(0, 8)))], inputs(False)
    f = lambda p: (init_qparams(p, rules, "minmax"), fake_quant_params(p, rules), quantize_params(p, rules))
    run, w = jax.jit(f), {"w": params["rows"]}
    same(run(jax.device_put(w, NamedSharding(mesh("Auto"), P("data")))), run(w))


NAN_SPECS = weight_spec(8, -1), QuantSpec(**AFFINE)


@cases(
    ("spec", "kind"),
    itertools.product(NAN_SPECS, ["Auto", "Explicit"]),
    [(NAN_SPECS[1], "Auto")],
)
def test_a_nan_on_one_shard_hides_nothing_from_the_range(spec, kind):
    """XLA:CPU drops a NaN from a maximum over devices, and with it all that its shard holds."""
    on, rules = mesh(kind), [("w", spec)]
    f = lambda p: (init_qparams(p, rules, "minmax"), fake_quant_params(p, rules), quantize_params(p, rules))
    run, results = jax.jit(f), []
    for shard in range(4):
        w = np.ones((8, 4), F)
        w[2 * shard] = 100, -50, 25, 3
        w[2 * shard + 1] = np.nan
        with jax.set_mesh(on):
            results.append(run(jax.device_put({"w": w}, NamedSharding(on, P("data")))))
        same(results[-1], run({"w": jnp.asarray(w)}), f"shard {shard}")
        assert np.max(results[-1][0]["w"].scale) > 0.4


# A network whose sums are exact in every order, so that whatever the compiler makes of it has one value.
WEIGHTS = {"up": weight_spec(4, channel_axis=-1), "down": weight_spec(4, channel_axis=-1, block_size=4)}
MODEL_RULES = [(f"{name}/kernel", spec) for name, spec in WEIGHTS.items()]
ACTIVATION = activation_spec(8)


def model_inputs(powers_of_two=True):
    rng = np.random.default_rng(12)
    kernel = lambda *shape: rng.integers(-36, 37, shape).astype(F) / 16  # scale 1/4: quarters of levels up to +-9
    params = {"up": {"kernel": kernel(8, 16)}, "down": {"kernel": kernel(16, 4)}}
    qparams = {f"{n}/kernel": np.full(s, 0.25, F) for n, s in (("up", (1, 16)), ("down", (4, 4)))}
    qparams = {path: QParams(scale, np.zeros_like(scale)) for path, scale in qparams.items()}
    x, g = rng.integers(-3, 4, (8, 8)).astype(F), rng.integers(-3, 4, (8, 4)).astype(F)
    hidden = QParams(F(1), F(120))  # quarters of levels again, clipped at 7
    if not powers_of_two:
        params, qparams = jax.tree.map(lambda v: v * F(1.1), (params, qparams))
        # Of no integers: a sum that is 0, or a tie, falls to one side or the other by its order.
        x, g = (2 * rng.normal(size=v.shape).astype(F) for v in (x, g))
    return params, qparams, hidden, x, g


def loss(params, qparams, hidden, x, g, whole=lambda w: w, dot=jnp.matmul):
    """`whole` gathers a kernel where axis types make the reader say it; so does `dot` the sum over devices."""
    w = fake_quant_params(params, MODEL_RULES, qparams)
    h = fake_quant(jax.nn.relu(x @ whole(w["up"]["kernel"])), ACTIVATION, hidden)
    return (dot(h, whole(w["down"]["kernel"])) * g).sum()


# On one device: the loss and its gradients.
step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


@pytest.mark.parametrize("exact", [True, False])
def test_the_network_trains_and_clips_everything(exact):
    """Else the comparisons below would be of zeros."""
    _, gradients = step(*model_inputs(exact))
    dparams, dqparams, dhidden = jax.tree.map(np.asarray, gradients)
    assert all(0.1 < (leaf == 0).mean() < 0.9 for leaf in jax.tree.leaves(dparams))
    assert all((d.scale != 0).mean() > 0.8 for d in dqparams.values())  # one or two hidden units are dead
    assert dhidden.scale != 0
    assert dhidden.zero_point != 0


MODEL_LAYOUTS = {
    "fsdp": (((4,), ("data",)), P("data", None), P("data", None)),
    "tensor parallel": (GRID, P(None, "model"), P("model", None)),
}


@cases(
    ("layout", "kind"),
    [(layout, kind) for layout in MODEL_LAYOUTS for kind in ("Auto", "Explicit")],
    [("tensor parallel", "Explicit")],
)
def test_a_qat_step_of_sharded_params(layout, kind):
    """FSDP: the compiler gathers each kernel for its product. Tensor parallel: a column, then a row parallel kernel."""
    (shape, names), up, down = MODEL_LAYOUTS[layout]
    on, f = mesh(kind, shape, names), loss
    if kind == "Explicit" and layout == "fsdp":
        f = functools.partial(loss, whole=lambda w: jax.sharding.reshard(w, P()))
    if kind == "Explicit" and layout == "tensor parallel":
        f = functools.partial(loss, dot=functools.partial(jnp.einsum, "bi,io->bo", out_sharding=P("data", None)))
    params, qparams, *rest = model_inputs()
    specs = {"up": {"kernel": up}, "down": {"kernel": down}}
    of_qparams = lambda spec, q: jax.tree.map(lambda v: split_as(spec, v.shape), q)
    specs = (
        specs,
        {"up/kernel": of_qparams(up, qparams["up/kernel"]), "down/kernel": of_qparams(down, qparams["down/kernel"])},
        QParams(P(), P()),
        P("data"),
        P("data"),
    )
    put = lambda v, s: jax.device_put(v, NamedSharding(on, s))
    with jax.set_mesh(on):
        args = jax.tree.map(put, (params, qparams, *rest), specs)
        got = jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*args)
    same(got, step(*model_inputs()))
    dkernels = jax.tree.leaves(got[1][0])
    for d, kernel in zip(dkernels, jax.tree.leaves(args[0]), strict=True):
        assert kind == "Auto" or d.sharding.is_equivalent_to(kernel.sharding, 2), d.sharding


@functools.cache
def sharded_gradients():
    specs = {"in_specs": (P(), P(), P(), P("data"), P("data")), "out_specs": P()}
    return jax.jit(jax.shard_map(jax.grad(loss, (0, 1, 2)), mesh=mesh("Auto"), **specs))


@pytest.mark.parametrize("exact", [True, False], ids=["integer cotangents", "float cotangents"])
def test_shard_map_sums_the_gradients_of_replicated_qparams(exact):
    inputs = model_inputs(exact)
    got = sharded_gradients()(*inputs)
    _, want = step(*inputs)
    if exact:
        same(got, want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@cases("granularity", [PerTensor(), PerChannel(1), PerChannel((1, -1))], [PerChannel(1)])
def test_ranges_of_shards_merge_to_that_of_the_batch(granularity):
    """The last shard has no finite value: its range is that of nothing, and neutral."""
    spec, rng = activation_spec(8, granularity=granularity), np.random.default_rng(13)
    x = np.abs(rng.normal(size=(8, 4, 6))).astype(F) + F(0.5)
    x[1, 2, 3], x[3, 0, 0], x[6:] = np.nan, np.inf, np.nan

    def merged(x):
        own = observe(x, spec)
        return Range(lax.pmin(own.x_min, "data"), lax.pmax(own.x_max, "data"))

    got = jax.jit(jax.shard_map(merged, mesh=mesh("Auto"), in_specs=P("data"), out_specs=P()))(x)
    same(got, observe(x, spec))
    same(qparams_from_range(got, spec), fit_qparams(x, spec))


@pytest.mark.slow
@pytest.mark.parametrize("script", ["fsdp_and_tensor_parallel", "data_parallel", "integer_gradients", "two_processes"])
def test_the_script_runs(script, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", SCRIPTS / f"{script}.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_gradient_of_a_static_range_is_sharded_as_its_input():
    x = np.linspace(-9, 9, 16, dtype=F)
    grad = jax.grad(lambda x: fake_quant_with_min_max_args(x).sum())
    with jax.set_mesh(of := mesh("Explicit")):
        sharded = jax.device_put(x, NamedSharding(of, P("data")))
        got = jax.jit(grad)(sharded)
        assert jax.typeof(got).sharding.spec == P("data")
    same(got, grad(x))


@pytest.mark.parametrize(
    ("equation", "x", "w", "split"),
    [("btk,kn->btn", (3, 4, 6), (6, 5), (None, "model")), ("bt,n->btn", (4, 4), (5,), ("data", "model"))],
    ids=["time", "all axes"],
)
def test_a_gradient_is_split_as_its_operand_on_an_explicit_mesh(equation, x, w, split):
    rng, spec = np.random.default_rng(15), QuantSpec()
    x, w, g = (rng.integers(-127, 128, shape).astype(F) for shape in (x, w, (*x[:2], 5)))
    w[0] = 127  # a scale of 1
    f = quantize_fn(lambda w, x: jnp.einsum(equation, x, w), [Rule("**", spec, spec)])
    with jax.set_mesh(of := mesh("Explicit", *GRID)):
        put = lambda v: jax.device_put(v, NamedSharding(of, P(*split)))
        dx = jax.jit(lambda w, x, g: jax.vjp(lambda x: f(w, x), x)[1](g)[0])(w, put(x), put(g))
    assert jax.typeof(dx).sharding.spec[:2] == split
    same(dx, g @ w.T)


TILES = QuantSpec(bits=4, granularity=PerBlock((0, 1), (4, 6)))
# Its gradient, and itself.
of_tiles = jax.jit(jax.grad(lambda x: (((y := fake_quant(x, TILES)) ** 2).sum(), y), has_aux=True))


@pytest.mark.slow
@pytest.mark.parametrize("split", [P("data", None), P(None, "model"), P("data", "model")], ids=str)
def test_tiles_inside_the_shards_of_an_explicit_mesh(split):
    """JAX refuses to split two axes of a sharded array in one reshape."""
    x = np.random.default_rng(14).normal(size=(16, 24)).astype(F)
    want = of_tiles(x)
    with jax.set_mesh(of := mesh("Explicit", *GRID)):
        same(of_tiles(jax.device_put(x, NamedSharding(of, split))), want)


def conv(w, x):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


OPS = {  # the shapes of w and x, and how these are split
    "rows": (lambda w, x: x @ w, (16, 8), (8, 16), P(), P("data")),
    "rows of a batch": (lambda w, x: x @ w, (16, 8), (8, 4, 16), P(), P("data")),
    "columns": (lambda w, x: x @ w, (16, 8), (8, 16), P(None, "model"), P("data")),
    "conv": (conv, (3, 3, 4, 8), (4, 6, 6, 4), P(), P("data")),
}
GRADIENTS = {
    "bfloat16": "bfloat16",
    "int8": QuantSpec(),
    "rows and channels": (QuantSpec(granularity=PerToken()), QuantSpec(granularity=PerChannel(None))),
    "blocks": QuantSpec(granularity=PerBlock(None, 4)),
    "float8, native": float8_spec("float8_e5m2"),
}


@pytest.mark.slow
@cases(
    ("op", "gradient"),
    [(op, g) for op in OPS for g in GRADIENTS if (op, g) != ("conv", "blocks")],
    [("columns", "int8")],
)
def test_low_precision_gradients_on_an_explicit_mesh(op, gradient):
    """JAX refuses to sum over axes that are split, as the rows are in the product towards the weight."""
    f, *shapes, of_w, of_x = OPS[op]
    w, x = (np.random.default_rng(15).normal(size=shape).astype(F) for shape in shapes)
    execution = "native" if gradient == "float8, native" else "auto"
    spec = float8_spec() if execution == "native" else QuantSpec()
    q = quantize_fn(f, [Rule("**", spec, spec, gradient=GRADIENTS[gradient])], execution=execution)
    slopes = jax.jit(jax.grad(lambda w, x: (q(w, x) ** 2).sum(), (0, 1)))
    want = slopes(w, x)
    with jax.set_mesh(of := mesh("Explicit", *GRID)):
        got = slopes(*(jax.device_put(v, NamedSharding(of, split)) for v, split in ((w, of_w), (x, of_x))))
    for one, split in zip(got, (of_w, of_x), strict=True):
        assert [axis for axis in one.sharding.spec if axis] == [axis for axis in split if axis]
    same(got, want)
