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
    recipe_table,
    sensitive_sites,
)
from orchestrator.reporting.pages.page import PagePart, PageSection, Picture, Stat, render_page
from orchestrator.reporting.tables import Table, facts_table

_SENSITIVITY = (
    "Only one place is changed at a time: the keys, or the values, of one layer are fused into so "
    "few heads, and the number in the cell is by how much the model's loss increases. Dark places "
    "need their heads; light ones can give them up almost for free. From calibration text; where "
    "the recipe fits layers, for the fitted layer."
)
_BUDGETS = (
    "Key heads and value heads kept in each layer when the places above are weighed against each "
    "other: the least sum of increases at this KV ratio. Dark: many."
)
_PAIRS = (
    "Each square is one pair of KV heads of a layer; red: they point the same way, blue: opposite "
    "ways, white: nothing in common. Aligned: after the best turn of one head that leaves the "
    "model as it is (keys before RoPE: a rotation in each rotary pair; values: any rotation). "
    "Heads of a red square lose little by being pooled. Mean cosine over calibration tokens."
)
_RECIPES = (
    "The whole checkpoint converted by each recipe, refined where the recipe says so, before any "
    "training, as convert does it: increase of the loss on held-out text, on a logarithmic axis. "
    "Groups of equal size serve as plain GQA anywhere; other recipes may need this package to run."
)
_AGREEMENT = (
    "The same exchanges of two heads scored twice: by the error of the layer's own output, which "
    "is cheap, and by the loss of the whole model. Rank: Spearman's correlation, 1 for the same "
    "order, 0 for no relation. Spread: largest minus smallest loss in nats per token; where it is "
    "tiny, the order of the losses is mostly noise."
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
        label = f"{percent(budget['kv_ratio'])} of the checkpoint's KV,"
        plans[label] = AttentionPlan.from_dict(budget["plan"])
    sensitivity = Picture(
        inspection.sensitivity_figure(record), _sensitivity_alt(record), _SENSITIVITY
    )
    budgets = Picture(budgets_figure(plans), _budgets_alt(record), _BUDGETS)
    similarity = Picture(
        inspection.pairs_figure(record), f"A map of colours for each layer. {pairs}", pairs
    )
    heads = [
        PageSection("Where the loss is sensitive", picture=sensitivity),
        PageSection("Heads kept at each KV ratio", picture=budgets),
        PageSection("Which heads are alike", picture=similarity),
    ]
    if record["agreement"]:
        title = "Cheap score against the whole model"
        heads.append(PageSection(title, text=_AGREEMENT, tables=[agreement_table(record)]))
    made = "How this was made"
    parts = [
        PagePart("What a conversion costs", _cost_sections(record)),
        PagePart("What the heads are like", heads),
        PagePart(made, [PageSection(made, tables=[_provenance(record)])]),
    ]
    return render_page(f"Headfold: {name}", f"Headfold inspection: {name}", lead(record), parts)


def _cost_sections(record: Mapping[str, Any]) -> list[PageSection]:
    """Return the best conversion of each KV ratio, and all of them."""
    figure = inspection.recipes_figure(record)
    if figure is None:
        return []
    alt = f"Loss increase of each recipe. {_RECIPES} The table of recipes has the numbers."
    stats = []
    for ratio in dict.fromkeys(budget["kv_ratio_asked"] for budget in record["budgets"]):
        if (best := best_entry(record, ratio)) is not None:
            stats += _best_stats(record, best)
    return [
        PageSection("Best at each KV ratio", stats=stats),
        PageSection("What each recipe costs", picture=Picture(figure, alt, _RECIPES)),
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
    return f"Heads kept in each layer, from the first on. {'. '.join(budgets)}."


def _provenance(record: Mapping[str, Any]) -> Table:
    recipe = record["recipe"]
    seconds = [f"{name} {clock(value)}" for name, value in record["seconds"].items()]
    return facts_table(
        {
            "checkpoint": record["model"],
            "recipe of the single places": f"{recipe['name']}: grouping {recipe['grouping']}, "
            f"fusion {recipe['fusion']}",
            "text": f"calibrated on {record['calibration_tokens']:,} tokens of "
            f"{record['calibration_data']}, measured on {eval_text_of(record)}, in sequences of "
            f"{record['sequence_length']}",
            "seed": record["seed"],
            "number format": record["dtype"],
            "cache": record["cache"],
            "time": ", ".join(seconds),
        }
    )
