"""A search of a tiny model that has ended, a store for its promotion, and no cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from journals import write_journal
from promotions import APART, HALF, plan, trial

from attention.conversion.convert import convert
from attention.io import checkpoint
from orchestrator.config.schema import SearchConfig, parse_config
from orchestrator.search.trials.context import TrialContext
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.tracking.runs import Tracker
from trainers.text.data import write_sequences


@pytest.fixture
def config(tmp_path: Path) -> SearchConfig:
    return parse_config(
        {
            "name": "small",
            "model": {"path": str(tmp_path / "base")},
            "search": {"recipes": ["gqa", "headfold"], "kv_ratios": [0.5]},
            "rungs": {"steps": [0, 4]},
        }
    )


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Any) -> SearchFolder:
    """A search with two trials of 4 steps each: their weights are converted ones of a tiny model."""
    result = SearchFolder.fresh(tmp_path / "runs", "small")
    base = tiny_model("llama")
    checkpoint.save(base, tmp_path / "base")
    for name, layer in (("head", HALF), ("base", HALF), ("apart", APART)):
        trial_folder = result.trial(name)
        checkpoint.save(convert(base, plan(layer)), trial_folder / "trained")
        (trial_folder / "plan.json").write_text(plan(layer).to_json())
    write_sequences(torch.arange(48).reshape(3, 16) % 64, tmp_path / "eval")
    write_json(result.original, {"loss": 2.0, "model": str(tmp_path / "base")})
    write_json(result.state, {"parent_run": "none"})
    result.snapshot.write_text("name: small\n")
    return result


@pytest.fixture
def context(tmp_path: Path, folder: SearchFolder) -> TrialContext:
    return TrialContext(
        folder=str(folder.root),
        model=str(tmp_path / "base"),
        dtype="float32",
        train_file="",
        eval_file=str(tmp_path / "eval"),
        calibration_file="",
        calibration_cache="",
        rungs=(0, 4),
        train={},
        original_loss=2.0,
    )


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate looks at a model in a Ray task where this process is connected to a Ray, as it is after other files."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that have reached the full steps need no workers: a start of Ray would be a mistake."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("no training is needed here")

    monkeypatch.setattr("ray.init", refuse)
    monkeypatch.setattr("ray.wait", refuse)


@pytest.fixture
def ended_search(folder: SearchFolder, tracker: Tracker) -> str:
    """The run of a search that has ended, with one trial that is better than its baseline."""
    write_journal(folder.root, [trial("head", "headfold", 2.2), trial("base", "gqa", 2.9)])
    return tracker.start("search")
