"""What trials are called wherever somebody reads of them; files and `--trial` go by their ids.

`label` is the recipe: `headfold`, or `joint · knapsack, least squares` for one that a searcher has drawn, by the
choices that tell the drawn ones apart. `name` is the trial: `headfold · 25%`, with its learning rate and its seed where
a recipe runs at a KV ratio with several. No two trials of a search have one name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from attention.ratios import percent
from orchestrator.storage.records import TrialRecord, family

T = TypeVar("T")

DRAWN = "joint"
FIRST = ("allocation", "grouping", "fusion")
"""Axes that a drawn recipe is told by, where the drawn ones differ on them; on others only to tell equal ones apart."""
ALONE = ("allocation", "fusion")
"""Where they differ on none of those."""
SIDES = ("together", "by")
"""Choices that are told with their name: yes and no, keys and values say nothing alone."""
NO_CHOICE = {"name", "settings"}


def name_trials(trials: Iterable[TrialRecord]) -> None:
    """Fill in `label` and `name` of all trials of a search, in the order in which they were suggested."""
    trials = list(trials)
    labels = _labels({t.recipe: t.choices for t in trials})
    for trial in trials:
        trial.label = labels[trial.recipe]
        trial.name = f"{trial.label} · {percent(trial.kv_ratio)}"
    for what in (lambda t: f"lr {t.learning_rate:g}", lambda t: f"seed {t.seed}"):
        for equal in _equal(trials, lambda t: t.name):
            if len({what(t) for t in equal}) > 1:
                for trial in equal:
                    trial.name += f" · {what(trial)}"
    for equal in _equal(trials, lambda t: t.name):
        for number, trial in enumerate(equal[1:], 2):
            trial.name += f" ({number})"


def _labels(choices: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Of each recipe by its own choices."""
    drawn = [recipe for recipe in choices if family(recipe) == DRAWN]
    differ = [axis for axis in FIRST if len({choices[recipe].get(axis) for recipe in drawn}) > 1] or ALONE
    told = {recipe: [_word(choices[recipe].get(axis)) for axis in differ] for recipe in drawn}
    for equal in _equal(drawn, lambda recipe: tuple(told[recipe])):
        _tell_apart(equal, choices, told)
    labels = {recipe: f"{DRAWN} · {', '.join(words)}" for recipe, words in told.items()}
    for equal in _equal(drawn, labels.__getitem__):
        for number, recipe in enumerate(equal[1:], 2):
            labels[recipe] += f" ({number})"
    return {recipe: labels.get(recipe, recipe) for recipe in choices}


def _tell_apart(equal: Sequence[str], choices: Mapping[str, Mapping[str, Any]], told: dict[str, list[str]]) -> None:
    """Add what recipes of equal words differ in: choices first, then parameters, until no two are the same."""
    flat = {recipe: {**choices[recipe], **choices[recipe].get("settings", {})} for recipe in equal}
    fields = {key for one in flat.values() for key in one} - NO_CHOICE
    for field in sorted(fields, key=lambda field: ("." in field, field in SIDES, field)):
        if len({tuple(told[recipe]) for recipe in equal}) == len(equal):
            return
        if len({repr(flat[recipe].get(field)) for recipe in equal}) > 1:
            for recipe in equal:
                word = _word(flat[recipe].get(field))
                alone = "." not in field and field not in SIDES and word != "none"
                told[recipe].append(word if alone else f"{_word(field)} {word}")


def _equal(items: Iterable[T], key: Callable[[T], Any]) -> list[list[T]]:
    """The items that share a key with another one."""
    groups: dict[Any, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return [group for group in groups.values() if len(group) > 1]


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("_", " ")
