"""That a search waits for nodes, and for which: in its log, its folder, its run in MLflow and its gauge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from orchestrator.cluster.placement import Demand
from orchestrator.cluster.waiting import watched
from orchestrator.config.schema import SearchConfig
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import waits_for
from orchestrator.tracking import gauges
from orchestrator.tracking.sync import MlflowSync, TrackedRun


@contextlib.contextmanager
def waiting_told(
    config: SearchConfig, folder: SearchFolder, mlflow: MlflowSync, run: Callable[[], TrackedRun]
) -> Iterator:
    """For as long as the body runs, tell what it waits for, once and when that changes. `run`: that of the search, as
    MLflow is to hold it now."""

    def tell(text: str | None) -> None:
        print(f"waiting  for {text}" if text else "waiting  no more", flush=True)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # a full disk, which is told where it ends the search
            write_json(folder.waiting, {"waits_for": text, "since": since})
        gauges.set_gauge(gauges.WAITS, text is not None, search=folder.root.name)
        mlflow.put(run())

    gauges.set_gauge(gauges.WAITS, 0, search=folder.root.name)
    if waits_for(folder.waiting):  # of a driver that was killed
        tell(None)
    with watched(Demand.of(config), tell):
        yield
