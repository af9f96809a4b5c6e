"""From a candidate that has passed the gate to a registered version that an alias points to.

Two steps, each of which the next run of a promotion finishes if it was cut off: the version, complete with its tags,
then the alias. Until the alias is set, in one call, it points to what it pointed to before.
"""

from __future__ import annotations

from orchestrator.config.schema import SearchConfig
from orchestrator.promotion.gate import OK
from orchestrator.promotion.lineage import lineage_tags
from orchestrator.promotion.state import PROMOTED, REFUSED, REGISTERED, Entry, PromotionState
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import percent
from orchestrator.tracking.runs import Tracker


def model_name(config: SearchConfig) -> str:
    return config.promotion.registered_name or config.name


def gate_tags(entry: Entry) -> dict[str, str]:
    """What the gate said: altogether, and of each check."""
    passed = all(outcome == OK for outcome in entry.gate.values())
    return {"gate": OK if passed else REFUSED} | {f"gate.{name}": outcome for name, outcome in entry.gate.items()}


def format_of(entry: Entry) -> str:
    """What loads the model that was written."""
    return "stock transformers" if entry.plain else "Headfold's own format, not stock transformers"


def register(entry: Entry, config: SearchConfig, folder: SearchFolder, tracker: Tracker) -> None:
    """Make the version, with lineage and gate as its tags. Raises TrackingError if the registry refuses."""
    assert entry.model is not None and entry.run_id is not None
    tags = {
        "recipe": entry.recipe,
        "kv_ratio": entry.kv_ratio,
        "kv_bytes_per_token": entry.kv_bytes_per_token,
        "loss": entry.loss,
        "untrained_loss": entry.untrained_loss,
        "last_loss": entry.last_loss,
        "baseline_loss": entry.baseline_loss,
        "shipped": entry.shipped,
        "format": format_of(entry),
        **gate_tags(entry),
        **lineage_tags(entry.lineage),
    }
    share = f"{percent(entry.kv_ratio)} of the original's KV cache"
    description = f"{entry.recipe} at {share}, from search {folder.root.name}"
    entry.version = tracker.register(model_name(config), entry.model, entry.run_id, tags=tags, description=description)
    entry.status = REGISTERED


def settle_aliases(state: PromotionState, config: SearchConfig, tracker: Tracker) -> None:
    """Point the aliases of each budget (kv25, then kv25-2, ...) to its versions by rising loss.

    A version of another search keeps its alias if it is newer. The worst comes first, so that a version that makes
    way has its new alias before it loses the old one. Raises TrackingError if the registry refuses.
    """
    name = model_name(config)
    registered = [e for e in state.candidates.values() if e.status in (REGISTERED, PROMOTED)]
    own = {e.version for e in registered}
    for budget in {e.kv_ratio for e in registered}:
        ranked = sorted((e for e in registered if e.kv_ratio == budget), key=lambda e: (e.loss, e.trial_id))
        for place, entry in reversed(list(enumerate(ranked, 1))):
            alias = alias_of(budget, place)
            holder = tracker.holder(name, alias)
            if holder is not None and holder not in own and int(holder) > int(entry.version or 0):
                entry.model_uri = f"models:/{name}/{entry.version}"
            else:
                if holder != entry.version:
                    tracker.point(name, alias, str(entry.version))
                entry.model_uri = f"models:/{name}@{alias}"
            entry.status = PROMOTED


def alias_of(kv_ratio: float, place: int) -> str:
    """kv25 for the best at a quarter of the cache, kv12_5-2 for the second best at an eighth."""
    return f"kv{100 * kv_ratio:g}".replace(".", "_") + (f"-{place}" if place > 1 else "")
