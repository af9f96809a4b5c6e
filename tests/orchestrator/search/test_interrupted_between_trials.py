"""Ctrl-C in the moment between two trials of a search that runs one at a time."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from small_searches import small_search

from orchestrator.pipeline import search
from orchestrator.search.leftovers import Cleaning
from orchestrator.storage.journal import read_history
from orchestrator.storage.paths import SearchFolder


@pytest.mark.slow
def test_the_search_is_interrupted_although_no_trial_is_open(
    demo_dir: Path, tmp_path: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {"recipes": ["gqa"], "kv_ratios": [0.5, 0.25]}
    config = small_search(demo_dir, tmp_path, search=arms, rungs={"steps": [0]}, promotion={"enabled": False})
    real, sent = Cleaning.on_step_end, []

    def interrupting(self: Cleaning, iteration: int, trials: list, **info: Any) -> None:
        real(self, iteration, trials, **info)
        if len(self.history.ends) == 1 and not self.history.open and not sent:
            sent.append(iteration)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Cleaning, "on_step_end", interrupting)
    first = search(config)
    assert sent and first.interrupted and first.exit_code == 130
    folder = SearchFolder(first.folder)
    assert len(first.trials) == 1 and read_history(folder.journal).interrupted
    assert "ended" not in folder.read_state()

    monkeypatch.setattr(Cleaning, "on_step_end", real)
    rest = search(config, resume=True)
    assert (rest.folder, rest.interrupted, len(rest.trials)) == (first.folder, False, 2)
