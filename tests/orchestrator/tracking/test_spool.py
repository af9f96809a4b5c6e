"""MLflow that goes away: everything is told in the end, in order, once, whenever the driver is killed."""

from __future__ import annotations

import logging
import math
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.tracking.outbox import SpooledTracker
from orchestrator.tracking.runs import Tracker, TrackingError

AWAY = ConnectionError("nobody there")


@pytest.fixture
def plain(tmp_path: Path, empty_store: Path) -> Iterator[Tracker]:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    yield Tracker.open(None, "tests", tmp_path)


class Store:
    """The real store behind a line that can be cut: before a call arrives, or before its answer does."""

    def __init__(self, client: Any) -> None:
        self.client, self.away, self.deaf = client, False, False
        self.patience: float = math.inf  # calls that still get through

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.patience -= 1
            if self.away or self.patience < (-1 if self.deaf else 0):
                raise AWAY
            answer = getattr(self.client, name)(*arguments, **named)
            if self.patience < 0:
                raise AWAY
            return answer

        return call


def spooled(plain: Tracker, store: Store, tmp_path: Path) -> SpooledTracker:
    """What a driver has after its start: nothing but the file."""
    made = SpooledTracker.of(plain, tmp_path / "search" / "mlflow.jsonl")
    made._pause = (0.0, 0.0)
    type(made).client = property(lambda self: store)  # type: ignore[assignment]
    return made


@pytest.fixture
def store(plain: Tracker, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(SpooledTracker, "client", SpooledTracker.client)  # put back afterwards
    return Store(plain.client)


def tell(tracker: SpooledTracker, number: int) -> str:
    """A trial's whole life."""
    parent = tracker.start("search", tags={"headfold.kind": "search"})
    run = tracker.start(f"trial {number}", parent=parent, tags={"trial_id": f"t{number}"})
    tracker.params(run, {"recipe": "gqa", "choices": {"grouping": "exact"}})
    for step in (0, 5, 10):
        tracker.metrics(run, {"loss": 3.0 - step / 10, "recipe": "gqa"}, step=step)
    tracker.tags(run, {"headfold.status": "done"})
    tracker.text(run, "passed", "gate.yaml")
    tracker.end(run, "done")
    return run


def check(plain: Tracker, trials: int) -> None:
    """Each trial is there once, with each point of its series once and in order."""
    runs = plain.client.search_runs([plain.experiment_id])
    assert len(runs) == trials + 1
    (parent,) = [r for r in runs if r.data.tags.get("headfold.kind") == "search"]
    children = plain.children(parent.info.run_id)
    assert sorted(r.data.tags["trial_id"] for r in children) == [f"t{n}" for n in range(trials)]
    for run in children:
        points = plain.client.get_metric_history(run.info.run_id, "loss")
        assert [(p.step, p.value) for p in points] == [(0, 3.0), (5, 2.5), (10, 2.0)]
        assert [p.timestamp for p in points] == sorted(p.timestamp for p in points)
        assert run.info.status == "FINISHED"
        assert run.data.params["choices.grouping"] == "exact"
        assert [f.path for f in plain.client.list_artifacts(run.info.run_id)] == ["gate.yaml"]


def test_what_was_told_while_the_store_was_away_is_sent_when_it_is_back(
    plain: Tracker, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = spooled(plain, store, tmp_path)
    tell(tracker, 0)
    store.away = True
    run = tell(tracker, 1)
    assert run.startswith("spool-")
    assert tracker.waiting == 8
    with pytest.raises(TrackingError, match="away"):
        tracker.register("model", tmp_path, run, tags={}, description="")
    store.away = False
    tell(tracker, 2)
    assert tracker.waiting == 0
    assert tracker.real(run) in {r.info.run_id for r in plain.client.search_runs([plain.experiment_id])}
    check(plain, 3)
    assert [r.getMessage().count("is away") + r.getMessage().count("is back") for r in caplog.records] == [1, 1]


@pytest.mark.parametrize("deaf", [False, True])
def test_killed_after_any_message_nothing_is_lost_and_nothing_told_twice(
    plain: Tracker, store: Store, tmp_path: Path, deaf: bool
) -> None:
    """`deaf`: the store takes the last message, and the driver is killed before it knows."""
    for patience in range(1, 17, 5):
        own = Tracker(plain.uri, plain.client.create_experiment(f"killed after {patience}"))
        first = spooled(own, store, tmp_path / str(patience))
        store.patience, store.deaf = patience, deaf
        tell(first, 0)
        tell(first, 1)
        assert first.waiting
        store.patience = math.inf
        second = spooled(own, store, tmp_path / str(patience))
        tell(second, 0)  # a driver that goes on tells all that it finds on its way
        tell(second, 1)
        assert not second.waiting
        check(own, 2)


def test_a_line_cut_short_and_a_lost_mark_do_no_harm(plain: Tracker, store: Store, tmp_path: Path) -> None:
    tracker = spooled(plain, store, tmp_path)
    tell(tracker, 0)
    spool = tmp_path / "search" / "mlflow.jsonl"
    lines = spool.read_bytes().splitlines(keepends=True)
    spool.write_bytes(b"".join(line for line in lines if b'"sent"' not in line) + b'{"n": 99, "op": "en')
    again = spooled(plain, store, tmp_path)
    tell(again, 0)
    assert again.waiting == 0
    check(plain, 1)


def test_a_message_that_the_store_refuses_does_not_hold_up_the_others(
    plain: Tracker, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = spooled(plain, store, tmp_path)
    with caplog.at_level(logging.WARNING):
        tracker.tags("0" * 32, {"nobody": "there"})
    assert "MLflow has refused tags" in caplog.text
    tell(tracker, 0)
    check(plain, 1)


def test_a_resumed_search_does_not_need_the_store(
    plain: Tracker, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = spooled(plain, store, tmp_path)
    run = tell(tracker, 0)
    spool = tmp_path / "search" / "mlflow.jsonl"

    def unreachable(*_: Any) -> None:
        raise TrackingError("tracking.uri: cannot use the MLflow store")

    monkeypatch.setattr(Tracker, "open", unreachable)
    store.away = True
    again = SpooledTracker.beside("http://user:secret@127.0.0.1:9", "tests", tmp_path, spool)
    assert again.experiment_id == plain.experiment_id
    assert tell(again, 0) == run
    assert again.find(again.start("search", tags={"headfold.kind": "search"}), {"trial_id": "t0"}) == run
    assert again.logged_steps(run, "loss") == {0, 5, 10}
    assert b"secret" not in pickle.dumps(again)
    assert "secret" not in spool.read_text()
    with pytest.raises(TrackingError):
        SpooledTracker.beside("http://127.0.0.1:9", "tests", tmp_path, tmp_path / "new.jsonl")
