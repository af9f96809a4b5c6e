"""Pictures of a search, for MLflow and for the report: matplotlib figures from plain records."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib.figure import Figure

from attention.plan import AttentionPlan
from orchestrator.results import TrialRecord, front

# Colours that stay apart for colour-blind eyes (Okabe and Ito), each with a marker of its own.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 11,
    "svg.fonttype": "none",
    "svg.hashsalt": "headfold",
}


def _family(trial: TrialRecord) -> str:
    """Under which name a trial is drawn: candidates of the searcher's own (joint-...) share one."""
    return trial.recipe.split("-")[0] if trial.recipe.startswith("joint-") else trial.recipe


def _looks(recipes: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        for i, name in enumerate(dict.fromkeys(recipes))
    }


def _figure() -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    return figure, figure.add_subplot()


def front_figure(
    trials: Sequence[TrialRecord], base: Mapping[str, Any], promoted: Sequence[Mapping[str, Any]] = ()
) -> Figure:
    """Held-out loss against KV bytes a token: every trial at its last rung, the front, the untouched model."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure()
        looks = _looks([_family(t) for t in trials])
        scored = [t for t in trials if t.usable]
        for name, look in looks.items():
            mine = [t for t in scored if _family(t) == name]
            if not mine:
                continue
            most = max(t.step for t in scored)
            # Hollow: stopped at an earlier rung, so trained less than its neighbours on the picture.
            fills = [look["color"] if t.step == most else "none" for t in mine]
            axes.scatter(
                [t.kv_bytes_per_token for t in mine],
                [t.loss for t in mine],
                label=name,
                s=48,
                zorder=3,
                marker=look["marker"],
                facecolors=fills,
                edgecolors=look["color"],
                linewidths=1.4,
            )
        if len({t.step for t in scored}) > 1:
            axes.scatter([], [], s=48, facecolors="none", edgecolors="#444444", label="hollow: stopped earlier")
        best = front(trials)
        axes.plot(
            [t.kv_bytes_per_token for t in best], [t.loss for t in best], color="#444444", lw=1, zorder=2, label="front"
        )
        after = [p for p in promoted if p.get("loss") is not None]
        if after:
            axes.scatter(
                [p["kv_bytes_per_token"] for p in after],
                [p["loss"] for p in after],
                s=150,
                facecolors="none",
                edgecolors="#111111",
                linewidths=1.4,
                zorder=4,
                label="promoted",
            )
        axes.axhline(base["loss"], color="#888888", ls="--", lw=1.2, label=f"untouched ({base['loss']:.3f})")
        axes.set_xlabel("KV cache, bytes a token")
        axes.set_ylabel("held-out loss, nats a token")
        axes.legend(fontsize=9, frameon=False)
        return figure


def rungs_figure(trials: Sequence[TrialRecord], base: Mapping[str, Any]) -> Figure:
    """Held-out loss over training steps, one line a trial; solid for the largest budget, dashed for the next."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure()
        looks = _looks([_family(t) for t in trials])
        budgets = sorted({t.kv_ratio for t in trials}, reverse=True)
        lines = {b: ("-", "--", ":", "-.")[i % 4] for i, b in enumerate(budgets)}
        told = set()
        for trial in (t for t in trials if t.rungs):
            name = _family(trial)
            label = None if name in told else name
            told.add(name)
            scored = [(r["step"], r["loss"]) for r in trial.rungs if r["loss"] is not None]
            steps, losses = [step for step, _ in scored], [loss for _, loss in scored]
            axes.plot(steps, losses, ls=lines[trial.kv_ratio], ms=5, lw=1.4, label=label, **looks[name])
        for budget, line in lines.items():
            axes.plot([], [], ls=line, color="#444444", label=f"{budget:.0%} KV")
        axes.axhline(base["loss"], color="#888888", lw=1)
        axes.set_xlabel("training steps")
        axes.set_ylabel("held-out loss, nats a token")
        axes.legend(fontsize=9, frameon=False, ncols=2)
        return figure


def budgets_figure(plans: Mapping[str, AttentionPlan]) -> Figure:
    """Kept key heads and value heads in each layer, one row a plan and side."""
    with matplotlib.rc_context(STYLE):
        rows = [
            (f"{name}  {side}", [getattr(layer, f"{side}_heads") for layer in plan.layers])
            for name, plan in plans.items()
            for side in ("key", "value")
        ]
        table = np.array([counts for _, counts in rows])
        heads = max(plan.num_heads for plan in plans.values())
        figure = Figure(figsize=(7, 0.9 + 0.32 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(False)
        axes.imshow(table, cmap="Blues", vmin=0, vmax=heads, aspect="auto")
        if table.shape[1] <= 16:
            for (row, column), count in np.ndenumerate(table):
                axes.text(
                    column,
                    row,
                    str(count),
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if count > heads / 2 else "#222222",
                )
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
        axes.set_xticks(range(table.shape[1]) if table.shape[1] <= 16 else range(0, table.shape[1], 4))
        axes.set_xlabel("layer")
        return figure


def svg(figure: Figure) -> str:
    """The figure as an SVG element that fits the width of its page."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def save_png(figure: Figure, path: str | Path) -> Path:
    figure.savefig(path, format="png", dpi=130)
    return Path(path)
