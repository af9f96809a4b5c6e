"""What `headfold inspect` shows: one self-contained page, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention.plan import AttentionPlan
from attention.progress import clock
from orchestrator.reporting.comparison import OF_THE_CHECKPOINT
from orchestrator.reporting.console import console
from orchestrator.reporting.figures import inspection, search
from orchestrator.reporting.page import Section, render_page
from orchestrator.reporting.tables import Table, facts_table
from orchestrator.storage.records import number, percent, unmet

SENSITIVITY = (
    "Only one place is changed at a time: the keys, or the values, of one layer are fused into so few heads, and the "
    "number in the cell is by how much the model's loss increases. Dark places need their heads; light ones can give "
    "them up almost for free. Measured on calibration text, after a short fit of the layer where the recipe fits."
)
BUDGETS = (
    "Key heads and value heads kept in each layer when the places above are weighed against each other: the least sum "
    "of increases for the budget. Dark: many. A conversion also tries plans nearer to an even one."
)
PAIRS = (
    "Each square is one pair of KV heads of a layer; red: they point the same way, blue: opposite ways, white: nothing "
    "in common. Aligned: after the best turn of one head that leaves the model as it is (keys before RoPE: a rotation "
    "in each rotary pair; values: any rotation). Heads of a red square lose little by being pooled. Mean cosine over "
    "calibration tokens."
)
RECIPES = (
    "The whole checkpoint converted by each recipe, before any refinement or training: increase of the loss on "
    "held-out text. Groups of equal size serve as plain GQA anywhere; the other recipes may need this package to run."
)
AGREEMENT = (
    "The same exchanges of two heads scored twice: by the error of the layer's own output, which is cheap, and by the "
    "loss of the whole model. Rank: Spearman's correlation, 1 for the same order, 0 for no relation. Spread: "
    "largest minus smallest loss in nats a token; where it is tiny, the order of the losses is mostly noise."
)


def build_page(record: Mapping[str, Any]) -> str:
    """The HTML of a record of `inspect_checkpoint`."""
    name = Path(record["model"]).name or record["model"]
    plans = {
        f"{percent(b['kv_ratio'])} of the checkpoint's KV,": AttentionPlan.from_dict(b["plan"])
        for b in record["budgets"]
    }
    drawn = len(inspection.evenly(record["similarity"], inspection.LAYERS))
    pairs = PAIRS if drawn == record["layers"] else f"{PAIRS} {drawn} of {record['layers']} layers are drawn."
    sections = [
        Section("Where the loss is sensitive", inspection.sensitivity_figure(record), SENSITIVITY),
        Section("Heads kept at each budget", search.budgets_figure(plans), BUDGETS),
        Section("Which heads are alike", inspection.pairs_figure(record), pairs),
    ]
    if (compared := inspection.recipes_figure(record)) is not None:
        sections.append(Section("What each recipe costs", compared, RECIPES, table=recipe_table(record)))
    if record["agreement"]:
        title = "Cheap score against the whole model"
        sections.append(Section(title, text=AGREEMENT, table=agreement_table(record)))
    sections.append(Section("How this was made", table=_provenance(record)))
    return render_page(f"Headfold: {name}", f"Headfold inspection: {name}", lead(record), sections)


def lead(record: Mapping[str, Any]) -> str:
    """What the checkpoint is, where it is sensitive, and the best found, in two or three sentences."""
    heads = f"{record['heads']} query heads over {record['kv_heads']} KV heads of {record['head_dim']}"
    text = (
        f"{record['family']}, {record['layers']} layers of {heads}: {record['kv_bytes_per_token']:,} KV bytes a token, "
        f"held-out loss {record['original_loss']:.3f} nats a token."
    )
    worst = sorted(
        ((increase, side, layer["layer"]) for layer in record["sensitivity"] for side in ("key", "value")
         for count, increase in layer[side].items() if count == min(layer[side], key=int)),
        reverse=True,
    )  # fmt: skip
    if worst:
        increase, side, layer = worst[0]
        text += f" Most sensitive: the {side}s of layer {layer} ({increase:+.2f} with one head)."
    for laid_out in record["budgets"]:
        asked = laid_out["kv_ratio_asked"]
        mine = [e for e in record["recipes"] if e["kv_ratio_asked"] == asked and "loss_increase" in e]
        if mine:
            best = min(mine, key=lambda entry: entry["loss_increase"])
            text += f" {percent(asked)} of the checkpoint's KV{unmet(laid_out)}: "
            text += f"{best['loss_increase']:+.3f} by {best['recipe']}."
    return text


def recipe_table(record: Mapping[str, Any]) -> Table:
    """Every recipe at every KV ratio; the lowest loss of each ratio marked."""
    rows, marked = [], set()
    converted = [e for e in record["recipes"] if "loss_increase" in e]
    # From the highest on, so that the lowest of each ratio stays
    ordered = sorted(converted, key=lambda e: e["loss_increase"], reverse=True)
    lowest = {e["kv_ratio_asked"]: e["loss_increase"] for e in ordered}
    for index, entry in enumerate(record["recipes"]):
        numbers = ["cannot", *["-"] * 4]
        if "loss_increase" in entry:
            numbers = [
                percent(entry["kv_ratio"]),
                f"{entry['kv_bytes_per_token']:,}",
                number(entry["loss"]),
                number(entry["loss_increase"], "+.3f"),
                number(entry["kl"]),
            ]
            if entry["loss_increase"] == lowest[entry["kv_ratio_asked"]]:
                marked.add(index)
        rows.append((entry["recipe"], percent(entry["kv_ratio_asked"]), *numbers, clock(entry["seconds"])))
    asked = "asked of the checkpoint's KV"
    columns = ("recipe", asked, "kept", "KV bytes/token", "loss", "loss increase", "KL", "time")
    return Table(columns, rows, frozenset(marked), "The lowest loss of each budget: bold.")


def agreement_table(record: Mapping[str, Any]) -> Table:
    """One row a layer: moves, then rank correlation and spread of the losses for keys and for values."""
    sites = {(site["layer"], site["side"]): site for site in record["agreement"]}
    rows = []
    for layer in range(record["layers"]):
        keys, values = sites[layer, "key"], sites[layer, "value"]
        both = [x for site in (keys, values) for x in (number(site["spearman"], ".2f"), f"{site['spread']:.2g}")]
        rows.append((str(layer), str(keys["moves"]), *both))
    return Table(("layer", "moves", "keys: rank", "keys: spread", "values: rank", "values: spread"), rows)


def _provenance(record: Mapping[str, Any]) -> Table:
    recipe = record["recipe"]
    return facts_table(
        {
            "checkpoint": record["model"],
            "recipe of the single places": f"{recipe['name']}: grouping {recipe['grouping']}, "
            f"fusion {recipe['fusion']}",
            "text": f"{record['calibration_tokens']:,} calibration tokens, {record['eval_tokens']:,} held out",
            "seed": record["seed"],
            "number format": record["dtype"],
            "cache": record["cache"],
            "time": ", ".join(f"{name} {clock(seconds)}" for name, seconds in record["seconds"].items()),
        }
    )


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
    out.print("Each recipe before refinement and training, on held-out text (* lowest of its budget):")
    out.print(recipe_table(record).for_terminal(star=True))
    for entry in record["recipes"]:
        if "why_not" in entry:
            out.print(f"{entry['recipe']} at {percent(entry['kv_ratio_asked'])}: {entry['why_not']}")
    if record["agreement"]:
        out.print("\nRank correlation of the layer-output score with the loss of the whole model:")
        out.print(agreement_table(record).for_terminal())
