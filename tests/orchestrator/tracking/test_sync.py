"""MLflow that goes away: it has everything in the end, once, whenever the driver is killed."""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import DONE, KILLED, RUNNING
from orchestrator.tracking import sync
from orchestrator.tracking.errors import TrackingError, is_away
from orchestrator.tracking.runs import Tracker
from orchestrator.tracking.sync import MlflowSync, TrackedRun, parent_run

AWAY = ConnectionError("nobody there")
STEPS = {0: 3.0, 5: 2.5, 10: 2.0}


class Store:
    """The real store behind a connection that can be cut: before a call arrives, or before its answer does."""

    def __init__(self, client: Any) -> None:
        self.client, self.away, self.deaf = client, False, False
        self.patience: float = math.inf  # calls that still get through
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.patience -= 1
            if self.away or self.patience < (-1 if self.deaf else 0):
                raise AWAY
            self.calls.append(name)
            answer = getattr(self.client, name)(*arguments, **named)
            if self.patience < 0:
                raise AWAY
            return answer

        return call


class Line(Tracker):
    """A tracker whose client is such a store."""

    def __init__(self, tracker: Tracker, store: Store) -> None:
        super().__init__(tracker.uri, tracker.experiment_id, store)


@pytest.fixture
def store(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(sync, "PAUSE_SECONDS", (0.0, 0.0))
    return Store(tracker.client)


def driver(tracker: Tracker, store: Store, folder: Path, status: str = RUNNING) -> MlflowSync:
    """The state of a driver after its start: without knowledge of the store."""
    return MlflowSync(lambda: Line(tracker, store), parent_run(folder, status=status))


def trial(number: int, rungs: int = 3, status: str = RUNNING) -> TrackedRun:
    """A trial as far as `rungs` rungs."""
    points = [{"loss": loss, "recipe": "gqa", "step": s, "time": 1e9 + s} for s, loss in list(STEPS.items())[:rungs]]
    tags = {"headfold.kind": "trial", "trial_id": f"t{number}"}
    params = {"recipe": "gqa", "choices": {"grouping": "exact"}}
    texts = {"gate.yaml": "passed"} if rungs == 3 else {}
    return TrackedRun(f"trial {number}", tags, status, params, points, texts)


def tell(sync: MlflowSync, number: int) -> None:
    """A trial's whole life."""
    for rungs in range(4):
        sync.put(trial(number, rungs))
    sync.put(trial(number, status=DONE))


def check(tracker: Tracker, trials: int) -> None:
    """Each trial is there once, with each point of its series once, at its own time."""
    runs = tracker.client.search_runs([tracker.experiment_id])
    assert len(runs) == trials + 1
    (parent,) = [r for r in runs if r.data.tags["headfold.kind"] == "search"]
    children = tracker.children(parent.info.run_id)
    assert sorted(r.data.tags["trial_id"] for r in children) == [f"t{n}" for n in range(trials)]
    for run in children:
        points = tracker.client.get_metric_history(run.info.run_id, "loss")
        assert [(p.step, p.value) for p in points] == list(STEPS.items())
        assert [p.timestamp for p in points] == [1000 * (1_000_000_000 + step) for step in STEPS]
        assert run.info.status == "FINISHED"
        assert run.data.params["choices.grouping"] == "exact"
        assert [f.path for f in tracker.client.list_artifacts(run.info.run_id)] == ["gate.yaml"]


def test_what_happened_while_the_store_was_away_is_reported_when_it_is_back(
    tracker: Tracker, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sync = driver(tracker, store, tmp_path)
    tell(sync, 0)
    store.away = True
    tell(sync, 1)
    assert (sync.put(trial(1, status=DONE)), sync.waiting) == (None, 1)
    with pytest.raises(TrackingError, match="not reachable"):
        sync.registry()
    store.away = False
    tell(sync, 2)
    assert sync.waiting == 0 and sync.registry().uri == tracker.uri
    runs = tracker.client.search_runs([tracker.experiment_id])
    assert sync.put(trial(1, status=DONE)) in {run.info.run_id for run in runs}
    check(tracker, 3)
    assert [
        r.getMessage().count("is not reachable") + r.getMessage().count("is up to date again") for r in caplog.records
    ] == [1, 1]


def test_artifacts_that_cannot_be_stored_keep_nothing_else_out(
    tracker: Tracker, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("/srv/mlflow")

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "log_text", refuse)
        parent = replace(parent_run(tmp_path, status=RUNNING), texts={"search.yaml": "name: a"})
        sync = MlflowSync(lambda: Line(tracker, store), parent)
        tell(sync, 0)
        tell(sync, 1)
        assert not sync.flush() and sync.waiting == 3 and sync.parent_id is not None
        assert caplog.text.count("MLflow does not take everything") == 1
        assert {run.info.status for run in tracker.children(sync.parent_id)} == {"FINISHED"}
    assert sync.flush()
    check(tracker, 2)


@pytest.mark.parametrize("deaf", [False, True])
def test_killed_after_any_call_nothing_is_lost_and_nothing_reported_twice(
    tracker: Tracker, store: Store, tmp_path: Path, deaf: bool
) -> None:
    """`deaf`: the store takes the last call, and the driver is killed before it knows."""
    for patience in range(1, 17, 3):
        own = Tracker(tracker.uri, tracker.client.create_experiment(f"killed after {patience}"))
        store.patience, store.deaf = patience, deaf
        first = driver(own, store, tmp_path)
        tell(first, 0)
        tell(first, 1)
        assert first.waiting
        store.patience = math.inf
        second = driver(own, store, tmp_path)
        for number in (0, 1):  # a resumed driver knows from its records how far each trial has come
            second.put(trial(number, status=DONE))
        assert second.flush()
        check(own, 2)


def test_what_is_there_is_not_reported_again(tracker: Tracker, store: Store, tmp_path: Path) -> None:
    tell(driver(tracker, store, tmp_path), 0)
    store.calls.clear()
    again = driver(tracker, store, tmp_path)
    again.put(trial(0, status=DONE))
    again.put(trial(0, status=DONE))
    assert set(store.calls) == {"search_runs"}
    check(tracker, 1)


def test_a_trial_that_resumes_is_taken_up_in_its_run(tracker: Tracker, store: Store, tmp_path: Path) -> None:
    first = driver(tracker, store, tmp_path)
    run_id = first.put(trial(0, 1, KILLED))
    assert tracker.client.get_run(run_id).info.status == "KILLED"
    second = driver(tracker, store, tmp_path)
    assert second.put(trial(0, 2)) == run_id and second.parent_id == first.parent_id
    assert tracker.client.get_run(run_id).info.status == "RUNNING"
    second.put(trial(0, status=DONE))
    check(tracker, 1)


def test_a_new_search_in_a_folder_of_an_earlier_name_has_its_own_runs(
    tracker: Tracker, store: Store, tmp_path: Path
) -> None:
    parents = set()
    for _ in range(2):
        folder = SearchFolder.fresh(tmp_path, "again")
        assert parent_run(folder.root).key == parent_run(folder.root).key
        sync = driver(tracker, store, folder.root)
        tell(sync, 0)
        parents.add(sync.parent_id)
        shutil.rmtree(folder.root)
    assert len(parents) == 2
    assert all(len(tracker.children(parent)) == 1 for parent in parents)


@pytest.mark.parametrize(("status", "away"), [(413, False), (404, False), (401, True), (429, True), (503, True)])
def test_answers_over_http_that_stay_are_refusals(status: int, away: bool) -> None:
    response = requests.Response()
    response.status_code = status
    assert is_away(requests.HTTPError("upload", response=response)) == away


def test_what_the_registry_meets_is_reported_as_a_refusal(tracker: Tracker) -> None:
    with pytest.raises(TrackingError, match="refused small: 413 Client Error"), tracker._requests("small"):
        raise requests.HTTPError("413 Client Error")


def test_what_the_store_refuses_does_not_hold_up_the_rest(
    tracker: Tracker, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sync = driver(tracker, store, tmp_path)
    with caplog.at_level(logging.WARNING):
        sync.put(replace(trial(0, 0), params={"a name with a forbidden sign \0": 1}))
    assert "MLflow has refused the params" in caplog.text
    assert sync.put(trial(1, status=DONE)) is not None and sync.waiting == 0
    run_id = sync.put(trial(2))
    tracker.client.delete_run(run_id)  # on MLflow's page, of which the search knows nothing
    sync.put(trial(2, status=DONE))
    assert "MLflow has refused the status" in caplog.text
    assert sync.put(trial(3, status=DONE)) is not None and sync.waiting == 0


def test_a_store_that_never_comes_is_reported_and_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address = "http://user:secret@127.0.0.1:9"
    sync = MlflowSync(lambda: Tracker.open(address, "tests", tmp_path), parent_run(tmp_path))
    sync.put(trial(0))
    assert not sync.flush() and sync.parent_id is None and sync.waiting == 2
    assert caplog.text.count("MLflow is not reachable") == 1 and "secret" not in caplog.text


def test_a_store_that_does_not_answer_takes_a_tenth_of_the_time_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver waits for it, and its trials for the driver."""
    clock = SimpleNamespace(now=0.0, attempts=0)

    def connect() -> Tracker:
        clock.attempts += 1
        clock.now += 40
        raise TrackingError("timed out")

    monkeypatch.setattr(sync, "time", SimpleNamespace(monotonic=lambda: clock.now))
    silent = MlflowSync(connect, parent_run(tmp_path))
    while clock.now < 10_000:
        clock.now += 5
        silent.put(trial(0))
    assert 0.08 < 40 * clock.attempts / clock.now < 0.11


def test_points_that_are_added_while_the_store_is_away_are_there_once_when_it_is_back(
    tracker: Tracker, store: Store, tmp_path: Path
) -> None:
    sync = driver(tracker, store, tmp_path)
    run = trial(0, rungs=1)
    sync.put(run)
    points = trial(0).points
    store.away = True
    sync.add_points(run.tags, points[1:2])
    assert sync.waiting == 1
    store.away = False
    calls = len(store.calls)
    sync.add_points(run.tags, points[2:])
    assert store.calls[calls:].count("log_batch") == 1, "both in one request"
    sync.put(trial(0, status=DONE))
    check(tracker, 1)
