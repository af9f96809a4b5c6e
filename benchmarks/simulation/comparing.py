"""Early stopping compared on learning curves: hypervolume of the front at equal spent tokens, and tokens saved.

Every rule sees the same candidates in the same order on the same number of workers. Tokens are those that trials were
trained on; the untrained rung costs none. At any moment the front is that of all trials at their last measured loss.
Hypervolume: of (loss, KV bytes per token), up to the loss and the bytes of the worst recorded trial, as shares of the
hypervolume of all trials run to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.simulation.curves import Curve, fit, generated, recorded
from benchmarks.simulation.virtual_tune import FakeTrial, VirtualTune
from orchestrator.search.schedulers import RungProblem, RungScheduler, make_scheduler
from search_spaces import pareto

FACTOR = 2.0
SHARES = (0.1, 0.2, 0.3)
MEAN_UP_TO = 0.4
"""Share of all tokens; every rule continues longer than that."""
RULES = ("front, epsilon-net", "front, crowding", "budget brackets", "weighted sum", "weighted sum, log excess")


@dataclass
class Run:
    """A run of one rule on one set of candidates: tokens spent after each report, and the hypervolume then."""

    tokens: list[int]
    volume: list[float]
    trials: int
    finished: int

    def at(self, tokens: float) -> float:
        """The hypervolume when at most so many tokens had been spent."""
        place = int(np.searchsorted(self.tokens, tokens, side="right"))
        return self.volume[place - 1] if place else 0.0

    def mean(self, tokens: float) -> float:
        """The hypervolume on average while the first so many tokens were spent."""
        ends = np.minimum([*self.tokens[1:], tokens], tokens)
        spans = ends - np.minimum(self.tokens, tokens)
        return float(np.dot(spans, self.volume)) / tokens


def scheduler(rule: str, rungs: int) -> RungScheduler:
    if rule.startswith("front"):
        return make_scheduler("front", RungProblem(rungs, FACTOR), {"ties": rule.split(", ")[1].replace("-", "_")})
    if rule == "budget brackets":
        return make_scheduler("asha", RungProblem(rungs, FACTOR))
    if rule == "to the end":
        return make_scheduler("none", RungProblem(rungs, FACTOR))
    return make_scheduler("front", RungProblem(rungs, FACTOR, objectives=("weighted",)))  # one objective: ASHA


def weighted(rule: str, loss: float, kv_bytes: float) -> float:
    """Equal weights on both objectives in shares of their recorded ranges; or on the logarithm of the loss' excess."""
    losses = np.array([[c.loss(0), c.loss(-1)] for c in recorded()])
    most, floor = max(c.kv_bytes for c in recorded()), fit().floor
    if rule == "weighted sum":
        share = (loss - losses.min()) / np.ptp(losses)
    else:
        logs = np.log(losses - floor)
        share = (np.log(loss - floor) - logs.min()) / np.ptp(logs)
    return 0.5 * float(share) + 0.5 * kv_bytes / most


def run(rule: str, curves: Sequence[Curve], workers: int = 8) -> Run:
    """Run a rule on all candidates."""
    rungs = len(curves[0].rungs)
    trials = []
    for number, curve in enumerate(curves):
        losses: list[float | None] = [None if rung is None else rung[2] for rung in curve.rungs]
        config = {"recipe": curve.arm, "kv_ratio": curve.kv_ratio}
        trials.append(FakeTrial(f"t{number}", losses, config, curve.kv_bytes))
    by_trial = {trial.trial_id: curve for trial, curve in zip(trials, curves, strict=True)}

    def seconds(trial: FakeTrial, rung: int) -> float:
        report = by_trial[trial.trial_id].rungs[rung]
        return report[3] if report else 0.0

    def extra(trial: FakeTrial, loss: float) -> dict[str, float]:
        return {"weighted": weighted(rule, loss, trial.kv_bytes)} if rule.startswith("weighted") else {}

    tune = VirtualTune(scheduler(rule, rungs), trials, workers, seconds, extra=extra).run()
    reports = [(event[1], event[2]) for event in tune.events if event[0] == "report"]
    return follow(reports, by_trial, reference(), rungs)


def reference() -> tuple[float, float]:
    return max(c.loss(0) for c in recorded()), 1.0 + max(c.kv_bytes for c in recorded())


def follow(
    reports: Sequence[tuple[FakeTrial, dict[str, Any]]],
    curves: dict[str, Curve],
    corner: tuple[float, float],
    rungs: int,
) -> Run:
    """Tokens and hypervolume after each report, in order."""
    last: dict[str, tuple[float, float]] = {}
    spent: dict[str, int] = {}
    tokens, volume, total = [], [], 0
    for trial, result in reports:
        name, rung = trial.trial_id, curves[trial.trial_id].rungs[result["rung"]]
        assert rung is not None
        total += rung[1] - spent.get(name, 0)
        spent[name], last[name] = rung[1], (result["loss"], trial.kv_bytes)
        tokens.append(total)
        volume.append(pareto.hypervolume(list(last.values()), corner))
    finished = sum(result["rung"] == rungs - 1 for _, result in reports)
    return Run(tokens, volume, len(last), finished)


@dataclass(frozen=True)
class Line:
    """A rule over all seeds: mean share of the hypervolume at a share of the tokens, and of the tokens spent.

    `mean`: on average up to MEAN_UP_TO of the tokens; `ahead`: by how much the first rule is ahead of it there, and the
    standard error of that, set by set. `not_worse`: in how many sets it reached the first rule's hypervolume or more.
    """

    rule: str
    at: dict[float, float]
    mean: float
    ahead: tuple[float, float]
    spent: float
    end: float
    not_worse: dict[float, int]


def compare(sets: Sequence[Sequence[Curve]], shares: Sequence[float] = SHARES) -> list[Line]:
    """Every rule on every set of candidates."""
    wholes = [run("to the end", curves) for curves in sets]
    by_rule = {rule: [run(rule, curves) for curves in sets] for rule in RULES}
    return [_line(rule, runs, by_rule[RULES[0]], wholes, shares) for rule, runs in by_rule.items()]


def _line(rule: str, runs: list[Run], firsts: list[Run], wholes: list[Run], shares: Sequence[float]) -> Line:
    def shares_of(measured: Sequence[Run], volume: Callable[[Run, int], float]) -> np.ndarray:
        """Return shares of a run's volume in that of all trials to the end."""
        return np.array([volume(r, w.tokens[-1]) / w.volume[-1] for r, w in zip(measured, wholes, strict=True)])

    def at(measured: Sequence[Run], share: float) -> np.ndarray:
        return shares_of(measured, lambda r, tokens: r.at(share * tokens))

    def means(measured: Sequence[Run]) -> np.ndarray:
        return shares_of(measured, lambda r, tokens: r.mean(MEAN_UP_TO * tokens))

    ahead = means(firsts) - means(runs)
    error = float(ahead.std(ddof=1) / np.sqrt(len(ahead))) if len(ahead) > 1 else float("nan")
    return Line(
        rule,
        {share: float(at(runs, share).mean()) for share in shares},
        float(means(runs).mean()),
        (float(ahead.mean()), error),
        float(np.mean([r.tokens[-1] / whole.tokens[-1] for r, whole in zip(runs, wholes, strict=True)])),
        float(shares_of(runs, lambda r, tokens: r.volume[-1]).mean()),
        {share: int((at(runs, share) >= at(firsts, share) - 1e-12).sum()) for share in shares},
    )


def shuffled(seed: int) -> list[Curve]:
    """The recorded curves in another order."""
    order = np.random.default_rng(seed).permutation(len(recorded()))
    return [recorded()[place] for place in order]


def report(seeds: int, generated_trials: int = 200) -> str:
    """The tables for the recorded curves in `seeds` orders, and for `seeds` sets of generated ones."""
    fitted, parts = fit(), []
    for title, sets in (
        (f"The {len(recorded())} recorded curves in {seeds} orders", [shuffled(seed) for seed in range(seeds)]),
        (
            f"{generated_trials} generated curves (noise {fitted.noise:.3f}, spread {fitted.spread:.3f}), "
            f"{seeds} seeds",
            [generated(generated_trials, seed) for seed in range(seeds)],
        ),
    ):
        parts += [f"{title}:", "", *_table(compare(sets)), ""]
    return "\n".join(parts)


def _table(lines: Sequence[Line]) -> list[str]:
    shares = list(lines[0].at)
    at = " | ".join(f"at {share:.0%} of the tokens" for share in shares)
    mean = f"mean up to {MEAN_UP_TO:.0%} | the first is ahead by"
    rows = [f"| rule | {at} | {mean} | at its end | tokens spent |", "|---|" + "---|" * (len(shares) + 4)]
    for line in lines:
        volumes = " | ".join(f"{line.at[s]:.4f} ({line.not_worse[s]})" for s in shares)
        ahead = "" if line is lines[0] else f"{line.ahead[0]:+.4f} ± {line.ahead[1]:.4f}"
        rows.append(f"| {line.rule} | {volumes} | {line.mean:.4f} | {ahead} | {line.end:.4f} | {line.spent:.1%} |")
    return rows
