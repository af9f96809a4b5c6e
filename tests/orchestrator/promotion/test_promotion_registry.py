"""The versions that a promotion registers, with a real store; no cluster."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from journals import write_journal
from promotions import ARTIFACTS, HALF, plan, promoted, sync_of, trial

from attention.io import checkpoint
from orchestrator.config.schema import SearchConfig
from orchestrator.promotion import promote
from orchestrator.promotion import steps as steps_module
from orchestrator.promotion.state import CANDIDATE, PROMOTED, REFUSED, REGISTERED
from orchestrator.promotion.steps import PromotionSteps
from orchestrator.reporting import console
from orchestrator.search.trials.context import SearchSession, TrialContext
from orchestrator.storage.journal import load_trials
from orchestrator.storage.json_files import read_json, write_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.tracking.runs import Tracker
from trainers.text.data import read_sequences

pytestmark = pytest.mark.usefixtures("in_this_process", "no_training")


def test_the_best_is_registered_with_its_evidence_and_the_rest_reported(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker, ended_search: str
) -> None:
    state = promoted(config, context, folder, tracker, ended_search)
    (candidate,) = state["candidates"].values()
    assert candidate["status"] == PROMOTED
    assert candidate["baseline_loss"] == 2.9
    version = tracker.client.get_model_version_by_alias("small", "kv50")
    assert version.tags["recipe"] == "headfold"
    assert version.tags["search_run"] == ended_search
    assert version.tags["weights_digest"] == checkpoint.weights_digest(candidate["exported"])
    assert (folder.root / "exported").resolve() == Path(candidate["exported"])
    assert (folder.storage / "exported" / "config.json").is_file()
    kinds = sorted(run.data.tags["headfold.kind"] for run in tracker.children(ended_search))
    assert kinds == ["promotion baseline", "promotion candidate"]
    assert {run.info.status for run in tracker.children(ended_search)} == {"FINISHED"}


def test_a_model_in_our_own_format_is_not_called_exported(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_journal(folder.root, [trial("apart", "headfold", 2.2), trial("base", "gqa", 2.9)])
    state = promoted(config, context, folder, tracker, tracker.start("search"))
    (candidate,) = state["candidates"].values()
    assert candidate["status"] == PROMOTED and candidate["model"].endswith("/headfold")
    assert candidate["exported"] is None and state["exported"] is None
    assert not list(folder.storage.rglob("exported"))
    assert "not stock" in tracker.client.get_model_version_by_alias("small", "kv50").tags["format"]
    console.print_promotion(state)
    assert "Headfold format (`headfold export` writes it for engines)" in capsys.readouterr().out


def test_a_refused_candidate_is_kept_with_its_reasons_and_not_registered(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker
) -> None:
    write_journal(folder.root, [trial("head", "headfold", 2.9), trial("base", "gqa", 2.95)])
    strict = config.model_copy(update={"promotion": config.promotion.model_copy(update={"margin": 0.5})})
    parent = tracker.start("search")
    state = promoted(strict, context, folder, tracker, parent)
    (candidate,) = state["candidates"].values()
    assert candidate["status"] == REFUSED
    assert "by more than 0.5" in candidate["reasons"][0]
    assert state["exported"] is None
    assert not tracker.client.search_registered_models()
    tags = [r.data.tags for r in tracker.children(parent) if r.data.tags["headfold.kind"].endswith(CANDIDATE)]
    assert tags[0]["gate"] == REFUSED
    assert "by more than 0.5" in tags[0]["reasons"]
    assert Path(candidate["folder"]).is_dir()


def test_a_version_reports_where_it_comes_from(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker, tmp_path: Path
) -> None:
    head = trial("head", "headfold", 2.2)
    head.run_id, head.seed = "run-of-the-trial", 7
    head.rungs[-1]["data_position"] = 64
    write_journal(folder.root, [head, trial("base", "gqa", 2.9)])
    write_json(folder.original, read_json(folder.original) | {"digests": {"weights": "aa", "calibration": "bb"}})
    parent = tracker.start("search")
    context = dataclasses.replace(context, train_file=context.eval_file)
    (candidate,) = promoted(config, context, folder, tracker, parent)["candidates"].values()
    tags = tracker.client.get_model_version_by_alias("small", "kv50").tags
    data = read_sequences(context.train_file).digest[:16]
    expected = {
        "base_digest": "aa",
        "search": "small",
        "search_run": parent,
        "search_digest": hashlib.sha256(folder.snapshot.read_bytes()).hexdigest()[:16],
        "trial_id": "head",
        "trial_run": "run-of-the-trial",
        "seed": "7",
        "plan_digest": plan(HALF).digest,
        "data_digest": data,
        "data_position": "64",
        "steps": "4",
        "trained_digest": checkpoint.weights_digest(folder.trial("head") / "trained"),
        "weights_digest": checkpoint.weights_digest(candidate["exported"]),
        "gate": "passed",
        "gate.loss": "passed",
        "gate.cache": "passed",
        "gate.export": "passed",
        "gate.logits": "passed",
    }
    assert {key: tags.get(key) for key in expected} == expected
    shared = read_json(Path(candidate["exported"]) / "lineage.json")
    assert shared["plan"]["digest"] == plan(HALF).digest and shared["promotion"]["run"] == candidate["run_id"]
    run = tracker.client.get_run(candidate["run_id"])
    assert {f.path for f in tracker.client.list_artifacts(candidate["run_id"])} == ARTIFACTS
    assert (run.data.tags["gate"], run.data.tags["version"]) == (PROMOTED, "1")
    assert run.data.tags["trained_digest"] == expected["trained_digest"]


def test_aliases_follow_the_loss_within_a_search_and_the_newer_version_between_searches(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker
) -> None:
    trials = [trial("head", "headfold", 2.5), trial("base", "gqa", 2.9)]
    write_journal(folder.root, trials)
    parent = tracker.start("search")
    promoted(config, context, folder, tracker, parent)
    trials.append(trial("apart", "headfold", 2.2))
    write_journal(folder.root, trials)
    state = promoted(config, context, folder, tracker, parent)
    assert [state["candidates"][t]["version"] for t in ("head", "apart")] == ["1", "2"]
    assert (tracker.alias_version("small", "kv50"), tracker.alias_version("small", "kv50-2")) == ("2", "1")
    assert state["candidates"]["head"]["model_uri"] == "models:/small@kv50-2"

    newer = folder.root / "newer"
    newer.mkdir()
    third = tracker.register("small", newer, tracker.start("a later search"), tags={}, description="")
    tracker.set_alias("small", "kv50", third)
    record = read_json(folder.promotion)
    record["candidates"]["apart"]["status"] = REGISTERED  # as if killed before its alias was written down
    write_json(folder.promotion, record)
    state = promoted(config, context, folder, tracker, parent)
    assert tracker.alias_version("small", "kv50") == third
    assert state["candidates"]["apart"]["model_uri"] == "models:/small/2"


def test_no_alias_is_set_to_a_version_of_another_model(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker, tmp_path: Path
) -> None:
    """A version's number means nothing in another registry, and nothing once the version is deleted."""
    trials = [trial("head", "headfold", 2.5), trial("base", "gqa", 2.9)]
    write_journal(folder.root, trials)
    promoted(config, context, folder, tracker, tracker.start("search"))
    other = Tracker.open(f"sqlite:///{tmp_path / 'other.db'}", "tests", tmp_path / "other")
    foreign = folder.root / "foreign"
    foreign.mkdir()
    run = other.start("another search")
    assert other.register("small", foreign, run, tags={"weights_digest": "aa"}, description="") == "1"
    trials.append(trial("apart", "headfold", 2.6))
    write_journal(folder.root, trials)
    session = SearchSession(config, folder, context, sync_of(other, folder, other.start("search")), 1)
    state = promote.promote_trials(session, [t for t in load_trials(folder.root) if t.trial_id == "apart"])
    assert other.alias_version("small", "kv50") == state["candidates"]["apart"]["version"] == "2"
    assert state["candidates"]["head"]["model_uri"] is None

    other.client.delete_model_version("small", "2")
    trials.append(trial("third", "headfold", 2.55))
    shutil.copytree(folder.trial("apart"), folder.trial("third"))
    write_journal(folder.root, trials)
    session = SearchSession(config, folder, context, sync_of(other, folder, other.start("search")), 1)
    state = promote.promote_trials(session, [t for t in load_trials(folder.root) if t.trial_id == "third"])
    assert state["candidates"]["third"]["model_uri"] == "models:/small@kv50"
    assert [state["candidates"][name]["version"] for name in ("head", "apart")] == [None, None]


def test_what_was_refused_is_kept_when_the_trial_is_promoted_with_more_steps(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_journal(folder.root, [trial("head", "headfold", 2.95), trial("base", "gqa", 2.9)])
    parent = tracker.start("search")
    chosen = [t for t in load_trials(folder.root) if t.trial_id == "head"]

    def go(settings: SearchConfig) -> dict[str, Any]:
        session = SearchSession(settings, folder, context, sync_of(tracker, folder, parent), 1)
        return promote.promote_trials(session, chosen)

    assert go(config)["candidates"]["head"]["status"] == REFUSED
    longer = config.model_copy(update={"promotion": config.promotion.model_copy(update={"steps": 3})})
    monkeypatch.setattr(PromotionSteps, "train", lambda self: None)
    state = go(longer)
    assert [(e["status"], e["steps"]) for e in state["earlier"] if e["role"] == CANDIDATE] == [(REFUSED, 4)]
    assert "not below the baseline" in state["earlier"][0]["reasons"][0]
    assert state["candidates"]["head"]["steps"] == 7


def test_a_refusal_is_checked_again_by_other_settings_and_only_then(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_journal(folder.root, [trial("head", "headfold", 2.7), trial("base", "gqa", 2.9)])
    strict = config.model_copy(update={"promotion": config.promotion.model_copy(update={"margin": 0.5})})
    parent = tracker.start("search")
    assert promoted(strict, context, folder, tracker, parent)["candidates"]["head"]["status"] == REFUSED
    with monkeypatch.context() as patch:
        patch.setattr(steps_module, "check_candidates", None)  # a call would fail
        assert promoted(strict, context, folder, tracker, parent)["candidates"]["head"]["status"] == REFUSED
    state = promoted(config, context, folder, tracker, parent)
    assert state["candidates"]["head"]["status"] == PROMOTED
    assert state["candidates"]["head"]["gate_settings"]["margin"] == 0
    assert "checked again by other settings" in capsys.readouterr().out
    (run,) = [r for r in tracker.children(parent) if r.data.tags["headfold.kind"].endswith(CANDIDATE)]
    assert run.data.tags["gate"] == PROMOTED and not run.data.tags["reasons"]


def test_a_refusal_of_an_earlier_version_is_read_and_stays_where_its_weights_are_gone(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker
) -> None:
    write_journal(folder.root, [trial("head", "headfold", 2.7), trial("base", "gqa", 2.9)])
    strict = config.model_copy(update={"promotion": config.promotion.model_copy(update={"margin": 0.5})})
    parent = tracker.start("search")
    promoted(strict, context, folder, tracker, parent)
    record = read_json(folder.promotion)
    del record["candidates"]["head"]["gate_settings"]
    record["candidates"]["head"]["folder"] = str(folder.root / "gone")
    write_json(folder.promotion, record)
    (candidate,) = promoted(config, context, folder, tracker, parent)["candidates"].values()
    assert candidate["status"] == REFUSED and "not below the baseline" in candidate["reasons"][0]
