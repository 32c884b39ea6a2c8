# SPDX-License-Identifier: Apache-2.0
"""Files: every kind of leaf there and back bit for bit; damaged and forged files give an error, never other data."""

import dataclasses
import os
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from exact import x64
from inputs import ones

import jaxquant
from jaxquant import (
    PerBlock,
    PerChannel,
    QArray,
    QParams,
    QuantSpec,
    Range,
    activation_spec,
    dequantize_params,
    init_qparams,
    load,
    observe,
    quantize_params,
    save,
    stored_for,
    weight_spec,
)
from jaxquant import _files as files
from jaxquant._paths import with_paths

SUFFIXES = (".npz", ".safetensors")
both = pytest.mark.parametrize("suffix", SUFFIXES)
F = np.float32


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    kernel: Any
    bias: Any


def bits(leaf):
    """All that a leaf is: its structure, spec and dtype among it, and dtype, shape and bytes of each array."""
    arrays, structure = jax.tree.flatten(leaf)
    return structure, [(str(v.dtype), v.shape, np.asarray(v).tobytes()) for v in arrays]


def all_bits(tree):
    """By path; a QArray, QParams or Range is one leaf."""
    return {path: bits(leaf) for path, leaf in with_paths(tree, is_leaf=files._is_group)}


def there_and_back(path, tree, like=None):
    save(path, tree)
    return load(path, like)


def refused_or_same(path, name, leaf, want):
    """Either save refuses the leaf and writes nothing, or it comes back: no file is written that cannot be read."""
    try:
        save(path, {name: leaf})
    except (TypeError, ValueError):
        got = None
    else:
        got = all_bits(load(path))
    assert got in (None, {name: bits(want)})
    assert os.listdir(path.parent) == [path.name] * (got is not None)


def random_bits(dtype, shape=(67,), seed=0):
    """Any bit pattern: NaNs with payloads, infinities, subnormals, both zeros. Of 16 bits and fewer, every one."""
    dtype = jnp.dtype(dtype)
    if dtype.name in ("bool", "int4", "uint4", "int2", "float4_e2m1fn"):
        return np.arange(16).astype(dtype)
    if dtype.itemsize <= 2:
        return np.arange(2 ** (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}").view(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(count), dtype).reshape(shape)


FLOATS_OF_8 = ("float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz")
FLOATS_OF_8 += ("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
DTYPES = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "int4", "uint4", "int2", "float4_e2m1fn")
DTYPES += ("float16", "bfloat16", "float32", "complex64", *FLOATS_OF_8)


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_of_every_dtype(tmp_path, suffix, dtype):
    x = random_bits(dtype)
    got = there_and_back(tmp_path / f"a{suffix}", {"numpy": x, "jax": jax.device_put(x), "scalar": x.ravel()[-1]})
    assert all_bits(got) == {"numpy": bits(x), "jax": bits(x), "scalar": bits(x.ravel()[-1])}
    assert all(isinstance(v, jax.Array) and not v.weak_type for v in got.values())


def test_float32_keeps_the_payload_of_a_nan_and_the_sign_of_zero(tmp_path):
    patterns = np.array([0x7F800001, 0xFFC01234, 0x80000000, 0, 1, 0x807FFFFF, 0x7F800000, 0xFF800000], np.uint32)
    for suffix in SUFFIXES:
        got = there_and_back(tmp_path / f"a{suffix}", {"x": patterns.view(F)})["x"]
        assert np.asarray(got).view(np.uint32).tolist() == patterns.tolist()


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
def test_wide_dtypes_need_x64_and_are_never_cast(tmp_path, dtype):
    x = random_bits(dtype)
    path = tmp_path / "a.npz"
    with x64():
        assert all_bits(there_and_back(path, {"deep": {"w": x}})) == {"deep/w": bits(x)}
    save(path, {"deep": {"w": x}})
    with pytest.raises(ValueError, match=rf"{dtype}.*jax_enable_x64"):
        load(path)


@both
def test_an_integer_array_of_a_float64_one_is_never_cast(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    with x64():
        q = qarray(QuantSpec(), (5,), (), "float64")
        assert bits(there_and_back(path, q)) == bits(q)
    with pytest.raises(ValueError, match="jax_enable_x64"):
        load(path)


@both
@pytest.mark.parametrize("dtype", [">f4", ">i2", "longdouble", "clongdouble", "complex128", "<M8[s]", "V4"])
def test_a_dtype_that_could_not_be_read_again_is_not_written(tmp_path, suffix, dtype):
    path, x = tmp_path / f"a{suffix}", np.zeros(3, dtype)
    with x64():
        refused_or_same(path, "w", x, x.astype(x.dtype.newbyteorder("=")))


def strided():
    x = random_bits("float32", (4, 6, 5))
    return {
        "0-d": F(3.5),
        "0-d array": np.array(-0.0, F),
        "empty": np.zeros(0, F),
        "empty of rank 3": np.zeros((3, 0, 2), F),
        "ones": np.ones((1, 1, 1, 1), F),
        "Fortran": np.asfortranarray(x),
        "transposed": x.T,
        "every other": x[::2, :, ::3],
        "backwards": x[::-1, ::-1],
        "broadcast": np.broadcast_to(x[:1], (3, 6, 5)),
        "bfloat16 strided": np.arange(24).astype(jnp.bfloat16).reshape(4, 6)[::2, 1::2],
        "bfloat16 Fortran": np.asfortranarray(np.arange(24).astype(jnp.bfloat16).reshape(4, 6)),
        "bfloat16 0-d": jnp.bfloat16(1.5),
        "bool empty": np.zeros((0, 2), bool),
        "weakly typed": jnp.asarray(2.0),
        "sharded": jax.device_put(
            np.arange(8, dtype=F),
            jax.sharding.NamedSharding(jax.make_mesh((4,), ("x",)), jax.sharding.PartitionSpec("x")),
        ),
    }


@both
def test_shapes_and_layouts(tmp_path, suffix):
    want = strided()
    got = there_and_back(tmp_path / f"a{suffix}", want)
    assert list(got) == sorted(want)
    for name, value in want.items():
        assert bits(got[name]) == bits(value), name


def qarray(spec, shape, scale_shape, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    values = rng.integers(spec.qmin, spec.qmax + 1, shape).astype(spec.dtype)
    values.reshape(-1)[:2] = [spec.qmin, spec.qmax][: values.size]
    zero = np.zeros(scale_shape, int) if spec.symmetric else rng.integers(spec.qmin, spec.qmax + 1, scale_shape)
    scale = rng.random(scale_shape).astype(F) + F(0.1)
    arrays = map(jax.device_put, (values, scale, zero.astype(spec.dtype)))  # compiles nothing, unlike jnp.asarray
    return QArray(*arrays, spec, jnp.dtype(dtype))


QARRAYS = {
    f"{'' if signed else 'un'}signed {bits} of {shape}": qarray(QuantSpec(bits=bits, signed=signed), shape, ())
    for bits in (2, 3, 4, 5, 7, 8, 9, 16)
    for signed in (True, False)
    for shape in [(3, 7)]  # few shapes, because packing and unpacking are compiled for each
}
QARRAYS |= {f"signed {bits} of (1,)": qarray(QuantSpec(bits=bits), (1,), ()) for bits in (3, 8)}
QARRAYS |= {
    "scalar": qarray(QuantSpec(bits=2), (), ()),
    "empty": qarray(QuantSpec(bits=3), (0, 4), ()),
    "empty channels": qarray(weight_spec(4, channel_axis=-1), (3, 0), (1, 0)),
    "channel": qarray(weight_spec(4, channel_axis=-1), (5, 3), (1, 3)),
    "first channel": qarray(weight_spec(4, channel_axis=0), (5, 3), (5, 1)),
    "several axes": qarray(QuantSpec(granularity=PerChannel((0, -1))), (2, 5, 3), (2, 1, 3)),
    "no axis yet": qarray(weight_spec(8), (5, 3), (1, 3)),
    "blocks": qarray(weight_spec(4, channel_axis=-1, block_size=3), (9, 5), (3, 5)),
    "blocks of 8 bits": qarray(QuantSpec(granularity=PerBlock(0, 4)), (8, 2), (2, 2)),
    "tiles": qarray(QuantSpec(bits=4, granularity=PerBlock((0, -1), (3, 5))), (9, 2, 5), (3, 2, 1)),
    "half step": qarray(QuantSpec(bits=4, scale_rule="half_step"), (3, 7), ()),
    "affine": qarray(activation_spec(), (3, 5), ()),
    "affine 2 unsigned": qarray(activation_spec(2, signed=False), (3, 7), ()),
    "affine channel 16": qarray(QuantSpec(bits=16, symmetric=False, granularity=PerChannel(1)), (3, 5), (1, 5)),
    "wide half_away": qarray(QuantSpec(bits=4, narrow_range=False, rounding="half_away"), (3, 7), ()),
    "stochastic": qarray(QuantSpec(bits=4, rounding="stochastic"), (3, 7), ()),
    "bfloat16": qarray(weight_spec(4, channel_axis=-1), (5, 3), (1, 3), "bfloat16"),
    "float16": qarray(QuantSpec(), (5, 3), (), "float16"),
    "stack made by vmap": qarray(QuantSpec(bits=4), (2, 3, 5), (1, 1, 1)),
}


@both
def test_integers_of_every_kind(tmp_path, suffix):
    assert all_bits(there_and_back(tmp_path / f"all{suffix}", QARRAYS)) == all_bits(QARRAYS)


@pytest.mark.parametrize("bits_", [4, 8])
def test_an_order_in_memory_comes_back_and_the_file_has_the_axes_of_the_array(tmp_path, bits_):
    q = qarray(weight_spec(bits_, channel_axis=1), (4, 6), (1, 6))
    lying = {"w": dataclasses.replace(q, order=(-1, -2))}
    for suffix in SUFFIXES:
        assert all_bits(there_and_back(tmp_path / f"own{suffix}", {"w": q})) == all_bits({"w": q})
        got = there_and_back(tmp_path / f"lying{suffix}", lying)
        assert all_bits(got) == all_bits(lying)
        assert all_bits(load(tmp_path / f"lying{suffix}", like={"w": q})) == all_bits({"w": q})
        assert all_bits(load(tmp_path / f"own{suffix}", like=jax.eval_shape(lambda: lying))) == all_bits(lying)
    read = lambda name: safetensors.numpy.load_file(tmp_path / f"{name}.safetensors")["w/values"]
    np.testing.assert_array_equal(read("lying"), read("own"))


FOUR_BITS = (weight_spec(4, channel_axis=1), (1, 6)), (QuantSpec(bits=3, signed=False), ())


@pytest.mark.slow
@both
@pytest.mark.parametrize(("spec", "groups"), FOUR_BITS)
def test_four_bits_in_memory_come_back(tmp_path, suffix, spec, groups):
    q = qarray(spec, (4, 6), groups)
    values = np.asarray(q.values).astype(jnp.int4 if spec.signed else jnp.uint4)
    half = {"w": stored_for(dataclasses.replace(q, values=jax.device_put(values)), "cpu")}
    assert half["w"].pairs
    assert all_bits(there_and_back(tmp_path / f"half{suffix}", half)) == all_bits(half)
    assert all_bits(load(tmp_path / f"half{suffix}", like={"w": q})) == all_bits({"w": q})
    assert all_bits(load(tmp_path / f"half{suffix}", like=jax.eval_shape(lambda: half))) == all_bits(half)
    there_and_back(tmp_path / f"own{suffix}", {"w": q})
    assert abs((tmp_path / f"half{suffix}").stat().st_size - (tmp_path / f"own{suffix}").stat().st_size) < 50


@both
@pytest.mark.parametrize("name", ["channel", "blocks", "scalar", "bfloat16"])
def test_integers_alone_have_no_path(tmp_path, suffix, name):
    got = there_and_back(tmp_path / f"a{suffix}", QARRAYS[name])
    assert all_bits(got) == {"": bits(QARRAYS[name])}
    again = load(tmp_path / f"a{suffix}", like=QARRAYS[name])
    assert bits(again) == bits(QARRAYS[name])


def model():
    kernel = np.random.default_rng(1).normal(size=(6, 3)).astype(F)
    return {"dense": Layer(kernel, np.ones(3, F)), "head": [(kernel.T.astype(jnp.bfloat16), None)], "step": np.int32(7)}


RULES = [("**/kernel", weight_spec(4, channel_axis=-1)), ("head/0/0", weight_spec(2, channel_axis=0, block_size=3))]


@both
def test_what_the_transforms_return(tmp_path, suffix):
    path, params = tmp_path / f"a{suffix}", model()
    q = quantize_params(params, RULES)
    got = there_and_back(path, q, q)
    assert jax.tree.structure(got) == jax.tree.structure(q)
    assert bits(got) == bits(q)
    assert bits(dequantize_params(got)) == bits(dequantize_params(q))
    qparams = init_qparams(params, RULES, "minmax")
    qparams |= {"site": observe(np.array([-1, np.inf, 3], F), activation_spec()), "n": {"r": Range(F(0), F(-np.inf))}}
    qparams["dynamic"] = None
    got = there_and_back(path, {"params": q, "qparams": qparams})
    assert (got["qparams"]["dynamic"], set(got["qparams"])) == (None, set(qparams))
    assert bits(got["qparams"]) == bits(qparams)
    save(path, qparams)
    again = load(path, jax.eval_shape(lambda: qparams))
    assert (bits(again), type(again["site"])) == (bits(qparams), Range)


NESTED = {
    "list": [np.arange(3), (F(1), F(2))],
    "pair": Pair(first={"deep": Layer(np.zeros(2, F), [F(0)])}, second=None),
    "layer": Layer(kernel=Pair(F(3), F(4)), bias=None),
    "q": [QARRAYS["channel"], None],
    "empty": {},
}
NESTED["list"][0] = NESTED["list"][0].astype(np.int32)
NESTED_PATHS = ["layer/kernel/first", "layer/kernel/second", "list/0", "list/1/0", "list/1/1"]
NESTED_PATHS += ["pair/first/deep/bias/0", "pair/first/deep/kernel", "q/0"]


@both
def test_nested_structures(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    got = there_and_back(path, NESTED)
    assert sorted(all_bits(got)) == NESTED_PATHS
    deep = {"kernel": np.zeros(2, F), "bias": [F(0)]}  # a dataclass and a named tuple as dicts
    layer = {"kernel": {"first": F(3), "second": F(4)}, "bias": None}
    assert bits(got) == bits({**NESTED, "pair": {"first": {"deep": deep}, "second": None}, "layer": layer})
    for like in (
        NESTED,
        *(jax.tree.map(f, NESTED) for f in (jax.device_put, np.asarray)),
        jax.eval_shape(lambda: NESTED),
    ):
        assert bits(load(path, like)) == bits(NESTED)


@both
@pytest.mark.parametrize("tree", [{}, None, [], {"a": {}}], ids=repr)
def test_a_tree_without_leaves(tmp_path, suffix, tree):
    path = tmp_path / f"a{suffix}"
    assert there_and_back(path, tree) == tree
    assert load(path, like=tree) == tree


@both
def test_a_bare_array_has_no_path(tmp_path, suffix):
    x = jax.device_put(np.arange(3, dtype=np.int32))
    assert bits(there_and_back(tmp_path / f"a{suffix}", x)) == bits(x)
    assert bits(load(tmp_path / f"a{suffix}", like=x)) == bits(x)


@both
def test_keys_come_back_as_they_are(tmp_path, suffix):
    tree = {"a/b": {"": F(1), "c": [{"/": F(2)}]}, "1": ({1: F(3), 0: F(4)}, [], (), {})}
    got = there_and_back(tmp_path / f"a{suffix}", tree)
    assert bits(got) == bits(tree)
    assert list(got["1"][0]) == [0, 1]
    of_tuples = there_and_back(tmp_path / f"b{suffix}", {(0, "a"): F(1)})
    assert list(of_tuples) == ["(0, 'a')"]  # of a key that JSON cannot hold the text


NAMES = ("a b", "größe/☃", "\U0001d4b3", "/", "//", "a/", "/a", "..", "../up", "a\\b", "file", "#", "?", "x" * 300)
NAMES += (".npy", "a.npy", "w.npz", '"', "'", "\n", "scale", "values", "0", "1e3", "true", "self")


@both
def test_names(tmp_path, suffix):
    path, leaves = tmp_path / "inside" / f"a{suffix}", {name: F(i) for i, name in enumerate(NAMES)}
    path.parent.mkdir()
    assert all_bits(there_and_back(path, leaves)) == all_bits(leaves)
    assert os.listdir(tmp_path) == ["inside"]
    assert os.listdir(path.parent) == [path.name]
    integers = {name: QARRAYS["channel"] for name in NAMES}
    assert all_bits(there_and_back(path, integers)) == all_bits(integers)


ODD_NAMES = ("__jaxquant__", "__jaxquant__.npy", "__metadata__", "a\0b", "a\0", "\0", "\udc80", "x" * 70_000)


@both
@pytest.mark.parametrize("name", ODD_NAMES, ids=[ascii(name[:16]) for name in ODD_NAMES])
def test_a_name_is_refused_or_comes_back(tmp_path, suffix, name):
    refused_or_same(tmp_path / f"a{suffix}", name, F([1, 2]), F([1, 2]))


@both
@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"a": {"b": F(1)}, "a/b": F(2)}, "a/b"),
        ({"w": QARRAYS["channel"], "w/scale": F(1)}, "w/scale"),
        ({"w": QARRAYS["channel"], "w/values": QARRAYS["channel"], "w/values/values": F(1)}, "w/values"),
        ([F(1), {"x/y": F(1), "x": {"y": F(2)}}], "1/x/y"),
    ],
    ids=["nested", "part", "part of part", "list"],
)
def test_two_leaves_of_one_path_are_refused(tmp_path, suffix, tree, path):
    with pytest.raises(ValueError, match=f"a second at '{path}"):
        save(tmp_path / f"a{suffix}", tree)
    assert os.listdir(tmp_path) == []


@both
def test_names_that_do_not_collide(tmp_path, suffix):
    q = QARRAYS["channel"]
    tree = {"w": q, "w/scal": F(1), "w/scale/": F(2), "w/w": q, "v": QParams(F(1), F(0)), "v/min": F(3), "values": F(4)}
    assert all_bits(there_and_back(tmp_path / f"a{suffix}", tree)) == all_bits(tree)


X, Q, REAL = np.ones((2, 3), F), QARRAYS["channel"], np.ones((5, 3), F)
LIKE = {
    "missing": ({"a": X}, {"a": X, "b": {"c": X}}, r"\['b/c'\] that it does not have"),
    "extra": ({"a": X, "b": {"c": X}}, {"a": X}, r"not \['b/c'\]"),
    "renamed": ({"a": X, "b": X}, {"a": X, "c": X}, r"\['c'\].*\['b'\]"),
    "none for an array": ({"a": X, "b": X}, {"a": X, "b": None}, r"\['b'\]"),
    "shape": ({"a": [X, X]}, {"a": [X, X.T]}, "'a/1'"),
    "rank": ({"a": X}, {"a": X[None]}, "'a'"),
    "dtype": ({"a": X}, {"a": X.astype(np.int32)}, "'a'"),
    "half": ({"a": X.astype(jnp.bfloat16)}, {"a": X.astype(np.float16)}, "'a'"),
    "abstract": ({"a": X}, {"a": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}, "'a'"),
    "array for integers": ({"q": Q}, {"q": REAL}, "'q'"),
    "integers for array": ({"q": REAL}, {"q": Q}, "'q'"),
    "bits": ({"q": QARRAYS["signed 3 of (3, 7)"]}, {"q": QARRAYS["signed 4 of (3, 7)"]}, "'q'"),
    "granularity": ({"q": Q}, {"q": dataclasses.replace(Q, spec=weight_spec(4, channel_axis=1))}, "'q'"),
    "rounding": ({"q": Q}, {"q": dataclasses.replace(Q, spec=weight_spec(4, -1, rounding="half_up"))}, "'q'"),
    "dtype of integers": ({"q": Q}, {"q": dataclasses.replace(Q, dtype=jnp.dtype("bfloat16"))}, "'q'"),
    "shape of integers": ({"q": Q}, {"q": qarray(Q.spec, (6, 3), (1, 3))}, "'q'"),
    "range for qparams": ({"a": {"b": QParams(F(1), F(0))}}, {"a": {"b": Range(F(1), F(0))}}, "'a/b'"),
    "qparams for range": ({"a": Range(F(1), F(0))}, {"a": QParams(F(1), F(0))}, "'a'"),
    "shape of qparams": ({"a": QParams(X, X)}, {"a": QParams(F(1), F(0))}, "'a'"),
    "pair for qparams": ({"a": QParams(F(1), F(0))}, {"a": (F(1), F(0))}, "'a/0'"),
    "number": ({"a": [F(1)]}, {"a": [3.0]}, "'a/0'"),
    "text": ({"a": [F(1)]}, {"a": ["x"]}, "'a/0'"),
    "qparams of numbers": ({"a": QParams(F(1), F(0))}, {"a": QParams(1.0, 0.0)}, "'a'"),
    "two of one path": ({"a/b": F(1)}, {"a": {"b": F(1)}, "a/b": F(1)}, "'a/b'"),
}


@both
@pytest.mark.parametrize("case", LIKE)
def test_a_tree_that_the_file_does_not_fit(tmp_path, suffix, case):
    tree, like, words = LIKE[case]
    path = tmp_path / f"a{suffix}"
    assert bits(there_and_back(path, tree, tree)) == bits(tree)
    with pytest.raises(ValueError, match=f"`like`.*{words}"):
        load(path, like)


LEAVES = {
    "str": "adam",
    "function": jnp.sin,
    "key": jax.random.wrap_key_data(jax.device_put(np.zeros(2, np.uint32))),
    "float": 0.5,
    "int": 1,
    "bool": True,
    "spec": weight_spec(4),
    "abstract": jax.ShapeDtypeStruct((2,), np.float32),
    "text array": np.array(["a"]),
    "object array": np.array([None]),
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "records": np.zeros(2, "i4,f4"),
    "qparams of numbers": QParams(0.5, 0.0),
    "abstract 4 bits": jax.eval_shape(lambda: QARRAYS["channel"]),
    "abstract 8 bits": jax.eval_shape(lambda: QARRAYS["signed 8 of (1,)"]),
}


@both
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_that_is_no_array_is_named(tmp_path, suffix, leaf):
    with pytest.raises(TypeError, match=r"'net/block 1/1"):
        save(tmp_path / f"a{suffix}", {"net": {"block 1": (F(0), LEAVES[leaf])}})
    assert os.listdir(tmp_path) == []


@both
@pytest.mark.parametrize("leaf", [X, Q, QARRAYS["affine"], QParams(X, X)], ids=["array", "4 bits", "8 bits", "qparams"])
def test_a_traced_leaf_is_named(tmp_path, suffix, leaf):
    with pytest.raises(TypeError, match=r"'net/0"):
        jax.jit(lambda leaf: save(tmp_path / f"a{suffix}", {"net": [leaf]}))(leaf)
    assert os.listdir(tmp_path) == []


@both
@pytest.mark.parametrize(
    "values",
    [np.full((5, 3), 8, np.int8), np.ones((5, 2), np.int8)],
    ids=["off the grid", "not of the scale"],
)
def test_integers_that_contradict_themselves_are_named(tmp_path, suffix, values):
    with pytest.raises(ValueError, match=r"net/0"):
        save(tmp_path / f"a{suffix}", {"net": [dataclasses.replace(Q, values=values)]})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a", "a.pkl", "a.npy", "a.NPZ", "npz", ".npz", "a.npz.gz"])
def test_an_unknown_suffix(tmp_path, name):
    for f in (lambda path: save(path, {}), load):
        with pytest.raises(ValueError, match=r"must end in \.npz or \.safetensors"):
            f(tmp_path / name)
    assert os.listdir(tmp_path) == []


@both
def test_no_file_no_folder_and_a_folder(tmp_path, suffix):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / f"no{suffix}")
    with pytest.raises(FileNotFoundError):
        save(tmp_path / "no" / f"a{suffix}", {})
    (tmp_path / f"a{suffix}").mkdir()
    with pytest.raises(ValueError, match=r"jaxquant\.save"):
        load(tmp_path / f"a{suffix}")
    with pytest.raises(OSError, match="a"):
        save(tmp_path / f"a{suffix}", {})
    assert os.listdir(tmp_path) == [f"a{suffix}"]


def test_without_the_package_safetensors(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save(path, {"w": X})
    before = path.read_bytes()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for f in (lambda: save(path, {}), lambda: load(path)):
        with pytest.raises(ImportError, match="pip install safetensors"):
            f()
    assert (os.listdir(tmp_path), path.read_bytes()) == (["a.safetensors"], before)
    assert bits(there_and_back(tmp_path / "a.npz", X, X)) == bits(X)


@both
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", ["write", "replace"])
def test_an_error_leaves_the_file_that_was_there(tmp_path, monkeypatch, suffix, error, at):
    path = tmp_path / f"a{suffix}"
    save(path, {"w": X})
    before = path.read_bytes()

    def fails(*args, **kw):
        unfinished = next(p for p in tmp_path.iterdir() if p != path)
        with open(unfinished, "wb") as file:
            file.write(b"half of it")
        raise error

    def half(unfinished, data):
        with open(unfinished, "wb") as file:
            file.write(data[: len(data) // 2])
        raise error

    if at == "replace":
        monkeypatch.setattr(os, "replace", fails)
    else:
        monkeypatch.setattr(np.lib.format, "write_array", fails)
        monkeypatch.setattr(pathlib.Path, "write_bytes", half)
    with pytest.raises(type(error)):
        save(path, {"w": X + 1})
    assert (os.listdir(tmp_path), path.read_bytes()) == ([path.name], before)
    monkeypatch.undo()
    assert bits(there_and_back(path, {"w": X + 1})["w"]) == bits(X + 1)
    assert os.listdir(tmp_path) == [path.name]


@both
def test_equal_trees_make_equal_files(tmp_path, monkeypatch, suffix):
    a, b = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    save(a, {"x": X, "n": NESTED, "q": QARRAYS})
    monkeypatch.setattr(time, "time", lambda: 1e9)  # another day, in another order, of other memory
    save(
        str(b),
        {"q": dict(reversed(QARRAYS.items())), "n": jax.tree.map(jax.device_put, NESTED), "x": np.asfortranarray(X)},
    )
    assert a.read_bytes() == b.read_bytes()


def test_other_readers_open_the_files(tmp_path):
    tree = {"a": {"b": X}, "q": QARRAYS["unsigned 8 of (3, 7)"], "h": np.ones(3, jnp.bfloat16)}
    want = {"a/b": X, "h": np.full(3, 0x3F80, np.uint16)}
    want |= {f"q/{part}": getattr(tree["q"], part) for part in ("values", "scale")}  # and no zero point, which is 0
    for suffix in SUFFIXES:
        save(tmp_path / f"a{suffix}", tree)
    got = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert {name: bits(file[name]) for name in file.files if name != "__jaxquant__"} == all_bits(want)
    assert all_bits(got) == all_bits(want)


@both
def test_packed_files_are_a_half_and_a_quarter(tmp_path, suffix):
    sizes = {}
    for bits_ in (8, 4, 3, 2):
        save(tmp_path / f"a{suffix}", {"w": qarray(QuantSpec(bits=bits_), (256, 257), ())})
        sizes[bits_] = (tmp_path / f"a{suffix}").stat().st_size
    count = 256 * 257
    assert all(bits_ * count / 8 < size < bits_ * count / 8 + 2000 for bits_, size in sizes.items()), sizes


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_what_is_observed_and_histories_come_back_as_they_were(tmp_path, suffix):
    params, x = {"w": ones((8, 4))}, jnp.linspace(-1.0, 1.0, 16).reshape(2, 8)
    rule = jaxquant.Rule("w", QuantSpec(), QuantSpec(), gradient=QuantSpec(), history=4)
    q = jaxquant.quantize_fn(lambda p, x: x @ p["w"], [rule])
    trained, histories = jaxquant.delayed.split_histories(q.init_qparams(params, x))
    tree = {
        "grams": q.observe(params, x, gram=True), "histograms": q.observe(params, x, histogram=True),
        "ranges": q.observe(params, x), "histories": histories, "trained": trained,
    }  # fmt: skip
    path = tmp_path / f"state{suffix}"
    save(path, tree)
    for back in (load(path), load(path, like=jax.eval_shape(lambda: tree))):
        assert jax.tree.structure(back) == jax.tree.structure(tree)
        jax.tree.map(np.testing.assert_array_equal, back, tree)
    jaxquant.solve.gptq(params, q, back["grams"], x, qparams=back["trained"])
    jaxquant.delayed.delayed_qparams(back["histories"])
    jaxquant.merge(back["histograms"], tree["histograms"])
