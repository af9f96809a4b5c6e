"""One self-contained page of a search: what was promoted, the front, how it was found, how to repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attention.base.text import number
from attention.base.timing import clock
from attention.io.files import write_whole
from attention.ratios import percent
from orchestrator.reporting.comparison import UNTOLD, Row, compare_arms
from orchestrator.reporting.figures import search
from orchestrator.reporting.pages.model_sections import model_part
from orchestrator.reporting.pages.page import Part, Picture, Section, render_page
from orchestrator.reporting.pages.search_sections import found_sections
from orchestrator.reporting.promoted_models import PROMOTED, promoted_models
from orchestrator.reporting.repeat_command import command_of
from orchestrator.reporting.tables import facts_table
from orchestrator.storage import records
from orchestrator.storage.journal import load_trials
from orchestrator.storage.json_files import read_json
from orchestrator.storage.outputs import check_file, write_page
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord, best_per_budget

MOST_POINTS = 30  # of the front, of which the page says how to make them again
MOST_TOLD = 12  # points of a picture that its description names

FRONT = (
    "Every trial at the best step that was measured, which may be the untrained conversion; a ring is a promoted model "
    "at the best step of its full training. The upright axis is logarithmic; what is not above the original model "
    "stands in the band below, the best of each size with its number."
)

AGAIN = (
    "Each command runs one trial to the last rung, from the stored settings of this search. Equal versions, "
    "processors and numbers of workers give an equal plan and losses that differ by rounding."
)


def write_report(search: str | Path, out: str | Path | None = None) -> dict[str, Any]:
    """Write the page of a search folder.

    Returns its path and size, and the rows of `comparison.compare_arms`. Raises ConfigError if `search` is none, or
    if `out` is a file that we did not write.
    """
    folder = SearchFolder.existing(search)
    if out is not None:
        check_file(out, "page", "out")
    trials = load_trials(folder.root)
    original = _recorded(folder.original)
    rows = compare_arms(trials, original) if trials and original else []
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
    parts: list[Part] = []
    lead = "No trial has reported yet."
    if trials and original:
        promotion, candidates = _recorded(folder.promotion), records.without_probes(trials)
        entries = list(promotion.get("candidates", {}).values())
        models = promoted_models(promotion)
        lead = _lead(candidates, original, models)
        front_section = _front_section(candidates, original, entries)
        parts = [model_part(m, promotion["candidates"][m["trial_id"]], original) for m in models]
        if parts:  # the best model and the picture of all stand beside each other on top
            parts[0] = replace(parts[0], sections=[parts[0].sections[0], front_section, *parts[0].sections[1:]])
        else:
            parts = [Part("Loss increase against KV cache", [front_section])]
        parts.append(Part("How it was found", found_sections(folder, trials, original, rows, entries)))
    parts.append(Part("How to repeat it", [_again_section(folder, trials), *_provenance(folder, original)]))
    return render_page(f"Headfold: {folder.root.name}", f"Headfold search: {folder.root.name}", lead, parts)


def _lead(candidates: Sequence[TrialRecord], original: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> str:
    """The original model, and what came of the search, in two sentences."""
    bests = [(ratio, t.label, t.loss - original["loss"]) for ratio, t in best_per_budget(candidates).items()]
    if models:
        bests = [(m["kv_ratio"], m["label"], m["loss_increase"]) for m in models]
    told = [
        f"{percent(ratio)} of the KV cache: loss {number(increase, '+.3f')} by {label}"
        for ratio, label, increase in bests
    ]
    what = "Promoted" if models else "Best trials"
    name = Path(str(original.get("model", "the model"))).name
    return (
        f"Original model {name}: {original['loss']:.3f} nats per token held out, {original['kv_bytes_per_token']:,} KV "
        f"bytes per token. {len(candidates)} trials. {what}: {'; '.join(told) or 'none'}."
    )


def _front_section(
    candidates: Sequence[TrialRecord], original: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]
) -> Section:
    """The picture of the search: what was lost against what is kept."""
    done = [e for e in entries if e.get("status") == PROMOTED]
    points = [
        f"{t.kv_bytes_per_token:,} bytes {number(t.loss - original['loss'], '+.3f')} ({t.label})"
        for t in records.front(candidates, timed=False)[:MOST_TOLD]
    ]
    promoted = [f"{e.get('name') or e['recipe']}: {number(e.get('loss'))}" for e in done]
    alt = (
        f"Increase of the held-out loss, on a logarithmic axis, against KV bytes per token. Original model: "
        f"{original['loss']:.3f} at {original['kv_bytes_per_token']:,} bytes. Front, from the smallest cache on: "
        f"{'; '.join(points) or 'none'}. Promoted: {'; '.join(promoted) or 'none'}."
    )
    wide, narrow = (search.front_figure(candidates, original, done, narrow=n) for n in (False, True))
    return Section("Loss increase against KV cache", picture=Picture(wide, alt, FRONT, narrow), tall=True)


def _again_section(folder: SearchFolder, trials: Sequence[TrialRecord]) -> Section:
    """Of each point of the front: what it was, its digests, and the command that makes it again."""
    points = [
        {
            "summary": f"{t.name}: {number(t.loss)}",
            "facts": {
                "learning rate": f"{t.learning_rate:g}",
                "seed": UNTOLD if t.seed is None else str(t.seed),
                "steps": str(t.step),
                "best step": str(t.best.get("step", UNTOLD)),
                "loss after all steps": number(t.last_loss),
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
    return Section("Each point of the front again", text=AGAIN if points else "", again=points, wide=True)


def _provenance(folder: SearchFolder, original: Mapping[str, Any]) -> list[Section]:
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
    return [
        Section("How this was made", tables=[facts_table(facts)]),
        Section("Configuration", source=folder.snapshot.read_text(encoding="utf-8")),
    ]
