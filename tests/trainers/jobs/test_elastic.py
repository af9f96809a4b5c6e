"""A job that continues with the available workers, on a real Ray whose nodes come and go (`elastic_cluster.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from json_output import last_json

from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from benchmarks.needs.alone import Alone
from trainers.jobs.run import run_job
from trainers.settings import TrainSettings

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("elastic_cluster.py")
PLAN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
STEPS = 2500


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_a_training_continues_with_the_available_workers(tiny_job: Any, tmp_path: Path) -> None:
    sequences = torch.randint(0, 64, (60, 16), generator=torch.Generator().manual_seed(0))
    settings: Any = {"num_workers": [1, 2], "micro_batch_size": 1, "zero_stage": 2, "learning_rate": 1e-4}
    settings = TrainSettings(**settings, gpus_per_worker=1, cpus_per_worker=0.4, device="cpu")
    more: dict[str, Any] = {"milestones": (STEPS,), "checkpoint_minutes": 0.05, "max_failures": 5}
    job = tiny_job(tmp_path, PLAN, sequences, sequences[:4], settings, **more)
    (tmp_path / "job.json").write_text(job.to_json())
    environment = os.environ | {
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests' / 'helpers'}",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    }
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(SCRIPT), str(tmp_path / "job.json")]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=850)
    assert process.returncode == 0, process.stderr[-4000:]
    happened = last_json(process.stdout)
    assert [workers for workers, _ in happened["seen"]] == [1, 2, 1]
    assert happened["report"]["step"] == STEPS
    alone = replace(job.on(1), run_name="alone", out_dir=str(tmp_path / "alone" / "out"), checkpoint_minutes=None)
    expected = run_job(alone, Alone())["metrics"]
    assert happened["report"]["loss"] == pytest.approx(expected["loss"], abs=2e-3)
    weights = [checkpoint.load(out).state_dict() for out in (job.out_dir, alone.out_dir)]
    assert max((weights[0][name] - weights[1][name]).abs().max().item() for name in weights[0]) < 0.02
