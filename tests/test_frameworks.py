# SPDX-License-Identifier: Apache-2.0
"""The params transform on real models of each framework, as they are: plan, training, integers, checkpoints."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exact import assert_same_bits, differing

from jaxquant import (
    QArray,
    QParams,
    QuantSpec,
    dequantize_params,
    fake_quant_params,
    init_qparams,
    load,
    match_rules,
    quantize_params,
    save,
    weight_spec,
)
from jaxquant._paths import with_paths

pytestmark = pytest.mark.slow  # each model is traced and compiled several times

RNG = np.random.default_rng(0)  # of NumPy: imported by each worker, also where its tests are not run
IMAGES = RNG.normal(size=(24, 6, 6, 1)).astype(np.float32)
LABELS = np.argmax(IMAGES.reshape(24, -1) @ RNG.normal(size=(36, 3)), -1).astype(np.int32)
LAST, FIRST = weight_spec(3, channel_axis=-1), weight_spec(3, channel_axis=0)
# optax.adam and haiku's BatchNorm raise a float to the power of an integer.
promoting = functools.partial(jax.numpy_dtype_promotion, "standard")


class Model(NamedTuple):
    """A model of a framework, with what its users write to train it."""

    params: Any
    rest: Any  # what the optimizer does not touch: batch statistics, states of random streams
    apply: Callable  # (params, rest, training) -> outputs for IMAGES, rest
    rules: list
    plan: dict[str, QuantSpec]
    value_and_grad: Callable = jax.value_and_grad
    trainable: Callable = lambda params: params
    updated: Callable = optax.apply_updates
    jit: Callable = jax.jit

    def loss(self, params, rest):
        outputs, rest = self.apply(params, rest, True)
        return optax.softmax_cross_entropy_with_integer_labels(outputs, LABELS).mean(), rest

    def quantized(self, params):
        return fake_quant_params(params, self.rules)


def linen(boxed):
    nn = pytest.importorskip("flax.linen", reason="of the extra `frameworks`")
    init = nn.initializers.lecun_normal()
    box = nn.with_partitioning if boxed else lambda init, names: init

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, training):
            x = nn.Conv(4, (3, 3), kernel_init=box(init, (None, None, None, "model")), name="stem")(x)
            x = jax.nn.relu(nn.BatchNorm(not training, momentum=0.5, name="norm")(x))
            x = x.reshape(x.shape[0], -1)
            for i in range(2):
                x = jax.nn.relu(nn.Dense(8, kernel_init=box(init, (None, "model")), name=f"layer_{i}")(x))
            return nn.Dense(3, name="head")(x)

    def apply(params, rest, training):
        variables = {"params": params, "batch_stats": rest}
        if not training:
            return net.apply(variables, IMAGES, training), rest
        outputs, changed = net.apply(variables, IMAGES, training, mutable=["batch_stats"])
        return outputs, changed["batch_stats"]

    net = Net()
    variables = net.init(jax.random.key(2), IMAGES, False)
    plan = {"stem/kernel": LAST, "layer_0/kernel": LAST, "layer_1/kernel": LAST}
    rules = [("head/**", None), ("**/kernel", LAST)]
    return Model(variables["params"], variables["batch_stats"], apply, rules, plan)


def nnx_net():
    nnx = pytest.importorskip("flax.nnx", reason="of the extra `frameworks`")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Conv(1, 4, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(144, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)])
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.head = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            x = jax.nn.relu(self.norm(self.stem(x)))
            x = x.reshape(x.shape[0], -1)
            for layer in self.layers:
                x = self.dropout(jax.nn.relu(layer(x)))
            return self.head(x)

    return nnx, Net(nnx.Rngs(2))


NNX_PLAN = {"layers/0/kernel": LAST, "layers/1/kernel": LAST}
NNX_RULES = [("layers/*/kernel", LAST)]


def nnx_split():
    nnx, net = nnx_net()
    graph, params, rest = nnx.split(net, nnx.Param, ...)

    def apply(params, rest, training):
        net = nnx.merge(graph, params, rest, copy=True)
        (net.train if training else net.eval)()
        return net(IMAGES), nnx.state(net, nnx.Not(nnx.Param))

    return Model(params, rest, apply, NNX_RULES, NNX_PLAN)


def equinox():
    eqx = pytest.importorskip("equinox", reason="of the extra `frameworks`")

    class Net(eqx.Module):
        stem: eqx.nn.Conv2d
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP  # holds its activation, a function, as a leaf
        scales: tuple
        size: int = eqx.field(static=True)

        def __call__(self, x):
            x = self.norm(jax.nn.relu(self.stem(x)).ravel())
            return self.scales[0] * self.mlp(x[: self.size])

    keys = jax.random.split(jax.random.key(2))
    stem = eqx.nn.Conv2d(1, 4, 3, padding=1, use_bias=False, key=keys[0])
    mlp = eqx.nn.MLP(144, 3, 8, 2, key=keys[1])
    net = Net(stem, eqx.nn.LayerNorm(144), mlp, (jnp.ones(()), None), 144)
    return Model(
        net,
        None,
        lambda net, rest, training: (jax.vmap(net)(IMAGES.transpose(0, 3, 1, 2)), rest),
        [("norm/**", None), (re.compile(r"mlp/layers/2/.*"), None), ("**/weight", FIRST)],
        {"stem/weight": FIRST, "mlp/layers/0/weight": FIRST, "mlp/layers/1/weight": FIRST},
        eqx.filter_value_and_grad,
        lambda net: eqx.filter(net, eqx.is_inexact_array),
        eqx.apply_updates,
        eqx.filter_jit,
    )


def haiku():
    hk = pytest.importorskip("haiku", reason="of the extra `frameworks`")

    def net(training):
        x = hk.Conv2D(4, 3, name="stem")(IMAGES)
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.5, name="norm")(x, training))
        return hk.nets.MLP([8, 8, 3])(hk.Flatten()(x))

    net = hk.without_apply_rng(hk.transform_with_state(net))
    params, rest = net.init(jax.random.key(2), True)
    plan = {"stem/w": LAST, "mlp/~/linear_0/w": LAST, "mlp/~/linear_1/w": LAST}
    apply = promoting()(net.apply)
    return Model(params, rest, apply, [("mlp/~/linear_2/*", None), ("**/w", LAST)], plan)


class Layer(NamedTuple):
    kernel: Any
    bias: Any

    def __call__(self, x):
        return x @ self.kernel + self.bias


@functools.partial(jax.tree_util.register_dataclass, data_fields=["stem", "layers"], meta_fields=["activation"])
@dataclasses.dataclass
class Net:
    stem: Any
    layers: Any
    activation: Callable = jax.nn.relu


def plain(kind):
    sizes = (36, 8, 8, 3)
    keys = jax.random.split(jax.random.key(2), 3)
    layers = [
        Layer(jax.random.normal(key, (m, n)) * (2 / m) ** 0.5, jnp.zeros((1, n)))
        for key, m, n in zip(keys, sizes, sizes[1:], strict=False)
    ]
    stem, *rest = layers
    params = {
        "dict": lambda: {"stem": stem._asdict(), "layers": {str(i): layer._asdict() for i, layer in enumerate(rest)}},
        "NamedTuple": lambda: tuple(layers),
        "dataclass": lambda: Net(stem, rest),
    }[kind]()

    def apply(params, rest, training):
        x = IMAGES.reshape(24, -1)
        if kind == "dict":
            layers = [Layer(**layer) for layer in (params["stem"], *params["layers"].values())]
        else:
            layers = params if kind == "NamedTuple" else (params.stem, *params.layers)
        for layer in layers[:-1]:
            x = jax.nn.relu(layer(x))
        return layers[-1](x), rest

    first, second, last = ("0", "1", "2") if kind == "NamedTuple" else ("stem", "layers/0", "layers/1")
    plan = {f"{first}/kernel": LAST, f"{second}/kernel": LAST}
    return Model(params, None, apply, [(f"{last}/**", None), ("**/kernel", LAST)], plan)


MODELS = {
    "linen": functools.partial(linen, boxed=False),
    "linen, partitioned": functools.partial(linen, boxed=True),
    "nnx, split": nnx_split,
    "equinox": equinox,
    "haiku": haiku,
    **{f"plain {kind}": functools.partial(plain, kind) for kind in ("dict", "NamedTuple", "dataclass")},
}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request):
    return MODELS[request.param]()


def by_path(tree, is_leaf=None):
    """What is at each path, by JAX's own naming, without the attribute that unpacks a parameter."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): v for path, v in pairs}


def train(model, change, steps=20):
    """Losses, and what was trained. QAT is `change`, called once inside the loss; nothing else differs."""
    optimizer = optax.adam(0.01)

    @model.jit
    def step(params, rest, state):
        loss = lambda params: model.loss(change(params), rest)
        (value, rest), gradients = model.value_and_grad(loss, has_aux=True)(params)
        with promoting():
            updates, state = optimizer.update(gradients, state)
        return value, model.updated(params, updates), rest, state

    params, rest, state = model.params, model.rest, optimizer.init(model.trainable(model.params))
    losses = []
    for _ in range(steps):
        value, params, rest, state = step(params, rest, state)
        losses.append(value.item())
    return losses, params, rest


@pytest.fixture(scope="module")
def trained(model):
    return train(model, model.quantized)


def test_the_plan_has_the_chosen_parameters_and_nothing_else(model):
    plan = match_rules(model.params, model.rules)
    assert by_path(plan) == model.plan
    # Prefix of the plan: a leaf of the model stands where the plan has a spec or None.
    kept = []
    jax.tree.map(
        lambda leaf, spec, new: kept.append(leaf is new) if spec is None else None,
        model.params,
        plan,
        model.quantized(model.params),
    )
    assert len(kept) == len(jax.tree.leaves(model.params)) - len(model.plan) > 0
    assert all(kept)


def test_a_step_with_qat_trains(model, trained):
    floats, _, _ = train(model, lambda params: params, 1)
    losses, params, _ = trained
    assert losses[-1] < 0.6 * losses[0]
    assert losses[0] != floats[0]
    old, new, levels = (by_path(tree) for tree in (model.params, params, model.quantized(params)))
    for path, spec in model.plan.items():
        assert differing(new[path], old[path])
        channels = np.moveaxis(np.asarray(levels[path]), spec.granularity.axis, 0)
        assert all(len(np.unique(channel)) <= 7 for channel in channels)
        assert len(np.unique(channels)) > 7  # each with a scale of its own


def test_gradients_are_those_of_the_model_at_its_quantized_parameters(model):
    at = lambda change, params: model.value_and_grad(lambda p: model.loss(change(p), model.rest), has_aux=True)(params)
    (value, _), gradients = at(model.quantized, model.params)
    (expected, _), straight = at(lambda params: params, model.quantized(model.params))
    assert_same_bits(value, expected)
    gradients, straight = by_path(gradients), by_path(straight)
    assert set(model.plan) < set(gradients)
    for path, gradient in gradients.items():
        assert_same_bits(gradient, straight[path], path)
    for path in model.plan:
        assert np.asarray(gradients[path]).any(), path


@pytest.mark.parametrize("learned", [False, True])
def test_integers_are_the_parameters_of_qat(model, trained, learned):
    _, params, _ = trained
    qparams = init_qparams(params, model.rules, "lsq") if learned else None
    of_qat = fake_quant_params(params, model.rules, qparams)
    integers = quantize_params(params, model.rules, qparams)
    found = by_path(integers, lambda node: isinstance(node, QArray))
    assert {path: leaf.spec for path, leaf in found.items() if isinstance(leaf, QArray)} == model.plan
    real = dequantize_params(integers)
    assert jax.tree.structure(real) == jax.tree.structure(params)
    real, of_qat = by_path(model.trainable(real)), by_path(model.trainable(of_qat))
    assert set(real) == set(of_qat) > set(model.plan)
    for path, leaf in of_qat.items():
        assert_same_bits(real[path], leaf, path)


def test_the_model_gives_the_bits_of_qat_from_integers(model, trained):
    _, params, rest = trained
    predict = lambda params: model.apply(params, rest, False)[0]
    of_qat = predict(model.quantized(params))
    integers = quantize_params(params, model.rules)
    assert_same_bits(predict(dequantize_params(integers)), of_qat)
    compiled = model.jit(lambda integers: predict(dequantize_params(integers)))(integers)
    np.testing.assert_allclose(compiled, of_qat, rtol=1e-4, atol=1e-5)
    assert differing(of_qat, predict(params))


def test_a_typo_in_a_rule_says_the_nearest_paths(model):
    for path, spec in model.plan.items():
        typo = path[:-2] + path[-1] + path[-2]
        with pytest.raises(ValueError, match="matches no parameter") as error:
            fake_quant_params(model.params, [(typo, spec)])
        assert repr(path) in str(error.value)


def test_the_variables_of_linen_are_one_tree():
    model = linen(False)
    variables = {"params": model.params, "batch_stats": model.rest}
    quantized = fake_quant_params(variables, [(f"params/{pattern}", spec) for pattern, spec in model.rules])
    assert quantized["batch_stats"]["norm"]["mean"] is model.rest["norm"]["mean"]
    for path, leaf in by_path(model.quantized(model.params)).items():
        assert_same_bits(by_path(quantized["params"])[path], leaf, path)


def test_partitioned_boxes_keep_their_names():
    model = linen(True)
    partitioned = model.params["stem"]["kernel"]
    for tree in (model.quantized(model.params), quantize_params(model.params, model.rules)):
        assert type(tree["stem"]["kernel"]) is type(partitioned)
        assert tree["stem"]["kernel"].names == partitioned.names == (None, None, None, "model")


def test_a_file_of_an_nnx_state_has_the_paths_of_the_rules(tmp_path):
    nnx, net = nnx_net()
    params = nnx.state(net, nnx.Param)
    save(tmp_path / "a.npz", params)
    loaded = load(tmp_path / "a.npz")
    assert [path for path, _ in with_paths(loaded)] == [path for path, _ in with_paths(params)]
    jax.tree.map(assert_same_bits, loaded, nnx.to_pure_dict(params))
    jax.tree.map(assert_same_bits, load(tmp_path / "a.npz", like=params), params)


def test_a_module_of_nnx_is_a_tree_too():
    nnx, net = nnx_net()
    assert by_path(match_rules(net, NNX_RULES)) == NNX_PLAN
    optimizer = nnx.Optimizer(net, optax.adam(0.01), wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer):
        def loss(net):
            outputs = fake_quant_params(net, NNX_RULES)(IMAGES)
            return optax.softmax_cross_entropy_with_integer_labels(outputs, LABELS).mean()

        value, gradients = nnx.value_and_grad(loss)(net)
        with promoting():
            optimizer.update(net, gradients)
        return value, gradients

    net.eval()  # statistics of a copy would be lost: those of training are threaded by nnx.split
    before = by_path(nnx.state(net))["layers/0/kernel"]
    values, gradients = zip(*[step(net, optimizer) for _ in range(20)], strict=True)
    assert values[-1] < 0.6 * values[0]
    assert all(np.asarray(by_path(gradients[0])[path]).any() for path in NNX_PLAN)
    assert differing(by_path(nnx.state(net))["layers/0/kernel"], before)
    _, params, rest = nnx.split(net, nnx.Param, ...)
    outputs, _ = nnx_split().apply(fake_quant_params(params, NNX_RULES), rest, False)
    assert_same_bits(dequantize_params(quantize_params(net, NNX_RULES))(IMAGES), outputs)


@pytest.mark.parametrize("kind", [QArray, QParams])
@pytest.mark.parametrize("bits", [2, 8, 12])
def test_orbax_keeps_integers_and_qparams(tmp_path, kind, bits):
    orbax = pytest.importorskip("orbax.checkpoint", reason="of the extra `frameworks`")
    params = linen(False).params
    affine = QuantSpec(bits=bits, symmetric=False, granularity=LAST.granularity)
    rules = [("head/**", None), ("stem/kernel", affine), ("**/kernel", weight_spec(bits, -1, block_size=4))]
    make = {
        QArray: lambda params: quantize_params(params, rules),
        QParams: lambda params: init_qparams(params, rules, "percentile"),
    }[kind]
    tree = make(params)
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "tree", jax.eval_shape(make, params))
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    is_kind = lambda node: isinstance(node, kind)
    found = {path: leaf for path, leaf in by_path(restored, is_kind).items() if is_kind(leaf)}
    plan = by_path(match_rules(params, rules))
    assert set(found) == set(plan) == {"stem/kernel", "layer_0/kernel", "layer_1/kernel"}
    if kind is QArray:
        assert {path: leaf.spec for path, leaf in found.items()} == plan
        restored = dequantize_params(restored)
        tree = fake_quant_params(params, rules)
    restored, tree = by_path(restored), by_path(tree)
    assert set(restored) == set(tree)
    for path, leaf in tree.items():
        assert_same_bits(restored[path], leaf, path)
