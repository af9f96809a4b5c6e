"""Which trials are promoted, and the state of promotions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from promotions import entry, trial

from orchestrator.cluster.capacity import Nodes, search_concurrency
from orchestrator.config.schema import ConfigError, SearchConfig, parse_config
from orchestrator.promotion import promote
from orchestrator.promotion.gate import gate_settings
from orchestrator.promotion.state import (
    BASELINE,
    FAILED,
    PENDING,
    PROMOTED,
    REFUSED,
    TRAINED,
    BaselineModel,
    GateRecord,
    PromoteOutcome,
    PromotionEntry,
    PromotionState,
)
from orchestrator.promotion.steps import PromotionSteps
from orchestrator.promotion.training import milestones
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder

pytestmark = pytest.mark.usefixtures("in_this_process")


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
        promote._chosen(trials, ["b", "a"], None, config, config)


def test_the_exit_code_is_of_the_requested_trials(tmp_path: Path) -> None:
    """Trials of earlier promotions, promoted or failed, do not count."""
    states = {"a": PROMOTED, "b": REFUSED, "c": FAILED}
    record = {"kv_ratio": 0.5, "steps": 4}
    candidates = {name: record | {"trial_id": name, "status": status} for name, status in states.items()}
    baseline = record | {"trial_id": "base", "status": TRAINED}
    result = {"candidates": candidates, "baselines": {"0.5": baseline}, "failed": ["c"]}

    def code(*chosen: str) -> int:
        return PromoteOutcome(tmp_path, result, chosen).exit_code

    assert [code("a"), code("b"), code("a", "b"), code("c"), code("a", "c")] == [0, 1, 0, 1, 1]
    result["failed"] = ["base"]
    assert code("a") == 1
    baseline["steps"] = 8  # of another promotion
    assert code("a") == 0


def test_an_unknown_trial_is_refused(folder: SearchFolder, config: SearchConfig) -> None:
    with pytest.raises(ConfigError, match="--trial: 'zz' is no finished trial"):
        promote._chosen([trial("a", "gqa", 2.0)], ["zz"], None, config, config)
    with pytest.raises(ConfigError, match="not the folder of a search"):
        promote.promote_search(folder.storage)


def test_the_state_comes_back_from_disk(tmp_path: Path, folder: SearchFolder) -> None:
    state = PromotionState({"a": entry(folder)}, {"0.5": entry(folder, "base")}, exported="/x")
    state.save(tmp_path / "promotion.json")
    assert PromotionState.load(tmp_path / "promotion.json") == state


def test_an_entry_of_an_earlier_version_is_read_and_written_unchanged(tmp_path: Path) -> None:
    record = {
        "trial_id": "t1", "recipe": "headfold", "kv_ratio": 0.5, "steps": 4, "role": "candidate", "status": "promoted",
        "loss": 2.1, "kl": 0.1, "best_step": 4, "shipped": "step 4", "last_loss": 2.2, "untrained_loss": 3.0,
        "baseline_loss": 2.5, "baseline_step": 3, "baseline_folder": "/b", "original_loss": 2.0, "folder": "/trained",
        "data_position": 8, "model": "/out", "exported": "/out", "served": "/served", "plain": True,
        "kv_bytes_per_token": 128, "gate": {"loss": "passed"}, "checks": {"margin": 0.0}, "measured": {"tasks": {}},
        "reasons": [], "lineage": {"plan": {"digest": "ab"}}, "version": "1", "model_uri": "models:/small@kv50",
        "run_id": "r1", "trained_at": 1.5, "name": "headfold · 50%", "label": "headfold",
        "relaxation_remaining": 0.25, "used_kv_ratio": 0.5,
    }  # fmt: skip
    assert PromotionEntry.from_record(record).to_record() == record
    (tmp_path / "promotion.json").write_text('{"candidates": {"t1": {"trial_id": "t1", "what": 1}}}')
    with pytest.raises(ConfigError, match="does not hold the state of a promotion: .*unknown what"):
        PromotionState.load(tmp_path / "promotion.json")


def test_what_was_trained_longer_stays_unless_trials_are_named(config: SearchConfig) -> None:
    """A search that is resumed after `promote ... promotion.steps=N` promotes nothing again."""
    best, base = trial("a", "headfold", 2.2), trial("b", "gqa", 2.9)
    state = PromotionState()
    promote._add_entries(state, [best, base], [best], config, 1000)
    assert {e.steps for e in (*state.candidates.values(), *state.baselines.values())} == {1000}
    state.candidates["a"].status = PROMOTED
    promote._add_entries(state, [best, base], None, config, 160)
    assert (state.candidates["a"].steps, state.baselines["0.5"].steps, state.earlier) == (1000, 1000, [])
    promote._add_entries(state, [best, base], [best], config, 160)
    candidate, baseline = state.candidates["a"], state.baselines["0.5"]
    assert (candidate.status, candidate.steps, baseline.steps) == (PENDING, 160, 160)
    assert [e.steps for e in state.earlier] == [1000, 1000]


def test_a_new_candidate_is_compared_with_a_baseline_of_as_many_steps(config: SearchConfig) -> None:
    best, base, later = trial("a", "headfold", 2.2), trial("b", "gqa", 2.9), trial("c", "align", 2.1)
    state = PromotionState()
    promote._add_entries(state, [best, base], [best], config, 1000)
    promote._add_entries(state, [best, base, later], None, config, 160)
    assert (state.candidates["c"].steps, state.baselines["0.5"].steps) == (160, 160)


def test_baselines_of_other_ratios_are_not_trained_again(config: SearchConfig) -> None:
    trials = [trial("a", "headfold", 2.2), trial("b", "gqa", 2.9), trial("c", "headfold", 2.5, 0.25)]
    trials.append(trial("d", "gqa", 3.0, 0.25))
    state = PromotionState()
    promote._add_entries(state, trials, [trials[0], trials[2]], config, 160)
    promote._add_entries(state, trials, [trials[2]], config, 1000)
    assert {key: e.steps for key, e in state.baselines.items()} == {"0.5": 160, "0.25": 1000}
    assert {key: e.steps for key, e in state.candidates.items()} == {"a": 160, "c": 1000}


def test_a_candidate_that_was_refused_for_want_of_a_baseline_is_checked_once_there_is_one(
    folder: SearchFolder, config: SearchConfig
) -> None:
    refused, baseline = entry(folder), entry(folder, "base")
    baseline.role = BASELINE
    settings = gate_settings(config)
    refused.status, refused.baseline, refused.gate_settings = REFUSED, None, settings
    state = PromotionState({"a": refused})
    session: Any = SimpleNamespace(config=config)
    steps = PromotionSteps(session, state, {})
    assert not steps._is_due(refused, settings)
    state.baselines[f"{refused.kv_ratio:g}"] = baseline
    assert steps._is_due(refused, settings)
    state.baselines, state.earlier = {}, [baseline]
    assert steps._is_due(refused, settings), "one that a longer promotion has replaced"
    refused.baseline = BaselineModel(baseline.trained.folder, 2.9, 4) if baseline.trained else None
    assert not steps._is_due(refused, settings)


@pytest.mark.parametrize(
    ("start", "total", "evaluations", "expected"),
    [(24, 64, 1, (64,)), (0, 10, 3, (3, 7, 10)), (4, 6, 5, (5, 6)), (0, 1, 1, (1,))],
)
def test_measurements_are_spread_evenly(start: int, total: int, evaluations: int, expected: tuple[int, ...]) -> None:
    assert milestones(start, total, evaluations) == expected


def test_a_promotion_may_have_other_settings_of_its_own_section_alone(
    folder: SearchFolder, config: SearchConfig
) -> None:
    folder.snapshot.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert promote._stored_config(folder, ["promotion.margin=0.5"]).promotion.margin == 0.5
    assert promote._stored_config(folder, []).promotion.margin == 0
    with pytest.raises(ConfigError, match=r"expected settings of the promotion.*got 'data.eval.tokens=4'"):
        promote._stored_config(folder, ["data.eval.tokens=4"])


def test_a_promotion_of_a_search_without_one_is_checked_for_room(config: SearchConfig) -> None:
    update = {"enabled": False, "steps": 3, "train": {"num_workers": 64, "batch_size": 64}}
    without = config.model_copy(update={"promotion": config.promotion.model_copy(update=update)})
    nodes = [Nodes(1, {"CPU": 4.0})]
    assert search_concurrency(without, nodes)
    with pytest.raises(ConfigError, match=r"^promotion: .*64"):
        search_concurrency(promote._with_promotion(without), nodes)


def test_a_promotion_is_tracked_where_its_search_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SearchFolder.fresh(tmp_path, "mine")
    settings = parse_config(
        {"name": "mine", "model": {"path": "x"}, "search": {"recipes": ["gqa"], "kv_ratios": [0.5]}}
    ).model_dump(mode="json")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:hidden@elsewhere:5000")
    for uri, state, expected in (
        ("http://mlflow.example:5000", {}, "http://mlflow.example:5000"),
        (None, {"tracking": "sqlite:////runs/mlflow.db"}, "sqlite:////runs/mlflow.db"),
        ("http://user:***@elsewhere:5000", {}, "http://user:hidden@elsewhere:5000"),
    ):
        folder.snapshot.write_text(yaml.safe_dump(settings | {"tracking": {"uri": uri}}))
        write_json(folder.state, state)
        assert promote._stored_config(folder, []).tracking.uri == expected
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(ConfigError, match="stored without its password; set MLFLOW_TRACKING_URI"):
        promote._stored_config(folder, [])


def test_the_link_leads_to_the_smallest_cache_in_bytes(folder: SearchFolder) -> None:
    """Wide heads have more bytes than their KV ratio says of heads."""
    state = PromotionState()
    for name, kv_ratio, size in (("wide", 0.25, 3072), ("narrow", 0.5, 2048)):
        folder.trial(name).mkdir(parents=True)
        gate = GateRecord({}, {}, {}, str(folder.trial(name)), True, None, size)
        state.candidates[name] = PromotionEntry(name, "headfold", kv_ratio, 8, status=PROMOTED, gate=gate)
    theirs = folder.storage / "exported"
    theirs.write_text("mine")
    promote._link_export(folder, state)
    assert theirs.read_text() == "mine", "a file of the user's stays"
    theirs.unlink()
    theirs.symlink_to(folder.storage.parent)
    promote._link_export(folder, state)
    assert theirs.resolve() == folder.storage.parent.resolve(), "and a link to another place"
    theirs.unlink()
    promote._link_export(folder, state)
    promote._link_export(folder, state)
    assert theirs.resolve() == folder.trial("narrow").resolve()
    assert state.exported == str(folder.trial("narrow"))
    assert (folder.root / "exported").resolve() == folder.trial("narrow").resolve()


def test_an_unfinished_promotion_is_made_shorter_or_given_up_by_other_settings(
    config: SearchConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, base = trial("a", "headfold", 2.2), trial("c", "headfold", 2.1), trial("b", "gqa", 2.9)
    state = PromotionState()
    promote._add_entries(state, [first, base], None, config, 1000)
    promote._add_entries(state, [first, base], None, config, 160)
    assert (state.candidates["a"].steps, state.baselines["0.5"].steps) == (160, 160)
    assert [e.steps for e in state.earlier] == [1000, 1000]
    assert state.replaced("a") == state.replaced("b") == {1000}
    config = parse_config(config.model_dump() | {"promotion": {"top": 1}})
    promote._add_entries(state, [first, second, base], None, config, 160)
    assert list(state.candidates) == ["c"] and list(state.baselines) == ["0.5"]
    assert "`headfold promote FOLDER --trial a` continues it" in capsys.readouterr().out
    assert state.replaced("a") == {160, 1000}
    state.earlier[-1].trained_at = 1.0
    assert state.replaced("a") == {1000}, "its weights are those of an attempt that was trained"


def test_a_baseline_that_no_candidate_needs_is_given_up(config: SearchConfig) -> None:
    half, quarter = trial("a", "headfold", 2.2), trial("c", "headfold", 2.5, 0.25)
    trials = [half, quarter, trial("b", "gqa", 2.9), trial("d", "gqa", 3.0, 0.25)]
    state = PromotionState()
    promote._add_entries(state, trials, None, config, 160)
    assert len(state.baselines) == 2
    state.withdraw({"a"})
    assert (list(state.candidates), list(state.baselines)) == (["a"], ["0.5"])
    assert {entry.trial_id for entry in state.earlier} == {"c", "d"}


def test_what_was_promoted_before_a_longer_promotion_that_was_killed_is_not_promoted_again(
    config: SearchConfig,
) -> None:
    best, base = trial("a", "headfold", 2.2), trial("b", "gqa", 2.9)
    state = PromotionState()
    promote._add_entries(state, [best, base], None, config, 160)
    state.candidates["a"].status, state.baselines["0.5"].status = PROMOTED, TRAINED
    promote._add_entries(state, [best, base], [best], config, 1000)
    promote._add_entries(state, [best, base], None, config, 160)
    candidate, baseline = state.candidates["a"], state.baselines["0.5"]
    assert (candidate.status, candidate.steps, baseline.status, baseline.steps) == (PROMOTED, 160, TRAINED, 160)
    assert [(e.trial_id, e.steps, e.status) for e in state.earlier] == [("a", 1000, PENDING), ("b", 1000, PENDING)]


def test_a_candidate_that_is_withdrawn_leaves_the_command_that_continues_it(
    config: SearchConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    best, base, later = trial("a", "headfold", 2.2), trial("b", "gqa", 2.9), trial("c", "headfold", 2.1)
    config = parse_config(config.model_dump() | {"promotion": {"steps": 156, "top": 1}})
    state = PromotionState()
    promote._add_entries(state, [best, base], None, config, 1000)
    promote._add_entries(state, [best, base, later], None, config, 160)
    command = "`headfold promote FOLDER --trial a promotion.steps=996` continues it"
    assert command in capsys.readouterr().out
    assert {e.steps for e in (*state.candidates.values(), *state.baselines.values())} == {160}
