"""Pictures of trials and conversions: loss against KV cache and over rungs, heads kept in each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attention.plan import AttentionPlan
from orchestrator.reporting.figures.drawing import COLOURS, KV_BYTES, LOSS, looks_of, one_axes, styled, write_cells
from orchestrator.storage.records import TrialRecord, family, front, percent

LINES = 200
"""Trials that a picture of curves holds; of more, those that got furthest."""


@styled
def front_figure(
    trials: Sequence[TrialRecord], original: Mapping[str, Any], promoted: Sequence[Mapping[str, Any]] = ()
) -> Figure:
    """Held-out loss against KV bytes a token: every trial at its last rung, the front, the original model."""
    figure, axes = one_axes(across=KV_BYTES, upright=LOSS)
    looks = looks_of([family(t.recipe) for t in trials])
    scored = [t for t in trials if t.usable]
    most = max((t.step for t in scored), default=0)
    circle: dict[str, Any] = {"facecolors": "none", "linewidths": 1.4}
    for name, look in looks.items():
        mine = [t for t in scored if family(t.recipe) == name]
        if not mine:
            continue
        # Hollow: stopped at an earlier rung, so trained less than its neighbours on the picture.
        fills = [look["color"] if t.step == most else "none" for t in mine]
        marks = circle | {"facecolors": fills, "edgecolors": look["color"], "marker": look["marker"]}
        x, y = [t.kv_bytes_per_token for t in mine], [t.loss for t in mine]
        axes.scatter(x, y, label=name, s=48, zorder=3, **marks)
    if len({t.step for t in scored}) > 1:
        axes.scatter([], [], s=48, facecolors="none", edgecolors="#444444", label="hollow: stopped earlier")
    best = front(trials, timed=False)
    x, y = [t.kv_bytes_per_token for t in best], [t.loss for t in best]
    axes.plot(x, y, color="#444444", lw=1, zorder=2, label="front")
    if after := [p for p in promoted if p.get("loss") is not None]:
        x, y = [p["kv_bytes_per_token"] for p in after], [p["loss"] for p in after]
        axes.scatter(x, y, s=150, edgecolors="#111111", zorder=4, label="promoted", **circle)
    axes.axhline(original["loss"], color="#888888", ls="--", lw=1.2, label=f"original model ({original['loss']:.3f})")
    axes.legend(fontsize=9, frameon=False)
    return figure


@styled
def rungs_figure(trials: Sequence[TrialRecord], original: Mapping[str, Any]) -> Figure:
    """Held-out loss over training steps, one line a trial; solid for the largest KV ratio, dashed for the next."""
    figure, axes = one_axes(across="training steps", upright=LOSS)
    looks = looks_of([family(t.recipe) for t in trials])
    kv_ratios = sorted({t.kv_ratio for t in trials}, reverse=True)
    lines = {b: ("-", "--", ":", "-.")[i % 4] for i, b in enumerate(kv_ratios)}
    named = set()
    drawn = {t.trial_id for t in sorted((t for t in trials if t.rungs), key=lambda t: (-t.step, t.loss))[:LINES]}
    for trial in (t for t in trials if t.trial_id in drawn):
        name = family(trial.recipe)
        label = None if name in named else name
        named.add(name)
        scored = [(r["step"], r["loss"]) for r in trial.rungs if r["loss"] is not None]
        steps, losses = [step for step, _ in scored], [loss for _, loss in scored]
        axes.plot(steps, losses, ls=lines[trial.kv_ratio], ms=5, lw=1.4, label=label, **looks[name])
    for kv_ratio, line in lines.items():
        axes.plot([], [], ls=line, color="#444444", label=f"{percent(kv_ratio)} of the checkpoint's KV")
    axes.axhline(original["loss"], color="#888888", lw=1)
    axes.legend(fontsize=9, frameon=False, ncols=2)
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
    """Held-out loss against KV bytes a token of one recipe at several KV ratios (see
    `orchestrator.conversion.several_ratios`)."""
    figure, axes = one_axes(across=KV_BYTES, upright=f"{LOSS}, no training")
    points = sorted(curve["points"], key=lambda p: p["kv_bytes_per_token"])
    places = [(p["kv_bytes_per_token"], p["loss"]) for p in points]
    axes.plot(*zip(*places, strict=True), color=COLOURS[0], marker="o", lw=1.4, label=curve["recipe"]["name"])
    for point, place in zip(points, places, strict=True):
        text = f"{point['kv_ratio']:.0%}\n{point['loss_increase']:+.3f}"
        axes.annotate(text, place, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9)
    original = (curve["kv_bytes_per_token_original"], curve["original_loss"])
    axes.plot(*original, color="#444444", marker="s", ls="", label="original model")
    axes.axhline(curve["original_loss"], color="#888888", ls="--", lw=1.2)
    axes.margins(y=0.25)
    axes.legend(fontsize=9, frameon=False)
    return figure
