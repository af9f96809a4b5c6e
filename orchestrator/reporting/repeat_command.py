"""How to make one trial of a search again: its recipe spelt out as an arm, in a command that runs nothing else."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from orchestrator.storage.records import TrialRecord
from search_spaces.recipes.recipe import AXES

PLAIN = "gqa"  # the recipe that an arm's changes start from


def arm_of(trial: TrialRecord) -> dict[str, Any]:
    """The entry of `search.recipes` that gives a trial's recipe, whatever its name was."""
    chosen: Mapping[str, Any] = trial.choices
    fields = (*AXES, "together", "by")
    changes = {name: chosen[name] for name in fields if chosen.get(name) is not None}
    settings = dict(sorted(chosen.get("settings", {}).items()))
    return {"recipe": PLAIN, "label": trial.recipe, "changes": changes, "params": settings}


def command_of(trial: TrialRecord, snapshot: str) -> str | None:
    """A command line that runs the trial again and nothing else; None for a plan that the searcher has made, and for
    a trial of which too little was recorded."""
    if trial.probe or trial.calibration_loss is not None or not trial.choices:
        return None
    changes: dict[str, Any] = {
        "name": f"again-{trial.trial_id}",
        "search.searcher": "grid",
        "search.recipes": [arm_of(trial)],
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
        changes["search.seeds"] = [trial.seed]
    words = ["headfold", "search", snapshot, *(f"{key}={_yaml(value)}" for key, value in changes.items())]
    return shlex.join(words)


def _yaml(value: Any) -> str:
    """A value on one line. Not JSON: YAML takes its 1e-05 for a text."""
    return yaml.safe_dump([value], default_flow_style=True, width=1_000_000, sort_keys=False).strip()[1:-1]
