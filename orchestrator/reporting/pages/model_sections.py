"""The part of a page on one promoted model: what it is worth, what serves it, and what it writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention.base.text import number
from attention.checkpoint import Checkpoint
from attention.conversion.relaxation_knobs import UNFINISHED
from attention.plan import BYTES
from attention.ratios import percent
from orchestrator.reporting.card import EXPORT, engine_checks
from orchestrator.reporting.evaluation_tables import position_table, recall_table, tasks_table
from orchestrator.reporting.pages.page import Part, Section
from orchestrator.reporting.tables import Table, with_intro
from orchestrator.storage.json_files import read_json

GPU = 80 * 2**30
"""Bytes of memory of the GPU that the page counts sequences for."""
CONTEXT = 4096
"""Tokens of these sequences, of a model that takes as many."""
NAMES = {"checkpoint": "this model", "original": "original", "baseline": "baseline"}
Stat = tuple[str, str, str]


def model_part(model: Mapping[str, Any], entry: Mapping[str, Any], original: Mapping[str, Any]) -> Part:
    """A promoted model (`promoted_models`), its entry in `promotion.json`, and the record of the original model."""
    measured = {key: _named(found) for key, found in entry.get("measured", {}).items()}
    name = f"{model['label']}, {percent(model['kv_ratio'])} of the KV cache"
    stats = [*_quality(model, entry, original), *_sequences(model, original)]
    tasks = [tasks_table(measured["tasks"])] if measured.get("tasks") else []
    return Part(
        f"Promoted: {name}",
        [
            Section("At a glance", stats=stats),
            Section("How to serve it", commands=_commands(model)),
            Section("Engines", tables=_engines(model, entry)),
            Section("Tasks (± standard error)", tables=tasks),
            Section("Long contexts", tables=_long_context(measured.get("long_context"))),
            Section("What it writes", samples=measured.get("generations", ()), wide=True),
        ],
    )


def _named(found: Any) -> Any:
    """What was measured, with `checkpoint` called this model, and the models in the order in which they are read."""
    if isinstance(found, list):
        return [item | {"texts": _named(item["texts"])} for item in found]
    if not NAMES.keys() & found.keys():
        return {key: _named(inner) for key, inner in found.items()}
    return {name: found[key] for key, name in NAMES.items() if key in found}


def _quality(model: Mapping[str, Any], entry: Mapping[str, Any], original: Mapping[str, Any]) -> list[Stat]:
    own, kept = original["kv_bytes_per_token"], model["kv_bytes_per_token"]
    increase, perplexity = number(model["loss_increase"], "+.3f"), number(model["perplexity"], ".2f")
    stats = [
        ("held-out loss", number(model["loss"]), f"{increase}; original {original['loss']:.3f}"),
        ("perplexity", perplexity, f"original {math.exp(original['loss']):.2f}"),
    ]
    if kept:
        stats.append(("KV cache, bytes per token", f"{kept:,}", f"{percent(round(kept / own, 4))}; original {own:,}"))
    if (baseline := entry.get("baseline_loss")) is not None:
        step, steps = entry.get("best_step"), entry.get("steps")
        stats.append(("loss of the baseline", number(baseline), f"{baseline - original['loss']:+.3f}, trained as long"))
        remark = f"the best of {steps}" if step else f"{steps} more made it no better"
        stats.append(("training steps", f"{step}", remark))
    if (left := entry.get("relaxation_remaining")) is not None and left > UNFINISHED:
        stats.append(("relaxation", "unfinished", f"{left:.0%} of its way was left when heads were fused"))
    return stats


def _sequences(model: Mapping[str, Any], original: Mapping[str, Any]) -> list[Stat]:
    """How many sequences fit beside the weights, if the checkpoint is still there to be asked."""
    folder = Path(model["path"] or "")
    if not model["kv_bytes_per_token"] or not (folder / "config.json").is_file():
        return []
    context = min(CONTEXT, Checkpoint.open(folder).geometry.max_positions)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    mine = sequences_that_fit(GPU, weights, model["kv_bytes_per_token"], context)
    remark = "beside the weights"
    if "parameters" in original:
        heavy = original["parameters"] * BYTES[original["dtype"]]
        if before := sequences_that_fit(GPU, heavy, original["kv_bytes_per_token"], context):
            remark = f"{mine / before:.3g} x; original {before:,}"
    return [(f"sequences of {context:,} tokens on a GPU of {GPU // 2**30} GiB", f"{mine:,}", remark)]


def sequences_that_fit(memory: int, weights: int, kv_bytes_per_token: int, context: int) -> int:
    """Whole sequences of `context` tokens whose KV cache fits in `memory` beside the weights, all in bytes. What an
    engine needs besides is not counted."""
    return max(0, memory - weights) // (kv_bytes_per_token * context)


def _commands(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    serve = [(w["engine"], "\n".join(w["commands"])) for w in model["serve"] if "commands" in w]
    return [("Checkpoint", str(model["path"])), *serve] if model["path"] else []


def _engines(model: Mapping[str, Any], entry: Mapping[str, Any]) -> list[Table]:
    """What each engine would keep, and what those that were asked have shown."""
    rows = []
    for way in model["serve"]:
        if "why_not" in way:
            rows.append((way["engine"], "no", "", way["why_not"]))
        else:
            how = f"export to target {way['target']}" if way["target"] else "as it is"
            rows.append((way["engine"], "yes", f"{way['kv_bytes_per_token']:,}", how))
    tables = [Table(("engine", "holds it", "KV bytes/token", "how"), rows, intro=HOLDS)] if rows else []
    for folder in dict.fromkeys(filter(None, (entry.get("served"), model["path"]))):
        if (report := Path(folder) / EXPORT).is_file() and (shown := engine_checks(read_json(report))).rows:
            tables.append(with_intro(shown, SHOWN))
    return tables


HOLDS = "Which engines hold the model in its own bytes."
SHOWN = "What engines that loaded it have shown."


def _long_context(found: Mapping[str, Any] | None) -> list[Table]:
    if not found:
        return []
    recall = "Recall of a hidden line by context and depth: share right of four values, what hiding adds."
    return [
        with_intro(position_table(found["loss_by_position"]), "Loss by position, nats per token."),
        with_intro(recall_table(found["recall"]), recall),
    ]
