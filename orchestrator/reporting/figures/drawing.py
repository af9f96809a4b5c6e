"""What all pictures share: colours, style, how they are saved."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib.figure import Figure

from orchestrator.storage.outputs import SOFTWARE

# Colours that stay apart for colour-blind eyes (Okabe and Ito, then some of Tol's), each with a marker of its own.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
    *("#882255", "#999933", "#332288", "#7A4B1E", "#44AA99"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", "*", ">", "h")
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 11,
    "svg.fonttype": "none",
    "svg.hashsalt": "headfold",
}
styled = matplotlib.rc_context(STYLE)
"""Decorates a function that draws."""
KV_BYTES, LOSS = "KV cache, bytes a token", "held-out loss, nats a token"
"""Labels of axes."""


def looks_of(recipes: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each name; beyond twelve names the colours come back with other markers."""
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]}
        for i, name in enumerate(dict.fromkeys(recipes))
    }


def one_axes(height: float = 4.2, across: str = "", upright: str = "") -> tuple[Figure, Any]:
    """A figure of one plot, its axes labelled."""
    figure = Figure(figsize=(7, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(across)
    axes.set_ylabel(upright)
    return figure, axes


def write_cells(
    axes: Any, table: np.ndarray, text_of: Callable[[Any], str], is_dark: Callable[[Any], bool], size: float
) -> None:
    """Write the numbers of a map of colours into its cells, in white where it is dark."""
    for (row, column), value in np.ndenumerate(table):
        colour = "white" if is_dark(value) else "#222222"
        axes.text(column, row, text_of(value), ha="center", va="center", fontsize=size, color=colour)


def legend_below(figure: Figure, handles: Mapping[str, Any], columns: int = 4) -> None:
    """One legend for all axes of a figure, under them, where it covers nothing."""
    if handles:
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=columns, fontsize=9, frameon=False
        )


def svg(figure: Figure) -> str:
    """The figure as an SVG element that fits the width of its page."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def save_png(figure: Figure, path: str | Path) -> Path:
    figure.savefig(path, format="png", dpi=130, metadata={"Software": SOFTWARE})
    return Path(path)
