"""`headfold recipes`, and the recipe that `convert` and `estimate` take when none is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run_here

from search_spaces.recipes.catalogue import RECIPES

DEMO = "examples/stdlib-llama"


def test_recipes_lists_each_with_its_paper_cost_and_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipes.json"
    assert run_here("recipes", "examples/prose-code-qwen3", "--json", file) == 0
    printed = capsys.readouterr().out
    record = json.loads(file.read_text())
    assert [row["name"] for row in record["recipes"]] == list(RECIPES)
    assert record["auto"] == "headfold_layers"
    assert record["family"] == "qwen3"
    assert "headfold_layers (auto)" in printed
    assert "arXiv:2406.06567" in printed
    assert all(row["cost"] for row in record["recipes"])


@pytest.mark.parametrize(("options", "recipe"), [([], "headfold_layers"), (["--for", "transformers"], "headfold")])
def test_without_a_recipe_the_best_one_is_taken(
    options: list[str], recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "estimate.json"
    arguments = ["estimate", "--model", DEMO, "--kv-ratio", "0.5", *options, "--json", str(file)]
    assert run_here(*arguments) == 0
    assert f"recipe: {recipe} (auto: the best that" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["convert", "estimate"])
def test_a_recipe_that_the_engine_cannot_load_is_refused(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [verb, "--model", DEMO, "--recipe", "headfold", "--for", "vllm", "--kv-ratio", "0.5"]
    assert run_here(*arguments) == 2
    message = capsys.readouterr().err
    assert "for: vLLM cannot load what recipe headfold makes of this checkpoint" in message
    assert "take --recipe headfold_layers" in message


def test_an_unknown_engine_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("estimate", "--model", DEMO, "--for", "vlm", "--kv-ratio", "0.5") == 2
    assert "did you mean vllm?" in capsys.readouterr().err
