"""Report the nodes that a search waits for: in its log, its folder, MLflow and its gauge."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from orchestrator.cluster.pending_resources import CapacityWatch, watch_pending
from orchestrator.cluster.placement import Demand
from orchestrator.cluster.stall import StallWatch
from orchestrator.config.schema import SearchConfig
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import waits_for
from orchestrator.tracking import gauges
from orchestrator.tracking.sync import MlflowSync, TrackedRun


@contextlib.contextmanager
def report_waiting(
    config: SearchConfig,
    folder: SearchFolder,
    mlflow: MlflowSync,
    run: Callable[[], TrackedRun],
    promoting: Callable[[], bool],
) -> Iterator:
    """Report what the body waits for as it runs, once and when that changes.

    Args:
        config: Of the search.
        folder: Of the search.
        mlflow: Its runs.
        run: Returns the run of the search as it should be in MLflow now.
        promoting: Returns whether the models of a promotion are trained now, and no trials.

    Raises:
        StalledError: If it can never continue, or nodes have been missing for too long.
    """

    def report(text: str | None) -> None:
        print(f"waiting  for {text}" if text else "waiting  no more", flush=True)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # a full disk is reported where it ends the search
            write_json(folder.waiting, {"waits_for": text, "since": since})
        gauges.set_gauge(gauges.WAITS, text is not None, search=folder.root.name)
        mlflow.put(run())

    gauges.set_gauge(gauges.WAITS, 0, search=folder.root.name)
    if waits_for(folder.waiting):  # left by a driver that was killed
        report(None)
    minutes = config.resources.stall_minutes
    stall = None if minutes is None else StallWatch(60 * minutes, partial(_newest_line, folder))

    def demand() -> Demand:
        return (Demand.of_promotion(config) if promoting() else None) or Demand.of(config)

    hours = config.resources.max_wait_hours
    capacity = CapacityWatch(demand, 3600 * hours) if hours else None
    with watch_pending(demand, report, stall, capacity):
        yield


def _newest_line(folder: SearchFolder) -> float:
    """Return when the journal or the curve of a training was last written."""
    newest = 0.0
    # Not rglob, which fails where a worker removes a folder meanwhile
    for root, _, names in os.walk(folder.root):
        for name in (name for name in names if name.endswith(".jsonl")):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, Path(root, name).stat().st_mtime)
    return newest
