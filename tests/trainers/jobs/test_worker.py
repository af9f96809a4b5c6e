"""Real Ray Train workers with real DeepSpeed: results, resuming after a kill, and carrying on from an earlier job."""

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
from parameters import extended

from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from trainers.evaluation import evaluate
from trainers.jobs.worker import TrainingDiverged, TrainJob, run_training
from trainers.settings import TrainSettings

PLAN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
STEPS = 60


def patterns(count: int, seed: int) -> torch.Tensor:
    """Sequences of 32 tokens that count upwards by 1, 2 or 3: something that a tiny model can learn."""
    generator = torch.Generator().manual_seed(seed)
    start, stride = (
        torch.randint(0, 64, (count, 1), generator=generator),
        torch.randint(1, 4, (count, 1), generator=generator),
    )
    return (start + stride * torch.arange(32)) % 64


@pytest.fixture(scope="module")
def job(ray_cluster: None, tiny_job: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """A converted tiny model; one worker, fp32, ZeRO 1."""
    settings = TrainSettings(learning_rate=3e-3, cpus_per_worker=0.4, seed=1)
    folder, milestones = tmp_path_factory.mktemp("job"), (10, STEPS)
    return tiny_job(folder, PLAN, patterns(200, 0), patterns(21, 1), settings, milestones=milestones, max_failures=0)


def controllers() -> set[str]:
    """Ray Train's runs that are alive."""
    from ray.util.state import list_actors

    return {a.actor_id for a in list_actors(filters=[("class_name", "=", "TrainController"), ("state", "=", "ALIVE")])}


@pytest.fixture(scope="module")
def others(ray_cluster: None) -> set[str]:
    """The runs of other tests that are still alive."""
    return controllers()


@pytest.fixture(scope="module")
def whole(job: TrainJob, others: set[str]) -> dict[str, Any]:
    """The job without interruption, by separate workers."""
    before = signal.getsignal(signal.SIGINT)
    outcome = run_training(job)
    assert signal.getsignal(signal.SIGINT) is before, "Ctrl-C is the caller's again"
    return outcome


def other(job: TrainJob, name: str, **changes: Any) -> TrainJob:
    """The same job under another name, so that Ray does not take it for the same run."""
    return replace(job, run_name=name, out_dir=str(Path(job.out_dir).parent.parent / name / "out"), **changes)


@pytest.mark.extended
def test_with_its_run_a_job_s_processes_end(whole: dict[str, Any], others: set[str]) -> None:
    deadline = time.monotonic() + 60
    while remaining := controllers() - others:
        assert time.monotonic() < deadline, remaining
        time.sleep(0.1)


def kill_worker_after_first_checkpoint(job: TrainJob, killed: list[int]) -> None:
    from ray.util.state import list_actors

    store = Path(job.storage_path) / job.run_name
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(store.glob("checkpoint_*")):
        time.sleep(0.02)
    workers = [("class_name", "=", "RayTrainWorker"), ("state", "=", "ALIVE")]
    for actor in list_actors(filters=workers):
        os.kill(actor.pid, signal.SIGKILL)
        killed.append(actor.pid)


def test_one_worker_trains_measures_and_writes_its_weights(job: TrainJob, whole: dict[str, Any]) -> None:
    metrics = whole
    assert metrics["step"] == STEPS
    assert metrics["tokens"] == STEPS * 8 * 32
    assert metrics["tokens_per_second"] > 0
    assert metrics["seconds"] > 0
    held_out = patterns(21, 1)
    start = evaluate(checkpoint.load(job.model_dir), held_out).loss
    model = checkpoint.load(job.out_dir)
    measured = evaluate(model, held_out)
    assert metrics["loss"] < start - 0.5
    assert metrics["loss"] == pytest.approx(measured.loss, abs=1e-5)
    assert metrics["kl"] is None, "nothing was distilled"
    assert checkpoint.plan_of(model) == PLAN
    assert metrics["weights_digest"] == checkpoint.weights_digest(job.out_dir)


def test_ray_train_knows_where_the_newest_checkpoint_is(job: TrainJob, whole: dict[str, Any]) -> None:
    (pointer,) = Path(job.storage_path, job.run_name).glob("reported_*/checkpoint.json")
    assert json.loads(pointer.read_text()) == {"checkpoint_path": whole["checkpoint_path"], "step": STEPS}


@pytest.mark.extended
def test_a_killed_worker_resumes_to_the_same_numbers(job: TrainJob, whole: dict[str, Any]) -> None:
    again = other(job, "killed", max_failures=1)
    killed: list[int] = []
    killer = threading.Thread(target=kill_worker_after_first_checkpoint, args=(again, killed))
    killer.start()
    outcome = run_training(again)
    killer.join()
    assert killed
    for name in ("loss", "kl", "train_loss", "step", "tokens", "weights_digest"):
        assert outcome[name] == whole[name], name


@pytest.mark.extended
def test_a_finished_run_is_not_done_again(job: TrainJob, whole: dict[str, Any], on_group: Any) -> None:
    weights = Path(job.out_dir) / "model.safetensors"
    written = weights.stat().st_mtime_ns
    again = on_group(job)
    assert weights.stat().st_mtime_ns == written
    for name in ("loss", "kl", "step", "weights_digest"):
        assert again[name] == whole[name], name


@pytest.mark.extended
def test_a_later_job_carries_on_where_an_earlier_one_stopped(
    job: TrainJob, whole: dict[str, Any], on_group: Any
) -> None:
    first = on_group(other(job, "first", milestones=(10,), total_steps=STEPS))
    rest = other(job, "rest", milestones=(STEPS,), start_step=10, resume_from=first["checkpoint_path"])
    rest = replace(rest, start_tokens=first["tokens"] + 1000)  # e.g. of a relaxation before it
    second = on_group(rest)
    assert first["loss"] != second["loss"]
    for name in ("loss", "kl", "train_loss", "step", "weights_digest"):
        assert second[name] == whole[name], name
    assert second["tokens"] == whole["tokens"] + 1000


def test_divergence_reaches_the_caller_at_once(job: TrainJob, on_group: Any) -> None:
    broken = checkpoint.load(job.model_dir)
    with torch.no_grad():
        broken.get_output_embeddings().weight[5] = torch.inf
    folder = checkpoint.save(broken, Path(job.model_dir).parent / "broken")
    diverging = other(job, "diverged", model_dir=str(folder), max_failures=3)
    with pytest.raises(TrainingDiverged, match=r"training loss at step 1 of 60 is (nan|inf)"):
        on_group(diverging)
    assert not Path(diverging.out_dir).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        extended(0, "float32"),
        extended(1, "float32"),
        extended(2, "bfloat16"),
        (3, "float32"),
        extended(3, "bfloat16"),
    ],
)
def test_two_workers_at_every_zero_stage(
    job: TrainJob, whole: dict[str, Any], on_group: Any, stage: int, dtype: str
) -> None:
    settings = job.settings.model_copy(
        update={"num_workers": 2, "zero_stage": stage, "dtype": dtype, "micro_batch_size": 2}
    )
    outcome = on_group(other(job, f"stage{stage}{dtype}", settings=settings))
    assert outcome["loss"] == pytest.approx(whole["loss"], abs=0.01 if dtype == "float32" else 0.1)
    measured = evaluate(checkpoint.load(outcome["out_dir"]), patterns(21, 1))
    assert outcome["loss"] == pytest.approx(measured.loss, abs=1e-4 if dtype == "float32" else 0.02)
    assert outcome["tokens"] == whole["tokens"]
    assert checkpoint.load(outcome["out_dir"]).dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)
