"""The model card of a promoted checkpoint: what the search and the gate know of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.checkpoints import base_of
from orchestrator.config.schema import SearchConfig
from orchestrator.promotion.state import GateRecord, PromotionEntry, TrainedModel
from orchestrator.reporting.card import CardFacts, write_card
from orchestrator.storage.json_files import read_json
from trainers.text.corpora import DataError, resolve


def write_promoted_card(
    entry: PromotionEntry, config: SearchConfig, original: Path, folder: str
) -> None:
    """Write the card into a folder that the gate has written.

    Args:
        original: The search's record of the original model.
    """
    trained, gate = entry.trained, entry.gate
    assert trained is not None and gate is not None
    steps = trained.step or 0
    text, datasets = _training_text(config) if steps else (None, [])
    base: Any = base_of(read_json(original)["model"])
    facts = CardFacts(
        recipe=entry.label,
        kv_ratio=entry.used_kv_ratio or entry.kv_ratio,
        losses=_losses(entry, trained, gate, config.search.baseline),
        loss_notes=_loss_notes(gate),
        tasks=gate.scores.get("tasks", {}),
        trained={"steps": steps, "tokens": trained.tokens or _tokens(steps, config), "data": text},
        datasets=datasets,
        **base,
    )
    write_card(folder, facts)


def _losses(
    entry: PromotionEntry, trained: TrainedModel, gate: GateRecord, baseline: str
) -> dict[str, float]:
    """Return the losses that are known, by the model as the card calls it, all on one text.

    It is the gate's own; where there was none, that by which the model was chosen.
    """
    checks = gate.checks
    if "test_loss" in checks:
        values = [
            checks.get("original_test_loss"),
            checks.get("untrained_test_loss"),
            checks["test_loss"],
            checks.get("baseline_test_loss"),
        ]
    else:
        values = [
            trained.original_loss,
            trained.untrained_loss,
            checks.get("exported_loss", trained.loss),
            entry.baseline.loss if entry.baseline else None,
        ]
    names = (
        "original model",
        "converted, before training",
        "this model",
        f"baseline {baseline}, trained for as many steps at most",
    )
    losses = dict(zip(names, values, strict=True))
    return {name: loss for name, loss in losses.items() if loss is not None}


def _loss_notes(gate: GateRecord) -> list[str]:
    """Return on which text the losses are, and whether their difference is fair and sure."""
    checks = gate.checks
    smaller: list[str] = []
    size = checks.get("baseline_kv_bytes_per_token")
    if size is not None and gate.kv_bytes_per_token is not None and size < gate.kv_bytes_per_token:
        smaller = [
            f"The baseline has no plan of as many bytes: its cache takes {size:,} bytes per token, "
            f"that of this model {gate.kv_bytes_per_token:,}."
        ]
    if "warning" in checks:
        return [f"{checks['warning'].capitalize()}.", *smaller]
    if "test_loss" not in checks:
        return smaller
    tokens = checks.get("test_tokens", 0)
    documents = checks.get("test_documents", 0)
    notes = [
        f"On {tokens:,} tokens of {documents:,} held-out documents by which nothing was chosen."
    ]
    difference = checks.get("loss_difference")
    low, high = checks.get("loss_difference_interval", (None, None))
    if difference is not None and low is not None and high is not None:
        notes.append(
            f"Below the baseline by {difference:.4f}, 95 % interval {low:.4f} to {high:.4f} "
            "(bootstrap over documents)."
        )
    return [*notes, *smaller]


def _tokens(steps: int, config: SearchConfig) -> int:
    """Return about how many tokens so many steps take, for a relaxed model: it has no report.

    A trial's up to the last rung, then the promotion's.
    """
    of_trial = min(steps, config.rungs.steps[-1])
    sequences = of_trial * config.train.batch_size
    sequences += (steps - of_trial) * config.promotion_train.batch_size
    return sequences * config.data.sequence_length


def _training_text(config: SearchConfig) -> tuple[str, list[str]]:
    """Return the name of the training text, without local paths, and its names on the hub."""
    sources = {config.data.section("train")[0], config.promotion_source}
    names: list[str] = []
    hub_names: list[str] = []
    for source in sorted(sources):
        try:
            corpus = resolve(source)
        except DataError:  # moved since it was tokenised
            names.append("local text")
            continue
        names.append("local text" if corpus.kind == "files" else source)
        if corpus.kind == "hub":
            hub_names.append(corpus.name)
    return ", ".join(names), hub_names
