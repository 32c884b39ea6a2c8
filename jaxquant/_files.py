# SPDX-License-Identifier: Apache-2.0
"""Pytrees on disk, integers packed: .npz and .safetensors, with a schema version and a digest, without pickle."""

import contextlib
import hashlib
import io
import json
import math
import os
import pathlib
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ._arrays._at_rest import Form, at_rest, lying_as
from ._arrays._codes import with_own_sums
from ._arrays._gram import Gram
from ._arrays._histogram import Histogram
from ._arrays._json import frozen_from_json, frozen_to_json, spec_from_json, spec_to_json
from ._arrays._pack import pack, unpack
from ._arrays._qarray import QArray, changed, checked_qarray, packed_dtype
from ._arrays._qparams import Log2QParams, QParams
from ._arrays._range import Range
from ._base import _checks as checks
from ._base._checks import PyTree
from ._history import GradientHistory
from ._paths import named_in_errors, unboxed, with_paths
from ._spec._spec import QuantSpec

_SCHEMA = 4
_HEADER = "__jaxquant__"
_WIDE = {"float64", "int64", "uint64", "complex128"}
_GROUPS: dict[str, type] = {
    kind.__name__: kind for kind in (QParams, Log2QParams, Range, Histogram, Gram, GradientHistory)
}
_STATIC = "spec", "dtype"  # of what is in a group beside its arrays
_OF_NUMPY = {"bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))}
_OF_NUMPY |= {"float16", "float32", "float64", "complex64", "complex128"}
_RESERVED = (_HEADER, "__metadata__")  # by us, and by safetensors
_LONGEST_NAME = 65_000  # bytes, of a .zip
_HIGHEST_RANK = 64  # of a NumPy array


def save(path: str | os.PathLike, tree: PyTree) -> None:
    """Writes a pytree of arrays and QArrays to a file, integers of 1 to 4 bits packed.

    Args:
      path: str or path that ends in ".npz", which NumPy reads too, or ".safetensors", which needs the package
        safetensors (the extra of that name). A file there is replaced, at once and whole.
      tree: any pytree of arrays, QArrays, QParams, Ranges, Histograms, Grams and GradientHistories: params, the result
        of `quantize_params` or of `init_qparams`, or a dict of both. Arrays must be on this process's devices; with
        several processes use orbax.

    Gradient: none; arrays are read.

    Returns:
      None.

    Raises:
      TypeError: for a leaf that is none of these, with its path.
      ValueError: for another suffix, or two leaves of one path.
      ImportError: for ".safetensors" without that package.

    Source: the formats of numpy.savez and of safetensors 0.4.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from jaxquant import load, quantize_params, save, weight_spec
    >>> q = quantize_params({"w": jnp.array([[0.7, -0.2]])}, [("w", weight_spec(4, channel_axis=0))])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/q.npz", q)
    ...     load(f"{folder}/q.npz")["w"].values.tolist()
    [[7, -2]]
    """
    path, (write, _) = _container(path)
    leaves: dict[str, dict] = {}
    arrays: dict[str, np.ndarray] = {}
    scales: dict[Any, str] = {}
    for name, leaf in with_paths(tree, is_leaf=_is_group):
        described, parts = _described(name, leaf)
        parts = {_part(name, part): value for part, value in parts.items()}
        if name in leaves or set(parts) & set(arrays):
            raise ValueError(
                f"`tree` must have one leaf for each path, and none at the parts of another, got a second at {name!r}. "
                "Rename a key."
            )
        leaves[name] = described
        arrays |= _needed(name, described, parts, scales) if "spec" in described else parts
    said = {"leaves": leaves, "tree": _structure(tree, iter(leaves))}
    header = json.dumps({"schema": _SCHEMA, "sha256": _digest(said, arrays), **said})
    unfinished = path.with_name(f"{path.stem}.{secrets.token_hex(8)}{path.suffix}")
    try:
        write(unfinished, header, arrays)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: str | os.PathLike, like: PyTree = None) -> PyTree:
    """Reads what `save` wrote: the same bits, or an error.

    Nothing in the file is executed, and nothing larger than the file is allocated. A file that was changed since
    raises, by its digest. The digest is not a signature, and says nothing about who wrote the file.

    Args:
      path: str or path of the file.
      like: a pytree of the structure to return, whose leaves have the shapes, dtypes and specs to expect: arrays,
        QArrays and what else `save` takes, or what `jax.eval_shape` gives for them. None returns the tree as it was
        saved if it was made of dicts, lists, tuples and None; other containers come back as dicts by key.

    Returns:
      The pytree, of jax arrays.

    Gradient: none.

    Raises:
      ValueError: for a file that `save` did not write, that is damaged or of another schema; or whose leaves differ
        from like, with the paths.
      FileNotFoundError: if there is no file.
      ImportError: for ".safetensors" without that package.

    Source: as `save`.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from jaxquant import load, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/a.npz", {"w": [jnp.arange(2), jnp.ones(1)]})
    ...     load(f"{folder}/a.npz")
    {'w': [Array([0, 1], dtype=int32), Array([1.], dtype=float32)]}
    """
    path, (_, read) = _container(path)
    with _unreadable(path):
        header, arrays = read(path)
        header = json.loads(header)
        if header["schema"] != _SCHEMA:
            raise ValueError(f"it has schema {header['schema']}, and this jaxquant reads {_SCHEMA}")
        if header["sha256"] != _digest({name: header[name] for name in ("leaves", "tree")}, arrays):
            raise ValueError("its data do not match its digest")
        wide = set.union(set(), *({leaf.get("dtype"), *leaf["dtypes"].values()} for leaf in header["leaves"].values()))
    if wide & _WIDE and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"`path` must have arrays that jax holds, got {str(path)!r} with {sorted(wide & _WIDE)}. Enable "
            "jax_enable_x64 before loading, or save narrower ones."
        )
    with _unreadable(path):
        leaves = {name: _leaf(name, described, arrays) for name, described in header["leaves"].items()}
        tree = _rebuilt(header["tree"], leaves)
    return tree if like is None else _shaped_like(like, leaves)


def _structure(node: PyTree, names: Iterator[str]) -> PyTree:
    """A tree as what JSON can hold, with the names of its leaves, in their order, in their places."""
    if node is None:
        return None
    if jax.tree_util.all_leaves([node], is_leaf=_is_group):
        return ["leaf", next(names)]
    if inside := unboxed(node):  # a parameter of nnx, which has no place in a path either
        return _structure(inside[0], names)
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
    parts = [_structure(child, names) for _, child in children]
    if type(node) in (list, tuple):
        return [type(node).__name__, parts]
    return ["dict", [[_key(path[0]), part] for (path, _), part in zip(children, parts, strict=True)]]


def _key(entry: object) -> PyTree:
    key = getattr(entry, "key", entry)
    return key if isinstance(key, str | int) else jax.tree_util.keystr((entry,), simple=True)


def _rebuilt(structure: PyTree, leaves: dict[str, Any]) -> PyTree:
    """The tree again, with each leaf in one place."""
    left = dict(leaves)

    def of(node: PyTree) -> PyTree:
        if node is None:
            return None
        kind, content = node
        if kind == "leaf":
            return left.pop(content)
        if kind == "dict":
            return {key: of(part) for key, part in content}
        return {"list": list, "tuple": tuple}[kind](map(of, content))

    tree = of(structure)
    if left:
        raise ValueError(f"its tree has no place for {sorted(left)[:3]}")
    return tree


@contextlib.contextmanager
def _unreadable(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, ImportError):
        raise
    except Exception as error:  # parsers of damaged files raise anything
        raise ValueError(
            f"`path` must be a file that jaxquant.save wrote, got {str(path)!r}, which cannot be read: "
            f"{str(error)[:300]}. Write it again, or take it from a copy."
        ) from error


def _is_group(node: PyTree) -> bool:
    return isinstance(node, (QArray, *_GROUPS.values()))


def _part(name: str, part: str) -> str:
    return f"{name}/{part}" if name and part else name or part


def _described(name: str, leaf: PyTree) -> tuple[dict, dict[str, np.ndarray]]:
    """Describes a leaf, and gives its arrays: those of a QArray by name, an array by no name."""
    said: dict[str, Any] = {"kind": type(leaf).__name__ if _is_group(leaf) else "array"}
    fields = _fields(leaf) if _is_group(leaf) else {"": leaf}
    arrays = {part: _numpy(_part(name, part), v) for part, v in _arrays(fields).items()}
    if isinstance(leaf, QParams | Log2QParams | GradientHistory) and leaf.spec:
        said["spec"] = spec_to_json(leaf.spec)
    if isinstance(leaf, QArray):
        said |= {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "spec": spec_to_json(leaf.spec)}
        if leaf.frozen:
            said["frozen"] = frozen_to_json(leaf.frozen)
        if leaf.order:  # how it lies in memory; here values have the axes of the array
            said["order"] = list(leaf.order)
        if leaf.pairs or leaf.stored.dtype != leaf.spec.dtype:
            said["stored"] = str(jnp.dtype(packed_dtype(leaf.spec)))
        if leaf.summed is not None:  # along which axes; they are made again of the values
            said["sums"] = _summed_axes(leaf)
        with named_in_errors(name):
            checked_qarray("the QArray", leaf)
            if leaf.spec.bits <= 4:
                arrays["values"] = np.asarray(pack(arrays["values"], leaf.spec.bits))
    said["dtypes"] = {part: str(value.dtype) for part, value in arrays.items()}
    return said, {part: _plain(value) for part, value in arrays.items()}


def saved_bytes(spec: QuantSpec, size: int, groups: int) -> int:
    """The bytes of so many levels with so many scales, and zero points where there are any, as `save` writes them."""
    of_levels = math.ceil(size * spec.bits / 8) if spec.bits <= 4 else size * spec.dtype.itemsize
    of_zero_point = 0 if spec.symmetric else spec.dtype.itemsize
    of_groups = groups * (jnp.dtype(spec.scale_dtype).itemsize + of_zero_point)
    return of_levels + of_groups + (4 if spec.has_tensor_scale else 0)


def _needed(name: str, described: dict, parts: dict[str, np.ndarray], scales: dict[Any, str]) -> dict[str, np.ndarray]:
    """The arrays of a leaf that are written; of the others it says where they are. Each has some 300 bytes of headers.

    Two arrays are left out: the zero point of a symmetric spec, which is 0, and a scale that the file already has under
    another name, as the scale of a frozen parameter is in its qparams, too. `scales` are the names of scales so far.
    """
    zero_point, scale = _part(name, "zero_point"), _part(name, "scale")
    zeros, shapes = parts.get(zero_point), [parts[of].shape for of in (scale, f"{scale}/values") if of in parts]
    if described["spec"]["symmetric"] and zeros is not None and [zeros.shape] == shapes and not any(zeros.tobytes()):
        described["without"] = "zero_point"
        del parts[zero_point]
    if scale not in parts:  # of a history, or scales with scales of their own
        return parts
    of = parts[scale]
    first = scales.setdefault((of.dtype, of.shape, of.tobytes()), scale)
    if first != scale:
        described["scale_of"] = first
        del parts[scale]
    return parts


def _numpy(name: str, value: object) -> np.ndarray:
    value = checks.unwrapped(value)
    if not checks.is_array(value) or isinstance(value, jax.core.Tracer) or not _is_numeric(value.dtype):
        raise TypeError(
            f"`tree` must have arrays of numbers for leaves, got {checks.kind(value)} at {name!r}. Keep only the "
            "arrays of a model, such as eqx.filter(model, eqx.is_array); numbers convert by jnp.asarray, PRNG keys by "
            "jax.random.key_data."
        )
    written = name.encode(errors="replace")
    if name in _RESERVED or "\0" in name or written.decode() != name or len(written) > _LONGEST_NAME:
        raise ValueError(
            f"`tree` must have paths that files can hold, got {name[:80]!r}. Rename the key: not "
            f"{' or '.join(_RESERVED)}, no NUL, at most {_LONGEST_NAME} bytes of UTF-8."
        )
    value = np.asarray(value)
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))


def _is_numeric(dtype: DTypeLike) -> bool:
    of_jax = any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_))
    return of_jax and (str(dtype) in _OF_NUMPY or np.dtype(dtype).isbuiltin == 2)  # of ml_dtypes


def _plain(value: np.ndarray) -> np.ndarray:
    """The array in a dtype that NumPy and every reader knows: bfloat16 and its like as integers of their bits."""
    of_numpy = str(value.dtype) in _OF_NUMPY
    return np.ascontiguousarray(value if of_numpy else value.view(f"u{value.dtype.itemsize}")).reshape(value.shape)


def _leaf(name: str, described: dict, arrays: dict[str, np.ndarray]) -> PyTree:
    stored = {part: described["scale_of"] if "scale_of" in described and part == "scale" else _part(name, part)
              for part in described["dtypes"] if part != described.get("without")}  # fmt: skip
    parts: dict[str, Any] = {
        part: checks.as_array(arrays[at].view(jnp.dtype(described["dtypes"][part]))) for part, at in stored.items()
    }
    spec = spec_from_json(described["spec"]) if "spec" in described else None
    if spec is not None and described["kind"] == "QArray":
        parts = _with_scales_of_scales(parts, spec)
    if "without" in described:
        parts["zero_point"] = jax.device_put(np.zeros(parts["scale"].shape, described["dtypes"]["zero_point"]))
    if described["kind"] == "array":
        return parts[""]
    if described["kind"] in _GROUPS:
        kind = _GROUPS[described["kind"]]
        return kind(**parts, spec=spec) if spec else kind(**parts)
    assert spec is not None
    shape, dtype = tuple(described["shape"]), jnp.dtype(described["dtype"])
    if spec.bits <= 4:
        if len(shape) > _HIGHEST_RANK:
            raise ValueError(f"{name!r} has rank {len(shape)}")
        parts["values"] = unpack(parts["values"], spec.bits, shape, spec.dtype)
    if parts["values"].shape != shape or not checks.is_float(described["dtype"]):
        raise ValueError(f"the arrays of {name!r} do not fit {spec} and {dtype}")
    order = tuple(described["order"]) if "order" in described else None
    frozen = frozen_from_json(described.get("frozen"))
    q = checked_qarray(name, QArray(**parts, spec=spec, dtype=dtype, order=order, frozen=frozen))
    q = at_rest(q) if "stored" in described else q
    return with_own_sums(q, tuple(described["sums"])) if "sums" in described else q


def _digest(said: dict, arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name, value in sorted(arrays.items()):
        digest.update(json.dumps([name, value.dtype.str, value.shape]).encode())
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _shaped_like(like: PyTree, leaves: dict[str, Any]) -> PyTree:
    found = list(with_paths(like, is_leaf=_is_group))
    expected = dict(found)
    if len(found) > len(expected):
        twice = sorted({path for path, _ in found if sum(path == p for p, _ in found) > 1})
        raise ValueError(f"`like` must have one leaf for each path, got several at {twice}. Rename a key.")
    if set(expected) != set(leaves):
        raise ValueError(
            f"`like` must have the paths of the file, got {sorted(set(expected) - set(leaves))} that it does not have, "
            f"and not {sorted(set(leaves) - set(expected))}, which it has. Pass like=None for the whole file."
        )
    for path, leaf in expected.items():
        if _signature(leaf) != _signature(leaves[path]):
            raise ValueError(
                f"`like` at {path!r} must have the shapes, dtypes and spec of the file, got {_signature(leaf)}, and "
                f"the file has {_signature(leaves[path])}. Make it of the same rules, or pass like=None."
            )
    found = [_lying_like(leaf, leaves[path]) for path, leaf in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(like, is_leaf=_is_group), found)


def _lying_like(like: PyTree, leaf: PyTree) -> PyTree:
    """A leaf with the order and the dtype in memory of another, and with sums if that has some."""
    if not isinstance(leaf, QArray):
        return leaf
    q = changed(lying_as(leaf, Form.of(like)), sums=None, summed=None)
    return q if like.summed is None else with_own_sums(q, tuple(_summed_axes(like)))


def _summed_axes(q: QArray) -> list[int]:
    """The axes along which a QArray has sums."""
    return [axis for axis, n in enumerate(q.sums.shape) if n == 1]


def _signature(leaf: PyTree) -> str:
    """Describes a leaf without its numbers."""
    if not _is_group(leaf):
        return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__
    parts = ", ".join(f"{name}={v if name in _STATIC else _signature(v)}" for name, v in _fields(leaf).items())
    return f"{type(leaf).__name__}({parts})"


def _fields(leaf: PyTree) -> dict[str, Any]:
    """The parts of a leaf by name: its arrays, and what tells it from others of their shapes."""
    if isinstance(leaf, QArray):
        scales = {name: v for name in ("scale", "zero_point", "tensor_scale") if (v := getattr(leaf, name)) is not None}
        return {"values": leaf.values, **scales, "spec": leaf.spec, "dtype": leaf.dtype}
    return vars(leaf) if isinstance(leaf, GradientHistory) else leaf._asdict()


def _arrays(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of the parts of a leaf; of scales that are a QArray its own."""
    found = {}
    for name, v in fields.items():
        if isinstance(v, QArray):
            found |= {f"{name}/{part}": of for part, of in _arrays(_fields(v)).items()}
        elif name not in _STATIC:
            found[name] = v
    return found


def _with_scales_of_scales(parts: dict[str, Any], spec: QuantSpec) -> dict[str, Any]:
    """The parts of a leaf, with QArrays of the scales that have their own."""
    own = spec.scale_spec
    if own is None:
        return parts
    found = {name: v for name, v in parts.items() if "/" not in name}
    for name in ("scale", "zero_point")[: 1 + spec.has_minimum]:
        of = {part.removeprefix(f"{name}/"): v for part, v in parts.items() if part.startswith(f"{name}/")}
        found[name] = QArray(**of, spec=own, dtype=jnp.dtype(jnp.float32))
    return found


def _container(path: str | os.PathLike) -> tuple[pathlib.Path, tuple[Callable, Callable]]:
    path = pathlib.Path(path)
    if path.suffix not in _CONTAINERS:
        raise ValueError(f"`path` must end in {' or '.join(_CONTAINERS)}, got {str(path)!r}. Choose one of them.")
    return path, _CONTAINERS[path.suffix]


def _write_npz(path: pathlib.Path, header: str, arrays: dict[str, np.ndarray]) -> None:
    members = {_HEADER: np.frombuffer(header.encode(), np.uint8), **arrays}
    with zipfile.ZipFile(path, "w") as file:
        for name, value in members.items():
            # Of a ZipInfo, which has no time of its own, so that equal trees make equal files.
            with file.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, value, allow_pickle=False)


def _read_npz(path: pathlib.Path) -> tuple[str, dict[str, np.ndarray]]:
    with zipfile.ZipFile(path) as file:
        members = file.infolist()
        if any(m.compress_type != zipfile.ZIP_STORED or m.file_size != m.compress_size for m in members):
            raise ValueError("it has compressed members")
        if sum(m.file_size for m in members) > path.stat().st_size:
            raise ValueError("it declares more data than it has")
        if len({m.filename for m in members}) < len(members):
            raise ValueError("it has two members of one name")
        arrays = {m.filename.removesuffix(".npy"): _array_of(file.read(m)) for m in members}
    return arrays.pop(_HEADER).tobytes().decode(), arrays


def _array_of(data: bytes) -> np.ndarray:
    """The array of an .npy member, after its declared size has been compared with what is there."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, _, dtype = header(stream)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
        raise ValueError("an array has a different size than its header says")
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _safetensors() -> Any:
    try:
        import safetensors.numpy  # the one import that is not of jax or NumPy, of an extra
    except ImportError as error:
        raise ImportError("A .safetensors file needs the package safetensors: pip install safetensors.") from error
    return safetensors


def _write_safetensors(path: pathlib.Path, header: str, arrays: dict[str, np.ndarray]) -> None:
    if wide := [name for name, value in arrays.items() if value.dtype == np.complex128]:
        raise TypeError(f"A .safetensors file holds no complex128, got some at {wide}. Save them as .npz.")
    path.write_bytes(_safetensors().numpy.save(arrays, {_HEADER: header}))


def _read_safetensors(path: pathlib.Path) -> tuple[str, dict[str, np.ndarray]]:
    with _safetensors().safe_open(path, framework="np") as file:
        return file.metadata()[_HEADER], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


_CONTAINERS = {".npz": (_write_npz, _read_npz), ".safetensors": (_write_safetensors, _read_safetensors)}
