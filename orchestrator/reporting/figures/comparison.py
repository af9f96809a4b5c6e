"""Arms against each other, from the rows of `comparison.compare_arms`: mean and sd over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from attention.base.text import compact
from attention.ratios import percent
from orchestrator.reporting.comparison import Row
from orchestrator.reporting.figures.drawing import (
    INK,
    KV_BYTES,
    LOSS,
    MUTED,
    PAPER,
    legend_below,
    looks_of,
    one_axes,
    styled,
)
from orchestrator.storage.records import family

APART, WIDEST = 0.025, 0.18  # how far arms of one KV ratio stand apart sideways, and all of them: shares of its bytes
NEAR = 0.05  # nats: increases below it stand on a linear scale, the others on a logarithmic one
TICKS = (0, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


@styled
def bytes_figure(rows: Sequence[Row], original: Mapping[str, Any]) -> Figure:
    """Increase of the held-out loss against KV bytes per token: one line an arm at its best rates, bars of one sd, arms
    of one KV ratio a little apart sideways. Hollow: the row compares at an earlier rung than the others."""
    figure, axes = one_axes(5.2, KV_BYTES)
    arms = _arms(rows)
    styles, handles = looks_of(arms), {}
    apart = min(APART, WIDEST / len(arms)) if arms else 0.0
    for place, (name, mine) in enumerate(arms.items()):
        handles[name] = _bars(axes, mine, 1 + apart * (place - (len(arms) - 1) / 2), styles[name])
    line = axes.axhline(0, color=MUTED, ls="--", lw=1.2)
    drawn = [row for mine in arms.values() for row in mine]
    if not all(row["last"] for row in drawn):
        handles["hollow: stopped earlier"] = Line2D([], [], ls="", marker="o", mfc=PAPER, color=INK)
    axes.set_xscale("log", base=2)
    places = sorted({row["kv_bytes_per_token"] for row in drawn})
    axes.set_xticks(places, [f"{place:,}" for place in places])
    ends = [row["loss_increase"] + sign * (row["loss"]["sd"] or 0.0) for row in drawn for sign in (-1, 1)]
    _loss_increases(axes, original, min(ends, default=0.0), max(ends, default=1.0))
    if axes.get_ylim()[0] < 0:
        handles["original model"] = line
    legend_below(figure, handles)
    return figure


def _bars(axes: Any, rows: Sequence[Row], shift: float, look: dict[str, Any]) -> Any:
    """Draw one arm; returns its line."""
    x = [row["kv_bytes_per_token"] * shift for row in rows]
    y = [row["loss_increase"] for row in rows]
    sd = [row["loss"]["sd"] or 0.0 for row in rows]
    (line,) = axes.plot(x, y, lw=1.1, ms=4.5, zorder=3, **look)
    axes.errorbar(x, y, sd, fmt="none", ecolor=look["color"], elinewidth=1.6, capsize=3.5, zorder=4)
    early = [i for i, row in enumerate(rows) if not row["last"]]
    axes.plot([x[i] for i in early], [y[i] for i in early], ls="", ms=7, mfc=PAPER, zorder=5, **look)
    return line


def _loss_increases(axes: Any, original: Mapping[str, Any], lowest: float, highest: float) -> None:
    """The axis of increases. The original model has its place on it unless all arms are far above."""
    axes.set_yscale("symlog", linthresh=NEAR, linscale=0.5)
    low = lowest / 1.25 if lowest > NEAR else 1.25 * min(lowest, 0) - NEAR / 5
    high = 1.25 * max(highest, 0) + NEAR / 5
    axes.set_ylim(low, high)
    shown = [tick for tick in sorted({sign * tick for tick in TICKS for sign in (-1, 1)}) if low <= tick <= high]
    axes.set_yticks(shown, [f"{tick:+g}" if tick else "0" for tick in shown])
    axes.minorticks_off()
    axes.set_ylabel(f"increase of held-out loss over {original['loss']:.3f}, nats per token")


@styled
def tokens_figure(rows: Sequence[Row], original: Mapping[str, Any]) -> Figure:
    """Held-out loss against tokens trained on, those of a relaxation included: a row of panels a KV ratio, on the left
    from the untrained model on, on the right the trained models from close by. One line an arm at its best rate, its
    band one standard deviation to each side; dashed where a relaxation went on, in which nothing is measured."""
    kv_ratios = list(dict.fromkeys(row["kv_ratio"] for row in rows))
    figure = Figure(figsize=(7, 0.7 + 2.6 * len(kv_ratios)), layout="constrained")
    grid = figure.subplots(len(kv_ratios), 2, squeeze=False)
    arms = _arms(rows, points=True)
    styles, handles = looks_of(arms), {}
    trained = (p["step"] for mine in arms.values() for row in mine for p in row["curve"] if p["step"] > 0)
    usual = min(trained, default=None)  # an arm that is measured later for the first time has been relaxing
    for kv_ratio, (whole, close) in zip(kv_ratios, grid, strict=True):
        here = {name: row for name, mine in arms.items() for row in mine if row["kv_ratio"] == kv_ratio}
        for name, row in here.items():
            for axes in (whole, close):
                handles[name] = _curve(axes, row["curve"], usual, styles[name])
        _zoom(close, here, original)
        whole.set_title(f"{percent(kv_ratio)} of the checkpoint's KV cache", fontsize=10, loc="left")
        close.set_title("from close by", fontsize=10, loc="left")
        for axes in (whole, close):
            handles["original model"] = axes.axhline(original["loss"], color=MUTED, ls="--", lw=1.2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    for axes in grid[-1]:
        axes.set_xlabel("tokens trained on")
    figure.supylabel(LOSS, fontsize=11)
    legend_below(figure, handles)
    return figure


def _arms(rows: Sequence[Row], points: bool = False) -> dict[str, list[Row]]:
    """The rows that have a loss and a place, by the name they are drawn under, bytes rising.

    Of the searcher's own candidates, each with a name of its own, only the best at each KV ratio is drawn.
    """
    best: dict[str, dict[float, Row]] = {}
    for row in sorted(rows, key=lambda r: (not r["last"], r["loss"]["mean"] or 0.0)):
        drawn = row["curve"] if points else row["loss"]["mean"] is not None and row["kv_bytes_per_token"]
        if drawn:
            best.setdefault(family(row["recipe"]), {}).setdefault(row["kv_ratio"], row)
    names = dict.fromkeys(family(row["recipe"]) for row in rows)
    return {name: [best[name][b] for b in sorted(best[name])] for name in names if name in best}


def _curve(axes: Any, curve: Sequence[Mapping[str, Any]], usual: int | None, look: dict[str, Any]) -> Any:
    """Draw one arm; returns its line. Points without a count of tokens are left out (a search of an older version)."""
    known = [p for p in curve if p["tokens"] is not None]
    x, y = [p["tokens"] for p in known], [p["mean"] for p in known]
    spreads = [p["sd"] or 0.0 for p in known]
    gap = len(known) > 1 and known[0]["step"] == 0 and usual is not None and known[1]["step"] > usual
    solid = 1 if gap else 0
    (line,) = axes.plot(x[solid:], y[solid:], lw=1.4, ms=4.5, zorder=3, **look)
    low, high = ([m + sign * s for m, s in zip(y, spreads, strict=True)] for sign in (-1, 1))
    axes.fill_between(x[solid:], low[solid:], high[solid:], color=look["color"], alpha=0.15, lw=0)
    if gap:
        axes.errorbar(x[1:2], y[1:2], spreads[1:2], fmt="none", ecolor=look["color"], capsize=2.5, zorder=4)
        axes.plot(x[:2], y[:2], ls=(0, (4, 3)), lw=1.2, ms=4.5, zorder=3, **look)
    return line


def _zoom(axes: Any, rows: Mapping[str, Row], original: Mapping[str, Any]) -> None:
    """Show what lies between the original model and the losses of the later half of the training."""
    trained = [p for row in rows.values() for p in row["curve"] if p["step"] > 0 and p["tokens"] is not None]
    if not trained:
        return
    most = max(p["tokens"] for p in trained)
    late = [p for p in trained if p["tokens"] >= most / 2]
    bottom = min(original["loss"], *(p["mean"] - (p["sd"] or 0) for p in late))
    top = max(p["mean"] + (p["sd"] or 0) for p in late)
    margin = 0.08 * (top - bottom) or 0.1
    axes.set_ylim(bottom - margin, top + margin)
