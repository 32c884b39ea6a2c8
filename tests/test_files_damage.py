# SPDX-License-Identifier: Apache-2.0
"""Damaged files give an error, never other data; forged ones run nothing, allocate little, and give whole leaves."""

import collections
import copy
import io
import json
import os
import pathlib
import pickle
import resource
import time
import tracemalloc
import warnings
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from test_files import QARRAYS, SUFFIXES, F, all_bits, bits, both

from jaxquant import QArray, QParams, Range, dequantize, load, save
from jaxquant import _files as files

TREE = {
    "a": F([1, np.nan, -0.0]),
    "h": np.arange(4).astype(jnp.bfloat16).reshape(2, 2),
    "empty": np.zeros((0, 3), F),
    "q4": QARRAYS["channel"],
    "q2": QARRAYS["scalar"],
    "q8": QARRAYS["affine"],
    "blocks": QARRAYS["blocks"],
    "p": QParams(F([[0.5]]), F([[3]])),
    "r": Range(F(-1), F(2)),
}


def written(path, tree):
    """Saves a tree; returns its bits, the leaves of its header and its arrays."""
    save(path, tree)
    header, arrays = files._CONTAINERS[path.suffix][1](path)
    return all_bits(load(path)), json.loads(header)["leaves"], arrays


def headed(leaves, arrays):
    """A header with a digest that fits, whatever the leaves and arrays are."""
    tree = ["dict", [[name, ["leaf", name]] for name in leaves]] if "" not in leaves else ["leaf", ""]
    said = {"leaves": leaves, "tree": tree}
    return {"schema": 4, "sha256": files._digest(said, arrays), **said}


def forge(path, leaves, arrays, **changes):
    """Writes a file of them."""
    files._CONTAINERS[path.suffix][0](path, json.dumps(headed(leaves, arrays) | changes), arrays)


def npy(shape, descr="'<f4'", data=b"", version=1):
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(2 * version, "little") + header + data


def write_zip(path, members, kind=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", kind) as file:
        for name, data in members:
            file.writestr(name, data)


def write_safetensors(path, header, data=b"", length=None):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)


def refused(path, words="", most=2**23):
    """`load` raises a ValueError that names the file, at once, and allocates little."""
    tracemalloc.start()
    began = time.monotonic()
    with pytest.raises(
        ValueError, match=rf"`path` must be a file that jaxquant\.save wrote, got '.*{path.suffix}'.*{words}"
    ):
        load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.monotonic() - began < 10
    assert peak < most + 4 * path.stat().st_size


def test_the_forger_writes_what_save_writes(tmp_path):
    for suffix in SUFFIXES:
        path = tmp_path / f"a{suffix}"
        want, leaves, arrays = written(path, TREE)
        before = path.read_bytes()
        forge(path, leaves, arrays)
        assert path.read_bytes() == before
        assert all_bits(load(path)) == want


FOREIGN = {
    "nothing": b"",
    "text": b"weights",
    "zeros": bytes(1000),
    "npy": npy((1,), data=bytes(4)),
    "pickle": pickle.dumps([1, 2]),
    "empty zip": b"PK\x05\x06" + bytes(18),
    "empty safetensors": (2).to_bytes(8, "little") + b"{}",
    "random": np.random.default_rng(0).bytes(5000),
}


@both
@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_of_something_else(tmp_path, suffix, what):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(FOREIGN[what])
    refused(path)


def test_a_file_that_another_program_wrote(tmp_path):
    np.savez(tmp_path / "a.npz", w=np.ones(3))
    safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "a.safetensors")
    safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "b.safetensors", metadata={"format": "np"})
    for path in sorted(tmp_path.iterdir()):
        refused(path)
    save(tmp_path / "c.npz", TREE)
    os.replace(tmp_path / "c.npz", tmp_path / "c.safetensors")
    refused(tmp_path / "c.safetensors")
    save(tmp_path / "d.safetensors", TREE)
    os.replace(tmp_path / "d.safetensors", tmp_path / "d.npz")
    refused(tmp_path / "d.npz")


@both
@pytest.mark.parametrize("schema", [0, 3, 5, "3", None, [3]], ids=repr)
def test_another_schema(tmp_path, suffix, schema):
    path = tmp_path / f"a{suffix}"
    _, leaves, arrays = written(path, TREE)
    forge(path, leaves, arrays, schema=schema)
    refused(path, "schema .* reads 4")


@both
def test_another_digest(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    _, leaves, arrays = written(path, TREE)
    for digest in ("0" * 64, "", None, files._digest(leaves, {})):
        forge(path, leaves, arrays, sha256=digest)
        refused(path, "digest")


EDITED = {
    "path": lambda leaves, arrays: leaves.update(z=leaves.pop("a")) or arrays.update(z=arrays.pop("a")),
    "path of an array": lambda leaves, arrays: arrays.update(z=arrays.pop("a")),
    "order": lambda leaves, arrays: arrays.update(
        {"p/scale": arrays["p/zero_point"], "p/zero_point": arrays["p/scale"]}
    ),
    "value": lambda leaves, arrays: arrays.update(a=arrays["a"] + F([1, 0, 0])),
    "sign of zero": lambda leaves, arrays: arrays.update(a=np.abs(arrays["a"])),
    "shape": lambda leaves, arrays: arrays.update(h=arrays["h"].reshape(4)),
    "dtype": lambda leaves, arrays: arrays.update(a=arrays["a"].view(np.uint32)),
    "dtype said": lambda leaves, arrays: leaves["a"]["dtypes"].update({"": "int32"}),
    "an array more": lambda leaves, arrays: arrays.update(z=np.ones(1, F)),
    "a leaf less": lambda leaves, arrays: leaves.pop("a"),
    "rounding": lambda leaves, arrays: leaves["q4"]["spec"].update(rounding="half_up"),
    "axis": lambda leaves, arrays: leaves["q4"]["spec"].update(axis=1),
    "kind": lambda leaves, arrays: leaves["a"].update(kind="x"),
    "dtype of integers": lambda leaves, arrays: leaves["q4"].update(dtype="bfloat16"),
}


@both
@pytest.mark.parametrize("what", EDITED)
def test_an_edited_file_is_refused_by_its_digest(tmp_path, suffix, what):
    path = tmp_path / f"a{suffix}"
    _, leaves, arrays = written(path, TREE)
    digest = headed(leaves, arrays)["sha256"]
    EDITED[what](leaves, arrays)
    forge(path, leaves, arrays, sha256=digest)
    refused(path, "digest")


DEEP = ["leaf", "w"]
for _ in range(300):
    DEEP = ["list", [DEEP]]
TREES = {
    "twice": ["list", [["leaf", "w"], ["leaf", "w"]]],
    "nowhere": ["list", []],
    "unknown": ["leaf", "v"],
    "of another kind": ["set", [["leaf", "w"]]],
    "no name": ["leaf", None],
    "no pairs": ["dict", [["leaf", "w"]]],
    "a key without a hash": ["dict", [[["k"], ["leaf", "w"]]]],
    "a number": 3,
    "text": "leaf",
    "none": None,
}


@both
@pytest.mark.parametrize("what", TREES)
def test_a_forged_tree_has_each_leaf_in_one_place(tmp_path, suffix, what):
    path = tmp_path / f"a{suffix}"
    _, leaves, arrays = written(path, {"w": F(1)})
    said = {"leaves": leaves, "tree": TREES[what]}
    forge(path, leaves, arrays, tree=TREES[what], sha256=files._digest(said, arrays))
    refused(path)


@both
def test_a_forged_tree_may_be_deep(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    _, leaves, arrays = written(path, {"w": F(1)})
    said = {"leaves": leaves, "tree": DEEP}
    forge(path, leaves, arrays, tree=DEEP, sha256=files._digest(said, arrays))
    assert [v.item() for v in jax.tree.leaves(load(path))] == [1]


class Executed:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["w.npy", "__jaxquant__.npy"])
@pytest.mark.parametrize("shape", ["(1,)", "()", "(0,)"])
def test_nothing_is_unpickled(tmp_path, name, shape):
    canary, path = pathlib.Path(tmp_path / "executed"), tmp_path / "a.npz"
    attack = pickle.dumps(np.array([Executed(canary)], object))
    pickle.loads(attack)
    canary.unlink()  # the attack works
    _, leaves, arrays = written(path, {"w": F(1)})
    header = json.dumps(headed(leaves, arrays)).encode()
    members = {"__jaxquant__.npy": npy((len(header),), "'|u1'", header), "w.npy": npy("()", data=bytes(4))}
    for data in (attack, attack.ljust(8, b"."), attack[:8]):
        write_zip(path, (members | {name: npy(shape, "'|O'", data)}).items())
        refused(path)
        path.write_bytes(data)
        refused(path)
    buffer = io.BytesIO()
    np.save(buffer, np.array([Executed(canary)], object), allow_pickle=True)
    write_zip(path, (members | {name: buffer.getvalue()}).items())
    refused(path)
    assert os.listdir(tmp_path) == ["a.npz"]


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_bomb(tmp_path, kind):
    path = tmp_path / "a.npz"
    write_zip(path, [("__jaxquant__.npy", bytes(2**24))], kind)
    refused(path, "compressed")


@pytest.mark.parametrize("size", [2**10, 2**30, 2**62])
def test_a_zip_that_declares_more_than_it_has(tmp_path, size):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("__jaxquant__.npy", npy((4,), data=bytes(16)))
        file.filelist[0].file_size = file.filelist[0].compress_size = size
    refused(path)


def test_members_that_overlap_or_have_one_name(tmp_path):
    path = tmp_path / "a.npz"
    save(path, {"w": F(1)})
    with zipfile.ZipFile(path) as file:
        members = [(m.filename, file.read(m)) for m in file.infolist()]
    with pytest.warns(UserWarning, match="Duplicate name"):
        write_zip(path, [*members, members[1]])
    refused(path, "two members")
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members:
            file.writestr(name, data)
        twin = copy.copy(file.filelist[1])
        twin.filename = "v.npy"
        file.filelist += [twin] * 3
    refused(path)
    write_zip(path, members)
    assert all_bits(load(path)) == {"w": bits(F(1))}


HUGE = ("(268435456,)", "(4611686018427387904, 4)", "(-1, -4)", "(-268435456,)", "(1267650600228229401496703205376, 0)")
ARRAYS = {f"{shape} of {len(data)}": npy(shape, data=data) for shape in HUGE for data in (b"", bytes(16))}
ARRAYS |= {
    "bytes after it": npy("()", data=F(1).tobytes() + bytes(4)),
    "version 2": npy("(268435456,)", version=2),
    "version 9": npy("(1,)", data=bytes(4)).replace(b"\x01\x00", b"\x09\x00", 1),
    "items of nothing": npy("(268435456,)", "'|V0'"),
    "item of 2 GiB": npy("(0,)", "'|V2147483647'"),
    "array of arrays": npy("(0,)", "('<f4', (20000, 20000))"),
    "records": npy("(2,)", "[('a', '<f4'), ('b', '|O')]", bytes(24)),
    "an expression": npy("(9 ** 9 ** 9 ** 9,)"),
    "rank 3000": npy("(" + "1, " * 3000 + ")", data=bytes(4)),
    "nested": npy("(" * 5000),
    "minus": npy("-" * 9000 + "1"),
    "long": npy(" " * 60_000 + "(1,)", data=bytes(4)),
}


@pytest.mark.parametrize("what", ARRAYS)
def test_an_array_that_is_not_what_its_header_says(tmp_path, what):
    path = tmp_path / "a.npz"
    write_zip(path, [("__jaxquant__.npy", ARRAYS[what])])
    refused(path)
    _, leaves, arrays = written(path, {"w": F(1)})
    header = json.dumps(headed(leaves, arrays)).encode()
    write_zip(path, [("__jaxquant__.npy", npy((len(header),), "'|u1'", header)), ("w.npy", ARRAYS[what])])
    refused(path)


JSONS = ("", "{}", "[]", "null", "NaN", "1" * 5000, "[" * 100_000, '{"a":' * 50_000, '{"schema": 1}', "\ud800", "\0")


@both
@pytest.mark.parametrize("text", JSONS, ids=[ascii(text[:16]) for text in JSONS])
def test_a_header_of_something_else(tmp_path, suffix, text):
    path, encoded = tmp_path / f"a{suffix}", text.encode(errors="surrogatepass")
    if suffix == ".npz":
        write_zip(path, [("__jaxquant__.npy", npy((len(encoded),), "'|u1'", encoded))])
    else:
        write_safetensors(path, {"__metadata__": {"__jaxquant__": text}})
    refused(path)


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
SAFETENSORS = {
    "length beyond the file": (b"{}", b"", 10_000),
    "length of 2 ** 30": (b"{}", b"", 2**30),
    "length of 2 ** 63": (b"{}", b"", 2**63),
    "most length": (b"{}", b"", 2**64 - 1),
    "length 0": (b"{}", b"", 0),
    "huge shape": ({"w": ONE | {"shape": [2**30]}}, bytes(4), None),
    "shape that overflows": ({"w": ONE | {"shape": [2**62, 4]}}, bytes(4), None),
    "shape and offsets of 2 ** 32": ({"w": ONE | {"shape": [2**30], "data_offsets": [0, 2**32]}}, bytes(4), None),
    "negative shape": ({"w": ONE | {"shape": [-1]}}, bytes(4), None),
    "negative offset": ({"w": ONE | {"data_offsets": [-4, 0]}}, bytes(4), None),
    "overlap": ({"w": ONE, "v": ONE}, bytes(4), None),
    "hole": ({"w": ONE | {"data_offsets": [4, 8]}}, bytes(8), None),
    "more data": ({"w": ONE}, bytes(8), None),
    "unknown dtype": ({"w": ONE | {"dtype": "O"}}, bytes(4), None),
    "two of one name": (b'{"w":%b,"w":%b}' % ((json.dumps(ONE).encode(),) * 2), bytes(4), None),
    "list": ([], b"", None),
}


@pytest.mark.parametrize("what", SAFETENSORS)
def test_safetensors_that_contradict_themselves(tmp_path, what):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, *SAFETENSORS[what])
    refused(path)


def change(leaves, at, value):
    for key in at[:-1]:
        leaves = leaves[key]
    leaves[at[-1]] = value


def loaded(path):
    """The leaves, or None for a ValueError; anything else is not caught. At once, and as without warnings as errors."""
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return load(path)
        except ValueError:
            return None
        finally:
            assert time.monotonic() - began < 10


def contradiction(path, name, leaf):
    """Why a leaf is not whole: it cannot be used, or saved again. None if it is."""
    try:
        for array in jax.tree.leaves(leaf):
            np.asarray(array)
        if isinstance(leaf, QArray):
            parts = leaf.values.dtype, leaf.zero_point.dtype, leaf.scale.dtype
            assert parts == (leaf.spec.dtype, leaf.spec.dtype, np.float32), parts
            real = dequantize(leaf)
            assert (real.shape, real.dtype) == (leaf.shape, leaf.dtype)
        save(path, {name: leaf})
        assert all_bits(load(path)) == {name: bits(leaf)}
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def contradictions(path, want):
    """Of what a file gives: the leaves that are neither those wanted nor whole, and why. None for an error."""
    got = loaded(path)
    if got is None:
        return None
    known = {
        id(leaf)
        for name, leaf in got.items()
        if max((v.ndim for v in jax.tree.leaves(leaf)), default=0) <= 64 and bits(leaf) == want.get(name)
    }
    found = {name: contradiction(path, name, leaf) for name, leaf in got.items() if id(leaf) not in known}
    return {name: why for name, why in found.items() if why}


# What a header may say, in which its own digest cannot help: where, and what instead.
FORGED = {
    "kind": (("a", "kind"), "Histogram"),
    "kind of others": (("a", "kind"), "QParams"),
    "kind of a range": (("p", "kind"), "Range"),
    "object": (("a", "dtypes", ""), "object"),
    "records with objects": (("a", "dtypes", ""), "i4,O"),
    "text": (("a", "dtypes", ""), "S4"),
    "no array": (("a", "dtypes"), {}),
    "an array too many": (("p", "dtypes", "max"), "float32"),
    "bits": (("q8", "spec", "bits"), 16),
    "bits unpacked": (("q8", "spec", "bits"), 4),
    "bits packed": (("q4", "spec", "bits"), 8),
    "unsigned": (("q8", "spec", "signed"), False),
    "float bits": (("q4", "spec", "bits"), 4.0),
    "rounding": (("q4", "spec", "rounding"), "up"),
    "axis out of range": (("q4", "spec", "axis"), 7),
    "axis that is not that of the scale": (("q4", "spec", "axis"), 0),
    "axis of 10 ** 30": (("q4", "spec", "axis"), 10**30),
    "granularity": (("q4", "spec", "granularity"), "PerTensor"),
    "block size": (("blocks", "spec", "size"), 2),
    "unknown attribute": (("q4", "spec", "path"), "/etc"),
    "shape": (("q4", "shape"), [3, 5]),
    "shape of 8 bits": (("q8", "shape"), [1]),
    "shape of floats": (("q4", "shape"), [5.0, 3]),
    "negative shape": (("q4", "shape"), [-5, -3]),
    "rank 65": (("q2", "shape"), [1] * 65),
    "dtype object": (("q4", "dtype"), "object"),
    "dtype None": (("q4", "dtype"), None),
    "dtype int": (("q4", "dtype"), "int32"),
    "dtype bool": (("q4", "dtype"), "bool"),
    "dtype complex": (("q4", "dtype"), "complex64"),
    "dtype of 8 bits": (("q4", "dtype"), "float8_e5m2"),
    "scale as integers": (("q4", "dtypes", "scale"), "int32"),
    "zero point unsigned": (("q4", "dtypes", "zero_point"), "uint8"),
    "values unsigned": (("q8", "dtypes", "values"), "uint8"),
    "leaves": (("q4",), []),
    "leaf": (("q4",), None),
}


@both
@pytest.mark.parametrize("what", FORGED)
def test_a_forged_header_gives_an_error_or_whole_leaves(tmp_path, suffix, what):
    path = tmp_path / f"a{suffix}"
    want, leaves, arrays = written(path, TREE)
    change(leaves, *FORGED[what])
    forge(path, leaves, arrays)
    assert not contradictions(path, want)


@both
def test_a_scale_with_an_axis_too_many_is_an_error(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    _, leaves, arrays = written(path, TREE)
    forge(path, leaves, arrays | {"q2/scale": arrays["q2/scale"][None]})
    assert loaded(path) is None


def span(rng, size, most=64):
    """Begin and end of a run of bytes, short ones as often as long ones."""
    length = int(2 ** rng.uniform(0, np.log2(most)))
    begin = int(rng.integers(max(size - length, 1)))
    return begin, begin + length


def damaged(rng, data):
    if not data:
        return rng.bytes(8)
    size, (a, b) = len(data), span(rng, len(data))
    c, _ = span(rng, size)
    numbers = (0, 1, 2, 127, 128, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
    width = int(rng.choice([1, 2, 4, 8]))
    number = (int(numbers[rng.integers(len(numbers))]) % 256**width).to_bytes(width, "little")
    flipped = bytes([data[a] ^ 1 << int(rng.integers(8))])
    kinds = (
        lambda: data[:a] + flipped + data[a + 1 :],
        lambda: data[:a] + rng.bytes(1) + data[a + 1 :],
        lambda: data[:a] + rng.bytes(b - a) + data[b:],
        lambda: data[:a] + bytes(b - a) + data[b:],
        lambda: data[:a] + number + data[a + width :],
        lambda: data[:a],
        lambda: data[a:],
        lambda: data[:a] + data[b:],
        lambda: data + rng.bytes(b - a),
        lambda: data + data[a:b],
        lambda: rng.bytes(b - a) + data,
        lambda: data[:c] + data[a:b] + data[c:],
        lambda: data[:c] + data[a:b] + data[c + b - a :],
        lambda: data + data,
    )
    return kinds[rng.integers(len(kinds))]()


TEXTS = [
    "float32",
    "float64",
    "bfloat16",
    "float16",
    "int8",
    "uint8",
    "int16",
    "int32",
    "bool",
    "object",
    "V4",
    "",
    "x",
]
TEXTS += [
    "array",
    "QArray",
    "QParams",
    "Range",
    "PerTensor",
    "PerChannel",
    "PerBlock",
    "half_even",
    "half_up",
    "a",
    "p",
]
VALUES = [*TEXTS, None, True, False, 0, 1, 2, 3, 4, 5, 8, 16, -1, -2, 1.5, 4.0, 2**31, 2**63, 10**30, [], [1], [0, 1]]
VALUES += [[3, 5], [5, 3], [15], [5, 3, 1], [1] * 65, [-1, -15], {}, {"": "float32"}, {"bits": 8}]


def edited(rng, header):
    """The same JSON with one value changed, dropped, renamed or exchanged."""
    header, places, rest = copy.deepcopy(header), [], []
    rest.append(header)
    while rest:
        node = rest.pop()
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            rest += [child] if isinstance(child, dict | list) else []
    node, key = places[rng.integers(len(places))]
    other, other_key = places[rng.integers(len(places))]
    value, new = node[key], copy.deepcopy(VALUES[rng.integers(len(VALUES))])
    kind = rng.integers(6)
    if kind == 0 and isinstance(node, dict):
        node[str(TEXTS[rng.integers(len(TEXTS))])] = node.pop(key)
    elif kind == 1:
        del node[key]
    elif kind == 2:
        node[key] = copy.deepcopy(other[other_key])
    elif kind == 3 and type(value) is int:
        node[key] = value + int(rng.integers(-2, 3))
    elif kind == 4 and isinstance(value, list):
        node[key] = [*value[::-1], *[1] * int(rng.integers(2))]
    else:
        node[key] = not value if isinstance(value, bool) else new
    return header


def rearranged(rng, arrays):
    """The same arrays with one renamed, dropped, exchanged, or seen in another shape or dtype."""
    names = list(arrays)
    a, b = (names[i] for i in rng.integers(len(names), size=2))
    value = arrays[a]
    kinds = (
        lambda: {a: arrays[b], b: value},
        lambda: {a: value.reshape(-1)},
        lambda: {a: value.T},
        lambda: {a: value[None]},
        lambda: {a: value.reshape(-1)[:-1]},
        lambda: {a: value.reshape(-1).view(np.uint8)},
        lambda: {a: value.view(f"i{value.dtype.itemsize}")},
        lambda: {a: np.frombuffer(rng.bytes(value.nbytes), value.dtype).reshape(value.shape)},
        lambda: {f"{a}x": value},
        lambda: {str(rng.choice([b, "w", "a/values", "q4", ""])): value},
    )
    dropped = {name: v for name, v in arrays.items() if name != a or rng.integers(4)}
    changed = dropped | kinds[rng.integers(len(kinds))]()
    return {name: np.ascontiguousarray(v).reshape(v.shape) for name, v in changed.items()}


def outcome_of_damage(path, want):
    got = loaded(path)
    assert got is None or all_bits(got) == want
    return "error" if got is None else "equal"


@pytest.mark.slow
@both
@pytest.mark.parametrize("tree", [TREE, {"w": QARRAYS["channel"]}, F([1, 2])], ids=["all", "one", "bare"])
def test_damage_gives_an_error_or_the_same_bits(tmp_path, suffix, tree, compared):
    """Each file can be made again by its number, which is its seed."""
    path = tmp_path / f"a{suffix}"
    want, leaves, arrays = written(path, tree)
    data, header = path.read_bytes(), headed(leaves, arrays)
    write = files._CONTAINERS[suffix][0]
    before, counts = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, collections.Counter()
    for number in range(3400):
        rng = np.random.default_rng(number)
        kind = ("bytes", "bytes", "bytes twice", "header text", "header", "arrays")[number % 6]
        if kind.startswith("bytes"):
            path.write_bytes(damaged(rng, data if kind == "bytes" else damaged(rng, data)))
        elif kind == "header text":  # in a container that is whole
            text = damaged(rng, json.dumps(header).encode()).decode(errors="replace")
            write(path, text, arrays)
        elif kind == "header":
            write(path, json.dumps(edited(rng, header)), arrays)
        else:
            write(path, json.dumps(header), rearranged(rng, arrays))
        counts[kind, outcome_of_damage(path, want)] += 1
    assert sum(counts.values()) == 3400
    assert all(counts[kind, "error"] > 200 for kind, _ in counts), counts
    assert any(counts[kind, "equal"] > 20 for kind, _ in counts), counts
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, "more than 256 MiB"
    for result in ("error", "equal"):
        total = sum(n for (_, r), n in counts.items() if r == result)
        compared(f"load {suffix} after damage", result, total, 0)


@pytest.mark.slow
@both
def test_a_forged_file_gives_an_error_or_whole_leaves(tmp_path, suffix, compared):
    """The digest fits. Each file can be made again by its number, which is its seed."""
    path = tmp_path / f"a{suffix}"
    want, leaves, arrays = written(path, TREE)
    counts, wrong = collections.Counter(), {}
    for number in range(1500):
        rng = np.random.default_rng(number)
        new_leaves = leaves if number % 3 == 1 else edited(rng, leaves)
        new_arrays = arrays if number % 3 == 0 else rearranged(rng, arrays)
        forge(path, new_leaves, new_arrays)
        found = contradictions(path, want)
        counts["error" if found is None else "leaves"] += 1
        wrong |= {(number, name): why for name, why in (found or {}).items()}
    assert min(counts["error"], counts["leaves"]) > 200, counts
    assert not wrong, f"{len(wrong)} of {counts}, such as {list(wrong.items())[:20]}"
    for result, total in counts.items():
        compared(f"load {suffix} after forgery", result, total, 0)
