"""The worker pool, with real Ray Train workers: one job after another, and what happens when somebody dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from benchmarks.needs.alone import Alone
from orchestrator.cluster.pool_client import GroupError, PoolGone, open_pool, train_on_pool, worker_groups
from orchestrator.cluster.worker_pool import Pool
from trainers.jobs.run import run_job
from trainers.jobs.train_job import TrainJob
from trainers.relaxations.stage import RelaxationSpec
from trainers.settings import Shape, TrainSettings
from trainers.zero import group_of_one

REPOSITORY = Path(__file__).resolve().parents[3]
PLAN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
HALVED = AttentionPlan((LayerPlan((0, 1, 0, 1), (0, 0, 1, 1)),) * 2, head_dim=8)
SAME = ("loss", "kl", "train_loss", "step", "tokens", "weights_digest")
LOST_SECONDS = 15.0


@pytest.fixture(scope="module")
def pool(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert wait_until(lambda: not any(actors("RayTrainWorker", "TrainController").values()), 660), "other tests' groups"
    with open_pool(str(tmp_path_factory.mktemp("groups")), lost_seconds=LOST_SECONDS) as name:
        yield name


@pytest.fixture(scope="module")
def job(tiny_job: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    generator = torch.Generator().manual_seed(0)
    train, held_out = (torch.randint(0, 64, (rows, 16), generator=generator) for rows in (100, 9))
    settings = TrainSettings(learning_rate=3e-3, cpus_per_worker=0.4, seed=1)
    folder, milestones = tmp_path_factory.mktemp("jobs"), (2, 4, 6)
    return tiny_job(folder, PLAN, train, held_out, settings, milestones=milestones, max_failures=0)


@pytest.fixture(scope="module")
def whole(job: TrainJob) -> dict[str, Any]:
    """The same in this process."""
    group_of_one()
    return run_job(job, Alone())["metrics"]


def other(job: TrainJob, name: str, **changes: Any) -> TrainJob:
    return replace(job, run_name=name, out_dir=str(Path(job.out_dir).parent.parent / name / "out"), **changes)


def state(pool: str) -> dict[str, Any]:
    return ray.get(ray.get_actor(pool).state.remote())  # type: ignore[return-value]


def wait_until(what: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := what()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return result


def actors(*names: str) -> dict[str, list[int]]:
    """Process ids of living actors by class."""
    from ray.util.state import list_actors

    alive = list_actors(filters=[("state", "=", "ALIVE")])
    return {name: [actor.pid for actor in alive if actor.class_name == name] for name in names}


def test_who_only_hands_jobs_on_loads_no_library_of_models() -> None:
    """The pool and Ray Train's controllers: otherwise a second process of 600 MB for each worker."""
    heavy = "{'transformers', 'deepspeed', 'mlflow', 'optuna'}"
    code = f"import sys, orchestrator.cluster.worker_pool; print(*{heavy} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert process.stdout == "\n"


@pytest.mark.extended
def test_one_group_carries_out_job_after_job(pool: str, job: TrainJob, whole: dict[str, Any]) -> None:
    message: dict[str, list[int]] = {}
    for name in ("first", "second", "third"):
        steps = message.setdefault(name, [])
        outcome = train_on_pool(pool, other(job, name), lambda report, steps=steps: steps.append(report["step"]))
        assert {key: outcome[key] for key in SAME} == {key: whole[key] for key in SAME}
        assert Path(outcome["checkpoint_path"], "layout.json").is_file()
    assert set(map(tuple, message.values())) == {(2, 4, 6)}
    (group,) = state(pool)["groups"].values()
    assert worker_groups(pool) == 1
    assert group == {"shape": Shape(1, 0.4, 0.0), "jobs": 3, "busy": False}
    assert {name: len(result) for name, result in actors("RayTrainWorker", "TrainController").items()} == {
        "RayTrainWorker": 1,
        "TrainController": 1,
    }


@pytest.mark.extended
def test_a_job_ends_where_its_holder_leaves_it_and_resumes_later(
    pool: str, job: TrainJob, whole: dict[str, Any]
) -> None:
    ours, (worker,) = other(job, "left"), actors("RayTrainWorker")["RayTrainWorker"]

    def leave(report: dict[str, Any]) -> None:
        if report["step"] == 4:
            raise SystemExit(0)  # as Tune stops a trial

    with pytest.raises(SystemExit):
        train_on_pool(pool, ours, leave)
    assert not Path(ours.out_dir).exists()
    steps: list[int] = []
    outcome = train_on_pool(pool, ours, lambda report: steps.append(report["step"]))
    assert steps == [2, 4, 6]  # earlier reports come again
    assert {key: outcome[key] for key in SAME} == {key: whole[key] for key in SAME}
    assert actors("RayTrainWorker")["RayTrainWorker"] == [worker], "the same processes went on"
    assert state(pool)["leases"] == []


@pytest.mark.extended
def test_a_job_that_fails_reports_why_and_the_next_one_runs(pool: str, job: TrainJob, whole: dict[str, Any]) -> None:
    broken = other(job, "broken", model_dir=str(Path(job.model_dir).parent / "gone"))
    with pytest.raises(GroupError, match="gone"):
        train_on_pool(pool, broken, print)
    outcome = train_on_pool(pool, other(job, "after"), lambda report: None)
    assert outcome["weights_digest"] == whole["weights_digest"]


@pytest.mark.extended
def test_a_killed_worker_is_replaced_and_its_job_resumes(pool: str, job: TrainJob, whole: dict[str, Any]) -> None:
    again = other(job, "killed", max_failures=1)
    (before,) = actors("RayTrainWorker")["RayTrainWorker"]
    steps: list[int] = []

    def kill(report: dict[str, Any]) -> None:
        steps.append(report["step"])
        if report["step"] == 4:
            os.kill(before, signal.SIGKILL)

    outcome = train_on_pool(pool, again, kill)
    assert steps == [2, 4, 6], "each milestone was told once"
    assert {key: outcome[key] for key in SAME} == {key: whole[key] for key in SAME}
    assert before not in actors("RayTrainWorker")["RayTrainWorker"]


@pytest.mark.extended
def test_the_group_of_a_holder_that_died_is_free_again(pool: str, job: TrainJob) -> None:
    @ray.remote(num_cpus=0, max_retries=0)
    def hold_and_die(given: str) -> None:
        train_on_pool(pool, TrainJob.from_json(given), lambda report: os._exit(1))

    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(hold_and_die.remote(other(job, "orphan").to_json()))
    assert len(state(pool)["leases"]) == 1
    assert wait_until(lambda: not state(pool)["leases"], 4 * LOST_SECONDS)
    assert wait_until(lambda: not any(g["busy"] for g in state(pool)["groups"].values()))


@pytest.mark.extended
def test_a_job_waits_for_the_workers_of_its_holder_that_died(pool: str, job: TrainJob) -> None:
    """A trial that restarts at once; two groups would write the same checkpoints."""

    @ray.remote(num_cpus=0, max_retries=0)
    def hold_and_die(given: str) -> None:
        train_on_pool(pool, TrainJob.from_json(given), lambda report: os._exit(1))

    again = other(job, "again")
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(hold_and_die.remote(again.to_json()))
    assert len(state(pool)["leases"]) == 1
    leases = set[int]()
    train_on_pool(pool, again, lambda report: leases.update(state(pool)["leases"]))
    assert len(leases) == 1
    assert not state(pool)["leases"]


@pytest.mark.extended
def test_a_group_of_two_takes_jobs_of_every_kind(pool: str, job: TrainJob, whole: dict[str, Any]) -> None:
    """Another shape: the group that stands idle makes room."""
    shared = {"num_workers": 2, "cpus_per_worker": 0.9, "micro_batch_size": 2}
    two = job.settings.model_copy(update=shared)
    kinds: dict[str, dict[str, Any]] = {
        "zero0": {"zero_stage": 0},
        "zero3": {"zero_stage": 3},
        "bf16": {"zero_stage": 2, "dtype": "bf16"},
        "lora": {"tuning": "lora", "lora_rank": 4},
        "distilled": {"distillation": "kl_bild", "zero_stage": 3},
    }
    losses = {}
    for name, changes in kinds.items():
        settings = two.model_copy(update=changes)
        losses[name] = train_on_pool(pool, other(job, name, settings=settings), lambda r: None)["loss"]
    assert losses["zero0"] == pytest.approx(losses["zero3"], abs=1e-3)
    assert losses["zero0"] == pytest.approx(whole["loss"], abs=1e-3)
    assert losses["bf16"] == pytest.approx(whole["loss"], abs=0.1)
    spec = RelaxationSpec("lagrangian", (HALVED.to_json(),), 4)
    relaxed = other(job, "relaxed", settings=two, model_dir=str(job.teacher_dir), relaxation=spec)
    metrics = train_on_pool(pool, relaxed, lambda r: None)
    assert metrics["relaxation_steps"] == 4
    assert checkpoint.plan_of(checkpoint.load(relaxed.out_dir)) == HALVED
    report: list[int] = []
    alone = other(job, "alone", settings=two, model_dir=str(job.teacher_dir), relaxation=spec, milestones=(0,))
    assert train_on_pool(pool, alone, lambda r: report.append(r["step"]))["relaxation_steps"] == 4
    assert report == [0]  # no recovery: the result of the relaxation is the one report
    (group,) = state(pool)["groups"].values()
    assert worker_groups(pool) == 1
    assert group == {"shape": Shape(2, 0.9, 0.0), "jobs": 7, "busy": False}


@pytest.mark.extended
def test_a_crowded_cluster_and_the_end_of_a_pool(job: TrainJob, pool: str, tmp_path: Path) -> None:
    """The rest of the cluster after nodes have gone: 2 CPUs, of which other actors have 1.5. They do not wait for ever.

    And with the pool everything ends, but what Ray holds reserved for a group that was still starting: that goes with
    the driver (test_chaos.py).
    """
    ray.get(ray.get_actor(pool).close.remote())  # its groups hold the place

    @ray.remote(num_cpus=1.5)
    class Holder:
        def ready(self) -> None: ...

    holder, ended = Holder.remote(), threading.Event()
    ray.get(holder.ready.remote())
    crowded = replace(job, settings=job.settings.model_copy(update={"cpus_per_worker": 0.7}))
    with open_pool(str(tmp_path), idle_seconds=1, stuck_seconds=3) as own:
        outcome = train_on_pool(own, other(crowded, "squeezed"), lambda report: None)
        assert outcome["step"] == 6
        ray.kill(holder)
        assert wait_until(lambda: not state(own)["groups"]), "idle for long"

        def hold() -> None:
            with pytest.raises(PoolGone):
                train_on_pool(own, other(crowded, "never"), print)
            ended.set()

        cached = threading.Thread(target=hold)
        cached.start()
        assert wait_until(lambda: state(own)["leases"])
    cached.join(60)
    assert ended.is_set(), "a holder that waits is told"
    with pytest.raises(PoolGone, match="is gone"):
        train_on_pool(own, other(crowded, "late"), print)
    names = ("RayTrainWorker", "TrainController", "Pool")
    assert wait_until(lambda: not any(actors(*names[:2]).values())), actors(*names)
    assert not list(tmp_path.iterdir())


def test_a_holder_whose_lease_was_taken_away_gets_the_reason(tmp_path: Path) -> None:
    """Its heartbeat may come too late on a machine that is overloaded."""
    event = asyncio.run(Pool("pool", str(tmp_path), lost_seconds=60.0).wait(7, 0.1))
    assert event is not None and event.error is not None
    assert "nothing was heard from the trial for 60 seconds" in event.error
