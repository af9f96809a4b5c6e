"""A training job with a relaxation, by Ray Train workers that stay: relax, collapse, recover; killed ones resume."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from benchmarks.needs.alone import Alone
from trainers import relaxing
from trainers.evaluation import evaluate
from trainers.jobs.worker import TrainJob
from trainers.relaxations.stage import RelaxationSpec
from trainers.settings import TrainSettings
from trainers.text.data import write_sequences
from trainers.zero import group_of_one

HALVED = AttentionPlan((LayerPlan((0, 1, 0, 1), (0, 0, 1, 1)),) * 2, head_dim=8)
SINGLE = AttentionPlan((LayerPlan((0,) * 4, (0, 0, 1, 1)),) * 2, head_dim=8)
KNOBS = {"rate": 0.05, "multiplier_start": 5.0, "tolerance": 0.0}


def patterns(count: int, seed: int) -> torch.Tensor:
    """Sequences of 32 tokens that count upwards by 1, 2 or 3."""
    generator = torch.Generator().manual_seed(seed)
    start, stride = (torch.randint(low, high, (count, 1), generator=generator) for low, high in ((0, 64), (1, 4)))
    return (start + stride * torch.arange(32)) % 64


@pytest.fixture(scope="module")
def job(ray_cluster: None, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """An unconverted tiny model; two stages of DHA of 30 steps each, then 10 steps of recovery."""
    folder = tmp_path_factory.mktemp("relaxed")
    checkpoint.save(tiny_model("llama"), folder / "model")
    write_sequences(patterns(200, 0), folder / "train")
    write_sequences(patterns(21, 1), folder / "eval")
    return TrainJob(
        model_dir=str(folder / "model"),
        teacher_dir=str(folder / "model"),
        train_file=str(folder / "train"),
        eval_file=str(folder / "eval"),
        out_dir=str(folder / "whole" / "out"),
        storage_path=str(folder / "store"),
        run_name="relaxed-whole",
        milestones=(10,),
        settings=TrainSettings(learning_rate=3e-3, cpus_per_worker=0.4),
        max_failures=0,
        relaxation=RelaxationSpec("lagrangian", (HALVED.to_json(), SINGLE.to_json()), 30, KNOBS, save_every=10),
    )


@pytest.fixture(scope="module")
def whole(job: TrainJob, on_group: Any) -> dict[str, Any]:
    return on_group(job)


def other(job: TrainJob, name: str, **changes: Any) -> TrainJob:
    out = Path(job.out_dir).parent.parent / name / "out"
    return replace(job, run_name=f"relaxed-{name}", out_dir=str(out), **changes)


def outcome_of(job: TrainJob, stage: int) -> dict[str, Any]:
    return json.loads((Path(f"{job.out_dir}.relaxed") / f"stage-{stage}" / "outcome.json").read_text())


def test_a_job_relaxes_collapses_and_recovers(job: TrainJob, whole: dict[str, Any]) -> None:
    metrics = whole
    assert metrics["step"] == 10
    assert metrics["relaxation_steps"] == 60
    assert metrics["tokens"] == (60 + 10) * 8 * 32
    assert metrics["loss"] < metrics["collapsed_loss"]
    collapsed = checkpoint.load(metrics["relaxed_dir"])
    assert checkpoint.plan_of(collapsed) == checkpoint.plan_of(checkpoint.load(job.out_dir)) == SINGLE
    assert evaluate(collapsed, patterns(21, 1)).loss == pytest.approx(metrics["collapsed_loss"], abs=1e-5)
    first, second = outcome_of(job, 0), outcome_of(job, 1)
    assert [point["step"] for point in first["history"]] == list(range(1, 31))
    assert first["history"][-1]["fusion_loss"] < 0.5 * first["history"][0]["fusion_loss"]
    assert second["position"]["position"] == 60 * 8  # the second stage read on, and so did the recovery
    assert not list(Path(f"{job.out_dir}.relaxed").rglob("checkpoint_*"))


@pytest.mark.parametrize("early", [False, True])
def test_stages_and_recovery_share_one_schedule(job: TrainJob, monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    """In this process: the rates of all steps, also where the first stage ends early."""
    rates: list[list[float]] = []

    class Recorded(relaxing.TrainEngine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            rates.append([])

        def step(self, *args: Any) -> float:
            rates[-1].append(self.rate)
            return super().step(*args)

    monkeypatch.setattr(relaxing, "TrainEngine", Recorded)
    knobs = KNOBS | ({"tolerance": 1.0} if early else {})  # 1 is where groups of two start
    spec = RelaxationSpec("lagrangian", (HALVED.to_json(), SINGLE.to_json()), 5, knobs)
    short = other(job, f"rates-{early}", relaxation=spec)
    group_of_one()
    relaxed = relaxing.relax(short, Alone())
    done = [outcome_of(short, stage)["steps"] for stage in (0, 1)]
    assert (max(done) < 5) if early else (done == [5, 5])
    expected = [short.settings.rate(step, 5 + 5 + 10) for step in range(10)]
    assert rates == [expected[: done[0]], expected[5 : 5 + done[1]]]
    assert relaxed.steps == sum(done)
    rest = short.after_relaxation(relaxed.model_dir)
    assert (rest.schedule_offset, rest.schedule_steps) == (10, 20)


def kill_worker_in_second_stage(job: TrainJob, killed: list[int]) -> None:
    from ray.util.state import list_actors

    latest = Path(f"{job.out_dir}.relaxed") / "stage-1" / "states" / "checkpoints.json"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not latest.exists():
        time.sleep(0.01)
    for actor in list_actors(filters=[("class_name", "=", "RayTrainWorker"), ("state", "=", "ALIVE")]):
        os.kill(actor.pid, signal.SIGKILL)
        killed.append(actor.pid)


@pytest.mark.extended
def test_a_worker_killed_while_relaxing_resumes_to_the_same_numbers(
    job: TrainJob, whole: dict[str, Any], on_group: Any
) -> None:
    again = other(job, "killed", max_failures=1)
    killed: list[int] = []
    killer = threading.Thread(target=kill_worker_in_second_stage, args=(again, killed))
    killer.start()
    outcome = on_group(again)
    killer.join()
    assert killed
    for name in ("loss", "kl", "train_loss", "tokens", "collapsed_loss", "weights_digest"):
        assert outcome[name] == whole[name], name
    assert outcome_of(again, 1)["history"] == outcome_of(job, 1)["history"]


@pytest.mark.slow
def test_align_with_its_own_distillation(job: TrainJob, on_group: Any) -> None:
    settings = job.settings.model_copy(update={"distillation": "kl_bild", "distillation_weight": 1.0})
    spec = RelaxationSpec("hard_concrete", (SINGLE.to_json(),), 40, {"rate": 0.5}, settings)
    outcome = on_group(other(job, "align", relaxation=spec))
    assert outcome["relaxation_steps"] == 40  # the last fifth trains the new heads alone
    finished = [point["mean_mask"] for point in outcome_of(other(job, "align"), 0)["history"]]
    assert finished[0] == 1
    assert finished[-1] == 0


@pytest.mark.extended
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_workers_at_every_zero_stage(job: TrainJob, whole: dict[str, Any], on_group: Any, stage: int) -> None:
    settings = job.settings.model_copy(update={"num_workers": 2, "zero_stage": stage, "micro_batch_size": 2})
    outcome = on_group(other(job, f"stage{stage}", settings=settings))
    for name in ("loss", "collapsed_loss"):
        assert outcome[name] == pytest.approx(whole[name], abs=0.02)


def test_what_a_job_refuses(job: TrainJob) -> None:
    assert TrainJob.from_json(job.to_json()) == job
    with pytest.raises(ValueError, match="needs a teacher_dir"):
        spec = replace(job.relaxation, settings=TrainSettings(distillation="kl"))
        replace(job, relaxation=spec, teacher_dir=None)
    with pytest.raises(ValueError, match="has its relaxation behind it"):
        replace(job, resume_from="x", start_step=5)
