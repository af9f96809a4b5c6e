"""Tables as rows of text, for the terminal (rich) and for pages (jinja2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import rich.table
from rich.text import Text

from attention.base.text import number
from attention.base.timing import clock
from attention.ratios import percent
from orchestrator.reporting import comparison
from orchestrator.reporting.comparison import KV_COLUMN, NO_VALUE, ComparisonRow
from orchestrator.storage import records
from orchestrator.storage.cache_points import ORIGINAL_ROLE, CachePoint, engine_front
from orchestrator.storage.records import OriginalRecord, TrialRecord, front

PROSE = ("trials", "error", "flags", "result", "layers from the first", "value", "how")
WRAPPED = ("engines", "path")
"""Columns of text that a page may show in several short lines."""
LEFT = (
    "",
    "recipe",
    "model",
    "cache",
    "state",
    "version",
    "what",
    "supported",
    "metric",
    *PROSE,
    *WRAPPED,
)
"""Columns of text; others contain numbers: right-aligned, never wrapped."""
MAX_ROWS = 500
"""Largest number of trials in the table of a page; of more, the best of each KV ratio."""


@dataclass(frozen=True)
class Table:
    """Rows of text.

    Attributes:
        columns: Names of the columns.
        rows: A cell for each column.
        marked: Indices of highlighted rows, bold on a page.
        intro: A sentence above it.
        notes: Sentences below it.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()
    intro: str = ""
    notes: Sequence[str] = ()

    def for_terminal(
        self, columns: Sequence[str] = (), *, star: bool = False, **options: Any
    ) -> rich.table.Table:
        """Return some or all of the columns for the terminal.

        Args:
            columns: Names of the columns to show (default: all).
            star: Whether a first column has a star in marked rows.
            **options: Of `rich.table.Table`.
        """
        names = columns or self.columns
        indices = [self.columns.index(name) for name in names]
        table = rich.table.Table(box=None, pad_edge=False, **options)
        for name in ("", *names) if star else names:
            left = name in LEFT
            justify = "left" if left else "right"
            table.add_column(name, justify=justify, no_wrap=not left, overflow="fold")
        for row_index, row in enumerate(self.rows):
            cells = [Text(row[index]) for index in indices]
            if star:
                cells.insert(0, Text("*" if row_index in self.marked else ""))
            table.add_row(*cells)
        return table


def with_intro(table: Table, intro: str) -> Table:
    """Return the same table with a sentence above it."""
    return replace(table, intro=intro)


def facts_table(facts: Mapping[str, Any]) -> Table:
    """Return names and values, without empty ones."""
    rows = [(name, str(value)) for name, value in facts.items() if value not in (None, "")]
    return Table(("what", "value"), rows)


KV_BYTES_COLUMN = "KV bytes/token"
TRIAL_COLUMNS = (
    "recipe",
    KV_COLUMN,
    KV_BYTES_COLUMN,
    "rate",
    "seed",
    "steps",
    "untrained",
    "loss",
    "loss increase",
    "at step",
    "KL",
    "last",
    "state",
    "time",
    "trial",
    "error",
)
PER_GPU_COLUMN = "per GPU"
_DECODE_TIME = "decode ms/token"
_TRIALS_INTRO = (
    "Trials on the front are bold. loss: held-out loss at the best measured step (step 0: before "
    "training); last: after all steps."
)

_CACHES_INTRO = (
    "Each model with the cache formats of engines: keys and values are rounded as in the engine, "
    "bytes are those of the engine, and the increase is over the original model with an unrounded "
    "cache. The front is bold: no other model and format has a lower loss in as few bytes."
)


def trial_table(
    trials: Sequence[TrialRecord], original: OriginalRecord, max_rows: int = MAX_ROWS
) -> Table:
    """Return every trial by KV ratio and loss, those on the front marked; probes are counted."""
    candidates = records.without_probes(trials)
    shown = _best(candidates, max_rows)
    front_ids = {t.trial_id for t in front(candidates)}
    columns: list[str] = list(TRIAL_COLUMNS)
    rows = [_trial_row(t, original) for t in shown]
    further = {  # after the bytes
        PER_GPU_COLUMN: [number(t.kv_bytes_per_token_per_gpu, "d") for t in shown],
        _DECODE_TIME: [
            number(None if (time := t.decode_seconds_per_token) is None else 1000 * time, ".3g")
            for t in shown
        ],
    }
    for column, cells in further.items():
        if any(cell != NO_VALUE for cell in cells):
            index = columns.index("rate")
            columns.insert(index, column)
            for row, cell in zip(rows, cells, strict=True):
                row.insert(index, cell)
    notes = []
    if left_out := len(candidates) - len(shown):
        notes.append(
            f"Only the best at each KV ratio are shown; {left_out} more are in journal.jsonl."
        )
    if any(t.relaxes for t in shown):
        notes.append(f"{records.POOLED_NOTE}.")
    if any(t.relaxation_unfinished for t in shown):
        notes.append(records.unfinished_note(shown))
    if copies := sum(t.copy_of is not None for t in candidates):
        notes.append(f"Trials with the same model as another one, not trained again: {copies}.")
    if probes := [t for t in trials if t.probe]:
        notes.append(
            f"Not shown: {len(probes)} probes of the searcher, measured untrained "
            f"({probes[0].label})."
        )
    marked = frozenset(i for i, t in enumerate(shown) if t.trial_id in front_ids)
    return Table(columns, rows, marked, _TRIALS_INTRO, notes)


def _trial_row(trial: TrialRecord, original: OriginalRecord) -> list[str]:
    untrained = NO_VALUE
    if trial.untrained is not None:
        untrained = number(trial.untrained["loss"]) + (" pooled" if trial.relaxes else "")
    return [
        trial.label,
        percent(trial.kv_ratio),
        str(trial.kv_bytes_per_token or NO_VALUE),
        f"{trial.learning_rate:.1e}",
        NO_VALUE if trial.seed is None else str(trial.seed),
        str(trial.step),
        untrained,
        number(trial.loss),
        number(trial.loss - original["loss"], "+z.3f"),
        str(trial.best.get("step", NO_VALUE)),
        number(trial.best.get("kl")),
        number(trial.last_loss),
        _state(trial),
        clock(trial.spent_seconds),
        trial.trial_id,
        trial.error or "",
    ]


def _state(trial: TrialRecord) -> str:
    if trial.status == records.COPY:
        return f"same as {trial.copy_of}"
    if trial.relaxation_unfinished:
        return f"{trial.status}, {records.UNFINISHED_MARK}"
    return trial.status


def _best(trials: Sequence[TrialRecord], max_rows: int) -> list[TrialRecord]:
    """Return all trials by KV ratio and loss, or an equal number of the best of each ratio."""
    ordered = sorted(trials, key=lambda t: (-t.kv_ratio, t.loss))
    if len(ordered) <= max_rows:
        return ordered
    groups: dict[float, list[TrialRecord]] = {}
    for trial in ordered:
        groups.setdefault(trial.kv_ratio, []).append(trial)
    return [trial for group in groups.values() for trial in group[: max_rows // len(groups)]]


def comparison_table(rows: Sequence[ComparisonRow]) -> Table:
    """Return a table of arms; the lowest mean of each KV ratio at the last rung is marked."""
    best: dict[float, float] = {}
    for row in rows:
        if row["last"]:
            ratio = row["kv_ratio"]
            best[ratio] = min(row["loss"]["mean"], best.get(ratio, math.inf))
    marked = frozenset(
        index
        for index, row in enumerate(rows)
        if row["last"] and row["loss"]["mean"] == best[row["kv_ratio"]]
    )
    intro = f"{comparison.footnote(rows)} The lowest mean at each KV ratio: bold."
    cells = [comparison.cells(row) for row in rows]
    return Table(comparison.COMPARISON_COLUMNS, cells, marked, intro)


CACHE_COLUMNS = (
    "model",
    "cache",
    KV_BYTES_COLUMN,
    "of original",
    "loss increase",
    "standard error",
    "flags",
)


def cache_table(points: Sequence[CachePoint], *, front_only: bool = False) -> Table:
    """Return models and cache formats of engines, by falling bytes; the front is marked.

    Args:
        points: Of a search.
        front_only: Whether to show only the front and the original model.
    """
    best = engine_front(points)
    shown = sorted(points, key=lambda point: (-point["kv_bytes_per_token"], point["loss"]))
    if front_only:
        shown = [point for point in shown if point in best or point["role"] == ORIGINAL_ROLE]
    rows = [
        [
            point["name"],
            point["cache_format"],
            f"{point['kv_bytes_per_token']:,}",
            percent(round(point["share"], 3)),
            number(point["loss_increase"], "+.4f"),
            number(point["loss_increase_stderr"], ".4f"),
            "; ".join(
                f"{engine} {flags}"
                for engine, flags in zip(point["engines"], point["flags"], strict=True)
            ),
        ]
        for point in shown
    ]
    marked = frozenset(index for index, point in enumerate(shown) if point in best)
    return Table(CACHE_COLUMNS, rows, marked, _CACHES_INTRO)


PROMOTION_COLUMNS = (
    "recipe",
    KV_COLUMN,
    "steps",
    "untrained",
    "best",
    "at step",
    "last",
    "baseline",
    "original",
    "state",
    "version",
)


def promotion_table(candidates: Sequence[Mapping[str, Any]]) -> Table:
    """Return the candidates of `promotion.json`: losses, and their paths or the reason for none."""
    return Table(
        (*PROMOTION_COLUMNS, "trial", "result"),
        [_promotion_row(candidate) for candidate in candidates],
        frozenset(i for i, c in enumerate(candidates) if c.get("status") == "promoted"),
        "Held-out loss of the untrained conversion, at the best measured step (which is kept), "
        "after the last step, of the baseline at its best step, and of the original model. "
        f"{records.UNFINISHED_SIGN} {records.UNFINISHED_MARK}: heads were fused before they had "
        "become alike.",
        [_shipped(c) for c in candidates if c.get("model_uri") and c.get("shipped")],
    )


def _promotion_row(candidate: Mapping[str, Any]) -> tuple[str, ...]:
    best_step = candidate.get("best_step")
    unfinished = records.relaxation_left(candidate.get("relaxation_remaining"))
    reasons = "; ".join(candidate.get("reasons", ()))
    return (
        candidate.get("label") or candidate["recipe"],
        percent(candidate["kv_ratio"]),
        str(candidate.get("steps", NO_VALUE)),
        number(candidate.get("untrained_loss")),
        number(candidate.get("loss")) + records.UNFINISHED_SIGN * unfinished,
        NO_VALUE if best_step is None else str(best_step),
        number(candidate.get("last_loss")),
        number(candidate.get("baseline_loss")),
        number(candidate.get("original_loss")),
        candidate.get("status", NO_VALUE),
        str(candidate.get("version") or NO_VALUE),
        candidate["trial_id"],
        reasons or str(candidate.get("model_uri") or candidate.get("folder") or ""),
    )


def _shipped(candidate: Mapping[str, Any]) -> str:
    """Return the path of a promoted model, and the software that loads it."""
    name = candidate.get("name") or f"{candidate['recipe']} {percent(candidate['kv_ratio'])}"
    path = candidate.get("model")
    if candidate.get("plain"):
        form = f"for stock transformers: {path}"
    else:
        form = f"Headfold format (`headfold export` writes it for engines): {path}"
    note = f"{name}: {candidate['shipped']}, {form}"
    if not candidate.get("served"):
        return note
    checks = candidate.get("checks", {})
    check = checks.get("engine", "")
    if "engine_kv_bytes_per_token" in checks:
        check += f" loads it with {checks['engine_kv_bytes_per_token']:g} KV bytes per token"
    return f"{note}; for {checks.get('target')} in {candidate['served']} ({check})"
