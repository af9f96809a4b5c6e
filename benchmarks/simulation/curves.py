"""Learning curves: the recorded ones, and a generator fitted to them where a simulation needs more.

The generator takes a recorded curve that was measured at every rung, at random, and moves its excess e_r (loss over the
floor, the lowest recorded loss less a margin) at rung r:

    ln e'_r = ln e_r + g + n_r,    g ~ N(0, spread^2),    n_r ~ N(0, noise^2), r > 0

`noise` is fitted: two seeds of one arm, budget and rate differ by sqrt(2) noise. `spread` is chosen: half of the
standard deviation that ln e has between the recorded arms of one budget, which fills the gaps between them. What this
cannot give: curves that cross more often than the recorded ones do, and trials that diverge.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

RECORDED = Path(__file__).with_name("curves.json")
MARGIN = 0.05


@dataclass(frozen=True)
class Curve:
    """`rungs`: (step, tokens, loss, seconds of the job) by rung; None where a relaxation leaves one out."""

    arm: str
    kv_ratio: float
    learning_rate: float
    seed: int
    kv_bytes: float
    rungs: tuple[tuple[int, int, float, float] | None, ...]

    def loss(self, rung: int) -> float:
        report = self.rungs[rung]
        return np.inf if report is None else report[2]


@cache
def recorded() -> tuple[Curve, ...]:
    reports = []
    records = json.loads(RECORDED.read_text(encoding="utf-8"))["curves"]
    steps = sorted({rung[0] for record in records for rung in record["rungs"]})
    for record in records:
        by_step = {rung[0]: tuple(rung) for rung in record["rungs"]}
        reports.append(
            Curve(
                record["arm"], record["kv_ratio"], record["learning_rate"], record["seed"],
                record["kv_bytes_per_token"], tuple(by_step.get(step) for step in steps),
            )
        )  # fmt: skip
    return tuple(reports)


@dataclass(frozen=True)
class Fit:
    floor: float
    noise: float
    spread: float


@cache
def fit() -> Fit:
    whole = [curve for curve in recorded() if None not in curve.rungs]
    floor = min(curve.loss(rung) for curve in recorded() for rung in range(len(curve.rungs))) - MARGIN
    pairs: dict[tuple, list[Curve]] = {}
    budgets: dict[tuple, list[float]] = {}
    for curve in whole:
        pairs.setdefault((curve.arm, curve.kv_ratio, curve.learning_rate), []).append(curve)
        budgets.setdefault((curve.kv_ratio, curve.learning_rate, curve.seed), []).append(np.log(curve.loss(-1) - floor))
    gaps = [
        np.log(a.loss(rung) - floor) - np.log(b.loss(rung) - floor)
        for a, b in (pair for pair in pairs.values() if len(pair) == 2)
        for rung in (1, 2)
    ]
    apart = [float(np.std(values)) for values in budgets.values() if len(values) > 2]
    return Fit(floor, float(np.sqrt(np.mean(np.square(gaps)) / 2)), float(np.mean(apart)) / 2)


def generated(count: int, seed: int) -> list[Curve]:
    """`count` curves; the same for the same seed."""
    generator, fitted = np.random.default_rng(seed), fit()
    whole = [curve for curve in recorded() if None not in curve.rungs]
    curves = []
    for number in range(count):
        base = whole[generator.integers(len(whole))]
        shift = generator.normal(0, fitted.spread)
        rungs = []
        for index, rung in enumerate(base.rungs):
            assert rung is not None
            noise = generator.normal(0, fitted.noise) if index else 0.0
            loss = fitted.floor + (rung[2] - fitted.floor) * float(np.exp(shift + noise))
            rungs.append((rung[0], rung[1], loss, rung[3]))
        curves.append(Curve(base.arm, base.kv_ratio, base.learning_rate, number, base.kv_bytes, tuple(rungs)))
    return curves
