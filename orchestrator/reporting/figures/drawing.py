"""Shared code of all figures: colours of light and dark pages, style, legends, values, files."""

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
from orchestrator.storage.records import OriginalRecord, counts_per_gpu

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#882255",
    "#999933",
    "#332288",
    "#7A4B1E",
    "#44AA99",
)
"""Colours that colour-blind readers can distinguish: Okabe and Ito's, then some of Tol's."""
_DARK_COLOURS = (
    "#4fa8e0",
    "#ff8a3d",
    "#2fc59b",
    "#e69ac4",
    "#f2b632",
    "#9fd8f7",
    "#e6edf3",
    "#d46a9f",
    "#c5c55a",
    "#9d8cf0",
    "#c58f55",
    "#6fd0c0",
)
INK = "#1b1f24"
"""Text and lines."""
MUTED = "#656d76"
"""Lines in the background."""
FAINT = "#c4c9d0"
"""Thin lines."""
PAPER = "white"
"""Fills hollow marks."""
_ON_LIGHT = "#222222"
_ON_DARK = "#fafafa"
"""Text in the cells of a heat map, which is the same on a light and on a dark page."""
THEME = {
    "ink": (INK, "#e6edf3"),
    "muted": (MUTED, "#9aa4b2"),
    "faint": (FAINT, "#4a525c"),
    "paper": ("#ffffff", "#0d1117"),
    **{f"series-{i}": pair for i, pair in enumerate(zip(COLOURS, _DARK_COLOURS, strict=True))},
}
"""Colours that a page names by variables of its stylesheet: on a light page, on a dark one."""
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", "*", ">", "h")
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
KV_BYTES_LABEL = "KV cache, bytes per token"
LOSS_LABEL = "held-out loss, nats per token"
SIDE_TITLES = {"key": "keys", "value": "values"}
_POINTS = "|"  # between the words of points in the name of a group
WIDTH = 7.0  # inches
NARROW_WIDTH = 3.9  # for a narrow page


def styles_of(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a colour and a marker for each name; after twelve, colours repeat."""
    styles = {}
    for index, name in enumerate(dict.fromkeys(names)):
        colour = COLOURS[index % len(COLOURS)]
        marker = _MARKERS[(index + index // len(COLOURS)) % len(_MARKERS)]
        styles[name] = {"color": colour, "marker": marker}
    return styles


def kv_bytes_label(original: OriginalRecord) -> str:
    """Return the label of an axis of KV bytes: with tensor parallelism they are of each GPU."""
    return KV_BYTES_LABEL + (", on each GPU" if counts_per_gpu(original) else "")


def single_axes(
    height: float = 4.2, x_label: str = "", y_label: str = "", width: float = WIDTH
) -> tuple[Figure, Any]:
    """Return a figure of one plot, and its axes; sizes are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def write_cells(
    axes: Any,
    table: np.ndarray,
    to_text: Callable[[Any], str],
    is_dark: Callable[[Any], bool],
    size: float,
) -> None:
    """Write the numbers of a heat map into its cells, light where it is dark."""
    for (row, column), value in np.ndenumerate(table):
        colour = _ON_DARK if is_dark(value) else _ON_LIGHT
        text = to_text(value)
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)


def legend_below(figure: Figure, handles: Mapping[str, Any], columns: int = 4) -> None:
    """Draw one legend for all axes of a figure, under them, so that it covers nothing."""
    if handles:
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=columns,
            fontsize=9,
            frameon=False,
        )


def label_points(artist: Any, values: Iterable[str]) -> None:
    """Give each marker of a plot or scatter plot the text that a page shows on hover.

    Args:
        artist: A line with markers, or a collection of points.
        values: The text of each of its points, in order.
    """
    artist.set_gid(_POINTS + _POINTS.join(value.replace(_POINTS, " ") for value in values))


def _with_values(text: str) -> str:
    """Return an SVG whose labelled markers have their text as an attribute."""
    before, *groups = re.split(rf' id="{re.escape(_POINTS)}([^"]*)"', text)
    parts = [before]
    for values, following in zip(groups[::2], groups[1::2], strict=True):
        words = values.split(_POINTS)
        named = (f'<use data-value="{value}" ' for value in words)
        parts.append(
            re.sub("<use ", lambda _, named=named: next(named), following, count=len(words))
        )
    return "".join(parts)


def svg(figure: Figure, label: str) -> str:
    """Return the figure as an SVG element with the width and colours of its page.

    Args:
        figure: The figure.
        label: Description for screen readers, as markup-safe text.
    """
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = _with_values(text)
    # Names of groups, the same in every figure, which are not referenced
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)
    for name, (light, _) in THEME.items():
        text = re.sub(rf"{light}\b", f"var(--{name})", text, flags=re.IGNORECASE)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def save_png(figure: Figure, path: str | Path) -> Path:
    """Write the figure to a file."""
    figure.savefig(path, format="png", dpi=130, metadata={"Software": SOFTWARE})
    return Path(path)
