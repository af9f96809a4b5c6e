"""Multi-objective asynchronous successive halving (MO-ASHA, Schmucker 2021) over held-out loss and KV bytes a token.

Every trial stops to think at each rung: it is paused, its process goes to another trial, and it continues from its
checkpoint when it is promoted. Budgets share one bracket, since a trial with fewer bytes is never behind one with more
for its loss alone: ranks are by dominance.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from attention.axes import Knob
from orchestrator.search.schedulers.problem import SCHEDULERS, RungProblem, RungScheduler
from orchestrator.search.schedulers.rungs import Rungs
from search_spaces import pareto


class FrontHalving(RungScheduler):
    """Pauses every trial at every rung but the last, and promotes the best 1 / factor of the front by rank.

    With one objective it decides as ASHA does (Li 2020, Algorithm 2). When the searcher has no more candidates, nothing
    runs and nobody is to be promoted, the trials that still wait are stopped, at least one of each rung having gone on.
    """

    def __init__(self, problem: RungProblem, ties: str = "epsilon_net", synchronous: bool = False) -> None:
        super().__init__(problem)
        if synchronous and problem.trials is None:
            raise ValueError("a synchronous scheduler must know how many trials there will be")
        select, expected = partial(pareto.select, ties=ties), problem.trials if synchronous else None
        self._rungs = Rungs(max(0, problem.rungs - 1), problem.reduction_factor, select, expected)
        self._paused: dict[str, Any] = {}
        self._next: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_paused": {}}  # Tune's own; they are added again

    # ---- events -----------------------------------------------------------------------------------------------

    def _decide(self, trial: Any, rung: int, values: tuple[float, ...]) -> str:
        """A trial that is the next to be promoted goes on at once, in the process that it has."""
        self._rungs.tell(trial.trial_id, rung, values)
        if self._advance() != trial.trial_id:
            return TrialScheduler.PAUSE
        self._rungs.promote(trial.trial_id)
        self._advance()
        return TrialScheduler.CONTINUE

    def _standing(self, trial_id: str, rung: int) -> str:
        return TrialScheduler.CONTINUE if self._rungs.promoted(trial_id, rung) else TrialScheduler.PAUSE

    def on_trial_promoted(self, trial_id: str) -> None:
        super().on_trial_promoted(trial_id)
        self._paused.pop(trial_id, None)
        self._rungs.promote(trial_id)
        self._advance()

    def _over(self, trial: Any) -> None:
        super()._over(trial)
        self._paused.pop(trial.trial_id, None)
        self._rungs.leave(trial.trial_id)
        self._advance()

    def _advance(self) -> str | None:
        """Who is promoted next. New candidates wait for it."""
        self._next = self._rungs.next()
        self.slots.promised = int(self._next is not None)
        return self._next

    # ---- Tune's hooks -----------------------------------------------------------------------------------------

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Also of a trial that comes back: one that is to wait further, must be brought back as paused."""
        super().on_trial_add(tune_controller, trial)
        if self.counts(trial):
            self._rungs.rejoin(trial.trial_id)
        else:
            self._rungs.leave(trial.trial_id)
        if trial.status == Trial.PAUSED:
            self._paused[trial.trial_id] = trial
        self._advance()

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
        decision = super().on_trial_result(tune_controller, trial, result)
        if decision == TrialScheduler.PAUSE:
            self._paused[trial.trial_id] = trial
        return decision

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """The next promoted trial, once it has really stopped and there is room; Tune starts new ones by itself."""
        trial = self._paused.get(self._next) if self._next is not None else None
        if trial is not None and trial.status == Trial.PAUSED and not self.slots.full:
            self.on_trial_promoted(trial.trial_id)
            return trial
        if self._next is None and self._paused and not self.slots.taken and tune_controller.search_alg.is_finished():
            self._close(tune_controller)
        return None

    def _close(self, tune_controller: Any) -> None:
        """Nothing more comes, nothing runs, nobody is promoted: what still waits, once it has really stopped, ends."""
        if self._rungs.close():
            self._advance()
        elif all(trial.status == Trial.PAUSED for trial in self._paused.values()):
            for trial in list(self._paused.values()):
                tune_controller.stop_trial(trial)

    def debug_string(self) -> str:
        told = (f"{len(r.trials)} came, {len(r.promoted)} went on" for r in self._rungs.rungs)
        return "\n".join(f"rung {index}: {line}" for index, line in enumerate(told))


@SCHEDULERS.part(
    "front",
    source="Schmucker 2021, Algorithm 1 (MO-ASHA); Li 2020, Algorithm 2; Deb 2002 (ranks, crowding)",
    knobs=(
        Knob("ties", "choice", "whom to take of a rank that does not fit in whole", choices=pareto.TIES),
        Knob("synchronous", "bool", "promote only when a rung is complete: decisions without regard to order"),
    ),
)
def front(problem: RungProblem, *, ties: str = "epsilon_net", synchronous: bool = False) -> RungScheduler:
    return FrontHalving(problem, ties, synchronous)
