"""From a candidate that has passed the gate to a registered version that an alias points to.

Two steps, each of which the next run of a promotion finishes if it was cut off: the version,
complete with its tags, then the alias, in one call.

Lineage: the origin of a promoted checkpoint, by names and digests. It is stored next to the
exported weights as `lineage.json`, is an artifact of the promotion's run, and is flattened into the
tags of the registered version.
"""

from __future__ import annotations

from pathlib import Path

from attention.io.files import sha256
from attention.ratios import percent
from orchestrator.config.schema import SearchConfig
from orchestrator.promotion.gate import OK, ModelDigests
from orchestrator.promotion.state import (
    PASSED,
    PROMOTED,
    REFUSED,
    REGISTERED,
    GateRecord,
    PromotionEntry,
    PromotionState,
)
from orchestrator.search.trials.context import SearchSession
from orchestrator.storage.json_files import read_json
from orchestrator.storage.promotion_record import LineageRecord
from orchestrator.storage.records import OriginalRecord, TrialRecord
from orchestrator.tracking.runs import Tracker
from trainers.text.token_sets import is_complete, read_sequences

LINEAGE = "lineage.json"
_DIGITS = 16  # hexadecimal, of a SHA-256, as in the digests of plans and weights


def _file_digest(path: Path) -> str | None:
    """Return the first digits of a file's SHA-256; None if there is no file."""
    return sha256(path)[:_DIGITS] if path.is_file() else None


def _text_digest(folder: str) -> str | None:
    """Return the first digits of a token set's digest; None if there is none."""
    return read_sequences(folder).digest[:_DIGITS] if is_complete(folder) else None


def lineage_of(
    entry: PromotionEntry, trial: TrialRecord, digests: ModelDigests, session: SearchSession
) -> LineageRecord:
    """Return the lineage of a candidate that the gate has checked.

    `data.steps` and `data.position` are of the weights that are shipped, which may not be the last.
    """
    config, folder = session.config, session.folder
    original: OriginalRecord = read_json(folder.original)
    original_digests = original.get("digests", {})
    trained = entry.trained
    context = session.context
    source, train_file = config.data.section("train")[0], context.train_file
    # The position of weights of the promotion is in its text
    promoted = trained is not None and (trained.step or 0) > trial.step
    if promoted and context.promotion_file is not None:
        source, train_file = config.promotion_source, context.promotion_file
    return {
        "model": {
            "path": original["model"],
            "weights_digest": original_digests.get("weights"),
            "calibration_digest": original_digests.get("calibration"),
            "loss": original["loss"],
        },
        "search": {
            "name": folder.root.name,
            "folder": str(folder.root),
            "run": session.mlflow.parent_id,
            "config_digest": _file_digest(folder.snapshot),
            "versions_digest": _file_digest(folder.versions),
        },
        "trial": {
            "id": trial.trial_id,
            "run": trial.run_id,
            "recipe": trial.recipe,
            "recipe_digest": _file_digest(folder.trial(trial.trial_id) / "recipe.json"),
            "learning_rate": trial.learning_rate,
            "seed": trial.seed,
        },
        "plan": {"digest": digests.plan, "kv_ratio": entry.kv_ratio},
        "data": {
            "source": source,
            "digest": _text_digest(train_file),
            "sequence_length": config.data.sequence_length,
            "steps": trained.step if trained else None,
            "position": trained.data_position if trained else None,
        },
        "checkpoint": {"trained": digests.trained, "exported": digests.exported},
        "promotion": {"run": entry.run_id},
    }


def lineage_tags(record: LineageRecord) -> dict[str, str | float]:
    """Return the tags of a run or a version, without unknown values."""
    tags = {
        "base_model": record["model"]["path"],
        "base_digest": record["model"]["weights_digest"],
        "original_loss": record["model"]["loss"],
        "search": record["search"]["name"],
        "search_run": record["search"]["run"],
        "search_digest": record["search"]["config_digest"],
        "trial_id": record["trial"]["id"],
        "trial_run": record["trial"]["run"],
        "recipe_digest": record["trial"]["recipe_digest"],
        "seed": record["trial"]["seed"],
        "plan_digest": record["plan"]["digest"],
        "data_digest": record["data"]["digest"],
        "data_position": record["data"]["position"],
        "steps": record["data"]["steps"],
        "trained_digest": record["checkpoint"]["trained"],
        "weights_digest": record["checkpoint"]["exported"],
    }
    return {key: value for key, value in tags.items() if value is not None}


def gate_tags(gate: GateRecord) -> dict[str, str]:
    """Return the outcome of the gate as tags: of all checks together, and of each."""
    passed = all(outcome == OK for outcome in gate.outcomes.values())
    tags = {"gate": OK if passed else REFUSED}
    return tags | {f"gate.{name}": outcome for name, outcome in gate.outcomes.items()}


def register_candidate(entry: PromotionEntry, session: SearchSession, tracker: Tracker) -> None:
    """Make the version, with lineage and gate as its tags.

    Raises:
        TrackingError: If the registry refuses.
    """
    gate, lineage, trained = entry.gate, entry.lineage, entry.trained
    assert gate is not None and lineage is not None and trained is not None
    assert gate.model is not None and entry.run_id is not None
    stock = "stock transformers"
    tags = {
        "recipe": entry.recipe,
        "kv_ratio": entry.kv_ratio,
        "kv_bytes_per_token": gate.kv_bytes_per_token,
        "loss": trained.loss,
        "untrained_loss": trained.untrained_loss,
        "last_loss": trained.last_loss,
        "baseline_loss": entry.baseline.loss if entry.baseline else None,
        "shipped": trained.description,
        "format": stock if gate.plain else f"Headfold's own format, not {stock}",
        **gate_tags(gate),
        **lineage_tags(lineage),
    }
    share = f"{percent(entry.used_kv_ratio or entry.kv_ratio)} of the original's KV cache"
    entry.version = tracker.register(
        _model_name(session.config),
        gate.model,
        entry.run_id,
        tags=tags,
        description=f"{entry.label} at {share}, from search {session.folder.root.name}",
    )
    entry.status = REGISTERED


def _model_name(config: SearchConfig) -> str:
    return config.promotion.registered_name or config.name


def settle_aliases(state: PromotionState, config: SearchConfig, tracker: Tracker) -> None:
    """Point the aliases of each KV ratio (kv25, then kv25-2, ...) to its versions by rising loss.

    A version of another search keeps its alias if it is newer. The worst comes first, so that a
    version that makes way has its new alias before it loses the old one. A version that is no
    longer in the registry, as where the search has been moved to another, has none.

    Raises:
        TrackingError: If the registry refuses.
    """
    name = _model_name(config)
    registered = []
    for entry in state.candidates.values():
        if entry.status in (REGISTERED, PROMOTED):
            if _is_version(name, entry, tracker):
                registered.append(entry)
            else:
                entry.version = entry.model_uri = None
                entry.status = PASSED if entry.status == REGISTERED else entry.status
    versions = {e.version for e in registered}
    for kv_ratio in {e.kv_ratio for e in registered}:
        alike = [e for e in registered if e.kv_ratio == kv_ratio]
        ranked = sorted(alike, key=lambda e: (e.loss, e.trial_id))
        for rank, entry in reversed(list(enumerate(ranked, 1))):
            alias = _alias(kv_ratio, rank)
            holder = tracker.alias_version(name, alias)
            newer = holder is not None and int(holder) > int(entry.version or 0)
            if newer and holder not in versions:
                entry.model_uri = f"models:/{name}/{entry.version}"
            else:
                if holder != entry.version:
                    tracker.set_alias(name, alias, str(entry.version))
                entry.model_uri = f"models:/{name}@{alias}"
            entry.status = PROMOTED


def _is_version(name: str, entry: PromotionEntry, tracker: Tracker) -> bool:
    """Return whether the registry has the version of an entry, with its weights."""
    if entry.version is None or (tags := tracker.version_tags(name, entry.version)) is None:
        return False
    digest = entry.lineage and entry.lineage["checkpoint"]["exported"]
    return tags.get("weights_digest", digest) == digest


def _alias(kv_ratio: float, rank: int) -> str:
    """Return kv25 for the best at 25%, kv12_5-2 for the second best at 12.5%."""
    name = f"kv{100 * kv_ratio:g}".replace(".", "_")
    return f"{name}-{rank}" if rank > 1 else name
