"""Names of trials."""

from __future__ import annotations

from typing import Any

from orchestrator.storage.records import TrialRecord
from orchestrator.storage.trial_names import name_trials


def named(*trials: TrialRecord) -> list[str]:
    name_trials(trials)
    return [trial.name for trial in trials]


def trial(recipe: str = "headfold", ratio: float = 0.25, rate: float = 3e-4, seed: int = 0, **more: Any) -> TrialRecord:
    return TrialRecord("t", recipe, ratio, rate, more, seed=seed)


def test_a_named_recipe_is_reported_by_itself_and_its_ratio() -> None:
    assert named(trial(), trial(ratio=0.125), trial("gqa")) == ["headfold · 25%", "headfold · 12.5%", "gqa · 25%"]


def test_rates_and_seeds_are_reported_where_there_are_several() -> None:
    rates = named(trial(), trial(rate=1e-3), trial("gqa"))
    assert rates == ["headfold · 25% · lr 0.0003", "headfold · 25% · lr 0.001", "gqa · 25%"]
    both = named(trial(), trial(seed=1), trial(rate=1e-3), trial(rate=1e-3, seed=1))
    assert both[::3] == ["headfold · 25% · lr 0.0003 · seed 0", "headfold · 25% · lr 0.001 · seed 1"]
    assert len(set(both)) == 4


def test_drawn_recipes_are_reported_by_what_they_differ_in() -> None:
    own: dict[str, Any] = {"allocation": "uniform", "grouping": "exact", "fusion": "least_squares"}
    one, other = trial("joint-1", **own), trial("joint-2", **own | {"grouping": "merge"})
    assert named(one) == ["joint · uniform, least squares · 25%"]
    assert named(one, other, trial("gqa")) == ["joint · exact · 25%", "joint · merge · 25%", "gqa · 25%"]
    assert named(one, trial("joint-1", ratio=0.5, **own)) == [
        "joint · uniform, least squares · 25%",
        "joint · uniform, least squares · 50%",
    ]


def test_of_equal_words_other_choices_and_parameters_are_reported() -> None:
    own: dict[str, Any] = {"allocation": "uniform", "grouping": "exact", "fusion": "mean"}
    one = trial("joint-1", **own, alignment="none", settings={"fusion.ridge": 0.1})
    aligned = trial("joint-2", **own, alignment="procrustes", settings={"fusion.ridge": 0.1})
    ridge = trial("joint-3", **own, alignment="none", settings={"fusion.ridge": 0.25})
    assert named(one, aligned, ridge) == [
        "joint · uniform, mean, alignment none, fusion.ridge 0.1 · 25%",
        "joint · uniform, mean, procrustes, fusion.ridge 0.1 · 25%",
        "joint · uniform, mean, alignment none, fusion.ridge 0.25 · 25%",
    ]


def test_what_is_equal_all_the_same_is_numbered() -> None:
    assert named(trial("probe"), trial("probe"), trial("probe")) == [
        "probe · 25%",
        "probe · 25% (2)",
        "probe · 25% (3)",
    ]
    assert named(trial("joint-1"), trial("joint-2")) == ["joint · None, None · 25%", "joint · None, None (2) · 25%"]
