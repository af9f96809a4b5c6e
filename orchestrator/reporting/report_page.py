"""One self-contained page of a search: front, trials, rungs, heads kept, how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attention.io.files import write_whole
from attention.plan import AttentionPlan
from orchestrator.reporting.comparison import UNTOLD, Row, compare, several_seeds
from orchestrator.reporting.figures import comparison, course, measured, search
from orchestrator.reporting.page import Section, render_page
from orchestrator.reporting.repeat_command import command_of
from orchestrator.reporting.tables import comparison_table, facts_table, promotion_table, trial_table
from orchestrator.storage import records
from orchestrator.storage.journal import load_trials
from orchestrator.storage.outputs import check_file, write_page
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord, best_per_budget, clock, number, percent, read_json

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
AGAIN = (
    "Each command runs one trial to the last rung, from the stored settings of this search. Equal versions, "
    "processors and numbers of workers give an equal plan and losses that differ by rounding."
)


def write_report(search: str | Path, out: str | Path | None = None) -> dict[str, Any]:
    """Write the page of a search folder.

    Returns its path and size, and the rows of `comparison.compare`. Raises ConfigError if `search` is none, or
    if `out` is a file that we did not write.
    """
    folder = SearchFolder.existing(search)
    if out is not None:
        check_file(out, "page", "out")
    trials = load_trials(folder.root)
    original = _recorded(folder.original)
    rows = compare(trials, original) if trials and original else []
    content = _build_page(folder, trials, original, rows)
    path = Path(out) if out is not None else folder.report
    if out is None and folder.origin.is_file():
        write_whole(path, content)  # the search's own page, whatever version of Headfold wrote it
    else:
        write_page(path, content)
    return {
        "report": str(path.absolute()),
        "bytes": len(content.encode()),
        "search": str(folder.root),
        "comparison": rows,
    }


def _recorded(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _build_page(
    folder: SearchFolder, trials: Sequence[TrialRecord], original: Mapping[str, Any], rows: Sequence[Row]
) -> str:
    """The HTML of a search as far as it has come."""
    sections, lead = [], "No trial has reported yet."
    if trials and original:
        candidates = records.without_probes(trials)
        by_kv_ratio = [
            f"{percent(ratio)} of the checkpoint's KV: {t.loss:.3f} ({t.loss - original['loss']:+.3f}) by {t.label}"
            for ratio, t in best_per_budget(candidates).items()
        ]
        lead = (
            f"Original model: {original['loss']:.3f} nats a token held out, {original['kv_bytes_per_token']} KV bytes "
            f"a token. Best of {len(candidates)} trials: {'; '.join(by_kv_ratio) or 'none'}."
        )
        promoted = list(_recorded(folder.promotion).get("candidates", {}).values())
        front_picture, table = search.front_figure(candidates, original, promoted), trial_table(trials, original)
        promotion = [Section("Promotion", table=promotion_table(promoted))] if promoted else []
        if several_seeds(rows):  # arms are compared, single trials come last and folded away
            every = Section("Every trial", front_picture, table=table, folded=f"{len(candidates)} trials")
            sections = [*_arm_sections(rows, original), *_measured_sections(candidates), *promotion]
            sections += [_uneven_plans(folder, rows), every]
        else:
            best = {t.name: t.trial_id for t in best_per_budget(candidates).values()}
            sections = [
                Section("Quality against KV cache", front_picture),
                *promotion,
                Section("Trials", table=table),
                Section("Loss over rungs", search.rungs_figure(candidates, original)),
                *_measured_sections(candidates),
                _kept_heads("best trial of each budget", _plans(folder, best)),
            ]
        sections += [*_course_sections(candidates), _again_section(folder, trials)]
    title = f"Headfold search: {folder.root.name}"
    return render_page(f"Headfold: {folder.root.name}", title, lead, [*sections, _provenance(folder, original)])


def _arm_sections(rows: Sequence[Row], original: Mapping[str, Any]) -> list[Section]:
    sections = [Section("Comparison", table=comparison_table(rows))]
    if any(row["loss"]["mean"] is not None for row in rows):
        sections.append(Section("Loss against KV cache", comparison.bytes_figure(rows, original), BYTES))
        sections.append(Section("Loss against tokens", comparison.tokens_figure(rows, original), TOKENS))
    return sections


def _measured_sections(trials: Sequence[TrialRecord]) -> list[Section]:
    """What trials have measured of themselves, as far as they have."""
    return [
        Section("Relaxations over time", measured.relaxation_figure(trials), RELAXATIONS),
        Section("Similarity of the heads that share", measured.similarity_figure(trials), SIMILARITY),
    ]


def _uneven_plans(folder: SearchFolder, rows: Sequence[Row]) -> Section:
    """Of the arms whose layers keep different counts of heads."""
    ids = {f"{r['label']} · {percent(r['kv_ratio'])}": r["trial_ids"][0] for r in rows if r["trial_ids"]}
    uneven = {
        name: plan
        for name, plan in _plans(folder, ids).items()
        if len({(layer.key_heads, layer.value_heads) for layer in plan.layers}) > 1
    }
    return _kept_heads("where layers differ; first seed at the best rate", uneven)


def _kept_heads(which: str, plans: Mapping[str, AttentionPlan]) -> Section:
    return Section(f"Heads kept in each layer ({which})", search.budgets_figure(plans) if plans else None)


def _plans(folder: SearchFolder, trial_ids: Mapping[str, str]) -> dict[str, AttentionPlan]:
    """The plans of some trials by the name they are shown under, where they were written."""
    files = {name: folder.trial(trial_id) / "plan.json" for name, trial_id in trial_ids.items()}
    return {
        name: AttentionPlan.from_json(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()
    }


def _course_sections(trials: Sequence[TrialRecord]) -> list[Section]:
    """How the search went: what rung 0 foretold, when trials ran, where their time went."""
    trials = [t for t in trials if t.copy_of is None]  # whose scores are not its own
    regrets = [
        f"at {percent(ratio)} the best untrained ends {a['regret']:.3f} nats above the best of {a['trials']:.0f}"
        for ratio, a in course.proxy_agreement(trials).items()
    ]
    return [
        Section(
            "Rank before training against final rank", course.proxy_figure(trials), f"{PROXY}{'; '.join(regrets)}."
        ),
        Section("When trials ran", course.timeline_figure(trials), TIMELINE),
        Section("Where the time went", course.phases_figure(trials), PHASES),
    ]


def _again_section(folder: SearchFolder, trials: Sequence[TrialRecord]) -> Section:
    """Of each point of the front: what it was, its digests, and the command that makes it again."""
    points = [
        {
            "summary": f"{t.name}: {number(t.loss)}",
            "facts": {
                "learning rate": f"{t.learning_rate:g}",
                "seed": UNTOLD if t.seed is None else str(t.seed),
                "steps": str(t.step),
                "plan digest": t.plan_digest or UNTOLD,
                "weights digest": t.last.get("weights_digest") or UNTOLD,
                "trial": t.trial_id,
                "MLflow run": t.run_id or UNTOLD,
            },
            "command": command_of(t, str(folder.snapshot)),
            "why_not": f"No command makes this plan; it lies in trials/{t.trial_id}/plan.json.",
        }
        for t in records.front(trials)[:MOST_POINTS]
    ]
    return Section("Each point of the front again", text=AGAIN if points else "", again=points)


def _provenance(folder: SearchFolder, original: Mapping[str, Any]) -> Section:
    state = _recorded(folder.state)
    facts = {
        "command": state.get("command"),
        "started": state.get("started"),
        "folder": str(folder.root),
        "tracking": state.get("tracking"),
        "parent run": state.get("parent_run"),
        "time": clock(state["seconds"]) if state.get("seconds") else None,
        **{f"{name} digest": digest for name, digest in original.get("digests", {}).items()},
        "versions": ", ".join(f"{name} {version}" for name, version in _recorded(folder.versions).items()),
    }
    source = folder.snapshot.read_text(encoding="utf-8")
    return Section("How this was made", table=facts_table(facts), source=source)
