"""`configs/ablations.yaml`: its arms are the papers' ablations, each one choice away from the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from attention.families import geometry_of
from orchestrator.config.parsing import ConfigError
from orchestrator.config.schema import read_search_config
from orchestrator.search.candidates import named_candidates
from search_spaces.recipes.recipe import Recipe

ROOT = Path(__file__).parents[3]


def arms(*changes: str) -> dict[str, Recipe]:
    config = read_search_config(ROOT / "configs" / "ablations.yaml", list(changes))
    geometry = geometry_of(AutoConfig.from_pretrained(ROOT / "examples" / "stdlib-llama"))
    return {candidate.recipe.name: candidate.recipe for candidate in named_candidates(config, geometry)}


def test_no_two_arms_are_the_same() -> None:
    result = arms()
    assert len({recipe.digest for recipe in result.values()}) == len(result)


def test_the_seven_rows_of_table_1_of_jin_2024() -> None:
    rows = [recipe for name, recipe in arms().items() if name.startswith("align_") and name != "align_one_head"]
    table = {(r.grouping, r.by, r.alignment, r.knobs("alignment").get("criterion")) for r in rows}
    assert len(rows) == len(table) == 7
    assert {row[1:] for row in table if row[0] == "anneal_restarts"} == {
        (by, "procrustes", criterion) for by in ("key", "value") for criterion in ("cos", "dist")
    }
    assert {row[2:] for row in table if row[0] == "neighbour"} == {
        *(("procrustes", criterion) for criterion in ("cos", "dist")),
        ("none", None),
    }
    for r in rows:
        assert r.relaxation == "hard_concrete"
        # Eq. 30 and sec. 4.1: KL + BiLD alone, and the rate falls to 0
        assert r.apply("recovery") == {"distillation": "kl_bild", "distillation_weight": 1.0, "min_lr_ratio": 0.0}
        if r.similarity is not None:
            assert r.knobs("similarity")["criterion"] == r.knobs("alignment")["criterion"]


def test_a_new_head_and_one_of_the_group_differ_by_where_they_start_alone() -> None:
    """Jin 2024, section 4.4."""
    new, one = arms()["align"], arms()["align_one_head"]
    assert (new.knobs("relaxation")["new_heads"], one.knobs("relaxation")["new_heads"]) == ("mean", "nearest")
    starts = {"relaxation.new_heads": "mean"}
    assert one.with_changes(**starts).digest == new.with_changes(**starts).digest


def test_dha_with_and_without_adaptive_transformation_fuse_alike() -> None:
    """DHA, Table 2: only the search phase, its groups and its budgets are left out."""
    result = arms()
    whole, plain = result["dha"], result["dha_not_adaptive"]
    assert whole.knobs("relaxation") == plain.knobs("relaxation")
    assert (plain.grouping, plain.allocation, plain.objective) == ("neighbour", "uniform", None)
    assert "fusion_distances" in whole.needs and "fusion_distances" not in plain.needs


def test_what_guides_the_walks_and_whether_they_keep_sizes() -> None:
    walks = [recipe for recipe in arms().values() if recipe.grouping.startswith("walk_")]
    assert {recipe.similarity for recipe in walks} == {"activation", "weight", "cka", "aligned"}
    assert {recipe.grouping for recipe in walks} == {"walk_symmetric", "walk_asymmetric"}


def test_fusion_steps_beyond_the_last_rung_are_refused() -> None:
    arm = "search.recipes=[{recipe: dha, params: {relaxation.steps: 36}}]"
    with pytest.raises(ConfigError, match=r"relaxation.steps must be below the last of rungs.steps, 36, got 36"):
        arms(arm)
    arms(arm.replace("36", "35"))
