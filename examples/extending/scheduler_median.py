"""A scheduler: the median rule. Its place: orchestrator/search/schedulers/median.py."""

from __future__ import annotations

from statistics import median
from typing import Any

from ray.tune.schedulers import TrialScheduler

from orchestrator.search.schedulers.problem import SCHEDULERS, RungProblem, RungScheduler


class MedianRule(RungScheduler):
    """Stops a trial at a rung where its loss is above the median of all trials of its KV ratio."""

    def __init__(self, problem: RungProblem) -> None:
        super().__init__(problem)
        self._losses: dict[tuple[float, int], list[float]] = {}

    def _decide(self, trial: Any, rung: int, values: tuple[float, ...]) -> str:
        losses = self._losses.setdefault((trial.config["kv_ratio"], rung), [])
        losses.append(values[0])
        return TrialScheduler.STOP if values[0] > median(losses) else TrialScheduler.CONTINUE


@SCHEDULERS.part("median", source="Golovin 2017 (Vizier), section 3.2, at rungs instead of at each step")
def median_rule(problem: RungProblem) -> RungScheduler:
    return MedianRule(problem)
