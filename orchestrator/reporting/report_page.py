"""One self-contained page of a search: front, trials, rungs, head budgets, how it was made. No script, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attention.io.files import write_whole
from attention.plan import AttentionPlan
from orchestrator.reporting import figures
from orchestrator.reporting.comparison import Row, compare, several_seeds
from orchestrator.reporting.durations import clock
from orchestrator.reporting.html_tables import (
    comparison_table,
    promotion_table,
    repeat_table,
    table,
    text,
    trial_table,
)
from orchestrator.storage.journal import load_trials
from orchestrator.storage.outputs import GENERATOR, check_file, write_page
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import (
    TrialRecord,
    best_per_budget,
    front,
    percent,
    read_json,
    without_probes,
)

LIMIT = 3_000_000
MOST_POINTS = 30  # of the front, of which the page says how to make them again

BYTES = (
    "Each arm at its best learning rate: mean over seeds, bars of one standard deviation. The upright axis is "
    "logarithmic but for its part next to 0; arms of one budget stand a little apart sideways, so that their bars can "
    "be told from each other."
)
TOKENS = (
    "Mean over seeds at the best learning rate, with a band or bar of one standard deviation; the tokens of a "
    "relaxation count. Dashed: a relaxation went on there, so nothing was measured in between."
)
RELAXATIONS = "One line a trial. Nothing of this is part of the converted model: it is how its weights were reached."
SIMILARITY = (
    "Cosine of two heads' vectors of one token, mean over calibration tokens and over the pairs of a group: as they "
    "are, and after the best map of one head that leaves the model as it is (keys before RoPE: a rotation in each "
    "rotary pair; values: any rotation)."
)

PROXY = (
    "Of the trials that were trained to the last rung, by budget; rho is Spearman's rank correlation. Trials that were "
    "stopped early are not among them, nor relaxations, of which rung 0 measures a model that they never train from: "
)
TIMELINE = "A row a trial: pale until it is measured untrained, full while its workers train; a stroke is a rung."
PHASES = (
    "A trial's own process plans, converts and measures; 'train' is what its workers take, with measuring and saving. "
    "Starts of processes and waiting are in none of them."
)

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 66rem;
  margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
figcaption { margin: .25rem 0 .5rem; font-size: .875rem; color: #444; max-width: 46rem; }
p.lead { margin: .25rem 0 1rem; color: #444; }
figure { margin: 0; } svg { width: 100%; height: auto; max-width: 46rem; display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .875rem; white-space: nowrap; width: 100%; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #e3e3e3; }
th:first-child, td:first-child, td.text, th.text { text-align: left; } thead th { border-bottom: 2px solid #888; }
details { margin: .5rem 0; } summary { cursor: pointer; }
@media (max-width: 44rem) { svg { width: 32rem; max-width: none; } }
tr.front td { font-weight: 600; } td.text { white-space: normal; min-width: 8rem; }
pre { overflow-x: auto; background: #f5f5f5; padding: .75rem; font-size: .8125rem; }
pre.command { white-space: pre-wrap; overflow-wrap: anywhere; margin: .25rem 0 1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; margin: .5rem 0; font-size: .875rem; }
dt { color: #444; } dd { margin: 0; overflow-wrap: anywhere; }
"""


def write_report(search: str | Path, out: str | Path | None = None) -> dict[str, Any]:
    """Write the page of a search folder.

    Returns its path and size, and the rows of `comparison.compare`. Raises ConfigError if `search` is none, or
    if `out` is a file that we did not write.
    """
    folder = SearchFolder.existing(search)
    if out is not None:
        check_file(out, "page", "out")
    content = build_page(folder)
    if len(content.encode()) > LIMIT:
        raise RuntimeError(f"the report has {len(content.encode())} bytes, more than {LIMIT}; this is a bug")
    path = Path(out) if out is not None else folder.report
    if out is None and folder.origin.is_file():
        write_whole(path, content)  # the search's own page, whatever version of Headfold wrote it
    else:
        write_page(path, content)
    trials = load_trials(folder.root)
    rows = compare(trials, read_json(folder.base)) if trials and folder.base.exists() else []
    return {
        "report": str(path.absolute()),
        "bytes": len(content.encode()),
        "search": str(folder.root),
        "comparison": rows,
    }


def build_page(folder: SearchFolder) -> str:
    """The HTML of a search as far as it has come."""
    trials = load_trials(folder.root)
    base = read_json(folder.base) if folder.base.exists() else None
    parts = [f"<h1>Headfold search: {text(folder.root.name)}</h1>"]
    if base is None or not trials:
        parts.append("<p>No trial has reported yet.</p>")
    else:
        parts.append(_lead(without_probes(trials), base))
        rows = compare(trials, base)
        sections = _compared_sections if several_seeds(rows) else _plain_sections
        parts += sections(folder, trials, base, rows)
        parts += _course_sections(trials)
        parts += _repeat_sections(folder, trials)
    parts.append(section("How this was made", _provenance(folder, base)))
    return page(f"Headfold: {folder.root.name}", "\n".join(parts))


def page(title: str, body: str) -> str:
    """A whole page in the style of all of ours."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{GENERATOR}<title>{text(title)}</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _plain_sections(
    folder: SearchFolder, trials: Sequence[TrialRecord], base: Mapping[str, Any], rows: Sequence[Row]
) -> list[str]:
    """Of a search with one seed: every trial is on the pictures."""
    promoted, table_of_all = _promoted(folder), trial_table(trials, base)
    trials = without_probes(trials)
    parts = [section("Quality against KV cache", picture(figures.front_figure(trials, base, promoted)))]
    parts += [section("Promotion", promotion_table(promoted))] if promoted else []
    parts.append(section("Trials", table_of_all))
    parts.append(section("Loss over rungs", picture(figures.rungs_figure(trials, base))))
    parts += _measured_sections(trials)
    best = {f"{t.recipe} {percent(budget)}": t.trial_id for budget, t in best_per_budget(trials).items()}
    plans = _plans(folder, best)
    title = "Heads kept in each layer (best trial of each budget)"
    return parts + ([section(title, picture(figures.budgets_figure(plans)))] if plans else [])


def _compared_sections(
    folder: SearchFolder, trials: Sequence[TrialRecord], base: Mapping[str, Any], rows: Sequence[Row]
) -> list[str]:
    """Of a search with several seeds: arms are compared, single trials come last and folded away."""
    promoted, table_of_all = _promoted(folder), trial_table(trials, base)
    trials = without_probes(trials)
    parts = [section("Comparison", comparison_table(rows))]
    if any(row["loss"]["mean"] is not None for row in rows):
        parts.append(section("Loss against KV cache", picture(figures.bytes_figure(rows, base), BYTES)))
        parts.append(section("Loss against tokens", picture(figures.tokens_figure(rows, base), TOKENS)))
    parts += _measured_sections(trials)
    parts += [section("Promotion", promotion_table(promoted))] if promoted else []
    ids = {f"{r['recipe']} {percent(r['kv_ratio'])}": r["trial_ids"][0] for r in rows if r["trial_ids"]}
    uneven = {name: plan for name, plan in _plans(folder, ids).items() if not _even(plan)}
    if uneven:
        title = "Heads kept in each layer (where layers differ; first seed at the best rate)"
        parts.append(section(title, picture(figures.budgets_figure(uneven))))
    front_of_all = picture(figures.front_figure(trials, base, promoted))
    parts.append(section("Every trial", _folded(f"{len(trials)} trials", front_of_all + table_of_all)))
    return parts


def _measured_sections(trials: Sequence[TrialRecord]) -> list[str]:
    """What trials have measured of themselves, as far as they have."""
    made = (
        ("Relaxations over time", figures.relaxation_figure(trials), RELAXATIONS),
        ("Similarity of the heads that share", figures.similarity_figure(trials), SIMILARITY),
    )
    return [section(title, picture(figure, caption)) for title, figure, caption in made if figure is not None]


def _course_sections(trials: Sequence[TrialRecord]) -> list[str]:
    """How the search went: what rung 0 foretold, when trials ran, where their time went."""
    trials = [t for t in without_probes(trials) if t.copy_of is None]  # whose scores are not its own
    told = [
        f"at {percent(budget)} the best untrained ends {a['regret']:.3f} nats above the best of {a['trials']:.0f}"
        for budget, a in figures.proxy_agreement(trials).items()
    ]
    made = (
        ("Rank before training against final rank", figures.proxy_figure(trials), PROXY + "; ".join(told) + "."),
        ("When trials ran", figures.timeline_figure(trials), TIMELINE),
        ("Where the time went", figures.phases_figure(trials), PHASES),
    )
    return [section(title, picture(figure, caption)) for title, figure, caption in made if figure is not None]


def _repeat_sections(folder: SearchFolder, trials: Sequence[TrialRecord]) -> list[str]:
    """What it takes to make each point of the front again."""
    points = front(trials)[:MOST_POINTS]
    return [section("Each point of the front again", repeat_table(points, str(folder.snapshot)))] if points else []


def _promoted(folder: SearchFolder) -> list[dict[str, Any]]:
    promotion = read_json(folder.promotion) if folder.promotion.exists() else {}
    return list(promotion.get("candidates", {}).values())


def _lead(trials: Sequence[TrialRecord], base: Mapping[str, Any]) -> str:
    told = [
        f"{percent(budget)} of the checkpoint's KV: {trial.loss:.3f} ({trial.loss - base['loss']:+.3f}) by "
        f"{trial.recipe}"
        for budget, trial in best_per_budget(trials).items()
    ]
    return (
        f'<p class="lead">Original model: {base["loss"]:.3f} nats a token held out, '
        f"{base['kv_bytes_per_token']} KV bytes a token. Best of {len(trials)} trials: "
        f"{text('; '.join(told)) or 'none'}.</p>"
    )


def _plans(folder: SearchFolder, trial_ids: Mapping[str, str]) -> dict[str, AttentionPlan]:
    """The plans of some trials by the name they are shown under, where they were written."""
    files = {name: folder.trial(trial_id) / "plan.json" for name, trial_id in trial_ids.items()}
    return {
        name: AttentionPlan.from_json(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()
    }


def _even(plan: AttentionPlan) -> bool:
    """Whether every layer keeps as many key heads and as many value heads as any other."""
    return len({(layer.key_heads, layer.value_heads) for layer in plan.layers}) == 1


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
    rows = [(False, f'<td>{text(k)}</td><td class="text">{text(str(v))}</td>') for k, v in facts.items() if v]
    return (
        table(("what", "value"), rows, text_from=1) + f"<pre>{text(folder.snapshot.read_text(encoding='utf-8'))}</pre>"
    )


def section(title: str, content: str) -> str:
    return f"<h2>{text(title)}</h2>\n{content}"


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{text(summary)}</summary>\n{content}\n</details>"


def picture(figure: Any, caption: str = "") -> str:
    told = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return f'<figure>{told}<div class="wide">{figures.svg(figure)}</div></figure>'
