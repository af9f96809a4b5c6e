"""A training of `headfold train` or `finetune` while it runs: progress, lines, and MLflow.

Where MLFLOW_TRACKING_URI names a store, as for other trainers, it has a run there: in the
experiment of searches, under the metric names of a promotion.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from attention.base.progress import ProgressStage, stage
from attention.base.timing import clock
from orchestrator.storage import records
from orchestrator.tracking.metrics import MetricPoint, point
from orchestrator.tracking.run_metadata import dataset_of, source_tags
from orchestrator.tracking.runs import NOTE, Tracker
from orchestrator.tracking.sync import MlflowSync, TrackedRun, identity_tags
from orchestrator.training.request import TrainingRequest
from orchestrator.training.run import TrainingFollower, TrainingReport, TrainingRun

EXPERIMENT = "headfold"
_POLL_SECONDS = 0.5
_MLFLOW_SECONDS = 10.0
"""Between two updates of MLflow, but for the last one."""


@contextmanager
def training_progress(
    request: TrainingRequest, run: TrainingRun, log: Callable[[str], None]
) -> Iterator[None]:
    """Show how far the training has come while the body runs, and log each milestone.

    Those of an earlier start are logged as well.
    """
    tracked = TrackedTraining(request, run)
    ended = threading.Event()

    def watch(progress: ProgressStage) -> None:
        started, last_look, cost = time.time(), False, run.checkpoint_cost()
        follower = TrainingFollower(run)
        begun = False
        reached = 0
        while not last_look:
            last_look = ended.wait(_POLL_SECONDS)
            milestones, curve = follower.look()
            for report in milestones:
                log(_line(report, request.steps))
            if cost != (cost := run.checkpoint_cost()) and cost is not None:
                log(f"training: {cost.warning or cost.describe()}")
            steps = [line["step"] for line in curve if line["time"] > started]
            if steps and not begun:
                begun = True
                # Until its first step workers and libraries have started
                if progress.start < steps[0]:
                    progress.begin(steps[0])
            reached = max([reached, *steps, *(report["step"] for report in milestones)])
            progress.to(reached)
            tracked.add([*milestones, *curve])

    before = max((report["step"] for report in run.reports()), default=0)
    with stage("training", request.steps, "steps", start=before) as progress:
        watcher = threading.Thread(target=watch, args=(progress,), daemon=True)
        watcher.start()
        status = records.FAILED
        try:
            yield
            status = records.DONE
        except (KeyboardInterrupt, SystemExit):
            status = records.KILLED
            raise
        finally:
            ended.set()
            watcher.join()
            tracked.end([*run.reports(), *run.curve()], status)


def _line(report: TrainingReport, steps: int) -> str:
    step, seconds = report["step"], report["seconds"]
    end = (
        f"{clock(seconds * (steps - step) / step)} left" if step < steps else f"in {clock(seconds)}"
    )
    return (
        f"training: {step} of {steps} steps, {end}; held-out loss {report['loss']:.3f}, training "
        f"loss {report['train_loss']:.3f}, {report['tokens_per_second']:.0f} tokens/s"
    )


class TrackedTraining:
    """The run of a training in MLflow; nothing is sent where the environment names no store."""

    def __init__(self, request: TrainingRequest, run: TrainingRun) -> None:
        texts = {
            "train": (request.train_data, run.job.train_file),
            "eval": (request.eval_data, run.job.eval_file),
        }
        self._datasets = [dataset_of(split, *text) for split, text in texts.items()]
        self._request = request
        self._started = time.time()
        self._sync: MlflowSync | None = None
        self._updated = 0.0
        self._waiting: list[TrainingReport] = []

    def add(self, reports: Sequence[TrainingReport]) -> None:
        """Send what is new, every few seconds, each report with its `step` and `time`."""
        self._waiting += reports
        if time.monotonic() - self._updated < _MLFLOW_SECONDS:
            return
        self._updated = time.monotonic()
        if self._sync is None:
            self._open(self._waiting, records.RUNNING)
        else:
            self._sync.add_points(self._tags(), _points(self._waiting))
        self._waiting = []

    def end(self, reports: Sequence[TrainingReport], status: str) -> None:
        """Send all that was measured, and how the training has ended."""
        if self._sync is None:
            self._open(reports, status)
        if self._sync is None:
            return
        self._sync.put(self._run(reports, status))
        if not self._sync.flush():
            print("MLflow is away: its run of this training is not up to date", file=sys.stderr)

    def _open(self, reports: Sequence[TrainingReport], status: str) -> None:
        """Connect, where the environment names a store, and send these reports."""
        if uri := os.environ.get("MLFLOW_TRACKING_URI"):
            connect = partial(Tracker.open, uri, EXPERIMENT, self._request.out.parent)
            self._sync = MlflowSync(connect, self._run(reports, status))

    def _tags(self) -> dict[str, str]:
        """Return what identifies the run."""
        request = self._request
        return identity_tags(request.VERB, request.out, request.mark.get("id"))

    def _run(self, reports: Sequence[TrainingReport], status: str) -> TrackedRun:
        request = self._request
        name = f"{request.out.name} \u00b7 {request.title}"
        note = (
            f"Training of {request.title}; its best measured step, or the last, is in "
            f"`{request.out}`."
        )
        tags = {
            **self._tags(),
            **source_tags(request.VERB, shlex.join(["headfold", *sys.argv[1:]])),
            "mlflow.runName": name,
            NOTE: note,
        }
        params = {
            "base_model": Path(request.source).name,
            "steps": request.steps,
            "sequence_length": request.sequence_length,
            **request.settings.model_dump(mode="json"),
        }
        first = {  # before the first step
            "step": 0,
            "time": request.mark.get("begun") or request.mark_file.stat().st_ctime,
            "loss": request.mark.get("loss_before"),
            "kv_bytes_per_token": request.kv_bytes_per_token,
        }
        points = _points((first, *reports))
        return TrackedRun(
            name, tags, status, params, points, datasets=self._datasets, started=self._started
        )


def _points(reports: Iterable[TrainingReport]) -> list[MetricPoint]:
    return [point(values, values["step"], values["time"]) for values in reports]
