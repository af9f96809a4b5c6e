"""The output at the end of a search: trials, front, promotion, and the paths of the results."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator.reporting import comparison
from orchestrator.reporting.comparison import ComparisonRow
from orchestrator.reporting.promoted_models import best_lines, promoted_models
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
"""Columns of trials that are too wide for a terminal."""


def console(width: int = 140) -> Console:
    """Return a console of plain text, `width` columns wide if the output is no terminal."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=width)


def print_trials(trials: Sequence[TrialRecord], original: OriginalRecord) -> None:
    """Print the table of trials, and the errors of those that failed."""
    out = console()
    table = trial_table(trials, original, max_rows=len(trials))
    out.print(
        f"\nTrials (loss at the best measured step; original model {original['loss']:.3f} nats per "
        "token; * on the front):"
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
        out.print("\nPromotion (held-out loss; the best measured step is kept):")
        out.print(table.for_terminal([*PROMOTION_COLUMNS, "result"]))
        for note in table.notes:
            print(note)


def print_caches(points: Sequence[CachePoint]) -> None:
    """Print the front in engine bytes and the original model, if they were measured."""
    if points:
        out = console(150)
        out.print(
            "\nFront with the cache formats of engines (* no other model and format has a lower "
            "loss in as few bytes):"
        )
        table = cache_table(points, front_only=True)
        out.print(table.for_terminal(CACHE_COLUMNS[:-1], star=True))


def print_ending(
    promotion: Mapping[str, Any],
    caches: Sequence[CachePoint],
    folder: Path,
    report: str | None = None,
) -> None:
    """Print the last lines: the best model of each size, how to serve one, report and MLflow.

    Args:
        promotion: The content of `promotion.json`; empty without a promotion.
        caches: Measured in the cache formats of engines.
        folder: Of the search.
        report: Path of its page; None for the command that writes it.
    """
    for line in best_lines(promoted_models(promotion, caches)):
        print(line)
    print(f"report   {report or f'headfold report {shlex.quote(str(folder))}'}")
    print(f"MLflow   headfold ui {shlex.quote(str(folder))}")
