"""`headfold convert` with several ratios: loss against KV bytes before any training, from one calibration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.config import ConfigError
from orchestrator.convert import Source
from orchestrator.results import write_json
from search_spaces.planning import nearest_budget
from search_spaces.recipe import Recipe


def parse_ratios(text: str) -> list[float]:
    """`0.9,0.5` -> [0.9, 0.5]. Raises ConfigError for anything but numbers."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found:
        raise ConfigError(f"kv_ratio: expected a number or a list like 0.5,0.25, got {text!r}")
    return list(dict.fromkeys(found))


def convert_curve(
    model: str | Path, recipe: str | Recipe, kv_ratios: Sequence[float], out: str | Path | None = None, **settings: Any
) -> dict[str, Any]:
    """Convert at each ratio; `settings` are those of `Source.load`.

    A ratio that the recipe cannot meet stands for the largest budget below it, each budget once. With `out`: a
    checkpoint in `kv-RATIO`, `curve.json` and `curve.png` there. Returns the record of `curve.json`: what all points
    share, and `points`, by falling budget. Raises as `convert_checkpoint` does.
    """
    source = Source.load(model, recipe, kv_ratios, nearest=True, **settings)
    geometry = source.context.geometry
    budgets: dict[Any, float] = {}  # the budget that can be met -> the first ratio that asked for it
    for ratio in sorted(kv_ratios, reverse=True):
        budgets.setdefault(nearest_budget(source.recipe, ratio, geometry), ratio)
    points = []
    for budget, asked in budgets.items():
        folder = None if out is None else Path(out) / f"kv-{asked:g}"
        points.append(source.at(budget, folder) | {"kv_ratio_asked": asked})
    shared = ("model", "recipe", "loss_base", "eval_tokens", "calibration_tokens", "seed", "dtype")
    record = {
        **{name: points[0][name] for name in shared},
        "kv_bytes_per_token_base": source.base_bytes,
        "points": [{k: v for k, v in point.items() if k not in shared} for point in points],
    }
    if out is not None:
        from orchestrator.figures import curve_figure, save_png

        write_json(Path(out) / "curve.json", record)
        save_png(curve_figure(record), Path(out) / "curve.png")
    return record
