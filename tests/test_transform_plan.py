# SPDX-License-Identifier: Apache-2.0
"""The plan of quantize_fn, as text and as data; which site each rule chooses; and that every slip is told."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import x64
from inputs import ones

import jaxquant as jq
from jaxquant import (
    PerBlock,
    PerChannel,
    PerTensor,
    PerToken,
    QuantSpec,
    Rule,
    activation_spec,
    quant_point,
    weight_spec,
)

W8, A8 = weight_spec(8), activation_spec(8)
KEY = jax.random.key(0)
TABLE = jax.device_put(np.ones((5, 5), np.float32))
shaped = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
zeros = functools.partial(jax.tree.map, lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)))
NHWC = ("NHWC", "HWIO", "NHWC")
conv = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)


def model(params, x):
    """A site of each kind."""
    up, lora = params["up"], params["lora"]
    with jax.named_scope("encoder"):
        h = (jnp.tanh(x @ up["kernel"] + up["bias"])[:, :4] @ up["kernel"])[:, :4]
        h = quant_point(jnp.einsum("id,jd->ij", h, h), "probs") @ quant_point(h, "values")
    h = h @ (lora["a"] * lora["b"]) @ TABLE
    return conv(h[None, :, :, None], params["stem"].astype(h.dtype))


PARAMS = {
    "up": {"kernel": shaped(4, 6), "bias": shaped(1, 6)},
    "lora": {"a": shaped(4, 5), "b": shaped(4, 5)},
    "stem": shaped(3, 3, 1, 2, dtype=jnp.bfloat16),
    "unused": shaped(7),
}
X = shaped(3, 4)
# name, kind, op, scope, shape, K: worked out by hand
SITES = [
    ("up/kernel:input", "weight", "dot_general", "encoder", (3, 4), 4),
    ("up/kernel", "weight", "dot_general", "encoder", (4, 6), 4),
    ("up/kernel:input#2", "weight", "dot_general", "encoder", (3, 4), 4),
    ("up/kernel#2", "weight", "dot_general", "encoder", (4, 6), 4),
    ("encoder/dot_general_2:lhs", "act_act", "dot_general", "encoder", (3, 4), 4),
    ("encoder/dot_general_2:rhs", "act_act", "dot_general", "encoder", (3, 4), 4),
    ("probs", "act_act", "dot_general", "encoder", (3, 3), 3),
    ("values", "act_act", "dot_general", "encoder", (3, 4), 3),
    ("dot_general_0:input", "derived", "dot_general", "", (3, 4), 4),
    ("dot_general_0", "derived", "dot_general", "", (4, 5), 4),
    ("dot_general_1:input", "captured", "dot_general", "", (3, 5), 5),
    ("dot_general_1", "captured", "dot_general", "", (5, 5), 5),
    ("stem:input", "weight", "conv_general_dilated", "", (1, 3, 5, 1), 9),
    ("stem", "weight", "conv_general_dilated", "", (3, 3, 1, 2), 9),
]
NAMES = [name for name, *_ in SITES]
of_kind = lambda *kinds: {name for name, kind, *_ in SITES if kind in kinds}


def plan(*rules, f=model, params=PARAMS, x=X, **kw):
    return jq.quantize_fn(f, list(rules), **kw).plan(params, x)


# What is computed from parameters would be left in float, which a rule must say.
LORA = Rule("lora/*", None, optional=True)


def chosen(*rules, **kw):
    return {site.name for site in plan(LORA, *rules, **kw) if site.spec}


def mlp(params, x):
    return jnp.tanh(x @ params["w"] + params["bias"]) @ params["v"]


MLP = {"w": shaped(4, 5), "bias": shaped(1, 5), "v": shaped(5, 2)}


def test_a_plan_is_the_sites_as_data():
    found = plan(LORA, Rule("**", W8, A8))
    assert [(s.name, s.kind, s.op, s.scope, s.shape, s.length) for s in found] == SITES
    assert all(s.dtype == np.dtype(np.float32) for s in found)
    quantized = {s.name: (s.spec, s.rule, s.why) for s in found if s.spec}
    at = lambda spec, axis: dataclasses.replace(spec, granularity=PerChannel(axis))
    weights = {"up/kernel": at(W8, 1), "up/kernel#2": at(W8, 1), "stem": at(W8, 3)}
    inputs = dict.fromkeys(["up/kernel:input", "up/kernel:input#2", "stem:input"], A8)
    assert quantized == {name: (spec, "**", "") for name, spec in (weights | inputs).items()}


def test_a_plan_is_a_table():
    rows = str(plan(("w", None), Rule("*", weight_spec(4, -1), A8), f=mlp, params=MLP)).splitlines()
    said, in_float = "w     the rule says None", "4  -                               -        "
    assert rows == [
        "site     op           shape         K  quantized to                    state    rule  left in float because",
        f"w:input  dot_general  float32[3,4]  {in_float}{said}",
        f"w        dot_general  float32[4,5]  {in_float}{said}",
        "v:input  dot_general  float32[3,5]  5  8 bits affine per tensor        dynamic  *",
        "v        dot_general  float32[5,2]  5  4 bits symmetric per channel 1  dynamic  *",
        "2 of 4 sites are quantized",
        "parameters: quantized 1 (10 numbers, 40 bytes); left in float by a rule 1 (20 numbers, 80 bytes); "
        "matched, but no operand 1 (5 numbers, 20 bytes)",
        "matched, but no operand: biases and the like, which no dot or convolution takes as they are",
    ]


def test_a_plan_is_of_the_context_that_it_is_made_in():
    """Of jit's cache, which tells 32 from 64 bits, and traces once for each."""
    traced = []

    def f(params, x):
        traced.append(1)
        wide = jnp.result_type(float)
        return x.astype(wide) @ params["w"].astype(wide)

    q, dtypes = jq.quantize_fn(f, [Rule("w", weight_spec(8), activation_spec(8))]), []
    for enabled in (False, True, False, True):
        with x64(enabled):
            dtypes.append(str(q.plan({"w": ones((4, 2), "float32")}, ones((3, 4), "float32"))["w:input"].dtype))
    assert dtypes == ["float32", "float64"] * 2
    assert len(traced) == 2


def test_the_table_of_a_function_without_sites():
    text = str(plan(f=lambda params, x: x + 1, params=MLP))
    assert text.splitlines()[1:] == [
        "0 of 0 sites are quantized",
        "parameters: without a rule 3 (35 numbers, 140 bytes)",
    ]
    assert str(plan(f=lambda params, x: x + 1, params={})).splitlines()[-1] == "parameters: none"


def test_a_bare_array_has_a_name_in_the_table():
    found = plan(("", W8), f=lambda w, x: x @ w, params=shaped(4, 5))
    assert [site.name for site in found] == [":input", ""]
    assert str(found).splitlines()[2].startswith("''  ")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (QuantSpec(bits=3), "3 bits symmetric per tensor"),
        (QuantSpec(bits=4, signed=False), "4 bits unsigned symmetric per tensor"),
        (QuantSpec(symmetric=False, granularity=PerChannel((0, 1))), "8 bits affine per channel (0, 1)"),
        (weight_spec(4, block_size=2), "4 bits symmetric per block of 2 on 0"),
    ],
)
def test_a_spec_in_words(spec, words):
    assert f"  {words}  " in str(plan(("w", spec), f=mlp, params=MLP))


def test_the_table_of_patterns_that_are_no_globs():
    regex, function = re.compile(".*w"), lambda path, leaf: path == "v"
    found = plan((regex, W8), (function, W8), f=mlp, params=MLP)
    assert (found["w"].rule, found["v"].rule) == (regex, function)
    assert ".*w" in str(found)
    assert "lambda" in str(found)
    assert " at 0x" not in str(found)  # the same text from run to run


def test_a_plan_is_a_sequence_with_names():
    found = plan()
    assert len(found) == len(list(found)) == len(SITES)
    for name in NAMES:
        assert found[name].name == name
        assert found[name] in list(found)
    with pytest.raises(KeyError, match=r"up/kernal.*nearest names: 'up/kernel'"):
        found["up/kernal"]
    with pytest.raises(KeyError, match="none"):
        plan(f=lambda params, x: x)["w"]


def test_shapes_suffice_and_nothing_is_computed():
    rules = [LORA, Rule("**", W8, A8)]
    expected = plan(*rules)
    assert list(plan(*rules, params=zeros(PARAMS), x=zeros(X))) == list(expected)
    seen = []

    def f(params, x, *, flag, scale):
        seen.append((type(x).__name__, flag, type(scale).__name__))
        return model(params, x) * scale if flag else x

    q = jq.quantize_fn(f, rules)
    assert list(q.plan(PARAMS, X, flag=True, scale=2.0)) == list(expected)
    assert set(seen) == {("DynamicJaxprTracer", True, "float")}
    q = jq.quantize_fn(lambda x, params: model(params, x), rules, params_argnum=1)
    assert list(q.plan(X, PARAMS)) == list(expected)


WHY = {
    "weight": "no rule matches",
    "act_act": 'no parameter; Rule(..., kind="act_act")',
    "params": "both operands are parameters",
    "captured": 'closed over; Rule(..., kind="captured")',
    "derived": 'Rule(..., kind="derived")',
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind, *_ in SITES])
def test_why_a_site_without_a_rule_is_left_in_float(name, kind):
    site = plan()[name]
    made = "computed from lora/a, lora/b; " if name == "dot_general_0" else ""
    assert (site.spec, site.rule, site.why) == (None, None, made + WHY[kind])


def test_why_a_site_with_a_rule_is_left_in_float():
    found = plan(LORA, ("up/**", None), ("**", W8))
    assert [found[name].why for name in ("up/kernel", "stem")] == ["the rule says None", ""]
    assert found["stem:input"].why == "the rule has no spec for this operand"


def test_why_a_backward_pass_is_left_in_float():
    gradient = lambda params, x: jax.grad(lambda w: (x @ w).sum())(params["w"])
    backward = [site for site in plan(f=gradient, params=MLP) if site.kind == "gradient"]
    assert backward
    assert {site.why for site in backward} == {'in a backward pass; Rule(..., kind="gradient")'}


def experts(params, x):
    """The gradient of a ragged dot with respect to its matrices."""
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    return jax.lax.ragged_dot_general(x, params["experts"], jnp.array([1, 2], jnp.int32), numbers)


def test_what_cannot_be_entered_is_in_the_plan_and_an_error_where_it_is_chosen():
    params = {"experts": shaped(3, 5)}
    for rules in ([], [("experts", None)]):
        (site,) = plan(*rules, f=experts, params=params)
        assert (site.name, site.kind, site.spec) == ("experts", "closed", None)
        assert site.why == f"{site.op} cannot be entered"
    with pytest.raises(ValueError, match=r"At 'experts', chosen by the rule '\*\*'.*ragged_dot.*\('experts', None\)"):
        plan(("**", W8), f=experts, params=params)


def test_the_first_rule_that_matches_decides():
    found = plan(("up/*", None), Rule("stem", weight_spec(4), A8), Rule("**", W8, optional=True))
    assert {site.name for site in found if site.spec} == {"stem", "stem:input"}
    assert found["stem"].spec.bits == 4
    assert {site.rule for site in found} == {"up/*", "stem", None}


def is_matrix(path, leaf):
    return len(leaf.shape) == 2


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (("**", W8), {"up/kernel", "up/kernel#2", "stem"}),
        (Rule("**", None, A8), {"up/kernel:input", "up/kernel:input#2", "stem:input"}),
        (Rule("**", W8, A8), of_kind("weight")),
        ((re.compile("up/.*|lora/.*"), W8), {"up/kernel", "up/kernel#2"}),
        ((is_matrix, W8), {"up/kernel", "up/kernel#2"}),
        (Rule("**", W8, min_size=24), {"up/kernel", "up/kernel#2"}),
        (Rule("**", W8, min_size=18), {"up/kernel", "up/kernel#2", "stem"}),
        (Rule("**", W8, dtype="float32"), {"up/kernel", "up/kernel#2"}),
        (Rule("**", W8, dtype=jnp.bfloat16), {"stem"}),  # of the parameter, not of the operand
        (Rule("**", W8, op="conv_general_dilated"), {"stem"}),
        (Rule("**", W8, op="dot_general"), {"up/kernel", "up/kernel#2"}),
        (Rule("**", W8, scope="encoder"), {"up/kernel", "up/kernel#2"}),
        (Rule("**", W8, scope="en*/**"), {"up/kernel", "up/kernel#2"}),
        (Rule("**", W8, scope=""), {"stem"}),
        (Rule("**", W8, scope="**"), {"up/kernel", "up/kernel#2", "stem"}),
        (Rule("**", activation=A8, kind="act_act"), of_kind("act_act")),
        (Rule("probs", activation=A8, kind="act_act"), {"probs"}),
        (Rule("*/dot_general_2", activation=A8, kind="act_act"), set(NAMES[4:6])),
        (Rule("encoder/*", activation=A8, kind="act_act", min_size=12), {*NAMES[4:6], "values"}),
        (Rule("**", W8, A8, kind="captured"), of_kind("captured")),
        (Rule("dot_general_1", W8, kind="captured"), {"dot_general_1"}),
        (Rule("**", W8, A8, kind="derived"), of_kind("derived")),
        (Rule("dot_general_0", W8, A8, kind="derived"), of_kind("derived")),
        (Rule("lora/a", W8, kind="derived"), {"dot_general_0"}),
        (Rule("lora/a", W8, A8, kind="derived"), of_kind("derived")),  # the other operand too, as for a weight
    ],
)
def test_what_a_rule_chooses(rule, expected):
    assert chosen(rule) == expected


def test_a_derived_rule_is_for_the_parameters_of_that_operand_alone():
    def twice(params, x):
        return x @ (params["w"] * 2) @ (params["v"] * 2)

    assert chosen(Rule("w", W8, A8, kind="derived"), f=twice, params=MLP) == {"dot_general_0", "dot_general_0:input"}


def test_a_predicate_sees_the_parameter():
    seen = {}
    plan((lambda path, leaf: bool(seen.update({path: (leaf.shape, leaf.dtype)})) or True, W8), f=mlp, params=MLP)
    assert seen == {path: (leaf.shape, leaf.dtype) for path, leaf in MLP.items()}


@pytest.mark.parametrize(
    ("weight", "activation", "of_weight", "of_input"),
    [
        (weight_spec(8, 0), A8, PerChannel(2), PerTensor()),  # axes of a parameter are counted on the parameter
        (weight_spec(8, (0, -2)), A8, PerChannel((1, 2)), PerTensor()),
        (weight_spec(8, block_size=2), A8, PerBlock(0, 2), PerTensor()),
        (QuantSpec(granularity=PerBlock(-1, 2)), A8, PerBlock(0, 2), PerTensor()),
        (W8, activation_spec(granularity=PerToken()), PerChannel((1, 2)), PerChannel(0)),
        (W8, activation_spec(granularity=PerBlock(None, 2)), PerChannel((1, 2)), PerBlock(1, 2)),
        (QuantSpec(), activation_spec(granularity=PerChannel(0)), PerTensor(), PerChannel(0)),
    ],
)
def test_axes_are_those_of_the_operand(weight, activation, of_weight, of_input):
    turned = lambda params, x: jax.lax.dot_general(x, params["w"].transpose(2, 1, 0), (((1,), (0,)), ((), ())))
    found = plan(Rule("w", weight, activation), f=turned, params={"w": shaped(5, 3, 4)})
    assert (found["w"].spec.granularity, found["w:input"].spec.granularity) == (of_weight, of_input)


def test_a_rule_that_matches_nothing_may_be_optional():
    nothing = Rule("decoder/**", W8, optional=True)
    assert chosen(nothing, ("stem", W8)) == chosen(("stem", W8), nothing) == {"stem"}
    assert chosen(("**", W8), Rule("stem", None, optional=True)) == {"up/kernel", "up/kernel#2", "stem"}


def refused(expected, texts, call, /, *args, **kw):
    """An error of the class, whose message has the texts in this order."""
    with pytest.raises(expected, match="(?s)" + ".*".join(map(re.escape, texts))) as error:
        call(*args, **kw)
    assert error.type is expected
    return str(error.value)


@pytest.mark.parametrize(
    ("rule", "texts"),
    [
        (("up/kernl", W8), ["'up/kernl', matched no site", "'weight'", "nearest", "'up/kernel'", "optional=True"]),
        (("kernel", W8), ["'kernel', matched no site", "is for whole paths, and '**/kernel' matches 1 of them"]),
        ((re.compile("ste"), W8), ["re.compile('ste'), matched no site", "'stem'"]),
        (Rule("prob", activation=A8, kind="act_act"), ["'prob', matched no site", "'act_act'", "'probs'"]),
        (Rule("zzz", W8, kind="gradient"), ["'zzz', matched no site", "'gradient'", "none"]),
        (("up/bias", W8), ["matched no site", "the parameter 'up/bias'", "no dot or convolution uses as it is"]),
        (("unused", W8), ["matched no site", "the parameter 'unused'", "no dot or convolution uses as it is"]),
        (("lora/a", W8), ["matched no site", "'lora/a'", "kind 'derived'"]),
        (Rule("up/kernel", W8, kind="derived"), ["matched no site", "'up/kernel'", "kind 'weight'"]),
        (Rule("stem", W8, op="dot_general"), ["matched no site", "op"]),
    ],
)
def test_a_rule_that_matches_no_site_says_the_nearest_and_why(rule, texts):
    refused(ValueError, ["`rules[1]`", *texts], plan, ("stem", None), rule)


@pytest.mark.parametrize("name", ["op", "scope", "min_size", "dtype"])
def test_a_parameter_that_a_rule_leaves_out_by_another_field_is_not_told_to_be_in_no_op(name):
    narrow = {"op": "dot_general", "scope": "encoder", "min_size": 100, "dtype": "float32"}
    text = refused(ValueError, ["'stem', matched no site"], plan, Rule("stem", W8, **{name: narrow[name]}))
    assert "no dot or convolution uses" not in text
    assert f"{name}=" in text


def test_a_bias_is_not_told_to_be_in_the_ops_that_come_after_it():
    text = refused(ValueError, ["'bias', matched no site"], plan, ("bias", W8), f=mlp, params=MLP)
    assert "the parameter 'bias', which no dot or convolution uses as it is" in text
    attention = lambda params, x: (x + params["bias"]) @ (x + params["bias"]).T @ x @ params["w"]
    params = {"bias": shaped(1, 4), "w": shaped(4, 5)}
    text = refused(ValueError, ["'bias', matched no site"], plan, ("bias", W8), f=attention, params=params)
    assert "act_act" not in text
    act_act = Rule("bias", activation=A8, kind="act_act")
    assert "kind 'weight'" not in refused(ValueError, ["'bias', matched no site"], plan, act_act, f=mlp, params=MLP)


@pytest.mark.parametrize(
    "rule",
    [
        Rule("up/kernl", W8),
        Rule("prob", activation=A8, kind="act_act"),
        Rule("dot_generl_1", W8, kind="derived"),
        Rule("dot_generl", W8, kind="captured"),
    ],
    ids=lambda rule: rule.kind,
)
def test_the_names_that_an_error_offers_are_patterns_that_match(rule):
    text = refused(ValueError, ["nearest"], plan, rule)
    offered = re.findall("'([^']+)'", text.split("nearest")[1].split(". ")[0])
    assert offered
    for name in offered:
        assert chosen(dataclasses.replace(rule, pattern=name)), name


@pytest.mark.parametrize(
    ("f", "first"),
    [
        (lambda x, params: mlp(params, x), X),
        (lambda x, params: mlp(params, jnp.tanh(x)), X),
        (lambda batch, params: mlp(params, batch["image"]), {"image": X}),
    ],
)
def test_a_wrong_params_argnum_is_suspected(f, first):
    q = jq.quantize_fn(f, [("w", W8)])
    refused(ValueError, ["`rules[0]`, 'w', matched no site", "params_argnum"], q.plan, first, MLP)


def test_of_two_parameters_one_is_the_input():
    f = lambda params: params["query"] @ params["w"]
    found = lambda *rules: list(jq.quantize_fn(f, rules).plan({"query": X, "w": MLP["w"]}))
    texts = ["'query' and 'w'", "two parameters", "rule with None", "params_argnum=0 is wrong"]
    refused(ValueError, texts, found, Rule("**", W8, A8))
    for rules, expected in (
        ([("query", None), Rule("**", W8, A8)], [None, 8]),
        ([Rule("w", W8, A8)], [8, 8]),
        ([("w", None)], [None, None]),
        ([], [None, None]),
    ):
        sites = found(*rules)
        assert [site.spec and site.spec.bits for site in sites] == expected
    assert {site.why for site in sites} == {"both operands are parameters"}


@pytest.mark.parametrize("spec", [W8, None])
@pytest.mark.parametrize("narrow", ["up/kernel", "up/*", re.compile("up/kernel")])
def test_a_shadowed_rule_names_the_one_that_takes_its_sites(narrow, spec):
    texts = ["`rules[2]`", repr(narrow), "is shadowed", "'up/kernel'", "earlier rule '**'", "narrower rule first"]
    refused(ValueError, texts, plan, ("stem", None), ("**", W8), (narrow, spec))


def test_a_rule_that_stands_twice_is_shadowed_by_itself():
    rule = Rule("v", W8)
    refused(ValueError, ["`rules[1]`", "'v'", "is shadowed"], plan, rule, rule, f=mlp, params=MLP)


def test_a_rule_shadows_only_rules_of_its_kind():
    assert chosen(Rule("**", W8, A8), Rule("**", activation=A8, kind="act_act")) == of_kind("weight", "act_act")
    rules = [Rule(pattern, activation=A8, kind="act_act") for pattern in ("**", "probs")]
    refused(ValueError, ["`rules[1]`", "'probs'", "is shadowed"], plan, *rules)


def test_strict_wants_a_rule_for_every_site():
    text = refused(ValueError, ["`strict=True`", "None"], plan, LORA, ("**", W8), strict=True)
    assert set(re.findall("'([^']+)'", text)) == set(NAMES) - of_kind("weight")
    assert chosen(("v", W8), ("*", None), f=mlp, params=MLP, strict=True) == {"v"}
    refused(ValueError, ["`strict=True`", "'w:input', 'w'"], plan, ("v", W8), f=mlp, params=MLP, strict=True)


def test_strict_can_be_satisfied_by_rules_with_none():
    kinds = ("act_act", "derived", "captured", "gradient")
    rules = [("**", None), *(Rule("**", None, kind=kind, optional=True) for kind in kinds)]
    assert not chosen(*rules, strict=True)


RULES = [("**", W8)]
# (f, rules, options, class, what the message says)
BAD = [
    *[(f, RULES, {}, TypeError, ["`f` must be a function", f"got {type(f).__name__}"]) for f in (3, None, MLP, "mlp")],
    *[
        (mlp, rules, {}, TypeError, texts)
        for rules, texts in [
            ({"**": W8}, ["`rules`", "list(rules.items())"]),
            (("**", W8), ["`rules`", "One rule is a list of one"]),
            (Rule("**", W8), ["`rules`", "got Rule", "One rule is a list of one"]),
            ("**", ["`rules`", "'**'"]),
            (None, ["`rules`", "got None"]),
            (W8, ["`rules`", "got QuantSpec"]),
            ([("**", W8, A8)], ["`rules[0]`", "a pair (pattern, spec) or a Rule"]),
            ([("**", W8), W8], ["`rules[1]`", "got QuantSpec"]),
            ([("**", 8)], ["`weight`", "got int", "weight_spec(...)"]),
            ([(8, W8)], ["`pattern`", "got int", "'**'"]),
        ]
    ],
    *[
        (mlp, RULES, {name: value}, kind, [f"`{name}`", *texts])
        for name, value, kind, texts in [
            ("execution", "int4", ValueError, ["auto, int8, native", "'int4'"]),
            ("execution", 8, TypeError, ["auto, int8, native", "got int"]),
            ("execution", None, TypeError, ["auto, int8, native", "NoneType"]),
            ("params_argnum", True, TypeError, ["static int", "got bool"]),
            ("params_argnum", 1.5, TypeError, ["static int", "got float"]),
            ("params_argnum", "params", TypeError, ["static int", "got str"]),
            ("params_argnum", (0,), TypeError, ["static int", "got tuple"]),
            ("params_argnum", -1, ValueError, ["got -1"]),
            ("strict", 1, TypeError, ["static bool", "got int"]),
            ("strict", "yes", TypeError, ["static bool", "got str"]),
        ]
    ],
]


@pytest.mark.parametrize(("f", "rules", "options", "kind", "texts"), BAD)
def test_what_quantize_fn_cannot_take_is_refused_at_once(f, rules, options, kind, texts):
    refused(kind, texts, jq.quantize_fn, f, rules, **options)


def loud(expected, texts, q, /, *args, **kw):
    """The same error from the plan, from a call, and from one that is traced."""
    refused(expected, texts, q.plan, *args, **kw)
    refused(expected, texts, q, *zeros(args), **zeros(kw))
    refused(expected, texts, functools.partial(jax.eval_shape, q), *args, **kw)


def test_params_are_given_by_position():
    texts = ["`params_argnum=2`", "positional", "got 2", "by position"]
    loud(TypeError, texts, jq.quantize_fn(mlp, [("**", W8)], params_argnum=2), MLP, X)
    texts = ["`params_argnum=0`", "positional", "got 0", "by position"]
    loud(TypeError, texts, jq.quantize_fn(mlp, [("**", W8)]), params=MLP, x=X)


@pytest.mark.parametrize("leaf", [type("NoHash", (), {"__hash__": None})(), np.array(["text"])], ids=["object", "str"])
def test_a_leaf_without_a_hash_is_refused(leaf):
    q = jq.quantize_fn(lambda params, x, extra: mlp(params, x), [("**", W8)])
    for call in (q, q.plan):
        refused(TypeError, ["hash", type(leaf).__name__], call, MLP, X, leaf)
        refused(TypeError, ["hash", type(leaf).__name__], call, {**MLP, "extra": leaf}, X, 0)


def test_two_parameters_of_one_path_are_refused():
    q = jq.quantize_fn(lambda params, x: x @ params["a"]["b"], [("a/b", W8)])
    loud(ValueError, ["'a/b'", "Rename"], q, {"a": {"b": shaped(4, 5)}, "a/b": shaped(4, 5)}, X)


SIXTEEN = QuantSpec(bits=16)
dot = lambda params, x: x @ params["w"]
convolution = lambda params, x: conv(x, params["w"])
merged = lambda params, x: x @ params["w"].reshape(-1, 2)
DOT, LONG = (dot, (6, 4), (2, 6)), (dot, (70_000, 4), (2, 70_000))
CONV, MERGED = (convolution, (3, 3, 2, 4), (1, 5, 5, 2)), (merged, (3, 4, 2), (2, 12))
channels = lambda axis: activation_spec(granularity=PerChannel(axis))
blocks = lambda axis, size: QuantSpec(granularity=PerBlock(axis, size))
# (function, shape of the weight, of the input), rule, what the message says
MISFITS = [
    (DOT, ("*", weight_spec(8, 2)), ["At 'w'", "rule '*'", "PerChannel(2)", "rank 2", "[-2, 2)"]),
    (DOT, ("*", weight_spec(8, -3)), ["At 'w'", "PerChannel(-3)", "(6, 4)"]),
    (DOT, ("*", weight_spec(8, (0, -2))), ["At 'w'", "PerChannel((-2, 0))", "twice"]),
    (DOT, ("*", blocks(3, 2)), ["At 'w'", "(6, 4)"]),
    (DOT, ("*", weight_spec(4, block_size=4)), ["At 'w'", "size=4", "6", "Sizes that do: 1, 2, 3, 6"]),
    (DOT, Rule("*", W8, channels(2)), ["At 'w:input'", "PerChannel(2)"]),
    (DOT, Rule("*", W8, channels(None)), ["At 'w:input'", "output channels of a weight", "Pass PerToken()"]),
    (DOT, ("*", QuantSpec(granularity=PerToken())), ["At 'w'", "is for activations", "PerChannel(None)"]),
    (DOT, Rule("*", W8, blocks(1, 4)), ["At 'w:input'", "1, 2, 3, 6"]),
    (DOT, Rule("*", weight_spec(8, 0), A8), ["'w'", "contracted", "PerChannel(0)", "PerBlock"]),
    (DOT, Rule("*", W8, channels(1)), ["'w:input'", "contracted"]),
    (DOT, Rule("*", blocks(0, 1), A8), ["'w'", "contracted"]),
    (LONG, Rule("*", SIXTEEN, A8), ["'w'", "70000 products", "digits", "65793", "fewer bits"]),
    (LONG, Rule("*", SIXTEEN, SIXTEEN), ["'w'", "70000 products", "digits", "43690", "PerBlock"]),
    (CONV, ("*", weight_spec(4, block_size=2)), ["At 'w'", "blocks", "(3, 3, 2, 4)"]),
    (CONV, Rule("*", blocks(2, 2), A8), ["'w'", "contracted", "PerTensor"]),
    (CONV, Rule("*", weight_spec(8, 2), A8), ["'w'", "contracted", "PerTensor"]),
    (CONV, Rule("*", W8, channels(3)), ["'w:input'", "contracted"]),
    (MERGED, ("*", weight_spec(8, 0)), ["At 'w'", "(3, 4, 2)", "(12, 2)", "axis None"]),
    (MERGED, ("*", blocks(0, 3)), ["At 'w'", "(3, 4, 2)", "(12, 2)"]),
]


@pytest.mark.parametrize(("case", "rule", "texts"), MISFITS)
def test_a_spec_that_does_not_fit_names_the_site(case, rule, texts):
    f, weight, x = case
    loud(ValueError, texts, jq.quantize_fn(f, [rule]), {"w": shaped(*weight)}, shaped(*x))


@pytest.mark.parametrize("side", ["w", "w:input"])
def test_an_integer_operand_is_refused_by_its_name_and_as_an_input_and_a_table_left_by_a_glob(side):
    f = lambda params, x: jax.lax.dot_general(
        x, params["w"], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    dtypes = {side: jnp.int8}
    params = {"w": shaped(4, 5, dtype=dtypes.get("w", jnp.float32))}
    x = shaped(3, 4, dtype=dtypes.get("w:input", jnp.float32))
    named = "At {!r}, chosen by the rule {!r}", "floating", "int8", "None"
    for pattern, strict in (("w", False), ("*", True)):
        texts = [named[0].format(side, pattern), *named[1:]]
        loud(ValueError, texts, jq.quantize_fn(f, [Rule(pattern, W8, A8)], strict=strict), params, x)
    assert not chosen(("*", None), f=f, params=params, x=x)
    if side == "w:input":  # which the rule for the weight names, too
        loud(
            ValueError, ["floating", "int8", "x.astype(jnp.float32)"], jq.quantize_fn(f, [Rule("*", W8, A8)]), params, x
        )
    rule = Rule("*", W8, A8 if side == "w" else None)
    found = plan(rule, f=f, params=params, x=x)
    assert (found[side].spec, found[side].why) == (None, "int8: only floating operands are quantized")
    assert [site.name for site in found if site.spec] == [name for name in ("w:input", "w") if name != side]


STOCHASTIC = weight_spec(8, rounding="stochastic")


@pytest.mark.parametrize(
    ("weight", "activation", "name"),
    [
        pytest.param(STOCHASTIC, None, "w", marks=pytest.mark.slow),
        (STOCHASTIC, A8, "w"),
        (W8, activation_spec(rounding="stochastic"), "w:input"),
    ],
)
def test_stochastic_rounding_needs_a_key(weight, activation, name):
    q = jq.quantize_fn(dot, [Rule("w", weight, activation)])
    texts = [f"At {name!r}, chosen by the rule 'w'", "`key`", "got None", "jax.random.key"]
    args = {"w": ones((4, 5))}, ones((3, 4))
    refused(ValueError, texts, q, *args)
    refused(ValueError, texts, functools.partial(jax.eval_shape, q), *args)
    assert q.plan(*args)[name].spec.rounding == "stochastic"  # the plan needs none
    assert q(*args, key=KEY).shape == (3, 5)


def test_names_that_look_like_a_list_of_names_have_their_own_spec_and_state():
    f = lambda p, x: (x @ p["a"]) @ p["a, b"]
    params, x = {"a": shaped(4, 4), "a, b": shaped(4, 4)}, shaped(2, 4)
    q = jq.quantize_fn(f, [("a", W8), ("a, b", weight_spec(4))])
    qparams = q.init_qparams(zeros(params), zeros(x)) | {"a": None}
    found = q.plan(params, x, qparams=qparams)
    assert [(found[name].entry_spec.bits, found[name].state) for name in params] == [(8, "dynamic"), (4, "static")]


@pytest.mark.parametrize(
    ("key", "kind", "text"),
    [
        (7, TypeError, "got int"),
        ("key", TypeError, "got str"),
        (np.ones(2, np.float32), TypeError, "dtype float32"),
        (jax.random.split(KEY), ValueError, "shape (2,)"),
        (np.zeros(3, np.uint32), ValueError, "shape (3,)"),
    ],
)
def test_what_is_no_prng_key_is_refused(key, kind, text):
    q = jq.quantize_fn(dot, [("w", STOCHASTIC)])
    args = {"w": jnp.ones((4, 5))}, jnp.ones((3, 4))
    for run in (q, q.plan, lambda *args, key: jax.eval_shape(functools.partial(q, key=key), *args)):
        refused(kind, ["`key`", text], run, *args, key=key)


@pytest.mark.parametrize(
    ("kw", "kind", "texts"),
    [
        (
            {"kind": "activation"},
            ValueError,
            ["`kind`", "weight, act_act, derived, captured, gradient", "'activation'"],
        ),
        ({"kind": None}, TypeError, ["`kind`", "NoneType"]),
        ({"op": "conv"}, ValueError, ["`op`", "dot_general, conv_general_dilated", "'conv'"]),
        ({"op": jax.lax.dot_general}, TypeError, ["`op`", "dot_general, conv_general_dilated", "got function"]),
        ({"custom": "drop"}, ValueError, ["`custom`", "keep, inline", "'drop'"]),
        ({"custom": True}, TypeError, ["`custom`", "keep, inline", "got bool"]),
        ({"scope": 3}, TypeError, ["`scope`", "path glob", "got int"]),
        ({"scope": "encoder**"}, ValueError, ["`scope`", "whole segment", "'encoder**'"]),
        ({"min_size": -1}, ValueError, ["`min_size`", "got -1"]),
        ({"min_size": 1.5}, TypeError, ["`min_size`", "static int", "got float"]),
        ({"min_size": True}, TypeError, ["`min_size`", "static int", "got bool"]),
        ({"dtype": "float31"}, TypeError, ["`dtype`", "'float31'"]),
        ({"dtype": 3}, TypeError, ["`dtype`", "3"]),
        ({"kind": "act_act", "weight": W8}, ValueError, ["`weight`", 'kind="act_act"', "activation="]),
    ],
)
def test_a_rule_refuses_fields_of_another_kind(kw, kind, texts):
    refused(kind, texts, Rule, "**", **kw)


@pytest.mark.parametrize("function", [jq.match_rules, jq.fake_quant_params, jq.init_qparams, jq.quantize_params])
@pytest.mark.parametrize(
    "field",
    [{"kind": "derived"}, {"op": "dot_general"}, {"scope": "**"}, {"custom": "keep"}],
    ids=lambda v: next(iter(v)),
)
def test_functions_of_the_parameters_alone_refuse_what_only_quantize_fn_knows(function, field):
    ((name, value),) = field.items()
    rules = [("w", None), Rule("v", QuantSpec(), optional=True, **field)]
    refused(
        ValueError, ["`rules[1]`", "'v'", f"{name}={value!r}", "quantize_fn(f, rules)"], function, zeros(MLP), rules
    )


@pytest.mark.parametrize(
    ("field", "matched"),
    [({"min_size": 11}, "w"), ({"min_size": 10}, "wv"), ({"dtype": "float32"}, "wv"), ({"dtype": "float16"}, "b")],
)
def test_functions_of_the_parameters_alone_match_by_size_and_dtype(field, matched):
    params = {"w": shaped(4, 5), "v": shaped(5, 2), "b": shaped(1, 5, dtype=jnp.float16)}
    found = jq.match_rules(params, [Rule("*", QuantSpec(), **field)])
    assert {path for path, spec in found.items() if spec} == set(matched)


# Names


@pytest.mark.slow
def test_a_parameter_named_like_the_second_use_of_another_has_a_name_of_its_own():
    f = lambda params, x: (x @ params["w"]) @ params["w"] + (2 * x) @ params["w#2"]
    params, x = {"w": jnp.eye(4), "w#2": jnp.ones((4, 4))}, jnp.ones((3, 4))
    q = jq.quantize_fn(f, [Rule("w", weight_spec(8), A8), Rule("w#2", weight_spec(4), A8)])
    names = [site.name for site in q.plan(params, x)]
    assert len(set(names)) == len(names)
    assert q.plan(params, x)["w#2"].spec.bits == 4
    seen = []
    q.at_sites(lambda info, v: (seen.append((info.entry, info.spec.bits)), v)[1])(params, x)
    assert [of for of in seen if "input" not in of[0]] == [("w", 8), ("w", 8), ("w#2", 4)]
    frozen = q.freeze(params, x, qparams=(qparams := q.init_qparams(params, x)))
    np.testing.assert_array_equal(q(frozen, x, qparams=qparams), q(params, x, qparams=qparams))


def test_a_parameter_named_like_the_history_of_a_gradient_is_refused():
    f = lambda params, x: (x @ params["w"]) @ params["w:gradient"]
    rules = [Rule("w", QuantSpec(), QuantSpec(), gradient=QuantSpec(), history=2), Rule("w:*", W8)]
    with pytest.raises(ValueError, match="'w:gradient' is the path of a parameter and the name of the history"):
        jq.quantize_fn(f, rules).plan({"w": ones((4, 4)), "w:gradient": ones((4, 4))}, ones((3, 4)))


@pytest.mark.parametrize("scope", ["transpose(heads)", "block(1)", "jvp(x)/vmap(y)"])
def test_a_scope_with_a_parenthesis_is_no_pass_of_a_gradient(scope):
    def f(params, x):
        with jax.named_scope(scope):
            return x @ params["w"]

    params, x = {"w": ones((4, 4))}, ones((3, 4))
    site = jq.quantize_fn(f, [Rule("w", W8, scope=scope)]).plan(params, x)["w"]
    assert (site.kind, site.scope) == ("weight", scope)
    inside = jax.vmap(lambda x: f(params, x))
    assert jq.quantize_fn(lambda p, x: inside(x), [], strict=False).plan(params, x)
    with pytest.raises(ValueError, match="the function itself differentiates"):
        jq.quantize_fn(jax.grad(lambda p, x: f(p, x).sum()), [Rule("w", W8)])(params, x)


def test_a_rule_that_matches_nothing_beside_a_closed_op_of_one_operand():
    call = lambda v: jax.ffi.ffi_call("f", jax.ShapeDtypeStruct((3, 4), jnp.float32))(v)
    f = lambda params, x: call(x @ params["w"])
    with pytest.raises(ValueError, match="'nope', matched no site of kind 'weight'"):
        jq.quantize_fn(f, [("nope", W8)]).plan({"w": jnp.ones((4, 4))}, jnp.ones((3, 4)))


def test_blocks_of_a_convolution_are_refused_with_what_runs():
    """In two steps the error before this one led to another."""
    f = lambda p, x: jax.lax.conv_general_dilated(x, p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    params, x, blocks = {"k": shaped(3, 3, 64, 8)}, shaped(1, 6, 6, 64), weight_spec(8, block_size=32)
    with pytest.raises(ValueError, match=r"At 'k'.*weight_spec\(bits\); or leave the inputs in float") as error:
        jq.quantize_fn(f, [Rule("k", blocks, A8)]).plan(params, x)
    assert "PerBlock((0" not in str(error.value)
    jq.quantize_fn(f, [Rule("k", weight_spec(8), A8)]).plan(params, x)
    tiles = QuantSpec(granularity=PerBlock((0, 1, 2), (1, 1, 32)))
    jq.quantize_fn(f, [("k", tiles)]).plan(params, x)


def test_a_block_size_of_minus_one_is_told_what_one_group_is():
    with pytest.raises(ValueError, match="block_size=None"):
        weight_spec(4, block_size=-1)
