"""What a search prints at its end: trials, front, promotion, and where things lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.reporting import comparison
from orchestrator.reporting.comparison import OF_THE_CHECKPOINT
from orchestrator.storage import records
from orchestrator.storage.records import TrialRecord, front, number, percent


def console(width: int = 110) -> Console:
    """Plain text at least `width` columns wide where the output is no terminal (a job's log)."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=width)


def trial_table(trials: Sequence[TrialRecord], base: Mapping[str, Any]) -> Table:
    """All trials but probes by budget and loss; those on the front carry a star. Losses in nats a token."""
    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("", "left"), ("recipe", "left"), (OF_THE_CHECKPOINT, "right"), ("bytes/token", "right"), ("rate", "right"),
        ("steps", "right"), ("untrained", "right"), ("loss", "right"), ("loss increase", "right"), ("state", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
    best = {t.trial_id for t in front(trials)}
    for t in sorted(records.without_probes(trials), key=lambda t: (-t.kv_ratio, t.loss)):
        table.add_row(
            "*" if t.trial_id in best else "",
            t.recipe,
            percent(t.kv_ratio),
            "-" if t.kv_bytes_per_token is None else str(t.kv_bytes_per_token),
            f"{t.learning_rate:.1e}",
            str(t.step),
            records.untrained_text(t),
            number(t.loss),
            number(t.loss - base["loss"], "+.3f"),
            records.state_text(t),
        )
    return table


def print_trials(trials: Sequence[TrialRecord], base: Mapping[str, Any]) -> None:
    out = console()
    out.print(f"\nTrials (* on the front; the original model has {base['loss']:.3f} nats a token):")
    out.print(trial_table(trials, base))
    if any(t.relaxes for t in trials):
        out.print(records.POOLED_NOTE, markup=False)
    if copies := sum(t.copy_of is not None for t in trials):
        out.print(f"{copies} led to the same model as another trial and were not trained again", markup=False)
    if probes := [t for t in trials if t.probe]:
        out.print(f"and {len(probes)} probes of the searcher, measured untrained ({probes[0].recipe})")
    for trial in (t for t in trials if t.status == records.FAILED):
        trace = f" (trace: {trial.error_log})" if trial.error_log else ""
        which = f"{trial.recipe}, {percent(trial.kv_ratio)} of the checkpoint's KV"
        print(f"trial {trial.trial_id} ({which}) failed: {trial.error}{trace}")


def comparison_table(rows: Sequence[comparison.Row]) -> Table:
    """The rows of `comparison.compare`."""
    table = Table(box=None, pad_edge=False)
    for name in comparison.COLUMNS:
        last = name == "trials"
        table.add_column(name, justify="left" if last or name == "recipe" else "right", no_wrap=not last)
    for row in rows:
        table.add_row(*comparison.cells(row))
    return table


def print_comparison(rows: Sequence[comparison.Row]) -> None:
    """Arms with their spread over seeds, if there are several seeds."""
    if not comparison.several_seeds(rows):
        return
    out = console(140)
    out.print("\nComparison:")
    out.print(comparison_table(rows))
    out.print(comparison.footnote(rows), markup=False)


def promotion_table(candidates: Sequence[Mapping[str, Any]]) -> Table:
    """What was promoted, and why not what was not: the columns of `results.PROMOTION`."""
    table = Table(box=None, pad_edge=False)
    for name in (*records.PROMOTION, "where, or why not"):
        table.add_column(name, overflow="fold")
    for c in candidates:
        where = "; ".join(c.get("reasons", ())) or str(c.get("model_uri") or "")
        table.add_row(*records.promotion_cells(c), where)
    return table


def print_promotion(promotion: Mapping[str, Any]) -> None:
    candidates = list(promotion.get("candidates", {}).values())
    if candidates:
        out = console(150)
        out.print("\nPromotion (held-out loss; the best measured step is shipped):")
        out.print(promotion_table(candidates))
        for c in candidates:
            if c.get("model_uri") and c.get("shipped"):
                print(f"{c['recipe']} {records.percent(c['kv_ratio'])} KV: the {c['shipped']}, {_format(c)}")


def _format(candidate: Mapping[str, Any]) -> str:
    """Where a promoted model lies, and what loads it."""
    if candidate.get("plain"):
        return f"exported for stock transformers to {candidate.get('model')}"
    return f"in Headfold's own format, which stock transformers does not load, in {candidate.get('model')}"
