"""Which of the models on a trial's way is shipped: the one of lowest held-out loss, whatever came later.

A trial is measured as it is converted (step 0), where a relaxation has ended, and at its rungs; its promotion measures
it further. Converted and relaxed weights are there anyway, the best of each training is kept
(`trainers.jobs.checkpoints`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.storage.records import TrialRecord

UNTRAINED = "untrained conversion"
POOLED = "pooled conversion, untrained: not what its relaxation trains from"
RELAXED = "relaxed model before any recovery"


@dataclass(frozen=True)
class Measured:
    """A model that was measured, and its weights. `step`: training steps behind it; `loss`, `kl`: held out, nats a
    token; `position`: sequences of the training data behind it, where that is known."""

    step: int
    loss: float
    kl: float | None
    folder: Path
    what: str
    position: int | None = None


def best_model(trial: TrialRecord, folder: Path, reports: Sequence[Mapping[str, Any]] = ()) -> Measured | None:
    """The measured model of lowest held-out loss (of equal ones the least trained) whose weights are there.

    `folder`: the trial's; `reports`: those of its promotion. None if there is no such model.
    """
    found = [model for model in _models(trial, folder, reports) if math.isfinite(model.loss) and model.folder.is_dir()]
    return min(found, key=lambda model: (model.loss, model.step), default=None)


def _models(trial: TrialRecord, folder: Path, reports: Sequence[Mapping[str, Any]]) -> Iterator[Measured]:
    positions = {int(r["step"]): r.get("data_position") for r in (*trial.rungs, *reports)}
    if (first := trial.untrained) is not None:
        what = POOLED if trial.relaxes else UNTRAINED
        yield Measured(0, _number(first["loss"]), first.get("kl"), folder / "converted", what, 0)
    last = trial.last
    if last.get("relaxed_dir"):
        steps, loss = int(last.get("relaxation_steps", 0)), _number(last.get("collapsed_loss"))
        yield Measured(steps, loss, None, Path(last["relaxed_dir"]), RELAXED)
    if trial.step and "best_dir" not in last:
        yield _trained(trial.step, last.get("loss"), last.get("kl"), folder / "trained", positions)
    for report in (report for report in (last, *reports[-1:]) if "best_dir" in report):
        yield _trained(report["best_step"], report["best_loss"], report["best_kl"], report["best_dir"], positions)


def _trained(
    step: int, loss: Any, kl: float | None, folder: str | Path, positions: Mapping[int, int | None]
) -> Measured:
    return Measured(step, _number(loss), kl, Path(folder), f"step {step}", positions.get(step))


def _number(loss: float | None) -> float:
    return math.nan if loss is None else float(loss)
