# SPDX-License-Identifier: Apache-2.0
"""`solve.fold_norms`: the same function without its norms, to rounding, and what it refuses."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import Random, conv, dense, images

from jaxquant import Rule, activation_spec, quantize_fn, solve, weight_spec

RULES = [Rule("**", weight_spec(8), activation_spec(8), optional=True)]


def norm(p, x):
    return (x - p["mean"]) * (jax.lax.rsqrt(p["var"] + np.float32(1e-3)) * p["scale"]) + p["bias"]


def network(params, x):
    x = jax.nn.relu(norm(params["norm_a"], conv(params["a"], x, 2)))
    x = jax.nn.relu(norm(params["norm_b"], conv({"w": params["b"]["w"]}, x)) + x)
    return dense(params["fc"], x.mean((1, 2)))


def made(seed=0):
    of = Random(seed)
    statistics = lambda n: {
        "mean": of.normal(1, n), "var": np.abs(of.normal(1, n)) + np.float32(0.1), "scale": of.normal(1, n),
        "bias": of.normal(1, n),
    }  # fmt: skip
    return {
        "a": of.conv(3, 3, 8), "norm_a": statistics(8), "b": of.conv(3, 8, 8), "norm_b": statistics(8),
        "fc": of.dense(8, 10),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _as_users_run_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def is_close(a, b):
    return np.abs(np.asarray(a) - np.asarray(b)).max() < 1e-5 * np.abs(np.asarray(b)).max()


def test_the_function_is_the_same_without_its_norms():
    params, x, seen = made(), images(2), []
    folded, f = solve.fold_norms(params, network, x, progress=seen.append)
    assert seen == ["a/w", "b/w"]
    assert is_close(jax.jit(f)(folded, x), jax.jit(network)(params, x))
    assert folded["norm_a"]["mean"] is params["norm_a"]["mean"]
    assert folded["fc"]["w"] is params["fc"]["w"]
    names = {eqn.primitive.name for eqn in jax.make_jaxpr(f)(folded, x).jaxpr.eqns}
    assert names.isdisjoint({"rsqrt", "sub", "mul"})
    kernels = [site.kernel for site in quantize_fn(f, RULES, runtime="litert").plan(folded, x) if site.kernel]
    layer = "conv_general_dilated + bias"
    argument = "quantized from float: an argument"
    assert kernels == [argument, f"{layer} + relu", layer, "add + relu", "mean", "dot_general + bias"]


def turned(params, x):
    p = params["norm_a"]
    return (p["mean"] - conv(params["a"], x)) / jnp.sqrt(p["var"] + np.float32(1e-3)) * p["scale"] + p["bias"]


def test_differences_and_quotients():
    params, x = made(), images(2)
    folded, f = solve.fold_norms(params, turned, x)
    assert is_close(jax.jit(f)(folded, x), jax.jit(turned)(params, x))
    with pytest.raises(TypeError, match="`f` must be a function, got int"):
        solve.fold_norms(params, 3, x)


def of_batch(params, x):
    y = conv({"w": params["a"]["w"]}, x)
    return norm(params["norm_a"] | {"mean": y.mean((0, 1, 2))}, y)


def read_between(params, x):
    y = conv({"w": params["a"]["w"]}, x)
    return norm(params["norm_a"], y), y


def before(params, x):
    return conv({"w": params["b"]["w"]}, norm(params["norm_a"], x))


def along_two_axes(params, x):
    y = jnp.einsum("bi,ijk->bjk", x[:, 0, 0], params["a"]["w"][0])
    return y * params["norm_a"]["scale"] + params["a"]["b"][:3, None]


@pytest.mark.parametrize("f", [of_batch, read_between, before, along_two_axes])
def test_what_cannot_be_folded_is_an_error(f):
    x = images(2) if f is not before else np.zeros((1, 4, 4, 8), np.float32)
    with pytest.raises(ValueError, match="no norm with given statistics follows a contraction of a parameter"):
        solve.fold_norms(made(), f, x)


def test_statistics_must_be_params():
    statistics = made()["norm_a"]
    f = lambda params, statistics, x: norm(params["norm_a"] | statistics, conv({"w": params["a"]["w"]}, x))
    with pytest.raises(ValueError, match="with the statistics among the params"):
        solve.fold_norms(made(), f, statistics, images(2))


@pytest.mark.slow
def test_statistics_may_be_closed_over():
    statistics = made()["norm_a"]
    f = lambda params, statistics, x: norm(params["norm_a"] | statistics, conv({"w": params["a"]["w"]}, x))
    closed = lambda params, x: f(params, {name: jnp.asarray(statistics[name]) for name in ("mean", "var")}, x)
    folded, g = solve.fold_norms(made(), closed, images(2))
    assert is_close(g(folded, images(2)), closed(made(), images(2)))


def with_statistics(variables, seed=3):
    """Variables whose statistics are not those of a network that has not seen data."""
    rng = np.random.default_rng(seed)
    other = lambda v: np.float32(rng.uniform(0.5, 2, np.shape(v))) if np.ndim(v) == 1 else v
    return jax.tree.map(other, variables)


def linen():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for n in (8, 16):
                x = nn.relu(nn.BatchNorm(use_running_average=True)(nn.Conv(n, (3, 3), use_bias=n == 8)(x)))
            return nn.Dense(4)(x.mean((1, 2)))

    variables = jax.jit(Net().init)(jax.random.key(0), images(2))
    return Net().apply, variables


def nnx():
    of = pytest.importorskip("flax.nnx")

    class Net(of.Module):
        def __init__(self, rngs):
            self.conv, self.norm = (
                of.Conv(3, 8, (3, 3), rngs=rngs),
                of.BatchNorm(8, use_running_average=True, rngs=rngs),
            )
            self.fc = of.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            return self.fc(of.relu(self.norm(self.conv(x))).mean((1, 2)))

    graph, state = of.split(Net(of.Rngs(0)))
    return lambda params, x: of.merge(graph, params)(x), state


def keras():
    if os.environ.get("KERAS_BACKEND") != "jax":
        pytest.skip("KERAS_BACKEND is not jax")
    of = pytest.importorskip("keras")
    model = of.Sequential([
        of.Input((16, 16, 3)), of.layers.Conv2D(8, 3, use_bias=False), of.layers.BatchNormalization(),
        of.layers.ReLU(6.0), of.layers.GlobalAveragePooling2D(), of.layers.Dense(4),
    ])  # fmt: skip
    as_arrays = lambda variables: [variable.value for variable in variables]
    params = {"trained": as_arrays(model.trainable_variables), "others": as_arrays(model.non_trainable_variables)}
    return lambda params, x: model.stateless_call(params["trained"], params["others"], x)[0], params


@pytest.mark.slow
@pytest.mark.parametrize(("of", "norms"), [(linen, 2), (nnx, 1), (keras, 1)])
def test_norms_of_frameworks(of, norms):
    f, variables = of()
    variables, x, seen = with_statistics(variables), images(2), []
    folded, g = solve.fold_norms(variables, f, x, progress=seen.append)
    assert len(seen) == norms
    assert is_close(g(folded, x), f(variables, x))
    sites = quantize_fn(g, RULES, runtime="onnxruntime").plan(folded, x)
    assert sites.in_float == []
