"""Drives a scheduler as Tune does, in virtual time: workers, trials with known losses, pauses and advances."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from orchestrator.search.schedulers import RungScheduler

CONTINUE, PAUSE, STOP = TrialScheduler.CONTINUE, TrialScheduler.PAUSE, TrialScheduler.STOP


@dataclass(eq=False)
class FakeTrial:
    """A trial of Tune's as a scheduler sees it. `curve`: the losses at the rungs that it reports; None: it skips.
    `first`: further values of its report at rung 0."""

    trial_id: str
    curve: list[float | None]
    config: dict[str, Any]
    kv_bytes: float
    status: str = Trial.PENDING
    done: int = 0  # completed rungs
    first: dict[str, Any] = field(default_factory=dict)

    def report(self, rung: int) -> dict[str, Any]:
        result = {"loss": self.curve[rung], "kv_bytes_per_token": self.kv_bytes, "rung": rung}
        return result | (self.first if rung == 0 else {})

    def set_status(self, status: str) -> None:
        self.status = status


def trial(number: int, curve: list[float | None], budget: float = 0.5, recipe: str = "own", **config: Any) -> FakeTrial:
    settings = {"recipe": recipe, "kv_ratio": budget, "number": number, **config}
    return FakeTrial(f"t{number}", curve, settings, 8192 * budget)


@dataclass
class VirtualTune:
    """`seconds(trial, rung)`: how long a trial takes to a rung. `extra(trial, loss)`: further values of its reports.
    `jobs`: every (trial, rung) begun, in order; `events`: the calls of the scheduler."""

    scheduler: RungScheduler
    waiting: list[FakeTrial]
    workers: int = 2
    seconds: Callable[[FakeTrial, int], float] = lambda trial, rung: 1.0
    fails: frozenset[tuple[str, int]] = frozenset()
    extra: Callable[[FakeTrial, float], dict[str, float]] = lambda trial, loss: {}
    jobs: list[tuple[str, int]] = field(default_factory=list)
    decisions: dict[tuple[str, int], str] = field(default_factory=dict)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    running: list[tuple[float, int, FakeTrial, int]] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.scheduler.slots.capacity = self.workers
        self.trials, self.waiting = list(self.waiting), list(self.waiting)

    # ---- interface of Tune's controller for a scheduler -----------------------------------------------------------

    @property
    def search_alg(self) -> VirtualTune:
        return self

    def is_finished(self) -> bool:
        return not self.waiting

    def stop_trial(self, trial: FakeTrial) -> None:
        assert trial.status == Trial.PAUSED
        self.events.append(("end", trial))
        self.scheduler.on_trial_remove(self, trial)
        trial.status = Trial.TERMINATED

    # ---- the loop -------------------------------------------------------------------------------------------------

    def run(self, events: int = 10**6) -> VirtualTune:
        """Run until no trial remains, or for some reports."""
        while events > 0:
            self._start()
            if not self.running:
                if not self._start():
                    return self
                continue
            self.now, _, trial, rung = heapq.heappop(self.running)
            self._report(trial, rung)
            events -= 1
        return self

    def _start(self) -> bool:
        """Return whether anything changed: a trial advanced, was begun or stopped."""
        before = (len(self.running), len(self.jobs), sum(t.status == Trial.TERMINATED for t in self.trials))
        while (advanced := self.scheduler.choose_trial_to_run(self)) is not None:
            assert advanced.status == Trial.PAUSED
            self.events.append(("advance", advanced))
            self._begin(advanced)
        slots = self.scheduler.slots
        while self.waiting and not slots.full and not slots.promised:
            fresh = self.waiting.pop(0)
            self.events.append(("add", fresh))
            self.scheduler.on_trial_add(self, fresh)
            self._begin(fresh)
        assert len(self.running) <= self.workers
        return before != (len(self.running), len(self.jobs), sum(t.status == Trial.TERMINATED for t in self.trials))

    def _begin(self, trial: FakeTrial) -> None:
        trial.status = Trial.RUNNING
        rung = next(r for r in range(trial.done, len(trial.curve)) if trial.curve[r] is not None)
        self.jobs.append((trial.trial_id, rung))
        heapq.heappush(self.running, (self.now + self.seconds(trial, rung), len(self.jobs), trial, rung))

    def _report(self, trial: FakeTrial, rung: int) -> None:
        if (trial.trial_id, rung) in self.fails:
            self.events.append(("end", trial))
            trial.status = Trial.ERROR
            self.scheduler.on_trial_error(self, trial)
            return
        loss, trial.done = trial.curve[rung], rung + 1
        assert loss is not None
        result = trial.report(rung) | self.extra(trial, loss)
        decision = self.scheduler.on_trial_result(self, trial, result)
        self.events.append(("report", trial, result, decision))
        self.decisions[trial.trial_id, rung] = decision
        if decision == PAUSE:
            trial.status = Trial.PAUSED
        elif decision == STOP or trial.done == len(trial.curve):
            self.events.append(("end", trial))
            self.scheduler.on_trial_complete(self, trial, result)
            trial.status = Trial.TERMINATED
        else:
            self._begin(trial)


def told_again(tune: VirtualTune, scheduler: RungScheduler) -> VirtualTune:
    """A search after a kill: a fresh scheduler hears all events, then gets the unfinished trials."""
    back = VirtualTune(scheduler, tune.waiting, tune.workers, tune.seconds, tune.fails)
    back.trials, back.jobs, back.decisions, back.events = tune.trials, tune.jobs, tune.decisions, tune.events
    for kind, trial, *rest in tune.events:
        seen = FakeTrial(trial.trial_id, trial.curve, trial.config, trial.kv_bytes, Trial.RUNNING)
        if kind == "add":
            scheduler.on_trial_add(None, seen)
        elif kind == "report":
            assert scheduler.on_trial_result(None, seen, rest[0]) == rest[1]
        elif kind == "advance":
            scheduler.advance(trial.trial_id)
        else:
            scheduler.on_trial_complete(None, seen, {})
    for trial in tune.trials:
        if trial not in tune.waiting and trial.status in (Trial.RUNNING, Trial.PAUSED):
            trial.status = Trial.PAUSED if trial.status == Trial.PAUSED else Trial.PENDING
            scheduler.on_trial_add(back, trial)
            for rung in range(trial.done if trial.status == Trial.PENDING else 0):  # it reports from the beginning
                if trial.curve[rung] is not None and rung < len(trial.curve) - 1:
                    assert scheduler.on_trial_result(back, trial, trial.report(rung)) == CONTINUE
            if trial.status == Trial.PENDING:
                back._begin(trial)
    return back
