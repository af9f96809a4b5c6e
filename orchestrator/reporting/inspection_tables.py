"""What `headfold inspect` says of a checkpoint in words and tables, on its page and on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention.base.text import number
from attention.base.timing import clock
from attention.ratios import percent
from orchestrator.reporting.comparison import OF_THE_CHECKPOINT, UNTOLD
from orchestrator.reporting.console import console
from orchestrator.reporting.evaluation_tables import eval_text_of, increase_of
from orchestrator.reporting.figures.inspection import fitting_told
from orchestrator.reporting.tables import Table
from orchestrator.storage.records import unmet
from trainers.evaluation import perplexity

RECIPE_COLUMNS = (
    *("recipe", "asked of the checkpoint's KV", "kept", "KV bytes/token", "loss", "perplexity", "loss increase", "KL"),
    *("steps of fit a layer", "time"),
)


def lead(record: Mapping[str, Any]) -> str:
    """The best conversion of each KV ratio, what the checkpoint is, and where it is sensitive, in a few sentences."""
    told = []
    for laid_out in record["budgets"]:
        if (best := best_entry(record, laid_out["kv_ratio_asked"])) is not None:
            told.append(
                f"{percent(laid_out['kv_ratio_asked'])} of the checkpoint's KV{unmet(laid_out)}: loss "
                f"{increase_of(best)} by {best['recipe']}{fitting_told(best)}."
            )
    heads = f"{record['heads']} query heads over {record['kv_heads']} KV heads of {record['head_dim']}"
    told.append(
        f"Original model: {record['family']}, {record['layers']} layers of {heads}, "
        f"{record['kv_bytes_per_token']:,} KV bytes per token, held-out loss "
        f"{record['original_loss']:.3f} nats per token, perplexity {record['original_perplexity']:.2f}, on "
        f"{eval_text_of(record)} (calibrated on {record['calibration_tokens']:,} of {record['calibration_data']})."
    )
    if worst := worst_places(record):
        increase, side, layer = worst[0]
        told.append(f"Most sensitive: the {side}s of layer {layer} ({increase:+.2f} with one head).")
    return " ".join(told)


def best_entry(record: Mapping[str, Any], asked: float) -> Mapping[str, Any] | None:
    """The entry of the lowest loss at a KV ratio."""
    mine = [e for e in record["recipes"] if e["kv_ratio_asked"] == asked and "loss_increase" in e]
    return min(mine, key=lambda entry: entry["loss_increase"], default=None)


def worst_places(record: Mapping[str, Any]) -> list[tuple[float, str, int]]:
    """Increase with the fewest heads, side and layer, the largest first."""
    return sorted(
        ((increase, side, layer["layer"]) for layer in record["sensitivity"] for side in ("key", "value")
         for count, increase in layer[side].items() if count == min(layer[side], key=int)),
        reverse=True,
    )  # fmt: skip


def recipe_table(record: Mapping[str, Any]) -> Table:
    """Every recipe at every KV ratio; the lowest loss of each ratio marked."""
    rows, marked = [], set()
    for index, entry in enumerate(record["recipes"]):
        numbers = ["cannot", *["-"] * 6]
        if "loss_increase" in entry:
            numbers = [
                percent(entry["kv_ratio"]),
                f"{entry['kv_bytes_per_token']:,}",
                number(entry["loss"]),
                number(perplexity(entry["loss"]), ".2f"),
                increase_of(entry),
                number(entry["kl"]),
                str(entry.get("fit_steps", UNTOLD)),
            ]
            if entry is best_entry(record, entry["kv_ratio_asked"]):
                marked.add(index)
        rows.append((entry["recipe"], percent(entry["kv_ratio_asked"]), *numbers, clock(entry["seconds"])))
    return Table(RECIPE_COLUMNS, rows, frozenset(marked), "The lowest loss at each KV ratio: bold.")


def agreement_table(record: Mapping[str, Any]) -> Table:
    """One row a layer: moves, then rank correlation and spread of the losses for keys and for values."""
    sites = {(site["layer"], site["side"]): site for site in record["agreement"]}
    rows = []
    for layer in range(record["layers"]):
        keys, values = sites[layer, "key"], sites[layer, "value"]
        both = [x for site in (keys, values) for x in (number(site["spearman"], ".2f"), f"{site['spread']:.2g}")]
        rows.append((str(layer), str(keys["moves"]), *both))
    return Table(("layer", "moves", "keys: rank", "keys: spread", "values: rank", "values: spread"), rows)


def print_inspection(record: Mapping[str, Any]) -> None:
    """The same as tables on the terminal."""
    out = console()
    out.print(lead(record) + "\n")
    for side in ("key", "value"):
        counts = list(record["sensitivity"][0][side])
        out.print(f"Loss increase when only the {side}s of a layer are fused into so many heads:")
        rows = [[str(x["layer"]), *(number(x[side].get(c), "+.3f") for c in counts)] for x in record["sensitivity"]]
        out.print(Table(("layer", *counts), rows).for_terminal(), "\n")
    out.print("Heads kept in each layer (keys/values), and the sum of the increases:")
    rows = []
    for b in record["budgets"]:
        kept = " ".join(f"{k}/{v}" for k, v in zip(b["key"], b["value"], strict=True))
        rows.append(
            [percent(b["kv_ratio"]) + unmet(b), f"{b['kv_bytes_per_token']:,}", f"{b['sum_of_increases']:+.3f}", kept]
        )
    columns = (OF_THE_CHECKPOINT, "bytes/token", "sum", "layers from the first")
    out.print(Table(columns, rows).for_terminal(), "\n")
    out.print(
        f"Each recipe before any training, on {eval_text_of(record)} (± standard error; * lowest at its KV ratio):"
    )
    out.print(recipe_table(record).for_terminal(star=True))
    for entry in record["recipes"]:
        if "why_not" in entry:
            out.print(f"{entry['recipe']} at {percent(entry['kv_ratio_asked'])}: {entry['why_not']}")
    if record["agreement"]:
        out.print("\nRank correlation of the layer-output score with the loss of the whole model:")
        out.print(agreement_table(record).for_terminal())
