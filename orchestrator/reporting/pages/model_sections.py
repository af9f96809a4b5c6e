"""The part of a page on one promoted model: quality, commands, engines, tasks, generated text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention.base.text import number
from attention.checkpoint import Checkpoint
from attention.plan import BYTES
from attention.ratios import percent
from orchestrator.reporting.card import EXPORT, engine_checks
from orchestrator.reporting.evaluation_tables import position_table, recall_table, tasks_table
from orchestrator.reporting.pages.page import PagePart, PageSection, Stat
from orchestrator.reporting.promoted_models import PromotedModel
from orchestrator.reporting.tables import Table, with_intro
from orchestrator.storage.json_files import read_json
from orchestrator.storage.records import OriginalRecord, relaxation_left

_GPU_MEMORY = 80 * 2**30
"""Bytes of memory of the GPU that the page counts sequences for."""
_CONTEXT = 4096
"""Tokens of these sequences, of a model that takes as many."""
_MODEL_NAMES = {"checkpoint": "this model", "original": "original", "baseline": "baseline"}
"""By their names in records, in the order in which they are read."""
_HOLDS = "Which engines hold the model in its own bytes."
_CHECKED = "What engines that loaded it have shown."
_POSITIONS = "Loss by position, nats per token."
_RECALL = (
    "Recall of a hidden line by context and depth: share right of four values, what hiding adds."
)


def model_part(
    model: PromotedModel, candidate: Mapping[str, Any], original: OriginalRecord
) -> PagePart:
    """Return the part of a promoted model.

    Args:
        model: The model.
        candidate: Its entry in `promotion.json`.
        original: The original model.
    """
    measured = candidate.get("measured", {})
    tasks = []
    if measured.get("tasks"):
        tasks.append(tasks_table(_renamed(measured["tasks"])))
    samples = [
        {**sample, "texts": _renamed(sample["texts"])} for sample in measured.get("generations", ())
    ]
    long_context = []
    if losses := measured.get("long_context"):
        positions = position_table(_renamed(losses["loss_by_position"]))
        long_context.append(with_intro(positions, _POSITIONS))
        long_context.append(with_intro(recall_table(_renamed(losses["recall"])), _RECALL))
    stats = [*_quality(model, candidate, original), *_sequences(model, original)]
    return PagePart(
        f"Promoted: {model['label']}, {percent(model['kv_ratio'])} of the KV cache",
        [
            PageSection("At a glance", stats=stats),
            PageSection("How to serve it", commands=_commands(model)),
            PageSection("Engines", tables=_engines(model, candidate)),
            PageSection("Tasks (± standard error)", tables=tasks),
            PageSection("Long contexts", tables=long_context),
            PageSection("What it writes", samples=samples, wide=True),
        ],
    )


def _renamed(by_model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: by_model[key] for key, name in _MODEL_NAMES.items() if key in by_model}


def _quality(
    model: PromotedModel, candidate: Mapping[str, Any], original: OriginalRecord
) -> list[Stat]:
    original_loss = original["loss"]
    increase = number(model["loss_increase"], "+.3f")
    perplexity = f"original {math.exp(original_loss):.2f}"
    stats = [
        Stat("held-out loss", number(model["loss"]), f"{increase}; original {original_loss:.3f}"),
        Stat("perplexity", number(model["perplexity"], ".2f"), perplexity),
    ]
    if size := model["kv_bytes_per_token"]:
        own = original["kv_bytes_per_token"]
        remark = f"{percent(round(size / own, 4))}; original {own:,}"
        stats.append(Stat("KV cache, bytes per token", f"{size:,}", remark))
    if (baseline := candidate.get("baseline_loss")) is not None:
        remark = f"{baseline - original_loss:+.3f}, trained as long"
        stats.append(Stat("loss of the baseline", number(baseline), remark))
        step = candidate.get("best_step")
        steps = candidate.get("steps")
        remark = f"the best of {steps}" if step else f"{steps} more made it no better"
        stats.append(Stat("training steps", f"{step}", remark))
    left = candidate.get("relaxation_remaining")
    if left is not None and relaxation_left(left):
        remark = f"{left:.0%} of its way was left when heads were fused"
        stats.append(Stat("relaxation", "unfinished", remark))
    return stats


def _sequences(model: PromotedModel, original: OriginalRecord) -> list[Stat]:
    """Return how many sequences fit beside the weights, if the checkpoint is still there."""
    folder = Path(model["path"] or "")
    size = model["kv_bytes_per_token"]
    if not size or not (folder / "config.json").is_file():
        return []
    context = min(_CONTEXT, Checkpoint.open(folder).geometry.max_positions)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    sequences = sequences_that_fit(_GPU_MEMORY, weights, size, context)
    remark = "beside the weights"
    if "parameters" in original:
        own_weights = original["parameters"] * BYTES[original["dtype"]]
        own_size = original["kv_bytes_per_token"]
        if before := sequences_that_fit(_GPU_MEMORY, own_weights, own_size, context):
            remark = f"{sequences / before:.3g} x; original {before:,}"
    name = f"sequences of {context:,} tokens on a GPU of {_GPU_MEMORY // 2**30} GiB"
    return [Stat(name, f"{sequences:,}", remark)]


def sequences_that_fit(memory: int, weights: int, kv_bytes_per_token: int, context: int) -> int:
    """Return how many sequences of `context` tokens fit in `memory` beside the weights, in bytes.

    What an engine needs besides is not counted.
    """
    return max(0, memory - weights) // (kv_bytes_per_token * context)


def _commands(model: PromotedModel) -> list[tuple[str, str]]:
    if not model["path"]:
        return []
    commands = [("Checkpoint", model["path"])]
    for service in model["serve"]:
        if "commands" in service:
            commands.append((service["engine"], "\n".join(service["commands"])))
    return commands


def _engines(model: PromotedModel, candidate: Mapping[str, Any]) -> list[Table]:
    """Return which engines hold the model, and what those that were tried have shown."""
    rows = []
    for service in model["serve"]:
        if "why_not" in service:
            rows.append((service["engine"], "no", "", service["why_not"]))
        else:
            target = service.get("target")
            how = f"export to target {target}" if target else "as it is"
            rows.append(
                (service["engine"], "yes", f"{service.get('kv_bytes_per_token', 0):,}", how)
            )
    tables = []
    if rows:
        tables.append(Table(("engine", "holds it", "KV bytes/token", "how"), rows, intro=_HOLDS))
    for folder in dict.fromkeys(filter(None, (candidate.get("served"), model["path"]))):
        report = Path(folder) / EXPORT
        if report.is_file() and (checks := engine_checks(read_json(report))).rows:
            tables.append(with_intro(checks, _CHECKED))
    return tables
