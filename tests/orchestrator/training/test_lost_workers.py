"""Workers that are killed between two measurements: a trial, `train` and `finetune` resume from a checkpoint by the
clock, and reach the numbers of an undisturbed training."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from verbs import finetune_checkpoint, train_from_scratch

from attention.plan import AttentionPlan, LayerPlan
from trainers.jobs.checkpoints import CheckpointStore
from trainers.settings import TrainSettings

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]
PLAN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
SAME = ("loss", "train_loss", "step", "tokens", "weights_digest")
STEPS = 600
ASKED: dict[str, Any] = {
    "steps": STEPS,
    "eval_every": STEPS,
    "learning_rate": 3e-3,
    "eval_tokens": 1024,
    "train_tokens": 20_000,
    "sequence_length": 32,
    "device": "cpu",
    "overrides": ["train.cpus_per_worker=0.4"],
}


class WorkerKiller:
    """Kills all training workers whenever the run in `folder` has a new checkpoint, so many times."""

    def __init__(self, folder: Path, times: int) -> None:
        self.store = CheckpointStore(str(folder.parent), folder.name)
        self.times = times
        self.steps: list[int] = []
        """Steps of the newest checkpoint at each kill."""
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        from ray.util.state import list_actors

        workers: Any = [("class_name", "=", "RayTrainWorker"), ("state", "=", "ALIVE")]
        deadline = time.monotonic() + 600
        while len(self.steps) < self.times and time.monotonic() < deadline:
            time.sleep(0.05)
            saved = self.store.read()[0]
            if not saved or saved[-1].step <= max(self.steps, default=0):
                continue
            for actor in list_actors(filters=workers):
                os.kill(actor.pid, signal.SIGKILL)
            self.steps.append(saved[-1].step)


def check(killer: WorkerKiller, times: int, result: Any, expected: Any) -> None:
    killer.thread.join(10)
    assert len(killer.steps) == times and all(0 < step < STEPS for step in killer.steps), killer.steps
    assert {name: result[name] for name in SAME} == {name: expected[name] for name in SAME}


def test_a_trial_resumes_from_a_checkpoint_between_its_rungs(tiny_job: Any, on_group: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    train, held_out = (torch.randint(0, 64, (rows, 16), generator=generator) for rows in (100, 9))
    settings = TrainSettings(learning_rate=1e-3, cpus_per_worker=0.4)
    job = tiny_job(tmp_path, PLAN, train, held_out, settings, milestones=(STEPS,), keep_best=True)
    expected = on_group(job)
    killed = replace(job, run_name="killed", out_dir=str(tmp_path / "killed"), checkpoint_minutes=0.01)
    killer = WorkerKiller(Path(job.storage_path) / "killed", 1)
    check(killer, 1, on_group(killed), expected)


def test_train_and_finetune_start_again_by_themselves(ray_cluster: None, like: Path, tmp_path: Path) -> None:
    """Ray Train starts their workers again once; after a second loss they do so themselves."""
    requested = ASKED | {"checkpoint_minutes": 0.01}
    expected = train_from_scratch(like, tmp_path / "whole", **ASKED)
    killer, output = WorkerKiller(tmp_path / "killed.training" / "train" / "scratch", 2), list[str]()
    check(killer, 2, train_from_scratch(like, tmp_path / "killed", progress=output.append, **requested), expected)
    assert any("machines were lost; it starts again from step" in line for line in output), output
    expected = finetune_checkpoint(tmp_path / "whole", tmp_path / "fine", **ASKED)
    killer, output = WorkerKiller(tmp_path / "fine-killed.training" / "train" / "finetune", 2), list[str]()
    result = finetune_checkpoint(tmp_path / "whole", tmp_path / "fine-killed", progress=output.append, **requested)
    check(killer, 2, result, expected)
    assert any("machines were lost; it starts again from step" in line for line in output), output
