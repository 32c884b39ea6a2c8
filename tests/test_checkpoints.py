# SPDX-License-Identifier: Apache-2.0
"""Files of quantized models: blocks of GGUF and layouts of folders by hand, and files that are damaged or lie."""

import json
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from lanes import by_default

import jaxquant as jq
from jaxquant import PerBlock, PerChannel, QArray, QuantSpec, Rule, activation_spec, quantize_fn
from jaxquant._checkpoints._ggml import BLOCKS
from jaxquant._checkpoints._ggml_arrays import qarray_of, type_of
from jaxquant.checkpoints import GEMMA3, LLAMA, QWEN3, gguf_spec, read, write

F, H, U1 = np.float32, np.float16, np.uint8
RNG = np.random.default_rng(0)
E2M1 = np.arange(16, dtype=U1).view(ml_dtypes.float4_e2m1fn).astype(F)


def real(q):
    return np.asarray(jq.dequantize(q), F)


# ---- GGUF.

F32, F16, Q4_0, Q4_K = 0, 1, 2, 12


def text(s):
    return struct.pack("<Q", len(s.encode())) + s.encode()


def gguf_file(tensors, metadata=(), version=3, align=32):
    """The bytes of a file: tensors are (name, shape, type, content), metadata is bytes of keys with their values."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + b"".join(metadata)
    data = b""
    for name, shape, kind, content in tensors:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += text(name) + sizes + struct.pack("<IQ", kind, len(data))
        data += content + bytes(-len(content) % align)
    return head + bytes(-len(head) % align) + data


def in_q4_0():
    """Two rows of two blocks: bytes, and what they mean."""
    codes, d = RNG.integers(0, 16, (2, 2, 32)), np.array([[0.5, -0.25], [2.0, 1.5]], H)
    content = b"".join(
        d[i, j].tobytes() + bytes(int(a) | int(b) << 4 for a, b in zip(codes[i, j, :16], codes[i, j, 16:], strict=True))
        for i in range(2) for j in range(2)
    )  # fmt: skip
    return content, ((codes - 8) * d[..., None].astype(F)).reshape(2, 64)


def in_q4_k():
    """A block of 256: eight groups of 32, with scales and minimums of 6 bits."""
    codes, scales, minimums = RNG.integers(0, 16, (8, 32)), RNG.integers(0, 64, 8), RNG.integers(0, 64, 8)
    low = [int(s) | int(t) >> 4 << 6 for s, t in zip(scales[:4], scales[4:], strict=True)]
    mid = [int(s) | int(t) >> 4 << 6 for s, t in zip(minimums[:4], minimums[4:], strict=True)]
    high = [int(s) & 15 | (int(m) & 15) << 4 for s, m in zip(scales[4:], minimums[4:], strict=True)]
    pairs = codes.reshape(4, 2, 32)
    qs = (pairs[:, 0] | pairs[:, 1] << 4).astype(U1).tobytes()
    d, dmin = H(0.125), H(0.0625)
    content = d.tobytes() + dmin.tobytes() + bytes(low + mid + high) + qs
    return content, (codes * (F(d) * scales)[:, None] - (F(dmin) * minimums)[:, None]).reshape(1, 256).astype(F)


def small_file():
    (blocks, _), x = in_q4_0(), np.arange(6, dtype=F)
    keys = [text("general.alignment") + struct.pack("<II", 4, 32)]
    keys += [text("names") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("ß")]
    keys += [text("numbers") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3), text("yes") + struct.pack("<I?", 7, True)]
    return gguf_file([("w", (2, 64), Q4_0, blocks), ("x", (2, 3), F32, x.tobytes())], keys)


@pytest.fixture
def file(tmp_path):
    def put(content):
        (tmp_path / "m.gguf").write_bytes(content)
        return tmp_path / "m.gguf"

    return put


def test_blocks_mean_what_they_say_by_hand(file):
    (q4_0, of_q4_0), (q4_k, of_q4_k) = in_q4_0(), in_q4_k()
    halves = np.arange(4, dtype=H)
    tensors = ("a", (2, 64), Q4_0, q4_0), ("b", (1, 256), Q4_K, q4_k), ("c", (4,), F16, halves.tobytes())
    found = read(file(gguf_file(tensors)))
    assert (real(found["a"]) == of_q4_0).all()
    assert (real(found["b"]) == of_q4_k).all()
    assert found["c"].dtype == H
    assert found["a"].spec == gguf_spec("Q4_0")
    assert found["b"].spec == gguf_spec("Q4_K")
    assert found["a"].nbytes <= 64 + 4 * (2 + 1)  # 4 bits stay 4 bits
    assert [type_of(found[name]) for name in "ab"] == ["Q4_0", "Q4_K"]


def test_metadata_and_names_are_those_of_the_file(file):
    found = read(file(small_file()))
    assert list(found) == ["w", "x"]
    assert found.config["names"] == ["a", "ß"]
    assert found.config["numbers"].tolist() == [1, 2, 3]
    assert found.config["yes"] is True
    np.testing.assert_array_equal(found["x"], np.arange(6).reshape(2, 3))
    with pytest.raises(KeyError):
        found["y"]


def replaced(at, new):
    def of(content):
        i = at if isinstance(at, int) else content.index(at) + len(at)
        return content[:i] + new + content[i + len(new) :]

    return of


BLOCK = in_q4_0()[0]
DAMAGED = {
    "empty": (lambda _: b"", "the magic number should take 4 bytes"),
    "magic": (replaced(0, b"GGML"), "begins with b'GGML'"),
    "version": (replaced(4, struct.pack("<I", 4)), "version 2 or 3, little-endian, got 4"),
    "tensors": (replaced(8, struct.pack("<Q", 2**60)), "the number of tensors is 1,152,921,504,606,846,976"),
    "keys": (replaced(16, struct.pack("<Q", 2**40)), "the number of keys is"),
    "text": (replaced(24, struct.pack("<Q", 2**50)), "a key should take"),
    "type of a key": (replaced(b"yes", struct.pack("<I", 99)), "yes has type 99"),
    "array": (replaced(b"numbers" + struct.pack("<II", 9, 6), struct.pack("<Q", 2**61)), "numbers is"),
    "twice": (lambda _: gguf_file([], [text("k") + struct.pack("<II", 4, 1)] * 2), "'k' is there twice"),
    "names twice": (lambda _: gguf_file([("w", (1,), F32, bytes(4))] * 2), "is there twice"),
    "alignment": (replaced(b"alignment" + struct.pack("<I", 4), struct.pack("<I", 3)), "a multiple of 8, got 3"),
    "type": (lambda _: gguf_file([("w", (1,), 77, bytes(4))]), "'w' is of type 77"),
    "rank": (lambda _: gguf_file([("w", (1,) * 5, F32, bytes(4))]), "5 axes"),
    "size": (lambda _: gguf_file([("w", (2**62,), F32, bytes(4))]), "should be 18,446,744,073,709,551,616 bytes"),
    "rows": (lambda _: gguf_file([("w", (2, 48), Q4_0, BLOCK)]), "whose rows are multiples of 32"),
    "cut": (lambda content: content[:-40], "of a file of"),
    "more": (lambda content: content + bytes(64), "64 bytes behind its last tensor"),
    "offset": (replaced(b"x" + struct.pack("<IQQI", 2, 3, 2, F32), struct.pack("<Q", 32)), "'x' should begin at byte"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_say_what_is_wrong(name, file):
    change, words = DAMAGED[name]
    with pytest.raises(ValueError, match=words) as caught:
        read(file(change(small_file())))
    assert "m.gguf" in str(caught.value)


def test_a_family_has_no_more_layers_than_tensors(file):
    said = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    numbers = {key: 1 for key in LLAMA.settings if key not in LLAMA.defaults} | {"block_count": 2**31}
    said += [text(f"llama.{key}") + struct.pack("<II", 4, n) for key, n in numbers.items()]
    path = file(gguf_file([("x", (1,), F32, bytes(4))], said))
    assert list(read(path)) == ["x"]
    with pytest.raises(ValueError, match="1 tensors says that it has 2147483648 layers"):
        read(path, LLAMA)
    with pytest.raises(ValueError, match="of the architecture 'qwen3', got 'llama'"):
        read(path, QWEN3)


def same_or_refused(content, path, changed):
    """Whether a file with a byte changed is read; what has its name and type then has its content."""
    want = read(path)
    path.with_name("d.gguf").write_bytes(changed)
    try:
        found = read(path.with_name("d.gguf"))
    except ValueError:
        return False
    for name in set(found) & set(want):
        a, b = found._places[name], want._places[name]
        assert a.type != b.type or a == b
    return True


def damaged(n, path):
    content = small_file()
    path.write_bytes(content)
    head = content.index(b"x" + struct.pack("<I", 2)) + 33
    counts = [0, 0]
    for _ in range(n):
        i, bit = int(RNG.integers(head)), int(RNG.integers(8))
        new = bytes([content[i] ^ 1 << bit])
        changed = (
            content[:i] + new + content[i + 1 :] if RNG.random() < 0.8 else content[: int(RNG.integers(len(content)))]
        )
        counts[same_or_refused(content, path, changed)] += 1
    assert counts[0] > n // 4


def test_damaged_headers_give_no_other_data(tmp_path):
    damaged(200, tmp_path / "m.gguf")


@pytest.mark.slow
def test_many_damaged_headers_give_no_other_data(tmp_path):
    damaged(5000, tmp_path / "m.gguf")


def numbers(v):
    return [np.asarray(part) for part in jax.tree.leaves(v)]


def assert_same(a, b):
    assert type(a) is type(b)
    assert getattr(a, "spec", None) == getattr(b, "spec", None)
    assert all((x == y).all() and x.dtype == y.dtype for x, y in zip(numbers(a), numbers(b), strict=True))


def random_blocks(name, rows, columns):
    """A QArray of random bytes, with scales that are numbers."""
    kind = BLOCKS[name]
    content = RNG.integers(0, 256, (rows, columns // kind.size * kind.dtype.itemsize), U1).view(kind.dtype)
    for field in {"d", "m", "dmin"} & set(kind.dtype.names):
        content[field] = RNG.normal(size=content.shape)
    if "e" in kind.dtype.names:
        content["e"] = RNG.integers(1, 255, content.shape)
    return qarray_of(name, kind.read(content.view(U1).reshape(rows, -1)))


CONFIG = {
    "max_position_embeddings": 64, "hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "vocab_size": 8,
    "tie_word_embeddings": True, "head_dim": 64,
}  # fmt: skip
OF_GEMMA = {"sliding_window": 32}


@pytest.mark.parametrize("family", [LLAMA, GEMMA3], ids=["llama", "gemma3"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_file_of_each_type_is_read_as_it_was_written(name, family, tmp_path):
    pytest.importorskip("gguf")
    shapes = {"q_proj": 256, "k_proj": 128, "v_proj": 128, "o_proj": 256, "gate_proj": 512, "up_proj": 512}
    tensors = {"model.embed_tokens.weight": jnp.asarray(RNG.normal(size=(8, 256)), jnp.bfloat16)}
    for own in set(family.names(1)) - {*tensors, "lm_head.weight"}:
        rows = next((n for part, n in shapes.items() if part in own), None)
        tensors[own] = jnp.asarray(RNG.integers(-8, 8, 256) / 8, jnp.float32) if "norm" in own else random_blocks(
            name, rows or 256, 256 if rows else 512
        )  # fmt: skip
    said = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [0.5, 1.0], "yes": True}
    path = tmp_path / "m.gguf"
    write(path, tensors, CONFIG | OF_GEMMA if family is GEMMA3 else CONFIG, family, metadata=said)
    found = read(path, family)
    assert set(found) == set(tensors)
    assert len(found) == len(tensors)
    for own, v in tensors.items():
        assert_same(found[own], v)
    for key in ("hidden_size", "num_key_value_heads", "tie_word_embeddings", "rope_theta"):
        assert found.config[key] == CONFIG[key]
    whole = read(path)
    assert whole.config["tokenizer.ggml.tokens"] == ["a", "b"]
    assert whole.config["yes"] is True
    norm, order = whole.in_order("output_norm.weight")
    assert order is None
    assert (np.asarray(norm) == np.asarray(tensors["model.norm.weight"]) + F(family is GEMMA3)).all()
    assert len(whole) == len(tensors)
    assert not list(tmp_path.glob("m.*.gguf"))  # which was unfinished


def test_what_a_gguf_file_does_not_hold_is_not_written(tmp_path):
    pytest.importorskip("gguf")
    family = LLAMA._replace(tensors={"w": "w"})
    for tensors, metadata, words in (
        ({"w": np.ones((2, 32), np.int8)}, {}, "At 'w': expected a QArray, or an array in float32"),
        ({"w": jq.quantize(np.ones((2, 32), F), QuantSpec(bits=3))}, {}, "on the lattice of a type of GGUF"),
        ({"w": np.ones(2, F)}, {"key": 1j}, "`metadata` at 'key' must be a bool"),
        ({"v": np.ones(2, F), "w": np.ones(2, F)}, {}, "'v' is no tensor of 'llama'"),
    ):
        with pytest.raises(ValueError, match=words):
            write(tmp_path / "m.gguf", tensors, CONFIG, family, metadata=metadata)
    assert not list(tmp_path.iterdir())


# ---- Folders.

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "int8": "I8"}
NAMES |= {"uint8": "U8", "int32": "I32", "int64": "I64"}


def shard(path, tensors, twice=False):
    header, data = [], b""
    for name, v in tensors.items():
        v = np.ascontiguousarray(v)
        said = {"dtype": NAMES[v.dtype.name], "shape": v.shape, "data_offsets": [len(data), len(data) + v.nbytes]}
        header += [f"{json.dumps(name)}: {json.dumps(said)}"] * (1 + twice)
        data += v.tobytes()
    head = ("{" + ", ".join(header) + "}").encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def folder(path, tensors, quantization=None):
    shard(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization} if quantization else {}))
    return path


def words(v, axis=-1):
    """Integers of 4 bits as int32 words along an axis, the first in the lowest bits."""
    v = np.moveaxis(v.astype(np.uint32), axis, -1)
    v = v.reshape(*v.shape[:-1], -1, 8)
    return np.moveaxis(np.bitwise_or.reduce(v << np.arange(0, 32, 4, dtype=np.uint32), -1).view(np.int32), -1, axis)


def nibbles(v):
    return (v[..., ::2] | v[..., 1::2] << 4).astype(U1)


ROWS, COLUMNS = 16, 64
CODES = RNG.integers(0, 16, (ROWS, COLUMNS))
ZEROS = RNG.integers(1, 16, (ROWS, 2))
SCALES = (RNG.random((ROWS, 2)) + 0.5).astype(H)
INTEGERS = RNG.integers(-128, 128, (ROWS, COLUMNS)).astype(np.int8)
FLOATS = RNG.normal(size=(200, 300)).astype(ml_dtypes.float8_e4m3fn)
OF_GROUPS = lambda v: np.repeat(v.astype(F), COLUMNS // v.shape[1], 1)
AFFINE = ((CODES - OF_GROUPS(ZEROS)) * OF_GROUPS(SCALES)).astype(H).astype(F)
TILES = RNG.random((2, 3)).astype(F)
TILED = FLOATS.astype(F) * np.repeat(np.repeat(TILES, 128, 0), 128, 1)[:200, :300]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
ORDER = RNG.permutation(COLUMNS)


def packed(bits, type="int", **said):
    weights = {"num_bits": bits, "type": type, "symmetric": True} | said
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def shuffled(v):
    return words(v.T.reshape(v.shape[1], -1, 8)[..., AWQ_ORDER].reshape(v.shape[::-1]))


def in_gptq(version, order=None):
    codes = CODES if order is None else CODES[:, np.argsort(order)]
    group = np.arange(COLUMNS) // 32
    g_idx = group if order is None else group[np.argsort(order)]
    parts = {"qweight": words(codes.T, 0), "qzeros": words((ZEROS.T - (version == 1)) & 15), "scales": SCALES.T}
    return parts | {"g_idx": g_idx.astype(np.int32)}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
MIDDLE = words(np.full(ZEROS.T.shape, 7))
SHAPE = np.array([ROWS, COLUMNS])
E4M3_SCALES = (RNG.integers(1, 100, (ROWS, COLUMNS // 16))).astype(ml_dtypes.float8_e4m3fn)
EXPONENTS = RNG.integers(100, 130, (ROWS, 2)).astype(U1)
BY_CODE = E2M1[CODES]
TWO = RNG.integers(0, 4, (ROWS, COLUMNS))
IN_TWO = np.bitwise_or.reduce(
    TWO.T.reshape(-1, 16, ROWS).astype(np.uint32) << np.arange(0, 32, 2, dtype=np.uint32)[:, None], 1
)
NVFP4 = {"weight_packed": nibbles(CODES), "weight_scale": E4M3_SCALES}
IN_NVFP4 = lambda g: BY_CODE * np.repeat(E4M3_SCALES.astype(F) / F(g), 16, 1)
IN_MXFP4 = BY_CODE * np.repeat(2.0 ** (EXPONENTS.astype(F) - 127), 32, 1)
IN_PACK = {"weight_packed": words(CODES), "weight_scale": SCALES, "weight_shape": SHAPE}
SYMMETRIC = ((CODES - 8) * OF_GROUPS(SCALES)).astype(H)
IN_AWQ = {"qweight": shuffled(CODES), "qzeros": shuffled(ZEROS), "scales": SCALES.T}
IN_MX = {"weight_packed": nibbles(CODES), "weight_scale": EXPONENTS}
IN_INT8 = {"weight": INTEGERS, "weight_scale": SCALES[:, :1].astype(F)}
IN_FLOAT8 = {"weight": FLOATS, "weight_scale": TILES}
with_global = lambda g: NVFP4 | {"weight_global_scale": np.array([g], F)}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FP4 = packed(4, "float")
IN_GPTQ_2 = {"qweight": IN_TWO.view(np.int32), "scales": SCALES.T, "qzeros": np.full((2, 1), 0x55555555, np.int32)}
LAYOUTS = {  # what the config says, parts, real values
    "pack-quantized": (packed(4), IN_PACK, SYMMETRIC),
    "pack-quantized, affine": (packed(4, symmetric=False), IN_PACK | {"weight_zero_point": words(ZEROS, 0)}, AFFINE),
    "int-quantized": (packed(8), IN_INT8, INTEGERS * IN_INT8["weight_scale"]),
    "float-quantized": (packed(8, "float", block_structure=[128, 128]), IN_FLOAT8, TILED),
    "of a tensor": (packed(8, "float"), IN_FLOAT8 | {"weight_scale": TILES[0, :1]}, FLOATS.astype(F) * TILES[0, 0]),
    "DeepSeek": (DEEPSEEK, {"weight": FLOATS, "weight_scale_inv": TILES}, TILED),
    "mxfp4": (FP4, IN_MX, IN_MXFP4),
    "nvfp4": (FP4, with_global(1234.5), IN_NVFP4(1234.5)),
    "nvfp4, a power of two": (FP4, with_global(1024), IN_NVFP4(1024)),
    "awq": (AWQ, IN_AWQ, AFFINE),
    "gptq": (GPTQ, in_gptq(1), AFFINE),
    "gptq, version 2": (GPTQ | {"checkpoint_format": "gptq_v2"}, in_gptq(2), AFFINE),
    "gptq, 2 bits": (GPTQ | {"bits": 2}, IN_GPTQ_2, ((TWO - 2) * OF_GROUPS(SCALES)).astype(H)),
    "gptq, symmetric": (GPTQ, in_gptq(1) | {"qzeros": MIDDLE}, SYMMETRIC),
}


@by_default("pack-quantized, affine", "float-quantized", "nvfp4", "awq", "gptq", "gptq, symmetric")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_mean_what_they_say_by_hand(name, tmp_path):
    said, parts, want = LAYOUTS[name]
    bias = np.ones(ROWS, F)
    tensors = {f"a.w.{part}": v for part, v in parts.items()} | {"a.w.bias": bias, "head.weight": np.ones((2, 2), F)}
    found = read(folder(tmp_path, tensors, said))
    assert set(found) == {"a.w.weight", "a.w.bias", "head.weight"}
    q = found["a.w.weight"]
    assert isinstance(q, QArray)
    assert (real(q) == np.asarray(want, F)).all()
    assert isinstance(found["head.weight"], jnp.ndarray)


def test_weights_are_as_small_as_in_the_file(tmp_path):
    of = lambda name: read(folder(tmp_path, {f"w.{part}": v for part, v in LAYOUTS[name][1].items()}, LAYOUTS[name][0]))
    for name in ("pack-quantized", "gptq, symmetric", "mxfp4"):
        assert of(name)["w.weight"].nbytes <= CODES.size / 2 + 3 * SCALES.size, name
    assert of("nvfp4, a power of two")["w.weight"].spec.scale_dtype == "float8_e4m3fn"
    assert of("nvfp4")["w.weight"].spec.scale_dtype == "float32"


def test_what_jax_does_not_hold_is_not_cast(tmp_path):
    found = read(folder(tmp_path, {"ids": np.arange(3), "w": np.ones(2, F)}))
    assert found["w"].dtype == F
    with pytest.raises(ValueError, match="At 'ids': expected an array that jax holds, got int64"):
        found["ids"]


def test_act_order_is_asked_for(tmp_path):
    tensors = {f"w.{part}": v for part, v in in_gptq(1, ORDER).items()}
    found = read(folder(tmp_path, tensors, GPTQ | {"desc_act": True}))
    with pytest.raises(ValueError, match="Take weight, order = checkpoint"):
        found["w.weight"]
    q, order = found.in_order("w.weight")
    assert order is not None
    assert (real(q) == AFFINE[:, np.argsort(ORDER)][:, np.asarray(order)]).all()


def test_experts_lie_as_in_float(tmp_path):
    codes, exponents = RNG.integers(0, 16, (2, 8, 64)), RNG.integers(120, 130, (2, 8, 2)).astype(U1)
    tensors = {"e_blocks": nibbles(codes).reshape(2, 8, 2, 16), "e_scales": exponents}
    q = read(folder(tmp_path, tensors, {"quant_method": "mxfp4"}))["e"]
    want = E2M1[codes] * np.repeat(2.0 ** (exponents.astype(F) - 127), 32, -1)
    assert (real(q) == want.swapaxes(1, 2)).all()


LIES = {  # a config, parts, words
    "method": ({"quant_method": "bitsandbytes"}, IN_PACK, "`quant_method` must be one of compressed-tensors, awq"),
    "bits": (packed(8), IN_PACK, "its tensors are int of 4 bits"),
    "zero points": (packed(4, symmetric=False), IN_PACK, "bits without zero points, and `quantization_config` says"),
    "groups": (packed(4), IN_PACK | {"weight_scale": SCALES[:-1]}, "scales of shape"),
    "shape": (packed(4), IN_PACK | {"weight_shape": np.array([ROWS, 9])}, "holds no integers of 2, 4 or 8 bits"),
    "index": (
        GPTQ,
        in_gptq(1) | {"g_idx": np.zeros(COLUMNS, np.int32)},
        "a group index that has not 32 of 64 inputs in each of 2 groups",
    ),
    "size": (GPTQ | {"group_size": 33}, in_gptq(1), "a group index that has not 33 of 64 inputs"),
    "words": (GPTQ, in_gptq(1) | {"qzeros": MIDDLE[:, :1]}, "expected '.qzeros' of shape"),
    "no scales": (packed(4), {"weight_packed": IN_PACK["weight_packed"]}, "is there without w.weight_scale"),
    "no scale": (packed(8), {"weight": INTEGERS}, "is of int8, and has no scale"),
    "empty scales": (packed(4), IN_PACK | {"weight_scale": SCALES[:, :0]}, "do not fit"),
    "nothing": ({"quant_method": "compressed-tensors", "config_groups": [1]}, IN_PACK, "no `config_groups`"),
    "awq": (AWQ | {"version": "gemv"}, IN_AWQ, "version='gemv'"),
    "gptq": (GPTQ | {"bits": 3}, in_gptq(1), "got bits=3"),
    "floats": (FP4, {"weight": SCALES, "weight_scale": SCALES}, "a '.weight' of int8 or float8_e4m3fn"),
    "packed": (packed(4), IN_PACK | {"weight_packed": SCALES}, "'.weight_packed' of int32"),
    "codes": ({"quant_method": "mxfp4"}, {"e_blocks": CODES, "e_scales": CODES}, "'_blocks' of uint8"),
    "zeros": (
        packed(4, symmetric=False),
        IN_PACK | {"weight_zero_point": words(ZEROS, 0)[:, :1]},
        "zero points of shape",
    ),
    "float and integers": (packed(4), IN_PACK | {"weight": SCALES.astype(F)}, "is there in float and in integers"),
    "tiles": ({"quant_method": "fp8"}, LAYOUTS["DeepSeek"][1], "a `weight_block_size` of two numbers"),
}


@pytest.mark.parametrize("name", LIES)
def test_configs_that_contradict_their_tensors_raise(name, tmp_path):
    said, parts, words = LIES[name]
    path = folder(tmp_path, {f"w.{part}": v for part, v in parts.items()}, said)
    with pytest.raises(ValueError, match=words):
        dict(read(path))


def test_shards_that_do_not_fit_raise(tmp_path):
    a, b, index = tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "model.safetensors.index.json"
    with pytest.raises(FileNotFoundError):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="Pass the folder of a model"):
        read(tmp_path)
    x = np.ones(3, F)
    shard(a, {"x": x}), shard(b, {"y": x})
    said = lambda **of: index.write_text(json.dumps({"weight_map": of}))
    said(x="a.safetensors", y="b.safetensors")
    assert set(read(tmp_path)) == {"x", "y"}
    for of, words in (
        ({"x": "a.safetensors", "y": "a.safetensors"}, "'y' should be in a.safetensors"),
        ({"x": "c.safetensors"}, "lacks c.safetensors"),
        ({"x": "../a.safetensors"}, "names of files in the folder"),
    ):
        said(**of)
        with pytest.raises(ValueError, match=words):
            read(tmp_path)
    index.unlink()
    shard(b, {"x": x})
    with pytest.raises(ValueError, match="'x' is in b"):
        read(tmp_path)
    shard(b, {"y": x}, twice=True)
    with pytest.raises(ValueError, match=r"twice|duplicate"):
        read(tmp_path)
    b.write_bytes(b.read_bytes()[:-3])
    with pytest.raises(ValueError, match="no sound safetensors file"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        read(tmp_path)


@pytest.mark.slow
def test_damaged_folders_give_no_other_data(tmp_path):
    """With a bit changed in the header of its tensors, or in its config, or cut off."""
    tensors = {f"w.{part}": v for part, v in in_gptq(1).items()} | {"bias": np.arange(4, dtype=F)}
    path, config = folder(tmp_path, tensors, GPTQ) / "model.safetensors", tmp_path / "config.json"
    want = {name: numbers(v) for name, v in dict(read(tmp_path)).items()}
    refused = 0
    for _ in range(2500):
        file = path if RNG.random() < 0.7 else config
        content = file.read_bytes()
        head = 8 + int.from_bytes(content[:8], "little") if file == path else len(content)
        i, bit = int(RNG.integers(head)), int(RNG.integers(8))
        cut = RNG.random() < 0.2
        file.write_bytes(content[:i] if cut else content[:i] + bytes([content[i] ^ 1 << bit]) + content[i + 1 :])
        try:
            found = {name: numbers(v) for name, v in dict(read(tmp_path)).items()}
        except ValueError:
            refused, found = refused + 1, {}
        for name in found.keys() & want.keys():
            assert all((a == b).all() for a, b in zip(found[name], want[name], strict=True)), (file.name, i, bit, cut)
        file.write_bytes(content)
    assert refused > 1000


# ---- Written.

IN_GROUPS = QuantSpec(bits=4, narrow_range=False, granularity=PerBlock(1, 32))
W = RNG.normal(size=(ROWS, COLUMNS)).astype(F)


def test_a_folder_is_read_as_it_was_written(tmp_path):
    affine = QuantSpec(bits=4, symmetric=False, granularity=PerBlock(1, 32), scale_dtype="bfloat16")
    tensors = {"a.weight": jq.quantize(W, IN_GROUPS), "b.weight": jq.quantize(W, affine)}
    tensors |= {"c.weight": jq.quantize(W, QuantSpec(granularity=PerChannel(0))), "norm": jnp.ones(4, jnp.bfloat16)}
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "tokenizer.json").write_text("{}")
    write(tmp_path / "new", tensors, {"model_type": "llama"}, like=tmp_path / "like")
    found = read(tmp_path / "new")
    assert found.config["model_type"] == "llama"
    assert (tmp_path / "new" / "tokenizer.json").exists()
    for name in "abc":
        q, want = found[f"{name}.weight"], tensors[f"{name}.weight"]
        assert (np.asarray(q.values) == np.asarray(want.values)).all()
        assert (real(q) == np.asarray(jq.dequantize(want).astype(q.dtype), F)).all()
    assert found["norm"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="a new or an empty folder"):
        write(tmp_path / "new", tensors, {})


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4, a power of two", "float-quantized", "of a tensor"])
def test_floats_of_few_bits_are_written_as_they_were_read(name, tmp_path):
    said, parts, _ = LAYOUTS[name]
    (tmp_path / "a").mkdir()
    if name == "float-quantized":  # whose tiles are whole
        parts = {"weight": FLOATS[:128, :256], "weight_scale": TILES[:1, :2]}
    q = read(folder(tmp_path / "a", {f"w.{part}": v for part, v in parts.items()}, said))["w.weight"]
    write(tmp_path / "b", {"w.weight": q}, {})
    again = read(tmp_path / "b")
    assert len(again) == 1
    assert_same(again["w.weight"], q)


def test_what_is_on_no_lattice_is_not_written(tmp_path):
    q = quantize_fn(lambda params, x: x @ params["w"].T, [Rule("w", IN_GROUPS, activation_spec(8))])
    x = jnp.ones((2, COLUMNS))
    served = q.freeze({"w": jnp.asarray(W)}, x)["w"]
    for v, words in (
        (jq.quantize(W, QuantSpec(bits=3, granularity=PerChannel(0))), "At 'w.weight': expected signed integers of 4"),
        (jq.quantize(W, gguf_spec("Q4_0")), "At 'w.weight': expected signed integers"),
        (jq.quantize(W, jq.nvfp4_spec(1)), "Make it a power of two"),
        (
            jq.quantize(W, QuantSpec(format="float4_e2m1fn", granularity=PerBlock(1, 8))),
            "expected blocks of mxfp4_spec",
        ),
        (served, "Train with a rule without `activation`"),
        (W.astype(np.float64), "an array in float32, float16, bfloat16"),
    ):
        with pytest.raises(ValueError, match=words):
            write(tmp_path / "new", {"w.weight": v}, {})
        assert not list((tmp_path / "new").iterdir())  # so that it can be written again
    with pytest.raises(ValueError, match="on the lattice of a type of GGUF"):
        type_of(jq.quantize(W, IN_GROUPS))
    with pytest.raises(ValueError, match="`family` must be given"):
        write(tmp_path / "m.gguf", {}, {})
    with pytest.raises(ValueError, match="a name that ends in"):
        write(tmp_path / "named", {"w": jq.quantize(W, IN_GROUPS)}, {})
    with pytest.raises(ValueError, match="`family` is for a GGUF file"):
        read(tmp_path, LLAMA)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        read(tmp_path / "nothing")


def test_families_know_their_names_and_settings():
    assert LLAMA.in_gguf("model.layers.12.mlp.up_proj.weight") == "blk.12.ffn_up.weight"
    assert QWEN3.in_gguf("model.layers.0.self_attn.q_norm.weight") == "blk.0.attn_q_norm.weight"
    with pytest.raises(ValueError, match="is no tensor of 'llama'"):
        LLAMA.in_gguf("model.layers.0.self_attn.q_norm.weight")
    with pytest.raises(ValueError, match=r"lacks max_position_embeddings \(for context_length\)"):
        LLAMA.metadata({})
    of = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    settings = {key: v for key, v in CONFIG.items() if key != "rope_theta"}
    assert LLAMA.metadata(settings | of)["llama.rope.freq_base"] == 5e5
    assert LLAMA.config(LLAMA.metadata(CONFIG) | {"general.architecture": "llama"})["rope_theta"] == 1e4
    for scaled in ({"rope_scaling": {"type": "linear"}}, {"rope_parameters": {"rope_type": "llama3"}}):
        with pytest.raises(ValueError, match="which is not written"):
            LLAMA.metadata(CONFIG | scaled)
    said = {"general.architecture": "llama", "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 8.0}
    assert LLAMA.config(LLAMA.metadata(CONFIG) | said)["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    for family, key, v in (
        (LLAMA, "hidden_act", "gelu"), (LLAMA, "sliding_window", 4096), (QWEN3, "use_sliding_window", True),
        (GEMMA3, "query_pre_attn_scalar", 96), (GEMMA3, "layer_types", ["full_attention"]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"`config` has {key}=.* for which GGUF has no key"):
            family.metadata(CONFIG | (OF_GEMMA if family is GEMMA3 else {}) | {key: v})
    largest = CONFIG | {"num_hidden_layers": 62, "head_dim": 128, "query_pre_attn_scalar": 64}
    known = GEMMA3.config(GEMMA3.metadata(largest | OF_GEMMA) | {"general.architecture": "gemma3"})
    assert (known["query_pre_attn_scalar"], known["head_dim"], known["layer_types"][5]) == (64, 128, "full_attention")
    assert LLAMA.config(LLAMA.metadata(largest) | {"general.architecture": "llama"})["head_dim"] == 128
    assert LLAMA.rows("model.layers.0.self_attn.q_proj.weight", 8, {"num_attention_heads": 2}).tolist() == [
        0, 2, 1, 3, 4, 6, 5, 7,
    ]  # fmt: skip
    tensors = dict.fromkeys(set(LLAMA.names(1)) - {"lm_head.weight"}, np.ones(1, F))
    with pytest.raises(ValueError, match="no pairs of 3 heads"):
        LLAMA.rows("model.layers.0.self_attn.q_proj.weight", 8, {"num_attention_heads": 3})
    with pytest.raises(ValueError, match="lacks lm_head"):
        write("m.gguf", tensors, {"num_hidden_layers": 1}, LLAMA)
