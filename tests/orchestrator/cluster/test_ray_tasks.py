"""Progress of a Ray task, shown by whoever waits for it."""

from __future__ import annotations

import time

import pytest

from attention.base import progress
from attention.base.progress import stage
from orchestrator.cluster.ray_internals import put_value
from orchestrator.cluster.ray_tasks import PUBLISH_SECONDS, on_cluster, publish_progress, published_progress

OPTIONS = {"num_cpus": 0.5, "num_gpus": 0}


def test_the_stage_of_a_task_is_shown_where_it_is_waited_for(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(seconds: float) -> str:
        with stage("calibrating", 4, "layers") as told:
            told.step()
            time.sleep(seconds)
        return "done"

    monkeypatch.setattr(progress, "SAY_SECONDS", 0.5)
    with progress.show_progress("search"):
        assert on_cluster(OPTIONS, "original model", work, 3 * PUBLISH_SECONDS) == "done"
    assert "so far; calibrating: 1 of 4 layers, " in capsys.readouterr().err


def test_nothing_is_kept_of_what_has_ended(ray_cluster: None) -> None:
    with publish_progress("mine", "planning"):
        put_value("mine", "half done")
        assert published_progress("mine") == "half done"
    assert published_progress("mine") == ""
    assert published_progress("nobody's") == ""
