# SPDX-License-Identifier: Apache-2.0
"""Rules and the transforms of params pytrees: what is chosen, and that each leaf gets the bits of the op alone."""

import functools
import itertools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits, differing
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import by_default, cases

import jaxquant as jq
from jaxquant import PerBlock, PerChannel, QParams, QuantSpec, Rule, activation_spec, weight_spec

F = np.float32
W = jax.device_put(np.random.default_rng(0).normal(size=(4, 6)).astype(F))
S, CHANNELS = QuantSpec(), weight_spec(channel_axis=-1)


# What a glob means, written without a regex: segment by segment, and character by character within one.


def glob(pattern: str, path: str) -> bool:
    return of_segments(*(v.split("/") if v else [] for v in (pattern, path)))


def of_segments(pattern, path):
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(of_segments(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and of_characters(pattern[0], path[0]) and of_segments(pattern[1:], path[1:])


def of_characters(pattern, segment):
    if not pattern:
        return not segment
    if pattern[0] == "*":
        return any(of_characters(pattern[1:], segment[i:]) for i in range(len(segment) + 1))
    return segment[:1] == pattern[0] and of_characters(pattern[1:], segment[1:])


# pattern: (paths that it matches, paths that it does not)
GLOBS = {
    "kernel": (["kernel"], ["a/kernel", "kernel/a", "kernels", "akernel", "Kernel", ""]),
    "**/kernel": (["kernel", "a/kernel", "a/b/kernel"], ["kernel/a", "a/kernels", "akernel", "a/akernel"]),
    "*/kernel": (["a/kernel", "0/kernel"], ["kernel", "a/b/kernel"]),
    "head/**": (["head", "head/a", "head/a/b"], ["heads", "head2/a", "a/head", "a/head/b"]),
    "head/*": (["head/a", "head/*"], ["head", "head/a/b"]),
    "head*": (["head", "head2"], ["ahead", "head/a"]),
    "**": (["", "a", "a/b/c"], []),
    "": ([""], ["a"]),
    "*": (["a", "anything at all"], ["", "a/b"]),
    "**/a/**/b": (["a/b", "a/x/b", "x/a/y/z/b", "a/a/b/b"], ["b/a", "a", "b", "xa/b", "a/bx"]),
    "**/**": (["", "a", "a/b"], []),
    "a/**/**/b": (["a/b", "a/c/d/b"], ["a", "ab"]),
    "layer_*/mlp*/w": (["layer_0/mlp/w", "layer_/mlp_in/w"], ["layer_0/x/mlp/w", "layer0/mlp/w"]),
    "*a*b*": (["ab", "xaybz", "aabb"], ["ba", "a/b", "a"]),
    "0/1": (["0/1"], ["01", "0/10"]),
    "a+(b)[c]?$^|{2}\\d": (["a+(b)[c]?$^|{2}\\d"], ["aab", "a+(b)[c]?$^|{2}5"]),
    "[ab]": (["[ab]"], ["a", "b"]),
    "linear/~/sub/w": (["linear/~/sub/w"], ["linear/x/sub/w"]),
    "net/~/**/w": (["net/~/w", "net/~/a/b/w"], ["net/a/w"]),
    "new\nline": (["new\nline"], ["new"]),
    "*line": (["new\nline"], ["new\nlines"]),
}


def of_path(path, leaf=W):
    return {path.split("/")[0]: of_path(path.split("/", 1)[1], leaf) if "/" in path else leaf} if path else leaf


@pytest.mark.parametrize("pattern", GLOBS)
def test_globs_of_the_table(pattern):
    for paths, expected in zip(GLOBS[pattern], (True, False), strict=True):
        for path in paths:
            assert glob(pattern, path) is expected, path  # the reference agrees with the table
            plan = jq.match_rules(of_path(path), [Rule(pattern, S, optional=True)])
            assert plan == of_path(path, S if expected else None), path


words = st.text("ab.*", min_size=1, max_size=3).filter(lambda text: "**" not in text)
segments = st.one_of(st.sampled_from(["**", "*", "a", "b"]), words)
paths_of_words = st.lists(st.text("ab.", max_size=3), max_size=5).map("/".join)


@st.composite
def patterns_near(draw, path):
    """A pattern made of the path, so that about half of them match."""
    out = []
    for segment in path.split("/") if path else []:
        kept = segment[: draw(st.integers(0, 2))] + "*"
        any_of = [[segment], [segment], [kept], ["*"], ["**"], ["**", segment], ["." * len(segment)], []]
        out += draw(st.sampled_from(any_of))
    return "/".join(out)


@pytest.mark.parametrize("examples", [50, pytest.param(150, marks=pytest.mark.slow)])
def test_globs_are_those_of_an_independent_matcher(examples):
    @settings(max_examples=examples)
    @given(st.data())
    def check(data):
        path = data.draw(paths_of_words)
        pattern = data.draw(st.one_of(patterns_near(path), st.lists(segments, max_size=5).map("/".join)))
        assert Rule(pattern, S).matches(path, None) is glob(pattern, path)

    check()


def chosen(params, pattern):
    plan = jq.match_rules(params, [Rule(pattern, S, optional=True)])
    flat, _ = jax.tree_util.tree_flatten_with_path(plan, is_leaf=lambda node: node is None)
    return {"".join(map(str, path)) for path, spec in flat if spec}


def test_keys_of_every_kind_make_paths():
    params = {"linear/~/sub": {"w": W}, "linear": {"~": {"w": W}}, "a.b": [W, (W, {3: W, 14: {"w": W}})]}
    assert chosen(params, "linear/~/sub/w") == {"['linear/~/sub']['w']"}  # a key of haiku has segments of its own
    assert chosen(params, "linear/~/*") == {"['linear']['~']['w']"}
    assert chosen(params, "**/3") == {"['a.b'][1][1][3]"}
    assert chosen(params, "a.b/*") == {"['a.b'][0]"}
    assert chosen(params, "a.b/1/0") == {"['a.b'][1][0]"}
    assert chosen(params, "**/w") == {f"{p}['w']" for p in ("['linear/~/sub']", "['linear']['~']", "['a.b'][1][1][14]")}


@pytest.mark.parametrize(("regex", "keys"), [("w", ""), (".*/w", "ab"), ("[ab]/.", "ab"), ("a/w|b", "a")])
def test_a_regex_is_of_the_whole_path(regex, keys):
    params = {"a": {"w": W}, "b": {"w": W}, "c": {"bias": W}}
    assert chosen(params, re.compile(regex)) == {f"['{key}']['w']" for key in keys}
    assert chosen(params, re.compile(regex.upper(), re.IGNORECASE)) == chosen(params, re.compile(regex))


@pytest.mark.parametrize("as_bool", [bool, np.bool_])
def test_a_predicate_sees_each_path_and_the_leaf_itself(as_bool):
    params, seen = {"a": {"w": W, "n": 3}, "b": W[0]}, []

    def predicate(path, leaf):
        seen.append((path, leaf))
        return as_bool(path != "a/n" and leaf.ndim == 2)

    assert chosen(params, predicate) == {"['a']['w']"}
    assert [path for path, _ in seen] == ["a/n", "a/w", "b"]
    assert all(leaf is own for (_, leaf), own in zip(seen, (3, W, params["b"]), strict=True))


def test_the_first_rule_that_matches_decides():
    four, eight = QuantSpec(bits=4), QuantSpec(bits=8)
    params = {"head": {"w": W, "b": W}, "body": {"w": W, "b": W}}
    rules = [("head/w", four), ("**/b", None), ("**", eight)]
    want = {"head": {"w": four, "b": None}, "body": {"w": eight, "b": None}}
    assert jq.match_rules(params, rules) == want
    assert jq.match_rules(params, tuple(map(list, rules))) == want
    assert jq.match_rules(params, [Rule(*rule) for rule in rules]) == want
    assert jq.match_rules(params, [rules[1], rules[0], rules[2]]) == want
    assert jq.match_rules(params, [("head/**", None), ("**", eight)])["head"] == {"w": None, "b": None}
    assert jq.match_rules(params, [("**/w", four)]) == {k: {"w": four, "b": None} for k in params}  # the rest: float
    assert jq.match_rules(params, [("body/*", eight), ("*/w", four)])["body"]["w"] == eight
    assert jq.match_rules(params, [("*/w", four), ("body/*", eight)])["body"]["w"] == four
    assert jq.match_rules(params, []) == {k: {"w": None, "b": None} for k in params}


def test_a_rule_of_an_activation_alone_leaves_the_parameter_in_float():
    rules = [Rule("w", activation=activation_spec(), optional=True), Rule("**", S)]
    assert jq.match_rules({"w": W, "v": W}, rules) == {"w": None, "v": S}
    assert jq.init_qparams({"w": W}, [Rule("w", activation=activation_spec())]) == {}


@pytest.mark.parametrize("rules", [["absent", "**"], ["**", "w"], ["w", "w", "**"]])
def test_an_optional_rule_may_match_nothing_or_what_is_taken(rules):
    *first, last = [Rule(pattern, QuantSpec(bits=8 - i), optional=True) for i, pattern in enumerate(rules)]
    plan = jq.match_rules({"w": W}, [*first, last])
    assert plan == {"w": first[0].weight if first[0].pattern in ("w", "**") else last.weight}
    with pytest.raises(ValueError, match="optional=True"):
        jq.match_rules({"w": W}, [Rule(rule.pattern, rule.weight) for rule in (*first, last)])


class Pair(NamedTuple):
    kernel: object
    other: object


class Several:
    """Has an attribute `value` among others: a dataclass of the user, not a box."""

    def __init__(self, value, scale):
        self.value, self.scale = value, scale


class Box:
    """Holds one parameter in its attribute `value`, and metadata that are static: as parameters of nnx and linen do."""

    def __init__(self, value, names):
        self.value, self.names = value, names


ATTRIBUTE = jax.tree_util.GetAttrKey
jax.tree_util.register_pytree_with_keys(
    Box, lambda b: (((ATTRIBUTE("value"), b.value),), b.names), lambda names, children: Box(*children, names)
)
jax.tree_util.register_dataclass(Several, ["value", "scale"], [])

LABEL, FUNCTION = "a label", jnp.tanh


def every_kind(leaf):
    return {
        "list": [leaf, None, (leaf, 7)],
        "pair": Pair(leaf, LABEL),
        "several": Several(leaf, FUNCTION),
        "box": Box(leaf, ("in", "out")),
        "boxes": Box({"value": Box([leaf], "inner")}, "outer"),
        "none": None,
        "empty": {"a": {}, "b": Box(None, "")},
    }


PATHS = "box", "boxes/value/0", "list/0", "list/2/0", "list/2/1", "pair/kernel", "pair/other"
PATHS = [*PATHS, "several/value", "several/scale"]


def test_paths_leave_out_the_attribute_of_a_box_alone():
    seen = []
    jq.match_rules(every_kind(W), [Rule(lambda path, leaf: bool(seen.append(path)), optional=True)])
    assert seen == PATHS
    first = jax.tree_util.tree_flatten_with_path(every_kind(W))[0][0]
    assert first[0][-1] == ATTRIBUTE("value")  # so that there is something to leave out


def test_the_root_may_be_a_leaf_or_a_box():
    assert jq.match_rules(W, [("", S)]) == jq.match_rules(W, [("**", S)]) == S
    assert jq.match_rules(Box(W, "root"), [("", S)]).value == S
    assert_same_bits(jq.fake_quant_params(W, [("**", S)]), jq.fake_quant(W, S))
    assert list(jq.init_qparams(W, [("**", S)], "minmax")) == [""]


CHOICES = {
    "box": ["box"],
    "list/**": ["list/0", "list/2/0"],
    "several/value": ["several/value"],
    "boxes/*/0": PATHS[1:2],
}


@pytest.mark.parametrize(("pattern", "paths"), CHOICES.items())
def test_every_structure_comes_back_with_what_is_not_chosen_untouched(pattern, paths):
    params = every_kind(W)
    rules = [Rule("list/2/1", optional=True), (pattern, CHANNELS)]
    q, fake = jq.quantize_params(params, rules), jq.fake_quant_params(params, rules)
    assert list(jq.init_qparams(params, rules, "minmax")) == paths
    assert (type(fake["pair"]), fake["box"].names, fake["boxes"].names) == (Pair, ("in", "out"), "outer")
    want = jq.fake_quant(W, CHANNELS)
    back = jq.dequantize_params(q)
    for tree in (fake, back):
        assert jax.tree.structure(tree) == jax.tree.structure(params)
        for path, new, old in zip(PATHS, jax.tree.leaves(tree), jax.tree.leaves(params), strict=True):
            if path in paths:
                assert_same_bits(new, want, path)
            else:
                assert new is old, path
    is_qarray = lambda node: isinstance(node, jq.QArray)
    integers = jax.tree.leaves(q, is_leaf=is_qarray)
    assert jax.tree.structure(q, is_leaf=is_qarray) == jax.tree.structure(params)
    assert [path for path, leaf in zip(PATHS, integers, strict=True) if is_qarray(leaf)] == paths
    unchanged = jq.dequantize_params(params)
    assert all(new is old for new, old in zip(*map(jax.tree.leaves, (unchanged, params)), strict=True))


def test_the_plan_is_that_of_shapes_too():
    params = every_kind(W)
    shapes = jax.tree.map(lambda v: jax.typeof(v) if isinstance(v, jax.Array) else v, params)
    shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype) if hasattr(v, "shape") else v, shapes)
    rules = [("list/2/1", None), ("list/**", S), ("several/value", CHANNELS)]
    plans = [jax.tree.leaves(jq.match_rules(p, rules), is_leaf=lambda v: v is None) for p in (params, shapes)]
    assert plans[0] == plans[1]
    assert plans[0].count(S) == 2
    assert plans[0].count(CHANNELS) == 1


def test_qarrays_among_the_params_pass_through():
    q = jq.quantize(W, S)
    params = {"done": q, "todo": W}
    out = jq.quantize_params(params, [("todo", S)])
    assert out["done"] is q
    assert jq.match_rules(params, [("todo", S)]) == {"done": None, "todo": S}
    assert jq.fake_quant_params(params, [("todo", S)])["done"] is q
    seen = []
    jq.match_rules(params, [Rule(lambda path, leaf: bool(seen.append(path)), optional=True)])
    assert seen == ["done", "todo"]  # not its arrays


SPECS = {
    "tensor": (S, "float32"),
    "channel": (CHANNELS, "float32"),
    "4 bits, bf16": (weight_spec(4, channel_axis=0), "bfloat16"),
    "3 bits, blocks": (QuantSpec(bits=3, granularity=PerBlock(-1, 3)), "float32"),
    "affine, f16": (activation_spec(granularity=PerChannel(-1)), "float16"),
    "affine, unsigned, half up, blocks": (
        QuantSpec(bits=4, signed=False, symmetric=False, rounding="half_up", granularity=PerBlock(0, 2)),
        "float32",
    ),
    "unsigned, every element": (QuantSpec(signed=False, granularity=PerChannel((0, -1))), "float32"),
    "12 bits, wide": (QuantSpec(bits=12, narrow_range=False, rounding="half_away"), "bfloat16"),
}
CORE = "channel", "4 bits, bf16", "affine, unsigned, half up, blocks"  # the others are slow


@functools.cache
def case(name):
    """Two leaves of a spec, with values near ties, and one without; the rules; and qparams that clip some values."""
    spec, dtype = SPECS[name]
    rng = np.random.default_rng([5, *name.encode()])
    lowest = 0 if spec.symmetric and not spec.signed else -spec.qmax
    ties = lambda: np.r_[np.full((1, 6), spec.qmax), rng.integers(lowest, spec.qmax, (3, 6)) + 0.5]
    leaf = lambda: jax.device_put((ties() * 0.0471).astype(jnp.dtype(dtype)))
    params = {"a": {"w": leaf(), "bias": np.arange(3, dtype=F)}, "b": [leaf()]}
    qparams = {}
    for path in ("a/w", "b/0"):
        fitted = jq.fit_qparams(leaf(), spec)
        zero = rng.integers(spec.qmin, spec.qmax + 1, fitted.scale.shape) if not spec.symmetric else 0
        scale = np.asarray(fitted.scale) / F(3)
        qparams[path] = QParams(scale, np.broadcast_to(F(zero), scale.shape))
    return params, [("**/bias", None), ("**", spec)], qparams, spec


OWN = {"a/w": lambda tree: tree["a"]["w"], "b/0": lambda tree: tree["b"][0]}


def same_tree(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for i, (a, b) in enumerate(zip(*map(jax.tree.leaves, (got, want)), strict=True)):
        assert_same_bits(a, b, f"leaf {i}")


@by_default("affine, unsigned, half up, blocks-False")
@cases(
    ("name", "given_qparams"),
    itertools.product(SPECS, [False, True]),
    [("channel", True), ("4 bits, bf16", False), *itertools.product(CORE[2:], [False])],
)
def test_each_leaf_gets_the_bits_of_the_op_alone(name, given_qparams):
    params, rules, qparams, spec = case(name)
    own = lambda path: qparams[path] if given_qparams else None
    used = qparams if given_qparams else None
    fake, q = jq.fake_quant_params(params, rules, used), jq.quantize_params(params, rules, used)
    for path, of in OWN.items():
        x, y, z = map(of, (params, fake, q))
        assert_same_bits(y, jq.fake_quant(x, spec, own(path)), path)
        want = jq.quantize(x, spec, own(path))
        assert (z.spec, z.dtype) == (spec, x.dtype)
        same_tree([z.values, z.scale, z.zero_point], [want.values, want.scale, want.zero_point])
        assert differing(y, x) > 0 or z.scale.size == x.size  # a value of its own scale may be what it was
    same_tree(jq.dequantize_params(q), fake)
    if not given_qparams:
        same_tree(jq.fake_quant_params(params, rules, jq.init_qparams(params, rules, "minmax")), fake)


@pytest.mark.parametrize(
    ("name", "given_qparams"),
    [
        pytest.param("channel", False, marks=pytest.mark.slow),
        ("3 bits, blocks", True),
        pytest.param("affine, f16", True, marks=pytest.mark.slow),
    ],
)
def test_the_bits_are_the_same_on_every_road(name, given_qparams):
    params, rules, qparams, _ = case(name)
    params = jax.tree.map(np.asarray, params)
    used, thrice = qparams if given_qparams else None, jax.tree.map(lambda v: v * v.dtype.type(3), params)
    want = [jq.fake_quant_params(p, rules, used) for p in (params, thrice)]
    f = lambda p, v: (jq.fake_quant_params(p, rules, v), jq.dequantize_params(jq.quantize_params(p, rules, v)))
    stack = jax.tree.map(lambda *v: np.stack(v), params, thrice)

    @jax.jit
    def roads(params, thrice, stack, used):
        return {
            "jit": [f(p, used) for p in (params, thrice)],
            "vmap": jax.vmap(f, (0, None))(stack, used),
            "scan": jax.lax.scan(lambda carry, p: (carry, f(p, used)), None, stack)[1],
        }

    for road, got in jax.tree.map(np.asarray, roads(params, thrice, stack, used)).items():
        for i in range(2):
            for tree in got[i] if road == "jit" else jax.tree.map(lambda v, i=i: v[i], got):
                same_tree(tree, want[i])


@pytest.mark.slow
def test_a_stack_that_keeps_its_axis_is_the_vmap_of_its_layers():
    stack, layer = [("w", weight_spec(4, channel_axis=a)) for a in ((0, -1), -1)]
    params = {"w": np.stack([W, F(3) * W, -np.asarray(W)])}
    whole = jq.fake_quant_params(params, [stack])
    same_tree(whole, jax.vmap(lambda p: jq.fake_quant_params(p, [layer]))(params))
    qparams = jq.init_qparams(params, [stack], "minmax")
    assert qparams["w"].scale.shape == (3, 1, 6)
    q = jq.quantize_params(params, [stack], qparams)
    same_tree(jax.lax.scan(lambda carry, p: (carry, jq.dequantize_params(p)), None, q)[1], whole)
    same_tree(jax.vmap(lambda p, v: jq.fake_quant_params(p, [layer], v))(params, qparams), whole)


@cases("method", ["minmax", "percentile", "mse", "lsq"], ["minmax", "percentile", "lsq"])
def test_init_qparams_are_those_of_fit_qparams(method):
    params, rules, _, spec = case("channel")
    got = jq.init_qparams(params, rules, method)
    assert list(got) == ["a/w", "b/0"]
    for path, of in OWN.items():
        same_tree(got[path], jq.fit_qparams(of(params), spec, method)._replace(spec=spec))
        assert isinstance(got[path], QParams)
    if method != "lsq":  # a jitted caller too
        same_tree(jax.jit(lambda p: jq.init_qparams(p, rules, method))(params), got)


@pytest.mark.slow
def test_init_qparams_fit_as_a_call_without_them_and_for_the_bits_of_a_schedule():
    params, rules, _, spec = case("channel")
    fitted = jq.init_qparams(params, rules)
    same_tree(fitted, jq.init_qparams(params, rules, "minmax"))
    same_tree(jq.fake_quant_params(params, rules, fitted), jq.fake_quant_params(params, rules))
    got = jq.init_qparams(params, rules, "minmax", bits=np.int32(3))
    same_tree(got["a/w"], jq.fit_qparams(params["a"]["w"], spec, bits=3))
    same_tree(got["a/w"], jq.fit_qparams(params["a"]["w"], weight_spec(3, channel_axis=-1)))


def cotangents(params):
    rng = np.random.default_rng(9)
    return jax.tree.map(lambda v: rng.integers(-8, 9, v.shape).astype(v.dtype), params)


@cases("name", [*CORE, "affine, f16"])
def test_gradients_are_those_of_the_op_leaf_by_leaf(name):
    params, rules, qparams, spec = case(name)
    g = cotangents(params)
    to_params, to_qparams = jax.vjp(lambda p, v: jq.fake_quant_params(p, rules, v), params, qparams)[1](g)
    assert_same_bits(to_params["a"]["bias"], g["a"]["bias"])  # of the identity
    op = lambda x, v: jq.fake_quant(x, spec, v)
    for path, of in OWN.items():
        dx, want = of(to_params), jax.vjp(op, of(params), qparams[path])[1](of(g))
        same_tree((dx, to_qparams[path]), want)
        assert 0 < int((np.asarray(dx) == 0).sum()) < dx.size
        assert np.asarray(to_qparams[path].scale).any()
        assert np.asarray(to_qparams[path].zero_point).any() != spec.symmetric
    back = jax.jit(lambda p, v: jax.vjp(lambda p: jq.fake_quant_params(p, rules, v), p)[1](g)[0])(params, qparams)
    same_tree(back, to_params)


LSQ = {"tensor": 24, "channel": 4, "3 bits, blocks": 3, "affine, unsigned, half up, blocks": 2, "affine, f16": 4}


def lsq_gradients(name, params, qparams, bits, lsq):
    f = lambda p, v: jq.fake_quant_params(p, case(name)[1], v, bits=bits, lsq_gradient=lsq)
    y, vjp = jax.vjp(f, params, qparams)
    return y, *vjp(cotangents(params))


@cases(
    ("name", "bits"),
    [*((name, None) for name in LSQ), ("channel", 5)],
    [("channel", None), ("channel", 5), ("affine, unsigned, half up, blocks", None)],
)
def test_the_lsq_gradient_is_the_plain_one_divided_by_the_root_of_n_times_qmax(name, bits):
    params, _, qparams, spec = case(name)
    gradients = jax.jit(functools.partial(lsq_gradients, name, bits=bits), static_argnames="lsq")
    y, to_params, to_qparams = gradients(params, qparams, lsq=True)
    plain = gradients(params, qparams, lsq=False)
    same_tree((y, to_params), plain[:2])  # only the qparams learn at another rate
    qmax = spec.qmax if bits is None else 2 ** (bits - spec.signed) - 1
    factor = np.float32(1) / np.sqrt(np.float32(LSQ[name] * qmax))
    same_tree(to_qparams, jax.tree.map(lambda v: np.asarray(v) * factor, plain[2]))
    assert all(np.asarray(v.scale).any() for v in to_qparams.values())


@cases("size", [5, 6, 7, 11])
def test_the_lsq_factor_of_traced_bits_has_the_same_bits_under_jit(size):
    w, qparams = np.arange(-size, size, 2, F) / F(7), {"w": jq.QParams(F(0.5), F(0))}
    values = lambda v, bits: jq.fake_quant_params({"w": w}, [("w", S)], v, bits=bits, lsq_gradient=True)["w"]
    gradient = lambda v, bits: jax.vjp(lambda v: values(v, bits), v)[1](np.round(w * 4))
    same_tree(*(f(qparams, np.int32(8)) for f in (jax.jit(gradient), gradient)))


@pytest.mark.parametrize("bits", [None, 5])
def test_the_lsq_gradient_is_the_same_under_jit(bits):
    params, _, qparams, _ = case("channel")
    got = jax.jit(lambda p, v, bits: lsq_gradients("channel", p, v, bits, True))(params, qparams, bits)
    want = lsq_gradients("channel", params, qparams, bits, True)
    same_tree(got[:2], want[:2])
    for a, b in zip(*map(jax.tree.leaves, (got[2], want[2])), strict=True):  # float sums
        np.testing.assert_allclose(a, b, rtol=1e-5)


# What fake_quant knows of ranges that it fits itself: nothing finite is clipped, but beyond half the largest float,
# where a range ends.
HALF = float(np.finfo(np.float32).max) / 2
SHAPE = 4, 8
symmetric_specs = st.builds(
    QuantSpec,
    bits=st.integers(2, 16),
    narrow_range=st.booleans(),
    rounding=st.sampled_from(["half_even", "half_up", "half_away"]),
    granularity=st.sampled_from([jq.PerTensor(), PerChannel(-1), PerChannel((0, -1)), PerBlock(-1, 4), PerBlock(0, 2)]),
)
other_specs = st.one_of(
    st.builds(QuantSpec, bits=st.integers(2, 16), signed=st.booleans(), symmetric=st.just(False)),
    st.builds(QuantSpec, bits=st.integers(2, 16), signed=st.just(False)),
    st.builds(QuantSpec, bits=st.integers(2, 16), signed=st.booleans(), rounding=st.just("stochastic")),
)


@functools.partial(jax.jit, static_argnames="spec")
def both_gradients(x, g, bits, key, spec):
    """To x, with the range fitted inside and with the same qparams passed."""
    rules, stochastic = [("w", spec)], key if spec.rounding == "stochastic" else None
    of = lambda v: jax.vjp(lambda x: jq.fake_quant_params({"w": x}, rules, v, key=stochastic, bits=bits)["w"], x)
    fitted, passed = of(None), of({"w": jq.fit_qparams(x, spec, bits=bits)})
    return (fitted[0], *fitted[1](g)), (passed[0], *passed[1](g))


def values_of(rng, kind, spec):
    x = {
        "normal": lambda: rng.normal(size=SHAPE),
        "grid": lambda: rng.integers(-2 * spec.qmax, 2 * spec.qmax + 1, SHAPE) / 2 * rng.uniform(0.1, 1),
        "tiny": lambda: rng.normal(size=SHAPE) * 10.0 ** rng.integers(-46, -34, SHAPE),
        "huge": lambda: rng.normal(size=SHAPE) * 10.0 ** rng.integers(0, 38, SHAPE),
        "half the largest": lambda: HALF * rng.choice([-1, 1, 0.5, 1 - 2.0**-24], SHAPE),
        "bits": lambda: rng.integers(0, 2**32, SHAPE, np.uint32).view(np.float32),
    }[kind]()
    with np.errstate(all="ignore"):
        x = x.astype(np.float32)
        return np.where(np.isfinite(x) & (np.abs(x) > HALF), np.float32(1), x)


def check_gradients_of_fitted(spec, dtype, seed, schedule, everywhere):
    rng = np.random.default_rng(seed)
    for kind in ("normal", "grid", "tiny", "huge", "half the largest", "bits"):
        x = values_of(rng, kind, spec)
        x = np.where(rng.random(SHAPE) < 0.1, rng.choice([np.nan, np.inf, -np.inf, -0.0], SHAPE), x)
        if dtype != "float32":  # half the largest float is not one of bfloat16: stay below
            x = np.where(np.abs(x) == HALF, x * np.float32(0.75), x)
        with np.errstate(all="ignore"):
            x, g = x.astype(jnp.dtype(dtype)), rng.integers(1, 9, SHAPE).astype(jnp.dtype(dtype))
        bits = np.int32(rng.integers(2, spec.bits + 1)) if schedule else None
        key = jax.random.key(seed) if spec.rounding == "stochastic" else None
        fitted, passed = both_gradients(x, g, bits, key, spec)
        same_tree(fitted, passed)
        if everywhere:
            assert_same_bits(fitted[1], np.where(np.isfinite(x), g, g.dtype.type(0)), kind)


dtypes = st.sampled_from(["float32", "float16", "bfloat16"])


SYMMETRIC_SPECS = [  # the spec, the dtype, and whether bits are scheduled: each option met once
    (QuantSpec(), "float32", True),
    (QuantSpec(bits=3, rounding="half_up", granularity=PerChannel(-1)), "bfloat16", False),
    (QuantSpec(bits=16, rounding="half_away", granularity=PerBlock(-1, 4)), "float16", False),
    (QuantSpec(bits=4, narrow_range=False, granularity=PerBlock(0, 2)), "float32", False),
]


@pytest.mark.parametrize(("spec", "dtype", "schedule"), SYMMETRIC_SPECS)
def test_without_qparams_the_gradient_is_g_wherever_the_weight_is_finite(spec, dtype, schedule):
    check_gradients_of_fitted(spec, dtype, 2, schedule, everywhere=True)


OTHER_SPECS = {"symmetric": False, "bits": 3}, {"signed": False}, {"rounding": "stochastic"}


@cases("kw", OTHER_SPECS, [OTHER_SPECS[0]])
def test_without_qparams_the_gradient_is_that_of_the_fitted_ones(kw):
    check_gradients_of_fitted(QuantSpec(**kw), "float32", 1, False, everywhere=False)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_weight_beyond_the_largest_range_is_clipped_without_qparams_too(bits):
    x, g = np.tile(F([3.3e38, -3.3e38, 1, -HALF]), (4, 1)), np.ones((4, 4), F)
    fitted, passed = both_gradients(x, g, bits, None, S)
    same_tree(fitted, passed)
    assert_same_bits(fitted[1], np.tile(F([0, 0, 1, 1]), (4, 1)))


@pytest.mark.slow
@settings(max_examples=150)
@given(st.one_of(symmetric_specs, other_specs), dtypes, st.integers(0, 2**31), st.booleans())
def test_without_qparams_the_gradient_is_that_of_the_fitted_ones_for_many_specs(spec, dtype, seed, schedule):
    everywhere = spec.symmetric and spec.signed and spec.rounding != "stochastic"
    check_gradients_of_fitted(spec, dtype, seed, schedule, everywhere)


@cases("given_qparams", [False, True], [True])
def test_a_schedule_of_bits_compiles_once_and_gives_the_grids_of_those_bits(given_qparams):
    params, rules, _, _ = case("channel")
    traces = []

    @jax.jit
    def step(params, qparams, bits):
        traces.append(bits)
        return jax.value_and_grad(lambda p: jq.fake_quant_params(p, rules, qparams, bits=bits)["a"]["w"].sum())(params)

    jitted = jax.jit(lambda p, v, b: jq.fake_quant_params(p, rules, v, bits=b))
    for bits in (8, 4, 2):
        narrower = [("**/bias", None), ("**", weight_spec(bits, channel_axis=-1))]
        qparams = jq.init_qparams(params, rules, "minmax", bits=bits) if given_qparams else None
        value, gradient = step(params, qparams, np.int32(bits))
        want = jq.fake_quant_params(params, narrower, qparams)
        same_tree(jq.fake_quant_params(params, rules, qparams, bits=bits), want)
        np.testing.assert_allclose(value, np.sum(want["a"]["w"]), rtol=1e-5)
        assert_same_bits(gradient["a"]["w"], np.ones((4, 6), F))
        same_tree(jitted(params, qparams, bits), want)
    assert len(traces) == 1


def test_equal_rules_share_one_trace():
    params, traces = case("channel")[0], []

    @functools.partial(jax.jit, static_argnames="rules")
    def f(params, rules):
        traces.append(rules)
        return jq.fake_quant_params(params, rules)

    for _ in range(20):
        f(params, (Rule("**/bias"), ("**", weight_spec(4, channel_axis=-1)), Rule("q", S, optional=True)))
    assert len(traces) == 1
    f(params, (Rule("**/bias"), ("**", weight_spec(3, channel_axis=-1)), Rule("q", S, optional=True)))
    assert len(traces) == 2


def test_stochastic_rounding_has_noise_of_its_own_for_each_leaf():
    stochastic = weight_spec(4, channel_axis=-1, rounding="stochastic")
    params = {"a": W, "b": W, "c": W}
    rules, key = [("b", weight_spec(4, channel_axis=-1)), ("*", stochastic)], jax.random.key(3)
    fake = jq.fake_quant_params(params, rules, key=key)
    assert differing(fake["a"], fake["c"]) > 0
    assert_same_bits(fake["b"], jq.fake_quant(W, rules[0][1]))
    qparams = jq.init_qparams(params, rules, "minmax")
    assert np.abs(fake["a"] - np.asarray(W)).max() / np.max(qparams["a"].scale) < 1 + 1e-5
    same_tree(jq.fake_quant_params(params, rules, key=key), fake)

    @jax.jit
    def others(params, qparams, key):
        integers = jq.quantize_params(params, rules, key=key)
        fake = [jq.fake_quant_params(params, rules, v, key=key) for v in (None, qparams)]
        return jq.dequantize_params(integers), *fake

    for tree in others(params, qparams, key):
        same_tree(tree, fake)
    other = jq.fake_quant_params(params, rules, key=jax.random.PRNGKey(4))  # of the old kind
    assert all(differing(other[name], fake[name]) > 0 for name in ("a", "c"))
