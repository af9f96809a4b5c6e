"""Steps of a training run, and when one that has lost its machines starts again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from orchestrator.training import run as training_run
from orchestrator.training.run import LOSSES, Failures, TrainingRun, add_steps
from trainers.jobs.train_job import TrainJob


def test_reports_are_in_steps_of_the_model() -> None:
    report = {"step": 4, "best_step": 2, "loss": 1.5}
    assert add_steps(report, 10) == {"step": 14, "best_step": 12, "loss": 1.5}
    assert add_steps({"step": 4}, 0) == {"step": 4}


def test_it_starts_again_until_it_has_failed_too_often_without_getting_any_further() -> None:
    failures, retried = Failures(), []
    for step in [-1, *[8] * (LOSSES + 1), 16]:
        failures = failures.another(step)
        retried.append(failures.retries_left)
    assert retried == [True, *[True] * LOSSES, False, True]


class WorkersFailed(RuntimeError):
    """An error of Ray Train: a message, and the errors of each worker."""

    def __init__(self, failure: Exception) -> None:
        super().__init__("the training has failed")
        self.worker_failures = {0: failure}


def losing(monkeypatch: pytest.MonkeyPatch, folder: Path, *ends: Any) -> tuple[TrainingRun, list[str]]:
    """A training whose attempts end like that, one after the other; and what is said of them."""
    attempts, output = iter(ends), list[str]()

    def attempt(*_: Any) -> Any:
        end = next(attempts)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(training_run, "dispatch_training", attempt)
    settings: dict[str, Any] = {
        "model_dir": "m",
        "train_file": "t",
        "eval_file": "e",
        "run_name": "r",
        "milestones": (9,),
    }
    job = TrainJob(**settings, out_dir=str(folder / "out"), storage_path=str(folder / "store"))
    return TrainingRun(job), output


def test_a_training_that_has_lost_its_machines_starts_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unhealthy = WorkerHealthCheckFailedError("a worker health check failed", RuntimeError("the node is gone"))
    lost = (RayActorError(), WorkersFailed(unhealthy))
    run, output = losing(monkeypatch, tmp_path, *lost, {"step": 9})
    assert run.train_through_losses(output.append) == {"step": 9}
    assert len(output) == 2 and "machines were lost; it starts again from step 0" in output[0]


def test_it_does_not_after_another_error_nor_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, output = losing(monkeypatch, tmp_path, WorkersFailed(ValueError("wrong")))
    with pytest.raises(WorkersFailed):
        run.train_through_losses(output.append)
    assert output == []
    run, output = losing(monkeypatch, tmp_path, *[RayActorError() for _ in range(LOSSES + 1)])
    with pytest.raises(RayActorError):
        run.train_through_losses(output.append)
    assert len(output) == LOSSES
