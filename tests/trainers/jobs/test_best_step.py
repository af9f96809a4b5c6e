"""The weights of the best measured step are stored, by a training that makes the model worse, and after kills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_carrying import Alone

from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from trainers.evaluation import evaluate
from trainers.jobs.best import best_folder, remove_other_bests
from trainers.jobs.checkpoints import CheckpointStore
from trainers.jobs.run import run_job
from trainers.jobs.train_job import TrainJob
from trainers.settings import TrainSettings
from trainers.text.data import read_sequences
from trainers.zero import group_of_one

PLAN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)),) * 2, head_dim=8)


@pytest.fixture(scope="module")
def make(tiny_job: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainJob]:
    """A job that takes too large steps on text that is mostly unlike the held-out one: in between it is best."""
    group_of_one()
    folder = tmp_path_factory.mktemp("best")
    generator = torch.Generator().manual_seed(0)
    held_out = torch.randint(0, 32, (9, 16), generator=generator)
    train = torch.cat([held_out, torch.randint(32, 64, (64, 16), generator=generator)])
    settings = TrainSettings(learning_rate=0.2, warmup_fraction=0.0, seed=1)
    job = tiny_job(folder, PLAN, train, held_out, settings, milestones=(1, 3, 5, 6), keep_best=True)

    def named(name: str) -> TrainJob:
        return replace(job, run_name=name, out_dir=str(folder / name / "out"))

    return named


@pytest.fixture(scope="module")
def whole(make: Callable[..., TrainJob]) -> tuple[TrainJob, list[dict[str, Any]], dict[str, Any]]:
    job, link = make("whole"), Alone()
    return job, link.reports, run_job(job, link)["metrics"]


def best_of(metrics: dict[str, Any]) -> tuple[Any, ...]:
    return (
        metrics["best_step"],
        metrics["best_loss"],
        metrics["best_kl"],
        checkpoint.weights_digest(metrics["best_dir"]),
    )


def kept(job: TrainJob) -> list[str]:
    return sorted(path.name for path in Path(f"{job.out_dir}.best").glob("*"))


def test_a_training_that_makes_the_model_worse_keeps_its_best_step(whole: Any) -> None:
    job, reports, metrics = whole
    lowest = min(reports, key=lambda report: report["loss"])
    assert lowest["step"] < 6, "this training is to make the model worse in the end"
    assert (metrics["best_step"], metrics["best_loss"]) == (lowest["step"], lowest["loss"])
    assert kept(job) == [f"step-{lowest['step']:06d}"]
    back = evaluate(checkpoint.load(metrics["best_dir"]), read_sequences(job.eval_file)[:]).loss
    assert back == pytest.approx(lowest["loss"], abs=1e-6)
    last = evaluate(checkpoint.load(job.out_dir), read_sequences(job.eval_file)[:]).loss
    assert last == pytest.approx(metrics["loss"], abs=1e-6) and last > back


def test_of_a_training_that_gets_better_the_finished_weights_are_the_best(make: Callable[..., TrainJob]) -> None:
    job = make("better")
    job = replace(job, train_file=job.eval_file, settings=job.settings.model_copy(update={"learning_rate": 1e-3}))
    metrics = run_job(job, Alone())["metrics"]
    assert (metrics["best_step"], metrics["best_dir"]) == (6, job.out_dir)
    assert kept(job) == []


@pytest.mark.parametrize("reports", [1, 2, 3])
def test_stopped_and_gone_on_the_best_is_the_same(make: Callable[..., TrainJob], whole: Any, reports: int) -> None:
    job = make(f"stopped-{reports}")
    run_job(job, Alone(until=reports))
    assert best_of(run_job(job, Alone())["metrics"]) == best_of(whole[2])


@pytest.mark.parametrize("milestone", [1, 2, 4])
def test_killed_after_the_weights_were_written_and_before_the_report(
    make: Callable[..., TrainJob], whole: Any, monkeypatch: pytest.MonkeyPatch, milestone: int
) -> None:
    job, save, count = make(f"killed-{milestone}"), CheckpointStore.save, [0]

    def killed(*args: Any) -> str:
        count[0] += 1
        if count[0] == milestone:
            raise KeyboardInterrupt
        return save(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CheckpointStore, "save", killed)
        run_job(job, Alone())
    assert best_of(run_job(job, Alone())["metrics"]) == best_of(whole[2])
    assert len(kept(job)) == 1


def test_damaged_best_weights_are_made_again(make: Callable[..., TrainJob], whole: Any) -> None:
    job, first = make("damaged"), Alone(until=3)
    run_job(job, first)
    weights = Path(first.reports[-1]["best_dir"]) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    metrics = run_job(job, Alone())["metrics"]
    assert best_of(metrics) == best_of(whole[2])
    assert "damaged: trained from the beginning" in metrics["notes"][0]


def test_the_best_weights_stay_under_another_spelling_of_their_path(tmp_path: Path) -> None:
    for step in (4, 8):
        Path(best_folder(str(tmp_path / "trained"), step)).mkdir(parents=True)
    remove_other_bests(str(tmp_path / "trained"), [{"best_dir": "/mnt/elsewhere/trained.best/step-000008"}])
    assert [folder.name for folder in (tmp_path / "trained.best").iterdir()] == ["step-000008"]
