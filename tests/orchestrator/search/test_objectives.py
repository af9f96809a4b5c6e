"""Objectives of trials: the original's predictions by default, the recipe's, or every arm with each of a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention.checkpoint import Checkpoint
from attention.geometry import HeadGeometry
from orchestrator.config.schema import ConfigError, SearchConfig, parse_config
from orchestrator.search.candidates import Candidate, candidate_space, named_candidates
from orchestrator.storage.records import TrialRecord
from orchestrator.storage.trial_names import name_trials
from search_spaces.recipes.catalogue import recipe
from search_spaces.space.domains import FIELD_ORDER


@pytest.fixture(scope="module")
def geometry(demo_dir: Path) -> HeadGeometry:
    return Checkpoint.open(demo_dir).geometry


def config(*arms: Any, train: dict[str, Any] | None = None, **search: Any) -> SearchConfig:
    section = {"recipes": list(arms) or ["gqa"], "kv_ratios": [0.25], **search}
    return parse_config({"name": "one", "model": {"path": "m"}, "search": section, "train": train or {}})


def trained(settings: SearchConfig, candidate: Candidate) -> tuple[str, float]:
    result = settings.train.model_dump() | candidate.recipe.apply("recovery")
    return result["distillation"], result["distillation_weight"]


def test_a_trial_and_a_promotion_learn_the_original_s_predictions_by_default(
    geometry: HeadGeometry,
) -> None:
    settings = config("gqa", "align")
    gqa, align = named_candidates(settings, geometry)
    assert trained(settings, gqa) == ("kl", 1.0)
    assert trained(settings, align) == ("kl_bild", 1.0)
    assert gqa.learning_rate == settings.train.learning_rate == 1e-4
    assert settings.promotion_train.distillation == "kl"
    named = config("gqa", train={"distillation": "kl", "distillation_weight": 0.5, "learning_rate": 1e-5})
    (gqa,) = named_candidates(named, geometry)
    assert (*trained(named, gqa), gqa.learning_rate) == ("kl", 0.5, 1e-5)


def test_every_arm_runs_with_each_objective_but_those_that_have_one(geometry: HeadGeometry) -> None:
    settings = config("gqa", "align", distillations=["none", "kl"], learning_rates=[1e-4, 1e-3])
    result = named_candidates(settings, geometry)
    runs = [(c.recipe.name, c.learning_rate, trained(settings, c)[0]) for c in result]
    assert runs == [
        *(("gqa", rate, objective) for rate in (1e-4, 1e-3) for objective in ("none", "kl")),
        *(("align", rate, "kl_bild") for rate in (1e-4, 1e-3)),
    ]
    assert len({c.key for c in result}) == 6
    assert [Candidate.from_config(c.config()).key for c in result] == [c.key for c in result]
    assert len({recipe("gqa").conversion_choices == c.recipe.conversion_choices for c in result[:4]}) == 1
    trials = [TrialRecord.of(f"t{number}", c.config()) for number, c in enumerate(result)]
    name_trials(trials)
    assert trials[1].name == "gqa · 25% · lr 0.0001 · distillation kl" and len({t.name for t in trials}) == 6


def test_an_arm_runs_with_separate_rates(geometry: HeadGeometry) -> None:
    arm = {"recipe": "gqa", "label": "gqa_lora", "changes": {"recovery": "lora"}, "learning_rates": [1e-3, 3e-3]}
    settings = config("gqa", arm, learning_rates=[1e-4, 1e-3], seeds=[0, 1])
    runs = [(c.recipe.name, c.learning_rate, c.seed) for c in named_candidates(settings, geometry)]
    assert runs == [
        *(("gqa", rate, seed) for rate in (1e-4, 1e-3) for seed in (0, 1)),
        *(("gqa_lora", rate, seed) for rate in (1e-3, 3e-3) for seed in (0, 1)),
    ]
    with pytest.raises(ConfigError, match=r"search.recipes.0.*learning_rates.*got -1.0"):
        config({"recipe": "gqa", "learning_rates": [-1.0]})


def test_a_searcher_draws_an_objective_where_there_are_several(geometry: HeadGeometry) -> None:
    several = candidate_space(config(distillations=["none", "kl"]), geometry)
    points = [several.sample(np.random.default_rng(seed)) for seed in range(20)]
    assert {point["distillation"] for point in points} == {"none", "kl"}
    assert all(several.locate(several.candidate(point)) == point for point in points)
    one = candidate_space(config(distillations=["kl"]), geometry)
    point = one.sample(np.random.default_rng(0))
    assert "distillation" not in point
    assert dict(one.candidate(point).recipe.settings)["recovery.distillation"] == "kl"
    assert one.locate(one.candidate(point)) == point


def test_what_is_drawn_joins_no_arm_of_another_recipe_and_no_comparison_over_seeds(geometry: HeadGeometry) -> None:
    """Trials of one name are compared as one arm."""

    def drawn(*arms: Any, **changes: Any) -> str:
        settings = config(*arms, searcher="random", num_samples=1, **changes)
        fields = recipe("least_squares").to_dict()
        point = {name: value for name, value in fields.items() if name in FIELD_ORDER} | {"kv_ratio": 0.25}
        candidate = candidate_space(settings, geometry).candidate(point)
        assert candidate.recipe.digest == recipe("least_squares").digest
        return candidate.recipe.name

    other = {"recipe": "least_squares", "label": "least_squares", "changes": {"refinement": "fit_heal"}}
    assert drawn("gqa") == drawn("least_squares") == "least_squares"
    assert drawn("least_squares", seeds=[0, 1]).startswith("joint-")
    assert drawn(other).startswith("joint-")


def test_an_objective_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="search.distillations.1"):
        config(distillations=["kl", "mse"])
    with pytest.raises(ConfigError, match="more than once"):
        config(distillations=["kl", "kl"])
