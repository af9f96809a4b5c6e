"""The gate, with real checkpoints; no cluster."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from promotions import HALF, checked, entry, plan, with_baseline

from attention.calibration.calibrate import calibrate
from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from orchestrator.config.schema import SearchConfig
from orchestrator.promotion import gate, model_card
from orchestrator.search.trials.context import TrialContext
from orchestrator.storage.paths import SearchFolder
from trainers.evaluation import evaluate
from trainers.text.data import read_sequences, write_sequences

pytestmark = pytest.mark.usefixtures("in_this_process")


def test_a_sound_candidate_passes_and_is_exported_as_a_plain_model(
    config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> None:
    result = checked(entry(folder), config, context, folder)
    assert result.reasons == []
    model, checks = result.record.model or "", result.record.checks
    assert result.record.plain
    assert Path(model).name == "exported"
    assert checks["cache_bytes_measured"] == checks["kv_bytes_per_token"] * checks["cache_tokens"]
    assert checks["max_logit_difference"] <= 1e-4
    assert checkpoint.load_config(model).model_type == "llama"


@pytest.mark.parametrize("name", ["head", "apart"])
def test_the_export_has_the_dtype_of_the_checkpoint_and_agrees_with_the_rounded_weights(
    name: str, config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> None:
    """Trained in float32, shipped in bfloat16: bytes and held-out loss are those of what is shipped."""
    context = dataclasses.replace(context, dtype="bfloat16")
    result = checked(entry(folder, name), config, context, folder)
    assert result.reasons == []
    record, checks = result.record, result.record.checks
    assert checks["max_logit_difference"] <= 1e-4
    assert record.kv_bytes_per_token == plan(HALF).kv_bytes_per_token("bfloat16")
    assert checks["cache_bytes_measured"] == record.kv_bytes_per_token * checks["cache_tokens"]
    exported = checkpoint.load(record.model or "")
    assert exported.dtype == torch.bfloat16
    shipped = evaluate(exported.float(), read_sequences(context.eval_file)[:])
    assert checks["exported_loss"] == pytest.approx(shipped.loss, abs=1e-6)


def test_a_check_that_was_killed_is_made_anew_and_keeps_the_trained_weights(
    config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> None:
    place = folder.promoted / "head-4"
    shutil.copytree(folder.trial("head") / "trained", place / "trained")
    candidate = entry(folder, trained=str(place / "trained"))
    first = checked(candidate, config, context, folder)
    (Path(first.record.model or "") / "lineage.json").write_text("{}")  # the kill came right after
    again = checked(candidate, config, context, folder)
    assert again.reasons == []
    assert again.record.model == first.record.model == str(place / "exported")
    assert checkpoint.intact(place / "trained")


def test_a_plan_without_a_stock_form_is_kept_in_our_own(
    config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> None:
    result = checked(entry(folder, "apart"), config, context, folder)
    assert result.reasons == []
    assert not result.record.plain
    model = result.record.model or ""
    assert Path(model).name == "headfold", "only what stock transformers loads is called exported"
    assert checkpoint.load_config(model).model_type == "headfold_llama"


def test_wide_heads_are_exported_as_the_stock_model_that_training_wrote(
    config: SearchConfig, folder: SearchFolder, context: TrialContext, tmp_path: Path
) -> None:
    wide = plan(LayerPlan((0,) * 4, (0,) * 4, key_width=2, value_width=2))
    base = checkpoint.load(tmp_path / "base")
    tokens = torch.arange(48).reshape(3, 16) % 64
    converted = convert(base, wide, fusion="least_squares", calibration=calibrate(base, tokens))
    checkpoint.save(converted, folder.trial("wide") / "trained")
    (folder.trial("wide") / "plan.json").write_text(wide.to_json())
    result = checked(entry(folder, "wide"), config, context, folder)
    assert result.reasons == [] and result.record.plain
    model = Path(result.record.model or "")
    assert model.name == "exported" and result.record.checks["export"] == "gqa"
    stock = checkpoint.load_config(model)
    assert (stock.model_type, stock.num_key_value_heads, stock.head_dim) == ("llama", 1, 16)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"baseline_loss": 2.1}, "not below the baseline's 2.1"),
        ({"loss": 2.6}, "not below the baseline's 2.5"),
        ({"loss": float("nan")}, "nan"),
        ({"baseline_loss": None}, "no baseline gqa"),
        ({"recipe": "gqa"}, "the baseline gqa itself"),
    ],
)
def test_what_is_not_better_than_the_baseline_is_refused(
    config: SearchConfig, folder: SearchFolder, context: TrialContext, more: dict[str, Any], message: str
) -> None:
    (reason,) = checked(entry(folder, **more), config, context, folder).reasons
    assert message in reason


def test_the_margin_counts(config: SearchConfig, folder: SearchFolder, context: TrialContext) -> None:
    wide = config.model_copy(update={"promotion": config.promotion.model_copy(update={"margin": 0.5})})
    assert checked(entry(folder, loss=1.9), wide, context, folder).reasons == []
    assert "by more than 0.5" in checked(entry(folder, loss=2.1), wide, context, folder).reasons[0]


def test_a_cache_that_is_larger_than_planned_is_refused(
    config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> None:
    quarter = plan(LayerPlan((0,) * 4, (0,) * 4))
    (folder.trial("head") / "plan.json").write_text(quarter.to_json())
    reasons = checked(entry(folder), config, context, folder).reasons
    assert any("the cache holds" in reason for reason in reasons)
    assert any("the exported checkpoint serves" in reason for reason in reasons)


def test_an_export_with_other_logits_is_refused(
    config: SearchConfig, folder: SearchFolder, context: TrialContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(source: str, target: str, out: Path, tokenizer: Any = None, **_: Any) -> Any:
        model = checkpoint.load(source)
        with torch.no_grad():
            model.get_output_embeddings().weight += 1e-2
        checkpoint.save(model, out)
        return type("Report", (), {"exact": True})()

    monkeypatch.setattr(gate, "export", spoilt)
    (reason,) = checked(entry(folder), config, context, folder).reasons
    assert "logits of the exported checkpoint differ" in reason


def test_the_exact_export_of_a_deep_model_passes_and_a_tolerance_that_is_set_overrides(
    config: SearchConfig,
    folder: SearchFolder,
    context: TrialContext,
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits in float32 that differ by more than the fixed 1e-4 of earlier versions."""
    layers = 32
    base = tiny_model("llama", num_hidden_layers=layers)
    with torch.no_grad():
        base.get_output_embeddings().weight *= 300
    deep = AttentionPlan((HALF,) * layers, head_dim=8)
    checkpoint.save(convert(base, deep), folder.trial("deep") / "trained")
    (folder.trial("deep") / "plan.json").write_text(deep.to_json())

    def exported(source: str, target: str, out: Path, tokenizer: Any = None, **_: Any) -> Any:
        """The same model with the hidden units of its MLPs in another order."""
        model: Any = checkpoint.load(source)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for layer in model.model.layers:
                mlp = layer.mlp
                order = torch.randperm(mlp.down_proj.in_features, generator=generator)
                for projection in (mlp.gate_proj, mlp.up_proj):
                    projection.weight.copy_(projection.weight[order])
                mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, order])
        checkpoint.save(model, out)
        return type("Report", (), {"exact": True})()

    monkeypatch.setattr(gate, "export", exported)
    result = checked(entry(folder, "deep"), config, context, folder)
    checks = result.record.checks
    assert result.reasons == []
    assert 1e-4 < checks["max_logit_difference"] <= checks["logit_tolerance"]
    assert checks["logit_tolerance"] == 8 * checks["logit_noise"]
    strict = config.model_copy(update={"promotion": config.promotion.model_copy(update={"logit_tolerance": 1e-4})})
    (reason,) = checked(entry(folder, "deep"), strict, context, folder).reasons
    assert "allowed are 0.0001" in reason


@pytest.fixture
def third_text(context: TrialContext, tmp_path: Path) -> TrialContext:
    """With a text of the gate's own: sequences as they are easy for a model of `counting`."""
    rows = torch.arange(16 * 32).reshape(32, 16) % 64
    write_sequences(rows, tmp_path / "third")
    return dataclasses.replace(context, test_file=str(tmp_path / "third"))


def disturbed(folder: SearchFolder, name: str, size: float) -> str:
    """Weights of the trial `head` with noise on the output head, in a separate folder."""
    model = checkpoint.load(folder.trial("head") / "trained")
    weight = model.get_output_embeddings().weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weight += size * noise
    checkpoint.save(model, folder.trial(name) / "noisy")
    return str(folder.trial(name) / "noisy")


def test_the_gate_compares_on_documents_that_nothing_was_chosen_by(
    config: SearchConfig, folder: SearchFolder, third_text: TrialContext
) -> None:
    """The candidate was lucky on the text that steps and trials are chosen by."""
    worse = disturbed(folder, "head", 1.0)
    sound = str(folder.trial("base") / "trained")
    lucky = with_baseline(entry(folder, trained=worse, loss=2.1), sound, 2.5)
    result = checked(lucky, config, third_text, folder)
    (reason,) = result.reasons
    checks = result.record.checks
    assert "loss on the gate's own text" in reason and "not below the baseline's" in reason
    text = read_sequences(third_text.test_file or "")[:]
    assert checks["test_loss"] == pytest.approx(evaluate(checkpoint.load(worse), text).loss)
    assert checks["baseline_test_loss"] == pytest.approx(evaluate(checkpoint.load(sound), text).loss)
    assert checks["loss_difference"] == pytest.approx(checks["baseline_test_loss"] - checks["test_loss"])
    assert (checks["test_documents"], checks["test_tokens"]) == (32, 512)
    assert "warning" not in checks

    unlucky = with_baseline(entry(folder, loss=2.6), worse, 2.5)
    assert checked(unlucky, config, third_text, folder).reasons == []


def test_a_baseline_of_fewer_bytes_is_recorded_and_on_the_card(
    config: SearchConfig, folder: SearchFolder, third_text: TrialContext
) -> None:
    fewer = plan(LayerPlan((0,) * 4, (0,) * 4))
    base = convert(checkpoint.load(folder.trial("base") / "trained"), fewer, fusion="mean")
    small = str(checkpoint.save(base, folder.root / "smaller"))
    record = checked(with_baseline(entry(folder), small, 2.5), config, third_text, folder).record
    size = fewer.kv_bytes_per_token("float32")
    assert (record.checks["baseline_kv_bytes_per_token"], record.kv_bytes_per_token) == (size, 2 * size)
    assert any("has no plan of as many bytes" in note for note in model_card._loss_notes(record))
    equal = str(folder.trial("head") / "trained")
    record = checked(with_baseline(entry(folder), equal, 2.5), config, third_text, folder).record
    assert record.checks["baseline_kv_bytes_per_token"] == record.kv_bytes_per_token
    assert not any("as many bytes" in note for note in model_card._loss_notes(record))


def test_a_difference_within_its_error_is_refused_where_the_margin_asks_for_standard_errors(
    config: SearchConfig, folder: SearchFolder, third_text: TrialContext
) -> None:
    close = with_baseline(entry(folder), disturbed(folder, "base", 1e-4), 2.5)
    clear = with_baseline(entry(folder), disturbed(folder, "apart", 1.0), 2.5)
    section = config.promotion.model_copy(update={"margin_standard_errors": 30.0})
    strict = config.model_copy(update={"promotion": section})
    result = checked(close, config, third_text, folder).record.checks
    low, high = result["loss_difference_interval"]
    assert low is not None and high is not None and low < result["loss_difference"] < high
    assert result["loss_difference_stderr"] == pytest.approx((high - low) / 3.92, rel=0.2)
    (reason,) = checked(close, strict, third_text, folder).reasons
    assert "30 standard errors" in reason
    section = config.promotion.model_copy(update={"margin_standard_errors": 2.0})
    usual = config.model_copy(update={"promotion": section})
    assert checked(clear, usual, third_text, folder).reasons == []


def test_without_a_third_text_the_record_says_what_the_comparison_lacks(
    config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> None:
    checks = checked(entry(folder), config, context, folder).record.checks
    assert "too little held-out text" in checks["warning"] and "test_loss" not in checks
    section = config.promotion.model_copy(update={"margin_standard_errors": 2.0})
    usual = config.model_copy(update={"promotion": section})
    (reason,) = checked(entry(folder), usual, context, folder).reasons
    assert "2 standard errors of nan" in reason, "there are no weights of the baseline"
