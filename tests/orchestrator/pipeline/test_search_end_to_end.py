"""Real searches on two cores: Ray Tune, Ray Train, DeepSpeed, MLflow, on the demo checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from search_process import LITTLE, left_over, start_search

from orchestrator.storage.journal import load_trials
from orchestrator.storage.records import DONE, FAILED, KILLED, read_json
from orchestrator.tracking.runs import Tracker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

REPOSITORY = Path(__file__).resolve().parents[3]
SMALL = [
    "name=small",
    "search.searcher=grid",
    "search.recipes=[gqa,least_squares]",
    "search.kv_ratios=[0.25]",
    "search.num_samples=0",
    "rungs.steps=[0,1,3]",
    "promotion.steps=2",
    *LITTLE,
]


def start(storage: Path, *arguments: str) -> subprocess.Popen[str]:
    return start_search(storage, SMALL, *arguments)


def runs_of(storage: Path, folder: Path) -> tuple[Any, list[Any]]:
    """The parent run of a search and its children."""
    tracker = Tracker.open(None, "headfold", storage)
    parent = read_json(folder / "state.json")["parent_run"]
    return tracker.client.get_run(parent), tracker.children(parent)


def test_ctrl_c_ends_a_search_in_order(tmp_path: Path) -> None:
    """How it goes on, and that it ends in an exported checkpoint, is for test_chaos.py."""
    folder = tmp_path / "small"
    first = start(tmp_path)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and first.poll() is None:
        if any(t.rungs for t in load_trials(folder)):
            break
        time.sleep(0.2)
    assert first.poll() is None, first.communicate()[0]
    os.killpg(first.pid, signal.SIGINT)  # as the terminal does for Ctrl-C: to Ray's processes too
    log = first.communicate(timeout=300)[0]
    assert first.returncode == 130, log
    assert "--resume" in log
    assert "Traceback" not in log
    assert left_over(tmp_path) == []
    assert KILLED in {t.status for t in load_trials(folder)}
    parent, children = runs_of(tmp_path, folder)
    assert parent.info.status == "KILLED"
    assert "RUNNING" not in {run.info.status for run in children}


def test_a_failing_trial_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    """A learning rate that no optimiser can hold."""
    rates = ["search.learning_rates=[3e-4,1e38]", "search.recipes=[gqa]", "promotion.enabled=false"]
    process = start(tmp_path, *rates)
    log = process.communicate(timeout=900)[0]
    folder = tmp_path / "small"
    trials = {t.learning_rate: t for t in load_trials(folder)}
    assert process.returncode == 0, log
    assert trials[3e-4].status == DONE
    assert left_over(tmp_path) == []
    assert trials[1e38].status == FAILED
    assert "Error" in (trials[1e38].error or "")
    assert "1 of 2 trials failed" in log
    assert str(trials[1e38].error).split(":")[0] in log
    parent, children = runs_of(tmp_path, folder)
    assert parent.info.status == "FINISHED"
    assert sorted(run.info.status for run in children) == ["FAILED", "FINISHED"]
    assert [e for run in children if (e := run.data.tags.get("error"))] == [trials[1e38].error]
