"""Progress of a Ray task, shown by the process that waits for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import ray

from attention.base import progress
from attention.base.progress import stage
from orchestrator.cluster.ray_internals import put_value
from orchestrator.cluster.ray_tasks import (
    PUBLISH_SECONDS,
    each_on_cluster,
    on_cluster,
    publish_progress,
    published_progress,
)

OPTIONS = {"num_cpus": 0.5, "num_gpus": 0}


def test_the_stage_of_a_task_is_shown_where_it_is_waited_for(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(seconds: float) -> str:
        with stage("calibrating", 4, "layers") as counter:
            counter.step()
            time.sleep(seconds)
        return "done"

    monkeypatch.setattr(progress, "SAY_SECONDS", 0.5)
    with progress.show_progress("search"):
        assert on_cluster(OPTIONS, "original model", work, 3 * PUBLISH_SECONDS) == "done"
    assert "; calibrating: 1 of 4 layers, " in capsys.readouterr().err


def test_nothing_is_kept_of_what_has_ended(ray_cluster: None) -> None:
    with publish_progress("mine", "planning"):
        put_value("mine", "half done")
        assert published_progress("mine") == "half done"
    assert published_progress("mine") == ""
    assert published_progress("nobody's") == ""


@pytest.mark.extended
def test_calls_that_each_need_all_that_there_is_follow_one_another(
    ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = {"num_cpus": ray.cluster_resources()["CPU"], "num_gpus": 0}
    with progress.show_progress("search"):
        result = dict(each_on_cluster(everything, "gates", lambda number: 10 * number, [(n,) for n in range(3)]))
    assert result == {0: 0, 1: 10, 2: 20}


def test_as_many_calls_run_at_a_time_as_are_allowed_and_a_mistake_ends_the_others(
    ray_cluster: None, tmp_path: Path
) -> None:
    def work(number: int) -> int:
        running = tmp_path / str(number)
        running.touch()
        time.sleep(0.2)
        together = len(list(tmp_path.iterdir()))
        running.unlink()
        if number == 5:
            raise ValueError("the fifth")
        return together

    def waiting(number: int) -> int:
        """The number of calls at a time, once there are two, or after ten seconds."""
        running = tmp_path / f"waits{number}"
        running.touch()
        end = time.monotonic() + 10
        while (together := len(list(tmp_path.glob("waits*")))) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.2)
        running.unlink()
        return together

    options = OPTIONS | {"num_cpus": 0.1}
    two = each_on_cluster(options, "gates", waiting, [(n,) for n in range(2)], most=2)
    assert [together for _, together in two] == [2, 2]
    assert {together for _, together in each_on_cluster(options, "gates", work, [(n,) for n in range(4)], most=1)} == {
        1
    }
    with pytest.raises(ValueError, match="the fifth"):
        list(each_on_cluster(options, "gates", work, [(n,) for n in (4, 5, 6)]))
