"""GGUF files and quantised safetensors as sources: the plain copy has exactly the numbers that the format defines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from attention.families import geometry_of, window_of
from attention.io import checkpoint
from attention.io.export import export, probe
from attention.io.quantised.gguf_file import GGUFFile, llama3_rope
from attention.io.quantised.packed import four_bits, scaled, unpack
from attention.io.quantised.plain_copy import plain_checkpoint
from attention.io.safetensors_files import INDEX, SINGLE
from attention.io.sources import CheckpointError, source_name
from attention.io.targets._gguf.vocabulary import pre_tokenizer, split_rule
from attention.io.targets.gqa import stock_config
from attention.io.weights import WeightsError

DEMO = Path(__file__).resolve().parents[3] / "examples" / "stdlib-llama"
Tiny = Callable[..., PreTrainedModel]


def opened(source: Path, tmp_path: Path, **more: Any) -> Path:
    return Path(plain_checkpoint(source, cache=tmp_path / "cache", report=lambda line: None, **more))


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


# ---- GGUF -------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tiny_model: Tiny, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """`written(family, dtype, **config)`: the folder of a tiny model, and its GGUF file."""

    def write(family: str, dtype: str, **settings: Any) -> tuple[Path, Path]:
        folder = tmp_path / "model"
        tiny_model(family, vocab_size=2048, num_key_value_heads=2, **settings).save_pretrained(folder)
        export(folder, "gguf", tmp_path / "file", DEMO, dtype=dtype)
        return folder, tmp_path / "file" / "model.gguf"

    return write


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_comes_back_exactly(
    family: str, dtype: str, written: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, file = written(family, dtype, tie_word_embeddings=family == "qwen3")
    copy = opened(file, tmp_path)
    kind = getattr(torch, dtype)
    before, after = checkpoint.load(folder, torch.float32), checkpoint.load(copy)
    assert (after.dtype, after.config.model_type) == (kind, family)
    expected = before.state_dict()
    for name, tensor in after.state_dict().items():
        assert torch.equal(tensor, expected[name].to(kind)), name
    assert geometry_of(after.config) == geometry_of(before.config)
    assert source_name(copy) == str(file) and copy.name == "model"


def test_the_tokenizer_comes_along(written: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    from attention.io.tokenizers import read_tokenizer

    _, file = written("llama", "bfloat16")
    text = "def f(x):\n    return x + 1\n"
    copy = opened(file, tmp_path, weights=False)
    assert read_tokenizer(copy)(text)["input_ids"] == read_tokenizer(DEMO)(text)["input_ids"]
    assert len(read_tokenizer(copy)) == len(read_tokenizer(DEMO))  # a model embeds no more
    assert not any(copy.glob("*.safetensors"))


def test_bits_of_a_gguf_file_are_numbers_in_bfloat16(written: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    folder, file = written("llama", "q8_0")
    lines: list[str] = []
    copy = Path(plain_checkpoint(file, cache=tmp_path / "cache", report=lines.append))
    assert "Q8_0" in lines[0] and "GiB" in lines[0]
    plain_checkpoint(file, cache=tmp_path / "cache", report=lines.append)
    assert "read from its plain copy" in lines[1]
    model = checkpoint.load(copy)
    assert model.dtype == torch.bfloat16
    before = checkpoint.load(folder, torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        assert (tensor - before[name]).abs().max() <= before[name].abs().max() / 80, name


def test_numbers_of_float32_that_are_rounded_are_named(written: Callable[..., tuple[Path, Path]]) -> None:
    """A file of 16 bits has norms, biases and positions in float32."""
    import gguf

    _, file = written("llama", "float16")
    assert "F32" in GGUFFile(file).kinds and GGUFFile(file).rounded == []
    tensors: Any = gguf.GGUFReader(file, "r+").tensors
    next(tensor for tensor in tensors if tensor.name == "output_norm.weight").data[:] = 1.0001
    del tensors
    assert GGUFFile(file).rounded == ["F32"]


def test_settings_that_transformers_leaves_out_come_back(
    written: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    _, file = written("qwen3_moe", "float32", moe_intermediate_size=24)
    assert checkpoint.load_config(opened(file, tmp_path)).moe_intermediate_size == 24


def with_field(file: Path, name: str, value: str) -> Path:
    """A copy of a GGUF file with another field."""
    import gguf
    from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

    reader, changed = gguf.GGUFReader(file), file.with_name("changed.gguf")
    architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    writer = gguf.GGUFWriter(changed, architecture)
    copy_with_new_metadata(reader, writer, {name: MetadataDetails(gguf.GGUFValueType.STRING, value)}, [])
    return changed


def test_a_name_gives_a_llama_no_window(written: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    """transformers reads one called mistral as a Mistral, which has a window of 4,096 tokens by default."""
    _, file = written("llama", "float32")
    config = checkpoint.load_config(opened(with_field(file, "general.name", "mistral"), tmp_path))
    assert (config.model_type, window_of(config)) == ("mistral", 0)


def test_the_base_of_rope_of_a_stablelm_comes_back(tmp_path: Path) -> None:
    import gguf

    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "stablelm")
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 4, "vocab_size": 64}
    for name, value in sizes.items():
        writer.add_uint32(f"stablelm.{name}", value)
    writer.add_float32("stablelm.attention.layer_norm_epsilon", 1e-5)
    writer.add_float32("stablelm.rope.freq_base", 1e6)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert GGUFFile(file).write_config(tmp_path).rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize("flag", [None, False])
@pytest.mark.parametrize("name", ["llama-bpe", "qwen2"])
def test_a_llama_3_that_says_nothing_of_it_begins_with_its_token(
    name: str, flag: bool | None, written: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """llama.cpp puts it first for such a file, and for no other byte-level one."""
    from attention.io.tokenizers import read_tokenizer

    tokenizer = read_tokenizer(DEMO)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer(name)
    tokenizer.bos_token = tokenizer.eos_token
    folder, _ = written("llama", "bfloat16")
    export(folder, "gguf", tmp_path / "split", tokenizer)
    file = tmp_path / "split" / "model.gguf"
    if flag is None:
        file.write_bytes(file.read_bytes().replace(b"ggml.add_bos_token", b"ggml.add_xxx_token"))
    assert GGUFFile(file).field("tokenizer.ggml.add_bos_token") is flag
    again = read_tokenizer(opened(file, tmp_path, weights=False))
    begins = again("a")["input_ids"][0] == again.bos_token_id
    assert begins is (name == "llama-bpe" and flag is None)
    whole = json.loads(again.backend_tokenizer.to_str())
    assert whole["model"]["ignore_merges"] is (name == "llama-bpe")


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_text_is_split_as_llama_cpp_does_by_that_name(
    name: str, written: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    from attention.io.tokenizers import read_tokenizer

    tokenizer = read_tokenizer(DEMO)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer(name)
    folder, _ = written("llama", "bfloat16")
    export(folder, "gguf", tmp_path / "split", tokenizer)
    file = tmp_path / "split" / "model.gguf"
    assert GGUFFile(file).field("tokenizer.ggml.pre") == name
    again = read_tokenizer(opened(file, tmp_path, weights=False))
    assert split_rule(json.loads(again.backend_tokenizer.to_str())) == name
    for text in ("x =  12\n\n345  y's\t7", "    return 3.14159\n\n    # 2026"):
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    pieces = [piece for piece, _ in again.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n12")]
    assert ("12" in pieces) is (name in ("gpt-2", "llama-bpe"))


def test_an_unknown_way_of_splitting_text_is_refused(written: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    _, file = written("llama", "bfloat16")
    file.write_bytes(file.read_bytes().replace(b"gpt-2", b"bpe-9"))
    with pytest.raises(CheckpointError, match=r"splitting text 'bpe-9' is not known"):
        opened(file, tmp_path, weights=False)


def test_biases_come_back(written: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    folder, file = written("llama", "float32", attention_bias=True, mlp_bias=True)
    expected = checkpoint.load(folder, torch.float32).state_dict()
    result = checkpoint.load(opened(file, tmp_path), torch.float32).state_dict()
    assert result.keys() == expected.keys() and "model.layers.0.self_attn.o_proj.bias" in result
    assert all(torch.equal(result[name], tensor) for name, tensor in expected.items())


def test_tensors_without_a_place_are_refused(written: Callable[..., tuple[Path, Path]]) -> None:
    folder, file = written("llama", "float32")
    config = checkpoint.load_config(folder)
    GGUFFile(file).check(config)
    config.num_hidden_layers = 1
    with pytest.raises(WeightsError, match=r"has 9 tensors that the model read from it has no place for: blk\.1\."):
        GGUFFile(file).check(config)


WHOLE = {"gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, "gemma3": {"rope.freq_base": 1e6}}
"""Families that transformers reads, and settings of their files."""


def whole_file(model: PreTrainedModel, architecture: str, file: Path, leave_out: str = "-", **settings: Any) -> None:
    """Write a GGUF file of a Gemma as llama.cpp's converter does, without a tokenizer."""
    import gguf

    config: Any = model.config
    writer = gguf.GGUFWriter(file, architecture)
    for name, value in {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "vocab_size": config.vocab_size,
    }.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    numbers = {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, **WHOLE[architecture], **settings}
    for name, value in numbers.items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(f"{architecture}.{name}", value)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if not name.startswith("lm_head") and leave_out not in name:
            plus = 1 if "norm" in name else 0  # Gemma multiplies by 1 + weight
            writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", (tensor + plus).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", WHOLE)
def test_what_transformers_reads_as_a_whole_comes_back(architecture: str, tiny_model: Tiny, tmp_path: Path) -> None:
    family, settings = {
        "gemma2": ("gemma2", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
        "gemma3": ("gemma3_text", {"final_logit_softcapping": None, "sliding_window_pattern": 6}),
    }[architecture]
    model = tiny_model(family, tie_word_embeddings=True, query_pre_attn_scalar=8, **settings)
    whole_file(model, architecture, tmp_path / "x.gguf")
    again = checkpoint.load(opened(tmp_path / "x.gguf", tmp_path), torch.float32)
    assert again.config.query_pre_attn_scalar == again.config.head_dim == 8
    torch.testing.assert_close(probe(again), probe(model), rtol=0, atol=1e-4)
    whole_file(model, architecture, tmp_path / "y.gguf", leave_out="layers.1.mlp.up_proj")
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.up_proj"):
        opened(tmp_path / "y.gguf", tmp_path)


def test_only_layers_without_a_window_of_gemma_3_have_scaled_positions(tiny_model: Tiny, tmp_path: Path) -> None:
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6}
    model = tiny_model("gemma3_text", tie_word_embeddings=True)
    whole_file(model, "gemma3", tmp_path / "x.gguf", **scaled)
    rope = checkpoint.load_config(opened(tmp_path / "x.gguf", tmp_path, weights=False)).rope_parameters
    assert rope["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}


def test_factors_of_longrope_are_refused(written: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    _, file = written("llama", "float32")
    file.write_bytes(file.read_bytes().replace(b"blk.1.attn_output.weight", b"rope_factors_long.weight"))
    with pytest.raises(CheckpointError, match="of type longrope is not read"):
        opened(file, tmp_path)


def test_llama_3_rope_comes_back(written: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    folder, file = written("llama", "float32", rope_parameters=rope, head_dim=16)
    copy = opened(file, tmp_path)
    one, other = (checkpoint.load(f, torch.float32) for f in (folder, copy))
    assert torch.allclose(probe(one), probe(other), atol=1e-4)


@pytest.mark.parametrize(("factor", "length"), [(8.0, 8192), (32.0, 8192)])
def test_published_llama_3_ropes_are_recognised(factor: float, length: int) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": length}
    turns = 500_000.0 ** -(torch.arange(64, dtype=torch.float64) / 64) / (2 * torch.pi)
    smooth = ((turns * length - 1) / 3).clamp(0, 1)
    assert llama3_rope((1 / ((1 - smooth) / factor + smooth)).float(), 500_000.0) == rope
    assert llama3_rope(torch.linspace(1, 2, 64), 500_000.0) is None


def test_a_tensor_that_is_missing_is_named_from_the_header(
    written: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    _, file = written("llama", "float32")
    data = file.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_zz.weight")
    file.write_bytes(data)
    with pytest.raises(WeightsError, match=r"blk\.1\.ffn_up\.weight"):
        opened(file, tmp_path, weights=False)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("not one")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        opened(tmp_path / "x.gguf", tmp_path)
    (tmp_path / "y.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        opened(tmp_path / "y.gguf", tmp_path)
    with pytest.raises(CheckpointError, match="holds 2 GGUF files; name one"):
        opened(tmp_path, tmp_path)


# ---- FP8 --------------------------------------------------------------------------------------------------------


def quantised(tiny_model: Tiny, folder: Path, settings: dict[str, Any], change: Callable[..., Any]) -> Path:
    """A tiny Llama whose projections `change(name, weight)` has replaced by other tensors."""
    model = tiny_model("llama").to(torch.bfloat16)
    model.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / SINGLE).items():
        tensors |= change(name, tensor) if name.endswith("proj.weight") else {name: tensor}
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    return folder


def slow_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Number by number."""
    numbers, factors = weight.float().numpy().astype(np.float32), scale.float().numpy()
    result = np.empty_like(numbers)
    for row in range(numbers.shape[0]):
        for column in range(numbers.shape[1]):
            result[row, column] = numbers[row, column] * factors[row // block[0], column // block[1]]
    return torch.from_numpy(result)


def in_blocks(rows: int, columns: int) -> Callable[[str, Tensor], dict[str, Tensor]]:
    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(len(name))
        shape = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        scale = torch.rand(shape, generator=generator) + 0.1
        return {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}

    return change


@pytest.mark.parametrize("block", [(16, 16), (20, 12)])  # ends that are no whole block
def test_fp8_blocks_are_exact_with_scales_in_another_shard(
    block: tuple[int, int], tiny_model: Tiny, tmp_path: Path
) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": list(block)}
    folder = quantised(tiny_model, tmp_path / "model", settings, in_blocks(*block))
    before = load_file(folder / SINGLE)
    scales = {name: t for name, t in before.items() if name.endswith("_scale_inv")}
    others = {name: t for name, t in before.items() if name not in scales}
    (folder / SINGLE).unlink()
    where: dict[str, str] = {}
    for number, part in enumerate((others, scales), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(WeightsError, match="add --dequantize"):
        checkpoint.load(folder)
    copy = opened(folder, tmp_path, dequantize=True)
    after = stored(copy)
    assert len(scales) == 14 and set(after) == set(others)
    for name in after:
        expected = (
            slow_blocks(before[name], scales[f"{name}_scale_inv"], block) if f"{name}_scale_inv" in scales else None
        )
        assert torch.equal(after[name], before[name] if expected is None else expected.to(torch.bfloat16)), name
    model = checkpoint.load(copy)
    assert model.dtype == torch.bfloat16 and not hasattr(model.config, "quantization_config")


def test_fp8_agrees_with_transformers(tiny_model: Tiny, tmp_path: Path) -> None:
    weight = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, 2, generator=torch.Generator().manual_seed(1))
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "_dequantize_fp8_weight"):
        pytest.skip("this transformers has no such function")
    theirs = fp8._dequantize_fp8_weight(weight, scale, (16, 16), torch.float32)
    assert torch.equal(scaled(weight, scale, (16, 16)), theirs)


def test_a_weight_without_its_scales_is_named(tiny_model: Tiny, tmp_path: Path) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    name = "model.layers.1.self_attn.q_proj.weight"
    folder = quantised(tiny_model, tmp_path / "model", settings, in_blocks(16, 16))
    tensors = load_file(folder / SINGLE)
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, folder / SINGLE)
    with pytest.raises(WeightsError, match=f"{name} is of F8_E4M3 and has neither"):
        opened(folder, tmp_path, dequantize=True)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_other_methods_stay_refused(method: str, tiny_model: Tiny, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(CheckpointError, match=f"'{method}' cannot be read as plain numbers"):
        opened(tmp_path / "model", tmp_path, dequantize=True)


# ---- compressed-tensors -----------------------------------------------------------------------------------------


def group(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def rounded(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each row in eight bits, and its scale `[N, 1]`."""
    scale = weight.float().abs().amax(1, keepdim=True) / 100
    whole = weight.float() / scale
    return (whole.round() if dtype == torch.int8 else whole).to(dtype), scale


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_eight_bits_with_a_scale_of_each_row(dtype: torch.dtype, tiny_model: Tiny, tmp_path: Path) -> None:
    created: dict[str, Tensor] = {}

    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        whole, scale = rounded(weight, dtype)
        scale = scale.to(torch.bfloat16)
        created[name] = (whole.float().numpy() * scale.float().numpy()).astype(np.float32)  # type: ignore[assignment]
        unused = {f"{name.removesuffix('.weight')}.input_scale": torch.ones(1)}
        return {name: whole, f"{name}_scale": scale} | unused

    settings = group(num_bits=8, type="int", strategy="channel") | {"format": "int-quantized"}
    folder = quantised(tiny_model, tmp_path / "model", settings, change)
    lines: list[str] = []
    copy = Path(plain_checkpoint(folder, dequantize=True, cache=tmp_path / "cache", report=lines.append))
    after = stored(copy)
    assert "14 scales of activations and caches are left out" in lines[0]
    for name, expected in created.items():
        assert torch.equal(after[name], torch.as_tensor(expected).to(torch.bfloat16)), name
    checkpoint.load(copy)


def pack(codes: Tensor, bits: int) -> Tensor:
    """As compressed-tensors: unsigned codes `[N, K]` into 32-bit words, lowest first."""
    per_word = 32 // bits
    rows, columns = codes.shape
    words = np.zeros((rows, -(-columns // per_word)), dtype=np.uint32)
    for row in range(rows):
        for column in range(columns):
            words[row, column // per_word] |= np.uint32(int(codes[row, column]) << (bits * (column % per_word)))
    return torch.from_numpy(words.view(np.int32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("symmetric", "groups"), [(True, 1), (False, 1), (True, 2)])
def test_packed_integers_with_a_scale_of_each_group(
    bits: int, symmetric: bool, groups: int, tiny_model: Tiny, tmp_path: Path
) -> None:
    size, half, created = 8, 2 ** (bits - 1), {}

    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(len(name))
        rows, columns = weight.shape
        whole = torch.randint(-half, half, (rows, columns), generator=generator)
        scale = (torch.rand(rows, columns // size, generator=generator) / 50).to(torch.bfloat16)
        zero = torch.randint(-half, half, scale.shape, generator=generator)
        stem = name.removesuffix(".weight")
        shift = torch.zeros_like(zero) if symmetric else zero
        created[name] = (whole - shift.repeat_interleave(size, 1)).float() * scale.float().repeat_interleave(size, 1)
        zeros = {} if symmetric else {f"{stem}.weight_zero_point": pack((zero + half).T, bits).T.contiguous()}
        packed = {f"{stem}.weight_packed": pack(whole + half, bits), f"{stem}.weight_scale": scale}
        return packed | zeros | {f"{stem}.weight_shape": torch.tensor([rows, columns])}

    settings = group(num_bits=bits, type="int", strategy="group", group_size=size, symmetric=symmetric)
    if groups == 2:  # that of all linear modules comes after one of some
        other = {"num_bits": 12 - bits, "type": "int", "strategy": "group", "group_size": 4 * size}
        linear = settings["config_groups"]["group_0"]
        some = {"targets": ["re:.*lm_head"], "weights": other}
        settings["config_groups"] = {"group_0": some, "group_1": linear}
    folder = quantised(tiny_model, tmp_path / "model", settings | {"format": "pack-quantized"}, change)
    copy = opened(folder, tmp_path, dequantize=True)
    after = stored(copy)
    assert len(created) == 14
    for name, expected in created.items():
        assert torch.equal(after[name], expected.to(torch.bfloat16)), name
    checkpoint.load(copy)


def test_unpack_is_the_inverse_of_packing() -> None:
    codes = torch.randint(0, 16, (3, 13), generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack(pack(codes, 4), 4, 13), codes.int() - 8)


def test_a_format_that_cannot_be_read_is_named(tiny_model: Tiny, tmp_path: Path) -> None:
    settings = group(num_bits=4, type="float") | {"format": "nvfp4-pack-quantized"}
    folder = quantised(tiny_model, tmp_path / "model", settings, lambda name, weight: {name: weight})
    with pytest.raises(WeightsError, match="nvfp4-pack-quantized"):
        opened(folder, tmp_path, dequantize=True)


# ---- MXFP4 ------------------------------------------------------------------------------------------------------


def test_four_bits_agree_with_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 135, (2, 6, 3), dtype=torch.uint8, generator=generator)
    ours = torch.stack([four_bits(b, s) for b, s in zip(blocks, scales, strict=True)]).transpose(1, 2)
    assert torch.equal(ours, convert_moe_packed_tensors(blocks, scales))


def test_gpt_oss_as_published(tiny_model: Tiny, tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, generator = tmp_path / "model", torch.Generator().manual_seed(0)
    tiny_model("gpt_oss", hidden_size=32, intermediate_size=32).to(torch.bfloat16).save_pretrained(folder)
    tensors, expected = load_file(folder / SINGLE), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, inner // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(115, 122, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(WeightsError, match="add --dequantize"):
        checkpoint.load(folder)
    model = checkpoint.load(opened(folder, tmp_path, dequantize=True)).state_dict()
    assert len(expected) == 4
    for name, tensor in expected.items():
        assert torch.equal(model[name], tensor), name


# ---- the copy ---------------------------------------------------------------------------------------------------


def test_a_copy_follows_its_source_and_names_no_room(
    written: Callable[..., tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, file = written("llama", "float32")
    first = opened(file, tmp_path)
    assert opened(file, tmp_path) == first
    file.touch()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(CheckpointError, match="HEADFOLD_CACHE"):
        opened(file, tmp_path)


def test_a_copy_follows_the_tokenizer_of_its_source(tiny_model: Tiny, tmp_path: Path) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    folder = quantised(tiny_model, tmp_path / "model", settings, in_blocks(16, 16))
    first = opened(folder, tmp_path, dequantize=True)
    assert opened(folder, tmp_path, dequantize=True) == first
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    second = opened(folder, tmp_path, dequantize=True)
    assert second != first and (Path(second) / "chat_template.jinja").is_file()


def test_plain_sources_are_opened_themselves(tiny_model: Tiny, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    assert plain_checkpoint(tmp_path / "model", dequantize=True) == str(tmp_path / "model")
    assert plain_checkpoint("org/name") == "org/name"


def test_split_files_and_converted_ones_are_refused(tmp_path: Path) -> None:
    import gguf

    for field, value, report in (
        ("split.count", 3, "llama-gguf-split"),
        ("llama.expert_count", 8, "has experts"),
        ("llama.attention.head_count_kv", [2, 1], "own"),
    ):
        file = tmp_path / f"{field}.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_array(field, value) if isinstance(value, list) else writer.add_uint16(field, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(CheckpointError, match=report):
            GGUFFile(file).write_config(tmp_path)


# ---- configs ----------------------------------------------------------------------------------------------------


def configured(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    base = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2).to_dict()
    base |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(base | fields))
    return folder


def test_a_llama_of_odd_width_is_a_mistral(tmp_path: Path) -> None:
    fields = {"hidden_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    folder = configured(tmp_path / "odd", **fields, rope_parameters={"rope_type": "default", "rope_theta": 8e6})
    config = checkpoint.load_config(folder)
    assert (config.model_type, config.sliding_window, config.head_dim) == ("mistral", None, 16)
    assert config.rope_parameters["rope_theta"] == 8e6
    from transformers import MistralForCausalLM

    model = MistralForCausalLM(config)
    tensors = {name: t.contiguous() for name, t in model.state_dict().items()}
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    assert torch.equal(probe(checkpoint.load(folder, torch.float32)), probe(model.eval()))
    with pytest.raises(CheckpointError, match="no biases"):
        checkpoint.load_config(configured(tmp_path / "biased", **fields, attention_bias=True))
    fields = {"hidden_size": 36, "num_attention_heads": 10, "num_key_value_heads": None, "head_dim": 4}
    assert checkpoint.load_config(configured(tmp_path / "heads", **fields)).num_key_value_heads == 10


def test_a_window_that_the_class_of_a_llama_ignores_is_none(tmp_path: Path) -> None:
    """As models have it that were made into a Llama."""
    config = checkpoint.load_config(configured(tmp_path / "made", sliding_window=4096))
    assert (config.model_type, window_of(config)) == ("llama", 0)
    heads = config.num_attention_heads + 1  # of a padded plan: the width is no multiple of them
    config.sliding_window = 4096
    assert stock_config(config, heads, heads).sliding_window is None


def test_settings_of_single_layers_are_refused(tmp_path: Path) -> None:
    folder = configured(tmp_path / "own", per_layer_config={"1": {"num_key_value_heads": 2, "head_dim": 4}})
    with pytest.raises(CheckpointError, match=r"per_layer_config: head_dim in 1: 1.*headfold_layers"):
        checkpoint.load_config(folder)
    same = configured(tmp_path / "same", per_layer_config={"1": {"num_key_value_heads": 4}})
    assert geometry_of(checkpoint.load_config(same)).num_kv_heads == 4


def test_code_next_to_a_checkpoint_is_reported_in_our_words(tmp_path: Path) -> None:
    code = {"AutoConfig": "configuration_mine.MyConfig", "AutoModelForCausalLM": "modeling_mine.MyModel"}
    with pytest.raises(CheckpointError, match="which Headfold does not run") as caught:
        checkpoint.load_config(configured(tmp_path / "mine", model_type="mymodel", auto_map=code))
    assert "trust_remote_code" not in str(caught.value)
    known = checkpoint.load_config(configured(tmp_path / "llama", auto_map=code))
    assert type(known) is LlamaConfig


def test_latent_attention_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import DeepseekV3Config

    from attention.families import family_of

    with pytest.raises(ValueError, match=r"deepseek_v3 caches one latent vector.*MLA.*no KV heads to share"):
        family_of(DeepseekV3Config())


def test_an_output_matrix_that_is_missing_is_named_with_both_ways_out(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model("qwen3").save_pretrained(folder)
    tensors = load_file(folder / SINGLE)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"lm_head\.weight.*set tie_word_embeddings to true"):
        checkpoint.load(folder)
