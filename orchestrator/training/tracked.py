"""The run of `headfold train` or `finetune` in MLflow: where MLFLOW_TRACKING_URI names a store, as for other trainers.

It lies in the experiment that searches lie in too, under the metric names of a promotion.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.storage import records
from orchestrator.tracking.metrics import point
from orchestrator.tracking.run_metadata import NOTE, Dataset, source_tags
from orchestrator.tracking.runs import Tracker
from orchestrator.tracking.sync import MlflowSync, TrackedRun

EXPERIMENT = "headfold"
SECONDS = 10.0  # between two times that MLflow is told, but for the end


@dataclass
class TrackedTraining:
    """The run of a training in the folder `out`, made by a `verb`; nothing is told without a store."""

    verb: str
    out: Path
    title: str
    params: Mapping[str, Any]
    datasets: Sequence[Dataset]
    started: float = field(default_factory=time.time)
    _sync: MlflowSync | None = None
    _told: float = 0.0

    def tell(self, points: Sequence[Mapping[str, Any]], status: str = records.RUNNING) -> None:
        """What was measured so far, values by their names in reports, each with its `step` and `time`."""
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri or (status == records.RUNNING and time.monotonic() - self._told < SECONDS):
            return
        self._told, run = time.monotonic(), self._run(points, status)
        if self._sync is None:
            self._sync = MlflowSync(partial(Tracker.open, uri, EXPERIMENT, self.out.parent), run)
        self._sync.put(run)
        if status != records.RUNNING and not self._sync.flush():
            print("MLflow is away: its run of this training is not up to date", file=sys.stderr)

    def _run(self, points: Sequence[Mapping[str, Any]], status: str) -> TrackedRun:
        command = shlex.join(["headfold", *sys.argv[1:]])
        tags = {"headfold.kind": self.verb, "headfold.folder": str(self.out), **source_tags(self.verb, command)}
        note = f"Training of {self.title}; its best measured step, or the last, is in `{self.out}`."
        series = [point(values, values["step"], values["time"]) for values in points]
        name = f"{self.out.name} \u00b7 {self.title}"
        return TrackedRun(
            name,
            tags | {"mlflow.runName": name, NOTE: note},
            status,
            self.params,
            series,
            datasets=self.datasets,
            started=self.started,
        )
