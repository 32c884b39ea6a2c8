# SPDX-License-Identifier: Apache-2.0
"""Files of models beside the packages that own their formats: gguf, compressed-tensors, transformers.

Needs the `judges` extra; gguf alone suffices for its tests.
"""

import dataclasses
import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import PerBlock, PerChannel, QArray, QuantSpec
from jaxquant._checkpoints._ggml import BLOCKS
from jaxquant._checkpoints._ggml_arrays import numbers_of, qarray_of
from jaxquant._checkpoints._held import Values
from jaxquant.checkpoints import GEMMA3, LLAMA, QWEN2, gguf_spec, read, write

pytestmark = [pytest.mark.slow, pytest.mark.bits]
RNG = np.random.default_rng(0)


def installed(*names):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [pytest.importorskip(name, reason="needs the `judges` extra") for name in names]


# ---- GGUF.


def random_blocks(name, rows, blocks):
    """Random bytes, but for scales, which are neither infinite nor NaN nor so small that products are subnormal."""
    kind = BLOCKS[name]
    content = RNG.integers(0, 256, (rows, blocks * kind.dtype.itemsize), np.uint8).view(kind.dtype)
    for field in ("d", "m", "dmin"):
        if field in kind.dtype.names:
            content[field] = RNG.normal(size=content.shape) * 2.0 ** RNG.integers(-8, 4, content.shape)
    if "e" in kind.dtype.names:
        content["e"] = RNG.integers(2, 250, content.shape)
    return content.view(np.uint8).reshape(rows, -1)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_have_the_values_of_gguf(name):
    gguf, quants = installed("gguf", "gguf.quants")
    kind = gguf.GGMLQuantizationType[name]
    content = random_blocks(name, 16, 8)
    q = qarray_of(name, BLOCKS[name].read(content))
    assert (np.asarray(jq.dequantize(q)) == quants.dequantize(content, kind)).all()
    found, numbers = numbers_of(q)
    assert found == name
    assert (BLOCKS[name].write(numbers) == content).all()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_lattice_is_that_of_gguf(name):
    """Trained weights have the bytes of gguf's own quantizer, but where a product with its reciprocal is on a tie."""
    gguf, quants = installed("gguf", "gguf.quants")
    w = RNG.normal(size=(64, 2048)).astype(np.float32)
    w[0, :32], w[1, :32] = 0, 0.5
    q = jq.quantize(w, gguf_spec(name))
    content = BLOCKS[name].write(numbers_of(q)[1])
    theirs = quants.quantize(w, gguf.GGMLQuantizationType[name])
    (a, b), scale = (
        (BLOCKS[name].read(v) for v in (content, theirs)),
        np.asarray(jq.fit_qparams(w, gguf_spec(name)).scale),
    )
    differ = np.not_equal(*(Values(of.values, BLOCKS[name].distance).apart() for of in (a, b)))
    assert differ.sum() <= 8
    above = np.zeros_like(w) if a.minimum is None else np.repeat(w.reshape(64, -1, 32).min(-1), 32, -1)
    steps = ((w - above) / np.repeat(scale, 32, -1))[differ]
    np.testing.assert_allclose(np.abs(steps % 1 - 0.5), 0, atol=1e-4)
    same = [(x.of_groups == y.of_groups) for x, y in zip(a[1:], b[1:], strict=True) if x is not None]
    assert all((~of).sum() <= 2 for of in same)  # blocks of one value have scale 0 there, and 1 here


# ---- Folders.

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
OTHERS = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_attention_heads": 2, "head_dim": 256,
        "num_key_value_heads": 1, "tie_word_embeddings": True, "sliding_window": 64, "rope_theta": 1e6,
        "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
    },
}  # fmt: skip
FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "gemma3": GEMMA3}
TOKENS = [1, 17, 200, 45, 45, 3, 99, 254, 128, 7, 64, 33]


def weights(kind="llama"):
    of_keys, of_queries = (256, 512) if kind == "gemma3" else (128, 256)
    shapes = {"q_proj": (of_queries, 256), "k_proj": (of_keys, 256), "v_proj": (of_keys, 256)}
    shapes |= {"o_proj": (256, of_queries)}
    shapes = {f"self_attn.{name}": shape for name, shape in shapes.items()}
    shapes |= {"mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512)}
    normal = lambda *shape: RNG.normal(size=shape).astype(np.float32)
    found = {"model.embed_tokens.weight": normal(256, 256), "model.norm.weight": 1 + normal(256) / 8}
    for i in range(2):
        of = f"model.layers.{i}"
        found |= {f"{of}.{name}.weight": normal(*shape) / np.float32(shape[1] ** 0.5) for name, shape in shapes.items()}
        found |= {f"{of}.{name}layernorm.weight": 1 + normal(256) / 8 for name in ("input_", "post_attention_")}
        if kind == "qwen2":
            found |= {f"{of}.self_attn.{name}_proj.bias": normal(256 if name == "q" else 128) for name in "qkv"}
        if kind == "gemma3":
            found |= {f"{of}.{name}_feedforward_layernorm.weight": normal(256) / 8 for name in ("pre", "post")}
            found |= {f"{of}.self_attn.{name}_norm.weight": normal(256) / 8 for name in "qk"}
    if kind == "gemma3":
        return found
    return found | {"lm_head.weight": normal(256, 256) / np.float32(16)}


def linears(tensors):
    return [name for name in tensors if "_proj.weight" in name]


def in_float(tensors):
    return {name: np.asarray(jq.dequantize(v)) if isinstance(v, QArray) else v for name, v in tensors.items()}


def logits(path, **options):
    """By transformers in float32; every tensor of the model must be in the file, and no other."""
    torch, transformers = installed("torch", "transformers")
    installed("accelerate")
    transformers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, device_map="cpu", output_loading_info=True, **options
        )
        assert not any(told.values()), told
        return model(torch.tensor([TOKENS])).logits[0].numpy()


WRITTEN = {
    "4 bits in groups": QuantSpec(bits=4, narrow_range=False, granularity=PerBlock(1, 32)),
    "4 bits, float16": QuantSpec(bits=4, granularity=PerBlock(1, 64), scale_dtype="float16"),
    "8 bits of channels": QuantSpec(bits=8, granularity=PerChannel(0)),
    "float8 of channels": QuantSpec(format="float8_e4m3fn", granularity=PerChannel(0)),
    "float8 of tiles": QuantSpec(format="float8_e4m3fn", granularity=PerBlock((0, 1), (128, 128))),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_transformers_computes_with_the_weights_of_a_folder(name, tmp_path):
    tensors = weights()
    tensors |= {own: jq.quantize(tensors[own], WRITTEN[name]) for own in linears(tensors)}
    write(tmp_path / "float", in_float(tensors), CONFIG)
    write(tmp_path / "packed", tensors, CONFIG)
    want = logits(tmp_path / "float")
    assert np.abs(logits(tmp_path / "packed") - want).max() <= 1e-5 * want.std()
    again = read(tmp_path / "packed")
    for own in linears(tensors):
        real = jq.dequantize(again[own])  # in the dtype of the scales
        assert (np.asarray(real) == np.asarray(jq.dequantize(tensors[own]).astype(real.dtype))).all()


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
def test_transformers_computes_with_the_weights_of_a_gguf_file(kind, name, tmp_path):
    installed("gguf")
    tensors, config, family = weights(kind), CONFIG | OTHERS.get(kind, {}), FAMILIES[kind]
    tensors |= {own: jq.quantize(tensors[own], gguf_spec(name)) for own in linears(tensors)}
    write(tmp_path / "float", in_float(tensors), config)
    write(tmp_path / "m.gguf", tensors, config, family)
    want = logits(tmp_path / "float")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert np.abs(logits(tmp_path, gguf_file="m.gguf") - want).max() <= 1e-5 * want.std()
    again = read(tmp_path / "m.gguf", family)
    assert set(again) == set(tensors)
    norms = [own for own in tensors if own.endswith("norm.weight")]
    one = np.float32(kind == "gemma3")  # which is added before anything is computed
    assert all((np.asarray(again[own]) + one == tensors[own] + one).all() for own in norms)
    for own in linears(tensors):
        assert again[own].spec == tensors[own].spec
        assert (np.asarray(jq.dequantize(again[own])) == np.asarray(jq.dequantize(tensors[own]))).all()


INT, FLOAT = {"type": "int", "symmetric": True}, {"type": "float", "symmetric": True}
OF_GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32}
OF_CHANNELS = {"num_bits": 8, "strategy": "channel"}
OF_TILES = {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
OF_TENSOR_GROUPS = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
PACK = "pack_quantized.base:PackedQuantizationCompressor"
FLOAT8 = "naive_quantized.base:FloatQuantizationCompressor"
READ = {  # a compressor, its arguments, and what shares a scale
    "pack 4 bits": (PACK, INT | OF_GROUPS, (1, 32)),
    "pack 4 bits, affine": (PACK, INT | OF_GROUPS | {"symmetric": False}, (1, 32)),
    "pack 8 bits": (PACK, INT | OF_CHANNELS, (1, 320)),
    "int": ("naive_quantized.base:IntQuantizationCompressor", INT | OF_CHANNELS, (1, 320)),
    "float8": (FLOAT8, FLOAT | OF_CHANNELS, (1, 320)),
    "float8 tiles": (FLOAT8, FLOAT | OF_TILES, (128, 128)),
    "mxfp4": ("mxfp4.base:MXFP4PackedCompressor", FLOAT | OF_GROUPS | {"scale_dtype": "torch.uint8"}, (1, 32)),
    "nvfp4": ("nvfp4.base:NVFP4PackedCompressor", FLOAT | OF_TENSOR_GROUPS, (1, 16)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", READ)
def test_compressed_tensors_reads_the_same_values(name, dtype, tmp_path):
    """Of random scales, and of 200 rows, which tiles do not divide."""
    torch, tensors = installed("torch", "compressed_tensors.compressors")
    installed("safetensors.torch")
    import importlib

    import safetensors.torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    where, said, (rows, columns) = READ[name]
    module, kind = where.split(":")
    compressor = getattr(importlib.import_module(f"{tensors.__name__}.{module}"), kind)
    shape = 200, 320
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**said))
    of = getattr(torch, dtype)
    groups = -(-shape[0] // rows), -(-shape[1] // columns)
    state = {"weight": torch.tensor(RNG.normal(size=shape), dtype=of)}
    state["weight_scale"] = torch.tensor(np.abs(RNG.normal(size=groups)) + 0.1, dtype=of) / (1 if "4" in name else 100)
    if name == "mxfp4":
        state["weight_scale"] = 2.0 ** torch.tensor(RNG.integers(-4, 1, groups), dtype=of)
    if name == "nvfp4":
        state["weight_global_scale"] = torch.tensor([1234.5], dtype=torch.float32)
        state["weight_scale"] = (state["weight_scale"] * 1234.5).clamp(max=448).to(torch.float8_e4m3fn).to(of)
    if not said["symmetric"]:
        state["weight_zero_point"] = torch.tensor(RNG.integers(-8, 8, groups), dtype=torch.int8)
    packed = compressor.compress(dict(state), scheme)
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": said}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    safetensors.torch.save_file(
        {f"w.{key}": v.contiguous() for key, v in packed.items()}, tmp_path / "model.safetensors"
    )
    want = compressor.decompress(dict(packed), scheme)["weight"]
    q = read(tmp_path)["w.weight"]
    assert isinstance(q, QArray)
    got = np.asarray(jq.dequantize(q).astype(str(want.dtype).removeprefix("torch.")), np.float32)
    assert (got == want.float().numpy()).all()


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_compressed_tensors_reads_the_float4_that_is_written(name, tmp_path):
    (torch,), (tensors,) = installed("torch"), installed("compressed_tensors.compressors")
    installed("safetensors.torch")
    import importlib

    import safetensors.torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    q = jq.quantize(RNG.normal(size=(48, 64)).astype(np.float32), getattr(jq, f"{name}_spec")(1))
    if name == "nvfp4":
        with pytest.raises(ValueError, match="Make it a power of two"):
            write(tmp_path / "refused", {"w.weight": q}, {})
        q = dataclasses.replace(q, tensor_scale=jnp.float32(2**-9))
    write(tmp_path / "written", {"w.weight": q}, {})
    config = json.loads((tmp_path / "written" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    module, kind = READ[name][0].split(":")
    compressor = getattr(importlib.import_module(f"{tensors.__name__}.{module}"), kind)
    state = safetensors.torch.load_file(tmp_path / "written" / "model.safetensors")
    state = {own.removeprefix("w."): v for own, v in state.items()}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**group["weights"]))
    want = compressor.decompress(state, scheme)["weight"]
    real = np.asarray(jq.dequantize(q), np.float32)
    assert (want.to(torch.float32).numpy() == real).all()
    assert (np.asarray(jq.dequantize(read(tmp_path / "written")["w.weight"]), np.float32) == real).all()


def test_awq_has_the_values_of_its_converter(tmp_path):
    """That of compressed-tensors, whose decompressor then says them."""
    (torch,) = installed("torch")
    (converters,) = installed("compressed_tensors.entrypoints.convert.converters.autoawq")
    installed("safetensors.torch")
    import safetensors.torch
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    words = lambda *shape: torch.tensor(RNG.integers(-(2**31), 2**31, shape), dtype=torch.int32)
    tensors = {"w.qweight": words(128, 6), "w.qzeros": words(4, 6)}
    tensors["w.scales"] = torch.tensor(RNG.random((4, 48)) + 0.5, dtype=torch.float16)
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    converted = converters.AutoAWQConverter(group_size=32).process(dict(tensors))
    state = {name.removeprefix("w."): v for name, v in converted.items()}
    of = QuantizationArgs(**INT | OF_GROUPS | {"symmetric": False})
    want = PackedQuantizationCompressor.decompress(state, QuantizationScheme(targets=["Linear"], weights=of))["weight"]
    assert (np.asarray(jq.dequantize(read(tmp_path)["w.weight"])) == want.numpy()).all()


@pytest.mark.parametrize("ordered", [False, True], ids=["plain", "act order"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_has_the_values_of_auto_round(version, bits, ordered, tmp_path):
    """Of random words; zero points whose sum with 1 is no integer of these bits are none that a file has."""
    of = "auto_round_extension.torch.qlinear_torch" + ("_zp" if version == "gptq" else "")
    torch, _, layers = installed("torch", "safetensors.torch", of)
    import safetensors.torch

    words = lambda *shape: torch.tensor(RNG.integers(-(2**31), 2**31, shape), dtype=torch.int32)
    groups, each = (np.arange(256) // 64).astype(np.int32), 32 // bits
    zeros = RNG.integers(0, 2**bits - 1, (4, 96 // each, each), np.uint32) << np.arange(0, 32, bits, dtype=np.uint32)
    tensors = {"qweight": words(256 // each, 96), "qzeros": torch.tensor(zeros.sum(-1, dtype=np.uint32).view(np.int32))}
    tensors["scales"] = torch.tensor(RNG.random((4, 96)) + 0.5, dtype=torch.float16)
    if ordered:
        tensors["g_idx"] = torch.tensor(RNG.permutation(groups))
    config = {"quant_method": "gptq", "bits": bits, "group_size": 64, "checkpoint_format": version}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    safetensors.torch.save_file({f"w.{name}": v for name, v in tensors.items()}, tmp_path / "model.safetensors")
    layer = layers.QuantLinear(bits, 64, 256, 96, bias=False, g_idx=ordered)
    layer.load_state_dict(tensors)
    want = layer(torch.eye(256)).numpy().T  # a sum of one value and zeros
    if not ordered:
        assert (np.asarray(jq.dequantize(read(tmp_path)["w.weight"]), np.float32) == want).all()
        return
    q, order = read(tmp_path).in_order("w.weight")
    assert (np.asarray(jq.dequantize(q), np.float32) == want[:, order]).all()


def test_deepseek_has_the_values_of_transformers(tmp_path):
    """Of tiles that divide the weight, as it wants them; those of compressed-tensors above are cut off."""
    torch, _, found = installed("torch", "safetensors.torch", "transformers.integrations.finegrained_fp8")
    import safetensors.torch

    values = torch.tensor(RNG.normal(size=(256, 384)) * 100, dtype=torch.float32).to(torch.float8_e4m3fn)
    scale = torch.tensor(RNG.random((2, 3)) + 0.5, dtype=torch.float32)
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    safetensors.torch.save_file({"w.weight": values, "w.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    want = found.Fp8Dequantize(None)._dequantize_one(values, scale, torch.float32).numpy()
    assert (np.asarray(jq.dequantize(read(tmp_path)["w.weight"])) == want).all()


def test_gpt_oss_has_the_values_of_transformers(tmp_path):
    (torch,) = installed("torch")
    installed("transformers", "safetensors.torch")
    import safetensors.torch
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    blocks = torch.tensor(RNG.integers(0, 256, (2, 48, 3, 16)), dtype=torch.uint8)
    scales = torch.tensor(RNG.integers(100, 140, (2, 48, 3)), dtype=torch.uint8)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    safetensors.torch.save_file(
        {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}, tmp_path / "model.safetensors"
    )
    want = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).numpy()
    assert (np.asarray(jq.dequantize(read(tmp_path)["e.down_proj"]), np.float32) == want).all()
