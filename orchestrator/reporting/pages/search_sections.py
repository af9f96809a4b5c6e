"""The sections of a page on how a search found what it found: trials, arms, curves, heads kept, times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from attention.plan import AttentionPlan
from attention.ratios import percent
from orchestrator.reporting.comparison import Row, several_seeds
from orchestrator.reporting.figures import comparison, course, measured, search
from orchestrator.reporting.pages.page import Picture, Section
from orchestrator.reporting.tables import comparison_table, promotion_table, trial_table
from orchestrator.storage import records
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord, best_per_budget

MOST_PLANS = 12  # whose heads the description of a picture tells

CURVES = (
    "Increase of the held-out loss over the original model at each rung, a line a trial. The upright axis is "
    "logarithmic; what is not above the original model stands in the band below."
)
KEPT = "The number in a cell counts the key heads, or the value heads, that a layer keeps."

BYTES = (
    "Each arm at its best learning rate: mean over seeds, bars of one standard deviation. The upright axis is "
    "logarithmic but for its part next to 0; arms of one KV ratio stand a little apart sideways, so that their bars "
    "can be told from each other."
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
    "Of the trials that were trained to the last rung, by KV ratio; rho is Spearman's rank correlation. Trials that "
    "were stopped early are not among them, nor relaxations, of which rung 0 measures a model that they never "
    "train from: "
)
TIMELINE = "A row a trial: pale until it is measured untrained, full while its workers train; a stroke is a rung."
PHASES = (
    "A trial's own process plans, converts and measures; 'train' is what its workers take, with measuring and saving. "
    "Starts of processes and waiting are in none of them."
)


def found_sections(
    folder: SearchFolder,
    trials: Sequence[TrialRecord],
    original: Mapping[str, Any],
    rows: Sequence[Row],
    entries: Sequence[Mapping[str, Any]],
) -> list[Section]:
    """Trials, arms, promotion, curves and times."""
    candidates, table = records.without_probes(trials), trial_table(trials, original)
    promotion = [Section("Promotion", tables=[promotion_table(entries)], wide=True)] if entries else []
    rungs = Picture(search.rungs_figure(candidates, original), f"{CURVES} The table of trials has the numbers.", CURVES)
    curves = Section("Loss increase over training", picture=rungs)
    if several_seeds(rows):  # arms are compared, single trials come last and folded away
        every = Section("Every trial", tables=[table], folded=f"{len(candidates)} trials", wide=True)
        kept = _uneven_plans(folder, rows)
        return [*_arm_sections(rows, original), *promotion, *_measured_sections(candidates), kept,
                *_course_sections(candidates), every]  # fmt: skip
    best = {t.name: t.trial_id for t in best_per_budget(candidates).values()}
    kept = _kept_heads("best trial at each KV ratio", _plans(folder, best))
    return [Section("Trials", tables=[table], wide=True), *promotion, curves, kept,
            *_measured_sections(candidates), *_course_sections(candidates)]  # fmt: skip


def _arm_sections(rows: Sequence[Row], original: Mapping[str, Any]) -> list[Section]:
    sections = [Section("Comparison", tables=[comparison_table(rows)], wide=True)]
    if any(row["loss"]["mean"] is not None for row in rows):
        see = "The table of the comparison has the numbers."
        bytes_, tokens = comparison.bytes_figure(rows, original), comparison.tokens_figure(rows, original)
        title = "Loss increase of each arm against KV cache"
        sections.append(Section(title, picture=Picture(bytes_, f"{BYTES} {see}", BYTES)))
        sections.append(Section("Loss against tokens", picture=Picture(tokens, f"{TOKENS} {see}", TOKENS)))
    return sections


def _measured_sections(trials: Sequence[TrialRecord]) -> list[Section]:
    """What trials have measured of themselves, as far as they have."""
    return [
        _drawn(
            "Relaxations over time",
            measured.relaxation_figure(trials),
            " ".join(filter(None, (RELAXATIONS, records.unfinished_note(trials)))),
        ),
        _drawn("Similarity of the heads that share", measured.similarity_figure(trials), SIMILARITY),
    ]


def _drawn(title: str, figure: Figure | None, caption: str) -> Section:
    """A section of a picture that may not be there."""
    return Section(title, picture=Picture(figure, f"{title}. {caption}", caption) if figure is not None else None)


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
    if not plans:
        return Section("Heads kept in each layer")
    told = [
        f"{name}: {'; '.join(f'layer {i} {x.key_heads} and {x.value_heads}' for i, x in enumerate(plan.layers))}"
        for name, plan in list(plans.items())[:MOST_PLANS]
    ]
    alt = f"Key heads and value heads that each layer keeps ({which}). {'. '.join(told)}."
    return Section(f"Heads kept in each layer ({which})", picture=Picture(search.budgets_figure(plans), alt, KEPT))


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
        _drawn("Rank before training against final rank", course.proxy_figure(trials), f"{PROXY}{'; '.join(regrets)}."),
        _drawn("When trials ran", course.timeline_figure(trials), TIMELINE),
        _drawn("Where the time went", course.phases_figure(trials), PHASES),
    ]
