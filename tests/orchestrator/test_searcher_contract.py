"""The contract that every searcher must pass; a new file in orchestrator/searchers is collected by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.tune.search import Searcher

from attention.checkpoint import load_config
from attention.geometry import HeadGeometry
from orchestrator.candidates import Candidate, candidate_space, named_candidates
from orchestrator.config import ConfigError, parse_config
from orchestrator.searchers import SEARCHERS, SearchProblem
from search_spaces.planning import check_budget
from search_spaces.recipes import RECIPES

SAMPLES = 5


def problem(demo_dir: Path, name: str, seed: int = 0, **search: Any) -> SearchProblem:
    section = {"recipes": ["gqa", "asymgqa", "headfold"], "budgets": [0.5, 0.25], "learning_rates": [1e-4, 1e-3]}
    config = parse_config({"name": "x", "model": {"path": str(demo_dir)}, "search": section | search})
    geometry = HeadGeometry.from_config(load_config(demo_dir))
    samples = 0 if name == "grid" else SAMPLES
    return SearchProblem(candidate_space(config, geometry), named_candidates(config, geometry), samples, seed)


def loss_of(candidate: Candidate) -> float:
    """A stand-in for a trial: a loss that depends on the candidate alone."""
    return 2.0 + int(candidate.recipe.digest, 16) % 97 / 97 + (1 - candidate.kv_ratio)


def drive(searcher: Searcher, start: int = 0, stop: int | None = None, fail_every: int = 0) -> list[dict[str, Any]]:
    """Suggestions, each completed before the next is asked for."""
    configs = []
    for number in range(start, 1000 if stop is None else stop):
        config = searcher.suggest(f"t{number}")
        if config == Searcher.FINISHED:
            break
        assert isinstance(config, dict)
        configs.append(config)
        if fail_every and number % fail_every == 0:
            searcher.on_trial_complete(f"t{number}", None, error=True)
            continue
        candidate = Candidate.from_config(config)
        result = {"loss": loss_of(candidate), "kv_bytes_per_token": int(8192 * candidate.kv_ratio)}
        searcher.on_trial_complete(f"t{number}", result | {"training_iteration": 1})
    return configs


@pytest.fixture(params=SEARCHERS.names())
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_named_candidates_come_first_then_samples_then_the_end(demo_dir: Path, name: str) -> None:
    task = problem(demo_dir, name)
    configs = drive(SEARCHERS.get(name)(task))
    assert len(configs) == task.total
    assert [Candidate.from_config(c).key for c in configs[: len(task.named)]] == [c.key for c in task.named]


def test_every_suggestion_is_a_plan_that_can_be_made(demo_dir: Path, name: str) -> None:
    geometry = HeadGeometry.from_config(load_config(demo_dir))
    for config in drive(SEARCHERS.get(name)(problem(demo_dir, name))):
        candidate = Candidate.from_config(config)
        check_budget(candidate.recipe, candidate.kv_ratio, geometry)
        assert candidate.kv_ratio in (0.5, 0.25)
        assert candidate.learning_rate in (1e-4, 1e-3)
        assert config["recipe"] in RECIPES or config["recipe"].startswith("joint-")


def test_no_candidate_is_tried_twice(demo_dir: Path, name: str) -> None:
    keys = [Candidate.from_config(c).key for c in drive(SEARCHERS.get(name)(problem(demo_dir, name)))]
    assert len(set(keys)) == len(keys)


def test_the_same_seed_gives_the_same_suggestions(demo_dir: Path, name: str) -> None:
    runs = [drive(SEARCHERS.get(name)(problem(demo_dir, name, seed=s))) for s in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert name == "grid" or runs[0] != runs[2]


def test_failed_trials_do_not_end_the_search(demo_dir: Path, name: str) -> None:
    task = problem(demo_dir, name)
    assert len(drive(SEARCHERS.get(name)(task), fail_every=2)) == task.total


def test_several_trials_may_run_at_a_time(demo_dir: Path, name: str) -> None:
    task = problem(demo_dir, name)
    searcher = SEARCHERS.get(name)(task)
    open_trials = [searcher.suggest(f"t{i}") for i in range(task.total)]
    assert all(isinstance(config, dict) for config in open_trials)
    assert searcher.suggest("late") == Searcher.FINISHED


def test_saved_and_restored_it_goes_on_as_if_nothing_had_happened(demo_dir: Path, name: str, tmp_path: Path) -> None:
    task = problem(demo_dir, name)
    whole = drive(SEARCHERS.get(name)(task))
    first = SEARCHERS.get(name)(task)
    half = len(task.named) + (2 if task.samples else -3)
    before = drive(first, stop=half)
    first.save(str(tmp_path / "state"))
    second = SEARCHERS.get(name)(task)
    second.restore(str(tmp_path / "state"))
    assert before + drive(second, start=half) == whole


def test_candidates_outside_of_the_space_run_all_the_same(demo_dir: Path, name: str) -> None:
    choices = {"grouping": ["exact"], "fusion": ["least_squares"], "objective": ["least_squares"]}
    task = problem(demo_dir, name, choices=choices)
    configs = drive(SEARCHERS.get(name)(task))
    assert len(configs) == task.total
    assert {c["choices"]["grouping"] for c in configs[: len(task.named)]} == {"neighbour", "walk_asymmetric", "exact"}
    assert {c["choices"]["grouping"] for c in configs[len(task.named) :]} <= {"exact"}


def test_a_grid_refuses_samples(demo_dir: Path) -> None:
    task = problem(demo_dir, "random")
    with pytest.raises(ConfigError, match=r"search\.samples"):
        SEARCHERS.get("grid")(task)
