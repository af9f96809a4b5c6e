"""The input of a scheduler, and what all schedulers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from attention.axes import Axis
from orchestrator.config.schema import OBJECTIVES

SCHEDULERS = Axis("scheduler", "orchestrator.search.schedulers")


@dataclass
class Slots:
    """The trials that run at a time.

    Used instead of Tune's `max_concurrent_trials`, which counts paused ones too [2.60].

    Attributes:
        capacity: Their number, or a function that returns it; None for no limit.
        promised: Whether a paused trial goes first.
        taken: The trials that run.
    """

    capacity: int | Callable[[], int] | None = None
    promised: bool = False
    taken: set[str] = field(default_factory=set)

    @property
    def full(self) -> bool:
        most = self.capacity() if callable(self.capacity) else self.capacity
        return most is not None and len(self.taken) >= most


@dataclass(frozen=True)
class RungProblem:
    """The input of a scheduler.

    Attributes:
        rungs: Number of rungs, the untrained conversion included; results have a `rung`, from 0.
        reduction_factor: About 1 / `reduction_factor` of the trials continues at each rung.
        protected: Recipes whose trials always continue.
        objectives: Keys of a report that are minimised; the first one is the quality.
        trials: Largest number of trials of the search.
    """

    rungs: int
    reduction_factor: float
    protected: tuple[str, ...] = ()
    objectives: tuple[str, ...] = OBJECTIVES
    trials: int | None = None

    def __post_init__(self) -> None:
        if self.rungs < 1:
            raise ValueError(f"a search needs at least one rung, got {self.rungs}")
        if self.reduction_factor <= 1:
            raise ValueError(f"the reduction factor must be above 1, got {self.reduction_factor}")


def make_scheduler(
    name: str, problem: RungProblem, params: Mapping[str, Any] | None = None
) -> RungScheduler:
    """Return the scheduler of a name.

    Raises:
        ValueError: For an unknown name, and for parameters that it does not have.
    """
    part = SCHEDULERS.get(name)
    return part(problem, **part.settings(params))


class RungScheduler(FIFOScheduler):
    """Decides at each rung whether a trial continues.

    Subclasses decide in `_decide`; here every trial continues.

    No trial is stopped at the last rung: its trials end by themselves and write their weights. A
    trial whose recipe is protected (the baseline of every comparison) continues at any loss and
    does not count at the rungs; nor does one whose `plan` was made by the searcher: a probe, which
    ends untrained, or the plan that results from many probes. A trial whose loss is not finite is
    stopped at once. A rung that a trial reports again, because it continues from a checkpoint or
    was restarted, counts once and its decision does not change.

    A `pooled` report is of a model that the trial never trains from: its relaxation starts from
    unfused heads. It stops no trial and does not count; the first rung after the relaxation does. A
    trial whose `work_digest` another one has reported before would be trained to the same model: it
    is stopped, as a copy of that one (`copies`: by copy, the first), and does not count.

    Trials are compared by their loss at the rung itself, all after the same number of steps: the
    decision is which of them still profit from training. The final result of a trial is its best
    step (`TrialRecord.best`).

    The state is a function of the events alone, in their order: trials added, reports, advances,
    ends. A resumed search replays the events to a fresh scheduler, since Tune restores one as it
    was when the search began [ray 2.60].
    """

    def __init__(self, problem: RungProblem) -> None:
        super().__init__()
        self.problem, self.slots = problem, Slots()
        self._decisions: dict[tuple[str, int], str] = {}
        self._works: dict[tuple[str, float], str] = {}
        self.copies: dict[str, str] = {}

    # ---- for subclasses --------------------------------------------------------------------------

    def _decide(self, trial: Any, rung: int, values: tuple[float, ...]) -> str:
        """Return CONTINUE, PAUSE or STOP for a trial that counts.

        Called once for each rung below the last.
        """
        return TrialScheduler.CONTINUE

    def _over(self, trial: Any) -> None:
        """Free the slot of a trial that has ended, for any reason."""
        self.slots.taken.discard(trial.trial_id)

    def counts(self, trial: Any) -> bool:
        return self.problem.rungs > 1 and not self._protected(trial) and "plan" not in trial.config

    # ---- events ----------------------------------------------------------------------------------

    def advance(self, trial_id: str) -> None:
        """Continue a paused trial.

        `choose_trial_to_run` gave it to Tune, perhaps before a restart.
        """
        self.slots.taken.add(trial_id)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        if trial.status in (Trial.PENDING, Trial.RUNNING):
            self.slots.taken.add(trial.trial_id)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
        decision = self._judge(trial, result)
        if decision != TrialScheduler.CONTINUE:
            self.slots.taken.discard(trial.trial_id)
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict) -> None:
        self._over(trial)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        self._over(trial)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self._over(trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """Return None: Tune starts what is pending by itself."""
        return None

    def _judge(self, trial: Any, result: dict) -> str:
        quality, rung = result.get(self.problem.objectives[0]), result.get("rung")
        if self._is_copy(trial, result.get("work_digest")):
            return TrialScheduler.STOP
        if result.get("pooled"):
            return TrialScheduler.CONTINUE
        if quality is not None and not math.isfinite(quality):
            return TrialScheduler.STOP  # NaN would pass every comparison
        if (
            quality is None
            or rung is None
            or not self.counts(trial)
            or rung >= self.problem.rungs - 1
        ):
            return TrialScheduler.CONTINUE
        key = (trial.trial_id, int(rung))
        if key not in self._decisions:
            values = tuple(float(result[name]) for name in self.problem.objectives)
            self._decisions[key] = self._decide(trial, key[1], values)
        return self._decisions[key]

    def _protected(self, trial: Any) -> bool:
        return trial.config.get("recipe") in self.problem.protected

    def _is_copy(self, trial: Any, work: str | None) -> bool:
        """Return whether another trial, the first with this work, does this work.

        A protected trial always does its own, and so does one at another KV ratio, whose trials are
        compared with each other.
        """
        if work is None:
            return False
        first = self._works.setdefault((work, trial.config.get("kv_ratio")), trial.trial_id)
        if first == trial.trial_id or self._protected(trial):
            return False
        self.copies[trial.trial_id] = first
        return True
