"""A folder as other software sees it: fields, files and permissions; its dtype; the software that loads it."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from attention.calibration.calibrate import calibrate
from attention.conversion.convert import build, convert
from attention.io import checkpoint, export
from attention.io.files import write_whole
from attention.io.piecewise import outline
from attention.io.precision import DtypeError, cast_weights, own_dtype, round_weights
from attention.io.shards import write_shard
from attention.io.stock_form import format_of
from attention.io.targets import target
from attention.modeling.model_classes import headfold_config
from attention.plan import AttentionPlan, Composition, LayerPlan
from trainers.text.data import write_sequences

Tiny = Callable[..., PreTrainedModel]
UNIFORM = AttentionPlan((LayerPlan((0, 1, 1, 0), (0, 1, 1, 0)),) * 2, 8)
LAYERED = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 0, 1, 1)), LayerPlan((0,) * 4, (0,) * 4)), 8)
LOPSIDED = AttentionPlan((LayerPlan((0, 0, 0, 1), (0, 0, 0, 1)),) * 2, 8)
APART = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 0, 1)),) * 2, 8)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


# ---- config.json ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "overrides", "older"),
    [
        ("llama", {}, {"rope_theta": 10_000.0, "rope_scaling": None}),
        ("llama", {"rope_parameters": LLAMA3}, {"rope_theta": 500_000.0}),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, {"rope_theta": 1e6}),
        ("mistral", {"rope_theta": 7.0}, {"rope_theta": 7.0, "rope_scaling": None}),
        ("phi", {"partial_rotary_factor": 0.25}, {"rope_theta": 10_000.0, "partial_rotary_factor": 0.25}),
        ("gpt_neox", {}, {"rotary_emb_base": 10_000, "rotary_pct": 0.5, "rope_scaling": None}),
        ("gpt2", {}, {}),
        ("gemma3_text", {}, {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}),
        ("phi3", {}, {"rope_theta": 1e4, "partial_rotary_factor": 0.75}),
    ],
)
def test_the_config_has_the_fields_of_both_generations(
    family: str, overrides: dict[str, Any], older: dict[str, Any], tiny_model: Tiny, tmp_path: Path
) -> None:
    model = tiny_model(family, dtype=torch.bfloat16, **overrides)
    export.export(checkpoint.save(model, tmp_path / "a"), "phi" if family == "gpt_neox" else "gqa", tmp_path / "out")
    for folder in ("a",) if family == "gpt_neox" else ("a", "out"):
        fields = json.loads((tmp_path / folder / "config.json").read_text())
        assert fields["torch_dtype"] == fields["dtype"] == "bfloat16"
        assert {name: fields[name] for name in older} == older
        rope = overrides.get("rope_parameters")
        if rope:
            assert fields["rope_scaling"] == {k: v for k, v in rope.items() if k != "rope_theta"}
        again = AutoConfig.from_pretrained(tmp_path / folder)
        stored = dict(getattr(again, "rope_parameters", None) or {})
        stored.pop("type", None)  # transformers 4's name of rope_type
        assert stored == (getattr(model.config, "rope_parameters", None) or {})
        assert again.dtype == torch.bfloat16


# ---- other files of a folder ------------------------------------------------------------------------------------


@pytest.fixture
def source(tiny_model: Tiny, demo_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    """A checkpoint as others write them: files in another order and spelling."""
    folder = checkpoint.save(tiny_model("llama", vocab_size=2048), tmp_path / "source", demo_tokenizer)
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    fields |= {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=7))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}\n\n")
    (folder / "special_tokens_map.json").write_text('{"eos_token":"<|eos|>"}')
    (folder / "tokenizer.model").write_bytes(b"\x00 sentencepiece \xff")
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p":0.9, "do_sample":true}')
    (folder / "evil.py").write_text("raise SystemExit")
    return folder


COPIED = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "tokenizer.model",
    "generation_config.json",
)  # fmt: skip


def test_tokenizer_and_generation_config_are_copied_byte_for_byte(source: Path, tmp_path: Path) -> None:
    saved = checkpoint.save(convert(checkpoint.load(source), UNIFORM), tmp_path / "made", source)
    export.export(saved, "gqa", tmp_path / "out", source)
    for name in COPIED:
        assert (tmp_path / "out" / name).read_bytes() == (saved / name).read_bytes() == (source / name).read_bytes()
    assert not (saved / "evil.py").exists()


def test_a_new_tokenizer_is_saved_under_a_name_that_older_software_knows(
    source: Path, demo_dir: Path, tmp_path: Path
) -> None:
    out = checkpoint.save(checkpoint.load(source), tmp_path / "out", AutoTokenizer.from_pretrained(demo_dir))
    fields = json.loads((out / "tokenizer_config.json").read_text())
    assert fields["tokenizer_class"] == "PreTrainedTokenizerFast"
    text = "def read_lines(path):"
    expected = AutoTokenizer.from_pretrained(demo_dir)(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(out)(text)["input_ids"] == expected


# ---- permissions ------------------------------------------------------------------------------------------------


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_everything_written_has_the_permissions_of_the_umask(mask: int, source: Path, tmp_path: Path) -> None:
    for file in source.iterdir():
        file.chmod(0o600)
    out = tmp_path / "out"
    with umask(mask):
        saved = checkpoint.save(convert(checkpoint.load(source), UNIFORM), out / "made", source)
        export.export(saved, "gqa", out / "exported", source)
        write_shard(out / "shard.safetensors", {"a": torch.zeros(2)})
        write_sequences(torch.zeros(2, 4), out / "sequences")
        write_whole(out / "prices.npz", b"1")
    result = {path: stat.S_IMODE(path.stat().st_mode) for path in (out, *out.rglob("*"))}
    assert len(result) > 15
    assert {p: m for p, m in result.items() if m != (0o777 if p.is_dir() else 0o666) & ~mask} == {}


# ---- dtype ------------------------------------------------------------------------------------------------------


def kinds(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")])
@pytest.mark.parametrize("heads", [4, 2], ids=["mha", "gqa"])
def test_an_unconverted_checkpoint_is_exported_as_it_is(
    dtype: torch.dtype, kind: str, heads: int, tiny_model: Tiny, tmp_path: Path
) -> None:
    model = tiny_model("llama", dtype=dtype, num_key_value_heads=heads)
    model.save_pretrained(tmp_path / "source")
    report = export.export(tmp_path / "source", "gqa", tmp_path / "out")
    assert report.exact and report.max_logit_difference == 0
    assert kinds(tmp_path / "out") == {kind}
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "out"))
    assert old.keys() == new.keys() and all(torch.equal(new[name], old[name]) for name in old)
    assert report.kv_bytes_per_token_after == report.kv_bytes_per_token_before == 2 * 2 * heads * 8 * dtype.itemsize


def test_an_export_in_another_dtype_rounds_once(tiny_model: Tiny, tmp_path: Path) -> None:
    model = convert(tiny_model("llama"), LOPSIDED)
    folder = checkpoint.save(model, tmp_path / "model", plain=False)
    report = export.export(folder, "gqa", tmp_path / "out", dtype=torch.bfloat16, allow_larger_cache=True)
    assert report.dtype == "bfloat16" and kinds(tmp_path / "out") == {"BF16"}
    assert report.max_logit_difference < 1e-4  # against the model whose weights are rounded alike
    round_weights(model, torch.bfloat16)
    back = checkpoint.load(tmp_path / "out", torch.float32)
    difference = export.largest_difference(export.probe(model), export.probe(back))
    assert difference < 1e-4


def test_weights_are_cast_and_frequencies_are_not(tiny_model: Tiny) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    before = model.model.rotary_emb.inv_freq.clone()
    cast_weights(model, torch.bfloat16)
    assert model.dtype == model.config.dtype == torch.bfloat16
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2"])
def test_what_chooses_experts_stays_in_float32(family: str, tiny_model: Tiny, tmp_path: Path) -> None:
    model = tiny_model(family)
    (name, bias), *_ = (item for item in model.named_buffers() if item[0].endswith("e_score_correction_bias"))
    bias.copy_(torch.linspace(0.1, 0.2, len(bias)))  # not numbers of 16 bits
    before = bias.clone()
    round_weights(model, torch.bfloat16)
    cast_weights(model, torch.bfloat16)
    assert torch.equal(model.get_buffer(name), before) and model.lm_head.weight.dtype == torch.bfloat16
    folder = checkpoint.save(model, tmp_path / "saved")
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(checkpoint.load(folder, dtype).get_buffer(name), before)
    outlined, _ = outline(folder, torch.bfloat16)
    assert torch.equal(outlined.get_buffer(name), before)
    plan = AttentionPlan.identity(2, 4, 8)
    assert build(checkpoint.load_config(folder), plan, torch.bfloat16).get_buffer(name).dtype == torch.float32


def test_the_names_of_code_that_is_not_copied_are_left_out(tiny_model: Tiny) -> None:
    config = tiny_model("llama").config
    config.auto_map = {"AutoConfig": "configuration_x.XConfig"}
    assert not hasattr(headfold_config(config, AttentionPlan.identity(2, 4, 8)), "auto_map")


def test_the_dtype_is_that_of_the_config_or_else_of_the_files(tiny_model: Tiny, tmp_path: Path) -> None:
    config = checkpoint.save(tiny_model("llama", dtype=torch.float16), tmp_path).joinpath("config.json")
    assert own_dtype(checkpoint.load_config(tmp_path), tmp_path) == torch.float16
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({k: v for k, v in fields.items() if k not in ("dtype", "torch_dtype")}))
    assert own_dtype(checkpoint.load_config(tmp_path), tmp_path) == torch.float16
    save_file({"a": torch.zeros(10**6, dtype=torch.float64)}, tmp_path / "model.safetensors")
    with pytest.raises(DtypeError, match="stored in float64"):
        own_dtype(checkpoint.load_config(tmp_path), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DtypeError, match="says no dtype; name one of .*bfloat16"):
        own_dtype(checkpoint.load_config(tmp_path), tmp_path)


# ---- what a folder is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "plan", "loads_in", "message"),
    [
        (
            "llama",
            UNIFORM,
            ["transformers", "vLLM", "llama.cpp"],
            "which transformers and vLLM load as it is: `vllm serve .*out` or `headfold export "
            ".*out --target gguf --out .*out-gguf`, for llama.cpp",
        ),
        (
            "phi",
            UNIFORM,
            ["transformers", "vLLM", "llama.cpp"],
            "a stock Phi checkpoint, which transformers and vLLM load as it is: `vllm serve .*out` or .*--target gguf",
        ),
        (
            "opt",
            None,
            ["transformers", "vLLM"],
            "a stock OPT checkpoint, which transformers and vLLM load as it is: `vllm serve .*out`$",
        ),
        (
            "llama",
            LAYERED,
            ["headfold"],
            "different numbers of KV heads.*`headfold export .*out --target vllm --out .*out-vllm` writes it for "
            "vLLM at the same 192 KV bytes per token .--target gguf for llama.cpp, --target per_layer for transformers",
        ),
        ("llama", LOPSIDED, ["headfold"], "different sizes.*--target gqa --out .*at the same 256 KV bytes"),
        (
            "qwen3",
            APART,
            ["headfold"],
            "different groups.*--target transformers --out .*for transformers at the same",
        ),
        ("gpt_neox", UNIFORM, ["headfold"], "no stock form with groups.*--target phi --out"),
        ("gpt2", UNIFORM, ["headfold"], "no stock format supports this plan"),
        ("llama", AttentionPlan(UNIFORM.layers, 8, composition=Composition()), ["headfold"], "composed.*transformers"),
    ],
)
def test_what_a_written_folder_is(
    family: str, plan: AttentionPlan | None, loads_in: list[str], message: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    model = tiny_model(family)
    folder = checkpoint.save(model if plan is None else convert(model, plan), tmp_path / "out")
    result = format_of(folder, "float32")
    assert result["loads_in"] == loads_in
    assert result["format"] == ("headfold" if loads_in == ["headfold"] else "stock")
    assert re.search(message, result["format_note"])


def test_a_stock_folder_that_vllm_does_not_compute_says_what_it_loads(tiny_model: Tiny, tmp_path: Path) -> None:
    wide = AttentionPlan((LayerPlan((0,) * 4, (0,) * 4, 2, 2),) * 2, 8)  # vLLM's qwen2 has heads of the model's width
    for family, loads_in in (
        ("llama", ["transformers", "vLLM", "llama.cpp"]),
        ("qwen2", ["transformers", "llama.cpp"]),
    ):
        model = tiny_model(family)
        tokens = torch.randint(model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
        converted = convert(model, wide, fusion="least_squares", calibration=calibrate(model, tokens))
        result = format_of(checkpoint.save(converted, tmp_path / family), "float32")
        assert (result["format"], result["loads_in"]) == ("stock", loads_in)
        assert ("vllm serve" in result["format_note"]) == ("vLLM" in loads_in)
        assert ("--target vllm" in result["format_note"]) == ("vLLM" not in loads_in)


@pytest.mark.parametrize("plan", [LAYERED, APART], ids=["layers", "apart"])
def test_an_export_that_grows_the_cache_is_refused_before_weights_are_read(
    plan: AttentionPlan, tiny_model: Tiny, tmp_path: Path
) -> None:
    folder = checkpoint.save(convert(tiny_model("llama"), plan), tmp_path / "model")
    weights = (folder / "model.safetensors").rename(tmp_path / "aside")
    before, after = (
        plan.kv_bytes_per_token("float32"),
        target("gqa").support_for(checkpoint.load_config(folder), plan).bytes_per_token("float32"),
    )
    with pytest.raises(export.LargerCacheError, match=rf"takes {after} .* the plan {before}.*--allow-larger-cache"):
        export.export(folder, "gqa", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    weights.rename(folder / "model.safetensors")
    report = export.export(folder, "gqa", tmp_path / "out", allow_larger_cache=True)
    assert (report.kv_bytes_per_token_before, report.kv_bytes_per_token_after) == (before, after)
