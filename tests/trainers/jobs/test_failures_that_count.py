"""A restart with a smaller micro-batch is none of the failures that a job may have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train import TrainingFailedError

from attention.plan import AttentionPlan, LayerPlan
from trainers.jobs import worker
from trainers.jobs.memory import MicroBatchLoweredError, memory_note
from trainers.settings import TrainSettings

PLAN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 0, 1, 1)),) * 2, head_dim=8)


def ends_in(folder: Path, note: Path, ways: list[str]) -> Callable[[dict[str, Any]], Any]:
    """Replaces a job: at its nth start the worker ends in the nth way."""

    def work(config: dict[str, Any]) -> Any:
        start = len(list(folder.glob("start-*")))
        (folder / f"start-{start}").touch()
        if ways[start] == "memory":
            note.parent.mkdir(exist_ok=True)
            note.write_text(json.dumps({"rows": 8, "cause": "out of memory"}))
            raise MicroBatchLoweredError("rank 0: out of memory")
        if ways[start] == "failure":
            raise RuntimeError("the storage is away")
        return {"metrics": {"start": start}}

    return work


@pytest.mark.extended
@pytest.mark.parametrize(
    ("ways", "whole"),
    [
        (["memory", "failure", "done"], True),
        (["failure", "memory", "done"], True),
        (["failure", "done"], True),
        (["failure", "failure", "done"], False),
        (["memory", "failure", "failure", "done"], False),
    ],
    ids=["memory-first", "memory-last", "one", "two", "two-and-memory"],
)
def test_too_little_memory_is_no_failure(
    ways: list[str],
    whole: bool,
    ray_cluster: None,
    tiny_job: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequences = torch.randint(0, 64, (20, 16), generator=torch.Generator().manual_seed(0))
    settings = TrainSettings(cpus_per_worker=0.4)
    job = tiny_job(tmp_path, PLAN, sequences, sequences[:4], settings, milestones=(2,), max_failures=1)
    monkeypatch.setattr(worker, "_work", ends_in(tmp_path, memory_note(job), ways))
    if whole:
        assert worker.run_training(job) == {"start": len(ways) - 1}
    else:
        with pytest.raises(TrainingFailedError, match="the storage is away"):
            worker.run_training(job)
        assert len(list(tmp_path.glob("start-*"))) == len(ways) - 1
