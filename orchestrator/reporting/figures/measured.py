"""Measurements of trials: similarity of heads that share, relaxations over time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attention.ratios import percent
from orchestrator.reporting.figures.drawing import (
    COLOURS,
    FAINT,
    INK,
    PAPER,
    SIDE_TITLES,
    STYLE,
    legend_below,
    styled,
)
from orchestrator.storage.records import TrialRecord, family

_PANELS = {
    "own_share": "own share ω of a head",
    "fusion_loss": "fusion loss",
    "multiplier": "multiplier λ",
    "mean_mask": "mean mask (thin: layers; dashed: target)",
    "masks_open": "share of masks open",
    "distance": "distance of the pairs, 1 at the start",
}
"""Titles of the relaxations' metrics, in the order of their panels."""
_LOGARITHMIC = ("fusion_loss",)


@styled
def similarity_figure(trials: Sequence[TrialRecord]) -> Figure | None:
    """Draw the mean cosine of the heads that share: hollow without alignment, filled with it.

    One line per arm and KV ratio, averaged over its trials.

    Returns:
        None if no trial has measured any.
    """
    arms: dict[tuple[str, float], list[dict[str, float]]] = {}
    for trial in sorted(trials, key=lambda t: -t.kv_ratio):
        means = (trial.similarity or {}).get("means")
        if means:
            arms.setdefault((family(trial.recipe), trial.kv_ratio), []).append(means)
    if not arms:
        return None
    figure = Figure(figsize=(7, 1.3 + 0.21 * len(arms)), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, (side, title) in zip(panels, SIDE_TITLES.items(), strict=True):
        for row, means in enumerate(arms.values()):
            raw = [m[f"{side}_raw"] for m in means if f"{side}_raw" in m]
            aligned = [m[f"{side}_aligned"] for m in means if f"{side}_aligned" in m]
            if raw and aligned:
                _draw_similarity(axes, row, statistics.fmean(raw), statistics.fmean(aligned))
        for row, ((_, above), (_, below)) in enumerate(pairwise(arms)):
            if above != below:
                axes.axhline(row + 0.5, color=FAINT, lw=1, zorder=0)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("mean cosine")
        axes.axvline(0, color=FAINT, lw=1, zorder=0)
        axes.grid(axis="y", visible=False)
    labels = [f"{name} {percent(kv_ratio)}" for name, kv_ratio in arms]
    panels[0].set_yticks(range(len(arms)), labels, fontsize=9)
    panels[0].set_ylim(len(arms) - 0.4, -0.6)
    fills = {"as they are": PAPER, "each pair aligned": COLOURS[0]}
    handles = {
        name: Line2D([], [], color=COLOURS[0], marker="o", ls="", mfc=fill)
        for name, fill in fills.items()
    }
    legend_below(figure, handles, columns=2)
    return figure


def _draw_similarity(axes: Any, row: int, raw: float, aligned: float) -> None:
    colour = COLOURS[0]
    axes.plot([raw, aligned], [row, row], color=colour, lw=1.4, alpha=0.6, zorder=2)
    axes.plot(raw, row, color=colour, marker="o", ms=5.5, mfc=PAPER, zorder=3)
    axes.plot(aligned, row, color=colour, marker="o", ms=5.5, zorder=3)


_MOST_TRIALS = 100
_MOST_LINES = 600
"""Trials of an arm, and lines of layers in all, so that a page stays small."""


@matplotlib.rc_context({**STYLE, "font.size": 9})
def relaxation_figure(trials: Sequence[TrialRecord]) -> Figure | None:
    """Draw each arm's relaxation over its steps: a row per arm, a panel per quantity.

    Of many trials the best of each arm, and of each some of its layers.

    Returns:
        None if no trial was relaxed.
    """
    arms: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        if any(name in point for point in trial.relaxation for name in _PANELS):
            arms.setdefault(family(trial.recipe), []).append(trial)
    if not arms:
        return None
    # Those trained longest, and of them the best
    arms = {
        arm: sorted(group, key=lambda t: (-t.step, t.loss))[:_MOST_TRIALS]
        for arm, group in arms.items()
    }
    layers = max(1, _MOST_LINES // sum(map(len, arms.values())))
    names = {
        arm: [name for name in _PANELS if any(name in p for t in group for p in t.relaxation)]
        for arm, group in arms.items()
    }
    kv_ratios = sorted({t.kv_ratio for group in arms.values() for t in group}, reverse=True)
    colours = {kv_ratio: COLOURS[i % len(COLOURS)] for i, kv_ratio in enumerate(kv_ratios)}
    figure = Figure(figsize=(7, 0.6 + 1.9 * len(names)), layout="constrained")
    grid = figure.subplots(len(names), max(map(len, names.values())), squeeze=False)
    for (arm, measured), row in zip(names.items(), grid, strict=True):
        for axes, name in zip(row, measured, strict=False):
            for trial in arms[arm]:
                _draw_relaxation(axes, trial, name, colours[trial.kv_ratio], layers)
            title = f"{arm if name == measured[0] else ''}\n{_PANELS[name]}"
            axes.set_title(title, loc="left", fontsize=9)
            axes.tick_params(labelsize=8)
            points = [point for trial in arms[arm] for point in trial.relaxation]
            values = [point[name] for point in points if point.get(name) is not None]
            if name in _LOGARITHMIC and min(values, default=0) > 0:
                axes.set_yscale("log")
        for axes in row[len(measured) :]:
            axes.set_visible(False)
    figure.supxlabel("step of the relaxation", fontsize=9)
    lines = [Line2D([], [], color=colour) for colour in colours.values()]
    labels = [f"KV ratio {percent(kv_ratio)}" for kv_ratio in colours]
    figure.legend(lines, labels, loc="outside upper right", ncols=len(lines), frameon=False)
    return figure


def _draw_relaxation(
    axes: Any, trial: TrialRecord, name: str, colour: str, most_layers: int
) -> None:
    points = [point for point in trial.relaxation if point.get(name) is not None]
    steps = [point["step"] for point in points]
    axes.plot(steps, [point[name] for point in points], color=colour, lw=1.1, alpha=0.8)
    if name == "mean_mask":
        metrics = {metric for point in points for metric in point}
        masks = sorted(metric for metric in metrics if metric.startswith("mean_mask_layer_"))
        for layer in masks[:: max(1, -(-len(masks) // most_layers))]:
            means = [point.get(layer) for point in points]
            axes.plot(steps, means, color=colour, lw=0.5, alpha=0.4)
        targets = [point.get("target") for point in points]
        axes.plot(steps, targets, color=INK, lw=1, ls="--")
