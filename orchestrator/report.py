"""One self-contained page of a search: front, trials, rungs, head budgets, how it was made. No script, no network."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attention.plan import AttentionPlan
from orchestrator import figures
from orchestrator.callbacks import clock
from orchestrator.folders import SearchFolder
from orchestrator.results import TrialRecord, best_per_budget, front, load_trials, number, read_json

LIMIT = 3_000_000

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 60rem;
  margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p.lead { margin: .25rem 0 1rem; color: #444; }
figure { margin: 0; } svg { width: 100%; height: auto; max-width: 46rem; display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .875rem; white-space: nowrap; width: 100%; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #e3e3e3; }
th:first-child, td:first-child, td.text, th.text { text-align: left; } thead th { border-bottom: 2px solid #888; }
tr.front td { font-weight: 600; } td.text { white-space: normal; min-width: 8rem; }
pre { overflow-x: auto; background: #f5f5f5; padding: .75rem; font-size: .8125rem; }
"""


def write_report(search: str | Path, out: str | Path | None = None) -> dict[str, Any]:
    """Write the page of a search folder; returns its path and size. Raises ConfigError if `search` is none."""
    folder = SearchFolder.existing(search)
    page = build_page(folder)
    if len(page.encode()) > LIMIT:
        raise RuntimeError(f"the report has {len(page.encode())} bytes, more than {LIMIT}; this is a bug")
    path = Path(out) if out is not None else folder.report
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return {"report": str(path.absolute()), "bytes": len(page.encode()), "search": str(folder.root)}


def build_page(folder: SearchFolder) -> str:
    """The HTML of a search as far as it has come."""
    trials = load_trials(folder.trials_file)
    base = read_json(folder.base) if folder.base.exists() else None
    promotion = read_json(folder.promotion) if folder.promotion.exists() else {}
    promoted = list(promotion.get("candidates", {}).values())
    parts = [f"<h1>Headfold search: {_text(folder.root.name)}</h1>"]
    if base is None or not trials:
        parts.append("<p>No trial has reported yet.</p>")
    else:
        parts.append(_lead(trials, base))
        parts.append(_section("Quality against KV cache", _picture(figures.front_figure(trials, base, promoted))))
        if promoted:
            parts.append(_section("Promotion", _promotion_table(promoted)))
        parts.append(_section("Trials", _trial_table(trials, base)))
        parts.append(_section("Loss over rungs", _picture(figures.rungs_figure(trials, base))))
        plans = _plans(folder, trials)
        if plans:
            parts.append(
                _section(
                    "Heads kept in each layer (best trial of each budget)", _picture(figures.budgets_figure(plans))
                )
            )
    parts.append(_section("How this was made", _provenance(folder, base)))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Headfold: {_text(folder.root.name)}</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _lead(trials: Sequence[TrialRecord], base: Mapping[str, Any]) -> str:
    told = [
        f"{budget:.0%} KV: {trial.loss:.3f} ({trial.loss - base['loss']:+.3f}) by {trial.recipe}"
        for budget, trial in best_per_budget(trials).items()
    ]
    return (
        f'<p class="lead">Untouched model: {base["loss"]:.3f} nats a token held out, '
        f"{base['kv_bytes_per_token']} KV bytes a token. Best of {len(trials)} trials: "
        f"{_text('; '.join(told)) or 'none'}.</p>"
    )


def _trial_table(trials: Sequence[TrialRecord], base: Mapping[str, Any]) -> str:
    best = {t.trial_id for t in front(trials)}
    rows = []
    for t in sorted(trials, key=lambda t: (-t.kv_ratio, t.loss)):
        scored = bool(t.rungs)
        cells = [
            t.recipe,
            f"{t.kv_ratio:.0%}",
            str(t.kv_bytes_per_token or "-"),
            f"{t.learning_rate:.1e}",
            str(t.step),
            number(t.rungs[0]["loss"]) if scored else "-",
            number(t.loss),
            number(t.loss - base["loss"], "+.3f"),
            number(t.last.get("kl")),
            t.status,
            clock(sum(t.seconds.values())),
            t.trial_id,
        ]
        note = f'<td class="text">{_text(t.error or "")}</td>'
        rows.append((t.trial_id in best, "".join(f"<td>{_text(c)}</td>" for c in cells) + note))
    names = (
        "recipe",
        "budget",
        "KV bytes",
        "rate",
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
    return "<p>On the front: bold.</p>" + _table(names, rows)


def _promotion_table(promoted: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for p in promoted:
        reasons = "; ".join(p.get("reasons", ())) or str(p.get("model_uri") or p.get("folder") or "")
        cells = [
            p["recipe"],
            f"{p['kv_ratio']:.0%}",
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
                "".join(f"<td>{_text(c)}</td>" for c in cells) + f'<td class="text">{_text(reasons)}</td>',
            )
        )
    return _table(
        ("recipe", "budget", "steps", "loss", "baseline", "state", "version", "trial", "where, or why not"), rows
    )


def _plans(folder: SearchFolder, trials: Sequence[TrialRecord]) -> dict[str, AttentionPlan]:
    plans = {}
    for budget, trial in best_per_budget(trials).items():
        file = folder.trial(trial.trial_id) / "plan.json"
        if file.exists():
            plans[f"{trial.recipe} {budget:.0%}"] = AttentionPlan.from_json(file.read_text(encoding="utf-8"))
    return plans


def _provenance(folder: SearchFolder, base: Mapping[str, Any] | None) -> str:
    state = read_json(folder.state) if folder.state.exists() else {}
    versions = read_json(folder.versions) if folder.versions.exists() else {}
    facts = {
        "command": state.get("command"),
        "started": state.get("started"),
        "folder": str(folder.root),
        "tracking": state.get("tracking"),
        "parent run": state.get("parent_run"),
        "time": clock(state["seconds"]) if state.get("seconds") else None,
        **({f"{k} digest": v for k, v in base.get("digests", {}).items()} if base else {}),
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items()),
    }
    rows = [(False, f'<td>{_text(k)}</td><td class="text">{_text(str(v))}</td>') for k, v in facts.items() if v]
    return (
        _table(("what", "value"), rows, text_from=1)
        + f"<pre>{_text(folder.snapshot.read_text(encoding='utf-8'))}</pre>"
    )


def _section(title: str, content: str) -> str:
    return f"<h2>{_text(title)}</h2>\n{content}"


def _picture(figure: Any) -> str:
    return f"<figure>{figures.svg(figure)}</figure>"


def _table(names: Sequence[str], rows: Sequence[tuple[bool, str]], text_from: int | None = None) -> str:
    last = len(names) - 1 if text_from is None else text_from
    head = "".join(f"<th{' class=text' if i >= last else ''}>{_text(n)}</th>" for i, n in enumerate(names))
    body = "\n".join(f"<tr{' class=front' if strong else ''}>{cells}</tr>" for strong, cells in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _text(value: str) -> str:
    return html.escape(str(value))
