# SPDX-License-Identifier: Apache-2.0
"""Ordinary mistakes on the way to a served model: each is an error that says the cause and what to do."""

import dataclasses
import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from hand_written import Grid, levels
from inputs import ones
from jax import lax

import jaxquant
from jaxquant import (
    PerChannel,
    PerToken,
    QArray,
    QParams,
    QuantSpec,
    Range,
    Rule,
    activation_spec,
    dequantize,
    dot_general,
    fake_quant,
    fake_quant_params,
    from_log2,
    init_qparams,
    load,
    merge,
    quantize,
    quantize_fn,
    quantize_params,
    report,
    save,
    to_log2,
    weight_spec,
)
from jaxquant.typing import Log2QParams

F = np.float32
W8, A8 = weight_spec(8), activation_spec(8)


def normal(seed, *shape):
    return F(np.random.default_rng(seed).normal(size=shape) / 3)


def model(params, x):
    return jax.nn.relu(x @ params["w1"]) @ params["w2"]


PARAMS, X = {"w1": normal(0, 8, 16), "w2": normal(1, 16, 3)}, normal(2, 5, 8)
RULES = [Rule("w*", W8, A8)]
NARROW = [Rule("w*", weight_spec(4), activation_spec(4))]
Q = quantize_fn(model, RULES)
RANGES = {
    f"{name}:input": Range(v.min(), v.max()) for name, v in {"w1": X, "w2": np.maximum(X @ PARAMS["w1"], F(0))}.items()
}


@functools.cache
def qparams():
    return Q.init_qparams(PARAMS, X, ranges=RANGES)


@functools.cache
def frozen(with_qparams=True):
    return Q.freeze(PARAMS, X, qparams=qparams() if with_qparams else None)


def inputs_alone(of):
    return {key: v for key, v in of.items() if key.endswith(":input")}


def same_values(*calls):
    """In one program, of constants: what is said of values that are known is said of these, too."""
    first, *others = jax.jit(lambda: [call() for call in calls])()
    for y in others:
        assert_same_bits(y, first)


def refused(texts, f, *args, kind=ValueError, **kwargs):
    """Raises, and the same under jit: nothing waits for values."""
    for call in (lambda: f(*args, **kwargs), lambda: jax.eval_shape(lambda a, k: f(*a, **k), args, kwargs)):
        with pytest.raises(kind) as error:
            call()
        said = "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])
        for text in texts:
            assert re.search(text, said, re.DOTALL), (text, said)


# What frozen parameters and qparams were made for


def test_parameters_frozen_without_qparams_have_no_other_scale():
    ways_out = [
        r"At 'w1'",
        "without qparams",
        r"q\.freeze\(params, \.\.\., qparams=qparams\)",
        r"qparams\['w1'\] = None",
    ]
    refused(ways_out, Q, frozen(False), X, qparams=qparams())
    again = Q.init_qparams(frozen(False), X, ranges=RANGES)
    same_values(
        lambda: Q(PARAMS, X, qparams=qparams()),  # of the same values
        lambda: Q(frozen(False), X, qparams=inputs_alone(qparams())),
        lambda: Q(frozen(False), X, qparams=qparams() | {"w1": None, "w2": None}),
        lambda: Q(frozen(False), X, qparams=again),
    )
    assert again["w1"] is None
    assert again["w1:input"].spec == A8


def test_parameters_frozen_with_ranges_of_inputs_want_them():
    refused(["'w1', 'w2' were frozen with", "qparams={}"], Q, frozen(), X)
    refused(["'w1', 'w2' were frozen with"], lambda p, x: Q.at_sites(lambda info, x: x)(p, x), frozen(), X)
    of_inputs, dynamic = inputs_alone(qparams()), {"w1:input": None, "w2:input": None}
    same_values(lambda: Q(PARAMS, X, qparams=qparams()), lambda: Q(frozen(), X, qparams=of_inputs))
    of_weights = Q.init_qparams(PARAMS, X, ranges={})
    same_values(
        lambda: Q(frozen(), X, qparams={}),
        lambda: Q(PARAMS, X, qparams=dynamic | {key: qparams()[key] for key in ("w1", "w2")}),
        lambda: Q(PARAMS, X, qparams=of_weights),
        lambda: Q(Q.freeze(PARAMS, X, qparams=of_weights), X),
    )
    same_values(lambda: Q(PARAMS, X, qparams={}), lambda: Q(PARAMS, X))
    jax.eval_shape(lambda: Q.observe(frozen(), X))  # of the function in float
    assert Q.plan(frozen(), X)["w1"].state == "frozen"


def test_a_range_of_what_takes_none():
    """It was taken, and had no effect."""
    for w in ("w1", "w2"):
        refused([f"At '{w}'", "are of inputs"], Q.init_qparams, PARAMS, X, ranges={**RANGES, w: Range(-1.0, 1.0)})
    per_token = quantize_fn(model, [Rule("*", weight_spec(8), QuantSpec(granularity=PerToken()))])
    refused(["At 'w2:input'.*always dynamic"], per_token.init_qparams, PARAMS, X, ranges={"w2:input": Range(-1.0, 1.0)})
    with_none = Q.init_qparams(PARAMS, X, ranges={**RANGES, "w1": None})
    jax.tree.map(assert_same_bits, with_none, Q.init_qparams(PARAMS, X, ranges=RANGES))


def test_qparams_of_another_spec():
    q4 = quantize_fn(model, NARROW)
    for params in (PARAMS, frozen()):
        refused(
            [r"At 'w1:input'", r"QuantSpec\(bits=4, symm", r"QuantSpec\(bits=8, symm"], q4, params, X, qparams=qparams()
        )
    tree, rules = {"w": PARAMS["w1"]}, lambda bits: [("w", weight_spec(bits, channel_axis=-1))]
    of_8 = init_qparams(tree, rules(8))
    for f in (fake_quant_params, quantize_params):
        refused([r"At 'w'", "bits=4", "bits=8"], lambda t, s, f=f: f(t, rules(4), s), tree, of_8)
    refused(["bits=4", "bits=8"], lambda x, s: fake_quant(x, weight_spec(4, -1), s), tree["w"], of_8["w"])
    with pytest.raises(ValueError, match=r"bits=4.*bits=8"):
        quantize(tree["w"], weight_spec(4, -1), of_8["w"])
    by_hand = {key: v and QParams(*v) for key, v in qparams().items()}
    jax.eval_shape(lambda: q4(PARAMS, X, qparams=by_hand))  # know no spec, and are taken as they are
    of_schedule = jax.eval_shape(lambda: init_qparams(tree, rules(8), bits=jnp.int32(4)))
    assert of_schedule["w"].spec is None
    stochastic = weight_spec(8, -1, rounding="stochastic")
    jax.eval_shape(lambda: fake_quant(tree["w"], stochastic, of_8["w"], key=jax.random.key(0)))


def test_scales_that_are_known_to_differ():
    def but_one(v):
        v = np.array(v)
        v.flat[0] += 1
        return v

    other = {key: v._replace(scale=but_one(v.scale)) for key, v in qparams().items()}
    for call in (Q, Q, jax.jit(lambda p, x, **kw: Q(frozen(), x, qparams=other))):  # twice: nothing is noted as right
        with pytest.raises(ValueError, match=r"At 'w1'.*frozen with other qparams"):
            call(frozen(), X, qparams=other)
    affine = quantize_fn(model, [Rule("w2", QuantSpec(symmetric=False, granularity=PerChannel(-1)), A8)])
    s = affine.init_qparams(PARAMS, X, ranges={"w2:input": RANGES["w2:input"]})
    of = affine.freeze(PARAMS, X, qparams=s)
    jax.eval_shape(lambda: affine(of, X, qparams=s))
    with pytest.raises(ValueError, match=r"At 'w2'.*frozen with other qparams"):
        affine(of, X, qparams=s | {"w2": s["w2"]._replace(zero_point=but_one(s["w2"].zero_point))})


def test_arrays_that_were_cast():
    cast = lambda tree: jax.tree.map(lambda v: np.asarray(v).astype(jnp.bfloat16), tree)
    of = r"must have values of dtype int8, as QuantSpec\(bits=8.*got bfloat16.*is_leaf"
    refused([f"At 'w1'.*{of}"], Q, cast(frozen()), X, qparams=qparams(), kind=TypeError)
    refused(
        ["At 'w1:input'", "must be float32", "got .*bfloat16"], Q, frozen(), X, qparams=cast(qparams()), kind=TypeError
    )
    refused(["values of dtype int8"], dequantize, cast(frozen())["w1"], kind=TypeError)
    q, half = (QArray(np.int8(X), scale, np.int8(0), QuantSpec(), F) for scale in (F(1), np.float16(1)))
    with pytest.raises(TypeError, match=r"scale of dtype float32.*got float16"):
        dot_general(q, half, (((1,), (1,)), ((), ())))


def test_rules_that_changed_after_freezing():
    of_values = frozen(False)
    less = quantize_fn(model, [Rule("w*", W8, activation_spec(4))])
    refused(["At 'w1'", "frozen by a rule whose inputs are", "bits=8", "bits=4"], less, of_values, X)
    refused(["'w1'", "inputs are QuantSpec", "in float by this one"], quantize_fn(model, [("w*", W8)]), of_values, X)
    refused(["'w1'", "no rule quantizes it now", "dequantize"], quantize_fn(model, []), of_values, X)
    alone = quantize_fn(model, [("w*", W8)])
    same_values(lambda: quantize_fn(model, [])(alone.freeze(PARAMS, X), X), lambda: alone(PARAMS, X))


# And all that keeps it


def kept(served):
    """Serves from what was kept, and still refuses."""
    q, of = served["params"], served["qparams"]
    assert_same_bits(Q(q, X, qparams=of), Q(PARAMS, X, qparams=qparams()))
    refused(["were frozen with"], Q, q, X)
    refused(["bits=4", "bits=8"], quantize_fn(model, NARROW), PARAMS, X, qparams=of)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_keep_it(tmp_path, suffix):
    tree = {"params": frozen(), "qparams": qparams()}
    save(tmp_path / f"a{suffix}", tree)
    got = load(tmp_path / f"a{suffix}")
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    kept(got)
    like = jax.eval_shape(lambda: tree)
    assert jax.tree.structure(load(tmp_path / f"a{suffix}", like)) == jax.tree.structure(tree)
    trained = to_log2(qparams())
    save(tmp_path / f"b{suffix}", trained)
    again = load(tmp_path / f"b{suffix}")
    assert jax.tree.structure(again) == jax.tree.structure(trained)
    assert all(type(v) is Log2QParams for v in again.values())


@pytest.mark.slow
def test_transforms_and_programs_keep_it():
    tree = {"params": frozen(), "qparams": qparams()}
    kept(jax.jit(lambda t: t)(tree))
    kept(jax.tree.map(lambda v: np.asarray(v)[0], jax.vmap(lambda _: tree)(np.arange(2))))
    grown = jax.tree.map(lambda v: np.stack([v, v]), tree)
    ys = jax.vmap(lambda t: Q(t["params"], X, qparams=t["qparams"]))(grown)
    assert_same_bits(np.asarray(ys)[1], Q(PARAMS, X, qparams=qparams()))
    program = jax.export.export(jax.jit(lambda t: t))(tree)
    again = jax.export.deserialize(program.serialize()).call(tree)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    donated = jax.jit(lambda t: jax.tree.map(lambda v: v, t), donate_argnums=0)
    kept(donated(jax.tree.map(lambda v: jax.device_put(np.array(v)), tree)))
    gradient = jax.eval_shape(jax.grad(lambda s: Q(PARAMS, X, qparams=s).sum()), qparams())
    assert jax.tree.structure(gradient) == jax.tree.structure(qparams())


def test_no_instruction_is_added_to_a_served_call():
    """What was frozen knows more than a QArray by hand; the program is the same, but for the sums that come with it."""
    of_each = functools.partial(jax.tree.map, is_leaf=lambda v: isinstance(v, QArray))
    by_hand = of_each(lambda v: QArray(v.values, v.scale, v.zero_point, v.spec, v.dtype, v.order), frozen())
    without_sums = of_each(dataclasses.replace, frozen())
    of_hand = {key: QParams(*v) for key, v in qparams().items()}
    program = jax.jit(lambda p, x, s: Q(p, x, qparams=s))
    assert program.lower(without_sums, X, qparams()).as_text() == program.lower(by_hand, X, of_hand).as_text()


# Errors that name the cause


def test_inputs_of_integers():
    integers, texts = X.astype(np.int32), ["At 'w1:input'", "got int32", r"x\.astype\(jnp\.float32\)"]
    with jax.numpy_dtype_promotion("standard"):
        for of in (None, qparams()):
            refused(texts, Q, PARAMS, integers, qparams=of)
    left = quantize_fn(model, [Rule("w1", W8), Rule("w2", W8, A8)])
    refused(["'w1:input', which this call leaves as it is: the rule has no spec"], left, PARAMS, X, qparams=qparams())


def test_arguments_in_the_wrong_place():
    swapped = "The params are argument 0, got an array of dtype float32 there.*as argument 1. If they are swapped"
    refused([swapped], Q, X, frozen(), qparams=qparams())
    refused([swapped], Q, X, PARAMS)
    by_name = r"Argument 2 holds QParams. Pass them by name: q\(params, \.\.\., qparams=qparams\)"
    refused([by_name], Q, PARAMS, X, qparams())
    refused([by_name], quantize_fn(lambda params, x, flag=None: model(params, x), RULES), PARAMS, X, qparams())
    whole = {"params": frozen(), "qparams": qparams()}
    refused([r"hold QParams, at .qparams/w1..*whole file.*served\[\"params\"\]"], Q, whole, X)
    refused([r"hold QParams, at 'qparams/w1'.*whole file"], Q, whole, X, qparams=qparams())


@pytest.mark.parametrize(
    "call",
    [
        lambda p: jnp.asarray(X) @ p["w1"],
        lambda p: p["w1"] @ jnp.asarray(X.T),
        lambda p: jnp.dot(X, p["w1"]),
        lambda p: p["w1"][jnp.asarray(np.array([0, 1]))],
        lambda p: p["w1"][...],
        lambda p: jnp.asarray(p["w1"]),
    ],
)
def test_the_function_itself_called_with_frozen_params(call):
    with pytest.raises(TypeError, match=r"Params that q\.freeze made are for q\(frozen, \.\.\.\)"):
        call(frozen())


def test_parameters_of_another_model():
    refused(["contracting dimensions"], Q, PARAMS | {"w2": normal(1, 15, 3)}, X, kind=TypeError)
    lacking = ["w2", "jaxquant: params lack 'w2', of which there are qparams"]
    refused(lacking, Q, {"w1": PARAMS["w1"]}, X, qparams=qparams(), kind=KeyError)
    refused(
        ["At 'w2'", r"must have shape \(1, 4\), got \(1, 3\)"],
        Q,
        PARAMS | {"w2": normal(1, 16, 4)},
        X,
        qparams=qparams(),
    )


def test_blocks_on_several_contracted_axes_have_a_spec_that_works():
    """As in flax's attention, whose last kernel is (heads, features of each, out), here of two layers."""
    params, x = {"out": normal(0, 2, 4, 16, 8)}, normal(1, 3, 5, 4, 16)
    f = lambda p, x: lax.scan(
        lambda c, w: (c + jnp.einsum("bthd,hdm->btm", x, w), None), jnp.zeros((3, 5, 8)), p["out"]
    )[0]
    with pytest.raises(
        ValueError, match=r"QuantSpec\(bits=4, granularity=PerBlock\(axis=\(1, 2\), size=\(2, 16\)\)\)"
    ) as e:
        quantize_fn(f, [Rule("out", weight_spec(4, block_size=32), A8)]).plan(params, x)
    said = re.search(r"on the parameter: (QuantSpec\(.*\)\))\.", str(e.value)).group(1)
    spec = eval(said, vars(jaxquant))
    q = quantize_fn(f, [Rule("out", spec, A8)])
    assert q.plan(params, x)["out"].entry_spec == spec
    same_values(lambda: q(q.freeze(params, x), x), lambda: q(params, x))


def test_words_of_errors():
    with pytest.raises(ValueError, match=r"group size. Pass weight_spec\(4, block_size=32\)"):
        weight_spec(4, 32)
    assert repr(QuantSpec()) == "QuantSpec(bits=8)"
    with pytest.raises(ValueError, match=r"The nearest of 2 names: 'w1', 'w2'.*`params_argnum=0` is wrong\."):
        quantize_fn(model, [("w11", W8)])(PARAMS, X)
    q = quantize_fn(lambda p, x: (x @ p["w1"], x), [("w1", W8)])
    with pytest.raises(TypeError, match=r"`loss` is called with all that the function returns, a tuple.*value\[0\]"):
        report(q, PARAMS, X, loss=lambda y: (y**2).mean(), bits=())
    assert report(q, PARAMS, X, loss=lambda y: (y[0] ** 2).mean(), bits=())["w1"].by_bits == {}


# Learned scales


def test_the_logarithm_of_a_scale_is_trained_and_given_back():
    trained = to_log2({"params": PARAMS, "qparams": qparams() | {"dynamic": None}})
    assert trained["params"]["w1"] is PARAMS["w1"]
    again = from_log2(trained)["qparams"]
    for key, v in qparams().items():
        np.testing.assert_allclose(again[key].scale, v.scale, rtol=1e-6)
        assert again[key].spec == v.spec
        assert_same_bits(again[key].zero_point, v.zero_point)
    assert again["dynamic"] is None
    loss = lambda s: (Q(PARAMS, X, qparams=s) ** 2).sum()
    to_both = jax.jit(lambda t: (jax.grad(lambda t: loss(from_log2(t)))(t), jax.grad(loss)(from_log2(t))))
    of_log2, scales = to_both(to_log2(qparams()))
    for key, g in of_log2.items():
        want = np.asarray(scales[key].scale) * np.asarray(qparams()[key].scale) * F(np.log(2))
        np.testing.assert_allclose(g.scale, want, rtol=1e-4, atol=1e-6)
    down = jax.tree.map(lambda v: np.asarray(v) - F(50), to_log2(qparams()))
    assert all((np.asarray(v.scale) > 0).all() for v in from_log2(down).values())
    refused([r"got Log2QParams", "from_log2"], Q, PARAMS, X, qparams=to_log2(qparams()), kind=TypeError)
    refused(["to_log2 takes a pytree with QParams, got Log2QParams"], to_log2, trained, kind=TypeError)
    refused(["from_log2 takes a pytree with Log2QParams, got none"], from_log2, PARAMS, kind=TypeError)
    with pytest.raises(ValueError, match="scales > 0, got -"):
        to_log2({"w": QParams(F(-1), F(0))})


@pytest.mark.parametrize("value", [0.0, -0.5, np.nan])
def test_a_scale_that_training_has_lost_is_not_frozen(value):
    of = qparams()
    for key in ("w1", "w2:input"):
        scale = np.array(of[key].scale)
        scale.flat[0] = value
        lost = of | {key: of[key]._replace(scale=scale)}
        with pytest.raises(ValueError, match=rf"At '{key}': 1 of .* scales are 0, negative or not finite.*to_log2"):
            Q.freeze(PARAMS, X, qparams=lost)
        jax.eval_shape(lambda lost: Q.freeze(PARAMS, X, qparams=lost), lost)


# Small things


def test_ranges_of_any_number_of_batches():
    batches = [{"a": Range(F(-i), F(2 * i))} for i in range(4)]
    got = merge(*batches)["a"]
    assert (got.x_min, got.x_max) == (-3, 6)
    assert merge(batches[1])["a"].x_max == 2
    for wrong in ((), (batches,)):
        with pytest.raises(TypeError, match=r"merge takes Ranges.*\(\*values\)"):
            merge(*wrong)


def test_the_plan_says_per_token():
    q = quantize_fn(model, [Rule("w*", W8, activation_spec(8, granularity=PerToken()))])
    plan = q.plan(PARAMS, X)
    assert plan["w1:input"].is_per_token
    assert not plan["w1"].is_per_token
    assert str(plan).count("8 bits affine per token") == 2


def test_a_file_holds_what_is_needed_once(tmp_path):
    tree = {"params": frozen(), "qparams": qparams()}
    save(tmp_path / "a.npz", tree)
    with np.load(tmp_path / "a.npz") as file:
        names = set(file.files) - {"__jaxquant__"}
    weights = {f"params/w{i}/{part}" for i in (1, 2) for part in ("values", "scale")}
    assert names == weights | {f"qparams/w{i}:input/{part}" for i in (1, 2) for part in ("scale", "zero_point")}
    kept(load(tmp_path / "a.npz"))


# A parameter that ops sum along several of its axes


@pytest.mark.parametrize(
    ("f", "shape", "spec"),
    [
        (lambda p, x, np=jnp: np.tanh(np.tanh(x @ p["w"].T) @ p["w"]) @ p["w"], (8, 8), QuantSpec()),
        (lambda p, x, np=jnp: x @ p["w"].reshape(8, 8), 64, QuantSpec(bits=4)),
    ],
    ids=["thrice", "flat"],
)
def test_one_scale_serves_ops_that_sum_along_other_axes(f, shape, spec):
    w = normal(0, 8, 8).reshape(shape)
    level, scale, _ = levels(w, Grid(spec.bits, whole=True), None)
    q = quantize_fn(f, [Rule("w", spec, A8)])
    both = jax.jit(lambda p: (q(p, X), q(q.freeze(p, X), X)))
    y, served = both({"w": w})
    assert_same_bits(served, y)
    np.testing.assert_allclose(y, f({"w": F(level * scale)}, X, np), atol=0.1)
    w.flat[0] = np.nan
    assert np.isnan(both({"w": w})[0]).all()


# What a newcomer met


def test_the_cast_that_an_error_names_works():
    cast = jax.jit(lambda tree: jax.tree.map(lambda v: v.astype(jnp.bfloat16), tree))(frozen())
    with pytest.raises(TypeError, match="Leave QArrays out of a cast") as error:
        Q(cast, X, qparams=inputs_alone(qparams()))
    recipe = re.search(r"jax\.tree\.map\(.*QArray\)\)", str(error.value))[0].replace("...", "jnp.bfloat16")
    params = frozen() | {"bias": np.ones(3, F)}
    cast = eval(recipe, {"jax": jax, "jnp": jnp, "QArray": QArray, "params": params})
    assert cast["bias"].dtype == jnp.bfloat16
    assert_same_bits(cast["w1"].scale, params["w1"].scale)


@pytest.mark.parametrize("name", ["queries", "dot_general_2"])
def test_a_rule_without_its_kind_is_told_it(name):
    f = lambda p, x: jaxquant.quant_point(x @ p["w1"], "queries") @ (x @ p["w1"]).T
    with pytest.raises(ValueError, match=rf"It matches '{name}'.*Rule\(\.\.\., kind='act_act'\)"):
        quantize_fn(f, [Rule(name, activation=A8)]).plan(PARAMS, X)


def test_a_model_in_place_of_its_apply_is_refused():
    class Model:
        """As a module of flax linen."""

        def init(self, key, x):
            return {"w": ones((8, 3))}

        def apply(self, params, x):
            return x @ params["w"]

        def __call__(self, x):
            raise AssertionError("called without its parameters")

    model = Model()
    with pytest.raises(TypeError, match=r"got the model Model\. Pass its apply: quantize_fn\(model\.apply, rules\)"):
        quantize_fn(model, [("w", W8)])
    assert quantize_fn(model.apply, [("w", W8)]).plan(model.init(None, X), X)["w"].spec


@pytest.mark.parametrize("bits", ["int4", jnp.int8, "8"])
def test_bits_are_a_number(bits):
    with pytest.raises(TypeError, match=r"`bits` must be a static int, got .*Pass a number, such as 8"):
        weight_spec(bits)


def test_blocks_along_several_axes_name_a_rule_of_their_own():
    f = lambda p, x: jnp.einsum("bhd,hdo->bo", x, p["out"])
    rules = [("**", weight_spec(4, block_size=32))]
    params, x = {"out": np.ones((2, 32, 8), F)}, np.ones((3, 2, 32), F)
    with pytest.raises(ValueError, match="a rule of its own before this one") as error:
        quantize_fn(f, rules).plan(params, x)
    spec = re.search(r"parameter: (QuantSpec\(.*\))\.$", str(error.value).splitlines()[0])[1]
    names = {"QuantSpec": QuantSpec, "PerBlock": jaxquant.PerBlock}
    plan = quantize_fn(f, [("out", eval(spec, names)), Rule("**", weight_spec(4, block_size=32), optional=True)])
    assert plan.plan(params, x)["out"].spec
