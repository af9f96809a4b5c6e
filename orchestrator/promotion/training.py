"""The full trainings of a promotion, and which of the models on a trial's way is shipped."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import ray

from orchestrator.cluster.ray_tasks import cancel_unfinished
from orchestrator.cluster.session import last_error, prepare_process
from orchestrator.resources.processes import PROMOTION_WORKER
from orchestrator.search.candidates import Candidate
from orchestrator.search.trials.context import SearchSession
from orchestrator.storage.json_files import read_if_there, read_json, write_json
from orchestrator.storage.records import TrialRecord
from orchestrator.training.run import Failures, TrainingReport, TrainingRun, lost
from trainers.deepspeed_config import layout_of
from trainers.jobs.best import best_folder
from trainers.jobs.checkpoints import CheckpointStore, is_saved
from trainers.settings import TrainSettings
from trainers.text.token_sets import is_complete, read_sequences

_POLL_SECONDS = 10.0
_MACHINES = (
    "num_workers",
    "min_workers",
    "cpus_per_worker",
    "gpus_per_worker",
    "device",
    "micro_batch_size",
    "activation_checkpointing",
    "compile",
)
"""Settings that say on what a training runs, with which it may be continued otherwise."""


@dataclass(frozen=True)
class StartPoint:
    """The weights from which a trial trains on.

    Attributes:
        step: Training steps of the trial before them.
        offset: Of these, those that the job which trains on does not count.
        resume_from: The training checkpoint that is continued; None starts with a fresh optimiser.
    """

    model: Path
    step: int = 0
    offset: int = 0
    resume_from: str | None = None

    @classmethod
    def of(
        cls, trial: TrialRecord, candidate: Candidate, session: SearchSession, *, same_layout: bool
    ) -> StartPoint:
        """Continue the trial's last training checkpoint, if it is there and can be.

        It may be gone (`orchestrator.search.leftovers`), or the promotion splits its training in
        another way. Then the start is the trial's last weights, or else its best ones; of a trial
        without training its converted weights.
        """
        context, folder = session.context, session.folder.trial(trial.trial_id)
        if not trial.step:
            return cls(folder / "converted")
        saved = str(trial.last.get("checkpoint_path", ""))
        if saved and same_layout and is_saved(saved, context.checkpoint_address):
            relaxation = context.relaxation(candidate.recipe, folder)
            if relaxation is None:
                return cls(folder / "converted", trial.step, 0, saved)
            # The steps of a relaxation count, but precede the run that is resumed
            return cls(
                Path(str(trial.last["relaxed_dir"])), trial.step, relaxation.total_steps, saved
            )
        if (folder / "trained").is_dir():
            return cls(folder / "trained", trial.step, trial.step)
        if (best := trial.last.get("best_dir")) and Path(best).is_dir():
            step = int(trial.last["best_step"])
            return cls(Path(best), step, step)
        return cls(folder / "converted")


@dataclass(frozen=True)
class Training:
    """The training of one trial up to `total` steps, all in steps of the trial.

    `run` None: it has got there already.
    """

    trial: TrialRecord
    total: int
    start: int
    run: TrainingRun | None

    @classmethod
    def of(cls, trial: TrialRecord, total: int, session: SearchSession) -> Training:
        """Plan the training, with the promotion's own settings and schedule."""
        if trial.step == total:
            return cls(trial, total, total, None)
        context, section = session.context, session.config.promotion
        candidate = Candidate.from_config(
            read_json(session.folder.trial(trial.trial_id) / "recipe.json")
        )
        trial_settings = context.settings(candidate.recipe, candidate.learning_rate)
        defaults = {
            "activation_checkpointing": context.train.get("activation_checkpointing", False)
        }
        settings = TrainSettings.model_validate(
            trial_settings.model_dump() | defaults | section.train
        )
        settings = context.recomputing(settings, PROMOTION_WORKER)
        same_layout = layout_of(settings) == layout_of(trial_settings)
        start = StartPoint.of(trial, candidate, session, same_layout=same_layout)
        steps = [step - start.offset for step in milestones(start.step, total, section.evaluations)]
        target = session.folder.promoted / f"{trial.trial_id}-{total}"
        job = context.job(
            f"promote-{target.name}", start.model, target / "trained", candidate, steps
        )
        reads_on = start.step and start.resume_from is None and context.promotion_file is None
        shape = session.config.promotion_shape
        job = replace(
            job,
            settings=settings,
            train_file=context.promotion_file or context.train_file,
            first_sequence=int(trial.last.get("data_position", 0)) if reads_on else 0,
            start_step=start.step - start.offset,
            start_tokens=_tokens_by_step(trial.rungs).get(start.step),
            schedule_offset=start.offset - start.step,
            resume_from=start.resume_from,
            checkpoint_steps=section.checkpoint_steps,
            checkpoint_minutes=section.checkpoint_minutes or context.checkpoint_minutes,
            accelerator_type=shape.accelerator_type,
            placement_strategy=shape.strategy,
        )
        return cls(trial, total, start.step, TrainingRun(job, start.offset))

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters of the training; none where no training remains."""
        if self.run is None:
            return {}
        settings = self.run.job.settings
        return {"learning_rate": settings.learning_rate, "batch_size": settings.batch_size}

    def claim(self) -> list[str]:
        """Clear what a training of this name with other settings, text or start has left.

        Its checkpoints, reports and weights would be taken for those of this training. What has no
        mark is of an earlier version, and is continued.

        Returns:
            The names of what has changed.

        Raises:
            AddressAwayError: If the address of its checkpoints does not answer.
        """
        if self.run is None:
            return []
        job = self.run.job
        mark = Path(job.out_dir).with_name("job.json")
        text = job.train_file
        settings = job.settings.identity()
        work = {
            **{name: value for name, value in settings.items() if name not in _MACHINES},
            "text": read_sequences(text).digest if is_complete(text) else text,
            "milestones": list(job.milestones),
            "start_step": job.start_step,
            "schedule_offset": job.schedule_offset,
            "first_sequence": job.first_sequence,
        }
        before = read_if_there(mark)
        names = sorted(before.keys() | work.keys())
        changed = [name for name in names if before.get(name) != work.get(name)]
        if before and changed:
            self.clear()
        write_json(mark, work)
        return changed if before else []

    def clear(self) -> None:
        """Remove the checkpoints, reports and weights of this training.

        Raises:
            AddressAwayError: If the address of its checkpoints does not answer.
        """
        if self.run is None:
            return
        job = self.run.job
        CheckpointStore.of(job).remove()
        run_folder = Path(job.storage_path) / job.run_name
        for folder in (run_folder, Path(job.out_dir), Path(best_folder(job.out_dir, 0)).parent):
            shutil.rmtree(folder, ignore_errors=True)

    def reports(self) -> list[TrainingReport]:
        """Return the completed milestones."""
        return self.run.reports() if self.run else []

    def curve(self) -> list[TrainingReport]:
        """Return its curve, between the milestones and after the last one."""
        return self.run.curve() if self.run else []


class TrainingResult(NamedTuple):
    """The result of a training: the loss after its last step, and its reports at milestones."""

    loss: float | None
    reports: list[TrainingReport]


Done = Callable[[Training, TrainingResult | None, str | None], None]
"""Called with a training, its result, and an error; one of the two is None."""


def milestones(start: int, total: int, evaluations: int) -> tuple[int, ...]:
    """Return `evaluations` steps spread evenly over (start, total], the last one being `total`."""
    span = total - start
    return tuple(
        sorted({start + round(span * (i + 1) / evaluations) for i in range(evaluations)} - {start})
    )


def run_all(
    trainings: Sequence[Training],
    session: SearchSession,
    done: Done,
    going_on: Callable[[Training], None],
) -> None:
    """Run the trainings, each a Ray task, as many at a time as the session has room for.

    A run that loses its machines resumes from its last checkpoint; it fails if that happens
    repeatedly without a new one.

    Args:
        done: Called after each.
        going_on: Called every few seconds until then.
    """
    for training in (t for t in trainings if t.run is None):
        done(training, TrainingResult(training.trial.last_loss, []), None)
    waiting = [t for t in trainings if t.run is not None]
    # It waits for workers, which may need every CPU that there is
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_train)
    running: dict[Any, Training] = {}
    try:
        _run_waiting(waiting, running, task, session, done, going_on)
    finally:
        cancel_unfinished(list(running))  # of a search that is interrupted, where Ray lives on


def _run_waiting(
    waiting: list[Training],
    running: dict[Any, Training],
    task: Any,
    session: SearchSession,
    done: Done,
    going_on: Callable[[Training], None],
) -> None:
    failures: dict[str, Failures] = {}
    described: set[str] = set()  # whose checkpoints' cost was printed
    while waiting or running:
        while waiting and len(running) < session.parallel:
            training = waiting.pop(0)
            running[task.remote(training.run, session.context.pool)] = training
            name = training.trial.name
            print(
                f"promotion: {name} continues from step {training.start} to {training.total}",
                flush=True,
            )
        finished, _ = ray.wait(list(running), num_returns=1, timeout=_POLL_SECONDS)
        for training in running.values():
            going_on(training)
            cost = training.run.checkpoint_cost() if training.run else None
            if cost is not None and training.trial.trial_id not in described:
                described.add(training.trial.trial_id)
                print(
                    f"promotion: {training.trial.name}: {cost.warning or cost.describe()}",
                    flush=True,
                )
        for reference in finished:
            training = running.pop(reference)
            trial, run = training.trial, training.run
            try:
                result, error = ray.get(reference), None
                print(
                    f"promotion: {trial.name}: loss {result.loss:.3f} after {training.total} steps",
                    flush=True,
                )
            except Exception as failure:
                # The last error is the cause, which Ray wraps
                result, error = None, last_error(f"{type(failure).__name__}: {failure}")
                step = run.checkpoint_step() if run else -1
                failures[trial.trial_id] = failures.get(trial.trial_id, Failures()).another(step)
                if lost(failure) and failures[trial.trial_id].retries_left:
                    print(
                        f"promotion: {trial.name} has lost its machines and starts again: {error}",
                        flush=True,
                    )
                    waiting.append(training)
                    continue
                print(f"promotion: {trial.name} failed: {error}", flush=True)
            done(training, result, error)


def _train(run: TrainingRun, pool: str | None) -> TrainingResult:
    """Train, as a Ray task, which is lost if its reports cannot be read at the end."""
    prepare_process()
    return TrainingResult(run.train(pool)["loss"], run.reports())


# ---- what is shipped -----------------------------------------------------------------------------

UNTRAINED = "untrained conversion"
POOLED = "pooled conversion, untrained: not what its relaxation trains from"
RELAXED = "relaxed model before any recovery"


@dataclass(frozen=True)
class Measured:
    """A model that was measured, and its weights.

    Attributes:
        step: Training steps before it.
        loss: Held out, in nats per token, as `kl` is.
        position: Sequences of the training data used before it, if that is recorded.
        tokens: Tokens that it was trained on, if that is recorded.
    """

    step: int
    loss: float
    kl: float | None
    folder: Path
    what: str
    position: int | None = None
    tokens: int | None = None


def best_model(
    trial: TrialRecord, folder: Path, reports: Sequence[Mapping[str, Any]] = ()
) -> Measured | None:
    """Return the model that is shipped; None if there is none.

    Of all measured models of the trial (converted, relaxed, at its rungs, in its promotion) it is
    the one of lowest held-out loss whose weights exist, of equal ones the least trained.

    Args:
        folder: The trial's.
        reports: Those of its promotion.
    """
    models = [
        model
        for model in _models(trial, folder, reports)
        if math.isfinite(model.loss) and model.folder.is_dir()
    ]
    return min(models, key=lambda model: (model.loss, model.step), default=None)


def _models(
    trial: TrialRecord, folder: Path, reports: Sequence[Mapping[str, Any]]
) -> Iterator[Measured]:
    positions = {int(r["step"]): r.get("data_position") for r in (*trial.rungs, *reports)}
    tokens = _tokens_by_step((*trial.rungs, *reports))

    def trained(step: int, loss: float | None, kl: float | None, weights: str | Path) -> Measured:
        past = positions.get(step), tokens.get(step)
        return Measured(step, _number(loss), kl, Path(weights), f"step {step}", *past)

    if (first := trial.untrained) is not None:
        what = POOLED if trial.relaxes else UNTRAINED
        yield Measured(0, _number(first["loss"]), first.get("kl"), folder / "converted", what, 0, 0)
    last = trial.last
    if last.get("relaxed_dir"):
        steps = int(last.get("relaxation_steps", 0))
        loss = _number(last.get("collapsed_loss"))
        yield Measured(steps, loss, None, Path(last["relaxed_dir"]), RELAXED)
    if trial.step and "best_dir" not in last:
        yield trained(trial.step, last.get("loss"), last.get("kl"), folder / "trained")
    for report in (report for report in (last, *reports[-1:]) if "best_dir" in report):
        yield trained(
            report["best_step"], report["best_loss"], report["best_kl"], report["best_dir"]
        )


def _tokens_by_step(reports: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Return the tokens that were trained on up to each reported step."""
    return {int(report["step"]): int(report["tokens"]) for report in reports if "tokens" in report}


def _number(loss: float | None) -> float:
    return math.nan if loss is None else float(loss)
