"""Pictures of a search and of a checkpoint, for MLflow and for the report: matplotlib figures from plain records."""

from orchestrator.reporting.figures.comparison import bytes_figure, tokens_figure
from orchestrator.reporting.figures.course import (
    phases_figure,
    proxy_agreement,
    proxy_figure,
    timeline_figure,
)
from orchestrator.reporting.figures.curve import curve_figure
from orchestrator.reporting.figures.drawing import save_png, svg
from orchestrator.reporting.figures.inspection import (
    LAYERS,
    evenly,
    pairs_figure,
    recipes_figure,
    sensitivity_figure,
)
from orchestrator.reporting.figures.measured import relaxation_figure, similarity_figure
from orchestrator.reporting.figures.search import budgets_figure, front_figure, rungs_figure

__all__ = [
    "LAYERS",
    "budgets_figure",
    "bytes_figure",
    "curve_figure",
    "evenly",
    "front_figure",
    "pairs_figure",
    "phases_figure",
    "proxy_agreement",
    "proxy_figure",
    "recipes_figure",
    "relaxation_figure",
    "rungs_figure",
    "save_png",
    "sensitivity_figure",
    "similarity_figure",
    "svg",
    "timeline_figure",
    "tokens_figure",
]
