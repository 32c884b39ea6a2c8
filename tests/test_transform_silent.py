# SPDX-License-Identifier: Apache-2.0
"""quantize_fn leaves nothing in float, and loses nothing, without a word: an error, or a reason in the plan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from hand_written import exactly
from jax import lax
from lanes import cases

from jaxquant import PerChannel, PerToken, QuantSpec, Rule, activation_spec, float8_spec, quantize_fn, weight_spec

W8, A8 = weight_spec(8), activation_spec(8)
EVERY, KERNELS = [Rule("**", W8, A8)], [Rule("**/kernel", W8, A8)]
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


X = normal(3, 4)
PARAMS = {"a": {"kernel": normal(4, 4)}, "b": {"kernel": normal(4, 4)}, "head": {"kernel": normal(4, 2)}}
MASK = (np.arange(16).reshape(4, 4) % 3 > 0).astype(np.float32)


def quantized(plan):
    return [site.name for site in plan if site.spec]


# What is computed from a parameter

COMPUTED = {
    "scaled": lambda w: w * 2,
    "masked": lambda w: w * MASK,
    "padded": lambda w: jnp.pad(w, ((0, 0), (0, 1)))[:, 1:],
    "permuted": lambda w: w[:, np.array([2, 0, 3, 1])],
    "normalized": lambda w: w / jnp.sqrt((w**2).sum(0, keepdims=True)),
    "concatenated with zeros": lambda w: jnp.concatenate([w[:, :2], jnp.zeros((4, 2))], 1),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_parameter_that_is_computed_with_before_its_dot_is_not_left_in_float(name):
    f = lambda p, x: jnp.tanh(x @ COMPUTED[name](p["a"]["kernel"])) @ p["head"]["kernel"]
    params = {k: PARAMS[k] for k in ("a", "head")}
    texts = r"'dot_general_0'.*'\*\*/kernel' quantizes 'a/kernel'.*computed.*kind=\"derived\".*\('a/kernel', None\)"
    with pytest.raises(ValueError, match=texts):
        quantize_fn(f, KERNELS)(params, X)
    plan = quantize_fn(f, [("a/kernel", None), *KERNELS]).plan(params, X)
    assert quantized(plan) == ["head/kernel:input", "head/kernel"]
    assert plan.counts["left in float by a rule"].parameters == 1
    plan = quantize_fn(f, [*KERNELS, Rule("a/kernel", W8, A8, kind="derived")], strict=True).plan(params, X)
    assert {"dot_general_0:input", "dot_general_0", "head/kernel:input", "head/kernel"} == set(quantized(plan))
    assert plan.counts.keys() == {"quantized"}
    quantize_fn(f, [Rule("**/kernel", W8, A8, optional=True)]).plan(params, X)


def test_a_rule_whose_only_parameter_is_computed_with_says_so():
    with pytest.raises(ValueError, match=r"matched no site.*'a/kernel', which is in an op of kind 'derived'.*Rule"):
        quantize_fn(lambda p, x: x @ (p["a"]["kernel"] * 2), KERNELS).plan({"a": PARAMS["a"]}, X)


def test_what_is_computed_as_the_input_of_a_parameter_takes_the_activation():
    """Latents behind a norm, and queries that are made of them: no operand but those is left."""

    def f(p, x):
        queries = (p["latents"] * p["scale"] + p["bias"]) @ p["q"]
        scores = jax.nn.softmax(queries @ (x @ p["k"]).T)
        h0 = jnp.tanh(p["h0"])
        return scores @ (x @ p["v"]) + h0 @ p["u"]

    params = {name: normal(4, 4) for name in "qkvu"}
    params |= {"latents": normal(6, 4), "scale": normal(1, 4)[0], "bias": normal(1, 4)[0], "h0": normal(6, 4)}
    with jax.numpy_rank_promotion("allow"):
        plan = quantize_fn(f, EVERY).plan(params, X)
    assert set(quantized(plan)) == {*"qkvu", *(f"{name}:input" for name in "qkvu")}
    assert plan["q:input"].spec == A8
    assert (plan.counts["quantized"].parameters, plan.counts["matched, but no operand"].parameters) == (4, 4)


def test_a_rule_for_activations_alone_leaves_parameters_as_they_are():
    f = lambda p, x: (x @ (p["a"]["kernel"] * 2)) @ p["head"]["kernel"]
    plan = quantize_fn(f, [Rule("**", None, A8)]).plan({k: PARAMS[k] for k in ("a", "head")}, X)
    assert quantized(plan) == ["head/kernel:input"]


def test_what_is_computed_with_and_cannot_be_replaced_is_not_left_in_float():
    sizes, numbers = np.int32([2, 1]), lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    f = lambda p, x: lax.ragged_dot_general(x, p["experts"] * 2, sizes, numbers)[0] @ p["head"]
    params = {"experts": normal(3, 4), "head": normal(4, 2)}
    with pytest.raises(
        ValueError, match=r"'\*\*' quantizes 'experts', which is computed.*ragged_dot.*\('experts', None\)"
    ):
        quantize_fn(f, EVERY).plan(params, X)
    assert quantized(quantize_fn(f, [("experts", None), *EVERY]).plan(params, X)) == ["head:input", "head"]


# What comes out of a site that only parameters enter

RELATIVE = {
    "table": normal(7, 4),
    "norm": normal(1, 4)[0],
    **{name: {"kernel": normal(4, 2, 2), "bias": normal(2, 2)} for name in ("query", "position")},
}


def with_positions(params, x, positions=lambda params: params["table"] * params["norm"]):
    """Queries of two heads meet keys that are made of parameters alone, as in DeBERTa."""
    project = lambda layer, v: jnp.einsum("nk,khd->nhd", v, layer["kernel"]) + layer["bias"]
    with jax.numpy_rank_promotion("allow"):
        return jnp.einsum("nhd,phd->hnp", project(params["query"], x), project(params["position"], positions(params)))


def test_what_comes_out_of_a_site_of_parameters_is_an_activation():
    plan = quantize_fn(with_positions, EVERY).plan(RELATIVE, X)
    kernels = {f"{name}/kernel{end}" for name in ("query", "position") for end in ("", ":input")}
    assert set(quantized(plan)) == kernels
    assert {site.kind for site in plan if not site.spec} == {"act_act"}
    rules = [*EVERY, Rule("**", activation=A8, kind="act_act")]
    q = quantize_fn(with_positions, rules, strict=True)
    assert len(quantized(q.plan(RELATIVE, X))) == 6
    given = quantize_fn(lambda p, x, positions: with_positions(p, x, lambda _: positions), rules)
    assert_same_bits(q(RELATIVE, X), given(RELATIVE, X, RELATIVE["table"] * RELATIVE["norm"]))


def test_the_same_in_a_scan_over_layers():
    """The layers share the table, and each has a projection of its own."""

    def f(params, x):
        layer = lambda h, kernel: (jax.nn.softmax((h @ kernel) @ (params["table"] @ kernel).T) @ params["table"], None)
        return lax.scan(layer, x, params["kernels"])[0]

    rules = [("table", None), Rule("**", W8, A8)]
    plan = quantize_fn(f, rules).plan({"table": normal(7, 4), "kernels": normal(3, 4, 4)}, X)
    assert set(quantized(plan)) == {"kernels:input", "kernels", "kernels#2"}
    assert all("derived" not in site.why for site in plan)


def test_a_site_that_a_rule_leaves_in_float_gives_no_activation():
    rules = [("position/kernel", None), *EVERY]
    plan = quantize_fn(with_positions, rules).plan(RELATIVE, X)
    assert [site.kind for site in plan if site.op == "dot_general"][-2:] == ["derived", "derived"]


@pytest.mark.parametrize("other", [lambda p: p["w"], lambda p: p["w"].T, lambda p: p["w"] * 2])
def test_a_matrix_that_is_added_to_a_product_of_parameters_is_not_left_in_float(other):
    """As where LoRA is merged: the sum is no activation, for it holds a parameter that the rule quantizes."""
    f = lambda p, x: x @ (other(p) + p["a"] @ p["b"])
    params = {"w": normal(4, 4), "a": normal(4, 2), "b": normal(2, 4)}
    with pytest.raises(ValueError, match=r"quantizes 'w', which is computed with before the op"):
        quantize_fn(f, [("a", None), *EVERY]).plan(params, X)


# Concatenated and stacked parameters


def test_concatenated_parameters_are_a_weight_with_the_range_of_each():
    scaled = PARAMS | {"b": {"kernel": PARAMS["b"]["kernel"] * 100}}
    f = lambda p, x: x @ jnp.concatenate([p["a"]["kernel"], p["b"]["kernel"]], 1)
    apart = lambda p, x: jnp.concatenate([x @ p["a"]["kernel"], x @ p["b"]["kernel"]], 1)
    q = quantize_fn(f, KERNELS)
    assert_same_bits(*jax.jit(lambda p: (q(p, X), quantize_fn(apart, KERNELS)(p, X)))(scaled))
    assert quantized(q.plan(scaled, X)) == ["a/kernel+b/kernel:input", "a/kernel+b/kernel"]
    assert q.plan(scaled, X)["a/kernel+b/kernel"].spec.granularity == PerChannel(1)


@cases("spec", [QuantSpec(), weight_spec(8), weight_spec(8, block_size=2)], [weight_spec(8)])
def test_stacked_and_scanned_parameters_have_the_ranges_of_each(spec):
    def stacked(p, x):
        layers = jnp.stack([p[name]["kernel"] for name in ("a", "b")])
        return lax.scan(lambda h, w: (jnp.maximum(h @ w, 0.0), None), x, layers)[0]

    def one_by_one(p, x):
        for name in ("a", "b"):
            x = jnp.maximum(x @ p[name]["kernel"], 0.0)
        return x

    params = {"a": PARAMS["a"], "b": {"kernel": PARAMS["b"]["kernel"] * 100}}
    rules = [Rule("**/kernel", spec, A8)]
    q = quantize_fn(stacked, rules)
    assert_same_bits(*jax.jit(lambda p: (q(p, X), quantize_fn(one_by_one, rules)(p, X)))(params))
    assert "a/kernel+b/kernel" in quantized(q.plan(params, X))


@pytest.mark.parametrize(
    ("axis", "spec", "where"),
    [
        (1, QuantSpec(), "an output axis"),
        (0, W8, "which is contracted"),
        (0, weight_spec(8, block_size=4), "contracted"),
    ],
)
def test_concatenated_parameters_that_would_share_a_scale_are_refused(axis, spec, where):
    wide = lambda x: jnp.concatenate([x, x], 1) if axis == 0 else x
    f = lambda p, x: wide(x) @ jnp.concatenate([p["a"]["kernel"], p["b"]["kernel"]], axis)
    params = {k: PARAMS[k] for k in "ab"}
    with pytest.raises(ValueError, match=rf"2 parameters, 'a/kernel', 'b/kernel', .*{where}.*'a/kernel', None"):
        quantize_fn(f, [Rule("**/kernel", spec, A8)]).plan(params, X)
    rules = [("a/kernel", None), ("b/kernel", None), Rule("**", QuantSpec(), A8, kind="derived")]
    assert quantized(quantize_fn(f, rules).plan(params, X)) == ["dot_general_0:input", "dot_general_0"]


def test_concatenated_parameters_of_two_rules_are_computed_with():
    f = lambda p, x: (
        x @ jnp.concatenate([p["a"]["kernel"], p["b"]["kernel"]], 1) @ jnp.concatenate([p["head"]["kernel"]] * 2)
    )
    with pytest.raises(ValueError, match=r"quantizes 'b/kernel', which is computed.*\('b/kernel', None\)"):
        quantize_fn(f, [("a/kernel", None), *KERNELS]).plan(PARAMS, X)


@pytest.mark.slow
def test_every_kernel_of_the_optimized_lstm_of_flax_is_quantized():
    nn = pytest.importorskip("flax.linen", reason="an extra")
    cell = nn.OptimizedLSTMCell(8)
    carry = cell.initialize_carry(jax.random.key(0), X.shape)
    variables = cell.init(jax.random.key(1), carry, X)
    with jax.numpy_rank_promotion("allow"):
        plan = quantize_fn(lambda v, x: cell.apply(v, carry, x)[1], KERNELS).plan(variables, X)
    assert plan.counts["quantized"].parameters == 8
    assert all(site.spec for site in plan)


# Gathered parameters


def experts(p, x, i):
    return jax.vmap(lambda x, i: x @ p["experts"][i])(x, i) @ p["router"]


EXPERTS, CHOICE = {"experts": normal(3, 4, 4), "router": normal(4, 2)}, np.int32([0, 2, 1])


def test_a_parameter_that_is_gathered_by_data_is_named_and_not_left_in_float():
    texts = r"'\*\*' quantizes 'experts', which is gathered by data.*Rule\('dot_general_0:rhs'.*\('experts', None\)"
    with pytest.raises(ValueError, match=texts):
        quantize_fn(experts, EVERY).plan(EXPERTS, X, CHOICE)
    plan = quantize_fn(experts, [("experts", None), *EVERY]).plan(EXPERTS, X, CHOICE)
    assert plan["dot_general_0:rhs"].why == 'experts, gathered by data; Rule(..., kind="act_act")'
    assert plan["dot_general_0:lhs"].why == 'no parameter; Rule(..., kind="act_act")'
    assert plan.counts["left in float by a rule"] == (1, 48, 192)
    plan = quantize_fn(experts, [*EVERY, Rule("dot_general_0", activation=A8, kind="act_act")]).plan(EXPERTS, X, CHOICE)
    assert plan.counts["quantized"].parameters == 2


def test_a_plan_names_the_parameters_that_data_compute_with():
    f = lambda p, mask, x: x @ (p["a"]["kernel"] * mask) @ p["head"]["kernel"]
    plan = quantize_fn(f, KERNELS).plan({k: PARAMS[k] for k in ("a", "head")}, jnp.asarray(MASK), X)
    assert plan["dot_general_0:rhs"].why == 'computed from a/kernel and data; Rule(..., kind="act_act")'


def test_the_last_line_counts_every_parameter():
    def f(p, x, tokens):
        return (p["embedding"][tokens] + p["bias"]) @ p["a"] @ p["b"]

    params = {
        "embedding": normal(9, 4),
        "bias": normal(1, 4),
        "a": normal(4, 4),
        "b": normal(4, 4).astype(jnp.bfloat16),
    }
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        plan = quantize_fn(f, [("b", None), Rule("*a*", W8), Rule("bias", W8, optional=True)]).plan(params, X, CHOICE)
    assert str(plan).splitlines()[-2] == (
        "parameters: quantized 1 (16 numbers, 64 bytes); left in float by a rule 1 (16 numbers, 32 bytes); "
        "without a rule 1 (36 numbers, 144 bytes); matched, but no operand 1 (4 numbers, 16 bytes)"
    )


# Changed arguments


def test_a_function_that_changes_its_arguments_is_refused():
    def f(p, state, x, *, cache):
        state["mean"] = state["mean"] + x.mean()
        cache["new"] = x * 2
        return x @ p["w"]

    args = {"w": PARAMS["a"]["kernel"]}, {"mean": np.zeros((), np.float32)}, X
    texts = r"changes its arguments.*'mean' of argument 1, 'new' of argument 'cache'.*nnx\.split.*docs/state\.md"
    with pytest.raises(ValueError, match=texts):
        quantize_fn(f, EVERY)(*args, cache={})

    def returning(p, state, x):
        state["mean"], p["seen"] = state["mean"] + x.mean(), p["w"]
        return x @ p["w"], state

    _, state = quantize_fn(returning, EVERY)(*args)
    np.testing.assert_allclose(state["mean"], np.mean(X), rtol=1e-5)  # a sum of floats, in another program


@jax.tree_util.register_pytree_node_class
class Transposed:
    """Its leaf is another array whenever it is flattened."""

    def __init__(self, kernel):
        self.kernel = kernel

    def tree_flatten(self):
        return (getattr(self.kernel, "T", self.kernel),), None  # a shape has none

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(getattr(leaves[0], "T", leaves[0]))


def test_a_pytree_that_makes_its_leaves_anew_has_not_changed():
    q = quantize_fn(lambda p, x: x @ p.kernel, EVERY)
    assert_same_bits(q(Transposed(PARAMS["a"]["kernel"]), X), exactly(X, PARAMS["a"]["kernel"]))


@pytest.mark.slow
def test_a_module_of_nnx_in_training_is_refused_and_one_in_evaluation_is_not():
    nnx = pytest.importorskip("flax.nnx", reason="an extra")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.linear(x)))

    model, q = Model(nnx.Rngs(0)), quantize_fn(lambda model, x: model(x), KERNELS)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        with pytest.raises(ValueError, match=r"'dropout/rngs/count' of argument 0, 'norm/mean' of argument 0"):
            q(model, X)
        model.eval()
        assert quantized(q.plan(model, X)) == ["linear/kernel:input", "linear/kernel"]


@pytest.mark.slow
def test_a_state_of_equinox_that_is_updated_and_returned_is_not_a_change():
    eqx = pytest.importorskip("equinox", reason="an extra")
    index = eqx.nn.StateIndex(jnp.zeros(()))
    state = eqx.nn.State(index)
    f = lambda p, state, x: (x @ p["w"], state.set(index, state.get(index) + 1))
    _, state = quantize_fn(f, EVERY)({"w": PARAMS["a"]["kernel"]}, state, X)
    assert state.get(index) == 1


# The data in the place of the params

CAPTURED = normal(4, 4)


@pytest.mark.parametrize("data", [X, {"image": X}], ids=["array", "dict"])
def test_a_model_that_closes_over_its_weights_is_refused(data):
    read = lambda d: d["image"] if isinstance(d, dict) else d
    model = lambda d: jnp.tanh(read(d) @ CAPTURED) @ CAPTURED
    with pytest.raises(ValueError, match=r"`params_argnum=0`.*closes over.*eqx\.partition.*kind=\"captured\""):
        quantize_fn(model, EVERY)(data)
    meant = [*EVERY, Rule("**", W8, A8, kind="captured")]
    assert len(quantized(quantize_fn(model, meant).plan(data))) == 4
    one_layer = [*EVERY, Rule("**", None, kind="captured", optional=True)]
    assert len(quantized(quantize_fn(lambda d: read(d) @ CAPTURED, one_layer).plan(data))) == 2


@pytest.mark.slow
def test_a_model_of_equinox_in_the_place_of_the_function_is_refused():
    eqx = pytest.importorskip("equinox", reason="an extra")
    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    for f in (model, lambda x: jax.vmap(model)(x)):
        with pytest.raises(ValueError, match="a bare array"):
            quantize_fn(f, EVERY)(X if f is not model else X[0])


@cases("layers", [1, 3], [1])
def test_a_loss_of_params_alone_closes_over_its_data(layers):
    def loss(p, x):
        for w in p["layers"]:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    params = {"layers": [normal(4, 4) for _ in range(layers)]}
    over_data = quantize_fn(lambda params: loss(params, X), EVERY)
    q = quantize_fn(loss, EVERY)
    of_both = jax.value_and_grad(lambda p: q(p, X)), jax.value_and_grad(over_data)
    (want, gradient), (got, other) = jax.jit(lambda p: [f(p) for f in of_both])(params)
    assert_same_bits(got, want)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), other, gradient)


# Operands that are not floating


def test_integers_and_complex_numbers_under_a_glob_stay_as_they_are():
    def f(p, x):
        counts = (x > 0).astype(jnp.int32) @ p["table"]
        phases = x.astype(jnp.complex64) @ p["phases"]
        return x @ p["w"], counts, phases

    params = {"w": normal(4, 4), "table": np.ones((4, 2), np.int32), "phases": normal(4, 2).astype(np.complex64)}
    q = quantize_fn(f, EVERY)
    got, want = jax.jit(lambda p: (q(p, X), f(p, X)))(params)
    for y, expected in zip(got[1:], want[1:], strict=True):
        assert_same_bits(y, expected)
    plan = q.plan(params, X)
    assert quantized(plan) == ["w:input", "w"]
    assert plan["table"].why == "int32: only floating operands are quantized"
    assert plan["phases:input"].why == "complex64: only floating operands are quantized"
    for rules, strict in (([Rule("table", W8, A8), *EVERY], False), (EVERY, True)):
        with pytest.raises(ValueError, match="an operand must be floating to be quantized, got"):
            quantize_fn(f, rules, strict=strict).plan(params, X)


# A solver with a derivative of its own


@jax.custom_vjp
def solved(w, y, steps):
    """As an ODE solver: a loop in a function with its own derivative, whose author refuses one of the operands."""
    return lax.while_loop(lambda s: s[1] < steps, lambda s: (jnp.tanh(s[0] @ w), s[1] + 1), (y, 0.0))[0]


def _forward(w, y, steps):
    assert not steps.perturbed
    value = lambda v: v.value
    return solved(*map(value, (w, y, steps))), tuple(map(value, (w, y)))


solved.defvjp(_forward, lambda operands, g: (operands[1].T @ g, g @ operands[0].T, None), symbolic_zeros=True)


def test_the_derivative_of_a_solver_is_kept_with_respect_to_what_varies():
    f = lambda p, y: solved(p["w"], y, np.float32(3))
    with pytest.raises(ValueError, match=r"custom=\"keep\".*while loop.*vector field"):
        quantize_fn(f, EVERY).plan({"w": CAPTURED}, X)
    q = quantize_fn(f, [Rule("w", W8, A8, custom="keep")])
    g = normal(3, 4)
    of_all = lambda p: (jax.grad(lambda p: (q(p, X) * g).sum())(p)["w"], q(p, X), f(p, X))
    got, y, in_float = jax.jit(of_all)({"w": CAPTURED})
    np.testing.assert_allclose(got, X.T @ g, rtol=1e-6, atol=1e-6)  # a sum of terms near 1 may cancel
    assert not np.array_equal(y, in_float)


# One trace


def test_a_plan_and_the_first_call_share_a_trace():
    traces = []

    def f(p, x):
        traces.append(1)
        return x @ p["w"]

    q = quantize_fn(f, EVERY)
    params = {"w": CAPTURED}
    q.plan(params, X)
    q.plan(jax.eval_shape(lambda: params), jax.eval_shape(lambda: X))
    q(params, X)
    q.plan(params, X)
    assert len(traces) == 1


INPUTS = {"8 bits": A8, "tokens": activation_spec(8, granularity=PerToken()), "float8": float8_spec()}


@pytest.mark.slow
@cases("inputs, execution", [*((name, "auto") for name in INPUTS), ("float8", "native")], [("tokens", "auto")])
def test_a_row_with_an_infinity_gives_nan_as_a_row_with_a_nan_does(inputs, execution):
    """As the largest level it would hide an overflow of float16 from a loss scaler. Other rows stay as they are."""
    params, x = {"w": jnp.asarray(normal(16, 4))}, jnp.asarray(normal(6, 16))
    spec = float8_spec() if inputs == "float8" else W8
    q = quantize_fn(lambda p, x: x @ p["w"], [Rule("w", spec, INPUTS[inputs])], execution=execution)
    frozen, qparams = q.freeze(params, x), q.init_qparams(params, x)
    for bad in (np.inf, -np.inf, np.nan):
        broken = x.at[2, 3].set(np.float32(bad))
        for value in (q(params, broken), q(frozen, broken), jax.jit(q)(params, broken, qparams=qparams)):
            assert np.isnan(value[2]).all()
            assert np.isfinite(np.delete(np.asarray(value), 2, 0)).all()
        loss = lambda params, x: jnp.square(q(params, x)).sum()
        assert not np.isfinite(jax.grad(loss)(params, broken)["w"]).all()
    for bad in (np.inf, np.nan):
        with pytest.raises(ValueError, match=r"At 'w'.*the parameter has 1 (NaN|infinite numbers)"):
            q.freeze({"w": params["w"].at[0, 0].set(np.float32(bad))}, x)
