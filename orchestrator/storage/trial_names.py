"""The names of trials for people; files and `--trial` use their ids.

`label` is the recipe: `headfold`, or `joint · knapsack, least squares` for one that a searcher has
drawn, by the choices that distinguish the drawn ones. `name` is the trial: `headfold · 25%`, with
its learning rate, its objective of training and its seed where a recipe runs at a KV ratio with
several. No two trials of a search have one name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from attention.ratios import percent
from orchestrator.storage.records import TrialRecord, family

_T = TypeVar("_T")

_DRAWN = "joint"
_LABEL_AXES = ("allocation", "grouping", "fusion")
"""Choices that label a drawn recipe, where the drawn ones differ; others only distinguish equal
ones."""
_DEFAULT_AXES = ("allocation", "fusion")
"""Choices where they differ on none of those."""
_NAMED_CHOICES = ("together", "by", "width")
"""Choices that are shown with their name: yes and no, keys and values, a number say nothing
alone."""
_NO_CHOICE = {"name", "settings"}


def name_trials(trials: Iterable[TrialRecord]) -> None:
    """Fill in `label` and `name` of all trials of a search, in the order of their suggestion."""
    trials = list(trials)
    labels = _labels({trial.recipe: trial.choices for trial in trials})
    for trial in trials:
        trial.label = labels[trial.recipe]
        trial.name = f"{trial.label} · {percent(trial.kv_ratio)}"
    for describe in (_learning_rate, _distillation, _seed):
        for alike in _groups(trials, lambda trial: trial.name):
            if len({describe(trial) for trial in alike}) > 1:
                for trial in alike:
                    trial.name += f" · {describe(trial)}"
    for alike in _groups(trials, lambda trial: trial.name):
        for number, trial in enumerate(alike[1:], 2):
            trial.name += f" ({number})"


def _learning_rate(trial: TrialRecord) -> str:
    return f"lr {trial.learning_rate:g}"


def _distillation(trial: TrialRecord) -> str:
    return f"distillation {trial.distillation}"


def _seed(trial: TrialRecord) -> str:
    return f"seed {trial.seed}"


def _labels(choices: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the label of each recipe by its own choices."""
    drawn = [recipe for recipe in choices if family(recipe) == _DRAWN]
    axes = [
        axis for axis in _LABEL_AXES if len({choices[recipe].get(axis) for recipe in drawn}) > 1
    ]
    words = {
        recipe: [_word(choices[recipe].get(axis)) for axis in axes or _DEFAULT_AXES]
        for recipe in drawn
    }
    for alike in _groups(drawn, lambda recipe: tuple(words[recipe])):
        _add_differences(alike, choices, words)
    labels = {recipe: f"{_DRAWN} · {', '.join(parts)}" for recipe, parts in words.items()}
    for alike in _groups(drawn, labels.__getitem__):
        for number, recipe in enumerate(alike[1:], 2):
            labels[recipe] += f" ({number})"
    return {recipe: labels.get(recipe, recipe) for recipe in choices}


def _add_differences(
    alike: Sequence[str], choices: Mapping[str, Mapping[str, Any]], words: dict[str, list[str]]
) -> None:
    """Add the choices in which recipes of equal words differ, until no two are the same.

    Choices come first, then parameters.
    """
    flat = {recipe: {**choices[recipe], **choices[recipe].get("settings", {})} for recipe in alike}
    fields = {key for fields in flat.values() for key in fields} - _NO_CHOICE

    def order(field: str) -> tuple[bool, bool, str]:
        return "." in field, field in _NAMED_CHOICES, field

    for field in sorted(fields, key=order):
        if len({tuple(words[recipe]) for recipe in alike}) == len(alike):
            return
        if len({repr(flat[recipe].get(field)) for recipe in alike}) > 1:
            for recipe in alike:
                word = _word(flat[recipe].get(field))
                if "." in field or field in _NAMED_CHOICES or word == "none":
                    word = f"{_word(field)} {word}"
                words[recipe].append(word)


def _groups(items: Iterable[_T], key: Callable[[_T], Any]) -> list[list[_T]]:
    """Return the items that share a key with another one, together."""
    groups: dict[Any, list[_T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return [group for group in groups.values() if len(group) > 1]


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("_", " ")
