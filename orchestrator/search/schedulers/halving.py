"""Asynchronous successive halving (ASHA, Li 2020) with one bracket for each KV budget, as Ray Tune has it.

A trial that keeps a quarter of the cache never competes with one that keeps half: their losses are not comparable, and
one bracket for all would stop every small budget first. Nobody is paused: a trial is stopped for good, or goes on at
once in the process that it has.
"""

from __future__ import annotations

from typing import Any

from ray.tune.schedulers import AsyncHyperBandScheduler

from orchestrator.search.schedulers.problem import BUDGET, SCHEDULERS, RungProblem, RungScheduler

RESOURCE, SCORE = "resource", "score"


def rung_resource(rung: int, reduction_factor: float) -> float:
    """What rung `rung` counts as for Ray's ASHA, whose milestones are powers of the reduction factor."""
    return float(reduction_factor**rung)


class BudgetHalving(RungScheduler):
    """Stops a trial at a rung unless it is among the best 1 / `reduction_factor` of its own budget so far.

    The first of the problem's objectives decides. With one rung nobody is stopped.
    """

    def __init__(self, problem: RungProblem) -> None:
        super().__init__(problem)
        self._brackets: dict[float, AsyncHyperBandScheduler] = {}

    def _bracket(self, budget: float) -> AsyncHyperBandScheduler:
        if budget not in self._brackets:
            factor = self.problem.reduction_factor
            self._brackets[budget] = AsyncHyperBandScheduler(
                time_attr=RESOURCE,
                metric=SCORE,
                mode="min",
                # Half a rung below the last one: the last rung is no milestone, so it stops nobody.
                max_t=factor ** (self.problem.rungs - 1.5),  # pyright: ignore[reportArgumentType]
                grace_period=1,
                reduction_factor=factor,
                stop_last_trials=False,
            )
        return self._brackets[budget]

    def _decide(self, trial: Any, rung: int, values: tuple[float, ...]) -> str:
        asha = self._bracket(float(trial.config[BUDGET]))
        if trial.trial_id not in asha._trial_info:
            asha.on_trial_add(None, trial)  # pyright: ignore[reportArgumentType]
        result = {RESOURCE: rung_resource(rung, self.problem.reduction_factor), SCORE: values[0]}
        return asha.on_trial_result(None, trial, result)  # pyright: ignore[reportArgumentType]

    def debug_string(self) -> str:
        return "\n".join(f"KV {budget}: {b.debug_string()}" for budget, b in sorted(self._brackets.items()))


@SCHEDULERS.part("budget", source="Li 2020 (ASHA), a bracket for each budget, the stopping form of Ray Tune")
def budget(problem: RungProblem) -> RungScheduler:
    return BudgetHalving(problem)
