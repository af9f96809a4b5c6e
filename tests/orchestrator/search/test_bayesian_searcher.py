"""The results that the optuna searcher learns from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_searcher_contract import complete, problem

from orchestrator.search.candidates import Candidate
from orchestrator.search.searchers import SEARCHERS, SearchProblem
from orchestrator.search.searchers.bayesian import BEST, RECENT, FrontSearch


@pytest.fixture
def task(demo_dir: Path) -> SearchProblem:
    return problem(demo_dir, "optuna")


def make(task: SearchProblem) -> Any:
    return SEARCHERS.get("optuna")(task)


def test_a_trial_counts_with_its_highest_rung_and_once(task: SearchProblem) -> None:
    searcher = make(task)
    config = searcher.suggest("a")
    report = {"loss": 3.0, "kv_bytes_per_token": 4096.0, "rung": 0}
    searcher.on_trial_result("a", report)
    searcher.on_trial_result("a", report)  # repeated after a restart
    searcher.on_trial_result("a", report | {"loss": 2.0, "rung": 1})
    searcher.on_trial_complete("a")  # paused there, and stopped in the end: Tune has no result for it
    assert config["kv_ratio"] == 0.5
    assert [o.values for o in searcher._seen.values()] == [[2.0, 4096.0]]


@pytest.mark.parametrize(
    "end", [{"result": {"loss": float("nan"), "kv_bytes_per_token": 1, "rung": 1}}, {"error": True}]
)
def test_diverged_and_failed_trials_teach_nothing(task: SearchProblem, end: dict[str, Any]) -> None:
    searcher = make(task)
    searcher.suggest("a")
    searcher.on_trial_result("a", {"loss": 3.0, "kv_bytes_per_token": 4096.0, "rung": 0})
    searcher.on_trial_complete("a", **end)
    assert not searcher._window()


def test_a_relaxed_trial_is_worth_what_it_was_before_its_recovery(task: SearchProblem) -> None:
    """As in every table (`TrialRecord.best`)."""
    searcher = make(task)
    report = {"loss": 5.0, "kv_bytes_per_token": 4096.0, "rung": 0, "pooled": True}
    for trial, relaxed, loss in (("a", 2.4, 2.6), ("b", float("nan"), 2.6), ("c", 2.4, float("inf"))):
        searcher.suggest(trial)
        searcher.on_trial_result(trial, report)
        searcher.on_trial_result(trial, report | {"loss": loss, "rung": 1, "pooled": False, "collapsed_loss": relaxed})
    assert [o.values for o in searcher._window()] == [[2.4, 4096.0], [2.6, 4096.0]]


def test_trials_of_width_one_count_where_the_width_is_searched(demo_dir: Path) -> None:
    """A recipe's record leaves the width out then."""
    choices = {"fusion": ["least_squares"], "width": [1, 2]}
    space = problem(demo_dir, "optuna", search_space=choices).space
    generator = np.random.default_rng(0)
    points = [space.sample(generator) for _ in range(20)]
    assert {point["width"] for point in points} == {1, 2}
    assert all(space.locate(space.candidate(point)) == point for point in points)


def test_a_trial_that_runs_again_after_its_machines_were_lost_counts_again(task: SearchProblem) -> None:
    searcher = make(task)
    searcher.suggest("a")
    report = {"loss": 3.0, "kv_bytes_per_token": 4096.0, "rung": 0}
    searcher.on_trial_result("a", report)
    searcher.on_trial_complete("a", error=True)
    searcher.reopen("a")
    assert [o.values for o in searcher._window()] == [[3.0, 4096.0]]
    searcher.on_trial_result("a", report | {"loss": 2.0, "rung": 1})
    searcher.on_trial_complete("a", report | {"loss": 2.0, "rung": 1})
    assert [o.values for o in searcher._window()] == [[2.0, 4096.0]]


def test_a_proposal_rests_on_a_bounded_number_of_results(demo_dir: Path) -> None:
    """The newest, and the best by rank however old: else every proposal would take longer than the one before."""
    searcher = make(problem(demo_dir, "optuna"))
    assert isinstance(searcher, FrontSearch)
    config = searcher.suggest("t")
    complete(searcher, "t", config)
    point = next(iter(searcher._seen.values())).params
    for number in range(500):
        searcher._points[f"t{number}"] = point
        loss = 1.0 if number == 3 else 2.0 + number / 1000
        searcher.on_trial_result(f"t{number}", {"loss": loss, "kv_bytes_per_token": 4096.0, "rung": 1})
        window = searcher._window()
        assert len(window) <= RECENT + BEST
    assert window[-1].values[0] == pytest.approx(2.499)
    assert min(window, key=lambda o: o.values).values[0] == 1.0  # the third of five hundred
    assert Candidate.from_config(searcher.suggest("next")).kv_ratio in (0.5, 0.25)


def test_a_trial_that_training_harmed_is_worth_what_it_was_before(task: SearchProblem) -> None:
    searcher = make(task)
    searcher.suggest("a")
    for rung, loss in enumerate((2.233, 2.248, 2.245)):
        searcher.on_trial_result("a", {"loss": loss, "kv_bytes_per_token": 4096.0, "rung": rung})
    assert [o.values for o in searcher._seen.values()] == [[2.233, 4096.0]]
