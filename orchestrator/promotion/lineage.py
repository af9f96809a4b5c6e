"""Where a promoted checkpoint comes from: model, search, trial, plan, data and weights, each by name and digest.

The record lies beside the exported weights as `lineage.json`, is an artifact of the promotion's run, and is flattened
into the tags of the registered version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attention.io.files import sha256
from orchestrator.config.schema import SearchConfig
from orchestrator.promotion.state import Entry
from orchestrator.search.trial import TrialContext
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord, read_json

FILE = "lineage.json"
DIGITS = 16
"""Hexadecimal digits of a SHA-256, as in the digests of plans and weights."""


def file_digest(path: str | Path) -> str | None:
    """The first digits of a file's SHA-256; None if it is not there."""
    file = Path(path)
    return sha256(file)[:DIGITS] if file.is_file() else None


def lineage_of(
    entry: Entry,
    trial: TrialRecord,
    digests: dict[str, str],
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    parent: str | None,
) -> dict[str, Any]:
    """The record of a candidate that the gate has seen. `digests`: those of plan, trained and exported weights.

    `data.steps` and `data.position` are of the weights that are shipped, which may not be the last ones.
    """
    base = read_json(folder.base)
    return {
        "model": {
            "path": base["model"],
            "weights_digest": base.get("digests", {}).get("weights"),
            "calibration_digest": base.get("digests", {}).get("calibration"),
            "loss": base["loss"],
        },
        "search": {
            "name": folder.root.name,
            "folder": str(folder.root),
            "run": parent,
            "config_digest": file_digest(folder.snapshot),
            "versions_digest": file_digest(folder.versions),
        },
        "trial": {
            "id": trial.trial_id,
            "run": trial.run_id,
            "recipe": trial.recipe,
            "recipe_digest": file_digest(folder.trial(trial.trial_id) / "recipe.json"),
            "learning_rate": trial.learning_rate,
            "seed": trial.seed,
        },
        "plan": {"digest": digests.get("plan_digest"), "kv_ratio": entry.kv_ratio},
        "data": {
            "source": config.data.section("train")[0],
            "digest": file_digest(context.train_file),
            "sequence_length": config.data.sequence_length,
            "steps": entry.best_step,
            "position": entry.data_position,
        },
        "checkpoint": {"trained": digests.get("trained_digest"), "exported": digests.get("weights_digest")},
        "promotion": {"run": entry.run_id},
    }


def lineage_tags(record: dict[str, Any]) -> dict[str, Any]:
    """The record as tags of a run or a version; what is not known is left out."""
    model, search, trial, data = (record[name] for name in ("model", "search", "trial", "data"))
    tags = {
        "base_model": model["path"],
        "base_digest": model["weights_digest"],
        "original_loss": model["loss"],
        "search": search["name"],
        "search_run": search["run"],
        "search_digest": search["config_digest"],
        "trial_id": trial["id"],
        "trial_run": trial["run"],
        "recipe_digest": trial["recipe_digest"],
        "seed": trial["seed"],
        "plan_digest": record["plan"]["digest"],
        "data_digest": data["digest"],
        "data_position": data["position"],
        "steps": data["steps"],
        "trained_digest": record["checkpoint"]["trained"],
        "weights_digest": record["checkpoint"]["exported"],
    }
    return {key: value for key, value in tags.items() if value is not None}
