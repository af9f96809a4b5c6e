"""The state after a kill, or while the registry is away, and how the next run ends it, with a real store."""

from __future__ import annotations

import os
from typing import Any

import pytest
from journals import write_journal
from promotions import killed_in, promoted, trial

from orchestrator.config.schema import SearchConfig
from orchestrator.promotion import steps
from orchestrator.promotion.state import PASSED, PROMOTED, REGISTERED, TRAINED
from orchestrator.search.trials.context import TrialContext
from orchestrator.storage.json_files import read_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.tracking import registry
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


def test_a_version_whose_answer_was_lost_is_not_made_twice(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    ended_search: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is the registered model."""
    attempts: list[tuple[str, str | None]] = []

    def lost(name: str) -> None:
        create = getattr(tracker.client, name)

        def and_no_answer(*args: Any, **kwargs: Any) -> None:
            attempts.append((name, os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES")))
            monkeypatch.setattr(tracker.client, name, create)
            create(*args, **kwargs)
            raise ConnectionError("read timed out")

        monkeypatch.setattr(tracker.client, name, and_no_answer)

    monkeypatch.setattr(registry, "_RETRY_PAUSES", (0.0, 0.0))
    before = os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    names = ["create_registered_model", "create_model_version"]
    for name in names:
        lost(name)
    (candidate,) = promoted(config, context, folder, tracker, ended_search)["candidates"].values()
    assert (candidate["status"], candidate["version"]) == (PROMOTED, "1")
    assert attempts == [(name, "0") for name in names]
    assert os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES") == before
    assert len(tracker.client.search_model_versions("name = 'small'")) == 1


def test_a_candidate_whose_checks_fail_stays_trained_and_others_are_registered(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_journal(
        folder.root, [trial("head", "headfold", 2.2), trial("apart", "headfold", 2.3), trial("base", "gqa", 2.9)]
    )
    top = config.model_copy(update={"promotion": config.promotion.model_copy(update={"top": 2})})
    parent = tracker.start("search")
    weights = folder.trial("head") / "trained" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:100])
    state = promoted(top, context, folder, tracker, parent)
    statuses = {key: entry["status"] for key, entry in state["candidates"].items()}
    assert statuses == {"head": TRAINED, "apart": PROMOTED} and state["failed"] == ["head"]
    assert state["candidates"]["head"]["reasons"][0].startswith("its checks failed: ")
    assert "its checks failed" in capsys.readouterr().out
    weights.write_bytes(content)
    state = promoted(top, context, folder, tracker, parent)
    assert (state["candidates"]["head"]["status"], state["failed"]) == (PROMOTED, [])
    assert tracker.alias_version("small", "kv50") == state["candidates"]["head"]["version"]


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
