"""The tables of the report page, as HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.clock import clock
from orchestrator.comparison import COLUMNS, UNTOLD, Row, cells, footnote, seeds_of
from orchestrator.repetition import command_of
from orchestrator.results import TrialRecord, front, number, percent, without_probes

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
        scored = bool(t.rungs)
        cells = [
            t.recipe,
            percent(t.kv_ratio),
            str(t.kv_bytes_per_token or "-"),
            f"{t.learning_rate:.1e}",
            *([UNTOLD if t.seed is None else str(t.seed)] if several else []),
            str(t.step),
            number(t.rungs[0]["loss"]) if scored else "-",
            number(t.loss),
            number(t.loss - base["loss"], "+.3f"),
            number(t.last.get("kl")),
            t.status,
            clock(sum(t.seconds.values())),
            t.trial_id,
        ]
        note = f'<td class="text">{text(t.error or "")}</td>'
        rows.append((t.trial_id in best, "".join(f"<td>{text(c)}</td>" for c in cells) + note))
    names = (
        "recipe",
        "budget",
        "KV bytes",
        "rate",
        *(("seed",) if several else ()),
        "steps",
        "untrained",
        "loss",
        "rise",
        "KL",
        "state",
        "time",
        "trial",
        "error",
    )
    whole = "<p>On the front: bold.</p>" + table(names, rows)
    if len(shown) < len(trials):
        whole += f"<p>The best of each budget; {len(trials) - len(shown)} more are in trials.json.</p>"
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
        cells = [
            p["recipe"],
            percent(p["kv_ratio"]),
            str(p.get("steps", "-")),
            number(p.get("loss")),
            number(p.get("baseline_loss")),
            p.get("status", "-"),
            str(p.get("version") or "-"),
            p["trial_id"],
        ]
        rows.append(
            (
                p.get("status") == "promoted",
                "".join(f"<td>{text(c)}</td>" for c in cells) + f'<td class="text">{text(reasons)}</td>',
            )
        )
    return table(
        ("recipe", "budget", "steps", "loss", "baseline", "state", "version", "trial", "where, or why not"), rows
    )


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
        head = f"{trial.recipe}, {percent(trial.kv_ratio)} KV: {number(trial.loss)}"
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
