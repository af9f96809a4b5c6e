"""Arms against each other, from the rows of `comparison.compare_arms`: means and sd over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from attention.base.text import compact
from attention.ratios import percent
from orchestrator.reporting.comparison import ArmPoint, ComparisonRow
from orchestrator.reporting.figures.drawing import (
    INK,
    LOSS_LABEL,
    MUTED,
    PAPER,
    kv_bytes_label,
    legend_below,
    single_axes,
    styled,
    styles_of,
)
from orchestrator.storage.records import OriginalRecord, family

_SHIFT = 0.025  # between neighbouring arms of one KV ratio, as a share of its bytes
_WIDEST = 0.18  # from the first to the last arm, likewise
_LINEAR = 0.05  # nats: smaller increases stand on a linear scale, the others on a logarithmic one
_TICKS = (0, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


@styled
def bytes_figure(rows: Sequence[ComparisonRow], original: OriginalRecord) -> Figure:
    """Draw the increase of the held-out loss against KV bytes per token, with bars of one sd.

    One line per arm at its best rates; arms of one KV ratio are shifted sideways. Hollow:
    the row compares at an earlier rung than the others.
    """
    figure, axes = single_axes(5.2, kv_bytes_label(original))
    arms = _arms(rows)
    styles = styles_of(arms)
    handles = {}
    shift = min(_SHIFT, _WIDEST / len(arms)) if arms else 0.0
    for index, (name, arm) in enumerate(arms.items()):
        factor = 1 + shift * (index - (len(arms) - 1) / 2)
        handles[name] = _draw_bars(axes, arm, factor, styles[name])
    line = axes.axhline(0, color=MUTED, ls="--", lw=1.2)
    drawn = [row for arm in arms.values() for row in arm]
    if not all(row["last"] for row in drawn):
        hollow = Line2D([], [], ls="", marker="o", mfc=PAPER, color=INK)
        handles["hollow: stopped earlier"] = hollow
    axes.set_xscale("log", base=2)
    sizes = sorted({row["served_bytes"] or 0 for row in drawn})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ends = [
        (row["loss_increase"] or 0.0) + sign * (row["loss"]["sd"] or 0.0)
        for row in drawn
        for sign in (-1, 1)
    ]
    _set_increase_axis(axes, original, min(ends, default=0.0), max(ends, default=1.0))
    if axes.get_ylim()[0] < 0:
        handles["original model"] = line
    legend_below(figure, handles)
    return figure


def _draw_bars(
    axes: Any, rows: Sequence[ComparisonRow], factor: float, style: Mapping[str, Any]
) -> Any:
    """Draw an arm at its bytes times `factor`, and return its line."""
    x = [(row["served_bytes"] or 0) * factor for row in rows]
    y = [row["loss_increase"] for row in rows]
    sd = [row["loss"]["sd"] or 0.0 for row in rows]
    (line,) = axes.plot(x, y, lw=1.1, ms=4.5, zorder=3, **style)
    colour = style["color"]
    axes.errorbar(x, y, sd, fmt="none", ecolor=colour, elinewidth=1.6, capsize=3.5, zorder=4)
    early = [index for index, row in enumerate(rows) if not row["last"]]
    early_x = [x[index] for index in early]
    early_y = [y[index] for index in early]
    axes.plot(early_x, early_y, ls="", ms=7, mfc=PAPER, zorder=5, **style)
    return line


def _set_increase_axis(axes: Any, original: OriginalRecord, lowest: float, highest: float) -> None:
    """Scale the axis of increases; the original model is on it unless all are far above."""
    axes.set_yscale("symlog", linthresh=_LINEAR, linscale=0.5)
    low = lowest / 1.25 if lowest > _LINEAR else 1.25 * min(lowest, 0) - _LINEAR / 5
    high = 1.25 * max(highest, 0) + _LINEAR / 5
    axes.set_ylim(low, high)
    ticks = sorted({sign * tick for tick in _TICKS for sign in (-1, 1)})
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:+g}" if tick else "0" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylabel(f"increase of held-out loss over {original['loss']:.3f}, nats per token")


@styled
def tokens_figure(rows: Sequence[ComparisonRow], original: OriginalRecord) -> Figure:
    """Draw the held-out loss against tokens trained on, those of a relaxation included.

    One row of panels per KV ratio: on the left from the untrained model on, on the right an
    enlarged view of the trained models. One line per arm at its best rate, with a band of one
    standard deviation to each side; dashed during a relaxation, in which nothing is measured.
    """
    kv_ratios = list(dict.fromkeys(row["kv_ratio"] for row in rows))
    figure = Figure(figsize=(7, 0.7 + 2.6 * len(kv_ratios)), layout="constrained")
    grid = figure.subplots(len(kv_ratios), 2, squeeze=False)
    arms = _arms(rows, with_curve=True)
    styles = styles_of(arms)
    handles = {}
    points = [point for arm in arms.values() for row in arm for point in row["curve"]]
    # An arm whose first measurement is late was in a relaxation until then
    first_step = min((p["step"] for p in points if p["step"] > 0), default=None)
    for kv_ratio, (whole, close) in zip(kv_ratios, grid, strict=True):
        shown = {
            name: row for name, arm in arms.items() for row in arm if row["kv_ratio"] == kv_ratio
        }
        for name, row in shown.items():
            for axes in (whole, close):
                handles[name] = _draw_curve(axes, row["curve"], first_step, styles[name])
        _zoom(close, shown, original)
        title = f"KV ratio {percent(kv_ratio)}"
        whole.set_title(title, fontsize=10, loc="left")
        close.set_title("detail", fontsize=10, loc="left")
        for axes in (whole, close):
            line = axes.axhline(original["loss"], color=MUTED, ls="--", lw=1.2)
            handles["original model"] = line
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    for axes in grid[-1]:
        axes.set_xlabel("tokens trained on")
    figure.supylabel(LOSS_LABEL, fontsize=11)
    legend_below(figure, handles)
    return figure


def _arms(
    rows: Sequence[ComparisonRow], with_curve: bool = False
) -> dict[str, list[ComparisonRow]]:
    """Return rows that have a loss and a size (or a curve), by the name of the arm, bytes rising.

    Of the searcher's own candidates, which all have different names, only the best at each KV ratio
    is drawn.
    """
    best: dict[str, dict[float, ComparisonRow]] = {}
    for row in sorted(rows, key=lambda row: (not row["last"], row["loss"]["mean"] or 0.0)):
        measured = row["loss"]["mean"] is not None and row["served_bytes"]
        if row["curve"] if with_curve else measured:
            best.setdefault(family(row["recipe"]), {}).setdefault(row["kv_ratio"], row)
    names = dict.fromkeys(family(row["recipe"]) for row in rows)
    return {
        name: [best[name][ratio] for ratio in sorted(best[name])] for name in names if name in best
    }


def _draw_curve(
    axes: Any, curve: Sequence[ArmPoint], first_step: int | None, style: Mapping[str, Any]
) -> Any:
    """Draw an arm, and return its line.

    Points without a count of tokens, as in searches of an older version, are left out.
    """
    points = [point for point in curve if point["tokens"] is not None]
    x = [point["tokens"] for point in points]
    y = [point["mean"] for point in points]
    sd = [point["sd"] or 0.0 for point in points]
    relaxed = (
        len(points) > 1
        and points[0]["step"] == 0
        and first_step is not None
        and points[1]["step"] > first_step
    )
    solid = 1 if relaxed else 0
    (line,) = axes.plot(x[solid:], y[solid:], lw=1.4, ms=4.5, zorder=3, **style)
    low, high = ([m + sign * s for m, s in zip(y, sd, strict=True)] for sign in (-1, 1))
    colour = style["color"]
    axes.fill_between(x[solid:], low[solid:], high[solid:], color=colour, alpha=0.15, lw=0)
    if relaxed:
        axes.errorbar(x[1:2], y[1:2], sd[1:2], fmt="none", ecolor=colour, capsize=2.5, zorder=4)
        axes.plot(x[:2], y[:2], ls=(0, (4, 3)), lw=1.2, ms=4.5, zorder=3, **style)
    return line


def _zoom(axes: Any, rows: Mapping[str, ComparisonRow], original: OriginalRecord) -> None:
    """Show the range between the original model and the later half of the training."""
    trained = [
        point
        for row in rows.values()
        for point in row["curve"]
        if point["step"] > 0 and point["tokens"] is not None
    ]
    if not trained:
        return
    tokens = max(point["tokens"] or 0 for point in trained)
    late = [point for point in trained if (point["tokens"] or 0) >= tokens / 2]
    bottom = min(original["loss"], *(point["mean"] - (point["sd"] or 0) for point in late))
    top = max(point["mean"] + (point["sd"] or 0) for point in late)
    margin = 0.08 * (top - bottom) or 0.1
    axes.set_ylim(bottom - margin, top + margin)
