"""The table that papers print: each arm at each KV ratio with its best learning rate, mean and spread over seeds.

An arm is what trials call their `recipe`. Rows are plain JSON values; terminal, page and `--json` all show these.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attention.base.text import compact, number
from attention.ratios import percent
from orchestrator.storage import records
from orchestrator.storage.records import TrialRecord, family

Row = dict[str, Any]
Spread = dict[str, Any]
UNTOLD = "-"


def mean_and_sd(values: Iterable[float]) -> Spread:
    """`{mean, sd, n}` of some values: sd is the sample standard deviation (n - 1 below), None for a single value."""
    values = list(values)
    mean = statistics.fmean(values) if values else None
    return {"mean": mean, "sd": statistics.stdev(values) if len(values) > 1 else None, "n": len(values)}


def seeds_of(trials: Iterable[TrialRecord]) -> Sequence[int | None]:
    """The seeds that trials were run with; [None] if none was recorded."""
    return sorted({t.seed for t in trials if t.seed is not None}) or [None]


def several_seeds(rows: Sequence[Row]) -> bool:
    """Whether the search ran its candidates with more than one seed."""
    return any(row["seeds_asked"] > 1 for row in rows)


def diverged(trial: TrialRecord) -> bool:
    """Whether a failed trial failed because its loss was no longer finite."""
    if trial.status != records.FAILED:
        return False
    return "diverged" in (trial.error or "").lower() or (bool(trial.rungs) and not math.isfinite(trial.last_loss))


def compare_arms(trials: Sequence[TrialRecord], original: Mapping[str, Any]) -> list[Row]:
    """One row for each arm and KV ratio, in the order in which arms were first tried, KV ratios falling; no probes.

    A learning rate takes part at a step if every seed of the search (of a candidate that the searcher drew: every seed
    of its own) was measured there and none of its trials failed; the best one has the lowest mean held-out loss at the
    highest such step (the smaller rate if two are equal). A row has:

    recipe, label (the recipe as it is shown), kv_ratio, kv_bytes_per_token; learning_rate: the best, None if no rate
    has all seeds; seeds: how many it has; seeds_asked: how many it should have; steps, tokens: at which the row
    compares; last: whether that is the last rung that any trial has reached; loss and untrained (step 0): `{mean, sd,
    n}` in nats per token; increase: mean loss over the original model; cost: mean of `TrialRecord.cost`;
    remaining_distance: `{mean, sd, n}` of what `TrialRecord` says of the pairs of a pull.

    curve: the best rate's `{step, tokens, mean, sd, n}` at each of its rungs; rungs: the same with the rate that is
    best at that rung, and its `learning_rate`; rates: `{learning_rate, mean, sd, n}` of every rate at the row's steps,
    over the seeds that it has; trial_ids: of the best rate, by seed.

    trials, failed, diverged, stopped (early, by the scheduler), copied (of a trial with the same model), unfinished,
    relaxation_unfinished (heads were fused before their relaxation had come to its end): how many trials of all rates.
    pooled: whether `untrained` is of a pooled model that no training started from.
    """
    arms: dict[tuple[str, float], list[TrialRecord]] = {}
    trials = records.without_probes(trials)
    for t in trials:
        arms.setdefault((t.recipe, t.kv_ratio), []).append(t)
    names = list(dict.fromkeys(t.recipe for t in trials))
    ordered = sorted(arms, key=lambda arm: (-arm[1], names.index(arm[0])))
    seeds = seeds_of(trials)
    last = max((s for t in trials for s in _losses(t)), default=0)
    # What the searcher draws by itself is run with one seed only.
    return [_row(arms[a], seeds_of(arms[a]) if family(a[0]) == "joint" else seeds, last, original) for a in ordered]


def _losses(trial: TrialRecord) -> dict[int, float]:
    """The finite held-out losses of a trial that did not fail, by step."""
    if trial.status == records.FAILED:
        return {}
    return {int(r["step"]): r["loss"] for r in trial.rungs if r.get("loss") is not None and math.isfinite(r["loss"])}


def _row(arm: Sequence[TrialRecord], seeds: Sequence[int | None], last: int, original: Mapping[str, Any]) -> Row:
    rates = {rate: [t for t in arm if t.learning_rate == rate] for rate in sorted({t.learning_rate for t in arm})}
    steps = sorted({step for t in arm for step in _losses(t)})
    rungs = [rung for step in steps if (rung := _best_at(step, rates, seeds))]
    best = rungs[-1] if rungs else None
    at = best and best["step"]
    chosen = rates[best["learning_rate"]] if best else []
    curve = [point for step in steps if (point := _point(step, chosen, seeds))] if best else []
    sizes = [t.kv_bytes_per_token for t in chosen or arm if t.kv_bytes_per_token is not None]
    return {
        "recipe": arm[0].recipe,
        "label": arm[0].label,
        "kv_ratio": arm[0].kv_ratio,
        "kv_bytes_per_token": round(statistics.fmean(sizes)) if sizes else None,
        "learning_rate": best and best["learning_rate"],
        "seeds": len(seeds) if best else 0,
        "seeds_asked": len(seeds),
        "steps": at,
        "tokens": best and best["tokens"],
        "last": bool(best) and best["step"] == last,
        "loss": _bare(best) if best else mean_and_sd(()),
        "untrained": next((_bare(p) for p in curve if p["step"] == 0), mean_and_sd(())),
        "pooled": any(t.relaxes for t in chosen or arm),
        "loss_increase": best["mean"] - original["loss"] if best else None,
        "cost": _mean_cost(chosen or arm),
        "remaining_distance": mean_and_sd(t.remaining_distance for t in chosen if t.remaining_distance is not None),
        "curve": curve,
        "rungs": rungs,
        "rates": [
            {"learning_rate": rate, **mean_and_sd(_losses(t)[at] for t in mine if at in _losses(t))}
            for rate, mine in rates.items()
        ],
        "trial_ids": [t.trial_id for t in sorted(chosen, key=lambda t: (t.seed is not None, t.seed or 0))],
        **_counts(arm),
    }


def _point(step: int, trials: Sequence[TrialRecord], seeds: Sequence[int | None]) -> dict[str, Any] | None:
    """Mean and spread of a rate's trials at a step; None unless every seed was measured there and none failed."""
    if any(t.status == records.FAILED for t in trials):
        return None
    measured = {t.seed: t for t in trials if step in _losses(t)}
    if set(measured) != set(seeds):
        return None
    tokens = [r["tokens"] for t in measured.values() for r in t.rungs if r["step"] == step and "tokens" in r]
    mean_tokens = round(statistics.fmean(tokens)) if tokens else None
    return {"step": step, "tokens": mean_tokens, **mean_and_sd(_losses(t)[step] for t in measured.values())}


def _best_at(
    step: int, rates: Mapping[float, Sequence[TrialRecord]], seeds: Sequence[int | None]
) -> dict[str, Any] | None:
    points = [p | {"learning_rate": rate} for rate, mine in rates.items() if (p := _point(step, mine, seeds))]
    return min(points, key=lambda p: (p["mean"], p["learning_rate"]), default=None)


def _bare(point: Mapping[str, Any]) -> Spread:
    return {key: point[key] for key in ("mean", "sd", "n")}


def _mean_cost(trials: Sequence[TrialRecord]) -> dict[str, float]:
    costs = [t.cost for t in trials]
    return {name: statistics.fmean(cost[name] for cost in costs) for name in costs[0]}


def _counts(arm: Sequence[TrialRecord]) -> dict[str, int]:
    broken = sum(diverged(t) for t in arm)
    return {
        "trials": len(arm),
        "diverged": broken,
        "failed": sum(t.status == records.FAILED for t in arm) - broken,
        "stopped": sum(t.status == records.STOPPED for t in arm),
        "copied": sum(t.status == records.COPY for t in arm),
        "relaxation_unfinished": sum(t.relaxation_unfinished for t in arm),
        "unfinished": sum(t.status not in (records.DONE, records.STOPPED, records.COPY, records.FAILED) for t in arm),
    }


# ---- as text ------------------------------------------------------------------------------------------------------

OF_THE_CHECKPOINT = "KV of the checkpoint's"
COLUMNS = (
    *("recipe", OF_THE_CHECKPOINT, "loss", "loss increase", "untrained", "rate", "steps", "tokens", "KV bytes/token"),
    *("fit steps", "FLOPs", "seconds", "left", "seeds", "trials"),
)


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, one cell for each of `COLUMNS`. A star marks a row that compares before the last rung."""
    steps = row["steps"]
    return (
        row["label"],
        percent(row["kv_ratio"]),
        _mean_and_sd(row["loss"]),
        number(row["loss_increase"], "+.3f"),
        _mean_and_sd(row["untrained"]) + (" pooled" if row["pooled"] else ""),
        number(row["learning_rate"] if steps else None, ".1e"),
        UNTOLD if steps is None else f"{steps}{'' if row['last'] else '*'}",
        UNTOLD if row["tokens"] is None else compact(row["tokens"]),
        number(row["kv_bytes_per_token"], "d"),
        compact(round(row["cost"]["optimizer_steps"])),
        f"{row['cost']['flops']:.1e}",
        f"{row['cost']['seconds']:.0f}",
        number(row["remaining_distance"]["mean"], ".2g"),
        str(row["seeds"]),
        counts_text(row),
    )


SAME = 1e-6  # nats per token, between seeds of one plan


def _mean_and_sd(values: Spread) -> str:
    """Mean ± standard deviation; the mean alone of one seed, and of seeds that are all the same: a plan that does not
    depend on the seed has no spread, and "± 0.000" would read as a precision."""
    mean = number(values["mean"])
    deviation = values["sd"]
    return mean if deviation is None or deviation < SAME else f"{mean} ± {deviation:.3f}"


ODD = ("diverged", "failed", "stopped", "copied", "relaxation_unfinished", "unfinished")


def counts_text(row: Row) -> str:
    """How many trials a row is made from, and what became of those that tell nothing: "9 (1 diverged)"."""
    odd = [f"{row[name]} {name.replace('_', ' ')}" for name in ODD if row[name]]
    return str(row["trials"]) + (f" ({', '.join(odd)})" if odd else "")


def footnote(rows: Sequence[Row]) -> str:
    """What the reader of the table must know."""
    several = max((row["seeds_asked"] for row in rows), default=0)
    note = (
        f"Each arm at its best learning rate of the same grid; mean ± sample standard deviation over {several} seeds "
        "(none where the seed changes nothing); "
        "a rate with a failed, diverged or early stopped seed is left out of the choice; fit steps: Adam steps on "
        "single layers before training; FLOPs: of these and of the training, 6 a parameter and token; seconds: of all"
    )
    if any(row["seeds"] == 1 < several for row in rows):
        note += "; candidates that the searcher drew by itself have one seed"
    if any(row["pooled"] for row in rows):
        note += f"; {records.POOLED_NOTE}"
    if any(row["relaxation_unfinished"] for row in rows):
        note += "; relaxation unfinished: heads were fused before it had brought them together"
    if any(row["remaining_distance"]["n"] for row in rows):
        note += "; left: of the squared distance of the pairs when they were made to share, 1 at the start"
    early = any(row["steps"] is not None and not row["last"] for row in rows)
    return note + ("; * all seeds of a rate got only so far: not comparable with the others." if early else ".")
