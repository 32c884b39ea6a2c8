# SPDX-License-Identifier: Apache-2.0
"""The kernels of `jaxquant._runtime` against the runtimes themselves: integers over all of their range, near ties."""

import functools

import jax
import numpy as np
import pytest
from runtimes import Tensor, litert_op, onnx_op, run_litert

from jaxquant._runtime._kernels import Grid, limits_of
from jaxquant._runtime._litert import Reference, Xnnpack
from jaxquant._runtime._onnxruntime import OnnxRuntime

pytestmark = [pytest.mark.slow, pytest.mark.bits]

F, D = np.float32, np.float64
LITERT = {"litert": Xnnpack(), "litert_reference": Reference()}
LAYERS = {  # inputs, outputs, kernel, stride, height
    "conv 3x3": (24, 48, 3, 1, 20),
    "conv 3x3, stride 2": (3, 32, 3, 2, 56),
    "depthwise 3x3": (96, 96, 3, 1, 20),
    "depthwise 5x5, stride 2": (96, 96, 5, 2, 30),
    "conv 1x1": (144, 64, 1, 1, 20),
    "conv 1x1, wide": (1152, 320, 1, 1, 8),
    "dense": (320, 640, 1, 1, 12),
}


of_rank_4 = lambda v: np.reshape(v, (1, 1, 1, -1))
of_pair = lambda grid: (np.reshape(grid[0], (1, 1)), np.int32(grid[1]).reshape(1, 1))
of_grid = lambda grid: (of_rank_4(grid[0]), of_rank_4(np.int32(grid[1])))


def sums(x, w, stride, pads, is_depthwise):
    """The accumulators of NHWC x without zero point and HWIO w, by exact sums in float64."""
    x = np.pad(x, ((0, 0), pads, pads, (0, 0)))
    k, n = w.shape[0], (x.shape[1] - w.shape[0]) // stride + 1
    total = 0
    for i in range(k):
        for j in range(k):
            v = x[:, i : i + stride * (n - 1) + 1 : stride, j : j + stride * (n - 1) + 1 : stride].astype(D)
            total = total + (v * w[i, j, 0] if is_depthwise else v @ w[i, j].astype(D))
    return total.astype(np.int64)


class Layer:
    """Random integers of a layer, with scales at random, or near ties: s_x * s_w / s_y is nearly 1 / (2 odd)."""

    def __init__(self, name, near_ties, relu6, seed):
        rng = np.random.default_rng(seed)
        self.name, (n_in, n_out, k, self.stride, height) = name, LAYERS[name]
        self.is_depthwise, self.is_dense = name.startswith("depthwise"), name == "dense"
        self.x = rng.integers(-128, 128, (1, height, height, n_in))
        self.w = rng.integers(-127, 128, (k, k, 1 if self.is_depthwise else n_in, n_out))
        self.bias = rng.integers(-20000, 20000, n_out)
        missing = max((-(-height // self.stride) - 1) * self.stride + k - height, 0)
        self.pads, x_zero = (missing // 2, missing - missing // 2), int(rng.integers(-128, 128))
        self.acc = sums(self.x - x_zero, self.w, self.stride, self.pads, self.is_depthwise) + self.bias
        x_scale, spread = F(rng.uniform(0.005, 0.05)), self.acc.std()
        if near_ties:
            y_scale = F(rng.uniform(0.01, 0.1))
            odd = 2 * rng.integers(int(spread / 127) + 1, 2 * int(spread / 60) + 3, n_out) + 1
            self.w_scale = F(D(y_scale) / (2 * odd) / D(x_scale))
        else:
            self.w_scale = F(rng.uniform(0.001, 0.02, n_out))
            y_scale = F((self.acc * D(x_scale) * self.w_scale).std() * 4 / 127)
        self.relu6 = relu6
        self.x_grid, self.y_grid = (x_scale, x_zero), (y_scale, -128 if relu6 else int(rng.integers(-64, 64)))

    def computed(self, kernels):
        def layer(acc, x_scale, w_scale, y_grid):
            grid = Grid(*y_grid)
            limits = limits_of(grid, 0.0, 6.0) if self.relu6 else None
            return kernels.layer(acc, (x_scale, w_scale), grid, limits, self.is_dense)

        return np.asarray(
            jax.jit(layer)(
                self.acc.astype(np.int32), *map(of_rank_4, (self.x_grid[0], self.w_scale)), of_grid(self.y_grid)
            )
        )

    def in_onnx(self):
        dtype = np.uint8
        above = lambda v: (np.asarray(v) + 128).astype(dtype)
        grids = {"xs": self.x_grid[0], "xz": above(self.x_grid[1]), "ys": self.y_grid[0], "yz": above(self.y_grid[1])}
        grids |= {"ws": self.w_scale, "wz": np.zeros(self.w_scale.shape, np.int8), "b": self.bias.astype(np.int32)}
        order = ["x", "xs", "xz", "w", "ws", "wz"]
        if self.is_dense:
            rows, w = above(self.x.reshape(-1, self.x.shape[-1])), self.w[0, 0].astype(np.int8)
            order = [*order, "b", "ys", "yz"]
            y = onnx_op("QGemm", {"x": rows}, grids | {"w": w}, order, "com.microsoft")
            return y.reshape(self.acc.shape).astype(int) - 128
        w = self.w.transpose(3, 2, 0, 1).astype(np.int8)
        pads = [self.pads[0], self.pads[0], self.pads[1], self.pads[1]]
        group = self.x.shape[-1] if self.is_depthwise else 1
        images = {"x": above(self.x.transpose(0, 3, 1, 2))}
        order, attributes = [*order, "ys", "yz", "b"], {"strides": [self.stride] * 2, "pads": pads, "group": group}
        y = onnx_op("QLinearConv", images, grids | {"w": w}, order, **attributes)
        return y.transpose(0, 2, 3, 1).astype(int) - 128

    def in_litert(self, kind):
        from ai_edge_litert import schema_py_generated as schema

        n_in, n_out = self.x.shape[-1], self.w.shape[-1]
        name = "DepthwiseConv2D" if self.is_depthwise else "FullyConnected" if self.is_dense else "Conv2D"
        options = getattr(schema, f"{name}OptionsT")()
        if not self.is_dense:
            options.strideW = options.strideH = self.stride
            options.dilationWFactor = options.dilationHFactor = 1
            options.padding = schema.Padding.SAME
        if self.is_depthwise:
            options.depthMultiplier = 1
        options.fusedActivationFunction = 3 if self.relu6 else 0
        op, version = {"DepthwiseConv2D": ("DEPTHWISE_CONV_2D", 6), "FullyConnected": ("FULLY_CONNECTED", 12)}.get(
            name, ("CONV_2D", 5)
        )
        w = self.w.transpose(2, 0, 1, 3) if self.is_depthwise else self.w.transpose(3, 0, 1, 2)
        x, y_shape = self.x, self.acc.shape
        if self.is_dense:
            w, x, y_shape = w.reshape(n_out, n_in), x.reshape(-1, n_in), self.acc.reshape(-1, n_out).shape
        tensors = {
            "x": Tensor(x.shape, "i1", *self.x_grid),
            "w": Tensor(w.shape, "i1", self.w_scale, 0, 3 if self.is_depthwise else 0, w),
            "b": Tensor((n_out,), "i4", F(self.x_grid[0] * self.w_scale), data=self.bias),
            "y": Tensor(y_shape, "i1", *self.y_grid),
        }
        content = litert_op(op, options, version, ["x", "w", "b"], tensors)
        y, ops = run_litert(content, [x.astype(np.int8)], kind)
        assert (kind == "litert") == ("DELEGATE" in ops)
        return y.reshape(self.acc.shape)


@functools.cache
def layers(name):
    return [Layer(name, ties, relu6, seed) for seed, (ties, relu6) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)])]


def differ(compared, runtime, op, got, want):
    compared(runtime, op, got.size, int((got != want).sum()))
    assert int((got != want).sum()) == 0


@pytest.mark.parametrize("name", LAYERS)
def test_onnx_layers(name, compared):
    pytest.importorskip("onnxruntime")
    for layer in layers(name):
        if not layer.relu6 or layer.y_grid[0] * 255 <= 6:  # else a Clip would stay beside QLinearConv
            differ(compared, "onnxruntime", "layers", layer.computed(OnnxRuntime()), layer.in_onnx())


@pytest.mark.parametrize("kind", LITERT)
@pytest.mark.parametrize("name", LAYERS)
def test_litert_layers(name, kind, compared):
    pytest.importorskip("ai_edge_litert")
    for layer in layers(name):
        differ(compared, kind, "layers", layer.computed(LITERT[kind]), layer.in_litert(kind))


def summands(near_ties, seed, n=1 << 16):
    """Integers of two arrays, and three grids, for sums."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-128, 128, (2, 1, 8, 8, n // 64)).astype(np.int32)
    zeros, y_scale = rng.integers(-128, 128, 3), F(rng.uniform(0.05, 0.2))
    if near_ties:
        parts = 2 * rng.integers(1, 8, 2) + rng.integers(0, 2, 2)
        parts[1] = 2 * parts[0] if rng.random() < 0.5 else parts[1]
        scales = [F(D(y_scale) / part) for part in parts]
    else:
        scales = F(rng.uniform(0.01, 0.1, 2))
    return a, b, [(s, np.int32(z)) for s, z in zip([*scales, y_scale], zeros, strict=True)]


def added(kernels, a, b, grids):
    add = jax.jit(lambda a, b, grids: kernels.add(a, Grid(*grids[0]), b, Grid(*grids[1]), Grid(*grids[2]), None))
    return np.asarray(add(a, b, [*map(of_grid, grids)]))


@pytest.mark.parametrize("seed", range(8))
def test_onnx_sums(seed, compared):
    pytest.importorskip("onnxruntime")
    a, b, grids = summands(seed % 3 > 0, seed)
    constants = {}
    for name, (scale, zero) in zip("aby", grids, strict=True):
        constants |= {f"{name}s": scale, f"{name}z": np.uint8(zero + 128)}
    order = ["a", "as", "az", "b", "bs", "bz", "ys", "yz"]
    y = onnx_op("QLinearAdd", {"a": np.uint8(a + 128), "b": np.uint8(b + 128)}, constants, order, "com.microsoft")
    differ(compared, "onnxruntime", "sums", added(OnnxRuntime(), a, b, grids), y.astype(int) - 128)


@pytest.mark.parametrize("kind", LITERT)
@pytest.mark.parametrize("seed", range(8))
def test_litert_sums(seed, kind, compared):
    schema = pytest.importorskip("ai_edge_litert.schema_py_generated")
    a, b, grids = summands(seed % 3 > 0, seed)
    tensors = {name: Tensor(a.shape, "i1", *grid) for name, grid in zip("aby", grids, strict=True)}
    content = litert_op("ADD", schema.AddOptionsT(), 2, ["a", "b"], tensors)
    y, _ = run_litert(content, [a.astype(np.int8), b.astype(np.int8)], kind)
    differ(compared, kind, "sums", added(LITERT[kind], a, b, grids), y)


HEIGHTS = (7, 6, 5, 4, 3, 2)


def images(height, ties, seed):
    """Integers, their grid, and the grid of their means."""
    rng = np.random.default_rng([seed, height])
    x = rng.integers(-128, 128, (16, height, height, 64)).astype(np.int32)
    x_grid, n = (F(rng.uniform(0.01, 0.05)), rng.integers(-64, 64, dtype=np.int32)), height**2
    ratio = 2 * (2 * rng.integers(n // 4 + 1, n + 2) + 1) / n if ties else rng.uniform(0.2, 0.9)
    return x, x_grid, (F(D(x_grid[0]) * ratio), rng.integers(-64, 64, dtype=np.int32))


def averaged(kernels, x, x_grid, y_grid):
    return np.asarray(
        jax.jit(lambda x, *of: kernels.mean(x, (1, 2), *(Grid(*v) for v in of)))(x, of_pair(x_grid), of_pair(y_grid))
    )


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("height", HEIGHTS)
def test_onnx_means(height, ties, compared):
    pytest.importorskip("onnxruntime")
    x, x_grid, y_grid = images(height, ties, 0)
    want = averaged(OnnxRuntime(), x, x_grid, y_grid)
    constants = {"xs": x_grid[0], "xz": np.int8(x_grid[1]), "ys": y_grid[0], "yz": np.int8(y_grid[1])}
    for op, attributes in {
        "QLinearGlobalAveragePool": {},
        "QLinearAveragePool": {"kernel_shape": [height] * 2},
    }.items():
        inputs = {"x": x.transpose(0, 3, 1, 2).astype(np.int8)}
        y = onnx_op(op, inputs, constants, ["x", *constants], "com.microsoft", **attributes)
        differ(compared, "onnxruntime", "means", want, y.reshape(want.shape))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("kind", LITERT)
@pytest.mark.parametrize("height", HEIGHTS)
def test_litert_means(height, kind, ties, compared):
    schema = pytest.importorskip("ai_edge_litert.schema_py_generated")
    x, x_grid, y_grid = images(height, ties, 0)
    y_grid = x_grid if "mean" in LITERT[kind].tied else y_grid
    want = averaged(LITERT[kind], x, x_grid, y_grid)
    options = schema.ReducerOptionsT()
    options.keepDims = False
    tensors = {"x": Tensor(x.shape, "i1", *x_grid), "axes": Tensor((2,), "i4", data=[1, 2])}
    content = litert_op("MEAN", options, 2, ["x", "axes"], tensors | {"y": Tensor(want.shape, "i1", *y_grid)})
    y, _ = run_litert(content, [x.astype(np.int8)], kind)
    differ(compared, kind, "means", want, y)


@pytest.mark.parametrize("kind", LITERT)
@pytest.mark.parametrize("height", HEIGHTS)
def test_litert_average_pools(height, kind, compared):
    schema = pytest.importorskip("ai_edge_litert.schema_py_generated")
    x, grid, _ = images(height, False, 1)
    options = schema.Pool2DOptionsT()
    options.padding = schema.Padding.VALID
    options.strideW = options.strideH = options.filterWidth = options.filterHeight = height
    tensors = {"x": Tensor(x.shape, "i1", *grid), "y": Tensor((16, 1, 1, 64), "i1", *grid)}
    y, _ = run_litert(litert_op("AVERAGE_POOL_2D", options, 2, ["x"], tensors), [x.astype(np.int8)], kind)
    of = lambda x, grid: LITERT[kind].average(x.sum((1, 2)), height**2, Grid(*grid), Grid(*grid))
    differ(compared, kind, "average pools", np.asarray(jax.jit(of)(x, of_pair(grid))), y.reshape(16, 64))
