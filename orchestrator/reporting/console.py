"""What a search prints at its end: trials, front, promotion, and where things lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from orchestrator.reporting import comparison
from orchestrator.reporting.promoted_models import lines_of, promoted_models
from orchestrator.reporting.tables import PROMOTION, comparison_table, promotion_table, trial_table
from orchestrator.storage import records
from orchestrator.storage.records import TrialRecord

PAGE_ONLY = ("seed", "KL", "last", "time", "trial", "error")  # columns of trials that a terminal has no room for


def console(width: int = 140) -> Console:
    """Plain text at least `width` columns wide where the output is no terminal (a job's log)."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=width)


def print_trials(trials: Sequence[TrialRecord], original: Mapping[str, Any]) -> None:
    out, table = console(), trial_table(trials, original, most=len(trials))
    out.print(
        "\nTrials (loss: of the best measured step; * on the front; the original model has "
        f"{original['loss']:.3f} nats per token):"
    )
    out.print(table.for_terminal([name for name in table.columns if name not in PAGE_ONLY], star=True))
    for note in table.notes:
        out.print(note, markup=False)
    for trial in (t for t in trials if t.status == records.FAILED):
        trace = f" (trace: {trial.error_log})" if trial.error_log else ""
        print(f"trial {trial.trial_id} ({trial.name}) failed: {trial.error}{trace}")


def print_comparison(rows: Sequence[comparison.Row]) -> None:
    """Arms with their spread over seeds, if there are several seeds."""
    if comparison.several_seeds(rows):
        out = console(140)
        out.print("\nComparison:")
        out.print(comparison_table(rows).for_terminal())
        out.print(comparison.footnote(rows), markup=False)


def print_promotion(promotion: Mapping[str, Any]) -> None:
    candidates = list(promotion.get("candidates", {}).values())
    if candidates:
        out, table = console(150), promotion_table(candidates)
        out.print("\nPromotion (held-out loss; the best measured step is shipped):")
        out.print(table.for_terminal([*PROMOTION, "where, or why not"]))
        for note in table.notes:
            print(note)


def print_promoted(promotion: Mapping[str, Any]) -> None:
    """Where each promoted model lies, and the commands that serve it, whole whatever the width of the terminal."""
    for line in lines_of(promoted_models(promotion)):
        print(line)
