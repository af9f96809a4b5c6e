"""A search that an older checkout began and lost can be resumed by this one: its files on disk are still understood.

`HEADFOLD_FORMER` names the other checkout, that of the last release for one:

    git worktree add /tmp/former v0.1.0
    HEADFOLD_FORMER=/tmp/former python -m pytest -m extended tests/orchestrator/pipeline/test_former_search.py
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from search_process import LITTLE, left_over, start_search

from orchestrator.storage.journal import REPORT, load_trials, read_events
from orchestrator.storage.json_files import read_json
from orchestrator.storage.records import DONE
from orchestrator.tracking.runs import Tracker

FORMER = os.environ.get("HEADFOLD_FORMER", "")
pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not FORMER, reason="HEADFOLD_FORMER names no other checkout"),
]

SETTINGS = [
    "name=former",
    "search.searcher=grid",
    "search.recipes=[gqa, least_squares]",
    "search.kv_ratios=[0.25]",
    "search.learning_rates=[3e-4, 1e-3]",
    "search.num_samples=0",
    "rungs.steps=[0, 1, 2]",
    "rungs.stop=false",
    "promotion.top=1",
    "promotion.steps=1",
    *LITTLE,
]
REPORTS = 4
"""After which the former checkout's driver is killed: the first trial has ended, the second has begun to train."""


def reports(folder: Path) -> list[dict[str, Any]]:
    """The reports in the journal: trial, step and loss."""
    if not (folder / "journal.jsonl").exists():
        return []
    events = [event for event in read_events(folder / "journal.jsonl") if event["event"] == REPORT]
    return [{"trial": e["trial"], "step": e["result"]["step"], "loss": e["result"]["loss"]} for e in events]


def test_a_search_that_the_former_checkout_began_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "former"
    first = start_search(tmp_path, SETTINGS, repository=Path(FORMER))
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline and first.poll() is None and len(reports(folder)) < REPORTS:
        time.sleep(0.1)
    assert first.poll() is None, first.communicate()[0]
    os.killpg(first.pid, signal.SIGKILL)
    log = first.communicate()[0]
    assert left_over(tmp_path, 60) == []
    before = reports(folder)
    assert len(before) >= REPORTS, log

    second = start_search(tmp_path, SETTINGS, "--resume")
    log = second.communicate(timeout=900)[0]
    assert second.returncode == 0, log
    after, trials = reports(folder), load_trials(folder)
    assert after[: len(before)] == before, "nothing that was measured is lost or measured again"
    assert len({(report["trial"], report["step"]) for report in after}) == len(after) == 12
    assert [(trial.status, trial.step) for trial in trials] == [(DONE, 2)] * 4
    (promoted,) = read_json(folder / "promotion.json")["candidates"].values()
    assert promoted["status"] in ("promoted", "refused"), promoted
    tracker, parent = Tracker.open(None, "headfold", tmp_path), read_json(folder / "state.json")["parent_run"]
    assert {run.info.status for run in tracker.children(parent)} == {"FINISHED"}
    assert (folder / "report.html").stat().st_size > 10_000
