"""What all pictures share: colours by day and by night, style, the axis of loss increases, how they are saved."""

from __future__ import annotations

import io
import re
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
DARK_COLOURS = (
    *("#4fa8e0", "#ff8a3d", "#2fc59b", "#e69ac4", "#f2b632", "#9fd8f7", "#e6edf3"),
    *("#d46a9f", "#c5c55a", "#9d8cf0", "#c58f55", "#6fd0c0"),
)
INK, MUTED, FAINT, PAPER = "#1b1f24", "#656d76", "#c4c9d0", "white"
"""Text and lines; those in the background; thin ones; what a hollow mark is filled with."""
ON_LIGHT, ON_DARK = "#222222", "#fafafa"
"""Text in the cells of a map of colours, which are the same on a light and on a dark page."""
THEME = {
    "ink": (INK, "#e6edf3"),
    "muted": (MUTED, "#9aa4b2"),
    "faint": (FAINT, "#4a525c"),
    "paper": ("#ffffff", "#0d1117"),
    **{f"series-{i}": pair for i, pair in enumerate(zip(COLOURS, DARK_COLOURS, strict=True))},
}
"""Colours that a page names by variables of its stylesheet: on a light page, on a dark one."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", "*", ">", "h")
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.5,
    "grid.color": FAINT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "font.size": 11,
    "svg.fonttype": "none",
    "svg.hashsalt": "headfold",
}
styled = matplotlib.rc_context(STYLE)
"""Decorates a function that draws."""
KV_BYTES, LOSS = "KV cache, bytes per token", "held-out loss, nats per token"
"""Labels of axes."""
WIDTH, NARROW = 7.0, 3.9
"""Inches of a picture, and of one for a narrow page."""


def looks_of(recipes: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each name; beyond twelve names the colours come back with other markers."""
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]}
        for i, name in enumerate(dict.fromkeys(recipes))
    }


def one_axes(height: float = 4.2, across: str = "", upright: str = "", width: float = WIDTH) -> tuple[Figure, Any]:
    """A figure of one plot, its axes labelled."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(across)
    axes.set_ylabel(upright)
    return figure, axes


def write_cells(
    axes: Any, table: np.ndarray, text_of: Callable[[Any], str], is_dark: Callable[[Any], bool], size: float
) -> None:
    """Write the numbers of a map of colours into its cells, light where it is dark."""
    for (row, column), value in np.ndenumerate(table):
        colour = ON_DARK if is_dark(value) else ON_LIGHT
        axes.text(column, row, text_of(value), ha="center", va="center", fontsize=size, color=colour)


def legend_below(figure: Figure, handles: Mapping[str, Any], columns: int = 4) -> None:
    """One legend for all axes of a figure, under them, where it covers nothing."""
    if handles:
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=columns, fontsize=9, frameon=False
        )


def svg(figure: Figure, label: str) -> str:
    """The figure as an SVG element that fits the width of its page and takes its colours; `label` is what a screen
    reader says of it, as markup-safe text."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)  # names of groups, the same in every figure, used by nobody
    for name, (light, _) in THEME.items():
        text = re.sub(rf"{light}\b", f"var(--{name})", text, flags=re.IGNORECASE)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def save_png(figure: Figure, path: str | Path) -> Path:
    figure.savefig(path, format="png", dpi=130, metadata={"Software": SOFTWARE})
    return Path(path)
