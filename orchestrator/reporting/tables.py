"""Tables as rows of text: what the terminal (rich) and the pages (jinja2, `orchestrator.reporting.pages`) both show."""

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
from orchestrator.reporting.comparison import OF_THE_CHECKPOINT, UNTOLD
from orchestrator.storage import records
from orchestrator.storage.records import TrialRecord, front

PROSE = ("trials", "error", "where, or why not", "layers from the first", "value", "how")
LEFT = (
    "",
    "recipe",
    "state",
    "version",
    "what",
    "holds it",
    "metric",
    *PROSE,
)  # other columns hold numbers: right-aligned, never wrapped
MOST_ROWS = 500
"""Trials that the table of a page holds; of more, the best of each KV ratio."""


@dataclass(frozen=True)
class Table:
    """Rows of text. `marked`: the indices of rows that stand out, bold on a page; `notes`: sentences below it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()
    intro: str = ""
    notes: Sequence[str] = ()

    def for_terminal(self, columns: Sequence[str] = (), *, star: bool = False, **options: Any) -> rich.table.Table:
        """Some of the columns, or all; with `star` a first column has a star in marked rows."""
        names = columns or self.columns
        places = [self.columns.index(name) for name in names]
        made = rich.table.Table(box=None, pad_edge=False, **options)
        for name in ("", *names) if star else names:
            left = name in LEFT
            made.add_column(name, justify="left" if left else "right", no_wrap=not left, overflow="fold")
        for index, row in enumerate(self.rows):
            cells = [Text(row[place]) for place in places]
            made.add_row(*([Text("*" if index in self.marked else ""), *cells] if star else cells))
        return made


def with_intro(table: Table, intro: str) -> Table:
    """The same table under a sentence."""
    return replace(table, intro=intro)


def facts_table(facts: Mapping[str, Any]) -> Table:
    """Names and values; those that are empty are left out."""
    return Table(("what", "value"), [(name, str(value)) for name, value in facts.items() if value not in (None, "")])


TRIALS = (
    *("recipe", OF_THE_CHECKPOINT, "KV bytes/token", "rate", "seed", "steps", "untrained", "loss", "loss increase"),
    *("at step", "KL", "last", "state", "time", "trial", "error"),
)
DECODE_TIME = "decode ms/token"
TRIALS_INTRO = (
    "On the front: bold. loss: held out, of the best step that was measured, which may be before training (at step 0); "
    "last: after all steps."
)


def trial_table(trials: Sequence[TrialRecord], original: Mapping[str, Any], most: int = MOST_ROWS) -> Table:
    """Every trial by KV ratio and loss, those on the front marked; probes of the searcher are only counted."""
    candidates = records.without_probes(trials)
    drawn = _best(candidates, most)
    on_front = {t.trial_id for t in front(candidates)}
    rows = [
        (
            t.label,
            percent(t.kv_ratio),
            str(t.kv_bytes_per_token or UNTOLD),
            f"{t.learning_rate:.1e}",
            UNTOLD if t.seed is None else str(t.seed),
            str(t.step),
            UNTOLD if t.untrained is None else number(t.untrained["loss"]) + (" pooled" if t.relaxes else ""),
            number(t.loss),
            number(t.loss - original["loss"], "+.3f"),
            str(t.best.get("step", UNTOLD)),
            number(t.best.get("kl")),
            number(t.last_loss),
            _state(t),
            clock(sum(t.seconds.values())),
            t.trial_id,
            t.error or "",
        )
        for t in drawn
    ]
    columns: tuple[str, ...] = TRIALS
    if any(t.decode_seconds_per_token for t in drawn):  # behind the bytes
        place = TRIALS.index("rate")
        columns = *TRIALS[:place], DECODE_TIME, *TRIALS[place:]
        told = [
            UNTOLD if t.decode_seconds_per_token is None else f"{1000 * t.decode_seconds_per_token:.3g}" for t in drawn
        ]
        rows = [(*row[:place], time, *row[place:]) for row, time in zip(rows, told, strict=True)]
    notes = []
    if left_out := len(candidates) - len(drawn):
        notes.append(f"The best at each KV ratio; {left_out} more are in journal.jsonl.")
    if any(t.relaxes for t in drawn):
        notes.append(f"{records.POOLED_NOTE}.")
    if any(t.relaxation_unfinished for t in drawn):
        notes.append(records.unfinished_note(drawn))
    if copies := sum(t.copy_of is not None for t in candidates):
        notes.append(f"Led to the same model as another trial, and not trained again: {copies}.")
    if probes := [t for t in trials if t.probe]:
        notes.append(f"And {len(probes)} probes of the searcher, measured untrained ({probes[0].label}).")
    marked = frozenset(i for i, t in enumerate(drawn) if t.trial_id in on_front)
    return Table(columns, rows, marked, TRIALS_INTRO, notes)


def _state(trial: TrialRecord) -> str:
    if trial.status == records.COPY:
        return f"same as {trial.copy_of}"
    return f"{trial.status}, {records.UNFINISHED_MARK}" if trial.relaxation_unfinished else trial.status


def _best(trials: Sequence[TrialRecord], most: int) -> list[TrialRecord]:
    """By KV ratio and loss: all trials, or the best of each KV ratio, each its share of `most`."""
    ordered = sorted(trials, key=lambda t: (-t.kv_ratio, t.loss))
    if len(ordered) <= most:
        return ordered
    ratios = sorted({t.kv_ratio for t in trials}, reverse=True)
    return [t for ratio in ratios for t in [t for t in ordered if t.kv_ratio == ratio][: most // len(ratios)]]


def comparison_table(rows: Sequence[comparison.Row]) -> Table:
    """The rows of `comparison.compare_arms`; the lowest mean of each KV ratio at the last rung is marked."""
    best: dict[float, float] = {}
    for row in (row for row in rows if row["last"]):
        best[row["kv_ratio"]] = min(row["loss"]["mean"], best.get(row["kv_ratio"], math.inf))
    marked = frozenset(i for i, r in enumerate(rows) if r["last"] and r["loss"]["mean"] == best[r["kv_ratio"]])
    intro = f"{comparison.footnote(rows)} The lowest mean at each KV ratio: bold."
    return Table(comparison.COLUMNS, [comparison.cells(row) for row in rows], marked, intro)


PROMOTION = (
    *("recipe", OF_THE_CHECKPOINT, "steps", "untrained", "best", "at step", "last", "baseline", "original", "state"),
    "version",
)


def promotion_table(candidates: Sequence[Mapping[str, Any]]) -> Table:
    """What was promoted, and why not what was not: the candidates of `promotion.json`."""
    rows = []
    for c in candidates:
        where = "; ".join(c.get("reasons", ())) or str(c.get("model_uri") or c.get("folder") or "")
        losses = [number(c.get(f"{name}loss")) for name in ("untrained_", "", "last_", "baseline_", "original_")]
        best_step = UNTOLD if c.get("best_step") is None else str(c["best_step"])
        rows.append(
            (c.get("label") or c["recipe"], percent(c["kv_ratio"]), str(c.get("steps", UNTOLD)), *losses[:2], best_step,
             *losses[2:], c.get("status", UNTOLD), str(c.get("version") or UNTOLD), c["trial_id"], where)
        )  # fmt: skip
    return Table(
        (*PROMOTION, "trial", "where, or why not"),
        rows,
        frozenset(i for i, c in enumerate(candidates) if c.get("status") == "promoted"),
        "Held-out loss: of the untrained conversion, of the best measured step (which is shipped), after the last "
        "step, of the baseline at its own best step, and of the original model.",
        [_shipped(c) for c in candidates if c.get("model_uri") and c.get("shipped")],
    )


def _shipped(candidate: Mapping[str, Any]) -> str:
    """Where a promoted model lies, and what loads it."""
    form = (
        f"exported for stock transformers to {candidate.get('model')}"
        if candidate.get("plain")
        else f"in Headfold's own format, which stock transformers does not load, in {candidate.get('model')}"
    )
    name = candidate.get("name") or f"{candidate['recipe']} {percent(candidate['kv_ratio'])}"
    told = f"{name}: the {candidate['shipped']}, {form}"
    if not candidate.get("served"):
        return told
    checks = candidate.get("checks", {})
    shown = checks.get("engine", "")
    if "engine_kv_bytes_per_token" in checks:
        shown += f" loads it with {checks['engine_kv_bytes_per_token']:g} KV bytes per token"
    return f"{told}; for {checks.get('target')} in {candidate['served']} ({shown})"
