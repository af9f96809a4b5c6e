"""Between two milestones: checkpoints by steps and by the clock, from which a killed job resumes, and the curve."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from test_carrying import PLAN, Alone

from attention.io import checkpoint
from trainers.jobs.checkpoints import CheckpointStore
from trainers.jobs.curve import read_curve
from trainers.jobs.run import _decays_everything, run_job
from trainers.jobs.train_job import TrainJob
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream
from trainers.zero import group_of_one

SAME = ("loss", "kl", "step", "tokens", "train_loss", "data_position", "weights_digest", "best_step", "best_loss")
MILESTONES = (3, 8)


@pytest.fixture(scope="module")
def make(tiny_job: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainJob]:
    group_of_one()
    folder, generator = tmp_path_factory.mktemp("between"), torch.Generator().manual_seed(0)
    train, held_out = (torch.randint(0, 64, (rows, 16), generator=generator) for rows in (100, 9))
    job = tiny_job(folder, PLAN, train, held_out, TrainSettings(learning_rate=3e-3, seed=1), milestones=MILESTONES)

    def named(name: str, **changes: Any) -> TrainJob:
        return replace(job, run_name=name, out_dir=str(folder / name / "out"), keep_best=True, **changes)

    return named


@pytest.fixture(scope="module")
def whole(make: Callable[..., TrainJob]) -> dict[str, Any]:
    return run_job(make("whole"), Alone())["metrics"]


def steps_kept(job: TrainJob) -> list[int]:
    return [kept.step for kept in CheckpointStore(job.storage_path, job.run_name).read()[0]]


def killed_before_step(job: TrainJob, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the job until it requests the data of `step`."""
    calls, real = [0], BatchStream.next

    def next_or_die(stream: BatchStream) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == step:
            raise KeyboardInterrupt
        return real(stream)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BatchStream, "next", next_or_die)
        run_job(job, Alone())


@pytest.mark.extended
@pytest.mark.parametrize("step", range(1, 9))
def test_killed_at_any_step_it_loses_the_steps_between_two_checkpoints_at_most(
    make: Callable[..., TrainJob], whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    job = make(f"killed-{step}", checkpoint_steps=2)
    killed_before_step(job, step, monkeypatch)
    assert step - 1 - max([0, *steps_kept(job)]) <= 1
    metrics = run_job(job, Alone())["metrics"]
    assert {name: metrics[name] for name in SAME} == {name: whole[name] for name in SAME}


def test_a_job_from_before_resumes_with_its_weight_decay(
    make: Callable[..., TrainJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was started when weight decay was on all parameters ends with the weights of that version."""
    with monkeypatch.context() as patch:
        patch.setattr("trainers.jobs.run._decays_everything", lambda *_: True)
        expected = run_job(make("former"), Alone())["metrics"]
        job = make("former-killed", checkpoint_steps=2)
        killed_before_step(job, 6, monkeypatch)
    later = make("former-later", start_step=2, resume_from=expected["checkpoint_path"])
    assert run_job(job, Alone())["metrics"]["weights_digest"] == expected["weights_digest"]
    store = CheckpointStore(job.storage_path, job.run_name)
    assert store.text(str(store.named / "none"), "layout.json") is None
    assert _decays_everything(later, store, None)
    assert not _decays_everything(make("new"), store, None)


def test_by_the_clock(make: Callable[..., TrainJob], whole: dict[str, Any]) -> None:
    seldom, always = make("seldom", checkpoint_minutes=60), make("always", checkpoint_minutes=1e-9)
    for job in (seldom, always):
        metrics = run_job(job, Alone())["metrics"]
        assert {name: metrics[name] for name in SAME} == {name: whole[name] for name in SAME}
    assert (steps_kept(seldom), steps_kept(always)) == ([3, 8], [7, 8])


def test_that_of_the_last_measurement_stays(make: Callable[..., TrainJob], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report names it, and a promotion resumes from it."""
    job = make("named", checkpoint_steps=1)
    killed_before_step(job, 7, monkeypatch)
    assert steps_kept(job) == [3, 6]


def test_the_curve_is_there_before_the_first_milestone(
    make: Callable[..., TrainJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make("curve")
    killed_before_step(job, 2, monkeypatch)
    folder = Path(job.storage_path) / job.run_name
    (line,) = read_curve(folder)
    assert (line["step"], line["learning_rate"]) == (1, job.settings.rate(0, MILESTONES[-1]))
    assert line["gradient_norm"] > 0 and line["tokens_per_second"] > 0 and math.isfinite(line["batch_loss"])
    assert 0 <= line["cpu_percent"] <= 100 and 100 < line["memory_megabytes"] < psutil.virtual_memory().total / 1e6
    with (folder / "curve.jsonl").open("a") as stream:
        stream.write('{"step": 2, "ti')  # what a kill leaves
    run_job(job, Alone())
    assert read_curve(folder)[0]["step"] == 1


def test_a_job_may_read_on_where_another_has_stopped(make: Callable[..., TrainJob], whole: dict[str, Any]) -> None:
    first = run_job(make("first", total_steps=8), Alone(until=1))
    assert first == {"stopped": 3}
    later = make("later", first_sequence=8)
    metrics = run_job(later, Alone())["metrics"]
    assert metrics["data_position"] == whole["data_position"] + 8
    assert metrics["weights_digest"] != whole["weights_digest"] == checkpoint.weights_digest(whole["out_dir"])
