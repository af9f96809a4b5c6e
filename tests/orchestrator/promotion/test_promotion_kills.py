"""The state after a kill, or while the registry is away, and how the next run ends it, with a real store."""

from __future__ import annotations

from typing import Any

import pytest
from promotions import killed_in, promoted

from orchestrator.config.schema import SearchConfig
from orchestrator.promotion import steps
from orchestrator.promotion.state import PASSED, PROMOTED, REGISTERED, TRAINED
from orchestrator.search.trials.context import TrialContext
from orchestrator.storage.json_files import read_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.tracking.errors import TrackingError
from orchestrator.tracking.runs import Tracker

pytestmark = pytest.mark.usefixtures("in_this_process", "no_training")


def test_killed_in_the_gate_it_resumes_from_the_trained_weights(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    ended_search: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with killed_in(monkeypatch, steps, "check_candidates"):
        promoted(config, context, folder, tracker, ended_search)
    assert read_json(folder.promotion)["candidates"]["head"]["status"] == TRAINED
    assert promoted(config, context, folder, tracker, ended_search)["candidates"]["head"]["status"] == PROMOTED
    assert len(tracker.children(ended_search)) == 2


def test_killed_before_the_alias_the_old_one_stands_until_the_next_run(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    ended_search: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = folder.root / "older"
    older.mkdir()
    first = tracker.register("small", older, tracker.start("an older search"), tags={}, description="")
    tracker.set_alias("small", "kv50", first)
    with killed_in(monkeypatch, Tracker, "set_alias"):
        promoted(config, context, folder, tracker, ended_search)
    assert tracker.alias_version("small", "kv50") == first
    assert read_json(folder.promotion)["candidates"]["head"]["status"] == REGISTERED
    with monkeypatch.context() as patch:
        patch.setattr(steps, "check_candidates", lambda *a: pytest.fail("the gate ran again"))
        (candidate,) = promoted(config, context, folder, tracker, ended_search)["candidates"].values()
    assert (candidate["status"], candidate["version"]) == (PROMOTED, "2")
    assert tracker.alias_version("small", "kv50") == "2"
    assert len(tracker.client.search_model_versions("name = 'small'")) == 2


def test_killed_after_the_version_was_made_it_is_not_made_twice(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    ended_search: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with killed_in(monkeypatch, Tracker, "register", done=True):
        promoted(config, context, folder, tracker, ended_search)
    assert read_json(folder.promotion)["candidates"]["head"]["status"] == PASSED
    (candidate,) = promoted(config, context, folder, tracker, ended_search)["candidates"].values()
    assert (candidate["status"], candidate["version"]) == (PROMOTED, "1")
    assert len(tracker.client.search_model_versions("name = 'small'")) == 1


def test_a_run_that_a_kill_left_behind_is_taken_up_again(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    ended_search: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with killed_in(monkeypatch, Tracker, "log_points"):
        promoted(config, context, folder, tracker, ended_search)
    assert len(tracker.children(ended_search)) == 1
    promoted(config, context, folder, tracker, ended_search)
    kinds = sorted(run.data.tags["headfold.kind"] for run in tracker.children(ended_search))
    assert kinds == ["promotion baseline", "promotion candidate"]


def test_a_registry_that_is_away_is_reported_and_the_next_run_finishes(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    ended_search: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def away(*args: Any, **kwargs: Any) -> None:
        raise TrackingError("the registry is away")

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "register", away)
        state = promoted(config, context, folder, tracker, ended_search)
    assert state["failed"] == ["head"]
    assert state["candidates"]["head"]["reasons"] == ["the registry is away"]
    assert "headfold promote" in capsys.readouterr().out
    state = promoted(config, context, folder, tracker, ended_search)
    assert (state["failed"], state["candidates"]["head"]["reasons"]) == ([], [])
    assert tracker.client.get_model_version_by_alias("small", "kv50").tags["gate"] == "passed"


def test_a_promotion_that_runs_again_repeats_nothing(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    ended_search: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = promoted(config, context, folder, tracker, ended_search)
    monkeypatch.setattr(steps, "check_candidates", lambda *a: pytest.fail("the gate ran again"))
    assert promoted(config, context, folder, tracker, ended_search) == first
    assert len(tracker.children(ended_search)) == 2
    assert len(tracker.client.search_model_versions("name = 'small'")) == 1
