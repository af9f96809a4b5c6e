"""One self-contained page of a search.

First a table of the promoted models and the figure of the front; then, folded, each model, the
trials, and the commands that repeat the search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

from attention.base.text import number
from attention.base.timing import clock
from attention.io.files import write_whole
from orchestrator.reporting.comparison import NO_VALUE, ComparisonRow, compare_arms
from orchestrator.reporting.figures.drawing import kv_bytes_label
from orchestrator.reporting.figures.search import front_figure
from orchestrator.reporting.overview import overview_table
from orchestrator.reporting.pages.model_sections import model_part
from orchestrator.reporting.pages.page import (
    PagePart,
    PageSection,
    Picture,
    Repetition,
    render_page,
)
from orchestrator.reporting.pages.search_sections import search_sections
from orchestrator.reporting.promoted_models import (
    PROMOTED,
    PromotedModel,
    best_service,
    promoted_models,
)
from orchestrator.reporting.repeat_command import command_of
from orchestrator.reporting.status import search_seconds
from orchestrator.reporting.tables import facts_table
from orchestrator.storage import records
from orchestrator.storage.cache_points import read_cache_points
from orchestrator.storage.journal import load_trials
from orchestrator.storage.json_files import read_if_there
from orchestrator.storage.outputs import check_file, write_page
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import OriginalRecord, TrialRecord

_MAX_COMMANDS = 30  # points of the front that the page has a command for
_ALT_POINTS = 12  # points of a picture that its description names

_FRONT_CAPTION = (
    "One point per trial, at its best measured step (which may be the untrained conversion). "
    "Rings are promoted models. Log scale; models at or below the loss of the original are in the "
    "grey band."
)
_REPEAT_TEXT = (
    "Each command runs one trial to the last rung with the stored settings of this search. With "
    "the same versions, processors and number of workers, the plan is the same and losses differ "
    "by rounding only."
)


class ReportRecord(TypedDict):
    """The JSON of `headfold report`."""

    report: str
    """Path of the page."""
    bytes: int
    """Size of the page."""
    search: str
    comparison: list[ComparisonRow]


def write_report(search: str | Path, out: str | Path | None = None) -> ReportRecord:
    """Write the page of a search.

    Args:
        search: Its folder.
        out: File to write; `report.html` in the folder by default.

    Raises:
        ConfigError: If `search` is not a search, or if `out` is a file that Headfold did not write.
    """
    folder = SearchFolder.existing(search)
    if out is not None:
        check_file(out, "page", "out")
    trials = load_trials(folder.root)
    original: Any = read_if_there(folder.original)
    rows = compare_arms(trials, original) if trials and original else []
    content = _build_page(folder, trials, original, rows)
    path = Path(out) if out is not None else folder.report
    if out is None and folder.origin.is_file():
        write_whole(path, content)  # the search's own page, also of another version of Headfold
    else:
        write_page(path, content)
    return {
        "report": str(path.absolute()),
        "bytes": len(content.encode()),
        "search": str(folder.root),
        "comparison": rows,
    }


def _build_page(
    folder: SearchFolder,
    trials: Sequence[TrialRecord],
    original: OriginalRecord,
    rows: Sequence[ComparisonRow],
) -> str:
    """Return the HTML of a search in its present state."""
    parts: list[PagePart] = []
    lead = "No trial has reported yet."
    if trials and original:
        promotion = read_if_there(folder.promotion)
        entries = promotion.get("candidates", {})
        candidates = records.without_probes(trials)
        models = promoted_models(promotion, read_cache_points(folder))
        lead = _lead(candidates, original)
        front_section = _front_section(candidates, original, list(entries.values()))
        parts = [
            _overview(folder, candidates, original, models),
            PagePart(front_section.title, [front_section]),
            *(model_part(model, entries[model["trial_id"]], original) for model in models),
        ]
        sections = search_sections(folder, trials, original, rows, list(entries.values()))
        parts.append(PagePart("Trials and measurements", sections, folded=True))
    again = [_repeat_section(folder, trials), *_provenance(folder, original)]
    parts.append(PagePart("How to repeat it", again, folded=bool(parts)))
    name = folder.root.name
    return render_page(f"Headfold: {name}", f"Headfold search: {name}", lead, parts)


def _lead(candidates: Sequence[TrialRecord], original: OriginalRecord) -> str:
    """Return a sentence on the original model and the size of the search."""
    name = Path(str(original.get("model", "the model"))).name
    return (
        f"{len(candidates)} trials on {name}, whose held-out loss is {original['loss']:.3f} nats "
        f"per token with {original['kv_bytes_per_token']:,} bytes of KV cache per token."
    )


def _overview(
    folder: SearchFolder,
    candidates: Sequence[TrialRecord],
    original: OriginalRecord,
    models: Sequence[PromotedModel],
) -> PagePart:
    """Return the table of the results, and the command that serves one."""
    title = "Promoted models" if models else "Best trials (nothing was promoted)"
    table = overview_table(folder.root, candidates, original, models)
    service = best_service(models)
    commands = [] if service is None else [(f"Serve in {service[0]}", service[1])]
    return PagePart(title, [PageSection(title, tables=[table], commands=commands, wide=True)])


def _front_section(
    trials: Sequence[TrialRecord],
    original: OriginalRecord,
    entries: Sequence[Mapping[str, Any]],
) -> PageSection:
    """Return the figure of the search: loss increase against KV cache."""
    promoted = [entry for entry in entries if entry.get("status") == PROMOTED]
    points = [
        f"{t.served_bytes:,} bytes {number(t.loss - original['loss'], '+z.3f')} ({t.label})"
        for t in records.front(trials, timed=False)[:_ALT_POINTS]
    ]
    models = [f"{e.get('name') or e['recipe']}: {number(e.get('loss'))}" for e in promoted]
    alt = (
        f"Increase of the held-out loss, on a logarithmic axis. {kv_bytes_label(original)}. "
        f"Original model: {original['loss']:.3f} at {records.served_bytes(original):,} bytes. "
        f"Front, smallest cache first: {'; '.join(points) or 'none'}. "
        f"Promoted: {'; '.join(models) or 'none'}."
    )
    picture = Picture(
        front_figure(trials, original, promoted),
        alt,
        _FRONT_CAPTION,
        front_figure(trials, original, promoted, narrow=True),
    )
    return PageSection("Loss increase against KV cache", picture=picture, wide=True)


def _repeat_section(folder: SearchFolder, trials: Sequence[TrialRecord]) -> PageSection:
    """Return facts of each point of the front, and the command that repeats it."""
    points = records.front(trials)[:_MAX_COMMANDS]
    again = [_repetition(trial, folder) for trial in points]
    text = _REPEAT_TEXT if again else ""
    return PageSection("Commands for each point of the front", text=text, again=again, wide=True)


def _repetition(trial: TrialRecord, folder: SearchFolder) -> Repetition:
    return {
        "summary": f"{trial.name}: {number(trial.loss)}",
        "facts": {
            "learning rate": f"{trial.learning_rate:g}",
            "seed": NO_VALUE if trial.seed is None else str(trial.seed),
            "steps": str(trial.step),
            "best step": str(trial.best.get("step", NO_VALUE)),
            "loss after all steps": number(trial.last_loss),
            "plan digest": trial.plan_digest or NO_VALUE,
            "weights digest": trial.last.get("weights_digest") or NO_VALUE,
            "trial": trial.trial_id,
            "MLflow run": trial.run_id or NO_VALUE,
        },
        "command": command_of(trial, str(folder.snapshot)),
        "why_not": "The searcher made this plan, so no command repeats it; it is in "
        f"trials/{trial.trial_id}/plan.json.",
    }


def _provenance(folder: SearchFolder, original: OriginalRecord) -> list[PageSection]:
    state = folder.read_state()
    seconds = search_seconds(folder, state, datetime.now(UTC))
    versions = [f"{name} {version}" for name, version in read_if_there(folder.versions).items()]
    digests = original.get("digests", {})
    facts = {
        "command": state.get("command"),
        "started": state.get("started"),
        "folder": str(folder.root),
        "tracking": state.get("tracking"),
        "parent run": state.get("parent_run"),
        "time": clock(seconds) if seconds else None,
        **{f"{name} digest": digest for name, digest in digests.items()},
        "versions": ", ".join(versions),
    }
    configuration = folder.snapshot.read_text(encoding="utf-8")
    return [
        PageSection("How this was made", tables=[facts_table(facts)]),
        PageSection("Configuration", source=configuration),
    ]
