"""The gate, the selection and the state of promotions, with real checkpoints and a real store; no cluster."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from journals import write_journal

from attention.conversion import conversion
from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from orchestrator.config.schema import ConfigError, SearchConfig, parse_config
from orchestrator.promotion import gate, promote, steps
from orchestrator.promotion.gate import check_candidate
from orchestrator.promotion.state import (
    CANDIDATE,
    PASSED,
    PROMOTED,
    REFUSED,
    REGISTERED,
    TRAINED,
    Entry,
    PromoteOutcome,
    PromotionState,
)
from orchestrator.promotion.steps import PromotionSteps
from orchestrator.promotion.training import Training, best_model, milestones
from orchestrator.reporting import console
from orchestrator.search.candidates import Candidate
from orchestrator.search.prepare import SearchSession
from orchestrator.search.trials.context import TrialContext
from orchestrator.storage.journal import load_trials
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import DONE, TrialRecord, read_json, write_json
from orchestrator.tracking.errors import TrackingError
from orchestrator.tracking.runs import Tracker
from orchestrator.tracking.sync import MlflowSync, parent_run
from search_spaces.recipes.recipes import recipe
from trainers.evaluation import evaluate
from trainers.text.data import read_sequences, write_sequences

HALF = LayerPlan((0, 0, 1, 1), (0, 0, 1, 1))
ARTIFACTS = {"gate.yaml", "lineage.json", "plan.json", "README.md"}
APART = LayerPlan((0, 0, 1, 1), (0, 1, 0, 1))


def plan(layer: LayerPlan) -> AttentionPlan:
    return AttentionPlan((layer, layer), head_dim=8)


@pytest.fixture
def config(tmp_path: Path) -> SearchConfig:
    return parse_config(
        {
            "name": "small",
            "model": {"path": str(tmp_path / "base")},
            "search": {"recipes": ["gqa", "headfold"], "kv_ratios": [0.5]},
            "rungs": {"steps": [0, 4]},
        }
    )


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Any) -> SearchFolder:
    """A search with two trials of 4 steps each: their weights are converted ones of a tiny model."""
    found = SearchFolder.fresh(tmp_path / "runs", "small")
    base = tiny_model("llama")
    checkpoint.save(base, tmp_path / "base")
    for name, layer in (("head", HALF), ("base", HALF), ("apart", APART)):
        own = found.trial(name)
        checkpoint.save(conversion.convert(base, plan(layer)), own / "trained")
        (own / "plan.json").write_text(plan(layer).to_json())
    write_sequences(torch.arange(48).reshape(3, 16) % 64, tmp_path / "eval")
    write_json(found.original, {"loss": 2.0, "model": str(tmp_path / "base")})
    write_json(found.state, {"parent_run": "none"})
    found.snapshot.write_text("name: small\n")
    return found


@pytest.fixture
def context(tmp_path: Path, folder: SearchFolder) -> TrialContext:
    return TrialContext(
        folder=str(folder.root),
        model=str(tmp_path / "base"),
        dtype="float32",
        train_file="",
        eval_file=str(tmp_path / "eval"),
        calibration_file="",
        calibration_cache="",
        rungs=(0, 4),
        train={},
        original_loss=2.0,
    )


def entry(folder: SearchFolder, name: str = "head", **more: Any) -> Entry:
    settings = {"loss": 2.1, "baseline_loss": 2.5, "status": TRAINED, "folder": str(folder.trial(name) / "trained")}
    return Entry(name, "headfold", 0.5, 4, **{**settings, **more})


def checked(one: Entry, config: SearchConfig, context: TrialContext, folder: SearchFolder) -> Entry:
    """A candidate that the gate has seen."""
    mlflow: Any = None
    check_candidate(one, SearchSession(config, folder, context, mlflow, 1))
    return one


def test_a_sound_candidate_passes_and_is_exported_as_a_plain_model(
    config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> None:
    candidate = checked(entry(folder), config, context, folder)
    assert candidate.reasons == []
    assert candidate.plain
    assert Path(candidate.model or "").name == "exported"
    assert (
        candidate.checks["cache_bytes_measured"]
        == candidate.checks["kv_bytes_per_token"] * candidate.checks["cache_tokens"]
    )
    assert candidate.checks["max_logit_difference"] <= 1e-4
    assert checkpoint.load_config(candidate.model or "").model_type == "llama"


@pytest.mark.parametrize("name", ["head", "apart"])
def test_the_export_has_the_dtype_of_the_checkpoint_and_agrees_with_the_rounded_weights(
    name: str, config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> None:
    """Trained in float32, shipped in bfloat16: bytes and held-out loss are those of what is shipped."""
    context = dataclasses.replace(context, dtype="bfloat16")
    candidate = checked(entry(folder, name), config, context, folder)
    assert candidate.reasons == []
    assert candidate.checks["max_logit_difference"] <= 1e-4
    assert candidate.kv_bytes_per_token == plan(HALF).kv_bytes_per_token("bfloat16")
    assert candidate.checks["cache_bytes_measured"] == candidate.kv_bytes_per_token * candidate.checks["cache_tokens"]
    exported = checkpoint.load(candidate.model or "")
    assert exported.dtype == torch.bfloat16
    shipped = evaluate(exported.float(), read_sequences(context.eval_file)[:])
    assert candidate.checks["exported_loss"] == pytest.approx(shipped.loss, abs=1e-6)


def test_a_check_that_was_killed_is_made_anew_and_keeps_the_trained_weights(
    config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> None:
    place = folder.promoted / "head-4"
    shutil.copytree(folder.trial("head") / "trained", place / "trained")
    candidate = dataclasses.replace(entry(folder), folder=str(place / "trained"))
    first = dataclasses.replace(checked(candidate, config, context, folder))
    (Path(first.model or "") / "lineage.json").write_text("{}")  # the kill came right after
    again = checked(candidate, config, context, folder)
    assert again.reasons == []
    assert again.model == first.model == str(place / "exported")
    assert checkpoint.intact(place / "trained")


def test_a_plan_without_a_stock_form_is_kept_in_our_own(
    config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> None:
    candidate = checked(entry(folder, "apart"), config, context, folder)
    assert candidate.reasons == []
    assert not candidate.plain
    assert Path(candidate.model or "").name == "headfold", "only what stock transformers loads is called exported"
    assert checkpoint.load_config(candidate.model or "").model_type == "headfold_llama"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"baseline_loss": 2.1}, "not below the baseline's 2.1"),
        ({"loss": 2.6}, "not below the baseline's 2.5"),
        ({"loss": float("nan")}, "nan"),
        ({"baseline_loss": None}, "no baseline gqa"),
        ({"recipe": "gqa"}, "the baseline gqa itself"),
    ],
)
def test_what_is_not_better_than_the_baseline_is_refused(
    config: SearchConfig, folder: SearchFolder, context: TrialContext, more: dict[str, Any], said: str
) -> None:
    one = entry(folder)
    for key, value in more.items():
        setattr(one, key, value)
    (reason,) = checked(one, config, context, folder).reasons
    assert said in reason


def test_the_margin_counts(config: SearchConfig, folder: SearchFolder, context: TrialContext) -> None:
    wide = config.model_copy(update={"promotion": config.promotion.model_copy(update={"margin": 0.5})})
    assert checked(entry(folder, loss=1.9), wide, context, folder).reasons == []
    assert "by more than 0.5" in checked(entry(folder, loss=2.1), wide, context, folder).reasons[0]


def test_a_cache_that_is_larger_than_planned_is_refused(
    config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> None:
    quarter = plan(LayerPlan((0,) * 4, (0,) * 4))
    (folder.trial("head") / "plan.json").write_text(quarter.to_json())
    reasons = checked(entry(folder), config, context, folder).reasons
    assert any("the cache holds" in reason for reason in reasons)
    assert any("the exported checkpoint serves" in reason for reason in reasons)


def test_an_export_with_other_logits_is_refused(
    config: SearchConfig, folder: SearchFolder, context: TrialContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(source: str, target: str, out: Path, tokenizer: Any = None, **_: Any) -> Any:
        model = checkpoint.load(source)
        with torch.no_grad():
            model.get_output_embeddings().weight += 1e-2
        checkpoint.save(model, out)
        return type("Report", (), {"exact": True})()

    monkeypatch.setattr(gate, "export", spoilt)
    (reason,) = checked(entry(folder), config, context, folder).reasons
    assert "logits of the exported checkpoint differ" in reason


# ---- from selection to registry ---------------------------------------------------------------------------------


def trial(name: str, recipe: str, loss: float, budget: float = 0.5) -> TrialRecord:
    rungs = [{"step": 0, "loss": loss + 1}, {"step": 4, "loss": loss, "kl": 0.1}]
    return TrialRecord(name, recipe, budget, 1e-3, {}, status=DONE, rungs=rungs, kv_bytes_per_token=int(256 * budget))


def promoted(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker, parent: str
) -> dict[str, Any]:
    return promote.promote(SearchSession(config, folder, context, sync_of(tracker, folder, parent), 1))


def sync_of(tracker: Tracker, folder: SearchFolder, parent: str) -> MlflowSync:
    """What a driver has after its start."""
    return MlflowSync(lambda: tracker, replace(parent_run(folder.root), status=None, run_id=parent))


@pytest.fixture
def tracker(tmp_path: Path, empty_store: Path) -> Tracker:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return Tracker.open(None, "tests", tmp_path)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate looks at a model in a Ray task where this process is connected to a Ray, as it is after other files."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that have reached the full steps need no workers: a start of Ray would be a mistake."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("no training is needed here")

    monkeypatch.setattr("ray.init", refuse)
    monkeypatch.setattr("ray.wait", refuse)


@pytest.mark.usefixtures("no_training")
def test_the_best_is_registered_with_its_evidence_and_the_rest_told(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker
) -> None:
    write_journal(folder.root, [trial("head", "headfold", 2.2), trial("base", "gqa", 2.9)])
    parent = tracker.start("search")
    state = promoted(config, context, folder, tracker, parent)
    (candidate,) = state["candidates"].values()
    assert candidate["status"] == PROMOTED
    assert candidate["baseline_loss"] == 2.9
    version = tracker.client.get_model_version_by_alias("small", "kv50")
    assert version.tags["recipe"] == "headfold"
    assert version.tags["search_run"] == parent
    assert version.tags["weights_digest"] == checkpoint.weights_digest(candidate["exported"])
    assert (folder.root / "exported").resolve() == Path(candidate["exported"])
    assert (folder.storage / "exported" / "config.json").is_file()
    kinds = sorted(run.data.tags["headfold.kind"] for run in tracker.children(parent))
    assert kinds == ["promotion baseline", "promotion candidate"]
    assert {run.info.status for run in tracker.children(parent)} == {"FINISHED"}


def worse_with_training(folder: SearchFolder, name: str, recipe: str, losses: tuple[float, ...]) -> TrialRecord:
    """A trial of 4 steps whose untrained conversion lies beside its trained weights, and its best rung too."""
    own = folder.trial(name)
    shutil.copytree(own / "trained", own / "converted")
    found = trial(name, recipe, losses[-1])
    found.rungs = [{"step": step, "loss": loss} for step, loss in zip((0, 2, 4), losses, strict=True)]
    best = min((2, 4), key=lambda step: losses[step // 2])
    place = own / "trained" if best == 4 else own / "trained.best" / "step-000002"
    if best == 2:
        shutil.copytree(own / "trained", place)
    found.rungs[-1] |= {"best_step": best, "best_loss": losses[best // 2], "best_kl": 0.1, "best_dir": str(place)}
    return found


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize(
    ("losses", "best", "what", "place"),
    [
        ((2.243, 2.3, 2.249), 0, "untrained conversion", "converted"),
        ((2.5, 2.2, 2.249), 2, "step 2", "trained.best/step-000002"),
        ((2.5, 2.3, 2.249), 4, "step 4", "trained"),
    ],
)
def test_the_best_measured_step_is_shipped(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    capsys: pytest.CaptureFixture[str],
    losses: tuple[float, ...],
    best: int,
    what: str,
    place: str,
) -> None:
    head = worse_with_training(folder, "head", "headfold", losses)
    base = worse_with_training(folder, "base", "gqa", (4.0, 2.8, 2.9))
    write_journal(folder.root, [head, base])
    state = promoted(config, context, folder, tracker, tracker.start("search"))
    (candidate,) = state["candidates"].values()
    told = {
        "status": PROMOTED,
        "loss": min(losses),
        "best_step": best,
        "shipped": what,
        "untrained_loss": losses[0],
        "last_loss": 2.249,
        "baseline_loss": 2.8,
        "baseline_step": 2,
        "original_loss": 2.0,
        "folder": str(folder.trial("head") / place),
    }
    assert {key: candidate[key] for key in told} == told
    assert candidate["checks"]["untrained_loss"] == losses[0] and candidate["lineage"]["data"]["steps"] == best
    run = tracker.client.get_run(candidate["run_id"])
    losses_told = ("untrained", "best", "last", "baseline", "original")
    metrics = [*(f"{which}_eval_loss" for which in losses_told), "best_step"]
    assert [run.data.metrics[name] for name in metrics] == [losses[0], min(losses), 2.249, 2.8, 2.0, best]
    assert tracker.client.get_model_version_by_alias("small", "kv50").tags["shipped"] == what
    console.print_promotion(state)
    printed = capsys.readouterr().out
    assert f"the {what}, exported for stock transformers" in printed
    assert ("no training made it better" in printed) == (best == 0)
    row = next(line.split() for line in printed.splitlines() if line.split()[:2] == ["headfold", "50%"])
    numbers = [f"{losses[0]:.3f}", f"{min(losses):.3f}", str(best), "2.249", "2.800", "2.000"]
    assert row[:9] == ["headfold", "50%", "4", *numbers]


def test_what_is_worse_than_its_own_untrained_conversion_is_refused(
    config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> None:
    """Only where the untrained weights are gone."""
    (reason,) = checked(entry(folder, untrained_loss=2.05), config, context, folder).reasons
    assert "above the 2.0500 of its own untrained conversion" in reason


def test_of_a_relaxation_it_is_said_which_model_is_shipped(folder: SearchFolder) -> None:
    own = folder.trial("head")
    shutil.copytree(own / "trained", own / "converted")
    shutil.copytree(own / "trained", folder.root / "collapsed")
    relaxed = {"relaxation_steps": 2, "relaxed_dir": str(folder.root / "collapsed"), "collapsed_loss": 3.0}
    rungs = [{"step": 0, "loss": 2.5, "pooled": True}, {"step": 4, "loss": 2.6, **relaxed}]
    found = trial("head", "dha", 2.6)
    found.rungs = rungs

    def best(reports: list[dict[str, Any]]) -> tuple[int, str, str]:
        model = best_model(found, own, reports)
        assert model is not None
        return model.step, model.folder.name, model.what

    assert best([]) == (0, "converted", "pooled conversion, untrained: not what its relaxation trains from")
    rungs[1]["collapsed_loss"] = 2.4
    assert best([]) == (2, "collapsed", "relaxed model before any recovery")
    better = {
        "step": 8,
        "loss": 2.2,
        "best_step": 6,
        "best_loss": 2.1,
        "best_kl": 0.1,
        "best_dir": str(own / "trained"),
    }
    assert best([better]) == (6, "trained", "step 6")


@pytest.mark.usefixtures("no_training")
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
    assert "in Headfold's own format, which stock transformers does not load" in capsys.readouterr().out


@pytest.mark.usefixtures("no_training")
def test_a_promotion_that_runs_again_repeats_nothing(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_journal(folder.root, [trial("head", "headfold", 2.2), trial("base", "gqa", 2.9)])
    parent = tracker.start("search")
    first = promoted(config, context, folder, tracker, parent)
    monkeypatch.setattr(steps, "check_candidate", lambda *a: pytest.fail("the gate ran again"))
    assert promoted(config, context, folder, tracker, parent) == first
    assert len(tracker.children(parent)) == 2
    assert len(tracker.client.search_model_versions("name = 'small'")) == 1


@contextmanager
def killed_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, done: bool = False) -> Iterator[None]:
    """The body must call `owner.name`, and dies there; with `done` once that has done its work."""
    real = getattr(owner, name)

    def killed(*args: Any, **kwargs: Any) -> None:
        if done:
            real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, killed)
        yield


@pytest.mark.usefixtures("no_training")
def test_killed_in_the_gate_it_goes_on_from_the_trained_weights(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_journal(folder.root, [trial("head", "headfold", 2.2), trial("base", "gqa", 2.9)])
    parent = tracker.start("search")

    with killed_in(monkeypatch, steps, "check_candidate"):
        promoted(config, context, folder, tracker, parent)
    assert read_json(folder.promotion)["candidates"]["head"]["status"] == TRAINED
    assert promoted(config, context, folder, tracker, parent)["candidates"]["head"]["status"] == PROMOTED
    assert len(tracker.children(parent)) == 2


@pytest.mark.usefixtures("no_training")
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


@pytest.mark.usefixtures("no_training")
def test_a_version_tells_where_it_comes_from(
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
    beside = read_json(Path(candidate["exported"]) / "lineage.json")
    assert beside["plan"]["digest"] == plan(HALF).digest and beside["promotion"]["run"] == candidate["run_id"]
    run = tracker.client.get_run(candidate["run_id"])
    assert {f.path for f in tracker.client.list_artifacts(candidate["run_id"])} == ARTIFACTS
    assert (run.data.tags["gate"], run.data.tags["version"]) == (PROMOTED, "1")
    assert run.data.tags["trained_digest"] == expected["trained_digest"]


@pytest.mark.usefixtures("no_training")
def test_killed_before_the_alias_the_old_one_stands_until_the_next_run(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = folder.root / "older"
    older.mkdir()
    first = tracker.register("small", older, tracker.start("an older search"), tags={}, description="")
    tracker.point("small", "kv50", first)
    write_journal(folder.root, [trial("head", "headfold", 2.2), trial("base", "gqa", 2.9)])
    parent = tracker.start("search")

    with killed_in(monkeypatch, Tracker, "point"):
        promoted(config, context, folder, tracker, parent)
    assert tracker.holder("small", "kv50") == first
    assert read_json(folder.promotion)["candidates"]["head"]["status"] == REGISTERED
    with monkeypatch.context() as patch:
        patch.setattr(steps, "check_candidate", lambda *a: pytest.fail("the gate ran again"))
        (candidate,) = promoted(config, context, folder, tracker, parent)["candidates"].values()
    assert (candidate["status"], candidate["version"]) == (PROMOTED, "2")
    assert tracker.holder("small", "kv50") == "2"
    assert len(tracker.client.search_model_versions("name = 'small'")) == 2


@pytest.mark.usefixtures("no_training")
def test_killed_after_the_version_was_made_it_is_not_made_twice(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_journal(folder.root, [trial("head", "headfold", 2.2), trial("base", "gqa", 2.9)])
    parent = tracker.start("search")

    with killed_in(monkeypatch, Tracker, "register", done=True):
        promoted(config, context, folder, tracker, parent)
    assert read_json(folder.promotion)["candidates"]["head"]["status"] == PASSED
    (candidate,) = promoted(config, context, folder, tracker, parent)["candidates"].values()
    assert (candidate["status"], candidate["version"]) == (PROMOTED, "1")
    assert len(tracker.client.search_model_versions("name = 'small'")) == 1


@pytest.mark.usefixtures("no_training")
def test_a_run_that_a_kill_left_behind_is_taken_up_again(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_journal(folder.root, [trial("head", "headfold", 2.2), trial("base", "gqa", 2.9)])
    parent = tracker.start("search")

    with killed_in(monkeypatch, Tracker, "log"):
        promoted(config, context, folder, tracker, parent)
    assert len(tracker.children(parent)) == 1
    promoted(config, context, folder, tracker, parent)
    kinds = sorted(run.data.tags["headfold.kind"] for run in tracker.children(parent))
    assert kinds == ["promotion baseline", "promotion candidate"]


@pytest.mark.usefixtures("no_training")
def test_a_registry_that_is_away_is_told_and_the_next_run_finishes(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_journal(folder.root, [trial("head", "headfold", 2.2), trial("base", "gqa", 2.9)])
    parent = tracker.start("search")

    def away(*args: Any, **kwargs: Any) -> None:
        raise TrackingError("the registry is away")

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "register", away)
        state = promoted(config, context, folder, tracker, parent)
    assert state["failed"] == ["head"]
    assert state["candidates"]["head"]["reasons"] == ["the registry is away"]
    assert "headfold promote" in capsys.readouterr().out
    state = promoted(config, context, folder, tracker, parent)
    assert (state["failed"], state["candidates"]["head"]["reasons"]) == ([], [])
    assert tracker.client.get_model_version_by_alias("small", "kv50").tags["gate"] == "passed"


@pytest.mark.usefixtures("no_training")
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
    assert (tracker.holder("small", "kv50"), tracker.holder("small", "kv50-2")) == ("2", "1")
    assert state["candidates"]["head"]["model_uri"] == "models:/small@kv50-2"

    newer = folder.root / "newer"
    newer.mkdir()
    third = tracker.register("small", newer, tracker.start("a later search"), tags={}, description="")
    tracker.point("small", "kv50", third)
    record = read_json(folder.promotion)
    record["candidates"]["apart"]["status"] = REGISTERED  # as if killed before its alias was written down
    write_json(folder.promotion, record)
    state = promoted(config, context, folder, tracker, parent)
    assert tracker.holder("small", "kv50") == third
    assert state["candidates"]["apart"]["model_uri"] == "models:/small/2"


@pytest.mark.usefixtures("no_training")
def test_what_was_refused_is_kept_when_the_trial_is_promoted_with_more_steps(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_journal(folder.root, [trial("head", "headfold", 2.95), trial("base", "gqa", 2.9)])
    parent = tracker.start("search")
    chosen = [t for t in load_trials(folder.root) if t.trial_id == "head"]

    def go(settings: SearchConfig) -> dict[str, Any]:
        session = SearchSession(settings, folder, context, sync_of(tracker, folder, parent), 1)
        return promote.promote(session, chosen)

    assert go(config)["candidates"]["head"]["status"] == REFUSED
    longer = config.model_copy(update={"promotion": config.promotion.model_copy(update={"steps": 3})})
    monkeypatch.setattr(PromotionSteps, "train", lambda self: None)
    state = go(longer)
    assert [(e["status"], e["steps"]) for e in state["earlier"] if e["role"] == CANDIDATE] == [(REFUSED, 4)]
    assert "not below the baseline" in state["earlier"][0]["reasons"][0]
    assert state["candidates"]["head"]["steps"] == 7


def test_trials_are_selected_by_budget_or_by_front() -> None:
    trials = [
        trial("a", "headfold", 2.2),
        trial("b", "align", 2.3),
        trial("c", "gqa", 2.9),
        trial("d", "headfold", 2.4, 0.25),
        trial("e", "align", 2.1, 0.25),
    ]
    assert [t.trial_id for t in promote.select(trials, "best_per_budget", 1)] == ["a", "e"]
    assert [t.trial_id for t in promote.select(trials, "best_per_budget", 2)] == ["a", "b", "e", "d"]
    assert [t.trial_id for t in promote.select(trials, "front", 1)] == ["e"]


def test_a_baseline_is_not_promoted(folder: SearchFolder, config: SearchConfig) -> None:
    trials = [trial("a", "gqa", 2.0), trial("b", "headfold", 2.1)]
    with pytest.raises(ConfigError, match="--trial: 'a' is a trial of the baseline gqa, .* choose among b"):
        promote._chosen(trials, ["b", "a"], None, config)


def test_the_exit_code_is_of_the_trials_that_were_asked_for(tmp_path: Path) -> None:
    """One that was promoted earlier says nothing of one that is refused now."""
    found = {"candidates": {"a": {"status": PROMOTED}, "b": {"status": REFUSED}}, "failed": []}
    assert [PromoteOutcome(tmp_path, found, chosen).exit_code for chosen in (("a",), ("b",), ("a", "b"))] == [0, 1, 0]


def test_an_unknown_trial_is_refused(folder: SearchFolder, config: SearchConfig) -> None:
    with pytest.raises(ConfigError, match="--trial: 'zz' is no finished trial"):
        promote._chosen([trial("a", "gqa", 2.0)], ["zz"], None, config)
    with pytest.raises(ConfigError, match="not the folder of a search"):
        promote.promote_search(folder.storage)


def test_the_state_comes_back_from_disk(tmp_path: Path, folder: SearchFolder) -> None:
    state = PromotionState({"a": entry(folder)}, {"0.5": entry(folder, "base")}, exported="/x")
    state.save(tmp_path / "promotion.json")
    assert PromotionState.load(tmp_path / "promotion.json") == state


@pytest.mark.parametrize(
    ("start", "total", "evaluations", "expected"),
    [(24, 64, 1, (64,)), (0, 10, 3, (3, 7, 10)), (4, 6, 5, (5, 6)), (0, 1, 1, (1,))],
)
def test_measurements_are_spread_evenly(start: int, total: int, evaluations: int, expected: tuple[int, ...]) -> None:
    assert milestones(start, total, evaluations) == expected


# ---- trainings ------------------------------------------------------------------------------------------------------


def training_of(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    saved: Path,
    best: dict[str, Any] | None = None,
    **section: Any,
) -> Training:
    """The promotion of a trial of 4 steps to 10, with settings of its own."""
    config = parse_config(config.model_dump() | {"promotion": {"steps": 6, "evaluations": 2, **section}})
    candidate = Candidate(recipe("headfold"), 0.5, 1e-3)
    write_json(folder.trial("head") / "recipe.json", candidate.config())
    rungs = [{"step": 4, "loss": 2.2, "checkpoint_path": str(saved), "data_position": 32} | (best or {})]
    record = replace(trial("head", "headfold", 2.2), rungs=rungs)
    mlflow: Any = None
    return Training.of(record, 10, SearchSession(config, folder, context, mlflow, 1))


def test_a_promotion_goes_on_from_the_trial_s_checkpoint_on_a_schedule_of_its_own(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tmp_path: Path
) -> None:
    training = training_of(config, context, folder, tmp_path, train={"learning_rate": 1e-5}, checkpoint_steps=3)
    job = training.job
    assert job is not None
    assert (job.start_step, job.milestones, job.resume_from) == (4, (7, 10), str(tmp_path))
    settings, first = job.settings, job.schedule_offset + job.start_step
    assert (first, job.schedule_steps) == (0, 6)
    rates = [settings.rate(first + done, job.schedule_steps) for done in range(6)]
    assert rates[0] == 1e-5 and rates[-1] < 0.2e-5
    assert (job.checkpoint_steps, job.checkpoint_minutes, training.before) == (3, 30.0, 0)


@pytest.mark.parametrize(("workers", "shape"), [(4, (4, None)), ([2, 8], (8, 2))])
def test_it_goes_on_from_the_checkpoint_on_other_workers_too(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tmp_path: Path, workers: Any, shape: Any
) -> None:
    job = training_of(config, context, folder, tmp_path, train={"num_workers": workers}).job
    assert job is not None
    assert (job.start_step, job.resume_from) == (4, str(tmp_path))
    assert (job.shape.workers, job.shape.fewest) == shape


def test_split_otherwise_it_starts_from_the_weights_and_reads_on(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tmp_path: Path
) -> None:
    training = training_of(config, context, folder, tmp_path, train={"num_workers": 4, "zero_stage": 3})
    job = training.job
    assert job is not None
    assert (job.start_step, job.milestones, job.resume_from) == (0, (3, 6), None)
    assert job.model_dir == str(folder.trial("head") / "trained")
    assert (job.settings.num_workers, job.first_sequence, training.before) == (4, 32, 4)
    fresh = replace(context, promotion_file="fresh.safetensors")
    job = training_of(config, fresh, folder, tmp_path, train={"zero_stage": 3}).job
    assert job is not None
    assert (job.train_file, job.first_sequence) == ("fresh.safetensors", 0)


def test_a_stopped_trial_whose_checkpoint_is_gone_goes_on_from_its_best_weights(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tmp_path: Path
) -> None:
    best = folder.trial("head") / "trained.best" / "step-000002"
    (folder.trial("head") / "trained").rename(tmp_path / "weights")
    shutil.copytree(tmp_path / "weights", best)
    training = training_of(config, context, folder, tmp_path / "gone", best={"best_step": 2, "best_dir": str(best)})
    job = training.job
    assert job is not None
    assert (job.model_dir, job.start_step, job.milestones) == (str(best), 0, (4, 8))
    assert (training.start, training.before, job.first_sequence, job.resume_from) == (2, 2, 32, None)


@pytest.mark.parametrize(
    ("train", "said"),
    [({"batch_size": 3, "num_workers": 2}, "batch_size must be a multiple"), ({"learning_rat": 1}, "learning_rat")],
)
def test_settings_of_a_promotion_are_checked(config: SearchConfig, train: dict[str, Any], said: str) -> None:
    changed = parse_config(config.model_dump() | {"promotion": {"train": train}})
    with pytest.raises(ConfigError, match=f"promotion.train.*(?s:.*){said}"):
        _ = changed.promotion_train
