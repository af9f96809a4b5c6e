"""Report of the nodes that a search waits for: in its log, its folder, MLflow and its gauge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from orchestrator.cluster.pending_resources import watch_pending
from orchestrator.cluster.placement import Demand
from orchestrator.config.schema import SearchConfig
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import waits_for
from orchestrator.tracking import gauges
from orchestrator.tracking.sync import MlflowSync, TrackedRun


@contextlib.contextmanager
def report_waiting(
    config: SearchConfig, folder: SearchFolder, mlflow: MlflowSync, run: Callable[[], TrackedRun]
) -> Iterator:
    """Report what the body waits for as it runs, once and when that changes.

    Args:
        run: Returns the run of the search as MLflow should have it now.
    """

    def report(text: str | None) -> None:
        print(f"waiting  for {text}" if text else "waiting  no more", flush=True)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # a full disk is reported where it ends the search
            write_json(folder.waiting, {"waits_for": text, "since": since})
        gauges.set_gauge(gauges.WAITS, text is not None, search=folder.root.name)
        mlflow.put(run())

    gauges.set_gauge(gauges.WAITS, 0, search=folder.root.name)
    if waits_for(folder.waiting):  # of a driver that was killed
        report(None)
    with watch_pending(Demand.of(config), report):
        yield
