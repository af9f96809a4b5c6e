"""`convert --polish`: a conversion is trained at its end, which is reported as training, estimated, and refused where
it is not possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import run_here
from transformers import LlamaConfig
from verbs import convert_checkpoint, convert_curve, estimate_conversion, evaluate_checkpoint

from attention.io import checkpoint
from orchestrator.config.parsing import ConfigError
from orchestrator.conversion.request import ConversionRequest
from orchestrator.reporting.card import CardFacts
from orchestrator.resources import estimate
from orchestrator.storage.outputs import read_result

SIZES = {"calibration_tokens": 512, "eval_tokens": 512, "sequence_length": 64, "device": "cpu"}


@pytest.fixture(scope="module")
def texts(little_text: str) -> dict[str, Any]:
    return {"calibration_data": little_text, "eval_data": little_text, **SIZES}


def test_a_polish_lowers_the_held_out_divergence_and_is_reported_as_training(
    texts: dict[str, Any], demo_dir: Path, tmp_path: Path
) -> None:
    plain = convert_checkpoint(demo_dir, "least_squares", 0.5, **texts)
    report = convert_checkpoint(demo_dir, "least_squares", 0.5, tmp_path / "out", polish=8, **texts)
    assert "polish" not in plain and report["kl"] < 0.99 * plain["kl"]
    assert report["plan"] == plain["plan"] and report["original_loss"] == plain["original_loss"]
    work = report["polish"]
    assert (work["steps"], work["tokens"], work["weights"]) == (8, 8 * 512, "kv")
    assert work["flops"] > 4 * report["parameters"] * work["tokens"] and report["seconds"]["polish"] > 0
    assert report["cost"]["tokens"] == plain["cost"]["tokens"], "what was trained is not in the cost of the conversion"
    result = evaluate_checkpoint(
        tmp_path / "out",
        demo_dir,
        speed_tokens=0,
        data=texts["calibration_data"],
        eval_tokens=512,
        sequence_length=64,
        device="cpu",
    )
    assert result["kl"] == pytest.approx(report["kl"], rel=1e-5), "what was measured is what was written"
    assert checkpoint.note_of(tmp_path / "out")["polish"]["steps"] == 8
    assert CardFacts.of(tmp_path / "out").trained["tokens"] == 8 * 512


def test_each_ratio_is_polished_from_the_same_original(texts: dict[str, Any], demo_dir: Path, tmp_path: Path) -> None:
    curve = convert_curve(demo_dir, "gqa", [0.5, 0.25], tmp_path / "curve", polish=1, **texts)
    alone = convert_checkpoint(demo_dir, "gqa", 0.25, polish=1, **texts)
    assert curve["points"][1]["kl"] == pytest.approx(alone["kl"], rel=1e-6)


def test_the_command_prints_the_training_and_its_estimate(
    texts: dict[str, Any], demo_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--calibration-tokens", "512", "--eval-tokens", "512", "--sequence-length", "64", "--device", "cpu"]
    command = ["convert", "--model", str(demo_dir), "--recipe", "gqa", "--kv-ratio", "0.5", *sizes]
    command += ["--data", texts["calibration_data"], "--polish", "1", "--polish-weights", "all"]
    assert run_here(*command, "--json", str(tmp_path / "record.json")) == 0
    assert "polish     1 steps of all weights, 512 tokens" in capsys.readouterr().out
    assert read_result(tmp_path / "record.json")["polish"]["weights"] == "all"


def test_the_estimate_counts_the_polish(tmp_path: Path) -> None:
    LlamaConfig(dtype="bfloat16").save_pretrained(tmp_path)  # as large as Llama 2 7B, and no weights

    def estimated(**more: Any) -> Any:
        return estimate_conversion(tmp_path, "gqa", 0.5, **more)

    plain, kv = estimated(), estimated(polish=36)
    everything = estimated(polish=36, polish_weights="all")
    assert plain.resident < kv.resident < everything.resident
    assert everything.resident - plain.resident > 12 * plain.parameters, "gradients and two moments"
    assert plain.flops < kv.flops < everything.flops and plain.seconds < kv.seconds
    per_token = 8 * plain.parameters  # forward, forward again, and back
    assert everything.flops - plain.flops > 36 * 2048 * per_token
    assert estimated(polish=72, polish_weights="all").flops - plain.flops > 1.8 * (everything.flops - plain.flops)


def test_a_polish_that_cannot_be_is_refused_before_anything_is_read(
    demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ConversionRequest, "texts", lambda self: pytest.fail("texts were read"))
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="polish: layer by layer no step.*headfold finetune"):
        convert_checkpoint(demo_dir, "gqa", 0.5, out, polish=4, layerwise=True, **SIZES)
    with pytest.raises(ConfigError, match="polish_weights: layers share heads by recipe directshare"):
        convert_checkpoint(demo_dir, "directshare", 1.0, out, polish=4, **SIZES)
    monkeypatch.setattr(estimate, "available_bytes", lambda device=None: 2**20)
    with pytest.raises(ConfigError, match="polish: it would take about .*available, and layer by layer.*finetune"):
        convert_checkpoint(demo_dir, "gqa", 0.5, out, polish=4, layerwise=None, **SIZES)
    assert not out.exists()
