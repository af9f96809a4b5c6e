"""The comparison table of papers: each arm at each KV ratio with its best settings, over seeds.

An arm is what trials call their `recipe`. Rows are plain JSON values; terminal, page and `--json`
use the same rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NotRequired, TypedDict

from attention.base.text import compact, number
from attention.ratios import percent
from orchestrator.storage import records
from orchestrator.storage.records import OriginalRecord, TrialRecord, family

NO_VALUE = "-"
"""A cell of a table without a value."""


class MeanSD(TypedDict):
    """Mean of values, and their spread."""

    mean: float
    """None without values."""
    sd: float | None
    """Sample standard deviation (n - 1 below); None for a single value."""
    n: int


class ArmPoint(MeanSD):
    """Held-out losses of one learning rate at a step, over seeds."""

    step: int
    tokens: int | None
    """Mean number of tokens trained on until then."""


class RungPoint(ArmPoint):
    """The losses of the learning rate, and objective of training, that are best at the step."""

    learning_rate: float
    distillation: str | None


class RatePoint(MeanSD):
    """The losses of a learning rate at the steps of its row."""

    learning_rate: float
    distillation: NotRequired[str | None]
    """The objective of training, where the arm has several."""


class ComparisonRow(TypedDict):
    """An arm at a KV ratio. Losses are held out, in nats per token.

    A learning rate is compared at a step if every seed of the search (for a candidate that the
    searcher drew: each of its seeds) was measured there and none of its trials failed. The best one
    has the lowest mean loss at the highest such step (the smaller rate if two are equal). Each rate
    counts once with each objective of training that the arm has.
    """

    recipe: str
    label: str
    """Displayed name of the recipe."""
    kv_ratio: float
    kv_bytes_per_token: int | None
    served_bytes: int | None
    """The same on each GPU of a search for several (`search.tensor_parallel`)."""
    learning_rate: float | None
    """The best learning rate; None if no rate has all seeds."""
    distillation: NotRequired[str | None]
    """The best objective of training, if the arm has several."""
    seeds: int
    """Number of its seeds."""
    seeds_asked: int
    """Number of seeds that it should have."""
    steps: int | None
    """Step at which the row compares."""
    tokens: int | None
    last: bool
    """Whether that is the last rung that any trial has reached."""
    loss: MeanSD
    untrained: MeanSD
    """At step 0."""
    pooled: bool
    """Whether `untrained` is of a pooled model that no training started from."""
    loss_increase: float | None
    """Mean loss over the original model's."""
    cost: dict[str, float]
    """Mean of `TrialRecord.cost`."""
    remaining_distance: MeanSD
    """Distance of the pairs of a pull (`TrialRecord.remaining_distance`)."""
    curve: list[ArmPoint]
    """The best rate at each of its rungs."""
    rungs: list[RungPoint]
    """The rate that is best at each rung."""
    rates: list[RatePoint]
    """Every rate at the row's steps, over its seeds."""
    trial_ids: list[str]
    """Losses of the best rate, by seed."""

    # Trials of all rates
    trials: int
    diverged: int
    failed: int
    stopped: int
    """Trials stopped early by the scheduler."""
    copied: int
    """Copies of a trial with the same model."""
    relaxation_unfinished: int
    """Trials whose heads were fused before the end of their relaxation."""
    loss_unfinished: bool
    """Whether this applies to a trial that `loss` is the mean of."""
    unfinished: int


def mean_and_sd(values: Iterable[float]) -> MeanSD:
    """Return mean and sample standard deviation of some values."""
    values = list(values)
    mean = statistics.fmean(values) if values else None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": mean, "sd": deviation, "n": len(values)}  # type: ignore[typeddict-item]


def seeds_of(trials: Iterable[TrialRecord]) -> Sequence[int | None]:
    """Return the seeds that trials were run with; [None] if none was recorded."""
    return sorted({t.seed for t in trials if t.seed is not None}) or [None]


def several_seeds(rows: Sequence[ComparisonRow]) -> bool:
    """Return whether the search ran its candidates with more than one seed."""
    return any(row["seeds_asked"] > 1 for row in rows)


def diverged(trial: TrialRecord) -> bool:
    """Return whether a failed trial failed because its loss was no longer finite."""
    if trial.status != records.FAILED:
        return False
    if "diverged" in (trial.error or "").lower():
        return True
    return bool(trial.rungs) and not math.isfinite(trial.last_loss)


def compare_arms(trials: Sequence[TrialRecord], original: OriginalRecord) -> list[ComparisonRow]:
    """Return a row for each arm and KV ratio, without probes.

    Ratios fall; arms are in the order in which they were first tried.
    """
    arms: dict[tuple[str, float], list[TrialRecord]] = {}
    trials = records.without_probes(trials)
    for trial in trials:
        arms.setdefault((trial.recipe, trial.kv_ratio), []).append(trial)
    names = list(dict.fromkeys(t.recipe for t in trials))
    seeds = seeds_of(trials)
    last = max((step for t in trials for step in _losses(t)), default=0)
    rows = []
    for name, ratio in sorted(arms, key=lambda arm: (-arm[1], names.index(arm[0]))):
        arm = arms[name, ratio]
        # Candidates that the searcher draws are run with one seed only
        rows.append(_row(arm, seeds_of(arm) if family(name) == "joint" else seeds, last, original))
    return rows


_Training = tuple[float, str | None]
"""Learning rate and objective of training."""


def _training(trial: TrialRecord) -> _Training:
    return trial.learning_rate, trial.distillation


def _losses(trial: TrialRecord) -> dict[int, float]:
    """Return the finite held-out losses of a trial that did not fail, by step."""
    if trial.status == records.FAILED:
        return {}
    return {
        int(rung["step"]): rung["loss"]
        for rung in trial.rungs
        if rung.get("loss") is not None and math.isfinite(rung["loss"])
    }


def _row(
    arm: Sequence[TrialRecord], seeds: Sequence[int | None], last: int, original: OriginalRecord
) -> ComparisonRow:
    several = len({t.distillation for t in arm}) > 1
    rates: dict[_Training, list[TrialRecord]] = {
        key: []
        for key in sorted((_training(t) for t in arm), key=lambda key: (key[0], str(key[1])))
    }
    for trial in arm:
        rates[_training(trial)].append(trial)
    steps = sorted({step for t in arm for step in _losses(t)})
    rungs = [rung for step in steps if (rung := _best_at(step, rates, seeds))]
    best = rungs[-1] if rungs else None
    step = best["step"] if best else None
    chosen = rates[best["learning_rate"], best["distillation"]] if best else []
    measured = chosen or arm
    curve = [point for step in steps if (point := _point(step, chosen, seeds))] if best else []
    distances = [t.remaining_distance for t in chosen if t.remaining_distance is not None]
    by_seed = sorted(chosen, key=lambda t: (t.seed is not None, t.seed or 0))
    broken = sum(diverged(t) for t in arm)
    ended = (records.DONE, records.STOPPED, records.COPY, records.FAILED)
    row: ComparisonRow = {
        "recipe": arm[0].recipe,
        "label": arm[0].label,
        "kv_ratio": arm[0].kv_ratio,
        "kv_bytes_per_token": _mean_bytes(t.kv_bytes_per_token for t in measured),
        "served_bytes": _mean_bytes(t.served_bytes for t in measured),
        "learning_rate": best["learning_rate"] if best else None,
        "seeds": len(seeds) if best else 0,
        "seeds_asked": len(seeds),
        "steps": step,
        "tokens": best["tokens"] if best else None,
        "last": bool(best) and step == last,
        "loss": _without_step(best) if best else mean_and_sd(()),
        "untrained": next(
            (_without_step(point) for point in curve if point["step"] == 0), mean_and_sd(())
        ),
        "pooled": any(t.relaxes for t in measured),
        "loss_increase": best["mean"] - original["loss"] if best else None,
        "cost": _mean_cost(measured),
        "remaining_distance": mean_and_sd(distances),
        "curve": curve,
        "rungs": rungs,
        "rates": [
            _rate_point(
                key, mean_and_sd(_losses(t)[step] for t in group if step in _losses(t)), several
            )
            for key, group in rates.items()
        ],
        "trial_ids": [t.trial_id for t in by_seed],
        "trials": len(arm),
        "diverged": broken,
        "failed": sum(t.status == records.FAILED for t in arm) - broken,
        "stopped": sum(t.status == records.STOPPED for t in arm),
        "copied": sum(t.status == records.COPY for t in arm),
        "relaxation_unfinished": sum(t.relaxation_unfinished for t in arm),
        "loss_unfinished": any(t.relaxation_unfinished for t in chosen),
        "unfinished": sum(t.status not in ended for t in arm),
    }
    if several:
        row["distillation"] = best["distillation"] if best else None
    return row


def _point(
    step: int, trials: Sequence[TrialRecord], seeds: Sequence[int | None]
) -> ArmPoint | None:
    """Return the losses of a rate's trials; None unless all seeds were measured and none failed."""
    if any(t.status == records.FAILED for t in trials):
        return None
    measured = {t.seed: t for t in trials if step in _losses(t)}
    if set(measured) != set(seeds):
        return None
    tokens = [
        rung["tokens"]
        for trial in measured.values()
        for rung in trial.rungs
        if rung["step"] == step and "tokens" in rung
    ]
    return {
        "step": step,
        "tokens": round(statistics.fmean(tokens)) if tokens else None,
        **mean_and_sd(_losses(t)[step] for t in measured.values()),
    }


def _best_at(
    step: int, rates: Mapping[_Training, Sequence[TrialRecord]], seeds: Sequence[int | None]
) -> RungPoint | None:
    points: list[RungPoint] = []
    for (rate, objective), trials in rates.items():
        if point := _point(step, trials, seeds):
            points.append({**point, "learning_rate": rate, "distillation": objective})
    return min(points, key=lambda point: (point["mean"], point["learning_rate"]), default=None)


def _rate_point(training: _Training, losses: MeanSD, several: bool) -> RatePoint:
    rate, objective = training
    point: RatePoint = {"learning_rate": rate, **losses}
    if several:
        point["distillation"] = objective
    return point


def _without_step(point: ArmPoint) -> MeanSD:
    return {"mean": point["mean"], "sd": point["sd"], "n": point["n"]}


def _mean_cost(trials: Sequence[TrialRecord]) -> dict[str, float]:
    costs = [t.cost for t in trials]
    return {name: statistics.fmean(cost[name] for cost in costs) for name in costs[0]}


# ---- as text -------------------------------------------------------------------------------------

KV_COLUMN = "KV ratio"


def _mean_bytes(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return round(statistics.fmean(known)) if known else None


COMPARISON_COLUMNS = (
    "recipe",
    KV_COLUMN,
    "loss",
    "loss increase",
    "untrained",
    "rate",
    "steps",
    "tokens",
    "KV bytes/token",
    "fit steps",
    "FLOPs",
    "seconds",
    "left",
    "seeds",
    "trials",
)
_SAME = 1e-6  # nats per token, between seeds of one plan
_SPECIAL_COUNTS = (
    "diverged",
    "failed",
    "stopped",
    "copied",
    "relaxation_unfinished",
    "unfinished",
)


def cells(row: ComparisonRow) -> tuple[str, ...]:
    """Return a row as text, one cell for each of `COMPARISON_COLUMNS`.

    A star marks a row that compares before the last rung.
    """
    steps = row["steps"]
    return (
        row["label"],
        percent(row["kv_ratio"]),
        _mean_and_sd_text(row["loss"]) + (records.UNFINISHED_SIGN * row["loss_unfinished"]),
        number(row["loss_increase"], "+z.3f"),
        _mean_and_sd_text(row["untrained"]) + (" pooled" if row["pooled"] else ""),
        " ".join(
            filter(
                None,
                [
                    number(row["learning_rate"] if steps else None, ".1e"),
                    row.get("distillation") if steps else None,
                ],
            )
        ),
        NO_VALUE if steps is None else f"{steps}{'' if row['last'] else '*'}",
        NO_VALUE if row["tokens"] is None else compact(row["tokens"]),
        number(row["kv_bytes_per_token"], "d"),
        compact(round(row["cost"]["optimizer_steps"])),
        f"{row['cost']['flops']:.1e}",
        f"{row['cost']['seconds']:.0f}",
        number(row["remaining_distance"]["mean"], ".2g"),
        str(row["seeds"]),
        counts_text(row),
    )


def _mean_and_sd_text(values: MeanSD) -> str:
    """Return mean ± standard deviation; the mean alone of one seed, and where all are the same.

    A plan that does not depend on the seed has no spread, and "± 0.000" would read as a precision.
    """
    mean = number(values["mean"])
    deviation = values["sd"]
    return mean if deviation is None or deviation < _SAME else f"{mean} ± {deviation:.3f}"


def counts_text(row: ComparisonRow) -> str:
    """Return how many trials a row has, and how many of them did not finish: "9 (1 diverged)"."""
    special = [f"{row[name]} {name.replace('_', ' ')}" for name in _SPECIAL_COUNTS if row[name]]
    return str(row["trials"]) + (f" ({', '.join(special)})" if special else "")


def footnote(rows: Sequence[ComparisonRow]) -> str:
    """Return the notes for the reader of the table."""
    seeds = max((row["seeds_asked"] for row in rows), default=0)
    note = (
        "Each arm at the best of its learning rates; mean ± sample standard deviation "
        f"over {seeds} seeds (none where the seed changes nothing); "
        "a rate with a failed, diverged or early stopped seed is left out of the choice; "
        "fit steps: Adam steps on single layers before training; "
        "FLOPs: of these and of the training, 6 per parameter and token; seconds: total"
    )
    if any(row["seeds"] == 1 < seeds for row in rows):
        note += "; candidates that the searcher drew by itself have one seed"
    if any(row["pooled"] for row in rows):
        note += f"; {records.POOLED_NOTE}"
    if any(row["relaxation_unfinished"] for row in rows):
        note += (
            f"; {records.UNFINISHED_SIGN} {records.UNFINISHED_MARK}: heads were fused before they "
            "had become alike"
        )
    if any(row["remaining_distance"]["n"] for row in rows):
        note += (
            "; left: of the squared distance of the pairs when they were made to share, 1 at the "
            "start"
        )
    if any(row["steps"] is not None and not row["last"] for row in rows):
        return (
            f"{note}; * compared at an earlier step, the last with all seeds of a rate: not "
            "comparable with the others."
        )
    return f"{note}."
