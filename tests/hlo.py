# SPDX-License-Identifier: Apache-2.0
"""Evaluates the optimized HLO of a device that is not there, in NumPy, one IEEE operation at a time.

What the device makes of one operation is not seen, so that its worst is assumed: up to `off_by` units in the last
place in each quotient, by a seed, and with `contracted` one rounding of each product and the sum that it feeds.
Reductions are rounded once. What has no function here raises NotImplementedError, with its name.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "pred": np.dtype(bool),
    **{f"{kind}{n}": np.dtype(f"{name}{n}") for kind, name in (("s", "int"), ("u", "uint")) for n in (8, 16, 32, 64)},
    **{
        f"{kind}{n}": np.dtype(getattr(ml_dtypes, f"{name}{n}"))
        for kind, name in (("s", "int"), ("u", "uint"))
        for n in (2, 4)
    },
    **{f"f{n}": np.dtype(f"float{n}") for n in (16, 32, 64)},
    "bf16": np.dtype(ml_dtypes.bfloat16),
    **{name.replace("float", "f"): np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e5m2")},
}
DTYPES |= {name.replace("_", ""): dtype for name, dtype in DTYPES.items()}


# ---- The program.


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of an array; `order` are its axes in memory, the fastest last."""

    dtype: np.dtype | None
    dims: tuple[int, ...]
    order: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`name = shape op(operands), attributes`; `inside` is what stands in the brackets."""

    name: str
    op: str
    shapes: tuple[Shape, ...]
    is_tuple: bool
    inside: str
    attributes: str

    @property
    def shape(self) -> Shape:
        return self.shapes[0]

    @property
    def operands(self) -> list[str]:
        if self.op in ("parameter", "constant", "iota"):
            return []
        return [part.split()[-1].lstrip("%") for part in _parts(self.inside)]

    def text(self, name: str, default: str = "") -> str:
        found = re.search(rf"[ ,]{name}=(\{{[^}}]*\}}|\"[^\"]*\"|[^, ]+)", self.attributes)
        return found[1].strip('{}"') if found else default

    def integers(self, name: str) -> list[int]:
        return [int(n) for n in re.findall(r"-?\d+", self.text(name))]

    def computation(self, *names: str) -> str:
        return next(found for name in names if (found := self.text(name))).lstrip("%")

    @property
    def config(self) -> dict:
        """What is there for the backend."""
        _, found, text = self.attributes.partition("backend_config=")
        return json.JSONDecoder().raw_decode(text)[0] if found else {}


def _parts(text: str) -> list[str]:
    """What commas separate outside of brackets."""
    depth, parts = 0, [""]
    for c in re.sub(r"/\*.*?\*/", "", text):
        depth += (c in "({[") - (c in ")}]")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]


def _closed(text: str) -> int:
    """Where the bracket is closed that a text begins with."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return i
    raise ValueError(text)


def _shape(found: re.Match) -> Shape:
    dims = tuple(map(int, filter(None, found[2].split(","))))
    minor_first = re.match(r"[\d,]*", found[3] or "")[0]
    order = tuple(map(int, filter(None, minor_first.split(","))))[::-1] or tuple(range(len(dims)))
    return Shape(DTYPES.get(found[1]), dims, order)


def _instruction(line: str) -> Instruction:
    name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    is_tuple = rest.startswith("(")
    ends = _closed(rest) + 1 if is_tuple else re.match(r"\w+\[[^\]]*\](\{[^}]*\})?", rest).end()
    shapes = [
        _shape(m) for m in re.finditer(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?", re.sub(r"/\*.*?\*/", "", rest[:ends]))
    ]
    rest = rest[ends:].strip()
    op, _, _ = rest.partition("(")
    rest = rest[len(op) :]
    ends = _closed(rest)
    return Instruction(name.lstrip("%"), op, tuple(shapes), is_tuple, rest[1:ends], rest[ends + 1 :])


def parsed(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation, its root last, and the name of the first one to run."""
    computations, entry = {}, ""
    for line in text.splitlines():
        if begins := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name, root = begins[2], None
            lines = computations[name] = []
            entry = name if begins[1] else entry
        elif line.startswith("  ") and " = " in line:
            lines.append(_instruction(line))
            root = lines[-1] if line.lstrip().startswith("ROOT ") else root
        elif line == "}":
            lines.remove(root)
            lines.append(root)
    return computations, entry


# ---- What runs it.

OPS: dict[str, Callable] = {}  # (machine, instruction, *operands) -> value


def _op(*names: str) -> Callable:
    def register(f: Callable) -> Callable:
        OPS.update(dict.fromkeys(names, f))
        return f

    return register


class Machine:
    """Runs a program.

    Computations of scalars, as reductions have them, run on arrays: with a value for each place.
    """

    def __init__(self, text: str, off_by: int = 0, contracted: bool = False, seed: int = 0):
        self.computations, self.entry = parsed(text)
        self.shapes = {i.name: i.shape for lines in self.computations.values() for i in lines if i.shapes}
        self.off_by, self.contracted, self.rng = off_by, contracted, np.random.default_rng(seed)

    def __call__(self, *args: np.ndarray) -> Any:
        with np.errstate(all="ignore"):
            return self.run(self.entry, args)

    def run(self, name: str, args: Sequence[Any]) -> Any:
        values, lines = {}, {i.name: i for i in self.computations[name]}
        for i in self.computations[name]:
            operands = [values[o] for o in i.operands]
            if i.op == "parameter":
                value = args[int(i.inside)]
            elif (
                self.contracted
                and i.op in ("add", "subtract")
                and (found := self._contracted(i, lines, values)) is not None
            ):
                value = found
            elif i.op in OPS:
                value = OPS[i.op](self, i, *operands)
            else:
                raise NotImplementedError(i.op)
            if isinstance(value, np.ndarray | np.generic) and not i.is_tuple:
                value = np.asarray(value)
                if value.dtype != i.shape.dtype or i.shape.dims not in ((), value.shape):
                    raise ValueError(f"{i.name} is {value.dtype}{value.shape}, expected {i.shape}")
            values[i.name] = value
        return value

    def _contracted(self, i: Instruction, lines: dict, values: dict) -> np.ndarray | None:
        """A sum with a product, rounded once, where both are of float32 and in one computation."""
        if i.shape.dtype != np.float32:
            return None
        for side in (0, 1):
            product = lines[i.operands[side]]
            if product.op == "multiply":
                a, b = (values[o].astype(np.longdouble) for o in product.operands)
                other = values[i.operands[1 - side]].astype(np.longdouble)
                product = a * b
                if i.op == "subtract":
                    product, other = (product, -other) if side == 0 else (-product, other)
                return (product + other).astype(np.float32)
        return None


def _afz(v: np.ndarray) -> np.ndarray:
    whole = np.trunc(v)
    return np.copysign(whole + np.copysign(np.abs(v - whole) >= 0.5, v), v)


ELEMENTWISE = {
    "add": lambda a, b: a | b if a.dtype.kind == "b" else a + b,
    "multiply": lambda a, b: a & b if a.dtype.kind == "b" else a * b,
    "subtract": np.subtract,
    "remainder": np.fmod,
    "negate": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "floor": np.floor,
    "ceil": np.ceil,
    "round-nearest-even": np.rint,
    "round-nearest-afz": _afz,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "select": np.where,
    "is-finite": np.isfinite,
    "clamp": lambda low, v, high: np.minimum(np.maximum(low, v), high),
    "sign": lambda v: np.where(v == 0, v, np.sign(v)),
    "rsqrt": lambda v: 1 / np.sqrt(v),
    "sqrt": np.sqrt,
    "power": np.power,
    "tanh": np.tanh,
    "exponential": np.exp,
    "log": np.log,
}


@_op(*ELEMENTWISE)
def _elementwise(machine, i, *operands):
    return np.asarray(ELEMENTWISE[i.op](*operands)).astype(i.shape.dtype)


@_op("divide")
def _divide(machine, i, a, b):
    if a.dtype.kind in "iu":
        b = np.where(b == 0, 1, b)
        return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)
    quotient = a / b
    if a.dtype != np.float32 or not machine.off_by:
        return quotient
    moved = machine.rng.integers(-machine.off_by, machine.off_by + 1, quotient.shape, np.int32)
    is_normal = np.isfinite(quotient) & (np.abs(quotient) >= np.finfo(np.float32).tiny)
    return np.where(is_normal, (quotient.view(np.int32) + moved).view(np.float32), quotient)


@_op("convert")
def _convert(machine, i, v):
    dtype = i.shape.dtype
    if dtype.kind == "b":
        return v != 0
    if np.issubdtype(dtype, np.integer) and v.dtype.kind not in "iub":  # it saturates, and NaN is 0
        limits, v = np.iinfo(dtype), np.nan_to_num(np.trunc(v.astype(np.float64)), nan=0.0)
        inside = np.clip(v, limits.min, limits.max)
        return np.where(inside >= limits.max, limits.max, inside.astype(np.int64)).astype(dtype)
    return v.astype(dtype)


@_op("compare")
def _compare(machine, i, a, b):
    if i.text("type") == "TOTALORDER" and a.dtype.kind not in "iub":
        a, b = (_place(v) for v in (a, b))
    f = {
        "EQ": np.equal,
        "NE": np.not_equal,
        "LT": np.less,
        "LE": np.less_equal,
        "GT": np.greater,
        "GE": np.greater_equal,
    }
    return f[i.text("direction")](a, b)


def _place(v: np.ndarray) -> np.ndarray:
    """The place of each float in their total order."""
    bits = v.view(f"int{8 * v.dtype.itemsize}")
    return np.where(bits < 0, np.iinfo(bits.dtype).max ^ bits, bits)


@_op("shift-left", "shift-right-logical", "shift-right-arithmetic")
def _shift(machine, i, v, by):
    n, is_arithmetic = 8 * v.dtype.itemsize, i.op.endswith("arithmetic")
    unsigned = np.dtype(f"uint{n}")
    by, bits = by.astype(np.int64), v.view(f"int{n}" if is_arithmetic else unsigned)
    beyond, inside = (by < 0) | (by >= n), np.clip(by, 0, n - 1).astype(bits.dtype)
    if is_arithmetic:
        return (bits >> np.where(beyond, n - 1, inside)).astype(bits.dtype).view(v.dtype)
    moved = bits << inside if i.op == "shift-left" else bits >> inside
    return np.where(beyond, 0, moved).astype(unsigned).view(v.dtype)


@_op("count-leading-zeros")
def _count_leading_zeros(machine, i, v):
    n = 8 * v.dtype.itemsize
    bits = v.view(f"uint{n}")
    return sum((bits >> bits.dtype.type(k) == 0).astype(v.dtype) for k in range(n)).astype(v.dtype)


# ---- Where values lie.


@_op("constant")
def _constant(machine, i):
    if "..." in i.inside:
        raise NotImplementedError("a constant that is too long for the text of a program")
    texts = re.findall(r"true|false|-?nan|-?inf|-?[\d.]+(?:e[-+]?\d+)?", re.sub(r"\(0x\w+\)", "", i.inside))
    number = {"true": 1, "false": 0}
    kind = int if i.shape.dtype.kind in "iu" else float
    values = np.array([kind(number.get(t, t)) for t in texts])
    return values.astype(i.shape.dtype).reshape(i.shape.dims)


@_op("iota")
def _iota(machine, i):
    axis, dims = int(i.text("iota_dimension", "0")), i.shape.dims
    along = [n if axis == k else 1 for k, n in enumerate(dims)]
    return np.broadcast_to(np.arange(dims[axis] if dims else 1).reshape(along), dims).astype(i.shape.dtype)


@_op("broadcast")
def _broadcast(machine, i, v):
    if not i.shape.dims:  # a scalar, with a value for each place
        return v
    kept = i.integers("dimensions")
    return np.broadcast_to(v.reshape([n if k in kept else 1 for k, n in enumerate(i.shape.dims)]), i.shape.dims)


@_op("reshape")
def _reshape(machine, i, v):
    return v.reshape(i.shape.dims) if i.shape.dims or v.size == 1 else v


@_op("transpose")
def _transpose(machine, i, v):
    return np.transpose(v, i.integers("dimensions"))


@_op("bitcast")
def _bitcast(machine, i, v):
    """The same memory in another layout."""
    if not i.shape.dims and not machine.shapes[i.operands[0]].dims:
        return v.view(i.shape.dtype)
    memory = np.ascontiguousarray(np.transpose(v, machine.shapes[i.operands[0]].order)).reshape(-1).view(i.shape.dtype)
    order = i.shape.order
    return np.transpose(memory.reshape([i.shape.dims[k] for k in order]), np.argsort(order).astype(int))


@_op("bitcast-convert")
def _bitcast_convert(machine, i, v):
    out = np.ascontiguousarray(v).view(i.shape.dtype)
    return out.reshape(i.shape.dims) if i.shape.dims else out.reshape(v.shape)


@_op("slice")
def _slice(machine, i, v):
    parts = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", i.text("slice"))
    return v[tuple(slice(int(a), int(b), int(c or 1)) for a, b, c in parts)]


def _starts(indices: Sequence[np.ndarray], dims: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    starts = [min(max(int(k), 0), n - size) for k, n, size in zip(indices, dims, sizes, strict=True)]
    return tuple(slice(k, k + size) for k, size in zip(starts, sizes, strict=True))


@_op("dynamic-slice")
def _dynamic_slice(machine, i, v, *indices):
    return v[_starts(indices, v.shape, i.integers("dynamic_slice_sizes"))]


@_op("dynamic-update-slice")
def _dynamic_update_slice(machine, i, v, update, *indices):
    out = v.copy()
    out[_starts(indices, v.shape, update.shape)] = update
    return out


@_op("concatenate")
def _concatenate(machine, i, *parts):
    return np.concatenate(parts, i.integers("dimensions")[0])


@_op("reverse")
def _reverse(machine, i, v):
    return np.flip(v, tuple(i.integers("dimensions")))


@_op("pad")
def _pad(machine, i, v, value):
    return _padded(v, value, [list(map(int, part.split("_"))) for part in i.text("padding").split("x")])


def _padded(v: np.ndarray, value: Any, padding: Sequence[Sequence[int]]) -> np.ndarray:
    """With (low, high) or (low, high, between) on each axis; negative ones cut off."""
    for axis, (low, high, *between) in enumerate(padding):
        n, step = v.shape[axis], 1 + sum(between)
        wide = np.full([*v.shape[:axis], max((n - 1) * step + 1, 0), *v.shape[axis + 1 :]], value, v.dtype)
        wide[(slice(None),) * axis + (slice(None, None, step),)] = v
        ends = [(0, 0)] * axis + [(max(low, 0), max(high, 0))] + [(0, 0)] * (v.ndim - axis - 1)
        wide = np.pad(wide, ends, constant_values=value)
        v = wide[(slice(None),) * axis + (slice(max(-low, 0), wide.shape[axis] - max(-high, 0)),)]
    return v


@_op("gather")
def _gather(machine, i, v, at):
    sizes, offset, vector = i.integers("slice_sizes"), i.integers("offset_dims"), int(i.text("index_vector_dim"))
    if i.integers("operand_batching_dims"):
        raise NotImplementedError("gather in batches")
    at = np.moveaxis(at, vector, -1) if vector < at.ndim else at[..., None]
    axes, collapsed = i.integers("start_index_map"), i.integers("collapsed_slice_dims")
    out = np.zeros(i.shape.dims, v.dtype)
    for where in np.ndindex(at.shape[:-1]):
        starts = dict(zip(axes, at[where], strict=True))
        part = v[_starts([starts.get(k, 0) for k in range(v.ndim)], v.shape, sizes)]
        batch = iter(where)
        place = tuple(slice(None) if k in offset else next(batch) for k in range(out.ndim))
        out[place] = part.reshape([n for k, n in enumerate(sizes) if k not in collapsed])
    return out


@_op("scatter")
def _scatter(machine, i, v, at, updates):
    window, inserted, vector = (
        i.integers("update_window_dims"),
        i.integers("inserted_window_dims"),
        int(i.text("index_vector_dim")),
    )
    axes, kept = i.integers("scatter_dims_to_operand_dims"), [k for k in range(v.ndim) if k not in inserted]
    at, out = np.moveaxis(at, vector, -1) if vector < at.ndim else at[..., None], v.copy()
    for where in np.ndindex(updates.shape):
        place = np.zeros(v.ndim, int)
        place[axes] = at[tuple(k for axis, k in enumerate(where) if axis not in window)]
        place[kept] += np.array([where[axis] for axis in window], int)
        if all(0 <= k < n for k, n in zip(place, v.shape, strict=True)):
            out[tuple(place)] = machine.run(i.computation("to_apply"), [out[tuple(place)], updates[where]])
    return out


# ---- Sums and products.


def _single(machine: Machine, name: str) -> str:
    """The one operation of a computation, or nothing."""
    ops = [i.op for i in machine.computations[name] if i.op not in ("parameter", "copy", "bitcast")]
    return ops[0] if len(ops) == 1 else ""


@_op("reduce")
def _reduce(machine, i, *operands):
    n, axes, name = len(operands) // 2, tuple(i.integers("dimensions")), i.computation("to_apply")
    values, starts = operands[:n], operands[n:]
    if _single(machine, name) == "add" and values[0].dtype.kind not in "iub":
        exact = values[0].astype(np.float64)
        return (np.sum(exact, axes) + starts[0].astype(np.float64)).astype(i.shape.dtype)
    fast = {"add": np.add, "maximum": np.maximum, "minimum": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or}
    if f := fast.get(_single(machine, name)):
        return np.asarray(f.reduce(values[0], axes, dtype=values[0].dtype, initial=starts[0])).astype(i.shape.dtype)
    rows = [np.moveaxis(v, axes, range(len(axes))) for v in values]
    found = [np.broadcast_to(start, row.shape[len(axes) :]) for start, row in zip(starts, rows, strict=True)]
    for where in np.ndindex(rows[0].shape[: len(axes)]):
        out = machine.run(name, [*found, *(row[where] for row in rows)])
        found = list(out) if isinstance(out, tuple) else [out]
    return tuple(found) if n > 1 else found[0]


def _window(i: Instruction, ndim: int) -> dict[str, list]:
    """The window of an instruction: its size, stride, padding and so on along each axis."""
    given = dict(part.split("=") for part in i.text("window").split())
    numbers = lambda name, default: [int(n) for n in given[name].split("x")] if name in given else [default] * ndim
    window = {
        name: numbers(name, default)
        for name, default in (("size", 1), ("stride", 1), ("lhs_dilate", 1), ("rhs_dilate", 1), ("rhs_reversal", 0))
    }
    pads = [tuple(map(int, part.split("_"))) for part in given["pad"].split("x")] if "pad" in given else [(0, 0)] * ndim
    return window | {"pad": pads}


@_op("reduce-window")
def _reduce_window(machine, i, v, start):
    window = _window(i, v.ndim)
    v, out = _padded(v, start, window["pad"]), np.full(i.shape.dims, start, i.shape.dtype)
    for at in np.ndindex(*window["size"]):
        part = v[
            tuple(slice(k, k + (n - 1) * s + 1, s) for k, n, s in zip(at, i.shape.dims, window["stride"], strict=True))
        ]
        out = machine.run(i.computation("to_apply"), [out, part])
    return out


def _wide(dtype: np.dtype) -> type:
    return np.int64 if np.issubdtype(dtype, np.integer) else np.float64


@_op("dot")
def _dot(machine, i, a, b):
    names = "lhs_contracting_dims", "rhs_contracting_dims", "lhs_batch_dims", "rhs_batch_dims"
    return _product(a, b, *map(i.integers, names)).astype(i.shape.dtype)


def _product(
    a, b, of_a: Sequence[int], of_b: Sequence[int], batch_a: Sequence[int], batch_b: Sequence[int]
) -> np.ndarray:
    letters = itertools.count()
    left, right = [-1] * a.ndim, [-1] * b.ndim
    for p, q in (*zip(batch_a, batch_b, strict=True), *zip(of_a, of_b, strict=True)):
        left[p] = right[q] = next(letters)
    left, right = ([next(letters) if k < 0 else k for k in side] for side in (left, right))
    out = [left[p] for p in batch_a]
    out += [k for p, k in enumerate(left) if p not in (*batch_a, *of_a)]
    out += [k for p, k in enumerate(right) if p not in (*batch_b, *of_b)]
    return np.einsum(a.astype(_wide(a.dtype)), left, b.astype(_wide(b.dtype)), right, out)


@_op("convolution", "convolution-base-dilated")
def _convolution(machine, i, x, w):
    """One product for each place of the window, groups side by side."""
    lhs, rhs, out = re.match(r"(\w+)_(\w+)->(\w+)", i.text("dim_labels")).groups()
    places, n = [str(k) for k in range(len(lhs) - 2)], len(lhs) - 2
    window, groups = _window(i, n), int(i.text("feature_group_count", "1"))
    batches = int(i.text("batch_group_count", "1"))
    x = np.transpose(x.astype(_wide(x.dtype)), [lhs.index(c) for c in ("b", "f", *places)])
    w = np.transpose(w.astype(x.dtype), [rhs.index(c) for c in ("o", "i", *places)])
    w = np.flip(w, [2 + k for k in range(n) if window["rhs_reversal"][k]])
    x = _padded(
        x, 0, [(0, 0), (0, 0), *((*pad, d - 1) for pad, d in zip(window["pad"], window["lhs_dilate"], strict=True))]
    )
    dims = [i.shape.dims[out.index(c)] for c in places]
    if batches > 1:  # the batch in groups, each with its part of the kernel
        x = np.concatenate(np.split(x, batches), 1)
        groups = batches
    x = x.reshape(len(x), groups, -1, *x.shape[2:])
    w = w.reshape(groups, -1, *w.shape[1:])
    y = np.zeros((len(x), groups, w.shape[1], *dims), x.dtype)
    for at in np.ndindex(*window["size"]):
        steps = zip(at, window["rhs_dilate"], dims, window["stride"], strict=True)
        part = x[
            (slice(None), slice(None), slice(None), *(slice(k * d, k * d + (m - 1) * s + 1, s) for k, d, m, s in steps))
        ]
        y += np.einsum("bgc...,goc->bgo...", part, w[(slice(None), slice(None), slice(None), *at)])
    y = y.reshape(len(x), -1, *dims)
    return np.transpose(y, [("b", "f", *places).index(c) for c in out]).astype(i.shape.dtype)


@_op("sort")
def _sort(machine, i, *values):
    """By the number of values that come before each; those that are equal stay in their order."""
    (axis,), name = i.integers("dimensions"), i.computation("to_apply")
    moved = [np.moveaxis(v, axis, -1) for v in values]
    pairs = [v for row in moved for v in (row[..., :, None], row[..., None, :])]
    n = moved[0].shape[-1]
    before = np.broadcast_to(machine.run(name, pairs), (*moved[0].shape, n))  # whether one comes before another
    earlier = np.tri(n, k=-1, dtype=bool)  # of the others, those that stand before it
    place = np.sum(np.swapaxes(before, -1, -2) | (~before & earlier), -1)
    out = []
    for row in moved:
        found = np.empty_like(row)
        np.put_along_axis(found, place, row, -1)
        out.append(np.moveaxis(found, -1, axis))
    return tuple(out) if i.is_tuple else out[0]


# ---- What runs other programs.


@_op("tuple")
def _tuple(machine, i, *values):
    return values


@_op("get-tuple-element")
def _get_tuple_element(machine, i, values):
    return values[int(i.text("index"))]


@_op("copy", "copy-start", "copy-done", "async-done", "fusion-done", "optimization-barrier")
def _same(machine, i, v):
    return v


@_op("fusion", "fusion-start", "call", "async-start")
def _call(machine, i, *operands):
    return machine.run(i.computation("calls", "to_apply"), operands)


@_op("while")
def _while(machine, i, state):
    while machine.run(i.computation("condition"), [state]):
        state = machine.run(i.computation("body"), [state])
    return state


@_op("conditional")
def _conditional(machine, i, which, *operands):
    if i.text("true_computation"):
        names, k = [i.computation("true_computation"), i.computation("false_computation")], 0 if which else 1
    else:
        names = [name.strip(" %") for name in i.text("branch_computations").split(",")]
        last = len(names) - 1
        k = (0 if which else 1) if which.dtype == bool else int(which) if 0 <= which <= last else last
    return machine.run(names[k], [operands[k]])


# ---- What has a name of its own on a platform.


@_op("custom-call")
def _custom_call(machine, i, *operands):
    target = i.text("custom_call_target")
    if target == "AllocateBuffer":
        return np.zeros(i.shape.dims, i.shape.dtype)
    if target == "GatherScatterIndicesBitpacked":  # of a TPU: indices as they are
        return operands[0]
    if target == "__cublas$lt$matmul":
        return _cublas(i, *operands)
    raise NotImplementedError(target)


def _cublas(i: Instruction, a: np.ndarray, b: np.ndarray, *more: np.ndarray) -> Any:
    """`alpha * a @ b`, in float64 here, with what is left of the tuple for work."""
    config = i.config["gemm_backend_config"]
    if more or config.get("epilogue", "DEFAULT") != "DEFAULT" or config["beta"]:
        raise NotImplementedError(f"a product of cuBLASLt with {config['epilogue']}")
    axes = config["dot_dimension_numbers"]
    of = lambda name: [int(k) for k in axes.get(name, [])]
    names = "lhs_contracting_dimensions", "rhs_contracting_dimensions", "lhs_batch_dimensions", "rhs_batch_dimensions"
    y = (_product(a, b, *map(of, names)) * config["alpha_real"]).astype(i.shape.dtype)
    return (y, *(np.zeros(s.dims, s.dtype) for s in i.shapes[1:])) if i.is_tuple else y
