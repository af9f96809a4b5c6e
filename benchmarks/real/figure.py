"""docs/images/real.png from the records of `make real`: loss increase against the bytes of the cache in an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.records import Records
from orchestrator.reporting.figures.drawing import COLOURS, INK, legend_below, save_png, single_axes, styled
from search_spaces.recipes.catalogue import NAMED_RECIPES

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "real.png"
LEAST = 0.002
"""Nats per token: what is below is drawn here, since a logarithmic axis has no zero."""
ORIGINAL = "original model, cache format of the engine"
FEWER_HEADS = "Headfold, 16-bit cache"
BOTH = "Headfold and a cache format"
PUBLISHED = "published method, 16-bit cache"
PUBLISHED_FITTED = "published method and Headfold's local fit"
STYLES = {
    ORIGINAL: {"color": INK, "marker": "*", "ms": 11},
    BOTH: {"color": COLOURS[0], "marker": "o", "ms": 7},
    FEWER_HEADS: {"color": COLOURS[0], "marker": "o", "ms": 7, "mfc": "white"},
    PUBLISHED: {"color": COLOURS[1], "marker": "s", "ms": 6.5},
    PUBLISHED_FITTED: {"color": COLOURS[1], "marker": "s", "ms": 6.5, "mfc": "white"},
}
_CITED = {named.recipe.name for named in NAMED_RECIPES if named.papers}


class Point(NamedTuple):
    """A model and a cache format. `share`: of the original's bytes in 16 bits; `increase`: nats per token."""

    series: str
    label: str
    share: float
    increase: float


def points(records: Records) -> list[Point]:
    """Return the results of the measured parts: each model once, by the text of docs/real.md's tables."""
    results = dict.fromkeys([*_conversions(records), *_searched(records), *_formats(records)])
    return list(results)


def _conversions(records: Records) -> Iterator[Point]:
    for name, part in records.parts.items():
        for row in part["rows"]:
            if row.get("recipe") == name:  # a part that is one recipe at several sizes
                series = FEWER_HEADS
                if name.removesuffix("_plain").removesuffix("_refined") in _CITED:
                    series = PUBLISHED_FITTED if name.endswith("_refined") else PUBLISHED
                yield Point(series, name, _share(row["KV cache"]), _increase(row["increase"]))


def _searched(records: Records) -> Iterator[Point]:
    """Published methods that the search alone has converted, before they are trained; on its text."""
    part = records.parts.get("search")
    measured = {point.label for point in _conversions(records)}
    for row in part["rows"] if part else ():
        recipe = row["recipe"]
        if recipe in _CITED and not {recipe, f"{recipe}_plain"} & measured and row["status"] != "copy":
            yield Point(PUBLISHED, recipe, _share(row["KV cache"]), _increase(row["untrained"]))


def _formats(records: Records) -> Iterator[Point]:
    part = records.parts.get("formats")
    converted = {point.label: point.series for point in _conversions(records)}
    for row in part["rows"] if part else ():
        model, cache = row["model"], row["cache"]
        recipe = model.split()[0]
        share, increase = _share(row["engine bytes"]), _increase(row["increase"])
        if model == "original":
            yield Point(ORIGINAL, cache, share, increase)
        elif cache == "f16" and recipe in converted:
            continue  # the same conversion
        elif cache == "f16":
            yield Point(FEWER_HEADS, model, share, increase)
        elif converted.get(recipe) not in (PUBLISHED, PUBLISHED_FITTED):
            yield Point(BOTH, f"{model}, {cache}", share, increase)


def _share(text: str) -> float:
    return float(text.rstrip("%")) / 100


def _increase(text: str) -> float:
    return float(text.split()[0])


@styled
def draw(points: list[Point]) -> Figure:
    """Return the picture. A point at or below `LEAST` is drawn on the lowest line."""
    figure, axes = single_axes(4.4, "KV cache in the engine, share of the original's bytes in 16 bits", "")
    axes.set_ylabel("loss increase, nats per token")
    handles = {}
    for series, style in STYLES.items():
        of_series = [point for point in points if point.series == series]
        if not of_series:
            continue
        heights = [max(point.increase, LEAST) for point in of_series]
        axes.plot([point.share for point in of_series], heights, ls="", clip_on=False, zorder=3, **style)
        handles[series] = Line2D([], [], ls="", **style)
        for point, height in zip(of_series, heights, strict=True):
            if series in (ORIGINAL, PUBLISHED, PUBLISHED_FITTED):
                axes.annotate(
                    point.label,
                    (point.share, height),
                    fontsize=8,
                    xytext=(6, 5),
                    textcoords="offset points",
                )
    axes.set_yscale("log")
    axes.set_xlim(0, 0.75)
    axes.set_ylim(bottom=LEAST)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"≤ {LEAST:g}" if value == LEAST else f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks([LEAST, 0.01, 0.1, 1, 10])
    legend_below(figure, handles, columns=2)
    return figure


def write(records: Records) -> Path:
    """Draw the measured results, and return the picture's file."""
    return save_png(draw(points(records)), PICTURE)
