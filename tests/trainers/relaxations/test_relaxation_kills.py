"""A relaxation whose worker is killed without warning goes on to the very same numbers, for every part of the axis.

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

from attention.io import checkpoint
from attention.plan import AttentionPlan, HeadShare, LayerPlan
from trainers.jobs.job import TrainJob
from trainers.relaxations import RELAXATION
from trainers.relaxations.stage import RelaxationSpec
from trainers.settings import TrainSettings
from trainers.text.data import write_sequences

REPOSITORY = Path(__file__).resolve().parents[3]
GROUPED = AttentionPlan((LayerPlan((0, 0, 1, 0), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
SHARED = AttentionPlan((LayerPlan.identity(4),) * 2, 8, (HeadShare(1, 0, 0, 2),), mlp_shares=(HeadShare(1, 1, 0, 1),))
STEPS, SAVE_EVERY, KILL_AT = 18, 6, 9
KNOBS: dict[str, dict[str, Any]] = {
    "lagrangian": {"rate": 0.05, "tolerance": 0.0},
    "hard_concrete": {"rate": 0.3},
    "pull_together": {"rate": 0.1},
}
SPLITS = [(0, 1), (3, 2)]  # ZeRO stage, workers
CASES = [(part.name, *split) for part in RELAXATION for split in SPLITS]


@pytest.fixture(scope="module")
def ended(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder of all runs, and how their workers ended."""
    folder = tmp_path_factory.mktemp("kills")
    checkpoint.save(tiny_model("llama", attention_bias=True), folder / "model")
    generator = torch.Generator().manual_seed(0)
    for name, rows in (("train", 100), ("eval", 8)):
        write_sequences(torch.randint(0, 64, (rows, 16), generator=generator), folder / f"{name}.safetensors")
    cases = []
    for name, stage, workers in CASES:
        plan = SHARED if "shares" in RELAXATION.get(name).needs else GROUPED
        # Align as its paper trains it, so that the teacher comes back too
        distillation = "kl_bild" if name == "hard_concrete" else "none"
        settings = TrainSettings(
            learning_rate=3e-3, micro_batch_size=4, zero_stage=stage, num_workers=workers, distillation=distillation
        )
        job = TrainJob(
            model_dir=str(folder / "model"),
            teacher_dir=str(folder / "model"),
            train_file=str(folder / "train.safetensors"),
            eval_file=str(folder / "eval.safetensors"),
            out_dir=str(folder / "unused"),
            storage_path=str(folder / "unused"),
            run_name="unused",
            milestones=(1,),
            settings=settings,
            relaxation=RelaxationSpec(name, (plan.to_json(),), STEPS, KNOBS.get(name, {}), save_every=SAVE_EVERY),
        )
        cases.append({"name": f"{name}-{stage}-{workers}", "kill_at": KILL_AT, "job": job.to_json()})
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("killed_relaxations.py")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, folder], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-zero{c[1]}-{c[2]}workers")
def test_a_killed_relaxation_goes_on_to_the_same_numbers(
    case: tuple[str, int, int], ended: tuple[Path, dict[str, Any]]
) -> None:
    folder, ends = ended
    name = "-".join(map(str, case))
    assert set(ends[name]["whole"]) == set(ends[name]["again"]) == {0}
    assert ends[name]["killed"][-1] == -9 and ends[name]["unfinished"]
    stages = [folder / name / kind / "out.relaxed" / "stage-0" for kind in ("whole", "killed")]
    whole, killed = (json.loads((stage / "outcome.json").read_text()) for stage in stages)
    assert [point["step"] for point in whole["history"]] == list(range(1, STEPS + 1))
    assert killed["history"] == whole["history"]  # loss and metrics of every step, the 9 after the kill among them
    assert len({point["train_loss"] for point in whole["history"]}) == STEPS
    for key in ("loss", "position", "tokens", "metrics"):
        assert killed[key] == whole[key], key
    weights = [(stage / "collapsed" / "model.safetensors").read_bytes() for stage in stages]
    assert weights[0] == weights[1]
