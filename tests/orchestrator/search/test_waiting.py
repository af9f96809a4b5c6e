"""That a search waits for nodes is reported in its log, in its status and in MLflow, once and when it changes."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from journals import write_journal
from ray.util.placement_group import placement_group, remove_placement_group

from orchestrator.cluster import pending_resources
from orchestrator.config.schema import parse_config
from orchestrator.reporting.status import read_status, status_line
from orchestrator.search import waiting
from orchestrator.search.waiting import report_waiting
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import waits_for
from orchestrator.tracking.runs import Tracker
from orchestrator.tracking.sync import MlflowSync, TrackedRun, parent_run

CONFIG = {
    "name": "mine",
    "model": {"path": "m"},
    "search": {"kv_ratios": [0.5]},
    "train": {"num_workers": 2, "batch_size": 8, "cpus_per_worker": 50},
}
SAID = "2 worker(s) of 50 CPU each, the cluster has room for 0 of 2; no autoscaler: nodes must be added by hand"


def until(condition: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return result


@pytest.mark.parametrize(
    ("stall", "hours", "watches"),
    [(None, 0, (None, None)), (2.5, 0.5, (150.0, 1800.0)), (None, 4, (None, 14_400.0))],
)
def test_limits_of_waiting_are_in_the_units_of_the_settings(
    stall: float | None, hours: float, watches: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []

    def watch(demand: Any, report: Any, stall: Any, capacity: Any) -> Any:
        begun.append((stall and stall.seconds, capacity and capacity.seconds))
        return contextlib.nullcontext()

    monkeypatch.setattr(waiting, "watch_pending", watch)
    monkeypatch.setattr(waiting, "StallWatch", lambda seconds, *_: SimpleNamespace(seconds=seconds))
    monkeypatch.setattr(waiting, "CapacityWatch", lambda _, seconds: SimpleNamespace(seconds=seconds))
    config = parse_config({**CONFIG, "resources": {"stall_minutes": stall, "max_wait_hours": hours}})
    with report_waiting(config, SearchFolder.fresh(tmp_path, "mine"), cast(Any, None), cast(Any, None), lambda: False):
        assert begun == [watches]


@pytest.mark.parametrize(("promoting", "cpus"), [(False, 50), (True, 25)])
def test_it_waits_for_the_workers_of_trials_and_then_of_the_promotion(
    promoting: bool, cpus: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demands: list[Any] = []

    def watch(demand: Callable[[], Any], *_: Any) -> Any:
        demands.append(demand())
        return contextlib.nullcontext()

    monkeypatch.setattr(waiting, "watch_pending", watch)
    config = parse_config({**CONFIG, "promotion": {"enabled": True, "steps": 9, "train": {"cpus_per_worker": 25}}})
    nothing = cast(Any, None)
    with report_waiting(config, SearchFolder.fresh(tmp_path, "mine"), nothing, nothing, lambda: promoting):
        assert [demand.worker.cpus for demand in demands] == [cpus]


def test_a_search_says_what_it_waits_for(
    ray_cluster: None,
    tmp_path: Path,
    empty_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(pending_resources, "STATUS_SECONDS", 0.1)
    monkeypatch.setattr(pending_resources, "GRACE_SECONDS", 0.3)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    config, folder = parse_config(CONFIG), SearchFolder.fresh(tmp_path, "mine")
    write_journal(folder.root)
    folder.snapshot.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    write_json(folder.state, {"started": "2026-01-01T12:00:00+00:00"})
    write_json(folder.waiting, {"waits_for": "what a killed driver waited for", "since": "then"})

    def run() -> TrackedRun:
        return parent_run(folder.root, waits_for(folder.waiting))

    tracker = Tracker.open(None, "tests", tmp_path)
    mlflow = MlflowSync(lambda: tracker, run())

    def tag() -> str:
        return tracker.client.get_run(mlflow.parent_id).data.tags["headfold.waits_for"]

    assert tag().startswith("what a killed driver")
    with report_waiting(config, folder, mlflow, run, lambda: False):
        assert tag() == "nothing"
        assert read_status(folder).waits_for is None
        for _ in range(2):
            requested = placement_group([{"CPU": 50}] * 2)
            assert until(lambda: tag().startswith(f"{SAID} (since 2"))
            assert (read_status(folder).waits_for or "").startswith(SAID)
            assert f"waits for {SAID}" in status_line(read_status(folder))
            remove_placement_group(requested)
            assert until(lambda: tag() == "nothing")
            assert read_status(folder).waits_for is None
    output = [text for text in capsys.readouterr().out.splitlines() if text.startswith("waiting")]
    assert output == ["waiting  no more", *[f"waiting  for {SAID}", "waiting  no more"] * 2]
