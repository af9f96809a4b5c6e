"""A promotion for an engine: the model in its format next to the checkpoint, loaded in llama.cpp by the gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from orchestrator.config.schema import ConfigError, parse_config
from orchestrator.promotion.engine_export import export_for_engine
from orchestrator.promotion.gate import GateResult, examine
from orchestrator.promotion.state import TRAINED, BaselineModel, PromotionEntry, TrainedModel
from orchestrator.search.trials.context import TrialContext
from orchestrator.search.validation import validate_search
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder
from trainers.text.data import write_sequences

COUNTS = (4, 2, 1, 2)
BYTES = 2 * sum(COUNTS) * 32 * 4  # keys and values, head dim, float32


def layer(keys: int, values: int | None = None) -> LayerPlan:
    return LayerPlan(*(tuple(head * count // 8 for head in range(8)) for count in (keys, values or keys)))


def examined(
    demo_dir: Path, demo_model: PreTrainedModel, tmp_path: Path, target: str, *layers: LayerPlan
) -> GateResult:
    """The gate's result for the demo model with these layers; its loss does not matter here."""
    folder, plan = SearchFolder.fresh(tmp_path / "runs", "small"), AttentionPlan(layers, head_dim=32)
    trial_folder = folder.trial("head")
    checkpoint.save(convert(demo_model, plan), trial_folder / "trained")
    (trial_folder / "plan.json").write_text(plan.to_json())
    write_sequences(torch.arange(48).reshape(3, 16), tmp_path / "eval")
    write_json(folder.original, {"loss": 2.0, "model": str(demo_dir)})
    config = parse_config(
        {"name": "small", "model": {"path": str(demo_dir)}, "search": {"target": target, "kv_ratios": [0.5]}}
    )
    shared: dict[str, Any] = {"train_file": "", "calibration_file": "", "calibration_cache": "", "train": {}}
    shared |= {"eval_file": str(tmp_path / "eval"), "rungs": (0, 4), "dtype": "float32", "original_loss": 2.0}
    context = TrialContext(folder=str(folder.root), model=str(demo_dir), **shared)
    entry = PromotionEntry("head", "headfold_layers", 0.5, 4, status=TRAINED)
    entry.trained = TrainedModel(str(trial_folder / "trained"), loss=2.1)
    entry.baseline = BaselineModel(None, 2.5, None)
    return examine(entry, config, folder, context)


def test_counts_of_each_layer_s_own_are_supported_by_llama_cpp(
    demo_dir: Path, demo_model: PreTrainedModel, tmp_path: Path
) -> None:
    result = examined(demo_dir, demo_model, tmp_path, "llama.cpp", *map(layer, COUNTS))
    assert result.reasons == []
    seen = result.record
    assert seen.outcomes["engine"] == "passed"
    assert (seen.kv_bytes_per_token, seen.checks["engine_kv_heads"]) == (BYTES, list(COUNTS))
    report = [seen.checks[f"engine_kv_bytes_per_token{end}"] for end in ("", "_promised")]
    assert seen.checks["engine"] == "llama.cpp" and report[0] == report[1] > 0
    served = Path(str(seen.served))
    assert json.loads((served / "export.json").read_text())["check"]["passed"]
    assert (served / "model.gguf").is_file() and not seen.plain


def test_an_engine_that_is_not_there_is_reported_and_its_folder_written(
    demo_dir: Path, demo_model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("HEADFOLD_VLLM_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    seen = examined(demo_dir, demo_model, tmp_path, "vllm", *map(layer, COUNTS))
    assert seen.reasons == [] and (Path(str(seen.record.served)) / "config.json").is_file()
    assert seen.record.checks["engine"].startswith("not checked: ")
    assert "headfold_layers · 50%: vllm not loaded in its engine" in capsys.readouterr().out
    served = Path(str(seen.record.served))
    (served / "README.md").write_text("the card of a promotion that was killed before it wrote the digests")
    again, _, reason = export_for_engine(str(seen.record.model), "vllm", "head")
    assert (again, reason) == (str(served), None)


def test_a_plan_that_the_engine_does_not_hold_is_refused(
    demo_dir: Path, demo_model: PreTrainedModel, tmp_path: Path
) -> None:
    seen = examined(demo_dir, demo_model, tmp_path, "gguf", *[layer(2, 4)] * 4)
    assert any(reason.startswith("export to gguf failed: ") for reason in seen.reasons)
    assert seen.record.outcomes["engine"] != "passed" and seen.record.served is None


def test_a_search_for_an_engine_refuses_what_does_not_go_there(
    demo_dir: Path, tmp_path: Path, little_text: str
) -> None:
    def search(target: str, recipes: list[Any]) -> Any:
        section = {"target": target, "recipes": recipes, "kv_ratios": [0.5], "num_samples": 2}
        sizes = {split: {"tokens": 1280} for split in ("train", "eval", "calibration")}
        settings = {"name": "small", "model": {"path": str(demo_dir)}, "search": section, "storage": str(tmp_path)}
        settings["data"] = {"source": little_text, "sequence_length": 64, **sizes}
        return validate_search(parse_config(settings)).problem

    with pytest.raises(ConfigError, match="headfold: target vllm stores a key head with each value head") as caught:
        search("vllm", ["gqa", "headfold"])
    assert "take another recipe (" in str(caught.value) and "headfold_layers" in str(caught.value)
    with pytest.raises(ConfigError, match="allocation must be uniform, got layerwise"):
        search("gqa", ["gqa", "headfold_layers"])
    changed = {"recipe": "asymgqa", "changes": {"together": True}}
    assert len(search("llama.cpp", ["gqa", "headfold_layers", changed]).named) == 3
    with pytest.raises(ConfigError, match=r"search\.target"):
        search("tensorrt", ["gqa"])
