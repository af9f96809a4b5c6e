"""The page of `headfold inspect`: what conversions cost, where the loss is sensitive, which heads are alike."""

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
from orchestrator.reporting.figures import inspection, search
from orchestrator.reporting.figures.inspection import fitting_told
from orchestrator.reporting.inspection_tables import agreement_table, best_entry, lead, recipe_table, worst_places
from orchestrator.reporting.pages.page import Part, Picture, Section, render_page
from orchestrator.reporting.tables import Table, facts_table

SENSITIVITY = (
    "Only one place is changed at a time: the keys, or the values, of one layer are fused into so few heads, and the "
    "number in the cell is by how much the model's loss increases. Dark places need their heads; light ones can give "
    "them up almost for free. From calibration text; where the recipe fits layers, for the fitted layer."
)
BUDGETS = (
    "Key heads and value heads kept in each layer when the places above are weighed against each other: the least sum "
    "of increases at this KV ratio. Dark: many."
)
PAIRS = (
    "Each square is one pair of KV heads of a layer; red: they point the same way, blue: opposite ways, white: nothing "
    "in common. Aligned: after the best turn of one head that leaves the model as it is (keys before RoPE: a rotation "
    "in each rotary pair; values: any rotation). Heads of a red square lose little by being pooled. Mean cosine over "
    "calibration tokens."
)
RECIPES = (
    "The whole checkpoint converted by each recipe, refined where the recipe says so, before any training, as convert "
    "does it: increase of the loss on held-out text, on a logarithmic axis. Groups of equal size serve as plain "
    "GQA anywhere; other recipes may need this package to run."
)
AGREEMENT = (
    "The same exchanges of two heads scored twice: by the error of the layer's own output, which is cheap, and by the "
    "loss of the whole model. Rank: Spearman's correlation, 1 for the same order, 0 for no relation. Spread: "
    "largest minus smallest loss in nats per token; where it is tiny, the order of the losses is mostly noise."
)


MOST_TOLD = 16  # places of a picture that its description tells


def build_page(record: Mapping[str, Any]) -> str:
    """The HTML of a record of `measure_heads`."""
    name = Path(record["model"]).name or record["model"]
    plans = {
        f"{percent(b['kv_ratio'])} of the checkpoint's KV,": AttentionPlan.from_dict(b["plan"])
        for b in record["budgets"]
    }
    drawn = len(inspection.evenly(record["similarity"], inspection.LAYERS))
    pairs = PAIRS if drawn == record["layers"] else f"{PAIRS} {drawn} of {record['layers']} layers are drawn."
    sensitive = Picture(inspection.sensitivity_figure(record), _sensitivity_told(record), SENSITIVITY)
    kept = Picture(search.budgets_figure(plans), _kept_told(record), BUDGETS)
    alike = Picture(inspection.pairs_figure(record), f"A map of colours for each layer. {pairs}", pairs)
    heads = [
        Section("Where the loss is sensitive", picture=sensitive),
        Section("Heads kept at each KV ratio", picture=kept),
        Section("Which heads are alike", picture=alike),
    ]
    if record["agreement"]:
        title = "Cheap score against the whole model"
        heads.append(Section(title, text=AGREEMENT, tables=[agreement_table(record)]))
    parts = [
        Part("What a conversion costs", _cost_sections(record)),
        Part("What the heads are like", heads),
        Part("How this was made", [Section("How this was made", tables=[_provenance(record)])]),
    ]
    return render_page(f"Headfold: {name}", f"Headfold inspection: {name}", lead(record), parts)


def _cost_sections(record: Mapping[str, Any]) -> list[Section]:
    """The best conversion of each KV ratio, and all of them."""
    stats = []
    for asked in dict.fromkeys(budget["kv_ratio_asked"] for budget in record["budgets"]):
        if (best := best_entry(record, asked)) is not None:
            stats += [
                (f"{percent(best['kv_ratio'])} of the KV cache", increase_of(best),
                 f"loss increase by {best['recipe']}{fitting_told(best)}"),
                (f"perplexity at {percent(best['kv_ratio'])}", number(math.exp(best["loss"]), ".2f"),
                 f"original {math.exp(record['original_loss']):.2f}"),
                (f"KV bytes per token at {percent(best['kv_ratio'])}", f"{best['kv_bytes_per_token']:,}",
                 f"original {record['kv_bytes_per_token']:,}"),
            ]  # fmt: skip
    if (compared := inspection.recipes_figure(record)) is None:
        return []
    alt = f"Loss increase of each recipe. {RECIPES} The table of recipes has the numbers."
    return [
        Section("Best at each KV ratio", stats=stats),
        Section("What each recipe costs", picture=Picture(compared, alt, RECIPES)),
        Section("Recipes", tables=[recipe_table(record)], wide=True),
    ]


def _sensitivity_told(record: Mapping[str, Any]) -> str:
    worst = "; ".join(
        f"{side}s of layer {layer} {increase:+.2f}" for increase, side, layer in worst_places(record)[:MOST_TOLD]
    )
    return f"Loss increase by layer and number of heads kept. Largest, with the fewest heads: {worst or 'none'}."


def _kept_told(record: Mapping[str, Any]) -> str:
    told = [
        f"{percent(b['kv_ratio'])}: keys {', '.join(map(str, b['key'][:MOST_TOLD]))}; values "
        f"{', '.join(map(str, b['value'][:MOST_TOLD]))}"
        for b in record["budgets"]
    ]
    return f"Heads kept in each layer, from the first on. {'. '.join(told)}."


def _provenance(record: Mapping[str, Any]) -> Table:
    recipe = record["recipe"]
    return facts_table(
        {
            "checkpoint": record["model"],
            "recipe of the single places": f"{recipe['name']}: grouping {recipe['grouping']}, "
            f"fusion {recipe['fusion']}",
            "text": f"calibrated on {record['calibration_tokens']:,} tokens of {record['calibration_data']}, "
            f"measured on {eval_text_of(record)}, in sequences of {record['sequence_length']}",
            "seed": record["seed"],
            "number format": record["dtype"],
            "cache": record["cache"],
            "time": ", ".join(f"{name} {clock(seconds)}" for name, seconds in record["seconds"].items()),
        }
    )
