"""Searcher and scheduler with a journal: a killed search goes on as if nothing had happened.

Tune sees `JournaledSearch` and `JournaledScheduler`; both hand on to the search's own. What these answer is written to
the journal before Tune acts on it. A resumed search tells a fresh searcher and a fresh scheduler all that the journal
holds, gives Tune the trials that had not ended, under their old names, and then goes on asking the searcher. A trial
that starts again tells all its reports again; what was decided about them stays decided.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.search.search_generator import SearchGenerator

from orchestrator.search.schedulers import RungScheduler, SlotSearcher
from orchestrator.search.searchers import ResumableSearcher
from orchestrator.storage.journal import (
    AGAIN,
    END,
    PAUSE,
    PROMOTE,
    REPORT,
    RESUME,
    TRIAL,
    History,
    Journal,
    JournalError,
    result_of,
    unwritable,
)

logger = logging.getLogger(__name__)

LOSSES = 3
"""How often in a row a trial may lose its machines without getting any further, before it counts as failed."""
FULL = (
    r"No space left on device|File too large|Disk quota exceeded|PytorchStreamWriter failed|unexpected pos \d+ vs \d+"
)
"""What a disk that is full comes to: in Python, in Rust, and twice in torch's own files."""
LOST = re.compile(
    r"\b(RayActorError|ActorDiedError|ActorUnavailableError|NodeDiedError|WorkerCrashedError|OwnerDiedError|"
    r"ObjectLostError|WorkerHealthCheckFailedError|WorkerHealthCheckTimeoutError|RaySystemError|JournalError)\b|" + FULL
)


def lost(error: BaseException | str) -> bool:
    """Whether a trial failed for its machines' sake (process, node, disk gone) and not for its own."""
    return isinstance(error, RayActorError) or LOST.search(str(error)) is not None


def disk_failed(error: BaseException | str) -> bool:
    """Whether Tune, or a trial, has ended because a file could not be written."""
    return re.search(FULL, str(error)) is not None


class SteadyTrial(Trial):
    """A trial that starts again when it has lost its machines, but not after an error of its own."""

    _seen: tuple[int, int] = (-1, 0)  # step at the last loss, losses at that step

    def handle_error(self, exc: Any = None) -> None:
        super().handle_error(exc)
        step = int((self.last_result or {}).get("step", -1))
        self._seen = (step, self._seen[1] + 1 if step == self._seen[0] else 1)
        self._lost = lost(exc) if exc is not None else False

    def should_recover(self) -> bool:
        return self.was_lost and self._seen[1] <= LOSSES

    @property
    def was_lost(self) -> bool:
        return getattr(self, "_lost", False)


class JournaledScheduler(FIFOScheduler):
    """`inner` with its decisions in a journal; it is told of each report once."""

    def __init__(self, inner: RungScheduler, journal: Journal) -> None:
        super().__init__()
        self.inner, self._journal, self._history = inner, journal, journal.history
        self._known: set[str] = set()
        self.fresh: tuple[str, int] | None = None  # the report that Tune is dealing with, if it was not told before
        self.failed: dict[str, tuple[Any, Any]] = {}

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        return self.inner.set_search_properties(metric, mode, **spec)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """A trial that starts again is added once."""
        if trial.trial_id not in self._known:
            self._known.add(trial.trial_id)
            self.inner.on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
        self.fresh = None
        if "step" not in result:
            return TrialScheduler.CONTINUE
        key = (trial.trial_id, int(result["step"]))
        if key in self._history.decisions:
            # One that was paused and runs has been chosen to go on
            stopped = self._history.decisions[key] == TrialScheduler.STOP
            return TrialScheduler.STOP if stopped else TrialScheduler.CONTINUE
        kept = result_of(result)
        decision = self.inner.on_trial_result(tune_controller, trial, kept)
        if trial.trial_id in self.inner.copies:
            kept["copy_of"] = self.inner.copies[trial.trial_id]
        self._journal.append(REPORT, trial=trial.trial_id, result=kept, decision=decision)
        self.fresh = key
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict) -> None:
        self.inner.on_trial_complete(tune_controller, trial, result)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Whether the trial starts again is not known yet: `JournaledSearch` hands on the end."""
        self.failed[trial.trial_id] = (tune_controller, trial)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self.inner.on_trial_remove(tune_controller, trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        chosen = self.inner.choose_trial_to_run(tune_controller)
        if chosen is not None and chosen.trial_id in self._history.paused:
            self._journal.append(PROMOTE, trial=chosen.trial_id)
        return chosen

    def debug_string(self) -> str:
        return self.inner.debug_string()


class JournaledSearch(SearchGenerator):
    """Trials of an interrupted search first, then those that `searcher` suggests, while there are slots for them.

    Trials are called t0000, t0001, ... in the order of their suggestion, in this search and in one that resumes it.
    """

    def __init__(self, searcher: SlotSearcher, scheduler: JournaledScheduler, journal: Journal) -> None:
        super().__init__(searcher)
        self._scheduler, self._journal, self._history = scheduler, journal, journal.history
        self._slots = searcher.slots
        self._counter = len(self._history.configs)
        self._waiting = deque(self._history.open)

    def is_finished(self) -> bool:
        return not self._waiting and super().is_finished()

    def create_trial_if_possible(self, experiment_spec: dict) -> Trial | None:
        if self._waiting:
            paused = self._waiting[0] in self._history.paused
            if self._slots.full and not paused:
                return None
            trial_id = self._waiting.popleft()
            trial = self._trial(experiment_spec, trial_id, self._history.configs[trial_id])
            if paused:
                trial.set_status(Trial.PAUSED)
            return trial
        trial_id = f"t{self._counter:04d}"
        config = self.searcher.suggest(trial_id)
        if config == Searcher.FINISHED:
            self._finished = True
            return None
        if config is None:
            return None
        self._journal.append(TRIAL, trial=trial_id, config=config)
        self._counter += 1
        return self._trial(experiment_spec, trial_id, config)

    def _trial(self, spec: dict, trial_id: str, config: dict) -> Trial:
        from ray.tune.experiment.config_parser import _create_trial_from_spec

        own = {**spec, "config": {**spec.get("config", {}), **config}}
        trial = _create_trial_from_spec(
            own, self._parser, evaluated_params={}, experiment_tag=trial_id, trial_id=trial_id
        )
        trial.__class__ = SteadyTrial  # Tune makes trials by a function that takes no other class
        return trial

    def on_trial_result(self, trial_id: str, result: dict) -> None:
        if self._scheduler.fresh is not None and self._scheduler.fresh[0] == trial_id:
            self.searcher.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        if trial_id in self._history.ends:
            return
        told, reason = trial_id in self._history.told, None
        end: dict[str, Any] = {"trial": trial_id, "error": None, "trace": None, "lost": False, "bare": result is None}
        if error:
            from orchestrator.search.callbacks import error_of

            controller, trial = self._scheduler.failed.pop(trial_id)
            reason = error_of(trial)
            if disk_failed(reason):  # no end of its own: what is left of the search would end in the same way
                raise JournalError(f"{self._journal.path.parent}: {unwritable(reason)}")
            end |= {"error": reason, "trace": trial.error_file, "lost": getattr(trial, "was_lost", False)}
            self._scheduler.inner.on_trial_error(controller, trial)
        self._journal.append(END, **end)
        if not told:
            self.searcher.on_trial_complete(trial_id, result=result, error=error)

    def save_to_dir(self, dirpath: str, session_str: str = "") -> None:
        """Nothing: the journal is the state."""

    def has_checkpoint(self, dirpath: str) -> bool:
        return False


def replay(history: History, searcher: ResumableSearcher, scheduler: RungScheduler) -> None:
    """Tell a fresh searcher and a fresh scheduler what the journal holds, in the order in which it happened.

    Nothing runs afterwards: the open trials take their slots when Tune has them back. The searcher is asked for
    nothing: what another version of a library would suggest makes no difference.
    """
    trials: dict[str, Any] = {}
    told: set[str] = set()
    last: dict[str, dict[str, Any]] = {}
    for event in history.events:
        kind, trial_id = event["event"], event.get("trial", "")
        if kind == TRIAL:
            config = event["config"]
            searcher.add_trial(trial_id, config)
            trials[trial_id] = SimpleNamespace(trial_id=trial_id, config=config, status=Trial.RUNNING, last_result={})
            scheduler.on_trial_add(None, trials[trial_id])
        elif kind == REPORT:
            result, trial = event["result"], trials[trial_id]
            trial.last_result = last[trial_id] = result
            decision = scheduler.on_trial_result(None, trial, result)
            if decision != event["decision"]:
                logger.warning("%s: %s was decided, now it would be %s", trial_id, event["decision"], decision)
            trial.status = Trial.PAUSED if event["decision"] == PAUSE else Trial.RUNNING
            if event["decision"] != TrialScheduler.STOP:
                searcher.on_trial_result(trial_id, result)
        elif kind == PROMOTE:
            trials[trial_id].status = Trial.RUNNING
            scheduler.on_trial_promoted(trial_id)
        elif kind == END:
            _end(event, trials[trial_id], last.get(trial_id), None if trial_id in told else searcher, scheduler)
            told.add(trial_id)
    scheduler.slots.taken.clear()


def _end(
    event: dict[str, Any], trial: Any, last: dict[str, Any] | None, searcher: Searcher | None, scheduler: Any
) -> None:
    failed = event["error"] is not None
    trial.status = Trial.ERROR if failed else Trial.TERMINATED
    if failed:
        scheduler.on_trial_error(None, trial)
    else:
        scheduler.on_trial_complete(None, trial, last or {})
    if searcher is not None:
        result = None if failed or event.get("bare") else last
        searcher.on_trial_complete(trial.trial_id, result=result, error=failed)


def settle(journal: Journal) -> None:
    """Write the ends that a kill has kept from the journal, and open again what was lost for its machines' sake.

    A trial that was stopped, or has reported its last rung, has nothing left to do.
    """
    history = journal.history
    if history.interrupted:
        journal.append(RESUME)
    for trial_id in history.open:
        last = history.last(trial_id)
        over = last is not None and (
            last.get("rung") == history.rungs - 1
            or history.last_decision(trial_id) == TrialScheduler.STOP
            or bool(history.configs[trial_id].get("probe"))
        )
        if over:
            journal.append(END, trial=trial_id, error=None, trace=None, lost=False, bare=False)
    for trial_id, end in list(history.ends.items()):
        if end["lost"]:
            journal.append(AGAIN, trial=trial_id)
