"""The contract that every searcher must pass; a new file in orchestrator/search/searchers is collected by itself."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.tune.search import Searcher

from attention.families import geometry_of
from attention.io.checkpoint import load_config
from attention.plan import AttentionPlan
from orchestrator.config.schema import ConfigError, parse_config
from orchestrator.search.candidates import Candidate, candidate_space, named_candidates
from orchestrator.search.searchers import SEARCHERS, ResumableSearcher, SearchProblem
from orchestrator.search.searchers.asymgqa import ChainSearch
from search_spaces.planning.budgets import check_budget
from search_spaces.recipes.catalogue import RECIPES, Recipe
from search_spaces.site import SIDES
from tests.conftest import REPOSITORY

SAMPLES = {"grid": 0, "asymgqa": 70}
CHOICES = {"grouping": ["exact"], "fusion": ["least_squares"], "objective": ["least_squares"]}
CHOICES_OF = {"asymgqa": {"grouping": ["walk_symmetric"], "fusion": ["norm_restored"]}}


def problem(demo_dir: Path, name: str, seed: int = 0, **search: Any) -> SearchProblem:
    section = {"recipes": ["gqa", "asymgqa", "headfold"], "kv_ratios": [0.5, 0.25], "learning_rates": [1e-4, 1e-3]}
    config = parse_config({"name": "x", "model": {"path": str(demo_dir)}, "search": section | search})
    geometry = geometry_of(load_config(demo_dir))
    space, named = candidate_space(config, geometry), named_candidates(config, geometry)
    return SearchProblem(space, named, SAMPLES.get(name, 5), seed, similarities=similarities)


def similarities(recipe: Recipe) -> dict[tuple[int, str], np.ndarray]:
    """Plans of the demo checkpoint's heads; the numbers are arbitrary."""
    generator = np.random.default_rng(0)
    return {(layer, side): generator.normal(size=(8, 8)) for layer in range(4) for side in SIDES}


def loss_of(candidate: Candidate) -> float:
    """A stand-in for a trial: a loss that depends on the candidate alone."""
    plan = 0 if candidate.plan is None else int(AttentionPlan.from_json(candidate.plan).digest, 16)
    return 2.0 + int(candidate.recipe.digest, 16) % 97 / 97 + (1 - candidate.kv_ratio) + plan % 89 / 89


def complete(searcher: Searcher, trial_id: str, config: dict[str, Any]) -> None:
    candidate = Candidate.from_config(config)
    loss = loss_of(candidate)
    result = {"loss": loss, "calibration_loss": loss + 0.1, "kv_bytes_per_token": int(8192 * candidate.kv_ratio)}
    searcher.on_trial_complete(trial_id, result | {"training_iteration": 1})


def expected(searcher: ResumableSearcher) -> int:
    """The final number of trials: plans of the chains that were measured already need no trial."""
    if not isinstance(searcher, ChainSearch):
        return searcher.total
    moves = sum(chain.moves for chains in searcher._chains.values() for chain in chains)
    return searcher.total - (moves - len(searcher._scores))


def drive(searcher: Searcher, start: int = 0, stop: int | None = None, fail_every: int = 0) -> list[dict[str, Any]]:
    """Suggestions, each completed before the next is requested."""
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
        complete(searcher, f"t{number}", config)
    return configs


@pytest.fixture(params=SEARCHERS.names())
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_named_candidates_come_first_then_samples_then_the_end(demo_dir: Path, name: str) -> None:
    task = problem(demo_dir, name)
    searcher = SEARCHERS.get(name)(task)
    configs = drive(searcher)
    assert len(configs) == expected(searcher) >= len(task.named) + 0.7 * task.samples
    assert [Candidate.from_config(c).key for c in configs[: len(task.named)]] == [c.key for c in task.named]


def test_what_is_upcoming_does_not_depend_on_reports(demo_dir: Path, name: str) -> None:
    """And the request changes nothing."""
    requested, silent = (SEARCHERS.get(name)(problem(demo_dir, name)) for _ in range(2))
    named = len(problem(demo_dir, name).named)
    for number in range(requested.total):
        upcoming = requested.upcoming(2)
        assert len(upcoming) == 2 or number >= named - 1
        configs = [searcher.suggest(f"t{number}") for searcher in (requested, silent)]
        assert configs[0] == configs[1]
        if not isinstance(configs[0], dict):
            assert not upcoming
            return
        if upcoming:
            assert configs[0] == upcoming[0].config()
        for searcher in (requested, silent):
            complete(searcher, f"t{number}", configs[0])
    assert not requested.upcoming(1)


def test_every_suggestion_is_a_plan_that_can_be_made(demo_dir: Path, name: str) -> None:
    geometry = geometry_of(load_config(demo_dir))
    for config in drive(SEARCHERS.get(name)(problem(demo_dir, name))):
        candidate = Candidate.from_config(config)
        check_budget(candidate.recipe, candidate.kv_ratio, geometry)
        assert candidate.kv_ratio in (0.5, 0.25)
        assert candidate.learning_rate in (1e-4, 1e-3)
        assert config["recipe"] in {*RECIPES, "asymgqa-search"} or config["recipe"].startswith("joint-")
        if candidate.plan is not None:
            plan = AttentionPlan.from_json(candidate.plan)
            assert plan.layers[0].num_heads == geometry.num_heads
            assert plan.kv_ratio == candidate.kv_ratio or (candidate.probe and plan.kv_ratio > candidate.kv_ratio)


def test_no_candidate_is_tried_twice(demo_dir: Path, name: str) -> None:
    keys = [Candidate.from_config(c).key for c in drive(SEARCHERS.get(name)(problem(demo_dir, name)))]
    assert len(set(keys)) == len(keys)


def test_the_same_seed_gives_the_same_suggestions(demo_dir: Path, name: str) -> None:
    runs = [drive(SEARCHERS.get(name)(problem(demo_dir, name, seed=s))) for s in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert name == "grid" or runs[0] != runs[2]


def in_waves(searcher: Searcher, backwards: bool, wave: int = 6) -> list[dict[str, Any]]:
    """Suggestions, `wave` trials at a time, whose results come in the order of their start or the other way round."""
    configs: list[dict[str, Any]] = []
    while True:
        running: dict[str, dict[str, Any]] = {}
        while len(running) < wave and isinstance(config := searcher.suggest(f"t{len(configs)}"), dict):
            running[f"t{len(configs)}"] = config
            configs.append(config)
        if not running:
            return configs
        for trial_id in sorted(running, key=lambda name: int(name[1:]), reverse=backwards):
            complete(searcher, trial_id, running[trial_id])


def test_the_order_of_results_changes_no_suggestion(demo_dir: Path, name: str) -> None:
    """Only which results are known when a trial is suggested may do so."""
    result = []
    for backwards in (False, True):
        task = problem(demo_dir, name, recipes=["gqa", "headfold"])
        task = replace(task, samples=SAMPLES.get(name, 24))
        result.append(in_waves(SEARCHERS.get(name)(task), backwards))
    assert result[0] == result[1]


def digest_of_draws(demo_dir: Path) -> str:
    runs = [drive(SEARCHERS.get(name)(problem(demo_dir, name))) for name in ("optuna", "random")]
    return hashlib.sha256(json.dumps(runs).encode()).hexdigest()


@pytest.mark.extended
def test_the_same_seed_gives_the_same_suggestions_in_another_process(demo_dir: Path) -> None:
    """A process whose strings, for one, have other hashes."""
    module = "tests.orchestrator.search.test_searcher_contract"
    code = f"import pathlib, {module} as own; print(own.digest_of_draws(pathlib.Path({str(demo_dir)!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONHASHSEED": "12345",
            "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests" / "helpers"))),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == digest_of_draws(demo_dir)


def test_failed_trials_do_not_end_the_search(demo_dir: Path, name: str) -> None:
    task = problem(demo_dir, name)
    searcher = SEARCHERS.get(name)(task)
    assert len(drive(searcher, fail_every=2)) == expected(searcher)


def test_several_trials_may_run_at_a_time(demo_dir: Path, name: str) -> None:
    task = problem(demo_dir, name)
    searcher = SEARCHERS.get(name)(task)
    waiting: dict[str, dict[str, Any]] = {}
    created = most = 0
    while (config := searcher.suggest(f"t{created}")) != Searcher.FINISHED:
        if config is None:  # it needs a result first, and a trial is running: the newest comes first
            assert waiting
            complete(searcher, *waiting.popitem())
            continue
        assert isinstance(config, dict)
        waiting[f"t{created}"] = config
        created, most = created + 1, max(most, len(waiting))
    assert created == expected(searcher)
    assert most >= min(created, len(task.named) + 4)


def test_given_the_recorded_trials_it_resumes_as_if_nothing_had_happened(demo_dir: Path, name: str) -> None:
    task = problem(demo_dir, name)
    whole = drive(SEARCHERS.get(name)(task))
    for half in (3, len(task.named), len(whole) - 1, len(whole)):
        resumed = SEARCHERS.get(name)(task)
        for number, config in enumerate(whole[:half]):
            recorded = json.loads(json.dumps(config))
            resumed.add_trial(f"t{number}", recorded)
            complete(resumed, f"t{number}", recorded)
        assert drive(resumed, start=half) == whole[half:]


def test_candidates_outside_of_the_space_run_all_the_same(demo_dir: Path, name: str) -> None:
    choices = CHOICES_OF.get(name, CHOICES)
    task = problem(demo_dir, name, search_space=choices)
    searcher = SEARCHERS.get(name)(task)
    configs = drive(searcher)
    assert len(configs) == expected(searcher)
    assert {c["choices"]["grouping"] for c in configs[: len(task.named)]} == {"neighbour", "walk_asymmetric", "exact"}
    assert {c["choices"]["grouping"] for c in configs[len(task.named) :]} <= {*choices["grouping"]}


def test_a_grid_refuses_samples(demo_dir: Path) -> None:
    task = problem(demo_dir, "random")
    with pytest.raises(ConfigError, match=r"search\.num_samples"):
        SEARCHERS.get("grid")(task)


def test_a_pooled_model_teaches_the_estimator_nothing(demo_dir: Path) -> None:
    """Its loss says nothing of the relaxation that it was measured for."""
    task = problem(demo_dir, "optuna", recipes=["gqa"], search_space=CHOICES)
    searcher: Any = SEARCHERS.get("optuna")(task)
    drive(searcher, stop=len(task.named) + 1)
    known = len(searcher._window())
    searcher.suggest("relaxing")
    searcher.on_trial_result("relaxing", {"loss": 9.0, "kv_bytes_per_token": 1, "rung": 0, "pooled": True})
    assert len(searcher._window()) == known
    searcher.on_trial_result("relaxing", {"loss": 2.0, "kv_bytes_per_token": 1, "rung": 1})
    assert searcher._window()[-1].values == [2.0, 1.0]


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1.0])
def test_a_trial_that_failed_or_diverged_teaches_the_estimator_nothing(demo_dir: Path, loss: float) -> None:
    """Also one that had a good score before it failed."""
    task = problem(demo_dir, "optuna", recipes=["gqa"], search_space=CHOICES)
    searcher: Any = SEARCHERS.get("optuna")(task)
    drive(searcher, stop=len(task.named) + 2)
    config = searcher.suggest("bad")
    assert isinstance(config, dict)
    before = [seen.values for seen in searcher._window()]
    searcher.on_trial_result("bad", {"loss": 0.5, "kv_bytes_per_token": 1, "rung": 0})
    assert len(searcher._window()) == len(before) + 1
    searcher.on_trial_complete("bad", {"loss": loss, "kv_bytes_per_token": 1, "rung": 1}, error=math.isfinite(loss))
    assert [seen.values for seen in searcher._window()] == before
    assert isinstance(searcher.suggest("next"), dict)
