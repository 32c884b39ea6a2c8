# SPDX-License-Identifier: Apache-2.0
"""What bad rules, parameters and qparams of pytrees get, eagerly and while tracing: the path, the rule and the fix."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inputs import ones, zeros

import jaxquant as jq
from jaxquant import PerBlock, QParams, QuantSpec, Rule, activation_spec, weight_spec

W = jax.device_put(np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6))
S, CHANNELS, STOCHASTIC = QuantSpec(), weight_spec(channel_axis=-1), QuantSpec(rounding="stochastic")
KEY = jax.random.key(0)
PLAIN = QParams(jnp.float32(0.1), jnp.float32(0))
OF_RULE = "At 'layer/w', chosen by the rule '*/w': "
RULES = [("*/w", S)]
every = jq.match_rules, jq.fake_quant_params, jq.init_qparams, jq.quantize_params
takes_qparams = jq.fake_quant_params, jq.quantize_params
tree = lambda leaf: {"layer": {"w": leaf, "bias": W[0]}}
named = lambda function: getattr(function, "__name__", str(function))


def traced_or_not(call, expected, *texts):
    """The same error eagerly and while a tracer stands for the array."""
    for run in (call, functools.partial(jax.eval_shape, call)):
        with pytest.raises((TypeError, ValueError)) as error:
            run(W)
        assert error.type is expected
        for text in texts:
            assert text in str(error.value), str(error.value)


def is_kernel(path, leaf):
    return 1


# (rules, class, what the message says)
BAD_RULES = [
    ({"**/w": S}, TypeError, ["`rules`", "list(rules.items())", "'**/w'"]),
    (("**/w", S), TypeError, ["`rules`", "One rule is a list of one", "('**/w', "]),
    (["**/w", S], TypeError, ["`rules`", "One rule is a list of one"]),
    ((re.compile("w"), S), TypeError, ["`rules`", "One rule is a list of one"]),
    ("**/w", TypeError, ["`rules`", "'**/w'"]),
    ("ab", TypeError, ["`rules`", "'ab'"]),
    (None, TypeError, ["`rules`", "got None"]),
    (Rule("**/w", S), TypeError, ["`rules`", "One rule is a list of one"]),
    (iter(RULES), TypeError, ["`rules`", "list"]),
    ([("**/w", S, None)], TypeError, ["`rules[0]`", "a pair (pattern, spec) or a Rule"]),
    ([*RULES, "**/w"], TypeError, ["`rules[1]`", "'**/w'"]),
    ([*RULES, S], TypeError, ["`rules[1]`", "QuantSpec(bits=8)"]),
    ([("*/w", 8)], TypeError, ["`weight`", "got int", "weight_spec(...)"]),
    ([(S, "*/w")], TypeError, ["`pattern`", "got QuantSpec", "path glob"]),
    ([(None, S)], TypeError, ["`pattern`", "got NoneType"]),
    ([(re.compile(b"w"), S)], TypeError, ["`pattern`", "got bytes"]),
    ([("layer/w**", S)], ValueError, ["`pattern`", "'layer/w**'", "whole segment"]),
    ([("***/w", S)], ValueError, ["`pattern`", "'***/w'"]),
    ([(is_kernel, S)], TypeError, ["is_kernel", "'layer/bias'", "return a bool", "got int"]),
    ([(lambda path, leaf: None, S)], TypeError, ["'layer/bias'", "return a bool", "NoneType"]),
    ([(lambda path, leaf: jnp.array(True), S)], TypeError, ["'layer/bias'", "return a bool", "dtype bool"]),
]


@pytest.mark.parametrize("function", every, ids=named)
@pytest.mark.parametrize(("rules", "kind", "texts"), BAD_RULES)
def test_rules_of_another_kind_are_refused(function, rules, kind, texts):
    traced_or_not(lambda w: function(tree(w), rules), kind, *texts)


@pytest.mark.parametrize("function", every, ids=named)
@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("**/wieght", "'**/wieght'"),
        (re.compile("layer/weights"), "re.compile('layer/weights')"),
        (lambda path, leaf: False, "lambda"),
    ],
)
def test_a_rule_that_matches_nothing_is_told_with_the_nearest_paths(function, pattern, text):
    call = lambda w: function(
        {"layer": {"weight": w}, "other": {"q": w}, "zzz": {"q": w}}, [("layer/*", S), (pattern, S)]
    )
    traced_or_not(call, ValueError, "`rules[1]`", text, "matches no parameter, of 3", "'layer/weight'", "optional=True")


def test_the_nearest_path_comes_first_and_at_most_five_are_told():
    params = {f"block_{i}": {"dense": {"kernel": W}, "norm": {"scale": W}} for i in range(6)}
    with pytest.raises(ValueError, match=r"nearest paths: 'block_3/norm/scale'") as error:
        jq.match_rules(params, [("block_3/norm/scales", S)])
    assert str(error.value).count("'block_") == 1 + 5  # the pattern, and the paths


def test_a_rule_without_any_parameter_says_so():
    with pytest.raises(ValueError, match=r"'\*\*', matches no parameter, of 0. The nearest paths: none"):
        jq.match_rules({"w": None}, [("**", S)])


@pytest.mark.parametrize("function", every, ids=named)
@pytest.mark.parametrize(
    ("earlier", "shadowed"),
    [("**", "*/w"), ("*/w", "*/w"), (re.compile("layer/.*"), "layer/w"), ("layer/*", "layer/**")],
)
@pytest.mark.parametrize("spec", [S, None])
def test_a_shadowed_rule_names_the_one_that_takes_its_parameters(function, earlier, shadowed, spec):
    texts = "`rules[1]`", repr(shadowed), "is shadowed", "'layer/", repr(earlier), "narrower rule first"
    traced_or_not(lambda w: function(tree(w), [(earlier, S), (shadowed, spec)]), ValueError, *texts)


def test_of_two_earlier_rules_the_one_that_took_the_parameter_is_named():
    rules = [("head/*", None), ("*/bias", None), ("layer/bias", S)]
    with pytest.raises(ValueError, match=r"'layer/bias', is shadowed.*earlier rule '\*/bias'"):
        jq.match_rules({"head": {"w": W}, **tree(W)}, rules)


# Leaves that cannot be quantized, and what the message calls them. A traced one is still a tracer of the dtype.
NO_PARAMETERS = [
    (jax.device_put(np.arange(3, dtype=np.int32)), "int32"),
    (np.ones(3, bool), "bool"),
    (np.ones(3, complex), "complex128"),
    (jax.device_put(np.ones(3, jnp.float8_e4m3fn)), "float8"),
    (True, "bool"),
    (3, "int"),
    (0.5, "float"),
    (2j, "complex"),
    ("text", "str"),
    (KEY, "key"),
    (is_kernel, "function"),
    (functools.partial(jnp.sum, axis=0), "partial"),
    (jq.quantize(W, S), "QArray"),
    (np.datetime64("2026-01-01"), "datetime64"),
]


@pytest.mark.parametrize("function", every, ids=named)
@pytest.mark.parametrize(("leaf", "text"), NO_PARAMETERS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_leaf_that_is_no_parameter_is_refused_if_matched_and_else_passed_through(function, leaf, text):
    call = lambda w: function({"layer": {"w": leaf}, "v": w}, [("v", S), ("*/w", S)])
    traced_or_not(call, ValueError, OF_RULE, text, "floating array", "('layer/w', None)")
    method = {"method": "minmax"} if function is jq.init_qparams else {}
    for rules in ([("v", S)], [("*/w", None), ("v", S)]):
        out = function({"layer": {"w": leaf}, "v": W}, rules, **method)
        if function in takes_qparams:
            assert out["layer"]["w"] is leaf
        else:
            assert out.get("layer", {"w": None}) == {"w": None}


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", "uint32"])
def test_a_traced_leaf_of_another_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match=re.escape(OF_RULE) + f".*{dtype}"):
        jax.eval_shape(lambda w: jq.fake_quant_params(tree(w), RULES), jax.ShapeDtypeStruct((3,), dtype))


@pytest.mark.parametrize("function", every, ids=named)
@pytest.mark.parametrize(
    ("spec", "texts"),
    [
        (weight_spec(), ["does not say which axis", "channel_axis", "shape (4, 6)"]),
        (weight_spec(block_size=2), ["does not say which axis", "shape (4, 6)"]),
        (weight_spec(channel_axis=2), ["PerChannel(2)", "rank 2, shape (4, 6)", "[-2, 2)"]),
        (weight_spec(channel_axis=(0, -3)), ["PerChannel((-3, 0))", "rank 2"]),
        (weight_spec(channel_axis=(0, -2)), ["PerChannel((-2, 0))", "twice"]),
        (QuantSpec(granularity=PerBlock(-1, 4)), ["PerBlock(axis=-1, size=4)", "Sizes that do: 1, 2, 3, 6."]),
        (QuantSpec(granularity=PerBlock(2, 4)), ["PerBlock(axis=2, size=4)", "rank 2"]),
    ],
)
def test_a_spec_that_does_not_fit_is_told_with_path_and_rule(function, spec, texts):
    traced_or_not(lambda w: function(tree(w), [("*/w", spec)]), ValueError, OF_RULE, *texts)


@pytest.mark.parametrize("function", every, ids=named)
def test_two_parameters_of_one_path_are_refused_where_both_are_quantized(function):
    both = lambda w: {"layer": {"w": w}, "layer/w": w}
    traced_or_not(lambda w: function(both(w), RULES), ValueError, OF_RULE, "two parameters have this path")
    function(both(W), [("*/w", None)])


# (function, keyword arguments, class, what the message says): for one weight of shape (4, 6) at layer/w.
MISFITS = [
    *[
        (f, {"qparams": qparams}, kind, texts)
        for f in takes_qparams
        for qparams, kind, texts in [
            ({}, ValueError, ["`qparams`", "got none for 'layer/w'", "init_qparams(params, rules)"]),
            ({"layer/w": None}, ValueError, ["`qparams`", "got none for 'layer/w'"]),
            ({"w": PLAIN}, ValueError, ["got none for 'layer/w'", "the nearest keys it has: 'w'"]),
            ({"layer/w": PLAIN, "layer/bias": PLAIN}, ValueError, ["`qparams` has 'layer/bias'", "nearest: 'layer/w'"]),
            ({"layer/w": PLAIN, 0: PLAIN}, ValueError, ["`qparams` has 0, which is not an entry"]),
            (PLAIN, TypeError, ["`qparams`", "a dict from entry to its value", "got QParams"]),
            ([("layer/w", PLAIN)], TypeError, ["`qparams`", "got list"]),
            ("layer/w", TypeError, ["`qparams`", "got str"]),
            ({"layer/w": (0.1, 0.0)}, TypeError, [OF_RULE, "`qparams`", "got tuple"]),
            ({"layer/w": jnp.float32(0.1)}, TypeError, [OF_RULE, "`qparams`", "dtype float32"]),
            ({"layer/w": {"scale": 0.1}}, TypeError, [OF_RULE, "got dict"]),
            ({"layer/w": QParams("0.1", 0.0)}, TypeError, [OF_RULE, "`qparams.scale`", "got str"]),
            ({"layer/w": QParams(jnp.int32(1), 0.0)}, TypeError, [OF_RULE, "`qparams.scale`", "int32"]),
            ({"layer/w": QParams(ones((1, 6)), 0.0)}, ValueError, [OF_RULE, "`qparams.scale`", "(1, 6)"]),
            ({"layer/w": QParams(0.1, ones(6))}, ValueError, [OF_RULE, "`qparams.zero_point`", "(6,)"]),
        ]
    ],
    *[(f, {"key": KEY}, ValueError, ["`key`", "no rule that rounds so", "Drop it"]) for f in takes_qparams],
    *[
        (f, {"bits": bits}, kind, [OF_RULE, "`bits`", text])
        for f in (jq.fake_quant_params, jq.init_qparams)
        for bits, kind, text in [
            (9, ValueError, "got 9"),
            (jnp.int32(9), ValueError, "got 9"),
            (1, ValueError, "got 1"),
            (4.0, TypeError, "got 4.0"),
            (True, TypeError, "got True"),
            (ones(2, jnp.int32), ValueError, "(2,)"),
        ]
    ],
    (jq.fake_quant_params, {"lsq_gradient": True}, ValueError, ["`lsq_gradient`", "qparams=None", "init_qparams"]),
    (jq.fake_quant_params, {"lsq_gradient": 1}, TypeError, ["`lsq_gradient`", "static bool", "got int"]),
    (jq.fake_quant_params, {"lsq_gradient": None}, TypeError, ["`lsq_gradient`", "static bool", "NoneType"]),
    (jq.init_qparams, {"method": "max"}, ValueError, [OF_RULE, "`method`", "'max'", "minmax"]),
    (jq.init_qparams, {"method": None}, TypeError, [OF_RULE, "`method`", "NoneType"]),
]


@pytest.mark.parametrize(("function", "kw", "kind", "texts"), MISFITS)
def test_what_does_not_fit_the_parameters_is_refused(function, kw, kind, texts):
    traced_or_not(lambda w: function(tree(w), RULES, **kw), kind, *texts)


def test_qparams_of_a_stack_are_not_those_of_a_layer():
    params, rules = tree(W), [("*/w", CHANNELS)]
    stacked = jax.tree.map(lambda v: jnp.stack([v, v]), jq.init_qparams(params, rules, "minmax"))
    with pytest.raises(ValueError, match=re.escape(OF_RULE) + r".*\(1, 6\), got \(2, 1, 6\)"):
        jq.fake_quant_params(params, rules, stacked)


@pytest.mark.parametrize("function", takes_qparams, ids=named)
@pytest.mark.parametrize(
    ("key", "kind", "texts"),
    [
        (None, ValueError, [OF_RULE, "`key` must be a PRNG key, got None", "jax.random.key"]),
        (7, TypeError, ["`key`", "got int"]),
        (ones(2), TypeError, ["`key`", "float32"]),
        (jax.random.split(KEY), ValueError, ["`key`", "one PRNG key", "(2,)"]),
    ],
)
def test_stochastic_rounding_needs_one_key(function, key, kind, texts):
    traced_or_not(lambda w: function(tree(w), [("*/w", STOCHASTIC)], key=key), kind, *texts)


@pytest.mark.parametrize("weight", [S, None])
def test_fake_quant_params_refuses_an_activation_that_it_would_leave_in_float(weight):
    call = lambda w: jq.fake_quant_params(tree(w), [Rule("*/w", weight, activation_spec(4))])
    traced_or_not(call, ValueError, "'*/w'", "activation", "QuantSpec(bits=4, symmetric=False)", "fake_quant(x, spec")


@pytest.mark.parametrize(
    ("kw", "kind", "texts"),
    [
        ({"activation": PerBlock(0, 2)}, TypeError, ["`activation`", "got PerBlock", "activation_spec(...)"]),
        ({"weight": QuantSpec}, TypeError, ["`weight`", "got type"]),
        ({"weight": jnp.ones(2)}, TypeError, ["`weight`", "float32"]),
        ({"optional": 1}, TypeError, ["`optional`", "static bool", "got int"]),
        ({"optional": None}, TypeError, ["`optional`", "NoneType"]),
    ],
)
def test_a_rule_refuses_attributes_of_another_kind(kw, kind, texts):
    with pytest.raises(kind) as error:
        Rule("w", **kw)
    assert all(text in str(error.value) for text in texts)


def test_optional_is_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        Rule("w", S, None, True)


def test_a_shape_is_a_parameter_for_the_plan_alone():
    params = {"layer": {"w": jax.ShapeDtypeStruct((4, 6), jnp.bfloat16), "n": jax.ShapeDtypeStruct((), jnp.int32)}}
    assert jq.match_rules(params, RULES) == {"layer": {"w": S, "n": None}}
    with pytest.raises(ValueError, match=r"At 'layer/n', chosen by the rule '\*\*'.*ShapeDtypeStruct"):
        jq.match_rules(params, [("**", S)])
    for function in every[1:]:
        with pytest.raises(TypeError, match=re.escape(OF_RULE) + ".*ShapeDtypeStruct"):
            function(params, RULES)


def test_dequantize_params_names_the_qarray_whose_arrays_do_not_fit():
    params = jq.quantize_params(tree(W), [("*/w", CHANNELS)])
    q = params["layer"]["w"]
    params["layer"]["w"] = dataclasses.replace(q, scale=ones((1, 5)))
    with pytest.raises(ValueError, match=r"At 'layer/w': `q`.*\(1, 5\)"):
        jq.dequantize_params(params)
    with pytest.raises(ValueError, match=r"At 'layer/w': `q`.*\(1, 5\)"):
        jax.eval_shape(jq.dequantize_params, params)


def test_an_error_keeps_the_one_that_caused_it():
    with pytest.raises(ValueError, match="At 'layer/w', chosen by the rule") as error:
        jq.fake_quant_params(tree(W), RULES, bits=9)
    assert "`bits`" in str(error.value.__cause__)
    assert "layer/w" not in str(error.value.__cause__)


# What integers cannot hold: one check for all that write them


def written(how, w, qparams):
    """A parameter in integers, with qparams, by each function that makes them."""
    spec, params = weight_spec(8, channel_axis=-1), {"w": jnp.asarray(w, jnp.float32)}
    q, x = jq.quantize_fn(lambda p, x: x @ p["w"], [("w", spec)]), ones((3, 2))
    if how == "quantize_params":
        return jq.quantize_params(params, [("w", spec)], qparams)
    if how == "freeze":
        return q.freeze(params, x, qparams=qparams)
    grams = q.observe({"w": ones((2, 2))}, x, gram=True)
    return jq.solve.gptq(
        params, q, grams, x, qparams=qparams or q.init_qparams({"w": jnp.ones((2, 2))}, x), freeze=True
    )


WRITERS = "quantize_params", "freeze", "gptq"


@pytest.mark.parametrize("how", WRITERS)
@pytest.mark.parametrize("scale", [-0.01, 0.0, np.nan, np.inf])
def test_scales_that_are_none_are_refused_by_each_writer(how, scale):
    qparams = {"w": QParams(jnp.array([[0.01, scale]], jnp.float32), zeros((1, 2)))}
    with pytest.raises(ValueError, match=r"At 'w'.*1 of 2 scales are 0, negative or not finite"):
        written(how, np.ones((2, 2)), qparams)


@pytest.mark.parametrize("how", WRITERS)
def test_nan_is_refused_by_each_writer(how):
    with pytest.raises(ValueError, match=r"At 'w'.*the parameter has 1 NaN"):
        written(how, [[1, np.nan], [2, 3]], None)


def test_a_range_below_zero_is_refused_for_unsigned_integers():
    spec, params, x = QuantSpec(signed=False), {"w": -np.ones((2, 3), np.float32)}, ones((4, 2))
    q = jq.quantize_fn(lambda p, x: x @ p["w"], [Rule("w", QuantSpec(), spec)])
    with pytest.raises(ValueError, match=r"At 'w:input'.*below 0, such as \[-3.0, -0.5\].*Make it signed"):
        q.init_qparams(params, x, ranges={"w:input": jq.Range(np.float32(-3), np.float32(-0.5))})
    with pytest.raises(ValueError, match=r"At 'w:input'.*below 0"):
        q.init_qparams(params, -x)
    for made in (
        lambda: jq.init_qparams(params, [("w", spec)]),
        lambda: jq.quantize_fn(lambda p, x: x @ p["w"], [("w", spec)]).init_qparams(params, x),
    ):
        with pytest.raises(ValueError, match=r"At 'w'.*below 0"):
            made()
    q.init_qparams(params, x * np.float32([[1, -1]]))  # of which the upper half is kept
