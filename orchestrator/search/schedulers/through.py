"""Every trial runs to the end: a comparison of recipes, as papers print it."""

from __future__ import annotations

from typing import Any

from ray.tune.schedulers import TrialScheduler

from orchestrator.search.schedulers.problem import SCHEDULERS, RungProblem, RungScheduler


class Through(RungScheduler):
    def _decide(self, trial: Any, rung: int, values: tuple[float, ...]) -> str:
        return TrialScheduler.CONTINUE


@SCHEDULERS.part("none", source="no early stopping")
def through(problem: RungProblem) -> RungScheduler:
    return Through(problem)
