"""What a search prints at its end: trials, front, promotion, and where things lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from orchestrator.reporting import comparison
from orchestrator.reporting.comparison import ComparisonRow
from orchestrator.reporting.promoted_models import lines_of, promoted_models
from orchestrator.reporting.tables import (
    CACHE_COLUMNS,
    PROMOTION_COLUMNS,
    cache_table,
    comparison_table,
    promotion_table,
    trial_table,
)
from orchestrator.storage import records
from orchestrator.storage.cache_points import CachePoint
from orchestrator.storage.records import OriginalRecord, TrialRecord

_PAGE_COLUMNS = ("seed", "KL", "last", "time", "trial", "error")
"""Columns of trials that a terminal has no room for."""


def console(width: int = 140) -> Console:
    """Return a console of plain text, `width` columns wide where the output is no terminal."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=width)


def print_trials(trials: Sequence[TrialRecord], original: OriginalRecord) -> None:
    """Print the table of trials, and the errors of those that failed."""
    out = console()
    table = trial_table(trials, original, max_rows=len(trials))
    out.print(
        "\nTrials (loss: of the best measured step; * on the front; the original model has "
        f"{original['loss']:.3f} nats per token):"
    )
    columns = [name for name in table.columns if name not in _PAGE_COLUMNS]
    out.print(table.for_terminal(columns, star=True))
    for note in table.notes:
        out.print(note, markup=False)
    for trial in (t for t in trials if t.status == records.FAILED):
        trace = f" (trace: {trial.error_log})" if trial.error_log else ""
        print(f"trial {trial.trial_id} ({trial.name}) failed: {trial.error}{trace}")


def print_comparison(rows: Sequence[ComparisonRow]) -> None:
    """Print arms with their spread over seeds, if there are several seeds."""
    if comparison.several_seeds(rows):
        out = console(140)
        out.print("\nComparison:")
        out.print(comparison_table(rows).for_terminal())
        out.print(comparison.footnote(rows), markup=False)


def print_promotion(promotion: Mapping[str, Any]) -> None:
    """Print the candidates of `promotion.json`, if there are any."""
    candidates = list(promotion.get("candidates", {}).values())
    if candidates:
        out = console(150)
        table = promotion_table(candidates)
        out.print("\nPromotion (held-out loss; the best measured step is shipped):")
        out.print(table.for_terminal([*PROMOTION_COLUMNS, "where, or why not"]))
        for note in table.notes:
            print(note)


def print_caches(points: Sequence[CachePoint]) -> None:
    """Print the front in engine bytes, and the original model beside it, if it was measured."""
    if points:
        out = console(150)
        out.print(
            "\nFront in engine bytes (* no other model and cache format loses less in as few "
            "bytes):"
        )
        table = cache_table(points, front_only=True)
        out.print(table.for_terminal(CACHE_COLUMNS[:-1], star=True))


def print_promoted(promotion: Mapping[str, Any]) -> None:
    """Print where each promoted model lies, and whole commands that serve it."""
    for line in lines_of(promoted_models(promotion)):
        print(line)
