"""The command that runs one trial of a search again, with its recipe as an arm."""

from __future__ import annotations

import shlex
from typing import Any

from orchestrator.config.parsing import dump_yaml
from orchestrator.storage.records import TrialRecord
from search_spaces.recipes.recipe import RECIPE_FIELDS

_BASE_RECIPE = "gqa"  # that the changes of an arm start from


def command_of(trial: TrialRecord, snapshot: str) -> str | None:
    """Return a command line that runs only this trial again.

    Args:
        trial: The trial.
        snapshot: Path of the stored settings of its search.

    Returns:
        None for a plan that the searcher has made, and for a trial with too few records.
    """
    if trial.probe or trial.calibration_loss is not None or not trial.choices:
        return None
    overrides: dict[str, Any] = {
        "name": f"again-{trial.trial_id}",
        "search.searcher": "grid",
        "search.recipes": [_arm_of(trial)],
        "search.baseline": trial.recipe,
        "search.kv_ratios": [trial.kv_ratio],
        "search.kv_heads": [],
        "search.learning_rates": [trial.learning_rate],
        "search.num_samples": 0,
        "search.search_space": {},
        "search.params": {},
        "rungs.stop": False,
        "promotion.enabled": False,
    }
    if trial.seed is not None:
        overrides["search.seeds"] = [trial.seed]
    words = [f"{key}={_yaml(value)}" for key, value in overrides.items()]
    return shlex.join(["headfold", "search", snapshot, *words])


def _arm_of(trial: TrialRecord) -> dict[str, Any]:
    """Return the entry of `search.recipes` that gives a trial's recipe, under any name."""
    choices = trial.choices
    return {
        "recipe": _BASE_RECIPE,
        "label": trial.recipe,
        "changes": {name: choices[name] for name in RECIPE_FIELDS if choices.get(name) is not None},
        "params": dict(sorted(choices.get("settings", {}).items())),
    }


def _yaml(value: Any) -> str:
    """Return a value on one line."""
    text = dump_yaml([value], one_line=True)
    return text.strip()[1:-1]
