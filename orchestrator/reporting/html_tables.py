"""The tables of the report page, as HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.reporting.comparison import (
    COLUMNS,
    OF_THE_CHECKPOINT,
    UNTOLD,
    Row,
    cells,
    footnote,
    seeds_of,
)
from orchestrator.reporting.durations import clock
from orchestrator.reporting.repeat_command import command_of
from orchestrator.storage.records import (
    POOLED_NOTE,
    PROMOTION,
    TrialRecord,
    front,
    number,
    percent,
    promotion_cells,
    state_text,
    untrained_text,
    without_probes,
)

MOST_ROWS = 500
"""Trials that the table of a page holds; of more, the best of each budget."""


def comparison_table(rows: Sequence[Row]) -> str:
    """The rows of `comparison.compare`; the lowest mean of each budget at the last rung is bold."""
    best: dict[float, float] = {}
    for row in (row for row in rows if row["last"]):
        best[row["kv_ratio"]] = min(row["loss"]["mean"], best.get(row["kv_ratio"], math.inf))
    body = []
    for row in rows:
        *numbers, counts = cells(row)
        strong = row["last"] and row["loss"]["mean"] == best[row["kv_ratio"]]
        told = "".join(f"<td>{text(cell)}</td>" for cell in numbers)
        body.append((strong, f'{told}<td class="text">{text(counts)}</td>'))
    return f"<p>{text(footnote(rows))} The lowest mean of each budget: bold.</p>" + table(COLUMNS, body)


def trial_table(trials: Sequence[TrialRecord], base: Mapping[str, Any]) -> str:
    """Every trial by budget and loss, those on the front bold; probes of the searcher are only counted."""
    probes = [t for t in trials if t.probe]
    trials = without_probes(trials)
    best, several = {t.trial_id for t in front(trials)}, len(seeds_of(trials)) > 1
    rows, shown = [], _shown(trials)
    for t in shown:
        cells = [
            t.recipe,
            percent(t.kv_ratio),
            str(t.kv_bytes_per_token or "-"),
            f"{t.learning_rate:.1e}",
            *([UNTOLD if t.seed is None else str(t.seed)] if several else []),
            str(t.step),
            untrained_text(t),
            number(t.loss),
            number(t.loss - base["loss"], "+.3f"),
            number(t.last.get("kl")),
            state_text(t),
            clock(sum(t.seconds.values())),
            t.trial_id,
        ]
        note = f'<td class="text">{text(t.error or "")}</td>'
        rows.append((t.trial_id in best, "".join(f"<td>{text(c)}</td>" for c in cells) + note))
    names = (
        "recipe",
        OF_THE_CHECKPOINT,
        "KV bytes/token",
        "rate",
        *(("seed",) if several else ()),
        "steps",
        "untrained",
        "loss",
        "loss increase",
        "KL",
        "state",
        "time",
        "trial",
        "error",
    )
    whole = "<p>On the front: bold.</p>" + table(names, rows)
    if len(shown) < len(trials):
        whole += f"<p>The best of each budget; {len(trials) - len(shown)} more are in journal.jsonl.</p>"
    if any(t.relaxes for t in shown):
        whole += f"<p>{text(POOLED_NOTE)}.</p>"
    if copies := sum(t.copy_of is not None for t in trials):
        whole += f"<p>{copies} led to the same model as another trial and were not trained again.</p>"
    if probes:
        whole += f"<p>And {len(probes)} probes of the searcher, measured untrained ({text(probes[0].recipe)}).</p>"
    return whole


def _shown(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials of a table, by budget and loss: all, or the best of each budget."""
    ordered = sorted(trials, key=lambda t: (-t.kv_ratio, t.loss))
    budgets = {t.kv_ratio for t in trials}
    each = MOST_ROWS // max(1, len(budgets))
    if len(ordered) <= MOST_ROWS:
        return ordered
    return [t for budget in sorted(budgets, reverse=True) for t in [t for t in ordered if t.kv_ratio == budget][:each]]


def promotion_table(promoted: Sequence[Mapping[str, Any]]) -> str:
    """What was promoted, and why not what was not."""
    rows = []
    for p in promoted:
        reasons = "; ".join(p.get("reasons", ())) or str(p.get("model_uri") or p.get("folder") or "")
        if p.get("model_uri") and p.get("shipped"):
            loads = "" if p.get("plain") else ", in Headfold's own format (not for stock transformers)"
            reasons += f": the {p['shipped']}{loads}"
        cells = [*promotion_cells(p), p["trial_id"]]
        rows.append(
            (
                p.get("status") == "promoted",
                "".join(f"<td>{text(c)}</td>" for c in cells) + f'<td class="text">{text(reasons)}</td>',
            )
        )
    told = (
        "Held-out loss: of the untrained conversion, of the best measured step (which is shipped), after the last "
        "step, of the baseline at its own best step, and of the original model."
    )
    return f"<p>{text(told)}</p>" + table((*PROMOTION, "trial", "where, or why not"), rows)


def repeat_table(points: Sequence[TrialRecord], snapshot: str) -> str:
    """Of each trial: what it was, its digests, and the command that makes it again."""
    parts = [
        "<p>Each command runs one trial to the last rung, from the stored settings of this search. Equal versions, "
        "processors and numbers of workers give an equal plan and losses that differ by rounding.</p>"
    ]
    for trial in points:
        facts = {
            "learning rate": f"{trial.learning_rate:g}",
            "seed": UNTOLD if trial.seed is None else str(trial.seed),
            "steps": str(trial.step),
            "plan digest": trial.plan_digest or UNTOLD,
            "weights digest": trial.last.get("weights_digest") or UNTOLD,
            "trial": trial.trial_id,
            "MLflow run": trial.run_id or UNTOLD,
        }
        told = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in facts.items())
        command = command_of(trial, snapshot)
        how = (
            f'<pre class="command">{text(command)}</pre>'
            if command
            else f"<p>No command makes this plan; it lies in trials/{text(trial.trial_id)}/plan.json.</p>"
        )
        head = f"{trial.recipe}, {percent(trial.kv_ratio)} of the checkpoint's KV: {number(trial.loss)}"
        parts.append(f"<details><summary>{text(head)}</summary><dl>{told}</dl>{how}</details>")
    return "\n".join(parts)


def table(names: Sequence[str], rows: Sequence[tuple[bool, str]], text_from: int | None = None) -> str:
    """A table of rows `(bold, its cells as HTML)`; columns from `text_from` on (the last one) hold text."""
    last = len(names) - 1 if text_from is None else text_from
    head = "".join(f"<th{' class=text' if i >= last else ''}>{text(n)}</th>" for i, n in enumerate(names))
    body = "\n".join(f"<tr{' class=front' if strong else ''}>{cells}</tr>" for strong, cells in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def text(value: str) -> str:
    return html.escape(str(value))
