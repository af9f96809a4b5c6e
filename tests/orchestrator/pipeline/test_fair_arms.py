"""Comparisons in `configs/`: what each arm has that another lacks, so that none is judged below its worth."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from attention.families import geometry_of
from orchestrator.config.schema import read_search_config
from orchestrator.search.candidates import Candidate, named_candidates
from orchestrator.search.trials.context import unfinished_relaxations
from search_spaces.recipes.catalogue import RECIPES

ROOT = Path(__file__).parents[3]
CONFIGURATIONS = ("papers", "papers_200")
REFINED = {
    "papers": {"gqa", "asymgqa", "dha", "align"},
    "papers_200": {"gqa", "align"},
    "smollm2": {"gqa"},
}


def arms(name: str) -> dict[str, list[Candidate]]:
    config = read_search_config(ROOT / "configs" / f"{name}.yaml", [])
    geometry = geometry_of(AutoConfig.from_pretrained(ROOT / "examples" / "stdlib-llama"))
    result: dict[str, list[Candidate]] = {}
    for candidate in named_candidates(config, geometry):
        result.setdefault(candidate.recipe.name, []).append(candidate)
    return result


@pytest.mark.parametrize("name", REFINED)
def test_every_conversion_of_the_papers_also_runs_with_the_local_fit(name: str) -> None:
    result = arms(name)
    refined = {arm.removesuffix("_refined") for arm in result if arm.endswith("_refined")}
    assert refined == REFINED[name]
    for arm in refined:
        plain, fitted = RECIPES[arm], result[f"{arm}_refined"][0].recipe
        same = plain.with_changes(relaxation="none", refinement="fit_heal", settings=dict(fitted.settings))
        assert same.digest == fitted.digest, "nothing but fit, relaxation and settings differs"
        assert fitted.knobs("refinement") == RECIPES["headfold_gqa"].knobs("refinement"), "as ours is fitted"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_arm_learns_from_the_text_and_from_the_original_s_predictions(name: str) -> None:
    """At two rates each; align has the objective of its paper."""
    for arm, candidates in arms(name).items():
        objectives = {c.recipe.knobs("recovery")["distillation"] for c in candidates}
        assert objectives == ({"kl_bild"} if arm == "align" else {"none", "kl"}), arm
        assert len({c.learning_rate for c in candidates}) == 2, arm


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_relaxations_have_the_rate_that_their_steps_need(name: str) -> None:
    config = read_search_config(ROOT / "configs" / f"{name}.yaml", [])
    recipes = [candidates[0].recipe for candidates in arms(name).values()]
    relaxing = [recipe for recipe in recipes if recipe.relaxation != "none"]
    assert {recipe.name for recipe in relaxing} >= {"dha", "dha_aligned", "align"}
    assert all(recipe.knobs("relaxation")["rate"] == "auto" for recipe in relaxing)
    assert unfinished_relaxations(recipes, config.rungs.steps) == []


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_adapters_and_masks_each_have_their_counterpart(name: str) -> None:
    result = {arm: candidates[0].recipe for arm, candidates in arms(name).items()}
    for arm in ("gqa", "asymgqa"):
        assert result[f"{arm}_lora"].conversion_choices == RECIPES[arm].conversion_choices
        assert result[f"{arm}_lora"].recovery == "lora"


@pytest.mark.parametrize("name", [*CONFIGURATIONS, "smollm2"])
def test_aligned_heads_run_with_and_without_masks(name: str) -> None:
    result = arms(name)
    plain, masked = result["align_plain"][0].recipe, result["align"][0].recipe
    assert plain.conversion_choices == masked.conversion_choices
    assert plain.relaxation == "none" and "min_lr_ratio" not in plain.apply("recovery")
    config = read_search_config(ROOT / "configs" / f"{name}.yaml", [])
    assert unfinished_relaxations([masked], config.rungs.steps) == []


def test_on_the_public_model_each_arm_learns_from_the_original_to_the_end_of_its_steps() -> None:
    result = arms("smollm2")
    assert not read_search_config(ROOT / "configs" / "smollm2.yaml", []).rungs.stop
    averaged = {c.learning_rate for arm in ("gqa", "asymgqa", "align", "align_plain") for c in result[arm]}
    assert len(averaged) == 1, "the best of heads that are averaged, by `make real ARGS='--only learning_rates'`"


def test_asymgqa_runs_with_the_paper_s_own_score_too() -> None:
    result = arms("papers")
    model, layer = result["asymgqa_model"][0].recipe, result["asymgqa"][0].recipe
    assert (model.objective, layer.objective) == ("model", "layer")
    assert model.with_changes(objective="layer").digest == layer.digest
