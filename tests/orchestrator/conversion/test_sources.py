"""GGUF files and quantised checkpoints as the sources of verbs: opened once, named in records, refused in own words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import run_here
from safetensors.torch import load_file, save_file
from verbs import check_finetuning

from attention.io import checkpoint
from attention.io.export import export
from orchestrator.config.schema import parse_config
from orchestrator.search.setup import open_models

FEW = ("--calibration-tokens", 128, "--eval-tokens", 128, "--sequence-length", 32)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def model(place: Path, tiny_model: Callable[..., Any], demo_tokenizer: Any) -> Path:
    """A tiny Llama with the demo's tokenizer, in bfloat16."""
    folder = place / "model"
    tiny_model("llama", vocab_size=2048, num_key_value_heads=4).to(torch.bfloat16).save_pretrained(folder)
    demo_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def gguf(model: Path, place: Path) -> Path:
    export(model, "gguf", place / "file", model, dtype="bfloat16")
    return place / "file" / "model.gguf"


def configure(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def in_fp8(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    configure(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})


@pytest.mark.extended
@pytest.mark.parametrize("way", ["--no-layerwise", "--layerwise"])
def test_a_gguf_file_is_converted_as_its_checkpoint_is(way: str, gguf: Path, model: Path, place: Path) -> None:
    for source, out in ((model, "one"), (gguf, "other")):
        requested = ("convert", "--model", source, "--recipe", "gqa", "--kv-ratio", 0.5, "--out", out, way, *FEW)
        assert run_here(*requested, "--json", f"{out}.json") == 0
    records = [json.loads((place / f"{out}.json").read_text()) for out in ("one", "other")]
    assert records[1]["model"] == str(gguf)
    for key in ("original_loss", "loss", "kl", "dtype", "kv_bytes_per_token", "plan_digest"):
        assert records[0][key] == records[1][key], key
    one, other = (checkpoint.load(place / out).state_dict() for out in ("one", "other"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert checkpoint.note_of(place / "other")["original"]["base"] == "model.gguf"


@pytest.mark.extended
def test_estimates_and_dry_runs_write_no_weights(gguf: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requested = ("--model", gguf, "--recipe", "gqa", "--kv-ratio", 0.5, *FEW)
    assert run_here("estimate", *requested) == 0
    assert run_here("convert", *requested, "--dry-run") == 0
    assert run_here("inspect", gguf, "--dry-run", *FEW) == 0
    assert run_here("init", gguf, "--out", "search.yaml", "--data", "stdlib") == 0
    assert run_here("search", "search.yaml", "--dry-run", "data.eval.tokens=256", "data.calibration.tokens=256") == 0
    assert not any(place.glob("cache/**/*.safetensors")) and "nothing was written" in capsys.readouterr().out
    config = parse_config(yaml.safe_load((place / "search.yaml").read_text()))
    assert config.model.path == str(gguf)


def test_a_file_that_is_read_is_not_replaced(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversion = ("convert", "--model", gguf, "--recipe", "gqa", "--kv-ratio", 0.5, *FEW)
    for requested in (conversion, ("export", gguf, "--target", "gqa")):
        assert run_here(*requested, "--out", gguf.parent, "--overwrite") == 2
        assert f"contains, what is read: '{gguf}'" in capsys.readouterr().err
    assert gguf.is_file()


def test_a_dry_run_finds_a_training_that_was_begun_from_a_file(
    gguf: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    amounts = {"steps": 2, "sequence_length": 32, "train_tokens": 512, "eval_tokens": 128}
    check_finetuning(gguf, "tuned", original=gguf, device="cpu", **amounts).make_job()
    options = [word for name, value in amounts.items() for word in (f"--{name.replace('_', '-')}", value)]
    requested = ("finetune", "--model", gguf, "--original", gguf, "--out", "tuned", "--device", "cpu", *options)
    assert run_here(*requested, "--dry-run") == 0, capsys.readouterr().err
    assert run_here(*requested, "--learning-rate", 1e-3, "--dry-run") == 2
    assert "another settings" in capsys.readouterr().err


def test_a_search_opens_the_copy_and_keeps_the_name(gguf: Path, place: Path) -> None:
    record = {"name": "s", "model": {"path": str(gguf)}, "search": {"recipes": ["gqa"], "kv_ratios": [0.5]}}
    config = parse_config(record | {"storage": str(place / "runs")})
    opened = open_models(config)
    folder = Path(opened.model.path)
    assert folder.is_relative_to(place / "runs" / "cache") and (folder / "model.safetensors").is_file()
    assert opened.model_dump() == config.model_dump()
    assert open_models(opened).model_dump(mode="json")["model"]["path"] == str(gguf)


@pytest.mark.heavy
def test_quantised_weights_need_the_option(model: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_fp8(model)
    conversion = ("--model", model, "--recipe", "gqa", "--kv-ratio", 0.5, *FEW)
    for requested in (
        ("init", model, "--out", "search.yaml"),
        ("estimate", *conversion),
        ("convert", *conversion),
        ("inspect", model),
        ("evaluate", model),
        ("export", model, "--target", "gqa", "--out", "exported"),
    ):
        assert run_here(*requested) == 2, requested
        output = capsys.readouterr().err
        assert "is quantised" in output and "--dequantize" in output, requested
    assert not (place / "search.yaml").exists()
    assert run_here("init", model, "--out", "search.yaml", "--dequantize") == 0
    assert yaml.safe_load((place / "search.yaml").read_text())["model"]["dequantize"] is True
    assert run_here("estimate", *conversion, "--dequantize") == 0
    assert run_here("convert", *conversion, "--dequantize", "--out", "half") == 0
    assert checkpoint.load(place / "half").config.num_key_value_heads == 2


def test_what_cannot_be_read_is_refused_in_every_verb(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = {"AutoConfig": "configuration_mine.MyConfig"}
    verbs = (
        ("init", model, "--out", "search.yaml"),
        ("estimate", "--model", model, "--recipe", "gqa", "--kv-ratio", 0.5),
        ("convert", "--model", model, "--recipe", "gqa", "--kv-ratio", 0.5),
        ("inspect", model),
        ("evaluate", model),
    )
    before = (model / "config.json").read_text()
    for fields, report in (
        ({"per_layer_config": {"1": {"head_dim": 4}}}, "per_layer_config: head_dim in 1: 1"),
        ({"model_type": "mymodel", "auto_map": code}, "which Headfold does not run"),
        ({"model_type": "deepseek_v3"}, "has no KV heads to share"),
        ({"quantization_config": {"quant_method": "gptq"}}, "take the model that it was made of"),
    ):
        (model / "config.json").write_text(before)
        configure(model, **fields)
        for requested in verbs:
            assert run_here(*requested) == 2, requested
            assert report in capsys.readouterr().err, requested


def test_one_kv_head_cannot_be_shared(place: Path, tiny_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama", num_key_value_heads=1).save_pretrained(place / "mqa")
    assert run_here("estimate", "--model", place / "mqa", "--recipe", "gqa", "--kv-ratio", 0.5, *FEW) == 2
    assert "has 1 KV head per layer (multi-query attention)" in capsys.readouterr().err
