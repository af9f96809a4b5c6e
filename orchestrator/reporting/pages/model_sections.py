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
"""Memory in bytes of the GPU that the page counts sequences for."""
_CONTEXT = 4096
"""Tokens per sequence, if the model takes as many."""
_MIN_WEIGHTS = 10**9
"""Bytes; for a smaller model the number is meaningless."""
_MODEL_NAMES = {"checkpoint": "this model", "original": "original", "baseline": "baseline"}
"""Titles by the names in records, in the order of the page."""
_SUPPORT = "Engines that load the model without a larger KV cache."
_CHECKED = "Checks in the engines that have loaded it."
_POSITIONS = "Loss by position, nats per token."
_RECALL = (
    "Recall of a hidden line by context length and depth: share of cases in which the hidden "
    "value is the most likely of four, and gain in log-probability over another hidden value."
)


def model_part(
    model: PromotedModel, candidate: Mapping[str, Any], original: OriginalRecord
) -> PagePart:
    """Return the part of the page on a promoted model.

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
        f"Promoted: {model['label']}, {percent(model['used_kv_ratio'] or model['kv_ratio'])} "
        "of the KV cache",
        [
            PageSection("Quality and size", stats=stats),
            PageSection("Serve it", commands=_commands(model)),
            PageSection("Engines", tables=_engines(model, candidate)),
            PageSection("Tasks (± standard error)", tables=tasks),
            PageSection("Long contexts", tables=long_context),
            PageSection("Generated text", samples=samples, wide=True),
        ],
        folded=True,
    )


def _renamed(by_model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: by_model[key] for key, name in _MODEL_NAMES.items() if key in by_model}


def _quality(
    model: PromotedModel, candidate: Mapping[str, Any], original: OriginalRecord
) -> list[Stat]:
    original_loss = original["loss"]
    increase = number(model["loss_increase"], "+z.3f")
    perplexity = f"original {math.exp(original_loss):.2f}"
    stats = [
        Stat("held-out loss", number(model["loss"]), f"{increase}; original {original_loss:.3f}"),
        Stat("perplexity", number(model["perplexity"], ".2f"), perplexity),
    ]
    if size := model["kv_bytes_per_token"]:
        original_size = original["kv_bytes_per_token"]
        remark = f"{percent(round(size / original_size, 4))}; original {original_size:,}"
        stats.append(Stat("KV cache, bytes per token", f"{size:,}", remark))
    if (baseline := candidate.get("baseline_loss")) is not None:
        remark = f"{baseline - original_loss:+z.3f}; same number of training steps"
        stats.append(Stat("baseline, held-out loss", number(baseline), remark))
        step = candidate.get("best_step")
        steps = candidate.get("steps")
        remark = (
            f"of {steps}" if step else f"the untrained conversion; {steps} steps did not improve it"
        )
        stats.append(Stat("best training step", f"{step}", remark))
    left = candidate.get("relaxation_remaining")
    if left is not None and relaxation_left(left):
        remark = f"{left:.0%} was left when heads were fused"
        stats.append(Stat("relaxation", "unfinished", remark))
    return stats


def _sequences(model: PromotedModel, original: OriginalRecord) -> list[Stat]:
    """Return how many sequences fit with the weights, for an existing model of a GB or more."""
    folder = Path(model["path"] or "")
    size = model["kv_bytes_per_token"]
    if not size or not (folder / "config.json").is_file():
        return []
    context = min(_CONTEXT, Checkpoint.open(folder).geometry.max_positions)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if weights < _MIN_WEIGHTS:
        return []
    sequences = sequences_that_fit(_GPU_MEMORY, weights, size, context)
    remark = "with the weights"
    if "parameters" in original:
        own_weights = original["parameters"] * BYTES[original["dtype"]]
        own_size = original["kv_bytes_per_token"]
        if before := sequences_that_fit(_GPU_MEMORY, own_weights, own_size, context):
            remark = f"{sequences / before:.3g} times the {before:,} of the original"
    name = f"sequences of {context:,} tokens in {_GPU_MEMORY // 2**30} GiB of GPU memory"
    return [Stat(name, f"{sequences:,}", remark)]


def sequences_that_fit(memory: int, weights: int, kv_bytes_per_token: int, context: int) -> int:
    """Return how many sequences of `context` tokens fit in `memory` bytes with the weights.

    Other memory of an engine is not counted.
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
    """Return which engines load the model, and the results of their checks."""
    rows = []
    for service in model["serve"]:
        if "why_not" in service:
            rows.append((service["engine"], "no", "", service["why_not"]))
        else:
            target = service.get("target")
            how = f"headfold export --target {target}" if target else "as it is"
            rows.append(
                (service["engine"], "yes", f"{service.get('kv_bytes_per_token', 0):,}", how)
            )
    tables = []
    if rows:
        tables.append(Table(("engine", "supported", "KV bytes/token", "how"), rows, intro=_SUPPORT))
    for folder in dict.fromkeys(filter(None, (candidate.get("served"), model["path"]))):
        report = Path(folder) / EXPORT
        if report.is_file() and (checks := engine_checks(read_json(report))).rows:
            tables.append(with_intro(checks, _CHECKED))
    return tables
