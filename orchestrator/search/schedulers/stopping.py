"""Schedulers without pauses: a trial is stopped for good, or continues at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from ray.tune.schedulers import TrialScheduler

from orchestrator.search.schedulers.problem import SCHEDULERS, RungProblem, RungScheduler


class StoppingAsha(RungScheduler):
    """Asynchronous successive halving in its stopping form, with one bracket for each KV ratio.

    A trial that keeps a quarter of the cache never competes with one that keeps half: their losses
    are not comparable, and one bracket for all would stop every small ratio first. The first of the
    problem's objectives decides.
    """

    def __init__(self, problem: RungProblem) -> None:
        super().__init__(problem)
        self._scores: dict[
            tuple[float, int], list[float]
        ] = {}  # by KV ratio and rung, in order of arrival

    def _decide(self, trial: Any, rung: int, values: tuple[float, ...]) -> str:
        """Stop a score below the (1 - 1 / factor) percentile of those before it at the rung.

        Ray's does the same.
        """
        earlier, score = self._scores.setdefault((trial.config["kv_ratio"], rung), []), -values[0]
        share = 1 - 1 / self.problem.reduction_factor
        stops = bool(earlier) and score < np.percentile(earlier, 100 * share)
        earlier.append(score)
        return TrialScheduler.STOP if stops else TrialScheduler.CONTINUE


@SCHEDULERS.part(
    "asha", source="Li 2020 (ASHA), a bracket for each KV ratio, the stopping form of Ray Tune"
)
def asha(problem: RungProblem) -> RungScheduler:
    """Return the scheduler `asha`, which stops all but the best of each KV ratio for good."""
    return StoppingAsha(problem)


@SCHEDULERS.part("none", source="no early stopping: a full comparison of recipes, as in papers")
def none(problem: RungProblem) -> RungScheduler:
    """Return the scheduler `none`: every trial continues."""
    return RungScheduler(problem)
