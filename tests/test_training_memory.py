# SPDX-License-Identifier: Apache-2.0
"""What a training step keeps of quantized sites, counted in jaxprs, and stacks of weights, quantized in their loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxquant as jq
from jaxquant import (
    PerBlock,
    PerChannel,
    PerTensor,
    PerToken,
    QuantSpec,
    Rule,
    activation_spec,
    quantize_fn,
    weight_spec,
)
from jaxquant._program._jaxpr import scan_parts

LAYERS, ROWS, WIDTH, HIDDEN = 4, 8, 32, 64
POLICIES = jax.checkpoint_policies
NAMES = POLICIES.save_only_these_names("jaxquant_codes", "jaxquant_scales")


def normal(seed, *shape):
    return (np.random.default_rng(seed).normal(size=shape) / 4).astype(np.float32)


PARAMS = {"up": normal(0, LAYERS, WIDTH, HIDDEN), "down": normal(1, LAYERS, HIDDEN, WIDTH)}
X = normal(2, ROWS, WIDTH)


def layer(x, p):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def body(x, p):
    return layer(x, p), None


def scanned(wrap=lambda f: f, **how):
    return lambda p, x: lax.scan(wrap(body), x, p, **how)[0]


def by_index(i, p):
    return jax.tree.map(lambda v: lax.dynamic_index_in_dim(v, i, keepdims=False), p)


def unrolled(p, x):
    for i in range(LAYERS):
        x = jax.checkpoint(layer)(x, jax.tree.map(lambda v: v[i], p))  # noqa: B023
    return x


def nested(p, x):
    pairs = jax.tree.map(lambda v: v.reshape(2, LAYERS // 2, *v.shape[1:]), p)
    return lax.scan(lambda x, p: lax.scan(body, x, p), x, pairs)[0]


def returned(p, x):
    """As nnx.scan writes it: the parameters are results of the body, which nothing reads."""
    return lax.scan(jax.checkpoint(lambda x, p: (layer(x, p), p)), x, p)[0]


def cast(p, x):
    p = jax.tree.map(lambda v: v.astype(jnp.bfloat16), p)
    return scanned()(p, x.astype(jnp.bfloat16)).astype(jnp.float32)


def transposed(p, x):
    one = lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"].T.reshape(WIDTH, 2, -1).reshape(WIDTH, HIDDEN).T, None)
    return lax.scan(one, x, p)[0]


def pipelined(p, x):
    """Each device has a layer, and passes on what it makes."""
    mesh = Mesh(np.array(jax.devices()[:LAYERS]), "stage")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P("stage"))
    def run(p, x):
        x = lax.pcast(x, "stage", to="varying") if hasattr(lax, "pcast") else lax.pvary(x, "stage")
        own = jax.tree.map(lambda v: v[0], p)
        for _ in range(LAYERS):
            x = lax.ppermute(layer(x, own), "stage", [(i, (i + 1) % LAYERS) for i in range(LAYERS)])
        return x[None]

    return run(p, x)[0]


FORMS = {
    "scan": scanned(),
    "unrolled scan": scanned(unroll=2),
    "remat": scanned(jax.checkpoint),
    "map of layers": lambda p, x: lax.map(lambda p: layer(x, p), p).sum(0),
    "nested scans": nested,
    "fori_loop": lambda p, x: lax.fori_loop(0, LAYERS, lambda i, x: layer(x, by_index(i, p)), x),
    "checkpoints": unrolled,
    "returned": returned,
    "cast": cast,
    "transposed": transposed,
    "pipeline": pipelined,
}
WEIGHTS = {
    "per channel": weight_spec(8),
    "per tensor": QuantSpec(granularity=PerTensor()),
    "blocks": weight_spec(4, block_size=4),
    "affine": QuantSpec(symmetric=False, granularity=PerChannel(-1)),
    "float8": jq.float8_spec(granularity=PerChannel(None)),
    "mxfp4": jq.mxfp4_spec(-2),
    "nvfp4": jq.nvfp4_spec(-2),
}
BLOCKS = {"blocks", "mxfp4", "nvfp4"}  # along what is contracted


def value_and_gradients(f, has_gradient=True):
    def run(p, x):
        y, pull = jax.vjp(f, p, x) if has_gradient else (f(p, x), None)
        return y, pull and pull(jnp.cos(y))

    return run


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("form", FORMS)
def test_a_stack_has_the_bits_that_it_has_as_a_whole(form):
    """In blocks, those of the float function of what `fake_quant` makes of stacks; else those of frozen stacks."""
    f, of = FORMS[form], functools.partial(value_and_gradients, has_gradient=form != "fori_loop")
    got, want = {}, {}
    for name, spec in WEIGHTS.items():
        q = quantize_fn(f, [Rule("*", spec)])
        specs = {k: v.spec for k, v in jax.eval_shape(q.freeze, PARAMS, X).items()}
        of_stacks = lambda p, x, specs=specs: f({k: jq.fake_quant(v, specs[k]) for k, v in p.items()}, x)
        got[name], want[name] = of(q), of(of_stacks)
        if name not in BLOCKS:
            of_x = lambda f: lambda p, x: of(lambda _, x: f(p, x))(None, x)  # frozen weights have no gradient
            got[name], want[name] = of_x(q), lambda p, x, q=q, of_x=of_x: of_x(q)(q.freeze(p, x), x)
            q = quantize_fn(f, [Rule("*", spec, QuantSpec())])
            got[f"{name}, int8"] = q
            want[f"{name}, int8"] = lambda p, x, q=q: q(q.freeze(p, x), x)
    run = jax.jit(lambda p, x: [{name: f(p, x) for name, f in of.items()} for of in (got, want)])
    got, want = run(PARAMS, X)
    jax.tree_util.tree_map_with_path(lambda path, a, b: assert_same_bits(a, b, str(path)), got, want)


HOW = {
    "no checkpoint": scanned(),
    "by name": scanned(functools.partial(jax.checkpoint, policy=NAMES)),
    **{
        f"{name}, unroll={n}": scanned(functools.partial(jax.checkpoint, policy=policy), unroll=n)
        for n, (name, policy) in enumerate(
            {
                "everything": POLICIES.everything_saveable,
                "nothing": POLICIES.nothing_saveable,
                "dots": POLICIES.dots_saveable,
                "dots without batch": POLICIES.dots_with_no_batch_dims_saveable,
            }.items(),
            start=1,
        )
    },
}


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("rule", ["per token", "float8", "affine", "weight-only in blocks"])
def test_policies_and_unrolling_change_no_bit(rule):
    q = {name: quantize_fn(f, [(DYNAMIC | IN_FLOAT)[rule]]) for name, f in HOW.items()}
    found = jax.jit(lambda p, x: {name: value_and_gradients(f)(p, x) for name, f in q.items()})(PARAMS, X)
    for name, got in found.items():
        same = functools.partial(assert_same_bits, what=name)
        jax.tree.map(same, got, found["no checkpoint"])


@pytest.mark.slow
@pytest.mark.parametrize("granularity", [PerTensor(), PerToken()])
def test_the_gradient_is_zero_at_what_has_no_level(granularity):
    """And in a group that has such, at its ends, which integers do not tell from it."""
    x = np.array([[1.0, 3.0, -2.0, 0.5], [np.nan, 3.0, -2.0, 0.5], [1.0, -np.inf, -2.0, 2.5], [3e38, 1.0, 2.0, 0.0]])
    q = quantize_fn(lambda p, x: x @ p["w"], [Rule("w", W8, QuantSpec(granularity=granularity))])
    of_x = jax.grad(lambda x: jnp.nan_to_num(q({"w": np.eye(4, dtype=np.float32)}, x)).sum())
    pull = jax.vjp(lambda x: q({"w": np.eye(4, dtype=np.float32)}, x), x.astype(np.float32))[1]
    passes = np.asarray(pull(np.ones((4, 4), np.float32))[0]) != 0
    assert np.isfinite(of_x(x.astype(np.float32))).all()
    assert not passes[1, 0]
    assert not passes[2, 1]
    assert not passes[3, 0]
    assert passes[0].all()
    assert passes[[1, 2, 3], [3, 0, 1]].all()


def inside(eqn):
    """The programs in an equation."""
    values = [v for value in eqn.params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    return [program for v in values if hasattr(program := getattr(v, "jaxpr", v), "eqns")]


def equations(program):
    """The equations of a program and of those in it that are no loops."""
    for eqn in program.eqns:
        yield eqn
        for inner in inside(eqn) if eqn.primitive.name not in ("scan", "while") else ():
            yield from equations(inner)


def read(program, used, kept):
    """Which arguments of a program its used results need; notes the results of scans that are stacked and needed.

    Unlike that of JAX it enters calls with a derivative of their own: a backward pass is not differentiated again.
    """
    needed = {v for v, is_used in zip(program.outvars, used, strict=True) if is_used and not hasattr(v, "val")}
    for eqn in reversed(program.eqns):
        outs = [v in needed for v in eqn.outvars]
        if not any(outs):
            continue
        ins = [True] * len(eqn.invars)
        if eqn.primitive.name == "scan":
            (body,) = inside(eqn)
            before, n = (len(of) for of in scan_parts(eqn, eqn.invars)[:2])
            carried = outs[:n]
            while (ins := read(body, [*carried, *outs[n:]], []))[before : before + n] != carried:
                carried = [a or b for a, b in zip(carried, ins[before : before + n], strict=True)]
            kept += [v.aval for v, is_used in zip(eqn.outvars[n:], outs[n:], strict=True) if is_used]
        elif len(inside(eqn)) == 1 and len(inside(eqn)[0].invars) == len(eqn.invars):
            ins = read(inside(eqn)[0], outs, kept)
        needed |= {v for v, is_read in zip(eqn.invars, ins, strict=True) if is_read and not hasattr(v, "val")}
    return [v in needed for v in program.invars]


def kept(f, dtype, params=PARAMS, x=X, **kwargs):
    """What one layer of a scan keeps: bytes of values for a row, by dtype; and arrays of a weight's size, too many."""
    like = lambda v: jax.ShapeDtypeStruct(v.shape, dtype)
    loss = lambda p, x: f(p, x, **kwargs).astype(jnp.float32).sum()
    program = jax.make_jaxpr(jax.grad(loss))(jax.tree.map(like, params), like(x)).jaxpr
    found = []
    read(program, [True] * len(program.outvars), found)
    weights = {v.shape: v.size for v in params.values()}
    of_weights = [v for v in found if v.size in weights.values()]  # their gradients
    values = [v for v in found if v.size >= LAYERS * x.size and v not in of_weights]
    nbytes = lambda kind: sum(v.size * v.dtype.itemsize for v in values if (v.dtype.itemsize == 1) == kind)
    return nbytes(False) // (LAYERS * len(x)), nbytes(True) // (LAYERS * len(x)), len(of_weights) - len(params)


W8 = weight_spec(8)
TOKENS = QuantSpec(granularity=PerToken())
DYNAMIC = {
    "W8A8": Rule("*", W8, QuantSpec()),
    "per token": Rule("*", W8, TOKENS),
    "W4A4": Rule("*", weight_spec(4), QuantSpec(bits=4)),
    "groups": Rule("*", weight_spec(8, block_size=16), QuantSpec(granularity=PerBlock(None, 16))),
    "gradients in int8": Rule("*", W8, TOKENS, gradient=QuantSpec()),
    "gradients in bfloat16": Rule("*", W8, QuantSpec(), gradient="bfloat16"),
    "float8": Rule("*", jq.float8_spec(granularity=PerChannel(None)), jq.float8_spec()),
}
IN_FLOAT = {
    "affine": Rule("*", W8, activation_spec(8)),
    "weight-only": Rule("*", weight_spec(4)),
    "weight-only in blocks": Rule("*", weight_spec(4, block_size=16)),
    "MX": Rule("*", jq.mxfp8_spec(-2), jq.mxfp8_spec(-1)),
}
DTYPES = "bfloat16", "float32"


@pytest.mark.parametrize("rule", DYNAMIC | IN_FLOAT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_site_keeps_integers_of_inputs_and_nothing_of_weights(dtype, rule):
    """Beside what the float layer keeps for the tanh; affine and static, its inputs themselves."""
    of_float, size = kept(scanned(), dtype)[0], jnp.dtype(dtype).itemsize
    assert of_float == size * (WIDTH + 2 * HIDDEN)
    q = quantize_fn(scanned(), [(DYNAMIC | IN_FLOAT)[rule]])
    values, codes, too_many = kept(q, dtype)
    assert too_many == 0
    if rule in DYNAMIC:  # newer versions of JAX keep the tanh once
        assert (values <= of_float - size * WIDTH, codes) == (True, WIDTH + HIDDEN)
    else:
        assert (values, codes) == (of_float, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_static_site_keeps_its_inputs_alone(dtype):
    q = quantize_fn(scanned(), [IN_FLOAT["affine"]])
    qparams = jax.eval_shape(q.init_qparams, PARAMS, X)
    trained = jax.tree.map(lambda v: np.ones(v.shape, np.float32), qparams)
    assert kept(q, dtype, qparams=trained) == kept(scanned(), dtype)


def convolved(p, x):
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return lax.scan(lambda x, p: (x + conv(x, p["w"]), None), x, p)[0]


def experts(p, x):
    sizes = np.array([ROWS // 2, ROWS // 2], np.int32)
    return lax.scan(lambda x, p: (x + lax.ragged_dot(x, p["w"], sizes), None), x, p)[0]


OTHERS = {
    "convolution": (convolved, {"w": normal(3, LAYERS, 3, WIDTH, WIDTH)}, normal(4, ROWS, 5, WIDTH)),
    "ragged dot": (experts, {"w": normal(5, LAYERS, 2, WIDTH, WIDTH)}, X),
    "transposed": (transposed, PARAMS, X),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_ops_keep_no_more(dtype, name):
    f, params, x = OTHERS[name]
    of_float, *_ = kept(f, dtype, params, x)
    for rule in ("W8A8", "weight-only"):
        values, codes, too_many = kept(quantize_fn(f, [(DYNAMIC | IN_FLOAT)[rule]]), dtype, params, x)
        assert too_many == 0
        assert codes <= of_float // 2 if rule == "W8A8" else (values, codes) == (of_float, 0)


@pytest.mark.parametrize("name", OTHERS)
def test_products_of_a_gradient_leave_in_the_dtype_of_the_model(name):
    """So that devices add up partial sums of two bytes, as they do for the float model."""
    f, *shapes = OTHERS[name]
    params, x = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, jnp.bfloat16), shapes)
    found = set()

    def note(program):
        for eqn in program.eqns:
            if eqn.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general"):
                found.add(str(eqn.outvars[0].aval.dtype))
            for inner in inside(eqn):
                note(inner)

    q = quantize_fn(f, [DYNAMIC["W8A8"]])
    note(jax.make_jaxpr(jax.grad(lambda p, x: q(p, x).astype(jnp.float32).sum(), (0, 1)))(params, x).jaxpr)
    assert found == {"bfloat16", "int32"}


@pytest.mark.parametrize("form", ["scan", "remat", "nested scans", "returned", "cast", "map of layers"])
def test_no_array_of_the_size_of_a_stack_is_made_outside_of_the_loop(form):
    """But the gradient, and what the program itself makes of the stack."""
    made = {}
    for name, f in {"float": FORMS[form], "quantized": quantize_fn(FORMS[form], [DYNAMIC["W8A8"]])}.items():
        program = jax.make_jaxpr(jax.grad(lambda p, x, f=f: f(p, x).sum()))(PARAMS, X).jaxpr
        loops = ("scan", "jit", "pjit")
        outs = (v.aval for e in equations(program) if e.primitive.name not in loops for v in e.outvars)
        made[name] = sum(v.size == PARAMS["up"].size for v in outs)
    assert made["quantized"] <= made["float"]


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize(
    "rule", ["W8A8", "affine", "float8", "weight-only", "gradients in int8", "gradients in bfloat16"]
)
def test_values_and_gradients_of_bfloat16_are_rounded_where_the_program_rounds(rule):
    """As op by op: of two casts that meet XLA drops both, and with them the rounding between a site and a tanh."""
    sizes = np.array([ROWS // 2, ROWS // 2], np.int32)
    conv = functools.partial(lax.conv_general_dilated, window_strides=(1,), padding="SAME")
    ops = {
        "dot": (jnp.matmul, X, PARAMS["up"][0]),
        "convolution": (conv, normal(4, ROWS, WIDTH, 5), normal(3, WIDTH, WIDTH, 3)),
        "ragged dot": (lambda x, w: lax.ragged_dot(x, w, sizes), X, normal(5, 2, WIDTH, WIDTH)),
    }
    for name, (f, *operands) in ops.items():
        x, w = (jnp.asarray(v, jnp.bfloat16) for v in operands)
        q = quantize_fn(lambda w, x, f=f: f(x, w), [dataclasses.replace((DYNAMIC | IN_FLOAT)[rule], pattern="")])

        def whole(w, x, g, q=q):
            y, pull = jax.vjp(lambda w, x: jnp.tanh(q(w, jnp.tanh(x))), w, x)
            return y, *pull(g)

        def op_by_op(w, x, g, q=q):
            h, of_x = jax.vjp(jnp.tanh, x)
            y, of_site = jax.vjp(q, w, h)
            to_w, to_h = of_site(*jax.vjp(jnp.tanh, y)[1](g))
            return jnp.tanh(y), to_w, *of_x(to_h)

        args = w, x, jnp.cos(q(w, x))
        for got, want in zip(jax.jit(whole)(*args), op_by_op(*args), strict=True):
            assert_same_bits(got, want, name)


def through_time(layers):
    """A recurrent network, whose weights are constant in the loop over time."""
    return lambda p, x: lax.scan(lambda h, x: (layers(p, h + x), None), jnp.zeros_like(x[0]), x)[0]


@pytest.mark.parametrize("layers", [scanned(), lambda p, x: [layer(x, by_index(i, p)) for i in range(LAYERS)][-1]])
def test_what_is_constant_in_a_loop_is_quantized_before_it(layers):
    def sizes(program, is_inside=False):
        for eqn in program.eqns:
            if eqn.primitive.name == "extremes" and is_inside:
                yield eqn.invars[0].aval.size
            for inner in inside(eqn):
                yield from sizes(inner, is_inside or eqn.primitive.name in ("scan", "while"))

    q = quantize_fn(through_time(layers), [DYNAMIC["W8A8"]])
    found = list(sizes(jax.make_jaxpr(q)(PARAMS, X[:, None]).jaxpr))
    assert found
    assert max(found) < WIDTH * HIDDEN


def test_a_range_without_an_axis_for_the_layers_is_refused():
    q = quantize_fn(scanned(jax.checkpoint), [DYNAMIC["W8A8"]])
    qparams = jax.tree.map(lambda v: np.ones(v.shape, np.float32), jax.eval_shape(q.init_qparams, PARAMS, X))
    qparams["up"] = jax.tree.map(lambda v: v[0], qparams["up"])
    with pytest.raises(ValueError, match=r"At 'up', .* must have shape \(4, 1, 64\), got \(1, 64\)"):
        q(PARAMS, X, qparams=qparams)
