"""Heads of a checkpoint, from the record of `orchestrator.conversion.inspection.measure_heads`."""

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
    COLOURS,
    SIDE_TITLES,
    STYLE,
    legend_below,
    single_axes,
    styled,
    styles_of,
    write_cells,
)
from orchestrator.reporting.figures.increases import INCREASE_LABEL, IncreaseAxis

MAX_LAYERS = 8  # whose pairs of heads are drawn; of deeper models evenly spaced ones
_LOWEST = 1e-3  # nats: smaller increases have the lightest colour
_MAX_ROWS = 24  # up to which cells carry their number
_MAX_COLUMNS = 12
_MAP_STYLE = {**STYLE, "axes.spines.left": False, "axes.spines.bottom": False}


@matplotlib.rc_context(_MAP_STYLE)
def sensitivity_figure(record: Mapping[str, Any]) -> Figure:
    """Draw the increase of the loss for each layer and head count, keys and values side by side."""
    layers = record["sensitivity"]
    counts = sorted(
        {int(count) for layer in layers for side in SIDE_TITLES for count in layer[side]}
    )
    tables = {
        side: np.array([[layer[side].get(str(n), np.nan) for n in counts] for layer in layers])
        for side in SIDE_TITLES
    }
    highest = max(float(np.nanmax(table)) for table in tables.values())
    norm = LogNorm(_LOWEST, max(highest, 2 * _LOWEST))
    height = 1.5 + (0.3 if len(layers) <= 12 else 0.18) * len(layers)
    figure = Figure(figsize=(7, height), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    image: Any = None
    for axes, (side, table) in zip(panels, tables.items(), strict=True):
        axes.grid(False)
        clipped = np.clip(table, _LOWEST, None)
        image = axes.imshow(clipped, cmap="YlOrRd", norm=norm, aspect="auto")
        if table.shape[0] <= _MAX_ROWS and table.shape[1] <= _MAX_COLUMNS:
            write_cells(axes, table, _short, lambda x: norm(max(x, _LOWEST)) > 0.62, 7.5)
        axes.set_title(SIDE_TITLES[side], loc="left", fontsize=11)
        axes.set_xticks(range(len(counts)), [str(count) for count in counts], fontsize=9)
        axes.set_xlabel("heads kept in this layer")
        axes.tick_params(length=0)
    panels[0].set_ylabel("layer")
    ticks = range(0, len(layers), max(1, len(layers) // 16))
    panels[0].set_yticks(ticks, [str(layer) for layer in ticks], fontsize=9)
    aspect = 15 if len(layers) < 8 else 30
    bar = figure.colorbar(image, ax=list(panels), pad=0.02, aspect=aspect)
    bar.ax.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
    _finish_colorbar(bar, "increase, nats per token")
    return figure


def _finish_colorbar(bar: Any, label: str) -> None:
    bar.ax.tick_params(labelsize=8)
    bar.set_label(label, fontsize=9)
    bar.outline.set_visible(False)


def _short(increase: float) -> str:
    """Return an increase in at most four characters: 1.8, .23, .004, 0."""
    if np.isnan(increase):
        return ""
    if abs(increase) < 5e-4:
        return "0"
    digits = 1 if abs(increase) >= 0.995 else 2 if abs(increase) >= 0.0995 else 3
    text = f"{increase:.{digits}f}"
    return text.replace("0.", ".", 1) if digits > 1 else text


@matplotlib.rc_context(_MAP_STYLE)
def pairs_figure(record: Mapping[str, Any]) -> Figure:
    """Draw the mean cosine of every pair of stored heads, unaligned and aligned, per layer.

    The diagonal is left out.
    """
    layers = evenly(record["similarity"], MAX_LAYERS)
    kinds = [(side, kind) for side in SIDE_TITLES for kind in ("raw", "aligned")]
    matrices = [[_off_diagonal(layer[side][kind]) for side, kind in kinds] for layer in layers]
    cosines = [matrix for row in matrices for matrix in row if not np.isnan(matrix).all()]
    highest = max(float(np.nanmax(np.abs(matrix))) for matrix in cosines)
    colours = matplotlib.colormaps["RdBu_r"].with_extremes(bad="#cccccc")
    figure = Figure(figsize=(7, 0.7 + 1.5 * len(layers)), layout="constrained")
    grid = figure.subplots(len(layers), 4, squeeze=False)
    image: Any = None
    for row, layer, layer_matrices in zip(grid, layers, matrices, strict=True):
        for axes, matrix in zip(row, layer_matrices, strict=True):
            axes.grid(False)
            image = axes.imshow(matrix, cmap=colours, vmin=-highest, vmax=highest)
            axes.set_xticks([])
            axes.set_yticks([])
        row[0].set_ylabel(f"layer {layer['layer']}", fontsize=9)
    names = {"raw": "as they are", "aligned": "aligned"}
    for axes, (side, kind) in zip(grid[0], kinds, strict=True):
        axes.set_title(f"{SIDE_TITLES[side]},\n{names[kind]}", fontsize=9.5)
    bar = figure.colorbar(image, ax=grid, shrink=min(1.0, 3 / len(layers)), pad=0.02)
    _finish_colorbar(bar, "mean cosine of two heads")
    return figure


@styled
def redundancy_figure(record: Mapping[str, Any]) -> Figure:
    """Draw the mean CKA of the pairs of heads of each layer: a line each of queries, keys, values.

    A side of one head per layer has no line.
    """
    layers = record["redundancy"]
    figure, axes = single_axes(3.2, "layer", "mean CKA of two heads")
    lines = {}
    titles = {"query": "Queries", **SIDE_TITLES}
    for colour, (side, title) in zip(COLOURS, titles.items(), strict=False):
        means = [np.nan if layer[side] is None else layer[side] for layer in layers]
        if not np.isnan(means).all():
            (lines[title],) = axes.plot(means, marker="o", ms=4, color=colour)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    legend_below(figure, lines)
    return figure


def _off_diagonal(matrix: Sequence[Sequence[float]]) -> np.ndarray:
    table = np.array(matrix, dtype=float)
    np.fill_diagonal(table, np.nan)
    return table


def evenly(items: Sequence[Any], max_items: int) -> list[Any]:
    """Return at most `max_items` of `items`, including the first and the last."""
    if len(items) <= max_items:
        return list(items)
    return [items[round(i * (len(items) - 1) / (max_items - 1))] for i in range(max_items)]


@styled
def recipes_figure(record: Mapping[str, Any]) -> Figure | None:
    """Draw the increase of the held-out loss by recipe, untrained, one mark per KV ratio.

    Returns:
        None if nothing could be converted.
    """
    entries = [entry for entry in record["recipes"] if "loss_increase" in entry]
    if not entries:
        return None
    names = list(dict.fromkeys(entry["recipe"] for entry in entries))
    ratios = sorted({entry["kv_ratio_asked"] for entry in entries}, reverse=True)
    styles = styles_of(map(percent, ratios))
    figure, axes = single_axes(1.8 + 0.36 * len(names), INCREASE_LABEL)
    axis = IncreaseAxis(entry["loss_increase"] for entry in entries)
    axis.put_on(axes, "x")
    handles = {}
    for index, ratio in enumerate(ratios):
        style = styles[percent(ratio)]
        shift = 0.22 * (index - (len(ratios) - 1) / 2)
        for entry in entries:
            if entry["kv_ratio_asked"] == ratio:
                x = axis.at(entry["loss_increase"])
                axes.plot(x, names.index(entry["recipe"]) + shift, ls="", ms=7, **style)
        label = f"{percent(ratio)} of the KV cache"
        handles[label] = Line2D([], [], ls="", **style)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    legend_below(figure, handles)
    return figure
