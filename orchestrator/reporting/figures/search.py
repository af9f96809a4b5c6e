"""Pictures of trials and conversions: loss against KV cache and over rungs, heads kept in each layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attention.plan import AttentionPlan
from attention.ratios import percent
from orchestrator.reporting.figures.drawing import (
    COLOURS,
    INK,
    KV_BYTES,
    LOSS,
    MUTED,
    NARROW,
    PAPER,
    WIDTH,
    legend_below,
    looks_of,
    one_axes,
    styled,
    write_cells,
)
from orchestrator.reporting.figures.increases import INCREASE, IncreaseAxis
from orchestrator.storage.records import TrialRecord, family, front

LINES = 200
"""Trials that a picture of curves holds; of more, those that got furthest."""


@styled
def front_figure(
    trials: Sequence[TrialRecord],
    original: Mapping[str, Any],
    promoted: Sequence[Mapping[str, Any]] = (),
    *,
    narrow: bool = False,
) -> Figure:
    """Loss increase, on a logarithmic axis, against KV bytes a token: every trial at its best step, the front, what was
    promoted, and the original model. `promoted`: candidates of `promotion.json`."""
    figure, axes = one_axes(5.6 if narrow else 4.8, KV_BYTES, width=NARROW if narrow else WIDTH)
    looks = looks_of([family(t.recipe) for t in trials])
    scored = [t for t in trials if t.usable and t.kv_bytes_per_token is not None]
    after = [p for p in promoted if p.get("loss") is not None and p.get("kv_bytes_per_token")]
    losses = [*(t.loss for t in scored), *(p["loss"] for p in after)]
    axis = IncreaseAxis(loss - original["loss"] for loss in losses)
    axis.put_on(axes)
    handles = _scatter(axes, axis, scored, original, looks)
    best = front(trials, timed=False)
    places = [(t.kv_bytes_per_token, axis.at(t.loss - original["loss"])) for t in best]
    handles["front"] = axes.plot(*zip(*places, strict=True), color=INK, lw=1, zorder=2)[0] if places else None
    lowest = {p["kv_bytes_per_token"]: p for p in sorted(after, key=lambda p: -p["loss"])}  # these have their numbers
    for p in after:
        place = (p["kv_bytes_per_token"], axis.at(p["loss"] - original["loss"]))
        handles["promoted"] = axes.scatter(*place, s=170, facecolors="none", edgecolors=INK, linewidths=1.6, zorder=4)
        if p is not lowest[p["kv_bytes_per_token"]]:
            continue
        increase = p["loss"] - original["loss"]
        beside = {"xytext": (11, -4)} if axis.is_none(increase) else {"xytext": (0, -20), "ha": "center"}
        axes.annotate(f"{increase:+.3f}", place, textcoords="offset points", fontsize=10, weight="bold", **beside)
    own = (original["kv_bytes_per_token"], axis.floor)
    handles["original model"] = axes.scatter(*own, marker="*", s=190, color=INK, zorder=4)
    sizes = {own[0], *(t.kv_bytes_per_token for t in scored), *(p["kv_bytes_per_token"] for p in after)}
    _size_ticks(axes, sizes, own[0], most=4 if narrow else 8)
    axes.set_ylabel(INCREASE)
    if not narrow:
        axis.perplexity(axes)
    legend_below(figure, {k: v for k, v in handles.items() if v is not None}, columns=2 if narrow else 4)
    return figure


def _scatter(
    axes: Any, axis: IncreaseAxis, trials: Sequence[TrialRecord], original: Mapping[str, Any], looks: Mapping[str, Any]
) -> dict[str, Any]:
    """Draw trials; returns what a legend says of them. Hollow: stopped at an earlier rung, so trained less than its
    neighbours on the picture."""
    handles: dict[str, Any] = {}
    most = max((t.step for t in trials), default=0)
    places = {t.trial_id: (t.kv_bytes_per_token, axis.at(t.loss - original["loss"])) for t in trials}
    for name, look in looks.items():
        if not (mine := [t for t in trials if family(t.recipe) == name]):
            continue
        fills = [PAPER if t.step < most else look["color"] for t in mine]
        drawn = {"s": 48, "zorder": 3, "linewidths": 1.4, "edgecolors": look["color"], "marker": look["marker"]}
        axes.scatter(*zip(*(places[t.trial_id] for t in mine), strict=True), facecolors=fills, **drawn)
        handles[name] = Line2D([], [], ls="", ms=6.5, **look)
    if any(t.step < most for t in trials):
        handles["hollow: stopped earlier"] = Line2D([], [], ls="", marker="o", mfc=PAPER, color=INK)
    below = sorted((t for t in trials if axis.is_none(t.loss - original["loss"])), key=lambda t: t.loss)
    for t in {t.kv_bytes_per_token: t for t in reversed(below)}.values():  # the best of each size has its number
        left = {"xytext": (-9, -3), "textcoords": "offset points", "ha": "right"}
        axes.annotate(f"{t.loss - original['loss']:+.3f}", places[t.trial_id], fontsize=8, **left)
    return handles


def _size_ticks(axes: Any, sizes: Collection[int], own: int, most: int) -> None:
    """A logarithmic axis of KV bytes, with a tick at each size and its share of the original's, if they are few."""
    axes.set_xscale("log", base=2)
    axes.margins(x=0.16)
    places = sorted(sizes)
    while len(places) > most:
        places = [*places[:-1:2], places[-1]] if len(places) > 2 * most else [*places[: most - 1], places[-1]]
    axes.set_xticks(places, [f"{place:,}\n{percent(round(place / own, 3))}" for place in places])
    axes.set_xticks([], minor=True)


@styled
def rungs_figure(trials: Sequence[TrialRecord], original: Mapping[str, Any]) -> Figure:
    """Loss increase over training steps, one line a trial; solid for the largest KV ratio, dashed for the next."""
    figure, axes = one_axes(across="training steps", upright=INCREASE)
    looks = looks_of([family(t.recipe) for t in trials])
    kv_ratios = sorted({t.kv_ratio for t in trials}, reverse=True)
    lines = {b: ("-", "--", ":", "-.")[i % 4] for i, b in enumerate(kv_ratios)}
    drawn = sorted((t for t in trials if t.rungs), key=lambda t: (-t.step, t.loss))[:LINES]
    curves = [(t, [(r["step"], r["loss"] - original["loss"]) for r in t.rungs if r["loss"] is not None]) for t in drawn]
    axis, handles = IncreaseAxis(increase for _, curve in curves for _, increase in curve), {}
    axis.put_on(axes)
    for trial, curve in curves:
        look = looks[family(trial.recipe)]
        steps, increases = [step for step, _ in curve], [axis.at(increase) for _, increase in curve]
        axes.plot(steps, increases, ls=lines[trial.kv_ratio], ms=5, lw=1.4, **look)
        handles[family(trial.recipe)] = Line2D([], [], ls="", ms=5, **look)
    for kv_ratio, line in lines.items():
        handles[f"{percent(kv_ratio)} of the checkpoint's KV"] = Line2D([], [], ls=line, color=INK)
    legend_below(figure, handles)
    return figure


@styled
def budgets_figure(plans: Mapping[str, AttentionPlan]) -> Figure:
    """Kept key heads and value heads in each layer, one row a plan and side."""
    rows = [
        (f"{name}  {side}", [getattr(layer, f"{side}_heads") for layer in plan.layers])
        for name, plan in plans.items()
        for side in ("key", "value")
    ]
    table = np.array([counts for _, counts in rows])
    heads = max(plan.num_heads for plan in plans.values())
    figure, axes = one_axes(0.9 + 0.32 * len(rows), "layer")
    axes.grid(False)
    axes.imshow(table, cmap="Blues", vmin=0, vmax=heads, aspect="auto")
    if table.shape[1] <= 16:
        write_cells(axes, table, str, lambda count: count > heads / 2, 9)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
    axes.set_xticks(range(table.shape[1]) if table.shape[1] <= 16 else range(0, table.shape[1], 4))
    return figure


@styled
def curve_figure(curve: Mapping[str, Any]) -> Figure:
    """Held-out loss against KV bytes per token of one recipe at several KV ratios (see
    `orchestrator.conversion.curve`)."""
    figure, axes = one_axes(across=KV_BYTES, upright=f"{LOSS}, no training")
    points = sorted(curve["points"], key=lambda p: p["kv_bytes_per_token"])
    places = [(p["kv_bytes_per_token"], p["loss"]) for p in points]
    axes.plot(*zip(*places, strict=True), color=COLOURS[0], marker="o", lw=1.4, label=curve["recipe"]["name"])
    for point, place in zip(points, places, strict=True):
        text = f"{point['kv_ratio']:.0%}\n{point['loss_increase']:+.3f}"
        axes.annotate(text, place, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9)
    original = (curve["kv_bytes_per_token_original"], curve["original_loss"])
    axes.plot(*original, color=INK, marker="s", ls="", label="original model")
    axes.axhline(curve["original_loss"], color=MUTED, ls="--", lw=1.2)
    axes.margins(y=0.25)
    axes.legend(fontsize=9, frameon=False)
    return figure
