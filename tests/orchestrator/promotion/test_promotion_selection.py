"""Which trials are promoted, and the state of promotions."""

from __future__ import annotations

from pathlib import Path

import pytest
from promotions import entry, trial

from orchestrator.config.schema import ConfigError, SearchConfig
from orchestrator.promotion import promote
from orchestrator.promotion.state import PROMOTED, REFUSED, PromoteOutcome, PromotionState
from orchestrator.promotion.training import milestones
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
