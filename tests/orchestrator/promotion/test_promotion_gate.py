"""The gate, with real checkpoints; no cluster."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from promotions import HALF, checked, entry, plan

from attention.io import checkpoint
from attention.plan import LayerPlan
from orchestrator.config.schema import SearchConfig
from orchestrator.promotion import gate
from orchestrator.search.trials.context import TrialContext
from orchestrator.storage.paths import SearchFolder
from trainers.evaluation import evaluate
from trainers.text.data import read_sequences

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


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"baseline_loss": 2.1}, "not below the baseline's 2.1"),
        ({"loss": 2.6}, "not below the baseline's 2.5"),
        ({"loss": float("nan")}, "nan"),
        ({"baseline_loss": None}, "no baseline gqa"),
        ({"recipe": "gqa"}, "the baseline gqa itself"),
    ],
)
def test_what_is_not_better_than_the_baseline_is_refused(
    config: SearchConfig, folder: SearchFolder, context: TrialContext, more: dict[str, Any], said: str
) -> None:
    (reason,) = checked(entry(folder, **more), config, context, folder).reasons
    assert said in reason


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
