"""From a candidate that has passed the gate to a registered version that an alias points to.

Two steps, each of which the next run of a promotion finishes if it was cut off: the version, complete with its tags,
then the alias, in one call.

Lineage: where a promoted checkpoint comes from, by names and digests. It lies beside the exported weights as
`lineage.json`, is an artifact of the promotion's run, and is flattened into the tags of the registered version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attention.io.files import sha256
from attention.ratios import percent
from orchestrator.config.schema import SearchConfig
from orchestrator.promotion.gate import OK
from orchestrator.promotion.state import PROMOTED, REFUSED, REGISTERED, Entry, PromotionState
from orchestrator.search.trials.context import SearchSession
from orchestrator.storage.json_files import read_json
from orchestrator.storage.records import TrialRecord
from orchestrator.tracking.runs import Tracker
from trainers.text.token_sets import is_complete, read_sequences

LINEAGE = "lineage.json"
DIGITS = 16
"""Hexadecimal digits of a SHA-256, as in the digests of plans and weights."""


def file_digest(path: str | Path) -> str | None:
    """The first digits of a file's SHA-256; None if it is not there."""
    return sha256(path)[:DIGITS] if Path(path).is_file() else None


def _text_digest(folder: str) -> str | None:
    """The first digits of a token set's digest; None if it is not there."""
    return read_sequences(folder).digest[:DIGITS] if is_complete(folder) else None


def lineage_of(entry: Entry, trial: TrialRecord, digests: dict[str, str], session: SearchSession) -> dict[str, Any]:
    """The record of a candidate that the gate has seen. `digests`: those of plan, trained and exported weights.

    `data.steps` and `data.position` are of the weights that are shipped, which may not be the last ones.
    """
    config, folder = session.config, session.folder
    original = read_json(folder.original)
    return {
        "model": {
            "path": original["model"],
            "weights_digest": original.get("digests", {}).get("weights"),
            "calibration_digest": original.get("digests", {}).get("calibration"),
            "loss": original["loss"],
        },
        "search": {
            "name": folder.root.name,
            "folder": str(folder.root),
            "run": session.mlflow.parent_id,
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
            "digest": _text_digest(session.context.train_file),
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


def model_name(config: SearchConfig) -> str:
    return config.promotion.registered_name or config.name


def gate_tags(entry: Entry) -> dict[str, str]:
    """What the gate said: altogether, and of each check."""
    passed = all(outcome == OK for outcome in entry.gate.values())
    return {"gate": OK if passed else REFUSED} | {f"gate.{name}": outcome for name, outcome in entry.gate.items()}


def register(entry: Entry, session: SearchSession, tracker: Tracker) -> None:
    """Make the version, with lineage and gate as its tags. Raises TrackingError if the registry refuses."""
    assert entry.model is not None and entry.run_id is not None
    losses = ("loss", "untrained_loss", "last_loss", "baseline_loss")
    tags = {name: getattr(entry, name) for name in ("recipe", "kv_ratio", "kv_bytes_per_token", *losses, "shipped")}
    loads_in = "stock transformers" if entry.plain else "Headfold's own format, not stock transformers"
    tags |= {"format": loads_in, **gate_tags(entry), **lineage_tags(entry.lineage)}
    share = f"{percent(entry.used_kv_ratio or entry.kv_ratio)} of the original's KV cache"
    description = f"{entry.label} at {share}, from search {session.folder.root.name}"
    name = model_name(session.config)
    entry.version = tracker.register(name, entry.model, entry.run_id, tags=tags, description=description)
    entry.status = REGISTERED


def settle_aliases(state: PromotionState, config: SearchConfig, tracker: Tracker) -> None:
    """Point the aliases of each budget (kv25, then kv25-2, ...) to its versions by rising loss.

    A version of another search keeps its alias if it is newer. The worst comes first, so that a version that makes
    way has its new alias before it loses the old one. Raises TrackingError if the registry refuses.
    """
    name = model_name(config)
    registered = [e for e in state.candidates.values() if e.status in (REGISTERED, PROMOTED)]
    versions = {e.version for e in registered}
    for budget in {e.kv_ratio for e in registered}:
        ranked = sorted((e for e in registered if e.kv_ratio == budget), key=lambda e: (e.loss, e.trial_id))
        for place, entry in reversed(list(enumerate(ranked, 1))):
            alias = alias_of(budget, place)
            holder = tracker.alias_version(name, alias)
            if holder is not None and holder not in versions and int(holder) > int(entry.version or 0):
                entry.model_uri = f"models:/{name}/{entry.version}"
            else:
                if holder != entry.version:
                    tracker.set_alias(name, alias, str(entry.version))
                entry.model_uri = f"models:/{name}@{alias}"
            entry.status = PROMOTED


def alias_of(kv_ratio: float, place: int) -> str:
    """kv25 for the best at a quarter of the cache, kv12_5-2 for the second best at an eighth."""
    return f"kv{100 * kv_ratio:g}".replace(".", "_") + (f"-{place}" if place > 1 else "")
