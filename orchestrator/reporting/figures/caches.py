"""The front of a search in engine bytes: fewer heads compared with smaller cache formats."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attention.ratios import percent
from orchestrator.reporting.figures.drawing import (
    INK,
    KV_BYTES_LABEL,
    label_points,
    legend_below,
    single_axes,
    styled,
    styles_of,
)
from orchestrator.reporting.figures.increases import INCREASE_LABEL, IncreaseAxis
from orchestrator.storage.cache_points import ORIGINAL_ROLE, CachePoint, engine_front
from orchestrator.storage.records import family


@styled
def caches_figure(points: Sequence[CachePoint]) -> Figure | None:
    """Draw the loss increase of each model and cache format against bytes per token.

    A thin line joins the formats of one model; a thick one the front, whose points name their
    formats.

    Args:
        points: Of a search; without any there is no figure.
    """
    if not points:
        return None
    figure, axes = single_axes(4.8, KV_BYTES_LABEL)
    axis = IncreaseAxis(point["loss_increase"] for point in points)
    axis.put_on(axes)
    axes.set_xscale("log", base=2)
    styles = styles_of([ORIGINAL_ROLE, *(family(point["label"]) for point in points)])
    styles[ORIGINAL_ROLE] = {"color": INK, "marker": "*"}
    by_model: dict[str, list[CachePoint]] = {}
    for point in sorted(points, key=lambda point: point["kv_bytes_per_token"]):
        by_model.setdefault(point["folder"], []).append(point)
    handles = {}
    for formats in by_model.values():
        name = family(formats[0]["label"])
        sizes = [point["kv_bytes_per_token"] for point in formats]
        heights = [axis.at(point["loss_increase"]) for point in formats]
        large = 11 if name == ORIGINAL_ROLE else 6
        (line,) = axes.plot(sizes, heights, lw=0.8, alpha=0.8, ms=large, **styles[name])
        label_points(
            line,
            (
                f"{p['name']}, {p['cache_format']}: {p['kv_bytes_per_token']:,} bytes per token, "
                f"loss {p['loss_increase']:+.4f}"
                for p in formats
            ),
        )
        handles[name] = Line2D([], [], ls="", ms=6.5, **styles[name])
    best = engine_front(points)
    (handles["front"],) = axes.plot(
        [point["kv_bytes_per_token"] for point in best],
        [axis.at(point["loss_increase"]) for point in best],
        color=INK,
        lw=1.8,
        zorder=1,
    )
    for point in best:
        axes.annotate(
            point["cache_format"],
            (point["kv_bytes_per_token"], axis.at(point["loss_increase"])),
            fontsize=8,
            xytext=(-2, -5),
            textcoords="offset points",
            rotation=40,  # two formats may be close to each other
            rotation_mode="anchor",
            ha="right",
            va="top",
        )
    whole = round(points[0]["kv_bytes_per_token"] / points[0]["share"])
    halvings = math.ceil(math.log2(whole / min(point["kv_bytes_per_token"] for point in points)))
    ticks = [whole / 2**step for step in range(halvings + 1)]
    axes.set_xticks(ticks, [f"{size:,.0f}\n{percent(size / whole)}" for size in ticks])
    axes.set_xticks([], minor=True)
    axes.margins(x=0.1)
    axes.set_ylabel(INCREASE_LABEL)
    legend_below(figure, handles)
    return figure
