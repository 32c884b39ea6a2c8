# SPDX-License-Identifier: Apache-2.0
"""The sums of a frozen weight's columns come with it, or are dropped: never those of other values."""

import dataclasses
import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_same_bits
from inputs import zeros
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import by_default, cases

from jaxquant import (
    PerBlock,
    PerToken,
    QArray,
    QuantSpec,
    Rule,
    activation_spec,
    conv_general_dilated,
    dot_general,
    float8_spec,
    load,
    quantize,
    quantize_fn,
    save,
    weight_spec,
)

W8, A8 = weight_spec(8), activation_spec(8)
is_qarray = lambda v: isinstance(v, QArray)


def normal(*shape):
    return jax.device_put(np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32))


def dropped(tree):
    """Served as integers that came from elsewhere: the same, without sums."""
    return jax.tree.map(lambda v: dataclasses.replace(v) if is_qarray(v) else v, tree, is_leaf=is_qarray)


def with_sums_beside(tree, offset):
    """Served with other sums than its own, which whatever reads them cannot hide."""
    is_sums = lambda path: getattr(path[-1], "name", "") == "sums"
    return jax.tree_util.tree_map_with_path(lambda path, v: v + offset if is_sums(path) else v, tree)


def has_sums(tree):
    return [v.summed is not None for v in jax.tree.leaves(tree, is_leaf=is_qarray) if is_qarray(v)]


def layer(x, w):
    return jnp.tanh(x @ w), None


def dot_of_named_axes(p, x):
    heads = jnp.einsum("btd,dhk->bthk", x.reshape(2, 3, 8), p["in"])
    return jnp.einsum("bthk,hkd->btd", heads, p["out"])


conv = functools.partial(lax.conv_general_dilated, window_strides=(1,), padding="SAME")
X, SQUARE, STACK = normal(6, 8), {"w": normal(8, 8)}, {"w": normal(3, 8, 8)}
KEPT = {
    "an MLP": (lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"], {"a": normal(8, 16), "b": normal(16, 3)}),
    "a vector": (lambda p, x: x[0] @ p["w"], SQUARE),
    "one row": (lambda p, x: x[:1] @ p["w"], SQUARE),
    "layers in a scan": (lambda p, x: lax.scan(layer, x, p["w"])[0], STACK),
    "several axes": (dot_of_named_axes, {"in": normal(8, 2, 4), "out": normal(2, 4, 5)}),
    "a convolution": (lambda p, x: conv(x[None], p["w"]), {"w": normal(5, 6, 3)}),
    "a convolution in groups": (
        lambda p, x: conv(x[None], p["w"], feature_group_count=2), {"w": normal(4, 3, 3)},
    ),
    "a batch": (lambda p, x: jnp.einsum("bk,bkn->bn", x[:3], p["w"]), STACK),
    "rows in groups": (lambda p, x: lax.ragged_dot(x, p["w"], jnp.array([3, 1, 2])), STACK),
    "transposed": (lambda p, x: x @ p["w"].T, SQUARE),
    "on the left": (lambda p, x: p["w"] @ x.T, SQUARE),
    "on the left of a vector": (lambda p, x: p["w"] @ x[0], SQUARE),
    "reshaped": (lambda p, x: x @ p["w"].reshape(8, 6), {"w": normal(2, 4, 6)}),
    "an element of a stack": (lambda p, x: x @ p["w"][1], STACK),
    "one that data choose": (lambda p, x: x @ lax.dynamic_index_in_dim(p["w"], jnp.argmax(x[0, :3]), 0, False), STACK),
    "some columns": (lambda p, x: x @ p["w"][:, 2:5], SQUARE),
    "backwards": (lambda p, x: x @ jnp.flip(p["w"], (0, 1)), SQUARE),
    "unstacked": (lambda p, x: sum(x @ w for w in p["w"]), STACK),
    "in bfloat16": (lambda p, x: (x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)), SQUARE),
    "checkpointed": (lambda p, x: jax.checkpoint(lambda x: x @ p["w"])(x), SQUARE),
    "in a loop": (lambda p, x: lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ p["w"]), x), SQUARE),
    "in a branch": (lambda p, x: lax.cond(x[0, 0] > 9, lambda x: x, lambda x: x @ p["w"], x), SQUARE),
}  # fmt: skip
DROPPED = {
    "cut and repeated": (lambda p, x: x @ jnp.tile(p["w"][:4], (2, 1)), SQUARE),
    "joined of its own columns": (lambda p, x: x @ jnp.concatenate([p["w"][:, 4:], p["w"][:, :4]], 1), SQUARE),
    "one of two branches": (lambda p, x: x @ lax.cond(x[0, 0] > 0, lambda: p["w"][0], lambda: p["w"][2]), STACK),
    "a branch cut and repeated": (
        lambda p, x: x @ lax.cond(x[0, 0] > 0, lambda w: jnp.tile(w[:4], (2, 1)), lambda w: w, p["w"]), SQUARE,
    ),
}  # fmt: skip
SOME = (
    "an MLP", "layers in a scan", "a convolution in groups", "cut and repeated",
)  # fmt: skip
NONE = {
    "cut": (lambda p, x: x[:, :4] @ p["w"][:4] + x[:, 4:] @ p["w"][4:], SQUARE),
    "two parameters side by side": (lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1), {"a": X.T, "b": X.T}),
    "repeated": (lambda p, x: jnp.tile(x, 2) @ jnp.tile(p["w"], (2, 1)), SQUARE),
}


def frozen(f, params, x=X, weight=W8, activation=A8):
    q = quantize_fn(f, [Rule("**", weight, activation)])
    return q, q.freeze(params, x)


def reads_sums(call, tree):
    """The value of a served call, which no sums change; and whether it reads those that came with the weights."""
    want, got = call(dropped(tree)), call(tree)
    assert_same_bits(got, want)
    other = call(with_sums_beside(tree, 1))
    return got, not np.array_equal(np.float32(other), np.float32(got))


@by_default("an MLP", "cut and repeated")
@cases("name", [*KEPT, *DROPPED], SOME)
def test_sums_come_with_a_weight_and_are_dropped_for_other_values(name):
    f, params = (KEPT | DROPPED)[name]
    q, served = frozen(f, params)
    assert all(has_sums(served))
    y, reads = reads_sums(lambda p: q(p, X), served)
    assert reads == (name in KEPT)
    assert_same_bits(y, q(params, X))


@cases("name", NONE)
def test_sums_that_no_op_would_read_are_not_made(name):
    f, params = NONE[name]
    q, served = frozen(f, params)
    assert not any(has_sums(served))
    assert_same_bits(q(served, X), q(params, X))


NEEDED = [
    (W8, QuantSpec(signed=False), True),  # symmetric, and 128 in codes
    (W8, dataclasses.replace(A8, granularity=PerToken()), True),
    (W8, activation_spec(8, symmetric=True), False),
    (QuantSpec(granularity=PerBlock(None, 4)), A8, False),
    (QuantSpec(signed=False, symmetric=False), A8, True),
    (weight_spec(4), A8, True),
    (W8, activation_spec(16), False),
    (weight_spec(12), A8, False),
    (W8, float8_spec(), False),
    (float8_spec(), A8, False),
    (W8, None, False),
]


@cases(("weight", "activation", "made"), NEEDED, NEEDED[1:2])
def test_who_needs_sums(weight, activation, made):
    f, params = KEPT["an MLP"]
    q, served = frozen(f, params, weight=weight, activation=activation)
    assert has_sums(served) == [made] * 2
    y, reads = reads_sums(lambda p: q(p, X), served)
    assert reads == made
    assert_same_bits(y, q(params, X))


def test_ops_that_sum_along_other_axes_have_no_sums():
    q, served = frozen(lambda p, x: x @ p["w"] @ p["w"].T, SQUARE, weight=QuantSpec())
    assert has_sums(served) == [False]
    assert_same_bits(q(served, X), q(SQUARE, X))


def test_no_row_of_ones_is_concatenated():
    q, served = frozen(*KEPT["an MLP"])
    text = lambda p: jax.jit(lambda p, x: q(p, x)).lower(p, X).as_text()
    assert "stablehlo.concatenate" in text(dropped(served))
    assert "stablehlo.concatenate" not in text(served)


def test_what_they_cost():
    _, served = frozen(*KEPT["an MLP"])
    a = served["a"]
    assert (a.sums.shape, a.sums.dtype, a.summed) == ((1, 16), jnp.int32, 8)
    assert a.nbytes - dropped(a).nbytes == 4 * 16
    assert (a.sums == a.values.astype(jnp.int32).sum(0, keepdims=True)).all()


# A QArray in hands

AFFINE = quantize(X, QuantSpec(symmetric=False))
TURNED = (((1,), (1,)), ((), ()))
MATMUL = (((1,), (0,)), ((), ()))
MOVED = {
    "itself": (STACK, lambda v: v[1], MATMUL, True),
    "transposed": (SQUARE, lambda v: v.T, TURNED, True),
    "reshaped": (STACK, lambda v: v.reshape(1, 3, 8, 8)[0][2], MATMUL, True),
    "one column": (STACK, lambda v: v[0].T[5], MATMUL, True),
    "along the other axis": (SQUARE, lambda v: v, TURNED, False),
    "other values": (SQUARE, lambda v: dataclasses.replace(v, values=-v.values), MATMUL, False),
    "as it was laid": (SQUARE, lambda v: dataclasses.replace(v, order=None), MATMUL, False),
    "of another size": (SQUARE, lambda v: dataclasses.replace(v, values=v.values[:, :4]), MATMUL, False),
    "reshaped across": (SQUARE, lambda v: v.reshape(16, 4).reshape(8, 8), MATMUL, False),
}


@by_default("along the other axis")
@pytest.mark.parametrize("name", MOVED)
def test_a_qarray_that_moves_keeps_its_sums_or_drops_them(name):
    params, move, numbers, kept = MOVED[name]
    f = (lambda p, x: x @ p["w"]) if params is SQUARE else KEPT["layers in a scan"][0]
    _, served = frozen(f, params, weight=QuantSpec() if params is SQUARE else W8)
    y, reads = reads_sums(lambda v: dot_general(AFFINE, move(v), numbers), served["w"])
    assert reads == kept
    assert np.isfinite(y).all()


@pytest.mark.slow
def test_a_stack_is_scanned_and_mapped_with_its_sums():
    _, served = frozen(*KEPT["layers in a scan"])
    of_each = lambda v: dot_general(AFFINE, v, MATMUL)
    y, reads = reads_sums(lambda v: lax.map(of_each, v), served["w"])
    assert reads
    y_mapped, reads = reads_sums(lambda v: jax.vmap(of_each)(v), served["w"])
    assert reads
    assert_same_bits(y, y_mapped)


@pytest.mark.slow
def test_a_kernel_in_hands():
    _, served = frozen(*KEPT["a convolution"])
    x = quantize(X[None], QuantSpec(symmetric=False))
    _, reads = reads_sums(lambda w: conv_general_dilated(x, w, (1,), "SAME"), served["w"])
    assert reads


# Damage

SHAPES = "sums of shape"


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda v: v.astype(jnp.float32), "sums of dtype int32"),
        (lambda v: v.T, SHAPES),
        (lambda v: v[:, :4], SHAPES),
        (lambda v: zeros((8, 5), jnp.int32), SHAPES),
        (lambda v: v[0], SHAPES),
    ],
)
def test_sums_that_something_changed_raise(damage, error):
    q, served = frozen(lambda p, x: x @ p["w"], {"w": normal(8, 5)})
    changed = jax.tree_util.tree_map_with_path(lambda path, v: damage(v) if path[-1].name == "sums" else v, served)
    with pytest.raises((TypeError, ValueError), match=error):
        q(changed, X)
    with pytest.raises((TypeError, ValueError), match=error):
        dot_general(AFFINE, changed["w"], MATMUL)


def test_values_that_were_cut_alone_raise():
    q, served = frozen(lambda p, x: x @ p["w"], SQUARE)
    changed = jax.tree_util.tree_map_with_path(lambda path, v: v[:, :4] if path[-1].name == "stored" else v, served)
    with pytest.raises(ValueError, match="sums of shape"):
        dot_general(quantize(X[:, :4], A8), changed["w"], MATMUL)
    with pytest.raises(ValueError, match="frozen with shape"):
        q(changed, X)


# Elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_file_has_their_axes_and_makes_them_again(suffix, tmp_path):
    path = tmp_path / f"model.{suffix}"
    _, served = frozen(*KEPT["several axes"])
    save(path, served)
    for loaded in (load(path), load(path, like=served), load(path, like=jax.eval_shape(lambda: served))):
        assert jax.tree.structure(loaded) == jax.tree.structure(served)
        for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(served), strict=True):
            assert_same_bits(got, want)
    without = tmp_path / f"without.{suffix}"
    save(without, dropped(served))  # as files were before
    assert not any(has_sums(load(without)))
    assert jax.tree.structure(load(without, like=served)) == jax.tree.structure(served)
    assert path.stat().st_size - without.stat().st_size < 100  # bytes of the header


def test_a_program_takes_them_as_arguments():
    q, served = frozen(*KEPT["an MLP"])
    program = jax.export.export(jax.jit(lambda p, x: q(p, x)))(served, X)
    again = jax.export.deserialize(program.serialize())
    assert_same_bits(again.call(served, X), q(served, X))
    with pytest.raises(ValueError, match="tree structure"):
        again.call(dropped(served), X)


# Devices


def mesh(kind):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)


SPLIT = {"along what is summed": P("model", None), "along the columns": P(None, "model"), "both": P("data", "model")}


def layouts(served, spec):
    """How the arrays of a matrix lie that is sharded so: along the axes that they have, and transposed at rest."""
    of_groups = lambda v: P(*(axis if n > 1 else None for axis, n in zip(spec, v.shape, strict=True)))
    of = lambda path, v: P(*reversed(spec)) if path[-1].name == "stored" else of_groups(v)
    return jax.tree_util.tree_map_with_path(of, served)


@cases(
    ("is_whole", "split", "kind"),
    itertools.product([False, True], SPLIT, ["Auto", "Explicit"]),
)
def test_a_sharded_weight(split, kind, is_whole):
    q, served = frozen(lambda p, x: x @ p["w"], SQUARE)
    want, (inner, outer) = q(served, X), SPLIT[split]
    on = functools.partial(NamedSharding, mesh(kind))
    places = jax.tree_util.tree_map_with_path(
        lambda path, spec: on(P() if is_whole and path[-1].name == "sums" else spec), layouts(served, SPLIT[split])
    )
    gathers = kind == "Explicit" and inner is not None  # which JAX wants to be said
    out = on(P(None, outer)) if gathers else None
    q = quantize_fn(lambda p, x: jnp.einsum("ik,kn->in", x, p["w"], out_sharding=out), [Rule("**", W8, A8)])
    x = jax.device_put(X, on(P(None, inner)))
    y, reads = reads_sums(lambda p: jax.jit(q)(p, x), jax.device_put(served, places))
    assert reads
    assert_same_bits(y, want)


def repeated(w, x, times):
    return jnp.tile(x, times) @ jnp.tile(w, (times, 1))


@cases(("times", "split"), itertools.product([1, 2], SPLIT), [(2, "both")])
def test_a_shard_map_inside_of_the_function(split, times):
    """The sums are of all devices, and are not taken for those of a part, nor of that part twice."""
    inner, outer = SPLIT[split]
    add = lambda y: lax.psum(y, inner) if inner else y
    part = jax.shard_map(
        lambda w, x: add(repeated(w, x, times)), mesh=mesh("Auto"), in_specs=(SPLIT[split], P(None, inner)),
        out_specs=P(None, outer),
    )  # fmt: skip
    q = quantize_fn(lambda p, x: part(p["w"], x), [Rule("**", W8, A8)])
    _, served = frozen(lambda p, x: x @ p["w"], SQUARE)
    y, reads = reads_sums(lambda p: jax.jit(q)(p, X), served)
    assert reads == (inner is None and times == 1)
    assert_same_bits(y, jax.jit(q)(SQUARE, X))


@pytest.mark.slow
@cases(("times", "split"), itertools.product([1, 2], SPLIT), [(1, "along the columns")])
def test_a_shard_map_around_the_function(split, times):
    inner, outer = SPLIT[split]
    _, served = frozen(lambda p, x: x @ p["w"], SQUARE)
    q = quantize_fn(lambda p, x: repeated(p["w"], x, times), [Rule("**", W8, A8)])

    def of_device(p, x):
        y = q(p, x)
        return lax.psum(y, inner) if inner else y

    def around(p):
        specs = layouts(p, SPLIT[split]), P(None, inner)
        return jax.jit(jax.shard_map(of_device, mesh=mesh("Auto"), in_specs=specs, out_specs=P(None, outer)))(p, X)

    _, reads = reads_sums(around, served)
    assert reads == (inner is None and times == 1)
