"""The course of a search: the prediction of rung 0, the times of trials and of their phases."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

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
    single_axes,
    styled,
    styles_of,
)
from orchestrator.storage import records
from orchestrator.storage.records import TrialRecord, family

_MIN_TRIALS = 4  # of a KV ratio, for a rank correlation
_MAX_TRIALS = 60  # that a timeline shows
_PHASES = ("load", "plan", "convert", "refine", "evaluate", "save", "similarity")
_SHORT_PHASE = 0.01  # share of an arm's time below which phases are drawn as one
_END_MARKS: Mapping[str, str] = {records.STOPPED: "o", records.FAILED: "X", records.KILLED: "P"}


class ProxyAgreement(TypedDict):
    """Agreement of the ranks by untrained loss with the final ranks at a KV ratio."""

    trials: int
    rho: float
    """Spearman's rank correlation of the losses at rung 0 and at the last rung."""
    regret: float
    """Final loss of the best trial at rung 0 minus the lowest final loss, in nats."""


class Interval(NamedTuple):
    """A time interval in which a trial ran, in seconds since 1970, and the step at its end."""

    start: float
    end: float
    step: int


def proxy_agreement(trials: Sequence[TrialRecord]) -> dict[float, ProxyAgreement]:
    """Return how well rung 0 ranks the trials that reached the last rung, by falling KV ratio.

    Ratios of fewer than four trials are left out, and so are relaxations.
    """
    agreements: dict[float, ProxyAgreement] = {}
    for kv_ratio, pairs in _pairs(trials).items():
        firsts, lasts = zip(*pairs, strict=True)
        if len(pairs) < _MIN_TRIALS or len(set(firsts)) == 1 or len(set(lasts)) == 1:
            continue
        rho = float(spearmanr(firsts, lasts).statistic)  # type: ignore[union-attr]
        regret = min(pairs)[1] - min(lasts)
        agreements[kv_ratio] = {"trials": len(pairs), "rho": rho, "regret": regret}
    return agreements


def _pairs(trials: Sequence[TrialRecord]) -> dict[float, list[tuple[float, float]]]:
    """Return the losses at rung 0 and at the last rung, of the trials that reached it."""
    last = max((t.step for t in trials if t.usable), default=0)
    pairs: dict[float, list[tuple[float, float]]] = {}
    for trial in sorted(trials, key=lambda t: -t.kv_ratio):
        untrained = [r["loss"] for r in trial.rungs if r["step"] == 0 and r["loss"] is not None]
        first = untrained[0] if untrained else math.inf
        complete = last and trial.usable and not trial.relaxes and trial.step == last
        if complete and math.isfinite(first):
            pairs.setdefault(trial.kv_ratio, []).append((first, trial.last_loss))
    return pairs


@styled
def proxy_figure(trials: Sequence[TrialRecord]) -> Figure | None:
    """Draw the rank before training against the rank at the last rung, one mark per trial.

    Returns:
        None where no KV ratio has enough trials that were trained to the end.
    """
    agreements = proxy_agreement(trials)
    if not agreements:
        return None
    figure, axes = single_axes(
        4.6, "rank before training (rung 0), 1 is best", "rank at the last rung"
    )
    highest = 1
    handles = {}
    pairs = _pairs(trials)
    styles = styles_of(map(percent, agreements))
    for kv_ratio, agreement in agreements.items():
        style = styles[percent(kv_ratio)]
        ranks = (rankdata(losses, "ordinal") for losses in zip(*pairs[kv_ratio], strict=True))
        firsts, lasts = ranks
        axes.plot(firsts, lasts, ls="", ms=6, alpha=0.8, **style)
        rho = f"rho = {agreement['rho']:+.2f}, {agreement['trials']} trials"
        name = f"KV ratio {percent(kv_ratio)}: {rho}"
        handles[name] = Line2D([], [], ls="", **style)
        highest = max(highest, len(firsts))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.plot([1, highest], [1, highest], color=MUTED, lw=1, ls="--", zorder=0)
    legend_below(figure, handles, columns=2)
    return figure


# ---- time ----------------------------------------------------------------------------------------


def seconds_by_phase(trial: TrialRecord) -> dict[str, float]:
    """Return seconds of the phases of a trial's own process, and `train` for its workers.

    That includes measuring and saving.
    """
    seconds = {name: trial.seconds[name] for name in _PHASES if name in trial.seconds}
    seconds |= {name: value for name, value in trial.seconds.items() if name not in seconds}
    if trial.step and trial.last.get("seconds"):
        seconds["train"] = float(trial.last["seconds"])
    return seconds


@styled
def phases_figure(trials: Sequence[TrialRecord]) -> Figure | None:
    """Draw the mean seconds of a trial of each arm, by phase; None without reported times."""
    arms: dict[str, list[dict[str, float]]] = {}
    for trial in trials:
        if seconds := seconds_by_phase(trial):
            arms.setdefault(family(trial.recipe), []).append(seconds)
    if not arms:
        return None
    names = {name: None for arm in arms.values() for seconds in arm for name in seconds}
    names.pop("train", None)
    phases = [*names, "train"]
    means = np.array(
        [
            [statistics.fmean(seconds.get(name, 0.0) for seconds in arm) for name in phases]
            for arm in arms.values()
        ]
    )
    is_long = (means > _SHORT_PHASE * means.sum(1, keepdims=True)).any(0)
    widths = {name: means[:, i] for i, name in enumerate(phases) if is_long[i]}
    widths["other"] = means[:, ~is_long].sum(1)
    figure, axes = single_axes(1.3 + 0.28 * len(arms), "mean seconds per trial")
    handles = {}
    left = np.zeros(len(arms))
    for index, (name, width) in enumerate(widths.items()):
        if width.any():
            colour = FAINT if name == "other" else COLOURS[index % len(COLOURS)]
            bars = axes.barh(range(len(arms)), width, left=left, color=colour, height=0.7)
            handles[name] = bars
            left = left + width
    axes.set_yticks(range(len(arms)), list(arms), fontsize=9)
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    legend_below(figure, handles)
    return figure


def working_intervals(trial: TrialRecord) -> list[Interval]:
    """Return when a trial ran, up to each report that has a time."""
    intervals = []
    before = 0.0
    for rung in trial.rungs:
        total = float(rung.get("seconds") or 0.0)
        # Seconds of workers count from their first rung; those of rung 0 belong to the trial's own
        # process
        seconds = total if rung["step"] == 0 else max(0.0, total - before)
        before = total if rung["step"] else 0.0
        if rung.get("timestamp"):
            end = float(rung["timestamp"])
            intervals.append(Interval(end - seconds, end, int(rung["step"])))
    return intervals


@styled
def timeline_figure(trials: Sequence[TrialRecord]) -> Figure | None:
    """Draw when each trial ran, one row per trial by its start.

    A bar goes up to each rung; a mark shows where a trial was stopped or failed. Of many trials,
    those with the most steps are drawn.

    Returns:
        None if the trials' reports have no times.
    """
    timed = [(trial, working) for trial in trials if (working := working_intervals(trial))]
    if not timed:
        return None
    timed.sort(key=lambda pair: (-pair[0].step, pair[0].loss))
    timed = sorted(timed[:_MAX_TRIALS], key=lambda pair: pair[1][0])
    zero = min(working[0].start for _, working in timed)
    longest = max(working[-1].end for _, working in timed) - zero
    unit, name = 1, "seconds"
    if longest > 5400:
        unit, name = 3600, "hours"
    elif longest > 90:
        unit, name = 60, "minutes"
    styles = styles_of([family(trial.recipe) for trial, _ in timed])
    height = 1.4 + 0.13 * len(timed)
    figure, axes = single_axes(height, f"{name} since the first trial started", "trials")
    for row, (trial, working) in enumerate(timed):
        colour = styles[family(trial.recipe)]["color"]
        for start, end, step in working:
            x = (start - zero) / unit
            width = max(end - start, 1.0) / unit
            alpha = 0.45 if step == 0 else 1.0
            axes.barh(row, width, left=x, height=0.72, color=colour, alpha=alpha)
            axes.plot([x + width] * 2, [row - 0.45, row + 0.45], color=INK, lw=0.8)
        if mark := _END_MARKS.get(trial.status):
            x = (working[-1].end - zero) / unit
            axes.plot(x, row, marker=mark, color=INK, ms=4, mfc=PAPER, ls="")
    axes.set_ylim(len(timed) - 0.3, -0.7)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    handles: dict[str, object] = {
        name: Line2D([], [], color=style["color"], lw=5) for name, style in styles.items()
    }
    for status, mark in _END_MARKS.items():
        if any(trial.status == status for trial, _ in timed):
            handles[status] = Line2D([], [], color=INK, marker=mark, mfc=PAPER, ls="")
    legend_below(figure, handles)
    return figure
