"""Texts and tables of `headfold inspect` for page and terminal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention.base.text import number
from attention.base.timing import clock
from attention.cache_formats import format_advice
from attention.ratios import percent
from orchestrator.reporting.comparison import NO_VALUE
from orchestrator.reporting.console import console
from orchestrator.reporting.evaluation_tables import eval_text_of, increase_of
from orchestrator.reporting.tables import Table
from orchestrator.storage.records import unmet
from trainers.evaluation import perplexity

RECIPE_COLUMNS = (
    "recipe",
    "KV requested",
    "KV kept",
    "KV bytes/token",
    "loss",
    "perplexity",
    "loss increase",
    "KL",
    "fit steps per layer",
    "time",
)


def lead(record: Mapping[str, Any]) -> str:
    """Return the best conversion of each KV ratio, the checkpoint, and its most sensitive heads.

    One line each.
    """
    sentences = []
    formats = record.get("cache_formats") or []
    for budget in record["budgets"]:
        share = budget.get("byte_share", budget["kv_ratio_asked"])
        if advice := format_advice(formats, share, record["model"]):
            sentences.append(f"{advice}.")
    for budget in record["budgets"]:
        ratio = budget["kv_ratio_asked"]
        if (best := best_entry(record, ratio)) is not None:
            sentences.append(
                f"{percent(ratio)} of the KV cache{unmet(budget)}: loss "
                f"{increase_of(best)} by {best['recipe']}{fit_note(best)}."
            )
    sentences.append(
        f"Original model: {record['family']}, {record['layers']} layers of {record['heads']} query "
        f"heads over {record['kv_heads']} KV heads of {record['head_dim']}, "
        f"{record['kv_bytes_per_token']:,} KV bytes per token, held-out loss "
        f"{record['original_loss']:.3f} nats per token, perplexity "
        f"{record['original_perplexity']:.2f}, on {eval_text_of(record)} (calibrated on "
        f"{record['calibration_tokens']:,} of {record['calibration_data']})."
    )
    if sites := sensitive_sites(record):
        increase, side, layer = sites[0]
        sentences.append(
            f"Most sensitive: the {side}s of layer {layer} ({increase:+.2f} with one head)."
        )
    return "\n".join(sentences)


def best_entry(record: Mapping[str, Any], ratio: float) -> Mapping[str, Any] | None:
    """Return the entry of the lowest loss at a requested KV ratio."""
    entries = [
        entry
        for entry in record["recipes"]
        if entry["kv_ratio_asked"] == ratio and "loss_increase" in entry
    ]
    return min(entries, key=lambda entry: entry["loss_increase"], default=None)


def fit_note(entry: Mapping[str, Any]) -> str:
    """Return how long the layers of an entry were fitted; empty if they were not."""
    if (steps := entry.get("fit_steps")) is None:
        return ""
    convert_steps = entry["fit_steps_of_convert"]
    note = f", refined in {steps} steps per layer"
    return note + (f" (convert takes {convert_steps})" if convert_steps > steps else "")


def next_step(record: Mapping[str, Any]) -> str | None:
    """Return the command that converts by the best recipe at the largest KV ratio, if any."""
    ratio = max(entry["kv_ratio_asked"] for entry in record["budgets"])
    best = best_entry(record, ratio)
    if best is None:
        return None
    words = ["--model", record["model"], "--recipe", best["recipe"], "--kv-ratio", f"{ratio:g}"]
    words += ["--data", record["calibration_data"], *record.get("options", ())]
    words += ["--out", f"{Path(record['model']).name}-kv"]
    return shlex.join(["headfold", "convert", *words])


def sensitive_sites(record: Mapping[str, Any]) -> list[tuple[float, str, int]]:
    """Return increase with the fewest heads, side and layer of each site, the largest first."""
    sites = []
    for entry in record["sensitivity"]:
        for side in ("key", "value"):
            increases = entry[side]
            if increases:
                sites.append((increases[min(increases, key=int)], side, entry["layer"]))
    return sorted(sites, reverse=True)


def recipe_table(record: Mapping[str, Any]) -> Table:
    """Return every recipe at every KV ratio; the lowest loss of each ratio is marked."""
    rows = []
    marked = set()
    for index, entry in enumerate(record["recipes"]):
        ratio = entry["kv_ratio_asked"]
        cells = ["not possible", *["-"] * 6]
        if "loss_increase" in entry:
            cells = [
                percent(entry["kv_ratio"]),
                f"{entry['kv_bytes_per_token']:,}",
                number(entry["loss"]),
                number(perplexity(entry["loss"]), ".2f"),
                increase_of(entry),
                number(entry["kl"]),
                str(entry.get("fit_steps", NO_VALUE)),
            ]
            if entry is best_entry(record, ratio):
                marked.add(index)
        rows.append((entry["recipe"], percent(ratio), *cells, clock(entry["seconds"])))
    intro = "The lowest loss at each KV ratio: bold."
    return Table(RECIPE_COLUMNS, rows, frozenset(marked), intro)


def format_table(record: Mapping[str, Any]) -> Table:
    """Return a row for each cache format of an engine: the checkpoint as it is, in that cache."""
    rows = [
        [
            entry["cache_format"],
            ", ".join(entry["engines"]),
            percent(entry["share"]),
            f"{entry['kv_bytes_per_token']:,}",
            increase_of(entry),
            "; ".join(entry["flags"]),
        ]
        for entry in record["cache_formats"]
    ]
    columns = ("cache format", "engine", "of 16 bits", "bytes/token", "loss increase", "flags")
    return Table(columns, rows)


def agreement_table(record: Mapping[str, Any]) -> Table:
    """Return a row per layer: moves, then rank correlation and spread of the losses by side."""
    sites = {(site["layer"], site["side"]): site for site in record["agreement"]}
    rows = []
    for layer in range(record["layers"]):
        row = [str(layer), str(sites[layer, "key"]["moves"])]
        for side in ("key", "value"):
            site = sites[layer, side]
            row += [number(site["spearman"], ".2f"), f"{site['spread']:.2g}"]
        rows.append(row)
    columns = ("layer", "moves", "keys: rank", "keys: spread", "values: rank", "values: spread")
    return Table(columns, rows)


def print_inspection(record: Mapping[str, Any]) -> None:
    """Print an inspection as tables."""
    out = console()
    out.print(lead(record) + "\n", markup=False)
    if record.get("cache_formats"):
        out.print("The original model with the cache formats of engines, without conversion:")
        out.print(format_table(record).for_terminal(), "\n")
    for side in ("key", "value"):
        counts = list(record["sensitivity"][0][side])
        out.print(
            f"Loss increase when only the {side}s of one layer are fused into this many heads:"
        )
        rows = [
            [str(entry["layer"]), *(number(entry[side].get(count), "+z.3f") for count in counts)]
            for entry in record["sensitivity"]
        ]
        out.print(Table(("layer", *counts), rows).for_terminal(), "\n")
    out.print("Heads kept in each layer (keys/values), and the sum of the increases:")
    rows = []
    for budget in record["budgets"]:
        heads = zip(budget["key"], budget["value"], strict=True)
        rows.append(
            [
                percent(budget["kv_ratio"]) + unmet(budget),
                f"{budget['kv_bytes_per_token']:,}",
                f"{budget['sum_of_increases']:+z.3f}",
                " ".join(f"{keys}/{values}" for keys, values in heads),
            ]
        )
    columns = ("KV kept", "bytes/token", "sum", "layers from the first")
    out.print(Table(columns, rows).for_terminal(), "\n")
    out.print(
        f"Each recipe before any training, on {eval_text_of(record)} (± standard error; * lowest "
        "at its KV ratio):",
        markup=False,
    )
    out.print(recipe_table(record).for_terminal(star=True))
    for entry in record["recipes"]:
        if "why_not" in entry:
            out.print(
                f"{entry['recipe']} at {percent(entry['kv_ratio_asked'])}: {entry['why_not']}",
                markup=False,
            )
    if record["agreement"]:
        out.print("\nRank correlation of the layer-output score with the loss of the whole model:")
        out.print(agreement_table(record).for_terminal())
    if (command := next_step(record)) is not None:
        print(f"\nnext: {command}")
