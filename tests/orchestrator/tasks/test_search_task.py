"""`search`, its dry run, `estimate` and `init` open the checkpoint once, and make the inputs of the estimate once."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_here

from attention.io import checkpoint
from orchestrator import pipeline
from orchestrator.cluster.capacity import Nodes
from orchestrator.config.options import DemoOptions
from orchestrator.config.schema import read_search_config
from orchestrator.search import setup
from orchestrator.search.prepare import _text_digests, trial_context
from orchestrator.tasks.demo import demo
from orchestrator.tracking.runs import Tracker


class TrialsBegin(Exception):
    """Raised instead of running the trials."""


@pytest.mark.parametrize("storage", ["runs/try #2", "1.50", "é: 'x'"])
def test_a_demo_takes_its_storage_as_it_stands(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def reading(config: Path, changes: list[str]) -> None:
        read.append(read_search_config(config, changes).storage)
        raise TrialsBegin

    monkeypatch.setattr("orchestrator.tasks.demo.read_search_config", reading)
    with pytest.raises(TrialsBegin):
        demo(DemoOptions(storage=Path(storage)))
    assert read == [storage]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, demo_dir: Path) -> Counter[str]:
    """Number of calls of functions that should run once."""
    counted: Counter[str] = Counter()
    read, inputs = checkpoint.load_config, setup.SearchInputs

    def reading(source: str | Path, **more: Any) -> Any:
        counted["config.json"] += Path(source) == demo_dir
        return read(source, **more)

    def making(**fields: Any) -> Any:
        counted["inputs"] += 1
        return inputs(**fields)

    monkeypatch.setattr(checkpoint, "load_config", reading)
    monkeypatch.setattr(setup, "SearchInputs", making)
    return counted


@pytest.fixture
def config(demo_dir: Path, tmp_path: Path, little_text: str) -> Path:
    """A search for an engine, which looks at the checkpoint's config for what that loads."""
    sections = {
        "name": "small",
        "model": {"path": str(demo_dir)},
        "data": {
            "source": little_text,
            "sequence_length": 64,
            "train": {"tokens": 2048},
            "eval": {"tokens": 512},
            "calibration": {"tokens": 512},
        },
        "search": {"target": "gqa", "searcher": "grid", "recipes": ["gqa"], "kv_ratios": [0.5]},
        "rungs": {"steps": [0, 2]},
        "train": {"batch_size": 4, "cpus_per_worker": 0.5},
        "promotion": {"enabled": False, "prompts": ["Heads"]},
        "resources": {"tokens_per_second": 1000, "accelerator_type": None},
        "tracking": {"uri": f"sqlite:///{tmp_path}/mlflow.db"},
        "storage": str(tmp_path / "runs"),
    }
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


def test_a_dry_run(config: Path, calls: Counter[str]) -> None:
    assert run_here("search", config, "--dry-run") == 0
    assert calls == {"config.json": 1, "inputs": 1}


def test_an_estimate(config: Path, calls: Counter[str]) -> None:
    assert run_here("estimate", config) == 0
    assert calls == {"config.json": 1, "inputs": 1}


def test_a_first_configuration(demo_dir: Path, tmp_path: Path, calls: Counter[str]) -> None:
    assert run_here("init", demo_dir, "--out", tmp_path / "first.yaml", "--storage", tmp_path / "runs") == 0
    assert calls == {"config.json": 1, "inputs": 1}


def test_the_start_of_a_search(config: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it in the driver up to the trials, whose context is made too."""
    begun: list[Any] = []

    def begin(config: Any, prepared: Any, folder: Any, *_: Any) -> None:
        original: Any = {"model": config.model.path, "loss": 2.0, "texts": _text_digests(prepared)}
        begun.append(trial_context(config, prepared, folder, original))
        raise TrialsBegin

    monkeypatch.setattr(pipeline, "connected", lambda: nullcontext([Nodes(1, {"CPU": 2.0})]))
    monkeypatch.setattr(pipeline, "_run_to_end", begin)
    monkeypatch.setattr(Tracker, "open", lambda *_: None)
    monkeypatch.setattr(pipeline, "MlflowSync", lambda *_: None)
    monkeypatch.setattr(pipeline, "_save_run_id", lambda *_: None)
    assert run_here("search", config) == 1 and len(begun) == 1
    assert calls == {"config.json": 1, "inputs": 1}
