"""The verbs with a cache as an engine holds it: evaluate measures it, export serves it, estimate says it first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run_here
from verbs import evaluate_checkpoint, export_checkpoint

from attention.cache_formats import CachePair
from attention.engine_cache import engine_cache
from orchestrator import checkpoints
from orchestrator.config.options import EvaluateOptions
from orchestrator.config.parsing import ConfigError
from trainers.evaluation import evaluate
from trainers.text.data import Texts

SIZES: dict[str, Any] = {"eval_tokens": 512, "sequence_length": 128, "device": "cpu", "speed_tokens": 0}


def test_checkpoint_and_baseline_are_measured_in_the_format(demo_dir: Path, little_text: str) -> None:
    models = {"original": demo_dir, "baseline": demo_dir}
    record = evaluate_checkpoint(demo_dir, data=little_text, cache_format="q8_0,q4_0", **models, **SIZES)
    opened = checkpoints.open_checkpoint(demo_dir)
    sizes = {"eval_tokens": 512, "sequence_length": 128, "calibrate": False}
    held_out = Texts(little_text, None, "text", 0).load(opened.tokenizer, 512, **sizes).held_out
    model = checkpoints.load_model(opened)
    exact = evaluate(model, held_out).loss
    with engine_cache(model, CachePair.parse("q8_0,q4_0")):
        rounded = evaluate(model, held_out).loss
    assert abs(rounded - exact) > 1e-4
    assert record["loss"] == record["baseline_loss"] == pytest.approx(rounded, abs=1e-6)
    assert record["original_loss"] == pytest.approx(exact, abs=1e-6)
    assert record["engine_cache"]["kv_bytes_per_token"] == 4 * 8 * (34 + 18)
    assert record["engine_cache"]["share"] == 13 / 32
    assert json.loads(json.dumps(record)) == record


def test_several_formats_in_one_command_are_what_each_is_alone(
    demo_dir: Path, little_text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "record.json"
    words = ["--eval-tokens", "512", "--sequence-length", "128", "--device", "cpu", "--speed-tokens", "0"]
    words += ["--data", little_text, "--cache-types", "q8_0,q8_0/q4_0", "--json", file]
    assert run_here("evaluate", demo_dir, "--original", demo_dir, *words) == 0
    record = json.loads(file.read_text())
    assert record["loss_increase"] == 0
    for row, name in zip(record["rounded_caches"], ("q8_0", "q8_0,q4_0"), strict=True):
        alone = evaluate_checkpoint(demo_dir, data=little_text, original=demo_dir, cache_format=name, **SIZES)
        assert row["cache_format"] == name
        for key in ("loss", "kl", "loss_increase", "loss_increase_stderr"):
            assert row[key] == pytest.approx(alone[key], abs=1e-9)
        assert row["share"] == alone["engine_cache"]["share"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "cache formats, relative to the original in 16 bits" in printed
    assert f"{record['rounded_caches'][1]['loss']:.4f}" in printed


def test_a_wrong_format_is_refused_before_torch_is_imported(
    demo_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="cache_format: expected one of"):
        EvaluateOptions(checkpoint=demo_dir, cache_format="q9")
    with pytest.raises(ConfigError, match="q8_0 is supported by llama.cpp, and target gqa is read by"):
        export_checkpoint(demo_dir, "gqa", tmp_path / "out", cache_format="q8_0")
    assert run_here("evaluate", demo_dir, "--engine", "llama.cpp", "--cache-format", "q8_0") == 2
    assert "leave out --cache-format" in capsys.readouterr().err


def test_an_export_is_served_with_the_flags_of_the_format(
    demo_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, flags = tmp_path / "out", "--cache-type-k q8_0 --cache-type-v q4_0 --flash-attn on"
    model = tmp_path / "my model"
    model.symlink_to(demo_dir)
    assert run_here("export", model, "--target", "gguf", "--out", out, "--cache-format", "q8_0,q4_0") == 0
    printed = capsys.readouterr().out
    assert f"llama.cpp: {flags}" in printed
    assert f"headfold evaluate '{model}' --cache-format q8_0,q4_0" in printed
    assert f"llama-server -m model.gguf {flags}" in (out / "README.md").read_text()
    assert run_here("export", demo_dir, "--target", "vllm", "--out", tmp_path / "v", "--cache-format", "fp8") == 0
    assert "vllm serve path/to/v --kv-cache-dtype fp8" in (tmp_path / "v" / "README.md").read_text()


def test_estimate_says_first_what_a_format_alone_does(
    demo_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["estimate", "--model", demo_dir, "--kv-ratio", "0.5", "--json", tmp_path / "estimate.json"]
    assert run_here(*words) == 0
    assert capsys.readouterr().out.startswith("50% without any conversion: a cache in q8_0 (llama.cpp)")
    formats = json.loads((tmp_path / "estimate.json").read_text())["cache_formats"]
    assert [entry["kv_bytes_per_token"] for entry in formats] == [2176, 2048, 1664, 1152]
