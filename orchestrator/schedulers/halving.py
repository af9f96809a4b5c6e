"""Asynchronous successive halving (ASHA, Li 2020) with one bracket for each KV budget.

A trial that keeps a quarter of the cache never competes with one that keeps half: their losses are not comparable, and
one bracket for all would stop every small budget first.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

RESOURCE = "resource"
BUDGET = "kv_ratio"


def rung_resource(rung: int, reduction_factor: float) -> float:
    """What rung `rung` counts as for ASHA, whose milestones are powers of the reduction factor."""
    return float(reduction_factor**rung)


class BudgetHalving(FIFOScheduler):
    """Stops a trial at a rung unless it is among the best 1 / `reduction_factor` of its own budget so far.

    `rungs` counts the rungs, the untrained conversion included; results carry `resource = rung_resource(rung)`, so that
    every rung is a milestone whatever its steps. The last rung stops nobody: its trials end by themselves and write
    their weights. A trial whose recipe is `protected` (the baseline of every comparison) goes on whatever its loss and
    does not count at the rungs. A trial whose loss is not finite is stopped at once.
    """

    def __init__(
        self, rungs: int, reduction_factor: float, protected: tuple[str, ...] = (), metric: str = "loss"
    ) -> None:
        super().__init__()
        if rungs < 1:
            raise ValueError(f"a search needs at least one rung, got {rungs}")
        self._rungs, self._factor, self._protected, self._objective = rungs, reduction_factor, protected, metric
        self._brackets: dict[float, AsyncHyperBandScheduler] = {}

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        return True

    def _bracket(self, trial: Any) -> AsyncHyperBandScheduler | None:
        """The bracket of a trial's budget; None if nothing can stop the trial."""
        if self._rungs == 1 or trial.config.get("recipe") in self._protected:
            return None
        budget = float(trial.config[BUDGET])
        if budget not in self._brackets:
            self._brackets[budget] = AsyncHyperBandScheduler(
                time_attr=RESOURCE,
                metric=self._objective,
                mode="min",
                # Half a rung below the last one: the last rung is no milestone, so it stops nobody.
                max_t=self._factor ** (self._rungs - 1.5),  # pyright: ignore[reportArgumentType]
                grace_period=1,
                reduction_factor=self._factor,
                stop_last_trials=False,
            )
        return self._brackets[budget]

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        if bracket := self._bracket(trial):
            bracket.on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
        if not math.isfinite(result.get(self._objective, 0.0)):
            return TrialScheduler.STOP  # a diverged trial: NaN passes every comparison of the brackets
        bracket = self._bracket(trial)
        return bracket.on_trial_result(tune_controller, trial, result) if bracket else TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict) -> None:
        if bracket := self._bracket(trial):
            bracket.on_trial_complete(tune_controller, trial, result)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        if bracket := self._bracket(trial):
            bracket.on_trial_error(tune_controller, trial)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        if bracket := self._bracket(trial):
            bracket.on_trial_remove(tune_controller, trial)

    def debug_string(self) -> str:
        return "\n".join(f"KV {budget}: {b.debug_string()}" for budget, b in sorted(self._brackets.items()))

    def save(self, checkpoint_path: str) -> None:
        with Path(checkpoint_path).open("wb") as stream:
            pickle.dump(self.__dict__, stream)

    def restore(self, checkpoint_path: str) -> None:
        """Tune's own state, written by `save`: trusted, like the rest of a search folder that is resumed."""
        with Path(checkpoint_path).open("rb") as stream:
            self.__dict__.update(pickle.load(stream))
