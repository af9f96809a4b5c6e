"""One trial: plan → convert → measure untrained → Ray Train workers with DeepSpeed for the remaining rungs.

Runs in a process of Ray Tune's with little CPU of its own; the workers that it starts have the rest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

from orchestrator.candidates import Candidate
from orchestrator.results import write_json
from orchestrator.schedulers.halving import rung_resource
from trainers.settings import TrainSettings

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from attention.calibration import Calibration

KEEP_BELOW = 500_000_000
"""Parameters up to which the untouched model stays in a trial's process, for the next trial there."""


@dataclass(frozen=True)
class TrialContext:
    """What all trials of a search share; plain values, paths absolute and visible to every node."""

    folder: str
    model: str
    dtype: str
    train_file: str
    eval_file: str
    calibration_file: str
    calibration_cache: str
    rungs: tuple[int, ...]
    reduction_factor: float
    train: dict[str, Any]
    base_loss: float
    seed: int
    device: str = "cpu"

    @property
    def shared(self) -> tuple[str, str, str, str, str, str]:
        """What trials in one process have in common, see `_shared`."""
        return (self.model, self.dtype, self.device, self.calibration_file, self.calibration_cache, self.eval_file)

    def settings(self, learning_rate: float) -> TrainSettings:
        return TrainSettings.model_validate(self.train | {"learning_rate": learning_rate})

    def at_rung(self, step: int) -> dict[str, Any]:
        """What ASHA needs to know of a report at `step`."""
        rung = self.rungs.index(step)
        return {"rung": rung, "resource": rung_resource(rung, self.reduction_factor)}


class ReportRungs(TuneReportCallback):
    """Hands each milestone of the Ray Train run to Tune, with the trial's own facts (budget, bytes, rung) added.

    Searcher and scheduler look at single reports, so each must be complete.
    """

    def __init__(self, context: TrialContext, facts: dict[str, Any]) -> None:
        super().__init__()
        self._context, self._facts = context, facts

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        first = metrics[0]
        added = self._context.at_rung(first["step"]) | {"rise": first["loss"] - self._context.base_loss}
        super().after_report(run_context, [{**self._facts, **first, **added}], checkpoint)


def run_trial(config: dict[str, Any], context: TrialContext) -> None:
    """Tune's function. `config` is that of a `Candidate`."""
    prepare_process()
    trial_id = tune.get_context().get_trial_id()
    folder = Path(context.folder) / "trials" / str(trial_id)
    facts = _untrained(config, context, folder)
    tune.report(facts | context.at_rung(0))
    if len(context.rungs) > 1:
        from trainers.worker import run_training

        job = training_job(context, folder, config, str(trial_id))
        run_training(job, callbacks=[ReportRungs(context, {k: v for k, v in facts.items() if k != "phases"})])


def prepare_process() -> None:
    from transformers.utils import logging as transformers_logging

    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
    # A node that is being added takes minutes; the default of one minute would fail the trial that waits for it.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "1800")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _untrained(config: dict[str, Any], context: TrialContext, folder: Path) -> dict[str, Any]:
    """Plan, convert, save and measure; the report of rung 0."""
    from attention import checkpoint
    from orchestrator import models
    from orchestrator.convert import plan_and_convert

    phases = models.Phases()
    candidate = Candidate.from_config(config)
    recipe, kv_ratio = candidate.recipe, candidate.kv_ratio
    with phases("load"):
        shared = _shared(*context.shared)
    base, calibration, calibration_tokens, held_out = shared
    converted, plan = plan_and_convert(recipe, kv_ratio, base, calibration, calibration_tokens, context.seed, phases)
    write_json(folder / "recipe.json", candidate.config())
    (folder / "plan.json").write_text(plan.to_json() + "\n", encoding="utf-8")
    with phases("evaluate"):
        scored = models.score(converted, held_out, base)
    with phases("save"):
        record = {"recipe": recipe.to_dict(), "seed": context.seed}
        checkpoint.save(converted, folder / "converted", models.load_tokenizer(context.model), record=record)
    measured = models.cache_facts(converted)
    if models.parameters(base) > KEEP_BELOW:
        _shared.cache_clear()
    return {
        **measured,
        "actual_kv_ratio": measured["kv_ratio"],
        "plan_digest": plan.digest,
        "loss": scored.loss,
        "rise": scored.loss - context.base_loss,
        "kl": scored.kl,
        "step": 0,
        "tokens": 0,
        "seed": context.seed,
        "phases": dict(phases),
        "seconds": sum(phases.values()),
    }


@lru_cache(maxsize=1)
def _shared(
    model: str, dtype: str, device: str, calibration_file: str, calibration_cache: str, eval_file: str
) -> tuple[PreTrainedModel, Calibration, Tensor, Tensor]:
    """Untouched model, its statistics, calibration tokens, held-out tokens: read once a process, trials reuse it."""
    from attention.calibration import cached_calibration
    from orchestrator import models
    from trainers.data import read_sequences

    base = models.load_model(model, dtype, device)
    tokens = read_sequences(calibration_file)
    calibration = cached_calibration(base, tokens, calibration_cache)
    return base, calibration, tokens, read_sequences(eval_file)


def training_job(context: TrialContext, folder: Path, config: dict[str, Any], trial_id: str) -> Any:
    """The brief fine-tuning of a trial: from its converted checkpoint through the rungs above 0."""
    from trainers.worker import TrainJob

    return TrainJob(
        model_dir=str(folder / "converted"),
        teacher_dir=context.model,
        train_file=context.train_file,
        eval_file=context.eval_file,
        out_dir=str(folder / "trained"),
        storage_path=str(Path(context.folder) / "train"),
        run_name=trial_id,
        milestones=context.rungs[1:],
        settings=context.settings(float(config["learning_rate"])),
        seed=context.seed,
    )
