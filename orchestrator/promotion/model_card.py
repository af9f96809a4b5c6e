"""The model card of a promoted checkpoint: what the search and the gate know of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.checkpoints import base_of
from orchestrator.config.schema import SearchConfig
from orchestrator.promotion.state import Entry
from orchestrator.reporting.card import CardFacts, write_card
from orchestrator.storage.json_files import read_json
from trainers.text.corpora import DataError, resolve


def write_promoted_card(entry: Entry, config: SearchConfig, original: Path, folder: str) -> None:
    """Into a `folder` that the gate has written. `original`: the search's record of the original model."""
    steps = entry.best_step or 0
    text, datasets = text_of(config) if steps else (None, [])
    known = {
        "original model": entry.original_loss,
        "converted, before training": entry.untrained_loss,
        "this model": entry.checks.get("exported_loss", entry.loss),
        f"baseline {config.search.baseline}, trained for as many steps at most": entry.baseline_loss,
    }
    facts = CardFacts(
        recipe=entry.label,
        kv_ratio=entry.used_kv_ratio or entry.kv_ratio,
        losses={name: loss for name, loss in known.items() if loss is not None},
        tasks=entry.measured.get("tasks", {}),
        trained={"steps": steps, "tokens": tokens_of(steps, config), "data": text},
        datasets=datasets,
        **base_of(read_json(original)["model"]),
    )
    write_card(folder, facts)


def tokens_of(steps: int, config: SearchConfig) -> int:
    """Tokens that so many steps of a trial saw: up to the last rung as trials train, then as the promotion does."""
    before = min(steps, config.rungs.steps[-1])
    sequences = before * config.train.batch_size + (steps - before) * config.promotion_train.batch_size
    return sequences * config.data.sequence_length


def text_of(config: SearchConfig) -> tuple[str, list[str]]:
    """What the training text is called, without a path of this machine, and its names on the hub."""
    promoted = config.promotion.data
    sources = {config.data.section("train")[0], *([promoted.source] if promoted and promoted.source else [])}
    names: list[str] = []
    hub: list[str] = []
    for source in sorted(sources):
        name, on_hub = _named(source)
        names.append(name)
        hub += on_hub
    return ", ".join(names), hub


def _named(source: str) -> tuple[str, list[str]]:
    try:
        corpus: Any = resolve(source)
    except DataError:  # moved since it was tokenised
        return "local text", []
    if corpus.kind == "files":
        return "local text", []
    return source, [corpus.name] if corpus.kind == "hub" else []
