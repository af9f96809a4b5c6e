"""What `headfold inspect` shows: one self-contained page, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from attention.plan import AttentionPlan
from orchestrator.reporting import figures
from orchestrator.reporting.comparison import OF_THE_CHECKPOINT
from orchestrator.reporting.console import console
from orchestrator.reporting.durations import clock
from orchestrator.reporting.html_tables import table, text
from orchestrator.reporting.report_page import LIMIT, page, picture, section
from orchestrator.storage.outputs import write_page
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


def write_inspection(record: Mapping[str, Any], out: str | Path) -> Path:
    """Write the page of a record of `inspect_checkpoint`; returns its path. Raises ConfigError for somebody's file."""
    content = build_page(record)
    if len(content.encode()) > LIMIT:
        raise RuntimeError(f"the page has {len(content.encode())} bytes, more than {LIMIT}; this is a bug")
    return write_page(out, content)


def build_page(record: Mapping[str, Any]) -> str:
    """The HTML of a record. No script, no network."""
    name = Path(record["model"]).name or record["model"]
    plans = {
        f"{percent(b['kv_ratio'])} of the checkpoint's KV,": AttentionPlan.from_dict(b["plan"])
        for b in record["budgets"]
    }
    drawn = len(figures.evenly(record["similarity"], figures.LAYERS))
    pairs = PAIRS if drawn == record["layers"] else f"{PAIRS} {drawn} of {record['layers']} layers are drawn."
    compared = figures.recipes_figure(record)
    parts = [
        f"<h1>Headfold inspection: {text(name)}</h1>",
        f'<p class="lead">{text(lead(record))}</p>',
        section("Where the loss is sensitive", picture(figures.sensitivity_figure(record), SENSITIVITY)),
        section("Heads kept at each budget", picture(figures.budgets_figure(plans), BUDGETS)),
        section("Which heads are alike", picture(figures.pairs_figure(record), pairs)),
    ]
    if compared is not None:
        parts.append(section("What each recipe costs", picture(compared, RECIPES) + recipe_table(record)))
    if record["agreement"]:
        parts.append(section("Cheap score against the whole model", f"<p>{AGREEMENT}</p>" + agreement_table(record)))
    parts.append(section("How this was made", _provenance(record)))
    return page(f"Headfold: {name}", "\n".join(parts))


def lead(record: Mapping[str, Any]) -> str:
    """What the checkpoint is, where it is sensitive, and the best found, in two or three sentences."""
    heads = f"{record['heads']} query heads over {record['kv_heads']} KV heads of {record['head_dim']}"
    told = (
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
        told += f" Most sensitive: the {side}s of layer {layer} ({increase:+.2f} with one head)."
    for budget in record["budgets"]:
        asked = budget["kv_ratio_asked"]
        mine = [e for e in record["recipes"] if e["kv_ratio_asked"] == asked and "loss_increase" in e]
        if mine:
            best = min(mine, key=lambda entry: entry["loss_increase"])
            told += f" {percent(asked)} of the checkpoint's KV{unmet(budget)}: "
            told += f"{best['loss_increase']:+.3f} by {best['recipe']}."
    return told


def recipe_table(record: Mapping[str, Any]) -> str:
    """Every recipe at every ratio; the lowest loss of each ratio bold."""
    rows = []
    for entry in record["recipes"]:
        cells = _recipe_cells(entry)
        rows.append((_is_best(entry, record), "".join(f"<td>{text(cell)}</td>" for cell in cells)))
    return "<p>The lowest loss of each budget: bold.</p>" + table(RECIPE_COLUMNS, rows, len(RECIPE_COLUMNS))


RECIPE_COLUMNS = (
    "recipe",
    "asked of the checkpoint's KV",
    "kept",
    "KV bytes/token",
    "loss",
    "loss increase",
    "KL",
    "time",
)


def _recipe_cells(entry: Mapping[str, Any]) -> list[str]:
    if "loss_increase" not in entry:
        return [entry["recipe"], percent(entry["kv_ratio_asked"]), "cannot", *["-"] * 4, clock(entry["seconds"])]
    return [
        entry["recipe"],
        percent(entry["kv_ratio_asked"]),
        percent(entry["kv_ratio"]),
        f"{entry['kv_bytes_per_token']:,}",
        number(entry["loss"]),
        number(entry["loss_increase"], "+.3f"),
        number(entry["kl"]),
        clock(entry["seconds"]),
    ]


def _is_best(entry: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    increases = [
        e["loss_increase"]
        for e in record["recipes"]
        if e["kv_ratio_asked"] == entry["kv_ratio_asked"] and "loss_increase" in e
    ]
    return bool(increases) and entry.get("loss_increase") == min(increases)


AGREEMENT_COLUMNS = (
    "layer",
    "moves",
    *(f"{side}: {what}" for side in ("keys", "values") for what in ("rank", "spread")),
)


def agreement_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """One row a layer: moves, then rank correlation and spread of the losses for keys and for values."""
    sites = {(site["layer"], site["side"]): site for site in record["agreement"]}
    rows = []
    for layer in range(record["layers"]):
        keys, values = sites[layer, "key"], sites[layer, "value"]
        both = [x for site in (keys, values) for x in (number(site["spearman"], ".2f"), f"{site['spread']:.2g}")]
        rows.append([str(layer), str(keys["moves"]), *both])
    return rows


def agreement_table(record: Mapping[str, Any]) -> str:
    rows = [(False, "".join(f"<td>{text(cell)}</td>" for cell in row)) for row in agreement_rows(record)]
    return table(AGREEMENT_COLUMNS, rows, len(AGREEMENT_COLUMNS))


def _provenance(record: Mapping[str, Any]) -> str:
    recipe = record["recipe"]
    facts = {
        "checkpoint": record["model"],
        "recipe of the single places": f"{recipe['name']}: grouping {recipe['grouping']}, fusion {recipe['fusion']}",
        "text": f"{record['calibration_tokens']:,} calibration tokens, {record['eval_tokens']:,} held out",
        "seed": record["seed"],
        "number format": record["dtype"],
        "cache": record["cache"],
        "time": ", ".join(f"{name} {clock(seconds)}" for name, seconds in record["seconds"].items()),
    }
    rows = [(False, f'<td>{text(k)}</td><td class="text">{text(str(v))}</td>') for k, v in facts.items()]
    return table(("what", "value"), rows, text_from=1)


# ---- terminal -------------------------------------------------------------------------------------------------------


def print_inspection(record: Mapping[str, Any]) -> None:
    """The same as tables on the terminal."""
    out = console()
    out.print(lead(record) + "\n")
    for side in ("key", "value"):
        counts = list(record["sensitivity"][0][side])
        out.print(f"Rise of the loss when only the {side}s of a layer are fused into so many heads:")
        rows = [[str(x["layer"]), *(number(x[side].get(c), "+.3f") for c in counts)] for x in record["sensitivity"]]
        out.print(_plain(("layer", *counts), rows), "\n")
    out.print("Heads kept in each layer (keys/values), and the sum of the increases:")
    rows = []
    for b in record["budgets"]:
        kept = " ".join(f"{k}/{v}" for k, v in zip(b["key"], b["value"], strict=True))
        rows.append(
            [percent(b["kv_ratio"]) + unmet(b), f"{b['kv_bytes_per_token']:,}", f"{b['sum_of_increases']:+.3f}", kept]
        )
    out.print(_plain((OF_THE_CHECKPOINT, "bytes/token", "sum", "layers from the first"), rows), "\n")
    out.print("Each recipe before refinement and training, on held-out text (* lowest of its budget):")
    rows = [["*" if _is_best(e, record) else "", *_recipe_cells(e)] for e in record["recipes"]]
    out.print(_plain(("", *RECIPE_COLUMNS), rows))
    for entry in record["recipes"]:
        if "why_not" in entry:
            out.print(f"{entry['recipe']} at {percent(entry['kv_ratio_asked'])}: {entry['why_not']}")
    if record["agreement"]:
        out.print("\nRank correlation of the layer-output score with the loss of the whole model:")
        out.print(_plain(AGREEMENT_COLUMNS, agreement_rows(record)))


def _plain(names: tuple[str, ...], rows: list[list[str]]) -> Table:
    made = Table(box=None, pad_edge=False)
    for name in names:
        made.add_column(name, justify="left" if name in ("recipe", "layers from the first") else "right")
    for row in rows:
        made.add_row(*row)
    return made
