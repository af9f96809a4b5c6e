"""What trials measured of themselves: the similarity of heads that share, and their relaxations over time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attention.ratios import percent
from orchestrator.reporting.figures.drawing import COLOURS, FAINT, INK, PAPER, STYLE, legend_below, styled
from orchestrator.storage.records import TrialRecord, family

SIDES = {"key": "keys", "value": "values"}
# The relaxations' own metrics, in the order of their panels, as they are labelled.
PANELS = {
    "own_share": "own share ω of a head",
    "fusion_loss": "fusion loss",
    "multiplier": "multiplier λ",
    "mean_mask": "mean mask (dashed: target)",
    "masks_open": "share of masks open",
    "distance": "distance of the pairs, 1 at the start",
}
LOGARITHMIC = ("fusion_loss",)


@styled
def similarity_figure(trials: Sequence[TrialRecord]) -> Figure | None:
    """Mean cosine of the heads that share, before (hollow) and after (filled) the best alignment: a line an arm at a KV
    ratio, averaged over its trials. None if no trial has measured any."""
    arms: dict[tuple[str, float], list[dict[str, float]]] = {}
    for t in sorted(trials, key=lambda t: -t.kv_ratio):
        means = (t.similarity or {}).get("means")
        if means:
            arms.setdefault((family(t.recipe), t.kv_ratio), []).append(means)
    if not arms:
        return None
    figure = Figure(figsize=(7, 1.3 + 0.21 * len(arms)), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, (side, title) in zip(panels, SIDES.items(), strict=True):
        for place, means in enumerate(arms.values()):
            ends = [[m[f"{side}_{name}"] for m in means if f"{side}_{name}" in m] for name in ("raw", "aligned")]
            if ends[0] and ends[1]:
                raw, aligned = (statistics.fmean(values) for values in ends)
                axes.plot([raw, aligned], [place, place], color=COLOURS[0], lw=1.4, alpha=0.6, zorder=2)
                axes.plot(raw, place, color=COLOURS[0], marker="o", ms=5.5, mfc=PAPER, zorder=3)
                axes.plot(aligned, place, color=COLOURS[0], marker="o", ms=5.5, zorder=3)
        for place, ((_, above), (_, below)) in enumerate(pairwise(arms)):
            if above != below:
                axes.axhline(place + 0.5, color=FAINT, lw=1, zorder=0)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("mean cosine")
        axes.axvline(0, color=FAINT, lw=1, zorder=0)
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(arms)), [f"{name} {percent(kv_ratio)}" for name, kv_ratio in arms], fontsize=9)
    panels[0].set_ylim(len(arms) - 0.4, -0.6)
    marks = {"as they are": PAPER, "each pair aligned": COLOURS[0]}
    handles = {k: Line2D([], [], color=COLOURS[0], marker="o", ls="", mfc=fill) for k, fill in marks.items()}
    legend_below(figure, handles, columns=2)
    return figure


@matplotlib.rc_context({**STYLE, "font.size": 9})
def relaxation_figure(trials: Sequence[TrialRecord]) -> Figure | None:
    """Each arm's relaxation over its steps: one row an arm, one panel a quantity, one line a trial, a colour a KV
    ratio. None if no trial was relaxed."""
    arms: dict[str, list[TrialRecord]] = {}
    for t in trials:
        if any(name in point for point in t.relaxation for name in PANELS):
            arms.setdefault(family(t.recipe), []).append(t)
    if not arms:
        return None
    names = {arm: [k for k in PANELS if any(k in p for t in mine for p in t.relaxation)] for arm, mine in arms.items()}
    kv_ratios = sorted({t.kv_ratio for mine in arms.values() for t in mine}, reverse=True)
    colours = {kv_ratio: COLOURS[i % len(COLOURS)] for i, kv_ratio in enumerate(kv_ratios)}
    figure = Figure(figsize=(7, 0.6 + 1.9 * len(names)), layout="constrained")
    grid = figure.subplots(len(names), max(map(len, names.values())), squeeze=False)
    for (arm, measured), row in zip(names.items(), grid, strict=True):
        for axes, name in zip(row, measured, strict=False):
            for trial in arms[arm]:
                _over_steps(axes, trial, name, colours[trial.kv_ratio])
            axes.set_title(f"{arm if name == measured[0] else ''}\n{PANELS[name]}", loc="left", fontsize=9)
            axes.tick_params(labelsize=8)
            values = [p[name] for t in arms[arm] for p in t.relaxation if p.get(name) is not None]
            if name in LOGARITHMIC and min(values, default=0) > 0:
                axes.set_yscale("log")
        for axes in row[len(measured) :]:
            axes.set_visible(False)
    figure.supxlabel("step of the relaxation", fontsize=9)
    lines = [Line2D([], [], color=colour) for colour in colours.values()]
    labels = [f"{percent(kv_ratio)} of the checkpoint's KV" for kv_ratio in colours]
    figure.legend(lines, labels, loc="outside upper right", ncols=len(lines), frameon=False)
    return figure


def _over_steps(axes: Any, trial: TrialRecord, name: str, colour: str) -> None:
    points = [p for p in trial.relaxation if p.get(name) is not None]
    steps = [p["step"] for p in points]
    axes.plot(steps, [p[name] for p in points], color=colour, lw=1.1, alpha=0.8)
    if name == "mean_mask":
        axes.plot(steps, [p.get("target") for p in points], color=INK, lw=1, ls="--")
