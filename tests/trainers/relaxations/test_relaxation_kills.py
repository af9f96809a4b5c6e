"""A relaxation whose worker is killed without warning resumes to identical numbers, for every part of the axis.

Plain processes and not Ray Train, which test_relaxation_jobs.py has: all parts in the time of one Ray run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from json_output import last_json

from attention.io import checkpoint
from attention.plan import AttentionPlan, HeadShare, LayerPlan
from trainers.jobs.train_job import TrainJob
from trainers.relaxations import RELAXATION_TRAINING
from trainers.relaxations.stage import RelaxationSpec
from trainers.settings import TrainSettings
from trainers.text.data import write_sequences

REPOSITORY = Path(__file__).resolve().parents[3]
GROUPED = AttentionPlan((LayerPlan((0, 0, 1, 0), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
SHARED = AttentionPlan((LayerPlan.identity(4),) * 2, 8, (HeadShare(1, 0, 0, 2),), mlp_shares=(HeadShare(1, 1, 0, 1),))
STEPS, SAVE_EVERY = 30, 6
KNOBS: dict[str, dict[str, Any]] = {
    "lagrangian": {"rate": 0.05, "tolerance": 0.0},
    "hard_concrete": {"rate": 0.3},
    "pull_together": {"rate": 0.1},
}
SPLITS = [(0, 1), (3, 2)]  # ZeRO stage, workers
ALL = [(part.name, *split) for part in RELAXATION_TRAINING for split in SPLITS]


@pytest.mark.extended
@pytest.mark.parametrize("cases", [ALL[::2], ALL[1::2]], ids=["one_worker", "two_workers"])
def test_a_killed_relaxation_resumes_to_the_same_numbers(
    cases: list[tuple[str, int, int]], tiny_model: Any, tmp_path: Path
) -> None:
    ends = run_all(cases, tiny_model, tmp_path)
    assert {name.split("-")[0] for name in ends} == {part.name for part in RELAXATION_TRAINING}
    check(ends, tmp_path)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_it_resumes_from_checkpoints_at_an_address(workers: int, tiny_model: Any, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    check(run_all([("lagrangian", 0, workers)], tiny_model, tmp_path, f"file://{bucket}/train"), tmp_path)
    assert not list(tmp_path.glob("lagrangian-*/**/states")), "they were at the address"
    assert (bucket / "train" / "unused" / "relaxation").is_dir()
    assert not [path for path in bucket.rglob("*") if path.is_file()], "what has ended needs none"


def check(ends: dict[str, Any], tmp_path: Path) -> None:
    """Check that each case that was killed has the results of the one that was not."""
    for name, ended in ends.items():
        assert set(ended["whole"]) == set(ended["again"]) == {0}, name
        assert -9 in ended["killed"] and ended["unfinished"], name
        stages = [tmp_path / name / kind / "out.relaxed" / "stage-0" for kind in ("whole", "killed")]
        whole, killed = (json.loads((stage / "outcome.json").read_text()) for stage in stages)
        assert [point["step"] for point in whole["history"]] == list(range(1, STEPS + 1))
        assert killed["history"] == whole["history"], name  # loss and metrics of every step, those after the kill too
        assert len({point["train_loss"] for point in whole["history"]}) == STEPS
        for key in ("loss", "position", "tokens", "metrics"):
            assert killed[key] == whole[key], (name, key)
        weights = [(stage / "collapsed" / "model.safetensors").read_bytes() for stage in stages]
        assert weights[0] == weights[1], name


def run_all(
    requested: list[tuple[str, int, int]], tiny_model: Any, folder: Path, address: str | None = None
) -> dict[str, Any]:
    """How the workers of each run ended; output is in `folder`, checkpoints are at `address` if there is one."""
    checkpoint.save(tiny_model("llama", attention_bias=True), folder / "model")
    generator = torch.Generator().manual_seed(0)
    for name, rows in (("train", 100), ("eval", 8)):
        write_sequences(torch.randint(0, 64, (rows, 16), generator=generator), folder / name)
    cases = []
    for name, stage, workers in requested:
        plan = SHARED if "shares" in RELAXATION_TRAINING.get(name).needs else GROUPED
        # Align as its paper trains it, so that the teacher comes back too
        distillation = "kl_bild" if name == "hard_concrete" else "none"
        settings = TrainSettings(
            learning_rate=3e-3, micro_batch_size=4, zero_stage=stage, num_workers=workers, distillation=distillation
        )
        job = TrainJob(
            model_dir=str(folder / "model"),
            teacher_dir=str(folder / "model"),
            train_file=str(folder / "train"),
            eval_file=str(folder / "eval"),
            out_dir=str(folder / "unused"),
            storage_path=str(folder / "unused"),
            run_name="unused",
            milestones=(1,),
            settings=settings,
            checkpoint_address=address,
            relaxation=RelaxationSpec(name, (plan.to_json(),), STEPS, KNOBS.get(name, {}), save_every=SAVE_EVERY),
        )
        cases.append({"name": f"{name}-{stage}-{workers}", "job": job.to_json()})
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("killed_relaxations.py")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, folder], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return last_json(done.stdout)
