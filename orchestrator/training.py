"""The full trainings of a promotion: each a Ray task that runs Ray Train workers, several at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.callbacks import last_error
from orchestrator.config import SearchConfig
from orchestrator.folders import SearchFolder
from orchestrator.results import TrialRecord
from orchestrator.trial import TrialContext, prepare_process
from trainers.worker import TrainJob, run_training

POLL_SECONDS = 10.0
Done = Callable[["Training", "dict[str, Any] | None", "str | None"], None]


@dataclass(frozen=True)
class Training:
    """One trial's way to `total` steps. `job` None: the trial has got there already, its weights lie in `folder`."""

    trial_id: str
    label: str
    total: int
    folder: Path
    start: int
    loss: float
    kl: float | None
    job: TrainJob | None

    @classmethod
    def of(
        cls, trial: TrialRecord, total: int, config: SearchConfig, context: TrialContext, folder: SearchFolder
    ) -> Training:
        """Continue from the trial's last training checkpoint; from its converted weights if it has none."""
        own = folder.trial(trial.trial_id)
        label = f"{trial.recipe} {trial.kv_ratio:.0%}"
        kl = trial.last.get("kl")
        if trial.step == total:
            weights = own / ("trained" if total else "converted")
            return cls(trial.trial_id, label, total, weights, total, trial.loss, kl, None)
        saved = trial.last.get("checkpoint_path")
        start = trial.step if saved and Path(saved).is_dir() else 0
        target = folder.promoted / f"{trial.trial_id}-{total}"
        job = TrainJob(
            model_dir=str(own / "converted"),
            teacher_dir=context.model,
            train_file=context.train_file,
            eval_file=context.eval_file,
            out_dir=str(target / "trained"),
            storage_path=str(folder.train),
            run_name=f"promote-{trial.trial_id}-{total}",
            milestones=milestones(start, total, config.promotion.evaluations),
            settings=context.settings(trial.learning_rate),
            start_step=start,
            resume_from=saved if start else None,
            seed=context.seed,
        )
        return cls(trial.trial_id, label, total, target / "trained", start, trial.loss, kl, job)

    @property
    def log(self) -> Path:
        """Milestones as they come, one JSON object a line."""
        return self.folder.parent / "milestones.jsonl"

    def reports(self) -> list[dict[str, Any]]:
        """The milestones so far, each step once."""
        if self.job is None or not self.log.exists():
            return []
        lines = [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        return list({line["step"]: line for line in lines}.values())


def milestones(start: int, total: int, evaluations: int) -> tuple[int, ...]:
    """`evaluations` steps spread evenly over (start, total], the last one being `total`."""
    span = total - start
    return tuple(sorted({start + round(span * (i + 1) / evaluations) for i in range(evaluations)} - {start}))


def run_all(trainings: Sequence[Training], parallel: int, config: SearchConfig, done: Done) -> None:
    """Run the trainings, at most `parallel` at a time; `done(training, metrics or None, error)` after each.

    `metrics` has loss, kl and folder (of the trained checkpoint). One that fails does not end the others.
    """
    import ray

    for training in (t for t in trainings if t.job is None):
        done(training, {"loss": training.loss, "kl": training.kl, "folder": str(training.folder)}, None)
    waiting = [t for t in trainings if t.job is not None]
    own = config.resources
    task = ray.remote(num_cpus=own.driver_cpus, max_retries=0)(_train)
    running: dict[Any, Training] = {}
    while waiting or running:
        while waiting and len(running) < parallel:
            training = waiting.pop(0)
            assert training.job is not None
            training.log.parent.mkdir(parents=True, exist_ok=True)
            running[task.remote(training.job.to_json(), str(training.log))] = training
            print(f"promotion: {training.label} goes on from step {training.start} to {training.total}", flush=True)
        finished, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
        for reference in finished:
            training = running.pop(reference)
            try:
                metrics, error = ray.get(reference), None
                print(
                    f"promotion: {training.label}: loss {metrics['loss']:.3f} after {training.total} steps", flush=True
                )
            except Exception as failure:
                metrics, error = None, _reason(failure)
                print(f"promotion: {training.label} failed: {error}", flush=True)
            done(training, metrics, error)


def _reason(failure: Exception) -> str:
    """The cause that Ray has wrapped, in one line."""
    return last_error(f"{type(failure).__name__}: {failure}")


def _train(job: str, log: str) -> dict[str, Any]:
    """A Ray task: carry out a job, writing its milestones to `log`."""
    prepare_process()
    parsed = TrainJob.from_json(job)
    outcome = run_training(parsed, callbacks=[_milestone_log(log)])
    return {"loss": outcome.metrics["loss"], "kl": outcome.metrics.get("kl"), "folder": parsed.out_dir}


def _milestone_log(path: str) -> Any:
    from ray.train import UserCallback

    class MilestoneLog(UserCallback):
        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
            with Path(path).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(metrics[0]) + "\n")

    return MilestoneLog()
