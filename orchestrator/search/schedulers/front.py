"""Multi-objective asynchronous successive halving (MO-ASHA, Schmucker 2021).

The objectives are held-out loss and KV bytes per token. Every trial is paused at each rung: its
process goes to another trial, and it continues from its checkpoint when it advances. KV ratios
share one bracket, since a trial with fewer bytes is never behind one with more for its loss alone:
ranks are by dominance.

Asynchronous (Li 2020, Algorithm 2): of the n trials that have reached a rung, the best floor(n /
factor) may continue; those of them that have not yet done so advance, the highest rung first. The
best are chosen by non-dominated sorting (Schmucker 2021, Algorithm 1); with one objective it is a
sort.

Synchronous (Jamieson 2016): trials advance from a rung once all that can reach it have done so.
Slow trials delay the others; which trials advance depends on the results alone, not on the order in
which they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from attention.axes import Knob
from orchestrator.search.schedulers.problem import SCHEDULERS, RungProblem, RungScheduler
from search_spaces import pareto

Values = tuple[float, ...]


@dataclass
class Rung:
    """The trials that have reached a rung, in order of arrival.

    Attributes:
        advanced: Those that have advanced from here.
        waiting: Those that have neither advanced nor finished.
        best: Those that may advance; None if they have to be chosen anew.
    """

    trials: list[str] = field(default_factory=list)
    values: list[Values] = field(default_factory=list)
    advanced: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    best: list[str] | None = None


class Rungs:
    """The rungs below the last one.

    Args:
        select: `select(values, count)` returns the indices of the `count` best, best first.
        expected: Number of trials that will arrive or leave in a synchronous search; None if it is
            asynchronous.
    """

    def __init__(
        self,
        count: int,
        factor: float,
        select: Callable[[Sequence[Values], int], Sequence[int]],
        expected: int | None,
    ) -> None:
        self.rungs = [Rung() for _ in range(count)]
        self._factor = factor
        self._select = select
        self._expected = expected
        self._highest: dict[str, int] = {}  # the highest rung that a trial has come to
        self._left: set[str] = set()
        self._closed = False

    def arrive(self, trial: str, index: int, values: Values) -> None:
        """Add a trial that has reached a rung for the first time, and waits there."""
        rung = self.rungs[index]
        rung.trials.append(trial)
        rung.values.append(values)
        rung.waiting.add(trial)
        rung.best = None
        if trial in self._highest:
            self.rungs[self._highest[trial]].waiting.discard(trial)
        self._highest[trial] = index

    def leave(self, trial: str) -> None:
        """Let a trial end. Its scores still count at the rungs that it has reached."""
        self._left.add(trial)
        if trial in self._highest:
            self.rungs[self._highest[trial]].waiting.discard(trial)

    def rejoin(self, trial: str) -> None:
        """Return a trial that had left to the rung that it had reached."""
        if trial not in self._left:
            return
        self._left.discard(trial)
        if (
            trial in self._highest
            and trial not in (rung := self.rungs[self._highest[trial]]).advanced
        ):
            rung.waiting.add(trial)

    def advance(self, trial: str) -> int:
        """Advance a waiting trial. Return the index of the rung that it leaves."""
        index = self._highest[trial]
        self.rungs[index].advanced.add(trial)
        self.rungs[index].waiting.discard(trial)
        return index

    def close(self) -> bool:
        """Let at least one trial of each rung advance, as no more arrive; False if done before."""
        was_closed = self._closed
        self._closed = True
        for rung in self.rungs:
            rung.best = None
        return not was_closed

    def next(self) -> str | None:
        """Return the best trial of the highest rung that has one to advance, or None."""
        for index, rung in reversed(list(enumerate(self.rungs))):
            if rung.waiting and self._open(index):
                for trial in self._best(rung):
                    if trial in rung.waiting:
                        return trial
        return None

    def _best(self, rung: Rung) -> list[str]:
        """Return the trials that may advance from a rung, best first.

        They are chosen anew after each arrival only.
        """
        if rung.best is None:
            count = max(int(len(rung.trials) / self._factor), int(self._closed))
            order = range(len(rung.trials))
            # Of equal ones the first counts, in order of arrival
            if self._expected is not None:
                order = sorted(order, key=lambda index: rung.trials[index])
            values = [rung.values[index] for index in order]
            best = self._select(values, count) if count else []
            rung.best = [rung.trials[order[index]] for index in best]
        return rung.best

    def _open(self, index: int) -> bool:
        """Return whether trials may advance from a rung.

        In a synchronous search they may only when no other trial can reach it.
        """
        if self._expected is None:
            return True
        if not self._closed and len(self._highest.keys() | self._left) < self._expected:
            return False
        return all(self._passed(below, index) for below in self.rungs[:index])

    def _passed(self, below: Rung, index: int) -> bool:
        """Return whether all trials of lower rungs have reached `index`, or have left."""
        if any(trial in below.waiting for trial in self._best(below)):
            return False
        return all(trial in self._left or self._highest[trial] >= index for trial in below.advanced)


class FrontHalving(RungScheduler):
    """The scheduler of `Rungs` for Tune.

    When the searcher has no more candidates, nothing runs and no trial is to advance, the trials
    that still wait are stopped, after at least one of each rung has advanced.
    """

    def __init__(self, problem: RungProblem, ties: str, synchronous: bool) -> None:
        super().__init__(problem)
        if synchronous and problem.trials is None:
            raise ValueError("a synchronous scheduler must know how many trials there will be")
        select = partial(pareto.select_best, ties=ties)
        expected = problem.trials if synchronous else None
        self._rungs = Rungs(max(0, problem.rungs - 1), problem.reduction_factor, select, expected)
        self._paused: dict[str, Trial] = {}
        self._next: str | None = None

    def _decide(self, trial: Any, rung: int, values: Values) -> str:
        """Advance the next trial at once, in its own process."""
        self._rungs.arrive(trial.trial_id, rung, values)
        if self._choose() != trial.trial_id:
            return TrialScheduler.PAUSE
        self._rungs.advance(trial.trial_id)
        self._choose()
        return TrialScheduler.CONTINUE

    def advance(self, trial_id: str) -> None:
        super().advance(trial_id)
        if trial_id != self._next:  # the search was closing, which its journal does not record
            self._rungs.close()
        self._paused.pop(trial_id, None)
        self._decisions[trial_id, self._rungs.advance(trial_id)] = TrialScheduler.CONTINUE
        self._choose()

    def _over(self, trial: Any) -> None:
        super()._over(trial)
        self._paused.pop(trial.trial_id, None)
        self._rungs.leave(trial.trial_id)
        self._choose()

    def _choose(self) -> str | None:
        """Choose the trial that advances next. New candidates wait for it."""
        self._next = self._rungs.next()
        self.slots.promised = self._next is not None
        return self._next

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Add a trial, new or returning; one that is to wait returns as paused."""
        super().on_trial_add(tune_controller, trial)
        if self.counts(trial):
            self._rungs.rejoin(trial.trial_id)
        else:
            self._rungs.leave(trial.trial_id)
        if trial.status == Trial.PAUSED:
            self._paused[trial.trial_id] = trial
        self._choose()

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
        decision = super().on_trial_result(tune_controller, trial, result)
        if decision == TrialScheduler.PAUSE:
            self._paused[trial.trial_id] = trial
        return decision

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """Return the next trial to advance, once it has really stopped and there is room.

        Tune starts new ones by itself.
        """
        trial = self._paused.get(self._next) if self._next is not None else None
        if trial is not None and trial.status == Trial.PAUSED and not self.slots.full:
            self.advance(trial.trial_id)
            return trial
        if (
            self._next is None
            and self._paused
            and not self.slots.taken
            and tune_controller.search_alg.is_finished()
        ):
            self._close(tune_controller)
        return None

    def _close(self, tune_controller: Any) -> None:
        """End the trials that still wait, once stopped, if nothing runs and no trial advances."""
        if self._rungs.close():
            self._choose()
        elif all(trial.status == Trial.PAUSED for trial in self._paused.values()):
            for trial in list(self._paused.values()):
                tune_controller.stop_trial(trial)


@SCHEDULERS.part(
    "front",
    source="Schmucker 2021, Algorithm 1 (MO-ASHA); Li 2020, Algorithm 2; Deb 2002 (ranks, "
    "crowding)",
    knobs=(
        Knob(
            "ties",
            "choice",
            "which trials to take of a rank that does not fit as a whole",
            choices=pareto.TIES,
        ),
        Knob(
            "synchronous",
            "bool",
            "advance only when a rung is complete: decisions independent of arrival order",
        ),
    ),
)
def front(
    problem: RungProblem, *, ties: str = "epsilon_net", synchronous: bool = False
) -> RungScheduler:
    """Return the scheduler `front`."""
    return FrontHalving(problem, ties, synchronous)
