"""Pictures of a search and of a checkpoint, for MLflow and for the report: matplotlib figures from plain records."""

from orchestrator.reporting.figures.comparison import bytes_figure as bytes_figure
from orchestrator.reporting.figures.comparison import tokens_figure as tokens_figure
from orchestrator.reporting.figures.course import phases_figure as phases_figure
from orchestrator.reporting.figures.course import proxy_agreement as proxy_agreement
from orchestrator.reporting.figures.course import proxy_figure as proxy_figure
from orchestrator.reporting.figures.course import timeline_figure as timeline_figure
from orchestrator.reporting.figures.drawing import save_png as save_png
from orchestrator.reporting.figures.drawing import svg as svg
from orchestrator.reporting.figures.inspection import LAYERS as LAYERS
from orchestrator.reporting.figures.inspection import evenly as evenly
from orchestrator.reporting.figures.inspection import pairs_figure as pairs_figure
from orchestrator.reporting.figures.inspection import recipes_figure as recipes_figure
from orchestrator.reporting.figures.inspection import sensitivity_figure as sensitivity_figure
from orchestrator.reporting.figures.measured import relaxation_figure as relaxation_figure
from orchestrator.reporting.figures.measured import similarity_figure as similarity_figure
from orchestrator.reporting.figures.search import budgets_figure as budgets_figure
from orchestrator.reporting.figures.search import curve_figure as curve_figure
from orchestrator.reporting.figures.search import front_figure as front_figure
from orchestrator.reporting.figures.search import rungs_figure as rungs_figure
