"""The page of `headfold inspect`: costs of conversions, sensitive heads, similar heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention.base.text import number
from attention.base.timing import clock
from attention.plan import AttentionPlan
from attention.ratios import percent
from orchestrator.reporting.evaluation_tables import eval_text_of, increase_of
from orchestrator.reporting.figures import inspection
from orchestrator.reporting.figures.search import budgets_figure
from orchestrator.reporting.inspection_tables import (
    agreement_table,
    best_entry,
    fit_note,
    lead,
    next_step,
    recipe_table,
    sensitive_sites,
)
from orchestrator.reporting.pages.page import PagePart, PageSection, Picture, Stat, render_page
from orchestrator.reporting.tables import Table, facts_table

_SENSITIVITY = (
    "Loss increase when only the keys, or only the values, of one layer are fused into this many "
    "heads, on calibration text (after the fit where the recipe fits layers). Dark: the layer "
    "needs its heads. Light: fewer heads cost almost nothing."
)
_BUDGETS = (
    "Number of key heads and value heads kept in each layer: the choice with the lowest sum of the "
    "increases above at this KV ratio. Dark: many."
)
_PAIRS = (
    "Mean cosine similarity of each pair of KV heads of a layer over calibration tokens: red = "
    "same direction, blue = opposite, white = unrelated. Aligned: after the best rotation that "
    "does not change the model (keys before RoPE: a rotation in each rotary pair; values: any "
    "rotation). Red pairs can be merged at little cost."
)
_REDUNDANCY = (
    "Mean linear CKA of the weights of two heads of a layer, over all pairs: 1 = the same up to a "
    "rotation inside the head, 0 = unrelated. It compares weights alone, and needs no text."
)
_RECIPES = (
    "Loss increase on held-out text of the whole model, converted by each recipe as `headfold "
    "convert` does, without training. Log scale."
)
_AGREEMENT = (
    "The same exchanges of two heads, scored by the error of the layer output (cheap) and by the "
    "loss of the whole model. Rank: Spearman's correlation, 1 = same order, 0 = no relation. "
    "Spread: largest minus smallest loss, nats per token; where it is tiny, the order of the "
    "losses is mostly noise."
)
_ALT_SITES = 16  # of a picture that its description names


def build_page(record: Mapping[str, Any]) -> str:
    """Return the HTML of an `InspectionRecord` of `orchestrator.conversion.record`."""
    name = Path(record["model"]).name or record["model"]
    drawn = len(inspection.evenly(record["similarity"], inspection.MAX_LAYERS))
    pairs = _PAIRS
    if drawn != record["layers"]:
        pairs += f" {drawn} of {record['layers']} layers are drawn."
    plans = {}
    for budget in record["budgets"]:
        label = f"{percent(budget['kv_ratio'])} of the KV cache,"
        plans[label] = AttentionPlan.from_dict(budget["plan"])
    sensitivity = Picture(
        inspection.sensitivity_figure(record), _sensitivity_alt(record), _SENSITIVITY
    )
    budgets = Picture(budgets_figure(plans), _budgets_alt(record), _BUDGETS)
    similarity = Picture(
        inspection.pairs_figure(record), f"A map of colours for each layer. {pairs}", pairs
    )
    redundancy = Picture(
        inspection.redundancy_figure(record),
        f"A line over the layers each. {_REDUNDANCY}",
        _REDUNDANCY,
    )
    heads = [
        PageSection("Where the loss is sensitive", picture=sensitivity),
        PageSection("Heads kept at each KV ratio", picture=budgets),
        PageSection("Similar heads", picture=similarity, wide=True),
        PageSection("Redundancy of each layer's heads", picture=redundancy),
    ]
    if record["agreement"]:
        title = "Layer-output score compared with the loss of the model"
        heads.append(PageSection(title, text=_AGREEMENT, tables=[agreement_table(record)]))
    provenance = "How this was made"
    parts = [
        PagePart("Cost of a conversion", _cost_sections(record)),
        PagePart("Heads", heads),
        PagePart(provenance, [PageSection(provenance, tables=[_provenance(record)])]),
    ]
    return render_page(f"Headfold: {name}", f"Headfold inspection: {name}", lead(record), parts)


def _cost_sections(record: Mapping[str, Any]) -> list[PageSection]:
    """Return the best conversion of each KV ratio, and all of them."""
    figure = inspection.recipes_figure(record)
    if figure is None:
        return []
    alt = f"Loss increase of each recipe. {_RECIPES} The numbers are in the table of recipes."
    stats = []
    for ratio in dict.fromkeys(budget["kv_ratio_asked"] for budget in record["budgets"]):
        if (best := best_entry(record, ratio)) is not None:
            stats += _best_stats(record, best)
    command = next_step(record)
    commands = [] if command is None else [("Next: convert the model", command)]
    return [
        PageSection("Best at each KV ratio", stats=stats, commands=commands),
        PageSection("Loss increase of each recipe", picture=Picture(figure, alt, _RECIPES)),
        PageSection("Recipes", tables=[recipe_table(record)], wide=True),
    ]


def _best_stats(record: Mapping[str, Any], best: Mapping[str, Any]) -> list[Stat]:
    ratio = percent(best["kv_ratio"])
    return [
        Stat(
            f"{ratio} of the KV cache",
            increase_of(best),
            f"loss increase by {best['recipe']}{fit_note(best)}",
        ),
        Stat(
            f"perplexity at {ratio}",
            number(math.exp(best["loss"]), ".2f"),
            f"original {math.exp(record['original_loss']):.2f}",
        ),
        Stat(
            f"KV bytes per token at {ratio}",
            f"{best['kv_bytes_per_token']:,}",
            f"original {record['kv_bytes_per_token']:,}",
        ),
    ]


def _sensitivity_alt(record: Mapping[str, Any]) -> str:
    sites = [
        f"{side}s of layer {layer} {increase:+.2f}"
        for increase, side, layer in sensitive_sites(record)[:_ALT_SITES]
    ]
    return (
        "Loss increase by layer and number of heads kept. Largest, with the fewest heads: "
        f"{'; '.join(sites) or 'none'}."
    )


def _budgets_alt(record: Mapping[str, Any]) -> str:
    budgets = []
    for budget in record["budgets"]:
        keys = ", ".join(map(str, budget["key"][:_ALT_SITES]))
        values = ", ".join(map(str, budget["value"][:_ALT_SITES]))
        budgets.append(f"{percent(budget['kv_ratio'])}: keys {keys}; values {values}")
    return f"Heads kept in each layer, first layer first. {'. '.join(budgets)}."


def _provenance(record: Mapping[str, Any]) -> Table:
    recipe = record["recipe"]
    seconds = [f"{name} {clock(value)}" for name, value in record["seconds"].items()]
    return facts_table(
        {
            "checkpoint": record["model"],
            "recipe of the sensitivity": f"{recipe['name']}: grouping {recipe['grouping']}, "
            f"fusion {recipe['fusion']}",
            "text": f"calibrated on {record['calibration_tokens']:,} tokens of "
            f"{record['calibration_data']}, measured on {eval_text_of(record)}, in sequences of "
            f"{record['sequence_length']}",
            "seed": record["seed"],
            "dtype": record["dtype"],
            "cache": record["cache"],
            "time": ", ".join(seconds),
        }
    )
