"""A training of `headfold train` or `finetune` while it runs: progress, lines, and MLflow.

Where MLFLOW_TRACKING_URI names a store, as for other trainers, it has a run there: in the
experiment that searches lie in too, under the metric names of a promotion.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from attention.base.progress import ProgressStage, stage
from attention.base.timing import clock
from orchestrator.storage import records
from orchestrator.tracking.metrics import point
from orchestrator.tracking.run_metadata import NOTE, dataset_of, source_tags
from orchestrator.tracking.runs import Tracker
from orchestrator.tracking.sync import MlflowSync, TrackedRun
from orchestrator.training.request import TrainingRequest
from orchestrator.training.run import TrainingReport, TrainingRun

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
        logged, started, last_look, cost = 0, time.time(), False, run.checkpoint_cost()
        while not last_look:
            last_look = ended.wait(_POLL_SECONDS)
            reports, curve = run.reports(), run.curve()
            for report in reports[logged:]:
                log(_line(report, request.steps))
            logged = len(reports)
            if cost != (cost := run.checkpoint_cost()) and cost is not None:
                log(f"training: {cost.warning or cost.describe()}")
            steps = [line["step"] for line in curve if line["time"] > started]
            if steps and progress.start < steps[0]:
                progress.begin(steps[0])  # until its first step workers and libraries have started
            progress.to(max([report["step"] for report in reports] + steps, default=0))
            tracked.update([*reports, *curve])

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
            tracked.update([*run.reports(), *run.curve()], status)


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

    def update(self, reports: Sequence[TrainingReport], status: str = records.RUNNING) -> None:
        """Send what was measured so far, each report with its `step` and `time`."""
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri or (
            status == records.RUNNING and time.monotonic() - self._updated < _MLFLOW_SECONDS
        ):
            return
        self._updated = time.monotonic()
        run = self._run(reports, status)
        if self._sync is None:
            self._sync = MlflowSync(
                partial(Tracker.open, uri, EXPERIMENT, self._request.out.parent), run
            )
        self._sync.put(run)
        if status != records.RUNNING and not self._sync.flush():
            print("MLflow is away: its run of this training is not up to date", file=sys.stderr)

    def _run(self, reports: Sequence[TrainingReport], status: str) -> TrackedRun:
        request = self._request
        name = f"{request.out.name} \u00b7 {request.title}"
        note = (
            f"Training of {request.title}; its best measured step, or the last, is in "
            f"`{request.out}`."
        )
        tags = {
            "headfold.kind": request.VERB,
            "headfold.folder": str(request.out),
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
            "time": request.mark_file.stat().st_ctime,
            "loss": request.mark.get("loss_before"),
            "kv_bytes_per_token": request.kv_bytes_per_token,
        }
        points = [point(values, values["step"], values["time"]) for values in (first, *reports)]
        return TrackedRun(
            name, tags, status, params, points, datasets=self._datasets, started=self._started
        )
