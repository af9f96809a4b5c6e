"""The picture of one recipe at several budgets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from orchestrator.reporting.figures.drawing import COLOURS, STYLE, one_axes


def curve_figure(curve: Mapping[str, Any]) -> Figure:
    """Held-out loss against KV bytes a token of one recipe at several budgets (see
    `orchestrator.conversion.several_ratios`)."""
    with matplotlib.rc_context(STYLE):
        figure, axes = one_axes()
        points = sorted(curve["points"], key=lambda p: p["kv_bytes_per_token"])
        places = [(p["kv_bytes_per_token"], p["loss"]) for p in points]
        axes.plot(*zip(*places, strict=True), color=COLOURS[0], marker="o", lw=1.4, label=curve["recipe"]["name"])
        for point, place in zip(points, places, strict=True):
            text = f"{point['kv_ratio']:.0%}\n{point['loss_increase']:+.3f}"
            axes.annotate(text, place, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9)
        untouched = (curve["kv_bytes_per_token_original"], curve["original_loss"])
        axes.plot(*untouched, color="#444444", marker="s", ls="", label="untouched")
        axes.axhline(curve["original_loss"], color="#888888", ls="--", lw=1.2)
        axes.margins(y=0.25)
        axes.set_xlabel("KV cache, bytes a token")
        axes.set_ylabel("held-out loss, nats a token, no training")
        axes.legend(fontsize=9, frameon=False)
        return figure
