"""Pictures of a checkpoint's heads, from the record of `orchestrator.conversion.inspection.measure_heads`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attention.ratios import percent
from orchestrator.reporting.figures.drawing import (
    STYLE,
    legend_below,
    looks_of,
    one_axes,
    styled,
    write_cells,
)
from orchestrator.reporting.figures.increases import INCREASE, IncreaseAxis

TITLES = {"key": "keys", "value": "values"}
LEAST = 1e-3  # nats: increases below it have the lightest colour
LAYERS = 8  # layers whose pairs of heads are drawn; of deeper models evenly spaced ones
NUMBERS = (24, 12)  # rows and columns up to which cells carry their number


def sensitivity_figure(record: Mapping[str, Any]) -> Figure:
    """Increase of the loss for each layer and head count, keys and values side by side on one scale of colours."""
    layers = record["sensitivity"]
    counts = sorted({int(count) for layer in layers for side in TITLES for count in layer[side]})
    tables = {
        side: np.array([[layer[side].get(str(c), np.nan) for c in counts] for layer in layers]) for side in TITLES
    }
    highest = max(float(np.nanmax(table)) for table in tables.values())
    norm = LogNorm(LEAST, max(highest, 2 * LEAST))
    with matplotlib.rc_context({**STYLE, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(7, 1.5 + (0.3 if len(layers) <= 12 else 0.18) * len(layers)), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        image: Any = None
        for axes, (side, table) in zip(panels, tables.items(), strict=True):
            axes.grid(False)
            image = axes.imshow(np.clip(table, LEAST, None), cmap="YlOrRd", norm=norm, aspect="auto")
            if table.shape[0] <= NUMBERS[0] and table.shape[1] <= NUMBERS[1]:
                write_cells(axes, table, _short, lambda increase: norm(max(increase, LEAST)) > 0.62, 7.5)
            axes.set_title(TITLES[side], loc="left", fontsize=11)
            axes.set_xticks(range(len(counts)), [str(count) for count in counts], fontsize=9)
            axes.set_xlabel("heads kept at this place")
            axes.tick_params(length=0)
        panels[0].set_ylabel("layer")
        step = max(1, len(layers) // 16)
        panels[0].set_yticks(range(0, len(layers), step), [str(i) for i in range(0, len(layers), step)], fontsize=9)
        bar = figure.colorbar(image, ax=list(panels), pad=0.02, aspect=15 if len(layers) < 8 else 30)
        bar.ax.tick_params(labelsize=8)
        bar.ax.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
        bar.set_label("increase, nats per token", fontsize=9)
        bar.outline.set_visible(False)  # type: ignore[operator]
        return figure


def _short(increase: float) -> str:
    """An increase in at most four characters: 1.8, .23, .004, 0."""
    if np.isnan(increase):
        return ""
    if abs(increase) < 5e-4:
        return "0"
    digits = 1 if abs(increase) >= 0.995 else 2 if abs(increase) >= 0.0995 else 3
    text = f"{increase:.{digits}f}"
    return text.replace("0.", ".", 1) if digits > 1 else text


def pairs_figure(record: Mapping[str, Any]) -> Figure:
    """Mean cosine of every pair of stored heads, as they are and aligned: a row a layer, the diagonal left out."""
    shown = evenly(record["similarity"], LAYERS)
    kinds = [(side, kind) for side in TITLES for kind in ("raw", "aligned")]
    matrices = [[_off_diagonal(layer[side][kind]) for side, kind in kinds] for layer in shown]
    most = max(float(np.nanmax(np.abs(m))) for row in matrices for m in row if not np.isnan(m).all())
    cmap = matplotlib.colormaps["RdBu_r"].with_extremes(bad="#cccccc")
    with matplotlib.rc_context({**STYLE, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(7, 0.7 + 1.5 * len(shown)), layout="constrained")
        grid = figure.subplots(len(shown), 4, squeeze=False)
        image: Any = None
        for row, layer, mine in zip(grid, shown, matrices, strict=True):
            for axes, matrix in zip(row, mine, strict=True):
                axes.grid(False)
                image = axes.imshow(matrix, cmap=cmap, vmin=-most, vmax=most)
                axes.set_xticks([])
                axes.set_yticks([])
            row[0].set_ylabel(f"layer {layer['layer']}", fontsize=9)
        names = {"raw": "as they are", "aligned": "aligned"}
        for axes, (side, kind) in zip(grid[0], kinds, strict=True):
            axes.set_title(f"{TITLES[side]},\n{names[kind]}", fontsize=9.5)
        bar = figure.colorbar(image, ax=grid, shrink=min(1.0, 3 / len(shown)), pad=0.02)
        bar.ax.tick_params(labelsize=8)
        bar.set_label("mean cosine of two heads", fontsize=9)
        bar.outline.set_visible(False)  # type: ignore[operator]
        return figure


def _off_diagonal(matrix: Sequence[Sequence[float]]) -> np.ndarray:
    table = np.array(matrix, dtype=float)
    np.fill_diagonal(table, np.nan)
    return table


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of `items`, first and last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


@styled
def recipes_figure(record: Mapping[str, Any]) -> Figure | None:
    """Increase of the held-out loss by recipe, untrained, one mark a KV ratio. None if nothing could be converted."""
    entries = [entry for entry in record["recipes"] if "loss_increase" in entry]
    if not entries:
        return None
    names = list(dict.fromkeys(entry["recipe"] for entry in entries))
    asked = sorted({entry["kv_ratio_asked"] for entry in entries}, reverse=True)
    figure, axes = one_axes(1.8 + 0.36 * len(names), INCREASE)
    axis = IncreaseAxis(entry["loss_increase"] for entry in entries)
    axis.put_on(axes, "x")
    handles = {}
    for place, (ratio, look) in enumerate(zip(asked, looks_of(map(percent, asked)).values(), strict=True)):
        apart = 0.22 * (place - (len(asked) - 1) / 2)
        for entry in (entry for entry in entries if entry["kv_ratio_asked"] == ratio):
            axes.plot(axis.at(entry["loss_increase"]), names.index(entry["recipe"]) + apart, ls="", ms=7, **look)
        handles[f"{percent(ratio)} of the checkpoint's KV"] = Line2D([], [], ls="", **look)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    legend_below(figure, handles)
    return figure


def fitting_told(entry: Mapping[str, Any]) -> str:
    """How long the layers of an entry were fitted, in words; empty if they were not."""
    if (steps := entry.get("fit_steps")) is None:
        return ""
    usual = entry["fit_steps_of_convert"]
    return f", refined in {steps} steps a layer" + (f" (convert: {usual})" if usual > steps else "")
