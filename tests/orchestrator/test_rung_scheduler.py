"""Successive halving with a bracket for each budget."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.schedulers import TrialScheduler

from orchestrator.schedulers import BudgetHalving
from orchestrator.schedulers.halving import rung_resource

CONTINUE, STOP = TrialScheduler.CONTINUE, TrialScheduler.STOP


def trial(number: int, budget: float, recipe: str = "headfold") -> Any:
    return SimpleNamespace(trial_id=f"t{number}", config={"kv_ratio": budget, "recipe": recipe})


def report(scheduler: BudgetHalving, one: Any, rung: int, loss: float, factor: float = 2.0) -> str:
    return scheduler.on_trial_result(None, one, {"loss": loss, "resource": rung_resource(rung, factor), "rung": rung})


def add(scheduler: BudgetHalving, *trials: Any) -> None:
    for one in trials:
        scheduler.on_trial_add(None, one)


def test_the_weaker_of_one_budget_is_stopped_at_the_untrained_rung() -> None:
    scheduler = BudgetHalving(3, 2.0)
    good, bad = trial(1, 0.5), trial(2, 0.5)
    add(scheduler, good, bad)
    assert report(scheduler, good, 0, 2.5) == CONTINUE
    assert report(scheduler, bad, 0, 3.5) == STOP


def test_budgets_do_not_compete() -> None:
    scheduler = BudgetHalving(3, 2.0)
    half, quarter = trial(1, 0.5), trial(2, 0.25)
    add(scheduler, half, quarter)
    assert report(scheduler, half, 0, 2.3) == CONTINUE
    assert report(scheduler, quarter, 0, 5.0) == CONTINUE


@pytest.mark.parametrize(("rungs", "factor"), [(2, 2.0), (3, 2.0), (4, 3.0), (5, 1.5), (6, 4.0)])
def test_every_rung_but_the_last_can_stop(rungs: int, factor: float) -> None:
    for stopping in range(rungs):
        scheduler = BudgetHalving(rungs, factor)
        good, bad = trial(1, 0.5), trial(2, 0.5)
        add(scheduler, good, bad)
        for rung in range(rungs):
            assert report(scheduler, good, rung, 2.0, factor) == CONTINUE
        answers = [
            report(scheduler, bad, rung, 1.0 if rung < stopping else 3.0, factor) for rung in range(stopping + 1)
        ]
        expected = CONTINUE if stopping == rungs - 1 else STOP
        assert answers == [CONTINUE] * stopping + [expected]


def test_the_baseline_goes_on_and_does_not_count() -> None:
    scheduler = BudgetHalving(3, 2.0, protected=("gqa",))
    best, baseline, other = trial(1, 0.5), trial(2, 0.5, "gqa"), trial(3, 0.5)
    add(scheduler, best, baseline, other)
    assert report(scheduler, best, 0, 2.0) == CONTINUE
    assert report(scheduler, baseline, 0, 9.0) == CONTINUE
    # With the baseline's 9.0 among the scores the median would let 5.0 pass.
    assert report(scheduler, other, 0, 5.0) == STOP


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_diverged_trial_is_stopped_even_if_protected(loss: float) -> None:
    scheduler = BudgetHalving(3, 2.0, protected=("gqa",))
    one = trial(1, 0.5, "gqa")
    add(scheduler, one)
    assert report(scheduler, one, 1, loss) == STOP


def test_scores_survive_saving(tmp_path: Path) -> None:
    scheduler = BudgetHalving(3, 2.0)
    good, bad = trial(1, 0.5), trial(2, 0.5)
    add(scheduler, good)
    report(scheduler, good, 0, 2.5)
    scheduler.save(str(tmp_path / "state"))
    restored = BudgetHalving(3, 2.0)
    restored.restore(str(tmp_path / "state"))
    add(restored, bad)
    assert report(restored, bad, 0, 3.5) == STOP


def test_no_rung_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rung"):
        BudgetHalving(0, 2.0)
