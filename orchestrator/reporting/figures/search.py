"""Trials and conversions: loss against KV cache and over rungs, heads kept in each layer."""

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
    KV_BYTES_LABEL,
    LOSS_LABEL,
    MUTED,
    NARROW_WIDTH,
    PAPER,
    WIDTH,
    kv_bytes_label,
    label_points,
    legend_below,
    single_axes,
    styled,
    styles_of,
    write_cells,
)
from orchestrator.reporting.figures.increases import INCREASE_LABEL, IncreaseAxis
from orchestrator.storage.records import (
    OriginalRecord,
    TrialRecord,
    family,
    front,
    promoted_bytes,
    served_bytes,
)

MAX_POINTS = 1000
"""Largest number of trials in the figure of the front; of more, the front and every nth."""
MAX_CURVES = 200
"""Largest number of trials in a figure of curves; those with the most steps are drawn."""


@styled
def front_figure(
    trials: Sequence[TrialRecord],
    original: OriginalRecord,
    promoted: Sequence[Mapping[str, Any]] = (),
    *,
    narrow: bool = False,
) -> Figure:
    """Draw the loss increase, on a logarithmic axis, against KV bytes per token.

    It shows every trial at its best step, the front, promoted models and the original model.

    Args:
        trials: Of a search.
        original: The original model.
        promoted: Candidates of `promotion.json`.
        narrow: Whether it is for a narrow page.
    """
    height = 5.6 if narrow else 4.8
    width = NARROW_WIDTH if narrow else WIDTH
    figure, axes = single_axes(height, kv_bytes_label(original), width=width)
    scored = [t for t in trials if t.usable and t.kv_bytes_per_token is not None]
    best = front(trials, timed=False)
    if len(scored) > MAX_POINTS:
        ids = {t.trial_id for t in (*best, *scored[:: -(-len(scored) // MAX_POINTS)])}
        scored = [t for t in scored if t.trial_id in ids]
    sized = [{**model, "size": promoted_bytes(model, trials)} for model in promoted]
    models = [model for model in sized if model.get("loss") is not None and model["size"]]
    losses = [*(t.loss for t in scored), *(model["loss"] for model in models)]
    axis = IncreaseAxis(loss - original["loss"] for loss in losses)
    axis.put_on(axes)
    styles = styles_of([family(t.recipe) for t in trials])
    handles = _draw_trials(axes, axis, scored, original, styles)
    if best:
        sizes = [t.served_bytes for t in best]
        increases = [axis.at(t.loss - original["loss"]) for t in best]
        (handles["front"],) = axes.plot(sizes, increases, color=INK, lw=1, zorder=2)
    if models:
        handles["promoted"] = _draw_promoted(axes, axis, models, original)
    own_size = served_bytes(original)
    star = axes.scatter(own_size, axis.floor, marker="*", s=190, color=INK, zorder=4)
    label_points(star, [_words("original model", own_size, original["loss"], original)])
    handles["original model"] = star
    shown = {own_size, *(t.served_bytes or 0 for t in scored)}
    shown |= {model["size"] for model in models}
    _set_size_axis(axes, shown, own_size, max_ticks=4 if narrow else 8)
    axes.set_ylabel(INCREASE_LABEL)
    if not narrow:
        axis.perplexity(axes)
    legend_below(figure, handles, columns=2 if narrow else 4)
    return figure


def _words(name: str, size: int | None, loss: float, original: OriginalRecord) -> str:
    increase = f"loss {loss:.3f} ({loss - original['loss']:+z.3f})"
    return f"{name}: {size or 0:,} bytes per token, {increase}"


def _draw_trials(
    axes: Any,
    axis: IncreaseAxis,
    trials: Sequence[TrialRecord],
    original: OriginalRecord,
    styles: Mapping[str, Any],
) -> dict[str, Any]:
    """Draw trials, and return the entries of a legend.

    Hollow: stopped at an earlier rung, so trained less than others in the figure.
    """
    handles: dict[str, Any] = {}
    last_step = max((t.step for t in trials), default=0)
    points = {t.trial_id: (t.served_bytes, axis.at(t.loss - original["loss"])) for t in trials}
    for name, style in styles.items():
        arm = [t for t in trials if family(t.recipe) == name]
        if not arm:
            continue
        colour = style["color"]
        for fill, early in ((PAPER, True), (colour, False)):
            group = [t for t in arm if (t.step < last_step) is early]
            if not group:
                continue
            # A line's markers, which SVG names one by one
            (drawn,) = axes.plot(
                [points[t.trial_id][0] for t in group],
                [points[t.trial_id][1] for t in group],
                ls="",
                marker=style["marker"],
                ms=7,
                mfc=fill,
                mec=colour,
                mew=1.4,
                zorder=3,
            )
            label_points(drawn, (_words(t.name, t.served_bytes, t.loss, original) for t in group))
        handles[name] = Line2D([], [], ls="", ms=6.5, **style)
    if any(t.step < last_step for t in trials):
        hollow = Line2D([], [], ls="", marker="o", mfc=PAPER, color=INK)
        handles["hollow: stopped earlier"] = hollow
    # In the band below, the best of each size is labelled with its number
    below = [t for t in trials if axis.is_none(t.loss - original["loss"])]
    below.sort(key=lambda t: t.loss)
    for trial in {t.served_bytes: t for t in reversed(below)}.values():
        axes.annotate(
            f"{trial.loss - original['loss']:+z.3f}",
            points[trial.trial_id],
            fontsize=8,
            xytext=(-9, -3),
            textcoords="offset points",
            ha="right",
        )
    return handles


def _draw_promoted(
    axes: Any,
    axis: IncreaseAxis,
    models: Sequence[Mapping[str, Any]],
    original: OriginalRecord,
) -> Any:
    """Draw promoted models, the best of each size with its number, and return a mark of them."""
    ring = None
    by_loss = sorted(models, key=lambda model: -model["loss"])
    lowest = {model["size"]: model for model in by_loss}
    for model in models:
        size = model["size"]
        increase = model["loss"] - original["loss"]
        point = (size, axis.at(increase))
        (ring,) = axes.plot(
            *point, ls="", marker="o", ms=13, mfc="none", mec=INK, mew=1.6, zorder=4
        )
        name = model.get("name") or model["recipe"]
        label_points(ring, [f"promoted: {_words(name, size, model['loss'], original)}"])
        if model is lowest[size]:
            below = axis.is_none(increase)
            axes.annotate(
                f"{increase:+z.3f}",
                point,
                textcoords="offset points",
                fontsize=10,
                weight="bold",
                xytext=(11, -4) if below else (0, -20),
                ha="left" if below else "center",
            )
    return ring


def _set_size_axis(axes: Any, sizes: Collection[int], original_size: int, max_ticks: int) -> None:
    """Make an axis of KV bytes, with a tick at each size and its share, if they are few."""
    axes.set_xscale("log", base=2)
    axes.margins(x=0.16)
    ticks = sorted(sizes)
    while len(ticks) > max_ticks:
        every_other = len(ticks) > 2 * max_ticks
        ticks = [*(ticks[:-1:2] if every_other else ticks[: max_ticks - 1]), ticks[-1]]
    labels = [f"{size:,}\n{percent(round(size / original_size, 3))}" for size in ticks]
    axes.set_xticks(ticks, labels)
    axes.set_xticks([], minor=True)


@styled
def rungs_figure(trials: Sequence[TrialRecord], original: OriginalRecord) -> Figure:
    """Draw the loss increase over training steps, one line per trial.

    Solid for the largest KV ratio, dashed for the next.
    """
    figure, axes = single_axes(x_label="training steps", y_label=INCREASE_LABEL)
    styles = styles_of([family(t.recipe) for t in trials])
    kv_ratios = sorted({t.kv_ratio for t in trials}, reverse=True)
    dashes = {ratio: ("-", "--", ":", "-.")[i % 4] for i, ratio in enumerate(kv_ratios)}
    drawn = sorted((t for t in trials if t.rungs), key=lambda t: (-t.step, t.loss))[:MAX_CURVES]
    curves = []
    for trial in drawn:
        measured = [rung for rung in trial.rungs if rung["loss"] is not None]
        steps = [rung["step"] for rung in measured]
        curves.append((trial, steps, [rung["loss"] - original["loss"] for rung in measured]))
    axis = IncreaseAxis(increase for _, _, increases in curves for increase in increases)
    axis.put_on(axes)
    handles = {}
    for trial, steps, increases in curves:
        name = family(trial.recipe)
        heights = [axis.at(increase) for increase in increases]
        (line,) = axes.plot(steps, heights, ls=dashes[trial.kv_ratio], ms=5, lw=1.4, **styles[name])
        points = zip(steps, increases, strict=True)
        label_points(line, (f"{trial.name}, step {step}: loss {x:+z.3f}" for step, x in points))
        handles[name] = Line2D([], [], ls="", ms=5, **styles[name])
    for ratio, dash in dashes.items():
        label = f"KV ratio {percent(ratio)}"
        handles[label] = Line2D([], [], ls=dash, color=INK)
    legend_below(figure, handles)
    return figure


@styled
def budgets_figure(plans: Mapping[str, AttentionPlan]) -> Figure:
    """Draw the key heads and value heads kept in each layer, one row per plan and side."""
    rows = {
        f"{name}  {side}": [getattr(layer, f"{side}_heads") for layer in plan.layers]
        for name, plan in plans.items()
        for side in ("key", "value")
    }
    table = np.array(list(rows.values()))
    layers = table.shape[1]
    heads = max(plan.num_heads for plan in plans.values())
    figure, axes = single_axes(0.9 + 0.32 * len(rows), "layer")
    axes.grid(False)
    axes.imshow(table, cmap="Blues", vmin=0, vmax=heads, aspect="auto")
    if layers <= 16:
        write_cells(axes, table, str, lambda count: count > heads / 2, 9)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
    axes.set_xticks(range(0, layers, 1 if layers <= 16 else 4))
    return figure


@styled
def curve_figure(curve: Mapping[str, Any]) -> Figure:
    """Draw the held-out loss against KV bytes per token of one recipe at several KV ratios.

    Args:
        curve: A `CurveRecord` of `orchestrator.conversion.record`.
    """
    label = f"{LOSS_LABEL}, no training"
    figure, axes = single_axes(x_label=KV_BYTES_LABEL, y_label=label)
    points = sorted(curve["points"], key=lambda point: point["kv_bytes_per_token"])
    sizes = [point["kv_bytes_per_token"] for point in points]
    losses = [point["loss"] for point in points]
    name = curve["recipe"]["name"]
    axes.plot(sizes, losses, color=COLOURS[0], marker="o", lw=1.4, label=name)
    for point in points:
        axes.annotate(
            f"{percent(point['kv_ratio'])}\n{point['loss_increase']:+z.3f}",
            (point["kv_bytes_per_token"], point["loss"]),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    original = (curve["kv_bytes_per_token_original"], curve["original_loss"])
    axes.plot(*original, color=INK, marker="s", ls="", label="original model")
    axes.axhline(curve["original_loss"], color=MUTED, ls="--", lw=1.2)
    axes.margins(y=0.25)
    axes.legend(fontsize=9, frameon=False)
    return figure
