"""`configs/joint.yaml`: what is proposed can be carried out, up to the training job, and reaches every axis."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from orchestrator import checkpoints
from orchestrator.config.schema import read_search_config
from orchestrator.search.candidates import Candidate, candidate_space, named_candidates
from orchestrator.search.searchers import SEARCHERS, SearchProblem
from orchestrator.search.trials.context import relaxation_spec
from search_spaces.planning.budgets import admissible_counts, check_budget
from search_spaces.planning.planner import PlanningContext, make_plan
from search_spaces.recipes.catalogue import AXES
from search_spaces.recipes.rules import broken_rules
from trainers.settings import TrainSettings

ROOT = Path(__file__).parents[3]
AXES_LEFT_OUT = {
    "objective": {"model"},
    "allocation": {"single"},
    "refinement": {"fit"},
    "grouping": {"brute_force"},
}
"""Parts that the config does not offer, or that fit none of its budgets."""


@pytest.fixture(scope="module")
def problem() -> SearchProblem:
    config = read_search_config(ROOT / "configs" / "joint.yaml", ["search.num_samples=60"])
    geometry = checkpoints.open_checkpoint(ROOT / config.model.path).geometry
    named = named_candidates(config, geometry)
    return SearchProblem(candidate_space(config, geometry), named, config.search.num_samples, config.search.seed)


@pytest.mark.extended
def test_every_part_comes_up_and_nothing_impossible(problem: SearchProblem) -> None:
    rng, seen = np.random.default_rng(0), {}
    geometry = problem.space.joint.geometry
    assert geometry is not None
    for _ in range(700):
        candidate = problem.space.candidate(problem.space.sample(rng))
        chosen = candidate.recipe
        assert not broken_rules(chosen.to_dict() | {"kv_ratio": candidate.kv_ratio})
        check_budget(chosen, candidate.kv_ratio, geometry)
        assert admissible_counts(chosen, geometry)
        TrainSettings.model_validate(chosen.apply("recovery") | {"learning_rate": candidate.learning_rate})
        for axis in AXES:
            seen.setdefault(axis, set()).add(getattr(chosen, axis))
    for axis, result in seen.items():
        assert result - {None} >= set(AXES[axis].names()) - AXES_LEFT_OUT.get(axis, set()), axis


@pytest.mark.heavy
def test_optuna_proposes_what_can_be(problem: SearchProblem) -> None:
    """With results that favour one axis, the estimator still proposes valid candidates, without repetitions."""
    searcher = SEARCHERS.get("optuna")(problem)
    geometry, result = problem.space.joint.geometry, []
    assert geometry is not None
    for number in range(problem.total):
        config = searcher.suggest(str(number))
        candidate = Candidate.from_config(config)
        check_budget(candidate.recipe, candidate.kv_ratio, geometry)
        result.append(candidate)
        loss = 3.0 - candidate.kv_ratio - 0.5 * (candidate.recipe.fusion == "least_squares")
        searcher.on_trial_complete(str(number), {"loss": loss, "kv_bytes_per_token": int(8192 * candidate.kv_ratio)})
    assert len({candidate.key for candidate in result}) == len(result)
    assert {candidate.recipe.relaxation for candidate in result} > {"none"}


def test_a_variation_is_a_valid_point_next_to_another(problem: SearchProblem) -> None:
    space, generator = problem.space, np.random.default_rng(3)
    for _ in range(30):
        point = space.sample(generator)
        assert space.vary(point, 0, generator) == point
        for changes in (1, 3):
            varied = space.vary(point, changes, np.random.default_rng(changes))
            assert varied == space.vary(point, changes, np.random.default_rng(changes))
            assert space.locate(space.candidate(varied)) == varied  # complete, and allowed everywhere


def test_proposals_with_a_relaxation_have_a_training(problem: SearchProblem, demo_model) -> None:
    from attention.conversion.convert import lift

    geometry, rng = problem.space.joint.geometry, np.random.default_rng(1)
    assert geometry is not None
    context = PlanningContext(geometry, lift(demo_model), model=demo_model)
    specs = set()
    for _ in range(3000):
        candidate = problem.space.candidate(problem.space.sample(rng))
        chosen = candidate.recipe
        if chosen.relaxation == "none" or chosen.grouping != "neighbour" or chosen.allocation != "uniform":
            continue
        plan = make_plan(chosen, candidate.kv_ratio, context, rng)
        spec = relaxation_spec(chosen, plan.to_json(), 20)
        assert spec.plans[-1] == plan.to_json() and 1 <= spec.total_steps <= 20
        specs.add(spec.name)
        if len(specs) == 3:
            break
    assert len(specs) == 3
    assert specs == {"lagrangian", "hard_concrete", "pull_together"}
