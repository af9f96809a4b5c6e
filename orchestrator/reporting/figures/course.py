"""How a search went: what rung 0 foretold, when trials ran, and where their time went."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from scipy.stats import rankdata, spearmanr

from attention.ratios import percent
from orchestrator.reporting.figures.drawing import (
    COLOURS,
    FAINT,
    INK,
    MUTED,
    PAPER,
    legend_below,
    looks_of,
    one_axes,
    styled,
)
from orchestrator.storage import records
from orchestrator.storage.records import TrialRecord, family

LEAST = 4  # trials of a KV ratio from which on a rank correlation tells anything
ROWS = 60  # trials that a timeline shows
ORDER = ("load", "plan", "convert", "refine", "evaluate", "save", "similarity")
SHORT = 0.01  # share of an arm's time below which phases are drawn as one
Agreement = dict[str, float | int]


def proxy_agreement(trials: Sequence[TrialRecord]) -> dict[float, Agreement]:
    """How well the untrained loss ranks the trials of a KV ratio that came to the last rung, ratios falling.

    `rho`: Spearman's rank correlation of the losses at rung 0 and at the last rung; `regret`: nats that the best at
    rung 0 ends above the best of all. Ratios of fewer than LEAST trials are left out, and so are relaxations.
    """
    agreements: dict[float, Agreement] = {}
    for kv_ratio, pairs in _pairs(trials).items():
        if len(pairs) < LEAST or len({a for a, _ in pairs}) == 1 or len({b for _, b in pairs}) == 1:
            continue
        rho = float(spearmanr([a for a, _ in pairs], [b for _, b in pairs]).statistic)  # type: ignore[union-attr]
        regret = min(pairs)[1] - min(b for _, b in pairs)
        agreements[kv_ratio] = {"trials": len(pairs), "rho": rho, "regret": regret}
    return agreements


def _pairs(trials: Sequence[TrialRecord]) -> dict[float, list[tuple[float, float]]]:
    """(loss at rung 0, loss at the last rung that any trial has reached), of those that got there, by KV ratio."""
    last = max((t.step for t in trials if t.usable), default=0)
    pairs: dict[float, list[tuple[float, float]]] = {}
    for t in sorted(trials, key=lambda t: -t.kv_ratio):
        first = next((r["loss"] for r in t.rungs if r["step"] == 0 and r["loss"] is not None), math.inf)
        if last and t.usable and not t.relaxes and t.step == last and math.isfinite(first):
            pairs.setdefault(t.kv_ratio, []).append((first, t.last_loss))
    return pairs


@styled
def proxy_figure(trials: Sequence[TrialRecord]) -> Figure | None:
    """Rank among the trials of a KV ratio before training (rung 0) against rank at the last rung, a mark a trial.

    None where no KV ratio has enough trials that were trained to the end.
    """
    agreements = proxy_agreement(trials)
    if not agreements:
        return None
    figure, axes = one_axes(4.6, "rank untrained (rung 0), 1 is best", "rank at the last rung")
    most, handles = 1, {}
    pairs, looks = _pairs(trials), looks_of(map(percent, agreements)).values()
    for (kv_ratio, agreement), look in zip(agreements.items(), looks, strict=True):
        firsts, lasts = (rankdata(losses, "ordinal") for losses in zip(*pairs[kv_ratio], strict=True))
        axes.plot(firsts, lasts, ls="", ms=6, alpha=0.8, **look)
        rho = f"rho = {agreement['rho']:+.2f}, {agreement['trials']} trials"
        name = f"{percent(kv_ratio)} of the checkpoint's KV: {rho}"
        handles[name] = Line2D([], [], ls="", **look)
        most = max(most, len(firsts))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.plot([1, most], [1, most], color=MUTED, lw=1, ls="--", zorder=0)
    legend_below(figure, handles, columns=2)
    return figure


# ---- time -------------------------------------------------------------------------------------------------------


def seconds_by_phase(trial: TrialRecord) -> dict[str, float]:
    """Seconds of a trial: the phases of its own process, then `train`: its workers, measuring and saving included."""
    seconds = {name: trial.seconds[name] for name in ORDER if name in trial.seconds}
    seconds |= {name: value for name, value in trial.seconds.items() if name not in seconds}
    if trial.step and trial.last.get("seconds"):
        seconds["train"] = float(trial.last["seconds"])
    return seconds


@styled
def phases_figure(trials: Sequence[TrialRecord]) -> Figure | None:
    """Mean seconds of a trial of each arm, by phase; None if no trial has told any."""
    arms: dict[str, list[dict[str, float]]] = {}
    for t in trials:
        if seconds := seconds_by_phase(t):
            arms.setdefault(family(t.recipe), []).append(seconds)
    if not arms:
        return None
    names = list(dict.fromkeys(n for seconds in arms.values() for one in seconds for n in one if n != "train"))
    names.append("train")
    means = np.array([[statistics.fmean(t.get(n, 0.0) for t in mine) for n in names] for mine in arms.values()])
    is_long = (means > SHORT * means.sum(1, keepdims=True)).any(0)
    widths = {name: means[:, i] for i, name in enumerate(names) if is_long[i]} | {"other": means[:, ~is_long].sum(1)}
    figure, axes = one_axes(1.3 + 0.28 * len(arms), "seconds a trial, mean")
    handles, left = {}, np.zeros(len(arms))
    for place, (name, width) in enumerate(widths.items()):
        if width.any():
            colour = FAINT if name == "other" else COLOURS[place % len(COLOURS)]
            handles[name] = axes.barh(range(len(arms)), width, left=left, color=colour, height=0.7)
            left = left + width
    axes.set_yticks(range(len(arms)), list(arms), fontsize=9)
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    legend_below(figure, handles)
    return figure


def spans(trial: TrialRecord) -> list[tuple[float, float, int]]:
    """When a trial worked: (start, end, step at the end) of each report that has a time, in seconds since 1970."""
    working, before = [], 0.0
    for rung in trial.rungs:
        taken = float(rung.get("seconds") or 0.0)
        # Seconds of workers count from the first of their rungs; those of rung 0 are of the trial's own process.
        seconds = taken if rung["step"] == 0 else max(0.0, taken - before)
        before = taken if rung["step"] else 0.0
        if rung.get("timestamp"):
            working.append((float(rung["timestamp"]) - seconds, float(rung["timestamp"]), int(rung["step"])))
    return working


@styled
def timeline_figure(trials: Sequence[TrialRecord]) -> Figure | None:
    """When each trial worked, a row a trial by its start: a bar up to each rung, a mark where it was stopped or failed.

    Of more than ROWS trials, those that got furthest. None if the trials' reports have no times.
    """
    timed = [(t, working) for t in trials if (working := spans(t))]
    if not timed:
        return None
    timed.sort(key=lambda pair: (-pair[0].step, pair[0].loss))
    timed = sorted(timed[:ROWS], key=lambda pair: pair[1][0])
    zero = min(working[0][0] for _, working in timed)
    looks = looks_of([family(t.recipe) for t, _ in timed])
    longest = max(working[-1][1] for _, working in timed) - zero  # seconds
    unit, name = (3600, "hours") if longest > 5400 else (60, "minutes") if longest > 90 else (1, "seconds")
    figure, axes = one_axes(1.4 + 0.13 * len(timed), f"{name} since the first trial started", "trials")
    for row, (trial, working) in enumerate(timed):
        colour = looks[family(trial.recipe)]["color"]
        for start, end, step in working:
            x, width = (start - zero) / unit, max(end - start, 1.0) / unit
            axes.barh(row, width, left=x, height=0.72, color=colour, alpha=0.45 if step == 0 else 1.0)
            axes.plot([x + width] * 2, [row - 0.45, row + 0.45], color=INK, lw=0.8)
        if mark := _ENDS.get(trial.status):
            axes.plot((working[-1][1] - zero) / unit, row, marker=mark, color=INK, ms=4, mfc=PAPER, ls="")
    axes.set_ylim(len(timed) - 0.3, -0.7)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    handles: dict[str, object] = {n: Line2D([], [], color=look["color"], lw=5) for n, look in looks.items()}
    for status, mark in _ENDS.items():
        if any(t.status == status for t, _ in timed):
            handles[status] = Line2D([], [], color=INK, marker=mark, mfc=PAPER, ls="")
    legend_below(figure, handles)
    return figure


_ENDS: Mapping[str, str] = {records.STOPPED: "o", records.FAILED: "X", records.KILLED: "P"}
