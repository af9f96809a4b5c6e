"""`auto` compares wide heads with its recipe by a short fit, where both have plans of as many bytes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention.geometry import HeadGeometry
from orchestrator.config.options import ConvertOptions
from orchestrator.conversion import short_fits
from orchestrator.conversion.memory_store import MemoryStore
from orchestrator.conversion.short_fits import best_by_short_fit, competing_recipes, equal_budgets
from orchestrator.tasks.convert import Convert
from search_spaces.recipes.catalogue import recipe

SMALL: dict[str, Any] = {
    "calibration_tokens": 1024,
    "eval_tokens": 512,
    "sequence_length": 128,
    "dtype": "float32",
    "overrides": {"refinement.fit_steps": 12, "allocation.fit_steps": 4},
}
LAYERS, WIDE = recipe("headfold_layers"), recipe("headfold_wide")


def convert(demo_dir: Path, **changes: Any) -> Convert:
    return Convert(ConvertOptions(**{"model": demo_dir, **SMALL, "kv_ratio": 0.5, **changes}))


def names(task: Convert) -> list[str]:
    return [one.name for one in competing_recipes(task.request.checkpoint, task.request.recipe, task.options)]


def test_wide_heads_compete_with_what_auto_takes_for_every_engine(demo_dir: Path) -> None:
    only_fits = {"overrides": {"refinement.fit_steps": 12}}
    assert names(convert(demo_dir, **only_fits)) == ["headfold_layers", "headfold_wide"]
    for engine in ("vllm", "llama.cpp"):
        assert names(convert(demo_dir, engine=engine, **only_fits)) == ["headfold_layers", "headfold_wide"]
    assert names(convert(demo_dir, recipe="headfold_layers", **only_fits)) == ["headfold_layers"]


def test_a_setting_that_wide_heads_do_not_have_leaves_them_out(demo_dir: Path) -> None:
    assert names(convert(demo_dir)) == ["headfold_layers"]


@pytest.mark.parametrize(
    ("kv_ratio", "expected"),
    [(0.67, ["headfold_layers", "headfold_wide"]), (0.5, ["headfold_layers"]), (0.34, ["headfold_layers"])],
)
def test_worked_example_of_three_kv_heads(
    kv_ratio: float, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine query heads on three KV heads: one of twice the width is two thirds of the cache. At half the next smaller
    plan of wide heads is compared with one of more bytes, and at a third no head is wide."""
    budgets = {("headfold_layers", 0.67): 60, ("headfold_layers", 0.5): 45, ("headfold_layers", 0.34): 30}
    budgets |= {("headfold_wide", 0.67): 60, ("headfold_wide", 0.5): 30}

    def nearest(one: Any, ratio: float, geometry: HeadGeometry) -> int:
        if (one.name, ratio) not in budgets:
            raise ValueError("no plan")
        return budgets[one.name, ratio]

    monkeypatch.setattr(short_fits, "nearest_budget", nearest)
    checkpoint: Any = SimpleNamespace(geometry=None)
    assert [one.name for one in equal_budgets([LAYERS, WIDE], kv_ratio, checkpoint.geometry)] == expected


def test_the_estimate_counts_what_is_compared(demo_dir: Path) -> None:
    only_fits = {"overrides": {"refinement.fit_steps": 12}}
    compared = convert(demo_dir, **only_fits)
    assert [(one.name, ratio) for one, ratio in compared.compared] == [("headfold_layers", 0.5), ("headfold_wide", 0.5)]
    assert compared.estimate.points[0].shared_flops > 0
    named = convert(demo_dir, recipe="headfold_layers", **only_fits)
    assert named.compared == [] and named.estimate.points[0].shared_flops == 0
    assert convert(demo_dir, kv_ratio="0.5,0.25", **only_fits).compared == [], "several ratios compare nothing"


@pytest.mark.parametrize("better", ["headfold_layers", "headfold_wide"])
def test_the_recipe_that_loses_least_is_taken(
    better: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fits:
        def __init__(self, store: Any) -> None: ...

        def converted(self, one: Any, budget: Any) -> Any:
            return one.name

        def increase(self, model: str) -> float:
            return 0.01 if model == better else 0.02

    monkeypatch.setattr(short_fits, "ShortFits", Fits)
    monkeypatch.setattr(short_fits, "nearest_budget", lambda *_: 1)
    store: Any = SimpleNamespace(request=SimpleNamespace(geometry=None))
    best, increases = best_by_short_fit(store, [LAYERS, WIDE], 0.5)
    assert best.name == better
    assert increases == {name: 0.01 if name == better else 0.02 for name in ("headfold_layers", "headfold_wide")}
    assert f"recipe: {better} loses least by a short fit" in capsys.readouterr().err


@pytest.mark.extended
def test_a_conversion_by_auto_is_that_of_the_recipe_that_it_takes(demo_dir: Path) -> None:
    short = {"overrides": {"refinement.fit_steps": 12}}
    result: Any = convert(demo_dir, **short).run()
    compared = result["compared_recipes"]
    assert set(compared) == {"headfold_layers", "headfold_wide"}
    best = min(compared, key=compared.get)
    assert result["recipe"]["name"] == best
    named: Any = convert(demo_dir, recipe=best, **short).run()
    assert "compared_recipes" not in named
    assert named["loss"] == pytest.approx(result["loss"], abs=1e-6)
    assert named["plan"] == result["plan"]


@pytest.mark.parametrize(
    ("rows", "length", "fitted", "judged"),
    [(32, 512, 8, 8), (12, 512, 6, 6), (4, 4096, 2, 2), (3, 4096, 2, 1), (64, 96, 32, 32)],
)
def test_fits_are_judged_by_other_sequences(rows: int, length: int, fitted: int, judged: int) -> None:
    sequences = torch.arange(rows)[:, None].expand(rows, length)
    fit, check = short_fits.fit_and_check(sequences)
    assert (len(fit), len(check)) == (fitted, judged)
    assert not set(fit[:, 0].tolist()) & set(check[:, 0].tolist())


def test_one_sequence_serves_both() -> None:
    fit, check = short_fits.fit_and_check(torch.zeros(1, 8))
    assert len(fit) == len(check) == 1


def test_several_ratios_have_one_recipe(demo_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is that of auto without a comparison, since a curve is of one recipe."""
    task = convert(demo_dir, kv_ratio="0.5,0.25", overrides={"refinement.fit_steps": 12})
    monkeypatch.setattr(Convert, "_choose_recipe", lambda *_: pytest.fail("compared"))
    monkeypatch.setattr(MemoryStore, "run", lambda *_, **__: {})
    monkeypatch.setattr("orchestrator.tasks.convert.curve_record", lambda records: records)
    assert task.run() == [{}, {}]
