"""The sections of a page on a search: trials, arms, curves, heads kept, times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from attention.plan import AttentionPlan
from attention.ratios import percent
from orchestrator.reporting.comparison import ComparisonRow, several_seeds
from orchestrator.reporting.figures import comparison, course, measured, search
from orchestrator.reporting.figures.caches import caches_figure
from orchestrator.reporting.pages.page import PageSection, Picture
from orchestrator.reporting.tables import (
    cache_table,
    comparison_table,
    promotion_table,
    trial_table,
)
from orchestrator.storage import records
from orchestrator.storage.cache_points import read_cache_points
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import OriginalRecord, TrialRecord, best_per_budget

_ALT_PLANS = 12  # whose heads the description of a picture names

_CURVES = (
    "Increase of the held-out loss over the original model at each rung, one line per trial. Log "
    "scale; values at or below the loss of the original are in the grey band."
)
_KEPT = "Number of key heads and of value heads kept in each layer."
_BYTES = (
    "Each arm at its best learning rate: mean over seeds, bars of one standard deviation. Log "
    "scale, linear close to 0; arms of one KV ratio are shifted sideways so that their bars do "
    "not overlap."
)
_TOKENS = (
    "Mean over seeds at the best learning rate, with a band or bar of one standard deviation. "
    "Tokens include those of a relaxation. Dashed: during a relaxation, in which nothing is "
    "measured."
)
_CACHES = (
    "Keys and values are rounded as in each engine; bytes are those of the engine. A thin line "
    "joins the cache formats of one model, the thick line is the front. The original model with "
    "another cache format needs no conversion, only an option of the engine."
)
_RELAXATIONS = (
    "One line per trial. A relaxation is part of the training only; the converted model does not "
    "contain it."
)
_SIMILARITY = (
    "Cosine similarity of the vectors of two heads, mean over calibration tokens and the pairs of "
    "a group: as they are, and after the best rotation that does not change the model (keys "
    "before RoPE: a rotation in each rotary pair; values: any rotation)."
)
_PROXY = (
    "Trials that were trained to the last rung, by KV ratio; rho is Spearman's rank correlation. "
    "Trials that were stopped early are left out, and so are relaxations, whose training does not "
    "start from the model measured at rung 0: "
)
_TIMELINE = "One row per trial: pale = planning and conversion, solid = training, tick = rung."
_PHASES = (
    "'train' is the time of the workers, with measuring and saving; the other phases run in the "
    "process of the trial. Process starts and waiting are not included."
)


def search_sections(
    folder: SearchFolder,
    trials: Sequence[TrialRecord],
    original: OriginalRecord,
    rows: Sequence[ComparisonRow],
    entries: Sequence[Mapping[str, Any]],
) -> list[PageSection]:
    """Return trials, arms, promotion, curves and times.

    Args:
        folder: Of the search.
        trials: All of them.
        original: The original model.
        rows: Of `compare_arms`.
        entries: Candidates of `promotion.json`.
    """
    candidates = records.without_probes(trials)
    table = trial_table(trials, original)
    promotion = []
    if entries:
        promotion.append(PageSection("Promotion", tables=[promotion_table(entries)], wide=True))
    points = read_cache_points(folder)
    caches = [
        _section("Loss increase against engine bytes", caches_figure(points), _CACHES),
        PageSection("Models and cache formats", tables=[cache_table(points)] if points else []),
    ]
    if several_seeds(rows):  # arms are compared, single trials are at the end and collapsed
        return [
            *_arm_sections(rows, original),
            *promotion,
            *caches,
            *_measured_sections(candidates),
            _uneven_plans(folder, rows),
            *_course_sections(candidates),
            PageSection(
                "Every trial", tables=[table], folded=f"{len(candidates)} trials", wide=True
            ),
        ]
    figure = search.rungs_figure(candidates, original)
    curves = Picture(figure, f"{_CURVES} The numbers are in the table of trials.", _CURVES)
    best = {t.name: t.trial_id for t in best_per_budget(candidates).values()}
    return [
        PageSection("Trials", tables=[table], wide=True),
        *promotion,
        *caches,
        PageSection("Loss increase over training", picture=curves),
        _kept_heads("best trial at each KV ratio", _plans(folder, best)),
        *_measured_sections(candidates),
        *_course_sections(candidates),
    ]


def _arm_sections(rows: Sequence[ComparisonRow], original: OriginalRecord) -> list[PageSection]:
    sections = [PageSection("Comparison", tables=[comparison_table(rows)], wide=True)]
    if any(row["loss"]["mean"] is not None for row in rows):
        pointer = "The numbers are in the table of the comparison."
        figure = comparison.bytes_figure(rows, original)
        picture = Picture(figure, f"{_BYTES} {pointer}", _BYTES)
        sections.append(PageSection("Loss increase of each arm against KV cache", picture=picture))
        figure = comparison.tokens_figure(rows, original)
        picture = Picture(figure, f"{_TOKENS} {pointer}", _TOKENS)
        sections.append(PageSection("Loss against tokens", picture=picture))
    return sections


def _measured_sections(trials: Sequence[TrialRecord]) -> list[PageSection]:
    """Return relaxations and similarities, if trials have recorded them."""
    relaxations = " ".join(filter(None, (_RELAXATIONS, records.unfinished_note(trials))))
    similarity = measured.similarity_figure(trials)
    return [
        _section("Relaxations over time", measured.relaxation_figure(trials), relaxations),
        _section("Similarity of the heads that share", similarity, _SIMILARITY),
    ]


def _section(title: str, figure: Figure | None, caption: str) -> PageSection:
    """Return a section with a figure; empty without one."""
    if figure is None:
        return PageSection(title)
    return PageSection(title, picture=Picture(figure, f"{title}. {caption}", caption))


def _uneven_plans(folder: SearchFolder, rows: Sequence[ComparisonRow]) -> PageSection:
    """Return the heads of arms whose layers keep different counts."""
    ids = {
        f"{row['label']} · {percent(row['kv_ratio'])}": row["trial_ids"][0]
        for row in rows
        if row["trial_ids"]
    }
    uneven = {
        name: plan
        for name, plan in _plans(folder, ids).items()
        if len({(layer.key_heads, layer.value_heads) for layer in plan.layers}) > 1
    }
    return _kept_heads("where layers differ; first seed at the best rate", uneven)


def _kept_heads(selection: str, plans: Mapping[str, AttentionPlan]) -> PageSection:
    if not plans:
        return PageSection("Heads kept in each layer")
    descriptions = []
    for name, plan in list(plans.items())[:_ALT_PLANS]:
        layers = [
            f"layer {index} {layer.key_heads} and {layer.value_heads}"
            for index, layer in enumerate(plan.layers)
        ]
        descriptions.append(f"{name}: {'; '.join(layers)}")
    alt = (
        f"Key heads and value heads that each layer keeps ({selection}). {'. '.join(descriptions)}."
    )
    picture = Picture(search.budgets_figure(plans), alt, _KEPT)
    return PageSection(f"Heads kept in each layer ({selection})", picture=picture)


def _plans(folder: SearchFolder, trial_ids: Mapping[str, str]) -> dict[str, AttentionPlan]:
    """Return the plans of some trials by their displayed names, if they were written."""
    plans = {}
    for name, trial_id in trial_ids.items():
        file = folder.trial(trial_id) / "plan.json"
        if file.exists():
            plans[name] = AttentionPlan.from_json(file.read_text(encoding="utf-8"))
    return plans


def _course_sections(trials: Sequence[TrialRecord]) -> list[PageSection]:
    """Return the prediction of rung 0, the times of trials, and the duration of their phases."""
    trials = [t for t in trials if t.copy_of is None]  # whose scores are not its own
    regrets = []
    for ratio, agreement in course.proxy_agreement(trials).items():
        regrets.append(
            f"at {percent(ratio)} the trial that is best untrained ends {agreement['regret']:.3f} "
            f"nats above the best of {agreement['trials']:.0f}"
        )
    proxy = f"{_PROXY}{'; '.join(regrets)}."
    return [
        _section("Rank before training against final rank", course.proxy_figure(trials), proxy),
        _section("When trials ran", course.timeline_figure(trials), _TIMELINE),
        _section("Time by phase", course.phases_figure(trials), _PHASES),
    ]
