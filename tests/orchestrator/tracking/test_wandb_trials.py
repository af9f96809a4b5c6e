"""Trials in Weights & Biases: runs of wandb itself, which writes them to files where there is no account."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config.parsing import ConfigError
from orchestrator.tracking.wandb_trials import check_wandb

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who has logged in nowhere."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_without_a_project_nothing_is_needed(nobody: None) -> None:
    check_wandb(None)


def test_what_is_missing_is_reported_before_a_search(nobody: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setattr("orchestrator.tracking.wandb_trials.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="tracking.wandb: 'heads' needs wandb, which is not installed: pip"):
            check_wandb("heads")


def test_a_missing_key_is_reported_before_a_search(nobody: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    with pytest.raises(ConfigError, match="no key was found: set WANDB_API_KEY"):
        check_wandb("heads")
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_wandb("heads")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    check_wandb("heads")


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_each_trial_is_a_run_of_the_project(tmp_path: Path, demo_dir: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install '.[wandb]'")
    settings = [f"storage={tmp_path}", f"model.path={demo_dir}", "name=logged", "tracking.wandb=heads"]
    settings += ["search.recipes=[gqa, least_squares]", "search.kv_ratios=[0.25]", "search.search_space={}"]
    settings += [
        "search.num_samples=0",
        "rungs.steps=[0, 1]",
        "rungs.stop=false",
        "promotion.steps=1",
        "promotion.top=1",
    ]
    settings += ["data.train.tokens=8192", "data.eval.tokens=1024", "data.calibration.tokens=1024"]
    outcome = tmp_path / "outcome.json"
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "orchestrator/main.py", "search", "configs/demo.yaml", *settings, "--json", str(outcome)],
        cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = {file.stem.removeprefix("run-"): file.read_bytes() for file in tmp_path.rglob("run-*.wandb")}
    trials = {f"logged-{trial['trial_id']}": trial for trial in json.loads(outcome.read_text())["trials"]}
    assert sorted(files) == sorted(trials) and len(trials) == 2
    for name, content in files.items():
        assert b"heads" in content and b"logged" in content, "the project and the group"
        rungs = trials[name]["rungs"]
        assert len(rungs) == 2
        for rung in rungs:
            assert repr(rung["loss"]).encode() in content, "each rung's loss, to the last digit"
