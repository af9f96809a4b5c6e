"""The full trainings of a promotion, several at a time, and which of the models on a trial's way is shipped."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from orchestrator.cluster.placement import Demand
from orchestrator.cluster.pool_client import dispatch_training
from orchestrator.cluster.session import last_error, prepare_process
from orchestrator.search.candidates import Candidate
from orchestrator.search.resume import LOSSES, lost
from orchestrator.search.trials.context import SearchSession
from orchestrator.storage.json_files import read_json
from orchestrator.storage.records import TrialRecord
from trainers.deepspeed_config import layout_of
from trainers.jobs.checkpoints import CheckpointStore, is_saved, reports_of
from trainers.jobs.curve import read_curve
from trainers.jobs.train_job import TrainJob
from trainers.settings import TrainSettings

POLL_SECONDS = 10.0
Done = Callable[["Training", "float | None", "str | None"], None]


@dataclass(frozen=True)
class Training:
    """One trial's way to `total` steps. `job` None: the trial has got there already; `before`: steps of the trial that
    the job does not count."""

    trial: TrialRecord
    total: int
    start: int
    job: TrainJob | None
    before: int = 0

    @classmethod
    def of(cls, trial: TrialRecord, total: int, session: SearchSession) -> Training:
        """Continue from the trial's last training checkpoint; where that is gone (`orchestrator.search.leftovers`), or
        the promotion splits its training otherwise, from the trial's last weights, or else its best ones, with a fresh
        optimiser; from its converted weights if it was not trained."""
        context, folder = session.context, session.folder.trial(trial.trial_id)
        if trial.step == total:
            return cls(trial, total, total, None)
        section, saved = session.config.promotion, str(trial.last.get("checkpoint_path", ""))
        target = session.folder.promoted / f"{trial.trial_id}-{total}"
        candidate = Candidate.from_config(read_json(folder / "recipe.json"))
        alike = context.settings(candidate.recipe, candidate.learning_rate)
        settings = TrainSettings.model_validate(alike.model_dump() | section.train)
        place = session.config.promotion_shape
        more: dict[str, Any] = {"accelerator_type": place.accelerator_type, "placement_strategy": place.strategy}
        more |= {"settings": settings, "train_file": context.promotion_file or context.train_file}
        more |= {"checkpoint_steps": section.checkpoint_steps, "checkpoint_minutes": section.checkpoint_minutes}
        start, before, model = 0, 0, folder / "converted"
        there = bool(trial.step and saved) and is_saved(saved, context.checkpoint_address)
        if there and layout_of(settings) == layout_of(alike):
            # The steps of a relaxation count, but lie before the run that goes on
            spec = context.relaxation(candidate.recipe, folder)
            start, before = trial.step, spec.total_steps if spec else 0
            model = Path(str(trial.last["relaxed_dir"])) if before else model
            going_on = start - before
            more |= {"start_step": going_on, "schedule_offset": -going_on, "resume_from": saved}
        elif trial.step and (folder / "trained").is_dir():
            start = before = trial.step
            model = folder / "trained"
        elif trial.step and (best := trial.last.get("best_dir")) and Path(best).is_dir():
            start = before = int(trial.last["best_step"])
            model = Path(best)
        if start and not more.get("resume_from") and context.promotion_file is None:
            more["first_sequence"] = int(trial.last.get("data_position", 0))
        steps = [step - before for step in milestones(start, total, section.evaluations)]
        job = context.job(f"promote-{target.name}", model, target / "trained", candidate, steps, **more)
        return cls(trial, total, start, job, before)

    @property
    def params(self) -> dict[str, Any]:
        """With which it trains; none where nothing is left to train."""
        settings = self.job.settings if self.job else None
        return {} if settings is None else {"learning_rate": settings.learning_rate, "batch_size": settings.batch_size}

    def reports(self) -> list[dict[str, Any]]:
        """The milestones so far, in steps of the trial: those of a relaxation before it count."""
        if self.job is None:
            return []
        steps = ("step", "best_step")
        return [r | {key: r[key] + self.before for key in steps if key in r} for r in reports_of(self.job)]

    def curve(self) -> list[dict[str, Any]]:
        """Its course so far, as far as it is behind the last report or between two, in steps of the trial."""
        if self.job is None:
            return []
        lines = read_curve(Path(self.job.storage_path) / self.job.run_name)
        return [line | {"step": line["step"] + self.before} for line in lines]

    def reached(self) -> int:
        """The newest step that is known of it."""
        return max((line["step"] for line in (*self.reports(), *self.curve())), default=self.start)

    def newest_step(self) -> int:
        """The step of its newest checkpoint; -1 without one, and where their address is away."""
        with contextlib.suppress(OSError):
            kept = CheckpointStore.of(self.job).read()[0] if self.job else []
            return kept[-1].step if kept else -1
        return -1


def milestones(start: int, total: int, evaluations: int) -> tuple[int, ...]:
    """`evaluations` steps spread evenly over (start, total], the last one being `total`."""
    span = total - start
    return tuple(sorted({start + round(span * (i + 1) / evaluations) for i in range(evaluations)} - {start}))


def run_all(
    trainings: Sequence[Training], session: SearchSession, done: Done, going_on: Callable[[Training], None]
) -> None:
    """Run the trainings, each a Ray task, as many at a time as the session has room for; `done(training, loss after the
    last step or None, error)` after each, `going_on(training)` every few seconds until then. One that loses its
    machines goes on from its last checkpoint; it fails if that happens again and again without a new one."""
    for training in (t for t in trainings if t.job is None):
        done(training, training.trial.last_loss, None)
    waiting = [t for t in trainings if t.job is not None]
    task: Any = ray.remote(num_cpus=Demand.of(session.config).process_cpus, max_retries=0)(_train)
    running: dict[Any, Training] = {}
    lost_at: dict[str, list[int]] = {}  # newest checkpoints at the losses of machines
    while waiting or running:
        while waiting and len(running) < session.parallel:
            training = waiting.pop(0)
            running[task.remote(training.job, session.context.pool)] = training
            print(
                f"promotion: {training.trial.name} goes on from step {training.start} to {training.total}", flush=True
            )
        finished, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
        for training in running.values():
            going_on(training)
        for reference in finished:
            training = running.pop(reference)
            name = training.trial.name
            try:
                loss, error = ray.get(reference), None
                print(f"promotion: {name}: loss {loss:.3f} after {training.total} steps", flush=True)
            except Exception as failure:
                loss, error = None, last_error(f"{type(failure).__name__}: {failure}")  # the cause that Ray wraps
                at = lost_at.setdefault(training.trial.trial_id, [])
                at.append(training.newest_step())
                if lost(failure) and at.count(at[-1]) <= LOSSES:
                    print(f"promotion: {name} has lost its machines and starts again: {error}", flush=True)
                    waiting.append(training)
                    continue
                print(f"promotion: {name} failed: {error}", flush=True)
            done(training, loss, error)


def _train(job: TrainJob, pool: str | None) -> float:
    """A Ray task: carry out a job. Returns the loss after the last step."""
    prepare_process()
    return dispatch_training(pool, job)["loss"]


# ---- what is shipped -------------------------------------------------------------------------------------------------

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
    """What is shipped: of all that was measured on the trial's way (converted, relaxed, at its rungs, in its promotion)
    the model of lowest held-out loss whose weights are there, of equal ones the least trained; None if there is none.
    `folder`: the trial's; `reports`: those of its promotion."""
    models = [m for m in _models(trial, folder, reports) if math.isfinite(m.loss) and m.folder.is_dir()]
    return min(models, key=lambda model: (model.loss, model.step), default=None)


def _models(trial: TrialRecord, folder: Path, reports: Sequence[Mapping[str, Any]]) -> Iterator[Measured]:
    positions = {int(r["step"]): r.get("data_position") for r in (*trial.rungs, *reports)}

    def trained(step: int, loss: float | None, kl: float | None, place: str | Path) -> Measured:
        return Measured(step, _number(loss), kl, Path(place), f"step {step}", positions.get(step))

    if (first := trial.untrained) is not None:
        what = POOLED if trial.relaxes else UNTRAINED
        yield Measured(0, _number(first["loss"]), first.get("kl"), folder / "converted", what, 0)
    last = trial.last
    if last.get("relaxed_dir"):
        steps, loss = int(last.get("relaxation_steps", 0)), _number(last.get("collapsed_loss"))
        yield Measured(steps, loss, None, Path(last["relaxed_dir"]), RELAXED)
    if trial.step and "best_dir" not in last:
        yield trained(trial.step, last.get("loss"), last.get("kl"), folder / "trained")
    for report in (report for report in (last, *reports[-1:]) if "best_dir" in report):
        yield trained(report["best_step"], report["best_loss"], report["best_kl"], report["best_dir"])


def _number(loss: float | None) -> float:
    return math.nan if loss is None else float(loss)
